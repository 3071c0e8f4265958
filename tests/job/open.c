/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a job: everybody finds everybody, and whoever is missing, twice there, of another size or version, or in
 * trouble is named to all the others, in time.
 */
#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "job.h"

static tutti_status open_and_close(tutti_store *store, int rank, int size, int64_t timeout_ns) {
    tu_job_options options = job_options(store, rank, size);
    options.deadline = tu_deadline(timeout_ns);
    tu_job *job;
    tutti_status status = tu_job_open(&options, &job);
    if (status == TUTTI_OK)
        tu_job_close(job);
    return status;
}

/* ---- well ---- */

JOB_TEST(every_rank_knows_itself_and_the_others, 5) {
    char host[TU_HOST_BYTES] = "";
    gethostname(host, sizeof host - 1);
    CHECK_EQ(tu_job_size(job), 5);
    for (int rank = 0; rank < 5; rank++) {
        CHECK_EQ(tu_job_world_rank(job, rank), rank);
        CHECK_TEXT(tu_job_host(job, rank), host);
        CHECK_EQ(tu_rank_probe(job, rank), TU_RANK_ALIVE);
    }
    CHECK_EQ(tu_job_departures(job), 0);
    CHECK_EQ(strlen(job->page->id), 16);
    CHECK(tu_job_cores(job) >= 1);
    CHECK(!tu_job_forked(job));
    CHECK_EQ(job_reserved(job), 0);
    tu_wait wait;
    tu_job_wait_init(job, 1234, &wait);
    CHECK(wait.deadline == 1234 && wait.bell == tu_job_bell(job, tu_job_rank(job)) &&
          wait.sleepers == tu_job_sleepers(job));
    job_meet(job, 1);
}

JOB_TEST(sixteen_ranks_open, 16) {
    job_meet(job, 1);
}

TEST(a_world_of_one_needs_no_store) {
    tu_job_options options = job_options(NULL, 0, 1);
    tu_job *job;
    CHECK_OK(tu_job_open(&options, &job));
    CHECK(tu_job_threads(job));
    job_meet(job, 1);
    tu_job_close(job);
    options.world_size = 2;
    CHECK_STATUS(tu_job_open(&options, &job), TUTTI_ERROR_ARGUMENT);
    options.world_rank = 2;
    CHECK_STATUS(tu_job_open(&options, &job), TUTTI_ERROR_ARGUMENT);
}

static void meet_once(tu_job *job) {
    job_meet(job, 1);
}

static void five_processes(void) {
    job_processes(5, body_every_rank_knows_itself_and_the_others);
}

TEST(an_ordinary_user_opens_a_job_too) {
    test_as_ordinary_user(five_processes);
}

/* Ranks of one process that meet in a store for processes are connected like processes. */
typedef struct tcp_thread {
    const job_place *place;
    int rank;
} tcp_thread;

static void *run_tcp_thread(void *argument) {
    tcp_thread *self = argument;
    tutti_store *store = job_place_enter(self->place);
    job_run(store, self->rank, 3, meet_once);
    tutti_store_release(store);
    return NULL;
}

TEST(threads_may_meet_in_a_store_for_processes) {
    job_place place;
    tcp_thread ranks[3];
    pthread_t threads[3];
    job_place_open(&place);
    for (int rank = 0; rank < 3; rank++) {
        ranks[rank] = (tcp_thread){ &place, rank };
        CHECK_EQ(pthread_create(&threads[rank], NULL, run_tcp_thread, &ranks[rank]), 0);
    }
    for (int rank = 0; rank < 3; rank++)
        pthread_join(threads[rank], NULL);
    job_place_close(&place);
}

TEST(several_jobs_live_in_one_process) {
    tutti_store *store, *other;
    CHECK_OK(tutti_store_open_memory(&store));
    tu_job *jobs[8];
    for (int i = 0; i < 8; i++) {
        char prefix[16];
        snprintf(prefix, sizeof prefix, "world%d", i);
        CHECK_OK(tutti_store_open_prefix(prefix, store, &other));
        tu_job_options options = job_options(other, 0, 1);
        CHECK_OK(tu_job_open(&options, &jobs[i]));
        tutti_store_release(other);
    }
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(tu_job_size(jobs[i]), 1);
        tu_job_close(jobs[i]);
    }
    tutti_store_release(store);
}

