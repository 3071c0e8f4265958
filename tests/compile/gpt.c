/* SPDX-License-Identifier: Apache-2.0
 *
 * A small GPT: its loss, compiled with its gradients, and its whole training step as one graph, with clipping and
 * AdamW, on one rank and on two; bit for bit what eager code computes.
 */
#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "../harness.h"
#include "../loops/programs.h"
#include "quick.h"

enum {
    LAYERS = 2,
    WIDTH = 32,
    HEADS = 4,
    LENGTH = 16,
    BATCH = 4,
    VOCABULARY = 64
};

typedef struct model {
    tt_module *module; /* its slots are the parameters */
    tt_optimizer *optimizer;
    tutti_group *group;
} model;

static void add(tt_module *module, int *count, tt_dims shape, double scale, double shift) {
    char name[8];
    snprintf(name, sizeof name, "w%d", (*count)++);
    tt_tensor *values = tt_add_scalar(tt_mul_scalar(tt_randn(shape, TUTTI_F32, NULL), scale), shift);
    CHECK(tt_module_set_parameter(module, name, tt_parameter(values, true)));
}

static tt_tensor *weight(tt_module *module, int index) {
    char name[8];
    snprintf(name, sizeof name, "w%d", index);
    return tt_module_parameter(module, name);
}

/* tokens (batch, length) to logits (batch * length, vocabulary) */
static int forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *tokens = inputs.at[0];
    int64_t batch = tt_size(tokens, 0), length = tt_size(tokens, 1);
    tt_tensor *position = tt_arange(0, (double)length, 1, TUTTI_I64, NULL);
    tt_tensor *x = tt_embedding(weight(module, 0), tokens);
    int at = 1;
    for (int layer = 0; layer < LAYERS; layer++, at += 6) {
        tt_tensor *inner = tt_linear(tt_rms_norm(x, weight(module, at), 1e-5), weight(module, at + 1), NULL);
        tt_tensor_list all = tt_chunk(inner, 3, 2);
        tt_tensor *heads[3] = { NULL, NULL, NULL };
        for (size_t i = 0; i < all.count; i++)
            heads[i] = tt_transpose(tt_reshape(all.at[i], tt_shape(batch, length, HEADS, WIDTH / HEADS)), 1, 2);
        tt_tensor *seen =
            tt_attention(tt_rope(heads[0], position, 10000), tt_rope(heads[1], position, 10000), heads[2], true, 0);
        seen = tt_reshape(tt_transpose(seen, 1, 2), tt_shape(batch, length, WIDTH));
        x = tt_add(x, tt_dropout(tt_linear(seen, weight(module, at + 2), NULL), 0.1));
        inner = tt_linear(tt_rms_norm(x, weight(module, at + 3), 1e-5), weight(module, at + 4), NULL);
        x = tt_add(x, tt_linear(tt_silu(inner), weight(module, at + 5), NULL));
    }
    x = tt_linear(tt_rms_norm(x, weight(module, at), 1e-5), weight(module, at + 1), NULL);
    outputs[0] = tt_view(x, tt_shape(batch * length, VOCABULARY));
    return 1;
}

static model build(tutti_group *group) {
    tt_seed(5, 0);
    tt_module *module =
        tt_module_new(&(tt_module_type){ .size = sizeof(tt_module_type), .name = "gpt", .forward = forward }, NULL);
    int count = 0;
    add(module, &count, tt_shape(VOCABULARY, WIDTH), 0.1, 0);
    for (int layer = 0; layer < LAYERS; layer++) {
        add(module, &count, tt_shape(WIDTH), 0, 1);
        add(module, &count, tt_shape(3 * WIDTH, WIDTH), 0.1, 0);
        add(module, &count, tt_shape(WIDTH, WIDTH), 0.1, 0);
        add(module, &count, tt_shape(WIDTH), 0, 1);
        add(module, &count, tt_shape(4 * WIDTH, WIDTH), 0.1, 0);
        add(module, &count, tt_shape(WIDTH, 4 * WIDTH), 0.1, 0);
    }
    add(module, &count, tt_shape(WIDTH), 0, 1);
    add(module, &count, tt_shape(VOCABULARY, WIDTH), 0.1, 0);
    return (model){ module, tt_adamw_optimizer(module, TUTTI_OPTIONS(tt_adamw, .learning_rate = 5e-3)), group };
}

