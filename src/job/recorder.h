/* SPDX-License-Identifier: Apache-2.0
 *
 * The flight recorder: the last operations of each rank, 2048 unless set otherwise, in the job segment, always on. It
 * is also the rank's status: what it does now is its newest entry that has started and not ended. Peers, `tutti ps` and
 * `tutti trace` read it without the owner's help.
 *
 * Budget: begin and end together cost about two readings of the cycle counter: no system call, no lock, two lines.
 */
#ifndef TU_JOB_RECORDER_H
#define TU_JOB_RECORDER_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/dtype.h>
#include <tutti/status.h>

#include "base/operation.h"
#include "job/job.h"

/* How many operations a ring keeps: a power of two; the first that is not less than what TUTTI_TRACE_ENTRIES asks for.
 */
#define TU_RECORDER_ENTRIES 2048
#define TU_RECORDER_LEAST 64
#define TU_RECORDER_MOST (1 << 20)
uint32_t tu_recorder_round(int64_t asked); /* 0: TU_RECORDER_ENTRIES */

/* A rank's recorder as this process sees it. How long its ring is follows from the size of the sealed memory, never
 * from what is written there: a peer that writes garbage leads nobody outside. */
typedef struct tu_recorder_memory tu_recorder_memory;
struct tu_recorder {
    tu_recorder_memory *memory;
    uint64_t mask; /* entries - 1 */
};
tu_recorder tu_recorder_at(void *memory, size_t bytes);  /* the longest ring that has room there */
size_t tu_recorder_entries(const tu_recorder *recorder); /* 0 before its owner has come */

/* One call of an operation, for the recorder, for mismatch messages and for `tutti ps`. */
typedef struct tu_operation_info {
    uint64_t group_key; /* the group's uid */
    uint64_t sequence;  /* in its group */
    uint64_t count;     /* elements, or bytes where there is no dtype */
    int64_t timeout_ns;
    uint64_t executor;    /* who runs it: the first eight characters of the name; 0: nobody yet */
    uint32_t group_index; /* from tu_recorder_group, for its name */
    int32_t root;         /* root or peer as a group rank; -1 none */
    int32_t tag;          /* of send and recv; channel of a signal; 0 else */
    uint8_t operation;    /* tu_operation */
    uint8_t dtype;        /* tutti_dtype or 0 */
    uint8_t reduction;    /* tutti_reduction or 0 */
    uint8_t algorithm;    /* collective layer's number; 0 chosen later */
} tu_operation_info;

/* Names a group for this rank's entries; returns its index. Called when a group is made. Room for
 * TU_RECORDER_GROUPS names: the first stays (the world's own group), the others make room for newer ones. Of the
 * members the first TU_RECORDER_MEMBERS are kept. */
#define TU_RECORDER_GROUPS 128
#define TU_RECORDER_MEMBERS 64
uint32_t tu_recorder_group(const tu_recorder *recorder, uint64_t group_key, const char *name, const int *world_ranks,
                           int count);

/* Own recorder only; any thread of the rank. Returns a ticket. */
uint64_t tu_record_begin(const tu_recorder *recorder, const tu_operation_info *info);
void tu_record_algorithm(const tu_recorder *recorder, uint64_t ticket, uint8_t algorithm);
void tu_record_waiting(const tu_recorder *recorder, uint64_t ticket, int world_rank); /* slow paths only; -1 no more */
/* Of a receive from anybody, or with any tag: which message it got. */
void tu_record_received(const tu_recorder *recorder, uint64_t ticket, int source, int tag);
void tu_record_end(const tu_recorder *recorder, uint64_t ticket, tutti_status status);
/* The same for a success, by who still knows what it was. */
void tu_record_end_well(const tu_recorder *recorder, uint64_t ticket, uint8_t operation, uint8_t algorithm,
                        uint64_t bytes);

/* Several operations that begin together, and those that were over before anybody could have seen them run: the time is
 * read once for all. tu_record_past makes the whole entry of one that succeeded and moved so many bytes. */
uint64_t tu_record_time(const tu_recorder *recorder); /* ticks */
uint64_t tu_record_begin_at(const tu_recorder *recorder, const tu_operation_info *info, uint64_t began);
void tu_record_past(const tu_recorder *recorder, const tu_operation_info *info, uint64_t began, uint64_t ended,
                    uint64_t bytes);

/* The same for several messages of a group; `common` has what they share. */
typedef struct tu_record_message {
    uint64_t sequence, count, bytes;
    int32_t root, tag;
    uint8_t operation, dtype;
} tu_record_message;
void tu_record_past_messages(const tu_recorder *recorder, const tu_operation_info *common,
                             const tu_record_message *messages, int count, uint64_t began, uint64_t ended);

typedef struct tu_record_view {
    tu_operation_info info;
    uint64_t id;
    int64_t created_ns, ended_ns; /* on tu_clock_now; ended 0 while running */
    bool running;
    tutti_status status;
    int waiting_for; /* world rank, or -1 */
    uint32_t thread; /* id of the calling thread */
} tu_record_view;

/* Reading, any rank's, while its owner goes on writing (entries that change meanwhile are skipped).
 * The newest entry that runs in the given group (0: any group); false when there is none. */
bool tu_recorder_current(const tu_recorder *recorder, uint64_t group_key, tu_record_view *view);
/* The newest entry of the group that ended well; false when there is none. */
bool tu_recorder_last(const tu_recorder *recorder, uint64_t group_key, tu_record_view *view);
/* Entry `back` positions before the newest (0 is the newest); false beyond the oldest. */
bool tu_recorder_entry(const tu_recorder *recorder, uint64_t back, tu_record_view *view);
/* A name that made room is "?". Valid until this thread's next call. */
const char *tu_recorder_group_name(const tu_recorder *recorder, uint32_t group_index);

/* The newest readable entries that there is room for, oldest first; returns how many. */
size_t tu_recorder_snapshot(const tu_recorder *recorder, tu_record_view *views, size_t room);

typedef struct tu_recorder_group_view {
    uint64_t key;
    uint32_t index;
    int size;    /* of the group */
    int members; /* in world_ranks; less than size in large groups */
    int world_ranks[TU_RECORDER_MEMBERS];
    char name[64];
} tu_recorder_group_view;

/* Groups that are still named; returns how many. `views` has room for TU_RECORDER_GROUPS. */
size_t tu_recorder_groups(const tu_recorder *recorder, tu_recorder_group_view *views);

/* What the rank has done so far, per operation. */
#define TU_COUNTER_ALGORITHMS 12
typedef struct tu_counters {
    uint64_t calls; /* ended, failures included */
    uint64_t failures;
    uint64_t bytes;                               /* count times the element's size */
    int64_t time_ns;                              /* between begin and end, summed */
    uint64_t by_algorithm[TU_COUNTER_ALGORITHMS]; /* calls; the last also counts those of higher numbers */
} tu_counters;
void tu_recorder_counters(const tu_recorder *recorder, tu_operation operation, tu_counters *counters);

/* "all_reduce 17 of group 0 (f32 sum, 4096 elements)": for messages. */
void tu_record_text(const tu_recorder *recorder, const tu_record_view *view, char *text, size_t bytes);
void tu_operation_info_text(const tu_operation_info *info, const char *group_name, char *text, size_t bytes);

/* For the job: how much room a recorder takes, and preparing one's own. */
size_t tu_recorder_bytes(uint32_t entries);
void tu_recorder_init(const tu_recorder *recorder);

#endif
