/* SPDX-License-Identifier: Apache-2.0
 *
 * Who lives. The keeper is a thread that holds its rank's robust mutex: when its process ends or calls exec, the kernel
 * marks the mutex, before it tears down memory and closes descriptors. A probe is a trylock. What the mutex says is
 * confirmed by pidfd and socket, which also speak where robust mutexes do not work (user-mode emulators).
 *
 * Whoever waits looks at those it has to do with. Besides, each keeper looks at the next few ranks that live, so that a
 * death is found while nobody waits for anything; several, because a keeper may be stopped itself.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/thread.h"
#include "job/inner.h"

#define KEEPER_STACK ((size_t)256 << 10)
#define CONFIRM_INTERVAL (10 * TU_MILLISECOND)    /* between two looks at pidfd and socket, where they are needed */
#define DISTRUST_INTERVAL (1000 * TU_MILLISECOND) /* and where the mutex is known to tell */
#define UNKEPT_INTERVAL (TU_MILLISECOND / 2) /* times the number of ranks: between two looks at one that is joining */
#define NEIGHBOURS 4                         /* ranks that a keeper looks at */

/* ---- the keeper ---- */

static void watch_neighbours(tu_job *job) {
    int watched = 0;
    for (int i = 1; i < job->size && watched < NEIGHBOURS; i++) {
        int rank = (job->rank + i) % job->size;
        tu_rank_state state = tu_rank_probe(job, rank);
        watched += state == TU_RANK_JOINING || state == TU_RANK_ALIVE;
    }
}

/* Until it is told to stop; true when it was. */
static bool rest(tu_job *job) {
    int64_t until = tu_deadline(TU_LOOK_INTERVAL);
    struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
    return sem_clockwait(&job->keeper_stop, CLOCK_MONOTONIC, &time) == 0;
}

bool tu_robust_works(void) {
    void *head;
    size_t length;
    return syscall(SYS_get_robust_list, 0, &head, &length) == 0;
}

static void *keep(void *argument) {
    tu_job *job = argument;
    /* A prober may hold the mutex for a moment, or have died while it did. */
    if (pthread_mutex_lock(&job->slot->keeper) == EOWNERDEAD)
        pthread_mutex_consistent(&job->slot->keeper);
    sem_post(&job->keeper_holds);
    while (!rest(job))
        watch_neighbours(job);
    pthread_mutex_unlock(&job->slot->keeper);
    return NULL;
}

tutti_status tu_keeper_start(tu_job *job) {
    if (job->house->threads || job->size == 1)
        return TUTTI_OK; /* nobody could outlive us and look */
    job->robust = tu_robust_works();
    sem_init(&job->keeper_holds, 0, 0);
    sem_init(&job->keeper_stop, 0, 0);
    int error = tu_thread_start_small("tutti-keeper", KEEPER_STACK, keep, job, &job->keeper);
    if (error != 0)
        return tu_error_system(
            error, "cannot start the keeper thread of rank %d (threads of a user are limited by RLIMIT_NPROC)",
            job->world_rank);
    job->keeper_runs = true;
    while (sem_wait(&job->keeper_holds) != 0) {
    }
    return TUTTI_OK;
}

void tu_keeper_stop(tu_job *job) {
    if (!job->keeper_runs)
        return;
    sem_post(&job->keeper_stop);
    pthread_join(job->keeper, NULL);
    job->keeper_runs = false;
    sem_destroy(&job->keeper_holds);
    sem_destroy(&job->keeper_stop);
}

/* ---- states ---- */

void tu_ring_all(tu_job *job) {
    for (int rank = 0; rank < job->size; rank++)
        tu_job_ring(job, rank);
    if (job->house->threads)
        for (int rank = 0; rank < job->size; rank++)
            tu_mailbox_wake(&job->house->mailboxes[rank]);
}

/* The one change of a slot to CLOSED or DEAD; false when somebody else made it. */
static bool depart(tu_job *job, int rank, tu_rank_state state) {
    tu_slot *slot = tu_page_slot(job->page, rank);
    uint32_t before = atomic_load_explicit(&slot->state, memory_order_acquire);
    do {
        if (before == TU_RANK_CLOSED || before == TU_RANK_DEAD)
            return false;
        /* Release pairs with the acquire of whoever looks: `why` and all stores of an orderly leaver come first. */
    } while (!atomic_compare_exchange_weak_explicit(&slot->state, &before, state, memory_order_release,
                                                    memory_order_acquire));
    atomic_fetch_add_explicit(&job->page->departures, 1, memory_order_release); /* pairs with tu_job_departures */
    tu_ring_all(job);
    return true;
}

