/* SPDX-License-Identifier: Apache-2.0
 *
 * A group with members that NVSHMEM does not map: what its collectives need on this rank.
 */
#ifndef TU_NVSHMEM_APART_H
#define TU_NVSHMEM_APART_H

#include "inner.h"

typedef struct tu_nvshmem_apart {
    tu_nvshmem *nvshmem;
    tutti_group *group;
    int rank, size;
    tu_cuda_group *on; /* the group on this device: faults, order */
    int slab;          /* of the area … */
    size_t offset;     /* … and where it lies there */
    char *area;        /* NULL: not carved */
    uint64_t bytes;
    bool used;                            /* something was launched */
    tu_nvshmem_boxes collective, message; /* in the area */
    uint64_t stage;                       /* in the area: a share of each member */
    uint64_t chunk, share;
    CUdeviceptr own; /* what this rank alone uses: all of the following */
    CUdeviceptr members, factors, told, scratch, lists;
    tu_cuda_turn turn; /* of two host threads */
    uint64_t capture;  /* that the stream of the call at hand is in; 0: none. Under the turn */
} tu_nvshmem_apart;

/* Collective and bounded; fails on all members alike. */
tutti_status tu_nvshmem_apart_make(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, tu_nvshmem_apart **made);
void tu_nvshmem_apart_end(tu_nvshmem_apart *apart);
tutti_status tu_nvshmem_apart_run(tu_nvshmem_apart *apart, tu_device_task *task);
tutti_status tu_nvshmem_apart_check(tu_nvshmem_apart *apart);

#endif
