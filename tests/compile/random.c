/* SPDX-License-Identifier: Apache-2.0
 *
 * Random functions of products, activations, norms, dropouts, reductions, views and writes in place, compiled in every
 * mode, with and without passes: results, gradients, what is left in the inputs and where the random generator stands
 * are those of eager code, bit for bit. Half of them are training steps: they run their backward and change their
 * inputs themselves.
 *
 *     test_compile_random --seed 7 --count 1     once more what failed
 */
#include "quick.h"

#include "../loops/programs.h"

enum {
    INPUTS = 5, /* two matrices, a square one, a row and a column */
    KEPT = 20,
    CALLS = 3
};

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
    bool step; /* a training step */
    bool once; /* inputs are written once, at the end */
    tutti_group *group;
} recipe;

static tt_tensor *unary(dice *from, tt_tensor *x) {
    switch (draw(from, 12)) {
    case 0:
        return tt_tanh(x);
    case 1:
        return tt_relu(x);
    case 2:
        return tt_sigmoid(x);
    case 3:
        return tt_gelu(x);
    case 4:
        return tt_silu(x);
    case 5:
        return tt_exp(tt_clamp(x, -2, 2));
    case 6:
        return tt_add_scalar(x, (double)draw(from, 5) - 2);
    case 7:
        return tt_mul_scalar(x, 0.25 * (double)draw(from, 9) - 1);
    case 8:
        return tt_sqrt(tt_add_scalar(tt_square(x), 1));
    case 9:
        return tt_to(tt_to(x, TUTTI_BF16), tt_dtype(x));
    case 10:
        return tt_gelu_tanh(x);
    default:
        return tt_neg(x);
    }
}

static tt_tensor *binary(dice *from, tt_tensor *x, tt_tensor *y) {
    switch (draw(from, 6)) {
    case 0:
        return tt_add(x, y);
    case 1:
        return tt_sub(x, y);
    case 2:
        return tt_mul(x, y);
    case 3:
        return tt_maximum(x, y);
    case 4:
        return tt_where(tt_gt(x, y), x, tt_mul_scalar(y, 0.5));
    default:
        return tt_div(x, tt_add_scalar(tt_square(y), 1));
    }
}

static bool are_matrices(tt_tensor *x, tt_tensor *y) {
    return tt_dim_count(x) == 2 && tt_dim_count(y) == 2 && tt_numel(x) > 0 && tt_numel(y) > 0;
}

/* Rows by rows, or as they are; what follows may run behind the product. */
static tt_tensor *product(dice *from, tt_tensor *x, tt_tensor *y, tt_tensor *row) {
    if (!are_matrices(x, y))
        return NULL;
    bool rows = tt_size(x, 1) == tt_size(y, 1), plain = tt_size(x, 1) == tt_size(y, 0);
    if (rows && (!plain || draw(from, 2) == 0)) {
        bool biased = tt_size(y, 0) == tt_numel(row) && draw(from, 2) == 0;
        return tt_mul_scalar(tt_linear(x, y, biased ? row : NULL), 0.25);
    }
    return plain ? tt_mul_scalar(tt_matmul(x, y), 0.25) : NULL;
}

static tt_tensor *reduced(dice *from, tt_tensor *x) {
    int dim = draw(from, 4) == 0 ? 0 : -1;
    if (tt_dim_count(x) < 2)
        return x;
    switch (draw(from, 3)) {
    case 0:
        return tt_sum_dims(x, tt_shape(dim), true);
    case 1:
        return tt_mean_dims(x, tt_shape(dim), true);
    default:
        return tt_sub(x, tt_detach(tt_amax(x, tt_shape(dim), true)));
    }
}

static tt_tensor *normal(dice *from, tt_tensor *x, tt_tensor *row) {
    bool fits = tt_dim_count(x) > 0 && tt_size(x, -1) == tt_numel(row);
    switch (draw(from, 4)) {
    case 0:
        return tt_softmax(x, -1);
    case 1:
        return tt_log_softmax(x, -1);
    case 2:
        return fits ? tt_layer_norm(x, row, NULL, 1e-5) : x;
    default:
        return fits ? tt_rms_norm(x, row, 1e-5) : x;
    }
}

