/* SPDX-License-Identifier: Apache-2.0
 *
 * Histories in the corners: custom functions with several results, in-place changes through views of every kind, and
 * what is saved when a value is about to be overwritten.
 */
#include <math.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

#include "support.h"

static const tt_tensor_list none = { 0, NULL };

static tt_tensor *leaf(tt_dims shape, const float *values) {
    return tt_from(values, shape, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
}

static bool is(tt_tensor *x, const float *values) {
    return x != NULL && tt_allclose(x, tt_from(values, tt_sizes(x), TUTTI_F32, NULL), 1e-6, 1e-6);
}

/* ---- custom functions with several results ---- */

static int second_dirty_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_mul_scalar_(inputs.at[1], 2);
    tt_mark_dirty(context, inputs.at[1]);
    outputs[0] = tt_mul_scalar(inputs.at[0], 10);
    outputs[1] = inputs.at[1];
    return 2;
}
static int second_dirty_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 10);
    results[1] = tt_mul_scalar(grads.at[1], 2);
    return 2;
}
static const tt_function second_dirty = { sizeof second_dirty, "second_dirty", second_dirty_forward,
                                          second_dirty_backward, NULL };

TEST(an_input_changed_by_a_function_is_the_result_that_the_function_says) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf(tt_shape(1), (float[]){ 1 }), *b = leaf(tt_shape(1), (float[]){ 1 });
    tt_tensor_list out = tt_apply(&second_dirty, tt_tensors(a, tt_mul_scalar(b, 1)), NULL);
    tt_backward(tt_add(tt_mul_scalar(out.at[0], 100), out.at[1]), NULL);
    CHECK(is(tt_grad(a), (float[]){ 1000 }) && is(tt_grad(b), (float[]){ 2 }));
    done(&scope);
}

TEST(a_view_changed_by_a_function_must_be_its_only_result) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf(tt_shape(1), (float[]){ 1 }), *b = leaf(tt_shape(2), (float[]){ 1, 1 });
    tt_tensor *view = tt_narrow(tt_mul_scalar(b, 1), 0, 1, 1);
    CHECK(tt_apply(&second_dirty, tt_tensors(a, view), NULL).count == 0);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("second_dirty");
    CHECK_MESSAGE("must be the only result");
    tt_error_clear();
    done(&scope);
}

static int scale_second_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_save_for_backward(context, tt_tensors(inputs.at[0]));
    tt_mul_(inputs.at[1], inputs.at[0]);
    tt_mark_dirty(context, inputs.at[1]);
    outputs[0] = inputs.at[1];
    return 1;
}
static int scale_second_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    tt_tensor_list saved = tt_saved_tensors(context);
    results[0] = NULL;
    results[1] = saved.count == 1 ? tt_mul(grads.at[0], saved.at[0]) : NULL;
    return 2;
}

TEST(a_view_changed_by_a_function_may_be_any_of_its_inputs) {
    tt_function function = { sizeof function, "scale_second", scale_second_forward, scale_second_backward, NULL };
    tt_scope scope = tt_scope_open();
    tt_tensor *factor = tt_full(tt_shape(1), 7, TUTTI_F32, NULL), *b = leaf(tt_shape(3), (float[]){ 1, 1, 1 });
    tt_tensor *whole = tt_mul_scalar(b, 1), *view = tt_narrow(whole, 0, 1, 2);
    CHECK(tt_apply(&function, tt_tensors(factor, view), NULL).at[0] == view);
    tt_backward(tt_sum(whole), NULL);
    CHECK(is(tt_grad(b), (float[]){ 1, 7, 7 }));
    done(&scope);
}

static int saves_second_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    outputs[0] = tt_mul_scalar(inputs.at[0], 3);
    outputs[1] = tt_exp(inputs.at[0]);
    tt_save_for_backward(context, tt_tensors(outputs[1]));
    return 2;
}
static int saves_second_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    tt_tensor_list saved = tt_saved_tensors(context);
    if (saved.count == 1)
        results[0] = tt_add(tt_mul_scalar(grads.at[0], 3), tt_mul(grads.at[1], saved.at[0]));
    return 1;
}

