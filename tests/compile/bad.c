/* SPDX-License-Identifier: Apache-2.0
 *
 * What cannot be compiled, or is asked wrongly: an error in words, or the function itself with a reason; never a wrong
 * result.
 */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "quick.h"

static tt_tensor *values(int64_t count) {
    return tt_arange(1, (double)count + 1, 1, TUTTI_F32, NULL);
}

static int double_it(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    return 1;
}

/* ---- functions ---- */

static int reads(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_item(tt_sum(inputs.at[0])) > 10 ? tt_neg(inputs.at[0]) : tt_exp(inputs.at[0]);
    return 1;
}

TEST(a_function_that_reads_elements_runs_as_it_is_or_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(reads, NULL, NULL, &fast));
    tt_tensor *few = values(3), *many = tt_add_scalar(values(3), 5);
    for (int i = 0; i < 2; i++) {
        CHECK(tt_equal(tt_compiled_call(fast, tt_tensors(few)).at[0], tt_exp(few)));
        CHECK(tt_equal(tt_compiled_call(fast, tt_tensors(many)).at[0], tt_neg(many)));
    }
    tt_compiled_counts counts = counts_of(fast);
    CHECK(counts.captures == 1 && counts.eager == 4 && counts.hits == 0);
    CHECK(strstr(tt_compiled_reason(fast), "item: argument x, f32 [], has no data yet") != NULL);
    CHECK(tt_compiled_graph(fast, TT_FORWARD) == NULL);
    tt_compiled_release(&fast);
    CHECK(tt_compile(reads, NULL, TUTTI_OPTIONS(tt_compile_options, .full = true, .name = "reader"), &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(few)).count == 0);
    CHECK(fails(TUTTI_ERROR_CAPTURE, "item: argument x"));
    CHECK(strstr(tt_compiled_reason(fast), "its capture failed: ") == tt_compiled_reason(fast));
    CHECK(strstr(tt_compiled_reason(fast), "item: argument x") != NULL);
    CHECK_EQ(counts_of(fast).eager, 0);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int writes_what_overlaps_itself(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *own = tt_add_scalar(inputs.at[0], 1);
    tt_tensor *view = tt_as_strided(own, tt_shape(2, 4), *(tt_dims *)user, 0);
    tt_add_(view, tt_ones(tt_shape(2, 4), TUTTI_F32, NULL));
    outputs[0] = own;
    return 1;
}

TEST(writes_to_what_overlaps_itself_are_refused_as_in_eager_code) {
    tt_dims strides[] = { tt_shape(1, 1), tt_shape(2, 1), tt_shape(0, 1) };
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        EACH_MODE {
            tt_scope scope = tt_scope_open();
            tt_tensor *x = values(8), *eager;
            writes_what_overlaps_itself(tt_tensors(x), &eager, &strides[i]);
            CHECK(fails(TUTTI_ERROR_ARGUMENT, "share one memory location"));
            tt_compiled *fast = compile(writes_what_overlaps_itself, &strides[i], modes[mode]);
            CHECK(tt_compiled_call(fast, tt_tensors(x)).count == 0);
            CHECK(fails(TUTTI_ERROR_ARGUMENT, "share one memory location"));
            tt_compiled_release(&fast);
            CHECK_OK(tt_scope_close(&scope));
        }
}

static int prints(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    tt_print(outputs[0], user);
    return 1;
}

