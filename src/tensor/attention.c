/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled dot-product attention, forward and backward, one head per thread at a time; and rotary position embedding.
 */
#include <math.h>
#include <string.h>

#include "tensor/kernel/elementary.h"
#include "tensor/kernel/kernels.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

#define BLOCK 64 /* query rows at a time */

/* Where the heads of a tensor (…, rows, columns) lie, in elements: its leading dimensions by strides. */
typedef struct layout {
    int ndim;
    int64_t sizes[TT_MAX_DIMS], strides[TT_MAX_DIMS];
    int64_t row;
} layout;

static layout layout_of(const tt_tensor *x) {
    layout l = { .ndim = x->ndim - 2, .row = x->strides[x->ndim - 2] };
    memcpy(l.sizes, x->sizes, sizeof l.sizes);
    memcpy(l.strides, x->strides, sizeof l.strides);
    return l;
}

static int64_t head_offset(const layout *l, int64_t head) {
    int64_t offset = 0;
    for (int i = l->ndim - 1; i >= 0; i--) {
        offset += head % l->sizes[i] * l->strides[i];
        head /= l->sizes[i];
    }
    return offset;
}

typedef struct heads {
    const tu_tensor_kernels *kernels;
    const void *q, *k, *v, *g;
    layout of_q, of_k, of_v, of_g;
    void *o, *lse, *dq, *dk, *dv;
    int64_t queries, keys, depth, width; /* width: of v and o */
    bool causal, backward;
    int type; /* TU_F32 or TU_F64 */
    double scale;
    _Atomic bool out_of_memory;
} heads;

/* ---- one head ----
 *
 * A head is worked on in blocks of query rows, so that the scores of a block stay in the second-level cache. Products
 * are by our own kernel and not by the BLAS: they run on several threads at once and are small, and their order is
 * fixed. */

static size_t element(const heads *h) {
    return h->type == TU_F32 ? sizeof(float) : sizeof(double);
}
/* `count` elements behind `base`; of what is only read too. */
static void *at(const heads *h, const void *base, int64_t count) {
    return (char *)base + count * (int64_t)element(h);
}
static double read_one(const heads *h, const void *base, int64_t index) {
    return h->type == TU_F32 ? (double)((const float *)base)[index] : ((const double *)base)[index];
}
static void write_one(const heads *h, void *base, int64_t index, double value) {
    if (h->type == TU_F32)
        ((float *)base)[index] = (float)value;
    else
        ((double *)base)[index] = value;
}
static double rounded(const heads *h, double value) {
    return h->type == TU_F32 ? (double)(float)value : value;
}
static void clear(const heads *h, void *base, int64_t from, int64_t to) {
    if (from < to)
        memset(at(h, base, from), 0, (size_t)(to - from) * element(h));
}

typedef struct matrix {
    const void *data;
    int64_t row, column;
} matrix;

static void pack(const heads *h, int64_t k, int64_t n, matrix b, void *packed) {
    h->kernels->pack[h->type](k, n, b.data, b.row, b.column, packed);
}
/* b has packed_k rows, of which the first k count. */
static void product(const heads *h, int64_t m, int64_t n, int64_t k, matrix a, const void *packed, int64_t packed_k,
                    void *c, int64_t ldc, bool add) {
    h->kernels->product[h->type](m, n, k, a.data, a.row, a.column, packed, packed_k, c, ldc, add);
}
static int64_t packed_size(const heads *h, int64_t k, int64_t n) {
    return tu_packed_size(h->kernels, h->type, k, n);
}

/* How many keys the rows [first, first + count) see at most. */
static int64_t seen_by(const heads *h, int64_t first, int64_t count) {
    return h->causal && first + count < h->keys ? first + count : h->keys;
}

/* The scores of one row become probabilities; returns the logarithm of their sum. */
static double normalise(const heads *h, void *row, int64_t visible) {
    const tu_score_kernels *scores = &h->kernels->scores[h->type];
    double scale = h->scale;
    if (scale < 0) { /* so that the largest product is that of the largest score */
        scores->multiply(row, visible, -1);
        scale = -scale;
    }
    double top = rounded(h, scores->largest(row, visible) * scale);
    double sum = scores->exponentials(row, visible, scale, top);
    scores->multiply(row, visible, 1 / sum);
    return top + scores->log(sum);
}

