/* SPDX-License-Identifier: Apache-2.0
 *
 * The same bits at every instruction set and for every number of threads, for all operators whose arithmetic is our
 * own: every row of the table by its sample, and the larger ones once more around every width of register.
 */
#include <cblas.h>
#include <math.h>

#include <tutti/autograd.h>
#include <tutti/functional.h>
#include <tutti/ops.h>

#include "../harness.h"
#include "../instructions.h"
#include "base/instructions.h"
#include "tensor/gemm.h"
#include "tensor/operator.h"

enum {
    INPUTS = 4,
    RESULTS = 8
};

/* Sizes around every width of register and block. */
static const int64_t sizes[] = { 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 100, 257, 1000 };

typedef struct trial {
    const char *name;
    int results;
    void (*run)(tt_tensor *const *in, tt_tensor **out);
} trial;

/* in: x, y, z of shape (rows, n), and a positive row of n */
static void run_softmax(tt_tensor *const *in, tt_tensor **out) {
    tt_tensor *x = tt_require_grad(tt_detach(in[0]), true);
    out[0] = tt_softmax(x, -1);
    tt_backward(out[0], in[1]);
    out[1] = tt_grad(x);
    tt_tensor *z = tt_require_grad(tt_detach(in[2]), true);
    out[2] = tt_log_softmax(z, -1);
    tt_backward(out[2], in[1]);
    out[3] = tt_grad(z);
    out[4] = tt_softmax(tt_mul_scalar(in[2], 40), -1);  /* down to denormal f32, */
    out[5] = tt_softmax(tt_mul_scalar(in[1], 300), -1); /* f64, and 0 */
    out[6] = tt_softmax(tt_log(tt_relu(in[2])), -1);    /* with -infinity */
    out[7] = tt_softmax(tt_log(in[1]), -1);             /* with NaN */
}
static void run_layer_norm(tt_tensor *const *in, tt_tensor **out) {
    tt_tensor *x = tt_require_grad(tt_detach(in[0]), true), *weight = tt_require_grad(tt_detach(in[3]), true),
              *bias = tt_require_grad(tt_clone(in[3]), true);
    out[0] = tt_layer_norm(x, weight, bias, 1e-5);
    tt_backward(out[0], in[1]);
    out[1] = tt_grad(x);
    out[2] = tt_grad(weight);
    out[3] = tt_grad(bias);
    out[4] = tt_rms_norm(in[2], in[3], 1e-5);
    out[5] = tt_layer_norm(in[2], NULL, NULL, 1e-5);
}
static void run_cross_entropy(tt_tensor *const *in, tt_tensor **out) {
    tt_tensor *x = tt_require_grad(tt_detach(in[0]), true);
    tt_tensor *targets = tt_zeros(tt_shape(tt_size(x, 0)), TUTTI_I64, NULL);
    out[0] = tt_cross_entropy(x, targets, -100);
    tt_backward(out[0], NULL);
    out[1] = tt_grad(x);
}
static void run_steps(tt_tensor *const *in, tt_tensor **out) {
    for (int i = 0; i < 5; i++)
        out[i] = tt_clone(in[i % 3]);
    out[3] = tt_square(out[3]);
    tt_adamw_step(out[0], in[1], out[2], out[3], 3, NULL);
    tt_sgd options = TT_SGD_INIT;
    options.momentum = 0.9;
    options.weight_decay = 0.1;
    tt_sgd_step(out[1], in[2], out[4], &options);
}
static void run_attention(tt_tensor *const *in, tt_tensor **out) {
    tt_tensor *q = tt_require_grad(tt_unsqueeze(tt_detach(in[0]), 0), true),
              *k = tt_require_grad(tt_unsqueeze(tt_detach(in[1]), 0), true),
              *v = tt_require_grad(tt_unsqueeze(tt_detach(in[2]), 0), true);
    out[0] = tt_attention(q, k, v, true, 0);
    tt_backward(out[0], tt_unsqueeze(in[1], 0));
    out[1] = tt_grad(q);
    out[2] = tt_grad(k);
    out[3] = tt_grad(v);
    out[4] = tt_attention(k, q, v, false, -0.3);
}
static void run_functions(tt_tensor *const *in, tt_tensor **out) {
    out[0] = tt_add(tt_exp(in[0]), tt_mul(tt_sin(in[1]), tt_cos(in[2])));
    out[1] = tt_add(tt_log(tt_square(in[0])), tt_pow(tt_abs(in[1]), in[2]));
    out[2] = tt_add(tt_tanh(in[0]), tt_add(tt_erf(in[1]), tt_sigmoid(in[2])));
    out[3] = tt_add(tt_gelu(in[0]), tt_add(tt_gelu_tanh(in[1]), tt_silu(in[2])));
    out[4] = tt_where(tt_gt(in[0], in[1]), tt_maximum(in[1], in[2]), tt_div(in[0], in[2]));
    out[5] = tt_addcdiv(in[0], in[1], in[3], 0.3);
    tt_tensor *x = tt_require_grad(tt_detach(in[0]), true);
    tt_backward(tt_add(tt_gelu(x), tt_add(tt_silu(x), tt_gelu_tanh(x))), in[1]);
    out[6] = tt_grad(x);
    out[7] = tt_round(tt_mul_scalar(in[2], 3));
}
static void run_reductions(tt_tensor *const *in, tt_tensor **out) {
    out[0] = tt_sum(in[0]);
    out[1] = tt_sum_dims(in[0], tt_shape(0), false);
    out[2] = tt_mean_dims(in[1], tt_shape(1), false);
    out[3] = tt_prod(tt_add_scalar(tt_mul_scalar(in[2], 0.01), 1), tt_shape(0, 1), false);
    out[4] = tt_amax(in[0], tt_shape(1), false);
    out[5] = tt_amin(in[0], tt_shape(0), false);
}
static void run_random(tt_tensor *const *in, tt_tensor **out) {
    tt_seed(11, 0);
    out[0] = tt_randn(tt_shape(tt_numel(in[0])), TUTTI_F64, NULL);
    tt_tensor *position = tt_arange(0, tt_size(in[0], 0), 1, TUTTI_I64, NULL);
    out[1] = tt_rope(tt_cat(tt_tensors(in[0], in[1]), 1), position, 10000);
}
static void run_int_matmul(tt_tensor *const *in, tt_tensor **out) {
    tt_tensor *a = tt_to(tt_mul_scalar(in[0], 40), TUTTI_I8), *b = tt_to(tt_mul_scalar(in[1], 40), TUTTI_I8);
    out[0] = tt_int_matmul(a, tt_transpose(b, 0, 1));
    out[1] = tt_int_matmul(tt_transpose(a, 0, 1), b);
}

