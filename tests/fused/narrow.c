/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused products of f8 on a device (TEST_DEVICE=cuda): all types, scales and results against the CPU's, what the
 * tensor cores' sums lose, graphs, and matrices of different types. What is small also runs with the stand-in for the
 * driver.
 */
#include "fused/device.h"
#include "gpu.h"

/* ---- all forms ---- */

/* Scales from 1/8 to 7/8: products with them stay exact. */
static tt_tensor *eighths(tt_dims shape, int64_t seed) {
    return tt_mul_scalar(positive(whole(shape, TUTTI_F32, seed)), 0.125);
}

/* By columns, as the tensor cores want it. */
static tt_tensor *right_of(int64_t depth, int64_t columns, tutti_dtype dtype, int64_t seed) {
    return tt_transpose(whole(tt_shape(columns, depth), dtype, seed), 0, 1);
}

typedef struct scaled_call {
    int64_t rows, columns, depth;
    tutti_dtype left, right, result;
    int mode; /* 0: scales of the shard's rows; 1: one; 2: of all ranks' rows */
    bool symmetric, bias, whole;
    bool fast; /* use_fast_accum */
} scaled_call;

/* Every combination of neighbours comes up among the first few dozen. */
static scaled_call scaled_call_of(int i) {
    static const int64_t extents[][3] = { { 256, 512, 128 }, { 200, 264, 80 }, { 8, 16, 16 }, { 130, 1040, 336 } };
    static const tutti_dtype results[] = { TUTTI_BF16, TUTTI_F16, TUTTI_F32 };
    const int64_t *extent = extents[i % 4];
    return (scaled_call){ .rows = extent[0],
                          .columns = extent[1],
                          .depth = extent[2],
                          .left = i / 4 % 2 == 0 ? TUTTI_F8_E4M3 : TUTTI_F8_E5M2,
                          .right = i / 8 % 2 == 0 ? TUTTI_F8_E4M3 : TUTTI_F8_E5M2,
                          .result = results[i % 3],
                          .mode = i / 3 % 3,
                          .symmetric = i / 2 % 2 != 0,
                          .bias = i % 5 == 0,
                          .whole = i % 7 == 0 };
}

typedef struct scaled_tensors {
    tt_tensor *shard, *right, *of_shard, *of_right, *bias, *whole, *expected;
} scaled_tensors;

/* On the CPU; `turn` makes them others. */
static scaled_tensors tensors_of(const scaled_call *of, int rank, int ranks, int turn) {
    tt_tensor *shards[64], *scales[64];
    bool by_rows = of->mode != 1;
    for (int from = 0; from < ranks; from++) {
        shards[from] = whole(tt_shape(of->rows, of->depth), of->left, from + turn);
        scales[from] = eighths(by_rows ? tt_shape(of->rows, 1) : tt_shape(1), by_rows ? 20 + from + turn : 20);
    }
    tt_tensor *all = by_rows ? tt_cat(tt_tensors_of((size_t)ranks, scales), 0) : scales[0];
    scaled_tensors made = { .shard = shards[rank],
                            .right = right_of(of->depth, of->columns, of->right, 40 + rank),
                            .of_shard = of->mode == 0 ? scales[rank] : all,
                            .of_right = eighths(by_rows ? tt_shape(1, of->columns) : tt_shape(1), 50 + rank),
                            .bias = of->bias ? whole(tt_shape(of->columns), TUTTI_F32, 60 + rank) : NULL,
                            .whole = of->whole ? eighths(tt_shape(1), 70 + rank) : NULL };
    made.expected = tt_scaled_matmul(tt_cat(tt_tensors_of((size_t)ranks, shards), 0), made.right, all, made.of_right,
                                     made.bias, made.whole, of->result, false);
    return made;
}

static tt_tensor *call_scaled(const scaled_call *of, tt_tensor *shard, const scaled_tensors *with, tt_tensor *of_shard,
                              tutti_group *group, tt_tensor **gathered) {
    tt_tensor *bias = with->bias != NULL ? there(with->bias) : NULL,
              *scale = with->whole != NULL ? there(with->whole) : NULL;
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &of->result;
    options.out_dtype_count = 1;
    options.use_fast_accum = &of->fast;
    options.use_fast_accum_count = 1;
    options.biases = bias != NULL ? tt_tensors(bias) : (tt_tensor_list){ 0, NULL };
    options.result_scales = scale != NULL ? tt_tensors(scale) : (tt_tensor_list){ 0, NULL };
    tt_tensor_list made =
        tt_fused_all_gather_scaled_matmul(shard, tt_tensors(by_columns_there(with->right)), of_shard,
                                          tt_tensors(there(with->of_right)), 0, group, &options, gathered);
    return made.count == 1 ? made.at[0] : NULL;
}

