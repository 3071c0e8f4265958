/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of a contender: the same loop, buffers and clock for Tutti and for MPI. A contender defines the peer_
 * functions and includes this.
 *
 * All contenders of a comparison live at the same time and take turns. A rank whose turn it is not sleeps in read() on
 * its own pipe, so that it disturbs nobody: waiting inside an MPI call would spin. A command is one line,
 *
 *     all_reduce f32 1048576 isolated dirty symmetric 20 1 check
 *
 * (operation, type, bytes of the larger buffer, isolated or streaming, clean or dirty, symmetric or private,
 * measurements, calls per measurement, check or trust). The answer is one line: median, minimum and mean in
 * nanoseconds, wrong elements or -1. "quit" ends.
 */
#ifndef WORKER_H
#define WORKER_H

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum peer_operation {
    BARRIER,
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    BROADCAST,
    ALL_TO_ALL,
    EXCHANGE,
    COPY,
    COPY_STREAM,
    HANDOVER,
    PUT,
    SIGNAL,
    OPERATIONS
} peer_operation;

static const char *const operation_names[OPERATIONS] = { "barrier",     "all_reduce", "all_gather", "reduce_scatter",
                                                         "broadcast",   "all_to_all", "exchange",   "copy",
                                                         "copy_stream", "handover",   "put",        "signal" };

/* What a contender provides. Errors end the process with a message. */
static void peer_open(int *argc, char ***argv, int *rank, int *size);
static void peer_close(void);
static void peer_barrier(void);
static bool peer_understands(const char *dtype);
static size_t peer_element(void); /* bytes of the type last understood */
/* Buffers of at least `bytes`; alike on all ranks, so that it may communicate. */
static void *peer_buffer(int which, size_t bytes, bool symmetric);
/* `count` is one rank's share. The broadcast is in place, in `out`. An exchange sends half of it to the next rank and
 * half to the one before, and receives as much from them, as a batch. A put goes from rank 0 to the last one, which
 * then says that it has it; a signal goes there and back. */
static void peer_run(peer_operation operation, const void *in, void *out, size_t count);
/* Fills with values of a rank, from element `first` on. */
static void peer_fill(void *to, size_t first, size_t count, int rank);
/* Wrong elements; peer_exact: bit for bit, in rank order. */
static const bool peer_exact;

static int rank, size;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* The value of element `index` of `of`: in [-1, 1), and no two ranks alike. */
static float value(int of, size_t index) {
    uint32_t x = (uint32_t)index * 0x9e3779b1u + (uint32_t)of * 0x85ebca6bu;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    return (float)(int32_t)(x * 0x297a2d39u) * 0x1p-31f;
}

typedef struct turn {
    peer_operation operation;
    size_t bytes, count; /* of the larger buffer; elements of one rank's share */
    bool isolated, dirty, symmetric, check, is_f32;
    int measurements, batch;
    void *in, *out, *original;
} turn;

static bool parts(peer_operation operation) {
    return operation == ALL_GATHER || operation == REDUCE_SCATTER || operation == ALL_TO_ALL;
}

static size_t in_count(const turn *t) {
    return t->operation == REDUCE_SCATTER || t->operation == ALL_TO_ALL ? t->count * (size_t)size : t->count;
}

static void *input(const turn *t) {
    return t->operation == BROADCAST ? t->out : t->in;
}

static void restore_input(const turn *t) {
    memcpy(input(t), t->original, in_count(t) * peer_element());
}

static void one_call(const turn *t) {
    if (t->operation == COPY)
        memcpy(t->out, t->in, t->bytes);
    else if (t->operation == BARRIER)
        peer_barrier();
    else
        peer_run(t->operation, t->in, t->out, t->count);
}

static double measure_once(const turn *t) {
    if (t->dirty)
        restore_input(t);
    if (t->isolated)
        peer_barrier();
    double begin = now();
    for (int i = 0; i < t->batch; i++)
        one_call(t);
    return (now() - begin) / t->batch;
}

/* What element i of part k of the output must be. */
static float expected(const turn *t, int k, size_t i) {
    size_t index = t->operation == REDUCE_SCATTER ? (size_t)rank * t->count + i : i;
    float sum;
    switch (t->operation) {
    case ALL_GATHER:
        return value(k, i);
    case BROADCAST:
        return value(0, i);
    case ALL_TO_ALL:
        return value(k, (size_t)rank * t->count + i);
    case EXCHANGE: /* the first half comes from the rank before, which sent its first one */
        return value((rank + (i < t->count / 2 ? size - 1 : 1)) % size, i);
    default:
        sum = value(0, index);
        for (int r = 1; r < size; r++)
            sum += value(r, index);
        return sum;
    }
}

