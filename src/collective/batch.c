/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches. Sends and receives are posted first, so that they run side by side; then the collectives run in the order in
 * which they were noted; then the sends and receives are awaited. Neighbouring small all-reduces of one dtype and
 * reduction are packed and run as one: element by element it is the same sum. Each collective has a number of its own.
 */
#include "collective/batch.h"

#include <stdlib.h>
#include <string.h>

#include "collective/message.h"
#include "collective/request.h"
#include "collective/short.h"
#include "collective/work.h"
#include "collective/works.h"
#include "world/group.h"

#define PACK_BYTES ((size_t)32 << 10) /* all-reduces are packed up to this size together */

#define FEW 8 /* calls of a batch that need no memory of their own */

struct tutti_batch {
    tutti_group *group;
    tu_collective *state; /* of the group */
    int count, room;
    int messages;       /* of them: sends and receives that run beside each other */
    tu_task *tasks;     /* `few`, or more */
    int64_t timeout_ns; /* of tutti_batch_end's call */
    int short_count; /* calls noted as `shorts`; they become tasks when something else comes, so one of the two is 0 */
    /* Of the messages: in `few_requests` and `few_prepared`, or in one piece, made before anything is entered. */
    tu_request *requests, **prepared;
    tu_request few_requests[FEW], *few_prepared[FEW];
    tu_short shorts[TU_SHORT_MOST];
    tu_task few[FEW];
};

static tutti_status refuse(const char *function) {
    return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the batch or the group is NULL", function);
}

tutti_status tutti_batch_begin(tutti_group *group, tutti_batch **batch) {
    if (group == NULL || batch == NULL)
        return refuse("tutti_batch_begin");
    if (tu_group_absent(group, "batch"))
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_batch_begin: this rank is no member of the group");
    TU_INSIDE(group->world);
    tutti_status status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    tu_collective *state;
    status = tu_collective_get(group, &state);
    if (status != TUTTI_OK)
        return status;
    /* The last one that ended is used again. */
    tutti_batch *made = atomic_exchange_explicit(&state->spare_batch, NULL, memory_order_acquire);
    if (made == NULL)
        made = malloc(sizeof *made);
    if (made == NULL)
        return tu_error_memory("a batch", sizeof *made);
    made->state = state;
    made->count = made->messages = made->short_count = 0;
    made->room = FEW;
    made->tasks = made->few;
    made->timeout_ns = 0;
    made->requests = made->few_requests;
    made->prepared = made->few_prepared;
    made->group = tutti_group_keep(group);
    atomic_fetch_add_explicit(&group->world->batches, 1, memory_order_relaxed); /* only ever told in a message */
    *batch = made;
    return TUTTI_OK;
}

void tu_batch_free(tutti_batch *batch) {
    if (batch == NULL)
        return;
    tutti_group *group = batch->group;
    atomic_fetch_sub_explicit(&group->world->batches, 1, memory_order_relaxed);
    for (int i = 0; i < batch->count; i++)
        free((void *)(uintptr_t)batch->tasks[i].tiles.list); /* the batch's own: keep_tiles */
    if (batch->tasks != batch->few)
        free(batch->tasks);
    if (batch->requests != batch->few_requests)
        free(batch->requests);
    /* Pairs with tutti_batch_begin. With the group the spare one may go. */
    free(atomic_exchange_explicit(&batch->state->spare_batch, batch, memory_order_acq_rel));
    tutti_group_release(group);
}

void tutti_batch_cancel(tutti_batch *batch) {
    tu_batch_free(batch);
}

static __attribute__((noinline)) tu_task *more_places(tutti_batch *batch) {
    int room = batch->room * 2;
    bool few = batch->tasks == batch->few;
    tu_task *more = realloc(few ? NULL : batch->tasks, (size_t)room * sizeof *more);
    if (more == NULL) {
        (void)tu_error_memory("a batch", (size_t)room * sizeof *more);
        return NULL;
    }
    if (few)
        memcpy(more, batch->few, sizeof batch->few);
    batch->tasks = more;
    batch->room = room;
    return &more[batch->count];
}

/* Makes tasks of what was noted as short messages. False: no memory, with an error. */
static bool unfold(tutti_batch *batch) {
    while (batch->room < batch->short_count)
        if (more_places(batch) == NULL)
            return false;
    for (; batch->count < batch->short_count; batch->count++)
        tu_short_task(&batch->shorts[batch->count], batch->state, &batch->tasks[batch->count]);
    batch->messages = batch->count;
    batch->short_count = 0;
    return true;
}

