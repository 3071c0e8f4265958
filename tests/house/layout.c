/* SPDX-License-Identifier: Apache-2.0
 *
 * The layout of every public struct that begins with its size: programs that were compiled against an older header keep
 * working, so fields neither move nor change their size; new ones come last.
 */
#include <tutti/backward.h>
#include <tutti/graph.h>
#include <tutti/parallel.h>
#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "../harness.h"

#define AT(type, field, offset) CHECK_EQ(offsetof(type, field), offset)

TEST(structs_of_autograd_h_stay_as_they_are) {
    AT(tt_backward_options, size, 0);
    AT(tt_backward_options, retain_graph, 8);
    AT(tt_backward_options, create_graph, 9);
    AT(tt_backward_options, inputs, 16);
    AT(tt_hook_options, size, 0);
    AT(tt_hook_options, captured, 8);
    AT(tt_hook_options, first, 24);
    AT(tt_hook_options, always, 25);
    AT(tt_hook_options, opaque, 26);
    AT(tt_saved_hooks, size, 0);
    AT(tt_saved_hooks, pack, 8);
    AT(tt_saved_hooks, unpack, 16);
    AT(tt_saved_hooks, release, 24);
    AT(tt_saved_hooks, user, 32);
    AT(tt_function, size, 0);
    AT(tt_function, name, 8);
    AT(tt_function, forward, 16);
    AT(tt_function, backward, 24);
    AT(tt_function, release, 32);
    AT(tt_function, symmetric, 40);
    AT(tt_function, group, 48);
}

TEST(structs_of_call_h_stay_as_they_are) {
    AT(tutti_received, size, 0);
    AT(tutti_received, source, 8);
    AT(tutti_received, tag, 12);
    AT(tutti_received, count, 16);
    AT(tutti_call, size, 0);
    AT(tutti_call, timeout_ns, 8);
    AT(tutti_call, stream, 16);
    AT(tutti_call, algorithm, 24);
    AT(tutti_call, factor, 32);
    AT(tutti_call, received, 40);
    AT(tutti_call, work, 48);
    AT(tutti_call, batch, 56);
    AT(tutti_call, executor, 64);
    AT(tutti_call, device, 72);
    AT(tutti_call, strided_in, 80);
    AT(tutti_call, strided_out, 88);
    AT(tutti_call, order, 96);
    AT(tutti_strided, size, 0);
    AT(tutti_strided, block, 8);
    AT(tutti_strided, stride, 16);
}

TEST(structs_of_collective_h_stay_as_they_are) {
    AT(tutti_ran, size, 0);
    AT(tutti_ran, algorithm, 8);
    AT(tutti_ran, operation, 12);
    AT(tutti_ran, sequence, 48);
    AT(tutti_ran, direct_inputs, 56);
    AT(tutti_ran, direct_outputs, 60);
    AT(tutti_ran, why, 64);
    AT(tutti_ran, executor, 256);
}

TEST(structs_of_functional_h_stay_as_they_are) {
    AT(tt_symm_options, size, 0);
    AT(tt_symm_options, group, 8);
    AT(tt_symm_options, persistent, 16);
    AT(tt_symm_options, persistent_id, 24);
    AT(tt_symm_options, requires_grad, 32);
    AT(tt_symm_options, device, 36);
}

TEST(structs_of_fused_h_stay_as_they_are) {
    AT(tt_fused_scaled_options, size, 0);
    AT(tt_fused_scaled_options, biases, 8);
    AT(tt_fused_scaled_options, result_scales, 24);
    AT(tt_fused_scaled_options, out_dtypes, 40);
    AT(tt_fused_scaled_options, out_dtype_count, 48);
    AT(tt_fused_scaled_options, use_fast_accum, 56);
    AT(tt_fused_scaled_options, use_fast_accum_count, 64);
}

