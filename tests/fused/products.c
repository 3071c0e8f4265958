/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products fused with communication: values, strides, dtypes, gradients and errors, in worlds of threads and of
 * processes.
 */
#include "support.h"

/* ---- all-gather, then matmul ---- */

static void check_gather(tutti_group *group, tt_tensor *shard, int dim, tutti_dtype dtype) {
    int64_t k = tt_size(shard, -1) * (dim == tt_dim_count(shard) - 1 ? tutti_group_size(group) : 1);
    tt_tensor *b1 = whole(tt_shape(k, 5), dtype, 77), *b2 = whole(tt_shape(k, 3), dtype, 78),
              *b3 = tt_transpose(whole(tt_shape(4, k), dtype, 79), 0, 1), *left = NULL;
    tt_tensor_list products = tt_fused_all_gather_matmul(shard, tt_tensors(b1, b2, b3), dim, group, &left);
    CHECK_EQ(products.count, 3);
    tt_tensor *all = tt_all_gather(shard, dim, group);
    CHECK(tt_equal(left, all));
    CHECK(tt_equal(products.at[0], tt_matmul(all, b1)));
    CHECK(tt_equal(products.at[1], tt_matmul(all, b2)));
    CHECK(tt_equal(products.at[2], tt_matmul(all, b3)));
    tt_tensor_list alone = tt_fused_all_gather_matmul(shard, tt_tensors(b2), dim, group, NULL);
    CHECK(tt_equal(alone.at[0], products.at[1]));
    for (int i = 0; i < 3; i++)
        CHECK_EQ(tt_dtype(products.at[i]), dtype);
}

TEST_WORLD(every_dimension_is_gathered_with_every_number_of_matrices, 3) {
    BEGIN;
    for (int dim = 0; dim < 4; dim++)
        check_gather(group, whole(tt_shape(2, 3, 4, 5), TUTTI_F32, rank), dim, TUTTI_F32);
    for (int dim = 0; dim < 2; dim++) {
        check_gather(group, whole(tt_shape(4, 6), TUTTI_F32, rank), dim, TUTTI_F32);
        check_gather(group, whole(tt_shape(80, 3), TUTTI_F32, rank), dim, TUTTI_F32); /* many rows: shard by shard */
    }
    END;
}

TEST_WORLD(a_batch_of_8_of_64_by_32_with_three_matrices_agrees_with_the_unfused_pair_and_its_strides, 2) {
    BEGIN;
    for (int dim = 0; dim < 3; dim++) {
        int64_t sizes[3] = { 8, 64, 32 };
        sizes[dim] /= ranks;
        tt_tensor *shard = tt_abs(uniform(tt_dims_of(3, sizes), TUTTI_F32, rank)), *left;
        tt_tensor *bs[3];
        for (int i = 0; i < 3; i++)
            bs[i] = tt_abs(uniform(tt_shape(32, 16), TUTTI_F32, 50 + i));
        tt_tensor_list products = tt_fused_all_gather_matmul(shard, tt_tensors_of(3, bs), dim, group, &left);
        tt_tensor *all = tt_all_gather(shard, dim, group);
        CHECK(tt_equal(left, all));
        for (int i = 0; i < 3; i++)
            CHECK(tt_allclose(products.at[i], tt_matmul(all, bs[i]), 1e-5, 1e-8));
        if (dim == 1) { /* memory goes by the gathered dimension first */
            CHECK(has_strides(left, tt_shape(32, 256, 1)));
            CHECK(has_strides(products.at[0], tt_shape(16, 128, 1)));
        } else {
            CHECK(tt_is_contiguous(left) && tt_is_contiguous(products.at[0]));
        }
    }
    END;
}

