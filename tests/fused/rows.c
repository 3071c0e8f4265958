/* SPDX-License-Identifier: Apache-2.0
 *
 * What PyTorch's own tests of fused products prove, on a GPU: each test is named after the one there, without its
 * `test_`, and has its shapes. What is compared with is the same call on the CPU, by the same ranks. docs/gpu-tests.md
 * lists all of them.
 */
#include "gpu.h"

/* Equal values, sizes and strides. */
static bool same(tt_tensor *on_device, tt_tensor *on_cpu) {
    return on_device != NULL && on_cpu != NULL && tt_device_of(on_device) == test_device() &&
           has_strides(on_device, tt_strides(on_cpu)) && tt_equal(back(on_device), on_cpu);
}

static bool close_to(tt_tensor *on_device, tt_tensor *on_cpu, double relative, double absolute) {
    return on_device != NULL && on_cpu != NULL && has_strides(on_device, tt_strides(on_cpu)) &&
           tt_allclose(back(on_device), on_cpu, relative, absolute);
}

TEST_RANKS(optimal_layout) {
    BEGIN;
    tt_tensor *x = there(uniform(tt_shape(8, 64, 32, 16), TUTTI_F32, 1));
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor *turned = tt_restride(x, dim);
        tt_dims order = tt_shape(dim, dim == 0 ? 1 : 0, dim <= 1 ? 2 : 1, 3);
        CHECK(tt_equal(turned, x) && tt_is_contiguous(tt_permute(turned, order)));
    }
    END;
}

TEST_RANKS(fused_all_gather_matmul) {
    BEGIN;
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor *shard = whole(tt_shape(8, 64, 32), TUTTI_F32, rank), *bs[3], *device_bs[3], *left, *device_left;
        for (int i = 0; i < 3; i++) {
            bs[i] = whole(tt_shape(dim == 2 ? 32 * ranks : 32, 16), TUTTI_F32, 40 + i);
            device_bs[i] = there(bs[i]);
        }
        tt_tensor_list here = tt_fused_all_gather_matmul(shard, tt_tensors_of(3, bs), dim, group, &left),
                       made = tt_fused_all_gather_matmul(there(shard), tt_tensors_of(3, device_bs), dim, group,
                                                         &device_left);
        CHECK(made.count == 3 && here.count == 3 && same(device_left, left));
        for (int i = 0; i < 3; i++)
            CHECK(same(made.at[i], here.at[i]));
        if (dim == 1)
            CHECK(has_strides(device_left, tt_shape(32, 256, 1)));
    }
    END;
}

TEST_GPU(fused_all_gather_matmul_native) { /* shards that are symmetric and not, b by rows and by columns */
    BEGIN;
    int64_t rows = 4096 / ranks;
    tt_tensor *shard = there(whole(tt_shape(rows, 1024), TUTTI_BF16, rank)), *placed,
              *all = there(all_of(tt_shape(rows, 1024), TUTTI_BF16, ranks, 0)),
              *b = there(whole(tt_shape(1024, 1024), TUTTI_BF16, 9));
    placed =
        tt_symm_empty(world, tt_shape(rows, 1024), TUTTI_BF16, TUTTI_OPTIONS(tt_symm_options, .device = test_device()));
    CHECK(placed != NULL && tt_copy_(placed, shard) != NULL);
    for (int form = 0; form < 4; form++) {
        tt_tensor *right = form % 2 == 0 ? b : tt_transpose(b, 0, 1), *gathered,
                  *made = tt_fused_all_gather_matmul_native(form < 2 ? shard : placed, right, group, &gathered);
        CHECK(made != NULL && tt_equal(back(gathered), back(all)));
        CHECK(tt_equal(back(made), back(tt_matmul(all, right))));
    }
    END;
}

static tt_tensor *by_columns(int64_t rows, int64_t columns, int64_t seed) {
    return tt_transpose(whole(tt_shape(columns, rows), TUTTI_F8_E4M3, seed), 0, 1);
}

/* Scales of rows: 1/8 to 7/8. */
static tt_tensor *eighths(tt_dims shape, int64_t seed) {
    return tt_mul_scalar(positive(whole(shape, TUTTI_F32, seed)), 0.125);
}

static void check_scaled_gather(tutti_group *group, int dim, int mode, tutti_dtype dtype) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    int64_t sizes[3] = { 8, 64, 1 };
    tt_tensor *shard = whole(tt_shape(8, 64, 32), TUTTI_F8_E4M3, rank), *right = by_columns(32, 16, 7), *left,
              *device_left;
    if (mode == 2) /* one for every row of what is gathered */
        sizes[dim] *= ranks;
    tt_tensor *scale = mode == 1
                           ? tt_full(tt_shape(1), 0.125, TUTTI_F32, TUTTI_OPTIONS(tt_options, .device = TUTTI_CPU))
                           : eighths(tt_dims_of(3, sizes), mode == 0 ? 20 + rank : 20),
              *of_right = eighths(mode == 1 ? tt_shape(1) : tt_shape(1, 16), 30);
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &dtype;
    options.out_dtype_count = 1;
    tt_tensor_list here = tt_fused_all_gather_scaled_matmul(shard, tt_tensors(right), scale, tt_tensors(of_right), dim,
                                                            group, &options, &left),
                   made = tt_fused_all_gather_scaled_matmul(there(shard), tt_tensors(by_columns_there(right)),
                                                            there(scale), tt_tensors(there(of_right)), dim, group,
                                                            &options, &device_left);
    CHECK(made.count == 1 && here.count == 1 && same(device_left, left));
    CHECK_EQ(tt_dtype(made.at[0]), dtype == 0 ? TUTTI_F8_E4M3 : dtype);
    CHECK(same(made.at[0], here.at[0]));
}

