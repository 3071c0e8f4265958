/* SPDX-License-Identifier: Apache-2.0
 *
 * Events of a world. A helper thread, started by the first who asks, looks every 20 ms at the ranks of this host and at
 * the state words of this rank's groups, and appends what is new to a list. An eventfd counts the list: it is readable
 * while something is there.
 */
#include "world/event.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <tutti/event.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "job/liveness.h"
#include "world/registry.h"

#define LOOK_INTERVAL (20 * TU_MILLISECOND)

typedef struct entry {
    struct entry *next;
    tutti_event event;
    int rank; /* of a death: the world's; else -1 */
} entry;

struct tu_events {
    tutti_world *world;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* on the monotonic clock: an event, or the end */
    entry *first, **last;   /* under lock, as are the next */
    int descriptor;         /* eventfd, a semaphore */
    bool ending;
    pthread_t thread;
    tu_rank_state *told; /* by world rank: what was told of it; the helper's alone */
};

/* ---- the helper ---- */

static void append(tu_events *events, const tutti_event *event, int rank) {
    entry *made = calloc(1, sizeof *made);
    if (made == NULL) {
        TU_LOG(TUTTI_LOG_WARN, events->world->log, "world", "no memory for an event: %s", event->text);
        return;
    }
    made->event = *event;
    made->rank = rank;
    uint64_t one = 1;
    pthread_mutex_lock(&events->lock);
    *events->last = made;
    events->last = &made->next;
    ssize_t written = write(events->descriptor, &one, sizeof one);
    pthread_cond_broadcast(&events->changed);
    pthread_mutex_unlock(&events->lock);
    if (written != (ssize_t)sizeof one)
        TU_LOG(TUTTI_LOG_WARN, events->world->log, "world", "the event descriptor takes no more");
}

static void look_at_ranks(tu_events *events) {
    tutti_world *world = events->world;
    for (int rank = 0; rank < world->size; rank++) {
        if (rank == world->rank)
            continue;
        tu_rank_state state = tu_world_rank_state(world, rank, true);
        bool gone = state == TU_RANK_DEAD || state == TU_RANK_CLOSED;
        if (!gone || events->told[rank] == state) {
            events->told[rank] = gone ? state : TU_RANK_ALIVE;
            continue;
        }
        bool dead = state == TU_RANK_DEAD;
        tutti_event event = { .size = sizeof event,
                              .kind = dead ? TUTTI_EVENT_DEATH : TUTTI_EVENT_CLOSE,
                              .status = dead ? TUTTI_ERROR_DEAD : TUTTI_ERROR_GONE,
                              .rank = rank };
        tu_world_rank_text(world, rank, event.text, sizeof event.text);
        events->told[rank] = state;
        append(events, &event, dead ? rank : -1);
    }
}

/* A group that ended since the last look, with a reference; NULL: none. */
static tutti_group *next_ended(tutti_world *world) {
    pthread_mutex_lock(&world->lock);
    tutti_group *group = tu_registry_next(world->registry, NULL);
    while (group != NULL && (!tu_group_ended(group) || group->end_told))
        group = tu_registry_next(world->registry, group);
    if (group != NULL)
        group->end_told = true;
    tutti_group_keep(group);
    pthread_mutex_unlock(&world->lock);
    return group;
}

static void look_at_groups(tu_events *events) {
    for (tutti_group *group; (group = next_ended(events->world)) != NULL;) {
        tutti_status status = tu_group_cause(group);
        tutti_event event = { .size = sizeof event, .kind = TUTTI_EVENT_GROUP_ENDED, .status = status };
        event.rank = group->ranks[group->page->cause.origin];
        snprintf(event.group, sizeof event.group, "%s", group->name);
        tu_error_shorten(event.text, sizeof event.text, tutti_error_message());
        tutti_group_release(group);
        append(events, &event, -1);
    }
}

static void *collect(void *argument) {
    tu_events *events = argument;
    for (bool ending = false; !ending;) {
        look_at_ranks(events);
        look_at_groups(events);
        int64_t until = tu_deadline(LOOK_INTERVAL);
        struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
        pthread_mutex_lock(&events->lock);
        while (!events->ending && pthread_cond_timedwait(&events->changed, &events->lock, &time) == 0)
            ;
        ending = events->ending;
        pthread_mutex_unlock(&events->lock);
    }
    return NULL;
}

/* ---- life ---- */

static void free_entries(tu_events *events) {
    while (events->first != NULL) {
        entry *gone = events->first;
        events->first = gone->next;
        free(gone);
    }
}

