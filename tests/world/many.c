/* SPDX-License-Identifier: Apache-2.0
 *
 * Many ranks on one host open, meet and close.
 */
#include <sys/resource.h>
#include <tutti/collective.h>
#include <tutti/group.h>
#include <unistd.h>

#include "../harness.h"

static void meet(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_EQ(tutti_world_local_size(world), tutti_world_size(world));
    int64_t one = 1, sum = 0;
    CHECK_OK(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    CHECK_EQ(sum, tutti_world_size(world));
    CHECK_OK(tutti_barrier(group, NULL));
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
    test_processes(test_sanitized() ? 72 : 96, meet, NULL);
}

TEST_LIMIT(two_hundred_and_fifty_six_processes_open_meet_and_close, 170) {
    if (test_sanitized())
        SKIP("256 sanitized processes are more than a small machine can hold");
    allow_descriptors(1024);
    test_processes(256, meet, NULL);
}

TEST_LIMIT(a_thousand_threads_open_meet_and_close, 170) {
    test_threads(test_sanitized() ? 100 : 1000, meet, NULL);
}
