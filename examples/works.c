/* SPDX-License-Identifier: Apache-2.0
 *
 * Communication behind computation: the sum of one chunk travels while the next one is computed.
 *
 *     tutti run -n 4 ./works           or, without a launcher,          ./works
 *
 * A call with a work only starts the operation. Works of a group run in the order in which they were started, so two
 * are enough: one under way, one being filled. The buffers belong to the library until their work was waited for.
 */
#include <stdio.h>
#include <stdlib.h>
#include <tutti/collective.h>
#include <tutti/tutti.h>

enum {
    CHUNKS = 8,
    ELEMENTS = 100000
};

/* Stands for anything that takes time. */
static void compute(float *chunk, int number, int rank) {
    for (int i = 0; i < ELEMENTS; i++)
        chunk[i] = (float)(number * (rank + 1));
}

static tutti_status overlap(tutti_world *world, void *unused) {
    (void)unused;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), ready = 0;
    float *chunks[2] = { malloc(ELEMENTS * sizeof(float)), malloc(ELEMENTS * sizeof(float)) };
    tutti_work *under_way[2] = { NULL, NULL };
    double total = 0;
    tutti_status status = TUTTI_OK;
    for (int number = 0; number < CHUNKS + 2 && status == TUTTI_OK; number++) {
        int side = number % 2;
        if (under_way[side] != NULL) { /* the sum that was started two rounds ago */
            bool finished = false;
            if (tutti_work_test(under_way[side], &finished) == TUTTI_OK)
                ready += finished; /* by the time it was needed */
            status = tutti_work_wait(under_way[side], 0);
            total += chunks[side][0];
            tutti_work_release(under_way[side]);
            under_way[side] = NULL;
        }
        if (number >= CHUNKS || status != TUTTI_OK)
            continue;
        compute(chunks[side], number, rank);
        status = tutti_all_reduce(group, chunks[side], chunks[side], ELEMENTS, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .work = &under_way[side]));
    }
    if (status == TUTTI_OK && rank == 0)
        printf("%d chunks sum up to %.0f; %d sums were there before anybody waited\n", CHUNKS, total, ready);
    for (int side = 0; side < 2; side++) {
        tutti_work_release(under_way[side]);
        free(chunks[side]);
    }
    return status;
}

int main(void) {
    return tutti_main(4, overlap, NULL);
}
