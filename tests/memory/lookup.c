/* SPDX-License-Identifier: Apache-2.0
 *
 * What the collectives ask: from a pointer to its block, and to where the peers have theirs; and that a remembered
 * answer never outlives what it was about.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/pool.h>

#include "../harness.h"
#include "memory/memory.h"

static tu_memory_group *state_of(tutti_group *group) {
    tu_memory_group *state;
    CHECK_OK(tu_memory_group_get(group, &state));
    return state;
}

TEST_WORLD(a_pointer_leads_to_its_block_and_its_peers, 2) {
    tutti_group *group = tutti_world_group(world), *second;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &second));
    tu_memory_group *state = state_of(group), *other_state = state_of(second);
    CHECK(state_of(group) == state);
    tutti_memory *memory;
    tutti_peers *peers;
    tu_symmetric found;
    int private_word;
    CHECK_OK(tutti_memory_alloc(world, 1000, NULL, &memory));
    char *data = tutti_memory_data(memory);
    for (int round = 0; round < 3; round++) { /* first looked up, then remembered */
        CHECK(!tu_symmetric_find(state, &private_word, 4, &found));
        CHECK(tu_symmetric_find(state, data + 8, 992, &found));
        CHECK(found.memory == memory && found.offset == 8 && found.peers == NULL && found.buffers == NULL &&
              found.index == 0);
        CHECK(!tu_symmetric_find(state, data + 8, 993, &found)); /* beyond its end */
        CHECK(!tu_symmetric_find(state, data + 1000, 0, &found));
    }
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    for (int round = 0; round < 3; round++) {
        CHECK(tu_symmetric_find(state, data + 8, 4, &found));
        CHECK(found.peers == peers && found.index != 0);
        for (int member = 0; member < 2; member++)
            CHECK(found.buffers[member] == tutti_peers_buffer(peers, member));
        CHECK(tu_symmetric_peers(state, found.index) == peers);
        CHECK(tu_symmetric_peers(state, found.index + 1) == NULL);
        CHECK(tu_symmetric_find(other_state, data + 8, 4, &found)); /* another group knows the block, not the peers */
        CHECK(found.memory == memory && found.peers == NULL);
    }
    uint32_t index = peers->index;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    *(uint32_t *)tutti_peers_buffer(peers, 1 - tutti_peers_rank(peers)) = index;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_EQ(*(uint32_t *)data, index); /* the same on all members */
    tutti_peers_release(peers);
    CHECK(tu_symmetric_peers(state, index) == peers); /* still cached */
    tutti_memory_release(memory);
    CHECK(tu_symmetric_peers(state, index) == NULL);
    for (int round = 0; round < 3; round++)
        CHECK(!tu_symmetric_find(state, data + 8, 4, &found));
    tutti_group_release(second);
}

TEST_WORLD(an_answer_is_forgotten_with_its_block, 1) {
    tu_memory_group *state = state_of(tutti_world_group(world));
    tu_symmetric found;
    for (int round = 0; round < 200; round++) { /* the same addresses come back with other sizes */
        tutti_memory *memory;
        size_t bytes = (size_t)(round * 7919 % 3000) + 1;
        CHECK_OK(tutti_memory_alloc(world, bytes, NULL, &memory));
        char *data = tutti_memory_data(memory);
        CHECK(tu_symmetric_find(state, data, bytes, &found) && found.memory == memory);
        CHECK(!tu_symmetric_find(state, data, bytes + 1, &found));
        tutti_memory_release(memory);
        CHECK(!tu_symmetric_find(state, data, 1, &found));
    }
}

TEST_WORLD(a_pools_used_block_has_no_peers_until_it_has_met_again, 1) {
    tu_memory_group *state = state_of(tutti_world_group(world));
    tutti_pool *pool;
    tutti_memory *memory;
    tutti_peers *peers;
    tu_symmetric found;
    CHECK_OK(tutti_pool_new(world, NULL, &pool));
    CHECK_OK(tutti_pool_alloc(pool, 64, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    void *data = tutti_memory_data(memory);
    CHECK(tu_symmetric_find(state, data, 64, &found) && found.peers == peers);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    CHECK_OK(tutti_pool_alloc(pool, 64, &memory));
    CHECK(tutti_memory_data(memory) == data);
    CHECK(tu_symmetric_find(state, data, 64, &found) && found.peers == NULL);
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    CHECK(tu_symmetric_find(state, data, 64, &found) && found.peers == peers);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_pool_release(pool);
}

/* Several threads ask while another allocates and releases: what is asked for lives all the time. */
typedef struct asking {
    tu_memory_group *state;
    tutti_memory *memory;
    _Atomic bool stop;
} asking;

static void *ask(void *argument) {
    asking *work = argument;
    char *data = tutti_memory_data(work->memory);
    tu_symmetric found;
    for (size_t i = 0; !atomic_load(&work->stop); i++) {
        size_t offset = i * 64 % 4096;
        CHECK(tu_symmetric_find(work->state, data + offset, 64, &found));
        CHECK(found.memory == work->memory && found.offset == offset);
    }
    return NULL;
}

TEST_WORLD(answers_are_right_while_other_threads_allocate_and_release, 1) {
    asking work = { .state = state_of(tutti_world_group(world)) };
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &work.memory));
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, ask, &work), 0);
    for (int i = 0; i < 500; i++) {
        tutti_memory *memory;
        CHECK_OK(tutti_memory_alloc(world, 100, NULL, &memory));
        tutti_memory_release(memory);
    }
    atomic_store(&work.stop, true);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    tutti_memory_release(work.memory);
}

/* ---- indices ---- */

static uint32_t index_of(tutti_world *world, tutti_memory *memory) {
    tu_memory_group *state;
    tu_symmetric found;
    CHECK_OK(tu_memory_group_get(tutti_world_group(world), &state));
    CHECK(tu_symmetric_find(state, tutti_memory_data(memory), 1, &found));
    CHECK(found.peers != NULL && tu_symmetric_peers(state, found.index) == found.peers);
    return found.index;
}

TEST_WORLD_THREADS(indices_of_rendezvous_are_used_again, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *held[3], *memory;
    tutti_peers *held_peers[3], *peers;
    int rounds = test_sanitized() ? 50 : 1200;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tutti_memory_alloc(world, 64, NULL, &held[i]));
        CHECK_OK(tutti_memory_rendezvous(held[i], group, &held_peers[i]));
        CHECK_EQ(index_of(world, held[i]), i + 1);
    }
    for (int round = 0; round < rounds; round++) {
        CHECK_OK(tutti_memory_alloc(world, 64, NULL, &memory));
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        CHECK(index_of(world, memory) <= 5); /* the other rank may not have let go of the last one yet */
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(index_of(world, held[i]), i + 1);
        tutti_peers_release(held_peers[i]);
        tutti_memory_release(held[i]);
    }
}
