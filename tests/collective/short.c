/* SPDX-License-Identifier: Apache-2.0
 *
 * Short messages by their express lane: they give what the ordinary way gives, errors and records included, and
 * overtake nothing.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <tutti/collective.h>
#include <unistd.h>

#include "../harness.h"
#include "collective/packet.h"
#include "collective/short.h"
#include "job/recorder.h"
#include "world/world.h"

/* Options that leave a call as it is, but for the way it goes. */
static const tutti_call ordinary = { .size = sizeof ordinary, .executor = "shm" };

/* The first messages of a group make what the lane needs. */
static tutti_group *warm(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), in = rank, out = -1;
    for (int i = 0; i < 2; i++)
        CHECK_OK(
            tutti_send_recv(group, &in, 1, (rank + 1) % size, &out, 1, (rank + size - 1) % size, TUTTI_I32, 0, NULL));
    CHECK_EQ(out, (rank + size - 1) % size);
    return group;
}

#define CELL (TU_CELL_BYTES / (int)sizeof(int)) /* 24 + 8 * 61 */

TEST_WORLD(short_messages_go_by_the_lane, 2) {
    tutti_group *group = warm(world);
    int rank = tutti_group_rank(group), in[CELL], out[CELL];
    tutti_status status;
    for (int count = 0; count <= CELL; count += count < 24 ? 1 : 61) {
        for (int i = 0; i < CELL; i++) {
            in[i] = rank * 1000 + i;
            out[i] = -1;
        }
        tu_message both[2] = { { group, TU_OPERATION_SEND, in, NULL, (size_t)count, TUTTI_I32, 1 - rank, 3 },
                               { group, TU_OPERATION_RECV, NULL, out, (size_t)count, TUTTI_I32, 1 - rank, 3 } };
        CHECK(tu_short_submit(both, 2, NULL, &status));
        CHECK_OK(status);
        for (int i = 0; i < CELL; i++)
            CHECK_EQ(out[i], i < count ? (1 - rank) * 1000 + i : -1);
    }
    /* What is not for it: too long, from anybody, to oneself or nobody, with an option. */
    int longer[CELL + 1] = { 0 };
    tu_message messages[] = { { group, TU_OPERATION_SEND, longer, NULL, CELL + 1, TUTTI_I32, 1 - rank, 3 },
                              { group, TU_OPERATION_RECV, NULL, longer, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 3 },
                              { group, TU_OPERATION_RECV, NULL, longer, 1, TUTTI_I32, 1 - rank, TUTTI_ANY_TAG },
                              { group, TU_OPERATION_SEND, longer, NULL, 1, TUTTI_I32, rank, 3 },
                              { group, TU_OPERATION_SEND, longer, NULL, 1, TUTTI_I32, TUTTI_NOBODY, 3 } };
    for (size_t i = 0; i < sizeof messages / sizeof messages[0]; i++)
        CHECK(!tu_short_submit(&messages[i], 1, NULL, &status));
    tu_message plain = { group, TU_OPERATION_SEND, longer, NULL, 1, TUTTI_I32, 1 - rank, 3 };
    CHECK(!tu_short_submit(&plain, 1, &ordinary, &status));
}

/* ---- cells ---- */

static void fill(int *values, int count, int first) {
    for (int i = 0; i < count; i++)
        values[i] = first + i;
}

static void expect(const int *values, int count, int first) {
    for (int i = 0; i < count; i++)
        CHECK_EQ(values[i], first + i);
}

/* Messages that fit into a cell are over when they are sent: their buffer is used again, everybody meets, and only
 * then they are received, the last one first. Both ways, and to ranks that have taken some of them as unexpected. */
TEST_WORLD(messages_that_fit_into_a_cell_are_sent_before_anybody_receives, 2) {
    tutti_group *group = warm(world);
    int rank = tutti_group_rank(group), values[CELL], count = CELL;
    CHECK_OK(tutti_group_set_timeout(group, INT64_C(20) * 1000 * 1000 * 1000));
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < TU_PACKETS; i++) {
            fill(values, count - i, rank * 10000 + i * 1000);
            CHECK_OK(
                tutti_send(group, values, (size_t)(count - i), TUTTI_I32, 1 - rank, i, way == 0 ? NULL : &ordinary));
        }
        CHECK_OK(tutti_barrier(group, NULL));
        for (int i = TU_PACKETS - 1; i >= 0; i--) {
            tutti_received received = TUTTI_RECEIVED_INIT;
            CHECK_OK(tutti_recv(group, values, (size_t)count, TUTTI_I32, 1 - rank, i,
                                i == 1 ? TUTTI_OPTIONS(tutti_call, .received = &received) : NULL));
            CHECK(i != 1 || received.count == (size_t)count - 1);
            expect(values, count - i, (1 - rank) * 10000 + i * 1000);
        }
        CHECK_OK(tutti_barrier(group, NULL));
    }
}

