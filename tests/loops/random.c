/* SPDX-License-Identifier: Apache-2.0
 *
 * Random functions of pointwise operators, casts, copies, views, reductions and writes in place, over dtypes, shapes
 * with 0 and 1, and strides: a program of their graph leaves the very bits that calling them leaves, in its results and
 * in its inputs.
 *
 *     test_loops_random --seed 7 --count 1 --folder /tmp/x     once more what failed, with the graph and the code
 */
#include "programs.h"

#define KEPT 24
#define INPUTS 4

typedef struct dice {
    uint64_t state;
} dice;

static uint64_t draw(dice *from, uint64_t below) {
    from->state = from->state * 6364136223846793005u + 1442695040888963407u;
    return (from->state >> 33) % below;
}

/* ---- functions ---- */

typedef struct recipe {
    uint64_t seed;
    int lines;
} recipe;

static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F32, TUTTI_F32, TUTTI_F64, TUTTI_BF16,
                                      TUTTI_F16, TUTTI_I64, TUTTI_I32, TUTTI_U8,  TUTTI_BOOL };

static tt_tensor *unary(dice *from, tt_tensor *x) {
    switch (draw(from, 14)) {
    case 0:
        return tt_tanh(x);
    case 1:
        return tt_relu(x);
    case 2:
        return tt_sigmoid(x);
    case 3:
        return tt_add_scalar(x, (double)draw(from, 5) - 2);
    case 4:
        return tt_mul_scalar(x, 0.25 * (double)draw(from, 9) - 1);
    case 5:
        return tt_exp(tt_clamp(x, -3, 3));
    case 6:
        return tt_gelu(x);
    case 7:
        return tt_neg(x);
    case 8:
        return tt_abs(x);
    case 9:
        return tt_sqrt(tt_abs(x));
    case 10:
        return tt_sin(x);
    case 11:
        return tt_clone(x);
    case 12:
        return tt_logical_not(x);
    default:
        return tt_square(x);
    }
}

static tt_tensor *binary(dice *from, tt_tensor *x, tt_tensor *y) {
    switch (draw(from, 9)) {
    case 0:
        return tt_add(x, y);
    case 1:
        return tt_sub(x, y);
    case 2:
        return tt_mul(x, y);
    case 3:
        return tt_maximum(x, y);
    case 4:
        return tt_div(x, y);
    case 5:
        return tt_lt(x, y);
    case 6:
        return tt_where(tt_gt(x, tt_number(0)), x, y);
    case 7:
        return tt_add_scaled(x, y, 0.5 * (double)draw(from, 4));
    default:
        return tt_minimum(x, tt_mul(y, tt_number(0.5)));
    }
}

static tt_tensor *reduced(dice *from, tt_tensor *x) {
    int ndim = tt_dim_count(x);
    bool keep = draw(from, 4) != 0;
    tt_dims dims = ndim > 1 && draw(from, 3) == 0 ? tt_shape(-2, -1) : tt_shape(draw(from, 6) == 0 ? 0 : -1);
    if (draw(from, 5) == 0)
        dims = tt_no_dims();
    if (ndim == 0 || tt_numel(x) == 0 || tt_dtype(x) == TUTTI_BOOL)
        return x;
    tt_tensor *y = tu_is_float(tt_dtype(x)) ? x : tt_to(x, TUTTI_F32);
    switch (draw(from, 4)) {
    case 0:
        return tt_sum_dims(y, dims, keep);
    case 1:
        return tt_mean_dims(y, dims, keep);
    case 2:
        return tt_amax(y, dims, keep);
    default:
        return tt_sub(y, tt_amax(y, dims, true));
    }
}

static tt_tensor *viewed(dice *from, tt_tensor *x) {
    int ndim = tt_dim_count(x), dim = ndim > 0 ? (int)draw(from, (uint64_t)ndim) : 0;
    if (ndim == 0)
        return tt_unsqueeze(x, 0);
    switch (draw(from, 5)) {
    case 0:
        return ndim > 1 ? tt_transpose(x, dim, (dim + 1) % ndim) : x;
    case 1:
        return tt_size(x, dim) > 1 ? tt_narrow(x, dim, 1, tt_size(x, dim) - 1) : x;
    case 2:
        return tt_size(x, dim) > 2 ? tt_slice(x, dim, 0, tt_size(x, dim), 2) : x;
    case 3:
        return ndim < 4 ? tt_unsqueeze(x, dim) : x;
    default:
        return tt_alias(x);
    }
}

/* Writes into x: from something that broadcasts to it. */
static void written(dice *from, tt_tensor *x, tt_tensor *y) {
    bool floats = tu_is_float(tt_dtype(x));
    switch (draw(from, 6)) {
    case 0:
        tt_mul_scalar_(x, floats ? 0.5 : 2);
        break;
    case 1:
        tt_add_scalar_(x, 1);
        break;
    case 2:
        tt_relu_(x);
        break;
    case 3:
        tt_copy_(x, tt_select(tt_unsqueeze(tt_contiguous(y), 0), 0, 0));
        break;
    default:
        if (floats)
            tt_add_(x, tt_sigmoid(y));
        else
            tt_copy_(x, y);
    }
}

