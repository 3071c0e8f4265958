/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups: names, counters, ranks, families, life.
 */
#include <tutti/group.h>

#include "../harness.h"
#include "base/clock.h"
#include "world/sha1.h"
#include "world/world.h"

#define LOCAL TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true)

static tutti_group *make(tutti_world *world, const int *ranks, int count, const tutti_group_options *options) {
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, ranks, count, options, &group));
    return group;
}

static bool inside(const int *ranks, int count, int rank) {
    for (int i = 0; i < count; i++)
        if (ranks[i] == rank)
            return true;
    return false;
}

TEST(sha1_of_known_texts) {
    char text[41];
    tu_sha1_text("0_1_3", 5, text);
    CHECK_TEXT(text, "be10374c947b759e270bde6994dac14b7c12bb8f");
    tu_sha1_text("", 0, text);
    CHECK_TEXT(text, "da39a3ee5e6b4b0d3255bfef95601890afd80709");
    char long_text[200];
    memset(long_text, 'a', sizeof long_text);
    tu_sha1_text(long_text, 200, text);
    CHECK_TEXT(text, "e61cfffe0d9195a525fc6cf06ca2d77119c24a40");
    tu_sha1_text(long_text, 64, text);
    CHECK_TEXT(text, "0098ba824b5c16427bd7a1122a5a442a25ec644d");
}

TEST_WORLD(members_get_the_group_and_others_the_sentinel, 4) {
    int pair[] = { 2, 0 };
    tutti_group *group = make(world, pair, 2, NULL);
    if (inside(pair, 2, tutti_world_rank(world))) {
        CHECK_EQ(tutti_group_size(group), 2);
        CHECK_EQ(tutti_group_ranks(group)[0], 0); /* sorted */
        CHECK_EQ(tutti_group_ranks(group)[1], 2);
        CHECK_EQ(tutti_group_rank(group), tutti_world_rank(world) / 2);
        CHECK_TEXT(tutti_group_description(group), "undefined");
    } else {
        CHECK(group == TUTTI_NON_GROUP_MEMBER);
        CHECK_EQ(tutti_group_rank(group), -1);
        CHECK_EQ(tutti_group_size(group), -1);
        CHECK(tutti_group_name(group) == NULL);
        CHECK_OK(tutti_group_destroy(group));
    }
    CHECK((intptr_t)TUTTI_NON_GROUP_MEMBER == -100);
    tutti_group_release(group);
}

TEST_WORLD(ranks_keep_their_order_when_asked, 3) {
    int order[] = { 2, 0, 1 };
    tutti_group *group =
        make(world, order, 3, TUTTI_OPTIONS(tutti_group_options, .keep_order = true, .description = "mine"));
    static const int expected[] = { 1, 2, 0 };
    CHECK_EQ(tutti_group_rank(group), expected[tutti_world_rank(world)]);
    CHECK_TEXT(tutti_group_description(group), "mine");
    int rank;
    CHECK_OK(tutti_group_rank_of(group, 2, &rank));
    CHECK_EQ(rank, 0);
    CHECK_OK(tutti_group_world_rank(group, 1, &rank));
    CHECK_EQ(rank, 0);
    CHECK_STATUS(tutti_group_rank_of(group, 3, &rank), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_world_rank(group, 3, &rank), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_rank_of(TUTTI_NON_GROUP_MEMBER, 0, &rank), TUTTI_ERROR_ARGUMENT);
    tutti_group_release(group);
}

