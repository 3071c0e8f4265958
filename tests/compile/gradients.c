/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients through compiled functions: what is saved, what arrives where, and how they stay what eager code has.
 */
#include <math.h>

#include "quick.h"

static tt_tensor *leaf(int64_t rows, int64_t columns, double step) {
    tt_tensor *x = tt_mul_scalar(tt_arange(1, (double)(rows * columns) + 1, 1, TUTTI_F32, NULL), step);
    return tt_require_grad(tt_detach(tt_reshape(x, tt_shape(rows, columns))), true);
}

static tt_tensor *twin_of(tt_tensor *x) {
    return tt_require_grad(tt_clone(tt_detach(x)), true);
}

/* ---- where gradients go ---- */

static int product(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_matmul(inputs.at[0], tt_t(inputs.at[1]));
    return 1;
}

TEST(gradients_pass_through_to_what_was_computed_before) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(product, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = leaf(3, 4, 0.1 + i), *w = leaf(2, 4, 0.2), *x2 = twin_of(x), *w2 = twin_of(w), *expected;
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(tt_sin(x), tt_tanh(w)));
            product(tt_tensors(tt_sin(x2), tt_tanh(w2)), &expected, NULL);
            CHECK(results.count == 1 && tt_equal(tt_detach(results.at[0]), tt_detach(expected)));
            tt_backward(tt_sum(tt_square(results.at[0])), NULL);
            tt_backward(tt_sum(tt_square(expected)), NULL);
            CHECK(tt_equal(tt_grad(x), tt_grad(x2)) && tt_equal(tt_grad(w), tt_grad(w2)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

TEST(an_input_that_is_given_twice_gets_both_gradients) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(product, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = leaf(3, 4, 0.1 + i), *twin = twin_of(x), *expected;
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, x));
            product(tt_tensors(twin, twin), &expected, NULL);
            CHECK(results.count == 1 && tt_equal(tt_detach(results.at[0]), tt_detach(expected)));
            tt_backward(tt_sum(results.at[0]), NULL);
            tt_backward(tt_sum(expected), NULL);
            CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int two_results(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sqrt(inputs.at[0]);
    outputs[1] = tt_sin(inputs.at[1]);
    outputs[2] = tt_mul(inputs.at[0], inputs.at[1]);
    return 3;
}

TEST(a_gradient_that_nothing_leads_to_stays_absent) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(two_results, NULL, modes[mode]);
        tt_tensor *x = leaf(1, 4, 0.5), *y = leaf(1, 4, 0.25);
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, y));
        CHECK_EQ(results.count, 3);
        CHECK(tt_backward(tt_sum(results.at[1]), NULL));
        CHECK(tt_grad(x) == NULL && tt_equal(tt_grad(y), tt_cos(tt_detach(y))));
        CHECK(tt_backward_from(tt_tensors(tt_sum(tt_compiled_call(fast, tt_tensors(x, y)).at[2])),
                               tt_tensors_of(0, NULL), NULL));
        CHECK(tt_equal(tt_grad(x), tt_detach(y)));
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* The derivative of the root at zero is infinite; where no gradient arrives there, nothing is computed of it. */
TEST(a_result_without_a_gradient_takes_no_part_in_a_backward) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(two_results, NULL, modes[mode]);
        tt_tensor *x = tt_zeros(tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
        tt_tensor *y = tt_ones(tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
        CHECK(tt_backward(tt_sum(tt_compiled_call(fast, tt_tensors(x, y)).at[2]), NULL));
        CHECK(tt_equal(tt_grad(x), tt_ones(tt_shape(4), TUTTI_F32, NULL)));
        CHECK(tt_equal(tt_grad(y), tt_zeros(tt_shape(4), TUTTI_F32, NULL)));
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int unchanged(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = inputs.at[0];
    outputs[1] = tt_narrow(inputs.at[0], 1, 1, 2);
    outputs[2] = tt_exp(inputs.at[0]);
    outputs[3] = tt_transpose(outputs[2], 0, 1);
    outputs[4] = outputs[2];
    return 5;
}

TEST(results_that_are_inputs_or_views_keep_their_gradients) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(unchanged, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = leaf(2, 4, 0.1), *twin = twin_of(x), *expected[5];
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            unchanged(tt_tensors(twin), expected, NULL);
            CHECK(results.count == 5 && results.at[0] == x && results.at[4] == results.at[2]);
            CHECK(tt_same_storage(results.at[1], x) && tt_same_storage(results.at[2], results.at[3]));
            tt_tensor_list both[] = { results, tt_tensors_of(5, expected) };
            for (int k = 0; k < 2; k++) {
                tt_tensor *const *at = both[k].at;
                tt_tensor *loss = tt_add(tt_sum(tt_square(at[0])), tt_sum(tt_mul_scalar(at[1], 3)));
                loss = tt_add(loss, tt_sum(tt_mul(at[2], tt_transpose(at[3], 0, 1))));
                CHECK(tt_backward(tt_add(loss, tt_sum(at[4])), NULL));
            }
            CHECK(tt_allclose(tt_grad(x), tt_grad(twin), 1e-6, 1e-6));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int view_first(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[1] = tt_exp(inputs.at[0]);
    outputs[0] = tt_narrow(outputs[1], 1, 1, 2);
    return 2;
}

TEST(a_view_may_be_returned_before_what_it_looks_at) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(view_first, NULL, modes[mode]);
        tt_tensor *x = leaf(2, 4, 0.1), *twin = twin_of(x), *expected[2];
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
        CHECK(results.count == 2 && tt_same_storage(results.at[0], results.at[1]));
        view_first(tt_tensors(twin), expected, NULL);
        CHECK(tt_backward(tt_add(tt_sum(tt_square(results.at[0])), tt_sum(results.at[1])), NULL));
        CHECK(tt_backward(tt_add(tt_sum(tt_square(expected[0])), tt_sum(expected[1])), NULL));
        CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* The slope of a square root is infinite at 0: zeros instead of an absent gradient would give NaN there. */
static int roots_and_doubles(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *root = tt_sqrt(inputs.at[0]);
    outputs[0] = tt_narrow(root, 1, 0, 2);
    outputs[1] = tt_mul_scalar(inputs.at[0], 2);
    tt_tensor *copy = tt_clone(root);
    tt_mul_scalar_(tt_narrow(copy, 1, 1, 2), 3);
    outputs[2] = copy;
    return 3;
}

TEST(an_absent_gradient_of_a_part_or_of_what_was_written_stays_absent) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(roots_and_doubles, NULL, modes[mode]);
        tt_tensor *x =
            tt_require_grad(tt_detach(tt_reshape(tt_arange(0, 8, 1, TUTTI_F32, NULL), tt_shape(2, 4))), true);
        tt_tensor *twin = twin_of(x), *expected[3];
        CHECK(tt_backward(tt_sum(tt_compiled_call(fast, tt_tensors(x)).at[1]), NULL));
        CHECK(tt_equal(tt_grad(x), tt_full(tt_shape(2, 4), 2, TUTTI_F32, NULL)));
        /* One that arrives beside it, two of three, and all. */
        for (int last = 0; last < 3; last++) {
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(tt_add_scalar(x, 1)));
            roots_and_doubles(tt_tensors(tt_add_scalar(twin, 1)), expected, NULL);
            tt_tensor *loss = tt_sum(results.at[2]), *other = tt_sum(expected[2]);
            for (int i = 0; i < last; i++) {
                loss = tt_add(loss, tt_sum(results.at[i]));
                other = tt_add(other, tt_sum(expected[i]));
            }
            tt_set_grad(x, NULL);
            tt_set_grad(twin, NULL);
            CHECK(tt_backward(loss, NULL) && tt_backward(other, NULL));
            CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
        }
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int mean_and_more(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_mul_scalar(inputs.at[0], 2);
    outputs[0] = tt_mean_dims(x, tt_shape(-1), true); /* its gradient is expanded */
    outputs[1] = tt_sin(tt_transpose(x, 0, 1));
    return 2;
}

TEST(an_absent_gradient_that_would_be_expanded_is_no_error) {
    EACH_MODE for (int used = 0; used < 2; used++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(mean_and_more, NULL, modes[mode]);
        tt_tensor *x = leaf(3, 4, 0.1), *twin = twin_of(x), *expected[2];
        CHECK(tt_backward(tt_sum(tt_compiled_call(fast, tt_tensors(x)).at[used]), NULL));
        mean_and_more(tt_tensors(twin), expected, NULL);
        CHECK(tt_backward(tt_sum(expected[used]), NULL) && tt_equal(tt_grad(x), tt_grad(twin)));
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int part_twice(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *own = tt_square(inputs.at[0]);
    tt_add_scalar_(own, 1);
    outputs[0] = outputs[1] = tt_narrow(own, 1, 1, 2);
    return 2;
}

TEST(a_result_that_is_returned_twice_stays_one_without_writes_in_place) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(part_twice, NULL,
                     TUTTI_OPTIONS(tt_compile_options, .with = "functional", .skip = "common", .full = true), &fast));
    tt_tensor *x = leaf(2, 4, 0.1);
    tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
    CHECK(results.count == 2 && results.at[0] == results.at[1]);
    CHECK(tt_backward(tt_sum(tt_add(results.at[0], results.at[1])), NULL));
    CHECK(tt_allclose(tt_narrow(tt_grad(x), 1, 1, 2), tt_mul_scalar(tt_narrow(tt_detach(x), 1, 1, 2), 4), 1e-6, 1e-6));
    tt_compiled_release(&fast);
    done(&scope);
}

/* ---- inputs that are written ---- */

static int write_input(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_mul_(inputs.at[0], inputs.at[1]);
    outputs[0] = tt_sum(tt_square(inputs.at[0]));
    return 1;
}

TEST(an_input_that_is_written_gets_the_history_of_the_change) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(write_input, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = leaf(2, 3, 0.3), *w = leaf(2, 3, 0.2), *x2 = twin_of(x), *w2 = twin_of(w), *expected;
            tt_tensor *inner = tt_sin(x), *inner2 = tt_sin(x2); /* may be written: no leaf */
            uint32_t version = tt_version(inner);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(inner, w));
            write_input(tt_tensors(inner2, w2), &expected, NULL);
            CHECK(results.count == 1 && tt_equal(tt_detach(results.at[0]), tt_detach(expected)));
            CHECK(tt_equal(tt_detach(inner), tt_detach(inner2)) && tt_version(inner) == version + 1);
            tt_backward(tt_add(results.at[0], tt_sum(tt_exp(inner))), NULL);
            tt_backward(tt_add(expected, tt_sum(tt_exp(inner2))), NULL);
            CHECK(tt_allclose(tt_grad(x), tt_grad(x2), 1e-6, 1e-6) && tt_allclose(tt_grad(w), tt_grad(w2), 1e-6, 1e-6));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_tensor *x = leaf(2, 3, 0.3), *w = leaf(2, 3, 0.2);
        CHECK(tt_compiled_call(fast, tt_tensors(x, w)).count == 0);
        CHECK(tt_error_show() == TUTTI_ERROR_STATE && strstr(tutti_error_message(), "a leaf tensor") != NULL);
        tt_error_clear();
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int fill_buffer(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_copy_(inputs.at[1], tt_square(inputs.at[0]));
    outputs[0] = NULL;
    return 1;
}

TEST(a_buffer_that_is_filled_with_something_differentiable_joins_the_graph) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(fill_buffer, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = leaf(2, 3, 0.5), *buffer = tt_zeros(tt_shape(2, 3), TUTTI_F32, NULL);
            CHECK_EQ(tt_compiled_call(fast, tt_tensors(x, buffer)).count, 1);
            CHECK(tt_requires_grad(buffer) && tt_backward(tt_sum(buffer), NULL));
            CHECK(tt_equal(tt_grad(x), tt_mul_scalar(tt_detach(x), 2)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* ---- hooks on inputs ---- */

static int hook_calls;
static tt_tensor *twice(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    hook_calls++;
    return tt_mul_scalar(grad, 2);
}
static void count_accumulation(const tt_hook_context *context, tt_tensor *x) {
    (void)context;
    CHECK(tt_grad(x) != NULL);
    hook_calls += 100;
}

TEST(hooks_on_inputs_run_at_each_backward) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(product, NULL, modes[mode]);
        tt_tensor *x = leaf(2, 3, 0.5), *w = leaf(2, 3, 0.1), *inner = tt_neg(x);
        hook_calls = 0;
        CHECK(tt_hook_tensor(x, twice, NULL, NULL, NULL) &&
              tt_hook_accumulate(x, count_accumulation, NULL, NULL, NULL));
        CHECK(tt_hook_tensor(inner, twice, NULL, NULL, NULL));
        for (int i = 1; i <= 3; i++) {
            tt_tensor *result = tt_compiled_call(fast, tt_tensors(inner, w)).at[0];
            CHECK(tt_backward_from(tt_tensors(tt_sum(result)), tt_tensors_of(0, NULL),
                                   TUTTI_OPTIONS(tt_backward_options, .retain_graph = true)));
            CHECK_EQ(hook_calls, 102 * i);
        }
        CHECK(counts_of(fast).captures == 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int hangs_hook(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_hook_tensor(inputs.at[0], twice, NULL, NULL, NULL);
    outputs[0] = tt_sum(tt_square(inputs.at[0]));
    return 1;
}

TEST(a_hook_that_the_function_hangs_on_an_input_makes_it_run_as_it_is) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(hangs_hook, NULL, NULL, &fast));
    tt_tensor *x = leaf(2, 3, 0.5);
    tt_tensor *loss = tt_compiled_call(fast, tt_tensors(x)).at[0];
    CHECK(tt_backward(loss, NULL) && tt_equal(tt_grad(x), tt_mul_scalar(tt_detach(x), 4)));
    CHECK(counts_of(fast).eager == 1 && strstr(tt_compiled_reason(fast), "hangs a hook on its input") != NULL);
    tt_compiled_release(&fast);
    done(&scope);
}

static int hangs_opaque(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *y = tt_sin(inputs.at[0]);
    tt_hook_tensor(y, twice, NULL, TUTTI_OPTIONS(tt_hook_options, .opaque = true), NULL);
    outputs[0] = tt_sum(y);
    return 1;
}

TEST(an_opaque_hook_inside_runs_at_each_backward) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(hangs_opaque, NULL, NULL, &fast));
    hook_calls = 0;
    for (int i = 1; i <= 2; i++) {
        tt_tensor *x = leaf(2, 3, 0.5);
        CHECK(tt_backward(tt_compiled_call(fast, tt_tensors(x)).at[0], NULL) && hook_calls == i);
        CHECK(tt_equal(tt_grad(x), tt_mul_scalar(tt_cos(tt_detach(x)), 2)));
    }
    CHECK(counts_of(fast).eager == 2 && strstr(tt_compiled_reason(fast), "opaque hook") != NULL);
    tt_compiled_release(&fast);
    done(&scope);
}

/* ---- once more, and twice ---- */

TEST(a_backward_may_be_repeated_where_the_graph_is_retained_and_not_else) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(product, NULL, modes[mode]);
        tt_tensor *x = leaf(2, 3, 0.5), *w = leaf(2, 3, 0.1);
        tt_tensor *loss = tt_sum(tt_compiled_call(fast, tt_tensors(x, w)).at[0]);
        for (int i = 0; i < 2; i++)
            CHECK(tt_backward_from(tt_tensors(loss), tt_tensors_of(0, NULL),
                                   TUTTI_OPTIONS(tt_backward_options, .retain_graph = i == 0)));
        CHECK(!tt_backward(loss, NULL));
        CHECK(tt_error_show() == TUTTI_ERROR_GRAPH && strstr(tutti_error_message(), "a second time") != NULL);
        tt_error_clear();
        tt_compiled_release(&fast);
        done(&scope);
    }
}