/* To five ranks that take nothing yet: more than the rings and cells of one rank hold. */
TEST_WORLD_THREADS(messages_for_which_no_cell_is_free_wait_and_arrive, 6) {
    tutti_group *group = warm(world);
    int rank = tutti_group_rank(group), value = 0, values[CELL];
    static int sent[6][TU_PACKETS][CELL];
    tutti_call call = TUTTI_CALL_INIT;
    tutti_work *work = NULL;
    if (rank == 0) {
        CHECK_OK(tutti_batch_begin(group, &call.batch));
        for (int i = 0; i < TU_PACKETS; i++)
            for (int to = 1; to < 6; to++) {
                fill(sent[to][i], CELL, to * 10000 + i * 1000);
                CHECK_OK(tutti_send(group, sent[to][i], CELL, TUTTI_I32, to, i, &call));
            }
        CHECK_OK(tutti_batch_end(call.batch, TUTTI_OPTIONS(tutti_call, .work = &work)));
        for (int to = 1; to < 6; to++) /* not before: a rank that waits in a receive takes what comes */
            CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, to, 99, NULL));
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
    }
    for (int i = TU_PACKETS - 1; i >= 0 && rank != 0; i--) {
        CHECK_OK(tutti_recv(group, values, CELL, TUTTI_I32, 0, i, i % 2 == 0 ? NULL : &ordinary));
        expect(values, CELL, rank * 10000 + i * 1000);
    }
    if (rank != 0)
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 99, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_message_in_a_cell_can_be_received_after_its_sender_has_closed, 2) {
    tutti_group *group = warm(world);
    int values[CELL];
    if (tutti_group_rank(group) == 0) {
        fill(values, CELL, 7);
        CHECK_OK(tutti_send(group, values, CELL, TUTTI_I32, 1, 5, NULL));
        return;
    }
    CHECK_STATUS(tutti_recv(group, values, CELL, TUTTI_I32, 0, 6, NULL), TUTTI_ERROR_GONE);
    CHECK_OK(tutti_recv(group, values, CELL, TUTTI_I32, 0, 5, NULL));
    expect(values, CELL, 7);
}

/* ---- errors ---- */

typedef struct trial {
    const tutti_call *call; /* NULL: by the lane */
    void (*mistake)(tutti_world *world, const tutti_call *call);
    struct outcome {
        tutti_status status;
        int at_fault;
        char operation[32], message[600];
    } * outcomes; /* by rank, in memory that the ranks share */
} trial;

static void too_long(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int values[4] = { 0 };
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_send(group, values, 4, TUTTI_I32, 1, 5, call));
    else
        (void)!tutti_recv(group, values, 3, TUTTI_I32, 0, 5, call);
}

static void too_long_for_a_cell(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int values[CELL] = { 0 };
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_send(group, values, CELL, TUTTI_I32, 1, 5, call));
    else
        (void)!tutti_recv(group, values, CELL - 1, TUTTI_I32, 0, 5, call);
}

static void of_another_type(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int values[4] = { 0 };
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_send(group, values, 4, TUTTI_F32, 1, 5, call));
    else
        (void)!tutti_recv(group, values, 4, TUTTI_I32, 0, 5, call);
}

static void aborted(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int value = 0;
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_group_abort(group, "enough"));
    else
        (void)!tutti_recv(group, &value, 1, TUTTI_I32, 0, 5, call);
}

/* Rank 0 is closed when its body is over, after what it sent. */
static void closed(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int value = 0;
    if (tutti_group_rank(group) == 0) {
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 1, 5, call));
        return;
    }
    CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 5, call));
    (void)!tutti_recv(group, &value, 1, TUTTI_I32, 0, 5, call);
}

static void another_tag(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int value = 0;
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 1, 8, call));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1) {
        CHECK_OK(tutti_group_set_timeout(group, 30 * 1000 * 1000));
        CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 0, 7, call), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("with tag 8");
        CHECK_OK(tutti_group_set_timeout(group, 0));
        tutti_error_copy error = TUTTI_ERROR_COPY_INIT;
        CHECK_OK(tutti_error_save(&error));
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 8, call));
        CHECK_OK(tutti_barrier(group, NULL));
        (void)!tutti_error_restore(&error);
    } else {
        CHECK_OK(tutti_barrier(group, NULL));
    }
}

