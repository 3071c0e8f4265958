/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of f32 whose scores never lie in memory, in the order of attention.cu: a block has 64 rows of one head,
 * goes along the other side in tiles, and everything is multiplied and added in f32. A thread has eight rows, eight
 * apart, and every eighth column of the scores; of results it has every eighth group of four columns.
 *
 * Rows lie dense in shared memory, in chunks of four numbers. Chunk number c of row r is at c ^ r % 8, so that eight
 * threads that read the same chunk of neighbouring rows, or eight chunks of one row, meet in no bank.
 */
#include "attention.cuh"

#define THREADS_HERE TU_WIDE_HEAD_THREADS
#define PART TU_WIDE_HEAD_PART
#define TILE ROWS /* keys at a time, forward */
#define MINE 8    /* rows of a thread */

#ifdef __CUDACC__
#define TILE_KERNEL(name)                                         \
    extern "C" __global__ void __launch_bounds__(THREADS_HERE, 4) \
        kernel_##name(const __grid_constant__ tu_launch_tiles args)

extern __shared__ float4 shared_space[];

/* Rows from `first` on; zeros from `end` on. */
template <int DEPTH, int COUNT>
HERE void send_rows(float4 *to, const float *from, int64_t pitch, int64_t first, int64_t end) {
    constexpr int CHUNKS = DEPTH / 4;
    UNROLL_BY_4
    for (int i = (int)threadIdx.x; i < COUNT * CHUNKS; i += THREADS_HERE) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool there = first + row < end;
        send(to + row * CHUNKS + (chunk ^ row % 8), from + (there ? first + row : 0) * pitch + chunk * 4, there);
    }
}

HERE float add_product(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

/* scores += the rows of `left` times the rows of `right`, turned. */
template <int DEPTH, int COLUMNS>
HERE void multiply_turned(float (&scores)[MINE][COLUMNS], const float4 *left, const float4 *right) {
    constexpr int CHUNKS = DEPTH / 4;
    int row = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
    _Pragma("unroll 2") for (int chunk = 0; chunk < CHUNKS; chunk++) {
        float4 of_right[COLUMNS];
        UNROLL
        for (int j = 0; j < COLUMNS; j++)
            of_right[j] = right[(column + 8 * j) * CHUNKS + (chunk ^ column)];
        UNROLL
        for (int i = 0; i < MINE; i++) {
            float4 of_left = left[(row + 8 * i) * CHUNKS + (chunk ^ row)];
            UNROLL
            for (int j = 0; j < COLUMNS; j++)
                scores[i][j] = add_product(of_left, of_right[j], scores[i][j]);
        }
    }
}

HERE void add_scaled(float4 &sum, float factor, float4 x) {
    sum.x = fmaf(factor, x.x, sum.x);
    sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z);
    sum.w = fmaf(factor, x.w, sum.w);
}

/* sums += shares, COUNT in a row, times the rows of `tile`. */
template <int DEPTH, int COUNT>
HERE void multiply_rows(float4 (&sums)[MINE][DEPTH / 32], const float4 *shares, const float4 *tile) {
    int row = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
    _Pragma("unroll 2") for (int chunk = 0; chunk < COUNT / 4; chunk++) {
        float4 share[MINE];
        UNROLL
        for (int i = 0; i < MINE; i++)
            share[i] = shares[(row + 8 * i) * (COUNT / 4) + (chunk ^ row)];
        UNROLL
        for (int k = 0; k < 4; k++) {
            const float4 *from = tile + (4 * chunk + k) * (DEPTH / 4) + (column ^ (4 * chunk + k) % 8);
            UNROLL
            for (int j = 0; j < DEPTH / 32; j++) {
                float4 right = from[8 * j];
                UNROLL
                for (int i = 0; i < MINE; i++)
                    add_scaled(sums[i][j],
                               k == 0   ? share[i].x
                               : k == 1 ? share[i].y
                               : k == 2 ? share[i].z
                                        : share[i].w,
                               right);
            }
        }
    }
}

/* Writes the scores of the warp's rows where its threads read them with multiply_rows. */
template <int COLUMNS> HERE void put_scores(float4 *to, const float (&scores)[MINE][COLUMNS]) {
    int row = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
    UNROLL
    for (int i = 0; i < MINE; i++)
        UNROLL
    for (int j = 0; j < COLUMNS; j++)
        ((float *)to)[(row + 8 * i) * COLUMNS * 8 + ((column / 4 + 2 * j) ^ row) * 4 + column % 4] = scores[i][j];
}

