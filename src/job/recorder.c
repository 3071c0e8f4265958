/* SPDX-License-Identifier: Apache-2.0
 *
 * The flight recorder. One per rank, in the job segment: the rank's threads write it, anybody who maps it reads it.
 *
 * An entry is two cache lines. Its `stamp` is twice its id, odd while the entry is being filled; `end_stamp` becomes
 * equal to `stamp` when the operation ends. A reader takes the stamp, the fields, and the stamp again, and skips an
 * entry whose stamp changed. Fields are stored with release and loaded with acquire, which keeps them between the two
 * stamps without a fence (free on x86-64, and visible to ThreadSanitizer).
 *
 * An entry that still runs is not overwritten when the ring comes round: a rank that hangs in one thread and works on
 * in another still shows where it hangs.
 *
 * Time is the cycle counter, where it is the same on all cores and never stops, and is turned into nanoseconds by the
 * reader, who interpolates between the pair of readings made when the recorder was prepared and a pair made now.
 */
#include "job/recorder.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/bare.h"
#include "base/clock.h"
#include "base/wait.h"

/* How often a new entry steps over one that still runs before it takes the place all the same. */
#define STEPS_OVER 16

/* Counters are kept by thread, so that counting needs no atomic addition: all shards but the last belong to the thread
 * that claimed them first; the last is shared by the others, with atomic additions. */
#define SHARDS 4

typedef _Atomic uint64_t word;

typedef struct entry {
    /* first line: written at begin by the thread that begins */
    _Alignas(128) word stamp; /* 2 * id; odd while being filled; 0 never used */
    word created;             /* ticks */
    word group_key;
    word sequence;
    word count;
    word timeout_ns;
    word group_index_and_root;
    word tag_and_what; /* tag, operation, dtype, reduction, algorithm */
    /* second line: thread and executor at begin, the rest by the same thread later */
    word thread;
    word executor; /* characters */
    word waiting;  /* low half of the id, world rank + 1; counts for that id only */
    word ended;    /* ticks */
    word status;
    word end_stamp;
} entry;
_Static_assert(sizeof(entry) == 128, "an entry is two cache lines");

typedef struct group_slot {
    word stamp; /* 2 * (index + 1); odd while being filled; 0 never used. Written by the thread that makes the group. */
    word key;
    word size;
    word name[8];
    word ranks[TU_RECORDER_MEMBERS / 4]; /* 16 bits each */
} group_slot;

typedef struct counter {
    _Alignas(128) word bytes;
    word ticks;
    word failures;
    word reserved;
    word calls[TU_COUNTER_ALGORITHMS];
} counter;

struct tu_recorder_memory {
    _Alignas(128) word last_id;      /* any thread of the rank, by atomic addition */
    _Alignas(128) word anchor_ticks; /* this line: written once, by tu_recorder_init */
    word anchor_ns;
    word prepared;                        /* 1: the owner has come */
    word counts_nanoseconds;              /* 1: no usable cycle counter, ticks are nanoseconds */
    _Alignas(128) word next_group;        /* any thread of the rank, by atomic addition */
    _Atomic uint32_t shard_owner[SHARDS]; /* thread that claimed it, by compare-and-swap from 0 */
    counter counters[SHARDS]
                    [TU_OPERATION_COUNT]; /* [s][]: the owner of shard s alone; the last: anyone, by atomic addition */
    group_slot groups[TU_RECORDER_GROUPS];
    entry entries[]; /* as many as tu_recorder.mask says, and one more */
};

/* The calling thread's id and the shard it last used, so that an operation costs no system call. */
static _Thread_local struct {
    uint32_t thread;
    uint32_t shard;
} self;

static inline void put(word *to, uint64_t value) {
    atomic_store_explicit(to, value, memory_order_release); /* pairs with get */
}

static inline uint64_t get(const word *from) {
    return atomic_load_explicit(from, memory_order_acquire); /* pairs with put */
}

static inline uint64_t pair(uint32_t low, uint32_t high) {
    return (uint64_t)high << 32 | low;
}

/* ---- time ---- */

static inline uint64_t counter_now(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return 0;
#endif
}

