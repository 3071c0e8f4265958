/* SPDX-License-Identifier: Apache-2.0
 *
 * The small GPT that benches train, written on tensors alone; bench/gpt.py is the same in PyTorch.
 */
#ifndef BENCH_GPT_H
#define BENCH_GPT_H

#include <stdio.h>

#include <tutti/optimizer.h>
#include <tutti/tensors.h>

/* Its sizes, where whoever includes this gives no others. */
#ifndef GPT_SIZES
#define GPT_SIZES LAYERS = 6, WIDTH = 384, HEADS = 6, LENGTH = 256, BATCH = 4, VOCABULARY = 8192
#endif
enum {
    GPT_SIZES,
    WEIGHTS = 2 + 12 * LAYERS + 3
};
static tutti_dtype gpt_dtype = TUTTI_F32; /* of its weights */

/* The parameters of what is trained, in the order in which they were made; a GPT's or another's. */
static tt_tensor *weights[256];
static int weight_count;
static tt_module *net; /* of the weights */
static tt_optimizer *optimizer;

static inline int no_forward(tt_module *module, tt_tensor_list in, tt_tensor **out) {
    (void)module, (void)in, (void)out;
    return 0;
}

static inline void parameter(tt_dims shape, double scale, double shift) {
    static const tt_module_type type = { sizeof type, "Bench", no_forward, NULL };
    char name[16];
    tt_scope scope = tt_scope_open(); /* what its start is made of goes at once */
    tt_tensor *start = tt_to(tt_add_scalar(tt_mul_scalar(tt_randn(shape, TUTTI_F32, NULL), scale), shift), gpt_dtype);
    snprintf(name, sizeof name, "w%d", weight_count);
    if (net == NULL)
        net = tt_module_new(&type, NULL);
    weights[weight_count] = tt_keep(tt_parameter(start, true));
    tt_module_set_parameter(net, name, weights[weight_count++]);
    tt_scope_leave(&scope);
}

/* Its batch: tokens and targets. */
static tt_tensor *batch[2], *positions;

static inline void make_gpt(void) {
    parameter(tt_shape(VOCABULARY, WIDTH), 0.02, 0);
    parameter(tt_shape(LENGTH, WIDTH), 0.02, 0);
    for (int layer = 0; layer < LAYERS; layer++) {
        static const int64_t shapes[][2] = {
            { 3 * WIDTH, WIDTH }, { WIDTH, WIDTH }, { 4 * WIDTH, WIDTH }, { WIDTH, 4 * WIDTH }
        };
        for (int i = 0; i < 4; i++) {
            if (i % 2 == 0) { /* a norm before it */
                parameter(tt_shape(WIDTH), 0, 1);
                parameter(tt_shape(WIDTH), 0, 0);
            }
            parameter(tt_shape(shapes[i][0], shapes[i][1]), 0.02, 0);
            parameter(tt_shape(shapes[i][0]), 0, 0);
        }
    }
    parameter(tt_shape(WIDTH), 0, 1);
    parameter(tt_shape(WIDTH), 0, 0);
    parameter(tt_shape(VOCABULARY, WIDTH), 0.02, 0);
    batch[0] = tt_keep(tt_randint(0, VOCABULARY, tt_shape(BATCH, LENGTH), TUTTI_I64, NULL));
    batch[1] = tt_keep(tt_randint(0, VOCABULARY, tt_shape(BATCH * LENGTH), TUTTI_I64, NULL));
    positions = tt_keep(tt_arange(0, LENGTH, 1, TUTTI_I64, NULL));
    optimizer = tt_adamw_optimizer(net, NULL);
}

/* The logits of every place. */
static inline tt_tensor *forward(tt_tensor *in) {
    tt_tensor **w = weights;
    tt_tensor *x = tt_add(tt_embedding(w[0], in), tt_embedding(w[1], positions));
    w += 2;
    for (int layer = 0; layer < LAYERS; layer++, w += 12) {
        tt_tensor *h = tt_linear(tt_layer_norm(x, w[0], w[1], 1e-5), w[2], w[3]);
        tt_tensor_list parts = tt_chunk(tt_view(h, tt_shape(BATCH, LENGTH, 3 * WIDTH)), 3, 2);
        tt_tensor *heads[3] = { NULL, NULL, NULL };
        for (size_t i = 0; i < parts.count && i < 3; i++)
            heads[i] = tt_transpose(tt_reshape(parts.at[i], tt_shape(BATCH, LENGTH, HEADS, WIDTH / HEADS)), 1, 2);
        tt_tensor *seen = tt_attention(heads[0], heads[1], heads[2], true, 0);
        seen = tt_reshape(tt_transpose(seen, 1, 2), tt_shape(BATCH, LENGTH, WIDTH));
        x = tt_add(x, tt_linear(seen, w[4], w[5]));
        h = tt_gelu(tt_linear(tt_layer_norm(x, w[6], w[7], 1e-5), w[8], w[9]));
        x = tt_add(x, tt_linear(h, w[10], w[11]));
    }
    return tt_view(tt_linear(tt_layer_norm(x, w[0], w[1], 1e-5), w[2], NULL), tt_shape(BATCH * LENGTH, VOCABULARY));
}

/* A step's loss. What only the forward needs ends with it, as the variables of the peer's function do; what the
 * backward needs goes when it has run. */
static inline tt_tensor *gpt_loss(tt_tensor *in, tt_tensor *targets) {
    tt_scope scope = tt_scope_open();
    tt_tensor *loss = tt_scope_return(tt_cross_entropy(forward(in), targets, -100));
    tt_scope_leave(&scope);
    return loss;
}

#endif
