/* SPDX-License-Identifier: Apache-2.0
 *
 * One program on every backend: memory of the host (shm), of GPUs (cuda), of NVSHMEM's heap (nvshmem) or of NCCL's
 * windows (nccl). What changes is one name:
 *
 *     tutti run -n 2 ./backends shm
 *
 * and the same with cuda, nvshmem or nccl in its place, where there are GPUs; NCCL wants one for each rank.
 */
#include <stdio.h>
#include <string.h>
#include <tutti/backend.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/work.h>

#define COUNT 1000
#define TRY(call)                      \
    do {                               \
        tutti_status status_ = (call); \
        if (status_)                   \
            return status_;            \
    } while (0)

/* Until everything that was put into the stream is over, on all ranks. */
static tutti_status settle(tutti_group *group, tutti_device device) {
    tutti_call call = TUTTI_CALL_INIT;
    tutti_work *work;
    call.device = device;
    call.work = &work;
    TRY(tutti_barrier(group, &call));
    tutti_status status = tutti_work_wait(work, 0);
    tutti_work_release(work);
    return status;
}

static tutti_status rank_main(tutti_world *world, void *name) {
    tutti_device device = strcmp(name, "shm") == 0 ? TUTTI_CPU : TUTTI_CUDA;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world), next = (rank + 1) % size;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    tutti_call call = TUTTI_CALL_INIT;
    tutti_memory *block;
    tutti_peers *peers;
    float values[COUNT];

    TRY(tutti_backend_open(world, name, NULL)); /* all ranks together */
    TRY(tutti_memory_set_backend(world, device, name));
    options.device = device;
    TRY(tutti_memory_alloc(world, sizeof values, &options, &block));
    TRY(tutti_memory_rendezvous(block, group, &peers));

    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(rank + i);
    TRY(tutti_peers_put(peers, rank, 0, values, sizeof values, NULL));
    call.executor = size > 1 || device != TUTTI_CPU ? name : NULL; /* one rank on the host has nobody to wait for */
    TRY(tutti_all_reduce(group, tutti_memory_data(block), tutti_memory_data(block), COUNT, TUTTI_F32, TUTTI_SUM,
                         &call));
    TRY(settle(group, device));
    TRY(tutti_peers_get(peers, next, 0, values, sizeof values, NULL)); /* what the next rank has */
    TRY(settle(group, device));

    int wrong = 0;
    for (int i = 0; i < COUNT; i++)
        wrong += values[i] != (float)(size * i + size * (size - 1) / 2);
    printf("rank %d of %d on %s: rank %d has %s\n", rank, size, (const char *)name, next,
           wrong == 0 ? "the sum of all" : "something else");
    TRY(settle(group, device));
    tutti_peers_release(peers);
    tutti_memory_release(block);
    return wrong == 0 ? TUTTI_OK : TUTTI_ERROR_BACKEND;
}

int main(int argc, char **argv) {
    return tutti_main(2, rank_main, argc > 1 ? argv[1] : (void *)"shm");
}