template <int COUNT> HERE void clear(float4 (&sums)[MINE][COUNT]) {
    UNROLL
    for (int i = 0; i < MINE; i++)
        UNROLL
    for (int j = 0; j < COUNT; j++)
        sums[i][j] = make_float4(0, 0, 0, 0);
}
template <int COUNT> HERE void clear(float (&sums)[MINE][COUNT]) {
    UNROLL
    for (int i = 0; i < MINE; i++)
        UNROLL
    for (int j = 0; j < COUNT; j++)
        sums[i][j] = 0;
}

/* The thread's part of its rows of a block that begins at row `first`, times a factor each. */
template <int DEPTH>
HERE void store_rows(const float4 (&sums)[MINE][DEPTH / 32], const float *to, int64_t pitch, int64_t first, int64_t end,
                     const float (&factors)[MINE]) {
    UNROLL
    for (int i = 0; i < MINE; i++) {
        int64_t row = first + (int)threadIdx.x / 8 + 8 * i;
        if (row >= end)
            continue;
        float4 *at = (float4 *)(uintptr_t)(to + row * pitch) + threadIdx.x % 8;
        UNROLL
        for (int j = 0; j < DEPTH / 32; j++)
            at[8 * j] = make_float4(sums[i][j].x * factors[i], sums[i][j].y * factors[i], sums[i][j].z * factors[i],
                                    sums[i][j].w * factors[i]);
    }
}

