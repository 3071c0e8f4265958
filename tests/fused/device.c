/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused products on a device (TEST_DEVICE=cuda): values against the CPU's, gradients, errors. What is small also runs
 * with the stand-in for the driver; the kernels that compute and communicate at once, and large products, need a GPU,
 * on which all ranks are.
 */
#include <signal.h>

#include <tutti/compile.h>
#include <tutti/graph.h>

#include "fused/device.h"
#include "gpu.h"

#include "counted.h" /* behind gpu.h, which says where tensors are made */

/* ---- one rank, and made up ones ---- */

static void check_alone(tutti_group *group) {
    tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F8_E4M3, TUTTI_I32, TUTTI_C64 };
    for (int i = 0; i < 5; i++)
        for (int dim = 0; dim < 3; dim++) {
            int ranks = tutti_group_size(group);
            tt_tensor *x = whole(tt_shape(4, 8, 12), dtypes[i], 1), *left, *other,
                      *right = whole(tt_shape(dim == 2 ? 12 * ranks : 12, 8), dtypes[i], 2),
                      *turned = tt_transpose(whole(tt_shape(8, dim == 2 ? 12 * ranks : 12), dtypes[i], 3), 0, 1);
            tt_tensor_list here = tt_fused_all_gather_matmul(x, tt_tensors(right, turned), dim, group, &left),
                           device = tt_fused_all_gather_matmul(there(x), tt_tensors(there(right), there(turned)), dim,
                                                               group, &other);
            CHECK(device.count == 2 && tt_device_of(device.at[0]) == test_device());
            CHECK(tt_equal(back(other), left) && tt_equal(back(device.at[0]), here.at[0]) &&
                  tt_equal(back(device.at[1]), here.at[1]));
            CHECK(has_strides(device.at[0], tt_strides(here.at[0])));
            tt_tensor *b = whole(tt_shape(12, 8), dtypes[i], 4);
            if (i == 2) /* sums of eights are beyond f8 */
                continue;
            CHECK(tt_equal(back(tt_fused_matmul_reduce_scatter(there(x), there(b), TUTTI_SUM, dim, group)),
                           tt_fused_matmul_reduce_scatter(x, b, TUTTI_SUM, dim, group)));
        }
}

static void check_scaled_alone(tutti_group *group, bool by_rows) {
    tt_tensor *x = whole(tt_shape(4, 8, 16), TUTTI_F8_E4M3, 1),
              *right = tt_transpose(whole(tt_shape(16, 16), TUTTI_F8_E4M3, 2), 0, 1),
              *of_x = positive(whole(by_rows ? tt_shape(4, 8, 1) : tt_shape(1), TUTTI_F32, 3)),
              *of_right = positive(whole(by_rows ? tt_shape(1, 16) : tt_shape(1), TUTTI_F32, 4)),
              *bias = whole(tt_shape(16), TUTTI_F32, 5);
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &(tutti_dtype){ TUTTI_F32 };
    options.out_dtype_count = 1;
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        options.biases = with_bias ? tt_tensors(bias) : (tt_tensor_list){ 0, NULL };
        tt_tensor *here = tt_fused_all_gather_scaled_matmul(x, tt_tensors(right), of_x, tt_tensors(of_right), 1, group,
                                                            &options, NULL)
                              .at[0];
        options.biases = with_bias ? tt_tensors(there(bias)) : (tt_tensor_list){ 0, NULL };
        tt_tensor_list device = tt_fused_all_gather_scaled_matmul(
            there(x), tt_tensors(there(right)), there(of_x), tt_tensors(there(of_right)), 1, group, &options, NULL);
        CHECK(device.count == 1 && tt_equal(back(device.at[0]), here));
        tt_tensor *added = with_bias ? bias : NULL;
        here = tt_fused_scaled_matmul_reduce_scatter(x, right, of_x, of_right, TUTTI_SUM, 1, 1, tt_shape(4, 8, 16),
                                                     added, NULL, TUTTI_F32, false, group);
        tt_tensor *part = tt_fused_scaled_matmul_reduce_scatter(
            there(x), there(right), there(of_x), there(of_right), TUTTI_SUM, 1, 1, tt_shape(4, 8, 16),
            with_bias ? there(bias) : NULL, NULL, TUTTI_F32, false, group);
        CHECK(part != NULL && tt_equal(back(part), here));
    }
}

TEST(one_rank_computes_what_it_computes_on_the_cpu) {
    tutti_world *world;
    if (test_device() == TUTTI_CPU)
        SKIP("this is the cpu");
    CHECK_OK(tutti_world_open(NULL, &world));
    tt_scope scope = tt_scope_open();
    check_alone(tutti_world_group(world));
    check_scaled_alone(tutti_world_group(world), false);
    check_scaled_alone(tutti_world_group(world), true);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
    test_device_leave();
}

TEST(a_rank_among_made_up_ones_computes_what_it_computes_on_the_cpu) {
    tutti_world *world;
    if (test_device() == TUTTI_CPU)
        SKIP("this is the cpu");
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tt_scope scope = tt_scope_open();
    check_alone(tutti_world_group(world));
    check_scaled_alone(tutti_world_group(world), false);
    check_scaled_alone(tutti_world_group(world), true);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
    test_device_leave();
}

/* ---- several ranks ---- */

static void check_gather(tutti_group *group, tt_dims shape, int dim, tutti_dtype dtype, tt_tensor *shard) {
    tt_tensor *all = all_of(shape, dtype, tutti_group_size(group), dim), *left;
    int64_t depth = tt_size(all, -1);
    tt_tensor *b1 = whole(tt_shape(depth, 24), dtype, 77),
              *b2 = tt_transpose(whole(tt_shape(16, depth), dtype, 78), 0, 1);
    tt_tensor_list made = tt_fused_all_gather_matmul(shard, tt_tensors(there(b1), there(b2)), dim, group, &left);
    CHECK_EQ(made.count, 2);
    CHECK(tt_equal(back(left), all));
    CHECK(tt_equal(back(made.at[0]), tt_matmul(all, b1)));
    CHECK(tt_equal(back(made.at[1]), tt_matmul(all, b2)));
    made = tt_fused_all_gather_matmul(shard, tt_tensors(there(b1)), dim, group, NULL);
    CHECK(tt_equal(back(made.at[0]), tt_matmul(all, b1)));
}

