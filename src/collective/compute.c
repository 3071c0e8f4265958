/* SPDX-License-Identifier: Apache-2.0
 *
 * Large reductions and copies on several threads. A piece of work is cut into equal parts, which the caller and the
 * threads of the process's pool take.
 */
#include "collective/compute.h"

#include "base/pool.h"

#define LEAST_PART ((size_t)256 << 10) /* bytes: waking a thread for less costs more than it saves */
#define MOST_THREADS 15
#define MOST_BUFFERS 64 /* sources or targets that are cut; more ranks than that leave no core free anyway */

int tu_compute_threads(const tutti_world *world) {
    int limit = (int)tu_settings_number(&world->settings, TU_SETTING_THREADS);
    if (tu_settings_text(&world->settings, TU_SETTING_THREADS)[0] == 0) {
        int ranks = world->local_size > 0 ? world->local_size : 1;
        limit = world->job != NULL ? tu_job_cores(world->job) / ranks - 1 : 0;
    }
    return limit < 0 ? 0 : limit > MOST_THREADS ? MOST_THREADS : limit;
}

/* ---- parts ---- */

typedef struct job {
    void (*run)(void *argument, int part, int parts);
    void *argument;
    int parts;
} job;

static void run_some(void *context, int64_t begin, int64_t end) {
    const job *job = context;
    for (int64_t part = begin; part < end; part++)
        job->run(job->argument, (int)part, job->parts);
}

static tutti_status hold_pool(void *world, void **held) {
    tu_pool_hold();
    *held = world;
    return TUTTI_OK;
}

static void release_pool(void *held) {
    (void)held;
    tu_pool_release();
}

/* Runs all parts, with as many threads as are free. The world holds the pool from its first large operation on. */
static void run_parts(tu_collective *state, job job) {
    static const tu_attachment pool = { .make = hold_pool, .end = release_pool };
    void *held;
    tu_attachment_get(&state->group->world->attachments, &pool, &held);
    tu_pool_run(&(tu_pool_loop){ .body = run_some, .context = &job, .count = job.parts, .threads = job.parts });
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
    if (parts > 1 && to_count <= MOST_BUFFERS && from_count <= MOST_BUFFERS)
        run_parts(state, (job){ reduce_part, &whole, parts });
    else
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
    if (parts > 1)
        run_parts(state, (job){ copy_part, &whole, parts });
    else
        tu_copy(to, from, bytes, flags);
}