static tt_tensor *viewed(dice *from, tt_tensor *x) {
    int dims = tt_dim_count(x), dim = dims > 0 ? (int)draw(from, (uint64_t)dims) : 0;
    if (dims < 2)
        return tt_alias(x);
    switch (draw(from, 4)) {
    case 0:
        return tt_transpose(x, 0, 1);
    case 1:
        return tt_size(x, dim) > 1 ? tt_narrow(x, dim, 1, tt_size(x, dim) - 1) : x;
    case 2:
        return tt_size(x, dim) > 2 ? tt_slice(x, dim, 0, tt_size(x, dim), 2) : x;
    default:
        return tt_cat(tt_tensors(x, tt_mul_scalar(x, 2)), dim);
    }
}

static tt_tensor *random_numbers(dice *from, tt_tensor *x) {
    return draw(from, 3) == 0 ? tt_mul(x, tt_rand(tt_sizes(x), tt_dtype(x), NULL)) : tt_dropout(x, 0.3);
}

static void written(dice *from, tt_tensor *x, tt_tensor *y) {
    uint64_t what = draw(from, 4);
    if (what == 0)
        tt_mul_scalar_(x, 0.5);
    else if (what == 1)
        tt_relu_(x);
    else if (what == 2)
        tt_add_scalar_(x, 1);
    else if (tt_dim_count(x) == tt_dim_count(y) && tt_numel(x) == tt_numel(y) && tt_size(x, 0) == tt_size(y, 0))
        tt_add_(x, tt_sigmoid(y));
}

static bool broadcasts(tt_tensor *x, tt_tensor *y) {
    int64_t count = 1;
    for (int i = 1; i <= tt_dim_count(x) || i <= tt_dim_count(y); i++) {
        int64_t left = i <= tt_dim_count(x) ? tt_size(x, -i) : 1, right = i <= tt_dim_count(y) ? tt_size(y, -i) : 1;
        if (left != right && left != 1 && right != 1)
            return false;
        count *= left != 1 ? left : right;
    }
    return count <= 1 << 15;
}

/* Of the tensors that it has, some, and the last. None is an input itself: its gradient would be a sum of what comes
 * through the function and past it, which eager code adds in another order. */
static int some_of(dice *from, tt_tensor **kept, int count, tt_tensor **outputs) {
    int results = 0;
    for (int i = count - 1; i >= INPUTS && results < 3; i--)
        if (draw(from, 3) != 0)
            outputs[results++] = kept[i];
    outputs[results++] = kept[count - 1];
    for (int i = 0; i < results; i++)
        for (int k = 0; k < INPUTS; k++)
            if (outputs[i] == kept[k])
                outputs[i] = tt_mul_scalar(kept[k], 3);
    return results;
}

/* Inputs that are leaves go down their gradients. */
static int train(tt_tensor_list inputs, tt_tensor **outputs, int count) {
    tt_tensor *loss = tt_sum(tt_square(tt_tanh(outputs[0])));
    for (int i = 1; i < count; i++)
        loss = tt_add(loss, tt_sum(tt_tanh(outputs[i])));
    if (loss != NULL && tt_requires_grad(loss))
        tt_backward(loss, NULL);
    bool recording = tt_grad_mode(false);
    for (size_t i = 0; i < inputs.count; i++)
        if (tt_requires_grad(inputs.at[i]) && tt_grad(inputs.at[i]) != NULL)
            tt_add_(inputs.at[i], tt_mul_scalar(tt_grad(inputs.at[i]), -0.01));
    tt_grad_mode(recording);
    outputs[0] = tt_detach(loss);
    return 1;
}

static int function(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const recipe *made = user;
    dice from = { made->seed };
    tt_tensor *kept[KEPT];
    int count = 0;
    for (; count < INPUTS; count++)
        kept[count] = inputs.at[count];
    for (int line = 0; line < made->lines; line++) {
        int at = (int)draw(&from, (uint64_t)count);
        tt_tensor *x = kept[at], *y = kept[draw(&from, (uint64_t)count)], *z = NULL;
        uint64_t what = draw(&from, 16);
        if (what < 4)
            z = unary(&from, x);
        else if (what < 7)
            z = broadcasts(x, y) ? binary(&from, x, y) : NULL;
        else if (what < 10)
            z = product(&from, x, y, inputs.at[3]);
        else if (what < 11)
            z = reduced(&from, x);
        else if (what < 12)
            z = normal(&from, x, inputs.at[3]);
        else if (what < 14)
            z = viewed(&from, x);
        else if (what < 15)
            z = random_numbers(&from, x);
        else if (at >= INPUTS)
            written(&from, x, y);
        if (z == NULL || tt_numel(z) > 1 << 15)
            continue;
        kept[count < KEPT ? count++ : INPUTS + (int)draw(&from, KEPT - INPUTS)] = z;
    }
    int results = some_of(&from, kept, count, outputs);
    return made->step ? train(inputs, outputs, results) : results;
}