TEST_RANKS(every_dimension_is_gathered_from_shards_of_any_layout) {
    BEGIN;
    tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16, TUTTI_I32 };
    for (int i = 0; i < 4; i++)
        for (int dim = 0; dim < 3; dim++) {
            tt_dims shape = tt_shape(2, 3, 16);
            check_gather(group, shape, dim, dtypes[i], there(whole(shape, dtypes[i], rank)));
            shape = tt_shape(16, 8);
            tt_tensor *x = whole(shape, dtypes[i], rank);
            if (dim == 2)
                continue;
            check_gather(group, shape, dim, dtypes[i], there(x));
            check_gather(group, shape, dim, dtypes[i], tt_transpose(there(tt_contiguous(tt_transpose(x, 0, 1))), 0, 1));
            check_gather(group, shape, dim, dtypes[i], /* by rows on one rank, by columns on the others */
                         rank == 0 ? there(x) : tt_transpose(there(tt_contiguous(tt_transpose(x, 0, 1))), 0, 1));
        }
    END;
}

/* Small whole numbers; of complex types in both parts. */
static tt_tensor *of_any_type(tt_dims shape, tutti_dtype dtype, int64_t seed) {
    if (dtype != TUTTI_C64 && dtype != TUTTI_C128)
        return whole(shape, dtype, seed);
    shape.at[shape.count++] = 2;
    return tt_view_as_complex(whole(shape, dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64, seed));
}

static void check_type(tutti_group *group, tutti_dtype dtype) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *x = of_any_type(tt_shape(2 * ranks, 3), dtype, rank), *gathered, *other;
    for (int dim = 0; dim < 2; dim++) {
        tt_tensor *right = of_any_type(tt_shape(dim == 1 ? 3 * ranks : 3, 2 * ranks), dtype, 9);
        tt_tensor_list here = tt_fused_all_gather_matmul(x, tt_tensors(right), dim, group, &gathered),
                       made = tt_fused_all_gather_matmul(there(x), tt_tensors(there(right)), dim, group, &other);
        CHECK(made.count == 1 && tt_dtype(made.at[0]) == dtype);
        CHECK(tt_equal(back(made.at[0]), here.at[0]) && tt_equal(back(other), gathered));
    }
    tt_tensor *right = of_any_type(tt_shape(3, 2 * ranks), dtype, 9);
    CHECK(tt_equal(back(tt_fused_all_gather_matmul_native(there(x), there(right), group, NULL)),
                   tt_fused_all_gather_matmul_native(x, right, group, NULL)));
    for (int form = 0; form < 4; form++) {
        tutti_reduction reduction = form / 2 == 0 ? TUTTI_SUM : TUTTI_AVG;
        tt_tensor *part = tt_fused_matmul_reduce_scatter(there(x), there(right), reduction, form % 2, group);
        CHECK(part != NULL && tt_dtype(part) == dtype);
        CHECK(tt_equal(back(part), tt_fused_matmul_reduce_scatter(x, right, reduction, form % 2, group)));
    }
}

TEST_RANKS(every_dtype_that_can_be_multiplied_can_be_gathered_and_scattered_on_the_device) {
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_F32, TUTTI_F16, TUTTI_BF16, TUTTI_F8_E4M3, TUTTI_F8_E5M2,
                                          TUTTI_I8,  TUTTI_I16, TUTTI_I32, TUTTI_I64,  TUTTI_U8,      TUTTI_U16,
                                          TUTTI_U32, TUTTI_U64, TUTTI_C64, TUTTI_C128 };
    BEGIN;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        check_type(group, dtypes[i]);
    END;
}

TEST_GPU(large_shards_are_multiplied_while_others_are_waited_for) {
    BEGIN;
    for (int round = 0; round < 3; round++) {
        tt_dims shape = tt_shape(2048, 64);
        tt_tensor *all = all_of(shape, TUTTI_BF16, ranks, 0), *right = whole(tt_shape(64, 2048), TUTTI_BF16, 9),
                  *shard = there(whole(shape, TUTTI_BF16, rank));
        tt_tensor_list made = tt_fused_all_gather_matmul(shard, tt_tensors(there(right)), 0, group, NULL);
        CHECK(made.count == 1 && tt_equal(back(made.at[0]), back(tt_matmul(there(all), there(right)))));
    }
    END;
}

TEST_RANKS(every_dimension_is_scattered) {
    BEGIN;
    tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16 };
    for (int i = 0; i < 3; i++)
        for (int dim = 0; dim < 3; dim++)
            for (int average = 0; average < 2; average++) {
                tt_dims shape = tt_shape(2 * ranks, 3 * ranks, 16);
                tt_tensor *sum = NULL, *right = whole(tt_shape(16, 4 * ranks), dtypes[i], 5);
                for (int from = 0; from < ranks; from++) {
                    tt_tensor *one = tt_matmul(whole(shape, dtypes[i], from), right);
                    sum = from == 0 ? one : tt_add(sum, one);
                }
                if (average)
                    sum = tt_div_scalar(sum, ranks);
                tt_tensor *part = tt_fused_matmul_reduce_scatter(there(whole(shape, dtypes[i], rank)), there(right),
                                                                 average ? TUTTI_AVG : TUTTI_SUM, dim, group);
                CHECK(part != NULL && tt_allclose(back(part), part_of(sum, dim, rank, ranks), 1e-2, 1e-2));
                if (!average && dtypes[i] == TUTTI_F32)
                    CHECK(tt_equal(back(part), part_of(sum, dim, rank, ranks)));
            }
    END;
}

TEST_GPU(products_of_many_pieces_are_added_in_rank_order) {
    BEGIN;
    tt_tensor *x = there(uniform(tt_shape(1024 * ranks, 64), TUTTI_BF16, rank)),
              *right = there(uniform(tt_shape(64, 2048), TUTTI_BF16, 5 + rank));
    tt_tensor *own = back(tt_matmul(x, right)), *parts[64], *sum = NULL;
    for (int from = 0; from < ranks; from++) /* the others' products, by way of the CPU */
        parts[from] = tt_wait(tt_broadcast(tt_clone(own), from, group));
    for (int from = 0; from < ranks; from++) {
        tt_tensor *one = tt_to(part_of(parts[from], 0, rank, ranks), TUTTI_F32);
        sum = from == 0 ? one : tt_add(sum, one);
    }
    for (int round = 0; round < 3; round++) {
        tt_tensor *made = tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
        CHECK(made != NULL && tt_allclose(back(made), tt_to(sum, TUTTI_BF16), 1e-2, 1e-3));
    }
    END;
}

/* ---- in one kernel ---- */

