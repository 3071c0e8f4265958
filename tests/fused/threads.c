/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused operations of ranks that have several threads: one communicates while the others multiply. That they overlap is
 * shown by what waits for what, never by time: a thread that communicates stays until another has begun a product.
 */
#include <cblas.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include <tutti/trace.h>

#include "base/pool.h"
#include "fused/driver.h"
#include "support.h"
#include "tensor/gemm.h"

/* Three threads for each rank, on any machine. */
static void have_threads(void) {
    CHECK_EQ(setenv("TUTTI_THREADS", "2", 1), 0);
#ifdef OPENBLAS_VERSION
    openblas_set_num_threads(3);
#endif
}

/* Waits for what another thread does; a machine may be busy, but not for so long. */
static void await(atomic_int *flag) {
    for (int i = 0; atomic_load(flag) == 0; i++) {
        CHECK(i < 60000);
        nanosleep(&(struct timespec){ .tv_nsec = 500000 }, NULL);
    }
}

/* ---- a team ---- */

typedef struct crew {
    tu_team team;
    const tu_thread *caller;
    _Atomic(const tu_thread *) talker;
    atomic_int talking, apart; /* one communicates; a job is done by another thread than that one */
    atomic_int done, at_caller;
    int next[4]; /* of each chain of jobs, the one that comes next */
    int fails;   /* the job that fails; -1: none */
} crew;

static tutti_status do_job(void *context, const tu_team_job *job) {
    crew *all = context;
    bool talks_here = tu_self() == atomic_load(&all->talker);
    atomic_fetch_add(&all->at_caller, tu_self() == all->caller);
    if (!talks_here) {
        await(&all->talking);
        atomic_store(&all->apart, 1);
    }
    if (job->after >= 0)
        CHECK_EQ(all->next[job->group], job->row); /* those before it in its chain are done */
    all->next[job->group] = (int)job->row + 1;
    atomic_fetch_add(&all->done, 1);
    return job->row == all->fails ? tu_error(TUTTI_ERROR_RANGE, "row %d is rotten", (int)job->row) : TUTTI_OK;
}

/* Stays until another thread is at a job. */
static tutti_status talk(void *context) {
    crew *all = context;
    atomic_store(&all->talker, tu_self());
    atomic_store(&all->talking, 1);
    await(&all->apart);
    return TUTTI_OK;
}

static void open_crew(crew *all, int threads, bool by_library, _Atomic int64_t *counter) {
    *all = (crew){
        .team = { .threads = threads, .work = do_job, .context = all, .by_library = by_library, .apart = counter },
        .caller = tu_self(),
        .fails = -1
    };
    CHECK_OK(tu_team_open(&all->team, 64));
}

static void add_jobs(crew *all, int count) {
    for (int i = 0; i < count; i++)
        tu_team_add(&all->team, &(tu_team_job){ .group = i % 4, .row = i / 4, .rows = 1, .after = i < 4 ? -1 : i - 4 });
}

TEST(one_thread_communicates_while_another_does_jobs_in_the_order_they_need) {
    have_threads();
    tu_pool_hold();
    for (int round = 0; round < 20; round++) {
        _Atomic int64_t counter = 0;
        crew all;
        open_crew(&all, 3, false, &counter);
        add_jobs(&all, 40);
        CHECK_OK(tu_team_run(&all.team, talk, &all));
        CHECK_EQ(all.done, 40);
        CHECK(atomic_load(&all.talker) == all.caller);
        CHECK(counter >= 1);
        CHECK(tu_team_is_done(&all.team, 2));
        tu_team_reset(&all.team);
        add_jobs(&all, 8);
        memset(all.next, 0, sizeof all.next);
        CHECK(!tu_team_is_done(&all.team, 2));
        CHECK_OK(tu_team_run(&all.team, NULL, NULL));
        CHECK_EQ(all.done, 48);
        tu_team_close(&all.team);
    }
    tu_pool_release();
}

