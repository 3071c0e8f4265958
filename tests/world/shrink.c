/* SPDX-License-Identifier: Apache-2.0
 *
 * Shrink and agree: survivors go on, whoever dies and whenever; who lives and does not come is named.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/fault.h>
#include <tutti/group.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"
#include "base/clock.h"

#define MINUTE INT64_C(60000000000)

/* Shared with the ranks: which of them reached the end, and what they found. */
typedef struct board {
    _Atomic int finished;
    _Atomic long totals[8];
    _Atomic bool armed_passed; /* the victim came through: nothing was left to die at */
    _Atomic int made;          /* ranks that got a group */
    _Atomic pid_t sleeper;
    int victim, second;
    long nth;
} board;

static board *make_board(void) {
    board *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    shared->second = -1;
    return shared;
}

static int64_t sum_in(tutti_group *group, int64_t mine) {
    int64_t sum;
    CHECK_OK(tutti_all_reduce(group, &mine, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    return sum;
}

/* Runs `main` as `ranks` processes of which the victims die; all others must reach the end. */
static void lose(board *shared, int ranks, tutti_rank_main *main, int survivors) {
    atomic_store(&shared->finished, 0);
    tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, ranks, main, shared);
    if (atomic_load(&shared->finished) != survivors)
        FAIL("%d of %d survivors came through (victims %d and %d, step %ld): %s", atomic_load(&shared->finished),
             survivors, shared->victim, shared->second, shared->nth, tutti_error_message());
    if (survivors < ranks)
        CHECK_STATUS(status, TUTTI_ERROR_DEAD);
}

static bool dies(const board *shared, const tutti_world *world) {
    return tutti_world_rank(world) == shared->victim || tutti_world_rank(world) == shared->second;
}

/* ---- the survivors ---- */

static tutti_status go_on_without(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest;
    int size = tutti_world_size(world), rank = tutti_world_rank(world), lost = shared->second >= 0 ? 2 : 1;
    tutti_memory *block;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &block));
    CHECK_OK(tutti_memory_rendezvous(block, group, &peers));
    CHECK_OK(tutti_barrier(group, NULL));
    if (dies(shared, world))
        kill(getpid(), SIGKILL);
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_EQ(tutti_group_size(rest), size - lost);
    CHECK_EQ(tutti_group_ranks(rest)[tutti_group_rank(rest)], rank);
    CHECK_EQ(tutti_group_settled(rest), tutti_group_completed(group));
    CHECK_EQ(tutti_group_timeout(rest), MINUTE);
    CHECK(tutti_group_by_name(world, tutti_group_name(rest)) == rest);
    /* The old group has ended all the same; blocks of survivors, and of the dead, can still be read. */
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    CHECK_EQ(*(char *)tutti_peers_buffer(peers, shared->victim), 0);
    tutti_peers_release(peers);
    CHECK_OK(tutti_memory_rendezvous(block, rest, &peers));
    int next = (tutti_group_rank(rest) + 1) % (size - lost);
    *(int *)tutti_peers_buffer(peers, next) = tutti_group_rank(rest) + 100;
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_EQ(*(int *)tutti_memory_data(block), (tutti_group_rank(rest) + size - lost - 1) % (size - lost) + 100);
    CHECK_EQ(sum_in(rest, 1), size - lost);
    tutti_peers_release(peers);
    tutti_memory_release(block);
    tutti_group_release(rest);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(survivors_shrink_and_use_their_memory_whoever_died) {
    board *shared = make_board();
    for (shared->victim = 0; shared->victim < 3; shared->victim++)
        lose(shared, 3, go_on_without, 2);
}

TEST(two_may_die_at_once) {
    board *shared = make_board();
    shared->victim = 0;
    shared->second = 3;
    lose(shared, 4, go_on_without, 2);
    shared->victim = 1;
    shared->second = 2;
    lose(shared, 4, go_on_without, 2);
}

