/* SPDX-License-Identifier: Apache-2.0
 *
 * Barriers. The work is done by one_shot.c (flat) and tree.c (by cache or NUMA domain).
 */
#include "collective/collective.h"

tutti_status tutti_barrier(tutti_group *group, const tutti_call *call) {
    tu_task task = { .group = group, .shape = TU_OP_BARRIER, .info = { .operation = TU_OP_BARRIER, .root = -1 } };
    return tu_submit(&task, call);
}

tutti_status tutti_group_prepare(tutti_group *group, const tutti_call *call) {
    tu_task task = { .group = group, .shape = TU_OP_BARRIER, .info = { .operation = TU_OP_PREPARE, .root = -1 } };
    return tu_submit(&task, call);
}
