/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals, waits, tests and barriers: order, channels, limits, deadlines.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"

#define SHORT TUTTI_OPTIONS(tutti_call, .timeout_ns = 50000000)
#define LONG TUTTI_OPTIONS(tutti_call, .timeout_ns = 60000000000)

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

static void nap(long milliseconds) {
    nanosleep(&(struct timespec){ .tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000 }, NULL);
}

TEST_WORLD(a_signal_shows_what_was_stored_before_it, 2) { /* spec: verify of section 10 */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 16384, &memory);
    float *zero = tutti_peers_buffer(peers, 0);
    if (tutti_peers_rank(peers) == 0) {
        CHECK_OK(tutti_peers_wait_signal(peers, 1, 0, NULL));
        for (int i = 0; i < 4096; i++)
            CHECK(zero[i] == 42);
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        for (int i = 0; i < 4096; i++)
            CHECK(zero[i] == 43);
    } else {
        for (int i = 0; i < 4096; i++)
            zero[i] = 42;
        CHECK_OK(tutti_peers_signal(peers, 0, 0, NULL));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        for (int i = 0; i < 4096; i++)
            zero[i] = 43;
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    }
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    end_peers(peers, memory);
}

/* Message m + 3 may use the buffer of message m: the signal of m + 2 returned, so m + 1 was taken, so m was read. */
TEST_WORLD(three_buffers_and_one_mailbox_need_no_other_synchronisation, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 3 * 4096, &memory);
    for (int i = 0; i < 1000; i++) { /* more than a byte counts */
        size_t slot = (size_t)(i % 3) * 4096;
        if (tutti_peers_rank(peers) == 0) {
            int words[1024];
            for (int j = 0; j < 1024; j++)
                words[j] = i + j;
            CHECK_OK(tutti_peers_put(peers, 1, slot, words, sizeof words, NULL));
            CHECK_OK(tutti_peers_signal(peers, 1, 0, NULL));
        } else {
            CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, NULL));
            const int *words = (int *)((char *)tutti_memory_data(memory) + slot);
            for (int j = 0; j < 1024; j++)
                CHECK_EQ(words[j], i + j);
        }
    }
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    end_peers(peers, memory);
}

TEST_WORLD(a_ring_runs_on_the_last_channel, 4) { /* spec: channel max - 1 works */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    int rank = tutti_peers_rank(peers), last = tutti_peers_channels(peers) - 1;
    for (int i = 0; i < 50; i++) {
        CHECK_OK(tutti_peers_signal(peers, (rank + 1) % 4, last, NULL));
        CHECK_OK(tutti_peers_wait_signal(peers, (rank + 3) % 4, last, NULL));
    }
    CHECK_OK(tutti_peers_barrier(peers, last, NULL));
    end_peers(peers, memory);
}

TEST_WORLD(a_test_takes_what_is_there_and_never_waits, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    int rank = tutti_peers_rank(peers);
    bool arrived = true;
    if (rank == 0) {
        CHECK_OK(tutti_peers_test_signal(peers, 1, 3, &arrived));
        CHECK(!arrived);
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_test_signal(peers, 1, 3, &arrived));
        CHECK(arrived);
        CHECK_OK(tutti_peers_test_signal(peers, 1, 3, &arrived));
        CHECK(!arrived); /* it was taken */
    } else {
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_signal(peers, 0, 3, NULL));
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    }
    CHECK_STATUS(tutti_peers_test_signal(peers, 0, 0, NULL), TUTTI_ERROR_ARGUMENT);
    end_peers(peers, memory);
}

static tutti_status lose_the_sender(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4096, &memory);
    if (tutti_world_rank(world) == 1) {
        CHECK_OK(tutti_peers_signal(peers, 0, 0, LONG));
        raise(SIGKILL);
    }
    bool arrived = false;
    while (!arrived) /* what it sent before it died is there */
        CHECK_OK(tutti_peers_test_signal(peers, 1, 0, &arrived));
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK)
        status = tutti_peers_test_signal(peers, 1, 0, &arrived);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK(!arrived);
    CHECK_MESSAGE("rank 1");
    end_peers(peers, memory);
    return TUTTI_OK;
}

