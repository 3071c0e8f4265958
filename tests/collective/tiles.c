/* SPDX-License-Identifier: Apache-2.0
 *
 * Tiles: what a rank takes of symmetric matrices of all ranks, against the serial loop; what stays as it was, and what
 * is refused. Runs on memory of the CPU, or of the backend that TEST_BACKEND names.
 */
#include <tutti/named.h>

#include "../backends.h"
#include "values.h"

#define BLOCK ((size_t)1 << 20)

/* One rank's two blocks: inputs and outputs. */
typedef struct place {
    tutti_peers *in, *out;
    tutti_memory *memory[2];
    tutti_group *group;
    int rank, size;
    uint64_t seed;
} place;

static place begin_place(tutti_world *world) {
    place made = { .group = tutti_world_group(world),
                   .rank = tutti_world_rank(world),
                   .size = tutti_world_size(world) };
    backends_begin(world);
    made.in = backends_meet(world, made.group, BLOCK, &made.memory[0]);
    made.out = backends_meet(world, made.group, BLOCK, &made.memory[1]);
    return made;
}

static void end_place(place *place) {
    CHECK_OK(tutti_group_check(place->group));
    backends_settle();
    CHECK_OK(tutti_barrier(place->group, NULL));
    tutti_peers_release(place->in);
    tutti_peers_release(place->out);
    tutti_memory_release(place->memory[0]);
    tutti_memory_release(place->memory[1]);
}

/* New numbers in the input, from `offset` on; what the output had is overwritten. */
static void fill(place *place, size_t offset, size_t count, tutti_dtype dtype) {
    size_t bytes = count * tutti_dtype_size(dtype);
    unsigned char *values = malloc(BLOCK);
    CHECK_OK(tutti_barrier(place->group, NULL)); /* nobody reads it any more */
    values_fill(values, count, dtype, ++place->seed, place->rank);
    CHECK_OK(tutti_peers_put(place->in, place->rank, offset, values, bytes, backends_call()));
    memset(values, 0x5a, BLOCK);
    CHECK_OK(tutti_peers_put(place->out, place->rank, 0, values, BLOCK, backends_call()));
    backends_settle();
    free(values);
}

static unsigned char *at(tutti_peers *peers, size_t offset) {
    return (unsigned char *)tutti_peers_buffer(peers, tutti_peers_rank(peers)) + offset;
}

static unsigned char *read_out(const place *place) {
    unsigned char *values = malloc(BLOCK);
    CHECK_OK(tutti_peers_get(place->out, place->rank, 0, values, BLOCK, backends_call()));
    backends_settle();
    return values;
}

/* The input of all ranks, reduced; to be freed. */
static unsigned char *reduced(const place *place, size_t count, tutti_dtype dtype, tutti_reduction reduction) {
    unsigned char *expected = malloc(count * 16 + 16);
    values_reduce(expected, count, dtype, reduction, place->seed, place->size);
    return expected;
}

static unsigned char *given(const place *place, size_t count, tutti_dtype dtype, int rank) {
    unsigned char *expected = malloc(count * 16 + 16);
    values_fill(expected, count, dtype, place->seed, rank);
    return expected;
}

/* A tile of the output against one of a matrix; `columns` elements of each row, whatever lies between is untouched. */
static void expect_tile(const unsigned char *out, size_t out_stride, const unsigned char *matrix, size_t stride,
                        size_t rows, size_t columns, tutti_dtype dtype, tutti_reduction reduction, const char *what) {
    size_t element = tutti_dtype_size(dtype);
    for (size_t row = 0; row < rows; row++) {
        values_compare(out + row * out_stride * element, matrix + row * stride * element, columns, dtype, what,
                       reduction, 0);
        for (size_t i = columns * element; row + 1 < rows && i < out_stride * element; i++)
            CHECK_EQ(out[row * out_stride * element + i], 0x5a);
    }
}

static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F64, TUTTI_I32, TUTTI_C64, TUTTI_F8_E4M3 };

