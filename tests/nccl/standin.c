/* SPDX-License-Identifier: Apache-2.0
 *
 * The NCCL backend without a GPU and without NCCL: both are stand-ins whose ranks are threads. So everything that the
 * backend decides is tested here: what it gives to NCCL, when it gives up, and what it leaves behind. What NCCL and
 * GPUs do is tested by collective.c and memory.c.
 */
#include <tutti/backend.h>

#include "../against_cpu.h"
#include "gpu.h"

#define RANKS 3

static void (*set)(const char *what, int value);
static int (*launches)(void);
static int (*count)(const char *what);

static void begin(void) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library != NULL) {
        *(void **)&set = dlsym(library, "standin_nccl_set");
        *(void **)&count = dlsym(library, "standin_nccl_count");
    }
    if (set == NULL || count == NULL)
        SKIP("the stand-in of NCCL is not in LD_LIBRARY_PATH");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver != NULL)
        *(void **)&launches = dlsym(driver, "standin_launches");
    char path[4096];
    const char *folder = getenv("TUTTI_PLUGIN_PATH");
    snprintf(path, sizeof path, "%s/libtutti-nccl.so", folder != NULL ? folder : ".");
    if (access(path, F_OK) != 0)
        SKIP("the NCCL backend was not built");
}

static void check_nothing_is_left(void) {
    CHECK_EQ(count("communicators"), 0);
    CHECK_EQ(count("windows"), 0);
    CHECK_EQ(count("blocks"), 0);
}

static void on_rank(tutti_world *world, void *argument) {
    void (*sentence)(tutti_world *) = NULL;
    *(void **)&sentence = argument;
    gpu_begin();
    sentence(world);
    gpu_end();
}

/* A test whose body runs on every rank; then nothing of NCCL may be left. */
#define TEST_STANDIN(sentence)                                            \
    static void body_##sentence(tutti_world *world);                      \
    TEST(sentence) {                                                      \
        begin();                                                          \
        test_threads(RANKS, on_rank, (void *)(uintptr_t)body_##sentence); \
        check_nothing_is_left();                                          \
    }                                                                     \
    static void body_##sentence(tutti_world *world)

/* ---- collectives ---- */

static void check_floats(const float *found, size_t number, float first, float step) {
    for (size_t i = 0; i < number; i++)
        CHECK(found[i] == first + step * (float)i);
}

TEST_STANDIN(reductions_are_given_to_nccl_as_they_are) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    float host[300], *in = gpu_private(sizeof host), *out = gpu_private(sizeof host);
    for (int i = 0; i < 300; i++)
        host[i] = (float)(i + rank);
    gpu_write(in, host, sizeof host);
    CHECK_OK(tutti_all_reduce(group, in, out, 300, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_read(host, out, sizeof host);
    check_floats(host, 300, 3, 3);
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(group, &ran));
    CHECK_TEXT(ran.executor, "nccl");
    CHECK(strstr(ran.why, "not the same bits") != NULL); /* it adds in an order of its own, and says so */
    CHECK_OK(tutti_all_reduce(group, in, out, 300, TUTTI_F32, TUTTI_MAX, BY_NCCL));
    gpu_read(host, out, sizeof host);
    check_floats(host, 300, 2, 1);
    CHECK_OK(tutti_all_reduce(group, in, out, 300, TUTTI_F32, TUTTI_AVG, BY_NCCL));
    gpu_read(host, out, sizeof host);
    check_floats(host, 300, 1, 1);
    CHECK_OK(tutti_reduce_scatter(group, in, out, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_read(host, out, 400);
    check_floats(host, 100, 3 + 300 * (float)rank, 3);
    static const size_t counts[] = { 50, 0, 250 }, begins[] = { 0, 50, 50 };
    CHECK_OK(tutti_reduce_scatter_v(group, in, out, counts, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_read(host, out, counts[rank] * 4);
    check_floats(host, counts[rank], 3 + 3 * (float)begins[rank], 3);
    CHECK_OK(tutti_reduce(group, in, in, 300, TUTTI_F32, TUTTI_SUM, 1, BY_NCCL));
    gpu_read(host, in, sizeof host);
    check_floats(host, 300, rank == 1 ? 3 : (float)rank, rank == 1 ? 3 : 1);
    CHECK_OK(tutti_barrier(group, BY_NCCL));
    gpu_private_free(in);
    gpu_private_free(out);
}

TEST_STANDIN(factors_of_narrow_types_reach_nccl_in_their_type) {
    tutti_group *group = tutti_world_group(world);
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_F32, TUTTI_F16, TUTTI_BF16, TUTTI_F8_E4M3, TUTTI_F8_E5M2 };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        double two = 2, half = tutti_group_rank(group) == 0 ? 0.25 : 0.5, sum;
        unsigned char value[8], factor[8], *buffer = gpu_private(8);
        CHECK_OK(tutti_convert(&two, TUTTI_F64, value, dtypes[i], 1));
        CHECK_OK(tutti_convert(&half, TUTTI_F64, factor, dtypes[i], 1));
        gpu_write(buffer, value, tutti_dtype_size(dtypes[i]));
        CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, dtypes[i], TUTTI_PREMUL_SUM,
                                  TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .factor = factor)));
        gpu_read(value, buffer, tutti_dtype_size(dtypes[i]));
        CHECK_OK(tutti_convert(value, dtypes[i], &sum, TUTTI_F64, 1));
        CHECK(sum == 0.5 + 1.0 * (RANKS - 1));
        gpu_private_free(buffer);
    }
}

