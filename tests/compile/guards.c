/* SPDX-License-Identifier: Apache-2.0
 *
 * When a compiled function is captured anew, why, and how often.
 */
#include <pthread.h>
#include <stdio.h>

#include "quick.h"

/* One more capture than before, for this reason and in these words. */
static void check_miss(const tt_compiled *fast, int captures, tt_miss miss, int misses, const char *words) {
    tt_compiled_counts counts = counts_of(fast);
    if (counts.captures != captures || counts.misses[miss] != misses || strstr(tt_compiled_reason(fast), words) == NULL)
        FAIL("%d captures, %d misses of kind %d, because %s", counts.captures, counts.misses[miss], (int)miss,
             tt_compiled_reason(fast));
}

/* The same where the dtype is another one, on the device of this test. */
static void check_dtype_miss(const tt_compiled *fast, int captures, int misses, const char *dtype) {
    const char *device = tutti_device_name(test_device());
    char words[128];
    snprintf(words, sizeof words, "input 0 is %s [4, 3] on %s, and was f32 on %s", dtype, device, device);
    check_miss(fast, captures, TT_MISS_DTYPE, misses, words);
}

static tt_tensor *values(int64_t rows, int64_t columns) {
    return tt_reshape(tt_arange(0, (double)(rows * columns), 1, TUTTI_F32, NULL), tt_shape(rows, columns));
}

static int sum_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sum(tt_square(inputs.at[0]));
    for (size_t i = 1; i < inputs.count; i++)
        outputs[0] = tt_add(outputs[0], tt_sum(inputs.at[i]));
    return 1;
}

static bool is_right(tt_compiled *fast, tt_tensor_list inputs) {
    tt_tensor *expected;
    tt_tensor_list results = tt_compiled_call(fast, inputs);
    sum_of(inputs, &expected, NULL);
    return results.count == 1 && tt_equal(tt_detach(results.at[0]), tt_detach(expected));
}

TEST(what_an_entry_was_captured_with_is_guarded) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(sum_of, NULL, TUTTI_OPTIONS(tt_compile_options, .dynamic = TUTTI_NONE), &fast));
    tt_tensor *x = values(3, 4), *wide = values(4, 3);
    CHECK(is_right(fast, tt_tensors(x)));
    check_miss(fast, 1, TT_MISS_FIRST, 1, "the first call");
    CHECK(is_right(fast, tt_tensors(tt_add_scalar(x, 1))) && counts_of(fast).hits == 1);
    CHECK(is_right(fast, tt_tensors(wide)));
    check_miss(fast, 2, TT_MISS_SIZES, 1, "input 0 is f32 [4, 3], and was [3, 4]");
    CHECK(is_right(fast, tt_tensors(tt_transpose(wide, 0, 1))));
    check_miss(fast, 3, TT_MISS_SIZES, 2, "input 0 is f32 [3, 4], and was [4, 3]");
    CHECK(is_right(fast, tt_tensors(tt_to(wide, TUTTI_F64))));
    check_dtype_miss(fast, 4, 1, "f64");
    CHECK(is_right(fast, tt_tensors(wide)) && counts_of(fast).hits == 2); /* entries do not drive each other out */
    CHECK(is_right(fast, tt_tensors(tt_to(wide, TUTTI_F16))));
    check_dtype_miss(fast, 5, 2, "f16");
    CHECK(is_right(fast, tt_tensors(wide)));
    bool was = tt_grad_mode(false);
    CHECK(is_right(fast, tt_tensors(wide)));
    check_miss(fast, 6, TT_MISS_MODE, 1, "gradient mode is off");
    tt_grad_mode(was);
    CHECK(is_right(fast, tt_tensors(wide)) && counts_of(fast).captures == 6);
    CHECK(is_right(fast, tt_tensors(tt_require_grad(tt_clone(wide), true))));
    check_miss(fast, 7, TT_MISS_REQUIRES_GRAD, 1, "input 0, f32 [4, 3], requires grad");
    CHECK(is_right(fast, tt_tensors(wide, x)));
    check_miss(fast, 8, TT_MISS_COUNT, 1, "2 inputs are given, and there were 1");
    CHECK_EQ(counts_of(fast).entries, 8);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int write_first(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_mul_scalar_(inputs.at[0], 2);
    outputs[0] = tt_add(inputs.at[0], inputs.at[1]);
    return 1;
}

