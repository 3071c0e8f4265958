/* SPDX-License-Identifier: Apache-2.0
 *
 * How groups come about: always by an agreement (agreement.c). Who takes part: the whole world (tutti_group_new), the
 * members alone (local synchronisation), or a parent (split.c).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "world/create.h"
#include "world/registry.h"
#include "world/sha1.h"

/* ---- arguments ---- */

void tu_ranks_text(const int *ranks, int count, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < count; i++) {
        if (used + 16 > bytes) {
            snprintf(text + used, bytes - used, ", …");
            return;
        }
        used += (size_t)snprintf(text + used, bytes - used, i > 0 ? ", %d" : "%d", ranks[i]);
    }
}

int tu_ranks_ascending(const void *left, const void *right) {
    int a = *(const int *)left, b = *(const int *)right;
    return (a > b) - (a < b);
}

/* A checked copy of the rank list, sorted unless told otherwise; to be freed. */
static tutti_status take_ranks(const tutti_world *world, const int *ranks, int count, bool keep_order, int **out) {
    if (ranks == NULL)
        count = world->size;
    if (count <= 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a group needs at least one rank; %d were given", count);
    if (ranks != NULL && count > world->size)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the group's %d ranks are more than the world's %d", count, world->size);
    int *copy = malloc(2 * sizeof(int) * (size_t)count);
    if (copy == NULL)
        return tu_error_memory("a list of ranks", 2 * sizeof(int) * (size_t)count);
    int *sorted = copy + count;
    for (int i = 0; i < count; i++)
        copy[i] = ranks != NULL ? ranks[i] : i;
    memcpy(sorted, copy, sizeof(int) * (size_t)count);
    qsort(sorted, (size_t)count, sizeof(int), tu_ranks_ascending);
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < count && status == TUTTI_OK; i++)
        if (sorted[i] == sorted[i - 1])
            status = tu_error(TUTTI_ERROR_ARGUMENT, "rank %d is twice in the list of ranks", sorted[i]);
    if (status == TUTTI_OK && (sorted[0] < 0 || sorted[count - 1] >= world->size))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "rank %d is not in this world, whose ranks are 0 to %d",
                          sorted[0] < 0 ? sorted[0] : sorted[count - 1], world->size - 1);
    if (status != TUTTI_OK) {
        free(copy);
        return status;
    }
    if (!keep_order)
        memcpy(copy, sorted, sizeof(int) * (size_t)count);
    *out = copy;
    return TUTTI_OK;
}

tutti_status tu_group_options_take(const tutti_group_options *given, tutti_group_options *options) {
    tutti_status status = tu_options_copy("tutti_group_options", given, options, sizeof *options);
    if (status != TUTTI_OK)
        return status;
    if (options->tag == NULL)
        options->tag = "";
    if (options->description == NULL)
        options->description = "undefined";
    if (options->timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "timeout_ns is %lld; it must be 0 (the world's) or more",
                        (long long)options->timeout_ns);
    if (strlen(options->tag) > 80)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a tag has at most 80 characters; this one has %zu",
                        strlen(options->tag));
    if (strncmp(options->tag, "ptd:", 4) == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the tag \"%s\" is reserved: \"ptd:\" marks groups without a tag",
                        options->tag);
    if (options->name != NULL && (options->name[0] == 0 || strlen(options->name) > 63))
        return tu_error(TUTTI_ERROR_ARGUMENT, "a group's name has 1 to 63 characters; \"%s\" has %zu", options->name,
                        strlen(options->name));
    return TUTTI_OK;
}