TEST(a_compiled_backward_cannot_be_differentiated_and_says_so) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(product, NULL, modes[mode]);
        tt_tensor *x = leaf(2, 3, 0.5), *w = leaf(2, 3, 0.1);
        tt_tensor *loss = tt_sum(tt_compiled_call(fast, tt_tensors(x, w)).at[0]);
        CHECK(!tt_backward_from(tt_tensors(loss), tt_tensors_of(0, NULL),
                                TUTTI_OPTIONS(tt_backward_options, .create_graph = true)));
        CHECK(tt_error_show() == TUTTI_ERROR_UNSUPPORTED);
        CHECK(strstr(tutti_error_message(), "cannot be differentiated: call the function itself") != NULL);
        tt_error_clear();
        tt_compiled_release(&fast);
        done(&scope);
    }
}

TEST(results_outlive_the_compiled_function) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = compile(product, NULL, TT_COMPILE_FUSED);
    tt_tensor *x = leaf(2, 3, 0.5), *w = leaf(2, 3, 0.1);
    tt_tensor *loss = tt_sum(tt_compiled_call(fast, tt_tensors(x, w)).at[0]);
    tt_compiled_release(&fast);
    CHECK(tt_backward(loss, NULL) && tt_grad(x) != NULL && tt_grad(w) != NULL);
    done(&scope);
}

