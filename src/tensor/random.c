/* SPDX-License-Identifier: Apache-2.0
 *
 * Random numbers by a counter: element i of a draw is a function of (seed, rank, position), so that draws are the same
 * on every machine, device and with any number of threads, and that a dropout mask can be made again instead of kept.
 * The function is in philox.h.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/kernel/kernels.h"
#include "tensor/launch_random.h"
#include "tensor/loop.h"
#include "tensor/noting.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/philox.h"
#include "tensor/tape.h"

/* ---- steps that are noted and run again ---- */

/* A new seed, a draw's state, or the words of a draw's kernel, at each run. */
typedef struct noted_draw {
    tu_noted_act act; /* first */
    int64_t seed, rank;
    tt_tensor *state; /* held; NULL: of a seed */
    uint64_t blocks;  /* by which the generator moves on */
    void *words;      /* where the state of a kernel goes */
} noted_draw;

static void end_draw(tu_noted_act *act) {
    tu_tensor_drop(((noted_draw *)act)->state);
    free(act);
}

/* Nothing where the thread notes no step. */
static tutti_status note_draw(tutti_status (*run)(tu_noted_act *act), noted_draw draw) {
    noted_draw *made = malloc(sizeof *made);
    if (made == NULL)
        return tu_error_memory("a draw of a replay", sizeof *made);
    *made = draw;
    made->act = (tu_noted_act){ .run = run, .end = end_draw };
    tu_tensor_hold(made->state);
    tu_noted_add(tu_noting_here(), &made->act);
    return TUTTI_OK;
}

static void seed_with(int64_t seed, int64_t rank) {
    tu_thread *self = tu_self();
    self->seed = (uint64_t)seed;
    self->seed_rank = (uint32_t)rank;
    self->counter = 0;
}

static tutti_status seed_again(tu_noted_act *act) {
    const noted_draw *draw = (const noted_draw *)act;
    seed_with(draw->seed, draw->rank);
    return TUTTI_OK;
}

static void take_state(int64_t *at, uint64_t blocks) {
    tu_thread *self = tu_self();
    at[0] = (int64_t)self->seed;
    at[1] = (int64_t)self->counter;
    at[2] = self->seed_rank;
    self->counter += blocks;
}

static tutti_status take_state_again(tu_noted_act *act) {
    const noted_draw *draw = (const noted_draw *)act;
    take_state(tu_pointer(draw->state), draw->blocks);
    return TUTTI_OK;
}

static tutti_status bring_words(tu_noted_act *act) {
    const noted_draw *draw = (const noted_draw *)act;
    memcpy(draw->words, tu_pointer(draw->state), 3 * sizeof(int64_t));
    return TUTTI_OK;
}

/* Where the step is noted, the kernel finds the state in memory. */
static tutti_status find_state(tu_device *device, tt_tensor *state, tu_launch_drawn *flat) {
    tu_noted *noted = tu_noting(device);
    if (noted == NULL)
        return TUTTI_OK;
    noted_draw draw = { .state = state, .words = tu_noted_room(noted, 3 * sizeof(int64_t), &flat->state) };
    return draw.words != NULL ? note_draw(bring_words, draw) : TUTTI_ERROR_MEMORY;
}

tutti_status tu_seed_cpu(tu_call *call) {
    const tu_seed_attributes *attributes = call->attributes;
    seed_with(attributes->seed, attributes->rank);
    if (tu_noting_here() == NULL)
        return TUTTI_OK;
    return note_draw(seed_again, (noted_draw){ .seed = attributes->seed, .rank = attributes->rank });
}

void tt_seed(uint64_t seed, int rank) {
    tu_seed((int64_t)seed, rank, NULL);
}

/* ---- the state, as a tensor of i64: seed, position, rank ---- */

tutti_status tu_random_state_shape(tu_call *call) {
    const tu_random_state_attributes *attributes = call->attributes;
    if (attributes->count < 0 || attributes->group < 1)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "count is %lld and group is %lld",
                             (long long)attributes->count, (long long)attributes->group);
    return tu_shape_from("random_state", tt_shape(3), TUTTI_I64, TUTTI_CPU, &call->results[0]);
}

