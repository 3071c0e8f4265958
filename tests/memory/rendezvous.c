/* SPDX-License-Identifier: Apache-2.0
 *
 * Rendezvous: everybody maps everybody's block, with every group, or nobody does and all know why.
 */
#include <pthread.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"
#include "world/world.h"

static tutti_memory *allocate(tutti_world *world, size_t bytes) {
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, bytes, NULL, &memory));
    return memory;
}

static tutti_peers *meet(tutti_memory *memory, tutti_group *group) {
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    return peers;
}

/* Everybody writes a word of its own into everybody's block; then everybody finds all of them. */
static void check_all_to_all(tutti_peers *peers, int salt) {
    int rank = tutti_peers_rank(peers), size = tutti_peers_size(peers);
    for (int member = 0; member < size; member++)
        ((int *)tutti_peers_buffer(peers, member))[rank] = salt + 100 * member + rank;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    const int *own = tutti_peers_buffer(peers, rank);
    for (int member = 0; member < size; member++)
        CHECK_EQ(own[member], salt + 100 * rank + member);
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
}

TEST_WORLD(everybody_reads_what_everybody_wrote, 4) {
    static const size_t sizes[] = { 16, 4096, 100000, 3 << 20 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        tutti_memory *memory = allocate(world, sizes[i]);
        tutti_peers *peers = meet(memory, tutti_world_group(world));
        CHECK_EQ(tutti_peers_rank(peers), tutti_world_rank(world));
        CHECK_EQ(tutti_peers_size(peers), 4);
        CHECK_EQ(tutti_peers_bytes(peers), sizes[i]);
        CHECK_EQ(tutti_peers_pad_bytes(peers), 9216);
        CHECK_EQ(tutti_peers_channels(peers), 576);
        CHECK(tutti_peers_group(peers) == tutti_world_group(world));
        CHECK(tutti_peers_buffer(peers, tutti_world_rank(world)) == tutti_memory_data(memory));
        CHECK(tutti_peers_signal_pad(peers, tutti_world_rank(world)) == tutti_memory_signal_pad(memory));
        CHECK(tutti_peers_buffer(peers, -1) == NULL && tutti_peers_buffer(peers, 4) == NULL);
        CHECK(tutti_peers_signal_pad(peers, 4) == NULL);
        CHECK(tutti_peers_multicast(peers) == NULL);
        check_all_to_all(peers, (int)i);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
}

TEST_WORLD(a_world_of_one_meets_itself, 1) {
    tutti_memory *memory = allocate(world, 64);
    tutti_peers *peers = meet(memory, tutti_world_group(world));
    check_all_to_all(peers, 1);
    CHECK_OK(tutti_peers_signal(peers, 0, 0, NULL));
    CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_WORLD(zero_bytes_can_meet, 2) { /* spec: test_get_signal_pad of V1 */
    tutti_memory *memory = allocate(world, 0);
    tutti_peers *peers = meet(memory, tutti_world_group(world));
    uint32_t *theirs = tutti_peers_signal_pad(peers, 1 - tutti_peers_rank(peers));
    theirs[0] = 7;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_EQ(*(uint32_t *)tutti_memory_signal_pad(memory), 7);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_WORLD(a_second_rendezvous_is_the_same_handle_and_involves_nobody, 2) {
    tutti_memory *memory = allocate(world, 64);
    tutti_group *group = tutti_world_group(world);
    tutti_peers *first = meet(memory, group);
    uint64_t sequence = tutti_group_sequence(group);
    if (tutti_world_rank(world) == 0) { /* alone */
        tutti_peers *again = meet(memory, group);
        CHECK(again == first);
        tutti_peers_release(again);
        tutti_peers_release(first);
        first = meet(memory, group); /* the cache holds it without users */
        CHECK_EQ(tutti_group_sequence(group), (long long)sequence);
    }
    check_all_to_all(first, 5);
    tutti_peers_release(first);
    tutti_memory_release(memory);
}

TEST_WORLD(the_default_group_of_a_block_is_used, 2) { /* spec: test_empty_strided_p2p */
    tutti_memory *memory, *without = allocate(world, 16384);
    CHECK_OK(tutti_memory_alloc(world, 16384, TUTTI_OPTIONS(tutti_memory_options, .group = tutti_world_group(world)),
                                &memory));
    tutti_peers *peers = NULL;
    CHECK_STATUS(tutti_memory_rendezvous(without, NULL, &peers), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("group_name");
    CHECK(peers == NULL);
    CHECK_OK(tutti_memory_rendezvous(memory, NULL, &peers));
    tutti_memory_release(memory); /* the handle keeps it */
    check_all_to_all(peers, 9);
    tutti_peers_release(peers);
    tutti_memory_release(without);
}

TEST_WORLD(what_differs_is_named_with_the_ranks_and_ends_nothing, 4) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    struct {
        tutti_memory_options options;
        size_t bytes;
        const char *fragment;
    } odd[] = {
        { TUTTI_MEMORY_OPTIONS_INIT, 8192, "byte size is 4096 on rank 0, but 8192 on rank 2" },
        { TUTTI_MEMORY_OPTIONS_INIT, 4096, "signal pad size" },
        { TUTTI_MEMORY_OPTIONS_INIT, 4096, "alignment" },
        { TUTTI_MEMORY_OPTIONS_INIT, 4096, "persistence" },
    };
    odd[1].options.signal_pad_bytes = 1024;
    odd[2].options.alignment = 4096;
    odd[3].options.persistent = true;
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        tutti_memory *memory;
        tutti_peers *peers = NULL;
        CHECK_OK(
            tutti_memory_alloc(world, rank == 2 ? odd[i].bytes : 4096, rank == 2 ? &odd[i].options : NULL, &memory));
        CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_MISMATCH);
        CHECK_MESSAGE(odd[i].fragment);
        tutti_error_info info = TUTTI_ERROR_INFO_INIT;
        CHECK_OK(tutti_error_detail(&info));
        CHECK_EQ(info.at_fault_count, 1);
        CHECK_EQ(info.at_fault[0], 2);
        CHECK_TEXT(info.operation, "rendezvous");
        CHECK(peers == NULL);
        CHECK_OK(tutti_group_check(group));
        tutti_memory_release(memory);
    }
    tutti_memory *memory = allocate(world, 64);
    tutti_peers *peers = meet(memory, group); /* and the group goes on */
    check_all_to_all(peers, 3);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_WORLD(persistent_ids_must_agree_and_their_rendezvous_stands_after_reuse, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers = NULL;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.persistent = true;
    options.persistent_id = 10 + (uint64_t)tutti_world_rank(world);
    CHECK_OK(tutti_memory_alloc(world, 64, &options, &memory));
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("persistent id");
    tutti_memory_release(memory);
    options.persistent_id = 99;
    for (int round = 0; round < 3; round++) {
        CHECK_OK(tutti_memory_alloc(world, 64, &options, &memory));
        uint64_t before = tutti_group_sequence(group);
        peers = meet(memory, group);
        CHECK_EQ(tutti_group_sequence(group) - before, round == 0); /* later ones communicate no more */
        check_all_to_all(peers, 50 + round);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
}

/* ---- groups ---- */

TEST_WORLD(one_block_meets_the_world_and_half_of_it, 4) { /* spec: test_subgroup */
    int rank = tutti_world_rank(world);
    tutti_group *half;
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, NULL, NULL, &half));
    tutti_memory *memory = allocate(world, 64);
    tutti_peers *all = meet(memory, tutti_world_group(world)), *some = meet(memory, half);
    CHECK_EQ(tutti_peers_size(some), 2);
    CHECK_EQ(tutti_peers_rank(some), rank % 2);
    CHECK_EQ(tutti_peers_channels(some), 1152);
    for (int member = 0; member < 2; member++) { /* the same memory behind both */
        int *through_some = tutti_peers_buffer(some, member),
            *through_all = tutti_peers_buffer(all, rank / 2 * 2 + member);
        if (member != rank % 2)
            through_some[4 + rank % 2] = 1000 + rank;
        else
            CHECK(through_some == through_all);
    }
    CHECK_OK(tutti_peers_barrier(all, 0, NULL));
    CHECK_EQ(((int *)tutti_memory_data(memory))[4 + 1 - rank % 2], 1000 + (rank ^ 1));
    CHECK_OK(tutti_peers_barrier(all, 0, NULL));
    check_all_to_all(some, 70);
    CHECK_OK(tutti_peers_barrier(all, 0, NULL)); /* the same words follow */
    check_all_to_all(all, 90);
    tutti_peers_release(some);
    tutti_peers_release(all);
    tutti_memory_release(memory);
    tutti_group_release(half);
}

TEST_WORLD(a_rank_that_sat_out_is_still_in_step, 3) { /* spec: test_rendezvous_after_strict_subgroup */
    tutti_group *pair;
    int ranks[] = { 0, 1 };
    CHECK_OK(tutti_group_new(world, ranks, 2, NULL, &pair));
    if (tutti_world_rank(world) < 2) {
        for (int i = 0; i < 3; i++) {
            tutti_memory *memory = allocate(world, 64);
            tutti_peers *peers = meet(memory, pair);
            check_all_to_all(peers, i);
            tutti_peers_release(peers);
            tutti_memory_release(memory);
        }
    }
    tutti_memory *memory = allocate(world, 64);
    tutti_peers *peers = meet(memory, tutti_world_group(world));
    check_all_to_all(peers, 8);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_group_release(pair);
}

TEST_WORLD(overlapping_groups_have_histories_of_their_own, 3) { /* spec: test_rendezvous_on_overlapping_subgroups */
    int low[] = { 0, 1 }, high[] = { 1, 2 }, rank = tutti_world_rank(world);
    tutti_group *left, *right;
    CHECK_OK(tutti_group_new(world, low, 2, NULL, &left));
    CHECK_OK(tutti_group_new(world, high, 2, NULL, &right));
    for (int round = 0; round < 4; round++) {
        tutti_memory *memory = allocate(world, 64);
        tutti_peers *peers;
        for (int i = 0; rank <= 1 && i <= round; i++) { /* more and more on the left */
            tutti_memory *extra = allocate(world, 64);
            peers = meet(extra, left);
            check_all_to_all(peers, i);
            tutti_peers_release(peers);
            tutti_memory_release(extra);
        }
        if (rank >= 1) {
            peers = meet(memory, right);
            check_all_to_all(peers, 20 + round);
            tutti_peers_release(peers);
        }
        tutti_memory_release(memory);
    }
    tutti_group_release(left);
    tutti_group_release(right);
}

TEST_WORLD(a_group_that_takes_a_destroyed_ones_name_meets_afresh,
           3) { /* spec: test_rendezvous_after_group_name_recycled */
    int rank = tutti_world_rank(world);
    tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
    options.name = "recycled";
    tutti_memory *memory = allocate(world, 64);
    int first[] = { 0, 1 }, second[] = { 1, 2 };
    for (int round = 0; round < 2; round++) {
        tutti_group *group;
        CHECK_OK(tutti_group_new(world, round == 0 ? first : second, 2, &options, &group));
        if (group != TUTTI_NON_GROUP_MEMBER) {
            tutti_peers *peers = meet(memory, group);
            CHECK_EQ(tutti_peers_rank(peers), rank - round);
            check_all_to_all(peers, round);
            tutti_peers_release(peers);
            CHECK_OK(tutti_group_destroy(group));
            tutti_group_release(group);
        }
    }
    tutti_memory_release(memory);
}

TEST_WORLD(a_group_that_is_no_member_or_of_another_world_is_refused, 2) {
    tutti_memory *memory = allocate(world, 64);
    tutti_peers *peers = NULL;
    CHECK_STATUS(tutti_memory_rendezvous(memory, TUTTI_NON_GROUP_MEMBER, &peers), TUTTI_ERROR_ARGUMENT);
    tutti_world *other;
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &other));
    CHECK_STATUS(tutti_memory_rendezvous(memory, tutti_world_group(other), &peers), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("another world");
    CHECK_STATUS(
        tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .group = tutti_world_group(other)), &memory),
        TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(other));
    CHECK_STATUS(tutti_memory_rendezvous(NULL, tutti_world_group(world), &peers), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_memory_rendezvous(memory, tutti_world_group(world), NULL), TUTTI_ERROR_ARGUMENT);
    tutti_memory_release(memory);
}