TEST(restrided_tensors_are_equal_and_contiguous_with_their_dimension_in_front) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = uniform(tt_shape(8, 64, 32, 16), TUTTI_F32, 1);
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor *turned = tt_restride(x, dim);
        CHECK(tt_equal(turned, x));
        tt_dims order = tt_shape(dim, dim == 0 ? 1 : 0, dim <= 1 ? 2 : 1, 3);
        CHECK(tt_is_contiguous(tt_permute(turned, order)));
    }
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD(shards_of_any_strides_are_gathered, 2) {
    BEGIN;
    tt_tensor *wide = whole(tt_shape(6, 8), TUTTI_F32, rank), *cube = whole(tt_shape(3, 4, 5), TUTTI_F32, rank);
    for (int dim = 0; dim < 2; dim++) {
        check_gather(group, tt_transpose(wide, 0, 1), dim, TUTTI_F32);
        check_gather(group, tt_narrow(wide, 1, 2, 3), dim, TUTTI_F32);
        check_gather(group, tt_transpose(cube, 0, 2), dim, TUTTI_F32);
        check_gather(group, tt_restride(cube, dim), dim, TUTTI_F32);
        /* one rank's lies by rows, the other's by columns */
        check_gather(group, rank == 0 ? tt_contiguous(tt_transpose(wide, 0, 1)) : tt_transpose(wide, 0, 1), dim,
                     TUTTI_F32);
    }
    END;
}

TEST_WORLD(every_dtype_that_can_be_multiplied_can_be_gathered_and_scattered, 2) {
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_F32, TUTTI_F16, TUTTI_BF16, TUTTI_F8_E4M3, TUTTI_I8,
                                          TUTTI_I16, TUTTI_I32, TUTTI_I64, TUTTI_U8,   TUTTI_C64,     TUTTI_C128 };
    BEGIN;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        tt_tensor *x = whole(tt_shape(4, 3), dtypes[i], rank), *right = whole(tt_shape(3, 4), dtypes[i], 9);
        for (int dim = 0; dim < 2; dim++)
            check_gather(group, x, dim, dtypes[i]);
        for (int dim = 0; dim < 2; dim++) {
            tt_tensor *part = tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, dim, group);
            CHECK(tt_equal(part, tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, dim, group)));
            CHECK_EQ(tt_dtype(part), dtypes[i]);
        }
    }
    END;
}

TEST_WORLD(symmetric_shards_are_read_where_they_lie_without_a_workspace, 2) {
    BEGIN;
    tt_tensor *shard = symmetric(world, whole(tt_shape(70, 8), TUTTI_F32, rank)),
              *right = whole(tt_shape(8, 5), TUTTI_F32, 3);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(tt_symm_memory(shard), group, &peers));
    for (int round = 0; round < 4; round++) {
        tt_tensor *y = tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0];
        CHECK(tt_equal(y, gathered_product(shard, right, 0, group)));
        tt_add_scalar_(shard, 1); /* nobody reads it any more */
    }
    CHECK_EQ(tt_fused_workspace_bytes(group), 0);
    tutti_peers_release(peers);
    END;
}

TEST_WORLD(symmetric_shards_that_have_not_met_do_so_in_the_first_call, 2) {
    BEGIN;
    tt_tensor *shard = symmetric(world, whole(tt_shape(70, 8), TUTTI_F32, rank)),
              *larger = symmetric(world, whole(tt_shape(700, 8), TUTTI_F32, rank)),
              *right = whole(tt_shape(8, 5), TUTTI_F32, 3);
    for (int round = 0; round < 3; round++) {
        CHECK(tt_equal(tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(shard, right, 0, group)));
        tt_add_scalar_(shard, 1);
    }
    size_t staged = tt_fused_workspace_bytes(group);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(tt_symm_memory(larger), group, &peers));
    tutti_peers_release(peers);
    CHECK(tt_equal(tt_fused_all_gather_matmul(larger, tt_tensors(right), 0, group, NULL).at[0],
                   gathered_product(larger, right, 0, group)));
    CHECK_EQ(tt_fused_workspace_bytes(group), staged);
    END;
}

TEST_WORLD(ranks_may_differ_in_where_their_shards_lie, 3) {
    BEGIN;
    tt_tensor *plain = whole(tt_shape(5, 8), TUTTI_F32, rank), *right = whole(tt_shape(8, 5), TUTTI_F32, 3),
              *shard = symmetric(world, plain), *other = symmetric(world, plain);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(tt_symm_memory(shard), group, &peers));
    tutti_peers_release(peers);
    CHECK_OK(tutti_memory_rendezvous(tt_symm_memory(other), group, &peers));
    tutti_peers_release(peers);
    tt_tensor *expected = gathered_product(plain, right, 0, group);
    for (int round = 0; round < 4; round++) {
        tt_tensor *mine = (rank + round) % 3 == 0 ? plain : (rank + round) % 3 == 1 ? shard : other;
        CHECK(tt_equal(tt_fused_all_gather_matmul(mine, tt_tensors(right), 0, group, NULL).at[0], expected));
        CHECK(tt_equal(tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0], expected));
    }
    END;
}

