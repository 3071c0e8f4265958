/* SPDX-License-Identifier: Apache-2.0
 *
 * all_gather, broadcast, gather, scatter, all_to_all, permute and their v-forms: everybody pulls what is for it.
 *
 * Member p has send_bytes[r] bytes for member r. Both sides cut that range among the thread blocks alike, so block b
 * reads from its peers only what their block b staged. The sender tells how many bytes it has; another number than
 * expected is a mismatch.
 */
#include "device.cuh"

/* Pulls bytes [skip, skip + share) of what each peer has for this rank. */
static __device__ void pull(const tu_cuda_move_args &args, uint64_t skip, uint64_t share, bool staged) {
    const tu_cuda_meeting &m = args.meeting;
    for (int step = 0; step < m.size; step++) { /* each rank begins with another peer, which spreads the traffic */
        int p = (m.rank + step) % m.size;
        uint64_t bytes = args.receive_bytes[p], skipped = min(skip, bytes), count = min(share, bytes - skipped);
        const tu_cuda_inbox *inbox = inbox_of(m, m.rank, p);
        const uint8_t *source = staged && inbox->source == 0 ? resolve(m, p, args.stage_code) + (uint64_t)m.rank * share
                                                             : resolve(m, p, inbox->source) + inbox->offset + skipped;
        uint8_t *target = (uint8_t *)args.out + args.receive_offset[p] + skipped;
        piece mine = piece_of(staged ? share : count, count, 16);
        if (source != target)
            copy_bytes(target + mine.from, source + mine.from, mine.to - mine.from);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tutti_move(const __grid_constant__ tu_cuda_move_args args) {
    const tu_cuda_meeting &m = args.meeting;
    __shared__ unsigned long long longest;
    meeting_epoch epoch(m);
    if (threadIdx.x == 0)
        longest = 0;
    bool met = meet(m, epoch, [&](tu_cuda_inbox *inbox, int peer) {
        inbox->source = args.source;
        inbox->offset = args.send_offset[peer];
        inbox->count = args.send_bytes[peer];
        inbox->longest = args.longest;
    });
    int good = 1, direct = 1;
    if (met && (int)threadIdx.x < m.size) {
        const tu_cuda_inbox *inbox = inbox_of(m, m.rank, threadIdx.x);
        atomicMax(&longest, (unsigned long long)inbox->longest);
        direct = inbox->source != 0;
        if (inbox->count != args.receive_bytes[threadIdx.x]) {
            raise_fault(m.fault, m.host_fault, TU_CUDA_FAULT_MISMATCH, threadIdx.x, m.signature, m.signature,
                        m.operation, 0, m.sequence);
            good = 0;
        }
    }
    good = __syncthreads_and(good && met);
    direct = __syncthreads_and(direct);
    if (good && direct) {
        pull(args, 0, UINT64_MAX, false);
        meet(m, epoch);
    } else if (good) {
        const uint64_t share = args.stage_bytes / m.size;
        for (uint64_t skip = 0; skip < longest; skip += share) {
            for (int p = 0; args.source == 0 && p < m.size; p++) {
                uint64_t skipped = min(skip, args.send_bytes[p]), count = min(share, args.send_bytes[p] - skipped);
                piece mine = piece_of(share, count, 16);
                copy_bytes((uint8_t *)args.stage + (uint64_t)p * share + mine.from,
                           (const uint8_t *)args.in + args.send_offset[p] + skipped + mine.from, mine.to - mine.from);
            }
            if (!meet(m, epoch))
                break;
            pull(args, skip, share, true);
            if (!meet(m, epoch))
                break;
        }
    }
    epoch.keep();
}

/* A barrier of all ranks on their streams. */
extern "C" __global__ void tutti_meet(const __grid_constant__ tu_cuda_meeting m) {
    meeting_epoch epoch(m);
    meet(m, epoch);
    epoch.keep();
}
