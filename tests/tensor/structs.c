/* SPDX-License-Identifier: Apache-2.0
 *
 * Public structs: the three ways to make one agree, and zero is the default of every option.
 */
#include <math.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "support.h"

/* INIT, TUTTI_OPTIONS and the function give the same bytes; the function writes as much as it is told. */
#define AGREES(type, initializer)                                                   \
    do {                                                                            \
        struct {                                                                    \
            type made;                                                              \
            unsigned char guard[8];                                                 \
        } by_function;                                                              \
        memset(&by_function, 0x5a, sizeof by_function);                             \
        static const type by_macro = initializer;                                   \
        const type *by_options = TUTTI_OPTIONS(type, );                             \
        type##_init(&by_function.made, sizeof(type));                               \
        CHECK_EQ(by_function.made.size, sizeof(type));                              \
        CHECK(memcmp(&by_function.made, &by_macro, sizeof(type)) == 0);             \
        CHECK_EQ(by_options->size, sizeof(type));                                   \
        CHECK_EQ(by_function.guard[0], 0x5a);                                       \
        memset(&by_function, 0x5a, sizeof by_function);                             \
        type##_init(&by_function.made, sizeof(size_t)); /* an older, shorter one */ \
        CHECK_EQ(by_function.made.size, sizeof(size_t));                            \
        CHECK_EQ(((unsigned char *)&by_function)[sizeof(size_t)], 0x5a);            \
        type##_init(NULL, sizeof(type));                                            \
    } while (0)

TEST(structs_of_libtutti_are_made_alike_in_every_way) {
    AGREES(tutti_error_info, TUTTI_ERROR_INFO_INIT);
    AGREES(tutti_error_copy, TUTTI_ERROR_COPY_INIT);
    AGREES(tutti_file_store_options, TUTTI_FILE_STORE_OPTIONS_INIT);
    AGREES(tutti_tcp_store_options, TUTTI_TCP_STORE_OPTIONS_INIT);
    AGREES(tutti_world_options, TUTTI_WORLD_OPTIONS_INIT);
    AGREES(tutti_fake_options, TUTTI_FAKE_OPTIONS_INIT);
    AGREES(tutti_event, TUTTI_EVENT_INIT);
    AGREES(tutti_group_options, TUTTI_GROUP_OPTIONS_INIT);
    AGREES(tutti_shrink_options, TUTTI_SHRINK_OPTIONS_INIT);
    AGREES(tutti_group_expansion, TUTTI_GROUP_EXPANSION_INIT);
    AGREES(tutti_mesh_options, TUTTI_MESH_OPTIONS_INIT);
    AGREES(tutti_memory_options, TUTTI_MEMORY_OPTIONS_INIT);
    AGREES(tutti_view, TUTTI_VIEW_INIT);
    AGREES(tutti_pool_statistics, TUTTI_POOL_STATISTICS_INIT);
    AGREES(tutti_received, TUTTI_RECEIVED_INIT);
    AGREES(tutti_strided, TUTTI_STRIDED_INIT);
    AGREES(tutti_call, TUTTI_CALL_INIT);
    AGREES(tutti_ran, TUTTI_RAN_INIT);
    AGREES(tutti_rows, TUTTI_ROWS_INIT);
    AGREES(tutti_tile, TUTTI_TILE_INIT);
    AGREES(tutti_counters, TUTTI_COUNTERS_INIT);
}

TEST(structs_of_libtutti_tensor_are_made_alike_in_every_way) {
    AGREES(tt_counts, TT_COUNTS_INIT);
    AGREES(tt_device_memory, TT_DEVICE_MEMORY_INIT);
    AGREES(tt_options, TT_OPTIONS_INIT);
    AGREES(tt_compile_options, TT_COMPILE_OPTIONS_INIT);
    AGREES(tt_compiled_counts, TT_COMPILED_COUNTS_INIT);
    AGREES(tt_backward_options, TT_BACKWARD_OPTIONS_INIT);
    AGREES(tt_hook_options, TT_HOOK_OPTIONS_INIT);
    AGREES(tt_saved_hooks, TT_SAVED_HOOKS_INIT);
    AGREES(tt_function, TT_FUNCTION_INIT);
    AGREES(tt_module_type, TT_MODULE_TYPE_INIT);
    AGREES(tt_attention_options, TT_ATTENTION_OPTIONS_INIT);
    AGREES(tt_sgd, TT_SGD_INIT);
    AGREES(tt_adamw, TT_ADAMW_INIT);
    AGREES(tt_parameter_group, TT_PARAMETER_GROUP_INIT);
    AGREES(tt_clip_options, TT_CLIP_OPTIONS_INIT);
    AGREES(tt_schedule, TT_SCHEDULE_INIT);
    AGREES(tt_tokens_options, TT_TOKENS_OPTIONS_INIT);
    AGREES(tt_progress_options, TT_PROGRESS_OPTIONS_INIT);
    AGREES(tt_operator_info, TT_OPERATOR_INFO_INIT);
    AGREES(tt_argument_info, TT_ARGUMENT_INFO_INIT);
    AGREES(tt_symm_options, TT_SYMM_OPTIONS_INIT);
    AGREES(tt_graph_counts, TT_GRAPH_COUNTS_INIT);
    AGREES(tt_backward_cache_options, TT_BACKWARD_CACHE_OPTIONS_INIT);
    AGREES(tt_backward_counts, TT_BACKWARD_COUNTS_INIT);
    AGREES(tt_fused_scaled_options, TT_FUSED_SCALED_OPTIONS_INIT);
    AGREES(tt_bucket, TT_BUCKET_INIT);
    AGREES(tt_data_parallel_options, TT_DATA_PARALLEL_OPTIONS_INIT);
    AGREES(tt_data_parallel_counts, TT_DATA_PARALLEL_COUNTS_INIT);
    AGREES(tt_shard_transfer, TT_SHARD_TRANSFER_INIT);
    AGREES(tt_fully_sharded_options, TT_FULLY_SHARDED_OPTIONS_INIT);
    AGREES(tt_fully_sharded_counts, TT_FULLY_SHARDED_COUNTS_INIT);
    AGREES(tt_tensor_parallel_options, TT_TENSOR_PARALLEL_OPTIONS_INIT);
}

