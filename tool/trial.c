/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a world would open with the environment as it is: two ranks as threads of a child process open one, meet in a
 * symmetric block and add a number up, as a program would. So every setting is judged by the code that uses it.
 */
#include "trial.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/world.h>

#define LIMIT_SECONDS 20

static tutti_status try_rank(tutti_world *world, void *unused) {
    (void)unused;
    tutti_memory *memory;
    tutti_peers *peers;
    int one = 1, sum = 0;
    tutti_status status = tutti_memory_alloc(world, 4096, NULL, &memory);
    if (status != TUTTI_OK)
        return status;
    status = tutti_memory_rendezvous(memory, tutti_world_group(world), &peers);
    if (status == TUTTI_OK) {
        status = tutti_all_reduce(tutti_world_group(world), &one, &sum, 1, TUTTI_I32, TUTTI_SUM, NULL);
        tutti_peers_release(peers);
    }
    tutti_memory_release(memory);
    return status;
}

static _Noreturn void child(int to, bool computes) {
    alarm(LIMIT_SECONDS);
    tutti_status status = TUTTI_OK;
    tutti_world *world;
    if (computes) {
        status = tutti_spawn(TUTTI_SPAWN_THREADS, 2, try_rank, NULL);
    } else {
        tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
        options.rank_count = 1;
        status = tutti_world_open(&options, &world);
        if (status == TUTTI_OK)
            status = tutti_world_close(world);
    }
    const char *message = status == TUTTI_OK ? "" : tutti_error_message();
    _exit(write(to, message, strlen(message)) < 0);
}

bool trial(bool computes, char *problem, size_t room) {
    int ends[2], status;
    problem[0] = '\0';
    fflush(NULL);
    if (pipe(ends) != 0)
        return true;
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        child(ends[1], computes);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while (pid > 0 && used < room - 1 && (got = read(ends[0], problem + used, room - 1 - used)) > 0)
        used += (size_t)got;
    problem[used] = '\0';
    close(ends[0]);
    if (pid > 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(problem, room, "two ranks did not meet within %d s", LIMIT_SECONDS);
    return problem[0] == '\0';
}
