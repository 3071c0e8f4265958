/* SPDX-License-Identifier: Apache-2.0
 *
 * What is no death: ranks that are stopped, slow, interrupted by signals, or leaving while another dies; two jobs at
 * once; a store whose server dies.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/fault.h>
#include <tutti/group.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/store.h>

#include "../harness.h"
#include "base/clock.h"

static int64_t sum_in(tutti_group *group, int64_t mine) {
    int64_t sum;
    CHECK_OK(tutti_all_reduce(group, &mine, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    return sum;
}

/* ---- stopped for twice the deadline ---- */

/* Shared by all ranks. */
typedef struct watch {
    _Atomic bool stopped; /* rank 1 is */
    _Atomic int waited;   /* ranks whose deadline has passed */
} watch;

/* In a process of its own: tells that its parent is stopped, and wakes it when the others have given up. */
static _Noreturn void wake_parent(watch *shared, pid_t parent) {
    test_await_stopped(parent);
    atomic_store(&shared->stopped, true);
    while (atomic_load(&shared->waited) < 2)
        usleep(1000);
    kill(parent, SIGCONT);
    _exit(0);
}

static void stop_and_wake(tutti_world *world, void *argument) {
    watch *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest;
    CHECK_EQ(sum_in(group, 1), 3);
    if (tutti_world_rank(world) == 1) {
        pid_t me = getpid(), waker = fork();
        if (waker == 0)
            wake_parent(shared, me);
        kill(me, SIGSTOP);
        waitpid(waker, NULL, 0);
        int64_t one = 1, sum; /* it learns at once what happened meanwhile */
        CHECK_STATUS(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
    } else {
        int64_t one = 1, sum;
        while (!atomic_load(&shared->stopped))
            usleep(1000);
        CHECK_STATUS(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM,
                                      TUTTI_OPTIONS(tutti_call, .timeout_ns = test_moment())),
                     TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("stopped by a signal");
        atomic_fetch_add(&shared->waited, 1);
    }
    CHECK_OK(tutti_group_shrink(group, NULL, &rest)); /* it was not dead, so it comes too */
    CHECK_EQ(tutti_group_size(rest), 3);
    CHECK_EQ(tutti_group_settled(rest), 1);
    CHECK_EQ(sum_in(rest, 1), 3);
    tutti_group_release(rest);
}

TEST(a_rank_stopped_past_the_deadline_is_called_stopped_and_can_come_back) {
    watch *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    test_processes(3, stop_and_wake, shared);
    munmap(shared, sizeof *shared);
}

/* ---- slow ---- */

TEST_WORLD(slow_ranks_are_waited_for, 3) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_fault_inject(world, tutti_world_rank(world) == 0 ? "op=all_reduce,at=1,do=delay:60ms"
                                       : tutti_world_rank(world) == 1
                                           ? "op=all_reduce,at=2,do=delay:60ms"
                                           : "op=group_new,do=delay:60ms;op=barrier,do=delay:60ms"));
    for (int i = 0; i < 5; i++)
        CHECK_EQ(sum_in(group, 1), 3);
    tutti_group *same;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &same));
    CHECK_OK(tutti_barrier(same, NULL));
    tutti_group_release(same);
}

/* ---- signals everywhere ---- */

static _Atomic int rung;
static void ring(int signal) {
    (void)signal;
    atomic_fetch_add(&rung, 1);
}

static void in_a_storm_of_signals(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    struct sigaction action = { .sa_handler = ring }; /* without SA_RESTART: system calls return EINTR */
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval every = { .it_interval = { .tv_usec = 500 }, .it_value = { .tv_usec = 500 } };
    CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
    for (int i = 0; i < 100000; i++) {
        CHECK_EQ(sum_in(group, i), 3 * i);
        bool all;
        if (i % 50 == 0) {
            tutti_group *same;
            tutti_memory *block;
            tutti_peers *peers;
            CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &same));
            CHECK_OK(tutti_memory_alloc(world, (size_t)3 << 20, NULL, &block));
            CHECK_OK(tutti_memory_rendezvous(block, same, &peers));
            CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
            CHECK_OK(tutti_group_agree(same, true, &all));
            tutti_peers_release(peers);
            tutti_memory_release(block);
            CHECK_OK(tutti_group_destroy(same));
            tutti_group_release(same);
        }
        /* All stop together. */
        CHECK_OK(tutti_group_agree(group, i >= 200 && atomic_load(&rung) >= 50, &all));
        if (all)
            break;
    }
    struct itimerval none = { 0 };
    CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(signals_that_interrupt_system_calls_end_nothing) {
    test_processes(3, in_a_storm_of_signals, NULL);
}

