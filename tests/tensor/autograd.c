/* SPDX-License-Identifier: Apache-2.0
 *
 * Autograd: accumulation, order, hooks, in-place changes, saved tensors, custom functions.
 */
#include <math.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

#include "autograd/node.h"
#include "support.h"

static const tt_tensor_list none = { 0, NULL };

static tt_tensor *leaf(int count, const float *values) {
    return tt_from(values, tt_shape(count), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
}

static bool is(tt_tensor *x, int count, const float *values) {
    return x != NULL && tt_allclose(x, tt_from(values, tt_shape(count), TUTTI_F32, NULL), 1e-6, 1e-6);
}

/* ---- leaves and accumulation ---- */

static int hook_calls;
static float hook_saw;
static tt_tensor *watch(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    hook_calls++;
    hook_saw = (float)tt_item(tt_sum(grad));
    return NULL;
}

TEST(a_diamond_sums_its_paths_once_and_the_hook_sees_the_total) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 });
    CHECK(tt_hook_tensor(x, watch, NULL, NULL, NULL));
    tt_tensor *y = tt_mul_scalar(x, 2);
    tt_backward(tt_sum(tt_add(tt_mul(y, y), tt_mul_scalar(y, 3))), NULL);
    CHECK(is(tt_grad(x), 2, (float[]){ 14, 22 }));
    CHECK(hook_calls == 1 && hook_saw == 36);
    done(&scope);
}

static int pass_on(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)context;
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    return 1;
}

static int give_nothing(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    (void)context, (void)grads;
    results[0] = NULL;
    return 1;
}

TEST(what_a_backward_freed_is_missed_only_where_a_gradient_arrives) {
    tt_scope scope = tt_scope_open();
    tt_function deaf = { .size = sizeof deaf, .name = "deaf", .forward = pass_on, .backward = give_nothing };
    tt_tensor *x = leaf(2, (float[]){ 1, 2 }), *y = tt_square(x);
    CHECK(tt_backward(tt_sum(y), NULL));
    CHECK(tt_backward(tt_sum(tt_apply(&deaf, tt_tensors(y), NULL).at[0]), NULL)); /* nothing arrives at square */
    CHECK(is(tt_grad(x), 2, (float[]){ 2, 4 }));
    CHECK(!tt_backward(tt_sum(tt_mul_scalar(y, 2)), NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_GRAPH);
    CHECK_MESSAGE("second time");
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_second_backward_needs_retain_graph) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 }), *y = tt_sum(tt_mul(x, x));
    CHECK(tt_backward_from(tt_tensors(y), none, TUTTI_OPTIONS(tt_backward_options, .retain_graph = true)));
    CHECK(tt_backward(y, NULL));
    CHECK(is(tt_grad(x), 2, (float[]){ 4, 8 }));
    CHECK(!tt_backward(y, NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_GRAPH);
    CHECK_MESSAGE("second time");
    CHECK_MESSAGE("mul");
    tt_error_clear();
    done(&scope);
}

TEST(accumulation_keeps_the_gradients_handle) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 });
    tt_backward(tt_sum(tt_mul_scalar(x, 2)), NULL);
    tt_tensor *first = tt_grad(x);
    tt_backward(tt_sum(tt_mul_scalar(x, 3)), NULL);
    CHECK(tt_grad(x) == first && is(first, 2, (float[]){ 5, 5 }));
    tt_set_grad(x, NULL);
    CHECK(tt_grad(x) == NULL);
    tt_set_grad(x, tt_ones(tt_shape(3), TUTTI_F32, NULL));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    done(&scope);
}

TEST(gradients_take_the_layout_of_their_leaf) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = tt_empty_strided(tt_shape(3, 2), tt_shape(1, 3), TUTTI_F32, NULL);
    tt_require_grad(tt_fill_(w, 1), true);
    tt_backward(tt_sum(tt_matmul(tt_ones(tt_shape(4, 3), TUTTI_F32, NULL), w)), NULL);
    CHECK(tt_stride(tt_grad(w), 0) == 1 && tt_stride(tt_grad(w), 1) == 3);
    tt_tensor *b = leaf(1, (float[]){ 2 });
    tt_backward(tt_sum(tt_expand(b, tt_shape(5, 3))), NULL); /* expand reduces */
    CHECK(is(tt_grad(b), 1, (float[]){ 15 }));
    done(&scope);
}

