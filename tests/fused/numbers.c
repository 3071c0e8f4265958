/* SPDX-License-Identifier: Apache-2.0
 *
 * The bits of fused products, and the operators that their gradients consist of. Where products have the same shapes,
 * or the same bits for every shape, the fused forms and the unfused pairs give the same bits: partial products are
 * rounded, then added in rank order and rounded once. Rows of several ranks are multiplied together where one rank has
 * few.
 */
#include "counted.h"
#include "tensor/gemm.h"

static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16, TUTTI_F64, TUTTI_C64 };
#define DTYPES (int)(sizeof dtypes / sizeof dtypes[0])

/* x times right, with the shapes that the fused form multiplies: `panels` products of neighbouring rows. */
static tt_tensor *by_panels(tt_tensor *x, tt_tensor *right, int panels) {
    tt_tensor *products[8];
    int64_t rows = tt_size(x, 0) / panels;
    for (int i = 0; i < panels; i++)
        products[i] = tt_matmul(tt_narrow(x, 0, i * rows, rows), right);
    return tt_cat(tt_tensors_of((size_t)panels, products), 0);
}

/* Where products are our own, rows of a product are the product of rows, whatever is multiplied with them. */
static bool same_in_any_shape(tutti_dtype dtype) {
    return tu_product_is_ours(dtype);
}

/* Of blocks of so many rows per rank, which are multiplied in so many panels. */
static void check_scatter(tutti_group *group, int64_t rows, int panels) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    for (int i = 0; i < DTYPES; i++)
        for (int avg = 0; avg < 2; avg++) {
            tutti_reduction reduction = avg ? TUTTI_AVG : TUTTI_SUM;
            tt_tensor *left = uniform(tt_shape(ranks * rows, 40), dtypes[i], rank),
                      *right = uniform(tt_shape(40, 16), dtypes[i], 20 + rank);
            int cuts = same_in_any_shape(dtypes[i]) ? 1 : panels;
            for (int round = 0; round < 2; round++) /* the first makes its workspace */
                CHECK(tt_equal(tt_fused_matmul_reduce_scatter(left, right, reduction, 0, group),
                               tt_reduce_scatter(by_panels(left, right, cuts), reduction, 0, group)));
        }
}

static void check_gather(tutti_group *group, int64_t rows, int panels) {
    int rank = tutti_group_rank(group);
    for (int i = 0; i < DTYPES; i++) {
        tt_tensor *shard = uniform(tt_shape(rows, 40), dtypes[i], rank),
                  *right = uniform(tt_shape(40, 16), dtypes[i], 20), *all;
        for (int round = 0; round < 2; round++) {
            tt_tensor *expected =
                by_panels(tt_all_gather(shard, 0, group), right, same_in_any_shape(dtypes[i]) ? 1 : panels);
            CHECK(tt_equal(tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0], expected));
            CHECK(tt_equal(tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, &all).at[0], expected));
        }
    }
}

TEST_WORLD(scattered_products_of_few_rows_have_the_bits_of_the_unfused_pair, 4) {
    BEGIN;
    check_scatter(group, 24, 1);
    END;
}

TEST_WORLD(gathered_products_of_few_rows_have_the_bits_of_the_unfused_pair, 4) {
    BEGIN;
    check_gather(group, 24, 1);
    END;
}

TEST_WORLD_THREADS(rows_of_neighbours_are_multiplied_together_where_one_rank_has_too_few, 6) {
    BEGIN;
    check_gather(group, 200, 2);
    check_scatter(group, 100, 2);
    END;
}

TEST_WORLD(products_of_many_rows_have_the_bits_of_the_matmul_of_each_ranks_rows, 2) {
    BEGIN;
    check_gather(group, 520, 2);
    check_scatter(group, 260, 2);
    END;
}

/* Deep products of our own with a matrix that was packed before go by blocks of rows: the last block has fewer rows,
 * the last panel fewer columns, the last part of the depth is shorter. */
