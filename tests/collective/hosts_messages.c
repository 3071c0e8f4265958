/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives of groups whose ranks are on several hosts: the same matching, and the same errors, as on one.
 */
#include <pthread.h>
#include <tutti/collective.h>
#include <tutti/group.h>

#include "on_hosts.h"

/* The element at `index` of a message. */
static int element(int from, int to, int tag, size_t index) {
    return from * 1000003 + to * 10007 + tag * 101 + (int)index;
}

static void fill(int *to, size_t count, int source, int target, int tag) {
    for (size_t i = 0; i < count; i++)
        to[i] = element(source, target, tag, i);
}

static void check(const int *from, size_t count, int source, int target, int tag) {
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(from[i], element(source, target, tag, i));
}

/* ---- data ---- */

/* Sizes on all ways: in a packet, with the message, in fragments. */
static const size_t counts[] = { 0, 1, 20, 21, 5000, 40000, 700001 };

static void to_the_next(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        size_t count = test_sanitized() && counts[i] > 50000 ? 50000 : counts[i];
        int *in = malloc((count + 1) * sizeof *in), *out = malloc((count + 1) * sizeof *out);
        for (int step = 1; step < size; step++) { /* to ranks here and elsewhere */
            int to = (rank + step) % size, from = (rank + size - step) % size, tag = (int)i;
            fill(in, count, rank, to, tag);
            memset(out, 0, count * sizeof *out);
            CHECK_OK(tutti_send_recv(group, in, count, to, out, count, from, TUTTI_I32, tag, NULL));
            check(out, count, from, rank, tag);
            if ((rank / step) % 2 == 0 && to / step != rank / step && to > rank) { /* pairs, one after the other */
                CHECK_OK(tutti_send(group, in, count, TUTTI_I32, to, tag, NULL));
            } else if (from < rank && (from / step) % 2 == 0 && from / step != rank / step) {
                memset(out, 0, count * sizeof *out);
                CHECK_OK(tutti_recv(group, out, count, TUTTI_I32, from, tag, NULL));
                check(out, count, from, rank, tag);
            }
        }
        free(in);
        free(out);
    }
}

TEST(messages_of_every_size_go_between_hosts_and_within_them) {
    on_hosts(one_each, 2, to_the_next);
    on_hosts(two_and_two, 4, to_the_next);
    on_hosts(in_turns, 5, to_the_next);
}

/* Rank 0 comes when the others have closed their worlds; it was never connected to some of them. */
static void send_and_leave(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), mine[2] = { rank, -rank }, all[2 * MOST_RANKS];
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 0)
        usleep(300000);
    CHECK_OK(tutti_gather(group, mine, all, 2, TUTTI_I32, 0, NULL));
    if (rank != 0)
        CHECK_OK(tutti_send(group, mine, 2, TUTTI_I32, 0, rank, NULL));
    for (int from = 1; rank == 0 && from < size; from++) {
        CHECK_EQ(all[2 * from], from);
        CHECK_OK(tutti_recv(group, mine, 2, TUTTI_I32, from, from, NULL));
        CHECK_EQ(mine[1], -from);
    }
}

TEST(what_ranks_sent_before_they_closed_their_worlds_arrives) {
    on_hosts(one_each, 2, send_and_leave);
    on_hosts(two_and_two, 4, send_and_leave);
}

static void matching(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), value[30];
    if (rank != 0) { /* two of each tag, short and longer ones in turn */
        for (int tag = 1; tag <= 3; tag++)
            for (int i = 0; i < 2; i++) {
                size_t count = tag == 2 ? 30 : 2;
                fill(value, count, rank, i, tag);
                tutti_work *work;
                CHECK_OK(tutti_send(group, value, count, TUTTI_I32, 0, tag,
                                    TUTTI_OPTIONS(tutti_call, .work = count == 30 ? &work : NULL)));
                if (count == 30) {
                    CHECK_OK(tutti_work_wait(work, 0));
                    tutti_work_release(work);
                }
            }
        return;
    }
    tutti_received received = TUTTI_RECEIVED_INIT;
    int seen[MOST_RANKS] = { 0 };
    for (int i = 0; i < 2 * (size - 1); i++) { /* from anybody, in each one's order */
        CHECK_OK(tutti_recv(group, value, 30, TUTTI_I32, TUTTI_ANY_SOURCE, 2,
                            TUTTI_OPTIONS(tutti_call, .received = &received)));
        CHECK_EQ(received.count, 30u);
        CHECK_EQ(received.tag, 2);
        check(value, 30, received.source, seen[received.source]++, 2);
    }
    for (int from = 1; from < size; from++) { /* later tags first */
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tutti_recv(group, value, 30, TUTTI_I32, from, 3, NULL));
            check(value, 2, from, i, 3);
        }
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tutti_recv(group, value, 2, TUTTI_I32, from, TUTTI_ANY_TAG,
                                TUTTI_OPTIONS(tutti_call, .received = &received)));
            CHECK_EQ(received.tag, 1);
            check(value, 2, from, i, 1);
        }
    }
}