TEST(structs_of_group_h_stay_as_they_are) {
    AT(tutti_group_options, size, 0);
    AT(tutti_group_options, name, 8);
    AT(tutti_group_options, tag, 16);
    AT(tutti_group_options, description, 24);
    AT(tutti_group_options, timeout_ns, 32);
    AT(tutti_group_options, keep_order, 40);
    AT(tutti_group_options, local_synchronization, 41);
    AT(tutti_shrink_options, size, 0);
    AT(tutti_shrink_options, exclude, 8);
    AT(tutti_shrink_options, exclude_count, 16);
    AT(tutti_shrink_options, timeout_ns, 24);
    AT(tutti_group_form, size, 0);
    AT(tutti_group_form, kind, 8);
    AT(tutti_group_form, count, 12);
    AT(tutti_group_form, dim, 16);
    AT(tutti_group_form, group, 24);
    AT(tutti_group_form, name, 32);
    AT(tutti_group_form, ranks, 40);
    AT(tutti_group_form, lists, 48);
    AT(tutti_group_form, counts, 56);
    AT(tutti_group_form, mesh, 64);
    CHECK_EQ(sizeof(tutti_group_form), 72); /* its constructors write all of it */
    AT(tutti_group_expansion, size, 0);
    AT(tutti_group_expansion, tag, 8);
    AT(tutti_group_expansion, ranks, 136);
    AT(tutti_group_expansion, rank_count, 144);
    AT(tutti_group_expansion, group_size, 148);
}

TEST(structs_of_memory_h_stay_as_they_are) {
    AT(tutti_memory_options, size, 0);
    AT(tutti_memory_options, device, 8);
    AT(tutti_memory_options, alignment, 16);
    AT(tutti_memory_options, signal_pad_bytes, 24);
    AT(tutti_memory_options, group, 32);
    AT(tutti_memory_options, persistent, 40);
    AT(tutti_memory_options, persistent_id, 48);
    AT(tutti_memory_options, huge_pages, 56);
    AT(tutti_memory_options, stream, 64);
    AT(tutti_view, size, 0);
    AT(tutti_view, data, 8);
    AT(tutti_view, dtype, 16);
    AT(tutti_view, device, 20);
    AT(tutti_view, dim_count, 24);
    AT(tutti_view, shape, 32);
    AT(tutti_view, strides, 96);
}

TEST(structs_of_mesh_h_stay_as_they_are) {
    AT(tutti_mesh_options, size, 0);
    AT(tutti_mesh_options, names, 8);
    AT(tutti_mesh_options, ranks, 16);
    AT(tutti_mesh_options, rank_count, 24);
    AT(tutti_mesh_options, timeout_ns, 32);
    AT(tutti_mesh_options, no_groups, 40);
}

TEST(structs_of_module_h_stay_as_they_are) {
    AT(tt_module_type, size, 0);
    AT(tt_module_type, name, 8);
    AT(tt_module_type, forward, 16);
    AT(tt_module_type, release, 24);
    AT(tt_attention_options, size, 0);
    AT(tt_attention_options, heads, 8);
    AT(tt_attention_options, sees_all, 16);
    AT(tt_attention_options, bias, 17);
    AT(tt_attention_options, rope_base, 24);
    AT(tt_attention_options, dropout, 32);
    AT(tt_attention_options, dtype, 40);
}

TEST(structs_of_named_h_stay_as_they_are) {
    AT(tutti_rows, size, 0);
    AT(tutti_rows, in, 8);
    AT(tutti_rows, in_rows, 16);
    AT(tutti_rows, out, 24);
    AT(tutti_rows, out_rows, 32);
    AT(tutti_rows, row, 40);
    AT(tutti_rows, dtype, 48);
    AT(tutti_tile, size, 0);
    AT(tutti_tile, data, 8);
    AT(tutti_tile, rows, 16);
    AT(tutti_tile, columns, 24);
    AT(tutti_tile, stride, 32);
}