/* A right matrix by rows, or by columns. */
static tt_tensor *right_of(int64_t depth, int64_t columns, tutti_dtype dtype, int seed, int by_columns) {
    return by_columns ? tt_transpose(whole(tt_shape(columns, depth), dtype, seed), 0, 1)
                      : whole(tt_shape(depth, columns), dtype, seed);
}

/* Tiles, rows that leave a rest, less than a tile. */
static const int64_t extents[][3] = {
    { 256, 512, 128 }, { 200, 264, 72 }, { 8, 8, 8 }, { 130, 1032, 328 }, { 300, 520, 136 }
};
#define EXTENTS ((int)(sizeof extents / sizeof extents[0]))

TEST_RANKS(one_kernel_gathers_and_multiplies_tiles_and_what_is_left_over) {
    BEGIN;
    int64_t before = tu_fused_together(group), calls = 0;
    for (int i = 0; i < EXTENTS * 8; i += stride_of_cases()) {
        const int64_t *extent = extents[i / 8];
        tutti_dtype dtype = i % 2 == 0 ? TUTTI_BF16 : TUTTI_F16;
        tt_dims shape = tt_shape(extent[0], extent[2]);
        tt_tensor *all = all_of(shape, dtype, ranks, 0), *left = NULL,
                  *right = right_of(extent[2], extent[1], dtype, 40 + rank, i / 2 % 2), *x = whole(shape, dtype, rank),
                  *placed = i / 2 % 2 != 0 ? by_columns_there(right) : there(right),
                  *shard = i / 4 % 2 == 0 ? there(x) : symmetric_there(world, x);
        for (int round = 0; round < 3; round++) {
            tt_tensor_list made =
                tt_fused_all_gather_matmul(shard, tt_tensors(placed), 0, group, round == 2 ? &left : NULL);
            CHECK(made.count == 1 && tt_equal(back(made.at[0]), tt_matmul(all, right)));
            calls++;
        }
        CHECK(tt_equal(back(left), all));
    }
    CHECK(!is_one_kernel() || tu_fused_together(group) - before == calls);
    END;
}

TEST_RANKS(one_kernel_multiplies_and_adds_in_rank_order_with_one_rounding) {
    BEGIN;
    int64_t before = tu_fused_together(group), calls = 0;
    for (int i = 0; i < EXTENTS * 8; i += stride_of_cases()) {
        const int64_t *extent = extents[i / 8];
        tutti_dtype dtype = i % 2 == 0 ? TUTTI_BF16 : TUTTI_F16;
        bool average = i / 4 % 2 != 0;
        tt_dims shape = tt_shape(extent[0] * ranks, extent[2]);
        tt_tensor *sum = NULL;
        for (int from = 0; from < ranks; from++) {
            tt_tensor *right = right_of(extent[2], extent[1], dtype, 40 + from, i / 2 % 2),
                      *one = tt_to(part_of(tt_matmul(whole(shape, dtype, from), right), 0, rank, ranks), TUTTI_F32);
            sum = from == 0 ? one : tt_add(sum, one);
        }
        tt_tensor *expected = tt_to(average ? tt_div_scalar(sum, ranks) : sum, dtype),
                  *x = there(whole(shape, dtype, rank)),
                  *right = right_of(extent[2], extent[1], dtype, 40 + rank, i / 2 % 2);
        right = i / 2 % 2 != 0 ? by_columns_there(right) : there(right);
        for (int round = 0; round < 3; round++) {
            tt_tensor *part = tt_fused_matmul_reduce_scatter(x, right, average ? TUTTI_AVG : TUTTI_SUM, 0, group);
            CHECK(part != NULL && tt_equal(back(part), expected));
            calls++;
        }
    }
    bool halves = (ranks & (ranks - 1)) == 0; /* else averages are no matter of the kernel's */
    CHECK(!is_one_kernel() || !halves || tu_fused_together(group) - before == calls);
    END;
}

TEST_RANKS(one_kernel_and_several_share_the_workspace) {
    BEGIN;
    for (int round = 0; round < 12; round++) {
        bool narrow = round % 3 == 0; /* there is one kernel for bf16, none for f32 */
        tutti_dtype dtype = narrow ? TUTTI_BF16 : TUTTI_F32;
        tt_dims shape = tt_shape(192, 64), tall = tt_shape(192 * ranks, 64);
        tt_tensor *right = whole(tt_shape(64, 256), dtype, 3), *sum = NULL;
        for (int from = 0; from < ranks; from++) {
            tt_tensor *one = part_of(tt_matmul(whole(tall, dtype, from + round), right), 0, rank, ranks);
            sum = from == 0 ? tt_to(one, TUTTI_F32) : tt_add(sum, tt_to(one, TUTTI_F32));
        }
        tt_tensor *x = there(whole(tall, dtype, rank + round)), *y = there(whole(shape, dtype, rank)),
                  *part = tt_fused_matmul_reduce_scatter(x, there(right), TUTTI_SUM, 0, group);
        tt_tensor_list made = tt_fused_all_gather_matmul(y, tt_tensors(there(right)), 0, group, NULL);
        CHECK(part != NULL && tt_equal(back(part), tt_to(sum, dtype)));
        CHECK(made.count == 1 && tt_equal(back(made.at[0]), tt_matmul(all_of(shape, dtype, ranks, 0), right)));
    }
    END;
}