TEST(a_test_for_a_signal_tells_that_its_sender_is_dead) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, lose_the_sender, NULL), TUTTI_ERROR_DEAD);
}

TEST_WORLD(channels_senders_blocks_groups_and_barriers_do_not_collide, 3) {
    tutti_group *second;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &second));
    tutti_memory *memories[2];
    tutti_peers *peers[4];
    for (int i = 0; i < 2; i++) {
        peers[2 * i] = make_peers(world, 4, &memories[i]);
        CHECK_OK(tutti_memory_rendezvous(memories[i], second, &peers[2 * i + 1]));
    }
    int rank = tutti_peers_rank(peers[0]), next = (rank + 1) % 3, before = (rank + 2) % 3;
    for (int i = 0; i < 4; i++) { /* all pending at once: each has a mailbox of its own */
        for (int channel = 0; channel < 5; channel++) {
            if ((i + channel) % 2 == 0)
                CHECK_OK(tutti_peers_signal(peers[i], next, channel, SHORT));
        }
    }
    for (int i = 0; i < 4; i++)
        CHECK_OK(tutti_peers_barrier(peers[i], 0, NULL)); /* a pending signal is not miscounted */
    for (int i = 0; i < 4; i++) {
        for (int channel = 0; channel < 5; channel++) {
            bool arrived;
            CHECK_OK(tutti_peers_test_signal(peers[i], next, channel, &arrived));
            CHECK(!arrived);
            CHECK_OK(tutti_peers_test_signal(peers[i], before, channel, &arrived));
            CHECK_EQ(arrived, (i + channel) % 2 == 0);
        }
    }
    for (int i = 0; i < 4; i++)
        tutti_peers_release(peers[i]);
    for (int i = 0; i < 2; i++)
        tutti_memory_release(memories[i]);
    tutti_group_release(second);
}

TEST_WORLD(order_is_cumulative_over_a_third_rank, 3) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    int rank = tutti_peers_rank(peers);
    for (int i = 1; i <= 200; i++) {
        if (rank == 0) {
            *(int *)tutti_peers_buffer(peers, 2) = i; /* for rank 2, announced through rank 1 */
            CHECK_OK(tutti_peers_signal(peers, 1, 0, NULL));
            CHECK_OK(tutti_peers_wait_signal(peers, 2, 0, NULL));
        } else if (rank == 1) {
            CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, NULL));
            CHECK_OK(tutti_peers_signal(peers, 2, 0, NULL));
        } else {
            CHECK_OK(tutti_peers_wait_signal(peers, 1, 0, NULL));
            CHECK_EQ(*(int *)tutti_memory_data(memory), i);
            CHECK_OK(tutti_peers_signal(peers, 0, 0, NULL));
        }
    }
    end_peers(peers, memory);
}

TEST_WORLD(barriers_of_many_rounds_let_nobody_through_early, 5) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    int rank = tutti_peers_rank(peers);
    for (int i = 1; i <= 300; i++) {
        ((int *)tutti_memory_data(memory))[0] = i;
        CHECK_OK(tutti_peers_barrier(peers, i % 3, NULL));
        CHECK_EQ(*(int *)tutti_peers_buffer(peers, (rank + i) % 5), i);
        CHECK_OK(tutti_peers_barrier(peers, 3, NULL));
    }
    end_peers(peers, memory);
}

/* A receiver that looks a last time before it sleeps must not take the signal in that look and forget it. */
TEST_WORLD(signals_that_wake_a_sleeper_are_neither_lost_nor_doubled, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    int rank = tutti_peers_rank(peers);
    for (int i = 0; i < 120; i++) { /* by turns one is late enough for the other to fall asleep */
        if (i % 2 == rank && i % 3 == 0)
            nap(1 + i % 4);
        if (i % 2 == rank) {
            CHECK_OK(tutti_peers_signal(peers, 1 - rank, 0, LONG));
        } else {
            CHECK_OK(tutti_peers_wait_signal(peers, 1 - rank, 0, LONG));
            bool arrived;
            CHECK_OK(tutti_peers_test_signal(peers, 1 - rank, 0, &arrived));
            CHECK(!arrived);
        }
    }
    for (int i = 0; i < 40; i++) { /* a full mailbox: the sender sleeps */
        if (rank == 0) {
            CHECK_OK(tutti_peers_signal(peers, 1, 1, LONG));
        } else {
            if (i % 3 == 0)
                nap(3);
            CHECK_OK(tutti_peers_wait_signal(peers, 0, 1, LONG));
        }
    }
    end_peers(peers, memory);
}

