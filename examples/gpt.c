/* SPDX-License-Identifier: Apache-2.0
 *
 * Trains a small GPT on the bytes of a file, on several ranks, in any of the ways there are.
 *
 *     $ gpt --steps 4                                  (four ranks, started by itself, fully sharded)
 *     $ tutti run -n 4 ./gpt --mode data --steps 4
 *     $ tutti run -n 4 ./gpt --mode sharded --tensor 2 --steps 4
 *     $ tutti run --survive -n 4 ./gpt --kill 2 --at 2 --steps 4
 *     $ tutti run --refill 1 -n 4 ./gpt --kill 2 --at 2 --steps 4 --replace 1 --checkpoint /tmp/gpt
 *
 * gpt --help lists the options.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

static const char usage[] =
    "gpt [OPTION VALUE]...: trains a small GPT on the bytes of a file, on several ranks\n"
    "  --text FILE       what is learned; default: a sentence\n"
    "  --mode MODE       data, or sharded, the default\n"
    "  --tensor N        ranks that share each layer; default 1\n"
    "  --device DEVICE   where it is computed: cpu, the default, or cuda\n"
    "  --offload 1       parameters and optimizer stay in memory of the host all the same; sharded alone\n"
    "  --steps N         default 20\n"
    "  --checkpoint DIR  goes on from what is there, and writes there after every --every N steps (50); sharded, "
    "without --tensor\n"
    "  --save FILE       writes all parameters at the end; without --tensor\n"
    "  --write N         then writes N letters, 4096 at most\n"
    "  --results FOLDER  writes loss, memory and time lines there, for a page\n"
    "  --kill R --at S   rank R dies in step S\n"
    "  --replace 1       the others wait for the one that `tutti run --refill` starts in its place, and lose no step\n"
    "  --help            prints this\n";

enum {
    LETTERS = 256,
    WIDTH = 128,
    HEADS = 4,
    LAYERS = 4,
    LENGTH = 64,
    BATCH = 8, /* rows of each rank */
    AFTER = 4, /* steps after a death that its time line still has */
    MOST_WRITTEN = 4096
};

typedef struct settings {
    const char *text, *save, *results, *checkpoint, *device;
    bool sharded;
    int steps, tensor, write, kill_rank, kill_step, every, replace, offload;
} settings;

/* Everything that a rank trains with. `group` computes other batches than this rank; `layer` shares layers with it. */
typedef struct training {
    const settings *set;
    tutti_world *world;
    tutti_group *group, *layer;
    tutti_device device;
    tt_module *model, *blocks[LAYERS];
    tt_fully_sharded *sharded;
    tt_data_parallel *parallel;
    tt_optimizer *optimizer;
    FILE *sentence; /* where no text is given */
    tt_tokens *tokens;
    tt_progress *progress;
    FILE *losses;
    int64_t step;
    double loss;
    int64_t first;      /* step that this process has made */
    int64_t shown;      /* step at which it writes how it went on after a death; 0: nobody has died */
    double begun, told; /* seconds of the clock: when it began, and when it was told last */
    int64_t waited;     /* nanoseconds, for other ranks, when it was told last */
} training;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- the model ---- */

/* In a scope of its own: what the backward does not need goes at once, the rest when the backward has used it. */
static int block_forward(tt_module *block, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = inputs.at[0];
    tt_tensor *seen = tt_module_call(tt_module_child(block, "first"), x);
    x = tt_add(x, tt_module_call(tt_module_child(block, "attention"), seen));
    tt_tensor *thought = tt_module_call(tt_module_child(block, "second"), x);
    outputs[0] = tt_scope_return(tt_add(x, tt_module_call(tt_module_child(block, "hidden"), thought)));
    tt_scope_leave(&scope);
    return 1;
}

/* Layers are those of one rank, or cut over `how->group`. */
static tt_module *block_of(const tt_tensor_parallel_options *how) {
    static const tt_module_type type = { sizeof type, "Block", block_forward, NULL };
    tt_attention_options heads = { .size = sizeof heads, .heads = HEADS, .rope_base = 10000 };
    tt_module *block = tt_module_new(&type, NULL);
    tt_module_add_child(block, "first", tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32));
    tt_module_add_child(block, "attention",
                        how != NULL ? tt_heads_attention_module(WIDTH, &heads, how)
                                    : tt_attention_module(WIDTH, &heads));
    tt_module_add_child(block, "second", tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32));
    tt_module *layers[3];
    layers[0] = how != NULL ? tt_column_linear_module(WIDTH, 4 * WIDTH, true, how)
                            : tt_linear_module(WIDTH, 4 * WIDTH, true, TUTTI_F32);
    layers[1] = tt_function_module("gelu", tt_gelu);
    layers[2] = how != NULL ? tt_row_linear_module(4 * WIDTH, WIDTH, true, how)
                            : tt_linear_module(4 * WIDTH, WIDTH, true, TUTTI_F32);
    tt_module_add_child(block, "hidden", tt_sequential_module(3, layers));
    return block;
}

