/* SPDX-License-Identifier: Apache-2.0
 *
 * Random numbers by a counter: element i of a draw is a function of (seed, rank, position), so that draws are the same
 * on every machine and with any number of threads, and that a dropout mask can be made again instead of kept. The
 * function is Philox-4x32 with ten rounds (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011).
 */
#include <math.h>
#include <string.h>

#include "tensor/create.h"
#include "tensor/loop.h"
#include "tensor/parallel.h"
#include "tensor/random.h"
#include "tensor/vector_math.h"

#define FAMILY "random"

typedef struct words {
    uint32_t at[4];
} words;

TU_INLINE words philox(uint64_t seed, uint32_t rank, uint64_t block) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = rank, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (words){ { c0, c1, c2, c3 } };
}

void tt_seed(uint64_t seed, int rank) {
    tu_thread *self = tu_self();
    self->seed = seed;
    self->seed_rank = (uint32_t)rank;
    self->counter = 0;
}

tu_random tu_random_take(int64_t count) {
    tu_thread *self = tu_self();
    tu_random state = { self->seed, self->counter, self->seed_rank };
    self->counter += (uint64_t)(count + 3) / 4 * 2; /* two blocks for four elements: f64 needs 64 bits each */
    return state;
}

/* Two 64-bit words make two elements; element i uses half i % 2 of block i / 2. */
TU_INLINE double unit(const words *w, int64_t i) {
    uint64_t bits = (uint64_t)w->at[(i & 1) * 2] << 32 | w->at[(i & 1) * 2 + 1];
    return (double)(bits >> 11) * 0x1p-53;
}

void tu_random_uniform(tu_random state, int64_t first, int64_t count, double *out) {
    words w = philox(state.seed, state.rank, state.counter + (uint64_t)first / 2);
    for (int64_t i = first; i < first + count; i++) {
        if (!(i & 1) && i != first)
            w = philox(state.seed, state.rank, state.counter + (uint64_t)i / 2);
        out[i - first] = unit(&w, i);
    }
}

/* Box and Muller's pair from the two elements of a block. */
static void normal(tu_random state, int64_t first, int64_t count, double *out) {
    for (int64_t i = first; i < first + count; i++) {
        words w = philox(state.seed, state.rank, state.counter + (uint64_t)i / 2);
        double radius = sqrt(-2.0 * log(1.0 - unit(&w, 0))), angle = 6.283185307179586 * unit(&w, 1);
        out[i - first] = radius * cos(angle);
        if (!(i & 1) && i + 1 < first + count)
            out[++i - first] = radius * sin(angle);
        else if (i & 1)
            out[i - first] = radius * sin(angle);
    }
}

/* ---- filling a tensor ---- */

typedef struct fill {
    tt_tensor *x;
    tu_random state;
    const tu_params *params;
    bool is_normal, is_integer;
} fill;

static void fill_range(void *context, int64_t begin, int64_t end) {
    const fill *f = context;
    const double *p = f->params->number;
    char *data = tu_pointer(f->x);
    for (int64_t i = begin; i < end; i += 256) {
        double values[256];
        int64_t count = end - i < 256 ? end - i : 256;
        if (f->is_normal)
            normal(f->state, i, count, values);
        else
            tu_random_uniform(f->state, i, count, values);
        for (int64_t j = 0; j < count; j++) {
            values[j] = f->is_normal ? p[0] + p[1] * values[j] : p[0] + (p[1] - p[0]) * values[j];
            if (f->is_integer)
                values[j] = floor(values[j]);
        }
        /* Rounding to a narrow type must not reach the upper end. */
        if (!f->is_normal && !f->is_integer && f->x->dtype != TUTTI_F64)
            for (int64_t j = 0; j < count; j++) {
                double step = f->x->dtype == TUTTI_F32    ? 0x1p-24
                              : f->x->dtype == TUTTI_F16  ? 0x1p-11
                              : f->x->dtype == TUTTI_BF16 ? 0x1p-8
                                                          : 0x1p-3;
                double share = (values[j] - p[0]) / (p[1] - p[0]);
                values[j] = p[0] + (p[1] - p[0]) * (floor(share / step) * step);
            }
        /* Converting known dtypes cannot fail. */
        tutti_status status =
            tutti_convert(values, TUTTI_F64, data + i * tu_dtype_bytes[f->x->dtype], f->x->dtype, (size_t)count);
        (void)status;
    }
}