/* Notes two operations, and runs them three times; then what they use is outgrown, and they run once more. */
TEST_STANDIN(operations_of_nccl_are_captured_and_run_again) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    int32_t host[RANKS * 4], *sum = gpu_private(4), *parts = gpu_private(sizeof host);
    size_t large = (size_t)3 << 20;
    unsigned char *more = gpu_private(large);
    CUgraph graph;
    CUgraphExec runnable;
    host[0] = 1;
    CHECK_OK(tutti_all_reduce(group, sum, sum, 1, TUTTI_I32, TUTTI_SUM, BY_NCCL)); /* makes what is needed */
    CHECK_OK(tutti_all_to_all(group, parts, parts, 4, TUTTI_I32, BY_NCCL));
    gpu_write(sum, host, 4);
    CHECK_CUDA(gpu.cuStreamBeginCapture(stream, 1));
    CHECK_OK(tutti_all_reduce(group, sum, sum, 1, TUTTI_I32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(
        tutti_all_to_all(group, parts, parts, 4, TUTTI_I32, BY_NCCL)); /* in place: through memory of the group's */
    CHECK_OK(tutti_barrier(group, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    int launched = launches();
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(tutti_all_to_all(group, more, more, large / RANKS, TUTTI_U8, BY_NCCL), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("capturing");
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(launches(), launched); /* of what is refused nothing is in the graph, no mark that it has begun either */
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_CUDA(gpu.cuStreamEndCapture(stream, &graph));
    CHECK_CUDA(gpu.cuGraphInstantiateWithFlags(&runnable, graph, 0));
    gpu_read(host, sum, 4);
    CHECK_EQ(host[0], 1); /* nothing has run yet */
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < RANKS * 4; i++)
            host[i] = rank * 100 + i;
        gpu_write(parts, host, sizeof host);
        CHECK_CUDA(gpu.cuGraphLaunch(runnable, stream));
        gpu_read(host, parts, sizeof host);
        for (int i = 0; i < RANKS * 4; i++)
            CHECK_EQ(host[i], i / 4 * 100 + rank * 4 + i % 4);
        if (round == 2) /* the graph keeps the memory that it knows */
            CHECK_OK(tutti_all_to_all(group, more, more, large / RANKS, TUTTI_U8, BY_NCCL));
    }
    gpu_read(host, sum, 4);
    CHECK_EQ(host[0], RANKS * RANKS * RANKS * RANKS);
    CHECK_CUDA(gpu.cuGraphExecDestroy(runnable));
    CHECK_CUDA(gpu.cuGraphDestroy(graph));
    gpu_private_free(sum);
    gpu_private_free(parts);
    gpu_private_free(more);
}

TEST_STANDIN(a_communicator_is_made_when_it_is_needed_first) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4);
    CHECK_OK(tutti_backend_open(world, "nccl", NULL));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(count("communicators"), 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_EQ(count("communicators"), 2 * RANKS); /* one to make the other */
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
    gpu_private_free(buffer);
}

TEST_STANDIN(moves_arrive_where_they_belong_in_place_too) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    int32_t host[30], *in = gpu_private(sizeof host), *out = gpu_private(sizeof host);
    for (int i = 0; i < 30; i++)
        host[i] = rank * 100 + i;
    gpu_write(in, host, sizeof host);
    CHECK_OK(tutti_all_gather(group, in, out, 10, TUTTI_I32, BY_NCCL));
    gpu_read(host, out, sizeof host);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(host[i], i / 10 * 100 + i % 10);
    CHECK_OK(tutti_all_to_all(group, in, out, 10, TUTTI_I32, BY_NCCL));
    gpu_read(host, out, sizeof host);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(host[i], i / 10 * 100 + rank * 10 + i % 10);
    CHECK_OK(tutti_all_to_all(group, in, in, 10, TUTTI_I32, BY_NCCL));
    gpu_read(host, in, sizeof host);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(host[i], i / 10 * 100 + rank * 10 + i % 10);
    for (int i = 0; i < 30; i++)
        host[i] = rank * 100 + i;
    gpu_write(in, host, sizeof host);
    CHECK_OK(tutti_broadcast(group, in, in, 30, TUTTI_I32, 2, BY_NCCL));
    gpu_read(host, in, sizeof host);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(host[i], 200 + i);
    CHECK_OK(tutti_scatter(group, in, out, 10, TUTTI_I32, 1, BY_NCCL));
    gpu_read(host, out, 40);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(host[i], 200 + rank * 10 + i);
    CHECK_OK(tutti_gather(group, out, in, 10, TUTTI_I32, 0, BY_NCCL));
    gpu_read(host, in, sizeof host);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(host[i], 200 + i);
    gpu_private_free(in);
    gpu_private_free(out);
}

