/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused forms of tt_scaled_matmul: modes of scales, dtypes, strides, errors, disagreement between ranks.
 */
#include "support.h"

/* One scaled product of matrices of more dimensions. */
static tt_tensor *plain(tt_tensor *left, tt_tensor *right, tt_tensor *of_left, tt_tensor *of_right, tt_tensor *bias,
                        tt_tensor *result, tutti_dtype dtype) {
    tt_dims sizes = tt_sizes(left);
    int64_t rows = tt_numel(left) / sizes.at[sizes.count - 1], columns = tt_size(right, 1);
    tt_tensor *scale = tt_numel(of_left) == 1 ? of_left : tt_reshape(of_left, tt_shape(rows, 1));
    tt_tensor *product = tt_scaled_matmul(tt_reshape(left, tt_shape(rows, sizes.at[sizes.count - 1])), right, scale,
                                          of_right, bias, result, dtype, false);
    sizes.at[sizes.count - 1] = columns;
    return tt_view(product, sizes);
}

static tt_tensor *column_major(tt_dims shape, int64_t seed) {
    return tt_transpose(whole(tt_shape(shape.at[1], shape.at[0]), TUTTI_F8_E4M3, seed), 0, 1);
}

TEST_WORLD(every_mode_of_scales_gives_what_the_unfused_pair_gives, 2) {
    static const tutti_dtype dtypes[] = { 0, TUTTI_BF16, TUTTI_F32 };
    BEGIN;
    for (int dim = 0; dim < 2; dim++)
        for (int mode = 0; mode < 3; mode++)
            for (int out = 0; out < 3; out++) {
                int64_t sizes[3] = { 8, 16, 32 };
                tt_tensor *right = column_major(tt_shape(32, 16), 7), *other = column_major(tt_shape(32, 8), 8);
                sizes[dim] /= ranks;
                tt_tensor *shard = whole(tt_dims_of(3, sizes), TUTTI_F8_E4M3, rank),
                          *all = tt_all_gather(shard, dim, group);
                sizes[2] = 1;
                tt_tensor *scale = mode == 0   ? uniform(tt_dims_of(3, sizes), TUTTI_F32, 20 + rank)
                                   : mode == 1 ? tt_full(tt_shape(), 0.1, TUTTI_F32, NULL)
                                               : uniform(tt_shape(8, 16, 1), TUTTI_F32, 20);
                tt_tensor *whole_scale = mode == 0 ? tt_all_gather(scale, dim, group) : scale;
                tt_tensor *of_right = mode == 1 ? tt_full(tt_shape(1), 0.5, TUTTI_F32, NULL)
                                                : uniform(tt_shape(1, 16), TUTTI_F32, 30),
                          *of_other = tt_full(tt_shape(), 0.25, TUTTI_F32, NULL),
                          *bias = uniform(tt_shape(8), TUTTI_F32, 31),
                          *result = tt_full(tt_shape(1), 2, TUTTI_F32, NULL), *gathered;
                tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
                options.biases = tt_tensors(NULL, bias);
                options.result_scales = tt_tensors(result, NULL);
                options.out_dtypes = (tutti_dtype[]){ dtypes[out], TUTTI_F32 };
                options.out_dtype_count = 2;
                options.use_fast_accum = (bool[]){ true, false };
                options.use_fast_accum_count = 2;
                tt_tensor_list products =
                    tt_fused_all_gather_scaled_matmul(shard, tt_tensors(right, other), scale,
                                                      tt_tensors(of_right, of_other), dim, group, &options, &gathered);
                CHECK_EQ(products.count, 2);
                tutti_dtype wanted = out == 0 ? TUTTI_F8_E4M3 : dtypes[out];
                CHECK_EQ(tt_dtype(products.at[0]), wanted);
                CHECK(tt_equal(gathered, all));
                /* f8 products are exact in f32: the same bits in any blocking */
                CHECK(tt_equal(products.at[0], plain(all, right, whole_scale, of_right, NULL, result, wanted)));
                CHECK(tt_equal(products.at[1], plain(all, other, whole_scale, of_other, bias, NULL, TUTTI_F32)));
                if (dim == 1)
                    CHECK(has_strides(products.at[0], tt_shape(16, 128, 1)));
            }
    END;
}

