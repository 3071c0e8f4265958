/* SPDX-License-Identifier: Apache-2.0
 *
 * The loop of `tutti run`: output, input and signals are passed on, and the user is told what happened, until the last
 * rank has ended.
 */
#include "run_inner.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "world/refill.h"

/* ---- telling ---- */

static int pid_of(const run_launcher *launcher, int rank) {
    return atomic_load_explicit(&launcher->state->ranks[rank].pid, memory_order_relaxed);
}

static int status_of(const run_launcher *launcher, int rank) {
    return atomic_load_explicit(&launcher->state->ranks[rank].wait_status, memory_order_relaxed);
}

static bool has_ended(const run_launcher *launcher, int rank) {
    /* Acquire pairs with the guardian's release: the wait status is there. */
    return atomic_load_explicit(&launcher->state->ranks[rank].ended, memory_order_acquire) != 0;
}

long run_memory_kills(void) {
    char line[128];
    long count = -1;
    FILE *file = fopen("/proc/vmstat", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL && sscanf(line, "oom_kill %ld", &count) != 1)
        continue;
    if (file != NULL)
        fclose(file);
    return count;
}

/* Whether a rank died of a signal that somebody sent to the launcher, which passes it on: that is no failure of the
 * rank's, and told once for all of them. */
static bool ended_from_outside(const run_launcher *launcher, int rank) {
    int status = status_of(launcher, rank);
    return launcher->ended_by != 0 && WIFSIGNALED(status) &&
           (WTERMSIG(status) == launcher->ended_by || (launcher->ended_twice && WTERMSIG(status) == SIGKILL));
}

static void tell_outside(run_launcher *launcher) {
    static const struct {
        int number;
        const char *name;
    } names[] = { { SIGINT, "SIGINT" }, { SIGTERM, "SIGTERM" }, { SIGHUP, "SIGHUP" }, { SIGQUIT, "SIGQUIT" } };
    if (launcher->told_outside)
        return;
    launcher->told_outside = true;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].number == launcher->ended_by)
            output_tell(launcher->output, "tutti run: stopped by %s from %s\n", names[i].name,
                        launcher->from_terminal ? "the terminal" : "outside");
}

static void tell_end(run_launcher *launcher, int rank, const char *and_then) {
    char text[192];
    if (ended_from_outside(launcher, rank)) {
        output_drain(launcher->output, rank);
        tell_outside(launcher);
        return;
    }
    output_drain(launcher->output, rank); /* its last words come before */
    int status = status_of(launcher, rank);
    tool_wait_text(status, text, sizeof text);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && run_memory_kills() > launcher->memory_kills)
        snprintf(text + strlen(text), sizeof text - strlen(text),
                 ", likely by the kernel for want of memory (dmesg tells)");
    bool colour = tool_colour(2);
    output_tell(launcher->output, "%stutti run: rank %d (pid %d) %s%s%s\n", colour ? "\033[1;31m" : "", rank,
                pid_of(launcher, rank), text, and_then, colour ? "\033[0m" : "");
}

static void tell_stopping(run_launcher *launcher) {
    bool stopped[MAX_RANKS];
    char text[256];
    int count = 0;
    memset(stopped, 0, sizeof stopped);
    for (int rank = 0; rank < launcher->options.ranks; rank++) {
        bool *this = &stopped[launcher->options.first_rank + rank];
        *this = atomic_load_explicit(&launcher->state->ranks[rank].stopped, memory_order_relaxed) != 0;
        count += *this;
    }
    launcher->told_stopping = true;
    if (count == 0 || launcher->options.quiet)
        return;
    tool_rank_list(stopped, launcher->options.first_rank + launcher->options.ranks, text, sizeof text);
    output_tell(launcher->output, "tutti run: stopping rank%s %s\n", count == 1 ? "" : "s", text);
}

/* A rank has ended for good: says so where tutti_group_refill waits for a newcomer. */
static void tell_over(run_launcher *launcher, int rank) {
    char key[48], why[160];
    int started = 0;
    for (int i = 0; i < launcher->options.ranks; i++)
        started += (int)atomic_load_explicit(&launcher->state->ranks[i].refills, memory_order_relaxed);
    if (status_of(launcher, rank) == 0)
        snprintf(why, sizeof why, "its process exited with status 0, and --refill replaces those that fail");
    else if (started >= launcher->options.refill)
        snprintf(why, sizeof why, "--refill %d is used up: %d newcomer%s started", launcher->options.refill, started,
                 started == 1 ? " was" : "s were");
    else
        snprintf(why, sizeof why, "the launcher has started no newcomer: the job ends, or it could not");
    snprintf(key, sizeof key, TU_REFILL_OVER, rank);
    tutti_store *client;
    if (tutti_store_clone(launcher->store, &client) != TUTTI_OK)
        return; /* again when something else happens */
    launcher->over[rank] = tutti_store_set(client, key, why, strlen(why) + 1) == TUTTI_OK;
    tutti_store_release(client);
}

