/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives of groups whose ranks are on several hosts.
 */
#include <sys/mman.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/named.h>
#include <tutti/peers.h>

#include "kernel/kernel.h"
#include "on_hosts.h"

/* ---- data ---- */

static void fill(void *to, size_t count, tutti_dtype dtype, int rank) {
    unsigned state = 12345u + 977u * (unsigned)rank;
    unsigned char *bytes = to;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        float value = ((float)(state >> 16) - 32768.0f) / 1000.0f;
        size_t size = tutti_dtype_size(dtype);
        if (dtype == TUTTI_F32) {
            memcpy(bytes + i * size, &value, size);
        } else if (dtype == TUTTI_F64) {
            double wide = (double)value * 1.1;
            memcpy(bytes + i * size, &wide, size);
        } else if (dtype == TUTTI_C64) {
            float both[2] = { value, value * 0.3f };
            memcpy(bytes + i * size, both, size);
        } else if (dtype == TUTTI_BF16) {
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            uint16_t half = (uint16_t)(bits >> 16);
            memcpy(bytes + i * size, &half, size);
        } else if (dtype == TUTTI_BOOL) {
            bytes[i] = (state >> 20) & 1;
        } else if (dtype == TUTTI_F16) {
            uint16_t half = (uint16_t)((state >> 16) & 0xbfffu) & (uint16_t)~0x4000u; /* small ones, of both signs */
            memcpy(bytes + i * size, &half, size);
        } else if (dtype == TUTTI_F8_E4M3 || dtype == TUTTI_F8_E5M2) {
            bytes[i] = (unsigned char)((state >> 16) & 0xbfu) & (unsigned char)~0x40u;
        } else {
            for (size_t j = 0; j < size; j++)
                bytes[i * size + j] = (unsigned char)(state >> (8 + 3 * j));
        }
    }
}

/* What one host computes from all inputs. */
static void expect(void *to, size_t first, size_t count, size_t total, tutti_dtype dtype, tutti_reduction reduction,
                   const double *factors) {
    const void *rows[MOST_RANKS];
    size_t size = tutti_dtype_size(dtype);
    for (int rank = 0; rank < rank_count; rank++) {
        unsigned char *row = malloc(total * size + 1);
        fill(row, total, dtype, rank);
        rows[rank] = row + first * size;
    }
    tu_reduce(to, rows, rank_count, count, dtype, reduction, factors, 0);
    for (int rank = 0; rank < rank_count; rank++)
        free((void *)((uintptr_t)rows[rank] - first * size));
}

static void check_all_reduce(tutti_group *group, size_t count, tutti_dtype dtype, tutti_reduction reduction,
                             bool in_place) {
    size_t bytes = count * tutti_dtype_size(dtype);
    unsigned char *in = malloc(bytes + 1), *out = in_place ? in : malloc(bytes + 1), *expected = malloc(bytes + 1);
    fill(in, count, dtype, tutti_group_rank(group));
    expect(expected, 0, count, count, dtype, reduction, NULL);
    CHECK_OK(tutti_all_reduce(group, in, out, count, dtype, reduction, NULL));
    CHECK(memcmp(out, expected, bytes) == 0);
    free(in);
    if (!in_place)
        free(out);
    free(expected);
}

/* ---- tests ---- */

static void reduce_everything(tutti_world *world) {
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_F32, TUTTI_F16, TUTTI_BF16, TUTTI_F8_E4M3, TUTTI_F8_E5M2,
                                          TUTTI_I8,  TUTTI_I32, TUTTI_U64, TUTTI_BOOL, TUTTI_C64 };
    static const tutti_reduction reductions[] = {
        TUTTI_SUM, TUTTI_AVG, TUTTI_PRODUCT, TUTTI_MIN, TUTTI_MAX, TUTTI_BXOR
    };
    tutti_group *group = tutti_world_group(world);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        for (size_t j = 0; j < sizeof reductions / sizeof *reductions; j++) {
            if (!tutti_reduction_applies(reductions[j], dtypes[i]))
                continue;
            check_all_reduce(group, 1 + i, dtypes[i], reductions[j], false);
            check_all_reduce(group, 70001, dtypes[i], reductions[j], j % 2 == 1);
        }
}

