/* SPDX-License-Identifier: Apache-2.0
 *
 * What ranks say to each other about where their buffers lie is not believed: an address or a length that does not fit
 * into the block that it names is an error, and nothing is read or written there.
 */
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"
#include "collective/collective.h"
#include "collective/parts.h"

#define COUNT 1000

static void refuse(tu_collective *state, tu_task *task, tu_reference reference, tutti_status expected) {
    unsigned char *address;
    state->references[0] = reference;
    CHECK_STATUS(tu_resolve_in(state, task, 0, &address), expected);
    CHECK_STATUS(tu_resolve_out(state, task, 0, &address), expected);
    CHECK_MESSAGE("rank 0");
}

TEST_WORLD_THREADS(an_address_that_lies_outside_of_its_block_is_refused, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 2 * COUNT * sizeof(float), NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_all_reduce(group, tutti_memory_data(memory), tutti_memory_data(memory), COUNT, TUTTI_F32, TUTTI_SUM,
                              NULL));
    tu_collective *state;
    CHECK_OK(tu_collective_get(group, &state));
    tu_task task = { .state = state, .row = tu_operation_row_of(TU_OPERATION_ALL_REDUCE), .element = sizeof(float) };
    task.info.operation = TU_OPERATION_ALL_REDUCE;
    task.info.count = COUNT;
    uint32_t index = peers->index;
    uint64_t bytes = 2 * COUNT * sizeof(float);
    unsigned char *address;
    state->references[0] = (tu_reference){ .in_index = index, .in_offset = bytes / 2 };
    CHECK_OK(tu_resolve_in(state, &task, 0, &address)); /* the last that fits */
    CHECK(address == (unsigned char *)tutti_peers_buffer(peers, 0) + bytes / 2);
    static const uint64_t beyond[] = { 4, 4000, UINT64_C(1) << 40, UINT64_MAX - COUNT, UINT64_MAX };
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++) {
        uint64_t offset = beyond[i] < bytes ? bytes / 2 + beyond[i] : beyond[i];
        refuse(state, &task,
               (tu_reference){ .in_index = index, .out_index = index, .in_offset = offset, .out_offset = offset },
               TUTTI_ERROR_PROTOCOL);
    }
    refuse(state, &task, (tu_reference){ .in_index = 77777, .out_index = UINT32_MAX }, TUTTI_ERROR_MISMATCH);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}
