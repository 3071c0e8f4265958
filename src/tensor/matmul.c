/* SPDX-License-Identifier: Apache-2.0
 *
 * The matrix product family: matmul, linear, and the forms for narrow types with scales.
 */
#include <stdatomic.h>
#include <string.h>

#include <tutti/streams.h>

#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/gemm.h"
#include "tensor/history.h"
#include "tensor/loop.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/process.h"
#include "tensor/scaled.h"
#include "tensor/stage.h"

static tu_matrix matrix_of(const tt_tensor *x) {
    return (tu_matrix){ tu_pointer(x), x->strides[x->ndim - 2], x->strides[x->ndim - 1] };
}

/* ---- on a device ---- */

bool tt_tf32_mode(bool on) {
    bool before = tu_self()->tf32;
    tu_self()->tf32 = on;
    return before;
}

/* By the vendor's library, or by the kernel for what that has not. Integers wrap. */
static tutti_status multiply_there(tu_device *device, const tu_device_product *given) {
    tutti_status status = TUTTI_ERROR_UNSUPPORTED;
    tu_device_product own = *given;
    const tu_device_product *product = &own;
    own.tf32 = tu_self()->tf32 && own.dtype == TUTTI_F32;
    if (product->depth > 0 && device->table->product != NULL)
        status = device->table->product(device->state, device->index, tu_device_stream(device), product);
    if (status != TUTTI_ERROR_UNSUPPORTED || product->bias != NULL)
        return status;
    tutti_dtype compute = tu_compute_dtype(product->dtype);
    char name[TU_KERNEL_NAME];
    tu_launch_product flat = { .left = tu_place_of(product->left.data),
                               .right = tu_place_of(product->right.data),
                               .out = tu_place_of(product->out.data),
                               .rows = product->rows,
                               .columns = product->columns,
                               .depth = product->depth,
                               .batch = product->batch,
                               .left_row = product->left.row,
                               .left_column = product->left.column,
                               .left_step = product->left.step,
                               .right_row = product->right.row,
                               .right_column = product->right.column,
                               .right_step = product->right.step,
                               .out_row = product->out.row,
                               .out_step = product->out.step,
                               .dtype = (int32_t)product->dtype,
                               .result = (int32_t)product->result };
    int64_t tiles = (product->rows + 15) / 16 * ((product->columns + 15) / 16) * product->batch;
    return tu_device_launch_blocks(device, tu_kernel_name(name, "product", compute == TUTTI_U64 ? TUTTI_I64 : compute),
                                   tiles, 256, &flat);
}

/* The vendor's library has its quick kernels of narrow floats only where rows, columns and depth, and the distance
 * between rows, are multiples of 16 bytes. Where the product is so large that copies cost little beside it, it is made
 * of copies that are filled up with zeros, and its result copied out of a larger one. */
#define PITCH 8         /* elements of two bytes */
#define WORTH_PITCH 512 /* rows, columns and depth from which on it pays */

static int64_t filled(int64_t size) {
    return (size + PITCH - 1) / PITCH * PITCH;
}

static bool wants_pitch(const tu_device_product *product) {
    bool narrow = product->dtype == TUTTI_BF16 || product->dtype == TUTTI_F16;
    if (!narrow || product->result != product->dtype || product->batch != 1 || product->rows < WORTH_PITCH ||
        product->columns < WORTH_PITCH || product->depth < WORTH_PITCH)
        return false;
    int64_t left = product->left.column != 1 ? product->left.column : product->left.row;
    int64_t right = product->right.column != 1 ? product->right.column : product->right.row;
    return ((product->rows | product->columns | product->depth | left | right | product->out.row) & (PITCH - 1)) != 0;
}

/* Rows of one place at another, which is allocated for them; the smaller of both sizes is copied. */
static tutti_status copy_pitched(tu_device *device, tu_launch_pitch flat) {
    return tu_device_launch_blocks(device, "kernel_pitch", flat.to_rows < 65535 ? flat.to_rows : 65535,
                                   TU_DEVICE_THREADS, &flat);
}

/* A filled copy in place of a matrix of so many rows and columns, where that is needed. */
static tutti_status take_pitch(tu_device *device, tu_device_matrix *matrix, int64_t rows, int64_t columns,
                               tu_device_block *taken) {
    bool turned = matrix->column != 1;
    int64_t lines = turned ? columns : rows, width = turned ? rows : columns;
    int64_t distance = turned ? matrix->column : matrix->row, better = filled(width);
    if ((better == width || (matrix->zero_gaps && distance == better)) && filled(lines) == lines &&
        distance % PITCH == 0)
        return TUTTI_OK;
    if ((turned && matrix->row != 1) || distance < width)
        return TUTTI_ERROR_UNSUPPORTED;
    const void *from = matrix->data;
    tutti_status status = device->table->allocate(device->state, device->index, tu_device_stream(device),
                                                  (size_t)(filled(lines) * better) * 2, taken);
    if (status != TUTTI_OK)
        return status;
    *matrix = (tu_device_matrix){ taken->data, turned ? 1 : better, turned ? better : 1, 0 };
    return copy_pitched(device, (tu_launch_pitch){ tu_place_of(from), tu_place_of(taken->data), lines, width, distance,
                                                   better, filled(lines), better });
}

