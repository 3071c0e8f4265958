/* SPDX-License-Identifier: Apache-2.0
 *
 * tutti_spawn: several ranks from one program, as threads or as forked processes.
 *
 * Each rank finds a launch record in its thread (and, in a forked process, in the process), which tutti_world_open
 * reads before any environment. Threads meet in a memory store, processes at a Unix socket that the parent serves. The
 * parent reaps, publishes wait statuses to the survivors, and hears each rank's last error over a pipe.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "job/liveness.h"
#include "world/launch.h"
#include "world/list.h"

static _Thread_local const tu_spawn_record *thread_record;
static const tu_spawn_record *process_record; /* set once, in a forked rank, before it has a second thread */

const tu_spawn_record *tu_spawn_current(void) {
    return thread_record != NULL ? thread_record : process_record;
}

#define PATIENCE (2 * TU_SECOND) /* with ranks that go on, or are stopped, when others have failed */
#define LOOK_MS 100              /* milliseconds between two looks at such ranks */

/* How a rank ended. */
typedef struct outcome {
    tutti_status status;
    bool died;    /* without returning from its main */
    bool stopped; /* and was ended by tutti_spawn */
    bool ended;   /* the rest is complete */
    int order;    /* the how-manieth failure, from 1; 0: none */
    tutti_error_copy error;
} outcome;

/* ---- one rank, in its thread or process ---- */

/* Closes what the rank left open: properly after a success, as dead after a failure. */
static tutti_status close_left_open(const tu_spawn_record *record, tutti_status status) {
    for (tutti_world *world; (world = tu_worlds_of(record)) != NULL;) {
        if (status != TUTTI_OK) {
            tutti_error_copy error;
            tu_error_save(&error);
            char why[1024];
            snprintf(why, sizeof why, "failed: %.1000s", error.message);
            tu_job_mark_dead(world->job, why);
            (void)!tutti_world_close(world); /* its complaint would hide the rank's own error */
            tu_error_restore(&error);
        } else {
            status = tutti_world_close(world);
        }
    }
    return status;
}

tutti_status tu_rank_run(const tu_spawn_record *record, tutti_rank_main *main, void *argument) {
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK) {
        if (record != NULL && record->store != NULL) /* of a process its parent tells */
            tu_launch_cannot_meet(record->store, record->rank, record->size, (int)getpid());
        return status;
    }
    tutti_error_clear();
    status = main(world, argument);
    if (status != TUTTI_OK && tutti_error_message()[0] == 0)
        tu_error(status, "its main returned %s", tutti_status_name(status));
    return close_left_open(record, status);
}

/* ---- which failure to return ---- */

/* Of what was only a consequence of another rank's end. */
static bool consequence(tutti_status status) {
    return status == TUTTI_ERROR_DEAD || status == TUTTI_ERROR_GONE || status == TUTTI_ERROR_ABORTED;
}

/* A rank that died comes first, then a failure of its own making; last what followed from another's end. */
static int weight(const outcome *outcome) {
    return outcome->stopped || (!outcome->died && consequence(outcome->status)) ? 2 : outcome->died ? 0 : 1;
}

static tutti_status first_failure(const outcome *outcomes, int ranks) {
    const outcome *first = NULL;
    int first_rank = -1;
    for (int rank = 0; rank < ranks; rank++) {
        const outcome *one = &outcomes[rank];
        if (one->order == 0)
            continue;
        if (first == NULL || weight(one) < weight(first) ||
            (weight(one) == weight(first) && one->order < first->order)) {
            first = one;
            first_rank = rank;
        }
    }
    if (first == NULL)
        return TUTTI_OK;
    tu_error_restore(&first->error);
    tutti_error_copy whole = first->error;
    if (!first->died) {
        snprintf(whole.message, sizeof whole.message, "rank %d: %.*s", first_rank, (int)sizeof whole.message - 32,
                 first->error.message);
        whole.info.status = first->status;
        tu_error_restore(&whole);
    }
    return first->status;
}

