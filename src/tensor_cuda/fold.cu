/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions, in the order of the CPU's (reduce.c and kernel/fold.h), so that the bits are the same. A row is folded in
 * blocks of TU_FOLD_BLOCK elements, each over a fixed number of lanes, which are folded by halves; columns in blocks of
 * TU_FOLD_ROWS rows, one row after the other. The blocks' results are folded in their order.
 */
#include "complex.cuh"

#include "tensor/kernel/elementary.h"

#define TEAM 256 /* threads of a block */
#define AHEAD 16 /* loads that are on their way at once */
#define AHEAD_IN_ROW 32
#define AHEAD_OF_PARTS 64

/* A type of computing as it lies in memory. */
template <class Type> struct itself {
    Type bits;
    MEMBER Type widen(itself x) {
        return x.bits;
    }
    MEMBER itself narrow(Type x) {
        return { x };
    }
};

template <class Type, class Lying, int LANES_, class Fold>
HERE void fold_rows(const tu_launch_fold &args, Type *lanes) {
    int64_t units = args.outer * args.parts;
    EACH_THREAD(self) {
        int64_t unit = BLOCK * (TEAM / LANES_) + self / LANES_, row = unit / args.parts, part = unit % args.parts;
        Type held = Fold::first();
        if (unit < units) {
            const Lying *x = (const Lying *)(uintptr_t)args.from + row * args.reduced + part * args.part;
            int64_t left = args.reduced - part * args.part, count = left < args.part ? left : args.part;
            int64_t i = self % LANES_;
            for (; i + (AHEAD_IN_ROW - 1) * LANES_ < count; i += AHEAD_IN_ROW * LANES_) {
                Type next[AHEAD_IN_ROW]; /* on their way before the first is needed */
                UNROLL
                for (int k = 0; k < AHEAD_IN_ROW; k++)
                    next[k] = Lying::widen(x[i + k * LANES_]);
                UNROLL
                for (int k = 0; k < AHEAD_IN_ROW; k++)
                    held = Fold::step(held, next[k]);
            }
            for (; i < count; i += LANES_)
                held = Fold::step(held, Lying::widen(x[i]));
        }
        lanes[self] = held;
    }
    SYNC_TEAM();
    for (int half = LANES_ / 2; half > 0; half /= 2) {
        EACH_THREAD(self) {
            if (self % LANES_ < half)
                lanes[self] = Fold::step(lanes[self], lanes[self + half]);
        }
        SYNC_TEAM();
    }
    EACH_THREAD(self) {
        int64_t unit = BLOCK * (TEAM / LANES_) + self / LANES_;
        if (self % LANES_ == 0 && unit < units)
            ((Type *)(uintptr_t)args.to)[unit] = args.parts == 1 ? Fold::step(Fold::first(), lanes[self]) : lanes[self];
    }
}

