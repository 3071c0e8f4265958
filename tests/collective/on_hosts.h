/* SPDX-License-Identifier: Apache-2.0
 *
 * Hosts for tests of groups that span them: a host is a PID namespace of its own. Its ranks share no job with the
 * others, and reach them over the loopback interface.
 */
#ifndef TEST_ON_HOSTS_H
#define TEST_ON_HOSTS_H

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <tutti/world.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"

#define MOST_RANKS 8

static char url[96];
static int rank_count;
static bool plugin_needed = true;

typedef void rank_body(tutti_world *world);

/* Without what runs at exit: LeakSanitizer cannot look around in a process that has made a PID namespace, or is in one
 * whose /proc is the outer one's. */
static void end_process(int status) {
    fflush(NULL);
    _exit(status);
}

/* What a rank, and UCX in it, writes on stderr. */
static void words_of(int rank, char path[128]) {
    snprintf(path, 128, "%s.words-%d", url + 7, rank);
}

static void run_rank(int rank, rank_body *body) {
    tutti_world *world;
    char path[128];
    words_of(rank, path);
    CHECK(freopen(path, "w", stderr) != NULL && setvbuf(stderr, NULL, _IONBF, 0) == 0);
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = rank, .rank_count = rank_count,
                                            .store_url = url, .timeout_ns = 600 * TU_SECOND),
                              &world));
    body(world);
    CHECK_OK(tutti_world_close(world));
    end_process(0);
}

/* The ranks of one host; the first of them is the host's init, and ends it with itself. */
static void run_host(const int *ranks, int count, rank_body *body) {
    pid_t pids[MOST_RANKS];
    for (int i = 0; i < count; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            run_rank(ranks[i], body);
    }
    int worst = 0;
    for (int i = 0; i < count; i++) {
        int status;
        CHECK(waitpid(pids[i], &status, 0) == pids[i]);
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; /* a test that kills knows what it does */
        worst = status != 0 && !killed ? 1 : worst;
    }
    end_process(worst);
}

static void in_namespace(const int *ranks, int count, rank_body *body) {
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0)
        end_process(77);
    pid_t host = fork();
    if (host == 0)
        run_host(ranks, count, body);
    int status;
    CHECK(waitpid(host, &status, 0) == host);
    end_process(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

static bool plugin_there(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/libtutti-ucx.so",
             getenv("TUTTI_PLUGIN_PATH") != NULL ? getenv("TUTTI_PLUGIN_PATH") : "");
    return access(path, R_OK) == 0;
}

/* Shows what the ranks wrote. Whether UCX ended one by an assertion of its own, as 1.13 now and then does
 * (docs/hosts.md): then nothing can be said of what the ranks did. */
static bool show_words(void) {
    bool ended_by_ucx = false;
    for (int rank = 0; rank < rank_count; rank++) {
        char path[128], line[2048];
        words_of(rank, path);
        FILE *words = fopen(path, "r");
        while (words != NULL && fgets(line, sizeof line, words) != NULL) {
            ended_by_ucx = ended_by_ucx || strstr(line, "  Assertion `") != NULL; /* libc has one space there */
            fputs(line, stderr);
        }
        if (words != NULL)
            fclose(words);
        unlink(path);
    }
    return ended_by_ucx;
}

static inline void run_once(const int *host_of, int host_count, int statuses[MOST_RANKS], rank_body *body) {
    pid_t hosts[MOST_RANKS];
    fflush(NULL);
    for (int host = 0; host < host_count; host++) {
        int ranks[MOST_RANKS], here = 0;
        for (int rank = 0; rank < rank_count; rank++)
            if (host_of[rank] == host)
                ranks[here++] = rank;
        hosts[host] = fork();
        if (hosts[host] == 0)
            in_namespace(ranks, here, body);
    }
    for (int host = 0; host < host_count; host++)
        CHECK(waitpid(hosts[host], &statuses[host], 0) == hosts[host]);
    unlink(url + 7);
}

/* host_of[r]: the host of rank r. */
static inline void on_hosts(const int *host_of, int count, rank_body *body) {
    if (plugin_needed && !plugin_there())
        SKIP("the plug-in tutti-ucx was not built");
    snprintf(url, sizeof url, "file:///tmp/tutti-test-collective-hosts-%d", (int)getpid());
    rank_count = count;
    int host_count = 0, statuses[MOST_RANKS];
    bool skipped = false, failed = false;
    for (int rank = 0; rank < count; rank++)
        host_count = host_of[rank] >= host_count ? host_of[rank] + 1 : host_count;
    for (int tries = 0;; tries++) {
        failed = false;
        run_once(host_of, host_count, statuses, body);
        for (int host = 0; host < host_count; host++) {
            skipped = skipped || (WIFEXITED(statuses[host]) && WEXITSTATUS(statuses[host]) == 77);
            failed = failed || statuses[host] != 0;
        }
        if (!show_words() || !failed || tries == 9)
            break;
        fprintf(stderr, "    once more: an assertion of UCX ended a rank\n");
    }
    if (skipped)
        SKIP("PID namespaces cannot be made here");
    for (int host = 0; host < host_count; host++)
        CHECK_EQ(statuses[host], 0);
}

static const int one_each[] __attribute__((unused)) = { 0, 1 };
static const int one_on_three[] __attribute__((unused)) = { 0, 1, 2 };
static const int two_and_two[] __attribute__((unused)) = { 0, 0, 1, 1 };
static const int three_two_one[] __attribute__((unused)) = { 0, 0, 0, 1, 1, 2 };
static const int in_turns[] __attribute__((unused)) = { 0, 1, 0, 1, 2 };

#endif
