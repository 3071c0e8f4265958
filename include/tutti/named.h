/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations on symmetric memory that people know from PyTorch, under their own names.
 *
 * They are the collectives of tutti/collective.h with one algorithm each, and they take symmetric memory: a block that
 * was not rendezvoused with the group yet is rendezvoused at its first use, which is collective and bounded. Any number
 * of ranks, every dtype, every reduction that the dtype has; the same bits as ever. No alignment is asked for. A call
 * with count 0 needs no symmetric memory; the ranks meet in it as in any other. They can be asynchronous and batched as
 * all collectives.
 */
#ifndef TUTTI_NAMED_H
#define TUTTI_NAMED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/collective.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- all-reduce ---- */

/* Every rank reads all inputs and writes its own `out`, any memory. `in` is symmetric and unchanged. (Both
 * one_shot_all_reduce and its _out form.) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_one_shot_all_reduce(tutti_group *group, const void *in, void *out,
                                                               size_t count, tutti_dtype dtype,
                                                               tutti_reduction reduction, const tutti_call *call);
/* The same with an input of any memory, which goes through `buffer`, symmetric, of buffer_count elements at least
 * count. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_one_shot_all_reduce_copy(tutti_group *group, void *buffer,
                                                                    size_t buffer_count, const void *in, void *out,
                                                                    size_t count, tutti_dtype dtype,
                                                                    tutti_reduction reduction, const tutti_call *call);
/* In place: each rank reduces its slice and stores it into the buffers of all. `data` is symmetric.
 * (two_shot_all_reduce_) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_two_shot_all_reduce(tutti_group *group, void *data, size_t count,
                                                               tutti_dtype dtype, tutti_reduction reduction,
                                                               const tutti_call *call);
/* The same into `out`, any memory; `in`, symmetric, stays as it was. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_two_shot_all_reduce_out(tutti_group *group, const void *in, void *out,
                                                                   size_t count, tutti_dtype dtype,
                                                                   tutti_reduction reduction, const tutti_call *call);

/* ---- reduce-scatter and all-gather ---- */

/* `in`, symmetric, is a matrix of rows * columns elements, rank r's part goes to `out`, any memory.
 * split_last_dim false: part r is elements r * n to (r + 1) * n with n = rows * columns / size; true: columns r * n to
 * (r + 1) * n of every row, n = columns / size. What is split must be divisible by the number of ranks. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_reduce_scatter_out(tutti_group *group, const void *in, void *out,
                                                              size_t rows, size_t columns, bool split_last_dim,
                                                              tutti_dtype dtype, tutti_reduction reduction,
                                                              const tutti_call *call);
/* all_gather that touches one peer after the other, each rank beginning with another. Any memory.
 * `count` is one rank's share. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_low_contention_all_gather(tutti_group *group, const void *in, void *out,
                                                                     size_t count, tutti_dtype dtype,
                                                                     const tutti_call *call);
/* The same by one copy of each rank to the multicast address of `out`, which is symmetric, has size * count elements
 * and lies at the same place of its block on all ranks; another place is TUTTI_ERROR_MISMATCH. `in` is any memory.
 * Needs multicast as the operations below do. (low_contention_all_gather_ce_multicast_out) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_low_contention_all_gather_multicast(tutti_group *group, const void *in,
                                                                               void *out, size_t count,
                                                                               tutti_dtype dtype,
                                                                               const tutti_call *call);
/* reduce_scatter that touches one peer after the other, each rank beginning with another. Any memory. `count` is
 * one rank's share. On a GPU the copy engines bring the parts together, and the processors only add them up. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_low_contention_reduce_scatter(tutti_group *group, const void *in, void *out,
                                                                         size_t count, tutti_dtype dtype,
                                                                         tutti_reduction reduction,
                                                                         const tutti_call *call);

/* ---- multicast ("multimem") ----
 * On the CPU there is no switch that could multicast: these return TUTTI_ERROR_UNSUPPORTED unless
 * TUTTI_MULTICAST=software asks for a form in which the processors write every copy themselves. */

/* In place; `data` is symmetric. (multimem_all_reduce_) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_multimem_all_reduce(tutti_group *group, void *data, size_t count,
                                                               tutti_dtype dtype, tutti_reduction reduction,
                                                               const tutti_call *call);
/* `in` is symmetric, `out` any memory. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_multimem_one_shot_all_reduce(tutti_group *group, const void *in, void *out,
                                                                        size_t count, tutti_dtype dtype,
                                                                        tutti_reduction reduction,
                                                                        const tutti_call *call);
/* Into the root's `out` alone. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_multimem_one_shot_reduce_out(tutti_group *group, const void *in, void *out,
                                                                        size_t count, tutti_dtype dtype,
                                                                        tutti_reduction reduction, int root,
                                                                        const tutti_call *call);
/* `out`, symmetric, has size * count elements; `in` any memory. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_multimem_all_gather_out(tutti_group *group, const void *in, void *out,
                                                                   size_t count, tutti_dtype dtype,
                                                                   const tutti_call *call);

/* ---- all-to-all whose splits are data ----
 * Buffers and splits are symmetric. A row is `row` elements of `dtype`; splits and offsets count rows. in_rows and
 * out_rows say how many rows the buffers have: more to send or to receive is an error that ends the group. */
