/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches of collectives: what runs together gives what single calls give.
 */
#include <tutti/collective.h>
#include <tutti/fault.h>
#include <tutti/memory.h>
#include <tutti/named.h>
#include <unistd.h>

#include "../harness.h"

#define MOST 4096

static int sum_of_ranks(int size) {
    return size * (size + 1) / 2;
}

/* x to y, then y to z; on `apart` the second reads a buffer of its own, which holds what y would. */
static void reduce_twice(tutti_group *group, size_t count, bool apart, bool as_work) {
    static _Thread_local int x[MOST], y[MOST], z[MOST], other[MOST];
    int rank = tutti_group_rank(group), size = tutti_group_size(group), once = sum_of_ranks(size);
    for (size_t i = 0; i < count; i++) {
        x[i] = rank + 1;
        y[i] = z[i] = -1;
        other[i] = once;
    }
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    const tutti_call *noted = TUTTI_OPTIONS(tutti_call, .batch = batch);
    CHECK_OK(tutti_all_reduce(group, x, y, count, TUTTI_I32, TUTTI_SUM, noted));
    CHECK_OK(tutti_all_reduce(group, apart ? other : y, z, count, TUTTI_I32, TUTTI_SUM, noted));
    CHECK_OK(tutti_all_reduce(group, x, x, count, TUTTI_I32, TUTTI_MAX, noted));
    tutti_work *work = NULL;
    CHECK_OK(tutti_batch_end(batch, as_work ? TUTTI_OPTIONS(tutti_call, .work = &work) : NULL));
    if (as_work) {
        CHECK_OK(tutti_work_wait(work, 0));
        tutti_work_release(work);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK_EQ(y[i], once);
        CHECK_EQ(z[i], size * once);
        CHECK_EQ(x[i], size);
    }
}

TEST_WORLD(an_all_reduce_of_a_batch_sees_the_results_of_those_before_it, 3) {
    tutti_group *group = tutti_world_group(world);
    static const size_t counts[] = { 1, 2, 5, 40, 700, 1500, MOST };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        for (int as_work = 0; as_work < 2; as_work++)
            reduce_twice(group, counts[i], false, as_work);
}

TEST_WORLD(whether_an_all_reduce_waits_for_one_before_it_may_differ_between_ranks, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    static const size_t counts[] = { 1, 5, 700, 1500 };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        for (int together = 0; together < 3; together++)
            reduce_twice(group, counts[i], rank != together, i % 2 == 1);
}

TEST_WORLD(a_long_chain_of_all_reduces_runs_link_by_link, 2) {
    tutti_group *group = tutti_world_group(world);
    int64_t links[12][8];
    tutti_batch *batch;
    for (int i = 0; i < 8; i++)
        links[0][i] = i + tutti_group_rank(group);
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int link = 1; link < 12; link++)
        CHECK_OK(tutti_all_reduce(group, links[link - 1], links[link], 8, TUTTI_I64, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .batch = batch)));
    CHECK_OK(tutti_batch_end(batch, NULL));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(links[11][i], (int64_t)(2 * i + 1) << 10);
}

TEST_WORLD(factors_of_a_batch_may_differ_between_calls_and_ranks, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    float in[4] = { 1, 2, 3, 4 }, first[4], second[4];
    float factors[2] = { 2, rank == 0 ? 2 : 3 }; /* rank 0 gives the same twice, rank 1 does not */
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    CHECK_OK(tutti_all_reduce(group, in, first, 4, TUTTI_F32, TUTTI_PREMUL_SUM,
                              TUTTI_OPTIONS(tutti_call, .batch = batch, .factor = &factors[0])));
    CHECK_OK(tutti_all_reduce(group, in, second, 4, TUTTI_F32, TUTTI_PREMUL_SUM,
                              TUTTI_OPTIONS(tutti_call, .batch = batch, .factor = &factors[1])));
    CHECK_OK(tutti_batch_end(batch, NULL));
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(first[i], 4 * in[i]);
        CHECK_EQ(second[i], 5 * in[i]);
    }
}