TEST(only_floats_can_require_grad_and_only_leaves_can_stop) {
    tt_scope scope = tt_scope_open();
    CHECK(tt_require_grad(tt_ones(tt_shape(2), TUTTI_I64, NULL), true) == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_TYPE);
    tt_error_clear();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 }), *y = tt_mul(x, x);
    CHECK(!tt_is_leaf(y) && tt_is_leaf(x) && tt_requires_grad(y));
    CHECK(tt_require_grad(y, false) == NULL);
    tt_error_clear();
    bool was = tt_grad_mode(false);
    CHECK(was && !tt_requires_grad(tt_mul(x, x)));
    tt_grad_mode(was);
    CHECK(!tt_backward(y, NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "only for scalar outputs");
    CHECK(!tt_backward(tt_detach(x), NULL));
    tt_error_clear();
    done(&scope);
}

TEST(gradients_of_chosen_inputs_leave_others_alone) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf(2, (float[]){ 1, 2 }), *b = leaf(2, (float[]){ 3, 4 }), *c = tt_mul(a, b),
              *unused = leaf(1, (float[]){ 1 });
    tt_tensor *loss = tt_sum(tt_mul(c, c));
    tt_tensor_list g = tt_gradients(tt_tensors(loss), tt_tensors(a, c, unused), none,
                                    TUTTI_OPTIONS(tt_backward_options, .retain_graph = true));
    CHECK(g.count == 3 && is(g.at[0], 2, (float[]){ 18, 64 }) && is(g.at[1], 2, (float[]){ 6, 16 }) && g.at[2] == NULL);
    CHECK(tt_grad(a) == NULL && tt_grad(b) == NULL);
    tt_tensor_list wanted = tt_tensors(b);
    CHECK(tt_backward_from(tt_tensors(loss), none, TUTTI_OPTIONS(tt_backward_options, .inputs = wanted)));
    CHECK(tt_grad(a) == NULL && is(tt_grad(b), 2, (float[]){ 6, 32 }));
    CHECK(tt_gradients(tt_tensors(loss), none, none, NULL).count == 0);
    tt_error_clear();
    done(&scope);
}

TEST(a_differentiable_backward_can_be_differentiated) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 2, 3 }), *y = tt_sum(tt_mul(tt_exp(x), tt_mul(x, x)));
    tt_tensor_list g =
        tt_gradients(tt_tensors(y), tt_tensors(x), none, TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    CHECK(g.count == 1 && tt_requires_grad(g.at[0]));
    tt_tensor_list h = tt_gradients(tt_tensors(tt_sum(g.at[0])), tt_tensors(x), none, NULL);
    /* (x^2 e^x)'' = (x^2 + 4x + 2) e^x */
    CHECK(is(h.at[0], 2, (float[]){ (float)(14 * exp(2)), (float)(23 * exp(3)) }));
    done(&scope);
}

static tt_tensor *inner_backward(const tt_hook_context *context, tt_tensor *grad) {
    bool was = tt_grad_mode(true);
    tt_tensor *inner = context->captured.at[0];
    tt_backward(tt_mul(inner, inner), NULL);
    tt_grad_mode(was);
    return tt_mul(grad, tt_grad(inner));
}

TEST(a_backward_runs_inside_a_hook_of_another) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1, (float[]){ 3 }), *inner = leaf(1, (float[]){ 4 });
    tt_hook_tensor(x, inner_backward, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(inner)), NULL);
    tt_backward(tt_mul(x, x), NULL);
    CHECK(is(tt_grad(inner), 1, (float[]){ 8 }) && is(tt_grad(x), 1, (float[]){ 48 }));
    done(&scope);
}

