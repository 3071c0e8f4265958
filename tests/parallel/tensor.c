/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallel layers compute what the layer of one rank would, forward and backward, whole and cut by sequence.
 */
#include <math.h>

#include <tutti/graph.h>
#include <tutti/mesh.h>
#include <tutti/streams.h>

#include "support.h"

enum {
    BATCH = 2,
    LENGTH = 8,
    WIDTH = 16,
    HEADS = 4,
    WORDS = 24
};

#define BEGIN_CUT(argument)             \
    BEGIN;                              \
    void *stream = own_stream();        \
    bool sequence = (argument) != NULL; \
    tt_tensor_parallel_options how = { .size = sizeof how, .group = group, .sequence = sequence }
#define END_CUT                                   \
    if (stream != NULL)                           \
        tt_stream_release(test_device(), stream); \
    END

/* Fused products of ranks that are threads need a stream each, on a GPU. */
static void *own_stream(void) {
    void *stream = test_on_device() ? tt_stream_new(test_device()) : NULL;
    CHECK(stream == NULL || tt_stream_set(test_device(), stream));
    return stream;
}

/* With 1, 2 and 4 ranks, whole and cut by sequence. */
#define TEST_CUTS(sentence)                                          \
    static void rank_##sentence(tutti_world *world, void *argument); \
    TEST(sentence) {                                                 \
        static char cut_by_sequence;                                 \
        for (int ranks = 1; ranks <= 4; ranks *= 2) {                \
            test_threads(ranks, rank_##sentence, NULL);              \
            test_threads(ranks, rank_##sentence, &cut_by_sequence);  \
        }                                                            \
    }                                                                \
    TEST(sentence##_as_processes) {                                  \
        static char cut_by_sequence;                                 \
        test_processes(2, rank_##sentence, &cut_by_sequence);        \
    }                                                                \
    static void rank_##sentence(tutti_world *world, void *argument)

static bool close_to(tt_tensor *left, tt_tensor *right) {
    return left != NULL && right != NULL && tt_allclose(left, right, 1e-4, 1e-5);
}

/* This rank's part of x. */
static tt_tensor *part(tt_tensor *x, int dim, tutti_group *group) {
    int64_t share = tt_size(x, dim) / tutti_group_size(group);
    return tt_narrow(x, dim, tutti_group_rank(group) * share, share);
}

static tt_tensor *grad_of(tt_module *module, const char *child, const char *name) {
    return tt_grad(tt_module_parameter(child != NULL ? tt_module_child(module, child) : module, name));
}

/* A leaf that is the part of x which a layer outside of a pair sees. */
static tt_tensor *leaf_of(tt_tensor *x, bool sequence, tutti_group *group) {
    return tt_require_grad(tt_clone(sequence ? part(x, 1, group) : x), true);
}

static tt_tensor *draw(int seed, tt_dims shape) {
    tt_seed((uint64_t)seed, 0);
    return tt_randn(shape, TUTTI_F32, NULL);
}

TEST_CUTS(a_column_and_a_row_make_the_layers_of_one_rank) {
    BEGIN_CUT(argument);
    tt_seed(7, 0);
    tt_module *plain[] = { tt_linear_module(WIDTH, 4 * WIDTH, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                           tt_linear_module(4 * WIDTH, WIDTH, true, TUTTI_F32) };
    tt_seed(7, 0);
    tt_module *cut[] = { tt_column_linear_module(WIDTH, 4 * WIDTH, true, &how), tt_function_module("gelu", tt_gelu),
                         tt_row_linear_module(4 * WIDTH, WIDTH, true, &how) };
    tt_module *whole = tt_sequential_module(3, plain), *ours = tt_sequential_module(3, cut);
    tt_tensor *x = draw(1, tt_shape(BATCH, LENGTH, WIDTH)), *weights = draw(2, tt_shape(BATCH, LENGTH, WIDTH));
    tt_tensor *alone = tt_require_grad(tt_clone(x), true), *mine = leaf_of(x, sequence, group);
    tt_tensor *expected = tt_module_call(whole, alone), *y = tt_module_call(ours, mine);
    CHECK(close_to(y, sequence ? part(expected, 1, group) : expected));
    CHECK(tt_backward(tt_sum(tt_mul(expected, weights)), NULL));
    CHECK(tt_backward(tt_sum(tt_mul(y, sequence ? part(weights, 1, group) : weights)), NULL));
    CHECK(close_to(tt_grad(mine), sequence ? part(tt_grad(alone), 1, group) : tt_grad(alone)));
    CHECK(close_to(grad_of(ours, "0", "weight"), part(grad_of(whole, "0", "weight"), 0, group)));
    CHECK(close_to(grad_of(ours, "0", "bias"), part(grad_of(whole, "0", "bias"), 0, group)));
    CHECK(close_to(grad_of(ours, "2", "weight"), part(grad_of(whole, "2", "weight"), 1, group)));
    CHECK(close_to(grad_of(ours, "2", "bias"), grad_of(whole, "2", "bias")));
    tt_module_release(whole);
    tt_module_release(ours);
    END_CUT;
}

TEST_CUTS(attention_is_cut_by_heads) {
    BEGIN_CUT(argument);
    tt_attention_options options = { .size = sizeof options, .heads = HEADS, .rope_base = 10000 };
    tt_seed(7, 0);
    tt_module *whole = tt_attention_module(WIDTH, &options);
    tt_seed(7, 0);
    tt_module *ours = tt_heads_attention_module(WIDTH, &options, &how);
    tt_tensor *x = draw(1, tt_shape(BATCH, LENGTH, WIDTH)), *weights = draw(2, tt_shape(BATCH, LENGTH, WIDTH));
    tt_tensor *alone = tt_require_grad(tt_clone(x), true), *mine = leaf_of(x, sequence, group);
    tt_tensor *expected = tt_module_call(whole, alone), *y = tt_module_call(ours, mine);
    CHECK(close_to(y, sequence ? part(expected, 1, group) : expected));
    CHECK(tt_backward(tt_sum(tt_mul(expected, weights)), NULL));
    CHECK(tt_backward(tt_sum(tt_mul(y, sequence ? part(weights, 1, group) : weights)), NULL));
    CHECK(close_to(tt_grad(mine), sequence ? part(tt_grad(alone), 1, group) : tt_grad(alone)));
    CHECK(close_to(grad_of(ours, "out", "weight"), part(grad_of(whole, "out", "weight"), 1, group)));
    tt_tensor *keys = tt_narrow(grad_of(whole, "qkv", "weight"), 0, WIDTH, WIDTH);
    CHECK(close_to(tt_narrow(grad_of(ours, "qkv", "weight"), 0, WIDTH / ranks, WIDTH / ranks), part(keys, 0, group)));
    tt_module_release(whole);
    tt_module_release(ours);
    END_CUT;
}

TEST_CUTS(embeddings_are_cut_by_vocabulary) {
    BEGIN_CUT(argument);
    tt_seed(7, 0);
    tt_module *whole = tt_embedding_module(WORDS, WIDTH, TUTTI_F32);
    tt_seed(7, 0);
    tt_module *ours = tt_vocabulary_embedding_module(WORDS, WIDTH, &how);
    tt_seed(3, 0);
    tt_tensor *index = tt_randint(0, WORDS, tt_shape(BATCH, LENGTH), TUTTI_I64, NULL);
    tt_tensor *weights = draw(2, tt_shape(BATCH, LENGTH, WIDTH));
    tt_tensor *expected = tt_module_call(whole, index), *y = tt_module_call(ours, index);
    CHECK(close_to(y, sequence ? part(expected, 1, group) : expected));
    CHECK(tt_backward(tt_sum(tt_mul(expected, weights)), NULL));
    CHECK(tt_backward(tt_sum(tt_mul(y, sequence ? part(weights, 1, group) : weights)), NULL));
    CHECK(close_to(grad_of(ours, NULL, "weight"), part(grad_of(whole, NULL, "weight"), 0, group)));
    tt_module_release(whole);
    tt_module_release(ours);
    END_CUT;
}

TEST_CUTS(the_cross_entropy_of_cut_logits_is_that_of_whole_ones) {
    BEGIN_CUT(argument);
    tt_tensor *logits = tt_mul_scalar(draw(1, tt_shape(10, WORDS)), 20);
    tt_seed(3, 0);
    tt_tensor *targets = tt_randint(0, WORDS, tt_shape(10), TUTTI_I64, NULL);
    tt_fill_(tt_narrow(targets, 0, 4, 2), -100);
    tt_tensor *alone = tt_require_grad(tt_clone(logits), true);
    tt_tensor *mine = tt_require_grad(tt_clone(part(logits, 1, group)), true);
    tt_tensor *expected = tt_cross_entropy(alone, targets, -100);
    tt_tensor *loss = tt_vocabulary_cross_entropy(mine, targets, -100, group);
    CHECK(close_to(loss, expected));
    CHECK(tt_backward(expected, NULL) && tt_backward(loss, NULL));
    CHECK(close_to(tt_grad(mine), part(tt_grad(alone), 1, group)));
    END_CUT;
}

/* A norm that sees a part of the sequence on each rank has whole gradients after they are summed. */
TEST_CUTS(gradients_of_what_every_rank_has_are_summed) {
    BEGIN_CUT(argument);
    tt_module *whole = tt_layer_norm_module(WIDTH, 1e-5, TUTTI_F32),
              *ours = tt_layer_norm_module(WIDTH, 1e-5, TUTTI_F32);
    tt_tensor *x = draw(1, tt_shape(BATCH, LENGTH, WIDTH)), *weights = draw(2, tt_shape(BATCH, LENGTH, WIDTH));
    CHECK(tt_sum_gradients(ours, group));
    CHECK(tt_backward(tt_sum(tt_mul(tt_module_call(whole, x), weights)), NULL));
    CHECK(tt_backward(tt_sum(tt_mul(tt_module_call(ours, part(x, 1, group)), part(weights, 1, group))), NULL));
    CHECK(close_to(grad_of(ours, NULL, "weight"), grad_of(whole, NULL, "weight")));
    CHECK(close_to(grad_of(ours, NULL, "bias"), grad_of(whole, NULL, "bias")));
    tt_module_release(whole);
    tt_module_release(ours);
    END_CUT;
}

/* Layers that are cut in one dimension of a mesh, and sharded in the other. */
TEST_WORLD(a_mesh_has_tensor_parallel_layers_that_are_fully_sharded, 4) {
    tutti_mesh *mesh;
    tutti_group_form form;
    int rank = tutti_world_rank(world);
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 2 }, 2, NULL, &mesh));
    tt_scope scope = tt_scope_open();
    tutti_group *data = tt_group(world, tutti_form_mesh_dim(&form, mesh, 0), NULL);
    tutti_group *tensor = tt_group(world, tutti_form_mesh_dim(&form, mesh, 1), NULL);
    tt_tensor_parallel_options how = { .size = sizeof how, .group = tensor };
    tt_seed(7, 0);
    tt_module *plain[] = { tt_linear_module(WIDTH, 4 * WIDTH, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                           tt_linear_module(4 * WIDTH, WIDTH, true, TUTTI_F32) };
    tt_seed(7, 0);
    tt_module *cut[] = { tt_column_linear_module(WIDTH, 4 * WIDTH, true, &how), tt_function_module("gelu", tt_gelu),
                         tt_row_linear_module(4 * WIDTH, WIDTH, true, &how) };
    tt_module *whole = tt_sequential_module(3, plain), *ours = tt_sequential_module(3, cut);
    tt_fully_sharded *sharded = tt_fully_shard(ours, 0, NULL, data, NULL);
    tt_optimizer *optimizer = tt_sgd_optimizer(ours, NULL), *reference = tt_sgd_optimizer(whole, NULL);
    for (int step = 0; step < 3; step++) {
        const double limit = 0.01; /* below the norm */
        tt_tensor *batches[2] = { draw(10 + step, tt_shape(3, WIDTH)), draw(20 + step, tt_shape(3, WIDTH)) };
        CHECK(tt_backward(tt_mean(tt_square(tt_module_call(ours, batches[rank / 2]))), NULL));
        CHECK(tt_backward(tt_mean(tt_square(tt_module_call(whole, tt_cat(tt_tensors_of(2, batches), 0)))), NULL));
        tt_named_list all = tt_module_parameters(whole);
        tt_tensor *expected = tt_clip_grad_norm(tt_tensors_of(all.count, all.at), limit, NULL);
        CHECK(close_to(tt_module_clip_grad_norm(ours, limit, data), expected) && tt_item(expected) > limit);
        tt_optimizer_step(optimizer);
        tt_optimizer_step(reference);
        tt_optimizer_zero_grad(optimizer);
        tt_optimizer_zero_grad(reference);
    }
    tt_tensor *rows = tt_named(tt_fully_sharded_parameters(sharded), "0.weight");
    CHECK(close_to(rows, part(tt_module_parameter(tt_module_child(whole, "0"), "weight"), 0, tensor)));
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(whole);
    tt_module_release(ours);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    tutti_mesh_release(mesh);
}

TEST_WORLD_THREADS(bytes_find_their_rows_in_a_vocabulary_of_more, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor_parallel_options how = { sizeof how, group };
    tt_seed(7, 0);
    tt_module *whole = tt_embedding_module(512, 3, TUTTI_F32);
    tt_seed(7, 0);
    tt_module *ours = tt_vocabulary_embedding_module(512, 3, &how);
    tt_tensor *index = tt_arange(0, 200, 1, TUTTI_U8, NULL), *logits = draw(1, tt_shape(200, 512));
    CHECK(tt_equal(tt_detach(tt_module_call(ours, index)), tt_detach(tt_module_call(whole, index))));
    CHECK(close_to(tt_vocabulary_cross_entropy(part(logits, 1, group), index, -100, group),
                   tt_cross_entropy(logits, tt_to(index, TUTTI_I64), -100)));
    /* One that no rank has is an error, as it is for one rank. (A GPU tells it once, to one of the threads on it.) */
    if (!test_on_device()) {
        CHECK(tt_module_call(ours, tt_full(tt_shape(2), 512, TUTTI_I64, NULL)) == NULL);
        CHECK(tt_error_pending() != TUTTI_OK);
        tt_error_clear();
    }
    tt_module_release(whole);
    tt_module_release(ours);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD(generators_in_different_states_are_told_on_all_ranks, 2) {
    tt_scope scope = tt_scope_open();
    tt_tensor_parallel_options how = { .size = sizeof how, .group = tutti_world_group(world) };
    tt_seed(3, (uint32_t)tutti_world_rank(world));
    CHECK(tt_column_linear_module(4, 4, true, &how) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("column_linear_module: the random generators of ranks 0 and 1 are not in the same state");
    tt_error_clear();
    tt_seed(3, 0);
    tt_module *layer = tt_column_linear_module(4, 4, true, &how);
    CHECK(layer != NULL);
    tt_module_release(layer);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(clipping_counts_what_every_rank_has_once, 2) {
    BEGIN_CUT(NULL);
    tt_seed(7, 0);
    tt_module *row = tt_row_linear_module(4, 4, true, &how), *net = tt_sequential_module(1, &row);
    tt_set_grad(tt_module_parameter(row, "weight"), tt_full(tt_shape(4, 2), 3, TUTTI_F32, NULL)); /* 8 of 16 */
    tt_set_grad(tt_module_parameter(row, "bias"), tt_full(tt_shape(4), 2, TUTTI_F32, NULL));
    tt_tensor *norm = tt_module_clip_grad_norm(net, 1, NULL);
    CHECK(close_to(norm, tt_full(tt_shape(), sqrt(16 * 9 + 4 * 4), TUTTI_F64, NULL)) && sequence == false);
    CHECK(close_to(tt_grad(tt_module_parameter(row, "bias")), tt_full(tt_shape(4), 2 / sqrt(160), TUTTI_F32, NULL)));
    tt_clip_options options = { sizeof options, .p = INFINITY };
    tt_set_grad(tt_module_parameter(row, "weight"), tt_full(tt_shape(4, 2), 3 + rank, TUTTI_F32, NULL));
    CHECK_EQ(tt_item(tt_module_clip_grad_norm_by(net, 10, NULL, &options)), 4); /* rank 1's */
    options.p = 1;
    tt_set_grad(tt_module_parameter(row, "bias"), tt_full(tt_shape(4), -2, TUTTI_F32, NULL));
    CHECK_EQ(tt_item(tt_module_clip_grad_norm_by(net, 1e9, NULL, &options)), 8 * 3 + 8 * 4 + 4 * 2);
    CHECK(tt_module_clip_grad_norm(net, 0, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "limit is 0 and must be above 0");
    CHECK(tt_module_clip_grad_norm(NULL, 1, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "module is NULL");
    tt_module_release(net);
    END_CUT;
}

/* ---- what they run ---- */

static int pair_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_sum(tt_module_call(user, inputs.at[0]));
    tt_backward(outputs[0], NULL);
    return 1;
}

/* With `sequence` all that goes from rank to rank goes with a product, forward and backward; without it there is an
 * all-reduce behind the pair and one behind its backward, and nothing to fuse.
 */
TEST_CUTS(layers_use_fused_products_where_activations_are_cut) {
    BEGIN_CUT(argument);
    tt_seed(1, 0);
    tt_module *layers[] = { tt_column_linear_module(WIDTH, 4 * WIDTH, true, &how), tt_function_module("gelu", tt_gelu),
                            tt_row_linear_module(4 * WIDTH, WIDTH, false, &how) };
    tt_module *net = tt_sequential_module(3, layers);
    tt_tensor *x = leaf_of(draw(2, tt_shape(BATCH, LENGTH, WIDTH)), sequence, group);
    tt_graph *graph = NULL;
    CHECK(tt_capture(pair_step, net, tt_tensors(x), &graph));
    int gathers = tt_graph_count_of(graph, "fused_all_gather_matmul");
    int scatters = tt_graph_count_of(graph, "fused_matmul_reduce_scatter");
    CHECK_EQ(gathers, sequence ? 3 : 0);  /* the pair's own, and those of both layers' backwards */
    CHECK_EQ(scatters, sequence ? 2 : 0); /* the pair's own, and that of the column-wise layer's input */
    CHECK_EQ(tt_graph_count_of(graph, "all_gather") + tt_graph_count_of(graph, "reduce_scatter"), 0);
    CHECK((tt_graph_count_of(graph, "all_reduce") > 0) == !sequence);
    tt_graph_release(&graph);
    tt_module_release(net);
    END_CUT;
}

TEST_WORLD_THREADS(sizes_that_cannot_be_cut_are_refused, 2) {
    BEGIN_CUT(argument);
    CHECK(tt_column_linear_module(4, 5, true, &how) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "out is 5 and must be divisible by the 2 ranks");
    CHECK(tt_row_linear_module(3, 4, true, &how) == NULL);
    CHECK_MESSAGE("in is 3");
    tt_error_clear();
    CHECK(tt_vocabulary_embedding_module(7, 4, &how) == NULL);
    CHECK_MESSAGE("count is 7");
    tt_error_clear();
    tt_attention_options heads = { .size = sizeof heads, .heads = 1 };
    CHECK(tt_heads_attention_module(4, &heads, &how) == NULL);
    CHECK_MESSAGE("the number of heads is 1");
    tt_error_clear();
    CHECK(tt_column_linear_module(4, 4, true, NULL) == NULL);
    CHECK_MESSAGE("options->group is NULL");
    tt_error_clear();
    CHECK(tt_vocabulary_cross_entropy(tt_zeros(tt_shape(2, 3), TUTTI_F32, NULL), tt_zeros(tt_shape(3), TUTTI_I64, NULL),
                                      -100, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "they must be (n, classes / ranks)");
    END_CUT;
}
