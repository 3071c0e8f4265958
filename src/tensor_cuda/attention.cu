/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of bf16 and f16 whose scores never lie in memory. Products are by the tensor cores with sums in f32; what
 * is multiplied next (shares, and gradients of scores) is rounded to the type of the heads.
 */
#include "attention.cuh"

#ifdef __CUDACC__
#define TILE_KERNEL(name, blocks)                                         \
    extern "C" __global__ void __launch_bounds__(TU_HEAD_THREADS, blocks) \
        kernel_##name(const __grid_constant__ tu_launch_tiles args)

/* ---- what the tensor cores take ---- */

struct of_bf16 {
    MEMBER void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
    }
    MEMBER uint32_t pack(float low, float high) {
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    MEMBER float low(uint32_t both) {
        return __uint_as_float(both << 16);
    }
    MEMBER float high(uint32_t both) {
        return __uint_as_float(both & 0xffff0000u);
    }
};

struct of_f16 {
    MEMBER void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
    }
    MEMBER uint32_t pack(float low, float high) {
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    MEMBER float low(uint32_t both) {
        return __half2float(__ushort_as_half((unsigned short)(both & 0xffff)));
    }
    MEMBER float high(uint32_t both) {
        return __half2float(__ushort_as_half((unsigned short)(both >> 16)));
    }
};

/* Four matrices of 8 x 8; lanes 0-7 have the addresses of the rows of the first one, and so on. */
HERE void load_matrices(uint32_t (&to)[4], const uint16_t *from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place_in_shared(from))
                 : "memory");
}
HERE void load_turned(uint32_t (&to)[4], const uint16_t *from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place_in_shared(from))
                 : "memory");
}
typedef uint16_t element;
template <int DEPTH> using left_rows = uint32_t[DEPTH / 16][4];
/* Rows in shared memory lie sixteen bytes further apart than they are long, so that eight of them are in different
 * banks. */
HERE constexpr int pitch_of(int depth) {
    return depth + 8;
}
#define SPACE(count) __shared__ alignas(16) element space[count]
template <int DEPTH, int COUNT>
HERE void send_rows(uint16_t *to, const uint16_t *from, int64_t pitch, int64_t first, int64_t end) {
    constexpr int CHUNKS = DEPTH / 8, PITCH = DEPTH + 8;
    for (int i = (int)threadIdx.x; i < COUNT * CHUNKS; i += TU_HEAD_THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool there = first + row < end;
        send(to + row * PITCH + chunk * 8, from + (there ? first + row : 0) * pitch + chunk * 8, there);
    }
}

/* The sixteen rows of the warp, as left operands. */
template <int DEPTH> HERE void load_left(left_rows<DEPTH> &to, const uint16_t *rows) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < DEPTH / 16; k++)
        load_matrices(to[k], rows + lane % 16 * (DEPTH + 8) + k * 16 + lane / 16 * 8);
}

/* Sums lie in strips of eight columns (attention_body.cuh); the tensor cores are handed two at a time, a pair. */

/* scores += left times the COUNT rows of `tile`, turned; COUNT is a multiple of 16. */
template <class Type, int DEPTH, int COUNT>
HERE void multiply_turned(float (&scores)[COUNT / 8][4], const left_rows<DEPTH> &left, const uint16_t *tile) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < DEPTH / 16; k++) {
        UNROLL
        for (int pair = 0; pair < COUNT / 16; pair++) {
            uint32_t right[4];
            load_matrices(right,
                          tile + (pair * 16 + lane / 16 * 8 + lane % 8) * (DEPTH + 8) + k * 16 + lane / 8 % 2 * 8);
            Type::multiply(scores[2 * pair], left[k], right[0], right[1]);
            Type::multiply(scores[2 * pair + 1], left[k], right[2], right[3]);
        }
    }
}

