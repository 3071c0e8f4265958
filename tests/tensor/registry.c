/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives in flight: who waits for them, what a world says of them when it closes, and gradients that do not wait.
 */
#include <dirent.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <tutti/autograd.h>
#include <tutti/functional.h>
#include <tutti/ops.h>

#include "../harness.h"

static tt_tensor *full(int64_t size, double value) {
    return tt_full(tt_shape(size), value, TUTTI_F32, NULL);
}

static tt_tensor *leaf(int64_t size, double value) {
    return tt_full(tt_shape(size), value, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
}

static bool all_are(tt_tensor *x, double value) {
    return x != NULL && tt_equal(x, tt_full(tt_sizes(x), value, tt_dtype(x), NULL));
}

/* ---- how long ---- */

TEST_WORLD_THREADS(time_spent_waiting_is_counted, 2) {
    tt_scope scope = tt_scope_open();
    int64_t before = tt_waited_ns(world), begin = tutti_clock();
    if (tutti_world_rank(world) == 1)
        usleep(20000);
    CHECK(tt_wait(tt_all_reduce(full(4, 1), TUTTI_SUM, tutti_world_group(world))) != NULL);
    int64_t waited = tt_waited_ns(world) - before;
    CHECK(waited >= 0 && waited <= tutti_clock() - begin);
    CHECK(waited > 0 || tutti_world_rank(world) == 1); /* rank 0 came first, or was held up itself */
    CHECK_EQ(tt_waited_ns(NULL), 0);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- a world that closes ---- */

TEST(closing_a_world_names_the_works_that_nobody_waited_for) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tt_scope scope = tt_scope_open();
    tt_tensor *sum = tt_all_reduce(full(12, 1), TUTTI_SUM, tutti_world_group(world));
    tt_tensor *rows = tt_all_gather(full(3, 1), 0, tutti_world_group(world));
    CHECK_EQ(tt_pending_works(world), 2);
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("2 works");
    CHECK_MESSAGE("Nobody has waited for: all_reduce of 12 f32 in group \"0\", all_gather of 3 f32 in group \"0\" "
                  "(tt_wait or tt_wait_all does)");
    CHECK(tt_wait(sum) == sum && tt_wait(rows) == rows); /* their memory goes now */
    CHECK_OK(tt_scope_close(&scope));
}

TEST(worlds_have_registries_of_their_own) {
    tutti_world *first, *second;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "first"), &first));
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "second"), &second));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_all_reduce(full(4, 1), TUTTI_SUM, tutti_world_group(first));
    tt_all_reduce(full(4, 1), TUTTI_SUM, tutti_world_group(second));
    CHECK(tt_pending_works(first) == 1 && tt_pending_works(second) == 1);
    CHECK(tt_wait_all(second) && tt_pending_works(second) == 0 && tt_is_async(x));
    CHECK(tt_wait(x) == x && tt_pending_works(first) == 0);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(first));
    CHECK_OK(tutti_world_close(second));
}

/* ---- how long it takes ---- */

static double thread_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The shortest of several rounds of starting works that nobody waits for. */
static double shortest_round(tutti_group *group, int rounds) {
    double best = 1e9;
    for (int i = 0; i < rounds; i++) {
        double begin = thread_seconds();
        tt_scope scope = tt_scope_open();
        for (int k = 0; k < 200; k++)
            tt_all_reduce(full(1, 1), TUTTI_SUM, group);
        CHECK_OK(tt_scope_close(&scope));
        double seconds = thread_seconds() - begin;
        best = seconds < best ? seconds : best;
    }
    return best;
}

TEST(starting_a_work_takes_no_longer_when_thousands_are_in_flight) {
    tutti_world *world;
    int rounds = test_sanitized() ? 4 : 10;
    CHECK_OK(tutti_world_open(NULL, &world));
    double first = shortest_round(tutti_world_group(world), rounds);
    shortest_round(tutti_world_group(world), 5 * rounds);
    double last = shortest_round(tutti_world_group(world), rounds);
    CHECK_EQ(tt_pending_works(world), 7 * rounds * 200);
    CHECK(last < 10 * first); /* by a list that is walked it would be hundreds of times as long */
    CHECK(tt_wait_all(world) && tt_pending_works(world) == 0);
    CHECK_OK(tutti_world_close(world));
}

/* ---- who waits ---- */

