/* SPDX-License-Identifier: Apache-2.0
 *
 * Tracing code that communicates: what each collective is in the graph, what keeps it there, and that a run of the
 * graph does what the function does.
 */
#include <tutti/mesh.h>

#include "support.h"

/* What the functions below get. */
typedef struct call {
    tutti_group *group;
    tutti_reduction reduction;
    tt_tensor *other;
} call;

static tt_graph *capture(tt_compile_function *function, call *with, tt_tensor *x) {
    tt_graph *graph;
    CHECK(tt_capture(function, with, tt_tensors(x), &graph));
    CHECK(tt_graph_check(graph));
    return graph;
}

/* ---- what the graph contains ---- */

static int reduce(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const call *with = user;
    outputs[0] = tt_all_reduce(inputs.at[0], with->reduction, with->group);
    return 1;
}

static int gather(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_all_gather(inputs.at[0], 0, ((call *)user)->group);
    return 1;
}

static int scatter(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_reduce_scatter(inputs.at[0], TUTTI_SUM, 0, ((call *)user)->group);
    return 1;
}

static int coalesced(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *x = inputs.at[0];
    tt_tensor_list sums =
        tt_all_reduce_coalesced(tt_tensors(x, tt_neg(x), tt_exp(x)), TUTTI_SUM, ((call *)user)->group);
    for (size_t i = 0; i < sums.count; i++)
        outputs[i] = sums.at[i];
    return 3;
}

TEST(a_collective_is_two_vertices_and_a_coalesced_one_has_a_wait_for_each_tensor) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &world));
    tt_scope scope = tt_scope_open();
    call with = { tutti_world_group(world), TUTTI_SUM, NULL };
    static const struct {
        tt_compile_function *function;
        int vertices, waits;
    } forms[] = { { reduce, 2, 1 }, { gather, 2, 1 }, { scatter, 2, 1 }, { coalesced, 6, 3 } };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        tt_graph *graph = capture(forms[i].function, &with, values("x", tt_shape(4, 3)));
        CHECK_EQ(counts_of_graph(graph).vertices, forms[i].vertices);
        CHECK_EQ(tt_graph_count_of(graph, "wait"), forms[i].waits);
        tt_graph_release(&graph);
    }
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

/* The group of a mesh, and of one dimension of it, stands in the text by its name, and is no constant. */
TEST(a_group_however_it_was_found_is_in_the_text_by_its_name) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tt_scope scope = tt_scope_open();
    tutti_mesh *mesh;
    tutti_group *row;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (const int[]){ 2, 2 }, 2, NULL, &mesh));
    CHECK_OK(tutti_mesh_group(mesh, 1, &row));
    tutti_group *groups[] = { tutti_world_group(world), row, tutti_group_by_name(world, "0") };
    for (int i = 0; i < 3; i++) {
        call with = { groups[i], TUTTI_SUM, NULL };
        tt_graph *graph = capture(reduce, &with, values("x", tt_shape(4)));
        char expected[256];
        snprintf(expected, sizeof expected,
                 "graph(x: f32 [4]):\n    all_reduce: f32 [4] = all_reduce(x, reduction=sum, group=%s)\n"
                 "    wait(all_reduce)\n    return (all_reduce)\n",
                 tutti_group_name(groups[i]));
        check_text(graph, expected);
        tt_graph_release(&graph);
    }
    tutti_group_release(row);
    tutti_mesh_release(mesh);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

