/* SPDX-License-Identifier: Apache-2.0
 *
 * Barriers. The work is done by one_shot.c (flat) and tree.c (by cache or NUMA domain).
 */
#include "collective/collective.h"
#include "collective/device.h"

tutti_status tutti_barrier(tutti_group *group, const tutti_call *call) {
    tutti_status status;
    if (call == NULL && tu_express_barrier(group, &status))
        return status;
    tu_task task;
    tu_task_begin(&task, group, TU_OPERATION_BARRIER);
    return tu_submit(&task, call);
}

tutti_status tutti_group_prepare(tutti_group *group, const tutti_call *call) {
    tu_task task;
    tu_task_begin(&task, group, TU_OPERATION_PREPARE);
    tutti_status status = tu_submit(&task, call);
    if (status != TUTTI_OK || group == TUTTI_NON_GROUP_MEMBER)
        return status;
    int64_t timeout;
    status = tu_timeout_choose("barrier", call != NULL ? call->timeout_ns : 0, group->timeout_ns,
                               group->world->timeout_ns, &timeout);
    return status == TUTTI_OK ? tu_device_prepare(group, tu_deadline(timeout)) : status;
}
