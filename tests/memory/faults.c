/* SPDX-License-Identifier: Apache-2.0
 *
 * The fault matrix of symmetric memory: a rank that dies, stops, runs out of something or sends garbage before, during
 * and after a rendezvous, in a signal, in a barrier, and while it frees. Nobody hangs, and survivors get the death's
 * error, with the rank, not a deadline's.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <tutti/fault.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <unistd.h>

#include "../harness.h"
#include "job/inner.h"
#include "memory/memory.h"

#define LONG TUTTI_OPTIONS(tutti_call, .timeout_ns = 60000000000)
#define VICTIM 1

static void nap(long microseconds) {
    nanosleep(&(struct timespec){ .tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000 }, NULL);
}

/* What the ranks of one run tell the test: shared by fork. */
typedef struct report {
    _Atomic int finished; /* ranks that came to their end */
    _Atomic int pids[8];
    long delay; /* for the victim */
    _Atomic int signal;
    const char *fault;
    size_t bytes;
} report;

static report *new_report(void) {
    report *made = mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(made != MAP_FAILED);
    return made;
}

static void end_report(report *made) {
    munmap(made, sizeof *made);
}

/* The last error is the victim's death. */
static void check_death(tutti_status status) {
    if (status != TUTTI_ERROR_DEAD)
        FAIL("%s: %s", tutti_status_name(status), tutti_error_message());
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.at_fault_count, 1);
    CHECK_EQ(info.at_fault[0], VICTIM);
    CHECK_MESSAGE("rank 1");
}

static tutti_status make_peers(tutti_world *world, size_t bytes, tutti_memory **memory, tutti_peers **peers) {
    tutti_status status = tutti_memory_alloc(world, bytes, NULL, memory);
    if (status != TUTTI_OK)
        return status;
    status = tutti_memory_rendezvous(*memory, tutti_world_group(world), peers);
    if (status != TUTTI_OK)
        tutti_memory_release(*memory);
    return status;
}

/* ---- deaths ---- */

/* Everything in a loop, until the victim is dead. */
static tutti_status live_until_a_death(tutti_world *world, void *argument) {
    report *shared = argument;
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    CHECK_OK(tutti_group_set_timeout(tutti_world_group(world), 60000000000));
    if (rank == VICTIM && shared->fault != NULL)
        CHECK_OK(tutti_fault_inject(world, shared->fault));
    atomic_store(&shared->pids[rank], (int)getpid());
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK) {
        tutti_memory *memory;
        tutti_peers *peers;
        status = make_peers(world, shared->bytes, &memory, &peers);
        if (status != TUTTI_OK)
            break;
        for (int i = 0; i < 3 && status == TUTTI_OK; i++) {
            status = tutti_peers_put(peers, (rank + 1) % size, 0, &rank, sizeof rank, NULL);
            if (status == TUTTI_OK)
                status = tutti_peers_signal(peers, (rank + 1) % size, 0, LONG);
            if (status == TUTTI_OK)
                status = tutti_peers_wait_signal(peers, (rank + size - 1) % size, 0, LONG);
            if (status == TUTTI_OK)
                status = tutti_peers_barrier(peers, 1, LONG);
        }
        *(volatile int *)tutti_peers_buffer(peers, VICTIM) = 1; /* a dead rank's block stays where it is */
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    if (rank == VICTIM)
        FAIL("the victim lives: %s", tutti_error_message());
    check_death(status);
    check_death(tutti_group_check(tutti_world_group(world))); /* it ended the group */
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

static void run_death(report *shared, int ranks) {
    atomic_store(&shared->finished, 0);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, ranks, live_until_a_death, shared), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(&shared->finished), ranks - 1);
}

TEST(a_death_at_the_entry_of_any_operation_is_the_others_error) {
    static const char *const faults[] = {
        "op=rendezvous,at=0,do=kill",        "op=rendezvous,at=2,do=exit:3",  "op=peers_signal,at=0,do=kill",
        "op=peers_wait_signal,at=4,do=kill", "op=peers_barrier,at=0,do=kill", "op=peers_barrier,at=5,do=exit",
    };
    report *shared = new_report();
    shared->bytes = 4096;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        shared->fault = faults[i];
        run_death(shared, 4);
    }
    end_report(shared);
}

