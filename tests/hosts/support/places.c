/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that needs the store of its world and nothing else, for jobs over several hosts: places SCENARIO [RANK].
 *
 *     hello    says where it is, meets the others in the store, ends
 *     wait     meets the others, says so, and waits for a key that nobody sets, until something happens
 *     last     as wait, but what happens is survived: it says what and ends well
 *     fail     as wait; RANK exits with status 7 once all are there
 *     kill     as wait; RANK kills itself once all are there
 *     early    RANK exits with status 7 before it opens its world
 *     input    rank 0 copies its standard input to its standard output
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/event.h>
#include <tutti/store.h>
#include <tutti/world.h>
#include <unistd.h>

static int complain(void) {
    fprintf(stderr, "error: %s\n", tutti_error_message());
    return 5;
}

static const char *value_of(const char *name) {
    const char *value = getenv(name);
    return value != NULL ? value : "none";
}

static int wait_for_ever(tutti_world *world, const char *scenario, int victim) {
    void *value;
    size_t bytes;
    if (tutti_world_rank(world) == victim && strcmp(scenario, "kill") == 0)
        raise(SIGKILL);
    if (tutti_world_rank(world) == victim && strcmp(scenario, "fail") == 0)
        exit(7);
    tutti_status status = tutti_store_get(tutti_world_store(world), "never", TUTTI_UNTIL_EVENT, &value, &bytes);
    int result = complain();
    return strcmp(scenario, "last") == 0 && status == TUTTI_ERROR_DEAD ? 0 : result;
}

static int copy_input(const tutti_world *world) {
    char line[256];
    while (tutti_world_rank(world) == 0 && fgets(line, sizeof line, stdin) != NULL)
        fputs(line, stdout);
    return 0;
}

/* Rank 0 may serve the store: it leaves last. */
static tutti_status leave(const tutti_world *world) {
    char key[32];
    tutti_status status = TUTTI_OK;
    tutti_store *store = tutti_world_store(world);
    for (int rank = 1; rank < tutti_world_size(world) && status == TUTTI_OK; rank++) {
        snprintf(key, sizeof key, "left %d", rank);
        if (tutti_world_rank(world) == rank)
            status = tutti_store_set(store, key, "", 0);
        else if (tutti_world_rank(world) == 0)
            status = tutti_store_wait(store, (const char *const[]){ key }, 1, 0);
    }
    return status;
}

int main(int argc, char **argv) {
    const char *scenario = argc > 1 ? argv[1] : "hello";
    int victim = argc > 2 ? atoi(argv[2]) : -1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(scenario, "early") == 0 && atoi(value_of("TUTTI_RANK")) == victim)
        return 7;
    tutti_world *world;
    if (tutti_world_open(NULL, &world) != TUTTI_OK)
        return complain();
    printf("rank %d of %d, local %d of %d, node %s of %s, pid %d, store %s, master %s\n", tutti_world_rank(world),
           tutti_world_size(world), tutti_world_local_rank(world), tutti_world_local_size(world),
           value_of("TUTTI_NODE"), value_of("TUTTI_NODES"), (int)getpid(), value_of("TUTTI_STORE"),
           value_of("MASTER_ADDR"));
    if (tutti_world_size(world) > 1 &&
        tutti_store_barrier(tutti_world_store(world), "begin", tutti_world_size(world), 0) != TUTTI_OK)
        return complain();
    int result = 0;
    if (strcmp(scenario, "input") == 0)
        result = copy_input(world);
    else if (strcmp(scenario, "hello") != 0) {
        printf("all are here\n");
        result = wait_for_ever(world, scenario, victim);
    } else if (leave(world) != TUTTI_OK) {
        return complain();
    }
    if (tutti_world_close(world) != TUTTI_OK)
        return complain();
    return result;
}
