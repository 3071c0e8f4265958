/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors: scopes, pending errors, storage, versions, promotion, random numbers, printing.
 */
#include <math.h>
#include <pthread.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

#include "../harness.h"

static tt_tensor *row(int count, const float *values) {
    return tt_from(values, tt_shape(count), TUTTI_F32, NULL);
}

static void nothing_left(void) {
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK_EQ(counts.tensors, 0);
    CHECK_EQ(counts.storages, 0);
    CHECK_EQ(counts.scopes, 0);
    CHECK_EQ(counts.nodes, 0);
}

TEST(a_scope_owns_what_is_made_in_it) {
    tt_scope outer = tt_scope_open();
    tt_tensor *kept = NULL, *returned;
    {
        tt_scope inner = tt_scope_open();
        tt_tensor *x = tt_ones(tt_shape(3), TUTTI_F32, NULL);
        kept = tt_keep(tt_mul_scalar(x, 2));
        returned = tt_scope_return(tt_mul_scalar(x, 3));
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK(tt_at(kept, tt_shape(0)) == 2 && tt_at(returned, tt_shape(2)) == 3);
    CHECK_OK(tt_scope_close(&outer));
    tt_scope again = tt_scope_open();
    CHECK(tt_at(kept, tt_shape(1)) == 2);
    CHECK_OK(tt_scope_close(&again));
    tt_release(kept);
    nothing_left();
}

TEST(without_a_scope_a_call_is_an_error) {
    CHECK(tt_ones(tt_shape(2), TUTTI_F32, NULL) == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_SCOPE);
    tt_scope scope = tt_scope_open();
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_SCOPE);
    CHECK_MESSAGE("no scope is open");
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_SCOPE);
    CHECK_MESSAGE("closed before");
    nothing_left();
}

