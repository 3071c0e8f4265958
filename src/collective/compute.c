/* SPDX-License-Identifier: Apache-2.0
 *
 * Large reductions and copies on several threads. A piece of work is cut into equal parts, which the caller and the
 * threads of the process's pool take. On one thread what is taken from others and what is staged for them go side by
 * side.
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

/* `bytes` of a reduction, from byte `begin` on, with a copy beside it or NULL. */
static void reduce_piece(const tu_sweep *whole, size_t begin, size_t bytes, const tu_aside *aside) {
    void *to[MOST_BUFFERS];
    const void *from[MOST_BUFFERS];
    for (int i = 0; i < whole->to_count; i++)
        to[i] = (unsigned char *)whole->to[i] + begin;
    for (int i = 0; i < whole->from_count; i++)
        from[i] = (const unsigned char *)whole->from[i] + begin;
    size_t count = bytes / whole->element;
    if (aside != NULL)
        tu_reduce_beside(to, whole->to_count, from, whole->from_count, count, whole->dtype, whole->reduction,
                         whole->factors, whole->flags, aside);
    else
        tu_reduce_many(to, whole->to_count, from, whole->from_count, count, whole->dtype, whole->reduction,
                       whole->factors, whole->flags);
}

static void reduce_part(void *argument, int part, int parts) {
    const tu_sweep *whole = argument;
    size_t share = (whole->count / (size_t)parts + 63) / 64 * 64, begin = share * (size_t)part;
    if (begin >= whole->count)
        return;
    size_t count = whole->count - begin < share || part == parts - 1 ? whole->count - begin : share;
    reduce_piece(whole, begin * whole->element, count * whole->element, NULL);
}

static bool can_be_cut(const tu_sweep *sweep) {
    return sweep->to_count <= MOST_BUFFERS && sweep->from_count <= MOST_BUFFERS;
}

