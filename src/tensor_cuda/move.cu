/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels that move, convert, fill and choose elements.
 */
#include "complex.cuh"

#include "tensor/device.h"
#include "tensor/kernel/elementary.h"
#include "tensor/launch_random.h"
#include "tensor/philox.h"

/* ---- copies: operand 1 into operand 0 ---- */

struct alignas(16) sixteen {
    uint64_t low, high;
};

#define COPY(size, type)                                                                                           \
    KERNEL(copy_##size, tu_launch_loop) {                                                                          \
        EACH_ELEMENT(i, args.total) {                                                                              \
            places at = places_of(args, i);                                                                        \
            ((type *)(uintptr_t)args.at[0].data)[at.at[0]] = ((const type *)(uintptr_t)args.at[1].data)[at.at[1]]; \
        }                                                                                                          \
    }
COPY(1, uint8_t)
COPY(2, uint16_t)
COPY(4, uint32_t)
COPY(8, uint64_t)
COPY(16, sixteen)

/* Of any types; a literal is the f64 whose bits it has. */
KERNEL(convert, tu_launch_loop) {
    EACH_ELEMENT(i, args.total) {
        places at = places_of(args, i);
        const void *from = args.at[1].literal ? (const void *)&args.at[1].data : place_of(args, 1, at);
        tu_element_store(tu_element_load(from, args.at[1].dtype), place_of(args, 0, at), args.at[0].dtype);
    }
}

/* The common ones, dense: eight at a time where both are aligned to sixteen bytes, the rest singly. */
#define NARROW(name, from_type, to_type, call)                                                \
    KERNEL(convert_##name, tu_launch_loop) {                                                  \
        struct alignas(16) from_pack {                                                        \
            from_type at[8];                                                                  \
        };                                                                                    \
        struct alignas(16) to_pack {                                                          \
            to_type at[8];                                                                    \
        };                                                                                    \
        const from_type *from = (const from_type *)(uintptr_t)args.at[1].data;                \
        to_type *to = (to_type *)(uintptr_t)args.at[0].data;                                  \
        int64_t packs = ((args.at[0].data | args.at[1].data) & 15) == 0 ? args.total / 8 : 0; \
        EACH_ELEMENT(i, packs) {                                                              \
            from_pack read = ((const from_pack *)from)[i];                                    \
            to_pack written;                                                                  \
            UNROLL                                                                            \
            for (int k = 0; k < 8; k++) {                                                     \
                from_type x = read.at[k];                                                     \
                written.at[k] = call;                                                         \
            }                                                                                 \
            ((to_pack *)to)[i] = written;                                                     \
        }                                                                                     \
        EACH_ELEMENT(i, args.total - packs * 8) {                                             \
            from_type x = from[packs * 8 + i];                                                \
            to[packs * 8 + i] = call;                                                         \
        }                                                                                     \
    }
NARROW(f32_bf16, float, lying_bf16, lying_bf16::narrow(x))
NARROW(bf16_f32, lying_bf16, float, lying_bf16::widen(x))
NARROW(f32_f16, float, lying_f16, lying_f16::narrow(x))
NARROW(f16_f32, lying_f16, float, lying_f16::widen(x))

/* ---- creation ---- */

KERNEL(arange, tu_launch_line) {
    EACH_ELEMENT(i, args.total) {
        double value = args.first + (double)i * args.second;
        store_as<double>(value, (char *)(uintptr_t)args.to + i * bytes_of(args.dtype), args.dtype);
    }
}

KERNEL(triangle, tu_launch_triangle) {
    EACH_ELEMENT(i, args.total) {
        int64_t row = i / args.columns % args.rows, column = i % args.columns;
        bool kept = args.lower ? column <= row + args.diagonal : column >= row + args.diagonal;
        char *at = (char *)(uintptr_t)args.data + i * args.bytes;
        for (int k = 0; !kept && k < args.bytes; k++)
            at[k] = 0;
    }
}

/* ---- random numbers: random.c has the same ---- */

/* The generator's state: given with the launch, or found in memory, where it changes from run to run of a graph. */
struct drawn {
    uint64_t seed, counter;
    uint32_t rank;
};
HERE drawn state_of(const tu_launch_drawn &args) {
    if (args.state == 0)
        return { args.draw.seed, args.draw.counter, args.draw.rank };
    const uint64_t *words = (const uint64_t *)(uintptr_t)args.state;
    return { words[0], words[1], (uint32_t)words[2] };
}

