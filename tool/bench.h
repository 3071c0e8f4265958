/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of `tutti bench` share: options, the operations that can be measured, rows of results.
 */
#ifndef TUTTI_TOOL_BENCH_H
#define TUTTI_TOOL_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <tutti/collective.h>
#include <tutti/peers.h>

#include "tool.h"
#include "topology.h"

/* ---- operations ---- */

/* How the elements of a call lie in its buffers; `count` is what the call takes. */
typedef enum bench_shape {
    BENCH_NOTHING, /* no data: barriers and signals */
    BENCH_WHOLE,   /* in and out have count elements */
    BENCH_GATHER,  /* out has a part of count elements for each rank */
    BENCH_SCATTER, /* in has */
    BENCH_EXCHANGE /* both have */
} bench_shape;

/* One call, as an operation makes it. */
typedef struct bench_call {
    tutti_group *group;
    tutti_peers *in_peers, *out_peers; /* for one-sided operations; NULL where the buffers are private */
    int rank, size, root;
    const void *in;
    void *out;
    size_t in_offset, out_offset; /* in their blocks */
    size_t count;
    tutti_dtype dtype;
    tutti_reduction reduction;
    const size_t *counts; /* count, once per rank */
    const int *to;        /* the next rank, for permute */
    const tutti_call *call;
} bench_call;

/* Where a part of the output comes from. */
typedef struct bench_source {
    int rank; /* -1: the reduction over all ranks */
    int part; /* of that rank's input */
} bench_source;

typedef struct bench_operation {
    const char *name;
    const char *aliases; /* separated by blanks */
    bench_shape shape;
    bool reduces; /* takes a reduction */
    bool rooted;
    bool one_sided; /* needs symmetric buffers */
    int least_ranks;
    int trips;                      /* the time of one call is divided by this: a round trip is two messages */
    double (*bus_factor)(int size); /* bus bandwidth over algorithm bandwidth; NULL: no bandwidth */
    tutti_status (*run)(const bench_call *call);
    /* What part `part` of the output of `rank` must be; false: that rank has no output. NULL: nothing to check. */
    bool (*expect)(int rank, int size, int root, int part, bench_source *source);
} bench_operation;

extern const bench_operation bench_operations[];
extern const int bench_operation_count;

/* By name: case, "_" and "-" are ignored, so are nccl-tests' "_perf" and OSU's "osu_". NULL when there is none. */
const bench_operation *bench_operation_find(const char *name);

/* Elements of a rank's input and output. */
size_t bench_in_elements(const bench_operation *operation, size_t count, int size);
size_t bench_out_elements(const bench_operation *operation, size_t count, int size);
/* The count that makes a message of about `bytes` (at least one element), and the bytes that it makes: of the larger
 * buffer, as nccl-tests counts. */
size_t bench_count(const bench_operation *operation, size_t bytes, tutti_dtype dtype, int size);
size_t bench_bytes(const bench_operation *operation, size_t count, tutti_dtype dtype, int size);

/* ---- data ---- */

/* Fills elements [0, count) of `rank`'s input; `salt` makes another filling. */
void bench_fill(void *to, size_t count, tutti_dtype dtype, int rank, unsigned salt);

/* How many elements of the output differ from the serial loop, bit for bit. */
uint64_t bench_wrong(const bench_operation *operation, const bench_call *call, unsigned salt);

/* ---- options and results ---- */

typedef enum bench_format {
    BENCH_TEXT,
    BENCH_JSON,
    BENCH_CSV
} bench_format;

#define BENCH_OPERATIONS 24
#define BENCH_ROUNDS 32 /* at most */

