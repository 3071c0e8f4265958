/* SPDX-License-Identifier: Apache-2.0
 *
 * What the machine permits: each operation by the least that processes with shared memory must do, and nothing else. A
 * cache line with a flag goes to each other rank, with the data in it where there is room; longer data is copied to
 * shared memory by who has it and from there by who needs it. No call is checked, nothing has a deadline, nobody may
 * die, the buffers are private. It stands in the tables beside Tutti and its peers, as no contender.
 *
 * Built with FLOOR_RECORDED, barriers and sums in a line keep what Tutti promises of every call and no more: a
 * signature that is compared, a look at whether the group lives, a record with two times that others can read, counts
 * of calls, bytes and time, and all that from any thread of a rank: a turn, a number and a place among the records,
 * each by an atomic operation. With FLOOR_ONE_COPY, long parts are read where they lie by the kernel
 * (process_vm_readv), and not staged.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/wait.h"
#include "plain.h"

#ifndef FLOOR_RECORDED
#define FLOOR_RECORDED 0
#endif
#ifndef FLOOR_ONE_COPY
#define FLOOR_ONE_COPY 0
#endif

#define SLOT ((size_t)512 << 10) /* the longest that one rank hands over at once */
#define RECORDS 2048             /* kept of the last calls */
#define INLINE 48                /* bytes that fit beside the flag */
#define MOST 16                  /* ranks */
#define RING 4                   /* messages from one rank to another that have not been taken */

typedef struct line {
    _Alignas(128) _Atomic uint64_t flag;
    uint64_t signature;
    unsigned char payload[INLINE];
} line;

typedef struct record {
    _Alignas(128) uint64_t began, ended, sequence, signature, count, status;
} record;

typedef struct member {
    _Alignas(4096) line arrive[2]; /* flag: the call */
    _Alignas(4096) line staged;    /* flag: bytes that this rank has ever put into its slots */
    _Alignas(4096) line taken;     /* flag: the last broadcast that this rank has read */
    _Alignas(4096) line ring[MOST][RING];
    line ring_taken[MOST];            /* how many messages of a rank this one has taken */
    _Alignas(4096) line round_staged; /* flag: the last round of long parts that this rank has staged, or offered */
    _Alignas(4096) line round_taken;  /* flag: … and taken from all others */
    _Atomic uint64_t ended;           /* as a group that has ended would say */
    _Alignas(4096) struct { uint64_t calls, bytes, ticks; } counts;
    _Alignas(4096) record records[RECORDS];
    _Alignas(4096) unsigned char slots[2][SLOT];
} member;

/* Where a long part lies, for who reads it there; in the payload of round_staged. */
typedef struct offer {
    uint64_t pid, address;
} offer;

static const bool peer_exact = true;

/* Of this rank alone, for whichever of its threads calls. */
static _Atomic uint64_t turn_taken, numbers, places;
static uint64_t sequence; /* of the call that has the turn */
static record *current;

static member *members;
static uint64_t call, exchanges, staged[MOST]; /* staged: by each rank, as all of them count */
static bool crowded;                           /* more ranks than cores: the core is given away at once */

static void await(const _Atomic uint64_t *flag, uint64_t value) {
    while ((int64_t)(atomic_load_explicit(flag, memory_order_acquire) - value) < 0) {
        if (crowded)
            sched_yield();
        else
            tu_pause();
    }
}

static void publish(_Atomic uint64_t *flag, uint64_t value) {
    atomic_store_explicit(flag, value, memory_order_release); /* pairs with await */
}

/* Nobody reads this rank's line of the next call any more: fetched back now, it is there when it will be written. */
static void reclaim(void) {
    tu_prefetch_for_write(&members[rank].arrive[(call + 1) & 1]);
}

/* ---- what worker.h asks for ---- */

