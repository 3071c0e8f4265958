/* SPDX-License-Identifier: Apache-2.0
 *
 * The guardian of `tutti run`: starts the ranks, sees every end, and lets nothing outlive the job.
 *
 * It never writes to the user: the launcher may be held up by a full pipe, and then the guardian must go on. It tells
 * what happened through memory that both share.
 *
 * Who failed first? Ranks learn of a death in a fraction of a millisecond and may end before the kernel has torn down
 * the dead one's memory, so the first to be reaped need not be the first to fail. While a rank that has not been reaped
 * is on its way out, the decision waits (at most DECIDE_NS); then a rank whose recorder says that it only suffered
 * another's death counts last, one that was killed by a signal counts before one that exited, and the order of ends
 * decides the rest.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "hosts/news.h"
#include "job/dump.h"
#include "job/inspect.h"
#include "job/recorder.h"
#include "run.h"

#define DECIDE_NS (30 * TU_SECOND) /* tearing down memory takes as long as a busy machine lets it */
#define LOOK_AGAIN_NS (5 * TU_MILLISECOND)
#define PUBLISH_LATER_NS (5 * TU_MILLISECOND)
/* How often new worlds are looked for, when recorders may have to be written: soon at first, then less and less
 * often. */
#define FIND_FIRST_NS (5 * TU_MILLISECOND)
#define FIND_LAST_NS (200 * TU_MILLISECOND)
#define TWICE_NS (1 * TU_SECOND) /* the same signal twice within this kills */
#define NEVER INT64_MAX

typedef struct guardian {
    const run_plan *plan;
    run_state *state;
    int ranks;
    int running;
    uint32_t ends;
    int launcher;      /* socket */
    int children;      /* signalfd of SIGCHLD */
    tu_job_list jobs;  /* of the ranks, mapped for publishing */
    bool *unpublished; /* [rank]: ended, and its status is in no slot yet */
    int64_t publish_at, decide_by, look_at, terminate_at, kill_at, find_at, find_every;
    int64_t listen_at; /* when to look next whether the launcher lives; NEVER on one host */
    int silences;      /* looks in a row that found it silent: one may be late itself */
    int last_signal;
    int64_t last_signal_at;
    int refills; /* newcomers started so far */
    bool ending; /* the user wants the job to end: nobody is started any more */
} guardian;

/* ---- starting ---- */

typedef struct start {
    const run_plan *plan;
    int rank;
    int secret, news;
    pid_t guardian;
    int error; /* written by the child: it shares our memory until it has called exec */
} start;

/* A script without "#!" is run by the shell, as execvp does. */
static void exec_as_script(const run_plan *plan) {
    size_t count = 0;
    while (plan->options->program[count] != NULL)
        count++;
    char *arguments[count + 2];
    arguments[0] = (char *)"sh";
    arguments[1] = (char *)plan->path;
    for (size_t i = 1; i <= count; i++)
        arguments[i + 1] = plan->options->program[i];
    execve("/bin/sh", arguments, plan->environment);
}

/* Runs in the child, on a stack of its own, in the guardian's memory, while the guardian waits. */
static int start_child(void *argument) {
    start *s = argument;
    const run_plan *plan = s->plan;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != s->guardian)
        _exit(127);
    setpgid(0, 0); /* so that a signal reaches the rank and what it started, once */
    bool reads = s->rank + plan->options->first_rank == 0;
    if (dup2(reads ? plan->input : open("/dev/null", O_RDONLY | O_CLOEXEC), 0) < 0 ||
        dup2(plan->pipes[2 * s->rank][1], 1) < 0 || dup2(plan->pipes[2 * s->rank + 1][1], 2) < 0 ||
        (s->secret >= 0 && dup2(s->secret, RUN_SECRET_FD) < 0) || (s->news >= 0 && dup2(s->news, RUN_NEWS_FD) < 0))
        goto failed;
    if (plan->bindings != NULL &&
        sched_setaffinity(0, sizeof plan->bindings->cpus, (const cpu_set_t *)plan->bindings[s->rank].cpus) != 0)
        goto failed;
    sigprocmask(SIG_SETMASK, plan->signals, NULL);
    execve(plan->path, plan->options->program, plan->environment);
    if (errno == ENOEXEC)
        exec_as_script(plan);