tutti_status tu_random_state_cpu(tu_call *call) {
    const tu_random_state_attributes *attributes = call->attributes;
    uint64_t group = (uint64_t)attributes->group, count = ((uint64_t)attributes->count + group - 1) / group * group;
    uint64_t blocks = (count + 3) / 4 * 2; /* two for four elements: f64 needs 64 bits each */
    take_state(tu_pointer(call->outputs[0]), blocks);
    if (tu_noting_here() == NULL)
        return TUTTI_OK;
    return note_draw(take_state_again, (noted_draw){ .state = call->outputs[0], .blocks = blocks });
}

tt_tensor *tu_sample_state(void) {
    tt_seed(7, 0);
    return tu_random_state(1, 1);
}

/* On the device of a made input, as the table test expects of results. */
tt_tensor *tu_random_state_sample(tu_sampler *sampler) {
    tt_tensor *x = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size), 0);
    return tu_dropout(x, tu_sample_state(), 0.5);
}

/* ---- states that are kept and given out again ---- */

void tu_tape_begin(tu_tape *tape, bool replays) {
    tape->outer = tu_self()->tape;
    tape->replays = replays;
    tape->next = 0;
    tu_self()->tape = tape;
}

void tu_tape_end(tu_tape *tape) {
    tu_self()->tape = tape->outer;
}

void tu_tape_free(tu_tape *tape) {
    for (size_t i = 0; i < tape->count; i++)
        tu_tensor_drop(tape->states[i]);
    free(tape->states);
    *tape = (tu_tape){ .outer = NULL };
}

static void keep_state(tu_tape *tape, tt_tensor *state) {
    if (tape->count == tape->capacity) {
        size_t larger = tape->capacity * 2 + 8;
        tt_tensor **states = realloc(tape->states, larger * sizeof(tt_tensor *));
        if (states == NULL) {
            tu_pending_take(tu_error_memory("random states", larger * sizeof(tt_tensor *)));
            return;
        }
        tape->states = states;
        tape->capacity = larger;
    }
    tape->states[tape->count++] = tu_tensor_hold(state);
}

static tt_tensor *next_state(tu_tape *tape) {
    if (tape->next < tape->count)
        return tape->states[tape->next++];
    tu_fail(TUTTI_ERROR_STATE, "checkpoint: the region draws random numbers %zu times, and drew %zu times before",
            tape->next + 1, tape->count);
    return NULL;
}

/* For a draw of so many elements, in groups of so many; a meta tensor draws nothing. The number of elements itself is
 * the attribute, and not what it is rounded to: where a size is variable, it follows that size. The innermost tape that
 * replays has the state; those inside of it keep it too. */
static tt_tensor *state_for(tutti_device device, int64_t count, int64_t group) {
    tu_tape *from = tu_self()->tape;
    while (from != NULL && !from->replays)
        from = from->outer;
    tt_tensor *state = from != NULL ? next_state(from) : tu_random_state(device == TUTTI_META ? 0 : count, group);
    for (tu_tape *tape = tu_self()->tape; tape != from && state != NULL; tape = tape->outer)
        keep_state(tape, state);
    return state;
}

static tutti_status check_state(const tu_call *call, const tt_tensor *state) {
    if (state->dtype == TUTTI_I64 && state->ndim == 1 && state->numel == 3)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "state is %s and must be what random_state gives",
                         tu_describe(state));
}

typedef struct tu_random {
    uint64_t seed, counter;
    uint32_t rank;
} tu_random;

static tu_random read_state(const tt_tensor *state) {
    const int64_t *at = tu_pointer(state);
    return (tu_random){ (uint64_t)at[0], (uint64_t)at[1], (uint32_t)at[2] };
}

/* ---- numbers from it ---- */

/* Elements first.. of the draw, in [0, 1). */
static void uniform(tu_random state, int64_t first, int64_t count, double *out) {
    tu_words block = tu_philox(state.seed, state.rank, state.counter + (uint64_t)first / 2);
    for (int64_t i = first; i < first + count; i++) {
        if (!(i & 1) && i != first)
            block = tu_philox(state.seed, state.rank, state.counter + (uint64_t)i / 2);
        out[i - first] = tu_unit(&block, i);
    }
}

