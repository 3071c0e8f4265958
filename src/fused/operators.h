/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rows of this room's operators.def declare, and what its files share.
 */
#ifndef TU_FUSED_OPERATORS_H
#define TU_FUSED_OPERATORS_H

#include <tutti/fused.h>

#include "fused/driver.h"
#include "fused/right.h"
#include "tensor/gemm.h"
#include "tensor/operators.h"

#define TU_FUSED_MOST_BS 15 /* of one call of a row: as many inputs as a gradient can save */
#define TU_FUSED_BS 0xfffeu /* those inputs */

#define OPERATOR(form, name, family, summary, arguments, properties) TU_ROW_TYPES(form, name, arguments, properties)
#include "fused/operators.def"
#undef OPERATOR

/* x with dim moved to the front: another handle of the caller's on its storage. NULL, with the error written, without
 * memory. */
tt_tensor *tu_fused_front(const tt_tensor *x, int dim);
/* The strides of a result that goes by dim first in memory; an error where its bytes are too many. */
tutti_status tu_fused_front_strides(const char *who, tu_shape *shape, int dim);
/* A contiguous or two-dimensional tensor as a matrix of all its rows. */
tu_matrix tu_fused_rows(const tt_tensor *x);
bool tu_fused_is_rows(const tt_tensor *x);
static inline tu_matrix tu_fused_matrix(const tt_tensor *x) {
    return (tu_matrix){ tu_pointer(x), x->strides[0], x->strides[1] };
}
/* A rank's shard of so many rows and columns. */
static inline tu_matrix tu_fused_shard(const tu_shard *shard, int64_t rows, int64_t columns) {
    return shard->turned ? (tu_matrix){ shard->data, 1, rows } : (tu_matrix){ shard->data, columns, 1 };
}
/* Copies what another processor may have written, four pages side by side: a line that comes from there takes so long
 * that one stream, in which the processor fetches ahead, reaches half the speed. */
void tu_fused_fetch(char *to, const char *from, size_t bytes);
/* Copies a matrix of elements of `size` bytes to `to`, where its rows are `stride` elements apart. */
void tu_fused_place_rows(char *to, int64_t stride, tu_matrix from, int64_t rows, int64_t columns, size_t size);
/* Of shards of so many rows, which are multiplied one by one where right matrices are packed once; in test mode all are
 * one panel. */
tu_panels tu_fused_panels(int ranks, int64_t rows, bool packed_once);
/* Rows of one thread's job where a rank has `rows`, each with so many multiplications; 0: not worth several threads. */
int64_t tu_fused_block_rows(const tu_right *right, int64_t rows, int64_t products_of_row);
/* The product of all sizes but the last. */
int64_t tu_fused_row_count(const tt_tensor *x);

/* Of gradients: x as a matrix whose rows go by dim first, or as they are where dim is the last; a matrix's adjoint. */
tt_tensor *tu_fused_flat(tt_tensor *x, int dim);
tt_tensor *tu_fused_adjoint(tt_tensor *x);

/* Parts of shape rules: of the shard and the dimension along which it is gathered; of one matrix of a product; the
 * gathered first input; a result that nobody wants. */
tutti_status tu_fused_check_shard(const tu_call *call, const tt_tensor *shard, int gather_dim);
tutti_status tu_fused_check_b(const tu_call *call, const tt_tensor *rhs);
tutti_status tu_fused_gathered(const tu_call *call, int gather_dim, int ranks, tu_shape *result);
tu_shape tu_fused_empty(const tu_call *call, tutti_dtype dtype);

/* Parts of public functions whose rows take one list: whether an argument, or each matrix, is there; the message names
 * what is not. */
bool tu_fused_check_given(const char *who, const char *what, const tt_tensor *x);
bool tu_fused_check_bs(const char *who, tt_tensor_list bs);

/* What a scatter has in common: a block's rows and how they lie in the result. */
typedef struct tu_fused_block {
    int64_t chunk, before, behind; /* sizes of the scattered dimension, before it and behind it (without columns) */
    size_t row_bytes;
    char *out;
    tutti_dtype dtype;
    tutti_reduction reduction;
    int64_t columns;
    int size;
} tu_fused_block;
/* Of a result that is scattered along dim. */
tu_fused_block tu_fused_block_of(const tt_tensor *out, int dim, tutti_reduction reduction, tutti_group *group);
/* A tensor with the scattered dimension first, as one matrix: itself where it lies so, else a copy; a reference of the
 * caller's. NULL, with the error written, without memory. */
tt_tensor *tu_fused_scattered_rows(tt_tensor *x, int dim);
/* Adds the tiles of all ranks, as tu_scatter's accept. */
tutti_status tu_fused_reduce(const tu_fused_block *block, int64_t first, int64_t count, const void *const *from,
                             const tu_aside *copies, int copy_count);
/* How blocks of `rows` rows, products with `right`, are cut in tiles and chunks and put together in
 * panels; callbacks and signature are the caller's. by_rows: the blocks' rows follow each other in the left matrix. */
tu_scatter tu_fused_scatter_of(const tu_fused_block *block, const char *who, tutti_group *group, int64_t rows,
                               const tu_right *right, bool by_rows);
/* Divides the scattered dimension of a result among the ranks: contiguous. An error where that leaves a rest. */
tutti_status tu_fused_scattered(const tu_call *call, tu_shape *result, int dim, int ranks);

#endif
