/* SPDX-License-Identifier: Apache-2.0
 *
 * Making, running and ending programs.
 */
#include "loops/program.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/autograd.h>

#include "base/log.h"
#include "loops/again.h"
#include "loops/arena.h"
#include "loops/group.h"
#include "loops/target.h"
#include "tensor/operators.h"
#include "tensor/process.h"
#include "tensor/step.h"

struct tu_program {
    tt_graph *graph; /* held */
    tu_step_of_program *steps;
    int step_count;
    void *code[TU_TARGETS]; /* each target's own */
    tu_plan plan;
    _Atomic(tu_arena *) spare; /* of the last run that ended: taken and put back with acquire and release */
    bool interpreted;          /* vertex by vertex */
};

/* ---- making ---- */

static void warn_of_file(const char *path, int error) {
    char text[128];
    if (tu_process_tell_once(TU_WARN_NO_FILES))
        TU_LOG(TUTTI_LOG_WARN, NULL, "compile", "%s cannot be written: %s; what is compiled runs all the same", path,
               strerror_r(error, text, sizeof text));
}

FILE *tu_look_open(const char *path) {
    FILE *file = fopen(path, "we");
    if (file == NULL)
        warn_of_file(path, errno);
    return file;
}

void tu_look_close(FILE *file, const char *path) {
    bool wrong = file != NULL && ferror(file);
    if (file != NULL && (fclose(file) != 0 || wrong))
        warn_of_file(path, wrong ? EIO : errno);
}

typedef struct look {
    FILE *to; /* NULL: nobody looks */
    char path[PATH_MAX];
} look;

static void look_open(const tu_program_options *options, const char *ending, look *made) {
    made->to = NULL;
    if (options->folder == NULL || options->folder[0] == 0)
        return;
    snprintf(made->path, sizeof made->path, "%s/%s.%s", options->folder,
             options->name != NULL ? options->name : "program", ending);
    made->to = tu_look_open(made->path);
}

static tutti_status compile_for(tu_program *made, const tu_program_options *options, int number, tu_nest **nests) {
    const tu_target *target = tu_target_at(number);
    int count = 0;
    look copy;
    for (int i = 0; i < made->step_count; i++)
        if (made->steps[i].nest != NULL && tu_target_number(made->steps[i].nest->device) == number)
            nests[count++] = made->steps[i].nest;
    if (count == 0)
        return TUTTI_OK;
    look_open(options, target->ending, &copy);
    tutti_status status = target->make(nests, count, copy.to, &made->code[number]);
    tu_look_close(copy.to, copy.path);
    return status;
}

static tutti_status compile(tu_program *made, const tu_program_options *options) {
    tutti_status status = TUTTI_OK;
    tu_nest **nests = calloc((size_t)made->step_count + 1, sizeof *nests);
    if (nests == NULL)
        return tu_error_memory("a program", (size_t)made->step_count * sizeof *nests);
    for (int number = 0; number < TU_TARGETS && status == TUTTI_OK; number++)
        status = compile_for(made, options, number, nests);
    free(nests);
    return status;
}

static void show(const tu_program *made, const tu_program_options *options) {
    look text;
    look_open(options, "loops", &text);
    if (text.to != NULL)
        tu_program_print(text.to, made);
    tu_look_close(text.to, text.path);
    look_open(options, "plan", &text);
    if (text.to != NULL)
        tu_plan_print(text.to, &made->plan);
    tu_look_close(text.to, text.path);
}

static tutti_status make_steps(tu_program *made, const tu_program_options *options) {
    if (made->interpreted)
        return TUTTI_OK;
    tutti_status status =
        tu_steps_make(made->graph, options->mode == TU_PROGRAM_FUSED, &made->steps, &made->step_count);
    if (status == TUTTI_OK && !options->no_compiler)
        status = compile(made, options);
    if (status == TUTTI_OK)
        status = tu_steps_call_members(&made->steps, &made->step_count);
    for (int i = 0; i < made->step_count && status == TUTTI_OK; i++)
        if (made->steps[i].nest != NULL)
            status = tu_nest_schedule(made->steps[i].nest);
    if (status == TUTTI_OK)
        status = tu_plan_make(made->graph, made->steps, made->step_count, &made->plan);
    if (status == TUTTI_OK)
        show(made, options);
    return status;
}

