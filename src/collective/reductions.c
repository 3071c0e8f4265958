/* SPDX-License-Identifier: Apache-2.0
 *
 * The reductions as they are called: all_reduce, reduce, reduce_scatter, reduce_scatter_v. How they run: one_shot.c, two_shot.c.
 */
#include "collective/collective.h"

static tu_task reduction(tutti_group *group, tu_operation operation, const void *in, void *out, size_t count, tutti_dtype dtype,
                         tutti_op op) {
    return (tu_task){ .group = group, .shape = operation, .in = in, .out = out,
                      .info = { .operation = (uint8_t)operation, .count = count, .dtype = (uint8_t)dtype, .reduction = (uint8_t)op, .root = -1 } };
}

tutti_status tutti_all_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype, tutti_op op,
                              const tutti_call *call) {
    tu_task task = reduction(group, TU_OP_ALL_REDUCE, in, out, count, dtype, op);
    tutti_status status;
    if (call == NULL && tu_express(&task, &status))
        return status;
    return tu_submit(&task, call);
}

tutti_status tutti_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype, tutti_op op, int root,
                          const tutti_call *call) {
    tu_task task = reduction(group, TU_OP_REDUCE, in, out, count, dtype, op);
    task.info.root = root;
    return tu_submit(&task, call);
}

tutti_status tutti_reduce_scatter(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype, tutti_op op,
                                  const tutti_call *call) {
    tu_task task = reduction(group, TU_OP_REDUCE_SCATTER, in, out, count, dtype, op);
    return tu_submit(&task, call);
}

tutti_status tutti_reduce_scatter_v(tutti_group *group, const void *in, void *out, const size_t *counts, tutti_dtype dtype,
                                    tutti_op op, const tutti_call *call) {
    tu_task task = reduction(group, TU_OP_REDUCE_SCATTER_V, in, out, 0, dtype, op);
    task.in_counts = counts;
    return tu_submit(&task, call);
}
