/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled dot-product attention, forward and backward, one head per thread at a time; and rotary position embedding.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tensor/kernel/elementary.h"
#include "tensor/kernel/kernels.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

#define BLOCK 64         /* query rows at a time */
#define HIDDEN_BLOCK 128 /* rows at a time on a device, where queries see no later keys */

/* Where the heads of a tensor (…, rows, columns) lie, in elements: its leading dimensions by strides. */
typedef struct layout {
    int ndim;
    int64_t sizes[TT_MAX_DIMS], strides[TT_MAX_DIMS];
    int64_t row;
} layout;

static layout layout_of(const tt_tensor *x) {
    layout shape = { .ndim = x->ndim - 2, .row = x->strides[x->ndim - 2] };
    memcpy(shape.sizes, x->sizes, sizeof shape.sizes);
    memcpy(shape.strides, x->strides, sizeof shape.strides);
    return shape;
}

static int64_t head_offset(const layout *shape, int64_t head) {
    int64_t offset = 0;
    for (int i = shape->ndim - 1; i >= 0; i--) {
        offset += head % shape->sizes[i] * shape->strides[i];
        head /= shape->sizes[i];
    }
    return offset;
}

typedef struct heads {
    const tu_tensor_kernels *kernels;
    const void *query, *key, *value, *grad;
    layout of_query, of_key, of_value, of_grad, of_out, of_dq, of_dk, of_dv;
    void *out, *lse, *dq, *dk, *dv;
    int64_t queries, keys, depth, width; /* width: of value and out */
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

static size_t element(const heads *job) {
    return job->type == TU_F32 ? sizeof(float) : sizeof(double);
}
/* `count` elements behind `base`; of what is only read too. */
static void *at(const heads *job, const void *base, int64_t count) {
    return (char *)base + count * (int64_t)element(job);
}
static double read_one(const heads *job, const void *base, int64_t index) {
    return job->type == TU_F32 ? (double)((const float *)base)[index] : ((const double *)base)[index];
}
static void write_one(const heads *job, void *base, int64_t index, double value) {
    if (job->type == TU_F32)
        ((float *)base)[index] = (float)value;
    else
        ((double *)base)[index] = value;
}
static double rounded(const heads *job, double value) {
    return job->type == TU_F32 ? (double)(float)value : value;
}
static void clear(const heads *job, void *base, int64_t from, int64_t to) {
    if (from < to)
        memset(at(job, base, from), 0, (size_t)(to - from) * element(job));
}
static void clear_rows(const heads *job, void *base, int64_t rows, int64_t row, int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        clear(job, base, i * row, i * row + columns);
}

typedef struct matrix {
    const void *data;
    int64_t row, column;
} matrix;

static void pack(const heads *job, int64_t depth, int64_t columns, matrix right, void *packed) {
    job->kernels->pack[job->type](depth, columns, right.data, right.row, right.column, packed);
}
/* The packed matrix has packed_depth rows, of which the first `depth` count. */
static void product(const heads *job, int64_t rows, int64_t columns, int64_t depth, matrix left, const void *packed,
                    int64_t packed_depth, void *out, int64_t out_stride, bool add) {
    job->kernels->product[job->type](rows, columns, depth, left.data, left.row, left.column, packed, packed_depth,
                                     add ? out : NULL, out_stride, out, out_stride);
}
static int64_t packed_size(const heads *job, int64_t depth, int64_t columns) {
    return tu_packed_size(job->kernels, job->type, depth, columns);
}

/* How many keys the rows [first, first + count) see at most. */
static int64_t seen_by(const heads *job, int64_t first, int64_t count) {
    return job->causal && first + count < job->keys ? first + count : job->keys;
}

/* The scores of one row become probabilities; returns the logarithm of their sum. */
static double normalise(const heads *job, void *row, int64_t visible) {
    const tu_score_kernels *scores = &job->kernels->scores[job->type];
    double scale = job->scale;
    if (scale < 0) { /* so that the largest product is that of the largest score */
        scores->multiply(row, visible, -1);
        scale = -scale;
    }
    double top = rounded(job, scores->largest(row, visible) * scale);
    double sum = scores->exponentials(row, visible, scale, top);
    scores->multiply(row, visible, 1 / sum);
    return top + scores->log(sum);
}

static void forward_head(const heads *job, int64_t head, void *buffer) {
    const void *query = at(job, job->query, head_offset(&job->of_query, head)),
               *key = at(job, job->key, head_offset(&job->of_key, head)),
               *value = at(job, job->value, head_offset(&job->of_value, head));
    void *out = at(job, job->out, head_offset(&job->of_out, head)), *lse = at(job, job->lse, head * job->queries);
    void *turned_key = buffer, *packed_value = at(job, turned_key, packed_size(job, job->depth, job->keys)),
         *scores = at(job, packed_value, packed_size(job, job->keys, job->width));
    pack(job, job->depth, job->keys, (matrix){ key, 1, job->of_key.row }, turned_key);
    pack(job, job->keys, job->width, (matrix){ value, job->of_value.row, 1 }, packed_value);
    for (int64_t first = 0; first < job->queries; first += BLOCK) {
        int64_t count = job->queries - first < BLOCK ? job->queries - first : BLOCK, seen = seen_by(job, first, count);
        matrix of_query = { at(job, query, first * job->of_query.row), job->of_query.row, 1 },
               of_scores = { scores, job->keys, 1 };
        product(job, count, seen, job->depth, of_query, turned_key, job->depth, scores, job->keys, false);
        for (int64_t i = 0; i < count; i++) {
            int64_t visible = seen_by(job, first + i, 1);
            void *row = at(job, scores, i * job->keys);
            write_one(job, lse, first + i, normalise(job, row, visible));
            clear(job, row, visible, seen);
        }
        product(job, count, job->width, seen, of_scores, packed_value, job->keys, at(job, out, first * job->of_out.row),
                job->of_out.row, false);
    }
}

/* Of one block of rows: the probabilities, and dp, their gradients, which become those of the scores. */
static void backward_rows(const heads *job, int64_t first, int64_t count, int64_t seen, const void *grad,
                          const void *out, const void *lse, void *probabilities, void *dp) {
    const tu_score_kernels *scores = &job->kernels->scores[job->type];
    for (int64_t i = 0; i < count; i++) {
        int64_t visible = seen_by(job, first + i, 1);
        void *row = at(job, probabilities, i * job->keys), *of_row = at(job, dp, i * job->keys);
        double dot = scores->dot(at(job, grad, (first + i) * job->of_grad.row),
                                 at(job, out, (first + i) * job->of_out.row), job->width);
        scores->exponentials(row, visible, job->scale, read_one(job, lse, first + i));
        scores->slopes(row, of_row, visible, dot, job->scale);
        clear(job, row, visible, seen);
        clear(job, of_row, visible, seen);
    }
}

/* The buffer of backward_head: packed key and value, each turned or not, blocks of probabilities, dp, query and grad.
 */
typedef struct backward_buffer {
    void *turned_key, *turned_value, *packed_key, *packed_query, *packed_grad, *probabilities, *dp;
} backward_buffer;

static backward_buffer divide(const heads *job, void *buffer) {
    backward_buffer space = { .turned_key = buffer };
    space.turned_value = at(job, space.turned_key, packed_size(job, job->depth, job->keys));
    space.packed_key = at(job, space.turned_value, packed_size(job, job->width, job->keys));
    space.packed_query = at(job, space.packed_key, packed_size(job, job->keys, job->depth));
    space.packed_grad = at(job, space.packed_query, packed_size(job, BLOCK, job->depth));
    space.probabilities = at(job, space.packed_grad, packed_size(job, BLOCK, job->width));
    space.dp = at(job, space.probabilities, BLOCK * job->keys);
    return space;
}

static void backward_head(const heads *job, int64_t head, void *buffer) {
    const void *query = at(job, job->query, head_offset(&job->of_query, head)),
               *key = at(job, job->key, head_offset(&job->of_key, head)),
               *value = at(job, job->value, head_offset(&job->of_value, head)),
               *grad = at(job, job->grad, head_offset(&job->of_grad, head)),
               *out = at(job, job->out, head_offset(&job->of_out, head)), *lse = at(job, job->lse, head * job->queries);
    void *dq = at(job, job->dq, head_offset(&job->of_dq, head)), *dk = at(job, job->dk, head_offset(&job->of_dk, head)),
         *dv = at(job, job->dv, head_offset(&job->of_dv, head));
    backward_buffer space = divide(job, buffer);
    pack(job, job->depth, job->keys, (matrix){ key, 1, job->of_key.row }, space.turned_key);
    pack(job, job->width, job->keys, (matrix){ value, 1, job->of_value.row }, space.turned_value);
    pack(job, job->keys, job->depth, (matrix){ key, job->of_key.row, 1 }, space.packed_key);
    clear_rows(job, dk, job->keys, job->of_dk.row, job->depth);
    clear_rows(job, dv, job->keys, job->of_dv.row, job->width);
    for (int64_t first = 0; first < job->queries; first += BLOCK) {
        int64_t count = job->queries - first < BLOCK ? job->queries - first : BLOCK, seen = seen_by(job, first, count);
        matrix of_query = { at(job, query, first * job->of_query.row), job->of_query.row, 1 },
               of_grad = { at(job, grad, first * job->of_grad.row), job->of_grad.row, 1 };
        pack(job, count, job->depth, of_query, space.packed_query);
        pack(job, count, job->width, of_grad, space.packed_grad);
        product(job, count, seen, job->depth, of_query, space.turned_key, job->depth, space.probabilities, job->keys,
                false);
        product(job, count, seen, job->width, of_grad, space.turned_value, job->width, space.dp, job->keys, false);
        backward_rows(job, first, count, seen, grad, out, lse, space.probabilities, space.dp);
        product(job, seen, job->width, count, (matrix){ space.probabilities, 1, job->keys }, space.packed_grad, count,
                dv, job->of_dv.row, true);
        product(job, count, job->depth, seen, (matrix){ space.dp, job->keys, 1 }, space.packed_key, job->keys,
                at(job, dq, first * job->of_dq.row), job->of_dq.row, false);
        product(job, seen, job->depth, count, (matrix){ space.dp, 1, job->keys }, space.packed_query, count, dk,
                job->of_dk.row, true);
    }
}

static size_t buffer_bytes(const heads *job) {
    int64_t elements =
        packed_size(job, job->depth, job->keys) + packed_size(job, job->keys, job->width) + BLOCK * job->keys;
    if (job->backward)
        elements = packed_size(job, job->depth, job->keys) + packed_size(job, job->width, job->keys) +
                   packed_size(job, job->keys, job->depth) + packed_size(job, BLOCK, job->depth) +
                   packed_size(job, BLOCK, job->width) + 2 * BLOCK * job->keys;
    return (size_t)elements * element(job) + 64;
}

static void run_heads(void *context, int64_t begin, int64_t end) {
    heads *job = context;
    size_t bytes = buffer_bytes(job);
    void *buffer = tu_block_alloc(tu_self(), bytes);
    if (buffer == NULL) {
        atomic_store_explicit(&job->out_of_memory, true, memory_order_relaxed);
        return;
    }
    for (int64_t head = begin; head < end; head++) {
        if (job->backward)
            backward_head(job, head, buffer);
        else
            forward_head(job, head, buffer);
    }
    tu_block_free(tu_self(), buffer, bytes);
}

/* ---- shapes ---- */

static tutti_status check_qkv(const tu_call *call) {
    const tt_tensor *query = call->inputs[0], *key = call->inputs[1], *value = call->inputs[2];
    bool fits = tu_is_float(query->dtype) && query->dtype == key->dtype && query->dtype == value->dtype &&
                query->ndim >= 2 && query->ndim == key->ndim && query->ndim == value->ndim;
    for (int i = 0; fits && i < query->ndim - 2; i++)
        fits = query->sizes[i] == key->sizes[i] && query->sizes[i] == value->sizes[i];
    fits = fits && query->sizes[query->ndim - 1] == key->sizes[query->ndim - 1] &&
           key->sizes[query->ndim - 2] == value->sizes[query->ndim - 2];
    if (!fits)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "q %s, k %s and v %s do not belong together: expected floats (…, queries, depth), (…, "
                             "keys, depth), (…, keys, width)",
                             tu_describe(query), tu_describe(key), tu_describe(value));
    return TUTTI_OK;
}