TEST_WORLD(matrices_may_differ_from_rank_to_rank, 2) {
    BEGIN;
    tt_tensor *shard = whole(tt_shape(4, 3), TUTTI_F32, rank),
              *right = whole(tt_shape(3, 2 + rank), TUTTI_F32, 40 + rank);
    tt_tensor *y = tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0];
    CHECK(has_sizes(y, tt_shape(8, 2 + rank)));
    CHECK(tt_equal(y, gathered_product(shard, right, 0, group)));
    /* as do the inner sizes of scattered products */
    tt_tensor *left = whole(tt_shape(4, 3 + rank), TUTTI_F32, rank),
              *other_right = whole(tt_shape(3 + rank, 2), TUTTI_F32, rank);
    CHECK(tt_equal(tt_fused_matmul_reduce_scatter(left, other_right, TUTTI_SUM, 0, group),
                   tt_reduce_scatter(tt_matmul(left, other_right), TUTTI_SUM, 0, group)));
    END;
}

TEST_WORLD(more_matrices_than_one_call_takes_are_multiplied_all_the_same, 2) {
    BEGIN;
    tt_tensor *shard = tt_require_grad(whole(tt_shape(2, 3), TUTTI_F32, rank), true), *bs[20], *left;
    for (int i = 0; i < 20; i++)
        bs[i] = tt_require_grad(whole(tt_shape(3, 2), TUTTI_F32, 100 + i), true);
    tt_tensor_list products = tt_fused_all_gather_matmul(shard, tt_tensors_of(20, bs), 0, group, &left);
    CHECK_EQ(products.count, 20);
    for (int i = 0; i < 20; i++)
        CHECK(tt_equal(products.at[i], tt_matmul(left, bs[i])));
    tt_backward(tt_sum(tt_cat(products, 0)), NULL);
    CHECK(tt_grad(shard) != NULL && tt_grad(bs[19]) != NULL);
    END;
}

TEST_WORLD(empty_shards_and_matrices_give_empty_or_zero_products, 2) {
    BEGIN;
    tt_tensor *none = whole(tt_shape(0, 3), TUTTI_F32, rank), *flat = whole(tt_shape(4, 0), TUTTI_F32, rank);
    CHECK(has_sizes(
        tt_fused_all_gather_matmul(none, tt_tensors(whole(tt_shape(3, 2), TUTTI_F32, 1)), 0, group, NULL).at[0],
        tt_shape(0, 2)));
    for (int dim = 0; dim < 2; dim++) {
        tt_tensor *zero =
            tt_fused_all_gather_matmul(flat, tt_tensors(whole(tt_shape(0, 2), TUTTI_F32, 1)), dim, group, NULL).at[0];
        CHECK(tt_equal(zero, tt_zeros_like(zero)));
    }
    CHECK(has_sizes(tt_fused_matmul_reduce_scatter(none, whole(tt_shape(3, 2), TUTTI_F32, 1), TUTTI_SUM, 0, group),
                    tt_shape(0, 2)));
    tt_tensor *part = tt_fused_matmul_reduce_scatter(flat, whole(tt_shape(0, 2), TUTTI_F32, 1), TUTTI_AVG, 0, group);
    CHECK(tt_equal(part, tt_zeros_like(part)));
    END;
}

