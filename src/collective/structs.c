/* SPDX-License-Identifier: Apache-2.0
 *
 * The public structs of libtutti for languages without macros: zero is the default of every field.
 */
#include <tutti/tutti.h>

#include "base/error.h"

#define STRUCT(type)                            \
    void type##_init(type *made, size_t size) { \
        tu_struct_init(made, size);             \
    }

STRUCT(tutti_error_info)
STRUCT(tutti_error_copy)
STRUCT(tutti_file_store_options)
STRUCT(tutti_tcp_store_options)
STRUCT(tutti_world_options)
STRUCT(tutti_fake_options)
STRUCT(tutti_event)
STRUCT(tutti_group_options)
STRUCT(tutti_shrink_options)
STRUCT(tutti_group_expansion)
STRUCT(tutti_mesh_options)
STRUCT(tutti_memory_options)
STRUCT(tutti_view)
STRUCT(tutti_pool_statistics)
STRUCT(tutti_received)
STRUCT(tutti_strided)
STRUCT(tutti_call)
STRUCT(tutti_ran)
STRUCT(tutti_rows)
STRUCT(tutti_tile)
STRUCT(tutti_counters)
