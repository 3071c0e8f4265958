/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives as they are called: blocking, in batches, as works, which a helper thread moves on too. How they
 * move: request.c; through what: packet.c; when they wait for each other: cycle.c.
 */
#include "collective/message.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "collective/parts.h"
#include "collective/request.h"
#include "world/group.h"

/* ---- the messages of a group ---- */

static void free_unexpected(tu_unexpected *list) {
    while (list != NULL) {
        tu_unexpected *next = list->next;
        tu_unexpected_free(list);
        list = next;
    }
}

static void free_messages(tu_messages *messages) {
    free_unexpected(messages->early);
    free_unexpected(messages->spare);
    pthread_mutex_destroy(&messages->lock);
    pthread_cond_destroy(&messages->changed);
    tu_channels_close(&messages->channels);
    free(messages->places);
    free(messages->early_count);
    free(messages->full_in);
    free(messages);
}

static tutti_status make_messages(tu_collective *state, tu_messages **made) {
    tu_messages *messages = calloc(1, sizeof *messages);
    if (messages == NULL)
        return tu_error_memory("sends and receives", sizeof *messages);
    messages->state = state;
    messages->early_end = &messages->early;
    messages->blocked_on = -1;
    pthread_mutex_init(&messages->lock, NULL);
    pthread_cond_init(&messages->changed, NULL);
    tutti_status status = tu_letters_open(messages);
    if (status == TUTTI_OK)
        status = tu_channels_open(&messages->channels, state, messages->here, messages->here_count);
    messages->early_count = calloc((size_t)state->size, sizeof(int));
    messages->full_in = calloc((size_t)state->size, sizeof(uint64_t));
    if (status == TUTTI_OK && (messages->early_count == NULL || messages->full_in == NULL))
        status = tu_error_memory("sends and receives", (size_t)state->size * (sizeof(int) + sizeof(uint64_t)));
    if (status == TUTTI_OK)
        status = tu_memory_group_get(state->group, &messages->memory);
    if (status != TUTTI_OK) {
        free_messages(messages);
        return status;
    }
    *made = messages;
    return TUTTI_OK;
}

/* Messages across hosts end before the group's side of the network, which is attached later than the state: so they are
 * attached too. */
static tutti_status attach_to_state(void *owner, void **made) {
    *made = tu_collective_find(owner);
    return TUTTI_OK;
}

static void end_before_network(void *argument) {
    tu_collective *state = argument;
    tu_messages_end(atomic_exchange_explicit(&state->messages, NULL, memory_order_acq_rel));
}

static const tu_attachment messages_attachment = { .make = attach_to_state, .end = end_before_network };

static tutti_status prepare_to_end(tu_collective *state) {
    tu_network_group *network;
    void *attached;
    tutti_status status = tu_network_group_get(state->group, &network);
    return status == TUTTI_OK ? tu_attachment_get(&state->group->attachments, &messages_attachment, &attached) : status;
}

static tutti_status get_messages(tu_collective *state, tu_messages **found) {
    tu_messages *messages = atomic_load_explicit(&state->messages, memory_order_acquire);
    if (messages == NULL) {
        tutti_status status = state->group->local ? TUTTI_OK : prepare_to_end(state);
        if (status == TUTTI_OK)
            status = make_messages(state, &messages);
        if (status != TUTTI_OK)
            return status;
        tu_messages *none = NULL;
        if (!atomic_compare_exchange_strong_explicit(&state->messages, &none, messages, memory_order_acq_rel,
                                                     memory_order_acquire)) {
            free_messages(messages);
            messages = none;
        }
    }
    *found = messages;
    return TUTTI_OK;
}

/* ---- what nobody received ---- */

typedef struct unclaimed {
    char text[640];
    size_t used;
    int count;
} unclaimed;