TEST_WORLD(the_native_form_and_the_plain_one_agree_for_symmetric_rows_or_not_and_both_layouts_of_b, 2) {
    BEGIN;
    int64_t rows = test_sanitized() ? 96 : 4096, size = test_sanitized() ? 16 : 1024;
    for (int layout = 0; layout < 4; layout++) {
        tt_tensor *shard = uniform(tt_shape(rows / ranks, size), TUTTI_BF16, rank),
                  *right = uniform(tt_shape(size, size), TUTTI_BF16, 5), *left;
        if (layout & 1)
            shard = symmetric(world, shard);
        if (layout & 2)
            right = tt_transpose(tt_contiguous(tt_transpose(right, 0, 1)), 0, 1);
        tt_tensor *y = tt_fused_all_gather_matmul_native(shard, right, group, &left);
        CHECK(tt_equal(left, tt_all_gather(shard, 0, group)));
        CHECK(tt_equal(y, tt_fused_all_gather_matmul(shard, tt_tensors(right), 0, group, NULL).at[0]));
    }
    FAILS(tt_fused_all_gather_matmul_native(tt_transpose(whole(tt_shape(4, 4), TUTTI_F32, 0), 0, 1),
                                            whole(tt_shape(4, 4), TUTTI_F32, 0), group, NULL),
          TUTTI_ERROR_ARGUMENT, "A_shard must be contiguous");
    END;
}

static void multimem(tutti_world *world, void *argument) {
    BEGIN;
    bool software = argument != NULL;
    int64_t size = test_sanitized() ? 6 : 1020; /* divisible by two and by three ranks */
    tt_tensor *shard = whole(tt_shape(size / ranks, size), TUTTI_BF16, rank),
              *right = whole(tt_shape(size, size), TUTTI_BF16, 5);
    for (int round = 0; round < 3; round++) {
        tt_tensor_list products = tt_fused_all_gather_matmul_multimem(shard, tt_tensors(right, right), group);
        if (software) {
            CHECK_EQ(products.count, 2);
            CHECK(tt_equal(products.at[1], gathered_product(shard, right, 0, group)));
        } else {
            CHECK_EQ(products.count, 0);
            expect_error(TUTTI_ERROR_UNSUPPORTED, "multicast support is required");
        }
    }
    END;
}

TEST(the_multimem_form_needs_multicast) {
    test_threads(2, multimem, NULL);
}

TEST(the_multimem_form_runs_with_multicast_by_software) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(2, multimem, "software");
    test_processes(3, multimem, "software");
}

/* ---- matmul, then reduce-scatter ---- */

TEST_WORLD(every_dimension_is_scattered_and_the_result_is_contiguous, 3) {
    BEGIN;
    tt_tensor *left = whole(tt_shape(3, 6, 9, 4), TUTTI_F32, rank),
              *right = whole(tt_shape(4, 12), TUTTI_F32, 10 + rank);
    for (int dim = 0; dim < 4; dim++)
        for (int avg = 0; avg < 2; avg++)
            for (int turned = 0; turned < 2; turned++) {
                tutti_reduction reduction = avg ? TUTTI_AVG : TUTTI_SUM;
                tt_tensor *x = turned ? tt_restride(left, dim) : left;
                tt_tensor *part = tt_fused_matmul_reduce_scatter(x, right, reduction, dim, group);
                CHECK(tt_is_contiguous(part));
                CHECK(tt_equal(part, tt_reduce_scatter(tt_matmul(left, right), reduction, dim, group)));
            }
    END;
}

TEST_WORLD(a_batch_of_8_of_64_by_1024_is_scattered_as_by_the_unfused_pair, 2) {
    BEGIN;
    int64_t depth = test_sanitized() ? 64 : 1024;
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor *left = tt_abs(uniform(tt_shape(8, 64, depth), TUTTI_F32, rank)),
                  *right = tt_abs(uniform(tt_shape(depth, 16), TUTTI_F32, 20 + rank));
        tt_tensor *part = tt_fused_matmul_reduce_scatter(left, right, TUTTI_AVG, dim, group),
                  *expected = tt_reduce_scatter(tt_matmul(left, right), TUTTI_AVG, dim, group);
        CHECK(tt_allclose(part, expected, 1e-5, 1e-8));
        CHECK(has_strides(part, tt_strides(expected)));
    }
    tt_tensor *left = uniform(tt_shape(64, depth), TUTTI_BF16, rank),
              *right = uniform(tt_shape(depth, 32), TUTTI_BF16, 20 + rank);
    CHECK(tt_allclose(tt_fused_matmul_reduce_scatter(left, right, TUTTI_AVG, 0, group),
                      tt_reduce_scatter(tt_matmul(left, right), TUTTI_AVG, 0, group), 1e-2, 1e-2));
    END;
}

