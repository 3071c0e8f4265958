/* SPDX-License-Identifier: Apache-2.0
 *
 * Who started this process, which rank it is, and where the ranks meet.
 */
#ifndef TU_WORLD_LAUNCH_H
#define TU_WORLD_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/store.h>
#include <tutti/world.h>

#include "base/log.h"
#include "base/settings.h"
#include "world/world.h"

/* What tutti_spawn leaves for tutti_world_open, per thread (and per process, in a process that it forked). */
struct tu_spawn_record {
    int rank, size;
    tutti_store *store; /* of ranks that are threads; NULL: url */
    char url[128];
};
const tu_spawn_record *tu_spawn_current(void);

/* One rank, in this thread: opens its world, runs its main, closes what that left open. `record` is
 * tu_spawn_current(), NULL under a launcher. */
tutti_status tu_rank_run(const tu_spawn_record *record, tutti_rank_main *main, void *argument);

#define TU_LAUNCHER_TUTTI "tutti run"

typedef struct tu_launch {
    const char *launcher; /* as tutti_world_launcher gives it */
    int rank, size;
    /* The meeting place: a store of somebody's, or an address. None for a world of one rank. */
    tutti_store *store; /* lent */
    char url[192];      /* "unix:@…", "tcp://host:port", "file://…"; "" none */
    bool rank_0_hosts;  /* rank 0 serves the address, unless somebody does already */
    bool per_opening;   /* each opening has an address of its own: name and generation are appended */
    int news;           /* descriptor of the launcher's news page (hosts/news.h); -1: there is none */
    char prefix[192];   /* in front of all keys: run id and restart count; "" none */
} tu_launch;

/* Finds out from options and environment. Local; nothing is opened. */
tutti_status tu_launch_find(const tutti_world_options *options, const tu_settings *settings, tu_log *log,
                            tu_launch *launch);

/* The meeting place in words, the same for each opening by this rank. */
void tu_launch_place(const tu_launch *launch, char *text, size_t bytes);

/* Opens the store of the meeting place, with keys that are private to this world and opening; NULL for a world of one
 * rank. Also chooses world->address. */
tutti_status tu_launch_meet(const tu_launch *launch, tutti_world *world, int64_t deadline, tutti_store **store);

/* A spawned rank failed, perhaps before it opened its world: tells those that wait for it there. The calling thread's
 * error says why, and stays. `store` is where the ranks meet. */
void tu_launch_cannot_meet(tutti_store *store, int rank, int size, int pid);

/* This host's address on the route to `host`, or on the interface that TUTTI_INTERFACE names (name, prefix, ^name,
 * a.b.c.d/n). */
tutti_status tu_address_choose(const char *host, const char *interface, char *address, size_t bytes);

#endif
