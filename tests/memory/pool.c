/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools: same-size blocks come back at the same address with clean pads and mailboxes, and meet again cheaply and
 * rightly.
 */
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/pool.h>

#include "../harness.h"

#define LONG TUTTI_OPTIONS(tutti_call, .timeout_ns = 60000000000)

static tutti_pool *make_pool(tutti_world *world) {
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, NULL, &pool));
    return pool;
}

static tutti_memory *take(tutti_pool *pool, size_t bytes) {
    tutti_memory *memory;
    CHECK_OK(tutti_pool_alloc(pool, bytes, &memory));
    return memory;
}

TEST_WORLD(a_freed_block_is_given_out_again_at_the_same_address, 1) { /* spec: test_mempool_storage_reuse */
    tutti_pool *pool = make_pool(world);
    tutti_memory *memory = take(pool, 5000);
    void *data = tutti_memory_data(memory);
    memset(tutti_memory_signal_pad(memory), 0xff, tutti_memory_pad_bytes(memory));
    CHECK(tutti_memory_find(world, data) == memory);
    tutti_memory_release(memory);
    CHECK(tutti_memory_find(world, data) == NULL);
    tutti_memory *other = take(pool, 5001);
    CHECK(tutti_memory_data(other) != data); /* another size is another block */
    memory = take(pool, 5000);
    CHECK(tutti_memory_data(memory) == data);
    const unsigned char *pad = tutti_memory_signal_pad(memory);
    for (size_t i = 0; i < tutti_memory_pad_bytes(memory); i++)
        CHECK_EQ(pad[i], 0);
    tutti_memory *third = take(pool, 5000);
    CHECK(tutti_memory_data(third) != data);
    tutti_pool_statistics statistics = TUTTI_POOL_STATISTICS_INIT;
    CHECK_OK(tutti_pool_query(pool, &statistics));
    CHECK_EQ(statistics.used_blocks, 3);
    CHECK_EQ(statistics.used_bytes, 15001);
    CHECK_EQ(statistics.idle_blocks, 0);
    CHECK_EQ(statistics.reused, 1);
    tutti_memory_release(memory);
    tutti_memory_release(third);
    CHECK(tutti_memory_data(memory = take(pool, 5000)) != data); /* the last freed comes first */
    CHECK_OK(tutti_pool_query(pool, &statistics));
    CHECK_EQ(statistics.idle_blocks, 1);
    CHECK_EQ(statistics.idle_bytes, 5000);
    tutti_pool_trim(pool);
    CHECK_OK(tutti_pool_query(pool, &statistics));
    CHECK_EQ(statistics.idle_blocks, 0);
    tutti_memory_release(memory);
    tutti_memory_release(other);
    tutti_pool_release(pool);
}

TEST_WORLD(blocks_outlive_their_pool, 1) {
    tutti_pool *pool = make_pool(world);
    tutti_memory *memory = take(pool, 100), *idle = take(pool, 100);
    tutti_memory_release(idle);
    tutti_pool_release(pool);
    memset(tutti_memory_data(memory), 1, 100);
    tutti_memory_release(memory);
    tutti_pool_release(NULL);
}

TEST_WORLD(a_pool_ends_with_its_last_reference, 1) {
    tutti_pool *pool;
    tutti_memory *memory;
    CHECK_OK(tutti_pool_new(world, NULL, &pool));
    CHECK(tutti_pool_keep(pool) == pool && tutti_pool_keep(NULL) == NULL);
    CHECK(tutti_pool_device(pool) == TUTTI_CPU && tutti_pool_device(NULL) == 0);
    tutti_pool_release(pool);
    CHECK_OK(tutti_pool_alloc(pool, 100, &memory)); /* it lives */
    tutti_memory_release(memory);
    tutti_pool_statistics statistics = TUTTI_POOL_STATISTICS_INIT;
    CHECK_OK(tutti_pool_query(pool, &statistics));
    CHECK(statistics.idle_blocks == 1 && statistics.used_blocks == 0);
    tutti_pool_release(pool);
}

TEST_WORLD(a_used_block_meets_again_with_clean_mailboxes, 3) { /* spec: test_mempool_recycled_alloc_signal_pad */
    tutti_pool *pool = make_pool(world);
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), next = (rank + 1) % 3, before = (rank + 2) % 3;
    void *first = NULL;
    tutti_peers *handle = NULL;
    for (int round = 0; round < 5; round++) {
        tutti_memory *memory = take(pool, (size_t)16 << 10);
        tutti_peers *peers;
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        if (round == 0) {
            first = tutti_memory_data(memory);
            handle = peers;
        }
        CHECK(tutti_memory_data(memory) == first && peers == handle); /* the old mapping serves */
        bool arrived;
        CHECK_OK(tutti_peers_test_signal(peers, before, 0, &arrived));
        CHECK(!arrived); /* what the last user left in the mailbox is gone */
        for (int i = 0; i <= round; i++)
            CHECK_OK(tutti_peers_barrier(peers, i, LONG));
        *(int *)tutti_peers_buffer(peers, next) = 10 * round + rank;
        CHECK_OK(tutti_peers_signal(peers, next, 1, LONG));
        CHECK_OK(tutti_peers_wait_signal(peers, before, 1, LONG));
        CHECK_EQ(*(int *)tutti_memory_data(memory), 10 * round + before);
        CHECK_OK(tutti_peers_signal(peers, next, 0, LONG)); /* left behind */
        CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    tutti_pool_release(pool);
}

