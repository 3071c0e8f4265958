/* SPDX-License-Identifier: Apache-2.0
 *
 * The moves as they are called: all_gather, broadcast, gather, scatter, all_to_all, permute. How they run: one_shot.c,
 * pipelined.c, tree.c.
 */
#include "collective/arrival.h"
#include "collective/collective.h"

static void begin(tu_task *task, tutti_group *group, tu_operation operation, const void *in, void *out, size_t count,
                  tutti_dtype dtype, int root) {
    tu_task_begin(task, group, operation);
    task->in = in;
    task->out = out;
    task->info.count = count;
    task->info.dtype = tu_code((int)dtype);
    task->info.root = root;
}

tutti_status tutti_all_gather(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                              const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_ALL_GATHER, in, out, count, dtype, -1);
    return tu_submit(&task, call);
}

tutti_status tu_fused_all_gather(const char *name, tutti_group *group, const void *in, void *out, size_t bytes,
                                 const tutti_call *call) {
    tu_task task;
    begin(&task, group, tu_operation_find(name), in, out, bytes, TUTTI_U8, -1);
    return tu_submit(&task, call);
}

tutti_status tutti_all_gather_v(tutti_group *group, const void *in, void *out, const size_t *counts,
                                const size_t *offsets, tutti_dtype dtype, const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_ALL_GATHER_V, in, out, 0, dtype, -1);
    task.in_counts = counts;
    task.out_offsets = offsets;
    return tu_submit(&task, call);
}

tutti_status tutti_broadcast(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype, int root,
                             const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_BROADCAST, in, out, count, dtype, root);
    return tu_submit(&task, call);
}

tutti_status tutti_gather(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype, int root,
                          const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_GATHER, in, out, count, dtype, root);
    return tu_submit(&task, call);
}

tutti_status tutti_scatter(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype, int root,
                           const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_SCATTER, in, out, count, dtype, root);
    return tu_submit(&task, call);
}

tutti_status tutti_all_to_all(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                              const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_ALL_TO_ALL, in, out, count, dtype, -1);
    return tu_submit(&task, call);
}

tutti_status tutti_all_to_all_v(tutti_group *group, const void *in, const size_t *in_counts, const size_t *in_offsets,
                                void *out, const size_t *out_counts, const size_t *out_offsets, tutti_dtype dtype,
                                const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_ALL_TO_ALL_V, in, out, 0, dtype, -1);
    task.in_counts = in_counts;
    task.in_offsets = in_offsets;
    task.out_counts = out_counts;
    task.out_offsets = out_offsets;
    return tu_submit(&task, call);
}

tutti_status tutti_permute(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                           const int *to, const tutti_call *call) {
    tu_task task;
    begin(&task, group, TU_OPERATION_PERMUTE, in, out, count, dtype, -1);
    task.to = to;
    return tu_submit(&task, call);
}
