/* SPDX-License-Identifier: Apache-2.0
 *
 * tutti_main: the whole of a program's main. Under a launcher this process is one rank of the launcher's job; alone it
 * starts ranks itself.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "world/launch.h"

/* Which rank a launcher has made of this process; -1: there is no launcher. */
static tutti_status find_launcher(int *rank) {
    tu_settings settings;
    tutti_status status = tu_settings_load(&settings);
    if (status != TUTTI_OK)
        return status;
    tu_launch launch;
    status = tu_launch_find(TUTTI_OPTIONS(tutti_world_options, ), &settings, NULL, &launch);
    if (status == TUTTI_OK)
        *rank = strcmp(launch.launcher, "alone") == 0 ? -1 : launch.rank;
    tu_settings_free(&settings);
    return status;
}

static int processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static tutti_status run(int ranks_if_alone, tutti_rank_main *rank_main, void *argument, int *rank) {
    if (rank_main == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_main: rank_main is NULL");
    if (ranks_if_alone < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_main: ranks_if_alone is %d; it must be positive, or 0 for one rank per processor",
                        ranks_if_alone);
    tutti_status status = find_launcher(rank);
    if (status != TUTTI_OK)
        return status;
    if (*rank >= 0)
        return tu_rank_run(tu_spawn_current(), rank_main, argument);
    return tutti_spawn(TUTTI_SPAWN_PROCESSES, ranks_if_alone > 0 ? ranks_if_alone : processors(), rank_main, argument);
}

int tutti_main(int ranks_if_alone, tutti_rank_main *rank_main, void *argument) {
    int rank = -1;
    if (run(ranks_if_alone, rank_main, argument, &rank) == TUTTI_OK)
        return 0;
    if (rank >= 0)
        fprintf(stderr, "%s: rank %d: %s\n", program_invocation_short_name, rank, tutti_error_message());
    else
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, tutti_error_message());
    return 1;
}

int64_t tutti_clock(void) {
    return tu_clock_now();
}