static bool same_sizes(tt_tensor *x, tt_tensor *y) {
    bool same = tt_dim_count(x) == tt_dim_count(y);
    for (int i = 0; same && i < tt_dim_count(x); i++)
        same = tt_size(x, i) == tt_size(y, i);
    return same;
}

/* Sizes that broadcast, from the end, to something that is not huge. */
static bool broadcasts(tt_tensor *x, tt_tensor *y) {
    int64_t count = 1;
    for (int i = 1; i <= tt_dim_count(x) || i <= tt_dim_count(y); i++) {
        int64_t left = i <= tt_dim_count(x) ? tt_size(x, -i) : 1, right = i <= tt_dim_count(y) ? tt_size(y, -i) : 1;
        if (left != right && left != 1 && right != 1)
            return false;
        count *= left != 1 ? left : right;
    }
    return count <= 1 << 20;
}

static bool is_expanded(tt_tensor *x) {
    for (int i = 0; i < tt_dim_count(x); i++)
        if (tt_stride(x, i) == 0 && tt_size(x, i) > 1)
            return true;
    return false;
}

static int function(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const recipe *made = user;
    dice from = { made->seed };
    tt_tensor *kept[KEPT];
    int count = 0;
    for (size_t i = 0; i < inputs.count; i++)
        kept[count++] = inputs.at[i];
    for (int line = 0; line < made->lines; line++) {
        tt_tensor *x = kept[draw(&from, (uint64_t)count)], *y = kept[draw(&from, (uint64_t)count)], *z = NULL;
        uint64_t what = draw(&from, 16);
        if (what < 5)
            z = unary(&from, x);
        else if (what < 9 && broadcasts(x, y))
            z = binary(&from, x, y);
        else if (what < 11)
            z = reduced(&from, x);
        else if (what < 12)
            z = tt_to(x, dtypes[draw(&from, sizeof dtypes / sizeof *dtypes)]);
        else if (what < 14)
            z = viewed(&from, x);
        else if (same_sizes(x, y) && x != y && !is_expanded(x))
            written(&from, x, tt_clone(y));
        if (z == NULL || tt_dim_count(z) > 5)
            continue;
        kept[count < KEPT ? count++ : (int)draw(&from, KEPT)] = z;
    }
    int results = 0;
    for (int i = count - 1; i >= 0 && results < 5; i--)
        if (draw(&from, 3) != 0)
            outputs[results++] = kept[i];
    outputs[results++] = kept[count - 1];
    return results;
}

/* ---- inputs ---- */

static tt_tensor *input(dice *from, tt_dims space) {
    tt_dims shape = space;
    for (int i = 0; i < shape.count; i++)
        if (draw(from, 5) == 0)
            shape.at[i] = 1;
    if (draw(from, 6) == 0 && shape.count > 0) { /* fewer dimensions */
        memmove(shape.at, shape.at + 1, (size_t)(shape.count - 1) * sizeof shape.at[0]);
        shape.count--;
    }
    tutti_dtype dtype = dtypes[draw(from, sizeof dtypes / sizeof *dtypes)];
    tt_tensor *x = tt_to(tt_mul_scalar(tt_randn(shape, TUTTI_F32, NULL), 3), dtype);
    if (tt_dim_count(x) > 1 && draw(from, 3) == 0) { /* another layout */
        x = tt_transpose(tt_contiguous(tt_transpose(x, 0, -1)), 0, -1);
    } else if (draw(from, 4) == 0) { /* with gaps and an offset */
        tt_tensor *pair = tt_contiguous(tt_stack(tt_tensors(x, x), tt_dim_count(x)));
        x = tt_select(pair, -1, 1);
    }
    return x;
}

static tt_dims space(dice *from, bool large) {
    static const int64_t sizes[] = { 1, 2, 3, 5, 8, 17, 33, 64 };
    tt_dims dims = { .count = (int)draw(from, 4) };
    for (int i = 0; i < dims.count; i++)
        dims.at[i] = draw(from, 25) == 0 ? 0 : sizes[draw(from, sizeof sizes / sizeof *sizes)];
    bool longer = large && draw(from, 3) == 0; /* rows that do not stay in the cache */
    for (int i = 0; longer && i + 1 < dims.count; i++)
        dims.at[i] = 1 + (int64_t)draw(from, 3);
    if (large && dims.count > 0)
        dims.at[dims.count - 1] *= longer ? 2501 : 61;
    return dims;
}