static void build(training *run) {
    tt_tensor_parallel_options cut = { .size = sizeof cut, .group = run->layer };
    const tt_tensor_parallel_options *how = run->layer != NULL ? &cut : NULL;
    tt_fully_sharded_options options = { .size = sizeof options, .device = run->device };
    tt_module *modules[LAYERS + 3];
    tt_seed(1, 0);
    tt_default_device_set(run->set->offload ? TUTTI_CPU : run->device);
    modules[0] = how != NULL ? tt_vocabulary_embedding_module(LETTERS, WIDTH, how)
                             : tt_embedding_module(LETTERS, WIDTH, TUTTI_F32);
    for (int i = 0; i < LAYERS; i++)
        run->blocks[i] = modules[1 + i] = block_of(how);
    modules[LAYERS + 1] = tt_rms_norm_module(WIDTH, 1e-5, TUTTI_F32);
    modules[LAYERS + 2] = how != NULL ? tt_column_linear_module(WIDTH, LETTERS, false, how)
                                      : tt_linear_module(WIDTH, LETTERS, false, TUTTI_F32);
    run->model = tt_sequential_module(LAYERS + 3, modules);
    if (run->set->sharded)
        run->sharded = tt_fully_shard(run->model, LAYERS, run->blocks, run->group, &options);
    else
        run->parallel = tt_data_parallel_new(run->model, run->group, NULL);
    run->optimizer = tt_adamw_optimizer(run->model, TUTTI_OPTIONS(tt_adamw, .learning_rate = 3e-3));
    if (run->sharded != NULL)
        tt_fully_sharded_protect(run->sharded, run->optimizer);
    tt_default_device_set(run->device);
}

/* ---- a step ---- */

static void open_tokens(training *run) {
    tt_tokens_options options = { .size = sizeof options, .dtype = TUTTI_U8, .length = LENGTH, .batch = BATCH };
    options.rank = tutti_group_rank(run->group);
    options.rank_count = tutti_group_size(run->group);
    tt_tokens_close(run->tokens);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", run->sentence != NULL ? fileno(run->sentence) : -1);
    run->tokens = tt_tokens_open(run->set->text != NULL ? run->set->text : path, &options);
}

static tt_tensor *loss_of(const training *run, tt_tensor *inputs, tt_tensor *targets) {
    tt_tensor *logits = tt_module_call(run->model, inputs), *flat = tt_flatten(targets, 0, -1);
    logits = tt_reshape(logits, tt_shape(BATCH * LENGTH, tt_size(logits, -1)));
    return run->layer != NULL ? tt_vocabulary_cross_entropy(logits, flat, -100, run->layer)
                              : tt_cross_entropy(logits, flat, -100);
}

/* Where no terminal shows progress, ten lines do. */
static void tell(training *run, double loss) {
    int64_t part = run->set->steps / 10 > 0 ? run->set->steps / 10 : 1, tokens = (int64_t)BATCH * LENGTH;
    double took = now() - run->told, left = (double)(run->set->steps - 1 - run->step);
    if (run->progress == NULL || isatty(STDERR_FILENO) || (run->step + 1) % part != 0)
        return;
    int64_t waited = tt_waited_ns(run->world);
    fprintf(stderr, "  step %3lld of %d: loss %.2f, %5.0f tokens/s, %2.0f %% of it waiting for others, %.0f s left\n",
            (long long)run->step + 1, run->set->steps, loss,
            (double)(part * tokens * tutti_group_size(run->group)) / took, 1e-7 * (double)(waited - run->waited) / took,
            took / (double)part * left);
    run->told += took;
    run->waited = waited;
}

