/* SPDX-License-Identifier: Apache-2.0
 *
 * A compiled model: captured at the first call, with its backward; the same calls afterwards run what was built.
 *
 *     $ tensor_compile
 *     step 0: loss 0.7718
 *     …
 *     step 4: loss 0.0823
 *     captured 1 time, found again 4 times
 *     backward: …
 *     another batch size: captured 2 times, because input 0 is f32 [2, 3], and was [4, 3]
 */
#include <stdio.h>

#include <tutti/tensors.h>

/* Ordinary code. The module's parameters are read from it at each call. */
static int loss_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_mse_loss(tt_tanh(tt_module_call(user, inputs.at[0])), inputs.at[1]);
    return 1;
}

static tt_compiled_counts counts_of(const tt_compiled *compiled) {
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
    tt_compiled_count(compiled, &counts);
    return counts;
}

int main(void) {
    tt_scope scope = tt_scope_open();
    tt_seed(1, 0);
    tt_module *model = tt_linear_module(3, 1, true, TUTTI_F32);
    tt_optimizer *optimizer = tt_sgd_optimizer(model, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.5, .momentum = 0.5));
    tt_tensor *x = tt_randn(tt_shape(4, 3), TUTTI_F32, NULL), *y = tt_tanh(tt_randn(tt_shape(4, 1), TUTTI_F32, NULL));

    tt_compiled *fast;
    tt_compile(loss_of, model, TUTTI_OPTIONS(tt_compile_options, .name = "loss"), &fast);
    for (int i = 0; i < 5; i++) {
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, y));
        if (results.count != 1)
            break;
        tt_backward(results.at[0], NULL);
        tt_optimizer_step(optimizer);
        tt_optimizer_zero_grad(optimizer);
        printf("step %d: loss %.4f\n", i, tt_item(results.at[0]));
    }
    tt_compiled_counts counts = counts_of(fast);
    printf("captured %d time, found again %d times\n", counts.captures, (int)counts.hits);
    printf("backward: ");
    tt_graph_print(tt_compiled_graph(fast, TT_BACKWARD), stdout);

    tt_compiled_call(fast, tt_tensors(tt_narrow(x, 0, 0, 2), tt_narrow(y, 0, 0, 2)));
    printf("another batch size: captured %d times, because %s\n", counts_of(fast).captures, tt_compiled_reason(fast));

    tt_compiled_release(&fast);
    tt_optimizer_release(optimizer);
    tt_module_release(model);
    return tt_scope_close(&scope) != TUTTI_OK;
}