TEST_STANDIN(what_nccl_does_not_have_is_unsupported_and_ends_nothing) {
    tutti_group *group = tutti_world_group(world);
    int16_t *buffer = gpu_private(4096);
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 10, TUTTI_I16, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("nccl");
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 10, TUTTI_I32, TUTTI_BXOR, BY_NCCL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 10, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl",
                                                .algorithm = TUTTI_ALGORITHM_ONE_SHOT)),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 10, TUTTI_I32, TUTTI_SUM, BY_NCCL));
    gpu_private_free(buffer);
}

TEST_STANDIN(a_work_is_over_when_its_stream_has_passed_it) {
    tutti_group *group = tutti_world_group(world);
    float host = 2, *buffer = gpu_private(4);
    tutti_work *work;
    gpu_write(buffer, &host, 4);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    gpu_read(&host, buffer, 4);
    CHECK(host == 2 * RANKS);
    gpu_private_free(buffer);
}

/* ---- what goes wrong ---- */

TEST_STANDIN(calls_that_differ_fail_on_every_rank_before_nccl_is_entered) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_STATUS(
        tutti_all_reduce(group, buffer, buffer, tutti_group_rank(group) == 2 ? 99 : 100, TUTTI_F32, TUTTI_SUM, BY_NCCL),
        TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("99 elements");
    CHECK_EQ(count("communicators"), 0);
    gpu_private_free(buffer);
}

