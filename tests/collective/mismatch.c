/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that disagree: in every field, with every algorithm, the call fails on every rank, with both sides in the
 * message, and the group has ended. And arguments that are wrong on one rank alone, which end nothing.
 */
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/named.h>
#include <tutti/peers.h>

#include "values.h"

typedef struct disagreement {
    const char *one, *other; /* fragments that every rank's message must contain */
    const char *field;
    tutti_status (*call)(tutti_group *group, bool differs, float *in, float *out);
} disagreement;

#define LONG 40000

static tutti_status reduce_of(tutti_group *group, float *in, float *out, size_t count, tutti_algorithm algorithm) {
    return tutti_all_reduce(group, in, out, count, TUTTI_F32, TUTTI_SUM,
                            TUTTI_OPTIONS(tutti_call, .algorithm = algorithm));
}

static tutti_status counts_inline(tutti_group *group, bool differs, float *in, float *out) {
    return reduce_of(group, in, out, differs ? 3 : 4, TUTTI_ALGORITHM_AUTO);
}
static tutti_status counts_one_shot(tutti_group *group, bool differs, float *in, float *out) {
    return reduce_of(group, in, out, differs ? 301 : 300, TUTTI_ALGORITHM_ONE_SHOT);
}
static tutti_status counts_two_shot(tutti_group *group, bool differs, float *in, float *out) {
    return reduce_of(group, in, out, differs ? LONG - 1 : LONG, TUTTI_ALGORITHM_TWO_SHOT);
}
static tutti_status algorithms(tutti_group *group, bool differs, float *in, float *out) {
    return reduce_of(group, in, out, 100, differs ? TUTTI_ALGORITHM_TWO_SHOT : TUTTI_ALGORITHM_ONE_SHOT);
}
static tutti_status dtypes(tutti_group *group, bool differs, float *in, float *out) {
    return tutti_all_reduce(group, in, out, 10, differs ? TUTTI_I32 : TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status reductions(tutti_group *group, bool differs, float *in, float *out) {
    return tutti_all_reduce(group, in, out, 10, TUTTI_F32, differs ? TUTTI_MAX : TUTTI_SUM, NULL);
}
static tutti_status operations(tutti_group *group, bool differs, float *in, float *out) {
    return differs ? tutti_barrier(group, NULL) : tutti_all_reduce(group, in, out, 10, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status order(tutti_group *group, bool differs, float *in, float *out) {
    tutti_status status = differs ? tutti_all_gather(group, in, out, 10, TUTTI_F32, NULL)
                                  : tutti_all_reduce(group, in, out, 10, TUTTI_F32, TUTTI_SUM, NULL);
    if (status != TUTTI_OK)
        return status;
    return differs ? tutti_all_reduce(group, in, out, 10, TUTTI_F32, TUTTI_SUM, NULL)
                   : tutti_all_gather(group, in, out, 10, TUTTI_F32, NULL);
}
static tutti_status roots(tutti_group *group, bool differs, float *in, float *out) {
    tutti_status status = tutti_broadcast(group, in, out, 10, TUTTI_F32, differs ? 1 : 0, NULL);
    /* A root has left by then: it fails at its next call. */
    return status != TUTTI_OK ? status : tutti_barrier(group, NULL);
}
static tutti_status long_roots(tutti_group *group, bool differs, float *in, float *out) {
    tutti_status status = tutti_reduce(group, in, out, LONG, TUTTI_F32, TUTTI_SUM, differs ? 2 : 1, NULL);
    return status != TUTTI_OK ? status : tutti_barrier(group, NULL);
}
static tutti_status splits(tutti_group *group, bool differs, float *in, float *out) {
    size_t in_counts[3] = { 2, 2, 2 }, out_counts[3] = { 2, 2, 2 };
    if (differs)
        in_counts[0] = 5; /* rank 0 expects 2 from it */
    return tutti_all_to_all_v(group, in, in_counts, NULL, out, out_counts, NULL, TUTTI_F32, NULL);
}
static tutti_status lists(tutti_group *group, bool differs, float *in, float *out) {
    size_t counts[3] = { differs ? 4 : 5, 5, differs ? 6 : 5 };
    return tutti_all_gather_v(group, in, out, counts, NULL, TUTTI_F32, NULL);
}
static tutti_status targets(tutti_group *group, bool differs, float *in, float *out) {
    int to[3] = { 1, 2, 0 }, other[3] = { 1, 0, 2 };
    tutti_status status = tutti_permute(group, in, out, 5, TUTTI_F32, differs ? other : to, NULL);
    return status != TUTTI_OK ? status : tutti_barrier(group, NULL);
}
static tutti_status gathers(tutti_group *group, bool differs, float *in, float *out) {
    return tutti_all_gather(group, in, out, differs ? 9000 : 8000, TUTTI_F32, NULL);
}

static const disagreement disagreements[] = {
    { "4 elements", "3 elements", "count", counts_inline },
    { "300 elements", "301 elements", "count", counts_one_shot },
    { "40000 elements", "39999 elements", "count", counts_two_shot },
    { "one_shot", "two_shot", "algorithm", algorithms },
    { "f32", "i32", "dtype", dtypes },
    { "sum", "max", "reduction", reductions },
    { "all_reduce", "barrier", "operation", operations },
    { "all_reduce", "all_gather", "operation", order },
    { "root 0", "root 1", "root", roots },
    { "root 1", "root 2", "root", long_roots },
    { "sends 5 elements to rank 0", "expects 2", "", splits },
    { "all_gather_v", "15 elements", "counts of the ranks", lists },
    { "permute", "permute", "destinations", targets },
    { "8000 elements", "9000 elements", "count", gathers },
};

static void disagree(tutti_world *world, void *argument) {
    const disagreement *disagreement = argument;
    tutti_group *group = tutti_world_group(world);
    float *in = calloc(3 * LONG, 4), *out = calloc(3 * LONG, 4);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status = disagreement->call(group, tutti_world_rank(world) == 2, in, out);
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE(disagreement->one);
    CHECK_MESSAGE(disagreement->other);
    CHECK_MESSAGE(disagreement->field);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.status, TUTTI_ERROR_MISMATCH);
    CHECK(info.at_fault_count > 0);
    /* The group has ended: the same cause again, at once. */
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE(disagreement->one);
    free(in);
    free(out);
}

TEST(every_disagreement_fails_on_every_rank_as_threads) {
    for (size_t i = 0; i < sizeof disagreements / sizeof disagreements[0]; i++)
        test_threads(3, disagree, (void *)(uintptr_t)&disagreements[i]);
}

TEST(every_disagreement_fails_on_every_rank_as_processes) {
    for (size_t i = 0; i < sizeof disagreements / sizeof disagreements[0]; i++)
        test_processes(3, disagree, (void *)(uintptr_t)&disagreements[i]);
}

/* As the very first collective of the group, in which a root leaves before it has seen anybody. */
static void disagree_first(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    bool differs = tutti_world_rank(world) == 1;
    float in[30] = { 0 }, out[30];
    tutti_status status;
    if (argument == NULL)
        status = tutti_broadcast(group, in, out, 10, TUTTI_F32, differs, NULL);
    else
        status = tutti_scatter(group, in, out, 10, TUTTI_F32, tutti_world_rank(world), NULL);
    for (int i = 0; i < 3 && status == TUTTI_OK; i++)
        status = tutti_barrier(group, NULL);
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    /* Both sides are shown. Where three ranks have three roots, any two of them are right. */
    int roots = 0;
    for (const char *at = tutti_error_message(); (at = strstr(at, "root ")) != NULL; at++)
        roots |= at[5] >= '0' && at[5] <= '2' ? 1 << (at[5] - '0') : 0;
    CHECK((roots & (roots - 1)) != 0);
}

TEST(roots_that_differ_in_the_first_collective_fail_on_every_rank) {
    test_threads(3, disagree_first, NULL);
    test_processes(3, disagree_first, NULL);
    test_threads(3, disagree_first, "scatter");
    test_processes(2, disagree_first, "scatter");
}

TEST_WORLD(wrong_arguments_are_named_and_end_nothing, 2) {
    tutti_group *group = tutti_world_group(world);
    float in[20] = { 0 }, out[20];
    CHECK_STATUS(tutti_all_reduce(NULL, in, out, 1, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("group");
    CHECK_STATUS(tutti_all_reduce(group, NULL, out, 1, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("`in`");
    CHECK_STATUS(tutti_all_reduce(group, in, NULL, 1, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("`out`");
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, (tutti_dtype)TUTTI_SUM, (tutti_reduction)TUTTI_F32, NULL),
                 TUTTI_ERROR_TYPE);
    CHECK_MESSAGE("swapped");
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, (tutti_dtype)(256 + TUTTI_F32), TUTTI_SUM, NULL),
                 TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, TUTTI_F32, (tutti_reduction)(256 + TUTTI_SUM), NULL),
                 TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, TUTTI_F32, TUTTI_BXOR, NULL), TUTTI_ERROR_TYPE);
    CHECK_MESSAGE("bxor is not defined for f32");
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, TUTTI_C64, TUTTI_MAX, NULL), TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, TUTTI_F32, TUTTI_PREMUL_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("factor");
    CHECK_STATUS(tutti_all_reduce(group, in, in + 1, 5, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlap");
    CHECK_STATUS(tutti_all_reduce(group, in, out, SIZE_MAX / 2, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_broadcast(group, in, out, 1, TUTTI_F32, 2, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("root 2 must be in [0, 2)");
    CHECK_STATUS(tutti_broadcast(group, in, out, 1, TUTTI_F32, -1, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_all_gather_v(group, in, out, NULL, NULL, TUTTI_F32, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_permute(group, in, out, 1, TUTTI_F32, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    int to[2] = { 0, 2 };
    CHECK_STATUS(tutti_permute(group, in, out, 1, TUTTI_F32, to, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("to[1] is 2");
    tutti_call call = TUTTI_CALL_INIT;
    call.timeout_ns = -1;
    CHECK_STATUS(tutti_barrier(group, &call), TUTTI_ERROR_ARGUMENT);
    call = (tutti_call){ .size = 0 };
    CHECK_STATUS(tutti_barrier(group, &call), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL));
    call = (tutti_call)TUTTI_CALL_INIT;
    call.algorithm = TUTTI_ALGORITHM_PIPELINED;
    CHECK_STATUS(tutti_all_reduce(group, in, out, 1, TUTTI_F32, TUTTI_SUM, &call), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("all_reduce has no algorithm pipelined");
    call.algorithm = TUTTI_ALGORITHM_INLINE;
    CHECK_STATUS(tutti_all_reduce(group, in, out, 20, TUTTI_F32, TUTTI_SUM, &call), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("cache line");
    call.algorithm = (tutti_algorithm)99;
    CHECK_STATUS(tutti_barrier(group, &call), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(a_fake_group_moves_nothing_and_checks_its_arguments) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    int in[4] = { 5, 6, 7, 8 }, out[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
    CHECK_OK(tutti_all_gather(group, in, out, 2, TUTTI_I32, NULL));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(out[i], 5 + i % 2); /* the input in every slot */
    out[0] = 99;
    CHECK_OK(tutti_all_reduce(group, in, out, 4, TUTTI_I32, TUTTI_SUM, NULL));
    CHECK_OK(tutti_broadcast(group, in, out, 4, TUTTI_I32, 0, NULL));
    CHECK_OK(tutti_reduce_scatter(group, in, out, 1, TUTTI_I32, TUTTI_SUM, NULL));
    CHECK_OK(tutti_all_to_all(group, in, out, 1, TUTTI_I32, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_send(group, in, 4, TUTTI_I32, 2, 0, NULL));
    CHECK_OK(tutti_recv(group, out, 4, TUTTI_I32, 2, 0, NULL));
    CHECK_EQ(out[0], 99);
    CHECK_STATUS(tutti_all_reduce(group, in, out, 4, TUTTI_I32, (tutti_reduction)0, NULL), TUTTI_ERROR_TYPE);
    tutti_work *work;
    bool finished = false;
    CHECK_OK(tutti_all_reduce(group, in, out, 4, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_work_test(work, &finished));
    CHECK(finished);
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_OK(tutti_world_close(world));
    tutti_fake_options options = TUTTI_FAKE_OPTIONS_INIT;
    options.error_on_collective = true;
    CHECK_OK(tutti_world_open_fake(0, 2, &options, &world));
    CHECK_STATUS(tutti_barrier(tutti_world_group(world), NULL), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("FakeProcessGroup collective operation error");
    CHECK_OK(tutti_send(tutti_world_group(world), in, 1, TUTTI_I32, 1, 0, NULL));
    CHECK_OK(tutti_world_close(world));
}

/* Nothing for anybody on all ranks is fine; on one of them alone it is a mistake, which nobody waits for. */
TEST_WORLD(a_tile_that_is_empty_on_one_rank_alone_is_told_at_once, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    float *data = tutti_memory_data(memory), out[16];
    tutti_tile in = { .size = sizeof in, .data = data, .rows = 0, .columns = 4 };
    tutti_tile into = { .size = sizeof into, .data = out, .rows = 0, .columns = 4 };
    tutti_work *work;
    for (int round = 0; round < 3; round++)
        CHECK_OK(tutti_tile_reduce(group, &in, &into, TUTTI_F32, TUTTI_SUM, 0, NULL));
    CHECK_OK(tutti_tile_reduce(group, &in, &into, TUTTI_F32, TUTTI_SUM, 0, TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_OK(tutti_barrier(group, NULL));
    in.rows = into.rows = rank == 1 ? 0 : 4;
    CHECK_STATUS(tutti_tile_reduce(group, &in, &into, TUTTI_F32, TUTTI_SUM, 0, NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("tile_reduce");
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}
