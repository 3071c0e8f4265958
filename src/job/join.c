/* SPDX-License-Identifier: Apache-2.0
 *
 * A newcomer takes the place of a dead rank in a job that runs: see job.h. The steps are those of opening (open.c,
 * connect.c), but everybody else is there already: those that live connect to the newcomer, and its slot is prepared
 * anew. Its segments get numbers that the dead rank's never had.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "job/inner.h"

_Static_assert(TU_KEY_BYTES == TU_NONCE_BYTES, "job.h has a name of its own for it");

struct tu_joining {
    tu_job_options options;
    tu_record mine;
    int listener;
};

/* ---- the newcomer ---- */

static tutti_status describe_self(const tu_job_options *options, tu_record *mine) {
    tu_record_self(options, mine);
    tutti_status status = tu_process_place(mine->place);
    return status == TUTTI_OK ? tu_random_bytes(mine->nonce, sizeof mine->nonce) : status;
}

tutti_status tu_job_announce(const tu_job_options *options, tu_joining **made, tu_seat *seat) {
    tu_joining *joining = calloc(1, sizeof *joining);
    if (joining == NULL)
        return tu_error_memory("a job", sizeof *joining);
    joining->options = *options;
    joining->options.store = NULL; /* the layer above carries the records */
    joining->listener = -1;
    tu_bell_prepare();
    tutti_status status = describe_self(options, &joining->mine);
    if (status == TUTTI_OK)
        status = tu_listen(options->world_size, &joining->listener, joining->mine.socket);
    if (status != TUTTI_OK) {
        tu_joining_free(joining);
        return status;
    }
    *seat = (tu_seat){ .pid = joining->mine.pid, .fresh = 1, .start_time = joining->mine.start_time };
    memcpy(seat->socket, joining->mine.socket, TU_KEY_BYTES);
    memcpy(seat->nonce, joining->mine.nonce, TU_KEY_BYTES);
    *made = joining;
    return TUTTI_OK;
}

void tu_joining_free(tu_joining *joining) {
    if (joining == NULL)
        return;
    if (joining->listener >= 0)
        close(joining->listener);
    free(joining);
}

/* The record that opening would have read from the store. */
static void fill_record(const tu_record *mine, const tu_seat *seat, int rank, tu_record *record) {
    *record = *mine;
    record->world_rank = rank;
    record->pid = seat->pid;
    record->start_time = seat->start_time;
    memcpy(record->socket, seat->socket, TU_KEY_BYTES);
    memcpy(record->nonce, seat->nonce, TU_KEY_BYTES);
}

typedef struct table {
    tu_record *records;
    int *local;
    bool *fresh;
} table;

static tutti_status make_table(const tu_record *mine, const tu_seat *seats, int size, table *made) {
    size_t count = (size_t)size;
    *made = (table){ calloc(count, sizeof *made->records), calloc(count, sizeof *made->local),
                     calloc(count, sizeof *made->fresh) };
    if (made->records == NULL || made->local == NULL || made->fresh == NULL)
        return tu_error_memory("the records of all ranks", count * sizeof *made->records);
    for (int rank = 0; rank < size; rank++) {
        fill_record(mine, &seats[rank], rank, &made->records[rank]);
        made->local[rank] = rank;
        made->fresh[rank] = seats[rank].fresh != 0;
    }
    return TUTTI_OK;
}

static void free_table(table *table) {
    free(table->records);
    free(table->local);
    free(table->fresh);
}

static tutti_status move_in(tu_opening *opening) {
    tu_job *job = opening->job;
    tutti_status status = tu_house_create(job->size, false, &job->house);
    if (status != TUTTI_OK)
        return status;
    job->mailbox = &job->house->mailboxes[0];
    status = tu_connect(opening);
    if (status == TUTTI_OK)
        status = tu_wire_listen(job);
    if (status == TUTTI_OK)
        status = tu_atlas_create(job->size, &job->atlas);
    if (status != TUTTI_OK)
        return status;
    if (tu_page_slot(job->house->page, job->rank)->state != TU_RANK_DEAD)
        return tu_error(TUTTI_ERROR_STATE, "rank %d is not free: it lives, or closed its world", job->world_rank);
    status = tu_job_take_slot(job, opening->mine.start_time);
    if (status == TUTTI_OK) {
        atomic_store_explicit(&job->segments, (uint64_t)job->slot->incarnation << 32, memory_order_relaxed);
        status = tu_heap_create(job, &job->heap);
    }
    if (status != TUTTI_OK)
        return status;
    /* Release pairs with every look at the state. */
    atomic_store_explicit(&job->slot->state, TU_RANK_ALIVE, memory_order_release);
    tu_ring_all(job);
    return TUTTI_OK;
}