/* A process of its own that waits until all are there and then signals the victim at some moment of its loop. */
static pid_t start_killer(report *shared, int ranks) {
    fflush(NULL);
    pid_t killer = fork();
    CHECK(killer >= 0);
    if (killer == 0) {
        for (int rank = 0; rank < ranks; rank++) {
            while (atomic_load(&shared->pids[rank]) == 0)
                nap(200);
        }
        nap(shared->delay);
        kill(atomic_load(&shared->pids[VICTIM]), shared->signal);
        _exit(0);
    }
    return killer;
}

static void kill_at_many_moments(size_t bytes, int moments) {
    report *shared = new_report();
    shared->bytes = bytes;
    for (int i = 0; i < moments; i++) {
        for (int rank = 0; rank < 8; rank++)
            atomic_store(&shared->pids[rank], 0);
        shared->delay = i * 137L % 3000;
        shared->signal = i % 3 == 2 ? SIGABRT : SIGKILL;
        pid_t killer = start_killer(shared, 3);
        run_death(shared, 3);
        CHECK_EQ(waitpid(killer, NULL, 0), killer);
    }
    end_report(shared);
}

TEST(a_death_at_any_moment_with_small_blocks_is_the_others_error) {
    struct rlimit none = { 0, 0 };
    setrlimit(RLIMIT_CORE, &none);
    kill_at_many_moments(1000, 20);
}

TEST(a_death_at_any_moment_with_large_blocks_is_the_others_error) {
    struct rlimit none = { 0, 0 };
    setrlimit(RLIMIT_CORE, &none);
    kill_at_many_moments((size_t)3 << 20, 12);
}

/* Thread-ranks: one's main returns without closing its world. */
static tutti_status leave_as_thread(tutti_world *world, void *argument) {
    report *shared = argument;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(make_peers(world, 100, &memory, &peers));
    CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    if (tutti_world_rank(world) == VICTIM) {
        CHECK_OK(tutti_peers_signal(peers, 0, 0, NULL)); /* what it had sent still counts */
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        return tutti_group_check(NULL); /* a failure, with its message */
    }
    if (tutti_world_rank(world) == 0) {
        while (tutti_group_check(tutti_world_group(world)) == TUTTI_OK && atomic_load(&shared->finished) == 0)
            nap(100);
    } else {
        check_death(tutti_peers_barrier(peers, 0, LONG));
        atomic_fetch_add(&shared->finished, 1);
    }
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    return TUTTI_OK;
}

TEST(a_thread_rank_that_leaves_without_closing_is_dead) {
    report *shared = new_report();
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_THREADS, 3, leave_as_thread, shared), TUTTI_ERROR_ARGUMENT);
    CHECK_EQ(atomic_load(&shared->finished), 1);
    end_report(shared);
}

static tutti_status signal_and_leave(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(make_peers(world, 100, &memory, &peers));
    if (tutti_world_rank(world) == 1) {
        strcpy(tutti_peers_buffer(peers, 0), "gone");
        CHECK_OK(tutti_peers_signal(peers, 0, 0, NULL));
    } else {
        nap(50000);                                           /* rank 1 has closed its world by now */
        CHECK_OK(tutti_peers_wait_signal(peers, 1, 0, LONG)); /* what it sent before is taken all the same */
        CHECK_TEXT(tutti_memory_data(memory), "gone");
        CHECK_STATUS(tutti_peers_wait_signal(peers, 1, 0, LONG), TUTTI_ERROR_GONE);
    }
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    return tutti_world_close(world);
}

TEST(a_signal_outlives_its_sender_as_threads) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, signal_and_leave, NULL));
}

TEST(a_signal_outlives_its_sender_as_processes) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, signal_and_leave, NULL));
}

