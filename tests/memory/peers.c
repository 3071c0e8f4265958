/* SPDX-License-Identifier: Apache-2.0
 *
 * Peer handles: views with bounds, one-sided copies, and how long they keep memory alive.
 */
#include <stdint.h>
#include <sys/wait.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <unistd.h>

#include "../harness.h"

static tutti_peers *make_peers(tutti_world *world, size_t bytes, tutti_memory **memory) {
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, bytes, NULL, memory));
    CHECK_OK(tutti_memory_rendezvous(*memory, tutti_world_group(world), &peers));
    return peers;
}

static void end_peers(tutti_peers *peers, tutti_memory *memory) {
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* ---- views ---- */

TEST_WORLD(a_view_of_a_buffer_has_its_dtype_shape_and_bounds, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4096, &memory);
    int rank = tutti_peers_rank(peers), other = 1 - rank;
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_buffer(peers, rank, (int64_t[]){ 1024 }, 1, TUTTI_F32, 0, &view));
    CHECK(view.data == tutti_memory_data(memory));
    CHECK_EQ(tutti_view_bytes(&view), 4096);
    CHECK_EQ(view.device, TUTTI_CPU);
    CHECK_OK(tutti_peers_get_buffer(peers, other, (int64_t[]){ 4, 8 }, 2, TUTTI_F64, 480, &view));
    CHECK(view.data == (char *)tutti_peers_buffer(peers, other) + 3840);
    CHECK_EQ(view.dim_count, 2);
    CHECK_EQ(view.shape[1], 8);
    CHECK_EQ(view.strides[0], 8);
    CHECK_EQ(tutti_view_count(&view), 32);
    CHECK_OK(tutti_peers_get_buffer(peers, other, NULL, 0, TUTTI_U8, 4095, &view)); /* no sizes: one element */
    CHECK_EQ(tutti_view_count(&view), 1);
    CHECK_OK(
        tutti_peers_get_buffer(peers, other, (int64_t[]){ 0 }, 1, TUTTI_F32, 1024, &view)); /* nothing, at the end */
    CHECK_EQ(tutti_view_bytes(&view), 0);
    end_peers(peers, memory);
}

TEST_WORLD(a_view_beyond_the_buffer_is_refused, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4096, &memory);
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 1025 }, 1, TUTTI_F32, 0, &view), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("exceeds the allocated size (4096 bytes)");
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 1024 }, 1, TUTTI_F32, 1, &view), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("the requested size (4096 bytes");
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 1 }, 1, TUTTI_F32, -1, &view), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("non-negative");
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 1 }, 1, TUTTI_F32, INT64_MIN, &view), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 1 }, 1, TUTTI_F64, INT64_MAX, &view), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ INT64_MAX, INT64_MAX }, 2, TUTTI_F32, 0, &view),
                 TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 3, -1 }, 2, TUTTI_F32, 0, &view), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_buffer(peers, -1, (int64_t[]){ 1 }, 1, TUTTI_F32, 0, &view), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("rank must be in [0, 2)");
    CHECK_STATUS(tutti_peers_get_buffer(peers, 2, (int64_t[]){ 1 }, 1, TUTTI_F32, 0, &view), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, (int64_t[]){ 1 }, 1, (tutti_dtype)TUTTI_SUM, 0, &view),
                 TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, NULL, 9, TUTTI_F32, 0, &view), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, NULL, 2, TUTTI_F32, 0, &view), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_get_buffer(peers, 0, NULL, 0, TUTTI_F32, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK(view.data == NULL);
    end_peers(peers, memory);
}

TEST_WORLD(get_remote_finds_at_a_peer_what_a_pointer_shows_here, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 1024, &memory);
    int other = 1 - tutti_peers_rank(peers);
    char *own = tutti_memory_data(memory), stranger;
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_remote(peers, other, NULL, (int64_t[]){ 256 }, 1, TUTTI_F32, &view));
    CHECK(view.data == tutti_peers_buffer(peers, other));
    CHECK_OK(tutti_peers_get_remote(peers, other, own + 1000, (int64_t[]){ 6 }, 1, TUTTI_F32, &view));
    CHECK(view.data == (char *)tutti_peers_buffer(peers, other) + 1000);
    CHECK_STATUS(tutti_peers_get_remote(peers, other, own + 1000, (int64_t[]){ 7 }, 1, TUTTI_F32, &view),
                 TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("exceeds");
    CHECK_STATUS(tutti_peers_get_remote(peers, other, &stranger, (int64_t[]){ 1 }, 1, TUTTI_U8, &view),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_get_remote(peers, 2, own, (int64_t[]){ 1 }, 1, TUTTI_U8, &view), TUTTI_ERROR_RANGE);
    end_peers(peers, memory);
}