static void forward_head(const heads *h, int64_t head, void *buffer) {
    const void *q = at(h, h->q, head_offset(&h->of_q, head)), *k = at(h, h->k, head_offset(&h->of_k, head)),
               *v = at(h, h->v, head_offset(&h->of_v, head));
    void *o = at(h, h->o, head * h->queries * h->width), *lse = at(h, h->lse, head * h->queries);
    void *turned_k = buffer, *packed_v = at(h, turned_k, packed_size(h, h->depth, h->keys)),
         *scores = at(h, packed_v, packed_size(h, h->keys, h->width));
    pack(h, h->depth, h->keys, (matrix){ k, 1, h->of_k.row }, turned_k);
    pack(h, h->keys, h->width, (matrix){ v, h->of_v.row, 1 }, packed_v);
    for (int64_t first = 0; first < h->queries; first += BLOCK) {
        int64_t count = h->queries - first < BLOCK ? h->queries - first : BLOCK, seen = seen_by(h, first, count);
        matrix of_q = { at(h, q, first * h->of_q.row), h->of_q.row, 1 }, of_scores = { scores, h->keys, 1 };
        product(h, count, seen, h->depth, of_q, turned_k, h->depth, scores, h->keys, false);
        for (int64_t r = 0; r < count; r++) {
            int64_t visible = seen_by(h, first + r, 1);
            void *row = at(h, scores, r * h->keys);
            write_one(h, lse, first + r, normalise(h, row, visible));
            clear(h, row, visible, seen);
        }
        product(h, count, h->width, seen, of_scores, packed_v, h->keys, at(h, o, first * h->width), h->width, false);
    }
}

/* Of one block of rows: p the probabilities, dp their gradients, which become those of the scores. */
static void backward_rows(const heads *h, int64_t first, int64_t count, int64_t seen, const void *g, const void *o,
                          const void *lse, void *p, void *dp) {
    const tu_score_kernels *scores = &h->kernels->scores[h->type];
    for (int64_t r = 0; r < count; r++) {
        int64_t visible = seen_by(h, first + r, 1);
        void *row = at(h, p, r * h->keys), *of_row = at(h, dp, r * h->keys);
        double d = scores->dot(at(h, g, (first + r) * h->of_g.row), at(h, o, (first + r) * h->width), h->width);
        scores->exponentials(row, visible, h->scale, read_one(h, lse, first + r));
        scores->slopes(row, of_row, visible, d, h->scale);
        clear(h, row, visible, seen);
        clear(h, of_row, visible, seen);
    }
}

/* The buffer of backward_head: packed k and v, each turned or not, blocks of p, dp, q and g. */
typedef struct backward_buffer {
    void *turned_k, *turned_v, *packed_k, *packed_q, *packed_g, *p, *dp;
} backward_buffer;

static backward_buffer divide(const heads *h, void *buffer) {
    backward_buffer b = { .turned_k = buffer };
    b.turned_v = at(h, b.turned_k, packed_size(h, h->depth, h->keys));
    b.packed_k = at(h, b.turned_v, packed_size(h, h->width, h->keys));
    b.packed_q = at(h, b.packed_k, packed_size(h, h->keys, h->depth));
    b.packed_g = at(h, b.packed_q, packed_size(h, BLOCK, h->depth));
    b.p = at(h, b.packed_g, packed_size(h, BLOCK, h->width));
    b.dp = at(h, b.p, BLOCK * h->keys);
    return b;
}

