/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions on a GPU: microseconds of a call on a stream that never runs empty, beside the same function
 * called operator by operator, and beside what a copy of the bytes takes that it must read and write.
 * bench/compile_cuda_peer.py measures the same with PyTorch; scripts/gpu-test runs both in turns.
 *
 *     build/release/bench/compile_cuda
 */
#include <tutti/compile.h>
#include <tutti/streams.h>
#include <tutti/tensors.h>

#include "measure.h"

enum {
    ROUNDS = 7,
    CALLS = 50
};

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *up = tt_add_scalar(tt_mul_scalar(x, 2), 1);
    outputs[0] = tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(up), x)), tt_sigmoid(x)), 0.5);
    return 1;
}

static int bias_gelu(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_gelu(tt_add(inputs.at[0], inputs.at[1]));
    return 1;
}

static int soft_rows(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_mul_scalar(inputs.at[0], 0.125);
    tt_tensor *shares = tt_exp(tt_sub(x, tt_amax(x, tt_shape(-1), true)));
    outputs[0] = tt_div(shares, tt_sum_dims(shares, tt_shape(-1), true));
    return 1;
}

static int squares(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_mean(tt_square(tt_sub(inputs.at[0], inputs.at[1])));
    return 1;
}

static tt_tensor *normal(tutti_dtype dtype, tt_dims shape) {
    return tt_randn(shape, dtype, TUTTI_OPTIONS(tt_options, .device = TUTTI_CUDA));
}

static double time_of(tt_compiled *compiled, tt_compile_function *function, tt_tensor_list inputs, bool waits) {
    double rounds[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        tt_synchronize(TUTTI_CUDA);
        double begin = now();
        for (int i = 0; i < CALLS; i++) {
            tt_scope each = tt_scope_open();
            tt_tensor *outputs[4];
            if (compiled != NULL)
                tt_compiled_call(compiled, inputs);
            else
                function(inputs, outputs, NULL);
            if (waits)
                tt_synchronize(TUTTI_CUDA);
            if (tt_scope_close(&each) != TUTTI_OK)
                return -1;
        }
        tt_synchronize(TUTTI_CUDA);
        if (round >= 0)
            rounds[round] = 1e6 * (now() - begin) / CALLS;
    }
    return median(rounds, ROUNDS);
}

/* Of the same bytes: half of them read, half written. */
static double time_of_copy(double bytes) {
    double rounds[ROUNDS];
    tt_tensor *from = normal(TUTTI_F32, tt_shape((int64_t)(bytes / 8))), *to = tt_zeros_like(from);
    for (int round = -1; round < ROUNDS; round++) {
        tt_synchronize(TUTTI_CUDA);
        double begin = now();
        for (int i = 0; i < CALLS; i++)
            tt_copy_(to, from);
        tt_synchronize(TUTTI_CUDA);
        if (round >= 0)
            rounds[round] = 1e6 * (now() - begin) / CALLS;
    }
    return median(rounds, ROUNDS);
}

static bool measure(const char *name, tt_compile_function *function, tt_tensor_list inputs, double bytes) {
    tt_scope scope = tt_scope_open();
    tt_compiled *compiled;
    tt_grad_mode(false);
    double begin = now();
    if (!tt_compile(function, NULL, TUTTI_OPTIONS(tt_compile_options, .name = name, .full = true), &compiled))
        return false;
    tt_compiled_call(compiled, inputs);
    tt_synchronize(TUTTI_CUDA);
    double first = now() - begin, fast = time_of(compiled, function, inputs, false);
    double waited = time_of(compiled, function, inputs, true), plain = time_of(NULL, function, inputs, false);
    double copied = time_of_copy(bytes);
    printf("%-16s compiled %9.2f us, waited for %9.2f us, operators %9.2f us, a copy of its bytes %9.2f us, "
           "first call %.3f s\n",
           name, fast, waited, plain, copied, first);
    fflush(stdout);
    tt_compiled_release(&compiled);
    return tt_scope_close(&scope) == TUTTI_OK && fast > 0 && plain > 0;
}

int main(void) {
    tt_scope scope = tt_scope_open();
    int64_t million = 1 << 20;
    tt_tensor *x = normal(TUTTI_F32, tt_shape(16 * million)), *y = normal(TUTTI_F32, tt_shape(16 * million));
    tt_tensor *rows = tt_view(x, tt_shape(16 * 1024, 1024)), *wide = normal(TUTTI_BF16, tt_shape(8192, 3072));
    tt_tensor *bias = normal(TUTTI_BF16, tt_shape(3072)), *tiny = normal(TUTTI_F32, tt_shape(16));
    double f32 = 4.0 * 16 * (double)million;
    bool good = measure("chain", chain, tt_tensors(x), 2 * f32) &&
                measure("chain_bf16", chain, tt_tensors(tt_to(x, TUTTI_BF16)), f32) &&
                measure("bias_gelu_bf16", bias_gelu, tt_tensors(wide, bias), 2.0 * 2 * 8192 * 3072) &&
                measure("softmax", soft_rows, tt_tensors(rows), 2 * f32) &&
                measure("mean_square", squares, tt_tensors(x, y), 2 * f32) &&
                measure("tiny", chain, tt_tensors(tiny), 128);
    if (!good)
        printf("%s\n", tutti_error_message());
    return tt_scope_close(&scope) == TUTTI_OK && good ? 0 : 1;
}