/* A copy with the same strides. */
static tt_tensor *copy_of(tt_tensor *x) {
    tt_dims sizes = tt_sizes(x), strides = { .count = tt_dim_count(x) };
    for (int i = 0; i < strides.count; i++)
        strides.at[i] = tt_stride(x, i);
    return tt_copy_(tt_empty_strided(sizes, strides, tt_dtype(x), NULL), x);
}

/* ---- one function, called and as a program ---- */

static void compare(uint64_t seed, const tu_program_options *options, bool show, tu_program_counts *seen) {
    tt_scope scope = tt_scope_open();
    dice from = { seed * 77 + 5 };
    recipe made = { seed, 4 + (int)draw(&from, 30) };
    tt_tensor *inputs[INPUTS], *own[INPUTS], *results[2][16], *expected[16];
    tt_dims shape = space(&from, draw(&from, 6) == 0);
    tt_seed(seed, 0);
    for (int i = 0; i < INPUTS; i++) {
        inputs[i] = copy_of(input(&from, shape));
        own[i] = copy_of(inputs[i]);
    }
    tt_graph *graph = NULL;
    tu_program *program = NULL;
    tt_tensor_list list = tt_tensors_of(INPUTS, inputs), own_list = tt_tensors_of(INPUTS, own);
    if (!tt_capture(function, &made, list, &graph)) {
        tt_error_clear(); /* a dtype that an operator is not defined for: the function is none */
        CHECK_OK(tt_scope_close(&scope));
        return;
    }
    if (show)
        tt_graph_print(graph, stdout);
    int count = function(own_list, expected, &made);
    CHECK_OK(tt_error_show());
    tu_program_options own_options = *options;
    own_options.folder = test_option("folder");
    CHECK_OK(tu_program_make(graph, &own_options, &program));
    tu_program_counts counts = tu_program_count(program);
    seen->calls += counts.calls;
    seen->loops += counts.loops;
    seen->fused += counts.fused;
    seen->compiled += counts.compiled;
    if (show)
        tu_program_print(stdout, program);
    for (int round = 0; round < 2; round++) { /* the second finds memory that was used */
        tt_tensor *again[INPUTS];
        for (int i = 0; i < INPUTS; i++)
            again[i] = copy_of(inputs[i]);
        run_program(program, graph, tt_tensors_of(INPUTS, again), results[round]);
        for (int i = 0; i < count * (round + 1); i++) /* also what the run before returned, which is its own */
            if (!same_bits(results[i / count][i % count], expected[i % count]))
                FAIL("result %d of seed %llu differs", i % count, (unsigned long long)seed);
        for (int i = 0; i < INPUTS; i++)
            if (!same_bits(again[i], own[i]))
                FAIL("input %d of seed %llu is left different", i, (unsigned long long)seed);
        for (int i = 0; i < INPUTS; i++)
            if (tt_version(again[i]) - tt_version(inputs[i]) != tt_version(own[i]) - tt_version(inputs[i]))
                FAIL("the version of input %d of seed %llu is %u, not %u", i, (unsigned long long)seed,
                     tt_version(again[i]), tt_version(own[i]));
    }
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static void compare_many(const tu_program_options *options, uint64_t first, int count) {
    const char *seed = test_option("seed"), *given = test_option("count");
    if (seed != NULL)
        first = strtoull(seed, NULL, 10);
    if (given != NULL)
        count = atoi(given);
    tu_program_counts seen = { .calls = 0 };
    bool device = use_device();
    if (device && given == NULL && count > 100)
        count = 100;
    for (int i = 0; i < count; i++)
        compare(first + (uint64_t)i, options, seed != NULL && count == 1, &seen);
    if (seed != NULL)
        return;
    printf("%d functions: %d operators called, %d in %d loops, %d of them compiled\n", count, seen.calls, seen.fused,
           seen.loops, seen.compiled);
    if (device && options->no_compiler) /* there is no other way than calls */
        CHECK(seen.loops == 0 && seen.compiled == 0);
    else
        CHECK(seen.loops > count / 4 && seen.fused >= seen.loops);
    if (device && !options->no_compiler)
        CHECK_EQ(seen.compiled, seen.loops);
}

TEST(random_functions_in_blocks_leave_the_bits_of_calls) {
    compare_many(&(tu_program_options){ .no_compiler = true }, 1, test_sanitized() ? 60 : 600);
}

TEST(random_functions_one_operator_at_a_time_leave_the_bits_of_calls) {
    compare_many(&(tu_program_options){ .no_compiler = true, .mode = TU_PROGRAM_SPLIT }, 1,
                 test_sanitized() ? 40 : 400);
}

TEST_LIMIT(random_functions_compiled_leave_the_bits_of_calls, 300) {
    const char *folder = own_folder();
    compare_many(&(tu_program_options){ .mode = TU_PROGRAM_FUSED }, 1, test_sanitized() ? 4 : 12);
    remove_folder(folder);
}
