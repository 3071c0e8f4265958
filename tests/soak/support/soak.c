/* SPDX-License-Identifier: Apache-2.0
 *
 * soak SECONDS SEED: jobs one after the other, each of random operations on random groups, in which ranks die, stop and
 * are left out at random moments. Every result is checked, every survivor must come through, and nothing may be left
 * behind.
 *
 * All ranks of a job draw from the same sequence, so that they do the same; after a loss they begin a new one. What
 * differs between runs with the same seed is only when exactly the deaths come.
 */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/group.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#define MOST_RANKS 6
#define MOST_ELEMENTS ((size_t)20000)

/* ---- shared by the driver and all ranks ---- */

typedef struct board {
    uint64_t seed; /* of this job */
    bool threads;
    int victims[MOST_RANKS];  /* nonzero: how it ends */
    int64_t when[MOST_RANKS]; /* nanoseconds after its first operation */
    _Atomic int finished;
    _Atomic int failed;
    _Atomic long operations, shrinks, checked;
} board;

static board *shared;
static uint64_t given_seed;
static bool
    dies; /* this process is about to end: while a thread of it calls exec, others find that nothing works any more */

_Noreturn static void wrong(const char *format, ...) {
    while (dies)
        pause();
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "soak: seed %llu, job %llx, pid %d: ", (unsigned long long)given_seed,
            (unsigned long long)shared->seed, (int)getpid());
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    fflush(NULL);
    atomic_store(&shared->failed, 1);
    _exit(1);
}