static void take_step(training *run) {
    const tt_schedule schedule = { .size = sizeof schedule,
                                   .kind = TT_SCHEDULE_COSINE,
                                   .warm_up = 10,
                                   .last = 0.1,
                                   .steps = run->set->steps > 10 ? run->set->steps : 11 };
    tt_tensor *inputs, *targets;
    tt_schedule_apply(&schedule, run->optimizer);
    tt_tokens_batch(run->tokens, run->step, &inputs, &targets);
    tt_tensor *loss = loss_of(run, tt_to_device(inputs, run->device), tt_to_device(targets, run->device));
    tt_backward(loss, NULL);
    tt_module_clip_grad_norm(run->model, 1, run->sharded != NULL ? run->group : NULL);
    if (run->sharded != NULL)
        tt_fully_sharded_step(run->sharded);
    else
        tt_optimizer_step(run->optimizer);
    tt_optimizer_zero_grad(run->optimizer);
    double mean = tt_item(tt_all_reduce(tt_detach(loss), TUTTI_AVG, run->group));
    if (tt_error_pending() != TUTTI_OK)
        return;
    int64_t tokens = (int64_t)BATCH * LENGTH * tutti_group_size(run->group);
    tt_progress_step(run->progress, mean, tokens);
    tell(run, mean);
    if (run->losses != NULL)
        fprintf(run->losses, "[%lld,%.4f,%.3f,%lld],", (long long)run->step, mean, now() - run->begun,
                (long long)tokens);
    run->loss = mean;
    run->step++;
}

/* ---- a death ---- */

/* A file among the results, or NULL. */
static FILE *result(const training *run, const char *name, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", run->set->results != NULL ? run->set->results : "", name);
    return run->set->results != NULL ? fopen(path, mode) : NULL;
}

static void die(const training *run) {
    FILE *file = result(run, "killed.txt", "w");
    if (file != NULL) {
        fprintf(file, "%.6f", now()); /* one clock for all ranks of a host */
        fclose(file);
    }
    kill(getpid(), SIGKILL);
}

/* How it was: when the others knew of it and went on, in milliseconds after it, and from what: where there is no
 * checkpoint yet, from the beginning. */
static void tell_death(const training *run, double seen, bool from_memory) {
    double killed = seen;
    FILE *file = result(run, "killed.txt", "r");
    if (file != NULL) {
        if (fscanf(file, "%lf", &killed) != 1)
            killed = seen;
        fclose(file);
    }
    const char *from = from_memory ? "memory" : run->step > 0 ? "the last checkpoint" : "the beginning";
    fprintf(stderr, "\n  known after %.0f ms; %d ranks go on from %s at step %lld, %.0f ms later\n",
            1e3 * (seen - killed), tutti_group_size(run->group), from, (long long)run->step, 1e3 * (now() - seen));
    if ((file = result(run, "death.txt", "w")) == NULL)
        return;
    fprintf(file, "%.1f %.1f %d %s", 1e3 * (seen - killed), 1e3 * (now() - killed), tutti_group_size(run->group), from);
    fclose(file);
}

/* Goes on from the folder of checkpoints, where there is one. */
static void load(training *run) {
    if (run->set->checkpoint == NULL || run->sharded == NULL)
        return;
    if (!tt_fully_sharded_load(run->sharded, run->optimizer, run->set->checkpoint) &&
        tt_error_pending() == TUTTI_ERROR_NOT_FOUND)
        tt_error_clear();
}

static void end_model(training *run) {
    tt_fully_sharded_release(run->sharded);
    tt_data_parallel_release(run->parallel);
    tt_optimizer_release(run->optimizer);
    tt_module_release(run->model);
    run->sharded = NULL;
    run->parallel = NULL;
    run->optimizer = NULL;
    run->model = NULL;
}

/* Makes a new model, and reads it from the last checkpoint. */
static void begin_anew(training *run) {
    tt_error_clear();
    end_model(run);
    build(run);
    load(run);
}

/* The one that takes the dead rank's place begins like everybody, and reads what the others have left. */
static tutti_status replace(training *run) {
    tutti_group *whole;
    tutti_status status = tutti_group_refill(tutti_world_group(run->world), 0, &whole);
    if (status != TUTTI_OK)
        return status;
    tutti_group_release(run->group);
    run->group = whole;
    begin_anew(run);
    return tt_error_pending();
}

/* The survivors cut anew what all ranks had. Where ranks stopped at different places that cannot be, and a new model is
 * read from the last checkpoint. */