static tutti_status read_after_death(tutti_world *world, void *argument) {
    report *shared = argument;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(make_peers(world, (size_t)3 << 20, &memory, &peers));
    if (tutti_world_rank(world) == VICTIM) {
        strcpy(tutti_memory_data(memory), "last words");
        CHECK_OK(tutti_peers_signal(peers, 0, 0, NULL));
        kill(getpid(), SIGKILL);
    }
    CHECK_OK(tutti_peers_wait_signal(peers, VICTIM, 0, LONG));
    check_death(tutti_peers_wait_signal(peers, VICTIM, 0, LONG));
    char words[16];
    CHECK_OK(tutti_peers_get(peers, VICTIM, 0, words, sizeof words, NULL));
    CHECK_TEXT(words, "last words");
    CHECK_STATUS(tutti_peers_put(peers, VICTIM, 0, words, 1, NULL), TUTTI_ERROR_DEAD);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(a_dead_ranks_block_stays_readable) {
    report *shared = new_report();
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, read_after_death, shared), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(&shared->finished), 1);
    end_report(shared);
}

/* Nothing of ours has a name in the file system, so a crash leaves none. */
TEST(nothing_named_is_left_in_shared_memory_after_a_crash) {
    report *shared = new_report();
    shared->bytes = (size_t)3 << 20;
    shared->fault = "op=peers_barrier,at=2,do=kill";
    run_death(shared, 3);
    DIR *folder = opendir("/dev/shm");
    if (folder == NULL)
        SKIP("there is no /dev/shm");
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        CHECK(strncmp(entry->d_name, "tutti", 5) != 0);
    closedir(folder);
    end_report(shared);
}

/* ---- stopped ---- */

static tutti_status stop_in_rendezvous(tutti_world *world, void *argument) {
    report *shared = argument;
    int rank = tutti_world_rank(world);
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    CHECK_OK(tutti_group_set_timeout(group, 200000000));
    atomic_store(&shared->pids[rank], (int)getpid());
    if (rank == VICTIM)
        CHECK_OK(tutti_fault_inject(world, "op=rendezvous,do=stop"));
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_TIMEOUT);
    if (rank != VICTIM) {
        CHECK_MESSAGE("rank 1");
        if (rank == 0) {
            while (atomic_load(&shared->pids[VICTIM]) == 0)
                nap(1000);
            test_await_stopped(atomic_load(&shared->pids[VICTIM]));
            kill(atomic_load(&shared->pids[VICTIM]), SIGCONT);
        }
    }
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_TIMEOUT); /* the group ended with that */
    tutti_memory_release(memory);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(a_stopped_rank_is_named_at_the_deadline_and_learns_it_when_it_wakes) {
    report *shared = new_report();
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, stop_in_rendezvous, shared));
    CHECK_EQ(atomic_load(&shared->finished), 3);
    end_report(shared);
}

/* ---- running out ---- */

static tutti_status run_out_of_descriptors(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world);
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory, *small;
    tutti_peers *peers, *in_step;
    CHECK_OK(tutti_group_set_timeout(group, 60000000000));
    CHECK_OK(make_peers(world, 100, &small, &in_step)); /* the heap is known to all */
    CHECK_OK(tutti_memory_alloc(world, (size_t)4 << 20, NULL, &memory));
    struct rlimit before, limit;
    getrlimit(RLIMIT_NOFILE, &before);
    if (rank == VICTIM) {
        int used = open("/dev/null", O_RDONLY | O_CLOEXEC); /* the lowest that is free */
        close(used);
        limit = (struct rlimit){ .rlim_cur = (rlim_t)used, .rlim_max = before.rlim_max };
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    }
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("RLIMIT_NOFILE");
    if (rank != VICTIM)
        CHECK_MESSAGE("rank 1 could not");
    CHECK_OK(tutti_group_check(group)); /* failed alike for all: it ends nothing */
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK_OK(tutti_peers_barrier(in_step, 0, LONG)); /* nobody sends again before the limit is raised */
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_peers_release(in_step);
    tutti_memory_release(small);
    return TUTTI_OK;
}

static void few_descriptors(void) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, run_out_of_descriptors, NULL));
}

TEST(a_rank_without_descriptors_fails_the_rendezvous_alike_for_all_and_ends_nothing) {
    test_as_ordinary_user(few_descriptors);
}

