/* SPDX-License-Identifier: Apache-2.0
 *
 * The moves, and the reductions that scatter: every byte arrives where it belongs, with every algorithm, in place and
 * out of place, in symmetric and private memory and any mixture of the two.
 */
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "values.h"

static const tutti_algorithm move_algorithms[] = { TUTTI_ALGORITHM_AUTO, TUTTI_ALGORITHM_ONE_SHOT,
                                                   TUTTI_ALGORITHM_PIPELINED };
static const tutti_algorithm reduce_algorithms[] = { TUTTI_ALGORITHM_AUTO, TUTTI_ALGORITHM_ONE_SHOT,
                                                     TUTTI_ALGORITHM_TWO_SHOT };

/* ---- memory of both kinds ---- */

#define BLOCK ((size_t)4 << 20)

typedef struct room {
    tutti_memory *memory;
    tutti_peers *peers;
    unsigned char *symmetric, *private;
} room;

static room make_room(tutti_world *world) {
    room made;
    CHECK_OK(tutti_memory_alloc(world, BLOCK, NULL, &made.memory));
    CHECK_OK(tutti_memory_rendezvous(made.memory, tutti_world_group(world), &made.peers));
    made.symmetric = tutti_memory_data(made.memory);
    made.private = malloc(BLOCK);
    CHECK(made.private != NULL);
    return made;
}

static void free_room(room *made) {
    tutti_peers_release(made->peers);
    tutti_memory_release(made->memory);
    free(made->private);
}

/* In turn all private, all symmetric, and two mixtures that differ between the ranks; at offsets that differ too. */
static unsigned char *pick(room *room, int kind, int rank, bool output) {
    bool symmetric = kind == 1 || (kind == 2 && rank % 2 == 0) || (kind == 3 && (rank % 2 == 0) == output);
    unsigned char *base = symmetric ? room->symmetric : room->private;
    return base + (output ? BLOCK / 2 : 0) + (symmetric ? 64 * (size_t)rank : 4);
}

static uint32_t token(int from, int to, size_t i) {
    return (uint32_t)from << 26 ^ (uint32_t)to << 20 ^ (uint32_t)(i * 2654435761u >> 12);
}

static void fill(uint32_t *to, size_t count, int from, int target) {
    for (size_t i = 0; i < count; i++)
        to[i] = token(from, target, i);
}

static void expect(const uint32_t *got, size_t count, int from, int target, const char *what, size_t total, int kind,
                   int algorithm) {
    for (size_t i = 0; i < count; i++)
        if (got[i] != token(from, target, i))
            FAIL("%s of %zu (kind %d, algorithm %d): element %zu from rank %d is %x, not %x", what, total, kind,
                 algorithm, i, from, got[i], token(from, target, i));
}

/* ---- each move ---- */

static void check_all_gather(tutti_group *group, room *room, size_t count, int kind, int in_place,
                             const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    uint32_t *out = (uint32_t *)(void *)pick(room, kind, rank, true);
    uint32_t *in = in_place == 1   ? out + (size_t)rank * count
                   : in_place == 2 ? out
                                   : (uint32_t *)(void *)pick(room, kind, rank, false);
    memset(out, 0xee, (size_t)size * count * 4);
    fill(in, count, rank, 0);
    CHECK_OK(tutti_all_gather(group, in, out, count, TUTTI_I32, call));
    for (int from = 0; from < size; from++)
        expect(out + (size_t)from * count, count, from, 0, "all_gather", count, kind, (int)call->algorithm);
}

static void check_broadcast(tutti_group *group, room *room, size_t count, int kind, int in_place,
                            const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group), root = (int)(count % (size_t)size);
    uint32_t *out = (uint32_t *)(void *)pick(room, kind, rank, true);
    uint32_t *in = in_place ? out : (uint32_t *)(void *)pick(room, kind, rank, false);
    memset(out, 0xee, count * 4);
    if (rank == root)
        fill(in, count, root, 0);
    CHECK_OK(tutti_broadcast(group, rank == root || in_place ? in : NULL, out, count, TUTTI_F32, root, call));
    expect(out, count, root, 0, "broadcast", count, kind, (int)call->algorithm);
}