TEST(which_inputs_share_memory_is_guarded) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(write_first, NULL, NULL, &fast));
    tt_tensor *x = values(1, 8), *y = values(1, 8);
    tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, y));
    CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(0, 3)) == 9);
    results = tt_compiled_call(fast, tt_tensors(x, x)); /* both are what was written */
    CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(0, 3)) == 24 && tt_at(x, tt_shape(0, 3)) == 12);
    check_miss(fast, 2, TT_MISS_SHARING, 1, "inputs 0 and 1 are one tensor");
    results = tt_compiled_call(fast, tt_tensors(x, tt_view(x, tt_shape(1, 8))));
    CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(0, 3)) == 48);
    check_miss(fast, 3, TT_MISS_SHARING, 2, "");
    results = tt_compiled_call(fast, tt_tensors(y, y));
    CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(0, 3)) == 12 && counts_of(fast).captures == 3);
    results = tt_compiled_call(fast, tt_tensors(y, x));
    CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(0, 3)) == 12 + 24 && counts_of(fast).captures == 3);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* Slices of one tensor at other places are the same to a graph. */
TEST(where_an_input_begins_in_its_storage_does_not_matter) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(sum_of, NULL, NULL, &fast));
    tt_tensor *data = values(8, 4);
    for (int i = 0; i < 4; i++)
        CHECK(is_right(fast, tt_tensors(tt_narrow(data, 0, 2 * i, 2))));
    CHECK_EQ(counts_of(fast).captures, 1);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- modules ---- */

static int call_module(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_module_call(user, inputs.at[0]);
    return 1;
}

static void triple(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                   tt_tensor **outputs) {
    (void)context, (void)module, (void)inputs, (void)count;
    outputs[0] = tt_mul_scalar(outputs[0], 3);
}