TEST_WORLD(the_counter_names_groups_on_every_rank_alike_members_or_not, 3) {
    int first[] = { 0, 1 }, second[] = { 1, 2 };
    tutti_group *groups[4];
    groups[0] = make(world, first, 2, NULL);
    groups[1] = make(world, second, 2, TUTTI_OPTIONS(tutti_group_options, .tag = "t"));
    groups[2] = make(world, second, 2,
                     TUTTI_OPTIONS(tutti_group_options, .tag = "t")); /* there already: the number 3 is skipped */
    groups[3] = make(world, NULL, 0, NULL);
    if (tutti_world_rank(world) < 2)
        CHECK_TEXT(tutti_group_name(groups[0]), "1");
    if (tutti_world_rank(world) > 0)
        CHECK_TEXT(tutti_group_name(groups[1]), "2");
    CHECK(groups[1] == groups[2]);
    CHECK_TEXT(tutti_group_name(groups[3]), "4");
    for (int i = 0; i < 4; i++)
        tutti_group_release(groups[i]);
}

TEST_WORLD(wrong_rank_lists_are_refused_and_end_nothing, 2) {
    tutti_group *group;
    CHECK_STATUS(tutti_group_new(world, (int[]){ 0, 0 }, 2, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("rank 0 is twice");
    CHECK_STATUS(tutti_group_new(world, (int[]){ 0, 1, 2 }, 3, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("more than the world's 2");
    CHECK_STATUS(tutti_group_new(world, (int[]){ 0, 2 }, 2, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("rank 2 is not in this world");
    CHECK_STATUS(tutti_group_new(world, (int[]){ -1 }, 1, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new(world, (int[]){ 0 }, 0, NULL, &group), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .timeout_ns = -5), &group),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .tag = "ptd:1"), &group),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new(NULL, NULL, 0, NULL, &group), TUTTI_ERROR_ARGUMENT);
    group = make(world, NULL, 0, NULL);
    CHECK_TEXT(tutti_group_name(group), "1"); /* none of them counted */
    tutti_group_release(group);
}

TEST_WORLD(disagreeing_lists_fail_on_every_rank_and_show_both_sides, 3) {
    tutti_group *group;
    int ranks[] = { 0, tutti_world_rank(world) == 2 ? 2 : 1 };
    CHECK_STATUS(tutti_group_new(world, ranks, 2, NULL, &group), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("[0, 1]");
    CHECK_MESSAGE("[0, 2]");
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1);
    /* It failed alike for all, so it ended nothing. */
    group = make(world, NULL, 0, NULL);
    tutti_group_release(group);
}

TEST_WORLD(local_synchronisation_names_by_ranks_and_by_groups_of_these_ranks_only, 4) {
    int rank = tutti_world_rank(world);
    /* Different histories first: ranks 0 and 2 make groups that 1 and 3 know nothing of. */
    int odd_pair[] = { 0, 2 };
    tutti_group *before[3] = { NULL, NULL, NULL };
    if (rank == 0 || rank == 2)
        for (int i = 0; i < 3; i++)
            before[i] = make(world, odd_pair, 2, LOCAL);
    int pair[] = { 0, 1 };
    tutti_group *group = make(world, pair, 2, LOCAL); /* others return at once */
    char expected[41];
    if (rank < 2) {
        tu_sha1_text("0_1_0", 5, expected);
        CHECK_TEXT(tutti_group_name(group), expected);
        tutti_group *second = make(world, pair, 2, LOCAL);
        tu_sha1_text("0_1_1", 5, expected);
        CHECK_TEXT(tutti_group_name(second), expected);
        CHECK_OK(tutti_group_destroy(group));
        tutti_group_release(group);
        group = make(world, pair, 2, LOCAL); /* one lives, and has the name of number 1 */
        tu_sha1_text("0_1_2", 5, expected);
        CHECK_TEXT(tutti_group_name(group), expected);
        CHECK(group->key != second->key);
        tutti_group_release(second);
    } else {
        CHECK(group == TUTTI_NON_GROUP_MEMBER);
    }
    tutti_group_release(group);
    for (int i = 0; i < 3; i++)
        tutti_group_release(before[i]);
    tutti_group *numbered = make(world, NULL, 0, NULL); /* the counter was not advanced */
    CHECK_TEXT(tutti_group_name(numbered), "1");
    tutti_group_release(numbered);
}

TEST_WORLD(three_of_a_rank_list_give_the_name_of_number_three, 2) {
    int pair[] = { 0, 1 };
    tutti_group *groups[3];
    groups[0] = make(world, pair, 2, NULL);
    groups[1] = make(world, pair, 2, NULL); /* with the default group three of these ranks */
    groups[2] = make(world, pair, 2, LOCAL);
    CHECK_TEXT(tutti_group_name(groups[2]), "be10374c947b759e270bde6994dac14b7c12bb8f");
    CHECK(groups[0] != groups[1]); /* without a tag equal ranks make distinct groups */
    for (int i = 0; i < 3; i++)
        tutti_group_release(groups[i]);
}

TEST_WORLD(a_name_in_use_is_an_error_for_all_and_free_again_after_destroy, 3) {
    int pair[] = { 0, 1 };
    tutti_group *group = make(world, pair, 2, TUTTI_OPTIONS(tutti_group_options, .name = "tensor"));
    if (tutti_world_rank(world) < 2) {
        CHECK_TEXT(tutti_group_name(group), "tensor");
        CHECK(tutti_group_by_name(world, "tensor") == group);
    }
    tutti_group *second;
    CHECK_STATUS(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .name = "tensor"), &second),
                 TUTTI_ERROR_EXISTS);
    CHECK_MESSAGE("\"tensor\" is already in use");
    CHECK_OK(tutti_group_destroy(group));
    CHECK(tutti_group_by_name(world, "tensor") == NULL);
    second = make(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .name = "tensor"));
    CHECK_TEXT(tutti_group_name(second), "tensor");
    tutti_group_release(group);
    tutti_group_release(second);
}

