/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives: tags, any source, oneself, every length, symmetric or not; and batches of them.
 */
#include <sched.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "values.h"

static void fill(int *to, size_t count, int seed) {
    for (size_t i = 0; i < count; i++)
        to[i] = seed * 1000003 + (int)i;
}

static void expect(const int *got, size_t count, int seed) {
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(got[i], seed * 1000003 + (int)i);
}

static const size_t counts[] = { 0, 1, 20, 21, 1000, 4096, 5000, 300001 };

static void there_and_back(tutti_world *world, int *buffer, int *other) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), peer = rank ^ 1;
    for (int n = 0; n < 8; n++) {
        tutti_received received = TUTTI_RECEIVED_INIT;
        tutti_call call = TUTTI_CALL_INIT;
        call.received = &received;
        if (rank == 0) {
            fill(buffer, counts[n], n);
            CHECK_OK(tutti_send(group, buffer, counts[n], TUTTI_I32, peer, n, NULL));
            CHECK_OK(tutti_recv(group, other, counts[n], TUTTI_I32, peer, n, &call));
            expect(other, counts[n], n + 100);
        } else {
            CHECK_OK(tutti_recv(group, buffer, counts[n] + 7, TUTTI_I32, TUTTI_ANY_SOURCE, TUTTI_ANY_TAG, &call));
            expect(buffer, counts[n], n);
            fill(other, counts[n], n + 100);
            CHECK_OK(tutti_send(group, other, counts[n], TUTTI_I32, peer, n, NULL));
        }
        CHECK_EQ(received.source, peer);
        CHECK_EQ(received.tag, n);
        CHECK_EQ(received.count, counts[n]);
    }
}

TEST_WORLD(messages_of_every_length_arrive, 2) {
    int *buffer = malloc(310000 * 4), *other = malloc(310000 * 4);
    there_and_back(world, buffer, other);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    free(buffer);
    free(other);
}