static void *map_shared(const char *folder) {
    char path[512];
    snprintf(path, sizeof path, "%s/shared", folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    size_t bytes = (size_t)size * sizeof(member);
    void *memory = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0
                       ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                       : MAP_FAILED;
    if (memory == MAP_FAILED) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    memset((member *)memory + rank, 0, sizeof(member));
    return memory;
}

static void peer_open(int *argc, char ***argv, int *r, int *s) {
    const char *my_rank = getenv("TUTTI_RANK"), *ranks = getenv("TUTTI_SIZE");
    if (*argc != 3 || my_rank == NULL || ranks == NULL || atoi(ranks) > MOST) {
        fprintf(stderr, "started by measure.py, with at most %d ranks: tutti run floor FOLDER CPUS\n", MOST);
        exit(2);
    }
    *r = atoi(my_rank);
    *s = atoi(ranks);
    crowded = (*argv)[2][0] == '-';
    members = map_shared((*argv)[1]);
}

static void peer_close(void) {
    munmap(members, (size_t)size * sizeof(member));
}

/* ---- what is promised of every call ---- */

static uint64_t ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return (uint64_t)now();
#endif
}

/* What all ranks must have called alike. */
static uint64_t signature_of(size_t count) {
    return (call ^ count * UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xff51afd7ed558ccd);
}

/* The turn and the number of a call. Here only one thread calls. */
static void begin(void) {
    uint64_t nobody = 0;
    call++;
    if (!FLOOR_RECORDED)
        return;
    if (!atomic_compare_exchange_strong_explicit(&turn_taken, &nobody, 1, memory_order_acquire, memory_order_relaxed))
        exit(1);
    sequence = atomic_fetch_add_explicit(&numbers, 1, memory_order_relaxed) + 1;
}

static void end(void) {
    if (FLOOR_RECORDED)
        atomic_store_explicit(&turn_taken, 0, memory_order_release);
}

static void say(uint64_t signature) {
    if (FLOOR_RECORDED && atomic_load_explicit(&members[rank].ended, memory_order_acquire) != 0)
        exit(1);
    members[rank].arrive[call & 1].signature = signature;
}

static void compare(int from, uint64_t signature) {
    if (FLOOR_RECORDED && members[from].arrive[call & 1].signature != signature) {
        fprintf(stderr, "rank %d called something else\n", from);
        exit(1);
    }
}

static void record_begin(uint64_t signature, size_t count) {
    if (!FLOOR_RECORDED)
        return;
    current = &members[rank].records[atomic_fetch_add_explicit(&places, 1, memory_order_relaxed) % RECORDS];
    *current = (record){ .began = ticks(), .sequence = sequence, .signature = signature, .count = count, .status = 1 };
}

static void record_end(size_t bytes) {
    if (!FLOOR_RECORDED)
        return;
    current->ended = ticks();
    current->status = 0;
    members[rank].counts.calls++;
    members[rank].counts.bytes += bytes;
    members[rank].counts.ticks += current->ended - current->began;
}

static void peer_barrier(void) {
    begin();
    uint64_t signature = signature_of(0);
    say(signature);
    publish(&members[rank].arrive[call & 1].flag, call);
    record_begin(signature, 0);
    for (int from = 0; from < size; from++) {
        if (from == rank)
            continue;
        await(&members[from].arrive[call & 1].flag, call);
        compare(from, signature);
    }
    reclaim();
    record_end(0);
    end();
}

/* ---- operations ---- */

