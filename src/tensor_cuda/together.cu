/* SPDX-License-Identifier: Apache-2.0
 *
 * A product that ranks make together, in one kernel that stays until it is done (Hopper: wgmma and bulk tensor copies).
 *
 * GATHER: the left matrix is the ranks' shards, one behind the other. Each is read where it lies, this rank's first,
 * the others' when they are ready. A shard that others cannot reach is copied to where they can, beside its own
 * product, and so are the scales of its rows.
 *
 * SCATTER: every tile of the product is rounded and written to the rank that owns its rows, into a stage with a part
 * for each rank, and announced by a word for each half tile. The owner adds what all ranks have made of a piece of its
 * rows, in rank order and in f32, as soon as all have come, and rounds once.
 *
 * A thread block consists of teams of four warps. Two multiply, each one half of the rows of a tile, and do nothing
 * else that takes time: of a gather they store what they have made, of a scatter they leave it in boxes in shared
 * memory, and begin the next tile. Of the first team one warp asks for what the tensor cores shall read, one copies the
 * shard, or sends the boxes off and announces them when they have arrived, and two add; at the end all do. Nobody who
 * multiplies waits for another rank's sums, so there is always progress; no more thread blocks are launched than fit
 * beside those of the other ranks on the device.
 *
 * PAIRS: two thread blocks that are launched as a cluster have tiles one above the other. Each reads half of the
 * columns of the right matrix, and the copy engine hands them to both: what comes from the second-level cache, and the
 * energy that takes, is a third less. So a stage is free when both have multiplied, and both make as many tiles.
 *
 * F8: the tensor cores add with fewer bits than f32 has. So what they have made of 256 elements of the depth is added
 * to sums in f32, half of the columns at a time, while the other team's products are made; where the caller wants fast
 * sums they stay where they are.
 */
#include "together_ptx.cuh"
#include "together_ranks.cuh"

#define BOX_COLUMNS 64 /* of 2 bytes */
#define TILE_BOXES (TU_TILE_COLUMNS / BOX_COLUMNS)
#define WARP_BOX (TU_TOGETHER_BOX_BYTES / 4) /* a warp's rows of a box */

/* What a kernel is made for, and how its registers are dealt out: to the warps that multiply, and to the others. */
template <int Left, int Right, int ByRows, int Fast = 0> struct form {
    static constexpr bool narrow = Left == E4M3 || Left == E5M2; /* f8 */
    static constexpr int element = narrow ? 1 : 2;
    static constexpr int many = narrow ? 224 : 216, few = narrow ? 56 : 72;
};

/* Shared memory of a thread block: stages, boxes (those of the first team, then those of the second), and barriers. */
struct room {
    uint8_t *stages;

    __device__ __forceinline__ uint8_t *boxes() const {
        return stages + TU_TILE_STAGES * TU_TOGETHER_STAGE_BYTES;
    }
    __device__ __forceinline__ uint64_t *full() const { /* of stages */
        return (uint64_t *)(boxes() + 2 * TU_TOGETHER_BOXES * TU_TOGETHER_BOX_BYTES);
    }
    __device__ __forceinline__ uint64_t *empty() const {
        return full() + TU_TILE_STAGES;
    }
    __device__ __forceinline__ uint64_t *box_full() const {
        return empty() + TU_TILE_STAGES;
    }
    __device__ __forceinline__ uint64_t *box_empty() const {
        return box_full() + 2 * TU_TOGETHER_BOXES;
    }
    __device__ __forceinline__ uint64_t *loaded() const { /* of all boxes, while the shard is copied through them */
        return box_empty() + 2 * TU_TOGETHER_BOXES;
    }
    __device__ __forceinline__ uint64_t *used() const { /* what was fetched, and the scales of its rows, all of it */
        return loaded() + 1;
    }
};

/* Stages of a tile: of f8 an even number. What is beyond the depth is loaded as zeros. */
template <class Form> HERE int steps_of(const tu_together_args &args) {
    int steps = tiles_of(args.depth, TU_TILE_BYTES / Form::element);
    return Form::narrow ? tiles_of(steps, 2) * 2 : steps;
}

