/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators on rows, on the device that TEST_DEVICE names, against the CPU, bit by bit: rows of every length around
 * what their kernels tell apart, that begin at multiples of 16 bytes or not. And where the heads of attention lie.
 */
#include <tutti/autograd.h>
#include <tutti/ops.h>

#include "device.h"

static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64, TUTTI_BF16, TUTTI_F16 };
#define EACH_DTYPE for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes; k++)

static void need_a_device(void) {
    if (test_device() == TUTTI_CPU)
        SKIP("TEST_DEVICE names no other device");
    CHECK(tt_default_device_set(TUTTI_CPU));
}

/* Numbers of the CPU that begin `offset` elements behind a multiple of 16 bytes. */
static tt_tensor *numbers(int64_t rows, int64_t columns, tutti_dtype dtype, int64_t offset) {
    tt_tensor *all = tt_mul_scalar(tt_randn(tt_shape(rows * columns + offset), TUTTI_F32, NULL), 2);
    return tt_view(tt_narrow(tt_to(all, dtype), 0, offset, rows * columns), tt_shape(rows, columns));
}

static tt_tensor *there(tt_tensor *x, int64_t offset) {
    int64_t rows = tt_size(x, 0), columns = tt_size(x, 1);
    tt_tensor *all =
        tt_empty(tt_shape(rows * columns + offset), tt_dtype(x), TUTTI_OPTIONS(tt_options, .device = test_device()));
    tt_tensor *part = tt_view(tt_narrow(all, 0, offset, rows * columns), tt_shape(rows, columns));
    tt_copy_(part, tt_to_device(x, test_device()));
    return part;
}

static void check_same(const char *what, tt_tensor *here, tt_tensor *over, tutti_dtype dtype, int64_t rows,
                       int64_t columns, int64_t offset) {
    if (here == NULL || over == NULL || !tt_equal(here, tt_to_device(over, TUTTI_CPU)))
        FAIL("%s of %lld rows of %lld %s, %lld behind: %s", what, (long long)rows, (long long)columns,
             tutti_dtype_name(dtype), (long long)offset, tutti_error_message());
}

static void check_norm(tt_tensor *x, tt_tensor *moved, tutti_dtype weights, int64_t offset) {
    int64_t rows = tt_size(x, 0), columns = tt_size(x, 1);
    tt_tensor *leaves[2][3], *y[2];
    for (int i = 0; i < 2; i++) {
        tt_scope inner = tt_scope_open();
        tt_seed(5, 0);
        tt_tensor *gain = tt_to(tt_randn(tt_shape(columns), TUTTI_F32, NULL), weights);
        tt_tensor *bias = tt_to(tt_randn(tt_shape(columns), TUTTI_F32, NULL), weights);
        tutti_device on = i == 0 ? TUTTI_CPU : test_device();
        leaves[i][0] = tt_require_grad(tt_detach(i == 0 ? x : moved), true);
        leaves[i][1] = tt_require_grad(tt_detach(tt_to_device(gain, on)), true);
        leaves[i][2] = tt_require_grad(tt_detach(tt_to_device(bias, on)), true);
        y[i] = tt_layer_norm(leaves[i][0], leaves[i][1], leaves[i][2], 1e-5);
        CHECK(tt_backward(y[i], tt_detach(y[i])));
        for (int k = 0; k < 3; k++)
            tt_scope_return(leaves[i][k]);
        tt_scope_return(y[i]);
        CHECK_OK(tt_scope_close(&inner));
    }
    tutti_dtype dtype = tt_dtype(x);
    check_same("layer_norm", tt_detach(y[0]), tt_detach(y[1]), dtype, rows, columns, offset);
    for (int k = 0; k < 3; k++)
        check_same("its gradient", tt_grad(leaves[0][k]), tt_grad(leaves[1][k]), dtype, rows, columns, offset);
}

TEST(rows_of_every_length_have_the_bits_of_the_cpu) {
    need_a_device();
    static const int64_t columns[] = { 1, 7, 8, 16, 24, 40, 72, 512, 768, 1000, 1024, 1032, 2048, 4104 };
    static const int64_t counts[] = { 1, 37 };
    EACH_DTYPE {
        for (size_t i = 0; i < 2 * sizeof columns / sizeof *columns; i++) {
            tt_scope scope = tt_scope_open();
            int64_t size = columns[i / 2], rows = counts[(i + k) % 2], offset = i % 5 == 4 ? 1 : 0;
            tt_tensor *x = numbers(rows, size, dtypes[k], offset), *moved = there(x, offset);
            check_same("softmax", tt_softmax(x, 1), tt_softmax(moved, 1), dtypes[k], rows, size, offset);
            check_norm(x, moved, dtypes[k], offset);
            check_norm(x, moved, dtypes[k] == TUTTI_F64 ? TUTTI_F64 : TUTTI_F32, offset);
            check_same("rms_norm", tt_rms_norm(x, NULL, 1e-5), tt_rms_norm(moved, NULL, 1e-5), dtypes[k], rows, size,
                       offset);
            CHECK_OK(tt_scope_close(&scope));
        }
    }
}