TEST(the_first_error_stays_and_everything_after_it_does_nothing) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), *b = tt_ones(tt_shape(4, 5), TUTTI_F32, NULL);
    tt_tensor *p = tt_ones(tt_shape(2), TUTTI_F32, NULL);
    CHECK(tt_matmul(a, b) == NULL);
    CHECK(tt_add(a, a) == NULL && tt_add(a, NULL) == NULL && tt_numel(a) == 0);
    CHECK(!tt_sgd_step(p, p, NULL, NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("matmul");
    CHECK_MESSAGE("[2, 3]");
    CHECK_MESSAGE("[4, 5]");
    nothing_left();
}

TEST(leaving_a_scope_leaves_the_error_for_the_one_outside) {
    tt_scope outer = tt_scope_open(), inner = tt_scope_open();
    tt_tensor *x = tt_scope_return(tt_ones(tt_shape(2), TUTTI_F32, NULL));
    tt_mul_scalar(x, 2);
    tt_scope_leave(&inner);
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK(counts.tensors == 1 && counts.scopes == 1 && tt_at(x, tt_shape(1)) == 1);
    inner = tt_scope_open();
    CHECK(tt_ones(tt_shape(-2), TUTTI_F32, NULL) == NULL);
    tt_scope_leave(&inner);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_scope_leave(&inner);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_SCOPE);
    tt_error_clear();
    tt_scope_leave(NULL);
    CHECK_STATUS(tt_scope_close(&outer), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("scope is NULL");
    nothing_left();
}

TEST(an_error_can_be_cleared_and_work_goes_on) {
    tt_scope scope = tt_scope_open();
    CHECK(tt_ones(tt_shape(-2), TUTTI_F32, NULL) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("negative");
    tt_error_clear();
    CHECK(tt_ones(tt_shape(2), TUTTI_F32, NULL) != NULL);
    tt_error_format(TUTTI_ERROR_RANGE, "my own check: %d", 42);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("my own check: 42");
}

TEST(wrong_arguments_name_operator_argument_and_shapes) {
    static const struct {
        tutti_status status;
        const char *fragment;
    } expected[] = {
        { TUTTI_ERROR_ARGUMENT, "argument b is NULL" },
        { TUTTI_ERROR_ARGUMENT, "do not broadcast" },
        { TUTTI_ERROR_TYPE, "999 is no dtype" },
        { TUTTI_ERROR_RANGE, "dim 2 is out of range" },
        { TUTTI_ERROR_ARGUMENT, "appears twice" },
        { TUTTI_ERROR_ARGUMENT, "invalid for f32 [2, 3]" },
        { TUTTI_ERROR_RANGE, "index 7" },
        { TUTTI_ERROR_ARGUMENT, "a (input 0) is on the device cpu and b (input 1) on meta" },
        { TUTTI_ERROR_ARGUMENT, "8 dimensions" },
        { TUTTI_ERROR_TYPE, "cannot be written" },
        { TUTTI_ERROR_ARGUMENT, "share one memory location" },
        { TUTTI_ERROR_ARGUMENT, "would need a copy" },
        { TUTTI_ERROR_TYPE, "the same dtype" },
        { TUTTI_ERROR_RANGE, "too large" },
    };
    for (int i = 0; i < (int)(sizeof expected / sizeof expected[0]); i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), *n = tt_ones(tt_shape(3), TUTTI_I32, NULL);
        tt_options meta = TT_OPTIONS_INIT;
        meta.device = TUTTI_META;
        int64_t nine[9] = { 1, 1, 1, 1, 1, 1, 1, 1, 1 };
        switch (i) {
        case 0:
            tt_add(x, NULL);
            break;
        case 1:
            tt_add(x, tt_ones(tt_shape(4), TUTTI_F32, NULL));
            break;
        case 2:
            tt_to(x, (tutti_dtype)999);
            break;
        case 3:
            tt_softmax(x, 2);
            break;
        case 4:
            tt_sum_dims(x, tt_shape(0, -2), false);
            break;
        case 5:
            tt_view(x, tt_shape(4));
            break;
        case 6:
            tt_embedding(x, tt_full(tt_shape(1), 7, TUTTI_I64, NULL));
            break;
        case 7:
            tt_add(x, tt_ones(tt_shape(2, 3), TUTTI_F32, &meta));
            break;
        case 8:
            tt_ones(tt_dims_of(9, nine), TUTTI_F32, NULL);
            break;
        case 9:
            tt_add_(n, tt_ones(tt_shape(3), TUTTI_F32, NULL));
            break;
        case 10:
            tt_add_(tt_expand(tt_ones(tt_shape(1), TUTTI_F32, NULL), tt_shape(4)),
                    tt_ones(tt_shape(4), TUTTI_F32, NULL));
            break;
        case 11:
            tt_view(tt_transpose(x, 0, 1), tt_shape(6));
            break;
        case 12:
            tt_matmul(x, tt_ones(tt_shape(3, 2), TUTTI_F64, NULL));
            break;
        default:
            tt_empty(tt_shape(1ll << 40, 1ll << 40), TUTTI_F32, NULL);
            break;
        }
        tutti_status status = tt_scope_close(&scope);
        if (status != expected[i].status || strstr(tutti_error_message(), expected[i].fragment) == NULL)
            FAIL("case %d gave %s: %s", i, tutti_status_name(status), status == TUTTI_OK ? "" : tutti_error_message());
    }
}

TEST(memory_that_cannot_be_had_is_an_error) {
    if (test_sanitized())
        SKIP("a sanitizer ends the process for such sizes");
    tt_scope scope = tt_scope_open();
    CHECK(tt_empty(tt_shape(1ll << 45), TUTTI_F32, NULL) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("out of memory");
}

TEST(a_value_asked_for_with_an_error_pending_is_no_number) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(1), TUTTI_F32, NULL);
    tt_matmul(NULL, x);
    CHECK(tt_item(x) != tt_item(x) && tt_at(x, tt_shape(0)) != tt_at(x, tt_shape(0)));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
}

/* ---- storage and versions ---- */