typedef struct bench_options {
    const bench_operation *operations[BENCH_OPERATIONS];
    int operation_count;
    int ranks; /* 0: one per CPU */
    bool threads;
    size_t begin, end, step;
    double factor;
    long iterations;         /* 0: as many as fit in `seconds` */
    long warmup;             /* -1: a few */
    double seconds;          /* per row, over all rounds */
    const char *hosts, *rsh; /* as "tutti run" takes them; NULL: ranks of this host */
    tutti_dtype dtype;
    tutti_reduction reduction;
    int root;
    bool in_place, private_buffers, cold, dirty, isolated, check;
    int across; /* ranks: 0 rank 0's time, 1 average, 2 least, 3 most */
    tutti_algorithm algorithm;
    binding_policy binding;
    bench_format format;    /* of standard output */
    const char *json, *csv; /* files besides; NULL: none */
    const char *plot, *baseline, *tune;
    double slower; /* percent above the baseline that are still no slower */
    int rounds;
} bench_options;

typedef struct bench_row {
    char operation[24];
    size_t bytes, count;
    tutti_dtype dtype;
    tutti_reduction reduction; /* 0: it takes none */
    int ranks;
    long iterations;
    int batch;                      /* calls per measurement */
    double min, p50, avg, p99, max; /* microseconds */
    double low, high;               /* the least and the largest median of a round */
    int rounds;
    double medians[BENCH_ROUNDS];
    double algbw, busbw; /* GB/s; 0: it moves no data */
    int64_t wrong;       /* elements; -1: not checked */
    bool private_buffers, in_place, cold, dirty, isolated;
    char algorithm[16];
} bench_row;

#define BENCH_ROWS 2048

/* Made by rank 0 and read by whoever started the ranks: shared memory. */
typedef struct bench_results {
    int count;
    int ranks;
    char launcher[32];
    double load; /* of the machine before it began */
    bench_row rows[BENCH_ROWS];
} bench_results;

/* ---- measuring: bench_rounds.c, bench_measure.c ---- */

typedef struct bench_job {
    const bench_options *options;
    bench_results *results;
    const binding *bindings; /* one per rank; NULL: not bound */
    const char *binding_text;
} bench_job;

/* The main of each rank. */
tutti_status bench_rank_main(tutti_world *world, void *job);

/* One rank's buffers for the largest message; bench_measure uses them for any smaller. */
typedef struct bench_arena bench_arena;
tutti_status bench_arena_make(tutti_world *world, const bench_options *options, bench_arena **arena);
void bench_arena_free(bench_arena *arena);
/* Collective. Fills *row on rank 0. */
tutti_status bench_measure(bench_arena *arena, const bench_options *options, const bench_operation *operation,
                           size_t bytes, bench_row *row);

/* Bandwidths from the median. */
void bench_bandwidth(const bench_operation *operation, bench_row *row);
/* Puts the values in order. */
double bench_median(double *values, long count);
size_t bench_next_size(const bench_options *options, size_t bytes);

/* How far it is: a line that changes on a terminal, else one every ten seconds, on standard error. */
typedef struct bench_meter {
    int64_t begin_ns, shown_ns;
    long done, total;
} bench_meter;
void bench_progress(bench_meter *meter, long done, long total, const char *text);
void bench_progress_done(void);

/* Finds the best algorithm for each operation and size and writes the table to options->tune: bench_tune.c. */
tutti_status bench_tune(tutti_world *world, const bench_options *options);

/* ---- reporting: bench_report.c, bench_plot.c ---- */

void bench_report_head(FILE *file, const bench_job *job, int ranks, const char *launcher);
void bench_report_row(FILE *file, const bench_row *row, bool first_of_operation);
void bench_report_json(FILE *file, const bench_job *job);
void bench_report_csv(FILE *file, const bench_results *results);
/* Flags the rows that seem slower than the baseline; returns how many. None when the file cannot be read: the report
 * says so. */
int bench_suspects(const bench_job *job, uint8_t *flags);
/* Returns 0, 1 when a row is slower or nothing could be compared; says so on standard error. */
int bench_report_baseline(const bench_job *job);
/* Returns 0, or 1 when the file cannot be written. */
int bench_plot(const bench_job *job);

/* "name: processor, 2 CPUs, load 0.3 before" */
void bench_machine_text(const bench_results *results, char *text, size_t room);

/* "64 KiB" */
void bench_bytes_text(size_t bytes, char *text, size_t room);

#endif