static tutti_status multiply_pitched(tu_device *device, const tu_device_product *product) {
    tu_device_block taken[3] = { { 0 } };
    tu_device_product larger = *product;
    larger.rows = filled(product->rows);
    larger.columns = filled(product->columns);
    larger.depth = filled(product->depth);
    tutti_status status = take_pitch(device, &larger.left, product->rows, product->depth, &taken[0]);
    if (status == TUTTI_OK)
        status = take_pitch(device, &larger.right, product->depth, product->columns, &taken[1]);
    bool out = larger.rows != product->rows || larger.columns != product->columns || product->out.row % PITCH != 0;
    if (status == TUTTI_OK && out)
        status = device->table->allocate(device->state, device->index, tu_device_stream(device),
                                         (size_t)(larger.rows * larger.columns) * 2, &taken[2]);
    if (status == TUTTI_OK && out)
        larger.out = (tu_device_matrix){ taken[2].data, larger.columns, 1, 0 };
    if (status == TUTTI_OK)
        status = multiply_there(device, &larger);
    if (status == TUTTI_OK && out)
        status = copy_pitched(device, (tu_launch_pitch){ tu_place_of(taken[2].data), tu_place_of(product->out.data),
                                                         product->rows, product->columns, larger.columns,
                                                         product->out.row, product->rows, product->columns });
    for (int i = 0; i < 3; i++)
        if (taken[i].handle != NULL)
            device->table->release(device->state, device->index, &taken[i]);
    return status;
}

tutti_status tu_device_multiply(tu_device *device, const tu_device_product *product) {
    if (product->rows == 0 || product->columns == 0 || product->batch == 0)
        return TUTTI_OK;
    tutti_status status = wants_pitch(product) ? multiply_pitched(device, product) : TUTTI_ERROR_UNSUPPORTED;
    return status == TUTTI_OK ? TUTTI_OK : multiply_there(device, product); /* without memory for copies, as it lies */
}

/* Where the leading dimensions of x, broadcast to out's, lie one step apart; false where they do not. */
static bool batch_step(const tt_tensor *x, const tt_tensor *out, int64_t *step) {
    int64_t stride = -1, count = 1;
    for (int i = out->ndim - 3; i >= 0; i--) {
        int dim = i - (out->ndim - x->ndim);
        int64_t own = dim >= 0 && x->sizes[dim] != 1 ? x->strides[dim] : 0;
        if (out->sizes[i] == 1)
            continue;
        if (stride < 0)
            stride = own;
        else if (own != stride * count)
            return false;
        count *= out->sizes[i];
    }
    *step = stride < 0 ? 0 : stride;
    return true;
}

/* Of what was made with gaps of 0 a part of each row has the rest of the row behind it: who counts on the gap looks
 * whether it begins there (take_pitch). */
static tu_device_matrix matrix_there(const tt_tensor *x, int64_t step) {
    return (tu_device_matrix){ tu_pointer(x), x->strides[x->ndim - 2], x->strides[x->ndim - 1], step,
                               x->storage->zero_gaps };
}

static bool is_tall(const tt_tensor *left, const tt_tensor *right);
static int64_t batch_offset(const tt_tensor *x, const tt_tensor *out, int64_t batch);

static tutti_status matmul_on_device(tu_call *call) {
    const tt_tensor *left = call->inputs[0], *right = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    tu_device *device = tu_device_of(out);
    int64_t rows = out->sizes[out->ndim - 2], columns = out->sizes[out->ndim - 1], of_left = 0, of_right = 0;
    tu_device_product product = { .rows = rows,
                                  .columns = columns,
                                  .depth = left->sizes[left->ndim - 1],
                                  .batch = 1,
                                  .dtype = left->dtype,
                                  .result = out->dtype };
    if (out->numel == 0)
        return TUTTI_OK;
    product.out = (tu_device_matrix){ tu_pointer(out), columns, 1, rows * columns };
    product.left = matrix_there(left, 0);
    product.right = matrix_there(right, 0);
    if (is_tall(left, right)) {
        product.rows = out->numel / columns;
        return tu_device_multiply(device, &product);
    }
    int64_t count = out->numel / (rows * columns), size = tu_dtype_bytes[out->dtype];
    if (batch_step(left, out, &of_left) && batch_step(right, out, &of_right)) {
        product.batch = count;
        product.left.step = of_left;
        product.right.step = of_right;
        return tu_device_multiply(device, &product);
    }
    tutti_status status = TUTTI_OK;
    for (int64_t batch = 0; batch < count && status == TUTTI_OK; batch++) {
        product.left.data = (const char *)tu_pointer(left) + batch_offset(left, out, batch) * size;
        product.right.data = (const char *)tu_pointer(right) + batch_offset(right, out, batch) * size;
        product.out.data = (const char *)tu_pointer(out) + batch * rows * columns * size;
        status = tu_device_multiply(device, &product);
    }
    return status;
}

/* Whether the kernel for rows of four serves. */
static bool adds_quickly(const tt_tensor *out, const tt_tensor *sum, const tt_tensor *bias) {
    bool typed = out->dtype == TUTTI_F32 || out->dtype == TUTTI_BF16 || out->dtype == TUTTI_F16;
    uint64_t places = tu_place_of(tu_pointer(out)) | tu_place_of(tu_pointer(sum)) | tu_place_of(tu_pointer(bias));
    return typed && sum->dtype == TUTTI_F32 && bias->dtype == out->dtype && bias->flags & TU_CONTIGUOUS &&
           out->flags & TU_CONTIGUOUS && bias->numel % 4 == 0 && places % 16 == 0;
}