static void tell_refills(run_launcher *launcher) {
    for (int rank = 0; rank < launcher->options.ranks; rank++)
        if (!launcher->over[rank] && has_ended(launcher, rank))
            tell_over(launcher, rank);
    for (int rank = 0; rank < launcher->options.ranks; rank++) {
        run_rank *slot = &launcher->state->ranks[rank];
        uint32_t refills = atomic_load_explicit(&slot->refills, memory_order_acquire);
        if (refills == launcher->refills[rank] || launcher->options.quiet)
            continue;
        launcher->refills[rank] = refills;
        char text[128];
        tool_wait_text(atomic_load_explicit(&slot->lost_status, memory_order_relaxed), text, sizeof text);
        output_tell(launcher->output, "tutti run: rank %d (pid %d) %s; a newcomer (pid %d) takes its place\n", rank,
                    atomic_load_explicit(&slot->lost_pid, memory_order_relaxed), text,
                    atomic_load_explicit(&slot->pid, memory_order_relaxed));
    }
}

/* What the agent has to say of ranks and hosts. */
static void tell_of_hosts(run_launcher *launcher) {
    char line[640];
    bool colour = tool_colour(2);
    for (int rank; agent_next(launcher->agent, line, sizeof line, &rank);) {
        int here = rank - launcher->options.first_rank;
        if (rank >= 0)
            launcher->told[rank] = true;
        if (rank >= 0 && here >= 0 && here < launcher->options.ranks)
            output_drain(launcher->output, here); /* its last words come before */
        line[strcspn(line, "\n")] = 0;
        if (!launcher->silent)
            output_tell(launcher->output, "%s%s%s\n", colour ? "\033[1;31m" : "", line, colour ? "\033[0m" : "");
    }
}

static void tell_news(run_launcher *launcher) {
    if (launcher->agent != NULL) {
        tell_of_hosts(launcher);
        if (!launcher->silent && !launcher->told_stopping &&
            atomic_load_explicit(&launcher->state->stopping, memory_order_acquire) != 0)
            tell_stopping(launcher);
        return;
    }
    for (int rank = 0; rank < launcher->options.ranks && launcher->news != NULL; rank++)
        if (has_ended(launcher, rank))
            tu_news_rank_ended(launcher->news, rank, pid_of(launcher, rank), status_of(launcher, rank));
    if (launcher->options.refill > 0)
        tell_refills(launcher);
    uint32_t first = atomic_load_explicit(&launcher->state->first_failure, memory_order_acquire);
    bool survive = launcher->options.survive;
    if (first != 0 && !launcher->told_first) {
        launcher->told_first = launcher->told[first - 1] = true;
        tell_end(launcher, (int)first - 1, survive ? "; the others go on" : "");
    }
    if (survive && launcher->told_first && !launcher->options.quiet)
        for (int rank = 0; rank < launcher->options.ranks; rank++)
            if (!launcher->told[rank] && has_ended(launcher, rank) && status_of(launcher, rank) != 0) {
                launcher->told[rank] = true;
                tell_end(launcher, rank, "");
            }
    if (!launcher->told_stopping && atomic_load_explicit(&launcher->state->stopping, memory_order_acquire) != 0)
        tell_stopping(launcher);
}

/* How a rank ended; 0 is no end to tell of. */
typedef int status_of_rank_in(const void *argument, int rank);

/* Tells how ranks ended that were not told of: one line for each way. */
static void tell_rest(output *output, int size, bool *told, status_of_rank_in *status_of_rank, const void *argument) {
    bool same[MAX_RANKS];
    for (int rank = 0; rank < size; rank++) {
        int status = status_of_rank(argument, rank);
        if (told[rank] || status == 0)
            continue;
        int count = 0;
        for (int other = 0; other < size; other++) {
            same[other] = !told[other] && status_of_rank(argument, other) == status;
            count += same[other];
        }
        for (int other = 0; other < size; other++)
            told[other] |= same[other];
        char text[128], ranks[256];
        tool_wait_text(status, text, sizeof text);
        tool_rank_list(same, size, ranks, sizeof ranks);
        bool plural_was = count > 1 && strncmp(text, "was ", 4) == 0;
        output_tell(output, "tutti run: then rank%s %s %s%s\n", count == 1 ? "" : "s", ranks, plural_was ? "were " : "",
                    plural_was ? text + 4 : text);
    }
}

