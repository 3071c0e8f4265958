/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of a small GPT on several ranks, for parallel.py:
 *
 *     parallel MODE RANKS STEPS [MIB]  MODE: single, local (nothing is done to gradients), filled (they are put into
 *                                      buckets, which are not reduced), data, sharded. MIB: of a bucket
 *
 * Prints, as JSON, seconds of the median step on the slowest rank, the seconds that the reductions of one step take
 * when nothing else is done, and bytes of memory: the peak of the process, and the most that steps took above what was
 * there before the model, where a page that several ranks have mapped counts in parts.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "measure.h"

enum {
    LETTERS = 256,
    WIDTH = 256,
    HEADS = 4,
    LAYERS = 6,
    LENGTH = 128,
    BATCH = 4,
    WARM = 3,
    MEASURED = 3 /* steps behind the timed ones, in which memory is looked at */
};

typedef struct settings {
    const char *mode;
    int steps;
    double bucket_mib; /* 0: the default */
} settings;

static int block_forward(tt_module *block, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *x = inputs.at[0];
    tt_tensor *seen = tt_module_call(tt_module_child(block, "first"), x);
    x = tt_add(x, tt_module_call(tt_module_child(block, "attention"), seen));
    tt_tensor *thought = tt_module_call(tt_module_child(block, "second"), x);
    outputs[0] = tt_add(x, tt_module_call(tt_module_child(block, "hidden"), thought));
    return 1;
}

static tt_module *block_of(void) {
    static const tt_module_type type = { sizeof type, "Block", block_forward, NULL };
    tt_attention_options heads = { .size = sizeof heads, .heads = HEADS };
    tt_module *block = tt_module_new(&type, NULL);
    tt_module_add_child(block, "first", tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32));
    tt_module_add_child(block, "attention", tt_attention_module(WIDTH, &heads));
    tt_module_add_child(block, "second", tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32));
    tt_module *layers[] = { tt_linear_module(WIDTH, 4 * WIDTH, true, TUTTI_F32), tt_function_module("gelu", tt_gelu),
                            tt_linear_module(4 * WIDTH, WIDTH, true, TUTTI_F32) };
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

/* All-reduces as many bytes as a step has gradients, in blocks of at most 25 MiB, with nothing else to do. */
static double reduce_alone(int64_t elements, tutti_group *group) {
    double times[9] = { 0 };
    int64_t block = 25 << 18;
    tt_tensor *values = tt_symm_empty(tutti_group_world(group), tt_shape(elements), TUTTI_F32, NULL);
    for (int round = -WARM; round < 9 && tt_error_pending() == TUTTI_OK; round++) {
        tt_wait(tt_all_reduce(tt_zeros(tt_shape(1), TUTTI_F32, NULL), TUTTI_SUM, group)); /* all are here */
        double begin = now();
        for (int64_t at = 0; at < elements; at += block)
            tt_all_reduce_(tt_narrow(values, 0, at, elements - at < block ? elements - at : block), TUTTI_AVG, group);
        tt_wait(values);
        if (round >= 0)
            times[round] = now() - begin;
    }
    return median(times, 9);
}

static void reduce_nothing(void *user, const tt_bucket *bucket) {
    (void)user, (void)bucket;
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    const settings *set = argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), ranks = tutti_world_size(world);
    double *times = calloc((size_t)set->steps, sizeof *times);
    sampler memory = { .most = 0 };
    long before = bytes_now();
    tt_module *modules[LAYERS + 3];
    tt_scope scope = tt_scope_open();
    tt_seed(1, (uint32_t)rank);
    modules[0] = tt_embedding_module(LETTERS, WIDTH, TUTTI_F32);
    for (int i = 0; i < LAYERS; i++)
        modules[1 + i] = block_of();
    modules[LAYERS + 1] = tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32);
    modules[LAYERS + 2] = tt_linear_module(WIDTH, LETTERS, false, TUTTI_F32);
    tt_module *model = tt_sequential_module(LAYERS + 3, modules);
    int64_t elements = elements_of(model);
    bool is_filled = strcmp(set->mode, "filled") == 0;
    bool is_data = is_filled || strcmp(set->mode, "data") == 0 || strcmp(set->mode, "local") == 0;
    tt_data_parallel_options options = { .size = sizeof options,
                                         .reduce = is_filled ? reduce_nothing : NULL,
                                         .bucket_bytes = (int64_t)(set->bucket_mib * (1 << 20)) };
    tt_data_parallel *parallel = is_data ? tt_data_parallel_new(model, group, &options) : NULL;
    tt_fully_sharded *sharded =
        strcmp(set->mode, "sharded") == 0 ? tt_fully_shard(model, LAYERS, modules + 1, group, NULL) : NULL;
    if (strcmp(set->mode, "local") == 0)
        tt_data_parallel_sync(parallel, false);
    tt_optimizer *optimizer = tt_adamw_optimizer(model, NULL);
    for (int step = -WARM; step < set->steps + MEASURED && tt_error_pending() == TUTTI_OK; step++) {
        tt_scope inner = tt_scope_open();
        if (step == set->steps)
            sampler_begin(&memory);
        tt_tensor *inputs = tt_randint(0, LETTERS, tt_shape(BATCH, LENGTH), TUTTI_I64, NULL);
        tt_tensor *targets = tt_randint(0, LETTERS, tt_shape(BATCH * LENGTH), TUTTI_I64, NULL);
        double begin = now();
        tt_tensor *logits = tt_reshape(tt_module_call(model, inputs), tt_shape(BATCH * LENGTH, LETTERS));
        tt_backward(tt_cross_entropy(logits, targets, -100), NULL);
        tt_optimizer_step(optimizer);
        tt_optimizer_zero_grad(optimizer);
        if (step >= 0 && step < set->steps)
            times[step] = now() - begin;
        if (tt_scope_close(&inner) != TUTTI_OK)
            break;
    }
    double slowest = largest(median(times, set->steps), group), peak = largest((double)peak_bytes(), group);
    double taken = largest((double)(sampler_end(&memory) - before), group);
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    if (sharded != NULL)
        tt_fully_sharded_count(sharded, &counts);
    double alone = reduce_alone(elements, group);
    if (tt_error_pending() == TUTTI_OK && rank == 0)
        printf("{\"mode\": \"%s\", \"ranks\": %d, \"step\": %.6f, \"reduce\": %.6f, \"peak\": %.0f, \"taken\": %.0f, "
               "\"parameters\": %lld, \"gathered\": %lld}\n",
               set->mode, ranks, slowest, alone, peak, taken, (long long)elements,
               (long long)counts.most_gathered_bytes);
    tt_data_parallel_release(parallel);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(model);
    free(times);
    return tt_scope_close(&scope);
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) {
        fprintf(stderr, "usage: parallel single|local|filled|data|sharded RANKS STEPS [MIB]\n");
        return 2;
    }
    settings set = { argv[1], atoi(argv[3]), argc == 5 ? atof(argv[4]) : 0 };
    return tutti_main(atoi(argv[2]), rank_main, &set);
}
