/* SPDX-License-Identifier: Apache-2.0
 *
 * What an operator knows of itself, the one place where operators run, and operators in the corners: arguments that
 * overlap or overflow, narrow types, zeros.
 */
#include <math.h>

#include <tutti/autograd.h>
#include <tutti/functional.h>

#include "../harness.h"
#include "tensor/operators.h"

static tt_tensor *floats(tt_dims shape, const double *values) {
    return tt_to(tt_from(values, shape, TUTTI_F64, NULL), TUTTI_F32);
}

static tt_tensor *leaf(tt_dims shape, const double *values) {
    return tt_require_grad(tt_from(values, shape, TUTTI_F64, NULL), true);
}

static bool is(tt_tensor *x, int64_t count, const double *values) {
    double found[64];
    if (x == NULL || tt_numel(x) != count || !tt_read(x, found, TUTTI_F64, (size_t)count))
        return false;
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(found[i] - values[i]) <= 1e-6 * (1 + fabs(values[i]))))
            return false;
    return true;
}
#define IS(x, ...) is(x, (int64_t)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)), (double[]){ __VA_ARGS__ })

/* The pending error has this status and names this; clears it. */
#define FAILS(call, status, fragment)      \
    do {                                   \
        (void)(call);                      \
        CHECK_EQ(tt_error_show(), status); \
        CHECK_MESSAGE(fragment);           \
        tt_error_clear();                  \
    } while (0)

/* ---- the table ---- */

static int index_of(const char *name) {
    for (int i = 0; i < tt_operator_count(); i++) {
        tt_operator_info info = TT_OPERATOR_INFO_INIT;
        CHECK_OK(tt_operator_at(i, &info));
        if (strcmp(info.name, name) == 0)
            return i;
    }
    FAIL("no operator %s", name);
    return -1;
}

TEST(an_operator_tells_its_arguments_in_the_order_of_the_function) {
    static const struct {
        const char *name;
        tt_argument_type type;
    } expected[] = { { "x", TT_ARGUMENT_TENSOR },
                     { "dim", TT_ARGUMENT_INT },
                     { "index", TT_ARGUMENT_TENSOR },
                     { "source", TT_ARGUMENT_TENSOR } };
    int index = index_of("index_add");
    tt_operator_info info = TT_OPERATOR_INFO_INIT;
    CHECK_OK(tt_operator_at(index, &info));
    CHECK_TEXT(info.prototype, "tt_tensor *tt_index_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source)");
    CHECK_EQ(info.argument_count, 4);
    CHECK_EQ(info.result_count, 1);
    for (int i = 0; i < 4; i++) {
        tt_argument_info argument = TT_ARGUMENT_INFO_INIT;
        CHECK_OK(tt_operator_argument_at(index, i, &argument));
        CHECK_TEXT(argument.name, expected[i].name);
        CHECK_EQ((int)argument.type, (int)expected[i].type);
    }
    tt_argument_info argument = TT_ARGUMENT_INFO_INIT;
    CHECK_STATUS(tt_operator_argument_at(index, 4, &argument), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("index_add has arguments 0 to 3");
    CHECK_OK(tt_operator_argument_at(index_of("linear"), 2, &argument));
    CHECK(argument.optional && !argument.written);
    CHECK_OK(tt_operator_argument_at(index_of("sgd_step"), 0, &argument));
    CHECK(argument.written && !argument.optional);
}

TEST(a_pointwise_operator_has_one_expression_and_says_its_dtypes) {
    tt_operator_info info = TT_OPERATOR_INFO_INIT;
    CHECK_OK(tt_operator_at(index_of("add_scaled"), &info));
    CHECK_TEXT(info.expression, "a + factor * b");
    CHECK_TEXT(info.dtypes, "numbers, complex");
    CHECK(info.pure && info.in_place && info.differentiable && !info.view && !info.composite);
}

/* ---- calls as data ---- */

static void narrow_call(tu_call *call, tt_tensor **x, const tu_narrow_attributes *attributes) {
    tu_call_init(call, &tu_operator_narrow, 1, x, attributes);
}

TEST(a_call_has_a_text_and_its_attributes_a_hash) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_zeros(tt_shape(2, 3), TUTTI_F32, NULL);
    tu_narrow_attributes one = { 1, 0, 2 }, alike = { 1, 0, 2 }, other = { 1, 0, 1 };
    tu_call first;
    char text[200], tiny[8];
    narrow_call(&first, &x, &one);
    CHECK_TEXT(tu_call_text(&first, text, sizeof text), "narrow(x f32 [2, 3], dim=1, start=0, length=2)");
    CHECK_TEXT(tu_call_text(&first, tiny, sizeof tiny), "narrow(");
    CHECK(tu_attributes_hash(&tu_operator_narrow, &one) == tu_attributes_hash(&tu_operator_narrow, &alike));
    CHECK(tu_attributes_hash(&tu_operator_narrow, &one) != tu_attributes_hash(&tu_operator_narrow, &other));
    tu_sum_dims_attributes dims = { tt_shape(0, 1), true }, same = { tt_shape(0, 1), true };
    dims.dims.at[5] = 7; /* beyond its count: no part of the call */
    tu_call_init(&first, &tu_operator_sum_dims, 1, &x, &dims);
    CHECK(tu_attributes_hash(&tu_operator_sum_dims, &dims) == tu_attributes_hash(&tu_operator_sum_dims, &same));
    CHECK_TEXT(tu_call_text(&first, text, sizeof text), "sum_dims(x f32 [2, 3], dims=[0, 1], keep_dims=true)");
    CHECK_OK(tt_scope_close(&scope));
}