static void check_scaled(tutti_group *group, int64_t depth, bool by_rows) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_dims shape = tt_shape(8, depth), scales = by_rows ? tt_shape(8, 1) : tt_shape(1);
    tt_tensor *all = all_of(shape, TUTTI_F8_E4M3, ranks, 0),
              *right = tt_transpose(whole(tt_shape(16, depth), TUTTI_F8_E4M3, 2), 0, 1), *of_all[64],
              *of_right = positive(whole(by_rows ? tt_shape(1, 16) : tt_shape(1), TUTTI_F32, 4));
    for (int from = 0; from < ranks; from++)
        of_all[from] = positive(whole(scales, TUTTI_F32, by_rows ? 30 + from : 30));
    tt_tensor *of_rows = by_rows ? tt_cat(tt_tensors_of((size_t)ranks, of_all), 0) : of_all[0];
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &(tutti_dtype){ TUTTI_F32 };
    options.out_dtype_count = 1;
    tt_tensor_list made =
        tt_fused_all_gather_scaled_matmul(there(whole(shape, TUTTI_F8_E4M3, rank)), tt_tensors(by_columns_there(right)),
                                          there(of_all[rank]), tt_tensors(there(of_right)), 0, group, &options, NULL);
    CHECK(made.count == 1 &&
          tt_equal(back(made.at[0]), tt_scaled_matmul(all, right, of_rows, of_right, NULL, NULL, TUTTI_F32, false)));
    tt_tensor *sum = NULL, *scale = by_rows ? positive(whole(tt_shape(8 * ranks, 1), TUTTI_F32, 6)) : of_all[0];
    for (int from = 0; from < ranks; from++) {
        tt_tensor *one = tt_scaled_matmul(whole(tt_shape(8 * ranks, depth), TUTTI_F8_E4M3, from), right, scale,
                                          of_right, NULL, NULL, TUTTI_F32, false);
        sum = from == 0 ? one : tt_add(sum, one);
    }
    tt_tensor *part = tt_fused_scaled_matmul_reduce_scatter(
        there(whole(tt_shape(8 * ranks, depth), TUTTI_F8_E4M3, rank)), by_columns_there(right), there(scale),
        there(of_right), TUTTI_SUM, 0, 0, tt_shape(8 * ranks, 16), NULL, NULL, TUTTI_F32, false, group);
    CHECK(part != NULL && tt_equal(back(part), part_of(sum, 0, rank, ranks)));
}

TEST_RANKS(narrow_matrices_with_one_scale_or_one_for_each_row_are_multiplied) {
    BEGIN;
    for (int by_rows = 0; by_rows < 2; by_rows++) {
        check_scaled(group, 32, by_rows != 0);
        check_scaled(group, 12, by_rows != 0); /* not by the library */
    }
    END;
}

/* The form by multicast: refused without it, by words that say so; else the same product, call after call. */
static void check_multimem(tutti_world *world, void *software) {
    tt_scope outer = tt_scope_open();
    void *stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), stream));
    BEGIN;
    tt_dims shape = tt_shape(24, 32);
    for (int round = 0; round < 4; round++) {
        tutti_dtype dtype = round == 2 ? TUTTI_C64 : TUTTI_BF16;
        tt_tensor *right = whole(tt_shape(32, 16), dtype, 5), *all = all_of(shape, dtype, ranks, 0),
                  *shard = there(whole(shape, dtype, rank));
        tt_tensor_list made = tt_fused_all_gather_matmul_multimem(shard, tt_tensors(there(right), there(right)), group);
        CHECK_EQ(made.count, software != NULL ? 2 : 0);
        if (software != NULL)
            CHECK(tt_equal(back(made.at[0]), tt_matmul(all, right)) && tt_equal(back(made.at[1]), back(made.at[0])));
        else
            FAILS((void)0, TUTTI_ERROR_UNSUPPORTED, "multicast support is required");
    }
    END;
    tt_stream_release(test_device(), stream);
    CHECK_OK(tt_scope_close(&outer));
}

TEST(every_rank_has_the_multimem_form_where_there_is_multicast) {
    device_needed();
    test_threads(2, check_multimem, NULL);
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(gpu_ranks(), check_multimem, "software");
    unsetenv("TUTTI_MULTICAST");
    test_device_leave();
}

/* The plain collectives, then the products: also of what is one kernel else. */
static void check_test_mode(tutti_group *group, tutti_dtype dtype) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_dims shape = tt_shape(2 * ranks, 3 * ranks, 16);
    tt_tensor *x = there(of_any_type(shape, dtype, rank)), *all;
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor *right = there(of_any_type(tt_shape(dim == 2 ? 16 * ranks : 16, 8 * ranks), dtype, 5)),
                  *narrow = there(of_any_type(tt_shape(16, 8 * ranks), dtype, 6 + rank)), *product;
        tt_tensor_list made = tt_fused_all_gather_matmul(x, tt_tensors(right), dim, group, &all);
        tt_tensor *gathered = tt_all_gather(x, dim, group);
        CHECK(made.count == 1 && tt_equal(all, gathered) && tt_equal(made.at[0], tt_matmul(gathered, right)));
        for (int average = 0; average < 2; average++) {
            tutti_reduction reduction = average ? TUTTI_AVG : TUTTI_SUM;
            product = tt_reduce_scatter(tt_matmul(x, narrow), reduction, dim, group);
            CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, narrow, reduction, dim, group), product));
        }
    }
}

TEST_RANKS(test_mode_takes_the_plain_collectives_for_products_on_the_device) {
    BEGIN;
    const char *name = tutti_group_name(group);
    int64_t before = tu_fused_together(group);
    CHECK(tt_symm_test_begin(1, &name));
    check_test_mode(group, TUTTI_F32);
    check_test_mode(group, TUTTI_BF16);
    check_test_mode(group, TUTTI_C64);
    for (int by_rows = 0; by_rows < 2; by_rows++)
        check_scaled(group, 32, by_rows != 0);
    tt_symm_test_end();
    CHECK_EQ(tu_fused_together(group), before);
    END;
}

static tt_tensor *sum_of_squares(tt_tensor *x) {
    bool complex = tt_dtype(x) == TUTTI_C128;
    return tt_sum(tt_square(complex ? tt_view_as_real(x) : x));
}

static void check_gradients(tutti_group *group, tutti_dtype dtype) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *grads[2][4];
    for (int on = 0; on < 2; on++) {
        tt_tensor *x = of_any_type(tt_shape(4 * ranks, 16), dtype, rank),
                  *right = of_any_type(tt_shape(16, 8), dtype, 3), *y = of_any_type(tt_shape(4, 16), dtype, rank + 50),
                  *other = of_any_type(tt_shape(16, 8), dtype, 4);
        tt_tensor *leaves[4] = { x, right, y, other };
        for (int i = 0; i < 4; i++) {
            leaves[i] = tt_detach(on == 1 ? there(leaves[i]) : leaves[i]);
            tt_require_grad(leaves[i], true);
        }
        tt_tensor *part = tt_fused_matmul_reduce_scatter(leaves[0], leaves[1], TUTTI_SUM, 0, group),
                  *all = tt_fused_all_gather_matmul(leaves[2], tt_tensors(leaves[3]), 0, group, NULL).at[0];
        counts found;
        counted_backward(&found, tt_add(sum_of_squares(part), sum_of_squares(all)));
        /* of the scatter's inputs one gather, which serves both; of the gather's one scatter and one gather */
        CHECK(found.gathers == 2 && found.scatters == 1 && found.plain == 0);
        for (int i = 0; i < 4; i++)
            grads[on][i] = on == 1 ? back(tt_grad(leaves[i])) : tt_grad(leaves[i]);
    }
    for (int i = 0; i < 4; i++)
        CHECK(grads[1][i] != NULL && tt_equal(grads[1][i], grads[0][i]));
}