/* "1 element of f32". */
static const char *elements_text(uint64_t count, uint32_t dtype, char text[64]) {
    snprintf(text, 64, "%llu element%s of %s", (unsigned long long)count, count == 1 ? "" : "s",
             tutti_dtype_name((tutti_dtype)dtype));
    return text;
}

static void add_unclaimed(unclaimed *list, int source, const tu_packet *packet) {
    size_t element = tutti_dtype_size((tutti_dtype)packet->dtype);
    char elements[64];
    if (packet->kind != TU_PACKET_MESSAGE || list->count++ >= 4 || list->used >= sizeof list->text)
        return;
    int wrote =
        snprintf(list->text + list->used, sizeof list->text - list->used, "%sfrom rank %d with tag %d (%s)",
                 list->used > 0 ? ", " : "", source, packet->tag,
                 elements_text(element != 0 ? packet->bytes / element : packet->bytes, packet->dtype, elements));
    list->used += wrote > 0 ? (size_t)wrote : 0;
}

/* Messages that have come, whether they were taken from their channels or not. */
static void find_unclaimed(const tu_messages *messages, unclaimed *list) {
    *list = (unclaimed){ .count = 0 };
    for (const tu_unexpected *early = messages->early; early != NULL; early = early->next)
        add_unclaimed(list, early->source, &early->packet);
    for (int place = 0; place < messages->channels.size; place++) {
        const tu_channel *channel = tu_channel_of(&messages->channels, place, messages->channels.rank);
        for (uint64_t next = messages->channels.taken[place];; next++) {
            const tu_packet *packet = &channel->packets[next % TU_PACKETS];
            /* Pairs with the release in tu_packet_post. */
            if (atomic_load_explicit(&packet->number, memory_order_acquire) != next + 1)
                break;
            add_unclaimed(list, tu_member_at(messages, place), packet);
        }
    }
}

static const char *more_text(const unclaimed *list, char text[32]) {
    text[0] = 0;
    if (list->count > 4)
        snprintf(text, 32, " and %d more", list->count - 4);
    return text;
}

/* Whatever ended a send or receive: a message that came and was not received is most often what was meant, with
 * another tag. Names this rank, since its words may become the cause that all others tell; so they may be there. */
static tutti_status append_unclaimed(tu_messages *messages, tutti_status status) {
    unclaimed list;
    char more[32], who[48];
    snprintf(who, sizeof who, "Rank %d has not received: ", messages->state->rank);
    if (status == TUTTI_ERROR_INTERRUPTED || strstr(tutti_error_message(), who) != NULL)
        return status;
    pthread_mutex_lock(&messages->lock);
    find_unclaimed(messages, &list);
    pthread_mutex_unlock(&messages->lock);
    if (list.count != 0)
        tu_error_append(". %s%s%s", who, list.text, more_text(&list, more));
    return status;
}

void tu_message_failed(const tu_task *task, tutti_status status) {
    tu_messages *messages = atomic_load_explicit(&task->state->messages, memory_order_acquire);
    if (messages != NULL)
        (void)append_unclaimed(messages, status);
}

/* At the end of a group: a message that vanishes unread is most often a mistake in the program. */
static void warn_unclaimed(tu_messages *messages) {
    const tutti_group *group = messages->state->group;
    unclaimed list;
    char more[32];
    if (messages->network != NULL)
        tu_requests_progress(messages); /* what has come and was not looked at */
    find_unclaimed(messages, &list);
    if (list.count != 0 && !tu_group_ended(group))
        TU_LOG(TUTTI_LOG_WARN, group->world->log, "collective",
               "group %s ends on rank %d with %d message%s that nobody received: %s%s", group->name, group->rank,
               list.count, list.count == 1 ? "" : "s", list.text, more_text(&list, more));
}

/* ---- ends ---- */

