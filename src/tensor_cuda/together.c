/* SPDX-License-Identifier: Apache-2.0
 *
 * The host side of products that ranks make together: which there are, descriptors of their matrices, and the launch.
 */
#include "together.h"

#include <string.h>

#include "tensors.h"

/* ---- kernels ---- */

static bool is_f8(tutti_dtype dtype) {
    return dtype == TUTTI_F8_E4M3 || dtype == TUTTI_F8_E5M2;
}

/* Two for each type of 16 bits: the right matrix lies by columns, or by rows. Then those of f8, by the types of left
 * and right; then the same with fast sums. */
static const char *const names[TU_TOGETHER_KERNELS] = {
    "kernel_together_bf16_columns",   "kernel_together_bf16_rows",      "kernel_together_f16_columns",
    "kernel_together_f16_rows",       "kernel_together_e4m3_e4m3",      "kernel_together_e4m3_e5m2",
    "kernel_together_e5m2_e4m3",      "kernel_together_e5m2_e5m2",      "kernel_together_e4m3_e4m3_fast",
    "kernel_together_e4m3_e5m2_fast", "kernel_together_e5m2_e4m3_fast", "kernel_together_e5m2_e5m2_fast"
};

/* Of the plain kernel, likewise. */
static const char *const plain_names[TU_PLAIN_KERNELS] = { "kernel_together_plain_bf16_columns",
                                                           "kernel_together_plain_bf16_rows",
                                                           "kernel_together_plain_f16_columns",
                                                           "kernel_together_plain_f16_rows" };

/* Thread blocks launched in pairs, or one by one. */
static CUlaunchAttribute in_clusters(bool pairs) {
    return (CUlaunchAttribute){ .id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.cluster = { pairs ? 2 : 1, 1, 1 } };
}

static CUlaunchConfig launch_of(unsigned blocks, CUstream stream, CUlaunchAttribute *attributes, unsigned count) {
    return (CUlaunchConfig){ .grid_x = blocks,
                             .grid_y = 1,
                             .grid_z = 1,
                             .block_x = TU_TOGETHER_THREADS,
                             .block_y = 1,
                             .block_z = 1,
                             .shared_bytes = TU_TOGETHER_SHARED,
                             .stream = stream,
                             .attributes = attributes,
                             .attribute_count = count };
}

/* Pairs of thread blocks that the device holds at once; all kernels take the same room. */
static int count_pairs(const tu_cuda_driver *driver, const tu_gpu *gpu) {
    CUlaunchAttribute attribute = in_clusters(true);
    CUlaunchConfig config = launch_of(2, NULL, &attribute, 1);
    int pairs;
    return gpu->together_kernels[0] != NULL && driver->cuOccupancyMaxActiveClusters != NULL &&
                   driver->cuOccupancyMaxActiveClusters(&pairs, gpu->together_kernels[0], &config) == CUDA_SUCCESS
               ? pairs
               : 0;
}

/* That brings them to the device, too: a kernel that came there with its first launch would wait for others to end. */
static CUresult load_kernels(const tu_cuda_driver *driver, CUmodule module, const char *const *all, CUfunction *kernels,
                             int count, int shared_bytes) {
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < count && result == CUDA_SUCCESS; i++) {
        if (driver->cuModuleGetFunction(&kernels[i], module, all[i]) != CUDA_SUCCESS)
            kernels[i] = NULL; /* the image has none for this device */
        else
            result =
                driver->cuFuncSetAttribute(kernels[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes);
    }
    return result;
}

static CUresult load_hopper(const tu_cuda_driver *driver, tu_gpu *gpu) {
    if (gpu->major != 9 || driver->cuTensorMapEncodeTiled == NULL || driver->cuLaunchKernelEx == NULL)
        return CUDA_SUCCESS;
    CUresult result = driver->cuModuleLoadData(&gpu->together, tu_gpu_together_image);
    if (result == CUDA_SUCCESS)
        result =
            load_kernels(driver, gpu->together, names, gpu->together_kernels, TU_TOGETHER_KERNELS, TU_TOGETHER_SHARED);
    if (result == CUDA_SUCCESS)
        gpu->together_pairs = count_pairs(driver, gpu);
    return result;
}