tu_task *tu_batch_place(tutti_batch *batch) {
    if (batch->short_count != 0 && !unfold(batch))
        return NULL;
    return batch->count < batch->room ? &batch->tasks[batch->count] : more_places(batch);
}

tu_short *tu_batch_short_places(tutti_batch *batch, const tutti_group *group, int count) {
    bool fit = batch->group == group && batch->count == 0 && batch->short_count + count <= TU_SHORT_MOST;
    return fit ? &batch->shorts[batch->short_count] : NULL;
}

void tu_batch_note_short(tutti_batch *batch, int count) {
    batch->short_count += count;
}

/* A message that is to run beside the others; in a fake world it is a task like any other. */
static bool is_message(const tu_task *task) {
    return task->row->kind == TU_KIND_MESSAGE && task->executor->takes_turns;
}

/* The list of tiles is the call's, which ends before the batch does. */
static tutti_status keep_tiles(tu_tiles *tiles) {
    size_t bytes = tiles->count * sizeof *tiles->list;
    if (bytes == 0) {
        tiles->list = NULL;
        return TUTTI_OK;
    }
    tu_tile *kept = malloc(bytes);
    if (kept == NULL)
        return tu_error_memory("the tiles of a batch", bytes);
    memcpy(kept, tiles->list, bytes);
    tiles->list = kept;
    return TUTTI_OK;
}

tutti_status tu_batch_check(const char *name, const tutti_call *call) {
    if (call->batch != NULL && call->work != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s: a call in a batch has no work of its own; give one to tutti_batch_end", name);
    return TUTTI_OK;
}

tutti_status tu_batch_note(tutti_batch *batch, const tu_task *task) {
    if (batch->group != task->group)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the batch belongs to group %s, the call to group %s",
                        task->row->name, batch->group->name, task->group->name);
    tu_task *place = tu_batch_place(batch);
    if (place == NULL)
        return TUTTI_ERROR_MEMORY;
    if (place != task)
        *place = *task;
    tutti_status status = keep_tiles(&place->tiles);
    if (status != TUTTI_OK)
        return status;
    batch->messages += is_message(task);
    batch->count++;
    return TUTTI_OK;
}

/* ---- entering ---- */

/* After a failure: what was entered and will not run ends with the status. */
static void leave_rest(tutti_batch *batch, int begin, tutti_status status) {
    for (int i = begin; i < batch->count; i++)
        if (batch->tasks[i].entered)
            (void)tu_group_leave_agreement(batch->group, batch->tasks[i].ticket, status);
}

/* All the memory that the batch needs for its messages: later nothing may fail for want of it. */
static tutti_status make_room(tutti_batch *batch) {
    int messages = batch->messages;
    if (messages <= FEW)
        return TUTTI_OK;
    size_t bytes = (size_t)messages * (sizeof *batch->requests + sizeof *batch->prepared);
    tu_request *requests = malloc(bytes);
    if (requests == NULL)
        return tu_error_memory("a batch", bytes);
    batch->requests = requests;
    batch->prepared = (tu_request **)(void *)(requests + messages);
    return TUTTI_OK;
}

tutti_status tu_batch_enter(tutti_batch *batch) {
    tutti_status room = make_room(batch);
    if (room != TUTTI_OK)
        return room;
    for (int i = 0; i < batch->count && batch->messages < batch->count; i++) {
        tu_task *task = &batch->tasks[i];
        if (is_message(task)) /* it enters when it is posted */
            continue;
        tutti_status status = tu_task_enter(task);
        task->skipped = status == TU_FAULT_SKIP;
        if (status != TUTTI_OK && !task->skipped) {
            leave_rest(batch, 0, status);
            return status;
        }
        (void)tu_task_deadline(task);
        if (task->entered)
            tu_task_record(task);
    }
    return TUTTI_OK;
}

/* ---- packing ----
 *
 * Neighbouring small all-reduces run as one. Which do is decided by what is equal on all ranks. That a task's input is
 * an earlier one's output is not: so every rank says how many tasks of the pack, from the first, had their inputs ready
 * (tu_task.given), the fewest count, and the rest is packed anew.
 */

