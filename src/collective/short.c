/* SPDX-License-Identifier: Apache-2.0
 *
 * The express lane of short messages. A send or a receive without options, of what fits into a packet or a cell, from
 * one named rank to another, in a group that is as it almost always is, needs no task and no request: its packet is
 * posted or taken at once, and most often that is all. Calls in a batch are noted as tu_shorts and go together, with
 * one lock, one number after the other, and two looks at the time for their records.
 *
 * Nothing is decided here that could go wrong. What is unusual about a call or the group is left to the ordinary way
 * (send.c, batch.c, message.c) before anything has happened. A packet that is not exactly what the receive at its turn
 * expects stays where it is, and what did not come after a few looks has to wait for it: both become requests, which
 * know of mismatches, deadlines, deaths and circles (by_requests below).
 *
 * Order: while this rank has a request under way, messages do not go this way, so they overtake none. Of several
 * messages to one rank the first that finds the ring full holds up those behind it, and of several receives of one
 * source and tag the first gets the first message.
 *
 * Why: two sends and two receives of 32 bytes in a batch took 5600 instructions, and take 2400 this way (callgrind).
 */
#include "collective/short.h"

#include "base/wait.h"
#include "collective/batch.h"
#include "collective/express.h"
#include "collective/request.h"

#define BRIEF_SPINS 200                 /* looks, where every rank has a core, before the wait is a request's */
#define BRIEF_YIELDS 20                 /* the same where ranks share cores */
#define BRIEF_TIME (1 * TU_MILLISECOND) /* and they end, too, when the core came back late */

/* ---- which calls ---- */

static inline bool has_no_options(const tutti_call *call) {
    return call->size == sizeof *call && call->timeout_ns == 0 && call->stream == NULL &&
           call->algorithm == TUTTI_ALGORITHM_AUTO && call->received == NULL && call->work == NULL &&
           call->executor == NULL && call->device == 0 && call->strided_in == NULL && call->strided_out == NULL;
}

/* Everything that the ordinary way would refuse, or do in another way, is not short. */
static inline bool note(const tutti_group *group, const tu_message *message, tu_short *note) {
    bool sends = message->operation == TU_OPERATION_SEND;
    size_t element = tutti_dtype_size(message->dtype);
    const void *buffer = sends ? message->in : message->out;
    if (element == 0 || message->count > TU_CELL_BYTES || message->count * element > TU_CELL_BYTES ||
        message->tag < 0 || buffer == NULL || message->peer < 0 || message->peer >= group->size ||
        message->peer == group->rank)
        return false;
    *note = (tu_short){ .buffer = (unsigned char *)(uintptr_t)buffer,
                        .count = (uint32_t)message->count,
                        .bytes = (uint32_t)(message->count * element),
                        .peer = message->peer,
                        .tag = message->tag,
                        .operation = (uint8_t)message->operation,
                        .dtype = (uint8_t)message->dtype,
                        .element = (uint8_t)element };
    return true;
}

void tu_short_task(const tu_short *note, tu_collective *state, tu_task *task) {
    tu_task_begin(task, state->group, (tu_operation)note->operation);
    task->state = state;
    task->executor = state->only;
    task->info.count = note->count;
    task->info.dtype = note->dtype;
    task->info.root = note->peer;
    task->info.tag = note->tag;
    task->element = note->element;
    if (note->operation == TU_OPERATION_SEND)
        task->in = note->buffer;
    else
        task->out = note->buffer;
}

/* ---- posting and taking ---- */

/* Whether an earlier one of its kind, which it must not overtake, is still to be done. */
static bool is_held_up(const tu_short *notes, int index) {
    const tu_short *note = &notes[index];
    bool sends = note->operation == TU_OPERATION_SEND;
    for (const tu_short *earlier = notes; earlier < note; earlier++)
        if (!earlier->over && earlier->operation == note->operation && earlier->peer == note->peer &&
            (sends || earlier->tag == note->tag))
            return true;
    return false;
}