TEST_WORLD(the_signal_pad_is_the_users_alone, 2) { /* spec: test_get_signal_pad */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4096, &memory);
    int rank = tutti_peers_rank(peers), other = 1 - rank;
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_signal_pad(peers, rank, NULL, 0, 0, 0, &view));
    CHECK(view.data == tutti_peers_signal_pad(peers, rank));
    CHECK_EQ(view.dtype, TUTTI_U32);
    CHECK_EQ(tutti_view_count(&view), 9216 / 4);
    CHECK_OK(tutti_peers_get_signal_pad(peers, other, NULL, 0, TUTTI_U64, 0, &view));
    CHECK_EQ(tutti_view_count(&view), 9216 / 8);
    CHECK_OK(tutti_peers_get_signal_pad(peers, other, NULL, 0, TUTTI_U64, 1150, &view));
    CHECK_EQ(tutti_view_count(&view), 2);
    CHECK_OK(tutti_peers_get_signal_pad(peers, rank, (int64_t[]){ 8, 8 }, 2, TUTTI_U32, 0, &view));
    CHECK_EQ(tutti_view_count(&view), 64);
    CHECK_STATUS(tutti_peers_get_signal_pad(peers, rank, (int64_t[]){ 2305 }, 1, TUTTI_U32, 0, &view),
                 TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("get_signal_pad: the requested size");
    CHECK_STATUS(tutti_peers_get_signal_pad(peers, rank, NULL, 0, TUTTI_U32, 2305, &view), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_signal_pad(peers, rank, NULL, 0, TUTTI_U32, -1, &view), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get_signal_pad(peers, 2, NULL, 0, TUTTI_U32, 0, &view), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("must be in [0");

    /* Filled by the user, it stays so whatever the library synchronises and whatever is written into the buffer. */
    tutti_view pad = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_signal_pad(peers, rank, NULL, 0, TUTTI_U32, 0, &pad));
    CHECK_OK(tutti_view_memset32(world, &pad, 0, 42, tutti_view_count(&pad), NULL));
    memset(tutti_memory_data(memory), 0, 4096);
    for (int channel = 0; channel < tutti_peers_channels(peers); channel += 100) {
        CHECK_OK(tutti_peers_barrier(peers, channel, NULL));
        CHECK_OK(tutti_peers_signal(peers, other, channel, NULL));
        CHECK_OK(tutti_peers_wait_signal(peers, other, channel, NULL));
    }
    const uint32_t *words = pad.data;
    for (int i = 0; i < 9216 / 4; i++)
        CHECK_EQ(words[i], 42);
    end_peers(peers, memory);
}

TEST_WORLD(a_larger_pad_is_used_by_the_block_that_asked_for_it,
           2) { /* spec: test_set_signal_pad_size_with_allocation */
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 2 * 9216));
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    CHECK_EQ(tutti_peers_pad_bytes(peers), 2 * 9216);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 0));
    CHECK_EQ(tutti_peers_pad_bytes(peers), 2 * 9216); /* not the world's current one */
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_signal_pad(peers, 0, NULL, 0, 0, 0, &view));
    CHECK_EQ(tutti_view_bytes(&view), 2 * 9216);
    if (tutti_peers_rank(peers) == 0)
        memset(view.data, 1, tutti_view_bytes(&view));
    end_peers(peers, memory);
}

/* ---- copies ---- */

TEST_WORLD(puts_and_gets_move_exactly_their_bytes, 2) { /* spec: test_get */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, (size_t)5 << 20, &memory);
    int rank = tutti_peers_rank(peers), other = 1 - rank;
    static const size_t sizes[] = { 1, 7, 64, 4096, (5 << 20) - 9 };
    size_t largest = sizes[4];
    unsigned char *from = malloc(largest), *to = malloc(largest + 1);
    CHECK(from != NULL && to != NULL);
    for (int i = 0; i < 5; i++) {
        for (size_t at = 0; at < sizes[i]; at++)
            from[at] = (unsigned char)(at * 7 + (size_t)rank + (size_t)i);
        CHECK_OK(tutti_peers_put(peers, other, 5, from, sizes[i], NULL));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        memset(to, 0xee, largest + 1);
        CHECK_OK(tutti_peers_get(peers, other, 5, to, sizes[i], NULL)); /* what I put there */
        CHECK_EQ(memcmp(from, to, sizes[i]), 0);
        CHECK_EQ(to[sizes[i]], 0xee); /* the rest is untouched */
        const unsigned char *own = (unsigned char *)tutti_memory_data(memory) + 5;
        for (size_t at = 0; at < sizes[i]; at += 1 + sizes[i] / 50)
            CHECK_EQ(own[at], (unsigned char)(at * 7 + (size_t)other + (size_t)i));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    }
    free(from);
    free(to);
    end_peers(peers, memory);
}

