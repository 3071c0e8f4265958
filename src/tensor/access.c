/* SPDX-License-Identifier: Apache-2.0
 *
 * Asking a tensor: its metadata, its data, its elements.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

/* Whether `x` can be asked; else sets the pending error. */
static bool live(const char *who, const tt_tensor *x) {
    return tu_self()->pending == TUTTI_OK && tu_pending_take(tu_tensor_check(who, "x", x)) == TUTTI_OK;
}

tutti_dtype tt_dtype(const tt_tensor *x) {
    return live("dtype", x) ? (tutti_dtype)x->dtype : (tutti_dtype)0;
}

tutti_device tt_device_of(const tt_tensor *x) {
    return live("device_of", x) ? (tutti_device)x->device : (tutti_device)0;
}

int tt_dim_count(const tt_tensor *x) {
    return live("ndim", x) ? x->ndim : 0;
}

/* Whether x may be asked for its sizes; a capture notes that they were. */
static bool measured(const char *who, const tt_tensor *x) {
    return live(who, x) && tu_note_asked((tt_tensor *)x, TU_ASKED_SIZES);
}

int64_t tt_size(const tt_tensor *x, int dim) {
    int at;
    if (!measured("size", x) || tu_pending_take(tu_wrap_dim("size", dim, x->ndim, &at)) != TUTTI_OK)
        return 0;
    return x->ndim == 0 ? 1 : x->sizes[at];
}

int64_t tt_stride(const tt_tensor *x, int dim) {
    int at;
    if (!measured("stride", x) || tu_pending_take(tu_wrap_dim("stride", dim, x->ndim, &at)) != TUTTI_OK)
        return 0;
    return x->ndim == 0 ? 1 : x->strides[at];
}

int64_t tt_offset(const tt_tensor *x) {
    return measured("offset", x) ? x->offset : 0;
}

int64_t tt_numel(const tt_tensor *x) {
    return measured("numel", x) ? x->numel : 0;
}

tt_dims tt_sizes(const tt_tensor *x) {
    return measured("sizes", x) ? tt_dims_of(x->ndim, x->sizes) : tt_no_dims();
}

tt_dims tt_strides(const tt_tensor *x) {
    return measured("strides", x) ? tt_dims_of(x->ndim, x->strides) : tt_no_dims();
}

bool tt_is_contiguous(const tt_tensor *x) {
    return measured("is_contiguous", x) && (x->flags & TU_CONTIGUOUS) != 0;
}

const char *tt_name(const tt_tensor *x) {
    return live("name", x) && x->name != NULL ? x->name : "";
}

void tt_set_name(tt_tensor *x, const char *name) {
    if (!live("set_name", x))
        return;
    char *copy = NULL;
    if (name != NULL && (copy = strdup(name)) == NULL) {
        tu_pending_take(tu_error_memory("a tensor's name", strlen(name) + 1));
        return;
    }
    free(x->name);
    x->name = copy;
}

/* ---- data ---- */

static void *data_of(const char *who, const tt_tensor *x) {
    if (!live(who, x) || (x = tu_stand_in(x)) == NULL || tu_pending_take(tu_tensor_ready(who, "x", x)) != TUTTI_OK)
        return NULL;
    if (x->device == TUTTI_META) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s: %s has a shape but no data", who, tu_describe(x));
        return NULL;
    }
    return x->numel == 0 ? NULL : tu_pointer(x);
}

const void *tt_data(const tt_tensor *x) {
    return data_of("data", x);
}

tutti_status tu_data_mut_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    if (x->device != TUTTI_META)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_UNSUPPORTED, "%s has a shape but no data", tu_describe(x));
}

tt_tensor *tu_data_mut_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_clone(tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0)));
    if (x != NULL && x->device != TUTTI_META)
        tt_data_mut(x);
    return x;
}

/* The row waits for collectives that use the memory, and counts the write. */
void *tt_data_mut(tt_tensor *x) {
    return tu_data_mut(x, NULL) && x->numel > 0 ? tu_pointer(x) : NULL;
}

static bool element(const char *who, const tt_tensor *x, int64_t offset, void *out, tutti_dtype dtype) {
    const char *data = data_of(who, x);
    char here[16];
    if (data == NULL)
        return false;
    data += offset * tu_dtype_bytes[x->dtype];
    if (tu_on_device(x)) {
        if (tu_pending_take(tu_device_read(tu_device_of(x), here, data, tu_dtype_bytes[x->dtype])) != TUTTI_OK)
            return false;
        data = here;
    }
    return tu_pending_take(tutti_convert(data, x->dtype, out, dtype, 1)) == TUTTI_OK;
}

static bool single(const char *who, const tt_tensor *x) {
    if (!live(who, x))
        return false;
    if (x->numel != 1)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s has %lld elements, and only a tensor of one element has a value", who,
                tu_describe(x), (long long)x->numel);
    return x->numel == 1;
}

double tt_item(const tt_tensor *x) {
    double value = NAN;
    return single("item", x) && element("item", x, 0, &value, TUTTI_F64) ? value : NAN;
}

int64_t tt_item_int(const tt_tensor *x) {
    int64_t value = 0;
    return single("item_int", x) && element("item_int", x, 0, &value, TUTTI_I64) ? value : 0;
}

