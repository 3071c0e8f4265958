/* SPDX-License-Identifier: Apache-2.0
 *
 * A product that ranks make together, in one kernel that stays until it is done (Hopper: wgmma and bulk tensor copies).
 *
 * GATHER: the left matrix is the ranks' shards, one behind the other. Each is read where it lies, this rank's first,
 * the others' when they are ready. A shard that others cannot reach is copied to where they can, beside its own
 * product.
 *
 * SCATTER: every tile of the product is rounded and written to the rank that owns its rows, into a stage with a part
 * for each rank, and announced by a word for each half tile. The owner adds what all ranks have made of a piece of its
 * rows, in rank order and in f32, as soon as all have come, and rounds once.
 *
 * A thread block has three teams of four warps. Of the first, one warp asks for what the tensor cores shall read, and
 * three communicate: they copy the shard, or add. The other two multiply, each one half of the rows of a tile, and help
 * to add at the end. Nobody who multiplies waits for another rank's sums, so there is always progress; no more thread
 * blocks are launched than fit beside those of the other ranks on the device.
 */
#include "../backend/cuda/device.cuh"
#include "together.h"

#define HERE static __device__ __forceinline__

enum kind {
    BF16,
    F16
};

#define SIDE_WARPS 3 /* that communicate */
#define PIECE_ROWS 16
#define PIECES (TU_TILE_ROWS / PIECE_ROWS) /* of a tile that are added by one warp each */
#define BAND 8                             /* tiles of rows that go together: what they read stays in the cache */

/* ---- shared memory and what passes it ---- */

HERE uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}
HERE void barrier_open(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
HERE void barrier_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
HERE void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
HERE void barrier_await(uint64_t *barrier, int parity) {
    uint32_t there;
    do
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
            : "=r"(there)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    while (!there);
}
HERE void load_box(void *to, const tu_tensor_map *map, uint64_t *barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}
HERE void store_box(const tu_tensor_map *map, const void *from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}
/* All threads of a team that multiplies. */
HERE void team_meets(int team) {
    if (team == 1)
        asm volatile("bar.sync 1, 128;" ::: "memory");
    else
        asm volatile("bar.sync 2, 128;" ::: "memory");
}

/* ---- tensor cores ---- */

HERE uint64_t descriptor(const void *pointer, uint32_t leading, uint32_t stride) {
    uint64_t address = shared_address(pointer);
    return (address & 0x3ffff) >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62; /* rows of 128 bytes, swizzled */
}

#define SUMS                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define EIGHT(i)                                                                                                  \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define ALL_SUMS                                                                                                \
    EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), \
        EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
#define MULTIPLY(shape, tail, ...)                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned." shape " " SUMS ", %128, %129, p, 1, 1" tail ";\n}\n" \
                 : ALL_SUMS                                                                           \
                 : "l"(left), "l"(right), "r"(add), ##__VA_ARGS__)

/* sums (64, 256) += left (64, 32 bytes) right; without `add` they are not read. */
template <int Kind, int ByRows> HERE void multiply(float (&sums)[128], uint64_t left, uint64_t right, int add) {
    if (Kind == BF16)
        MULTIPLY("m64n256k16.f32.bf16.bf16", ", 0, %131", "n"(ByRows));
    else
        MULTIPLY("m64n256k16.f32.f16.f16", ", 0, %131", "n"(ByRows));
}