/* One after the other, until one is left. */
static tutti_status shrink_to_one(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_group_keep(tutti_world_group(world));
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    for (int size = tutti_world_size(world); size > 1; size--) {
        CHECK_EQ(sum_in(group, 1), size);
        if (tutti_group_rank(group) == (size % 2 == 0 ? 0 : size - 1))
            kill(getpid(), SIGKILL);
        CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
        tutti_group *rest;
        CHECK_OK(tutti_group_shrink(group, NULL, &rest));
        CHECK_EQ(tutti_group_size(rest), size - 1);
        CHECK_EQ(tutti_group_settled(rest), 1);
        tutti_group_release(group);
        group = rest;
    }
    CHECK_EQ(sum_in(group, 7), 7);
    tutti_group_release(group);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(a_group_can_shrink_until_one_rank_is_left) {
    lose(make_board(), 5, shrink_to_one, 1);
}

/* ---- deaths while it shrinks ---- */

static tutti_status die_while_shrinking(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest;
    int size = tutti_world_size(world);
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == shared->second)
        kill(getpid(), SIGKILL);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    if (tutti_world_rank(world) == shared->victim)
        test_kill_arm(NULL, shared->nth);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    if (tutti_world_rank(world) == shared->victim) {
        test_fail_disarm();
        atomic_store(&shared->armed_passed, true);
    } else if (tutti_group_size(rest) == size - 1) { /* it died after the last word, or not at all */
        tutti_status status = tutti_barrier(rest, NULL);
        if (status != TUTTI_OK) {
            CHECK_EQ(status, TUTTI_ERROR_DEAD);
            tutti_group *fewer;
            CHECK_OK(tutti_group_shrink(rest, NULL, &fewer));
            tutti_group_release(rest);
            rest = fewer;
        }
    }
    if (tutti_world_rank(world) == shared->victim)
        CHECK_OK(tutti_barrier(rest, NULL));
    CHECK_EQ(sum_in(rest, 1), tutti_group_size(rest));
    tutti_group_release(rest);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST_LIMIT(a_rank_may_die_at_any_step_of_a_shrink, 120) {
    board *shared = make_board();
    for (shared->victim = 0; shared->victim < 3; shared->victim++) {
        shared->second = 3;
        for (shared->nth = 1;; shared->nth++) {
            atomic_store(&shared->armed_passed, false);
            atomic_store(&shared->finished, 0);
            tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, die_while_shrinking, shared);
            bool passed = atomic_load(&shared->armed_passed);
            CHECK_STATUS(status, TUTTI_ERROR_DEAD);
            if (atomic_load(&shared->finished) != (passed ? 3 : 2))
                FAIL("%d survivors came through when rank %d died at step %ld: %s", atomic_load(&shared->finished),
                     shared->victim, shared->nth, tutti_error_message());
            if (passed)
                break;
        }
        CHECK(shared->nth > 4);
    }
}

static void *kill_after(void *argument) {
    int64_t end = tu_clock_now() + (intptr_t)argument;
    while (tu_clock_now() < end)
        ;
    kill(getpid(), SIGKILL);
    return NULL;
}

/* Counts as examples/survive.c does. The victim is killed from another thread at any instruction. */
static tutti_status count(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_group_keep(tutti_world_group(world));
    long total = 0, before = 0;
    int done = 0, steps = 400, losses = 0;
    bool all = false;
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    CHECK_OK(tutti_barrier(group, NULL)); /* operation 1 */
    uint64_t first = 1;
    pthread_t killer;
    if (dies(shared, world))
        CHECK(pthread_create(&killer, NULL, kill_after, (void *)(intptr_t)shared->nth) == 0);
    while (!all) {
        tutti_status status = TUTTI_OK;
        while (done < steps && status == TUTTI_OK) {
            int64_t one = 1, sum;
            status = tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL);
            if (status == TUTTI_OK)
                before = total, total += sum, done++;
        }
        if (status != TUTTI_OK)
            CHECK_EQ(status, TUTTI_ERROR_DEAD);
        CHECK_OK(tutti_group_agree(group, status == TUTTI_OK, &all));
        if (all)
            break;
        tutti_group *rest;
        CHECK_OK(tutti_group_shrink(group, NULL, &rest));
        CHECK(tutti_group_completed(group) - tutti_group_settled(rest) <= 1);
        if (tutti_group_completed(group) > tutti_group_settled(rest))
            total = before, done--;
        CHECK_EQ((uint64_t)done, tutti_group_settled(rest) - first);
        first = (uint64_t)0 - (uint64_t)done;
        tutti_group_release(group);
        group = rest;
        CHECK(++losses <= 2);
    }
    CHECK_EQ(done, steps);
    atomic_store(&shared->totals[tutti_world_rank(world)], total);
    atomic_fetch_add(&shared->finished, 1);
    if (dies(shared, world))
        CHECK(pthread_join(killer, NULL) == 0); /* ends with this process */
    tutti_group_release(group);
    return TUTTI_OK;
}

