/* SPDX-License-Identifier: Apache-2.0
 *
 * Which vertices become one loop.
 */
#ifndef TU_LOOPS_GROUP_H
#define TU_LOOPS_GROUP_H

#include "loops/nest.h"

/* A step of a program: a vertex that is called as the operator that it is, or a nest, or both: a product of matrices
 * and the nest that works on its result while that is made. */
typedef struct tu_step_of_program {
    const tu_vertex *vertex;
    tu_nest *nest;
} tu_step_of_program;

/* The steps of a graph, in an order that does what the graph does. Where `fuse` is not set each nest is one vertex. */
tutti_status tu_steps_make(const tt_graph *graph, bool fuse, tu_step_of_program **steps, int *step_count);
/* Whether the vertex could be a nest of its own, of one expression. */
bool tu_is_pointwise_step(const tu_vertex *vertex);
/* Makes one step of a product and the loop, or the single operator, behind it that walks its result. */
tutti_status tu_steps_join_products(const int *uses, tu_step_of_program *steps, int *step_count);
/* Nests that got no code and cannot run without become calls of their members. */
tutti_status tu_steps_call_members(tu_step_of_program **steps, int *step_count);
void tu_steps_free(tu_step_of_program *steps, int step_count);

/* How often each value is used, by number: operands, outputs, effects. The caller frees it; NULL with the error. */
int *tu_uses_of(const tt_graph *graph);

#endif
