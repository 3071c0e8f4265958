/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled backwards: a backward that is captured once, hooks and all, and from then on runs as a graph.
 *
 *     tt_backward_cache *cache;
 *     tt_backward_cache_new(NULL, &cache);
 *     for (int i = 0; i < steps; i++) {
 *         tt_tensor *loss = forward(…);
 *         tt_backward_compiled_begin(cache);
 *         tt_backward(loss, NULL);
 *         tt_backward_compiled_end();
 *     }
 *     tt_backward_cache_release(&cache);
 *
 * A backward looks for a graph that was captured from one like it: the same nodes with the same attributes and sizes in
 * the same order, the same hooks, leaves that have a gradient and leaves that have none. Where there is none, the
 * backward is traced: each node's gradient, and the bodies of the hooks in the engine's order, become vertices. So two
 * graphs serve a training loop that keeps its gradients: one for the first step, which sets them, one for all others.
 *
 * What changes from step to step is a tensor: what nodes saved, leaves and their gradients, what modules' slots hold,
 * and the tensors that a hook was registered with (tt_hook_options.captured). Hooks of every kind run on the host while
 * they are traced, and not when the graph runs: numbers that they compute there, and other tensors that they meet, are
 * frozen, as tt_capture tells. A tensor of the latter kind is read and written at each run, so a hook can count in one.
 * A user pointer of a hook or function stands for what it points to: it must stay valid and mean the same while the
 * cache lives.
 *
 * Backwards that collect for certain inputs only (tt_gradients), create a graph, keep the gradient of a computed tensor
 * or call an opaque hook run as ever; so do those that cannot be captured, unless `full` makes that an error.
 */
#ifndef TUTTI_BACKWARD_H
#define TUTTI_BACKWARD_H

#include <tutti/autograd.h>
#include <tutti/graph.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TT_BACKWARD_ENTRIES 8 /* graphs of one cache; backwards that fit none of them run as ever then */

typedef struct tt_backward_cache_options {
    size_t size;
    bool full; /* what cannot be captured is an error; else it runs as ever */
} tt_backward_cache_options;
#define TT_BACKWARD_CACHE_OPTIONS_INIT TUTTI_DEFAULTS(tt_backward_cache_options)
/* TT_BACKWARD_CACHE_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_backward_cache_options_init(tt_backward_cache_options *options, size_t size);

/* Graphs of backwards. One thread uses it at a time. */
typedef struct tt_backward_cache tt_backward_cache;
/* Makes one, empty; it is the caller's, and ends with tt_backward_cache_release. */
TUTTI_API bool tt_backward_cache_new(const tt_backward_cache_options *options, tt_backward_cache **cache);
/* Ends it and sets *cache to NULL. Inside a region that uses it this is TUTTI_ERROR_STATE, and nothing happens. */
TUTTI_API void tt_backward_cache_release(tt_backward_cache **cache);

/* From here to the matching end, backwards of this thread run by the cache. Regions nest, and the innermost counts. */
TUTTI_API bool tt_backward_compiled_begin(tt_backward_cache *cache);
/* Ends the innermost region of this thread, also with an error pending; TUTTI_ERROR_STATE where there is none. */
TUTTI_API bool tt_backward_compiled_end(void);

/* ---- looking ---- */

/* Why a backward found no graph. Values are written out and never reused. */
typedef enum tt_backward_miss {
    TT_BACKWARD_MISS_FIRST = 0,     /* there was none */
    TT_BACKWARD_MISS_NODES = 1,     /* other nodes, attributes or order */
    TT_BACKWARD_MISS_HOOKS = 2,     /* other hooks */
    TT_BACKWARD_MISS_SIZES = 3,     /* dtype, device, sizes, strides or sharing of a tensor */
    TT_BACKWARD_MISS_GRADIENTS = 4, /* a gradient where there was none, or none where there was one */
    TT_BACKWARD_MISS_KINDS = 5
} tt_backward_miss;

typedef struct tt_backward_counts {
    size_t size;
    int captures;                       /* backwards that were traced */
    int vertices;                       /* of all graphs, as they run */
    int eager;                          /* backwards that ran as ever */
    int64_t hits;                       /* backwards that found a graph */
    int misses[TT_BACKWARD_MISS_KINDS]; /* that found none, by how they differ from the one before */
} tt_backward_counts;
#define TT_BACKWARD_COUNTS_INIT TUTTI_DEFAULTS(tt_backward_counts)
/* TT_BACKWARD_COUNTS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_backward_counts_init(tt_backward_counts *counts, size_t size);
/* How often what happened. */
TUTTI_API bool tt_backward_cache_count(const tt_backward_cache *cache, tt_backward_counts *counts);
/* The graph of the backward that ran last by the cache, as it runs; lent until the next one. NULL: there is none. */
TUTTI_API const tt_graph *tt_backward_cache_graph(const tt_backward_cache *cache);
/* Why the last backward that ran as ever did so, in words; "" where none did. Lent until the next one. */
TUTTI_API const char *tt_backward_cache_reason(const tt_backward_cache *cache);

#ifdef __cplusplus
}
#endif

#endif
