/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors that every rank can reach: results of a matrix product land in symmetric memory, a one-shot all-reduce adds
 * them where they lie, and each rank looks at its neighbour's without a copy.
 *
 *     $ tensor_symmetric            (two ranks as threads)
 *     $ tutti run -n 2 ./tensor_symmetric
 */
#include <stdio.h>

#include <tutti/functional.h>
#include <tutti/ops.h>
#include <tutti/symmetric.h>
#include <tutti/world.h>

static tutti_status rank_main(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group), next = (rank + 1) % ranks;
    tutti_pool *pool;
    tutti_status status = tutti_pool_new(world, NULL, &pool);
    if (status != TUTTI_OK)
        return status;
    tt_scope scope = tt_scope_open();

    /* What is made in here is symmetric, on all ranks alike. */
    tt_symm_pool_begin(pool, group);
    tt_tensor *x = tt_full(tt_shape(4, 8), rank + 1, TUTTI_F32, NULL);
    tt_tensor *partial = tt_matmul(x, tt_ones(tt_shape(8, 2), TUTTI_F32, NULL));
    tt_symm_pool_end();

    tt_tensor *sum = tt_one_shot_all_reduce(partial, TUTTI_SUM, group); /* reads the partial sums where they lie */
    tt_tensor *theirs = tt_peer_tensor(partial, next, group);           /* the neighbour's, without a copy */
    /* The sum waits for all ranks, so that the neighbour has written what is read last. */
    double own = tt_item(tt_select(tt_select(partial, 0, 0), 0, 0)),
           total = tt_item(tt_select(tt_select(sum, 0, 0), 0, 0)),
           seen = tt_item(tt_select(tt_select(theirs, 0, 0), 0, 0));
    status = tt_scope_close(&scope); /* the first error of all of the above */
    if (status == TUTTI_OK)
        printf("rank %d: own %g, rank %d has %g, together %g\n", rank, own, next, seen, total);
    tutti_pool_release(pool);
    return status == TUTTI_OK ? tutti_barrier(group, NULL) : status;
}

int main(void) {
    return tutti_main(2, rank_main, NULL);
}
