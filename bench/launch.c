/* SPDX-License-Identifier: Apache-2.0
 *
 * What starting costs: the whole life of a small job (start, open the world, one barrier, close, exit), and of a job
 * that does nothing, under `tutti run` and under the launchers of Open MPI and MPICH.
 *
 *     bench/launch [ROUNDS]
 *
 * All take turns, round by round; the figure is the ratio of medians, Tutti's to the best peer's. The MPI program is
 * compiled here with mpicc.openmpi and mpicc.mpich; what is missing is named and left out. This program is also the
 * Tutti rank: "launch rank".
 */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <tutti/collective.h>
#include <tutti/world.h>
#include <unistd.h>

#include "base/clock.h"

extern char **environ;

#define MAX_ROUNDS 101
#define MAX_CONTENDERS 8

typedef struct contender {
    const char *name;
    const char *arguments[24]; /* NULL-terminated; none: eight bare process starts */
    double ms[MAX_ROUNDS];
    int rounds;
    bool ours, failed;
} contender;

/* ---- one rank of Tutti ---- */

static int be_rank(void) {
    tutti_world *world;
    if (tutti_world_open(NULL, &world) || tutti_barrier(tutti_world_group(world), NULL) || tutti_world_close(world)) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 1;
    }
    return 0;
}

/* ---- the MPI program ---- */

static const char mpi_source[] = "#include <mpi.h>\n"
                                 "int main(int argc, char **argv) {\n"
                                 "    MPI_Init(&argc, &argv);\n"
                                 "    MPI_Barrier(MPI_COMM_WORLD);\n"
                                 "    return MPI_Finalize();\n"
                                 "}\n";

static int run_program(const char *const *arguments, bool silent) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (silent) {
        posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
        posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    }
    pid_t pid;
    int status = -1;
    int error = posix_spawnp(&pid, arguments[0], &actions, NULL, (char *const *)arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0)
        return -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    return status;
}

/* Compiles folder/mpi.c to folder/<flavour>; false when there is no such compiler. */
static bool compile(const char *folder, const char *flavour, char *program, size_t bytes) {
    char compiler[64], source[PATH_MAX];
    snprintf(compiler, sizeof compiler, "mpicc.%s", flavour);
    snprintf(source, sizeof source, "%s/mpi.c", folder);
    snprintf(program, bytes, "%s/%s", folder, flavour);
    const char *arguments[] = { compiler, "-O2", "-o", program, source, NULL };
    bool compiled = run_program(arguments, true) == 0;
    if (!compiled)
        printf("%s: no mpicc.%s here, left out\n", flavour, flavour);
    return compiled;
}

/* ---- measuring ---- */

static void start_bare(int count) {
    pid_t pids[64];
    const char *arguments[] = { "true", NULL };
    for (int i = 0; i < count; i++)
        if (posix_spawnp(&pids[i], "true", NULL, NULL, (char *const *)arguments, environ) != 0)
            pids[i] = -1;
    for (int i = 0; i < count; i++)
        if (pids[i] > 0)
            waitpid(pids[i], NULL, 0);
}

static void measure(contender *c) {
    int64_t begin = tu_clock_now();
    if (c->arguments[0] == NULL)
        start_bare(8);
    else if (run_program(c->arguments, true) != 0)
        c->failed = true;
    c->ms[c->rounds++] = (double)(tu_clock_now() - begin) / 1e6;
}

static int by_value(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median(contender *c) {
    qsort(c->ms, (size_t)c->rounds, sizeof c->ms[0], by_value);
    return c->rounds % 2 ? c->ms[c->rounds / 2] : (c->ms[c->rounds / 2 - 1] + c->ms[c->rounds / 2]) / 2;
}

static void race(const char *title, contender *contenders, int count, int rounds, double target) {
    for (int i = 0; i < count; i++) {
        measure(&contenders[i]); /* warms caches; not counted */
        contenders[i].rounds = 0;
    }
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < count; i++)
            measure(&contenders[(i + round) % count]);
    double ours = 0, best = 0;
    const char *best_name = NULL;
    printf("\n%s: ms, %d rounds in turns\n  %-28s %9s %9s %9s\n", title, rounds, "", "median", "min", "max");
    for (int i = 0; i < count; i++) {
        contender *c = &contenders[i];
        double middle = median(c);
        printf("  %-28s %9.2f %9.2f %9.2f%s\n", c->name, middle, c->ms[0], c->ms[c->rounds - 1],
               c->failed ? "   FAILED, does not count" : "");
        if (c->ours)
            ours = middle;
        else if (!c->failed && c->arguments[0] != NULL && (best_name == NULL || middle < best)) {
            best = middle;
            best_name = c->name;
        }
    }
    if (best_name != NULL)
        printf("  ratio to the best peer (%s): %.2f (target %.1f)\n", best_name, ours / best, target);
    fflush(stdout);
}