/* Writes the error of a message that its receive did not expect. */
static tutti_status mismatch_error(const tu_request *request) {
    const tu_task *task = request->task;
    const tutti_group *group = task->group;
    size_t element = tutti_dtype_size((tutti_dtype)request->dtype);
    char sent[64], room[64];
    tu_error(TUTTI_ERROR_MISMATCH,
             "the ranks disagree in group %s: rank %d sent %s with tag %d, rank %d receives at most %s", group->name,
             request->peer, elements_text(element != 0 ? request->bytes / element : 0, request->dtype, sent),
             request->tag, group->rank, elements_text(task->info.count, task->info.dtype, room));
    tu_error_at_fault(request->peer);
    tu_error_where(group->name, "recv", task->info.sequence, group->rank);
    return TUTTI_ERROR_MISMATCH;
}

/* Of a receive: whether it left open from whom, or with which tag. */
static bool is_from_any(const tu_operation_info *info) {
    return info->root < 0 || info->tag < 0;
}

static tutti_status outcome(const tu_request *request) {
    if (request->mismatch)
        return mismatch_error(request);
    if (request->garbage != NULL)
        return tu_garbage(request->task->state, request->task, request->peer, request->garbage);
    tutti_received *received = request->task->received;
    const tu_operation_info *info = &request->task->info;
    if (request->task->ticket != 0 && is_from_any(info) && !tu_request_sends(request)) {
        const tutti_world *world = request->task->group->world;
        tu_record_received(tu_job_recorder(world->job, world->local_rank), request->task->ticket, request->peer,
                           request->tag);
    }
    if (!tu_request_sends(request) && received != NULL) {
        tutti_received full = { .size = received->size,
                                .source = request->peer,
                                .tag = request->tag,
                                .count = request->bytes / request->task->element };
        memcpy(received, &full, received->size < sizeof full ? received->size : sizeof full);
    }
    return TUTTI_OK;
}

/* Without the lock: ends the records and wakes whoever waits for the works. */
static void finish_works(tu_request *request) {
    while (request != NULL) {
        tu_request *next = request->next;
        tutti_work *work = request->work;
        tutti_error_copy before;
        tu_error_save(&before);
        tutti_status status = tu_group_leave(work->group, &work->task.info, work->task.ticket, outcome(request));
        tu_work_finish(work, status);
        tu_error_restore(&before);
        tu_collective *state = work->task.state;
        tu_bell_ring(state->sleepers, state->bells[state->rank]);
        tu_work_drop(work);
        request = next;
    }
}

static tu_request *take_done(tu_messages *messages) {
    tu_request *done = messages->done;
    messages->done = NULL;
    return done;
}

void tu_messages_poll(tu_collective *state) {
    tu_messages *messages = atomic_load_explicit(&state->messages, memory_order_acquire);
    if (messages == NULL)
        return;
    if (messages->network != NULL)
        tu_network_poll(messages->network);
    if (pthread_mutex_trylock(&messages->lock) != 0)
        return;
    tu_requests_progress(messages);
    tu_request *done = take_done(messages);
    pthread_mutex_unlock(&messages->lock);
    finish_works(done);
}

/* ---- waiting ---- */

typedef struct message_wait {
    tu_collective *state;
    const _Atomic uint32_t *flag;
    int peer;
    tu_messages *messages;
    const tu_request
        *request; /* that the calling thread is blocked in; NULL: it may do other things, or across hosts */
    tutti_status (*look_at_members)(void *); /* what the wait of a group looks at */
} message_wait;

static bool ready(void *argument) {
    const message_wait *wait = argument;
    if (atomic_load_explicit(wait->flag, memory_order_acquire))
        return true;
    tu_messages_poll(wait->state);
    return atomic_load_explicit(wait->flag, memory_order_acquire);
}

static bool missing(void *argument, int member) {
    const message_wait *wait = argument;
    return wait->peer < 0 || member == wait->peer;
}

/* What else can happen in a group across hosts. */
static tutti_status look_at_hosts(tu_messages *messages, const tu_group_wait *wait, tutti_status status) {
    status = tu_network_look(messages->network, wait, status);
    return status == TUTTI_OK ? tu_letters_reach(messages) : status;
}

