/* SPDX-License-Identifier: Apache-2.0
 *
 * Shrink and agree in groups whose ranks are on several hosts, without launchers that tell of deaths: members vote in
 * the store, and who is gone is told by the kernel of its host and by broken connections.
 */
#include <pthread.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "on_hosts.h"
#include "world/world.h"

static const int each_alone[] = { 0, 1, 2 };
static int victim, second;

static int64_t sum_in(tutti_group *group, int64_t mine) {
    int64_t sum = 0;
    CHECK_OK(tutti_all_reduce(group, &mine, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    return sum;
}

static bool dies(const tutti_world *world) {
    return tutti_world_rank(world) == victim || tutti_world_rank(world) == second;
}

/* Says that this rank is done with what it did before; whoever `waits` goes on once the first `count` ranks are. A
 * group that ends ends for those that are still in an earlier call of it, too. */
static void come(tutti_world *world, int count, bool waits) {
    char keys[MOST_RANKS][16];
    const char *all[MOST_RANKS];
    for (int rank = 0; rank < tutti_world_size(world); rank++) {
        snprintf(keys[rank], sizeof keys[rank], "ready %d", rank);
        all[rank] = keys[rank];
    }
    CHECK_OK(tutti_store_set(tutti_world_store(world), keys[tutti_world_rank(world)], "", 0));
    if (waits)
        (void)!tutti_store_wait(tutti_world_store(world), all, (size_t)count, 0);
}

/* The victims die here, once all are done with what they did before. */
static void lose_victims(tutti_world *world) {
    come(world, tutti_world_size(world), dies(world));
    if (dies(world))
        kill(getpid(), SIGKILL);
}

/* Until somebody's death has ended the group. */
static void work_until_a_death(tutti_group *group) {
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_DEAD);
}

/* Long and short reductions, messages, and memory with its signals. */
static void use(tutti_world *world, tutti_group *group) {
    int size = tutti_group_size(group), rank = tutti_group_rank(group), next = (rank + 1) % size;
    enum {
        COUNT = 70000
    };
    CHECK_EQ(sum_in(group, 1), size);
    double *values = calloc(COUNT, sizeof *values);
    for (int i = 0; i < COUNT; i++)
        values[i] = rank + i;
    CHECK_OK(tutti_all_reduce(group, values, values, COUNT, TUTTI_F64, TUTTI_SUM, NULL));
    CHECK(values[COUNT - 1] == (double)(size * (COUNT - 1) + size * (size - 1) / 2));
    int sent = rank, got = -1;
    CHECK_OK(tutti_send_recv(group, &sent, 1, next, &got, 1, (rank + size - 1) % size, TUTTI_I32, 3, NULL));
    CHECK_EQ(got, (rank + size - 1) % size);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_peers_put(peers, next, 0, &rank, sizeof rank, NULL));
    CHECK_OK(tutti_peers_signal(peers, next, 0, NULL));
    CHECK_OK(tutti_peers_wait_signal(peers, (rank + size - 1) % size, 0, NULL));
    CHECK_EQ(*(int *)tutti_memory_data(memory), (rank + size - 1) % size);
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    free(values);
}

static void go_on_without(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *rest;
    int size = tutti_world_size(world), lost = second >= 0 ? 2 : 1;
    use(world, group);
    lose_victims(world);
    work_until_a_death(group);
    char before[256];
    snprintf(before, sizeof before, "%s", tutti_error_message());
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK(strncmp(before, tutti_error_message(), sizeof before - 1) == 0); /* a success leaves it as it was */
    CHECK_EQ(tutti_group_size(rest), size - lost);
    CHECK_EQ(tutti_group_ranks(rest)[tutti_group_rank(rest)], tutti_world_rank(world));
    CHECK(tutti_group_settled(rest) <= tutti_group_completed(group));
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD); /* the old one has ended all the same */
    if (size - lost > 1)
        use(world, rest);
    bool all;
    CHECK_OK(tutti_group_agree(rest, true, &all));
    CHECK(all);
    tutti_group_release(rest);
}