TEST(hooks_slots_and_the_training_flag_of_modules_are_guarded) {
    tt_scope scope = tt_scope_open();
    tt_module *layers[] = { tt_linear_module(4, 4, true, TUTTI_F32), tt_dropout_module(0.5) };
    tt_module *module = tt_sequential_module(2, layers);
    tt_compiled *fast;
    CHECK(tt_compile(call_module, module, NULL, &fast));
    tt_tensor *x = values(2, 4);
    tt_module_set_training(module, false);
    tt_tensor *expected = tt_module_call(module, x);
    CHECK(tt_equal(tt_detach(tt_compiled_call(fast, tt_tensors(x)).at[0]), tt_detach(expected)));
    tt_hook *hook;
    CHECK(tt_hook_forward(layers[0], triple, NULL, NULL, &hook));
    expected = tt_module_call(module, x);
    CHECK(tt_equal(tt_detach(tt_compiled_call(fast, tt_tensors(x)).at[0]), tt_detach(expected)));
    check_miss(fast, 2, TT_MISS_MODULE, 1, "other hooks");
    tt_hook_remove(&hook);
    expected = tt_module_call(module, x);
    CHECK(tt_equal(tt_detach(tt_compiled_call(fast, tt_tensors(x)).at[0]), tt_detach(expected)));
    check_miss(fast, 3, TT_MISS_MODULE, 2, "other hooks");
    bool was = tt_grad_mode(false); /* what a slot holds may change: it is an input */
    tt_tensor *other = tt_parameter(tt_mul_scalar(tt_module_parameter(layers[0], "weight"), 2), true);
    tt_grad_mode(was);
    CHECK(tt_module_set_parameter(layers[0], "weight", other));
    expected = tt_module_call(module, x);
    CHECK(tt_equal(tt_detach(tt_compiled_call(fast, tt_tensors(x)).at[0]), tt_detach(expected)));
    CHECK_EQ(counts_of(fast).captures, 3);
    tt_module_set_training(module, true);
    tt_seed(3, 0);
    expected = tt_module_call(module, x);
    tt_seed(3, 0);
    CHECK(tt_equal(tt_detach(tt_compiled_call(fast, tt_tensors(x)).at[0]), tt_detach(expected)));
    check_miss(fast, 4, TT_MISS_MODULE, 3, "training flag");
    tt_compiled_release(&fast);
    tt_module_release(module);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- gradients ---- */

static int accumulate(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_backward(tt_sum(tt_square(inputs.at[0])), NULL);
    outputs[0] = tt_grad(inputs.at[0]);
    return 1;
}

static tt_tensor *halve(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    return tt_mul_scalar(grad, 0.5);
}

TEST(gradients_that_a_function_adds_to_and_hooks_that_it_runs_are_guarded) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(accumulate, NULL, NULL, &fast));
    tt_tensor *x = tt_require_grad(values(1, 4), true);
    for (int i = 1; i <= 4; i++) {
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
        CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(0, 3)) == 6.0 * i);
    }
    check_miss(fast, 2, TT_MISS_GRADIENT, 1, "has a gradient, and had none");
    CHECK_EQ(counts_of(fast).hits, 2);
    tt_set_grad(x, NULL);
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(x)).count, 1);
    CHECK(counts_of(fast).captures == 2 && tt_at(tt_grad(x), tt_shape(0, 3)) == 6);
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(x)).count, 1);
    CHECK(tt_hook_tensor(x, halve, NULL, NULL, NULL));
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(x)).count, 1);
    check_miss(fast, 3, TT_MISS_HOOKS, 1, "other hooks");
    CHECK_EQ(tt_at(tt_grad(x), tt_shape(0, 3)), 15);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int clear_and_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_set_grad(inputs.at[0], NULL);
    return accumulate(inputs, outputs, user);
}

TEST(a_gradient_that_is_cleared_first_is_not_guarded) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(clear_and_step, NULL, NULL, &fast));
    tt_tensor *x = tt_require_grad(values(1, 4), true);
    for (int i = 0; i < 3; i++)
        CHECK(tt_at(tt_compiled_call(fast, tt_tensors(x)).at[0], tt_shape(0, 3)) == 6);
    CHECK_EQ(counts_of(fast).captures, 1);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- the limit ---- */