TEST(structs_of_ops_h_stay_as_they_are) {
    AT(tt_sgd, size, 0);
    AT(tt_sgd, learning_rate, 8);
    AT(tt_sgd, momentum, 16);
    AT(tt_sgd, weight_decay, 24);
    AT(tt_adamw, size, 0);
    AT(tt_adamw, learning_rate, 8);
    AT(tt_adamw, beta1, 16);
    AT(tt_adamw, beta2, 24);
    AT(tt_adamw, epsilon, 32);
    AT(tt_adamw, weight_decay, 40);
    AT(tt_parameter_group, size, 0);
    AT(tt_parameter_group, learning_rate, 8);
    AT(tt_parameter_group, weight_decay, 16);
    AT(tt_clip_options, size, 0);
    AT(tt_clip_options, p, 8);
    AT(tt_clip_options, finite, 16);
    AT(tt_schedule, size, 0);
    AT(tt_schedule, kind, 8);
    AT(tt_schedule, warm_up, 16);
    AT(tt_schedule, steps, 24);
    AT(tt_schedule, every, 32);
    AT(tt_schedule, factor, 40);
    AT(tt_schedule, last, 48);
    AT(tt_tokens_options, size, 0);
    AT(tt_tokens_options, dtype, 8);
    AT(tt_tokens_options, header_bytes, 16);
    AT(tt_tokens_options, length, 24);
    AT(tt_tokens_options, batch, 32);
    AT(tt_tokens_options, seed, 40);
    AT(tt_tokens_options, in_order, 48);
    AT(tt_tokens_options, rank, 52);
    AT(tt_tokens_options, rank_count, 56);
    AT(tt_progress_options, size, 0);
    AT(tt_progress_options, steps, 8);
    AT(tt_progress_options, done, 16);
    AT(tt_progress_options, file, 24);
    AT(tt_progress_options, world, 32);
    AT(tt_operator_info, size, 0);
    AT(tt_operator_info, name, 8);
    AT(tt_operator_info, family, 16);
    AT(tt_operator_info, summary, 24);
    AT(tt_operator_info, prototype, 32);
    AT(tt_operator_info, dtypes, 40);
    AT(tt_operator_info, expression, 48);
    AT(tt_operator_info, argument_count, 56);
    AT(tt_operator_info, result_count, 60);
    AT(tt_operator_info, saved_count, 64);
    AT(tt_operator_info, in_place, 68);
    AT(tt_operator_info, view, 69);
    AT(tt_operator_info, differentiable, 70);
    AT(tt_operator_info, pure, 71);
    AT(tt_operator_info, composite, 72);
    AT(tt_operator_info, differs, 80);
    AT(tt_argument_info, size, 0);
    AT(tt_argument_info, name, 8);
    AT(tt_argument_info, type, 16);
    AT(tt_argument_info, optional, 20);
    AT(tt_argument_info, written, 21);
    AT(tt_argument_info, declaration, 24);
}

TEST(structs_of_pool_h_stay_as_they_are) {
    AT(tutti_pool_statistics, size, 0);
    AT(tutti_pool_statistics, used_blocks, 8);
    AT(tutti_pool_statistics, used_bytes, 16);
    AT(tutti_pool_statistics, idle_blocks, 24);
    AT(tutti_pool_statistics, idle_bytes, 32);
    AT(tutti_pool_statistics, reused, 40);
}

TEST(structs_of_status_h_stay_as_they_are) {
    AT(tutti_error_info, size, 0);
    AT(tutti_error_info, status, 8);
    AT(tutti_error_info, rank, 12);
    AT(tutti_error_info, sequence, 16);
    AT(tutti_error_info, group, 24);
    AT(tutti_error_info, operation, 88);
    AT(tutti_error_info, system_error, 120);
    AT(tutti_error_info, at_fault_count, 124);
    AT(tutti_error_info, at_fault, 128);
    AT(tutti_error_copy, size, 0);
    AT(tutti_error_copy, message, 8);
    AT(tutti_error_copy, info, 2056);
}