static void reduce_a_tile(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        for (int root = 0; root < place.size; root++) {
            tutti_reduction reduction = i == 3 ? TUTTI_MAX : root == 0 ? TUTTI_AVG : TUTTI_SUM;
            size_t element = tutti_dtype_size(dtypes[i]), stride = 70 + i % 2, rows = 40 + i, columns = 64 - i % 3;
            size_t from = 4096 + 16 * i, skipped = 2 * stride + i % 3;
            tutti_tile in = TUTTI_TILE_INIT, out = TUTTI_TILE_INIT;
            if (reduction == TUTTI_AVG && dtypes[i] == TUTTI_C64)
                reduction = TUTTI_SUM;
            fill(&place, from, (rows + 2) * stride, dtypes[i]);
            in.data = at(place.in, from + skipped * element);
            in.rows = out.rows = rows;
            in.columns = out.columns = columns;
            in.stride = stride;
            out.data = at(place.out, 64);
            out.stride = root == 1 ? 0 : 65;
            CHECK_OK(tutti_tile_reduce(place.group, &in, place.rank == root ? &out : NULL, dtypes[i], reduction, root,
                                       backends_call()));
            unsigned char *got = read_out(&place), *all = reduced(&place, (rows + 2) * stride, dtypes[i], reduction);
            if (place.rank == root)
                expect_tile(got + 64, root == 1 ? columns : 65, all + skipped * element, stride, rows, columns,
                            dtypes[i], reduction, "tile_reduce");
            for (size_t j = 0; j < 64; j++)
                CHECK_EQ(got[j], 0x5a);
            if (place.rank != root)
                CHECK_EQ(got[64], 0x5a);
            free(got);
            free(all);
        }
    }
    end_place(&place);
}

/* More tiles than ranks: some rank is the root of several, and the last of none when there are enough. */
static void reduce_tiles_of_several_roots(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    enum {
        TILES = 3
    };
    const int roots[TILES] = { 1 % place.size, 0, 0 };
    tutti_tile in[TILES], out[TILES];
    const tutti_tile *ins[TILES], *outs[TILES];
    fill(&place, 0, 64 * 128, TUTTI_F32);
    for (int i = 0; i < TILES; i++) {
        tutti_tile_init(&in[i], sizeof in[i]);
        tutti_tile_init(&out[i], sizeof out[i]);
        in[i].data = at(place.in, (size_t)(i * 40) * sizeof(float));
        in[i].rows = out[i].rows = 10 + (size_t)i;
        in[i].columns = out[i].columns = 32;
        in[i].stride = 128;
        out[i].data = at(place.out, (size_t)i * 65536);
        ins[i] = &in[i];
        outs[i] = &out[i];
    }
    CHECK_OK(tutti_multi_root_tile_reduce(place.group, ins, outs, roots, TILES, TUTTI_F32, TUTTI_SUM, backends_call()));
    unsigned char *got = read_out(&place), *all = reduced(&place, 64 * 128, TUTTI_F32, TUTTI_SUM);
    for (int i = 0; i < TILES; i++) {
        if (roots[i] == place.rank)
            expect_tile(got + i * 65536, 32, all + (size_t)(i * 40) * sizeof(float), 128, in[i].rows, 32, TUTTI_F32,
                        TUTTI_SUM, "multi_root_tile_reduce");
        else
            CHECK_EQ(got[i * 65536], 0x5a);
    }
    free(got);
    free(all);
    CHECK_OK(tutti_multi_root_tile_reduce(place.group, NULL, NULL, NULL, 0, TUTTI_F32, TUTTI_SUM, backends_call()));
    end_place(&place);
}

static void scatter_by_offsets(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    const size_t rows = 30, columns = 50, stride = 52;
    for (int dim = 0; dim < 2; dim++) {
        const size_t ends[4] = { 5, 5, 17, dim == 0 ? rows : columns };
        const int targets[4] = { place.size - 1, 0, 0, place.size - 1 };
        for (int round = 0; round < 2; round++) {
            tutti_tile in = TUTTI_TILE_INIT;
            void *out[4] = { at(place.out, 0), at(place.out, 100000), at(place.out, 200000), at(place.out, 300000) };
            fill(&place, 256, rows * stride, TUTTI_F32);
            in.data = at(place.in, 256);
            in.rows = rows;
            in.columns = columns;
            in.stride = stride;
            CHECK_OK(tutti_reduce_scatter_offset(place.group, &in, dim, ends, round == 0 ? targets : NULL, 4, out,
                                                 TUTTI_F32, TUTTI_SUM, backends_call()));
            unsigned char *got = read_out(&place), *all = reduced(&place, rows * stride, TUTTI_F32, TUTTI_SUM);
            size_t begins = 0, mine = 0;
            for (int i = 0; i < 4; begins = ends[i++]) {
                int target = round == 0 ? targets[i] : i % place.size;
                size_t wide = dim == 0 ? columns : ends[i] - begins, high = dim == 0 ? ends[i] - begins : rows;
                if (target == place.rank)
                    expect_tile(got + 100000 * mine++, wide, all + begins * (dim == 0 ? stride : 1) * sizeof(float),
                                stride, wide == 0 ? 0 : high, wide, TUTTI_F32, TUTTI_SUM, "reduce_scatter_offset");
            }
            free(got);
            free(all);
        }
    }
    end_place(&place);
}