static int status_of_news(const void *news, int rank) {
    return tu_news_of(news, rank) == TU_NEWS_DEAD ? tu_news_wait_status(news, rank) : 0;
}

static int status_here(const void *argument, int rank) {
    return status_of(argument, rank);
}

static void tell_others(run_launcher *launcher) {
    if (launcher->agent != NULL)
        run_tell_others_of_hosts(launcher->output, launcher->agent, launcher->told);
    for (int rank = 0; launcher->agent == NULL && rank < launcher->options.ranks; rank++)
        if (ended_from_outside(launcher, rank)) {
            launcher->told[rank] = true;
            tell_outside(launcher); /* perhaps one that caught the signal was first, and only its exit was told */
        }
    if (launcher->agent == NULL)
        tell_rest(launcher->output, launcher->options.ranks, launcher->told, status_here, launcher);
}

void run_tell_others_of_hosts(output *output, agent *agent, bool *told) {
    for (int rank = 0; rank < agent_size(agent); rank++)
        told[rank] |= agent_ended_from_outside(agent, status_of_news(agent_news(agent), rank));
    tell_rest(output, agent_size(agent), told, status_of_news, agent_news(agent));
}

/* ---- the loop ---- */

static void relay_input(run_launcher *launcher) {
    if (launcher->typed_bytes == 0) {
        ssize_t count = read(0, launcher->typed, sizeof launcher->typed);
        if (count <= 0 && !(count < 0 && (errno == EINTR || errno == EAGAIN))) {
            close(launcher->relay);
            launcher->relay = -1;
            return;
        }
        launcher->typed_bytes = count > 0 ? (size_t)count : 0;
        if (count > 0)
            output_answered(launcher->output);
        launcher->typed_written = 0;
    }
    ssize_t wrote = write(launcher->relay, launcher->typed + launcher->typed_written,
                          launcher->typed_bytes - launcher->typed_written);
    launcher->relay_full = wrote < 0 && errno == EAGAIN;
    if (wrote < 0 && !launcher->relay_full) { /* rank 0 reads no more */
        close(launcher->relay);
        launcher->relay = -1;
        return;
    }
    launcher->typed_written += wrote > 0 ? (size_t)wrote : 0;
    launcher->relay_full = launcher->typed_written < launcher->typed_bytes;
    if (!launcher->relay_full)
        launcher->typed_bytes = 0;
}

bool run_may_read_terminal(void) {
    return tcgetpgrp(0) == getpgrp();
}

static void take_signals(run_launcher *launcher) {
    struct signalfd_siginfo signal;
    while (read(launcher->signals, &signal, sizeof signal) == sizeof signal) {
        int number = (int)signal.ssi_signo;
        if (number == SIGCHLD)
            continue; /* the socket tells when the guardian is gone */
        bool ends = run_ends(number);
        if (ends && launcher->ended_by == 0) {
            launcher->ended_by = number;
            launcher->from_terminal = signal.ssi_code == SI_KERNEL;
        } else if (ends && launcher->ended_by == number) {
            launcher->ended_twice = true;
        }
        launcher->ending |= ends;
        if (launcher->agent != NULL) /* first: then it knows why ranks end */
            agent_signal(launcher->agent, number);
        (void)send(launcher->socket, &number, sizeof number, MSG_NOSIGNAL);
        if (launcher->agent == NULL &&
            number == SIGTSTP) /* over several hosts a launcher that stands still would be given up */
            raise(SIGSTOP);
    }
}