/* Rank 0's shard can be read in place and rank 1's cannot, so that all is staged after all, when the scales, which are
 * not dense, lie in the workspace already. `before` rows were gathered before, and made the workspace. */
static void check_strided_scales(tutti_world *world, tutti_group *group, int64_t before, int64_t rows, int64_t depth) {
    int rank = tutti_group_rank(group);
    tt_tensor *shard = whole(tt_shape(rows, depth), TUTTI_F32, rank), *placed = symmetric(world, shard),
              *right = whole(tt_shape(depth, 4), TUTTI_F32, 7), *one = tt_full(tt_shape(1), 1, TUTTI_F32, NULL),
              *scale = tt_narrow(whole(tt_shape(rows, 2), TUTTI_F32, 20 + rank), 1, 0, 1);
    CHECK(tt_peer_tensor(placed, 1 - rank, group) != NULL); /* it has met */
    tt_fused_all_gather_matmul(whole(tt_shape(before, depth), TUTTI_F32, rank), tt_tensors(right), 0, group, NULL);
    CHECK(tt_fused_workspace_bytes(group) >= 2 * (size_t)(before * depth) * sizeof(float));
    tt_tensor *wanted = plain(tt_all_gather(shard, 0, group), right, tt_all_gather(tt_contiguous(scale), 0, group), one,
                              NULL, NULL, TUTTI_F32);
    for (int round = 0; round < 3; round++) {
        tt_tensor_list found = tt_fused_all_gather_scaled_matmul(rank == 0 ? placed : shard, tt_tensors(right), scale,
                                                                 tt_tensors(one), 0, group, NULL, NULL);
        CHECK_EQ(found.count, 1);
        CHECK(tt_equal(found.at[0], wanted));
    }
}

TEST_WORLD(strided_scales_outlive_the_place_where_they_were_staged_first, 2) {
    BEGIN;
    check_strided_scales(world, group, 512, 64, 64);
    END;
}

TEST_WORLD(strided_scales_outlive_the_workspace_that_is_too_small, 2) {
    BEGIN;
    int64_t rows = test_sanitized() ? 1 << 12 : 1 << 18;
    check_strided_scales(world, group, rows / 2, rows, 4);
    END;
}

