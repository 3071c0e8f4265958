/* SPDX-License-Identifier: Apache-2.0
 *
 * How opening grows with the number of ranks: a world of n processes opens, meets in a barrier and closes, for n from
 * 16 up in steps of two; then the same with threads.
 *
 *     bench/scale [LARGEST [ROUNDS]]        default 256, 3
 *
 * Shown are, per rank: processor time in ms (user and system, of all ranks together, divided by n), the bytes of shared
 * memory that the job holds, and the descriptors of one rank. What grows at most in proportion to n in these columns is
 * linear per rank: the last column is their growth from the first row, divided by the growth of n, and must not be much
 * above 1. Processor time is what the machine's load falsifies least; the quickest of the rounds counts.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <tutti/collective.h>
#include <tutti/tutti.h>

#include "base/clock.h"
#include "job/page.h"
#include "world/world.h"

typedef struct figures {
    double open_ms; /* wall clock of rank 0 */
    double bytes;   /* of shared memory, per rank */
    int descriptors;
} figures;

static int count_descriptors(void) {
    int count = 0;
    for (int fd = 0; fd < 65536; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static tutti_status be_rank(tutti_world *world, void *argument) {
    figures *shared = argument;
    int64_t begin = tu_clock_now();
    tutti_status status = tutti_barrier(tutti_world_group(world), NULL);
    if (status == TUTTI_OK && tutti_world_rank(world) == 0) {
        const tu_page *page = tu_job_page(world->job);
        double bytes = (double)page->bytes;
        for (int rank = 0; rank < page->size; rank++)
            bytes += (double)atomic_load(&tu_page_slot(page, rank)->reserved);
        shared->bytes = bytes / page->size;
        shared->descriptors = count_descriptors();
        shared->open_ms = (double)(tu_clock_now() - begin) / 1e6;
    }
    return status == TUTTI_OK ? tutti_barrier(tutti_world_group(world), NULL) : status;
}

static double used_ms(void) {
    double total = 0;
    int who[] = { RUSAGE_SELF, RUSAGE_CHILDREN };
    for (int i = 0; i < 2; i++) {
        struct rusage usage;
        getrusage(who[i], &usage);
        total += 1e3 * (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 1e-3 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    }
    return total;
}

static int measure(tutti_spawn_kind kind, const char *name, int largest, int rounds) {
    figures *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    double first_ms = 0, first_bytes = 0;
    printf("%-10s %6s %14s %14s %12s %10s\n", name, "ranks", "ms per rank", "KiB per rank", "descriptors", "growth");
    for (int ranks = 16; ranks <= largest; ranks *= 2) {
        double best = 1e300;
        for (int round = 0; round < rounds; round++) {
            double begin = used_ms();
            tutti_status status = tutti_spawn(kind, ranks, be_rank, shared);
            double taken = (used_ms() - begin) / ranks;
            if (status != TUTTI_OK) {
                fprintf(stderr, "%d %s: %s\n", ranks, name, tutti_error_message());
                return 1;
            }
            best = taken < best ? taken : best;
        }
        if (ranks == 16)
            first_ms = best, first_bytes = shared->bytes;
        double growth = best / first_ms > shared->bytes / first_bytes ? best / first_ms : shared->bytes / first_bytes;
        printf("%-10s %6d %14.3f %14.1f %12d %10.2f\n", "", ranks, best, shared->bytes / 1024, shared->descriptors,
               growth / (ranks / 16.0));
        fflush(stdout);
    }
    munmap(shared, sizeof *shared);
    return 0;
}

int main(int count, char **arguments) {
    int largest = count > 1 ? atoi(arguments[1]) : 256, rounds = count > 2 ? atoi(arguments[2]) : 3;
    if (largest < 16 || rounds < 1) {
        fprintf(stderr, "usage: scale [LARGEST [ROUNDS]], with at least 16 ranks and 1 round\n");
        return 2;
    }
    int failed = measure(TUTTI_SPAWN_PROCESSES, "processes", largest, rounds);
    return failed != 0 ? failed : measure(TUTTI_SPAWN_THREADS, "threads", largest, rounds);
}
