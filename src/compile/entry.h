/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions inside. An entry is one capture made ready to run: guards that say when it may, the graphs of its
 * forward and backward, and their programs.
 */
#ifndef TU_COMPILE_ENTRY_H
#define TU_COMPILE_ENTRY_H

#include <pthread.h>
#include <stdatomic.h>

#include <tutti/compile.h>

#include "graph/capture.h"
#include "loops/program.h"

/* ---- guards (guard.c) ---- */

/* What an input must be. */
typedef struct tu_guard {
    tu_input_kind kind;
    int index;         /* of an argument: its place; of a gradient: whose it is */
    tt_tensor *tensor; /* of a constant; lent by the captured graph */
    const tu_holder *holder;
    uint16_t device;
    uint8_t dtype, dim_count, flags; /* TU_REQUIRES_GRAD and TU_IS_PARAMETER */
    bool has_node, asks_gradient, has_gradient, asks_bytes;
    bool row_major;      /* it lay row by row */
    bool is_short;       /* its storage had fewer bytes than it needs */
    int storage;         /* number: inputs with one number share memory */
    uint32_t hooks;      /* changes of its hooks, where the function runs a backward */
    int64_t offset;      /* -1: does not matter */
    size_t bytes;        /* of the storage, where the function depends on it */
    const int64_t *dims; /* sizes, then strides */
} tu_guard;

typedef struct tu_guards {
    bool grad_mode, inner_backward;
    int position_count; /* inputs of a call */
    int *first;         /* of each position: the first with the same tensor */
    int count;
    tu_guard *list; /* one per input of the forward */
    int64_t *dims;
    int table_size;    /* a power of two: room to look for storages */
    int storage_count; /* numbers are below it */
    int witness_count;
    tu_witness *witnesses; /* kept */
    uint64_t *stamps;
} tu_guards;

/* From a capture, whose graph must outlive them, and the tensors of its inputs. Takes the witnesses over. */
tutti_status tu_guards_make(tu_guards *guards, tu_captured *captured, int position_count, const int *first,
                            tt_tensor *const *inputs);
/* For a call that could not be captured: what is known of its arguments, and what the function looked at until then,
 * whose witnesses it takes over. */
tutti_status tu_guards_of_arguments(tu_guards *guards, tu_captured *captured, tt_tensor_list arguments,
                                    const int *first);
void tu_guards_end(tu_guards *guards);

/* Whether they hold for these arguments. Then `inputs` has the tensor of each input, held; else *miss tells why not,
 * and `words`, where it is not NULL, says so. */
bool tu_guards_hold(const tu_guards *guards, tt_tensor_list arguments, tt_tensor **inputs, tt_miss *miss, char *words,
                    size_t size);

/* The same, but for the sizes of arguments that lie row by row, now and before. */
bool tu_guards_hold_but_sizes(const tu_guards *guards, tt_tensor_list arguments, tt_tensor **inputs);

/* ---- sizes that change (dynamic.c) ---- */

typedef struct tu_pattern tu_pattern;
struct tu_entry;

/* A pattern, where a second capture differs from the first, whose guards these are, in one size alone and in what
 * follows from it; else NULL. `inputs` are the tensors of the second. */
tutti_status tu_pattern_find(const tu_guards *guards, const tu_captured *before, const tu_captured *after,
                             tt_tensor *const *inputs, tu_pattern **made);
/* The size that these inputs have in its place; 0: they do not fit. `guards` are those of the entry with the pattern.
 */
int64_t tu_pattern_size(const tu_pattern *pattern, const tu_guards *guards, tt_tensor *const *inputs);
/* The capture that the function would give with that size. */
tutti_status tu_pattern_apply(const char *who, const tu_pattern *pattern, const struct tu_entry *entry,
                              tt_tensor *const *inputs, int64_t size, tu_captured *made);
void tu_pattern_end(tu_pattern *pattern);

/* ---- entries (entry.c) ---- */

/* Where a backward's input comes from. */
typedef enum tu_source_kind {
    TU_FROM_INPUT,  /* of the forward */
    TU_FROM_OUTPUT, /* of the forward's graph, behind the results */
    TU_FROM_TANGENT,
    TU_FROM_ITSELF /* a constant, a slot or a gradient, at the time of the backward */
} tu_source_kind;

typedef struct tu_backward_source {
    tu_source_kind kind;
    int index;
} tu_backward_source;

typedef struct tu_recipe {
    const char *name; /* of the function */
    tt_compile_mode mode;
    bool strict;
    const char *skip;   /* passes to leave out; NULL: none */
    const char *with;   /* passes that run only where somebody asks for them; NULL: none */
    const char *folder; /* for files; NULL: none */
    int rank;           /* in the names of files; -1: none */
    bool compares;      /* every run with eager code */
    bool no_compiler;   /* loops run in blocks: what is built for one size may not pay */
    int number;         /* of the entry */
    int twin;           /* of the functions of this name that leave files, in their names from 2 on; 0: leaves none */
} tu_recipe;

