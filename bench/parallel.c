/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of a GPT on several ranks, for parallel.py:
 *
 *     parallel MODE RANKS STEPS [NAME=NUMBER…]     MODE: single, local (nothing is done to gradients), data, sharded
 *                                                  NAME: bucket (MiB), width, heads, layers, length, batch, offload
 *
 * Prints, as JSON, seconds and bytes. "step" is the median step, until the last rank has made it. With data and sharded
 * two other kinds of step alternate with it, so that all are measured at the same time: in "silent" ones nothing is
 * sent and nobody is waited for; in "met" ones ranks begin the same collectives, and wait for each other in them, with
 * next to nothing to send. "shown" is the median of what a step took longer than the silent one beside it, and "skew"
 * the same of met ones: what is due to ranks that are not equally quick. (What is computed from values that did not
 * come is nonsense, and takes as long: numbers too small to be normal, which would take longer, count as 0.) "alone" is
 * what the communication of one step takes when nothing else is done, all of it in a row. "waited" is how long a step
 * waited for it, on the rank that waited longest, "least" on the one that waited least, and "parts" says where, on
 * average: in the forward of each layer, in the rest of the forward, in the backward of each layer, the last one first,
 * in its rest, and in the optimizer's step.
 *
 * With offload=1, of sharded alone, a GPU computes while shards and optimizer stay in memory of the host: only "step"
 * is told, and memory.
 *
 * Of memory: the peak of the process, and the most that steps took above what was there before the model, where a page
 * that several ranks have mapped counts in parts.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "measure.h"

enum {
    LETTERS = 256,
    MOST_LAYERS = 64,
    WARM = 4,
    MEASURED = 4, /* steps behind the timed ones, in which memory is looked at */
    ROUNDS = 9,   /* of communication alone */
    FEW = 16,     /* elements that are sent where ranks only meet */
    PARTS = 2 * MOST_LAYERS + 3
};

/* Of steps, which alternate. */
typedef enum kind {
    WHOLE,
    MET,
    SILENT,
    KINDS
} kind;

typedef struct settings {
    const char *mode;
    int steps;
    double bucket; /* MiB; 0: the default */
    int width, heads, layers, length, batch, offload;
} settings;

static int block_forward(tt_module *block, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *x = inputs.at[0];
    tt_tensor *seen = tt_module_call(tt_module_child(block, "first"), x);
    x = tt_add(x, tt_module_call(tt_module_child(block, "attention"), seen));
    tt_tensor *thought = tt_module_call(tt_module_child(block, "second"), x);
    outputs[0] = tt_add(x, tt_module_call(tt_module_child(block, "hidden"), thought));
    return 1;
}

static tt_module *block_of(const settings *set) {
    static const tt_module_type type = { sizeof type, "Block", block_forward, NULL };
    tt_attention_options heads = { .size = sizeof heads, .heads = set->heads };
    int64_t width = set->width;
    tt_module *block = tt_module_new(&type, NULL);
    tt_module_add_child(block, "first", tt_rms_norm_module(width, 1e-5, TUTTI_F32));
    tt_module_add_child(block, "attention", tt_attention_module(width, &heads));
    tt_module_add_child(block, "second", tt_rms_norm_module(width, 1e-5, TUTTI_F32));
    tt_module *layers[] = { tt_linear_module(width, 4 * width, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                            tt_linear_module(4 * width, width, true, TUTTI_F32) };
    tt_module_add_child(block, "hidden", tt_sequential_module(3, layers));
    return block;
}

/* In a scope of its own: a list of parameters keeps them, and they shall go when they are cut. */
static int64_t elements_of(tt_module *model) {
    int64_t elements = 0;
    tt_scope scope = tt_scope_open();
    tt_named_list parameters = tt_module_parameters(model);
    for (size_t i = 0; i < parameters.count; i++)
        elements += tt_numel(parameters.at[i]);
    return tt_scope_close(&scope) == TUTTI_OK ? elements : 0;
}

static double largest(double value, tutti_group *group) {
    return tt_item(tt_all_reduce(tt_full(tt_shape(), value, TUTTI_F64, NULL), TUTTI_MAX, group));
}

/* A figure of the kernel about this process, in bytes. */
static long figure(const char *path, const char *pattern) {
    char line[256];
    long kibibytes = 0;
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, pattern, &kibibytes) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kibibytes * 1024;
}