static const trial trials[] = {
    { "softmax", 8, run_softmax },     { "norm", 6, run_layer_norm },       { "cross_entropy", 2, run_cross_entropy },
    { "steps", 5, run_steps },         { "attention", 5, run_attention },   { "int_matmul", 2, run_int_matmul },
    { "functions", 8, run_functions }, { "reductions", 6, run_reductions }, { "random", 2, run_random }
};

static void make_inputs(tt_tensor **in, int64_t rows, int64_t n, tutti_dtype dtype) {
    for (int i = 0; i < 3; i++)
        in[i] = tt_to(tt_mul_scalar(tt_randn(tt_shape(rows, n), TUTTI_F64, NULL), 3), dtype);
    in[3] = tt_to(tt_add_scalar(tt_square(tt_randn(tt_shape(n), TUTTI_F64, NULL)), 0.1), dtype);
}

static void compare(const trial *each, tt_tensor *const *in, tt_tensor *const *expected, const char *where, int64_t n) {
    tt_scope scope = tt_scope_open();
    tt_tensor *found[RESULTS];
    each->run(in, found);
    for (int i = 0; i < each->results; i++) {
        size_t bytes = (size_t)tt_numel(expected[i]) * tutti_dtype_size(tt_dtype(expected[i]));
        if (found[i] == NULL || memcmp(tt_data(found[i]), tt_data(expected[i]), bytes) != 0)
            FAIL("%s, result %d, rows of %lld: other bits with %s", each->name, i, (long long)n, where);
    }
    CHECK_OK(tt_scope_close(&scope));
}