static void backward_head(const heads *h, int64_t head, void *buffer) {
    const void *q = at(h, h->q, head_offset(&h->of_q, head)), *k = at(h, h->k, head_offset(&h->of_k, head)),
               *v = at(h, h->v, head_offset(&h->of_v, head)), *g = at(h, h->g, head_offset(&h->of_g, head)),
               *o = at(h, h->o, head * h->queries * h->width), *lse = at(h, h->lse, head * h->queries);
    void *dq = at(h, h->dq, head * h->queries * h->depth), *dk = at(h, h->dk, head * h->keys * h->depth),
         *dv = at(h, h->dv, head * h->keys * h->width);
    backward_buffer b = divide(h, buffer);
    pack(h, h->depth, h->keys, (matrix){ k, 1, h->of_k.row }, b.turned_k);
    pack(h, h->width, h->keys, (matrix){ v, 1, h->of_v.row }, b.turned_v);
    pack(h, h->keys, h->depth, (matrix){ k, h->of_k.row, 1 }, b.packed_k);
    clear(h, dk, 0, h->keys * h->depth);
    clear(h, dv, 0, h->keys * h->width);
    for (int64_t first = 0; first < h->queries; first += BLOCK) {
        int64_t count = h->queries - first < BLOCK ? h->queries - first : BLOCK, seen = seen_by(h, first, count);
        matrix of_q = { at(h, q, first * h->of_q.row), h->of_q.row, 1 },
               of_g = { at(h, g, first * h->of_g.row), h->of_g.row, 1 };
        pack(h, count, h->depth, of_q, b.packed_q);
        pack(h, count, h->width, of_g, b.packed_g);
        product(h, count, seen, h->depth, of_q, b.turned_k, h->depth, b.p, h->keys, false);
        product(h, count, seen, h->width, of_g, b.turned_v, h->width, b.dp, h->keys, false);
        backward_rows(h, first, count, seen, g, o, lse, b.p, b.dp);
        product(h, seen, h->width, count, (matrix){ b.p, 1, h->keys }, b.packed_g, count, dv, h->width, true);
        product(h, count, h->depth, seen, (matrix){ b.dp, h->keys, 1 }, b.packed_k, h->keys,
                at(h, dq, first * h->depth), h->depth, false);
        product(h, seen, h->depth, count, (matrix){ b.dp, 1, h->keys }, b.packed_q, count, dk, h->depth, true);
    }
}

static size_t buffer_bytes(const heads *h) {
    int64_t elements = packed_size(h, h->depth, h->keys) + packed_size(h, h->keys, h->width) + BLOCK * h->keys;
    if (h->backward)
        elements = packed_size(h, h->depth, h->keys) + packed_size(h, h->width, h->keys) +
                   packed_size(h, h->keys, h->depth) + packed_size(h, BLOCK, h->depth) +
                   packed_size(h, BLOCK, h->width) + 2 * BLOCK * h->keys;
    return (size_t)elements * element(h) + 64;
}

static void run_heads(void *context, int64_t begin, int64_t end) {
    heads *h = context;
    size_t bytes = buffer_bytes(h);
    void *buffer = tu_block_alloc(tu_self(), bytes);
    if (buffer == NULL) {
        atomic_store_explicit(&h->out_of_memory, true, memory_order_relaxed);
        return;
    }
    for (int64_t head = begin; head < end; head++) {
        if (h->backward)
            backward_head(h, head, buffer);
        else
            forward_head(h, head, buffer);
    }
    tu_block_free(tu_self(), buffer, bytes);
}

/* ---- shapes ---- */

static tutti_status check_qkv(const tu_call *call) {
    const tt_tensor *q = call->inputs[0], *k = call->inputs[1], *v = call->inputs[2];
    bool fits = tu_is_float(q->dtype) && q->dtype == k->dtype && q->dtype == v->dtype && q->ndim >= 2 &&
                q->ndim == k->ndim && q->ndim == v->ndim;
    for (int i = 0; fits && i < q->ndim - 2; i++)
        fits = q->sizes[i] == k->sizes[i] && q->sizes[i] == v->sizes[i];
    fits = fits && q->sizes[q->ndim - 1] == k->sizes[q->ndim - 1] && k->sizes[q->ndim - 2] == v->sizes[q->ndim - 2];
    if (!fits)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "q %s, k %s and v %s do not belong together: expected floats (…, queries, depth), (…, "
                             "keys, depth), (…, keys, width)",
                             tu_describe(q), tu_describe(k), tu_describe(v));
    return TUTTI_OK;
}

tutti_status tu_attention_shape(tu_call *call) {
    const tt_tensor *q = call->inputs[0], *v = call->inputs[2];
    tutti_status status = check_qkv(call);
    if (status != TUTTI_OK)
        return status;
    call->results[0] = call->results[1] = tu_shape_of(q);
    call->results[0].sizes[q->ndim - 1] = v->sizes[q->ndim - 1];
    call->results[1].ndim--;
    call->results[1].dtype = tu_stage_dtype(q);
    if ((status = tu_shape_contiguous("attention", &call->results[0])) != TUTTI_OK)
        return status;
    return tu_shape_contiguous("attention", &call->results[1]);
}