/* Ranks that go on when others have failed may be right to, having shrunk their group, or be lost in code of their own:
 * nobody here can tell. So they are waited for, and whoever waits for them is told why. */
static void tell_of_the_others(const outcome *outcomes, int ranks) {
    char left[128] = "";
    int first = -1, shown = 0, count = 0;
    for (int rank = 0; rank < ranks; rank++) {
        if (outcomes[rank].ended) {
            first = outcomes[rank].order == 1 ? rank : first;
            continue;
        }
        size_t used = strlen(left);
        if (count++ < 8) {
            snprintf(left + used, sizeof left - used, "%s%d", used > 0 ? ", " : "", rank);
            shown++;
        }
    }
    if (first < 0 || count == 0)
        return;
    TU_LOG(TUTTI_LOG_WARN, NULL, "world",
           "tutti_spawn: rank %d has failed: %s. Rank%s %s%s %s not ended: waiting for %s", first,
           outcomes[first].error.message, count > 1 ? "s" : "", left, count > shown ? " and others" : "",
           count > 1 ? "have" : "has", count > 1 ? "them" : "it");
}

/* ---- threads ---- */

typedef struct crew {
    tutti_rank_main *main;
    void *argument;
    pthread_mutex_t lock;
    pthread_cond_t opened;
    enum {
        GATE_CLOSED,
        GATE_OPEN,
        GATE_CANCELLED
    } gate;              /* nobody starts before all threads exist; under lock */
    int failures, ended; /* so far, under lock */
    pthread_cond_t one_ended;
} crew;

typedef struct sailor {
    crew *crew;
    tu_spawn_record record;
    outcome *outcome; /* its end is told under the crew's lock */
    pthread_t thread;
    bool returned;
} sailor;

/* Also runs when the rank's main ends its thread by pthread_exit. */
static void thread_ended(void *argument) {
    sailor *sailor = argument;
    if (!sailor->returned) {
        tu_error(TUTTI_ERROR_DEAD, "rank %d ended its thread without returning from its main", sailor->record.rank);
        sailor->outcome->status = close_left_open(&sailor->record, TUTTI_ERROR_DEAD);
        sailor->outcome->died = true;
    }
    if (sailor->outcome->status != TUTTI_OK)
        tu_error_save(&sailor->outcome->error);
    pthread_mutex_lock(&sailor->crew->lock);
    if (sailor->outcome->status != TUTTI_OK)
        sailor->outcome->order = ++sailor->crew->failures;
    sailor->outcome->ended = true;
    sailor->crew->ended++;
    pthread_cond_signal(&sailor->crew->one_ended);
    pthread_mutex_unlock(&sailor->crew->lock);
    thread_record = NULL;
}

static bool pass_gate(crew *crew) {
    pthread_mutex_lock(&crew->lock);
    while (crew->gate == GATE_CLOSED)
        pthread_cond_wait(&crew->opened, &crew->lock);
    bool open = crew->gate == GATE_OPEN;
    pthread_mutex_unlock(&crew->lock);
    return open;
}

static void *thread_main(void *argument) {
    sailor *sailor = argument;
    if (!pass_gate(sailor->crew))
        return NULL;
    char name[16];
    snprintf(name, sizeof name, "rank %d", sailor->record.rank);
    pthread_setname_np(pthread_self(), name);
    thread_record = &sailor->record;
    pthread_cleanup_push(thread_ended, sailor);
    sailor->outcome->status = tu_rank_run(&sailor->record, sailor->crew->main, sailor->crew->argument);
    sailor->returned = true;
    pthread_cleanup_pop(1);
    return NULL;
}

