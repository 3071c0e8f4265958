/* SPDX-License-Identifier: Apache-2.0
 *
 * The workspace of a group, and the agreement that begins every call: see workspace.h.
 */
#include "fused/workspace.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tutti/fused.h>

#include "collective/arrival.h"
#include "fused/device.h"
#include "memory/memory.h"
#include "world/attachment.h"

#define SECOND ((int64_t)1000000000)

bool tu_fused_is_fake(tutti_group *group) {
    return strcmp(tutti_world_launcher(tutti_group_world(group)), "fake") == 0;
}

/* ---- signatures ---- */

static void hash_bytes(tu_fused_signature *signature, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        signature->hash = (signature->hash ^ at[i]) * 0x100000001b3u;
}

/* Adds to the words alone, which every call makes anew: so not by printf. Three dots end those that are cut. */
static void say(tu_fused_signature *signature, const char *words) {
    size_t room = sizeof signature->text - signature->used - 1, length = strlen(words);
    memcpy(signature->text + signature->used, words, length < room ? length : room);
    signature->used += length < room ? length : room;
    if (length > room)
        memcpy(signature->text + sizeof signature->text - sizeof "...", "...", sizeof "...");
}

static void say_number(tu_fused_signature *signature, int64_t number) {
    char digits[24], *at = digits + sizeof digits - 1;
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    *at = 0;
    do
        *--at = (char)('0' + rest % 10);
    while ((rest /= 10) > 0);
    if (number < 0)
        *--at = '-';
    say(signature, at);
}

tu_fused_signature tu_fused_sign(const char *who) {
    tu_fused_signature signature = { .who = who, .hash = 0xcbf29ce484222325u };
    say(&signature, "calls ");
    tu_fused_sign_text(&signature, who);
    return signature;
}

void tu_fused_sign_text(tu_fused_signature *signature, const char *text) {
    tu_fused_sign_data(signature, text, text, strlen(text) + 1);
}

void tu_fused_sign_data(tu_fused_signature *signature, const char *words, const void *data, size_t bytes) {
    hash_bytes(signature, data, bytes);
    say(signature, words);
}

void tu_fused_sign_number(tu_fused_signature *signature, const char *words, int64_t number) {
    hash_bytes(signature, &number, sizeof number);
    say(signature, words);
    say(signature, " ");
    say_number(signature, number);
}

void tu_fused_sign_tensor(tu_fused_signature *signature, const char *words, const tt_tensor *x) {
    int64_t kind[2] = { x->dtype, x->ndim };
    hash_bytes(signature, kind, sizeof kind);
    hash_bytes(signature, x->sizes, (size_t)x->ndim * sizeof x->sizes[0]);
    say(signature, words);
    say(signature, " ");
    say(signature, tutti_dtype_name(x->dtype));
    for (int i = 0; i < x->ndim; i++) {
        say(signature, i == 0 ? " [" : ", ");
        say_number(signature, x->sizes[i]);
    }
    say(signature, x->ndim > 0 ? "]" : " []");
}

/* ---- a group's state ---- */

static void free_state(tu_fused *state) {
    free(state->records);
    free(state->came);
    free(state);
}

static tutti_status make_state(void *owner, void **made) {
    tutti_group *group = owner;
    int size = tutti_group_size(group);
    tu_fused *state = calloc(1, sizeof *state);
    if (state == NULL)
        return tu_error_memory("the state of fused operations", sizeof *state);
    state->records = calloc((size_t)size, sizeof *state->records);
    state->came = calloc((size_t)size, 2 * sizeof *state->came);
    if (state->records == NULL || state->came == NULL) {
        free_state(state);
        return tu_error_memory("the records of fused operations", (size_t)size * sizeof(tu_fused_record));
    }
    state->done = state->came + size;
    state->group = group;
    state->rank = tutti_group_rank(group);
    state->size = size;
    pthread_mutex_init(&state->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&state->idle, &attributes);
    pthread_condattr_destroy(&attributes);
    *made = state;
    return TUTTI_OK;
}

static void drop_workspace(tu_fused *state) {
    tutti_peers_release(state->peers);
    tutti_memory_release(state->memory);
    state->peers = NULL;
    state->memory = NULL;
    atomic_store_explicit(&state->bytes, 0, memory_order_relaxed);
    state->half_bytes = state->ring_bytes = state->ring_at = 0;
    state->gathers = 0;
}

static void end_state(void *ended) {
    tu_fused *state = ended;
    drop_workspace(state);
    pthread_cond_destroy(&state->idle);
    pthread_mutex_destroy(&state->lock);
    free_state(state);
}

static const tu_attachment attachment = { .make = make_state, .end = end_state };

