/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels share in which ranks multiply together, whatever they multiply with: the words that ranks write for
 * each other and how they are waited for, the order in which tiles are made, and the sums of what all have made of a
 * rank's rows.
 */
#ifndef TU_TENSOR_CUDA_TOGETHER_RANKS_CUH
#define TU_TENSOR_CUDA_TOGETHER_RANKS_CUH

#include "../backend/cuda/device.cuh"
#include "together_words.cuh"

#define PIECE_ROWS 16
#define PIECES (TU_TILE_ROWS / PIECE_ROWS) /* of a tile that are added by one warp each */
#define BAND 8                             /* tiles of rows that go together: what they read stays in the cache */

/* ---- what ranks tell each other ---- */

HERE tu_together_board *board_of(const tu_together_args &args, int rank) {
    return (tu_together_board *)(args.boards + (uint64_t)rank * args.stride);
}
/* The word of `from` for a half tile of `owner`'s block. */
HERE uint32_t *word_of(const tu_together_args &args, int owner, int half_tile, int from) {
    return (uint32_t *)(board_of(args, owner) + 1) + half_tile * args.size + from;
}

/* As raise_fault, but no call: calls would cost the teams that multiply their registers. */
HERE void raise(const tu_together_args &args, uint32_t code, int peer, uint32_t theirs) {
    tu_cuda_fault *told = &((tu_cuda_report *)args.group.report)->fault;
    if (atomicCAS(&((tu_cuda_words *)args.group.words)->fault, 0u, code) != 0)
        return;
    told->peer = (uint32_t)peer;
    told->mine = args.signature;
    told->theirs = theirs;
    told->channel = 0;
    told->operation = args.operation;
    told->sequence = 0;
    __threadfence_system();
    store_release32(&told->code, code); /* pairs with the host's acquire load in tu_cuda_check */
}

/* Whether the peer has begun a call, and that is another than this: then a fault is raised. One that is ahead has made
 * this call. */
HERE bool differs(const tu_together_args &args, uint32_t number, int peer) {
    uint64_t said = load_acquire64(&board_of(args, args.rank)->entered[peer]);
    if ((uint32_t)(said >> 32) != number || (uint32_t)said == args.signature)
        return false;
    raise(args, TU_CUDA_FAULT_MISMATCH, peer, (uint32_t)said);
    return true;
}

/* Waits until the word, which `peer` writes, has reached the call's number; false: a fault, or no more time. A rank's
 * own word comes late only where its other blocks wait for somebody: they have the time to say for whom. */
HERE bool await_word(const tu_together_args &args, const uint32_t *word, uint32_t number, int peer) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0;; spins++) {
        if ((int32_t)(load_relaxed32(word) - number) >= 0) {
            (void)load_acquire32(word);
            return true;
        }
        __nanosleep(100); /* the tensor cores' warps come first */
        if ((spins & 15) != 15)
            continue;
        if (has_fault(args.group) || differs(args, number, peer))
            return false;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + args.timeout_ns * (peer == args.rank ? 2 : 1);
        if (now > deadline) {
            raise(args, TU_CUDA_FAULT_TIMEOUT, peer, 0);
            return false;
        }
    }
}

/* Each lane below the number of ranks waits for one; the same answer in all lanes. */
HERE bool await_all(const tu_together_args &args, const uint32_t *words, uint32_t number) {
    int lane = threadIdx.x % 32;
    bool came = lane >= args.size || await_word(args, words + lane, number, lane);
    return __all_sync(0xffffffffu, came);
}

/* The same: all ranks have begun this call. */
HERE bool await_entered(const tu_together_args &args, uint32_t number) {
    int lane = threadIdx.x % 32;
    const uint32_t *upper = (const uint32_t *)&board_of(args, args.rank)->entered[lane % TU_TOGETHER_RANKS] + 1;
    bool came = lane >= args.size || (await_word(args, upper, number, lane) && !differs(args, number, lane));
    return __all_sync(0xffffffffu, came);
}