TEST(kept_attributes_own_what_they_hold) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    int index = index_of("all_to_all_single");
    const tu_operator *entry = tu_table_at(index);
    int64_t splits[] = { 4, 5 };
    struct {
        tu_ints out_splits, in_splits;
        tutti_group *group;
    } attributes = { { 2, splits }, { 2, splits }, tutti_world_group(world) }, copy;
    CHECK_EQ(sizeof attributes, entry->attribute_bytes);
    CHECK_OK(tu_attributes_copy(entry, &attributes, &copy));
    splits[1] = 9;
    CHECK(copy.out_splits.at != splits && copy.out_splits.at[1] == 5 && copy.in_splits.at[0] == 4);
    tu_attributes_end(entry, &copy);
    CHECK_OK(tutti_world_close(world));
}

/* ---- the one place where operators run ---- */

typedef struct notes {
    tu_call_recorder recorder;
    int count;
    const char *names[200];
    bool skip;
    tutti_status refuse;
} notes;

static tutti_status note(tu_call_recorder *recorder, tu_call *call) {
    notes *to = (notes *)recorder;
    if (to->count < 200)
        to->names[to->count++] = call->entry->name;
    for (int i = 0; i < call->output_count; i++)
        CHECK(call->outputs[i] != NULL && call->outputs[i]->dtype == call->results[i].dtype);
    call->computed = to->skip;
    return to->refuse == TUTTI_OK ? TUTTI_OK : tutti_error_set(to->refuse, "the recorder says no");
}

static bool seen(const notes *list, int *from, const char *name) {
    while (*from < list->count)
        if (strcmp(list->names[(*from)++], name) == 0)
            return true;
    return false;
}

TEST(a_recorder_sees_every_operator_of_a_training_step) {
    tt_scope scope = tt_scope_open();
    tt_tensor *weight = tt_parameter(tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), true);
    notes list = { .recorder = { note } };
    CHECK(tu_call_recorder_set(&list.recorder) == NULL);
    tt_tensor *x = tt_randn(tt_shape(4, 3), TUTTI_F32, NULL);
    tt_tensor *hidden = tt_dropout(tt_relu(tt_linear(x, weight, NULL)), 0.5);
    tt_backward(tt_mse_loss(hidden, tt_zeros_like(hidden)), NULL);
    CHECK(tt_sgd_step(weight, tt_grad(weight), NULL, NULL));
    tt_set_grad(weight, NULL);
    tt_set_version(tt_tensors(x), 1, (int64_t[]){ (int64_t)tt_version(x) });
    tt_storage_resize(x, 0);
    tt_parameter(tt_detach(weight), true);
    CHECK(tu_call_recorder_set(NULL) == &list.recorder);
    tt_neg(weight); /* after it has gone */
    static const char *const expected[] = { "random_state",    "randn",    "linear",   "relu",          "random_state",
                                            "dropout",         "full",     "sub",      "square",        "mean_dims",
                                            "expand",          "mul",      "dropout",  "relu_backward", "matmul",
                                            "accumulate_grad", "sgd_step", "set_grad", "version_get",   "version_set",
                                            "storage_resize",  "detach",   "parameter" };
    int at = 0;
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        if (!seen(&list, &at, expected[i]))
            FAIL("the recorder did not see %s, or not in this order", expected[i]);
    CHECK(!seen(&list, &at, "neg"));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_recorder_sees_the_parts_of_functions_on_lists_and_what_changes_beside_tensors) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(2), TUTTI_F32, NULL), *y = tt_ones(tt_shape(2), TUTTI_F32, NULL);
    tt_tensor *leaf_of_it = tt_ones(tt_shape(2), TUTTI_F32, NULL);
    notes list = { .recorder = { note } };
    tu_call_recorder_set(&list.recorder);
    tt_seed(3, 0);
    CHECK(tt_require_grad(leaf_of_it, true) == leaf_of_it);
    tt_retain_grad(leaf_of_it); /* a leaf keeps its gradient anyway */
    uint32_t before = tt_version(x);
    CHECK(tt_data_mut(x) != NULL);
    CHECK_EQ(tt_version(x), before + 1);
    CHECK(tt_foreach_copy_(tt_tensors(x, y), tt_tensors(y, x)));
    CHECK(tt_foreach_add_(tt_tensors(x), tt_tensors(y), 2));
    CHECK(tt_foreach_mul_scalar_(tt_tensors(x), 2));
    CHECK(tt_foreach_addcdiv_(tt_tensors(x), tt_tensors(y), tt_tensors(y), 2));
    tu_call_recorder_set(NULL);
    static const char *const expected[] = { "seed", "require_grad", "version_get", "data_mut",   "version_get",
                                            "copy", "copy",         "add_scaled",  "mul_scalar", "addcdiv" };
    CHECK_EQ(list.count, (int)(sizeof expected / sizeof *expected));
    for (int i = 0; i < list.count; i++)
        if (strcmp(list.names[i], expected[i]) != 0)
            FAIL("call %d is %s, not %s", i, list.names[i], expected[i]);
    CHECK(IS(x, 8, 8));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_recorder_may_compute_instead_or_refuse) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(3), TUTTI_F32, NULL);
    notes list = { .recorder = { note }, .skip = true };
    tu_call_recorder_set(&list.recorder);
    tt_fill_(x, 7);
    list.skip = false;
    list.refuse = TUTTI_ERROR_UNSUPPORTED;
    tt_tensor *y = tt_neg(x);
    tu_call_recorder_set(NULL);
    CHECK(y == NULL);
    FAILS(y, TUTTI_ERROR_UNSUPPORTED, "the recorder says no");
    CHECK(IS(x, 1, 1, 1));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(an_operator_without_a_kernel_for_the_device_is_an_error_that_names_both) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(3), TUTTI_F32, NULL);
    static const tu_operator lame = { .name = "lame", .results = 1, .shape = tu_shape_like_first };
    FAILS(tu_run_new(&lame, 1, &x, NULL), TUTTI_ERROR_UNSUPPORTED, "lame: there is no kernel for the device cpu");
    tt_tensor *meta = tt_empty(tt_shape(3), TUTTI_F32, TUTTI_OPTIONS(tt_options, .device = TUTTI_META));
    CHECK(tu_run_new(&lame, 1, &meta, NULL) != NULL); /* meta computes nothing */
    CHECK_OK(tt_scope_close(&scope));
}

