/* SPDX-License-Identifier: Apache-2.0
 *
 * What a set of kernels is: one table of functions. A new instruction set is a folder with one file that fills one, and
 * a row in kernel.c. Only files below kernel/ include this.
 */
#ifndef TU_KERNEL_TABLE_H
#define TU_KERNEL_TABLE_H

#include <stdbool.h>
#include <stddef.h>

#include <tutti/dtype.h>

typedef struct tu_reduce_args {
    void *const *to;
    const void *const *from;
    const double *factors; /* one per source, for premul_sum */
    double reciprocal;     /* of from_count where that is exact, a power of two; else 0: averages divide */
    int to_count;
    int from_count;
    bool stream; /* store past the caches where the alignment allows; the caller fences */
    /* A copy beside the reduction; a set of kernels that does not know it leaves aside_done at 0. */
    char *aside_to;
    const char *aside_from;
    size_t aside_bytes;
    size_t aside_turn;  /* bytes of it after each TU_KERNEL_TURN bytes of the reduction; a multiple of 64 */
    size_t *aside_done; /* set by the kernel */
} tu_reduce_args;

/* Bytes of a reduction between two pieces of the copy beside it. Measured between two cores: with 512 bytes to 1 KiB
 * the two together take hardly longer than the longer one alone, from 2 KiB on nearly as long as one after the other.
 */
#define TU_KERNEL_TURN ((size_t)1024)

/* Reduces the elements [begin, end) of every source into every destination. */
typedef void tu_reduce_kernel(const tu_reduce_args *reduction, size_t begin, size_t end);

/* Rows and columns of the table. Complex types have no column: they are reduced by their real view. */
#define TU_KERNEL_OPS (TUTTI_PREMUL_SUM - TUTTI_SUM + 1)
#define TU_KERNEL_DTYPES (TUTTI_BOOL - TUTTI_F64 + 1)
#define TU_KERNEL_OP(op) ((op)-TUTTI_SUM)
#define TU_KERNEL_DTYPE(dtype) ((dtype)-TUTTI_F64)

typedef struct tu_kernels {
    const char *name;
    /* NULL: the reference is used. The reference has every pair for which tutti_reduction_applies. */
    tu_reduce_kernel *reduce[TU_KERNEL_OPS][TU_KERNEL_DTYPES];
} tu_kernels;

extern const tu_kernels tu_kernels_reference;
#if defined(__x86_64__)
extern const tu_kernels tu_kernels_avx2;
extern const tu_kernels tu_kernels_avx512;
#elif defined(__aarch64__)
extern const tu_kernels tu_kernels_neon;
#endif

#endif
