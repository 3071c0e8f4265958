/* SPDX-License-Identifier: Apache-2.0
 *
 * A death is seen by everybody: by whoever waits, in whatever kind of wait, and by whoever only asks; whether the dead
 * rank had already arrived in the operation, never came, or died while nobody called anything.
 *
 * Four ranks. Rank 0 is the one that the others wait for, and it does not come: it only asks how the group fares. Ranks
 * 1 and 3 wait, with a deadline a minute away. Rank 2 dies; nobody needs it any more.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <tutti/tutti.h>
#include <unistd.h>

#include "../harness.h"

#define MINUTE INT64_C(60000000000)
#define LATE 0
#define VICTIM 2
#define LONG ((size_t)100000)

typedef struct stage {
    tutti_world *world;
    tutti_group *group;
    tutti_peers *peers;
    tutti_memory *block;
    float *in, *out;
} stage;

typedef tutti_status operation(stage *stage);

static const tutti_call patient = { .size = sizeof(tutti_call), .timeout_ns = MINUTE };

/* ---- kinds of waits: each needs rank 0 ---- */

static tutti_status in_barrier(stage *stage) {
    return tutti_barrier(stage->group, &patient);
}
static tutti_status in_short_all_reduce(stage *stage) {
    return tutti_all_reduce(stage->group, stage->in, stage->out, 1, TUTTI_F32, TUTTI_SUM, &patient);
}
static tutti_status in_long_all_reduce(stage *stage) {
    return tutti_all_reduce(stage->group, stage->in, stage->out, LONG, TUTTI_F32, TUTTI_SUM, &patient);
}
static tutti_status in_broadcast(stage *stage) {
    return tutti_broadcast(stage->group, stage->in, stage->out, LONG, TUTTI_F32, LATE, &patient);
}
static tutti_status in_scatter(stage *stage) {
    return tutti_scatter(stage->group, stage->in, stage->out, LONG / 4, TUTTI_F32, LATE, &patient);
}
static tutti_status in_all_to_all(stage *stage) {
    return tutti_all_to_all(stage->group, stage->in, stage->out, LONG / 4, TUTTI_F32, &patient);
}
static tutti_status in_recv(stage *stage) {
    return tutti_recv(stage->group, stage->out, 1, TUTTI_F32, LATE, 0, &patient);
}
static tutti_status in_recv_from_any(stage *stage) {
    return tutti_recv(stage->group, stage->out, 1, TUTTI_F32, TUTTI_ANY_SOURCE, 0, &patient);
}
static tutti_status in_long_send(stage *stage) {
    return tutti_send(stage->group, stage->in, LONG, TUTTI_F32, LATE, 0, &patient);
}
static tutti_status in_wait_signal(stage *stage) {
    return tutti_peers_wait_signal(stage->peers, LATE, 0, &patient);
}
static tutti_status in_signal(stage *stage) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 2 && status == TUTTI_OK; i++) /* the second waits until the first is taken */
        status = tutti_peers_signal(stage->peers, LATE, 0, &patient);
    return status;
}
static tutti_status in_peers_barrier(stage *stage) {
    return tutti_peers_barrier(stage->peers, 0, &patient);
}
static tutti_status in_test_signal(stage *stage) {
    bool arrived = false;
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK && !arrived)
        status = tutti_peers_test_signal(stage->peers, LATE, 0, &arrived);
    return status;
}
static tutti_status in_rendezvous(stage *stage) {
    tutti_memory *block;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(stage->world, 4096, NULL, &block));
    tutti_status status = tutti_memory_rendezvous(block, stage->group, &peers);
    tutti_memory_release(block);
    return status;
}
static tutti_status in_group_new(stage *stage) {
    tutti_group *group;
    return tutti_group_new(stage->world, NULL, 0, NULL, &group);
}
static tutti_status end_work(tutti_work *work, int64_t timeout_ns) {
    tutti_status status;
    do
        status = tutti_work_wait(work, timeout_ns);
    while (status == TUTTI_ERROR_TIMEOUT && strstr(tutti_error_message(), "it goes on") != NULL);
    tutti_work_release(work);
    return status;
}
static tutti_status start_all_reduce(stage *stage, size_t count, tutti_work **work) {
    return tutti_all_reduce(stage->group, stage->in, stage->out, count, TUTTI_F32, TUTTI_SUM,
                            TUTTI_OPTIONS(tutti_call, .work = work, .timeout_ns = MINUTE));
}
static tutti_status in_short_work(stage *stage) {
    tutti_work *work;
    tutti_status status = start_all_reduce(stage, 1, &work);
    return status != TUTTI_OK ? status : end_work(work, MINUTE);
}
static tutti_status in_waits_for_a_work_that_are_shorter(stage *stage) {
    tutti_work *work;
    tutti_status status = start_all_reduce(stage, 1, &work);
    return status != TUTTI_OK ? status : end_work(work, MINUTE / 2);
}
static tutti_status in_long_work(stage *stage) {
    tutti_work *work;
    tutti_status status = start_all_reduce(stage, LONG, &work);
    return status != TUTTI_OK ? status : end_work(work, MINUTE);
}
static tutti_status in_tests_of_a_work(stage *stage) {
    tutti_work *work;
    bool finished = false;
    tutti_status status = start_all_reduce(stage, 1, &work);
    if (status != TUTTI_OK)
        return status;
    while (!finished)
        CHECK_OK(tutti_work_test(work, &finished));
    return end_work(work, MINUTE);
}
static tutti_status in_recv_work(stage *stage) {
    tutti_work *work;
    tutti_status status = tutti_recv(stage->group, stage->out, 1, TUTTI_F32, LATE, 0,
                                     TUTTI_OPTIONS(tutti_call, .work = &work, .timeout_ns = MINUTE));
    return status != TUTTI_OK ? status : end_work(work, MINUTE);
}
static tutti_status in_send_recv(stage *stage) {
    return tutti_send_recv(stage->group, stage->in, 1, LATE, stage->out, 1, LATE, TUTTI_F32, 0, &patient);
}
static tutti_status in_recv_until_an_event(stage *stage) {
    return tutti_recv(stage->group, stage->out, 1, TUTTI_F32, LATE, 0,
                      TUTTI_OPTIONS(tutti_call, .timeout_ns = TUTTI_UNTIL_EVENT));
}
/* Messages and a collective, which is awaited first. */
static tutti_batch *fill_batch(stage *stage) {
    tutti_call call = TUTTI_CALL_INIT;
    CHECK_OK(tutti_batch_begin(stage->group, &call.batch));
    CHECK_OK(tutti_send(stage->group, stage->in, LONG, TUTTI_F32, LATE, 0, &call));
    CHECK_OK(tutti_recv(stage->group, stage->out, 1, TUTTI_F32, LATE, 1, &call));
    CHECK_OK(tutti_all_reduce(stage->group, stage->in + 1, stage->out + 1, 1, TUTTI_F32, TUTTI_SUM, &call));
    return call.batch;
}
static tutti_status in_batch(stage *stage) {
    return tutti_batch_end(fill_batch(stage), &patient);
}
static tutti_status in_work_of_a_batch(stage *stage) {
    tutti_work *work;
    tutti_status status =
        tutti_batch_end(fill_batch(stage), TUTTI_OPTIONS(tutti_call, .work = &work, .timeout_ns = MINUTE));
    return status != TUTTI_OK ? status : end_work(work, MINUTE);
}
static tutti_status in_group_check(stage *stage) {
    tutti_status status;
    while ((status = tutti_group_check(stage->group)) == TUTTI_OK)
        usleep(10000);
    return status;
}
/* A store has its own timeouts; the world's also ends its waits with a death. */
static tutti_status in_store_get(stage *stage) {
    void *value;
    size_t bytes;
    return tutti_store_get(tutti_world_store(stage->world), "never", MINUTE, &value, &bytes);
}
static tutti_status in_store_wait(stage *stage) {
    const char *key = "never";
    return tutti_store_wait(tutti_world_store(stage->world), &key, 1, TUTTI_UNTIL_EVENT);
}
static tutti_status in_queue_pop_of_a_clone(stage *stage) {
    void *value;
    size_t bytes;
    tutti_store *clone;
    CHECK_OK(tutti_store_clone(tutti_world_store(stage->world), &clone));
    tutti_status status = tutti_store_queue_pop(clone, "never", true, TUTTI_UNTIL_EVENT, &value, &bytes);
    /* The connection is still good. */
    if (tutti_group_rank(stage->group) != VICTIM) {
        bool present = true;
        const char *key = "never";
        CHECK_OK(tutti_store_check(clone, &key, 1, &present));
        CHECK(!present);
    }
    tutti_store_release(clone);
    return status;
}
/* Ranks 1 and 3 never wait for long, and never for the dead one. */
static tutti_status in_ping_pong(stage *stage) {
    int rank = tutti_group_rank(stage->group), other = rank == 1 ? 3 : 1;
    tutti_status status = TUTTI_OK;
    if (rank == VICTIM)
        return in_group_check(stage);
    while (status == TUTTI_OK) {
        if (rank == 1)
            status = tutti_send(stage->group, stage->in, 1, TUTTI_F32, other, 0, &patient);
        if (status == TUTTI_OK)
            status = tutti_recv(stage->group, stage->out, 1, TUTTI_F32, other, 0, &patient);
        if (rank == 3 && status == TUTTI_OK)
            status = tutti_send(stage->group, stage->in, 1, TUTTI_F32, other, 0, &patient);
    }
    return status;
}