/* Box and Muller's pair from the two elements of a block, some blocks at a time. */
static void normal(tu_random state, int64_t first, int64_t count, double *out) {
    enum {
        BLOCKS = 64
    };
    double even[BLOCKS], odd[BLOCKS];
    const tu_tensor_kernels *kernels = tu_tensor_kernels_get();
    for (int64_t block = first / 2, end = (first + count + 1) / 2; block < end; block += BLOCKS) {
        int64_t blocks = end - block < BLOCKS ? end - block : BLOCKS;
        for (int64_t i = 0; i < blocks; i++) {
            tu_words at = tu_philox(state.seed, state.rank, state.counter + (uint64_t)(block + i));
            even[i] = tu_unit(&at, 0);
            odd[i] = tu_unit(&at, 1);
        }
        kernels->normals(even, odd, blocks);
        for (int64_t i = 0; i < blocks; i++) {
            int64_t to = 2 * (block + i) - first;
            if (to >= 0)
                out[to] = even[i];
            if (to + 1 >= 0 && to + 1 < count)
                out[to + 1] = odd[i];
        }
    }
}

/* ---- filling a tensor ---- */

typedef struct fill {
    tt_tensor *x, *from; /* the state, as a tensor */
    tu_random state;
    tu_distribution kind;
    double first, second;
} fill;

static void fill_piece(const fill *draw, int64_t begin, int64_t count, double *values) {
    if (draw->kind == TU_NORMAL)
        normal(draw->state, begin, count, values);
    else
        uniform(draw->state, begin, count, values);
    for (int64_t i = 0; i < count; i++)
        values[i] = tu_distribute(values[i], (int)draw->kind, draw->first, draw->second, (int)draw->x->dtype);
}

static void fill_range(void *context, int64_t begin, int64_t end) {
    const fill *draw = context;
    char *data = tu_pointer(draw->x);
    for (int64_t i = begin; i < end; i += 256) {
        double values[256];
        int64_t count = end - i < 256 ? end - i : 256;
        fill_piece(draw, i, count, values);
        /* Converting known dtypes cannot fail. */
        tutti_status status =
            tutti_convert(values, TUTTI_F64, data + i * tu_dtype_bytes[draw->x->dtype], draw->x->dtype, (size_t)count);
        (void)status;
    }
}

static tutti_status fill_on_device(const fill *draw) {
    const tt_tensor *x = draw->x;
    tu_launch_drawn flat = { .draw = { .to = tu_place_of(tu_pointer(x)),
                                       .total = x->numel,
                                       .seed = draw->state.seed,
                                       .counter = draw->state.counter,
                                       .first = draw->first,
                                       .second = draw->second,
                                       .rank = draw->state.rank,
                                       .dtype = x->dtype,
                                       .distribution = (int32_t)draw->kind } };
    tutti_status status = find_state(tu_device_of(x), draw->from, &flat);
    if (status != TUTTI_OK)
        return status;
    bool plain = draw->kind == TU_NORMAL && x->dtype == TUTTI_F32 && flat.draw.to % 8 == 0;
    return tu_device_launch(tu_device_of(x), plain ? "kernel_normal_f32" : "kernel_random", (x->numel + 1) / 2,
                            TU_DEVICE_THREADS, &flat);
}