template <int Kind> HERE uint32_t narrow(float x, float y) {
    uint32_t both;
    if (Kind == BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}
template <int Kind> HERE float2 widen(uint32_t both) {
    if (Kind == BF16)
        return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
    return __half22float2(*(const __half2 *)&both);
}

/* ---- what ranks tell each other ---- */

HERE tu_together_board *board_of(const tu_together_args &args, int rank) {
    return (tu_together_board *)(args.boards + (uint64_t)rank * args.stride);
}
/* The word of `from` for a half tile of `owner`'s block. */
HERE uint32_t *word_of(const tu_together_args &args, int owner, int half_tile, int from) {
    return (uint32_t *)(board_of(args, owner) + 1) + half_tile * args.size + from;
}

/* As raise_fault, but no call: calls would cost the teams that multiply their registers. */
HERE void raise_timeout(const tu_together_args &args, int peer) {
    tu_cuda_fault *told = &((tu_cuda_report *)args.group.report)->fault;
    if (atomicCAS(&((tu_cuda_words *)args.group.words)->fault, 0u, (uint32_t)TU_CUDA_FAULT_TIMEOUT) != 0)
        return;
    told->peer = (uint32_t)peer;
    told->mine = told->theirs = told->channel = 0;
    told->operation = args.operation;
    told->sequence = 0;
    __threadfence_system();
    store_release32(&told->code, TU_CUDA_FAULT_TIMEOUT); /* pairs with the host's acquire load in tu_cuda_check */
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
        if (has_fault(args.group))
            return false;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + args.timeout_ns * (peer == args.rank ? 2 : 1);
        if (now > deadline) {
            raise_timeout(args, peer);
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
    return max(1, BAND / args.size);
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

/* The same of any number of ranks, one after the other. */
template <int Kind> HERE void add_any(const tu_together_args &args, uint64_t from, uint64_t to) {
    float2 sums[4];
#pragma unroll 1
    for (int rank = 0; rank < args.size; rank++) {
        uint4 part = load_vector((const void *)(from + rank * args.part_bytes));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 x = widen<Kind>((&part.x)[k]);
            sums[k] = rank == 0 ? x : make_float2(__fadd_rn(sums[k].x, x.x), __fadd_rn(sums[k].y, x.y));
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
    } else if (args.size == 8) {
#pragma unroll 1
        for (; row < rows; row++, from += step, to += step)
            add_eight<Kind, 8, 1>(args, from, to, step);
    }
#pragma unroll 1
    for (; row < rows; row++, from += step, to += step)
        add_any<Kind>(args, from, to);
}

/* Takes pieces of this rank's block, in the order in which they are made, until there are none. */
template <int Kind> HERE void add_pieces(const tu_together_args &args, uint32_t number) {
    int lane = threadIdx.x % 32, rows = tiles_of(args.rows, TU_TILE_ROWS),
        columns = tiles_of(args.columns, TU_TILE_COLUMNS), count = rows * columns * PIECES;
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
        if (column >= args.columns)
            continue;
        add_rows<Kind>(args, ((uint64_t)row * args.columns + column) * 2, min(PIECE_ROWS, args.rows - row));
    }
}

/* ---- copying: this rank's shard to where the others read it ---- */

HERE void copy_shard(const tu_together_args &args, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    int self = (int)threadIdx.x - 32, lane = threadIdx.x % 32;
    bool all = await_all(args, mine->entered, number); /* nobody reads there any more what an earlier call has left */
    uint64_t step = (uint64_t)gridDim.x * SIDE_WARPS * 32 * 16;
    for (uint64_t i = ((uint64_t)blockIdx.x * SIDE_WARPS * 32 + self) * 16; all && i < args.shard_bytes;
         i += 4 * step) {
        uint4 vector[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * step < args.shard_bytes)
                vector[k] = load_vector((const void *)(args.shard + i + k * step));
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * step < args.shard_bytes)
                store_vector((void *)(args.half + i + k * step), vector[k]);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory"); /* the others read it by the copy engine */
    __threadfence_system();
    asm volatile("bar.sync 3, 96;" ::: "memory");
    bool last = false;
    if (self == 0)
        last = atomicAdd(&mine->copied, 1u) == gridDim.x - 1;
    if (self >= 32 || !__shfl_sync(0xffffffffu, last, 0) || !all)
        return;
    __threadfence_system();
    if (lane < args.size)
        store_release32(&board_of(args, lane)->ready[args.rank], number); /* pairs with the load in fetch */
}

/* ---- one warp asks for what the tensor cores read ---- */

template <int ByRows>
HERE void fetch(const tu_together_args &args, uint8_t *stages, uint64_t *full, uint64_t *empty, uint32_t number,
                int element) {
    int columns = TU_TILE_BYTES / element, steps = tiles_of(args.depth, columns), stage = 0, phase = 0;
    int count = tile_count(args), ready = args.rank;
    for (int index = (int)blockIdx.x; index < count; index += (int)gridDim.x) {
        tile at = tile_at(args, index);
        if (!args.scatters && at.rank != ready && at.rank != args.rank) {
            /* Without it what is read is not the shard, and the group has ended. */
            (void)await_word(args, &board_of(args, args.rank)->ready[at.rank], number, at.rank);
            asm volatile("fence.proxy.async.global;" ::: "memory");
            ready = at.rank;
        }
        const tu_tensor_map *left = &args.left[args.scatters ? 0 : at.rank];
        int row = (args.scatters ? at.rank * args.rows : 0) + at.row * TU_TILE_ROWS;
        for (int step = 0; step < steps; step++) {
            uint8_t *to = stages + stage * TU_TOGETHER_STAGE_BYTES, *right = to + TU_TILE_ROWS * TU_TILE_BYTES;
            barrier_await(&empty[stage], phase ^ 1);
            barrier_expect(&full[stage], TU_TOGETHER_STAGE_BYTES);
            load_box(to, left, &full[stage], step * columns, row);
            if (ByRows) {
#pragma unroll
                for (int i = 0; i < TU_TILE_COLUMNS / 64; i++)
                    load_box(right + i * 64 * TU_TILE_BYTES, &args.right, &full[stage],
                             at.column * TU_TILE_COLUMNS + i * 64, step * columns);
            } else {
                load_box(right, &args.right, &full[stage], step * columns, at.column * TU_TILE_COLUMNS);
            }
            if (++stage == TU_TILE_STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

/* ---- two teams multiply, and hand their half tiles out ---- */

/* Where a team's half tiles go, and what it has not announced yet. */
struct outlet {
    uint8_t *room;  /* in shared memory: 64 rows by 128 columns, in two boxes */
    uint32_t *word; /* of the half tile before; NULL: there is none */
    bool entered;   /* of a scatter: all ranks have begun the call, and nobody uses the stages of an earlier one */
};

/* By one thread of the team: what was handed out before has arrived, and is announced. */
HERE void announce(outlet &outlet, uint32_t number) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (outlet.word != nullptr) {
        asm volatile("fence.proxy.async.global;" ::: "memory");
        store_release32(outlet.word, number); /* pairs with the load in add_pieces */
    }
    outlet.word = nullptr;
}

template <int Kind>
HERE void hand_out(const tu_together_args &args, const float (&sums)[128], outlet &outlet, tile at, int team,
                   uint32_t number) {
    int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, half = team - 1;
    /* Four matrices of 8 by 8: the lane says where a row of one of them goes. */
    int row = warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
    bool may = true;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        if (thread == 0 && part == 0) {
            announce(outlet, number);
            for (int rank = 0; args.scatters && !outlet.entered && may && rank < args.size; rank++)
                may = await_word(args, &board_of(args, args.rank)->entered[rank], number, rank);
            outlet.entered = may;
        } else if (thread == 0) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        team_meets(team);
#pragma unroll
        for (int i = 0; i < 8; i++) { /* sixteen columns each */
            const float *x = sums + part * 64 + i * 8;
            int chunk = i * 2 + lane / 16;
            uint32_t to = shared_address(outlet.room) + chunk / 8 * 8192 + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                         "r"(narrow<Kind>(x[0], x[1])), "r"(narrow<Kind>(x[2], x[3])), "r"(narrow<Kind>(x[4], x[5])),
                         "r"(narrow<Kind>(x[6], x[7]))
                         : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        team_meets(team);
        if (thread == 0 && may) {
            int column = at.column * TU_TILE_COLUMNS + part * 128, first = at.row * TU_TILE_ROWS + half * 64;
            store_box(&args.out[at.rank], outlet.room, column, first);
            store_box(&args.out[at.rank], outlet.room + 8192, column + 64, first);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    if (thread == 0 && args.scatters && may)
        outlet.word = word_of(args, at.rank, half_tile_of(args, at.row, at.column, half), args.rank);
}

template <int Kind, int ByRows>
HERE void multiply_tiles(const tu_together_args &args, uint8_t *stages, uint64_t *full, uint64_t *empty, int team,
                         uint32_t number) {
    int steps = tiles_of(args.depth, TU_TILE_BYTES / 2), stage = 0, phase = 0, count = tile_count(args);
    outlet outlet = { stages + TU_TILE_STAGES * TU_TOGETHER_STAGE_BYTES + (team - 1) * TU_TOGETHER_OUT_BYTES, nullptr,
                      false };
    bool first = threadIdx.x % 128 == 0;
    float sums[128];
    for (int index = (int)blockIdx.x; index < count; index += (int)gridDim.x) {
        tile at = tile_at(args, index);
        int last = -1;
        for (int step = 0; step < steps; step++) {
            barrier_await(&full[stage], phase);
            const uint8_t *left = stages + stage * TU_TOGETHER_STAGE_BYTES + (team - 1) * 64 * TU_TILE_BYTES,
                          *right = stages + stage * TU_TOGETHER_STAGE_BYTES + TU_TILE_ROWS * TU_TILE_BYTES;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < TU_TILE_BYTES / 32; i++)
                multiply<Kind, ByRows>(sums, descriptor(left + i * 32, 16, 1024),
                                       ByRows ? descriptor(right + i * 16 * 128, 64 * TU_TILE_BYTES, 1024)
                                              : descriptor(right + i * 32, 16, 1024),
                                       step > 0 || i > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (last >= 0 && first)
                barrier_arrive(&empty[last]);
            last = stage;
            if (++stage == TU_TILE_STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (first)
            barrier_arrive(&empty[last]);
        hand_out<Kind>(args, sums, outlet, at, team, number);
    }
    if (first)
        announce(outlet, number);
    if (args.scatters) {
        __syncwarp();
        add_pieces<Kind>(args, number);
    }
}

/* ---- the kernel ---- */

/* By the first warp of the first thread block: the others may count on this rank. */
HERE void enter(const tu_together_args &args, uint32_t number) {
    int lane = threadIdx.x;
    __threadfence_system(); /* everything that earlier kernels of this stream stored */
    if (lane < args.size) {
        tu_together_board *theirs = board_of(args, lane);
        if (!args.scatters && args.half == 0)
            store_release32(&theirs->ready[args.rank], number);
        store_release32(&theirs->entered[args.rank], number);
    }
}

/* By the first warp of each thread block, when the others are done. */
HERE void leave(const tu_together_args &args, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    int lane = threadIdx.x;
    bool last = false;
    if (lane == 0) {
        __threadfence();
        last = atomicAdd(&mine->finished, 1u) == gridDim.x - 1;
    }
    if (__shfl_sync(0xffffffffu, last, 0)) {
        __threadfence();
        if (lane == 0) {
            mine->finished = mine->taken = mine->copied = 0;
            mine->calls = number;
        }
        if (args.leaves_together) {
            __threadfence_system();
            if (lane < args.size)
                store_release32(&board_of(args, lane)->left[args.rank], number);
            (void)await_all(args, mine->left, number);
        }
        __threadfence_system();
    }
    if (lane == 0)
        count_end(args.group);
}

template <int Kind, int ByRows> HERE void run(const tu_together_args &args) {
    extern __shared__ uint8_t raw[];
    __shared__ uint32_t call, fault;
    uint8_t *stages = (uint8_t *)(((uintptr_t)raw + 1023) / 1024 * 1024);
    uint64_t *full = (uint64_t *)(stages + TU_TILE_STAGES * TU_TOGETHER_STAGE_BYTES + 2 * TU_TOGETHER_OUT_BYTES),
             *empty = full + TU_TILE_STAGES;
    int team = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TU_TILE_STAGES; i++) {
            barrier_open(&full[i], 1);
            barrier_open(&empty[i], 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        await_order(args.group, args.timeout_ns);
        fault = has_fault(args.group);
        call = load_relaxed32(&board_of(args, args.rank)->calls) + 1;
    }
    __syncthreads();
    uint32_t number = call;
    if (fault == 0) {
        if (blockIdx.x == 0 && warp == 0)
            enter(args, number);
        if (team == 0) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
            if (threadIdx.x == 0)
                fetch<ByRows>(args, stages, full, empty, number, 2);
            else if (warp > 0 && args.scatters)
                add_pieces<Kind>(args, number);
            else if (warp > 0 && args.half != 0)
                copy_shard(args, number);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
            multiply_tiles<Kind, ByRows>(args, stages, full, empty, team, number);
        }
        __syncthreads();
    }
    if (warp == 0) {
        if (fault == 0)
            leave(args, number);
        else if (threadIdx.x == 0)
            count_end(args.group);
    }
}

#define KERNEL(name, kind, by_rows)                                             \
    extern "C" __global__ void __launch_bounds__(TU_TOGETHER_THREADS, 1)        \
        kernel_together_##name(const __grid_constant__ tu_together_args args) { \
        run<kind, by_rows>(args);                                               \
    }
KERNEL(bf16_columns, BF16, 0)
KERNEL(bf16_rows, BF16, 1)
KERNEL(f16_columns, F16, 0)
KERNEL(f16_rows, F16, 1)
