/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange: everybody's record to everybody, with a piece of memory each where wanted.
 *
 * Every message goes into the receiver's mailbox, under its key and sequence, whether its exchange has begun there or
 * not. Between threads the sender puts it there. Between processes one thread of the receiver reads all sockets on
 * behalf of all (the receiving one), and the others wait for it; when its own exchange is complete another takes over.
 *
 * Waits are cut to 20 ms, and between them all members are looked at: a death ends the exchange, whoever is missing.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "job/inner.h"

#define PATIENCE 8
#define CUT_OFF_PATIENCE (200 * TU_MILLISECOND) /* before a broken connection is believed not to be a death */
#define CROWDED_INTERVAL TU_MILLISECOND         /* between attempts while too many descriptors are on their way */

/* ---- the mailbox ---- */

tutti_status tu_mailbox_init(tu_mailbox *mailbox) {
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error == 0)
        error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (error == 0)
        error = pthread_cond_init(&mailbox->changed, &attributes);
    if (error != 0)
        return tu_error_system(error, "cannot prepare a mailbox");
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&mailbox->lock, NULL);
    mailbox->first = NULL;
    mailbox->last = &mailbox->first;
    return TUTTI_OK;
}

void tu_mailbox_close(tu_mailbox *mailbox) {
    pthread_mutex_lock(&mailbox->lock);
    tu_message *messages = mailbox->first;
    tu_orphan *orphans = mailbox->orphans;
    mailbox->first = NULL;
    mailbox->last = &mailbox->first;
    mailbox->orphans = NULL;
    mailbox->closed = true;
    pthread_mutex_unlock(&mailbox->lock);
    while (messages != NULL) {
        tu_message *message = messages;
        messages = message->next;
        tu_message_free(message);
    }
    while (orphans != NULL) {
        tu_orphan *orphan = orphans;
        orphans = orphan->next;
        free(orphan);
    }
}

void tu_mailbox_end(tu_mailbox *mailbox) {
    tu_mailbox_close(mailbox);
    pthread_mutex_destroy(&mailbox->lock);
    pthread_cond_destroy(&mailbox->changed);
}

void tu_mailbox_wake(tu_mailbox *mailbox) {
    pthread_mutex_lock(&mailbox->lock);
    pthread_cond_broadcast(&mailbox->changed);
    pthread_mutex_unlock(&mailbox->lock);
}

/* Whether the message belongs to an exchange that has failed here. The mailbox is locked. */
static bool is_orphan(tu_mailbox *mailbox, const tu_wire *wire) {
    for (tu_orphan **at = &mailbox->orphans; *at != NULL; at = &(*at)->next) {
        tu_orphan *orphan = *at;
        if (orphan->key != wire->key || orphan->sequence != wire->sequence || !orphan->from[wire->sender])
            continue;
        orphan->from[wire->sender] = false;
        if (--orphan->awaited == 0) {
            *at = orphan->next;
            free(orphan);
        }
        return true;
    }
    return false;
}

void tu_mailbox_put(tu_mailbox *mailbox, tu_message *message) {
    message->next = NULL;
    pthread_mutex_lock(&mailbox->lock);
    bool drop = mailbox->closed || is_orphan(mailbox, &message->wire);
    if (!drop) {
        *mailbox->last = message;
        mailbox->last = &message->next;
        pthread_cond_broadcast(&mailbox->changed);
    }
    pthread_mutex_unlock(&mailbox->lock);
    if (drop)
        tu_message_free(message);
}

void tu_mailbox_forget(tu_mailbox *mailbox, int rank) {
    tu_message *dropped = NULL;
    pthread_mutex_lock(&mailbox->lock);
    tu_message **at = &mailbox->first;
    while (*at != NULL) {
        tu_message *message = *at;
        if (message->wire.sender != rank) {
            at = &message->next;
            continue;
        }
        *at = message->next;
        message->next = dropped;
        dropped = message;
    }
    mailbox->last = at;
    pthread_mutex_unlock(&mailbox->lock);
    while (dropped != NULL) {
        tu_message *message = dropped;
        dropped = message->next;
        tu_message_free(message);
    }
}

