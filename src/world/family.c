/* SPDX-License-Identifier: Apache-2.0
 *
 * Families of groups: several lists of ranks, made one after the other.
 */
#include <stdlib.h>

#include "base/error.h"
#include "world/create.h"

/* Makes groups of several lists in order. `all` is lent: only *mine is a reference of the caller's. */
static tutti_status new_family(tutti_world *world, const int *const *lists, const int *counts, int list_count,
                               const tutti_group_options *options, tutti_group **all, tutti_group **mine) {
    tutti_group *own = TUTTI_NON_GROUP_MEMBER;
    for (int i = 0; i < list_count; i++) {
        tutti_group *group;
        tutti_status status = tu_group_new(world, lists[i], counts[i], options, &group);
        if (status != TUTTI_OK) {
            tutti_group_release(own);
            return status;
        }
        if (all != NULL)
            all[i] = group;
        if (group != TUTTI_NON_GROUP_MEMBER)
            own = group;
    }
    *mine = own;
    return TUTTI_OK;
}

tutti_status tutti_group_new_subgroups(tutti_group *parent, int block, const tutti_group_options *given,
                                       tutti_group **all, tutti_group **mine) {
    tutti_group_options options;
    tutti_status status = tu_group_check_parent("tutti_group_new_subgroups", parent, mine, given, &options);
    if (status != TUTTI_OK)
        return status;
    TU_INSIDE(parent->world);
    if (block <= 0 || block > parent->size || parent->size % block != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "blocks of %d ranks do not divide the parent's %d ranks", block,
                        parent->size);
    if (options.name != NULL && parent->size > block)
        return tu_error(TUTTI_ERROR_ARGUMENT, "several groups cannot share the name \"%s\"", options.name);
    /* Ranks outside of the parent do not call, so its blocks can meet only among themselves. */
    options.local_synchronization = options.local_synchronization || parent != parent->world->group;
    int count = parent->size / block;
    const int **lists = malloc((size_t)count * (sizeof *lists + sizeof(int)));
    if (lists == NULL)
        return tu_error_memory("sub-groups", (size_t)count * (sizeof *lists + sizeof(int)));
    int *counts = (int *)(void *)(lists + count);
    for (int i = 0; i < count; i++) {
        lists[i] = parent->ranks + i * block;
        counts[i] = block;
    }
    status = new_family(parent->world, lists, counts, count, &options, all, mine);
    free(lists);
    return status;
}

tutti_status tutti_group_new_subgroups_by_enumeration(tutti_world *world, const int *const *lists, const int *counts,
                                                      int list_count, const tutti_group_options *given,
                                                      tutti_group **all, tutti_group **mine) {
    TU_INSIDE(world);
    tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_group_options_take(given, &options);
    if (status == TUTTI_OK && mine == NULL)
        status =
            tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_new_subgroups_by_enumeration: where the group goes is NULL");
    if (status == TUTTI_OK)
        status = tu_rank_lists_check(lists, counts, list_count, world->size, "world rank");
    if (status == TUTTI_OK && options.name != NULL && list_count > 1)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "several groups cannot share the name \"%s\"", options.name);
    return status == TUTTI_OK ? new_family(world, lists, counts, list_count, &options, all, mine) : status;
}