static void log_sequence(const tt_hook_context *context, size_t count, tt_tensor **grads) {
    (void)count, (void)grads;
    uint64_t **at = context->user;
    *(*at)++ = (uint64_t)(context->captured.count > 0 ? tt_item_int(context->captured.at[0]) : 0);
}
static void log_leaf(const tt_hook_context *context, tt_tensor *parameter) {
    (void)parameter;
    uint64_t **at = context->user;
    *(*at)++ = 99;
}

TEST(nodes_run_by_descending_creation_and_leaves_at_once) {
    uint64_t log[8] = { 0 }, *at = log;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1, (float[]){ 2 }), *w = leaf(1, (float[]){ 5 });
    tt_hook_accumulate(w, log_leaf, &at, NULL, NULL);
    tt_tensor *a = tt_sin(x), *b = tt_cos(x), *c = tt_mul(a, w), *d = tt_add(c, b);
    tt_tensor *chain[] = { a, b, c, d };
    for (int i = 0; i < 4; i++)
        tt_hook_node_pre(tt_grad_fn(chain[i]), log_sequence, &at,
                         TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(tt_number(i + 1))), NULL);
    CHECK(tt_node_sequence(tt_grad_fn(d)) > tt_node_sequence(tt_grad_fn(a)));
    tt_backward(tt_sum(d), NULL);
    const uint64_t expected[] = { 4, 3, 99, 2, 1 }; /* d, c, then w at once, b, a */
    for (int i = 0; i < 5; i++)
        CHECK_EQ(log[i], expected[i]);
    done(&scope);
}

/* ---- hooks ---- */

static tt_tensor *twice(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    return tt_mul_scalar(grad, 2);
}
static tt_tensor *plus_captured(const tt_hook_context *context, tt_tensor *grad) {
    return tt_add(grad, context->captured.at[0]);
}
static tt_tensor *wrong_shape(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    return tt_sum(grad);
}

TEST(tensor_hooks_run_in_order_and_can_be_removed) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1, (float[]){ 1 }), *y = tt_mul_scalar(x, 3);
    tt_hook *second = NULL;
    tt_hook_tensor(y, twice, NULL, NULL, NULL);
    tt_hook_tensor(y, plus_captured, NULL,
                   TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(tt_full(tt_shape(1), 10, TUTTI_F32, NULL))),
                   &second);
    tt_retain_grad(y);
    tt_backward_from(tt_tensors(y), none, TUTTI_OPTIONS(tt_backward_options, .retain_graph = true));
    CHECK(is(tt_grad(x), 1, (float[]){ 36 })); /* (1 * 2 + 10) * 3 */
    CHECK(is(tt_grad(y), 1, (float[]){ 12 })); /* what is retained is what the hooks made */
    tt_hook_remove(&second);
    tt_hook_remove(&second);
    tt_set_grad(x, NULL);
    tt_backward(y, NULL);
    CHECK(is(tt_grad(x), 1, (float[]){ 6 }));
    CHECK(is(tt_grad(y), 1, (float[]){ 14 }));
    CHECK(!tt_hook_tensor(tt_detach(x), twice, NULL, NULL, NULL));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_STATE);
    tt_error_clear();
    done(&scope);
}

TEST(a_hook_must_keep_the_shape) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 });
    tt_hook_tensor(x, wrong_shape, NULL, NULL, NULL);
    CHECK(!tt_backward(tt_sum(x), NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("hooks must keep shape");
}

static void step_at_once(const tt_hook_context *context, tt_tensor *parameter) {
    (void)context;
    tt_sgd_step(parameter, tt_grad(parameter), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 1));
    tt_set_grad(parameter, NULL);
}

TEST(an_accumulate_hook_may_step_the_parameter) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 5, 6 });
    CHECK(tt_hook_accumulate(x, step_at_once, NULL, NULL, NULL));
    tt_backward(tt_sum(tt_mul_scalar(x, 2)), NULL);
    CHECK(is(tt_detach(x), 2, (float[]){ 3, 4 }) && tt_grad(x) == NULL);
    CHECK(!tt_hook_accumulate(tt_mul(x, x), step_at_once, NULL, NULL, NULL));
    tt_error_clear();
    done(&scope);
}

