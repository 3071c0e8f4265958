/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of programs: places are used again, results over inputs that die, and what a program returns is its
 * caller's.
 */
#include <pthread.h>

#include "loops/plan.h"
#include "programs.h"

#define LAYERS 10

static int layers(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    for (int i = 0; i < LAYERS; i++)
        x = tt_add(tt_tanh(tt_mul_scalar(tt_matmul(x, inputs.at[1]), 0.5)), tt_sigmoid(tt_matmul(x, inputs.at[2])));
    outputs[0] = tt_mul_scalar(x, 2);
    return 1;
}

static tt_tensor *values(int64_t rows, int64_t columns) {
    return tt_mul_scalar(tt_randn(tt_shape(rows, columns), TUTTI_F32, NULL), 0.3);
}

/* The plan as text, which ends with free. */
static char *plan_of(const tt_graph *graph, tu_plan *plan) {
    tu_step_of_program *steps;
    int step_count;
    char *text = NULL;
    size_t bytes = 0;
    CHECK_OK(tu_steps_make(graph, true, &steps, &step_count));
    for (int i = 0; i < step_count; i++)
        if (steps[i].nest != NULL)
            CHECK_OK(tu_nest_schedule(steps[i].nest));
    CHECK_OK(tu_plan_make(graph, steps, step_count, plan));
    FILE *to = open_memstream(&text, &bytes);
    tu_plan_print(to, plan);
    CHECK_EQ(fclose(to), 0);
    tu_steps_free(steps, step_count);
    return text;
}

TEST(memory_is_used_again_and_results_lie_over_inputs_that_die) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values(16, 32), *first = values(32, 32), *second = values(32, 32);
    tt_graph *graph;
    tu_plan plan;
    CHECK(tt_capture(layers, NULL, tt_tensors(x, first, second), &graph));
    char *text = plan_of(graph, &plan);
    size_t one = 16 * 32 * sizeof(float);
    CHECK_EQ(plan.total, one * (3 * LAYERS - 1)); /* two products and what is made of them, but for what is returned */
    CHECK(plan.bytes <= 3 * one && plan.live <= 4 * one);
    if (strstr(text, " over matmul") == NULL)
        FAIL("nothing is written over: %s", text);
    for (int i = 0; i < plan.storage_count; i++) /* those that are alive together are apart */
        for (int k = 0; k < i; k++) {
            const tu_planned *left = &plan.storages[i], *right = &plan.storages[k];
            if (left->here && right->here && left->first <= right->last && right->first <= left->last &&
                left->over != k && right->over != i)
                CHECK(left->at + left->bytes <= right->at || right->at + right->bytes <= left->at);
        }
    free(text);
    tu_plan_free(&plan);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

typedef struct job {
    tu_program *program;
    bool compiled;
    const tt_graph *graph;
    tt_tensor *x, *first, *second;
} job;

static void *run_often(void *argument) {
    const job *own = argument;
    for (int i = 0; i < (test_sanitized() ? 20 : 200); i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *results[1], *expected[1], *x = tt_mul_scalar(own->x, 1 + i % 3);
        layers(tt_tensors(x, own->first, own->second), expected, NULL);
        run_program(own->program, own->graph, tt_tensors(x, own->first, own->second), results);
        CHECK(same_bits(results[0], expected[0]));
        CHECK_OK(tt_scope_close(&scope));
    }
    return NULL;
}

TEST(several_threads_run_one_program_at_once) {
    tt_scope scope = tt_scope_open();
    job own = { .x = values(16, 32), .first = values(32, 32), .second = values(32, 32) };
    tt_graph *graph;
    CHECK(tt_capture(layers, NULL, tt_tensors(own.x, own.first, own.second), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .no_compiler = true }, &own.program));
    own.graph = graph;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, run_often, &own), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    tu_program_release(own.program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* A view of what is made inside goes out, and with it the memory under it. */
static int returns_a_view(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *made = tt_tanh(tt_mul_scalar(inputs.at[0], 3));
    outputs[0] = tt_narrow(made, 0, 1, 2);
    outputs[1] = tt_sum_dims(tt_exp(tt_matmul(tt_sigmoid(made), inputs.at[0])), tt_shape(0, 1), false);
    return 2;
}

TEST(what_is_returned_outlives_the_next_run_and_the_program) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values(8, 8), *results[2], *later[2], *expected[2];
    tt_graph *graph;
    tu_program *program;
    CHECK(tt_capture(returns_a_view, NULL, tt_tensors(x), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .no_compiler = true }, &program));
    run_program(program, graph, tt_tensors(x), results);
    run_program(program, graph, tt_tensors(tt_neg(x)), later);
    tu_program_release(program);
    tt_graph_release(&graph);
    returns_a_view(tt_tensors(x), expected, NULL);
    CHECK(same_bits(results[0], expected[0]) && same_bits(results[1], expected[1]));
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- without memory ---- */

static tutti_status make_and_run(void *argument) {
    const job *own = argument;
    tt_scope scope = tt_scope_open();
    tt_tensor *inputs[] = { own->x, own->first, own->second }, *results[1] = { NULL };
    tu_program *program = NULL;
    tutti_status status = tu_program_make(own->graph, &(tu_program_options){ .no_compiler = !own->compiled }, &program);
    for (int i = 0; i < 2 && status == TUTTI_OK; i++) {
        status = tu_program_run(program, inputs, results);
        tu_tensor_drop(results[0]);
        results[0] = NULL;
    }
    tu_program_release(program);
    tutti_status closed = tt_scope_close(&scope);
    return status == TUTTI_OK ? closed : status;
}

TEST_LIMIT(any_allocation_may_fail, 300) {
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    job own = { .x = values(16, 32), .first = values(32, 32), .second = values(32, 32) };
    tt_graph *graph;
    CHECK(tt_capture(layers, NULL, tt_tensors(own.x, own.first, own.second), &graph));
    own.graph = graph;
    for (int i = 0; i < 2; i++) { /* then with a compiler, or what it left in the cache */
        own.compiled = i == 1;
        CHECK_OK(make_and_run(&own)); /* what threads and libraries keep is there */
        test_fail_each("malloc,calloc,realloc,aligned_alloc", make_and_run, &own);
    }
    remove_folder(folder);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int softmax_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_softmax(tt_mul_scalar(inputs.at[0], 0.25), 1);
    return 1;
}

/* The row stays in the cache: nothing between the input and the result has a place in memory. */
TEST(a_softmax_that_is_taken_apart_is_one_loop_without_memory_of_its_own) {
    tt_scope scope = tt_scope_open();
    tt_graph *graph;
    tu_plan plan;
    tu_program *program;
    CHECK(tt_capture(softmax_of, NULL, tt_tensors(values(8, 100)), &graph) && tt_graph_pass(graph, "decompose"));
    free(plan_of(graph, &plan));
    CHECK_EQ(plan.total, 0);
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .no_compiler = true }, &program));
    tu_program_counts counts = tu_program_count(program);
    CHECK(counts.loops == 1 && counts.calls == 0);
    tu_program_release(program);
    tu_plan_free(&plan);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}