TEST(after_eight_entries_the_function_itself_runs) {
    for (int full = 0; full < 2; full++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        CHECK(tt_compile(sum_of, NULL, TUTTI_OPTIONS(tt_compile_options, .dynamic = TUTTI_NONE, .full = full != 0),
                         &fast));
        for (int i = 0; i < TT_COMPILE_ENTRIES; i++)
            CHECK(is_right(fast, tt_tensors(values(2, i + 1))));
        CHECK(counts_of(fast).captures == 8 && counts_of(fast).eager == 0);
        if (full == 0) {
            CHECK(is_right(fast, tt_tensors(values(2, 20))) && is_right(fast, tt_tensors(values(2, 30))));
            CHECK(counts_of(fast).eager == 2 && counts_of(fast).captures == 8);
            CHECK(strstr(tt_compiled_reason(fast), "8 entries") != NULL);
        } else {
            CHECK(tt_compiled_call(fast, tt_tensors(values(2, 20))).count == 0);
            CHECK(tt_error_show() == TUTTI_ERROR_LIMIT && strstr(tutti_error_message(), "and was [2, ") != NULL);
            tt_error_clear();
        }
        CHECK(is_right(fast, tt_tensors(values(2, 4))));
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* ---- threads ---- */

typedef struct worker {
    tt_compiled *fast;
    bool right;
} worker;

static void *call_often(void *argument) {
    worker *own = argument;
    tt_scope scope = tt_scope_open();
    own->right = true;
    for (int i = 0; i < 40; i++) {
        tt_tensor *x = tt_require_grad(tt_add_scalar(values(2, 3 + i % 4), i), true);
        tt_tensor *twin = tt_require_grad(tt_clone(tt_detach(x)), true), *expected;
        tt_tensor_list results = tt_compiled_call(own->fast, tt_tensors(x));
        sum_of(tt_tensors(twin), &expected, NULL);
        own->right = own->right && results.count == 1 && tt_backward(results.at[0], NULL) &&
                     tt_backward(expected, NULL) && tt_equal(tt_detach(results.at[0]), tt_detach(expected)) &&
                     tt_equal(tt_grad(x), tt_grad(twin));
    }
    own->right = tt_scope_close(&scope) == TUTTI_OK && own->right;
    return NULL;
}

TEST(several_threads_call_one_function_at_once) {
    tt_compiled *fast;
    tt_scope scope = tt_scope_open();
    CHECK(tt_compile(sum_of, NULL, TUTTI_OPTIONS(tt_compile_options, .dynamic = TUTTI_NONE), &fast));
    pthread_t threads[4];
    worker workers[4];
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){ .fast = fast };
        CHECK_EQ(pthread_create(&threads[i], NULL, call_often, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++)
        CHECK(workers[i].right);
    CHECK_EQ(counts_of(fast).captures, 4); /* one thread captured each shape, and the others found it */
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- sizes that change ---- */

/* Sums, means, broadcasts and products, none of which asks for a size. */
static int layers(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *w = inputs.at[1];
    tt_tensor *y = tt_softmax(tt_matmul(tt_sub(x, tt_mean_dims(x, tt_shape(0), true)), w), 1);
    y = tt_dropout(tt_add(y, tt_flatten(tt_sum_dims(y, tt_shape(0), false), 0, -1)), 0.25);
    outputs[0] = tt_mean(tt_square(y));
    outputs[1] = tt_transpose(y, 0, 1);
    return 2;
}

static void check_layers(tt_compiled *fast, int64_t rows) {
    tt_tensor *x = tt_require_grad(tt_mul_scalar(values(rows, 4), 0.1), true), *x2 = tt_clone(tt_detach(x)),
              *expected[2];
    tt_tensor *w = tt_require_grad(tt_mul_scalar(values(4, 3), 0.2), true), *w2 = tt_clone(tt_detach(w));
    x2 = tt_require_grad(x2, true);
    w2 = tt_require_grad(w2, true);
    tt_seed(7, 0);
    tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, w));
    tt_seed(7, 0);
    layers(tt_tensors(x2, w2), expected, NULL);
    CHECK_EQ(results.count, 2);
    CHECK(tt_equal(tt_detach(results.at[0]), tt_detach(expected[0])));
    CHECK(tt_equal(tt_detach(results.at[1]), tt_detach(expected[1])));
    CHECK(tt_backward(tt_add(results.at[0], tt_sum(tt_sin(results.at[1]))), NULL));
    CHECK(tt_backward(tt_add(expected[0], tt_sum(tt_sin(expected[1]))), NULL));
    CHECK(tt_equal(tt_grad(x), tt_grad(x2)) && tt_equal(tt_grad(w), tt_grad(w2)));
}

TEST(a_size_that_changed_once_is_variable) {
    for (int mode = 0; mode < 3; mode++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        CHECK(tt_compile(layers, NULL, TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .full = true), &fast));
        check_layers(fast, 4);
        CHECK_EQ(counts_of(fast).captures, 1);
        check_layers(fast, 6);
        CHECK_EQ(counts_of(fast).captures, 2);
        for (int rows = 2; rows < 20; rows++)
            check_layers(fast, rows);
        CHECK(counts_of(fast).captures == 2 && counts_of(fast).variants == 16 && counts_of(fast).entries == 2);
        check_layers(fast, 1); /* which broadcasts */
        CHECK_EQ(counts_of(fast).captures, 3);
        for (int rows = 2; rows < 60; rows++)
            check_layers(fast, rows);
        CHECK(counts_of(fast).captures == 3 && counts_of(fast).variants == 32);
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* Half of the rows: no multiple of their number. And a question about a size, whose answer may lead anywhere. */
static int halves(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sum(tt_chunk(inputs.at[0], 2, 0).at[0]);
    return 1;
}
static int asks(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_size(inputs.at[0], 0) > 5 ? tt_sum(inputs.at[0]) : tt_neg(tt_sum(inputs.at[0]));
    return 1;
}

TEST(what_depends_on_a_size_in_another_way_is_captured_for_each) {
    static tt_compile_function *const functions[] = { halves, asks };
    for (int i = 0; i < 2; i++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        CHECK(tt_compile(functions[i], NULL, NULL, &fast));
        for (int rows = 2; rows < 8; rows++) {
            tt_tensor *x = values(rows, 3), *expected;
            functions[i](tt_tensors(x), &expected, NULL);
            CHECK(tt_equal(tt_compiled_call(fast, tt_tensors(x)).at[0], expected));
        }
        CHECK(counts_of(fast).captures == 6 && counts_of(fast).entries == 2 && counts_of(fast).variants == 4);
        for (int rows = 2; rows < 60; rows++) { /* more than are kept: at last it runs as it is */
            tt_tensor *x = values(rows, 3), *expected;
            functions[i](tt_tensors(x), &expected, NULL);
            CHECK(tt_equal(tt_compiled_call(fast, tt_tensors(x)).at[0], expected));
            CHECK(rows > 30 || counts_of(fast).eager == 0);
        }
        CHECK(counts_of(fast).entries <= TT_COMPILE_ENTRIES && counts_of(fast).eager > 0);
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* Draws twice: what the first one takes from the generator decides what the second one gets. */
static int drops_twice(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_dropout(inputs.at[0], 0.5);
    outputs[1] = tt_add(tt_dropout(inputs.at[0], 0.25), tt_uniform_(tt_clone(inputs.at[0]), 0, 1));
    return 2;
}

TEST(random_numbers_follow_a_size_that_changes) {
    static const int rows[] = { 8, 5, 7, 12, 9, 100, 3, 8, 64, 65 };
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(drops_twice, NULL, modes[mode]);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            tt_tensor *x = values(rows[i], 17), *expected[2];
            tt_seed(1, (int)i);
            drops_twice(tt_tensors(x), expected, NULL);
            tt_tensor *next = tt_rand(tt_shape(4), TUTTI_F64, NULL);
            tt_seed(1, (int)i);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            CHECK(tt_equal(results.at[0], expected[0]) && tt_equal(results.at[1], expected[1]));
            CHECK(tt_equal(tt_rand(tt_shape(4), TUTTI_F64, NULL), next));
        }
        CHECK(counts_of(fast).captures < 5); /* one size stood for others */
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
}

TEST(two_sizes_that_change_apart_are_captured_and_one_in_two_inputs_is_not) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(sum_of, NULL, NULL, &fast));
    CHECK(is_right(fast, tt_tensors(values(3, 2), values(3, 4))) &&
          is_right(fast, tt_tensors(values(5, 2), values(5, 4))));
    CHECK_EQ(counts_of(fast).captures, 2);
    CHECK(is_right(fast, tt_tensors(values(7, 2), values(7, 4))) && counts_of(fast).captures == 2);
    CHECK(is_right(fast, tt_tensors(values(7, 2), values(8, 4))) && counts_of(fast).captures == 3);
    CHECK(is_right(fast, tt_tensors(values(7, 2), tt_transpose(values(4, 7), 0, 1))) && counts_of(fast).captures == 4);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}
