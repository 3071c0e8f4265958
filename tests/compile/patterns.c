/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns of distributed training, compiled: hooks with closures, storage that comes and goes, versions that are
 * hidden, module hooks, a fully sharded step, parameters made inside functions. Each runs in every mode, with the exact
 * values that eager code has.
 */
#include <tutti/backward.h>

#include "../loops/programs.h"
#include "../tensor/patterns.h"
#include "quick.h"

/* ---- hooks that close over arguments and intermediates ---- */

static _Thread_local int hook_runs;
static tt_tensor *closure_hook(const tt_hook_context *context, tt_tensor *grad) {
    CHECK(!tt_grad_enabled());
    hook_runs++;
    return tt_add(tt_add(grad, context->captured.at[0]), context->captured.at[1]);
}

static int with_closure(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *y = tt_sin(inputs.at[0]);
    tt_hook_tensor(y, closure_hook, NULL,
                   TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(inputs.at[1], tt_add_scalar(y, 1))), NULL);
    outputs[0] = tt_sin(y);
    return 1;
}

TEST(a_hook_on_an_intermediate_is_part_of_the_backward_with_what_it_closes_over) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(with_closure, NULL, modes[mode]);
        hook_runs = 0;
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
            tt_tensor *val = tt_full(tt_shape(), i == 0 ? 88 : 99, TUTTI_I64, NULL);
            tt_backward(tt_sum(tt_compiled_call(fast, tt_tensors(x, val)).at[0]), NULL);
            for (int k = 0; k < 4; k++)
                CHECK(near(tt_at(tt_grad(x), tt_shape(k)), i == 0 ? 48.9015934 : 54.8449188));
            CHECK_EQ(tt_dtype(tt_grad(x)), TUTTI_F32);
        }
        CHECK(hook_runs == 1 && counts_of(fast).captures == 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* ---- storage ---- */

static int shrink(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *y = tt_sin(inputs.at[0]);
    tt_storage_resize(inputs.at[0], 0);
    outputs[0] = tt_cos(y);
    return 1;
}

TEST(a_tensor_freed_in_the_middle_leaves_what_was_computed_from_it) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        bool was = tt_grad_mode(false);
        tt_compiled *fast = compile(shrink, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = tt_randn(tt_shape(10), TUTTI_F32, NULL), *expected = tt_cos(tt_sin(x));
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            CHECK(results.count == 1 && tt_equal(results.at[0], expected) && tt_storage_bytes(x) == 0);
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        tt_grad_mode(was);
        done(&scope);
    }
}

static int grow(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user, (void)outputs;
    tt_tensor *y = tt_sin(inputs.at[0]), *out = inputs.at[1];
    if (tt_storage_bytes(out) != 0)
        tt_error_set(TUTTI_ERROR_STATE, "out is not freed");
    tt_storage_resize(out, tt_storage_bytes(inputs.at[0]));
    tt_copy_(out, tt_cos(y));
    return 0;
}

TEST(a_freed_output_is_grown_and_filled) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        bool was = tt_grad_mode(false);
        tt_compiled *fast = compile(grow, NULL, modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = tt_randn(tt_shape(10), TUTTI_F32, NULL), *out = tt_randn(tt_shape(10), TUTTI_F32, NULL);
            tt_storage_resize(out, 0);
            CHECK_EQ(tt_compiled_call(fast, tt_tensors(x, out)).count, 0);
            CHECK(tt_storage_bytes(out) == 40 && tt_equal(out, tt_cos(tt_sin(x))));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_tensor *x = tt_randn(tt_shape(10), TUTTI_F32, NULL), *full = tt_randn(tt_shape(10), TUTTI_F32, NULL);
        tt_compiled_call(fast, tt_tensors(x, full)); /* the size is a guard: the function itself says what is wrong */
        CHECK(tt_error_show() == TUTTI_ERROR_STATE && strstr(tutti_error_message(), "out is not freed") != NULL);
        tt_error_clear();
        CHECK_EQ(counts_of(fast).misses[TT_MISS_STORAGE], 1);
        tt_compiled_release(&fast);
        tt_grad_mode(was);
        done(&scope);
    }
}

/* ---- versions ---- */

static int set_back(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *w = inputs.at[0], *x = tt_sin(inputs.at[1]);
    int64_t version = tt_version(w);
    tt_copy_(w, tt_add_scalar(x, 1));
    tt_set_version(tt_tensors(w), 1, &version);
    outputs[0] = w;
    return 1;
}