/* ---- one exchange in progress ---- */

typedef struct progress {
    tu_job *job;
    const tu_exchange *exchange;
    tu_wire wire;      /* this rank's message */
    tu_message **got;  /* by member */
    int *member_of;    /* job rank -> member, or -1 */
    bool *unsent;      /* by job rank: still to be sent to */
    tu_orphan *orphan; /* made in advance, so that failing needs no memory */
    int to_send, to_get;
    bool crowded;        /* descriptors were too many */
    int patience;        /* how often to yield before sleeping */
    uint32_t departures; /* as last seen */
    int64_t next_look;
    int64_t cut_off_since; /* a connection was first seen broken whose process seems to live; 0 none */
} progress;

static tutti_status begin(progress *state, tu_job *job, const tu_exchange *exchange) {
    size_t members = (size_t)exchange->count, ranks = (size_t)job->size;
    *state = (progress){ .job = job, .exchange = exchange };
    state->orphan = calloc(1, sizeof *state->orphan + ranks * sizeof(bool));
    state->got = calloc(1, members * sizeof(tu_message *) + ranks * sizeof(int) + ranks * sizeof(bool));
    if (state->orphan == NULL || state->got == NULL) {
        free(state->orphan);
        free(state->got);
        return tu_error_memory("an exchange", members * sizeof(tu_message *));
    }
    state->member_of = (int *)(state->got + members);
    state->unsent = (bool *)(state->member_of + ranks);
    for (size_t rank = 0; rank < ranks; rank++)
        state->member_of[rank] = -1;
    for (int i = 0; i < exchange->count; i++) {
        state->member_of[exchange->ranks[i]] = i;
        state->unsent[exchange->ranks[i]] = i != exchange->me;
    }
    state->to_send = state->to_get = exchange->count - 1;
    state->wire = (tu_wire){ .magic = TU_WIRE_MAGIC,
                             .kind = TU_WIRE_EXCHANGE,
                             .key = exchange->key,
                             .sequence = exchange->sequence,
                             .sender = job->rank,
                             .bytes = (uint32_t)exchange->bytes };
    snprintf(state->wire.purpose, sizeof state->wire.purpose, "%s", exchange->purpose);
    if (exchange->piece != NULL)
        tu_piece_describe(exchange->piece, &state->wire.piece);
    state->patience = PATIENCE;
    state->wire.descriptor = exchange->descriptor != NULL;
    state->departures = 0; /* some have departed before: the first look comes at once */
    state->next_look = tu_clock_now() + TU_LOOK_INTERVAL;
    return TUTTI_OK;
}

/* Takes this exchange's messages out of the mailbox, which is locked. */
static void collect(progress *state) {
    tu_mailbox *mailbox = state->job->mailbox;
    tu_message **at = &mailbox->first;
    while (*at != NULL) {
        tu_message *message = *at;
        int member = -1;
        if (message->wire.key == state->exchange->key && message->wire.sequence == state->exchange->sequence)
            member = state->member_of[message->wire.sender];
        if (member < 0 || state->got[member] != NULL) {
            at = &message->next;
            continue;
        }
        *at = message->next;
        message->next = NULL;
        state->got[member] = message;
        state->to_get--;
    }
    mailbox->last = at;
}

/* ---- sending ---- */

