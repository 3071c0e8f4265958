/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools: released blocks wait here, by size, the last one first, and are given out again.
 *
 * An idle block keeps its reference and its cached handles, which are no longer proven: the next rendezvous compares
 * serial numbers before it trusts them.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/result.h"
#include "memory/tables.h"

/* Idle blocks of one size. Made when that size is first asked for, so that taking a block back cannot fail. */
typedef struct size_class {
    tutti_memory *first; /* linked by next_idle */
} size_class;

struct tutti_pool {
    tutti_world *world;
    tu_memory_world *tables;
    tutti_memory_options options; /* options.group is a reference */
    pthread_mutex_t lock;         /* everything below */
    uint32_t users;               /* references of the program; at 0 the pool takes nothing back */
    uint32_t references;          /* one for all users together, one per block given out */
    tu_order classes;             /* by size */
    tutti_pool_statistics statistics;
};

tutti_status tutti_pool_new(tutti_world *world, const tutti_memory_options *options, tutti_pool **pool) {
    if (pool == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_pool_new needs a place for its result");
    tutti_memory_options full = TUTTI_MEMORY_OPTIONS_INIT;
    tu_memory_world *tables;
    tutti_status status = tu_options_copy("tutti_memory_options", options, &full, sizeof full);
    if (status == TUTTI_OK)
        status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_memory_options_check(&full);
    if (status == TUTTI_OK && full.persistent)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "blocks of a pool have no persistent id");
    if (status == TUTTI_OK && full.stream != NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "blocks of a pool are not cleared on a stream: they outlive it");
    if (status == TUTTI_OK && full.group != NULL && tutti_group_world(full.group) != world)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "the default group %s belongs to another world",
                          tutti_group_name(full.group));
    if (status == TUTTI_OK)
        status = tu_memory_world_get(world, &tables);
    if (status != TUTTI_OK)
        return status;
    tutti_pool *made = calloc(1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a pool", sizeof *made);
    made->world = world;
    made->tables = tables;
    made->options = full;
    made->users = made->references = 1;
    pthread_mutex_init(&made->lock, NULL);
    if (full.group != NULL)
        tutti_group_keep(full.group);
    tu_world_handle(world, "pool", 1);
    *pool = made;
    return TUTTI_OK;
}

/* The class of a size, made on first need. The caller holds the lock. */
static tutti_status class_of(tutti_pool *pool, size_t bytes, size_class **result) {
    size_class *class = tu_order_get(&pool->classes, bytes);
    if (class == NULL) {
        class = calloc(1, sizeof *class);
        if (class == NULL)
            return tu_error_memory("a size of a pool", sizeof *class);
        tutti_status status = tu_order_insert(&pool->classes, bytes, class);
        if (status != TUTTI_OK) {
            free(class);
            return status;
        }
    }
    *result = class;
    return TUTTI_OK;
}

/* An idle block with a clean pad, or NULL. The caller holds the lock. */
static tutti_memory *take_idle(tutti_pool *pool, size_class *class) {
    tutti_memory *memory = class->first;
    if (memory == NULL)
        return NULL;
    class->first = memory->next_idle;
    pool->statistics.idle_blocks--;
    pool->statistics.idle_bytes -= memory->bytes;
    return memory;
}

static tutti_status give_out(tutti_pool *pool, tutti_memory *memory, bool used) {
    tutti_status status = TUTTI_OK;
    if (used)
        status = memory->backend->memory->clear(memory->backend_state, &memory->block, memory->pad_offset,
                                                memory->pad_bytes);
    memory->pool = pool;
    if (status == TUTTI_OK)
        status = tu_memory_list(memory, pool->options.group);
    if (status != TUTTI_OK) {
        tu_memory_forget_peers(memory);
        tu_memory_drop(memory);
        return status;
    }
    pthread_mutex_lock(&pool->lock);
    pool->references++;
    pool->statistics.used_blocks++;
    pool->statistics.used_bytes += memory->bytes;
    pool->statistics.reused += used;
    pthread_mutex_unlock(&pool->lock);
    return TUTTI_OK;
}