static long peak_bytes(void) {
    return figure("/proc/self/status", "VmHWM: %ld");
}

static long bytes_now(void) {
    return figure("/proc/self/smaps_rollup", "Pss: %ld");
}

/* A thread that looks at the memory all the time. */
typedef struct sampler {
    pthread_t thread;
    bool running;
    atomic_bool stop;
    long most;
} sampler;

static void *sample(void *argument) {
    sampler *one = argument;
    const struct timespec pause = { 0, 1000000 };
    while (!atomic_load(&one->stop)) {
        long bytes = bytes_now();
        one->most = bytes > one->most ? bytes : one->most;
        nanosleep(&pause, NULL);
    }
    return NULL;
}

static void sampler_begin(sampler *one) {
    one->running = pthread_create(&one->thread, NULL, sample, one) == 0;
}

static long sampler_end(sampler *one) {
    atomic_store(&one->stop, true);
    if (one->running)
        pthread_join(one->thread, NULL);
    return one->most;
}

/* All are here. */
static void meet(tutti_group *group) {
    tt_wait(tt_all_reduce(tt_zeros(tt_shape(1), TUTTI_F32, NULL), TUTTI_SUM, group));
}

/* ---- communication alone ---- */

/* All-reduces as many bytes as a step has gradients, in blocks as large as a bucket. */
static void reduce_all(tt_tensor *values, int64_t block, tutti_group *group) {
    int64_t elements = tt_numel(values);
    for (int64_t at = 0; at < elements; at += block)
        tt_all_reduce_(tt_narrow(values, 0, at, elements - at < block ? elements - at : block), TUTTI_AVG, group);
    tt_wait(values);
}

/* Gathers each unit twice, the last one once, and reduces its gradients, as a step does. */
static void gather_all(tt_fully_sharded *sharded, int count, tt_module *const *units, tutti_group *group) {
    for (int i = 0; i < count; i++) {
        tt_scope scope = tt_scope_open();
        for (int k = i == count - 1; k < 2; k++) {
            tt_fully_sharded_gather(sharded, units[i]);
            tt_wait_all(tutti_group_world(group));
            tt_fully_sharded_free(sharded, units[i]);
        }
        tt_named_list shards = tt_module_parameters(units[i]);
        for (size_t k = 0; k < shards.count; k++) {
            int64_t part = tt_numel(shards.at[k]);
            tt_tensor *whole = tt_empty(tt_shape(part * tutti_group_size(group)), TUTTI_F32, NULL);
            tt_reduce_scatter_out(tt_empty(tt_shape(part), TUTTI_F32, NULL), whole, TUTTI_AVG, group);
        }
        tt_wait_all(tutti_group_world(group));
        if (tt_scope_close(&scope) != TUTTI_OK)
            return;
    }
}

static double alone(const settings *set, int64_t elements, tt_fully_sharded *sharded, tt_module *const *units,
                    tutti_group *group) {
    double times[ROUNDS] = { 0 };
    int64_t block = (int64_t)((set->bucket > 0 ? set->bucket : 25) * (1 << 18));
    tt_tensor *values =
        sharded == NULL ? tt_symm_empty(tutti_group_world(group), tt_shape(elements), TUTTI_F32, NULL) : NULL;
    for (int round = -WARM; round < ROUNDS && tt_error_pending() == TUTTI_OK; round++) {
        meet(group);
        double begin = now();
        if (sharded != NULL)
            gather_all(sharded, set->layers, units, group);
        else
            reduce_all(values, block, group);
        if (round >= 0)
            times[round] = now() - begin;
    }
    return median(times, ROUNDS);
}

/* ---- steps ---- */

typedef struct training training;

/* Where a layer is in the model. */
typedef struct place {
    training *all;
    int layer;
} place;

/* What a rank trains. */
struct training {
    tt_module *modules[MOST_LAYERS + 3], *model;
    tt_data_parallel *parallel;
    tt_fully_sharded *sharded;
    tt_optimizer *optimizer;
    tutti_world *world;
    int layers;
    kind kind; /* of the step that is made */
    place places[MOST_LAYERS];
    int reductions;      /* of units, in this backward */
    int64_t seen;        /* nanoseconds waited, as they are counted in a part already */
    double parts[PARTS]; /* seconds waited in whole steps: in forwards, their rest, backwards, their rest, the step */
};