tutti_status tu_job_join(tu_joining *joining, const tu_seat *seats, int founder, const uint8_t page[TU_KEY_BYTES],
                         tu_job **joined) {
    const tu_job_options *options = &joining->options;
    table table;
    tu_opening opening = { .options = options,
                           .mine = joining->mine,
                           .rank = options->world_rank,
                           .size = options->world_size,
                           .listener = joining->listener,
                           .founder = founder,
                           .page_nonce = page };
    tutti_status status = make_table(&joining->mine, seats, options->world_size, &table);
    opening.records = table.records;
    opening.local = table.local;
    opening.fresh = table.fresh;
    if (status == TUTTI_OK)
        status = tu_job_make(options, &opening.job);
    if (status == TUTTI_OK)
        status = tu_job_settle(&opening);
    if (status == TUTTI_OK)
        status = move_in(&opening);
    tu_job *job = opening.job;
    if (status == TUTTI_OK) {
        tu_job_ladder(job, options);
        *joined = job;
    } else if (job != NULL) {
        tutti_error_copy error;
        tu_error_save(&error);
        if (job->slot != NULL)
            tu_depart(job, TU_RANK_DEAD, "failed to take a dead rank's place");
        tu_job_end(job);
        (void)tu_error_restore(&error);
    }
    free_table(&table);
    return status;
}

/* ---- those that live ---- */

void tu_job_seat(const tu_job *job, int rank, tu_seat *seat) {
    *seat = (tu_seat){ .pid = job->peers[rank].pid, .start_time = job->peers[rank].start_time };
}

void tu_job_page_nonce(const tu_job *job, uint8_t nonce[TU_KEY_BYTES]) {
    memcpy(nonce, job->page->nonce, TU_KEY_BYTES);
}

uint32_t tu_job_incarnation(const tu_job *job, int rank) {
    return tu_page_slot(job->page, rank)->incarnation;
}

/* What this rank kept of the one that died. */
static void forget_dead(tu_job *job, int rank) {
    tu_peer *peer = &job->peers[rank];
    pthread_mutex_lock(&peer->send_lock);
    if (peer->fd >= 0)
        close(peer->fd); /* epoll lets go of it */
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    peer->fd = peer->pidfd = -1;
    pthread_mutex_unlock(&peer->send_lock);
    tu_mailbox_forget(job->mailbox, rank);
    tu_atlas_forget_owner(job->atlas, rank);
    tu_heap_forget(job->heap, rank);
}

static tutti_status reach(tu_job *job, tu_opening *opening, int rank, bool founder, int64_t deadline) {
    tu_peer *peer = &job->peers[rank];
    for (;;) {
        tutti_status status = peer->fd < 0 ? tu_connect_one(opening, rank) : TUTTI_OK;
        if (status != TUTTI_OK)
            return status;
        int error = peer->fd < 0 ? EAGAIN : founder ? tu_wire_send_page(peer->fd, job->rank, job->house->page_fd) : 0;
        if (error == 0)
            return tu_wire_hear(job, rank);
        if (error != EAGAIN && error != ETOOMANYREFS && error != ENOBUFS)
            return tu_error_system(error, "cannot send the job segment to rank %d (pid %d)", peer->world_rank,
                                   peer->pid);
        if (!tu_process_runs(peer->pid, peer->start_time))
            return tu_error(TUTTI_ERROR_DEAD, "the newcomer at rank %d (pid %d) died before it had joined",
                            peer->world_rank, peer->pid);
        if (tu_clock_now() >= deadline)
            return tu_error(TUTTI_ERROR_TIMEOUT,
                            "timeout: the newcomer at rank %d (pid %d) cannot be reached; stopped?", peer->world_rank,
                            peer->pid);
        (void)nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND }, NULL);
    }
}

tutti_status tu_job_admit(tu_job *job, int rank, const tu_seat *seat, bool founder, int64_t deadline) {
    if (job->house->threads)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "ranks that are threads of one process cannot be replaced");
    tu_job_options options = {
        .name = job->name, .world_rank = job->world_rank, .world_size = job->world_size, .deadline = deadline
    };
    tu_record mine = { 0 };
    tutti_status status = describe_self(&options, &mine);
    tu_seat *seats = calloc((size_t)job->size, sizeof *seats);
    table table = { 0 };
    if (status == TUTTI_OK && seats == NULL)
        status = tu_error_memory("the ranks of the job", (size_t)job->size * sizeof *seats);
    if (status == TUTTI_OK) {
        seats[rank] = *seat;
        status = make_table(&mine, seats, job->size, &table);
    }
    if (status == TUTTI_OK) {
        tu_opening opening = { .options = &options,
                               .job = job,
                               .mine = mine,
                               .records = table.records,
                               .local = table.local,
                               .rank = job->rank,
                               .size = job->size,
                               .founder = -1 };
        forget_dead(job, rank);
        tu_peer *peer = &job->peers[rank];
        peer->pid = seat->pid;
        peer->start_time = seat->start_time;
        atomic_store_explicit(&peer->ended, false, memory_order_relaxed);
        atomic_store_explicit(&peer->next_look, 0, memory_order_relaxed);
        peer->pidfd = tu_pidfd_open(seat->pid, seat->start_time);
        status = reach(job, &opening, rank, founder, deadline);
    }
    free(seats);
    free_table(&table);
    return status;
}