/* Starts all, or none. */
static tutti_status start_threads(crew *crew, sailor *sailors, int ranks) {
    tutti_status status = TUTTI_OK;
    int started = 0;
    for (; started < ranks; started++) {
        int failed = pthread_create(&sailors[started].thread, NULL, thread_main, &sailors[started]);
        if (failed != 0) {
            status = tu_error_system(failed, "the thread of rank %d of %d cannot be started", started, ranks);
            break;
        }
    }
    pthread_mutex_lock(&crew->lock);
    crew->gate = status == TUTTI_OK ? GATE_OPEN : GATE_CANCELLED;
    pthread_cond_broadcast(&crew->opened);
    pthread_mutex_unlock(&crew->lock);
    for (int rank = 0; rank < started && status != TUTTI_OK; rank++)
        pthread_join(sailors[rank].thread, NULL);
    return status;
}

/* Returns when all have ended. */
static void watch_threads(crew *crew, const outcome *outcomes, int ranks) {
    int64_t tell_at = 0; /* 0: nobody has failed; INT64_MAX: it was told */
    pthread_mutex_lock(&crew->lock);
    while (crew->ended < ranks) {
        if (crew->failures == 0 || tell_at == INT64_MAX) {
            pthread_cond_wait(&crew->one_ended, &crew->lock);
            continue;
        }
        tell_at = tell_at == 0 ? tu_clock_now() + PATIENCE : tell_at;
        int64_t left = tell_at - tu_clock_now();
        if (left <= 0) {
            tell_of_the_others(outcomes, ranks);
            tell_at = INT64_MAX;
            continue;
        }
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += left / TU_SECOND + 1; /* a little late does no harm */
        (void)pthread_cond_timedwait(&crew->one_ended, &crew->lock, &until);
    }
    pthread_mutex_unlock(&crew->lock);
}

static tutti_status spawn_threads(int ranks, tutti_rank_main *main, void *argument) {
    tutti_store *store;
    tutti_status status = tutti_store_open_memory(&store);
    if (status != TUTTI_OK)
        return status;
    crew crew = { .main = main,
                  .argument = argument,
                  .lock = PTHREAD_MUTEX_INITIALIZER,
                  .opened = PTHREAD_COND_INITIALIZER,
                  .one_ended = PTHREAD_COND_INITIALIZER };
    sailor *sailors = calloc((size_t)ranks, sizeof *sailors);
    outcome *outcomes = calloc((size_t)ranks, sizeof *outcomes);
    if (sailors == NULL || outcomes == NULL) {
        status = tu_error_memory("the ranks of tutti_spawn", (size_t)ranks * (sizeof *sailors + sizeof *outcomes));
        goto free_sailors;
    }
    for (int rank = 0; rank < ranks; rank++) {
        sailors[rank].crew = &crew;
        sailors[rank].outcome = &outcomes[rank];
        sailors[rank].record = (tu_spawn_record){ .rank = rank, .size = ranks, .store = store };
    }
    status = start_threads(&crew, sailors, ranks);
    if (status == TUTTI_OK) {
        watch_threads(&crew, outcomes, ranks);
        for (int rank = 0; rank < ranks; rank++)
            pthread_join(sailors[rank].thread, NULL);
        status = first_failure(outcomes, ranks);
    }
free_sailors:
    free(outcomes);
    free(sailors);
    tutti_store_release(store);
    return status;
}

/* ---- processes ---- */

typedef struct child {
    pid_t pid;
    int result;    /* pipe: its outcome, read end; -1 closed */
    int pidfd;     /* -1: ended and reaped */
    bool put_down; /* it was stopped, and killed for that */
} child;

/* What a child writes when its main has returned. */
typedef struct report {
    tutti_status status;
    tutti_error_copy error;
} report;

static tutti_status refuse_fork(void) {
    char names[256];
    if (tu_worlds_open(names) > 0)
        return tu_error(
            TUTTI_ERROR_STATE,
            "tutti_spawn cannot fork while a world is open in this process (%s): close it first, or spawn threads",
            names);
    /* cuDeviceGetCount succeeds only after cuInit; a process forked after that cannot use the driver. */
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (cuda == NULL)
        return TUTTI_OK;
    int count;
    int (*get_count)(int *);
    *(void **)&get_count = dlsym(cuda, "cuDeviceGetCount");
    bool initialised = get_count != NULL && get_count(&count) == 0;
    dlclose(cuda);
    return initialised
               ? tu_error(TUTTI_ERROR_STATE,
                          "tutti_spawn cannot fork after CUDA was initialised in this process: call it before the "
                          "first use of CUDA, or spawn threads")
               : TUTTI_OK;
}