static void check_gather(tutti_group *group, room *room, size_t count, int kind, int in_place, const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group), root = size - 1;
    uint32_t *out = (uint32_t *)(void *)pick(room, kind, rank, true);
    bool own = rank == root && in_place == 1;
    uint32_t *in = own                             ? out + (size_t)rank * count
                   : rank == root && in_place == 2 ? out
                                                   : (uint32_t *)(void *)pick(room, kind, rank, false);
    fill(in, count, rank, 0);
    CHECK_OK(tutti_gather(group, in, rank == root ? out : NULL, count, TUTTI_I32, root, call));
    for (int from = 0; from < size && rank == root; from++)
        expect(out + (size_t)from * count, count, from, 0, "gather", count, kind, (int)call->algorithm);
}

static void check_scatter(tutti_group *group, room *room, size_t count, int kind, int in_place,
                          const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group), root = 1 % size;
    uint32_t *in = (uint32_t *)(void *)pick(room, kind, rank, false);
    uint32_t *out = rank == root && in_place == 1   ? in + (size_t)rank * count
                    : rank == root && in_place == 2 ? in
                                                    : (uint32_t *)(void *)pick(room, kind, rank, true);
    if (rank == root)
        for (int to = 0; to < size; to++)
            fill(in + (size_t)to * count, count, root, to);
    CHECK_OK(tutti_scatter(group, rank == root ? in : NULL, out, count, TUTTI_I32, root, call));
    expect(out, count, root, rank, "scatter", count, kind, (int)call->algorithm);
}

/* Where parts change places: 0 nowhere, 1 on all ranks, 2 on even ones, 3 on odd ones. */
static bool is_in_place(int in_place, int rank) {
    return in_place == 1 || (in_place == 2 && rank % 2 == 0) || (in_place == 3 && rank % 2 == 1);
}

static void check_all_to_all(tutti_group *group, room *room, size_t count, int kind, int in_place,
                             const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    uint32_t *out = (uint32_t *)(void *)pick(room, kind, rank, true);
    uint32_t *in = is_in_place(in_place, rank) ? out : (uint32_t *)(void *)pick(room, kind, rank, false);
    for (int to = 0; to < size; to++)
        fill(in + (size_t)to * count, count, rank, to);
    CHECK_OK(tutti_all_to_all(group, in, out, count, TUTTI_I32, call));
    for (int from = 0; from < size; from++)
        expect(out + (size_t)from * count, count, from, rank, "all_to_all", count, kind, (int)call->algorithm);
}

static void check_permute(tutti_group *group, room *room, size_t count, int kind, int in_place,
                          const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    uint32_t *out = (uint32_t *)(void *)pick(room, kind, rank, true);
    uint32_t *in = is_in_place(in_place, rank) ? out : (uint32_t *)(void *)pick(room, kind, rank, false);
    int to[64];
    for (int from = 0; from < size; from++)
        to[from] = (from + 1) % size;
    memset(out, 0xee, count * 4);
    fill(in, count, rank, 0);
    CHECK_OK(tutti_permute(group, in, out, count, TUTTI_I32, to, call));
    expect(out, count, (rank + size - 1) % size, 0, "permute", count, kind, (int)call->algorithm);
}

static void check_reduce_scatter(tutti_group *group, room *room, size_t count, int kind, int in_place,
                                 const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    uint32_t *in = (uint32_t *)(void *)pick(room, kind, rank, false);
    uint32_t *out = in_place == 1   ? in + (size_t)rank * count
                    : in_place == 2 ? in
                                    : (uint32_t *)(void *)pick(room, kind, rank, true);
    for (int to = 0; to < size; to++)
        fill(in + (size_t)to * count, count, rank, to);
    CHECK_OK(tutti_reduce_scatter(group, in, out, count, TUTTI_U32, TUTTI_SUM, call));
    for (size_t i = 0; i < count; i++) {
        uint32_t sum = 0;
        for (int from = 0; from < size; from++)
            sum += token(from, rank, i);
        if (out[i] != sum)
            FAIL("reduce_scatter of %zu (kind %d, algorithm %d, in place %d): element %zu is %x, not %x", count, kind,
                 (int)call->algorithm, in_place, i, out[i], sum);
    }
}