TEST(structs_of_store_h_stay_as_they_are) {
    AT(tutti_file_store_options, size, 0);
    AT(tutti_file_store_options, timeout_ns, 8);
    AT(tutti_file_store_options, workers, 16);
    AT(tutti_tcp_store_options, size, 0);
    AT(tutti_tcp_store_options, timeout_ns, 8);
    AT(tutti_tcp_store_options, server, 16);
    AT(tutti_tcp_store_options, workers, 20);
    AT(tutti_tcp_store_options, no_wait, 24);
    AT(tutti_tcp_store_options, listen_fd, 28);
    AT(tutti_tcp_store_options, secret, 32);
    AT(tutti_tcp_store_options, secret_bytes, 40);
    AT(tutti_tcp_store_options, trust_network, 48);
}

TEST(structs_of_tensor_h_stay_as_they_are) {
    AT(tt_counts, size, 0);
    AT(tt_counts, tensors, 8);
    AT(tt_counts, storages, 16);
    AT(tt_counts, scopes, 24);
    AT(tt_counts, nodes, 32);
    AT(tt_device_memory, size, 0);
    AT(tt_device_memory, allocated, 8);
    AT(tt_device_memory, reserved, 16);
    AT(tt_device_memory, peak_allocated, 24);
    AT(tt_device_memory, peak_reserved, 32);
    AT(tt_device_memory, limit, 40);
    AT(tt_device_memory, allocations, 48);
    AT(tt_device_memory, reservations, 56);
    AT(tt_device_memory, retries, 64);
    AT(tt_graph_counts, size, 0);
    AT(tt_graph_counts, vertices, 8);
    AT(tt_graph_counts, inputs, 12);
    AT(tt_graph_counts, constants, 16);
    AT(tt_graph_counts, outputs, 20);
    AT(tt_graph_counts, collectives, 24);
    AT(tt_compile_options, size, 0);
    AT(tt_compile_options, mode, 8);
    AT(tt_compile_options, full, 12);
    AT(tt_compile_options, strict, 13);
    AT(tt_compile_options, dynamic, 16);
    AT(tt_compile_options, skip, 24);
    AT(tt_compile_options, with, 32);
    AT(tt_compile_options, name, 40);
    AT(tt_compile_options, replay, 48);
    AT(tt_compiled_counts, size, 0);
    AT(tt_compiled_counts, captures, 8);
    AT(tt_compiled_counts, entries, 12);
    AT(tt_compiled_counts, variants, 16);
    AT(tt_compiled_counts, vertices, 20);
    AT(tt_compiled_counts, eager, 24);
    AT(tt_compiled_counts, hits, 32);
    AT(tt_compiled_counts, misses, 40);
    AT(tt_compiled_counts, replays, 88);
    AT(tt_backward_cache_options, size, 0);
    AT(tt_backward_cache_options, full, 8);
    AT(tt_backward_counts, size, 0);
    AT(tt_backward_counts, captures, 8);
    AT(tt_backward_counts, vertices, 12);
    AT(tt_backward_counts, eager, 16);
    AT(tt_backward_counts, hits, 24);
    AT(tt_backward_counts, misses, 32);
    AT(tt_options, size, 0);
    AT(tt_options, device, 8);
    AT(tt_options, requires_grad, 12);
    AT(tt_options, name, 16);
}

