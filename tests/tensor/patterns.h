/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns of distributed training that tests run as they are and compiled: a module whose backward hooks count and
 * change gradients, a module that is fully sharded, and the exact values that they have after four steps.
 */
#ifndef TESTS_TENSOR_PATTERNS_H
#define TESTS_TENSOR_PATTERNS_H

#include <math.h>

#include <tutti/tensors.h>

#include "support.h"

static inline bool near(double value, double expected) {
    return fabs(value - expected) <= 1e-5 + 1.3e-6 * fabs(expected);
}

/* ---- hooks that count, and change gradients ---- */

static _Thread_local int hook_calls; /* by the host, of all modules; ranks may be threads */

typedef struct counted {
    tt_module *module;
    tt_tensor *pre, *post;
    const char *letters;
    char **log; /* the letters of the hooks that ran; NULL: not wanted */
} counted;

static inline void sin_pre(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads) {
    counted *one = context->user;
    hook_calls++;
    CHECK(count == 1 && tt_size(tt_module_parameter(module, "weight"), 0) == 10);
    tt_add_scalar_(one->pre, 1);
    grads[0] = tt_sin(tt_add_scalar(grads[0], 1.2));
    if (one->log != NULL)
        *(*one->log)++ = one->letters[0];
}

static inline void sin_post(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads,
                            tt_tensor_list outputs) {
    counted *one = context->user;
    hook_calls++;
    CHECK(count == 1 && outputs.count == 1 && tt_size(tt_module_parameter(module, "weight"), 1) == 10);
    tt_add_scalar_(one->post, 1);
    grads[0] = tt_sin(tt_add_scalar(grads[0], 3.4));
    if (one->log != NULL)
        *(*one->log)++ = one->letters[1];
}

static inline void fill_linear(tt_module *module, int64_t out, int64_t in, double shift, bool bias) {
    float values[400];
    for (int64_t i = 0; i < out * in; i++)
        values[i] = (float)(0.01 * (double)i - shift);
    bool was = tt_grad_mode(false);
    tt_copy_(tt_module_parameter(module, "weight"), tt_from(values, tt_shape(out, in), TUTTI_F32, NULL));
    if (bias)
        tt_copy_(tt_module_parameter(module, "bias"),
                 tt_mul_scalar(tt_arange(0, (double)out, 1, TUTTI_F32, NULL), 0.1));
    tt_grad_mode(was);
}

static inline tt_tensor *ramp(int64_t rows, int64_t columns, double step) {
    tt_tensor *x = tt_mul_scalar(
        tt_view(tt_arange(0, (double)(rows * columns), 1, TUTTI_F32, NULL), tt_shape(rows, columns)), step);
    return tt_require_grad(tt_detach(x), true);
}

static inline void make_counted(counted *one) {
    one->module = tt_linear_module(10, 10, true, TUTTI_F32);
    fill_linear(one->module, 10, 10, 0.5, true);
    one->pre = tt_full(tt_shape(), 0, TUTTI_I64, NULL);
    one->post = tt_full(tt_shape(), 0, TUTTI_I64, NULL);
    tt_hook_backward_pre(one->module, sin_pre, one, NULL, NULL);
    tt_hook_backward(one->module, sin_post, one, NULL, NULL);
}

/* What four steps with one such module leave. */
static inline void check_counted(const counted *one, tt_tensor *input, tt_tensor *out) {
    CHECK(tt_item_int(one->pre) == 4 && tt_item_int(one->post) == 4);
    CHECK(near(tt_at(out, tt_shape(0, 0)), -0.9825) && near(tt_at(out, tt_shape(1, 9)), 4.1675) &&
          near(tt_item(tt_sum(out)), 9.35));
    tt_tensor *of_bias = tt_grad(tt_module_parameter(one->module, "bias")),
              *of_weight = tt_grad(tt_module_parameter(one->module, "weight"));
    CHECK(near(tt_at(of_bias, tt_shape(7)), 6.46797123));
    CHECK(near(tt_at(of_weight, tt_shape(0, 0)), 1.61699281) && near(tt_at(of_weight, tt_shape(3, 7)), 3.88078274));
    CHECK(fabs(tt_item(tt_sum(of_weight)) - 307.2286335) < 1e-3);
    tt_tensor *of_input = tt_grad(input);
    CHECK(near(tt_at(of_input, tt_shape(0, 0)), 0.58129764) && near(tt_at(of_input, tt_shape(1, 9)), -2.19813447));
    CHECK(fabs(tt_item(tt_sum(of_input)) + 16.83804041) < 1e-4);
}

