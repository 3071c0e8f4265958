/* SPDX-License-Identifier: Apache-2.0
 *
 * The executor hosts: setting up, running, failing. What it runs is in hosts_move.c and hosts_reduce.c.
 */
#include "collective/hosts.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "collective/message.h"
#include "collective/work.h"
#include "collective/works.h"
#include "world/group.h"

/* ---- who is where ---- */

static void free_hosts(void *argument) {
    tu_hosts *hosts = argument;
    free(hosts->hosts);
    free(hosts->members);
    free(hosts->scratch);
    free(hosts);
}

/* Lists the members host by host. */
static void place_members(tu_hosts *hosts) {
    const tutti_group *group = hosts->group;
    const int *node_of = group->world->node_of;
    int placed = 0;
    hosts->contiguous = true;
    for (int first = 0; first < group->size; first++) {
        bool known = false;
        for (int before = 0; before < first && !known; before++)
            known = node_of[group->ranks[before]] == node_of[group->ranks[first]];
        if (known)
            continue;
        tu_host *host = &hosts->hosts[hosts->host_count];
        host->members = hosts->members + placed;
        for (int member = first; member < group->size; member++) {
            if (node_of[group->ranks[member]] != node_of[group->ranks[first]])
                continue;
            if (member == group->rank) {
                hosts->host = hosts->host_count;
                hosts->index = host->count;
            }
            hosts->contiguous = hosts->contiguous && member == placed;
            hosts->members[placed++] = member;
            host->count++;
        }
        if (hosts->host_count == 0 || host->count < hosts->columns)
            hosts->columns = host->count;
        hosts->host_count++;
    }
}

static tutti_status make_hosts(void *owner, void **made) {
    tutti_group *group = owner;
    size_t size = (size_t)group->size;
    tu_hosts *hosts = calloc(1, sizeof *hosts);
    if (hosts != NULL) {
        hosts->hosts = calloc(size, sizeof *hosts->hosts);
        hosts->members = calloc(size, sizeof *hosts->members);
    }
    if (hosts == NULL || hosts->hosts == NULL || hosts->members == NULL) {
        if (hosts != NULL)
            free_hosts(hosts);
        return tu_error_memory("the hosts of a group", size * sizeof *hosts->hosts);
    }
    hosts->group = group;
    hosts->here = group->here;
    tutti_status status = tu_network_group_get(group, &hosts->network);
    if (status == TUTTI_OK && hosts->here != NULL)
        status = tu_collective_get(hosts->here, &hosts->part);
    if (status != TUTTI_OK) {
        free_hosts(hosts);
        return status;
    }
    place_members(hosts);
    *made = hosts;
    return TUTTI_OK;
}

static const tu_attachment hosts_attachment = { .make = make_hosts, .end = free_hosts };

static tu_hosts *hosts_of(const tutti_group *group) {
    return tu_attachment_find(&group->attachments, &hosts_attachment);
}

/* ---- setting up ---- */

/* Messages see to it themselves, and do not take turns with it. */
static tutti_status prepare(tu_task *task) {
    void *made = hosts_of(task->group);
    if (made != NULL || task->row->kind == TU_KIND_MESSAGE)
        return TUTTI_OK;
    tu_task_record(task);
    tu_network_group *network; /* attached before, so that it outlives what uses it */
    tutti_status status = tu_network_group_get(task->group, &network);
    return status == TUTTI_OK ? tu_attachment_get(&task->group->attachments, &hosts_attachment, &made) : status;
}

tutti_status tu_hosts_scratch(tu_hosts *hosts, size_t bytes, unsigned char **scratch) {
    if (bytes > hosts->scratch_bytes) {
        free(hosts->scratch);
        hosts->scratch_bytes = 0;
        hosts->scratch = malloc(bytes);
        if (hosts->scratch == NULL)
            return tu_error_memory("a collective across hosts", bytes);
        hosts->scratch_bytes = bytes;
    }
    *scratch = hosts->scratch;
    return TUTTI_OK;
}

tutti_call tu_hosts_call(tu_task *task) {
    int64_t left = tu_deadline_left(tu_task_deadline(task));
    return (tutti_call){ .size = sizeof(tutti_call), .timeout_ns = left > 0 ? left : 1 };
}

