/* SPDX-License-Identifier: Apache-2.0
 *
 * The named operations on symmetric memory: results, what they leave alone, and their messages.
 */
#include <tutti/memory.h>
#include <tutti/named.h>
#include <tutti/peers.h>

#include "values.h"

#define BLOCK ((size_t)2 << 20)

typedef struct blocks {
    tutti_memory *memory[4];
    unsigned char *data[4];
} blocks;

/* Not rendezvoused: the operations do that. */
static blocks make_blocks(tutti_world *world) {
    blocks made;
    for (int i = 0; i < 4; i++) {
        CHECK_OK(tutti_memory_alloc(world, BLOCK, NULL, &made.memory[i]));
        made.data[i] = tutti_memory_data(made.memory[i]);
    }
    return made;
}

static void free_blocks(tutti_world *world, blocks *made) {
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    for (int i = 0; i < 4; i++)
        tutti_memory_release(made->memory[i]);
}

static const size_t byte_sizes[] = { 4, 8192, 8196, 400000 };
static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_I64, TUTTI_F8_E5M2 };

static void expect_reduction(const unsigned char *got, size_t count, tutti_dtype dtype, tutti_reduction reduction,
                             uint64_t seed, int size, const char *what) {
    unsigned char *expected = malloc(count * 16 + 16);
    values_reduce(expected, count, dtype, reduction, seed, size);
    values_compare(got, expected, count, dtype, what, reduction, 0);
    free(expected);
}

/* An offset into the block; what lies around the view stays as it was. */
static void all_reduces(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    blocks blocks = make_blocks(world);
    unsigned char *out = malloc(BLOCK), *local = malloc(BLOCK), *before = malloc(BLOCK);
    uint64_t seed = 1;
    for (size_t d = 0; d < 4; d++)
        for (size_t n = 0; n < 4; n++)
            for (size_t shift = 0; shift <= 16; shift += 8) {
                if (n == 3 && (d != 0 || shift != 8)) /* the serial loop takes its time */
                    continue;
                tutti_dtype dtype = dtypes[d];
                tutti_reduction reduction = n % 2 ? TUTTI_SUM : TUTTI_MAX;
                size_t element = tutti_dtype_size(dtype), count = byte_sizes[n] / element, bytes = count * element;
                unsigned char *data = blocks.data[0] + 64 + shift;
                memset(blocks.data[0], 0x5a, bytes + 256);
                values_fill(data, count, dtype, ++seed, rank);
                memcpy(before, data, bytes);
                CHECK_OK(tutti_one_shot_all_reduce(group, data, out, count, dtype, reduction, NULL));
                expect_reduction(out, count, dtype, reduction, seed, size, "one_shot_all_reduce");
                CHECK(memcmp(before, data, bytes) == 0);
                CHECK_OK(tutti_two_shot_all_reduce_out(group, data, out, count, dtype, reduction, NULL));
                expect_reduction(out, count, dtype, reduction, seed, size, "two_shot_all_reduce_out");
                CHECK(memcmp(before, data, bytes) == 0); /* the input is left alone */
                CHECK_OK(tutti_two_shot_all_reduce(group, data, count, dtype, reduction, NULL));
                expect_reduction(data, count, dtype, reduction, seed, size, "two_shot_all_reduce_");
                for (size_t i = 0; i < 64 + shift; i++)
                    CHECK_EQ(blocks.data[0][i], 0x5a);
                for (size_t i = 0; i < 64; i++)
                    CHECK_EQ(data[bytes + i], 0x5a);
                values_fill(local, count, dtype, ++seed, rank);
                CHECK_OK(tutti_one_shot_all_reduce_copy(group, blocks.data[1], BLOCK / element, local, out, count,
                                                        dtype, reduction, NULL));
                expect_reduction(out, count, dtype, reduction, seed, size, "one_shot_all_reduce_copy");
            }
    CHECK_OK(tutti_one_shot_all_reduce(group, blocks.data[0], out, 0, TUTTI_F32, TUTTI_SUM, NULL));
    free(out);
    free(local);
    free(before);
    free_blocks(world, &blocks);
}
TEST(named_all_reduces_equal_the_serial_loop) {
    test_threads(2, all_reduces, NULL);
    test_processes(3, all_reduces, NULL);
    test_threads(4, all_reduces, NULL);
    test_threads(1, all_reduces, NULL);
}

