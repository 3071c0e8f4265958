/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused products beside the product alone, on input that is already there, and beside the unfused pair; they take turns
 * in one run, on every rank at once.
 *
 *     fused [--ranks N] [--threads N] [--rounds N] [--from SIZE] [--to SIZE] [gather|scatter] [f32|bf16|f8]
 *
 * Rows of the table: M = N = K from 256 to 4096, where M is the gathered size or the one that is scattered. A figure is
 * the median of the rounds (four times as many below 1024), each the time of the slowest rank after a barrier; behind a
 * ratio to the product alone stand the smallest and the largest ratio of a round. f8 is the scaled form, against
 * tt_scaled_matmul. Results are compared with the unfused pair in the same run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/fused.h>
#include <tutti/ops.h>
#include <tutti/peers.h>
#include <tutti/symmetric.h>

#define MOST_ROUNDS 64

typedef struct settings {
    int ranks, threads, rounds;
    int64_t from, to;
    const char *kind, *dtype;
} settings;

enum {
    PRODUCT, /* alone */
    PAIR,
    FUSED_PRIVATE,
    FUSED_SYMMETRIC, /* gathers only: where inputs lie does not matter to what is scattered */
    FORMS
};

/* The tensors of one row of the table. */
typedef struct bench {
    const settings *with;
    tutti_world *world;
    tutti_group *group;
    tutti_dtype dtype;
    int64_t size;
    bool scatter;
    tt_tensor *shard, *placed, *whole, *right, *one;
} bench;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void check(tutti_status status) {
    if (status == TUTTI_OK)
        return;
    fprintf(stderr, "%s\n", tutti_error_message());
    exit(1);
}

/* ---- forms ---- */

static tt_tensor *product(const bench *of, tt_tensor *left) {
    return of->dtype == TUTTI_F8_E4M3 ? tt_scaled_matmul(left, of->right, of->one, of->one, NULL, NULL, TUTTI_BF16)
                                      : tt_matmul(left, of->right);
}

static tt_tensor *gathered(const bench *of, tt_tensor *shard) {
    tt_tensor_list result;
    if (of->dtype == TUTTI_F8_E4M3) {
        tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
        options.out_dtypes = &(tutti_dtype){ TUTTI_BF16 };
        options.out_dtype_count = 1;
        result = tt_fused_all_gather_scaled_matmul(shard, tt_tensors(of->right), of->one, tt_tensors(of->one), 0,
                                                   of->group, &options, NULL);
    } else {
        result = tt_fused_all_gather_matmul(shard, tt_tensors(of->right), 0, of->group, NULL);
    }
    return result.count == 1 ? result.at[0] : NULL;
}

static tt_tensor *scattered(const bench *of) {
    return of->dtype == TUTTI_F8_E4M3
               ? tt_fused_scaled_matmul_reduce_scatter(of->whole, of->right, of->one, of->one, TUTTI_SUM, 0, 0,
                                                       tt_shape(of->size, of->size), NULL, NULL, TUTTI_BF16, of->group)
               : tt_fused_matmul_reduce_scatter(of->whole, of->right, TUTTI_SUM, 0, of->group);
}

static tt_tensor *run(const bench *of, int form) {
    switch (form) {
    case PRODUCT:
        return product(of, of->whole);
    case PAIR:
        return of->scatter ? tt_wait(tt_reduce_scatter(product(of, of->whole), TUTTI_SUM, 0, of->group))
                           : product(of, tt_all_gather(of->shard, 0, of->group));
    case FUSED_PRIVATE:
        return of->scatter ? scattered(of) : gathered(of, of->shard);
    default:
        return gathered(of, of->placed);
    }
}

/* ---- measuring ---- */

/* Seconds of one call on the slowest rank. */
static double timed(const bench *of, int form) {
    tt_scope scope = tt_scope_open();
    check(tutti_barrier(of->group, NULL));
    double start = now();
    run(of, form);
    double seconds = now() - start;
    check(tt_scope_close(&scope));
    check(tutti_all_reduce(of->group, &seconds, &seconds, 1, TUTTI_F64, TUTTI_MAX, NULL));
    return seconds;
}

static int by_size(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return difference < 0 ? -1 : difference > 0;
}