tutti_status tu_program_make(const tt_graph *graph, const tu_program_options *options, tu_program **program) {
    tu_program_options plain = { .name = NULL };
    if (options == NULL)
        options = &plain;
    tu_program *made = calloc(1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a program", sizeof *made);
    made->interpreted = options->mode == TU_PROGRAM_INTERPRET;
    made->graph = (tt_graph *)graph; /* only its count changes */
    atomic_fetch_add_explicit(&made->graph->references, 1, memory_order_relaxed);
    tutti_status status = make_steps(made, options);
    if (status != TUTTI_OK)
        tu_program_release(made);
    else
        *program = made;
    return status;
}

void tu_program_release(tu_program *program) {
    if (program == NULL)
        return;
    tu_steps_free(program->steps, program->step_count);
    for (int i = 0; i < TU_TARGETS; i++)
        tu_target_at(i)->end(program->code[i]);
    tu_plan_free(&program->plan);
    tu_arena_drop(atomic_load_explicit(&program->spare, memory_order_acquire));
    tt_graph_release(&program->graph);
    free(program);
}

/* ---- looking ---- */

tu_program_counts tu_program_count(const tu_program *program) {
    tu_program_counts counts = { .calls = 0 };
    for (int i = 0; i < program->step_count; i++) {
        const tu_nest *nest = program->steps[i].nest;
        counts.calls += program->steps[i].vertex != NULL;
        counts.epilogues += nest != NULL && program->steps[i].vertex != NULL;
        counts.loops += nest != NULL;
        counts.fused += nest != NULL ? nest->member_count : 0;
        counts.compiled += nest != NULL && tu_target_of(nest)->has_code(nest);
    }
    return counts;
}

void tu_program_print(FILE *to, const tu_program *program) {
    for (int i = 0; i < program->step_count; i++) {
        if (program->steps[i].vertex != NULL) {
            fprintf(to, "call ");
            tu_vertex_print(to, program->steps[i].vertex);
            fprintf(to, program->steps[i].nest != NULL ? ", and behind it\n" : "\n");
        }
        if (program->steps[i].nest != NULL)
            tu_nest_print(to, program->steps[i].nest);
    }
}

/* ---- running ---- */

/* What operators ask of their inputs before a kernel runs. */
static tutti_status check_ready(const tu_nest *nest, tt_tensor *const *tensors, const tu_value *except) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < nest->tensor_count && status == TUTTI_OK; i++) {
        const tt_tensor *x = tensors[i];
        if (nest->tensors[i].fresh || nest->tensors[i].value == except)
            continue;
        if (nest->tensors[i].written)
            status = tu_storage_wait_write(x->storage);
        if (status == TUTTI_OK && (atomic_load_explicit(&x->storage->waiter, memory_order_relaxed) != NULL ||
                                   tu_tensor_need(x) > x->storage->bytes))
            status = tu_tensor_ready("compiled loop", nest->tensors[i].value->name, x);
    }
    return status;
}

static tt_tensor *new_result(const tu_plan *plan, tu_arena *arena, const tu_value *value) {
    const tu_planned *planned = &plan->storages[value->storage];
    if (arena != NULL && planned->here && planned->value == value)
        return tu_tensor_on(tu_arena_storage(arena, planned), &value->shape);
    return tu_tensor_new(&value->shape);
}

/* New tensors for what the nest makes; they are the run's at once. */
static tutti_status make_results(tu_graph_run *now, const tu_plan *plan, tu_arena *arena, const tu_nest *nest,
                                 tt_tensor **tensors) {
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        if (tensor->fresh) {
            tt_tensor *made = new_result(plan, arena, tensor->value);
            if (made == NULL)
                return TUTTI_ERROR_MEMORY;
            now->tensors[tensor->value->number] = made;
        }
        tensors[i] = now->tensors[tensor->value->number];
    }
    bool anywhere = true; /* what is made of numbers that belong to any device does so too, as in calls */
    for (int i = 0; i < nest->tensor_count; i++)
        anywhere = anywhere && (nest->tensors[i].fresh || (tensors[i] != NULL && tensors[i]->flags & TU_NUMBER));
    for (int i = 0; i < nest->tensor_count && anywhere; i++)
        tensors[i]->flags |= TU_NUMBER;
    return TUTTI_OK;
}