TEST_RANKS(gradients_are_fused_forms_and_agree_with_the_cpu) {
    BEGIN;
    check_gradients(group, TUTTI_F32);
    check_gradients(group, TUTTI_C128);
    END;
}

/* The gather needs a larger workspace while the sums of the scatter are still being added, beside the stream. */
TEST_RANKS(a_workspace_that_grows_waits_for_the_call_before) {
    BEGIN;
    const int64_t rows = 512, columns = 1024, depth = 4;
    tt_tensor *left = there(tt_full(tt_shape(ranks * rows, depth), rank + 1, TUTTI_F32, NULL)),
              *right = there(tt_full(tt_shape(depth, columns), 1, TUTTI_F32, NULL)),
              *shard = there(tt_full(tt_shape(4, 64), 1, TUTTI_F32, NULL)),
              *column = there(tt_full(tt_shape(64, 1), 1, TUTTI_F32, NULL)),
              *sums = tt_full(tt_shape(rows, columns), (double)depth * ranks * (ranks + 1) / 2, TUTTI_F32, NULL),
              *products = tt_full(tt_shape(4 * ranks, 1), 64, TUTTI_F32, NULL);
    for (int round = 0; round < 4; round++) {
        tutti_group *fresh = NULL; /* with a workspace of its own */
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &fresh));
        tt_tensor *part = tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, fresh),
                  *all = tt_fused_all_gather_matmul(shard, tt_tensors(column), 0, fresh, NULL).at[0];
        CHECK(tt_equal(back(part), sums) && tt_equal(back(all), products));
        tutti_group_release(fresh);
    }
    END;
}

/* Also where somebody has asked for the workspace before there was any symmetric memory. */
TEST_RANKS(a_group_that_ends_waits_for_its_calls) {
    BEGIN;
    const int64_t rows = 512, columns = 1024, depth = 4;
    tt_tensor *left = there(tt_full(tt_shape(ranks * rows, depth), rank + 1, TUTTI_F32, NULL)),
              *right = there(tt_full(tt_shape(depth, columns), 1, TUTTI_F32, NULL)),
              *sums = tt_full(tt_shape(rows, columns), (double)depth * ranks * (ranks + 1) / 2, TUTTI_F32, NULL);
    for (int round = 0; round < 4; round++) {
        tutti_group *fresh = NULL;
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &fresh));
        CHECK(round % 2 == 0 || tt_fused_workspace_bytes(fresh) == 0);
        tt_tensor *part = tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, fresh);
        CHECK_OK(tutti_group_destroy(fresh));
        tutti_group_release(fresh);
        CHECK(tt_equal(back(part), sums));
    }
    END;
}

/* What the group has there, a stream and events of its workspace, lasts as long as the group. */
TEST_RANKS(a_group_may_end_behind_the_end_of_the_library) {
    BEGIN;
    tt_tensor *x = whole(tt_shape(2 * ranks, 16), TUTTI_F32, rank), *right = whole(tt_shape(16, 4), TUTTI_F32, 9);
    CHECK(tt_equal(back(tt_fused_matmul_reduce_scatter(there(x), there(right), TUTTI_SUM, 0, group)),
                   tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group)));
    END;                                            /* nobody has a tensor any more */
    CHECK_STATUS(tt_finalize(), TUTTI_ERROR_STATE); /* a scope is open around the test */
    CHECK_OK(tutti_barrier(group, NULL));
}

/* A itself, a second product, other columns: who asks for them and who does not meet as often, also in one kernel. At
 * first all ask for all of it: the vendor's library loads its kernel of the second product then, for which the driver
 * waits until nothing runs. */
TEST_RANKS(ranks_may_want_other_results_of_one_gather) {
    BEGIN;
    tt_tensor *shard = whole(tt_shape(32, 64), TUTTI_BF16, rank), *here = there(shard),
              *symmetric = symmetric_there(world, shard), *gathered = all_of(tt_shape(32, 64), TUTTI_BF16, ranks, 0);
    for (int i = -1; i < 12; i++) {
        bool more = i < 0 || rank == i % ranks;
        tt_tensor *right = there(whole(tt_shape(64, i % 3 == 2 && more ? 48 : 16), TUTTI_BF16, 3 + rank)),
                  *second = there(whole(tt_shape(64, 32), TUTTI_BF16, 9)), *a = NULL, *both[] = { right, second };
        int count = (i < 0 || i % 3 == 1) && more ? 2 : 1;
        tt_tensor_list made = tt_fused_all_gather_matmul(i < 9 ? symmetric : here, tt_tensors_of((size_t)count, both),
                                                         0, group, i >= 0 && i % 3 == 0 && more ? &a : NULL);
        CHECK(made.count == (size_t)count);
        for (int k = 0; k < count; k++)
            CHECK(tt_equal(back(made.at[k]), tt_matmul(gathered, back(both[k]))));
        CHECK((a != NULL) == (i >= 0 && i % 3 == 0 && more) && (a == NULL || tt_equal(back(a), gathered)));
    }
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_group_check(group));
    END;
}

/* A batch is a rank's own list until it ends; what is called meanwhile is enqueued before it, and what is called while
 * it is on its way behind it. */
TEST_RANKS(forms_run_while_a_batch_is_open_or_on_its_way) {
    BEGIN;
    int32_t one = rank + 1, sum = 0;
    tutti_batch *batch;
    tutti_work *work = NULL;
    CHECK_OK(tutti_batch_begin(group, &batch));
    CHECK_OK(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .batch = batch)));
    for (int ended = 0; ended < 2; ended++) {
        tt_tensor *x = whole(tt_shape(4 * ranks, 16), TUTTI_F32, rank), *right = whole(tt_shape(16, 8), TUTTI_F32, 3),
                  *leaf = tt_require_grad(tt_detach(there(x)), true), *here = tt_require_grad(x, true),
                  *y = tt_fused_matmul_reduce_scatter(leaf, there(right), TUTTI_SUM, 0, group),
                  *all = tt_fused_all_gather_matmul(leaf, tt_tensors(there(right)), 0, group, NULL).at[0];
        CHECK(tt_equal(back(y), tt_fused_matmul_reduce_scatter(here, right, TUTTI_SUM, 0, group)));
        CHECK(tt_equal(back(all), tt_fused_all_gather_matmul(here, tt_tensors(right), 0, group, NULL).at[0]));
        tt_backward(tt_add(tt_sum(y), tt_sum(all)), NULL);
        tt_backward(tt_add(tt_sum(tt_fused_matmul_reduce_scatter(here, right, TUTTI_SUM, 0, group)),
                           tt_sum(tt_fused_all_gather_matmul(here, tt_tensors(right), 0, group, NULL).at[0])),
                    NULL);
        CHECK(tt_grad(leaf) != NULL && tt_equal(back(tt_grad(leaf)), tt_grad(here)));
        if (ended == 0) {
            CHECK_EQ(sum, 0);
            CHECK_OK(tutti_batch_end(batch, TUTTI_OPTIONS(tutti_call, .work = &work)));
        }
    }
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_EQ(sum, ranks * (ranks + 1) / 2);
    END;
}