TEST(jobs_of_a_library_stay_with_the_caller_while_another_thread_communicates) {
    have_threads();
    tu_pool_hold();
    for (int round = 0; round < 20; round++) {
        _Atomic int64_t counter = 0;
        crew all;
        open_crew(&all, 3, true, &counter);
        add_jobs(&all, 12);
        CHECK_OK(tu_team_run(&all.team, talk, &all));
        CHECK_EQ(all.done, 12);
        CHECK_EQ(all.at_caller, 12);
        CHECK(atomic_load(&all.talker) != all.caller);
        CHECK(counter >= 1);
        tu_team_close(&all.team);
    }
    tu_pool_release();
}

static tutti_status add_more(void *context) {
    crew *all = context;
    atomic_store(&all->talker, tu_self());
    atomic_store(&all->talking, 1);
    add_jobs(all, 16);
    while (tu_team_help(&all->team))
        ;
    return all->fails == -2 ? tu_error(TUTTI_ERROR_STATE, "nobody listens") : TUTTI_OK;
}

TEST(a_team_of_one_does_everything_and_jobs_may_come_later) {
    for (int threads = 1; threads <= 3; threads += 2) {
        _Atomic int64_t counter = 0;
        crew all;
        have_threads();
        tu_pool_hold();
        open_crew(&all, threads, false, &counter);
        CHECK_OK(tu_team_run(&all.team, add_more, &all));
        CHECK_EQ(all.done, 16);
        CHECK(threads > 1 || counter == 0);
        tu_team_close(&all.team);
        tu_pool_release();
    }
}