failed:
    s->error = errno;
    _exit(127);
}

/* An own description of the secret, so that every rank reads it from its beginning, and of the news, so that no rank
 * can write them. Above the descriptors that ranks inherit. */
static int open_again(int descriptor) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    int low = descriptor < 0 ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (low < 0)
        return -1;
    int high = fcntl(low, F_DUPFD_CLOEXEC, RUN_NEWS_FD + 1);
    close(low);
    return high;
}

/* newcomer: the how-manieth to take a dead one's place; 0: the first of this rank. Returns the pid, or -1 with errno.
 * The child borrows our memory until exec, which is quicker than copying it. */
static pid_t start_rank(const run_plan *plan, int rank, unsigned newcomer) {
    static const char *const names[4] = { "RANK", "LOCAL_RANK", "TUTTI_RANK", "TUTTI_LOCAL_RANK" };
    static _Alignas(16) char stack[256 << 10];
    for (int i = 0; i < 4; i++)
        sprintf(plan->rank_variables[i], "%s=%d", names[i], rank + (i % 2 == 0 ? plan->options->first_rank : 0));
    if (plan->refill_variable != NULL)
        sprintf(plan->refill_variable, "TUTTI_REFILL=%u", newcomer);
    start s = { plan, rank, open_again(plan->secret), open_again(plan->news), getpid(), 0 };
    if ((plan->secret >= 0 && s.secret < 0) || (plan->news >= 0 && s.news < 0))
        return -1;
    pid_t pid = clone(start_child, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &s);
    int error = pid < 0 ? errno : s.error;
    if (s.secret >= 0)
        close(s.secret);
    if (s.news >= 0)
        close(s.news);
    if (pid > 0 && error != 0)
        waitpid(pid, NULL, 0);
    errno = error;
    return error != 0 ? -1 : pid;
}

static void wake_launcher(const guardian *guardian) {
    (void)send(guardian->launcher, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL); /* full: it has been woken already */
    if (guardian->plan->woken >= 0)
        (void)!write(guardian->plan->woken, &(uint64_t){ 1 }, sizeof(uint64_t));
}

static bool start_all(guardian *guardian) {
    for (int rank = 0; rank < guardian->ranks; rank++) {
        pid_t pid = start_rank(guardian->plan, rank, 0);
        if (pid < 0) {
            atomic_store_explicit(&guardian->state->start_rank, rank, memory_order_relaxed);
            atomic_store_explicit(&guardian->state->start_error, errno, memory_order_release);
            return false;
        }
        atomic_store_explicit(&guardian->state->ranks[rank].pid, pid, memory_order_release);
        guardian->running++;
    }
    return true;
}

/* ---- looking at ranks ---- */

static int pid_of(const guardian *guardian, int rank) {
    return atomic_load_explicit(&guardian->state->ranks[rank].pid, memory_order_relaxed);
}

static bool ended(const guardian *guardian, int rank) {
    return atomic_load_explicit(&guardian->state->ranks[rank].ended, memory_order_relaxed) != 0;
}

static bool failed(const guardian *guardian, int rank) {
    return ended(guardian, rank) &&
           atomic_load_explicit(&guardian->state->ranks[rank].wait_status, memory_order_relaxed) != 0;
}