static bool is_inside(const tu_fused *state) {
    return atomic_load_explicit(&state->holder, memory_order_relaxed) == tu_self();
}

/* ---- turns ---- */

/* Ends the group with the thread's error, and returns that. */
static tutti_status end_group(tutti_group *group, const char *who) {
    tutti_error_copy error;
    tu_error_save(&error);
    if (tutti_group_check(group) == TUTTI_OK) {
        char reason[TUTTI_ERROR_MESSAGE + 128];
        snprintf(reason, sizeof reason, "it could not go on with %s: %s", who, error.message);
        tutti_status ended = tutti_group_abort(group, reason);
        (void)ended; /* by somebody else then */
    }
    return tu_error_restore(&error);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

/* With the lock held: waits for the end of another thread's call, or until the group has ended. */
static tutti_status await_idle(tu_fused *state) {
    int64_t timeout = tutti_group_timeout(state->group), start = now();
    while (state->busy) {
        int64_t look = now() + SECOND / 50; /* nobody rings when the group ends */
        struct timespec until = { .tv_sec = look / SECOND, .tv_nsec = look % SECOND };
        pthread_cond_timedwait(&state->idle, &state->lock, &until);
        tutti_status status = state->busy ? tutti_group_check(state->group) : TUTTI_OK;
        if (status != TUTTI_OK)
            return status;
        if (state->busy && now() - start >= timeout)
            return tu_error(TUTTI_ERROR_TIMEOUT,
                            "rank %d waited %.3f s for another thread of its own, which is in a fused operation on "
                            "group \"%s\": a consumer or producer must not wait for a fused operation on its group",
                            state->rank, (double)timeout / SECOND, tutti_group_name(state->group));
    }
    return TUTTI_OK;
}

static tutti_status take_turn(tu_fused *state) {
    pthread_mutex_lock(&state->lock);
    tutti_status status = await_idle(state);
    if (status == TUTTI_OK) {
        state->busy = true;
        atomic_store_explicit(&state->holder, tu_self(), memory_order_relaxed);
    }
    pthread_mutex_unlock(&state->lock);
    return status;
}

static void end_turn(tu_fused *state) {
    pthread_mutex_lock(&state->lock);
    atomic_store_explicit(&state->holder, NULL, memory_order_relaxed);
    state->busy = false;
    pthread_cond_signal(&state->idle);
    pthread_mutex_unlock(&state->lock);
}

/* The workspace's peers are held during calls only: they hold the group, which would never end. */
tutti_status tu_fused_enter(tutti_group *group, tu_fused **entered) {
    tu_memory_group *places;
    void *found;
    tutti_status status = tu_memory_group_get(group, &places);
    if (status == TUTTI_OK)
        status = tu_group_attachment(group, &attachment, &found);
    if (status != TUTTI_OK)
        return status;
    tu_fused *state = found;
    if (is_inside(state))
        return tu_error(TUTTI_ERROR_STATE,
                        "rank %d calls a fused operation on group \"%s\" from a consumer or producer of another one, "
                        "which has not ended: call it after that, or on another group",
                        state->rank, tutti_group_name(group));
    status = take_turn(state);
    if (status != TUTTI_OK)
        return status == TUTTI_ERROR_TIMEOUT ? end_group(group, "a fused operation") : status;
    state->places = places;
    state->own = (tu_fused_record){ 0 };
    if (state->memory != NULL)
        status = tutti_memory_rendezvous(state->memory, group, &state->peers); /* cached: asks nobody */
    if (status == TUTTI_OK)
        *entered = state;
    else
        end_turn(state);
    return status;
}

/* ---- the end of a call ---- */

/* Waits beyond the deadline that the agreement itself has: it ends by that one, whose error names who is missing, and
 * nothing writes into the records any more. */
static tutti_status wait_agreement(tu_fused *state) {
    const int64_t most = INT64_MAX / 4;
    int64_t timeout = tutti_group_timeout(state->group);
    return tutti_work_wait(state->work, (timeout < most ? 2 * timeout : most) + 60 * SECOND);
}

/* An agreement that nobody has waited for writes into the records until it is over. */
static void finish_agreement(tu_fused *state) {
    tutti_error_copy error;
    tu_error_save(&error);
    tutti_status status = wait_agreement(state);
    (void)status; /* what made this rank leave counts */
    tutti_work_release(state->work);
    state->work = NULL;
    tu_error_restore(&error);
}

void tu_fused_leave(tu_fused *state) {
    if (state->work != NULL)
        finish_agreement(state);
    tutti_peers_release(state->peers);
    state->peers = NULL;
    end_turn(state);
}

size_t tt_fused_workspace_bytes(tutti_group *group) {
    void *found;
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER || tu_group_attachment(group, &attachment, &found) != TUTTI_OK)
        return 0;
    const tu_fused *state = found;
    return atomic_load_explicit(&state->bytes, memory_order_relaxed) + tu_fused_device_bytes(group);
}