void tu_depart(tu_job *job, tu_rank_state state, const char *why) {
    tu_rank_state before = tu_rank_state_of(job, job->rank);
    if (before == TU_RANK_CLOSED || before == TU_RANK_DEAD)
        return; /* the first word stands */
    if (why != NULL)
        tu_error_shorten(job->slot->why, TU_WHY_BYTES, why);
    depart(job, job->rank, state);
}

void tu_job_mark_dead(tu_job *job, const char *why) {
    tu_depart(job, TU_RANK_DEAD, why);
}

tu_rank_state tu_rank_state_of(const tu_job *job, int rank) {
    uint32_t state =
        atomic_load_explicit(&tu_page_slot(job->page, rank)->state, memory_order_acquire); /* pairs with depart */
    return state == TU_SLOT_EMPTY ? TU_RANK_JOINING : (tu_rank_state)state;
}

uint32_t tu_job_departures(const tu_job *job) {
    return atomic_load_explicit(&job->page->departures, memory_order_acquire); /* pairs with depart */
}

/* What the robust mutex says: 1 dead, 0 lives, -1 nobody holds it (not yet, or not any more). */
static int ask_keeper(tu_slot *slot) {
    switch (pthread_mutex_trylock(&slot->keeper)) {
    case EBUSY:
        return 0;
    case EOWNERDEAD:
        /* Unlocking it without repair makes it say ENOTRECOVERABLE to all who ask later. */
        pthread_mutex_unlock(&slot->keeper);
        return 1;
    case ENOTRECOVERABLE:
        return 1;
    case 0:
        pthread_mutex_unlock(&slot->keeper);
        return -1;
    default:
        return 0;
    }
}

static bool is_cut_off(const tu_peer *peer) {
    struct pollfd look = { .fd = peer->fd, .events = POLLRDHUP };
    return peer->fd >= 0 && poll(&look, 1, 0) == 1 && (look.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

/* Looks at a peer by system calls are made now and then: with hundreds of peers not at every look. */
static bool may_look(tu_peer *peer, int64_t interval) {
    int64_t now = tu_clock_now();
    if (now < atomic_load_explicit(&peer->next_look, memory_order_relaxed))
        return false;
    atomic_store_explicit(&peer->next_look, now + interval, memory_order_relaxed);
    return true;
}

/* What the pidfd says, and the socket where the mutex says nothing. */
static bool confirm_end(const tu_job *job, tu_peer *peer) {
    if (!job->robust && atomic_load_explicit(&peer->ended, memory_order_relaxed))
        return true;
    return may_look(peer, job->robust ? DISTRUST_INTERVAL : CONFIRM_INTERVAL) &&
           (tu_pidfd_exited(peer->pidfd) || (!job->robust && is_cut_off(peer)));
}

/* The same for one whose keeper does not hold its mutex, yet or any more: all that can tell its end. */
static bool ended_without_keeper(const tu_job *job, tu_peer *peer) {
    return may_look(peer, job->size * UNKEPT_INTERVAL) && tu_pidfd_exited(peer->pidfd);
}

tu_rank_state tu_rank_probe(tu_job *job, int rank) {
    tu_slot *slot = tu_page_slot(job->page, rank);
    uint32_t state = atomic_load_explicit(&slot->state, memory_order_acquire);
    if (state == TU_RANK_CLOSED || state == TU_RANK_DEAD || rank == job->rank || job->house->threads)
        return tu_rank_state_of(job, rank);
    int answer = state == TU_SLOT_EMPTY ? -1 : ask_keeper(slot);
    if (answer == 1 || (answer == 0 && confirm_end(job, &job->peers[rank])) ||
        (answer == -1 && ended_without_keeper(job, &job->peers[rank])))
        depart(job, rank, TU_RANK_DEAD); /* does nothing when it closed properly, which it says first */
    return tu_rank_state_of(job, rank);
}

bool tu_rank_exited(tu_job *job, int rank) {
    if (job->house->threads || rank == job->rank)
        return false;
    return tu_rank_state_of(job, rank) == TU_RANK_DEAD || tu_pidfd_exited(job->peers[rank].pidfd);
}

/* ---- the story of a death ---- */

/* End-of-file on its socket while the process lives on: it has called exec, which closes our descriptors. */
static bool has_called_exec(tu_job *job, int rank, const tu_fate *fate) {
    const tu_peer *peer = &job->peers[rank];
    if (fate->exited || fate->exiting || peer->fd < 0)
        return false;
    return atomic_load_explicit(&peer->ended, memory_order_relaxed) || is_cut_off(peer);
}

#define EXEC_LOOKS 20 /* of a millisecond each */

/* The notice of a death is the mutex, which exec gives up a moment before it closes the socket: a process that neither
 * ends nor has been cut off is looked at again. */
static void look_until_clear(tu_job *job, int rank, tu_fate *fate) {
    const tu_peer *peer = &job->peers[rank];
    for (int look = 0; look < EXEC_LOOKS; look++) {
        if (fate->known || fate->exited || fate->exiting || has_called_exec(job, rank, fate))
            return;
        nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND }, NULL);
        tu_process_fate(peer->pid, peer->start_time, peer->pidfd, fate);
    }
}

