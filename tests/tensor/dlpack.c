/* SPDX-License-Identifier: Apache-2.0
 *
 * DLPack: lifetimes, element types, strides, and everything foreign that must be refused.
 */
#include <pthread.h>

#include <tutti/autograd.h>
#include <tutti/dlpack.h>
#include <tutti/ops.h>

#include "../harness.h"

static void nothing_left(void) {
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK_EQ(counts.tensors, 0);
    CHECK_EQ(counts.storages, 0);
}

static int deleted;
static void count_deletion(tt_dlpack_managed *self) {
    (void)self;
    deleted++;
}

/* A foreign array of six floats, 2 by 3. */
typedef struct foreign {
    float values[6];
    int64_t shape[TT_MAX_DIMS + 1], strides[TT_MAX_DIMS + 1];
    tt_dlpack_managed managed;
} foreign;

static tt_dlpack_managed *make_foreign(foreign *array) {
    *array = (foreign){ .values = { 0, 1, 2, 3, 4, 5 }, .shape = { 2, 3 }, .strides = { 3, 1 } };
    array->managed = (tt_dlpack_managed){ .major = TT_DLPACK_MAJOR,
                                          .minor = TT_DLPACK_MINOR,
                                          .deleter = count_deletion,
                                          .tensor = { .data = array->values,
                                                      .device_type = TT_DLPACK_CPU,
                                                      .ndim = 2,
                                                      .dtype = { TT_DLPACK_FLOAT, 32, 1 },
                                                      .shape = array->shape,
                                                      .strides = array->strides } };
    deleted = 0;
    return &array->managed;
}

TEST(an_export_outlives_the_scope_and_its_deleter_frees_it) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_arange(0, 6, 1, TUTTI_F32, NULL);
    tt_dlpack_managed *managed = tt_to_dlpack(tt_transpose(tt_view(x, tt_shape(2, 3)), 0, 1));
    CHECK_OK(tt_scope_close(&scope));
    CHECK(managed != NULL);
    CHECK_EQ(managed->major, 1);
    CHECK_EQ(managed->flags, 0);
    CHECK_EQ(managed->tensor.device_type, TT_DLPACK_CPU);
    CHECK_EQ(managed->tensor.ndim, 2);
    CHECK(managed->tensor.shape[0] == 3 && managed->tensor.shape[1] == 2);
    CHECK(managed->tensor.strides[0] == 1 && managed->tensor.strides[1] == 3);
    CHECK(((float *)managed->tensor.data)[5] == 5);
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK_EQ(counts.storages, 1);
    managed->deleter(managed);
    nothing_left();
}

static void *delete_elsewhere(void *managed) {
    ((tt_dlpack_managed *)managed)->deleter(managed);
    return NULL;
}

TEST(another_thread_may_delete_an_export) {
    tt_scope scope = tt_scope_open();
    void *managed = tt_to_dlpack(tt_ones(tt_shape(1000), TUTTI_F64, NULL));
    CHECK_OK(tt_scope_close(&scope));
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, delete_elsewhere, managed), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    nothing_left();
}

TEST(exported_memory_cannot_be_resized_until_it_is_deleted) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, NULL);
    tt_dlpack_managed *managed = tt_dlpack_export(x, TT_DLPACK_READ_ONLY);
    CHECK_EQ(managed->flags, TT_DLPACK_READ_ONLY);
    CHECK(!tt_storage_resize(x, 64));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("DLPack");
    tt_error_clear();
    managed->deleter(managed);
    CHECK(tt_storage_resize(x, 64));
    CHECK_OK(tt_scope_close(&scope));
    nothing_left();
}

