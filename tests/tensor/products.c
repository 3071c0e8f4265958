/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products on a GPU, TEST_DEVICE=cuda: how exact those of f32 are, by default and in tf32, products of i8, which
 * are exact whoever multiplies, and scaled ones of f8. Where the vendor's library is not there, Tutti's own kernel is,
 * which rounds nothing.
 */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>

#include <tutti/module.h>
#include <tutti/tensors.h>

#include "support.h"

static tutti_device begin(void) {
    if (test_device() == TUTTI_CPU)
        SKIP("TEST_DEVICE names no other device");
    tt_synchronize(test_device());
    return test_device();
}

static bool has_library(void) {
    void *found = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    return found != NULL || dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL) != NULL;
}

/* |x - exact| / |exact|, of all elements together. */
static double error_of(tt_tensor *x, tt_tensor *exact) {
    tt_tensor *found = tt_to(tt_to_device(x, TUTTI_CPU), TUTTI_F64), *apart = tt_sub(found, exact);
    return sqrt(tt_item(tt_sum(tt_square(apart))) / tt_item(tt_sum(tt_square(exact))));
}

static tt_tensor *here(tt_tensor *x) {
    return tt_to(tt_to_device(x, TUTTI_CPU), TUTTI_F64);
}

/* Products of every form: one, a batch, a layer with a bias, and that layer's gradients. */
enum {
    FORMS = 5
};
static void products_of(tt_tensor *x, tt_tensor *weight, tt_tensor *bias, tt_tensor *results[FORMS]) {
    tt_tensor *leaf = tt_require_grad(tt_detach(weight), true), *input = tt_require_grad(tt_detach(x), true);
    results[0] = tt_matmul(x, tt_transpose(weight, 0, 1));
    results[1] = tt_matmul(tt_view(x, tt_shape(2, 64, 192)), tt_transpose(tt_view(weight, tt_shape(2, 48, 192)), 1, 2));
    results[2] = tt_linear(input, leaf, bias);
    tt_backward(tt_sum(tt_square(results[2])), NULL);
    results[3] = tt_grad(leaf);
    results[4] = tt_grad(input);
}

