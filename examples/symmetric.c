/* SPDX-License-Identifier: Apache-2.0
 *
 * Four ranks write into each other's memory: once as threads, once as processes, the same program.
 */
#include <stdio.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#define TRY(call)                      \
    do {                               \
        tutti_status status_ = (call); \
        if (status_)                   \
            return status_;            \
    } while (0)

static tutti_status greet(tutti_world *world, void *kind) {
    tutti_memory *block;
    tutti_peers *peers;
    int rank = tutti_world_rank(world), size = tutti_world_size(world), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    TRY(tutti_memory_alloc(world, 4096, NULL, &block));                    /* local */
    TRY(tutti_memory_rendezvous(block, tutti_world_group(world), &peers)); /* everybody maps everybody's */
    snprintf(tutti_peers_buffer(peers, next), 4096, "%d greets %d", rank,
             next);                                /* a plain store, into the next rank's block */
    TRY(tutti_peers_signal(peers, next, 0, NULL)); /* after what was stored before */
    TRY(tutti_peers_wait_signal(peers, before, 0, NULL));
    printf("%s, rank %d: %s\n", (const char *)kind, rank, (const char *)tutti_memory_data(block));
    TRY(tutti_peers_barrier(peers, 0, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(block);
    return TUTTI_OK;
}

int main(void) {
    if (tutti_spawn(TUTTI_SPAWN_THREADS, 4, greet, (void *)"threads") ||
        tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, greet, (void *)"processes")) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 1;
    }
    return 0;
}