TEST_WORLD(a_send_is_waited_for_through_the_tensor_that_is_sent, 2) {
    tutti_group *group = tutti_world_group(world);
    int other = 1 - tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = full(5, 1), *y = full(5, 0);
    CHECK(tt_irecv(y, other, 3, group) == y);
    CHECK(tt_isend(x, other, 3, group) != NULL);
    CHECK(tt_pending_works(world) == 2 && !tt_is_async(x));
    CHECK(tt_wait(x) == x && tt_pending_works(world) == 1);
    CHECK(all_are(y, 1) && tt_pending_works(world) == 0);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(gradients_of_collectives_do_not_wait_until_they_are_read, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *reduced = leaf(1000, 1), *gathered = leaf(1000, 1), *scattered = leaf(1000, 1);
    tt_tensor *loss = tt_add(
        tt_sum(tt_all_reduce(reduced, TUTTI_AVG, group)),
        tt_add(tt_sum(tt_all_gather(gathered, 0, group)), tt_sum(tt_reduce_scatter(scattered, TUTTI_AVG, 0, group))));
    CHECK_EQ(tt_pending_works(world), 0); /* the sums have read the results */
    CHECK(tt_backward(loss, NULL));
    CHECK_EQ(tt_pending_works(world), 3);
    CHECK(tt_is_async(tt_grad(reduced)) && tt_is_async(tt_grad(gathered)) && tt_is_async(tt_grad(scattered)));
    CHECK(all_are(tt_grad(reduced), 1) && all_are(tt_grad(gathered), 2) && all_are(tt_grad(scattered), 0.5));
    CHECK_EQ(tt_pending_works(world), 0);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_second_gradient_is_added_to_one_that_is_still_in_flight, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1000, 1);
    CHECK(tt_backward(tt_sum(tt_all_reduce(x, TUTTI_SUM, group)), NULL));
    CHECK(tt_is_async(tt_grad(x)));
    CHECK(tt_backward(tt_sum(tt_all_reduce(x, TUTTI_SUM, group)), NULL));
    CHECK(all_are(tt_grad(x), 4) && tt_pending_works(world) == 0);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_graph_keeps_its_group, 2) {
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(4, 1), *sum = tt_sum(tt_all_reduce(x, TUTTI_SUM, group));
    CHECK(tt_wait_all(world));
    tutti_group_release(group);
    CHECK(tt_backward(sum, NULL) && all_are(tt_grad(x), 2));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_fake_group_gives_the_input_back) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    CHECK(all_are(tt_all_reduce(full(100, 3), TUTTI_SUM, group), 3));
    CHECK(all_are(tt_broadcast(full(100, 3), 2, group), 3));
    CHECK(all_are(tt_reduce_from_group(full(100, 3), group), 3));
    CHECK(tt_wait_all(world));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

/* ---- what the process keeps ---- */

static int threads_now(void) {
    DIR *folder = opendir("/proc/self/task");
    int count = 0;
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

/* A thread that was joined is in the list of the system for a moment more. */
static bool threads_become(int count) {
    for (int i = 0; i < 5000 && threads_now() != count; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    return threads_now() == count;
}

/* A sum that several threads would share where they may. */
static bool large_sum(void) {
    tt_scope scope = tt_scope_open();
    bool right = tt_item(tt_sum(tt_mul_scalar(full(1 << 20, 1), 2))) == 2 << 20;
    return tt_scope_close(&scope) == TUTTI_OK && right;
}

TEST(finalize_ends_the_threads_and_everything_can_be_used_again) {
    if (test_sanitized())
        SKIP("a sanitizer has threads of its own, and starts none after a fork");
    int before = threads_now();
    for (int i = 0; i < 3; i++) {
        CHECK(large_sum());
        CHECK_OK(tt_finalize());
        CHECK(threads_become(before));
    }
    tt_scope scope = tt_scope_open();
    tt_tensor *x = full(1, 1);
    CHECK_STATUS(tt_finalize(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("1 tensors");
    CHECK(tt_item(x) == 1);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tt_finalize());
}

TEST(the_setting_keeps_tensors_on_their_own_thread) {
    if (test_sanitized())
        SKIP("a sanitizer has threads of its own, and starts none after a fork");
    int before = threads_now();
    CHECK_EQ(setenv("TUTTI_THREADS", "0", 1), 0);
    CHECK(large_sum());
    CHECK(threads_become(before));
    unsetenv("TUTTI_THREADS");
}

TEST(a_forked_child_uses_tensors_of_its_own) {
    if (test_sanitized())
        SKIP("a sanitizer has threads of its own, and starts none after a fork");
    CHECK(large_sum());
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(3, 2);
    pid_t child = fork();
    if (child == 0) {
        bool right = large_sum() && tt_backward(tt_sum(tt_mul(x, x)), NULL) && all_are(tt_grad(x), 4);
        right = tt_scope_close(&scope) == TUTTI_OK && tt_finalize() == TUTTI_OK && right;
        _exit(right ? 0 : 1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(all_are(tt_detach(x), 2));
    CHECK_OK(tt_scope_close(&scope));
}
