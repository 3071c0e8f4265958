/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules: each parameter once, and messages that say where in the tree something went wrong.
 */
#include <tutti/module.h>
#include <tutti/ops.h>

#include "../harness.h"

static void done(tt_scope *scope) {
    CHECK_OK(tt_scope_close(scope));
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK(counts.tensors == 0 && counts.storages == 0 && counts.nodes == 0 && counts.scopes == 0);
}

static tt_module *linear(int64_t in, int64_t out) {
    return tt_linear_module(in, out, true, TUTTI_F32);
}

/* A net of two layers in a block: "block.0" and "block.1". */
static tt_module *net_of(int64_t in, int64_t middle, int64_t out) {
    tt_module *layers[] = { linear(in, middle), linear(middle, out) };
    tt_module *block[] = { tt_sequential_module(2, layers) };
    return tt_sequential_module(1, block);
}

TEST(a_shared_parameter_is_listed_once) {
    tt_scope scope = tt_scope_open();
    tt_module *first = linear(4, 4), *second = linear(4, 4);
    CHECK(tt_module_set_parameter(second, "weight", tt_module_parameter(first, "weight")));
    tt_module *layers[] = { first, second }, *net = tt_sequential_module(2, layers);
    tt_named_list parameters = tt_module_parameters(net);
    CHECK_EQ(parameters.count, 3);
    CHECK_TEXT(parameters.names[0], "0.weight");
    CHECK_TEXT(parameters.names[1], "0.bias");
    CHECK_TEXT(parameters.names[2], "1.bias");
    tt_module_release(net);
    done(&scope);
}

TEST(two_children_of_one_name_are_refused) {
    tt_scope scope = tt_scope_open();
    tt_module *net = tt_sequential_module(0, NULL);
    CHECK(tt_module_add_child(net, "head", linear(2, 2)));
    CHECK(!tt_module_add_child(net, "head", linear(2, 2)));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_EXISTS);
    CHECK_MESSAGE("\"head\"");
    tt_error_clear();
    tt_module *head = tt_module_child(net, "head");
    CHECK(!tt_module_add_child(head, "weight", linear(2, 2))); /* the name of a parameter */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_EXISTS);
    tt_error_clear();
    CHECK(!tt_module_add_child(head, "up", tt_module_keep(net))); /* a circle */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_module_release(net);
    done(&scope);
}

TEST(an_error_in_a_forward_names_the_module_and_the_parameter) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(4, 3, 2);
    tt_module *last = tt_module_child(tt_module_child(net, "0"), "1");
    CHECK(tt_module_set_parameter(last, "weight", tt_ones(tt_shape(2, 7), TUTTI_F32, NULL)));
    CHECK(tt_module_call(net, tt_ones(tt_shape(1, 4), TUTTI_F32, NULL)) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("\"0.1.weight\" f32 [2, 7]");
    CHECK_MESSAGE("in module \"0.1\" (Linear)");
    tt_module_release(net);
}

TEST(an_error_in_a_backward_names_the_module) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(4, 3, 2);
    tt_tensor *loss = tt_sum(tt_module_call(net, tt_ones(tt_shape(1, 4), TUTTI_F32, NULL)));
    bool recording = tt_grad_mode(false);
    tt_fill_(tt_module_parameter(tt_module_child(tt_module_child(net, "0"), "1"), "weight"), 0);
    tt_grad_mode(recording);
    CHECK(!tt_backward(loss, NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_VERSION);
    CHECK_MESSAGE("\"0.1.weight\"");
    CHECK_MESSAGE("of module \"0.1\" (Linear)");
    tt_module_release(net);
}

TEST(a_step_without_a_gradient_names_the_parameter) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(2, 2, 2);
    tt_named_list parameters = tt_module_parameters(net);
    CHECK(!tt_sgd_step(parameters.at[2], tt_grad(parameters.at[2]), NULL, NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("\"0.1.weight\"");
    CHECK_MESSAGE("no backward has reached it");
    tt_module_release(net);
}

TEST(a_name_that_the_user_gave_stays) {
    tt_scope scope = tt_scope_open();
    tt_module *layer = linear(2, 2);
    tt_tensor *weight = tt_parameter(tt_ones(tt_shape(2, 2), TUTTI_F32, NULL), true);
    tt_set_name(weight, "tied");
    CHECK(tt_module_set_parameter(layer, "weight", weight));
    tt_module *layers[] = { layer }, *net = tt_sequential_module(1, layers);
    CHECK_TEXT(tt_name(weight), "tied");
    CHECK_TEXT(tt_name(tt_module_parameter(layer, "bias")), "0.bias");
    tt_module_release(net);
    done(&scope);
}
