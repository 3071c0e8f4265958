/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused products beside the product alone, on input that is already there, and beside the unfused pair; they take turns
 * in one run, on every rank at once, in another order in every round.
 *
 *     fused [--ranks N] [--threads N] [--rounds N] [--quantile Q] [--no-bare] [--work] [--m SIZES] [--n SIZES]
 *           [--k SIZES] [gather|scatter] [f32|bf16|f8] [M,N,K ...]
 *
 * Rows of the table: each of M, N and K is 256, 1024 or 4096, or what a list like 256,512 says; or those that are
 * named, like 256,4096,256. The product is (M, K) (K, N); M is the gathered size, or the one that is scattered. A
 * figure is the median of the rounds (at least 7, and more where a product is short), each the time of the slowest rank
 * after a barrier; behind a ratio to the product alone stand the smallest and the largest ratio of a round. --quantile
 * 0.1 takes what a tenth of the rounds stayed below instead of the median: on a machine that others use, a figure of
 * its quiet moments. f8 is the scaled form, against tt_scaled_matmul. Results are compared with the unfused pair in the
 * same run. A mark behind a row says what misses its aim: 1.05 for gathers and 1.10 for scatters (!), or the unfused
 * pair by more than 3 % (p).
 *
 * "bare" is what no form can do without, and nothing else: a flag each way and the product; a gather copies the others'
 * shards, which lie in shared memory, to where the product reads them, a scatter copies the others' rows to them past
 * the caches and adds what came. "bare, private" also copies this rank's shard to shared memory first. They check
 * nothing, agree on nothing, and their memory is there beforehand. --no-bare leaves them out.
 *
 * --work counts the processor time of a rank, the mean of all, instead of the time of the slowest: what a form costs,
 * without the time in which a rank sleeps because another is late. That can be told while other programs run, too.
 */
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <tutti/collective.h>
#include <tutti/fused.h>
#include <tutti/ops.h>
#include <tutti/peers.h>
#include <tutti/symmetric.h>

#include "measure.h"

#define LEAST_ROUNDS 7
#define MOST_ROUNDS 1001
#define USUAL_ROUNDS 101 /* at most, unless more are asked for */
#define ROW_SECONDS 0.15 /* that one form of a row is measured at least, where that many rounds are allowed */
#define MOST_SIZES 8
#define MOST_NAMED 64 /* rows */

typedef struct sizes {
    int count;
    int64_t at[MOST_SIZES];
} sizes;

typedef struct settings {
    int ranks, threads, rounds; /* rounds 0: as many as a row needs */
    double quantile;
    bool no_bare, work;
    sizes rows, columns, depths;
    int named_count; /* 0: all rows that the sizes make */
    sizes named[MOST_NAMED];
    const char *kind, *dtype;
} settings;

enum {
    PRODUCT, /* alone */
    BARE,
    BARE_PRIVATE,
    PAIR,
    FUSED_PRIVATE,
    FUSED_SYMMETRIC,
    FORMS
};

/* The tensors of one row of the table. */
typedef struct bench {
    const settings *with;
    tutti_world *world;
    tutti_group *group;
    tutti_dtype dtype;
    int64_t rows, columns, depth;
    bool scatter;
    tt_tensor *shard, *placed, *whole, *right, *one;
    tt_tensor *inbox;    /* of the bare form: rows of a result from every rank */
    tutti_peers *shards; /* the others' `placed` */
    tutti_peers *boxes;  /* the others' `inbox` */
} bench;

/* ---- forms ---- */

/* Where inputs lie matters to gathers only. */
static bool has_form(const bench *of, int form) {
    if (of->with->no_bare && (form == BARE || form == BARE_PRIVATE))
        return false;
    return !of->scatter || (form != BARE_PRIVATE && form != FUSED_SYMMETRIC);
}

static tt_tensor *product(const bench *of, tt_tensor *left) {
    return of->dtype == TUTTI_F8_E4M3
               ? tt_scaled_matmul(left, of->right, of->one, of->one, NULL, NULL, TUTTI_BF16, false)
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
                                                       tt_shape(of->rows, of->columns), NULL, NULL, TUTTI_BF16, false,
                                                       of->group)
               : tt_fused_matmul_reduce_scatter(of->whole, of->right, TUTTI_SUM, 0, of->group);
}

