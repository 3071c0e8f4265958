/* SPDX-License-Identifier: Apache-2.0
 *
 * A product that ranks make together, in one kernel that stays until it is done, for any GPU with tensor cores for bf16
 * (compute capability 8.0 and newer): it uses what all of them have, wmma and copies into shared memory that go on by
 * themselves. It does what together.cu does, which is for Hopper, of 16-bit floats; ranks tell each other the same.
 *
 * GATHER: the left matrix is the ranks' shards, one behind the other. Each is read where it lies, this rank's first,
 * the others' when they are ready. A shard that others cannot reach is copied to where they can.
 *
 * SCATTER: every tile of the product is rounded and written to the rank that owns its rows, into a stage with a part
 * for each rank, and announced by a word for each half tile. The owner adds what all ranks have made of a piece of its
 * rows, in rank order and in f32, as soon as all have come, and rounds once.
 *
 * A thread block is a team of eight warps that multiply, each 64 by 64 elements of a tile, and four warps that serve:
 * they say that this rank has come, copy the shard, and add. When the team has made its tiles it adds, too.
 *
 * WHY THERE IS PROGRESS, also where thread blocks are fewer than tiles, as long as those of all ranks are on the device
 * at once (no more are launched than there are processors for each rank):
 *   - That a rank has come is said by its first thread block before it waits for anybody.
 *   - A shard is ready when all of its rank's serving warps have copied their parts, for which they wait until all
 *     ranks have come, and for nothing else.
 *   - The team waits, before it reads another rank's shard, until that is ready, and before it first writes to other
 *     ranks, until all have come. So every tile is made and announced in the end: nobody who multiplies waits for sums.
 *   - Sums wait for announced tiles alone, and in leave() one waits for others to have read, which each says when its
 *     last tile is multiplied.
 *
 * WHAT IS SEEN WHEN. Who writes for another rank stores; then the warps meet, and one thread fences and releases a word
 * with the scope of the system. Who reads acquires that word by one thread, then the warps meet, and what is read is
 * asked for behind that: nothing of another rank's is fetched ahead, nor by way of caches that nobody invalidates.
 */
#include <cuda_pipeline_primitives.h>

#include "together_ranks.cuh"
#include "together_wmma.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

#define TEAM 256 /* threads that multiply; as many again do not fit, half as many serve */
#define SERVING (TU_PLAIN_THREADS - TEAM)
#define WARP_EXTENT 64 /* rows and columns of a warp's part of a tile */
#define PARTS (WARP_EXTENT / 16)
#define PADDING 8 /* elements behind a row in shared memory: rows begin in other banks */
#define LEFT_ROW (TU_PLAIN_DEPTH + PADDING)
#define RIGHT_ROW (TU_TILE_COLUMNS + PADDING) /* of the right matrix by rows */
#define TURN_ROW (WARP_EXTENT + 4)            /* of f32, where a warp turns sixteen of its rows */
static_assert((TU_TILE_ROWS + TU_TILE_COLUMNS) * LEFT_ROW * 2 == TU_PLAIN_STAGE_BYTES &&
                  TU_PLAIN_DEPTH * RIGHT_ROW <= TU_TILE_COLUMNS * LEFT_ROW &&
                  TEAM / 32 * 16 * TURN_ROW * 4 <= TU_PLAIN_SHARED,
              "a stage holds either form of the right matrix, and where they were warps turn their rows");

/* All warps of the team, or all that serve, are here, and see what the others of them have stored. */
enum {
    BY_TEAM,
    BY_SERVING
};
template <int By> HERE void meet(void) {
    __syncwarp();
    barrier_of_threads(By + 1, By == BY_TEAM ? TEAM : SERVING);
}

/* ---- into shared memory ---- */

/* Eight elements, or zeros. */
HERE void fetch_eight(uint16_t *to, uint64_t from, bool there) {
    if (there)
        __pipeline_memcpy_async(to, (const void *)from, 16);
    else
        *(uint4 *)to = make_uint4(0, 0, 0, 0);
}

/* TU_PLAIN_DEPTH elements of the depth: the rows of the left matrix, and of the right one either its columns, likewise,
 * or as many rows of a tile's columns. What is beyond the matrices is zeros. */
