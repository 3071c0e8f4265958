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

#define START 14695981039346656037u /* of hashes */
#define WORDS 384                   /* bytes of what a rank says of itself where ranks differ */

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

/* The next collective of the group in the graph, behind `vertex`, or the first; NULL: there is none. */
static const tu_vertex *next_in(const tt_graph *graph, const tutti_group *group, const tu_vertex *vertex) {
    vertex = vertex != NULL ? vertex->next : graph->first;
    while (vertex != NULL &&
           !(tu_vertex_group(vertex) == group && tu_vertex_communicates(vertex) && !is_uneven(vertex)))
        vertex = vertex->next;
    return vertex;
}

static uint64_t hash_group(const tt_graph *graph, const tutti_group *group, uint64_t *count) {
    uint64_t hash = START;
    *count = 0;
    for (const tu_vertex *at = NULL; (at = next_in(graph, group, at)) != NULL; *count += 1)
        hash = hash_vertex(hash, at);
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

/* What a rank tells: what it is about to do, and, where it runs what it compiled, the hash and the number of its
 * collectives. */
typedef struct ballot {
    uint64_t vote, hash, count;
} ballot;

/* The first rank that is about to do something else than this one; this one where all do the same. */
static int other_vote(const ballot *all, int rank, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (all[i].vote != all[rank].vote)
            return (int)i;
    return rank;
}

/* The first place at which the lists of hashes of all ranks are not the same, and the first rank that has another one
 * there than this rank. */
static tutti_status find_place(const tt_graph *graph, tutti_group *group, size_t most, size_t *place, int *other) {
    size_t size = (size_t)tutti_group_size(group), rank = (size_t)tutti_group_rank(group);
    uint64_t *all = calloc((size + 1) * most + 1, sizeof *all), *mine = all != NULL ? all + size * most : NULL;
    const tu_vertex *at = NULL;
    if (all == NULL)
        return tu_error_memory("votes", (size + 1) * most * sizeof *all);
    for (size_t i = 0; i < most && (at = next_in(graph, group, at)) != NULL; i++)
        mine[i] = hash_vertex(START, at);
    tutti_status status = tutti_all_gather(group, mine, all, most, TUTTI_U64, NULL);
    bool same = true;
    for (*place = 0; status == TUTTI_OK && *place < most; *place += 1) {
        for (size_t i = 0; i < size && same; i++) {
            same = all[i * most + *place] == all[rank * most + *place];
            *other = (int)i;
        }
        if (!same)
            break;
    }
    free(all);
    return status;
}

/* What this rank's collective at that place is. */
static void describe_place(const tt_graph *graph, const tutti_group *group, size_t place, char *words) {
    const tu_vertex *at = next_in(graph, group, NULL);
    for (size_t i = 0; i < place && at != NULL; i++)
        at = next_in(graph, group, at);
    if (at == NULL) {
        snprintf(words, WORDS, "there is none any more");
        return;
    }
    snprintf(words, WORDS, "%s%s", at->entry->name, at->in_place ? "_" : "");
    for (int i = 0; i < at->operand_count; i++) {
        const tu_value *value = at->operands[i].value;
        if (value != NULL)
            snprintf(words + strlen(words), WORDS - strlen(words), "%s %s %s", i == 0 ? " of" : ",",
                     tutti_dtype_name(value->shape.dtype), tu_dims_text(value->shape.ndim, value->shape.sizes));
    }
    if (tu_vertex_dim(at) >= 0)
        snprintf(words + strlen(words), WORDS - strlen(words), ", dimension %d", tu_vertex_dim(at));
    if (tu_vertex_reduction(at) != 0)
        snprintf(words + strlen(words), WORDS - strlen(words), ", %s", tutti_reduction_name(tu_vertex_reduction(at)));
}

/* All ranks come here, since each has seen that they differ: they tell each other where, or why. */
static tutti_status tell_difference(const char *name, const tt_graph *graph, tutti_group *group, const ballot *all,
                                    const char *why) {
    size_t size = (size_t)tutti_group_size(group), most = 0, place = 0;
    int rank = tutti_group_rank(group), other = other_vote(all, rank, size);
    bool ready = true;
    char mine[WORDS] = "", *words = calloc(size, WORDS);
    if (words == NULL)
        return tu_error_memory("votes", size * WORDS);
    for (size_t i = 0; i < size; i++) {
        ready = ready && all[i].vote == TU_VOTE_READY;
        most = all[i].count > most ? (size_t)all[i].count : most;
    }
    tutti_status status = ready ? find_place(graph, group, most, &place, &other) : TUTTI_OK;
    if (ready)
        describe_place(graph, group, place, mine);
    else if (all[rank].vote != TU_VOTE_READY && why[0] != 0)
        snprintf(mine, sizeof mine, " (%.300s)", why);
    if (status == TUTTI_OK)
        status = tutti_all_gather(group, mine, words, WORDS, TUTTI_U8, NULL);
    const char *of_other = words + (size_t)other * WORDS;
    if (status == TUTTI_OK && ready)
        status = tu_error(TUTTI_ERROR_MISMATCH,
                          "compiled %s: collective %zu of group \"%s\" is %s on rank %d, and on this rank, %d, %s; all "
                          "ranks must call the same function with inputs that lead to the same collectives",
                          name, place, tutti_group_name(group), of_other, other, rank, mine);
    else if (status == TUTTI_OK)
        status = tu_error(TUTTI_ERROR_MISMATCH,
                          "compiled %s: in group \"%s\" rank %d %s%s, and this rank, %d, %s%s; all ranks must do the "
                          "same",
                          name, tutti_group_name(group), other, act_of(all[other].vote), of_other, rank,
                          act_of(all[rank].vote), mine);
    free(words);
    return status;
}

static tutti_status vote_in(const char *name, const tt_graph *graph, tutti_group *group, const ballot *mine,
                            const char *why) {
    size_t size = (size_t)tutti_group_size(group);
    ballot *all = calloc(size, sizeof *all);
    if (all == NULL)
        return tu_error_memory("votes", size * sizeof *all);
    tutti_status status = tutti_all_gather(group, mine, all, sizeof *mine / sizeof(uint64_t), TUTTI_U64, NULL);
    bool differ = false;
    for (size_t i = 1; i < size && status == TUTTI_OK; i++)
        differ = differ || all[i].vote != all[0].vote || all[i].hash != all[0].hash;
    if (differ)
        status = tell_difference(name, graph, group, all, why);
    if (status == TUTTI_ERROR_MISMATCH && !differ) {
        char cause[WORDS];
        snprintf(cause, sizeof cause, "%s", tutti_error_message());
        status =
            tu_error(TUTTI_ERROR_MISMATCH,
                     "compiled %s: this rank, %d, has captured it anew and asks the others of group \"%s\" whether "
                     "they did the same, by an all_gather; one of them runs a collective instead, since it had no "
                     "reason to capture: all ranks must call with inputs of the same sizes and kinds (%s)",
                     name, tutti_group_rank(group), tutti_group_name(group), cause);
    }
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
tutti_status tu_agree(const char *name, const tt_graph *graph, tu_vote vote, const char *why, tu_agreed **agreed) {
    tutti_group **groups;
    int count;
    tutti_status first = list_groups(graph, &groups, &count);
    tutti_error_copy error;
    for (int i = 0; i < count; i++) {
        ballot mine = { .vote = vote };
        uint64_t hash = hash_group(graph, groups[i], &mine.count);
        if (vote == TU_VOTE_READY && is_agreed(*agreed, groups[i], hash))
            continue;
        mine.hash = vote == TU_VOTE_READY ? hash : 0;
        tutti_status status = vote_in(name, graph, groups[i], &mine, why);
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