TEST(messages_between_hosts_are_matched_by_source_and_tag_in_order) {
    on_hosts(one_each, 2, matching);
    on_hosts(three_two_one, 6, matching);
}

/* Everybody to everybody in one batch, with a collective in it, blocking and as a work. */
static void all_in_a_batch(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    enum {
        COUNT = 3000
    };
    int *in = malloc((size_t)size * COUNT * sizeof *in), *out = malloc((size_t)size * COUNT * sizeof *out), sum;
    for (int round = 0; round < 3; round++) {
        size_t count = round == 1 ? 5 : COUNT;
        tutti_batch *batch;
        tutti_work *work = NULL;
        CHECK_OK(tutti_batch_begin(group, &batch));
        tutti_call call = { .size = sizeof call, .batch = batch };
        for (int other = 0; other < size; other++) { /* to itself too */
            fill(in + other * COUNT, count, rank, other, round);
            CHECK_OK(tutti_send(group, in + other * COUNT, count, TUTTI_I32, other, round, &call));
            CHECK_OK(tutti_recv(group, out + other * COUNT, count, TUTTI_I32, other, round, &call));
        }
        CHECK_OK(tutti_all_reduce(group, &rank, &sum, 1, TUTTI_I32, TUTTI_SUM, &call));
        CHECK_OK(tutti_batch_end(batch, TUTTI_OPTIONS(tutti_call, .work = round == 2 ? &work : NULL)));
        if (work != NULL) {
            CHECK_OK(tutti_work_wait(work, 0));
            tutti_work_release(work);
        }
        CHECK_EQ(sum, size * (size - 1) / 2);
        for (int other = 0; other < size; other++)
            check(out + other * COUNT, count, other, rank, round);
    }
    free(in);
    free(out);
}

TEST(batches_of_messages_and_collectives_run_between_hosts) {
    on_hosts(one_each, 2, all_in_a_batch);
    on_hosts(three_two_one, 6, all_in_a_batch);
}

/* Works that are started before anybody receives, more bytes than may be ahead; tested, waited for, released. */
static void many_works(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), other = (rank + size / 2) % size;
    enum {
        WORKS = 24,
        COUNT = 100000
    };
    size_t count = test_sanitized() ? COUNT / 10 : COUNT;
    tutti_work *sends[WORKS], *receives[WORKS];
    int *in = malloc(WORKS * count * sizeof *in), *out = malloc(WORKS * count * sizeof *out);
    for (int i = 0; i < WORKS; i++) {
        fill(in + (size_t)i * count, count, rank, other, i);
        CHECK_OK(tutti_send(group, in + (size_t)i * count, count, TUTTI_I32, other, i,
                            TUTTI_OPTIONS(tutti_call, .work = &sends[i])));
    }
    CHECK_OK(tutti_barrier(group, NULL)); /* collectives go on meanwhile */
    for (int i = WORKS - 1; i >= 0; i--)
        CHECK_OK(tutti_recv(group, out + (size_t)i * count, count, TUTTI_I32, other, i,
                            TUTTI_OPTIONS(tutti_call, .work = &receives[i])));
    for (int i = 0; i < WORKS; i++) {
        bool finished = false;
        while (i % 2 == 0 && !finished)
            CHECK_OK(tutti_work_test(receives[i], &finished));
        CHECK_OK(tutti_work_wait(receives[i], 0));
        check(out + (size_t)i * count, count, other, rank, i);
        CHECK_OK(tutti_work_wait(sends[i], 0));
        tutti_work_release(receives[i]);
        tutti_work_release(sends[i]);
    }
    free(in);
    free(out);
}