TEST_WORLD(destroying_takes_a_group_out_of_its_world, 2) {
    tutti_group *group = make(world, NULL, 0, NULL);
    int both[] = { 0, 1 };
    CHECK(tutti_group_find(world, "ptd:1", both, 2) == group);
    CHECK_OK(tutti_group_destroy(group));
    CHECK(tutti_group_find(world, "ptd:1", both, 2) == NULL);
    CHECK_STATUS(tutti_group_destroy(group), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("already destroyed");
    tu_operation_info info = { .operation = TU_OPERATION_BARRIER };
    int64_t deadline;
    uint64_t ticket;
    CHECK_STATUS(tu_group_enter(group, 0, &info, &deadline, &ticket), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("already destroyed");
    tutti_group_release(group);
    CHECK_STATUS(tutti_group_destroy(tutti_world_group(world)), TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_group_destroy(NULL), TUTTI_ERROR_ARGUMENT);
}

TEST_WORLD(groups_have_their_own_timeouts, 2) {
    tutti_group *group = make(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .timeout_ns = 9 * TU_SECOND));
    CHECK_EQ(tutti_group_timeout(group), 9 * TU_SECOND);
    CHECK_OK(tutti_group_set_timeout(group, 0));
    CHECK_EQ(tutti_group_timeout(group), tutti_group_timeout(tutti_world_group(world)));
    CHECK_STATUS(tutti_group_set_timeout(group, -1), TUTTI_ERROR_ARGUMENT);
    tutti_group_release(group);
}

TEST_WORLD(groups_are_enumerated_in_order_of_creation, 2) {
    tutti_group *made[3], *all[8];
    for (int i = 0; i < 3; i++)
        made[i] = make(world, NULL, 0, NULL);
    CHECK_OK(tutti_group_destroy(made[1]));
    CHECK_EQ(tutti_group_enumerate(world, all, 8), 3);
    CHECK(all[0] == tutti_world_group(world) && all[1] == made[0] && all[2] == made[2]);
    CHECK_EQ(tutti_group_enumerate(world, NULL, 0), 3);
    for (int i = 0; i < 3; i++)
        tutti_group_release(made[i]);
}

TEST_WORLD(a_rank_that_does_not_come_to_the_agreement_is_named_with_what_it_does, 3) {
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "begin", 3, 0));
    if (tutti_world_rank(world) != 1) {
        tutti_group *group;
        CHECK_STATUS(
            tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .timeout_ns = test_moment()), &group),
            TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("Missing: rank 1 (pid ");
        CHECK_MESSAGE("now in no call of Tutti");
        tutti_error_info info = TUTTI_ERROR_INFO_INIT;
        CHECK_OK(tutti_error_detail(&info));
        CHECK_TEXT(info.operation, "group_new");
        CHECK_EQ(info.at_fault[0], 1);
    }
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 3, 0));
}