/* *odd: the ring has room, but no cell is free. */
static inline bool post(tu_messages *messages, const tu_short *note, bool *odd) {
    tu_channels *channels = &messages->channels;
    tu_packet *packet = tu_packet_next(channels, note->peer);
    if (packet == NULL)
        return false;
    int cell = note->bytes > TU_PACKET_BYTES ? tu_cell_find(channels) : -1;
    if (note->bytes > TU_PACKET_BYTES && cell < 0) {
        *odd = true;
        return false;
    }
    packet->message = ++messages->messages;
    packet->bytes = note->bytes;
    packet->tag = note->tag;
    packet->kind = TU_PACKET_MESSAGE;
    packet->dtype = note->dtype;
    if (cell < 0) {
        memcpy(packet->payload, note->buffer, note->bytes);
        (void)tu_packet_post(channels, packet, note->peer);
        return true;
    }
    memcpy(tu_cell(channels, channels->rank, (uint32_t)cell), note->buffer, note->bytes);
    packet->index = packet->fragment = 0;
    packet->cell = (uint32_t)cell + 1;
    tu_cell_use(channels, cell, note->peer, tu_packet_post(channels, packet, note->peer));
    return true;
}

/* Takes the next packet of its source, if that is what it awaits. *odd: something else is there. */
static inline bool take(tu_messages *messages, const tu_short *note, bool *odd) {
    const tu_collective *state = messages->state;
    if (messages->early_count[note->peer] != 0) {
        *odd = true;
        return false;
    }
    const tu_packet *shared = tu_packet_look(&messages->channels, note->peer);
    if (shared == NULL)
        return false;
    /* Read once, as its sender may write garbage between a check and a use. */
    const volatile tu_packet *packet = shared;
    uint64_t bytes = packet->bytes;
    const unsigned char *data = shared->payload;
    if (bytes > TU_PACKET_BYTES)
        data = tu_cell_of(&messages->channels, note->peer, packet->cell, bytes);
    if (data == NULL || packet->kind != TU_PACKET_MESSAGE || packet->tag != note->tag || packet->dtype != note->dtype ||
        bytes > note->bytes || (bytes != note->bytes && bytes % note->element != 0)) {
        *odd = true;
        return false;
    }
    if (messages->blocked_on >= 0)
        tu_blocked_clear(messages);
    memcpy(note->buffer, data, bytes);
    tu_packet_taken(&messages->channels, note->peer);
    tu_bell_ring(state->sleepers, state->bells[note->peer]);
    return true;
}

/* With the lock held: moves on what can be. Returns how many are left; *odd: they need the ordinary way. */
static int move_on(tu_messages *messages, tu_short *notes, int count, bool *odd) {
    int before, left = 0;
    bool no_cell = false;
    for (int i = 0; i < count; i++) {
        if (notes[i].over || notes[i].operation != TU_OPERATION_SEND)
            continue;
        notes[i].over = !(left != 0 && is_held_up(notes, i)) && post(messages, &notes[i], &no_cell);
        left += !notes[i].over;
    }
    int unsent = left;
    do { /* again when some were taken: there may be more behind them, for receives that came before */
        before = left;
        left = unsent;
        *odd = false;
        for (int i = 0; i < count; i++) {
            if (notes[i].over || notes[i].operation == TU_OPERATION_SEND)
                continue;
            notes[i].over = !(left != 0 && is_held_up(notes, i)) && take(messages, &notes[i], odd);
            left += !notes[i].over;
        }
    } while (*odd && left != before);
    *odd |= no_cell;
    return left;
}

/* ---- records ---- */

typedef struct journey {
    tu_collective *state;
    tu_messages *messages;
    const tu_recorder *recorder;
    tu_short *notes;
    int count;
    uint64_t began;         /* ticks */
    uint64_t sequence;      /* of the first, among the group's messages */
    tu_operation_info info; /* what is the same for all of them */
} journey;