TEST(a_saved_second_result_is_differentiated_as_the_second) {
    tt_function function = { sizeof function, "saves_second", saves_second_forward, saves_second_backward, NULL };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(1), (float[]){ 1 });
    tt_tensor_list out = tt_apply(&function, tt_tensors(x), NULL);
    tt_tensor_list first = tt_gradients(tt_tensors(tt_sum(out.at[1])), tt_tensors(x), none,
                                        TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    tt_tensor_list second = tt_gradients(tt_tensors(tt_sum(first.at[0])), tt_tensors(x), none, NULL);
    CHECK(second.count == 1 && is(second.at[0], (float[]){ (float)exp(1) }));
    done(&scope);
}

static int stranger_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    tt_mark_dirty(context, outputs[0]);
    return 1;
}

TEST(only_an_input_can_be_marked_dirty) {
    tt_function function = { sizeof function, "stranger", stranger_forward, second_dirty_backward, NULL };
    tt_scope scope = tt_scope_open();
    CHECK(tt_apply(&function, tt_tensors(leaf(tt_shape(1), (float[]){ 1 })), NULL).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "none of its inputs");
    done(&scope);
}

/* ---- what is saved, and when ---- */

TEST(a_value_that_shares_its_version_with_what_is_written_is_an_error_in_backward) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 2, 3 }), *y = tt_mul_scalar(x, 1);
    tt_mul_(y, tt_detach(y));
    CHECK(!tt_backward(tt_sum(y), NULL));
    expect_error(TUTTI_ERROR_VERSION, "is at version 1; expected version 0");
    done(&scope);
}

TEST(a_view_used_in_a_change_of_its_base_follows_the_change) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = leaf(tt_shape(2), (float[]){ 1, 1 }), *y = tt_mul_scalar(w, 2), *view = tt_alias(y);
    tt_add_(y, view);
    tt_backward(tt_sum(view), NULL);
    CHECK(is(tt_grad(w), (float[]){ 4, 4 }));
    done(&scope);
}

TEST(a_change_with_its_version_preserved_still_reaches_the_views) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = leaf(tt_shape(2), (float[]){ 1, 1 }), *y = tt_mul_scalar(w, 2), *view = tt_alias(y);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(y));
    tt_mul_scalar_(view, 5);
    tt_preserve_end(preserve);
    tt_backward(tt_sum(view), NULL);
    CHECK(is(tt_grad(w), (float[]){ 10, 10 }));
    done(&scope);
}

TEST(an_in_place_operator_keeps_the_value_that_a_gradient_needs) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 2, 3 }), *w = leaf(tt_shape(2), (float[]){ 5, 7 });
    tt_tensor *y = tt_mul_scalar(x, 1);
    tt_mul_(y, w);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), (float[]){ 5, 7 }) && is(tt_grad(w), (float[]){ 2, 3 }));
    tt_set_grad(x, NULL);
    tt_set_grad(w, NULL);
    y = tt_mul_scalar(x, 1);
    tt_div_(y, w);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), (float[]){ 1 / 5.f, 1 / 7.f }) && is(tt_grad(w), (float[]){ -2 / 25.f, -3 / 49.f }));
    tt_set_grad(x, NULL);
    y = tt_mul_scalar(x, 1);
    tt_clamp_(y, 0, 2.5);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), (float[]){ 1, 0 }));
    done(&scope);
}

TEST(the_kept_value_is_differentiated_again) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(1), (float[]){ 2 }), *w = leaf(tt_shape(1), (float[]){ 5 });
    tt_tensor *y = tt_mul(x, x);
    tt_mul_(y, w); /* x^2 w */
    tt_tensor_list first = tt_gradients(tt_tensors(tt_sum(y)), tt_tensors(w), none,
                                        TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    tt_tensor_list second = tt_gradients(tt_tensors(tt_sum(first.at[0])), tt_tensors(x), none, NULL);
    CHECK(second.count == 1 && is(second.at[0], (float[]){ 4 }));
    done(&scope);
}

/* ---- views ---- */

