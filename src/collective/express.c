/* SPDX-License-Identifier: Apache-2.0
 *
 * The express lane of barriers and of all-reduces up to a cache line: one without options in a group that is set up and
 * quiet. It does what the ordinary way (call.c, task.c, shm.c, one_shot.c, sync.c) does for such a call, in the same
 * order, but asks every question only once and none that such a call cannot raise, and makes no task of it. Whatever is
 * unusual is left to the ordinary way before anything has happened; a wait that takes longer, and a call that is not
 * what the others called, become a task (meet_by_task below).
 *
 * Why: a hand-over between two cores takes 30 to 170 ns, and so did the instructions around it.
 */
#include "collective/express.h"

#include "collective/check.h"

/* A call on its way. */
typedef struct ride {
    tu_collective *state;
    tutti_group *group;
    const tu_recorder *recorder;
    uint64_t epoch, sequence, signature, ticket;
    const void *in;
    void *out;
    size_t count, element, bytes;
    uint8_t operation, dtype, reduction;
} ride;

/* What the table says for so many bytes is one flat hand-over by shared memory, nothing is queued or open, and
 * everybody is known to be done with the epoch before the last. */
static inline bool quiet(tu_collective *state, tu_operation operation, uint64_t bytes) {
    uint64_t next = state->epoch + 1;
    const tu_rule *rules = state->rules[operation];
    return state->ready && state->only == &tu_executor_shm && state->forced[operation] == TUTTI_ALGORITHM_AUTO &&
           rules[0].algorithm == TUTTI_ALGORITHM_INLINE &&
           (rules[1].algorithm == TUTTI_ALGORITHM_AUTO || rules[1].bytes > bytes) && state->open == NULL &&
           atomic_load_explicit(&state->works, memory_order_relaxed) == NULL &&
           (int64_t)(state->cleared - (next - 2)) >= 0;
}

/* Takes the turn, number and epoch of a call. False: it is not for this lane. (Every field is set by hand: an
 * initializer would clear the whole by a string instruction, which takes as long as a hand-over.) */
static inline __attribute__((always_inline)) bool board(ride *this, tutti_group *group, tu_operation operation,
                                                        size_t count, tutti_dtype dtype, tutti_reduction reduction) {
    if (!tu_group_usual(group))
        return false;
    tu_collective *state = tu_collective_find(group);
    if (state == NULL || !tu_collective_try_lock(state))
        return false;
    if (!quiet(state, operation, this->bytes)) {
        tu_collective_unlock(state);
        return false;
    }
    this->group = group;
    this->state = state;
    this->sequence = tu_group_next(&group->sequence);
    this->epoch = ++state->epoch;
    this->count = count;
    this->operation = (uint8_t)operation;
    this->dtype = (uint8_t)dtype;
    this->reduction = (uint8_t)reduction;
    /* What all must call alike stays in registers: words that are written in small parts and read back in larger ones
     * are there only when all stores before them have left the processor, and the flag would wait for that. */
    const tu_operation_info alike = { .sequence = this->sequence,
                                      .count = count,
                                      .root = -1,
                                      .operation = this->operation,
                                      .dtype = this->dtype,
                                      .reduction = this->reduction,
                                      .algorithm = TUTTI_ALGORITHM_INLINE };
    this->signature = tu_signature_of(&alike, operation, 0);
    tu_say(&state->members[state->rank]->said[this->epoch & 1], &alike, 0);
    return true;
}

/* For tutti_group_ran and the recorder: where the one finds it, the other reads it. */
static inline const tu_operation_info *describe(const ride *this) {
    const tutti_group *group = this->group;
    tu_operation_info *info = &this->state->ran;
    int64_t timeout = atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
    info->group_key = group->key;
    info->sequence = this->sequence;
    info->count = this->count;
    info->timeout_ns = timeout != 0 ? timeout : group->world->timeout_ns;
    memcpy(&info->executor, tu_executor_shm.name, sizeof info->executor);
    info->group_index = group->recorder_index;
    info->root = -1;
    info->tag = 0;
    info->operation = this->operation;
    info->dtype = this->dtype;
    info->reduction = this->reduction;
    info->algorithm = TUTTI_ALGORITHM_INLINE;
    return info;
}