TEST_STANDIN(splits_that_differ_fail_before_nccl_is_entered) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    size_t in_counts[RANKS] = { 1, 2, 3 }, offsets[RANKS] = { 0, 10, 20 }, out_counts[RANKS];
    for (int i = 0; i < RANKS; i++)
        out_counts[i] = (size_t)rank + 1;
    int32_t host[30], *in = gpu_private(sizeof host), *out = gpu_private(sizeof host);
    for (int i = 0; i < 30; i++)
        host[i] = rank * 100 + i;
    gpu_write(in, host, sizeof host);
    CHECK_OK(tutti_all_to_all_v(group, in, in_counts, offsets, out, out_counts, offsets, TUTTI_I32, BY_NCCL));
    gpu_read(host, out, sizeof host);
    for (int from = 0; from < RANKS; from++)
        for (int i = 0; i <= rank; i++)
            CHECK_EQ(host[from * 10 + i], from * 100 + rank * 10 + i);
    if (rank == 1)
        out_counts[0] = 7;
    CHECK_STATUS(tutti_all_to_all_v(group, in, in_counts, offsets, out, out_counts, offsets, TUTTI_I32, BY_NCCL),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("expects 7");
    gpu_private_free(in);
    gpu_private_free(out);
}

static tutti_status await_end(tutti_group *group) {
    tutti_status status;
    while ((status = tutti_group_check(group)) == TUTTI_OK)
        usleep(1000);
    return status;
}

TEST_STANDIN(a_stream_that_stays_in_an_operation_is_freed_at_its_deadline) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    set("stuck", 1);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 300000000)));
    CHECK_EQ(await_end(group), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("all_reduce");
    gpu_settle();
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_TIMEOUT);
    gpu_private_free(buffer);
}

static void *abort_soon(void *group) {
    usleep(100000); /* all ranks are inside by then; sooner or later, the end is the same */
    CHECK_OK(tutti_group_abort(group, "the test says so"));
    return NULL;
}

TEST_STANDIN(a_call_that_stays_inside_of_nccl_is_freed_at_its_deadline) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    set("inside", 1);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status =
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 300000000));
    CHECK_EQ(status, TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("inside NCCL");
    gpu_private_free(buffer);
}

/* NCCL may say that all went well in the moment in which the watcher stops the communicator. */
TEST_STANDIN(a_call_that_is_through_when_it_is_stopped_has_failed) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    set("inside", 2);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 300000000)),
        TUTTI_ERROR_TIMEOUT);
    gpu_private_free(buffer);
}

/* A captured operation does not run yet: the next one on the stream has a deadline of its own. */
TEST_STANDIN(the_deadline_of_a_captured_operation_is_not_the_next_ones) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CUgraph graph;
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_CUDA(gpu.cuStreamBeginCapture(stream, 1));
    CHECK_OK(
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 2000000000)));
    CHECK_CUDA(gpu.cuStreamEndCapture(stream, &graph));
    CHECK_OK(tutti_barrier(group, NULL));
    set("stuck", 1);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    usleep(2500000); /* longer than the first's, and by far not as long as the second's */
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1)
        CHECK_OK(tutti_group_abort(group, "the test says so"));
    CHECK_EQ(await_end(group), TUTTI_ERROR_ABORTED);
    gpu_settle();
    CHECK_CUDA(gpu.cuGraphDestroy(graph));
    gpu_private_free(buffer);
}

TEST_STANDIN(an_abort_frees_calls_that_are_inside_of_nccl) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    set("inside", 1);
    CHECK_OK(tutti_barrier(group, NULL));
    pthread_t thread;
    if (tutti_group_rank(group) == 1)
        CHECK_EQ(pthread_create(&thread, NULL, abort_soon, group), 0);
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_ABORTED);
    if (tutti_group_rank(group) == 1)
        pthread_join(thread, NULL);
    gpu_private_free(buffer);
}

static _Atomic int enqueued;

TEST_STANDIN(an_abort_frees_the_stream) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    set("stuck", 1);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    atomic_fetch_add(&enqueued, 1);
    while (tutti_group_rank(group) == 1 && atomic_load(&enqueued) < RANKS)
        usleep(1000);
    if (tutti_group_rank(group) == 1)
        CHECK_OK(tutti_group_abort(group, "the test says so"));
    CHECK_EQ(await_end(group), TUTTI_ERROR_ABORTED);
    gpu_settle();
    gpu_private_free(buffer);
}

TEST_STANDIN(an_error_that_nccl_reports_ends_the_group) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    set("error", ncclRemoteError);
    CHECK_EQ(await_end(group), TUTTI_ERROR_BACKEND);
    CHECK_MESSAGE("NCCL says");
    gpu_private_free(buffer);
}