/* ---- one function, eager and compiled ---- */

static void make_inputs(dice *from, uint64_t seed, tt_tensor **inputs) {
    static const int64_t sizes[] = { 1, 2, 5, 8, 17, 33, 64, 100 };
    int64_t rows = sizes[draw(from, 8)], columns = sizes[draw(from, 8)];
    tutti_dtype dtype = draw(from, 4) == 0 ? TUTTI_F64 : TUTTI_F32;
    tt_dims shapes[INPUTS] = { tt_shape(rows, columns), tt_shape(rows, columns), tt_shape(columns, columns),
                               tt_shape(columns), tt_shape(rows, 1) };
    tt_seed(seed, 0);
    for (int i = 0; i < INPUTS; i++) {
        inputs[i] = tt_randn(shapes[i], dtype, NULL);
        tt_require_grad(inputs[i], draw(from, 3) != 0);
    }
}

static tt_tensor *twin_of(tt_tensor *x) {
    return tt_require_grad(tt_clone(tt_detach(x)), tt_requires_grad(x));
}

/* One call with its backward. The status is the first error's. */
static tutti_status call(tt_compiled *fast, const recipe *made, tt_tensor **inputs, tt_tensor_list *results) {
    static tt_tensor *outputs[2][16];
    tt_tensor_list given = tt_tensors_of(INPUTS, inputs);
    if (fast != NULL) {
        *results = tt_compiled_call(fast, given);
    } else {
        int count = function(given, outputs[0], (void *)made);
        *results = tt_tensors_of(tt_error_pending() == TUTTI_OK ? (size_t)count : 0, outputs[0]);
    }
    tt_tensor *loss = NULL;
    for (size_t i = 0; i < results->count; i++) /* of some functions one result gets no gradient */
        if (tt_requires_grad(results->at[i]) && (made->seed % 3 != 0 || i + 1 < results->count)) {
            tt_tensor *part = tt_sum(tt_mul_scalar(results->at[i], 0.5 + (double)i));
            loss = loss != NULL ? tt_add(loss, part) : part;
        }
    if (loss != NULL)
        tt_backward(loss, NULL);
    tutti_status status = tt_error_show();
    tt_error_clear();
    return status;
}

static bool same_or_absent(tt_tensor *left, tt_tensor *right) {
    return left == NULL || right == NULL ? left == right : same_bits(left, right);
}

static void compare(const recipe *made, tt_compiled *fast, tt_tensor **start, const char *what) {
    tt_scope scope = tt_scope_open();
    tt_tensor *eager[INPUTS], *own[INPUTS];
    tt_tensor_list expected, results;
    for (int i = 0; i < INPUTS; i++) {
        eager[i] = twin_of(start[i]);
        own[i] = twin_of(start[i]);
    }
    for (int step = 0; step < CALLS; step++) {
        tt_seed(made->seed + (uint64_t)step, 0);
        tutti_status wanted = call(NULL, made, eager, &expected);
        tt_tensor *next = tt_rand(tt_shape(4), TUTTI_F32, NULL);
        tt_seed(made->seed + (uint64_t)step, 0);
        tutti_status got = call(fast, made, own, &results);
        tt_tensor *other = tt_rand(tt_shape(4), TUTTI_F32, NULL);
        if (got == TUTTI_ERROR_GRAPH) /* an input that was written has the node of the call before, which is freed */
            break;
        if (got != wanted)
            FAIL("seed %llu %s, call %d: status %d, but %d in eager code: %s", (unsigned long long)made->seed, what,
                 step, (int)got, (int)wanted, tutti_error_message());
        if (got != TUTTI_OK)
            break; /* how far it came is its own affair */
        CHECK_EQ(results.count, expected.count);
        for (size_t i = 0; i < results.count; i++)
            if (!same_bits(tt_detach(results.at[i]), tt_detach(expected.at[i])))
                FAIL("seed %llu %s, call %d: result %zu differs", (unsigned long long)made->seed, what, step, i);
        for (int i = 0; i < INPUTS; i++)
            if (!same_bits(tt_detach(own[i]), tt_detach(eager[i])) ||
                (!made->once && tt_version(own[i]) != tt_version(eager[i])) ||
                !same_or_absent(tt_grad(own[i]), tt_grad(eager[i])))
                FAIL("seed %llu %s, call %d: input %d or its gradient differs", (unsigned long long)made->seed, what,
                     step, i);
        if (!same_bits(next, other))
            FAIL("seed %llu %s, call %d: the generator stands elsewhere", (unsigned long long)made->seed, what, step);
    }
    CHECK_OK(tt_scope_close(&scope));
}