TEST_RANKS(fused_all_gather_scaled_matmul) { /* scales of rows, of the tensor, of rows of all ranks */
    BEGIN;
    static const tutti_dtype dtypes[] = { 0, TUTTI_BF16, TUTTI_F32 };
    for (int dim = 0; dim < 2; dim++)
        for (int mode = 0; mode < 3; mode++)
            for (int i = 0; i < 3; i++)
                check_scaled_gather(group, dim, mode, dtypes[i]);
    END;
}

TEST_RANKS(fused_matmul_reduce_scatter) {
    BEGIN;
    for (int dim = 0; dim < 3; dim++)
        for (int average = 0; average < 2; average++) {
            tt_tensor *x = whole(tt_shape(8, 64, 1024), TUTTI_F32, rank),
                      *b = whole(tt_shape(1024, 16), TUTTI_F32, 50 + rank);
            tutti_reduction reduction = average ? TUTTI_AVG : TUTTI_SUM;
            CHECK(same(tt_fused_matmul_reduce_scatter(there(x), there(b), reduction, dim, group),
                       tt_fused_matmul_reduce_scatter(x, b, reduction, dim, group)));
        }
    END;
}

/* The sum of products that were rounded to bf16, in f32 and rounded once; also where a graph replays it. */
TEST_RANKS(fused_matmul_reduce_scatter_bfloat16_custom_reduce) {
    BEGIN;
    driver graph = graphs();
    tt_dims shape = tt_shape(64, 1024);
    tt_tensor *b = whole(tt_shape(1024, 32), TUTTI_BF16, 9), *x = there(whole(shape, TUTTI_BF16, rank)),
              *device_b = there(b), *expected[2], *part;
    void *stream = tt_stream(test_device()), *captured, *executable;
    for (int round = 0; round < 2; round++) {
        tt_tensor *sum = NULL;
        for (int from = 0; from < ranks; from++) {
            tt_tensor *one = tt_to(tt_matmul(whole(shape, TUTTI_BF16, from + 100 * round), b), TUTTI_F32);
            sum = from == 0 ? one : tt_add(sum, one);
        }
        expected[round] = part_of(tt_to(sum, TUTTI_BF16), 0, rank, ranks);
    }
    for (int round = 0; round < 2; round++) { /* and everything that is made on first use */
        part = tt_fused_matmul_reduce_scatter(x, device_b, TUTTI_SUM, 0, group);
        CHECK(part != NULL && tt_equal(back(part), expected[0]));
    }
    tt_synchronize(test_device());
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(graph.begin(stream, 1), 0);
    part = tt_fused_matmul_reduce_scatter(x, device_b, TUTTI_SUM, 0, group);
    CHECK_EQ(graph.end(stream, &captured), 0);
    CHECK(part != NULL);
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    for (int round = 0; round < 4; round++) {
        tt_copy_(x, there(whole(shape, TUTTI_BF16, rank + 100 * (round % 2))));
        CHECK_EQ(graph.launch(executable, stream), 0);
        CHECK(tt_synchronize(test_device()));
        CHECK(tt_equal(back(part), expected[round % 2]));
    }
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_RANKS(fused_scaled_matmul_reduce_scatter) {
    BEGIN;
    for (int dim = 0; dim < 2; dim++)
        for (int by_rows = 0; by_rows < 2; by_rows++) {
            tt_tensor *x = whole(tt_shape(8, 64, 32), TUTTI_F8_E4M3, rank), *right = by_columns(32, 16, 7 + rank),
                      *scale = eighths(by_rows ? tt_shape(8, 64, 1) : tt_shape(1), by_rows ? 20 + rank : 20),
                      *of_right = eighths(by_rows ? tt_shape(1, 16) : tt_shape(1), by_rows ? 30 + rank : 30);
            tt_tensor *made = tt_fused_scaled_matmul_reduce_scatter(
                          there(x), by_columns_there(right), there(scale), there(of_right), TUTTI_SUM, dim, dim,
                          tt_shape(8, 64, 16), NULL, NULL, TUTTI_BF16, false, group),
                      *here = tt_fused_scaled_matmul_reduce_scatter(x, right, scale, of_right, TUTTI_SUM, dim, dim,
                                                                    tt_shape(8, 64, 16), NULL, NULL, TUTTI_BF16, false,
                                                                    group);
            CHECK(close_to(made, here, 1.6e-2, 1e-5));
        }
    END;
}
