/* SPDX-License-Identifier: Apache-2.0
 *
 * What is saved where collectives stand between forward and backward: two layers of 8-bit products, cut by columns and
 * by rows over a fake group of two. The shard is saved and not what was gathered from it, and a weight that no gradient
 * needs is not saved at all.
 */
#include <math.h>
#include <stdio.h>

#include "quick.h"

enum {
    ROWS = 48, /* of a shard */
    WIDTH = 64
};

typedef struct layer {
    tutti_group *group;
    bool by_columns;
} layer;

static tt_tensor *largest_of(tt_tensor *x) {
    return tt_amax(tt_abs(x), tt_shape(-1), true);
}

static tt_tensor *scale_of(tt_tensor *largest) {
    return tt_div(tt_clamp(tt_to(largest, TUTTI_F32), 1e-12, INFINITY), tt_number(448));
}

static tt_tensor *narrowed(tt_tensor *x, tt_tensor *scale) {
    return tt_to(tt_div(tt_to(x, TUTTI_F32), scale), TUTTI_F8_E4M3);
}

/* x (m, k) by the rows of weight (n, k), whose largest elements are known. */
static tt_tensor *product(tt_tensor *x, tt_tensor *weight, tt_tensor *largest, const layer *of, bool gathers) {
    tt_tensor *scale = scale_of(largest_of(x)), *other = scale_of(largest);
    tt_tensor *small = narrowed(x, scale), *weights = narrowed(weight, other);
    if (gathers) {
        small = tt_all_gather(small, 0, of->group);
        scale = tt_all_gather(scale, 0, of->group);
    }
    return tt_scaled_matmul(small, tt_t(weights), scale, tt_t(other), NULL, NULL, TUTTI_BF16, false);
}

static int layer_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    const layer *of = tt_function_user(context);
    tt_tensor *x = inputs.at[0], *weight = inputs.at[1];
    tt_tensor *columns = tt_amax(tt_abs(weight), tt_shape(0), true); /* for the other product */
    outputs[0] = product(x, weight, largest_of(weight), of, of->by_columns);
    if (!of->by_columns)
        outputs[0] = tt_reduce_scatter(outputs[0], TUTTI_SUM, 0, of->group);
    return tt_save_for_backward(context, tt_tensors(x, weight, columns)) ? 1 : -1;
}

static int layer_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    const layer *of = tt_function_user(context);
    tt_tensor_list saved = tt_saved_tensors(context);
    tt_tensor *x = saved.at[0], *grad = grads.at[0], *whole = grad;
    if (of->by_columns)
        x = tt_all_gather(x, 0, of->group);
    else
        whole = tt_all_gather(grad, 0, of->group);
    results[0] = results[1] = NULL;
    if (tt_needs_input_grad(context, 0)) {
        results[0] = product(grad, tt_t(saved.at[1]), tt_t(saved.at[2]), of, !of->by_columns);
        if (of->by_columns)
            results[0] = tt_reduce_scatter(results[0], TUTTI_SUM, 0, of->group);
    }
    if (tt_needs_input_grad(context, 1))
        results[1] = tt_matmul(tt_t(whole), x);
    return 2;
}

static tt_tensor *apply(tt_tensor *x, tt_tensor *weight, layer *of) {
    tt_function function = { .size = sizeof function,
                             .name = of->by_columns ? "columns" : "rows",
                             .forward = layer_forward,
                             .backward = layer_backward };
    return tt_apply(&function, tt_tensors(x, weight), of).at[0];
}

static int network(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    layer *layers = user;
    tt_tensor *hidden = tt_relu(apply(inputs.at[0], inputs.at[1], &layers[0]));
    outputs[0] = apply(hidden, inputs.at[2], &layers[1]);
    return 1;
}

static tt_tensor *some(int64_t rows, int64_t columns, bool requires_grad) {
    tt_tensor *x = tt_sin(tt_arange(0, (double)(rows * columns), 1, TUTTI_F32, NULL));
    return tt_require_grad(tt_detach(tt_to(tt_view(x, tt_shape(rows, columns)), TUTTI_BF16)), requires_grad);
}

/* Takes every mention of the device out. */
static void leave_device_out(char *text) {
    char words[32];
    snprintf(words, sizeof words, " on %s", tutti_device_name(test_device()));
    for (char *at; (at = strstr(text, words)) != NULL;)
        memmove(at, at + strlen(words), strlen(at + strlen(words)) + 1);
}

static void check_line(const tt_graph *graph, const char *line) {
    char *text = tt_graph_text(graph);
    CHECK(text != NULL);
    leave_device_out(text);
    if (strstr(text, line) == NULL)
        FAIL("the graph is\n%s\nand has no line\n%s", text, line);
    free(text);
}

TEST(a_shard_is_saved_and_not_what_was_gathered_from_it) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &world));
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        layer layers[] = { { tutti_world_group(world), true }, { tutti_world_group(world), false } };
        tt_compiled *fast = compile(network, layers, modes[mode]);
        tt_tensor *x = some(ROWS, WIDTH, false), *first = some(WIDTH, WIDTH, true), *second = some(WIDTH, WIDTH, true);
        tt_tensor *one = tt_require_grad(tt_clone(tt_detach(first)), true);
        tt_tensor *two = tt_require_grad(tt_clone(tt_detach(second)), true), *expected;
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, first, second));
        CHECK(results.count == 1 && tt_size(results.at[0], 0) == ROWS);
        const tt_graph *forward = tt_compiled_graph(fast, TT_FORWARD), *backward = tt_compiled_graph(fast, TT_BACKWARD);
        CHECK(tt_graph_count_of(forward, "all_gather") == 2 && tt_graph_count_of(forward, "reduce_scatter") == 1);
        CHECK_EQ(tt_graph_count_of(forward, "wait"), 3);
        /* x for the first weight's gradient, and the gradient for the second's, as it is and narrowed. */
        CHECK_EQ(tt_graph_count_of(backward, "all_gather"), 4);
        check_line(backward,
                   "graph(input: bf16 [48, 64] saved, input_2: bf16 [64, 64] saved grad, relu: bf16 [96, 64] saved, "
                   "amax_3: bf16 [1, 64] saved, tangent: bf16 [48, 64] tangent):\n");
        check_line(forward, "    return (reduce_scatter, relu, amax_3)\n");
        CHECK(tt_backward(tt_sum(results.at[0]), NULL));
        network(tt_tensors(x, one, two), &expected, layers);
        CHECK(tt_equal(tt_detach(results.at[0]), tt_detach(expected)) && tt_backward(tt_sum(expected), NULL));
        CHECK(tt_equal(tt_grad(first), tt_grad(one)) && tt_equal(tt_grad(second), tt_grad(two)));
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_OK(tutti_world_close(world));
}