TEST_WORLD(copies_outside_the_block_are_refused, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 100, &memory);
    char bytes[128] = "";
    CHECK_STATUS(tutti_peers_get(peers, 0, (size_t)-1, bytes, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("non-negative");
    CHECK_STATUS(tutti_peers_get(peers, 2, 0, bytes, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("invalid peer");
    CHECK_STATUS(tutti_peers_get(peers, -1, 0, bytes, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get(peers, 0, 0, bytes, 101, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("exceeds");
    CHECK_STATUS(tutti_peers_put(peers, 0, 100, bytes, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_put(peers, 0, 1, bytes, SIZE_MAX, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_put(peers, 0, 0, NULL, 1, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_put(NULL, 0, 0, bytes, 1, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_peers_put(peers, 0, 100, NULL, 0, NULL)); /* nothing, at the end */
    tutti_call call = TUTTI_CALL_INIT;
    call.size = 0;
    CHECK_STATUS(tutti_peers_put(peers, 0, 0, bytes, 1, &call), TUTTI_ERROR_ARGUMENT);
    call = (tutti_call)TUTTI_CALL_INIT;
    call.timeout_ns = -1;
    CHECK_STATUS(tutti_peers_put(peers, 0, 0, bytes, 1, &call), TUTTI_ERROR_ARGUMENT);
    tutti_work *work;
    call = (tutti_call)TUTTI_CALL_INIT;
    call.work = &work;
    CHECK_STATUS(tutti_peers_put(peers, 0, 0, bytes, 1, &call), TUTTI_ERROR_UNSUPPORTED);
    end_peers(peers, memory);
}

/* ---- lifetime ---- */

TEST_WORLD(a_handle_keeps_the_memory_after_the_block_is_released, 3) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, (size_t)3 << 20, &memory);
    int rank = tutti_peers_rank(peers), next = (rank + 1) % 3;
    void *data = tutti_memory_data(memory);
    tutti_memory_release(memory);
    CHECK(tutti_memory_find(world, data) == NULL);
    memset(tutti_peers_buffer(peers, next), 40 + rank, (size_t)3 << 20);
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_EQ(((char *)data)[(3 << 20) - 1], 40 + (rank + 2) % 3);
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    tutti_peers_release(peers);
}

TEST_WORLD(a_peer_goes_on_with_memory_whose_owner_has_released_everything, 2) {
    static const size_t sizes[] = { 1000, 3 << 20 };
    for (int i = 0; i < 2; i++) {
        tutti_memory *memory, *marks;
        tutti_peers *peers = make_peers(world, sizes[i], &memory), *sync = make_peers(world, 8, &marks);
        char *theirs = tutti_peers_buffer(peers, 0);
        if (tutti_peers_rank(peers) == 0) {
            strcpy(tutti_memory_data(memory), "left behind");
            end_peers(peers, memory);
            CHECK_OK(tutti_peers_barrier(sync, 0, NULL));
            tutti_memory *reused[20]; /* memory that a peer still holds is not given out again */
            for (int j = 0; j < 20; j++) {
                CHECK_OK(tutti_memory_alloc(world, sizes[i], NULL, &reused[j]));
                memset(tutti_memory_data(reused[j]), 0xaa, sizes[i]);
            }
            CHECK_OK(tutti_peers_barrier(sync, 0, NULL));
            CHECK_OK(tutti_peers_barrier(sync, 0, NULL));
            for (int j = 0; j < 20; j++)
                tutti_memory_release(reused[j]);
        } else {
            CHECK_OK(tutti_peers_barrier(sync, 0, NULL));
            CHECK_OK(tutti_peers_barrier(sync, 0, NULL));
            CHECK_TEXT(theirs, "left behind");
            theirs[0] = 'L'; /* writing is safe too */
            end_peers(peers, memory);
            CHECK_OK(tutti_peers_barrier(sync, 0, NULL));
        }
        end_peers(sync, marks);
    }
}

TEST_WORLD(a_group_that_ends_takes_its_cached_handles_along, 2) {
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 64, NULL, &memory));
    for (int i = 0; i < 5; i++) {
        tutti_group *group;
        tutti_peers *peers;
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_group_destroy(group));
        tutti_group_release(group); /* the handle still has it */
        tutti_peers_release(peers);
    }
    tutti_memory_release(memory);
}

TEST_WORLD(buffers_stay_usable_after_the_group_is_aborted, 2) { /* spec: test_pg_rendezvous_abort_after */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    int rank = tutti_peers_rank(peers);
    ((_Atomic int *)tutti_memory_data(memory))[0] = 7 + rank;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    if (rank == 0)
        CHECK_OK(tutti_group_abort(tutti_world_group(world), "done with it"));
    int value = 0;
    CHECK_OK(tutti_peers_get(peers, 1 - rank, 0, &value, sizeof value, NULL));
    CHECK_EQ(value, 7 + 1 - rank);
    ((_Atomic int *)tutti_peers_buffer(peers, 1 - rank))[1] = 20 + rank; /* plain access needs no group */
    for (int tries = 0; ((_Atomic int *)tutti_memory_data(memory))[1] != 20 + 1 - rank; tries++) {
        CHECK(tries < 60000);
        usleep(1000);
    }
    end_peers(peers, memory);
}

static tutti_status close_with_live_handles(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    if (tutti_peers_rank(peers) == 1) {
        strcpy(tutti_peers_buffer(peers, 0), "bye");
        CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
        CHECK_MESSAGE("1 memory");
        CHECK_MESSAGE("1 peers");
        CHECK_STATUS(tutti_peers_barrier(peers, 0, NULL), TUTTI_ERROR_STATE);
        strcpy(tutti_peers_buffer(peers, 1), "mine"); /* the memory goes with the last release */
        end_peers(peers, memory);
        return TUTTI_OK;
    }
    /* It has said goodbye: this is no deadline. */
    CHECK_STATUS(tutti_peers_wait_signal(peers, 1, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = 60000000000)),
                 TUTTI_ERROR_GONE);
    CHECK_TEXT(tutti_memory_data(memory), "bye");
    end_peers(peers, memory);
    return TUTTI_OK;
}

TEST(closing_with_live_handles_lists_them_and_says_goodbye_as_threads) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, close_with_live_handles, NULL));
}

TEST(closing_with_live_handles_lists_them_and_says_goodbye_as_processes) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, close_with_live_handles, NULL));
}