static bool counter_usable(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & 1u << 8) != 0; /* invariant time-stamp counter */
#elif defined(__aarch64__)
    return true; /* the architecture promises it */
#else
    return false;
#endif
}

static inline uint64_t ticks_now(const tu_recorder *recorder) {
    if (__builtin_expect(atomic_load_explicit(&recorder->memory->counts_nanoseconds, memory_order_relaxed) != 0, 0))
        return (uint64_t)tu_clock_now();
    return counter_now();
}

/* The line through two pairs of readings. */
typedef struct scale {
    uint64_t ticks;
    int64_t ns;
    double ns_per_tick;
} scale;

static scale scale_of(const tu_recorder *recorder) {
    scale line = { get(&recorder->memory->anchor_ticks), (int64_t)get(&recorder->memory->anchor_ns), 1.0 };
    if (get(&recorder->memory->counts_nanoseconds) != 0)
        return line;
    int64_t ns = tu_clock_now() - line.ns;
    uint64_t ticks = counter_now() - line.ticks;
    if (ns > 0 && (int64_t)ticks > 0)
        line.ns_per_tick = (double)ns / (double)ticks;
    return line;
}

static int64_t nanoseconds(const scale *line, uint64_t ticks) {
    return line->ns + (int64_t)((double)(int64_t)(ticks - line->ticks) * line->ns_per_tick);
}

/* ---- preparing ---- */

uint32_t tu_recorder_round(int64_t asked) {
    uint32_t entries = asked == 0 ? TU_RECORDER_ENTRIES : TU_RECORDER_LEAST;
    while (entries < asked && entries < TU_RECORDER_MOST)
        entries *= 2;
    return entries;
}

size_t tu_recorder_bytes(uint32_t entries) {
    return sizeof(tu_recorder_memory) + entries * sizeof(entry);
}

tu_recorder tu_recorder_at(void *memory, size_t bytes) {
    uint32_t entries = TU_RECORDER_LEAST;
    while (entries < TU_RECORDER_MOST && tu_recorder_bytes(2 * entries) <= bytes)
        entries *= 2;
    return (tu_recorder){ .memory = memory, .mask = entries - 1 };
}

size_t tu_recorder_entries(const tu_recorder *recorder) {
    return get(&recorder->memory->prepared) == 0 ? 0 : (size_t)recorder->mask + 1;
}

void tu_recorder_init(const tu_recorder *recorder) {
    memset(recorder->memory, 0, tu_recorder_bytes((uint32_t)recorder->mask + 1));
    bool usable = counter_usable();
    put(&recorder->memory->counts_nanoseconds, usable ? 0 : 1);
    int64_t now = tu_clock_now();
    put(&recorder->memory->anchor_ticks, usable ? counter_now() : (uint64_t)now);
    put(&recorder->memory->anchor_ns, (uint64_t)now);
    put(&recorder->memory->prepared, 1);
}

uint32_t tu_recorder_group(const tu_recorder *recorder, uint64_t group_key, const char *name, const int *world_ranks,
                           int count) {
    uint64_t index = atomic_fetch_add_explicit(&recorder->memory->next_group, 1, memory_order_relaxed);
    group_slot *slot = &recorder->memory->groups[index == 0 ? 0 : 1 + (index - 1) % (TU_RECORDER_GROUPS - 1)];
    uint64_t text[8] = { 0 };
    strncpy((char *)text, name, sizeof text - 1);
    uint64_t ranks[TU_RECORDER_MEMBERS / 4] = { 0 };
    for (int i = 0; i < count && i < TU_RECORDER_MEMBERS; i++)
        ranks[i / 4] |= (uint64_t)(uint16_t)world_ranks[i] << 16 * (i % 4);
    put(&slot->stamp, 2 * (index + 1) + 1);
    put(&slot->key, group_key);
    put(&slot->size, (uint64_t)count);
    for (size_t i = 0; i < 8; i++)
        put(&slot->name[i], text[i]);
    for (size_t i = 0; i < TU_RECORDER_MEMBERS / 4; i++)
        put(&slot->ranks[i], ranks[i]);
    put(&slot->stamp, 2 * (index + 1));
    return (uint32_t)index;
}