static inline void number(journey *this) {
    tutti_group *group = this->state->group;
    int64_t timeout = atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
    this->sequence = atomic_fetch_add_explicit(&group->messages, (uint64_t)this->count, memory_order_relaxed) + 1;
    this->info.group_key = group->key;
    this->info.group_index = group->recorder_index;
    this->info.timeout_ns = timeout != 0 ? timeout : group->world->timeout_ns;
    memcpy(&this->info.executor, tu_executor_shm.name, sizeof this->info.executor);
}

/* Those that were over before anybody could have seen them under way. */
static inline void record_past(const journey *this) {
    tu_record_message past[TU_SHORT_MOST];
    int count = 0;
    for (int i = 0; i < this->count; i++) {
        const tu_short *note = &this->notes[i];
        past[count] = (tu_record_message){ .sequence = this->sequence + (uint64_t)i,
                                           .count = note->count,
                                           .bytes = note->bytes,
                                           .root = note->peer,
                                           .tag = note->tag,
                                           .operation = note->operation,
                                           .dtype = note->dtype };
        count += note->over;
    }
    tu_record_past_messages(this->recorder, &this->info, past, count, this->began, tu_record_time(this->recorder));
}

/* Of a message that has to wait. */
static tu_operation_info info_of(const journey *this, int index) {
    const tu_short *note = &this->notes[index];
    tu_operation_info info = this->info;
    info.sequence = this->sequence + (uint64_t)index;
    info.count = note->count;
    info.root = note->peer;
    info.tag = note->tag;
    info.operation = note->operation;
    info.dtype = note->dtype;
    return info;
}

/* ---- those that have to wait ---- */

static void end_records(const journey *this) {
    for (int i = 0; i < this->count; i++)
        if (this->notes[i].over && this->notes[i].ticket != 0) {
            tu_record_end_well(this->recorder, this->notes[i].ticket, this->notes[i].operation, 0,
                               this->notes[i].bytes);
            this->notes[i].ticket = 0;
        }
}

/* The rest goes on in the ordinary way, under the numbers and in the records that it has. */
static tutti_status by_requests(journey *this) {
    tu_task tasks[TU_SHORT_MOST];
    tu_request requests[TU_SHORT_MOST], *begun[TU_SHORT_MOST];
    int count = 0;
    for (int sends = 0; sends < 2; sends++)
        for (int i = 0; i < this->count; i++) {
            const tu_short *note = &this->notes[i];
            if (note->over || (note->operation == TU_OPERATION_SEND) != (sends == 1))
                continue;
            tu_task *task = &tasks[count];
            tu_short_task(note, this->state, task);
            task->info = info_of(this, i);
            task->ticket = note->ticket;
            task->entered = true;
            requests[count] = (tu_request){ .task = task };
            begun[count] = &requests[count];
            count++;
        }
    tu_messages_begin(this->state, begun, count);
    return tu_messages_await(this->state, begun, count, TUTTI_OK);
}

/* A word of a channel, and from which number on it is worth the lock. Only a hint: another thread may take a packet. */
typedef struct watched {
    const _Atomic uint64_t *word;
    uint64_t least;
} watched;

/* With the lock held: what those that are left wait for, a packet of their source or room in the ring to their target.
 */
static int watch(const journey *this, watched *words) {
    tu_channels *channels = &this->messages->channels;
    int count = 0, own = this->state->rank;
    for (const tu_short *note = this->notes; note < this->notes + this->count; note++) {
        if (note->over)
            continue;
        bool sends = note->operation == TU_OPERATION_SEND;
        const tu_channel *channel =
            sends ? tu_channel_of(channels, own, note->peer) : tu_channel_of(channels, note->peer, own);
        uint64_t taken = channels->taken[note->peer];
        words[count++] = sends ? (watched){ &channel->taken, channels->sent[note->peer] - TU_PACKETS + 1 }
                               : (watched){ &channel->packets[taken % TU_PACKETS].number, taken + 1 };
    }
    return count;
}