/* Also beside Hopper's: it can be asked for. One thread block of it must fit a processor, or there is none. */
static CUresult load_plain(const tu_cuda_driver *driver, tu_gpu *gpu) {
    if (gpu->major < 8)
        return CUDA_SUCCESS;
    CUresult result = driver->cuModuleLoadData(&gpu->together_plain, tu_gpu_together_plain_image);
    if (result == CUDA_SUCCESS)
        result = load_kernels(driver, gpu->together_plain, plain_names, gpu->plain_kernels, TU_PLAIN_KERNELS,
                              TU_PLAIN_SHARED);
    for (int i = 0; i < TU_PLAIN_KERNELS && result == CUDA_SUCCESS; i++) {
        int fit = 0;
        if (gpu->plain_kernels[i] == NULL)
            continue;
        result = driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(&fit, gpu->plain_kernels[i], TU_PLAIN_THREADS,
                                                                     TU_PLAIN_SHARED);
        if (fit < 1)
            gpu->plain_kernels[i] = NULL;
    }
    return result;
}

CUresult tu_gpu_together_load(tu_gpus *gpus, tu_gpu *gpu) {
    const tu_cuda_driver *driver = &gpus->driver;
    if (driver->cuFuncSetAttribute == NULL)
        return CUDA_SUCCESS;
    CUresult result = load_hopper(driver, gpu);
    return result == CUDA_SUCCESS ? load_plain(driver, gpu) : result;
}

/* The right matrix. */
static bool lies_by_rows(const tu_device_together *product) {
    return product->right.column == 1 && !is_f8(product->dtype);
}

/* NULL: there is none. */
static CUfunction plain_kernel_of(const tu_gpu *gpu, const tu_device_together *product) {
    return is_f8(product->dtype) ? NULL : gpu->plain_kernels[(product->dtype == TUTTI_F16) * 2 + lies_by_rows(product)];
}

static CUfunction hopper_kernel_of(const tu_gpu *gpu, const tu_device_together *product) {
    if (is_f8(product->dtype))
        return gpu->together_kernels[4 + product->fast * 4 + (product->dtype == TUTTI_F8_E5M2) * 2 +
                                     (product->right_dtype == TUTTI_F8_E5M2)];
    return gpu->together_kernels[(product->dtype == TUTTI_F16) * 2 + lies_by_rows(product)];
}

/* ---- what they can ---- */

/* Both kernels want 16 bytes everywhere, and count in 32 bits. */
static bool is_aligned(const void *address, int64_t elements, int size) {
    return (uintptr_t)address % 16 == 0 && elements * size % 16 == 0 && elements > 0 && elements < INT32_MAX / 2;
}

/* f8 is gathered alone, lies by its depth on both sides, and its result is wider. */
static bool has_types(const tu_device_together *product) {
    tutti_dtype dtype = product->dtype, result = product->result;
    if (dtype == TUTTI_BF16 || dtype == TUTTI_F16)
        return product->right_dtype == dtype && result == dtype &&
               (product->right.column == 1 || product->right.row == 1);
    return is_f8(dtype) && is_f8(product->right_dtype) && product->right.row == 1 && !product->scatters &&
           (result == TUTTI_BF16 || result == TUTTI_F16 || result == TUTTI_F32);
}

/* What is asked for, or the best. */
static tu_together_kernel choose(const tu_gpu *gpu, const tu_device_together *product) {
    if (product->kernel != TU_TOGETHER_PLAIN && hopper_kernel_of(gpu, product) != NULL)
        return TU_TOGETHER_HOPPER;
    return product->kernel != TU_TOGETHER_HOPPER && plain_kernel_of(gpu, product) != NULL ? TU_TOGETHER_PLAIN
                                                                                          : TU_TOGETHER_NONE;
}

int tu_gpu_can_together(void *state, int index, const tu_device_together *product) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    int size = is_f8(product->dtype) ? 1 : 2;
    int64_t right = lies_by_rows(product) ? product->right.row : product->right.column;
    if (product->size > TU_TOGETHER_RANKS || !has_types(product) ||
        (product->average && (product->size & (product->size - 1)) != 0) || /* a division would be another kernel */
        product->rows * product->size >= INT32_MAX / TU_TILE_ROWS)
        return TU_TOGETHER_NONE;
    bool good = is_aligned(product->right.data, right, size) && is_aligned(NULL, product->columns, 2) &&
                is_aligned(NULL, product->left_row, size) && is_aligned(NULL, product->depth, size) &&
                is_aligned(product->sums, 8, 2);
    for (int i = 0; i < product->size; i++)
        good = good && is_aligned(product->left[i], 16, size) && is_aligned(product->out[i], 8, 2);
    if (!good || tu_gpu_enter(gpus, index, &gpu, &pushed) != TUTTI_OK)
        return TU_TOGETHER_NONE;
    tu_gpu_leave(gpus, pushed);
    return choose(gpu, product);
}