/* By the vendor's library at once, the bias added before the one rounding; UNSUPPORTED where it has no such. */
static tutti_status multiply_biased(tu_device *device, tu_device_product product, const tt_tensor *bias,
                                    const tt_tensor *out) {
    bool typed = out->dtype == TUTTI_F32 || out->dtype == TUTTI_BF16 || out->dtype == TUTTI_F16;
    if (!typed || bias->dtype != out->dtype || !(bias->flags & TU_CONTIGUOUS) ||
        tu_place_of(tu_pointer(bias)) % 16 != 0 || wants_pitch(&product))
        return TUTTI_ERROR_UNSUPPORTED;
    product.out.data = tu_pointer(out);
    product.result = (tutti_dtype)out->dtype;
    product.bias = tu_pointer(bias);
    return multiply_there(device, &product);
}

/* sum + bias into out, the product of a linear layer and its bias. */
static tutti_status add_bias(const tu_call *call, tt_tensor *sum, tt_tensor *bias, tt_tensor *out) {
    if (adds_quickly(out, sum, bias)) {
        char name[TU_KERNEL_NAME];
        tu_launch_bias flat = { tu_place_of(tu_pointer(sum)), tu_place_of(tu_pointer(out)),
                                tu_place_of(tu_pointer(bias)), out->numel / bias->numel, bias->numel };
        return tu_device_launch(tu_device_of(out), tu_kernel_name(name, "bias", out->dtype), out->numel / 4,
                                TU_DEVICE_THREADS, &flat);
    }
    tt_tensor *inputs[] = { sum, bias };
    tu_call addition;
    tu_call_init(&addition, &tu_operator_add, 2, inputs, &(tu_add_attributes){});
    addition.device = call->device;
    addition.results[0].dtype = sum->dtype;
    addition.outputs[0] = out;
    return tu_operator_add.kernels[TU_ON_CUDA](&addition);
}

/* x weight^T + bias: where the library cannot add the bias, the product in f32 for narrow floats, and one rounding of
 * its sum with the bias. */
static tutti_status linear_on_device(tu_call *call) {
    const tt_tensor *weight = call->inputs[1];
    tt_tensor *out = call->outputs[0], *bias = call->inputs[2], *to = NULL;
    bool narrow = tu_is_float(out->dtype) && tu_dtype_bytes[out->dtype] < 4 && bias != NULL;
    if (out->numel == 0)
        return TUTTI_OK;
    tt_tensor *x = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    if (x == NULL)
        return TUTTI_ERROR_MEMORY;
    int64_t columns = weight->sizes[0], depth = weight->sizes[1];
    tu_device_product product = { .rows = out->numel / columns,
                                  .columns = columns,
                                  .depth = depth,
                                  .batch = 1,
                                  .left = { tu_pointer(x), depth, 1, 0 },
                                  .right = { tu_pointer(weight), weight->strides[1], weight->strides[0], 0 },
                                  .out = { NULL, columns, 1, 0 },
                                  .dtype = x->dtype };
    tutti_status status =
        bias != NULL ? multiply_biased(tu_device_of(out), product, bias, out) : TUTTI_ERROR_UNSUPPORTED;
    if (status == TUTTI_ERROR_UNSUPPORTED) {
        product.result = narrow ? TUTTI_F32 : (tutti_dtype)out->dtype;
        to = tu_stage_out(out, product.result);
        product.out.data = to != NULL ? tu_pointer(to) : NULL;
        status = to != NULL ? tu_device_multiply(tu_device_of(out), &product) : TUTTI_ERROR_MEMORY;
        if (status == TUTTI_OK && bias != NULL)
            status = add_bias(call, to, bias, out);
    }
    tu_tensor_drop(x);
    tu_tensor_drop(to);
    return status;
}

/* ---- matmul of at least two dimensions ---- */

tutti_status tu_matmul_shape(tu_call *call) {
    const tt_tensor *left = call->inputs[0], *right = call->inputs[1];
    tu_shape *result = &call->results[0];
    if (left->dtype != right->dtype)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "expected a and b to have the same dtype, but got %s and %s",
                             tu_describe(left), tu_describe(right));
    if (left->dtype == TUTTI_BOOL)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for bool");
    if (left->ndim < 2 || right->ndim < 2 || left->sizes[left->ndim - 1] != right->sizes[right->ndim - 2])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "%s and %s cannot be multiplied: the last size of a and the last but one of b differ",
                             tu_describe(left), tu_describe(right));
    int ndim = left->ndim > right->ndim ? left->ndim : right->ndim;
    *result = (tu_shape){ .dtype = left->dtype, .device = call->device, .ndim = ndim };
    for (int i = 0; i < ndim - 2; i++) {
        int64_t of_left = i < ndim - left->ndim ? 1 : left->sizes[i - (ndim - left->ndim)],
                of_right = i < ndim - right->ndim ? 1 : right->sizes[i - (ndim - right->ndim)];
        if (of_left != of_right && of_left != 1 && of_right != 1)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the leading dimensions of %s and %s do not broadcast",
                                 tu_describe(left), tu_describe(right));
        result->sizes[i] = of_left == 1 ? of_right : of_left;
    }
    result->sizes[ndim - 2] = left->sizes[left->ndim - 2];
    result->sizes[ndim - 1] = right->sizes[right->ndim - 1];
    return tu_shape_contiguous("matmul", result);
}