/* A rank's process. `go` is at end-of-file when the parent gave up. */
static _Noreturn void child_main(int rank, int ranks, const char *url, int go, int result, pid_t parent,
                                 tutti_rank_main *main, void *argument) {
    static tu_spawn_record record; /* outlives this frame, for other threads of the rank */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char byte;
    ssize_t got;
    while ((got = read(go, &byte, 1)) < 0 && errno == EINTR)
        ;
    if (got != 1 || getppid() != parent)
        _exit(1);
    close(go);
    record = (tu_spawn_record){ .rank = rank, .size = ranks };
    snprintf(record.url, sizeof record.url, "%s", url);
    process_record = &record;
    report report = { .status = tu_rank_run(&record, main, argument) };
    tu_error_save(&report.error);
    const char *from = (const char *)&report;
    for (size_t left = sizeof report; left > 0;) {
        ssize_t written = write(result, from, left);
        if (written < 0 && errno != EINTR)
            break;
        from += written > 0 ? written : 0;
        left -= written > 0 ? (size_t)written : 0;
    }
    fflush(NULL);
    _exit(report.status == TUTTI_OK ? 0 : 1);
}

static int open_pidfd(pid_t pid) {
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void reap_all(child *children, int count) {
    for (int i = 0; i < count; i++) {
        while (waitpid(children[i].pid, NULL, 0) < 0 && errno == EINTR)
            ;
        close_fd(&children[i].result);
        close_fd(&children[i].pidfd);
    }
}

/* Forks all ranks; each waits for a byte on `go`. After a failure nobody is left. */
static tutti_status fork_all(child *children, int ranks, const char *url, int go[2], tutti_rank_main *main,
                             void *argument) {
    pid_t parent = getpid();
    tutti_status status = TUTTI_OK;
    int forked = 0;
    for (; forked < ranks && status == TUTTI_OK; forked++) {
        int result[2];
        if (pipe2(result, O_CLOEXEC) != 0) {
            status = tu_error_system(errno, "a pipe for rank %d of %d cannot be made", forked, ranks);
            break;
        }
        /* Read only when the rank has ended: what it wrote is there, and a child of its own that lives on, and holds
         * the other end, is not waited for. */
        (void)fcntl(result[0], F_SETFL, O_NONBLOCK);
        pid_t pid = fork();
        if (pid == 0) {
            close(go[1]);
            close(result[0]);
            for (int i = 0; i < forked; i++) {
                close(children[i].result);
                close(children[i].pidfd);
            }
            child_main(forked, ranks, url, go[0], result[1], parent, main, argument);
        }
        int fork_error = errno;
        close(result[1]);
        if (pid < 0) {
            close(result[0]);
            status = tu_error_system(fork_error,
                                     "rank %d of %d cannot be forked (processes of a user are limited by RLIMIT_NPROC, "
                                     "and by the cgroup's pids.max)",
                                     forked, ranks);
            break;
        }
        children[forked] = (child){ .pid = pid, .result = result[0], .pidfd = open_pidfd(pid) };
        if (children[forked].pidfd < 0)
            status = tu_error_system(errno, "the process of rank %d cannot be watched (pidfd_open)", forked);
    }
    if (status != TUTTI_OK) {
        close_fd(&go[1]);
        reap_all(children, forked);
    }
    return status;
}

/* The report of a child whose process has ended, or what its wait status says. */
static void take_outcome(child *child, int rank, int wait_status, outcome *outcome) {
    report report;
    size_t got = 0;
    for (ssize_t bytes; got < sizeof report; got += (size_t)bytes) {
        bytes = read(child->result, (char *)&report + got, sizeof report - got);
        if (bytes < 0 && errno == EINTR)
            bytes = 0;
        else if (bytes <= 0)
            break;
    }
    if (got == sizeof report && WIFEXITED(wait_status)) {
        outcome->status = report.status;
        outcome->error = report.error;
        return;
    }
    outcome->stopped = child->put_down;
    if (child->put_down)
        tu_error(TUTTI_ERROR_DEAD,
                 "rank %d (pid %d) was stopped by a signal while others had failed, and was therefore killed", rank,
                 (int)child->pid);
    else if (WIFSIGNALED(wait_status))
        tu_error(TUTTI_ERROR_DEAD, "rank %d (pid %d) was killed by signal %d (%s)", rank, (int)child->pid,
                 WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)));
    else
        tu_error(TUTTI_ERROR_DEAD, "rank %d (pid %d) exited with status %d before its main returned", rank,
                 (int)child->pid, WEXITSTATUS(wait_status));
    tu_error_at_fault(rank);
    tu_error_save(&outcome->error);
    outcome->status = TUTTI_ERROR_DEAD;
    outcome->died = true;
}