/* ---- what goes wrong ---- */

TEST_RANKS(calls_that_differ_are_told_on_every_rank_and_end_nothing) {
    BEGIN;
    tt_tensor *right = there(whole(tt_shape(4, 6), TUTTI_F32, 1)), *x = there(whole(tt_shape(6, 4), TUTTI_F32, rank));
    for (int round = 0; round < 2; round++) {
        tt_tensor *longer = there(whole(tt_shape(rank == 1 ? 9 : 6, 4), TUTTI_F32, rank));
        FAILS(tt_fused_all_gather_matmul(longer, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_MISMATCH,
              "of f32 [9, 4]");
        FAILS(tt_fused_matmul_reduce_scatter(there(whole(tt_shape(ranks * 2, 4), TUTTI_F32, 1)), right,
                                             rank == 0 ? TUTTI_AVG : TUTTI_SUM, 0, group),
              TUTTI_ERROR_MISMATCH, "rank 0 calls fused_matmul_reduce_scatter avg");
        FAILS(tt_fused_all_gather_matmul(rank == 0 ? back(x) : x, tt_tensors(rank == 0 ? back(right) : right), 0, group,
                                         NULL),
              TUTTI_ERROR_MISMATCH, "on a device");
        tt_tensor *y = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0];
        CHECK(y != NULL && tt_equal(back(y), tt_matmul(all_of(tt_shape(6, 4), TUTTI_F32, ranks, 0), back(right))));
    }
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_RANKS(a_rank_that_does_not_come_is_named_and_the_device_goes_on) {
    BEGIN;
    tutti_group *few;
    CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &few));
    tt_tensor *x = there(whole(tt_shape(8, 8), TUTTI_F32, rank));
    CHECK(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, few, NULL).count == 1);
    CHECK_OK(tutti_group_set_timeout(few, 300000000));
    if (rank == 0) {
        (void)tt_fused_all_gather_matmul(x, tt_tensors(x), 0, few, NULL);
        CHECK_EQ(tt_error_show(), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        tt_error_clear();
    }
    CHECK(tt_equal(back(tt_matmul(x, x)), tt_matmul(back(x), back(x))));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(few);
    END;
}

/* ---- inside one kernel ---- */

typedef struct inside {
    tutti_group *group;
    tt_tensor *shard, *tall, *right, *gathered, *part;
} inside;

/* Tensors for calls that are made in one kernel, and what they give. */
static inside inside_of(tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_dims shape = tt_shape(256, 64), tall = tt_shape(256 * ranks, 64);
    tt_tensor *right = whole(tt_shape(64, 512), TUTTI_BF16, 3), *sum = NULL;
    for (int from = 0; from < ranks; from++) {
        tt_tensor *one = part_of(tt_matmul(whole(tall, TUTTI_BF16, from), right), 0, rank, ranks);
        sum = from == 0 ? tt_to(one, TUTTI_F32) : tt_add(sum, tt_to(one, TUTTI_F32));
    }
    return (inside){ .group = group,
                     .shard = there(whole(shape, TUTTI_BF16, rank)),
                     .tall = there(whole(tall, TUTTI_BF16, rank)),
                     .right = there(right),
                     .gathered = tt_matmul(all_of(shape, TUTTI_BF16, ranks, 0), right),
                     .part = tt_to(sum, TUTTI_BF16) };
}

static tt_tensor *call_inside(const inside *of, bool scatters) {
    if (scatters)
        return tt_fused_matmul_reduce_scatter(of->tall, of->right, TUTTI_SUM, 0, of->group);
    tt_tensor_list made = tt_fused_all_gather_matmul(of->shard, tt_tensors(of->right), 0, of->group, NULL);
    return made.count == 1 ? made.at[0] : NULL;
}

static void check_inside(const inside *of) {
    for (int scatters = 0; scatters < 2; scatters++) {
        tt_tensor *made = call_inside(of, scatters != 0);
        CHECK(made != NULL && tt_equal(back(made), scatters ? of->part : of->gathered));
    }
    CHECK_OK(tutti_group_check(of->group));
}

/* All ranks have agreed on the call and enqueued it, but rank 1's stream does not come to it: the others wait inside
 * the kernel, until their time is over, or, with `aborts`, until rank 0 ends the group. */
static void check_held(tutti_world *world, bool scatters, bool aborts) {
    tutti_group *all = tutti_world_group(world), *few;
    int rank = tutti_group_rank(all);
    CHECK_OK(tutti_group_new(world, NULL, tutti_group_size(all), NULL, &few));
    inside of = inside_of(few);
    check_inside(&of);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(all, NULL));
    CHECK_OK(tutti_group_set_timeout(few, aborts ? 3600000000000 : 300000000));
    volatile uint32_t *held = rank == 1 ? hold_stream(tt_stream(test_device())) : NULL;
    tt_tensor *made = call_inside(&of, scatters);
    CHECK(made != NULL);
    CHECK_OK(tutti_barrier(all, NULL)); /* everybody's host has made the call */
    if (aborts && rank == 0)
        CHECK_OK(tutti_group_abort(few, "enough of it"));
    if (rank != 1) {
        (void)tt_synchronize(test_device());
        tutti_status status = tutti_group_check(few);
        if (rank == 0)
            CHECK_EQ(status, aborts ? TUTTI_ERROR_ABORTED : TUTTI_ERROR_TIMEOUT);
        CHECK(status != TUTTI_OK);
        CHECK_MESSAGE(aborts ? "enough of it" : tutti_group_size(all) == 2 ? "rank 1" : "rank");
        tt_error_clear();
        if (!scatters && !aborts && tutti_group_size(all) == 2 && is_one_kernel()) /* its own rows waited for nobody */
            CHECK(tt_equal(back(tt_narrow(made, 0, 0, 256)), tt_narrow(of.gathered, 0, 0, 256)));
    }
    CHECK_OK(tutti_barrier(all, NULL));
    if (held != NULL)
        *held = 1;
    (void)tt_synchronize(test_device());
    tt_error_clear();
    CHECK(tutti_group_check(few) != TUTTI_OK);
    CHECK(call_inside(&of, scatters) == NULL); /* the group has ended */
    tt_error_clear();
    tt_tensor *x = there(whole(tt_shape(64, 64), TUTTI_F32, rank));
    CHECK(tt_equal(back(tt_matmul(x, x)), tt_matmul(back(x), back(x)))); /* the device has not */
    CHECK_OK(tutti_barrier(all, NULL));
    of = inside_of(all);
    check_inside(&of);
    tutti_group_release(few);
}