TEST_WORLD(a_member_that_does_not_come_to_an_agreement_of_the_members_is_named_with_what_it_does, 4) {
    const int members[] = { 0, 1, 3 };
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "begin", 4, 0));
    if (tutti_world_rank(world) < 2) {
        tutti_group *group;
        CHECK_STATUS(tutti_group_new(
                         world, members, 3,
                         TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true, .timeout_ns = test_moment()),
                         &group),
                     TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("timeout: making group ");
        CHECK_MESSAGE("Missing: rank ");
        CHECK_MESSAGE("rank 3 (pid ");
        CHECK_MESSAGE("now in no call of Tutti");
        tutti_error_info info = TUTTI_ERROR_INFO_INIT;
        CHECK_OK(tutti_error_detail(&info));
        CHECK(info.at_fault_count >= 1);
        CHECK_EQ(info.at_fault[info.at_fault_count - 1], 2); /* of the group that would be: rank 3 of the world */
    }
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 4, 0));
}

/* ---- tags ---- */

TEST_WORLD(a_tag_finds_its_group_again, 4) {
    int rank = tutti_world_rank(world), partner = rank ^ 1;
    int mine[] = { rank < partner ? rank : partner, rank < partner ? partner : rank };
    int all[] = { 0, 1, 2, 3 };
    const tutti_group_options *blu = TUTTI_OPTIONS(tutti_group_options, .tag = "blu");
    tutti_group *group[6];
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, blu, NULL, &group[0]));
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, blu, NULL, &group[1]));
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, TUTTI_OPTIONS(tutti_group_options, .tag = "bla"),
                                       NULL, &group[2]));
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, NULL, NULL, &group[3]));
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, NULL, NULL, &group[4]));
    CHECK(group[0] == group[1]);                         /* the same tag */
    CHECK(group[0] != group[2]);                         /* another */
    CHECK(group[0] != group[3] && group[2] != group[3]); /* none */
    CHECK(group[3] != group[4]);                         /* none, twice */
    CHECK_TEXT(tutti_group_tag(group[0]), "blu");
    char own[32];
    snprintf(own, sizeof own, "ptd:%s", tutti_group_name(group[3]));
    CHECK_TEXT(tutti_group_tag(group[3]), own);
    /* Round trips, also where another untagged group has the same ranks. */
    for (int i = 0; i < 5; i++)
        CHECK(tutti_group_find(world, tutti_group_tag(group[i]), mine, 2) == group[i]);
    CHECK(tutti_group_find(world, "", mine, 2) == group[3]); /* the oldest */
    CHECK(tutti_group_find(world, "user:blu", mine, 2) == group[0]);
    int reversed[] = { mine[1], mine[0] };
    CHECK(tutti_group_find(world, "blu", reversed, 2) == group[0]);
    CHECK(tutti_group_find(world, "", all, 4) == tutti_world_group(world));
    CHECK(tutti_group_find(world, "none", mine, 2) == NULL);
    CHECK(tutti_group_find(world, "blu", all, 4) == NULL);
    for (int i = 0; i < 5; i++)
        tutti_group_release(group[i]);
}