/* A rank failed: those that still wait for it in the store learn of it there. */
static void tell_who_opens(tutti_store *server, const child *child, int rank, int ranks, const outcome *outcome) {
    tutti_store *store;
    if (server == NULL || tutti_store_clone(server, &store) != TUTTI_OK)
        return;
    tu_error_restore(&outcome->error);
    tu_launch_cannot_meet(store, rank, ranks, (int)child->pid);
    tutti_store_release(store);
}

/* One child's process has ended: reap it, tell the survivors. */
static void child_ended(child *children, int ranks, int rank, tutti_store *server, outcome *outcome) {
    int wait_status;
    pid_t got;
    while ((got = waitpid(children[rank].pid, &wait_status, 0)) < 0 && errno == EINTR)
        ;
    if (got < 0) /* the program ignores SIGCHLD: the kernel reaped it without a word */
        wait_status = 0;
    close_fd(&children[rank].pidfd);
    take_outcome(&children[rank], rank, wait_status, outcome);
    close_fd(&children[rank].result);
    if (outcome->status != TUTTI_OK)
        tell_who_opens(server, &children[rank], rank, ranks, outcome);
    if (!outcome->died)
        return; /* it has closed its world: nobody asks for its status */
    int *survivors = malloc(sizeof(int) * (size_t)ranks);
    int count = 0;
    for (int i = 0; i < ranks && survivors != NULL; i++)
        if (children[i].pidfd >= 0)
            survivors[count++] = (int)children[i].pid;
    if (count > 0)
        tu_death_publish((int)children[rank].pid, wait_status, survivors, count);
    free(survivors);
}

