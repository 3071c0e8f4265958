/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused operations read and write the others' memory in place: on a group across hosts they say so.
 */
#include "../collective/on_hosts.h"
#include "support.h"

static void multiply_across(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = whole(tt_shape(4, 4), TUTTI_F32, tutti_group_rank(group));
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, group, NULL), TUTTI_ERROR_UNSUPPORTED, "on one host");
    FAILS(tt_fused_matmul_reduce_scatter(x, x, TUTTI_SUM, 0, group), TUTTI_ERROR_UNSUPPORTED, "on one host");
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL)); /* it ended nothing */
}

TEST(fused_operations_across_hosts_are_refused_on_every_rank) {
    on_hosts(one_each, 2, multiply_across);
    on_hosts(two_and_two, 4, multiply_across);
}
