/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of matrices of f32 and f64 by our own kernels, shared among the threads that compute.
 *
 * The depth is walked in blocks of TU_PRODUCT_DEPTH: an element is a chain of fma over the first block, plus the chain
 * over the second, and so on. That order is the same at every level, for every shape and number of threads, so that the
 * bits are, and rows of a product are the product of rows. There are two ways through it. Panel by panel: of a block of
 * rows the left matrix is packed once, by all; then each thread takes panels of the right one, packs them into a buffer
 * that stays in its cache, and multiplies. Rows first: the right matrix is packed once, by all; then each thread takes
 * blocks of rows, whose part of the result stays in its cache until it is final.
 */
#include <stdatomic.h>

#include "base/instructions.h"
#include "base/thread.h"
#include "tensor/gemm.h"
#include "tensor/kernel/kernels.h"
#include "tensor/parallel.h"
#include "tensor/process.h"
#include "tensor/thread.h"

#define ROWS 1536          /* of the left matrix that are packed at once: whole tiles at every level */
#define FEW_PANELS 2       /* with so many, packing the left matrix is not worth it */
#define PART (256 << 10)   /* bytes of the result that an epilogue gets at once */
#define LEAST 32768        /* multiplications that are worth a thread */
#define MANY_ROWS 768      /* with so many, it may pay to pack the right matrix as a whole */
#define RESULT (512 << 10) /* bytes of the result that stay in the second cache while its rows are made */
#define LEAST_OF_PACKED \
    256 /* rows of such a block that are worth reading a right matrix again that was packed before */

typedef struct product {
    const tu_tensor_kernels *kernels;
    int type;
    int64_t element; /* bytes */
    int64_t rows, columns, depth;
    tu_matrix left, right;
    const tu_matrix *parts; /* of the left one, which lie apart and have `part_rows` rows each; NULL: it is `left` */
    int64_t part_rows, base_row, inner; /* of all parts, the first row that is multiplied; of the depth, this block's */
    char *out;
    int64_t out_stride;
    const char *start; /* what elements begin with, its rows start_stride apart; NULL: nothing */
    int64_t start_stride;
    tu_epilogue *epilogue; /* of a block with which its elements are final; its first row in all of the product: */
    int64_t first_row;
    char *packed;             /* the left matrix, or NULL where it is read as it lies */
    const char *packed_right; /* this block of the depth of the right one, or NULL where panels are packed one by one */
    _Atomic bool out_of_memory;
} product;

/* Rows from `row` to `last` of parts that lie apart: whole tiles of one part at once, and a tile that several parts
 * share from each of them. */
static void pack_parts(const product *job, int64_t row, int64_t last) {
    int64_t tile = job->kernels->tile_rows;
    while (row < last) {
        int64_t at = job->base_row + job->first_row + row, in_part = at % job->part_rows, in_tile = row % tile,
                run = job->part_rows - in_part < last - row ? job->part_rows - in_part : last - row;
        if (in_tile != 0 && run > tile - in_tile)
            run = tile - in_tile;
        else if (in_tile == 0 && run > tile)
            run = run / tile * tile;
        const tu_matrix *part = &job->parts[at / job->part_rows];
        const char *from = (const char *)part->data + (in_part * part->row + job->inner * part->column) * job->element;
        job->kernels->pack_left[job->type](run, job->depth, from, part->row, part->column,
                                           job->packed + ((row - in_tile) * job->depth + in_tile) * job->element);
        row += run;
    }
}

static void pack_tiles(void *context, int64_t begin, int64_t end) {
    const product *job = context;
    int64_t tile = job->kernels->tile_rows, last = end * tile < job->rows ? end * tile : job->rows;
    if (job->parts != NULL) {
        pack_parts(job, begin * tile, last);
        return;
    }
    job->kernels->pack_left[job->type](
        last - begin * tile, job->depth, (const char *)job->left.data + begin * tile * job->left.row * job->element,
        job->left.row, job->left.column, job->packed + begin * tile * job->depth * job->element);
}