static tutti_status look(void *argument) {
    const tu_group_wait *wait = argument;
    const message_wait *awaited = wait->argument;
    tutti_status status = awaited->look_at_members(argument);
    if (awaited->messages->network != NULL)
        return look_at_hosts(awaited->messages, wait, status);
    return status == TUTTI_OK && awaited->request != NULL ? tu_cycle_look(awaited->messages, awaited->request) : status;
}

/* A thread that spins drives the network; while it sleeps the network's own thread does. */
static void sleeping(void *argument, bool begins) {
    const tu_group_wait *wait = argument;
    const message_wait *awaited = wait->argument;
    (begins ? tu_network_rest : tu_network_enter)(awaited->messages->network);
}

static tutti_status await(tu_collective *state, const tu_task *task, int64_t deadline, tu_group_wait *wait) {
    message_wait *awaited = wait->argument;
    awaited->state = state;
    awaited->peer = task->info.root;
    tu_group_wait_init(wait, state->group, &task->info, task->ticket, deadline, missing, awaited);
    wait->any = awaited->peer < 0;
    awaited->look_at_members = wait->wait.check;
    wait->wait.check = look;
    /* Between two looks a pause only: a look goes through the rings of all peers. */
    wait->wait.spins = state->spins / 8;
    tu_network_group *network = awaited->messages->network;
    if (network == NULL)
        return tu_wait_until(&wait->wait, ready, awaited);
    wait->wait.sleeping = sleeping;
    tu_network_enter(network);
    tutti_status status = tu_wait_until(&wait->wait, ready, awaited);
    tu_network_leave(network);
    return status;
}

tutti_status tu_messages_wait(tutti_work *work, int64_t deadline) {
    tu_collective *state = work->task.state;
    message_wait awaited = { .flag = &work->done,
                             .messages = atomic_load_explicit(&state->messages, memory_order_acquire) };
    tu_group_wait wait = { .argument = &awaited };
    tutti_status status = await(state, &work->task, deadline, &wait);
    if (status == TUTTI_OK || status == TUTTI_ERROR_TIMEOUT)
        return status;
    /* The helper sees the same and ends the work with it. */
    while (!atomic_load_explicit(&work->done, memory_order_acquire) && tu_deadline_left(deadline) > 0)
        sched_yield();
    return status;
}

/* ---- the helper ---- */

/* With the lock held: takes the works that are over: because their time is, or their peer closed its world, or
 * everything is (peer TUTTI_ANY_SOURCE). */
static tu_request *give_up(tu_messages *messages, tutti_status status, int peer, int64_t now) {
    tu_request *given_up = NULL, *next;
    for (tu_request *request = messages->first; request != NULL; request = next) {
        next = request->next;
        if (request->work == NULL || (status == TUTTI_ERROR_TIMEOUT && request->task->deadline > now) ||
            (status == TUTTI_ERROR_GONE && peer >= 0 && request->peer >= 0 && request->peer != peer))
            continue;
        tu_request_unlist(messages, request);
        request->next = given_up;
        given_up = request;
    }
    return given_up;
}

static void fail_works(tu_messages *messages, tu_request *request, const tu_group_wait *wait, tutti_status status) {
    tutti_error_copy error;
    if (status != TUTTI_ERROR_TIMEOUT) {
        (void)append_unclaimed(messages, tu_group_wait_error(wait, status));
        tu_error_save(&error);
    }
    while (request != NULL) {
        tu_request *next = request->next;
        tutti_work *work = request->work;
        tutti_status failed;
        if (status == TUTTI_ERROR_TIMEOUT) {
            tu_group_wait own = *wait;
            own.info = &work->task.info;
            own.ticket = work->task.ticket;
            failed = append_unclaimed(messages, tu_group_wait_error(&own, status));
        } else {
            failed = tu_error_restore(&error);
        }
        bool half = request->state != TU_REQUEST_WAITING && request->state != TU_REQUEST_POSTING;
        if (half && status != TUTTI_ERROR_GONE) /* the pair is out of step */
            tu_group_end(work->group, &work->task.info);
        failed = tu_group_leave(work->group, &work->task.info, work->task.ticket, failed);
        tu_work_finish(work, append_unclaimed(messages, failed));
        tu_work_drop(work);
        request = next;
    }
}

