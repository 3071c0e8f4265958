/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of parts and of dimensions have no limits but those of a tensor; options that make no sense are refused.
 */
#include <math.h>

#include <tutti/tensors.h>

#include "../harness.h"

static void expect_error(tutti_status status, const char *fragment) {
    CHECK_EQ(tt_error_show(), status);
    CHECK_MESSAGE(fragment);
    tt_error_clear();
}

/* ---- splitting ---- */

TEST(a_tensor_is_split_in_as_many_parts_as_one_likes) {
    enum {
        PARTS = 300
    };
    tt_scope scope = tt_scope_open();
    int64_t sizes[PARTS], total = 0;
    for (int i = 0; i < PARTS; i++)
        total += sizes[i] = i % 3; /* some have no rows */
    tt_tensor *x =
        tt_require_grad(tt_view(tt_arange(0, (double)(2 * total), 1, TUTTI_F64, NULL), tt_shape(2, total)), true);
    tt_tensor_list parts = tt_split(x, PARTS, sizes, -1);
    CHECK_EQ(parts.count, PARTS);
    int64_t start = 0;
    for (int i = 0; i < PARTS; start += sizes[i++])
        CHECK(tt_equal(parts.at[i], tt_narrow(x, 1, start, sizes[i])) && tt_same_storage(parts.at[i], x));
    CHECK(tt_backward(tt_sum(tt_mul_scalar(parts.at[PARTS - 1], 3)), NULL));
    CHECK(tt_item(tt_sum(tt_grad(x))) == (double)(3 * 2 * sizes[PARTS - 1]));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(parts_that_do_not_add_up_are_refused) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(4, 6), TUTTI_F32, NULL);
    CHECK(tt_split(x, 2, (int64_t[]){ 2, 3 }, 1).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "1 are left");
    CHECK(tt_split(x, 2, (int64_t[]){ 2, 5 }, 1).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "part 1 of 5 rows does not fit");
    CHECK(tt_split(x, 3, (int64_t[]){ 8, -4, 2 }, 1).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "part 0 of 8 rows");
    CHECK(tt_split(x, 2, (int64_t[]){ 7, -1 }, 1).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "does not fit");
    CHECK(tt_split(x, 2, (int64_t[]){ INT64_MAX, INT64_MAX }, 1).count == 0); /* whose sum would wrap */
    expect_error(TUTTI_ERROR_ARGUMENT, "does not fit");
    CHECK(tt_split(x, 0, NULL, 1).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "0 parts");
    CHECK(tt_split(x, 2, NULL, 1).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "0 parts");
    CHECK(tt_split(x, 1, (int64_t[]){ 4 }, 2).count == 0);
    expect_error(TUTTI_ERROR_RANGE, "dim 2");
    CHECK(tt_split(tt_ones(tt_shape(), TUTTI_F32, NULL), 1, (int64_t[]){ 1 }, 0).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "cannot be cut");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- cross entropy ---- */

static tt_tensor *some(tt_dims shape, int64_t numel) {
    return tt_view(tt_sin(tt_arange(1, (double)numel + 1, 1, TUTTI_F64, NULL)), shape);
}