/* A thread has WIDTH columns of a part. */
template <class Type, class Lying, class Fold, int WIDTH> HERE void fold_columns_by(const tu_launch_fold &args) {
    struct alignas(sizeof(Lying) * WIDTH) pack {
        Lying at[WIDTH];
    };
    int64_t packs = args.inner / WIDTH;
    EACH_ELEMENT(i, args.outer * args.parts * packs) {
        int64_t unit = i / packs, column = (i - unit * packs) * WIDTH, outer = unit / args.parts,
                part = unit - outer * args.parts;
        int64_t left = args.reduced - part * args.part, count = left < args.part ? left : args.part;
        const Lying *x =
            (const Lying *)(uintptr_t)args.from + (outer * args.reduced + part * args.part) * args.inner + column;
        Type held[WIDTH];
        UNROLL
        for (int lane = 0; lane < WIDTH; lane++)
            held[lane] = Fold::first();
        int64_t row = 0;
        for (; row + AHEAD <= count; row += AHEAD) {
            pack next[AHEAD];
            UNROLL
            for (int k = 0; k < AHEAD; k++)
                next[k] = *(const pack *)(x + (row + k) * args.inner);
            UNROLL
            for (int k = 0; k < AHEAD; k++) {
                UNROLL
                for (int lane = 0; lane < WIDTH; lane++)
                    held[lane] = Fold::step(held[lane], Lying::widen(next[k].at[lane]));
            }
        }
        for (; row < count; row++) {
            UNROLL
            for (int lane = 0; lane < WIDTH; lane++)
                held[lane] = Fold::step(held[lane], Lying::widen(x[row * args.inner + lane]));
        }
        UNROLL
        for (int lane = 0; lane < WIDTH; lane++)
            ((Type *)(uintptr_t)args.to)[unit * args.inner + column + lane] =
                args.parts == 1 ? Fold::step(Fold::first(), held[lane]) : held[lane];
    }
}
template <class Type, class Lying, class Fold> HERE void fold_columns(const tu_launch_fold &args) {
    const int width = sizeof(Lying) < 8 ? 8 / sizeof(Lying) : 1;
    if (args.from % 8 == 0 && args.inner % width == 0)
        fold_columns_by<Type, Lying, Fold, width>(args);
    else
        fold_columns_by<Type, Lying, Fold, 1>(args);
}

/* The parts of each result, in order; Lying is what results lie as. */
template <class Type, class Lying, class Fold> HERE void fold_parts(const tu_launch_fold &args) {
    EACH_ELEMENT(i, args.outer * args.inner) {
        const Type *x = (const Type *)(uintptr_t)args.from + i / args.inner * args.parts * args.inner + i % args.inner;
        Type held = Fold::first();
        int64_t part = 0;
        for (; part + AHEAD_OF_PARTS <= args.parts; part += AHEAD_OF_PARTS) {
            Type next[AHEAD_OF_PARTS];
            UNROLL
            for (int k = 0; k < AHEAD_OF_PARTS; k++)
                next[k] = x[(part + k) * args.inner];
            UNROLL
            for (int k = 0; k < AHEAD_OF_PARTS; k++)
                held = Fold::step(held, next[k]);
        }
        for (; part < args.parts; part++)
            held = Fold::step(held, x[part * args.inner]);
        ((Lying *)(uintptr_t)args.to)[i] = Lying::narrow(held);
    }
}

#define FOLD(name, suffix, type, lanes_, begin, next)                        \
    struct name##_##suffix {                                                 \
        MEMBER type first() {                                                \
            return begin;                                                    \
        }                                                                    \
        MEMBER type step(type held, type x) {                                \
            return next;                                                     \
        }                                                                    \
    };                                                                       \
    KERNEL(fold_rows_##name##_##suffix, tu_launch_fold) {                    \
        SHARED type lanes[TEAM];                                             \
        fold_rows<type, itself<type>, lanes_, name##_##suffix>(args, lanes); \
    }                                                                        \
    KERNEL(fold_columns_##name##_##suffix, tu_launch_fold) {                 \
        fold_columns<type, itself<type>, name##_##suffix>(args);             \
    }                                                                        \
    KERNEL(fold_parts_##name##_##suffix, tu_launch_fold) {                   \
        fold_parts<type, itself<type>, name##_##suffix>(args);               \
    }