/* ---- ranks that do not fit together: each runs in a process and must end with the status and a part of the message
 * ---- */

typedef struct misfit {
    int rank, size;
    tutti_status status;
    const char *message; /* NULL: any */
} misfit;

static void run_misfits_as_processes(const misfit *ranks, int count, int64_t timeout_ns) {
    job_place place;
    pid_t children[8];
    job_place_open(&place);
    for (int i = 0; i < count; i++) {
        fflush(NULL);
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] != 0)
            continue;
        tutti_store *store = job_place_enter(&place);
        int descriptors = test_count_descriptors();
        CHECK_STATUS(open_and_close(store, ranks[i].rank, ranks[i].size, timeout_ns), ranks[i].status);
        if (ranks[i].message != NULL)
            CHECK_MESSAGE(ranks[i].message);
        CHECK_EQ(test_count_descriptors(), descriptors);
        CHECK_EQ(test_count_mappings(), 0);
        tutti_store_release(store);
        exit(0);
    }
    for (int i = 0; i < count; i++)
        CHECK_EQ(job_wait_process(children[i]), 0);
    job_place_close(&place);
}

typedef struct misfit_thread {
    const misfit *misfit;
    tutti_store *store;
    int64_t timeout_ns;
} misfit_thread;

static void *run_misfit(void *argument) {
    misfit_thread *self = argument;
    CHECK_STATUS(open_and_close(self->store, self->misfit->rank, self->misfit->size, self->timeout_ns),
                 self->misfit->status);
    if (self->misfit->message != NULL)
        CHECK_MESSAGE(self->misfit->message);
    return NULL;
}

static void run_misfits_as_threads(const misfit *ranks, int count, int64_t timeout_ns) {
    misfit_thread each[8];
    pthread_t threads[8];
    tutti_store *store;
    CHECK_OK(tutti_store_open_memory(&store));
    for (int i = 0; i < count; i++) {
        each[i] = (misfit_thread){ &ranks[i], store, timeout_ns };
        CHECK_EQ(pthread_create(&threads[i], NULL, run_misfit, &each[i]), 0);
    }
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    tutti_store_release(store);
}