/* ---- one warp asks for what the tensor cores read ---- */

/* What a stage holds: 128 bytes of the depth. Of the right matrix one of a pair asks for the first half of the columns,
 * the other for the second, and both get both. */
template <class Form, int ByRows>
HERE void fetch_step(const tu_together_args &args, const room &room, tile at, int step, int stage) {
    constexpr int width = ByRows ? 64 : TU_RIGHT_COLUMNS; /* columns of the right matrix in a box */
    const tu_tensor_map *left = &args.left[args.scatters ? 0 : at.rank];
    uint64_t *full = &room.full()[stage];
    int depth = step * (TU_TILE_BYTES / Form::element),
        row = (args.scatters ? at.rank * args.rows : 0) + at.row * TU_TILE_ROWS;
    uint8_t *to = room.stages + stage * TU_TOGETHER_STAGE_BYTES, *right = to + TU_TILE_ROWS * TU_TILE_BYTES;
    barrier_expect(full, TU_TOGETHER_STAGE_BYTES);
    load_box(to, left, full, depth, row);
#pragma unroll
    for (int first = 0; first < TU_TILE_COLUMNS; first += width) {
        int column = at.column * TU_TILE_COLUMNS + first, x = ByRows ? column : depth, y = ByRows ? depth : column;
        if (cluster_size() == 1)
            load_box(right + first * TU_TILE_BYTES, &args.right, full, x, y);
        else if (first / (TU_TILE_COLUMNS / 2) == cluster_rank())
            load_box_both(right + first * TU_TILE_BYTES, &args.right, full, x, y);
    }
}

/* Fills stages where the first tile is made of this rank's own matrices, which wait for nobody. Returns how many. */
template <class Form, int ByRows> HERE int fetch_first(const tu_together_args &args, const room &room) {
    tile at = tile_at(args, (int)blockIdx.x);
    int count = args.scatters || at.rank == args.rank ? min(steps_of<Form>(args), TU_TILE_STAGES) : 0;
    for (int step = 0; step < count; step++)
        fetch_step<Form, ByRows>(args, room, at, step, step);
    return count;
}

/* Where nobody goes on before all have read: the last thread block to have tells the others that this rank has. Its
 * results may still be on their way. */
HERE void tell_read(const tu_together_args &args, const room &room, uint32_t number) {
    tu_together_board *mine = board_of(args, args.rank);
    barrier_await(room.used(), 0);
    if (add_ordered(&mine->read, 1) != gridDim.x - 1)
        return;
    mine->read = 0;
    fence_system();
    for (int rank = 0; rank < args.size; rank++) /* pairs with the load in leave */
        store_relaxed32(&board_of(args, rank)->left[args.rank], number);
}

