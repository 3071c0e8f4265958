/* SPDX-License-Identifier: Apache-2.0
 *
 * Agreement between ranks. A schedule is the list of collectives in the order of the graph; every rank of a group must
 * have the same. Ranks compare a hash of it once, before an entry first runs, with what they are about to do: run it,
 * run the function itself, or neither, because it could not be built. Groups are visited in the order of their names,
 * so that ranks that share several groups meet in one order; every wait has the group's deadline.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/collective.h>
#include <tutti/group.h>

#include "compile/entry.h"

/* ---- hashing ---- */

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

/* Whether what the vertex exchanges may differ from rank to rank: lists of sizes, and messages from rank to rank. */
static bool is_uneven(const tu_vertex *vertex) {
    for (int i = 0; i < vertex->entry->argument_count; i++)
        if (vertex->entry->arguments[i].type == TT_ARGUMENT_INTS)
            return true;
    return strstr(vertex->entry->name, "send") != NULL || strstr(vertex->entry->name, "recv") != NULL ||
           strstr(vertex->entry->name, "vdev") != NULL;
}

static uint64_t hash_vertex(uint64_t hash, const tu_vertex *vertex) {
    int facts[] = { vertex->in_place, (int)tu_vertex_reduction(vertex), tu_vertex_dim(vertex), vertex->operand_count };
    hash = mix(hash, vertex->entry->name, strlen(vertex->entry->name) + 1);
    hash = mix(hash, facts, sizeof facts);
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL)
            continue;
        hash = mix(hash, &value->shape.dtype, sizeof value->shape.dtype);
        hash = mix(hash, value->shape.sizes, (size_t)value->shape.ndim * sizeof value->shape.sizes[0]);
    }
    return hash;
}

static uint64_t hash_group(const tt_graph *graph, const tutti_group *group) {
    uint64_t hash = 14695981039346656037u;
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        if (tu_vertex_group(vertex) == group && tu_vertex_communicates(vertex) && !is_uneven(vertex))
            hash = hash_vertex(hash, vertex);
    return hash;
}

/* ---- groups ---- */

static int compare_names(const void *left, const void *right) {
    return strcmp(tutti_group_name(*(tutti_group *const *)left), tutti_group_name(*(tutti_group *const *)right));
}

static tutti_status list_groups(const tt_graph *graph, tutti_group ***list, int *count) {
    tutti_group **groups = calloc((size_t)graph->vertex_count + 1, sizeof(tutti_group *));
    *list = groups;
    *count = 0;
    if (groups == NULL)
        return tu_error_memory("a list of groups", (size_t)graph->vertex_count * sizeof *groups);
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        tutti_group *group = tu_vertex_communicates(vertex) ? tu_vertex_group(vertex) : NULL;
        bool known = group == NULL || tutti_group_size(group) == 1;
        for (int i = 0; i < *count && !known; i++)
            known = groups[i] == group;
        if (!known)
            groups[(*count)++] = group;
    }
    qsort(groups, (size_t)*count, sizeof *groups, compare_names);
    return TUTTI_OK;
}

/* ---- voting ---- */

static const char *act_of(uint64_t vote) {
    return vote == TU_VOTE_READY   ? "runs what it compiled"
           : vote == TU_VOTE_EAGER ? "runs the function itself"
                                   : "could not build it";
}

static tutti_status compare_all(const char *name, const tutti_group *group, const uint64_t *all) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    for (int i = 0; i < size; i++) {
        if (all[2 * i] != all[2 * rank])
            return tu_error(TUTTI_ERROR_MISMATCH,
                            "compiled %s: in group \"%s\" rank %d %s, and this rank, %d, %s; all ranks must "
                            "do the same",
                            name, tutti_group_name(group), i, act_of(all[2 * i]), rank, act_of(all[2 * rank]));
        if (all[2 * i + 1] != all[2 * rank + 1])
            return tu_error(TUTTI_ERROR_MISMATCH,
                            "compiled %s: ranks %d and %d of group \"%s\" have compiled different "
                            "collectives, or in another order; all ranks must call the same function with inputs that "
                            "lead to the same collectives",
                            name, i, rank, tutti_group_name(group));
    }
    return TUTTI_OK;
}

static tutti_status vote_in(const char *name, tutti_group *group, tu_vote vote, uint64_t hash) {
    uint64_t mine[2] = { vote, vote == TU_VOTE_READY ? hash : 0 };
    uint64_t *all = calloc((size_t)tutti_group_size(group) * 2, sizeof *all);
    if (all == NULL)
        return tu_error_memory("votes", (size_t)tutti_group_size(group) * sizeof mine);
    tutti_status status = tutti_all_gather(group, mine, all, 2, TUTTI_U64, NULL);
    if (status == TUTTI_OK)
        status = compare_all(name, group, all);
    free(all);
    return status;
}

static bool is_agreed(const tu_agreed *agreed, const tutti_group *group, uint64_t hash) {
    for (; agreed != NULL; agreed = agreed->next)
        if (agreed->group == group && agreed->hash == hash)
            return true;
    return false;
}

static tutti_status remember(tu_agreed **agreed, tutti_group *group, uint64_t hash) {
    tu_agreed *one = malloc(sizeof *one);
    if (one == NULL)
        return tu_error_memory("an agreement", sizeof *one);
    *one = (tu_agreed){ *agreed, group, hash };
    *agreed = one;
    return TUTTI_OK;
}

/* The first error is told; the other groups are visited all the same, since their ranks wait. */
tutti_status tu_agree(const char *name, const tt_graph *graph, tu_vote vote, tu_agreed **agreed) {
    tutti_group **groups;
    int count;
    tutti_status first = list_groups(graph, &groups, &count);
    tutti_error_copy error;
    for (int i = 0; i < count; i++) {
        uint64_t hash = hash_group(graph, groups[i]);
        if (vote == TU_VOTE_READY && is_agreed(*agreed, groups[i], hash))
            continue;
        tutti_status status = vote_in(name, groups[i], vote, hash);
        if (status == TUTTI_OK && vote == TU_VOTE_READY)
            status = remember(agreed, groups[i], hash);
        if (status != TUTTI_OK && first == TUTTI_OK) {
            first = status;
            tu_error_save(&error);
        }
    }
    free(groups);
    return first == TUTTI_OK || count == 0 ? first : tu_error_restore(&error);
}

void tu_agreed_end(tu_agreed *agreed) {
    for (tu_agreed *next; agreed != NULL; agreed = next) {
        next = agreed->next;
        free(agreed);
    }
}
