/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of a program that compute on the host, while the rest of it is noted as a graph of a device: what they did is
 * an act of the noted step (tensor/noting.h), and done again before each run of the graph.
 */
#ifndef TU_LOOPS_AGAIN_H
#define TU_LOOPS_AGAIN_H

#include "loops/nest.h"
#include "tensor/noting.h"

/* Whether a vertex computes on the host alone, and does not see to itself when a step is noted. */
bool tu_vertex_is_of_host(const tu_vertex *vertex);

/* Before they run: what they write that was there before is kept, and put back when the step is noted. */
tutti_status tu_again_guard_vertex(const tu_graph_run *now, const tu_vertex *vertex);
tutti_status tu_again_guard_nest(const tu_nest *nest, tt_tensor *const *tensors);
/* After they ran: `now` has operands and results of the vertex, `tensors` those of the nest. */
tutti_status tu_again_vertex(const tu_graph_run *now, const tu_vertex *vertex);
tutti_status tu_again_nest(const tu_nest *nest, tt_tensor *const *tensors);

#endif