/* What follows a nest that ran: versions rise, and what nobody needs any more is let go. */
static void finish_nest(tu_graph_run *now, const tu_nest *nest) {
    for (int i = 0; i < nest->bump_count; i++) {
        tt_tensor *written = now->tensors[nest->bumps[i].value->number];
        for (int k = 0; written != NULL && k < nest->bumps[i].count; k++)
            tu_bump(written);
    }
    for (int i = 0; i < nest->member_count; i++)
        tu_graph_run_let_go(now, nest->members[i]);
}

static tutti_status run_nest(tu_graph_run *now, const tu_plan *plan, tu_arena *arena, const tu_nest *nest) {
    tt_tensor *tensors[TU_NEST_TENSORS];
    bool again = tu_noting_here() != NULL && !tu_is_remote(nest->device);
    tutti_status status = make_results(now, plan, arena, nest, tensors);
    if (status == TUTTI_OK)
        status = check_ready(nest, tensors, NULL);
    if (status == TUTTI_OK && again)
        status = tu_again_guard_nest(nest, tensors);
    if (status == TUTTI_OK)
        status = tu_target_of(nest)->run(nest, tensors);
    if (status == TUTTI_OK && again)
        status = tu_again_nest(nest, tensors);
    if (status == TUTTI_OK)
        finish_nest(now, nest);
    return status;
}

static tutti_status run_call(tu_graph_run *now, const tu_plan *plan, tu_arena *arena, const tu_vertex *vertex) {
    tt_scope scope = tt_scope_open();
    tu_arena_source source;
    bool again = tu_noting_here() != NULL && tu_vertex_is_of_host(vertex);
    tutti_status status = again ? tu_again_guard_vertex(now, vertex) : TUTTI_OK;
    if (arena != NULL)
        tu_arena_begin(&source, arena, plan, vertex);
    if (status == TUTTI_OK)
        status = tu_graph_run_vertex(now, vertex);
    if (arena != NULL)
        tu_arena_end(&source);
    if (status == TUTTI_OK && again)
        status = tu_again_vertex(now, vertex);
    tu_scope_leave(&scope);
    if (status == TUTTI_OK)
        tu_graph_run_let_go(now, vertex);
    return status;
}

/* A product with its epilogue; where the product could not serve it, the nest runs behind it as any other. */
static tutti_status run_product(tu_graph_run *now, const tu_plan *plan, tu_arena *arena, const tu_vertex *vertex,
                                const tu_nest *nest) {
    const tu_value *product = vertex->results[0];
    tt_tensor *tensors[TU_NEST_TENSORS];
    tu_nest_epilogue epilogue;
    tutti_status status = make_results(now, plan, arena, nest, tensors);
    if (status == TUTTI_OK)
        status = check_ready(nest, tensors, product);
    if (status != TUTTI_OK)
        return status;
    tu_nest_epilogue_init(&epilogue, nest, tensors, product);
    tu_self()->epilogue = &epilogue.own;
    status = run_call(now, plan, arena, vertex);
    tu_self()->epilogue = NULL;
    if (status == TUTTI_OK && atomic_load_explicit(&epilogue.out_of_memory, memory_order_relaxed))
        status =
            tu_error_memory("the buffers of a loop behind a product", (size_t)nest->buffer_count * nest->buffer_bytes);
    if (status == TUTTI_OK && !epilogue.begun) {
        for (int i = 0; i < nest->tensor_count; i++)
            tensors[i] = now->tensors[nest->tensors[i].value->number];
        status = tu_nest_run(nest, tensors);
    }
    if (status == TUTTI_OK)
        finish_nest(now, nest);
    return status;
}

static tutti_status run_step(tu_graph_run *now, const tu_plan *plan, tu_arena *arena, const tu_step_of_program *step) {
    if (step->nest == NULL)
        return run_call(now, plan, arena, step->vertex);
    if (step->vertex == NULL)
        return run_nest(now, plan, arena, step->nest);
    if (tu_noting_here() == NULL)
        return run_product(now, plan, arena, step->vertex, step->nest);
    tutti_status status = run_call(now, plan, arena, step->vertex); /* each is done again by itself */
    return status == TUTTI_OK ? run_nest(now, plan, arena, step->nest) : status;
}