template <int ByRows> HERE void fetch_step(const tu_together_args &args, uint16_t *to, tile at, int step) {
    constexpr int across = TU_PLAIN_DEPTH / 8, wide = TU_TILE_COLUMNS / 8;
    int thread = anew(threadIdx.x), depth = step * TU_PLAIN_DEPTH;
    uint64_t left = args.left_at[args.scatters ? 0 : at.rank] +
                    (args.scatters ? (uint64_t)at.rank * args.rows * args.left_row * 2 : 0);
#pragma unroll
    for (int i = 0; i < TU_TILE_ROWS * across / TEAM; i++) {
        int piece = i * TEAM + thread, below = piece / across, k = piece % across * 8,
            row = at.row * TU_TILE_ROWS + below;
        fetch_eight(to + below * LEFT_ROW + k, left + ((uint64_t)row * args.left_row + depth + k) * 2,
                    row < args.rows && depth + k < args.depth);
    }
    to += TU_TILE_ROWS * LEFT_ROW;
#pragma unroll
    for (int i = 0; i < TU_TILE_COLUMNS * across / TEAM; i++) {
        int piece = i * TEAM + thread, below = piece / (ByRows ? wide : across),
            beside = piece % (ByRows ? wide : across) * 8, k = depth + (ByRows ? below : beside),
            column = at.column * TU_TILE_COLUMNS + (ByRows ? beside : below);
        fetch_eight(to + below * (ByRows ? RIGHT_ROW : LEFT_ROW) + beside,
                    args.right_at +
                        (ByRows ? (uint64_t)k * args.right_row + column : (uint64_t)column * args.right_row + k) * 2,
                    k < args.depth && column < args.columns);
    }
}

/* ---- the team multiplies ---- */

/* Where this warp's part of a tile begins. */
HERE int row_of_warp(void) {
    return (int)threadIdx.x / 32 / (TU_TILE_COLUMNS / WARP_EXTENT) * WARP_EXTENT;
}
HERE int column_of_warp(void) {
    return (int)threadIdx.x / 32 % (TU_TILE_COLUMNS / WARP_EXTENT) * WARP_EXTENT;
}

/* Adds a stage's products to this warp's sums. */
template <int Kind, int ByRows> HERE void multiply_step(const uint16_t *stage, sums (&of)[PARTS][PARTS]) {
    constexpr int distance = ByRows ? RIGHT_ROW : LEFT_ROW;
    const uint16_t *left = stage + row_of_warp() * LEFT_ROW,
                   *right = stage + TU_TILE_ROWS * LEFT_ROW + column_of_warp() * (ByRows ? 1 : LEFT_ROW);
#pragma unroll
    for (int k = 0; k < TU_PLAIN_DEPTH; k += 16) {
        sixteen<Kind> rows[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            load_left(rows[i], left + i * 16 * LEFT_ROW + k, LEFT_ROW);
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            sixteen<Kind> columns;
            load_right<Kind, ByRows>(columns, right + (ByRows ? k * RIGHT_ROW + j * 16 : j * 16 * LEFT_ROW + k),
                                     distance);
#pragma unroll
            for (int i = 0; i < PARTS; i++)
                multiply_sixteen<Kind, ByRows>(of[i][j], rows[i], columns);
        }
    }
}

/* A tile: while the products of one stage are made the next ones are on their way. Nobody reads the stages any more
 * when it returns. */
template <int Kind, int ByRows>
HERE void multiply_tile(const tu_together_args &args, uint16_t *stages, sums (&of)[PARTS][PARTS], tile at) {
    constexpr int length = TU_PLAIN_STAGE_BYTES / 2;
    int steps = tiles_of(args.depth, TU_PLAIN_DEPTH), asked = 0;
    bool inside = at.row * TU_TILE_ROWS + row_of_warp() < args.rows &&
                  at.column * TU_TILE_COLUMNS + column_of_warp() < args.columns;
#pragma unroll
    for (int i = 0; i < PARTS * PARTS; i++)
        of[i / PARTS][i % PARTS] = {};
    for (; asked < TU_PLAIN_STAGES - 1; asked++) {
        if (asked < steps)
            fetch_step<ByRows>(args, stages + asked * length, at, asked);
        __pipeline_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; step++, asked++) {
        __pipeline_wait_prior(TU_PLAIN_STAGES - 2); /* this thread's part of the stage has come … */
        meet<BY_TEAM>();                            /* … and everybody's; the one before is free */
        if (asked < steps)
            fetch_step<ByRows>(args, stages + asked % TU_PLAIN_STAGES * length, at, asked);
        __pipeline_commit();
        __syncwarp(); /* lanes may have gone different ways */
        if (inside)
            multiply_step<Kind, ByRows>(stages + step % TU_PLAIN_STAGES * length, of);
    }
    __pipeline_wait_prior(0);
    meet<BY_TEAM>();
}

