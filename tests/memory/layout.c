/* SPDX-License-Identifier: Apache-2.0
 *
 * Options of older programs: a struct that ends earlier than today's is understood. Where fields are is pinned in
 * tests/house/layout.c.
 */
#include <tutti/memory.h>
#include <tutti/pool.h>

#include "../harness.h"

/* A program that knows only the first fields: the others are defaults, and nothing beyond its size is read. */
TEST(an_older_and_shorter_options_struct_is_understood) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    struct {
        size_t size;
        tutti_device device;
        int hole;
        size_t alignment;
        unsigned char beyond[64];
    } old = { .size = 24, .device = TUTTI_CPU, .alignment = 4096 };
    memset(old.beyond, 0xff, sizeof old.beyond);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 100, (const tutti_memory_options *)&old, &memory));
    CHECK_EQ((uintptr_t)tutti_memory_data(memory) % 4096, 0);
    CHECK_EQ(tutti_memory_pad_bytes(memory), 9216);
    tutti_memory_release(memory);
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, NULL, &pool));
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