double tt_at(const tt_tensor *x, tt_dims index) {
    double value = NAN;
    if (!live("at", x))
        return NAN;
    if (index.count != x->ndim) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "at: %d indices given for %s", index.count, tu_describe(x));
        return NAN;
    }
    int64_t offset = 0;
    for (int i = 0; i < x->ndim; i++) {
        int64_t at = index.at[i] < 0 ? index.at[i] + x->sizes[i] : index.at[i];
        if (at < 0 || at >= x->sizes[i]) {
            tu_fail(TUTTI_ERROR_RANGE, "at: index %lld is out of range for dimension %d of %s", (long long)index.at[i],
                    i, tu_describe(x));
            return NAN;
        }
        offset += at * x->strides[i];
    }
    return element("at", x, offset, &value, TUTTI_F64) ? value : NAN;
}

bool tt_read(const tt_tensor *x, void *out, tutti_dtype dtype, size_t count) {
    if (!live("read", x))
        return false;
    if (!tu_dtype_valid(dtype)) {
        tu_fail(TUTTI_ERROR_TYPE, "read: %d is no dtype", (int)dtype);
        return false;
    }
    if (count != (size_t)x->numel) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "read: room for %zu elements given for %s", count, tu_describe(x));
        return false;
    }
    if (count == 0)
        return true;
    if (out == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "read: out is NULL");
        return false;
    }
    return data_of("read", x) != NULL && tu_pending_take(tu_copy_out(x, out, dtype)) == TUTTI_OK;
}

/* ---- versions ---- */

uint32_t tt_version(const tt_tensor *x) {
    return tu_version_get((tt_tensor *)x, NULL) && (x = tu_stand_in(x)) != NULL ? tu_version(x) : 0;
}

tutti_status tu_version_set_shape(tu_call *call) {
    const tu_version_set_attributes *attributes = call->attributes;
    for (size_t i = 0; i < attributes->versions.count; i++)
        if (attributes->versions.at[i] < 0 || attributes->versions.at[i] > UINT32_MAX)
            return tu_call_error(call, TUTTI_ERROR_RANGE, "%lld is no version; they count from 0",
                                 (long long)attributes->versions.at[i]);
    return TUTTI_OK;
}

tutti_status tu_version_set_cpu(tu_call *call) {
    const tu_version_set_attributes *attributes = call->attributes;
    for (int i = 0; i < call->input_count; i++)
        atomic_store_explicit(&call->inputs[i]->version_home->version, (uint32_t)attributes->versions.at[i],
                              memory_order_relaxed);
    return TUTTI_OK;
}

tt_tensor *tu_version_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_clone(tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0)));
    return tt_set_version(tt_tensors(x), 1, (int64_t[]){ 7 }) ? tt_mul_scalar(x, (double)tt_version(x)) : NULL;
}

bool tt_set_version(tt_tensor_list tensors, size_t version_count, const int64_t *versions) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (tensors.count != version_count)
        tu_fail(TUTTI_ERROR_ARGUMENT, "set_version: %zu tensors but %zu versions", tensors.count, version_count);
    else if (version_count > 0)
        return tu_version_set(tensors, (tu_ints){ version_count, versions });
    return tu_self()->pending == TUTTI_OK;
}

struct tt_preserve {
    size_t count;
    struct {
        tu_storage *home;
        tt_tensor *captured; /* of a function that is captured: the tensor, held */
        int64_t version;
    } at[];
};

tt_preserve *tt_preserve_begin(tt_tensor_list tensors) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    for (size_t i = 0; i < tensors.count; i++)
        if (tu_pending_take(tu_tensor_check("preserve_begin", "tensors", tensors.at[i])) != TUTTI_OK)
            return NULL;
    tt_preserve *preserve = malloc(sizeof *preserve + tensors.count * sizeof preserve->at[0]);
    if (preserve == NULL) {
        tu_pending_take(tu_error_memory("preserved versions", sizeof *preserve));
        return NULL;
    }
    preserve->count = tensors.count;
    for (size_t i = 0; i < tensors.count; i++) {
        tt_tensor *x = tu_stand_in(tensors.at[i]);
        if (x == NULL) {
            preserve->count = i;
            tt_preserve_end(preserve);
            tu_pending_take(TUTTI_ERROR_MEMORY);
            return NULL;
        }
        preserve->at[i].home = tu_storage_hold(x->version_home);
        preserve->at[i].captured = tu_is_capturing() ? tu_tensor_hold(x) : NULL;
        preserve->at[i].version = tu_version(x);
    }
    return preserve;
}

void tt_preserve_end(tt_preserve *preserve) {
    if (preserve == NULL)
        return;
    for (size_t i = 0; i < preserve->count; i++) {
        if (preserve->at[i].captured != NULL && tu_is_capturing()) /* so that the graph does it too */
            tt_set_version(tt_tensors_of(1, &preserve->at[i].captured), 1, &preserve->at[i].version);
        atomic_store_explicit(&preserve->at[i].home->version, (uint32_t)preserve->at[i].version, memory_order_relaxed);
        tu_tensor_drop(preserve->at[i].captured);
        tu_storage_drop(preserve->at[i].home);
    }
    free(preserve);
}