/* Tiles have 62 rows where rows are as long as here: nine of them for each rank in three chunks, the last of a few
 * rows. */
TEST_WORLD(products_of_many_tiles_are_scattered, 2) {
    BEGIN;
    int64_t rows = test_sanitized() ? 320 : 514;
    tt_tensor *left = whole(tt_shape(2 * rows, 3), TUTTI_F32, rank),
              *right = whole(tt_shape(3, 4200), TUTTI_F32, 20 + rank), *cube = tt_view(left, tt_shape(2, rows, 3));
    CHECK(tt_equal(tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, group),
                   tt_reduce_scatter(tt_matmul(left, right), TUTTI_SUM, 0, group)));
    CHECK(tt_equal(tt_fused_matmul_reduce_scatter(cube, right, TUTTI_SUM, 1, group),
                   tt_reduce_scatter(tt_matmul(cube, right), TUTTI_SUM, 1, group)));
    CHECK(tt_equal(tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 1, group),
                   tt_reduce_scatter(tt_matmul(left, right), TUTTI_SUM, 1, group)));
    END;
}

/* ---- gradients ---- */

typedef tt_tensor *form(tt_tensor *x, tt_tensor *right, int dim, tutti_group *group);

static tt_tensor *fused_gather(tt_tensor *x, tt_tensor *right, int dim, tutti_group *group) {
    tt_tensor *left;
    tt_tensor_list y = tt_fused_all_gather_matmul(x, tt_tensors(right, tt_mul(right, right)), dim, group, &left);
    return y.count == 2 ? tt_add(tt_cat(y, -1), tt_sum(tt_mul(left, left))) : NULL;
}

static tt_tensor *plain_gather(tt_tensor *x, tt_tensor *right, int dim, tutti_group *group) {
    tt_tensor *left = tt_all_gather(x, dim, group);
    return tt_add(tt_cat(tt_tensors(tt_matmul(left, right), tt_matmul(left, tt_mul(right, right))), -1),
                  tt_sum(tt_mul(left, left)));
}

static tt_tensor *fused_scatter(tt_tensor *x, tt_tensor *right, int dim, tutti_group *group) {
    return tt_fused_matmul_reduce_scatter(x, right, TUTTI_AVG, dim, group);
}

static tt_tensor *plain_scatter(tt_tensor *x, tt_tensor *right, int dim, tutti_group *group) {
    return tt_reduce_scatter(tt_matmul(x, right), TUTTI_AVG, dim, group);
}

/* Complex numbers as pairs. */
static tt_tensor *real(tt_tensor *x) {
    return tt_dtype(x) == TUTTI_C128 ? tt_view_as_real(tt_contiguous(x)) : x;
}

/* Gradients of a loss, and of the size of those gradients. */
static void gradients(form *of, tt_tensor *x, tt_tensor *given, bool of_x, bool of_b, int dim, tutti_group *group,
                      tt_tensor **results) {
    tt_tensor *left = of_x ? tt_require_grad(tt_detach(tt_clone(x)), true) : x,
              *right = of_b ? tt_require_grad(tt_detach(tt_clone(given)), true) : given;
    tt_tensor *y = real(of(left, right, dim, group));
    tt_tensor *inputs[2];
    size_t count = 0;
    if (of_x)
        inputs[count++] = left;
    if (of_b)
        inputs[count++] = right;
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    options.create_graph = true;
    tt_tensor_list wanted = tt_tensors_of(count, inputs), no_grads = { 0, NULL };
    tt_tensor_list first = tt_gradients(tt_tensors(tt_sum(tt_mul(tt_mul(y, y), y))), wanted, no_grads, &options);
    tt_tensor *loss = NULL;
    for (size_t i = 0; i < first.count; i++) {
        tt_tensor *grad = real(first.at[i]), *square = tt_sum(tt_mul(grad, grad));
        loss = loss == NULL ? square : tt_add(loss, square);
    }
    tt_tensor_list second = tt_gradients(tt_tensors(loss), wanted, no_grads, NULL);
    CHECK(first.count == count && second.count == count);
    for (size_t i = 0; i < count; i++) {
        results[2 * i] = first.at[i];
        results[2 * i + 1] = second.at[i];
    }
}