TEST_LIMIT(the_count_is_right_whenever_a_rank_dies, 120) {
    board *shared = make_board();
    int rounds = test_sanitized() ? 10 : 40;
    for (int round = 0; round < rounds; round++) {
        shared->victim = round % 3;
        shared->second = round % 5 == 4 ? (round + 1) % 3 : -1;
        shared->nth = (long)round * round * 7919 % 3000000; /* up to 3 ms: before, in the middle, after the last step */
        memset(shared->totals, 0, sizeof shared->totals);
        atomic_store(&shared->finished, 0);
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, count, shared), TUTTI_ERROR_DEAD);
        long total = 0;
        for (int rank = 0; rank < 3; rank++) {
            long theirs = atomic_load(&shared->totals[rank]);
            if (theirs != 0 && total == 0)
                total = theirs;
            if (theirs != total && (rank != shared->victim && rank != shared->second))
                FAIL("rank %d counted %ld, another %ld (round %d)", rank, theirs, total, round);
        }
        CHECK(total >= 400 && total <= 1200);
    }
}

/* ---- who does not come, who is left out ---- */

TEST_WORLD(a_rank_that_lives_and_does_not_come_is_named_and_may_come_later, 3) {
    tutti_group *group = tutti_world_group(world), *rest;
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) != 1) {
        CHECK_STATUS(tutti_group_shrink(group, TUTTI_OPTIONS(tutti_shrink_options, .timeout_ns = test_moment()), &rest),
                     TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("Missing: rank 1");
        CHECK_MESSAGE("exclude");
        tutti_error_info info = TUTTI_ERROR_INFO_INIT;
        CHECK_OK(tutti_error_detail(&info));
        CHECK_EQ(info.at_fault_count, 1);
        CHECK_EQ(info.at_fault[0], 1);
        CHECK_TEXT(info.operation, "shrink");
    }
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "waited", 3, MINUTE));
    CHECK_OK(tutti_group_shrink(group, NULL, &rest)); /* nobody has died: all of them */
    CHECK_EQ(tutti_group_size(rest), 3);
    CHECK_EQ(sum_in(rest, 1), 3);
    CHECK_EQ(sum_in(group, 1), 3); /* the old one lives on */
    tutti_group_release(rest);
}

TEST_WORLD(living_ranks_can_be_excluded, 3) {
    tutti_group *group = tutti_world_group(world), *rest = NULL;
    int one[] = { 1 };
    CHECK_EQ(sum_in(group, 1), 3);
    if (tutti_world_rank(world) != 1) {
        CHECK_OK(
            tutti_group_shrink(group, TUTTI_OPTIONS(tutti_shrink_options, .exclude = one, .exclude_count = 1), &rest));
        CHECK_EQ(tutti_group_size(rest), 2);
        CHECK_EQ(tutti_group_settled(rest), 1);
        CHECK_EQ(sum_in(rest, 1), 2);
        tutti_group_release(rest);
    } else {
        CHECK_STATUS(
            tutti_group_shrink(group, TUTTI_OPTIONS(tutti_shrink_options, .exclude = one, .exclude_count = 1), &rest),
            TUTTI_ERROR_STATE);
        CHECK_MESSAGE("excluded itself");
    }
    CHECK_EQ(sum_in(group, 1), 3);
    bool all;
    CHECK_OK(tutti_group_agree(group, true, &all)); /* it has missed votes, and still meets the others */
    CHECK(all);
}