tutti_status tutti_pool_alloc(tutti_pool *pool, size_t bytes, tutti_memory **memory) {
    if (pool == NULL || memory == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_pool_alloc needs a pool and a place for its result");
    tutti_memory *made = NULL;
    size_class *class = NULL;
    tutti_status status = tu_world_check(pool->world);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    status = class_of(pool, bytes, &class);
    if (status == TUTTI_OK)
        made = take_idle(pool, class);
    pthread_mutex_unlock(&pool->lock);
    bool used = made != NULL;
    if (status == TUTTI_OK && !used)
        status = tu_memory_create(pool->tables, bytes, &pool->options, &made);
    if (status == TUTTI_OK)
        status = give_out(pool, made, used);
    if (status == TUTTI_OK)
        *memory = made;
    return status;
}

/* Handles of this block are trusted again only after a rendezvous has compared serial numbers. */
static void lose_proof(tutti_memory *memory) {
    pthread_mutex_lock(&memory->tables->lock);
    for (tutti_peers *peers = memory->first_peers; peers != NULL; peers = peers->next_of_memory)
        peers->proven = false;
    pthread_mutex_unlock(&memory->tables->lock);
}

bool tu_pool_take_back(tutti_pool *pool, tutti_memory *memory) {
    lose_proof(memory);
    pthread_mutex_lock(&pool->lock);
    pool->statistics.used_blocks--;
    pool->statistics.used_bytes -= memory->bytes;
    size_class *class = tu_order_get(&pool->classes, memory->bytes);
    bool kept = pool->users > 0;
    if (kept) {
        memory->next_idle = class->first;
        class->first = memory;
        pool->statistics.idle_blocks++;
        pool->statistics.idle_bytes += memory->bytes;
    }
    pthread_mutex_unlock(&pool->lock);
    return kept;
}

void tutti_pool_trim(tutti_pool *pool) {
    if (pool == NULL)
        return;
    tutti_memory *doomed = NULL;
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < pool->classes.count; i++) {
        size_class *class = pool->classes.entries[i].value;
        while (class->first != NULL) {
            tutti_memory *memory = take_idle(pool, class);
            memory->next_idle = doomed;
            doomed = memory;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    while (doomed != NULL) {
        tutti_memory *memory = doomed;
        doomed = memory->next_idle;
        tu_memory_forget_peers(memory);
        tu_memory_drop(memory);
    }
}

tutti_status tutti_pool_query(tutti_pool *pool, tutti_pool_statistics *statistics) {
    if (pool == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_pool_query: pool is NULL");
    pthread_mutex_lock(&pool->lock);
    tutti_pool_statistics now = pool->statistics;
    pthread_mutex_unlock(&pool->lock);
    return tu_result_copy("tutti_pool_statistics", &now, sizeof now, statistics);
}

void tu_pool_drop(tutti_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->references == 0;
    pthread_mutex_unlock(&pool->lock);
    if (!last)
        return;
    for (size_t i = 0; i < pool->classes.count; i++)
        free(pool->classes.entries[i].value);
    free(pool->classes.entries);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

tutti_device tutti_pool_device(const tutti_pool *pool) {
    if (pool == NULL)
        return 0;
    return pool->options.device != 0 ? pool->options.device : TUTTI_CPU;
}

tutti_pool *tutti_pool_keep(tutti_pool *pool) {
    if (pool == NULL || tu_world_forked(pool->world))
        return pool;
    pthread_mutex_lock(&pool->lock);
    pool->users++;
    pthread_mutex_unlock(&pool->lock);
    return pool;
}

void tutti_pool_release(tutti_pool *pool) {
    if (pool == NULL || tu_world_forked(pool->world))
        return;
    tutti_world *world = pool->world;
    tutti_group *group = pool->options.group;
    pthread_mutex_lock(&pool->lock);
    bool last = --pool->users == 0;
    pthread_mutex_unlock(&pool->lock);
    if (!last)
        return;
    tutti_pool_trim(pool);
    tu_pool_drop(pool);
    if (group != NULL)
        tutti_group_release(group);
    tu_world_handle(world, "pool", -1); /* last: the world may go with it */
}