TEST(a_function_that_prints_runs_as_it_is_and_prints_at_each_call) {
    tt_scope scope = tt_scope_open();
    char *text = NULL;
    size_t bytes = 0;
    FILE *to = open_memstream(&text, &bytes);
    tt_compiled *fast;
    CHECK(tt_compile(prints, to, NULL, &fast));
    for (int i = 0; i < 2; i++)
        CHECK_EQ(tt_compiled_call(fast, tt_tensors(values(3))).count, 1);
    CHECK_EQ(fclose(to), 0);
    const char *first = strstr(text, "[");
    CHECK(first != NULL && strstr(first + 1, "[3]") != NULL && strstr(text, "no data") == NULL);
    CHECK(strncmp(text, text + bytes / 2, bytes / 2) == 0); /* twice the same */
    CHECK(counts_of(fast).eager == 2 && strstr(tt_compiled_reason(fast), "print") != NULL);
    CHECK(counts_of(fast).captures == 1 && counts_of(fast).entries == 0);
    tt_compiled_release(&fast);
    free(text);
    tt_compile_options options = TT_COMPILE_OPTIONS_INIT;
    options.full = true;
    CHECK(tt_compile(prints, stdout, &options, &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(values(3))).count == 0);
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT; /* which can be asked for with the error pending */
    CHECK(tt_compiled_count(fast, &counts) && counts.captures == 1 && counts.entries == 0);
    CHECK(fails(TUTTI_ERROR_CAPTURE, "print: argument x"));
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int fails_in_the_middle(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_module_set_parameter(user, "weight", tt_neg(tt_module_parameter(user, "weight")));
    tt_mul_scalar_(inputs.at[0], 3);
    outputs[0] = tt_add(inputs.at[0], tt_ones(tt_shape(7), TUTTI_F32, NULL));
    return 1;
}

TEST(a_function_that_fails_leaves_its_error_and_nothing_else) {
    tt_scope scope = tt_scope_open();
    tt_module *module = tt_linear_module(4, 3, false, TUTTI_F32);
    tt_tensor *before = tt_module_parameter(module, "weight"), *x = values(4);
    tt_compiled *fast;
    CHECK(tt_compile(fails_in_the_middle, module, NULL, &fast));
    for (int i = 0; i < 2; i++) {
        CHECK(tt_compiled_call(fast, tt_tensors(x)).count == 0);
        CHECK(fails(TUTTI_ERROR_ARGUMENT, "add"));
        CHECK(tt_module_parameter(module, "weight") == before && tt_equal(x, values(4)));
    }
    CHECK(counts_of(fast).entries == 0 && counts_of(fast).captures == 2);
    tt_compiled_release(&fast);
    tt_module_release(module);
    CHECK_OK(tt_scope_close(&scope));
}

/* Host numbers are frozen: what changes has to be a tensor. */
static int host_number(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_mul_scalar(inputs.at[0], *(double *)user);
    return 1;
}

TEST(a_number_of_the_host_is_frozen) {
    tt_scope scope = tt_scope_open();
    double factor = 2;
    tt_compiled *fast;
    CHECK(tt_compile(host_number, &factor, NULL, &fast));
    CHECK(tt_at(tt_compiled_call(fast, tt_tensors(values(3))).at[0], tt_shape(2)) == 6);
    factor = 5;
    CHECK(tt_at(tt_compiled_call(fast, tt_tensors(values(3))).at[0], tt_shape(2)) == 6);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int compiles(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_compiled *inner;
    (void)user;
    if (!tt_compile(double_it, NULL, NULL, &inner))
        return 0;
    outputs[0] = tt_compiled_call(inner, inputs).at[0];
    tt_compiled_release(&inner);
    return 1;
}

static int calls_other(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_add_scalar(tt_compiled_call(user, inputs).at[0], 1);
    return 1;
}

TEST(a_compiled_function_inside_another_becomes_part_of_it) {
    tt_scope scope = tt_scope_open();
    tt_compiled *inner, *outer;
    CHECK(tt_compile(double_it, NULL, NULL, &inner) && tt_compile(calls_other, inner, NULL, &outer));
    CHECK(tt_at(tt_compiled_call(outer, tt_tensors(values(3))).at[0], tt_shape(2)) == 7);
    CHECK(counts_of(outer).captures == 1 && counts_of(inner).captures == 0);
    CHECK_EQ(tt_graph_count_of(tt_compiled_graph(outer, TT_FORWARD), "mul_scalar"), 1);
    tt_compiled_release(&outer);
    tt_compiled_release(&inner);
    CHECK(tt_compile(compiles, NULL, NULL, &outer));
    CHECK(tt_at(tt_compiled_call(outer, tt_tensors(values(3))).at[0], tt_shape(2)) == 6);
    CHECK(counts_of(outer).eager == 1 && strstr(tt_compiled_reason(outer), "compile it outside") != NULL);
    tt_compiled_release(&outer);
    CHECK_OK(tt_scope_close(&scope));
}

static int calls_itself(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_add_scalar(tt_compiled_call(*(tt_compiled **)user, inputs).at[0], 1);
    return 1;
}

TEST(a_compiled_function_that_calls_itself_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_compiled *first, *second, *other;
    for (int full = 0; full < 2; full++) {
        tt_compile_options options = { .size = sizeof options, .full = full != 0, .name = "circle" };
        CHECK(tt_compile(calls_itself, &first, &options, &first));
        CHECK(tt_compiled_call(first, tt_tensors(values(3))).count == 0);
        CHECK(fails(TUTTI_ERROR_STATE, "compiled circle calls itself"));
        tt_compiled_release(&first);
        CHECK(tt_compile(calls_itself, &second, &options, &first) &&
              tt_compile(calls_itself, &first, &options, &second));
        CHECK(tt_compiled_call(first, tt_tensors(values(3))).count == 0);
        CHECK(fails(TUTTI_ERROR_STATE, "compiled circle calls itself"));
        CHECK(tt_compile(double_it, NULL, NULL, &other));
        CHECK(tt_at(tt_compiled_call(other, tt_tensors(values(3))).at[0], tt_shape(2)) == 6); /* others run as ever */
        tt_compiled_release(&first);
        tt_compiled_release(&second);
        tt_compiled_release(&other);
    }
    CHECK_OK(tt_scope_close(&scope));
}

static int too_many(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)inputs, (void)outputs, (void)user;
    return TT_GRAPH_OUTPUTS + 1;
}

/* Another structure at each call, from something that no guard sees: the first stays. */
static int changes_structure(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    int *calls = user;
    outputs[0] = (*calls)++ % 2 == 0 ? tt_sin(inputs.at[0]) : tt_cos(inputs.at[0]);
    return 1;
}

TEST(a_structure_that_depends_on_nothing_that_is_guarded_is_frozen_too) {
    tt_scope scope = tt_scope_open();
    int calls = 0;
    tt_compiled *fast;
    CHECK(tt_compile(changes_structure, &calls, NULL, &fast));
    for (int i = 0; i < 3; i++)
        CHECK(tt_equal(tt_compiled_call(fast, tt_tensors(values(3))).at[0], tt_sin(values(3))));
    CHECK_EQ(calls, 1);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- modes of the thread ---- */

static void *pack(void *user, tt_tensor *tensor) {
    (*(int *)user)++;
    return tt_keep(tensor);
}
static tt_tensor *unpack(void *user, void *packed) {
    (void)user;
    return packed;
}
static void unkeep(void *user, void *packed) {
    (void)user;
    tt_release(packed);
}

static int sin_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sum(tt_sin(inputs.at[0]));
    return 1;
}

TEST(what_only_operators_know_about_makes_the_function_run_as_it_is) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(sin_of, NULL, NULL, &fast));
    tt_tensor *x = tt_require_grad(values(3), true);
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(x)).count, 1);
    int packs = 0;
    tt_saved_hooks hooks = { sizeof hooks, pack, unpack, unkeep, &packs };
    CHECK(tt_saved_hooks_push(&hooks));
    tt_tensor *loss = tt_compiled_call(fast, tt_tensors(x)).at[0];
    tt_saved_hooks_pop();
    CHECK(packs == 1 && tt_backward(loss, NULL));
    CHECK(strstr(tt_compiled_reason(fast), "saved-tensor hooks") != NULL);
    tt_anomaly_mode(true);
    CHECK(tt_compiled_call(fast, tt_tensors(tt_full(tt_shape(3), INFINITY, TUTTI_F32, NULL))).count == 0);
    tt_anomaly_mode(false);
    CHECK(fails(TUTTI_ERROR_STATE, "NaN"));
    CHECK(strstr(tt_compiled_reason(fast), "anomaly mode") != NULL);
    CHECK(counts_of(fast).eager == 2 && counts_of(fast).captures == 1);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- arguments ---- */