/* ---- messages ---- */

static bool still_missing(void *argument, int member) {
    const tu_round *round = argument;
    if (member == round->unreached)
        return true;
    for (int i = 0; i < round->receipt_count; i++)
        if (round->receipts[i].member == member && !round->receipts[i].done)
            return true;
    for (int i = 0; i < round->dispatch_count; i++)
        if (round->dispatches[i].member == member && !round->dispatches[i].done)
            return true;
    return false;
}

static void free_messages(tu_round *round) {
    if (round->receipts != round->few_receipts)
        free(round->receipts);
    if (round->dispatches != round->few_dispatches)
        free(round->dispatches);
    round->receipts = NULL;
    round->dispatches = NULL;
}

tutti_status tu_round_begin(tu_round *round, tu_hosts *hosts, tu_task *task, int room) {
    size_t count = (size_t)room;
    *round = (tu_round){ .hosts = hosts, .task = task, .room = room, .unreached = -1 };
    bool few = room <= TU_ROUND_FEW;
    round->receipts = few ? round->few_receipts : calloc(count, sizeof *round->receipts);
    round->dispatches = few ? round->few_dispatches : calloc(count, sizeof *round->dispatches);
    if (round->receipts == NULL || round->dispatches == NULL) {
        free_messages(round);
        return tu_error_memory("messages between hosts", count * (sizeof(tu_receipt) + sizeof(tu_dispatch)));
    }
    tu_group_wait_init(&round->wait, hosts->group, &task->info, task->ticket, tu_task_deadline(task), still_missing,
                       round);
    return TUTTI_OK;
}

/* The thread's error stays. */
static void abandon(tu_hosts *hosts) {
    tutti_error_copy error;
    tu_error_save(&error);
    tu_network_abandon(hosts->network);
    tu_error_restore(&error);
}

tutti_status tu_round_end(tu_round *round, tutti_status status) {
    if (status != TUTTI_OK)
        abandon(round->hosts);
    free_messages(round);
    return status;
}

static tutti_status in_words(tu_round *round, tutti_status status) {
    if (status == TUTTI_OK || status != TUTTI_ERROR_MISMATCH)
        return status == TUTTI_OK ? status : tu_group_wait_error(&round->wait, status);
    tu_network_other_call other;
    int member = tu_network_other(round->hosts->network, &other);
    size_t element = round->task->element > 0 ? round->task->element : 1; /* of a barrier: what came is not from us */
    if (other.unequal)
        return tu_mismatch_split(round->task->state, round->task, member, round->hosts->group->rank,
                                 other.sent_bytes / element, other.expected_bytes / element);
    tu_said mine, theirs;
    tu_say(&mine, &round->task->info, round->task->detail);
    memset(&theirs, 0, sizeof theirs);
    memcpy(&theirs, other.said.bytes, offsetof(tu_said, algorithm) + 1);
    return tu_mismatch_of(round->hosts->group, round->task, &mine, member, &theirs);
}

/* Of a try to connect to a member. */
static tutti_status reached(tu_round *round, int member, tutti_status status) {
    if (status == TUTTI_ERROR_TIMEOUT)
        round->unreached = member;
    return in_words(round, status);
}

static tutti_status expect(tu_round *round, tu_receipt made) {
    tutti_status status =
        reached(round, made.member, tu_network_expect(round->hosts->network, &round->wait, made.member));
    if (status == TUTTI_OK) {
        round->receipts[round->receipt_count] = made;
        tu_network_post(round->hosts->network, &round->receipts[round->receipt_count++]);
    }
    return status;
}

tutti_status tu_round_receive(tu_round *round, int member, uint32_t step, void *to, size_t bytes) {
    return expect(round, (tu_receipt){ .member = member, .step = step, .to = to, .bytes = bytes });
}

tutti_status tu_round_absorb(tu_round *round, int member, uint32_t step, tu_absorb *absorb, void *argument,
                             size_t bytes) {
    return expect(
        round, (tu_receipt){ .member = member, .step = step, .absorb = absorb, .argument = argument, .bytes = bytes });
}

tutti_status tu_round_send(tu_round *round, int member, uint32_t step, const void *from, size_t bytes) {
    tutti_status status = reached(round, member, tu_network_reach(round->hosts->network, &round->wait, member));
    if (status == TUTTI_OK)
        tu_network_send(round->hosts->network, &round->dispatches[round->dispatch_count++], member, step, from, bytes);
    return status;
}