/* Says that this rank has come. What is only of use later is written while the others' lines are on their way. */
static inline __attribute__((always_inline)) void arrive(ride *this) {
    tu_collective *state = this->state;
    tu_line *line = &state->members[state->rank]->arrive[this->epoch & 1];
    line->signature = this->signature;
    atomic_store_explicit(&line->flag, this->epoch, memory_order_release); /* pairs with has_come, and with sync.c */
    tu_ring_members(state);
    const tutti_world *world = this->group->world;
    this->recorder = tu_job_recorder(world->job, world->local_rank);
    this->ticket = tu_record_begin(this->recorder, describe(this));
    state->ran_by = &tu_executor_shm;
    state->direct_inputs = state->direct_outputs = 0;
    state->signature[this->epoch & 1] = this->signature;
    state->choice = (tu_choice){ .algorithm = TUTTI_ALGORITHM_INLINE, .from = state->rules_from, .bytes = this->bytes };
}

static inline bool has_come(const tu_line *line, uint64_t epoch) {
    return (int64_t)(atomic_load_explicit(&line->flag, memory_order_acquire) - epoch) >= 0; /* pairs with arrive */
}

/* Whether the others come soon, with the same call. */
static inline bool all_come(const ride *this) {
    const tu_collective *state = this->state;
    for (int member = 0; member < state->size; member++) {
        const tu_line *line = &state->members[member]->arrive[this->epoch & 1];
        if (member == state->rank)
            continue;
        for (int look = 0; !has_come(line, this->epoch); look++) {
            if (look == TU_QUICK_SPINS || state->spins == 0)
                return false;
            tu_pause();
        }
        if (line->signature != this->signature)
            return false;
    }
    return true;
}

/* The same as the task that the ordinary way would have made of the call. A failure ends it. */
static __attribute__((noinline)) tutti_status meet_by_task(const ride *this) {
    tu_task task;
    tu_task_begin(&task, this->group, (tu_operation)this->operation);
    task.state = this->state;
    task.executor = &tu_executor_shm;
    task.info = this->state->ran;
    task.in = this->in;
    task.out = this->out;
    task.element = this->element;
    task.entered = true;
    task.ticket = this->ticket;
    task.signature = this->signature;
    tutti_status status = tu_epoch_await_all(this->state, &task, this->epoch);
    if (status == TUTTI_OK)
        return TUTTI_OK;
    status = tu_task_leave(&task, status);
    tu_collective_unlock(this->state);
    return status;
}

static inline __attribute__((always_inline)) tutti_status meet(ride *this) {
    arrive(this);
    if (__builtin_expect(!all_come(this), 0))
        return meet_by_task(this);
    tu_line_reclaim(this->state, this->epoch);
    return TUTTI_OK;
}

static inline void alight(const ride *this) {
    tu_record_end_well(this->recorder, this->ticket, this->operation, TUTTI_ALGORITHM_INLINE, this->bytes);
    tu_group_completed_in_turn(this->group, this->sequence);
    tu_collective_unlock(this->state);
}

bool tu_express_barrier(tutti_group *group, tutti_status *status) {
    TU_INSIDE_GROUP(group);
    ride this;
    this.in = this.out = NULL;
    this.element = 1;
    this.bytes = 0;
    if (!board(&this, group, TU_OPERATION_BARRIER, 0, 0, 0))
        return false;
    *status = meet(&this);
    if (*status == TUTTI_OK)
        alight(&this);
    return true;
}

/* Own input first into the line, then, when all have come, the sum of all lines in rank order. */
static inline tutti_status reduce(ride *this) {
    tu_collective *state = this->state;
    unsigned char *payload = state->members[state->rank]->arrive[this->epoch & 1].payload;
    if (this->bytes == sizeof(uint64_t))
        memcpy(payload, this->in, sizeof(uint64_t));
    else
        memcpy(payload, this->in, this->bytes);
    tutti_status status = meet(this);
    if (status != TUTTI_OK)
        return status;
    for (int member = 0; member < state->size; member++)
        state->sources[member] = state->members[member]->arrive[this->epoch & 1].payload;
    state->sources[state->rank] = this->in; /* one's own line may still be on its way out */
    tu_reduce(this->out, state->sources, state->size, this->count, (tutti_dtype)this->dtype,
              (tutti_reduction)this->reduction, NULL, 0);
    return TUTTI_OK;
}

bool tu_express_all_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                           tutti_reduction reduction, tutti_status *status) {
    size_t element;
    if (count > TU_INLINE_BYTES || !tu_is_plain_all_reduce(in, out, count, dtype, reduction, &element) ||
        count * element > TU_INLINE_BYTES)
        return false;
    TU_INSIDE_GROUP(group);
    ride this;
    this.in = in;
    this.out = out;
    this.element = element;
    this.bytes = count * element;
    if (!board(&this, group, TU_OPERATION_ALL_REDUCE, count, dtype, reduction))
        return false;
    *status = reduce(&this);
    if (*status == TUTTI_OK)
        alight(&this);
    return true;
}
