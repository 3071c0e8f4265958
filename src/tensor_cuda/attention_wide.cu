/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of f32 whose scores never lie in memory. The tensor cores take factors of eleven digits, so each number is
 * cut in two such, and a product is three: large by large, and large by small on both sides. What is left out is below
 * 2^-21 of a product, and all sums are in f32, so that results are as near to the true ones as those of f32 arithmetic.
 * What is infinite has no small part: it gives NaN.
 */
#include "attention.cuh"

#ifdef __CUDACC__
#define TILE_KERNEL(name)                                            \
    extern "C" __global__ void __launch_bounds__(TU_HEAD_THREADS, 2) \
        kernel_##name(const __grid_constant__ tu_launch_tiles args)

typedef float element;
template <int DEPTH> using left_rows = float[DEPTH / 8][4];
/* Sixteen bytes more, so that what the threads of a warp read at once is in different banks. */
HERE constexpr int pitch_of(int depth) {
    return depth + 4;
}
extern __shared__ float4 shared_space[];
#define SPACE(count) float *const space = (float *)shared_space

template <int DEPTH, int COUNT>
HERE void send_rows(float *to, const float *from, int64_t pitch, int64_t first, int64_t end) {
    constexpr int CHUNKS = DEPTH / 4, PITCH = pitch_of(DEPTH);
    for (int i = (int)threadIdx.x; i < COUNT * CHUNKS; i += TU_HEAD_THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool there = first + row < end;
        send(to + row * PITCH + chunk * 4, from + (there ? first + row : 0) * pitch + chunk * 4, there);
    }
}

/* Two numbers in each of two rows, eight apart: columns `lane % 4` and four further of every eight. */
template <int DEPTH> HERE void load_left(left_rows<DEPTH> &to, const float *rows) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < DEPTH / 8; k++)
        UNROLL
    for (int i = 0; i < 4; i++)
        to[k][i] = rows[(lane / 4 + i % 2 * 8) * pitch_of(DEPTH) + k * 8 + lane % 4 + i / 2 * 4];
}

/* x = large + small; the tensor cores read the upper bits of both. */
HERE void cut(float x, uint32_t &large, uint32_t &small) {
    large = __float_as_uint(x) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(large));
}
HERE void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}
/* Sums of sixteen rows and eight columns, eight deep. */
struct cut_rows {
    uint32_t large[4], small[4];
    MEMBER cut_rows of(float x_0, float x_1, float x_2, float x_3) {
        cut_rows both;
        cut(x_0, both.large[0], both.small[0]);
        cut(x_1, both.large[1], both.small[1]);
        cut(x_2, both.large[2], both.small[2]);
        cut(x_3, both.large[3], both.small[3]);
        return both;
    }
};
/* Several strips at once: a product waits for the one before it on the same sums. */
#define STRIPS 4
HERE void multiply_cut(float (*sums)[4], const cut_rows &left, const float (&right)[STRIPS][2]) {
    uint32_t large[STRIPS][2], small[STRIPS][2];
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++)
        UNROLL
    for (int i = 0; i < 2; i++)
        cut(right[strip][i], large[strip][i], small[strip][i]);
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++)
        multiply(sums[strip], left.small, large[strip][0], large[strip][1]);
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++)
        multiply(sums[strip], left.large, small[strip][0], small[strip][1]);
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++)
        multiply(sums[strip], left.large, large[strip][0], large[strip][1]);
}

/* scores += left times the COUNT rows of `tile`, turned. */
template <class Type, int DEPTH, int COUNT>
HERE void multiply_turned(float (&scores)[COUNT / 8][4], const left_rows<DEPTH> &left, const float *tile) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < DEPTH / 8; k++) {
        cut_rows both = cut_rows::of(left[k][0], left[k][1], left[k][2], left[k][3]);
        UNROLL
        for (int first = 0; first < COUNT / 8; first += STRIPS) {
            float right[STRIPS][2];
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                const float *at = tile + ((first + strip) * 8 + lane / 4) * pitch_of(DEPTH) + k * 8 + lane % 4;
                right[strip][0] = at[0];
                right[strip][1] = at[4];
            }
            multiply_cut(scores + first, both, right);
        }
    }
}