/* Of the compute type, with a dense last dimension; any strides before it. */
static tt_tensor *stage_rows(const tt_tensor *x, tutti_dtype dtype) {
    if (x->dtype == dtype && (x->strides[x->ndim - 1] == 1 || x->sizes[x->ndim - 1] == 1))
        return tu_tensor_hold((tt_tensor *)x);
    return tu_stage_in(x, dtype);
}

static void set_heads(heads *h, const tu_call *call, tt_tensor *const *in, bool causal, double scale) {
    const tt_tensor *q = call->inputs[0], *k = call->inputs[1], *v = call->inputs[2];
    h->q = tu_pointer(in[0]);
    h->k = tu_pointer(in[1]);
    h->v = tu_pointer(in[2]);
    h->of_q = layout_of(in[0]);
    h->of_k = layout_of(in[1]);
    h->of_v = layout_of(in[2]);
    h->queries = q->sizes[q->ndim - 2];
    h->depth = q->sizes[q->ndim - 1];
    h->keys = k->sizes[q->ndim - 2];
    h->width = v->sizes[q->ndim - 1];
    h->causal = causal;
    h->scale = scale != 0 ? scale : 1 / sqrt((double)h->depth);
    h->type = tu_float_index(in[0]->dtype);
    h->scale = rounded(h, h->scale);
    h->kernels = tu_tensor_kernels_get();
}

static int64_t head_count(const tt_tensor *q) {
    int64_t count = 1;
    for (int i = 0; i < q->ndim - 2; i++)
        count *= q->sizes[i];
    return count;
}

tutti_status tu_attention_cpu(tu_call *call) {
    const tu_attention_attributes *attributes = call->attributes;
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tt_tensor *in[3], *o = tu_stage_out(call->outputs[0], dtype);
    bool staged = o != NULL;
    for (int i = 0; i < 3; i++)
        staged = (in[i] = stage_rows(call->inputs[i], dtype)) != NULL && staged;
    heads h = { .backward = false };
    if (staged) {
        set_heads(&h, call, in, attributes->causal, attributes->scale);
        h.o = tu_pointer(o);
        h.lse = tu_pointer(call->outputs[1]);
        if (o->numel > 0)
            tu_parallel(head_count(in[0]), 1 + 16384 / (h.queries * h.keys + 1), run_heads, &h);
        tu_stage_done(call->outputs[0], o);
        o = NULL;
    }
    tu_tensor_drop(o);
    for (int i = 0; i < 3; i++)
        tu_tensor_drop(in[i]);
    if (h.out_of_memory)
        return tu_error_memory("the scores of an attention head", (size_t)(h.keys * BLOCK) * sizeof(double));
    return staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

/* ---- backward: (q, k, v, g, o, lse) to (dq, dk, dv) ---- */

tutti_status tu_attention_backward_shape(tu_call *call) {
    tutti_status status = check_qkv(call);
    for (int i = 0; i < 3 && status == TUTTI_OK; i++) {
        call->results[i] = tu_shape_of(call->inputs[i]);
        status = tu_shape_contiguous("attention_backward", &call->results[i]);
    }
    if (status == TUTTI_OK && !tu_same_sizes(call->inputs[3], call->inputs[4]))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "g, %s, and o, %s, differ in shape",
                             tu_describe(call->inputs[3]), tu_describe(call->inputs[4]));
    return status;
}