#define MISFIT_TEST(sentence, timeout_ns, ...)                                                            \
    static const misfit ranks_##sentence[] = { __VA_ARGS__ };                                             \
    TEST(sentence##_as_threads) {                                                                         \
        run_misfits_as_threads(ranks_##sentence, sizeof ranks_##sentence / sizeof(misfit), timeout_ns);   \
    }                                                                                                     \
    TEST(sentence##_as_processes) {                                                                       \
        run_misfits_as_processes(ranks_##sentence, sizeof ranks_##sentence / sizeof(misfit), timeout_ns); \
    }

MISFIT_TEST(world_sizes_that_disagree_fail_on_every_rank, 60 * TU_SECOND,
            { 0, 3, TUTTI_ERROR_MISMATCH, "world sizes disagree" }, { 1, 3, TUTTI_ERROR_MISMATCH, "rank 2" },
            { 2, 4, TUTTI_ERROR_MISMATCH, "world sizes disagree" })

MISFIT_TEST(a_smaller_world_size_wakes_those_who_wait_for_more, 60 * TU_SECOND,
            { 0, 4, TUTTI_ERROR_MISMATCH, "world sizes disagree" },
            { 1, 2, TUTTI_ERROR_MISMATCH, "world sizes disagree" })

MISFIT_TEST(a_rank_that_is_there_twice_is_named_to_all, 60 * TU_SECOND,
            { 0, 3, TUTTI_ERROR_MISMATCH, "two processes say that they are rank 1" },
            { 1, 3, TUTTI_ERROR_MISMATCH, "two processes say that they are rank 1" },
            { 1, 3, TUTTI_ERROR_MISMATCH, "two processes say that they are rank 1" })

MISFIT_TEST(a_second_rank_0_is_named_to_all, 60 * TU_SECOND,
            { 0, 3, TUTTI_ERROR_MISMATCH, "two processes say that they are rank 0" },
            { 0, 3, TUTTI_ERROR_MISMATCH, "two processes say that they are rank 0" },
            { 1, 3, TUTTI_ERROR_MISMATCH, "two processes say that they are rank 0" })

/* Long enough for those who come to come, on a busy machine too. */
#define PATIENCE (2 * test_moment())

MISFIT_TEST(a_missing_rank_is_named_at_the_deadline, PATIENCE, { 0, 4, TUTTI_ERROR_TIMEOUT, "did not" },
            { 1, 4, TUTTI_ERROR_TIMEOUT, "did not" }, { 3, 4, TUTTI_ERROR_TIMEOUT, "rank 2 did not" })

MISFIT_TEST(a_missing_rank_0_is_named_at_the_deadline, PATIENCE, { 1, 3, TUTTI_ERROR_TIMEOUT, "rank 0 did not" },
            { 2, 3, TUTTI_ERROR_TIMEOUT, "rank 0 did not" })

TEST(a_rank_that_comes_too_late_learns_that_the_others_gave_up) {
    for (int late = 0; late < 2; late++) {
        tutti_store *store;
        CHECK_OK(tutti_store_open_memory(&store));
        CHECK_STATUS(open_and_close(store, 1 - late, 2, 20 * TU_MILLISECOND), TUTTI_ERROR_TIMEOUT);
        CHECK_STATUS(open_and_close(store, late, 2, 60 * TU_SECOND), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("gave up opening the world");
        tutti_store_release(store);
    }
}

static _Atomic uint32_t interrupt_flag;

static void *interrupt_later(void *argument) {
    usleep(50000);
    atomic_store(&interrupt_flag, 1);
    return argument;
}

TEST(an_interrupt_ends_the_opening) {
    tutti_store *store;
    pthread_t thread;
    CHECK_OK(tutti_store_open_memory(&store));
    CHECK_EQ(pthread_create(&thread, NULL, interrupt_later, NULL), 0);
    tu_job_options options = job_options(store, 0, 2);
    options.interrupt = &interrupt_flag;
    tu_job *job;
    CHECK_STATUS(tu_job_open(&options, &job), TUTTI_ERROR_INTERRUPTED);
    pthread_join(thread, NULL);
    tutti_store_release(store);
}

/* ---- records that are wrong ---- */

static void open_beside_record(const void *record, size_t bytes, tutti_status expected, const char *message) {
    job_place place;
    job_place_open(&place);
    tutti_store *store = job_place_enter(&place);
    CHECK_OK(tutti_store_set(store, "job/1", record, bytes));
    CHECK_STATUS(open_and_close(store, 0, 2, 60 * TU_SECOND), expected);
    CHECK_MESSAGE(message);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 1);
    tutti_store_release(store);
    job_place_close(&place);
}

TEST(another_layout_version_is_shown_beside_our_own) {
    tu_record record = { .magic = UINT64_C(0x44524f4345525554), .version = 77, .world_rank = 1, .world_size = 2 };
    record.bytes = offsetof(tu_record, text);
    char expected[64];
    snprintf(expected, sizeof expected, "rank 1 has layout version 77, this rank 0 has %d", TU_PAGE_VERSION);
    open_beside_record(&record, record.bytes, TUTTI_ERROR_PROTOCOL, expected);
}

TEST(garbage_in_the_store_is_named) {
    open_beside_record("garbage", 7, TUTTI_ERROR_PROTOCOL, "rank 1");
    open_beside_record("", 0, TUTTI_ERROR_PROTOCOL, "rank 1");
}

/* ---- strangers at the door ---- */

typedef struct hello {
    uint64_t magic;
    uint32_t version;
    int32_t world_rank, world_size, pid;
    uint8_t nonce[TU_NONCE_BYTES];
} hello;

static tu_record read_record(tutti_store *store, const char *key) {
    void *value;
    size_t bytes;
    tu_record record = { 0 };
    CHECK_OK(tutti_store_get(store, key, 30 * TU_SECOND, &value, &bytes));
    memcpy(&record, value, bytes);
    tutti_free(value);
    return record;
}

static int knock(const tu_record *record) {
    struct sockaddr_un address;
    unsigned length = tu_socket_address(record->socket, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, length), 0);
    return fd;
}

/* Says something and waits until the other side has closed the connection. */
static void be_refused(const tu_record *record, const void *words, size_t bytes) {
    int fd = knock(record);
    char byte;
    if (bytes > 0)
        CHECK_EQ(send(fd, words, bytes, MSG_NOSIGNAL), bytes);
    ssize_t got = recv(fd, &byte, 1, 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
    close(fd);
}

static hello right_hello(const tu_record *record) {
    hello words = { .magic = UINT64_C(0x4f4c4c4548495554),
                    .version = TU_PAGE_VERSION,
                    .world_rank = 1,
                    .world_size = 2,
                    .pid = getpid() };
    memcpy(words.nonce, record->nonce, sizeof words.nonce);
    return words;
}

static void disturb(const tu_record *record) {
    char large[9000] = "";
    hello words = right_hello(record);
    be_refused(record, "garbage", 7);
    be_refused(record, large, sizeof large);
    be_refused(record, &words, sizeof words - 1);
    words.nonce[3] ^= 1;
    be_refused(record, &words, sizeof words);
    words = right_hello(record);
    words.world_size = 9;
    be_refused(record, &words, sizeof words);
    words = right_hello(record);
    words.version = 9;
    be_refused(record, &words, sizeof words);
    words = right_hello(record);
    words.world_rank = 0;
    be_refused(record, &words, sizeof words);
    for (int i = 0; i < 5; i++)
        close(knock(record)); /* comes and goes without a word */
}

static void in_child(void (*body)(const tu_record *record), const tu_record *record) {
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        body(record);
        exit(0);
    }
    CHECK_EQ(job_wait_process(child), 0);
}

static void impersonate(const tu_record *record) {
    hello words = right_hello(record); /* every word is right, but this process did not publish rank 1 */
    be_refused(record, &words, sizeof words);
}

static void come_as_another_user(const tu_record *record) {
    if (geteuid() != 0 || setuid(65534) != 0)
        return;
    be_refused(record, "", 0);
}

/* Rank 1 as a program of another make: publishes its record, lets strangers in first, then joins as far as the job
 * segment, and dies. */
_Noreturn static void act_as_rank_1(const job_place *place) {
    tutti_store *store = job_place_enter(place);
    tu_job_options options = job_options(store, 1, 2);
    tu_opening opening = { .options = &options, .listener = -1 };
    CHECK_OK(tu_meet_prepare(&opening));
    CHECK_OK(tutti_store_set(store, "job/1", &opening.mine, opening.mine.bytes));
    tu_record record = read_record(store, "job/0");
    disturb(&record);
    in_child(impersonate, &record);
    in_child(come_as_another_user, &record);
    hello words = right_hello(&record);
    int fd = knock(&record);
    CHECK_EQ(send(fd, &words, sizeof words, MSG_NOSIGNAL), sizeof words);
    tu_message message;
    int descriptor = -1;
    bool lost;
    while (tu_wire_take(fd, &message, 0, &descriptor, &lost) < 0)
        CHECK_EQ(errno, EAGAIN);
    CHECK_EQ(message.wire.kind, TU_WIRE_PAGE);
    CHECK(descriptor >= 0);
    exit(7);
}

TEST(strangers_and_garbage_do_not_disturb_and_a_death_while_joining_is_seen) {
    job_place place;
    job_place_open(&place);
    fflush(NULL);
    pid_t actor = fork();
    CHECK(actor >= 0);
    if (actor == 0)
        act_as_rank_1(&place);
    tutti_store *store = job_place_enter(&place);
    CHECK_STATUS(open_and_close(store, 0, 2, 60 * TU_SECOND), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
    CHECK_MESSAGE("while the world was opening");
    CHECK_MESSAGE("exited with status 7");
    CHECK_EQ(WEXITSTATUS(job_wait_process(actor)), 7);
    tutti_store_release(store);
    job_place_close(&place);
}

/* ---- two places ---- */

static void open_in_place(tutti_store *store, int rank) {
    if (rank >= 2 && unshare(CLONE_NEWNET) != 0)
        exit(77);
    tu_job_options options = job_options(store, rank, 4);
    tu_job *job;
    CHECK_OK(tu_job_open(&options, &job));
    CHECK_EQ(tu_job_size(job), rank < 2 ? 2 : 1); /* ranks 2 and 3 have a network namespace of their own each */
    CHECK_EQ(tu_job_rank(job), rank < 2 ? rank : 0);
    CHECK_EQ(tu_job_world_rank(job, tu_job_rank(job)), rank);
    CHECK(tu_job_host(job, 3)[0] != 0);
    job_meet(job, 1);
    tu_job_close(job);
}

TEST(ranks_of_another_place_are_not_in_the_job) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/tutti-test-places-%d", (int)getpid());
    pid_t children[4];
    for (int rank = 0; rank < 4; rank++) {
        fflush(NULL);
        children[rank] = fork();
        CHECK(children[rank] >= 0);
        if (children[rank] != 0)
            continue;
        tutti_store *store;
        CHECK_OK(tutti_store_open_file(path, NULL, &store));
        open_in_place(store, rank);
        tutti_store_release(store);
        exit(0);
    }
    bool skipped = false;
    for (int rank = 3; rank >= 0; rank--) {
        if (skipped)
            kill(children[rank], SIGKILL);
        int status = job_wait_process(children[rank]);
        skipped |= WIFEXITED(status) && WEXITSTATUS(status) == 77;
        if (!skipped)
            CHECK_EQ(status, 0);
    }
    unlink(path);
    if (skipped)
        SKIP("this user may not make a network namespace");
}

/* ---- deaths and limits while opening ---- */

static int victim;

/* Survives if it can: a death before this rank is through fails the opening, a later one the next exchange. */
static void open_beside_victim(tutti_store *store, int rank) {
    tu_job_options options = job_options(store, rank, 3);
    tu_job *job;
    tutti_status status = tu_job_open(&options, &job);
    if (rank == victim)
        pause();
    if (status == TUTTI_OK) {
        job_exchange space;
        status = tu_job_exchange(job, job_exchange_all(&space, job, 1, 1, NULL, 0, NULL), NULL, NULL);
        tu_job_close(job);
    }
    if (status != TUTTI_ERROR_DEAD && status != TUTTI_ERROR_GONE)
        FAIL("%s: %s", tutti_status_name(status), tutti_error_message());
    CHECK_MESSAGE("rank "); /* the victim, or the other survivor who saw it first and left */
}

static pid_t start(const job_place *place, int rank, void (*body)(tutti_store *store, int rank)) {
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child != 0)
        return child;
    tutti_store *store = job_place_enter(place);
    body(store, rank);
    CHECK_EQ(test_count_mappings(), 0);
    tutti_store_release(store);
    exit(0);
}