TEST(every_reduction_is_recorded_and_one_without_its_factor_is_refused) {
    static const tutti_reduction reductions[] = { TUTTI_SUM, TUTTI_AVG, TUTTI_PRODUCT, TUTTI_MIN, TUTTI_MAX };
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &world));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(4));
    tt_graph *graph;
    for (size_t i = 0; i < sizeof reductions / sizeof *reductions; i++) {
        call with = { tutti_world_group(world), reductions[i], NULL };
        char expected[64];
        snprintf(expected, sizeof expected, "reduction=%s,", tutti_reduction_name(reductions[i]));
        graph = capture(reduce, &with, x);
        char *text = tt_graph_text(graph);
        CHECK(strstr(text, expected) != NULL);
        tutti_free(text);
        tt_graph_release(&graph);
    }
    call with = { tutti_world_group(world), TUTTI_PREMUL_SUM, NULL };
    CHECK(!tt_capture(reduce, &with, tt_tensors(x), &graph));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "premul_sum needs a factor"));
    CHECK(tt_graph_parse("graph(x: f32 [4]):\n    y: f32 [4] = all_reduce(x, reduction=premul_sum, group=0)\n"
                         "    return (y)\n",
                         world) == NULL);
    CHECK(fails(TUTTI_ERROR_STATE, "all_reduce by premul_sum has no factor; all_reduce_premul has one"));
    graph = tt_graph_parse("graph(x: f32 [4]):\n    y: f32 [4] = all_reduce_premul(x, factor=0.5, group=0)\n"
                           "    wait(y)\n    return (y)\n",
                           world);
    CHECK(graph != NULL);
    tt_graph_release(&graph);
    CHECK(tt_graph_parse("graph(x: f32 [4]):\n    all_gather_out(5, x, group=0)\n    return (x)\n", world) == NULL);
    CHECK(fails(TUTTI_ERROR_STATE, "all_gather_out writes out, which is a number and no value"));
    CHECK(tt_graph_parse("graph(x: f32 [4]):\n    all_reduce_coalesced_([x, 2], reduction=sum, group=0)\n"
                         "    return (x)\n",
                         world) == NULL);
    CHECK(fails(TUTTI_ERROR_STATE, "which is a number and no value"));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

/* ---- fake groups ---- */

static int who_am_i(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = ((call *)user)->group;
    tt_tensor *all = tt_all_gather(inputs.at[0], 0, group);
    outputs[0] = tt_narrow(all, 0, tutti_group_rank(group) * tt_size(inputs.at[0], 0), tt_size(inputs.at[0], 0));
    outputs[1] = tt_mul_scalar(inputs.at[0], tutti_group_size(group));
    return 2;
}

TEST(a_fake_world_is_captured_for_any_rank_and_size) {
    static const int ranks[][2] = { { 0, 2 }, { 3, 4 }, { 7, 8 }, { 511, 4096 } };
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        tutti_world *world;
        CHECK_OK(tutti_world_open_fake(ranks[i][0], ranks[i][1], NULL, &world));
        tt_scope scope = tt_scope_open();
        call with = { tutti_world_group(world), TUTTI_SUM, NULL };
        tt_tensor *x = values("x", tt_shape(2));
        tt_graph *graph = capture(who_am_i, &with, x);
        char expected[400];
        snprintf(expected, sizeof expected,
                 "graph(x: f32 [2]):\n    all_gather: f32 [%d] = all_gather(x, dim=0, group=0)\n"
                 "    narrow: f32 [2]%s%.0d = narrow(all_gather, dim=0, start=%d, length=2)\n"
                 "    mul_scalar: f32 [2] = mul_scalar(x, number=%d)\n    wait(all_gather)\n"
                 "    return (narrow, mul_scalar)\n",
                 2 * ranks[i][1], ranks[i][0] > 0 ? " offset " : "", 2 * ranks[i][0], 2 * ranks[i][0], ranks[i][1]);
        check_text(graph, expected);
        CHECK_EQ(tt_graph_run(graph, tt_tensors(x)).count, 2);
        tt_graph_release(&graph);
        CHECK_OK(tt_scope_close(&scope));
        CHECK_OK(tutti_world_close(world));
    }
}

/* ---- exchanges ---- */

static int even_exchange(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_all_to_all_single(inputs.at[0], NULL, NULL, ((call *)user)->group);
    return 1;
}

static int uneven_exchange(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = ((call *)user)->group;
    int64_t rank = tutti_group_rank(group), in[2] = { 1, 3 }, out[2];
    out[0] = out[1] = rank == 0 ? 1 : 3;
    outputs[0] = tt_mul_scalar(tt_all_to_all_single(inputs.at[0], out, in, group), 2);
    return 1;
}