tutti_status tu_group_check_parent(const char *who, const tutti_group *parent, const void *out,
                                   const tutti_group_options *given, tutti_group_options *options) {
    if (parent == NULL || parent == TUTTI_NON_GROUP_MEMBER || out == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s needs a parent group of which this rank is a member, and a place for the result", who);
    *options = (tutti_group_options)TUTTI_GROUP_OPTIONS_INIT;
    tutti_status status = tu_world_check(parent->world);
    return status == TUTTI_OK ? tu_group_options_take(given, options) : status;
}

tutti_status tu_rank_lists_check(const int *const *lists, const int *counts, int list_count, int size,
                                 const char *what) {
    if (lists == NULL || counts == NULL || list_count <= 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the list of lists of %ss is empty", what);
    bool *seen = calloc((size_t)size, sizeof *seen);
    if (seen == NULL)
        return tu_error_memory("lists of ranks", (size_t)size);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < list_count && status == TUTTI_OK; i++) {
        if (lists[i] == NULL || counts[i] <= 0)
            status = tu_error(TUTTI_ERROR_ARGUMENT, "list %d of %ss is empty", i, what);
        for (int j = 0; status == TUTTI_OK && j < counts[i]; j++) {
            int rank = lists[i][j];
            if (rank < 0 || rank >= size)
                status = tu_error(TUTTI_ERROR_ARGUMENT, "%s %d in list %d is not in [0, %d)", what, rank, i, size);
            else if (seen[rank])
                status =
                    tu_error(TUTTI_ERROR_ARGUMENT, "%s %d appears twice; a rank can be in one list only", what, rank);
            else
                seen[rank] = true;
        }
    }
    free(seen);
    return status;
}

/* ---- the steps that all ways share ---- */

tutti_status tu_group_hashed_name(tutti_world *world, const int *ranks, int count, char name[64], uint64_t *key) {
    tu_rank_list *list = tu_registry_ranks(world->registry, ranks, count);
    char *text = malloc(12 * (size_t)count + 24);
    if (list == NULL || text == NULL) {
        free(text);
        return tu_error_memory("the name of a group", 12 * (size_t)count + 24);
    }
    size_t used = 0;
    for (int i = 0; i < count; i++)
        used += (size_t)sprintf(text + used, "%d_", ranks[i]);
    for (uint64_t number = list->living;; number++) {
        int more = sprintf(text + used, "%llu", (unsigned long long)number);
        tu_sha1_text(text, used + (size_t)more, name);
        if (tu_registry_name(world->registry, name) == NULL)
            break;
    }
    int more = sprintf(text + used, "#%llu", (unsigned long long)list->created++);
    char digest[41];
    tu_sha1_text(text, used + (size_t)more, digest);
    *key = tu_group_key("members %s", digest);
    free(text);
    return TUTTI_OK;
}

tutti_status tu_group_reserve(tutti_world *world, const tu_group_plan *plan, tutti_group **group,
                              const tu_piece **piece) {
    tutti_status status = tu_group_make(world, plan, group);
    if (status != TUTTI_OK)
        return status;
    status = tu_group_page_reserve(*group, piece);
    if (status != TUTTI_OK) {
        tutti_group_release(*group);
        *group = NULL;
    }
    return status;
}

/* ---- the default group ---- */

tutti_status tu_group_make_default(tutti_world *world, int64_t deadline) {
    int *ranks = malloc(sizeof(int) * (size_t)world->size);
    if (ranks == NULL)
        return tu_error_memory("the ranks of the world", sizeof(int) * (size_t)world->size);
    for (int i = 0; i < world->size; i++)
        ranks[i] = i;
    char name[24];
    snprintf(name, sizeof name, "%llu", (unsigned long long)tu_registry_number(world->registry));
    tu_group_plan plan = {
        .name = name, .description = "default_pg", .key = tu_group_key("default"), .ranks = ranks, .count = world->size
    };
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    tutti_status status = tu_group_reserve(world, &plan, &group, &piece);
    free(ranks);
    if (status != TUTTI_OK)
        return status;
    if (group->page == NULL || world->local_size == world->size)
        status = world->size > 1 && !world->fake ? tu_group_share_page(group, piece, deadline, NULL, 0) : TUTTI_OK;
    else if (world->size > 1 && !world->fake) /* nobody leaves the store before all have found each other */
        status = tutti_store_barrier(world->store, "opened", world->size,
                                     tu_deadline_left(deadline) > 0 ? tu_deadline_left(deadline) : 1);
    if (status == TUTTI_OK)
        status = tu_group_make_part(group, deadline, NULL, 0);
    if (status == TUTTI_OK)
        status = tu_group_register(group, NULL);
    if (status == TUTTI_OK)
        world->group = group;
    tutti_group_release(group); /* the registry has its own */
    return status;
}

/* ---- by agreement of the members, or of the world ---- */

static tutti_status new_local(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                              tutti_group **out) {
    char name[64];
    uint64_t key;
    pthread_mutex_lock(&world->lock);
    tutti_group *existing = options->tag[0] != 0 ? tu_registry_find(world->registry, options->tag, ranks, count) : NULL;
    tutti_group_keep(existing);
    tutti_status status = tu_group_hashed_name(world, ranks, count, name, &key);
    pthread_mutex_unlock(&world->lock);
    if (status != TUTTI_OK) {
        tutti_group_release(existing);
        return status;
    }
    if (existing != NULL) {
        *out = existing;
        return TUTTI_OK;
    }
    if (options->name != NULL)
        snprintf(name, sizeof name, "%s", options->name);
    tu_group_plan plan = { .name = name,
                           .description = options->description,
                           .key = key,
                           .ranks = ranks,
                           .count = count,
                           .timeout_ns = options->timeout_ns };
    tu_agreement mine = { .member = 1 };
    tu_agreement_describe(&mine, name, options->tag, ranks, count, options->timeout_ns);
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    status = tu_group_reserve(world, &plan, &group, &piece);
    if (status != TUTTI_OK)
        tu_agreement_refuse(&mine, status);
    tu_undertaking task = { .purpose = "group_new",
                            .mine = mine,
                            .timeout_ns = options->timeout_ns,
                            .group = group,
                            .piece = piece,
                            .tag = options->tag };
    status = tu_undertake_alone(world, &plan, &task);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        return status;
    }
    *out = group;
    return TUTTI_OK;
}

