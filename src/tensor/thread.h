/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tensor library keeps per thread: open scopes and what they own, the pending error, spare memory, the random
 * generator, the gradient mode. All of it goes when the thread ends.
 */
#ifndef TU_TENSOR_THREAD_H
#define TU_TENSOR_THREAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/tensor.h>

#include "base/error.h"
#include "base/thread.h"

#define TU_BINS 88 /* classes of spare blocks, see block.c */

/* The head of what a room above keeps in a stack of this thread: freed when the thread ends. */
typedef struct tu_kept {
    struct tu_kept *outer;
} tu_kept;

typedef struct tu_scope_mark {
    uint64_t id;
    size_t first; /* index in `owned` of the scope's first tensor */
    void *memory; /* chain of blocks of tu_scope_memory */
} tu_scope_mark;

/* Where the storages that a thread makes on the CPU get their memory, instead of the thread's spare blocks. */
typedef struct tu_source {
    /* A storage of at least one byte; NULL with the error written. */
    struct tu_storage *(*make)(struct tu_source *source, size_t bytes);
    void (*end)(struct tu_source *source); /* the thread ends without having ended it */
    struct tu_source *outer;
    int device; /* whose storages it makes: TUTTI_CPU, TUTTI_CUDA_AT(i) */
} tu_source;

/* A part of the program that messages name: the path of a module. Counted, since what refers to it outlives the call.
 */
typedef struct tu_place {
    atomic_int references;
    char text[];
} tu_place;
tu_place *tu_place_new(const char *text); /* NULL with the thread's error written */
void tu_place_drop(tu_place *place);
static inline tu_place *tu_place_hold(tu_place *place) {
    if (place != NULL)
        atomic_fetch_add_explicit(&place->references, 1, memory_order_relaxed);
    return place;
}

typedef struct tu_thread {
    tutti_status pending;
    bool grad_disabled;
    bool tf32;       /* products of f32 on GPUs may be rounded: see tutti/streams.h */
    bool anomaly;    /* results that hold a NaN are errors: see anomaly.c */
    bool registered; /* in the list that tt_count walks, and with a destructor at thread exit */
    int scope_count, scope_capacity;
    tu_scope_mark *scopes;
    tt_tensor **owned;
    size_t owned_count, owned_capacity;

    struct tu_handle_chunk *handles; /* that this thread fills: see handle.h */
    char *next_handle, *last_handle; /* in it */
    struct tu_storage *spare_storages;
    int spare_storage_count;
    struct tu_block **bins; /* TU_BINS chains of spare blocks; not in here, so that the library can be loaded late */
    size_t spare_bytes;

    uint64_t seed, counter; /* of the random generator: key and position */
    uint32_t seed_rank;
    struct tu_tape *tape; /* of random states, innermost: see tape.h */

    uint64_t node_sequence; /* creation number of the next autograd node */
    void *dead_nodes;       /* autograd's nodes that are to be freed, while one is */
    bool freeing_nodes;
    void *backward;                    /* autograd's running backward, innermost */
    uint64_t backwards;                /* that began in it, those inside others not counted */
    void *backward_runner;             /* autograd's: who is asked to run a backward, or NULL */
    const void *compiled_bodies;       /* functions of compile/ whose bodies run in this thread, the innermost first */
    void *saved_hooks;                 /* autograd's pack and unpack hooks, innermost */
    struct tu_step_batch *steps;       /* of an optimizer, open: see step.h */
    struct tu_call_recorder *recorder; /* is asked about every operator; see tensor/operator.h */
    struct tu_epilogue *epilogue;      /* for the product that runs next: see gemm.h */
    struct tu_source *source;          /* of memory for storages, innermost; NULL: spare blocks */
    tu_place *place;                   /* where the program is, in words, for messages; lent by the module called */

    uint64_t last_scope;       /* number of the scope opened last */
    struct tutti_batch *batch; /* of collectives, that is open in this thread */
    void *batch_flight;        /* what it writes and reads: see functional/registry.c */
    tu_kept *symmetric_tests;  /* test modes of symmetric memory, innermost: see functional/symmetric.c */
    struct tu_noted *noting;   /* what the host does before each run of a step that is noted: see noting.h */
    void **streams;            /* current ones, by number of the device; NULL: the default ones */
    int default_device;        /* where tensors are made that name none; 0: the CPU */
    void *engine;              /* of oneDNN: cheap to make, but not free */

    /* Written by this thread alone, read by tt_count from any: relaxed. A thread may release what another made, so one
     * thread's figure can be below zero; their sum is exact. */
    _Atomic int64_t tensors, storages, open_scopes, nodes;
    struct tu_thread *next, **link;
} tu_thread;

extern _Thread_local tu_thread tu_thread_self;

/* Its texts, which are too many bytes for a thread-local variable of this library: see tu_thread_spare. */
typedef struct tu_thread_texts {
    tutti_error_copy pending;
    char text[4][256]; /* see tu_dims_text */
    unsigned next;
} tu_thread_texts;
_Static_assert(sizeof(tu_thread_texts) <= TU_THREAD_SPARE, "the texts must fit");

static inline tu_thread_texts *tu_texts(void) {
    return tu_thread_spare();
}

static inline tu_thread *tu_self(void) {
    return &tu_thread_self;
}

/* Makes the thread known (once); an error only where memory or keys have run out. */
tutti_status tu_thread_register(void);

/* At the thread's end: closes its scopes and frees what it keeps. */
void tu_thread_end(tu_thread *self);

/* Puts what a thread that nobody lists has counted on the process's books. */
void tu_process_collect(tu_thread *self);

/* `tally` is one of self's, the calling thread's. */
static inline void tu_tally(tu_thread *self, _Atomic int64_t *tally, int64_t change) {
    atomic_store_explicit(tally, atomic_load_explicit(tally, memory_order_relaxed) + change, memory_order_relaxed);
    if (!self->registered) /* it only releases what others made, say */
        tu_process_collect(self);
}

/* ---- the pending error ---- */

/* Makes the thread's last error (already written with tu_error) the pending one, unless there is one. Returns its
 * status. */
tutti_status tu_pending_take(tutti_status status);
/* tu_error and tu_pending_take in one. */
tutti_status tu_fail(tutti_status status, const char *format, ...) TUTTI_PRINTF(2, 3);

/* Setting the pending error aside and putting it back: for code that must run all the same. */
typedef struct tu_pending_copy {
    tutti_status status;
    tutti_error_copy error;
} tu_pending_copy;
void tu_pending_save(tu_pending_copy *copy); /* and clears it */
void tu_pending_restore(const tu_pending_copy *copy);

/* ---- scopes ---- */

/* Gives one reference to the innermost scope and returns `tensor`; without one, or without memory, releases it, sets
 * the pending error and returns NULL. */
tt_tensor *tu_scope_own(tt_tensor *tensor);
/* Whether a scope is open; else sets the pending error that says so. */
bool tu_scope_check(void);
/* Memory that goes with the innermost scope; NULL with the pending error set. */
void *tu_scope_memory(size_t bytes);
/* Closes a scope opened by the library itself and leaves the pending error pending. */
void tu_scope_leave(tt_scope *scope);

/* ---- spare memory (block.c) ---- */
void *tu_block_alloc(tu_thread *self, size_t bytes); /* 64-byte aligned; NULL when there is none */
void tu_block_free(tu_thread *self, void *data, size_t bytes);
void tu_block_trim(tu_thread *self); /* frees what the thread itself keeps; large blocks are everybody's */
void tu_storage_trim(tu_thread *self);

#endif