TEST_WORLD(wrong_exclusions_are_refused_and_end_nothing, 2) {
    tutti_group *group = tutti_world_group(world), *rest;
    static const struct {
        int list[2], count;
        const char *says;
    } wrong[] = { { { 0, 0 }, 0, "empty" },
                  { { 2, 0 }, 1, "ranks 0 to 1" },
                  { { -1, 0 }, 1, "rank -1" },
                  { { 0, 0 }, 2, "twice" },
                  { { 0, 1 }, 2, "one must remain" } };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        tutti_shrink_options options = TUTTI_SHRINK_OPTIONS_INIT;
        options.exclude = wrong[i].list;
        options.exclude_count = wrong[i].count;
        CHECK_STATUS(tutti_group_shrink(group, &options, &rest), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE(wrong[i].says);
    }
    CHECK_STATUS(tutti_group_shrink(group, TUTTI_OPTIONS(tutti_shrink_options, .timeout_ns = -1), &rest),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_shrink(group, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_shrink(NULL, NULL, &rest), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_shrink(TUTTI_NON_GROUP_MEMBER, NULL, &rest), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_agree(group, true, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_EQ(sum_in(group, 1), 2);
}

/* Rank 3, whom rank 1 awaits, waits in another group meanwhile: in an operation of this one rank 1 would take it for a
 * mismatch, which ends the group. */
TEST_WORLD(different_exclusions_fail_on_every_rank, 4) {
    tutti_group *group = tutti_world_group(world), *aside, *rest;
    int list[] = { 3 };
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &aside));
    if (tutti_world_rank(world) < 3) {
        tutti_shrink_options options = TUTTI_SHRINK_OPTIONS_INIT;
        options.exclude = tutti_world_rank(world) == 1 ? NULL : list;
        options.exclude_count = tutti_world_rank(world) == 1 ? 0 : 1;
        options.timeout_ns = tutti_world_rank(world) == 1 ? 20 * TU_SECOND : MINUTE;
        CHECK_STATUS(tutti_group_shrink(group, &options, &rest), TUTTI_ERROR_MISMATCH);
    }
    CHECK_OK(tutti_barrier(aside, NULL));
    CHECK_EQ(sum_in(group, 1), 4);
    tutti_group_release(aside);
}

/* ---- agree ---- */

TEST_WORLD(agree_is_the_logical_and_of_all, 3) {
    tutti_group *group = tutti_world_group(world);
    for (int round = 0; round < 50; round++) {
        bool all;
        CHECK_OK(tutti_group_agree(group, round % 4 != tutti_world_rank(world), &all));
        CHECK_EQ(all, round % 4 == 3);
    }
    CHECK_OK(tutti_group_abort(group, "enough"));
    bool all; /* also when the group has ended */
    CHECK_OK(tutti_group_agree(group, true, &all));
    CHECK(all);
}

static tutti_status agree_while_dying(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    bool all;
    for (int round = 0; round < 20; round++) {
        if (round == 10 && dies(shared, world))
            kill(getpid(), SIGKILL);
        CHECK_OK(tutti_group_agree(group, round % 2 == 0, &all));
        CHECK_EQ(all, round % 2 == 0);
    }
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(agree_goes_on_when_a_rank_dies) {
    board *shared = make_board();
    for (shared->victim = 0; shared->victim < 3; shared->victim++)
        lose(shared, 3, agree_while_dying, 2);
}

TEST_WORLD(agree_against_a_collective_is_a_mismatch_on_both_sides, 4) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    CHECK_OK(tutti_barrier(group, NULL));
    bool all;
    int64_t one = 1, sum;
    if (tutti_world_rank(world) == 2)
        CHECK_STATUS(tutti_group_agree(group, true, &all), TUTTI_ERROR_MISMATCH);
    else
        CHECK_STATUS(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("agree");
    CHECK_MESSAGE("all_reduce");
    usleep(100000); /* nobody leaves before all have seen it */
}

/* ---- threads, faults, memory ---- */

static tutti_status thread_main(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest;
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        return TUTTI_ERROR_STATE; /* its main returns a failure: dead to the others */
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_EQ(sum_in(rest, 1), 2);
    tutti_group_release(rest);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(thread_ranks_shrink_too) {
    board *shared = make_board();
    CHECK(tutti_spawn(TUTTI_SPAWN_THREADS, 3, thread_main, shared) != TUTTI_OK);
    CHECK_EQ(atomic_load(&shared->finished), 2);
}

TEST_WORLD(a_rank_that_closed_its_world_is_left_out, 3) {
    tutti_group *group = tutti_world_group(world), *rest;
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 2)
        return;
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_GONE);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_EQ(tutti_group_size(rest), 2);
    CHECK_EQ(sum_in(rest, 1), 2);
    tutti_group_release(rest);
}

TEST_WORLD(faults_can_be_injected_into_shrink_and_agree, 2) {
    tutti_group *group = tutti_world_group(world), *rest;
    bool all;
    CHECK_OK(tutti_fault_inject(world, "op=agree,at=1,do=skip;op=shrink,do=delay:1ms"));
    CHECK_OK(tutti_group_agree(group, true, &all));
    CHECK_STATUS(tutti_group_agree(group, true, &all), TUTTI_ERROR_FAULT);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_EQ(sum_in(rest, 1), 2);
    tutti_group_release(rest);
}

/* One rank is out of memory in the middle: all fail, with its message, and can try again. */
static void shrink_short_of_memory(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world), *rest;
    int poor = (int)(intptr_t)argument;
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    for (long nth = 1;; nth++) {
        CHECK_OK(tutti_barrier(group, NULL));
        if (tutti_world_rank(world) == poor)
            test_fail_arm("malloc,calloc,aligned_alloc,mmap", nth);
        tutti_status status =
            tutti_group_shrink(group, TUTTI_OPTIONS(tutti_shrink_options, .timeout_ns = MINUTE), &rest);
        bool failed = tutti_world_rank(world) == poor ? test_fail_disarm() : false;
        if (nth == 1)
            CHECK_EQ(status, TUTTI_ERROR_MEMORY);
        if (status != TUTTI_OK) {
            CHECK_MESSAGE(poor == 0 ? "rank 0 cannot" : "rank 2 cannot");
            CHECK_STATUS(tutti_group_check(group), TUTTI_OK);
        } else {
            CHECK_EQ(sum_in(rest, 1), 3);
            tutti_group_release(rest);
        }
        bool more;
        CHECK_OK(tutti_group_agree(group, tutti_world_rank(world) == poor ? !failed : true, &more));
        if (more)
            return;
    }
}