KERNEL(random, tu_launch_drawn) {
    drawn state = state_of(args);
    EACH_ELEMENT(block, (args.draw.total + 1) / 2) {
        tu_words words = tu_philox(state.seed, state.rank, state.counter + (uint64_t)block);
        double pair[2] = { tu_unit(&words, 0), tu_unit(&words, 1) };
        if (args.draw.distribution == TU_NORMAL) {
            double radius = tu_sqrt_f64(-2.0 * tu_log_f64(1.0 - pair[0])), angle = pair[1] * 0x1.921fb54442d18p+2;
            pair[0] = radius * tu_cos_f64(angle);
            pair[1] = radius * tu_sin_f64(angle);
        }
        for (int half = 0; half < 2; half++)
            pair[half] =
                tu_distribute(pair[half], args.draw.distribution, args.draw.first, args.draw.second, args.draw.dtype);
        if (args.draw.dtype == TUTTI_F32) { /* what is drawn most, without a call */
            float *to = (float *)(uintptr_t)args.draw.to + 2 * block;
            to[0] = (float)pair[0];
            if (2 * block + 1 < args.draw.total)
                to[1] = (float)pair[1];
            continue;
        }
        for (int half = 0; half < 2 && 2 * block + half < args.draw.total; half++)
            store_as<double>(pair[half],
                             (char *)(uintptr_t)args.draw.to + (2 * block + half) * bytes_of(args.draw.dtype),
                             args.draw.dtype);
    }
}

/* Normal numbers of f32, which are drawn most: the bits of the kernel above, whose logarithm and waves see 2^-53 to 1
 * and 0 to 2 pi alone here, and whose cosine and sine are made of the same. */
KERNEL(normal_f32, tu_launch_drawn) {
    struct alignas(8) two {
        float at[2];
    };
    drawn state = state_of(args);
    float *to = (float *)(uintptr_t)args.draw.to;
    EACH_ELEMENT(block, (args.draw.total + 1) / 2) {
        tu_words words = tu_philox(state.seed, state.rank, state.counter + (uint64_t)block);
        double radius = tu_sqrt_f64(-2.0 * tu_log_normal_f64(1.0 - tu_unit(&words, 0)));
        int64_t quadrant;
        double rest = tu_reduce_near_f64(tu_unit(&words, 1) * 0x1.921fb54442d18p+2, &quadrant);
        double cosine = radius * tu_wave_f64(rest, quadrant + 1), sine = radius * tu_wave_f64(rest, quadrant);
        two drawn = { { (float)(args.draw.first + args.draw.second * cosine),
                        (float)(args.draw.first + args.draw.second * sine) } };
        if (2 * block + 1 < args.draw.total)
            *(two *)(to + 2 * block) = drawn;
        else
            to[2 * block] = drawn.at[0];
    }
}

/* A thread has one block of words, and with it four elements, sixteen apart: random_body.h tells why. */
template <class Type> HERE void drop(const tu_launch_drawn &args) {
    int bytes = bytes_of(args.draw.dtype);
    drawn state = state_of(args);
    EACH_ELEMENT(i, (args.draw.total + 63) / 64 * 16) {
        int64_t group = i / 16, lane = i % 16;
        tu_words words = tu_philox(state.seed, state.rank, state.counter + (uint64_t)i);
        for (int k = 0; k < 4; k++) {
            int64_t at = group * 64 + k * 16 + lane;
            if (at >= args.draw.total)
                continue;
            Type value = load_as<Type>((const char *)(uintptr_t)args.draw.from + at * bytes, args.draw.dtype) *
                         (Type)args.draw.first;
            store_as<Type>(words.at[k] < args.draw.limit ? (Type)0 : value,
                           (char *)(uintptr_t)args.draw.to + at * bytes, args.draw.dtype);
        }
    }
}
KERNEL(dropout_f32, tu_launch_drawn) {
    drop<float>(args);
}
KERNEL(dropout_f64, tu_launch_drawn) {
    drop<double>(args);
}

/* ---- indices ---- */