TEST_WORLD_PROCESSES(a_forked_child_is_refused_and_fork_with_exec_is_harmless, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        tutti_memory *other;
        bool refused = tutti_memory_alloc(world, 64, NULL, &other) == TUTTI_ERROR_FORKED &&
                       tutti_memory_rendezvous(memory, tutti_world_group(world), &peers) == TUTTI_ERROR_FORKED &&
                       tutti_peers_signal(peers, 0, 0, NULL) == TUTTI_ERROR_FORKED &&
                       tutti_peers_barrier(peers, 0, NULL) == TUTTI_ERROR_FORKED &&
                       tutti_peers_put(peers, 0, 0, "x", 1, NULL) == TUTTI_ERROR_FORKED;
        _exit(refused ? 0 : 1);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(127);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL)); /* nothing was disturbed */
    end_peers(peers, memory);
}

/* ---- one copy for all ---- */

static void put_to_all(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world), value = rank + 50;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_peers_put_multicast(peers, (size_t)rank * 4, &value, sizeof value, NULL));
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    for (int r = 0; r < size; r++)
        CHECK_EQ(((int *)tutti_memory_data(memory))[r], r + 50);
    CHECK_STATUS(tutti_peers_put_multicast(peers, 4095, &value, 2, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_put_multicast(peers, 0, NULL, 2, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_peers_put_multicast(peers, 4096, &value, 0, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(a_put_to_the_multicast_address_reaches_everybody_in_software) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(4, put_to_all, NULL);
    test_processes(2, put_to_all, NULL);
}

TEST_WORLD_THREADS(without_multicast_a_put_to_all_is_refused_and_says_what_helps, 2) {
    tutti_memory *memory;
    tutti_peers *peers;
    int value = 1;
    CHECK_OK(tutti_memory_alloc(world, 64, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    CHECK_STATUS(tutti_peers_put_multicast(peers, 0, &value, sizeof value, NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("multicast support is required");
    CHECK_MESSAGE("TUTTI_MULTICAST=software");
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}