static tutti_status new_in_world(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                                 tutti_group **out) {
    bool member = tu_rank_index(ranks, count, world->rank) >= 0;
    pthread_mutex_lock(&world->lock);
    uint64_t number = tu_registry_number(world->registry);
    tutti_group *existing =
        member && options->tag[0] != 0 ? tu_registry_find(world->registry, options->tag, ranks, count) : NULL;
    tutti_group_keep(existing);
    char name[64];
    if (options->name != NULL)
        snprintf(name, sizeof name, "%s", options->name);
    else
        snprintf(name, sizeof name, "%llu", (unsigned long long)number);
    bool taken = member && existing == NULL && tu_registry_name(world->registry, name) != NULL;
    pthread_mutex_unlock(&world->lock);

    tu_agreement mine = { .member = member, .exists = existing != NULL };
    tu_agreement_describe(&mine, name, options->tag, ranks, count, options->timeout_ns);
    tu_group_plan plan = { .name = name,
                           .description = options->description,
                           .key = tu_group_key("number %llu", (unsigned long long)number),
                           .ranks = ranks,
                           .count = count,
                           .timeout_ns = options->timeout_ns };
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    if (taken)
        tu_agreement_refuse(
            &mine, tu_error(TUTTI_ERROR_EXISTS, "the group name \"%s\" is already in use in this world", name));
    if (member && existing == NULL && mine.status == TUTTI_OK) {
        tutti_status status = tu_group_reserve(world, &plan, &group, &piece);
        if (status != TUTTI_OK)
            tu_agreement_refuse(&mine, status);
    }
    tu_undertaking task = { .operation = TU_OPERATION_GROUP_NEW,
                            .purpose = "group_new",
                            .mine = mine,
                            .timeout_ns = options->timeout_ns,
                            .group = group,
                            .piece = piece,
                            .tag = options->tag };
    tutti_status status = tu_undertake(world->group, &task);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        tutti_group_release(existing);
        return status;
    }
    *out = existing != NULL ? existing : group != NULL ? group : TUTTI_NON_GROUP_MEMBER;
    return TUTTI_OK;
}

tutti_status tu_group_new(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                          tutti_group **group) {
    if (ranks == NULL)
        count = world->size;
    int *list;
    tutti_status status = take_ranks(world, ranks, count, options->keep_order, &list);
    if (status != TUTTI_OK)
        return status;
    if (!options->local_synchronization)
        status = new_in_world(world, list, count, options, group);
    else if (tu_rank_index(list, count, world->rank) >= 0)
        status = new_local(world, list, count, options, group);
    else
        *group = TUTTI_NON_GROUP_MEMBER;
    free(list);
    return status;
}

tutti_status tutti_group_new(tutti_world *world, const int *ranks, int count, const tutti_group_options *given,
                             tutti_group **group) {
    TU_INSIDE(world);
    tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_group_options_take(given, &options);
    if (status == TUTTI_OK && group == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_new: where the group goes is NULL");
    return status == TUTTI_OK ? tu_group_new(world, ranks, count, &options, group) : status;
}

/* ---- find or create ---- */

tutti_status tutti_group_find_or_new(tutti_world *world, const char *tag, const int *ranks, int count, int stride,
                                     tutti_group **group) {
    tutti_status status = tu_world_check(world);
    if (status != TUTTI_OK)
        return status;
    if (ranks == NULL || count <= 0 || group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_group_find_or_new needs a list of ranks, and a place for the result");
    if (stride <= 0 || count % stride != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%d ranks cannot be cut into blocks of %d", count, stride);
    const int *block = NULL;
    for (int at = 0; at < count; at += stride)
        if (tu_rank_index(ranks + at, stride, world->rank) >= 0)
            block = ranks + at;
    if (block == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "this rank, %d, is in none of the blocks of the list", world->rank);
    int *sorted;
    status = take_ranks(world, block, stride, false, &sorted);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&world->lock);
    tutti_group *found = tutti_group_keep(tu_registry_find(world->registry, tag, sorted, stride));
    pthread_mutex_unlock(&world->lock);
    if (found != NULL) {
        *group = found;
    } else if (tag == NULL || tag[0] == 0) {
        char list[128];
        tu_ranks_text(sorted, stride, list, sizeof list);
        status =
            tu_error(TUTTI_ERROR_ARGUMENT,
                     "there is no group without a tag of the ranks [%s], and one is never made without a tag: make "
                     "it with tutti_group_new first, or give a tag",
                     list);
    } else {
        tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
        status = tu_group_options_take(TUTTI_OPTIONS(tutti_group_options, .tag = tag, .local_synchronization = true),
                                       &options);
        if (status == TUTTI_OK)
            status = tu_group_new(world, sorted, stride, &options, group);
    }
    free(sorted);
    return status;
}
