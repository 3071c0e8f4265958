/* SPDX-License-Identifier: Apache-2.0
 *
 * Data parallel training: every rank has the whole net and a part of the data, and gradients are averaged while the
 * backward still runs. All ranks end with the same weights.
 *     $ tutti run -n 4 ./tensor_data_parallel         (without `tutti run`: four ranks, started by itself)
 *     step   0: loss 0.67
 */
#include <stdio.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

/* 32 points of this rank, and whether each lies in a ring. */
static void draw(tt_tensor **points, tt_tensor **inside) {
    *points = tt_mul_scalar(tt_randn(tt_shape(32, 2), TUTTI_F32, NULL), 1.2);
    tt_tensor *distance = tt_sum_dims(tt_square(*points), tt_shape(1), false);
    *inside = tt_to(tt_mul(tt_gt(distance, tt_number(0.5)), tt_lt(distance, tt_number(2.5))), TUTTI_I64);
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    (void)argument;
    tt_scope scope = tt_scope_open();
    tt_seed(1, (uint32_t)rank); /* other weights and other points on every rank; the weights of rank 0 count */
    tt_module *layers[] = { tt_linear_module(2, 64, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                            tt_linear_module(64, 64, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                            tt_linear_module(64, 2, true, TUTTI_F32) };
    tt_module *net = tt_sequential_module(5, layers);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.01));
    for (int step = 0; step < 200 && tt_error_pending() == TUTTI_OK; step++) {
        tt_tensor *points, *inside;
        tt_scope inner = tt_scope_open();
        draw(&points, &inside);
        tt_tensor *loss = tt_cross_entropy(tt_module_call(net, points), inside, -100);
        tt_backward(loss, NULL); /* reduces, bucket by bucket */
        tt_optimizer_step(optimizer);
        tt_optimizer_zero_grad(optimizer);
        double mean = tt_item(tt_all_reduce(tt_detach(loss), TUTTI_AVG, group));
        if (rank == 0 && (step % 40 == 0 || step == 199))
            printf("step %3d: loss %.2f\n", step, mean);
        tutti_status status = tt_scope_close(&inner);
        if (status != TUTTI_OK)
            tt_error_set(status, tutti_error_message()); /* stays pending, and ends the loop */
    }
    tt_tensor *weight = tt_module_parameter(tt_module_child(net, "0"), "weight");
    bool same = tt_equal(weight, tt_broadcast(weight, 0, group));
    tt_data_parallel_release(parallel);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    tutti_status status = tt_scope_close(&scope);
    if (same && rank == 0)
        printf("the same weights on %d ranks\n", tutti_group_size(group));
    return status != TUTTI_OK || same ? status : TUTTI_ERROR_STATE;
}

int main(void) {
    return tutti_main(4, rank_main, NULL);
}
