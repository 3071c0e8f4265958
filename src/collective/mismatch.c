/* SPDX-License-Identifier: Apache-2.0
 *
 * Saying what was called, comparing it, and the message when two ranks differ: both sides, and in what they differ.
 */
#include <stdio.h>
#include <string.h>

#include "collective/collective.h"

/* "all_reduce (f32 sum, 4096 elements, two_shot)" */
static void describe(const tu_said *said, char *text, size_t bytes) {
    const tu_operation_row *row = tu_operation_row_of(said->operation);
    int at = snprintf(text, bytes, "%s%s", row->name, row->of_records ? "" : " (");
    if (row->of_records)
        return;
    if (said->dtype != 0)
        at += snprintf(text + at, bytes - (size_t)at, "%s ", tutti_dtype_name((tutti_dtype)said->dtype));
    if (said->reduction != 0)
        at += snprintf(text + at, bytes - (size_t)at, "%s ", tutti_reduction_name((tutti_reduction)said->reduction));
    if (said->dtype != 0)
        at += snprintf(text + at, bytes - (size_t)at, "%llu element%s, ", (unsigned long long)said->count,
                       said->count == 1 ? "" : "s");
    if (said->root >= 0)
        at += snprintf(text + at, bytes - (size_t)at, "root %d, ", said->root);
    snprintf(text + at, bytes - (size_t)at, "%s)", tutti_algorithm_name((tutti_algorithm)said->algorithm));
}

static void add(char *text, size_t bytes, const char *what) {
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s", used == 0 ? "" : ", ", what);
}

static void differences(const tu_said *mine, const tu_said *theirs, char *text, size_t bytes) {
    text[0] = 0;
    if (mine->operation != theirs->operation)
        add(text, bytes, "operation");
    if (mine->count != theirs->count)
        add(text, bytes, "count");
    if (mine->dtype != theirs->dtype)
        add(text, bytes, "dtype");
    if (mine->reduction != theirs->reduction)
        add(text, bytes, "reduction");
    if (mine->root != theirs->root)
        add(text, bytes, "root");
    if (mine->algorithm != theirs->algorithm)
        add(text, bytes, "algorithm");
    if (mine->detail != theirs->detail && mine->operation == theirs->operation)
        add(text, bytes,
            tu_operation_row_of(mine->operation)->flow == TU_FLOW_PERMUTED ? "destinations" : "counts of the ranks");
    if (mine->sequence != theirs->sequence)
        add(text, bytes, "order (their numbers in the group differ)");
}

tutti_status tu_mismatch_of(const tutti_group *group, const tu_task *task, const tu_said *mine, int member,
                            const tu_said *theirs) {
    char my_text[160], their_text[160], what[160];
    describe(mine, my_text, sizeof my_text);
    describe(theirs, their_text, sizeof their_text);
    differences(mine, theirs, what, sizeof what);
    if (what[0] == 0)
        add(what, sizeof what, "nothing that they say, so that one's memory may have been overwritten");
    tu_error(TUTTI_ERROR_MISMATCH,
             "the ranks disagree in operation %llu of group %s: rank %d called %s, rank %d called %s; they differ "
             "in %s. All ranks of a group must call the same operations with the same arguments in the same order",
             (unsigned long long)mine->sequence, group->name, group->rank, my_text, member, their_text, what);
    tu_error_at_fault(member);
    tu_error_where(group->name, task->row->name, task->info.sequence, group->rank);
    return TUTTI_ERROR_MISMATCH;
}

tutti_status tu_mismatch(tu_collective *state, tu_task *task, uint64_t epoch, int member) {
    return tu_mismatch_of(tu_group_known(state->group), tu_task_called(task),
                          &state->members[state->rank]->said[epoch & 1], tu_group_known_rank(state->group, member),
                          &state->members[member]->said[epoch & 1]);
}

tutti_status tu_mismatch_split(tu_collective *state, tu_task *task, int from, int to, uint64_t sent,
                               uint64_t expected) {
    const tu_task *called = tu_task_called(task);
    const tutti_group *group = tu_group_known(state->group);
    if (called != task && called->element > 0) { /* parts move bytes */
        sent = sent * task->element / called->element;
        expected = expected * task->element / called->element;
    }
    from = tu_group_known_rank(state->group, from);
    to = tu_group_known_rank(state->group, to);
    tu_error(TUTTI_ERROR_MISMATCH,
             "the ranks disagree in %s %llu of group %s: rank %d sends %llu element%s to rank %d, which "
             "expects %llu from it",
             called->row->name, (unsigned long long)called->info.sequence, group->name, from, (unsigned long long)sent,
             sent == 1 ? "" : "s", to, (unsigned long long)expected);
    tu_error_at_fault(from == group->rank ? to : from);
    tu_error_where(group->name, called->row->name, called->info.sequence, group->rank);
    return TUTTI_ERROR_MISMATCH;
}
