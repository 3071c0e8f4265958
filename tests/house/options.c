/* SPDX-License-Identifier: Apache-2.0
 *
 * Options are validated: a value that cannot work is an error that names its field, whichever struct it stands in.
 */
#include <tutti/tutti.h>

#include "../harness.h"

#define REFUSES(status, field, call)  \
    do {                              \
        CHECK_STATUS((call), status); \
        CHECK_MESSAGE(field);         \
    } while (0)

#define HALF_A_SIZE \
    &(tutti_call) { \
        .size = 4   \
    }

TEST_WORLD_THREADS(options_of_calls_are_checked, 2) {
    tutti_group *group = tutti_world_group(world);
    float in = 1, out;
    REFUSES(TUTTI_ERROR_ARGUMENT, "tutti_call.size is 0", tutti_barrier(group, &(tutti_call){ 0 }));
    REFUSES(TUTTI_ERROR_ARGUMENT, "tutti_call.size is 4", tutti_barrier(group, HALF_A_SIZE));
    REFUSES(TUTTI_ERROR_ARGUMENT, "timeout_ns is -5",
            tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = -5)));
    REFUSES(TUTTI_ERROR_ARGUMENT, "algorithm",
            tutti_all_reduce(group, &in, &out, 1, TUTTI_F32, TUTTI_SUM,
                             TUTTI_OPTIONS(tutti_call, .algorithm = (tutti_algorithm)99)));
    REFUSES(TUTTI_ERROR_ARGUMENT, "factor", tutti_all_reduce(group, &in, &out, 1, TUTTI_F32, TUTTI_PREMUL_SUM, NULL));
    CHECK_OK(tutti_barrier(group, NULL)); /* a wrong argument ends nothing */
}

TEST_WORLD_THREADS(options_of_groups_are_checked, 2) {
    tutti_group *group;
    tutti_mesh *mesh;
    int shape[] = { 2 };
    REFUSES(TUTTI_ERROR_ARGUMENT, "timeout_ns",
            tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .timeout_ns = -1), &group));
    REFUSES(TUTTI_ERROR_ARGUMENT, "tutti_group_options.size is 0",
            tutti_group_new(world, NULL, 0, &(tutti_group_options){ 0 }, &group));
    REFUSES(
        TUTTI_ERROR_ARGUMENT, "timeout_ns",
        tutti_group_shrink(tutti_world_group(world), TUTTI_OPTIONS(tutti_shrink_options, .timeout_ns = -1), &group));
    REFUSES(
        TUTTI_ERROR_ARGUMENT, "exclude",
        tutti_group_shrink(tutti_world_group(world), TUTTI_OPTIONS(tutti_shrink_options, .exclude_count = 1), &group));
    REFUSES(
        TUTTI_ERROR_ARGUMENT, "exclude_count",
        tutti_group_shrink(tutti_world_group(world), TUTTI_OPTIONS(tutti_shrink_options, .exclude_count = -1), &group));
    REFUSES(TUTTI_ERROR_ARGUMENT, "timeout_ns",
            tutti_mesh_new(world, 0, shape, 1, TUTTI_OPTIONS(tutti_mesh_options, .timeout_ns = -1), &mesh));
    REFUSES(TUTTI_ERROR_ARGUMENT, "rank_count",
            tutti_mesh_new(world, 0, shape, 1, TUTTI_OPTIONS(tutti_mesh_options, .rank_count = -2), &mesh));
    REFUSES(TUTTI_ERROR_ARGUMENT, "rank_count",
            tutti_mesh_new(world, 0, shape, 1, TUTTI_OPTIONS(tutti_mesh_options, .rank_count = 2), &mesh));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(options_of_memory_are_checked) {
    tutti_world *world;
    tutti_memory *memory;
    CHECK_OK(tutti_world_open(NULL, &world));
    REFUSES(TUTTI_ERROR_UNSUPPORTED, "device",
            tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_META), &memory));
    REFUSES(TUTTI_ERROR_ARGUMENT, "alignment",
            tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .alignment = 3), &memory));
    REFUSES(TUTTI_ERROR_ARGUMENT, "signal pad",
            tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .signal_pad_bytes = 6), &memory));
    REFUSES(TUTTI_ERROR_ARGUMENT, "tutti_memory_options.huge_pages",
            tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .huge_pages = (tutti_choice)3), &memory));
    CHECK_OK(tutti_world_close(world));
}

TEST(options_of_stores_are_checked) {
    tutti_store *store;
    const char *path = "/nowhere/store";
    REFUSES(TUTTI_ERROR_ARGUMENT, "timeout_ns",
            tutti_store_open_file(path, TUTTI_OPTIONS(tutti_file_store_options, .timeout_ns = -1), &store));
    REFUSES(TUTTI_ERROR_ARGUMENT, "workers",
            tutti_store_open_file(path, TUTTI_OPTIONS(tutti_file_store_options, .workers = -1), &store));
    REFUSES(TUTTI_ERROR_ARGUMENT, "timeout_ns",
            tutti_store_open_tcp("localhost", 1, TUTTI_OPTIONS(tutti_tcp_store_options, .timeout_ns = -1), &store));
    REFUSES(TUTTI_ERROR_ARGUMENT, "workers",
            tutti_store_open_tcp("localhost", 1, TUTTI_OPTIONS(tutti_tcp_store_options, .workers = -1), &store));
    REFUSES(TUTTI_ERROR_ARGUMENT, "secret",
            tutti_store_open_tcp("localhost", 1,
                                 TUTTI_OPTIONS(tutti_tcp_store_options, .secret = "x", .secret_bytes = 1), &store));
    REFUSES(TUTTI_ERROR_ARGUMENT, "secret",
            tutti_store_open_tcp("localhost", 1, TUTTI_OPTIONS(tutti_tcp_store_options, .secret_bytes = 16), &store));
    REFUSES(TUTTI_ERROR_ARGUMENT, "listen_fd",
            tutti_store_open_tcp("localhost", 1, TUTTI_OPTIONS(tutti_tcp_store_options, .listen_fd = 3), &store));
}

TEST(options_of_worlds_are_checked) {
    tutti_world *world;
    REFUSES(TUTTI_ERROR_ARGUMENT, "tutti_world_options.threads is -2",
            tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .threads = -2), &world));
    REFUSES(TUTTI_ERROR_ARGUMENT, "rank -1", tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = -1), &world));
}
