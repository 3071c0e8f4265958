/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that fuse collectives with matrix products: which patterns they take, which they leave, and that the numbers
 * stay the same; on the device that TEST_DEVICE names, where it names one. All numbers are small and whole, so that
 * sums are exact in any order.
 */
#include <tutti/fused.h>
#include <tutti/tensors.h>

#include "../harness.h"
#define TEST_ON_DEVICE
#include "../tensor/device.h"

/* Ranks that are threads need a stream of a device each. */
typedef struct place {
    tt_scope scope;
    void *stream;
} place;

static place begin(void) {
    place here = { .scope = tt_scope_open() };
    if (test_device() == TUTTI_CPU)
        return here;
    here.stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), here.stream));
    return here;
}

static void end(place *here, tutti_group *group) {
    if (test_device() != TUTTI_CPU)
        tt_stream_release(test_device(), here->stream);
    CHECK_OK(tt_scope_close(&here->scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* How a function is called: the sizes of its inputs, and along which dimension it communicates. */
typedef struct form {
    tutti_group *group;
    int dim;
    tutti_reduction reduction;
    int64_t sizes[4];
    int ndim;
    bool linear, bias, flat, twice, keep;
    bool fast; /* of scaled products: use_fast_accum */
} form;

static tt_tensor *numbers(tt_dims shape, int start) {
    int64_t count = 1;
    for (int i = 0; i < shape.count; i++)
        count *= shape.at[i];
    tt_tensor *flat = tt_arange(start, start + count, 1, TUTTI_F32, NULL);
    return tt_reshape(tt_sub(flat, tt_mul_scalar(tt_floor(tt_mul_scalar(flat, 1.0 / 7)), 7)), shape);
}

static int check(tt_compile_function *function, const form *of, tt_tensor_list inputs, const char *pass,
                 const char *fused) {
    tt_graph *graph;
    tt_tensor *expected[TT_GRAPH_OUTPUTS];
    CHECK(tt_capture(function, (void *)of, inputs, &graph));
    CHECK(tt_graph_pass(graph, pass) && tt_graph_pass(graph, "dead"));
    if (!tt_graph_check(graph))
        FAIL("%s", tutti_error_message());
    int count = function(inputs, expected, (void *)of);
    tt_tensor_list results = tt_graph_run(graph, inputs);
    if (results.count != (size_t)count)
        FAIL("%s", tutti_error_message());
    for (int i = 0; i < count; i++) {
        CHECK(tt_equal(results.at[i], expected[i]));
        tt_dims strides = tt_strides(results.at[i]), wanted = tt_strides(expected[i]);
        for (int k = 0; k < strides.count; k++)
            CHECK(strides.at[k] == wanted.at[k] || tt_size(results.at[i], k) == 1);
    }
    char *text = tt_graph_text(graph);
    tt_graph *read = tt_graph_parse(text, tutti_group_world(of->group));
    CHECK(read != NULL);
    tutti_free(text);
    tt_graph_release(&read);
    int fusions = tt_graph_count_of(graph, fused);
    CHECK(fusions == 0 || tt_graph_count_of(graph, "wait") == 0);
    tt_graph_release(&graph);
    return fusions;
}

/* ---- all-gather, then products ---- */

static int gather_products(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *all = tt_all_gather(inputs.at[0], of->dim, of->group), *left = all;
    if (of->flat)
        left = tt_reshape(all, tt_shape(-1, tt_size(all, -1)));
    outputs[0] =
        of->linear ? tt_linear(left, inputs.at[1], of->bias ? inputs.at[2] : NULL) : tt_matmul(left, inputs.at[1]);
    outputs[1] = of->twice ? tt_relu(tt_matmul(all, tt_mul_scalar(inputs.at[1], 2))) : outputs[0];
    outputs[2] = of->keep ? tt_add_scalar(all, 1) : outputs[0];
    return 3;
}

static int fused_gathers(const form *of) {
    int rank = tutti_group_rank(of->group);
    int64_t depth = of->sizes[of->ndim - 1] * (of->dim == of->ndim - 1 ? tutti_group_size(of->group) : 1);
    tt_tensor *x = numbers(tt_dims_of(of->ndim, of->sizes), rank + 1);
    tt_tensor *weight = numbers(of->linear ? tt_shape(5, depth) : tt_shape(depth, 5), 3 + rank);
    tt_tensor *bias = numbers(tt_shape(5), 2);
    return check(gather_products, of, tt_tensors(x, weight, bias), "gather_matmul", "fused_all_gather_matmul");
}

TEST_WORLD(a_gather_is_fused_with_the_products_of_what_it_gathers, 2) {
    place here = begin();
    tutti_group *group = tutti_world_group(world);
    const form taken[] = {
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .keep = false },
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .keep = true },
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .twice = true },
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .twice = true, .keep = true },
        { group, -2, TUTTI_SUM, { 4, 6 }, 2, .linear = true },
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .linear = true, .bias = true },
        { group, 0, TUTTI_SUM, { 2, 4, 6 }, 3, .keep = true },
        { group, 0, TUTTI_SUM, { 2, 4, 6 }, 3, .flat = true },
        { group, 0, TUTTI_SUM, { 2, 4, 6 }, 3, .flat = true, .twice = true, .keep = true },
        { group, 1, TUTTI_SUM, { 2, 4, 6 }, 3, .twice = true },
        { group, 1, TUTTI_SUM, { 2, 4, 6 }, 3, .linear = true, .bias = true, .keep = true },
        { group, 1, TUTTI_SUM, { 3, 2, 2, 6 }, 4, .keep = true },
        { group, 2, TUTTI_SUM, { 3, 2, 2, 6 }, 4, .flat = true },
        { group, 1, TUTTI_SUM, { 2, 1024 }, 2, .twice = true }, /* the last dimension, of enough columns */
    };
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (fused_gathers(&taken[i]) != 1)
            FAIL("form %zu was not fused", i);
    end(&here, group);
}

