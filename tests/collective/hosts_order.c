/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions between hosts that may add in any order (TUTTI_ORDER_ANY): right, alike on all ranks, by a tree or a
 * chain, and on one host the same as ever.
 */
#include <tutti/collective.h>

#include "on_hosts.h"

static const int three_and_two[] = { 0, 0, 1, 1, 2 };

#define ANY TUTTI_OPTIONS(tutti_call, .order = TUTTI_ORDER_ANY)

static int64_t whole(int rank, size_t index) {
    return (int64_t)(index * 7 + index / 251) * (rank + 1) + rank;
}

/* Integers add up to the same in every order. */
static void check_whole(tutti_group *group, size_t count, bool in_place) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    int64_t *in = malloc((count + 1) * sizeof *in), *out = in_place ? in : malloc((count + 1) * sizeof *out);
    for (size_t i = 0; i < count; i++)
        in[i] = whole(rank, i);
    CHECK_OK(tutti_all_reduce(group, in, out, count, TUTTI_I64, TUTTI_SUM, ANY));
    for (size_t i = 0; i < count; i++) {
        int64_t sum = 0;
        for (int other = 0; other < size; other++)
            sum += whole(other, i);
        if (out[i] != sum)
            CHECK_EQ(out[i], sum);
    }
    if (!in_place)
        free(out);
    free(in);
}

/* Floats are rounded once, by everybody alike. */
static void check_rounded(tutti_group *group, size_t count, tutti_dtype dtype, tutti_reduction reduction) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t bytes = count * tutti_dtype_size(dtype);
    float *values = malloc(count * sizeof *values);
    uint16_t *halves = malloc(count * sizeof *halves);
    unsigned char *all = malloc(bytes * (size_t)size), *out = malloc(bytes);
    float factor = 1.0f / (float)(rank + 2);
    for (size_t i = 0; i < count; i++) {
        values[i] = (float)(whole(rank, i) % 1001) / 1000.0f;
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    uint16_t half_factor = 0x3f00; /* 0.5 in bf16 */
    const void *in = dtype == TUTTI_F32 ? (const void *)values : halves;
    CHECK_OK(tutti_all_reduce(group, in, out, count, dtype, reduction,
                              TUTTI_OPTIONS(tutti_call, .order = TUTTI_ORDER_ANY,
                                            .factor = dtype == TUTTI_F32 ? (const void *)&factor : &half_factor)));
    CHECK_OK(tutti_all_gather(group, out, all, bytes, TUTTI_U8, NULL));
    for (int other = 0; other < size; other++)
        CHECK(memcmp(all + (size_t)other * bytes, out, bytes) == 0);
    if (dtype == TUTTI_F32 && reduction == TUTTI_AVG)
        for (size_t i = 0; i < count; i += 997) {
            double sum = 0;
            for (int other = 0; other < size; other++)
                sum += (double)((float)(whole(other, i) % 1001) / 1000.0f);
            double error = (double)((float *)(void *)out)[i] - sum / size;
            CHECK(error < 1e-6 && error > -1e-6);
        }
    free(values);
    free(halves);
    free(all);
    free(out);
}

static void check_ran(tutti_group *group, tutti_algorithm algorithm, bool free_order) {
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(group, &ran));
    CHECK_EQ(ran.algorithm, algorithm);
    CHECK_EQ(strstr(ran.why, "in any order") != NULL, free_order);
}

static void reduce_in_any_order(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group), rank = tutti_group_rank(group);
    check_whole(group, 1, false);
    check_ran(group, TUTTI_ALGORITHM_ONE_SHOT, false);
    check_whole(group, 0, false);
    bool alone = size < 4; /* every rank is on a host of its own: no order is quicker than theirs */
    check_whole(group, 4501, true);
    check_ran(group, alone ? TUTTI_ALGORITHM_TWO_SHOT : TUTTI_ALGORITHM_TREE, !alone);
    check_whole(group, 60007, false);
    check_ran(group, alone ? TUTTI_ALGORITHM_TWO_SHOT : TUTTI_ALGORITHM_TREE, !alone);
    check_whole(group, 500009, true);
    check_ran(group, alone ? TUTTI_ALGORITHM_TWO_SHOT : TUTTI_ALGORITHM_PIPELINED, !alone);
    static const tutti_reduction reductions[] = { TUTTI_SUM, TUTTI_AVG, TUTTI_MAX, TUTTI_PREMUL_SUM };
    for (size_t i = 0; i < sizeof reductions / sizeof *reductions; i++) {
        check_rounded(group, 30011, TUTTI_F32, reductions[i]);
        check_rounded(group, 30011, TUTTI_BF16, reductions[i]);
    }
    enum {
        EACH = 4003
    };
    int64_t *in = malloc(EACH * (size_t)size * sizeof *in), *out = malloc(EACH * sizeof *out);
    for (size_t i = 0; i < EACH * (size_t)size; i++)
        in[i] = whole(rank, i);
    CHECK_OK(tutti_reduce_scatter(group, in, out, EACH, TUTTI_I64, TUTTI_SUM, ANY));
    int64_t sum = 0;
    for (int other = 0; other < size; other++)
        sum += whole(other, (size_t)rank * EACH + 5);
    CHECK_EQ(out[5], sum);
    CHECK_OK(tutti_reduce(group, in, out, EACH, TUTTI_I64, TUTTI_MAX, size - 1, ANY));
    CHECK(rank != size - 1 || out[7] == whole(size - 1, 7));
    free(in);
    free(out);
}

TEST(reductions_in_any_order_are_right_and_alike_on_all_ranks) {
    on_hosts(one_each, 2, reduce_in_any_order);
    on_hosts(one_on_three, 3, reduce_in_any_order);
    on_hosts(three_and_two, 5, reduce_in_any_order); /* three hosts: one gives its sum to another */
    on_hosts(in_turns, 5, reduce_in_any_order);
}

static void orders_differ(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    static double in[6000], out[6000];
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_order order = tutti_world_rank(world) == 0 ? TUTTI_ORDER_ANY : TUTTI_ORDER_RANK;
    CHECK_STATUS(
        tutti_all_reduce(group, in, out, 6000, TUTTI_F64, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .order = order)),
        TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "algorithm") != NULL && strstr(tutti_error_message(), "two_shot") != NULL);
}

TEST(ranks_that_ask_for_different_orders_are_told) {
    on_hosts(one_each, 2, orders_differ);
}

static tutti_status on_one_host(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    float in[3000], ordered[3000], any[3000];
    for (int i = 0; i < 3000; i++)
        in[i] = (float)(whole(tutti_world_rank(world), (size_t)i) % 1001) / 1000.0f;
    CHECK_OK(tutti_all_reduce(group, in, ordered, 3000, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK_OK(tutti_all_reduce(group, in, any, 3000, TUTTI_F32, TUTTI_SUM, ANY));
    CHECK(memcmp(ordered, any, sizeof any) == 0);
    CHECK_STATUS(tutti_all_reduce(group, in, any, 3000, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .order = (tutti_order)7)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK(strstr(tutti_error_message(), "TUTTI_ORDER_ANY") != NULL);
    return TUTTI_OK;
}

TEST(on_one_host_any_order_is_that_of_the_ranks) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 3, on_one_host, NULL));
}
