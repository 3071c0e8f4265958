/* SPDX-License-Identifier: Apache-2.0
 *
 * A program for the fault matrix over hosts: every rank does everything at once, each operation in a thread and a group
 * of its own, step after step, until it fails. It says so in one line per operation, and ends with status 5.
 *
 *     steps [SECONDS]    that a step may take
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <unistd.h>

#define LONG_COUNT 60000 /* elements of long steps: several fragments between hosts */

typedef struct part {
    const char *name;
    tutti_status (*step)(struct part *part, int number);
    tutti_group *group;
    tutti_memory *memory;
    tutti_peers *peers;
    int rank, size, across; /* a rank on another host, when all hosts have as many */
    double *in, *out;
} part;

static atomic_int begun;

static size_t count_of(int number) {
    return number % 2 == 0 ? 1 : LONG_COUNT;
}

static tutti_status reduce(part *part, int number) {
    return tutti_all_reduce(part->group, part->in, part->out, count_of(number), TUTTI_F64, TUTTI_SUM, NULL);
}

static tutti_status meet(part *part, int number) {
    (void)number;
    return tutti_barrier(part->group, NULL);
}

static tutti_status exchange(part *part, int number) {
    size_t count = count_of(number);
    return tutti_send_recv(part->group, part->in, count, part->across, part->out, count, part->across, TUTTI_F64,
                           number, NULL);
}

static tutti_status put(part *part, int number) {
    tutti_status status =
        tutti_peers_put(part->peers, part->across, 0, part->in, count_of(number) * sizeof(double), NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_signal(part->peers, part->across, 0, NULL);
    return status == TUTTI_OK ? tutti_peers_wait_signal(part->peers, part->across, 0, NULL) : status;
}

static tutti_status meet_peers(part *part, int number) {
    (void)number;
    return tutti_peers_barrier(part->peers, 0, NULL);
}

/* One that only reads would not notice that somebody else died: so they meet now and then. */
static tutti_status get(part *part, int number) {
    tutti_status status =
        tutti_peers_get(part->peers, part->across, 0, part->out, count_of(number) * sizeof(double), NULL);
    return status == TUTTI_OK && number % 8 == 7 ? tutti_peers_barrier(part->peers, 0, NULL) : status;
}

static void *run(void *argument) {
    part *part = argument;
    tutti_status status = TUTTI_OK;
    for (int number = 0; status == TUTTI_OK; number++) {
        status = part->step(part, number);
        if (number == 1)
            atomic_fetch_add(&begun, 1);
    }
    printf("%s ended: %s\n", part->name, tutti_error_message());
    fflush(stdout);
    return NULL;
}

static tutti_status prepare(tutti_world *world, part *part) {
    tutti_status status = tutti_group_new(world, NULL, 0, NULL, &part->group);
    part->rank = tutti_world_rank(world);
    part->size = tutti_world_size(world);
    part->across = (part->rank + part->size / 2) % part->size;
    part->in = calloc(2 * LONG_COUNT, sizeof *part->in);
    part->out = part->in + LONG_COUNT;
    if (status == TUTTI_OK && (part->step == put || part->step == meet_peers || part->step == get)) {
        status = tutti_memory_alloc(world, LONG_COUNT * sizeof(double), NULL, &part->memory);
        if (status == TUTTI_OK)
            status = tutti_memory_rendezvous(part->memory, part->group, &part->peers);
    }
    return status;
}

int main(int count, char **arguments) {
    part parts[] = { { "all_reduce", reduce },        { "barrier", meet }, { "send_recv", exchange }, { "put", put },
                     { "peers_barrier", meet_peers }, { "get", get } };
    enum {
        PARTS = sizeof parts / sizeof *parts
    };
    pthread_t threads[PARTS];
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    for (int i = 0; i < PARTS && status == TUTTI_OK; i++)
        status = prepare(world, &parts[i]);
    if (status != TUTTI_OK) {
        fprintf(stderr, "error: %s\n", tutti_error_message());
        return 4;
    }
    for (int i = 0; i < PARTS && count > 1 && status == TUTTI_OK; i++)
        status = tutti_group_set_timeout(parts[i].group, strtoll(arguments[1], NULL, 10) * 1000000000);
    for (int i = 0; i < PARTS; i++)
        if (pthread_create(&threads[i], NULL, run, &parts[i]) != 0)
            return 4;
    while (atomic_load(&begun) < PARTS)
        usleep(1000);
    printf("rank %d of %d, pid %d, runs\n", tutti_world_rank(world), tutti_world_size(world), (int)getpid());
    fflush(stdout);
    for (int i = 0; i < PARTS; i++)
        pthread_join(threads[i], NULL);
    return 5;
}