static void node_pre(const tt_hook_context *context, size_t count, tt_tensor **grads) {
    (void)context;
    CHECK_EQ(count, 1);
    grads[0] = tt_mul_scalar(grads[0], 5);
}
static void node_post(const tt_hook_context *context, size_t result_count, tt_tensor **results, size_t grad_count,
                      tt_tensor *const *grads) {
    (void)context;
    CHECK(result_count == 2 && grad_count == 1 && tt_item(grads[0]) == 5);
    results[1] = tt_add_scalar(results[1], 1);
}

TEST(node_hooks_replace_gradients_before_and_after) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf(1, (float[]){ 2 }), *b = leaf(1, (float[]){ 3 }), *c = tt_mul(a, b);
    tt_hook_node_pre(tt_grad_fn(c), node_pre, NULL, NULL, NULL);
    tt_hook_node_post(tt_grad_fn(c), node_post, NULL, NULL, NULL);
    CHECK_TEXT(tt_node_name(tt_grad_fn(c)), "mul");
    tt_backward(c, NULL);
    CHECK(is(tt_grad(a), 1, (float[]){ 15 }) && is(tt_grad(b), 1, (float[]){ 11 }));
    CHECK(tt_grad_fn(a) == NULL);
    done(&scope);
}

static int finals;
static void last(void *user) {
    finals += *(int *)user;
}
static void first(void *user) {
    CHECK(tt_backward_callback(last, user)); /* a callback may queue more */
    finals *= 10;
}
static tt_tensor *queue_final(const tt_hook_context *context, tt_tensor *grad) {
    (void)grad;
    finals = 1;
    CHECK(tt_backward_callback(first, context->user));
    return NULL;
}

TEST(final_callbacks_run_after_the_last_node_and_only_in_a_backward) {
    static int five = 5;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1, (float[]){ 1 });
    tt_hook_tensor(x, queue_final, &five, NULL, NULL);
    tt_backward(tt_mul_scalar(x, 2), NULL);
    CHECK_EQ(finals, 15);
    CHECK(!tt_backward_callback(last, &five));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("only be installed during a backward");
}

static int packs, unpacks, releases;
static void *pack(void *user, tt_tensor *tensor) {
    (void)user;
    packs++;
    return tt_keep(tt_mul_scalar(tensor, 10));
}
static tt_tensor *unpack(void *user, void *packed) {
    (void)user;
    unpacks++;
    return tt_div_scalar(packed, 10);
}
static void release_packed(void *user, void *packed) {
    (void)user;
    releases++;
    tt_release(packed);
}

TEST(saved_tensors_can_be_packed_elsewhere) {
    tt_scope scope = tt_scope_open();
    tt_saved_hooks hooks = { sizeof hooks, pack, unpack, release_packed, NULL };
    tt_tensor *x = leaf(2, (float[]){ 1, 2 });
    CHECK(tt_saved_hooks_push(&hooks));
    tt_tensor *y = tt_sin(x);
    tt_saved_hooks_pop();
    CHECK_EQ(packs, 1);
    bool was = tt_grad_mode(false);
    tt_fill_(x, 0); /* not noticed: the packed copy counts */
    tt_grad_mode(was);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), 2, (float[]){ 0.540302306f, -0.416146837f }));
    CHECK(packs == 1 && unpacks == 1 && releases == 1);
    done(&scope);
}

/* ---- in place ---- */

TEST(a_leaf_that_requires_grad_cannot_be_changed_in_place) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(3, (float[]){ 1, 1, 1 });
    CHECK(tt_add_scalar_(x, 1) == NULL);
    expect_error(TUTTI_ERROR_STATE, "leaf");
    CHECK(tt_add_scalar_(tt_narrow(x, 0, 0, 2), 1) == NULL);
    expect_error(TUTTI_ERROR_STATE, "view of a leaf");
    bool was = tt_grad_mode(false);
    CHECK(tt_add_scalar_(x, 1) != NULL && tt_version(x) == 1);
    tt_tensor *blind = tt_narrow(tt_mul_scalar(x, 1), 0, 0, 2);
    tt_grad_mode(was);
    CHECK(tt_mul_(blind, tt_narrow(x, 0, 0, 2)) == NULL);
    expect_error(TUTTI_ERROR_STATE, "gradient mode off");
    done(&scope);
}