TEST(works_between_hosts_go_on_while_collectives_run) {
    on_hosts(one_each, 2, many_works);
    on_hosts(two_and_two, 4, many_works);
}

/* A rank that does nothing yet keeps nobody from starting, and others from theirs: rank 0 sends to 1 and 2 in one
 * batch; 1 comes only after 2, on its host, has received. */
static void one_comes_late(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *pair;
    int rank = tutti_group_rank(group), value = 0, values[] = { 0, 1, 2 };
    CHECK_OK(tutti_group_new(world, (int[]){ 1, 2 }, 2, NULL, &pair));
    if (rank == 0) {
        tutti_batch *batch;
        CHECK_OK(tutti_batch_begin(group, &batch));
        for (int to = 1; to < 3; to++)
            CHECK_OK(tutti_send(group, &values[to], 1, TUTTI_I32, to, 0, TUTTI_OPTIONS(tutti_call, .batch = batch)));
        CHECK_OK(tutti_batch_end(batch, NULL));
    } else {
        if (rank == 2)
            CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 0, NULL));
        CHECK_OK(tutti_barrier(pair, NULL));
        if (rank == 1)
            CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 0, NULL));
        CHECK_EQ(value, rank);
    }
    tutti_group_release(pair);
}

TEST(a_rank_that_comes_late_holds_up_nobody_else) {
    static const int one_and_two[] = { 0, 1, 1 };
    on_hosts(one_and_two, 3, one_comes_late);
}

/* ---- errors ---- */

static void too_long(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value[100] = { 0 };
    tutti_status status = rank == 0 ? tutti_send(group, value, 100, TUTTI_I32, 1, 5, NULL)
                                    : tutti_recv(group, value, 60, TUTTI_I32, 0, 5, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "rank 0 sent 100 elements of i32 with tag 5, rank 1 receives at most 60") !=
          NULL);
}

static void another_type(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value[100] = { 0 };
    tutti_status status = rank == 0 ? tutti_send(group, value, 100, TUTTI_F32, 1, 5, NULL)
                                    : tutti_recv(group, value, 100, TUTTI_I32, 0, 5, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "f32") != NULL && strstr(tutti_error_message(), "i32") != NULL);
}

TEST(messages_that_do_not_fit_are_told_on_both_hosts) {
    on_hosts(one_each, 2, too_long);
    on_hosts(one_each, 2, another_type);
}

static void nobody_sends(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value = 7;
    if (rank == 0)
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 1, 3, NULL));
    if (rank == 1) {
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 3, NULL));
        CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 0, 4,
                                TUTTI_OPTIONS(tutti_call, .timeout_ns = 200 * TU_MILLISECOND)),
                     TUTTI_ERROR_TIMEOUT);
        CHECK(strstr(tutti_error_message(), "recv") != NULL && strstr(tutti_error_message(), "rank 0") != NULL);
        tutti_work *work;
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 4,
                            TUTTI_OPTIONS(tutti_call, .work = &work, .timeout_ns = 200 * TU_MILLISECOND)));
        CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_TIMEOUT);
        tutti_work_release(work);
    }
    CHECK_OK(tutti_barrier(group, NULL)); /* the receives ended, the group did not */
}

TEST(a_receive_that_runs_out_of_time_ends_only_that_receive) {
    on_hosts(one_each, 2, nobody_sends);
}

static void late_with_another_tag(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value = 7;
    if (rank == 0)
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 1, 3, NULL));
    CHECK_OK(tutti_barrier(group, NULL)); /* so it has come */
    if (rank == 1) {
        CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 0, 4,
                                TUTTI_OPTIONS(tutti_call, .timeout_ns = 100 * TU_MILLISECOND)),
                     TUTTI_ERROR_TIMEOUT);
        CHECK(strstr(tutti_error_message(), "from rank 0 with tag 3") != NULL);
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 3, NULL));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(a_timeout_tells_what_came_instead_from_other_hosts) {
    on_hosts(one_each, 2, late_with_another_tag);
}

/* Rank 1 dies; the others wait in a receive from it, in one from anybody, in a send to it, and as a work. All are
 * connected before: UCX 1.13 may end a process itself when a peer dies while it connects (docs/hosts.md). */