static int right_depends(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *all = tt_all_gather(inputs.at[0], 0, of->group);
    outputs[0] = tt_matmul(all, tt_transpose(all, 0, 1));
    return 1;
}

static int right_operand(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    outputs[0] = tt_matmul(inputs.at[0], tt_all_gather(inputs.at[0], 0, of->group));
    return 1;
}

static int written_whole(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *all = tt_all_gather(inputs.at[0], 0, of->group);
    tt_mul_(all, tt_number(2));
    outputs[0] = tt_matmul(all, inputs.at[1]);
    return 1;
}

static int written_weight(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *all = tt_all_gather(inputs.at[0], 0, of->group), *weight = tt_neg(inputs.at[1]);
    outputs[1] = tt_relu(weight);
    tt_all_reduce_(weight, TUTTI_MAX, of->group);
    outputs[0] = tt_matmul(all, weight);
    return 2;
}

static int no_product(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_relu(tt_all_gather(inputs.at[0], 0, ((const form *)user)->group));
    return 1;
}

TEST_WORLD(a_gather_that_cannot_be_fused_stays, 2) {
    place here = begin();
    tutti_group *group = tutti_world_group(world);
    const form left[] = {
        { group, 1, TUTTI_SUM, { 4, 6 }, 2, .keep = false },    /* the last dimension, of few columns */
        { group, 2, TUTTI_SUM, { 2, 4, 6 }, 3, .keep = false }, /* likewise */
        { group, 1, TUTTI_SUM, { 2, 1024 }, 2, .keep = true },  /* the last, and somebody wants what is gathered */
        { group, 1, TUTTI_SUM, { 1, 4, 6 }, 3, .keep = false }, /* a gather of plain rows under another shape */
    };
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        if (fused_gathers(&left[i]) != 0)
            FAIL("form %zu was fused", i);
    tt_compile_function *functions[] = { right_depends, right_operand, written_whole, written_weight, no_product };
    const form of = { .group = group };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        tt_tensor_list inputs = tt_tensors(numbers(tt_shape(4, 8), 1), numbers(tt_shape(8, 3), 2));
        if (check(functions[i], &of, inputs, "gather_matmul", "fused_all_gather_matmul") != 0)
            FAIL("function %zu was fused", i);
    }
    end(&here, group);
}

/* What the second matrix is made of stands behind the gather, and comes up. */
static int late_weight(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *all = tt_all_gather(inputs.at[0], 0, of->group);
    tt_tensor *weight = tt_mul_scalar(tt_transpose(inputs.at[1], 0, 1), 2);
    outputs[0] = tt_matmul(all, weight);
    outputs[1] = tt_all_reduce(weight, TUTTI_SUM, of->group);
    return 2;
}

/* On a device every value of a graph has its name. */
static void leave_out_device(char *text) {
    char words[64];
    int length = snprintf(words, sizeof words, " on %s", tutti_device_name(test_device()));
    for (char *at = strstr(text, words); at != NULL; at = strstr(at, words))
        memmove(at, at + length, strlen(at + length) + 1);
}