/* The same by one row of classes after the other. */
TEST(cross_entropy_takes_classes_in_dimension_one_of_any_number) {
    tt_scope scope = tt_scope_open();
    int64_t labels[12] = { 0, 4, 2, -100, 1, 3, 3, 0, 2, -100, 4, 1 };
    tt_tensor *x = tt_require_grad(some(tt_shape(2, 5, 3, 2), 60), true); /* (rows, classes, 3, 2) */
    tt_tensor *targets = tt_from(labels, tt_shape(2, 3, 2), TUTTI_I64, NULL);
    tt_tensor *rows =
        tt_require_grad(tt_reshape(tt_permute(tt_detach(x), tt_shape(0, 2, 3, 1)), tt_shape(12, 5)), true);
    tt_tensor *loss = tt_cross_entropy(x, targets, -100);
    tt_tensor *wanted = tt_cross_entropy(rows, tt_view(targets, tt_shape(12)), -100);
    CHECK(tt_equal(loss, wanted) && tt_backward(loss, NULL) && tt_backward(wanted, NULL));
    CHECK(tt_equal(tt_reshape(tt_permute(tt_grad(x), tt_shape(0, 2, 3, 1)), tt_shape(12, 5)), tt_grad(rows)));
    /* Three dimensions, and one: a single row of classes. */
    tt_tensor *flat = tt_reshape(x, tt_shape(2, 5, 6));
    CHECK(tt_equal(tt_cross_entropy(flat, tt_view(targets, tt_shape(2, 6)), -100), wanted));
    tt_tensor *row = tt_require_grad(some(tt_shape(5), 5), true), *label = tt_full(tt_shape(), 3, TUTTI_I64, NULL);
    tt_tensor *single = tt_cross_entropy(row, label, -100);
    CHECK(tt_dim_count(single) == 0 && tt_backward(single, NULL) && tt_dim_count(tt_grad(row)) == 1);
    CHECK(fabs(tt_item(tt_sum(tt_grad(row)))) < 1e-12);
    CHECK(tt_equal(single, tt_cross_entropy(tt_view(row, tt_shape(1, 5)), tt_view(label, tt_shape(1)), -100)));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(cross_entropy_of_many_dimensions_has_second_derivatives_and_a_shape_on_meta) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(some(tt_shape(2, 3, 2), 12), true);
    tt_tensor *targets = tt_from((int64_t[]){ 0, 2, 1, 1 }, tt_shape(2, 2), TUTTI_I64, NULL);
    tt_tensor_list first =
        tt_gradients(tt_tensors(tt_cross_entropy(x, targets, -100)), tt_tensors(x), tt_tensors_of(0, NULL),
                     TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    CHECK(first.count == 1 && tt_backward(tt_sum(tt_square(first.at[0])), NULL) && tt_grad(x) != NULL);
    tt_options meta = TT_OPTIONS_INIT;
    meta.device = TUTTI_META;
    CHECK_EQ(tt_dim_count(tt_cross_entropy(tt_empty(tt_shape(2, 5, 3), TUTTI_F32, &meta),
                                           tt_empty(tt_shape(2, 3), TUTTI_I64, &meta), -100)),
             0);
    tt_tensor *none = tt_cross_entropy(tt_ones(tt_shape(2, 5, 0), TUTTI_F32, NULL),
                                       tt_full(tt_shape(2, 0), 0, TUTTI_I64, NULL), -100);
    CHECK(isnan(tt_item(none))); /* of no targets, as with rows */
    CHECK_OK(tt_scope_close(&scope));
}

/* log(1 + e + e^2), and the shares, also where the logits are so large that one number could not hold their sum. */
TEST(cross_entropy_of_large_logits_is_as_exact_as_of_small_ones) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64 };
    static const double large[] = { 4e6, 2e15 };
    for (int i = 0; i < 2; i++) {
        tt_scope scope = tt_scope_open();
        double all = 1 + exp(1) + exp(2), tolerance = i == 0 ? 1e-6 : 1e-14;
        tt_tensor *few = tt_arange(0, 3, 1, dtypes[i], NULL), *target = tt_zeros(tt_shape(1), TUTTI_I64, NULL);
        tt_tensor *x = tt_require_grad(tt_view(tt_add_scalar(few, large[i]), tt_shape(1, 3)), true);
        tt_tensor *loss = tt_cross_entropy(x, target, -100);
        CHECK(fabs(tt_item(loss) - log(all)) < tolerance * log(all) && tt_backward(loss, NULL));
        for (int k = 0; k < 3; k++) {
            double wanted = exp(k) / all - (k == 0);
            CHECK(fabs(tt_item(tt_select(tt_select(tt_grad(x), 0, 0), 0, k)) - wanted) < tolerance);
        }
        CHECK_OK(tt_scope_close(&scope));
    }
}

