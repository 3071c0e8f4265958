/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools: symmetric blocks that are used again. For programs that allocate and free the same sizes over and over.
 *
 * A block from a pool is a tutti_memory like any other. When its last reference ends it goes back to the pool; the next
 * allocation of that byte size gets it, at the same address, with its data as they were and a clean signal pad. One
 * allocation is one block: a pool never splits them, because every block has a pad of its own. Memory of a pool serves
 * only that pool.
 *
 * Rendezvous of a used block is quick when the same blocks meet again: two small exchanges that prove it, and no
 * mapping.
 *
 * Safe from any thread.
 */
#ifndef TUTTI_POOL_H
#define TUTTI_POOL_H

#include <tutti/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tutti_pool tutti_pool;

/* The options are those of its blocks; persistent ids are refused. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_pool_new(tutti_world *world, const tutti_memory_options *options,
                                                    tutti_pool **pool);

/* A used block of exactly this size if there is one, the last freed first, else a new one. The data of a used block are
 * what they were. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_pool_alloc(tutti_pool *pool, size_t bytes, tutti_memory **memory);

/* Where its blocks are: TUTTI_CPU, TUTTI_CUDA_AT(i), or TUTTI_CUDA where that is found out by each allocation; 0 of
 * NULL.
 */
TUTTI_API tutti_device tutti_pool_device(const tutti_pool *pool);

/* Gives the unused blocks back to the system. */
TUTTI_API void tutti_pool_trim(tutti_pool *pool);

typedef struct tutti_pool_statistics {
    size_t size;
    size_t used_blocks, used_bytes; /* given out */
    size_t idle_blocks, idle_bytes; /* kept for the next allocation */
    size_t reused;                  /* allocations served by a used block so far */
} tutti_pool_statistics;
#define TUTTI_POOL_STATISTICS_INIT TUTTI_DEFAULTS(tutti_pool_statistics)
/* TUTTI_POOL_STATISTICS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_pool_statistics_init(tutti_pool_statistics *pool_statistics, size_t size);
/* What the pool holds now, and how often it served a used block. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_pool_query(tutti_pool *pool, tutti_pool_statistics *statistics);

/* Another reference to the pool. */
TUTTI_API tutti_pool *tutti_pool_keep(tutti_pool *pool);
/* Ends one reference, and with the last one the pool. Blocks that are given out live on and go to the system with their
 * last reference. NULL is allowed. */
TUTTI_API void tutti_pool_release(tutti_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
