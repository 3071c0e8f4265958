/* SPDX-License-Identifier: Apache-2.0
 *
 * Hand-overs: entering an epoch, arriving, waiting for the others. The quick part spins on a cache line; what takes
 * longer goes to tu_wait_until, which knows deadlines, deaths and interrupts.
 */
#include "collective/collective.h"

typedef enum tu_awaited {
    TU_AWAIT_ARRIVE,
    TU_AWAIT_STEP,
    TU_AWAIT_UP
} tu_awaited;

static const _Atomic uint64_t *flag_of(const tu_collective *state, tu_awaited what, uint64_t epoch, int member) {
    const tu_member *piece = state->members[member];
    switch (what) {
    case TU_AWAIT_STEP:
        return &piece->step.flag;
    case TU_AWAIT_UP:
        return &piece->up.flag;
    default:
        return &piece->arrive[epoch & 1].flag;
    }
}

/* Pairs with the release stores of arrive, step and up. */
static bool reached(const tu_collective *state, tu_awaited what, uint64_t epoch, int member) {
    return (int64_t)(atomic_load_explicit(flag_of(state, what, epoch, member), memory_order_acquire) - epoch) >= 0;
}

/* ---- the slow part ---- */

typedef struct awaiting {
    const tu_collective *state;
    tu_awaited what;
    uint64_t epoch;
    int member; /* the one that this look is about */
    bool all;   /* but the others are awaited too */
} awaiting;

static bool is_missing(void *argument, int member) {
    const awaiting *wait = argument;
    return (wait->all || member == wait->member) && !reached(wait->state, wait->what, wait->epoch, member);
}

static bool is_ready(void *argument) {
    const awaiting *wait = argument;
    return reached(wait->state, wait->what, wait->epoch, wait->member);
}

__attribute__((noinline)) static tutti_status await_slowly(tu_collective *state, tu_task *task, tu_awaited what,
                                                           uint64_t epoch, int member, bool all) {
    awaiting awaited = { state, what, epoch, member, all };
    tu_task_record(task);
    const tu_task *called = tu_task_called(task);
    tu_group_wait wait;
    tu_group_wait_init(&wait, state->group, &called->info, called->ticket, tu_task_deadline(task), is_missing,
                       &awaited);
    if (state->helping) { /* the rank's own thread may need the core */
        wait.wait.spins = 0;
        wait.wait.yields = 50;
    }
    tutti_status status = tu_wait_until(&wait.wait, is_ready, &awaited);
    return status == TUTTI_OK ? TUTTI_OK : tu_group_wait_error(&wait, status);
}

static inline tutti_status await(tu_collective *state, tu_task *task, tu_awaited what, uint64_t epoch, int member,
                                 bool all) {
    if (reached(state, what, epoch, member))
        return TUTTI_OK;
    if (state->spins != 0) {
        for (int i = 0; i < TU_QUICK_SPINS; i++) {
            tu_pause();
            if (reached(state, what, epoch, member))
                return TUTTI_OK;
        }
    }
    return await_slowly(state, task, what, epoch, member, all);
}

tutti_status tu_await_up(tu_collective *state, tu_task *task, uint64_t epoch, int member) {
    return await(state, task, TU_AWAIT_UP, epoch, member, false);
}

/* ---- arriving ---- */

void tu_ring_sleepers(const tu_collective *state) {
    for (int member = 0; member < state->size; member++)
        if (member != state->rank)
            tu_bell_ring_slow(state->bells[member]);
}

/* Who has arrived in e - 1 is done with e - 2. */
static tutti_status clear(tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int member = 0; member < state->size; member++) {
        if (member == state->rank)
            continue;
        tutti_status status = await(state, task, TU_AWAIT_ARRIVE, epoch, member, true);
        if (status != TUTTI_OK)
            return status;
        if (state->members[member]->arrive[epoch & 1].signature != state->signature[epoch & 1])
            return tu_mismatch(state, task, epoch, member);
    }
    state->cleared = epoch - 1;
    return TUTTI_OK;
}

tutti_status tu_epoch_enter(tu_collective *state, tu_task *task, uint64_t *epoch) {
    uint64_t next = state->epoch + 1;
    if (__builtin_expect((int64_t)(state->cleared - (next - 2)) < 0, 0)) {
        tutti_status status = clear(state, task, next - 1);
        if (status != TUTTI_OK)
            return status;
    }
    state->epoch = next;
    *epoch = next;
    return TUTTI_OK;
}

void tu_epoch_arrive(tu_collective *state, tu_task *task, uint64_t epoch) {
    tu_member *mine = state->members[state->rank];
    tu_line *line = &mine->arrive[epoch & 1];
    const tu_task *called = tu_task_called(task);
    tu_say(&mine->said[epoch & 1], &called->info, called->detail);
    state->signature[epoch & 1] = task->signature;
    line->signature = task->signature;
    atomic_store_explicit(&line->flag, epoch, memory_order_release); /* pairs with `reached` */
    tu_ring_members(state);
    tu_task_record(task);
}

static inline tutti_status await_arrival(tu_collective *state, tu_task *task, uint64_t epoch, int member, bool all) {
    if (member == state->rank)
        return TUTTI_OK;
    tutti_status status = await(state, task, TU_AWAIT_ARRIVE, epoch, member, all);
    if (status != TUTTI_OK)
        return status;
    if (__builtin_expect(state->members[member]->arrive[epoch & 1].signature != task->signature, 0))
        return tu_mismatch(state, task, epoch, member);
    return TUTTI_OK;
}

tutti_status tu_epoch_await(tu_collective *state, tu_task *task, uint64_t epoch, int member) {
    return await_arrival(state, task, epoch, member, false);
}

tutti_status tu_epoch_await_all(tu_collective *state, tu_task *task, uint64_t epoch) {
    /* The lines of all members are fetched side by side before the first is waited for. */
    if (state->size > 2)
        for (int member = 0; member < state->size; member++)
            __builtin_prefetch(&state->members[member]->arrive[epoch & 1]);
    for (int member = 0; member < state->size; member++) {
        tutti_status status = await_arrival(state, task, epoch, member, true);
        if (status != TUTTI_OK)
            return status;
    }
    tu_line_reclaim(state, epoch);
    return TUTTI_OK;
}

bool tu_epoch_reached(const tu_collective *state, uint64_t epoch, int member) {
    return reached(state, TU_AWAIT_ARRIVE, epoch, member);
}

bool tu_epoch_complete(const tu_collective *state, uint64_t epoch) {
    for (int member = 0; member < state->size; member++)
        if (member != state->rank && !reached(state, TU_AWAIT_ARRIVE, epoch, member))
            return false;
    return true;
}

/* ---- the second hand-over ---- */

void tu_step_publish(tu_collective *state, uint64_t epoch) {
    atomic_store_explicit(&state->members[state->rank]->step.flag, epoch,
                          memory_order_release); /* pairs with `reached` */
    tu_ring_members(state);
}

tutti_status tu_step_await(tu_collective *state, tu_task *task, uint64_t epoch, int member) {
    return member == state->rank ? TUTTI_OK : await(state, task, TU_AWAIT_STEP, epoch, member, false);
}

tutti_status tu_step_await_all(tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int member = 0; member < state->size; member++) {
        tutti_status status = member == state->rank ? TUTTI_OK : await(state, task, TU_AWAIT_STEP, epoch, member, true);
        if (status != TUTTI_OK)
            return status;
    }
    state->cleared = epoch - 1;
    return TUTTI_OK;
}