TEST_WORLD(scaled_products_are_scattered_in_every_mode, 2) {
    BEGIN;
    for (int dim = 0; dim < 2; dim++)
        for (int rowwise = 0; rowwise < 2; rowwise++)
            for (int avg = 0; avg < 2; avg++) {
                tutti_reduction reduction = avg ? TUTTI_AVG : TUTTI_SUM;
                tt_tensor *left = whole(tt_shape(8, 64, 32), TUTTI_F8_E4M3, rank),
                          *right = column_major(tt_shape(32, 16), 7 + rank);
                tt_tensor *scale = rowwise ? uniform(tt_shape(8, 64, 1), TUTTI_F32, 20 + rank)
                                           : tt_full(tt_shape(1), 0.1, TUTTI_F32, NULL);
                tt_tensor *of_right = rowwise ? uniform(tt_shape(1, 16), TUTTI_F32, 30 + rank)
                                              : tt_full(tt_shape(1), 0.1, TUTTI_F32, NULL);
                tt_tensor *bias = uniform(tt_shape(16), TUTTI_F32, 40),
                          *result = tt_full(tt_shape(1), 2, TUTTI_F32, NULL);
                tt_tensor *part =
                    tt_fused_scaled_matmul_reduce_scatter(left, right, scale, of_right, reduction, dim, dim,
                                                          tt_shape(8, 64, 16), bias, result, TUTTI_BF16, false, group);
                tt_tensor *expected = tt_reduce_scatter(plain(left, right, scale, of_right, bias, result, TUTTI_BF16),
                                                        reduction, dim, group);
                CHECK(tt_equal(part, expected));
                CHECK(tt_is_contiguous(part));
                /* the same rows, reshaped to a matrix before the product */
                tt_tensor *flat = tt_view(left, tt_shape(512, 32)),
                          *flat_scale = rowwise ? tt_view(scale, tt_shape(512, 1)) : scale;
                CHECK(tt_equal(tt_fused_scaled_matmul_reduce_scatter(flat, right, flat_scale, of_right, reduction, dim,
                                                                     0, tt_shape(8, 64, 16), bias, result, TUTTI_BF16,
                                                                     false, group),
                               expected));
                /* a view that is not contiguous; fast sums are a matter of GPUs alone */
                tt_tensor *turned = tt_transpose(tt_contiguous(tt_transpose(left, 0, 1)), 0, 1);
                CHECK(tt_equal(tt_fused_scaled_matmul_reduce_scatter(turned, right, scale, of_right, reduction, dim,
                                                                     dim, tt_shape(8, 64, 16), bias, result, TUTTI_BF16,
                                                                     true, group),
                               expected));
            }
    tt_tensor *left = whole(tt_shape(4, 3), TUTTI_F8_E4M3, rank), *right = whole(tt_shape(3, 2), TUTTI_F8_E4M3, 1),
              *one = tt_full(tt_shape(), 1, TUTTI_F32, NULL);
    CHECK_EQ(tt_dtype(tt_fused_scaled_matmul_reduce_scatter(left, right, one, one, TUTTI_SUM, 0, 0, tt_shape(4, 2),
                                                            NULL, NULL, 0, false, group)),
             TUTTI_F8_E4M3);
    END;
}

TEST_WORLD(scales_that_differ_between_ranks_are_told_on_all_and_end_nothing, 3) {
    BEGIN;
    tt_tensor *shard = whole(tt_shape(4, 8), TUTTI_F8_E4M3, rank), *right = whole(tt_shape(8, 4), TUTTI_F8_E4M3, 1),
              *one = tt_full(tt_shape(), 1, TUTTI_F32, NULL),
              *mine = tt_full(tt_shape(), rank == 1 ? 2 : 1, TUTTI_F32, NULL),
              *rows = tt_ones(tt_shape(4, 1), TUTTI_F32, NULL),
              *all_rows = uniform(tt_shape(12, 1), TUTTI_F32, rank == 2);
    tt_tensor_list rights = tt_tensors(right), ones = tt_tensors(one);
    FAILS(tt_fused_all_gather_scaled_matmul(shard, rights, mine, ones, 0, group, NULL, NULL), TUTTI_ERROR_MISMATCH,
          "make different calls");
    FAILS(tt_fused_all_gather_scaled_matmul(shard, rights, rank == 1 ? rows : one, ones, 0, group, NULL, NULL),
          TUTTI_ERROR_MISMATCH, "f32 [4, 1]");
    FAILS(tt_fused_all_gather_scaled_matmul(shard, rights, all_rows, ones, 0, group, NULL, NULL), TUTTI_ERROR_MISMATCH,
          "check sum");
    tt_tensor *left = whole(tt_shape(6, 8), TUTTI_F8_E4M3, rank), *six = tt_ones(tt_shape(6, 1), TUTTI_F32, NULL);
    for (int round = 0; round < 3; round++) {
        FAILS(tt_fused_scaled_matmul_reduce_scatter(left, right, rank == 2 ? six : one, one, TUTTI_SUM, 0, 0,
                                                    tt_shape(6, 4), NULL, NULL, TUTTI_F32, false, group),
              TUTTI_ERROR_MISMATCH, "a scale for every row");
        tt_tensor *part = tt_fused_scaled_matmul_reduce_scatter(left, right, six, one, TUTTI_SUM, 0, 0, tt_shape(6, 4),
                                                                NULL, NULL, TUTTI_F32, false, group);
        CHECK(has_sizes(part, tt_shape(2, 4)));
    }
    CHECK_EQ(tt_fused_all_gather_scaled_matmul(shard, rights, one, ones, 0, group, NULL, NULL).count, 1);
    END;
}

