/* SPDX-License-Identifier: Apache-2.0
 *
 * all_gather, broadcast, gather, scatter, all_to_all, permute and their v-forms: everybody pulls what is for it.
 *
 * Member p has send_bytes[r] bytes for member r. Both sides cut that range among the thread blocks alike, so block b
 * reads from its peers only what their block b staged. The sender tells how many bytes it has; another number than
 * expected is a mismatch.
 */
#include "device.cuh"

static __device__ __forceinline__ const tu_cuda_move_part &part_of(const tu_cuda_move_args &args, int member) {
    return args.more != 0 ? ((const tu_cuda_move_part *)args.more)[member] : args.parts[member];
}

/* Pulls bytes [skip, skip + share) of what each peer has for this rank. */
static __device__ void pull(const tu_cuda_move_args &args, uint64_t skip, uint64_t share, bool staged) {
    const tu_cuda_meeting &meeting = args.meeting;
    for (int step = 0; step < meeting.size;
         step++) { /* each rank begins with another peer, which spreads the traffic */
        int peer = (meeting.rank + step) % meeting.size;
        uint64_t bytes = part_of(args, peer).receive_bytes, skipped = min(skip, bytes),
                 count = min(share, bytes - skipped);
        const tu_cuda_inbox *inbox = inbox_of(meeting, meeting.rank, peer);
        const uint8_t *source = staged && inbox->source == 0
                                    ? resolve(meeting, peer, args.stage_code) + (uint64_t)meeting.rank * share
                                    : resolve(meeting, peer, inbox->source) + inbox->offset + skipped;
        uint8_t *target = (uint8_t *)args.out + part_of(args, peer).receive_offset + skipped;
        piece mine = piece_of(staged ? share : count, count, 16);
        if (source != target)
            copy_bytes(target + mine.from, source + mine.from, mine.to - mine.from);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tutti_move(const __grid_constant__ tu_cuda_move_args args) {
    const tu_cuda_meeting &meeting = args.meeting;
    __shared__ unsigned long long longest;
    meeting_epoch epoch(meeting);
    if (threadIdx.x == 0)
        longest = 0;
    bool met = meet(meeting, epoch, [&](tu_cuda_inbox *inbox, int peer) {
        inbox->source = args.source;
        inbox->offset = part_of(args, peer).send_offset;
        inbox->count = part_of(args, peer).send_bytes;
        inbox->longest = args.longest;
    });
    int good = 1, direct = 1;
    if (met && (int)threadIdx.x < meeting.size) {
        const tu_cuda_inbox *inbox = inbox_of(meeting, meeting.rank, threadIdx.x);
        atomicMax(&longest, (unsigned long long)inbox->longest);
        direct = inbox->source != 0;
        if (inbox->count != part_of(args, threadIdx.x).receive_bytes) {
            raise_fault(meeting.group, { TU_CUDA_FAULT_MISMATCH, threadIdx.x, meeting.signature, meeting.signature,
                                         meeting.operation, 0, meeting.sequence });
            good = 0;
        }
    }
    good = epoch.whole = __syncthreads_and(good && met) != 0;
    direct = __syncthreads_and(direct);
    if (good && direct)
        pull(args, 0, UINT64_MAX, false);
    if (good && (direct || longest == 0)) { /* of nothing, too: a peer's next operation writes into the inbox */
        meet(meeting, epoch);
    } else if (good) {
        const uint64_t share = share_of(longest, args.stage_bytes / meeting.size, 16);
        for (uint64_t skip = 0; skip < longest; skip += share) {
            for (int peer = 0; args.source == 0 && peer < meeting.size; peer++) {
                const tu_cuda_move_part &part = part_of(args, peer);
                uint64_t skipped = min(skip, part.send_bytes), count = min(share, part.send_bytes - skipped);
                piece mine = piece_of(share, count, 16);
                copy_bytes((uint8_t *)args.stage + (uint64_t)peer * share + mine.from,
                           (const uint8_t *)args.in + part.send_offset + skipped + mine.from, mine.to - mine.from);
            }
            if (!meet(meeting, epoch))
                break;
            pull(args, skip, share, true);
            if (!meet(meeting, epoch))
                break;
        }
    }
    epoch.keep(meeting);
}

/* A barrier of all ranks on their streams. */
extern "C" __global__ void tutti_meet(const __grid_constant__ tu_cuda_meeting meeting) {
    meeting_epoch epoch(meeting);
    meet(meeting, epoch);
    epoch.keep(meeting);
}

/* Bytes by a kernel: a copy engine's queue is shared by all streams of a context, and a copy of one rank must not stand
 * behind another's that waits for it. */
extern "C" __global__ void __launch_bounds__(THREADS, 2) tutti_copy(const __grid_constant__ tu_cuda_copy_args args) {
    piece mine = piece_of(args.bytes, args.bytes, 16);
    copy_bytes((uint8_t *)args.to + mine.from, (const uint8_t *)args.from + mine.from, mine.to - mine.from);
}

/* Rows of several tiles, dealt out to all blocks. */
extern "C" __global__ void __launch_bounds__(THREADS, 2) tutti_tiles(const __grid_constant__ tu_cuda_tiles_args args) {
    await_order(args.group, args.timeout_ns);
    const uint64_t count = has_fault(args.group) ? 0 : args.count; /* the meeting before may have failed */
    for (uint64_t i = 0; i < count; i++) {
        const tu_cuda_tile &tile = args.tiles[i];
        if (tile.rows < gridDim.x) { /* every row by all */
            uint64_t from = cut(tile.bytes, blockIdx.x, gridDim.x, 16),
                     to = cut(tile.bytes, blockIdx.x + 1, gridDim.x, 16);
            for (uint64_t row = 0; row < tile.rows; row++)
                copy_bytes((uint8_t *)tile.to + row * tile.to_pitch + from,
                           (const uint8_t *)tile.from + row * tile.from_pitch + from, to - from);
            continue;
        }
        for (uint64_t row = blockIdx.x; row < tile.rows; row += gridDim.x)
            copy_bytes((uint8_t *)tile.to + row * tile.to_pitch, (const uint8_t *)tile.from + row * tile.from_pitch,
                       tile.bytes);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        count_end(args.group);
}

/* Order between streams: this one goes on when what other streams have of the group is over. */
extern "C" __global__ void tutti_follow(const __grid_constant__ tu_cuda_follow_args args) {
    const uint64_t *ended = &((const tu_cuda_words *)args.group.words)->ended;
    uint64_t deadline = 0;
    for (uint32_t spins = 0; load_acquire64_gpu(ended) < args.ended; spins++) { /* pairs with count_end */
        if ((spins & 63) != 63)
            continue;
        if (has_fault(args.group))
            return;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + args.timeout_ns;
        if (now > deadline) {
            raise_fault(args.group,
                        { TU_CUDA_FAULT_ORDER, (uint32_t)args.rank, 0, 0, args.operation, 0, args.sequence });
            return;
        }
    }
}

/* Streams that use it on one word are ordered among each other: it has one writer. */
extern "C" __global__ void tutti_mark(const __grid_constant__ tu_cuda_mark_args args) {
    uint64_t *word = (uint64_t *)args.word;
    store_release64(word, *(volatile uint64_t *)word + 1); /* pairs with the loads of a watcher on the host */
}