tutti_status tu_attention_backward_cpu(tu_call *call) {
    const tu_attention_backward_attributes *attributes = call->attributes;
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tt_tensor *in[6], *out[3];
    bool staged = true;
    for (int i = 0; i < 6; i++)
        staged = (in[i] = i < 4 ? stage_rows(call->inputs[i], dtype) : tu_stage_in(call->inputs[i], dtype)) != NULL &&
                 staged;
    for (int i = 0; i < 3; i++)
        staged = (out[i] = tu_stage_out(call->outputs[i], dtype)) != NULL && staged;
    heads h = { .backward = true };
    if (staged) {
        set_heads(&h, call, in, attributes->causal, attributes->scale);
        h.g = tu_pointer(in[3]);
        h.of_g = layout_of(in[3]);
        h.o = tu_pointer(in[4]);
        h.lse = tu_pointer(in[5]);
        h.dq = tu_pointer(out[0]);
        h.dk = tu_pointer(out[1]);
        h.dv = tu_pointer(out[2]);
        if (in[0]->numel > 0)
            tu_parallel(head_count(in[0]), 1 + 8192 / (h.queries * h.keys + 1), run_heads, &h);
    }
    for (int i = 0; i < 6; i++)
        tu_tensor_drop(in[i]);
    for (int i = 0; i < 3; i++) {
        if (staged)
            tu_stage_done(call->outputs[i], out[i]);
        else
            tu_tensor_drop(out[i]);
    }
    if (h.out_of_memory)
        return tu_error_memory("the scores of an attention head", (size_t)(h.keys * BLOCK) * sizeof(double));
    return staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

void tu_attention_gradient(tu_gradient *gradient) {
    const tu_attention_attributes *attributes = gradient->attributes;
    if (tu_gradient_is_recorded()) {
        tu_attention_gradient_again(gradient, attributes->causal, attributes->scale);
        return;
    }
    tt_tensor *results[3];
    if (!tu_attention_backward(tu_saved(gradient, TU_INPUT(0)), tu_saved(gradient, TU_INPUT(1)),
                               tu_saved(gradient, TU_INPUT(2)), gradient->grads[0], tu_saved(gradient, TU_OUTPUT(0)),
                               tu_saved(gradient, TU_OUTPUT(1)), attributes->causal, attributes->scale, results))
        return;
    for (int i = 0; i < 3; i++)
        gradient->results[i] = results[i];
}

tt_tensor *tu_attention_backward_sample(tu_sampler *sampler) {
    tt_tensor *made[5], *results[3];
    for (int i = 0; i < 5; i++)
        made[i] = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3, 2), 0);
    tt_tensor *sums = sampler->make(sampler, TU_SAMPLE_POSITIVE, tt_shape(sampler->size, 3), 0);
    return tu_attention_backward(made[0], made[1], made[2], made[3], made[4], sums, true, 0, results)
               ? tt_add(results[0], tt_add(results[1], results[2]))
               : NULL;
}

/* ---- rope ---- */

tutti_status tu_rope_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *position = call->inputs[1];
    if (!tu_is_float(x->dtype) || x->ndim < 2 || x->sizes[x->ndim - 1] % 2 != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "x is %s and must be floats (…, s, d) with even d",
                             tu_describe(x));
    if (!tu_is_integer(position->dtype) || position->ndim != 1 || position->sizes[0] != x->sizes[x->ndim - 2])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "position is %s and must have one integer per row of x, %s",
                             tu_describe(position), tu_describe(x));
    return tu_shape_like_first(call);
}
tutti_status tu_rope_cpu(tu_call *call) {
    const tu_rope_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0];
    int64_t depth = x->sizes[x->ndim - 1], length = x->sizes[x->ndim - 2], half = depth / 2;
    if (out->numel == 0)
        return TUTTI_OK;
    tt_tensor *from = tu_stage_in(x, TUTTI_F64), *position = tu_stage_in(call->inputs[1], TUTTI_I64),
              *to = tu_stage_out(out, TUTTI_F64);
    double *waves = tu_block_alloc(tu_self(), (size_t)(3 * half) * sizeof *waves), *cosines = waves + half,
           *sines = cosines + half;
    bool staged = from != NULL && position != NULL && to != NULL && waves != NULL;
    double sign = attributes->back ? -1 : 1;
    for (int64_t i = 0; staged && i < half; i++)
        waves[i] = tu_pow_f64(attributes->base, -2.0 * (double)i / (double)depth);
    for (int64_t row = 0; staged && row < x->numel / depth; row++) {
        const double *a = (const double *)tu_pointer(from) + row * depth;
        double *o = (double *)tu_pointer(to) + row * depth,
               at = (double)((const int64_t *)tu_pointer(position))[row % length];
        tu_tensor_kernels_get()->waves(sign * at, waves, cosines, sines, half);
        for (int64_t i = 0; i < half; i++) {
            o[i] = a[i] * cosines[i] - a[i + half] * sines[i];
            o[i + half] = a[i] * sines[i] + a[i + half] * cosines[i];
        }
    }
    if (staged)
        tu_stage_done(out, to);
    else
        tu_tensor_drop(to);
    tu_block_free(tu_self(), waves, (size_t)(3 * half) * sizeof *waves);
    tu_tensor_drop(from);
    tu_tensor_drop(position);
    return staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

tt_tensor *tt_rope(tt_tensor *x, tt_tensor *position, double base) {
    return tu_rope(x, position, base, false);
}