/* ---- writing ---- */

static uint32_t find_shard(const tu_recorder *recorder) {
    if (self.thread == 0)
        self.thread = (uint32_t)syscall(SYS_gettid);
    for (uint32_t shard = 0; shard < SHARDS - 1; shard++) {
        uint32_t owner = 0;
        if (atomic_compare_exchange_strong_explicit(&recorder->memory->shard_owner[shard], &owner, self.thread,
                                                    memory_order_relaxed, memory_order_relaxed) ||
            owner == self.thread)
            return self.shard = shard;
    }
    return self.shard = SHARDS - 1;
}

/* The shard of the calling thread. Thread-local memory may speak of another recorder, so the owner is compared. */
static inline uint32_t shard_of(const tu_recorder *recorder) {
    if (self.thread != 0 &&
        atomic_load_explicit(&recorder->memory->shard_owner[self.shard], memory_order_relaxed) == self.thread)
        return self.shard;
    return find_shard(recorder);
}

static inline entry *entry_of(const tu_recorder *recorder, uint64_t id) {
    return (entry *)&recorder->memory->entries[id & recorder->mask];
}

static inline bool runs(const entry *e) {
    uint64_t stamp = atomic_load_explicit(&e->stamp, memory_order_relaxed);
    return stamp != 0 && atomic_load_explicit(&e->end_stamp, memory_order_relaxed) != stamp;
}

static inline entry *next_place(const tu_recorder *recorder, uint64_t *id) {
    *id = atomic_fetch_add_explicit(&recorder->memory->last_id, 1, memory_order_relaxed) + 1;
    return entry_of(recorder, *id);
}

/* Takes the next place; the odd stamp says that it is being filled. */
static inline entry *take_place(const tu_recorder *recorder, uint64_t *id) {
    entry *e = next_place(recorder, id);
    for (int step = 0; step < STEPS_OVER && runs(e); step++)
        e = next_place(recorder, id);
    atomic_store_explicit(&e->stamp, 2 * *id + 1, memory_order_relaxed);
    return e;
}

static inline void fill(entry *e, const tu_operation_info *info, uint64_t began) {
    put(&e->created, began);
    put(&e->group_key, info->group_key);
    put(&e->sequence, info->sequence);
    put(&e->count, info->count);
    put(&e->timeout_ns, (uint64_t)info->timeout_ns);
    put(&e->group_index_and_root, pair(info->group_index, (uint32_t)info->root));
    uint32_t what = info->operation | (uint32_t)info->dtype << 8 | (uint32_t)info->reduction << 16 |
                    (uint32_t)info->algorithm << 24;
    put(&e->tag_and_what, pair((uint32_t)info->tag, what));
    put(&e->thread, self.thread);
    put(&e->executor, info->executor);
}

uint64_t tu_record_time(const tu_recorder *recorder) {
    return TUTTI_BARE ? 0 : ticks_now(recorder);
}

uint64_t tu_record_begin_at(const tu_recorder *recorder, const tu_operation_info *info, uint64_t began) {
    if (TUTTI_BARE)
        return 1;
    uint64_t id;
    (void)shard_of(recorder); /* for the thread's id */
    entry *e = take_place(recorder, &id);
    fill(e, info, began);
    put(&e->stamp, 2 * id);
    return id;
}

uint64_t tu_record_begin(const tu_recorder *recorder, const tu_operation_info *info) {
    if (TUTTI_BARE)
        return 1;
    uint64_t id;
    (void)shard_of(recorder);
    entry *e = take_place(recorder, &id);
    fill(e, info, ticks_now(recorder));
    put(&e->stamp, 2 * id);
    return id;
}

/* The entry of a ticket, or NULL when a newer operation took its place. */
static inline entry *still_mine(const tu_recorder *recorder, uint64_t ticket) {
    entry *e = entry_of(recorder, ticket);
    return atomic_load_explicit(&e->stamp, memory_order_relaxed) == 2 * ticket ? e : NULL;
}

