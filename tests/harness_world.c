/* SPDX-License-Identifier: Apache-2.0
 *
 * Worlds for tests: the real tutti_spawn, with the test's body as each rank's program.
 */
#include <tutti/world.h>

#include "harness.h"

struct rank_call {
    test_rank *body;
    void *argument;
};

static tutti_status run_rank(tutti_world *world, void *argument) {
    const struct rank_call *call = argument;
    call->body(world, call->argument);
    return TUTTI_OK;
}

static void run(tutti_spawn_kind kind, int ranks, test_rank *body, void *argument) {
    struct rank_call call = { body, argument };
    tutti_status status = tutti_spawn(kind, ranks, run_rank, &call);
    if (status != TUTTI_OK)
        FAIL("the world failed: %s: %s", tutti_status_name(status), tutti_error_message());
}

void test_threads(int ranks, test_rank *body, void *argument) {
    run(TUTTI_SPAWN_THREADS, ranks, body, argument);
}

void test_processes(int ranks, test_rank *body, void *argument) {
    run(TUTTI_SPAWN_PROCESSES, ranks, body, argument);
}