/* ---- what is saved ---- */

static bool saves(const tt_compiled *fast, const char *name) {
    char *text = tt_graph_text(tt_compiled_graph(fast, TT_BACKWARD));
    CHECK(text != NULL);
    char look[64];
    snprintf(look, sizeof look, "%s: f32", name);
    char *end = strchr(text, '\n'), *at = strstr(text, look);
    bool found = at != NULL && at < end && strstr(at, " saved") != NULL;
    tutti_free(text);
    return found;
}

static int long_chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_matmul(inputs.at[0], inputs.at[1]);
    for (int i = 0; i < 5; i++)
        x = tt_sin(tt_tanh(x));
    outputs[0] = tt_sum(x);
    return 1;
}

TEST(cheap_operators_are_computed_again_and_products_are_saved) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(long_chain, NULL, modes[mode]);
        tt_tensor *x = leaf(4, 4, 0.1), *w = leaf(4, 4, 0.05), *x2 = twin_of(x), *w2 = twin_of(w), *expected;
        tt_tensor *loss = tt_compiled_call(fast, tt_tensors(x, w)).at[0];
        long_chain(tt_tensors(x2, w2), &expected, NULL);
        CHECK(tt_backward(loss, NULL) && tt_backward(expected, NULL));
        CHECK(tt_equal(tt_grad(x), tt_grad(x2)) && tt_equal(tt_grad(w), tt_grad(w2)));
        tt_graph_counts forward = TT_GRAPH_COUNTS_INIT;
        CHECK(tt_graph_count(tt_compiled_graph(fast, TT_FORWARD), &forward));
        if (modes[mode] == TT_COMPILE_FUSED)
            CHECK(forward.outputs == 2); /* the loss, and one of the ten: the others follow from it */
        else
            CHECK(forward.outputs == 6 && tt_graph_count_of(tt_compiled_graph(fast, TT_BACKWARD), "tanh") == 0);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

