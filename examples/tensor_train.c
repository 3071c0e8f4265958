/* SPDX-License-Identifier: Apache-2.0
 *
 * Training as it is done for real, in small: tokens from a file, a schedule, clipped gradients, a file to resume from.
 *
 *     $ tensor_train run.safetensors 60          (trains 60 steps and saves)
 *     $ tensor_train run.safetensors 120         (goes on from there to step 120)
 *     step 120/120  loss 0.0371  6.70k tokens/s  in 0:02
 *
 * Without arguments it trains in a folder of its own, in two parts, and removes it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tutti/data.h>
#include <tutti/state.h>

static const char text[] = "everybody plays together: that is what tutti means, and what ranks do. ";

enum {
    WIDTH = 64,
    LENGTH = 32,
    BATCH = 8,
    VOCABULARY = 128
};

/* x + f(norm(x)), with the two as children "norm" and "inner" */
static int residual_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *x = inputs.at[0];
    outputs[0] =
        tt_add(x, tt_module_call(tt_module_child(module, "inner"), tt_module_call(tt_module_child(module, "norm"), x)));
    return 1;
}

static tt_module *residual(tt_module *inner) {
    static const tt_module_type type = { sizeof type, "Residual", residual_forward, NULL };
    tt_module *module = tt_module_new(&type, NULL);
    tt_module_add_child(module, "norm", tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32));
    tt_module_add_child(module, "inner", inner);
    return module;
}

static tt_module *build(void) {
    tt_module *hidden[] = { tt_linear_module(WIDTH, 4 * WIDTH, true, TUTTI_F32), tt_function_module("SiLU", tt_silu),
                            tt_linear_module(4 * WIDTH, WIDTH, true, TUTTI_F32), tt_dropout_module(0.05) };
    tt_module *attention =
        tt_attention_module(WIDTH, TUTTI_OPTIONS(tt_attention_options, .heads = 4, .rope_base = 10000));
    tt_module *layers[] = { tt_embedding_module(VOCABULARY, WIDTH, TUTTI_F32), residual(attention),
                            residual(tt_sequential_module(4, hidden)), tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32),
                            tt_linear_module(WIDTH, VOCABULARY, false, TUTTI_F32) };
    return tt_sequential_module(5, layers);
}

static double train_step(tt_module *net, tt_optimizer *optimizer, const tt_tokens *tokens, int64_t step) {
    tt_schedule schedule = { sizeof schedule, TT_SCHEDULE_COSINE, .warm_up = 10, .steps = 120, .last = 0.1 };
    tt_named_list parameters = tt_module_parameters(net);
    tt_tensor *inputs, *targets;
    tt_tokens_batch(tokens, step, &inputs, &targets);
    tt_tensor *logits = tt_flatten(tt_module_call(net, inputs), 0, 1);
    tt_tensor *loss = tt_cross_entropy(logits, tt_flatten(targets, 0, 1), -100);
    tt_backward(loss, NULL);
    tt_clip_grad_norm(tt_tensors_of(parameters.count, parameters.at), 1, NULL);
    tt_schedule_apply(&schedule, optimizer);
    tt_optimizer_step(optimizer);
    tt_optimizer_zero_grad(optimizer);
    return tt_item(loss);
}

/* Trains as far as step `last` and saves; goes on from the file where there is one. */
static tutti_status train(const char *state, const char *data, int64_t last, double *loss) {
    tt_scope outer = tt_scope_open();
    tt_seed(2026, 0);
    tt_module *net = build();
    tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 5e-3));
    tt_tokens *tokens =
        tt_tokens_open(data, TUTTI_OPTIONS(tt_tokens_options, .dtype = TUTTI_U8, .length = LENGTH, .batch = BATCH));
    if (access(state, F_OK) == 0)
        tt_load_state(net, optimizer, state);
    int64_t step = tt_item_int(tt_optimizer_steps(optimizer));
    tt_progress *progress =
        tt_progress_new(TUTTI_OPTIONS(tt_progress_options, .steps = last, .done = step, .file = stdout));
    tutti_status status = tt_error_pending();
    for (; step < last && status == TUTTI_OK; step++) {
        tt_scope scope = tt_scope_open();
        *loss = train_step(net, optimizer, tokens, step);
        status = tt_scope_close(&scope);
        tt_progress_step(progress, *loss, BATCH * LENGTH);
    }
    tt_progress_end(progress);
    if (status == TUTTI_OK)
        tt_save_state(net, optimizer, state);
    tt_tokens_close(tokens);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    tutti_status ended = tt_scope_close(&outer);
    return status != TUTTI_OK ? status : ended;
}

/* The sentence, often enough, one byte for a letter. */
static bool write_data(const char *path) {
    FILE *file = fopen(path, "wb");
    for (int i = 0; file != NULL && i < 40; i++)
        fwrite(text, 1, strlen(text), file);
    return file != NULL && fclose(file) == 0;
}

int main(int count, char **arguments) {
    char folder[] = "/tmp/tensor_train-XXXXXX", state[64], data[64];
    double loss = 0;
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    snprintf(data, sizeof data, "%s/tokens.bin", folder);
    snprintf(state, sizeof state, "%s/run.safetensors", folder);
    bool asked = count == 3;
    if (!write_data(data))
        perror(data);
    tutti_status status = asked ? train(arguments[1], data, atoll(arguments[2]), &loss) : train(state, data, 60, &loss);
    if (!asked && status == TUTTI_OK)
        status = train(state, data, 120, &loss);
    if (status != TUTTI_OK)
        fprintf(stderr, "%s\n", tutti_error_message());
    remove(state);
    remove(data);
    remove(folder);
    return status != TUTTI_OK || (!asked && !(loss < 1)) ? 1 : 0;
}