TEST_RANKS(one_kernel_gathers_and_multiplies_f8_of_all_types_with_all_scales) {
    BEGIN;
    int64_t before = tu_fused_together(group), calls = 0;
    for (int i = 0; i < 48; i += stride_of_cases()) {
        scaled_call of = scaled_call_of(i);
        scaled_tensors with = tensors_of(&of, rank, ranks, i);
        tt_tensor *shard = of.symmetric ? symmetric_there(world, with.shard) : there(with.shard),
                  *scales = of.symmetric && of.mode == 0 && i % 2 == 0 ? symmetric_there(world, with.of_shard)
                                                                       : there(with.of_shard);
        for (int round = 0; round < 3; round++) {
            of.fast = round == 1; /* sums this small are exact in both ways */
            tt_tensor *gathered = NULL,
                      *made = call_scaled(&of, shard, &with, scales, group, round == 2 ? &gathered : NULL);
            CHECK(made != NULL && tt_equal(back(made), with.expected));
            calls++;
            CHECK(round < 2 || tt_equal(back(tt_narrow(gathered, 0, rank * of.rows, of.rows)), with.shard));
        }
    }
    CHECK(!is_hopper() || tu_fused_together(group) - before == calls);
    END;
}

/* ---- accuracy ---- */

static double distance(tt_tensor *x, tt_tensor *from) {
    tt_tensor *difference = tt_sub(tt_to(back(x), TUTTI_F64), from);
    return sqrt(tt_item(tt_sum(tt_mul(difference, difference))) / tt_item(tt_sum(tt_mul(from, from))));
}

TEST_GPU(sums_of_f8_along_a_long_depth_are_as_close_as_the_librarys_of_both_ways) {
    BEGIN;
    scaled_call of = { .rows = 128, .columns = 256, .depth = 16384, .result = TUTTI_F32 };
    int64_t before = tu_fused_together(group);
    tt_tensor *shards[64], *of_rows = there(tt_ones(tt_shape(of.rows, 1), TUTTI_F32, NULL)),
                           *of_all = there(tt_ones(tt_shape(of.rows * ranks, 1), TUTTI_F32, NULL)),
                           *of_columns = there(tt_ones(tt_shape(1, of.columns), TUTTI_F32, NULL));
    for (int from = 0; from < ranks; from++) /* mostly of one sign: sums grow, and what is added to them does not */
        shards[from] = tt_to(tt_add_scalar(uniform(tt_shape(of.rows, of.depth), TUTTI_F32, from), 0.5), TUTTI_F8_E4M3);
    tt_tensor *all = tt_cat(tt_tensors_of((size_t)ranks, shards), 0),
              *right = tt_transpose(
                  tt_to(tt_add_scalar(uniform(tt_shape(of.columns, of.depth), TUTTI_F32, 9), 0.5), TUTTI_F8_E4M3), 0,
                  1),
              *exact = tt_matmul(tt_to(all, TUTTI_F64), tt_to(right, TUTTI_F64));
    scaled_tensors with = { .right = right, .of_right = of_columns };
    double errors[2], others[2];
    for (int fast = 0; fast < 2; fast++) {
        of.fast = fast != 0;
        tt_tensor *made = call_scaled(&of, there(shards[rank]), &with, of_rows, group, NULL),
                  *library = tt_scaled_matmul(there(all), by_columns_there(right), of_all, of_columns, NULL, NULL,
                                              TUTTI_F32, of.fast);
        CHECK(made != NULL && library != NULL);
        errors[fast] = distance(made, exact);
        others[fast] = distance(library, exact);
        if (rank == 0)
            printf("relative error%s %.3g, the library's %.3g\n", of.fast ? " of fast sums" : "", errors[fast],
                   others[fast]);
    }
    CHECK(errors[0] <= 3 * others[0] && errors[0] < 1e-3);
    CHECK(errors[1] <= 1.1 * others[1] && errors[1] < 0.1);
    CHECK(!is_hopper() || (tu_fused_together(group) - before == 2 && errors[0] < errors[1] && others[0] < others[1]));
    END;
}

/* ---- graphs ---- */

