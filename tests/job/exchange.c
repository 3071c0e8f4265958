/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange, between threads and between processes: everybody's record reaches everybody, in whatever order and from
 * whichever thread, and whoever fails to agree or to come is named.
 */
#include "job.h"

static void exchange_numbers(tu_job *job, uint64_t key, uint64_t sequence) {
    job_exchange space;
    int all[JOB_RANKS], mine = 1000 * (int)key + 10 * (int)sequence + tu_job_rank(job);
    CHECK_OK(tu_job_exchange(job, job_exchange_all(&space, job, key, sequence, &mine, sizeof mine, NULL), all, NULL));
    for (int i = 0; i < tu_job_size(job); i++)
        CHECK_EQ(all[i], 1000 * (int)key + 10 * (int)sequence + i);
}

JOB_TEST(everybody_gets_every_record, 4) {
    for (uint64_t sequence = 1; sequence <= 100; sequence++)
        exchange_numbers(job, 7, sequence);
}

JOB_TEST(the_largest_record_arrives_whole, 3) {
    static _Thread_local unsigned char mine[TU_EXCHANGE_BYTES], all[3 * TU_EXCHANGE_BYTES];
    job_exchange space;
    memset(mine, 'a' + tu_job_rank(job), sizeof mine);
    for (uint64_t sequence = 1; sequence <= 60; sequence++) {
        CHECK_OK(tu_job_exchange(job, job_exchange_all(&space, job, 1, sequence, mine, sizeof mine, NULL), all, NULL));
        for (int i = 0; i < 3; i++)
            CHECK(all[i * TU_EXCHANGE_BYTES] == 'a' + i && all[(i + 1) * TU_EXCHANGE_BYTES - 1] == 'a' + i);
    }
    CHECK_STATUS(
        tu_job_exchange(job, job_exchange_all(&space, job, 1, 61, mine, TU_EXCHANGE_BYTES + 1, NULL), all, NULL),
        TUTTI_ERROR_ARGUMENT);
}

typedef struct keyed {
    tu_job *job;
    uint64_t key;
} keyed;

static void *run_key(void *argument) {
    keyed *self = argument;
    for (uint64_t sequence = 1; sequence <= 200; sequence++)
        exchange_numbers(self->job, self->key, sequence);
    return NULL;
}

JOB_TEST(three_threads_of_a_rank_exchange_under_different_keys_at_once, 3) {
    keyed keys[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        keys[i] = (keyed){ job, (uint64_t)(10 + i) };
        CHECK_EQ(pthread_create(&threads[i], NULL, run_key, &keys[i]), 0);
    }
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}

JOB_TEST(early_messages_wait_in_the_mailbox, 3) {
    /* Ranks 0 and 1 run ahead in a group of their own while rank 2 has not looked at anything yet. */
    int pair[2] = { 0, 1 }, mine = tu_job_rank(job), all[3];
    job_exchange space;
    if (tu_job_rank(job) < 2)
        for (uint64_t sequence = 1; sequence <= 20; sequence++) {
            tu_exchange exchange = { .ranks = pair,
                                     .count = 2,
                                     .me = mine,
                                     .key = 5,
                                     .sequence = sequence,
                                     .purpose = "pair",
                                     .payload = &mine,
                                     .bytes = sizeof mine,
                                     .deadline = tu_deadline(60 * TU_SECOND) };
            CHECK_OK(tu_job_exchange(job, &exchange, all, NULL));
            CHECK(all[0] == 0 && all[1] == 1);
        }
    else
        usleep(20000);
    CHECK_OK(tu_job_exchange(job, job_exchange_all(&space, job, 6, 1, &mine, sizeof mine, NULL), all, NULL));
    CHECK(all[0] == 0 && all[1] == 1 && all[2] == 2);
}

