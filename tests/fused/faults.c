/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused operations when something goes wrong: calls that differ, ranks that die or do not come, memory that is not
 * there. Everybody is told, nobody hangs.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include <tutti/fault.h>

#include "fused/workspace.h"
#include "support.h"

#define MINUTE ((int64_t)60 * 1000000000)

/* ---- calls that differ ---- */

TEST_WORLD(shards_that_differ_are_told_on_every_rank_and_end_nothing, 3) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1), *x = whole(tt_shape(6, 4), TUTTI_F32, rank);
    for (int round = 0; round < 3; round++) {
        tt_tensor *longer = whole(tt_shape(rank == 1 ? 9 : 6, 4), TUTTI_F32, rank);
        FAILS(tt_fused_all_gather_matmul(longer, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_MISMATCH,
              "rank 0 calls fused_all_gather_matmul along dimension 0 of f32 [6, 4], but rank 1 calls "
              "fused_all_gather_matmul along dimension 0 of f32 [9, 4]");
        tutti_dtype dtype = rank == 2 ? TUTTI_F64 : TUTTI_F32;
        FAILS(tt_fused_all_gather_matmul(tt_to(x, dtype), tt_tensors(tt_to(right, dtype)), 0, group, NULL),
              TUTTI_ERROR_MISMATCH, "but rank 2 calls fused_all_gather_matmul along dimension 0 of f64");
        FAILS(tt_fused_matmul_reduce_scatter(longer, right, TUTTI_SUM, 0, group), TUTTI_ERROR_MISMATCH,
              "into f32 [3, 6]");
        FAILS(tt_fused_matmul_reduce_scatter(x, right, rank == 0 ? TUTTI_AVG : TUTTI_SUM, 0, group),
              TUTTI_ERROR_MISMATCH, "rank 0 calls fused_matmul_reduce_scatter avg");
        FAILS(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, rank == 0 ? 1 : 0, group), TUTTI_ERROR_MISMATCH,
              "along dimension 1");
        /* one half against the other, with tiles under way from some ranks and not from others */
        if (rank == 1)
            FAILS(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group), TUTTI_ERROR_MISMATCH, "fused_all");
        else
            FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_MISMATCH, "fused_mat");
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(x, right, 0, group)));
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group),
                       tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, group)));
    }
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_WORLD(shards_may_have_another_name_on_each_rank, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1), *x = whole(tt_shape(6, 4), TUTTI_F32, rank),
              *one = tt_full(tt_shape(1), 1, TUTTI_F32, NULL);
    tt_set_name(x, rank == 0 ? "left half" : "right half");
    tt_set_name(one, rank == 0 ? "of the left" : "of the right");
    CHECK_EQ(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).count, 1);
    CHECK_EQ(tt_fused_all_gather_scaled_matmul(x, tt_tensors(right), one, tt_tensors(one), 0, group, NULL, NULL).count,
             1);
    CHECK(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group) != NULL);
    END;
}

static tutti_status look_away(void *argument, tt_tensor_list shards, int rank) {
    (void)argument, (void)shards, (void)rank;
    return TUTTI_OK;
}

TEST_WORLD(calls_that_differ_behind_many_words_are_a_mismatch, 2) {
    BEGIN;
    tt_tensor *shards[8];
    char name[101] = { 0 };
    memset(name, 'a', sizeof name - 1);
    for (int i = 0; i < 8; i++) {
        shards[i] = whole(tt_shape(1, 1, 1, 1, 1, 1, 1, i == 7 ? 4 + rank : 4), TUTTI_F32, rank);
        tt_set_name(shards[i], name);
    }
    CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors_of(8, shards), look_away, NULL,
                                                     (tt_tensor_list){ 0, NULL }, group),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 0 calls pipelined_all_gather_and_consume of f32 [1, 1, 1, 1, 1, 1, 1, 4], f32 [1, ");
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_WORLD(another_collective_on_one_rank_is_a_mismatch_on_all, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1), *x = whole(tt_shape(6, 4), TUTTI_F32, rank);
    if (rank == 0)
        tt_wait(tt_all_reduce(x, TUTTI_SUM, group));
    else
        tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 0 called all_reduce ");
    CHECK_MESSAGE("rank 1 called fused_all_gather_matmul");
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

/* Among them a plain all-gather of as many bytes as a record of theirs has. */
TEST_WORLD(a_plain_all_gather_is_no_fused_operation, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1), *x = whole(tt_shape(6, 4), TUTTI_F32, rank);
    CHECK(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group) != NULL);
    if (rank == 0)
        tt_wait(tt_all_gather(tt_zeros(tt_shape(sizeof(tu_fused_record)), TUTTI_U8, NULL), 0, group));
    else
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 1 called fused_matmul_reduce_scatter");
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD(an_error_pending_ends_the_group_with_its_words, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1), *x = whole(tt_shape(6, 4), TUTTI_F32, rank);
    if (rank == 0)
        tt_error_set(TUTTI_ERROR_LIMIT, "no more of it");
    tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
    CHECK_EQ(tt_error_show(), rank == 0 ? TUTTI_ERROR_LIMIT : TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE("no more of it");
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- the workspace ---- */

TEST_WORLD(the_workspace_is_used_again_and_bounded_by_the_largest_call, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(16, 8), TUTTI_F32, 1);
    size_t bytes = 0;
    for (int round = 0; round < 40; round++) {
        tt_tensor *x = whole(tt_shape(128 >> round % 3, 16), TUTTI_F32, rank + round);
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(x, right, 0, group)));
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group),
                       tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, group)));
        if (round == 0)
            bytes = tt_fused_workspace_bytes(group);
        CHECK_EQ(tt_fused_workspace_bytes(group), bytes);
    }
    CHECK_EQ(bytes, 2 * 128 * 16 * 4 + 4 * 64 * 8 * 4); /* two shards, and four tiles from the other rank */
    END;
}

