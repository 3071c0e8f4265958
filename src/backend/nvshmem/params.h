/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host side and the kernels of the NVSHMEM backend share.
 *
 * SIGNALS OF PEERS THAT ARE NOT MAPPED. A member's area is, in 64-bit words as NVSHMEM's signals are:
 *
 *     [channels][size] sent      written by the sender
 *     [channels][size] taken     written by the receiver of this member's signals
 *     [channels][size] arrived   barriers that each member came to, written by that member
 *
 * and then what only its owner uses: [channels][size] {sent, taken}, [channels] barriers. The protocol is that of the
 * CUDA backend's signals.
 */
#ifndef TU_NVSHMEM_PARAMS_H
#define TU_NVSHMEM_PARAMS_H

#include <stdint.h>

#include "backend/cuda/params.h"

typedef struct tu_nvshmem_member {
    uint64_t place; /* what stands for the member's area in NVSHMEM's calls: an address of this rank's own heap */
    int32_t pe;
    int32_t unused;
} tu_nvshmem_member;

typedef struct tu_nvshmem_signal_args {
    uint64_t members; /* address of tu_nvshmem_member[size], device memory */
    uint64_t own;     /* this rank's area */
    tu_cuda_group_words group;
    uint64_t answer; /* of a test: device address of a pinned word, 1 or 0 */
    uint64_t timeout_ns;
    int32_t rank, size, channel, channels;
    int32_t peer;
    int32_t kind; /* TU_CUDA_SIGNAL_… */
    uint32_t operation;
    int32_t pe;           /* of a number that is set: whose it is … */
    uint64_t word, value; /* … or one that is awaited: its place in this rank's heap, and what it shall be */
} tu_nvshmem_signal_args;

#endif