static void scatters(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    blocks blocks = make_blocks(world);
    uint32_t *in = (uint32_t *)(void *)blocks.data[0], *out = malloc(BLOCK);
    for (size_t n = 0; n < 3; n++)
        for (int split = 0; split < 2; split++) {
            size_t rows = n == 0 ? 1 : 6, share = (size_t[]){ 3, 512, 20000 }[n], columns = share * (size_t)size;
            for (size_t i = 0; i < rows * columns; i++)
                in[i] = (uint32_t)(i * 7 + (size_t)rank * 1000003);
            CHECK_OK(tutti_reduce_scatter_out(group, in, out, rows, columns, split, TUTTI_U32, TUTTI_SUM, NULL));
            for (size_t i = 0; i < rows * share; i++) {
                size_t from =
                    split ? i / share * columns + (size_t)rank * share + i % share : (size_t)rank * rows * share + i;
                uint32_t sum = 0;
                for (int r = 0; r < size; r++)
                    sum += (uint32_t)(from * 7 + (size_t)r * 1000003);
                CHECK_EQ(out[i], sum);
            }
            CHECK_EQ(in[0], (uint32_t)rank * 1000003); /* only read */
        }
    /* Chunk r filled with r: the sum is rank * size, the average the rank; symmetric and not. */
    for (int symmetric = 0; symmetric < 2; symmetric++) {
        float *values = symmetric ? (float *)(void *)blocks.data[1] : malloc(64 * 64 * 4 * (size_t)size),
              *got = malloc(64 * 64 * 4 * (size_t)size);
        for (size_t i = 0; i < 64 * 64 * (size_t)size; i++)
            values[i] = (float)(i / (64 * 64));
        CHECK_OK(tutti_low_contention_reduce_scatter(group, values, got, 64 * 64, TUTTI_F32, TUTTI_SUM, NULL));
        CHECK(got[0] == (float)(rank * size) && got[64 * 64 - 1] == (float)(rank * size));
        CHECK_OK(tutti_low_contention_reduce_scatter(group, values, got, 64 * 64, TUTTI_F32, TUTTI_AVG, NULL));
        CHECK(got[7] == (float)rank);
        for (size_t i = 0; i < 64 * 64; i++)
            values[i] = (float)rank;
        CHECK_OK(tutti_low_contention_all_gather(group, values, got, 64 * 64, TUTTI_F32, NULL));
        for (int r = 0; r < size; r++)
            CHECK(got[(size_t)r * 64 * 64 + 9] == (float)r);
        if (!symmetric)
            free(values);
        free(got);
    }
    free(out);
    free_blocks(world, &blocks);
}
TEST(reduce_scatter_out_and_the_low_contention_forms_put_every_part_where_it_belongs) {
    test_threads(2, scatters, NULL);
    test_processes(4, scatters, NULL);
    test_threads(3, scatters, NULL);
}