TEST(storage_can_be_freed_and_grown_back) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_arange(0, 10, 1, TUTTI_F32, NULL), *view = tt_slice(x, 0, 2, 6, 1);
    CHECK_EQ(tt_storage_bytes(x), 40);
    CHECK(tt_storage_resize(view, 0));
    CHECK_EQ(tt_storage_bytes(x), 0);
    tt_tensor *turned = tt_view(x, tt_shape(2, 5)); /* views of freed storage are legal */
    CHECK(turned != NULL && tt_transpose(turned, 0, 1) != NULL);
    CHECK(tt_data(x) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_FREED);
    CHECK_MESSAGE("needs 40 bytes and has 0");
    tt_error_clear();
    CHECK(tt_storage_resize(x, 40) && tt_storage_resize(x, 40));
    CHECK_EQ(tt_version(x), 0);
    tt_fill_(x, 3);
    CHECK(tt_at(view, tt_shape(3)) == 3);
    CHECK(tt_storage_resize(x, 20) && tt_storage_resize(x, 40)); /* the first part is kept */
    CHECK(tt_at(x, tt_shape(4)) == 3);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(foreign_memory_cannot_be_resized) {
    float values[4] = { 1, 2, 3, 4 };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_wrap(values, tt_shape(4), TUTTI_F32, NULL, NULL);
    tt_mul_scalar_(x, 2);
    CHECK(values[3] == 8);
    CHECK(!tt_storage_resize(x, 0));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("not resizable");
}

static int releases;
static void count_release(void *owner) {
    releases += *(int *)owner;
}

TEST(wrapped_memory_is_released_with_its_last_tensor) {
    int one = 1;
    float values[2] = { 0 };
    tt_scope scope = tt_scope_open();
    tt_tensor *view = tt_keep(tt_narrow(tt_wrap(values, tt_shape(2), TUTTI_F32, count_release, &one), 0, 0, 1));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(releases, 0);
    tt_release(view);
    CHECK_EQ(releases, 1);
}

