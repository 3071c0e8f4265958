/* SPDX-License-Identifier: Apache-2.0
 *
 * Many ranks on one host open, meet and close.
 */
#include <sys/resource.h>
#include <tutti/collective.h>
#include <tutti/group.h>
#include <unistd.h>

#include "../harness.h"

static tutti_status meet(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_EQ(tutti_world_local_size(world), tutti_world_size(world));
    int64_t one = 1, sum = 0;
    tutti_status status = tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL);
    if (status != TUTTI_OK)
        return status;
    CHECK_EQ(sum, tutti_world_size(world));
    return tutti_barrier(group, NULL);
}

/* A small machine, or a container with limits, need not have room for so many: that is told as such, and is no fault.
 */
static void run(tutti_spawn_kind kind, int ranks) {
    tutti_status status = tutti_spawn(kind, ranks, meet, NULL);
    if (status == TUTTI_ERROR_MEMORY || status == TUTTI_ERROR_LIMIT)
        SKIP("%s", tutti_error_message());
    CHECK_OK(status);
}

/* Each process has a connection and a pidfd for each other one. */
static void allow_descriptors(rlim_t count) {
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_max < count)
        SKIP("this process may have %llu descriptors, and %llu are needed", (unsigned long long)limit.rlim_max,
             (unsigned long long)count);
    if (limit.rlim_cur < count)
        limit.rlim_cur = count;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_LIMIT(ninety_six_processes_open_meet_and_close, 170) {
    allow_descriptors(1024);
    run(TUTTI_SPAWN_PROCESSES, test_sanitized() ? 72 : 96);
}

TEST_LIMIT(two_hundred_and_fifty_six_processes_open_meet_and_close, 170) {
    if (test_sanitized())
        SKIP("256 sanitized processes are more than a small machine can hold");
    allow_descriptors(1024);
    run(TUTTI_SPAWN_PROCESSES, 256);
}

TEST_LIMIT(a_thousand_threads_open_meet_and_close, 170) {
    run(TUTTI_SPAWN_THREADS, test_sanitized() ? 100 : 1000);
}