static tutti_status go_on(training *run, double seen) {
    tutti_group *rest;
    tutti_status status = tutti_group_shrink(run->group, NULL, &rest);
    if (status != TUTTI_OK)
        return status;
    tutti_group_release(run->group);
    run->group = rest;
    bool from_memory = tt_fully_sharded_regroup(run->sharded, rest);
    if (!from_memory && run->set->checkpoint != NULL)
        begin_anew(run);
    if (run->set->replace) {
        if (from_memory)
            tt_fully_sharded_save(run->sharded, run->optimizer, run->set->checkpoint);
        status = tt_error_pending() == TUTTI_OK ? replace(run) : tt_error_pending();
        if (status != TUTTI_OK)
            return status;
        rest = run->group;
    }
    open_tokens(run);
    run->step = tt_item_int(tt_optimizer_steps(run->optimizer)); /* some may have heard of the death a little earlier */
    if (tt_error_pending() == TUTTI_OK && tutti_group_rank(rest) == 0)
        tell_death(run, seen, from_memory);
    return tt_error_pending();
}

/* What this rank did around a death, a few steps after it: its recorder has not yet come round. */
static void tell_around(const training *run) {
    char name[64], *text;
    snprintf(name, sizeof name, "death-%d.json", tutti_world_rank(run->world));
    FILE *file = result(run, name, "w");
    if (file == NULL)
        return;
    if (tutti_trace_text(run->world, &text) == TUTTI_OK) {
        fputs(text, file);
        tutti_free(text);
    } else {
        fprintf(stderr, "%s\n", tutti_error_message());
    }
    fclose(file);
}

static tutti_status train(training *run) {
    while (run->step < run->set->steps) {
        if (run->step == run->set->kill_step && tutti_world_rank(run->world) == run->set->kill_rank && run->first == 0)
            die(run);
        tt_scope scope = tt_scope_open();
        take_step(run);
        if (run->set->checkpoint != NULL && run->sharded != NULL && run->step % run->set->every == 0)
            tt_fully_sharded_save(run->sharded, run->optimizer, run->set->checkpoint);
        tutti_status status = tt_scope_close(&scope);
        double seen = now();
        if (status == TUTTI_ERROR_DEAD && run->sharded != NULL && run->layer == NULL) {
            if (tutti_world_rank(run->world) == (run->set->kill_rank == 0))
                fprintf(stderr, "\n  %s\n", tutti_error_message());
            status = go_on(run, seen);
            run->shown = run->step + AFTER < run->set->steps ? run->step + AFTER : run->set->steps;
        }
        if (status != TUTTI_OK)
            return status;
        if (run->shown > 0 && run->step == run->shown)
            tell_around(run);
    }
    return TUTTI_OK;
}

/* ---- after the training ---- */

/* Goes on from a few letters; all ranks compute it, since each has a part of the model. */
static void write_text(training *run) {
    char text[LENGTH + MOST_WRITTEN] = "Tutti ";
    int length = (int)strlen(text), end = length + run->set->write;
    bool recording = tt_grad_mode(false);
    tt_seed(7, 0);
    for (; length < end && tt_error_pending() == TUTTI_OK; length++) {
        int64_t window[LENGTH], count = length < LENGTH ? length : LENGTH;
        for (int64_t i = 0; i < count; i++)
            window[i] = (unsigned char)text[length - count + i];
        tt_scope scope = tt_scope_open();
        tt_tensor *logits = tt_module_call(run->model, tt_from(window, tt_shape(1, count), TUTTI_I64, NULL));
        tt_tensor *last = tt_select(tt_select(logits, 0, 0), 0, -1);
        if (run->layer != NULL)
            last = tt_all_gather(last, 0, run->layer);
        /* The largest of logit / temperature + noise of Gumbel is a draw from the softmax. */
        tt_tensor *noise = tt_neg(tt_log(tt_neg(tt_log(tt_rand(tt_sizes(last), TUTTI_F32, NULL)))));
        int64_t letter = tt_item_int(tt_argmax(tt_add(tt_mul_scalar(last, 1.4), noise), 0, false));
        text[length] = letter == '\n' || (letter >= ' ' && letter < 127) ? (char)letter : '.';
        text[length + 1] = '\0';
        tt_scope_leave(&scope);
    }
    tt_grad_mode(recording);
    if (tt_error_pending() != TUTTI_OK)
        return;
    if (tutti_group_rank(run->group) == 0 && (run->layer == NULL || tutti_group_rank(run->layer) == 0))
        printf("\n%s\n", text);
    if (tutti_world_rank(run->world) != (run->set->kill_rank == 0))
        return;
    FILE *file = result(run, "text.txt", "w");
    if (file != NULL) {
        fputs(text, file);
        fclose(file);
    }
}

