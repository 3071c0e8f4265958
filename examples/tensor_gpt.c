/* SPDX-License-Identifier: Apache-2.0
 *
 * A very small GPT that learns a sentence by heart, letter by letter, and recites it.
 *
 *     $ tensor_gpt
 *     step   0: loss 5.11
 *     …
 *     recited: everybody plays together …
 */
#include <stdio.h>
#include <string.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

static const char text[] = "everybody plays together: that is what tutti means, and what ranks do. ";

enum {
    LAYERS = 2,
    WIDTH = 64,
    HEADS = 4,
    LENGTH = 32,
    BATCH = 8,
    VOCABULARY = 128,
    STEPS = 120
};

/* Parameters, with the two averages that AdamW keeps for each. */
typedef struct model {
    tt_tensor *at[64], *first[64], *second[64];
    int count;
} model;

static tt_tensor *add(model *gpt, tt_dims shape, double scale, double shift) {
    tt_tensor *values = tt_add_scalar(tt_mul_scalar(tt_randn(shape, TUTTI_F32, NULL), scale), shift);
    gpt->first[gpt->count] = tt_zeros(shape, TUTTI_F32, NULL);
    gpt->second[gpt->count] = tt_zeros(shape, TUTTI_F32, NULL);
    return gpt->at[gpt->count++] = tt_parameter(values, true);
}

static void build(model *gpt) {
    add(gpt, tt_shape(VOCABULARY, WIDTH), 0.1, 0);
    for (int layer = 0; layer < LAYERS; layer++) {
        add(gpt, tt_shape(WIDTH), 0, 1);              /* norm before the attention */
        add(gpt, tt_shape(3 * WIDTH, WIDTH), 0.1, 0); /* queries, keys and values */
        add(gpt, tt_shape(WIDTH, WIDTH), 0.1, 0);
        add(gpt, tt_shape(WIDTH), 0, 1); /* norm before the hidden layer */
        add(gpt, tt_shape(4 * WIDTH, WIDTH), 0.1, 0);
        add(gpt, tt_shape(WIDTH, 4 * WIDTH), 0.1, 0);
    }
    add(gpt, tt_shape(WIDTH), 0, 1);
    add(gpt, tt_shape(VOCABULARY, WIDTH), 0.1, 0);
}

/* tokens (batch, length) to logits (batch * length, vocabulary) */
static tt_tensor *forward(model *gpt, tt_tensor *tokens) {
    int64_t batch = tt_size(tokens, 0), length = tt_size(tokens, 1);
    tt_tensor **weight = gpt->at, *position = tt_arange(0, (double)length, 1, TUTTI_I64, NULL);
    tt_tensor *x = tt_embedding(*weight++, tokens);
    for (int layer = 0; layer < LAYERS; layer++, weight += 6) {
        tt_tensor_list qkv = tt_chunk(tt_linear(tt_rms_norm(x, weight[0], 1e-5), weight[1], NULL), 3, 2);
        tt_tensor *heads[3] = { NULL, NULL, NULL };
        for (size_t i = 0; i < qkv.count; i++)
            heads[i] = tt_transpose(tt_reshape(qkv.at[i], tt_shape(batch, length, HEADS, WIDTH / HEADS)), 1, 2);
        tt_tensor *seen =
            tt_attention(tt_rope(heads[0], position, 10000), tt_rope(heads[1], position, 10000), heads[2], true, 0);
        x = tt_add(x, tt_linear(tt_reshape(tt_transpose(seen, 1, 2), tt_shape(batch, length, WIDTH)), weight[2], NULL));
        x = tt_add(x, tt_linear(tt_silu(tt_linear(tt_rms_norm(x, weight[3], 1e-5), weight[4], NULL)), weight[5], NULL));
    }
    return tt_view(tt_linear(tt_rms_norm(x, weight[0], 1e-5), weight[1], NULL), tt_shape(batch * length, VOCABULARY));
}

/* Rows of the sentence that begin anywhere; the targets are one letter further on. */
static void draw(tt_tensor **tokens, tt_tensor **targets) {
    int64_t values[2][BATCH * LENGTH], starts[BATCH], size = (int64_t)strlen(text);
    tt_read(tt_randint(0, size, tt_shape(BATCH), TUTTI_I64, NULL), starts, TUTTI_I64, BATCH);
    for (int row = 0; row < BATCH; row++)
        for (int i = 0; i < LENGTH; i++) {
            values[0][row * LENGTH + i] = text[(starts[row] + i) % size];
            values[1][row * LENGTH + i] = text[(starts[row] + i + 1) % size];
        }
    *tokens = tt_from(values[0], tt_shape(BATCH, LENGTH), TUTTI_I64, NULL);
    *targets = tt_from(values[1], tt_shape(BATCH * LENGTH), TUTTI_I64, NULL);
}

static double train(model *gpt, int step) {
    tt_tensor *tokens, *targets;
    tt_adamw options = TT_ADAMW_INIT;
    options.learning_rate = 5e-3;
    draw(&tokens, &targets);
    tt_tensor *loss = tt_cross_entropy(forward(gpt, tokens), targets, -100);
    tt_backward(loss, NULL);
    for (int i = 0; i < gpt->count; i++) {
        tt_adamw_step(gpt->at[i], tt_grad(gpt->at[i]), gpt->first[i], gpt->second[i], step + 1, &options);
        tt_set_grad(gpt->at[i], NULL);
    }
    return tt_item(loss);
}

/* Goes on from the first letters with the likeliest next one, again and again. */
static void recite(model *gpt, char *out, int length) {
    memcpy(out, text, 8);
    for (int at = 8; at < length; at++) {
        int64_t window[LENGTH], count = at < LENGTH ? at : LENGTH;
        for (int64_t i = 0; i < count; i++)
            window[i] = out[at - count + i];
        tt_scope scope = tt_scope_open();
        tt_tensor *logits = forward(gpt, tt_from(window, tt_shape(1, count), TUTTI_I64, NULL));
        out[at] = (char)tt_item_int(tt_argmax(tt_select(logits, 0, -1), 0, false));
        if (tt_scope_close(&scope) != TUTTI_OK)
            return;
    }
}

int main(void) {
    char recited[sizeof text] = "";
    model gpt = { .count = 0 };
    double loss = 0;
    tt_scope scope = tt_scope_open();
    tt_seed(2026, 0);
    build(&gpt);
    tutti_status status = tt_error_pending();
    for (int i = 0; i < STEPS && status == TUTTI_OK; i++) {
        tt_scope step = tt_scope_open();
        loss = train(&gpt, i);
        if (i % 20 == 0 || i == STEPS - 1)
            printf("step %3d: loss %.2f\n", i, loss);
        status = tt_scope_close(&step);
    }
    tt_grad_mode(false);
    if (status == TUTTI_OK)
        recite(&gpt, recited, (int)strlen(text));
    printf("recited: %s\n", recited);
    tutti_status last = tt_scope_close(&scope);
    if (status != TUTTI_OK || last != TUTTI_OK) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 1;
    }
    return strncmp(recited, text, 24) == 0 ? 0 : 1;
}