int64_t tu_fused_overlaps(tutti_group *group) {
    void *found;
    if (tu_group_attachment(group, &attachment, &found) != TUTTI_OK)
        return 0;
    const tu_fused *state = found;
    return atomic_load_explicit(&state->overlaps, memory_order_relaxed);
}

char *tu_fused_half(const tu_fused *state, int rank) {
    return (char *)tutti_peers_buffer(state->peers, rank) + (state->gathers % 2) * state->half_bytes;
}

/* ---- rings ---- */

static size_t round_up(size_t bytes) {
    return (bytes + TU_FUSED_ALIGN - 1) / TU_FUSED_ALIGN * TU_FUSED_ALIGN;
}

size_t tu_fused_ring_for(const tu_fused *state, size_t block_bytes, size_t tile_bytes) {
    size_t tiles = TU_FUSED_TILES * round_up(tile_bytes), all = TU_FUSED_RINGS;
    if (block_bytes < TU_FUSED_SHORT)
        all = 0;
    else if (block_bytes > TU_FUSED_RINGS)
        all = TU_FUSED_LONG_RINGS;
    size_t share = all / (size_t)(state->size - 1);
    return round_up(tiles > share ? tiles : share);
}

size_t tu_fused_tile_place(const tu_fused *state, size_t tile_bytes, uint64_t index) {
    size_t each = round_up(tile_bytes), before = (state->ring_bytes - state->ring_at) / each;
    return index < before ? state->ring_at + (size_t)index * each
                          : (size_t)(index - before) % (state->ring_bytes / each) * each;
}

int tu_fused_channels(const tu_fused *state, size_t tile_bytes) {
    size_t tiles = state->ring_bytes / round_up(tile_bytes), most = TU_FUSED_CHANNELS;
    return tiles < TU_FUSED_TILES ? 1 : (int)(tiles - 3 < most ? tiles - 3 : most);
}

/* A rank needs none for itself. */
char *tu_fused_ring(const tu_fused *state, int rank, int from, size_t place) {
    size_t ring = (size_t)(from < rank ? from : from - 1);
    return (char *)tutti_peers_buffer(state->peers, rank) + 2 * state->half_bytes + ring * state->ring_bytes + place;
}

/* ---- the agreement ---- */

tutti_status tu_fused_publish(tu_fused *state, const tu_fused_signature *signature, tutti_status status) {
    tu_fused_record *own = &state->own;
    own->signature = signature->hash;
    own->status = (int32_t)status;
    if (status == TUTTI_OK)
        memcpy(own->text, signature->text, sizeof own->text);
    else
        tu_error_shorten(own->text, sizeof own->text, tutti_error_message());
    tutti_call call = TUTTI_CALL_INIT;
    state->work = NULL;
    call.work = &state->work;
    state->who = signature->who;
    return tu_fused_all_gather(state->who, state->group, own, state->records, sizeof *own, &call);
}

/* Takes the tiles that were sent in vain, so that the mailboxes are empty again. */
static tutti_status take_tiles(tu_fused *state) {
    tutti_status status = TUTTI_OK;
    for (int rank = 0; rank < state->size && status == TUTTI_OK; rank++)
        if (rank != state->rank && state->records[rank].sent)
            status = tutti_peers_wait_signal(state->peers, rank, 0, NULL);
    return status;
}

/* Every rank finds the same: the call fails on all of them and ends nothing. The workspace goes, on all of them, since
 * the ranks may have counted their tiles differently. */
static tutti_status disagree(tu_fused *state) {
    tutti_error_copy error;
    tu_error_save(&error);
    if (take_tiles(state) != TUTTI_OK) /* that has ended the group, or is no use: the first error is what counts */
        return tu_error_restore(&error);
    drop_workspace(state);
    return tu_error_restore(&error);
}

tutti_status tu_fused_agree(tu_fused *state, const char *who) {
    tutti_status status = wait_agreement(state);
    tutti_work_release(state->work);
    state->work = NULL;
    if (status != TUTTI_OK)
        return status;
    const tu_fused_record *records = state->records;
    for (int rank = 0; rank < state->size && status == TUTTI_OK; rank++)
        if (records[rank].status != TUTTI_OK)
            status = tu_error((tutti_status)records[rank].status, "%s: rank %d could not take part: %s", who, rank,
                              records[rank].text);
    for (int rank = 1; rank < state->size && status == TUTTI_OK; rank++)
        if (records[rank].signature != records[0].signature)
            status = tu_error(TUTTI_ERROR_MISMATCH,
                              "%s: the ranks of group \"%s\" make different calls: rank 0 %s, but rank %d %s", who,
                              tutti_group_name(state->group), records[0].text, rank, records[rank].text);
    return status == TUTTI_OK ? TUTTI_OK : disagree(state);
}

