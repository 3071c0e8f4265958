/* SPDX-License-Identifier: Apache-2.0
 *
 * The first program: all ranks add their numbers.
 *
 *     ./first                    four processes
 *     tutti run -n 2 ./first     two, of the launcher's job
 */
#include <stdio.h>

#include <tutti/tutti.h>

static tutti_status rank_main(tutti_world *world, void *argument) {
    (void)argument;
    float mine[4] = { 1, 2, 3, 4 }, sum[4];
    tutti_status status = tutti_all_reduce(tutti_world_group(world), mine, sum, 4, TUTTI_F32, TUTTI_SUM, NULL);
    if (status == TUTTI_OK)
        printf("rank %d of %d: %g\n", tutti_world_rank(world), tutti_world_size(world), (double)sum[3]);
    return status;
}

int main(void) {
    return tutti_main(4, rank_main, NULL);
}