TEST(a_shrink_that_fails_for_one_fails_for_all_as_processes) {
    test_processes(3, shrink_short_of_memory, (void *)(intptr_t)0);
    test_processes(3, shrink_short_of_memory, (void *)(intptr_t)2);
}

TEST(a_fake_group_shrinks_by_exclusion) {
    tutti_world *world;
    tutti_group *rest;
    bool all;
    CHECK_OK(tutti_world_open_fake(0, 4, NULL, &world));
    CHECK_OK(tutti_group_shrink(tutti_world_group(world),
                                TUTTI_OPTIONS(tutti_shrink_options, .exclude = (int[]){ 2 }, .exclude_count = 1),
                                &rest));
    CHECK_EQ(tutti_group_size(rest), 3);
    CHECK_OK(tutti_group_agree(rest, false, &all));
    CHECK(!all);
    tutti_group_release(rest);
    CHECK_OK(tutti_world_close(world));
}

/* ---- deaths while a group is made ---- */

typedef tutti_status maker(tutti_world *world, tutti_group **made);

static tutti_status make_in_world(tutti_world *world, tutti_group **made) {
    return tutti_group_new(world, NULL, 0, NULL, made);
}
static tutti_status make_by_members(tutti_world *world, tutti_group **made) {
    return tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true), made);
}
static tutti_status make_by_split(tutti_world *world, tutti_group **made) {
    int ranks[] = { 0, 1, 2, 3 }, count = 4;
    const int *lists[] = { ranks };
    return tutti_group_split(tutti_world_group(world), lists, &count, 1, NULL, made);
}
static maker *const makers[] = { make_in_world, make_by_members, make_by_split };