TEST_STANDIN(a_communicator_that_is_never_ready_is_given_up_at_the_deadline) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    set("init", 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 500000000)),
        TUTTI_ERROR_TIMEOUT);
    gpu_private_free(buffer);
}

TEST_STANDIN(a_communicator_that_is_never_split_leaves_neither_behind) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    set("split", 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 500000000)),
        TUTTI_ERROR_TIMEOUT);
    gpu_private_free(buffer);
}

static void old(tutti_world *world, void *argument) {
    (void)argument;
    gpu_begin();
    float *buffer = gpu_private(4);
    CHECK_STATUS(tutti_all_reduce(tutti_world_group(world), buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL),
                 TUTTI_ERROR_BACKEND);
    CHECK_MESSAGE("2.26.0");
    CHECK_MESSAGE("too old");
    gpu_private_free(buffer);
    gpu_end();
}

TEST(an_nccl_that_is_too_old_is_refused_with_both_versions) {
    begin();
    set("version", 22600);
    test_threads(RANKS, old, NULL);
}

/* It cannot stop a communicator without freeing it: operations stay on the non-blocking one. */
static void oldest(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    (void)argument;
    gpu_begin();
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    float host = 1, *buffer = gpu_private(4);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    gpu_write(buffer, &host, 4);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_read(&host, buffer, 4);
    CHECK(host == RANKS);
    CHECK_EQ(count("communicators"), RANKS);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("2.28");
    CHECK_STATUS(tutti_backend_communicator(group, "nccl", buffer), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("2.28");
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
    gpu_private_free(buffer);
    gpu_end();
}

TEST(the_oldest_nccl_has_collectives_and_says_what_it_lacks) {
    begin();
    set("version", 22700);
    test_threads(RANKS, oldest, NULL);
    check_nothing_is_left();
}

/* ---- windows ---- */

static void use_windows(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), next = (rank + 1) % RANKS, before = (rank + RANKS - 1) % RANKS;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    tutti_memory *memory = gpu_symmetric(world, 100000);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    unsigned char *bytes = malloc(100000);
    gpu_read(bytes, tutti_memory_data(memory), 100000);
    for (int i = 0; i < 100000; i++)
        CHECK_EQ(bytes[i], 0);
    gpu_read(bytes, tutti_peers_signal_pad(peers, next), tutti_peers_pad_bytes(peers));
    for (size_t i = 0; i < tutti_peers_pad_bytes(peers); i++)
        CHECK_EQ(bytes[i], 0);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    for (uint32_t round = 1; round <= 5; round++) {
        uint32_t value = (uint32_t)rank * 1000 + round, got = 0;
        CHECK_OK(tutti_peers_put(peers, next, 8, &value, sizeof value, ON_STREAM));
        CHECK_OK(tutti_peers_signal(peers, next, 3, ON_STREAM));
        CHECK_OK(tutti_peers_wait_signal(peers, before, 3, ON_STREAM));
        gpu_read(&got, (char *)tutti_memory_data(memory) + 8, sizeof got);
        CHECK_EQ(got, (uint32_t)before * 1000 + round);
        CHECK_OK(tutti_peers_get(peers, next, 8, &got, sizeof got, ON_STREAM));
        gpu_settle();
        CHECK_EQ(got, value);
        CHECK_OK(tutti_peers_barrier(peers, 1, ON_STREAM));
    }
    for (uint64_t round = 1; round <= 5; round++) { /* words: equal, and at least */
        uint64_t bytes_of_round = (uint64_t)rank * 100 + round, got = 0;
        CHECK_OK(
            tutti_peers_put_with_signal(peers, next, 64, &bytes_of_round, sizeof bytes_of_round, 5, round, ON_STREAM));
        CHECK_OK(tutti_peers_wait_for_signal(peers, 5, TUTTI_EQUAL, round, ON_STREAM));
        CHECK_OK(tutti_peers_wait_for_signal(peers, 5, TUTTI_AT_LEAST, round - 1, ON_STREAM));
        gpu_read(&got, (char *)tutti_memory_data(memory) + 64, sizeof got);
        CHECK_EQ(got, (uint64_t)before * 100 + round);
        CHECK_OK(tutti_peers_barrier(peers, 2, ON_STREAM));
    }
    CHECK_OK(tutti_peers_wait_for_signal(peers, 5, TUTTI_EQUAL, 99,
                                         TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 20000000)));
    gpu_settle();
    CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_TIMEOUT); /* told once, and ends nothing */
    CHECK_MESSAGE("99");
    CHECK_OK(tutti_group_check(group));
    CHECK_EQ(count("windows"), 2 * RANKS); /* of the block and of its signals */
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    free(bytes);
}