TEST(an_in_place_change_of_a_view_reaches_its_base) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(3, (float[]){ 1, 1, 1 }), *y = tt_mul_scalar(x, 1);
    tt_mul_scalar_(tt_narrow(y, 0, 0, 2), 2);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), 3, (float[]){ 2, 2, 1 }));
    done(&scope);
}

TEST(views_made_before_a_change_follow_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(4, (float[]){ 1, 2, 3, 4 }), *y = tt_mul_scalar(x, 1), *view = tt_view(y, tt_shape(2, 2));
    tt_mul_scalar_(tt_select(view, 0, 1), 10); /* rows of a view of y */
    tt_tensor *w = leaf(2, (float[]){ 5, 7 });
    tt_add_(tt_narrow(y, 0, 0, 2), w);             /* and by something that requires grad */
    tt_backward(tt_sum(tt_mul(view, view)), NULL); /* y = (1 + 5, 2 + 7, 30, 40) */
    CHECK(is(tt_grad(x), 4, (float[]){ 12, 18, 600, 800 }));
    CHECK(is(tt_grad(w), 2, (float[]){ 12, 18 }));
    done(&scope);
}

TEST(a_plain_tensor_joins_the_graph_when_something_is_written_into_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *buffer = tt_zeros(tt_shape(4), TUTTI_F32, NULL), *early = tt_narrow(buffer, 0, 0, 2);
    tt_tensor *x = leaf(2, (float[]){ 3, 4 });
    tt_copy_(tt_narrow(buffer, 0, 0, 2), tt_mul(x, x));
    CHECK(tt_requires_grad(buffer));
    tt_backward(tt_sum(tt_mul_scalar(early, 2)), NULL);
    CHECK(is(tt_grad(x), 2, (float[]){ 12, 16 }));
    done(&scope);
}

TEST(an_in_place_chain_differentiates_and_keeps_retained_gradients) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 }), *y = tt_mul_scalar(x, 3);
    tt_retain_grad(y);
    tt_neg_(tt_neg_(tt_add_scalar_(y, 1)));
    tt_sqrt_(y);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(x), 2, (float[]){ 0.75f, 1.5f / sqrtf(7) }));
    CHECK(is(tt_grad(y), 2, (float[]){ 1, 1 }));
    done(&scope);
}

TEST(an_input_of_a_backward_that_retains_its_gradient_or_is_named_twice_collects_it_once) {
    tt_scope scope = tt_scope_open();
    for (int retains = 0; retains < 2; retains++) {
        tt_tensor *x = leaf(2, (float[]){ 1, 2 }), *y = tt_mul_scalar(x, 3), *z = tt_sum(tt_mul(y, y));
        tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
        options.retain_graph = true;
        if (retains)
            tt_retain_grad(y);
        options.inputs = tt_tensors(y);
        CHECK(tt_backward_from(tt_tensors(z), none, &options));
        CHECK(is(tt_grad(y), 2, (float[]){ 6, 12 }) && tt_grad(x) == NULL);
        options.inputs = tt_tensors(y, x, y);
        CHECK(tt_backward_from(tt_tensors(z), none, &options));
        CHECK(is(tt_grad(y), 2, (float[]){ 12, 24 }) && is(tt_grad(x), 2, (float[]){ 18, 36 }));
        options.inputs = none;
        CHECK(is(tt_gradients(tt_tensors(z), tt_tensors(y), none, &options).at[0], 2, (float[]){ 6, 12 }));
        CHECK(is(tt_grad(y), 2, retains ? (float[]){ 18, 36 } : (float[]){ 12, 24 })); /* retained there, too */
    }
    done(&scope);
}