static void reduce_sizes(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    static const size_t counts[] = { 0, 1, 1000, 4097, 200003 };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        check_all_reduce(group, counts[i], TUTTI_F32, TUTTI_SUM, false);
        check_all_reduce(group, counts[i], TUTTI_F32, TUTTI_SUM, true);
    }
    if (!test_sanitized()) { /* several blocks */
        check_all_reduce(group, 2600011, TUTTI_BF16, TUTTI_AVG, false);
        check_all_reduce(group, 1100003, TUTTI_F32, TUTTI_SUM, true);
    }
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(group, &ran));
    CHECK(strcmp(ran.executor, "hosts") == 0);
}

TEST(all_reduce_between_two_hosts_has_the_bits_of_one) {
    on_hosts(one_each, 2, reduce_everything);
    on_hosts(one_each, 2, reduce_sizes);
}

TEST(all_reduce_between_three_hosts_of_one_rank_has_the_bits_of_one) {
    on_hosts(one_on_three, 3, reduce_everything);
    on_hosts(one_on_three, 3, reduce_sizes);
}

TEST(all_reduce_between_hosts_with_several_ranks_has_the_bits_of_one) {
    on_hosts(two_and_two, 4, reduce_everything);
    on_hosts(two_and_two, 4, reduce_sizes);
}

TEST(all_reduce_between_unequal_hosts_has_the_bits_of_one) {
    on_hosts(three_two_one, 6, reduce_sizes);
}

TEST(all_reduce_of_ranks_that_lie_across_hosts_has_the_bits_of_one) {
    on_hosts(in_turns, 5, reduce_sizes);
}

/* ---- moves ---- */

/* The element at `index` that `from` gives to `to`. */
static int element(int from, int to, size_t index) {
    return from * 1000003 + to * 10007 + (int)index;
}

static void gather_and_deal(tutti_group *group, size_t count) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    int *in = malloc((count * (size_t)size + 1) * sizeof *in), *out = malloc((count * (size_t)size + 1) * sizeof *out);
    for (size_t i = 0; i < count; i++)
        in[i] = element(rank, 0, i);
    memset(out, 0, count * (size_t)size * sizeof *out);
    CHECK_OK(tutti_all_gather(group, in, out, count, TUTTI_I32, NULL));
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(out[(size_t)from * count + i], element(from, 0, i));
    for (int root = 0; root < size; root++) {
        memset(out, 0, count * (size_t)size * sizeof *out);
        CHECK_OK(tutti_broadcast(group, in, out, count, TUTTI_I32, root, NULL));
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(out[i], element(root, 0, i));
        memset(out, 0, count * (size_t)size * sizeof *out);
        CHECK_OK(tutti_gather(group, in, out, count, TUTTI_I32, root, NULL));
        for (int from = 0; from < size && rank == root; from++)
            for (size_t i = 0; i < count; i++)
                CHECK_EQ(out[(size_t)from * count + i], element(from, 0, i));
    }
    for (int to = 0; to < size; to++)
        for (size_t i = 0; i < count; i++)
            in[(size_t)to * count + i] = element(rank, to, i);
    CHECK_OK(tutti_scatter(group, in, out, count, TUTTI_I32, size - 1, NULL));
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(out[i], element(size - 1, rank, i));
    CHECK_OK(tutti_all_to_all(group, in, out, count, TUTTI_I32, NULL));
    CHECK_OK(tutti_all_to_all(group, in, in, count, TUTTI_I32, NULL));
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < count; i++) {
            CHECK_EQ(out[(size_t)from * count + i], element(from, rank, i));
            CHECK_EQ(in[(size_t)from * count + i], element(from, rank, i));
        }
    free(in);
    free(out);
}