TEST_STANDIN(peers_reach_each_other_by_windows_as_2_28_has_them) {
    use_windows(world);
}

TEST(peers_reach_each_other_by_windows_as_newer_ones_have_them) {
    begin();
    set("version", 23001);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* where the driver is no stand-in, the ranks share a GPU */
    test_threads(RANKS, on_rank, (void *)(uintptr_t)use_windows);
    check_nothing_is_left();
    if (access("/dev/nvidiactl", F_OK) == 0)
        _exit(0); /* a driver that is no stand-in keeps descriptors and threads of its own */
}

TEST_STANDIN(a_group_of_the_same_name_made_again_meets_the_same_block) {
    static const int ranks[] = { 0, 1, 2 };
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    for (int round = 0; round < 3; round++) {
        tutti_group *group;
        tutti_peers *peers;
        CHECK_OK(tutti_group_new(world, ranks, RANKS, TUTTI_OPTIONS(tutti_group_options, .name = "again"), &group));
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        int rank = tutti_group_rank(group);
        uint32_t value = (uint32_t)(round * 10 + rank), got;
        CHECK_OK(tutti_peers_put(peers, (rank + 1) % RANKS, 0, &value, sizeof value, ON_STREAM));
        CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
        gpu_read(&got, tutti_memory_data(memory), sizeof got);
        CHECK_EQ(got, (uint32_t)(round * 10 + (rank + RANKS - 1) % RANKS));
        CHECK_OK(tutti_barrier(group, NULL));
        tutti_peers_release(peers);
        CHECK_OK(tutti_group_destroy(group));
        tutti_group_release(group);
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    tutti_memory_release(memory);
}

static void refuse(tutti_world *world, const char *fragment) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE(fragment);
    CHECK_MESSAGE("LSA");
    float *buffer = tutti_memory_data(memory);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL)); /* nothing has ended */
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
}

TEST_STANDIN(ranks_of_several_lsa_domains_are_told_so) {
    set("lsa", 0);
    refuse(world, "one LSA domain");
}

TEST_STANDIN(success_with_a_null_window_is_no_window) {
    set("window", 0);
    refuse(world, "there is no window");
}

TEST_STANDIN(a_window_behind_which_peers_are_not_is_no_window) {
    set("window", 2);
    refuse(world, "not its block");
}

TEST_STANDIN(a_window_in_which_every_address_leads_home_is_no_window) {
    set("window", 3);
    refuse(world, "not its block");
}

/* ---- communicators of the program's ---- */

static ncclComm_t bring(tutti_group *group) {
    tu_nccl_library library;
    ncclUniqueId id = { { 0 } };
    ncclComm_t comm;
    ncclConfig_t config = { .size = sizeof config, .magic = TU_NCCL_CONFIG_MAGIC, .version = TU_NCCL_OLDEST };
    CHECK_OK(tu_nccl_library_load(&tu_backend_host_table, &library));
    if (tutti_group_rank(group) == 0)
        CHECK_EQ(library.ncclGetUniqueId(&id), ncclSuccess);
    CHECK_OK(tutti_broadcast(group, &id, &id, sizeof id, TUTTI_U8, 0, NULL));
    CHECK_EQ(library.ncclCommInitRankConfig(&comm, RANKS, id, tutti_group_rank(group), &config), ncclInProgress);
    return comm;
}