static void compare_one(uint64_t seed, int first_mode, int last_mode) {
    static const char *const skips[] = { NULL, "common", "fold,copies", "dead,common,fold,copies,unshard" };
    static const char *const withs[] = { NULL, "functional" };
    dice from = { seed * 77 + 5 };
    recipe made = { seed, 4 + (int)draw(&from, 25), draw(&from, 2) == 0, false, NULL };
    tt_scope scope = tt_scope_open();
    tt_tensor *inputs[INPUTS];
    make_inputs(&from, seed, inputs);
    for (int mode = first_mode; mode <= last_mode; mode++) {
        const char *skip = skips[draw(&from, 4)], *with = withs[draw(&from, 2)];
        tt_compiled *fast;
        char what[128];
        CHECK(tt_compile(
            function, &made,
            TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .strict = true, .skip = skip, .with = with), &fast));
        snprintf(what, sizeof what, "(%s, mode %d, without %s, with %s)", made.step ? "a step" : "no step", mode,
                 skip != NULL ? skip : "nothing", with != NULL ? with : "nothing");
        made.once = with != NULL;
        compare(&made, fast, inputs, what);
        tt_compiled_release(&fast);
    }
    CHECK_OK(tt_scope_close(&scope));
}

static void compare_many(int count, int first_mode, int last_mode) {
    const char *seed = test_option("seed"), *given = test_option("count");
    uint64_t first = seed != NULL ? strtoull(seed, NULL, 10) : 1;
    count = given != NULL ? atoi(given) : use_device() && count > 60 ? 60 : count;
    use_device();
    for (int i = 0; i < count; i++)
        compare_one(first + (uint64_t)i, first_mode, last_mode);
}

/* ---- sizes that change ---- */

/* What a tensor is like, since a function that asks for sizes is captured for each. */
typedef enum kind {
    WHOLE, /* rows and columns */
    COLUMN,
    ROW
} kind;

/* x and y with rows that change; a square weight, a row and a column of numbers of that many rows. */
static int of_any_size(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const recipe *made = user;
    dice from = { made->seed };
    tt_tensor *kept[KEPT];
    kind kinds[KEPT] = { WHOLE, WHOLE, COLUMN, ROW };
    int count = 4;
    for (int i = 0; i < 4; i++)
        kept[i] = inputs.at[i < 2 ? i : i == 2 ? 4 : 3];
    for (int line = 0; line < made->lines && count < KEPT; line++) {
        int at = (int)draw(&from, (uint64_t)count), with = (int)draw(&from, (uint64_t)count);
        tt_tensor *x = kept[at], *z = NULL;
        kind made_kind = kinds[at];
        uint64_t what = draw(&from, 14);
        if (what < 5) {
            z = unary(&from, x);
        } else if (what < 8) {
            z = binary(&from, x, kept[with]);
            made_kind = kinds[at] == kinds[with] ? kinds[at] : WHOLE;
        } else if (what < 10 && kinds[at] == WHOLE) {
            z = tt_mul_scalar(tt_linear(x, inputs.at[2], draw(&from, 2) == 0 ? inputs.at[3] : NULL), 0.25);
        } else if (what < 11 && kinds[at] == WHOLE) {
            made_kind = draw(&from, 2) == 0 ? COLUMN : ROW;
            z = tt_mean_dims(x, tt_shape(made_kind == ROW ? 0 : 1), true);
        } else if (what < 12 && kinds[at] == WHOLE) {
            z = draw(&from, 2) == 0 ? tt_softmax(x, -1) : tt_layer_norm(x, inputs.at[3], NULL, 1e-5);
        } else if (what < 13) {
            z = tt_dropout(x, 0.25);
        } else if (at >= 4) {
            tt_mul_scalar_(x, 0.5);
        }
        if (z == NULL)
            continue;
        kept[count] = z;
        kinds[count++] = made_kind;
    }
    outputs[0] = tt_mean(tt_square(tt_tanh(kept[count - 1])));
    outputs[1] = count > 5 ? tt_mul_scalar(kept[count - 2], 2) : tt_neg(kept[0]);
    return 2;
}