static long wrong(const turn *t) {
    int out_parts = t->operation == ALL_GATHER || t->operation == ALL_TO_ALL ? size : 1;
    float tolerance = peer_exact || parts(t->operation) || t->operation == EXCHANGE ? 0 : 1e-5f;
    if (t->operation == REDUCE_SCATTER)
        tolerance = peer_exact ? 0 : 1e-5f;
    long count = 0;
    for (int k = 0; k < out_parts; k++) {
        const float *found = (const float *)t->out + (size_t)k * t->count;
        for (size_t i = 0; i < t->count; i++) {
            float wanted = expected(t, k, i);
            count += tolerance > 0 ? !(fabsf(found[i] - wanted) <= tolerance)
                                   : memcmp(&found[i], &wanted, sizeof wanted) != 0;
        }
    }
    return count;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void take_turn(turn *t, FILE *answers) {
    double *times = calloc((size_t)t->measurements, sizeof *times), sum = 0;
    long found_wrong = -1;
    if (times == NULL)
        exit(1);
    t->original = peer_buffer(2, t->bytes, false);
    t->in = peer_buffer(0, t->bytes, t->symmetric);
    t->out = peer_buffer(1, t->bytes, t->symmetric);
    if (t->bytes > 0) {
        peer_fill(t->original, 0, in_count(t), rank);
        restore_input(t);
    }
    for (int i = 0; i < 2; i++)
        measure_once(t);
    peer_barrier();
    for (int i = 0; i < t->measurements; i++)
        sum += times[i] = measure_once(t);
    if (t->check && t->is_f32 && t->operation >= ALL_REDUCE && t->operation <= EXCHANGE) {
        memset(t->out, 0xa5, t->bytes);
        restore_input(t);
        peer_barrier();
        one_call(t);
        found_wrong = wrong(t);
    }
    qsort(times, (size_t)t->measurements, sizeof *times, ascending);
    fprintf(answers, "%.1f %.1f %.1f %ld\n", times[t->measurements / 2], times[0], sum / t->measurements, found_wrong);
    fflush(answers);
    free(times);
}

static bool read_turn(const char *line, turn *t) {
    char operation[32], dtype[16], mode[16], state[16], buffers[16], check[16];
    *t = (turn){ .operation = OPERATIONS };
    if (sscanf(line, "%31s %15s %zu %15s %15s %15s %d %d %15s", operation, dtype, &t->bytes, mode, state, buffers,
               &t->measurements, &t->batch, check) != 9)
        return false;
    for (int i = 0; i < OPERATIONS; i++) {
        if (strcmp(operation, operation_names[i]) == 0)
            t->operation = (peer_operation)i;
    }
    if (t->operation == OPERATIONS || !peer_understands(dtype) || t->measurements < 1 || t->batch < 1)
        return false;
    t->is_f32 = strcmp(dtype, "f32") == 0;
    t->isolated = strcmp(mode, "isolated") == 0;
    t->dirty = strcmp(state, "dirty") == 0;
    t->symmetric = strcmp(buffers, "symmetric") == 0;
    t->check = strcmp(check, "check") == 0;
    t->count = t->bytes / peer_element() / (parts(t->operation) ? (size_t)size : 1);
    return true;
}

/* "0,1,2": the CPU of each rank; "-0,0,1,1": the same where ranks share them; "-": not bound. */
static void bind_to(const char *cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    const char *at = cpus + (cpus[0] == '-');
    for (int i = 0; i < rank && at != NULL; i++) {
        at = strchr(at, ',');
        at = at != NULL ? at + 1 : NULL;
    }
    if (at == NULL || *at == 0)
        return;
    CPU_SET((size_t)atoi(at), &set);
    sched_setaffinity(0, sizeof set, &set);
}

static FILE *open_pipe(const char *folder, const char *name, const char *mode) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s.%d", folder, name, rank);
    FILE *file = fopen(path, mode);
    if (file == NULL) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    return file;
}

/* Arguments: the folder with the pipes, and the CPUs. */
static int worker_loop(const char *folder, const char *cpus) {
    char line[256];
    bind_to(cpus);
    FILE *commands = open_pipe(folder, "commands", "r"), *answers = open_pipe(folder, "answers", "w");
    while (fgets(line, sizeof line, commands) != NULL && strncmp(line, "quit", 4) != 0) {
        turn t;
        if (!read_turn(line, &t)) {
            fprintf(stderr, "a command that cannot be understood: %s", line);
            return 1;
        }
        take_turn(&t, answers);
    }
    fclose(answers);
    fclose(commands);
    return 0;
}

#endif