TEST(cross_entropy_of_long_rows_and_of_many_has_the_bits_of_the_cpu) {
    need_a_device();
    static const int64_t sizes[][2] = { { 5, 4095 }, { 3, 4096 }, { 2, 10007 }, { 700, 9 } };
    EACH_DTYPE {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            tt_scope scope = tt_scope_open();
            int64_t rows = sizes[i][0], classes = sizes[i][1];
            tt_tensor *x = numbers(rows, classes, dtypes[k], 0), *moved = there(x, 0);
            tt_tensor *targets = tt_randint(0, classes, tt_shape(rows), TUTTI_I64, NULL);
            tt_fill_(tt_narrow(targets, 0, rows / 2, 1), -100); /* does not count */
            tt_tensor *leaf[] = { tt_require_grad(tt_detach(x), true), tt_require_grad(tt_detach(moved), true) };
            tt_tensor *loss[] = { tt_cross_entropy(leaf[0], targets, -100),
                                  tt_cross_entropy(leaf[1], tt_to_device(targets, test_device()), -100) };
            check_same("cross_entropy", tt_detach(loss[0]), tt_detach(loss[1]), dtypes[k], rows, classes, 0);
            CHECK(tt_backward(loss[0], NULL) && tt_backward(loss[1], NULL));
            check_same("its gradient", tt_grad(leaf[0]), tt_grad(leaf[1]), dtypes[k], rows, classes, 0);
            CHECK_OK(tt_scope_close(&scope));
        }
    }
}

TEST(sums_of_columns_have_the_bits_of_the_cpu) {
    need_a_device();
    static const int64_t sizes[][2] = { { 64, 12 }, { 65, 12 }, { 300, 7 }, { 300, 2 }, { 5000, 24 } };
    EACH_DTYPE {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            tt_scope scope = tt_scope_open();
            int64_t rows = sizes[i][0], size = sizes[i][1], offset = (int64_t)i % 2;
            tt_tensor *x = numbers(rows, size, dtypes[k], offset), *moved = there(x, offset);
            check_same("sum", tt_sum_dims(x, tt_shape(0), false), tt_sum_dims(moved, tt_shape(0), false), dtypes[k],
                       rows, size, offset);
            check_same("mean", tt_mean_dims(x, tt_shape(0), false), tt_mean_dims(moved, tt_shape(0), false), dtypes[k],
                       rows, size, offset);
            check_same("amax", tt_amax(x, tt_shape(0), false), tt_amax(moved, tt_shape(0), false), dtypes[k], rows,
                       size, offset);
            CHECK_OK(tt_scope_close(&scope));
        }
    }
}

/* (batch, length, heads * depth) as (batch, heads, length, depth), a view. */
static tt_tensor *heads_of(tt_tensor *x, int64_t heads) {
    tt_tensor *cut = tt_view(x, tt_shape(tt_size(x, 0), tt_size(x, 1), heads, tt_size(x, 2) / heads));
    return tt_transpose(cut, 1, 2);
}

/* What attention makes of views of heads lies as they do: it is a view of (batch, length, heads * depth) again. */
TEST(heads_of_attention_lie_as_those_that_it_was_given) {
    static const int64_t depths[] = { 32, 5 }; /* in tiles on a GPU, and not */
    for (size_t i = 0; i < 2; i++) {
        tt_scope scope = test_scope_open();
        int64_t width = 3 * depths[i];
        tt_tensor *leaves[3], *dense[3], *views[3], *copies[3];
        for (int k = 0; k < 3; k++) {
            leaves[k] = tt_require_grad(tt_randn(tt_shape(2, 70, width), TUTTI_F32, NULL), true);
            dense[k] = tt_require_grad(tt_detach(tt_clone(leaves[k])), true);
            views[k] = heads_of(leaves[k], 3);
            copies[k] = tt_contiguous(heads_of(dense[k], 3));
        }
        tt_tensor *z = tt_attention(views[0], views[1], views[2], true, 0);
        tt_tensor *same = tt_attention(copies[0], copies[1], copies[2], true, 0);
        CHECK(tt_equal(tt_detach(z), tt_detach(same)) && tt_is_contiguous(same));
        tt_tensor *back = tt_transpose(z, 1, 2);
        CHECK(tt_is_contiguous(back) && tt_view(back, tt_shape(2, 70, width)) != NULL);
        CHECK(tt_backward(tt_sum(tt_square(z)), NULL) && tt_backward(tt_sum(tt_square(same)), NULL));
        for (int k = 0; k < 3; k++)
            CHECK(tt_equal(tt_grad(leaves[k]), tt_grad(dense[k])));
        CHECK_OK(tt_scope_close(&scope));
    }
}
