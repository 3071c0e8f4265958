/* SPDX-License-Identifier: Apache-2.0
 *
 * A training step of a GPT of 124 million parameters on a GPU, milliseconds and memory, and what its parts take;
 * bench/gpt_cuda_peer.py measures the same with PyTorch.
 *
 *     build/release/bench/gpt_cuda bf16 | f32 | parts
 *     build/release/bench/gpt_cuda bf16 | f32 compiled      the whole step as one compiled function
 */
#define GPT_SIZES LAYERS = 12, WIDTH = 768, HEADS = 12, LENGTH = 1024, BATCH = 8, VOCABULARY = 50257
#include "gpt.h"

#include <string.h>

#include <tutti/compile.h>
#include <tutti/streams.h>

#include "measure.h"

static tutti_device device = TUTTI_CUDA;
#define ROUNDS 7

static int failed(const char *name) {
    printf("%s: %s\n", name, tutti_error_message());
    return 1;
}

static tt_compiled *compiled; /* NULL: operators are called */

static int whole_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *loss = gpt_loss(inputs.at[0], inputs.at[1]);
    tt_backward(loss, NULL);
    outputs[0] = tt_detach(loss);
    tt_optimizer_step(optimizer);
    tt_optimizer_zero_grad(optimizer);
    return 1;
}

static bool step_compiled(double taken[4]) {
    tt_scope scope = tt_scope_open();
    tt_synchronize(device);
    double begin = now();
    tt_compiled_call(compiled, tt_tensors(batch[0], batch[1]));
    double enqueued = now();
    tt_synchronize(device);
    taken[0] = 1e3 * (enqueued - begin);
    taken[3] = 1e3 * (now() - begin);
    return tt_scope_close(&scope) == TUTTI_OK;
}

static int measure_compiled(tutti_dtype dtype) {
    gpt_dtype = dtype;
    make_gpt();
    double whole[ROUNDS], host[ROUNDS], taken[4], first = 0;
    if (!tt_compile(whole_step, NULL, TUTTI_OPTIONS(tt_compile_options, .name = "gpt", .full = true), &compiled))
        return failed("gpt");
    for (int i = -3; i < ROUNDS; i++) {
        if (!step_compiled(taken))
            return failed("gpt");
        first = i == -3 ? taken[3] : first;
        if (i >= 0)
            whole[i] = taken[3], host[i] = taken[0];
    }
    tt_device_memory memory = TT_DEVICE_MEMORY_INIT;
    if (tt_device_memory_get(device, &memory) != TUTTI_OK)
        return failed("memory");
    printf("gpt %-4s compiled step %8.2f ms   host %8.2f ms   peak %zu MiB   first call %.2f s\n",
           tutti_dtype_name(dtype), median(whole, ROUNDS), median(host, ROUNDS), memory.peak_allocated >> 20,
           first / 1e3);
    tt_compiled_release(&compiled);
    return 0;
}

/* Milliseconds of each phase of one step: forward, backward, optimizer, all. */
static bool step(double taken[4], bool apart) {
    tt_scope scope = tt_scope_open();
    double at[4];
    tt_synchronize(device);
    at[0] = now();
    tt_tensor *loss = gpt_loss(batch[0], batch[1]);
    if (apart)
        tt_synchronize(device);
    at[1] = now();
    tt_backward(loss, NULL);
    if (apart)
        tt_synchronize(device);
    at[2] = now();
    tt_optimizer_step(optimizer);
    tt_optimizer_zero_grad(optimizer);
    double enqueued = now();
    tt_synchronize(device);
    at[3] = now();
    for (int i = 0; i < 3; i++)
        taken[i] = 1e3 * (at[i + 1] - at[i]);
    if (!apart)
        taken[0] = 1e3 * (enqueued - at[0]); /* of the host */
    taken[3] = 1e3 * (at[3] - at[0]);
    return tt_scope_close(&scope) == TUTTI_OK;
}

static int measure_step(tutti_dtype dtype) {
    gpt_dtype = dtype;
    make_gpt();
    double phases[4][ROUNDS], whole[ROUNDS], host[ROUNDS], taken[4];
    for (int i = -3; i < ROUNDS; i++) {
        if (!step(taken, false))
            return failed("gpt");
        if (i >= 0)
            whole[i] = taken[3], host[i] = taken[0];
    }
    for (int i = 0; i < ROUNDS; i++) {
        if (!step(taken, true))
            return failed("gpt");
        for (int k = 0; k < 4; k++)
            phases[k][i] = taken[k];
    }
    tt_device_memory memory = TT_DEVICE_MEMORY_INIT;
    if (tt_device_memory_get(device, &memory) != TUTTI_OK)
        return failed("memory");
    printf("gpt %-4s step %8.2f ms   host %8.2f ms   peak %zu MiB   forward %.2f backward %.2f optimizer %.2f\n",
           tutti_dtype_name(dtype), median(whole, ROUNDS), median(host, ROUNDS), memory.peak_allocated >> 20,
           median(phases[0], ROUNDS), median(phases[1], ROUNDS), median(phases[2], ROUNDS));
    return 0;
}

