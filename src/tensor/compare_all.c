/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether two tensors are equal, exactly or nearly: for tests and checks.
 */
#include <math.h>

#include "tensor/convert.h"
#include "tensor/operator.h"

/* Both, as dense rows of doubles (complex as pairs), compared element by element. */
static bool compare(const char *who, tt_tensor *first, tt_tensor *second, double relative, double absolute) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "a", first)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_check(who, "b", second)) != TUTTI_OK || (first = tu_stand_in(first)) == NULL ||
        (second = tu_stand_in(second)) == NULL || tu_pending_take(tu_tensor_ready(who, "a", first)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_ready(who, "b", second)) != TUTTI_OK)
        return false;
    if (first->device == TUTTI_META || second->device == TUTTI_META) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s: meta tensors have no values to compare", who);
        return false;
    }
    if (!tu_same_sizes(first, second))
        return false;
    if (first->numel == 0)
        return true;
    bool whole = !tu_is_float(first->dtype) && !tu_is_complex(first->dtype) && !tu_is_float(second->dtype) &&
                 !tu_is_complex(second->dtype);
    tutti_dtype dtype = whole ? TUTTI_I64 : TUTTI_C128;
    size_t bytes = (size_t)first->numel * tu_dtype_bytes[dtype];
    char *both = tu_block_alloc(tu_self(), 2 * bytes);
    if (both == NULL) {
        tu_pending_take(tu_error_memory("a comparison", 2 * bytes));
        return false;
    }
    bool equal = tu_pending_take(tu_copy_out(first, both, dtype)) == TUTTI_OK &&
                 tu_pending_take(tu_copy_out(second, both + bytes, dtype)) == TUTTI_OK;
    for (int64_t i = 0; equal && whole && i < first->numel; i++) {
        int64_t x = ((int64_t *)both)[i], y = ((int64_t *)(both + bytes))[i];
        equal = x == y || fabs((double)x - (double)y) <= absolute + relative * fabs((double)y);
    }
    for (int64_t i = 0; equal && !whole && i < 2 * first->numel; i++) {
        double x = ((double *)both)[i], y = ((double *)(both + bytes))[i];
        equal = x == y || fabs(x - y) <= absolute + relative * fabs(y);
    }
    tu_block_free(tu_self(), both, 2 * bytes);
    return equal;
}

bool tt_equal(tt_tensor *a, tt_tensor *b) {
    return compare("equal", a, b, 0, 0);
}

bool tt_allclose(tt_tensor *a, tt_tensor *b, double relative, double absolute) {
    return compare("allclose", a, b, relative, absolute);
}