JOB_TEST(different_purposes_fail_on_every_rank_and_both_are_shown, 3) {
    job_exchange space;
    int mine = 0, all[3];
    tu_exchange *exchange = job_exchange_all(&space, job, 3, 1, &mine, sizeof mine, NULL);
    exchange->purpose = tu_job_rank(job) == 1 ? "split" : "rendezvous";
    CHECK_STATUS(tu_job_exchange(job, exchange, all, NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("split");
    CHECK_MESSAGE("rendezvous");
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.at_fault_count, 1);
    CHECK_EQ(info.at_fault[0], tu_job_rank(job) == 1 ? 0 : 1);
    exchange_numbers(job, 3, 2); /* and the next one works */
}

JOB_TEST(different_sizes_fail_on_every_rank, 3) {
    job_exchange space;
    char mine[8] = "", all[24];
    CHECK_STATUS(
        tu_job_exchange(job, job_exchange_all(&space, job, 3, 1, mine, tu_job_rank(job) == 2 ? 8 : 4, NULL), all, NULL),
        TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 2");
    exchange_numbers(job, 3, 2);
}

JOB_TEST(a_missing_rank_is_named_at_the_deadline_and_its_late_message_is_dropped, 3) {
    job_exchange space;
    int mine = 0, all[3];
    tu_exchange *exchange = job_exchange_all(&space, job, 3, 1, &mine, sizeof mine, NULL);
    job_meet(job, 1);
    if (tu_job_rank(job) != 2) {
        exchange->deadline = tu_deadline(test_moment());
        CHECK_STATUS(tu_job_exchange(job, exchange, all, NULL), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 0-1 came, rank 2 did not");
        tutti_error_info info = TUTTI_ERROR_INFO_INIT;
        CHECK_OK(tutti_error_detail(&info));
        CHECK_EQ(info.at_fault_count, 1);
        CHECK_EQ(info.at_fault[0], 2);
        CHECK(job->mailbox->orphans != NULL);
        job_meet(job, 2);            /* rank 2 is told */
        exchange_numbers(job, 4, 1); /* rank 2 comes after its late message */
        exchange_numbers(job, 4, 2);
        CHECK(job->mailbox->orphans == NULL);
        CHECK(job->mailbox->first == NULL);
    } else {
        job_meet(job, 2);
        CHECK_OK(tu_job_exchange(job, exchange, all, NULL)); /* the others had sent theirs */
        exchange_numbers(job, 4, 1);
        exchange_numbers(job, 4, 2);
    }
}

static _Atomic uint32_t interrupt_flag;
static _Atomic uint64_t ended_word;

static void *raise_later(void *argument) {
    usleep(30000);
    if (argument != NULL)
        atomic_store(&interrupt_flag, 1);
    else
        atomic_store(&ended_word, 1);
    return NULL;
}

static void check_interrupt(tu_job *job) {
    job_exchange space;
    int mine = 0, all[2];
    if (tu_job_rank(job) == 0) {
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, raise_later, &interrupt_flag), 0);
        const _Atomic uint32_t *before = job->interrupt;
        job->interrupt = &interrupt_flag;
        CHECK_STATUS(tu_job_exchange(job, job_exchange_all(&space, job, 3, 1, &mine, sizeof mine, NULL), all, NULL),
                     TUTTI_ERROR_INTERRUPTED);
        CHECK_MESSAGE("interrupted");
        job->interrupt = before;
        pthread_join(thread, NULL);
    }
    job_meet(job, 1);
}

TEST(an_interrupt_ends_the_exchange_as_threads) {
    job_threads(2, check_interrupt);
}

TEST(an_interrupt_ends_the_exchange_as_processes) {
    job_processes(2, check_interrupt);
}

JOB_TEST(the_end_of_the_group_ends_the_exchange, 2) {
    job_exchange space;
    int mine = 0, all[2];
    if (tu_job_rank(job) == 0) {
        pthread_t thread;
        atomic_store(&ended_word, 0);
        CHECK_EQ(pthread_create(&thread, NULL, raise_later, NULL), 0);
        tu_exchange *exchange = job_exchange_all(&space, job, 3, 1, &mine, sizeof mine, NULL);
        exchange->ended = &ended_word;
        CHECK_STATUS(tu_job_exchange(job, exchange, all, NULL), TUTTI_ERROR_STATE);
        pthread_join(thread, NULL);
    }
    job_meet(job, 1);
}

JOB_TEST(a_rank_that_sent_and_closed_still_counts, 2) {
    exchange_numbers(job, 3, 1);
    while (tu_job_rank(job) == 0 && tu_rank_state_of(job, 1) != TU_RANK_CLOSED)
        usleep(1000); /* until the other has sent number 2 and is gone */
    job_exchange space;
    int mine = tu_job_rank(job), all[2];
    tu_exchange *exchange = job_exchange_all(&space, job, 3, 2, &mine, sizeof mine, NULL);
    if (tu_job_rank(job) == 1) { /* sends, does not wait, leaves */
        exchange->deadline = tu_clock_now();
        CHECK_STATUS(tu_job_exchange(job, exchange, all, NULL), TUTTI_ERROR_TIMEOUT);
    } else {
        CHECK_OK(tu_job_exchange(job, exchange, all, NULL));
        CHECK(all[0] == 0 && all[1] == 1);
        exchange = job_exchange_all(&space, job, 3, 3, &mine, sizeof mine, NULL);
        CHECK_STATUS(tu_job_exchange(job, exchange, all, NULL), TUTTI_ERROR_GONE);
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("closed its world");
    }
}

/* More messages than a socket buffer takes, to a rank that is slow to look. */
JOB_TEST(a_full_socket_is_waited_for, 2) {
    static _Thread_local unsigned char mine[TU_EXCHANGE_BYTES], all[2 * TU_EXCHANGE_BYTES];
    job_exchange space;
    if (tu_job_rank(job) == 0)
        for (uint64_t sequence = 1; sequence <= 200; sequence++) {
            tu_exchange *exchange = job_exchange_all(&space, job, 3, sequence, mine, sizeof mine, NULL);
            exchange->deadline = tu_clock_now(); /* send and go */
            CHECK_STATUS(tu_job_exchange(job, exchange, all, NULL), TUTTI_ERROR_TIMEOUT);
        }
    if (tu_job_rank(job) == 1)
        usleep(30000);
    job_meet(job, 1);
}

/* ---- the n-th call fails on rank 0; rank 1 goes on ---- */

typedef struct failing {
    tu_job *job;
    uint64_t round;
} failing;

/* One round: an exchange with a piece, in which something fails, then one that tells rank 1 whether there is more. */
static tutti_status share_once(void *argument) {
    failing *self = argument;
    job_exchange space;
    tu_mapping *mappings[2] = { NULL, NULL };
    tu_piece piece;
    int more = 1, all[2];
    tutti_status status = tu_piece_alloc(self->job, "a test", 1000, 64, -1, &piece);
    if (status == TUTTI_OK) {
        tu_exchange *exchange = job_exchange_all(&space, self->job, 1, self->round, NULL, 0, &piece);
        status = tu_job_exchange(self->job, exchange, NULL, mappings);
        if (status == TUTTI_OK) {
            tu_mapping_release(mappings[0]);
            tu_mapping_release(mappings[1]);
        }
        tu_piece_free(self->job, &piece);
    }
    tutti_error_copy copy;
    tu_error_save(&copy);
    test_fail_disarm();
    CHECK_OK(tu_job_exchange(self->job, job_exchange_all(&space, self->job, 2, self->round, &more, sizeof more, NULL),
                             all, NULL));
    self->round++;
    tu_error_restore(&copy);
    return status;
}

static void share_while_calls_fail(tu_job *job) {
    job_exchange space;
    failing self = { job, 1 };
    int more = 1, all[2];
    tu_piece first; /* makes the heap's first chunk, so that no round adds mappings */
    CHECK_OK(tu_piece_alloc(job, "a test", 1000, 64, -1, &first));
    tu_mapping *mappings[2];
    CHECK_OK(tu_job_exchange(job, job_exchange_all(&space, job, 3, 1, NULL, 0, &first), NULL, mappings));
    if (tu_job_rank(job) == 0) {
        test_fail_each("malloc,calloc,sendmsg,recvmsg", share_once, &self);
        more = 0;
        CHECK_OK(
            tu_job_exchange(job, job_exchange_all(&space, job, 2, self.round, &more, sizeof more, NULL), all, NULL));
    }
    while (tu_job_rank(job) == 1 && more) {
        tu_mapping *shared[2];
        tu_piece piece;
        CHECK_OK(tu_piece_alloc(job, "a test", 1000, 64, -1, &piece));
        tu_exchange *exchange = job_exchange_all(&space, job, 1, self.round, NULL, 0, &piece);
        exchange->deadline = tu_deadline(100 * TU_MILLISECOND);
        if (tu_job_exchange(job, exchange, NULL, shared) == TUTTI_OK) {
            tu_mapping_release(shared[0]);
            tu_mapping_release(shared[1]);
        }
        tu_piece_free(job, &piece);
        CHECK_OK(
            tu_job_exchange(job, job_exchange_all(&space, job, 2, self.round++, &more, sizeof more, NULL), all, NULL));
        more = all[0];
    }
    tu_mapping_release(mappings[0]);
    tu_mapping_release(mappings[1]);
    tu_piece_free(job, &first);
}

TEST(any_call_may_fail_in_an_exchange_and_the_next_one_works) {
    job_processes(2, share_while_calls_fail);
}
