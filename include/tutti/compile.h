/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiling: a function of tensors that is captured once, made ready, and from then on runs as that.
 *
 *     static int step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
 *         outputs[0] = tt_mean(tt_square(tt_module_call(user, inputs.at[0])));
 *         return 1;
 *     }
 *
 *     tt_compiled *fast;
 *     tt_compile(step, module, NULL, &fast);
 *     for (int i = 0; i < steps; i++) {
 *         tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));      (the first call captures and builds)
 *         tt_backward(results.at[0], NULL);                                    (compiled too)
 *     }
 *     tt_compiled_release(&fast);
 *
 * What changes from call to call is a tensor: one of `inputs`, or what a module's slot holds. Every other number and
 * tensor that the function meets is frozen, as tt_capture tells. An entry is what one capture gave, with guards: dtype,
 * device, sizes, strides and requires_grad of inputs, which of them share memory, gradient mode, gradients and storage
 * sizes that the function asked for, and the hooks, slots and training flags of the modules that it calls. A call runs
 * the entry whose guards hold; where none does, it captures anew and keeps that too, up to TT_COMPILE_ENTRIES. A size
 * that changes is variable after the second capture, where the function itself never asks for sizes (tt_size …).
 *
 * Gradients are compiled with the function: its results get one node, whose backward is a graph of its own. Hooks on
 * tensors inside the function are part of that graph and run on the host during the capture only; hooks on its inputs
 * run as ever. Nobody can differentiate a compiled backward once more.
 *
 * With `replay` a call on a GPU is noted as a CUDA graph after two calls as ever, and runs as that from then on, on the
 * stream that it was noted for. Arguments are copied into places of the graph, results out of it; other tensors must
 * lie where they lay, or it is noted anew. Whole training steps may be replayed, with random numbers, collectives,
 * optimizers and gradients: what the host does at each call is done again before each run. What cannot be noted
 * (results that require grad or share memory, storages that are resized, operators that mix CPU and GPU) runs as ever,
 * with one warning that says why; with `full` it is TUTTI_ERROR_CAPTURE.
 *
 * What cannot be captured (a function that reads elements on the host, say) runs as it is, once with a warning that
 * says why; with `full` it is an error. Ranks that share a group agree on its collectives before an entry first runs.
 */
#ifndef TUTTI_COMPILE_H
#define TUTTI_COMPILE_H

#include <tutti/graph.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TT_COMPILE_ENTRIES 8 /* of one compiled function */

/* How far a graph is taken. Values are written out and never reused. */
typedef enum tt_compile_mode {
    TT_COMPILE_FUSED = 0,    /* passes, then loops in which neighbouring operators run together */
    TT_COMPILE_SPLIT = 1,    /* passes, then one operator after the other */
    TT_COMPILE_INTERPRET = 2 /* the graphs as they were captured, one operator after the other */
} tt_compile_mode;

typedef struct tt_compile_options {
    size_t size;
    tt_compile_mode mode;
    bool full;        /* what cannot be compiled is an error; else the function itself runs in its place */
    bool strict;      /* the very bits of the function itself */
    int dynamic;      /* 0: a size that changes becomes variable; TUTTI_NONE: every size has an entry of its own */
    const char *skip; /* names of passes to leave out, separated by commas, without limits; NULL: none */
    const char *with; /* names of passes that run only where they are asked for, "one_shot=65536"; NULL: none */
    const char *name; /* in messages and names of files; NULL: "function" */
    bool replay;      /* on a GPU: from the third call on as a CUDA graph, one launch for all of it; see above */
} tt_compile_options;
#define TT_COMPILE_OPTIONS_INIT TUTTI_DEFAULTS(tt_compile_options)
/* TT_COMPILE_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_compile_options_init(tt_compile_options *options, size_t size);

typedef struct tt_compiled tt_compiled;

/* Makes a compiled function; nothing is captured yet. It may be called from several threads at once. Ranks that are
 * threads make one each where it has collectives: a call by another rank is TUTTI_ERROR_STATE. `user` must stay valid
 * until tt_compiled_release. An error while a function is captured. */
TUTTI_API bool tt_compile(tt_compile_function *function, void *user, const tt_compile_options *options,
                          tt_compiled **compiled);
/* Calls it; results belong to the scope, and entries may be NULL. While another function is captured, it becomes part
 * of that one. One that calls itself is TUTTI_ERROR_STATE. */
TUTTI_API tt_tensor_list tt_compiled_call(tt_compiled *compiled, tt_tensor_list inputs);
/* Ends it and sets *compiled to NULL. What it returned stays, and its backwards still run. */
TUTTI_API void tt_compiled_release(tt_compiled **compiled);

/* ---- looking ---- */

typedef enum tt_direction {
    TT_FORWARD = 1,
    TT_BACKWARD = 2
} tt_direction;
/* A graph of the entry that ran last, as it is run; lent until the next call. NULL, and no error, where there is none.
 */
TUTTI_API const tt_graph *tt_compiled_graph(const tt_compiled *compiled, tt_direction direction);

/* Why a call could not use an entry. Values are written out and never reused. */
typedef enum tt_miss {
    TT_MISS_FIRST = 0,         /* there was none */
    TT_MISS_COUNT = 1,         /* another number of inputs */
    TT_MISS_DTYPE = 2,         /* of an input, or its device */
    TT_MISS_SIZES = 3,         /* of an input, or its strides */
    TT_MISS_REQUIRES_GRAD = 4, /* of an input, or whether it is a parameter, or was computed */
    TT_MISS_SHARING = 5,       /* which inputs share memory, or are one */
    TT_MISS_MODE = 6,          /* gradient mode */
    TT_MISS_GRADIENT = 7,      /* there is a gradient where there was none, or none where there was one */
    TT_MISS_STORAGE = 8,       /* the size of a storage that the function asked for or changes */
    TT_MISS_HOOKS = 9,         /* of a leaf that the function differentiates */
    TT_MISS_MODULE = 10,       /* hooks, slots, children or the training flag of a module */
    TT_MISS_KINDS = 11
} tt_miss;

typedef struct tt_compiled_counts {
    size_t size;
    int captures;              /* of the function */
    int entries;               /* that captures gave, that are kept, and that run what was compiled */
    int variants;              /* of them, for other sizes: made without a capture where that is possible */
    int vertices;              /* of all graphs that were built, forward and backward */
    int eager;                 /* calls that ran the function itself */
    int64_t hits;              /* calls that found what they needed */
    int misses[TT_MISS_KINDS]; /* calls that did not, by the first guard that failed of what ran last */
    int64_t replays;           /* calls of entries that are kept which ran as a CUDA graph */
} tt_compiled_counts;
#define TT_COMPILED_COUNTS_INIT TUTTI_DEFAULTS(tt_compiled_counts)
/* TT_COMPILED_COUNTS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_compiled_counts_init(tt_compiled_counts *counts, size_t size);
/* How often what happened; also while an error is pending. */
TUTTI_API bool tt_compiled_count(const tt_compiled *compiled, tt_compiled_counts *counts);
/* Why the last call that found no entry found none, why it ran the function itself, or how its capture failed, in
 * words; "" where none of these happened. Lent until the next call. */
TUTTI_API const char *tt_compiled_reason(const tt_compiled *compiled);

#ifdef __cplusplus
}
#endif

#endif
