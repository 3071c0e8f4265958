/* SPDX-License-Identifier: Apache-2.0
 *
 * Large reductions and copies: by several threads of a rank, where it has cores to spare, and in both directions at
 * once.
 */
#ifndef TU_COLLECTIVE_COMPUTE_H
#define TU_COLLECTIVE_COMPUTE_H

#include "collective/collective.h"

/* A reduction: as the arguments of tu_reduce_many. */
typedef struct tu_sweep {
    void *const *to;
    const void *const *from;
    int to_count, from_count;
    size_t count, element; /* elements; bytes of one */
    tutti_dtype dtype;
    tutti_reduction reduction;
    const double *factors;
    unsigned flags;
} tu_sweep;

/* As tu_copy. Short ones, and all when no core is free, run on the calling thread. */
void tu_compute_copy(tu_collective *state, void *to, const void *from, size_t bytes, unsigned flags);

/* What a rank moves in one direction in a round: a reduction, or else copies, whose total is `bytes`. */
typedef struct tu_lane {
    const tu_sweep *sweep;
    tu_segment *segments;
    int count;
    size_t bytes;
    unsigned flags; /* of the copies */
} tu_lane;

/* Adds a copy to a lane, whose segments have room for one per member. */
static inline void tu_lane_add(tu_lane *lane, void *to, const void *from, size_t bytes) {
    if (bytes == 0)
        return;
    lane->segments[lane->count++] = (tu_segment){ to, from, bytes };
    lane->bytes += bytes;
}

/* Runs both lanes, side by side where that is quicker: see tu_aside. `put` may copy what `take` reduces. */
void tu_compute_both(tu_collective *state, tu_lane *take, tu_lane *put);

/* Stages what `put` says while nothing is to be taken, and watches how long that takes: it decides how staging is done
 * from then on (tu_ring_flags). */
void tu_compute_stage(tu_collective *state, tu_lane *put);

/* Both lanes of a round: as tu_compute_both, but what is staged alone, and a round now and then, is watched. */
void tu_compute_round(tu_collective *state, size_t round, tu_lane *take, tu_lane *put);

/* Copies a lane in that way, unless it is short or goes past the cache; returns whether that is done. Else, now and
 * then, ordinary stores are tried on its beginning, which is cut off. */
bool tu_stage_watched(tu_stage_watch *watch, tu_lane *put);
/* What it makes of ordinary stores of `bytes` that took so long. */
void tu_stage_judge(tu_stage_watch *watch, size_t bytes, int64_t nanoseconds);

/* Room for each of so many parts in a round through the ring. Where ranks outnumber the cores the hand-overs, each of
 * which costs switches of processes, count for more than what stays in a core's cache. */
static inline size_t tu_ring_room(const tu_collective *state, size_t parts) {
    return (state->crowded ? state->crowded_chunk_bytes : state->chunk_bytes) / parts / 64 * 64;
}

/* Bytes of a part in a round, at most `room`, where the longest part has `longest`: a quarter, so that most of it is
 * taken while more is staged, but no less than a hand-over is worth. Where ranks outnumber the cores a hand-over costs
 * a switch of processes: there a round takes all it can. The rings must be attached. */
static inline size_t tu_round_bytes(const tu_collective *state, size_t longest, size_t room) {
    enum {
        LEAST = 32 << 10
    };
    size_t quarter = (longest / 4 + 4095) / 4096 * 4096, part = quarter < LEAST ? LEAST : quarter;
    return part < room && !state->crowded ? part : room;
}

/* How many threads besides the caller's a rank of this world may use. */
int tu_compute_threads(const tutti_world *world);

#endif