/* ---- versions and freed storage in backward ---- */

TEST(a_saved_tensor_that_was_changed_is_an_error_that_names_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = leaf(2, (float[]){ 1, 2 }), *y = tt_mul(w, w);
    tt_set_name(w, "weight");
    bool was = tt_grad_mode(false);
    tt_add_scalar_(w, 1);
    tt_grad_mode(was);
    CHECK(!tt_backward(tt_sum(y), NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_VERSION);
    CHECK_MESSAGE("\"weight\" f32 [2]");
    CHECK_MESSAGE("saved by mul");
    CHECK_MESSAGE("is at version 1; expected version 0");
}

TEST(preserving_the_version_lets_backward_see_the_new_content) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = leaf(2, (float[]){ 1, 2 }), *y = tt_mul(w, w);
    bool was = tt_grad_mode(false);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(w));
    tt_add_scalar_(w, 1);
    tt_preserve_end(preserve);
    tt_grad_mode(was);
    tt_backward(tt_sum(y), NULL);
    CHECK(is(tt_grad(w), 2, (float[]){ 4, 6 }));
    done(&scope);
}

TEST(storage_refilled_between_forward_and_backward_is_what_backward_reads) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = tt_require_grad(tt_ones(tt_shape(2, 2), TUTTI_F32, NULL), true),
              *x = tt_require_grad(tt_ones(tt_shape(1, 2), TUTTI_F32, NULL), true);
    tt_tensor *y = tt_matmul(x, tt_t(w)); /* a view of w is saved */
    bool was = tt_grad_mode(false);
    tt_storage_resize(w, 0);
    tt_storage_resize(w, 16);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(w));
    tt_fill_(w, 7);
    tt_preserve_end(preserve);
    tt_grad_mode(was);
    tt_backward(tt_sum(y), NULL);
    CHECK(tt_at(tt_grad(x), tt_shape(0, 1)) == 14);
    done(&scope);
}

TEST(storage_still_freed_at_backward_is_an_error_of_that_node) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = leaf(2, (float[]){ 1, 2 }), *y = tt_sin(w);
    tt_set_name(w, "shard");
    tt_storage_resize(w, 0);
    CHECK(!tt_backward(tt_sum(y), NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_FREED);
    CHECK_MESSAGE("freed");
    CHECK_MESSAGE("\"shard\"");
    CHECK_MESSAGE("in the backward of sin (node");
}

/* ---- custom functions ---- */

static int cube_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    CHECK(!tt_grad_enabled());
    tt_save_for_backward(context, inputs);
    outputs[0] = tt_mul(inputs.at[0], tt_mul(inputs.at[0], inputs.at[0]));
    outputs[1] = tt_sum(inputs.at[0]);
    return 2;
}
static int cube_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    int *zeros_seen = tt_function_user(context);
    tt_tensor_list saved = tt_saved_tensors(context);
    CHECK(saved.count == 1 && grads.count == 2 && grads.at[1] != NULL && tt_needs_input_grad(context, 0));
    *zeros_seen += tt_item(grads.at[1]) == 0;
    results[0] = tt_mul(grads.at[0], tt_mul_scalar(tt_mul(saved.at[0], saved.at[0]), 3));
    return *zeros_seen > 1 ? 2 : 1; /* the second time with a wrong count */
}
static int released_users;
static void count_user(void *user) {
    released_users += user != NULL;
}

TEST(a_custom_function_has_its_own_gradient_and_unused_outputs_are_zeros) {
    static int zeros_seen;
    tt_function cube = { sizeof cube, "cube", cube_forward, cube_backward, count_user };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 });
    tt_tensor_list y = tt_apply(&cube, tt_tensors(x), &zeros_seen);
    CHECK(y.count == 2 && tt_requires_grad(y.at[0]) && tt_requires_grad(y.at[1]));
    tt_backward(tt_sum(y.at[0]), NULL);
    CHECK(is(tt_grad(x), 2, (float[]){ 3, 12 }));
    CHECK_EQ(zeros_seen, 1);
    CHECK(!tt_backward(tt_sum(tt_apply(&cube, tt_tensors(x), &zeros_seen).at[0]), NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "incorrect number of gradients (expected 1, got 2)");
    done(&scope);
    CHECK_EQ(released_users, 2);
}