TEST_WORLD(what_a_fused_product_needs_comes_up_and_collectives_keep_their_order, 2) {
    place here = begin();
    const form of = { .group = tutti_world_group(world) };
    tt_tensor *x = numbers(tt_shape(4, 8), 1), *weight = numbers(tt_shape(3, 8), 2);
    tt_set_name(x, "x");
    tt_set_name(weight, "w");
    CHECK_EQ(check(late_weight, &of, tt_tensors(x, weight), "dead", "fused_all_gather_matmul"), 0);
    tt_graph *graph;
    CHECK(tt_capture(late_weight, (void *)&of, tt_tensors(x, weight), &graph) && tt_graph_pass(graph, "gather_matmul"));
    char *text = tt_graph_text(graph);
    const char *expected = "graph(x: f32 [4, 8], w: f32 [3, 8]):\n"
                           "    transpose: f32 [8, 3] strides [1, 8] = transpose(w, a=0, b=1)\n"
                           "    mul_scalar: f32 [8, 3] strides [1, 8] = mul_scalar(transpose, number=2)\n"
                           "    fused_all_gather_matmul: f32 [0]; fused_all_gather_matmul_1: f32 [8, 3] = "
                           "fused_all_gather_matmul([x, mul_scalar], gather_dim=0, return_a=false, group=0)\n"
                           "    all_reduce: f32 [8, 3] = all_reduce(mul_scalar, reduction=sum, group=0)\n"
                           "    wait(all_reduce)\n"
                           "    return (fused_all_gather_matmul_1, all_reduce)\n";
    leave_out_device(text);
    if (strcmp(text, expected) != 0)
        FAIL("the graph is\n%s", text);
    tutti_free(text);
    tt_graph_release(&graph);
    end(&here, of.group);
}

/* ---- product, then reduce-scatter ---- */

static int scatter_product(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *left = inputs.at[0];
    if (of->flat)
        left = tt_reshape(left, tt_shape(-1, tt_size(left, -1)));
    tt_tensor *product =
        of->linear ? tt_linear(left, inputs.at[1], of->bias ? inputs.at[2] : NULL) : tt_matmul(left, inputs.at[1]);
    if (of->flat)
        product = tt_reshape(product, tt_shape(of->sizes[0], of->sizes[1], tt_size(product, -1)));
    outputs[0] = tt_reduce_scatter(product, of->reduction, of->dim, of->group);
    outputs[1] = of->twice ? tt_relu(outputs[0]) : outputs[0];
    outputs[2] = of->keep ? tt_add_scalar(product, 1) : outputs[0];
    return 3;
}

static int fused_scatters(const form *of) {
    int rank = tutti_group_rank(of->group);
    int64_t depth = of->sizes[of->ndim - 1];
    tt_tensor *x = numbers(tt_dims_of(of->ndim, of->sizes), rank + 1);
    tt_tensor *weight = numbers(of->linear ? tt_shape(6, depth) : tt_shape(depth, 6), 3 + rank);
    return check(scatter_product, of, tt_tensors(x, weight, numbers(tt_shape(6), 2)), "matmul_scatter",
                 "fused_matmul_reduce_scatter");
}

TEST_WORLD(a_product_is_fused_with_its_reduce_scatter, 2) {
    place here = begin();
    tutti_group *group = tutti_world_group(world);
    const form taken[] = {
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .keep = false },
        { group, 1, TUTTI_SUM, { 4, 6 }, 2, .twice = true }, /* the last dimension, too */
        { group, -1, TUTTI_AVG, { 4, 6 }, 2, .linear = true },
        { group, 0, TUTTI_SUM, { 2, 4, 6 }, 3, .keep = false },
        { group, 1, TUTTI_AVG, { 2, 4, 6 }, 3, .twice = true },
        { group, 2, TUTTI_SUM, { 2, 4, 6 }, 3, .linear = true },
        { group, 0, TUTTI_SUM, { 2, 4, 6 }, 3, .flat = true },
        { group, 1, TUTTI_SUM, { 3, 4, 6 }, 3, .flat = true, .linear = true },
        { group, 2, TUTTI_SUM, { 3, 4, 6 }, 3, .flat = true },
    };
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (fused_scatters(&taken[i]) != 1)
            FAIL("form %zu was not fused", i);
    const form left[] = {
        { group, 0, TUTTI_MAX, { 4, 6 }, 2, .keep = false },                 /* no sum */
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .keep = true },                  /* somebody else wants the product */
        { group, 0, TUTTI_SUM, { 2, 4, 6 }, 3, .flat = true, .keep = true }, /* likewise */
        { group, 0, TUTTI_SUM, { 4, 6 }, 2, .linear = true, .bias = true },  /* a bias is added between */
    };
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        if (fused_scatters(&left[i]) != 0)
            FAIL("form %zu was fused", i);
    end(&here, group);
}

/* ---- with scales ---- */