/* All have it, or nobody; and whichever it is, the survivors go on without waiting for a deadline. */
static tutti_status die_while_making(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world), *made, *rest;
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    CHECK_OK(tutti_barrier(group, NULL));
    bool victim = tutti_world_rank(world) == shared->victim;
    if (victim)
        test_kill_arm(NULL, shared->nth);
    tutti_status status = makers[shared->second](world, &made);
    if (victim) {
        test_fail_disarm();
        atomic_store(&shared->armed_passed, true);
    }
    if (status == TUTTI_OK) {
        atomic_fetch_add(&shared->made, 1);
        tutti_group_release(made);
    } else {
        CHECK_EQ(status, TUTTI_ERROR_DEAD);
    }
    if (victim)
        raise(SIGKILL);
    status = tutti_barrier(group, NULL);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_EQ(sum_in(rest, 1), 3);
    tutti_group_release(rest);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST_LIMIT(a_rank_that_dies_while_a_group_is_made_leaves_all_with_it_or_nobody, 170) {
    board *shared = make_board();
    for (shared->second = 0; shared->second < 3; shared->second++) {
        for (shared->victim = 0; shared->victim < 4; shared->victim += 3) {
            for (shared->nth = 1;; shared->nth++) {
                atomic_store(&shared->armed_passed, false);
                atomic_store(&shared->finished, 0);
                atomic_store(&shared->made, 0);
                CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, die_while_making, shared), TUTTI_ERROR_DEAD);
                bool passed = atomic_load(&shared->armed_passed);
                int made = atomic_load(&shared->made);
                if (atomic_load(&shared->finished) != 3 || (made != 0 && made != (passed ? 4 : 3)))
                    FAIL("way %d, rank %d died at step %ld: %d have the group, %d came through", shared->second,
                         shared->victim, shared->nth, made, atomic_load(&shared->finished));
                if (passed)
                    break;
            }
            CHECK(shared->nth > 3);
        }
    }
}

/* ---- a member that has not heard of the death yet ---- */

static void *wake_soon(void *argument) {
    usleep(300000);
    kill(*(pid_t *)argument, SIGCONT);
    return NULL;
}

/* Rank 1 stands still in a barrier that rank 0 never enters, when rank 2 dies and rank 0 shrinks: it is no mismatch
 * that rank 1 is still in there. */
static tutti_status shrink_before_all_know(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest;
    int rank = tutti_world_rank(world);
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    if (rank == 1)
        atomic_store(&shared->sleeper, getpid());
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 2) {
        usleep(200000);
        raise(SIGKILL);
    }
    if (rank == 1) {
        CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    } else {
        pid_t sleeper = atomic_load(&shared->sleeper);
        pthread_t waker;
        usleep(100000); /* it is in the barrier */
        CHECK_EQ(kill(sleeper, SIGSTOP), 0);
        while (tutti_group_check(group) == TUTTI_OK)
            usleep(1000);
        CHECK_EQ(pthread_create(&waker, NULL, wake_soon, &sleeper), 0);
        CHECK_OK(tutti_group_shrink(group, NULL, &rest));
        pthread_join(waker, NULL);
    }
    if (rank == 1)
        CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_EQ(sum_in(rest, 1), 2);
    tutti_group_release(rest);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

TEST(a_member_that_has_not_heard_of_a_death_yet_is_no_mismatch_for_a_shrink) {
    board *shared = make_board();
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, shrink_before_all_know, shared), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(&shared->finished), 2);
}
