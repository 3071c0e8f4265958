/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of bf16 and f16 whose scores never lie in memory: a block has 64 rows of one head and goes along the other
 * side in tiles, with the largest score and the sum of each row brought up to date on the way. Products are by the
 * tensor cores with sums in f32; what is multiplied next (shares, and gradients of scores) is rounded to the type of
 * the heads.
 *
 * Backward has the gradients of queries in one kernel and those of keys and values in another: each goes along the
 * other side in order, so that results do not depend on how blocks run. The scores are computed again in both.
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
/* Rows in shared memory lie sixteen bytes further apart than they are long, so that eight of them are in different
 * banks. */
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
template <int DEPTH> HERE void load_left(uint32_t (&to)[DEPTH / 16][4], const uint16_t *rows) {
    int lane = (int)threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < DEPTH / 16; k++)
        load_matrices(to[k], rows + lane % 16 * (DEPTH + 8) + k * 16 + lane / 16 * 8);
}

/* A matrix of sums lies in the registers of a warp in strips of eight columns: a thread has four numbers of each, two
 * neighbours in its upper row and two in the lower. The tensor cores are handed two strips at a time, a pair. */

/* scores += left times the COUNT rows of `tile`, turned; COUNT is a multiple of 16. */
template <class Type, int DEPTH, int COUNT>
HERE void multiply_turned(float (&scores)[COUNT / 8][4], const uint32_t (&left)[DEPTH / 16][4], const uint16_t *tile) {
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

template <int COUNT> HERE void clear(float (&sums)[COUNT][4]) {
    UNROLL
    for (int strip = 0; strip < COUNT; strip++)
        UNROLL
    for (int i = 0; i < 4; i++)
        sums[strip][i] = 0;
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

HERE float add_four(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

HERE float largest_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* ---- forward ---- */

template <class Type, int DEPTH, int TILE> HERE void forward(const tu_launch_tiles &args) {
    constexpr int PITCH = DEPTH + 8;
    __shared__ alignas(16) uint16_t space[4 * TILE * PITCH]; /* keys and values, two tiles of each; first the queries */
    static_assert(ROWS <= 4 * TILE, "the queries fit");
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t head = BLOCK % args.heads, begin = (BLOCKS / args.heads - 1 - BLOCK / args.heads) * ROWS;
    int64_t row = begin + warp * 16 + lane / 4, end = args.keys;
    const uint16_t *keys = head_of<uint16_t>(args, args.key, head), *values = head_of<uint16_t>(args, args.value, head);
    uint32_t query[DEPTH / 16][4];
    if (args.causal && begin + ROWS < end)
        end = begin + ROWS;
    send_rows<DEPTH, ROWS>(space, head_of<uint16_t>(args, args.query, head), args.query.row, begin, args.queries);
    end_of_batch();
    wait_for_batches<0>();
    __syncthreads();
    load_left<DEPTH>(query, space + warp * 16 * PITCH);
    __syncthreads();
    send_rows<DEPTH, TILE>(space, keys, args.key.row, 0, end);
    send_rows<DEPTH, TILE>(space + TILE * PITCH, values, args.value.row, 0, end);
    end_of_batch();

    float sums[DEPTH / 8][4], top[2] = { -INFINITY, -INFINITY }, all[2] = { 0, 0 };
    float scale = args.scale * LOG2_E;
    clear(sums);
    for (int64_t first = 0, stage = 0; first < end; first += TILE, stage ^= 1) {
        const uint16_t *tile = space + stage * 2 * TILE * PITCH;
        if (first + TILE < end) {
            uint16_t *next = space + (stage ^ 1) * 2 * TILE * PITCH;
            send_rows<DEPTH, TILE>(next, keys, args.key.row, first + TILE, end);
            send_rows<DEPTH, TILE>(next + TILE * PITCH, values, args.value.row, first + TILE, end);
        }
        end_of_batch();
        wait_for_batches<1>();
        __syncthreads();
        float scores[TILE / 8][4];
        clear(scores);
        multiply_turned<Type, DEPTH, TILE>(scores, query, tile);
        bool hides = first + TILE > end || (args.causal && first + TILE > begin + warp * 16 + 1);
        float more[2] = { -INFINITY, -INFINITY };
        UNROLL
        for (int strip = 0; strip < TILE / 8; strip++)
            UNROLL
        for (int i = 0; i < 4; i++) {
            float score = scores[strip][i] * scale;
            if (hides) {
                int64_t key = first + strip * 8 + lane % 4 * 2 + i % 2;
                if (key >= end || (args.causal && key > row + i / 2 * 8))
                    score = -INFINITY;
            }
            scores[strip][i] = score;
            more[i / 2] = fmaxf(more[i / 2], score);
        }
        UNROLL
        for (int half = 0; half < 2; half++) {
            float now = fmaxf(top[half], largest_of_four(more[half]));
            float base = now == -INFINITY ? 0 : now, shrink = power_of_two(top[half] - base);
            float sum = 0;
            UNROLL
            for (int strip = 0; strip < TILE / 8; strip++)
                UNROLL
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                scores[strip][i] = power_of_two(scores[strip][i] - base);
                sum += scores[strip][i];
            }
            top[half] = now;
            all[half] = fmaf(all[half], shrink, sum);
            UNROLL
            for (int strip = 0; strip < DEPTH / 8; strip++)
                sums[strip][2 * half] *= shrink, sums[strip][2 * half + 1] *= shrink;
        }
        multiply_rows<Type, DEPTH, TILE>(sums, scores, tile + TILE * PITCH);
        __syncthreads();
    }
    UNROLL
    for (int half = 0; half < 2; half++) {
        all[half] = add_four(all[half]);
        if (lane % 4 == 0 && row + 8 * half < args.queries)
            ((float *)(uintptr_t)args.sums)[head * args.queries + row + 8 * half] =
                (top[half] + log2f(all[half])) * LN_2;
    }
    store_rows<Type, DEPTH>(sums, head_of<uint16_t>(args, args.out, head), args.out.row, row, args.queries, 1 / all[0],
                            1 / all[1]);
}

/* ---- backward: queries ---- */

#define PART 32 /* of a tile, whose scores are in registers at a time */

/* What a row's result and its gradient have in common; both of a thread's rows. */
template <class Type, int DEPTH>
HERE void dots_of(const tu_launch_tiles &args, const uint32_t (&grad)[DEPTH / 16][4], int64_t head, int64_t row,
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

template <class Type, int DEPTH, int TILE> HERE void backward_queries(const tu_launch_tiles &args) {
    constexpr int PITCH = DEPTH + 8;
    __shared__ alignas(16) uint16_t space[4 * TILE * PITCH]; /* as in forward; first queries and gradients */
    static_assert(2 * ROWS <= 4 * TILE, "queries and gradients fit");
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t head = BLOCK % args.heads, begin = (BLOCKS / args.heads - 1 - BLOCK / args.heads) * ROWS;
    int64_t row = begin + warp * 16 + lane / 4, end = args.keys;
    const uint16_t *keys = head_of<uint16_t>(args, args.key, head), *values = head_of<uint16_t>(args, args.value, head);
    uint32_t query[DEPTH / 16][4], grad[DEPTH / 16][4];
    if (args.causal && begin + ROWS < end)
        end = begin + ROWS;
    send_rows<DEPTH, ROWS>(space, head_of<uint16_t>(args, args.query, head), args.query.row, begin, args.queries);
    send_rows<DEPTH, ROWS>(space + ROWS * PITCH, head_of<uint16_t>(args, args.grad, head), args.grad.row, begin,
                           args.queries);
    end_of_batch();
    wait_for_batches<0>();
    __syncthreads();
    load_left<DEPTH>(query, space + warp * 16 * PITCH);
    load_left<DEPTH>(grad, space + (ROWS + warp * 16) * PITCH);
    __syncthreads();
    send_rows<DEPTH, TILE>(space, keys, args.key.row, 0, end);
    send_rows<DEPTH, TILE>(space + TILE * PITCH, values, args.value.row, 0, end);
    end_of_batch();

    float sums[DEPTH / 8][4], dots[2], log_sum[2], scale = args.scale * LOG2_E;
    dots_of<Type, DEPTH>(args, grad, head, row, dots);
    UNROLL
    for (int half = 0; half < 2; half++)
        log_sum[half] = row + 8 * half < args.queries
                            ? ((const float *)(uintptr_t)args.sums)[head * args.queries + row + 8 * half] * LOG2_E
                            : INFINITY;
    clear(sums);
    for (int64_t first = 0, stage = 0; first < end; first += TILE, stage ^= 1) {
        const uint16_t *tile = space + stage * 2 * TILE * PITCH;
        if (first + TILE < end) {
            uint16_t *next = space + (stage ^ 1) * 2 * TILE * PITCH;
            send_rows<DEPTH, TILE>(next, keys, args.key.row, first + TILE, end);
            send_rows<DEPTH, TILE>(next + TILE * PITCH, values, args.value.row, first + TILE, end);
        }
        end_of_batch();
        wait_for_batches<1>();
        __syncthreads();
        bool hides = first + TILE > end || (args.causal && first + TILE > begin + warp * 16 + 1);
        UNROLL
        for (int part = 0; part < TILE; part += PART) {
            float scores[PART / 8][4], slopes[PART / 8][4];
            clear(scores);
            clear(slopes);
            multiply_turned<Type, DEPTH, PART>(scores, query, tile + part * PITCH);
            multiply_turned<Type, DEPTH, PART>(slopes, grad, tile + (TILE + part) * PITCH);
            UNROLL
            for (int strip = 0; strip < PART / 8; strip++)
                UNROLL
            for (int i = 0; i < 4; i++) {
                float share = power_of_two(fmaf(scores[strip][i], scale, -log_sum[i / 2]));
                if (hides) {
                    int64_t key = first + part + strip * 8 + lane % 4 * 2 + i % 2;
                    if (key >= end || (args.causal && key > row + i / 2 * 8))
                        share = 0;
                }
                slopes[strip][i] = share * (slopes[strip][i] - dots[i / 2]);
            }
            multiply_rows<Type, DEPTH, PART>(sums, slopes, tile + part * PITCH);
        }
        __syncthreads();
    }
    store_rows<Type, DEPTH>(sums, head_of<uint16_t>(args, args.of_query, head), args.of_query.row, row, args.queries,
                            args.scale, args.scale);
}

/* ---- backward: keys and values ---- */

/* Scores are turned here: a row is a key, a column a query. */
template <class Type, int DEPTH, int TILE> HERE void backward_keys(const tu_launch_tiles &args) {
    constexpr int PITCH = DEPTH + 8;
    __shared__ alignas(16) uint16_t space[4 * TILE * PITCH]; /* queries and gradients, two tiles of each */
    static_assert(2 * ROWS <= 4 * TILE, "keys and values fit");
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t head = BLOCK % args.heads, begin = BLOCK / args.heads * ROWS;
    int64_t row = begin + warp * 16 + lane / 4, end = args.queries;
    const uint16_t *queries = head_of<uint16_t>(args, args.query, head),
                   *grads = head_of<uint16_t>(args, args.grad, head);
    const float *log_sums = (const float *)(uintptr_t)args.sums + head * args.queries;
    const float *dots = (const float *)(uintptr_t)args.dots + head * args.queries;
    uint32_t key[DEPTH / 16][4], value[DEPTH / 16][4];
    send_rows<DEPTH, ROWS>(space, head_of<uint16_t>(args, args.key, head), args.key.row, begin, args.keys);
    send_rows<DEPTH, ROWS>(space + ROWS * PITCH, head_of<uint16_t>(args, args.value, head), args.value.row, begin,
                           args.keys);
    end_of_batch();
    wait_for_batches<0>();
    __syncthreads();
    load_left<DEPTH>(key, space + warp * 16 * PITCH);
    load_left<DEPTH>(value, space + (ROWS + warp * 16) * PITCH);
    __syncthreads();
    int64_t from = args.causal ? begin / TILE * TILE : 0; /* earlier queries see none of these keys */
    send_rows<DEPTH, TILE>(space, queries, args.query.row, from, end);
    send_rows<DEPTH, TILE>(space + TILE * PITCH, grads, args.grad.row, from, end);
    end_of_batch();

    float of_key[DEPTH / 8][4], of_value[DEPTH / 8][4], scale = args.scale * LOG2_E;
    clear(of_key);
    clear(of_value);
    for (int64_t first = from, stage = 0; first < end; first += TILE, stage ^= 1) {
        const uint16_t *tile = space + stage * 2 * TILE * PITCH;
        if (first + TILE < end) {
            uint16_t *next = space + (stage ^ 1) * 2 * TILE * PITCH;
            send_rows<DEPTH, TILE>(next, queries, args.query.row, first + TILE, end);
            send_rows<DEPTH, TILE>(next + TILE * PITCH, grads, args.grad.row, first + TILE, end);
        }
        end_of_batch();
        wait_for_batches<1>();
        __syncthreads();
        bool hides = args.causal && first < begin + warp * 16 + 16;
        UNROLL
        for (int part = 0; part < TILE; part += PART) {
            float scores[PART / 8][4], slopes[PART / 8][4], log_sum[PART / 8][2], dot[PART / 8][2];
            UNROLL
            for (int strip = 0; strip < PART / 8; strip++)
                UNROLL
            for (int i = 0; i < 2; i++) {
                int64_t query = first + part + strip * 8 + lane % 4 * 2 + i;
                log_sum[strip][i] = query < end ? log_sums[query] * LOG2_E : INFINITY;
                dot[strip][i] = query < end ? dots[query] : 0;
            }
            clear(scores);
            clear(slopes);
            multiply_turned<Type, DEPTH, PART>(scores, key, tile + part * PITCH);
            multiply_turned<Type, DEPTH, PART>(slopes, value, tile + (TILE + part) * PITCH);
            UNROLL
            for (int strip = 0; strip < PART / 8; strip++)
                UNROLL
            for (int i = 0; i < 4; i++) {
                float share = power_of_two(fmaf(scores[strip][i], scale, -log_sum[strip][i % 2]));
                if (hides && row + i / 2 * 8 > first + part + strip * 8 + lane % 4 * 2 + i % 2)
                    share = 0;
                scores[strip][i] = share;
                slopes[strip][i] = share * (slopes[strip][i] - dot[strip][i % 2]);
            }
            multiply_rows<Type, DEPTH, PART>(of_value, scores, tile + (TILE + part) * PITCH);
            multiply_rows<Type, DEPTH, PART>(of_key, slopes, tile + part * PITCH);
        }
        __syncthreads();
    }
    store_rows<Type, DEPTH>(of_key, head_of<uint16_t>(args, args.of_key, head), args.of_key.row, row, args.keys,
                            args.scale, args.scale);
    store_rows<Type, DEPTH>(of_value, head_of<uint16_t>(args, args.of_value, head), args.of_value.row, row, args.keys,
                            1, 1);
}

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