static void gather_shares_of_parameters(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    enum {
        MANY = 70 /* more than one launch takes */
    };
    size_t counts[MANY], total = 0, begins = 0;
    void *out[MANY];
    for (int i = 0; i < MANY; i++) {
        counts[i] = i == 3 ? 0 : 1 + (size_t)(i * 37 % 91);
        out[i] = at(place.out, total * (size_t)place.size * sizeof(uint16_t));
        total += counts[i];
    }
    fill(&place, 32, total, TUTTI_BF16);
    CHECK_OK(tutti_all_gather_offset(place.group, at(place.in, 32), counts, MANY, out, TUTTI_BF16, backends_call()));
    unsigned char *got = read_out(&place);
    for (int rank = 0; rank < place.size; rank++) {
        unsigned char *theirs = given(&place, total, TUTTI_BF16, rank);
        begins = 0;
        for (int i = 0; i < MANY; begins += counts[i++])
            CHECK(memcmp(got + (begins * (size_t)place.size + (size_t)rank * counts[i]) * 2, theirs + begins * 2,
                         counts[i] * 2) == 0);
        free(theirs);
    }
    free(got);
    end_place(&place);
}

/* There and back again gives what there was; there, columns have been dealt out. */
static void exchange_dimensions(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    size_t size = (size_t)place.size, rows = 7, columns = 3 * size, item = 5, share = columns / size * item;
    size_t count = rows * columns * item;
    fill(&place, 0, count, TUTTI_F32);
    CHECK_OK(tutti_all_to_all_nd(place.group, at(place.in, 0), at(place.out, 0), rows, columns, item, 1, TUTTI_F32,
                                 backends_call()));
    unsigned char *got = read_out(&place);
    for (int rank = 0; rank < place.size; rank++) {
        unsigned char *theirs = given(&place, count, TUTTI_F32, rank);
        for (size_t row = 0; row < rows; row++)
            CHECK(memcmp(got + ((size_t)rank * rows + row) * share * 4,
                         theirs + (row * columns * item + (size_t)place.rank * share) * 4, share * 4) == 0);
        free(theirs);
    }
    CHECK_OK(tutti_barrier(place.group, NULL)); /* the output becomes the input of the way back */
    CHECK_OK(tutti_all_to_all_nd(place.group, at(place.out, 0), at(place.in, 65536), rows * size, columns / size, item,
                                 0, TUTTI_F32, backends_call()));
    unsigned char *own = given(&place, count, TUTTI_F32, place.rank);
    CHECK_OK(tutti_peers_get(place.in, place.rank, 65536, got, count * 4, backends_call()));
    backends_settle();
    CHECK(memcmp(got, own, count * 4) == 0);
    free(own);
    free(got);
    end_place(&place);
}

static void take_tiles_as_a_work(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    tutti_tile in = TUTTI_TILE_INIT, out = TUTTI_TILE_INIT;
    tutti_work *work;
    tutti_call call = *backends_call();
    fill(&place, 0, 4096, TUTTI_F32);
    in.data = at(place.in, 0);
    out.data = at(place.out, 0);
    in.rows = out.rows = 16;
    in.columns = out.columns = 256;
    call.work = &work;
    CHECK_OK(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, 0, &call));
    memset(&in, 0, sizeof in); /* the caller's again */
    memset(&out, 0, sizeof out);
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    unsigned char *got = read_out(&place), *all = reduced(&place, 4096, TUTTI_F32, TUTTI_SUM);
    if (place.rank == 0)
        expect_tile(got, 256, all, 256, 16, 256, TUTTI_F32, TUTTI_SUM, "a work");
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(place.group, &ran));
    CHECK_TEXT(ran.operation, "tile_reduce");
    free(got);
    free(all);
    end_place(&place);
}