static void check_trial(const trial *each, int64_t rows, int64_t n, tutti_dtype dtype) {
    tt_scope scope = tt_scope_open();
    tt_tensor *in[INPUTS], *expected[RESULTS];
    make_inputs(in, rows, n, dtype);
    openblas_set_num_threads(1);
    CHECK(test_instructions(TU_REFERENCE));
    each->run(in, expected);
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++) {
        if (!test_instructions(level))
            continue;
        openblas_set_num_threads(1);
        compare(each, in, expected, tu_instructions_name(level), n);
        openblas_set_num_threads(3);
        compare(each, in, expected, "three threads", n);
    }
    CHECK_OK(tt_scope_close(&scope));
}

TEST(every_level_and_number_of_threads_gives_the_same_bits) {
    for (size_t t = 0; t < sizeof trials / sizeof trials[0]; t++) {
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            check_trial(&trials[t], 5, sizes[i], TUTTI_F32);
            check_trial(&trials[t], 3, sizes[i], TUTTI_F64);
        }
        check_trial(&trials[t], 5, 33, TUTTI_BF16);
        check_trial(&trials[t], 131, 769, TUTTI_F32); /* enough for several threads */
    }
}

TEST(products_of_i8_are_exact_at_every_level) {
    int8_t a[7 * 65], b[65 * 37];
    int32_t c[7 * 37];
    for (int i = 0; i < 7 * 65; i++)
        a[i] = i % 3 == 0 ? -128 : 127;
    for (int i = 0; i < 65 * 37; i++)
        b[i] = i % 5 == 0 ? 127 : -128;
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++) {
        if (!test_instructions(level))
            continue;
        CHECK_OK(tu_int8_gemm(7, 37, 65, (tu_matrix){ a, 65, 1 }, (tu_matrix){ b, 37, 1 }, c));
        for (int i = 0; i < 7; i++)
            for (int j = 0; j < 37; j++) {
                int32_t sum = 0;
                for (int l = 0; l < 65; l++)
                    sum += a[i * 65 + l] * b[l * 37 + j];
                CHECK_EQ(c[i * 37 + j], sum);
            }
    }
}

/* ---- products of floats ---- */

typedef struct shape {
    int64_t rows, columns, depth;
} shape;

/* What an element of a product is: a chain of fma per block of the depth, and the blocks' sum. */
static double chain(bool narrow, tu_matrix left, tu_matrix right, int64_t i, int64_t j, int64_t depth, bool add,
                    double before) {
    double sum = before;
    for (int64_t begin = 0; begin < depth; begin += TU_PRODUCT_DEPTH) {
        double part = 0;
        for (int64_t k = begin; k < depth && k < begin + TU_PRODUCT_DEPTH; k++) {
            int64_t at = i * left.row + k * left.column, to = k * right.row + j * right.column;
            part = narrow ? fmaf(((const float *)left.data)[at], ((const float *)right.data)[to], (float)part)
                          : fma(((const double *)left.data)[at], ((const double *)right.data)[to], part);
        }
        sum = begin == 0 && !add ? part : narrow ? (float)sum + (float)part : sum + part;
    }
    return sum;
}

static double read_number(bool narrow, const void *from, int64_t at) {
    return narrow ? (double)((const float *)from)[at] : ((const double *)from)[at];
}

/* What elements begin with: nothing, what is there, or one row for all of them. */
typedef enum start {
    NOTHING,
    ITSELF,
    ONE_ROW,
    STARTS
} start;