TEST_WORLD(huge_pages_may_be_asked_for_and_change_nothing_else, 2) {
    for (int huge = 0; huge <= TUTTI_YES; huge++) {
        tutti_memory *memory;
        CHECK_OK(tutti_memory_alloc(world, (size_t)5 << 20,
                                    TUTTI_OPTIONS(tutti_memory_options, .huge_pages = (tutti_choice)huge), &memory));
        tutti_peers *peers = meet(memory, tutti_world_group(world));
        check_all_to_all(peers, huge);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
}

/* ---- threads ---- */

typedef struct thread_work {
    tutti_world *world;
    tutti_group *group;
    int salt;
} thread_work;

static void *meet_in_thread(void *argument) {
    const thread_work *work = argument;
    for (int i = 0; i < 15; i++) {
        tutti_memory *memory = allocate(work->world, (size_t)1000 * (size_t)(i + 1));
        tutti_peers *peers = meet(memory, work->group);
        check_all_to_all(peers, work->salt + i);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    return NULL;
}

TEST_WORLD(two_threads_meet_on_two_groups_at_once, 3) {
    tutti_group *second;
    CHECK_OK(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .name = "second"), &second));
    thread_work one = { world, tutti_world_group(world), 10000 }, two = { world, second, 20000 };
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, meet_in_thread, &two), 0);
    meet_in_thread(&one);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    tutti_group_release(second);
}