TEST_WORLD(ranks_that_free_in_another_order_still_meet_rightly, 2) {
    tutti_pool *pool = make_pool(world);
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    for (int round = 0; round < 4; round++) {
        tutti_memory *memories[2];
        tutti_peers *peers[2];
        for (int i = 0; i < 2; i++) {
            memories[i] = take(pool, 64);
            CHECK_OK(tutti_memory_rendezvous(memories[i], group, &peers[i]));
        }
        for (int i = 0; i < 2; i++)
            ((int *)tutti_peers_buffer(peers[i], 1 - rank))[0] = 1000 * round + 10 * i + rank;
        CHECK_OK(tutti_peers_barrier(peers[0], 0, LONG));
        for (int i = 0; i < 2; i++)
            CHECK_EQ(*(int *)tutti_memory_data(memories[i]), 1000 * round + 10 * i + 1 - rank);
        CHECK_OK(tutti_peers_barrier(peers[1], 0, LONG));
        for (int i = 0; i < 2; i++) {
            int which = rank == 1 && round % 2 == 0 ? 1 - i : i;
            tutti_peers_release(peers[which]);
            tutti_memory_release(memories[which]);
        }
    }
    tutti_pool_release(pool);
}

TEST_WORLD(a_handle_that_is_still_held_is_not_given_to_the_next_user, 2) {
    tutti_pool *pool = make_pool(world);
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = take(pool, 64);
    tutti_peers *held, *fresh;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &held));
    tutti_memory_release(memory);
    memory = take(pool, 64);
    CHECK_OK(tutti_memory_rendezvous(memory, group, &fresh));
    CHECK(fresh != held);
    CHECK_OK(tutti_peers_barrier(fresh, 0, LONG));
    CHECK_OK(tutti_peers_barrier(held, 0, LONG)); /* both work, each with mailboxes of its own */
    tutti_peers_release(held);
    CHECK_OK(tutti_peers_barrier(fresh, 0, LONG));
    tutti_peers_release(fresh);
    tutti_memory_release(memory);
    tutti_pool_release(pool);
}

TEST_WORLD(a_large_block_of_a_pool_meets, 2) { /* spec: test_mempool_large_alloc_barrier */
    tutti_pool *pool = make_pool(world);
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory = take(pool, (size_t)16 << 20);
        tutti_peers *peers;
        CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
        CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
        ((char *)tutti_peers_buffer(peers, 1 - tutti_peers_rank(peers)))[(16 << 20) - 1] = (char)(1 + round);
        CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
        CHECK_EQ(((char *)tutti_memory_data(memory))[(16 << 20) - 1], 1 + round);
        CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    tutti_pool_release(pool);
}

TEST_WORLD(a_pool_refuses_what_it_cannot_do, 1) {
    tutti_pool *pool;
    tutti_memory *memory;
    CHECK_STATUS(tutti_pool_new(NULL, NULL, &pool), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_pool_new(world, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_pool_new(world, TUTTI_OPTIONS(tutti_memory_options, .persistent = true), &pool),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_pool_new(world, TUTTI_OPTIONS(tutti_memory_options, .alignment = 3), &pool),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_pool_alloc(NULL, 1, &memory), TUTTI_ERROR_ARGUMENT);
    pool = make_pool(world);
    CHECK_STATUS(tutti_pool_alloc(pool, (size_t)1 << 46, &memory), TUTTI_ERROR_MEMORY);
    CHECK_STATUS(tutti_pool_alloc(pool, 1, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_pool_query(pool, &(tutti_pool_statistics){ .size = 0 }), TUTTI_ERROR_ARGUMENT);
    tutti_pool_release(pool);
}

static tutti_status use_a_pool(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK)
        return status;
    tutti_pool *pool = NULL;
    status = tutti_pool_new(world, NULL, &pool);
    for (int i = 0; i < 2 && status == TUTTI_OK; i++) {
        tutti_memory *one = NULL, *two = NULL;
        tutti_peers *peers = NULL;
        status = tutti_pool_alloc(pool, 100, &one);
        if (status == TUTTI_OK)
            status = tutti_pool_alloc(pool, 200, &two);
        if (status == TUTTI_OK)
            status = tutti_memory_rendezvous(two, tutti_world_group(world), &peers);
        tutti_peers_release(peers);
        tutti_memory_release(one);
        tutti_memory_release(two);
    }
    tutti_pool_release(pool);
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? status : closed;
}

TEST(the_nth_failure_in_a_pool_leaves_nothing_behind) {
    test_fail_each(NULL, use_a_pool, NULL);
}

TEST(a_pool_refuses_a_persistent_id_and_a_stream) {
    tutti_world *world;
    tutti_pool *pool;
    int stream;
    CHECK_OK(tutti_world_open(NULL, &world));
    CHECK_STATUS(tutti_pool_new(world, TUTTI_OPTIONS(tutti_memory_options, .persistent = true), &pool),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("persistent");
    CHECK_STATUS(tutti_pool_new(world, TUTTI_OPTIONS(tutti_memory_options, .stream = &stream), &pool),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("stream");
    CHECK_OK(tutti_world_close(world));
}