/* The recorder says that this rank's last operation failed because of somebody else. */
static bool suffered(const guardian *guardian, int rank) {
    for (size_t i = 0; i < guardian->jobs.count; i++) {
        const tu_job_view *job = &guardian->jobs.jobs[i];
        for (int slot = 0; slot < job->size; slot++) {
            tu_record_view view;
            tu_recorder recorder = tu_page_recorder(job->page, job->bytes, job->size, slot);
            if (tu_page_slot(job->page, slot)->pid == pid_of(guardian, rank) &&
                tu_recorder_entry(&recorder, 0, &view) && !view.running &&
                (view.status == TUTTI_ERROR_DEAD || view.status == TUTTI_ERROR_GONE ||
                 view.status == TUTTI_ERROR_ABORTED))
                return true;
        }
    }
    return false;
}

static bool anybody_leaving(const guardian *guardian) {
    for (int rank = 0; rank < guardian->ranks; rank++) {
        tu_process_view view;
        if (!ended(guardian, rank) && tu_process_look(pid_of(guardian, rank), &view) && view.exiting)
            return true;
    }
    return false;
}

/* Smaller is earlier; see the top of this file. */
static uint64_t blame(const guardian *guardian, int rank) {
    bool killed = WIFSIGNALED(atomic_load_explicit(&guardian->state->ranks[rank].wait_status, memory_order_relaxed));
    uint32_t order = atomic_load_explicit(&guardian->state->ranks[rank].ended, memory_order_relaxed);
    return (uint64_t)suffered(guardian, rank) << 41 | (uint64_t)!killed << 40 | order;
}

static void decide_first(guardian *guardian) {
    int first = -1;
    for (int rank = 0; rank < guardian->ranks; rank++)
        if (failed(guardian, rank) && (first < 0 || blame(guardian, rank) < blame(guardian, first)))
            first = rank;
    guardian->decide_by = guardian->look_at = NEVER;
    if (!guardian->plan->options->survive && guardian->terminate_at == NEVER) /* not before it is known why */
        guardian->terminate_at = tu_deadline(guardian->plan->options->grace_ns);
    atomic_store_explicit(&guardian->state->first_suffered, first >= 0 && suffered(guardian, first),
                          memory_order_relaxed);
    atomic_store_explicit(&guardian->state->first_failure, (uint32_t)first + 1, memory_order_release);
    wake_launcher(guardian);
}

/* ---- publishing ---- */

/* Finds the jobs that the ranks are in now. */
static void find_jobs(guardian *guardian) {
    for (int rank = 0; rank < guardian->ranks; rank++)
        if (!ended(guardian, rank))
            (void)!tu_inspect_process(&guardian->jobs, pid_of(guardian, rank), true);
}

static void publish(guardian *guardian) {
    guardian->publish_at = NEVER;
    if (guardian->running > 0)
        find_jobs(guardian);
    for (int rank = 0; rank < guardian->ranks; rank++) {
        if (!guardian->unpublished[rank])
            continue;
        guardian->unpublished[rank] = false;
        tu_inspect_publish(&guardian->jobs, pid_of(guardian, rank),
                           atomic_load_explicit(&guardian->state->ranks[rank].wait_status, memory_order_relaxed));
    }
}

/* All that the ranks of this job did, for `tutti trace`. The segments are mapped, so it does not matter who is dead. */
static void write_recorders(const guardian *guardian) {
    tu_dump_clock clock;
    const tu_news *news = guardian->plan->page;
    bool compared = news != NULL && tu_news_clock(news, &clock.ahead_ns, &clock.error_ns);
    for (size_t i = 0; i < guardian->jobs.count; i++) {
        const tu_job_view *job = &guardian->jobs.jobs[i];
        for (int rank = 0; rank < job->size; rank++) {
            tu_recorder recorder = tu_page_recorder(job->page, job->bytes, job->size, rank);
            (void)!tu_dump_file(job->page, rank, &recorder, compared ? &clock : NULL, guardian->plan->log_dir);
        }
    }
}

/* ---- ends ---- */

static int rank_of(const guardian *guardian, pid_t pid) {
    for (int rank = 0; rank < guardian->ranks; rank++)
        if (pid_of(guardian, rank) == pid && !ended(guardian, rank))
            return rank;
    return -1; /* an orphan that came to us */
}