static void vectors(tutti_group *group) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t counts[MOST_RANKS], offsets[MOST_RANKS], sums[MOST_RANKS];
    int in[1000], out[2000];
    for (int i = 0; i < size; i++) {
        counts[i] = (size_t)(i * 7 % 5) * 3; /* some are empty */
        offsets[i] = (size_t)(size - 1 - i) * 100 + (size_t)rank;
    }
    for (size_t i = 0; i < counts[rank]; i++)
        in[i] = element(rank, 0, i);
    CHECK_OK(tutti_all_gather_v(group, in, out, counts, offsets, TUTTI_I32, NULL));
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < counts[from]; i++)
            CHECK_EQ(out[offsets[from] + i], element(from, 0, i));
    for (int to = 0; to < size; to++) { /* rank sends (rank + to) % 4 elements */
        counts[to] = (size_t)((rank + to) % 4);
        sums[to] = counts[to];
        offsets[to] = (size_t)to * 50;
        for (size_t i = 0; i < counts[to]; i++)
            in[offsets[to] + i] = element(rank, to, i);
    }
    CHECK_OK(tutti_all_to_all_v(group, in, counts, offsets, out, sums, NULL, TUTTI_I32, NULL));
    size_t at = 0;
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < sums[from]; i++)
            CHECK_EQ(out[at++], element(from, rank, i));
    int to[MOST_RANKS];
    for (int i = 0; i < size; i++)
        to[i] = (i + 1) % size;
    in[0] = element(rank, 0, 0);
    CHECK_OK(tutti_permute(group, in, in, 1, TUTTI_I32, to, NULL));
    CHECK_EQ(in[0], element((rank + size - 1) % size, 0, 0));
}

