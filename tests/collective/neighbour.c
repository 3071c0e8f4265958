/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges between neighbours: send_recv, elements that lie apart; and what goes wrong
 * between a send and its receive: circles, wrong tags, messages too long or never received.
 */
#include <string.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <unistd.h>

#include "../harness.h"

/* ---- send_recv ---- */

static void shift_round(tutti_group *group, size_t count, bool as_work) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    int *in = malloc(count * sizeof *in), *out = malloc(count * sizeof *out);
    for (size_t i = 0; i < count; i++) {
        in[i] = rank * 1000 + (int)i % 1000;
        out[i] = -1;
    }
    tutti_received received = TUTTI_RECEIVED_INIT;
    tutti_call call = TUTTI_CALL_INIT;
    tutti_work *work;
    call.received = &received;
    call.work = as_work ? &work : NULL;
    CHECK_OK(tutti_send_recv(group, in, count, (rank + 1) % size, out, count, (rank + size - 1) % size, TUTTI_I32, 3,
                             &call));
    if (as_work) {
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
    }
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(out[i], (rank + size - 1) % size * 1000 + (int)i % 1000);
    CHECK_EQ(received.source, (rank + size - 1) % size);
    CHECK_EQ(received.tag, 3);
    CHECK_EQ(received.count, count);
    free(in);
    free(out);
}