/* Offset, in elements, of the batch-th matrix of x in the broadcast batch of `out`. */
static int64_t batch_offset(const tt_tensor *x, const tt_tensor *out, int64_t batch) {
    int64_t offset = 0;
    for (int i = out->ndim - 3; i >= 0; i--) {
        int64_t index = batch % out->sizes[i];
        batch /= out->sizes[i];
        int dim = i - (out->ndim - x->ndim);
        if (dim >= 0 && x->sizes[dim] != 1)
            offset += index * x->strides[dim];
    }
    return offset;
}

/* Whether all rows of `left`, batch after batch, are one tall matrix; `right` has no batch. */
static bool is_tall(const tt_tensor *left, const tt_tensor *right) {
    if (right->ndim != 2 || left->strides[left->ndim - 1] != 1)
        return false;
    int64_t expected = left->strides[left->ndim - 2] * left->sizes[left->ndim - 2];
    for (int i = left->ndim - 3; i >= 0; i--) {
        if (left->sizes[i] != 1 && left->strides[i] != expected)
            return false;
        expected *= left->sizes[i];
    }
    return true;
}

/* Products of all batches. */
typedef struct batches {
    const tt_tensor *left, *right, *out;
    int64_t rows, columns, depth;
    _Atomic int status; /* the first that failed; any of the threads writes it */
} batches;

static void multiply_batches(void *context, int64_t begin, int64_t end) {
    batches *job = context;
    tu_matrix of_left = matrix_of(job->left), of_right = matrix_of(job->right);
    int64_t size = tu_dtype_bytes[job->out->dtype], step = job->rows * job->columns * size;
    for (int64_t batch = begin; batch < end; batch++) {
        tu_matrix left = of_left, right = of_right;
        left.data = (const char *)of_left.data + batch_offset(job->left, job->out, batch) * size;
        right.data = (const char *)of_right.data + batch_offset(job->right, job->out, batch) * size;
        tutti_status status = tu_gemm(job->out->dtype, job->rows, job->columns, job->depth, left, right, 0,
                                      (char *)tu_pointer(job->out) + batch * step, job->columns, NULL);
        if (status != TUTTI_OK) {
            atomic_store_explicit(&job->status, (int)status, memory_order_relaxed);
            return;
        }
    }
}

/* Whether threads take whole products: where there are plenty for our own kernels, or a BLAS, which may be called from
 * several threads, would not share one among threads of its own. */
static bool is_shared(const batches *job, int64_t count) {
    tutti_dtype dtype = job->out->dtype;
    if (tu_product_is_ours(dtype) && count >= 2 * tu_process_compute_threads())
        return true;
    return (dtype == TUTTI_F32 || dtype == TUTTI_F64) &&
           (double)job->rows * (double)job->columns * (double)job->depth <= 131072;
}

tutti_status tu_matmul_everywhere(tu_call *call) {
    const tt_tensor *left = call->inputs[0], *right = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int64_t rows = out->sizes[out->ndim - 2], columns = out->sizes[out->ndim - 1], depth = left->sizes[left->ndim - 1];
    if (out->numel == 0)
        return TUTTI_OK;
    if (tu_on_device(out))
        return matmul_on_device(call);
    tu_matrix of_left = matrix_of(left), of_right = matrix_of(right);
    if (is_tall(left, right))
        return tu_gemm(out->dtype, out->numel / columns, columns, depth, of_left, of_right, 0, tu_pointer(out), columns,
                       tu_epilogue_take());
    batches job = { left, right, out, rows, columns, depth, TUTTI_OK };
    int64_t count = out->numel / (rows * columns);
    if (!is_shared(&job, count)) {
        multiply_batches(&job, 0, count);
        return (tutti_status)atomic_load_explicit(&job.status, memory_order_relaxed);
    }
    tu_parallel(count, 1 + 262144 / (rows * columns * (depth + 1)), multiply_batches, &job);
    tutti_status status = (tutti_status)atomic_load_explicit(&job.status, memory_order_relaxed);
    if (status == TUTTI_OK)
        return TUTTI_OK; /* else another thread may have the message */
    return tu_call_error(call, status, "a product of one of %lld batches failed", (long long)count);
}

/* The product of all sizes but the last. */
static int64_t rows_of(const tu_shape *shape) {
    int64_t rows = 1;
    for (int i = 0; i < shape->ndim - 1; i++)
        rows *= shape->sizes[i];
    return rows;
}

static tt_tensor *adjoint(tt_tensor *x) {
    return tu_conjugate(tt_transpose(x, -1, -2));
}

/* Against a plain matrix on the right, all leading dimensions of the left one are rows, and its gradient is one
 * product. */
void tu_matmul_gradient(tu_gradient *gradient) {
    tt_tensor *grad = gradient->grads[0];
    const tu_shape *of_right = tu_input_shape(gradient, 1);
    if (gradient->needs[0])
        gradient->results[0] = tt_matmul(grad, adjoint(tu_saved(gradient, TU_INPUT(1))));
    if (!gradient->needs[1])
        return;
    tt_tensor *left = tu_saved(gradient, TU_INPUT(0));
    if (of_right->ndim == 2 && left != NULL && left->ndim > 2) {
        int64_t rows = rows_of(tu_input_shape(gradient, 0));
        left = tt_reshape(left, tt_shape(rows, of_right->sizes[0]));
        grad = tt_reshape(grad, tt_shape(rows, of_right->sizes[1]));
    }
    gradient->results[1] = tt_matmul(adjoint(left), grad);
}