TEST_WORLD(a_batch_as_work_has_its_numbers_before_the_call_that_follows_it, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value = 1, sums[3];
    static int large[1 << 16];
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_work *works[3] = { NULL };
    CHECK_OK(tutti_all_reduce(group, large, large, 1 << 16, TUTTI_I32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .work = &works[0])));
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int i = 0; i < 3; i++)
        CHECK_OK(tutti_all_reduce(group, &value, &sums[i], 1, TUTTI_I32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .batch = batch)));
    /* One rank waits for the batch before it goes on, the other does not: the numbers are the same. */
    CHECK_OK(tutti_batch_end(batch, rank == 0 ? NULL : TUTTI_OPTIONS(tutti_call, .work = &works[1])));
    CHECK_OK(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .work = &works[2])));
    uint64_t number = tutti_work_sequence(works[2]), numbers[2];
    for (int i = 0; i < 3; i++) {
        if (works[i] != NULL)
            CHECK_OK(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
    }
    for (int i = 0; i < 3; i++)
        CHECK_EQ(sums[i], 2);
    CHECK_OK(tutti_all_gather(group, &number, numbers, 1, TUTTI_U64, NULL));
    CHECK_EQ(numbers[0], numbers[1]);
    CHECK_EQ(number, 6);
}

TEST_WORLD(a_batch_that_forces_inline_for_many_small_calls_runs_them_one_by_one, 2) {
    tutti_group *group = tutti_world_group(world);
    int64_t in[8], out[8];
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int i = 0; i < 8; i++) {
        in[i] = i;
        CHECK_OK(tutti_all_reduce(group, &in[i], &out[i], 1, TUTTI_I64, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .batch = batch, .algorithm = TUTTI_ALGORITHM_INLINE)));
    }
    CHECK_OK(tutti_batch_end(batch, NULL));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(out[i], 2 * i);
}

TEST_WORLD(a_call_that_a_fault_skips_is_left_out_of_its_batch, 2) {
    tutti_group *group = tutti_world_group(world);
    int one = 1, out[3] = { -1, -1, -1 };
    tutti_batch *batch;
    CHECK_OK(tutti_fault_inject(world, "op=all_reduce,at=1,do=skip"));
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int i = 0; i < 3; i++)
        CHECK_OK(
            tutti_all_reduce(group, &one, &out[i], 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .batch = batch)));
    CHECK_OK(tutti_batch_end(batch, NULL));
    CHECK_EQ(out[0], 2);
    CHECK_EQ(out[1], -1);
    CHECK_EQ(out[2], 2);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- tiles ---- */

static void gather_tiles(tutti_group *group, const int *in, bool as_work, bool cancelled) {
    enum {
        RANKS = 3,
        FIRST = 3,
        SECOND = 5
    };
    int first[RANKS * FIRST] = { 0 }, second[RANKS * SECOND] = { 0 }, rank = tutti_group_rank(group);
    tutti_batch *batch;
    tutti_work *work = NULL;
    CHECK_OK(tutti_batch_begin(group, &batch));
    const size_t counts[] = { FIRST, SECOND };
    void *const out[] = { first, second };
    for (int i = 0; i < 2; i++)
        CHECK_OK(
            tutti_all_gather_offset(group, in, counts, 2, out, TUTTI_I32, TUTTI_OPTIONS(tutti_call, .batch = batch)));
    /* What the calls had allocated for themselves is used for something else by now. */
    void *others[64];
    for (size_t i = 0; i < 64; i++)
        others[i] = memset(malloc(16 * (i + 1)), 0x7f, 16 * (i + 1));
    if (cancelled)
        tutti_batch_cancel(batch);
    else
        CHECK_OK(tutti_batch_end(batch, as_work ? TUTTI_OPTIONS(tutti_call, .work = &work) : NULL));
    if (work != NULL)
        CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    for (size_t i = 0; i < 64; i++)
        free(others[i]);
    for (int from = 0; from < RANKS && !cancelled; from++) {
        for (int i = 0; i < FIRST; i++)
            CHECK_EQ(first[from * FIRST + i], in[i] + 100 * (from - rank));
        for (int i = 0; i < SECOND; i++)
            CHECK_EQ(second[from * SECOND + i], in[FIRST + i] + 100 * (from - rank));
    }
}

TEST_WORLD(tiles_in_a_batch_are_the_batchs_until_it_ends, 3) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    int *in = tutti_memory_data(memory);
    for (int i = 0; i < 8; i++)
        in[i] = 100 * tutti_group_rank(group) + i;
    for (int way = 0; way < 3; way++)
        gather_tiles(group, in, way == 1, way == 2);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
}

TEST(a_batch_that_was_forgotten_is_told_as_such_when_the_world_closes) {
    tutti_world *world;
    tutti_batch *batch, *other;
    CHECK_OK(tutti_world_open(NULL, &world));
    CHECK_OK(tutti_batch_begin(tutti_world_group(world), &other));
    CHECK_OK(tutti_batch_begin(tutti_world_group(world), &batch));
    CHECK_OK(tutti_batch_end(other, NULL));
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("1 group (1 batch that was neither ended nor cancelled)");
    tutti_batch_cancel(batch);
}