static void multiply_panel(const product *job, int64_t column, int64_t width, void *buffer) {
    const tu_tensor_kernels *kernels = job->kernels;
    const void *panel = buffer != NULL ? buffer : job->packed_right + column * job->depth * job->element;
    const char *start = job->start != NULL ? job->start + column * job->element : NULL;
    char *out = job->out + column * job->element;
    if (buffer != NULL)
        kernels->pack[job->type](job->depth, width,
                                 (const char *)job->right.data + column * job->right.column * job->element,
                                 job->right.row, job->right.column, buffer);
    if (job->packed != NULL)
        kernels->packed_product[job->type](job->rows, width, job->depth, job->packed, panel, start, job->start_stride,
                                           out, job->out_stride);
    else
        kernels->product[job->type](job->rows, width, job->depth, job->left.data, job->left.row, job->left.column,
                                    panel, job->depth, start, job->start_stride, out, job->out_stride);
}

/* An epilogue gets several panels at once, as long as they stay in the second cache: rows of a panel are short. */
static int64_t panels_together(const product *job) {
    int64_t panels = PART / (job->rows * job->kernels->panel[job->type] * job->element);
    return panels < 1 ? 1 : panels;
}

static void multiply_panels(void *context, int64_t begin, int64_t end) {
    product *job = context;
    int64_t wide = job->kernels->panel[job->type];
    size_t bytes = (size_t)(TU_PRODUCT_DEPTH * wide * job->element);
    void *panel = job->packed_right == NULL ? tu_block_alloc(tu_self(), bytes) : NULL;
    if (panel == NULL && job->packed_right == NULL) {
        atomic_store_explicit(&job->out_of_memory, true, memory_order_relaxed);
        return;
    }
    int64_t together = panels_together(job), finished = begin;
    for (int64_t i = begin; i < end; i++) {
        multiply_panel(job, i * wide, job->columns - i * wide < wide ? job->columns - i * wide : wide, panel);
        if (job->epilogue == NULL || (i + 1 < end && i + 1 - finished < together))
            continue;
        int64_t column = finished * wide, behind = (i + 1) * wide < job->columns ? (i + 1) * wide : job->columns;
        job->epilogue->part(job->epilogue, job->first_row, job->rows, column, behind - column);
        finished = i + 1;
    }
    tu_block_free(tu_self(), panel, bytes);
}

/* Large buffers are all of one size, so that every product uses the same one again. */
static size_t packed_bytes(int64_t bytes) {
    int64_t most = (int64_t)ROWS * TU_PRODUCT_DEPTH * (int64_t)sizeof(float);
    return (size_t)(bytes > most / 8 && bytes < most ? most : bytes);
}

/* One block of rows and depth. */
static bool multiply_block(product *job) {
    int64_t tile = job->kernels->tile_rows, tiles = (job->rows + tile - 1) / tile;
    int64_t wide = job->kernels->panel[job->type], panels = (job->columns + wide - 1) / wide;
    size_t bytes = packed_bytes(tiles * tile * job->depth * job->element);
    job->packed = NULL;
    if (panels > FEW_PANELS || job->parts != NULL) {
        if ((job->packed = tu_block_alloc(tu_self(), bytes)) == NULL)
            return false;
        tu_parallel(tiles, 1 + LEAST / (tile * job->depth), pack_tiles, job);
    }
    tu_parallel(panels, 1 + LEAST / (job->rows * job->depth * wide), multiply_panels, job);
    tu_block_free(tu_self(), job->packed, bytes);
    return !atomic_load_explicit(&job->out_of_memory, memory_order_relaxed);
}

/* Rows in blocks of one size, about, so that none is small. */
static int64_t block_of(int64_t rows) {
    int64_t blocks = (rows + ROWS - 1) / ROWS, each = (rows + blocks - 1) / blocks;
    return (each + 23) / 24 * 24;
}

/* As many columns as the panels of a packed right matrix have. */
static int64_t padded_columns(const product *job) {
    int64_t wide = job->kernels->panel[job->type];
    return (job->columns + wide - 1) / wide * wide;
}