static void check_product(bool narrow, shape size, tu_matrix left, tu_matrix right, start from) {
    int64_t stride = size.columns == 1 ? 1 : size.columns + 3, count = size.rows * stride;
    size_t bytes = (size_t)count * (narrow ? sizeof(float) : sizeof(double));
    void *out = malloc(bytes), *before = malloc(bytes);
    CHECK(out != NULL && before != NULL);
    for (int64_t i = 0; i < count; i++) {
        if (narrow)
            ((float *)before)[i] = (float)(i % 7) / 3;
        else
            ((double *)before)[i] = (double)(i % 7) / 3;
    }
    memcpy(out, before, bytes);
    CHECK_OK(tu_product(narrow ? TUTTI_F32 : TUTTI_F64, size.rows, size.columns, size.depth, left, right,
                        from == NOTHING  ? NULL
                        : from == ITSELF ? out
                                         : before,
                        from == ITSELF ? stride : 0, out, stride, NULL));
    for (int64_t i = 0; i < size.rows; i++)
        for (int64_t j = 0; j < stride; j++) {
            double old = read_number(narrow, before, i * stride + j),
                   begin = from == ONE_ROW ? read_number(narrow, before, j) : old;
            double expected =
                j < size.columns ? chain(narrow, left, right, i, j, size.depth, from != NOTHING, begin) : old;
            double found = read_number(narrow, out, i * stride + j);
            if (memcmp(&found, &expected, sizeof found) != 0)
                FAIL("(%lld, %lld) of (%lld, %lld, %lld) is %a, not %a, at %s with %d threads", (long long)i,
                     (long long)j, (long long)size.rows, (long long)size.columns, (long long)size.depth, found,
                     expected, tu_instructions_name(tu_instructions_get()), openblas_get_num_threads());
        }
    free(out);
    free(before);
}

/* Each matrix as it lies, transposed, and with gaps in both directions. */
static void check_layouts(bool narrow, shape size, const void *left, const void *right) {
    tu_matrix lefts[] = { { left, size.depth, 1 }, { left, 1, size.rows }, { left, 2 * size.depth + 1, 2 } };
    tu_matrix rights[] = { { right, size.columns, 1 }, { right, 1, size.depth }, { right, 2 * size.columns + 1, 2 } };
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++)
            check_product(narrow, size, lefts[i], rights[j], (start)((i + 2 * j) % STARTS));
}

TEST(an_element_of_a_product_is_the_same_chain_of_fma_for_every_level_layout_and_number_of_threads) {
    static const shape shapes[] = { { 1, 1, 1 },    { 3, 5, 2 },     { 1, 70, 33 },   { 70, 1, 33 }, { 13, 33, 65 },
                                    { 37, 43, 65 }, { 25, 31, 400 }, { 12, 64, 784 }, { 7, 200, 3 }, { 1030, 34, 9 } };
    enum {
        MOST = 3 * 784 * 70
    };
    float *singles = malloc(2 * MOST * sizeof *singles);
    double *doubles = malloc(2 * MOST * sizeof *doubles);
    CHECK(singles != NULL && doubles != NULL);
    for (int i = 0; i < 2 * MOST; i++) {
        doubles[i] = (double)((i * 7919LL + 13) % 10007) / 10007 - 0.5;
        singles[i] = (float)doubles[i];
    }
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++) {
        if (!test_instructions(level) || !tu_product_is_ours(TUTTI_F32))
            continue;
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            openblas_set_num_threads(1 + 2 * (int)(i % 2));
            check_layouts(true, shapes[i], singles, singles + MOST);
            check_layouts(false, shapes[i], doubles, doubles + MOST);
        }
    }
    free(singles);
    free(doubles);
}

TEST(rows_of_a_product_are_the_product_of_the_rows) {
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++) {
        if (!test_instructions(level) || !tu_product_is_ours(TUTTI_F32))
            continue;
        tt_scope scope = tt_scope_open();
        tt_tensor *x = tt_randn(tt_shape(129, 500), TUTTI_F32, NULL),
                  *y = tt_randn(tt_shape(500, 200), TUTTI_F32, NULL), *whole = tt_matmul(x, y);
        CHECK(tt_equal(tt_slice(whole, 0, 5, 17, 1), tt_matmul(tt_slice(x, 0, 5, 17, 1), y)));
        CHECK(tt_equal(tt_slice(whole, 1, 5, 77, 1), tt_matmul(x, tt_slice(y, 1, 5, 77, 1))));
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* With many rows the right matrix is packed as a whole, with few it is not: nobody can tell by the bits. */
TEST(a_product_of_many_rows_has_the_bits_of_products_of_few) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64 };
    int before = openblas_get_num_threads();
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++) {
        if (!test_instructions(level) || !tu_product_is_ours(TUTTI_F32))
            continue;
        for (int which = 0; which < 8; which++) {
            tt_scope scope = tt_scope_open();
            openblas_set_num_threads(which % 2 == 0 ? 1 : 3);
            tutti_dtype dtype = dtypes[which / 2 % 2];
            tt_tensor *x = tt_to(tt_randn(tt_shape(901, 400), TUTTI_F32, NULL), dtype),
                      *y = tt_to(tt_randn(tt_shape(150, 400), TUTTI_F32, NULL), dtype);
            if (which >= 4) /* columns that lie side by side */
                x = tt_transpose(tt_contiguous(tt_transpose(x, 0, 1)), 0, 1);
            y = which >= 4 ? tt_contiguous(tt_transpose(y, 0, 1)) : tt_transpose(y, 0, 1);
            tt_tensor *whole = tt_matmul(x, y);
            for (int64_t row = 0; row < 901; row += 300) {
                int64_t end = row + 300 < 901 ? row + 300 : 901;
                CHECK(tt_equal(tt_slice(whole, 0, row, end, 1), tt_matmul(tt_slice(x, 0, row, end, 1), y)));
            }
            CHECK_OK(tt_scope_close(&scope));
        }
    }
    openblas_set_num_threads(before);
}