static void scatter_sums(tutti_group *group, size_t count) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t total = count * (size_t)size;
    float *in = malloc((total + 1) * sizeof *in), *out = malloc((total + 1) * sizeof *out),
          *expected = malloc((total + 1) * sizeof *expected);
    fill(in, total, TUTTI_F32, rank);
    expect(expected, 0, total, total, TUTTI_F32, TUTTI_SUM, NULL);
    CHECK_OK(tutti_reduce_scatter(group, in, out, count, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK(memcmp(out, expected + (size_t)rank * count, count * sizeof *out) == 0);
    memset(out, 0, total * sizeof *out);
    CHECK_OK(tutti_reduce(group, in, out, total, TUTTI_F32, TUTTI_SUM, 1, NULL));
    CHECK(rank != 1 || memcmp(out, expected, total * sizeof *out) == 0);
    size_t counts[MOST_RANKS] = { 0 };
    unsigned char *own = (unsigned char *)(in + (size_t)rank * count); /* at its own place, then at the start */
    memcpy(out, in, total * sizeof *out);
    CHECK_OK(tutti_reduce_scatter(group, in, own, count, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK(memcmp(own, expected + (size_t)rank * count, count * sizeof *in) == 0);
    memcpy(in, out, total * sizeof *in);
    CHECK_OK(tutti_reduce_scatter(group, in, in, count, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK(memcmp(in, expected + (size_t)rank * count, count * sizeof *in) == 0);
    memcpy(in, out, total * sizeof *in);
    counts[0] = total - 1;
    counts[size - 1] = 1;
    CHECK_OK(tutti_reduce_scatter_v(group, in, in, counts, TUTTI_F32, TUTTI_SUM, NULL));
    if (rank == 0)
        CHECK(memcmp(in, expected, (total - 1) * sizeof *in) == 0);
    if (rank == size - 1)
        CHECK(memcmp(in, expected + total - 1, sizeof *in) == 0);
    free(in);
    free(out);
    free(expected);
}

static void own_factors(tutti_group *group, size_t count) {
    int rank = tutti_group_rank(group);
    double factors[MOST_RANKS];
    for (int i = 0; i < MOST_RANKS; i++)
        factors[i] = (double)(float)(0.5 + 0.3 * i);
    float factor = (float)factors[rank], *in = malloc(count * sizeof *in), *expected = malloc(count * sizeof *expected);
    fill(in, count, TUTTI_F32, rank);
    expect(expected, 0, count, count, TUTTI_F32, TUTTI_PREMUL_SUM, factors);
    CHECK_OK(tutti_all_reduce(group, in, in, count, TUTTI_F32, TUTTI_PREMUL_SUM,
                              TUTTI_OPTIONS(tutti_call, .factor = &factor)));
    CHECK(memcmp(in, expected, count * sizeof *in) == 0);
    free(in);
    free(expected);
}

static void move_everything(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    static const size_t counts[] = { 1, 333, 50001 };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        gather_and_deal(group, counts[i]);
        scatter_sums(group, counts[i]);
        own_factors(group, counts[i]);
        CHECK_OK(tutti_barrier(group, NULL));
    }
    vectors(group);
    int *large = calloc(5 << 18, sizeof *large);
    large[0] = large[(5 << 18) - 1] = tutti_group_rank(group) == 1 ? 77 : 0;
    CHECK_OK(tutti_broadcast(group, large, large, 5 << 18, TUTTI_I32, 1, NULL));
    CHECK(large[0] == 77 && large[(5 << 18) - 1] == 77);
    free(large);
}

TEST(data_moves_between_two_and_three_hosts) {
    on_hosts(one_each, 2, move_everything);
    on_hosts(one_on_three, 3, move_everything);
    on_hosts(two_and_two, 4, move_everything);
}

TEST(data_moves_between_unequal_hosts_and_ranks_in_turns) {
    on_hosts(three_two_one, 6, move_everything);
    on_hosts(in_turns, 5, move_everything);
}

/* ---- works ---- */

static void work_and_batch(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group), rank = tutti_group_rank(group);
    enum {
        WORKS = 6
    };
    tutti_work *works[WORKS];
    int64_t in[WORKS], out[WORKS];
    for (int i = 0; i < WORKS; i++) {
        in[i] = rank + i;
        CHECK_OK(tutti_all_reduce(group, &in[i], &out[i], 1, TUTTI_I64, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .work = &works[i])));
    }
    for (int i = WORKS - 1; i >= 0; i--) {
        CHECK_OK(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
        CHECK_EQ(out[i], (int64_t)size * (size - 1) / 2 + i * size);
    }
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int i = 0; i < WORKS; i++)
        CHECK_OK(tutti_all_reduce(group, &in[i], &out[i], 1, TUTTI_I64, TUTTI_MAX,
                                  TUTTI_OPTIONS(tutti_call, .batch = batch)));
    CHECK_OK(tutti_batch_end(batch, NULL));
    for (int i = 0; i < WORKS; i++)
        CHECK_EQ(out[i], size - 1 + i);
}

TEST(works_and_batches_run_between_hosts) {
    on_hosts(two_and_two, 4, work_and_batch);
}

/* ---- failures ---- */

/* After some calls: UCX 1.13 may end a process itself when a peer dies while the two connect (docs/hosts.md). */
static void one_dies(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int value = 1, sum;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 10 && status == TUTTI_OK; i++)
        status = tutti_all_reduce(group, &value, &sum, 1, TUTTI_I32, TUTTI_SUM, NULL);
    if (tutti_world_rank(world) == 1) {
        CHECK_STATUS(status, TUTTI_OK);
        kill(getpid(), SIGKILL); /* the others may still be in its last call */
    }
    while (status == TUTTI_OK)
        status = tutti_all_reduce(group, &value, &sum, 1, TUTTI_I32, TUTTI_SUM, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_DEAD);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 1);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD); /* the group has ended */
}

TEST(a_dead_process_ends_the_waits_on_every_host) {
    on_hosts(one_each, 2, one_dies);
    on_hosts(two_and_two, 4, one_dies);
    on_hosts(three_two_one, 6, one_dies);
}