/* As tu_reduce_many. Short ones, and all when no core is free, run on the calling thread. */
static void compute_reduce(tu_collective *state, const tu_sweep *sweep) {
    int parts = state->helpers == 0 ? 1 : parts_for(state, sweep->count * sweep->element);
    if (parts > 1 && can_be_cut(sweep))
        run_parts(state, (job){ reduce_part, (void *)(uintptr_t)sweep, parts });
    else
        tu_reduce_many(sweep->to, sweep->to_count, sweep->from, sweep->from_count, sweep->count, sweep->dtype,
                       sweep->reduction, sweep->factors, sweep->flags);
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

/* ---- both directions ---- */

static void copy_lane(tu_collective *state, const tu_lane *lane) {
    for (int i = 0; i < lane->count; i++)
        tu_compute_copy(state, lane->segments[i].to, lane->segments[i].from, lane->segments[i].bytes, lane->flags);
}

static tu_aside aside_of(const tu_lane *put, int segment) {
    if (segment >= put->count)
        return (tu_aside){ 0 };
    const tu_segment *copied = &put->segments[segment];
    return (tu_aside){ copied->to, copied->from, copied->bytes };
}

/* A share of the reduction beside each copy. */
static void reduce_beside(const tu_sweep *sweep, const tu_lane *put) {
    size_t bytes = sweep->count * sweep->element, share = (bytes / (size_t)put->count + 63) / 64 * 64, begin = 0;
    for (int i = 0; i < put->count; i++) {
        tu_aside aside = aside_of(put, i);
        size_t end = i == put->count - 1 || begin + share > bytes ? bytes : begin + share;
        reduce_piece(sweep, begin, end - begin, &aside);
        begin = end;
    }
}

static void copy_beside(const tu_lane *take, const tu_lane *put) {
    int longer = take->count > put->count ? take->count : put->count;
    for (int i = 0; i < longer; i++) {
        tu_aside aside = aside_of(put, i);
        if (i < take->count)
            tu_copy_beside(take->segments[i].to, take->segments[i].from, take->segments[i].bytes, take->flags, &aside);
        else
            tu_copy(aside.to, aside.from, aside.bytes, 0);
    }
}

/* Not what is staged past the cache: measured between distant cores, side by side took a tenth longer. On several
 * threads they go one after the other, too. */
static bool goes_beside(const tu_collective *state, const tu_lane *take, const tu_lane *put) {
    if (take->bytes == 0 || put->bytes == 0 || (put->flags & TU_KERNEL_STREAM) != 0)
        return false;
    if (take->sweep != NULL && !can_be_cut(take->sweep))
        return false;
    return parts_for(state, take->bytes > put->bytes ? take->bytes : put->bytes) == 1;
}

void tu_compute_both(tu_collective *state, tu_lane *take, tu_lane *put) {
    if (take->sweep != NULL) {
        take->bytes = take->sweep->count * take->sweep->element;
        take->flags = take->sweep->flags;
    }
    if (!goes_beside(state, take, put)) {
        if (take->sweep != NULL)
            compute_reduce(state, take->sweep);
        copy_lane(state, take);
        copy_lane(state, put);
    } else if (take->sweep != NULL) {
        reduce_beside(take->sweep, put);
    } else {
        copy_beside(take, put);
    }
}

/* ---- staging ---- */

/* Between cores that share a cache ordinary stores are quickest, as long as the ring is larger than the cores' own
 * caches: then its lines are found in the shared one. Between others each line that a peer has read costs a round trip
 * to write, some ten times as long as a store past the cache. Ranks may move, so staging is watched: */
#define SLOW_BYTES_PER_NANOSECOND \
    6                      /* ordinary stores between near cores make 20 and more, between distant ones 2 or 3 */
#define IN_A_ROW 2         /* before the contrary is believed: one may have been interrupted, or lucky */
#define LEAST_INTERVAL 64  /* stagings past the cache before ordinary stores are tried again; twice as many */
#define MOST_INTERVAL 4096 /* whenever they have turned out to be slow once more */
#define STAGING_BYTES ((size_t)128 << 10) /* longer ones count as several: more is lost by the wrong stores */
#define TRIAL_BYTES ((size_t)16 << 10)
#define WATCHED 8 /* of so many rounds one is staged by itself, so that its time tells something */

static int64_t time_copy(const tu_lane *lane) {
    int64_t begin = tu_clock_now();
    for (int i = 0; i < lane->count; i++)
        tu_copy(lane->segments[i].to, lane->segments[i].from, lane->segments[i].bytes, 0);
    return tu_clock_now() - begin;
}

void tu_stage_judge(tu_stage_watch *watch, size_t bytes, int64_t nanoseconds) {
    bool slow = (int64_t)bytes < nanoseconds * SLOW_BYTES_PER_NANOSECOND;
    watch->contrary = slow == watch->far ? 0 : watch->contrary + 1;
    if (watch->contrary < IN_A_ROW)
        return;
    watch->contrary = 0;
    watch->far = slow;
    if (slow)
        watch->trial_interval = watch->trial_interval == 0                  ? LEAST_INTERVAL
                                : watch->trial_interval < MOST_INTERVAL / 2 ? 2 * watch->trial_interval
                                                                            : MOST_INTERVAL;
}

/* The beginning of the lane by ordinary stores, to see whether they have become quick. */
static void try_near(tu_stage_watch *watch, tu_lane *put) {
    tu_segment *first = &put->segments[0], piece = *first;
    if (piece.bytes < TRIAL_BYTES)
        return;
    piece.bytes = TRIAL_BYTES;
    tu_stage_judge(watch, TRIAL_BYTES, time_copy(&(tu_lane){ .segments = &piece, .count = 1 }));
    /* One that was quick is repeated at once. */
    watch->next_trial = watch->contrary != 0 ? 1 : watch->trial_interval != 0 ? watch->trial_interval : LEAST_INTERVAL;
    first->to += TRIAL_BYTES;
    first->from += TRIAL_BYTES;
    first->bytes -= TRIAL_BYTES;
}

void tu_compute_round(tu_collective *state, size_t round, tu_lane *take, tu_lane *put) {
    if (take->sweep == NULL && take->bytes == 0) {
        tu_compute_stage(state, put);
    } else if (round % WATCHED == 0 && put->bytes != 0) {
        tu_lane nothing = { 0 };
        tu_compute_both(state, take, &nothing);
        tu_compute_stage(state, put);
    } else {
        tu_compute_both(state, take, put);
    }
}

bool tu_stage_watched(tu_stage_watch *watch, tu_lane *put) {
    if (put->bytes < TRIAL_BYTES || !watch->watched)
        return false;
    if ((put->flags & TU_KERNEL_STREAM) == 0) {
        tu_stage_judge(watch, put->bytes, time_copy(put));
        return true;
    }
    watch->next_trial -= 1 + (int)(put->bytes / STAGING_BYTES); /* at most a ring */
    if (watch->next_trial <= 0)
        try_near(watch, put);
    return false;
}

void tu_compute_stage(tu_collective *state, tu_lane *put) {
    if (!tu_stage_watched(&state->watch, put))
        copy_lane(state, put);
}

/* ---- for fused operations: arrival.h ---- */

void tu_hand_over(const tutti_group *group, void *to, const void *from, size_t bytes) {
    const tu_collective *state = tu_collective_find(group);
    tu_copy(to, from, bytes, state != NULL && state->ready ? tu_stage_flags(state, bytes) : 0);
}

/* Another thread may be in a collective of the group: so this reads only what setting it up has left. */
static unsigned watched_flags(const tutti_group *group, tu_stage_watch *watch, size_t bytes) {
    const tu_collective *state = tu_collective_find(group);
    if (state == NULL || !state->ready)
        return 0;
    if (!watch->begun) {
        watch->begun = true;
        watch->watched = state->watch.watched;
        watch->far = !state->near;
    }
    return watch->watched ? (watch->far ? TU_KERNEL_STREAM : 0) : tu_stage_flags(state, bytes);
}

void tu_hand_through_ring(const tutti_group *group, tu_stage_watch *watch, void *to, const void *from, size_t bytes) {
    tu_segment whole = { .to = to, .from = from, .bytes = bytes };
    tu_lane put = { .segments = &whole, .count = 1, .bytes = bytes, .flags = watched_flags(group, watch, bytes) };
    if (!tu_stage_watched(watch, &put))
        tu_copy(whole.to, whole.from, whole.bytes, put.flags);
}

bool tu_ring_is_near(const tutti_group *group, tu_stage_watch *watch, size_t bytes) {
    return (watched_flags(group, watch, bytes) & TU_KERNEL_STREAM) == 0;
}