/* ---- limits ---- */

/* ---- words of the pad ---- */

TEST_WORLD(who_sees_the_value_of_a_word_sees_the_bytes_before_it, 3) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 100000, &memory);
    int rank = tutti_peers_rank(peers), next = (rank + 1) % 3, before = (rank + 2) % 3;
    unsigned char *bytes = malloc(100000);
    const unsigned char *own = tutti_memory_data(memory);
    for (uint64_t round = 1; round <= 50; round++) {
        memset(bytes, (int)(round + (uint64_t)rank), 100000);
        CHECK_OK(tutti_peers_put_with_signal(peers, next, 0, bytes, 100000, 7, round, LONG));
        CHECK_OK(tutti_peers_wait_for_signal(peers, 7, round % 2 == 0 ? TUTTI_EQUAL : TUTTI_AT_LEAST, round, LONG));
        for (size_t i = 0; i < 100000; i++)
            CHECK_EQ(own[i], (unsigned char)(round + (uint64_t)before));
        CHECK_OK(tutti_peers_put_with_signal(peers, before, 0, NULL, 0, 8, round, LONG)); /* read: may be overwritten */
        CHECK_OK(tutti_peers_wait_for_signal(peers, 8, TUTTI_AT_LEAST, round, LONG));
    }
    free(bytes);
    CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    end_peers(peers, memory);
}

TEST_WORLD(a_word_is_equal_or_at_least_and_keeps_its_value, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 64, &memory);
    int other = 1 - tutti_peers_rank(peers);
    CHECK_OK(tutti_peers_wait_for_signal(peers, 0, TUTTI_EQUAL, 0, SHORT)); /* the pad is clear */
    CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    CHECK_OK(tutti_peers_put_with_signal(peers, other, 0, NULL, 0, 0, UINT64_C(1) << 40, LONG));
    CHECK_OK(tutti_peers_wait_for_signal(peers, 0, TUTTI_AT_LEAST, 5, LONG));
    CHECK_OK(tutti_peers_wait_for_signal(peers, 0, TUTTI_EQUAL, UINT64_C(1) << 40, LONG)); /* nobody took it */
    CHECK_STATUS(tutti_peers_wait_for_signal(peers, 0, TUTTI_EQUAL, 5, SHORT), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("it is 1099511627776");
    CHECK_STATUS(tutti_peers_wait_for_signal(peers, 0, TUTTI_AT_LEAST, UINT64_MAX, SHORT), TUTTI_ERROR_TIMEOUT);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL)); /* nothing has ended */
    size_t words = tutti_peers_pad_bytes(peers) / 8;
    uint32_t value = 1;
    CHECK_OK(tutti_peers_put_with_signal(peers, other, 0, NULL, 0, words - 1, 3, LONG));
    CHECK_OK(tutti_peers_wait_for_signal(peers, words - 1, TUTTI_EQUAL, 3, LONG));
    CHECK_STATUS(tutti_peers_put_with_signal(peers, other, 0, &value, 4, words, 1, LONG), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_put_with_signal(peers, 2, 0, &value, 4, 0, 1, LONG), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_put_with_signal(peers, other, 61, &value, 4, 0, 1, LONG), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_put_with_signal(peers, other, 0, NULL, 4, 0, 1, LONG), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_wait_for_signal(peers, words, TUTTI_EQUAL, 1, LONG), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_wait_for_signal(peers, 0, (tutti_comparison)0, 1, LONG), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_wait_for_signal(NULL, 0, TUTTI_EQUAL, 1, LONG), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    end_peers(peers, memory);
}