static void check_reduce(tutti_group *group, room *room, size_t count, int kind, int in_place, const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group), root = size / 2;
    uint32_t *in = (uint32_t *)(void *)pick(room, kind, rank, false);
    uint32_t *out = in_place && rank == root ? in : (uint32_t *)(void *)pick(room, kind, rank, true);
    fill(in, count, rank, 0);
    CHECK_OK(tutti_reduce(group, in, rank == root ? out : NULL, count, TUTTI_U32, TUTTI_SUM, root, call));
    for (size_t i = 0; i < count && rank == root; i++) {
        uint32_t sum = 0;
        for (int from = 0; from < size; from++)
            sum += token(from, 0, i);
        if (out[i] != sum)
            FAIL("reduce of %zu (kind %d, algorithm %d): element %zu is %x, not %x", count, kind, (int)call->algorithm,
                 i, out[i], sum);
    }
}

static void check_all_reduce(tutti_group *group, room *room, size_t count, int kind, int in_place,
                             const tutti_call *call) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    uint32_t *in = (uint32_t *)(void *)pick(room, kind, rank, false);
    uint32_t *out = in_place ? in : (uint32_t *)(void *)pick(room, kind, rank, true);
    fill(in, count, rank, 0);
    CHECK_OK(tutti_all_reduce(group, in, out, count, TUTTI_U32, TUTTI_SUM, call));
    for (size_t i = 0; i < count; i++) {
        uint32_t sum = 0;
        for (int from = 0; from < size; from++)
            sum += token(from, 0, i);
        if (out[i] != sum)
            FAIL("all_reduce of %zu (kind %d, algorithm %d): element %zu is %x, not %x", count, kind,
                 (int)call->algorithm, i, out[i], sum);
    }
}

/* ---- all of them ---- */

typedef void check(tutti_group *, room *, size_t, int, int, const tutti_call *);
static const struct {
    check *check;
    const tutti_algorithm *algorithms;
    int in_place;
} checks[] = {
    { check_all_gather, move_algorithms, 3 },       { check_broadcast, move_algorithms, 2 },
    { check_gather, move_algorithms, 3 },           { check_scatter, move_algorithms, 3 },
    { check_all_to_all, move_algorithms, 4 },       { check_permute, move_algorithms, 4 },
    { check_reduce_scatter, reduce_algorithms, 3 }, { check_reduce, reduce_algorithms, 2 },
    { check_all_reduce, reduce_algorithms, 2 },
};

static void everything(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_world_size(world);
    room room = make_room(world);
    /* The longest makes several rounds through the larger slots. */
    size_t counts[] = { 0, 1, 5, 300, 5003, 60001, (BLOCK / 2 - 16384) / 4 / (size_t)size };
    int longest = test_sanitized() ? 4 : argument != NULL ? 5 : 7;
    for (size_t c = 0; c < sizeof checks / sizeof checks[0]; c++)
        for (int n = 0; n < longest; n++)
            for (int kind = 0; kind < 4; kind++)
                for (int a = 0; a < 3; a++)
                    for (int in_place = 0; in_place < checks[c].in_place; in_place++) {
                        if (counts[n] * (size_t)size * 4 > BLOCK / 2 - 16384 || (n >= 5 && a == 1))
                            continue;
                        tutti_call call = TUTTI_CALL_INIT;
                        call.algorithm = checks[c].algorithms[a];
                        checks[c].check(group, &room, counts[n], kind, in_place, &call);
                    }
    CHECK_OK(tutti_barrier(group, NULL));
    free_room(&room);
}

TEST(moves_arrive_where_they_belong_with_2_threads) {
    test_threads(2, everything, NULL);
}
TEST(moves_arrive_where_they_belong_with_3_processes) {
    test_processes(3, everything, NULL);
}
TEST(moves_arrive_where_they_belong_with_4_threads) {
    test_threads(4, everything, NULL);
}
TEST(moves_arrive_where_they_belong_with_7_threads) {
    test_threads(7, everything, (void *)1);
}
TEST(moves_arrive_where_they_belong_with_1_rank) {
    test_threads(1, everything, (void *)1);
}
TEST(moves_arrive_where_they_belong_with_16_threads) {
    test_threads(16, everything, (void *)1);
}

TEST(moves_arrive_where_they_belong_when_ranks_compute_with_several_threads) {
    setenv("TUTTI_THREADS", "3", 1);
    test_threads(2, everything, NULL);
    test_processes(2, everything, NULL);
}

/* ---- v-forms ---- */

