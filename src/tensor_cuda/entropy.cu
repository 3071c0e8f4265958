/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of cross entropy: losses of rows, their mean, and the gradient. The arithmetic is that of kernel/rows_body.h.
 */
#include "rows.cuh"

#include "tensor/device.h"
#include "tensor/launch_slopes.h"

/* The class of a row's target; -1 where it does not count, or is none, which is a fault. */
HERE int64_t target_of(const tu_launch_rows &args, int64_t row) {
    int64_t target = ((const int64_t *)(uintptr_t)args.targets)[row];
    if (target == args.ignore)
        return -1;
    if (target >= 0 && target < args.size)
        return target;
    tu_device_fault *fault = (tu_device_fault *)(uintptr_t)args.fault;
    if (FIRST_TO_SET(&fault->operation, -1)) {
        fault->position = row;
        fault->index = target;
        fault->limit = args.size;
        FENCE();
        fault->operation = TU_INDEX_TARGET;
    }
    return -1;
}

/* Elements that lie in 16 bytes. Rows may begin anywhere: they are read as they lie, and written at once where the
 * place is even. */
template <class Type, class Lying> struct packed {
    enum {
        COUNT = 16 / sizeof(Lying)
    };
    struct alignas(16) pack {
        Lying at[COUNT];
    };
    MEMBER void read(const Lying *from, Type *values) {
        pack whole;
        if (sizeof(Lying) == 2) {
            eight_halves words = read_eight(from);
            memcpy(&whole, &words, sizeof whole);
        } else if (((uintptr_t)from & 15) == 0) {
            whole = *(const pack *)from;
        } else {
            UNROLL
            for (int k = 0; k < COUNT; k++)
                whole.at[k] = from[k];
        }
        UNROLL
        for (int k = 0; k < COUNT; k++)
            values[k] = Lying::widen(whole.at[k]);
    }
    MEMBER void write(Lying *to, const Type *values) {
        pack whole;
        UNROLL
        for (int k = 0; k < COUNT; k++)
            whole.at[k] = Lying::narrow(values[k]);
        if (((uintptr_t)to & 15) == 0) {
            *(pack *)to = whole;
        } else {
            UNROLL
            for (int k = 0; k < COUNT; k++)
                to[k] = whole.at[k];
        }
    }
};

/* The largest element of each row, whatever the order: a thread takes 16 bytes at a time. */
template <class Type, class Lying> HERE void find_largest(const tu_launch_rows &args, Type *lane) {
    typedef packed<Type, Lying> of;
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self), own = self % team<Type>::LANES, whole = args.size / of::COUNT;
        Type held = -(Type)INFINITY, values[of::COUNT];
        const Lying *x = LYING_OF(x);
        if (row < args.count) {
            for (int64_t i = own; i < whole; i += team<Type>::LANES) {
                of::read(x + i * of::COUNT, values);
                UNROLL
                for (int k = 0; k < of::COUNT; k++)
                    held = math<Type>::greater(values[k], held);
            }
            for (int64_t i = whole * of::COUNT + own; i < args.size; i += team<Type>::LANES)
                held = math<Type>::greater(Lying::widen(x[i]), held);
        }
        lane[self] = held;
    }
    SYNC_TEAM();
    team<Type>::largest(lane);
}

/* The logarithm of each row's sum of exponentials, as its largest element and what is to be added, and its loss, which
 * is 0 where it does not count. */
template <class Type, class Lying> HERE void entropy(const tu_launch_rows &args, Type *lane, Type *top) {
    find_largest<Type, Lying>(args, lane);
    EACH_THREAD(self) {
        Type held = team<Type>::of_team(lane, self);
        top[self] = held == -(Type)INFINITY ? (Type)0 : held;
    }
    SYNC();
    add_rows(args, lane, [&](Type held, int self, int64_t row, int64_t i) {
        return held + math<Type>::exp_below(math<Type>::fma(Lying::widen(LYING_OF(x)[i]), (Type)1, -top[self]));
    });
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        if (row < args.count && self % team<Type>::LANES == 0) {
            Type more = math<Type>::log(lane[self]), *sums = (Type *)(uintptr_t)args.sums + 2 * row;
            int64_t target = target_of(args, row);
            sums[0] = top[self];
            sums[1] = more;
            ((double *)(uintptr_t)args.losses)[row] =
                target >= 0 ? (double)top[self] - (double)Lying::widen(LYING_OF(x)[target]) + (double)more : 0;
        }
    }
}