TEST(structs_of_parallel_h_stay_as_they_are) {
    AT(tt_bucket, size, 0);
    AT(tt_bucket, index, 8);
    AT(tt_bucket, count, 12);
    AT(tt_bucket, values, 16);
    AT(tt_bucket, gradients, 24);
    AT(tt_bucket, group, 40);
    AT(tt_data_parallel_options, size, 0);
    AT(tt_data_parallel_options, bucket_bytes, 8);
    AT(tt_data_parallel_options, first_bucket_bytes, 16);
    AT(tt_data_parallel_options, find_unused, 24);
    AT(tt_data_parallel_options, static_graph, 25);
    AT(tt_data_parallel_options, own_buffers, 26);
    AT(tt_data_parallel_options, reduce, 32);
    AT(tt_data_parallel_options, user, 40);
    AT(tt_data_parallel_counts, size, 0);
    AT(tt_data_parallel_counts, buckets, 8);
    AT(tt_data_parallel_counts, backwards, 16);
    AT(tt_data_parallel_counts, reductions, 24);
    AT(tt_data_parallel_counts, early, 32);
    AT(tt_data_parallel_counts, bytes, 40);
    AT(tt_fully_sharded_options, size, 0);
    AT(tt_fully_sharded_options, reshard, 8);
    AT(tt_fully_sharded_options, replicas, 16);
    AT(tt_fully_sharded_options, param_dtype, 24);
    AT(tt_fully_sharded_options, reduce_dtype, 28);
    AT(tt_fully_sharded_options, output_dtype, 32);
    AT(tt_fully_sharded_options, keep_inputs, 36);
    AT(tt_fully_sharded_options, own_values, 37);
    AT(tt_fully_sharded_options, no_prefetch, 38);
    AT(tt_fully_sharded_options, divisor, 40);
    AT(tt_fully_sharded_options, watch, 48);
    AT(tt_fully_sharded_options, user, 56);
    AT(tt_fully_sharded_options, dimension, 64);
    AT(tt_fully_sharded_options, device, 72);
    AT(tt_fully_sharded_options, near_ranks, 76);
    AT(tt_fully_sharded_options, gather, 80);
    AT(tt_fully_sharded_options, reduce, 88);
    AT(tt_shard_transfer, size, 0);
    AT(tt_shard_transfer, unit, 8);
    AT(tt_shard_transfer, parts, 16);
    AT(tt_shard_transfer, wholes, 32);
    AT(tt_shard_transfer, group, 48);
    AT(tt_shard_transfer, divisor, 56);
    AT(tt_fully_sharded_counts, size, 0);
    AT(tt_fully_sharded_counts, units, 8);
    AT(tt_fully_sharded_counts, gathered, 12);
    AT(tt_fully_sharded_counts, gathers, 16);
    AT(tt_fully_sharded_counts, reductions, 24);
    AT(tt_fully_sharded_counts, shard_bytes, 32);
    AT(tt_fully_sharded_counts, gathered_bytes, 40);
    AT(tt_fully_sharded_counts, most_gathered_bytes, 48);
    AT(tt_tensor_parallel_options, size, 0);
    AT(tt_tensor_parallel_options, group, 8);
    AT(tt_tensor_parallel_options, dtype, 16);
    AT(tt_tensor_parallel_options, sequence, 20);
}

TEST(structs_of_trace_h_stay_as_they_are) {
    AT(tutti_counters, size, 0);
    AT(tutti_counters, calls, 8);
    AT(tutti_counters, failures, 16);
    AT(tutti_counters, bytes, 24);
    AT(tutti_counters, time_ns, 32);
    AT(tutti_counters, by_algorithm, 40);
}

TEST(structs_of_world_h_stay_as_they_are) {
    AT(tutti_world_options, size, 0);
    AT(tutti_world_options, name, 8);
    AT(tutti_world_options, rank, 16);
    AT(tutti_world_options, rank_count, 20);
    AT(tutti_world_options, store, 24);
    AT(tutti_world_options, store_url, 32);
    AT(tutti_world_options, timeout_ns, 40);
    AT(tutti_world_options, threads, 48);
    AT(tutti_world_options, log, 56);
    AT(tutti_world_options, log_callback, 64);
    AT(tutti_world_options, log_user, 72);
    AT(tutti_world_options, settings, 80);
    AT(tutti_event, size, 0);
    AT(tutti_event, kind, 8);
    AT(tutti_event, status, 12);
    AT(tutti_event, rank, 16);
    AT(tutti_event, group, 20);
    AT(tutti_event, text, 84);
    AT(tutti_fake_options, size, 0);
    AT(tutti_fake_options, error_on_collective, 8);
}

TEST(a_view_stays_as_it_is) {
    CHECK_EQ(sizeof(tutti_view), 160);
}