/* Behind the first block of the depth elements go on from what they are. */
static bool multiply_rows(product *job, const product *whole, int64_t first, int64_t count) {
    *job = *whole;
    job->rows = count;
    job->first_row = first;
    job->out += first * job->out_stride * job->element;
    if (job->start != NULL)
        job->start += first * job->start_stride * job->element;
    for (int64_t begin = 0; begin < whole->depth; begin += TU_PRODUCT_DEPTH) {
        job->depth = whole->depth - begin < TU_PRODUCT_DEPTH ? whole->depth - begin : TU_PRODUCT_DEPTH;
        job->inner = begin;
        if (whole->parts == NULL)
            job->left.data =
                (const char *)whole->left.data + (first * job->left.row + begin * job->left.column) * job->element;
        if (whole->packed_right != NULL)
            job->packed_right = whole->packed_right + begin * padded_columns(whole) * job->element;
        else
            job->right.data = (const char *)whole->right.data + begin * job->right.row * job->element;
        if (begin > 0) {
            job->start = job->out;
            job->start_stride = job->out_stride;
        }
        job->epilogue = begin + job->depth == whole->depth ? whole->epilogue : NULL;
        if (!multiply_block(job))
            return false;
    }
    return true;
}

bool tu_product_is_ours(tutti_dtype dtype) {
    return (dtype == TUTTI_F32 || dtype == TUTTI_F64) && tu_instructions_get() != TU_REFERENCE;
}

static product product_of(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth) {
    return (product){ .kernels = tu_tensor_kernels_get(),
                      .type = tu_float_index(dtype),
                      .element = (int64_t)tu_dtype_bytes[dtype],
                      .rows = rows,
                      .columns = columns,
                      .depth = depth };
}

/* ---- rows first ---- */

typedef struct packing {
    product of;
    char *to;
} packing;

/* Of every block of the depth, the panels from begin to end. */
static void pack_panels(void *context, int64_t begin, int64_t end) {
    const packing *job = context;
    const product *of = &job->of;
    int64_t wide = of->kernels->panel[of->type], first = begin * wide,
            last = end * wide < of->columns ? end * wide : of->columns;
    for (int64_t inner = 0; inner < of->depth; inner += TU_PRODUCT_DEPTH) {
        int64_t depth = of->depth - inner < TU_PRODUCT_DEPTH ? of->depth - inner : TU_PRODUCT_DEPTH;
        of->kernels->pack[of->type](
            depth, last - first,
            (const char *)of->right.data + (inner * of->right.row + first * of->right.column) * of->element,
            of->right.row, of->right.column, job->to + (inner * padded_columns(of) + first * depth) * of->element);
    }
}

static void pack_right(packing *job) {
    const product *of = &job->of;
    int64_t wide = of->kernels->panel[of->type];
    tu_parallel((of->columns + wide - 1) / wide, 1 + LEAST / (of->depth * wide), pack_panels, job);
}

typedef struct by_rows {
    product whole; /* with its right matrix packed, and without its epilogue: */
    tu_epilogue *epilogue;
    int64_t blocks;
    _Atomic bool out_of_memory;
} by_rows;

/* The first row of a block: tiles are shared out evenly. */
static int64_t first_of(const by_rows *job, int64_t index) {
    int64_t tile = job->whole.kernels->tile_rows, tiles = (job->whole.rows + tile - 1) / tile;
    int64_t row = tiles * index / job->blocks * tile;
    return row < job->whole.rows ? row : job->whole.rows;
}

static void multiply_blocks(void *context, int64_t begin, int64_t end) {
    by_rows *job = context;
    for (int64_t i = begin; i < end; i++) {
        product block;
        int64_t first = first_of(job, i), count = first_of(job, i + 1) - first;
        if (!multiply_rows(&block, &job->whole, first, count)) {
            atomic_store_explicit(&job->out_of_memory, true, memory_order_relaxed);
            return;
        }
        if (job->epilogue != NULL)
            job->epilogue->part(job->epilogue, first, count, 0, job->whole.columns);
    }
}

/* Rows first pays where every element is written several times, once for each block of the depth, and where an
 * epilogue goes over what was made: whole rows lie in memory one behind the other, as its other tensors do. With a
 * right matrix that is packed already, it does where a block has rows enough for reading that again. */
static bool wants_rows(const product *whole) {
    if (whole->packed_right != NULL)
        return whole->depth > TU_PRODUCT_DEPTH && whole->rows > TU_PRODUCT_DEPTH &&
               whole->columns * whole->element * LEAST_OF_PACKED <= RESULT;
    if (whole->rows < MANY_ROWS || whole->columns <= FEW_PANELS * whole->kernels->panel[whole->type])
        return false;
    return whole->epilogue != NULL || (whole->depth > TU_PRODUCT_DEPTH && whole->columns <= whole->rows);
}

/* Whole rows of a block's result fill its share of the cache, and every thread has as many blocks, each of at least a
 * tile. */