FOLD(sum, f32, float, 32, 0, held + x)
FOLD(sum, f64, double, 16, 0, held + x)
FOLD(sum, i64, uint64_t, 16, 0, held + x)
FOLD(sum, c128, tu_c128, 16, 0, held + x)
FOLD(prod, f32, float, 32, 1, held *x)
FOLD(prod, f64, double, 16, 1, held *x)
FOLD(prod, i64, uint64_t, 16, 1, held *x)
FOLD(prod, c128, tu_c128, 16, 1, held *x)
FOLD(amax, f32, float, 32, -INFINITY, tu_maximum_f32(held, x))
FOLD(amax, f64, double, 16, -(double)INFINITY, tu_maximum_f64(held, x))
FOLD(amax, i64, int64_t, 16, INT64_MIN, held > x ? held : x)
FOLD(amax, u64, uint64_t, 16, 0, held > x ? held : x)
FOLD(amin, f32, float, 32, INFINITY, tu_minimum_f32(held, x))
FOLD(amin, f64, double, 16, (double)INFINITY, tu_minimum_f64(held, x))
FOLD(amin, i64, int64_t, 16, INT64_MAX, held < x ? held : x)
FOLD(amin, u64, uint64_t, 16, UINT64_MAX, held < x ? held : x)
FOLD(any, i64, int64_t, 16, 0, (held | x) != 0)
FOLD(all, i64, int64_t, 16, 1, held != 0 && x != 0)

/* Narrow floats as they lie, to f32; and the f32 of their parts to narrow ones. */
#define NARROW_FOLD(name, suffix)                                      \
    KERNEL(fold_rows_##name##_##suffix, tu_launch_fold) {              \
        SHARED float lanes[TEAM];                                      \
        fold_rows<float, lying_##suffix, 32, name##_f32>(args, lanes); \
    }                                                                  \
    KERNEL(fold_columns_##name##_##suffix, tu_launch_fold) {           \
        fold_columns<float, lying_##suffix, name##_f32>(args);         \
    }                                                                  \
    KERNEL(fold_parts_##name##_##suffix, tu_launch_fold) {             \
        fold_parts<float, lying_##suffix, name##_f32>(args);           \
    }
#define NARROW_FOLDS(name)  \
    NARROW_FOLD(name, bf16) \
    NARROW_FOLD(name, f16)
NARROW_FOLDS(sum)
NARROW_FOLDS(prod)
NARROW_FOLDS(amax)
NARROW_FOLDS(amin)

/* A mean is a sum times the reciprocal of the count, in f64. */
KERNEL(scale_f32, tu_launch_line) {
    EACH_ELEMENT(i, args.total) {
        float *to = (float *)(uintptr_t)args.to + i;
        *to = (float)((double)*to * args.first);
    }
}
KERNEL(scale_f64, tu_launch_line) {
    EACH_ELEMENT(i, args.total) {
        ((double *)(uintptr_t)args.to)[i] *= args.first;
    }
}

/* Where the largest of (outer, reduced, inner) is: the first of equal ones, a NaN before all. */
template <class Type> HERE void argmax(const tu_launch_fold &args) {
    EACH_ELEMENT(i, args.outer * args.inner) {
        const Type *x =
            (const Type *)(uintptr_t)args.from + i / args.inner * args.reduced * args.inner + i % args.inner;
        int64_t best = 0;
        Type top = x[0];
        for (int64_t k = 1; k < args.reduced; k++) {
            Type next = x[k * args.inner];
            if (next > top || (next != next && top == top)) {
                best = k;
                top = next;
            }
        }
        ((int64_t *)(uintptr_t)args.to)[i] = best;
    }
}
KERNEL(argmax_f64, tu_launch_fold) {
    argmax<double>(args);
}
KERNEL(argmax_i64, tu_launch_fold) {
    argmax<int64_t>(args);
}

/* ---- parts of several ranks: the arithmetic of tutti/dtype.h ---- */

HERE float part_sum(float sum, const tu_launch_parts &args) {
    return args.average ? sum / (float)args.ranks : sum;
}

/* Sixteen bytes of every part at a time, all of them on their way before the first is added. Known: how many parts
 * there are, 0: any number, eight of them at a time. */