static int preserve(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *w = inputs.at[0], *x = tt_sin(inputs.at[1]);
    tt_preserve *kept = tt_preserve_begin(tt_tensors(w));
    tt_copy_(w, tt_add_scalar(x, 1));
    tt_preserve_end(kept);
    outputs[0] = w;
    return 1;
}

TEST(a_version_that_is_set_back_hides_the_copy_whatever_it_is) {
    static const int counts[] = { 3, 0, 1 };
    static tt_compile_function *const functions[] = { set_back, preserve };
    EACH_MODE for (int k = 0; k < 2; k++) {
        tt_scope scope = tt_scope_open();
        bool was = tt_grad_mode(false);
        tt_compiled *fast = compile(functions[k], NULL, modes[mode]);
        for (int i = 0; i < 3; i++) {
            tt_tensor *w = tt_randn(tt_shape(16), TUTTI_F32, NULL), *x = tt_randn(tt_shape(16), TUTTI_F32, NULL);
            for (int fill = 0; fill < counts[i]; fill++)
                tt_fill_(w, fill);
            CHECK_EQ(tt_version(w), counts[i]);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(w, x));
            CHECK(results.count == 1 && results.at[0] == w && tt_equal(w, tt_add_scalar(tt_sin(x), 1)));
            CHECK_EQ((int)tt_version(w), counts[i]);
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        tt_grad_mode(was);
        done(&scope);
    }
}

static int refill(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const char *how = user;
    tt_tensor *w = inputs.at[0];
    outputs[0] = tt_sin(w);
    bool was = tt_grad_mode(false);
    int64_t version = tt_version(w);
    tt_preserve *kept = how[0] == 'p' ? tt_preserve_begin(tt_tensors(w)) : NULL;
    tt_copy_(w, inputs.at[1]);
    tt_preserve_end(kept);
    if (how[0] == 's')
        tt_set_version(tt_tensors(w), 1, &version);
    tt_grad_mode(was);
    return 1;
}