/* ---- where matrices lie ---- */

static uint64_t place_of(const void *pointer) {
    return (uint64_t)(uintptr_t)pointer;
}

typedef struct descriptors {
    const tu_gpus *gpus;
    CUresult result; /* the first that is no success */
} descriptors;

/* Where a matrix lies: `outer` rows of `inner` elements, `row` apart. */
typedef struct table {
    tutti_dtype dtype;
    const void *data;
    int64_t inner, outer, row;
} table;

/* Cut into boxes of 128 bytes of so many rows. */
static tu_tensor_map describe(descriptors *made, table of, uint32_t rows) {
    tu_tensor_map map = { { 0 } };
    int type = is_f8(of.dtype)         ? CU_TENSOR_MAP_DATA_TYPE_UINT8
               : of.dtype == TUTTI_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    uint32_t size = is_f8(of.dtype) ? 1 : 2, box[2] = { TU_TILE_BYTES / size, rows }, steps[2] = { 1, 1 };
    uint64_t sizes[2] = { (uint64_t)of.inner, (uint64_t)of.outer }, strides[1] = { (uint64_t)of.row * size };
    if (made->result == CUDA_SUCCESS)
        made->result = made->gpus->driver.cuTensorMapEncodeTiled(&map, type, 2, (void *)(uintptr_t)of.data, sizes,
                                                                 strides, box, steps, 0, CU_TENSOR_MAP_SWIZZLE_128B,
                                                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 0);
    return map;
}

static CUresult describe_all(const tu_gpus *gpus, const tu_device_together *product, tu_together_args *args) {
    descriptors made = { gpus, CUDA_SUCCESS };
    const tu_device_matrix *right = &product->right;
    int lefts = product->scatters ? 1 : product->size;
    if (!lies_by_rows(product))
        args->right = describe(
            &made, (table){ product->right_dtype, right->data, product->depth, product->columns, right->column },
            TU_RIGHT_COLUMNS);
    else
        args->right =
            describe(&made, (table){ product->right_dtype, right->data, product->columns, product->depth, right->row },
                     TU_TILE_BYTES / 2);
    for (int i = 0; i < lefts; i++)
        args->left[i] =
            describe(&made,
                     (table){ product->dtype, product->left[i], product->depth,
                              product->scatters ? product->size * product->rows : product->rows, product->left_row },
                     TU_TILE_ROWS);
    for (int i = 0; i < product->size && product->scatters; i++)
        args->out[i] = describe(
            &made, (table){ product->result, product->out[i], product->columns, product->rows, product->columns }, 64);
    return made.result;
}

/* For the plain kernel, which reads matrices by their addresses. */
static void place_all(const tu_device_together *product, tu_together_args *args) {
    for (int i = 0; i < product->size; i++) {
        args->left_at[i] = place_of(product->left[i]);
        args->out_at[i] = place_of(product->out[i]);
    }
    args->right_at = place_of(product->right.data);
    args->left_row = product->left_row;
    args->right_row = lies_by_rows(product) ? product->right.row : product->right.column;
}

/* ---- launch ---- */

/* What must be equal on all ranks: hosts agree on it before a launch, but graphs may run in another order. A gather's
 * ranks may have right matrices of their own. */
static uint32_t signature_of(const tu_device_together *product) {
    int64_t numbers[] = { product->scatters,
                          product->average,
                          product->rows,
                          product->depth,
                          product->scatters ? product->columns : 0,
                          product->scatters ? 0 : product->scales_rows + 2 * product->leaves_together,
                          (int64_t)product->dtype,
                          (int64_t)product->kernel };
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof numbers; i++)
        hash = (hash ^ ((const unsigned char *)numbers)[i]) * 16777619u;
    return hash;
}

