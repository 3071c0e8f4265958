/* SPDX-License-Identifier: Apache-2.0
 *
 * What groups cost: making the 10th and the 1000th, finding one by name, and entering and leaving an operation.
 *
 *     bench/group [RANKS] [threads]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/group.h>

#include "base/clock.h"
#include "world/world.h"

#define GROUPS 1010
#define WINDOW 10 /* groups per figure: the median of them */

static int ascending(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static double median_us(int64_t *times) {
    qsort(times, WINDOW, sizeof *times, ascending);
    return (double)times[WINDOW / 2] / 1e3;
}

static tutti_status measure(tutti_world *world, void *argument) {
    bool local = argument != NULL;
    static _Thread_local tutti_group *groups[GROUPS];
    static _Thread_local int64_t times[GROUPS];
    tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
    options.local_synchronization = local;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < GROUPS && status == TUTTI_OK; i++) {
        int64_t start = tu_clock_now();
        status = tutti_group_new(world, NULL, 0, &options, &groups[i]);
        times[i] = tu_clock_now() - start;
    }
    if (status != TUTTI_OK)
        return status;
    if (tutti_world_rank(world) == 0) {
        double tenth = median_us(times + 5), last = median_us(times + GROUPS - WINDOW);
        printf("%-38s 10th group %8.1f us   1000th %8.1f us   ratio %.2f\n",
               local ? "made by the members alone" : "made by the world", tenth, last, last / tenth);
        const char *name = tutti_group_name(groups[GROUPS / 2]);
        int64_t start = tu_clock_now();
        for (int i = 0; i < 100000; i++)
            if (tutti_group_by_name(world, name) == NULL)
                return TUTTI_ERROR_NOT_FOUND;
        printf("%-38s %8.1f ns\n", "found by name among 1010", (double)(tu_clock_now() - start) / 1e5);
        tu_operation_info info = { .operation = TU_OPERATION_PEERS_PUT };
        int64_t deadline;
        uint64_t ticket;
        tutti_group *own; /* of this rank alone: the others may leave meanwhile */
        options.local_synchronization = true;
        status = tutti_group_new(world, (int[]){ 0 }, 1, &options, &own);
        start = tu_clock_now();
        for (int i = 0; i < 1000000 && status == TUTTI_OK; i++) {
            status = tu_group_enter(own, 0, &info, &deadline, &ticket);
            if (status == TUTTI_OK)
                status = tu_group_leave(own, &info, ticket, TUTTI_OK);
        }
        printf("%-38s %8.1f ns\n", "enter and leave an operation", (double)(tu_clock_now() - start) / 1e6);
        tutti_group_release(own);
    }
    for (int i = 0; i < GROUPS; i++)
        tutti_group_release(groups[i]);
    return status;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    tutti_spawn_kind kind = argc > 2 && strcmp(argv[2], "threads") == 0 ? TUTTI_SPAWN_THREADS : TUTTI_SPAWN_PROCESSES;
    printf("%d ranks as %s\n", ranks, kind == TUTTI_SPAWN_THREADS ? "threads" : "processes");
    fflush(stdout);
    for (int local = 0; local < 2; local++)
        if (tutti_spawn(kind, ranks, measure, local ? argv : NULL) != TUTTI_OK) {
            fprintf(stderr, "bench/group: %s\n", tutti_error_message());
            return 1;
        }
    return 0;
}