/* Returns how many variants there were, so that the test can tell that there were some. */
static int compare_sizes(uint64_t seed, tt_compile_mode mode) {
    dice from = { seed * 77 + 5 };
    recipe made = { seed, 4 + (int)draw(&from, 16), false, false, NULL };
    int64_t columns = 2 + (int64_t)draw(&from, 20), first = 2 + (int64_t)draw(&from, 12);
    int64_t rows[] = { first, first + 2, 2 * first + 1, first + 7, first };
    tt_compiled *fast;
    CHECK(tt_compile(of_any_size, &made, TUTTI_OPTIONS(tt_compile_options, .mode = mode, .strict = true), &fast));
    for (int step = 0; step < 5; step++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *inputs[2][INPUTS], *outputs[2][2];
        tt_dims shapes[INPUTS] = { tt_shape(rows[step], columns), tt_shape(rows[step], columns),
                                   tt_shape(columns, columns), tt_shape(columns), tt_shape(rows[step], 1) };
        tt_seed(seed + (uint64_t)step, 0);
        for (int i = 0; i < INPUTS; i++) {
            inputs[0][i] = tt_require_grad(tt_randn(shapes[i], TUTTI_F32, NULL), i != 4);
            inputs[1][i] = twin_of(inputs[0][i]);
        }
        tutti_status statuses[2];
        for (int side = 0; side < 2; side++) {
            tt_seed(seed, 0);
            tt_tensor_list results = { 2, outputs[side] };
            if (side == 0)
                of_any_size(tt_tensors_of(INPUTS, inputs[0]), outputs[0], &made);
            else
                results = tt_compiled_call(fast, tt_tensors_of(INPUTS, inputs[1]));
            if (tt_error_pending() == TUTTI_OK)
                tt_backward(tt_add(results.at[0], tt_sum(results.at[1])), NULL);
            statuses[side] = tt_error_show();
            tt_error_clear();
            for (int i = 0; i < 2 && side == 1 && results.count == 2; i++)
                outputs[1][i] = results.at[i];
        }
        if (statuses[0] != statuses[1])
            FAIL("seed %llu, mode %d, %lld rows: status %d, but %d in eager code: %s", (unsigned long long)seed,
                 (int)mode, (long long)rows[step], (int)statuses[1], (int)statuses[0], tutti_error_message());
        for (int i = 0; i < INPUTS && statuses[0] == TUTTI_OK; i++)
            if ((i < 2 && !same_bits(tt_detach(outputs[0][i]), tt_detach(outputs[1][i]))) ||
                !same_or_absent(tt_grad(inputs[0][i]), tt_grad(inputs[1][i])))
                FAIL("seed %llu, mode %d, %lld rows: result or gradient %d differs", (unsigned long long)seed,
                     (int)mode, (long long)rows[step], i);
        CHECK_OK(tt_scope_close(&scope));
    }
    int variants = counts_of(fast).captures == 2 ? counts_of(fast).variants : 0;
    tt_compiled_release(&fast);
    return variants;
}

TEST_LIMIT(random_functions_of_sizes_that_change_leave_what_eager_code_leaves, 600) {
    const char *seed = test_option("seed"), *given = test_option("count");
    uint64_t first = seed != NULL ? strtoull(seed, NULL, 10) : 1;
    int count = given != NULL ? atoi(given) : test_sanitized() ? 30 : 150, variants = 0;
    use_device();
    for (int i = 0; i < count; i++)
        EACH_MODE variants += compare_sizes(first + (uint64_t)i, modes[mode]);
    printf("%d variants without a capture\n", variants);
    CHECK(seed != NULL || variants > count);
}

/* ---- ranks ---- */

/* Of x and y with an even number of rows, a square weight, a row and a column, with collectives between. */
static int with_collectives(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const recipe *made = user;
    dice from = { made->seed };
    tt_tensor *kept[KEPT] = { inputs.at[0], inputs.at[1] };
    int count = 2;
    for (int line = 0; line < made->lines && count < KEPT; line++) {
        tt_tensor *x = kept[draw(&from, (uint64_t)count)], *y = kept[draw(&from, (uint64_t)count)], *z = NULL;
        switch (draw(&from, 9)) {
        case 0:
            z = tt_all_reduce(x, TUTTI_SUM, made->group);
            break;
        case 1:
            z = tt_reduce_scatter(tt_cat(tt_tensors(x, y), 0), TUTTI_SUM, 0, made->group);
            break;
        case 2:
            z = tt_narrow(tt_all_gather(x, 0, made->group), 0, 1, tt_size(x, 0));
            break;
        case 3:
            z = tt_all_to_all_single(x, NULL, NULL, made->group);
            break;
        case 4:
            z = tt_mul_scalar(tt_linear(x, inputs.at[2], inputs.at[3]), 0.25);
            break;
        case 5:
        case 6:
            z = binary(&from, x, y);
            break;
        default:
            z = unary(&from, x);
        }
        kept[count++] = z;
    }
    outputs[0] = tt_mul_scalar(kept[count - 1], 0.5);
    outputs[1] = tt_sum(kept[count / 2]);
    return made->step ? train(inputs, outputs, 2) : 2;
}