TEST(targets_that_do_not_belong_to_the_logits_are_refused) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(2, 5, 3), TUTTI_F32, NULL);
    CHECK(tt_cross_entropy(x, tt_full(tt_shape(2, 5), 0, TUTTI_I64, NULL), -100) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "dimension 1 (or the only one) are the classes");
    CHECK(tt_cross_entropy(x, tt_full(tt_shape(6), 0, TUTTI_I64, NULL), -100) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must have the others");
    CHECK(tt_cross_entropy(tt_ones(tt_shape(), TUTTI_F32, NULL), tt_full(tt_shape(), 0, TUTTI_I64, NULL), -100) ==
          NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "classes");
    CHECK(tt_cross_entropy(x, tt_full(tt_shape(2, 3), 5, TUTTI_I64, NULL), -100) == NULL);
    expect_error(TUTTI_ERROR_RANGE, "out of range for 5 classes");
    CHECK(tt_cross_entropy(x, tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), -100) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "integer");
    CHECK(tt_cross_entropy(x, NULL, -100) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "targets");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- options ---- */

TEST(options_of_symmetric_tensors_are_validated) {
    tutti_world *world, *other;
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &world));
    CHECK_OK(tutti_world_open(NULL, &other));
    tt_scope scope = tt_scope_open();
    CHECK(tt_symm_empty(world, tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_symm_options, .persistent_id = 7)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "persistent_id is 7");
    CHECK(tt_symm_empty(world, tt_shape(4), TUTTI_I64, TUTTI_OPTIONS(tt_symm_options, .requires_grad = true)) == NULL);
    expect_error(TUTTI_ERROR_TYPE, "requires_grad");
    CHECK(tt_symm_empty(world, tt_shape(4), TUTTI_F32,
                        TUTTI_OPTIONS(tt_symm_options, .group = tutti_world_group(other))) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "another world");
    CHECK(tt_symm_empty(world, tt_shape(4), TUTTI_F32, &(tt_symm_options){ 0 }) == NULL);
    CHECK(tt_error_pending() != TUTTI_OK); /* a struct without its size */
    tt_error_clear();
    CHECK(tt_symm_empty(NULL, tt_shape(4), TUTTI_F32, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "world is NULL");
    CHECK(tt_symm_empty_strided(world, tt_shape(4, 2), tt_shape(1), TUTTI_F32, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "1 strides given for 2 dimensions");
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
    CHECK_OK(tutti_world_close(other));
}

/* ---- lists of none ---- */

static bool is_nothing(tt_tensor_list list) {
    return list.count == 0 && list.at[0] == NULL && list.at[1023] == NULL;
}

static bool is_unnamed(tt_named_list list) {
    return is_nothing((tt_tensor_list){ list.count, list.at }) && list.names[0] == NULL && list.names[1023] == NULL;
}

/* A program may take elements out of a list before it asks for the error. */
TEST(what_a_failed_call_lists_are_nulls) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(4, 3), TUTTI_F32, NULL);
    CHECK(is_nothing(tt_chunk(x, 0, 0))); /* the call that fails itself */
    tt_tensor_list list = tt_tensors(x);
    CHECK(is_nothing(tt_chunk(x, 2, 0))); /* and those that come after it */
    CHECK(is_nothing(tt_split(x, 2, (int64_t[]){ 1, 3 }, 0)));
    CHECK(is_nothing(tt_foreach_norm(list)));
    CHECK(is_nothing(tt_gradients(list, list, (tt_tensor_list){ 0, NULL }, NULL)));
    CHECK(is_nothing(tt_all_gather_list(x, NULL, NULL)));
    CHECK(is_nothing(tt_all_reduce_coalesced(list, TUTTI_SUM, NULL)));
    CHECK(is_nothing(tt_all_reduce_coalesced_(list, TUTTI_SUM, NULL)));
    CHECK(is_nothing(tt_all_gather_coalesced(list, NULL)));
    CHECK(is_nothing(tt_reduce_scatter_coalesced(list, TUTTI_SUM, 1, (int[]){ 0 }, NULL)));
    CHECK(is_nothing(tt_fused_all_gather_matmul(x, list, 0, NULL, NULL)));
    CHECK(is_nothing(tt_module_call_all(NULL, list)));
    CHECK(is_nothing(tt_module_call_method(NULL, NULL, list)));
    CHECK(is_unnamed(tt_module_parameters(NULL)));
    CHECK(is_unnamed(tt_optimizer_state(NULL)));
    CHECK(is_unnamed(tt_load_npz("/nowhere")));
    CHECK(is_unnamed(tt_load_safetensors("/nowhere")));
    CHECK(tt_add(tt_chunk(x, 3, 0).at[2], x) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
}
