/* SPDX-License-Identifier: Apache-2.0
 *
 * Reducing and copying memory, by the processor, as fast as its instruction set allows.
 *
 * A reduction reads its sources once, combines them element by element in the order 0 to n-1, and equals a serial loop
 * bit for bit: the same on every instruction set. The arithmetic is that of tutti/dtype.h: 16-bit and 8-bit floats
 * accumulate in f32 and round once; a sum starts with the first source, not with zero, so that -0 stays -0.
 *
 * The kernels are those of base/instructions.h: chosen once per process, from what the processor can do or the setting
 * TUTTI_ISA. Every function here is safe from any thread and never fails: arguments are checked by the callers.
 */
#ifndef TU_KERNEL_KERNEL_H
#define TU_KERNEL_KERNEL_H

#include <stdbool.h>
#include <stddef.h>

#include <tutti/dtype.h>

#include "base/error.h"

enum {
    /* Write past the caches, for results that nobody reads soon. Ordered before the return: a release store that
     * follows publishes them as it would ordinary stores. */
    TU_KERNEL_STREAM = 1
};

/* A copy that goes on beside a reduction, a small piece of each in turn, so that loads of the one and stores of the
 * other are under way at the same time. It may read what the reduction writes, at the same place: it is always
 * behind. */
typedef struct tu_aside {
    void *to;
    const void *from;
    size_t bytes;
} tu_aside;

/* Reduces `count` elements of `from_count` (at least 1, any number) sources into each of `to_count` (at least 1, any
 * number) destinations. A destination may be the address of a source (in place); any other overlap is not allowed.
 * Any alignment, any count. avg divides by `from_count`. `factors` has one entry per source for TUTTI_PREMUL_SUM and
 * is not read otherwise: double holds a factor of every float type exactly; it is rounded to the accumulator.
 * tutti_reduction_applies(reduction, dtype) must hold. The caller's floating-point control word (flush-to-zero,
 * rounding, traps) has no influence and is left as it was. */
TU_SHARED void tu_reduce_many(void *const *to, int to_count, const void *const *from, int from_count, size_t count,
                              tutti_dtype dtype, tutti_reduction reduction, const double *factors, unsigned flags);

/* The same, with a copy beside it. */
TU_SHARED void tu_reduce_beside(void *const *to, int to_count, const void *const *from, int from_count, size_t count,
                                tutti_dtype dtype, tutti_reduction reduction, const double *factors, unsigned flags,
                                const tu_aside *aside);

/* The same into one destination. */
static inline void tu_reduce(void *to, const void *const *from, int from_count, size_t count, tutti_dtype dtype,
                             tutti_reduction reduction, const double *factors, unsigned flags) {
    tu_reduce_many(&to, 1, from, from_count, count, dtype, reduction, factors, flags);
}

/* ---- reductions in parts: accumulate.c ----
 *
 * Elements are widened to the type that sums are kept in; reducing those of some sources, with tu_accumulation of the
 * reduction, gives what the next part starts with; concluding the last part divides where it has to, and rounds. The
 * same bits as one reduction of all sources. */

tutti_dtype tu_accumulator(tutti_dtype dtype);
tutti_reduction tu_accumulation(tutti_reduction reduction);
void tu_widen(void *to, const void *from, size_t count, tutti_dtype dtype);
/* `ranks`: sources in all, for avg. `to` may be `from`. */
void tu_conclude(void *to, const void *from, size_t count, tutti_dtype dtype, tutti_reduction reduction, int ranks);

/* Copies bytes; `to` and `from` do not overlap. */
void tu_copy(void *to, const void *from, size_t bytes, unsigned flags);

/* Copies bytes to several destinations, reading the source once. A destination may be `from` itself. */
void tu_copy_many(void *const *to, int to_count, const void *from, size_t bytes, unsigned flags);

/* Copies bytes, with another copy beside it. */
void tu_copy_beside(void *to, const void *from, size_t bytes, unsigned flags, const tu_aside *aside);

/* The factor of a call (one element of `dtype`; its real part's type for complex) as tu_reduce takes it. */
double tu_factor(const void *element, tutti_dtype dtype);

/* "avx512", "avx2", "neon" or "reference": the kernels in use. */
const char *tu_kernels_name(void);

#endif