static const struct {
    const char *name;
    operation *run;
} kinds[] = {
    { "barrier", in_barrier },
    { "short all_reduce", in_short_all_reduce },
    { "long all_reduce", in_long_all_reduce },
    { "broadcast", in_broadcast },
    { "scatter", in_scatter },
    { "all_to_all", in_all_to_all },
    { "recv", in_recv },
    { "recv from any", in_recv_from_any },
    { "long send", in_long_send },
    { "wait_signal", in_wait_signal },
    { "signal", in_signal },
    { "peers barrier", in_peers_barrier },
    { "test_signal", in_test_signal },
    { "rendezvous", in_rendezvous },
    { "group_new", in_group_new },
    { "short work", in_short_work },
    { "short waits for a work", in_waits_for_a_work_that_are_shorter },
    { "long work", in_long_work },
    { "tests of a work", in_tests_of_a_work },
    { "recv work", in_recv_work },
    { "send_recv", in_send_recv },
    { "recv until an event", in_recv_until_an_event },
    { "batch", in_batch },
    { "work of a batch", in_work_of_a_batch },
    { "group_check", in_group_check },
    { "ping-pong", in_ping_pong },
    { "store get", in_store_get },
    { "store wait", in_store_wait },
    { "queue_pop of a clone", in_queue_pop_of_a_clone },
};
#define KINDS (sizeof kinds / sizeof kinds[0])