TEST_WORLD(find_or_create_makes_what_new_then_finds, 4) {
    int all[] = { 0, 1, 2, 3 };
    tutti_group *first, *second, *none;
    CHECK_OK(tutti_group_find_or_new(world, "blu", all, 4, 2, &first));
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, TUTTI_OPTIONS(tutti_group_options, .tag = "blu"),
                                       NULL, &second));
    CHECK(first == second);
    tutti_group_release(second);
    CHECK_OK(tutti_group_find_or_new(world, "blu", all, 4, 2, &second));
    CHECK(first == second);
    tutti_group_release(second);
    CHECK_OK(tutti_group_find_or_new(world, "", all, 4, 4, &second));
    CHECK(second == tutti_world_group(world));
    tutti_group_release(second);
    CHECK_STATUS(tutti_group_find_or_new(world, "blu", all, 4, 3, &none), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_find_or_new(world, "", all, 4, 2, &none), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("never made without a tag");
    int others[] = { (tutti_world_rank(world) + 1) % 4 };
    CHECK_STATUS(tutti_group_find_or_new(world, "blu", others, 1, 1, &none), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("none of the blocks");
    tutti_group_release(first);
}

/* ---- families ---- */

TEST_WORLD(sub_groups_cut_the_parent_into_blocks, 4) {
    tutti_group *all[2], *mine;
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, NULL, all, &mine));
    int rank = tutti_world_rank(world);
    CHECK(all[rank / 2] == mine && all[1 - rank / 2] == TUTTI_NON_GROUP_MEMBER);
    CHECK_EQ(tutti_group_rank(mine), rank % 2);
    CHECK_TEXT(tutti_group_name(mine), rank < 2 ? "1" : "2");
    /* And again below a parent that is not the world. */
    tutti_group *single;
    CHECK_OK(tutti_group_new_subgroups(mine, 1, NULL, NULL, &single));
    CHECK_EQ(tutti_group_size(single), 1);
    tutti_group *bad;
    CHECK_STATUS(tutti_group_new_subgroups(tutti_world_group(world), 3, NULL, NULL, &bad), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new_subgroups(tutti_world_group(world), 0, NULL, NULL, &bad), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_new_subgroups(tutti_world_group(world), 8, NULL, NULL, &bad), TUTTI_ERROR_ARGUMENT);
    tutti_group_release(mine);
    tutti_group_release(single);
}