void tu_record_algorithm(const tu_recorder *recorder, uint64_t ticket, uint8_t algorithm) {
    entry *e = still_mine(recorder, ticket);
    if (e == NULL)
        return;
    uint64_t both = atomic_load_explicit(&e->tag_and_what, memory_order_relaxed);
    put(&e->tag_and_what, (both & ~(UINT64_C(0xff) << 56)) | (uint64_t)algorithm << 56);
}

void tu_record_waiting(const tu_recorder *recorder, uint64_t ticket, int world_rank) {
    entry *e = still_mine(recorder, ticket);
    if (e != NULL)
        put(&e->waiting, pair((uint32_t)(world_rank + 1), (uint32_t)ticket));
}

void tu_record_received(const tu_recorder *recorder, uint64_t ticket, int source, int tag) {
    entry *e = still_mine(recorder, ticket);
    if (e == NULL)
        return;
    uint64_t index = atomic_load_explicit(&e->group_index_and_root, memory_order_relaxed);
    uint64_t what = atomic_load_explicit(&e->tag_and_what, memory_order_relaxed);
    put(&e->group_index_and_root, pair((uint32_t)index, (uint32_t)source));
    put(&e->tag_and_what, pair((uint32_t)tag, (uint32_t)(what >> 32)));
}

static inline void add(word *to, uint64_t value, bool shared) {
    if (shared)
        atomic_fetch_add_explicit(to, value, memory_order_relaxed);
    else /* this thread is the only writer */
        atomic_store_explicit(to, atomic_load_explicit(to, memory_order_relaxed) + value, memory_order_relaxed);
}

static inline void count(const tu_recorder *recorder, uint32_t shard, uint8_t operation, uint8_t algorithm,
                         uint64_t bytes, uint64_t ticks, bool failed) {
    if (operation >= TU_OPERATION_COUNT)
        return;
    bool shared = shard == SHARDS - 1;
    counter *c = &recorder->memory->counters[shard][operation];
    add(&c->bytes, bytes, shared);
    add(&c->ticks, (int64_t)ticks > 0 ? ticks : 0, shared);
    add(&c->calls[algorithm < TU_COUNTER_ALGORITHMS ? algorithm : TU_COUNTER_ALGORITHMS - 1], 1, shared);
    if (failed)
        add(&c->failures, 1, shared);
}

static void count_entry(const tu_recorder *recorder, const entry *e, uint64_t ticks, bool failed) {
    uint32_t what = (uint32_t)(atomic_load_explicit(&e->tag_and_what, memory_order_relaxed) >> 32);
    uint8_t dtype = (uint8_t)(what >> 8);
    size_t element = dtype == 0 ? 1 : tutti_dtype_size((tutti_dtype)dtype);
    count(recorder, shard_of(recorder), (uint8_t)what, (uint8_t)(what >> 24),
          atomic_load_explicit(&e->count, memory_order_relaxed) * element, ticks, failed);
}

void tu_record_end(const tu_recorder *recorder, uint64_t ticket, tutti_status status) {
    if (TUTTI_BARE)
        return;
    entry *e = still_mine(recorder, ticket);
    if (e == NULL)
        return;
    uint64_t now = ticks_now(recorder);
    uint64_t taken = now - atomic_load_explicit(&e->created, memory_order_relaxed);
    put(&e->ended, now);
    put(&e->status, (uint64_t)status);
    /* Counted while the entry still runs: from its end on another thread may take it for a new operation. */
    count_entry(recorder, e, taken, status != TUTTI_OK);
    put(&e->end_stamp, 2 * ticket);
}

void tu_record_end_well(const tu_recorder *recorder, uint64_t ticket, uint8_t operation, uint8_t algorithm,
                        uint64_t bytes) {
    if (TUTTI_BARE)
        return;
    entry *e = still_mine(recorder, ticket);
    if (e == NULL)
        return;
    uint64_t now = ticks_now(recorder);
    put(&e->ended, now);
    put(&e->status, TUTTI_OK);
    count(recorder, shard_of(recorder), operation, algorithm, bytes,
          now - atomic_load_explicit(&e->created, memory_order_relaxed), false);
    put(&e->end_stamp, 2 * ticket);
    const entry *next = entry_of(recorder, ticket + 1); /* for the next call, which then need not wait for it */
    tu_prefetch_for_write(&next->stamp);
    tu_prefetch_for_write(&next->thread);
}

