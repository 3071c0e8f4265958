/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products by cuBLASLt, which is looked for on first need. Only what is used of it is declared, in our own
 * words; numbers and layouts are those of its ABI (12 and 13).
 *
 * The library thinks in columns: a row-major (rows, columns) is to it (columns, rows), so out = left right is computed
 * as the product of the transposes, right first.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "tensors.h"

typedef struct blas_handle blas_handle;
typedef struct blas_operation blas_operation;
typedef struct blas_layout blas_layout;
typedef struct blas_preference blas_preference;

enum {
    TYPE_F32 = 0,
    TYPE_F64 = 1,
    TYPE_F16 = 2,
    TYPE_I8 = 3,
    TYPE_I32 = 10,
    TYPE_BF16 = 14,
    TYPE_E4M3 = 28,
    TYPE_E5M2 = 29,
    COMPUTE_F32 = 68,
    COMPUTE_F64 = 70,
    COMPUTE_I32 = 72,
    COMPUTE_TF32 = 77,  /* of f32, rounded to tf32 */
    TRANSPOSE_LEFT = 3, /* attributes of an operation */
    TRANSPOSE_RIGHT = 4,
    EPILOGUE = 7, /* what is done with the product */
    EPILOGUE_ADDS_BIAS = 4,
    BIAS = 8,           /* an address on the device */
    SCALE_OF_LEFT = 17, /* likewise */
    SCALE_OF_RIGHT = 18,
    SUMS_ARE_FAST = 25,  /* int8_t: of f8, as the tensor cores have them */
    SCALES_OF_LEFT = 31, /* how many there are: one, or a vector */
    SCALES_OF_RIGHT = 32,
    SCALES_ARE_A_VECTOR = 3,
    BATCH_COUNT = 5, /* of a layout */
    BATCH_STEP = 6,
    WORKSPACE_BYTES = 1, /* of a preference */
    NO_SUCH_PRODUCT = 15
};

typedef struct blas_algorithm {
    uint64_t data[8];
} blas_algorithm;
typedef struct blas_choice {
    blas_algorithm algorithm;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} blas_choice;

/* X(name, parameters) */
#define BLAS_FUNCTIONS(X)                                                                                              \
    X(cublasLtCreate, (blas_handle * *handle))                                                                         \
    X(cublasLtDestroy, (blas_handle * handle))                                                                         \
    X(cublasLtMatmulDescCreate, (blas_operation * *operation, int compute, int scale))                                 \
    X(cublasLtMatmulDescDestroy, (blas_operation * operation))                                                         \
    X(cublasLtMatmulDescSetAttribute, (blas_operation * operation, int attribute, const void *value, size_t bytes))    \
    X(cublasLtMatrixLayoutCreate, (blas_layout * *layout, int type, uint64_t rows, uint64_t columns, int64_t leading)) \
    X(cublasLtMatrixLayoutDestroy, (blas_layout * layout))                                                             \
    X(cublasLtMatrixLayoutSetAttribute, (blas_layout * layout, int attribute, const void *value, size_t bytes))        \
    X(cublasLtMatmulPreferenceCreate, (blas_preference * *preference))                                                 \
    X(cublasLtMatmulPreferenceDestroy, (blas_preference * preference))                                                 \
    X(cublasLtMatmulPreferenceSetAttribute,                                                                            \
      (blas_preference * preference, int attribute, const void *value, size_t bytes))                                  \
    X(cublasLtMatmulAlgoGetHeuristic,                                                                                  \
      (blas_handle * handle, blas_operation * operation, blas_layout * left, blas_layout * right, blas_layout * in,    \
       blas_layout * out, blas_preference * preference, int wanted, blas_choice *choices, int *found))                 \
    X(cublasLtMatmul, (blas_handle * handle, blas_operation * operation, const void *alpha, const void *left,          \
                       blas_layout *of_left, const void *right, blas_layout *of_right, const void *beta,               \
                       const void *in, blas_layout *of_in, void *out, blas_layout *of_out,                             \
                       const blas_algorithm *algorithm, void *workspace, size_t workspace_bytes, CUstream stream))

typedef struct blas_library {
#define X(name, parameters) int(*name) parameters;
    BLAS_FUNCTIONS(X)
#undef X
} blas_library;