tt_tensor *tt_matmul(tt_tensor *a, tt_tensor *b) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("matmul", "a", a)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_check("matmul", "b", b)) != TUTTI_OK)
        return NULL;
    bool row = a->ndim == 1, column = b->ndim == 1;
    tt_tensor *product = tu_matmul(row ? tt_unsqueeze(a, 0) : a, column ? tt_unsqueeze(b, 1) : b);
    if (row)
        product = tu_historian_table.own(tt_squeeze(product, -2));
    return column ? tu_historian_table.own(tt_squeeze(product, -1)) : product;
}

/* ---- linear ---- */

tutti_status tu_linear_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *weight = call->inputs[1], *bias = call->inputs[2];
    if (x->dtype != weight->dtype || (bias != NULL && bias->dtype != x->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "expected one dtype, but x is %s, weight %s and bias %s",
                             tu_describe(x), tu_describe(weight), tu_describe(bias));
    if (x->dtype == TUTTI_BOOL)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for bool");
    if (x->ndim < 1 || weight->ndim != 2 || x->sizes[x->ndim - 1] != weight->sizes[1])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the last size of x, %s, must be the last size of weight, %s",
                             tu_describe(x), tu_describe(weight));
    if (bias != NULL && (bias->ndim != 1 || bias->sizes[0] != weight->sizes[0]))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "bias is %s and must have one entry per row of weight, %s",
                             tu_describe(bias), tu_describe(weight));
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[x->ndim - 1] = weight->sizes[0];
    return tu_shape_contiguous("linear", &call->results[0]);
}

/* One call's matrices: out (rows, columns) = x (rows, depth) weight^T (depth, columns). */
typedef struct product {
    int64_t rows, columns, depth;
    tu_matrix x, weight;
} product;

static product product_of(const tt_tensor *x, const tt_tensor *weight) {
    int64_t depth = weight->sizes[1];
    return (product){ depth > 0 ? x->numel / depth : 0,
                      weight->sizes[0],
                      depth,
                      { tu_pointer(x), depth, 1 },
                      { tu_pointer(weight), weight->strides[1], weight->strides[0] } };
}

/* The product begins with the bias; where others than our kernels make it, or it is one column, which they make as a
 * row, the bias goes into the result first. */
static tutti_status add_product(tt_tensor *out, const tt_tensor *x, const tt_tensor *weight, const tt_tensor *bias,
                                tu_epilogue *epilogue) {
    product of = product_of(x, weight);
    if (bias != NULL && of.depth > 0 && of.columns > 1 && tu_product_is_ours(out->dtype) && bias->flags & TU_CONTIGUOUS)
        return tu_product(out->dtype, of.rows, of.columns, of.depth, of.x, of.weight, tu_pointer(bias), 0,
                          tu_pointer(out), of.columns, epilogue);
    if (bias != NULL)
        tu_copy_tensor(out, bias);
    return tu_gemm(out->dtype, out->numel / of.columns, of.columns, of.depth, of.x, of.weight, bias != NULL ? 1 : 0,
                   tu_pointer(out), of.columns, epilogue);
}

/* Narrow floats with a bias: product and sum in f32, rounded once. */
static tutti_status narrow_linear(tt_tensor *out, const tt_tensor *x, const tt_tensor *weight, const tt_tensor *bias) {
    tt_tensor *wide = tu_stage_out(out, TUTTI_F32), *wide_bias = tu_stage_in(bias, TUTTI_F32), *wide_x = NULL,
              *wide_weight = NULL;
    product of = product_of(x, weight);
    tutti_status status = wide != NULL && wide_bias != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    if (status == TUTTI_OK && of.depth > 0 &&
        tu_dnnl_gemm(out->dtype, TUTTI_F32, of.rows, of.columns, of.depth, of.x, of.weight, tu_pointer(wide),
                     of.columns)) {
        float *to = tu_pointer(wide);
        for (int64_t i = 0; i < out->numel; i++)
            to[i] += ((const float *)tu_pointer(wide_bias))[i % of.columns];
    } else if (status == TUTTI_OK) {
        wide_x = tu_stage_in(x, TUTTI_F32);
        wide_weight = tu_stage_in(weight, TUTTI_F32);
        status = wide_x != NULL && wide_weight != NULL ? add_product(wide, wide_x, wide_weight, wide_bias, NULL)
                                                       : TUTTI_ERROR_MEMORY;
    }
    tu_tensor_drop(wide_x);
    tu_tensor_drop(wide_weight);
    tu_tensor_drop(wide_bias);
    if (status == TUTTI_OK)
        tu_stage_done(out, wide);
    else
        tu_tensor_drop(wide);
    return status;
}

/* Integers, which no BLAS adds: the product, then the sum. */
static tutti_status integer_linear(tt_tensor *out, const tt_tensor *x, const tt_tensor *weight, const tt_tensor *bias) {
    tutti_status status = add_product(out, x, weight, NULL, NULL);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *inputs[] = { out, (tt_tensor *)bias };
    tu_call sum;
    tu_call_init(&sum, &tu_operator_add, 2, inputs, &(tu_add_attributes){});
    sum.results[0].dtype = out->dtype;
    sum.outputs[0] = out;
    return tu_operator_add.kernels[TU_ON_CPU](&sum);
}

