/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs: a graph made ready to run many times. Its operators become steps; neighbours that walk the same elements
 * are one step, a loop, which reads its inputs once, keeps what lies between in the cache, and writes its results once.
 * Everything else (products of matrices, collectives, effects) is called as the operator that it is, with its checks,
 * deadlines and records.
 *
 *     tu_program *program;
 *     tutti_status status = tu_program_make(graph, &(tu_program_options){ .name = "step" }, &program);
 *     status = tu_program_run(program, inputs, outputs);
 *     tu_program_release(program);
 *
 * A program computes the very bits that the operators compute one by one.
 */
#ifndef TU_LOOPS_PROGRAM_H
#define TU_LOOPS_PROGRAM_H

#include "graph/graph.h"

typedef enum tu_program_mode {
    TU_PROGRAM_FUSED,    /* operators together in loops */
    TU_PROGRAM_SPLIT,    /* one loop for each operator that can be one */
    TU_PROGRAM_INTERPRET /* no loops: vertex by vertex, as tu_graph_interpret */
} tu_program_mode;

typedef struct tu_program_options {
    tu_program_mode mode;
    bool strict;      /* for those who compare it with calls: every bit counts. It runs alike either way */
    bool no_compiler; /* loops are run in blocks by the library's own kernels, without a compiler and without a word */
    const char *name; /* of the files below, and in messages; NULL: "program" */
    /* A folder for the text of the loops, the code and the plan of the memory: <name>.loops, <name>.c, <name>.plan.
     * NULL or "": none is written. It must exist; see tu_look_open for what cannot be written there. */
    const char *folder;
} tu_program_options;

typedef struct tu_program tu_program;

/* Holds the graph, which must not change any more. Options may be NULL. Nothing is kept of them. */
tutti_status tu_program_make(const tt_graph *graph, const tu_program_options *options, tu_program **program);

/* Runs it on real tensors, without recording gradients. `inputs` has one per input of the graph, each as
 * tu_graph_gather has checked it; what goes to `outputs` is held by the caller. Several threads may run one program at
 * once. */
tutti_status tu_program_run(tu_program *program, tt_tensor *const *inputs, tt_tensor **outputs);

void tu_program_release(tu_program *program);

/* A file for those who look inside. What cannot be written is no reason not to run: one warning tells of the first, and
 * opening gives NULL. Closing takes NULL too. */
FILE *tu_look_open(const char *path);
void tu_look_close(FILE *file, const char *path);

/* What it is made of, for people and tests. */
typedef struct tu_program_counts {
    int calls, loops; /* steps: operators that are called, and loops */
    int fused;        /* vertices in loops */
    int epilogues;    /* loops that run behind products, part by part */
    int compiled;     /* loops of which at least a part was compiled */
} tu_program_counts;
tu_program_counts tu_program_count(const tu_program *program);
/* Its steps, one after the other: calls as the graph has them, loops with their lines. */
void tu_program_print(FILE *to, const tu_program *program);

#endif