/* The place that an index names, negative ones from the end; -1, and a fault, where there is none. */
HERE int64_t checked_index(const tu_launch_index &args, int64_t position) {
    int64_t index = ((const int64_t *)(uintptr_t)args.index)[position], at = index < 0 ? index + args.size : index;
    if (at >= 0 && at < args.size)
        return at;
    tu_device_fault *fault = (tu_device_fault *)(uintptr_t)args.fault;
    if (FIRST_TO_SET(&fault->operation, -1)) {
        fault->position = position;
        fault->index = index;
        fault->limit = args.size;
        FENCE();
        fault->operation = args.operation;
    }
    return -1;
}

KERNEL(index_select, tu_launch_index) {
    EACH_ELEMENT(i, args.outer * args.count * args.inner) {
        int64_t column = i % args.inner, row = i / args.inner % args.count, outer = i / args.inner / args.count;
        int64_t at = checked_index(args, row);
        const char *from =
            (const char *)(uintptr_t)args.from + ((outer * args.size + at) * args.inner + column) * args.bytes;
        char *to = (char *)(uintptr_t)args.to + i * args.bytes;
        if (at < 0)
            for (int k = 0; k < args.bytes; k++)
                to[k] = 0;
        else if (args.bytes == 16)
            *(sixteen *)to = *(const sixteen *)from;
        else if (args.bytes == 4)
            *(uint32_t *)to = *(const uint32_t *)from;
        else if (args.bytes == 2)
            *(uint16_t *)to = *(const uint16_t *)from;
        else if (args.bytes == 8)
            *(uint64_t *)to = *(const uint64_t *)from;
        else
            for (int k = 0; k < args.bytes; k++)
                to[k] = from[k];
    }
}

KERNEL(gather, tu_launch_index) {
    EACH_ELEMENT(i, args.loop.total) {
        int64_t at = checked_index(args, i);
        const char *from =
            (const char *)(uintptr_t)args.from + (places_of(args.loop, i).at[0] + at * args.along) * args.bytes;
        char *to = (char *)(uintptr_t)args.to + i * args.bytes;
        for (int k = 0; k < args.bytes; k++)
            to[k] = at < 0 ? 0 : from[k];
    }
}

/* One thread has a column of the sums and adds its entries in order, so that the bits do not depend on the threads. */
template <class Type> HERE void add_indexed(const tu_launch_index &args) {
    EACH_ELEMENT(i, args.outer * args.inner) {
        int64_t column = i % args.inner, outer = i / args.inner;
        const Type *from = (const Type *)(uintptr_t)args.from + outer * args.count * args.inner + column;
        Type *to = (Type *)(uintptr_t)args.to + outer * args.size * args.inner + column;
        for (int64_t row = 0; row < args.count; row++) {
            int64_t at = checked_index(args, row);
            if (at >= 0)
                to[at * args.inner] += from[row * args.inner];
        }
    }
}
/* ---- entries of one place, brought together in their order ----
 *
 * Each entry draws a number among those of its place, as they come; the first of each place takes room for all of them,
 * into which they go; and each finds how many there are before it. Then the sums are made, place by place. */

HERE int64_t place_of_entry(const tu_launch_index &args, int64_t entry) {
    int64_t index = ((const int64_t *)(uintptr_t)args.index)[entry];
    return index < 0 ? index + args.size : index;
}

KERNEL(index_count, tu_launch_index) {
    int32_t *counts = (int32_t *)(uintptr_t)args.counts, *drawn = (int32_t *)(uintptr_t)args.drawn;
    EACH_ELEMENT(entry, args.count) {
        int64_t at = checked_index(args, entry);
        drawn[entry] = at < 0 ? -1 : ADD_TO(&counts[at], 1);
    }
}

KERNEL(index_room, tu_launch_index) {
    const int32_t *counts = (const int32_t *)(uintptr_t)args.counts, *drawn = (const int32_t *)(uintptr_t)args.drawn;
    int32_t *rooms = (int32_t *)(uintptr_t)args.rooms, *taken = (int32_t *)(uintptr_t)args.counts + args.size;
    EACH_ELEMENT(entry, args.count) {
        int64_t at = place_of_entry(args, entry);
        if (drawn[entry] == 0)
            rooms[at] = ADD_TO(taken, counts[at]);
    }
}