tutti_status tu_linear_everywhere(tu_call *call) {
    const tt_tensor *weight = call->inputs[1], *bias = call->inputs[2];
    tt_tensor *out = call->outputs[0], *x;
    tutti_status status;
    if (out->numel == 0)
        return TUTTI_OK;
    if (tu_on_device(out))
        return linear_on_device(call);
    if ((x = tu_stage_in(call->inputs[0], out->dtype)) == NULL)
        return TUTTI_ERROR_MEMORY;
    if (bias == NULL || out->dtype == TUTTI_F32 || out->dtype == TUTTI_F64 || tu_is_complex(out->dtype))
        status = add_product(out, x, weight, bias, tu_epilogue_take());
    else
        status = (tu_is_float(out->dtype) ? narrow_linear : integer_linear)(out, x, weight, bias);
    tu_tensor_drop(x);
    return status;
}

void tu_linear_gradient(tu_gradient *gradient) {
    const tu_shape *weight = tu_input_shape(gradient, 1);
    tt_tensor *grad = gradient->grads[0];
    if (gradient->needs[0])
        gradient->results[0] = tt_matmul(grad, tu_conjugate(tu_saved(gradient, TU_INPUT(1))));
    int64_t rows = rows_of(tu_input_shape(gradient, 0));
    tt_tensor *flat =
        gradient->needs[1] || gradient->needs[2] ? tt_reshape(grad, tt_shape(rows, weight->sizes[0])) : NULL;
    if (gradient->needs[1]) {
        tt_tensor *x = tt_reshape(tu_saved(gradient, TU_INPUT(0)), tt_shape(rows, weight->sizes[1]));
        gradient->results[1] = tt_matmul(tt_transpose(flat, 0, 1), tu_conjugate(x));
    }
    if (gradient->needs[2])
        gradient->results[2] = tt_sum_dims(flat, tt_shape(0), false);
}

/* ---- narrow types ---- */

static tutti_status plain_matrices(const tu_call *call) {
    const tt_tensor *left = call->inputs[0], *right = call->inputs[1];
    if (left->ndim != 2 || right->ndim != 2 || left->sizes[1] != right->sizes[0])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s and %s cannot be multiplied", tu_describe(left),
                             tu_describe(right));
    return TUTTI_OK;
}

tutti_status tu_int_matmul_shape(tu_call *call) {
    tutti_status status = plain_matrices(call);
    if (status != TUTTI_OK)
        return status;
    if (call->inputs[0]->dtype != TUTTI_I8 || call->inputs[1]->dtype != TUTTI_I8)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "expected i8, but got %s and %s", tu_describe(call->inputs[0]),
                             tu_describe(call->inputs[1]));
    call->results[0] = (tu_shape){ .dtype = TUTTI_I32,
                                   .device = call->device,
                                   .ndim = 2,
                                   .sizes = { call->inputs[0]->sizes[0], call->inputs[1]->sizes[1] } };
    return tu_shape_contiguous("int_matmul", &call->results[0]);
}

/* The vendor's library multiplies i8 only where both matrices lie by their depth, in rows of whole packs. What lies
 * otherwise is copied so, filled up with zeros, where the product is large enough to be worth that. */
#define INT8_PACK 16  /* elements */
#define WORTH_INT8 64 /* rows, columns and depth from which on copies pay */

static int64_t whole_packs(int64_t size) {
    return (size + INT8_PACK - 1) / INT8_PACK * INT8_PACK;
}

/* x, held, or a copy of it of so many lines along the depth, which is its last dimension, or its first where `turned`
 * says so. */
static tt_tensor *lie_by_depth(const tt_tensor *x, bool turned, int64_t lines) {
    int along = turned ? 0 : 1, across = 1 - along;
    bool lies = x->strides[along] == 1 && x->sizes[across] == lines && x->sizes[along] % INT8_PACK == 0 &&
                x->strides[across] % INT8_PACK == 0 && tu_place_of(tu_pointer(x)) % INT8_PACK == 0;
    if (lies)
        return tu_tensor_hold((tt_tensor *)x);
    tu_shape shape = { .dtype = TUTTI_I8,
                       .device = x->device,
                       .ndim = 2,
                       .sizes = { lines, whole_packs(x->sizes[along]) },
                       .strides = { whole_packs(x->sizes[along]), 1 } };
    tt_tensor *made = tu_tensor_new(&shape);
    if (made == NULL)
        return NULL;
    tu_shape part = { .dtype = TUTTI_I8, .device = x->device, .ndim = 2 };
    part.sizes[0] = x->sizes[0];
    part.sizes[1] = x->sizes[1];
    part.strides[across] = shape.strides[0];
    part.strides[along] = 1;
    tt_tensor inside = tu_tensor_look(made, &part);
    tutti_status status = TUTTI_OK;
    if (made->numel > x->numel)
        status = tu_device_fill(made, 0);
    if (status == TUTTI_OK)
        status = tu_copy_tensor(&inside, x);
    if (status == TUTTI_OK)
        return made;
    tu_tensor_drop(made);
    return NULL;
}