TEST_WORLD(messages_from_and_to_symmetric_memory_arrive, 2) {
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 310000 * 4, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    int *other = malloc(310000 * 4);
    there_and_back(world, tutti_memory_data(memory), other); /* rank 0 sends from it, rank 1 receives into it */
    there_and_back(world, other, tutti_memory_data(memory));
    if (tutti_world_rank(world) == 0) /* only one side has it */
        there_and_back(world, other, tutti_memory_data(memory));
    else {
        int *more = malloc(310000 * 4);
        there_and_back(world, more, other);
        free(more);
    }
    free(other);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_WORLD(a_receive_takes_its_tag_whatever_came_before, 2) {
    tutti_group *group = tutti_world_group(world);
    enum {
        COUNT = 40
    };
    int value[COUNT];
    tutti_work *works[COUNT];
    if (tutti_world_rank(world) == 0) {
        for (int tag = 0; tag < COUNT; tag++) {
            value[tag] = 7 * tag;
            CHECK_OK(
                tutti_send(group, &value[tag], 1, TUTTI_I32, 1, tag, TUTTI_OPTIONS(tutti_call, .work = &works[tag])));
        }
        for (int tag = 0; tag < COUNT; tag++) {
            CHECK_OK(tutti_work_wait(works[tag], 0));
            tutti_work_release(works[tag]);
        }
    } else {
        for (int tag = COUNT - 1; tag >= 0; tag--) {
            int got = -1;
            CHECK_OK(tutti_recv(group, &got, 1, TUTTI_I32, 0, tag, NULL));
            CHECK_EQ(got, 7 * tag);
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(messages_with_one_tag_arrive_in_order, 2) {
    tutti_group *group = tutti_world_group(world);
    int buffer[3000];
    for (int i = 0; i < 300; i++) {
        size_t count = (size_t)(i * 37 % 3000);
        if (tutti_world_rank(world) == 0) {
            fill(buffer, count, i);
            CHECK_OK(tutti_send(group, buffer, count, TUTTI_I32, 1, 3, NULL));
        } else {
            CHECK_OK(tutti_recv(group, buffer, 3000, TUTTI_I32, 0, 3, NULL));
            expect(buffer, count, i);
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(everybody_sends_to_everybody_at_once, 4) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    enum {
        COUNT = 20000
    };
    int(*in)[COUNT] = malloc(4 * sizeof *in), (*out)[COUNT] = malloc(4 * sizeof *out);
    tutti_work *works[8];
    for (int peer = 0; peer < size; peer++) { /* itself too */
        fill(in[peer], COUNT, rank * 10 + peer);
        CHECK_OK(tutti_send(group, in[peer], COUNT, TUTTI_I32, peer, 5,
                            TUTTI_OPTIONS(tutti_call, .work = &works[2 * peer])));
        CHECK_OK(tutti_recv(group, out[peer], COUNT, TUTTI_I32, peer, 5,
                            TUTTI_OPTIONS(tutti_call, .work = &works[2 * peer + 1])));
    }
    for (int i = 0; i < 2 * size; i++) {
        CHECK_OK(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
    }
    for (int peer = 0; peer < size; peer++)
        expect(out[peer], COUNT, peer * 10 + rank);
    CHECK_OK(tutti_barrier(group, NULL));
    free(in);
    free(out);
}

TEST_WORLD(a_batch_of_sends_and_receives_round_a_ring_does_not_lock_up, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    int *in = malloc(400000), *out = malloc(400000);
    for (int asynchronous = 0; asynchronous < 2; asynchronous++) {
        fill(in, 100000, rank);
        memset(out, 0, 400000);
        int sum = 0, one = rank + 1;
        tutti_batch *batch;
        CHECK_OK(tutti_batch_begin(group, &batch));
        tutti_call call = TUTTI_CALL_INIT;
        call.batch = batch;
        CHECK_OK(tutti_send(group, in, 100000, TUTTI_I32, (rank + 1) % size, 0, &call));
        CHECK_OK(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I32, TUTTI_SUM, &call));
        CHECK_OK(tutti_recv(group, out, 100000, TUTTI_I32, (rank + size - 1) % size, 0, &call));
        tutti_work *work;
        CHECK_OK(tutti_batch_end(batch, asynchronous ? TUTTI_OPTIONS(tutti_call, .work = &work) : NULL));
        if (asynchronous) {
            CHECK_OK(tutti_work_wait(work, 0));
            tutti_work_release(work);
        }
        expect(out, 100000, (rank + size - 1) % size);
        CHECK_EQ(sum, 6);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    free(in);
    free(out);
}

/* More messages than a batch has room for by itself, some in fragments, some of which come before their receives. */
TEST_WORLD(batches_of_many_messages_of_many_lengths_arrive_whole, 3) {
    enum {
        MESSAGES = 11,
        LONGEST = 6000
    };
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), next = (rank + 1) % 3, before = (rank + 2) % 3;
    int32_t(*in)[LONGEST] = calloc(MESSAGES, sizeof *in), (*out)[LONGEST] = calloc(MESSAGES, sizeof *out);
    CHECK(in != NULL && out != NULL);
    for (int round = 0; round < (test_sanitized() ? 6 : 40); round++) {
        tutti_batch *batch;
        size_t counts[MESSAGES];
        CHECK_OK(tutti_batch_begin(group, &batch));
        for (int i = 0; i < 1 + round % MESSAGES; i++) {
            counts[i] = (size_t)(i * 977 + round * 131) % LONGEST;
            for (size_t k = 0; k < counts[i]; k++)
                in[i][k] = rank * 1000000 + round * 1000 + i * 100 + (int32_t)(k % 100);
            CHECK_OK(
                tutti_send(group, in[i], counts[i], TUTTI_I32, next, i, TUTTI_OPTIONS(tutti_call, .batch = batch)));
            CHECK_OK(
                tutti_recv(group, out[i], counts[i], TUTTI_I32, before, i, TUTTI_OPTIONS(tutti_call, .batch = batch)));
        }
        if (round % 5 == rank)
            sched_yield();
        CHECK_OK(tutti_batch_end(batch, NULL));
        for (int i = 0; i < 1 + round % MESSAGES; i++)
            for (size_t k = 0; k < counts[i]; k++)
                CHECK_EQ(out[i][k], before * 1000000 + round * 1000 + i * 100 + (int32_t)(k % 100));
    }
    free(in);
    free(out);
}

TEST_WORLD(a_blocking_send_to_oneself_that_nobody_awaits_is_an_error_and_ends_nothing, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), value[100] = { 0 };
    CHECK_STATUS(tutti_send(group, value, 100, TUTTI_I32, rank, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("itself");
    /* With the receive under way it works; so does a short one. */
    int got[100] = { 0 };
    tutti_work *work;
    fill(value, 100, 3);
    CHECK_OK(tutti_recv(group, got, 100, TUTTI_I32, rank, 0, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_send(group, value, 100, TUTTI_I32, rank, 0, NULL));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    expect(got, 100, 3);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_receive_that_runs_out_of_time_ends_only_itself, 2) {
    tutti_group *group = tutti_world_group(world);
    int value = 5;
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 1, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = 30000000)),
                     TUTTI_ERROR_TIMEOUT);
        tutti_work *work;
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 1, 0,
                            TUTTI_OPTIONS(tutti_call, .timeout_ns = 30000000, .work = &work)));
        CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_TIMEOUT);
        tutti_work_release(work);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 0, 0, NULL));
    else {
        value = 0;
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 1, 0, NULL));
        CHECK_EQ(value, 5);
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_message_that_is_too_long_or_of_another_type_is_a_mismatch, 2) {
    tutti_group *group = tutti_world_group(world);
    int value[600] = { 0 }; /* more than a cell: the send waits */
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(tutti_send(group, value, 600, TUTTI_I32, 1, 0, NULL), TUTTI_ERROR_MISMATCH);
    } else {
        CHECK_STATUS(tutti_recv(group, value, 599, TUTTI_I32, 0, 0, NULL), TUTTI_ERROR_MISMATCH);
    }
    CHECK_MESSAGE("600 elements of i32");
    CHECK_MESSAGE("599 elements of i32");
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_MISMATCH);
}