/* One step from the same start; the value of the only parameter afterwards. */
static double adamw(const tt_adamw *options) {
    tt_scope scope = tt_scope_open();
    tt_tensor *parameter = tt_ones(tt_shape(1), TUTTI_F64, NULL), *m = tt_zeros_like(parameter);
    tt_tensor *v = tt_zeros_like(parameter);
    for (int step = 1; step <= 3; step++)
        CHECK(tt_adamw_step(parameter, tt_full(tt_shape(1), 0.25 * step, TUTTI_F64, NULL), m, v, step, options));
    double value = tt_item(parameter);
    CHECK_OK(tt_scope_close(&scope));
    return value;
}

TEST(one_option_of_an_optimizer_leaves_the_others_at_their_defaults) {
    double by_default = adamw(NULL);
    CHECK(by_default == adamw(TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.001)));
    CHECK(by_default == adamw(&(tt_adamw)TT_ADAMW_INIT));
    CHECK(by_default == adamw(TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.001, .beta1 = 0.9, .beta2 = 0.999,
                                            .epsilon = 1e-8, .weight_decay = 0.01)));
    double faster = adamw(TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.01));
    CHECK(faster < by_default && faster > 0.9); /* a number: epsilon and the betas were not zeroed */
}

TEST(an_option_of_an_optimizer_can_be_zero) {
    CHECK(adamw(TUTTI_OPTIONS(tt_adamw, .learning_rate = TUTTI_ZERO)) == 1);
    double decayed = adamw(NULL), plain = adamw(TUTTI_OPTIONS(tt_adamw, .weight_decay = TUTTI_ZERO));
    CHECK(plain > decayed);
    CHECK(adamw(TUTTI_OPTIONS(tt_adamw, .beta1 = TUTTI_ZERO)) != decayed);
}