TEST(a_change_through_a_view_as_complex_reaches_the_reals) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2, 2), (float[]){ 1, 2, 3, 4 }), *y = tt_mul_scalar(x, 1);
    tt_mul_scalar_(tt_view_as_complex(y), 3);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), (float[]){ 3, 3, 3, 3 }));
    tt_set_grad(x, NULL);
    y = tt_mul_scalar(x, 1);
    tt_mul_scalar_(tt_narrow(tt_view_as_complex(y), 0, 1, 1), 3); /* the second number alone */
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), (float[]){ 1, 1, 3, 3 }));
    done(&scope);
}

TEST(a_change_through_a_view_as_real_reaches_the_complex_numbers) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(3, 2), (float[]){ 1, 2, 3, 4, 5, 6 }), *z = tt_mul_scalar(tt_view_as_complex(x), 1);
    tt_tensor *reals = tt_view_as_real(z);
    tt_mul_scalar_(tt_select(reals, 1, 1), 10); /* the imaginary parts */
    tt_backward(tt_sum(tt_view_as_real(z)), NULL);
    CHECK(is(tt_grad(x), (float[]){ 1, 10, 1, 10, 1, 10 }));
    done(&scope);
}

TEST(an_overlapping_view_that_was_overtaken_adds_up_what_it_shares) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(5), (float[]){ 1, 1, 1, 1, 1 }), *y = tt_mul_scalar(x, 1);
    tt_tensor *view = tt_as_strided(y, tt_shape(4, 2), tt_shape(1, 1), 0);
    tt_mul_scalar_(y, 2);
    tt_backward(tt_sum(view), NULL);
    CHECK(is(tt_grad(x), (float[]){ 2, 4, 4, 4, 2 }));
    done(&scope);
}

TEST(an_expanded_view_that_was_overtaken_adds_up_what_it_shares) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2, 1), (float[]){ 1, 2 }), *y = tt_mul_scalar(x, 1);
    tt_tensor *view = tt_expand(y, tt_shape(2, 3));
    tt_mul_scalar_(y, 2);
    tt_backward(tt_sum(view), NULL);
    CHECK(is(tt_grad(x), (float[]){ 6, 6 }));
    done(&scope);
}

TEST(a_change_of_a_view_of_a_transposed_base_lands_where_it_belongs) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2, 3), (float[]){ 1, 2, 3, 4, 5, 6 });
    tt_tensor *base = tt_detach(tt_t(tt_zeros(tt_shape(3, 2), TUTTI_F32, NULL))); /* a base that is not contiguous */
    tt_copy_(tt_select(base, 0, 1), tt_select(x, 0, 1));
    tt_mul_scalar_(tt_narrow(base, 1, 0, 2), 3);
    tt_backward(tt_sum(base), NULL);
    CHECK(is(tt_grad(x), (float[]){ 0, 0, 0, 3, 3, 1 }));
    done(&scope);
}

TEST(a_view_made_before_its_base_joins_the_graph_requires_grad) {
    tt_scope scope = tt_scope_open();
    tt_tensor *buffer = tt_zeros(tt_shape(4), TUTTI_F32, NULL), *early = tt_narrow(buffer, 0, 0, 2);
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 3, 4 });
    CHECK(!tt_requires_grad(early) && tt_is_leaf(early));
    tt_copy_(tt_narrow(buffer, 0, 1, 2), x);
    CHECK(tt_requires_grad(early) && !tt_is_leaf(early));
    tt_retain_grad(early);
    tt_backward(tt_sum(early), NULL);
    CHECK(is(tt_grad(x), (float[]){ 1, 0 }) && is(tt_grad(early), (float[]){ 1, 1 }));
    done(&scope);
}

TEST(an_operator_that_writes_a_tensor_makes_one_version) {
    tt_scope scope = tt_scope_open();
    tt_tensor *first = tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), *second = tt_ones(tt_shape(4), TUTTI_F32, NULL);
    tt_tensor *out = tt_zeros(tt_shape(2, 5), TUTTI_F32, NULL);
    CHECK(tt_chunk_cat(tt_tensors(first, second), 2, out) != NULL);
    CHECK_EQ(tt_version(out), 1);
    done(&scope);
}