static void check_gradients(form *fused, form *plain, tutti_group *group, bool complex) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tutti_dtype dtype = complex ? TUTTI_C128 : TUTTI_F64;
    for (int dim = 0; dim < 3; dim++)
        for (int which = 1; which < 4; which++) {
            int64_t last = dim == 2 && fused == fused_gather ? 4 * ranks : 4;
            tt_tensor *x = uniform(tt_shape(2, 4, 4), dtype, rank),
                      *right = uniform(tt_shape(last, 6), dtype, 30 + rank);
            tt_tensor *expected[4] = { NULL }, *found[4] = { NULL };
            gradients(plain, x, right, which & 1, which & 2, dim, group, expected);
            gradients(fused, x, right, which & 1, which & 2, dim, group, found);
            for (int i = 0; i < 4; i++) {
                CHECK((expected[i] == NULL) == (found[i] == NULL));
                if (expected[i] != NULL && !tt_allclose(found[i], expected[i], 1e-9, 1e-9))
                    FAIL("gradient %d of inputs %d along dimension %d differs", i, which, dim);
            }
        }
}

TEST_WORLD(gradients_of_gathered_products_are_those_of_the_pair_twice, 2) {
    BEGIN;
    check_gradients(fused_gather, plain_gather, group, false);
    check_gradients(fused_gather, plain_gather, group, true);
    END;
}

TEST_WORLD(gradients_of_scattered_products_are_those_of_the_pair_twice, 2) {
    BEGIN;
    check_gradients(fused_scatter, plain_scatter, group, false);
    check_gradients(fused_scatter, plain_scatter, group, true);
    END;
}

TEST_WORLD(with_gradient_mode_off_nothing_is_recorded, 2) {
    BEGIN;
    tt_tensor *x = tt_require_grad(whole(tt_shape(2, 4), TUTTI_F32, rank), true),
              *right = whole(tt_shape(4, 2), TUTTI_F32, 1);
    bool before = tt_grad_mode(false);
    CHECK(!tt_requires_grad(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0]));
    CHECK(!tt_requires_grad(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group)));
    tt_grad_mode(before);
    END;
}

/* ---- meta, fake, works ---- */

TEST_WORLD(meta_tensors_have_the_shapes_and_strides_of_real_ones, 2) {
    BEGIN;
    tt_options options = TT_OPTIONS_INIT;
    options.device = TUTTI_META;
    for (int dim = 0; dim < 3; dim++) {
        tt_dims shape = tt_shape(2, 4, 6);
        int64_t k = dim == 2 ? 12 : 6;
        tt_tensor *real_a, *meta_a, *x = whole(shape, TUTTI_F32, rank), *right = whole(tt_shape(k, 8), TUTTI_F32, 2);
        tt_tensor *y = tt_fused_all_gather_matmul(x, tt_tensors(right), dim, group, &real_a).at[0];
        tt_tensor *meta =
            tt_fused_all_gather_matmul(tt_empty(shape, TUTTI_F32, &options),
                                       tt_tensors(tt_empty(tt_shape(k, 8), TUTTI_F32, &options)), dim, group, &meta_a)
                .at[0];
        CHECK_EQ(tt_device_of(meta), TUTTI_META);
        CHECK(has_sizes(meta, tt_sizes(y)) && has_strides(meta, tt_strides(y)));
        CHECK(has_sizes(meta_a, tt_sizes(real_a)) && has_strides(meta_a, tt_strides(real_a)));
        tt_tensor *part = tt_fused_matmul_reduce_scatter(
            tt_empty(shape, TUTTI_F32, &options), tt_empty(tt_shape(6, 8), TUTTI_F32, &options), TUTTI_SUM, dim, group);
        tt_tensor *real = tt_fused_matmul_reduce_scatter(x, whole(tt_shape(6, 8), TUTTI_F32, 2), TUTTI_SUM, dim, group);
        CHECK(has_sizes(part, tt_sizes(real)) && has_strides(part, tt_strides(real)));
    }
    END;
}