TEST(wrong_arguments_are_errors_that_name_them) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = NULL;
    tt_tensor *x = values(3);
    CHECK(!tt_compile(NULL, NULL, NULL, &fast) && fails(TUTTI_ERROR_ARGUMENT, "function is NULL"));
    CHECK(!tt_compile(double_it, NULL, NULL, NULL) && fails(TUTTI_ERROR_ARGUMENT, "compiled is NULL"));
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .mode = (tt_compile_mode)7), &fast));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "mode is 7") && fast == NULL);
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .dynamic = 3), &fast));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "dynamic is 3"));
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .skip = "dead, magic"), &fast));
    CHECK(fails(TUTTI_ERROR_NOT_FOUND, "skip: there is no pass \"magic\""));
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .with = "one_shot=many"), &fast));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "with: \"many\" behind the pass one_shot is no number of bytes"));
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .skip = "bucket=many"), &fast));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "skip: \"many\" behind the pass bucket is no number of bytes"));
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .skip = "dead,bucket=5"), &fast));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "skip: \"bucket=5\" has a limit"));
    CHECK(!tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .name = "a/b"), &fast));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "name is \"a/b\""));
    CHECK(tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .skip = "dead,common", .with = "functional"),
                     &fast));
    CHECK(tt_at(tt_compiled_call(fast, tt_tensors(x)).at[0], tt_shape(2)) == 6);
    CHECK(tt_compiled_call(NULL, tt_tensors(x)).count == 0 && fails(TUTTI_ERROR_ARGUMENT, "compiled is NULL"));
    CHECK(tt_compiled_call(fast, (tt_tensor_list){ 1, NULL }).count == 0 &&
          fails(TUTTI_ERROR_ARGUMENT, "list is NULL"));
    tt_tensor *nothing = NULL;
    CHECK(tt_compiled_call(fast, tt_tensors_of(1, &nothing)).count == 0 && fails(TUTTI_ERROR_ARGUMENT, "inputs"));
    CHECK(tt_compiled_graph(fast, (tt_direction)0) == NULL && fails(TUTTI_ERROR_ARGUMENT, "direction is 0"));
    CHECK(tt_compiled_graph(NULL, TT_FORWARD) == NULL && fails(TUTTI_ERROR_ARGUMENT, "compiled is NULL"));
    CHECK(!tt_compiled_count(fast, NULL) && fails(TUTTI_ERROR_ARGUMENT, "counts is NULL"));
    tt_compiled_release(&fast);
    tt_compiled_release(&fast);
    tt_compiled_release(NULL);
    CHECK(tt_compile(too_many, NULL, NULL, &fast) && tt_compiled_call(fast, tt_tensors(x)).count == 0);
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "257 results"));
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int linear_loss(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_sum(tt_tanh(tt_module_call(user, inputs.at[0])));
    outputs[1] = tt_mul_scalar(outputs[0], 2);
    return 2;
}