static ncclComm_t lent[RANKS];

static void with_own(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    gpu_begin();
    lent[rank] = bring(group);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(tutti_backend_communicator(group, "nccl", NULL), TUTTI_ERROR_ARGUMENT);
    if (rank != 1 || argument == NULL)
        CHECK_OK(tutti_backend_communicator(group, "nccl", lent[rank]));
    float host = 1, *buffer = gpu_private(4);
    gpu_write(buffer, &host, 4);
    tutti_status status = tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL);
    if (argument != NULL) {
        CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
        CHECK_MESSAGE("rank 1 does not");
    } else {
        CHECK_EQ(status, TUTTI_OK);
        gpu_read(&host, buffer, 4);
        CHECK(host == RANKS);
        CHECK_STATUS(tutti_backend_communicator(group, "nccl", lent[rank]), TUTTI_ERROR_STATE);
    }
    gpu_private_free(buffer);
    gpu_end();
}

TEST(a_communicator_of_the_program_is_used_and_never_freed) {
    begin();
    test_threads(RANKS, with_own, NULL);
    CHECK_EQ(count("communicators"), RANKS);
}

static void abort_own(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    (void)argument;
    gpu_begin();
    lent[rank] = bring(group);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_backend_communicator(group, "nccl", lent[rank]));
    float *buffer = gpu_private(4);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(count("revoked"), 0);
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 1)
        CHECK_OK(tutti_group_abort(group, "the test says so"));
    CHECK_EQ(await_end(group), TUTTI_ERROR_ABORTED);
    for (int i = 0; i < 30000 && count("revoked") < RANKS; i++) /* by each rank's watcher */
        usleep(1000);
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_ABORTED);
    gpu_private_free(buffer);
    gpu_end();
}

TEST(a_communicator_of_the_program_is_revoked_once_when_its_group_ends) {
    begin();
    test_threads(RANKS, abort_own, NULL);
    CHECK_EQ(count("revoked"), RANKS);
    CHECK_EQ(count("communicators"), RANKS);
}

static void stay_inside_of_own(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    (void)argument;
    gpu_begin();
    lent[tutti_group_rank(group)] = bring(group);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_backend_communicator(group, "nccl", lent[tutti_group_rank(group)]));
    float *buffer = gpu_private(4);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    set("inside", 1);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_STATUS(
        tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 300000000)),
        TUTTI_ERROR_TIMEOUT);
    for (int i = 0; i < 30000 && count("revoked") < RANKS; i++)
        usleep(1000);
    gpu_private_free(buffer);
    gpu_end();
}

TEST(a_call_that_stays_inside_of_the_programs_communicator_is_stopped_by_one_revocation) {
    begin();
    test_threads(RANKS, stay_inside_of_own, NULL);
    CHECK_EQ(count("revoked"), RANKS);
    CHECK_EQ(count("communicators"), RANKS);
}

TEST(communicators_of_some_ranks_alone_are_a_mismatch) {
    begin();
    test_threads(RANKS, with_own, lent);
    CHECK_EQ(count("communicators"), RANKS);
}

/* A rendezvous that fails ends nothing: neither the group nor the communicators that were lent to it. */
static void lend_late(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_peers *peers;
    (void)argument;
    gpu_begin();
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    lent[rank] = bring(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    if (rank != 1)
        CHECK_OK(tutti_backend_communicator(group, "nccl", lent[rank]));
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 1 does not");
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(count("revoked"), 0);
    if (rank == 1)
        CHECK_OK(tutti_backend_communicator(group, "nccl", lent[rank]));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    float *data = tutti_memory_data(memory);
    CHECK_OK(tutti_all_reduce(group, data, data, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(count("revoked"), 0);
    CHECK_OK(tutti_barrier(group, NULL)); /* a rank that leaves alone may revoke, after a while, to come out of NCCL */
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    gpu_end();
}

TEST(a_communicator_that_was_lent_too_early_is_the_programs_as_it_was) {
    begin();
    test_threads(RANKS, lend_late, NULL);
    CHECK_EQ(count("communicators"), RANKS);
}