bool run_held_up(void *argument) {
    run_launcher *launcher = argument;
    siginfo_t gone = { 0 };
    take_signals(launcher);
    if (!launcher->ending || waitid(P_PID, (id_t)launcher->guardian, &gone, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        gone.si_pid == 0)
        return false;
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (int descriptor = 1; descriptor <= 2; descriptor++) /* our own words would be held up next */
        if (nowhere >= 0 && poll(&(struct pollfd){ .fd = descriptor, .events = POLLOUT }, 1, 0) == 0)
            dup2(nowhere, descriptor);
    if (nowhere >= 0)
        close(nowhere);
    return true;
}

static bool own_done(const run_launcher *launcher) {
    return atomic_load_explicit(&launcher->state->done, memory_order_acquire) != 0;
}

/* On this host and on all others. */
static bool all_done(const run_launcher *launcher) {
    int status;
    return own_done(launcher) && (launcher->agent == NULL || agent_finished(launcher->agent, &status));
}

bool run_relay_everything(run_launcher *launcher) {
    struct pollfd *polled = calloc((size_t)(2 * launcher->options.ranks + 4), sizeof *polled);
    bool lost = polled == NULL;
    while (!lost && !all_done(launcher)) {
        polled[0] = (struct pollfd){ .fd = own_done(launcher) ? -1 : launcher->socket, .events = POLLIN };
        polled[1] = (struct pollfd){ .fd = launcher->signals, .events = POLLIN };
        bool terminal = launcher->relay >= 0 && run_may_read_terminal();
        polled[2] = launcher->relay_full ? (struct pollfd){ .fd = launcher->relay, .events = POLLOUT }
                                         : (struct pollfd){ .fd = terminal ? 0 : -1, .events = POLLIN };
        polled[3] =
            (struct pollfd){ .fd = launcher->agent != NULL ? agent_events(launcher->agent) : -1, .events = POLLIN };
        int streams = output_poll(launcher->output, polled + 4);
        int timeout = output_timeout(launcher->output);
        if (launcher->relay >= 0 && !terminal && (timeout < 0 || timeout > 500))
            timeout = 500; /* look whether we have come to the foreground */
        poll(polled, (nfds_t)(4 + streams), timeout);
        if (polled[1].revents != 0)
            take_signals(launcher);
        output_read(launcher->output, polled + 4, streams);
        output_show_prompts(launcher->output);
        if (polled[2].revents != 0)
            relay_input(launcher);
        char news[16];
        if (polled[0].revents != 0) {
            while (recv(launcher->socket, news, sizeof news, MSG_DONTWAIT) > 0)
                continue;
            lost = (polled[0].revents & POLLHUP) != 0 && !own_done(launcher);
        }
        if (atomic_load_explicit(&launcher->state->start_error, memory_order_acquire) == 0)
            tell_news(launcher);
    }
    free(polled);
    return !lost;
}

static int exit_status(const run_launcher *launcher) {
    int job_status;
    if (launcher->agent != NULL)
        return agent_finished(launcher->agent, &job_status) ? job_status : 1;
    uint32_t first = atomic_load_explicit(&launcher->state->first_failure, memory_order_acquire);
    if (first == 0)
        return 0;
    for (int rank = 0; launcher->options.survive && rank < launcher->options.ranks; rank++)
        if (status_of(launcher, rank) == 0)
            return 0;
    int status = status_of(launcher, (int)first - 1);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* Whether this job left flight recorders, by the guardian or by its ranks (TUTTI_TRACE_DIR). */
static bool wrote_recorders(const run_launcher *launcher) {
    DIR *folder = launcher->log_dir != NULL ? opendir(launcher->log_dir) : NULL;
    struct dirent *entry;
    bool found = false;
    while (folder != NULL && !found && (entry = readdir(folder)) != NULL) {
        struct stat file;
        found = strncmp(entry->d_name, "tutti-", 6) == 0 && strstr(entry->d_name, "-rank-") != NULL &&
                fstatat(dirfd(folder), entry->d_name, &file, 0) == 0 && file.st_mtime >= launcher->began;
    }
    if (folder != NULL)
        closedir(folder);
    return found;
}

int run_finish(run_launcher *launcher, bool guarded) {
    int guardian_status = 0;
    waitpid(launcher->guardian, &guardian_status, 0);
    if (!guarded) {
        kill_descendants(); /* the ranks died with the guardian; what they had started is ours now */
        output_drain(launcher->output, -1);
        char text[128];
        tool_wait_text(guardian_status, text, sizeof text);
        return tool_fail("run: the guardian process (pid %d) %s; all ranks were stopped", launcher->guardian, text) +
               127;
    }
    output_drain(launcher->output, -1);
    int error = atomic_load_explicit(&launcher->state->start_error, memory_order_acquire);
    if (error != 0 && launcher->agent == NULL) {
        fprintf(stderr, "tutti run: cannot start rank %d (%s): %s\n", atomic_load(&launcher->state->start_rank),
                launcher->plan.path, strerror(error));
        return error == ENOENT ? NOT_FOUND : NOT_EXECUTABLE;
    }
    tell_news(launcher);
    uint32_t left_over = atomic_load_explicit(&launcher->state->left_over, memory_order_relaxed);
    if (!launcher->options.quiet) {
        if (!launcher->silent)
            tell_others(launcher);
        if (left_over > 0)
            fprintf(stderr, "tutti run: killed %u process%s that the ranks had left behind\n", left_over,
                    left_over == 1 ? "" : "es");
        if (exit_status(launcher) != 0 && wrote_recorders(launcher))
            fprintf(stderr, "tutti run: \"tutti trace %s\" shows what the ranks did\n", launcher->options.log_dir);
    }
    return exit_status(launcher);
}