TEST_WORLD(wrong_arguments_of_sends_and_receives_are_named, 2) {
    tutti_group *group = tutti_world_group(world);
    int value = 0;
    CHECK_STATUS(tutti_send(group, &value, 1, TUTTI_I32, 2, 0, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("[0, 2)");
    CHECK_STATUS(tutti_send(group, &value, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 0, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_send(group, &value, 1, TUTTI_I32, 0, -1, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_send(group, NULL, 1, TUTTI_I32, 0, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_send(NULL, &value, 1, TUTTI_I32, 0, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_recv(group, &value, 1, (tutti_dtype)0, 0, 0, NULL), TUTTI_ERROR_TYPE);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- both at once, and nobody ---- */

TEST_WORLD(rings_of_send_recv_of_every_length_go_round, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), next = (rank + 1) % 3, before = (rank + 2) % 3;
    size_t last = test_sanitized() ? 6 : 7;
    int *in = malloc(counts[last] * sizeof *in + 1), *out = malloc(counts[last] * sizeof *out + 64);
    for (size_t n = 0; n <= last; n++) {
        tutti_received received = TUTTI_RECEIVED_INIT;
        fill(in, counts[n], rank);
        CHECK_OK(tutti_send_recv(group, in, counts[n], next, out, counts[n] + 1, before, TUTTI_I32, 5,
                                 TUTTI_OPTIONS(tutti_call, .received = &received)));
        expect(out, counts[n], before);
        CHECK_EQ(received.source, before);
        CHECK_EQ(received.count, counts[n]);
    }
    /* As a work, and noted in a batch. */
    tutti_work *work;
    tutti_batch *batch;
    fill(in, 1000, rank + 10);
    CHECK_OK(tutti_send_recv(group, in, 1000, next, out, 1000, before, TUTTI_I32, 6,
                             TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    expect(out, 1000, before + 10);
    CHECK_OK(tutti_batch_begin(group, &batch));
    CHECK_OK(tutti_send_recv(group, in, 1000, before, out, 1000, next, TUTTI_I32, 7,
                             TUTTI_OPTIONS(tutti_call, .batch = batch)));
    CHECK_OK(tutti_batch_end(batch, NULL));
    expect(out, 1000, next + 10);
    free(in);
    free(out);
}

TEST_WORLD(to_and_from_nobody_nothing_moves, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), in = rank, out = 77;
    tutti_received received = TUTTI_RECEIVED_INIT;
    tutti_work *work;
    CHECK_OK(tutti_send(group, &in, 1, TUTTI_I32, TUTTI_NOBODY, 0, NULL));
    CHECK_OK(tutti_recv(group, &out, 1, TUTTI_I32, TUTTI_NOBODY, 0, TUTTI_OPTIONS(tutti_call, .received = &received)));
    CHECK_EQ(received.source, TUTTI_NOBODY);
    CHECK_EQ(received.count, 0);
    CHECK_EQ(out, 77);
    CHECK_OK(tutti_recv(group, &out, 1, TUTTI_I32, TUTTI_NOBODY, 0, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    /* A line of two: everybody has one neighbour. */
    CHECK_OK(tutti_send_recv(group, &in, 1, rank == 0 ? 1 : TUTTI_NOBODY, &out, 1, rank == 1 ? 0 : TUTTI_NOBODY,
                             TUTTI_I32, 3, NULL));
    CHECK_EQ(out, rank == 1 ? 0 : 77);
    CHECK_STATUS(tutti_send(group, &in, 1, TUTTI_I32, -3, 0, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_send(group, &in, 1, (tutti_dtype)0, TUTTI_NOBODY, 0, NULL), TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_send_recv(group, &in, 1, 1 - rank, &in, 1, 1 - rank, TUTTI_I32, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlap");
    CHECK_STATUS(tutti_send_recv(NULL, &in, 1, 0, &out, 1, 0, TUTTI_I32, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL)); /* none of this ended anything */
}

TEST_WORLD(a_call_that_is_noted_in_a_batch_has_no_work, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), in = rank, out = 0;
    tutti_batch *batch;
    tutti_work *work = NULL;
    CHECK_OK(tutti_batch_begin(group, &batch));
    const tutti_call *both = TUTTI_OPTIONS(tutti_call, .batch = batch, .work = &work);
    CHECK_STATUS(tutti_send_recv(group, &in, 1, 1 - rank, &out, 1, 1 - rank, TUTTI_I32, 0, both), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("send_recv: a call in a batch has no work of its own");
    CHECK_STATUS(tutti_send(group, &in, 1, TUTTI_I32, 1 - rank, 0, both), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_send(group, &in, 1, TUTTI_I32, TUTTI_NOBODY, 0, both), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_all_reduce(group, &in, &out, 1, TUTTI_I32, TUTTI_SUM, both), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("all_reduce: a call in a batch has no work of its own; give one to tutti_batch_end");
    CHECK(work == NULL);
    /* What was refused is not noted. */
    CHECK_OK(tutti_batch_end(batch, NULL));
    CHECK_EQ(out, 0);
    CHECK_STATUS(tutti_send_recv(group, &in, 1, 1 - rank, &out, 1, 1 - rank, TUTTI_I32, 0,
                                 TUTTI_OPTIONS(tutti_call, .timeout_ns = -1)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("send_recv: timeout_ns is -1");
    CHECK_OK(tutti_barrier(group, NULL));
}