static void add(float *restrict to, const float *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

static void small_all_reduce(const float *in, float *out, size_t count) {
    float sum[INLINE / sizeof(float)];
    size_t bytes = count * sizeof(float);
    begin();
    uint64_t signature = signature_of(count);
    say(signature);
    memcpy(members[rank].arrive[call & 1].payload, in, bytes);
    publish(&members[rank].arrive[call & 1].flag, call);
    record_begin(signature, count);
    for (int from = 0; from < size; from++) {
        if (from != rank) {
            await(&members[from].arrive[call & 1].flag, call);
            compare(from, signature);
        }
        const float *theirs = from == rank ? in : (const float *)(const void *)members[from].arrive[call & 1].payload;
        if (from == 0)
            memcpy(sum, theirs, bytes);
        else
            add(sum, theirs, count);
    }
    memcpy(out, sum, bytes);
    reclaim();
    record_end(bytes);
    end();
}

/* Where the others find this rank's data in this call. Who has come to a call has left the one before the last: two
 * slots suffice. */
static unsigned char *slot(int of) {
    return members[of].slots[call & 1];
}

static void stage(const void *from, size_t at, size_t bytes) {
    memcpy(slot(rank) + at, from, bytes);
    staged[rank] += bytes;
    publish(&members[rank].staged.flag, staged[rank]);
}

/* Bytes [at, at + bytes) of what `from` stages in this call. */
static void take(int from, void *to, size_t at, size_t bytes) {
    await(&members[from].staged.flag, staged[from] + at + bytes);
    memcpy(to, slot(from) + at, bytes);
}

static void all_reduce(const float *in, float *out, size_t count) {
    size_t bytes = count * sizeof(float);
    call++;
    stage(in, 0, bytes);
    for (int from = 0; from < size; from++) {
        if (from != rank)
            await(&members[from].staged.flag, staged[from] + bytes);
        const float *theirs = from == rank ? in : (const float *)(const void *)slot(from);
        if (from == 0)
            memcpy(out, theirs, bytes);
        else
            add(out, theirs, count);
        staged[from] += from != rank ? bytes : 0;
    }
}

/* What others send lies in the order of their targets, without their own part. */
static size_t place_of(int target, int owner, size_t bytes) {
    return (size_t)(target - (target > owner)) * bytes;
}

/* ---- long parts ---- */

static uint64_t rounds;

static void await_others(size_t at, uint64_t value) {
    for (int from = 0; from < size; from++)
        if (from != rank)
            await(&((const line *)(const void *)((const char *)&members[from] + at))->flag, value);
}

/* Each rank's part for each other; `parts`: in the input one after the other, or one that all take. */
static void move_in_rounds(const char *in, char *out, size_t bytes, bool parts) {
    size_t share = parts ? SLOT / (size_t)(size - 1) / 64 * 64 : SLOT, own = parts ? (size_t)rank * bytes : 0;
    for (size_t done = 0; done < bytes; done += share) {
        size_t piece = bytes - done < share ? bytes - done : share;
        rounds++;
        await_others(offsetof(member, round_taken), rounds - 2); /* who had what lay in this slot before */
        for (int to = 0; to < size; to++)
            if (parts ? to != rank : to == 0)
                memcpy(members[rank].slots[rounds & 1] + (parts ? place_of(to, rank, share) : 0),
                       in + (parts ? (size_t)to * bytes : 0) + done, piece);
        publish(&members[rank].round_staged.flag, rounds);
        memcpy(out + (size_t)rank * bytes + done, in + own + done, piece);
        for (int from = 0; from < size; from++) {
            if (from == rank)
                continue;
            await(&members[from].round_staged.flag, rounds);
            memcpy(out + (size_t)from * bytes + done,
                   members[from].slots[rounds & 1] + (parts ? place_of(rank, from, share) : 0), piece);
        }
        publish(&members[rank].round_taken.flag, rounds);
    }
}

static void read_part(int from, char *to, size_t offset, size_t bytes) {
    offer their;
    memcpy(&their, members[from].round_staged.payload, sizeof their);
    struct iovec local = { to, bytes }, remote = { (void *)(uintptr_t)(their.address + offset), bytes };
    for (ssize_t got; local.iov_len != 0; local.iov_len -= (size_t)got, remote.iov_len -= (size_t)got) {
        got = process_vm_readv((pid_t)their.pid, &local, 1, &remote, 1, 0);
        if (got <= 0) {
            fprintf(stderr, "process_vm_readv: %s\n", strerror(errno));
            exit(1);
        }
        local.iov_base = (char *)local.iov_base + got;
        remote.iov_base = (char *)remote.iov_base + got;
    }
}

/* The same by one copy, which the kernel makes. */
static void move_by_kernel(const char *in, char *out, size_t bytes, bool parts) {
    offer mine = { (uint64_t)getpid(), (uint64_t)(uintptr_t)in };
    rounds++;
    memcpy(members[rank].round_staged.payload, &mine, sizeof mine);
    publish(&members[rank].round_staged.flag, rounds);
    memcpy(out + (size_t)rank * bytes, in + (parts ? (size_t)rank * bytes : 0), bytes);
    for (int from = 0; from < size; from++) {
        if (from == rank)
            continue;
        await(&members[from].round_staged.flag, rounds);
        read_part(from, out + (size_t)from * bytes, parts ? (size_t)rank * bytes : 0, bytes);
    }
    publish(&members[rank].round_taken.flag, rounds);
    await_others(offsetof(member, round_taken), rounds);
}

static bool is_long(size_t bytes) {
    return bytes * (size_t)size > SLOT;
}

static void move_long(const char *in, char *out, size_t bytes, bool parts) {
    (FLOOR_ONE_COPY ? move_by_kernel : move_in_rounds)(in, out, bytes, parts);
}

/* ---- moves ---- */

static void all_gather(const char *in, char *out, size_t bytes) {
    if (is_long(bytes)) {
        move_long(in, out, bytes, false);
        return;
    }
    call++;
    stage(in, 0, bytes);
    memcpy(out + (size_t)rank * bytes, in, bytes);
    for (int from = 0; from < size; from++) {
        if (from == rank)
            continue;
        take(from, out + (size_t)from * bytes, 0, bytes);
        staged[from] += bytes;
    }
}

static void all_to_all(const char *in, char *out, size_t bytes) {
    if (is_long(bytes)) {
        move_long(in, out, bytes, true);
        return;
    }
    call++;
    for (int to = 0; to < size; to++)
        if (to != rank)
            stage(in + (size_t)to * bytes, place_of(to, rank, bytes), bytes);
    memcpy(out + (size_t)rank * bytes, in + (size_t)rank * bytes, bytes);
    for (int from = 0; from < size; from++) {
        if (from == rank)
            continue;
        take(from, out + (size_t)from * bytes, place_of(rank, from, bytes), bytes);
        staged[from] += bytes * (size_t)(size - 1);
    }
}

static void reduce_scatter(const float *in, float *out, size_t count) {
    size_t bytes = count * sizeof(float);
    call++;
    for (int to = 0; to < size; to++)
        if (to != rank)
            stage(in + (size_t)to * count, place_of(to, rank, bytes), bytes);
    for (int from = 0; from < size; from++) {
        const float *theirs = in + (size_t)rank * count;
        if (from != rank) {
            size_t at = place_of(rank, from, bytes);
            await(&members[from].staged.flag, staged[from] + at + bytes);
            theirs = (const float *)(const void *)(slot(from) + at);
            staged[from] += bytes * (size_t)(size - 1);
        }
        if (from == 0)
            memcpy(out, theirs, bytes);
        else
            add(out, theirs, count);
    }
}

static void broadcast(char *data, size_t bytes) {
    static uint64_t broadcasts, last[2]; /* last: that used the slot */
    call++;
    broadcasts++;
    if (rank == 0) {
        for (int to = 1; to < size; to++)
            await(&members[to].taken.flag, last[call & 1]);
        stage(data, 0, bytes);
    } else {
        take(0, data, 0, bytes);
        staged[0] += bytes;
        publish(&members[rank].taken.flag, broadcasts);
    }
    last[call & 1] = broadcasts;
}

static void send(int to, const void *data, size_t bytes) {
    await(&members[to].ring_taken[rank].flag, exchanges - RING);
    line *message = &members[rank].ring[to][exchanges % RING];
    memcpy(message->payload, data, bytes);
    publish(&message->flag, exchanges);
}

static void receive(int from, void *data, size_t bytes) {
    const line *message = &members[from].ring[rank][exchanges % RING];
    await(&message->flag, exchanges);
    memcpy(data, message->payload, bytes);
    publish(&members[rank].ring_taken[from].flag, exchanges);
}

/* Half to each neighbour, in a line. */
static void exchange(const char *in, char *out, size_t half) {
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    exchanges++;
    send(next, in, half);
    send(before, in + half, half);
    receive(before, out, half);
    receive(next, out + half, half);
}

static void peer_run(peer_operation operation, const void *in, void *out, size_t count) {
    size_t bytes = count * sizeof(float);
    switch (operation) {
    case ALL_REDUCE:
        (bytes <= INLINE ? small_all_reduce : all_reduce)(in, out, count);
        break;
    case ALL_GATHER:
        all_gather(in, out, bytes);
        break;
    case REDUCE_SCATTER:
        reduce_scatter(in, out, count);
        break;
    case BROADCAST:
        broadcast(out, bytes);
        break;
    case ALL_TO_ALL:
        all_to_all(in, out, bytes);
        break;
    case EXCHANGE:
        exchange(in, out, bytes / 2);
        break;
    default:
        fprintf(stderr, "there is no floor of %s\n", operation_names[operation]);
        exit(1);
    }
}

int main(int argc, char **argv) {
    peer_open(&argc, &argv, &rank, &size);
    int status = worker_loop(argv[1], argv[2]);
    peer_close();
    return status;
}