static tutti_status fill_random(tu_call *call, bool is_normal, bool is_integer) {
    tt_tensor *x = call->outputs[0], *dense = x;
    if (!(x->flags & TU_CONTIGUOUS)) {
        tu_shape shape = tu_shape_of(x);
        tutti_status status = tu_shape_contiguous(call->operator->name, &shape);
        if (status != TUTTI_OK)
            return status;
        if ((dense = tu_tensor_new(&shape)) == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    fill f = { dense, tu_random_take(x->numel), &call->params, is_normal, is_integer };
    if (tu_is_complex(x->dtype)) {
        tu_tensor_drop(dense == x ? NULL : dense);
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tutti_dtype_name(x->dtype));
    }
    tu_parallel(x->numel, 65536, fill_range, &f);
    if (dense != x) {
        tu_copy_tensor(x, dense);
        tu_tensor_drop(dense);
    }
    return TUTTI_OK;
}

static tutti_status uniform_cpu(tu_call *call) {
    return fill_random(call, false, false);
}
static tutti_status normal_cpu(tu_call *call) {
    return fill_random(call, true, false);
}
static tutti_status integer_cpu(tu_call *call) {
    return fill_random(call, false, true);
}

/* Their values cannot be compared with a reference, so that the table test sees them times zero. */
static tt_options where_of(tt_tensor *x) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = tt_device_of(x);
    return options;
}
static tt_tensor *rand_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n));
    tt_options options = where_of(x);
    return tt_mul_scalar(tt_rand(tt_shape(s->n, 3), TUTTI_F64, &options), 0);
}
static tt_tensor *randn_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n));
    tt_options options = where_of(x);
    return tt_mul_scalar(tt_randn(tt_shape(s->n, 3), TUTTI_F64, &options), 0);
}
static tt_tensor *randint_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n));
    tt_options options = where_of(x);
    return tt_mul_scalar(tt_randint(2, 9, tt_shape(s->n, 3), TUTTI_I64, &options), 0);
}
TU_OPERATOR(rand) = { .name = "rand",
                      .schema = "rand(shape, dtype, options) -> tensor",
                      .summary = "uniform in [0, 1)",
                      .family = FAMILY,
                      .flags = TU_IMPURE,
                      .shape = tu_create_shape,
                      .cpu = uniform_cpu,
                      .sample = rand_sample };
TU_OPERATOR(randn) = { .name = "randn",
                       .schema = "randn(shape, dtype, options) -> tensor",
                       .summary = "normal, mean 0 and variance 1",
                       .family = FAMILY,
                       .flags = TU_IMPURE,
                       .shape = tu_create_shape,
                       .cpu = normal_cpu,
                       .sample = randn_sample };
TU_OPERATOR(randint) = { .name = "randint",
                         .schema = "randint(low, high, shape, dtype, options) -> tensor",
                         .summary = "whole numbers in [low, high)",
                         .family = FAMILY,
                         .flags = TU_IMPURE,
                         .shape = tu_create_shape,
                         .cpu = integer_cpu,
                         .sample = randint_sample };

static tt_tensor *draw(const tu_operator *operator, double a, double b, tt_dims shape, tutti_dtype dtype,
                       const tt_options *options) {
    tu_call call;
    tu_call_init(&call, operator, 0, NULL);
    call.params.number[0] = a;
    call.params.number[1] = b;
    return tu_create(&call, shape, dtype, options);
}

tt_tensor *tt_rand(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    return draw(&tu_operator_rand, 0, 1, shape, dtype, options);
}

tt_tensor *tt_randn(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    return draw(&tu_operator_randn, 0, 1, shape, dtype, options);
}

tt_tensor *tt_randint(int64_t low, int64_t high, tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    if (high <= low) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "randint: [%lld, %lld) holds no number", (long long)low, (long long)high);
        return NULL;
    }
    return draw(&tu_operator_randint, (double)low, (double)high, shape, dtype, options);
}

/* ---- in place ---- */

static void no_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_zeros_like(gradient->grads[0]);
}
static tt_tensor *uniform_sample(tu_sampler *s) {
    return tt_mul_scalar(tt_uniform_(tt_zeros_like(tu_normal(s, tt_shape(s->n, 3))), 1, 2), 0);
}
static tt_tensor *normal_sample(tu_sampler *s) {
    return tt_mul_scalar(tt_normal_(tt_zeros_like(tu_normal(s, tt_shape(s->n, 3))), 1, 2), 0);
}
TU_OPERATOR(uniform) = { .name = "uniform",
                         .schema = "uniform(x, low, high) -> tensor",
                         .summary = "uniform in [low, high), in x's shape",
                         .family = FAMILY,
                         .flags = TU_IMPURE | TU_HAS_IN_PLACE,
                         .shape = tu_shape_like_first,
                         .cpu = uniform_cpu,
                         .gradient = no_gradient,
                         .sample = uniform_sample };