TEST_RANKS(products_of_f8_are_captured_and_replayed_with_other_shards_and_scales) {
    BEGIN;
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    scaled_call of = { 256, 512, 128, TUTTI_F8_E4M3, TUTTI_F8_E4M3, TUTTI_BF16, 0, false, false, false };
    scaled_tensors with = tensors_of(&of, rank, ranks, 0);
    tt_tensor *shard = there(with.shard), *scales = there(with.of_shard), *right = by_columns_there(with.right),
              *of_right = there(with.of_right);
    scaled_tensors device = { .right = right, .of_right = of_right };
    for (int round = 0; round < 2; round++)
        CHECK(call_scaled(&of, shard, &device, scales, group, NULL) != NULL);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(graph.begin(stream, 1), 0);
    tt_tensor *made = call_scaled(&of, shard, &device, scales, group, NULL);
    CHECK_EQ(graph.end(stream, &captured), 0);
    CHECK(made != NULL);
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    enum {
        RUNS = 12
    };
    scaled_tensors runs[RUNS];
    tt_tensor *shards[RUNS], *of_shards[RUNS], *results[RUNS];
    for (int i = 0; i < RUNS; i++) {
        runs[i] = tensors_of(&of, rank, ranks, 100 * i);
        shards[i] = there(runs[i].shard);
        of_shards[i] = there(runs[i].of_shard);
    }
    for (int i = 0; i < RUNS; i++) {
        tt_copy_(shard, shards[i]);
        tt_copy_(scales, of_shards[i]);
        CHECK_EQ(graph.launch(executable, stream), 0);
        results[i] = tt_clone(made);
    }
    CHECK(tt_synchronize(test_device()));
    for (int i = 0; i < RUNS; i++)
        CHECK(tt_equal(back(results[i]), runs[i].expected));
    CHECK_OK(tutti_group_check(group));
    END;
}

/* ---- types ---- */

/* One matrix has what the other's type cannot hold. */
static tt_tensor *beyond(tt_dims shape, tutti_dtype dtype, int64_t seed) {
    tt_tensor *x = whole(shape, TUTTI_F32, seed);
    return tt_to(dtype == TUTTI_F8_E5M2   ? tt_mul_scalar(x, 512)
                 : dtype == TUTTI_F8_E4M3 ? tt_add_scalar(x, 12)
                                          : tt_add_scalar(x, 255),
                 dtype);
}

static void check_types(tutti_group *group, tutti_dtype left, tutti_dtype right, bool by_rows) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *shards[64], *scales[64], *sum = NULL, *b = tt_transpose(beyond(tt_shape(16, 32), right, 5), 0, 1),
                                        *of_b = eighths(by_rows ? tt_shape(1, 16) : tt_shape(1), 6);
    for (int from = 0; from < ranks; from++) {
        shards[from] = beyond(tt_shape(8, 32), left, from);
        scales[from] = eighths(by_rows ? tt_shape(8, 1) : tt_shape(1), by_rows ? 20 + from : 20);
    }
    tt_tensor *all = tt_cat(tt_tensors_of((size_t)ranks, shards), 0),
              *of_all = by_rows ? tt_cat(tt_tensors_of((size_t)ranks, scales), 0) : scales[0];
    scaled_call of = { .result = TUTTI_F32 };
    scaled_tensors with = { .right = b, .of_right = of_b };
    tt_tensor *made = call_scaled(&of, there(shards[rank]), &with, there(scales[rank]), group, NULL);
    CHECK(made != NULL && tt_equal(back(made), tt_scaled_matmul(all, b, of_all, of_b, NULL, NULL, TUTTI_F32, false)));
    for (int from = 0; from < ranks; from++) {
        tt_tensor *one = tt_scaled_matmul(beyond(tt_shape(8 * ranks, 32), left, 30 + from), b, of_all, of_b, NULL, NULL,
                                          TUTTI_F32, false);
        sum = from == 0 ? one : tt_add(sum, one);
    }
    made = tt_fused_scaled_matmul_reduce_scatter(there(beyond(tt_shape(8 * ranks, 32), left, 30 + rank)), there(b),
                                                 there(of_all), there(of_b), TUTTI_SUM, 0, 0, tt_shape(8 * ranks, 16),
                                                 NULL, NULL, TUTTI_F32, false, group);
    CHECK(made != NULL && tt_equal(back(made), part_of(sum, 0, rank, ranks)));
}

TEST_RANKS(matrices_of_different_types_are_multiplied_without_loss) {
    BEGIN;
    for (int by_rows = 0; by_rows < 2; by_rows++) {
        check_types(group, TUTTI_F8_E4M3, TUTTI_F8_E5M2, by_rows != 0);
        check_types(group, TUTTI_F8_E5M2, TUTTI_F8_E4M3, by_rows != 0);
        check_types(group, TUTTI_F8_E4M3, TUTTI_F32, by_rows != 0);
        check_types(group, TUTTI_F32, TUTTI_F8_E5M2, by_rows != 0);
    }
    END;
}