TEST(every_dtype_goes_out_and_comes_back_on_the_same_memory) {
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = tt_ones(tt_shape(3, 4), (tutti_dtype)dtype, NULL);
        tt_tensor *part = tt_narrow(x, 1, 1, 2);
        tt_tensor *y = tt_from_dlpack(tt_to_dlpack(part));
        CHECK(y != NULL && tt_dtype(y) == (tutti_dtype)dtype);
        CHECK(tt_data(y) == tt_data(part));
        CHECK(tt_stride(y, 0) == 4 && tt_size(y, 1) == 2);
        CHECK(tt_equal(y, part));
        tt_zero_(y);
        CHECK(tt_at(x, tt_shape(2, 2)) == 0 && tt_at(x, tt_shape(2, 3)) == 1);
        CHECK_OK(tt_scope_close(&scope));
        nothing_left();
    }
}

TEST(the_deleter_of_an_import_runs_once_when_the_last_tensor_goes) {
    foreign array;
    tt_dlpack_managed *managed = make_foreign(&array);
    array.strides[0] = 1, array.strides[1] = 2;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from_dlpack(managed);
    CHECK(tt_at(x, tt_shape(1, 2)) == 5 && tt_at(x, tt_shape(0, 1)) == 2);
    tt_tensor *view = tt_keep(tt_select(x, 0, 1));
    CHECK(!tt_storage_resize(x, 100));
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(deleted, 0);
    tt_release(view);
    CHECK_EQ(deleted, 1);
    nothing_left();
}

TEST(an_offset_absent_strides_and_an_absent_deleter_are_understood) {
    foreign array;
    tt_dlpack_managed *managed = make_foreign(&array);
    managed->tensor.strides = NULL;
    managed->tensor.byte_offset = 4;
    managed->deleter = NULL;
    managed->minor = 99;
    array.shape[1] = 2;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from_dlpack(managed);
    CHECK(tt_is_contiguous(x) && tt_at(x, tt_shape(1, 1)) == 4);
    CHECK_OK(tt_scope_close(&scope));
    nothing_left();
}

TEST(an_empty_array_may_have_no_memory) {
    foreign array;
    tt_dlpack_managed *managed = make_foreign(&array);
    array.shape[0] = 0;
    managed->tensor.data = NULL;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from_dlpack(managed);
    CHECK(tt_numel(x) == 0 && tt_size(x, 1) == 3);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(deleted, 1);
    nothing_left();
}

TEST(read_only_memory_is_copied_and_deleted_at_once) {
    foreign array;
    tt_dlpack_managed *managed = make_foreign(&array);
    managed->flags = TT_DLPACK_READ_ONLY;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from_dlpack(managed);
    CHECK_EQ(deleted, 1);
    CHECK(tt_at(tt_zero_(tt_select(x, 0, 0)), tt_shape(1)) == 0);
    CHECK(array.values[1] == 1 && tt_at(x, tt_shape(1, 1)) == 4);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(deleted, 1);
    nothing_left();
}