/* Reads what another core has written in four pages at once, which is quicker than one stream. */
static void fetch(char *to, const char *from, size_t bytes) {
    const size_t page = 4096, line = 64;
    for (; bytes >= 4 * page; bytes -= 4 * page, to += 4 * page, from += 4 * page)
        for (size_t i = 0; i < page; i += line)
            for (size_t j = 0; j < 4 * page; j += page)
                memcpy(to + j + i, from + j + i, line);
    memcpy(to, from, bytes);
}

/* Past the caches, where the processor has such stores: its owner has read these lines last. */
static void hand_over(char *to, const char *from, size_t bytes) {
#if defined(__x86_64__)
    for (; bytes >= sizeof(__m128i); bytes -= sizeof(__m128i), to += sizeof(__m128i), from += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(void *)to, _mm_loadu_si128((const __m128i *)(const void *)from));
    _mm_sfence();
#endif
    memcpy(to, from, bytes);
}

static tt_tensor *bare_gather(const bench *of, bool staged) {
    int rank = tutti_group_rank(of->group), ranks = tutti_group_size(of->group);
    size_t bytes = (size_t)tt_numel(of->shard) * tutti_dtype_size(of->dtype);
    char *rows = tt_data_mut(of->whole);
    if (staged)
        hand_over(tutti_peers_buffer(of->shards, rank), tt_data(of->shard), bytes);
    for (int step = 1; step < ranks; step++)
        check(tutti_peers_signal(of->shards, (rank + step) % ranks, 1, NULL));
    for (int step = 1; step < ranks; step++) {
        int from = (rank + step) % ranks;
        check(tutti_peers_wait_signal(of->shards, from, 1, NULL));
        fetch(rows + (size_t)from * bytes, tutti_peers_buffer(of->shards, from), bytes);
    }
    return product(of, of->whole);
}

static tt_tensor *bare_scatter(const bench *of) {
    int rank = tutti_group_rank(of->group), ranks = tutti_group_size(of->group);
    int64_t rows = of->rows / ranks;
    tt_tensor *made = product(of, of->whole), *sum = NULL;
    size_t bytes = (size_t)(rows * of->columns) * tutti_dtype_size(tt_dtype(made));
    for (int step = 1; step < ranks; step++) {
        int to = (rank + step) % ranks;
        hand_over((char *)tutti_peers_buffer(of->boxes, to) + (size_t)rank * bytes,
                  (const char *)tt_data(made) + (size_t)to * bytes, bytes);
        check(tutti_peers_signal(of->boxes, to, 1, NULL));
    }
    for (int step = 1; step < ranks; step++)
        check(tutti_peers_wait_signal(of->boxes, (rank + step) % ranks, 1, NULL));
    for (int from = 0; from < ranks; from++) {
        tt_tensor *part = from == rank ? tt_narrow(made, 0, rank * rows, rows) : tt_select(of->inbox, 0, from);
        sum = sum == NULL ? part : tt_add(sum, part);
    }
    return sum;
}