TEST(the_first_failure_ends_a_run_with_its_words) {
    have_threads();
    tu_pool_hold();
    for (int round = 0; round < 20; round++) {
        _Atomic int64_t counter = 0;
        crew all;
        open_crew(&all, 3, round % 2, &counter);
        all.fails = 1;
        add_jobs(&all, 16);
        CHECK_STATUS(tu_team_run(&all.team, talk, &all), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("row 1 is rotten");
        CHECK(all.done < 16);
        tu_team_close(&all.team);
        open_crew(&all, 3, round % 2, &counter);
        all.fails = -2;
        CHECK_STATUS(tu_team_run(&all.team, add_more, &all), TUTTI_ERROR_STATE);
        CHECK_MESSAGE("nobody listens");
        CHECK_EQ(all.done, 16);
        tu_team_close(&all.team);
    }
    tu_pool_release();
}

/* ---- tiles on their way while the next chunk is made ---- */

enum {
    ROWS = 64,
    CHUNK = 16, /* of four tiles */
    VICTIM = 1
};

typedef struct exchange {
    tutti_group *group;
    atomic_int making[ROWS / CHUNK + 1], adding[ROWS / CHUNK + 1]; /* begun, of each chunk */
    bool by_library, calm, dies;                                   /* calm: nobody waits for another thread */
    float sums[ROWS];
} exchange;

/* Rows of a chunk are made when a thread is at the tiles of the one before: by a library on the caller's thread, and
 * tiles by another; else the other way round. */
static tutti_status make_rows(void *context, int rank, int ranks, int64_t first, int64_t count, void *to) {
    exchange *all = context;
    int64_t chunk = first / CHUNK;
    float *rows = to;
    CHECK_EQ(ranks, 1);
    if (all->dies && chunk > 0)
        raise(SIGKILL);
    for (int64_t i = 0; i < count; i++)
        rows[i] = (float)(100 * rank + first + i + 1000 * tutti_group_rank(all->group));
    atomic_store(&all->making[chunk], 1);
    if (!all->calm && chunk > 0)
        await(&all->adding[chunk - 1]);
    return TUTTI_OK;
}

/* Tiles of a chunk are added when another thread is at the next one. */
static tutti_status add_rows(void *context, int64_t first, int64_t count, const void *const *from,
                             const tu_aside *copies, int copy_count) {
    exchange *all = context;
    (void)copies, (void)copy_count;
    int64_t chunk = first / CHUNK;
    atomic_store(&all->adding[chunk], 1);
    if (!all->calm && chunk < ROWS / CHUNK - 1)
        await(&all->making[chunk + 1]);
    for (int64_t i = 0; i < count; i++) {
        all->sums[first + i] = 0;
        for (int rank = 0; rank < tutti_group_size(all->group); rank++)
            all->sums[first + i] += ((const float *)from[rank])[i];
    }
    return TUTTI_OK;
}

static tutti_status exchange_rows(tutti_group *group, exchange *all) {
    tu_fused_signature signature = tu_fused_sign("pipelined_produce_and_all_to_all");
    tu_scatter scatter = { .who = "pipelined_produce_and_all_to_all",
                           .group = group,
                           .signature = &signature,
                           .rows = ROWS,
                           .tile_rows = CHUNK / 4,
                           .chunk_rows = CHUNK,
                           .block_rows = all->by_library ? CHUNK : 2,
                           .by_library = all->by_library,
                           .row_bytes = sizeof(float),
                           .panels = { tutti_group_size(group), tutti_group_size(group) },
                           .produce = make_rows,
                           .accept = add_rows,
                           .context = all };
    return tu_produce_and_scatter(&scatter);
}

/* The number behind a word of a line of the recorder. */
static double number(const char *line, const char *word) {
    const char *at = strstr(line, word);
    CHECK(at != NULL);
    return strtod(at + strlen(word), NULL);
}

/* Whether a product of one thread and the communication of another were under way at once, by the flight recorder. */
static void check_time_line(tutti_world *world) {
    static const char product[] = "\"operation\": \"fused_product\"", exchange[] = "\"operation\": \"fused_exchange\"";
    char *text;
    bool overlap = false;
    CHECK_OK(tutti_trace_text(world, &text));
    char *behind = strstr(text, "\"counters\": ["); /* entries come first */
    CHECK(behind != NULL);
    *behind = 0;
    for (const char *one = strstr(text, product); one != NULL && !overlap; one = strstr(one + 1, product)) {
        double begin = number(one, "\"created_ns\": "), end = number(one, "\"ended_ns\": "),
               thread = number(one, "\"thread\": ");
        CHECK(number(one, "\"tag\": ") >= 1 && end >= begin);
        for (const char *other = strstr(text, exchange); other != NULL && !overlap; other = strstr(other + 1, exchange))
            overlap = number(other, "\"thread\": ") != thread && number(other, "\"created_ns\": ") < end &&
                      number(other, "\"ended_ns\": ") > begin;
    }
    tutti_free(text);
    CHECK(overlap);
}

static void rank_exchanges(tutti_world *world, void *argument) {
    BEGIN;
    (void)argument;
    for (int round = 0; round < 6; round++) {
        exchange all = { .group = group, .by_library = round % 2 };
        int64_t before = tu_fused_overlaps(group);
        CHECK_OK(exchange_rows(group, &all));
        for (int i = 0; i < ROWS; i++)
            CHECK_EQ(all.sums[i], ranks * (100 * rank + i) + 1000 * ranks * (ranks - 1) / 2);
        CHECK(tu_fused_overlaps(group) - before >= ROWS / CHUNK - 1);
    }
    check_time_line(world);
    END;
}

TEST(the_next_chunk_is_made_while_tiles_are_exchanged_as_threads) {
    have_threads();
    test_threads(2, rank_exchanges, NULL);
}

TEST(the_next_chunk_is_made_while_tiles_are_exchanged_as_processes) {
    have_threads();
    test_processes(3, rank_exchanges, NULL);
}

static tutti_status rank_dies(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    bool by_library = *(const bool *)argument;
    exchange all = {
        .group = group, .by_library = by_library, .calm = true, .dies = tutti_group_rank(group) == VICTIM
    };
    tutti_status status = tutti_group_set_timeout(group, (int64_t)60 * 1000000000);
    if (status == TUTTI_OK)
        status = exchange_rows(group, &all);
    if (status == TUTTI_ERROR_DEAD && strstr(tutti_error_message(), "rank 1") == NULL)
        return TUTTI_ERROR_STATE;
    return status == TUTTI_OK ? TUTTI_ERROR_STATE : status;
}

TEST(a_rank_that_dies_at_a_job_of_another_thread_is_told_to_all) {
    have_threads();
    for (int by_library = 0; by_library < 2; by_library++) {
        bool argument = by_library;
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, rank_dies, &argument), TUTTI_ERROR_DEAD);
    }
}

/* ---- products ---- */

