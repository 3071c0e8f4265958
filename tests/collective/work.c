/* SPDX-License-Identifier: Apache-2.0
 *
 * Works: several in flight, in order, whoever finishes them; their errors go to who waits; batches.
 */
#include <dirent.h>
#include <pthread.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/store.h>
#include <unistd.h>

#include "values.h"

enum {
    MANY = 200
};

TEST_WORLD(works_of_all_sizes_run_in_the_order_in_which_they_were_started, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    static const size_t sizes[] = { 1, 300, 20000, 2, 100000, 12 };
    int *in[MANY], *out[MANY];
    tutti_work *works[MANY];
    for (int i = 0; i < MANY; i++) {
        size_t count = sizes[i % 6];
        in[i] = malloc(count * 4);
        out[i] = malloc(count * 4);
        for (size_t k = 0; k < count; k++)
            in[i][k] = rank + i + (int)k;
        CHECK_OK(tutti_all_reduce(group, in[i], out[i], count, TUTTI_I32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .work = &works[i])));
        if (i % 50 == 25) /* blocking calls come after those that were started before */
            CHECK_OK(tutti_barrier(group, NULL));
    }
    for (int i = MANY - 1; i >= 0; i--) {
        bool finished = false;
        if (i % 3 == 0)
            CHECK_OK(tutti_work_test(works[i], &finished));
        CHECK_OK(tutti_work_wait(works[i], 0));
        CHECK_OK(tutti_work_test(works[i], &finished));
        CHECK(finished);
        for (size_t k = 0; k < sizes[i % 6]; k++)
            CHECK_EQ(out[i][k], 3 + 3 * (i + (int)k));
        CHECK(tutti_work_sequence(works[i]) > 0);
        tutti_work_release(works[i]);
        free(in[i]);
        free(out[i]);
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

/* The first work of a group sets its collectives up, in the helper's time, and the rendezvous and the split exchange
 * something too: in the order of the calls, on every rank. */
TEST_WORLD(a_rendezvous_and_a_split_come_after_the_works_started_before_them, 3) {
    enum {
        GROUPS = 12,
        COUNT = 1000
    };
    for (int i = 0; i < GROUPS; i++) {
        tutti_group *group, *part;
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
        int in[COUNT], out[COUNT];
        for (int k = 0; k < COUNT; k++)
            in[k] = k + i;
        tutti_work *work;
        tutti_memory *memory;
        tutti_peers *peers;
        CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
        CHECK_OK(
            tutti_all_reduce(group, in, out, COUNT, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
        if (i % 3 == tutti_world_rank(world))
            usleep(2000); /* the helper is quicker here, and slower elsewhere */
        if (i % 2 == 0) {
            CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
            tutti_peers_release(peers);
        } else {
            CHECK_OK(
                tutti_group_split(group, (const int *const[]){ (int[]){ 0, 1, 2 } }, (int[]){ 3 }, 1, NULL, &part));
            tutti_group_release(part);
        }
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
        for (int k = 0; k < COUNT; k++)
            CHECK_EQ(out[k], 3 * (k + i));
        tutti_memory_release(memory);
        tutti_group_release(group);
    }
}

TEST_WORLD(a_released_work_finishes_by_itself, 2) {
    tutti_group *group = tutti_world_group(world);
    int *in = malloc(120000), *out = malloc(120000);
    for (size_t count = 1; count <= 30000; count *= 30) {
        for (size_t i = 0; i < count; i++)
            in[i] = 1, out[i] = 0;
        tutti_work *work;
        if (tutti_world_rank(world) == 1)
            usleep(20000); /* the other one is left open */
        CHECK_OK(
            tutti_all_reduce(group, in, out, count, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
        tutti_work_release(work);
        /* Looking at the output before the work is over is a race: only where nobody minds. */
        while (!test_sanitized() && *(volatile int *)&out[count - 1] != 2)
            usleep(1000);
        CHECK_OK(tutti_barrier(group, NULL));
        CHECK_EQ(out[count - 1], 2);
    }
    free(in);
    free(out);
}

TEST_WORLD(a_work_is_tested_until_it_is_finished, 2) {
    tutti_group *group = tutti_world_group(world);
    float *in = calloc(500000, 4), *out = malloc(2000000);
    for (int round = 0; round < 10; round++) {
        tutti_work *work;
        CHECK_OK(tutti_all_reduce(group, in, out, round % 2 ? 500000 : 8, TUTTI_F32, TUTTI_MAX,
                                  TUTTI_OPTIONS(tutti_call, .work = &work)));
        bool finished = false;
        while (!finished)
            CHECK_OK(tutti_work_test(work, &finished));
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
    }
    free(in);
    free(out);
}

TEST_WORLD(every_collective_can_be_started_as_a_work, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    int in[3] = { rank, rank + 10, rank + 20 }, gathered[9], moved[3], reduced, sent, scattered;
    size_t ones[3] = { 1, 1, 1 };
    int to[3] = { 1, 2, 0 };
    tutti_work *works[8];
    CHECK_OK(tutti_all_gather(group, in, gathered, 3, TUTTI_I32, TUTTI_OPTIONS(tutti_call, .work = &works[0])));
    CHECK_OK(tutti_all_to_all_v(group, in, ones, NULL, moved, ones, NULL, TUTTI_I32,
                                TUTTI_OPTIONS(tutti_call, .work = &works[1])));
    ones[0] = 99; /* the arrays are the caller's again */
    CHECK_OK(
        tutti_reduce(group, in, &reduced, 1, TUTTI_I32, TUTTI_SUM, 1, TUTTI_OPTIONS(tutti_call, .work = &works[2])));
    CHECK_OK(tutti_permute(group, in, &sent, 1, TUTTI_I32, to, TUTTI_OPTIONS(tutti_call, .work = &works[3])));
    to[0] = 77;
    CHECK_OK(tutti_scatter(group, in, &scattered, 1, TUTTI_I32, 2, TUTTI_OPTIONS(tutti_call, .work = &works[4])));
    CHECK_OK(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .work = &works[5])));
    for (int i = 0; i < 6; i++) {
        CHECK_OK(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
    }
    for (int i = 0; i < 9; i++)
        CHECK_EQ(gathered[i], i / 3 + 10 * (i % 3));
    for (int i = 0; i < 3; i++)
        CHECK_EQ(moved[i], i + 10 * rank);
    if (rank == 1)
        CHECK_EQ(reduced, 3);
    CHECK_EQ(sent, (rank + 2) % 3);
    CHECK_EQ(scattered, 2 + 10 * rank);
}

TEST_WORLD(a_wait_that_runs_out_of_time_leaves_the_work_running, 2) {
    tutti_group *group = tutti_world_group(world);
    int one = 1, sum = 0;
    tutti_work *work;
    if (tutti_world_rank(world) == 0) {
        CHECK_OK(
            tutti_all_reduce(group, &one, &sum, 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
        CHECK_STATUS(tutti_work_wait(work, 20000000), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("it goes on");
        CHECK_OK(tutti_store_set(tutti_world_store(world), "waited", "", 0));
    } else {
        const char *waited = "waited";
        CHECK_OK(tutti_store_wait(tutti_world_store(world), &waited, 1, 0));
        CHECK_OK(
            tutti_all_reduce(group, &one, &sum, 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
    }
    CHECK_OK(tutti_work_wait(work, 0));
    CHECK_OK(tutti_work_wait(work, 0)); /* as often as one likes */
    tutti_work *other = tutti_work_keep(work);
    tutti_work_release(work);
    CHECK_OK(tutti_work_wait(other, 0));
    tutti_work_release(other);
    CHECK_EQ(sum, 2);
}

/* Rank 1 starts the second one when rank 0 has told that its wait for the first is over. */
TEST_WORLD(a_wait_ends_with_its_work_whatever_was_started_behind_it, 2) {
    enum {
        ROUNDS = 20,
        COUNT = 1 << 18 /* queued: too large to be finished where it is started */
    };
    tutti_group *group = tutti_world_group(world);
    tutti_store *store = tutti_world_store(world);
    char *data = calloc(4, COUNT), key[32];
    const char *told = key;
    for (int i = 0; i < ROUNDS; i++) {
        tutti_work *works[2];
        snprintf(key, sizeof key, "first %d is over", i);
        for (int k = 0; k < 2; k++) {
            if (k == 1 && tutti_world_rank(world) == 1) {
                CHECK_OK(tutti_work_wait(works[0], 0));
                CHECK_OK(tutti_store_wait(store, &told, 1, INT64_C(60000000000)));
            }
            CHECK_OK(tutti_all_reduce(group, data + (size_t)2 * k * COUNT, data + (size_t)(2 * k + 1) * COUNT, COUNT,
                                      TUTTI_U8, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &works[k])));
        }
        CHECK_OK(tutti_work_wait(works[0], 0));
        if (tutti_world_rank(world) == 0)
            CHECK_OK(tutti_store_set(store, key, "", 0));
        CHECK_OK(tutti_work_wait(works[1], 0));
        tutti_work_release(works[0]);
        tutti_work_release(works[1]);
    }
    free(data);
}

/* A large work is queued for the helper, a small one stays open. Rank 1 comes to neither. */
static void wait_as_long_as_the_work(tutti_world *world, void *argument) {
    size_t count = *(const size_t *)argument;
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, (int[]){ 0, 1 }, 2,
                             TUTTI_OPTIONS(tutti_group_options, .timeout_ns = INT64_C(300000000)), &group));
    if (tutti_world_rank(world) == 0) {
        char *data = calloc(2, count);
        tutti_work *works[2];
        for (int i = 0; i < 2; i++)
            CHECK_OK(tutti_all_reduce(group, data, data + count, count, TUTTI_U8, TUTTI_SUM,
                                      TUTTI_OPTIONS(tutti_call, .work = &works[i], .timeout_ns = INT64_C(1500000000))));
        for (int i = 1; i >= 0; i--) {
            CHECK_STATUS(tutti_work_wait(works[i], 0), TUTTI_ERROR_TIMEOUT);
            CHECK_MESSAGE("rank 1");
            tutti_work_release(works[i]);
        }
        free(data);
        CHECK_OK(tutti_store_set(tutti_world_store(world), "over", "", 0));
    } else {
        const char *over = "over";
        CHECK_OK(tutti_store_wait(tutti_world_store(world), &over, 1, 0));
    }
    tutti_group_release(group);
}

TEST(a_wait_without_a_time_of_its_own_lasts_as_long_as_the_work_and_names_who_is_missing) {
    static const size_t counts[] = { 4, 1 << 20 };
    for (size_t i = 0; i < 2; i++)
        test_threads(2, wait_as_long_as_the_work, (void *)(uintptr_t)&counts[i]);
}

TEST_WORLD(a_works_error_goes_to_the_thread_that_waits_for_it, 2) {
    tutti_group *group = tutti_world_group(world);
    int *in = calloc(50000, 4), *out = malloc(200000);
    tutti_work *work;
    size_t count = tutti_world_rank(world) == 0 ? 50000 : 40000;
    CHECK_OK(tutti_all_reduce(group, in, out, count, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("50000 elements");
    CHECK_MESSAGE("40000 elements");
    tutti_work_release(work);
    free(in);
    free(out);
}

TEST_WORLD(a_batch_of_small_all_reduces_equals_single_calls, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    float in[20][50], out[20][50];
    int whole[3] = { rank, rank, rank }, gathered[9];
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    tutti_call call = TUTTI_CALL_INIT;
    call.batch = batch;
    for (int i = 0; i < 20; i++) {
        for (int k = 0; k < 50; k++)
            in[i][k] = (float)(rank + 1) / (float)(i + k + 1);
        CHECK_OK(
            tutti_all_reduce(group, in[i], out[i], (size_t)(i * 2), TUTTI_F32, i < 15 ? TUTTI_SUM : TUTTI_MAX, &call));
    }
    CHECK_OK(tutti_all_gather(group, whole, gathered, 3, TUTTI_I32, &call));
    CHECK_OK(tutti_batch_end(batch, NULL));
    for (int i = 0; i < 20; i++) {
        float expected[50];
        CHECK_OK(
            tutti_all_reduce(group, in[i], expected, (size_t)(i * 2), TUTTI_F32, i < 15 ? TUTTI_SUM : TUTTI_MAX, NULL));
        CHECK(memcmp(expected, out[i], (size_t)i * 8) == 0);
    }
    for (int i = 0; i < 9; i++)
        CHECK_EQ(gathered[i], i / 3);
    CHECK_OK(tutti_batch_begin(group, &batch));
    tutti_batch_cancel(batch);
}

/* ---- the helper ---- */

/* How often the helper threads of this process have gone to sleep so far. */
static long helper_sleeps(void) {
    long all = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (const struct dirent *one; (one = readdir(tasks)) != NULL;) {
        char path[300], line[128];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", one->d_name);
        FILE *status = fopen(path, "r");
        bool helper = false;
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            helper = helper || strcmp(line, "Name:\ttutti-works\n") == 0;
            if (helper && strncmp(line, "voluntary_ctxt_switches:", 24) == 0)
                all += strtol(line + 24, NULL, 10);
        }
        if (status != NULL)
            fclose(status);
    }
    closedir(tasks);
    return all;
}

/* Waking a thread costs a system call and the processor that others compute on. */
TEST_WORLD(works_that_are_finished_by_their_owner_do_not_wake_the_helper, 2) {
    enum {
        COUNT = 200000
    };
    tutti_group *group = tutti_world_group(world);
    int *large = calloc(COUNT, 4), in = 1, out;
    tutti_work *work;
    CHECK_OK(tutti_all_reduce(group, large, large, COUNT, TUTTI_I32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .work = &work))); /* queued: a helper is there from now on */
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_OK(tutti_barrier(group, NULL));
    while (helper_sleeps() == 0) /* it has not come to that yet */
        usleep(1000);
    long before = helper_sleeps();
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(tutti_all_reduce(group, &in, &out, 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
        CHECK_OK(tutti_work_wait(work, 0));
        CHECK_EQ(out, 2);
        tutti_work_release(work);
    }
    CHECK(helper_sleeps() - before < MANY / 10); /* the first work may still have been on the helper's mind */
    CHECK_OK(tutti_barrier(group, NULL));
    free(large);
}

/* ---- threads of one rank ---- */

typedef struct share {
    tutti_group *group;
    int rounds;
} share;

static void *add_up(void *argument) {
    share *share = argument;
    for (int i = 0; i < share->rounds; i++) {
        int one = 1, sum = 0;
        CHECK_OK(tutti_all_reduce(share->group, &one, &sum, 1, TUTTI_I32, TUTTI_SUM, NULL));
        CHECK_EQ(sum, 2);
    }
    return NULL;
}

TEST_WORLD(calls_from_several_threads_of_a_rank_do_not_mix, 2) {
    share share = { tutti_world_group(world), 200 };
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, add_up, &share) == 0);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}