TEST(fake_groups_have_the_shapes_of_real_ones_and_wait_for_nobody) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = whole(tt_shape(2, 4), TUTTI_F32, 1), *right = whole(tt_shape(4, 8), TUTTI_F32, 2), *left;
    tt_tensor *y = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, &left).at[0];
    CHECK(tt_equal(y, gathered_product(x, right, 0, group)) && has_sizes(left, tt_shape(8, 4)));
    CHECK(has_sizes(tt_fused_matmul_reduce_scatter(x, right, TUTTI_AVG, 1, group), tt_shape(2, 2)));
    CHECK_EQ(tt_fused_workspace_bytes(group), 0);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(inputs_that_are_still_in_flight_are_waited_for, 2) {
    BEGIN;
    for (int round = 0; round < 5; round++) {
        tt_tensor *x = tt_all_reduce(whole(tt_shape(4, 3), TUTTI_F32, rank), TUTTI_SUM, group),
                  *right = tt_all_reduce(whole(tt_shape(3, 2), TUTTI_F32, 9), TUTTI_SUM, group),
                  *later = tt_all_reduce(whole(tt_shape(5), TUTTI_F32, rank), TUTTI_SUM, group);
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(x, right, 0, group)));
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group),
                       tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, group)));
        CHECK(tt_equal(later, tt_all_reduce(whole(tt_shape(5), TUTTI_F32, rank), TUTTI_SUM, group)));
    }
    END;
}

TEST_WORLD(groups_of_some_ranks_have_workspaces_of_their_own, 4) {
    BEGIN;
    tutti_group *half;
    CHECK_OK(tutti_group_new_subgroups(group, 2, NULL, NULL, &half));
    tt_tensor *x = whole(tt_shape(4, 3), TUTTI_F32, rank), *right = whole(tt_shape(3, 2), TUTTI_F32, 9);
    for (int round = 0; round < 3; round++) {
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, half, NULL).at[0],
                       gathered_product(x, right, 0, half)));
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(x, right, 0, group)));
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, half),
                       tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, half)));
    }
    CHECK_OK(tutti_group_destroy(half));
    tutti_group_release(half);
    END;
}

TEST_WORLD(test_mode_takes_the_plain_collectives_and_gives_the_same, 2) {
    BEGIN;
    tt_tensor *x = uniform(tt_shape(2, 80, 6), TUTTI_F32, rank), *right = uniform(tt_shape(6, 8), TUTTI_F32, 2 + rank),
              *wide = uniform(tt_shape(12, 8), TUTTI_F32, 2), *all;
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor_list factors = tt_tensors(dim == 2 ? wide : right);
        tt_tensor *y = tt_fused_all_gather_matmul(x, factors, dim, group, NULL).at[0],
                  *part = tt_fused_matmul_reduce_scatter(x, right, TUTTI_AVG, dim, group);
        size_t bytes = tt_fused_workspace_bytes(group);
        tt_symm_test_begin(0, NULL);
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, factors, dim, group, &all).at[0],
                       tt_matmul(tt_all_gather(x, dim, group), factors.at[0])));
        CHECK(tt_allclose(y, tt_matmul(all, factors.at[0]), 1e-5, 1e-6));
        CHECK(tt_allclose(tt_fused_matmul_reduce_scatter(x, right, TUTTI_AVG, dim, group), part, 1e-5, 1e-6));
        tt_symm_test_end();
        CHECK_EQ(tt_fused_workspace_bytes(group), bytes);
    }
    END;
}

/* ---- arguments ---- */

