/* SPDX-License-Identifier: Apache-2.0
 *
 * Events: a program that calls nothing, or waits without a deadline, hears of deaths, aborts, interrupts and closes.
 */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <tutti/tutti.h>
#include <unistd.h>

#include "../harness.h"

#define MINUTE INT64_C(60000000000)

static _Atomic int *content; /* ranks that saw what they had to see */

static void lose_a_rank(tutti_rank_main *main, int survivors) {
    content = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(content != MAP_FAILED);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, survivors + 1, main, NULL), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(content), survivors);
    munmap(content, 4096);
}

static void readable(int fd, bool expected) {
    struct pollfd look = { .fd = fd, .events = POLLIN };
    CHECK_EQ(poll(&look, 1, expected ? 60000 : 0), expected);
}

/* ---- deaths ---- */

/* Nobody is in a call of Tutti when rank 2 dies. */
static tutti_status hear_by_descriptor(tutti_world *world, void *argument) {
    (void)argument;
    int fd;
    CHECK_OK(tutti_world_event_fd(world, &fd));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    readable(fd, false);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    if (tutti_world_rank(world) == 2)
        raise(SIGKILL);
    readable(fd, true);
    tutti_event event = TUTTI_EVENT_INIT;
    CHECK_OK(tutti_world_next_event(world, 1, &event));
    CHECK_EQ(event.kind, TUTTI_EVENT_DEATH);
    CHECK_EQ(event.status, TUTTI_ERROR_DEAD);
    CHECK_EQ(event.rank, 2);
    CHECK(strstr(event.text, "rank 2") != NULL);
    CHECK_TEXT(event.group, "");
    /* Its group ends with the next look at it; that is told too, and then nothing more. */
    CHECK_STATUS(tutti_group_check(tutti_world_group(world)), TUTTI_ERROR_DEAD);
    CHECK_OK(tutti_world_next_event(world, MINUTE, &event));
    CHECK_EQ(event.kind, TUTTI_EVENT_GROUP_ENDED);
    CHECK_EQ(event.status, TUTTI_ERROR_DEAD);
    CHECK_TEXT(event.group, "0");
    readable(fd, false);
    CHECK_STATUS(tutti_world_next_event(world, 1, &event), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("has had no event for 1 ns");
    CHECK_STATUS(tutti_world_next_event(world, -2, &event), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_UNTIL_EVENT");
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "both are done", 2, MINUTE)); /* a close is an event too */
    atomic_fetch_add(content, 1);
    return TUTTI_OK;
}

TEST(a_death_makes_the_descriptor_readable_while_nobody_calls_anything) {
    lose_a_rank(hear_by_descriptor, 2);
}

static tutti_status hear_by_waiting(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    if (tutti_world_rank(world) == 1) {
        usleep(50000);
        raise(SIGKILL);
    }
    tutti_event event = TUTTI_EVENT_INIT;
    CHECK_OK(tutti_world_next_event(world, TUTTI_UNTIL_EVENT, &event));
    CHECK_EQ(event.kind, TUTTI_EVENT_DEATH);
    CHECK_EQ(event.rank, 1);
    /* Now that it was told, waits on the store do not end with it any more. */
    int64_t sum;
    tutti_store *store = tutti_world_store(world);
    CHECK_OK(tutti_store_add(store, "known", 1, &sum));
    CHECK_OK(tutti_store_barrier(store, "all know", 2, MINUTE));
    atomic_fetch_add(content, 1);
    return TUTTI_OK;
}

TEST(a_wait_for_events_without_a_deadline_hears_of_a_death_and_the_store_goes_on) {
    lose_a_rank(hear_by_waiting, 2);
}

static tutti_status receive_for_ever(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 2) {
        usleep(50000);
        raise(SIGKILL);
    }
    float value;
    tutti_status status;
    if (tutti_world_rank(world) == 0)
        status =
            tutti_recv(group, &value, 1, TUTTI_F32, 1, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = TUTTI_UNTIL_EVENT));
    else
        while ((status = tutti_group_check(group)) == TUTTI_OK)
            usleep(1000);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2");
    atomic_fetch_add(content, 1);
    return TUTTI_OK;
}