/* A backward for which some results got no gradient. */
typedef struct tu_partial {
    struct tu_partial *next;
    tt_graph *graph;
    tu_program *program;
    bool arrived[]; /* one per tangent */
} tu_partial;

typedef struct tu_replay tu_replay;

typedef struct tu_entry {
    atomic_int references; /* the function's, one per call under way, one per node */
    struct tu_entry *next;
    char *why_eager; /* NULL: it is compiled */
    tu_guards guards;
    tu_captured captured;
    tt_graph *forward, *backward; /* as they are run; backward NULL: there is none */
    tu_program *run_forward, *run_backward;
    int source_count;
    tu_backward_source *sources;                              /* one per input of the backward that the split made */
    tu_replay *replay;                                        /* NULL: every call runs as ever */
    atomic_llong replays;                                     /* calls that ran as a graph of the device */
    struct tu_comparison *compare_forward, *compare_backward; /* with eager, at each call; or NULL */
    tu_pattern *pattern;                                      /* for other sizes; or NULL */
    bool is_variant;                                          /* it was made from a pattern */
    tu_recipe how;            /* it was built; its strings are owned, see tu_entry_drop */
    tt_graph *whole_backward; /* before its passes, where there are several results; else NULL */
    pthread_mutex_t lock;     /* of `partials` */
    tu_partial *partials;
    char name[64];
} tu_entry;

tu_entry *tu_entry_hold(tu_entry *entry);
void tu_entry_drop(tu_entry *entry);

/* ---- the way from a capture to programs ---- */

/* Cuts the captured graph in two: what the forward computes and saves, and the backward (partition.c). */
tutti_status tu_partition(tu_entry *entry, bool recompute);
/* An error where a list of passes names one that there is not, or has limits that cannot be, or `limits` is false and
 * there are some (build.c). */
tutti_status tu_check_passes(const char *field, bool limits, const char *list);
/* Passes, then programs (build.c). */
tutti_status tu_build_entry(tu_entry *entry, const tu_recipe *how);
/* What the environment says of files and comparisons; and who is asked to keep them apart. *twin is the function's own
 * number among those of its name, 0 until it leaves files (build.c). */
void tu_recipe_look_around(tu_recipe *how, int *twin);
/* One graph of its own: passes, then its program (build.c). */
tutti_status tu_build_graph(tt_graph *graph, const tu_recipe *how, const char *direction, tu_program **program);
/* The backward without what depends on absent gradients alone (prune.c), and its program (build.c). */
tutti_status tu_prune(const tu_entry *entry, const bool *arrived, tt_graph **made);
tutti_status tu_build_partial(tu_entry *entry, const bool *arrived, tu_partial **made);
/* Runs the graph of that direction; what goes to `outputs` is held by the caller (run.c). */
tutti_status tu_entry_compute(tu_entry *entry, tt_direction direction, tt_tensor *const *inputs, tt_tensor **outputs);
/* Runs an entry on its inputs; results belong to the scope (run.c). */
tutti_status tu_entry_run(tu_entry *entry, tt_tensor *const *inputs, tt_tensor **results);

/* ---- replay as a graph of the device (replay.c) ---- */

/* Makes the entry ready for it. What cannot be replayed is an error with `full`, else a warning. */
tutti_status tu_replay_make(tu_entry *entry, bool full);
void tu_replay_end(tu_replay *replay);
/* Runs the forward so, where that is possible now: *ran tells. */
tutti_status tu_replay_try(tu_entry *entry, tt_tensor *const *inputs, tt_tensor **outputs, bool *ran);

/* ---- agreement (agree.c) ---- */

/* Schedules on which the ranks of groups have agreed. */
typedef struct tu_agreed {
    struct tu_agreed *next;
    tutti_group *group; /* compared only */
    uint64_t hash;
} tu_agreed;

typedef enum tu_vote {
    TU_VOTE_READY = 1, /* built, and ready to run */
    TU_VOTE_EAGER = 2, /* runs the function itself */
    TU_VOTE_FAILED = 3
} tu_vote;

/* Ranks of each group in the graph tell each other what they are about to do, unless they agreed on this very schedule
 * before. OK where all do the same; else the error says which collective differs, or, of a rank that does not run what
 * it compiled, why: `why`, "" where the vote is to run it. */
tutti_status tu_agree(const char *name, const tt_graph *graph, tu_vote vote, const char *why, tu_agreed **agreed);
void tu_agreed_end(tu_agreed *agreed);

#endif