TEST_HELD(a_rank_that_does_not_come_in_time_is_named_by_a_kernel_that_waits_and_the_device_goes_on) {
    BEGIN;
    check_held(world, false, false);
    check_held(world, true, false);
    END;
}

TEST_HELD(a_group_that_is_aborted_ends_kernels_that_wait_and_the_device_goes_on) {
    BEGIN;
    check_held(world, false, true);
    check_held(world, true, true);
    END;
}

/* A graph of one call that is made in one kernel; it lives as long as the test. */
static void *graph_inside(const inside *of, bool scatters) {
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    CHECK_EQ(graph.begin(stream, 1), 0);
    CHECK(call_inside(of, scatters) != NULL);
    CHECK_EQ(graph.end(stream, &captured), 0);
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    return executable;
}

TEST_RANKS(ranks_that_run_different_graphs_are_told_by_the_kernels_and_the_device_goes_on) {
    BEGIN;
    tutti_group *few;
    CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &few));
    if (!is_one_kernel())
        SKIP("no kernel that computes and communicates at once");
    inside of = inside_of(few);
    check_inside(&of);
    check_inside(&of);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    void *gathers = graph_inside(&of, false), *scatters = graph_inside(&of, true);
    CHECK_EQ(graphs().launch(rank == 0 ? gathers : scatters, tt_stream(test_device())), 0);
    (void)tt_synchronize(test_device());
    tt_error_clear();
    CHECK_STATUS(tutti_group_check(few), TUTTI_ERROR_MISMATCH); /* and not the deadline's error */
    CHECK_MESSAGE("do not make the same call");
    CHECK_OK(tutti_barrier(group, NULL));
    of = inside_of(group);
    check_inside(&of);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(few);
    END;
}

/* With as many ranks as the stand-in has processors each has one thread block; the stand-in ends the process where
 * there are more. */
static void check_share(tutti_world *world, void *unused) {
    (void)unused;
    tt_scope outer = tt_scope_open();
    void *stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), stream));
    BEGIN;
    inside of = inside_of(group);
    int64_t before = tu_fused_together(group);
    check_inside(&of);
    check_inside(&of);
    CHECK(!is_one_kernel() || tu_fused_together(group) - before == 4);
    END;
    tt_stream_release(test_device(), stream);
    CHECK_OK(tt_scope_close(&outer));
}

TEST_LIMIT(ranks_that_share_a_device_have_their_share_of_its_processors_each, 120) {
    device_needed();
    test_threads(4, check_share, NULL);
    test_device_leave();
}

/* Calls of two groups on three streams, without a word between them: they take turns by themselves. */
TEST_RANKS(one_kernel_runs_on_several_streams_and_for_several_groups) {
    BEGIN;
    enum {
        ROUNDS = 18
    };
    tutti_group *other;
    CHECK_OK(tutti_group_new_subgroups(group, ranks % 2 == 0 && ranks > 2 ? 2 : ranks, NULL, NULL, &other));
    inside of[2] = { inside_of(group), inside_of(other) };
    void *streams[3] = { tt_stream(test_device()), tt_stream_new(test_device()), tt_stream_new(test_device()) };
    tt_tensor *made[ROUNDS];
    CHECK(tt_synchronize(test_device()));
    for (int i = 0; i < ROUNDS; i++) {
        CHECK(tt_stream_set(test_device(), streams[i % 3]));
        made[i] = call_inside(&of[i % 2], i / 2 % 2 != 0);
        CHECK(made[i] != NULL);
    }
    CHECK(tt_synchronize(test_device()));
    for (int i = 0; i < ROUNDS; i++)
        CHECK(tt_equal(back(made[i]), i / 2 % 2 != 0 ? of[i % 2].part : of[i % 2].gathered));
    CHECK(tt_stream_set(test_device(), streams[0]));
    for (int i = 1; i < 3; i++)
        tt_stream_release(test_device(), streams[i]);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(other);
    END;
}

/* ---- compiled ---- */

typedef struct layer {
    tutti_group *group;
} layer;

/* All-gather, product, product, reduce-scatter: what a layer that is split over ranks does. */
static int split_layer(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const layer *of = user;
    tt_tensor *hidden = tt_relu(tt_matmul(tt_all_gather(inputs.at[0], 0, of->group), inputs.at[1]));
    outputs[0] = tt_reduce_scatter(tt_matmul(hidden, inputs.at[2]), TUTTI_SUM, 0, of->group);
    return 1;
}

/* What it gives and its gradients, eager or compiled, of inputs that are made anew. */
static void run_layer(const layer *of, tt_compiled *fast, tutti_dtype dtype, tt_tensor *results[4]) {
    int rank = tutti_group_rank(of->group);
    tt_tensor *leaves[3] = { there(whole(tt_shape(16, 32), dtype, rank)),
                             there(whole(tt_shape(32, 16), dtype, 70 + rank)),
                             there(whole(tt_shape(16, 8), dtype, 80 + rank)) };
    for (int i = 0; i < 3; i++)
        tt_require_grad(leaves[i] = tt_detach(leaves[i]), true);
    if (fast == NULL)
        CHECK_EQ(split_layer(tt_tensors_of(3, leaves), results, (void *)of), 1);
    else
        results[0] = tt_compiled_call(fast, tt_tensors_of(3, leaves)).at[0];
    CHECK_OK(tt_error_show());
    tt_backward(tt_sum(results[0]), NULL);
    CHECK_OK(tt_error_show());
    for (int i = 0; i < 3; i++)
        results[1 + i] = tt_grad(leaves[i]);
}