TEST(wrong_scales_and_lists_are_told_and_end_nothing) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    BEGIN;
    tt_tensor *x = whole(tt_shape(4, 3), TUTTI_F8_E4M3, 0), *right = whole(tt_shape(3, 2), TUTTI_F8_E4M3, 0),
              *one = tt_full(tt_shape(1), 1, TUTTI_F32, NULL), *wide = tt_full(tt_shape(1), 1, TUTTI_F64, NULL),
              *three = tt_ones(tt_shape(3, 1), TUTTI_F32, NULL), *row = whole(tt_shape(3), TUTTI_F8_E4M3, 0),
              *complex = whole(tt_shape(3, 2), TUTTI_C64, 0);
    tt_tensor_list rights = tt_tensors(right), ones = tt_tensors(one);
#define GATHER(shard, matrices, scale, scales, dim, options) \
    tt_fused_all_gather_scaled_matmul(shard, matrices, scale, scales, dim, group, options, NULL)
    FAILS(GATHER(row, rights, one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "A_shard must be a matrix");
    FAILS(GATHER(x, tt_tensors(row), one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "B must be a matrix");
    FAILS(GATHER(x, rights, one, ones, 2, NULL), TUTTI_ERROR_ARGUMENT, "Invalid gather_dim");
    FAILS(GATHER(x, rights, one, ones, 1, NULL), TUTTI_ERROR_ARGUMENT, "Invalid gather_dim: scales are not supported");
    FAILS(GATHER(x, rights, three, ones, 0, NULL), TUTTI_ERROR_ARGUMENT,
          "Invalid scale shape for fp8 all-gather (shard shape: [4, 3], scale shape: [3, 1])");
    FAILS(GATHER(x, rights, wide, ones, 0, NULL), TUTTI_ERROR_TYPE, "A_scale");
    FAILS(GATHER(NULL, rights, one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "argument a_shard is NULL");
    FAILS(GATHER(x, tt_tensors(NULL), one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "entry 0 of argument bs is NULL");
    FAILS(GATHER(x, rights, NULL, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "argument a_scale is NULL");
    FAILS(GATHER(x, rights, one, tt_tensors(NULL), 0, NULL), TUTTI_ERROR_ARGUMENT,
          "argument b_scales, entry 0, is NULL");
    FAILS(GATHER(x, rights, one, tt_tensors(three), 0, NULL), TUTTI_ERROR_ARGUMENT, "B_scale");
    FAILS(GATHER(x, tt_tensors(complex), one, ones, 0, NULL), TUTTI_ERROR_TYPE, "float, not c64");
    FAILS(GATHER(x, tt_tensors(right, right), one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT,
          "len(B_scales) must be the same as len(Bs)");
    FAILS(GATHER(x, rights, one, ((tt_tensor_list){ 0, NULL }), 0, NULL), TUTTI_ERROR_ARGUMENT, "len(B_scales)");
    FAILS(GATHER(x, ((tt_tensor_list){ 0, NULL }), one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "at least one matrix");
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.biases = tt_tensors(one, one);
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "len(biases) must be the same as len(Bs)");
    options.biases = tt_tensors(one);
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "must have 2 entries");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.result_scales = tt_tensors(one, one);
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT,
          "len(result_scales) must be the same as len(Bs)");
    options.result_scales = tt_tensors(three);
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "result_scale");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.out_dtypes = (tutti_dtype[]){ TUTTI_F32, TUTTI_F32 };
    options.out_dtype_count = 2;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT,
          "len(out_dtypes) must be the same as len(Bs)");
    options.out_dtypes = (tutti_dtype[]){ TUTTI_I32 };
    options.out_dtype_count = 1;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_TYPE, "must be a float");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.use_fast_accum_count = 2;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT,
          "len(use_fast_accum) must be the same as len(Bs)");
    tt_tensor_list nowhere = { 1, NULL };
    FAILS(GATHER(x, nowhere, one, ones, 0, NULL), TUTTI_ERROR_ARGUMENT, "at least one matrix");
    FAILS(GATHER(x, rights, one, nowhere, 0, NULL), TUTTI_ERROR_ARGUMENT, "B_scales is a list of 1 at NULL");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.biases = nowhere;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "biases is a list of 1 at NULL");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.result_scales = nowhere;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "result_scales is a list of 1 at NULL");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.out_dtype_count = 1;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "out_dtypes is a list of 1 at NULL");
    tt_fused_scaled_options_init(&options, sizeof options);
    options.use_fast_accum_count = 1;
    FAILS(GATHER(x, rights, one, ones, 0, &options), TUTTI_ERROR_ARGUMENT, "use_fast_accum is a list of 1 at NULL");