static tutti_status fill_random(tu_call *call, tt_tensor *state, tu_distribution kind, double first, double second) {
    tt_tensor *x = call->outputs[0], *dense = x;
    if (!(x->flags & TU_CONTIGUOUS)) {
        tu_shape shape = tu_shape_of(x);
        tutti_status status = tu_shape_contiguous(call->entry->name, &shape);
        if (status != TUTTI_OK)
            return status;
        if ((dense = tu_tensor_new(&shape)) == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    fill draw = { dense, state, read_state(state), kind, first, second };
    tutti_status status = TUTTI_OK;
    if (tu_on_device(x))
        status = fill_on_device(&draw);
    else
        tu_parallel(x->numel, 65536, fill_range, &draw);
    if (dense != x) {
        if (status == TUTTI_OK)
            status = tu_copy_tensor(x, dense);
        tu_tensor_drop(dense);
    }
    return status;
}

/* ---- new tensors ---- */

static tutti_status drawn_shape(tu_call *call, tt_dims shape, tutti_dtype dtype, tutti_device device) {
    if (tu_is_complex(dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tutti_dtype_name(dtype));
    tutti_status status = check_state(call, call->inputs[0]);
    return status == TUTTI_OK ? tu_create_shape(call, shape, dtype, device) : status;
}

tutti_status tu_rand_shape(tu_call *call) { /* and randn's, whose attributes are the same */
    const tu_rand_attributes *attributes = call->attributes;
    return drawn_shape(call, attributes->shape, attributes->dtype, attributes->device);
}

tutti_status tu_rand_everywhere(tu_call *call) {
    return fill_random(call, call->inputs[0], TU_UNIFORM, 0, 1);
}

tutti_status tu_randn_everywhere(tu_call *call) {
    return fill_random(call, call->inputs[0], TU_NORMAL, 0, 1);
}

tutti_status tu_randint_shape(tu_call *call) {
    const tu_randint_attributes *attributes = call->attributes;
    if (attributes->high <= attributes->low)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "[%lld, %lld) holds no number", (long long)attributes->low,
                             (long long)attributes->high);
    return drawn_shape(call, attributes->shape, attributes->dtype, attributes->device);
}

tutti_status tu_randint_everywhere(tu_call *call) {
    const tu_randint_attributes *attributes = call->attributes;
    return fill_random(call, call->inputs[0], TU_WHOLE, (double)attributes->low, (double)attributes->high);
}

/* How many elements a shape has, for the generator; a wrong shape is the shape rule's to refuse. */
static int64_t elements(tt_dims shape) {
    int64_t count = 1;
    for (int i = 0; i < shape.count && i < TT_MAX_DIMS; i++)
        if (shape.at[i] < 0 || __builtin_mul_overflow(count, shape.at[i], &count))
            return 0;
    return count;
}

tt_tensor *tt_rand(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    if (!tu_create_begin(options, &full))
        return NULL;
    return tu_create_end(tu_rand(state_for(full.device, elements(shape), 1), shape, dtype, full.device), &full);
}

tt_tensor *tt_randn(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    if (!tu_create_begin(options, &full))
        return NULL;
    return tu_create_end(tu_randn(state_for(full.device, elements(shape), 1), shape, dtype, full.device), &full);
}

tt_tensor *tt_randint(int64_t low, int64_t high, tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    if (!tu_create_begin(options, &full))
        return NULL;
    tt_tensor *state = state_for(full.device, elements(shape), 1);
    return tu_create_end(tu_randint(state, low, high, shape, dtype, full.device), &full);
}

/* ---- in place ---- */

tutti_status tu_redraw_shape(tu_call *call) {
    if (tu_is_complex(call->inputs[0]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(call->inputs[0]));
    tutti_status status = check_state(call, call->inputs[1]);
    return status == TUTTI_OK ? tu_shape_like_first(call) : status;
}

tutti_status tu_uniform_everywhere(tu_call *call) {
    const tu_uniform_attributes *attributes = call->attributes;
    return fill_random(call, call->inputs[1], TU_UNIFORM, attributes->low, attributes->high);
}

tutti_status tu_normal_everywhere(tu_call *call) {
    const tu_normal_attributes *attributes = call->attributes;
    return fill_random(call, call->inputs[1], TU_NORMAL, attributes->mean, attributes->deviation);
}

/* The state for a draw in x's shape; NULL with the pending error set where x is none. */
static tt_tensor *state_like(const char *who, const tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK)
        return NULL;
    return state_for(x->device, x->numel, 1);
}

tt_tensor *tt_uniform_(tt_tensor *x, double low, double high) {
    tt_tensor *state = state_like("uniform_", x);
    return state != NULL ? tu_uniform_(x, state, low, high) : NULL;
}

tt_tensor *tt_normal_(tt_tensor *x, double mean, double deviation) {
    tt_tensor *state = state_like("normal_", x);
    return state != NULL ? tu_normal_(x, state, mean, deviation) : NULL;
}

/* ---- dropout ---- */

tutti_status tu_dropout_shape(tu_call *call) {
    const tu_dropout_attributes *attributes = call->attributes;
    if (!(attributes->share >= 0 && attributes->share < 1))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "share is %g and must be in [0, 1)", attributes->share);
    if (!tu_is_float(call->inputs[0]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(call->inputs[0]));
    tutti_status status = check_state(call, call->inputs[1]);
    return status == TUTTI_OK ? tu_shape_like_first(call) : status;
}

typedef struct dropout_job {
    tu_dropout_draw draw;
    tutti_dtype dtype;
    int64_t count;
} dropout_job;

/* Narrow floats are computed in f32, some groups at a time. */
static void drop_narrow(const dropout_job *job, int64_t begin, int64_t end) {
    size_t size = tu_dtype_bytes[job->dtype];
    for (int64_t i = begin; i < end; i += 256) {
        float values[256];
        int64_t count = end - i < 256 ? end - i : 256;
        tu_dropout_draw draw = job->draw;
        draw.x = draw.out = values;
        draw.block += (uint64_t)(i / 4);
        /* Converting known dtypes cannot fail. */
        tutti_status status =
            tutti_convert((const char *)job->draw.x + (size_t)i * size, job->dtype, values, TUTTI_F32, (size_t)count);
        tu_tensor_kernels_get()->dropout[TU_F32](&draw, 0, count);
        status = tu_convert(values, TUTTI_F32, (char *)job->draw.out + (size_t)i * size, job->dtype, (size_t)count);
        (void)status;
    }
}

static void drop_groups(void *context, int64_t begin, int64_t end) {
    const dropout_job *job = context;
    int64_t first = begin * TU_DROPOUT_GROUP,
            last = end * TU_DROPOUT_GROUP < job->count ? end * TU_DROPOUT_GROUP : job->count;
    if (job->dtype == TUTTI_F32 || job->dtype == TUTTI_F64)
        tu_tensor_kernels_get()->dropout[tu_float_index(job->dtype)](&job->draw, first, last);
    else
        drop_narrow(job, first, last);
}

/* The mask, of 0 and 1/(1-p), is drawn from the state: forward and backward draw the same. */
tutti_status tu_dropout_everywhere(tu_call *call) {
    const tu_dropout_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0];
    tu_random state = read_state(call->inputs[1]);
    if (!(x->flags & TU_CONTIGUOUS)) {
        tutti_status status = tu_copy_tensor(out, x);
        if (status != TUTTI_OK)
            return status;
        x = out;
    }
    if (tu_on_device(x)) {
        tu_launch_drawn flat = { .draw = { .from = tu_place_of(tu_pointer(x)),
                                           .to = tu_place_of(tu_pointer(out)),
                                           .total = out->numel,
                                           .seed = state.seed,
                                           .counter = state.counter,
                                           .first = 1 / (1 - attributes->share),
                                           .rank = state.rank,
                                           .limit = (uint32_t)(attributes->share * 0x1p32),
                                           .dtype = out->dtype } };
        tutti_status status = find_state(tu_device_of(x), call->inputs[1], &flat);
        if (status != TUTTI_OK)
            return status;
        return tu_device_launch(tu_device_of(x), out->dtype == TUTTI_F64 ? "kernel_dropout_f64" : "kernel_dropout_f32",
                                (out->numel + 63) / 64 * 16, TU_DEVICE_THREADS, &flat);
    }
    dropout_job job = { { tu_pointer(x), tu_pointer(out), state.seed, state.counter, state.rank,
                          (uint32_t)(attributes->share * 0x1p32), 1 / (1 - attributes->share) },
                        out->dtype,
                        out->numel };
    tu_parallel((out->numel + TU_DROPOUT_GROUP - 1) / TU_DROPOUT_GROUP, 512, drop_groups, &job);
    return TUTTI_OK;
}

/* Whole groups are drawn, so that the next draw begins behind them. */
tt_tensor *tt_dropout(tt_tensor *x, double share) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("dropout", "x", x)) != TUTTI_OK)
        return NULL;
    tt_tensor *state = state_for(x->device, x->numel, TU_DROPOUT_GROUP);
    return state != NULL ? tu_dropout(x, state, share) : NULL;
}