/* `begun` stages are filled already. */
template <class Form, int ByRows>
HERE void fetch(const tu_together_args &args, const room &room, uint32_t number, int begun) {
    int steps = steps_of<Form>(args), stage = begun % TU_TILE_STAGES, phase = begun / TU_TILE_STAGES;
    int count = tile_count(args), ready = args.rank;
    for (int index = (int)blockIdx.x; index < count; index += (int)gridDim.x, begun = 0) {
        tile at = tile_at(args, index);
        if (!args.scatters && at.rank != ready && at.rank != args.rank) {
            /* Without it what is read is not the shard, and the group has ended. */
            if (await_word(args, &board_of(args, args.rank)->ready[at.rank], number, at.rank))
                (void)differs(args, number, at.rank);
            order_copies_global();
            ready = at.rank;
        }
        for (int step = begun; step < steps; step++) {
            barrier_await(&room.empty()[stage], phase ^ 1);
            fetch_step<Form, ByRows>(args, room, at, step, stage);
            if (++stage == TU_TILE_STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    if (args.leaves_together)
        tell_read(args, room, number);
}

/* ---- one warp copies the shard, and sends off what the others have made ---- */

/* This thread block's share of the shard, through the boxes, and of its scales, to where the others read them. */
HERE void copy_shard(const tu_together_args &args, const room &room, bool may, uint32_t number) {
    constexpr uint64_t most = 2 * TU_TOGETHER_BOXES * TU_TOGETHER_BOX_BYTES;
    tu_together_board *mine = board_of(args, args.rank);
    int lane = threadIdx.x % 32, phase = 0;
    if (args.scales_half != 0)
        for (int i = (int)blockIdx.x * 32 + lane; may && i < args.rows; i += (int)gridDim.x * 32)
            ((float *)args.scales_half)[i] = ((const float *)args.scales)[i];
    if (lane == 0 && args.half != 0) {
        for (uint64_t at = blockIdx.x * most; may && at < args.shard_bytes; at += gridDim.x * most, phase ^= 1) {
            uint32_t bytes = (uint32_t)min(most, args.shard_bytes - at);
            barrier_expect(room.loaded(), bytes);
            load_bytes(room.boxes(), args.shard + at, bytes, room.loaded());
            barrier_await(room.loaded(), phase);
            store_bytes(args.half + at, room.boxes(), bytes);
            stores_commit();
            stores_await_read<0>();
        }
        stores_await();
        order_copies_global();
    }
    __threadfence_system();
    __syncwarp();
    bool last = false;
    if (lane == 0)
        last = atomicAdd(&mine->copied, 1u) == gridDim.x - 1;
    if (!__shfl_sync(0xffffffffu, last, 0) || !may)
        return;
    if (lane == 0)
        mine->copied = 0;
    __threadfence_system();
    if (lane < args.size)
        store_release32(&board_of(args, lane)->ready[args.rank], number); /* pairs with the load in fetch */
}

/* What one thread knows of the boxes that it sends off. */
struct sender {
    int sent[2]; /* boxes of each team so far */
    int open;    /* the box that was sent last, and may not have been read; -1: none */
};

HERE void free_open(const room &room, sender &of) {
    if (of.open >= 0)
        barrier_arrive(&room.box_empty()[of.open]);
    of.open = -1;
}

/* The next box of a team, if it is full. */
HERE bool send_box(const tu_together_args &args, const room &room, sender &of, tile at, int half, bool may) {
    int part = of.sent[half] % TILE_BOXES, slot = of.sent[half] % TU_TOGETHER_BOXES,
        box = half * TU_TOGETHER_BOXES + slot;
    if (!barrier_has(&room.box_full()[box], of.sent[half] / TU_TOGETHER_BOXES & 1))
        return false;
    if (may)
        store_box(&args.out[at.rank], room.boxes() + box * TU_TOGETHER_BOX_BYTES,
                  at.column * TU_TILE_COLUMNS + part * BOX_COLUMNS, at.row * TU_TILE_ROWS + half * 64);
    stores_commit();
    stores_await_read<1>();
    free_open(room, of);
    of.open = box;
    of.sent[half]++;
    return true;
}

HERE void send_boxes(const tu_together_args &args, const room &room, bool may, uint32_t number) {
    int count = tile_count(args), end = TILE_BOXES;
    sender of = { { 0, 0 }, -1 };
    for (int index = (int)blockIdx.x; index < count; index += (int)gridDim.x, end += TILE_BOXES) {
        tile at = tile_at(args, index);
        while (of.sent[0] < end || of.sent[1] < end) {
            bool any = of.sent[0] < end && send_box(args, room, of, at, 0, may);
            any |= of.sent[1] < end && send_box(args, room, of, at, 1, may);
            if (any || of.open < 0)
                continue;
            stores_await_read<0>();
            free_open(room, of);
        }
        stores_await_read<0>();
        free_open(room, of);
        if (!may)
            continue;
        stores_await();
        order_copies_global();
        for (int half = 0; half < 2; half++) /* pairs with the load in add_pieces */
            store_release32(word_of(args, at.rank, half_tile_of(args, at.row, at.column, half), args.rank), number);
    }
    stores_await();
}

HERE void serve(const tu_together_args &args, const room &room, uint32_t number) {
    /* Nobody uses there any more what an earlier call has left. */
    bool may = !args.scatters && !copies(args);
    if (!may)
        may = await_entered(args, number);
    if (copies(args))
        copy_shard(args, room, may, number);
    if (threadIdx.x % 32 != 0)
        return;
    for (int i = 0; i < 2 * TU_TOGETHER_BOXES; i++)
        barrier_arrive(&room.box_empty()[i]);
    count_begun(args, number);
    if (args.scatters)
        send_boxes(args, room, may, number);
}

/* ---- two teams multiply ---- */

/* Where a team is in the rings of stages and of its boxes. */
struct place {
    int stage, phase;
    int box, box_phase;
};

HERE void next_stage(place &at) {
    if (++at.stage == TU_TILE_STAGES) {
        at.stage = 0;
        at.phase ^= 1;
    }
}

/* By a team that has multiplied a stage: to both of a pair, since either fills it in both. */
HERE void free_stage(const room &room, int stage) {
    int thread = threadIdx.x % 128;
    if (thread < cluster_size())
        barrier_arrive_in(&room.empty()[stage], thread);
}

/* A tile of 16-bit floats, or of f8 whose sums are the tensor cores' own: the products of one stage are under way while
 * those of the next are begun. */
template <int Left, int Right, int ByRows>
HERE void multiply_tile(const room &room, float (&sums)[128], place &at, int team, int steps) {
    int last = -1;
    for (int step = 0; step < steps; step++) {
        barrier_await(&room.full()[at.stage], at.phase);
        const uint8_t *left = room.stages + at.stage * TU_TOGETHER_STAGE_BYTES + (team - 1) * 64 * TU_TILE_BYTES,
                      *right = room.stages + at.stage * TU_TOGETHER_STAGE_BYTES + TU_TILE_ROWS * TU_TILE_BYTES;
        products_begin();
#pragma unroll
        for (int i = 0; i < TU_TILE_BYTES / 32; i++)
            multiply<Left, Right, ByRows>(sums, descriptor(left + i * 32, 16, 1024),
                                          ByRows ? descriptor(right + i * 16 * 128, 64 * TU_TILE_BYTES, 1024)
                                                 : descriptor(right + i * 32, 16, 1024),
                                          step > 0 || i > 0);
        products_commit();
        products_await<1>(sums);
        if (last >= 0)
            free_stage(room, last);
        last = at.stage;
        next_stage(at);
    }
    products_await<0>(sums);
    free_stage(room, last);
}

/* A tile of f8: what the tensor cores have made of two stages, and half of the columns, is added to the sums. */
template <int Left, int Right>
HERE void multiply_tile_f8(const room &room, float (&sums)[128], place &at, int team, int steps) {
#pragma unroll
    for (int i = 0; i < 128; i++)
        sums[i] = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
        place second = at;
        next_stage(second);
        barrier_await(&room.full()[at.stage], at.phase);
        barrier_await(&room.full()[second.stage], second.phase);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float parts[64];
            products_begin();
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint8_t *left = room.stages + (k == 0 ? at.stage : second.stage) * TU_TOGETHER_STAGE_BYTES,
                              *right = left + (TU_TILE_ROWS + half * 128) * TU_TILE_BYTES;
                left += (team - 1) * 64 * TU_TILE_BYTES;
#pragma unroll
                for (int i = 0; i < TU_TILE_BYTES / 32; i++)
                    multiply_f8<Left, Right>(parts, descriptor(left + i * 32, 16, 1024),
                                             descriptor(right + i * 32, 16, 1024), k > 0 || i > 0);
                products_commit();
            }
            if (half == 1) {
                products_await<1>(parts);
                free_stage(room, at.stage);
            }
            products_await<0>(parts);
            if (half == 1)
                free_stage(room, second.stage);
#pragma unroll
            for (int i = 0; i < 64; i++)
                sums[half * 64 + i] = __fadd_rn(sums[half * 64 + i], parts[i]);
        }
        at = second;
        next_stage(at);
    }
}

