/* SPDX-License-Identifier: Apache-2.0
 *
 * Several ranks from one program, and what happens when one of them fails: the others learn it at once, and tutti_spawn
 * returns the reason.
 *
 *     ./spawn            four threads, then four processes; all is well
 *     ./spawn 2          rank 2 fails
 */
#include <stdio.h>
#include <stdlib.h>

#include <tutti/group.h>
#include <tutti/world.h>

typedef struct plan {
    int failing; /* rank, or -1 */
} plan;

static tutti_status main_of_rank(tutti_world *world, void *argument) {
    const plan *plan = argument;
    if (tutti_world_rank(world) == plan->failing)
        return TUTTI_ERROR_STATE; /* this rank gives up without telling anybody */

    /* Pairs of neighbours. Making groups is an agreement, so it notices a rank that is missing. */
    tutti_group *pair;
    tutti_status status = tutti_group_new_subgroups(tutti_world_group(world), 2, NULL, NULL, &pair);
    if (status != TUTTI_OK) {
        fprintf(stderr, "rank %d: %s\n", tutti_world_rank(world), tutti_error_message());
        return status;
    }
    printf("rank %d is number %d of group %s\n", tutti_world_rank(world), tutti_group_rank(pair),
           tutti_group_name(pair));
    tutti_group_release(pair);
    return TUTTI_OK;
}

int main(int argc, char **argv) {
    plan plan = { .failing = argc > 1 ? atoi(argv[1]) : -1 };
    static const tutti_spawn_kind kinds[] = { TUTTI_SPAWN_THREADS, TUTTI_SPAWN_PROCESSES };
    int failures = 0;
    for (int i = 0; i < 2; i++) {
        printf("four %s:\n", kinds[i] == TUTTI_SPAWN_THREADS ? "threads" : "processes");
        if (tutti_spawn(kinds[i], 4, main_of_rank, &plan) != TUTTI_OK) {
            printf("failed: %s\n", tutti_error_message());
            failures++;
        }
    }
    return failures == 0 ? 0 : 1;
}
