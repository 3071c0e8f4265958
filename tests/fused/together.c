/* SPDX-License-Identifier: Apache-2.0
 *
 * Products that ranks make together in one kernel (TEST_DEVICE=cuda): what TUTTI_TOGETHER chooses, edges, and many more
 * tiles than thread blocks. What such a kernel does else is in device.c, which runs with either kernel.
 */
#include "fused/device.h"
#include "gpu.h"

/* One gather and one scatter of those sizes against the CPU: with a right matrix by rows or by columns, and a shard
 * that lies in symmetric memory or has to be copied. */
static void check_products(tutti_world *world, const int64_t extent[3], tutti_dtype dtype, bool by_columns,
                           bool placed) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_dims shape = tt_shape(extent[0], extent[2]), tall = tt_shape(extent[0] * ranks, extent[2]);
    tt_tensor *sum = NULL, *x = whole(shape, dtype, rank), *all = all_of(shape, dtype, ranks, 0), *rights[64];
    for (int from = 0; from < ranks; from++) {
        tt_tensor *matrix = whole(by_columns ? tt_shape(extent[1], extent[2]) : tt_shape(extent[2], extent[1]), dtype,
                                  40 + from),
                  *right = rights[from] = by_columns ? tt_transpose(matrix, 0, 1) : matrix,
                  *one = tt_to(part_of(tt_matmul(whole(tall, dtype, from), right), 0, rank, ranks), TUTTI_F32);
        sum = from == 0 ? one : tt_add(sum, one);
    }
    tt_tensor *right = by_columns ? by_columns_there(rights[rank]) : there(rights[rank]),
              *shard = placed ? symmetric_there(world, x) : there(x);
    for (int round = 0; round < 2; round++) {
        tt_tensor_list made = tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL);
        CHECK(made.count == 1 && tt_equal(back(made.at[0]), tt_matmul(all, rights[rank])));
        tt_tensor *part = tt_fused_matmul_reduce_scatter(there(whole(tall, dtype, rank)), right, TUTTI_SUM, 0, group);
        CHECK(part != NULL && tt_equal(back(part), tt_to(sum, dtype)));
    }
}

/* Less than a row of a warp, one more or less than its part of a tile, than half a tile, than a tile; columns and depth
 * in multiples of eight, the only ones that one kernel takes. */
TEST_RANKS(every_edge_of_rows_columns_and_depth_is_right) {
    static const int64_t extents[][3] = { { 1, 8, 8 },     { 15, 24, 40 },  { 63, 72, 24 },
                                          { 65, 264, 32 }, { 127, 56, 72 }, { 129, 520, 104 } };
    BEGIN;
    int64_t before = tu_fused_together(group);
    int count = (int)(sizeof extents / sizeof extents[0]);
    for (int i = 0; i < count * 4; i += is_gpu() ? 1 : 3)
        check_products(world, extents[i / 4], i % 2 == 0 ? TUTTI_BF16 : TUTTI_F16, (i + i / 4) % 2 != 0,
                       i / 2 % 2 != 0);
    CHECK(!is_one_kernel() || tu_fused_together(group) - before == 4 * (is_gpu() ? 4 * count : (4 * count + 2) / 3));
    END;
}

/* A rank has at most half of the device's processors: 66 of an H200's, 2 of the stand-in's. */
TEST_RANKS(fewer_thread_blocks_than_tiles_are_enough) {
    BEGIN;
    int64_t extent[3] = { is_gpu() ? 1024 : 256, is_gpu() ? 8192 : 1024, 16 };
    for (int placed = 0; placed < 2; placed++)
        check_products(world, extent, TUTTI_BF16, placed != 0, placed != 0);
    END;
}

/* A world beside the test's whose rank has that setting; it may differ from rank to rank. */
static tutti_world *world_with(const char *setting) {
    tutti_world *world = NULL;
    char text[64];
    snprintf(text, sizeof text, "TUTTI_TOGETHER=%s", setting);
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = setting, .settings = text), &world));
    return world;
}

TEST_RANKS(a_setting_chooses_the_kernel_or_none) {
    static const char *const settings[] = { "off", "plain", "hopper" };
    BEGIN;
    int least[] = { 99, 8, 9 }; /* generations that have it */
    const int64_t extent[3] = { 40, 264, 24 };
    for (int i = 0; i < 3; i++) {
        tutti_world *other = world_with(settings[i]);
        tutti_group *its = tutti_world_group(other);
        check_products(other, extent, TUTTI_BF16, false, false);
        bool there = generation_of_gpu() >= least[i] && (i != 2 || generation_of_gpu() == 9);
        CHECK_EQ(tu_fused_together(its), there ? 4 : 0);
        CHECK_OK(tutti_barrier(its, NULL));
        CHECK_OK(tutti_world_close(other));
    }
    END;
}

TEST_RANKS(ranks_whose_settings_differ_are_told_and_nothing_ends) {
    BEGIN;
    tutti_world *other;
    const char *setting = rank == 0 ? "TUTTI_TOGETHER=plain" : "TUTTI_TOGETHER=off";
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "differs", .settings = setting), &other));
    tutti_group *its = tutti_world_group(other);
    tt_tensor *x = there(whole(tt_shape(16 * ranks, 16), TUTTI_BF16, rank)),
              *right = there(whole(tt_shape(16, 24), TUTTI_BF16, 3));
    for (int round = 0; round < 2; round++) {
        FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, its, NULL), TUTTI_ERROR_MISMATCH,
              "TUTTI_TOGETHER=plain");
        FAILS(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, its), TUTTI_ERROR_MISMATCH, "TUTTI_TOGETHER=off");
    }
    CHECK_OK(tutti_group_check(its));
    CHECK_OK(tutti_barrier(its, NULL));
    CHECK_OK(tutti_world_close(other));
    END;
}

TEST(a_setting_that_is_no_kernel_is_an_error_that_names_all) {
    tutti_world *world;
    CHECK_STATUS(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .settings = "TUTTI_TOGETHER=fast"), &world),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("auto, hopper, plain, off");
}