/* ---- the whole table ---- */

#define MADE 8

typedef struct maker {
    tu_sampler sampler;
    tutti_dtype dtype;
    bool strided;
    int count;
    tt_tensor *made[MADE];
} maker;

static double value_of(tu_sample_kind kind, uint64_t element, int64_t limit) {
    uint64_t x = (element + 12345) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    double share = (double)((x ^ x >> 32) >> 11) * 0x1p-53;
    return kind == TU_SAMPLE_NORMAL     ? 6 * share - 3
           : kind == TU_SAMPLE_POSITIVE ? 0.5 + 1.5 * share
           : kind == TU_SAMPLE_INDEX    ? (double)(int64_t)(share * (double)limit)
                                        : share < 0.5;
}

/* Every other element of a tensor whose last two dimensions lie the other way round. */
static tt_tensor *spread(tt_tensor *dense) {
    int last = tt_dim_count(dense) - 1;
    tt_tensor *turned = last >= 1 ? tt_contiguous(tt_transpose(dense, last, last - 1)) : dense;
    tt_tensor *twice = tt_contiguous(tt_stack(tt_tensors(turned, turned), -1));
    tt_tensor *apart = tt_select(twice, -1, 0);
    return last >= 1 ? tt_transpose(apart, last, last - 1) : apart;
}

static tt_tensor *make(tu_sampler *sampler, tu_sample_kind kind, tt_dims shape, int64_t limit) {
    maker *self = (maker *)sampler;
    CHECK(self->count < MADE);
    size_t count = 1;
    for (int i = 0; i < shape.count; i++)
        count *= (size_t)shape.at[i];
    double *values = malloc((count + 1) * sizeof *values);
    CHECK(values != NULL);
    for (size_t i = 0; i < count; i++)
        values[i] = value_of(kind, i + (uint64_t)self->count * 1000003, limit);
    bool recording = tt_grad_mode(false);
    tutti_dtype dtype = kind == TU_SAMPLE_INDEX ? TUTTI_I64 : kind == TU_SAMPLE_BOOL ? TUTTI_BOOL : self->dtype;
    tt_tensor *x = tt_to(tt_from(values, shape, TUTTI_F64, NULL), dtype);
    free(values);
    x = tt_detach(self->strided && count > 0 ? spread(x) : x);
    tt_grad_mode(recording);
    if (kind == TU_SAMPLE_NORMAL || kind == TU_SAMPLE_POSITIVE)
        tt_require_grad(x, true);
    return self->made[self->count++] = x;
}

/* The result of a row's sample and the gradients of its inputs, as bytes; how many results there are. A sample that
 * does not take the dtype, or frees its result, has none. */
static int run_sample(const tu_operator *entry, maker like, tt_tensor **results) {
    maker each = like;
    int count = 0;
    tt_tensor *result = entry->sample(&each.sampler);
    if (tt_error_pending() != TUTTI_OK || (tt_numel(result) > 0 && tt_data(result) == NULL)) {
        tt_error_clear();
        return 0;
    }
    results[count++] = tt_contiguous(tt_detach(result));
    bool differentiable = tt_requires_grad(result) && (entry->gradient != NULL || entry->flags & TU_COMPOSITE);
    if (differentiable && tt_backward(result, tt_ones_like(result)))
        for (int i = 0; i < each.count; i++)
            if (tt_requires_grad(each.made[i]) && tt_grad(each.made[i]) != NULL)
                results[count++] = tt_contiguous(tt_grad(each.made[i]));
    if (tt_error_show() != TUTTI_OK)
        FAIL("%s: %s", entry->name, tutti_error_message());
    return count;
}