/* sums += shares times the rows of `tile`. A thread has two neighbours of a row of shares, which count as the columns
 * lane % 4 and four further: the rows of the tile are taken in that order too. */
template <class Type, int DEPTH, int COUNT>
HERE void multiply_rows(float (&sums)[DEPTH / 8][4], const float (&shares)[COUNT / 8][4], const float *tile) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < COUNT / 8; k++) {
        cut_rows both = cut_rows::of(shares[k][0], shares[k][2], shares[k][1], shares[k][3]);
        UNROLL
        for (int first = 0; first < DEPTH / 8; first += STRIPS) {
            float right[STRIPS][2];
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                const float *at = tile + (k * 8 + lane % 4 * 2) * pitch_of(DEPTH) + (first + strip) * 8 + lane / 4;
                right[strip][0] = at[0];
                right[strip][1] = at[pitch_of(DEPTH)];
            }
            multiply_cut(sums + first, both, right);
        }
    }
}

/* The two rows of a thread, `first` and eight below, times a factor each. */
template <class Type, int DEPTH>
HERE void store_rows(const float (&sums)[DEPTH / 8][4], const float *to, int64_t pitch, int64_t first, int64_t end,
                     float upper, float lower) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int half = 0; half < 2; half++) {
        int64_t row = first + 8 * half;
        float factor = half == 0 ? upper : lower;
        if (row >= end)
            continue;
        float2 *at = (float2 *)(uintptr_t)(to + row * pitch + lane % 4 * 2);
        UNROLL
        for (int strip = 0; strip < DEPTH / 8; strip++)
            at[strip * 4] = make_float2(sums[strip][2 * half] * factor, sums[strip][2 * half + 1] * factor);
    }
}

/* What a row's result and its gradient have in common; both of a thread's rows. */
template <class Type, int DEPTH>
HERE void dots_of(const tu_launch_tiles &args, const left_rows<DEPTH> &grad, int64_t head, int64_t row,
                  float (&dots)[2]) {
    int lane = (int)threadIdx.x % 32;
    const float *out = head_of<float>(args, args.out, head);
    UNROLL
    for (int half = 0; half < 2; half++) {
        float dot = 0;
        if (row + 8 * half < args.queries) {
            const float *at = out + (row + 8 * half) * args.out.row + lane % 4;
            UNROLL
            for (int k = 0; k < DEPTH / 8; k++)
                dot = fmaf(at[k * 8], grad[k][half], fmaf(at[k * 8 + 4], grad[k][half + 2], dot));
        }
        dots[half] = add_four(dot);
        if (lane % 4 == 0 && row + 8 * half < args.queries)
            ((float *)(uintptr_t)args.dots)[head * args.queries + row + 8 * half] = dots[half];
    }
}

#include "attention_body.cuh"

struct of_f32 {};
#else
struct of_f32 : by_definition<lying_f32> {};
#define TILE_KERNEL(name) KERNEL(name, tu_launch_tiles)
#endif

#define WIDE_TILES_OF(depth)                                      \
    TILE_KERNEL(attention_forward_##depth##_f32) {                \
        forward<of_f32, depth, TU_WIDE_HEAD_TILE>(args);          \
    }                                                             \
    TILE_KERNEL(attention_queries_##depth##_f32) {                \
        backward_queries<of_f32, depth, TU_WIDE_HEAD_TILE>(args); \
    }                                                             \
    TILE_KERNEL(attention_keys_##depth##_f32) {                   \
        backward_keys<of_f32, depth, TU_WIDE_HEAD_TILE>(args);    \
    }
WIDE_TILES_OF(32)
WIDE_TILES_OF(64)
