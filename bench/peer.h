/* SPDX-License-Identifier: Apache-2.0
 *
 * PyTorch beside us: a Python process that runs a turn of a case when it is told to. Both sides take turns, so that
 * what else the machine does meets both. TUTTI_ISA limits the peer and its libraries too.
 */
#ifndef BENCH_PEER_H
#define BENCH_PEER_H

#include <cblas.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "measure.h"

#define ROUNDS 64

/* What the command line says: [--threads N] [--rounds N] [--python PATH] [--script PATH] [case…] */
typedef struct sides {
    const char *python, *script;
    int threads, rounds, case_count;
    char **cases; /* none: all */
} sides;

static FILE *to_peer, *from_peer;
static pid_t peer;

static inline sides sides_of(int count, char **arguments, const char *script) {
    const char *python = getenv("TEST_PYTHON");
    sides of = { python != NULL ? python : "python3", script, 0, 9, 0, arguments };
    for (int i = 1; i < count; i++) {
        if (strcmp(arguments[i], "--threads") == 0 && i + 1 < count)
            of.threads = atoi(arguments[++i]);
        else if (strcmp(arguments[i], "--rounds") == 0 && i + 1 < count)
            of.rounds = atoi(arguments[++i]);
        else if (strcmp(arguments[i], "--python") == 0 && i + 1 < count)
            of.python = arguments[++i];
        else if (strcmp(arguments[i], "--script") == 0 && i + 1 < count)
            of.script = arguments[++i];
        else
            arguments[of.case_count++] = arguments[i];
    }
    if (of.threads > 0)
        openblas_set_num_threads(of.threads);
    of.threads = openblas_get_num_threads();
    of.rounds = of.rounds < 1 ? 1 : of.rounds > ROUNDS ? ROUNDS : of.rounds;
    return of;
}

static inline bool is_wanted(const sides *of, const char *name) {
    for (int i = 0; i < of->case_count; i++)
        if (strcmp(of->cases[i], name) == 0)
            return true;
    return of->case_count == 0;
}

static inline void limit_peer(const char *level) {
    static const char *const limits[][4] = { { "reference", "default", "SSE41", "SSE4_2" },
                                             { "avx2", "avx2", "AVX2", "AVX2" } };
    for (int i = 0; level != NULL && i < 2; i++)
        if (strcmp(level, limits[i][0]) == 0) {
            setenv("ATEN_CPU_CAPABILITY", limits[i][1], 1);
            setenv("ONEDNN_MAX_CPU_ISA", limits[i][2], 1);
            setenv("MKL_ENABLE_INSTRUCTIONS", limits[i][3], 1);
        }
}

static inline void start_peer(const sides *of) {
    int down[2], up[2];
    char count[16], line[256];
    snprintf(count, sizeof count, "%d", of->threads);
    if (pipe(down) != 0 || pipe(up) != 0)
        return;
    peer = fork();
    if (peer == 0) {
        dup2(down[0], 0);
        dup2(up[1], 1);
        close(down[1]);
        close(up[0]);
        limit_peer(getenv("TUTTI_ISA"));
        execlp(of->python, of->python, of->script, count, (char *)NULL);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    to_peer = fdopen(down[1], "w");
    from_peer = fdopen(up[0], "r");
    if (fgets(line, sizeof line, from_peer) != NULL && strncmp(line, "ready", 5) == 0) {
        printf("peer: %s", line + 6);
        return;
    }
    printf("no PyTorch for %s (use --python): Tutti alone is measured\n", of->python);
    waitpid(peer, NULL, 0);
    peer = 0;
}

/* The number that it answers with; 0 without a peer, or where it cannot. */
static inline double ask_peer(const char *what) {
    char line[256];
    if (peer == 0)
        return 0;
    fprintf(to_peer, "%s\n", what);
    fflush(to_peer);
    return fgets(line, sizeof line, from_peer) != NULL ? atof(line) : 0;
}

static inline void end_peer(void) {
    if (peer == 0)
        return;
    fclose(to_peer);
    waitpid(peer, NULL, 0);
}

/* Threads of the other side look for more work for some time after theirs. */
static inline void rest(int threads) {
    if (threads > 1)
        nanosleep(&(struct timespec){ 0, 30 * 1000 * 1000 }, NULL);
}

#endif
