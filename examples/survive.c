/* SPDX-License-Identifier: Apache-2.0
 *
 * Counts on through the loss of ranks:
 *
 *     TUTTI_FAULT="rank=1,op=all_reduce,at=17,do=kill" tutti run --survive -n 4 ./survive
 *
 * and over hosts, where a host may go with all its ranks: tutti run --survive --hosts a:2,b:2 ./survive
 *
 * Every step adds up one from each rank. When a rank dies, some may have finished the step and others not: they agree
 * on the last step that all survivors have, whoever is ahead takes one back, and the rest go on in a smaller group.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <tutti/collective.h>
#include <tutti/group.h>

static void give_up(void) {
    fprintf(stderr, "%s\n", tutti_error_message());
    exit(1);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    tutti_world *world;
    if (tutti_world_open(NULL, &world))
        give_up();
    tutti_group *group = tutti_group_keep(tutti_world_group(world));
    if (tutti_barrier(group, NULL)) /* all are here: whoever is lost before that is lost to the opening of the others */
        give_up();
    long total = 0, before = 0;
    int done = 0;
    for (;;) {
        tutti_status status = TUTTI_OK;
        while (done < steps && status == TUTTI_OK) {
            int64_t one = 1, sum;
            status = tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL);
            if (status == TUTTI_OK) {
                before = total;
                total += sum;
                done++;
            }
        }
        bool all;
        if (tutti_group_agree(group, status == TUTTI_OK, &all)) /* nobody leaves before all are through */
            give_up();
        if (all)
            break;
        if (status)
            printf("rank %d, step %d: %s\n", tutti_world_rank(world), done, tutti_error_message());
        tutti_group *rest;
        if (tutti_group_shrink(group, NULL, &rest))
            give_up();
        if (tutti_group_completed(group) > tutti_group_settled(rest)) { /* others do not have my last step */
            total = before;
            done--;
        }
        printf("rank %d: %d of %d ranks go on after step %d\n", tutti_world_rank(world), tutti_group_size(rest),
               tutti_group_size(group), done);
        tutti_group_release(group);
        group = rest;
    }
    printf("rank %d: %d steps, total %ld\n", tutti_world_rank(world), done, total);
    tutti_group_release(group);
    if (tutti_world_close(world))
        give_up();
    return 0;
}