static void one_closes(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        return;
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_GONE);
}

TEST(a_rank_that_closed_its_world_is_named_on_the_other_host) {
    on_hosts(one_each, 2, one_closes);
}

static void one_is_late(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0)
        CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = 300 * TU_MILLISECOND)),
                     TUTTI_ERROR_TIMEOUT);
    else
        while (tutti_group_check(group) == TUTTI_OK) /* rank 0 gives up, and tells */
            usleep(1000);
}

TEST(a_timeout_ends_the_group_on_every_host) {
    on_hosts(one_each, 2, one_is_late);
}

static void one_calls_something_else(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int in[4] = { 0 }, out[16], last = tutti_world_size(world) - 1;
    CHECK_OK(tutti_barrier(group, NULL));
    bool odd = tutti_world_rank(world) == last;
    tutti_status status = odd ? tutti_all_reduce(group, in, out, 3, TUTTI_I32, TUTTI_SUM, NULL)
                              : tutti_all_reduce(group, in, out, 4, TUTTI_I32, TUTTI_SUM, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "count") != NULL);
}

static void roots_differ(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int value = 0, other = 1 - tutti_world_rank(world);
    CHECK_OK(tutti_barrier(group, NULL));
    /* Each takes the other for the root, so neither sends anything: they ask. */
    CHECK_STATUS(tutti_broadcast(group, &value, &value, 1, TUTTI_I32, other, NULL), TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "root") != NULL);
}

static void operations_differ(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int in[2] = { 0 }, out[4];
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status = tutti_world_rank(world) == 1 ? tutti_barrier(group, NULL)
                                                       : tutti_all_gather(group, in, out, 1, TUTTI_I32, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "barrier") != NULL && strstr(tutti_error_message(), "all_gather") != NULL);
}

static void splits_differ(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int in[8] = { 0 }, out[8];
    size_t sends[2] = { 1, 3 }, expects[2] = { 1, 2 };
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status = tutti_world_rank(world) == 0
                              ? tutti_all_to_all_v(group, in, sends, NULL, out, expects, NULL, TUTTI_I32, NULL)
                              : tutti_all_to_all_v(group, in, expects, NULL, out, expects, NULL, TUTTI_I32, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "expects") != NULL);
}

TEST(calls_that_differ_between_hosts_are_told_with_both_sides) {
    on_hosts(one_each, 2, splits_differ);
    on_hosts(one_each, 2, one_calls_something_else);
    on_hosts(one_each, 2, roots_differ);
    on_hosts(one_each, 2, operations_differ);
}

static void one_aborts(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = tutti_barrier(group, NULL); /* the abort may overtake it on the others */
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(status, TUTTI_OK);
        CHECK_OK(tutti_group_abort(group, "no more"));
        return;
    }
    while (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_ABORTED);
    CHECK(strstr(tutti_error_message(), "no more") != NULL);
}

TEST(an_abort_reaches_the_other_hosts) {
    on_hosts(two_and_two, 4, one_aborts);
}

/* ---- what UCX may not do to a program ---- */

static void handler_of_the_program(int number) {
    (void)number;
}

/* Functions that UCX's memory hooks would patch. */
static void copy_code(unsigned char code[3][16]) {
    void *functions[] = { (void *)(uintptr_t)mmap, (void *)(uintptr_t)munmap, (void *)(uintptr_t)sbrk };
    for (int i = 0; i < 3; i++)
        memcpy(code[i], functions[i], sizeof code[i]);
}

static void leave_the_program_alone(tutti_world *world) {
    struct sigaction mine = { .sa_handler = handler_of_the_program }, now;
    unsigned char before[3][16], after[3][16];
    CHECK(sigaction(SIGSEGV, &mine, NULL) == 0);
    copy_code(before);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    copy_code(after);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK(sigaction(SIGSEGV, NULL, &now) == 0 && now.sa_handler == handler_of_the_program);
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
    CHECK(getenv("UCX_TLS") == NULL && getenv("UCX_ERROR_SIGNALS") == NULL);
}