static void refused(const tt_adamw *adamw, const tt_sgd *sgd, const char *field) {
    tt_scope scope = tt_scope_open();
    tt_tensor *parameter = tt_ones(tt_shape(1), TUTTI_F32, NULL), *m = tt_zeros_like(parameter);
    tt_tensor *v = tt_zeros_like(parameter), *gradient = tt_ones_like(parameter);
    if (adamw != NULL)
        CHECK(!tt_adamw_step(parameter, gradient, m, v, 1, adamw));
    else
        CHECK(!tt_sgd_step(parameter, gradient, m, sgd));
    CHECK_STATUS(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE(field);
    tt_error_clear();
    CHECK(tt_item(parameter) == 1);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(options_of_an_optimizer_that_cannot_work_are_named) {
    refused(TUTTI_OPTIONS(tt_adamw, .learning_rate = NAN), NULL, "tt_adamw.learning_rate is nan");
    refused(TUTTI_OPTIONS(tt_adamw, .learning_rate = -1), NULL, "tt_adamw.learning_rate is -1");
    refused(TUTTI_OPTIONS(tt_adamw, .learning_rate = INFINITY), NULL, "tt_adamw.learning_rate is inf");
    refused(TUTTI_OPTIONS(tt_adamw, .beta1 = 1), NULL, "tt_adamw.beta1 is 1");
    refused(TUTTI_OPTIONS(tt_adamw, .beta2 = 1.5), NULL, "tt_adamw.beta2 is 1.5");
    refused(TUTTI_OPTIONS(tt_adamw, .epsilon = -1e-8), NULL, "tt_adamw.epsilon");
    refused(TUTTI_OPTIONS(tt_adamw, .weight_decay = NAN), NULL, "tt_adamw.weight_decay");
    refused(NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = NAN), "tt_sgd.learning_rate is nan");
    refused(NULL, TUTTI_OPTIONS(tt_sgd, .momentum = 1), "tt_sgd.momentum is 1");
    refused(NULL, TUTTI_OPTIONS(tt_sgd, .weight_decay = -0.1), "tt_sgd.weight_decay is -0.1");
}

static void not_made(const tt_options *options, tutti_dtype dtype, tutti_status status, const char *fragment) {
    tt_scope scope = tt_scope_open();
    CHECK(tt_zeros(tt_shape(2), dtype, options) == NULL);
    CHECK_STATUS(tt_error_show(), status);
    CHECK_MESSAGE(fragment);
    CHECK_STATUS(tt_scope_close(&scope), status);
}

TEST(options_of_a_tensor_that_cannot_work_are_named) {
    not_made(&(tt_options){ 0 }, TUTTI_F32, TUTTI_ERROR_ARGUMENT, "tt_options.size is 0");
    not_made(TUTTI_OPTIONS(tt_options, .device = TUTTI_CUDA_AT(1)), TUTTI_F32, TUTTI_ERROR_UNSUPPORTED, "cuda:1");
    not_made(TUTTI_OPTIONS(tt_options, .device = 7), TUTTI_F32, TUTTI_ERROR_ARGUMENT, "device");
    not_made(TUTTI_OPTIONS(tt_options, .requires_grad = true), TUTTI_I32, TUTTI_ERROR_TYPE, "i32");
    not_made(NULL, (tutti_dtype)99, TUTTI_ERROR_TYPE, "dtype");
}

static int first_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = inputs.at[0];
    return 1;
}

/* A struct of zeros, whose size nobody set, is refused by its name, for options and for what is asked for. */
#define REFUSES(type, call)                                     \
    do {                                                        \
        type zeros = { 0 };                                     \
        (void)(call);                                           \
        expect_error(TUTTI_ERROR_ARGUMENT, #type ".size is 0"); \
    } while (0)

TEST_WORLD_THREADS(a_struct_without_its_size_is_refused_by_compilers_and_parallel_training, 1) {
    BEGIN;
    tt_compiled *compiled;
    tt_backward_cache *cache;
    tt_tensor *x = tt_ones(tt_shape(2, 2), TUTTI_F32, NULL);
    tt_module *module = tt_linear_module(2, 2, true, TUTTI_F32);
    REFUSES(tt_compile_options, tt_compile(first_of, NULL, &zeros, &compiled));
    REFUSES(tt_backward_cache_options, tt_backward_cache_new(&zeros, &cache));
    REFUSES(tt_data_parallel_options, tt_data_parallel_new(module, group, &zeros));
    REFUSES(tt_fully_sharded_options, tt_fully_shard(module, 0, NULL, group, &zeros));
    REFUSES(tt_clip_options, tt_module_clip_grad_norm_by(module, 1, NULL, &zeros));
    REFUSES(tt_tensor_parallel_options, tt_column_linear_module(2, 2, true, &zeros));
    REFUSES(tt_fused_scaled_options,
            tt_fused_all_gather_scaled_matmul(x, tt_tensors(x), x, tt_tensors(x), 0, group, &zeros, NULL));
    CHECK(tt_compile(first_of, NULL, NULL, &compiled) && tt_backward_cache_new(NULL, &cache));
    REFUSES(tt_compiled_counts, tt_compiled_count(compiled, &zeros));
    REFUSES(tt_backward_counts, tt_backward_cache_count(cache, &zeros));
    tt_graph *graph;
    CHECK(tt_capture(first_of, NULL, tt_tensors(x), &graph));
    REFUSES(tt_graph_counts, tt_graph_count(graph, &zeros));
    tt_data_parallel *parallel = tt_data_parallel_new(module, group, NULL);
    REFUSES(tt_data_parallel_counts, tt_data_parallel_count(parallel, &zeros));
    tt_data_parallel_release(parallel);
    tt_fully_sharded *sharded = tt_fully_shard(module, 0, NULL, group, NULL);
    REFUSES(tt_fully_sharded_counts, tt_fully_sharded_count(sharded, &zeros));
    tt_fully_sharded_release(sharded);
    tt_graph_release(&graph);
    tt_compiled_release(&compiled);
    tt_backward_cache_release(&cache);
    tt_module_release(module);
    END;
}

TEST_WORLD_THREADS(a_dtype_that_layers_cannot_have_is_named, 1) {
    BEGIN;
    CHECK(tt_column_linear_module(
              2, 2, true, TUTTI_OPTIONS(tt_tensor_parallel_options, .group = group, .dtype = TUTTI_I32)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "column_linear_module: tt_tensor_parallel_options.dtype is i32");
    END;
}