TEST_WORLD(messages_of_the_named_operations_are_those_that_people_know, 4) {
    tutti_group *group = tutti_world_group(world);
    blocks blocks = make_blocks(world);
    float *in = (float *)(void *)blocks.data[0], private[64] = { 0 }, out[64];
    CHECK_STATUS(tutti_one_shot_all_reduce(group, private, out, 4, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("must be allocated with empty_strided_p2p()");
    CHECK_STATUS(tutti_two_shot_all_reduce(group, private, 4, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("must be allocated with empty_strided_p2p()");
    CHECK_STATUS(tutti_one_shot_all_reduce_copy(group, in, 3, private, out, 4, TUTTI_F32, TUTTI_SUM, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("must be smaller than symm buffer size");
    /* The corner cases: nothing at all is fine; 50 and (2, 50) do not divide by 4. */
    CHECK_OK(tutti_reduce_scatter_out(group, in, out, 1, 0, false, TUTTI_BF16, TUTTI_SUM, NULL));
    CHECK_STATUS(tutti_reduce_scatter_out(group, in, out, 1, 50, false, TUTTI_BF16, TUTTI_SUM, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("divisible");
    CHECK_STATUS(tutti_reduce_scatter_out(group, in, out, 2, 50, true, TUTTI_BF16, TUTTI_SUM, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("last dimension");
    CHECK_MESSAGE("divisible");
    CHECK_OK(tutti_reduce_scatter_out(group, in, out, 2, 48, true, TUTTI_BF16, TUTTI_SUM, NULL));
    CHECK_STATUS(tutti_multimem_all_reduce(group, in, 4, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("multicast support is required");
    CHECK_MESSAGE("TUTTI_MULTICAST=software");
    CHECK_STATUS(tutti_multimem_all_gather_out(group, in, in, 4, TUTTI_F32, NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_STATUS(tutti_low_contention_all_gather_multicast(group, in, in, 4, TUTTI_F32, NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("multicast support is required");
    CHECK_STATUS(tutti_one_shot_all_reduce(group, in, out, 4, TUTTI_F32, TUTTI_SUM,
                                           TUTTI_OPTIONS(tutti_call, .algorithm = TUTTI_ALGORITHM_TWO_SHOT)),
                 TUTTI_ERROR_ARGUMENT);
    free_blocks(world, &blocks);
}

static void multimem(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    blocks blocks = make_blocks(world);
    unsigned char *out = malloc(BLOCK);
    uint64_t seed = 90;
    for (size_t n = 0; n < 4; n++)
        for (size_t shift = 4; shift <= 16; shift *= 2) {
            size_t count = byte_sizes[n] / 4;
            unsigned char *data = blocks.data[0] + shift;
            values_fill(data, count, TUTTI_F32, ++seed, rank);
            CHECK_OK(tutti_multimem_one_shot_all_reduce(group, data, out, count, TUTTI_F32, TUTTI_SUM, NULL));
            expect_reduction(out, count, TUTTI_F32, TUTTI_SUM, seed, size, "multimem_one_shot_all_reduce");
            CHECK_OK(tutti_multimem_one_shot_reduce_out(group, data, rank == 0 ? out : NULL, count, TUTTI_F32,
                                                        TUTTI_SUM, 0, NULL));
            CHECK_OK(tutti_multimem_all_reduce(group, data, count, TUTTI_F32, TUTTI_SUM, NULL));
            expect_reduction(data, count, TUTTI_F32, TUTTI_SUM, seed, size, "multimem_all_reduce");
            int *gathered = (int *)(void *)(blocks.data[1] + shift), *mine = malloc(count * 4);
            for (size_t i = 0; i < count; i++)
                mine[i] = rank * 100000 + (int)i;
            CHECK_OK(tutti_multimem_all_gather_out(group, mine, gathered, count, TUTTI_I32, NULL));
            for (size_t i = 0; i < count * (size_t)size; i++)
                CHECK_EQ(gathered[i], (int)(i / count) * 100000 + (int)(i % count));
            memset(gathered, 0, count * (size_t)size * 4);
            CHECK_OK(tutti_barrier(group, NULL));
            CHECK_OK(tutti_low_contention_all_gather_multicast(group, mine, gathered, count, TUTTI_I32, NULL));
            for (size_t i = 0; i < count * (size_t)size; i++)
                CHECK_EQ(gathered[i], (int)(i / count) * 100000 + (int)(i % count));
            CHECK_OK(tutti_barrier(group, NULL));
            free(mine);
        }
    CHECK_STATUS(tutti_multimem_one_shot_reduce_out(group, blocks.data[0], out, 4, TUTTI_F32, TUTTI_SUM, size, NULL),
                 TUTTI_ERROR_RANGE);
    free(out);
    free_blocks(world, &blocks);
}
TEST(software_multicast_gives_the_same_bits) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(4, multimem, NULL);
    test_processes(2, multimem, NULL);
}

/* ---- all_to_all_vdev ---- */

static int row_value(int from, int to, int expert, int row) {
    return from * 1000000 + to * 10000 + expert * 1000 + row;
}

static void vdev(tutti_world *world, void *argument) {
    int experts = (int)(intptr_t)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world), slots = size * experts;
    blocks blocks = make_blocks(world);
    int *in = (int *)(void *)blocks.data[0], *out = (int *)(void *)blocks.data[1];
    int64_t *in_splits = (int64_t *)(void *)blocks.data[2], *out_splits = (int64_t *)(void *)blocks.data[3];
    tutti_rows rows = TUTTI_ROWS_INIT;
    rows.in = in;
    rows.out = out;
    rows.in_rows = rows.out_rows = 4000;
    rows.row = 3;
    rows.dtype = TUTTI_I32;
    for (int round = 0; round < 3; round++) {
        int at = 0;
        for (int to = 0; to < size; to++)
            for (int expert = 0; expert < experts; expert++) {
                int64_t count = (rank + 2 * to + 3 * expert + round) % 5; /* some are 0 */
                in_splits[to * experts + expert] = count;
                for (int i = 0; i < count; i++, at++)
                    for (int k = 0; k < 3; k++)
                        in[at * 3 + k] = row_value(rank, to, expert, i);
            }
        int64_t align = round + 1;
        if (experts == 1)
            CHECK_OK(tutti_all_to_all_vdev(group, &rows, in_splits, out_splits, NULL));
        else
            CHECK_OK(tutti_all_to_all_vdev_2d(group, &rows, experts, align, in_splits, out_splits, NULL));
        int64_t offset = 0;
        for (int expert = 0; expert < experts; expert++) {
            int64_t begin = offset;
            for (int from = 0; from < size; from++) {
                int slot = expert * size + from;
                CHECK_EQ(out_splits[slot], (from + 2 * rank + 3 * expert + round) % 5);
                CHECK_EQ(out_splits[slots + slot], offset);
                for (int i = 0; i < out_splits[slot]; i++)
                    CHECK_EQ(out[(offset + i) * 3 + 2], row_value(from, rank, expert, i));
                offset += out_splits[slot];
            }
            if (experts > 1) {
                int64_t padded = (offset - begin + align - 1) / align * align;
                offset = begin + (padded < align ? align : padded);
            }
        }
        if (experts == 1)
            continue;
        /* And the way back: everybody gets its own rows again, by rank and expert. */
        tutti_rows back = rows;
        back.in = out;
        back.out = in;
        int sent = at;
        memset(in, 0, (size_t)sent * 12);
        CHECK_OK(tutti_all_to_all_vdev_2d_offset(group, &back, experts, out_splits, in_splits, NULL));
        at = 0;
        for (int from = 0; from < size; from++)
            for (int expert = 0; expert < experts; expert++) {
                int slot = from * experts + expert;
                CHECK_EQ(in_splits[slot], (rank + 2 * from + 3 * expert + round) % 5);
                CHECK_EQ(in_splits[slots + slot], at);
                for (int i = 0; i < in_splits[slot]; i++, at++)
                    CHECK_EQ(in[at * 3], row_value(rank, from, expert, i));
            }
        CHECK_EQ(at, sent);
    }
    free_blocks(world, &blocks);
}
TEST(all_to_all_vdev_moves_rows_by_splits_that_only_the_sender_knows) {
    test_threads(1, vdev, (void *)1);
    test_threads(3, vdev, (void *)1);
    test_processes(2, vdev, (void *)1);
}
TEST(all_to_all_vdev_2d_sorts_by_expert_and_back) {
    test_threads(2, vdev, (void *)3);
    test_processes(4, vdev, (void *)2);
    test_threads(1, vdev, (void *)4);
}

TEST_WORLD(wrong_splits_are_told, 2) {
    tutti_group *group = tutti_world_group(world);
    blocks blocks = make_blocks(world);
    int64_t *splits = (int64_t *)(void *)blocks.data[2], *offsets = (int64_t *)(void *)blocks.data[3];
    tutti_rows rows = TUTTI_ROWS_INIT;
    rows.in = blocks.data[0];
    rows.out = blocks.data[1];
    rows.in_rows = 10;
    rows.out_rows = 5;
    rows.dtype = TUTTI_F32;
    splits[0] = 6;
    splits[1] = 5;
    CHECK_STATUS(tutti_all_to_all_vdev(group, &rows, splits, offsets, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("the input has 10 rows");
    splits[0] = -1;
    CHECK_STATUS(tutti_all_to_all_vdev(group, &rows, splits, offsets, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_all_to_all_vdev_2d(group, &rows, 1, 0, splits, offsets, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("major_align");
    splits[0] = 3;
    splits[1] = 2;
    CHECK_STATUS(tutti_all_to_all_vdev(group, &rows, splits, offsets, NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 0 receives 6 rows, and its output has room for 5");
    for (int i = 0; i < 4; i++)
        tutti_memory_release(blocks.memory[i]);
}

/* ---- works ---- */

TEST_WORLD(works_of_one_shot_all_reduce_copy_on_one_buffer_each_reduce_their_own_input, 2) {
    enum {
        COUNT = 8
    };
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    int64_t first[COUNT], second[COUNT], first_sum[COUNT], second_sum[COUNT];
    for (int i = 0; i < COUNT; i++) {
        first[i] = i + rank;
        second[i] = 1000 + i;
    }
    int64_t *buffer = tutti_memory_data(memory);
    CHECK_OK(tutti_one_shot_all_reduce_copy(group, buffer, COUNT, first, first_sum, COUNT, TUTTI_I64, TUTTI_SUM, NULL));
    for (int round = 0; round < 20; round++) {
        tutti_work *works[2];
        CHECK_OK(tutti_one_shot_all_reduce_copy(group, buffer, COUNT, first, first_sum, COUNT, TUTTI_I64, TUTTI_SUM,
                                                TUTTI_OPTIONS(tutti_call, .work = &works[0])));
        CHECK_OK(tutti_one_shot_all_reduce_copy(group, buffer, COUNT, second, second_sum, COUNT, TUTTI_I64, TUTTI_SUM,
                                                TUTTI_OPTIONS(tutti_call, .work = &works[1])));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tutti_work_wait(works[i], 0));
            tutti_work_release(works[i]);
        }
        for (int i = 0; i < COUNT; i++) {
            CHECK_EQ(first_sum[i], 2 * i + 1);
            CHECK_EQ(second_sum[i], 2 * (1000 + i));
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
}

/* ---- alignments ---- */

TEST_WORLD(an_alignment_that_leaves_no_room_is_told_and_overwrites_nothing, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 65536, NULL, &memory));
    int64_t *in_splits = tutti_memory_data(memory), *out_splits = in_splits + 64;
    float *in = (float *)(void *)(in_splits + 256), *out = in + 64;
    /* Four times 2^62 is 0 again: the rows of the last expert would fall on those of the first. */
    for (int i = 0; i < 10; i++)
        in_splits[i] = i % 5 == 0 || i % 5 == 4;
    tutti_rows rows = TUTTI_ROWS_INIT;
    rows.in = in;
    rows.out = out;
    rows.in_rows = rows.out_rows = 8;
    rows.row = 1;
    rows.dtype = TUTTI_F32;
    CHECK_STATUS(tutti_all_to_all_vdev_2d(group, &rows, 5, (int64_t)1 << 62, in_splits, out_splits, NULL),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("room for 8");
    tutti_memory_release(memory);
}

/* Waits for the work of a call that had nothing to do. */
static void await_nothing(tutti_status status, tutti_work **work) {
    CHECK_OK(status);
    CHECK(*work != NULL);
    CHECK_OK(tutti_work_wait(*work, 0));
    tutti_work_release(*work);
    *work = NULL;
}

TEST_WORLD(a_call_of_nothing_gives_the_work_that_it_was_asked_for, 2) {
    tutti_group *group = tutti_world_group(world);
    int value = 0;
    tutti_work *work = NULL;
    tutti_call call = { .size = sizeof call, .work = &work };
    const tutti_tile tile = { .size = sizeof tile, .data = &value };
    await_nothing(tutti_one_shot_all_reduce(group, &value, &value, 0, TUTTI_I32, TUTTI_SUM, &call), &work);
    await_nothing(tutti_one_shot_all_reduce_copy(group, &value, 0, &value, &value, 0, TUTTI_I32, TUTTI_SUM, &call),
                  &work);
    await_nothing(tutti_two_shot_all_reduce(group, &value, 0, TUTTI_I32, TUTTI_SUM, &call), &work);
    await_nothing(tutti_reduce_scatter_out(group, &value, &value, 0, 2, true, TUTTI_I32, TUTTI_SUM, &call), &work);
    await_nothing(tutti_tile_reduce(group, &tile, &tile, TUTTI_I32, TUTTI_SUM, 0, &call), &work);
    await_nothing(tutti_all_gather_offset(group, NULL, NULL, 0, NULL, TUTTI_I32, &call), &work);
    await_nothing(tutti_all_to_all_nd(group, &value, &value, 0, 0, 1, 0, TUTTI_I32, &call), &work);
    await_nothing(tutti_send(group, &value, 1, TUTTI_I32, TUTTI_NOBODY, 0, &call), &work);
}

/* ---- a rank that gives nothing ---- */

/* The named operations of `count` elements for each rank, numbered; symmetric memory, and room for the result. */
static tutti_status run_named(int number, tutti_group *group, float *in, float *out, size_t count) {
    size_t size = (size_t)tutti_group_size(group);
    switch (number) {
    case 0:
        return tutti_one_shot_all_reduce(group, in, out, count, TUTTI_F32, TUTTI_SUM, NULL);
    case 1:
        return tutti_one_shot_all_reduce_copy(group, in, in != NULL ? 64 : 0, out != NULL ? out + 64 : NULL, out, count,
                                              TUTTI_F32, TUTTI_SUM, NULL);
    case 2:
        return tutti_two_shot_all_reduce(group, in, count, TUTTI_F32, TUTTI_SUM, NULL);
    case 3:
        return tutti_reduce_scatter_out(group, in, out, 1, count * size, false, TUTTI_F32, TUTTI_SUM, NULL);
    case 4:
        return tutti_reduce_scatter_out(group, in, out, 2, count * size, true, TUTTI_F32, TUTTI_SUM, NULL);
    case 5:
        return tutti_multimem_all_reduce(group, in, count, TUTTI_F32, TUTTI_SUM, NULL);
    case 6:
        return tutti_multimem_one_shot_all_reduce(group, in, out, count, TUTTI_F32, TUTTI_SUM, NULL);
    case 7:
        return tutti_multimem_one_shot_reduce_out(group, in, out, count, TUTTI_F32, TUTTI_SUM, 0, NULL);
    case 8:
        return tutti_multimem_all_gather_out(group, out, in, count, TUTTI_F32, NULL);
    case 9:
        return tutti_low_contention_all_gather_multicast(group, out, in, count, TUTTI_F32, NULL);
    default:
        return TUTTI_ERROR_RANGE;
    }
}

#define NAMED 10

static void one_gives_nothing(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world);
    blocks blocks = make_blocks(world);
    float *in = (float *)(void *)blocks.data[0], out[128] = { 0 };
    for (int number = 0; number < NAMED; number++)
        for (int met = 0; met < 2; met++) { /* at its first use the others wait in the rendezvous */
            tutti_group *group;
            CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
            if (met != 0)
                CHECK_OK(run_named(number, group, in, out, 4));
            tutti_status status = run_named(number, group, in, out, rank == 1 ? 0 : 4);
            if (status == TUTTI_OK) /* the root of a reduction alone waits for the others in it */
                status = tutti_barrier(group, NULL);
            if (status != TUTTI_ERROR_MISMATCH)
                FAIL("operation %d, %d: %s", number, met, tutti_error_message());
            tutti_group_release(group);
        }
    free_blocks(world, &blocks);
}

TEST(one_rank_that_gives_nothing_to_a_named_operation_is_a_mismatch) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(2, one_gives_nothing, NULL);
    test_processes(3, one_gives_nothing, NULL);
}

/* When all give nothing it is a call like any other, with and without memory. */
static void all_give_nothing(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    blocks blocks = make_blocks(world);
    float out[128] = { 0 };
    for (int number = 0; number < NAMED; number++) {
        CHECK_OK(run_named(number, group, NULL, NULL, 0));
        CHECK_OK(run_named(number, group, (float *)(void *)blocks.data[0], out, 0));
        CHECK_OK(run_named(number, group, (float *)(void *)blocks.data[0], out, 4));
    }
    free_blocks(world, &blocks);
}

TEST(named_operations_of_nothing_are_calls_like_others) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(2, all_give_nothing, NULL);
    test_threads(1, all_give_nothing, NULL);
}
