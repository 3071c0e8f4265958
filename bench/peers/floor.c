/* SPDX-License-Identifier: Apache-2.0
 *
 * What the machine permits: each operation by the least that processes with shared memory must do, and nothing else. A
 * cache line with a flag goes to each other rank, with the data in it where there is room; longer data is copied to
 * shared memory by who has it and from there by who needs it. No call is checked, nothing has a deadline, nobody may
 * die, the buffers are private. It stands in the tables beside Tutti and its peers, as no contender.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/wait.h"
#include "worker.h"

#define SLOT ((size_t)64 << 10) /* the longest that one rank hands over in a call */
#define INLINE 48               /* bytes that fit beside the flag */
#define MOST 16                 /* ranks */
#define RING 4                  /* messages from one rank to another that have not been taken */

typedef struct line {
    _Alignas(128) _Atomic uint64_t flag;
    unsigned char payload[INLINE];
} line;

typedef struct member {
    _Alignas(4096) line arrive[2]; /* flag: the call */
    _Alignas(4096) line staged;    /* flag: bytes that this rank has ever put into its slots */
    _Alignas(4096) line taken;     /* flag: the last broadcast that this rank has read */
    _Alignas(4096) line ring[MOST][RING];
    line ring_taken[MOST]; /* how many messages of a rank this one has taken */
    _Alignas(4096) unsigned char slots[2][SLOT];
} member;

static const bool peer_exact = true;

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

static void peer_barrier(void) {
    call++;
    publish(&members[rank].arrive[call & 1].flag, call);
    for (int from = 0; from < size; from++)
        if (from != rank)
            await(&members[from].arrive[call & 1].flag, call);
    reclaim();
}

static bool peer_understands(const char *name) {
    return strcmp(name, "f32") == 0;
}

static size_t peer_element(void) {
    return sizeof(float);
}

static void *peer_buffer(int which, size_t bytes, bool symmetric) {
    static void *buffers[3];
    (void)symmetric;
    size_t room = SLOT; /* of all parts together */
    if (bytes > room || (buffers[which] == NULL && posix_memalign(&buffers[which], 4096, room) != 0)) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return buffers[which];
}

static void peer_fill(void *to, size_t first, size_t count, int of) {
    for (size_t i = 0; i < count; i++)
        ((float *)to)[i] = value(of, first + i);
}

/* ---- operations ---- */

static void add(float *restrict to, const float *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

static void small_all_reduce(const float *in, float *out, size_t count) {
    float sum[INLINE / sizeof(float)];
    size_t bytes = count * sizeof(float);
    call++;
    memcpy(members[rank].arrive[call & 1].payload, in, bytes);
    publish(&members[rank].arrive[call & 1].flag, call);
    for (int from = 0; from < size; from++) {
        if (from != rank)
            await(&members[from].arrive[call & 1].flag, call);
        const float *theirs = from == rank ? in : (const float *)(const void *)members[from].arrive[call & 1].payload;
        if (from == 0)
            memcpy(sum, theirs, bytes);
        else
            add(sum, theirs, count);
    }
    memcpy(out, sum, bytes);
    reclaim();
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

static void all_gather(const char *in, char *out, size_t bytes) {
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

/* What others send lies in the order of their targets, without their own part. */
static size_t place_of(int target, int owner, size_t bytes) {
    return (size_t)(target - (target > owner)) * bytes;
}

static void all_to_all(const char *in, char *out, size_t bytes) {
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