TEST(a_rank_killed_at_any_moment_of_opening_fails_the_others_at_once) {
    for (int round = 0; round < 30; round++) {
        job_place place;
        job_place_open(&place);
        tutti_store *store = job_place_enter(&place);
        victim = round % 3;
        pid_t ranks[3];
        for (int rank = 0; rank < 3; rank++)
            ranks[rank] = start(&place, rank, open_beside_victim);
        char key[16];
        snprintf(key, sizeof key, "job/%d", victim);
        (void)read_record(store, key); /* it has come */
        usleep((useconds_t)(round / 3) * 400);
        kill(ranks[victim], SIGKILL);
        for (int rank = 0; rank < 3; rank++) {
            int status = job_wait_process(ranks[rank]);
            if (rank != victim)
                CHECK_EQ(status, 0);
        }
        tutti_store_release(store);
        job_place_close(&place);
    }
}

static void open_without_descriptors(tutti_store *store, int rank) {
    struct rlimit before, limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(next);
    limit = before;
    limit.rlim_cur = (rlim_t)next + 2; /* a listener and one more */
    if (rank == 1)
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_STATUS(open_and_close(store, rank, 3, 60 * TU_SECOND), TUTTI_ERROR_LIMIT);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK_MESSAGE("RLIMIT_NOFILE"); /* in its own words, also where another rank tells them */
    if (rank != 1)
        CHECK_MESSAGE("rank 1");
}

