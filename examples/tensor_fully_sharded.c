/* SPDX-License-Identifier: Apache-2.0
 *
 * Fully sharded training: every rank keeps a part of each parameter, of its gradient and of what the optimizer
 * remembers. A block is gathered when it is needed and freed behind it.
 *
 *     $ tensor_fully_sharded                  (four ranks, started by itself)
 *     $ tutti run -n 4 ./tensor_fully_sharded
 *     step   0: loss 0.5049
 *     …
 *     each of 4 ranks held 257 of 1028 KiB, and 515 KiB of whole parameters at most
 */
#include <stdio.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

enum {
    STEPS = 100,
    WIDTH = 128,
    BLOCKS = 4,
    ROWS = 16 /* of each rank */
};

static tt_module *block_of(void) {
    tt_module *layers[] = { tt_linear_module(WIDTH, 2 * WIDTH, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                            tt_linear_module(2 * WIDTH, WIDTH, true, TUTTI_F32) };
    return tt_sequential_module(3, layers);
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    (void)argument;
    tt_scope scope = tt_scope_open();
    tt_seed(1, (uint32_t)rank);
    tt_module *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = block_of();
    tt_module *net = tt_sequential_module(BLOCKS, blocks);
    tt_tensor *x = tt_randn(tt_shape(ROWS, WIDTH), TUTTI_F32, NULL), *y = tt_sin(tt_mul_scalar(x, 3));
    tt_fully_sharded *sharded = tt_fully_shard(net, BLOCKS, blocks, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 3e-3));
    for (int step = 0; step < STEPS && tt_error_pending() == TUTTI_OK; step++) {
        tt_scope inner = tt_scope_open();
        tt_tensor *loss = tt_mean(tt_square(tt_sub(tt_module_call(net, x), y)));
        tt_backward(loss, NULL); /* gathers, frees and reduces block by block */
        tt_optimizer_step(optimizer);
        tt_optimizer_zero_grad(optimizer);
        double mean = tt_item(tt_all_reduce(tt_detach(loss), TUTTI_AVG, group));
        if (rank == 0 && (step % 20 == 0 || step == STEPS - 1))
            printf("step %3d: loss %.4f\n", step, mean);
        if (tt_scope_close(&inner) != TUTTI_OK)
            break;
    }
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    tt_fully_sharded_count(sharded, &counts);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    tutti_status status = tt_scope_close(&scope);
    long long part = counts.shard_bytes >> 10, ranks = tutti_group_size(group);
    if (status == TUTTI_OK && rank == 0)
        printf("each of %lld ranks held %lld of %lld KiB, and %lld KiB of whole parameters at most\n", ranks, part,
               part * ranks, (long long)counts.most_gathered_bytes >> 10);
    return status;
}

int main(void) {
    return tutti_main(4, rank_main, NULL);
}