TEST(wrong_arguments_are_told_and_end_nothing) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    BEGIN;
    tt_tensor *row = whole(tt_shape(4), TUTTI_F32, 0), *x = whole(tt_shape(4, 3), TUTTI_F32, 0),
              *right = whole(tt_shape(3, 2), TUTTI_F32, 0), *half = whole(tt_shape(3, 2), TUTTI_F16, 0),
              *cube = whole(tt_shape(2, 3, 2), TUTTI_F32, 0), *truth = tt_to(right, TUTTI_BOOL);
    FAILS(tt_fused_all_gather_matmul(row, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_ARGUMENT,
          "A_shard must be a matrix");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right, cube), 0, group, NULL), TUTTI_ERROR_ARGUMENT,
          "B must be a matrix");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 2, group, NULL), TUTTI_ERROR_ARGUMENT, "Invalid gather_dim");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), -1, group, NULL), TUTTI_ERROR_ARGUMENT,
          "Invalid gather_dim");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(half), 0, group, NULL), TUTTI_ERROR_TYPE, "same dtype");
    FAILS(tt_fused_all_gather_matmul(truth, tt_tensors(truth), 0, group, NULL), TUTTI_ERROR_TYPE, "bool");
    FAILS(tt_fused_all_gather_matmul(right, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_ARGUMENT,
          "must have as many rows");
    FAILS(tt_fused_all_gather_matmul(x, (tt_tensor_list){ 0, NULL }, 0, group, NULL), TUTTI_ERROR_ARGUMENT,
          "at least one matrix");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right, NULL), 0, group, NULL), TUTTI_ERROR_ARGUMENT,
          "entry 1 of argument bs is NULL");
    FAILS(tt_fused_all_gather_matmul(NULL, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_ARGUMENT,
          "argument a_shard is NULL");
    FAILS(tt_fused_all_gather_matmul_native(NULL, right, group, NULL), TUTTI_ERROR_ARGUMENT,
          "argument a_shard is NULL");
    FAILS(tt_fused_all_gather_matmul_native(x, NULL, group, NULL), TUTTI_ERROR_ARGUMENT, "argument b is NULL");
    FAILS(tt_fused_all_gather_matmul_multimem(NULL, tt_tensors(right), group), TUTTI_ERROR_ARGUMENT,
          "argument a_shard is NULL");
    FAILS(tt_fused_all_gather_matmul_multimem(x, tt_tensors(NULL), group), TUTTI_ERROR_ARGUMENT,
          "entry 0 of argument bs is NULL");
    FAILS(tt_fused_matmul_reduce_scatter(NULL, right, TUTTI_SUM, 0, group), TUTTI_ERROR_ARGUMENT, "argument a is NULL");
    FAILS(tt_fused_matmul_reduce_scatter(x, NULL, TUTTI_SUM, 0, group), TUTTI_ERROR_ARGUMENT, "argument b is NULL");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, NULL, NULL), TUTTI_ERROR_ARGUMENT, "group is NULL");
    FAILS(tt_fused_matmul_reduce_scatter(row, right, TUTTI_SUM, 0, group), TUTTI_ERROR_ARGUMENT,
          "A_shard must be a matrix");
    FAILS(tt_fused_matmul_reduce_scatter(x, cube, TUTTI_SUM, 0, group), TUTTI_ERROR_ARGUMENT, "B must be a matrix");
    FAILS(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 2, group), TUTTI_ERROR_ARGUMENT, "Invalid gather_dim");
    FAILS(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, -1, group), TUTTI_ERROR_ARGUMENT, "Invalid gather_dim");
    FAILS(tt_fused_matmul_reduce_scatter(x, right, TUTTI_MAX, 0, group), TUTTI_ERROR_ARGUMENT,
          "reduce_op must be sum or avg");
    FAILS(tt_fused_matmul_reduce_scatter(x, half, TUTTI_SUM, 0, group), TUTTI_ERROR_TYPE, "one dtype");
    FAILS(tt_fused_matmul_reduce_scatter(right, right, TUTTI_SUM, 0, group), TUTTI_ERROR_ARGUMENT,
          "cannot be multiplied");
    CHECK_EQ(tt_fused_workspace_bytes(NULL), 0);
    CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0], tt_matmul(x, right)));
    END;
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(a_size_that_cannot_be_divided_is_an_error_on_every_rank, 2) {
    BEGIN;
    tt_tensor *left = whole(tt_shape(5, 3), TUTTI_F32, 0), *right = whole(tt_shape(3, 3), TUTTI_F32, 0);
    for (int dim = 0; dim < 2; dim++)
        FAILS(tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, dim, group), TUTTI_ERROR_ARGUMENT,
              "not divisible by the 2 ranks");
    END;
}