/* A handle on a GPU, whose storage is empty: nothing may look into it. */
static tt_tensor *on_cuda(tutti_device device, tt_dims dims) {
    tu_shape shape;
    CHECK_OK(tu_shape_from("test", dims, TUTTI_F32, TUTTI_META, &shape));
    tt_tensor *x = tu_tensor_new(&shape);
    CHECK(x != NULL);
    x->device = (uint16_t)device;
    x->storage->device = device;
    return tu_scope_own(x);
}

TEST(a_tensor_on_cuda_meets_no_kernel_of_the_cpu) {
    tt_scope scope = tt_scope_open();
    tutti_device far = TUTTI_CUDA_AT(201), farther = TUTTI_CUDA_AT(202); /* which no machine has */
    tt_tensor *x = on_cuda(far, tt_shape(3)), *other = on_cuda(farther, tt_shape(3));
    tt_tensor *here = tt_ones(tt_shape(3), TUTTI_F32, NULL), *matrix = tt_view(x, tt_shape(1, 3));
    tt_counts before = { .size = sizeof before }, after = { .size = sizeof after };
    CHECK_OK(tt_count(&before));
    FAILS(tt_neg(x), TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device cuda:201");
    FAILS(tt_neg_(x), TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device cuda:201");
    FAILS(tt_softmax(matrix, 0), TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device cuda:201");
    FAILS(tt_add(here, x), TUTTI_ERROR_ARGUMENT,
          "add: a (input 0) is on the device cpu and b (input 1) on cuda:201; expected all on one");
    FAILS(tt_add(x, other), TUTTI_ERROR_ARGUMENT, "on the device cuda:201 and b (input 1) on cuda:202");
    FAILS(tt_copy_(here, x), TUTTI_ERROR_ARGUMENT, "cuda:201");
    FAILS(tt_storage_resize(x, 64), TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device cuda:201");
    CHECK_OK(tt_count(&after));
    CHECK(after.tensors == before.tensors && after.storages == before.storages);
    CHECK(IS(here, 1, 1, 1));
    /* A view is metadata, and stays on its device; a number adopts it. */
    CHECK(tt_device_of(tt_narrow(x, 0, 1, 2)) == far);
    FAILS(tt_add(tt_number(2), x), TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device cuda:201");
    CHECK_OK(tt_scope_close(&scope));
}

static tutti_status compute_nothing(tu_call *call) {
    (void)call;
    return TUTTI_OK;
}

TEST(the_kernel_is_that_of_the_kind_of_the_device) {
    tt_scope scope = tt_scope_open();
    static const tu_operator gpu_only = {
        .name = "gpu_only", .results = 0, .shape = tu_no_results, .kernels[TU_ON_CUDA] = compute_nothing
    };
    tt_tensor *x = on_cuda(TUTTI_CUDA_AT(201), tt_shape(0)), *here = tt_ones(tt_shape(3), TUTTI_F32, NULL);
    CHECK(!tu_run_many(&gpu_only, 1, &x, NULL, NULL)); /* it has the kernel, but not the device */
    FAILS(NULL, TUTTI_ERROR_UNSUPPORTED, "there are no tensors on the device cuda:201");
    CHECK(!tu_run_many(&gpu_only, 1, &here, NULL, NULL));
    FAILS(NULL, TUTTI_ERROR_UNSUPPORTED, "gpu_only: there is no kernel for the device cpu");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- arguments that overlap ---- */

TEST(what_is_written_may_not_overlap_what_is_read_in_another_order) {
    tt_scope scope = tt_scope_open();
    tt_tensor *m = tt_ones(tt_shape(4, 4), TUTTI_F32, NULL), *x = tt_ones(tt_shape(6), TUTTI_F32, NULL);
    FAILS(tt_add_(m, tt_t(m)), TUTTI_ERROR_ARGUMENT, "add_: b, f32 [4, 4], shares some memory");
    FAILS(tt_copy_(m, tt_t(m)), TUTTI_ERROR_ARGUMENT, "clone it first");
    FAILS(tt_add_(tt_narrow(x, 0, 1, 5), tt_narrow(x, 0, 0, 5)), TUTTI_ERROR_ARGUMENT, "depend on the order");
    FAILS(tt_add_(tt_narrow(m, 1, 1, 2), tt_narrow(m, 1, 0, 2)), TUTTI_ERROR_ARGUMENT, "depend on the order");
    /* The very same elements, and others beside them, are fine. */
    CHECK(tt_add_(m, m) != NULL && tt_add_(m, tt_alias(m)) != NULL);
    CHECK(tt_add_(tt_slice(x, 0, 0, 6, 2), tt_slice(x, 0, 1, 6, 2)) != NULL);
    CHECK(tt_add_(tt_narrow(m, 1, 0, 2), tt_narrow(m, 1, 2, 2)) != NULL);
    CHECK(tt_add_(tt_narrow(x, 0, 0, 3), tt_narrow(x, 0, 3, 3)) != NULL);
    CHECK(tt_add_(tt_select(m, 0, 0), tt_select(m, 0, 1)) != NULL);
    CHECK_OK(tt_scope_close(&scope));
}

/* By looking at every element. */
static bool meet(const int64_t *sizes, const int64_t *strides) {
    bool taken[64] = { false };
    for (int64_t i = 0; i < sizes[0]; i++)
        for (int64_t j = 0; j < sizes[1]; j++)
            for (int64_t k = 0; k < sizes[2]; k++) {
                bool *at = &taken[i * strides[0] + j * strides[1] + k * strides[2]];
                if (*at)
                    return true;
                *at = true;
            }
    return false;
}

TEST(what_overlaps_itself_is_not_written) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(64), TUTTI_F32, NULL);
    FAILS(tt_add_scalar_(tt_as_strided(x, tt_shape(2, 4), tt_shape(2, 1), 0), 1), TUTTI_ERROR_ARGUMENT,
          "add_scalar_: several elements of f32 [2, 4], with strides [2, 1], share one memory location");
    FAILS(tt_fill_(tt_expand(tt_narrow(x, 0, 0, 1), tt_shape(6)), 1), TUTTI_ERROR_ARGUMENT, "clone it first");
    CHECK(tt_add_scalar_(tt_as_strided(x, tt_shape(3, 2), tt_shape(2, 3), 0), 1) != NULL); /* 0 2 4 and 3 5 7 */
    int overlapping = 0;
    for (int64_t i = 0; i < 27 * 343; i++) {
        int64_t sizes[] = { 1 + i % 3, 1 + i / 3 % 3, 1 + i / 9 % 3 };
        int64_t strides[] = { i / 27 % 7, i / 27 / 7 % 7, i / 27 / 49 };
        tt_scope inner = tt_scope_open();
        const tt_tensor *view = tt_as_strided(x, tt_dims_of(3, sizes), tt_dims_of(3, strides), 0);
        overlapping += meet(sizes, strides);
        CHECK_EQ(tu_overlaps_itself(view), meet(sizes, strides));
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK(overlapping > 1000 && overlapping < 27 * 343 - 1000);
    CHECK_OK(tt_scope_close(&scope));
}

/* Their elements cannot be compared one by one. */
TEST(whether_a_huge_tensor_overlaps_itself_is_found_out_quickly) {
    tt_options meta = TT_OPTIONS_INIT;
    meta.device = TUTTI_META;
    int64_t side = (int64_t)1 << 20;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_empty(tt_shape(3 * side * side), TUTTI_F32, &meta);
    CHECK(tt_add_scalar_(tt_as_strided(x, tt_shape(side, side), tt_shape(side, side - 1), 0), 1) != NULL);
    CHECK(tt_add_scalar_(tt_as_strided(x, tt_shape(side, side), tt_shape(side + 1, side), 0), 1) != NULL);
    FAILS(tt_add_scalar_(tt_as_strided(x, tt_shape(side, side), tt_shape(side - 1, side - 2), 0), 1),
          TUTTI_ERROR_ARGUMENT, "share one memory location");
    FAILS(tt_add_scalar_(tt_as_strided(x, tt_shape(side, side, 3), tt_shape(60, 101, 103), 0), 1), TUTTI_ERROR_ARGUMENT,
          "share one memory location");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- arguments beyond all measure ---- */

TEST(sizes_that_overflow_are_refused) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(1, 1), TUTTI_F32, NULL), *none = tt_zeros(tt_shape(0, 3), TUTTI_F32, NULL);
    int64_t huge = (int64_t)1 << 32;
    FAILS(tt_as_strided(x, tt_shape(3), tt_shape((int64_t)1 << 61), 0), TUTTI_ERROR_RANGE, "beyond the storage");
    FAILS(tt_as_strided(x, tt_shape(3, 3), tt_shape(INT64_MAX / 2, INT64_MAX / 2), 0), TUTTI_ERROR_RANGE, "beyond");
    FAILS(tt_expand(x, tt_shape(huge, huge)), TUTTI_ERROR_RANGE, "more elements than can be counted");
    FAILS(tt_zeros(tt_shape(0, huge, huge), TUTTI_F32, NULL), TUTTI_ERROR_RANGE, "too large to address");
    CHECK_EQ(tt_numel(tt_zeros(tt_shape(0, huge), TUTTI_F32, NULL)), 0);
    FAILS(tt_reshape(none, tt_shape(-1, 0)), TUTTI_ERROR_ARGUMENT, "can be anything");
    FAILS(tt_cat(tt_tensors_of(0, NULL), 0), TUTTI_ERROR_ARGUMENT, "a list of at least one tensor");
    CHECK_OK(tt_scope_close(&scope));
}

TEST(forty_tensors_are_joined_and_differentiated) {
    tt_scope scope = tt_scope_open();
    tt_tensor *parts[40];
    for (int i = 0; i < 40; i++)
        parts[i] = leaf(tt_shape(1), (double[]){ i });
    tt_tensor *joined = tt_cat(tt_tensors_of(40, parts), 0);
    tt_backward(tt_sum(tt_square(joined)), NULL);
    CHECK(IS(tt_grad(parts[39]), 78) && IS(tt_grad(parts[0]), 0));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_layer_with_an_empty_size_has_gradients) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(tt_zeros(tt_shape(2, 0), TUTTI_F32, NULL), true);
    tt_tensor *weight = tt_require_grad(tt_zeros(tt_shape(3, 0), TUTTI_F32, NULL), true);
    tt_tensor *bias = tt_require_grad(tt_ones(tt_shape(3), TUTTI_F32, NULL), true);
    tt_tensor *y = tt_linear(x, weight, bias);
    CHECK(IS(y, 1, 1, 1, 1, 1, 1));
    tt_backward(tt_sum(y), NULL);
    CHECK(IS(tt_grad(bias), 2, 2, 2) && tt_numel(tt_grad(weight)) == 0);
    tt_dims none = tt_shape(1, 0, 4), queries = tt_shape(1, 2, 4);
    tt_tensor *q = tt_require_grad(tt_ones(queries, TUTTI_F32, NULL), true);
    tt_tensor *k = tt_require_grad(tt_ones(none, TUTTI_F32, NULL), true);
    tt_backward(tt_sum(tt_attention(q, k, k, false, 0)), NULL);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- narrow types ---- */

TEST(sums_by_index_are_rounded_once) {
    tt_scope scope = tt_scope_open();
    tt_tensor *ones = tt_ones(tt_shape(1000), TUTTI_BF16, NULL), *index = tt_zeros(tt_shape(1000), TUTTI_I64, NULL);
    CHECK(IS(tt_index_add(tt_zeros(tt_shape(1), TUTTI_BF16, NULL), 0, index, ones), 1000));
    CHECK(IS(tt_scatter_add(tt_zeros(tt_shape(1), TUTTI_BF16, NULL), 0, index, ones), 1000));
    tt_tensor *x = tt_require_grad(tt_ones(tt_shape(1), TUTTI_BF16, NULL), true);
    tt_backward(tt_sum(tt_index_select(x, 0, index)), NULL);
    CHECK(IS(tt_grad(x), 1000));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_norm_neither_overflows_nor_vanishes_in_f16_and_has_a_gradient_at_zero) {
    tt_scope scope = tt_scope_open();
    CHECK(IS(tt_norm(tt_to(floats(tt_shape(2), (double[]){ 300, 400 }), TUTTI_F16)), 500));
    double small;
    tt_read(tt_norm(tt_full(tt_shape(4), 1e-4, TUTTI_F16, NULL)), &small, TUTTI_F64, 1);
    CHECK(fabs(small - 2e-4) < 1e-6);
    tt_tensor *x = leaf(tt_shape(2), (double[]){ 0, 0 });
    tt_backward(tt_norm(x), NULL);
    CHECK(IS(tt_grad(x), 0, 0));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_narrow_linear_layer_rounds_product_and_bias_once) {
    tt_scope scope = tt_scope_open();
    tt_seed(3, 0);
    tt_tensor *x = tt_randn(tt_shape(8, 16), TUTTI_BF16, NULL), *weight = tt_randn(tt_shape(8, 16), TUTTI_BF16, NULL);
    tt_tensor *bias = tt_randn(tt_shape(8), TUTTI_BF16, NULL), *narrow = tt_linear(x, weight, bias);
    tt_tensor *exact = tt_linear(tt_to(x, TUTTI_F64), tt_to(weight, TUTTI_F64), tt_to(bias, TUTTI_F64));
    double ours[64], best[64];
    tt_read(narrow, ours, TUTTI_F64, 64);
    tt_read(tt_to(exact, TUTTI_BF16), best, TUTTI_F64, 64);
    int differ = 0;
    for (int i = 0; i < 64; i++)
        differ += ours[i] != best[i];
    CHECK(differ <= 1); /* only where f32 itself falls on the other side of a tie */
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- zeros and limits ---- */

TEST(gradients_at_zero_are_numbers) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2, 3), (double[]){ 2, 0, 3, 0, 0, 5 });
    tt_backward(tt_sum(tt_prod(x, tt_shape(1), false)), NULL);
    CHECK(IS(tt_grad(x), 0, 6, 0, 0, 0, 0));
    tt_tensor *base = leaf(tt_shape(3), (double[]){ 0, 0, 2 }), *exponent = leaf(tt_shape(3), (double[]){ 0, 2, 3 });
    tt_backward(tt_sum(tt_pow(base, exponent)), NULL);
    CHECK(IS(tt_grad(base), 0, 0, 12) && IS(tt_grad(exponent), 0, 0, 8 * log(2)));
    tt_tensor *pair = leaf(tt_shape(2, 2), (double[]){ 0, 0, 3, 4 });
    tt_backward(tt_sum(tt_abs(tt_view_as_complex(pair))), NULL);
    CHECK(IS(tt_grad(pair), 0, 0, 0.6, 0.8));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(the_gradient_of_a_complex_product_is_conjugated) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(2, 2), (double[]){ 1, 2, 3, -1 });
    tt_tensor *product = tt_prod(tt_view_as_complex(x), tt_shape(0), false);
    tt_backward(tt_select(tt_view_as_real(product), 0, 0), NULL); /* the real part: 1 3 - 2 (-1) */
    CHECK(IS(tt_grad(x), 3, 1, 1, -2));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(bounds_and_weights_at_their_limits_mean_what_they_say) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = floats(tt_shape(3), (double[]){ -1, 0, 1 });
    CHECK(IS(tt_clamp(x, 2, -2), -2, -2, -2));
    CHECK(IS(tt_isnan(tt_clamp(x, NAN, 1)), 1, 1, 1));
    tt_tensor *edge = tt_require_grad(tt_to(floats(tt_shape(3), (double[]){ -1.47, -1.4, -1.5 }), TUTTI_BF16), true);
    CHECK(tt_backward(tt_sum(tt_clamp(edge, -3, -1.47)), NULL)); /* a bound is what it is in the tensor's type */
    CHECK(IS(tt_grad(edge), 1, 0, 1));
    tt_tensor *crossed = tt_require_grad(floats(tt_shape(3), (double[]){ -2, 0, 2 }), true);
    CHECK(tt_backward(tt_sum(tt_clamp(crossed, 2, -2)), NULL));
    CHECK(IS(tt_grad(crossed), 0, 0, 0));
    tt_tensor *far = floats(tt_shape(1), (double[]){ 1e8 }), *near = floats(tt_shape(1), (double[]){ 0.1 });
    CHECK(tt_equal(tt_lerp(far, near, 1), near) && tt_equal(tt_lerp(far, near, 0), far));
    tt_tensor *q = tt_full(tt_shape(1, 2, 4), 30, TUTTI_F32, NULL),
              *k = tt_mul(q, tt_randn(tt_shape(1, 2, 4), TUTTI_F32, NULL));
    CHECK(IS(tt_any(tt_isnan(tt_attention(q, k, k, false, -4)), TT_ALL_DIMS, false), 0));
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- types ---- */

TEST(integers_stay_integers_and_numbers_are_not_cut) {
    tt_scope scope = tt_scope_open();
    tt_tensor *whole = tt_arange(-2, 3, 1, TUTTI_I64, NULL), *truth = tt_ge(whole, tt_number(0));
    FAILS(tt_add_scalar_(whole, 2.5), TUTTI_ERROR_TYPE, "a result of type f32 cannot be written to i64 [5]");
    CHECK(tt_dtype(tt_add_scalar(whole, 2.5)) == TUTTI_F32 && tt_dtype(tt_add_scalar(whole, 2)) == TUTTI_I64);
    CHECK(tt_dtype(tt_add(truth, tt_number(2))) == TUTTI_I64 && tt_dtype(tt_add(truth, tt_number(0.5))) == TUTTI_F32);
    tt_tensor *cubes = tt_pow_scalar(whole, 3), *squares = tt_pow(whole, tt_full(tt_shape(5), 2, TUTTI_I64, NULL));
    CHECK(tt_dtype(cubes) == TUTTI_I64 && IS(cubes, -8, -1, 0, 1, 8) && IS(squares, 4, 1, 0, 1, 4));
    CHECK(tt_dtype(tt_relu(whole)) == TUTTI_I64 && IS(tt_relu(whole), 0, 0, 0, 1, 2));
    CHECK(IS(tt_addcmul(whole, whole, whole, 2), 6, 1, 0, 3, 10));
    CHECK(IS(tt_pow_scalar(whole, -1), 0, -1, 0, 1, 0));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(complex_numbers_have_roots_logarithms_and_powers_of_e) {
    tt_scope scope = tt_scope_open();
    tt_tensor *z = leaf(tt_shape(1, 2), (double[]){ 3, 4 });
    CHECK(IS(tt_view_as_real(tt_sqrt(tt_view_as_complex(z))), 2, 1));
    CHECK(IS(tt_view_as_real(tt_exp(tt_log(tt_view_as_complex(z)))), 3, 4));
    tt_backward(tt_select(tt_view_as_real(tt_select(tt_square(tt_sqrt(tt_view_as_complex(z))), 0, 0)), 0, 1), NULL);
    CHECK(IS(tt_grad(z), 0, 1)); /* it is z again, of which the imaginary part was taken */
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_layer_norm_takes_wider_weights_and_a_bias_alone) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_to(floats(tt_shape(2, 2), (double[]){ 1, 3, -2, 2 }), TUTTI_BF16);
    tt_tensor *weight = tt_require_grad(floats(tt_shape(2), (double[]){ 2, 4 }), true);
    tt_tensor *bias = tt_require_grad(floats(tt_shape(2), (double[]){ 8, 16 }), true);
    tt_tensor *y = tt_layer_norm(x, weight, NULL, 0);
    CHECK(tt_dtype(y) == TUTTI_BF16 && IS(y, -2, 4, -2, 4));
    y = tt_layer_norm(x, NULL, bias, 0);
    CHECK(IS(y, 7, 17, 7, 17));
    tt_backward(tt_sum(tt_add(tt_layer_norm(x, weight, NULL, 0), y)), NULL);
    CHECK(tt_dtype(tt_grad(weight)) == TUTTI_F32 && IS(tt_grad(weight), -2, 2) && IS(tt_grad(bias), 2, 2));
    FAILS(tt_layer_norm(x, tt_to(weight, TUTTI_F64), NULL, 0), TUTTI_ERROR_ARGUMENT,
          "layer_norm: weight, f64 [2], must have the last sizes of x, bf16 [2, 2], and its dtype or f32");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- messages, versions ---- */

TEST(a_message_about_three_tensors_describes_each) {
    tt_scope scope = tt_scope_open();
    tt_tensor *q = tt_ones(tt_shape(1, 2, 3), TUTTI_F32, NULL), *k = tt_ones(tt_shape(1, 4, 5), TUTTI_F32, NULL);
    tt_tensor *v = tt_ones(tt_shape(1, 6, 7), TUTTI_F32, NULL);
    FAILS(tt_attention(q, k, v, false, 0), TUTTI_ERROR_ARGUMENT,
          "q f32 [1, 2, 3], k f32 [1, 4, 5] and v f32 [1, 6, 7] do not belong together");
    FAILS(tt_linear(tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), tt_ones(tt_shape(4, 3), TUTTI_F64, NULL),
                    tt_ones(tt_shape(4), TUTTI_F16, NULL)),
          TUTTI_ERROR_TYPE, "x is f32 [2, 3], weight f64 [4, 3] and bias f16 [4]");
    CHECK_OK(tt_scope_close(&scope));
}

TEST(putting_pieces_side_by_side_is_one_change) {
    tt_scope scope = tt_scope_open();
    tt_tensor *out = tt_zeros(tt_shape(2, 4), TUTTI_F32, NULL), *a = tt_ones(tt_shape(3, 2), TUTTI_F32, NULL);
    uint32_t before = tt_version(out);
    CHECK(tt_chunk_cat(tt_tensors(a), 2, out) == out);
    CHECK_EQ(tt_version(out), before + 1);
    CHECK(IS(out, 1, 1, 1, 1, 1, 1, 0, 0));
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- random numbers ---- */

TEST(random_numbers_are_a_function_of_their_state) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(64), TUTTI_F32, NULL), *state = tu_random_state(64, 1),
              *later = tu_random_state(64, 1);
    CHECK(tt_equal(tu_dropout(x, state, 0.5), tu_dropout(x, state, 0.5)));
    CHECK(!tt_equal(tu_dropout(x, state, 0.5), tu_dropout(x, later, 0.5)));
    FAILS(tu_dropout(x, x, 0.5), TUTTI_ERROR_ARGUMENT, "state is f32 [64] and must be what random_state gives");
    FAILS(tt_rand(tt_shape(3), TUTTI_C64, NULL), TUTTI_ERROR_TYPE, "rand: not defined for c64");
    tt_seed(1, 0);
    tt_tensor *first = tt_randn(tt_shape(5), TUTTI_F64, NULL);
    tt_options meta = TT_OPTIONS_INIT;
    meta.device = TUTTI_META;
    tt_seed(1, 0);
    tt_randn(tt_shape(5), TUTTI_F64, &meta); /* draws nothing */
    CHECK(tt_equal(first, tt_randn(tt_shape(5), TUTTI_F64, NULL)));
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- single rows, no rows ---- */

TEST(a_dimension_of_one_element_may_have_any_stride_in_view_as_complex) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_empty_strided(tt_shape(1, 2), tt_shape(3, 1), TUTTI_F64, NULL);
    tt_fill_(x, 2);
    CHECK(IS(tt_abs(tt_view_as_complex(x)), sqrt(8)));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(an_expanded_tensor_without_elements_can_be_written) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_expand(tt_ones(tt_shape(1, 0), TUTTI_F32, NULL), tt_shape(3, 0));
    CHECK(tt_fill_(x, 2) == x);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(the_largest_of_a_single_number_is_at_0) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(), 5, TUTTI_F32, NULL);
    CHECK_EQ(tt_item_int(tt_argmax(x, -1, false)), 0);
    CHECK_EQ(tt_dim_count(tt_argmax(x, 0, true)), 0);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_complex_number_counts_as_true_by_its_imaginary_part_too) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_view_as_complex(floats(tt_shape(2, 2), (double[]){ 0, 1, 2, 0 }));
    CHECK_EQ(tt_item_int(tt_to(tt_all(x, tt_no_dims(), false), TUTTI_I64)), 1);
    CHECK_EQ(tt_item_int(tt_to(tt_any(tt_narrow(x, 0, 0, 1), tt_no_dims(), false), TUTTI_I64)), 1);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_tensor_is_added_to_itself_whatever_the_strides_of_single_elements_are) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = floats(tt_shape(1, 2), (double[]){ 1, 2 });
    CHECK(tt_add_(x, tt_as_strided(x, tt_shape(1, 2), tt_shape(7, 1), 0)) == x);
    CHECK(IS(x, 2, 4));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(relu_passes_a_gradient_on_where_its_argument_is_no_number) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(3), (double[]){ -1, NAN, 1 });
    tt_backward(tt_sum(tt_relu(x)), NULL);
    CHECK(IS(tt_grad(x), 0, 1, 1));
    CHECK_OK(tt_scope_close(&scope));
}