#define MUST(call)                                                                                          \
    do {                                                                                                    \
        tutti_status must_ = (call);                                                                        \
        if (must_ != TUTTI_OK)                                                                              \
            wrong("line %d: %s: %s: %s", __LINE__, #call, tutti_status_name(must_), tutti_error_message()); \
    } while (0)
#define NEED(condition)                                           \
    do {                                                          \
        if (!(condition))                                         \
            wrong("line %d: not true: %s", __LINE__, #condition); \
    } while (0)

/* ---- chance: splitmix64 ---- */

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t limit) {
    return (size_t)(draw(state) % limit);
}

/* ---- one rank ---- */

typedef struct player {
    tutti_world *world;
    tutti_group *group; /* of all that are left */
    tutti_group *half;  /* a part of it, or NULL */
    tutti_memory *block;
    tutti_peers *peers; /* of the block and `group`, or NULL */
    uint64_t chance;
    uint64_t serial;
    int64_t *in, *out; /* in the block or not */
    int64_t *heap_in, *heap_out;
} player;

/* What rank r puts at position i of operation s. */
static int64_t value(int rank, size_t i, uint64_t serial) {
    return (int64_t)(((uint64_t)rank + 1) * (i % 97 + 1) + serial % 13);
}

static int64_t sum_of(const tutti_group *group, size_t i, uint64_t serial) {
    int64_t sum = 0;
    for (int r = 0; r < tutti_group_size(group); r++)
        sum += value(r, i, serial);
    return sum;
}

static void fill(player *me, const tutti_group *group, size_t count) {
    for (size_t i = 0; i < count; i++)
        me->in[i] = value(tutti_group_rank(group), i, me->serial);
}

#define EXPECT(i, wanted)                                                                                             \
    do {                                                                                                              \
        if (me->out[i] != (wanted))                                                                                   \
            wrong("line %d: operation %llu, element %zu is %lld, not %lld", __LINE__, (unsigned long long)me->serial, \
                  (size_t)(i), (long long)me->out[i], (long long)(wanted));                                           \
    } while (0)

static tutti_status all_reduce(player *me, tutti_group *group, size_t count) {
    bool work = draw(&me->chance) % 4 == 0;
    tutti_work *handle;
    tutti_call call = TUTTI_CALL_INIT;
    call.work = work ? &handle : NULL;
    tutti_status status = tutti_all_reduce(group, me->in, me->out, count, TUTTI_I64, TUTTI_SUM, &call);
    if (work && status == TUTTI_OK) {
        status = tutti_work_wait(handle, 0);
        tutti_work_release(handle);
    }
    for (size_t i = 0; status == TUTTI_OK && i < count; i++)
        EXPECT(i, sum_of(group, i, me->serial));
    return status;
}

static tutti_status moves(player *me, tutti_group *group, size_t count) {
    int size = tutti_group_size(group), rank = tutti_group_rank(group);
    size_t part = count / (size_t)size;
    int root = (int)below(&me->chance, (size_t)size);
    tutti_status status;
    switch (below(&me->chance, 6)) {
    case 0:
        status = tutti_broadcast(group, me->in, me->out, count, TUTTI_I64, root, NULL);
        for (size_t i = 0; status == TUTTI_OK && i < count; i++)
            EXPECT(i, value(root, i, me->serial));
        return status;
    case 1:
        status = tutti_all_gather(group, me->in, me->out, part, TUTTI_I64, NULL);
        for (size_t i = 0; status == TUTTI_OK && i < part * (size_t)size; i++)
            EXPECT(i, value((int)(i / part), i % part, me->serial));
        return status;
    case 2:
        status = tutti_reduce_scatter(group, me->in, me->out, part, TUTTI_I64, TUTTI_SUM, NULL);
        for (size_t i = 0; status == TUTTI_OK && i < part; i++)
            EXPECT(i, sum_of(group, i + (size_t)rank * part, me->serial));
        return status;
    case 3:
        status = tutti_all_to_all(group, me->in, me->out, part, TUTTI_I64, NULL);
        for (size_t i = 0; status == TUTTI_OK && i < part * (size_t)size; i++)
            EXPECT(i, value((int)(i / part), i % part + (size_t)rank * part, me->serial));
        return status;
    case 4:
        status = tutti_reduce(group, me->in, me->out, count, TUTTI_I64, TUTTI_SUM, root, NULL);
        for (size_t i = 0; status == TUTTI_OK && rank == root && i < count; i++)
            EXPECT(i, sum_of(group, i, me->serial));
        return status;
    default: { /* to the next */
        tutti_work *work;
        int before = (rank + size - 1) % size;
        status = tutti_recv(group, me->out, count, TUTTI_I64, before, 3, TUTTI_OPTIONS(tutti_call, .work = &work));
        if (status != TUTTI_OK)
            return status;
        status = tutti_send(group, me->in, count, TUTTI_I64, (rank + 1) % size, 3, NULL);
        tutti_status received = tutti_work_wait(work, 0);
        tutti_work_release(work);
        for (size_t i = 0; received == TUTTI_OK && i < count; i++)
            EXPECT(i, value(before, i, me->serial));
        return status != TUTTI_OK ? status : received;
    }
    }
}

/* Round the ring by signals, on the block. */
static tutti_status signals(player *me) {
    int size = tutti_peers_size(me->peers), rank = tutti_peers_rank(me->peers), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    int64_t mine = value(rank, 5, me->serial);
    size_t at =
        (2 * MOST_ELEMENTS + (me->serial & 1)) * sizeof(int64_t); /* the next may still read what it got last time */
    tutti_status status = tutti_peers_put(me->peers, next, at, &mine, sizeof mine, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_signal(me->peers, next, 0, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_wait_signal(me->peers, before, 0, NULL);
    if (status == TUTTI_OK && *(int64_t *)((char *)tutti_memory_data(me->block) + at) != value(before, 5, me->serial))
        wrong("a signal came before what was put ahead of it");
    return status == TUTTI_OK ? tutti_peers_barrier(me->peers, 1, NULL) : status;
}

static tutti_status regroup(player *me) {
    int size = tutti_group_size(me->group);
    if (me->half != NULL) {
        if (me->half != TUTTI_NON_GROUP_MEMBER)
            MUST(tutti_group_destroy(me->half));
        tutti_group_release(me->half);
        me->half = NULL;
        return TUTTI_OK;
    }
    int ranks[MOST_RANKS], cut = 1 + (int)below(&me->chance, (size_t)size);
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    return tutti_group_split(me->group, (const int *[]){ ranks, ranks + cut }, (int[]){ cut, size - cut },
                             cut < size ? 2 : 1, NULL, &me->half);
}

static tutti_status rendezvous(player *me) {
    if (me->peers != NULL)
        return signals(me);
    return tutti_memory_rendezvous(me->block, me->group, &me->peers);
}

static tutti_status play(player *me) {
    me->serial++;
    size_t kind = below(&me->chance, 16), scale = below(&me->chance, 4),
           count = 1 + below(&me->chance, scale == 3 ? MOST_ELEMENTS : (size_t)1 << (4 * scale));
    bool symmetric = draw(&me->chance) % 2 == 0;
    tutti_group *group = me->half != NULL && draw(&me->chance) % 2 == 0 ? me->half : me->group;
    uint64_t after = draw(&me->chance); /* the same for those who sit out */
    tutti_status status = TUTTI_OK;
    me->in = symmetric ? tutti_memory_data(me->block) : me->heap_in;
    me->out = symmetric ? me->in + MOST_ELEMENTS : me->heap_out;
    if (kind == 0) {
        status = regroup(me);
    } else if (kind <= 2) {
        status = rendezvous(me);
    } else if (group != TUTTI_NON_GROUP_MEMBER) {
        if (count < (size_t)tutti_group_size(group))
            count = (size_t)tutti_group_size(group);
        fill(me, group, count);
        status = kind <= 4   ? tutti_barrier(group, NULL)
                 : kind < 10 ? all_reduce(me, group, count)
                             : moves(me, group, count);
        atomic_fetch_add_explicit(&shared->checked, (long)count, memory_order_relaxed);
    }
    me->chance = after;
    atomic_fetch_add_explicit(&shared->operations, 1, memory_order_relaxed);
    return status;
}

static void drop(player *me) {
    tutti_peers_release(me->peers);
    me->peers = NULL;
    if (me->half != NULL && me->half != TUTTI_NON_GROUP_MEMBER)
        MUST(tutti_group_destroy(me->half));
    tutti_group_release(me->half);
    me->half = NULL;
}

/* Some have failed, some may not have noticed yet: all end here. */
static void shrink(player *me) {
    tutti_group *rest;
    MUST(tutti_group_shrink(me->group, NULL, &rest));
    NEED(tutti_group_completed(me->group) >= tutti_group_settled(rest));
    drop(me);
    if (me->group != tutti_world_group(me->world))
        MUST(tutti_group_destroy(me->group));
    tutti_group_release(me->group);
    me->group = rest;
    uint64_t name = shared->seed;
    for (const char *at = tutti_group_name(rest); *at != 0; at++)
        name = name * 31 + (unsigned char)*at;
    me->chance = name; /* the same for all that are left */
    me->serial = 0;
    atomic_fetch_add_explicit(&shared->shrinks, 1, memory_order_relaxed);
}

static void *end_soon(void *argument) {
    int rank = (int)(intptr_t)argument;
    struct timespec time = { .tv_nsec = shared->when[rank] };
    nanosleep(&time, NULL);
    switch (shared->victims[rank]) {
    case 1:
        kill(getpid(), SIGKILL);
        break;
    case 2:
        _exit(0);
    case 3:
        execl("/bin/true", "true", (char *)NULL);
        _exit(9);
    default:
        abort();
    }
    return NULL;
}

static int count_in(const char *folder) {
    int count = 0;
    DIR *open = opendir(folder);
    while (open != NULL && readdir(open) != NULL)
        count++;
    if (open != NULL)
        closedir(open);
    return count;
}

static int count_mappings(void) {
    int count = 0;
    char line[1024];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "/memfd:tutti") != NULL;
    if (maps != NULL)
        fclose(maps);
    return count;
}

static tutti_status one_rank(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world), steps = 300;
    player me = { .world = world, .group = tutti_group_keep(tutti_world_group(world)), .chance = shared->seed };
    MUST(tutti_group_set_timeout(me.group, INT64_C(20000000000)));
    MUST(tutti_memory_alloc(world, (2 * MOST_ELEMENTS + 2) * sizeof(int64_t), NULL, &me.block));
    me.heap_in = malloc(MOST_ELEMENTS * sizeof(int64_t));
    me.heap_out = malloc(MOST_ELEMENTS * sizeof(int64_t));
    NEED(me.heap_in != NULL && me.heap_out != NULL);
    pthread_t thread;
    bool all = false;
    dies = shared->victims[rank] != 0;
    if (dies)
        NEED(pthread_create(&thread, NULL, end_soon, (void *)(intptr_t)rank) == 0);
    while (!all) {
        tutti_status status = TUTTI_OK;
        while (status == TUTTI_OK && me.serial < (uint64_t)steps)
            status = play(&me);
        if (status != TUTTI_OK && status != TUTTI_ERROR_DEAD && status != TUTTI_ERROR_ABORTED)
            wrong("rank %d, operation %llu: %s: %s", rank, (unsigned long long)me.serial, tutti_status_name(status),
                  tutti_error_message());
        if (status != TUTTI_OK) { /* the others may be in operations of either group, and not have noticed */
            MUST(tutti_group_abort(me.group, "a rank is lost"));
            if (me.half != NULL && me.half != TUTTI_NON_GROUP_MEMBER)
                MUST(tutti_group_abort(me.half, "a rank is lost"));
        }
        MUST(tutti_group_agree(me.group, status == TUTTI_OK, &all));
        if (!all)
            shrink(&me);
    }
    if (dies)
        pthread_join(thread, NULL); /* ends with this process */
    drop(&me);
    tutti_memory_release(me.block);
    free(me.heap_in);
    free(me.heap_out);
    tutti_group_release(me.group);
    if (!shared->threads) {
        MUST(tutti_world_close(world));
        NEED(count_mappings() == 0);
    }
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

/* ---- the driver ---- */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Returns how many ranks died. */
static int one_job(uint64_t *chance) {
    int ranks = 2 + (int)below(chance, MOST_RANKS - 1), dead = 0;
    shared->seed = draw(chance);
    shared->threads = below(chance, 8) == 0; /* nobody dies there: it would take all along */
    for (int rank = 0; rank < MOST_RANKS; rank++) {
        uint64_t fate = draw(chance), when = draw(chance);
        shared->victims[rank] =
            !shared->threads && rank < ranks && dead < ranks - 1 && fate % 4 == 0 ? 1 + (int)(fate / 4 % 4) : 0;
        shared->when[rank] = (int64_t)(when % 60000000);
        dead += shared->victims[rank] != 0;
    }
    atomic_store(&shared->finished, 0);
    tutti_status status =
        tutti_spawn(shared->threads ? TUTTI_SPAWN_THREADS : TUTTI_SPAWN_PROCESSES, ranks, one_rank, NULL);
    if (atomic_load(&shared->finished) != ranks - dead || atomic_load(&shared->failed))
        wrong("%d of %d survivors came through: %s", atomic_load(&shared->finished), ranks - dead,
              tutti_error_message());
    if (status != (dead > 0 ? TUTTI_ERROR_DEAD : TUTTI_OK))
        wrong("%d ranks died, and the job ended with %s: %s", dead, tutti_status_name(status), tutti_error_message());
    return dead;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 10;
    given_seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    if (seconds <= 0 || argc > 3) {
        fprintf(stderr, "usage: soak SECONDS SEED\n");
        return 2;
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    uint64_t chance = given_seed;
    long jobs = 0, deaths = 0;
    int descriptors = 0;
    double begin = now();
    for (; now() - begin < seconds; jobs++) {
        deaths += one_job(&chance);
        siginfo_t info = { 0 };
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0)
            wrong("a process was left behind");
        if (jobs == 0)
            descriptors = count_in("/proc/self/fd");
        else if (count_in("/proc/self/fd") != descriptors)
            wrong("%d descriptors were left behind", count_in("/proc/self/fd") - descriptors);
        if (count_mappings() != 0)
            wrong("%d mappings were left behind", count_mappings());
    }
    printf(
        "soak: seed %llu, %.0f s: %ld jobs, %ld operations, %ld elements checked, %ld deaths, %ld shrinks; all right\n",
        (unsigned long long)given_seed, now() - begin, jobs, atomic_load(&shared->operations),
        atomic_load(&shared->checked), deaths, atomic_load(&shared->shrinks));
    return 0;
}