TEST(products_of_f32_are_rounded_to_tf32_on_request_alone) {
    tutti_device device = begin();
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_seed(3, 0);
    tt_tensor *x = tt_randn(tt_shape(128, 192), TUTTI_F32, NULL),
              *weight = tt_randn(tt_shape(96, 192), TUTTI_F32, NULL);
    tt_tensor *bias = tt_randn(tt_shape(96), TUTTI_F32, NULL), *exact[FORMS], *plain[FORMS], *rounded[FORMS];
    products_of(here(x), here(weight), here(bias), exact);
    tt_tensor *there_x = tt_to_device(x, device), *there_weight = tt_to_device(weight, device),
              *there_bias = tt_to_device(bias, device);
    products_of(there_x, there_weight, there_bias, plain);
    CHECK(!tt_tf32_mode(true));
    products_of(there_x, there_weight, there_bias, rounded);
    CHECK(tt_tf32_mode(false));
    for (int i = 0; i < FORMS; i++) {
        double before = error_of(plain[i], exact[i]), after = error_of(rounded[i], exact[i]);
        if (!(before < 1e-6) || !(after < 1e-3) || (has_library() && !(after > 2e-5)) ||
            (!has_library() && after != before))
            FAIL("the error of product %d is %g, and in tf32 %g", i, before, after);
    }
    products_of(there_x, there_weight, there_bias, rounded); /* it is off again */
    for (int i = 0; i < FORMS; i++)
        CHECK(tt_equal(plain[i], rounded[i]));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(tf32_leaves_other_types_and_the_cpu_alone) {
    tutti_device device = begin();
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_BF16, TUTTI_F16 };
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_tensor *x = tt_randn(tt_shape(64, 96), TUTTI_F32, NULL), *y = tt_randn(tt_shape(96, 32), TUTTI_F32, NULL);
    tt_tensor *of_host = tt_matmul(x, y);
    for (int i = 0; i < 3; i++) {
        tt_tensor *a = tt_to_device(tt_to(x, dtypes[i]), device), *b = tt_to_device(tt_to(y, dtypes[i]), device);
        tt_tensor *before = tt_matmul(a, b);
        tt_tf32_mode(true);
        CHECK(tt_equal(before, tt_matmul(a, b)) && tt_equal(of_host, tt_matmul(x, y)));
        tt_tf32_mode(false);
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

static void *ask_mode(void *answer) {
    *(bool *)answer = tt_tf32_mode(false);
    return NULL;
}

TEST(tf32_is_a_mode_of_its_thread_and_is_set_with_an_error_pending_too) {
    pthread_t thread;
    bool other = true;
    CHECK(!tt_tf32_mode(true));
    CHECK_EQ(pthread_create(&thread, NULL, ask_mode, &other), 0);
    pthread_join(thread, NULL);
    CHECK(!other);
    tt_scope scope = tt_scope_open();
    tt_add(NULL, NULL);
    CHECK(tt_tf32_mode(false) && !tt_tf32_mode(false));
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

/* Sizes that are whole packs and others; matrices as they lie and turned, dense and with gaps. */
TEST(products_of_i8_are_those_of_the_cpu) {
    tutti_device device = begin();
    static const int64_t sizes[][3] = { { 33, 20, 17 },  { 64, 64, 64 },  { 70, 200, 90 }, { 128, 256, 80 },
                                        { 65, 77, 131 }, { 1, 128, 128 }, { 200, 64, 1 },  { 96, 0, 96 } };
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_seed(9, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        int64_t rows = sizes[i][0], depth = sizes[i][1], columns = sizes[i][2];
        tt_tensor *a = tt_randint(-128, 128, tt_shape(rows, depth + 3), TUTTI_I8, NULL),
                  *b = tt_randint(-128, 128, tt_shape(depth, columns), TUTTI_I8, NULL),
                  *turned = tt_randint(-128, 128, tt_shape(columns, depth), TUTTI_I8, NULL);
        tt_tensor *there_a = tt_to_device(a, device), *there_b = tt_to_device(b, device),
                  *there_turned = tt_to_device(turned, device);
        for (int form = 0; form < 6; form++) {
            bool gaps = form % 3 == 0, copied = form % 3 == 1;
            tt_tensor *left = tt_narrow(a, 1, 1, depth), *there_left = tt_narrow(there_a, 1, 1, depth);
            if (!gaps)
                left = tt_contiguous(left), there_left = tt_contiguous(there_left);
            if (copied) /* by columns */
                there_left = tt_transpose(tt_contiguous(tt_transpose(there_left, 0, 1)), 0, 1);
            tt_tensor *right = form < 3 ? b : tt_transpose(turned, 0, 1),
                      *there_right = form < 3 ? there_b : tt_transpose(there_turned, 0, 1);
            if (!tt_equal(tt_int_matmul(left, right), tt_to_device(tt_int_matmul(there_left, there_right), TUTTI_CPU)))
                FAIL("the product of %d x %d x %d in form %d differs", (int)rows, (int)depth, (int)columns, form);
        }
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(sums_of_i8_beyond_an_i32_wrap_as_on_the_cpu) {
    tutti_device device = begin();
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    int64_t depth = 139264;                                      /* times 128 * 128 it is beyond 2^31 */
    int64_t rows = access("/dev/nvidiactl", F_OK) == 0 ? 64 : 6; /* few where the processor stands in for a GPU */
    tt_tensor *a = tt_full(tt_shape(rows, depth), -128, TUTTI_I8, NULL), *b = tt_transpose(a, 0, 1);
    tt_tensor *there = tt_to_device(a, device), *product = tt_int_matmul(there, tt_transpose(there, 0, 1));
    CHECK(tt_equal(tt_int_matmul(a, b), tt_to_device(product, TUTTI_CPU)));
    CHECK(tt_item_int(tt_select(tt_select(product, 0, 3), 0, 5)) < 0);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* Whole numbers from -3 to 3 and scales of eighths: exact, whoever adds. Of f8 of both kinds, with one scale or one for
 * each row and column, sizes that the library has and others, with a bias and a scale of the result. */
static tt_tensor *whole_of(tt_dims shape, tutti_dtype dtype) {
    return tt_to(tt_randint(-3, 4, shape, TUTTI_I32, NULL), dtype);
}
static tt_tensor *eighths_of(tt_dims shape) {
    return tt_mul_scalar(tt_to(tt_randint(1, 8, shape, TUTTI_I32, NULL), TUTTI_F32), 0.125);
}

TEST(scaled_products_of_f8_are_those_of_the_cpu) {
    tutti_device device = begin();
    static const tutti_dtype narrow[] = { TUTTI_F8_E4M3, TUTTI_F8_E5M2 },
                             results[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16 };
    static const int64_t sizes[][3] = { { 64, 128, 48 }, { 33, 20, 17 }, { 128, 96, 64 } };
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_seed(21, 0);
    for (int i = 0; i < 48; i++) {
        const int64_t *size = sizes[i % 3];
        bool by_rows = i / 4 % 2 != 0, added = i / 8 % 2 != 0, fast = i / 16 % 2 != 0;
        tt_tensor *x = whole_of(tt_shape(size[0], size[1]), narrow[i % 2]),
                  *turned = whole_of(tt_shape(size[2], size[1]), narrow[i / 2 % 2]),
                  *rows = eighths_of(by_rows ? tt_shape(size[0], 1) : tt_shape(1)),
                  *columns = eighths_of(by_rows ? tt_shape(1, size[2]) : tt_shape(1)),
                  *bias = added ? whole_of(tt_shape(size[2]), TUTTI_F32) : NULL,
                  *of_result = added ? eighths_of(tt_shape(1)) : NULL;
        tutti_dtype result = results[i / 3 % 3];
        tt_tensor *expected =
            tt_scaled_matmul(x, tt_transpose(turned, 0, 1), rows, columns, bias, of_result, result, fast);
        tt_tensor *found = tt_scaled_matmul(tt_to_device(x, device), tt_transpose(tt_to_device(turned, device), 0, 1),
                                            tt_to_device(rows, device), tt_to_device(columns, device),
                                            added ? tt_to_device(bias, device) : NULL,
                                            added ? tt_to_device(of_result, device) : NULL, result, fast);
        if (expected == NULL || found == NULL || !tt_equal(expected, tt_to_device(found, TUTTI_CPU)))
            FAIL("the scaled product %d differs: %s", i, tutti_error_message());
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* The gradient of logits, 520 rows of 519 classes, whose rows a GPU puts apart for the products behind it. */
TEST(gradients_of_a_large_cross_entropy_are_those_of_the_cpu) {
    tutti_device device = begin();
    static const tutti_dtype dtypes[] = { TUTTI_BF16, TUTTI_F16, TUTTI_F32 };
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_seed(12, 0);
    for (int i = 0; i < 3; i++) {
        tt_tensor *logits = tt_randn(tt_shape(520, 519), dtypes[i], NULL), *both[2];
        tt_tensor *targets = tt_randint(0, 519, tt_shape(520), TUTTI_I64, NULL);
        tt_fill_(tt_narrow(targets, 0, 7, 3), -100);
        for (int k = 0; k < 2; k++) {
            tutti_device where = k == 0 ? TUTTI_CPU : device;
            tt_tensor *leaf = tt_require_grad(tt_detach(tt_to_device(logits, where)), true);
            tt_backward(tt_cross_entropy(leaf, tt_to_device(targets, where), -100), NULL);
            both[k] = tt_grad(leaf);
        }
        CHECK(tt_equal(both[0], tt_to_device(both[1], TUTTI_CPU))); /* the same bits */
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(a_layer_behind_a_large_cross_entropy_gets_the_gradients_of_the_cpu) {
    tutti_device device = begin();
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_seed(13, 0);
    tt_tensor *x = tt_randn(tt_shape(2, 260, 24), TUTTI_F32, NULL),
              *weight = tt_randn(tt_shape(519, 24), TUTTI_F32, NULL);
    tt_tensor *targets = tt_randint(0, 519, tt_shape(520), TUTTI_I64, NULL), *grads[2][2];
    for (int k = 0; k < 2; k++) {
        tutti_device where = k == 0 ? TUTTI_CPU : device;
        tutti_dtype dtype = k == 0 ? TUTTI_F32 : TUTTI_BF16;
        tt_tensor *input = tt_require_grad(tt_detach(tt_to(tt_to_device(x, where), dtype)), true);
        tt_tensor *leaf = tt_require_grad(tt_detach(tt_to(tt_to_device(weight, where), dtype)), true);
        tt_tensor *logits = tt_reshape(tt_linear(input, leaf, NULL), tt_shape(520, 519));
        tt_backward(tt_cross_entropy(logits, tt_to_device(targets, where), -100), NULL);
        grads[k][0] = tt_to(tt_to_device(tt_grad(input), TUTTI_CPU), TUTTI_F64);
        grads[k][1] = tt_to(tt_to_device(tt_grad(leaf), TUTTI_CPU), TUTTI_F64);
    }
    for (int i = 0; i < 2; i++)
        CHECK(error_of(grads[1][i], grads[0][i]) < 2e-2);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}
