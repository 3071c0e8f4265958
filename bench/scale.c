/* SPDX-License-Identifier: Apache-2.0
 *
 * How things grow with the number of ranks.
 *
 *     bench/scale [LARGEST [ROUNDS]]        default 256, 3
 *     bench/scale simulate [HOSTS EACH] [--latency US] [--gbit RATE] [--overhead US] [OPERATION:TYPE:COUNT…]
 *
 * The first opens a world of n processes on this host, meets in a barrier and closes, for n from 16 up in steps of two;
 * then the same with threads.
 *
 * The second runs the collectives between hosts on a virtual clock (scale/simulation.h): without numbers for 2 to 1000
 * hosts, of up to 100 000 ranks. Messages and bytes are what a real run sends; times are what a network with that
 * latency and that rate per host takes, where they, and not the processors, decide.
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
#include "scale/simulation.h"
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

/* ---- simulated ---- */

static const char *const usual_calls[] = { "barrier:u8:0",          "all_reduce:f32:2",        "all_reduce:f32:1024",
                                           "all_reduce:f32:262144", "all_reduce:f32:16777216", "all_gather:u8:4096",
                                           "broadcast:u8:1048576",  "broadcast:u8:67108864" };
static const struct {
    int hosts, each;
} usual_worlds[] = { { 2, 1 }, { 2, 64 }, { 4, 64 }, { 16, 64 }, { 64, 100 }, { 256, 100 }, { 1000, 100 } };

static int simulate_call(const char *text, int hosts, int each, const simulation_model *model) {
    simulation_call call;
    if (!simulation_parse(text, &call)) {
        fprintf(stderr, "%s: must be like all_reduce:f32:1000\n", text);
        return 2;
    }
    int *ranks = malloc((size_t)hosts * sizeof *ranks);
    for (int host = 0; ranks != NULL && host < hosts; host++)
        ranks[host] = each;
    simulation *made = ranks != NULL ? simulation_open(ranks, hosts, false, model) : NULL;
    double seconds = made != NULL ? simulation_run(made, &call) : -1;
    uint64_t messages = 0, bytes = 0;
    int connections = 0;
    for (int rank = 0; seconds >= 0 && rank < hosts * each; rank++) {
        simulation_traffic sent = simulation_sent(made, rank);
        messages += sent.messages + sent.taken;
        bytes += sent.bytes;
        connections = sent.connections > connections ? sent.connections : connections;
    }
    if (seconds >= 0)
        printf("%6d x %-5d %8d  %-26s %12llu %16llu %12d %14.1f\n", hosts, each, hosts * each, text,
               (unsigned long long)messages, (unsigned long long)bytes, connections, 1e6 * seconds);
    fflush(stdout);
    simulation_close(made);
    free(ranks);
    return seconds < 0;
}

static int simulate(int count, char **arguments) {
    simulation_model model = { .latency = 10e-6, .overhead = 1e-6, .compute = 1e-10, .meeting = 1e-6 };
    double rate = 100;
    int hosts = 0, each = 0, failed = 0, at = 0;
    if (count >= 2 && atoi(arguments[0]) > 0 && atoi(arguments[1]) > 0) {
        hosts = atoi(arguments[0]);
        each = atoi(arguments[1]);
        at = 2;
    }
    for (; at + 1 < count && strncmp(arguments[at], "--", 2) == 0; at += 2) {
        double value = atof(arguments[at + 1]);
        if (strcmp(arguments[at], "--latency") == 0)
            model.latency = value * 1e-6;
        else if (strcmp(arguments[at], "--overhead") == 0)
            model.overhead = value * 1e-6;
        else if (strcmp(arguments[at], "--gbit") == 0 && value > 0)
            rate = value;
        else
            failed = 2;
    }
    model.byte = 8e-9 / rate;
    if (failed != 0) {
        fprintf(stderr, "usage: scale simulate [HOSTS EACH] [--latency US] [--gbit RATE] [--overhead US] [CALL…]\n");
        return failed;
    }
    printf("latency %g us, %g Gbit/s per host, overhead %g us\n%6s   %-5s %8s  %-26s %12s %16s %12s %14s\n",
           model.latency * 1e6, rate, model.overhead * 1e6, "hosts", "each", "ranks", "call", "messages", "bytes",
           "connections", "us");
    int calls = at < count ? count - at : (int)(sizeof usual_calls / sizeof *usual_calls);
    int worlds = hosts > 0 ? 1 : (int)(sizeof usual_worlds / sizeof *usual_worlds);
    for (int call = 0; call < calls && failed == 0; call++)
        for (int world = 0; world < worlds && failed == 0; world++)
            failed = simulate_call(at < count ? arguments[at + call] : usual_calls[call],
                                   hosts > 0 ? hosts : usual_worlds[world].hosts,
                                   hosts > 0 ? each : usual_worlds[world].each, &model);
    return failed;
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "simulate") == 0)
        return simulate(count - 2, arguments + 2);
    int largest = count > 1 ? atoi(arguments[1]) : 256, rounds = count > 2 ? atoi(arguments[2]) : 3;
    if (largest < 16 || rounds < 1) {
        fprintf(stderr, "usage: scale [LARGEST [ROUNDS]], with at least 16 ranks and 1 round\n");
        return 2;
    }
    int failed = measure(TUTTI_SPAWN_PROCESSES, "processes", largest, rounds);
    return failed != 0 ? failed : measure(TUTTI_SPAWN_THREADS, "threads", largest, rounds);
}