/* ---- and leave what they have made in boxes, or store it ---- */

/* Four matrices of 8 by 8, of the sums of sixteen columns: the lane says where a row of one of them goes. */
template <int Kind> HERE void put_sixteen(uint32_t address, const float *x) {
    store_matrices(address, narrow<Kind>(x[0], x[1]), narrow<Kind>(x[2], x[3]), narrow<Kind>(x[4], x[5]),
                   narrow<Kind>(x[6], x[7]));
}

template <int Kind> HERE void fill_boxes(const room &room, const float (&sums)[128], place &at, int team) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int row = warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
#pragma unroll
    for (int part = 0; part < TILE_BOXES; part++) {
        int box = (team - 1) * TU_TOGETHER_BOXES + at.box;
        uint32_t address = shared_address(room.boxes() + box * TU_TOGETHER_BOX_BYTES) + row * 128;
        barrier_await(&room.box_empty()[box], at.box_phase);
#pragma unroll
        for (int i = 0; i < 4; i++)
            put_sixteen<Kind>(address + ((i * 2 + lane / 16) ^ (row % 8)) * 16, sums + part * 32 + i * 8);
        order_copies_shared();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&room.box_full()[box]);
        if (++at.box == TU_TOGETHER_BOXES) {
            at.box = 0;
            at.box_phase ^= 1;
        }
    }
}