TEST(every_write_bumps_the_version_of_all_aliases_by_one) {
    tt_scope scope = tt_scope_open();
    tt_tensor *t = tt_zeros(tt_shape(4), TUTTI_F32, NULL);
    CHECK_EQ(tt_version(t), 0);
    tt_fill_(t, 1);
    CHECK_EQ(tt_version(t), 1);
    tt_add_scalar_(tt_view(t, tt_shape(2, 2)), 1);
    CHECK_EQ(tt_version(t), 2);
    tt_mul_scalar_(tt_detach(t), 2);
    CHECK_EQ(tt_version(t), 3);
    CHECK(tt_data(t) != NULL);
    CHECK_EQ(tt_version(t), 3);
    CHECK(tt_data_mut(t) != NULL);
    CHECK_EQ(tt_version(t), 4);
    tt_storage_resize(t, 0);
    tt_storage_resize(t, 16);
    CHECK_EQ(tt_version(t), 4);
    tt_randn(tt_shape(3), TUTTI_F32, NULL);
    CHECK_EQ(tt_version(tt_randn(tt_shape(16), TUTTI_F32, NULL)), 0);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(versions_can_be_set_and_preserved) {
    tt_scope scope = tt_scope_open();
    tt_tensor *t = tt_zeros(tt_shape(4), TUTTI_F32, NULL), *u = tt_zeros(tt_shape(4), TUTTI_F32, NULL);
    tt_fill_(t, 1);
    tt_preserve *outer = tt_preserve_begin(tt_tensors(t, u));
    tt_fill_(t, 2);
    tt_preserve *inner = tt_preserve_begin(tt_tensors(u));
    tt_fill_(u, 2);
    tt_preserve_end(inner);
    CHECK_EQ(tt_version(u), 0);
    tt_add(t, NULL); /* an error does not keep the end from restoring */
    tt_preserve_end(outer);
    tt_error_clear();
    CHECK_EQ(tt_version(t), 1);
    CHECK(tt_set_version(tt_tensors(t, u), 2, (int64_t[]){ 7, 9 }));
    CHECK(tt_version(t) == 7 && tt_version(tt_view(u, tt_shape(2, 2))) == 9);
    CHECK(!tt_set_version(tt_tensors(t), 1, (int64_t[]){ -1 }));
    tt_error_clear();
    CHECK(!tt_set_version(tt_tensors(t), 2, (int64_t[]){ 1, 2 }));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
}

/* ---- values ---- */

TEST(types_promote_as_people_expect) {
    tt_scope scope = tt_scope_open();
    tt_tensor *f = tt_ones(tt_shape(2), TUTTI_F32, NULL), *i = tt_ones(tt_shape(2), TUTTI_I64, NULL),
              *b = tt_ones(tt_shape(2), TUTTI_BOOL, NULL);
    tt_tensor *zero_dim = tt_full(tt_shape(), 88, TUTTI_I64, NULL), *d = tt_ones(tt_shape(), TUTTI_F64, NULL);
    CHECK_EQ(tt_dtype(tt_add(f, i)), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add(f, zero_dim)), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add(f, d)), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add(i, d)), TUTTI_F64);
    CHECK_EQ(tt_dtype(tt_add(i, tt_number(2))), TUTTI_I64);
    CHECK_EQ(tt_dtype(tt_add(i, tt_number(2.5))), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add_scalar(i, 0.5)), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add(b, b)), TUTTI_BOOL);
    CHECK_EQ(tt_dtype(tt_sum(b)), TUTTI_I64);
    CHECK_EQ(tt_dtype(tt_div(i, i)), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add(tt_to(f, TUTTI_F16), tt_to(f, TUTTI_BF16))), TUTTI_F32);
    CHECK_EQ(tt_dtype(tt_add(tt_to(i, TUTTI_U8), tt_to(i, TUTTI_I8))), TUTTI_I16);
    CHECK_EQ(tt_dtype(tt_mul(f, tt_to(f, TUTTI_C64))), TUTTI_C64);
    CHECK(tt_item_int(tt_sum(tt_add(b, b))) == 2);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(integers_wrap_and_large_ones_stay_exact) {
    tt_scope scope = tt_scope_open();
    int64_t big[2] = { (1ll << 62) + 1, -3 };
    tt_tensor *x = tt_from(big, tt_shape(2), TUTTI_I64, NULL);
    CHECK(tt_item_int(tt_select(tt_add_scalar(x, 2), 0, 0)) == (1ll << 62) + 3);
    CHECK(tt_item_int(tt_select(tt_mul(x, tt_number(2)), 0, 0)) == (int64_t)((((uint64_t)1 << 62) + 1) * 2));
    uint8_t small[2] = { 250, 5 };
    tt_tensor *y = tt_from(small, tt_shape(2), TUTTI_U8, NULL);
    CHECK(tt_at(tt_add(y, y), tt_shape(0)) == 244);
    CHECK(tt_item_int(tt_sum(y)) == 255);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(long_sums_are_exact_and_do_not_depend_on_threads) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(3000, 1001), 0.1, TUTTI_F32, NULL);
    double exact = 3000.0 * 1001.0 * (double)0.1f;
    CHECK(fabs(tt_item(tt_sum(x)) / exact - 1) < 1e-6);
    CHECK(fabs(tt_at(tt_sum_dims(x, tt_shape(0), false), tt_shape(500)) / (3000 * (double)0.1f) - 1) < 1e-6);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(vector_functions_agree_with_the_c_library) {
    enum {
        N = 20001
    };
    static float values[N], got[N];
    static const struct {
        tt_tensor *(*function)(tt_tensor *);
        double (*exact)(double);
        double low, high, tolerance;
    } functions[] = { { tt_exp, exp, -103, 88, 3e-7 },   { tt_tanh, tanh, -12, 12, 3e-7 },
                      { tt_sin, sin, -60, 60, 2e-7 },    { tt_cos, cos, -60, 60, 2e-7 },
                      { tt_log, log, 1e-30, 100, 3e-7 }, { tt_erf, erf, -5, 5, 3e-7 } };
    for (size_t f = 0; f < sizeof functions / sizeof functions[0]; f++) {
        tt_scope scope = tt_scope_open();
        for (int i = 0; i < N; i++)
            values[i] = (float)(functions[f].low + (functions[f].high - functions[f].low) * i / (N - 1));
        CHECK(tt_read(functions[f].function(row(N, values)), got, TUTTI_F32, N));
        for (int i = 0; i < N; i++) {
            double exact = functions[f].exact(values[i]);
            if (!(fabs(got[i] - exact) <= functions[f].tolerance * fmax(fabs(exact), f == 2 || f == 3 ? 1 : 0) + 1e-44))
                FAIL("function %zu of %g is %.9g, not %.9g", f, (double)values[i], (double)got[i], exact);
        }
        CHECK_OK(tt_scope_close(&scope));
    }
    tt_scope scope = tt_scope_open();
    float odd[] = { INFINITY, -INFINITY, NAN, 1000, -1000 };
    CHECK(tt_read(tt_exp(row(5, odd)), got, TUTTI_F32, 5));
    CHECK(isinf(got[0]) && got[1] == 0 && isnan(got[2]) && isinf(got[3]) && got[4] == 0);
    CHECK(tt_read(tt_tanh(row(5, odd)), got, TUTTI_F32, 5));
    CHECK(got[0] == 1 && got[1] == -1 && isnan(got[2]));
    CHECK(tt_read(tt_log(row(3, (float[]){ 0, -1, INFINITY })), got, TUTTI_F32, 3));
    CHECK(isinf(got[0]) && got[0] < 0 && isnan(got[1]) && isinf(got[2]));
    CHECK(tt_read(tt_gelu(row(4, (float[]){ 1, -1, 3, -8 })), got, TUTTI_F32, 4));
    CHECK(fabs(got[0] - 0.841344746) < 3e-7 && fabs(got[1] + 0.158655254) < 3e-7 && fabs(got[2] - 2.99595031) < 1e-6 &&
          fabs(got[3]) < 1e-13);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(matrix_products_of_every_type_agree) {
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_F32,  TUTTI_BF16, TUTTI_F16, TUTTI_F8_E4M3,
                                          TUTTI_C64, TUTTI_C128, TUTTI_I32,  TUTTI_I8 };
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        tt_scope scope = tt_scope_open();
        tt_seed(3, 0);
        tt_tensor *a = tt_randint(-2, 3, tt_shape(3, 5, 4), TUTTI_I64, NULL),
                  *b = tt_randint(-2, 3, tt_shape(4, 6), TUTTI_I64, NULL);
        tt_tensor *exact = tt_matmul(tt_to(a, TUTTI_F64), tt_to(b, TUTTI_F64));
        tt_tensor *x = tt_to(a, dtypes[d]), *y = tt_to(b, dtypes[d]);
        CHECK(tt_equal(tt_to(tt_matmul(x, y), TUTTI_F64), exact)); /* small whole numbers are exact everywhere */
        tt_tensor *turned = tt_transpose(tt_contiguous(tt_transpose(y, 0, 1)), 0, 1);
        CHECK(tt_equal(tt_to(tt_matmul(x, turned), TUTTI_F64), exact));
        CHECK(tt_equal(tt_to(tt_linear(x, tt_transpose(y, 0, 1), NULL), TUTTI_F64), exact));
        CHECK_OK(tt_scope_close(&scope));
    }
}

