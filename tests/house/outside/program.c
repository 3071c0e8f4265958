/* SPDX-License-Identifier: Apache-2.0
 *
 * What a user writes first, valid as C and as C++11: two ranks add their numbers.
 */
#include <stdio.h>

#include <tutti/tutti.h>

#if !defined(__cplusplus) || __cplusplus >= 202002L
#define DEFAULTS TUTTI_OPTIONS(tutti_call, .timeout_ns = 0, .algorithm = TUTTI_ALGORITHM_AUTO)
#else
#define DEFAULTS NULL
#endif

static tutti_status add(tutti_world *world, void *unused) {
    float in = (float)(1 + tutti_world_rank(world)), out = 0;
    tutti_status status = tutti_all_reduce(tutti_world_group(world), &in, &out, 1, TUTTI_F32, TUTTI_SUM, DEFAULTS);
    (void)unused;
    if (status == TUTTI_OK && tutti_world_rank(world) == 0)
        printf("sum %g\n", (double)out);
    return status;
}

/* The initializers are other texts in C than in C++. */
static size_t sizes_of_options(void) {
    tutti_received received = TUTTI_RECEIVED_INIT;
    tutti_call call = TUTTI_CALL_INIT;
    tutti_ran ran = TUTTI_RAN_INIT;
    tutti_group_options group_options = TUTTI_GROUP_OPTIONS_INIT;
    tutti_shrink_options shrink_options = TUTTI_SHRINK_OPTIONS_INIT;
    tutti_group_expansion group_expansion = TUTTI_GROUP_EXPANSION_INIT;
    tutti_memory_options memory_options = TUTTI_MEMORY_OPTIONS_INIT;
    tutti_view view = TUTTI_VIEW_INIT;
    tutti_mesh_options mesh_options = TUTTI_MESH_OPTIONS_INIT;
    tutti_rows rows = TUTTI_ROWS_INIT;
    tutti_pool_statistics pool_statistics = TUTTI_POOL_STATISTICS_INIT;
    tutti_error_info error_info = TUTTI_ERROR_INFO_INIT;
    tutti_file_store_options file_store_options = TUTTI_FILE_STORE_OPTIONS_INIT;
    tutti_tcp_store_options tcp_store_options = TUTTI_TCP_STORE_OPTIONS_INIT;
    tutti_counters counters = TUTTI_COUNTERS_INIT;
    tutti_world_options world_options = TUTTI_WORLD_OPTIONS_INIT;
    tutti_fake_options fake_options = TUTTI_FAKE_OPTIONS_INIT;
    return received.size + call.size + ran.size + group_options.size + shrink_options.size + group_expansion.size +
           memory_options.size + view.size + mesh_options.size + rows.size + pool_statistics.size + error_info.size +
           file_store_options.size + tcp_store_options.size + counters.size + world_options.size + fake_options.size;
}

int main(void) {
    if (sizes_of_options() == 0)
        return 1;
    if (tutti_spawn(TUTTI_SPAWN_THREADS, 2, add, NULL) == TUTTI_OK)
        return 0;
    fprintf(stderr, "%s\n", tutti_error_message());
    return 1;
}