static void end(model *gpt) {
    tt_optimizer_release(gpt->optimizer);
    tt_module_release(gpt->module);
}

static int loss_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    model *gpt = user;
    outputs[0] = tt_cross_entropy(tt_module_call(gpt->module, inputs.at[0]), inputs.at[1], -100);
    return 1;
}

static void finish_step(model *gpt) {
    tt_named_list parameters = tt_module_parameters(gpt->module);
    for (size_t i = 0; gpt->group != NULL && i < parameters.count; i++)
        tt_all_reduce_(tt_grad(parameters.at[i]), TUTTI_AVG, gpt->group);
    tt_clip_grad_norm(tt_tensors_of(parameters.count, parameters.at), 1.0, NULL);
    tt_optimizer_step(gpt->optimizer);
    tt_optimizer_zero_grad(gpt->optimizer);
}

static int whole_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *loss;
    loss_of(inputs, &loss, user);
    tt_backward(loss, NULL);
    finish_step(user);
    outputs[0] = tt_detach(loss);
    return 1;
}

static tt_tensor *compiled_loss(tt_compiled *fast, tt_tensor_list inputs, model *gpt) {
    tt_tensor *loss = tt_compiled_call(fast, inputs).at[0];
    tt_backward(loss, NULL);
    finish_step(gpt);
    return tt_detach(loss);
}

static void train(tutti_group *group, bool whole, tt_compile_mode mode) {
    tt_scope scope = tt_scope_open();
    use_device();
    model eager = build(group), compiled = build(group);
    tt_compiled *fast;
    CHECK(tt_compile(whole ? whole_step : loss_of, &compiled,
                     TUTTI_OPTIONS(tt_compile_options, .mode = mode, .full = true, .strict = true), &fast));
    for (int i = 0; i < 4; i++) {
        int shift = 11 * i + (group != NULL ? tutti_group_rank(group) : 0);
        tt_tensor *letters = tt_arange(shift, shift + BATCH * LENGTH + 1, 1, TUTTI_I64, NULL);
        letters = tt_to(tt_floor(tt_mul_scalar(tt_to(letters, TUTTI_F32), 0.37)), TUTTI_I64);
        tt_tensor *tokens = tt_view(tt_narrow(letters, 0, 0, BATCH * LENGTH), tt_shape(BATCH, LENGTH)), *expected;
        tt_tensor *targets = tt_narrow(letters, 0, 1, BATCH * LENGTH);
        tt_seed(100 + (uint64_t)i, 0);
        whole_step(tt_tensors(tokens, targets), &expected, &eager);
        tt_seed(100 + (uint64_t)i, 0);
        tt_tensor *loss = whole ? tt_compiled_call(fast, tt_tensors(tokens, targets)).at[0]
                                : compiled_loss(fast, tt_tensors(tokens, targets), &compiled);
        CHECK_OK(tt_error_show());
        CHECK(loss != NULL && tt_equal(loss, expected));
        tt_named_list left = tt_module_parameters(eager.module), right = tt_module_parameters(compiled.module);
        for (size_t k = 0; k < left.count; k++)
            if (!tt_equal(tt_detach(left.at[k]), tt_detach(right.at[k])))
                FAIL("step %d: %s differs", i, left.names[k]);
    }
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
    CHECK(tt_compiled_count(fast, &counts) && counts.captures == 1 && counts.hits == 3);
    tt_compiled_release(&fast);
    end(&eager);
    end(&compiled);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(the_loss_of_a_gpt_and_its_gradients_are_those_of_eager_code) {
    EACH_MODE train(NULL, false, modes[mode]);
}

TEST(the_whole_training_step_of_a_gpt_is_one_graph) {
    EACH_MODE train(NULL, true, modes[mode]);
}

TEST_LIMIT(the_training_step_of_a_gpt_is_built_for_the_device, 300) {
    if (!use_device())
        SKIP("TEST_DEVICE names no device");
    const char *folder = own_folder();
    unsetenv("TUTTI_NVRTC");
    train(NULL, true, TT_COMPILE_FUSED);
    train(NULL, false, TT_COMPILE_FUSED);
    remove_folder(folder);
}

TEST_WORLD(the_training_step_of_a_gpt_on_two_ranks_is_one_graph, 2) {
    EACH_MODE train(tutti_world_group(world), true, modes[mode]);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}