/* Puts a copy into the mailbox of another thread. */
static tutti_status send_to_thread(progress *state, int rank) {
    const tu_exchange *exchange = state->exchange;
    size_t room = sizeof(tu_message) + exchange->bytes;
    tu_message *message = calloc(1, room);
    if (message == NULL)
        return tu_error_memory("a message", room);
    message->wire = state->wire;
    if (exchange->bytes > 0)
        memcpy(message->payload, exchange->payload, exchange->bytes);
    if (exchange->piece != NULL) {
        tutti_status status =
            tu_mapping_make(state->job, exchange->piece->segment, &state->wire.piece, rank, false, &message->mapping);
        if (status != TUTTI_OK) {
            free(message);
            return status;
        }
    }
    if (exchange->descriptor != NULL) {
        message->descriptor = fcntl(*exchange->descriptor, F_DUPFD_CLOEXEC, 3);
        message->has_descriptor = message->descriptor >= 0;
        if (message->descriptor < 0) {
            int error = errno;
            tu_message_free(message);
            return tu_error_system(error, "cannot copy a descriptor for another rank of this process");
        }
    }
    tu_mailbox_put(&state->job->house->mailboxes[rank], message);
    return TUTTI_OK;
}

static tutti_status send_all(progress *state) {
    state->crowded = false;
    for (int i = 0; i < state->exchange->count && state->to_send > 0; i++) {
        int rank = state->exchange->ranks[i];
        if (!state->unsent[rank])
            continue;
        bool crowded = false;
        tutti_status status =
            state->job->house->threads
                ? send_to_thread(state, rank)
                : tu_wire_send(state->job, rank, &state->wire, state->exchange->payload, state->exchange->piece,
                               state->exchange->descriptor != NULL ? *state->exchange->descriptor : -1, &crowded);
        state->crowded |= crowded;
        if (status == TUTTI_ERROR_EMPTY)
            continue; /* later */
        if (status != TUTTI_OK && status != TUTTI_ERROR_GONE)
            return status;
        /* One that is gone needs nothing any more. Whether we need something from it is seen when looking around. */
        state->unsent[rank] = false;
        state->to_send--;
    }
    return TUTTI_OK;
}

/* ---- waiting ---- */

static void doing(const progress *state, char *text, size_t bytes) {
    snprintf(text, bytes, "in exchange %llu \"%s\"", (unsigned long long)state->exchange->sequence,
             state->wire.purpose);
}

static tutti_status missing_members(const progress *state) {
    const tu_exchange *exchange = state->exchange;
    char came[256], missing[256], where[80];
    bool *marked = state->orphan->from; /* free until the exchange has failed */
    int *names = calloc((size_t)exchange->count, sizeof *names);
    if (names == NULL)
        return tu_error_memory("a list of ranks", (size_t)exchange->count * sizeof *names);
    for (int i = 0; i < exchange->count; i++) {
        names[i] = state->job->peers[exchange->ranks[i]].world_rank;
        marked[i] = i == exchange->me || state->got[i] != NULL;
    }
    tu_rank_names(marked, names, exchange->count, came, sizeof came);
    for (int i = 0; i < exchange->count; i++)
        marked[i] = !marked[i];
    tu_rank_names(marked, names, exchange->count, missing, sizeof missing);
    free(names);
    doing(state, where, sizeof where);
    tu_error(TUTTI_ERROR_TIMEOUT, "timeout on rank %d %s: rank %s came, rank %s did not", state->job->world_rank, where,
             came, missing);
    for (int i = 0; i < exchange->count; i++)
        if (marked[i])
            tu_error_at_fault(i);
    memset(marked, 0, (size_t)state->job->size * sizeof *marked);
    return TUTTI_ERROR_TIMEOUT;
}

/* The first member that is dead, awaited or not, or that is awaited and will not come any more; or -1. */
static int find_departed(const progress *state) {
    int departed = -1;
    for (int i = 0; i < state->exchange->count; i++) {
        if (i == state->exchange->me)
            continue;
        tu_rank_state seen = tu_rank_probe(state->job, state->exchange->ranks[i]);
        if (seen == TU_RANK_DEAD)
            return i;
        if (seen == TU_RANK_CLOSED && state->got[i] == NULL && departed < 0)
            departed = i;
    }
    return departed;
}