static void compare_sample(const tu_operator *entry, maker like, int count, tt_tensor *const *expected) {
    tt_scope scope = tt_scope_open();
    tt_tensor *found[1 + MADE];
    CHECK_EQ(run_sample(entry, like, found), count);
    for (int i = 0; i < count; i++) {
        size_t bytes = (size_t)tt_numel(expected[i]) * tutti_dtype_size(tt_dtype(expected[i]));
        if (bytes > 0 && memcmp(tt_data(found[i]), tt_data(expected[i]), bytes) != 0)
            FAIL("%s of %s, size %lld%s, result %d: other bits with %s and %d threads", entry->name,
                 tutti_dtype_name(like.dtype), (long long)like.sampler.size, like.strided ? ", strided" : "", i,
                 tu_instructions_name(tu_instructions_get()), openblas_get_num_threads());
    }
    CHECK_OK(tt_scope_close(&scope));
}

static bool check_sample(const tu_operator *entry, maker like, tu_instructions from) {
    tt_scope scope = tt_scope_open();
    tt_tensor *expected[1 + MADE];
    CHECK(test_instructions(from));
    openblas_set_num_threads(1);
    int count = run_sample(entry, like, expected);
    for (tu_instructions level = from; count > 0 && level < TU_INSTRUCTIONS_END; level++)
        for (int threads = 1; threads <= 3 && test_instructions(level); threads++) {
            openblas_set_num_threads(threads);
            compare_sample(entry, like, count, expected);
        }
    CHECK_OK(tt_scope_close(&scope));
    return count > 0;
}

/* The first level with vectors that this machine has, or TU_INSTRUCTIONS_END. */
static tu_instructions first_with_vectors(void) {
    tu_instructions level = TU_REFERENCE + 1;
    while (level < TU_INSTRUCTIONS_END && !tu_instructions_present(level))
        level++;
    return level;
}

/* The first level from which a row has the same bits. Rows say in their summary where they round as a library does, or
 * as a row that does: products of f32 and f64 at the reference, others everywhere. */
static tu_instructions same_from(const tu_operator *entry, tutti_dtype dtype) {
    if (strstr(entry->summary, "rounds as ") == NULL)
        return TU_REFERENCE;
    return dtype == TUTTI_F32 || dtype == TUTTI_F64 ? first_with_vectors() : TU_INSTRUCTIONS_END;
}

/* All rows but those without contents. */
static int check_table(tutti_group *group, int64_t size, tutti_dtype dtype, bool strided) {
    int checked = 0;
    for (int i = 0; i < tu_table_count(); i++) {
        const tu_operator *entry = tu_table_at(i);
        tu_instructions from = same_from(entry, dtype);
        if (from < TU_INSTRUCTIONS_END && !(entry->flags & TU_NO_KERNEL))
            checked += check_sample(
                entry, (maker){ .sampler = { size, group, make }, .dtype = dtype, .strided = strided }, from);
    }
    return checked;
}

TEST(every_row_of_the_table_gives_the_same_bits_at_every_level_and_number_of_threads) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64, TUTTI_BF16, TUTTI_F16, TUTTI_C64 };
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        CHECK(check_table(tutti_world_group(world), 17, dtypes[i], false) > (dtypes[i] == TUTTI_C64 ? 60 : 120));
        CHECK(check_table(tutti_world_group(world), 5, dtypes[i], true) > (dtypes[i] == TUTTI_C64 ? 60 : 120));
    }
    if (!test_sanitized()) {
        CHECK(check_table(tutti_world_group(world), 211, TUTTI_F32, false) > 120);
        CHECK(check_table(tutti_world_group(world), 211, TUTTI_F32, true) > 120);
    }
    CHECK(tt_wait_all(world));
    CHECK_OK(tutti_world_close(world));
}
