/* SPDX-License-Identifier: Apache-2.0
 *
 * The layout of the public structs of symmetric memory: programs that were compiled against an older header keep working, so fields neither
 * move nor change their size.
 */
#include <tutti/memory.h>
#include <tutti/pool.h>

#include "../harness.h"

#define AT(type, field, offset) CHECK_EQ(offsetof(type, field), offset)

TEST(fields_of_options_and_results_stay_where_they_are) {
    AT(tutti_memory_options, size, 0);
    AT(tutti_memory_options, device, 8);
    AT(tutti_memory_options, device_index, 12);
    AT(tutti_memory_options, alignment, 16);
    AT(tutti_memory_options, signal_pad_bytes, 24);
    AT(tutti_memory_options, group, 32);
    AT(tutti_memory_options, persistent, 40);
    AT(tutti_memory_options, persistent_id, 48);
    AT(tutti_memory_options, huge_pages, 56);
    AT(tutti_view, data, 8);
    AT(tutti_view, dtype, 16);
    AT(tutti_view, device, 20);
    AT(tutti_view, device_index, 24);
    AT(tutti_view, dimensions, 28);
    AT(tutti_view, shape, 32);
    AT(tutti_view, strides, 96);
    CHECK_EQ(sizeof(tutti_view), 160);
    AT(tutti_pool_statistics, used_blocks, 8);
    AT(tutti_pool_statistics, reused, 40);
    CHECK_EQ(TUTTI_CPU, 1);
    CHECK_EQ(TUTTI_CUDA, 2);
}

/* A program that knows only the first fields: the others are defaults, and nothing beyond its size is read. */
TEST(an_older_and_shorter_options_struct_is_understood) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    struct {
        size_t size;
        tutti_device device;
        int device_index;
        size_t alignment;
        unsigned char beyond[64];
    } old = { .size = 24, .device = TUTTI_CPU, .device_index = -1, .alignment = 4096 };
    memset(old.beyond, 0xff, sizeof old.beyond);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 100, (const tutti_memory_options *)&old, &memory));
    CHECK_EQ((uintptr_t)tutti_memory_data(memory) % 4096, 0);
    CHECK_EQ(tutti_memory_pad_bytes(memory), 9216);
    tutti_memory_release(memory);
    tutti_pool *pool;
    CHECK_OK(tutti_pool_create(world, NULL, &pool));
    struct {
        size_t size;
        size_t used_blocks;
        size_t guard;
    } few = { .size = 16, .guard = 4711 };
    CHECK_OK(tutti_pool_query(pool, (tutti_pool_statistics *)&few));
    CHECK_EQ(few.guard, 4711);
    tutti_pool_release(pool);
    CHECK_OK(tutti_world_close(world));
}