#define WORKSPACE ((size_t)32 << 20)
#define REMEMBERED 256 /* choices, in sets of WAYS: a product is looked for in one set */
#define WAYS 4

/* What the library chose for a product of that shape. */
typedef struct remembered {
    tu_device_product product; /* without addresses */
    blas_choice choice;
    bool there;
} remembered;

typedef struct products {
    blas_handle *handle;
    remembered choices[REMEMBERED]; /* under the GPU's lock, by a hash */
    unsigned replaced;              /* counted: which of a full set goes next */
} products;

/* ---- the library ---- */

static blas_library *load_library(void) {
    static const char *const names[] = { "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so" };
    void *opened = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && opened == NULL; i++)
        opened = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    blas_library *library = opened != NULL ? calloc(1, sizeof *library) : NULL;
    if (library == NULL)
        return NULL;
    bool whole = true;
#define X(name, parameters)                                             \
    library->name = (int(*) parameters)(uintptr_t)dlsym(opened, #name); \
    whole = whole && library->name != NULL;
    BLAS_FUNCTIONS(X)
#undef X
    if (whole)
        return library;
    free(library);
    return NULL;
}

/* NULL where there is none, which is said once. */
static blas_library *library_of(tu_gpus *gpus) {
    pthread_mutex_lock(&gpus->lock);
    if (!gpus->looked) {
        gpus->looked = true;
        gpus->library = load_library();
        if (gpus->library == NULL)
            gpus->host->log(
                NULL, TUTTI_LOG_WARN, "tensor-cuda",
                "cuBLASLt is not found (libcublasLt.so.13 or .12): matrix products run by Tutti's own kernel, "
                "which is much slower; put its folder into LD_LIBRARY_PATH");
    }
    blas_library *library = gpus->library;
    pthread_mutex_unlock(&gpus->lock);
    return library;
}

bool tu_gpu_has_library(void *state, int index) {
    (void)index;
    return library_of(state) != NULL;
}

static products *products_of(const blas_library *library, tu_gpu *gpu) {
    pthread_mutex_lock(&gpu->lock);
    if (gpu->products == NULL) {
        products *made = calloc(1, sizeof *made);
        if (made != NULL && library->cublasLtCreate(&made->handle) != 0) {
            free(made);
            made = NULL;
        }
        gpu->products = made;
    }
    products *found = gpu->products;
    pthread_mutex_unlock(&gpu->lock);
    return found;
}

void tu_gpu_products_end(tu_gpus *gpus, tu_gpu *gpu) {
    products *all = gpu->products;
    if (all != NULL && gpus->library != NULL)
        ((blas_library *)gpus->library)->cublasLtDestroy(all->handle);
    free(all);
    gpu->products = NULL;
}

/* ---- what it can multiply ---- */

static int type_of(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F32:
        return TYPE_F32;
    case TUTTI_F64:
        return TYPE_F64;
    case TUTTI_F16:
        return TYPE_F16;
    case TUTTI_BF16:
        return TYPE_BF16;
    case TUTTI_I8:
        return TYPE_I8;
    case TUTTI_I32:
        return TYPE_I32;
    case TUTTI_F8_E4M3:
        return TYPE_E4M3;
    case TUTTI_F8_E5M2:
        return TYPE_E5M2;
    default:
        return -1;
    }
}

/* Of f8 it has both operands by their depth, dense, with rows of 16 bytes; e5m2 on both sides it has not. */
static bool can_multiply_f8(const tu_device_product *product) {
    tutti_dtype result = product->result;
    return product->left.column == 1 && product->right.row == 1 && product->depth % 16 == 0 &&
           product->columns % 16 == 0 && product->left.row % 16 == 0 && product->right.column % 16 == 0 &&
           (((uintptr_t)product->left.data | (uintptr_t)product->right.data | (uintptr_t)product->out.data) & 15) ==
               0 &&
           (result == TUTTI_BF16 || result == TUTTI_F16 || result == TUTTI_F32);
}

/* Of i8 it has both operands by their depth, and sizes and distances of four bytes. A sum of fewer than 2^17 products
 * fits an i32: beyond, ours wrap, and what its kernels do is not told. */