static int64_t blocks_of(const product *whole) {
    int64_t rows = RESULT / (whole->columns * whole->element), threads = tu_process_compute_threads();
    rows = rows < 96 ? 96 : rows > TU_PRODUCT_DEPTH ? TU_PRODUCT_DEPTH : rows;
    int64_t blocks = (whole->rows + rows * threads - 1) / (rows * threads) * threads;
    int64_t tiles = whole->rows / whole->kernels->tile_rows;
    return blocks < tiles ? blocks : tiles;
}

static bool multiply_by_rows(const product *whole) {
    by_rows job = { .whole = *whole, .epilogue = whole->epilogue, .blocks = blocks_of(whole) };
    size_t bytes = (size_t)(padded_columns(whole) * whole->depth * whole->element);
    packing right = { *whole, NULL };
    if (whole->packed_right == NULL) {
        if ((right.to = tu_block_alloc(tu_self(), bytes)) == NULL)
            return false;
        pack_right(&right);
        job.whole.packed_right = right.to;
    }
    job.whole.epilogue = NULL;
    tu_parallel(job.blocks, 1, multiply_blocks, &job);
    tu_block_free(tu_self(), right.to, bytes);
    return !atomic_load_explicit(&job.out_of_memory, memory_order_relaxed);
}

static tutti_status multiply_all(const product *whole) {
    int64_t block = block_of(whole->rows);
    bool by_rows = whole->parts == NULL && wants_rows(whole), done = true;
    if (by_rows)
        done = multiply_by_rows(whole);
    for (int64_t first = 0; first < whole->rows && !by_rows && done; first += block) {
        product job;
        done = multiply_rows(&job, whole, first, whole->rows - first < block ? whole->rows - first : block);
    }
    return done ? TUTTI_OK
                : tu_error_memory("packed parts of a matrix product",
                                  (size_t)(block * TU_PRODUCT_DEPTH * whole->element));
}

tutti_status tu_product(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                        tu_matrix right, const void *start, int64_t start_stride, void *out, int64_t out_stride,
                        tu_epilogue *epilogue) {
    product whole = product_of(dtype, rows, columns, depth);
    whole.start = start;
    whole.start_stride = start_stride;
    whole.left = left;
    whole.right = right;
    whole.out = out;
    whole.out_stride = out_stride;
    whole.epilogue = epilogue;
    if (columns == 1 && rows > 1 && out_stride == 1 && (start == NULL || start_stride == 1)) {
        /* A column: as a row it fills the panels. */
        whole.rows = 1;
        whole.columns = rows;
        whole.left = (tu_matrix){ right.data, right.column, right.row };
        whole.right = (tu_matrix){ left.data, left.column, left.row };
        whole.out_stride = rows;
        whole.epilogue = NULL; /* which would be told rows for columns */
    }
    if (whole.epilogue != NULL)
        whole.epilogue->begin(whole.epilogue, out);
    return multiply_all(&whole);
}

tutti_status tu_product_of_parts(tutti_dtype dtype, const tu_matrix *parts, int64_t part_rows, int64_t first,
                                 int64_t rows, int64_t columns, int64_t depth, tu_matrix right, void *out,
                                 int64_t out_stride) {
    product whole = product_of(dtype, rows, columns, depth);
    whole.parts = parts;
    whole.part_rows = part_rows;
    whole.base_row = first;
    whole.right = right;
    whole.out = out;
    whole.out_stride = out_stride;
    return multiply_all(&whole);
}

/* ---- one right matrix and several left ones ---- */

size_t tu_product_packed_bytes(tutti_dtype dtype, int64_t columns, int64_t depth) {
    product of = product_of(dtype, 0, columns, depth);
    return (size_t)(padded_columns(&of) * depth * of.element);
}

void tu_product_pack(tutti_dtype dtype, int64_t columns, int64_t depth, tu_matrix right, void *packed) {
    packing job = { product_of(dtype, 0, columns, depth), packed };
    job.of.right = right;
    pack_right(&job);
}

tutti_status tu_product_packed(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                               const void *packed, void *out, int64_t out_stride) {
    product whole = product_of(dtype, rows, columns, depth);
    whole.left = left;
    whole.packed_right = packed;
    whole.out = out;
    whole.out_stride = out_stride;
    return multiply_all(&whole);
}