/* What was waited since the last call belongs to that part. */
static void count_waits(training *one, int part) {
    int64_t waited = tt_waited_ns(one->world);
    one->parts[part] += 1e-9 * (double)(waited - one->seen);
    one->seen = waited;
}

static void after_layer(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                        tt_tensor **outputs) {
    const place *here = context->user;
    (void)module, (void)inputs, (void)count, (void)outputs;
    count_waits(here->all, here->layer);
}

static void watch_unit(void *user, tt_shard_event event, const char *unit) {
    training *one = user;
    (void)unit;
    if (event == TT_SHARD_REDUCE && one->reductions < one->layers)
        count_waits(one, one->layers + 1 + one->reductions++);
}

static tt_tensor *beginning(tt_tensor *x, int64_t elements) {
    return tt_narrow(x, 0, 0, elements < tt_numel(x) ? elements : tt_numel(x));
}

static void reduce_bucket(void *user, const tt_bucket *bucket) {
    const training *one = user;
    if (one->kind == WHOLE)
        tt_bucket_average(NULL, bucket);
    else if (one->kind == MET)
        tt_all_reduce_(beginning(bucket->values, FEW), TUTTI_AVG, bucket->group);
}

static void gather_unit(void *user, const tt_shard_transfer *transfer) {
    const training *one = user;
    int ranks = tutti_group_size(transfer->group);
    if (one->kind == WHOLE)
        tt_shard_gather(NULL, transfer);
    else if (one->kind == MET && transfer->parts.count > 0)
        tt_all_gather_out(beginning(transfer->wholes.at[0], (int64_t)FEW * ranks),
                          beginning(transfer->parts.at[0], FEW), transfer->group);
}

static void reduce_unit(void *user, const tt_shard_transfer *transfer) {
    const training *one = user;
    int ranks = tutti_group_size(transfer->group);
    if (one->kind == WHOLE)
        tt_shard_reduce(NULL, transfer);
    else if (one->kind == MET && transfer->parts.count > 0)
        tt_reduce_scatter_out(beginning(transfer->parts.at[0], FEW),
                              beginning(transfer->wholes.at[0], (int64_t)FEW * ranks), TUTTI_AVG, transfer->group);
}

/* Where it is computed. */
static tutti_device device_of(const settings *set) {
    return set->offload ? TUTTI_CUDA : TUTTI_CPU;
}

static void make(training *one, const settings *set, tutti_group *group) {
    int layers = set->layers;
    bool is_local = strcmp(set->mode, "local") == 0;
    one->layers = layers;
    one->world = tutti_group_world(group);
    one->modules[0] = tt_embedding_module(LETTERS, set->width, TUTTI_F32);
    for (int i = 0; i < layers; i++) {
        one->places[i] = (place){ one, i };
        one->modules[1 + i] = block_of(set);
        tt_hook_forward(one->modules[1 + i], after_layer, &one->places[i], NULL, NULL);
    }
    one->modules[layers + 1] = tt_rms_norm_module(set->width, 1e-5, TUTTI_F32);
    one->modules[layers + 2] = tt_linear_module(set->width, LETTERS, false, TUTTI_F32);
    one->model = tt_sequential_module((size_t)layers + 3, one->modules);
    tt_data_parallel_options options = {
        .size = sizeof options, .reduce = reduce_bucket, .user = one, .bucket_bytes = (int64_t)(set->bucket * (1 << 20))
    };
    tt_fully_sharded_options units = {
        .size = sizeof units, .gather = gather_unit, .reduce = reduce_unit, .watch = watch_unit, .user = one
    };
    units.device = device_of(set);
    if (is_local || strcmp(set->mode, "data") == 0)
        one->parallel = tt_data_parallel_new(one->model, group, &options);
    if (is_local)
        tt_data_parallel_sync(one->parallel, false);
    if (strcmp(set->mode, "sharded") == 0)
        one->sharded = tt_fully_shard(one->model, (size_t)layers, one->modules + 1, group, &units);
    if (one->sharded != NULL) /* its backward comes next */
        tt_fully_sharded_switch(one->sharded, one->modules[layers], TT_SWITCH_FREE_FORWARD, false);
    one->optimizer = tt_adamw_optimizer(one->model, NULL);
}

static void end(training *one) {
    tt_data_parallel_release(one->parallel);
    tt_fully_sharded_release(one->sharded);
    tt_optimizer_release(one->optimizer);
    tt_module_release(one->model);
}