static void v_forms(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    room room = make_room(world);
    for (size_t scale = 1; scale <= 4000; scale *= 20)
        for (int kind = 0; kind < 4; kind++) {
            uint32_t *in = (uint32_t *)(void *)pick(&room, kind, rank, false),
                     *out = (uint32_t *)(void *)pick(&room, kind, rank, true);
            size_t counts[16], offsets[16], in_counts[16], out_counts[16];
            size_t at = 3;
            for (int i = 0; i < size; i++) {
                counts[i] = (size_t)(i % 3) * scale; /* some have nothing */
                offsets[i] = at;
                at += counts[i] + 2;
                in_counts[i] = (size_t)((rank + 2 * i) % 4) * scale;
                out_counts[i] = (size_t)((i + 2 * rank) % 4) * scale;
            }
            fill(in, counts[rank], rank, 0);
            CHECK_OK(tutti_all_gather_v(group, in, out, counts, offsets, TUTTI_I32, NULL));
            for (int from = 0; from < size; from++)
                expect(out + offsets[from], counts[from], from, 0, "all_gather_v", scale, kind, 0);
            size_t total = 0;
            for (int to = 0; to < size; to++) {
                fill(in + total, in_counts[to], rank, to);
                total += in_counts[to];
            }
            CHECK_OK(tutti_all_to_all_v(group, in, in_counts, NULL, out, out_counts, NULL, TUTTI_I32, NULL));
            total = 0;
            for (int from = 0; from < size; from++) {
                expect(out + total, out_counts[from], from, rank, "all_to_all_v", scale, kind, 0);
                total += out_counts[from];
            }
            tutti_call one_shot = TUTTI_CALL_INIT;
            one_shot.algorithm = TUTTI_ALGORITHM_ONE_SHOT;
            memset(out, 0, total * 4);
            CHECK_OK(tutti_all_to_all_v(group, in, in_counts, NULL, out, out_counts, NULL, TUTTI_I32, &one_shot));
            total = 0;
            for (int from = 0; from < size; from++) {
                expect(out + total, out_counts[from], from, rank, "all_to_all_v", scale, kind, 2);
                total += out_counts[from];
            }
            total = 0;
            for (int to = 0; to < size; to++) {
                fill(in + total, counts[to], rank, to);
                total += counts[to];
            }
            CHECK_OK(tutti_reduce_scatter_v(group, in, out, counts, TUTTI_U32, TUTTI_SUM, NULL));
            for (size_t i = 0; i < counts[rank]; i++) {
                uint32_t sum = 0;
                for (int from = 0; from < size; from++)
                    sum += token(from, rank, i);
                CHECK_EQ(out[i], sum);
            }
        }
    CHECK_OK(tutti_barrier(group, NULL));
    free_room(&room);
}

TEST(v_forms_with_empty_parts_arrive_where_they_belong) {
    test_threads(2, v_forms, NULL);
    test_processes(3, v_forms, NULL);
    test_threads(5, v_forms, NULL);
}

static void odd_permutations(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    int in[2] = { rank, 10 * rank }, out[4] = { -1, -1, -1, -1 };
    const int to[3] = { 2, -1, 2 }; /* rank 2 gets two, the others none */
    CHECK_OK(tutti_permute(group, in, out, 2, TUTTI_I32, to, NULL));
    CHECK_EQ(out[0], rank == 2 ? 0 : -1);
    CHECK_EQ(out[2], rank == 2 ? 2 : -1);
    CHECK_EQ(out[3], rank == 2 ? 20 : -1);
}
TEST_WORLD(a_rank_that_several_send_to_gets_their_inputs_in_rank_order, 3) {
    odd_permutations(world, argument);
}

static void symmetric_is_used_in_place(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    room room = make_room(world);
    memset(room.symmetric, 0, BLOCK);
    CHECK_OK(tutti_all_reduce(group, room.symmetric, room.symmetric, 100000, TUTTI_F32, TUTTI_SUM, NULL));
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(group, &ran));
    CHECK_EQ(ran.algorithm, TUTTI_ALGORITHM_TWO_SHOT);
    CHECK_EQ(ran.direct_inputs, 2);
    CHECK_EQ(ran.direct_outputs, 2);
    CHECK(strstr(ran.why, "built-in table") != NULL && strstr(ran.why, "400000 bytes") != NULL);
    CHECK_TEXT(ran.operation, "all_reduce");
    CHECK_OK(tutti_barrier(group, NULL));
    free_room(&room);
}
TEST_WORLD(which_algorithm_ran_and_why_can_be_asked, 2) {
    symmetric_is_used_in_place(world, argument);
}