/* A member whose connection is broken although its process lives, or -1. */
static int find_cut_off(const progress *state) {
    for (int i = 0; i < state->exchange->count && !state->job->house->threads; i++)
        if (i != state->exchange->me && state->got[i] == NULL &&
            atomic_load_explicit(&state->job->peers[state->exchange->ranks[i]].ended, memory_order_relaxed))
            return i;
    return -1;
}

/* What was sent before a departure has arrived by now: reads it, so that it still counts. */
static tutti_status read_once_more(progress *state) {
    tu_mailbox *mailbox = state->job->mailbox;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&mailbox->lock);
    if (!state->job->house->threads) {
        while (mailbox->receiving) { /* that thread comes back within 20 ms, and says so */
            int64_t until = tu_deadline(TU_LOOK_INTERVAL);
            struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
            pthread_cond_timedwait(&mailbox->changed, &mailbox->lock, &time);
        }
        mailbox->receiving = true;
        pthread_mutex_unlock(&mailbox->lock);
        bool any = true;
        while (any && status == TUTTI_OK)
            status = tu_wire_receive(state->job, NULL, 0, &any);
        pthread_mutex_lock(&mailbox->lock);
        mailbox->receiving = false;
        pthread_cond_broadcast(&mailbox->changed);
    }
    collect(state);
    pthread_mutex_unlock(&mailbox->lock);
    return status;
}

/* What else may end the exchange. */
static tutti_status look_around(progress *state, int64_t now) {
    const tu_exchange *exchange = state->exchange;
    tu_job *job = state->job;
    if (exchange->ended != NULL && atomic_load_explicit(exchange->ended, memory_order_acquire) > exchange->ended_above)
        return TUTTI_ERROR_STATE;
    char where[80];
    doing(state, where, sizeof where);
    if (job->interrupt != NULL && atomic_load_explicit(job->interrupt, memory_order_relaxed) != 0)
        return tu_error(TUTTI_ERROR_INTERRUPTED, "rank %d was interrupted %s", job->world_rank, where);
    uint32_t departures = tu_job_departures(job);
    int cut_off = find_cut_off(state);
    if (now >= state->next_look || departures != state->departures || cut_off >= 0) {
        state->next_look = now + TU_LOOK_INTERVAL;
        state->departures = departures;
        int gone = find_departed(state);
        if (gone >= 0 || cut_off >= 0) {
            tutti_status status = read_once_more(state);
            if (status != TUTTI_OK)
                return status;
            gone = find_departed(state);
        }
        if (gone >= 0) {
            tutti_status status = tu_death_error(job, exchange->ranks[gone], where);
            tu_error_at_fault(gone);
            return status;
        }
        cut_off = find_cut_off(state);
        /* Its keeper's mutex may be in the hands of another survivor that has just found it abandoned: that one will
         * tell in a moment. */
        if (cut_off >= 0 && state->cut_off_since == 0)
            state->cut_off_since = now;
        if (cut_off >= 0 && now - state->cut_off_since >= CUT_OFF_PATIENCE) {
            const tu_peer *peer = &job->peers[exchange->ranks[cut_off]];
            tu_error(TUTTI_ERROR_NETWORK,
                     "the connection to rank %d (pid %d) broke %s although the process lives; did something close "
                     "its descriptors?",
                     peer->world_rank, peer->pid, where);
            tu_error_at_fault(cut_off);
            return TUTTI_ERROR_NETWORK;
        }
        for (int i = 0; i < exchange->count && exchange->compare != NULL; i++) {
            tutti_status status =
                i != exchange->me && state->got[i] == NULL ? exchange->compare(exchange->argument, i) : TUTTI_OK;
            if (status != TUTTI_OK)
                return status;
        }
    }
    if (now >= exchange->deadline)
        return missing_members(state);
    return TUTTI_OK;
}