/* Over the eight threads of a row. */
HERE float add_eight(float x) {
    UNROLL
    for (int step = 1; step < 8; step *= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
HERE float largest_of_eight(float x) {
    UNROLL
    for (int step = 1; step < 8; step *= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* ---- forward ---- */

/* In shared memory: the queries, a tile of keys, which becomes its shares, and one of values. */
template <int DEPTH> HERE void forward(const tu_launch_tiles &args) {
    float4 *queries = shared_space, *keys_here = queries + ROWS * DEPTH / 4, *values_here = keys_here + TILE * TILE / 4;
    static_assert(TILE == ROWS && TILE >= DEPTH, "shares have the place of keys");
    int row_here = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
    int64_t head = BLOCK % args.heads, begin = (BLOCKS / args.heads - 1 - BLOCK / args.heads) * ROWS, end = args.keys;
    const float *keys = head_of<float>(args, args.key, head), *values = head_of<float>(args, args.value, head);
    if (args.causal && begin + ROWS < end)
        end = begin + ROWS;
    send_rows<DEPTH, ROWS>(queries, head_of<float>(args, args.query, head), args.query.row, begin, args.queries);
    float4 sums[MINE][DEPTH / 32];
    float top[MINE], all[MINE], scale = args.scale * LOG2_E;
    clear(sums);
    UNROLL
    for (int i = 0; i < MINE; i++)
        top[i] = -INFINITY, all[i] = 0;
    for (int64_t first = 0; first < end; first += TILE) {
        send_rows<DEPTH, TILE>(keys_here, keys, args.key.row, first, end);
        end_of_batch();
        send_rows<DEPTH, TILE>(values_here, values, args.value.row, first, end);
        end_of_batch();
        wait_for_batches<1>();
        __syncthreads();
        float scores[MINE][TILE / 8];
        clear(scores);
        multiply_turned<DEPTH, TILE / 8>(scores, queries, keys_here);
        bool hides = first + TILE > end || (args.causal && first + TILE > begin + 1);
        UNROLL
        for (int i = 0; i < MINE; i++) {
            float more = -INFINITY, sum = 0;
            UNROLL
            for (int j = 0; j < TILE / 8; j++) {
                int64_t key = first + column + 8 * j;
                scores[i][j] *= scale;
                if (hides && (key >= end || (args.causal && key > begin + row_here + 8 * i)))
                    scores[i][j] = -INFINITY;
                more = fmaxf(more, scores[i][j]);
            }
            float now = fmaxf(top[i], largest_of_eight(more)), base = now == -INFINITY ? 0 : now;
            float shrink = power_of_two(top[i] - base);
            UNROLL
            for (int j = 0; j < TILE / 8; j++) {
                scores[i][j] = power_of_two(scores[i][j] - base);
                sum += scores[i][j];
            }
            top[i] = now;
            all[i] = fmaf(all[i], shrink, sum);
            UNROLL
            for (int j = 0; j < DEPTH / 32; j++)
                sums[i][j] = make_float4(sums[i][j].x * shrink, sums[i][j].y * shrink, sums[i][j].z * shrink,
                                         sums[i][j].w * shrink);
        }
        __syncthreads(); /* all have read the keys */
        put_scores<TILE / 8>(keys_here, scores);
        wait_for_batches<0>();
        __syncthreads();
        multiply_rows<DEPTH, TILE>(sums, keys_here, values_here);
        __syncthreads();
    }
    float factors[MINE];
    UNROLL
    for (int i = 0; i < MINE; i++) {
        float sum = add_eight(all[i]);
        int64_t row = begin + row_here + 8 * i;
        factors[i] = 1 / sum;
        if (column == 0 && row < args.queries)
            ((float *)(uintptr_t)args.sums)[head * args.queries + row] = (top[i] + log2f(sum)) * LN_2;
    }
    store_rows<DEPTH>(sums, head_of<float>(args, args.out, head), args.out.row, begin, args.queries, factors);
}

/* ---- backward: queries ---- */

/* In shared memory: rows of the block in two tensors, parts of the other side of both, and scores. */
template <int DEPTH> struct places_here {
    float4 *rows[2], *part[2], *scores;
    MEMBER places_here<DEPTH> of(float4 *space) {
        constexpr int BLOCK_CHUNKS = ROWS * DEPTH / 4, PART_CHUNKS = PART * DEPTH / 4;
        float4 *parts = space + 2 * BLOCK_CHUNKS;
        return { { space, space + BLOCK_CHUNKS }, { parts, parts + PART_CHUNKS }, parts + 2 * PART_CHUNKS };
    }
};

template <int DEPTH> HERE void backward_queries(const tu_launch_tiles &args) {
    places_here<DEPTH> here = places_here<DEPTH>::of(shared_space);
    int row_here = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
    int64_t head = BLOCK % args.heads, begin = (BLOCKS / args.heads - 1 - BLOCK / args.heads) * ROWS, end = args.keys;
    const float *keys = head_of<float>(args, args.key, head), *values = head_of<float>(args, args.value, head);
    if (args.causal && begin + ROWS < end)
        end = begin + ROWS;
    send_rows<DEPTH, ROWS>(here.rows[0], head_of<float>(args, args.query, head), args.query.row, begin, args.queries);
    send_rows<DEPTH, ROWS>(here.rows[1], head_of<float>(args, args.grad, head), args.grad.row, begin, args.queries);
    end_of_batch();
    wait_for_batches<0>();
    __syncthreads();
    float4 sums[MINE][DEPTH / 32];
    float dots[MINE], log_sums[MINE], factors[MINE], scale = args.scale * LOG2_E;
    clear(sums);
    UNROLL
    for (int i = 0; i < MINE; i++) { /* what a row's result and its gradient have in common */
        int64_t row = begin + row_here + 8 * i, at = head * args.queries + row;
        bool there = row < args.queries;
        const float4 *out = (const float4 *)(head_of<float>(args, args.out, head) + (there ? row : 0) * args.out.row);
        float dot = 0;
        UNROLL
        for (int j = 0; j < DEPTH / 32; j++)
            dot = add_product(out[column + 8 * j],
                              here.rows[1][(row_here + 8 * i) * (DEPTH / 4) + ((column + 8 * j) ^ row_here)], dot);
        dots[i] = add_eight(dot);
        log_sums[i] = there ? ((const float *)(uintptr_t)args.sums)[at] * LOG2_E : INFINITY;
        factors[i] = args.scale;
        if (column == 0 && there)
            ((float *)(uintptr_t)args.dots)[at] = dots[i];
    }
    for (int64_t first = 0; first < end; first += PART) {
        send_rows<DEPTH, PART>(here.part[0], keys, args.key.row, first, end);
        send_rows<DEPTH, PART>(here.part[1], values, args.value.row, first, end);
        end_of_batch();
        wait_for_batches<0>();
        __syncthreads();
        float scores[MINE][PART / 8], slopes[MINE][PART / 8];
        clear(scores);
        clear(slopes);
        multiply_turned<DEPTH, PART / 8>(scores, here.rows[0], here.part[0]);
        multiply_turned<DEPTH, PART / 8>(slopes, here.rows[1], here.part[1]);
        bool hides = first + PART > end || (args.causal && first + PART > begin + 1);
        UNROLL
        for (int i = 0; i < MINE; i++)
            UNROLL
        for (int j = 0; j < PART / 8; j++) {
            int64_t key = first + column + 8 * j;
            float share = power_of_two(fmaf(scores[i][j], scale, -log_sums[i]));
            if (hides && (key >= end || (args.causal && key > begin + row_here + 8 * i)))
                share = 0;
            slopes[i][j] = share * (slopes[i][j] - dots[i]);
        }
        put_scores<PART / 8>(here.scores, slopes);
        __syncwarp();
        multiply_rows<DEPTH, PART>(sums, here.scores, here.part[0]);
        __syncthreads();
    }
    store_rows<DEPTH>(sums, head_of<float>(args, args.of_query, head), args.of_query.row, begin, args.queries, factors);
}

/* ---- backward: keys and values ---- */

/* Scores are turned here: a row is a key, a column a query. */
template <int DEPTH> HERE void backward_keys(const tu_launch_tiles &args) {
    places_here<DEPTH> here = places_here<DEPTH>::of(shared_space);
    int row_here = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
    int64_t head = BLOCK % args.heads, begin = BLOCK / args.heads * ROWS, end = args.queries;
    const float *queries = head_of<float>(args, args.query, head), *grads = head_of<float>(args, args.grad, head);
    const float *log_sums = (const float *)(uintptr_t)args.sums + head * args.queries;
    const float *dots = (const float *)(uintptr_t)args.dots + head * args.queries;
    send_rows<DEPTH, ROWS>(here.rows[0], head_of<float>(args, args.key, head), args.key.row, begin, args.keys);
    send_rows<DEPTH, ROWS>(here.rows[1], head_of<float>(args, args.value, head), args.value.row, begin, args.keys);
    float4 of_key[MINE][DEPTH / 32], of_value[MINE][DEPTH / 32];
    float scale = args.scale * LOG2_E;
    clear(of_key);
    clear(of_value);
    int64_t from = args.causal ? begin : 0; /* earlier queries see none of these keys */
    for (int64_t first = from; first < end; first += PART) {
        send_rows<DEPTH, PART>(here.part[0], queries, args.query.row, first, end);
        send_rows<DEPTH, PART>(here.part[1], grads, args.grad.row, first, end);
        end_of_batch();
        wait_for_batches<0>();
        __syncthreads();
        float scores[MINE][PART / 8], slopes[MINE][PART / 8];
        clear(scores);
        clear(slopes);
        multiply_turned<DEPTH, PART / 8>(scores, here.rows[0], here.part[0]);
        multiply_turned<DEPTH, PART / 8>(slopes, here.rows[1], here.part[1]);
        bool hides = args.causal && first < begin + ROWS;
        UNROLL
        for (int j = 0; j < PART / 8; j++) {
            int64_t query = first + column + 8 * j;
            float log_sum = query < end ? log_sums[query] * LOG2_E : INFINITY, dot = query < end ? dots[query] : 0;
            UNROLL
            for (int i = 0; i < MINE; i++) {
                float share = power_of_two(fmaf(scores[i][j], scale, -log_sum));
                if (hides && begin + row_here + 8 * i > query)
                    share = 0;
                scores[i][j] = share;
                slopes[i][j] = share * (slopes[i][j] - dot);
            }
        }
        put_scores<PART / 8>(here.scores, scores);
        __syncwarp();
        multiply_rows<DEPTH, PART>(of_value, here.scores, here.part[1]);
        __syncwarp();
        put_scores<PART / 8>(here.scores, slopes);
        __syncwarp();
        multiply_rows<DEPTH, PART>(of_key, here.scores, here.part[0]);
        __syncthreads();
    }
    float factors[MINE];
    UNROLL
    for (int i = 0; i < MINE; i++)
        factors[i] = args.scale;
    store_rows<DEPTH>(of_key, head_of<float>(args, args.of_key, head), args.of_key.row, begin, args.keys, factors);
    UNROLL
    for (int i = 0; i < MINE; i++)
        factors[i] = 1;
    store_rows<DEPTH>(of_value, head_of<float>(args, args.of_value, head), args.of_value.row, begin, args.keys,
                      factors);
}

#define WIDE_TILES_OF(depth)                       \
    TILE_KERNEL(attention_forward_##depth##_f32) { \
        forward<depth>(args);                      \
    }                                              \
    TILE_KERNEL(attention_queries_##depth##_f32) { \
        backward_queries<depth>(args);             \
    }                                              \
    TILE_KERNEL(attention_keys_##depth##_f32) {    \
        backward_keys<depth>(args);                \
    }
#else
struct of_f32 : by_definition<lying_f32> {};
#define WIDE_TILES_OF(depth)                                   \
    KERNEL(attention_forward_##depth##_f32, tu_launch_tiles) { \
        forward<of_f32, depth, 0>(args);                       \
    }                                                          \
    KERNEL(attention_queries_##depth##_f32, tu_launch_tiles) { \
        backward_queries<of_f32, depth, 0>(args);              \
    }                                                          \
    KERNEL(attention_keys_##depth##_f32, tu_launch_tiles) {    \
        backward_keys<of_f32, depth, 0>(args);                 \
    }
#endif

WIDE_TILES_OF(32)
WIDE_TILES_OF(64)