TEST(a_full_descriptor_table_is_told_to_all_ranks) {
    job_place place;
    pid_t ranks[3];
    job_place_open(&place);
    for (int rank = 0; rank < 3; rank++)
        ranks[rank] = start(&place, rank, open_without_descriptors);
    for (int rank = 0; rank < 3; rank++)
        CHECK_EQ(job_wait_process(ranks[rank]), 0);
    job_place_close(&place);
}

/* ---- the n-th call fails ---- */

static int failing_rank;

static void open_as_peer(tutti_store *store, int rank) {
    test_fail_disarm();
    tutti_status status = open_and_close(store, rank, 2, 60 * TU_SECOND);
    if (status == TUTTI_ERROR_TIMEOUT)
        FAIL("nobody told this rank: %s", tutti_error_message());
}

static tutti_status open_beside_peer(void *argument) {
    const job_place *place = argument;
    static int round;
    tutti_store *base = job_place_enter(place), *store;
    char prefix[16];
    snprintf(prefix, sizeof prefix, "%d", round++);
    fflush(NULL);
    pid_t peer = fork();
    CHECK(peer >= 0);
    if (peer == 0) {
        test_fail_disarm();
        CHECK_OK(tutti_store_open_prefix(prefix, job_place_enter(place), &store));
        open_as_peer(store, 1 - failing_rank);
        exit(0);
    }
    tutti_status status = tutti_store_open_prefix(prefix, base, &store);
    if (status == TUTTI_OK) {
        status = open_and_close(store, failing_rank, 2, 60 * TU_SECOND);
        tutti_store_release(store);
    } else {
        kill(peer, SIGKILL);
    }
    int ended = job_wait_process(peer);
    if (ended != 0 && !WIFSIGNALED(ended))
        FAIL("the peer ended with %d when this rank had: %s", ended, tutti_error_message());
    tutti_store_release(base);
    return status;
}