static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64, TUTTI_BF16, TUTTI_F16, TUTTI_C64, TUTTI_I32 };

/* Sanitizers slow others' libraries down to no use. */
static size_t dtype_count(void) {
    return test_sanitized() ? 2 : sizeof dtypes / sizeof dtypes[0];
}

/* Whole numbers: exact in any order, so that every way gives the same bits. */
static void check_gathers(tutti_world *world, tutti_group *group, int64_t rows, int64_t depth, int64_t columns) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    for (size_t i = 0; i < dtype_count(); i++) {
        tt_tensor *x = whole(tt_shape(rows, depth), dtypes[i], rank), *placed = symmetric(world, x), *all,
                  *right = whole(tt_shape(depth, columns), dtypes[i], 30),
                  *other = whole(tt_shape(depth, 7), dtypes[i], 31),
                  *tall = whole(tt_shape(ranks * depth, columns), dtypes[i], 32);
        tt_tensor *expected = gathered_product(x, right, 0, group);
        for (int round = 0; round < 2; round++) {
            tt_tensor_list made = tt_fused_all_gather_matmul(round == 0 ? x : placed, tt_tensors(right, other), 0,
                                                             group, round == 0 ? NULL : &all);
            CHECK_EQ(made.count, 2);
            CHECK(tt_equal(made.at[0], expected));
            CHECK(tt_equal(made.at[1], gathered_product(x, other, 0, group)));
        }
        CHECK(tt_equal(all, tt_all_gather(x, 0, group)));
        tt_tensor_list summed = tt_fused_all_gather_matmul(x, tt_tensors(tall), 1, group, NULL);
        CHECK_EQ(summed.count, 1);
        CHECK(tt_equal(summed.at[0], gathered_product(x, tall, 1, group)));
        tt_tensor *turned = tt_transpose(whole(tt_shape(depth, rows), dtypes[i], rank), 0, 1); /* column by column */
        CHECK(tt_equal(tt_fused_all_gather_matmul(turned, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(tt_contiguous(turned), right, 0, group)));
    }
}

static void check_scatters(tutti_group *group, int64_t rows, int64_t depth, int64_t columns) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    for (size_t i = 0; i < dtype_count(); i++) {
        tt_tensor *x = whole(tt_shape(ranks * rows, depth), dtypes[i], rank),
                  *right = whole(tt_shape(depth, ranks * columns), dtypes[i], 40 + rank);
        for (int dim = 0; dim < 2; dim++)
            CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, dim, group),
                           tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, dim, group)));
    }
}

static void check_scaled(tutti_group *group, int64_t rows, int64_t depth, int64_t columns) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *x = whole(tt_shape(rows, depth), TUTTI_F8_E4M3, rank),
              *right = whole(tt_shape(depth, columns), TUTTI_F8_E4M3, 50),
              *scale = uniform(tt_shape(rows, 1), TUTTI_F32, rank), *one = tt_full(tt_shape(1), 0.5, TUTTI_F32, NULL);
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &(tutti_dtype){ TUTTI_F32 };
    options.out_dtype_count = 1;
    CHECK(tt_equal(
        tt_fused_all_gather_scaled_matmul(x, tt_tensors(right), scale, tt_tensors(one), 0, group, &options, NULL).at[0],
        tt_scaled_matmul(tt_all_gather(x, 0, group), right, tt_all_gather(scale, 0, group), one, NULL, NULL, TUTTI_F32,
                         false)));
    tt_tensor *tall = whole(tt_shape(ranks * rows, depth), TUTTI_F8_E4M3, 60 + rank);
    CHECK(tt_equal(tt_fused_scaled_matmul_reduce_scatter(tall, right, one, one, TUTTI_SUM, 0, 0,
                                                         tt_shape(ranks * rows, columns), NULL, NULL, TUTTI_BF16, false,
                                                         group),
                   tt_reduce_scatter(tt_scaled_matmul(tall, right, one, one, NULL, NULL, TUTTI_BF16, false), TUTTI_SUM,
                                     0, group)));
}

