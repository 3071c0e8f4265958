/* SPDX-License-Identifier: Apache-2.0
 *
 * The job segment: layout of the shared memory that all ranks of a job map, and that `tutti ps` and `tutti trace` read
 * from outside.
 *
 * It is a memfd named "tutti-job-<id>" (in /proc/PID/fd: "/memfd:tutti-job-<id> (deleted)"), sealed with
 * TU_PAGE_SEALS, whose size is `bytes`. Every process-rank of the job keeps it open, so that any one of them will do;
 * thread-ranks share one descriptor.
 *
 *     offset 0                 tu_page: the header
 *     slots_offset             tu_slot[size], slot_bytes each, by job rank
 *     recorders_offset         tu_recorder[size], recorder_bytes each (recorder.h), by job rank
 *
 * How to read it from outside: open read-only, check F_GET_SEALS, map, then tu_page_check, which believes nothing that
 * it has not compared with the size of the file. `magic` is written last by the founder (release), so a page with a
 * magic has a complete header and empty slots. A slot's identity is complete once its state is not TU_SLOT_EMPTY
 * (acquire). Everything that changes later is atomic. A reader takes no lock.
 *
 * The founder is the lowest rank of the job. It writes the header and prepares all slots before anybody else sees the
 * page; from then on each word has the writer that its comment names.
 */
#ifndef TU_JOB_PAGE_H
#define TU_JOB_PAGE_H

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/home.h"
#include "base/wait.h"
#include "job/job.h"
#include "job/liveness.h"
#include "job/recorder.h"

#define TU_PAGE_MAGIC UINT64_C(0x424f4a4954545554) /* "TUTTIJOB" in memory, little-endian */
#define TU_PAGE_VERSION 5                          /* of this file, of recorder entries and of all messages of a job */
#define TU_PAGE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define TU_PAGE_NAME "tutti-job-" /* then the id */

#define TU_NONCE_BYTES 16
#define TU_ID_BYTES 17 /* 16 hexadecimal digits and a zero */
#define TU_NAME_BYTES 64
#define TU_WHY_BYTES 192
#define TU_REFUSALS 8

#define TU_SLOT_EMPTY 0 /* state before TU_RANK_JOINING: this rank has not come yet */

typedef struct tu_slot {
    /* TU_SLOT_EMPTY or a tu_rank_state. The owner goes up to ALIVE and CLOSED; whoever finds it dead makes it DEAD. All
     * by compare-and-swap, so that a departure happens once. Release; readers acquire. */
    _Alignas(128) _Atomic uint32_t state;
    /* Who it is. Written by the owner before its state leaves EMPTY, except world_rank (by the founder). */
    int32_t world_rank;
    int32_t pid;
    int32_t tid;    /* of the thread that opened the world */
    int32_t parent; /* pid of its parent then */
    uint32_t uid;
    uint64_t start_time;  /* of the process: field 22 of /proc/PID/stat */
    uint32_t incarnation; /* how often a newcomer has taken this rank */
    int64_t opened_ns;    /* on tu_clock_now */
    int64_t opened_wall;  /* on tu_clock_wall */
    tu_cpus cpus;         /* what the owner might use when it opened */
    /* By the parent of the rank (tu_death_publish), once: 0, or TU_SLOT_PUBLISHED | wait status. */
    _Atomic uint64_t wait_status;
    /* Why a thread-rank is DEAD, or why opening failed; complete before the state is DEAD. By the owner. */
    char why[TU_WHY_BYTES];
    /* Keys of the last agreements that the owner left without an answer (tu_job_refuse). By the owner; release. */
    _Atomic uint64_t refused[TU_REFUSALS];
    /* Bytes of shared memory that the owner has reserved, and those that it is about to reserve. By the owner;
     * `pending` rises under the ledger's lock. */
    _Alignas(128) _Atomic int64_t reserved;
    _Atomic int64_t pending;
    /* Robust; held by the owner's keeper thread from JOINING to CLOSED. Not used between thread-ranks. */
    _Alignas(128) pthread_mutex_t keeper;
    tu_bell bell;
} tu_slot;

#define TU_SLOT_PUBLISHED (UINT64_C(1) << 32)

typedef struct tu_page {
    _Atomic uint64_t magic; /* written last */
    uint32_t version;
    uint32_t mutex_bytes; /* sizeof(pthread_mutex_t): differs between C libraries */
    uint8_t nonce[TU_NONCE_BYTES];
    char id[TU_ID_BYTES];
    char name[TU_NAME_BYTES]; /* of the world */
    uint64_t bytes;           /* of the whole segment */
    int32_t size;             /* ranks in the job */
    int32_t world_size;
    uint32_t uid;
    uint32_t threads; /* 1: the ranks are threads of one process */
    uint64_t slots_offset, slot_bytes;
    uint64_t recorders_offset, recorder_bytes;
    uint32_t recorder_entries; /* of each */
    int64_t created_ns;        /* on tu_clock_now */
    int64_t created_wall;      /* on tu_clock_wall */

    /* Threads of all ranks that sleep on bells or are about to: each adds and takes away itself (base/wait.h). */
    _Alignas(128) _Atomic uint32_t sleepers;
    /* Ranks that have become ALIVE, ever: each adds one. Opening ends when it reaches `size`. */
    _Alignas(128) _Atomic uint32_t arrived;
    /* Ranks that have become CLOSED or DEAD: whoever changes the state adds one, right after. */
    _Atomic uint32_t departures;
    /* Held while deciding whether a reservation fits: all slots' `pending`. Robust. */
    _Alignas(128) pthread_mutex_t ledger;
    /* How often the ledger was left. By its holder; those who queue see by it that others get on. */
    _Atomic uint64_t ledger_turns;
} tu_page;

/* The slot of a job rank; no check, the page must have passed tu_page_check or be one's own. Where it lies is not read
 * from the page, which any rank may have spoiled since. */
#define TU_PAGE_SLOTS ((sizeof(tu_page) + 4095) / 4096 * 4096)
static inline tu_slot *tu_page_slot(const tu_page *page, int rank) {
    return (tu_slot *)((char *)page + TU_PAGE_SLOTS + (size_t)rank * sizeof(tu_slot));
}

/* The recorder of a job rank, of a page of `size` ranks in `bytes` bytes that has passed tu_page_check or is one's own.
 */
tu_recorder tu_page_recorder(const tu_page *page, size_t bytes, int size, int rank);

/* Where the parts lie in a page of `size` ranks; fills the offsets and sizes of *page, bytes included. */
void tu_page_lay_out(tu_page *page, int size, uint32_t recorder_entries);

/* The job's id; only its digits, since the page may be spoiled. */
void tu_page_id(const tu_page *page, char id[TU_ID_BYTES]);

/* The least that a page of `size` ranks can have. */
size_t tu_page_bytes_least(int size);

/* Checks a mapped page of `bytes` bytes: magic, version, sizes, bounds. TUTTI_ERROR_PROTOCOL with a message, which for
 * another version shows both. `whose` begins the message: "the job segment of rank 3 (pid 4711)". */
tutti_status tu_page_check(const tu_page *page, size_t bytes, const char *whose);

#endif