/* A result that lies as what it belongs to: dense, its dimensions in the same order in memory, so that what was made of
 * a view of heads is a view of theirs again. Rows are dense in any case. */
static tutti_status lie_as(const tu_call *call, const tt_tensor *like, tu_shape *shape) {
    int order[TT_MAX_DIMS], rows = shape->ndim - 1;
    tutti_status status = tu_shape_contiguous(call->entry->name, shape);
    if (like->strides[rows] != 1 || like->numel == 0)
        return status;
    for (int i = 0; i < rows && status == TUTTI_OK; i++) {
        int at = i;
        if (like->strides[i] <= 0)
            return status;
        for (; at > 0 && like->strides[order[at - 1]] < like->strides[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    int64_t stride = shape->sizes[rows];
    for (int i = rows - 1; i >= 0 && status == TUTTI_OK; i--) {
        shape->strides[order[i]] = stride;
        stride *= shape->sizes[order[i]];
    }
    return status;
}

tutti_status tu_attention_shape(tu_call *call) {
    const tt_tensor *query = call->inputs[0], *value = call->inputs[2];
    tutti_status status = check_qkv(call);
    if (status != TUTTI_OK)
        return status;
    call->results[0] = call->results[1] = tu_shape_of(query);
    call->results[0].sizes[query->ndim - 1] = value->sizes[query->ndim - 1];
    call->results[1].ndim--;
    call->results[1].dtype = tu_stage_dtype(query);
    if ((status = lie_as(call, query, &call->results[0])) != TUTTI_OK)
        return status;
    return tu_shape_contiguous("attention", &call->results[1]);
}

/* Of the compute type, with a dense last dimension; any strides before it. */
static bool has_rows(const tt_tensor *x, tutti_dtype dtype) {
    return x->dtype == dtype && (x->strides[x->ndim - 1] == 1 || x->sizes[x->ndim - 1] == 1);
}
static tt_tensor *stage_rows(const tt_tensor *x, tutti_dtype dtype) {
    return has_rows(x, dtype) ? tu_tensor_hold((tt_tensor *)x) : tu_stage_in(x, dtype);
}
static tt_tensor *stage_rows_out(tt_tensor *x, tutti_dtype dtype) {
    return has_rows(x, dtype) ? tu_tensor_hold(x) : tu_stage_out_dense(x, dtype);
}

static void set_heads(heads *job, const tu_call *call, tt_tensor *const *in, bool causal, double scale) {
    const tt_tensor *query = call->inputs[0], *key = call->inputs[1], *value = call->inputs[2];
    job->query = tu_pointer(in[0]);
    job->key = tu_pointer(in[1]);
    job->value = tu_pointer(in[2]);
    job->of_query = layout_of(in[0]);
    job->of_key = layout_of(in[1]);
    job->of_value = layout_of(in[2]);
    job->queries = query->sizes[query->ndim - 2];
    job->depth = query->sizes[query->ndim - 1];
    job->keys = key->sizes[query->ndim - 2];
    job->width = value->sizes[query->ndim - 1];
    job->causal = causal;
    job->scale = scale != 0 ? scale : 1 / sqrt((double)job->depth);
    job->type = tu_float_index(in[0]->dtype);
    job->scale = rounded(job, job->scale);
    job->kernels = tu_tensor_kernels_get();
}

static int64_t head_count(const tt_tensor *query) {
    int64_t count = 1;
    for (int i = 0; i < query->ndim - 2; i++)
        count *= query->sizes[i];
    return count;
}

/* ---- on a device: the scores of all heads, in memory, between products ----
 *
 * bf16 and f16 are multiplied as they are, for which the vendor's library has the quickest units; scores are f32 all
 * the same, and shares are rounded before they are multiplied.
 */

static bool is_narrow(const tt_tensor *x) {
    return x->dtype == TUTTI_BF16 || x->dtype == TUTTI_F16;
}

/* ---- on a device, heads whose scores stay on the chip: tensor_cuda/attention.cu, attention_wide.cu ---- */

/* Where the heads of x lie, for kernels; false where its strides or its place are none that they take. */
static bool lay_heads(const tt_tensor *x, tu_launch_heads *heads) {
    int n = x->ndim;
    const int64_t *strides = x->strides;
    *heads = (tu_launch_heads){ tu_place_of(tu_pointer(x)), n > 3 ? strides[n - 4] : 0, n > 2 ? strides[n - 3] : 0,
                                strides[n - 2] };
    bool fits = strides[n - 1] == 1 && (heads->data & 15) == 0 &&
                ((heads->outer_step | heads->inner_step | heads->row) & 7) == 0;
    for (int i = 0; i + 4 < n; i++) /* all before the last leading dimension are one */
        fits = fits && strides[i] == strides[i + 1] * x->sizes[i + 1];
    return fits;
}

/* x itself, held, where its heads lie well, else a dense copy. NULL: there is no memory, or none of both is taken. */
static tt_tensor *stage_heads(const tt_tensor *x, tu_launch_heads *heads) {
    if (lay_heads(x, heads))
        return tu_tensor_hold((tt_tensor *)x);
    tt_tensor *copy = tu_stage_in(x, (tutti_dtype)x->dtype);
    if (copy != NULL && lay_heads(copy, heads))
        return copy;
    tu_tensor_drop(copy);
    return NULL;
}

static bool has_tiles(const tu_call *call) {
    const tt_tensor *query = call->inputs[0], *key = call->inputs[1], *value = call->inputs[2];
    int64_t depth = query->sizes[query->ndim - 1];
    bool fits = depth == 32 || depth == 64 || (is_narrow(query) && (depth == 96 || depth == 128));
    return fits && (is_narrow(query) || query->dtype == TUTTI_F32) && key->dtype == query->dtype &&
           value->dtype == query->dtype && value->sizes[query->ndim - 1] == depth && query->numel > 0 && key->numel > 0;
}

static tutti_status launch_tiles(const tu_call *call, const char *name, int64_t rows, const tu_launch_tiles *tiles) {
    char plain[48], full[TU_KERNEL_NAME];
    const tt_tensor *query = call->inputs[0];
    int depth = (int)query->sizes[query->ndim - 1];
    bool narrow = is_narrow(query);
    snprintf(plain, sizeof plain, "attention_%s_%d", name, depth);
    return tu_device_launch_shared(tu_device_of(query), tu_kernel_name(full, plain, (tutti_dtype)query->dtype),
                                   (rows + TU_HEAD_ROWS - 1) / TU_HEAD_ROWS * tiles->heads, TU_HEAD_THREADS,
                                   narrow ? 0 : (unsigned)TU_WIDE_HEAD_SHARED(depth), tiles);
}

static void set_tiles(tu_launch_tiles *tiles, const tu_call *call, bool causal, double scale) {
    const tt_tensor *query = call->inputs[0], *key = call->inputs[1];
    int n = query->ndim;
    tiles->heads = head_count(query);
    tiles->inner = n > 2 ? query->sizes[n - 3] : 1;
    tiles->queries = query->sizes[n - 2];
    tiles->keys = key->sizes[n - 2];
    tiles->scale = (float)(scale != 0 ? scale : 1 / sqrt((double)query->sizes[n - 1]));
    tiles->causal = causal;
}

/* UNSUPPORTED, with nothing done, where the heads lie as no kernel takes them. */
static tutti_status attention_in_tiles(tu_call *call, bool causal, double scale) {
    tu_launch_tiles tiles = { .sums = tu_place_of(tu_pointer(call->outputs[1])) };
    tu_launch_heads *places[3] = { &tiles.query, &tiles.key, &tiles.value };
    tt_tensor *in[3];
    bool staged = lay_heads(call->outputs[0], &tiles.out);
    for (int i = 0; i < 3; i++)
        staged = (in[i] = stage_heads(call->inputs[i], places[i])) != NULL && staged;
    set_tiles(&tiles, call, causal, scale);
    tutti_status status = staged ? launch_tiles(call, "forward", tiles.queries, &tiles) : TUTTI_ERROR_UNSUPPORTED;
    for (int i = 0; i < 3; i++)
        tu_tensor_drop(in[i]);
    return status;
}

static tutti_status attention_backward_in_tiles(tu_call *call, bool causal, double scale) {
    tu_launch_tiles tiles = { 0 };
    tu_launch_heads *places[5] = { &tiles.query, &tiles.key, &tiles.value, &tiles.grad, &tiles.out };
    tu_launch_heads *results[3] = { &tiles.of_query, &tiles.of_key, &tiles.of_value };
    tt_tensor *in[5], *sums = tu_stage_in(call->inputs[5], TUTTI_F32), *dots = NULL;
    bool staged = sums != NULL;
    set_tiles(&tiles, call, causal, scale);
    for (int i = 0; i < 5; i++)
        staged = (in[i] = stage_heads(call->inputs[i], places[i])) != NULL && staged;
    for (int i = 0; i < 3; i++)
        staged = lay_heads(call->outputs[i], results[i]) && staged;
    tutti_status status = TUTTI_ERROR_UNSUPPORTED;
    if (staged) {
        tu_shape shape = { .dtype = TUTTI_F32, .device = call->device, .ndim = 1, .strides = { 1 } };
        shape.sizes[0] = tiles.heads * tiles.queries;
        dots = tu_tensor_new(&shape);
        status = dots == NULL ? TUTTI_ERROR_MEMORY : TUTTI_OK;
    }
    if (status == TUTTI_OK) {
        tiles.sums = tu_place_of(tu_pointer(sums));
        tiles.dots = tu_place_of(tu_pointer(dots));
        status = launch_tiles(call, "queries", tiles.queries, &tiles); /* the next one needs its dots */
    }
    if (status == TUTTI_OK)
        status = launch_tiles(call, "keys", tiles.keys, &tiles);
    for (int i = 0; i < 5; i++)
        tu_tensor_drop(in[i]);
    tu_tensor_drop(sums);
    tu_tensor_drop(dots);
    return status;
}

/* A matrix of every head, (rows, columns), dense; turned: read as (columns, rows). */
typedef struct head_matrix {
    const tt_tensor *of;
    int64_t rows, columns;
    bool turned;
} head_matrix;

/* Element (row, column) of it on, as operand or result of a product. */
static tu_device_matrix matrix_at(head_matrix matrix, int64_t row, int64_t column) {
    int64_t across = matrix.turned ? 1 : matrix.columns, along = matrix.turned ? matrix.columns : 1;
    const char *data = tu_pointer(matrix.of);
    return (tu_device_matrix){ data + (row * across + column * along) * tu_dtype_bytes[matrix.of->dtype], across, along,
                               matrix.rows * matrix.columns };
}

/* Which half of a product's scores counts where queries see no later keys: that of the result, or of the left operand,
 * whose rows are queries, or keys. */
typedef enum seen_part {
    SEEN_RESULT,
    SEEN_LEFT,
    SEEN_LEFT_TURNED
} seen_part;

/* out (heads, rows, columns) = left (heads, rows, depth) right (heads, depth, columns); `block` rows at a time, of
 * which each block leaves out what none of its queries sees, or what sees none of its keys. */
static tutti_status multiply_heads(const tu_call *call, int64_t block, seen_part seen, int64_t rows, int64_t columns,
                                   int64_t depth, head_matrix left, head_matrix right, head_matrix out) {
    tutti_status status = TUTTI_OK;
    for (int64_t begin = 0; begin < rows && status == TUTTI_OK; begin += block) {
        int64_t count = rows - begin < block ? rows - begin : block, end = begin + count, from = 0;
        tu_device_product product = { .rows = count,
                                      .columns = columns,
                                      .depth = depth,
                                      .batch = head_count(call->inputs[0]),
                                      .dtype = left.of->dtype,
                                      .result = out.of->dtype };
        if (block < rows && seen == SEEN_RESULT && end < columns)
            product.columns = end;
        else if (block < rows && seen == SEEN_LEFT && end < depth)
            product.depth = end;
        else if (block < rows && seen == SEEN_LEFT_TURNED)
            product.depth = depth - (from = begin < depth ? begin : depth);
        product.left = matrix_at(left, begin, from);
        product.right = matrix_at(right, from, 0);
        product.out = matrix_at(out, begin, 0);
        status = tu_device_multiply(tu_device_of(out.of), &product);
    }
    return status;
}

/* So many rows at a time: fewer where half of the scores is hidden, so that little of it is multiplied. */
static int64_t block_of(const heads *job) {
    int64_t most = job->queries > job->keys ? job->queries : job->keys;
    return job->causal && most >= 4 * HIDDEN_BLOCK ? HIDDEN_BLOCK : most;
}

static tt_tensor *new_scores(const tu_call *call, const heads *job, tutti_dtype dtype) {
    tu_shape shape = { .dtype = dtype, .device = call->device, .ndim = 1, .strides = { 1 } };
    shape.sizes[0] = head_count(call->inputs[0]) * job->queries * job->keys;
    return tu_tensor_new(&shape);
}

static tutti_status launch_scores(const char *name, tutti_dtype dtype, const heads *job, int64_t rows,
                                  tt_tensor *scores, tu_launch_scores flat) {
    char full[TU_KERNEL_NAME];
    enum {
        THREADS = 128
    };
    flat.scores = tu_place_of(tu_pointer(scores));
    flat.count = rows;
    flat.size = job->keys;
    flat.queries = job->queries;
    flat.block = block_of(job);
    flat.width = job->width;
    flat.scale = job->scale;
    flat.causal = job->causal;
    int64_t each = THREADS / (128 / tu_dtype_bytes[scores->dtype]); /* rows of a block */
    return tu_device_launch_blocks(tu_device_of(scores), tu_kernel_name(full, name, dtype), (rows + each - 1) / each,
                                   THREADS, &flat);
}

static tutti_status attention_on_device(tu_call *call, bool causal, double scale) {
    tutti_status tiled = has_tiles(call) ? attention_in_tiles(call, causal, scale) : TUTTI_ERROR_UNSUPPORTED;
    if (tiled != TUTTI_ERROR_UNSUPPORTED)
        return tiled;
    const tt_tensor *query = call->inputs[0];
    bool narrow = is_narrow(query);
    tutti_dtype compute = tu_stage_dtype(query), dtype = narrow ? (tutti_dtype)query->dtype : compute;
    tt_tensor *in[3], *out = tu_stage_out_dense(call->outputs[0], dtype), *scores = NULL, *shares = NULL;
    bool staged = out != NULL;
    heads job = { .backward = false };
    for (int i = 0; i < 3; i++)
        staged = (in[i] = tu_stage_in(call->inputs[i], dtype)) != NULL && staged;
    if (staged) {
        set_heads(&job, call, in, causal, scale);
        scores = new_scores(call, &job, compute);
        shares = narrow ? new_scores(call, &job, dtype) : tu_tensor_hold(scores);
        staged = scores != NULL && shares != NULL;
    }
    tutti_status status = staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    if (staged && out->numel > 0) {
        tu_launch_scores flat = { .sums = tu_place_of(tu_pointer(call->outputs[1])),
                                  .narrow_shares = narrow ? tu_place_of(tu_pointer(shares)) : 0 };
        int64_t queries = job.queries, keys = job.keys, depth = job.depth, width = job.width, block = block_of(&job);
        status = multiply_heads(
            call, block, SEEN_RESULT, queries, keys, depth, (head_matrix){ in[0], queries, depth, false },
            (head_matrix){ in[1], keys, depth, true }, (head_matrix){ scores, queries, keys, false });
        if (status == TUTTI_OK)
            status = launch_scores(narrow ? "attention_narrow" : "attention", dtype, &job,
                                   head_count(query) * job.queries, scores, flat);
        if (status == TUTTI_OK)
            status = multiply_heads(
                call, block, SEEN_LEFT, queries, width, keys, (head_matrix){ shares, queries, keys, false },
                (head_matrix){ in[2], keys, width, false }, (head_matrix){ out, queries, width, false });
    }
    for (int i = 0; i < 3; i++)
        tu_tensor_drop(in[i]);
    tu_tensor_drop(scores);
    tu_tensor_drop(shares);
    return tu_stage_end(1, call->outputs, &out, status);
}

static tutti_status attention_backward_on_device(tu_call *call, bool causal, double scale) {
    enum {
        QUERY,
        KEY,
        VALUE,
        GRAD_OF_OUT,
        OUT,
        SUMS,
        INPUTS
    };
    tutti_status tiled = has_tiles(call) ? attention_backward_in_tiles(call, causal, scale) : TUTTI_ERROR_UNSUPPORTED;
    if (tiled != TUTTI_ERROR_UNSUPPORTED)
        return tiled;
    const tt_tensor *query = call->inputs[0];
    bool narrow = is_narrow(query), staged = true;
    tutti_dtype compute = tu_stage_dtype(query), dtype = narrow ? (tutti_dtype)query->dtype : compute;
    tt_tensor *in[INPUTS], *out[3], *scores = NULL, *slopes = NULL, *shares = NULL, *rounded = NULL;
    heads job = { .backward = true };
    for (int i = 0; i < INPUTS; i++)
        staged = (in[i] = tu_stage_in(call->inputs[i], i == SUMS ? compute : dtype)) != NULL && staged;
    for (int i = 0; i < 3; i++)
        staged = (out[i] = tu_stage_out_dense(call->outputs[i], dtype)) != NULL && staged;
    if (staged) {
        set_heads(&job, call, in, causal, scale);
        scores = new_scores(call, &job, compute);
        slopes = new_scores(call, &job, compute);
        shares = narrow ? new_scores(call, &job, dtype) : tu_tensor_hold(scores);
        rounded = narrow ? new_scores(call, &job, dtype) : tu_tensor_hold(slopes);
        staged = scores != NULL && slopes != NULL && shares != NULL && rounded != NULL;
    }
    tutti_status status = staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    if (staged && in[QUERY]->numel > 0) {
        int64_t queries = job.queries, keys = job.keys, depth = job.depth, width = job.width;
        tu_launch_scores flat = { .slopes = tu_place_of(tu_pointer(slopes)),
                                  .sums = tu_place_of(tu_pointer(in[SUMS])),
                                  .grad = tu_place_of(tu_pointer(in[GRAD_OF_OUT])),
                                  .out = tu_place_of(tu_pointer(in[OUT])),
                                  .narrow_shares = narrow ? tu_place_of(tu_pointer(shares)) : 0,
                                  .narrow_slopes = narrow ? tu_place_of(tu_pointer(rounded)) : 0 };
        int64_t block = block_of(&job);
        head_matrix of_query = { in[QUERY], queries, depth, false }, of_key = { in[KEY], keys, depth, false },
                    of_value = { in[VALUE], keys, width, true }, of_out = { in[GRAD_OF_OUT], queries, width, false },
                    turned_key = { in[KEY], keys, depth, true }, of_scores = { scores, queries, keys, false },
                    of_slopes = { slopes, queries, keys, false }, of_rounded = { rounded, queries, keys, false },
                    turned_rounded = { rounded, queries, keys, true }, turned_shares = { shares, queries, keys, true };
        status = multiply_heads(call, block, SEEN_RESULT, queries, keys, depth, of_query, turned_key, of_scores);
        if (status == TUTTI_OK)
            status = multiply_heads(call, block, SEEN_RESULT, queries, keys, width, of_out, of_value, of_slopes);
        if (status == TUTTI_OK)
            status = launch_scores(narrow ? "attention_narrow_backward" : "attention_backward", dtype, &job,
                                   head_count(query) * queries, scores, flat);
        if (status == TUTTI_OK)
            status = multiply_heads(call, block, SEEN_LEFT, queries, depth, keys, of_rounded, of_key,
                                    (head_matrix){ out[0], queries, depth, false });
        if (status == TUTTI_OK)
            status = multiply_heads(call, block, SEEN_LEFT_TURNED, keys, depth, queries, turned_rounded, of_query,
                                    (head_matrix){ out[1], keys, depth, false });
        if (status == TUTTI_OK)
            status = multiply_heads(call, block, SEEN_LEFT_TURNED, keys, width, queries, turned_shares, of_out,
                                    (head_matrix){ out[2], keys, width, false });
    }
    for (int i = 0; i < INPUTS; i++)
        tu_tensor_drop(in[i]);
    tu_tensor_drop(scores);
    tu_tensor_drop(slopes);
    tu_tensor_drop(shares);
    tu_tensor_drop(rounded);
    return tu_stage_end(3, call->outputs, out, status);
}

tutti_status tu_attention_everywhere(tu_call *call) {
    const tu_attention_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return attention_on_device(call, attributes->causal, attributes->scale);
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tt_tensor *in[3], *out = stage_rows_out(call->outputs[0], dtype);
    bool staged = out != NULL;
    for (int i = 0; i < 3; i++)
        staged = (in[i] = stage_rows(call->inputs[i], dtype)) != NULL && staged;
    heads job = { .backward = false };
    if (staged) {
        set_heads(&job, call, in, attributes->causal, attributes->scale);
        job.out = tu_pointer(out);
        job.of_out = layout_of(out);
        job.lse = tu_pointer(call->outputs[1]);
        if (out->numel > 0)
            tu_parallel(head_count(in[0]), 1 + 16384 / (job.queries * job.keys + 1), run_heads, &job);
        tu_stage_done(call->outputs[0], out);
        out = NULL;
    }
    tu_tensor_drop(out);
    for (int i = 0; i < 3; i++)
        tu_tensor_drop(in[i]);
    if (job.out_of_memory)
        return tu_error_memory("the scores of an attention head", (size_t)(job.keys * BLOCK) * sizeof(double));
    return staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

/* ---- backward: (query, key, value, grad, out, lse) to (dq, dk, dv) ---- */

tutti_status tu_attention_backward_shape(tu_call *call) {
    tutti_status status = check_qkv(call);
    for (int i = 0; i < 3 && status == TUTTI_OK; i++) {
        call->results[i] = tu_shape_of(call->inputs[i]);
        status = lie_as(call, call->inputs[i], &call->results[i]);
    }
    if (status == TUTTI_OK && !tu_same_sizes(call->inputs[3], call->inputs[4]))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "g, %s, and o, %s, differ in shape",
                             tu_describe(call->inputs[3]), tu_describe(call->inputs[4]));
    return status;
}

tutti_status tu_attention_backward_everywhere(tu_call *call) {
    const tu_attention_backward_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return attention_backward_on_device(call, attributes->causal, attributes->scale);
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tt_tensor *in[6], *out[3];
    bool staged = true;
    for (int i = 0; i < 6; i++)
        staged = (in[i] = i < 5 ? stage_rows(call->inputs[i], dtype) : tu_stage_in(call->inputs[i], dtype)) != NULL &&
                 staged;
    for (int i = 0; i < 3; i++)
        staged = (out[i] = stage_rows_out(call->outputs[i], dtype)) != NULL && staged;
    heads job = { .backward = true };
    if (staged) {
        set_heads(&job, call, in, attributes->causal, attributes->scale);
        job.grad = tu_pointer(in[3]);
        job.of_grad = layout_of(in[3]);
        job.out = tu_pointer(in[4]);
        job.of_out = layout_of(in[4]);
        job.lse = tu_pointer(in[5]);
        job.dq = tu_pointer(out[0]);
        job.of_dq = layout_of(out[0]);
        job.dk = tu_pointer(out[1]);
        job.of_dk = layout_of(out[1]);
        job.dv = tu_pointer(out[2]);
        job.of_dv = layout_of(out[2]);
        if (in[0]->numel > 0)
            tu_parallel(head_count(in[0]), 1 + 8192 / (job.queries * job.keys + 1), run_heads, &job);
    }
    for (int i = 0; i < 6; i++)
        tu_tensor_drop(in[i]);
    tutti_status status = tu_stage_end(3, call->outputs, out, staged ? TUTTI_OK : TUTTI_ERROR_MEMORY);
    if (job.out_of_memory)
        return tu_error_memory("the scores of an attention head", (size_t)(job.keys * BLOCK) * sizeof(double));
    return status;
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

static tutti_status turn_on_device(tu_call *call, double base, double sign) {
    const tt_tensor *x = call->inputs[0];
    tt_tensor *from = tu_stage_in(x, TUTTI_F64), *position = tu_stage_in(call->inputs[1], TUTTI_I64),
              *to = tu_stage_out(call->outputs[0], TUTTI_F64);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (from != NULL && position != NULL && to != NULL) {
        int64_t depth = x->sizes[x->ndim - 1];
        tu_launch_turn flat = { tu_place_of(tu_pointer(from)),
                                tu_place_of(tu_pointer(to)),
                                tu_place_of(tu_pointer(position)),
                                x->numel / depth,
                                depth,
                                x->sizes[x->ndim - 2],
                                base,
                                sign };
        status = tu_device_launch(tu_device_of(x), "kernel_turn", x->numel / 2, TU_DEVICE_THREADS, &flat);
    }
    tu_tensor_drop(from);
    tu_tensor_drop(position);
    return tu_stage_end(1, call->outputs, &to, status);
}

static tutti_status turn(tu_call *call, double base, double sign) {
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0];
    int64_t depth = x->sizes[x->ndim - 1], length = x->sizes[x->ndim - 2], half = depth / 2;
    if (out->numel == 0)
        return TUTTI_OK;
    if (tu_on_device(x))
        return turn_on_device(call, base, sign);
    tt_tensor *from = tu_stage_in(x, TUTTI_F64), *position = tu_stage_in(call->inputs[1], TUTTI_I64),
              *to = tu_stage_out(out, TUTTI_F64);
    double *waves = tu_block_alloc(tu_self(), (size_t)(3 * half) * sizeof *waves), *cosines = waves + half,
           *sines = cosines + half;
    bool staged = from != NULL && position != NULL && to != NULL && waves != NULL;
    for (int64_t i = 0; staged && i < half; i++)
        waves[i] = tu_pow_f64(base, -2.0 * (double)i / (double)depth);
    for (int64_t row = 0; staged && row < x->numel / depth; row++) {
        const double *in = (const double *)tu_pointer(from) + row * depth;
        double *turned = (double *)tu_pointer(to) + row * depth,
               at = (double)((const int64_t *)tu_pointer(position))[row % length];
        tu_tensor_kernels_get()->waves(sign * at, waves, cosines, sines, half);
        for (int64_t i = 0; i < half; i++) {
            turned[i] = in[i] * cosines[i] - in[i + half] * sines[i];
            turned[i + half] = in[i] * sines[i] + in[i + half] * cosines[i];
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

tutti_status tu_rope_everywhere(tu_call *call) {
    const tu_rope_attributes *attributes = call->attributes;
    return turn(call, attributes->base, 1);
}

tutti_status tu_rope_backward_everywhere(tu_call *call) {
    const tu_rope_backward_attributes *attributes = call->attributes;
    return turn(call, attributes->base, -1);
}