static tt_tensor *run(const bench *of, int form) {
    switch (form) {
    case PRODUCT:
        return product(of, of->whole);
    case BARE:
        return of->scatter ? bare_scatter(of) : bare_gather(of, false);
    case BARE_PRIVATE:
        return bare_gather(of, true);
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

static double processor_time(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Seconds of one call on the slowest rank, or of the work of all. */
static double timed(const bench *of, int form) {
    bool work = of->with->work;
    tt_scope scope = tt_scope_open();
    check(tutti_barrier(of->group, NULL));
    double start = work ? processor_time() : now();
    run(of, form);
    double seconds = (work ? processor_time() : now()) - start;
    check(tt_scope_close(&scope));
    check(tutti_all_reduce(of->group, &seconds, &seconds, 1, TUTTI_F64, work ? TUTTI_AVG : TUTTI_MAX, NULL));
    return seconds;
}

static double figure(const bench *of, const double *values, int count) {
    double sorted[MOST_ROUNDS];
    memcpy(sorted, values, (size_t)count * sizeof *values);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    return sorted[(int)(of->with->quantile * (count - 1) + 0.5)];
}

/* Prints a form's ratio to the product alone, and returns it. */
static double print_ratio(const bench *of, double seconds[FORMS][MOST_ROUNDS], int form, int rounds) {
    double least = 1e9, most = 0, ratio = figure(of, seconds[form], rounds) / figure(of, seconds[PRODUCT], rounds);
    for (int i = 0; i < rounds; i++) {
        double one = seconds[form][i] / seconds[PRODUCT][i];
        least = one < least ? one : least;
        most = one > most ? one : most;
    }
    printf("  %6.3f (%.2f-%.2f)", ratio, least, most);
    return ratio;
}

static void print_row(const bench *of, double seconds[FORMS][MOST_ROUNDS], int rounds) {
    double pair = 0, aim = of->scatter ? 1.10 : 1.05;
    bool misses_aim = false, misses_pair = false;
    printf("%-8s %-8s %5lld %5lld %5lld %11.1f", of->scatter ? "scatter" : "gather", tutti_dtype_name(of->dtype),
           (long long)of->rows, (long long)of->columns, (long long)of->depth,
           1e6 * figure(of, seconds[PRODUCT], rounds));
    for (int form = BARE; form < FORMS; form++) {
        if (!has_form(of, form)) {
            printf("  %19s", "");
            continue;
        }
        double ratio = print_ratio(of, seconds, form, rounds);
        pair = form == PAIR ? ratio : pair;
        misses_aim = misses_aim || (form > PAIR && ratio > aim);
        misses_pair = misses_pair || (form > PAIR && ratio > pair + 0.03);
    }
    printf("%s%s%s\n", misses_aim || misses_pair ? "  " : "", misses_aim ? "!" : "", misses_pair ? "p" : "");
    fflush(stdout);
}

static void compare(const bench *of) {
    tt_scope scope = tt_scope_open();
    tt_tensor *expected = run(of, PAIR);
    for (int form = BARE; form < FORMS; form++)
        if (has_form(of, form) && !tt_allclose(run(of, form), expected, of->dtype == TUTTI_F32 ? 1e-4 : 2e-2, 1e-2)) {
            fprintf(stderr, "form %d gives another result\n", form);
            exit(1);
        }
    check(tt_scope_close(&scope));
}

static tt_tensor *random_tensor(tt_dims shape, tutti_dtype dtype) {
    return tt_to(tt_rand(shape, TUTTI_F32, NULL), dtype);
}

/* Rounds of a row, the same on all ranks: so many that a form takes some time in all. */
static int rounds_of(const bench *of) {
    if (of->with->rounds != 0)
        return of->with->rounds;
    double first = timed(of, PRODUCT), again = timed(of, PRODUCT), one = again < first ? again : first;
    int rounds = (int)(ROW_SECONDS / one);
    return rounds < LEAST_ROUNDS ? LEAST_ROUNDS : rounds > USUAL_ROUNDS ? USUAL_ROUNDS : rounds;
}

/* Another order in every round, the same on all ranks: what a form finds in the caches is left by the one before. */
static void shuffle(int order[FORMS], uint64_t *state) {
    for (int i = 0; i < FORMS; i++)
        order[i] = i;
    for (int i = FORMS - 1; i > 0; i--) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        int other = (int)((*state >> 33) % (uint64_t)(i + 1)), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
}

static void measure(bench *of) {
    tt_scope scope = tt_scope_open();
    int ranks = tutti_group_size(of->group);
    static double seconds[FORMS][MOST_ROUNDS];
    tt_dims shape = tt_shape(of->rows / ranks, of->depth);
    of->shard = random_tensor(shape, of->dtype);
    of->whole = of->scatter ? random_tensor(tt_shape(of->rows, of->depth), of->dtype)
                            : tt_clone(tt_all_gather(of->shard, 0, of->group));
    of->right = random_tensor(tt_shape(of->depth, of->columns), of->dtype);
    of->one = tt_full(tt_shape(1), 0.5, TUTTI_F32, NULL);
    of->placed = tt_symm_empty(of->world, shape, of->dtype, NULL);
    tt_copy_(of->placed, of->shard);
    of->inbox = tt_symm_empty(of->world, tt_shape(ranks, of->rows / ranks, of->columns),
                              of->dtype == TUTTI_F32 ? TUTTI_F32 : TUTTI_BF16, NULL);
    check(tutti_memory_rendezvous(tt_symm_memory(of->placed), of->group, &of->shards));
    check(tutti_memory_rendezvous(tt_symm_memory(of->inbox), of->group, &of->boxes));
    compare(of);
    int rounds = rounds_of(of), order[FORMS];
    uint64_t state = 1;
    for (int round = 0; round < rounds; round++) {
        shuffle(order, &state);
        for (int i = 0; i < FORMS; i++)
            if (has_form(of, order[i]))
                seconds[order[i]][round] = timed(of, order[i]);
    }
    if (tutti_group_rank(of->group) == 0)
        print_row(of, seconds, rounds);
    tutti_peers_release(of->shards);
    tutti_peers_release(of->boxes);
    check(tt_scope_close(&scope));
}

static void measure_row(bench *of, int64_t rows, int64_t columns, int64_t depth) {
    of->rows = rows;
    of->columns = columns;
    of->depth = depth;
    measure(of);
}

static void measure_sizes(bench *of) {
    const settings *with = of->with;
    for (int i = 0; i < with->named_count; i++)
        measure_row(of, with->named[i].at[0], with->named[i].at[1], with->named[i].at[2]);
    for (int i = 0; with->named_count == 0 && i < with->rows.count; i++)
        for (int j = 0; j < with->columns.count; j++)
            for (int k = 0; k < with->depths.count; k++)
                measure_row(of, with->rows.at[i], with->columns.at[j], with->depths.at[k]);
}

static tutti_status bench_main(tutti_world *world, void *argument) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F8_E4M3 };
    static const char *const names[] = { "f32", "bf16", "f8" };
    const settings *with = argument;
    bench of = { .with = with, .world = world, .group = tutti_world_group(world) };
    if (tutti_group_rank(of.group) == 0)
        printf("%d ranks of %d threads; ratios to the product alone\n%-8s %-8s %5s %5s %5s %11s  %-19s  %-19s  %-19s  "
               "%-19s  %s\n",
               tutti_group_size(of.group), with->threads, "", "", "M", "N", "K", "product us", "bare", "bare, private",
               "unfused pair", "fused, private", "fused, symmetric");
    for (int scatter = 0; scatter < 2; scatter++)
        for (int i = 0; i < 3; i++) {
            of.scatter = scatter;
            of.dtype = dtypes[i];
            if ((with->kind == NULL || strcmp(with->kind, scatter ? "scatter" : "gather") == 0) &&
                (with->dtype == NULL || strcmp(with->dtype, names[i]) == 0))
                measure_sizes(&of);
        }
    return TUTTI_OK;
}

static sizes read_sizes(const char *text) {
    sizes list = { 0, { 0 } };
    for (char *end; list.count < MOST_SIZES; text = end + 1) {
        list.at[list.count++] = strtoll(text, &end, 10);
        if (*end != ',')
            break;
    }
    return list;
}

static void name_row(settings *with, const char *text) {
    sizes row = read_sizes(text);
    if (row.count != 3 || with->named_count == MOST_NAMED) {
        fprintf(stderr, "%s is no row: M,N,K, and at most %d of them\n", text, MOST_NAMED);
        exit(1);
    }
    with->named[with->named_count++] = row;
}

int main(int argc, char **argv) {
    const sizes usual = { 3, { 256, 1024, 4096 } };
    settings with = { .ranks = 2, .threads = 1, .quantile = 0.5, .rows = usual, .columns = usual, .depths = usual };
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "gather") == 0 || strcmp(argv[i], "scatter") == 0)
            with.kind = argv[i];
        else if (strchr(argv[i], ',') != NULL)
            name_row(&with, argv[i]);
        else if (strcmp(argv[i], "--no-bare") == 0)
            with.no_bare = true;
        else if (strcmp(argv[i], "--work") == 0)
            with.work = true;
        else if (argv[i][0] != '-')
            with.dtype = argv[i];
        else if (strcmp(argv[i], "--ranks") == 0)
            with.ranks = atoi(value), i++;
        else if (strcmp(argv[i], "--threads") == 0)
            with.threads = atoi(value), i++;
        else if (strcmp(argv[i], "--rounds") == 0)
            with.rounds = atoi(value), i++;
        else if (strcmp(argv[i], "--quantile") == 0)
            with.quantile = atof(value), i++;
        else if (strcmp(argv[i], "--m") == 0)
            with.rows = read_sizes(value), i++;
        else if (strcmp(argv[i], "--n") == 0)
            with.columns = read_sizes(value), i++;
        else if (strcmp(argv[i], "--k") == 0)
            with.depths = read_sizes(value), i++;
    }
    with.rounds = with.rounds < 0 ? 0 : with.rounds > MOST_ROUNDS ? MOST_ROUNDS : with.rounds;
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
