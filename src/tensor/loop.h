/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops over tensors of one shape. A kernel sees dense rows of one type (a "compute type"); the loop brings it there:
 * it merges dimensions, hands over rows that are dense already as they lie, and packs, converts and repeats the others
 * in pieces that stay in the first-level cache.
 */
#ifndef TU_TENSOR_LOOP_H
#define TU_TENSOR_LOOP_H

#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tensor/operator.h"

#define TU_OPERANDS 6

/* Results of so many bytes do not stay in the caches until someone reads them: where it is simple they are stored past
 * the caches, which saves reading what is then overwritten. */
#define TU_STREAM_BYTES ((size_t)8 << 20)

/* memcpy past the caches where the machine has such stores: `to` and `bytes` are multiples of 16. tu_stream_end comes
 * before others may read what was stored. */
static inline void tu_stream_copy(char *to, const char *from, int64_t bytes) {
#if defined(__SSE2__)
    for (int64_t i = 0; i < bytes; i += 16)
        _mm_stream_si128((__m128i *)(void *)(to + i), _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
#else
    memcpy(to, from, (size_t)bytes);
#endif
}
static inline void tu_stream_end(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* out[i] = f(in[0][i], in[1][i], …) for i < count, all of the compute type. The attributes are those of the
 * operator. */
typedef void tu_kernel(const void *const *in, void *out, int64_t count, const void *attributes);

typedef struct tu_loop {
    int operands; /* operand 0 is the output */
    int ndim;
    int64_t sizes[TT_MAX_DIMS];
    struct {
        char *data;
        tutti_dtype dtype;
        int64_t strides[TT_MAX_DIMS]; /* in elements; 0 repeats */
    } at[TU_OPERANDS];
} tu_loop;

/* A loop over `out`'s shape; the inputs broadcast to it. */
void tu_loop_init(tu_loop *loop, const tt_tensor *out, int inputs, tt_tensor *const *in);
void tu_loop_run(tu_loop *loop, tu_kernel *kernel, tutti_dtype compute, const void *attributes);

/* x, broadcast to to's shape, into `to`, converted, from any device to any. Cannot fail where both are on the CPU. */
tutti_status tu_copy_tensor(const tt_tensor *to, const tt_tensor *x);

/* Copies where the dense dimension of the input is another than the output's, in squares (transpose.c); false where the
 * loop is none of these. */
bool tu_copy_turned(const tu_loop *loop);

#endif