static bool can_pack(const tu_task *task) {
    /* A factor holds for a whole call, and an algorithm that was asked for may not hold for a longer one. */
    return task->executor == &tu_executor_shm && !task->skipped && task->custom == NULL &&
           tu_reduces_to_all(task->row) && task->info.reduction != TUTTI_PREMUL_SUM &&
           tu_forced_algorithm(task) != TUTTI_ALGORITHM_INLINE;
}

static bool packs_with(const tu_task *first, const tu_task *task) {
    return can_pack(task) && first->row == task->row && first->info.dtype == task->info.dtype &&
           first->info.reduction == task->info.reduction && first->forced == task->forced;
}

static size_t bytes_of(const tu_task *task) {
    return task->info.count * task->element;
}

/* How many tasks from `begin` on run as one, and their bytes. */
static int pack_length(const tutti_batch *batch, int begin, size_t *bytes) {
    const tu_task *first = &batch->tasks[begin];
    int end = begin;
    *bytes = 0;
    while (end < batch->count && can_pack(first) && packs_with(first, &batch->tasks[end])) {
        size_t more = bytes_of(&batch->tasks[end]);
        if (*bytes + more > PACK_BYTES)
            break;
        *bytes += more;
        end++;
    }
    return end - begin;
}

static bool reads_result_of(const tu_task *later, const tu_task *earlier) {
    const unsigned char *in = later->in, *out = earlier->out;
    return in < out + bytes_of(earlier) && out < in + bytes_of(later);
}

/* How many tasks of the pack, from the first, do not wait for the results of others in it. */
static uint64_t count_given(const tu_task *tasks, int count) {
    for (int i = 1; i < count; i++)
        for (int earlier = 0; earlier < i; earlier++)
            if (reads_result_of(&tasks[i], &tasks[earlier]))
                return (uint64_t)i;
    return (uint64_t)count;
}

/* Runs `count` tasks as one; *done is how many of them have their results. */
static tutti_status run_packed(tu_task *tasks, int count, size_t bytes, int *done) {
    unsigned char *packed = calloc(1, bytes == 0 ? 1 : bytes), *at = packed;
    if (packed == NULL)
        return tu_task_leave(&tasks[0], tu_error_memory("packing a batch", bytes));
    tu_task whole = tasks[0];
    whole.in = whole.out = packed;
    whole.info.count = bytes / whole.element;
    whole.given = whole.valid = count_given(tasks, count);
    whole.detail = 1;
    for (int i = 0; i < count; at += bytes_of(&tasks[i]), i++) {
        if ((uint64_t)i < whole.given && bytes_of(&tasks[i]) != 0)
            memcpy(at, tasks[i].in, bytes_of(&tasks[i]));
        whole.detail = whole.detail * UINT64_C(0x9e3779b97f4a7c15) + tasks[i].info.count;
    }
    tutti_status status = tu_task_run_in_turn(&whole);
    /* Everybody gives its first at least: none at all would be packed anew for ever. */
    if (status == TUTTI_OK && whole.valid == 0)
        status = tu_error(TUTTI_ERROR_PROTOCOL,
                          "in a batch of group %s a rank published that none of its inputs is there; something "
                          "overwrote its memory",
                          whole.group->name);
    *done = status == TUTTI_OK ? (int)whole.valid : 1;
    at = packed;
    for (int i = 0; i < *done && status == TUTTI_OK; at += bytes_of(&tasks[i]), i++) {
        if (bytes_of(&tasks[i]) != 0)
            memcpy(tasks[i].out, at, bytes_of(&tasks[i]));
        if (i > 0)
            (void)tu_task_leave(&tasks[i], TUTTI_OK);
    }
    free(packed);
    return status;
}

/* ---- running ---- */

static tutti_status run_collectives(tutti_batch *batch) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < batch->count;) {
        tu_task *task = &batch->tasks[i];
        size_t bytes;
        int done = 1, together = is_message(task) ? 0 : pack_length(batch, i, &bytes);
        if (together > 1)
            status = run_packed(task, together, bytes, &done);
        else if (!is_message(task) && !task->skipped)
            status = tu_task_run_in_turn(task);
        i += done;
        if (status != TUTTI_OK) {
            leave_rest(batch, i, status);
            break;
        }
    }
    return status;
}

