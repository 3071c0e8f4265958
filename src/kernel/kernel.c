/* SPDX-License-Identifier: Apache-2.0
 *
 * Chooses the kernels for this processor and calls them.
 */
#include "kernel/kernel.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/float16.h"
#include "base/float_control.h"
#include "base/instructions.h"
#include "kernel/table.h"

/* The kernels of each level; levels of another architecture have none. */
static const tu_kernels *const sets[TU_INSTRUCTIONS_END] = {
    [TU_REFERENCE] = &tu_kernels_reference,
#if defined(__x86_64__)
    [TU_AVX2] = &tu_kernels_avx2,
    [TU_AVX512] = &tu_kernels_avx512,
#elif defined(__aarch64__)
    [TU_NEON] = &tu_kernels_neon,
#endif
};

static const tu_kernels *kernels(void) {
    return sets[tu_instructions_get()];
}

const char *tu_kernels_name(void) {
    return kernels()->name;
}

/* Stores past the caches are weakly ordered on x86; elsewhere they are ordinary stores to a release. */
static void stream_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static void run(const tu_reduce_args *args, size_t count, tutti_dtype dtype, tutti_reduction reduction) {
    int row = TU_KERNEL_OP(reduction), column = TU_KERNEL_DTYPE(dtype);
    tu_reduce_kernel *kernel = kernels()->reduce[row][column];
    if (!kernel)
        kernel = tu_kernels_reference.reduce[row][column];
    kernel(args, 0, count);
    if (args->stream)
        stream_fence();
}

static bool streams(unsigned flags) {
    return (flags & TU_KERNEL_STREAM) != 0;
}

/* With a copy beside it. What the kernel leaves of that, because one of the two is longer, follows. */
static void run_beside(tu_reduce_args *args, size_t count, size_t bytes, tutti_dtype dtype, tutti_reduction reduction,
                       const tu_aside *aside) {
    size_t done = 0, turns = (bytes + TU_KERNEL_TURN - 1) / TU_KERNEL_TURN;
    if (turns != 0 && aside->bytes / turns >= 64) {
        args->aside_to = aside->to;
        args->aside_from = aside->from;
        args->aside_bytes = aside->bytes;
        args->aside_turn = aside->bytes / turns / 64 * 64; /* rounded down: it stays behind */
        // cppcheck-suppress autoVariables // taken back below
        args->aside_done = &done;
    }
    run(args, count, dtype, reduction);
    args->aside_done = NULL;
    if (done < aside->bytes)
        tu_copy((char *)aside->to + done, (const char *)aside->from + done, aside->bytes - done, 0);
}

static inline tu_reduce_args arguments(void *const *to, int to_count, const void *const *from, int from_count,
                                       tutti_reduction reduction, const double *factors, unsigned flags) {
    bool exact = reduction == TUTTI_AVG && (from_count & (from_count - 1)) == 0;
    return (tu_reduce_args){ .to = to,
                             .to_count = to_count,
                             .from = from,
                             .from_count = from_count,
                             .factors = factors,
                             .reciprocal = exact ? 1.0 / from_count : 0,
                             .stream = streams(flags) };
}

/* Complex numbers are reduced by their real view. */
static inline void take_apart(tutti_dtype *dtype, size_t *count) {
    if (*dtype == TUTTI_C64 || *dtype == TUTTI_C128) {
        *dtype = *dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
        *count *= 2;
    }
}

void tu_reduce_beside(void *const *to, int to_count, const void *const *from, int from_count, size_t count,
                      tutti_dtype dtype, tutti_reduction reduction, const double *factors, unsigned flags,
                      const tu_aside *aside) {
    take_apart(&dtype, &count);
    tu_reduce_args args = arguments(to, to_count, from, from_count, reduction, factors, flags);
    uint64_t control = tu_float_control_enter();
    run_beside(&args, count, count * tutti_dtype_size(dtype), dtype, reduction, aside);
    tu_float_control_leave(control);
}

/* A few numbers to one place, as gradients' norms and losses are: finding the kernel and setting up its loop would take
 * longer than the sums. The same order, and so the same bits; tests/kernel/reduce.c compares them. */
#define FEW 4

static float number_at(const void *from, size_t index) {
    float number;
    memcpy(&number, (const char *)from + index * sizeof number, sizeof number); /* it may lie anywhere */
    return number;
}

static void sum_few(char *to, const void *const *from, int from_count, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float sum = number_at(from[0], i);
        for (int source = 1; source < from_count; source++)
            sum += number_at(from[source], i);
        memcpy(to + i * sizeof sum, &sum, sizeof sum);
    }
}

void tu_reduce_many(void *const *to, int to_count, const void *const *from, int from_count, size_t count,
                    tutti_dtype dtype, tutti_reduction reduction, const double *factors, unsigned flags) {
    uint64_t control = tu_float_control_enter();
    if (count <= FEW && dtype == TUTTI_F32 && reduction == TUTTI_SUM && to_count == 1 && from_count > 0) {
        sum_few(to[0], from, from_count, count);
        tu_float_control_leave(control);
        return;
    }
    take_apart(&dtype, &count);
    tu_reduce_args args = arguments(to, to_count, from, from_count, reduction, factors, flags);
    run(&args, count, dtype, reduction);
    tu_float_control_leave(control);
}

/* A sum of one source of bytes is a copy. */
void tu_copy_many(void *const *to, int to_count, const void *from, size_t bytes, unsigned flags) {
    tu_reduce_args args = { .to = to, .to_count = to_count, .from = &from, .from_count = 1, .stream = streams(flags) };
    run(&args, bytes, TUTTI_U8, TUTTI_SUM);
}

void tu_copy_beside(void *to, const void *from, size_t bytes, unsigned flags, const tu_aside *aside) {
    tu_reduce_args args = { .to = &to, .to_count = 1, .from = &from, .from_count = 1, .stream = streams(flags) };
    run_beside(&args, bytes, bytes, TUTTI_U8, TUTTI_SUM, aside);
}

void tu_copy(void *to, const void *from, size_t bytes, unsigned flags) {
    if (streams(flags))
        tu_copy_many(&to, 1, from, bytes, flags);
    else
        memcpy(to, from, bytes);
}

double tu_factor(const void *element, tutti_dtype dtype) {
    double wide;
    float narrow;
    uint16_t bits;
    switch (dtype) {
    case TUTTI_F64:
    case TUTTI_C128:
        memcpy(&wide, element, sizeof wide);
        return wide;
    case TUTTI_F32:
    case TUTTI_C64:
        memcpy(&narrow, element, sizeof narrow);
        break;
    case TUTTI_F16:
    case TUTTI_BF16:
        memcpy(&bits, element, sizeof bits);
        narrow = dtype == TUTTI_F16 ? tu_f16_to_f32(bits) : tu_bf16_to_f32(bits);
        break;
    case TUTTI_F8_E4M3:
        narrow = tu_e4m3_to_f32(*(const uint8_t *)element);
        break;
    case TUTTI_F8_E5M2:
        narrow = tu_e5m2_to_f32(*(const uint8_t *)element);
        break;
    default: /* no factor for this type: tutti_reduction_applies says so */
        return 1;
    }
    uint64_t control = tu_float_control_enter();
    wide = narrow; /* would flush a denormal if the caller had asked for that */
    tu_float_control_leave(control);
    return wide;
}