TEST_WORLD(everybody_may_send_and_receive_at_once, 3) {
    tutti_group *group = tutti_world_group(world);
    static const size_t counts[] = { 1, 20, 21, 5000, 100000 };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        for (int as_work = 0; as_work < 2; as_work++)
            shift_round(group, counts[i], as_work);
    int value = 0;
    CHECK_STATUS(tutti_send_recv(group, &value, 1, 0, &value, 1, 0, TUTTI_I32, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlap");
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- elements that lie apart ---- */

TEST_WORLD(a_column_may_be_sent_and_come_as_a_row_and_the_other_way_round, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    static const size_t sizes[] = { 4, 40, 150 };
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++) {
        size_t rows = sizes[n], columns = sizes[n] + 3;
        int *matrix = calloc(rows * columns, sizeof *matrix), *line = calloc(rows, sizeof *line);
        tutti_strided column = TUTTI_STRIDED_INIT;
        column.block = 1;
        column.stride = columns;
        for (size_t i = 0; i < rows * columns && rank == 0; i++)
            matrix[i] = (int)i;
        if (rank == 0) {
            CHECK_OK(
                tutti_send(group, matrix + 2, rows, TUTTI_I32, 1, 0, TUTTI_OPTIONS(tutti_call, .strided_in = &column)));
            CHECK_OK(tutti_recv(group, line, rows, TUTTI_I32, 1, 0, NULL));
        } else {
            CHECK_OK(tutti_recv(group, matrix + 1, rows, TUTTI_I32, 0, 0,
                                TUTTI_OPTIONS(tutti_call, .strided_out = &column)));
            for (size_t i = 0; i < rows * columns; i++)
                CHECK_EQ(matrix[i], i % columns == 1 ? (int)i + 1 : 0);
            CHECK_OK(
                tutti_send(group, matrix + 1, rows, TUTTI_I32, 0, 0, TUTTI_OPTIONS(tutti_call, .strided_in = &column)));
        }
        for (size_t i = 0; i < rows && rank == 0; i++)
            CHECK_EQ(line[i], (int)(i * columns + 2));
        free(matrix);
        free(line);
    }
    tutti_strided wrong = TUTTI_STRIDED_INIT;
    wrong.block = 2;
    wrong.stride = 3;
    int values[8] = { 0 };
    CHECK_STATUS(tutti_send(group, values, 3, TUTTI_I32, 1 - rank, 0, TUTTI_OPTIONS(tutti_call, .strided_in = &wrong)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_recv(group, values, 2, TUTTI_I32, 1 - rank, 0, TUTTI_OPTIONS(tutti_call, .strided_in = &wrong)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_all_reduce(group, values, values, 2, TUTTI_I32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .strided_in = &wrong)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(symmetric_memory_may_be_sent_from_and_to_places_that_lie_apart, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 1 << 16, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    int *data = tutti_memory_data(memory);
    tutti_strided pairs = TUTTI_STRIDED_INIT;
    pairs.block = 2;
    pairs.stride = 5;
    for (int i = 0; i < 1000; i++)
        data[i] = rank == 0 ? i : -1;
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 0)
        CHECK_OK(tutti_send(group, data, 200, TUTTI_I32, 1, 0, NULL));
    else
        CHECK_OK(tutti_recv(group, data, 200, TUTTI_I32, 0, 0, TUTTI_OPTIONS(tutti_call, .strided_out = &pairs)));
    for (int i = 0; i < 500 && rank == 1; i++)
        CHECK_EQ(data[i], i % 5 < 2 ? i / 5 * 2 + i % 5 : -1);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* ---- circles ---- */

#define LONG_MESSAGE 5000

/* Sanitizers run threads of their own, so that nobody can be sure of a circle: there it ends with the deadline. */
static void expect_circle(tutti_status status) {
    if (test_sanitized() && (status == TUTTI_ERROR_TIMEOUT || status == TUTTI_ERROR_GONE))
        return; /* its own deadline, or the other's, who then left */
    if (status != TUTTI_ERROR_MISMATCH)
        FAIL("a circle gave %s: %s", tutti_status_name(status), tutti_error_message());
    CHECK_MESSAGE("circle");
}

static int64_t patience(void) {
    return (test_sanitized() ? 5 : 50) * INT64_C(1000000000); /* a circle must be found long before */
}

TEST_WORLD(long_sends_round_a_circle_are_told_at_once, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    static _Thread_local float data[LONG_MESSAGE];
    expect_circle(tutti_send(group, data, LONG_MESSAGE, TUTTI_F32, (rank + 1) % 3, 0,
                             TUTTI_OPTIONS(tutti_call, .timeout_ns = patience())));
}

TEST_WORLD(receives_round_a_circle_are_told_at_once, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    float value;
    expect_circle(
        tutti_recv(group, &value, 1, TUTTI_F32, 1 - rank, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = patience())));
}

TEST_WORLD(two_ranks_that_wait_for_each_others_tags_are_told_at_once, 2) {
    tutti_group *group = tutti_world_group(world);
    static _Thread_local float data[LONG_MESSAGE];
    const tutti_call *call = TUTTI_OPTIONS(tutti_call, .timeout_ns = patience());
    if (tutti_group_rank(group) == 0)
        expect_circle(tutti_send(group, data, LONG_MESSAGE, TUTTI_F32, 1, 7, call));
    else
        expect_circle(tutti_recv(group, data, LONG_MESSAGE, TUTTI_F32, 0, 8, call));
}

/* What came is told on every rank, and the advice is not what the program does already. */
TEST_WORLD(wrong_tags_of_send_recv_are_told_with_those_that_came, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), tags[2] = { 7777, 5 };
    float in[4] = { 0 }, out[4];
    tutti_status status = tutti_send_recv(group, in, 1 + 3 * (size_t)rank, 1 - rank, out, 4, 1 - rank, TUTTI_F32,
                                          tags[rank], TUTTI_OPTIONS(tutti_call, .timeout_ns = patience()));
    expect_circle(status);
    if (status != TUTTI_ERROR_MISMATCH)
        return;
    CHECK_MESSAGE("rank 0 is in recv 1 of group 0 (f32, 4 elements, from rank 1, tag 7777)");
    CHECK_MESSAGE("rank 1 is in recv 1 of group 0 (f32, 4 elements, from rank 0, tag 5)");
    CHECK_MESSAGE(rank == 0 ? "Rank 0 has not received: from rank 1 with tag 5 (4 elements of f32)"
                            : "Rank 1 has not received: from rank 0 with tag 7777 (1 element of f32)");
    CHECK_MESSAGE("compare the ranks and tags");
    CHECK(strstr(tutti_error_message(), "tutti_send_recv") == NULL);
}

/* No circle: it only looks like one until the message has been taken, or the receive, which is late, has come. */
TEST_WORLD(sends_and_receives_that_take_long_are_no_circle, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), next = (rank + 1) % 3, before = (rank + 2) % 3;
    static _Thread_local float in[LONG_MESSAGE], out[LONG_MESSAGE];
    for (int round = 0; round < (test_sanitized() ? 3 : 12); round++) {
        usleep((useconds_t)(rank * 7919 * (round + 1) % 50000));
        if (rank == round % 3) {
            CHECK_OK(tutti_recv(group, out, LONG_MESSAGE, TUTTI_F32, before, 0, NULL));
            CHECK_OK(tutti_send(group, in, LONG_MESSAGE, TUTTI_F32, next, 0, NULL));
        } else {
            CHECK_OK(tutti_send(group, in, LONG_MESSAGE, TUTTI_F32, next, 0, NULL));
            CHECK_OK(tutti_recv(group, out, LONG_MESSAGE, TUTTI_F32, before, 0, NULL));
        }
    }
    tutti_work *work;
    CHECK_OK(tutti_recv(group, out, LONG_MESSAGE, TUTTI_F32, before, 0, TUTTI_OPTIONS(tutti_call, .work = &work)));
    usleep((useconds_t)rank * 60000);
    CHECK_OK(tutti_send(group, in, LONG_MESSAGE, TUTTI_F32, next, 0, NULL));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- what does not fit ---- */

TEST_WORLD(a_receive_that_runs_out_of_time_tells_what_came_instead, 2) {
    tutti_group *group = tutti_world_group(world);
    float values[3] = { 1, 2, 3 }, out[3];
    if (tutti_group_rank(group) == 0) {
        CHECK_OK(tutti_send(group, values, 3, TUTTI_F32, 1, 7, NULL));
        CHECK_OK(tutti_barrier(group, NULL));
    } else {
        CHECK_OK(tutti_barrier(group, NULL));
        CHECK_STATUS(tutti_recv(group, out, 3, TUTTI_F32, 0, 8, TUTTI_OPTIONS(tutti_call, .timeout_ns = 100000000)),
                     TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("from rank 0, tag 8");
        CHECK_MESSAGE("Rank 1 has not received: from rank 0 with tag 7 (3 elements of f32)");
        CHECK(strstr(tutti_error_message(), "ranks have come") == NULL);
        CHECK_OK(tutti_recv(group, out, 3, TUTTI_F32, 0, 7, NULL));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_receive_from_one_that_has_left_tells_what_came_instead, 2) {
    tutti_group *group = tutti_world_group(world);
    int values[100] = { 0 }, rank = tutti_group_rank(group);
    if (rank == 1) {
        CHECK_OK(tutti_send(group, values, 1, TUTTI_I32, 0, 7, NULL));
        return;
    }
    /* Alone, with another thing to do meanwhile, and as a work. */
    CHECK_STATUS(tutti_recv(group, values, 1, TUTTI_I32, 1, 8, NULL), TUTTI_ERROR_GONE);
    CHECK_MESSAGE("Rank 0 has not received: from rank 1 with tag 7 (1 element of i32)");
    tutti_work *work;
    CHECK_OK(tutti_recv(group, values, 1, TUTTI_I32, 1, 8, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_GONE);
    CHECK_MESSAGE("Rank 0 has not received: from rank 1 with tag 7 (1 element of i32)");
    tutti_work_release(work);
    CHECK_OK(tutti_recv(group, values, 1, TUTTI_I32, 1, 7, NULL));
}

TEST_WORLD(a_receive_from_anybody_is_told_in_words, 2) {
    tutti_group *group = tutti_world_group(world);
    int value = 0;
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, TUTTI_ANY_SOURCE, TUTTI_ANY_TAG,
                            TUTTI_OPTIONS(tutti_call, .timeout_ns = 20000000)),
                 TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("(i32, 1 element, from any rank, any tag)");
    CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 0, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = -2)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_UNTIL_EVENT");
    CHECK_OK(tutti_barrier(group, NULL));
}

static int warnings;
static void count_warnings(tutti_log_level level, const char *subsystem, const char *line, void *user) {
    (void)subsystem;
    (void)user;
    warnings += level == TUTTI_LOG_WARN &&
                strstr(line, "1 message that nobody received: from rank 0 with tag 5 (2 elements of i32)") != NULL;
}

TEST(messages_that_were_never_received_are_told_when_the_world_closes) {
    tutti_world *world;
    tutti_work *work;
    int values[2] = { 1, 2 };
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .log_callback = count_warnings), &world));
    CHECK_OK(
        tutti_send(tutti_world_group(world), values, 2, TUTTI_I32, 0, 5, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_EQ(warnings, 0);
    CHECK_OK(tutti_world_close(world));
    CHECK_EQ(warnings, 1);
}

static void long_or_short(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    size_t count = *(size_t *)argument;
    float *data = calloc(count, sizeof *data);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status;
    if (tutti_group_rank(group) == 0) {
        status = tutti_send(group, data, count, TUTTI_F32, 1, 0, NULL);
        if (status == TUTTI_OK) /* a short one is on its way before anybody looks at it: the next call tells */
            status = tutti_barrier(group, NULL);
    } else {
        status = tutti_recv(group, data, count - 1, TUTTI_F32, 0, 0, NULL);
    }
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("receives at most");
    free(data);
}

TEST(a_message_that_is_too_long_is_an_error_on_both_sides) {
    for (size_t count = 2; count < 10000; count *= 70) {
        test_threads(2, long_or_short, &count);
        test_processes(2, long_or_short, &count);
    }
}

TEST_WORLD(a_rank_keeps_only_so_many_messages_and_loses_none, 2) {
    tutti_group *group = tutti_world_group(world);
    int many = test_sanitized() ? 1000 : 20000, value;
    tutti_work *work = NULL;
    if (tutti_group_rank(group) == 0) {
        for (int i = 0; i < many; i++)
            CHECK_OK(tutti_send(group, &i, 1, TUTTI_I32, 1, 0, NULL));
    } else {
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 9, TUTTI_OPTIONS(tutti_call, .work = &work)));
        usleep(300000); /* the helper takes what comes */
        int got;
        for (int i = 0; i < many; i++) {
            CHECK_OK(tutti_recv(group, &got, 1, TUTTI_I32, 0, 0, NULL));
            CHECK_EQ(got, i);
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_send(group, &many, 1, TUTTI_I32, 1, 9, NULL));
    else
        CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_OK(tutti_barrier(group, NULL));
}