/* Forward and backward of one operator at the sizes of the step. */
#define PART(name, leaf, call)                                                                     \
    do {                                                                                           \
        double there[ROUNDS], back[ROUNDS];                                                        \
        for (int i = -2; i < ROUNDS; i++) {                                                        \
            tt_scope each = tt_scope_open();                                                       \
            tt_synchronize(device);                                                                \
            double begin = now();                                                                  \
            tt_tensor *y = call;                                                                   \
            tt_synchronize(device);                                                                \
            double middle = now();                                                                 \
            tt_backward(y, tt_dim_count(y) == 0 ? NULL : y);                                       \
            tt_synchronize(device);                                                                \
            if (i >= 0)                                                                            \
                there[i] = 1e6 * (middle - begin), back[i] = 1e6 * (now() - middle);               \
            tt_set_grad(leaf, NULL);                                                               \
            if (tt_scope_close(&each) != TUTTI_OK)                                                 \
                return failed(name);                                                               \
        }                                                                                          \
        printf("%-28s %-4s forward %9.1f us   backward %9.1f us\n", name, tutti_dtype_name(dtype), \
               median(there, ROUNDS), median(back, ROUNDS));                                       \
        fflush(stdout);                                                                            \
    } while (0)

static tt_tensor *leaf(tt_dims shape, tutti_dtype dtype) {
    return tt_require_grad(tt_to(tt_randn(shape, TUTTI_F32, NULL), dtype), true);
}

static int measure_parts(tutti_dtype dtype) {
    tt_scope scope = tt_scope_open();
    enum {
        TOKENS = BATCH * LENGTH
    };
    tt_tensor *x = leaf(tt_shape(TOKENS, WIDTH), dtype), *wide = leaf(tt_shape(TOKENS, 4 * WIDTH), dtype);
    tt_tensor *gain = leaf(tt_shape(WIDTH), dtype), *bias = leaf(tt_shape(WIDTH), dtype);
    tt_tensor *up = leaf(tt_shape(4 * WIDTH, WIDTH), dtype), *up_bias = leaf(tt_shape(4 * WIDTH), dtype);
    tt_tensor *head = leaf(tt_shape(VOCABULARY, WIDTH), dtype), *logits = leaf(tt_shape(TOKENS, VOCABULARY), dtype);
    tt_tensor *tokens = tt_randint(0, VOCABULARY, tt_shape(TOKENS), TUTTI_I64, NULL);
    tt_tensor *heads[3];
    for (int i = 0; i < 3; i++)
        heads[i] = leaf(tt_shape(BATCH, HEADS, LENGTH, WIDTH / HEADS), dtype);
    PART("layer_norm 8192x768", x, tt_layer_norm(x, gain, bias, 1e-5));
    PART("linear 768 to 3072", x, tt_linear(x, up, up_bias));
    PART("linear 768 to 50257", x, tt_linear(x, head, NULL));
    PART("gelu 8192x3072", wide, tt_gelu(wide));
    PART("add 8192x768", x, tt_add(x, x));
    PART("embedding 8192x768", head, tt_embedding(head, tokens));
    PART("attention 8x12x1024x64", heads[0], tt_attention(heads[0], heads[1], heads[2], true, 0));
    PART("cross_entropy 8192x50257", logits, tt_cross_entropy(logits, tokens, -100));
    return tt_scope_close(&scope) == TUTTI_OK ? 0 : failed("parts");
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "bf16";
    if (!tt_device_available(device)) {
        printf("no tensors on cuda here\n");
        return 77;
    }
    tt_scope scope = tt_scope_open();
    int result = 0;
    if (!tt_default_device_set(device))
        result = failed("device");
    else if (strcmp(what, "parts") == 0)
        result = measure_parts(TUTTI_BF16) != 0 || measure_parts(TUTTI_F32) != 0;
    else if (argc > 2)
        result = measure_compiled(strcmp(what, "f32") == 0 ? TUTTI_F32 : TUTTI_BF16);
    else
        result = measure_step(strcmp(what, "f32") == 0 ? TUTTI_F32 : TUTTI_BF16);
    if (tt_scope_close(&scope) != TUTTI_OK)
        result = failed("gpt");
    return result;
}