/* Results that are stored past the caches have the values of small ones. */
TEST(large_copies_and_norms_are_those_of_their_parts) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_reshape(tt_arange(0, 2064 * 1040, 1, TUTTI_F32, NULL), tt_shape(2064, 1040));
    const float *turned = tt_data(tt_contiguous(tt_transpose(x, 0, 1)));
    for (int64_t i = 0; i < 1040; i++)
        for (int64_t j = 0; j < 2064; j++)
            if (turned[i * 2064 + j] != (float)(j * 1040 + i))
                FAIL("element (%lld, %lld) of the transposed copy is %g", (long long)i, (long long)j,
                     (double)turned[i * 2064 + j]);
    tt_tensor *joined = tt_cat(tt_tensors(x, tt_narrow(x, 1, 0, 16), x), 1);
    CHECK(tt_allclose(tt_narrow(joined, 1, 0, 1040), x, 0, 0));
    CHECK(tt_allclose(tt_narrow(joined, 1, 1040, 16), tt_narrow(x, 1, 0, 16), 0, 0));
    tt_tensor *dense = tt_contiguous(tt_narrow(x, 1, 0, 16));
    joined = tt_cat(tt_tensors(x, dense, x), 1);
    CHECK(tt_allclose(tt_narrow(joined, 1, 0, 1040), x, 0, 0));
    CHECK(tt_allclose(tt_narrow(joined, 1, 1040, 16), dense, 0, 0));
    CHECK(tt_allclose(tt_narrow(joined, 1, 1056, 1040), x, 0, 0));
    tt_tensor *weight = tt_rand(tt_shape(1040), TUTTI_F32, NULL);
    tt_tensor *norm = tt_layer_norm(tt_randn(tt_shape(2064, 1040), TUTTI_F32, NULL), weight, weight, 1e-5);
    CHECK(tt_numel(norm) == 2064 * 1040);
    tt_tensor *random = tt_randn(tt_shape(2064, 1040), TUTTI_F32, NULL);
    norm = tt_layer_norm(random, weight, NULL, 1e-5);
    for (int64_t i = 0; i < 2064; i += 129)
        CHECK(tt_allclose(tt_narrow(norm, 0, i, 129 < 2064 - i ? 129 : 2064 - i),
                          tt_layer_norm(tt_narrow(random, 0, i, 129 < 2064 - i ? 129 : 2064 - i), weight, NULL, 1e-5),
                          0, 0));
    CHECK_OK(tt_scope_close(&scope));
}