template <class Lying, int Known> HERE void add_packs(const tu_launch_parts &args) {
    const int each = 16 / (int)sizeof(Lying), most = Known > 0 ? Known : 8;
    struct alignas(16) pack {
        Lying at[each];
    };
    bool aligned = ((args.from | args.out | (uint64_t)args.step) & 15) == 0;
    int64_t packs = aligned ? args.count / each : 0;
    EACH_ELEMENT(i, packs) {
        float sums[each];
        for (int first = 0; first < args.ranks; first += most) {
            pack read[most];
            UNROLL
            for (int rank = 0; rank < most; rank++)
                if (Known > 0 || first + rank < args.ranks)
                    read[rank] = ((const pack *)(uintptr_t)(args.from + (uint64_t)((first + rank) * args.step)))[i];
            UNROLL
            for (int rank = 0; rank < most; rank++) {
                if (Known > 0 || first + rank < args.ranks) {
                    UNROLL
                    for (int k = 0; k < each; k++) {
                        float x = Lying::widen(read[rank].at[k]);
                        sums[k] = first + rank == 0 ? x : sums[k] + x;
                    }
                }
            }
        }
        pack written;
        UNROLL
        for (int k = 0; k < each; k++)
            written.at[k] = Lying::narrow(part_sum(sums[k], args));
        ((pack *)(uintptr_t)args.out)[i] = written;
    }
    EACH_ELEMENT(rest, args.count - packs * each) {
        int64_t i = packs * each + rest;
        float sum = 0;
        for (int rank = 0; rank < args.ranks; rank++) {
            float x = Lying::widen(((const Lying *)(uintptr_t)(args.from + (uint64_t)(rank * args.step)))[i]);
            sum = rank == 0 ? x : sum + x;
        }
        ((Lying *)(uintptr_t)args.out)[i] = Lying::narrow(part_sum(sum, args));
    }
}

template <class Lying> HERE void add_lying(const tu_launch_parts &args) {
    if (args.ranks == 2)
        add_packs<Lying, 2>(args);
    else if (args.ranks == 4)
        add_packs<Lying, 4>(args);
    else
        add_packs<Lying, 0>(args);
}

/* One element at a time. */
template <class Type> HERE void add_elements(const tu_launch_parts &args) {
    int bytes = bytes_of(args.dtype);
    EACH_ELEMENT(i, args.count) {
        Type sum = 0;
        for (int rank = 0; rank < args.ranks; rank++) {
            Type x = load_as<Type>((const char *)(uintptr_t)(args.from + (uint64_t)(rank * args.step)) + i * bytes,
                                   args.dtype);
            sum = rank == 0 ? x : sum + x;
        }
        store_as<Type>(args.average ? sum / (Type)args.ranks : sum, (char *)(uintptr_t)args.out + i * bytes,
                       args.dtype);
    }
}

/* Integers wrap, and their average is a division of integers. */
template <class Integer> HERE void add_integers(const tu_launch_parts &args) {
    EACH_ELEMENT(i, args.count) {
        Integer sum = 0;
        for (int rank = 0; rank < args.ranks; rank++)
            sum = (Integer)((uint64_t)sum +
                            (uint64_t)((const Integer *)(uintptr_t)(args.from + (uint64_t)(rank * args.step)))[i]);
        ((Integer *)(uintptr_t)args.out)[i] = args.average ? (Integer)(sum / (Integer)args.ranks) : sum;
    }
}

#define ADD(suffix, how)                          \
    KERNEL(add_parts_##suffix, tu_launch_parts) { \
        how(args);                                \
    }
ADD(f64, add_elements<double>)
ADD(f32, add_lying<lying_f32>)
ADD(f16, add_lying<lying_f16>)
ADD(bf16, add_lying<lying_bf16>)
ADD(f8_e4m3, add_elements<float>)
ADD(f8_e5m2, add_elements<float>)
ADD(i8, add_integers<int8_t>)
ADD(i16, add_integers<int16_t>)
ADD(i32, add_integers<int32_t>)
ADD(i64, add_integers<int64_t>)
ADD(u8, add_integers<uint8_t>)
ADD(u16, add_integers<uint16_t>)
ADD(u32, add_integers<uint32_t>)
ADD(u64, add_integers<uint64_t>)