static bool can_multiply_i8(const tu_device_product *product) {
    return product->result == TUTTI_I32 && product->bias == NULL && product->left.column == 1 &&
           product->right.row == 1 && product->depth < 1 << 17 &&
           ((product->depth | product->columns | product->left.row | product->right.column | product->out.row) & 3) ==
               0 &&
           (((uintptr_t)product->left.data | (uintptr_t)product->right.data | (uintptr_t)product->out.data) & 15) == 0;
}

/* A few tiles of the kernel that stands in for the library are over before the library has described the matrices. */
static bool is_tiny(const tu_device_product *product) {
    return product->rows <= 16 && product->columns <= 16 && product->depth <= 64 && product->batch <= 16 &&
           product->bias == NULL && !product->tf32;
}

static bool can_multiply(const tu_device_product *product) {
    tutti_dtype dtype = product->dtype, result = product->result;
    bool floats = dtype == TUTTI_F32 || dtype == TUTTI_F64;
    bool narrow = dtype == TUTTI_F16 || dtype == TUTTI_BF16;
    if ((floats || narrow) && is_tiny(product))
        return false;
    return (floats && result == dtype) || (narrow && (result == dtype || result == TUTTI_F32)) ||
           (dtype == TUTTI_F8_E4M3 && can_multiply_f8(product)) || (dtype == TUTTI_I8 && can_multiply_i8(product));
}

/* How it can read a row-major operand of that many rows and columns: as it lies, or turned; false where neither. */
static bool arrange(const tu_device_matrix *matrix, int64_t rows, int64_t columns, bool *turned, int64_t *leading) {
    if (matrix->column == 1 || columns == 1) {
        *turned = false;
        *leading = rows == 1 ? columns : matrix->row;
        return *leading >= columns;
    }
    *turned = true;
    *leading = columns == 1 ? rows : matrix->column;
    return (matrix->row == 1 || rows == 1) && *leading >= rows;
}

/* ---- one product ---- */

/* In which type it adds, and that of the factors of product and result, which are 1 and 0. */
typedef struct arithmetic {
    int compute, scale;
    union {
        float narrow;
        double wide;
        int32_t whole;
    } one, zero;
} arithmetic;

static arithmetic arithmetic_of(const tu_device_product *product) {
    if (product->dtype == TUTTI_F64)
        return (arithmetic){ COMPUTE_F64, TYPE_F64, { .wide = 1 }, { .wide = 0 } };
    if (product->dtype == TUTTI_I8)
        return (arithmetic){ COMPUTE_I32, TYPE_I32, { .whole = 1 }, { .whole = 0 } };
    bool rounded = product->tf32 && product->dtype == TUTTI_F32;
    return (arithmetic){ rounded ? COMPUTE_TF32 : COMPUTE_F32, TYPE_F32, { .narrow = 1 }, { .narrow = 0 } };
}

typedef struct task {
    const blas_library *library;
    blas_operation *operation;
    blas_layout *left, *right, *out; /* as the library counts: left is our right */
} task;

static void end_task(task *task) {
    if (task->out != NULL)
        task->library->cublasLtMatrixLayoutDestroy(task->out);
    if (task->right != NULL)
        task->library->cublasLtMatrixLayoutDestroy(task->right);
    if (task->left != NULL)
        task->library->cublasLtMatrixLayoutDestroy(task->left);
    if (task->operation != NULL)
        task->library->cublasLtMatmulDescDestroy(task->operation);
}

static int make_layout(const blas_library *library, blas_layout **layout, int type, int64_t rows, int64_t columns,
                       bool turned, int64_t leading, int64_t batch, int64_t step) {
    int32_t count = (int32_t)batch;
    int status = library->cublasLtMatrixLayoutCreate(layout, type, (uint64_t)(turned ? rows : columns),
                                                     (uint64_t)(turned ? columns : rows), leading);
    if (status == 0 && batch > 1)
        status = library->cublasLtMatrixLayoutSetAttribute(*layout, BATCH_COUNT, &count, sizeof count);
    if (status == 0 && batch > 1)
        status = library->cublasLtMatrixLayoutSetAttribute(*layout, BATCH_STEP, &step, sizeof step);
    return status;
}

