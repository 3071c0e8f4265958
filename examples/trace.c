/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program can know about its own communication: counters of each operation, which algorithm ran and why, and the
 * flight recorder, which holds the last operations of every rank.
 *
 *     tutti run -n 2 ./trace           or, without a launcher,          ./trace
 *     tutti run -n 2 ./trace .         writes the recorders into a folder, a file per rank
 *
 * `tutti trace FOLDER` shows the written recorders beside each other, and -o FILE makes a file for ui.perfetto.dev.
 */
#include <stdio.h>
#include <stdlib.h>
#include <tutti/collective.h>
#include <tutti/trace.h>
#include <tutti/tutti.h>

enum {
    ELEMENTS = 30000
};

static tutti_status look_back(tutti_world *world, void *folder) {
    tutti_group *group = tutti_world_group(world);
    float *values = calloc(ELEMENTS, sizeof(float));
    tutti_status status = values != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    for (size_t count = 1; count <= ELEMENTS && status == TUTTI_OK; count *= 30)
        status = tutti_all_reduce(group, values, values, count, TUTTI_F32, TUTTI_SUM, NULL);
    tutti_ran ran = TUTTI_RAN_INIT;
    if (status == TUTTI_OK)
        status = tutti_group_ran(group, &ran);
    tutti_counters counters = TUTTI_COUNTERS_INIT;
    if (status == TUTTI_OK)
        status = tutti_trace_counters(world, "all_reduce", &counters);
    if (status == TUTTI_OK && tutti_world_rank(world) == 0)
        printf("%d all-reduces of %d bytes took %.3f ms; the last one: %s\n", (int)counters.calls, (int)counters.bytes,
               (double)counters.time_ns / 1e6, ran.why);
    if (status == TUTTI_OK && folder != NULL)
        status = tutti_trace_write(world, folder);
    free(values);
    return status;
}

int main(int argc, char **argv) {
    return tutti_main(2, look_back, argc > 1 ? argv[1] : NULL);
}