/* The calls that the job makes and the store's client does not; the others are failed in the test of threads below, and
 * those of messages in the test of exchanges. */
#define OPENING_CALLS "mmap,memfd_create,ftruncate,fallocate,bind,listen,accept4,pthread_create"

static void fail_each(int rank) {
    job_place place;
    job_place_open(&place);
    failing_rank = rank;
    test_fail_each(OPENING_CALLS, open_beside_peer, &place);
    job_place_close(&place);
}

TEST_LIMIT(any_system_call_may_fail_while_the_founder_opens, 120) {
    fail_each(0);
}

TEST_LIMIT(any_system_call_may_fail_while_another_rank_opens, 120) {
    fail_each(1);
}

typedef struct pair {
    tutti_store *store;
    tutti_status status;
    tutti_error_copy error;
} pair;

static void *open_second(void *argument) {
    pair *self = argument;
    self->status = open_and_close(self->store, 1, 2, 60 * TU_SECOND);
    tu_error_save(&self->error);
    return NULL;
}

static tutti_status open_two_threads(void *argument) {
    (void)argument;
    pair second = { 0 };
    pthread_t thread;
    tutti_status status = tutti_store_open_memory(&second.store);
    if (status != TUTTI_OK)
        return status;
    if (pthread_create(&thread, NULL, open_second, &second) != 0) {
        tutti_store_release(second.store);
        return tu_error(TUTTI_ERROR_LIMIT, "the test's own thread could not start");
    }
    status = open_and_close(second.store, 0, 2, 60 * TU_SECOND);
    pthread_join(thread, NULL);
    tutti_store_release(second.store);
    if (status == TUTTI_ERROR_TIMEOUT || second.status == TUTTI_ERROR_TIMEOUT)
        fprintf(stderr, "    %s\n    %s\n", tutti_error_message(), second.error.message);
    CHECK(status != TUTTI_ERROR_TIMEOUT && second.status != TUTTI_ERROR_TIMEOUT);
    return status == TUTTI_OK && second.status != TUTTI_OK ? tu_error_restore(&second.error) : status;
}

TEST_LIMIT(any_call_may_fail_while_threads_open, 120) {
    test_fail_each(NULL, open_two_threads, NULL);
}