static tutti_status compile_and_run(void *argument) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = NULL;
    tt_tensor *x = tt_reshape(values(8), tt_shape(2, 4));
    if (tt_compile(linear_loss, argument, TUTTI_OPTIONS(tt_compile_options, .full = true), &fast)) {
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
        if (results.count == 2)
            tt_backward(results.at[1], NULL);
        results = tt_compiled_call(fast, tt_tensors(x));
        if (results.count == 2)
            tt_backward(tt_add(results.at[0], results.at[1]), NULL);
    }
    tt_compiled_release(&fast);
    return tt_scope_close(&scope);
}

TEST(an_allocation_that_fails_ends_a_call_and_leaves_nothing) {
    CHECK(tt_default_device_set(test_device()));
    tt_module *module = tt_linear_module(4, 3, true, TUTTI_F32);
    CHECK_OK(compile_and_run(module));
    tt_module_zero_grad(module);
    tt_counts before = TT_COUNTS_INIT, after = TT_COUNTS_INIT;
    CHECK_OK(tt_count(&before));
    test_fail_each("malloc,calloc,realloc,strdup", compile_and_run, module);
    tt_module_zero_grad(module);
    CHECK_OK(tt_count(&after));
    CHECK(after.tensors == before.tensors && after.storages == before.storages && after.nodes == before.nodes);
    tt_module_release(module);
}

