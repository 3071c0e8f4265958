/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench`: measures collectives and signal operations, with the letters of nccl-tests and the long names of OSU.
 */
#include "bench.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/settings.h"
#include "world/launch.h"

static const char help_text[] =
    "Usage: tutti bench OPERATION… [OPTION…]\n"
    "\n"
    "Measures operations over a range of sizes. It starts its own ranks; inside a job (tutti run, mpirun, torchrun, "
    "srun) it uses that job's.\n"
    "\n"
    "  tutti bench all_reduce --ranks 4 -b 8 -e 64M -f 8 -d float -o sum\n"
    "\n"
    "Operations: all_reduce, reduce, reduce_scatter, reduce_scatter_v, all_gather, all_gather_v, broadcast, gather, "
    "scatter, all_to_all, all_to_all_v,\n"
    "permute, send_recv, barrier; on symmetric memory put, get, signal, signal_barrier. Names like allreduce, "
    "osu_bcast and all_gather_perf are\n"
    "understood too.\n"
    "\n"
    "What is measured\n"
    "      --ranks N, -g N        ranks to start; default: one per CPU (-n is --iters, as in nccl-tests)\n"
    "      --threads              as threads of one process instead of processes\n"
    "      --hosts A:2,B:2        ranks on these hosts, started by \"tutti run --hosts\"; with --rsh COMMAND as there\n"
    "      --bind POLICY          auto, core, numa or none\n"
    "  -b, --minbytes BYTES       smallest size, default 8; suffixes K, M, G\n"
    "  -e, --maxbytes BYTES       largest size, default 64M\n"
    "  -m, --message-size MIN:MAX both\n"
    "  -f, --stepfactor FACTOR    from one size to the next, default 2\n"
    "  -i, --stepbytes BYTES      add this instead of multiplying\n"
    "  -d, --datatype, --type T   f32, bf16, int8, …; default f32\n"
    "  -o, --op OP                sum, avg, product, min, max, band, bor, bxor, premul_sum; default sum\n"
    "  -r, --root, --root-rank R  default 0\n"
    "      --algorithm NAME       force inline, one_shot, two_shot, pipelined or tree\n"
    "\n"
    "How\n"
    "      --symmetric, --private buffers in symmetric memory (the default), or ordinary ones\n"
    "      --in-place             the smaller buffer inside the larger\n"
    "      --isolated, --streaming  a barrier before each call, or calls back to back (the default); -z 1 is isolated\n"
    "      --cold                 walk through twice the last cache, so that nothing is in it\n"
    "      --dirty                rewrite the inputs before each call (not timed)\n"
    "  -n, --iters, --iterations N  measurements per size; default: as many as fit in --time\n"
    "  -w, --warmup N             calls before them\n"
    "      --time SECONDS         per size, over all rounds; default 0.3\n"
    "      --rounds N             go through all sizes N times, up to 10; the median and the noise are then those of\n"
    "                             the rounds; default 1, with --baseline and --tune 5\n"
    "  -a, --average 0|1|2|3      over ranks: rank 0's time, average (the default), least, most\n"
    "  -c, --check, --validation  compare results with a serial loop, bit for bit; also -c 1, -c 0\n"
    "\n"
    "Output\n"
    "      --json[=FILE], --csv[=FILE]  instead of the table, or besides it into a file\n"
    "      --plot FILE.svg        draw the curves\n"
    "      --baseline FILE        compare with an earlier --json: exit status 1 when a row is slower in every round\n"
    "                             than it was in any; what seems so is measured again first\n"
    "      --slower PERCENT       than this, default 10\n"
    "      --list                 list the operations, one a line\n"
    "      --tune FILE            measure every algorithm instead and write a table for TUTTI_TUNING\n"
    "\n"
    "Columns: size of the larger buffer in bytes, count per rank, type, reduction, microseconds (minimum, median, "
    "average, 99th percentile, maximum),\n"
    "bandwidth of the median (algbw: size over time; busbw: what passes between ranks, as nccl-tests counts), wrong "
    "elements (- : not checked).\n"
    "Streaming calls shorter than 2 microseconds are timed several at once. send_recv and signal are half a round "
    "trip.\n"
    "\n"
    "Exit status: 0; 1 when something failed, was wrong or slower; 2 for wrong usage.\n";

static int bench_main(int argc, char **argv);
const tool_command tool_bench = { "bench", "measure collectives and signals", help_text, bench_main };

/* ---- options ---- */

enum {
    OPTION_THREADS = 256,
    OPTION_BIND,
    OPTION_ALGORITHM,
    OPTION_SYMMETRIC,
    OPTION_PRIVATE,
    OPTION_IN_PLACE,
    OPTION_ISOLATED,
    OPTION_STREAMING,
    OPTION_MODE,
    OPTION_COLD,
    OPTION_DIRTY,
    OPTION_TIME,
    OPTION_JSON,
    OPTION_CSV,
    OPTION_PLOT,
    OPTION_BASELINE,
    OPTION_SLOWER,
    OPTION_TUNE,
    OPTION_CHECK,
    OPTION_FULL,
    OPTION_LIST,
    OPTION_ROUNDS,
    OPTION_HOSTS,
    OPTION_RSH
};

static const struct option long_options[] = {
    { "ranks", required_argument, NULL, 'g' },
    { "threads", no_argument, NULL, OPTION_THREADS },
    { "bind", required_argument, NULL, OPTION_BIND },
    { "minbytes", required_argument, NULL, 'b' },
    { "maxbytes", required_argument, NULL, 'e' },
    { "message-size", required_argument, NULL, 'm' },
    { "stepfactor", required_argument, NULL, 'f' },
    { "stepbytes", required_argument, NULL, 'i' },
    { "datatype", required_argument, NULL, 'd' },
    { "type", required_argument, NULL, 'd' },
    { "op", required_argument, NULL, 'o' },
    { "root", required_argument, NULL, 'r' },
    { "root-rank", required_argument, NULL, 'r' },
    { "algorithm", required_argument, NULL, OPTION_ALGORITHM },
    { "symmetric", no_argument, NULL, OPTION_SYMMETRIC },
    { "private", no_argument, NULL, OPTION_PRIVATE },
    { "in-place", no_argument, NULL, OPTION_IN_PLACE },
    { "isolated", no_argument, NULL, OPTION_ISOLATED },
    { "streaming", no_argument, NULL, OPTION_STREAMING },
    { "mode", required_argument, NULL, OPTION_MODE },
    { "cold", no_argument, NULL, OPTION_COLD },
    { "dirty", no_argument, NULL, OPTION_DIRTY },
    { "iters", required_argument, NULL, 'n' },
    { "iterations", required_argument, NULL, 'n' },
    { "warmup", required_argument, NULL, 'w' },
    { "warmup_iters", required_argument, NULL, 'w' },
    { "time", required_argument, NULL, OPTION_TIME },
    { "rounds", required_argument, NULL, OPTION_ROUNDS },
    { "hosts", required_argument, NULL, OPTION_HOSTS },
    { "rsh", required_argument, NULL, OPTION_RSH },
    { "average", required_argument, NULL, 'a' },
    { "check", no_argument, NULL, OPTION_CHECK },
    { "validation", no_argument, NULL, OPTION_CHECK },
    { "full", no_argument, NULL, OPTION_FULL },
    { "json", optional_argument, NULL, OPTION_JSON },
    { "csv", optional_argument, NULL, OPTION_CSV },
    { "plot", required_argument, NULL, OPTION_PLOT },
    { "baseline", required_argument, NULL, OPTION_BASELINE },
    { "slower", required_argument, NULL, OPTION_SLOWER },
    { "tune", required_argument, NULL, OPTION_TUNE },
    { "list", no_argument, NULL, OPTION_LIST },
    { "help", no_argument, NULL, 'h' },
    { NULL, 0, NULL, 0 },
};

static bool take_bytes(const char *text, size_t *bytes) {
    int64_t value;
    if (tu_parse_bytes(text, &value) != TUTTI_OK || value < 0)
        return false;
    *bytes = (size_t)value;
    return true;
}

static bool take_long(const char *text, long least, long most, long *value) {
    char *rest;
    errno = 0;
    *value = strtol(text, &rest, 10);
    return errno == 0 && rest != text && *rest == '\0' && *value >= least && *value <= most;
}

static bool take_real(const char *text, double least, double *value) {
    char *rest;
    *value = strtod(text, &rest);
    return rest != text && *rest == '\0' && *value >= least && *value < 1e12;
}

static bool take_range(const char *text, bench_options *options) {
    char low[32];
    const char *colon = strchr(text, ':');
    if (colon == NULL) /* as OSU: up to that size */
        return take_bytes(text, &options->end);
    snprintf(low, sizeof low, "%.*s", (int)(colon - text), text);
    return (colon == text || take_bytes(low, &options->begin)) &&
           (colon[1] == '\0' || take_bytes(colon + 1, &options->end));
}

static bool take_binding(const char *text, binding_policy *policy) {
    static const struct {
        const char *name;
        binding_policy policy;
    } names[] = { { "auto", BIND_AUTO }, { "core", BIND_CORE }, { "numa", BIND_NUMA }, { "none", BIND_NONE } };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(text, names[i].name) == 0) {
            *policy = names[i].policy;
            return true;
        }
    }
    return false;
}

/* One option with its value; false when the value cannot be understood. */
static bool take_value(int option, const char *text, bench_options *options) {
    long number = 0;
    bool good = true;
    switch (option) {
    case 'g':
        good = take_long(text, 1, 4096, &number);
        options->ranks = (int)number;
        return good;
    case 'b':
        return take_bytes(text, &options->begin);
    case 'e':
        return take_bytes(text, &options->end);
    case 'm':
        return take_range(text, options);
    case 'f':
        return take_real(text, 1.01, &options->factor);
    case 'i':
        return take_bytes(text, &options->step) && options->step > 0;
    case 'd':
        return tutti_dtype_parse(text, &options->dtype) == TUTTI_OK;
    case 'o':
        return tutti_reduction_parse(text, &options->reduction) == TUTTI_OK;
    case 'r':
        good = take_long(text, 0, 4095, &number);
        options->root = (int)number;
        return good;
    case 'n':
        return take_long(text, 1, 100000000, &options->iterations);
    case 'w':
        return take_long(text, 0, 100000000, &options->warmup);
    case 'a':
        good = take_long(text, 0, 3, &number);
        options->across = (int)number;
        return good;
    case 'z':
        good = take_long(text, 0, 1, &number);
        options->isolated = number == 1;
        return good;
    case 'c':
        good = take_long(text, 0, 1000000, &number);
        options->check = number > 0;
        return good;
    case OPTION_BIND:
        return take_binding(text, &options->binding);
    case OPTION_ALGORITHM:
        return tutti_algorithm_parse(text, &options->algorithm) == TUTTI_OK;
    case OPTION_MODE:
        options->isolated = strcmp(text, "isolated") == 0;
        return options->isolated || strcmp(text, "streaming") == 0;
    case OPTION_ROUNDS:
        good = take_long(text, 1, BENCH_ROUNDS / 3, &number); /* --baseline may add twice as many */
        options->rounds = (int)number;
        return good;
    case OPTION_TIME:
        return take_real(text, 0.001, &options->seconds);
    case OPTION_HOSTS:
        options->hosts = text;
        return text[0] != '\0';
    case OPTION_RSH:
        options->rsh = text;
        return text[0] != '\0';
    default: /* OPTION_SLOWER */
        return take_real(text, 0, &options->slower);
    }
}

/* What a value that cannot be understood should have been. */
static int refuse_value(int option, const char *text) {
    static const struct {
        int option;
        const char *must_be;
    } values[] = {
        { 'g', "a number of ranks, from 1 to 4096" },
        { 'b', "a size in bytes, like 8, 64K or 1M" },
        { 'e', "a size in bytes, like 8, 64K or 1M" },
        { 'm', "one size or two, like 8:64M" },
        { 'f', "a factor of at least 1.01" },
        { 'i', "a size in bytes, like 8, 64K or 1M, above 0" },
        { 'd', "an element type, like f32, bf16 or int8" },
        { 'o', "sum, avg, product, min, max, band, bor, bxor or premul_sum" },
        { 'r', "a rank, from 0 to 4095" },
        { 'n', "a number of measurements, from 1 on (the number of ranks is --ranks)" },
        { 'w', "a number of calls, from 0 on" },
        { 'a', "0, 1, 2 or 3" },
        { 'z', "0 or 1" },
        { OPTION_BIND, "auto, core, numa or none" },
        { OPTION_ALGORITHM, "inline, one_shot, two_shot, pipelined or tree" },
        { OPTION_MODE, "isolated or streaming" },
        { OPTION_ROUNDS, "a number of rounds, from 1 to 10" },
        { OPTION_TIME, "seconds, at least 0.001" },
        { OPTION_HOSTS, "a list like a:2,b:2" },
        { OPTION_RSH, "a command" },
        { OPTION_SLOWER, "a percentage, from 0 on" },
    };
    const char *name = NULL, *must_be = "something else";
    for (size_t i = 0; long_options[i].name != NULL && name == NULL; i++)
        name = long_options[i].val == option ? long_options[i].name : NULL;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        must_be = values[i].option == option ? values[i].must_be : must_be;
    if (name == NULL)
        return tool_usage(&tool_bench, "-%c %s: must be %s", option, text, must_be);
    return tool_usage(&tool_bench, "--%s %s: must be %s", name, text, must_be);
}

/* One option without a value, or with a file's name; false when it is none of them. */
static bool take_flag(int option, const char *text, bench_options *options) {
    switch (option) {
    case OPTION_THREADS:
        return options->threads = true;
    case OPTION_SYMMETRIC:
        options->private_buffers = false;
        return true;
    case OPTION_PRIVATE:
        return options->private_buffers = true;
    case OPTION_IN_PLACE:
        return options->in_place = true;
    case OPTION_ISOLATED:
        return options->isolated = true;
    case OPTION_STREAMING:
        options->isolated = false;
        return true;
    case OPTION_COLD:
        return options->cold = true;
    case OPTION_DIRTY:
        return options->dirty = true;
    case OPTION_CHECK:
        return options->check = true;
    case OPTION_FULL: /* the table is always full */
        return true;
    case OPTION_JSON:
        options->json = text;
        options->format = text == NULL ? BENCH_JSON : options->format;
        return true;
    case OPTION_CSV:
        options->csv = text;
        options->format = text == NULL ? BENCH_CSV : options->format;
        return true;
    case OPTION_PLOT:
        options->plot = text;
        return true;
    case OPTION_BASELINE:
        options->baseline = text;
        return true;
    case OPTION_TUNE:
        options->tune = text;
        return true;
    default:
        return false;
    }
}

static int unknown_operation(const char *name) {
    const char *names[BENCH_OPERATIONS];
    for (int i = 0; i < bench_operation_count; i++)
        names[i] = bench_operations[i].name;
    const char *nearest = tool_nearest(name, names, (size_t)bench_operation_count);
    if (nearest != NULL)
        return tool_usage(&tool_bench, "there is no operation \"%s\". Did you mean \"%s\"?", name, nearest);
    return tool_usage(&tool_bench, "there is no operation \"%s\"; \"tutti bench --list\" lists them", name);
}

static int take_operations(int argc, char **argv, bench_options *options) {
    for (int i = optind; i < argc; i++) {
        const bench_operation *found = bench_operation_find(argv[i]);
        if (found == NULL)
            return unknown_operation(argv[i]);
        if (options->operation_count == BENCH_OPERATIONS)
            return tool_usage(&tool_bench, "more than %d operations", BENCH_OPERATIONS);
        options->operations[options->operation_count++] = found;
    }
    if (options->operation_count == 0 && options->tune == NULL)
        return tool_usage(&tool_bench, "which operation? \"tutti bench all_reduce\", for instance");
    return 0;
}

/* -c of nccl-tests takes 0 or 1, -c of OSU nothing: a following number belongs to it. */
static void take_check(int argc, char **argv, bench_options *options) {
    long number;
    options->check = true;
    if (optind < argc && take_long(argv[optind], 0, 1000000, &number)) {
        options->check = number > 0;
        optind++;
    }
}

static int read_options(int argc, char **argv, bench_options *options) {
    *options = (bench_options){ .begin = 8,
                                .end = (size_t)64 << 20,
                                .factor = 2,
                                .warmup = -1,
                                .seconds = 0.3,
                                .dtype = TUTTI_F32,
                                .reduction = TUTTI_SUM,
                                .across = 1,
                                .slower = 10 };
    int option;
    optind = 1;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":g:b:e:m:f:i:d:o:r:n:w:a:z:ch", long_options, NULL)) != -1) {
        if (option == 'h' || option == '?' || option == ':') {
            int status = tool_other_option(&tool_bench, option, argv, long_options);
            return status == 0 ? -1 : status;
        }
        if (option == OPTION_LIST) {
            for (int i = 0; i < bench_operation_count; i++)
                puts(bench_operations[i].name);
            return -1;
        }
        if (option == 'c')
            take_check(argc, argv, options);
        else if (!take_flag(option, optarg, options) && !take_value(option, optarg, options))
            return refuse_value(option, optarg);
    }
    int wrong = take_operations(argc, argv, options);
    if (wrong != 0)
        return wrong;
    if (options->rounds == 0)
        options->rounds = options->baseline != NULL || options->tune != NULL ? 5 : 1;
    if (options->begin == 0 || options->begin > options->end)
        return tool_usage(&tool_bench, "sizes from %zu to %zu bytes: there are none", options->begin, options->end);
    for (int i = 0; i < options->operation_count; i++) {
        if (options->operations[i]->reduces && !tutti_reduction_applies(options->reduction, options->dtype))
            return tool_usage(&tool_bench, "%s is not defined for %s", tutti_reduction_name(options->reduction),
                              tutti_dtype_name(options->dtype));
    }
    return 0;
}

/* ---- running ---- */

/* Whether this process is a rank of a job already. */
static bool launched(void) {
    tutti_world_options none = TUTTI_WORLD_OPTIONS_INIT;
    tu_settings settings;
    tu_launch launch;
    if (tu_settings_load(&settings) != TUTTI_OK)
        return false;
    bool found = tu_launch_find(&none, &settings, NULL, &launch) != TUTTI_OK || strcmp(launch.launcher, "alone") != 0;
    tu_settings_free(&settings);
    return found; /* an incomplete environment too: opening the world then says what is wrong with it */
}

static int write_file(const char *path, const bench_job *job, bool as_json) {
    FILE *file = fopen(path, "we");
    if (file == NULL)
        return tool_fail("writing %s: %s", path, strerror(errno));
    if (as_json)
        bench_report_json(file, job);
    else
        bench_report_csv(file, job->results);
    return fclose(file) == 0 ? 0 : tool_fail("writing %s: %s", path, strerror(errno));
}

/* What is written once all rows are there. */
static int report(const bench_job *job) {
    const bench_options *options = job->options;
    int failed = 0;
    if (options->tune != NULL)
        return 0;
    if (options->format == BENCH_JSON)
        bench_report_json(stdout, job);
    if (options->format == BENCH_CSV)
        bench_report_csv(stdout, job->results);
    if (options->json != NULL)
        failed |= write_file(options->json, job, true);
    if (options->csv != NULL)
        failed |= write_file(options->csv, job, false);
    if (options->plot != NULL)
        failed |= bench_plot(job);
    if (options->baseline != NULL)
        failed |= bench_report_baseline(job);
    for (int i = 0; i < job->results->count; i++) {
        const bench_row *row = &job->results->rows[i];
        if (row->wrong > 0)
            failed |=
                tool_fail("%s of %zu bytes: %lld wrong elements", row->operation, row->bytes, (long long)row->wrong);
    }
    return failed;
}

static int run_inside_job(bench_job *job) {
    tutti_world *world;
    job->binding_text = "the job's";
    if (tutti_world_open(NULL, &world) != TUTTI_OK)
        return tool_fail("%s", tutti_error_message());
    int asked = job->options->ranks, size = tutti_world_size(world), rank = tutti_world_rank(world);
    if (asked != 0 && asked != size) {
        int wrong = rank == 0 ? tool_usage(&tool_bench, "--ranks %d, but this job (%s) has %d ranks", asked,
                                           tutti_world_launcher(world), size)
                              : TOOL_USAGE;
        (void)!tutti_world_close(world);
        return wrong;
    }
    tutti_status status = bench_rank_main(world, job);
    if (status != TUTTI_OK)
        tool_fail("%s", tutti_error_message());
    if (tutti_world_close(world) != TUTTI_OK && status == TUTTI_OK)
        return tool_fail("%s", tutti_error_message());
    return status != TUTTI_OK ? 1 : rank == 0 ? report(job) : 0;
}

/* "rank 0 on CPUs 0; rank 1 on CPUs 1", cut where it gets long. */
static void describe_bindings(const binding *bindings, int ranks, char *text, size_t room) {
    size_t used = 0;
    for (int rank = 0; rank < ranks && used < room - 1; rank++) {
        char cpus[64];
        topology_cpu_text(bindings[rank].cpus, cpus, sizeof cpus);
        used += (size_t)snprintf(text + used, room - used, "%srank %d on CPU %s", rank == 0 ? "" : ", ", rank, cpus);
    }
    if (used >= room)
        snprintf(text + room - 5, 5, " …");
}

static int run_own_ranks(bench_job *job) {
    const bench_options *options = job->options;
    int ranks = options->ranks > 0 ? options->ranks : topology_cpus();
    char why[160] = "", text[480] = "";
    binding *bindings = calloc((size_t)ranks, sizeof *bindings);
    if (bindings == NULL)
        return tool_fail("out of memory");
    int bound = topology_bind(options->binding, ranks, bindings, why, sizeof why);
    if (bound < 0) {
        free(bindings);
        return tool_usage(&tool_bench, "%s", why);
    }
    if (bound > 0)
        describe_bindings(bindings, ranks, text, sizeof text);
    else
        snprintf(text, sizeof text, "%s", why[0] != 0 ? why : "none");
    job->bindings = bound > 0 ? bindings : NULL;
    job->binding_text = text;
    fflush(stdout);
    tutti_status status =
        tutti_spawn(options->threads ? TUTTI_SPAWN_THREADS : TUTTI_SPAWN_PROCESSES, ranks, bench_rank_main, job);
    int failed = status == TUTTI_OK ? report(job) : tool_fail("%s", tutti_error_message());
    free(bindings);
    return failed;
}

/* Whether a word of the command line is one of the two options that "tutti run" gets, and how many words it takes. */
static int words_of_hosts(const char *word) {
    static const char *const names[] = { "--hosts", "--rsh" };
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(names[i]);
        if (strncmp(word, names[i], length) == 0 && (word[length] == '\0' || word[length] == '='))
            return word[length] == '=' ? 1 : 2;
    }
    return 0;
}

/* Becomes "tutti run --hosts … tutti bench …": the ranks find themselves inside a job. */
static int run_on_hosts(const bench_options *options, int argc, char **argv) {
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    const char **words = calloc((size_t)argc + 12, sizeof *words);
    if (length <= 0 || words == NULL)
        return tool_fail("cannot start \"tutti run\": %s", strerror(errno));
    self[length] = '\0';
    int count = 0;
    const char *begin[] = { self, "run", "-q", "--hosts", options->hosts, "--rsh", options->rsh };
    for (int i = 0; i < (options->rsh != NULL ? 7 : 5); i++)
        words[count++] = begin[i];
    words[count++] = "--";
    words[count++] = self;
    for (int i = 0, taken; i < argc; i += taken) { /* as typed, the name of the sub-command first */
        taken = words_of_hosts(argv[i]);
        if (taken == 0)
            words[count++] = argv[i];
        taken = taken > 0 ? taken : 1;
    }
    execv(self, (char *const *)(uintptr_t)words);
    free(words);
    return tool_fail("cannot start \"tutti run\": %s", strerror(errno));
}

static int bench_main(int argc, char **argv) {
    bench_options options;
    char **typed = calloc((size_t)argc + 1, sizeof *typed); /* before getopt sorts it */
    if (typed == NULL)
        return tool_fail("out of memory");
    memcpy(typed, argv, (size_t)argc * sizeof *typed);
    int wrong = read_options(argc, argv, &options);
    if (wrong == 0 && options.hosts != NULL)
        wrong = run_on_hosts(&options, argc, typed);
    free(typed);
    if (wrong != 0)
        return wrong < 0 ? 0 : wrong;
    if (options.tune != NULL && options.end == (size_t)64 << 20)
        options.end = (size_t)4 << 20; /* above, the largest choice goes on */
    void *shared = mmap(NULL, sizeof(bench_results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return tool_fail("out of memory: %s", strerror(errno));
    bench_job job = { .options = &options, .results = shared };
    int failed = launched() ? run_inside_job(&job) : run_own_ranks(&job);
    munmap(shared, sizeof(bench_results));
    return failed;
}