/* ---- moments of the death ---- */

typedef enum moment {
    AFTER_IT_ARRIVED,
    WITHOUT_ARRIVING,
    WHILE_NOBODY_CALLED
} moment;

typedef struct scene {
    operation *run;
    moment moment;
} scene;

/* Ranks that have arrived in the operation, or are about to; and ranks that saw all they had to see. */
static _Atomic int *arrived, *content;
static _Atomic int *victim; /* its process */

static void *kill_when_all_wait(void *argument) {
    (void)argument;
    while (atomic_load(arrived) < 3)
        usleep(1000);
    usleep(30000);
    raise(SIGKILL);
    return NULL;
}

static void meet_death(stage *stage, const scene *scene) {
    pthread_t killer;
    if (scene->moment == WHILE_NOBODY_CALLED)
        raise(SIGKILL);
    if (scene->moment == WITHOUT_ARRIVING)
        atomic_fetch_add(arrived, 1), kill_when_all_wait(NULL);
    CHECK(pthread_create(&killer, NULL, kill_when_all_wait, NULL) == 0);
    atomic_fetch_add(arrived, 1);
    (void)!scene->run(stage);
    pause();
}

static void expect_corpse(tutti_status status) {
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2");
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.at_fault_count, 1);
    CHECK_EQ(info.at_fault[0], VICTIM);
}

static tutti_status play(tutti_world *world, void *argument) {
    const scene *scene = argument;
    stage stage = { .world = world, .group = tutti_world_group(world) };
    stage.in = calloc(LONG, sizeof(float)), stage.out = calloc(LONG, sizeof(float));
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &stage.block));
    CHECK_OK(tutti_memory_rendezvous(stage.block, stage.group, &stage.peers));
    int rank = tutti_world_rank(world);
    if (rank == VICTIM)
        atomic_store(victim, getpid());
    CHECK_OK(tutti_barrier(stage.group, NULL));
    if (rank == VICTIM)
        meet_death(&stage, scene);
    if (scene->moment == WHILE_NOBODY_CALLED) {
        test_await_end(atomic_load(victim));
        usleep(100000);
        expect_corpse(tutti_group_check(stage.group)); /* the very first question */
        expect_corpse(rank == LATE ? tutti_barrier(stage.group, &patient) : scene->run(&stage));
    } else if (rank == LATE) {
        expect_corpse(in_group_check(&stage));
    } else {
        atomic_fetch_add(arrived, 1);
        expect_corpse(scene->run(&stage));
    }
    expect_corpse(tutti_group_check(stage.group));
    tutti_peers_release(stage.peers);
    tutti_memory_release(stage.block);
    free(stage.in);
    free(stage.out);
    atomic_fetch_add(content, 1);
    return TUTTI_OK;
}

static void play_all(moment moment) {
    arrived = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(arrived != MAP_FAILED);
    content = arrived + 1;
    victim = arrived + 2;
    for (size_t i = 0; i < KINDS; i++) {
        atomic_store(arrived, 0);
        atomic_store(content, 0);
        scene scene = { kinds[i].run, moment };
        tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, play, &scene);
        if (status != TUTTI_ERROR_DEAD || strstr(tutti_error_message(), "rank 2") == NULL ||
            strstr(tutti_error_message(), "signal 9") == NULL)
            FAIL("%s: %s: %s", kinds[i].name, tutti_status_name(status), tutti_error_message());
        if (atomic_load(content) != 3)
            FAIL("%s: %d of 3 survivors saw the death", kinds[i].name, atomic_load(content));
    }
    munmap(arrived, 4096);
}

TEST_LIMIT(the_death_of_a_rank_that_had_arrived_is_seen_in_every_kind_of_wait, 150) {
    play_all(AFTER_IT_ARRIVED);
}

TEST_LIMIT(the_death_of_a_rank_that_does_not_come_is_seen_in_every_kind_of_wait, 150) {
    play_all(WITHOUT_ARRIVING);
}

TEST_LIMIT(a_death_while_nobody_called_anything_is_seen_by_the_first_question_and_by_every_call, 150) {
    play_all(WHILE_NOBODY_CALLED);
}
