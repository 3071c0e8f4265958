/* SPDX-License-Identifier: Apache-2.0
 *
 * A training step as a graph: captured once, with its backward; looked at; made smaller; and run.
 *
 *     $ tensor_graph
 *     graph(x: f32 [4, 3], y: f32 [4, 1], weight: f32 [1, 3] constant parameter grad):
 *     …
 *     19 vertices, 18 after the passes
 *     step 0: loss 5.8359
 *     …
 *     step 4: loss 0.1069
 */
#include <stdio.h>

#include <tutti/tensors.h>

/* Ordinary code: it runs once, on tensors that have shapes and no data. */
static int step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *weight = user;
    tt_tensor *loss = tt_mse_loss(tt_linear(inputs.at[0], weight, NULL), inputs.at[1]);
    tt_backward(loss, NULL);
    tt_sgd_step(weight, tt_grad(weight), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1));
    tt_set_grad(weight, NULL);
    outputs[0] = loss;
    return 1;
}

static int vertices(tt_graph *graph) {
    tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
    return tt_graph_count(graph, &counts) ? counts.vertices : 0;
}

int main(void) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_reshape(tt_mul_scalar(tt_arange(0, 12, 1, TUTTI_F32, NULL), 0.125), tt_shape(4, 3));
    tt_tensor *y = tt_sum_dims(x, tt_shape(1), true),
              *weight = tt_parameter(tt_zeros(tt_shape(1, 3), TUTTI_F32, NULL), true);
    tt_graph *graph = NULL;
    tt_set_name(x, "x");
    tt_set_name(y, "y");
    tt_set_name(weight, "weight");
    tt_capture(step, weight, tt_tensors(x, y), &graph);
    tt_graph_print(graph, stdout);
    int before = vertices(graph);
    for (int i = 0; tt_pass_name(i) != NULL; i++)
        tt_graph_pass(graph, tt_pass_name(i));
    printf("%d vertices, %d after the passes\n", before, vertices(graph));
    for (int i = 0; i < 5 && tt_error_pending() == TUTTI_OK; i++) {
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(x, y));
        if (results.count == 1)
            printf("step %d: loss %.4f\n", i, tt_item(results.at[0]));
    }
    tt_graph_release(&graph);
    if (tt_scope_close(&scope) == TUTTI_OK)
        return 0;
    fprintf(stderr, "%s\n", tutti_error_message());
    return 1;
}