/* Starts another process for a rank that died while others live; false when that is not to be, or cannot be. */
static bool replace(guardian *guardian, int rank, int wait_status) {
    run_rank *slot = &guardian->state->ranks[rank];
    if (wait_status == 0 || guardian->ending || guardian->running < 2 ||
        guardian->refills >= guardian->plan->options->refill)
        return false;
    find_jobs(guardian);
    tu_inspect_publish(&guardian->jobs, pid_of(guardian, rank), wait_status);
    unsigned number = atomic_load_explicit(&slot->refills, memory_order_relaxed) + 1;
    pid_t pid = start_rank(guardian->plan, rank, number);
    if (pid < 0)
        return false;
    guardian->refills++;
    atomic_store_explicit(&slot->lost_pid, pid_of(guardian, rank), memory_order_relaxed);
    atomic_store_explicit(&slot->lost_status, wait_status, memory_order_relaxed);
    atomic_store_explicit(&slot->pid, pid, memory_order_release);
    atomic_store_explicit(&slot->refills, number, memory_order_release);
    wake_launcher(guardian);
    return true;
}

static void note_end(guardian *guardian, int rank, int wait_status, int64_t now) {
    if (replace(guardian, rank, wait_status))
        return;
    run_rank *r = &guardian->state->ranks[rank];
    atomic_store_explicit(&r->wait_status, wait_status, memory_order_relaxed);
    atomic_store_explicit(&r->ended, ++guardian->ends, memory_order_release);
    guardian->running--;
    guardian->unpublished[rank] = true;
    bool refill = guardian->plan->options->refill > 0; /* who waits for a newcomer is told that none comes */
    if (wait_status == 0) { /* most such ranks closed their world, so the others are not in a hurry */
        if (guardian->plan->page != NULL || refill)
            wake_launcher(guardian);
        if (guardian->publish_at == NEVER)
            guardian->publish_at = now + PUBLISH_LATER_NS;
        return;
    }
    publish(guardian);
    if (guardian->plan->page != NULL || refill ||
        atomic_load_explicit(&guardian->state->first_failure, memory_order_relaxed) != 0)
        wake_launcher(guardian); /* other hosts are told at once */
    if (atomic_load_explicit(&guardian->state->first_failure, memory_order_relaxed) != 0)
        return;
    if (guardian->decide_by == NEVER)
        guardian->decide_by = now + DECIDE_NS;
    guardian->look_at = now;
}

static void reap(guardian *guardian) {
    struct signalfd_siginfo drained[16];
    while (read(guardian->children, drained, sizeof drained) > 0)
        continue;
    int wait_status;
    pid_t pid;
    int64_t now = tu_clock_now();
    while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
        int rank = rank_of(guardian, pid);
        if (rank >= 0)
            note_end(guardian, rank, wait_status, now);
    }
}

/* ---- signals ---- */

static void signal_rank(const guardian *guardian, int rank, int signal_number) {
    pid_t pid = pid_of(guardian, rank);
    if (kill(-pid, signal_number) != 0) /* it may have moved to another process group */
        kill(pid, signal_number);
}

static void signal_all(guardian *guardian, int signal_number) {
    for (int rank = 0; rank < guardian->ranks; rank++)
        if (!ended(guardian, rank))
            signal_rank(guardian, rank, signal_number);
}

static void stop_all(guardian *guardian, int signal_number) {
    for (int rank = 0; rank < guardian->ranks; rank++) {
        if (ended(guardian, rank))
            continue;
        atomic_store_explicit(&guardian->state->ranks[rank].stopped, (uint32_t)signal_number, memory_order_relaxed);
        signal_rank(guardian, rank, signal_number);
        signal_rank(guardian, rank, SIGCONT); /* a stopped rank would not see it */
    }
    atomic_store_explicit(&guardian->state->stopping, 1, memory_order_release);
    wake_launcher(guardian);
}