/* Waits for something to happen, at most until `until`. The mailbox is locked, and given back unlocked. */
static tutti_status wait_for_news(progress *state, int64_t until) {
    tu_mailbox *mailbox = state->job->mailbox;
    tutti_status status = TUTTI_OK;
    if (state->job->house->threads || mailbox->receiving) {
        struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
        pthread_cond_timedwait(&mailbox->changed, &mailbox->lock, &time);
        pthread_mutex_unlock(&mailbox->lock);
        return TUTTI_OK;
    }
    mailbox->receiving = true;
    pthread_mutex_unlock(&mailbox->lock);
    int64_t left = tu_deadline_left(until);
    if (state->patience > 0) { /* let others send first: being woken for every single message costs more */
        state->patience--;
        sched_yield();
        left = 0;
    }
    bool any;
    status = tu_wire_receive(state->job, state->crowded ? NULL : state->unsent, left, &any);
    pthread_mutex_lock(&mailbox->lock);
    mailbox->receiving = false;
    pthread_cond_broadcast(&mailbox->changed); /* somebody else may have to read now */
    pthread_mutex_unlock(&mailbox->lock);
    return status;
}

static tutti_status run(progress *state) {
    for (;;) {
        tutti_status status = send_all(state);
        if (status != TUTTI_OK)
            return status;
        pthread_mutex_lock(&state->job->mailbox->lock);
        collect(state);
        if (state->to_get == 0 && state->to_send == 0) {
            pthread_mutex_unlock(&state->job->mailbox->lock);
            return TUTTI_OK;
        }
        int64_t now = tu_clock_now();
        int64_t until = now + (state->to_send > 0 && state->job->mailbox->receiving ? CROWDED_INTERVAL
                               : state->crowded                                     ? CROWDED_INTERVAL
                                                                                    : TU_LOOK_INTERVAL);
        if (until > state->exchange->deadline)
            until = state->exchange->deadline;
        status = wait_for_news(state, until);
        if (status != TUTTI_OK)
            return status;
        pthread_mutex_lock(&state->job->mailbox->lock);
        collect(state);
        pthread_mutex_unlock(&state->job->mailbox->lock);
        if (state->to_get == 0 && state->to_send == 0)
            return TUTTI_OK;
        status = look_around(state, tu_clock_now());
        if (status != TUTTI_OK)
            return status;
    }
}

/* ---- the end ---- */

static tutti_status compare(const progress *state) {
    const tu_exchange *exchange = state->exchange;
    for (int i = 0; i < exchange->count; i++) {
        const tu_message *message = state->got[i];
        if (message == NULL)
            continue;
        int mine = state->job->world_rank, theirs = state->job->peers[exchange->ranks[i]].world_rank;
        if (strcmp(message->wire.purpose, state->wire.purpose) != 0)
            tu_error(TUTTI_ERROR_MISMATCH,
                     "ranks disagree: rank %d is in \"%s\" where rank %d is in \"%s\" (exchange %llu). All ranks of "
                     "a group must call the same operations in the same order",
                     mine, state->wire.purpose, theirs, message->wire.purpose, (unsigned long long)exchange->sequence);
        else if (message->wire.bytes != exchange->bytes)
            tu_error(TUTTI_ERROR_MISMATCH, "ranks disagree in \"%s\": rank %d brings %zu bytes, rank %d brings %u",
                     state->wire.purpose, mine, exchange->bytes, theirs, message->wire.bytes);
        else
            continue;
        tu_error_at_fault(i);
        return TUTTI_ERROR_MISMATCH;
    }
    return TUTTI_OK;
}

static void copy_payloads(const progress *state, char *payloads) {
    const tu_exchange *exchange = state->exchange;
    for (int i = 0; i < exchange->count && exchange->bytes > 0 && payloads != NULL; i++)
        memcpy(payloads + (size_t)i * exchange->bytes, i == exchange->me ? exchange->payload : state->got[i]->payload,
               exchange->bytes);
}

