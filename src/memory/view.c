/* SPDX-License-Identifier: Apache-2.0
 *
 * Views: typed looks at memory; and the two operations on 32-bit words that take one.
 */
#include "base/error.h"
#include "memory/tables.h"

tutti_status tutti_view_of(void *data, tutti_dtype dtype, const int64_t *shape, int dim_count, tutti_view *view) {
    if (view == NULL || view->size == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a view needs a place with its size set (TUTTI_VIEW_INIT)");
    if (view->size < sizeof *view)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a tutti_view has %zu bytes, not %zu", sizeof *view, view->size);
    if (tutti_dtype_size(dtype) == 0)
        return tu_error(TUTTI_ERROR_TYPE, "%d is no dtype", (int)dtype);
    if (dim_count < 0 || dim_count > TUTTI_VIEW_DIMS || (dim_count > 0 && shape == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT, "a view has 0 to %d dimensions with their sizes, not %d", TUTTI_VIEW_DIMS,
                        dim_count);
    tutti_view made = TUTTI_VIEW_INIT;
    made.data = data;
    made.dtype = dtype;
    made.device = TUTTI_CPU;
    made.dim_count = dim_count;
    int64_t count = (int64_t)tutti_dtype_size(dtype); /* bytes so far, so that they fit too */
    for (int i = 0; i < dim_count; i++) {
        if (shape[i] < 0)
            return tu_error(TUTTI_ERROR_RANGE, "size %lld of dimension %d is negative", (long long)shape[i], i);
        if (shape[i] > 0 && __builtin_mul_overflow(count, shape[i], &count))
            return tu_error(TUTTI_ERROR_RANGE, "the sizes of a view: the requested size exceeds the address space");
        made.shape[i] = shape[i];
    }
    int64_t stride = 1;
    for (int i = dim_count - 1; i >= 0; i--) {
        made.strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
    made.size = view->size;
    *view = made;
    return TUTTI_OK;
}

int64_t tutti_view_count(const tutti_view *view) {
    int64_t count = view == NULL ? 0 : 1;
    for (int i = 0; view != NULL && i < view->dim_count; i++)
        count *= view->shape[i];
    return count;
}

size_t tutti_view_bytes(const tutti_view *view) {
    return view == NULL ? 0 : (size_t)tutti_view_count(view) * tutti_dtype_size(view->dtype);
}

/* ---- words ---- */

static tutti_status check_words(const char *what, tutti_world *world, const tutti_view *view, int64_t offset) {
    if (world == NULL || view == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs a world and a view", what);
    if (view->size < sizeof *view)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a tutti_view has %zu bytes, not %zu: start it with TUTTI_VIEW_INIT",
                        sizeof *view, view->size);
    if (view->dim_count != 1 || (view->shape[0] > 1 && view->strides[0] != 1) || view->dtype != TUTTI_U32)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s: input must be a flat, contiguous uint32 tensor; this has %d dimensions of %s%s", what,
                        view->dim_count, tutti_dtype_name(view->dtype),
                        view->dim_count == 1 && view->strides[0] != 1 ? ", not contiguous" : "");
    if (offset < 0)
        return tu_error(TUTTI_ERROR_RANGE, "%s: offset must be greater than or equal to 0 (got %lld)", what,
                        (long long)offset);
    return TUTTI_OK;
}

static tutti_status check_value(const char *what, int64_t value) {
    if (value < 0 || value > UINT32_MAX)
        return tu_error(TUTTI_ERROR_RANGE, "%s: val must be in the range of [0, 4294967295] (uint32_t), not %lld", what,
                        (long long)value);
    return TUTTI_OK;
}

/* Writes `count` words, by the backend of the view's device; 0: one, by its own way for one. */
static tutti_status write_words(tutti_world *world, const tutti_view *view, int64_t offset, int64_t value,
                                int64_t count, const tutti_call *call) {
    tutti_call full = TUTTI_CALL_INIT;
    const tu_backend *backend;
    void *state;
    tutti_status status = tu_options_copy("tutti_call", call, &full, sizeof full);
    if (status == TUTTI_OK)
        status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_backend_get(world, view->device, &backend, &state);
    if (status != TUTTI_OK)
        return status;
    tu_backend_call short_call = { .timeout_ns = full.timeout_ns, .stream = full.stream };
    uint32_t *words = (uint32_t *)view->data + offset;
    int index = tutti_device_index(view->device);
    return count > 0 ? backend->memory->set32(state, index, words, (uint32_t)value, (size_t)count, &short_call)
                     : backend->memory->write32(state, index, words, (uint32_t)value, &short_call);
}

tutti_status tutti_view_memset32(tutti_world *world, const tutti_view *view, int64_t offset, int64_t value,
                                 int64_t count, const tutti_call *call) {
    tutti_status status = check_words("memset32", world, view, offset);
    if (status != TUTTI_OK)
        return status;
    if (count <= 0)
        return tu_error(TUTTI_ERROR_RANGE, "memset32: count must be a positive integer (got %lld)", (long long)count);
    status = check_value("memset32", value);
    if (status != TUTTI_OK)
        return status;
    if (offset > view->shape[0] || count > view->shape[0] - offset)
        return tu_error(TUTTI_ERROR_RANGE,
                        "memset32: offset + count (%lld + %lld) exceeded the numel of the input (%lld)",
                        (long long)offset, (long long)count, (long long)view->shape[0]);
    return write_words(world, view, offset, value, count, call);
}

tutti_status tutti_view_write_value32(tutti_world *world, const tutti_view *view, int64_t offset, int64_t value,
                                      const tutti_call *call) {
    tutti_status status = check_words("write_value32", world, view, offset);
    if (status == TUTTI_OK)
        status = check_value("write_value32", value);
    if (status != TUTTI_OK)
        return status;
    if (offset >= view->shape[0])
        return tu_error(TUTTI_ERROR_RANGE, "write_value32: offset (%lld) exceeded the numel of the input (%lld)",
                        (long long)offset, (long long)view->shape[0]);
    return write_words(world, view, offset, value, 0, call);
}