static void save(training *run) {
    tt_scope scope = tt_scope_open();
    tt_named_list parameters =
        run->sharded != NULL ? tt_fully_sharded_parameters(run->sharded) : tt_module_parameters(run->model);
    if (tutti_group_rank(run->group) == 0 &&
        tt_save_safetensors(tt_tensors_of(parameters.count, parameters.at), parameters.names, run->set->save))
        printf("saved %zu tensors to %s\n", parameters.count, run->set->save);
    tt_scope_leave(&scope);
}

static void tell_memory(training *run) {
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    char name[64];
    if (run->sharded != NULL)
        tt_fully_sharded_count(run->sharded, &counts);
    snprintf(name, sizeof name, "memory-%d.json", tutti_world_rank(run->world));
    FILE *file = result(run, name, "w");
    if (file != NULL) {
        fprintf(file, "{\"rank\":%d,\"shards\":%lld,\"gathered\":%lld,\"ranks\":%d},", tutti_world_rank(run->world),
                (long long)counts.shard_bytes, (long long)counts.most_gathered_bytes, tutti_group_size(run->group));
        fclose(file);
    }
    if (tutti_trace_write(run->world, run->set->results) != TUTTI_OK)
        tt_error_set(TUTTI_ERROR_SYSTEM, tutti_error_message());
}

/* ---- the program ---- */

static void meet(training *run) {
    tutti_mesh *mesh;
    tutti_group_form form;
    int ranks = tutti_world_size(run->world), parts = run->set->tensor;
    run->group = tutti_group_keep(tutti_world_group(run->world));
    if (run->set->kill_rank >= ranks)
        tt_error_set(TUTTI_ERROR_ARGUMENT, "--kill must name one of the ranks");
    if (parts == 1)
        return;
    if (parts < 1 || ranks % parts != 0) {
        tt_error_set(TUTTI_ERROR_ARGUMENT, "--tensor must divide the number of ranks");
        return;
    }
    int shape[] = { ranks / parts, parts };
    tutti_status status = tutti_mesh_new(run->world, TUTTI_CPU, shape, 2, NULL, &mesh);
    if (status != TUTTI_OK) {
        tt_error_set(status, tutti_error_message());
        return;
    }
    tutti_group_release(run->group);
    run->group = tutti_group_keep(tt_group(run->world, tutti_form_mesh_dim(&form, mesh, 0), NULL));
    run->layer = tutti_group_keep(tt_group(run->world, tutti_form_mesh_dim(&form, mesh, 1), NULL));
    tutti_mesh_release(mesh);
}

static void begin(training *run) {
    meet(run);
    run->device = TUTTI_CPU;
    if (run->set->device != NULL && tutti_device_parse(run->set->device, &run->device) != TUTTI_OK)
        tt_error_set(TUTTI_ERROR_ARGUMENT, tutti_error_message());
    build(run);
    load(run);
    run->first = run->step = tt_item_int(tt_optimizer_steps(run->optimizer));
    run->sentence = run->set->text == NULL ? tmpfile() : NULL;
    for (int i = 0; run->sentence != NULL && i < 500; i++)
        fprintf(run->sentence, "Tutti means everybody plays together, number %d; and then? ", i);
    if (run->sentence != NULL)
        fflush(run->sentence);
    open_tokens(run);
    run->begun = run->told = now();
    run->waited = tt_waited_ns(run->world); /* while the model was made */
    if (tutti_world_rank(run->world) != (run->set->kill_rank == 0))
        return;
    if (run->first > 0)
        printf("goes on from step %lld in %s\n", (long long)run->first, run->set->checkpoint);
    fflush(stdout);
    run->progress = tt_progress_new(
        TUTTI_OPTIONS(tt_progress_options, .steps = run->set->steps, .done = run->step, .world = run->world));
    run->losses = result(run, "loss.json", "w");
    if (run->set->results != NULL && run->losses == NULL)
        tt_error_set(TUTTI_ERROR_SYSTEM, "no file can be made in the folder of --results");
}