TEST_WORLD(the_workspace_grows_to_the_larger_of_what_it_has_and_what_a_call_needs, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(16, 8), TUTTI_F32, 1);
    size_t before = 0;
    for (int64_t rows = 32; rows <= 512; rows *= 4) {
        tt_tensor *x = whole(tt_shape(rows, 16), TUTTI_F32, rank);
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(x, right, 0, group)));
        CHECK(tt_fused_workspace_bytes(group) > before);
        before = tt_fused_workspace_bytes(group);
        tt_tensor *few = tt_narrow(x, 0, 0, 4);
        CHECK(tt_equal(tt_fused_all_gather_matmul(few, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(few, right, 0, group)));
        CHECK_EQ(tt_fused_workspace_bytes(group), before);
    }
    CHECK_EQ(before, 2 * 512 * 16 * 4);
    END;
}

/* ---- ranks that do not come ---- */

static atomic_int gone;

TEST_WORLD_THREADS(a_rank_that_does_not_come_is_a_timeout_that_names_it, 2) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1), *x = whole(tt_shape(6, 4), TUTTI_F32, rank);
    if (rank == 0) {
        CHECK_OK(tutti_group_set_timeout(group, 200000000));
        tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
        expect_error(TUTTI_ERROR_TIMEOUT, "rank 1");
        atomic_store(&gone, 1);
    } else {
        while (atomic_load(&gone) == 0)
            usleep(1000);
        FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_TIMEOUT, "");
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- deaths ---- */

/* What the survivors tell the test, in memory that outlives them. */
typedef struct verdicts {
    atomic_int dead[4], fine[4], wrong[4];
    const char *fault; /* NULL: after a pause, wherever it is then */
    int victim, pause; /* microseconds */
} verdicts;

static tutti_status calls(tutti_world *world, tutti_group *group) {
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    tt_tensor *right = whole(tt_shape(8, 6), TUTTI_F32, 1), *x = whole(tt_shape(6 * 600, 8), TUTTI_F32, rank),
              *wide = tt_cat(tt_tensors(right, right, right, right, right, right, right, right, right, right), 1),
              *placed = symmetric(world, x), *many = whole(tt_shape(6 * 512, 1), TUTTI_F32, rank),
              *row = whole(tt_shape(1, 2048), TUTTI_F32, 1);
    tt_fused_matmul_reduce_scatter(many, row, TUTTI_SUM, 0, group); /* of several chunks: ranks run ahead */
    for (int round = 0; round < 3; round++) {
        tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
        tt_fused_matmul_reduce_scatter(x, wide, TUTTI_SUM, 0, group); /* of several tiles */
        tt_fused_all_gather_matmul(placed, tt_tensors(right), 0, group, NULL);
        tt_fused_all_gather_matmul(tt_narrow(x, 0, 0, 6), tt_tensors(right), 0, group, NULL); /* few rows, together */
        tt_fused_matmul_reduce_scatter(tt_narrow(x, 0, 0, 6), right, TUTTI_SUM, 0, group);
    }
    return tt_scope_close(&scope);
}

static void *kill_later(void *argument) {
    const verdicts *shared = argument;
    usleep((useconds_t)shared->pause);
    raise(SIGKILL);
    return NULL;
}

/* From a thread of its own: between any two instructions. */
static void die_after_a_pause(verdicts *shared) {
    pthread_t killer;
    CHECK_EQ(pthread_create(&killer, NULL, kill_later, shared), 0);
    pthread_detach(killer);
}

