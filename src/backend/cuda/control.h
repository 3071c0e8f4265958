/* SPDX-License-Identifier: Apache-2.0
 *
 * What the collectives of a group need on a device: made by control.c, used by collective.c.
 */
#ifndef TU_CUDA_CONTROL_H
#define TU_CUDA_CONTROL_H

#include "cuda.h"

#define TU_CUDA_THREADS 512 /* of a thread block */
#define TU_CUDA_STAGE ((uint64_t)16 << 20)

/* Ranks that are threads of one process launch together: nobody launches an operation before all have come to it, and
 * nobody goes on before all have launched it. Streams share queues of the hardware; what a rank puts into its stream
 * behind a kernel that waits must not stand before another rank's kernel, for which the first one waits. The same goes
 * for calls that make the driver wait for the device. */
typedef struct tu_cuda_lockstep {
    _Atomic uint64_t arrived;  /* before a launch, by all ranks together */
    _Atomic uint64_t launched; /* after it */
    _Atomic uint32_t references;
    uint32_t count;
    /* [from][to] {sent by `from`, received by `to`}: launches of messages. Only two ranks come to one; each goes on
     * when the other has launched what its kernel waits for (tu_cuda_hold). */
    _Atomic uint32_t messages[];
} tu_cuda_lockstep;

/* Where the parts of a control block lie; the same on all members. */
typedef struct tu_cuda_layout {
    uint64_t inbox, packets, sent, taken, slots, stage, scratch, message_stage;
    uint64_t table, epochs, packet_epochs, counters, vdev, lists; /* used by the owner alone */
    uint64_t bytes;
    uint64_t message_share; /* of message_stage, for one receiver */
    uint64_t packet_room;   /* packets of one source */
} tu_cuda_layout;

typedef struct tu_cuda_collective {
    tu_cuda *cuda;
    tutti_group *group;
    int rank, size;
    int device_index;
    tu_cuda_device *device;
    tu_cuda_group *on; /* the group on this device: faults, order */
    tu_cuda_layout layout;
    tu_backend_block control;
    tu_backend_map map;
    uint64_t base, stride;     /* of the control blocks */
    uint64_t own;              /* this rank's, as kernels reach it */
    tu_cuda_mapping *uploaded; /* by index: what the table on the device says; base 0: nothing */
    int blocks;                /* that every member can hold resident */
    tu_cuda_lockstep *step;    /* with the other ranks of this process; NULL: none */
    bool *near;                /* which are those, on this device */
    bool together;             /* all members are on this device, whose kernels can overlap */
    uint64_t steps;
    tu_cuda_turn turn; /* of two host threads; over everything below and the steps */
    uint64_t capture;  /* that the stream of the call at hand is in; 0: none */
} tu_cuda_collective;

/* Collective and bounded. */
tutti_status tu_cuda_collective_make(void *state, tutti_group *group, int *device_index, int64_t deadline, void **made);
void tu_cuda_collective_end(void *collective);

#endif