/* Two rows of a lane's sums, and the columns of pair j of a tile. */
HERE int row_of_lane(tile at, int team) {
    return at.row * TU_TILE_ROWS + (team - 1) * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}
HERE int column_of_pair(tile at, int j) {
    return at.column * TU_TILE_COLUMNS + j * 8 + threadIdx.x % 4 * 2;
}

/* The scales of this lane's two rows: on their way while the tile is made. Written by another rank, maybe: the word of
 * its shard was awaited before any of it was read. */
HERE float2 row_scales(const tu_together_args &args, tile at, int team) {
    int row = row_of_lane(at, team);
    const uint32_t *scales = (const uint32_t *)args.row_scales[at.rank];
    return make_float2(__uint_as_float(load_relaxed32(scales + min(row, args.rows - 1) * args.row_step)),
                       __uint_as_float(load_relaxed32(scales + min(row + 8, args.rows - 1) * args.row_step)));
}

/* The scales of a tile's columns come to the first-level cache while it is made. */
HERE void fetch_column_scales(const tu_together_args &args, tile at) {
    int column = min(at.column * TU_TILE_COLUMNS + (int)threadIdx.x % 128 * 2, args.columns - 2);
    bring_near((const float *)args.column_scales + column * args.column_step);
}

HERE void apply_pair(float *x, float2 of_rows, float first, float second) {
    x[0] = __fmul_rn(__fmul_rn(x[0], of_rows.x), first);
    x[1] = __fmul_rn(__fmul_rn(x[1], of_rows.x), second);
    x[2] = __fmul_rn(__fmul_rn(x[2], of_rows.y), first);
    x[3] = __fmul_rn(__fmul_rn(x[3], of_rows.y), second);
}

/* As kernel_scaled has it, and no multiplication and addition in one. */
HERE void apply_scales(const tu_together_args &args, float (&sums)[128], float2 of_rows, tile at) {
    const float *scales = (const float *)args.column_scales, *bias = (const float *)args.bias;
    if (args.column_step == 0) {
        float scale = __ldg(scales);
#pragma unroll
        for (int j = 0; j < 32; j++)
            apply_pair(sums + j * 4, of_rows, scale, scale);
    } else {
#pragma unroll
        for (int j = 0; j < 32; j++) {
            int column = min(column_of_pair(at, j), args.columns - 2);
            apply_pair(sums + j * 4, of_rows, __ldg(scales + column), __ldg(scales + column + 1));
        }
    }
    if (bias == nullptr && args.whole == 0)
        return;
    float whole = args.whole != 0 ? __ldg((const float *)args.whole) : 1;
#pragma unroll
    for (int i = 0; i < 128; i++) {
        int column = min(column_of_pair(at, i / 4), args.columns - 2) + i % 2;
        sums[i] = __fmul_rn(__fadd_rn(sums[i], bias != nullptr ? __ldg(bias + column) : 0), whole);
    }
}

/* Results of a gather, which are this rank's own, in rows of 128 bytes: each warp turns its sixteen rows in a part of
 * the boxes that is its own, 64 columns at a time, in two places by turns. Nobody is waited for: bulk copies would
 * stand behind those that fetch the next tile. */