HERE bool copies(const tu_together_args &args) {
    return args.half != 0 || args.scales_half != 0;
}

/* ---- tiles ---- */

struct tile {
    int rank; /* whose shard, or who owns it */
    int row, column;
};

HERE int tiles_of(int extent, int tile) {
    return (extent + tile - 1) / tile;
}

/* Tile `index` of a matrix of `rows` by `columns` tiles in bands of `band` rows, column by column in a band. */
HERE tile in_bands(int index, int rows, int columns, int band) {
    int which = index / (band * columns), rest = index % (band * columns), high = min(band, rows - which * band);
    return { 0, which * band + rest % high, rest / high };
}

/* Bands of a rank's own rows in a scatter: the ranks' rows go in turns, so that all owners are served all the time. */
HERE int band_of_owner(const tu_together_args &args) {
    int band = max(1, BAND / args.size);
    return band + (band & args.size & 1); /* of all owners an even number, for pairs */
}

HERE tile tile_at(const tu_together_args &args, int index) {
    int rows = tiles_of(args.rows, TU_TILE_ROWS), columns = tiles_of(args.columns, TU_TILE_COLUMNS);
    if (args.scatters) {
        tile found = in_bands(index, rows * args.size, columns, band_of_owner(args) * args.size);
        found.rank = found.row % args.size;
        found.row /= args.size;
        return found;
    }
    tile found = in_bands(index % (rows * columns), rows, columns, BAND);
    found.rank = (index / (rows * columns) + args.rank) % args.size;
    return found;
}

HERE int tile_count(const tu_together_args &args) {
    return tiles_of(args.rows, TU_TILE_ROWS) * tiles_of(args.columns, TU_TILE_COLUMNS) * args.size;
}

HERE int half_tile_of(const tu_together_args &args, int row, int column, int half) {
    return (row * 2 + half) * tiles_of(args.columns, TU_TILE_COLUMNS) + column;
}

/* ---- adding: one warp, sixteen rows of a tile ---- */

/* Eight elements of Rows rows, which are `step` bytes apart: the parts of Ranks ranks, all of them on their way before
 * the first is added. What is on its way decides how quick this is. */
template <int Kind, int Ranks, int Rows>
HERE void add_eight(const tu_together_args &args, uint64_t from, uint64_t to, uint64_t step) {
    uint4 parts[Rows][Ranks];
#pragma unroll
    for (int rank = 0; rank < Ranks; rank++) {
        uint64_t at = from + rank * args.part_bytes;
#pragma unroll
        for (int row = 0; row < Rows; row++, at += step)
            parts[row][rank] = load_vector((const void *)at);
    }
#pragma unroll
    for (int row = 0; row < Rows; row++, to += step) {
        uint4 result;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 sum = widen<Kind>((&parts[row][0].x)[k]);
#pragma unroll
            for (int rank = 1; rank < Ranks; rank++) {
                float2 x = widen<Kind>((&parts[row][rank].x)[k]);
                sum = { __fadd_rn(sum.x, x.x), __fadd_rn(sum.y, x.y) };
            }
            (&result.x)[k] = narrow<Kind>(__fmul_rn(sum.x, args.factor), __fmul_rn(sum.y, args.factor));
        }
        store_vector((void *)to, result);
    }
}

/* The same of any number of ranks, four at a time. */
template <int Kind> HERE void add_any(const tu_together_args &args, uint64_t from, uint64_t to) {
    float2 sums[4];
#pragma unroll 1
    for (int first = 0; first < args.size; first += 4) {
        uint4 parts[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + i < args.size)
                parts[i] = load_vector((const void *)(from + (first + i) * args.part_bytes));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float2 x = widen<Kind>((&parts[i].x)[k]);
                if (first + i == 0)
                    sums[k] = x;
                else if (first + i < args.size)
                    sums[k] = make_float2(__fadd_rn(sums[k].x, x.x), __fadd_rn(sums[k].y, x.y));
            }
    }
    uint4 result;
