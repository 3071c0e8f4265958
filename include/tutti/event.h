/* SPDX-License-Identifier: Apache-2.0
 *
 * Events: what happens to a world while its program does something else. For servers, which sit in epoll or wait for
 * requests, and must hear at once that a rank died.
 *
 *     int fd;
 *     tutti_world_event_fd(world, &fd);                          // into epoll, beside the sockets
 *     …
 *     tutti_event event = TUTTI_EVENT_INIT;                      // the descriptor is readable
 *     while (tutti_world_next_event(world, 1, &event) == TUTTI_OK)
 *         fprintf(stderr, "%s\n", event.text);
 *
 * Events are collected from the first of these calls on, by a helper thread that looks every 20 ms; what happened
 * before is told first. Each event is told once per rank. A death that was told here ends no wait on the world's store
 * any more.
 */
#ifndef TUTTI_EVENT_H
#define TUTTI_EVENT_H

#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What happened. Values are written out and never reused. */
typedef enum tutti_event_kind {
    TUTTI_EVENT_DEATH = 1,      /* a rank died: of this host, or, under tutti run, of any */
    TUTTI_EVENT_CLOSE = 2,      /* a rank of this host closed its world; of another host, its process ended well */
    TUTTI_EVENT_GROUP_ENDED = 3 /* a group of which this rank is a member ended: death, mismatch, abort, deadline */
} tutti_event_kind;

/* One event. Set `size` before the call (TUTTI_EVENT_INIT does). */
typedef struct tutti_event {
    size_t size;
    tutti_event_kind kind;
    tutti_status status; /* TUTTI_ERROR_DEAD, TUTTI_ERROR_GONE, or the cause that ended the group */
    int rank;            /* world rank that died or closed, or that ended the group */
    char group[64];      /* name of the group that ended; else "" */
    char text[512];      /* the same in words */
} tutti_event;
#define TUTTI_EVENT_INIT TUTTI_DEFAULTS(tutti_event)
/* TUTTI_EVENT_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_event_init(tutti_event *event, size_t size);

/* A descriptor that is readable while an event has not been taken; for poll, select and epoll alone. Lent: it ends with
 * the world, so take it out of epoll before tutti_world_close. A fake world has none. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_world_event_fd(tutti_world *world, int *descriptor);

/* Takes the event that was found first; waits for one until the timeout (TUTTI_ERROR_TIMEOUT). What happened between
 * two looks, some milliseconds apart, is found together: ranks in rank order, then groups. timeout_ns 0: the world's;
 * 1: looks and does not wait; TUTTI_UNTIL_EVENT: no deadline. tutti_world_interrupt and the close of the world by
 * another thread end it too. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_world_next_event(tutti_world *world, int64_t timeout_ns, tutti_event *event);

#ifdef __cplusplus
}
#endif
#endif