TU_OPERATOR(normal) = { .name = "normal",
                        .schema = "normal(x, mean, deviation) -> tensor",
                        .summary = "normal, in x's shape",
                        .family = FAMILY,
                        .flags = TU_IMPURE | TU_HAS_IN_PLACE,
                        .shape = tu_shape_like_first,
                        .cpu = normal_cpu,
                        .gradient = no_gradient,
                        .sample = normal_sample };

static tt_tensor *redraw(const tu_operator *operator, tt_tensor * x, double a, double b) {
    tu_call call;
    tu_call_init(&call, operator, 1, &x);
    call.params.number[0] = a;
    call.params.number[1] = b;
    call.in_place = true;
    return tu_run(&call);
}

tt_tensor *tt_uniform_(tt_tensor *x, double low, double high) {
    return redraw(&tu_operator_uniform, x, low, high);
}

tt_tensor *tt_normal_(tt_tensor *x, double mean, double deviation) {
    return redraw(&tu_operator_normal, x, mean, deviation);
}

/* ---- dropout ---- */

static tutti_status dropout_shape(tu_call *call) {
    double p = call->params.number[0];
    if (!(p >= 0 && p < 1))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "p is %g and must be in [0, 1)", p);
    if (!tu_is_float(call->inputs[0]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(call->inputs[0]));
    return tu_shape_like_first(call);
}

/* The mask is drawn, as a tensor of 0 and 1/(1-p), from the state in the parameters: forward and backward draw the
 * same. */
static tutti_status dropout_cpu(tu_call *call) {
    tt_tensor *out = call->outputs[0];
    const int64_t *at = call->params.integer;
    double p = call->params.number[0], kept = 1 / (1 - p);
    tu_random state = { (uint64_t)at[0], (uint64_t)at[1], (uint32_t)at[2] };
    tu_copy_tensor(out, call->inputs[0]);
    char *data = tu_pointer(out);
    for (int64_t i = 0; i < out->numel; i += 256) {
        double draws[256], values[256];
        int64_t count = out->numel - i < 256 ? out->numel - i : 256;
        char *piece = data + i * tu_dtype_bytes[out->dtype];
        tu_random_uniform(state, i, count, draws);
        tutti_status status = tutti_convert(piece, out->dtype, values, TUTTI_F64, (size_t)count);
        for (int64_t j = 0; j < count; j++)
            values[j] = draws[j] < p ? 0 : values[j] * kept;
        if (status == TUTTI_OK)
            status = tutti_convert(values, TUTTI_F64, piece, out->dtype, (size_t)count);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tt_tensor *dropout_with(tt_tensor *x, double p, tu_random state);
static void dropout_gradient(tu_gradient *gradient) {
    const int64_t *at = gradient->params->integer;
    gradient->results[0] = dropout_with(gradient->grads[0], gradient->params->number[0],
                                        (tu_random){ (uint64_t)at[0], (uint64_t)at[1], (uint32_t)at[2] });
}
static tt_tensor *dropout_sample(tu_sampler *s) {
    tt_seed(7, 0);
    return tt_dropout(tu_normal(s, tt_shape(s->n, 5)), 0.4);
}
TU_OPERATOR(dropout) = { .name = "dropout",
                         .schema = "dropout(x, p) -> tensor",
                         .summary = "zeroes a share p, divides the rest by 1 - p",
                         .family = FAMILY,
                         .flags = TU_IMPURE,
                         .shape = dropout_shape,
                         .cpu = dropout_cpu,
                         .gradient = dropout_gradient,
                         .sample = dropout_sample };

static tt_tensor *dropout_with(tt_tensor *x, double p, tu_random state) {
    tu_call call;
    tu_call_init(&call, &tu_operator_dropout, 1, &x);
    call.params.number[0] = p;
    call.params.integer[0] = (int64_t)state.seed;
    call.params.integer[1] = (int64_t)state.counter;
    call.params.integer[2] = state.rank;
    return tu_run(&call);
}

tt_tensor *tt_dropout(tt_tensor *x, double p) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("dropout", "x", x)) != TUTTI_OK)
        return NULL;
    return dropout_with(x, p, tu_random_take(x->numel));
}