TEST_WORLD(channels_and_ranks_out_of_bounds_are_refused,
           2) { /* spec: test_barrier_channel_out_of_bounds, test_put_wait_signal_…_out_of_bounds */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    bool arrived;
    CHECK_EQ(tutti_peers_channels(peers), 1152);
    for (int channel = 1152; channel > 0; channel = channel == 1152 ? INT32_MAX : 0) {
        CHECK_STATUS(tutti_peers_barrier(peers, channel, NULL), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("maximum supported channel");
        CHECK_STATUS(tutti_peers_signal(peers, 0, channel, NULL), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("maximum supported channel");
        CHECK_STATUS(tutti_peers_wait_signal(peers, 0, channel, NULL), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("maximum supported channel");
        CHECK_STATUS(tutti_peers_test_signal(peers, 0, channel, &arrived), TUTTI_ERROR_RANGE);
    }
    CHECK_STATUS(tutti_peers_barrier(peers, -1, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("must be non-negative");
    CHECK_STATUS(tutti_peers_signal(peers, 0, -1, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_wait_signal(peers, 0, -1, NULL), TUTTI_ERROR_RANGE);
    for (int rank = -1; rank <= 2; rank += 3) {
        CHECK_STATUS(tutti_peers_signal(peers, rank, 0, NULL), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("must be in [0");
        CHECK_STATUS(tutti_peers_wait_signal(peers, rank, 0, NULL), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("must be in [0");
        CHECK_STATUS(tutti_peers_test_signal(peers, rank, 0, &arrived), TUTTI_ERROR_RANGE);
    }
    CHECK_STATUS(tutti_peers_signal(peers, 0, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = -5)), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_peers_signal(NULL, 0, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_group_check(tutti_world_group(world))); /* a wrong argument ends nothing */
    end_peers(peers, memory);
}

/* ---- deadlines ---- */

TEST_WORLD(a_second_signal_that_is_not_taken_times_out_and_may_be_tried_again, 2) { /* spec: test_put_signal_timeout */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    if (tutti_peers_rank(peers) == 0) {
        CHECK_OK(tutti_peers_signal(peers, 1, 0, NULL));
        CHECK_STATUS(tutti_peers_signal(peers, 1, 0, SHORT), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("peers_signal");
        tutti_error_info info = TUTTI_ERROR_INFO_INIT;
        CHECK_OK(tutti_error_detail(&info));
        CHECK_EQ(info.at_fault[0], 1);
        CHECK_OK(tutti_group_check(tutti_world_group(world))); /* it ended only that wait */
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_signal(peers, 1, 0, LONG));
    } else {
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, NULL));
        CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, NULL));
    }
    end_peers(peers, memory);
}

TEST_WORLD(a_wait_without_a_signal_times_out_and_may_be_tried_again, 2) { /* spec: test_wait_signal_timeout */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    if (tutti_peers_rank(peers) == 0) {
        CHECK_STATUS(tutti_peers_wait_signal(peers, 1, 2, SHORT), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("It waited for rank 1 on channel 2");
        CHECK(strstr(tutti_error_message(), "have come") == NULL); /* nobody else is concerned */
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_wait_signal(peers, 1, 2, LONG));
    } else {
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        CHECK_OK(tutti_peers_signal(peers, 0, 2, NULL));
    }
    end_peers(peers, memory);
}

static tutti_status barrier_alone(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    tutti_group *group = tutti_world_group(world);
    if (tutti_peers_rank(peers) == 0) {
        CHECK_STATUS(tutti_peers_barrier(peers, 0, SHORT), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("rank 2");
        CHECK_MESSAGE("It waited on channel 0");
    } else {
        while (tutti_group_check(group) == TUTTI_OK)
            nap(1);
        CHECK_STATUS(tutti_peers_barrier(peers, 0, NULL), TUTTI_ERROR_TIMEOUT); /* the first cause */
    }
    CHECK_STATUS(tutti_group_check(group),
                 TUTTI_ERROR_TIMEOUT); /* a barrier's deadline ends the group, on every rank */
    CHECK_STATUS(tutti_peers_signal(peers, 1, 0, NULL), TUTTI_ERROR_TIMEOUT);
    CHECK_STATUS(tutti_peers_put(peers, 1, 0, "x", 1, NULL), TUTTI_ERROR_TIMEOUT);
    tutti_peers *again;
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &again), TUTTI_ERROR_TIMEOUT);
    char byte;
    CHECK_OK(tutti_peers_get(peers, 1, 0, &byte, 1, NULL)); /* reading still works */
    end_peers(peers, memory);
    return TUTTI_OK;
}

TEST(a_barrier_alone_times_out_and_ends_its_group_as_threads) { /* spec: test_barrier_timeout */
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 3, barrier_alone, NULL));
}

TEST(a_barrier_alone_times_out_and_ends_its_group_as_processes) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, barrier_alone, NULL));
}