static int transposed(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *weight = user;
    outputs[0] = tt_sum(tt_matmul(inputs.at[0], tt_t(weight)));
    return 1;
}

TEST(a_view_is_never_saved_but_what_it_looks_at) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_tensor *weight = tt_parameter(tt_detach(leaf(3, 4, 0.1)), true), *x = leaf(2, 4, 0.2);
        tt_set_name(weight, "weight");
        tt_compiled *fast = compile(transposed, weight, modes[mode]);
        tt_tensor *loss = tt_compiled_call(fast, tt_tensors(x)).at[0];
        CHECK(saves(fast, "weight") && !saves(fast, "transpose"));
        CHECK(tt_backward(loss, NULL) && tt_grad(weight) != NULL);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* ---- checkpoints and random numbers ---- */

static int block(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)user;
    outputs[0] = tt_dropout(tt_tanh(tt_matmul(inputs.at[0], inputs.at[1])), 0.5);
    return 1;
}

static int checkpointed(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_checkpoint(block, NULL, NULL, inputs).at[0];
    x = tt_checkpoint(block, NULL, NULL, tt_tensors(x, inputs.at[1])).at[0];
    outputs[0] = tt_sum(tt_square(x));
    return 1;
}

TEST(a_checkpointed_region_saves_its_inputs_alone_and_draws_the_same_numbers_again) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(checkpointed, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = leaf(4, 4, 0.1), *w = leaf(4, 4, 0.05), *x2 = twin_of(x), *w2 = twin_of(w), *expected;
            tt_seed(9 + (uint64_t)i, 0);
            tt_tensor *loss = tt_compiled_call(fast, tt_tensors(x, w)).at[0];
            CHECK(tt_backward(loss, NULL));
            tt_seed(9 + (uint64_t)i, 0);
            checkpointed(tt_tensors(x2, w2), &expected, NULL);
            CHECK(tt_backward(expected, NULL) && tt_equal(tt_detach(loss), tt_detach(expected)));
            CHECK(tt_equal(tt_grad(x), tt_grad(x2)) && tt_equal(tt_grad(w), tt_grad(w2)));
        }
        CHECK(counts_of(fast).captures == 1 && !saves(fast, "tanh") && !saves(fast, "matmul"));
        CHECK_EQ(tt_graph_count_of(tt_compiled_graph(fast, TT_FORWARD), "tanh"), 2);
        CHECK_EQ(tt_graph_count_of(tt_compiled_graph(fast, TT_BACKWARD), "tanh"), 2);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* ---- training ---- */