static void compare_on_ranks(uint64_t seed, tutti_group *group, size_t mode) {
    static const char *const withs[] = { NULL, "functional", "one_shot", "one_shot,functional" };
    dice from = { seed * 77 + 5 };
    int64_t rows = 2 + 2 * (int64_t)draw(&from, 9), columns = 2 + (int64_t)draw(&from, 20);
    recipe made = { seed, 3 + (int)draw(&from, 16), draw(&from, 2) == 0, false, group };
    tt_dims shapes[INPUTS] = { tt_shape(rows, columns), tt_shape(rows, columns), tt_shape(columns, columns),
                               tt_shape(columns), tt_shape(rows, 1) };
    const char *with = withs[draw(&from, 4)];
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    tt_tensor *inputs[2][INPUTS], *outputs[16];
    CHECK(tt_compile(with_collectives, &made,
                     TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .strict = true, .with = with), &fast));
    tt_seed(seed, tutti_group_rank(group));
    for (int i = 0; i < INPUTS; i++) {
        inputs[0][i] = tt_require_grad(tt_randn(shapes[i], TUTTI_F32, NULL), true);
        inputs[1][i] = twin_of(inputs[0][i]);
    }
    for (int step = 0; step < CALLS; step++) {
        tt_tensor_list expected = tt_tensors_of(made.step ? 1 : 2, outputs);
        with_collectives(tt_tensors_of(INPUTS, inputs[0]), outputs, &made);
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors_of(INPUTS, inputs[1]));
        for (int side = 0; side < 2 && !made.step; side++) {
            tt_tensor *const *at = side == 0 ? expected.at : results.at;
            if (results.count == 2 && (tt_requires_grad(at[0]) || tt_requires_grad(at[1])))
                tt_backward(tt_add(tt_sum(at[0]), at[1]), NULL);
        }
        if (tt_error_show() != TUTTI_OK)
            FAIL("seed %llu, mode %zu, with %s: %s", (unsigned long long)seed, mode, with != NULL ? with : "nothing",
                 tutti_error_message());
        CHECK_EQ(results.count, expected.count);
        for (int i = 0; i < INPUTS; i++)
            if ((i < (int)results.count && !same_bits(tt_detach(results.at[i]), tt_detach(expected.at[i]))) ||
                !same_bits(tt_detach(inputs[0][i]), tt_detach(inputs[1][i])) ||
                !same_or_absent(tt_grad(inputs[0][i]), tt_grad(inputs[1][i])))
                FAIL("seed %llu, mode %zu, with %s, call %d: %d differs", (unsigned long long)seed, mode,
                     with != NULL ? with : "nothing", step, i);
    }
    tt_wait_all(tutti_group_world(group)); /* what nobody used nobody has waited for */
    CHECK_OK(tutti_barrier(group, NULL));
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(random_functions_with_collectives_leave_what_eager_code_leaves, 2) {
    const char *seed = test_option("seed"), *given = test_option("count");
    uint64_t first = seed != NULL ? strtoull(seed, NULL, 10) : 1;
    int count = given != NULL ? atoi(given) : test_sanitized() ? 2 : 10;
    for (int i = 0; i < count; i++)
        EACH_MODE compare_on_ranks(first + (uint64_t)i, tutti_world_group(world), mode);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_LIMIT(random_functions_compiled_leave_what_eager_code_leaves, 600) {
    compare_many(test_sanitized() ? 30 : 250, 0, 2);
}

TEST_LIMIT(random_functions_built_by_the_compiler_leave_what_eager_code_leaves, 600) {
    if (system("cc --version >/dev/null 2>&1") != 0)
        SKIP("there is no cc");
    const char *folder = own_folder();
    unsetenv("TUTTI_CC");
    unsetenv("TUTTI_NVRTC");
    compare_many(test_sanitized() ? 1 : 3, 0, 0);
    remove_folder(folder);
}