TEST(survivors_on_several_hosts_go_on_whoever_died) {
    second = -1;
    for (victim = 0; victim < 4; victim += 3)
        on_hosts(two_and_two, 4, go_on_without);
}

TEST(a_whole_host_may_die_and_the_group_become_one_of_one_host) {
    victim = 2, second = 3;
    on_hosts(two_and_two, 4, go_on_without);
    victim = 0, second = 1;
    on_hosts(two_and_two, 4, go_on_without);
    second = -1;
    victim = 1;
    on_hosts(one_each, 2, go_on_without); /* one rank is left */
}

TEST(ranks_of_unequal_hosts_go_on) {
    victim = 5, second = 0;
    on_hosts(three_two_one, 6, go_on_without);
    victim = 2, second = -1;
    on_hosts(in_turns, 5, go_on_without);
}

/* ---- no two parts ---- */

static void too_few_are_left(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *rest;
    CHECK_EQ(sum_in(group, 1), 3);
    lose_victims(world);
    work_until_a_death(group);
    CHECK_STATUS(tutti_group_shrink(group, NULL, &rest), TUTTI_ERROR_DEAD);
    CHECK(strstr(tutti_error_message(), "only 1 of 3 ranks are left") != NULL);
}

TEST(fewer_than_those_out_of_reach_do_not_go_on) {
    victim = 1, second = 2;
    on_hosts(each_alone, 3, too_few_are_left);
}

/* ---- those that live ---- */

static void one_does_not_come(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *rest;
    int last = tutti_world_size(world) - 1;
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_store *store = tutti_world_store(world);
    if (tutti_world_rank(world) == last) { /* busy with something else */
        CHECK_OK(tutti_store_wait(store, (const char *const[]){ "done 0", "done 1", "done 2" }, 3, 0));
        return;
    }
    come(world, last, true);
    CHECK_STATUS(tutti_group_shrink(group, TUTTI_OPTIONS(tutti_shrink_options, .timeout_ns = 2 * TU_SECOND), &rest),
                 TUTTI_ERROR_TIMEOUT);
    CHECK(strstr(tutti_error_message(), "Missing: rank 3") != NULL);
    CHECK_OK(tutti_group_shrink(
        group, TUTTI_OPTIONS(tutti_shrink_options, .exclude = (const int[]){ last }, .exclude_count = 1), &rest));
    CHECK_EQ(sum_in(rest, 1), last);
    tutti_group_release(rest);
    char key[16];
    snprintf(key, sizeof key, "done %d", tutti_world_rank(world));
    CHECK_OK(tutti_store_set(store, key, "", 0));
}

TEST(one_that_lives_and_does_not_come_is_named_and_can_be_excluded) {
    on_hosts(two_and_two, 4, one_does_not_come);
}

static void agree(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    bool all;
    CHECK_OK(tutti_group_agree(group, true, &all));
    CHECK(all);
    CHECK_OK(tutti_group_agree(group, tutti_world_rank(world) != 1, &all));
    CHECK(!all);
    CHECK_OK(tutti_group_abort(group, "the end of the group does not end it"));
    CHECK_OK(tutti_group_agree(group, true, &all));
    CHECK(all);
}

TEST(ranks_of_several_hosts_agree) {
    on_hosts(two_and_two, 4, agree);
}

static void one_agrees_the_other_shrinks(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *rest;
    bool all;
    tutti_status status =
        tutti_world_rank(world) == 0 ? tutti_group_agree(group, true, &all) : tutti_group_shrink(group, NULL, &rest);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
}

TEST(agree_and_shrink_do_not_meet_between_hosts) {
    on_hosts(one_each, 2, one_agrees_the_other_shrinks);
}