static int scaled_gather(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *all = tt_all_gather(inputs.at[0], of->dim, of->group);
    tt_tensor *scale = of->flat ? tt_all_gather(inputs.at[2], of->dim, of->group) : inputs.at[2];
    outputs[0] = tt_scaled_matmul(all, inputs.at[1], scale, inputs.at[3], NULL, NULL, TUTTI_F32, of->fast);
    outputs[1] = of->twice
                     ? tt_scaled_matmul(all, inputs.at[1], scale, inputs.at[3], inputs.at[4], NULL, TUTTI_BF16, false)
                     : outputs[0];
    outputs[2] = of->keep ? tt_to(all, TUTTI_F32) : outputs[0];
    outputs[3] = of->linear ? tt_matmul(all, inputs.at[1]) : outputs[0];
    return 4;
}

static int scaled_scatter(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const form *of = user;
    tt_tensor *product =
        tt_scaled_matmul(inputs.at[0], inputs.at[1], inputs.at[2], inputs.at[3], NULL, NULL, TUTTI_F32, of->fast);
    if (of->flat)
        product = tt_reshape(product, tt_shape(2, tt_size(product, 0) / 2, tt_size(product, 1)));
    outputs[0] = tt_reduce_scatter(product, of->reduction, of->dim, of->group);
    return 1;
}

static tt_tensor_list scaled_inputs(tt_tensor **list, int rank, bool by_rows) {
    tt_tensor *x = tt_to(numbers(tt_shape(4, 8), rank + 1), TUTTI_F8_E4M3);
    tt_tensor *weight = tt_to(numbers(tt_shape(8, 6), 2), TUTTI_F8_E4M3);
    tt_tensor *scale =
        by_rows ? tt_full(tt_shape(4, 1), 0.5, TUTTI_F32, NULL) : tt_full(tt_shape(1), 2, TUTTI_F32, NULL);
    list[0] = x;
    list[1] = weight;
    list[2] = scale;
    list[3] = tt_full(tt_shape(1, 6), 0.25, TUTTI_F32, NULL);
    list[4] = tt_ones(tt_shape(6), TUTTI_F32, NULL);
    return tt_tensors_of(5, list);
}

TEST_WORLD(products_of_narrow_numbers_are_fused_with_their_scales, 2) {
    place here = begin();
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_tensor *list[5];
    const form gathers[] = { { group, 0, .keep = false }, { group, 0, .twice = true, .keep = true } };
    for (size_t i = 0; i < sizeof gathers / sizeof *gathers; i++)
        CHECK_EQ(check(scaled_gather, &gathers[i], scaled_inputs(list, rank, false), "gather_matmul",
                       "fused_all_gather_scaled_matmul"),
                 1);
    const form mixed = { group, 0, .linear = true };
    CHECK_EQ(check(scaled_gather, &mixed, scaled_inputs(list, rank, false), "gather_matmul",
                   "fused_all_gather_scaled_matmul"),
             0);
    const form by_rows = { group, 0, .flat = true, .keep = true, .twice = true }; /* the scales are gathered, too */
    CHECK_EQ(check(scaled_gather, &by_rows, scaled_inputs(list, rank, true), "gather_matmul",
                   "fused_all_gather_scaled_matmul"),
             1);
    const form scatters[] = { { group, 0, TUTTI_SUM },
                              { group, 0, TUTTI_AVG, .flat = true },
                              { group, 1, TUTTI_SUM, .flat = true } };
    for (size_t i = 0; i < sizeof scatters / sizeof *scatters; i++)
        CHECK_EQ(check(scaled_scatter, &scatters[i], scaled_inputs(list, rank, i != 1), "matmul_scatter",
                       "fused_scaled_matmul_reduce_scatter"),
                 1);
    const form last = { group, 1, TUTTI_SUM };
    CHECK_EQ(check(scaled_scatter, &last, scaled_inputs(list, rank, true), "matmul_scatter",
                   "fused_scaled_matmul_reduce_scatter"),
             0);
    end(&here, group);
}

/* Whether the graph, after the pass, has the text. */
static bool reads(tt_compile_function *function, const form *of, tt_tensor_list inputs, const char *pass,
                  const char *text) {
    tt_graph *graph;
    CHECK(tt_capture(function, (void *)of, inputs, &graph) && tt_graph_pass(graph, pass));
    char *printed = tt_graph_text(graph);
    bool found = strstr(printed, text) != NULL;
    tutti_free(printed);
    tt_graph_release(&graph);
    return found;
}

