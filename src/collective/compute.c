/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute threads of a world: started on first need, asleep between uses, ended with the world. A piece of work is
 * cut into equal parts; the caller takes part. Another group of the rank that finds them busy computes by itself.
 */
#include "collective/compute.h"

#include <stdlib.h>

#include "collective/work.h"

#define LEAST_PART ((size_t)256 << 10) /* bytes: waking a thread for less costs more than it saves */
#define MOST_THREADS 15
#define MOST_BUFFERS 64 /* sources or targets that are cut; more ranks than that leave no core free anyway */

typedef struct job {
    void (*run)(void *argument, int part, int parts);
    void *argument;
    int parts;
} job;

typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    pthread_mutex_t use; /* held by whoever computes with it */
    pthread_t threads[MOST_THREADS];
    int count;
    bool ending;
    uint64_t round; /* counts jobs */
    job job;
    int next, unfinished; /* parts of the current job */
} pool;

int tu_compute_threads(const tutti_world *world) {
    int limit = (int)tu_settings_number(&world->settings, TU_SETTING_THREADS);
    if (tu_settings_text(&world->settings, TU_SETTING_THREADS)[0] == 0) {
        int ranks = world->local_size > 0 ? world->local_size : 1;
        limit = world->job != NULL ? tu_job_cores(world->job) / ranks - 1 : 0;
    }
    return limit < 0 ? 0 : limit > MOST_THREADS ? MOST_THREADS : limit;
}

/* ---- the threads ---- */

/* With the lock held: runs parts of the current job until none is left. */
static void take_parts(pool *pool) {
    while (pool->next < pool->job.parts) {
        job current = pool->job;
        int part = pool->next++;
        pthread_mutex_unlock(&pool->lock);
        current.run(current.argument, part, current.parts);
        pthread_mutex_lock(&pool->lock);
        if (--pool->unfinished == 0)
            pthread_cond_broadcast(&pool->end);
    }
}

static void *compute(void *argument) {
    pool *pool = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    while (!pool->ending) {
        if (pool->round == seen) {
            pthread_cond_wait(&pool->begin, &pool->lock);
            continue;
        }
        seen = pool->round;
        take_parts(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void end_pool(void *argument) {
    pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    pool->ending = true;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->begin);
    pthread_cond_destroy(&pool->end);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->use);
    free(pool);
}

/* Fewer threads than asked for are fine, none too. */
static tutti_status make_pool(tutti_world *world, void **made) {
    pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return tu_error_memory("compute threads", sizeof *pool);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->use, NULL);
    pthread_cond_init(&pool->begin, NULL);
    pthread_cond_init(&pool->end, NULL);
    int wanted = tu_compute_threads(world);
    while (pool->count < wanted &&
           tu_helper_start(&pool->threads[pool->count], "tutti-compute", compute, pool) == TUTTI_OK)
        pool->count++;
    *made = pool;
    return TUTTI_OK;
}

static pool *pool_of(tu_collective *state) {
    tutti_world *world = state->group->world;
    void *found = tu_attached(&world->rooms[TU_ROOM_COLLECTIVE]);
    if (found != NULL)
        return found;
    tu_error_copy before;
    tu_error_save(&before);
    if (tu_world_room(world, TU_ROOM_COLLECTIVE, make_pool, end_pool, &found) != TUTTI_OK)
        found = NULL;
    tu_error_restore(&before); /* without threads it is slower, and no less right */
    return found;
}

/* Runs all parts, with as many threads as are there. False when the threads are in use: nothing has run. */
static bool run_parts(tu_collective *state, job job) {
    pool *pool = pool_of(state);
    if (pool == NULL || pool->count == 0 || pthread_mutex_trylock(&pool->use) != 0)
        return false;
    pthread_mutex_lock(&pool->lock);
    pool->job = job;
    pool->next = 0;
    pool->unfinished = job.parts;
    pool->round++;
    pthread_cond_broadcast(&pool->begin);
    take_parts(pool);
    while (pool->unfinished != 0)
        pthread_cond_wait(&pool->end, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->use);
    return true;
}

/* How many parts `bytes` are cut into; 1: not at all. */
static int parts_for(const tu_collective *state, size_t bytes) {
    size_t parts = (size_t)state->helpers + 1;
    if (bytes / LEAST_PART < parts)
        parts = bytes / LEAST_PART;
    return parts < 1 ? 1 : (int)parts;
}

/* ---- reductions ---- */

typedef struct sweep {
    void *const *to;
    const void *const *from;
    int to_count, from_count;
    size_t count, element;
    tutti_dtype dtype;
    tutti_reduction reduction;
    const double *factors;
    unsigned flags;
} sweep;

static void reduce_part(void *argument, int part, int parts) {
    const sweep *whole = argument;
    size_t share = (whole->count / (size_t)parts + 63) / 64 * 64, begin = share * (size_t)part;
    if (begin >= whole->count)
        return;
    size_t count = whole->count - begin < share || part == parts - 1 ? whole->count - begin : share;
    void *to[MOST_BUFFERS];
    const void *from[MOST_BUFFERS];
    for (int i = 0; i < whole->to_count; i++)
        to[i] = (unsigned char *)whole->to[i] + begin * whole->element;
    for (int i = 0; i < whole->from_count; i++)
        from[i] = (const unsigned char *)whole->from[i] + begin * whole->element;
    tu_reduce_many(to, whole->to_count, from, whole->from_count, count, whole->dtype, whole->reduction, whole->factors,
                   whole->flags);
}

void tu_compute_reduce(tu_collective *state, void *const *to, int to_count, const void *const *from, int from_count,
                       size_t count, tutti_dtype dtype, tutti_reduction reduction, const double *factors,
                       unsigned flags) {
    sweep whole = { to, from, to_count, from_count, count, tutti_dtype_size(dtype), dtype, reduction, factors, flags };
    int parts = state->helpers == 0 ? 1 : parts_for(state, count * whole.element);
    if (parts > 1 && to_count <= MOST_BUFFERS && from_count <= MOST_BUFFERS &&
        run_parts(state, (job){ reduce_part, &whole, parts }))
        return;
    tu_reduce_many(to, to_count, from, from_count, count, dtype, reduction, factors, flags);
}

/* ---- copies ---- */

typedef struct copying {
    unsigned char *to;
    const unsigned char *from;
    size_t bytes;
    unsigned flags;
} copying;

static void copy_part(void *argument, int part, int parts) {
    const copying *whole = argument;
    size_t share = (whole->bytes / (size_t)parts + 4095) / 4096 * 4096, begin = share * (size_t)part;
    if (begin >= whole->bytes)
        return;
    size_t bytes = whole->bytes - begin < share || part == parts - 1 ? whole->bytes - begin : share;
    tu_copy(whole->to + begin, whole->from + begin, bytes, whole->flags);
}

void tu_compute_copy(tu_collective *state, void *to, const void *from, size_t bytes, unsigned flags) {
    copying whole = { to, from, bytes, flags };
    int parts = state->helpers == 0 ? 1 : parts_for(state, bytes);
    if (parts > 1 && run_parts(state, (job){ copy_part, &whole, parts }))
        return;
    tu_copy(to, from, bytes, flags);
}