static void check_compiled(tutti_group *group, tutti_dtype dtype) {
    layer of = { group };
    tt_compiled *fast;
    tt_tensor *expected[4], *found[4];
    run_layer(&of, NULL, dtype, expected);
    CHECK(tt_compile(split_layer, &of,
                     TUTTI_OPTIONS(tt_compile_options, .with = "gather_matmul,matmul_scatter", .full = true), &fast));
    for (int round = 0; round < 3; round++) {
        run_layer(&of, fast, dtype, found);
        for (int i = 0; i < 4; i++)
            CHECK(found[i] != NULL && tt_device_of(found[i]) == test_device() &&
                  tt_equal(back(found[i]), back(expected[i])));
    }
    tt_compiled_release(&fast);
}

/* The graph of the function on tensors of the device has the fused forms, and only them. */
static void check_fused_graph(tutti_group *group) {
    layer of = { group };
    tt_graph *graph;
    tt_tensor *inputs[3] = { there(whole(tt_shape(16, 32), TUTTI_F32, 1)), there(whole(tt_shape(32, 16), TUTTI_F32, 2)),
                             there(whole(tt_shape(16, 8), TUTTI_F32, 3)) };
    CHECK(tt_capture(split_layer, &of, tt_tensors_of(3, inputs), &graph));
    CHECK(tt_graph_pass(graph, "gather_matmul") && tt_graph_pass(graph, "matmul_scatter") &&
          tt_graph_pass(graph, "dead"));
    CHECK_EQ(tt_graph_count_of(graph, "fused_all_gather_matmul"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "fused_matmul_reduce_scatter"), 1);
    CHECK(tt_graph_count_of(graph, "matmul") == 0 && tt_graph_count_of(graph, "wait") == 0);
    tt_graph_release(&graph);
}

TEST_RANKS(compiled_functions_use_fused_products_on_the_device_forward_and_backward) {
    BEGIN;
    tutti_group *fresh;
    CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &fresh));
    check_fused_graph(fresh);
    CHECK_EQ(tu_fused_device_bytes(fresh), 0u);
    check_compiled(fresh, TUTTI_F32);
    CHECK(tu_fused_device_bytes(fresh) > 0); /* fused operations ran */
    int64_t before = tu_fused_together(fresh);
    check_compiled(fresh, TUTTI_BF16);
    CHECK(!is_one_kernel() || tu_fused_together(fresh) - before >= 3 * 3); /* forward twice, backward at least once */
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(fresh);
    END;
}

/* From the third call on a graph of the device, with the fused forms in it. */
static void check_replayed(tutti_group *group, tutti_dtype dtype) {
    enum {
        CALLS = 7
    };
    layer of = { group };
    int rank = tutti_group_rank(group);
    tt_compiled *fast;
    tt_tensor *up = there(whole(tt_shape(32, 16), dtype, 70 + rank)),
              *down = there(whole(tt_shape(16, 8), dtype, 80 + rank)), *found[CALLS], *expected[CALLS];
    CHECK(tt_compile(
        split_layer, &of,
        TUTTI_OPTIONS(tt_compile_options, .with = "gather_matmul,matmul_scatter", .full = true, .replay = true),
        &fast));
    for (int i = 0; i < CALLS; i++) {
        tt_tensor *x = there(whole(tt_shape(16, 32), dtype, rank + 10 * i));
        CHECK_EQ(split_layer(tt_tensors(x, up, down), &expected[i], &of), 1);
        CHECK(tt_synchronize(test_device())); /* ranks that are threads launch together */
        CHECK_OK(tutti_barrier(group, NULL));
        tt_tensor_list made = tt_compiled_call(fast, tt_tensors(x, up, down));
        CHECK_OK(tt_error_show());
        found[i] = made.at[0];
    }
    for (int i = 0; i < CALLS; i++)
        CHECK(tt_equal(back(found[i]), back(expected[i])));
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
    CHECK(tt_compiled_count(fast, &counts));
    CHECK_EQ(counts.replays, CALLS - 2);
    tt_compiled_release(&fast);
    CHECK_OK(tutti_group_check(group));
}

TEST_RANKS(compiled_functions_are_replayed_with_their_fused_products) {
    BEGIN;
    tutti_group *fresh;
    CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &fresh));
    check_replayed(fresh, TUTTI_F32);
    CHECK(tu_fused_device_bytes(fresh) > 0);
    check_replayed(fresh, TUTTI_BF16);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(fresh);
    END;
}

/* ---- death ---- */

static tutti_status one_dies(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = there(whole(tt_shape(64, 64), TUTTI_F32, rank));
    CHECK(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, group, NULL).count == 1);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == ranks - 1)
        raise(SIGKILL);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 100 && status == TUTTI_OK; i++) {
        (void)tt_fused_all_gather_matmul(x, tt_tensors(x), 0, group, NULL);
        status = tt_error_show();
        tt_error_clear();
    }
    CHECK_EQ(status, TUTTI_ERROR_DEAD); /* not the deadline's error */
    CHECK(tt_equal(back(tt_matmul(x, x)), tt_matmul(back(x), back(x))));
    CHECK_OK(tt_scope_close(&scope));
    fflush(stdout);
    _exit(0);
}

/* The last rank dies when all have agreed on a call, and the others wait for it inside the kernel. */
static tutti_status one_dies_inside(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_scope scope = tt_scope_open();
    inside of = inside_of(group);
    check_inside(&of);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == ranks - 1)
        (void)hold_stream(tt_stream(test_device()));
    CHECK(call_inside(&of, argument != NULL) != NULL);
    if (rank == ranks - 1)
        raise(SIGKILL);
    (void)tt_synchronize(test_device());
    tt_error_clear();
    CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_DEAD);
    CHECK(tt_equal(back(tt_matmul(of.shard, of.right)), tt_matmul(back(of.shard), back(of.right))));
    CHECK_OK(tt_scope_close(&scope));
    fflush(stdout);
    _exit(0);
}

TEST_LIMIT(a_rank_that_dies_while_others_wait_inside_a_kernel_is_an_error_and_the_device_goes_on, 120) {
    streams_needed();
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
        SKIP("under MPS a death may take the server with it");
    for (int scatters = 0; scatters < 2; scatters++)
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, one_dies_inside, scatters ? "scatters" : NULL),
                     TUTTI_ERROR_DEAD);
}

TEST_LIMIT(a_dead_rank_is_an_error_and_the_device_goes_on, 120) {
    device_needed();
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
        SKIP("under MPS a death may take the server with it");
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, one_dies, NULL), TUTTI_ERROR_DEAD);
}