/* ---- growing ---- */

/* How it went on each rank; the first failure is everybody's. */
static tutti_status tell_all(tu_fused *state, tutti_status mine) {
    tutti_error_copy error;
    if (mine != TUTTI_OK)
        tu_error_save(&error);
    state->own.status = (int32_t)mine;
    snprintf(state->own.text, sizeof state->own.text, "%.*s", (int)sizeof state->own.text - 1,
             mine == TUTTI_OK ? "" : tutti_error_message());
    tutti_status status =
        tu_fused_all_gather(state->who, state->group, &state->own, state->records, sizeof state->own, NULL);
    if (mine != TUTTI_OK)
        return tu_error_restore(&error);
    for (int rank = 0; rank < state->size && status == TUTTI_OK; rank++)
        if (state->records[rank].status != TUTTI_OK)
            status = tu_error((tutti_status)state->records[rank].status,
                              "rank %d has no memory for the workspace of fused operations: %s", rank,
                              state->records[rank].text);
    return status;
}

/* The drivers read and write the others' memory in place. The same on all ranks: each has some on other hosts, or none.
 */
static tutti_status check_mapped(const tu_fused *state, const tutti_peers *peers) {
    for (int rank = 0; rank < state->size; rank++)
        if (tutti_peers_buffer(peers, rank) == NULL)
            return tu_error(TUTTI_ERROR_UNSUPPORTED,
                            "fused operations need all ranks of group \"%s\" on one host: rank %d is on another. "
                            "Make a group per host (tutti_group_split)",
                            tutti_group_name(state->group), rank);
    return TUTTI_OK;
}

tutti_status tu_fused_grow(tu_fused *state, size_t half_bytes, size_t ring_bytes) {
    size_t half = round_up(half_bytes > state->half_bytes ? half_bytes : state->half_bytes),
           ring = ring_bytes > state->ring_bytes ? ring_bytes : state->ring_bytes;
    tutti_memory *memory = NULL;
    tutti_peers *peers = NULL;
    size_t bytes = 2 * half + (size_t)(state->size - 1) * ring;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.signal_pad_bytes = 4 * (size_t)state->size * TU_FUSED_CHANNELS;
    drop_workspace(state); /* first: the old and the new one need not lie in memory together */
    tutti_status status =
        tell_all(state, tutti_memory_alloc(tutti_group_world(state->group), bytes, &options, &memory));
    if (status == TUTTI_OK)
        status = tutti_memory_rendezvous(memory, state->group, &peers);
    if (status == TUTTI_OK)
        status = check_mapped(state, peers);
    if (status != TUTTI_OK) {
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        return status;
    }
    state->memory = memory;
    state->peers = peers;
    atomic_store_explicit(&state->bytes, tutti_memory_bytes(memory), memory_order_relaxed);
    state->half_bytes = half;
    state->ring_bytes = ring;
    return TUTTI_OK;
}

/* ---- failures ---- */

tutti_status tu_fused_give_up(tu_fused *state, const char *who) {
    return end_group(state->group, who);
}

tutti_status tu_fused_refuse_inside(tu_fused *state, const char *who, tutti_status status) {
    const tu_fused_signature nothing = { .who = who };
    tutti_error_copy error;
    tu_error_save(&error);
    status = tu_fused_publish(state, &nothing, status);
    if (status == TUTTI_OK)
        status = tu_fused_agree(state, who);
    (void)status; /* what went wrong here counts */
    return tu_error_restore(&error);
}

tutti_status tu_fused_refuse(tutti_group *group, const char *who, tutti_status status) {
    tutti_error_copy error;
    tu_fused *state;
    void *found;
    if (tutti_group_size(group) == 1 || tu_fused_is_fake(group))
        return status;
    tu_error_save(&error);
    if (tu_group_attachment(group, &attachment, &found) == TUTTI_OK && is_inside(found))
        return tu_error_restore(&error);
    if (tu_fused_enter(group, &state) != TUTTI_OK) {
        tu_error_restore(&error);
        return end_group(group, who);
    }
    tu_error_restore(&error);
    status = tu_fused_refuse_inside(state, who, status);
    tu_fused_leave(state);
    return status;
}
