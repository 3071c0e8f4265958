/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that find each other and say hello.
 *
 *     tutti run -n 4 ./hello            or: torchrun --no-python, mpirun, srun
 *     ./hello 4                         four processes without any launcher
 *     ./hello 4 threads                 four threads
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tutti/group.h>
#include <tutti/world.h>

static tutti_status hello(tutti_world *world, void *unused) {
    (void)unused;
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    printf("Hello from rank %d of %d (pid %d on %s, started by %s)\n", tutti_world_rank(world), tutti_world_size(world),
           (int)getpid(), host, tutti_world_launcher(world));

    /* The even ranks make a group of their own. Everybody takes part in making it. */
    int even[64], count = 0;
    for (int rank = 0; rank < tutti_world_size(world) && count < 64; rank += 2)
        even[count++] = rank;
    tutti_group *group;
    tutti_status status = tutti_group_new(world, even, count, NULL, &group);
    if (status != TUTTI_OK)
        return status;
    if (group != TUTTI_NON_GROUP_MEMBER)
        printf("Rank %d is rank %d of %d in group %s, the even ones\n", tutti_world_rank(world),
               tutti_group_rank(group), tutti_group_size(group), tutti_group_name(group));
    tutti_group_release(group);
    return TUTTI_OK;
}

static int failed(void) {
    fprintf(stderr, "hello: %s\n", tutti_error_message());
    return 1;
}

int main(int argc, char **argv) {
    if (argc > 1) {
        int threads = argc > 2 && strcmp(argv[2], "threads") == 0;
        if (tutti_spawn(threads ? TUTTI_SPAWN_THREADS : TUTTI_SPAWN_PROCESSES, atoi(argv[1]), hello, NULL) != TUTTI_OK)
            return failed();
        return 0;
    }
    tutti_world *world;
    if (tutti_world_open(NULL, &world) != TUTTI_OK)
        return failed();
    if (hello(world, NULL) != TUTTI_OK)
        return failed();
    return tutti_world_close(world) == TUTTI_OK ? 0 : failed();
}
