/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators of tensors on a GPU: microseconds each, of a stream that never runs empty, and of the host for a tiny one.
 * bench/tensor_cuda_peer.py measures the same with PyTorch; scripts/gpu-test runs both.
 *
 *     build/release/bench/tensor_cuda
 */
#include <tutti/tensors.h>

#include "measure.h"

static tutti_device device = TUTTI_CUDA;
static tt_tensor *made(tutti_dtype dtype, tt_dims shape) {
    return tt_randn(shape, dtype, TUTTI_OPTIONS(tt_options, .device = device));
}

/* Microseconds of one call; the median of several rounds. */
#define ROUNDS 11
#define MEASURE(name, count, call)                                                   \
    do {                                                                             \
        double rounds[ROUNDS];                                                       \
        for (int round = -1; round < ROUNDS; round++) {                              \
            tt_scope inner = tt_scope_open();                                        \
            tt_synchronize(device);                                                  \
            double begin = now();                                                    \
            for (int i = 0; i < (count); i++) {                                      \
                tt_scope each = tt_scope_open();                                     \
                call;                                                                \
                if (tt_scope_close(&each) != TUTTI_OK)                               \
                    return failed(name);                                             \
            }                                                                        \
            double enqueued = now();                                                 \
            tt_synchronize(device);                                                  \
            if (round >= 0)                                                          \
                rounds[round] = 1e6 * ((host ? enqueued : now()) - begin) / (count); \
            if (tt_scope_close(&inner) != TUTTI_OK)                                  \
                return failed(name);                                                 \
        }                                                                            \
        printf("%-24s %10.2f us\n", name, median(rounds, ROUNDS));                   \
        fflush(stdout);                                                              \
    } while (0)

static int failed(const char *name) {
    printf("%s: %s\n", name, tutti_error_message());
    return 1;
}

/* A GPU that had nothing to do is slow at first, and then it would be what the host waits for. */
static tutti_status wake(tt_tensor *square) {
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < 100; i++)
        tt_matmul(square, square);
    tt_synchronize(device);
    return tt_scope_close(&scope);
}

/* Few at a time: a stream that is full makes the host wait for the GPU. */
static int measure_host(void) {
    bool host = true;
    tt_tensor *tiny = made(TUTTI_F32, tt_shape(16)), *other = made(TUTTI_F32, tt_shape(16)),
              *square = made(TUTTI_F32, tt_shape(4, 4));
    MEASURE("host add [16]", 200, tt_add(tiny, other));
    MEASURE("host mul by 2 [16]", 200, tt_mul_scalar(tiny, 2));
    MEASURE("host relu [16]", 200, tt_relu(tiny));
    MEASURE("host sum [16]", 200, tt_sum(tiny));
    MEASURE("host softmax [4, 4]", 200, tt_softmax(square, 1));
    MEASURE("host matmul [4, 4]", 200, tt_matmul(square, square));
    tt_grad_mode(true);
    tt_require_grad(tiny, true);
    MEASURE("host add [16], recorded", 200, tt_add(tiny, other));
    tt_grad_mode(false);
    return 0;
}

static int measure(void) {
    bool host = false;
    tt_grad_mode(false);
    tt_tensor *x = made(TUTTI_F32, tt_shape(16 << 20)), *y = made(TUTTI_F32, tt_shape(16 << 20));
    if (wake(tt_view(x, tt_shape(4096, 4096))) != TUTTI_OK)
        return failed("matmul");
    if (measure_host() != 0)
        return 1;
    tt_tensor *narrow = tt_to(x, TUTTI_BF16);
    MEASURE("add f32 16M", 50, tt_add(x, y));
    MEASURE("gelu bf16 16M", 50, tt_gelu(narrow));
    MEASURE("chain f32 16M", 20, tt_tanh(tt_mul(tt_add(x, y), tt_sigmoid(y))));
    MEASURE("sum f32 16M", 50, tt_sum(x));
    tt_tensor *square = tt_view(x, tt_shape(4096, 4096));
    MEASURE("sum columns f32 4096", 50, tt_sum_dims(square, tt_shape(0), false));
    MEASURE("transpose f32 4096", 50, tt_contiguous(tt_transpose(square, 0, 1)));
    MEASURE("f32 to bf16 16M", 50, tt_to(x, TUTTI_BF16));
    tt_tensor *rows = tt_view(x, tt_shape(16384, 1024));
    MEASURE("softmax f32 16384x1024", 50, tt_softmax(rows, 1));
    tt_tensor *weight = made(TUTTI_F32, tt_shape(1024));
    MEASURE("layer_norm 16384x1024", 50, tt_layer_norm(rows, weight, weight, 1e-5));
    tt_tensor *a = made(TUTTI_BF16, tt_shape(4096, 4096)), *b = made(TUTTI_BF16, tt_shape(4096, 4096));
    MEASURE("matmul bf16 4096", 20, tt_matmul(a, b));
    MEASURE("matmul^T bf16 4096", 20, tt_matmul(a, tt_transpose(b, 0, 1)));
    MEASURE("matmul f32 4096", 5, tt_matmul(square, square));
    tt_tensor *table = made(TUTTI_F32, tt_shape(50257, 768));
    tt_tensor *index = tt_randint(0, 50257, tt_shape(8192), TUTTI_I64, TUTTI_OPTIONS(tt_options, .device = device));
    MEASURE("embedding 8192x768", 50, tt_embedding(table, index));
    tt_tensor *grad = made(TUTTI_F32, tt_shape(8192, 768));
    MEASURE("index_add 8192x768", 5, tt_index_add(table, 0, index, grad));
    tt_tensor *logits = made(TUTTI_F32, tt_shape(8192, 8192));
    tt_tensor *targets = tt_randint(0, 8192, tt_shape(8192), TUTTI_I64, TUTTI_OPTIONS(tt_options, .device = device));
    MEASURE("cross_entropy 8192x8192", 20, tt_cross_entropy(logits, targets, -100));
    tt_tensor *first = tt_zeros_like(x), *second = tt_zeros_like(x);
    MEASURE("adamw f32 16M", 20, tt_adamw_step(x, y, first, second, 1, NULL));
    MEASURE("randn f32 16M", 20, made(TUTTI_F32, tt_shape(16 << 20)));
    return 0;
}

int main(void) {
    if (!tt_device_available(device)) {
        printf("no tensors on cuda here\n");
        return 77;
    }
    tt_scope scope = tt_scope_open();
    int result = measure();
    if (tt_scope_close(&scope) != TUTTI_OK) {
        printf("%s\n", tutti_error_message());
        result = 1;
    }
    return result;
}