#pragma unroll
    for (int k = 0; k < 4; k++)
        (&result.x)[k] = narrow<Kind>(__fmul_rn(sums[k].x, args.factor), __fmul_rn(sums[k].y, args.factor));
    store_vector((void *)to, result);
}

/* Sixteen rows or less. */
template <int Kind> HERE void add_rows(const tu_together_args &args, uint64_t offset, int rows) {
    uint64_t from = args.stage + offset, to = args.sums + offset, step = (uint64_t)args.columns * 2;
    int row = 0;
    if (args.size == 2) {
#pragma unroll 1
        for (; row + 4 <= rows; row += 4, from += 4 * step, to += 4 * step)
            add_eight<Kind, 2, 4>(args, from, to, step);
    } else if (args.size == 4) {
#pragma unroll 1
        for (; row + 2 <= rows; row += 2, from += 2 * step, to += 2 * step)
            add_eight<Kind, 4, 2>(args, from, to, step);
    }
#pragma unroll 1
    for (; row < rows; row++, from += step, to += step)
        add_any<Kind>(args, from, to);
}

/* Takes pieces of this rank's block, in the order in which they are made, until there are none. With Meets the lanes
 * meet when each has seen the word of one rank, before they read what any has made: CUDA C promises no order without
 * that. Hopper's kernel does without: a lane that has seen its word has none of the parts in its caches. */
template <int Kind, int Meets = 0> HERE void add_pieces(const tu_together_args &args, uint32_t number) {
    int lane = threadIdx.x % 32, rows = tiles_of(args.rows, TU_TILE_ROWS),
        columns = tiles_of(args.columns, TU_TILE_COLUMNS), count = rows * columns * PIECES;
    __syncwarp();
    for (;;) {
        int piece = 0;
        if (lane == 0)
            piece = (int)atomicAdd(&board_of(args, args.rank)->taken, 1u);
        piece = __shfl_sync(0xffffffffu, piece, 0);
        if (piece >= count)
            return;
        tile at = in_bands(piece / PIECES, rows, columns, band_of_owner(args));
        int part = piece % PIECES, row = at.row * TU_TILE_ROWS + part * PIECE_ROWS,
            column = at.column * TU_TILE_COLUMNS + lane * 8;
        if (row >= args.rows)
            continue; /* nobody makes it, nor announces */
        if (!await_all(args, word_of(args, args.rank, half_tile_of(args, at.row, at.column, part * 2 / PIECES), 0),
                       number))
            return;
        if (Meets)
            __syncwarp();
        if (column >= args.columns)
            continue;
        add_rows<Kind>(args, ((uint64_t)row * args.columns + column) * 2, min(PIECE_ROWS, args.rows - row));
    }
}

/* ---- how thread blocks come and go ---- */

/* The last thread block that has read the call's number counts the call. */
HERE void count_begun(const tu_together_args &args, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    if (add_ordered(&mine->begun, 1) != gridDim.x - 1)
        return;
    mine->begun = 0;
    mine->calls = number;
}

/* By a warp of the first thread block: the others may count on this rank. */
HERE void enter(const tu_together_args &args, uint32_t number) {
    int lane = threadIdx.x % 32;
    __threadfence_system(); /* everything that earlier kernels of this stream stored */
    if (lane < args.size) {
        tu_together_board *theirs = board_of(args, lane);
        store_release64(&theirs->entered[args.rank], (uint64_t)number << 32 | args.signature);
        if (!args.scatters && !copies(args))
            store_release32(&theirs->ready[args.rank], number);
    }
}

/* By the first warp of each thread block, when the others are done. */
HERE void leave(const tu_together_args &args, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    int lane = threadIdx.x;
    if (args.leaves_together && blockIdx.x == 0)
        (void)await_all(args, mine->left, number);
    if (lane != 0)
        return;
    if (args.scatters && add_ordered(&mine->finished, 1) == gridDim.x - 1)
        mine->finished = mine->taken = 0;
    count_end(args.group);
}

#endif