/* By copies in which everything is whole packs. */
static tutti_status int_matmul_packed(tu_device *device, const tt_tensor *left, const tt_tensor *right,
                                      const tt_tensor *out) {
    int64_t rows = out->sizes[0], columns = whole_packs(out->sizes[1]);
    tt_tensor *lines = lie_by_depth(left, false, rows), *wide = (tt_tensor *)out;
    tt_tensor *turned = lines != NULL ? lie_by_depth(right, true, columns) : NULL;
    tu_shape shape = {
        .dtype = TUTTI_I32, .device = out->device, .ndim = 2, .sizes = { rows, columns }, .strides = { columns, 1 }
    };
    wide = turned == NULL ? NULL : columns == out->sizes[1] ? tu_tensor_hold(wide) : tu_tensor_new(&shape);
    tutti_status status = wide == NULL ? TUTTI_ERROR_MEMORY : TUTTI_OK;
    if (status == TUTTI_OK) {
        int64_t between = turned->strides[turned == right ? 1 : 0]; /* from one column to the next */
        tu_device_product product = { .rows = rows,
                                      .columns = columns,
                                      .depth = whole_packs(left->sizes[1]),
                                      .batch = 1,
                                      .left = { tu_pointer(lines), lines->strides[0], 1, 0 },
                                      .right = { tu_pointer(turned), 1, between, 0 },
                                      .out = { tu_pointer(wide), columns, 1, 0 },
                                      .dtype = TUTTI_I8,
                                      .result = TUTTI_I32 };
        status = tu_device_multiply(device, &product);
    }
    if (status == TUTTI_OK && wide != out) {
        tu_shape part = tu_shape_of(out);
        part.offset = 0;
        part.strides[0] = columns;
        tt_tensor inside = tu_tensor_look(wide, &part);
        status = tu_copy_tensor(out, &inside);
    }
    tu_tensor_drop(lines);
    tu_tensor_drop(turned);
    tu_tensor_drop(wide);
    return status;
}

static tutti_status int_matmul_on_device(const tt_tensor *left, const tt_tensor *right, const tt_tensor *out) {
    tu_device *device = tu_device_of(out);
    int64_t rows = left->sizes[0], depth = left->sizes[1], columns = right->sizes[1];
    if (device->table->product != NULL && rows >= WORTH_INT8 && depth >= WORTH_INT8 && columns >= WORTH_INT8)
        return int_matmul_packed(device, left, right, out);
    tu_device_product product = { .rows = rows,
                                  .columns = columns,
                                  .depth = depth,
                                  .batch = 1,
                                  .left = matrix_there(left, 0),
                                  .right = matrix_there(right, 0),
                                  .out = { tu_pointer(out), columns, 1, 0 },
                                  .dtype = TUTTI_I8,
                                  .result = TUTTI_I32 };
    return tu_device_multiply(device, &product);
}

tutti_status tu_int_matmul_everywhere(tu_call *call) {
    const tt_tensor *left = call->inputs[0], *right = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int64_t rows = left->sizes[0], depth = left->sizes[1], columns = right->sizes[1];
    if (tu_on_device(out))
        return out->numel == 0 ? TUTTI_OK : int_matmul_on_device(left, right, out);
    tu_matrix of_left = matrix_of(left), of_right = matrix_of(right);
    return out->numel == 0 ? TUTTI_OK : tu_int8_gemm(rows, columns, depth, of_left, of_right, tu_pointer(out));
}