/* The library's left is our right. Libraries before 12.9 know no vectors, and say so. */
static int set_scales(const task *task, const tu_device_product *product) {
    const blas_library *library = task->library;
    int32_t vector = SCALES_ARE_A_VECTOR;
    int status = 0;
    if (product->right_scale != NULL)
        status = library->cublasLtMatmulDescSetAttribute(task->operation, SCALE_OF_LEFT, &product->right_scale,
                                                         sizeof product->right_scale);
    if (status == 0 && product->left_scale != NULL)
        status = library->cublasLtMatmulDescSetAttribute(task->operation, SCALE_OF_RIGHT, &product->left_scale,
                                                         sizeof product->left_scale);
    if (status != 0 || (!product->scales_columns && !product->scales_rows))
        return status;
    if (library->cublasLtMatmulDescSetAttribute(task->operation, SCALES_OF_LEFT, &vector, sizeof vector) != 0 ||
        library->cublasLtMatmulDescSetAttribute(task->operation, SCALES_OF_RIGHT, &vector, sizeof vector) != 0)
        return NO_SUCH_PRODUCT;
    return 0;
}

static int set_sums(const task *task, const tu_device_product *product) {
    int8_t fast = 1;
    return product->fast
               ? task->library->cublasLtMatmulDescSetAttribute(task->operation, SUMS_ARE_FAST, &fast, sizeof fast)
               : 0;
}

static int set_bias(const task *task, const tu_device_product *product) {
    int32_t epilogue = EPILOGUE_ADDS_BIAS;
    if (product->bias == NULL)
        return 0;
    int status = task->library->cublasLtMatmulDescSetAttribute(task->operation, EPILOGUE, &epilogue, sizeof epilogue);
    return status == 0 ? task->library->cublasLtMatmulDescSetAttribute(task->operation, BIAS, &product->bias,
                                                                       sizeof product->bias)
                       : status;
}

static int make_task(task *task, const tu_device_product *product) {
    const blas_library *library = task->library;
    bool turned_left = false, turned_right = false;
    int64_t leading_left = 0, leading_right = 0;
    if (!arrange(&product->left, product->rows, product->depth, &turned_left, &leading_left) ||
        !arrange(&product->right, product->depth, product->columns, &turned_right, &leading_right))
        return NO_SUCH_PRODUCT;
    int32_t of_left = turned_right, of_right = turned_left;
    arithmetic how = arithmetic_of(product);
    int status = library->cublasLtMatmulDescCreate(&task->operation, how.compute, how.scale);
    if (status == 0)
        status = library->cublasLtMatmulDescSetAttribute(task->operation, TRANSPOSE_LEFT, &of_left, sizeof of_left);
    if (status == 0)
        status = library->cublasLtMatmulDescSetAttribute(task->operation, TRANSPOSE_RIGHT, &of_right, sizeof of_right);
    if (status == 0)
        status = set_scales(task, product);
    if (status == 0)
        status = set_sums(task, product);
    if (status == 0)
        status = set_bias(task, product);
    if (status == 0)
        status = make_layout(library, &task->left, type_of(product->dtype), product->depth, product->columns,
                             turned_right, leading_right, product->batch, product->right.step);
    if (status == 0)
        status = make_layout(library, &task->right, type_of(product->dtype), product->rows, product->depth, turned_left,
                             leading_left, product->batch, product->left.step);
    if (status == 0)
        status = make_layout(library, &task->out, type_of(product->result), product->rows, product->columns, false,
                             product->out.row, product->batch, product->out.step);
    return status;
}

static int ask(const task *task, const products *all, blas_choice *choice) {
    const blas_library *library = task->library;
    blas_preference *preference = NULL;
    size_t bytes = WORKSPACE;
    int found = 0, status = library->cublasLtMatmulPreferenceCreate(&preference);
    if (status == 0)
        status = library->cublasLtMatmulPreferenceSetAttribute(preference, WORKSPACE_BYTES, &bytes, sizeof bytes);
    if (status == 0)
        status = library->cublasLtMatmulAlgoGetHeuristic(all->handle, task->operation, task->left, task->right,
                                                         task->out, task->out, preference, 1, choice, &found);
    if (preference != NULL)
        library->cublasLtMatmulPreferenceDestroy(preference);
    return status == 0 && found == 0 ? NO_SUCH_PRODUCT : status;
}