static void tell_end(const training *run) {
    if (run->step == run->first)
        printf("no step was made: %lld of %d were there already\n", (long long)run->first, run->set->steps);
    else
        printf("loss %.4f after %lld steps, at the end on %d ranks\n", run->loss, (long long)run->step,
               tutti_group_size(run->group) * run->set->tensor);
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    training run = { .set = argument, .world = world };
    tt_scope scope = tt_scope_open();
    begin(&run);
    tutti_status status = tt_error_pending() == TUTTI_OK ? train(&run) : tt_error_pending();
    tt_progress_end(run.progress);
    if (status == TUTTI_OK && run.progress != NULL)
        tell_end(&run);
    if (status == TUTTI_OK && run.set->results != NULL)
        tell_memory(&run);
    if (status == TUTTI_OK && run.set->save != NULL)
        save(&run);
    if (status == TUTTI_OK && run.set->write > 0)
        write_text(&run);
    if (run.losses != NULL)
        fclose(run.losses);
    tt_tokens_close(run.tokens);
    if (run.sentence != NULL)
        fclose(run.sentence);
    end_model(&run);
    if (tt_error_pending() == TUTTI_OK && !tt_wait_all(world)) /* what a death ended */
        tt_error_clear();
    tutti_status last = tt_scope_close(&scope);
    status = status == TUTTI_OK ? last : status;
    if (status == TUTTI_OK)
        status = tutti_barrier(run.group, NULL);
    tutti_group_release(run.group);
    tutti_group_release(run.layer);
    return status;
}

/* A whole number, and nothing behind it. */
static bool number_of(const char *text, int least, int *number) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < least || value > INT_MAX)
        return false;
    *number = (int)value;
    return true;
}

static bool take(settings *set, const char *name, const char *value) {
    struct {
        const char *name;
        int *number, least;
        const char **text;
    } known[] = { { "--steps", &set->steps, 0, NULL },     { "--tensor", &set->tensor, 1, NULL },
                  { "--write", &set->write, 0, NULL },     { "--kill", &set->kill_rank, -1, NULL },
                  { "--at", &set->kill_step, -1, NULL },   { "--every", &set->every, 1, NULL },
                  { "--replace", &set->replace, 0, NULL }, { "--offload", &set->offload, 0, NULL },
                  { "--text", NULL, 0, &set->text },       { "--checkpoint", NULL, 0, &set->checkpoint },
                  { "--save", NULL, 0, &set->save },       { "--results", NULL, 0, &set->results },
                  { "--device", NULL, 0, &set->device } };
    if (strcmp(name, "--mode") == 0) {
        set->sharded = strcmp(value, "sharded") == 0;
        return set->sharded || strcmp(value, "data") == 0;
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(name, known[i].name) != 0)
            continue;
        if (known[i].number != NULL)
            return number_of(value, known[i].least, known[i].number);
        *known[i].text = value;
        return true;
    }
    return false;
}

/* What cannot be done together, in words; NULL: nothing. */
static const char *contradiction(const settings *set) {
    if ((set->kill_rank >= 0) != (set->kill_step >= 0))
        return "--kill and --at belong together";
    if (set->write > MOST_WRITTEN)
        return "--write is at most 4096";
    if (set->replace && set->kill_step == 0)
        return "--replace needs --at above 0: who begins in step 0 would die there too";
    if (set->replace && (set->checkpoint == NULL || !set->sharded || set->tensor > 1))
        return "--replace needs --checkpoint and --mode sharded without --tensor";
    if (set->offload && !set->sharded)
        return "--offload needs --mode sharded";
    if (set->checkpoint != NULL && (!set->sharded || set->tensor > 1))
        return "--checkpoint needs --mode sharded without --tensor";
    if (set->save != NULL && set->tensor > 1)
        return "--save writes whole layers, and needs them without --tensor";
    return NULL;
}

int main(int argc, char **argv) {
    settings set = { .sharded = true, .steps = 20, .tensor = 1, .every = 50, .kill_rank = -1, .kill_step = -1 };
    for (int i = 1; i < argc; i += 2) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(usage, stdout);
            return 0;
        }
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value == NULL || !take(&set, argv[i], value)) {
            fprintf(stderr, "gpt: %s%s%s is not understood; gpt --help lists the options\n", argv[i],
                    value != NULL ? " " : "", value != NULL ? value : "");
            return 2;
        }
    }
    const char *wrong = contradiction(&set);
    if (wrong != NULL) {
        fprintf(stderr, "gpt: %s\n", wrong);
        return 2;
    }
    return tutti_main(4, rank_main, &set);
}