tutti_status tu_scaled_matmul_shape(tu_call *call) {
    const tu_scaled_matmul_attributes *attributes = call->attributes;
    const tt_tensor *bias = call->inputs[4], *result_scale = call->inputs[5];
    tutti_dtype dtype = attributes->dtype;
    tutti_status status = plain_matrices(call);
    if (status != TUTTI_OK)
        return status;
    int64_t rows = call->inputs[0]->sizes[0], columns = call->inputs[1]->sizes[1];
    if (!tu_is_float(dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the result's dtype must be a float, not %s",
                             tutti_dtype_name(dtype));
    if (tu_is_complex(call->inputs[0]->dtype) || tu_is_complex(call->inputs[1]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for complex matrices");
    if ((status = tu_scaled_check("scaled_matmul", "scale_a", call->inputs[2], rows, 1)) != TUTTI_OK ||
        (status = tu_scaled_check("scaled_matmul", "scale_b", call->inputs[3], 1, columns)) != TUTTI_OK)
        return status;
    if (bias != NULL && (bias->ndim != 1 || bias->sizes[0] != columns))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "bias is %s and must have %lld entries", tu_describe(bias),
                             (long long)columns);
    if (result_scale != NULL && (result_scale->numel != 1 || result_scale->dtype != TUTTI_F32))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "result_scale is %s and must be one f32",
                             tu_describe(result_scale));
    call->results[0] = (tu_shape){ .dtype = dtype, .device = call->device, .ndim = 2, .sizes = { rows, columns } };
    return tu_shape_contiguous("scaled_matmul", &call->results[0]);
}

/* The library's own scaled product: of f8, with scales of both sides alike, and nothing else. UNSUPPORTED where it is
 * another one. */
static tutti_status scaled_by_library(const tu_device *device, const tu_device_scaled *scaled) {
    tu_device_product product = scaled->product;
    if (device->table->product == NULL || product.depth == 0 || tu_dtype_bytes[product.dtype] != 1 ||
        scaled->bias != NULL || scaled->whole != NULL || scaled->scales_rows != scaled->scales_columns)
        return TUTTI_ERROR_UNSUPPORTED;
    product.left_scale = scaled->row_scales;
    product.right_scale = scaled->column_scales;
    product.scales_rows = scaled->scales_rows;
    product.scales_columns = scaled->scales_columns;
    return device->table->product(device->state, device->index, tu_device_stream(device), &product);
}

tutti_status tu_device_multiply_scaled(tu_device *device, const tu_device_scaled *scaled) {
    tu_device_product product = scaled->product;
    int64_t rows = product.rows * product.batch;
    if (rows == 0 || product.columns == 0)
        return TUTTI_OK;
    tutti_status status = scaled_by_library(device, scaled);
    if (status != TUTTI_ERROR_UNSUPPORTED)
        return status;
    tu_shape shape = { .dtype = TUTTI_F32,
                       .device = device->number,
                       .ndim = 2,
                       .sizes = { rows, product.columns },
                       .strides = { product.columns, 1 } };
    tt_tensor *wide = tu_tensor_new(&shape);
    if (wide == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_launch_scaled flat = { .product = tu_place_of(tu_pointer(wide)),
                              .out = tu_place_of(product.out.data),
                              .row_scales = tu_place_of(scaled->row_scales),
                              .column_scales = tu_place_of(scaled->column_scales),
                              .bias = tu_place_of(scaled->bias),
                              .whole = tu_place_of(scaled->whole),
                              .rows = rows,
                              .columns = product.columns,
                              .row_step = scaled->scales_rows,
                              .column_step = scaled->scales_columns,
                              .dtype = (int32_t)product.result };
    product.out = (tu_device_matrix){ tu_pointer(wide), product.columns, 1, product.rows * product.columns };
    product.result = TUTTI_F32;
    status = tu_device_multiply(device, &product);
    if (status == TUTTI_OK)
        status = tu_device_launch(device, "kernel_scaled", rows * product.columns, TU_DEVICE_THREADS, &flat);
    tu_tensor_drop(wide);
    return status;
}

/* Matrices as they lie where one of their strides is 1, and in one type. */
static tt_tensor *scaled_operand(const tt_tensor *x, tutti_dtype dtype) {
    bool lies = x->dtype == dtype && (x->strides[0] == 1 || x->strides[1] == 1);
    return lies ? tu_tensor_hold((tt_tensor *)x) : tu_stage_in(x, dtype);
}

static tutti_status scaled_on_device(tu_call *call) {
    const tu_scaled_matmul_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0], *in[6] = { NULL };
    tutti_dtype dtype = call->inputs[0]->dtype;
    if (dtype != (tutti_dtype)call->inputs[1]->dtype || !tu_is_float(dtype) || tu_dtype_bytes[dtype] > 2)
        dtype = TUTTI_F32;
    bool staged = true;
    for (int i = 0; i < 6; i++) {
        in[i] = i < 2 ? scaled_operand(call->inputs[i], dtype) : tu_stage_in(call->inputs[i], TUTTI_F32);
        staged = staged && (in[i] != NULL || call->inputs[i] == NULL);
    }
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (staged) {
        int64_t columns = out->sizes[1];
        tu_device_scaled scaled = { .product = { .rows = out->sizes[0],
                                                 .columns = columns,
                                                 .depth = in[0]->sizes[1],
                                                 .batch = 1,
                                                 .left = matrix_there(in[0], 0),
                                                 .right = matrix_there(in[1], 0),
                                                 .out = { tu_pointer(out), columns, 1, 0 },
                                                 .dtype = dtype,
                                                 .result = out->dtype,
                                                 .fast = attributes->use_fast_accum },
                                    .row_scales = tu_pointer(in[2]),
                                    .column_scales = tu_pointer(in[3]),
                                    .bias = in[4] != NULL ? tu_pointer(in[4]) : NULL,
                                    .whole = in[5] != NULL ? tu_pointer(in[5]) : NULL,
                                    .scales_rows = in[2]->numel != 1,
                                    .scales_columns = in[3]->numel != 1 };
        status = tu_device_multiply_scaled(tu_device_of(out), &scaled);
    }
    for (int i = 0; i < 6; i++)
        tu_tensor_drop(in[i]);
    return status;
}

tutti_status tu_scaled_matmul_everywhere(tu_call *call) {
    if (tu_on_device(call->outputs[0]))
        return call->outputs[0]->numel == 0 ? TUTTI_OK : scaled_on_device(call);
    const tt_tensor *left = call->inputs[0];
    tt_tensor *out = call->outputs[0], *scales = tu_stage_in(call->inputs[2], TUTTI_F32);
    tu_scaled scaled;
    if (scales == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status =
        out->numel == 0 ? TUTTI_OK
                        : tu_scaled_open(&scaled, call->inputs[1], call->inputs[3], call->inputs[4], call->inputs[5]);
    if (status == TUTTI_OK && out->numel > 0) {
        status = tu_scaled_rows(&scaled, out->sizes[0], matrix_of(left), left->dtype, tu_pointer(scales),
                                scales->numel == 1 ? 0 : 1, tu_pointer(out), out->dtype);
        tu_scaled_close(&scaled);
    }
    tu_tensor_drop(scales);
    return status;
}