static void refuse(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    tutti_tile in = TUTTI_TILE_INIT, out = TUTTI_TILE_INIT;
    float private[16];
    void *outs[1] = { at(place.out, 0) };
    in.data = at(place.in, 0);
    in.rows = out.rows = 4;
    in.columns = out.columns = 4;
    out.data = at(place.out, 0);
    CHECK_STATUS(tutti_tile_reduce(NULL, &in, &out, TUTTI_F32, TUTTI_SUM, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_tile_reduce(place.group, NULL, &out, TUTTI_F32, TUTTI_SUM, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, (tutti_dtype)99, TUTTI_SUM, 0, NULL), TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_BAND, 0, NULL), TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, place.size, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_PREMUL_SUM, 0, NULL),
                 TUTTI_ERROR_UNSUPPORTED);
    in.stride = 3;
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlap");
    in.stride = (size_t)1 << 62;
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, 0, NULL), TUTTI_ERROR_RANGE);
    in.stride = 0;
    const tutti_tile vast = {
        .size = sizeof vast, .data = in.data, .rows = (size_t)1 << 31, .columns = (size_t)1 << 31
    };
    const tutti_tile *const vasts[] = { &vast, &vast, &vast, &vast }; /* 2^64 elements together */
    CHECK_STATUS(
        tutti_multi_root_tile_reduce(place.group, vasts, vasts, (int[]){ 1, 1, 1, 1 }, 4, TUTTI_U8, TUTTI_SUM, NULL),
        TUTTI_ERROR_RANGE);
    out.data = in.data;
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, place.rank, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlap");
    in.data = private;
    out.data = at(place.out, 0);
    CHECK_STATUS(tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("no symmetric memory");
    in.data = at(place.in, 0);
    CHECK_STATUS(
        tutti_reduce_scatter_offset(place.group, &in, 2, (size_t[]){ 4 }, NULL, 1, outs, TUTTI_F32, TUTTI_SUM, NULL),
        TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(
        tutti_reduce_scatter_offset(place.group, &in, 0, (size_t[]){ 5 }, NULL, 1, outs, TUTTI_F32, TUTTI_SUM, NULL),
        TUTTI_ERROR_RANGE);
    CHECK_STATUS(
        tutti_reduce_scatter_offset(place.group, &in, 0, (size_t[]){ 4, 3 }, NULL, 2, outs, TUTTI_F32, TUTTI_SUM, NULL),
        TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_all_gather_offset(place.group, in.data, (size_t[]){ SIZE_MAX / 2 }, 1, outs, TUTTI_F32, NULL),
                 TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_all_gather_offset(place.group, in.data, (size_t[]){ 4 }, 1, (void *[]){ NULL }, TUTTI_F32, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_all_to_all_nd(place.group, in.data, outs[0], (size_t)place.size + 1, 4, 1, 0, TUTTI_F32, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_all_to_all_nd(place.group, in.data, outs[0], 4, 4, 1, 2, TUTTI_F32, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_all_to_all_nd(place.group, in.data, outs[0], 0, 0, 1, 0, TUTTI_F32, NULL));
    end_place(&place); /* none of it has ended anything */
}

/* Tiles at different places: nobody would be told, and everybody is. */
static void differ(tutti_world *world, void *argument) {
    (void)argument;
    place place = begin_place(world);
    tutti_tile in = TUTTI_TILE_INIT, out = TUTTI_TILE_INIT;
    in.data = at(place.in, place.rank == 1 ? 64 : 0);
    in.rows = out.rows = 4;
    in.columns = out.columns = 4;
    out.data = at(place.out, 0);
    tutti_status status = tutti_tile_reduce(place.group, &in, &out, TUTTI_F32, TUTTI_SUM, 0, backends_call());
    while (status == TUTTI_OK) /* a stream finds out later */
        status = tutti_group_check(place.group);
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    tutti_peers_release(place.in);
    tutti_peers_release(place.out);
    tutti_memory_release(place.memory[0]);
    tutti_memory_release(place.memory[1]);
}

TEST_BACKENDS(a_tile_is_reduced_into_the_roots_output, reduce_a_tile)
TEST_BACKENDS(tiles_of_several_roots_are_reduced_at_once, reduce_tiles_of_several_roots)
TEST_BACKENDS(parts_by_offsets_along_both_dimensions_go_to_their_ranks, scatter_by_offsets)
TEST_BACKENDS(shares_of_many_parameters_become_whole_parameters, gather_shares_of_parameters)
TEST_BACKENDS(rows_and_columns_change_places_and_back, exchange_dimensions)
TEST_BACKENDS(tiles_can_be_taken_as_a_work, take_tiles_as_a_work)
TEST_BACKENDS(what_is_no_tile_is_refused_and_ends_nothing, refuse)
TEST_BACKENDS(tiles_at_different_places_are_a_mismatch, differ)