template <int Kind>
HERE void store_tile(const tu_together_args &args, const room &room, const float (&sums)[128], tile at, int team) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = lane % 16, piece = lane % 8;
    int first = at.row * TU_TILE_ROWS + (team - 1) * 64 + warp * 16, column = at.column * TU_TILE_COLUMNS + piece * 8;
    const uint8_t *mine = room.boxes() + ((team - 1) * 4 + warp) * 2 * WARP_BOX;
    uint32_t address = shared_address(mine) + row * 128;
    uint16_t *to = (uint16_t *)args.results + ((uint64_t)at.rank * args.rows + first) * args.columns + column;
    barrier_await(&room.box_empty()[0], 0); /* the shard was copied through them */
#pragma unroll
    for (int part = 0; part < TILE_BOXES; part++, column += BOX_COLUMNS, to += BOX_COLUMNS) {
        int place = part % 2 * WARP_BOX;
#pragma unroll
        for (int i = 0; i < 4; i++)
            put_sixteen<Kind>(address + place + ((i * 2 + lane / 16) ^ (row % 8)) * 16, sums + part * 32 + i * 8);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int below = i * 4 + lane / 8;
            uint4 eight = *(const uint4 *)(mine + place + below * 128 + (piece ^ (below % 8)) * 16);
            if (first + below < args.rows && column < args.columns)
                store_vector(to + (uint64_t)below * args.columns, eight);
        }
    }
}

/* Results in f32 go to memory as they are: this rank's own. */
HERE void store_wide(const tu_together_args &args, const float (&sums)[128], tile at, int team) {
    int row = row_of_lane(at, team);
    float *to = (float *)args.results + ((uint64_t)at.rank * args.rows + row) * args.columns;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        int column = column_of_pair(at, i / 2), below = i % 2 * 8;
        if (row + below < args.rows && column < args.columns)
            *(float2 *)(to + (uint64_t)below * args.columns + column) = make_float2(sums[i * 2], sums[i * 2 + 1]);
    }
}

/* By each warp that multiplies, in its last tile: it needs nothing of other ranks' any more. */
HERE void tell_used(const room &room) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        barrier_arrive(room.used());
}

template <int Left, int Right, int ByRows, int Fast>
HERE void multiply_tiles(const tu_together_args &args, const room &room, int team, uint32_t number) {
    typedef form<Left, Right, ByRows, Fast> form;
    int steps = steps_of<form>(args), count = tile_count(args);
    place place = { 0, 0, 0, 0 };
    float sums[128];
    for (int index = (int)blockIdx.x; index < count; index += (int)gridDim.x) {
        tile at = tile_at(args, index);
        if constexpr (form::narrow) {
            barrier_await(&room.full()[place.stage], place.phase);
            float2 of_rows = row_scales(args, at, team);
            fetch_column_scales(args, at);
            if constexpr (Fast)
                multiply_tile<Left, Right, 0>(room, sums, place, team, steps);
            else
                multiply_tile_f8<Left, Right>(room, sums, place, team, steps);
            apply_scales(args, sums, of_rows, at);
            if (index + (int)gridDim.x >= count)
                tell_used(room);
            if (args.result == BF16)
                store_tile<BF16>(args, room, sums, at, team);
            else if (args.result == F16)
                store_tile<F16>(args, room, sums, at, team);
            else
                store_wide(args, sums, at, team);
        } else {
            multiply_tile<Left, Right, ByRows>(room, sums, place, team, steps);
            if (index + (int)gridDim.x >= count)
                tell_used(room);
            if (args.scatters)
                fill_boxes<Left>(room, sums, place, team);
            else
                store_tile<Left>(args, room, sums, at, team);
        }
    }
    if constexpr (!form::narrow)
        if (args.scatters)
            add_pieces<Left>(args, number);
}

/* ---- the kernel ---- */