TEST(products_of_i8_sum_in_i32_and_scaled_ones_in_f32) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = tt_full(tt_shape(2, 300), 100, TUTTI_I8, NULL), *b = tt_full(tt_shape(300, 3), -100, TUTTI_I8, NULL);
    tt_tensor *c = tt_int_matmul(a, b);
    CHECK(tt_dtype(c) == TUTTI_I32 && tt_item_int(tt_select(tt_select(c, 0, 1), 0, 2)) == -3000000);
    tt_tensor *rows = tt_from((float[]){ 1, 2 }, tt_shape(2, 1), TUTTI_F32, NULL),
              *one = tt_full(tt_shape(), 0.5, TUTTI_F32, NULL);
    tt_tensor *bias = tt_from((float[]){ 1, 2, 3 }, tt_shape(3), TUTTI_F32, NULL);
    tt_tensor *s = tt_scaled_matmul(a, b, rows, one, bias, tt_full(tt_shape(), 2, TUTTI_F32, NULL), TUTTI_F64, false);
    CHECK(tt_at(s, tt_shape(1, 2)) == (-3000000.0 * 2 * 0.5 + 3) * 2);
    CHECK(tt_scaled_matmul(a, b, bias, one, NULL, NULL, TUTTI_F32, false) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("scale_a");
}