/* Of a tile this warp's part, rounded, in rows of 128 bytes, to this rank's results or another rank's stage: sixteen
 * rows at a time are turned where the stages were. */
template <int Kind>
HERE void store_part(const tu_together_args &args, uint16_t *stages, const sums (&of)[PARTS][PARTS], tile at) {
    float *mine = (float *)stages + threadIdx.x / 32 * (16 * TURN_ROW);
    int lane = threadIdx.x % 32, first = at.row * TU_TILE_ROWS + row_of_warp(),
        column = at.column * TU_TILE_COLUMNS + column_of_warp() + lane % 8 * 8;
    uint64_t to =
        args.scatters ? args.out_at[at.rank] : args.results + (uint64_t)at.rank * args.rows * args.columns * 2;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            store_sums(mine + j * 16, of[i][j], TURN_ROW);
        __syncwarp();
#pragma unroll
        for (int below = lane / 8; below < 16; below += 4) {
            const float *x = mine + below * TURN_ROW + lane % 8 * 8;
            int row = first + i * 16 + below;
            uint4 eight = make_uint4(narrow<Kind>(x[0], x[1]), narrow<Kind>(x[2], x[3]), narrow<Kind>(x[4], x[5]),
                                     narrow<Kind>(x[6], x[7]));
            if (row < args.rows && column < args.columns)
                store_vector((void *)(to + ((uint64_t)row * args.columns + column) * 2), eight);
        }
        __syncwarp();
    }
}

/* ---- what the team waits for and says ---- */

/* Before it reads a shard of another rank's. `answer` lies in shared memory; nobody writes it again before the team has
 * met once more. */
HERE bool await_shard(const tu_together_args &args, int rank, uint32_t number, uint32_t *answer) {
    if (threadIdx.x == 0)
        *answer =
            await_word(args, &board_of(args, args.rank)->ready[rank], number, rank) && !differs(args, number, rank);
    meet<BY_TEAM>();
    return *answer != 0;
}

/* Before it first writes to other ranks, and before those that serve write where other ranks read: nobody uses there
 * any more what an earlier call has left. */
template <int By> HERE bool await_ranks(const tu_together_args &args, uint32_t number, uint32_t *answer) {
    if (threadIdx.x / 32 == (By == BY_TEAM ? 0 : TEAM / 32)) {
        bool all = await_entered(args, number);
        if (threadIdx.x % 32 == 0)
            *answer = all;
    }
    meet<By>();
    return *answer != 0;
}

/* By one thread, when the team has met behind its stores. */
HERE void announce(const tu_together_args &args, tile at, uint32_t number) {
    __threadfence_system();
    for (int half = 0; half < 2; half++) /* pairs with the load in add_pieces */
        store_release32(word_of(args, at.rank, half_tile_of(args, at.row, at.column, half), args.rank), number);
}

/* Where nobody goes on before all have read, by one thread when the team has multiplied its last tile, or will not: the
 * last thread block tells the others that this rank has. Its results may still be on their way. */
HERE void tell_read(const tu_together_args &args, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    if (!args.leaves_together || add_ordered(&mine->read, 1) != gridDim.x - 1)
        return;
    mine->read = 0;
    fence_system();
    for (int rank = 0; rank < args.size; rank++) /* pairs with the load in leave */
        store_relaxed32(&board_of(args, rank)->left[args.rank], number);
}