typedef struct helper_wait {
    tu_messages *messages;
    tutti_status (*look_at_members)(void *); /* what the wait of a group looks at */
    int works;                               /* when the wait began */
    bool from_any;                           /* all of them are receives from anybody */
} helper_wait;

/* Something happened to the works: look again whose turn it is. */
static bool works_changed(void *argument) {
    const helper_wait *wait = argument;
    tu_messages *messages = wait->messages;
    if (pthread_mutex_trylock(&messages->lock) != 0)
        return false;
    tu_requests_progress(messages);
    bool changed = messages->done != NULL || messages->works != wait->works || messages->ending;
    pthread_mutex_unlock(&messages->lock);
    return changed;
}

static bool is_awaited(void *argument, int member) {
    const helper_wait *wait = argument;
    bool awaited = wait->from_any;
    pthread_mutex_lock(&wait->messages->lock);
    for (tu_request *request = wait->messages->first; request != NULL && !awaited; request = request->next)
        awaited = request->work != NULL && request->peer == member;
    pthread_mutex_unlock(&wait->messages->lock);
    return awaited;
}

static tutti_status help_look(void *argument) {
    const tu_group_wait *wait = argument;
    const helper_wait *awaited = wait->argument;
    tutti_status status = awaited->look_at_members(argument);
    return awaited->messages->network != NULL ? look_at_hosts(awaited->messages, wait, status) : status;
}

/* Who closed its world, from the error that says so; -1: nobody in particular. */
static int who_closed(const helper_wait *wait, tutti_status status) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    if (status != TUTTI_ERROR_GONE || wait->from_any || tutti_error_detail(&info) != TUTTI_OK ||
        info.at_fault_count == 0)
        return -1;
    return info.at_fault[0];
}

/* With the lock held and works under way; gives it back unlocked. */
static void help_works(tu_messages *messages) {
    helper_wait wait = { .messages = messages, .works = messages->works, .from_any = true };
    int64_t deadline = INT64_MAX;
    tu_task task = { .group = NULL };
    for (tu_request *request = messages->first; request != NULL; request = request->next) {
        if (request->work == NULL)
            continue;
        wait.from_any = wait.from_any && request->peer < 0;
        if (request->task->deadline < deadline) {
            deadline = request->task->deadline;
            task = *request->task;
        }
    }
    pthread_mutex_unlock(&messages->lock);
    tu_group_wait group_wait;
    tu_group_wait_init(&group_wait, messages->state->group, &task.info, task.ticket, deadline, is_awaited, &wait);
    group_wait.any = wait.from_any;
    wait.look_at_members = group_wait.wait.check;
    group_wait.wait.check = help_look;
    group_wait.wait.spins = 0;
    group_wait.wait.yields = 20;
    tutti_status status = tu_wait_until(&group_wait.wait, works_changed, &wait);
    int closed = who_closed(&wait, status);
    pthread_mutex_lock(&messages->lock);
    tu_request *given_up = status == TUTTI_OK ? NULL : give_up(messages, status, closed, tu_clock_now());
    tu_request *done = take_done(messages);
    pthread_mutex_unlock(&messages->lock);
    if (given_up != NULL)
        fail_works(messages, given_up, &group_wait, status);
    finish_works(done);
}