TEST_WORLD(splits_of_an_exchange_are_in_the_text, 2) {
    tt_scope scope = tt_scope_open();
    call with = { tutti_world_group(world), TUTTI_SUM, NULL };
    tt_tensor *x = values("x", tt_shape(4, 2));
    tt_graph *graph = capture(even_exchange, &with, x);
    check_text(graph, "graph(x: f32 [4, 2]):\n"
                      "    all_to_all_single: f32 [4, 2] = all_to_all_single(x, out_splits=[2, 2], in_splits=[2, 2], "
                      "group=0)\n"
                      "    wait(all_to_all_single)\n"
                      "    return (all_to_all_single)\n");
    check_run(graph, even_exchange, &with, x);
    tt_graph_release(&graph);
    graph = capture(uneven_exchange, &with, x);
    check_run(graph, uneven_exchange, &with, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(with.group, NULL));
}

/* The splits are data: they change from run to run, and the graph is the same. */
static int exchange_by_data(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *out = inputs.at[2], *came = inputs.at[3];
    tt_all_to_all_vdev(out, came, inputs.at[0], inputs.at[1], ((call *)user)->group);
    outputs[0] = tt_add_scalar(tt_wait(out), 1);
    outputs[1] = tt_clone(tt_wait(came));
    return 2;
}

TEST_WORLD(splits_of_an_exchange_may_be_a_tensor, 2) {
    tt_scope scope = tt_scope_open();
    call with = { tutti_world_group(world), TUTTI_SUM, NULL };
    int rank = tutti_group_rank(with.group);
    tt_tensor *x = named(tt_symm_empty(world, tt_shape(4), TUTTI_F32, NULL), "x");
    tt_tensor *splits = named(tt_symm_empty(world, tt_shape(2), TUTTI_I64, NULL), "splits");
    tt_tensor *out = named(tt_symm_empty(world, tt_shape(8), TUTTI_F32, NULL), "out");
    tt_tensor *came = named(tt_symm_empty(world, tt_shape(2, 2), TUTTI_I64, NULL), "came");
    tt_graph *graph;
    CHECK(tt_capture(exchange_by_data, &with, tt_tensors(x, splits, out, came), &graph));
    CHECK_EQ(tt_graph_count_of(graph, "all_to_all_vdev"), 1);
    for (int first = 1; first < 4; first++) {
        tt_fill_(x, rank + 1);
        tt_fill_(out, 0);
        tt_copy_(tt_select(splits, 0, 0), tt_number(first));
        tt_copy_(tt_select(splits, 0, 1), tt_number(4 - first));
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(x, splits, out, came));
        CHECK_EQ(results.count, 2);
        int from_each = rank == 0 ? first : 4 - first;
        CHECK_EQ((int)tt_item(tt_sum(tt_sub(results.at[0], tt_number(1)))), from_each * 3);
        CHECK_EQ((int)tt_item(tt_select(tt_select(results.at[1], 0, 0), 0, 1)), from_each);
        CHECK_OK(tutti_barrier(with.group, NULL));
    }
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(with.group, NULL));
}

/* ---- in flight ---- */

static int finish(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const call *with = user;
    outputs[0] = tt_add(tt_wait(inputs.at[0]), with->other);
    return 1;
}

static int use_at_once(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_add(inputs.at[0], ((call *)user)->other);
    return 1;
}

/* Capturing neither waits for it nor takes its work away. */
TEST_WORLD(a_collective_in_flight_may_be_an_input_or_a_constant, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_compile_function *functions[] = { finish, use_at_once };
    for (int i = 0; i < 2; i++) {
        tt_tensor *x = tt_full(tt_shape(5), tutti_group_rank(group) + 1, TUTTI_F32, NULL);
        tt_tensor *flying = tt_all_reduce(x, TUTTI_SUM, group), *constant = tt_all_reduce(x, TUTTI_MAX, group);
        call with = { group, TUTTI_SUM, constant };
        tt_graph *graph = capture(functions[i], &with, flying);
        CHECK(tt_pending_works(world) == 2 && tt_is_async(flying) && tt_is_async(constant));
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(flying));
        CHECK(results.count == 1 && tt_equal(results.at[0], tt_full(tt_shape(5), 5, TUTTI_F32, NULL)));
        CHECK_EQ(tt_pending_works(world), 0);
        tt_graph_release(&graph);
    }
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- what nobody looks at ---- */