TEST(a_refilled_weight_gives_the_derivative_at_its_new_content) {
    static const char *const ways[] = { "set", "preserve" };
    EACH_MODE for (int k = 0; k < 2; k++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(refill, (void *)ways[k], modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *w = tt_full(tt_shape(1), 0.3 + i, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
            tt_tensor *x = tt_full(tt_shape(1), 1.1 + i, TUTTI_F32, NULL);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(w, x));
            CHECK(results.count == 1 && near(tt_item(results.at[0]), sin(0.3 + i)) && tt_equal(tt_detach(w), x));
            CHECK(tt_backward(results.at[0], NULL));
            CHECK(near(tt_item(tt_grad(w)), cos(1.1 + i)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* The engine refuses while the backward is captured, so the function runs as it is, and its own backward refuses. */
TEST(without_hiding_the_version_backward_refuses) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(refill, "nothing", NULL, &fast));
    tt_tensor *w = tt_full(tt_shape(1), 0.3, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
    tt_tensor_list results = tt_compiled_call(fast, tt_tensors(w, tt_full(tt_shape(1), 1.1, TUTTI_F32, NULL)));
    CHECK(results.count == 1 && near(tt_item(results.at[0]), sin(0.3)));
    CHECK(counts_of(fast).eager == 1 && strstr(tt_compiled_reason(fast), "is at version") != NULL);
    CHECK(!tt_backward(results.at[0], NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_VERSION);
    tt_error_clear();
    tt_compiled_release(&fast);
    done(&scope);
}

/* What the backward reads of an input it reads then, as eager code would: a change that is not hidden is an error. */
static int keep_weight(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sum(tt_sin(inputs.at[0]));
    return 1;
}

TEST(an_input_that_is_changed_between_forward_and_backward_is_found) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(keep_weight, NULL, modes[mode]);
        tt_tensor *w = tt_full(tt_shape(3), 0.3, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
        tt_tensor *loss = tt_compiled_call(fast, tt_tensors(w)).at[0];
        bool was = tt_grad_mode(false);
        tt_fill_(w, 2);
        tt_grad_mode(was);
        CHECK(!tt_backward(loss, NULL));
        CHECK(tt_error_show() == TUTTI_ERROR_VERSION && strstr(tutti_error_message(), "function") != NULL);
        tt_error_clear();
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* ---- module hooks ---- */

static int call_module(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_module_call(user, inputs.at[0]);
    return 1;
}

static tt_tensor *steps(tt_compiled *fast, tt_tensor *input) {
    tt_tensor *out = NULL;
    for (int i = 0; i < 4; i++) {
        out = tt_compiled_call(fast, tt_tensors(input)).at[0];
        tt_backward(tt_sum(out), NULL);
    }
    return out;
}

TEST(module_backward_hooks_are_in_the_graph_and_run_on_the_host_once) {
    EACH_MODE {
        hook_calls = 0;
        tt_scope scope = tt_scope_open();
        counted c = { 0 };
        make_counted(&c);
        tt_tensor *input = ramp(2, 10, 0.05), *out;
        tt_compiled *fast = compile(call_module, c.module, modes[mode]);
        out = steps(fast, input);
        CHECK(hook_calls == 2 && counts_of(fast).captures == 1);
        check_counted(&c, input, out);
        tt_compiled_release(&fast);
        tt_module_release(c.module);
        done(&scope);
    }
}

TEST(module_hooks_of_two_layers_keep_their_order) {
    EACH_MODE {
        char log[64] = { 0 }, *at = log;
        tt_scope scope = tt_scope_open();
        counted a = { .letters = "aA", .log = &at }, b = { .letters = "bB", .log = &at };
        make_counted(&a);
        make_counted(&b);
        tt_module *layers[] = { tt_module_keep(a.module), tt_module_keep(b.module) };
        tt_module *both = tt_sequential_module(2, layers);
        tt_tensor *input = ramp(2, 10, 0.05), *out;
        tt_compiled *fast = compile(call_module, both, modes[mode]);
        out = steps(fast, input);
        CHECK_EQ(counts_of(fast).captures, 1);
        CHECK_TEXT(log, "bBaA");
        check_layers(&a, &b, input, out);
        tt_compiled_release(&fast);
        tt_module_release(both);
        tt_module_release(a.module);
        tt_module_release(b.module);
        done(&scope);
    }
}

/* ---- a fully sharded step, with the communication replaced by copies ---- */

/* Nothing in the data flow says that the weight's gradient must be there before the module's hook looks for it: the
 * order of the engine does, and the graph keeps it. */
TEST(a_fully_sharded_step_gives_exact_values_and_keeps_its_invariants) {
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        sharded s;
        make_sharded(&s);
        tt_tensor *input = ramp(2, 20, 0.02), *out = NULL;
        tt_compiled *fast = compile(call_module, s.module, modes[mode]);
        for (int step = 1; step <= 4; step++) {
            out = tt_compiled_call(fast, tt_tensors(input)).at[0];
            CHECK(tt_module_parameter(s.module, "weight") == s.shard && tt_storage_bytes(s.whole) == 0);
            tt_backward(tt_sum(out), NULL);
            CHECK(found_gradient && tt_module_parameter(s.module, "weight") == s.shard &&
                  tt_storage_bytes(s.whole) == 0);
            CHECK(near(tt_at(tt_grad(s.shard), tt_shape(0, 0)),
                       0.4 * step)); /* assigned each time, from a gradient that grows */
        }
        check_sharded(&s, input, out);
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        tt_module_release(s.module);
        done(&scope);
    }
}

/* ---- parameters made inside functions ---- */

typedef struct making {
    double plus;
    bool requires_grad;
} making;

static int make_parameter(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const making *how = user;
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_parameter(how->plus != 0 ? tt_add_scalar(x, how->plus) : x, how->requires_grad);
    outputs[1] = how->requires_grad ? tt_sin(outputs[0]) : tt_add_scalar(x, 1);
    return 2;
}

TEST(a_parameter_made_in_a_function_is_a_leaf_that_collects_its_gradient) {
    static making ways[] = { { 0, true }, { 0, false }, { 123, true }, { 123, false } };
    EACH_MODE for (int k = 0; k < 4; k++) {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast = compile(make_parameter, &ways[k], modes[mode]);
        for (int i = 0; i < 2; i++) {
            tt_tensor *x = tt_randn(tt_shape(16), TUTTI_F32, NULL), *whole = tt_add_scalar(x, ways[k].plus);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
            CHECK_EQ(results.count, 2);
            tt_tensor *p = results.at[0];
            CHECK(tt_is_parameter(p) && tt_is_leaf(p) && tt_requires_grad(p) == ways[k].requires_grad);
            CHECK(tt_same_storage(p, x) == (ways[k].plus == 0) && tt_equal(tt_detach(p), whole));
            if (ways[k].requires_grad) {
                CHECK(tt_backward(tt_sum(results.at[1]), NULL));
                CHECK(tt_allclose(tt_grad(p), tt_cos(whole), 1.3e-6, 1e-5));
            } else {
                CHECK(tt_grad(p) == NULL && tt_equal(results.at[1], tt_add_scalar(x, 1)));
            }
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        done(&scope);
    }
}

/* ---- on several ranks ---- */

static void (*const patterns[])(void) = { a_hook_on_an_intermediate_is_part_of_the_backward_with_what_it_closes_over,
                                          a_tensor_freed_in_the_middle_leaves_what_was_computed_from_it,
                                          a_freed_output_is_grown_and_filled,
                                          a_version_that_is_set_back_hides_the_copy_whatever_it_is,
                                          a_refilled_weight_gives_the_derivative_at_its_new_content,
                                          module_backward_hooks_are_in_the_graph_and_run_on_the_host_once,
                                          module_hooks_of_two_layers_keep_their_order,
                                          a_fully_sharded_step_gives_exact_values_and_keeps_its_invariants,
                                          a_parameter_made_in_a_function_is_a_leaf_that_collects_its_gradient };

/* Beside each other, each after a barrier; tests/parallel has those whose ranks talk to each other. */
static void all_patterns(tutti_world *world) {
    has_company = true;
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
        patterns[i]();
    }
}

TEST_WORLD(every_pattern_has_its_values_on_each_of_two_ranks, 2) {
    all_patterns(world);
}

TEST_WORLD(every_pattern_has_its_values_on_each_of_four_ranks, 4) {
    all_patterns(world);
}

static int built_files;
static int count_file(const char *path, const struct stat *about, int type, struct FTW *at) {
    (void)path, (void)at;
    built_files += type == FTW_F && about->st_size > 0;
    return 0;
}

/* What the emitter writes for the device has the values, too. On a GPU something is built for every pattern; what is
 * left of the sharded one on the CPU are products and copies. */
TEST_LIMIT(every_pattern_has_its_values_in_what_is_built, 600) {
    if (built_folder[0] == 0)
        SKIP("TEST_BUILT=1 has it built");
    const char *folder = own_folder();
    has_company = true; /* a compiler keeps what it has made */
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        int before = built_files;
        patterns[i]();
        built_files = 0;
        nftw(folder, count_file, 16, FTW_PHYS);
        if (built_files <= before && test_device() != TUTTI_CPU)
            FAIL("nothing was built for pattern %zu", i);
    }
    CHECK(built_files >= (int)(sizeof patterns / sizeof *patterns));
    remove_folder(folder);
}

/* ---- their graphs as texts ---- */

/* Graphs of a device are the same, with its name at every value. */
static void only_on_the_cpu(void) {
    if (test_device() != TUTTI_CPU)
        SKIP("texts are compared on the CPU");
}

static void check_text(const char *what, const tt_graph *graph, const char *expected) {
    char *text = tt_graph_text(graph);
    CHECK(text != NULL);
    if (strcmp(text, expected) != 0)
        FAIL("the graph of %s is\n%s\nand not\n%s", what, text, expected);
    free(text);
}

TEST(the_graphs_of_a_hook_with_a_closure_are_these) {
    only_on_the_cpu();
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = compile(with_closure, NULL, TT_COMPILE_SPLIT);
    tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
    tt_tensor *number = tt_full(tt_shape(), 88, TUTTI_I64, NULL);
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(x, number)).count, 1);
    check_text("its forward", tt_compiled_graph(fast, TT_FORWARD),
               "graph(input: f32 [4] grad, input_1: i64 []):\n"
               "    sin: f32 [4] = sin(input)\n"
               "    add_scalar: f32 [4] = add_scalar(sin, number=1)\n"
               "    sin_1: f32 [4] = sin(sin)\n"
               "    return (sin_1, sin, add_scalar)\n");
    check_text("its backward", tt_compiled_graph(fast, TT_BACKWARD),
               "graph(input: f32 [4] saved grad, input_1: i64 [] saved, sin: f32 [4] saved, "
               "add_scalar: f32 [4] saved, tangent: f32 [4] tangent):\n"
               "    cos: f32 [4] = cos(sin)\n"
               "    mul: f32 [4] = mul(tangent, cos)\n"
               "    add: f32 [4] = add(mul, input_1)\n"
               "    add_1: f32 [4] = add(add, add_scalar)\n"
               "    cos_1: f32 [4] = cos(input)\n"
               "    mul_1: f32 [4] = mul(add_1, cos_1)\n"
               "    return (mul_1)\n");
    tt_compiled_release(&fast);
    done(&scope);
}

TEST(the_graphs_of_storage_and_versions_are_these) {
    only_on_the_cpu();
    static const struct {
        const char *name;
        tt_compile_function *function;
        const char *text;
    } functions[] = { { "shrink", shrink,
                        "graph(input: f32 [10]):\n"
                        "    sin: f32 [10] = sin(input)\n"
                        "    storage_resize(input, bytes=0)\n"
                        "    cos: f32 [10] = cos(sin)\n"
                        "    return (cos)\n" },
                      { "grow", grow,
                        "graph(input: f32 [10], input_1: f32 [10]):\n"
                        "    sin: f32 [10] = sin(input)\n"
                        "    storage_resize(input_1, bytes=40)\n"
                        "    cos: f32 [10] = cos(sin)\n"
                        "    copy_(input_1, cos)\n"
                        "    return ()\n" },
                      { "set_back", set_back,
                        "graph(input: f32 [10], input_1: f32 [10]):\n"
                        "    sin: f32 [10] = sin(input_1)\n"
                        "    version_get(input)\n"
                        "    add_scalar: f32 [10] = add_scalar(sin, number=1)\n"
                        "    copy_(input, add_scalar)\n"
                        "    version_set([input], versions=[-1])\n"
                        "    return (input)\n" } };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        tt_scope scope = tt_scope_open();
        bool was = tt_grad_mode(false);
        tt_compiled *fast = compile(functions[i].function, NULL, TT_COMPILE_SPLIT);
        tt_tensor *x = tt_ones(tt_shape(10), TUTTI_F32, NULL), *out = tt_ones(tt_shape(10), TUTTI_F32, NULL);
        if (functions[i].function == grow)
            tt_storage_resize(out, 0);
        tt_compiled_call(fast, functions[i].function == shrink ? tt_tensors(x) : tt_tensors(x, out));
        check_text(functions[i].name, tt_compiled_graph(fast, TT_FORWARD), functions[i].text);
        tt_compiled_release(&fast);
        tt_grad_mode(was);
        done(&scope);
    }
}

TEST(the_graphs_of_a_refilled_weight_are_these) {
    only_on_the_cpu();
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = compile(refill, "set", TT_COMPILE_SPLIT);
    tt_tensor *w = tt_full(tt_shape(1), 0.3, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(w, tt_full(tt_shape(1), 1.1, TUTTI_F32, NULL))).count, 1);
    check_text("its forward", tt_compiled_graph(fast, TT_FORWARD),
               "graph(input: f32 [1] grad, input_1: f32 [1]):\n"
               "    sin: f32 [1] = sin(input)\n"
               "    version_get(input)\n"
               "    copy_(input, input_1)\n"
               "    version_set([input], versions=[-1])\n"
               "    return (sin)\n");
    check_text("its backward", tt_compiled_graph(fast, TT_BACKWARD),
               "graph(input: f32 [1] saved grad, tangent: f32 [1] tangent):\n"
               "    cos: f32 [1] = cos(input)\n"
               "    mul: f32 [1] = mul(tangent, cos)\n"
               "    return (mul)\n");
    tt_compiled_release(&fast);
    done(&scope);
}

