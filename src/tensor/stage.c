/* SPDX-License-Identifier: Apache-2.0
 *
 * Staging of tensors for kernels: see stage.h.
 */
#include "tensor/stage.h"

static tt_tensor *like(const tt_tensor *x, tutti_dtype dtype) {
    tu_shape shape = tu_shape_of(x);
    shape.dtype = dtype;
    return tu_shape_contiguous("stage", &shape) == TUTTI_OK ? tu_tensor_new(&shape) : NULL;
}

tt_tensor *tu_stage_in(const tt_tensor *x, tutti_dtype dtype) {
    if (x == NULL || (x->dtype == dtype && x->flags & TU_CONTIGUOUS))
        return tu_tensor_hold((tt_tensor *)x);
    tt_tensor *copy = like(x, dtype);
    if (copy != NULL && tu_copy_tensor(copy, x) != TUTTI_OK) {
        tu_tensor_drop(copy);
        return NULL;
    }
    return copy;
}

tt_tensor *tu_stage_out(tt_tensor *out, tutti_dtype dtype) {
    return out->dtype == dtype ? tu_tensor_hold(out) : like(out, dtype);
}

tt_tensor *tu_stage_out_dense(tt_tensor *out, tutti_dtype dtype) {
    return out->flags & TU_CONTIGUOUS ? tu_stage_out(out, dtype) : like(out, dtype);
}

tutti_status tu_stage_done(tt_tensor *out, tt_tensor *staged) {
    bool copies = staged != NULL && staged != out && out->numel > 0;
    tutti_status status = copies ? tu_copy_tensor(out, staged) : TUTTI_OK;
    tu_tensor_drop(staged);
    return status;
}

tutti_status tu_stage_end(int count, tt_tensor *const *outs, tt_tensor *const *staged, tutti_status status) {
    for (int i = 0; i < count; i++) {
        if (status == TUTTI_OK)
            status = tu_stage_done(outs[i], staged[i]);
        else
            tu_tensor_drop(staged[i]);
    }
    return status;
}
