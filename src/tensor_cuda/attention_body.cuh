/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention whose scores never lie in memory: a block has 64 rows of one head and goes along the other side in tiles,
 * with the largest score and the sum of each row brought up to date on the way.
 *
 * Backward has the gradients of queries in one kernel and those of keys and values in another: each goes along the
 * other side in order, so that results do not depend on how blocks run. The scores are computed again in both.
 *
 * The file that includes this one has, for its type of elements,
 *     element, pitch_of(DEPTH)    and how far apart rows lie in shared memory, in elements
 *     SPACE(count)                declares `space`, so many elements of shared memory
 *     left_rows<DEPTH>            the sixteen rows of a warp, as left operands; load_left brings them
 *     send_rows                   rows of memory on their way to shared memory
 *     multiply_turned, multiply_rows, store_rows, dots_of
 */
/* A matrix of sums lies in the registers of a warp in strips of eight columns: a thread has four numbers of each, two
 * neighbours in its upper row and two in the lower. */

template <int COUNT> HERE void clear(float (&sums)[COUNT][4]) {
    UNROLL
    for (int strip = 0; strip < COUNT; strip++)
        UNROLL
    for (int i = 0; i < 4; i++)
        sums[strip][i] = 0;
}

/* ---- forward ---- */

template <class Type, int DEPTH, int TILE> HERE void forward(const tu_launch_tiles &args) {
    constexpr int PITCH = pitch_of(DEPTH);
    SPACE(4 * TILE * PITCH); /* keys and values, two tiles of each; first the queries */
    static_assert(ROWS <= 4 * TILE, "the queries fit");
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t head = BLOCK % args.heads, begin = (BLOCKS / args.heads - 1 - BLOCK / args.heads) * ROWS;
    int64_t row = begin + warp * 16 + lane / 4, end = args.keys;
    const element *keys = head_of<element>(args, args.key, head), *values = head_of<element>(args, args.value, head);
    left_rows<DEPTH> query;
    if (args.causal && begin + ROWS < end)
        end = begin + ROWS;
    send_rows<DEPTH, ROWS>(space, head_of<element>(args, args.query, head), args.query.row, begin, args.queries);
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
        const element *tile = space + stage * 2 * TILE * PITCH;
        if (first + TILE < end) {
            element *next = space + (stage ^ 1) * 2 * TILE * PITCH;
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
    store_rows<Type, DEPTH>(sums, head_of<element>(args, args.out, head), args.out.row, row, args.queries, 1 / all[0],
                            1 / all[1]);
}

/* ---- backward: queries ---- */

#define PART 32 /* of a tile, whose scores are in registers at a time */

template <class Type, int DEPTH, int TILE> HERE void backward_queries(const tu_launch_tiles &args) {
    constexpr int PITCH = pitch_of(DEPTH);
    SPACE(4 * TILE * PITCH); /* as in forward; first queries and gradients */
    static_assert(2 * ROWS <= 4 * TILE, "queries and gradients fit");
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t head = BLOCK % args.heads, begin = (BLOCKS / args.heads - 1 - BLOCK / args.heads) * ROWS;
    int64_t row = begin + warp * 16 + lane / 4, end = args.keys;
    const element *keys = head_of<element>(args, args.key, head), *values = head_of<element>(args, args.value, head);
    left_rows<DEPTH> query, grad;
    if (args.causal && begin + ROWS < end)
        end = begin + ROWS;
    send_rows<DEPTH, ROWS>(space, head_of<element>(args, args.query, head), args.query.row, begin, args.queries);
    send_rows<DEPTH, ROWS>(space + ROWS * PITCH, head_of<element>(args, args.grad, head), args.grad.row, begin,
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
        const element *tile = space + stage * 2 * TILE * PITCH;
        if (first + TILE < end) {
            element *next = space + (stage ^ 1) * 2 * TILE * PITCH;
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
    store_rows<Type, DEPTH>(sums, head_of<element>(args, args.of_query, head), args.of_query.row, row, args.queries,
                            args.scale, args.scale);
}

/* ---- backward: keys and values ---- */

/* Scores are turned here: a row is a key, a column a query. */
template <class Type, int DEPTH, int TILE> HERE void backward_keys(const tu_launch_tiles &args) {
    constexpr int PITCH = pitch_of(DEPTH);
    SPACE(4 * TILE * PITCH); /* queries and gradients, two tiles of each */
    static_assert(2 * ROWS <= 4 * TILE, "keys and values fit");
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t head = BLOCK % args.heads, begin = BLOCK / args.heads * ROWS;
    int64_t row = begin + warp * 16 + lane / 4, end = args.queries;
    const element *queries = head_of<element>(args, args.query, head), *grads = head_of<element>(args, args.grad, head);
    const float *log_sums = (const float *)(uintptr_t)args.sums + head * args.queries;
    const float *dots = (const float *)(uintptr_t)args.dots + head * args.queries;
    left_rows<DEPTH> key, value;
    send_rows<DEPTH, ROWS>(space, head_of<element>(args, args.key, head), args.key.row, begin, args.keys);
    send_rows<DEPTH, ROWS>(space + ROWS * PITCH, head_of<element>(args, args.value, head), args.value.row, begin,
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
        const element *tile = space + stage * 2 * TILE * PITCH;
        if (first + TILE < end) {
            element *next = space + (stage ^ 1) * 2 * TILE * PITCH;
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
    store_rows<Type, DEPTH>(of_key, head_of<element>(args, args.of_key, head), args.of_key.row, row, args.keys,
                            args.scale, args.scale);
    store_rows<Type, DEPTH>(of_value, head_of<element>(args, args.of_value, head), args.of_value.row, row, args.keys, 1,
                            1);
}
