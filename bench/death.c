/* SPDX-License-Identifier: Apache-2.0
 *
 * From a SIGKILL to the last survivor's error, in milliseconds:
 *
 *     bench/death [rounds] [heap bytes per rank, "4G"] [ranks] [where they wait: one of place_names alone]
 *
 * Every rank touches its heap first, because tearing it down is what delays the usual signs of a death. The survivors
 * wait in a barrier, for a signal, in a rendezvous, or in an all_reduce, with deadlines of 60 s. Without a heap given
 * it is 4 GiB, or what the machine has room for.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/settings.h"

#define MOST_RANKS 256

typedef enum place {
    IN_BARRIER,
    IN_SIGNAL,
    IN_RENDEZVOUS,
    IN_ALL_REDUCE,
    PLACES
} place;
static const char *const place_names[] = { "peers_barrier", "peers_wait_signal", "rendezvous", "all_reduce" };

/* Shared by fork. */
typedef struct report {
    place place;
    int victim;
    size_t heap;
    _Atomic int ready;
    _Atomic int victim_pid;
    _Atomic int64_t killed;           /* when */
    _Atomic int64_t told[MOST_RANKS]; /* when each survivor knew */
    _Atomic int wrong;                /* survivors with another error */
} report;

static tutti_status wait_in(tutti_world *world, place place, tutti_memory *memory, tutti_peers *peers, int victim) {
    tutti_call call = TUTTI_CALL_INIT;
    tutti_peers *more;
    float numbers[1000] = { 0 };
    call.timeout_ns = 60 * TU_SECOND;
    switch (place) {
    case IN_BARRIER:
        return tutti_peers_barrier(peers, 1, &call);
    case IN_SIGNAL:
        return tutti_peers_wait_signal(peers, victim, 0, &call);
    case IN_ALL_REDUCE:
        return tutti_all_reduce(tutti_world_group(world), numbers, numbers, 1000, TUTTI_F32, TUTTI_SUM, &call);
    default:
        return tutti_memory_rendezvous(memory, tutti_world_group(world), &more);
    }
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    report *shared = argument;
    int rank = tutti_world_rank(world);
    tutti_memory *memory, *second;
    tutti_peers *peers;
    char *heap = NULL;
    if (shared->heap > 0) {
        heap = malloc(shared->heap);
        if (heap == NULL)
            return TUTTI_ERROR_MEMORY;
        memset(heap, 1, shared->heap);
    }
    tutti_status status = tutti_memory_alloc(world, 4096, NULL, &memory);
    if (status == TUTTI_OK)
        status = tutti_memory_alloc(world, 4096, NULL, &second);
    if (status == TUTTI_OK)
        status = tutti_memory_rendezvous(memory, tutti_world_group(world), &peers);
    if (status == TUTTI_OK)
        status = tutti_peers_barrier(peers, 0, NULL);
    if (status != TUTTI_OK)
        return status;
    if (rank == shared->victim)
        atomic_store(&shared->victim_pid, (int)getpid());
    atomic_fetch_add(&shared->ready, 1);
    while (rank == shared->victim)
        pause();
    status = wait_in(world, shared->place, second, peers, shared->victim);
    atomic_store(&shared->told[rank], tu_clock_now());
    if (status != TUTTI_ERROR_DEAD) {
        atomic_fetch_add(&shared->wrong, 1);
        fprintf(stderr, "rank %d: %s: %s\n", rank, tutti_status_name(status), tutti_error_message());
    }
    tutti_peers_release(peers);
    tutti_memory_release(second);
    tutti_memory_release(memory);
    free(heap);
    return TUTTI_OK;
}

/* Kills the victim a while after everybody waits. */
static pid_t start_killer(report *shared, int ranks) {
    pid_t parent = getpid(), killer = fork();
    if (killer != 0)
        return killer;
    while (atomic_load(&shared->ready) < ranks) {
        if (getppid() != parent) /* the bench was killed */
            _exit(1);
        usleep(1000);
    }
    usleep(50000);
    atomic_store(&shared->killed, tu_clock_now());
    kill(atomic_load(&shared->victim_pid), SIGKILL);
    _exit(0);
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static bool measure(place place, int rounds, int ranks, size_t heap) {
    report *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double *milliseconds = calloc((size_t)rounds, sizeof *milliseconds);
    if (shared == MAP_FAILED || milliseconds == NULL)
        return false;
    for (int round = 0; round < rounds; round++) {
        memset(shared, 0, sizeof *shared);
        shared->place = place;
        shared->victim = round % ranks; /* any rank may be the dead one, rank 0 too */
        shared->heap = heap;
        fflush(NULL);
        pid_t killer = start_killer(shared, ranks);
        (void)!tutti_spawn(TUTTI_SPAWN_PROCESSES, ranks, rank_main, shared);
        waitpid(killer, NULL, 0);
        int64_t last = 0;
        for (int rank = 0; rank < ranks; rank++) {
            int64_t told = atomic_load(&shared->told[rank]);
            if (rank != shared->victim && told == 0)
                atomic_fetch_add(&shared->wrong, 1);
            last = told > last ? told : last;
        }
        if (atomic_load(&shared->wrong) != 0) {
            fprintf(stderr, "%s: a survivor did not get the death's error: %s\n", place_names[place],
                    tutti_error_message());
            return false;
        }
        milliseconds[round] = (double)(last - atomic_load(&shared->killed)) / 1e6;
    }
    qsort(milliseconds, (size_t)rounds, sizeof *milliseconds, ascending);
    int percentile = (99 * rounds + 99) / 100 - 1;
    printf("  %-20s median %7.2f ms   99th percentile %7.2f ms   (%.2f .. %.2f)\n", place_names[place],
           milliseconds[rounds / 2], milliseconds[percentile], milliseconds[0], milliseconds[rounds - 1]);
    free(milliseconds);
    munmap(shared, sizeof *shared);
    return true;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 7;
    int ranks = argc > 3 ? atoi(argv[3]) : 8;
    int64_t heap = (int64_t)4 << 30;
    if (argc > 2 && tu_parse_bytes(argv[2], &heap) != TUTTI_OK) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 2;
    }
    if (rounds < 1 || ranks < 2 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: death [rounds] [heap per rank] [ranks, 2 to %d] [place]\n", MOST_RANKS);
        return 2;
    }
    int64_t room = (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE) / 10 * 8 / ranks;
    if (argc <= 2 && heap > room)
        heap = room;
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("from SIGKILL to the last survivor's error, %d ranks with %.2f GiB of touched heap each, %d rounds:\n",
           ranks, (double)heap / (double)(1 << 30), rounds);
    for (int place = 0; place < PLACES; place++) {
        if (argc > 4 && strcmp(argv[4], place_names[place]) != 0)
            continue;
        if (!measure((enum place)place, rounds, ranks, (size_t)heap))
            return 1;
    }
    return 0;
}