TEST_WORLD(fused_products_have_fast_sums_where_the_products_had, 2) {
    place here = begin();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *list[5];
    tt_tensor_list inputs = scaled_inputs(list, tutti_group_rank(group), false);
    const form exact = { group, 0, TUTTI_SUM, .twice = true },
               fast = { group, 0, TUTTI_SUM, .twice = true, .fast = true }; /* the second product is exact */
    CHECK(reads(scaled_gather, &exact, inputs, "gather_matmul", "use_fast_accum=[0, 0]"));
    CHECK(reads(scaled_gather, &fast, inputs, "gather_matmul", "use_fast_accum=[1, 0]"));
    CHECK(reads(scaled_scatter, &exact, inputs, "matmul_scatter", "use_fast_accum=false"));
    CHECK(reads(scaled_scatter, &fast, inputs, "matmul_scatter", "use_fast_accum=true"));
    CHECK_EQ(check(scaled_gather, &fast, inputs, "gather_matmul", "fused_all_gather_scaled_matmul"), 1);
    CHECK_EQ(check(scaled_scatter, &fast, inputs, "matmul_scatter", "fused_scaled_matmul_reduce_scatter"), 1);
    end(&here, group);
}

/* ---- which groups ---- */

static int two_groups(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *const *groups = user;
    for (int i = 0; i < 2; i++)
        outputs[i] = tt_matmul(tt_all_gather(inputs.at[0], 0, groups[i]), inputs.at[1]);
    return 2;
}

TEST(only_groups_with_symmetric_memory_are_fused) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 4, NULL, &world));
    tt_scope scope = tt_scope_open();
    tutti_group *groups[2] = { tutti_world_group(world), NULL };
    CHECK_OK(tutti_group_new(world, (const int[]){ 0, 1 }, 2, NULL, &groups[1]));
    tt_tensor *x = numbers(tt_shape(4, 8), 1), *weight = numbers(tt_shape(8, 3), 2);
    tt_graph *graph;
    const char *name = tutti_group_name(groups[1]);
    for (int i = 0; i < 2; i++) {
        CHECK(tt_capture(two_groups, groups, tt_tensors(x, weight), &graph));
        CHECK(tt_symm_test_begin(i == 0 ? 0 : 1, &name));
        CHECK(tt_graph_pass(graph, "gather_matmul"));
        tt_symm_test_end();
        CHECK_EQ(tt_graph_count_of(graph, "fused_all_gather_matmul"), i == 0 ? 2 : 1);
        CHECK_EQ(tt_graph_count_of(graph, "all_gather"), i == 0 ? 0 : 1);
        tt_graph_release(&graph);
    }
    tutti_group_release(groups[1]);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
    test_device_leave();
}

/* ---- what products hide ---- */

/* Two products that have nothing to do with a gather and a scatter; the last gather has none left. */
static int hidden(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *turned = tt_transpose(x, 0, 1);
    outputs[0] = tt_matmul(x, turned);
    tt_tensor *all = tt_all_gather(x, 0, group);
    outputs[1] = tt_matmul(all, turned);
    tt_tensor *part = tt_reduce_scatter(all, TUTTI_SUM, 0, group);
    outputs[2] = tt_matmul(tt_all_gather(part, 0, group), inputs.at[1]);
    return 3;
}

static int fused_behind(const char *first, tutti_group *group, tt_tensor_list inputs) {
    tt_tensor *expected[3];
    tt_graph *graph;
    hidden(inputs, expected, group);
    CHECK(tt_capture(hidden, group, inputs, &graph) && tt_graph_pass(graph, first));
    CHECK(tt_graph_pass(graph, "gather_matmul") && tt_graph_pass(graph, "matmul_scatter"));
    int fused = tt_graph_count_of(graph, "fused_all_gather_matmul");
    CHECK_EQ(tt_graph_count_of(graph, "all_gather"), 2 - fused);
    CHECK_EQ(tt_graph_count_of(graph, "reduce_scatter"), 1);
    tt_tensor_list results = tt_graph_run(graph, inputs);
    CHECK_EQ(results.count, 3);
    for (size_t i = 0; i < results.count; i++)
        CHECK(tt_equal(results.at[i], expected[i]));
    tt_graph_release(&graph);
    return fused;
}

TEST_WORLD(collectives_that_products_hide_are_not_fused, 2) {
    place here = begin();
    tutti_group *group = tutti_world_group(world);
    tt_tensor_list inputs =
        tt_tensors(numbers(tt_shape(4, 6), tutti_group_rank(group) + 1), numbers(tt_shape(6, 5), 3));
    CHECK_EQ(fused_behind("dead", group, inputs), 2);
    CHECK_EQ(fused_behind("hide", group, inputs), 1);
    end(&here, group);
}