static bool has_changed(const watched *words, int count) {
    for (int i = 0; i < count; i++) /* relaxed: what is there is read with the lock held */
        if ((int64_t)(atomic_load_explicit(words[i].word, memory_order_relaxed) - words[i].least) >= 0)
            return true;
    return false;
}

/* With the lock taken here: how many are left, and what for. */
static int look(journey *this, watched *words, bool *odd) {
    pthread_mutex_lock(&this->messages->lock);
    *odd = this->messages->first != NULL; /* another thread's */
    int left = *odd ? 1 : move_on(this->messages, this->notes, this->count, odd);
    if (left != 0)
        left = watch(this, words);
    pthread_mutex_unlock(&this->messages->lock);
    return left;
}

/* A few more looks, between which the others have time; then whatever is left becomes requests. */
static __attribute__((noinline)) tutti_status wait_for_rest(journey *this, watched *words, int left, bool odd) {
    for (int i = 0; i < this->count; i++)
        if (!this->notes[i].over) {
            tu_operation_info info = info_of(this, i);
            this->notes[i].ticket = tu_record_begin_at(this->recorder, &info, this->began);
        }
    bool crowded = this->state->spins == 0;
    int64_t until = 0;
    for (int looks = 0; left != 0 && !odd && looks < (crowded ? BRIEF_YIELDS : BRIEF_SPINS); looks++) {
        if (!crowded)
            tu_pause();
        else if (!tu_give_way())
            break;
        if (has_changed(words, left)) {
            left = look(this, words, &odd);
            continue;
        }
        if (!tu_group_usual(this->state->group))
            break;
        if (crowded) {
            int64_t now = tu_clock_now();
            until = until == 0 ? now + BRIEF_TIME : until;
            odd = now > until;
        }
    }
    end_records(this);
    return left == 0 ? TUTTI_OK : by_requests(this);
}

/* ---- the way in ---- */

static inline bool run(tu_collective *state, tu_short *notes, int count, tutti_status *status) {
    tu_messages *messages = atomic_load_explicit(&state->messages, memory_order_acquire);
    if (messages == NULL || pthread_mutex_trylock(&messages->lock) != 0)
        return false;
    if (messages->first != NULL || messages->done != NULL) {
        pthread_mutex_unlock(&messages->lock);
        return false;
    }
    const tutti_world *world = state->group->world;
    journey this = { .state = state,
                     .messages = messages,
                     .recorder = tu_job_recorder(world->job, world->local_rank),
                     .notes = notes,
                     .count = count };
    this.began = tu_record_time(this.recorder);
    bool odd;
    watched words[TU_SHORT_MOST];
    int left = move_on(messages, notes, count, &odd);
    if (left != 0)
        left = watch(&this, words);
    pthread_mutex_unlock(&messages->lock);
    number(&this);
    record_past(&this);
    *status = left == 0 ? TUTTI_OK : wait_for_rest(&this, words, left, odd);
    return true;
}

bool tu_short_run(tu_collective *state, tu_short *notes, int count, tutti_status *status) {
    TU_INSIDE_GROUP(state->group);
    return tu_group_usual(state->group) && run(state, notes, count, status);
}

bool tu_short_submit(const tu_message *messages, int count, const tutti_call *call, tutti_status *status) {
    tutti_group *group = messages->group;
    if (call != NULL && !has_no_options(call))
        return false;
    TU_INSIDE_GROUP(group);
    if (!tu_group_usual(group))
        return false;
    tu_collective *state = tu_collective_find(group);
    if (state == NULL || state->only != &tu_executor_shm)
        return false;
    tutti_batch *batch = call != NULL ? call->batch : NULL;
    tu_short own[2], *notes = batch != NULL ? tu_batch_short_places(batch, group, count) : own;
    if (notes == NULL)
        return false;
    for (int i = 0; i < count; i++)
        if (!note(group, &messages[i], &notes[i]))
            return false;
    if (batch == NULL)
        return run(state, notes, count, status);
    tu_batch_note_short(batch, count);
    *status = TUTTI_OK;
    return true;
}