/* What shapes the choice: everything but the addresses, whose alignment counts. */
static tu_device_product key_of(const tu_device_product *product) {
    tu_device_product key;
    memset(&key, 0, sizeof key); /* with what lies between the members */
    key.rows = product->rows;
    key.columns = product->columns;
    key.depth = product->depth;
    key.batch = product->batch;
    key.dtype = product->dtype;
    key.result = product->result;
    key.left = product->left;
    key.right = product->right;
    key.out = product->out;
    uintptr_t aligned =
        ((uintptr_t)product->left.data | (uintptr_t)product->right.data | (uintptr_t)product->out.data) & 15;
    key.left.data = (const void *)aligned;
    key.right.data = key.out.data = NULL;
    key.scales_rows = product->scales_rows;
    key.scales_columns = product->scales_columns;
    key.bias = product->bias != NULL ? (const void *)(uintptr_t)1 : NULL;
    key.tf32 = product->tf32;
    key.fast = product->fast;
    return key;
}

/* Where the choice for it is, or goes: in its set, where that is full in place of another. */
static remembered *place_of(products *all, const tu_device_product *key) {
    uint64_t hash = 1469598103934665603u;
    const unsigned char *bytes = (const unsigned char *)key;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    remembered *set = &all->choices[(hash ^ hash >> 32) % (REMEMBERED / WAYS) * WAYS];
    for (int i = 0; i < WAYS; i++)
        if (!set[i].there || memcmp(&set[i].product, key, sizeof *key) == 0)
            return &set[i];
    return &set[all->replaced++ % WAYS];
}

static int choose(const task *task, products *all, tu_gpu *gpu, const tu_device_product *product, blas_choice *choice) {
    tu_device_product key = key_of(product);
    pthread_mutex_lock(&gpu->lock);
    remembered *place = place_of(all, &key);
    bool known = place->there && memcmp(&place->product, &key, sizeof key) == 0;
    if (known)
        *choice = place->choice;
    pthread_mutex_unlock(&gpu->lock);
    if (known)
        return 0;
    int status = ask(task, all, choice);
    if (status != 0)
        return status;
    pthread_mutex_lock(&gpu->lock);
    place = place_of(all, &key); /* another thread may have come first */
    *place = (remembered){ key, *choice, true };
    pthread_mutex_unlock(&gpu->lock);
    return 0;
}

static int multiply(task *task, products *all, tu_gpu *gpu, const tu_device_product *product, CUstream stream,
                    void *workspace) {
    const arithmetic how = arithmetic_of(product);
    blas_choice choice = { 0 };
    int status = make_task(task, product);
    if (status == 0)
        status = choose(task, all, gpu, product, &choice);
    if (status == 0)
        status = task->library->cublasLtMatmul(all->handle, task->operation, &how.one, product->right.data, task->left,
                                               product->left.data, task->right, &how.zero, product->out.data, task->out,
                                               (void *)(uintptr_t)product->out.data, task->out, &choice.algorithm,
                                               workspace, WORKSPACE, stream);
    end_task(task);
    return status;
}

tutti_status tu_gpu_product(void *state, int index, void *stream, const tu_device_product *product) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    task task = { .library = can_multiply(product) ? library_of(gpus) : NULL };
    tu_device_block workspace;
    if (task.library == NULL)
        return TUTTI_ERROR_UNSUPPORTED;
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    products *all = products_of(task.library, gpu);
    if (all == NULL)
        status = gpus->host->error(TUTTI_ERROR_BACKEND, "cuBLASLt does not start on cuda:%d", index);
    if (status == TUTTI_OK)
        status = tu_gpu_allocate(gpus, index, stream, WORKSPACE, &workspace);
    if (status == TUTTI_OK) {
        int result = multiply(&task, all, gpu, product, stream, workspace.data);
        tu_gpu_release(gpus, index, &workspace);
        if (result == NO_SUCH_PRODUCT)
            status = TUTTI_ERROR_UNSUPPORTED;
        else if (result != 0)
            status = gpus->host->error(TUTTI_ERROR_BACKEND, "cuBLASLt failed with status %d on cuda:%d", result, index);
    }
    tu_gpu_leave(gpus, pushed);
    return status;
}