/* ---- looking inside ---- */

static int count_files(const char *folder, const char *part) {
    int count = 0;
    DIR *open = opendir(folder);
    CHECK(open != NULL);
    for (struct dirent *file; (file = readdir(open)) != NULL;)
        count += strstr(file->d_name, part) != NULL;
    closedir(open);
    return count;
}

static void empty_folder(const char *folder) {
    DIR *open = opendir(folder);
    char path[1024];
    for (struct dirent *file; open != NULL && (file = readdir(open)) != NULL;) {
        snprintf(path, sizeof path, "%s/%s", folder, file->d_name);
        if (file->d_name[0] != '.')
            unlink(path);
    }
    closedir(open);
    rmdir(folder);
}

TEST(graphs_are_written_before_and_after_each_pass) {
    char above[] = "/tmp/tutti-compile-XXXXXX", folder[64];
    CHECK(mkdtemp(above) != NULL);
    snprintf(folder, sizeof folder, "%s/made", above); /* which is not there yet */
    setenv("TUTTI_COMPILE_DIR", folder, 1);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(sin_of, NULL, TUTTI_OPTIONS(tt_compile_options, .name = "wave"), &fast));
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(tt_require_grad(values(3), true))).count, 1);
    CHECK_EQ(count_files(folder, "wave.1.forward.00-captured.graph"), 1);
    CHECK_EQ(count_files(folder, "wave.1.backward.00-captured.graph"), 1);
    CHECK(count_files(folder, "-dead.graph") == 2 && count_files(folder, "-sink.graph") == 2);
    /* Another function of that name, and its second capture. */
    tt_compiled *other;
    CHECK(tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .name = "wave"), &other));
    CHECK(tt_compiled_call(other, tt_tensors(values(3))).count == 1);
    CHECK(tt_compiled_call(other, tt_tensors(tt_to(values(3), TUTTI_F64))).count == 1);
    CHECK_EQ(count_files(folder, "wave.1.forward.00-captured.graph"), 1);
    CHECK_EQ(count_files(folder, "wave-2.1.forward.00-captured.graph"), 1);
    CHECK_EQ(count_files(folder, "wave-2.2.forward.00-captured.graph"), 1);
    tt_compiled_release(&other);
    tt_compiled_release(&fast);
    unsetenv("TUTTI_COMPILE_DIR");
    empty_folder(folder);
    CHECK_EQ(rmdir(above), 0);
    CHECK_OK(tt_scope_close(&scope));
}

static int returns_its_loss(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_sum(tt_square(tt_mul(inputs.at[0], user)));
    tt_backward(outputs[0], NULL);
    return 1;
}

TEST(a_function_that_runs_a_backward_and_returns_its_loss_is_told_to_detach_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *weight = tt_parameter(values(3), true);
    for (int full = 0; full < 2; full++) {
        tt_compiled *fast;
        tt_compile_options options = TT_COMPILE_OPTIONS_INIT;
        options.full = full == 1;
        CHECK(tt_compile(returns_its_loss, weight, &options, &fast));
        CHECK(tt_compiled_call(fast, tt_tensors(values(3))).count == (full == 0 ? 1 : 0));
        if (full == 1)
            CHECK(fails(TUTTI_ERROR_GRAPH, "return it detached (tt_detach)"));
        CHECK(strstr(tt_compiled_reason(fast), "return it detached (tt_detach)") != NULL);
        tt_compiled_release(&fast);
    }
    CHECK_OK(tt_scope_close(&scope));
}