/* Few rows, which are put together where a library multiplies; many; and so many that there are several chunks. */
static void rank_multiplies(tutti_world *world, void *argument) {
    BEGIN;
    (void)argument;
    check_gathers(world, group, 130, 64, 72);
    check_gathers(world, group, 560, 40, 40);
    check_scatters(group, 130, 64, 72);
    check_scatters(group, 1100, 8, 128);
    check_scaled(group, 150, 64, 64);
    check_scaled(group, 560, 40, 40);
    END;
}

TEST_LIMIT(products_of_several_threads_are_those_of_one_as_threads, 600) {
    have_threads();
    test_threads(2, rank_multiplies, NULL);
}

static void rank_multiplies_some(tutti_world *world, void *argument) {
    BEGIN;
    (void)argument;
    tt_tensor *x = whole(tt_shape(600, 64), TUTTI_F32, rank), *right = whole(tt_shape(64, 72), TUTTI_F32, 30);
    for (int round = 0; round < 4; round++) {
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(x, right, 0, group)));
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group),
                       tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, group)));
    }
    END;
}

TEST(products_of_several_threads_are_those_of_one_as_processes) {
    have_threads();
    test_processes(3, rank_multiplies_some, NULL);
}

/* A rank that is late is waited for by one that has long begun; how many of its jobs overlap is the machine's business,
 * that some do is not. */
static void rank_gathers(tutti_world *world, void *argument) {
    BEGIN;
    (void)argument;
    int64_t overlaps = 0;
    tt_tensor *x = whole(tt_shape(1024, 128), TUTTI_F32, rank), *right = whole(tt_shape(128, 128), TUTTI_F32, 1),
              *expected = gathered_product(x, right, 0, group);
    for (int round = 0; overlaps == 0; round++) {
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0], expected));
        overlaps = tu_fused_overlaps(group);
        CHECK_OK(tutti_all_reduce(group, &overlaps, &overlaps, 1, TUTTI_I64, TUTTI_MIN, NULL));
    }
    END;
}

TEST_LIMIT(a_rank_multiplies_its_own_rows_while_it_stages_them, 600) {
    have_threads();
    test_threads(2, rank_gathers, NULL);
}

/* ---- memory that is not there ---- */

/* Products that are worth several threads, of our own and of a library, gathered by rows and by columns, and scattered
 * in more than one chunk. */
static tutti_status calls_of_threads(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_status status = tutti_group_set_timeout(group, (int64_t)60 * 1000000000);
    if (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    if (status != TUTTI_OK)
        return status;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(1200, 8), rank + 1, TUTTI_F32, NULL),
              *right = tt_full(tt_shape(8, 128), 2, TUTTI_F32, NULL),
              *tall = tt_full(tt_shape(16, 128), 3, TUTTI_F32, NULL), *narrow = tt_to(x, TUTTI_BF16),
              *narrow_right = tt_to(right, TUTTI_BF16);
    if (rank == 0)
        test_fail_arm("malloc,calloc,realloc,aligned_alloc,strdup", *(const long *)argument);
    tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
    tt_fused_all_gather_matmul(x, tt_tensors(tall), 1, group, NULL);
    tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
    tt_fused_all_gather_matmul(narrow, tt_tensors(narrow_right), 0, group, NULL);
    tt_fused_matmul_reduce_scatter(narrow, narrow_right, TUTTI_SUM, 0, group);
    status = tt_scope_close(&scope);
    if (status != TUTTI_OK && tutti_error_message()[0] == 0)
        FAIL("a failure without words");
    return status;
}

TEST_LIMIT(every_allocation_that_fails_in_a_rank_with_threads_is_told_and_hangs_nobody, 600) {
    int failures = 0;
    bool delivered = true;
    have_threads();
    for (long nth = 1; delivered && nth < 5000; nth += test_sanitized() ? 17 : 2) {
        tutti_status status = tutti_spawn(TUTTI_SPAWN_THREADS, 2, calls_of_threads, &nth);
        delivered = test_fail_disarm();
        CHECK(status != TUTTI_ERROR_TIMEOUT);
        CHECK(delivered || status == TUTTI_OK);
        failures += status != TUTTI_OK;
    }
    CHECK(!delivered);
    CHECK(failures > 0);
}