/* Every size of element, and edges that are no whole square. */
TEST(transposed_copies_of_every_dtype_are_right) {
    static const tutti_dtype dtypes[] = { TUTTI_U8, TUTTI_I16, TUTTI_F32, TUTTI_F64, TUTTI_C128 };
    static const int64_t sizes[][2] = { { 4, 4 }, { 5, 67 }, { 130, 33 }, { 16, 64 }, { 1, 9 }, { 257, 4 } };
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            tt_scope scope = tt_scope_open();
            int64_t rows = sizes[s][0], columns = sizes[s][1];
            int64_t values[3 * 130 * 67];
            for (int64_t i = 0; i < 3 * rows * columns; i++)
                values[i] = i % 251;
            tt_tensor *x = tt_to(tt_from(values, tt_shape(3 * rows * columns), TUTTI_I64, NULL), dtypes[d]);
            x = tt_reshape(x, tt_shape(3, rows, columns));
            tt_tensor *turned = tt_to(tt_contiguous(tt_transpose(x, 1, 2)), TUTTI_C128);
            const double *at = tt_data(turned);
            for (int64_t k = 0; k < 3; k++)
                for (int64_t i = 0; i < columns; i++)
                    for (int64_t j = 0; j < rows; j++)
                        CHECK(at[2 * ((k * columns + i) * rows + j)] == (double)(((k * rows + j) * columns + i) % 251));
            CHECK_OK(tt_scope_close(&scope));
        }
}