static double median(const double *values, int count) {
    double sorted[MOST_ROUNDS];
    memcpy(sorted, values, (size_t)count * sizeof *values);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    return count % 2 == 1 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

static void print_ratio(double seconds[FORMS][MOST_ROUNDS], int form, int rounds) {
    double ratios[MOST_ROUNDS], least = 1e9, most = 0;
    for (int i = 0; i < rounds; i++) {
        ratios[i] = seconds[form][i] / seconds[PRODUCT][i];
        least = ratios[i] < least ? ratios[i] : least;
        most = ratios[i] > most ? ratios[i] : most;
    }
    printf("  %6.3f (%.2f-%.2f)", median(seconds[form], rounds) / median(seconds[PRODUCT], rounds), least, most);
}

static void compare(const bench *of, int forms) {
    tt_scope scope = tt_scope_open();
    tt_tensor *expected = run(of, PAIR);
    for (int form = FUSED_PRIVATE; form < forms; form++)
        if (!tt_allclose(run(of, form), expected, of->dtype == TUTTI_F32 ? 1e-4 : 2e-2, 1e-2)) {
            fprintf(stderr, "form %d gives another result\n", form);
            exit(1);
        }
    check(tt_scope_close(&scope));
}

static tt_tensor *random_tensor(tt_dims shape, tutti_dtype dtype) {
    return tt_to(tt_rand(shape, TUTTI_F32, NULL), dtype);
}

static void measure(bench *of) {
    tt_scope scope = tt_scope_open();
    int ranks = tutti_group_size(of->group), forms = of->scatter ? FUSED_SYMMETRIC : FORMS;
    double seconds[FORMS][MOST_ROUNDS];
    tt_dims shape = tt_shape(of->size / ranks, of->size);
    of->shard = random_tensor(shape, of->dtype);
    of->whole = random_tensor(tt_shape(of->size, of->size), of->dtype);
    of->right = random_tensor(tt_shape(of->size, of->size), of->dtype);
    of->one = tt_full(tt_shape(1), 0.5, TUTTI_F32, NULL);
    of->placed = tt_symm_empty(of->world, shape, of->dtype, NULL);
    tt_copy_(of->placed, of->shard);
    tutti_peers *peers;
    check(tutti_memory_rendezvous(tt_symm_memory(of->placed), of->group, &peers));
    tutti_peers_release(peers);
    compare(of, forms);
    int rounds = of->size < 1024 ? 4 * of->with->rounds : of->with->rounds; /* short ones are disturbed easily */
    rounds = rounds < MOST_ROUNDS ? rounds : MOST_ROUNDS;
    for (int round = 0; round < rounds; round++)
        for (int form = 0; form < forms; form++)
            seconds[form][round] = timed(of, form);
    if (tutti_group_rank(of->group) == 0) {
        printf("%-8s %-8s %5lld %10.3f", of->scatter ? "scatter" : "gather", tutti_dtype_name(of->dtype),
               (long long)of->size, 1e3 * median(seconds[PRODUCT], rounds));
        for (int form = PAIR; form < forms; form++)
            print_ratio(seconds, form, rounds);
        printf("\n");
        fflush(stdout);
    }
    check(tt_scope_close(&scope));
}

static tutti_status bench_main(tutti_world *world, void *argument) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F8_E4M3 };
    static const char *const names[] = { "f32", "bf16", "f8" };
    const settings *with = argument;
    bench of = { .with = with, .world = world, .group = tutti_world_group(world) };
    if (tutti_group_rank(of.group) == 0)
        printf("%d ranks of %d threads, %d rounds; ratios to the product alone\n%-8s %-8s %5s %10s  %-19s  %-19s  %s\n",
               tutti_group_size(of.group), with->threads, with->rounds, "", "", "size", "product ms", "unfused pair",
               "fused, private", "fused, symmetric");
    for (int scatter = 0; scatter < 2; scatter++)
        for (int i = 0; i < 3; i++)
            for (of.size = with->from; of.size <= with->to; of.size *= 2) {
                of.scatter = scatter;
                of.dtype = dtypes[i];
                if ((with->kind == NULL || strcmp(with->kind, scatter ? "scatter" : "gather") == 0) &&
                    (with->dtype == NULL || strcmp(with->dtype, names[i]) == 0))
                    measure(&of);
            }
    return TUTTI_OK;
}

int main(int argc, char **argv) {
    settings with = { .ranks = 2, .threads = 1, .rounds = 9, .from = 256, .to = 4096 };
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "gather") == 0 || strcmp(argv[i], "scatter") == 0)
            with.kind = argv[i];
        else if (argv[i][0] != '-')
            with.dtype = argv[i];
        else if (strcmp(argv[i], "--ranks") == 0)
            with.ranks = atoi(value), i++;
        else if (strcmp(argv[i], "--threads") == 0)
            with.threads = atoi(value), i++;
        else if (strcmp(argv[i], "--rounds") == 0)
            with.rounds = atoi(value), i++;
        else if (strcmp(argv[i], "--from") == 0)
            with.from = atoi(value), i++;
        else if (strcmp(argv[i], "--to") == 0)
            with.to = atoi(value), i++;
    }
    with.rounds = with.rounds < 1 ? 1 : with.rounds > MOST_ROUNDS ? MOST_ROUNDS : with.rounds;
    with.from = with.from < with.ranks ? with.ranks : with.from;
    char threads[16];
    snprintf(threads, sizeof threads, "%d", with.threads);
    if (getenv("OMP_NUM_THREADS") == NULL) { /* which libraries read when they are loaded */
        setenv("OMP_NUM_THREADS", threads, 1);
        setenv("OPENBLAS_NUM_THREADS", threads, 1);
        setenv("TUTTI_THREADS", threads, 0);
        execv("/proc/self/exe", argv);
    }
    check(tutti_spawn(TUTTI_SPAWN_PROCESSES, with.ranks, bench_main, &with));
    return 0;
}
