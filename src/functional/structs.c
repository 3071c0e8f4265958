/* SPDX-License-Identifier: Apache-2.0
 *
 * The public structs of libtutti-tensor for languages without macros: zero is the default of every field.
 */
#include <tutti/tensors.h>

#include "base/error.h"

#define STRUCT(type)                            \
    void type##_init(type *made, size_t size) { \
        tu_struct_init(made, size);             \
    }

STRUCT(tt_counts)
STRUCT(tt_device_memory)
STRUCT(tt_options)
STRUCT(tt_backward_options)
STRUCT(tt_hook_options)
STRUCT(tt_saved_hooks)
STRUCT(tt_function)
STRUCT(tt_module_type)
STRUCT(tt_attention_options)
STRUCT(tt_sgd)
STRUCT(tt_adamw)
STRUCT(tt_parameter_group)
STRUCT(tt_clip_options)
STRUCT(tt_schedule)
STRUCT(tt_tokens_options)
STRUCT(tt_progress_options)
STRUCT(tt_operator_info)
STRUCT(tt_argument_info)
STRUCT(tt_symm_options)
STRUCT(tt_graph_counts)
STRUCT(tt_compile_options)
STRUCT(tt_compiled_counts)
STRUCT(tt_backward_cache_options)
STRUCT(tt_backward_counts)
STRUCT(tt_fused_scaled_options)
STRUCT(tt_bucket)
STRUCT(tt_data_parallel_options)
STRUCT(tt_data_parallel_counts)
STRUCT(tt_shard_transfer)
STRUCT(tt_fully_sharded_options)
STRUCT(tt_fully_sharded_counts)
STRUCT(tt_tensor_parallel_options)