/* Ranks in `collective` call that, the others vote: all are told, long before their deadline of minutes. */
static unsigned collective;
static bool used_before, shrinks;

static void some_vote_others_reduce(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *rest;
    bool all;
    int64_t mine = 1, sum;
    if (used_before) {
        CHECK_EQ(sum_in(group, 1), tutti_world_size(world));
        come(world, tutti_world_size(world), true);
    }
    tutti_status status = (collective >> tutti_world_rank(world) & 1) != 0
                              ? tutti_all_reduce(group, &mine, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL)
                          : shrinks ? tutti_group_shrink(group, NULL, &rest)
                                    : tutti_group_agree(group, true, &all);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "disagree") != NULL);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_MISMATCH); /* it has ended, everywhere */
}

TEST(a_rank_in_a_collective_while_others_vote_is_told_at_once) {
    used_before = true;
    for (collective = 1; collective < 3; collective++, shrinks = !shrinks)
        on_hosts(one_each, 2, some_vote_others_reduce);
    collective = 1 << 3; /* waits for a rank on its own host */
    on_hosts(two_and_two, 4, some_vote_others_reduce);
    collective = 1 << 0 | 1 << 1; /* a whole host */
    on_hosts(two_and_two, 4, some_vote_others_reduce);
    collective = 1 << 1;
    on_hosts(each_alone, 3, some_vote_others_reduce);
}

TEST(a_rank_in_a_collective_is_told_of_votes_also_where_the_group_was_never_used) {
    used_before = false;
    for (collective = 1; collective < 3; collective++)
        on_hosts(one_each, 2, some_vote_others_reduce);
    shrinks = true;
    collective = 1 << 0 | 1 << 2;
    on_hosts(each_alone, 3, some_vote_others_reduce);
}

/* ---- deaths while it shrinks ---- */

static int delay_ms, late;

static void *die_soon(void *argument) {
    usleep((useconds_t)delay_ms * 1000);
    kill(getpid(), SIGKILL);
    return argument;
}

/* The second victim dies somewhere in its own shrink, or after it. */
static void die_while_shrinking(tutti_world *world) {
    tutti_group *group = tutti_group_keep(tutti_world_group(world)), *rest;
    int rank = tutti_world_rank(world);
    CHECK_EQ(sum_in(group, 1), 5);
    lose_victims(world);
    work_until_a_death(group);
    pthread_t thread;
    if (rank == late)
        CHECK(pthread_create(&thread, NULL, die_soon, NULL) == 0);
    for (;;) {
        CHECK_OK(tutti_group_shrink(group, NULL, &rest));
        tutti_group_release(group);
        group = rest;
        if (tutti_group_size(rest) == 3)
            break;
        CHECK_EQ(tutti_group_size(rest), 4);
        work_until_a_death(rest);
    }
    use(world, rest);
    tutti_group_release(rest);
}

TEST(deaths_while_a_group_across_hosts_shrinks_cost_a_round) {
    victim = 0, second = -1, late = 3;
    for (delay_ms = 0; delay_ms < (test_sanitized() ? 20 : 80); delay_ms = delay_ms * 3 + 5)
        on_hosts((const int[]){ 0, 0, 1, 1, 2 }, 5, die_while_shrinking);
}

/* ---- groups beside the one that lost somebody ---- */

static void others_go_on(tutti_world *world) {
    static const int rest_of_us[] = { 0, 2 };
    tutti_group *group = tutti_world_group(world), *pair;
    CHECK_OK(tutti_group_new(world, rest_of_us, 2, NULL, &pair));
    CHECK_EQ(sum_in(group, 1), 3);
    lose_victims(world);
    work_until_a_death(group);
    use(world, pair); /* rendezvous, and connections that did not exist before */
    tutti_group_release(pair);
}

TEST(a_death_outside_of_a_group_across_hosts_does_not_concern_it) {
    victim = 1, second = -1;
    on_hosts(each_alone, 3, others_go_on);
}
