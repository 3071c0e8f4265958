/* SPDX-License-Identifier: Apache-2.0
 *
 * The express lane: a barrier or a short all-reduce, called without options in a group that is set up and quiet. It
 * does what call.c, check.c, one_shot.c and sync.c do for such a call, in the same order, but asks every question only
 * once and none that such a call cannot raise. Whatever is unusual is left to them before anything has happened; a wait
 * that takes longer, errors and the recorder are theirs anyway.
 *
 * Why: a hand-over between two cores takes 30 to 170 ns, and so did the instructions around it.
 */
#include <string.h>

#include "base/bare.h"
#include "collective/collective.h"
#include "job/liveness.h"

/* The group as it almost always is: alive, on this host, with nobody departed, no faults to inject and no devices. The
 * reasons are looked for, and told, on the ordinary way. */
static inline bool usual(const tutti_group *group) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER || group->size == 1 || !group->local)
        return false;
    const tutti_world *world = group->world;
    if (world->fake || world->faults != NULL || atomic_load_explicit(&world->devices, memory_order_relaxed) != NULL ||
        !atomic_load_explicit(&world->looked, memory_order_relaxed))
        return false;
    if (TUTTI_BARE)
        return true;
    return atomic_load_explicit(&world->closed, memory_order_acquire) == 0 && !tu_job_forked(world->job) &&
           atomic_load_explicit(&group->destroyed, memory_order_relaxed) == 0 && !tu_group_ended(group) &&
           tu_job_departures(world->job) == atomic_load_explicit(&group->departures, memory_order_relaxed);
}

/* Arguments of an all-reduce that need no second look. Sets the size of an element. */
static inline bool plain(tu_task *task) {
    const unsigned char *in = task->in, *out = task->out;
    tutti_dtype dtype = (tutti_dtype)task->info.dtype;
    tutti_reduction reduction = (tutti_reduction)task->info.reduction;
    task->element = tutti_dtype_size(dtype);
    if (!tutti_reduction_applies(reduction, dtype) || reduction == TUTTI_PREMUL_SUM || in == NULL || out == NULL ||
        task->info.count == 0 || task->info.count > 65536)
        return false;
    size_t bytes = task->info.count * task->element;
    return in == out || in + bytes <= out || out + bytes <= in;
}

/* What the table says, where that is one hand-over in one round; AUTO otherwise. As tu_choose. */
static inline tutti_algorithm choose(tu_collective *state, const tu_task *task, uint64_t bytes) {
    const tu_rule *rules = state->rules[task->shape], *rule = rules;
    if (state->forced[task->shape] != TUTTI_ALGORITHM_AUTO)
        return TUTTI_ALGORITHM_AUTO;
    for (int i = 1; i < TU_RULES && rules[i].algorithm != TUTTI_ALGORITHM_AUTO && rules[i].bytes <= bytes; i++)
        rule = &rules[i];
    size_t room = rule->algorithm == TUTTI_ALGORITHM_INLINE     ? TU_INLINE_BYTES
                  : rule->algorithm == TUTTI_ALGORITHM_ONE_SHOT ? state->layout.slot_bytes
                                                                : 0;
    if (room == 0 || bytes > room)
        return TUTTI_ALGORITHM_AUTO;
    state->choice =
        (tu_choice){ .algorithm = rule->algorithm, .bytes = bytes, .limit = rule->bytes, .from = state->rules_from };
    return rule->algorithm;
}

/* Nothing is queued or open, and everybody is known to be done with the epoch before the last. */
static inline bool quiet(tu_collective *state) {
    uint64_t next = state->epoch + 1;
    return state->ready && state->open == NULL && atomic_load_explicit(&state->engine, memory_order_relaxed) == NULL &&
           (int64_t)(state->cleared - (next - 2)) >= 0;
}

/* As tu_group_admit; the deadline is worked out when something has to wait. */
static inline void number(tu_task *task) {
    tutti_group *group = task->group;
    int64_t timeout = atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
    task->info.timeout_ns = timeout != 0 ? timeout : group->world->timeout_ns;
    task->info.sequence = atomic_fetch_add_explicit(&group->sequence, 1, memory_order_relaxed) + 1;
    task->info.group_key = group->key;
    task->info.group_index = group->recorder_index;
}

static inline unsigned char *staging(const tu_collective *state, int member, uint64_t epoch,
                                     tutti_algorithm algorithm) {
    return algorithm == TUTTI_ALGORITHM_INLINE ? state->members[member]->arrive[epoch & 1].payload
                                               : tu_slot(state, member, epoch);
}

static inline void reduce(tu_collective *state, const tu_task *task, uint64_t epoch, tutti_algorithm algorithm) {
    for (int member = 0; member < state->size; member++)
        state->sources[member] = staging(state, member, epoch, algorithm);
    state->sources[state->rank] = task->in;
    tu_reduce(task->out, state->sources, state->size, task->info.count, (tutti_dtype)task->info.dtype,
              (tutti_reduction)task->info.reduction, NULL, 0);
}

/* The hand-over, with the lock held. */
static inline tutti_status hand_over(tu_collective *state, tu_task *task, tutti_algorithm algorithm, size_t bytes) {
    uint64_t epoch = ++state->epoch;
    unsigned char *mine = staging(state, state->rank, epoch, algorithm);
    if (bytes == 8)
        memcpy(mine, task->in, 8);
    else if (bytes != 0)
        tu_copy(mine, task->in, bytes, tu_stage_flags(state, bytes));
    tu_epoch_arrive(state, task, epoch);
    tutti_status status = tu_epoch_await_all(state, task, epoch);
    if (status == TUTTI_OK && bytes != 0)
        reduce(state, task, epoch, algorithm);
    return status;
}

bool tu_express(tu_task *task, tutti_status *status) {
    bool moves = task->shape != TU_OPERATION_BARRIER;
    if (!usual(task->group) || (moves && !plain(task)))
        return false;
    tu_collective *state = tu_attached(&task->group->rooms[TU_ROOM_COLLECTIVE]);
    if (state == NULL || !tu_collective_try_lock(state))
        return false;
    size_t bytes = moves ? task->info.count * task->element : 0;
    tutti_algorithm algorithm = quiet(state) ? choose(state, task, bytes) : TUTTI_ALGORITHM_AUTO;
    if (algorithm == TUTTI_ALGORITHM_AUTO) {
        tu_collective_unlock(state);
        return false;
    }
    number(task);
    task->info.algorithm = (uint8_t)algorithm;
    task->signature = tu_signature(task);
    state->ran = task->info;
    state->direct_inputs = state->direct_outputs = 0;
    *status = tu_task_leave(task, hand_over(state, task, algorithm, bytes));
    tu_collective_unlock(state);
    return true;
}