/* The n-th call that can fail does so on the victim alone. */
static tutti_status run_with_failure(tutti_world *world, void *argument) {
    report *shared = argument;
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    CHECK_OK(tutti_group_set_timeout(tutti_world_group(world), 60000000000));
    int descriptors = test_count_descriptors();
    if (rank == VICTIM)
        test_fail_arm(NULL, shared->delay);
    tutti_memory *memory;
    tutti_peers *peers;
    tutti_status status = tutti_memory_alloc(world, shared->bytes, NULL, &memory);
    if (status == TUTTI_OK) {
        status = tutti_memory_rendezvous(memory, tutti_world_group(world), &peers);
        if (status == TUTTI_OK) {
            status = tutti_peers_signal(peers, (rank + 1) % size, 0, LONG);
            if (status == TUTTI_OK)
                status = tutti_peers_wait_signal(peers, (rank + size - 1) % size, 0, LONG);
            tutti_peers_release(peers);
        }
        tutti_memory_release(memory);
    } else {
        CHECK_OK(tutti_group_abort(tutti_world_group(world), "no memory")); /* what a program does */
    }
    if (rank == VICTIM && test_fail_disarm())
        atomic_store(&shared->signal, 1);
    if (status == TUTTI_ERROR_TIMEOUT)
        FAIL("a deadline instead of an error: %s", tutti_error_message());
    if (status != TUTTI_OK)
        CHECK(tutti_error_message()[0] != 0);
    if (shared->bytes > (size_t)2 << 20) /* the heap's segments stay, those of large blocks do not */
        CHECK(test_count_descriptors() <= descriptors + 1);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

static void fail_each_call(size_t bytes) {
    report *shared = new_report();
    shared->bytes = bytes;
    shared->signal = 1;
    long nth = 0;
    while (shared->signal != 0) {
        shared->signal = 0;
        shared->delay = ++nth;
        atomic_store(&shared->finished, 0);
        CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, run_with_failure, shared));
        CHECK_EQ(atomic_load(&shared->finished), 2);
    }
    CHECK(nth > 8); /* it did fail something */
    end_report(shared);
}

TEST(the_nth_failing_call_of_one_rank_hangs_nobody_with_small_blocks) {
    fail_each_call(1000);
}

TEST(the_nth_failing_call_of_one_rank_hangs_nobody_with_large_blocks) {
    fail_each_call((size_t)3 << 20);
}

/* The same in one process, where the n-th call of any rank fails, from the moment on when all worlds are open. */
static tutti_status thread_main(tutti_world *world, void *argument) {
    report *shared = argument;
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory, *first;
    tutti_peers *peers, *in_step;
    CHECK_OK(tutti_group_set_timeout(group, 60000000000));
    CHECK_OK(make_peers(world, 8, &first, &in_step));
    CHECK_OK(tutti_peers_barrier(in_step, 0, LONG));
    if (tutti_world_rank(world) == 0)
        test_fail_arm(NULL, shared->delay);
    tutti_status status = tutti_peers_barrier(in_step, 0, LONG);
    if (status == TUTTI_OK)
        status = make_peers(world, 5000, &memory, &peers);
    if (status == TUTTI_OK) {
        status = tutti_peers_barrier(peers, 0, LONG);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    } else if (tutti_group_check(group) == TUTTI_OK) {
        CHECK_OK(tutti_group_abort(group, "no memory")); /* what a program does when an allocation fails */
    }
    if (status == TUTTI_ERROR_TIMEOUT)
        FAIL("a deadline instead of an error: %s", tutti_error_message());
    tutti_peers_release(in_step);
    tutti_memory_release(first);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(the_nth_failing_call_of_a_world_of_threads_leaves_nothing_behind) {
    report *shared = new_report();
    bool failed = true;
    int descriptors = test_count_descriptors(), mappings = test_count_mappings();
    for (shared->delay = 1; failed; shared->delay++) {
        atomic_store(&shared->finished, 0);
        tutti_status status = tutti_spawn(TUTTI_SPAWN_THREADS, 2, thread_main, shared);
        failed = test_fail_disarm();
        CHECK(failed || status == TUTTI_OK);
        CHECK_EQ(atomic_load(&shared->finished), 2);
        CHECK_EQ(test_count_descriptors(), descriptors);
        CHECK_EQ(test_count_mappings(), mappings);
    }
    CHECK(shared->delay > 20);
    end_report(shared);
}

/* ---- garbage ---- */

static tutti_status send_garbage(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world);
    tutti_memory *memory;
    tutti_peers *peers;
    for (int round = 0; round < 3; round++) {
        if (rank == VICTIM) {
            unsigned char noise[600];
            for (size_t i = 0; i < sizeof noise; i++)
                noise[i] = (unsigned char)(i * 31 + (size_t)round);
            for (int other = 0; other < world->size; other++) {
                int fd = world->job->peers[other].fd;
                if (fd < 0)
                    continue;
                CHECK(send(fd, noise, 1 + (size_t)round * 299, MSG_NOSIGNAL) > 0);
                tu_wire wire = { .magic = TU_WIRE_MAGIC, .kind = 77, .sender = 5, .bytes = 0 };
                CHECK(send(fd, &wire, sizeof wire, MSG_NOSIGNAL) > 0);
                wire = (tu_wire){ .magic = TU_WIRE_MAGIC,
                                  .kind = TU_WIRE_EXCHANGE,
                                  .sender = VICTIM,
                                  .key = 1,
                                  .sequence = 99,
                                  .piece = {
                                      .id = 4711, .segment_bytes = 8192, .bytes = UINT64_MAX, .offset = UINT64_MAX } };
                CHECK(send(fd, &wire, sizeof wire, MSG_NOSIGNAL) > 0);
            }
        }
        CHECK_OK(make_peers(world, 4096, &memory, &peers));
        CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    return TUTTI_OK;
}

TEST(garbage_on_the_sockets_is_dropped_and_the_rendezvous_goes_on) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, send_garbage, NULL));
}