template <int Kind, int ByRows>
HERE void multiply_tiles(const tu_together_args &args, uint16_t *stages, uint32_t number, uint32_t *answer) {
    int count = tile_count(args), ready = args.rank;
    bool may_write = !args.scatters, good = true;
    sums of[PARTS][PARTS];
    for (int index = (int)blockIdx.x; index < count && good; index += (int)gridDim.x) {
        tile at = tile_at(args, index);
        if (!args.scatters && at.rank != args.rank && at.rank != ready) {
            good = await_shard(args, at.rank, number, answer);
            ready = at.rank;
        }
        if (good)
            multiply_tile<Kind, ByRows>(args, stages, of, at);
        if (threadIdx.x == 0 && (!good || index + (int)gridDim.x >= count))
            tell_read(args, number);
        if (good && !may_write)
            good = may_write = await_ranks<BY_TEAM>(args, number, answer);
        if (!good)
            continue; /* the group has ended */
        store_part<Kind>(args, stages, of, at);
        meet<BY_TEAM>(); /* all of it is stored, and the stages are free */
        if (args.scatters && threadIdx.x == 0)
            announce(args, at, number);
    }
}

/* ---- the other warps serve ---- */

/* This thread block's share of the shard, to where the others read it. */
HERE void copy_shard(const tu_together_args &args) {
    constexpr int many = 4; /* of a thread, on their way at once */
    uint64_t step = (uint64_t)gridDim.x * SERVING * 16;
    for (uint64_t at = (blockIdx.x * SERVING + threadIdx.x - TEAM) * 16; at < args.shard_bytes; at += many * step) {
        uint4 parts[many];
#pragma unroll
        for (int i = 0; i < many; i++)
            if (at + i * step < args.shard_bytes)
                parts[i] = load_vector((const void *)(args.shard + at + i * step));
#pragma unroll
        for (int i = 0; i < many; i++)
            if (at + i * step < args.shard_bytes)
                store_vector((void *)(args.half + at + i * step), parts[i]);
    }
}

/* By one thread, when all that serve have copied: the last thread block says that the shard is ready. */
HERE void tell_ready(const tu_together_args &args, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    fence_system();
    if (add_ordered(&mine->copied, 1) != gridDim.x - 1)
        return;
    mine->copied = 0;
    fence_system();
    for (int rank = 0; rank < args.size; rank++) /* pairs with the load in await_shard */
        store_release32(&board_of(args, rank)->ready[args.rank], number);
}

template <int Kind> HERE void serve(const tu_together_args &args, uint32_t number, uint32_t *answer) {
    if (blockIdx.x == 0 && threadIdx.x < TEAM + 32)
        enter(args, number);
    if (threadIdx.x == TEAM)
        count_begun(args, number);
    if (copies(args) && await_ranks<BY_SERVING>(args, number, answer)) {
        copy_shard(args);
        meet<BY_SERVING>();
        if (threadIdx.x == TEAM)
            tell_ready(args, number);
    }
    if (args.scatters)
        add_pieces<Kind, 1>(args, number);
}

/* ---- the kernel ---- */

template <int Kind, int ByRows> HERE void run(const tu_together_args &args) {
    extern __shared__ __align__(128) uint8_t room_for_stages[];
    __shared__ uint32_t call, fault, answers[2];
    if (threadIdx.x == 0) {
        await_order(args.group, args.timeout_ns);
        fault = has_fault(args.group);
        call = load_relaxed32(&board_of(args, args.rank)->calls) + 1;
    }
    __syncthreads();
    uint32_t number = call;
    bool good = fault == 0;
    if (good && threadIdx.x < TEAM) {
        multiply_tiles<Kind, ByRows>(args, (uint16_t *)room_for_stages, number, &answers[BY_TEAM]);
        if (args.scatters)
            add_pieces<Kind, 1>(args, number);
    } else if (good) {
        serve<Kind>(args, number, &answers[BY_SERVING]);
    }
    __syncthreads();
    if (threadIdx.x < 32 && good)
        leave(args, number);
    else if (threadIdx.x == 0)
        count_end(args.group);
}

#define PLAIN(name, kind, by_rows)                                                    \
    extern "C" __global__ void __launch_bounds__(TU_PLAIN_THREADS, 1)                 \
        kernel_together_plain_##name(const __grid_constant__ tu_together_args args) { \
        run<kind, by_rows>(args);                                                     \
    }
PLAIN(bf16_columns, BF16, 0)
PLAIN(bf16_rows, BF16, 1)
PLAIN(f16_columns, F16, 0)
PLAIN(f16_rows, F16, 1)

#endif