/* What four steps through two of them, one after the other, leave. */
static inline void check_layers(const counted *first, const counted *second, tt_tensor *input, tt_tensor *out) {
    CHECK(tt_item_int(first->pre) == 4 && tt_item_int(first->post) == 4);
    CHECK(tt_item_int(second->pre) == 4 && tt_item_int(second->post) == 4);
    CHECK(near(tt_at(out, tt_shape(0, 0)), -1.915875) && near(tt_item(tt_sum(out)), 18.02));
    tt_tensor *of_second = tt_grad(tt_module_parameter(second->module, "weight")),
              *of_first = tt_grad(tt_module_parameter(first->module, "weight"));
    CHECK(near(tt_at(tt_grad(tt_module_parameter(second->module, "bias")), tt_shape(0)), 6.46797123));
    CHECK(fabs(tt_at(of_second, tt_shape(0, 0)) + 13.71209901) < 1e-4 &&
          fabs(tt_item(tt_sum(of_second)) - 302.3776550) < 1e-2);
    CHECK(fabs(tt_at(of_first, tt_shape(0, 0)) - 1.94937742) < 1e-4 &&
          fabs(tt_item(tt_sum(of_first)) - 309.7152047) < 1e-2);
    tt_tensor *bias = tt_grad(tt_module_parameter(first->module, "bias"));
    CHECK(near(tt_at(bias, tt_shape(0)), 7.79750969) && near(tt_at(bias, tt_shape(9)), 4.84446096));
    tt_tensor *of_input = tt_grad(input);
    CHECK(near(tt_at(of_input, tt_shape(0, 0)), 1.89506403) && near(tt_at(of_input, tt_shape(1, 9)), -0.95070847));
    CHECK(fabs(tt_item(tt_sum(of_input)) - 9.84141474) < 1e-3);
}

/* ---- fully sharded, with the communication replaced by copies ---- */

static _Thread_local bool found_gradient; /* by the hook after the backward */

typedef struct sharded {
    tt_module *module;
    tt_tensor *shard, *whole;
} sharded;

static inline tt_tensor *fake_all_gather(tt_tensor *x) {
    return tt_cat(tt_tensors(x, x), 0);
}

static inline tt_tensor *fake_reduce_scatter(tt_tensor *x) {
    return tt_clone(tt_narrow(x, 0, 0, tt_size(x, 0) / 2));
}

static inline void unshard(sharded *one) {
    bool was = tt_grad_mode(false);
    tt_storage_resize(one->whole, (size_t)tt_numel(one->whole) * 4);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(one->whole));
    tt_copy_(one->whole, fake_all_gather(one->shard));
    tt_preserve_end(preserve);
    tt_grad_mode(was);
    tt_module_set_parameter(one->module, "weight", one->whole);
}

static inline void reshard(sharded *one) {
    tt_module_set_parameter(one->module, "weight", one->shard);
    tt_storage_resize(one->whole, 0);
}

static inline void before_forward(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **inputs) {
    (void)module, (void)count, (void)inputs;
    unshard(context->user);
}

static inline void after_forward(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                                 tt_tensor **outputs) {
    (void)module, (void)inputs, (void)count, (void)outputs;
    reshard(context->user);
}

static inline void before_backward(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads) {
    (void)module, (void)count, (void)grads;
    unshard(context->user);
}

static inline void after_backward(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads,
                                  tt_tensor_list outputs) {
    sharded *one = context->user;
    (void)count, (void)grads, (void)outputs;
    tt_tensor *grad = tt_grad(tt_module_parameter(module, "weight"));
    found_gradient = grad != NULL;
    tt_tensor *part = grad != NULL ? fake_reduce_scatter(grad) : NULL;
    tt_module_set_parameter(module, "weight", one->shard);
    tt_set_grad(one->shard, part);
    tt_storage_resize(one->whole, 0);
}

static inline void make_sharded(sharded *one) {
    one->module = tt_linear_module(20, 10, false, TUTTI_F32);
    fill_linear(one->module, 10, 20, 1, false);
    bool was = tt_grad_mode(false);
    one->shard = tt_parameter(fake_reduce_scatter(tt_module_parameter(one->module, "weight")), true);
    one->whole = tt_parameter(fake_all_gather(one->shard), true);
    tt_grad_mode(was);
    tt_storage_resize(one->whole, 0);
    tt_hook_backward_pre(one->module, before_backward, one, NULL, NULL);
    tt_hook_backward(one->module, after_backward, one, NULL, NULL);
    tt_hook_forward_pre(one->module, before_forward, one, NULL, NULL);
    tt_hook_forward(one->module, after_forward, one, NULL, NULL);
}

/* What four steps leave. */
static inline void check_sharded(const sharded *one, tt_tensor *input, tt_tensor *out) {
    static const double first[] = { -3.306, -2.546, -1.786, -1.026, -0.266 };
    for (int i = 0; i < 10; i++)
        CHECK(near(tt_at(out, tt_shape(0, i)), first[i % 5]));
    CHECK(near(tt_at(out, tt_shape(1, 0)), -10.546) && near(tt_at(out, tt_shape(1, 9)), -1.106) &&
          fabs(tt_item(tt_sum(out)) + 76.12) < 1e-4);
    tt_tensor *grad = tt_grad(one->shard);
    CHECK(tt_size(grad, 0) == 5 && near(tt_at(grad, tt_shape(4, 19)), 4.64) &&
          fabs(tt_item(tt_sum(grad)) - 312) < 1e-3);
    tt_tensor *of_input = tt_grad(input);
    CHECK(near(tt_at(of_input, tt_shape(0, 0)), -24) && near(tt_at(of_input, tt_shape(1, 19)), -16.4) &&
          fabs(tt_item(tt_sum(of_input)) + 808) < 1e-2);
}

#endif