_Noreturn static void lost_launcher(void) {
    kill_descendants();
    _exit(1);
}

static void forward(guardian *guardian) {
    int signal_number;
    ssize_t count = recv(guardian->launcher, &signal_number, sizeof signal_number, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno == ECONNRESET))
        lost_launcher();
    if (count != sizeof signal_number)
        return;
    int64_t now = tu_clock_now();
    if (signal_number == RUN_STOP) {
        guardian->ending = true;
        if (guardian->terminate_at == NEVER && guardian->kill_at == NEVER)
            guardian->terminate_at = tu_deadline(guardian->plan->options->grace_ns);
        return;
    }
    bool ends =
        signal_number == SIGINT || signal_number == SIGTERM || signal_number == SIGQUIT || signal_number == SIGHUP;
    if (ends && signal_number == guardian->last_signal && now - guardian->last_signal_at < TWICE_NS) {
        stop_all(guardian, SIGKILL);
        return;
    }
    guardian->last_signal = signal_number;
    guardian->last_signal_at = now;
    guardian->ending = guardian->ending || ends;
    signal_all(guardian, signal_number);
}

/* ---- descendants ---- */

/* Kills the direct children of one thread; returns how many. */
static int kill_children_of(int thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", thread);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    int count = 0, pid;
    while (fscanf(file, "%d", &pid) == 1) {
        kill(pid, SIGKILL);
        count++;
    }
    fclose(file);
    return count;
}

/* For kernels without the list of children: all processes whose parent we are. */
static int kill_children_by_parent(void) {
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    int count = 0;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        tu_process_view view;
        if (!isdigit((unsigned char)entry->d_name[0]) || !tu_process_look(atoi(entry->d_name), &view) ||
            view.parent != getpid() || view.state == 'Z')
            continue;
        kill(atoi(entry->d_name), SIGKILL);
        count++;
    }
    if (folder != NULL)
        closedir(folder);
    return count;
}

static void kill_children(void) {
    DIR *folder = opendir("/proc/self/task");
    struct dirent *entry;
    int count = 0;
    while (folder != NULL && (entry = readdir(folder)) != NULL)
        if (isdigit((unsigned char)entry->d_name[0]))
            count += kill_children_of(atoi(entry->d_name));
    if (folder != NULL)
        closedir(folder);
    if (count == 0)
        kill_children_by_parent();
}

int kill_descendants(void) {
    int reaped = 0;
    int64_t deadline = tu_deadline(10 * TU_SECOND); /* one that the kernel cannot end stays behind */
    while (tu_deadline_left(deadline) > 0) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0)
            return reaped; /* no child is left; their children would have become ours */
        if (pid > 0) {
            reaped++;
            continue;
        }
        kill_children();
        usleep(1000);
    }
    return reaped;
}

/* ---- the loop ---- */

static int64_t earliest(const guardian *guardian) {
    int64_t first = guardian->publish_at;
    const int64_t others[] = { guardian->look_at, guardian->terminate_at, guardian->kill_at, guardian->find_at,
                               guardian->listen_at };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (others[i] < first)
            first = others[i];
    return first;
}

/* Over several hosts the launcher's thread must say that it lives, or the other hosts have given this one up. One that
 * is stopped says nothing: the ranks must not go on without the others for ever. */
static void listen_for_launcher(guardian *guardian, int64_t now) {
    if (guardian->plan->page == NULL || now < guardian->listen_at)
        return;
    guardian->listen_at = now + guardian->plan->silence_ns / 2;
    guardian->silences =
        tu_news_silence(guardian->plan->page) > guardian->plan->silence_ns ? guardian->silences + 1 : 0;
    if (guardian->silences > 2)
        lost_launcher();
}

