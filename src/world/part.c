/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of a group across hosts that is on this one: a group of the members here, known to nobody. What stays on the
 * host goes through it, collectives as well as messages, which begin without the other members: so it is made with the
 * group.
 */
#include <stdlib.h>

#include "base/error.h"
#include "world/group.h"

/* The world ranks of the members on this host, in group order. */
static int list_members(const tutti_group *group, int *ranks) {
    int count = 0;
    for (int member = 0; member < group->size; member++)
        if (group->job_ranks[member] >= 0)
            ranks[count++] = group->ranks[member];
    return count;
}

/* Under the name of the whole, so that messages speak of what the user knows. */
static tutti_status make_part(tutti_group *group, const int *ranks, int count, int64_t deadline,
                              _Atomic uint64_t *ended, uint64_t above) {
    tu_group_plan plan = { .name = group->name,
                           .description = "the members of a group on one host",
                           .key = tu_group_key("host of %016llx", (unsigned long long)group->key),
                           .ranks = ranks,
                           .count = count,
                           .whole = group };
    tutti_group *here = NULL;
    const tu_piece *piece = NULL;
    tutti_status status = tu_group_reserve(group->world, &plan, &here, &piece);
    if (status != TUTTI_OK)
        return status;
    status = tu_group_share_page(here, piece, deadline, ended, above);
    if (status != TUTTI_OK) {
        tutti_group_release(here);
        return status;
    }
    atomic_store_explicit(&group->here, here, memory_order_release); /* pairs with tu_group_overhear */
    return TUTTI_OK;
}

tutti_status tu_group_make_part(tutti_group *group, int64_t deadline, _Atomic uint64_t *ended, uint64_t above) {
    if (group->local || group->world->fake)
        return TUTTI_OK;
    int *ranks = malloc((size_t)group->size * sizeof *ranks);
    if (ranks == NULL)
        return tu_error_memory("the ranks of a host", (size_t)group->size * sizeof *ranks);
    int count = list_members(group, ranks);
    tutti_status status = count > 1 ? make_part(group, ranks, count, deadline, ended, above) : TUTTI_OK;
    free(ranks);
    if (status != TUTTI_OK)
        tu_group_end(group, NULL); /* the members on other hosts may have theirs, and would wait for this rank */
    return status;
}