static bool all_done(void *round) {
    return tu_round_is_done(round);
}

tutti_status tu_round_wait_for(tu_round *round, bool (*ready)(void *argument), void *argument) {
    return in_words(round, tu_network_wait(round->hosts->network, &round->wait, ready, argument));
}

tutti_status tu_round_wait(tu_round *round) {
    return tu_round_wait_for(round, all_done, round);
}

/* ---- running ---- */

/* Named operations have one algorithm each, on one host; between hosts they are the collectives that they are forms of:
 * the same results. */
static bool serves(const tutti_group *group, const tu_task *task) {
    tu_kind kind = task->row->kind;
    bool open = task->forced == TUTTI_ALGORITHM_AUTO || task->forced == task->row->fixed;
    return !group->local && task->custom == NULL && open &&
           (kind == TU_KIND_BARRIER || kind == TU_KIND_REDUCTION || kind == TU_KIND_MOVE || kind == TU_KIND_MESSAGE);
}

static void enter_saying(tu_hosts *hosts, tu_task *task) {
    tu_said said;
    tu_network_said sent = { .signature = tu_signature(task) };
    tu_say(&said, &task->info, task->detail);
    memcpy(sent.bytes, &said, offsetof(tu_said, algorithm) + 1);
    tu_network_enter_saying(hosts->network, task->info.sequence, &sent);
}

/* The others on this host may wait for this rank in a part of the operation: leaving ends the group, and their part
 * with it. A part that failed has done so already. */
static tutti_status fail(tu_hosts *hosts, const tu_task *task, tutti_status status) {
    abandon(hosts);
    return !task->ended && tu_group_overhear(hosts->group) ? tu_group_cause(hosts->group) : status;
}

static void note(tu_task *task) {
    tu_collective *state = task->state;
    state->ran = task->info;
    state->ran_by = task->executor;
    state->choice = (tu_choice){ .algorithm = (tutti_algorithm)task->info.algorithm,
                                 .from = task->executor->name,
                                 .any_order = task->info.algorithm == TUTTI_ALGORITHM_TREE ||
                                              task->info.algorithm == TUTTI_ALGORITHM_PIPELINED };
    state->direct_inputs = state->direct_outputs = 0;
}

static tutti_status run(tu_task *task) {
    tu_hosts *hosts = hosts_of(task->group);
    if (task->row->kind == TU_KIND_MESSAGE)
        return tu_message_run(task);
    if (task->row->kind == TU_KIND_REDUCTION && task->any_order)
        task->info.algorithm = (uint8_t)tu_hosts_choose(hosts, task); /* said with the call: all must ask alike */
    tu_task_record(task);
    enter_saying(hosts, task);
    if (hosts->part != NULL)
        hosts->part->outer = task;
    tutti_status status = task->row->kind == TU_KIND_BARRIER     ? tu_hosts_barrier(hosts, task)
                          : task->row->kind == TU_KIND_REDUCTION ? tu_hosts_reduce(hosts, task)
                                                                 : tu_hosts_move(hosts, task);
    if (status != TUTTI_OK)
        status = fail(hosts, task, status);
    if (hosts->part != NULL)
        hosts->part->outer = NULL;
    tu_network_leave(hosts->network);
    note(task);
    return status;
}

/* ---- works ---- */

static tutti_status start(tutti_work *work) {
    return work->task.row->kind == TU_KIND_MESSAGE ? tu_message_start(work) : tu_works_queue(work);
}

static tutti_status test(tutti_work *work, bool *finished) {
    if (work->request != NULL)
        tu_messages_poll(work->task.state);
    *finished = tu_work_done(work);
    return TUTTI_OK;
}

static tutti_status wait(tutti_work *work, int64_t deadline) {
    return work->request != NULL ? tu_messages_wait(work, deadline) : tu_works_wait(work, deadline);
}

const tu_executor tu_executor_hosts = { .name = "hosts",
                                        .takes_turns = true,
                                        .serves = serves,
                                        .prepare = prepare,
                                        .run = run,
                                        .start = start,
                                        .test = test,
                                        .wait = wait };