static tutti_status until_a_death(tutti_world *world, void *argument) {
    verdicts *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest;
    int rank = tutti_group_rank(group);
    tutti_status status = tutti_group_set_timeout(group, MINUTE);
    if (status == TUTTI_OK && shared->fault == NULL)
        status = tutti_barrier(group, NULL);
    if (status == TUTTI_OK && rank == shared->victim && shared->fault == NULL)
        die_after_a_pause(shared);
    else if (status == TUTTI_OK && rank == shared->victim)
        status = tutti_fault_inject(world, shared->fault);
    if (status == TUTTI_OK)
        status = calls(world, group);
    if (status == TUTTI_OK) { /* the others may be in their last call still */
        atomic_store(&shared->fine[rank], 1);
        status = tutti_barrier(group, NULL);
        if (status == TUTTI_OK)
            return TUTTI_OK;
    }
    atomic_store(status == TUTTI_ERROR_DEAD ? &shared->dead[rank] : &shared->wrong[rank], 1);
    if (status != TUTTI_ERROR_DEAD) {
        fprintf(stderr, "rank %d: %s: %s\n", rank, tutti_status_name(status), tutti_error_message());
        return status;
    }
    status = tutti_group_shrink(group, NULL, &rest);
    if (status != TUTTI_OK)
        return status;
    status = calls(world, rest); /* the survivors go on */
    if (status != TUTTI_OK)
        atomic_store(&shared->wrong[rank], 1);
    tutti_group_release(rest);
    return status;
}

/* Kills `victim` by that fault, or after that pause; returns whether it came to that. */
static bool die(const char *fault, int pause, int victim) {
    verdicts *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    shared->fault = fault;
    shared->pause = pause;
    shared->victim = victim;
    tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, until_a_death, shared);
    if (fault == NULL)
        fault = "a sudden death";
    bool happened = status == TUTTI_ERROR_DEAD;
    for (int rank = 0; rank < 3; rank++) {
        if (atomic_load(&shared->wrong[rank]) || (!happened && !atomic_load(&shared->fine[rank])))
            FAIL("%s of rank %d: rank %d got another error (%s)", fault, victim, rank, tutti_error_message());
        if (happened && rank != victim && !atomic_load(&shared->dead[rank]) && !atomic_load(&shared->fine[rank]))
            FAIL("%s of rank %d: rank %d was not told of the death", fault, victim, rank);
    }
    munmap(shared, sizeof *shared);
    return happened;
}

/* In the at-th call of that operation, for many of them. */
static void die_everywhere(const char *operation) {
    int deaths = 0;
    char fault[96];
    for (int at = 0; at < (test_sanitized() ? 4 : 12); at++) {
        snprintf(fault, sizeof fault, "op=%s,at=%d,do=kill", operation, at);
        deaths += die(fault, 0, at % 3);
    }
    CHECK(deaths > 0);
}

TEST_LIMIT(a_death_in_the_agreement_of_a_gather_is_told_to_all, 300) {
    die_everywhere("fused_all_gather_matmul");
}

TEST_LIMIT(a_death_in_the_agreement_of_a_scatter_is_told_to_all, 300) {
    die_everywhere("fused_matmul_reduce_scatter");
}

TEST_LIMIT(a_death_while_the_workspace_meets_is_told_to_all, 300) {
    die_everywhere("rendezvous");
}

TEST_LIMIT(a_death_at_the_end_of_a_call_is_told_to_all, 300) {
    die_everywhere("barrier");
}

/* FUSED_DEATHS=300 has so many die instead of a few. */
TEST_LIMIT(a_death_at_any_moment_is_told_to_all, 600) {
    const char *asked = getenv("FUSED_DEATHS");
    int deaths = 0, runs = asked != NULL ? atoi(asked) : test_sanitized() ? 4 : 12;
    for (int run = 0; run < runs; run++)
        deaths += die(NULL, 300 + 700 * run % 30000, run % 3);
    CHECK(deaths > 0);
}

/* A rank that dies while it computes: in a callback, where nothing of the library runs. */
static tutti_status deadly(void *argument, int rank, tt_tensor *out) {
    const int *when = argument; /* the rank to die, and for whom it computes then */
    tt_fill_(out, rank);
    if (when[0] == when[2] && rank == when[1])
        kill(getpid(), SIGKILL);
    return TUTTI_OK;
}

static tutti_status dies_computing(tutti_world *world, void *argument) {
    verdicts *shared = argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), when[3] = { -1, shared->victim % 3, rank };
    tutti_status status = tutti_group_set_timeout(group, MINUTE);
    tt_scope scope = tt_scope_open();
    tt_tensor *output = tt_zeros(tt_shape(6, 500), TUTTI_F32, NULL);
    for (int round = 0; round < 4 && status == TUTTI_OK; round++) {
        when[0] = round == 2 ? shared->victim / 3 : -1;
        status = tt_pipelined_produce_and_all_to_all(deadly, when, output, 0, group);
    }
    atomic_store(status == TUTTI_ERROR_DEAD ? &shared->dead[rank] : &shared->wrong[rank], 1);
    if (status != TUTTI_ERROR_DEAD)
        fprintf(stderr, "rank %d: %s: %s\n", rank, tutti_status_name(status), tutti_error_message());
    tutti_status closed = tt_scope_close(&scope);
    return closed;
}