void tu_events_free(tu_events *events) {
    if (events == NULL)
        return;
    pthread_mutex_lock(&events->lock);
    events->ending = true;
    pthread_cond_broadcast(&events->changed);
    pthread_mutex_unlock(&events->lock);
    pthread_join(events->thread, NULL);
    close(events->descriptor);
    free_entries(events);
    pthread_mutex_destroy(&events->lock);
    pthread_cond_destroy(&events->changed);
    free(events->told);
    free(events);
}

static tutti_status make(tutti_world *world, tu_events **out) {
    tu_events *events = calloc(1, sizeof *events);
    if (events == NULL)
        return tu_error_memory("events", sizeof *events);
    events->world = world;
    events->last = &events->first;
    events->descriptor = -1;
    events->told = calloc((size_t)world->size, sizeof *events->told);
    tutti_status status = TUTTI_OK;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&events->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&events->lock, NULL);
    if (events->told == NULL)
        status = tu_error_memory("events", (size_t)world->size * sizeof *events->told);
    if (status == TUTTI_OK && (events->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE)) < 0)
        status = tu_error_system(errno, "an event descriptor cannot be made (eventfd)");
    if (status == TUTTI_OK) {
        int error = tu_thread_start("tutti-events", collect, events, &events->thread);
        if (error != 0)
            status = tu_error_system(error, "the thread that collects events cannot be started");
    }
    if (status == TUTTI_OK) {
        *out = events;
        return TUTTI_OK;
    }
    if (events->descriptor >= 0)
        close(events->descriptor);
    pthread_mutex_destroy(&events->lock);
    pthread_cond_destroy(&events->changed);
    free(events->told);
    free(events);
    return status;
}

/* The world's, made by the first who asks. */
static tutti_status get(tutti_world *world, tu_events **events) {
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK && world->fake)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "a fake world has no events: nobody else is in it");
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&world->lock);
    if (world->events == NULL)
        status = make(world, &world->events);
    *events = world->events;
    pthread_mutex_unlock(&world->lock);
    return status;
}

/* ---- the public side ---- */

tutti_status tutti_world_event_fd(tutti_world *world, int *descriptor) {
    TU_INSIDE(world);
    tu_events *events;
    if (descriptor == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_event_fd: where the descriptor goes is NULL");
    tutti_status status = get(world, &events);
    if (status == TUTTI_OK)
        *descriptor = events->descriptor;
    return status;
}

static void take(tu_events *events, entry *taken) {
    entry *first = events->first;
    *taken = *first;
    events->first = first->next;
    if (events->first == NULL)
        events->last = &events->first;
    free(first);
    uint64_t count;
    while (read(events->descriptor, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

/* Until there is an event, in slices: an interrupt and the close are not told by the condition. */
static tutti_status wait_for_one(tu_events *events, int64_t timeout_ns, int64_t deadline) {
    tutti_world *world = events->world;
    while (events->first == NULL) {
        if (atomic_load_explicit(&world->interrupt, memory_order_acquire) != 0)
            return tu_world_interrupted(world, "tutti_world_next_event");
        int64_t now = tu_clock_now();
        if (now >= deadline)
            return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: world \"%s\" has had no event for %s", world->name,
                            tu_duration_of(timeout_ns).text);
        int64_t until = now + LOOK_INTERVAL < deadline ? now + LOOK_INTERVAL : deadline;
        struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
        (void)pthread_cond_timedwait(&events->changed, &events->lock, &time);
    }
    return TUTTI_OK;
}

tutti_status tutti_world_next_event(tutti_world *world, int64_t timeout_ns, tutti_event *event) {
    TU_INSIDE(world);
    tu_events *events;
    if (event == NULL || event->size == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_next_event needs a tutti_event that starts with its size "
                                              "(TUTTI_EVENT_INIT)");
    tutti_status status = get(world, &events);
    int64_t timeout = INT64_MAX;
    if (status == TUTTI_OK && timeout_ns != TUTTI_UNTIL_EVENT)
        status = tu_timeout_choose("tutti_world_next_event", timeout_ns, 0, world->timeout_ns, &timeout);
    if (status != TUTTI_OK)
        return status;
    entry taken;
    pthread_mutex_lock(&events->lock);
    status = wait_for_one(events, timeout, tu_deadline(timeout));
    if (status == TUTTI_OK)
        take(events, &taken);
    pthread_mutex_unlock(&events->lock);
    if (status != TUTTI_OK)
        return status;
    if (taken.rank >= 0)
        atomic_store_explicit(&world->mourned[taken.rank], true, memory_order_relaxed);
    size_t size = event->size;
    taken.event.size = size;
    memcpy(event, &taken.event, size < sizeof taken.event ? size : sizeof taken.event);
    return TUTTI_OK;
}