/* ---- what is saved, and written over later ---- */

TEST(what_is_computed_from_a_tensor_and_written_into_it_leads_to_no_circle) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(3), (float[]){ 1, 2, 3 });
    tt_tensor *y = tt_sin(x), *z = tt_exp(x), *fresh = tt_ones(tt_shape(3), TUTTI_F32, NULL);
    tt_mul_(y, y);                        /* saves what it writes */
    tt_copy_(z, tt_rms_norm(z, NULL, 1)); /* saved before, written after */
    tt_copy_(fresh, tt_mul(x, fresh));    /* the same for what had no history */
    done(&scope);
}

TEST(a_saved_argument_keeps_its_history_for_a_second_derivative) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(1), (float[]){ 3 });
    tt_tensor *y = tt_mul_scalar(x, 2), *z = tt_square(y); /* saves y */
    tt_tensor_list first =
        tt_gradients(tt_tensors(z), tt_tensors(x), none, TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    tt_tensor_list second = tt_gradients(tt_tensors(first.at[0]), tt_tensors(x), none, NULL);
    CHECK(is(first.at[0], (float[]){ 24 }) && is(second.at[0], (float[]){ 8 }));
    done(&scope);
}

/* ---- as_strided ---- */

TEST(as_strided_has_a_gradient_whatever_lies_under_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2, 3), (float[]){ 1, 2, 3, 4, 5, 6 });
    tt_tensor *part = tt_narrow(tt_mul_scalar(x, 1), 1, 0, 2);                   /* elements 0 1 3 4 */
    tt_backward(tt_sum(tt_as_strided(part, tt_shape(3), tt_shape(1), 1)), NULL); /* elements 1 2 3 */
    CHECK(is(tt_grad(x), (float[]){ 0, 1, 0, 1, 0, 0 }));
    tt_tensor *one = leaf(tt_shape(1), (float[]){ 1 });
    tt_tensor *three = tt_expand(tt_mul_scalar(one, 1), tt_shape(3));
    tt_backward(tt_sum(tt_as_strided(three, tt_shape(2), tt_shape(0), 0)), NULL);
    CHECK(is(tt_grad(one), (float[]){ 2 }));
    done(&scope);
}

/* ---- functions that return what they were given ---- */

static int same_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)context;
    outputs[0] = inputs.at[0];
    return 1;
}
static int same_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 7);
    return 1;
}
static const tt_function same = { sizeof same, "same", same_forward, same_backward, NULL };

TEST(a_functions_result_is_refused_when_its_argument_was_changed_in_place_after_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 1, 2 }), *y = tt_sin(x);
    tt_tensor *through = tt_apply(&same, tt_tensors(y), NULL).at[0];
    tt_mul_scalar_(y, 2);
    CHECK(!tt_is_leaf(through) && tt_requires_grad(through));
    CHECK(tt_mul_scalar(through, 2) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("custom function");
    CHECK_MESSAGE("Clone");
    tt_error_clear();
    done(&scope);
}

TEST(a_function_that_returns_its_argument_gives_an_alias_without_gradients_too) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 1, 2 });
    bool recording = tt_grad_mode(false);
    tt_tensor *y = tt_apply(&same, tt_tensors(x), NULL).at[0];
    tt_grad_mode(recording);
    CHECK(y != x && tt_same_storage(x, y) && !tt_requires_grad(y));
    tt_fill_(y, 3); /* a tensor of its own: no view of a leaf, as a plain view with gradients off would be */
    CHECK(tt_error_pending() == TUTTI_OK && tt_version(x) == 1 && tt_item(tt_sum(x)) == 6);
    done(&scope);
}

/* ---- second derivatives through views that were changed ---- */

