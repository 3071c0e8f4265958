/* SPDX-License-Identifier: Apache-2.0
 *
 * Large blocks of memory for tensors: cut from segments that all threads of the process share. See large.c.
 */
#ifndef TU_TENSOR_LARGE_H
#define TU_TENSOR_LARGE_H

#include <pthread.h>
#include <stddef.h>

/* Blocks of so many bytes and more are large. Those that are not are reused for their own class of sizes alone; cut
 * parameters, their gradients and what an optimizer remembers are often between half and one MiB, each at another time
 * of a step. */
#define TU_LARGE_BYTES ((size_t)1 << 19)

/* A part of the process's object: see process.h. */
typedef struct tu_large {
    pthread_mutex_t lock;
    struct tu_segment **at; /* by age */
    size_t count, capacity;
    size_t spare_units; /* of all segments */
} tu_large;

void *tu_large_alloc(size_t bytes); /* 64 KiB aligned; NULL when there is none */
/* `bytes` is what it was asked for with. Any thread may free it. */
void tu_large_free(void *data, size_t bytes);
/* Gives what no block uses back to the system. */
void tu_large_trim(void);

#endif