static bool is_stopped(const child *child) {
    siginfo_t info = { 0 };
    return waitid(P_PID, (id_t)child->pid, &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child->pid;
}

/* When others have failed and all that is left stands still, nothing will ever end it: after a while it is killed. One
 * under a debugger is left alone. *since: when this was first seen; 0: it is not so. */
static void put_down_stopped(child *children, int ranks, int64_t *since) {
    for (int i = 0; i < ranks; i++)
        if (children[i].pidfd >= 0 && !is_stopped(&children[i])) {
            *since = 0;
            return;
        }
    if (*since == 0)
        *since = tu_clock_now();
    if (tu_clock_now() - *since < PATIENCE)
        return;
    for (int i = 0; i < ranks; i++)
        if (children[i].pidfd >= 0) {
            children[i].put_down = true;
            kill(children[i].pid, SIGKILL);
        }
}

/* Returns when all have ended. A report is read when its process has ended: the pipe has room for it. */
static void watch(child *children, int ranks, tutti_store *server, outcome *outcomes) {
    struct pollfd *polls = malloc(sizeof *polls * (size_t)ranks);
    int left = ranks, failures = 0;
    int64_t stopped_since = 0, tell_at = INT64_MAX;
    while (left > 0) {
        for (int i = 0; i < ranks && polls != NULL; i++)
            polls[i] = (struct pollfd){ .fd = children[i].pidfd, .events = POLLIN };
        if (failures > 0)
            put_down_stopped(children, ranks, &stopped_since);
        if (tu_clock_now() >= tell_at) {
            tell_of_the_others(outcomes, ranks);
            tell_at = INT64_MAX;
        }
        if (polls != NULL && poll(polls, (nfds_t)ranks, failures > 0 ? LOOK_MS : -1) < 0)
            continue;
        for (int i = 0; i < ranks; i++) {
            if (children[i].pidfd < 0 || (polls != NULL && (polls[i].revents & POLLIN) == 0))
                continue;
            child_ended(children, ranks, i, server, &outcomes[i]);
            if (outcomes[i].status != TUTTI_OK)
                outcomes[i].order = ++failures;
            outcomes[i].ended = true;
            if (outcomes[i].order == 1)
                tell_at = tu_clock_now() + PATIENCE;
            left--;
        }
    }
    free(polls);
}

static tutti_status spawn_processes(int ranks, tutti_rank_main *main, void *argument) {
    tutti_status status = refuse_fork();
    if (status != TUTTI_OK)
        return status;
    child *children = calloc((size_t)ranks, sizeof *children);
    outcome *outcomes = calloc((size_t)ranks, sizeof *outcomes);
    int go[2] = { -1, -1 };
    tutti_store *server = NULL;
    unsigned long long nonce[2];
    char url[128];
    if (children == NULL || outcomes == NULL) {
        status = tu_error_memory("the ranks of tutti_spawn", (size_t)ranks * (sizeof *children + sizeof *outcomes));
        goto free_children;
    }
    if (getrandom(nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce || pipe2(go, O_CLOEXEC) != 0) {
        status = tu_error_system(errno, "tutti_spawn cannot prepare %d processes", ranks);
        goto free_children;
    }
    snprintf(url, sizeof url, "unix:@tutti-spawn-%016llx%016llx", nonce[0], nonce[1]);
    fflush(NULL); /* or each child would write what is buffered once more */
    status = fork_all(children, ranks, url, go, main, argument);
    if (status != TUTTI_OK)
        goto close_go;
    /* Served only now, so that the children inherit neither its thread nor its sockets. */
    status = ranks > 1 ? tutti_store_serve(url, 0, NULL, &server) : TUTTI_OK;
    for (int i = 0; i < ranks && status == TUTTI_OK; i++)
        if (write(go[1], "", 1) != 1)
            status = tu_error_system(errno, "rank %d cannot be started", i);
    if (status != TUTTI_OK) {
        close_fd(&go[1]);
        for (int i = 0; i < ranks; i++)
            kill(children[i].pid, SIGKILL);
        tutti_error_copy error;
        tu_error_save(&error);
        reap_all(children, ranks);
        tu_error_restore(&error);
        goto release_server;
    }
    watch(children, ranks, server, outcomes);
    status = first_failure(outcomes, ranks);

release_server:
    tutti_store_release(server);
close_go:
    close_fd(&go[0]);
    close_fd(&go[1]);
free_children:
    free(outcomes);
    free(children);
    return status;
}

tutti_status tutti_spawn(tutti_spawn_kind kind, int ranks, tutti_rank_main *main, void *argument) {
    if (ranks <= 0 || main == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_spawn: %d ranks%s; it needs at least one rank, and a main", ranks,
                        main == NULL ? " and main is NULL" : "");
    if (kind == TUTTI_SPAWN_THREADS)
        return spawn_threads(ranks, main, argument);
    if (kind == TUTTI_SPAWN_PROCESSES)
        return spawn_processes(ranks, main, argument);
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "tutti_spawn: kind %d is neither TUTTI_SPAWN_THREADS nor TUTTI_SPAWN_PROCESSES", (int)kind);
}