static contender tutti(const char *command, const char *ranks, const char *program, const char *argument) {
    return (contender){ .name = "tutti run",
                        .arguments = { command, "run", "-n", ranks, program, argument },
                        .ours = true };
}

static contender open_mpi(const char *ranks, const char *program, bool ob1) {
    contender c = { .name = ob1 ? "Open MPI, ob1 and vader" : "Open MPI",
                    .arguments = { "mpirun.openmpi", "--oversubscribe", "--allow-run-as-root", "-n", ranks } };
    int next = 5;
    if (ob1) {
        const char *more[] = { "--mca", "pml", "ob1", "--mca", "btl", "vader,self" };
        for (size_t i = 0; i < sizeof more / sizeof more[0]; i++)
            c.arguments[next++] = more[i];
    }
    c.arguments[next] = program;
    return c;
}

static contender mpich(const char *ranks, const char *program) {
    return (contender){ .name = "MPICH", .arguments = { "mpirun.mpich", "-n", ranks, program } };
}

static bool has(const char *program) {
    const char *arguments[] = { program, "--version", NULL };
    return run_program(arguments, true) == 0;
}

static void race_worlds(const char *command, const char *self, const char *folder, const char *ranks, int rounds) {
    static contender contenders[MAX_CONTENDERS];
    static char with_open_mpi[PATH_MAX], with_mpich[PATH_MAX];
    static int open_mpi_here = -1, mpich_here = -1;
    int count = 0;
    if (open_mpi_here < 0) {
        open_mpi_here = compile(folder, "openmpi", with_open_mpi, sizeof with_open_mpi);
        mpich_here = compile(folder, "mpich", with_mpich, sizeof with_mpich);
    }
    contenders[count++] = tutti(command, ranks, self, "rank");
    if (open_mpi_here) {
        contenders[count++] = open_mpi(ranks, with_open_mpi, false);
        contenders[count++] = open_mpi(ranks, with_open_mpi, true);
    }
    if (mpich_here)
        contenders[count++] = mpich(ranks, with_mpich);
    char title[120];
    snprintf(title, sizeof title, "start %s ranks, open the world, barrier, close, exit", ranks);
    race(title, contenders, count, rounds, 0.2);
}

static void race_nothing(const char *command, int rounds) {
    static contender contenders[MAX_CONTENDERS];
    int count = 0;
    contenders[count++] = tutti(command, "8", "true", NULL);
    if (has("mpirun.openmpi"))
        contenders[count++] = open_mpi("8", "true", false);
    if (has("mpirun.mpich"))
        contenders[count++] = mpich("8", "true");
    contenders[count++] = (contender){ .name = "eight bare process starts" };
    race("start 8 times \"true\"", contenders, count, rounds, 1.0);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "rank") == 0)
        return be_rank();
    int rounds = argc > 1 ? atoi(argv[1]) : 9;
    if (rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: launch [ROUNDS], from 1 to %d\n", MAX_ROUNDS);
        return 2;
    }
    char self[PATH_MAX], place[PATH_MAX], command[PATH_MAX + 16], folder[] = "/tmp/tutti-bench-launch-XXXXXX",
                                                                  path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0 || mkdtemp(folder) == NULL) {
        perror("launch");
        return 1;
    }
    self[length] = '\0';
    memcpy(place, self, (size_t)length + 1);
    snprintf(command, sizeof command, "%s/../bin/tutti", dirname(place));
    snprintf(path, sizeof path, "%s/mpi.c", folder);
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs(mpi_source, file) < 0 || fclose(file) != 0) {
        perror(path);
        return 1;
    }
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    race_worlds(command, self, folder, "2", rounds);
    race_worlds(command, self, folder, "8", rounds);
    race_nothing(command, rounds);
    const char *left[] = { "mpi.c", "openmpi", "mpich" };
    for (size_t i = 0; i < sizeof left / sizeof left[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, left[i]);
        unlink(path);
    }
    rmdir(folder);
    return 0;
}