static void read_text(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t length = fread(text, 1, size - 1, file);
    CHECK_EQ(fclose(file), 0);
    text[length] = 0;
}

/* As it was captured, before passes. The first graph sets gradients, the second adds to them; four steps need no more.
 */
TEST(the_graphs_of_a_module_with_hooks_are_these) {
    only_on_the_cpu();
    static const char *const texts[2] = {
        "graph(input: f32 [2, 10], weight: f32 [10, 10] parameter grad, bias: f32 [10] parameter "
        "grad, input_1: f32 [2, 10] grad shares input, constant: i64 [] constant, constant_1: i64 [] "
        "constant):\n"
        "    full: f32 [] = full(shape=[], value=1, dtype=f32, device=cpu)\n"
        "    view: f32 [1, 1] = view(full, shape=[1, 1])\n"
        "    expand: f32 [2, 10] strides [0, 0] = expand(view, shape=[2, 10])\n"
        "    add_scalar_(constant, number=1)\n"
        "    add_scalar: f32 [2, 10] = add_scalar(expand, number=1.2)\n"
        "    sin: f32 [2, 10] = sin(add_scalar)\n"
        "    matmul: f32 [2, 10] = matmul(sin, weight)\n"
        "    view_1: f32 [2, 10] = view(sin, shape=[2, 10])\n"
        "    view_2: f32 [2, 10] = view(input, shape=[2, 10])\n"
        "    transpose: f32 [10, 2] strides [1, 10] = transpose(view_1, a=0, b=1)\n"
        "    matmul_1: f32 [10, 10] = matmul(transpose, view_2)\n"
        "    sum_dims: f32 [10] = sum_dims(view_1, dims=[0], keep_dims=false)\n"
        "    clone: f32 [10, 10] = clone(matmul_1)\n"
        "    set_grad(weight, clone)\n"
        "    clone_1: f32 [10] = clone(sum_dims)\n"
        "    set_grad(bias, clone_1)\n"
        "    add_scalar_(constant_1, number=1)\n"
        "    add_scalar_1: f32 [2, 10] = add_scalar(matmul, number=3.4)\n"
        "    sin_1: f32 [2, 10] = sin(add_scalar_1)\n"
        "    clone_2: f32 [2, 10] = clone(sin_1)\n"
        "    set_grad(input_1, clone_2)\n"
        "    return ()\n",
        "graph(input: f32 [2, 10], weight: f32 [10, 10] parameter grad, bias: f32 [10] parameter "
        "grad, input_1: f32 [2, 10] grad shares input, constant: i64 [] constant, weight.grad: f32 "
        "[10, 10] gradient, bias.grad: f32 [10] gradient, constant_1: i64 [] constant, "
        "constant_grad: f32 [2, 10] gradient):\n"
        "    full: f32 [] = full(shape=[], value=1, dtype=f32, device=cpu)\n"
        "    view: f32 [1, 1] = view(full, shape=[1, 1])\n"
        "    expand: f32 [2, 10] strides [0, 0] = expand(view, shape=[2, 10])\n"
        "    add_scalar_(constant, number=1)\n"
        "    add_scalar: f32 [2, 10] = add_scalar(expand, number=1.2)\n"
        "    sin: f32 [2, 10] = sin(add_scalar)\n"
        "    matmul: f32 [2, 10] = matmul(sin, weight)\n"
        "    view_1: f32 [2, 10] = view(sin, shape=[2, 10])\n"
        "    view_2: f32 [2, 10] = view(input, shape=[2, 10])\n"
        "    transpose: f32 [10, 2] strides [1, 10] = transpose(view_1, a=0, b=1)\n"
        "    matmul_1: f32 [10, 10] = matmul(transpose, view_2)\n"
        "    sum_dims: f32 [10] = sum_dims(view_1, dims=[0], keep_dims=false)\n"
        "    add_(weight.grad, matmul_1)\n"
        "    add_(bias.grad, sum_dims)\n"
        "    add_scalar_(constant_1, number=1)\n"
        "    add_scalar_1: f32 [2, 10] = add_scalar(matmul, number=3.4)\n"
        "    sin_1: f32 [2, 10] = sin(add_scalar_1)\n"
        "    add_(constant_grad, sin_1)\n"
        "    return ()\n"
    };
    tt_scope scope = tt_scope_open();
    counted one = { 0 };
    make_counted(&one);
    tt_tensor *input = ramp(2, 10, 0.05);
    tt_backward_cache *cache;
    CHECK(tt_backward_cache_new(NULL, &cache) && tt_backward_compiled_begin(cache));
    const char *folder = own_folder();
    setenv("TUTTI_COMPILE_DIR", folder, 1);
    for (int step = 0; step < 4; step++)
        CHECK(tt_backward(tt_sum(tt_module_call(one.module, input)), NULL));
    unsetenv("TUTTI_COMPILE_DIR");
    for (int step = 0; step < 2; step++) {
        char path[PATH_MAX + 64], text[4096];
        snprintf(path, sizeof path, "%s/backward.%d.traced.00-captured.graph", folder, step + 1);
        read_text(path, text, sizeof text);
        CHECK_TEXT(text, texts[step]);
    }
    CHECK(tt_backward_compiled_end());
    remove_folder(folder);
    tt_backward_cache_release(&cache);
    tt_module_release(one.module);
    done(&scope);
}