static void refused(tutti_world *world, const tutti_call *call) {
    tutti_group *group = warm(world);
    int rank = tutti_group_rank(group), value = 0;
    CHECK_STATUS(tutti_send(group, &value, 1, TUTTI_I32, 2, 0, call), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_send(group, &value, 1, TUTTI_I32, 1 - rank, -5, call), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_recv(group, NULL, 1, TUTTI_I32, 1 - rank, 0, call), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_recv(group, &value, 1, (tutti_dtype)77, 1 - rank, 0, call), TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_send_recv(group, &value, 1, 1 - rank, &value, 1, 1 - rank, TUTTI_I32, 0, call),
                 TUTTI_ERROR_ARGUMENT);
}

/* Everything but the numbers in it, which tell times and processes. */
static void note_outcome(struct outcome *outcome) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    outcome->status = info.status;
    outcome->at_fault = info.at_fault_count > 0 ? info.at_fault[0] : -1;
    snprintf(outcome->operation, sizeof outcome->operation, "%s", info.operation);
    size_t used = 0;
    for (const char *from = tutti_error_message(); *from != 0 && used + 1 < sizeof outcome->message; from++)
        if (strchr("0123456789.e+", *from) == NULL)
            outcome->message[used++] = *from;
    outcome->message[used] = 0;
}

static void try_on_rank(tutti_world *world, void *argument) {
    const trial *this = argument;
    this->mistake(world, this->call);
    note_outcome(&this->outcomes[tutti_world_rank(world)]);
}

TEST(the_lane_and_the_ordinary_way_fail_alike) {
    static void (*const mistakes[])(tutti_world *,
                                    const tutti_call *) = { too_long, too_long_for_a_cell, of_another_type, aborted,
                                                            closed,   another_tag,         refused };
    void *shared = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        struct outcome *outcomes = memset(shared, 0, 1 << 16);
        for (int way = 0; way < 2; way++) {
            trial this = { way == 0 ? NULL : &ordinary, mistakes[i], outcomes + 2 * way };
            test_processes(2, try_on_rank, &this);
        }
        CHECK(outcomes[1].status != TUTTI_OK);
        for (int rank = 0; rank < 2; rank++) {
            CHECK_EQ(outcomes[rank].status, outcomes[2 + rank].status);
            CHECK_EQ(outcomes[rank].at_fault, outcomes[2 + rank].at_fault);
            CHECK_TEXT(outcomes[rank].operation, outcomes[2 + rank].operation);
            CHECK_TEXT(outcomes[rank].message, outcomes[2 + rank].message);
        }
    }
    munmap(shared, 1 << 16);
}

/* ---- order ---- */

#define LONG_MESSAGE 5000

