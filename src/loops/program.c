/* SPDX-License-Identifier: Apache-2.0
 *
 * Making, running and ending programs.
 */
#include "loops/program.h"

#include <stdlib.h>

struct tu_program {
    tt_graph *graph; /* held */
};

tutti_status tu_program_make(const tt_graph *graph, const tu_program_options *options, tu_program **program) {
    (void)options;
    tu_program *made = calloc(1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a program", sizeof *made);
    made->graph = (tt_graph *)graph; /* only its count changes */
    atomic_fetch_add_explicit(&made->graph->references, 1, memory_order_relaxed);
    *program = made;
    return TUTTI_OK;
}

tutti_status tu_program_run(tu_program *program, tt_tensor *const *inputs, tt_tensor **outputs) {
    return tu_graph_interpret(program->graph, inputs, outputs);
}

void tu_program_release(tu_program *program) {
    if (program == NULL)
        return;
    tt_graph_release(&program->graph);
    free(program);
}