typedef struct trained {
    tt_module *module;
    tt_optimizer *optimizer;
} trained;

static int training_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    trained *of = user;
    tt_tensor *loss = tt_mse_loss(tt_module_call(of->module, inputs.at[0]), inputs.at[1]);
    tt_backward(loss, NULL);
    tt_named_list parameters = tt_module_parameters(of->module);
    tt_clip_grad_norm(tt_tensors_of(parameters.count, parameters.at), 0.5, NULL);
    tt_optimizer_step(of->optimizer);
    tt_optimizer_zero_grad(of->optimizer);
    outputs[0] = tt_detach(loss);
    return 1;
}

static trained new_trained(void) {
    tt_seed(7, 0);
    tt_module *layers[] = { tt_linear_module(4, 8, true, TUTTI_F32), tt_linear_module(8, 3, true, TUTTI_F32) };
    tt_module *module = tt_sequential_module(2, layers);
    return (trained){ module, tt_adamw_optimizer(module, NULL) };
}

TEST(a_whole_training_step_is_one_graph_that_follows_a_schedule) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        trained eager = new_trained(), compiled = new_trained();
        tt_compiled *fast = compile(training_step, &compiled, modes[mode]);
        tt_tensor *x = tt_detach(leaf(2, 4, 0.2)), *target = tt_detach(leaf(2, 3, 0.1)), *loss;
        for (int i = 0; i < 5; i++) {
            tt_fill_(tt_optimizer_learning_rate(eager.optimizer, 0), 0.1 / (i + 1));
            tt_fill_(tt_optimizer_learning_rate(compiled.optimizer, 0), 0.1 / (i + 1));
            training_step(tt_tensors(x, target), &loss, &eager);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, target));
            CHECK(results.count == 1 && tt_equal(results.at[0], loss));
            tt_named_list left = tt_module_parameters(eager.module), right = tt_module_parameters(compiled.module);
            for (size_t k = 0; k < left.count; k++)
                CHECK(tt_equal(tt_detach(left.at[k]), tt_detach(right.at[k])) && tt_grad(right.at[k]) == NULL);
            CHECK_EQ((int)tt_item(tt_optimizer_steps(compiled.optimizer)), i + 1);
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        tt_optimizer_release(eager.optimizer);
        tt_optimizer_release(compiled.optimizer);
        tt_module_release(eager.module);
        tt_module_release(compiled.module);
        CHECK_OK(tt_scope_close(&scope));
    }
}