static int swap(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = ((call *)user)->group;
    tt_tensor *moved = tt_wait(tt_permute_ranks(inputs.at[0], (int[]){ 1, 0 }, group));
    outputs[0] = tutti_group_rank(group) == 0 ? tt_add_scalar(moved, 1) : tt_neg(inputs.at[0]);
    return 1;
}

TEST_WORLD(a_rank_that_ignores_an_exchange_takes_part_in_it_after_every_pass, 2) {
    tt_scope scope = tt_scope_open();
    call with = { tutti_world_group(world), TUTTI_SUM, NULL };
    tt_tensor *x = tt_add_scalar(values("x", tt_shape(4)), tutti_group_rank(with.group));
    tt_graph *graph = capture(swap, &with, x);
    for (int i = 0; tt_pass_name(i) != NULL; i++)
        CHECK(tt_graph_pass(graph, tt_pass_name(i)));
    tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
    CHECK(tt_graph_count(graph, &counts) && counts.collectives == 1);
    check_run(graph, swap, &with, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(with.group, NULL));
}

/* ---- ordinary calls, which write ---- */

static int ordinary(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = ((call *)user)->group;
    tt_tensor *x = inputs.at[0], *all = tt_empty(tt_shape(8), TUTTI_F32, NULL),
              *part = tt_empty(tt_shape(2), TUTTI_F32, NULL);
    tt_tensor *moved = tt_empty(tt_shape(4), TUTTI_F32, NULL);
    tt_all_gather_out(all, x, group);
    tt_reduce_scatter_out(part, x, TUTTI_SUM, group);
    tt_all_to_all_out(moved, x, NULL, NULL, group);
    tt_all_reduce_(x, TUTTI_SUM, group);
    tt_tensor_list each = tt_all_gather_list(x, NULL, group);
    outputs[0] = all;
    outputs[1] = part;
    outputs[2] = moved;
    outputs[3] = tt_add(each.at[0], each.at[1]);
    return 4;
}

TEST_WORLD(ordinary_calls_that_write_are_captured_with_what_they_write, 2) {
    tt_scope scope = tt_scope_open();
    call with = { tutti_world_group(world), TUTTI_SUM, NULL };
    tt_tensor *x = named(tt_add_scalar(values("", tt_shape(4)), tutti_group_rank(with.group)), "x");
    tt_graph *graph = capture(ordinary, &with, x);
    static const char *const starts[] = { "all_gather_out", "reduce_scatter_out", "all_to_all_out", "all_reduce_",
                                          "all_gather_list" };
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        CHECK_EQ(tt_graph_count_of(graph, starts[i]), 1);
    CHECK_EQ(tt_graph_count_of(graph, "wait"), 5);
    check_read_back(graph, world);
    check_run(graph, ordinary, &with, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(with.group, NULL));
}

/* ---- gradients ---- */

static int exchange_and_back(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *t = inputs.at[0];
    outputs[0] =
        tt_all_to_all_single(tt_mul_scalar(t, 2), (int64_t[]){ 1, 1 }, (int64_t[]){ 1, 1 }, ((call *)user)->group);
    tt_backward(tt_sum(outputs[0]), NULL);
    outputs[1] = tt_grad(t);
    outputs[0] = tt_detach(outputs[0]);
    return 2;
}

static int gather_and_back(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    for (int dim = 0; dim < 3; dim++) {
        tt_set_grad(inputs.at[0], NULL);
        tt_backward(tt_sum(tt_all_gather(inputs.at[0], dim, ((call *)user)->group)), NULL);
        outputs[dim] = tt_grad(inputs.at[0]);
    }
    return 3;
}

static int scatter_and_back(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    for (int dim = 0; dim < 2; dim++) {
        tt_set_grad(inputs.at[0], NULL);
        tt_tensor *part = tt_reduce_scatter(inputs.at[0], TUTTI_SUM, dim, ((call *)user)->group);
        tt_backward(tt_sum(part), NULL);
        outputs[2 * dim] = tt_detach(part);
        outputs[2 * dim + 1] = tt_grad(inputs.at[0]);
    }
    return 4;
}