TEST(restrided_tensors_move_their_dimension_to_the_front_without_a_copy) {
    tt_scope scope = tt_scope_open();
    tt_tensor *t = tt_randn(tt_shape(8, 64, 32, 16), TUTTI_F32, NULL);
    for (int d = 0; d < 3; d++) {
        tt_tensor *r = tt_restride(t, d);
        tt_dims order = tt_shape(d, 0, 0, 0);
        for (int i = 0, at = 1; i < 4; i++)
            if (i != d)
                order.at[at++] = i;
        CHECK(tt_is_contiguous(tt_permute(r, order)));
        CHECK(tt_equal(r, t));
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- random numbers ---- */

/* Every element of a transposed copy; sizes around squares, strips and bands, and results that go past the caches, with
 * rows that begin on a line and rows that do not. */
static void check_turned(int64_t rows, int64_t columns, int64_t skipped) {
    tt_scope scope = tt_scope_open();
    int64_t wide = columns + skipped;
    tt_tensor *whole = tt_view(tt_arange(0, (double)(rows * wide), 1, TUTTI_I32, NULL), tt_shape(rows, wide));
    const int32_t *turned = tt_data(tt_contiguous(tt_transpose(tt_narrow(whole, 1, skipped, columns), 0, 1)));
    CHECK(turned != NULL);
    for (int64_t i = 0; i < columns; i++)
        for (int64_t j = 0; j < rows; j++)
            if (turned[i * rows + j] != (int32_t)(j * wide + skipped + i))
                FAIL("element (%lld, %lld) of a turned (%lld, %lld) is wrong", (long long)i, (long long)j,
                     (long long)rows, (long long)columns);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_transposed_copy_has_every_element_in_its_place) {
    static const int64_t sizes[] = { 4, 15, 16, 17, 63, 64, 65, 130, 515, 1025 };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++)
            if (!test_sanitized() || sizes[i] * sizes[j] < 20000)
                check_turned(sizes[i], sizes[j], (int64_t)(i + j) % 3);
    check_turned(4096, 528, 0);
    check_turned(2064, 1040, 16);
    check_turned(2060, 1030, 3);
}

TEST(random_numbers_depend_on_seed_rank_and_position_alone) {
    tt_scope scope = tt_scope_open();
    tt_seed(1234, 0);
    tt_tensor *a = tt_rand(tt_shape(1000), TUTTI_F64, NULL), *b = tt_rand(tt_shape(1000), TUTTI_F64, NULL);
    tt_seed(1234, 0);
    CHECK(tt_equal(a, tt_rand(tt_shape(1000), TUTTI_F64, NULL)));
    CHECK(!tt_equal(a, b));
    tt_seed(1234, 1);
    CHECK(!tt_equal(a, tt_rand(tt_shape(1000), TUTTI_F64, NULL)));
    tt_seed(0, 0);
    CHECK(fabs(tt_item(tt_rand(tt_shape(1), TUTTI_F64, NULL)) - 0.399046471) <
          1e-9); /* the published first words of Philox-4x32-10 */
    tt_tensor *n = tt_randn(tt_shape(100000), TUTTI_F32, NULL);
    CHECK(fabs(tt_item(tt_mean(n))) < 0.02 && fabs(tt_item(tt_mean(tt_square(n))) - 1) < 0.03);
    tt_tensor *h = tt_rand(tt_shape(100000), TUTTI_BF16, NULL);
    CHECK(tt_item(tt_amax(h, TT_ALL_DIMS, false)) < 1);
    tt_tensor *i = tt_randint(-3, 4, tt_shape(10000), TUTTI_I32, NULL);
    CHECK(tt_item(tt_amin(i, TT_ALL_DIMS, false)) == -3 && tt_item(tt_amax(i, TT_ALL_DIMS, false)) == 3);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- printing ---- */

TEST(printing_shows_values_type_and_shape) {
    char text[4096];
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from((float[]){ 1, -2.5, 0, 10 }, tt_shape(2, 2), TUTTI_F32, NULL);
    tt_require_grad(x, true);
    tt_format(x, text, sizeof text);
    CHECK_TEXT(text, "[[ 1.0000, -2.5000],\n [ 0.0000, 10.0000]]  f32 [2, 2], requires grad");
    tt_format(tt_full(tt_shape(), 3, TUTTI_I32, NULL), text, sizeof text);
    CHECK_TEXT(text, "3  i32 []");
    tt_format(tt_ones(tt_shape(2), TUTTI_BOOL, NULL), text, sizeof text);
    CHECK_TEXT(text, "[true, true]  bool [2]");
    tt_format(tt_zeros(tt_shape(2000), TUTTI_I8, NULL), text, sizeof text);
    CHECK_TEXT(text, "[0, 0, 0, …, 0, 0, 0]  i8 [2000]");
    /* only what is shown is looked at */
    tt_format(tt_expand(tt_full(tt_shape(1, 1), 7, TUTTI_U8, NULL), tt_shape((int64_t)1 << 40, 2)), text, sizeof text);
    CHECK_TEXT(text, "[[7, 7],\n [7, 7],\n [7, 7],\n …,\n [7, 7],\n [7, 7],\n [7, 7]]  u8 [1099511627776, 2]");
    tt_tensor *freed = tt_ones(tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .name = "w"));
    tt_storage_resize(freed, 0);
    tt_format(freed, text, sizeof text);
    CHECK(strstr(text, "freed") != NULL && strstr(text, "\"w\"") != NULL);
    CHECK_EQ(tt_format(x, text, 5), strlen("[[ 1.0000, -2.5000],\n [ 0.0000, 10.0000]]  f32 [2, 2], requires grad"));
    CHECK_TEXT(text, "[[ 1");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- threads ---- */

static void *in_another_thread(void *argument) {
    tt_tensor *x = argument;
    tt_scope scope = tt_scope_open();
    tt_tensor *y = tt_keep(tt_add(x, x));
    tt_release(x);
    if (tt_scope_close(&scope) != TUTTI_OK)
        return NULL;
    return y;
}

TEST(a_tensor_may_be_made_in_one_thread_and_released_in_another) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_keep(tt_ones(tt_shape(100), TUTTI_F32, NULL));
    pthread_t thread;
    void *result;
    CHECK(pthread_create(&thread, NULL, in_another_thread, x) == 0);
    CHECK(pthread_join(thread, &result) == 0);
    CHECK(result != NULL && tt_item(tt_sum(result)) == 200);
    tt_release(result);
    CHECK_OK(tt_scope_close(&scope));
    nothing_left();
}

/* ---- failures of memory ---- */

static tutti_status a_step(void *argument) {
    (void)argument;
    tt_scope outer = tt_scope_open();
    tt_tensor *w = tt_ones(tt_shape(4, 4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
    tt_tensor *m = tt_zeros(tt_shape(4, 4), TUTTI_F32, NULL), *v = tt_zeros(tt_shape(4, 4), TUTTI_F32, NULL);
    tutti_status status = tt_error_pending();
    if (status == TUTTI_OK) {
        tt_scope step = tt_scope_open();
        tt_tensor *x = tt_rand(tt_shape(300, 4), TUTTI_F32, NULL);
        tt_backward(tt_mean(tt_square(tt_gelu(tt_linear(x, w, NULL)))), NULL);
        bool stepped = tt_adamw_step(w, tt_grad(w), m, v, 1, NULL);
        status = tt_scope_close(&step);
        CHECK(stepped == (status == TUTTI_OK));
        bool intact = tt_equal(w, tt_ones(tt_shape(4, 4), TUTTI_F32, NULL)) && tt_item(tt_sum(m)) == 0;
        if (tt_error_pending() == TUTTI_OK)
            CHECK(intact == !stepped);
    }
    tutti_status last = tt_scope_close(&outer);
    tt_memory_trim();
    nothing_left();
    return status != TUTTI_OK ? status : last;
}

TEST(a_step_whose_nth_allocation_fails_leaves_every_parameter_intact) {
    test_fail_each("malloc,calloc,realloc,aligned_alloc", a_step, NULL);
}

TEST(a_message_describes_each_of_three_tensors) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_zeros(tt_shape(2, 3), TUTTI_F32, NULL), *index = tt_zeros(tt_shape(5), TUTTI_I64, NULL);
    CHECK(tt_index_add(x, 0, index, tt_zeros(tt_shape(7, 3), TUTTI_F32, NULL)) == NULL);
    CHECK(tt_scope_close(&scope) != TUTTI_OK);
    CHECK_MESSAGE("f32 [2, 3]");
    CHECK_MESSAGE("i64 [5]");
    CHECK_MESSAGE("f32 [7, 3]");
}