TEST_WORLD(an_interrupted_barrier_goes_on_with_the_next_call, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    if (tutti_peers_rank(peers) == 0) {
        tutti_world_interrupt(world);
        CHECK_STATUS(tutti_peers_barrier(peers, 0, LONG), TUTTI_ERROR_INTERRUPTED);
        CHECK_STATUS(tutti_peers_wait_signal(peers, 1, 0, LONG), TUTTI_ERROR_INTERRUPTED);
        tutti_world_resume(world);
        CHECK_OK(tutti_peers_signal(peers, 1, 1, NULL));
    } else {
        CHECK_OK(tutti_peers_wait_signal(peers, 0, 1, LONG));
    }
    for (int i = 0; i < 3; i++)
        CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    end_peers(peers, memory);
}

TEST_WORLD(an_abort_ends_waits_for_signals_and_barriers, 3) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    int rank = tutti_peers_rank(peers);
    if (rank == 0) {
        nap(30);
        CHECK_OK(tutti_group_abort(tutti_world_group(world), "enough"));
    } else {
        CHECK_STATUS(rank == 1 ? tutti_peers_wait_signal(peers, 0, 0, LONG) : tutti_peers_barrier(peers, 0, LONG),
                     TUTTI_ERROR_ABORTED);
        CHECK_MESSAGE("enough");
    }
    end_peers(peers, memory);
}

/* ---- threads of one rank ---- */

typedef struct ring_work {
    tutti_peers *peers;
    int channel;
} ring_work;

static void *ring(void *argument) {
    const ring_work *work = argument;
    int rank = tutti_peers_rank(work->peers), size = tutti_peers_size(work->peers);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(tutti_peers_signal(work->peers, (rank + 1) % size, work->channel, NULL));
        CHECK_OK(tutti_peers_wait_signal(work->peers, (rank + size - 1) % size, work->channel, NULL));
        CHECK_OK(tutti_peers_barrier(work->peers, work->channel, NULL));
    }
    return NULL;
}

TEST_WORLD(two_threads_use_two_channels_at_once, 2) { /* spec: test_stream_serialization_concurrent_threads */
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    ring_work works[2] = { { peers, 0 }, { peers, 1 } };
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, ring, &works[1]), 0);
    ring(&works[0]);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    end_peers(peers, memory);
}

static void *send_many(void *peers) {
    for (int i = 0; i < 150; i++)
        CHECK_OK(tutti_peers_signal(peers, 1, 0, LONG));
    return NULL;
}

static void *take_many(void *peers) {
    for (int i = 0; i < 150; i++)
        CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, LONG));
    return NULL;
}

TEST_WORLD(two_threads_share_one_mailbox_and_no_signal_is_lost, 2) {
    tutti_memory *memory;
    tutti_peers *peers = make_peers(world, 4, &memory);
    void *(*work)(void *) = tutti_peers_rank(peers) == 0 ? send_many : take_many;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, work, peers), 0);
    work(peers);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    bool arrived = false;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_OK(tutti_peers_test_signal(peers, 0, 0, &arrived));
    CHECK(!arrived);
    end_peers(peers, memory);
}