/* The same of a consumer: what it has staged can still be read, and the call after that is told. */
static tutti_status deadly_look(void *argument, tt_tensor_list shards, int rank) {
    const int *when = argument;
    (void)shards;
    if (when[0] == when[2] && rank == when[1])
        kill(getpid(), SIGKILL);
    return TUTTI_OK;
}

static tutti_status dies_consuming(tutti_world *world, void *argument) {
    verdicts *shared = argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), when[3] = { -1, shared->victim % 3, rank };
    tutti_status status = tutti_group_set_timeout(group, MINUTE);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_zeros(tt_shape(6, 500), TUTTI_F32, NULL), *placed = symmetric(world, x);
    for (int round = 0; round < 8 && status == TUTTI_OK; round++) {
        when[0] = round == 5 ? shared->victim / 3 : -1;
        status = tt_pipelined_all_gather_and_consume(tt_tensors(round % 2 == 0 ? x : placed), deadly_look, when,
                                                     (tt_tensor_list){ 0, NULL }, group);
    }
    atomic_store(status == TUTTI_ERROR_DEAD ? &shared->dead[rank] : &shared->wrong[rank], 1);
    if (status != TUTTI_ERROR_DEAD)
        fprintf(stderr, "rank %d: %s: %s\n", rank, tutti_status_name(status), tutti_error_message());
    tutti_status closed = tt_scope_close(&scope);
    return closed;
}

static void die_in_a_callback(tutti_rank_main *of) {
    for (int victim = 0; victim < 9; victim++) { /* three ranks, each while it works for, or on, each */
        verdicts *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(shared != MAP_FAILED);
        shared->victim = victim;
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, of, shared), TUTTI_ERROR_DEAD);
        for (int rank = 0; rank < 3; rank++)
            CHECK(rank == victim / 3 || (atomic_load(&shared->dead[rank]) && !atomic_load(&shared->wrong[rank])));
        munmap(shared, sizeof *shared);
    }
}

TEST_LIMIT(a_death_while_a_rank_computes_a_tile_is_told_to_all, 300) {
    die_in_a_callback(dies_computing);
}

TEST_LIMIT(a_death_while_a_rank_reads_a_shard_is_told_to_all, 300) {
    die_in_a_callback(dies_consuming);
}

/* ---- memory that is not there ---- */

static tutti_status few_calls(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_status status = tutti_group_set_timeout(group, MINUTE);
    if (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    if (status == TUTTI_OK && rank == 0)
        test_fail_arm("malloc,calloc,realloc,aligned_alloc,strdup", *(const long *)argument);
    if (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    if (status != TUTTI_OK)
        return status;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(4, 3), rank, TUTTI_F32, NULL), *right = tt_full(tt_shape(3, 4), 2, TUTTI_F32, NULL),
              *one = tt_full(tt_shape(1), 1, TUTTI_F32, NULL);
    for (int round = 0; round < 2; round++) {
        tt_fused_all_gather_matmul(tt_transpose(x, 0, 1),
                                   tt_tensors(tt_transpose(tt_cat(tt_tensors(right, right), 1), 0, 1)), 1, group, NULL);
        tt_fused_all_gather_matmul(tt_narrow(x, 1, 0, 2), tt_tensors(tt_narrow(right, 0, 0, 2)), 0, group, NULL);
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 1, group);
        tt_fused_scaled_matmul_reduce_scatter(x, right, one, one, TUTTI_SUM, 0, 0, tt_shape(4, 4), NULL, NULL,
                                              TUTTI_F32, false, group);
        tt_fused_all_gather_scaled_matmul(x, tt_tensors(right), one, tt_tensors(one), 0, group, NULL, NULL);
    }
    status = tt_scope_close(&scope);
    if (status != TUTTI_OK && tutti_error_message()[0] == 0)
        FAIL("a failure without words");
    return status;
}

TEST_LIMIT(every_allocation_that_fails_is_told_to_both_ranks_and_hangs_nobody, 600) {
    int failures = 0;
    bool delivered = true;
    for (long nth = 1; delivered && nth < 5000; nth += test_sanitized() ? 7 : 1) {
        tutti_status status = tutti_spawn(TUTTI_SPAWN_THREADS, 2, few_calls, &nth);
        delivered = test_fail_disarm();
        CHECK(status != TUTTI_ERROR_TIMEOUT);
        CHECK(delivered || status == TUTTI_OK);
        failures += status != TUTTI_OK;
    }
    CHECK(!delivered);
    CHECK(failures > 0);
}