static void check_full(tt_tensor *x, tt_dims shape, double value) {
    CHECK(tt_equal(x, tt_full(shape, value, TUTTI_F32, NULL)));
}

static tt_tensor *leaf(tt_dims shape) {
    return named(tt_require_grad(tt_ones(shape, TUTTI_F32, NULL), true), "t");
}

TEST_WORLD(gradients_of_collectives_are_captured_with_their_collectives, 2) {
    tt_scope scope = tt_scope_open();
    call with = { tutti_world_group(world), TUTTI_SUM, NULL };
    tt_tensor *t = leaf(tt_shape(2, 2));
    tt_graph *graph = capture(exchange_and_back, &with, t);
    CHECK(tt_graph_count_of(graph, "all_to_all_single") == 2 && tt_graph_count_of(graph, "wait") == 2);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(t));
    CHECK_EQ(results.count, 2);
    check_full(results.at[0], tt_shape(2, 2), 2);
    check_full(results.at[1], tt_shape(2, 2), 2);
    tt_graph_release(&graph);
    t = leaf(tt_shape(3, 3, 3));
    graph = capture(gather_and_back, &with, t);
    results = tt_graph_run(graph, tt_tensors(t));
    CHECK_EQ(results.count, 3);
    for (size_t dim = 0; dim < 3; dim++)
        check_full(results.at[dim], tt_shape(3, 3, 3), 2);
    tt_graph_release(&graph);
    t = leaf(tt_shape(6, 6));
    graph = capture(scatter_and_back, &with, t);
    results = tt_graph_run(graph, tt_tensors(t));
    CHECK_EQ(results.count, 4);
    check_full(results.at[0], tt_shape(3, 6), 2);
    check_full(results.at[2], tt_shape(6, 3), 2);
    check_full(results.at[1], tt_shape(6, 6), 1);
    check_full(results.at[3], tt_shape(6, 6), 1);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(with.group, NULL));
}

/* ---- checkpoints ---- */

static int drop_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)user;
    outputs[0] = tt_mul(tt_dropout(tt_sin(inputs.at[0]), 0.5), tt_dropout(inputs.at[0], 0.25));
    return 1;
}

static int nested_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *first = tt_dropout(inputs.at[0], 0.5);
    outputs[0] = tt_mul(tt_checkpoint(drop_region, user, NULL, tt_tensors(first)).at[0], tt_dropout(first, 0.5));
    return 1;
}

static int checkpointed(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_region *region = *(tt_region **)user;
    tt_set_grad(inputs.at[0], NULL);
    tt_tensor *y = tt_checkpoint(region, NULL, NULL, tt_tensors(inputs.at[0])).at[0];
    tt_backward(tt_sum(y), NULL);
    outputs[0] = tt_detach(y);
    outputs[1] = tt_grad(inputs.at[0]);
    return 2;
}

TEST(a_region_that_is_computed_again_draws_the_numbers_that_it_drew) {
    tt_region *regions[] = { drop_region, nested_region };
    for (int i = 0; i < 2; i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = tt_require_grad(values("x", tt_shape(64)), true), *expected[2][2], *after[2];
        tt_seed(11, 0);
        for (int k = 0; k < 2; k++)
            checkpointed(tt_tensors(x), expected[k], &regions[i]);
        after[0] = tt_rand(tt_shape(4), TUTTI_F32, NULL);
        tt_graph *graph;
        CHECK(tt_capture(checkpointed, &regions[i], tt_tensors(x), &graph));
        CHECK_EQ(tt_graph_count_of(graph, "random_state"), i == 0 ? 2 : 4);
        tt_seed(11, 0);
        for (int k = 0; k < 2; k++) {
            tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
            CHECK(results.count == 2 && tt_equal(results.at[0], expected[k][0]));
            CHECK(tt_equal(results.at[1], expected[k][1]));
        }
        after[1] = tt_rand(tt_shape(4), TUTTI_F32, NULL);
        CHECK(tt_equal(after[0], after[1]));
        tt_graph_release(&graph);
        CHECK_OK(tt_scope_close(&scope));
    }
}
