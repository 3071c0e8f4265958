/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels on rows share: a team of as many threads as sums have lanes has a row, and folds it as the loops of
 * tensor/kernel/rows_body.h do, so that the bits are those of the CPU. Lying is how rows lie in memory, Type what is
 * computed with: narrow floats are widened as they are read, and rounded once.
 */
#ifndef TU_TENSOR_CUDA_ROWS_CUH
#define TU_TENSOR_CUDA_ROWS_CUH

#include "kernel.cuh"

#include "tensor/kernel/elementary.h"

#define THREADS_OF_ROWS 128

template <class Type> struct math;
#define MATH(suffix, type)                                                   \
    template <> struct math<type> {                                          \
        MEMBER type exp(type x) {                                            \
            return tu_exp_##suffix(x);                                       \
        }                                                                    \
        MEMBER type exp_below(type x) { /* of what is not above 0, or NaN */ \
            return tu_exp_below_##suffix(x);                                 \
        }                                                                    \
        MEMBER type log(type x) {                                            \
            return tu_log_##suffix(x);                                       \
        }                                                                    \
        MEMBER type sqrt(type x) {                                           \
            return tu_sqrt_##suffix(x);                                      \
        }                                                                    \
        MEMBER type fma(type left, type right, type more) {                  \
            return tu_fma_##suffix(left, right, more);                       \
        }                                                                    \
        MEMBER type greater(type left, type right) {                         \
            return tu_greater_##suffix(left, right);                         \
        }                                                                    \
    };
MATH(f32, float)
MATH(f64, double)

/* The teams of a block: which row a thread has, and its lane. `lane` is shared by all of them. */
template <class Type> struct team {
    enum {
        LANES = 128 / sizeof(Type),
        ROWS = THREADS_OF_ROWS / LANES
    };
    MEMBER int64_t row(int self) {
        return BLOCK * ROWS + self / LANES;
    }
    /* What the first lane of the thread's team has. */
    MEMBER Type of_team(const Type *lane, int self) {
        return lane[self / LANES * LANES];
    }
    MEMBER void add(Type *lane) {
        for (int half = LANES / 2; half > 0; half /= 2) {
            EACH_THREAD(self) {
                if (self % LANES < half)
                    lane[self] += lane[self + half];
            }
            SYNC_TEAM();
        }
    }
    MEMBER void largest(Type *lane) {
        for (int half = LANES / 2; half > 0; half /= 2) {
            EACH_THREAD(self) {
                if (self % LANES < half)
                    lane[self] = math<Type>::greater(lane[self + half], lane[self]);
            }
            SYNC_TEAM();
        }
    }
};

#define EACH_OF_ROW(i) for (int64_t i = self % team<Type>::LANES; i < args.size; i += team<Type>::LANES)
#define ROW_OF(pointer) ((Type *)(uintptr_t)(args.pointer) + row * args.size)

#define LONG_ROW 4096 /* elements; shorter ones are slower when several loads are on their way at once */

/* What each lane makes of its elements: it begins with `first`, and take(held, self, row, i) adds element i. */
template <class Type, class Take> HERE void fold_lanes(const tu_launch_rows &args, Type *lane, Type first, Take take) {
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type held = first;
        if (row < args.count && args.size > LONG_ROW) {
            UNROLL_BY_4
            EACH_OF_ROW(i) {
                held = take(held, self, row, i);
            }
        } else if (row < args.count) {
            EACH_OF_ROW(i) {
                held = take(held, self, row, i);
            }
        }
        lane[self] = held;
    }
    SYNC_TEAM();
}

/* The sum of each row. */
template <class Type, class Take> HERE void add_rows(const tu_launch_rows &args, Type *lane, Take take) {
    fold_lanes(args, lane, (Type)0, take);
    team<Type>::add(lane);
}

#define LYING_OF(pointer) ((Lying *)(uintptr_t)(args.pointer) + row * args.size)

/* A kernel of each type, with what its teams hold in common. */
#define LYING_KERNEL(name, suffix, type)                          \
    KERNEL(name##_##suffix, tu_launch_rows) {                     \
        SHARED type lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS]; \
        name<type, lying_##suffix>(args, lane, kept);             \
    }
#define LYING_KERNELS(name)         \
    LYING_KERNEL(name, f32, float)  \
    LYING_KERNEL(name, f64, double) \
    LYING_KERNEL(name, bf16, float) \
    LYING_KERNEL(name, f16, float)

#endif