/* One block: its threads add the losses of TU_LOSS_PART rows each, and the first one these sums, in order. */
KERNEL(entropy_mean, tu_launch_rows) {
    SHARED double part[THREADS_OF_ROWS], sum;
    SHARED int64_t counted[THREADS_OF_ROWS];
    const double *losses = (const double *)(uintptr_t)args.losses;
    const int64_t *targets = (const int64_t *)(uintptr_t)args.targets;
    EACH_THREAD(self) {
        counted[self] = 0;
        if (self == 0)
            sum = 0;
    }
    for (int64_t begin = 0; begin < args.count; begin += THREADS_OF_ROWS * TU_LOSS_PART) {
        SYNC();
        EACH_THREAD(self) {
            double held = 0;
            int64_t first = begin + self * TU_LOSS_PART;
            UNROLL_BY_16
            for (int64_t i = first; i < first + TU_LOSS_PART; i++) {
                bool counts = i < args.count && targets[i] != args.ignore;
                held += counts ? losses[i] : 0; /* a sum of losses is never -0, so that 0 changes nothing */
                counted[self] += counts;
            }
            part[self] = held;
        }
        SYNC();
        EACH_THREAD(self) {
            if (self == 0) {
                double held = sum;
                for (int i = 0; i < THREADS_OF_ROWS; i++)
                    held += part[i];
                sum = held;
            }
        }
    }
    SYNC();
    EACH_THREAD(self) {
        if (self == 0) {
            int64_t all = 0;
            for (int i = 0; i < THREADS; i++)
                all += counted[i];
            store_as<double>(sum / (double)all, (void *)(uintptr_t)args.out, args.dtype);
        }
    }
}

/* other is the gradient, one number; what each row's part is multiplied with goes to `counted`, as f64. One block. */
KERNEL(entropy_share, tu_launch_rows) {
    SHARED int64_t counted[THREADS_OF_ROWS];
    const int64_t *targets = (const int64_t *)(uintptr_t)args.targets;
    EACH_THREAD(self) {
        int64_t held = 0;
        for (int64_t row = self; row < args.count; row += THREADS)
            held += targets[row] != args.ignore;
        counted[self] = held;
    }
    SYNC();
    EACH_THREAD(self) {
        if (self == 0) {
            int64_t all = 0;
            for (int i = 0; i < THREADS; i++)
                all += counted[i];
            double grad = load_as<double>((const void *)(uintptr_t)args.other, args.dtype);
            *(double *)(uintptr_t)args.counted = grad / (double)all;
        }
    }
}

/* A block has a row at a time, a thread 16 bytes of it. */
template <class Type, class Lying> HERE void entropy_backward(const tu_launch_slopes &given) {
    typedef packed<Type, Lying> of;
    const tu_launch_rows &args = given.rows;
    Type share = (Type) * (const double *)(uintptr_t)args.counted;
    for (int64_t row = BLOCK; row < args.count; row += BLOCKS) {
        int64_t target = target_of(args, row);
        const Type *sums = (const Type *)(uintptr_t)args.sums + 2 * row;
        Type top = sums[0], more = sums[1], factor = target < 0 ? (Type)0 : share;
        const Lying *x = LYING_OF(x);
        Lying *out = (Lying *)(uintptr_t)args.out + row * given.distance;
        EACH_THREAD(self) {
            for (int64_t i = (int64_t)self * of::COUNT; i < args.size; i += (int64_t)THREADS * of::COUNT) {
                int64_t left = args.size - i < of::COUNT ? args.size - i : of::COUNT, own = target - i;
                Type values[of::COUNT];
                if (left == of::COUNT) {
                    of::read(x + i, values);
                } else {
                    UNROLL
                    for (int k = 0; k < of::COUNT; k++)
                        values[k] = k < left ? Lying::widen(x[i + k]) : (Type)0;
                }
                UNROLL
                for (int k = 0; k < of::COUNT; k++)
                    values[k] = target < 0 ? (Type)0 : math<Type>::exp_below(values[k] - top - more) * factor;
                if (own >= 0 && own < of::COUNT) {
                    UNROLL
                    for (int k = 0; k < of::COUNT; k++)
                        values[k] -= k == own ? factor : (Type)0;
                }
                if (left == of::COUNT) {
                    of::write(out + i, values);
                } else {
                    UNROLL
                    for (int k = 0; k < of::COUNT; k++)
                        if (k < left)
                            out[i + k] = Lying::narrow(values[k]);
                }
            }
            for (int64_t i = args.size + self; i < given.distance && (given.last || row + 1 < args.count); i += THREADS)
                out[i] = Lying::narrow((Type)0);
        }
    }
}

LYING_KERNELS(entropy)
#define SLOPES_KERNEL(suffix, type)                       \
    KERNEL(entropy_backward_##suffix, tu_launch_slopes) { \
        entropy_backward<type, lying_##suffix>(args);     \
    }
SLOPES_KERNEL(f32, float)
SLOPES_KERNEL(f64, double)
SLOPES_KERNEL(bf16, float)
SLOPES_KERNEL(f16, float)
