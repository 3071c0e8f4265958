/* SPDX-License-Identifier: Apache-2.0
 *
 * The fault matrix: a rank ends by SIGKILL, exit(0), abort or exec; instead of calling an operation, or at some moment
 * inside of it; it is the first, a middle one, the last, or two at once; in every collective, in signals, rendezvous
 * and the making of groups. Each time every survivor gets the death as its error, with the right rank and pid, although
 * its deadline is a minute away; then the survivors shrink and go on; and they leave no descriptor and no mapping
 * behind.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/group.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"

#define RANKS 4
#define COUNT ((size_t)30000) /* elements: several chunks */

/* ---- operations ---- */

typedef struct stage {
    tutti_world *world;
    tutti_group *group;
    tutti_memory *block;
    tutti_peers *peers;
    float *in, *out;
    int rank, size;
} stage;

typedef tutti_status operation(stage *at);

static tutti_status barrier(stage *at) {
    return tutti_barrier(at->group, NULL);
}
static tutti_status small_reduce(stage *at) {
    return tutti_all_reduce(at->group, at->in, at->out, 2, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status all_reduce(stage *at) {
    return tutti_all_reduce(at->group, at->in, at->out, COUNT * RANKS, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status async_reduce(stage *at) {
    tutti_work *work;
    tutti_status status = tutti_all_reduce(at->group, at->in, at->out, COUNT, TUTTI_F32, TUTTI_SUM,
                                           TUTTI_OPTIONS(tutti_call, .work = &work));
    if (status != TUTTI_OK)
        return status;
    status = tutti_work_wait(work, 0);
    tutti_work_release(work);
    return status;
}
static tutti_status reduce(stage *at) {
    return tutti_reduce(at->group, at->in, at->out, COUNT, TUTTI_F32, TUTTI_SUM, 1, NULL);
}
static tutti_status reduce_scatter(stage *at) {
    return tutti_reduce_scatter(at->group, at->in, at->out, COUNT, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status all_gather(stage *at) {
    return tutti_all_gather(at->group, at->in, at->out, COUNT, TUTTI_F32, NULL);
}
static tutti_status all_gather_v(stage *at) {
    size_t counts[RANKS] = { 1, 20000, 3, 40 };
    return tutti_all_gather_v(at->group, at->in, at->out, counts, NULL, TUTTI_F32, NULL);
}
static tutti_status broadcast(stage *at) {
    return tutti_broadcast(at->group, at->in, at->out, COUNT, TUTTI_F32, 2, NULL);
}
static tutti_status gather(stage *at) {
    return tutti_gather(at->group, at->in, at->out, COUNT, TUTTI_F32, 0, NULL);
}
static tutti_status scatter(stage *at) {
    return tutti_scatter(at->group, at->in, at->out, COUNT, TUTTI_F32, 3, NULL);
}
static tutti_status all_to_all(stage *at) {
    return tutti_all_to_all(at->group, at->in, at->out, COUNT, TUTTI_F32, NULL);
}
static tutti_status permute(stage *at) {
    static const int to[RANKS] = { 1, 2, 3, 0 };
    return tutti_permute(at->group, at->in, at->out, COUNT, TUTTI_F32, to, NULL);
}
/* Round and round: everybody depends on everybody. */
static tutti_status ring(stage *at) {
    int next = (at->rank + 1) % at->size, before = (at->rank + at->size - 1) % at->size;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < at->size && status == TUTTI_OK; i++) {
        if (at->rank % 2 == 0)
            status = tutti_send(at->group, at->in, COUNT, TUTTI_F32, next, 0, NULL);
        if (status == TUTTI_OK)
            status = tutti_recv(at->group, at->out, COUNT, TUTTI_F32, before, 0, NULL);
        if (status == TUTTI_OK && at->rank % 2 == 1)
            status = tutti_send(at->group, at->in, COUNT, TUTTI_F32, next, 0, NULL);
    }
    return status;
}
static tutti_status signals(stage *at) {
    int next = (at->rank + 1) % at->size, before = (at->rank + at->size - 1) % at->size;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < at->size && status == TUTTI_OK; i++) {
        status = tutti_peers_put(at->peers, next, 0, at->in, 1000, NULL);
        if (status == TUTTI_OK)
            status = tutti_peers_signal(at->peers, next, 0, NULL);
        if (status == TUTTI_OK)
            status = tutti_peers_wait_signal(at->peers, before, 0, NULL);
    }
    return status;
}
static tutti_status peers_barrier(stage *at) {
    return tutti_peers_barrier(at->peers, 1, NULL);
}
static tutti_status rendezvous(stage *at) {
    tutti_memory *block;
    tutti_peers *peers;
    tutti_status status = tutti_memory_alloc(at->world, 10000, NULL, &block);
    if (status != TUTTI_OK)
        return status;
    status = tutti_memory_rendezvous(block, at->group, &peers);
    if (status == TUTTI_OK)
        tutti_peers_release(peers);
    tutti_memory_release(block);
    return status;
}
static tutti_status group_new(stage *at) {
    tutti_group *group;
    tutti_status status = tutti_group_new(at->world, NULL, 0, NULL, &group);
    if (status == TUTTI_OK) {
        CHECK_OK(tutti_group_destroy(group));
        tutti_group_release(group);
    }
    return status;
}
static tutti_status group_split(stage *at) {
    static const int low[] = { 0, 1 }, high[] = { 2, 3 };
    tutti_group *half;
    tutti_status status = tutti_group_split(at->group, (const int *[]){ low, high }, (int[]){ 2, 2 }, 2, NULL, &half);
    if (status == TUTTI_OK) {
        CHECK_OK(tutti_group_destroy(half));
        tutti_group_release(half);
    }
    return status;
}

static const struct {
    const char *name;
    operation *run;
} operations[] = {
    { "barrier", barrier },         { "all_reduce of 8 bytes", small_reduce },
    { "all_reduce", all_reduce },   { "all_reduce with a work", async_reduce },
    { "reduce", reduce },           { "reduce_scatter", reduce_scatter },
    { "all_gather", all_gather },   { "all_gather_v", all_gather_v },
    { "broadcast", broadcast },     { "gather", gather },
    { "scatter", scatter },         { "all_to_all", all_to_all },
    { "permute", permute },         { "send and recv", ring },
    { "put and signal", signals },  { "peers_barrier", peers_barrier },
    { "rendezvous", rendezvous },   { "group_new", group_new },
    { "group_split", group_split },
};
#define OPERATIONS (sizeof operations / sizeof operations[0])

/* ---- ways to end ---- */

typedef enum ending {
    BY_KILL,
    BY_EXIT,
    BY_ABORT,
    BY_EXEC,
    ENDINGS
} ending;
static const char *const ending_names[ENDINGS] = { "kill", "exit(0)", "abort", "exec" };

static void end_by(ending how) {
    switch (how) {
    case BY_KILL:
        kill(getpid(), SIGKILL);
        break;
    case BY_EXIT:
        _exit(0);
    case BY_ABORT:
        abort();
    default:
        execl("/bin/sleep", "sleep", "0.3", (char *)NULL); /* lives on a while: only the exec can tell */
        _exit(9);
    }
}

/* Shared with all ranks. */
typedef struct trial {
    ending how;
    bool inside;        /* at some moment inside, else instead of the call */
    int victim, second; /* -1: none */
    size_t operation;
    _Atomic int finished;
    _Atomic int pids[RANKS];
} trial;

static void *end_soon(void *argument) {
    const trial *shared = argument;
    usleep(500 + (useconds_t)(shared->operation * 137 + (size_t)shared->how * 311) % 2500);
    end_by(shared->how);
    return NULL;
}

static void expect_death(const trial *shared, tutti_status status) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    if (status != TUTTI_ERROR_DEAD)
        FAIL("%s, %s: gave %s (%s), not the death", operations[shared->operation].name, ending_names[shared->how],
             tutti_status_name(status), tutti_error_message());
    CHECK(info.at_fault_count >= 1);
    if (info.at_fault[0] != shared->victim && info.at_fault[0] != shared->second)
        FAIL("%s, %s: blames rank %d (%s)", operations[shared->operation].name, ending_names[shared->how],
             info.at_fault[0], tutti_error_message());
    char who[64];
    snprintf(who, sizeof who, "rank %d (pid %d)", info.at_fault[0], atomic_load(&shared->pids[info.at_fault[0]]));
    CHECK_MESSAGE(who);
}

static void go_on(const trial *shared, stage *at) {
    tutti_group *rest;
    CHECK_OK(tutti_group_shrink(at->group, NULL, &rest));
    CHECK_EQ(tutti_group_size(rest), RANKS - (shared->second >= 0 ? 2 : 1));
    int64_t one = 1, sum;
    CHECK_OK(tutti_all_reduce(rest, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    CHECK_EQ(sum, tutti_group_size(rest));
    tutti_group_release(rest);
}

static tutti_status one_rank(tutti_world *world, void *argument) {
    trial *shared = argument;
    stage at = { .world = world, .group = tutti_world_group(world), .rank = tutti_world_rank(world), .size = RANKS };
    at.in = calloc(COUNT * RANKS, sizeof(float));
    at.out = calloc(COUNT * RANKS, sizeof(float));
    atomic_store(&shared->pids[at.rank], getpid());
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &at.block));
    CHECK_OK(tutti_memory_rendezvous(at.block, at.group, &at.peers));
    CHECK_OK(tutti_group_set_timeout(at.group, INT64_C(60000000000)));
    CHECK_OK(operations[shared->operation].run(&at));
    CHECK_OK(tutti_barrier(at.group, NULL));
    bool dies = at.rank == shared->victim || at.rank == shared->second;
    pthread_t thread;
    if (dies && !shared->inside)
        end_by(shared->how);
    if (dies)
        CHECK(pthread_create(&thread, NULL, end_soon, shared) == 0);
    tutti_status status;
    do
        status = operations[shared->operation].run(&at);
    while (status == TUTTI_OK);
    if (dies) /* it may learn of the other victim first */
        pthread_join(thread, NULL);
    expect_death(shared, status);
    go_on(shared, &at);
    tutti_peers_release(at.peers);
    tutti_memory_release(at.block);
    free(at.in);
    free(at.out);
    CHECK_OK(tutti_world_close(world));
    CHECK_EQ(test_count_mappings(), 0);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

static void run_trial(trial *shared) {
    atomic_store(&shared->finished, 0);
    tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, RANKS, one_rank, shared);
    int survivors = RANKS - (shared->second >= 0 ? 2 : 1);
    if (status != TUTTI_ERROR_DEAD || atomic_load(&shared->finished) != survivors)
        FAIL("%s, %s %s the call, ranks %d and %d: %d of %d survivors came through; spawn says %s: %s",
             operations[shared->operation].name, ending_names[shared->how], shared->inside ? "inside" : "instead of",
             shared->victim, shared->second, atomic_load(&shared->finished), survivors, tutti_status_name(status),
             tutti_error_message());
}

/* For each operation each way to end; who it is takes turns, so that each of the four cases meets each way and many
 * operations. */
static void run_matrix(bool inside) {
    static const int who[4][2] = { { 0, -1 }, { 1, -1 }, { RANKS - 1, -1 }, { 0, RANKS - 2 } };
    trial *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    shared->inside = inside;
    for (shared->operation = 0; shared->operation < OPERATIONS; shared->operation++)
        for (int how = 0; how < ENDINGS; how++) {
            if (test_sanitized() && (shared->operation + (size_t)how) % 4 != 0)
                continue;
            const int *dead = who[(shared->operation + (size_t)how + (inside ? 1 : 0)) % 4];
            shared->how = (ending)how;
            shared->victim = dead[0];
            shared->second = dead[1];
            run_trial(shared);
        }
}

TEST_LIMIT(a_rank_that_ends_instead_of_calling_is_everybodys_error_at_once, 100) {
    run_matrix(false);
}

TEST_LIMIT(a_rank_that_ends_inside_any_operation_is_everybodys_error_at_once, 100) {
    run_matrix(true);
}