/* Returns the seconds it took. */
static double step(training *one, const settings *set) {
    int64_t rows = (int64_t)set->batch * set->length;
    tt_options there = { .size = sizeof there, .device = device_of(set) };
    tt_tensor *inputs = tt_randint(0, LETTERS, tt_shape(set->batch, set->length), TUTTI_I64, &there);
    tt_tensor *targets = tt_randint(0, LETTERS, tt_shape(rows), TUTTI_I64, &there);
    one->seen = tt_waited_ns(one->world);
    one->reductions = 0;
    double begin = now();
    tt_tensor *logits = tt_reshape(tt_module_call(one->model, inputs), tt_shape(rows, LETTERS));
    tt_tensor *loss = tt_cross_entropy(logits, targets, -100);
    count_waits(one, one->layers);
    tt_backward(loss, NULL);
    count_waits(one, 2 * one->layers + 1);
    tt_optimizer_step(one->optimizer);
    count_waits(one, 2 * one->layers + 2);
    tt_optimizer_zero_grad(one->optimizer);
    return now() - begin;
}

/* ---- what is told ---- */

/* Seconds of every step, by its kind, and what whole ones waited. */
typedef struct record {
    int steps;
    double *times[KINDS], *waited;
} record;

/* On all ranks those of the slowest one, step by step. */
static void slowest(double *times, int count, tutti_group *group) {
    tt_tensor *all = tt_from(times, tt_shape(count), TUTTI_F64, NULL);
    tt_read(tt_all_reduce(all, TUTTI_MAX, group), times, TUTTI_F64, (size_t)count);
}

/* The median of what steps of one kind took longer than silent ones beside them; overwrites the first. */
static double longer(double *times, const double *silent, int count) {
    for (int i = 0; i < count; i++)
        times[i] -= silent[i];
    return median(times, count);
}

static void print_parts(const double *parts, int count) {
    printf("\"parts\": [");
    for (int i = 0; i < count; i++)
        printf("%s%.6f", i > 0 ? ", " : "", parts[i]);
    printf("], ");
}

typedef struct figures {
    double step, silent, shown, skew, waited, least, alone, peak, taken, parts[PARTS];
} figures;

static void print(const settings *set, const training *one, int64_t elements, const figures *told) {
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    if (one->sharded != NULL)
        tt_fully_sharded_count(one->sharded, &counts);
    printf("{\"mode\": \"%s\", \"parameters\": %lld, \"gathered\": %lld, \"step\": %.6f, ", set->mode,
           (long long)elements, (long long)counts.most_gathered_bytes, told->step);
    if ((one->parallel != NULL || one->sharded != NULL) && !set->offload) {
        printf(
            "\"silent\": %.6f, \"shown\": %.6f, \"skew\": %.6f, \"waited\": %.6f, \"least\": %.6f, \"alone\": %.6f, ",
            told->silent, told->shown, told->skew, told->waited, told->least, told->alone);
        print_parts(told->parts, 2 * one->layers + 3);
    }
    printf("\"peak\": %.0f, \"taken\": %.0f}\n", told->peak, told->taken);
}

/* What the ranks have measured, put together. */
static void put_together(const record *kept, const training *one, tutti_group *group, figures *told) {
    int count = 2 * one->layers + 3;
    double own = median(kept->waited, kept->steps);
    told->waited = largest(own, group);
    told->least = -largest(-own, group);
    for (int i = 0; i < KINDS; i++)
        slowest(kept->times[i], kept->steps, group);
    double *steps = kept->times[WHOLE], *silent = kept->times[SILENT];
    double *copy = calloc((size_t)kept->steps, sizeof *copy);
    if (copy != NULL) {
        memcpy(copy, steps, (size_t)kept->steps * sizeof *copy);
        told->step = median(copy, kept->steps);
        memcpy(copy, silent, (size_t)kept->steps * sizeof *copy);
        told->silent = median(copy, kept->steps);
    }
    free(copy);
    told->shown = longer(steps, silent, kept->steps);
    told->skew = longer(kept->times[MET], silent, kept->steps);
    told->peak = largest(told->peak, group);
    told->taken = largest(told->taken, group);
    tt_tensor *parts = tt_from(one->parts, tt_shape(count), TUTTI_F64, NULL);
    tt_read(tt_all_reduce(parts, TUTTI_AVG, group), told->parts, TUTTI_F64, (size_t)count);
    for (int i = 0; i < count; i++)
        told->parts[i] /= kept->steps;
}