/* How many places ahead the lines are fetched, so that a batch of messages does not wait for them. */
#define AHEAD 4

static inline void end_past(const tu_recorder *recorder, entry *e, uint64_t id, uint64_t ended) {
    const entry *ahead = entry_of(recorder, id + AHEAD);
    tu_prefetch_for_write(&ahead->stamp);
    tu_prefetch_for_write(&ahead->thread);
    put(&e->ended, ended);
    put(&e->status, TUTTI_OK);
    put(&e->end_stamp, 2 * id); /* first, so that nobody sees it run */
    put(&e->stamp, 2 * id);
}

void tu_record_past(const tu_recorder *recorder, const tu_operation_info *info, uint64_t began, uint64_t ended,
                    uint64_t bytes) {
    if (TUTTI_BARE)
        return;
    uint64_t id;
    uint32_t shard = shard_of(recorder);
    entry *e = take_place(recorder, &id);
    fill(e, info, began);
    count(recorder, shard, info->operation, info->algorithm, bytes, ended - began, false);
    end_past(recorder, e, id, ended);
}

void tu_record_past_messages(const tu_recorder *recorder, const tu_operation_info *common,
                             const tu_record_message *messages, int messages_count, uint64_t began, uint64_t ended) {
    if (TUTTI_BARE)
        return;
    uint32_t shard = shard_of(recorder), thread = self.thread;
    /* Places for all of them; one in which something still runs is left empty, and another is taken. */
    uint64_t next =
        atomic_fetch_add_explicit(&recorder->memory->last_id, (uint64_t)messages_count, memory_order_relaxed);
    for (const tu_record_message *message = messages; message < messages + messages_count; message++) {
        uint64_t id = ++next;
        entry *e = entry_of(recorder, id);
        if (__builtin_expect(runs(e), 0))
            e = take_place(recorder, &id);
        atomic_store_explicit(&e->stamp, 2 * id + 1, memory_order_relaxed);
        put(&e->created, began);
        put(&e->group_key, common->group_key);
        put(&e->sequence, message->sequence);
        put(&e->count, message->count);
        put(&e->timeout_ns, (uint64_t)common->timeout_ns);
        put(&e->group_index_and_root, pair(common->group_index, (uint32_t)message->root));
        put(&e->tag_and_what, pair((uint32_t)message->tag, message->operation | (uint32_t)message->dtype << 8));
        put(&e->thread, thread);
        put(&e->executor, common->executor);
        count(recorder, shard, message->operation, 0, message->bytes, ended - began, false);
        end_past(recorder, e, id, ended);
    }
}

/* ---- reading ---- */

static void unpack(const entry *e, tu_operation_info *info) {
    info->group_key = get(&e->group_key);
    info->sequence = get(&e->sequence);
    info->count = get(&e->count);
    info->timeout_ns = (int64_t)get(&e->timeout_ns);
    info->executor = get(&e->executor);
    uint64_t both = get(&e->group_index_and_root);
    info->group_index = (uint32_t)both;
    info->root = (int32_t)(both >> 32);
    both = get(&e->tag_and_what);
    info->tag = (int32_t)both;
    info->operation = (uint8_t)(both >> 32);
    info->dtype = (uint8_t)(both >> 40);
    info->reduction = (uint8_t)(both >> 48);
    info->algorithm = (uint8_t)(both >> 56);
}

/* Reads what lies at the place of `id`: that entry, or an older one that still ran when the ring came round. False when
 * it is unused or changed meanwhile. */