TEST_WORLD(sub_groups_by_enumeration, 4) {
    static const int first[] = { 0, 2 }, second[] = { 1 }, twice[] = { 1, 2 };
    const int *lists[] = { first, second }, *bad_lists[] = { first, twice };
    int counts[] = { 2, 1 }, bad_counts[] = { 2, 2 };
    tutti_group *all[2], *mine;
    CHECK_OK(tutti_group_new_subgroups_by_enumeration(world, lists, counts, 2, NULL, all, &mine));
    int rank = tutti_world_rank(world);
    CHECK_EQ(tutti_group_size(mine), rank == 3 ? -1 : rank == 1 ? 1 : 2);
    CHECK_STATUS(tutti_group_new_subgroups_by_enumeration(world, bad_lists, bad_counts, 2, NULL, all, &mine),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("appears twice");
    CHECK_STATUS(tutti_group_new_subgroups_by_enumeration(world, lists, counts, 0, NULL, all, &mine),
                 TUTTI_ERROR_ARGUMENT);
    tutti_group_release(mine);
}

TEST_WORLD(split_takes_ranks_of_the_parent, 4) {
    int three[] = { 1, 2, 3 };
    tutti_group *parent = make(world, three, 3, NULL);
    if (tutti_world_rank(world) == 0)
        return;                          /* outside of the parent, so not asked */
    static const int first[] = { 2, 0 }; /* world ranks 3 and 1, sorted by parent rank: 1, 3 */
    const int *lists[] = { first };
    int counts[] = { 2 };
    tutti_group *mine, *bad;
    CHECK_OK(tutti_group_split(parent, lists, counts, 1, NULL, &mine));
    if (tutti_world_rank(world) == 2) {
        CHECK(mine == TUTTI_NON_GROUP_MEMBER);
    } else {
        CHECK_EQ(tutti_group_size(mine), 2);
        CHECK_EQ(tutti_group_ranks(mine)[0], 1);
        CHECK_EQ(tutti_group_ranks(mine)[1], 3);
        CHECK_TEXT(tutti_group_description(mine), "undefined:split:0");
        int ranks[] = { 1, 3 };
        CHECK(tutti_group_find(world, "", ranks, 2) == mine); /* a lookup without tag sees it */
        char name[41];
        tu_sha1_text("1_3_0", 5, name);
        CHECK_TEXT(tutti_group_name(mine), name);
    }
    CHECK_STATUS(tutti_group_split(parent, lists, counts, 0, NULL, &bad), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_split(parent, lists, (int[]){ 0 }, 1, NULL, &bad), TUTTI_ERROR_ARGUMENT);
    static const int outside[] = { 3 }, again[] = { 1, 1 };
    CHECK_STATUS(tutti_group_split(parent, (const int *[]){ outside }, (int[]){ 1 }, 1, NULL, &bad),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_split(parent, (const int *[]){ again }, (int[]){ 2 }, 1, NULL, &bad),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_split(TUTTI_NON_GROUP_MEMBER, lists, counts, 1, NULL, &bad), TUTTI_ERROR_ARGUMENT);
    tutti_group_release(mine);
    tutti_group_release(parent);
}

TEST_WORLD(split_with_different_lists_fails_on_every_rank, 2) {
    const int list[] = { tutti_world_rank(world) };
    tutti_group *mine;
    CHECK_STATUS(tutti_group_split(tutti_world_group(world), (const int *[]){ list }, (int[]){ 1 }, 1, NULL, &mine),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("[0]");
    CHECK_MESSAGE("[1]");
}

/* ---- many, and different histories ---- */

TEST_WORLD(overlapping_groups_with_different_histories_are_never_confused, 3) {
    int rank = tutti_world_rank(world);
    int left[] = { 0, 1 }, right[] = { 1, 2 };
    tutti_group *made[24];
    int count = 0;
    for (int i = 0; i < 4; i++) {
        if (rank <= 1)
            made[count++] = make(world, left, 2, LOCAL);
        if (rank >= 1 && i % 2 == 0)
            made[count++] = make(world, right, 2, LOCAL);
        if (rank == 2)
            made[count++] = make(world, (int[]){ 2 }, 1, LOCAL);
    }
    made[count++] = make(world, NULL, 0, LOCAL);
    made[count++] = make(world, NULL, 0, NULL);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++)
            CHECK(made[i]->key != made[j]->key);
    for (int i = 0; i < count; i++)
        tutti_group_release(made[i]);
}

TEST_WORLD(a_thousand_groups_can_be_made_and_found, 2) {
    enum {
        COUNT = 1000
    };
    tutti_group *groups[COUNT];
    for (int i = 0; i < COUNT; i++)
        groups[i] = make(world, NULL, 0, NULL);
    for (int i = 0; i < COUNT; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i + 1);
        CHECK(tutti_group_by_name(world, name) == groups[i]);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(tutti_group_destroy(groups[i]));
        tutti_group_release(groups[i]);
    }
    CHECK_EQ(tutti_group_enumerate(world, NULL, 0), 1);
}

static tutti_status make_and_split(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_group *group = NULL, *part = NULL;
    tutti_status status = tutti_world_open_fake(0, 4, NULL, &world); /* no other rank would be left waiting */
    if (status != TUTTI_OK)
        return status;
    status = tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .tag = "t"), &group);
    static const int zero[] = { 0 };
    if (status == TUTTI_OK)
        status = tutti_group_split(group, (const int *[]){ zero }, (int[]){ 1 }, 1, NULL, &part);
    tutti_group_release(group);
    tutti_group_release(part);
    CHECK_OK(tutti_world_close(world)); /* nothing is left alive by what failed */
    return status;
}

TEST(making_groups_survives_the_failure_of_any_allocation) {
    test_fail_each("malloc,calloc,aligned_alloc,strdup", make_and_split, NULL);
}