KERNEL(index_gather, tu_launch_index) {
    const int32_t *rooms = (const int32_t *)(uintptr_t)args.rooms, *drawn = (const int32_t *)(uintptr_t)args.drawn;
    int32_t *together = (int32_t *)(uintptr_t)args.together;
    EACH_ELEMENT(entry, args.count) {
        if (drawn[entry] >= 0)
            together[rooms[place_of_entry(args, entry)] + drawn[entry]] = (int32_t)entry;
    }
}

KERNEL(index_order, tu_launch_index) {
    const int32_t *counts = (const int32_t *)(uintptr_t)args.counts, *drawn = (const int32_t *)(uintptr_t)args.drawn;
    const int32_t *rooms = (const int32_t *)(uintptr_t)args.rooms;
    const int32_t *together = (const int32_t *)(uintptr_t)args.together;
    int32_t *ordered = (int32_t *)(uintptr_t)args.together + args.count;
    EACH_ELEMENT(entry, args.count) {
        if (drawn[entry] < 0)
            continue;
        int64_t at = place_of_entry(args, entry);
        int32_t room = rooms[at], count = counts[at], before = 0;
        UNROLL_BY_4
        for (int32_t k = 0; k < count; k++)
            before += together[room + k] < (int32_t)entry;
        ordered[room + before] = (int32_t)entry;
    }
}

/* A block has an entry; where that is the first that came to its place, it adds all of them in their order. */
template <class Type, class Lying> HERE void add_ordered(const tu_launch_index &args) {
    int64_t outer = BLOCK / args.count, entry = BLOCK % args.count;
    if (((const int32_t *)(uintptr_t)args.drawn)[entry] == 0) {
        int64_t at = place_of_entry(args, entry);
        int32_t count = ((const int32_t *)(uintptr_t)args.counts)[at];
        const int32_t *ordered =
            (const int32_t *)(uintptr_t)args.together + args.count + ((const int32_t *)(uintptr_t)args.rooms)[at];
        const Lying *from = (const Lying *)(uintptr_t)args.from + outer * args.count * args.inner;
        Lying *to = (Lying *)(uintptr_t)args.to + (outer * args.size + at) * args.inner;
        EACH_THREAD(self) {
            for (int64_t column = self; column < args.inner; column += THREADS) {
                Type sum = Lying::widen(to[column]);
                UNROLL_BY_4
                for (int32_t k = 0; k < count; k++)
                    sum += Lying::widen(from[ordered[k] * args.inner + column]);
                to[column] = Lying::narrow(sum);
            }
        }
    }
}
/* The same where every element has an index: the loop walks over all dimensions but the one of the indices, whose
 * `count` entries of index and source are `inner` apart. */
template <class Type> HERE void add_scattered(const tu_launch_index &args) {
    EACH_ELEMENT(i, args.loop.total) {
        places at = places_of(args.loop, i); /* of the sum without its dimension, and of index */
        for (int64_t k = 0; k < args.count; k++) {
            int64_t position = at.at[1] + k * args.inner, target = checked_index(args, position);
            if (target >= 0)
                ((Type *)(uintptr_t)args.to)[at.at[0] + target * args.along] +=
                    ((const Type *)(uintptr_t)args.from)[position];
        }
    }
}
#define ADDITIONS(suffix, type)                     \
    KERNEL(index_add_##suffix, tu_launch_index) {   \
        add_indexed<type>(args);                    \
    }                                               \
    KERNEL(scatter_add_##suffix, tu_launch_index) { \
        add_scattered<type>(args);                  \
    }
#define ORDERED_ADDITION(suffix, type)              \
    KERNEL(ordered_add_##suffix, tu_launch_index) { \
        add_ordered<type, lying_##suffix>(args);    \
    }
struct lying_i64 {
    uint64_t bits;
    MEMBER uint64_t widen(lying_i64 x) {
        return x.bits;
    }
    MEMBER lying_i64 narrow(uint64_t x) {
        return { x };
    }
};
ORDERED_ADDITION(f32, float)
ORDERED_ADDITION(f64, double)
ORDERED_ADDITION(bf16, float)
ORDERED_ADDITION(f16, float)
ORDERED_ADDITION(i64, uint64_t)
ORDERED_ADDITION(c128, tu_c128)
ADDITIONS(f32, float)
ADDITIONS(f64, double)
ADDITIONS(i64, uint64_t)
ADDITIONS(c128, tu_c128)