TEST(a_receive_without_a_deadline_ends_with_a_death) {
    lose_a_rank(receive_for_ever, 2);
}

/* ---- aborts, interrupts, closes ---- */

TEST_WORLD(an_abort_is_an_event_and_ends_a_receive_without_a_deadline, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1) {
        usleep(50000);
        CHECK_OK(tutti_group_abort(group, "enough"));
    } else {
        float value;
        CHECK_STATUS(
            tutti_recv(group, &value, 1, TUTTI_F32, 1, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = TUTTI_UNTIL_EVENT)),
            TUTTI_ERROR_ABORTED);
    }
    tutti_event event = TUTTI_EVENT_INIT;
    CHECK_OK(tutti_world_next_event(world, MINUTE, &event));
    while (event.kind == TUTTI_EVENT_CLOSE) /* the other may be quicker */
        CHECK_OK(tutti_world_next_event(world, MINUTE, &event));
    CHECK_EQ(event.kind, TUTTI_EVENT_GROUP_ENDED);
    CHECK_EQ(event.status, TUTTI_ERROR_ABORTED);
    CHECK_EQ(event.rank, 1);
    CHECK(strstr(event.text, "enough") != NULL);
}

static void *interrupt_soon(void *argument) {
    usleep(50000);
    tutti_world_interrupt(argument);
    return NULL;
}

TEST_WORLD(an_interrupt_ends_a_wait_for_events, 2) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, interrupt_soon, world), 0);
    tutti_event event = TUTTI_EVENT_INIT;
    CHECK_STATUS(tutti_world_next_event(world, TUTTI_UNTIL_EVENT, &event), TUTTI_ERROR_INTERRUPTED);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    tutti_world_resume(world);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

static void *wait_for_events(void *argument) {
    tutti_event event = TUTTI_EVENT_INIT;
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK) /* the other rank may close first, which is an event */
        status = tutti_world_next_event(argument, TUTTI_UNTIL_EVENT, &event);
    CHECK_EQ(status, TUTTI_ERROR_STATE);
    return NULL;
}

TEST_WORLD(a_close_ends_a_wait_for_events_of_another_thread, 2) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, wait_for_events, world), 0);
    usleep(50000);
    CHECK_OK(tutti_world_close(world));
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

TEST_WORLD(a_rank_that_closes_is_an_event, 2) {
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    if (tutti_world_rank(world) == 1) {
        CHECK_OK(tutti_world_close(world));
        return;
    }
    tutti_event event = TUTTI_EVENT_INIT;
    CHECK_OK(tutti_world_next_event(world, MINUTE, &event));
    CHECK_EQ(event.kind, TUTTI_EVENT_CLOSE);
    CHECK_EQ(event.status, TUTTI_ERROR_GONE);
    CHECK_EQ(event.rank, 1);
    CHECK_OK(tutti_world_close(world));
}

/* ---- arguments ---- */

TEST(wrong_arguments_are_refused) {
    tutti_world *world, *fake;
    tutti_event event = { .size = 0 };
    int fd;
    CHECK_OK(tutti_world_open(NULL, &world));
    CHECK_STATUS(tutti_world_next_event(world, 1, &event), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_world_next_event(world, 1, NULL), TUTTI_ERROR_ARGUMENT);
    tutti_event_init(&event, sizeof event);
    CHECK_STATUS(tutti_world_next_event(world, -2, &event), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_world_next_event(NULL, 1, &event), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_world_event_fd(world, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_world_next_event(world, 1, &event), TUTTI_ERROR_TIMEOUT);
    CHECK_OK(tutti_world_event_fd(world, &fd));
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &fake));
    CHECK_STATUS(tutti_world_event_fd(fake, &fd), TUTTI_ERROR_UNSUPPORTED);
    CHECK_OK(tutti_world_close(fake));
    float value;
    CHECK_STATUS(tutti_all_reduce(tutti_world_group(world), &value, &value, 1, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .timeout_ns = TUTTI_UNTIL_EVENT)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(world));
}
