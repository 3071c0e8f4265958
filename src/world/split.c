/* SPDX-License-Identifier: Apache-2.0
 *
 * tutti_group_split: all lists in one agreement of the parent.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "world/create.h"
#include "world/registry.h"
#include "world/sha1.h"

/* The caller's own list as world ranks, sorted by parent rank; *count 0 when it is in none. */
static tutti_status own_list(const tutti_group *parent, const int *const *lists, const int *counts, int list_count,
                             bool keep_order, int **ranks, int *count) {
    *count = 0;
    *ranks = NULL;
    for (int i = 0; i < list_count; i++) {
        if (tu_rank_index(lists[i], counts[i], parent->rank) < 0)
            continue;
        *ranks = malloc(sizeof(int) * (size_t)counts[i]);
        if (*ranks == NULL)
            return tu_error_memory("a list of ranks", sizeof(int) * (size_t)counts[i]);
        *count = counts[i];
        memcpy(*ranks, lists[i], sizeof(int) * (size_t)counts[i]);
        if (!keep_order)
            qsort(*ranks, (size_t)counts[i], sizeof(int), tu_ranks_ascending);
        for (int j = 0; j < counts[i]; j++)
            (*ranks)[j] = parent->ranks[(*ranks)[j]];
        return TUTTI_OK;
    }
    return TUTTI_OK;
}

static void describe_lists(tu_agreement *mine, const int *const *lists, const int *counts, int list_count,
                           const tutti_group_options *options) {
    size_t total = 0;
    for (int i = 0; i < list_count; i++)
        total += (size_t)counts[i] + 1;
    char text[sizeof mine->text] = "lists ";
    int *all = malloc(total * sizeof(int) + 256);
    if (all == NULL) {
        tu_agreement_refuse(mine, tu_error_memory("an agreement", total * sizeof(int)));
        return;
    }
    size_t at = 0;
    for (int i = 0; i < list_count; i++) {
        char list[96];
        tu_ranks_text(lists[i], counts[i], list, sizeof list);
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "[%s]", list);
        memcpy(all + at, lists[i], sizeof(int) * (size_t)counts[i]);
        at += (size_t)counts[i];
        all[at++] = -1;
    }
    int more = snprintf((char *)(all + at), 256, "|%s|%s|%lld|%d", options->name != NULL ? options->name : "",
                        options->tag, (long long)options->timeout_ns, options->keep_order);
    tu_sha1(all, at * sizeof(int) + (size_t)more, mine->digest);
    memcpy(mine->text, text, sizeof text);
    free(all);
}

/* Prepares this rank's part of a split; what cannot be done goes into the agreement. */
static void prepare_split(tutti_group *parent, const int *ranks, int count, const tutti_group_options *options,
                          tu_agreement *mine, tutti_group **group, const tu_piece **piece) {
    tutti_world *world = parent->world;
    char name[64], description[64];
    uint64_t key;
    pthread_mutex_lock(&world->lock);
    tutti_status status = tu_group_hashed_name(world, ranks, count, name, &key);
    if (status == TUTTI_OK && options->name != NULL) {
        snprintf(name, sizeof name, "%s", options->name);
        if (tu_registry_name(world->registry, name) != NULL)
            status = tu_error(TUTTI_ERROR_EXISTS, "the group name \"%s\" is already in use in this world", name);
    }
    pthread_mutex_unlock(&world->lock);
    if (strcmp(options->description, "undefined") == 0)
        snprintf(description, sizeof description, "%.44s:split:%u", parent->description,
                 atomic_load_explicit(&parent->splits, memory_order_relaxed));
    else
        snprintf(description, sizeof description, "%s", options->description);
    tu_group_plan plan = { .name = name,
                           .description = description,
                           .key = key,
                           .ranks = ranks,
                           .count = count,
                           .timeout_ns = options->timeout_ns };
    if (status == TUTTI_OK)
        status = tu_group_reserve(world, &plan, group, piece);
    if (status != TUTTI_OK)
        tu_agreement_refuse(mine, status);
}

tutti_status tutti_group_split(tutti_group *parent, const int *const *lists, const int *counts, int list_count,
                               const tutti_group_options *given, tutti_group **out) {
    tutti_group_options options;
    tutti_status status = tu_group_check_parent("tutti_group_split", parent, out, given, &options);
    if (status != TUTTI_OK)
        return status;
    TU_INSIDE(parent->world);
    status = tu_rank_lists_check(lists, counts, list_count, parent->size, "group rank");
    int *ranks;
    int count;
    if (status == TUTTI_OK)
        status = own_list(parent, lists, counts, list_count, options.keep_order, &ranks, &count);
    if (status != TUTTI_OK)
        return status;
    tu_agreement mine = { .member = 0 };
    describe_lists(&mine, lists, counts, list_count, &options);
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    if (count > 0 && mine.status == TUTTI_OK)
        prepare_split(parent, ranks, count, &options, &mine, &group, &piece);
    free(ranks);
    tu_undertaking task = { .operation = TU_OPERATION_GROUP_SPLIT,
                            .purpose = "group_split",
                            .mine = mine,
                            .timeout_ns = options.timeout_ns,
                            .group = group,
                            .piece = piece,
                            .tag = options.tag };
    status = tu_undertake(parent, &task);
    if (status == TUTTI_OK)
        atomic_fetch_add_explicit(&parent->splits, 1, memory_order_relaxed);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        return status;
    }
    *out = group != NULL ? group : TUTTI_NON_GROUP_MEMBER;
    return TUTTI_OK;
}
