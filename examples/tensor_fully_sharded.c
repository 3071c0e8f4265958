/* SPDX-License-Identifier: Apache-2.0
 *
 * Fully sharded training: every rank keeps a part of each parameter, of its gradient and of what the optimizer
 * remembers. A block is gathered when it is needed and freed behind it.
 *     $ tutti run -n 4 ./tensor_fully_sharded         (without `tutti run`: four ranks, started by itself)
 *     each rank held 257 KiB of the parameters, and 515 KiB of whole ones at most
 */
#include <stdio.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

#define WIDTH 128

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
    tt_module *blocks[] = { block_of(), block_of(), block_of(), block_of() };
    tt_module *net = tt_sequential_module(4, blocks);
    tt_tensor *x = tt_randn(tt_shape(16, WIDTH), TUTTI_F32, NULL), *y = tt_sin(tt_mul_scalar(x, 3));
    tt_fully_sharded *sharded = tt_fully_shard(net, 4, blocks, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 3e-3));
    for (int step = 0; step < 100 && tt_error_pending() == TUTTI_OK; step++) {
        tt_scope inner = tt_scope_open();
        tt_tensor *loss = tt_mean(tt_square(tt_sub(tt_module_call(net, x), y)));
        tt_backward(loss, NULL); /* gathers, frees and reduces block by block */
        tt_optimizer_step(optimizer);
        tt_optimizer_zero_grad(optimizer);
        double mean = tt_item(tt_all_reduce(tt_detach(loss), TUTTI_AVG, group));
        if (rank == 0 && step % 20 == 0)
            printf("step %3d: loss %.4f\n", step, mean);
        tutti_status status = tt_scope_close(&inner);
        if (status != TUTTI_OK)
            tt_error_set(status, tutti_error_message()); /* stays pending, and ends the loop */
    }
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    tt_fully_sharded_count(sharded, &counts);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    tutti_status status = tt_scope_close(&scope);
    if (status == TUTTI_OK && rank == 0)
        printf("each rank held %lld KiB of the parameters, and %lld KiB of whole ones at most\n",
               (long long)counts.shard_bytes >> 10, (long long)counts.most_gathered_bytes >> 10);
    return status;
}

int main(void) {
    return tutti_main(4, rank_main, NULL);
}