HERE room open_room(uint8_t *raw) {
    room made = { (uint8_t *)(((uintptr_t)raw + 1023) / 1024 * 1024) };
    if (threadIdx.x != 0)
        return made;
    for (int i = 0; i < TU_TILE_STAGES; i++) {
        barrier_open(&made.full()[i], 1);
        barrier_open(&made.empty()[i], 2 * cluster_size());
    }
    for (int i = 0; i < 2 * TU_TOGETHER_BOXES; i++) {
        barrier_open(&made.box_full()[i], 4);
        barrier_open(&made.box_empty()[i], 1);
    }
    barrier_open(made.loaded(), 1);
    barrier_open(made.used(), 8);
    barriers_opened();
    order_copies_shared();
    return made;
}

template <int Left, int Right, int ByRows, int Fast> HERE void run(const tu_together_args &args) {
    typedef form<Left, Right, ByRows, Fast> form;
    extern __shared__ uint8_t raw[];
    __shared__ uint32_t call, fault;
    int team = threadIdx.x / 128, warp = threadIdx.x / 32;
    room room = open_room(raw);
    int begun = 0;
    if (cluster_size() > 1)
        cluster_meet(); /* the mate's barriers are there */
    if (threadIdx.x == 0) {
        prefetch_map(&args.right);
        for (int rank = 0; rank < (args.scatters ? 1 : args.size); rank++)
            prefetch_map(&args.left[rank]);
        await_kernel_before();
        begun = fetch_first<form, ByRows>(args, room);
    } else if (threadIdx.x == 32) {
        await_order(args.group, args.timeout_ns);
        if (cluster_rank() == 0) { /* a pair goes on, or does not, together */
            uint32_t found = has_fault(args.group);
            for (int mate = 0; mate < cluster_size(); mate++)
                store_in(&fault, mate, found);
        }
        call = load_relaxed32(&board_of(args, args.rank)->calls) + 1;
    }
    if (cluster_size() > 1)
        cluster_sync();
    else
        __syncthreads();
    uint32_t number = call;
    if (fault == 0) {
        if (team == 0) {
            give_registers<form::few>();
            if (warp == 2 && blockIdx.x == 0)
                enter(args, number);
            if (threadIdx.x == 0)
                fetch<form, ByRows>(args, room, number, begun);
            else if (warp == 1)
                serve(args, room, number);
            else if constexpr (!form::narrow)
                if (warp > 1 && args.scatters)
                    add_pieces<Left>(args, number);
        } else {
            take_registers<form::many>();
            multiply_tiles<Left, Right, ByRows, Fast>(args, room, team, number);
        }
    } else {
        for (int stage = 0; stage < begun; stage++) /* nothing may be on its way to a block that has ended */
            barrier_await(&room.full()[stage], 0);
    }
    __syncthreads();
    if (cluster_size() > 1)
        cluster_sync(); /* the mate frees stages here too, and may not find this block gone */
    if (warp == 0) {
        if (fault == 0)
            leave(args, number);
        else if (threadIdx.x == 0)
            count_end(args.group);
    }
}

#define KERNEL(name, left, right, by_rows, fast)                                \
    extern "C" __global__ void __launch_bounds__(TU_TOGETHER_THREADS, 1)        \
        kernel_together_##name(const __grid_constant__ tu_together_args args) { \
        run<left, right, by_rows, fast>(args);                                  \
    }
KERNEL(bf16_columns, BF16, BF16, 0, 0)
KERNEL(bf16_rows, BF16, BF16, 1, 0)
KERNEL(f16_columns, F16, F16, 0, 0)
KERNEL(f16_rows, F16, F16, 1, 0)
KERNEL(e4m3_e4m3, E4M3, E4M3, 0, 0)
KERNEL(e4m3_e5m2, E4M3, E5M2, 0, 0)
KERNEL(e5m2_e4m3, E5M2, E4M3, 0, 0)
KERNEL(e5m2_e5m2, E5M2, E5M2, 0, 0)
KERNEL(e4m3_e4m3_fast, E4M3, E4M3, 0, 1)
KERNEL(e4m3_e5m2_fast, E4M3, E5M2, 0, 1)
KERNEL(e5m2_e4m3_fast, E5M2, E4M3, 0, 1)
KERNEL(e5m2_e5m2_fast, E5M2, E5M2, 0, 1)