typedef struct tutti_rows {
    size_t size;
    const void *in;
    size_t in_rows;
    void *out;
    size_t out_rows;
    size_t row; /* elements of one; 0: 1 */
    tutti_dtype dtype;
} tutti_rows;
#define TUTTI_ROWS_INIT TUTTI_DEFAULTS(tutti_rows)
/* TUTTI_ROWS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_rows_init(tutti_rows *rows, size_t size);

/* in_splits[size]: rows for each rank, one after the other in `in`. Afterwards out_splits_offsets[0][r] is how many
 * came from rank r, [1][r] where they begin in `out`. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_to_all_vdev(tutti_group *group, const tutti_rows *rows,
                                                           const int64_t *in_splits, int64_t *out_splits_offsets,
                                                           const tutti_call *call);
/* in_splits[size][experts], rank-major. The output is expert-major: slot (e, r) = e * size + r of
 * out_splits_offsets[2][experts * size]. Each expert begins at a multiple of major_align (at least 1) rows and takes at
 * least major_align, also when it is empty. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_to_all_vdev_2d(tutti_group *group, const tutti_rows *rows, int experts,
                                                              int64_t major_align, const int64_t *in_splits,
                                                              int64_t *out_splits_offsets, const tutti_call *call);
/* The way back: in_splits_offsets[2][experts * size], expert-major with explicit offsets (gaps are not sent); the
 * output is rank-major, slot (r, e) = r * experts + e, without gaps. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_to_all_vdev_2d_offset(tutti_group *group, const tutti_rows *rows,
                                                                     int experts, const int64_t *in_splits_offsets,
                                                                     int64_t *out_splits_offsets,
                                                                     const tutti_call *call);

/* ---- tiles ----
 * What a rank wants of symmetric matrices of all ranks, taken where it lies: reduced over all of them, or copied from
 * each. All inputs lie at the same place of the same block, and everything but outputs is equal on all ranks: what is
 * not is TUTTI_ERROR_MISMATCH. Outputs are any memory of the same device, apart from the input. On GPUs a reduction is
 * the switch's where the block has a multicast address, for f32, f16 and bf16, sum and avg; else the processors load
 * from all ranks, with the same bits as ever. premul_sum is TUTTI_ERROR_UNSUPPORTED. Within one host, or where members'
 * memory is mapped. */

/* A matrix, or a part of one: rows of `columns` elements. */
typedef struct tutti_tile {
    size_t size;
    void *data;
    size_t rows, columns;
    size_t stride; /* elements from the beginning of one row to that of the next; 0: columns */
} tutti_tile;
#define TUTTI_TILE_INIT TUTTI_DEFAULTS(tutti_tile)
/* TUTTI_TILE_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_tile_init(tutti_tile *tile, size_t size);

/* Reduces `in`, symmetric, over all ranks into the root's `out`, of as many rows and columns and with a stride of its
 * own; elsewhere `out` is not looked at. (tile_reduce) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_tile_reduce(tutti_group *group, const tutti_tile *in, const tutti_tile *out,
                                                       tutti_dtype dtype, tutti_reduction reduction, int root,
                                                       const tutti_call *call);
/* The same for `count` tiles of one block at once, tile i for roots[i]. A rank may be the root of any number of them,
 * also of none; out[i] is looked at where this rank is the root. (multi_root_tile_reduce) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_multi_root_tile_reduce(tutti_group *group, const tutti_tile *const *in,
                                                                  const tutti_tile *const *out, const int *roots,
                                                                  int count, tutti_dtype dtype,
                                                                  tutti_reduction reduction, const tutti_call *call);
/* Cuts the matrix `in`, symmetric, into `count` parts along dimension `dim`, 0 (rows) or 1 (columns), and reduces part
 * i for rank targets[i]; NULL: i modulo the number of ranks. Part i ends before row or column ends[i], the first begins
 * at 0. out[j] is this rank's j-th part, rows one behind the other. (reduce_scatter_offset) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_reduce_scatter_offset(tutti_group *group, const tutti_tile *in, int dim,
                                                                 const size_t *ends, const int *targets, int count,
                                                                 void *const *out, tutti_dtype dtype,
                                                                 tutti_reduction reduction, const tutti_call *call);
/* `in`, symmetric, has `count` parts of counts[i] elements, one behind the other: shares of parameters. Part i of all
 * ranks comes to out[i], in rank order: whole parameters. (all_gather_offset) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_gather_offset(tutti_group *group, const void *in, const size_t *counts,
                                                             int count, void *const *out, tutti_dtype dtype,
                                                             const tutti_call *call);
/* `in`, symmetric, is a matrix of rows * columns items of `item` elements, and what the ranks have is cut along one
 * dimension; afterwards it is cut along the other. scatter_dim 1: columns are dealt out and rows put together, from
 * [rows][columns] to [rows * size][columns / size]; 0: the way back, to [rows / size][columns * size]. What is dealt
 * out must be divisible by the number of ranks. (all_to_all_nd with scatter and gather dimensions (1, 0) and (0, 1):
 * Ulysses) */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_to_all_nd(tutti_group *group, const void *in, void *out, size_t rows,
                                                         size_t columns, size_t item, int scatter_dim,
                                                         tutti_dtype dtype, const tutti_call *call);

#ifdef __cplusplus
}
#endif
#endif