TEST_WORLD(short_messages_do_not_overtake_a_long_one_that_was_sent_before, 2) {
    tutti_group *group = warm(world);
    static _Thread_local int values[LONG_MESSAGE];
    if (tutti_group_rank(group) == 0) {
        tutti_work *work = NULL;
        CHECK_OK(tutti_send(group, values, LONG_MESSAGE, TUTTI_I32, 1, 2, TUTTI_OPTIONS(tutti_call, .work = &work)));
        for (int i = 0; i < 6; i++)
            CHECK_OK(tutti_send(group, &i, 1, TUTTI_I32, 1, 2, NULL));
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
    } else {
        tutti_received received = TUTTI_RECEIVED_INIT;
        CHECK_OK(
            tutti_recv(group, values, LONG_MESSAGE, TUTTI_I32, 0, 2, TUTTI_OPTIONS(tutti_call, .received = &received)));
        CHECK_EQ(received.count, LONG_MESSAGE);
        for (int i = 0; i < 6; i++) {
            CHECK_OK(tutti_recv(group, values, 1, TUTTI_I32, 0, 2, NULL));
            CHECK_EQ(values[0], i);
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_receive_that_was_started_before_gets_its_message_first, 2) {
    tutti_group *group = warm(world);
    int started = -1, later = -1;
    if (tutti_group_rank(group) == 1) {
        tutti_work *work = NULL;
        CHECK_OK(tutti_recv(group, &started, 1, TUTTI_I32, 0, 2, TUTTI_OPTIONS(tutti_call, .work = &work)));
        CHECK_OK(tutti_recv(group, &later, 1, TUTTI_I32, 0, 2, NULL));
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
        CHECK_EQ(started, 100);
        CHECK_EQ(later, 101);
    } else {
        for (int value = 100; value < 102; value++)
            CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 1, 2, NULL));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

/* Rank 0 stops when it reads this page for the first time, until rank 1 has made room in its ring. */
static unsigned char *halting_page;
static _Atomic int halted, has_room;

static void halt(int signal) {
    (void)signal;
    CHECK_EQ(mprotect(halting_page, 4096, PROT_READ | PROT_WRITE), 0);
    atomic_store(&halted, 1);
    while (atomic_load(&has_room) == 0)
        sched_yield();
}

/* The ring to rank 1 is full for the first message of a batch and no more for the last one, to the same rank: what
 * stands between them takes that long. */
static void send_with_another_between(tutti_group *group, int *values) {
    tutti_call call = TUTTI_CALL_INIT;
    for (int i = 0; i < TU_PACKETS; i++)
        CHECK_OK(tutti_send(group, &values[i], 1, TUTTI_I32, 1, 0, NULL));
    halting_page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(halting_page != MAP_FAILED);
    struct sigaction halting = { .sa_handler = halt }, before;
    CHECK_EQ(sigaction(SIGSEGV, &halting, &before), 0);
    CHECK_OK(tutti_batch_begin(group, &call.batch));
    CHECK_OK(tutti_send(group, &values[TU_PACKETS], 1, TUTTI_I32, 1, 0, &call));
    CHECK_OK(tutti_send(group, halting_page, 2 * TU_PACKET_BYTES, TUTTI_U8, 2, 0, &call));
    CHECK_OK(tutti_send(group, &values[TU_PACKETS + 1], 1, TUTTI_I32, 1, 0, &call));
    CHECK_OK(tutti_batch_end(call.batch, NULL));
    CHECK_EQ(sigaction(SIGSEGV, &before, NULL), 0);
    CHECK_EQ(munmap(halting_page, 4096), 0);
}

TEST_WORLD_THREADS(messages_to_one_rank_arrive_in_order_with_another_between_them, 3) {
    tutti_group *group = warm(world);
    int rank = tutti_group_rank(group), values[TU_PACKETS + 2], got = -1;
    unsigned char between[2 * TU_PACKET_BYTES];
    for (int i = 0; i < TU_PACKETS + 2; i++)
        values[i] = i;
    CHECK_OK(tutti_barrier(group, NULL)); /* rank 1 takes nothing while it waits in a receive */
    if (rank == 0)
        send_with_another_between(group, values);
    while (rank == 1 && atomic_load(&halted) == 0)
        sched_yield();
    for (int i = 0; i < TU_PACKETS + 2 && rank == 1; i++) {
        CHECK_OK(tutti_recv(group, &got, 1, TUTTI_I32, 0, 0, NULL));
        atomic_store(&has_room, 1);
        CHECK_EQ(got, i);
    }
    if (rank == 2)
        CHECK_OK(tutti_recv(group, between, sizeof between, TUTTI_U8, 0, 0, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* `count` messages to the next rank, whose receives are noted in the order of their tags, or in the reverse one; two of
 * them share each tag, and those are in order. */
static void batch_of(tutti_group *group, int count, bool reversed, bool with_others) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    int next = (rank + 1) % size, before = (rank + size - 1) % size, in[40], out[40], sum = -1;
    static _Thread_local int longer_in[LONG_MESSAGE], longer_out[LONG_MESSAGE];
    tutti_call call = TUTTI_CALL_INIT;
    CHECK_OK(tutti_batch_begin(group, &call.batch));
    for (int i = 0; i < count; i++) {
        in[i] = rank * 1000 + i;
        out[i] = -1;
        CHECK_OK(tutti_send(group, &in[i], 1, TUTTI_I32, next, i / 2, &call));
    }
    if (with_others) {
        longer_in[LONG_MESSAGE - 1] = rank + 7;
        CHECK_OK(tutti_send_recv(group, longer_in, LONG_MESSAGE, next, longer_out, LONG_MESSAGE, before, TUTTI_I32, 99,
                                 &call));
        CHECK_OK(tutti_all_reduce(group, &rank, &sum, 1, TUTTI_I32, TUTTI_SUM, &call));
    }
    for (int k = 0; k < count; k++) {
        int i = reversed ? (count - 1 - k) ^ 1 : k;
        CHECK_OK(tutti_recv(group, &out[i], 1, TUTTI_I32, before, i / 2, &call));
    }
    CHECK_OK(tutti_batch_end(call.batch, NULL));
    for (int i = 0; i < count; i++)
        CHECK_EQ(out[i], before * 1000 + i);
    if (with_others) {
        CHECK_EQ(longer_out[LONG_MESSAGE - 1], before + 7);
        CHECK_EQ(sum, size * (size - 1) / 2);
    }
}

TEST_WORLD(batches_of_short_messages_of_any_number_and_order_arrive, 3) {
    tutti_group *group = warm(world);
    for (int round = 0; round < (test_sanitized() ? 2 : 10); round++)
        for (int count = 2; count <= 40; count += 2)
            for (int kind = 0; kind < 4; kind++)
                batch_of(group, count, (kind & 1) != 0, (kind & 2) != 0);
}

/* ---- threads ---- */

typedef struct party {
    tutti_group *group;
    int tag;
} party;

static void *exchange_often(void *argument) {
    const party *this = argument;
    int rank = tutti_group_rank(this->group), out;
    for (int i = 0; i < (test_sanitized() ? 100 : 1000); i++) {
        int in = i * 10 + rank;
        CHECK_OK(tutti_send_recv(this->group, &in, 1, 1 - rank, &out, 1, 1 - rank, TUTTI_I32, this->tag, NULL));
        CHECK_EQ(out, i * 10 + 1 - rank);
    }
    return NULL;
}

TEST_WORLD(threads_of_a_rank_may_exchange_short_messages_at_once, 2) {
    tutti_group *group = warm(world);
    party parties[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        parties[i] = (party){ group, i };
        CHECK_EQ(pthread_create(&threads[i], NULL, exchange_often, &parties[i]), 0);
    }
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(messages_may_be_exchanged_beside_the_first_collective_of_a_group, 2) {
    party party = { tutti_world_group(world), 0 };
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, exchange_often, &party), 0);
    CHECK_OK(tutti_barrier(party.group, NULL));
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_OK(tutti_barrier(party.group, NULL));
}

/* ---- records ---- */

/* Of this rank's newest entry of such a message that has ended well. */
static bool find_record(const tutti_world *world, tu_operation operation, int tag, tu_record_view *view) {
    const tu_recorder *recorder = tu_job_recorder(world->job, world->local_rank);
    for (uint64_t back = 0; back < 64; back++)
        if (tu_recorder_entry(recorder, back, view) && view->info.operation == operation && view->info.tag == tag)
            return !view->running && view->status == TUTTI_OK;
    return false;
}

TEST_WORLD(a_short_message_is_recorded_and_counted_as_any_other, 2) {
    tutti_group *group = warm(world);
    int rank = tutti_group_rank(group), in[3] = { 0 }, out[3];
    static const tu_operation operations[] = { TU_OPERATION_SEND, TU_OPERATION_RECV };
    tu_record_view by[2][2];
    tu_counters before[2], after[2];
    const tu_recorder *recorder = tu_job_recorder(world->job, world->local_rank);
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < 2; i++)
            tu_recorder_counters(recorder, operations[i], &before[i]);
        CHECK_OK(tutti_send_recv(group, in, 3, 1 - rank, out, 3, 1 - rank, TUTTI_I32, 40 + way,
                                 way == 0 ? NULL : &ordinary));
        for (int i = 0; i < 2; i++) {
            CHECK(find_record(world, operations[i], 40 + way, &by[way][i]));
            tu_recorder_counters(recorder, operations[i], &after[i]);
            CHECK_EQ(after[i].calls - before[i].calls, 1);
            CHECK_EQ(after[i].bytes - before[i].bytes, sizeof in);
        }
    }
    for (int i = 0; i < 2; i++) {
        const tu_record_view *lane = &by[0][i], *other = &by[1][i];
        CHECK_EQ(lane->info.group_key, other->info.group_key);
        CHECK_EQ(lane->info.count, other->info.count);
        CHECK_EQ(lane->info.timeout_ns, other->info.timeout_ns);
        CHECK_EQ(lane->info.executor, other->info.executor);
        CHECK_EQ(lane->info.root, other->info.root);
        CHECK_EQ(lane->info.dtype, other->info.dtype);
        CHECK_EQ(lane->thread, other->thread);
        CHECK(lane->ended_ns >= lane->created_ns);
    }
    CHECK(by[0][0].info.sequence != by[0][1].info.sequence);
    CHECK_OK(tutti_barrier(group, NULL));
}