TEST_WORLD(deep_products_of_many_rows_have_the_bits_of_the_unfused_pair, 2) {
    BEGIN;
    const struct {
        int64_t rows, depth, columns;
        tutti_dtype dtype;
    } of[] = { { 401, 500, 70, TUTTI_F32 }, { 1030, 390, 500, TUTTI_F32 }, { 700, 1100, 40, TUTTI_F64 } };
    for (int i = 0; i < (test_sanitized() ? 1 : 3); i++) {
        tt_tensor *left = uniform(tt_shape(ranks * of[i].rows, of[i].depth), of[i].dtype, rank),
                  *right = uniform(tt_shape(of[i].depth, of[i].columns), of[i].dtype, 20),
                  *shard = tt_contiguous(tt_narrow(left, 0, 0, of[i].rows));
        tt_tensor *scattered = tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, group),
                  *gathered = tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0];
        double apart = same_in_any_shape(of[i].dtype) ? 0 : 1e-4;
        CHECK(tt_allclose(scattered, tt_reduce_scatter(tt_matmul(left, right), TUTTI_SUM, 0, group), apart, apart));
        CHECK(tt_allclose(gathered, tt_matmul(tt_all_gather(shard, 0, group), right), apart, apart));
    }
    END;
}

/* A right matrix that is not packed once for all: our own products take a panel's shards where they lie, which is in
 * symmetric memory, in a workspace that may have to grow first, by rows, by columns, or with gaps; others put them
 * together. */
static void check_large_right(tutti_world *world, tutti_group *group, tutti_dtype dtype, int64_t rows, int panels) {
    enum {
        DEPTH = 500,
        COLUMNS = 560
    };
    int rank = tutti_group_rank(group);
    tt_tensor *wide = uniform(tt_shape(rows, DEPTH + 3), dtype, rank), *shard = tt_narrow(wide, 1, 1, DEPTH),
              *dense = tt_contiguous(shard), *right = uniform(tt_shape(DEPTH, COLUMNS), dtype, 20),
              *low = uniform(tt_shape(DEPTH, 5), dtype, 21),
              *turned = tt_transpose(tt_contiguous(tt_transpose(dense, 0, 1)), 0, 1),
              *forms[] = { shard, dense, rank % 2 ? turned : dense, symmetric(world, dense), symmetric(world, turned) },
              *all;
    int cuts = same_in_any_shape(dtype) ? 1 : panels;
    tt_tensor *gathered = tt_all_gather(dense, 0, group), *expected = by_panels(gathered, right, cuts),
              *expected_low = by_panels(gathered, low, cuts);
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        for (int round = 0; round < 2; round++) {
            tt_tensor_list found =
                tt_fused_all_gather_matmul(forms[i], tt_tensors(low, right), 0, group, round == 0 ? NULL : &all);
            CHECK_EQ(found.count, 2);
            CHECK(tt_equal(found.at[0], expected_low));
            CHECK(tt_equal(found.at[1], expected));
        }
    CHECK(tt_equal(all, gathered));
}

TEST_WORLD_THREADS(a_large_right_matrix_is_multiplied_with_the_shards_of_a_panel_where_they_lie, 6) {
    BEGIN;
    check_large_right(world, group, TUTTI_F64, 37, 1);
    check_large_right(world, group, TUTTI_F32, test_sanitized() ? 37 : 190, test_sanitized() ? 1 : 2);
    END;
}

TEST_WORLD(a_large_right_matrix_is_multiplied_with_shards_of_processes, 3) {
    BEGIN;
    check_large_right(world, group, TUTTI_F32, 50, 1);
    check_large_right(world, group, TUTTI_F64, 21, 1);
    END;
}

/* Products of f8 are exact in f32: the same bits in any blocking. */
TEST_WORLD_THREADS(scaled_products_have_the_bits_of_the_unfused_pair_in_panels_too, 6) {
    BEGIN;
    for (int64_t rows = 20; rows < 1000; rows += rows < 200 ? 180 : 500) /* gathered in one panel, two, and six */
        for (int mode = 0; mode < 3; mode++) {
            tt_tensor *shard = whole(tt_shape(rows, 8), TUTTI_F8_E4M3, rank),
                      *right = whole(tt_shape(8, 6), TUTTI_F8_E4M3, 5),
                      *one = tt_full(tt_shape(1), 0.1, TUTTI_F32, NULL), *all;
            tt_tensor *scale = mode == 0   ? uniform(tt_shape(rows, 1), TUTTI_F32, 30 + rank)
                               : mode == 1 ? one
                                           : uniform(tt_shape(ranks * rows, 1), TUTTI_F32, 30);
            tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
            options.out_dtypes = (tutti_dtype[]){ TUTTI_F32 };
            options.out_dtype_count = 1;
            tt_tensor *expected =
                tt_scaled_matmul(tt_all_gather(shard, 0, group), right,
                                 mode == 0 ? tt_all_gather(scale, 0, group) : scale, one, NULL, NULL, TUTTI_F32, false);
            for (int with = 0; with < 2; with++)
                CHECK(tt_equal(tt_fused_all_gather_scaled_matmul(shard, tt_tensors(right), scale, tt_tensors(one), 0,
                                                                 group, &options, with ? &all : NULL)
                                   .at[0],
                               expected));
            CHECK(tt_equal(all, tt_all_gather(shard, 0, group)));
            if (mode == 0)
                continue; /* the rest are scales of whole matrices */
            tt_tensor *left = whole(tt_shape(ranks * rows, 8), TUTTI_F8_E4M3, rank);
            CHECK(tt_equal(tt_fused_scaled_matmul_reduce_scatter(left, right, scale, one, TUTTI_SUM, 0, 0,
                                                                 tt_shape(ranks * rows, 6), NULL, NULL, TUTTI_BF16,
                                                                 false, group),
                           tt_reduce_scatter(tt_scaled_matmul(left, right, scale, one, NULL, NULL, TUTTI_BF16, false),
                                             TUTTI_SUM, 0, group)));
        }
    END;
}

