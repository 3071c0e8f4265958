/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rows of this room's operators.def declare, and what its files share.
 */
#ifndef TU_FUSED_OPERATORS_H
#define TU_FUSED_OPERATORS_H

#include <tutti/fused.h>

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
/* Adds the tiles of all ranks, as tu_scatter's accept. */
tutti_status tu_fused_reduce(const tu_fused_block *block, int64_t first, int64_t count, const void *const *from);
/* Rows of a tile: enough for the BLAS to run at full speed. */
int64_t tu_fused_tile_rows(int64_t rows, size_t row_bytes);

#endif