TEST(every_call_can_be_compared_with_eager_code) {
    setenv("TUTTI_COMPILE_COMPARE", "1", 1);
    for (int strict = 0; strict < 2; strict++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        tt_module *module = tt_linear_module(4, 3, true, TUTTI_F32);
        CHECK(tt_compile(linear_loss, module, TUTTI_OPTIONS(tt_compile_options, .strict = strict != 0), &fast));
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = tt_reshape(tt_mul_scalar(values(8), 0.1 + i), tt_shape(2, 4)), *expected[2];
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            linear_loss(tt_tensors(x), expected, module);
            CHECK(results.count == 2 && tt_equal(tt_detach(results.at[0]), tt_detach(expected[0])));
            CHECK(tt_backward(tt_add(results.at[0], results.at[1]), NULL));
        }
        tt_compiled_release(&fast);
        tt_module_release(module);
        CHECK_OK(tt_scope_close(&scope));
    }
    unsetenv("TUTTI_COMPILE_COMPARE");
}

/* What the library says on stderr while the functions are called. */
static void said_by(tt_compiled *const *list, int count, char *text, size_t size) {
    char path[] = "/tmp/tutti-said-XXXXXX";
    int before = dup(2), to = mkstemp(path);
    CHECK(before >= 0 && to >= 0 && unlink(path) == 0 && dup2(to, 2) == 2);
    for (int i = 0; i < count; i++)
        CHECK_EQ(tt_compiled_call(list[i], tt_tensors(values(3 + i))).count, 1);
    CHECK(dup2(before, 2) == 2);
    ssize_t length = pread(to, text, size - 1, 0);
    text[length > 0 ? length : 0] = 0;
    close(to);
    close(before);
}

TEST(passes_that_were_asked_for_and_find_nothing_are_told_of_once) {
    tt_scope scope = tt_scope_open();
    tt_compiled *asked, *other;
    char text[4096];
    CHECK(tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .with = "gather_matmul", .name = "lonely"),
                     &asked));
    CHECK(tt_compile(double_it, NULL, TUTTI_OPTIONS(tt_compile_options, .name = "silent"), &other));
    said_by((tt_compiled *const[]){ asked, asked, other }, 3, text, sizeof text);
    const char *found = strstr(text, "compiled lonely: gather_matmul and matmul_scatter found no collective to fuse");
    if (found == NULL || strstr(found + 1, "compiled lonely") != NULL)
        FAIL("the log is: %s", text);
    tt_compiled_release(&asked);
    tt_compiled_release(&other);
    CHECK_OK(tt_scope_close(&scope));
}

/* Of 9 files and more of each function the first is told of; the results are there. */
TEST(a_folder_for_graphs_that_cannot_be_written_is_told_of_once) {
    static const char *const folders[] = { "/dev/null/at/all", "/dev/null" };
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *one, *two;
        char text[4096];
        setenv("TUTTI_COMPILE_DIR", folders[i], 1);
        CHECK(tt_compile(double_it, NULL, NULL, &one) && tt_compile(double_it, NULL, NULL, &two));
        said_by((tt_compiled *const[]){ one, one, two }, 3, text, sizeof text);
        const char *found = strstr(text, "cannot be written");
        if (i == 0 ? found == NULL || strstr(text, folders[i]) == NULL || strstr(found + 1, "cannot be written") != NULL
                   : found != NULL)
            FAIL("the log is: %s", text);
        CHECK(counts_of(one).captures == 2 && counts_of(one).eager == 0 && counts_of(two).captures == 1);
        tt_compiled_release(&one);
        tt_compiled_release(&two);
        unsetenv("TUTTI_COMPILE_DIR");
        CHECK_OK(tt_scope_close(&scope));
    }
}
