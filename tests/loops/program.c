/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs: that they compute what their graphs say, bit for bit, in every mode.
 */
#include "programs.h"

static tt_tensor *ramp(tt_dims shape, double step) {
    int64_t count = 1;
    for (int i = 0; i < shape.count; i++)
        count *= shape.at[i];
    return tt_view(tt_mul_scalar(tt_add_scalar(tt_arange(0, (double)count, 1, TUTTI_F32, NULL), -3), step), shape);
}

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *up = tt_add_scalar(tt_mul_scalar(x, 2), 1);
    outputs[0] = tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(up), x)), tt_sigmoid(x)), 0.5);
    return 1;
}

TEST(a_program_outlives_the_callers_hold_on_its_graph_and_runs_many_times) {
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = ramp(tt_shape(5, 7), 0.125), *expected, *results[1];
    for (int mode = TU_PROGRAM_FUSED; mode <= TU_PROGRAM_INTERPRET; mode++) {
        tt_graph *graph, *held;
        tu_program *program;
        CHECK(tt_capture(chain, NULL, tt_tensors(x), &graph));
        CHECK_OK(tu_program_make(graph, &(tu_program_options){ .mode = (tu_program_mode)mode }, &program));
        held = graph;
        tt_graph_release(&graph);
        for (int i = 0; i < 3; i++) {
            tt_tensor *y = tt_mul_scalar(x, i - 1.0);
            chain(tt_tensors(y), &expected, NULL);
            run_program(program, held, tt_tensors(y), results);
            CHECK(tt_equal(results[0], expected));
        }
        tu_program_release(program);
    }
    CHECK_OK(tt_scope_close(&scope));
    remove_folder(folder);
}
