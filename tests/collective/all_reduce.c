/* SPDX-License-Identifier: Apache-2.0
 *
 * all_reduce equals the serial loop, bit for bit: every algorithm, size class, dtype, reduction and several group
 * sizes; and a barrier is one.
 */
#include <stdatomic.h>

#include <tutti/collective.h>

#include "../harness.h"
#include "values.h"

static const tutti_algorithm algorithms[] = { TUTTI_ALGORITHM_AUTO, TUTTI_ALGORITHM_INLINE, TUTTI_ALGORITHM_ONE_SHOT,
                                              TUTTI_ALGORITHM_TWO_SHOT };

typedef struct plan {
    tutti_dtype dtype;
    tutti_reduction reduction;
    size_t count;
    size_t shift; /* bytes off alignment */
    bool in_place;
    tutti_algorithm algorithm;
} plan;

static void run(tutti_group *group, const plan *plan, uint64_t seed) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t element = tutti_dtype_size(plan->dtype), bytes = plan->count * element;
    unsigned char *in = values_room(bytes, plan->shift), *out = plan->in_place ? in : values_room(bytes, plan->shift);
    unsigned char *expected = values_room(bytes, 0);
    values_fill(in, plan->count, plan->dtype, seed, rank);
    double factor_value = 0.5 + rank;
    values_element factor = values_factor(plan->dtype, factor_value);
    tutti_call call = TUTTI_CALL_INIT;
    call.algorithm = plan->algorithm;
    call.factor = &factor;
    values_reduce(expected, plan->count, plan->dtype, plan->reduction, seed, size);
    CHECK_OK(tutti_all_reduce(group, in, out, plan->count, plan->dtype, plan->reduction, &call));
    values_compare(out, expected, plan->count, plan->dtype, "all_reduce", plan->reduction, plan->algorithm);
    if (!plan->in_place)
        values_free(out, plan->shift);
    values_free(in, plan->shift);
    values_free(expected, 0);
}

static void every_size(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    static const size_t counts[] = { 0, 1, 2, 3, 11, 12, 13, 100, 1023, 4099, 16384, 70001, 300007 };
    uint64_t seed = 1;
    /* Every rank computes what every rank has, which is what takes the time: many ranks get the smaller sizes, and
     * large ones only where the table chooses. */
    size_t step = tutti_group_size(group) > 3 ? 2 : 1;
    for (size_t a = 0; a < sizeof algorithms / sizeof algorithms[0]; a++) {
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c += c < 8 ? 1 : step) {
            if (tutti_group_size(group) > 2 && counts[c] > (tutti_group_size(group) > 4 ? 10000 : 20000) && a != 0)
                continue;
            if (tutti_group_size(group) > 8 && counts[c] > 100000)
                continue;
            if (test_sanitized() && counts[c] > (tutti_group_size(group) > 3 ? 5000 : 20000))
                continue;
            for (int in_place = 0; in_place < 2; in_place++) {
                plan plan = { TUTTI_F32, TUTTI_SUM, counts[c], 4 * (c % 3), in_place, algorithms[a] };
                if (plan.algorithm == TUTTI_ALGORITHM_INLINE && counts[c] * 4 > 48)
                    continue;
                if (plan.algorithm == TUTTI_ALGORITHM_ONE_SHOT && counts[c] > 100000)
                    continue;
                run(group, &plan, seed++);
            }
        }
    }
}

static void every_type(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    const size_t counts[] = { 1, 3, 257, test_sanitized() ? 1001 : 9001 };
    uint64_t seed = 1000;
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++)
        for (int reduction = TUTTI_SUM; reduction <= TUTTI_PREMUL_SUM; reduction++)
            for (size_t c = 0; c < sizeof counts / sizeof counts[0] &&
                               tutti_reduction_applies((tutti_reduction)reduction, (tutti_dtype)dtype);
                 c++)
                for (size_t a = 0; a < sizeof algorithms / sizeof algorithms[0]; a++) {
                    plan plan = { (tutti_dtype)dtype,
                                  (tutti_reduction)reduction,
                                  counts[c],
                                  c == 2 ? tutti_dtype_size((tutti_dtype)dtype) : 0,
                                  a % 2,
                                  algorithms[a] };
                    if (plan.algorithm == TUTTI_ALGORITHM_INLINE && counts[c] * tutti_dtype_size(plan.dtype) > 24)
                        continue;
                    run(group, &plan, seed++);
                }
}

TEST(all_reduce_of_every_size_equals_the_serial_loop_as_threads) {
    static const int sizes[] = { 1, 2, 3, 4, 7, 8, 16 };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        test_threads(sizes[i], every_size, NULL);
}

TEST(all_reduce_of_every_size_equals_the_serial_loop_as_processes) {
    test_processes(2, every_size, NULL);
    test_processes(3, every_size, NULL);
}

TEST(all_reduce_of_every_type_equals_the_serial_loop) {
    test_threads(2, every_type, NULL);
    test_processes(3, every_type, NULL);
}

static void many(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    for (uint64_t i = 0; i < 6; i++) {
        plan plan = { TUTTI_BF16, TUTTI_SUM, 1 + i * 900, 0, false, TUTTI_ALGORITHM_AUTO };
        run(group, &plan, i);
    }
}

TEST(all_reduce_of_64_ranks_equals_the_serial_loop) {
    test_threads(64, many, NULL);
}

static void with_flush_to_zero(tutti_world *world, void *argument) {
    (void)argument;
    float in[40], out[40];
    for (int i = 0; i < 40; i++)
        in[i] = 1e-40f * (float)(i + 1);
    values_flush_to_zero(true);
    tutti_status status = tutti_all_reduce(tutti_world_group(world), in, out, 40, TUTTI_F32, TUTTI_SUM, NULL);
    values_flush_to_zero(false);
    CHECK_OK(status);
    for (int i = 0; i < 40; i++) {
        float expected = in[i];
        for (int r = 1; r < tutti_world_size(world); r++)
            expected += in[i];
        CHECK(memcmp(&expected, &out[i], 4) == 0 && expected != 0);
    }
}

TEST(denormals_are_kept_when_the_caller_flushes_them) {
    test_threads(3, with_flush_to_zero, NULL);
}

/* Each rank counts up before the barrier; after it everybody sees all. */
static _Atomic int arrived[8];

static void meet(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    for (int round = 1; round <= 200; round++) {
        atomic_store_explicit(&arrived[rank], round, memory_order_relaxed);
        CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
        for (int other = 0; other < size; other++)
            CHECK(atomic_load_explicit(&arrived[other], memory_order_relaxed) >= round);
    }
}

TEST(a_barrier_holds_everybody_until_all_have_come) {
    test_threads(2, meet, NULL);
    test_threads(5, meet, NULL);
}