static void *help(void *argument) {
    tu_messages *messages = argument;
    pthread_mutex_lock(&messages->lock);
    while (!messages->ending) {
        if (messages->works == 0 && messages->done == NULL) {
            pthread_cond_wait(&messages->changed, &messages->lock);
            continue;
        }
        help_works(messages);
        pthread_mutex_lock(&messages->lock);
    }
    bool orphan = messages->orphan;
    pthread_mutex_unlock(&messages->lock);
    if (orphan)
        free_messages(messages);
    return NULL;
}

void tu_messages_end(tu_messages *messages) {
    if (messages == NULL)
        return;
    pthread_mutex_lock(&messages->lock);
    messages->ending = true;
    /* The group may go with a work that the helper itself finished: then it frees this as its last act. */
    messages->orphan = messages->running && pthread_equal(messages->thread, pthread_self());
    bool orphan = messages->orphan, running = messages->running;
    pthread_t thread = messages->thread;
    pthread_cond_broadcast(&messages->changed);
    pthread_mutex_unlock(&messages->lock);
    if (orphan) {
        pthread_detach(thread);
        return;
    }
    if (running)
        pthread_join(thread, NULL);
    warn_unclaimed(messages);
    free_messages(messages);
}

/* ---- the way in ---- */

/* Looks for those on other hosts that the requests are for. Who waits looks again, and tells what is wrong. */
static void begin_to_reach(tu_messages *messages, tu_request *const *requests, int count) {
    tutti_error_copy before;
    tu_error_save(&before);
    for (int i = 0; i < count; i++)
        tu_letters_want(messages, requests[i]->task->info.root);
    if (tu_letters_reach(messages) != TUTTI_OK)
        tu_error_restore(&before);
}

/* Begins requests and moves them on as far as they go. */
static void begin(tu_messages *messages, tu_request *const *requests, int count) {
    if (messages->network != NULL)
        begin_to_reach(messages, requests, count);
    pthread_mutex_lock(&messages->lock);
    for (int i = 0; i < count; i++)
        tu_request_begin(messages, requests[i]);
    tu_requests_progress(messages);
    tu_request *done = take_done(messages);
    pthread_mutex_unlock(&messages->lock);
    finish_works(done);
}

static bool is_finished(const tu_request *request) {
    return atomic_load_explicit(&request->finished, memory_order_acquire) != 0;
}

static bool succeeded(const tu_request *request) {
    return is_finished(request) && !request->mismatch && request->garbage == NULL;
}

/* Begins requests that a thread awaits. Most are over at once, and need neither a deadline nor two looks at the time
 * for their record; the others have both before anybody waits. What has a ticket is recorded already (short.c). */
static void begin_awaited(tu_messages *messages, tu_request *const *requests, int count) {
    const tutti_world *world = messages->state->group->world;
    const tu_recorder *recorder = tu_job_recorder(world->job, world->local_rank);
    uint64_t began = tu_record_time(recorder);
    begin(messages, requests, count);
    uint64_t ended = tu_record_time(recorder);
    int64_t now = 0;
    for (int i = 0; i < count; i++) {
        tu_task *task = requests[i]->task;
        memcpy(&task->info.executor, task->executor->name, sizeof task->info.executor);
        requests[i]->past = task->ticket == 0 && succeeded(requests[i]);
        if (requests[i]->past) {
            tu_operation_info info = task->info;
            if (!tu_request_sends(requests[i]) && is_from_any(&info)) {
                info.root = requests[i]->peer;
                info.tag = requests[i]->tag;
            }
            tu_record_past(recorder, &info, began, ended, task->info.count * task->element);
            continue;
        }
        if (now == 0)
            now = tu_clock_now();
        task->deadline = tu_deadline_from(now, task->info.timeout_ns);
        if (task->ticket == 0)
            task->ticket = tu_record_begin_at(recorder, &task->info, began);
    }
}