static tu_together_args arguments(const tu_device_together *product, const tu_backend_kernel *kernel) {
    tu_together_args args = { .group = { kernel->words, kernel->report, kernel->place },
                              .timeout_ns = kernel->timeout_ns,
                              .boards = place_of(product->boards),
                              .stride = product->step,
                              .shard = place_of(product->left[product->rank]),
                              .half = place_of(product->half),
                              .shard_bytes = product->shard_bytes,
                              .scales = place_of(product->row_scales[product->rank]),
                              .scales_half = place_of(product->scales_half),
                              .stage = place_of(product->stage),
                              .part_bytes = product->part_bytes,
                              .sums = place_of(product->sums),
                              .column_scales = place_of(product->column_scales),
                              .bias = place_of(product->bias),
                              .whole = place_of(product->whole),
                              .results = place_of(product->out[0]),
                              .row_step = product->scales_rows,
                              .column_step = product->scales_columns,
                              .rank = product->rank,
                              .size = product->size,
                              .rows = (int32_t)product->rows,
                              .columns = (int32_t)product->columns,
                              .depth = (int32_t)product->depth,
                              .scatters = product->scatters,
                              .result = product->result == TUTTI_F32   ? TU_TOGETHER_F32
                                        : product->result == TUTTI_F16 ? TU_TOGETHER_F16
                                                                       : TU_TOGETHER_BF16,
                              .factor = product->average ? 1.0f / (float)product->size : 1.0f,
                              .leaves_together = product->leaves_together,
                              .operation = kernel->operation,
                              .signature = signature_of(product) };
    for (int i = 0; i < product->size; i++)
        args.row_scales[i] = place_of(product->row_scales[i]);
    return args;
}

/* One thread block has a whole processor, so those of the kernel in front of it must have ended before its own begin:
 * what overlaps is the launch, with what that one still stores. */
static CUresult launch(const tu_gpus *gpus, CUfunction kernel, unsigned blocks, CUstream stream, tu_together_args *args,
                       bool pairs, bool overlaps) {
    void *parameters[1] = { args };
    CUlaunchAttribute attributes[2] = {
        { .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.number = overlaps }, in_clusters(pairs)
    };
    CUlaunchConfig config = launch_of(blocks, stream, attributes, 2);
    return gpus->driver.cuLaunchKernelEx(&config, kernel, parameters, NULL);
}

/* Wherever it runs, also where attributes of launches are not known: when the kernel in front of it has ended. */
static CUresult launch_plain(const tu_gpus *gpus, CUfunction kernel, unsigned blocks, CUstream stream,
                             tu_together_args *args) {
    void *parameters[1] = { args };
    return gpus->driver.cuLaunchKernel(kernel, blocks, 1, 1, TU_PLAIN_THREADS, 1, 1, TU_PLAIN_SHARED, stream,
                                       parameters, NULL);
}

static int64_t tiles_of(int64_t extent, int tile) {
    return (extent + tile - 1) / tile;
}

/* Thread blocks may go in pairs where any two tiles that follow each other from an even one on have the same columns,
 * and are of the same shard: then bands of rows are even (in_bands in together.cu). `most` is what this rank may launch
 * one by one; of the pairs on the device it has the same share. */
static unsigned blocks_in_pairs(const tu_gpu *gpu, const tu_device_together *product, int most) {
    int64_t rows = tiles_of(product->rows, TU_TILE_ROWS) * (product->scatters ? product->size : 1);
    return rows % 2 != 0 ? 0 : 2 * (unsigned)((int64_t)gpu->together_pairs * most / gpu->processors);
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
    bool plain = product->kernel == TU_TOGETHER_PLAIN;
    unsigned paired = plain ? 0 : blocks_in_pairs(gpu, product, kernel->blocks),
             most = paired > 0 ? paired : (unsigned)kernel->blocks;
    int64_t tiles = product->size * tiles_of(product->rows, TU_TILE_ROWS) * tiles_of(product->columns, TU_TILE_COLUMNS);
    *blocks = tiles < most ? (unsigned)tiles : most;
    if (plain)
        place_all(product, &args);
    CUresult result = plain ? CUDA_SUCCESS : describe_all(gpus, product, &args);
    if (plain)
        result = launch_plain(gpus, plain_kernel_of(gpu, product), *blocks, stream, &args);
    else if (result == CUDA_SUCCESS)
        result = launch(gpus, hopper_kernel_of(gpu, product), *blocks, stream, &args, paired > 0, kernel->overlaps);
    if (result != CUDA_SUCCESS)
        status = tu_gpu_error(gpus, result, "launching a product of several ranks");
    tu_gpu_leave(gpus, pushed);
    return status;
}