/* ---- many ---- */

TEST_WORLD(many_blocks_live_at_once, 2) {
    enum {
        BLOCKS = 400
    };
    static __thread tutti_memory *memories[BLOCKS];
    static __thread tutti_peers *peers[BLOCKS];
    int mappings = 0;
    for (int i = 0; i < BLOCKS; i++) {
        memories[i] = allocate(world, 2000);
        peers[i] = meet(memories[i], tutti_world_group(world));
        if (i == BLOCKS / 2)
            mappings = test_count_mappings();
    }
    CHECK(test_count_mappings() - mappings <= 8); /* small blocks share segments */
    for (int i = 0; i < BLOCKS; i += 13)
        check_all_to_all(peers[i], i);
    for (int i = 0; i < BLOCKS; i++) {
        tutti_peers_release(peers[i]);
        tutti_memory_release(memories[i]);
    }
}

TEST(a_fake_world_meets_at_once_and_its_calls_succeed) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_memory *memory = allocate(world, 64);
    tutti_peers *peers = meet(memory, tutti_world_group(world));
    CHECK_EQ(tutti_peers_size(peers), 4);
    CHECK(tutti_peers_buffer(peers, 1) == tutti_memory_data(memory));
    CHECK(tutti_peers_buffer(peers, 0) == NULL);
    char bytes[8] = "seven";
    bool arrived = false;
    CHECK_OK(tutti_peers_put(peers, 0, 0, bytes, 8, NULL));
    CHECK_OK(tutti_peers_signal(peers, 2, 0, NULL));
    CHECK_OK(tutti_peers_wait_signal(peers, 2, 0, NULL));
    CHECK_OK(tutti_peers_test_signal(peers, 2, 0, &arrived));
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_STATUS(tutti_peers_put(peers, 0, 60, bytes, 8, NULL),
                 TUTTI_ERROR_RANGE); /* arguments are checked as in a real one */
    CHECK_STATUS(tutti_peers_signal(peers, 4, 0, NULL), TUTTI_ERROR_RANGE);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_close(world));
}