/* Products of the ranks' columns are added in rank order, whoever comes first. */
TEST_WORLD(a_gather_along_the_summed_dimension_gives_the_same_bits_on_every_rank, 3) {
    BEGIN;
    for (int i = 0; i < DTYPES; i++) {
        tt_tensor *shard = uniform(tt_shape(40, 20), dtypes[i], rank), *right = uniform(tt_shape(60, 7), dtypes[i], 8);
        for (int round = 0; round < 3; round++) {
            tt_tensor *found = tt_fused_all_gather_matmul(shard, tt_tensors(right), 1, group, NULL).at[0];
            tt_tensor_list each = tt_chunk(tt_all_gather(found, 0, group), 3, 0);
            CHECK(tt_equal(each.at[0], each.at[1]) && tt_equal(each.at[0], each.at[2]));
            double bound = dtypes[i] == TUTTI_BF16 ? 0.05 : dtypes[i] == TUTTI_F16 ? 0.01 : 1e-5;
            CHECK(tt_allclose(found, gathered_product(shard, right, 1, group), bound, bound));
        }
    }
    END;
}

/* ---- what gradients consist of ---- */

/* The gradients of y = form(x, right) with respect to both, or one of them. */
static counts count_gradients(tt_tensor *(*form)(tt_tensor *, tt_tensor *, tutti_group *), tutti_group *group,
                              bool of_x, bool of_right) {
    counts found;
    tt_tensor *x = tt_require_grad(whole(tt_shape(4, 4), TUTTI_F32, tutti_group_rank(group)), of_x),
              *right = tt_require_grad(whole(tt_shape(4, 6), TUTTI_F32, 9), of_right);
    tt_tensor *loss = tt_sum(form(x, right, group));
    counted_backward(&found, loss);
    CHECK((tt_grad(x) != NULL) == of_x && (tt_grad(right) != NULL) == of_right);
    return found;
}

static tt_tensor *gather(tt_tensor *x, tt_tensor *right, tutti_group *group) {
    return tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0];
}

static tt_tensor *gather_native(tt_tensor *x, tt_tensor *right, tutti_group *group) {
    return tt_fused_all_gather_matmul_native(x, right, group, NULL);
}

static tt_tensor *scatter(tt_tensor *x, tt_tensor *right, tutti_group *group) {
    return tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
}

TEST_WORLD(the_gradient_of_a_fused_form_is_one_fused_form_for_each_input, 2) {
    BEGIN;
    for (int native = 0; native < 2; native++) {
        counts both = count_gradients(native ? gather_native : gather, group, true, true);
        CHECK(both.scatters == 1 && both.gathers == 1 && both.plain == 0);
        counts of_x = count_gradients(native ? gather_native : gather, group, true, false);
        CHECK(of_x.scatters == 1 && of_x.gathers == 0 && of_x.plain == 0);
        counts of_right = count_gradients(native ? gather_native : gather, group, false, true);
        CHECK(of_right.scatters == 0 && of_right.gathers == 1 && of_right.plain == 0);
    }
    /* one gather serves both: that of a returns the gathered gradient, which b's is multiplied with */
    for (int which = 1; which < 4; which++) {
        counts found = count_gradients(scatter, group, which & 1, which & 2);
        CHECK(found.scatters == 0 && found.gathers == 1 && found.plain == 0);
    }
    END;
}