/* ---- leaving ---- */

typedef struct board {
    _Atomic int finished;
    int victim;
    long nth;
} board;

/* The victim dies somewhere between its last operation and the end of its world: nobody else minds. */
static tutti_status die_while_leaving(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world);
    tutti_memory *block;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 100000, NULL, &block));
    CHECK_OK(tutti_memory_rendezvous(block, group, &peers));
    CHECK_EQ(sum_in(group, 1), 3);
    if (tutti_world_rank(world) == shared->victim) {
        switch (shared->nth) {
        case 0:
            kill(getpid(), SIGKILL);
            break;
        case 1:
            tutti_peers_release(peers);
            kill(getpid(), SIGKILL);
            break;
        case 2:
            tutti_memory_release(block);
            kill(getpid(), SIGKILL);
            break;
        default:
            tutti_peers_release(peers);
            tutti_memory_release(block);
            CHECK_OK(tutti_world_close(world));
            kill(getpid(), SIGKILL);
        }
    }
    usleep(3000);
    CHECK_EQ(*(char *)tutti_peers_buffer(peers, shared->victim), 0);
    tutti_peers_release(peers);
    tutti_memory_release(block);
    CHECK_OK(tutti_world_close(world));
    CHECK_EQ(test_count_mappings(), 0);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(a_death_while_leaving_disturbs_nobody) {
    board *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    for (shared->nth = 0; shared->nth < 4; shared->nth++)
        for (shared->victim = 0; shared->victim < 3; shared->victim++) {
            atomic_store(&shared->finished, 0);
            tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, die_while_leaving, shared);
            CHECK(status == TUTTI_ERROR_DEAD);
            CHECK_EQ(atomic_load(&shared->finished), 2);
        }
}

/* ---- two jobs at once ---- */

static void count_for_a_while(tutti_world *world, void *argument) {
    (void)argument;
    for (int i = 0; i < 1000; i++)
        CHECK_EQ(sum_in(tutti_world_group(world), i), 2 * i);
}

static tutti_status lose_one(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_group_set_timeout(group, 60 * TU_SECOND));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0)
        kill(getpid(), SIGKILL);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    return TUTTI_OK;
}

TEST(a_death_in_one_job_is_nothing_to_another) {
    fflush(NULL);
    pid_t other = fork();
    if (other == 0) {
        test_processes(2, count_for_a_while, NULL);
        _exit(0);
    }
    for (int i = 0; i < 5; i++)
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, lose_one, NULL), TUTTI_ERROR_DEAD);
    int status;
    CHECK(waitpid(other, &status, 0) == other);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- stores ---- */

TEST(a_store_whose_server_dies_fails_those_who_wait_long_before_their_deadline) {
    int ports[2];
    CHECK(pipe(ports) == 0);
    fflush(NULL);
    pid_t server = fork();
    if (server == 0) {
        tutti_store *store;
        CHECK_OK(tutti_store_open_tcp("127.0.0.1", 0, TUTTI_OPTIONS(tutti_tcp_store_options, .server = true), &store));
        int port = tutti_store_port(store);
        CHECK(write(ports[1], &port, sizeof port) == sizeof port);
        pause();
        _exit(0);
    }
    int port;
    CHECK(read(ports[0], &port, sizeof port) == sizeof port);
    close(ports[0]);
    close(ports[1]);
    tutti_store *store;
    CHECK_OK(tutti_store_open_tcp("127.0.0.1", port, NULL, &store));
    CHECK_OK(tutti_store_set(store, "a", "b", 1));
    pid_t killer = fork();
    if (killer == 0) {
        usleep(50000);
        kill(server, SIGKILL);
        _exit(0);
    }
    void *value;
    size_t bytes;
    tutti_status status = tutti_store_get(store, "never", 60 * TU_SECOND, &value, &bytes);
    CHECK(status == TUTTI_ERROR_NETWORK || status == TUTTI_ERROR_STORE);
    CHECK_MESSAGE("127.0.0.1");
    tutti_store_release(store);
    waitpid(killer, NULL, 0);
    waitpid(server, NULL, 0);
}