/* sums += shares, rounded, times the rows of `tile`. */
template <class Type, int DEPTH, int COUNT>
HERE void multiply_rows(float (&sums)[DEPTH / 8][4], const float (&shares)[COUNT / 8][4], const uint16_t *tile) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < COUNT / 16; k++) {
        const uint32_t left[4] = { Type::pack(shares[2 * k][0], shares[2 * k][1]),
                                   Type::pack(shares[2 * k][2], shares[2 * k][3]),
                                   Type::pack(shares[2 * k + 1][0], shares[2 * k + 1][1]),
                                   Type::pack(shares[2 * k + 1][2], shares[2 * k + 1][3]) };
        UNROLL
        for (int pair = 0; pair < DEPTH / 16; pair++) {
            uint32_t right[4];
            load_turned(right, tile + (k * 16 + lane % 16) * (DEPTH + 8) + pair * 16 + lane / 16 * 8);
            Type::multiply(sums[2 * pair], left, right[0], right[1]);
            Type::multiply(sums[2 * pair + 1], left, right[2], right[3]);
        }
    }
}

/* The two rows of a thread, `first` and eight below, times a factor each. */
template <class Type, int DEPTH>
HERE void store_rows(const float (&sums)[DEPTH / 8][4], const uint16_t *to, int64_t pitch, int64_t first, int64_t end,
                     float upper, float lower) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int half = 0; half < 2; half++) {
        int64_t row = first + 8 * half;
        float factor = half == 0 ? upper : lower;
        if (row >= end)
            continue;
        uint32_t *at = (uint32_t *)(uintptr_t)(to + row * pitch + lane % 4 * 2);
        UNROLL
        for (int strip = 0; strip < DEPTH / 8; strip++)
            at[strip * 4] = Type::pack(sums[strip][2 * half] * factor, sums[strip][2 * half + 1] * factor);
    }
}

/* What a row's result and its gradient have in common; both of a thread's rows. */
template <class Type, int DEPTH>
HERE void dots_of(const tu_launch_tiles &args, const left_rows<DEPTH> &grad, int64_t head, int64_t row,
                  float (&dots)[2]) {
    int lane = (int)threadIdx.x % 32;
    const uint16_t *out = head_of<uint16_t>(args, args.out, head);
    UNROLL
    for (int half = 0; half < 2; half++) {
        float dot = 0;
        if (row + 8 * half < args.queries) {
            const uint32_t *at = (const uint32_t *)(out + (row + 8 * half) * args.out.row + lane % 4 * 2);
            UNROLL
            for (int k = 0; k < DEPTH / 16; k++)
                UNROLL
            for (int side = 0; side < 2; side++) {
                uint32_t both = at[k * 8 + side * 4], with = grad[k][half + 2 * side];
                dot = fmaf(Type::low(both), Type::low(with), fmaf(Type::high(both), Type::high(with), dot));
            }
        }
        dots[half] = add_four(dot);
        if (lane % 4 == 0 && row + 8 * half < args.queries)
            ((float *)(uintptr_t)args.dots)[head * args.queries + row + 8 * half] = dots[half];
    }
}

#include "attention_body.cuh"
#else
struct of_bf16 : by_definition<lying_bf16> {};
struct of_f16 : by_definition<lying_f16> {};
#define TILE_KERNEL(name, blocks) KERNEL(name, tu_launch_tiles)
#endif

/* The depths that there are; the tile's rows are so many that two tiles of each side fit into 48 KiB. */
#define TILES_OF(type, depth, tile, blocks)                   \
    TILE_KERNEL(attention_forward_##depth##_##type, blocks) { \
        forward<of_##type, depth, tile>(args);                \
    }                                                         \
    TILE_KERNEL(attention_queries_##depth##_##type, blocks) { \
        backward_queries<of_##type, depth, tile>(args);       \
    }                                                         \
    TILE_KERNEL(attention_keys_##depth##_##type, blocks) {    \
        backward_keys<of_##type, depth, tile>(args);          \
    }
TILES_OF(bf16, 32, 64, 3)
TILES_OF(bf16, 64, 64, 3)
TILES_OF(bf16, 96, 32, 2)
TILES_OF(bf16, 128, 32, 2)
TILES_OF(f16, 32, 64, 3)
TILES_OF(f16, 64, 64, 3)
TILES_OF(f16, 96, 32, 2)
TILES_OF(f16, 128, 32, 2)
