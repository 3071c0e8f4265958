/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that move collectives: what the graph says afterwards, and that results stay the same, bit for bit.
 */
#include "support.h"

static tt_tensor *input(int rank) {
    tt_tensor *x = tt_add_scalar(tt_mul_scalar(tt_arange(0, 12, 1, TUTTI_F32, NULL), 0.37), rank * 1.7);
    return named(tt_reshape(x, tt_shape(4, 3)), "x");
}

/* Captures, runs the passes, and compares a run with the function itself. */
static tt_graph *check_passes(tt_compile_function *function, tutti_group *group, const char *const *passes) {
    tt_tensor *x = input(tutti_group_rank(group));
    tt_graph *graph;
    CHECK(tt_capture(function, group, tt_tensors(x), &graph));
    for (; *passes != NULL; passes++)
        CHECK(tt_graph_pass(graph, *passes));
    CHECK(tt_graph_check(graph));
    check_run(graph, function, group, x);
    return graph;
}

static int gather_and_compute(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *gathered = tt_all_gather(x, 0, group);
    tt_tensor *other = tt_exp(tt_sin(x)), *second = tt_all_gather(tt_cos(x), 0, group);
    outputs[0] = tt_add(gathered, second);
    outputs[1] = other;
    return 2;
}

TEST_WORLD(waits_sink_to_their_first_use_and_starts_rise_in_their_order, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(gather_and_compute, group, (const char *[]){ "sink", "raise", NULL });
    check_text(graph, "graph(x: f32 [4, 3]):\n"
                      "    all_gather: f32 [8, 3] = all_gather(x, dim=0, group=0)\n"
                      "    sin: f32 [4, 3] = sin(x)\n"
                      "    exp: f32 [4, 3] = exp(sin)\n"
                      "    cos: f32 [4, 3] = cos(x)\n"
                      "    all_gather_1: f32 [8, 3] = all_gather(cos, dim=0, group=0)\n"
                      "    wait(all_gather)\n"
                      "    wait(all_gather_1)\n"
                      "    add: f32 [8, 3] = add(all_gather, all_gather_1)\n"
                      "    return (add, exp)\n");
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int write_what_is_sent(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *sum = tt_all_reduce(x, TUTTI_SUM, group);
    tt_tensor *apart = tt_neg(x);
    tt_mul_(x, tt_number(2));
    outputs[0] = tt_add(sum, apart);
    return 1;
}

TEST_WORLD(a_wait_stays_above_what_writes_the_collectives_input, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(write_what_is_sent, group, (const char *[]){ "sink", "raise", "late", NULL });
    check_text(graph, "graph(x: f32 [4, 3]):\n"
                      "    all_reduce: f32 [4, 3] = all_reduce(x, reduction=sum, group=0)\n"
                      "    neg: f32 [4, 3] = neg(x)\n"
                      "    wait(all_reduce)\n"
                      "    mul_(x, 2)\n"
                      "    add: f32 [4, 3] = add(all_reduce, neg)\n"
                      "    return (add)\n");
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* As an optimizer does, which goes over parameters in their order, while their gradients came in the other. */
static int optimize(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *first = tt_all_reduce(tt_sin(x), TUTTI_SUM, group);
    tt_tensor *second = tt_all_reduce(tt_cos(x), TUTTI_SUM, group);
    tt_tensor *apart = tt_neg(x), *row = tt_slice(x, 0, 1, 2, 1);
    tt_add_(row, tt_slice(second, 0, 0, 1, 1));
    outputs[0] = tt_mul_scalar(second, 2);
    outputs[1] = tt_mul_scalar(first, 3);
    outputs[2] = tt_exp(apart);
    outputs[3] = tt_add(outputs[0], outputs[1]);
    outputs[4] = tt_abs(x); /* after what was written */
    return 5;
}

TEST_WORLD(behind_the_last_start_what_waits_comes_last_and_in_the_order_of_the_starts, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(optimize, group, (const char *[]){ "sink", "late", NULL });
    check_text(graph, "graph(x: f32 [4, 3]):\n"
                      "    sin: f32 [4, 3] = sin(x)\n"
                      "    all_reduce: f32 [4, 3] = all_reduce(sin, reduction=sum, group=0)\n"
                      "    cos: f32 [4, 3] = cos(x)\n"
                      "    all_reduce_1: f32 [4, 3] = all_reduce(cos, reduction=sum, group=0)\n"
                      "    neg: f32 [4, 3] = neg(x)\n"
                      "    slice: f32 [1, 3] offset 3 = slice(x, dim=0, start=1, end=2, step=1)\n"
                      "    slice_1: f32 [1, 3] = slice(all_reduce_1, dim=0, start=0, end=1, step=1)\n"
                      "    exp: f32 [4, 3] = exp(neg)\n"
                      "    wait(all_reduce)\n"
                      "    mul_scalar_1: f32 [4, 3] = mul_scalar(all_reduce, number=3)\n"
                      "    wait(all_reduce_1)\n"
                      "    add_(slice, slice_1)\n"
                      "    mul_scalar: f32 [4, 3] = mul_scalar(all_reduce_1, number=2)\n"
                      "    abs: f32 [4, 3] = abs(x)\n"
                      "    add: f32 [4, 3] = add(mul_scalar, mul_scalar_1)\n"
                      "    return (mul_scalar, mul_scalar_1, exp, add, abs)\n");
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int many(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0];
    for (int i = 0; i < 8; i++)
        outputs[i] = tt_reduce_scatter(tt_mul_scalar(x, i + 1), TUTTI_SUM, 0, group);
    for (int i = 8; i < 11; i++)
        outputs[i] = tt_all_reduce(tt_add_scalar(x, i), TUTTI_SUM, group);
    outputs[11] = tt_all_gather(x, 0, group);
    outputs[12] = tt_all_gather(tt_neg(x), 1, group);
    tt_all_reduce_(x, TUTTI_MAX, group);
    return 13;
}

TEST_WORLD(neighbours_of_one_kind_become_one_operation, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(many, group, (const char *[]){ "sink", "bucket", NULL });
    CHECK_EQ(tt_graph_count_of(graph, "reduce_scatter"), 0);
    CHECK_EQ(tt_graph_count_of(graph, "reduce_scatter_coalesced"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce_coalesced"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "all_gather_coalesced_dims"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce_"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "wait"), 14);
    check_read_back(graph, world);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int dependent(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *first = tt_all_reduce(inputs.at[0], TUTTI_SUM, group);
    tt_tensor *second = tt_all_reduce(tt_mul_scalar(first, 0.5), TUTTI_SUM, group);
    outputs[0] = second;
    return 1;
}

static int kinds(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_all_reduce(x, TUTTI_SUM, group);
    outputs[1] = tt_all_reduce(tt_neg(x), TUTTI_MAX, group);
    outputs[2] = tt_all_reduce(tt_to(x, TUTTI_F64), TUTTI_MAX, group);
    outputs[3] = tt_broadcast(x, 0, group);
    outputs[4] = tt_all_reduce(tt_to(x, TUTTI_F64), TUTTI_MAX, group);
    return 5;
}

TEST_WORLD(what_depends_on_the_other_or_differs_stays_apart, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(dependent, group, (const char *[]){ "sink", "raise", "bucket", NULL });
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce"), 2);
    tt_graph_release(&graph);
    graph = check_passes(kinds, group, (const char *[]){ "sink", "raise", "bucket", NULL });
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce"), 4);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* Rank 1 does not look at what it gets; it must send all the same. */
static int exchange(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *moved = tt_wait(tt_permute_ranks(inputs.at[0], (int[]){ 1, 0 }, group));
    outputs[0] = tutti_group_rank(group) == 0 ? moved : tt_neg(inputs.at[0]);
    return 1;
}

TEST_WORLD(a_collective_whose_result_is_not_used_stays_with_its_wait, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(exchange, group, (const char *[]){ "dead", "sink", NULL });
    tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
    CHECK(tt_graph_count(graph, &counts) && counts.collectives == 1 && tt_graph_count_of(graph, "wait") == 2);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* Each rank receives before it sends, as eager code may. */
static int both_ways(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *y = tt_zeros_like(inputs.at[0]);
    int peer = 1 - tutti_group_rank(group);
    tt_irecv(y, peer, 7, group);
    tt_tensor *mark = tt_isend(inputs.at[0], peer, 7, group);
    tt_wait(mark);
    outputs[0] = tt_wait(y);
    return 1;
}

static int batch(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *y = tt_zeros_like(inputs.at[0]);
    int peer = 1 - tutti_group_rank(group);
    tt_p2p operations[] = { { TT_P2P_RECV, y, peer, 3 }, { TT_P2P_SEND, inputs.at[0], peer, 3 } };
    tt_tensor_list marks = tt_batch_p2p(2, operations, group);
    for (size_t i = 0; i < marks.count; i++)
        tt_wait(marks.at[i]);
    outputs[0] = y;
    return 1;
}

/* A copy of what is being sent stays a copy. */
static int write_a_copy(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *sent = tt_neg(inputs.at[0]), *y = tt_zeros_like(sent);
    int peer = 1 - tutti_group_rank(group);
    tt_tensor *mark = tt_isend(sent, peer, 1, group), *copy = tt_clone(sent);
    tt_mul_(copy, tt_number(3));
    outputs[0] = copy;
    outputs[1] = tt_all_reduce(inputs.at[0], TUTTI_SUM, group);
    tt_wait(outputs[1]);
    tt_irecv(y, peer, 1, group);
    tt_wait(y);
    tt_wait(mark);
    outputs[2] = y;
    return 3;
}

TEST_WORLD(messages_wait_where_the_function_waits, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(both_ways, group, (const char *[]){ NULL });
    tt_graph_release(&graph);
    graph = check_passes(batch, group, (const char *[]){ "dead", NULL });
    tt_graph_release(&graph);
    graph = check_passes(write_a_copy, group, (const char *[]){ "copies", NULL });
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int on_numbers(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_wait(tt_number(3));
    outputs[0] = tt_all_reduce(tt_number(2), TUTTI_SUM, group);
    outputs[1] = tt_all_reduce(tt_number(5), TUTTI_SUM, group);
    outputs[2] = inputs.at[0];
    return 3;
}

TEST_WORLD(numbers_pass_through_the_passes, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_graph *graph = check_passes(on_numbers, group, (const char *[]){ "sink", "raise", "bucket", NULL });
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* The peer's memory is not the graph's to write. */
static int copy_of_a_peer(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *own = tt_peer_tensor(inputs.at[0], tutti_group_rank(group), group);
    tt_tensor *before = tt_relu(inputs.at[0]);
    tt_add_(own, tt_number(1));
    outputs[0] = tt_sub(tt_relu(inputs.at[0]), before);
    tt_tensor *copy = tt_clone(tt_peer_tensor(inputs.at[0], 1 - tutti_group_rank(group), group));
    outputs[1] = tt_mul_(tt_zeros_like(copy), tt_number(2));
    outputs[2] = tt_mul_(copy, tt_number(100));
    return 3;
}

TEST_WORLD(memory_of_peers_is_never_shared_or_taken, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = tt_symm_empty(world, tt_shape(6), TUTTI_F32, NULL);
    tt_fill_(x, 1);
    named(x, "x");
    tt_graph *graph;
    CHECK(tt_capture(copy_of_a_peer, group, tt_tensors(x), &graph));
    for (int i = 0; tt_pass_name(i) != NULL; i++)
        CHECK(tt_graph_pass(graph, tt_pass_name(i)));
    CHECK_EQ(tt_graph_count_of(graph, "relu"), 2);
    CHECK_EQ(tt_graph_count_of(graph, "clone"), 1);
    CHECK_OK(tutti_barrier(group, NULL));
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
    CHECK(results.count == 3 && tt_equal(results.at[0], tt_ones(tt_shape(6), TUTTI_F32, NULL)));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(tt_equal(x, tt_full(tt_shape(6), 2, TUTTI_F32, NULL)));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(a_fake_group_of_eight_can_be_captured_by_one_process) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 8, NULL, &world));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = input(0);
    tt_graph *graph;
    CHECK(tt_capture(gather_and_compute, tutti_world_group(world), tt_tensors(x), &graph));
    CHECK_EQ(tt_graph_count_of(graph, "all_gather"), 2);
    CHECK(tt_graph_run(graph, tt_tensors(x)).count == 2);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}