#define SCATTER(left, matrix, scale, reduction, orig, dim, shape)                                            \
    tt_fused_scaled_matmul_reduce_scatter(left, matrix, scale, one, reduction, orig, dim, shape, NULL, NULL, \
                                          TUTTI_F32, false, group)
    tt_dims shape = tt_shape(4, 2);
    FAILS(SCATTER(row, right, one, TUTTI_SUM, 0, 0, shape), TUTTI_ERROR_ARGUMENT, "A_shard must be a matrix");
    FAILS(SCATTER(x, row, one, TUTTI_SUM, 0, 0, shape), TUTTI_ERROR_ARGUMENT, "B must be a matrix");
    FAILS(SCATTER(x, right, one, TUTTI_SUM, 0, 2, shape), TUTTI_ERROR_ARGUMENT,
          "Invalid scatter dim for 2D tensor input to scaled_mm");
    FAILS(SCATTER(x, right, one, TUTTI_SUM, 2, 0, shape), TUTTI_ERROR_ARGUMENT,
          "Invalid scatter dim for 3D+ output tensor");
    FAILS(SCATTER(x, right, one, TUTTI_SUM, 1, 1, shape), TUTTI_ERROR_ARGUMENT, "the last dimension is scattered");
    FAILS(SCATTER(x, right, one, TUTTI_MIN, 0, 0, shape), TUTTI_ERROR_ARGUMENT, "reduce_op must be sum or avg");
    FAILS(SCATTER(x, right, three, TUTTI_SUM, 0, 0, shape), TUTTI_ERROR_ARGUMENT,
          "the leading dims of A_scale must match the leading dims of A");
    FAILS(SCATTER(x, right, wide, TUTTI_SUM, 0, 0, shape), TUTTI_ERROR_TYPE, "A_scale");
    FAILS(SCATTER(x, right, NULL, TUTTI_SUM, 0, 0, shape), TUTTI_ERROR_ARGUMENT, "A_scale cannot be none");
    FAILS(SCATTER(x, right, one, TUTTI_SUM, 0, 0, tt_shape(2, 2)), TUTTI_ERROR_ARGUMENT, "is not the product of");
    FAILS(SCATTER(right, right, one, TUTTI_SUM, 0, 0, shape), TUTTI_ERROR_ARGUMENT, "cannot be multiplied");
    const int64_t huge = (int64_t)1 << 32; /* twice that many bits are none */
    FAILS(SCATTER(tt_empty(tt_shape(huge, 0), TUTTI_F8_E4M3, NULL), tt_empty(tt_shape(0, huge), TUTTI_F8_E4M3, NULL),
                  one, TUTTI_SUM, 0, 0, tt_shape(0, huge)),
          TUTTI_ERROR_ARGUMENT, "is not the product of");
    FAILS(SCATTER(x, tt_narrow(right, 1, 0, 0), one, TUTTI_SUM, 0, 0, tt_shape(7, 0)), TUTTI_ERROR_ARGUMENT,
          "is not the product of");
    END;
    CHECK_OK(tutti_world_close(world));
}
