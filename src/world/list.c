/* SPDX-License-Identifier: Apache-2.0
 *
 * What the process knows of all its worlds. One list of those that are open: for "open twice", for tutti_spawn, which
 * must not fork while a world is open, and so that closing a pointer that is no open world is an error and not a crash.
 * A list of threads that are in calls, for whom a close waits. And the last few worlds that were closed.
 */
#include "world/list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "world/here.h"
#include "world/launch.h"
#include "world/world.h"

/* ---- the list of open worlds ---- */

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static tutti_world *open_worlds;
static bool prepared; /* for a fork: the child finds the list whole, and its lock free */

static void lock_for_fork(void) {
    pthread_mutex_lock(&list_lock);
}

static void unlock_after_fork(void) {
    pthread_mutex_unlock(&list_lock);
}

tutti_status tu_worlds_claim(tutti_world *world) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&list_lock);
    for (tutti_world *other = open_worlds; other != NULL && !world->fake; other = other->next)
        if (!other->fake && other->rank == world->rank && strcmp(other->name, world->name) == 0 &&
            strcmp(other->meeting, world->meeting) == 0)
            status = tu_error(TUTTI_ERROR_EXISTS,
                              "a world named \"%s\" is already open in this rank (%d); close it first, or give "
                              "tutti_world_options.name another name",
                              world->name, world->rank);
    if (status == TUTTI_OK) {
        world->next = open_worlds;
        open_worlds = world;
        if (!prepared)
            prepared = pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork) == 0;
    }
    pthread_mutex_unlock(&list_lock);
    return status;
}

bool tu_worlds_unclaim(tutti_world *world) {
    pthread_mutex_lock(&list_lock);
    tutti_world **link = &open_worlds;
    while (*link != NULL && *link != world)
        link = &(*link)->next;
    bool found = *link != NULL;
    if (found)
        *link = world->next;
    pthread_mutex_unlock(&list_lock);
    return found;
}

int tu_worlds_open(char names[256]) {
    int count = 0;
    names[0] = 0;
    pthread_mutex_lock(&list_lock);
    for (tutti_world *world = open_worlds; world != NULL; world = world->next) {
        if (world->fake)
            continue;
        size_t used = strlen(names);
        snprintf(names + used, 256 - used, "%s\"%s\"", used > 0 ? ", " : "", world->name);
        count++;
    }
    pthread_mutex_unlock(&list_lock);
    return count;
}

tutti_world *tu_worlds_of(const tu_spawn_record *spawn) {
    pthread_mutex_lock(&list_lock);
    tutti_world *world = open_worlds;
    while (world != NULL && world->spawn != spawn)
        world = world->next;
    pthread_mutex_unlock(&list_lock);
    return world;
}

/* A rank that tutti_spawn started knows itself; else the worlds tell, where they agree. */
tu_here tu_rank_here(void) {
    const tu_spawn_record *spawn = tu_spawn_current();
    if (spawn != NULL)
        return (tu_here){ spawn->size > 1 ? spawn->rank : -1, spawn };
    tu_here here = { -1, NULL };
    bool differ = false;
    pthread_mutex_lock(&list_lock);
    for (const tutti_world *world = open_worlds; world != NULL; world = world->next) {
        if (world->fake || world->size == 1)
            continue;
        differ = differ || (here.rank >= 0 && here.rank != world->rank);
        here.rank = world->rank;
    }
    pthread_mutex_unlock(&list_lock);
    return differ ? (tu_here){ -1, NULL } : here;
}

/* ---- threads that are in calls ---- */

_Thread_local tu_caller tu_caller_here;

static pthread_mutex_t callers_lock = PTHREAD_MUTEX_INITIALIZER;
static tu_caller *callers;
static pthread_once_t callers_once = PTHREAD_ONCE_INIT;
static pthread_key_t callers_key; /* its destructor takes a thread that ends off the list */
static bool callers_keyed;

static void forget_caller(void *argument) {
    pthread_mutex_lock(&callers_lock);
    for (tu_caller **link = &callers; *link != NULL; link = &(*link)->next)
        if (*link == argument) {
            *link = (*link)->next;
            break;
        }
    pthread_mutex_unlock(&callers_lock);
    ((tu_caller *)argument)->listed = false;
}

static void make_callers_key(void) {
    callers_keyed = pthread_key_create(&callers_key, forget_caller) == 0;
}

void tu_caller_list(tu_caller *caller) {
    (void)pthread_once(&callers_once, make_callers_key);
    if (!callers_keyed || pthread_setspecific(callers_key, caller) != 0)
        return; /* no memory: it is not waited for, this time */
    pthread_mutex_lock(&callers_lock);
    caller->next = callers;
    callers = caller;
    caller->listed = true;
    pthread_mutex_unlock(&callers_lock);
}

static bool somebody_inside(const tutti_world *world) {
    bool found = false;
    pthread_mutex_lock(&callers_lock);
    for (const tu_caller *caller = callers; caller != NULL && !found; caller = caller->next)
        found = caller != &tu_caller_here &&
                atomic_load_explicit(&caller->world, memory_order_acquire) == world; /* pairs with tu_world_exit */
    pthread_mutex_unlock(&callers_lock);
    return found;
}

bool tu_world_empty(tutti_world *world) {
    atomic_fetch_or_explicit(&world->interrupt, TU_INTERRUPT_CLOSE, memory_order_release);
    if (!tu_fence_all())
        (void)nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND }, NULL);
    int64_t deadline = tu_deadline(world->timeout_ns);
    while (somebody_inside(world)) {
        if (world->job != NULL)
            tu_job_wake(world->job);
        if (tu_clock_now() >= deadline)
            return false;
        (void)nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND / 10 }, NULL);
    }
    return true;
}

/* ---- closed worlds ----
 *
 * Pointers to worlds, and to groups that a getter lent, outlive a close in programs that make a mistake. The last few
 * closed worlds keep the bare structs, a kilobyte or two each, so that such a call is told that its world is closed. */

#define GRAVES 16

static tutti_world *closed_worlds; /* newest first; under list_lock */

/* What a buried group's page says to whoever looks at it without asking its world first. */
static tu_group_page closed_page = { .state = 1 | TU_GROUP_TOLD,
                                     .cause = { .status = TUTTI_ERROR_STATE, .message = "its world was closed" } };

void tu_world_bury(tutti_group *group) {
    group->page = &closed_page;
    group->page_mapping = NULL;
    atomic_store_explicit(&group->attachments.newest, NULL, memory_order_relaxed);
    pthread_mutex_lock(&list_lock);
    group->next_shell = group->world->shells;
    group->world->shells = group;
    pthread_mutex_unlock(&list_lock);
}

void tu_world_free_shells(tutti_world *world) {
    while (world->shells != NULL) {
        tutti_group *group = world->shells;
        world->shells = group->next_shell;
        free(group->ranks);
        free(group);
    }
    free(world);
}

void tu_worlds_bury(tutti_world *world) {
    tutti_world *oldest = NULL;
    pthread_mutex_lock(&list_lock);
    world->next = closed_worlds;
    closed_worlds = world;
    int count = 0;
    for (tutti_world **link = &closed_worlds; *link != NULL; link = &(*link)->next)
        if (++count > GRAVES) {
            oldest = *link;
            *link = NULL;
            break;
        }
    pthread_mutex_unlock(&list_lock);
    if (oldest != NULL)
        tu_world_free_shells(oldest);
}