TEST(ucx_sets_no_signal_handlers_and_no_memory_hooks) {
    if (test_sanitized())
        SKIP("the sanitizer has handlers and hooks of its own");
    on_hosts(one_each, 2, leave_the_program_alone);
}

static void no_plugin(tutti_world *world) {
    int value = 0;
    tutti_status status = tutti_all_reduce(tutti_world_group(world), &value, &value, 1, TUTTI_I32, TUTTI_SUM, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_UNSUPPORTED);
    CHECK(strstr(tutti_error_message(), "tutti-ucx") != NULL);
}

TEST(without_the_plugin_the_error_names_it) {
    char kept[512];
    snprintf(kept, sizeof kept, "%s", getenv("TUTTI_PLUGIN_PATH") != NULL ? getenv("TUTTI_PLUGIN_PATH") : "");
    plugin_needed = false;
    setenv("TUTTI_PLUGIN_PATH", "/nonexistent", 1);
    on_hosts(one_each, 2, no_plugin);
    setenv("TUTTI_PLUGIN_PATH", kept, 1);
    plugin_needed = true;
}

/* ---- named operations on symmetric memory ---- */

static void named(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group), rank = tutti_group_rank(group);
    enum {
        COUNT = 3000
    };
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, COUNT * (size_t)size * sizeof(int64_t), NULL, &memory));
    int64_t *data = tutti_memory_data(memory), out[COUNT];
    int64_t sum = (int64_t)size * (size - 1) / 2;
    for (int i = 0; i < COUNT * size; i++)
        data[i] = rank + i;
    CHECK_OK(tutti_one_shot_all_reduce(group, data, out, COUNT, TUTTI_I64, TUTTI_SUM, NULL));
    CHECK_EQ(out[7], sum + 7 * size);
    CHECK_OK(tutti_reduce_scatter_out(group, data, out, (size_t)size, COUNT, false, TUTTI_I64, TUTTI_SUM, NULL));
    CHECK_EQ(out[3], sum + (int64_t)size * (rank * COUNT + 3));
    int64_t mine[2] = { rank, -rank };
    CHECK_OK(tutti_one_shot_all_reduce_copy(group, data, COUNT, mine, out, 2, TUTTI_I64, TUTTI_MIN, NULL));
    CHECK(out[0] == 0 && out[1] == 1 - size);
    for (int i = 0; i < COUNT; i++)
        data[i] = rank;
    CHECK_OK(tutti_two_shot_all_reduce(group, data, COUNT, TUTTI_I64, TUTTI_MAX, NULL));
    CHECK_EQ(data[COUNT - 1], size - 1);
    CHECK_OK(tutti_low_contention_all_gather(group, mine, data, 2, TUTTI_I64, NULL));
    CHECK(data[2] == 1 && data[3] == -1);
    tutti_memory_release(memory);
}

TEST(named_operations_on_symmetric_memory_run_between_hosts) {
    on_hosts(two_and_two, 4, named);
}

/* ---- what is not there ---- */

static void say_what_is_missing(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int64_t value = 0, out[2];
    CHECK_STATUS(tutti_all_reduce(group, &value, &value, 1, TUTTI_I64, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .algorithm = TUTTI_ALGORITHM_TWO_SHOT)),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK(strstr(tutti_error_message(), "without a forced algorithm") != NULL);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    CHECK_STATUS(
        tutti_reduce_scatter_out(group, tutti_memory_data(memory), out, 2, 2, true, TUTTI_I64, TUTTI_SUM, NULL),
        TUTTI_ERROR_UNSUPPORTED);
    CHECK(strstr(tutti_error_message(), "tutti_reduce_scatter") != NULL);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL)); /* nothing of that ended the group */
}

TEST(what_does_not_work_between_hosts_says_what_does_and_ends_nothing) {
    on_hosts(one_each, 2, say_what_is_missing);
}