/* Whether everything that came along with the records arrived. */
static tutti_status check_cargo(const progress *state) {
    const tu_exchange *exchange = state->exchange;
    for (int i = 0; i < exchange->count; i++) {
        const tu_message *message = state->got[i];
        if (message == NULL || message->status == TUTTI_OK)
            continue;
        tutti_status status =
            message->error != NULL ? tu_error_restore(message->error) : tu_error_memory("a message", sizeof *message);
        tu_error_at_fault(i);
        return status;
    }
    return TUTTI_OK;
}

static tutti_status hand_out(progress *state, tu_mapping **mappings) {
    const tu_exchange *exchange = state->exchange;
    tu_mapping *mine = NULL;
    if (exchange->piece != NULL && mappings != NULL) {
        tu_piece_wire wire;
        tu_piece_describe(exchange->piece, &wire);
        tutti_status status =
            tu_mapping_make(state->job, exchange->piece->segment, &wire, state->job->rank, false, &mine);
        if (status != TUTTI_OK)
            return status;
    }
    int own = -1;
    if (exchange->descriptor != NULL && exchange->descriptors != NULL &&
        (own = fcntl(*exchange->descriptor, F_DUPFD_CLOEXEC, 3)) < 0) {
        int error = errno;
        tu_mapping_release(mine);
        return tu_error_system(error, "cannot copy a descriptor");
    }
    for (int i = 0; i < exchange->count; i++) {
        tu_message *message = state->got[i]; /* NULL for oneself alone */
        if (exchange->descriptors != NULL)
            exchange->descriptors[i] = message == NULL ? own : message->has_descriptor ? message->descriptor : -1;
        if (mappings != NULL)
            mappings[i] = message == NULL ? mine : message->mapping;
        if (message != NULL && exchange->descriptors != NULL)
            message->has_descriptor = false;
        if (message != NULL && mappings != NULL)
            message->mapping = NULL;
    }
    return TUTTI_OK;
}

/* Leaves word that what still arrives for this exchange is to be dropped. */
static void abandon(progress *state) {
    tu_mailbox *mailbox = state->job->mailbox;
    tu_orphan *orphan = state->orphan;
    orphan->key = state->exchange->key;
    orphan->sequence = state->exchange->sequence;
    pthread_mutex_lock(&mailbox->lock);
    collect(state);
    for (int i = 0; i < state->exchange->count; i++) {
        if (i == state->exchange->me || state->got[i] != NULL)
            continue;
        orphan->from[state->exchange->ranks[i]] = true;
        orphan->awaited++;
    }
    if (orphan->awaited > 0) {
        orphan->next = mailbox->orphans;
        mailbox->orphans = orphan;
        state->orphan = NULL;
    }
    pthread_mutex_unlock(&mailbox->lock);
}

tutti_status tu_job_exchange(tu_job *job, const tu_exchange *exchange, void *payloads, tu_mapping **mappings) {
    if (exchange->bytes > TU_EXCHANGE_BYTES)
        return tu_error(TUTTI_ERROR_ARGUMENT, "an exchange carries at most %d bytes, not %zu", TU_EXCHANGE_BYTES,
                        exchange->bytes);
    if (exchange->complete != NULL)
        *exchange->complete = false;
    progress state;
    tutti_status status = begin(&state, job, exchange);
    if (status != TUTTI_OK)
        return status;
    status = run(&state);
    if (status != TUTTI_OK)
        abandon(&state);
    if (status == TUTTI_OK)
        status = compare(&state);
    if (status == TUTTI_OK) {
        copy_payloads(&state, payloads);
        if (exchange->complete != NULL)
            *exchange->complete = true;
        status = check_cargo(&state);
    }
    if (status == TUTTI_OK)
        status = hand_out(&state, mappings);
    for (int i = 0; i < exchange->count; i++)
        if (state.got[i] != NULL)
            tu_message_free(state.got[i]);
    free(state.got);
    free(state.orphan);
    return status;
}
