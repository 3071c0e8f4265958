/* SPDX-License-Identifier: Apache-2.0
 *
 * The threads that compute: one pool per process, which serves the collectives of all worlds and the loops of
 * libtutti-tensor. It is made on first need, obeys TUTTI_THREADS and the CPU set of the process, is made anew in a
 * forked child, and ends with its last user.
 *
 *     tu_pool_hold();
 *     tu_pool_run(&(tu_pool_loop){ .body = add, .context = &vectors, .count = n, .grain = 4096, .threads = 4 });
 *     tu_pool_release();
 */
#ifndef TU_BASE_POOL_H
#define TU_BASE_POOL_H

#include <stdint.h>

#include "base/error.h"

/* Works on the items from begin to end - 1. Several threads call it at once, for different items. */
typedef void tu_pool_body(void *context, int64_t begin, int64_t end);

typedef struct tu_pool_loop {
    tu_pool_body *body;
    void *context;
    int64_t count; /* items */
    int64_t grain; /* the fewest items that are worth a thread; 0: 1 */
    int threads;   /* at most, the caller's own included */
} tu_pool_loop;

/* Runs the loop and returns when all items are done. The caller works along; it works alone where a loop is short,
 * where no thread is free, and inside the body of another loop. */
TU_SHARED void tu_pool_run(const tu_pool_loop *loop);

/* The pool lives from the first hold to the last release, which waits for its threads. */
TU_SHARED void tu_pool_hold(void);
TU_SHARED void tu_pool_release(void);

/* How many threads one rank of the process may compute with besides the caller's: TUTTI_THREADS where it is set, else
 * its share of the CPUs that the process may run on, less one. */
TU_SHARED int tu_pool_limit(void);
/* A world says how many CPUs are a rank's share, until it ends; of several worlds the least counts. */
TU_SHARED void tu_pool_share(int cpus);
TU_SHARED void tu_pool_unshare(void);
/* That number; INT_MAX where nobody said one. */
TU_SHARED int tu_pool_shared(void);
/* How many worlds say so: more than one where ranks are threads of this process. */
TU_SHARED int tu_pool_worlds(void);

/* Threads that are started now. */
TU_SHARED int tu_pool_threads(void);

#endif