static int signs_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    if (tt_numel(inputs.at[0]) == 1)
        return 0;
    outputs[0] = tt_gt(inputs.at[0], tt_number(0));
    outputs[1] = tt_sign(inputs.at[0]);
    tt_mark_non_differentiable(context, outputs[1]);
    tt_save_for_backward(context, inputs);
    return 2;
}

TEST(a_custom_function_none_of_whose_results_has_a_gradient_leaves_no_graph) {
    static int unused;
    tt_function signs = { sizeof signs, "signs", signs_forward, cube_backward, count_user };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, -2 });
    int before = released_users;
    tt_tensor_list y = tt_apply(&signs, tt_tensors(x), &unused);
    CHECK(y.count == 2 && !tt_requires_grad(y.at[0]) && !tt_requires_grad(y.at[1]));
    CHECK(is(y.at[1], 2, (float[]){ 1, -1 }));
    CHECK_EQ(released_users - before, 1);
    CHECK_EQ(tt_apply(&signs, tt_tensors(leaf(1, (float[]){ 1 })), &unused).count, 0);
    CHECK_EQ(released_users - before, 2);
    done(&scope);
}

static int dirty_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_mul_scalar_(inputs.at[0], 2);
    tt_mark_dirty(context, inputs.at[0]);
    outputs[0] = inputs.at[0];
    outputs[1] = inputs.at[1]; /* passed through: comes back as a view */
    return 2;
}
static int dirty_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 2);
    results[1] = grads.at[1];
    return 2;
}

TEST(a_custom_function_may_change_an_input_and_pass_another_through) {
    tt_function function = { sizeof function, "dirty", dirty_forward, dirty_backward, NULL };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(2, (float[]){ 1, 2 }), *y = tt_mul_scalar(x, 1), *z = leaf(1, (float[]){ 4 });
    tt_tensor_list out = tt_apply(&function, tt_tensors(y, z), NULL);
    CHECK(out.at[0] == y && out.at[1] != z && tt_same_storage(out.at[1], z) && tt_version(y) == 1);
    CHECK(tt_mul_scalar_(out.at[1], 2) == NULL); /* a view made in a custom function, of a leaf */
    tt_error_clear();
    tt_backward(tt_add(tt_sum(tt_mul(y, y)), tt_mul_scalar(out.at[1], 3)), NULL);
    CHECK(is(tt_grad(x), 2, (float[]){ 8, 16 }) && is(tt_grad(z), 1, (float[]){ 3 }));
    done(&scope);
}

TEST(an_error_in_a_node_stops_the_backward_before_other_leaves) {
    tt_scope scope = tt_scope_open();
    tt_tensor *early = leaf(1, (float[]){ 1 }), *w = leaf(1, (float[]){ 1 });
    tt_tensor *y = tt_mul(tt_sin(tt_mul_scalar(early, 1)), w), *saved = tt_exp(y);
    bool was = tt_grad_mode(false);
    tt_add_scalar_(saved, 1); /* exp saves its output */
    tt_grad_mode(was);
    CHECK(!tt_backward(saved, NULL));
    tt_error_clear();
    CHECK(tt_grad(early) == NULL && tt_grad(w) == NULL);
    done(&scope);
}

TEST(a_very_long_chain_is_freed_without_deep_recursion) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1, (float[]){ 1 });
    tt_tensor *y = tt_keep(tt_mul_scalar(x, 1));
    for (int i = 0; i < 200000; i++) {
        tt_scope inner = tt_scope_open();
        tt_tensor *next = tt_keep(tt_add_scalar(y, 1));
        CHECK_OK(tt_scope_close(&inner));
        tt_release(y);
        y = next;
    }
    tt_backward(y, NULL);
    CHECK(is(tt_grad(x), 1, (float[]){ 1 }));
    tt_release(y);
    done(&scope);
}