static bool has_kinds(const settings *set) {
    return !set->offload && (strcmp(set->mode, "data") == 0 || strcmp(set->mode, "sharded") == 0);
}

/* One step of each kind that this mode has; those that are not timed have numbers that `kept` has no room for. */
static bool steps_of_all_kinds(training *one, const settings *set, int number, record *kept, tutti_group *group) {
    bool timed = number >= 0 && number < kept->steps;
    int kinds = has_kinds(set) ? KINDS : 1;
    for (int k = 0; k < kinds; k++) {
        double parts[PARTS];
        tt_scope scope = tt_scope_open();
        one->kind = (kind)k;
        memcpy(parts, one->parts, sizeof parts);
        meet(group);
        int64_t start = tt_waited_ns(one->world);
        double seconds = step(one, set);
        if (timed)
            kept->times[k][number] = seconds;
        if (timed && k == WHOLE)
            kept->waited[number] = 1e-9 * (double)(tt_waited_ns(one->world) - start);
        else
            memcpy(one->parts, parts, sizeof parts);
        if (tt_scope_close(&scope) != TUTTI_OK)
            return false;
    }
    one->kind = WHOLE;
    return true;
}

/* Of this thread, which computes: see above. */
static void flush_subnormals(void) {
#ifdef __SSE2__
    enum {
        RESULTS = 0x8000,
        OPERANDS = 0x0040
    };
    _mm_setcsr(_mm_getcsr() | RESULTS | OPERANDS);
#endif
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    const settings *set = argument;
    flush_subnormals();
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    size_t steps = (size_t)set->steps;
    double *times = calloc((KINDS + 1) * steps, sizeof *times);
    record kept = { set->steps, { times, times + steps, times + 2 * steps }, times + 3 * steps };
    sampler memory = { .most = 0 };
    training one = { .model = NULL };
    long before = bytes_now();
    tt_scope scope = tt_scope_open();
    tt_seed(1, (uint32_t)rank);
    make(&one, set, group);
    int64_t elements = one.sharded == NULL ? elements_of(one.model) : 0; /* behind the cut there are shards */
    for (int i = -WARM; i < set->steps + MEASURED && tt_error_pending() == TUTTI_OK; i++) {
        if (i == set->steps)
            sampler_begin(&memory);
        if (!steps_of_all_kinds(&one, set, i, &kept, group))
            return tt_scope_close(&scope);
    }
    figures told = { .peak = (double)peak_bytes(), .taken = (double)(sampler_end(&memory) - before) };
    put_together(&kept, &one, group, &told);
    if (!set->offload)
        told.alone = largest(alone(set, elements, one.sharded, one.modules + 1, group), group);
    if (tt_error_pending() == TUTTI_OK && rank == 0)
        print(set, &one, elements, &told);
    end(&one);
    free(times);
    return tt_scope_close(&scope);
}

/* "width=1024" */
static bool take(settings *set, const char *argument) {
    const struct {
        const char *name;
        int *value;
    } names[] = { { "width", &set->width },   { "heads", &set->heads }, { "layers", &set->layers },
                  { "length", &set->length }, { "batch", &set->batch }, { "offload", &set->offload } };
    const char *value = strchr(argument, '=');
    if (value == NULL || atof(value + 1) <= 0)
        return false;
    if (strncmp(argument, "bucket=", 7) == 0) {
        set->bucket = atof(value + 1);
        return true;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(argument, names[i].name, (size_t)(value - argument)) == 0) {
            *names[i].value = atoi(value + 1);
            return true;
        }
    return false;
}

int main(int argc, char **argv) {
    settings set = { .mode = argc > 1 ? argv[1] : "",
                     .steps = argc > 3 ? atoi(argv[3]) : 0,
                     .width = 256,
                     .heads = 4,
                     .layers = 6,
                     .length = 128,
                     .batch = 4 };
    bool good = set.steps > 0;
    for (int i = 4; i < argc; i++)
        good = take(&set, argv[i]) && good;
    if (!good || set.layers > MOST_LAYERS) {
        fprintf(stderr, "usage: parallel single|local|data|sharded RANKS STEPS [NAME=NUMBER…] (bucket, width, heads, "
                        "layers, length, batch, offload)\n");
        return 2;
    }
    return tutti_main(atoi(argv[2]), rank_main, &set);
}