/* Enters the receives, then the sends: so a message that comes back at once finds its receive. *count are entered, in
 * that order. */
static tutti_status prepare_messages(tutti_batch *batch, int *count) {
    tutti_status status = tu_messages_open(batch->state);
    *count = 0;
    for (int sends = 0; sends < 2; sends++)
        for (int i = 0; i < batch->count && status == TUTTI_OK; i++) {
            tu_task *task = &batch->tasks[i];
            if (!is_message(task) || (task->row->in != TU_EXTENT_NONE) != (sends == 1))
                continue;
            batch->prepared[*count] = &batch->requests[*count];
            status = tu_message_prepare(task, batch->prepared[*count]);
            *count += status == TUTTI_OK;
            status = tu_not_entered(status);
        }
    return status;
}

tutti_status tu_batch_run_in_turn(tutti_batch *batch) {
    int count;
    if (batch->messages == 0)
        return run_collectives(batch);
    tutti_status status = prepare_messages(batch, &count);
    tu_messages_begin(batch->state, batch->prepared, count);
    if (status != TUTTI_OK)
        leave_rest(batch, 0, status);
    else if (batch->messages < batch->count)
        status = run_collectives(batch);
    return tu_messages_await(batch->state, batch->prepared, count, status);
}

static bool needs_turn(const tutti_batch *batch) {
    for (int i = 0; i < batch->count && batch->messages < batch->count; i++)
        if (batch->tasks[i].executor->takes_turns && !is_message(&batch->tasks[i]))
            return true;
    return false;
}

tutti_status tu_batch_run(tutti_batch *batch) {
    tu_collective *state = batch->state;
    bool in_turn = needs_turn(batch);
    tutti_status status = in_turn ? tu_turn_take(state, batch->timeout_ns) : TUTTI_OK;
    if (status != TUTTI_OK)
        return status;
    tu_works *works = in_turn ? tu_works_drain(state) : NULL;
    status = tu_batch_enter(batch);
    tu_works_resume(works);
    if (status == TUTTI_OK)
        status = tu_batch_run_in_turn(batch);
    if (in_turn)
        tu_collective_unlock(state);
    return status;
}

static tutti_status start_work(tutti_batch *batch, tutti_work **result) {
    tu_task task;
    tu_task_begin(&task, batch->group, TU_OPERATION_BATCH);
    task.state = batch->state;
    task.executor = batch->state->executors.list[0];
    task.timeout_ns = batch->timeout_ns;
    tutti_work *work;
    tutti_status status = tu_work_make(&task, &work);
    if (status != TUTTI_OK) {
        tu_batch_free(batch);
        return status;
    }
    work->batch = batch; /* and goes with it */
    return tu_work_start_made(work, result);
}

/* What is not left to the defaults. */
static tutti_status read_options(const tutti_call *call, int64_t *timeout_ns, tutti_work ***work) {
    tutti_call full = TUTTI_CALL_INIT;
    tutti_status status = tu_options_copy("tutti_call", call, &full, sizeof full);
    if (status == TUTTI_OK && full.timeout_ns < 0)
        status = tu_error(TUTTI_ERROR_ARGUMENT,
                          "tutti_batch_end: timeout_ns is %lld; it must be positive, or 0 for the group's",
                          (long long)full.timeout_ns);
    *timeout_ns = full.timeout_ns;
    *work = full.work;
    return status;
}

tutti_status tutti_batch_end(tutti_batch *batch, const tutti_call *call) {
    if (batch == NULL)
        return refuse("tutti_batch_end");
    tutti_work **work = NULL;
    tutti_status status = call == NULL ? TUTTI_OK : read_options(call, &batch->timeout_ns, &work);
    bool done = status != TUTTI_OK;
    if (!done && batch->short_count != 0 && batch->timeout_ns == 0 && work == NULL)
        done = tu_short_run(batch->state, batch->shorts, batch->short_count, &status);
    if (!done && batch->short_count != 0 && !unfold(batch)) {
        status = TUTTI_ERROR_MEMORY;
        done = true;
    }
    for (int i = 0; i < batch->count && batch->timeout_ns != 0; i++)
        batch->tasks[i].timeout_ns = batch->timeout_ns;
    if (!done && work != NULL)
        return start_work(batch, work);
    if (!done)
        status = tu_batch_run(batch);
    tu_batch_free(batch);
    return status;
}
