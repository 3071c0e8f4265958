/* SPDX-License-Identifier: Apache-2.0
 *
 * The host side of products that ranks make together: which there are, descriptors of their matrices, and the launch.
 */
#include "together.h"

#include <string.h>

#include "tensors.h"

/* ---- kernels ---- */

CUresult tu_gpu_together_load(tu_gpus *gpus, tu_gpu *gpu) {
    static const char *const names[2][2] = { { "kernel_together_bf16_columns", "kernel_together_bf16_rows" },
                                             { "kernel_together_f16_columns", "kernel_together_f16_rows" } };
    const tu_cuda_driver *driver = &gpus->driver;
    if (gpu->major != 9 || driver->cuTensorMapEncodeTiled == NULL || driver->cuFuncSetAttribute == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver->cuModuleLoadData(&gpu->together, tu_gpu_together_image);
    for (int i = 0; i < 4 && result == CUDA_SUCCESS; i++) {
        CUfunction *kernel = &gpu->together_kernels[i / 2][i % 2];
        if (driver->cuModuleGetFunction(kernel, gpu->together, names[i / 2][i % 2]) != CUDA_SUCCESS)
            *kernel = NULL; /* the stand-in of the tests has none */
        else
            result = driver->cuFuncSetAttribute(*kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                TU_TOGETHER_SHARED);
    }
    return result;
}

static CUfunction kernel_of(const tu_gpu *gpu, const tu_device_together *product) {
    return gpu->together_kernels[product->dtype == TUTTI_F16][product->right.column == 1];
}

/* ---- what they can ---- */

/* The copy engine wants 16 bytes everywhere, and counts in 32 bits. */
static bool is_aligned(const void *address, int64_t elements) {
    return (uintptr_t)address % 16 == 0 && elements % 8 == 0 && elements > 0 && elements < INT32_MAX / 2;
}

bool tu_gpu_can_together(void *state, int index, const tu_device_together *product) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed, by_rows = product->right.column == 1;
    int64_t right = by_rows ? product->right.row : product->right.column;
    if (product->size > TU_TOGETHER_RANKS || (product->dtype != TUTTI_BF16 && product->dtype != TUTTI_F16) ||
        (product->average && (product->size & (product->size - 1)) != 0) || /* a division would be another kernel */
        (!by_rows && product->right.row != 1) || product->rows * product->size >= INT32_MAX / TU_TILE_ROWS)
        return false;
    bool good = is_aligned(product->right.data, right) && is_aligned(NULL, product->columns) &&
                is_aligned(NULL, product->left_row) && is_aligned(NULL, product->depth) && is_aligned(product->sums, 8);
    for (int i = 0; i < product->size; i++)
        good = good && is_aligned(product->left[i], 8) && is_aligned(product->out[i], 8);
    if (!good || tu_gpu_enter(gpus, index, &gpu, &pushed) != TUTTI_OK)
        return false;
    tu_gpu_leave(gpus, pushed);
    return kernel_of(gpu, product) != NULL;
}

/* ---- descriptors ---- */

typedef struct descriptors {
    const tu_gpus *gpus;
    int type;
    CUresult result; /* the first that is no success */
} descriptors;

/* `outer` rows of `inner` elements, `row` apart, cut into boxes. */
static tu_tensor_map describe(descriptors *made, const void *data, int64_t inner, int64_t outer, int64_t row,
                              uint32_t box_inner, uint32_t box_outer) {
    tu_tensor_map map = { { 0 } };
    uint64_t sizes[2] = { (uint64_t)inner, (uint64_t)outer }, strides[1] = { (uint64_t)row * 2 };
    uint32_t box[2] = { box_inner, box_outer }, steps[2] = { 1, 1 };
    if (made->result == CUDA_SUCCESS)
        made->result = made->gpus->driver.cuTensorMapEncodeTiled(&map, made->type, 2, (void *)(uintptr_t)data, sizes,
                                                                 strides, box, steps, 0, CU_TENSOR_MAP_SWIZZLE_128B,
                                                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 0);
    return map;
}

static CUresult describe_all(const tu_gpus *gpus, const tu_device_together *product, tu_together_args *args) {
    enum {
        WIDTH = TU_TILE_BYTES / 2
    };
    descriptors made = { gpus,
                         product->dtype == TUTTI_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         CUDA_SUCCESS };
    const tu_device_matrix *right = &product->right;
    int64_t lefts = product->scatters ? 1 : product->size;
    args->right =
        right->column == 1
            ? describe(&made, right->data, product->columns, product->depth, right->row, WIDTH, WIDTH)
            : describe(&made, right->data, product->depth, product->columns, right->column, WIDTH, TU_TILE_COLUMNS);
    for (int64_t i = 0; i < lefts; i++)
        args->left[i] = describe(&made, product->left[i], product->depth,
                                 product->scatters ? product->size * product->rows : product->rows, product->left_row,
                                 WIDTH, TU_TILE_ROWS);
    for (int i = 0; i < product->size; i++)
        args->out[i] = describe(&made, product->out[i], product->columns, product->rows, product->columns, WIDTH, 64);
    return made.result;
}

/* ---- launch ---- */

static tu_together_args arguments(const tu_device_together *product, const tu_backend_kernel *kernel) {
    tu_together_args args = { .group = { kernel->words, kernel->report, kernel->place },
                              .timeout_ns = kernel->timeout_ns,
                              .boards = (uint64_t)(uintptr_t)product->boards,
                              .stride = product->step,
                              .shard = (uint64_t)(uintptr_t)product->left[product->rank],
                              .half = (uint64_t)(uintptr_t)product->half,
                              .shard_bytes = product->shard_bytes,
                              .stage = (uint64_t)(uintptr_t)product->stage,
                              .part_bytes = product->part_bytes,
                              .sums = (uint64_t)(uintptr_t)product->sums,
                              .rank = product->rank,
                              .size = product->size,
                              .rows = (int32_t)product->rows,
                              .columns = (int32_t)product->columns,
                              .depth = (int32_t)product->depth,
                              .scatters = product->scatters,
                              .factor = product->average ? 1.0f / (float)product->size : 1.0f,
                              .leaves_together = product->leaves_together,
                              .operation = kernel->operation };
    return args;
}

tutti_status tu_gpu_together(void *state, int index, void *stream, const tu_device_together *product,
                             const tu_backend_kernel *kernel, unsigned *blocks) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    tu_together_args args = arguments(product, kernel);
    void *parameters[1] = { &args };
    int64_t tiles = product->size * ((product->rows + TU_TILE_ROWS - 1) / TU_TILE_ROWS) *
                    ((product->columns + TU_TILE_COLUMNS - 1) / TU_TILE_COLUMNS);
    *blocks = (unsigned)(tiles < kernel->blocks ? tiles : kernel->blocks);
    CUresult result = describe_all(gpus, product, &args);
    if (result == CUDA_SUCCESS)
        result = gpus->driver.cuLaunchKernel(kernel_of(gpu, product), *blocks, 1, 1, TU_TOGETHER_THREADS, 1, 1,
                                             TU_TOGETHER_SHARED, stream, parameters, NULL);
    if (result != CUDA_SUCCESS)
        status = tu_gpu_error(gpus, result, "launching a product of several ranks");
    tu_gpu_leave(gpus, pushed);
    return status;
}