TEST(a_complex_view_of_no_elements_needs_no_strides) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_as_strided(tt_ones(tt_shape(4), TUTTI_F32, NULL), tt_shape(0, 2), tt_shape(1, 3), 1);
    CHECK_EQ(tt_numel(tt_view_as_complex(x)), 0);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(the_logarithm_of_softmax_is_exact_beside_large_numbers) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_to(floats(tt_shape(2), (double[]){ 4096, 4096 }), TUTTI_F32);
    CHECK(fabs(tt_at(tt_log_softmax(x, 0), tt_shape(0)) + log(2)) < 1e-7);
    CHECK_OK(tt_scope_close(&scope));
}

/* Results of 8 MiB and more are stored past the caches: the same values, at every address and length. */
TEST(large_conversions_and_softmaxes_have_the_values_of_small_ones) {
    tt_scope scope = tt_scope_open();
    for (int64_t behind = 0; behind < 2; behind++) {
        int64_t count = ((int64_t)4 << 20) + 7 * behind;
        tt_tensor *x = tt_randn(tt_shape(count), TUTTI_F32, NULL), *narrow = tt_to(x, TUTTI_BF16);
        for (int64_t first = 0; first < count; first += 1 << 20) {
            int64_t length = count - first < 1 << 20 ? count - first : 1 << 20;
            CHECK(tt_equal(tt_narrow(narrow, 0, first, length), tt_to(tt_narrow(x, 0, first, length), TUTTI_BF16)));
        }
        tt_tensor *rows = tt_view(tt_narrow(x, 0, 0, (int64_t)4 << 20), tt_shape(4096, 1024));
        tt_tensor *shares = tt_softmax(rows, -1);
        for (int64_t first = 0; first < 4096; first += 1024)
            CHECK(tt_equal(tt_narrow(shares, 0, first, 1024), tt_softmax(tt_narrow(rows, 0, first, 1024), -1)));
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* The logarithm of an integer is taken in the type of the power. */
TEST(the_slope_of_an_exponent_over_an_integer_base_is_exact) {
    tt_scope scope = tt_scope_open();
    tt_tensor *base = tt_full(tt_shape(), 7, TUTTI_U8, NULL), *x = leaf(tt_shape(2), (double[]){ -0.75, 0.5 });
    tt_backward(tt_sum(tt_pow(base, x)), NULL);
    const double *slope = tt_data(tt_grad(x));
    CHECK(fabs(slope[0] - pow(7, -0.75) * log(7)) < 1e-15 && fabs(slope[1] - pow(7, 0.5) * log(7)) < 1e-14);
    CHECK_OK(tt_scope_close(&scope));
}

/* The single number may be anywhere in its storage; its place among one is a new tensor. */
TEST(the_largest_of_a_single_number_that_lies_behind_others_is_at_0) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from((float[]){ 1, 2, 3 }, tt_shape(3), TUTTI_F32, NULL);
    tt_tensor *last = tt_select(x, 0, 2);
    CHECK(tt_item(tt_argmax(last, 0, false)) == 0 && tt_item(tt_argmax(last, -1, true)) == 0);
    CHECK_OK(tt_scope_close(&scope));
}