static bool read_entry(const tu_recorder *recorder, uint64_t id, const scale *line, tu_record_view *view) {
    const entry *e = entry_of(recorder, id);
    uint64_t stamp = get(&e->stamp);
    if (stamp == 0 || stamp % 2 != 0)
        return false;
    memset(view, 0, sizeof *view);
    id = view->id = stamp / 2;
    unpack(e, &view->info);
    uint64_t created = get(&e->created);
    view->thread = (uint32_t)get(&e->thread);
    view->running = get(&e->end_stamp) != stamp;
    view->waiting_for = -1;
    uint64_t ended = 0;
    if (view->running) {
        uint64_t waiting = get(&e->waiting);
        if ((uint32_t)(waiting >> 32) == (uint32_t)id)
            view->waiting_for = (int)(uint32_t)waiting - 1;
    } else {
        ended = get(&e->ended);
        view->status = (tutti_status)get(&e->status);
    }
    if (get(&e->stamp) != stamp || view->info.operation >= TU_OPERATION_COUNT)
        return false;
    view->created_ns = nanoseconds(line, created);
    view->ended_ns = view->running ? 0 : nanoseconds(line, ended);
    return true;
}

/* Visits readable entries from the newest on until `wanted` says yes. One that is older than its place is remembered:
 * it is the answer only when nothing newer is. */
static bool find_entry(const tu_recorder *recorder, bool (*wanted)(const tu_record_view *view, uint64_t *argument),
                       uint64_t argument, tu_record_view *view) {
    scale line = scale_of(recorder);
    uint64_t newest = get(&recorder->memory->last_id), oldest_found = 0;
    size_t entries = tu_recorder_entries(recorder);
    for (uint64_t back = 0; back < entries && back < newest; back++) {
        tu_record_view candidate;
        if (!read_entry(recorder, newest - back, &line, &candidate) || !wanted(&candidate, &argument))
            continue;
        bool in_place = candidate.id >= newest - back;
        if (in_place || candidate.id > oldest_found) {
            *view = candidate;
            oldest_found = candidate.id;
        }
        if (in_place)
            return true;
    }
    return oldest_found != 0;
}

static bool runs_in(const tu_record_view *view, uint64_t *group_key) {
    return view->running && (*group_key == 0 || view->info.group_key == *group_key);
}

static bool ended_well_in(const tu_record_view *view, uint64_t *group_key) {
    return !view->running && view->status == TUTTI_OK && (*group_key == 0 || view->info.group_key == *group_key);
}

/* Wraps below 0, so that it says yes once. */
static bool after_skipping(const tu_record_view *view, uint64_t *to_skip) {
    (void)view;
    return (*to_skip)-- == 0;
}

static int by_id(const void *one, const void *other) {
    uint64_t a = ((const tu_record_view *)one)->id, b = ((const tu_record_view *)other)->id;
    return a < b ? -1 : a > b;
}

bool tu_recorder_current(const tu_recorder *recorder, uint64_t group_key, tu_record_view *view) {
    return find_entry(recorder, runs_in, group_key, view);
}

bool tu_recorder_last(const tu_recorder *recorder, uint64_t group_key, tu_record_view *view) {
    return find_entry(recorder, ended_well_in, group_key, view);
}

bool tu_recorder_entry(const tu_recorder *recorder, uint64_t back, tu_record_view *view) {
    return find_entry(recorder, after_skipping, back, view);
}

size_t tu_recorder_snapshot(const tu_recorder *recorder, tu_record_view *views, size_t room) {
    scale line = scale_of(recorder);
    uint64_t newest = get(&recorder->memory->last_id);
    if (room > tu_recorder_entries(recorder))
        room = tu_recorder_entries(recorder);
    if (room == 0)
        return 0;
    uint64_t first = newest > room ? newest - room + 1 : 1, last = newest < room ? newest : room;
    size_t count = 0;
    bool in_order = true;
    for (uint64_t i = 0; i < last; i++) { /* at most `room`, whatever the newest claims to be */
        if (!read_entry(recorder, first + i, &line, &views[count]))
            continue;
        in_order = in_order && views[count].id == first + i;
        count++;
    }
    if (!in_order)
        qsort(views, count, sizeof *views, by_id);
    return count;
}