static void keep_time(guardian *guardian) {
    int64_t now = tu_clock_now();
    listen_for_launcher(guardian, now);
    if (now >= guardian->publish_at)
        publish(guardian);
    if (now >= guardian->find_at) {
        find_jobs(guardian);
        guardian->find_every = guardian->find_every < FIND_LAST_NS / 2 ? 2 * guardian->find_every : FIND_LAST_NS;
        guardian->find_at = now + guardian->find_every;
    }
    if (now >= guardian->look_at) {
        if (now >= guardian->decide_by || !anybody_leaving(guardian))
            decide_first(guardian);
        else
            guardian->look_at = now + LOOK_AGAIN_NS;
    }
    if (now >= guardian->terminate_at) {
        guardian->terminate_at = NEVER;
        guardian->kill_at = tu_deadline(guardian->plan->options->grace_ns);
        stop_all(guardian, SIGTERM);
    }
    if (now >= guardian->kill_at) {
        guardian->kill_at = NEVER;
        stop_all(guardian, SIGKILL);
    }
}

static void wait_for_something(guardian *guardian) {
    struct pollfd polled[2] = { { .fd = guardian->children, .events = POLLIN },
                                { .fd = guardian->launcher, .events = POLLIN } };
    int64_t at = earliest(guardian);
    int64_t left = at == NEVER ? 0 : tu_deadline_left(at);
    struct timespec timeout = { .tv_sec = left / TU_SECOND, .tv_nsec = left % TU_SECOND };
    if (ppoll(polled, 2, at == NEVER ? NULL : &timeout, NULL) <= 0)
        return;
    if (polled[1].revents != 0)
        forward(guardian);
    if (polled[0].revents != 0)
        reap(guardian);
}

/* Else the ends of pipes would never be seen, and the store would seem to live after its launcher. */
static void close_what_is_not_ours(const run_plan *plan) {
    bool refill = plan->options->refill > 0; /* newcomers need them, so they stay until the guardian ends */
    if (plan->store >= 0)
        close(plan->store);
    for (int i = 0; i < 2 * plan->options->ranks; i++) {
        close(plan->pipes[i][0]);
        if (!refill)
            close(plan->pipes[i][1]);
    }
    if (plan->input > 2 && !refill)
        close(plan->input);
    if (plan->secret >= 0 && !refill)
        close(plan->secret);
    if (plan->news >= 0)
        close(plan->news);
}

_Noreturn void guardian_main(const run_plan *plan, run_state *state, int launcher) {
    guardian guardian = { .plan = plan, .state = state, .ranks = plan->options->ranks, .launcher = launcher };
    guardian.publish_at = guardian.decide_by = guardian.look_at = guardian.terminate_at = guardian.kill_at =
        guardian.find_at = NEVER;
    guardian.listen_at = plan->page != NULL ? tu_deadline(plan->silence_ns) : NEVER;
    if (plan->log_dir != NULL)
        guardian.find_at = tu_deadline(guardian.find_every = FIND_FIRST_NS);
    prctl(PR_SET_NAME, "tutti-guardian");
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    setpgid(0, 0); /* the terminal's signals go to the launcher alone */
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    guardian.children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    guardian.unpublished = calloc((size_t)guardian.ranks, sizeof *guardian.unpublished);
    if (guardian.children < 0 || guardian.unpublished == NULL) {
        atomic_store_explicit(&state->start_error, errno, memory_order_release);
        _exit(1);
    }
    bool started = start_all(&guardian);
    close_what_is_not_ours(plan);
    if (!started)
        signal_all(&guardian, SIGKILL);
    while (guardian.running > 0) {
        wait_for_something(&guardian);
        keep_time(&guardian);
    }
    if (guardian.decide_by != NEVER)
        decide_first(&guardian);
    if (plan->log_dir != NULL && atomic_load_explicit(&state->first_failure, memory_order_relaxed) != 0)
        write_recorders(&guardian);
    atomic_store_explicit(&state->left_over, (uint32_t)kill_descendants(), memory_order_relaxed);
    atomic_store_explicit(&state->done, 1, memory_order_release);
    wake_launcher(&guardian);
    _exit(0);
}
