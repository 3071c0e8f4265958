/* SPDX-License-Identifier: Apache-2.0
 *
 * Fake worlds: one process pretends to be one rank of many.
 */
#include <tutti/mesh.h>

#include "../harness.h"
#include "world/world.h"

static tutti_status operate(tutti_group *group, tu_operation operation) {
    tu_operation_info info = { .operation = operation };
    int64_t deadline;
    uint64_t ticket;
    tutti_status status = tu_group_enter(group, 0, &info, &deadline, &ticket);
    return status == TUTTI_OK ? tu_group_leave(group, &info, ticket, TUTTI_OK) : tu_not_entered(status);
}

TEST(a_fake_world_of_any_size_opens_in_one_process) {
    tutti_world *world, *second;
    CHECK_OK(tutti_world_open_fake(1000, 4096, NULL, &world));
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &second)); /* as many as one likes */
    CHECK_EQ(tutti_world_rank(world), 1000);
    CHECK_EQ(tutti_world_size(world), 4096);
    CHECK_TEXT(tutti_world_launcher(world), "fake");
    CHECK_TEXT(tutti_group_name(tutti_world_group(world)), "0");
    CHECK(tutti_world_store(world) == NULL);
    tutti_group *mine, *none;
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 64, NULL, NULL, &mine));
    CHECK_EQ(tutti_group_size(mine), 64);
    CHECK_EQ(tutti_group_rank(mine), 1000 % 64);
    CHECK_OK(tutti_group_new(world, (int[]){ 1, 2 }, 2, NULL, &none));
    CHECK(none == TUTTI_NON_GROUP_MEMBER);
    CHECK_OK(operate(mine, TU_OPERATION_ALL_REDUCE));
    CHECK_OK(operate(mine, TU_OPERATION_BARRIER));
    CHECK_EQ(tutti_group_sequence(mine), 2);
    CHECK_EQ(tutti_group_completed(mine), 2);
    CHECK_OK(tutti_group_abort(mine, "enough"));
    CHECK_STATUS(operate(mine, TU_OPERATION_BARRIER), TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE("enough");
    tutti_group_release(mine);
    CHECK_OK(tutti_world_close(world));
    CHECK_OK(tutti_world_close(second));
}

TEST(a_fake_world_checks_its_arguments_as_a_real_one_does) {
    tutti_world *world;
    CHECK_STATUS(tutti_world_open_fake(2, 2, NULL, &world), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_world_open_fake(-1, 2, NULL, &world), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_world_open_fake(0, 0, NULL, &world), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &world));
    tutti_group *group;
    CHECK_STATUS(tutti_group_new(world, (int[]){ 0, 0 }, 2, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new(world, (int[]){ 2 }, 1, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_fake_world_can_fail_every_collective) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 4, TUTTI_OPTIONS(tutti_fake_options, .error_on_collective = true), &world));
    tutti_group *group = tutti_world_group(world);
    CHECK_STATUS(operate(group, TU_OPERATION_ALL_REDUCE), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("FakeProcessGroup collective operation error");
    CHECK_STATUS(operate(group, TU_OPERATION_BARRIER), TUTTI_ERROR_STATE);
    CHECK_OK(operate(group, TU_OPERATION_SEND));
    CHECK_OK(operate(group, TU_OPERATION_RECV));
    CHECK_OK(tutti_group_check(group)); /* it ended nothing */
    CHECK_OK(tutti_world_close(world));
}