static void one_dies(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value[1000] = { 0 }, all[MOST_RANKS] = { 0 };
    CHECK_OK(tutti_all_to_all(group, all, all, 1, TUTTI_I32, NULL));
    tutti_status status = tutti_barrier(group, NULL); /* it may die before all are out of it */
    if (status != TUTTI_OK) {
        CHECK(rank > 1);
    } else if (rank == 1) {
        CHECK_OK(tutti_recv(group, value, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 9, NULL));
        kill(getpid(), SIGKILL);
    } else if (rank == 0) {
        CHECK_OK(tutti_send(group, value, 1, TUTTI_I32, 1, 9, NULL));
        status = tutti_recv(group, value, 1, TUTTI_I32, 1, 0, NULL);
    } else if (rank == 2) {
        status = tutti_recv(group, value, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 0, NULL);
    } else if (rank == 3) {
        status = tutti_send(group, value, 1000, TUTTI_I32, 1, 0, NULL);
    } else {
        tutti_work *work;
        status = tutti_recv(group, value, 1, TUTTI_I32, 1, 0, TUTTI_OPTIONS(tutti_call, .work = &work));
        if (status == TUTTI_OK) {
            status = tutti_work_wait(work, 0);
            tutti_work_release(work);
        }
    }
    CHECK_STATUS(status, TUTTI_ERROR_DEAD);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 1);
}

TEST(a_dead_rank_ends_sends_and_receives_on_every_host) {
    static const int apart[] = { 0, 1, 0, 2, 2 };
    on_hosts(apart, 5, one_dies);
}

static void one_closes(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value[1000] = { 0 };
    if (rank == 1) { /* its last message still arrives */
        CHECK_OK(tutti_send(group, value, 1, TUTTI_I32, 0, 0, NULL));
        return;
    }
    CHECK_OK(tutti_recv(group, value, 1, TUTTI_I32, 1, 0, NULL));
    CHECK_STATUS(tutti_recv(group, value, 1, TUTTI_I32, 1, 0, NULL), TUTTI_ERROR_GONE);
    CHECK_STATUS(tutti_recv(group, value, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 0, NULL), TUTTI_ERROR_GONE);
    CHECK_STATUS(tutti_send(group, value, 1000, TUTTI_I32, 1, 0, NULL), TUTTI_ERROR_GONE);
}

TEST(a_rank_that_closed_its_world_ends_only_messages_with_it) {
    on_hosts(one_each, 2, one_closes);
}

static void one_aborts(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value = 0;
    tutti_status status = tutti_barrier(group, NULL); /* the abort may overtake it */
    CHECK(status == TUTTI_OK || rank % 2 == 1);
    if (rank == 0) {
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 2, 0, NULL));
        CHECK_OK(tutti_group_abort(group, "no more"));
        return;
    }
    if (rank == 2)
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 0, 0, NULL));
    CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 0, 0, NULL), TUTTI_ERROR_ABORTED);
    CHECK(strstr(tutti_error_message(), "no more") != NULL);
}

TEST(an_abort_ends_receives_on_other_hosts) {
    on_hosts(two_and_two, 4, one_aborts);
}

/* ---- threads ---- */

typedef struct thread_part {
    tutti_group *group;
    int tag;
} thread_part;

static void *exchange_with_tag(void *argument) {
    const thread_part *part = argument;
    int rank = tutti_group_rank(part->group), other = 1 - rank, in[50], out[50];
    for (int i = 0; i < (test_sanitized() ? 20 : 200); i++) {
        size_t count = i % 2 == 0 ? 50 : 3;
        fill(in, count, rank, i, part->tag);
        CHECK_OK(tutti_send_recv(part->group, in, count, other, out, count, other, TUTTI_I32, part->tag, NULL));
        check(out, count, other, i, part->tag);
    }
    return NULL;
}

static void several_threads(tutti_world *world) {
    pthread_t threads[3];
    thread_part parts[3];
    for (int i = 0; i < 3; i++) {
        parts[i] = (thread_part){ tutti_world_group(world), i };
        CHECK(pthread_create(&threads[i], NULL, exchange_with_tag, &parts[i]) == 0);
    }
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

TEST(threads_of_a_rank_send_and_receive_between_hosts_at_once) {
    on_hosts(one_each, 2, several_threads);
}