/* Waits for a request that `begin` has begun. */
static tutti_status complete(tu_messages *messages, tu_request *request) {
    tu_task *task = request->task;
    tu_collective *state = task->state;
    if (is_finished(request))
        return outcome(request);
    if (tu_request_sends(request) && request->peer == state->rank) {
        (void)tu_request_withdraw(messages, request);
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "send: rank %d sends %llu bytes to itself and waits, but no receive is under way that could take the "
            "message; start the receive, or the send, with a work",
            state->rank, (unsigned long long)request->bytes);
    }
    message_wait awaited = { .flag = &request->finished,
                             .messages = messages,
                             .request = tu_on_helper ? NULL : request };
    tu_group_wait wait = { .argument = &awaited };
    tutti_status status = await(state, task, task->deadline, &wait);
    if (status == TUTTI_OK)
        return outcome(request);
    bool half = tu_request_withdraw(messages, request);
    if (is_finished(request))
        return outcome(request);
    status = append_unclaimed(messages, tu_group_wait_error(&wait, status));
    if (half && status != TUTTI_ERROR_GONE) /* the pair is out of step; one that closed its world steps no more */
        tu_group_end(task->group, &task->info);
    return status;
}

tutti_status tu_message_run(tu_task *task) {
    tu_messages *messages;
    tutti_status status = get_messages(task->state, &messages);
    if (status != TUTTI_OK)
        return status;
    tu_request request = { .task = task };
    begin_awaited(messages, &(tu_request *){ &request }, 1);
    return complete(messages, &request);
}

tutti_status tu_messages_open(tu_collective *state) {
    tu_messages *messages;
    return get_messages(state, &messages);
}

tutti_status tu_message_prepare(tu_task *task, tu_request *request) {
    tutti_status status = tu_task_enter(task);
    if (status == TUTTI_OK)
        *request = (tu_request){ .task = task };
    return status;
}

void tu_messages_begin(tu_collective *state, tu_request *const *requests, int count) {
    tu_messages *messages = atomic_load_explicit(&state->messages, memory_order_acquire);
    if (count != 0)
        begin_awaited(messages, requests, count);
}

static tutti_status await_one(tu_messages *messages, tu_request *request) {
    return request->past ? outcome(request) : tu_task_leave(request->task, complete(messages, request));
}

tutti_status tu_messages_await(tu_collective *state, tu_request *const *requests, int count, tutti_status status) {
    tu_messages *messages = atomic_load_explicit(&state->messages, memory_order_acquire);
    tutti_error_copy first;
    if (status != TUTTI_OK)
        tu_error_save(&first);
    for (int i = 0; i < count; i++) {
        tutti_status one = await_one(messages, requests[i]);
        if (one != TUTTI_OK && status == TUTTI_OK) {
            status = one;
            tu_error_save(&first);
        }
    }
    return status == TUTTI_OK ? TUTTI_OK : tu_error_restore(&first);
}

tutti_status tu_message_start(tutti_work *work) {
    tu_messages *messages;
    tutti_status status = get_messages(work->task.state, &messages);
    if (status != TUTTI_OK)
        return status;
    tu_request *request = calloc(1, sizeof *request);
    if (request == NULL)
        return tu_error_memory("a send or receive", sizeof *request);
    pthread_mutex_lock(&messages->lock);
    if (!messages->running) {
        status = tu_helper_start(&messages->thread, "tutti-messages", help, messages);
        messages->running = status == TUTTI_OK;
    }
    pthread_mutex_unlock(&messages->lock);
    if (status == TUTTI_OK)
        status = tu_task_enter(&work->task);
    if (status != TUTTI_OK) {
        free(request);
        return status;
    }
    (void)tu_task_deadline(&work->task);
    tu_task_record(&work->task);
    request->task = &work->task;
    request->work = tu_work_hold(work);
    work->request = request;
    begin(messages, &request, 1);
    pthread_mutex_lock(&messages->lock);
    if (messages->works != 0)
        pthread_cond_broadcast(&messages->changed);
    pthread_mutex_unlock(&messages->lock);
    return TUTTI_OK;
}