static void tell_process(tu_job *job, int rank, tu_death *death) {
    tu_slot *slot = tu_page_slot(job->page, rank);
    tu_fate fate = { .exited = true };
    uint64_t published =
        atomic_load_explicit(&slot->wait_status, memory_order_acquire); /* pairs with tu_death_publish */
    if (published != 0) {
        int status = (int)(published & 0xffffffff);
        fate.known = true;
        fate.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        fate.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    } else {
        tu_process_fate(job->peers[rank].pid, job->peers[rank].start_time, job->peers[rank].pidfd, &fate);
        look_until_clear(job, rank, &fate);
    }
    death->known = fate.known;
    death->signal = fate.signal;
    death->exit_code = fate.exit_code;
    char parent[32];
    const char *signal_name = sigdescr_np(fate.signal); /* unlike strsignal safe in any thread */
    if (fate.known && fate.signal != 0)
        snprintf(death->text, sizeof death->text, "rank %d (pid %d) was killed by signal %d (%s)", death->world_rank,
                 death->pid, fate.signal, signal_name != NULL ? signal_name : "unknown");
    else if (fate.known)
        snprintf(death->text, sizeof death->text, "rank %d (pid %d) exited with status %d without closing its world",
                 death->world_rank, death->pid, fate.exit_code);
    else if (has_called_exec(job, rank, &fate))
        snprintf(death->text, sizeof death->text, "rank %d (pid %d) called exec and runs another program now",
                 death->world_rank, death->pid);
    else if (slot->parent == getpid())
        snprintf(death->text, sizeof death->text,
                 "rank %d (pid %d) died; this process is its parent and may wait for it", death->world_rank,
                 death->pid);
    else {
        tu_process_name(slot->parent, parent, sizeof parent);
        snprintf(death->text, sizeof death->text,
                 "rank %d (pid %d) died; only its parent (pid %d%s%s) knows its exit status", death->world_rank,
                 death->pid, slot->parent, parent[0] != '\0' ? ", " : "", parent);
    }
}

void tu_death_describe(tu_job *job, int rank, tu_death *death) {
    tu_slot *slot = tu_page_slot(job->page, rank);
    *death = (tu_death){ .rank = rank, .world_rank = job->peers[rank].world_rank, .pid = job->peers[rank].pid };
    tu_rank_state state = tu_rank_state_of(job, rank);
    if (state == TU_RANK_CLOSED)
        snprintf(death->text, sizeof death->text, "rank %d (pid %d) closed its world", death->world_rank, death->pid);
    else if (state != TU_RANK_DEAD)
        snprintf(death->text, sizeof death->text, "rank %d (pid %d) lives", death->world_rank, death->pid);
    else if (slot->why[0] != '\0') /* complete before the state was DEAD, and bounded: the owner's snprintf ended it */
        snprintf(death->text, sizeof death->text, "rank %d %.*s", death->world_rank, TU_WHY_BYTES - 1, slot->why);
    else if (job->house->threads)
        snprintf(death->text, sizeof death->text, "rank %d (a thread of pid %d) ended without closing its world",
                 death->world_rank, death->pid);
    else
        tell_process(job, rank, death);
}

tutti_status tu_death_error(tu_job *job, int rank, const char *doing) {
    tu_death death;
    tu_death_describe(job, rank, &death);
    tutti_status status = tu_rank_state_of(job, rank) == TU_RANK_CLOSED ? TUTTI_ERROR_GONE : TUTTI_ERROR_DEAD;
    tu_error(status, "%s, seen %s", death.text, doing);
    if (status == TUTTI_ERROR_GONE)
        tu_error_append(TU_LEFT_EARLY);
    else if (death.known && death.signal == SIGKILL)
        tu_error_append(
            ". SIGKILL comes from a person, from a launcher, or from the kernel when memory runs out (see dmesg)");
    return status;
}