static bool read_group(const group_slot *slot, tu_recorder_group_view *view) {
    uint64_t stamp = get(&slot->stamp);
    if (stamp == 0 || stamp % 2 != 0)
        return false;
    view->index = (uint32_t)(stamp / 2 - 1);
    view->key = get(&slot->key);
    view->size = (int)get(&slot->size);
    view->members = view->size < TU_RECORDER_MEMBERS ? view->size : TU_RECORDER_MEMBERS;
    uint64_t text[8];
    for (size_t i = 0; i < 8; i++)
        text[i] = get(&slot->name[i]);
    memcpy(view->name, text, sizeof view->name);
    view->name[sizeof view->name - 1] = '\0';
    for (int i = 0; i < view->members; i++)
        view->world_ranks[i] = (int)(get(&slot->ranks[i / 4]) >> 16 * (i % 4) & 0xffff);
    return get(&slot->stamp) == stamp && view->size >= 0;
}

const char *tu_recorder_group_name(const tu_recorder *recorder, uint32_t group_index) {
    static _Thread_local tu_recorder_group_view view;
    uint32_t place = group_index == 0 ? 0 : 1 + (group_index - 1) % (TU_RECORDER_GROUPS - 1);
    return read_group(&recorder->memory->groups[place], &view) && view.index == group_index ? view.name : "?";
}

size_t tu_recorder_groups(const tu_recorder *recorder, tu_recorder_group_view *views) {
    size_t count = 0;
    for (size_t i = 0; i < TU_RECORDER_GROUPS; i++)
        if (read_group(&recorder->memory->groups[i], &views[count]))
            count++;
    return count;
}

void tu_recorder_counters(const tu_recorder *recorder, tu_operation operation, tu_counters *counters) {
    memset(counters, 0, sizeof *counters);
    scale line = scale_of(recorder);
    uint64_t ticks = 0;
    for (size_t shard = 0; shard < SHARDS; shard++) {
        const counter *c = &recorder->memory->counters[shard][operation];
        counters->bytes += get(&c->bytes);
        counters->failures += get(&c->failures);
        ticks += get(&c->ticks);
        for (size_t i = 0; i < TU_COUNTER_ALGORITHMS; i++) {
            uint64_t calls = get(&c->calls[i]);
            counters->calls += calls;
            counters->by_algorithm[i] += calls;
        }
    }
    counters->time_ns = (int64_t)((double)ticks * line.ns_per_tick);
}

/* ---- words ---- */

void tu_record_text(const tu_recorder *recorder, const tu_record_view *view, char *text, size_t bytes) {
    tu_operation_info_text(&view->info, tu_recorder_group_name(recorder, view->info.group_index), text, bytes);
}

void tu_operation_info_text(const tu_operation_info *info, const char *group_name, char *text, size_t bytes) {
    const tu_operation_row *row = tu_operation_row_of(info->operation);
    char parts[160] = "";
    size_t used = 0;
#define PART(...)                                                             \
    do {                                                                      \
        int wrote = snprintf(parts + used, sizeof parts - used, __VA_ARGS__); \
        if (wrote > 0 && (size_t)wrote < sizeof parts - used)                 \
            used += (size_t)wrote;                                            \
    } while (0)
    if (info->dtype != 0 && !row->of_records)
        PART("%s", tutti_dtype_name((tutti_dtype)info->dtype));
    if (info->reduction != 0)
        PART("%s%s", used > 0 ? " " : "", tutti_reduction_name((tutti_reduction)info->reduction));
    if (info->dtype != 0 && !row->of_records)
        PART(", %llu element%s", (unsigned long long)info->count, info->count == 1 ? "" : "s");
    else if (info->count != 0 && !row->of_records)
        PART("%s%llu byte%s", used > 0 ? ", " : "", (unsigned long long)info->count, info->count == 1 ? "" : "s");
    const char *comma = used > 0 ? ", " : "";
    if (info->root >= 0)
        PART("%s%s %d", comma, row->partner, info->root);
    else if (tu_receives(row))
        PART("%sfrom any rank", comma);
    comma = used > 0 ? ", " : "";
    if (row->tag != NULL && info->tag < 0)
        PART("%sany %s", comma, row->tag);
    else if (row->tag != NULL)
        PART("%s%s %d", comma, row->tag, info->tag);
#undef PART
    snprintf(text, bytes, "%s %llu of group %s%s%s%s", row->name, (unsigned long long)info->sequence, group_name,
             used > 0 ? " (" : "", parts, used > 0 ? ")" : "");
}