TEST(what_cannot_be_imported_is_an_error_and_stays_the_callers) {
    static const struct {
        tutti_status status;
        const char *fragment;
    } expected[] = {
        { TUTTI_ERROR_UNSUPPORTED, "DLPack 2.0" },
        { TUTTI_ERROR_UNSUPPORTED, "cuda" },
        { TUTTI_ERROR_UNSUPPORTED, "unknown" },
        { TUTTI_ERROR_TYPE, "float4_e2m1fn" },
        { TUTTI_ERROR_TYPE, "4 lanes" },
        { TUTTI_ERROR_TYPE, "80 bits" },
        { TUTTI_ERROR_ARGUMENT, "9 dimensions" },
        { TUTTI_ERROR_ARGUMENT, "-1 dimensions" },
        { TUTTI_ERROR_ARGUMENT, "without a shape" },
        { TUTTI_ERROR_ARGUMENT, "negative" },
        { TUTTI_ERROR_UNSUPPORTED, "stride -3" },
        { TUTTI_ERROR_RANGE, "too large" },
        { TUTTI_ERROR_ARGUMENT, "data is NULL" },
        { TUTTI_ERROR_UNSUPPORTED, "aligned" },
        { TUTTI_ERROR_RANGE, "end of memory" },
        { TUTTI_ERROR_ARGUMENT, "managed is NULL" },
        { TUTTI_ERROR_RANGE, "too large" },
        { TUTTI_ERROR_UNSUPPORTED, "cuda" },
    };
    for (int i = 0; i < (int)(sizeof expected / sizeof expected[0]); i++) {
        foreign array;
        tt_dlpack_managed *managed = make_foreign(&array);
        tt_dlpack_tensor *tensor = &managed->tensor;
        switch (i) {
        case 0:
            managed->major = 2, managed->minor = 0;
            break;
        case 1:
            tensor->device_type = 2;
            break;
        case 2:
            tensor->device_type = 77;
            break;
        case 3:
            tensor->dtype = (tt_dlpack_type){ 17, 4, 1 };
            break;
        case 4:
            tensor->dtype.lanes = 4;
            break;
        case 5:
            tensor->dtype.bits = 80;
            break;
        case 6:
            tensor->ndim = 9;
            break;
        case 7:
            tensor->ndim = -1;
            break;
        case 8:
            tensor->shape = NULL;
            break;
        case 9:
            array.shape[0] = -2;
            break;
        case 10:
            array.strides[0] = -3;
            break;
        case 11:
            array.strides[0] = INT64_MAX / 2;
            break;
        case 12:
            tensor->data = NULL;
            break;
        case 13:
            tensor->byte_offset = 2;
            break;
        case 14:
            tensor->byte_offset = UINT64_MAX - 64;
            break;
        case 15:
            managed = NULL;
            break;
        case 16:
            array.shape[0] = array.shape[1] = INT64_MAX / 2;
            break;
        default:
            tensor->device_type = 13;
            break;
        }
        tt_scope scope = tt_scope_open();
        CHECK(tt_from_dlpack(managed) == NULL);
        tutti_status status = tt_scope_close(&scope);
        if (status != expected[i].status || strstr(tutti_error_message(), expected[i].fragment) == NULL)
            FAIL("case %d gave %s: %s", i, tutti_status_name(status), status == TUTTI_OK ? "" : tutti_error_message());
        CHECK_EQ(deleted, 0);
    }
    nothing_left();
}

TEST(what_cannot_be_exported_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_options options = TT_OPTIONS_INIT;
    options.requires_grad = true;
    tt_tensor *x = tt_ones(tt_shape(2), TUTTI_F32, &options);
    CHECK(tt_to_dlpack(x) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("tt_detach");
    tt_error_clear();
    tt_dlpack_managed *managed = tt_to_dlpack(tt_detach(x));
    CHECK(managed != NULL);
    managed->deleter(managed);
    options = (tt_options)TT_OPTIONS_INIT;
    options.device = TUTTI_META;
    CHECK(tt_to_dlpack(tt_ones(tt_shape(2), TUTTI_F32, &options)) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_UNSUPPORTED);
    tt_error_clear();
    CHECK(tt_dlpack_export(x, 64) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_tensor *y = tt_ones(tt_shape(4), TUTTI_F32, NULL);
    CHECK(tt_storage_resize(y, 0));
    CHECK(tt_to_dlpack(y) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_FREED);
    CHECK_MESSAGE("freed");
    nothing_left();
}

static tutti_status out_and_in(void *argument) {
    (void)argument;
    foreign array;
    tt_dlpack_managed *managed = make_foreign(&array);
    tt_scope scope = tt_scope_open();
    if (scope.id == 0) {
        tutti_status status = tt_error_show();
        tt_error_clear();
        return status;
    }
    tt_tensor *x = tt_from_dlpack(managed);
    tt_dlpack_managed *out = tt_to_dlpack(x);
    if (out != NULL)
        out->deleter(out);
    tutti_status status = tt_scope_close(&scope);
    CHECK_EQ(deleted, x != NULL);
    tt_memory_trim();
    nothing_left();
    return status;
}

TEST(a_failing_allocation_leaks_nothing) {
    test_fail_each("malloc,calloc,realloc", out_and_in, NULL);
}