/* The derivative of tanh is written with its result, which lies in the base here. */
TEST(a_result_saved_by_a_change_of_a_view_has_its_history) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 0.5, -1 }), *whole = tt_mul_scalar(x, 1);
    tt_tanh_(tt_narrow(whole, 0, 0, 1));
    tt_tensor_list first = tt_gradients(tt_tensors(tt_sum(whole)), tt_tensors(x), none,
                                        TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    tt_tensor_list second = tt_gradients(tt_tensors(tt_sum(first.at[0])), tt_tensors(x), none, NULL);
    float y = (float)tanh(0.5);
    CHECK(second.count == 1 && is(second.at[0], (float[]){ -2 * y * (1 - y * y), 0 }));
    done(&scope);
}

TEST(a_function_sees_that_the_base_of_its_argument_has_joined_the_graph) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 1, 2 }), *plain = tt_zeros(tt_shape(2), TUTTI_F32, NULL);
    tt_tensor *view = tt_narrow(plain, 0, 1, 1); /* made before */
    tt_copy_(plain, x);
    tt_tensor *y = tt_apply(&same, tt_tensors(view), NULL).at[0];
    CHECK(tt_requires_grad(y));
    tt_backward(y, NULL);
    CHECK(is(tt_grad(x), (float[]){ 0, 7 }));
    done(&scope);
}

/* ---- views that nobody sees, and views that nobody recorded ---- */

TEST(a_result_is_no_view_of_something_that_only_its_operator_knew) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf(tt_shape(2), (float[]){ 1, 2 }), *m = leaf(tt_shape(2, 3), (float[]){ 1, 2, 3, 4, 5, 6 });
    tt_tensor *x = leaf(tt_shape(6), (float[]){ 1, 2, 3, 4, 5, 6 });
    CHECK_EQ(tt_apply(&second_dirty, tt_tensors(x, tt_matmul(a, m)), NULL).count, 2);
    CHECK_EQ(tt_apply(&second_dirty, tt_tensors(x, tt_reshape(tt_transpose(m, 0, 1), tt_shape(6))), NULL).count, 2);
    CHECK_EQ(tt_apply(&second_dirty, tt_tensors(x, tt_sum_to(m, tt_shape(3))), NULL).count, 2);
    done(&scope);
}

TEST(a_leaf_is_not_changed_through_a_view_that_was_made_without_gradients) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 1, 2 });
    bool recording = tt_grad_mode(false);
    tt_tensor *view = tt_narrow(x, 0, 0, 1);
    CHECK(tt_fill_(view, 3) == view); /* that is what gradient mode is switched off for */
    tt_grad_mode(recording);
    CHECK(tt_fill_(view, 4) == NULL);
    expect_error(TUTTI_ERROR_STATE, "in-place operation");
    CHECK(is(tt_detach(x), (float[]){ 3, 2 }));
    done(&scope);
}

TEST(a_view_made_without_gradients_stays_a_leaf_when_its_base_changes) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2), (float[]){ 1, 2 }), *y = tt_sin(x);
    bool recording = tt_grad_mode(false);
    tt_tensor *view = tt_narrow(y, 0, 0, 1);
    tt_grad_mode(recording);
    tt_mul_scalar_(y, 2);
    CHECK(tt_is_leaf(view) && !tt_requires_grad(view) && tt_grad_fn(view) == NULL);
    CHECK(!tt_requires_grad(view)); /* asking has not changed it */
    done(&scope);
}

/* A gradient is kept of the value that a tensor has, and a view that was written has a new one. */
TEST(a_view_that_was_written_keeps_the_gradient_of_its_new_value) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(1, 2), (float[]){ 3, 4 });
    tt_tensor *view = tt_view(tt_mul_scalar(x, 1), tt_shape(2));
    tt_retain_grad(view);
    tt_tensor *before = tt_mul_scalar(view, 5);
    tt_neg_(view);
    tt_backward_from(tt_tensors(tt_sum(before)), none, TUTTI_OPTIONS(tt_backward_options, .retain_graph = true));
    CHECK(tt_grad(view) == NULL);
    tt_backward(tt_sum(tt_mul_scalar(view, 7)), NULL);
    CHECK(is(tt_grad(view), (float[]){ 7, 7 }) && is(tt_grad(x), (float[]){ 5 - 7, 5 - 7 }));
    done(&scope);
}
