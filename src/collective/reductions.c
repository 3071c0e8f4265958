/* SPDX-License-Identifier: Apache-2.0
 *
 * The reductions as they are called: all_reduce, reduce, reduce_scatter, reduce_scatter_v. How they run: one_shot.c,
 * two_shot.c.
 */
#include "collective/collective.h"

static void begin(tu_task *task, tutti_group *group, tu_operation operation, const void *in, void *out, size_t count,
                  tutti_dtype dtype, tutti_reduction reduction) {
    tu_task_begin(task, group, operation);
    task->in = in;
    task->out = out;
    task->info.count = count;
    task->info.dtype = tu_code((int)dtype);
    task->info.reduction = tu_code((int)reduction);
}

tutti_status tutti_all_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                              tutti_reduction reduction, const tutti_call *call) {
    tutti_status status;
    if (call == NULL && tu_express_all_reduce(group, in, out, count, dtype, reduction, &status))
        return status;
    tu_task task;
    begin(&task, group, TU_OPERATION_ALL_REDUCE, in, out, count, dtype, reduction);
    return tu_submit(&task, call);
}

tutti_status tutti_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                          tutti_reduction reduction, int root, const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_REDUCE, in, out, count, dtype, reduction);
    task.info.root = root;
    return tu_submit(&task, call);
}

tutti_status tutti_reduce_scatter(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                  tutti_reduction reduction, const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_REDUCE_SCATTER, in, out, count, dtype, reduction);
    return tu_submit(&task, call);
}

tutti_status tutti_reduce_scatter_v(tutti_group *group, const void *in, void *out, const size_t *counts,
                                    tutti_dtype dtype, tutti_reduction reduction, const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_REDUCE_SCATTER_V, in, out, 0, dtype, reduction);
    task.in_counts = counts;
    return tu_submit(&task, call);
}