/* Vertex by vertex, in a step that is noted: what is of the host is done again at each run. */
static tutti_status note_calls(const tt_graph *graph, tt_tensor *const *inputs, tt_tensor **outputs) {
    tu_graph_run now;
    bool recording = tt_grad_mode(false);
    tutti_status status = tu_graph_run_begin(&now, graph, inputs);
    for (const tu_vertex *vertex = graph->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next)
        status = run_call(&now, NULL, NULL, vertex);
    if (status == TUTTI_OK)
        status = tu_graph_run_finish(&now, outputs);
    tu_graph_run_end(&now);
    tt_grad_mode(recording);
    return status;
}

static bool is_optimizer_step(const tu_step_of_program *step) {
    return step->nest == NULL &&
           (step->vertex->entry == &tu_operator_adamw_step || step->vertex->entry == &tu_operator_sgd_step);
}

/* Steps of an optimizer that stand together are one batch, as tt_optimizer_step makes them: what they work on is let go
 * when it has run. *next is behind them. */
static tutti_status run_batch(tu_graph_run *now, const tu_program *program, int *next) {
    tu_step_batch batch = { .count = 0 };
    int first = *next;
    tutti_status status = TUTTI_OK;
    tu_step_batch_open(&batch);
    for (; *next < program->step_count && is_optimizer_step(&program->steps[*next]) && status == TUTTI_OK; ++*next) {
        tt_scope scope = tt_scope_open();
        status = tu_graph_run_vertex(now, program->steps[*next].vertex);
        tu_scope_leave(&scope);
    }
    tutti_status ran = tu_step_batch_close(&batch, status == TUTTI_OK);
    tu_step_batch_free(&batch);
    for (int i = first; i < *next; i++)
        tu_graph_run_let_go(now, program->steps[i].vertex);
    return status == TUTTI_OK ? ran : status;
}

/* While somebody looks at every operator, each of them runs. */
static bool is_watched(void) {
    return tu_self()->recorder != NULL || tu_self()->anomaly;
}

/* The arena of the run before, or a new one where another thread has that now. */
static tutti_status take_arena(tu_program *program, tu_arena **arena) {
    if (program->plan.bytes == 0 || tu_noting_here() != NULL) /* what is noted keeps its tensors */
        return TUTTI_OK;
    *arena = atomic_exchange_explicit(&program->spare, NULL, memory_order_acquire);
    if (*arena == NULL)
        *arena = tu_arena_new(program->plan.bytes);
    return *arena != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

/* One is kept, unless somebody still has a tensor in it. */
static void put_arena(tu_program *program, tu_arena *arena) {
    tu_arena *none = NULL;
    if (arena == NULL)
        return;
    if (!tu_arena_is_free(arena) || !atomic_compare_exchange_strong_explicit(
                                        &program->spare, &none, arena, memory_order_release, memory_order_relaxed))
        tu_arena_drop(arena);
}

tutti_status tu_program_run(tu_program *program, tt_tensor *const *inputs, tt_tensor **outputs) {
    if (program->interpreted || is_watched())
        return tu_noting_here() != NULL ? note_calls(program->graph, inputs, outputs)
                                        : tu_graph_interpret(program->graph, inputs, outputs);
    tu_graph_run now;
    tu_arena *arena = NULL;
    tutti_status status = take_arena(program, &arena);
    if (status != TUTTI_OK)
        return status;
    bool recording = tt_grad_mode(false);
    status = tu_graph_run_begin(&now, program->graph, inputs);
    for (int i = 0; i < program->step_count && status == TUTTI_OK;)
        status = is_optimizer_step(&program->steps[i]) ? run_batch(&now, program, &i)
                                                       : run_step(&now, &program->plan, arena, &program->steps[i++]);
    if (status == TUTTI_OK)
        status = tu_graph_run_finish(&now, outputs);
    tu_graph_run_end(&now);
    put_arena(program, arena);
    tt_grad_mode(recording);
    return status;
}