typedef int make_descriptor(size_t bytes);

static int unsealed_memory(size_t bytes) {
    int fd = memfd_create("unsealed", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    return fd;
}

static int short_memory(size_t bytes) {
    int fd = memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes / 2) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    return fd;
}

static int strange_memory(size_t bytes) { /* of the right size and sealed, but not marked as ours */
    int fd = memfd_create("strange", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    return fd;
}

static int a_file(size_t bytes) {
    char path[] = "/tmp/tutti-test-XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    CHECK(fd >= 0 && unlink(path) == 0 && ftruncate(fd, (off_t)bytes) == 0);
    return fd;
}

static int a_device(size_t bytes) {
    (void)bytes;
    return open("/dev/zero", O_RDWR | O_CLOEXEC);
}

static tutti_status give_bad_descriptor(tutti_world *world, void *argument) {
    make_descriptor *make = *(make_descriptor *const *)argument;
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_group_set_timeout(group, 60000000000));
    CHECK_OK(tutti_memory_alloc(world, (size_t)3 << 20, NULL, &memory));
    if (tutti_world_rank(world) == VICTIM) {
        const tu_piece *piece = memory->block.handle;
        int bad = make(piece->segment->bytes);
        CHECK(bad >= 0 && dup3(bad, piece->segment->fd, O_CLOEXEC) >= 0);
        close(bad);
    }
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("came from rank 1");
    CHECK_OK(tutti_group_check(group));
    tutti_memory_release(memory);
    CHECK_OK(make_peers(world, (size_t)3 << 20, &memory, &peers));
    CHECK_OK(tutti_peers_barrier(peers, 0, LONG));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    return TUTTI_OK;
}

TEST(a_descriptor_that_is_not_what_it_should_be_is_refused_by_all) {
    static make_descriptor *const makers[] = { unsealed_memory, short_memory, strange_memory, a_file, a_device };
    for (size_t i = 0; i < sizeof makers / sizeof *makers; i++)
        CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, give_bad_descriptor, (void *)&makers[i]));
}

/* ---- disagreement ---- */

static tutti_status one_does_something_else(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world), *half;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_group_set_timeout(group, 60000000000));
    CHECK_OK(tutti_memory_alloc(world, 64, NULL, &memory));
    if (tutti_world_rank(world) == VICTIM)
        CHECK_STATUS(tutti_group_new_subgroups(group, 1, NULL, NULL, &half), TUTTI_ERROR_MISMATCH);
    else
        CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_MISMATCH);
    tutti_memory_release(memory);
    return TUTTI_OK;
}

TEST(a_rank_that_calls_something_else_is_a_mismatch_on_all_as_processes) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, one_does_something_else, NULL));
}

TEST(a_rank_that_calls_something_else_is_a_mismatch_on_all_as_threads) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 3, one_does_something_else, NULL));
}
