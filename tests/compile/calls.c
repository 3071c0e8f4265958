/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions: what a call computes, when it captures anew, and what it says.
 */
#include <math.h>

#include "quick.h"

static tt_tensor *values(int count) {
    return tt_mul_scalar(tt_add_scalar(tt_arange(0, count, 1, TUTTI_F32, NULL), 1), 0.25);
}

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *x = inputs.at[0];
    if (user != NULL)
        (*(int *)user)++;
    outputs[0] =
        tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(tt_add_scalar(tt_mul_scalar(x, 2), 1)), x)), tt_sigmoid(x)), 0.5);
    outputs[1] = NULL;
    outputs[2] = tt_sum(outputs[0]);
    return 3;
}

TEST(the_first_call_captures_and_the_others_run) {
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        tt_scope scope = tt_scope_open();
        int calls = 0;
        tt_compiled *fast = compile(chain, &calls, modes[i]);
        for (int k = 0; k < 3; k++) {
            tt_tensor *x = tt_add_scalar(values(20), k - 3.0), *expected[3];
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            chain(tt_tensors(x), expected, NULL);
            CHECK_EQ(results.count, 3);
            CHECK(tt_equal(results.at[0], expected[0]) && results.at[1] == NULL &&
                  tt_equal(results.at[2], expected[2]));
        }
        tt_compiled_counts counts = counts_of(fast);
        CHECK(calls == 1 && counts.captures == 1 && counts.hits == 2 && counts.entries == 1 && counts.eager == 0);
        CHECK(counts.misses[TT_MISS_FIRST] == 1 && counts.vertices > 0);
        CHECK(tt_compiled_graph(fast, TT_FORWARD) != NULL && tt_compiled_graph(fast, TT_BACKWARD) == NULL);
        tt_compiled_release(&fast);
        CHECK(fast == NULL);
        CHECK_OK(tt_scope_close(&scope));
    }
}

TEST(gradients_are_compiled_too) {
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(chain, NULL, modes[i]);
        for (int k = 0; k < 3; k++) {
            tt_tensor *x = tt_require_grad(tt_add_scalar(values(20), k - 3.0), true), *expected[3];
            tt_tensor *twin = tt_require_grad(tt_clone(tt_detach(x)), true);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            CHECK_EQ(results.count, 3);
            CHECK(tt_requires_grad(results.at[0]) && tt_requires_grad(results.at[2]));
            chain(tt_tensors(twin), expected, NULL);
            tt_backward(tt_add(results.at[2], tt_sum(tt_square(results.at[0]))), NULL);
            tt_backward(tt_add(expected[2], tt_sum(tt_square(expected[0]))), NULL);
            CHECK(tt_grad(x) != NULL && tt_grad(twin) != NULL);
            CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        CHECK(tt_compiled_graph(fast, TT_BACKWARD) != NULL);
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* What is computed twice is computed once, and lives as long as the view of the second. */
static int looked_at_twice(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *weight = inputs.at[1];
    tt_tensor *first = tt_matmul(tt_exp(x), weight);
    tt_tensor *view = tt_view(tt_exp(x), tt_shape(tt_numel(x)));
    for (int i = 0; i < 3; i++) /* memory of before is taken for these */
        first = tt_matmul(tt_tanh(first), weight);
    outputs[0] = tt_mul(view, tt_view(first, tt_shape(tt_numel(x))));
    return 1;
}

TEST(a_common_expression_lives_as_long_as_the_views_of_both) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(looked_at_twice, NULL, modes[mode]);
        tt_tensor *x = tt_view(values(64), tt_shape(8, 8)), *weight = tt_sin(x), *expected;
        looked_at_twice(tt_tensors(tt_mul_scalar(x, 0.1), weight), &expected, NULL);
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(tt_mul_scalar(x, 0.1), weight));
        CHECK(results.count == 1 && tt_equal(results.at[0], expected));
        CHECK_EQ(tt_graph_count_of(tt_compiled_graph(fast, TT_FORWARD), "exp"), mode == 2 ? 2 : 1);
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
}
