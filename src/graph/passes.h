/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes: small functions that rewrite a graph, each a row of one table in passes.c.
 */
#ifndef TU_GRAPH_PASSES_H
#define TU_GRAPH_PASSES_H

#include "graph/graph.h"

typedef tutti_status tu_pass_run(tt_graph *graph);
typedef struct tu_pass {
    const char *name, *summary;
    tu_pass_run *run;
} tu_pass;
extern const tu_pass tu_passes[];
int tu_pass_count(void);

/* simple.c */
tu_pass_run tu_pass_dead, tu_pass_common, tu_pass_copies, tu_pass_in_place;
/* functional.c */
tu_pass_run tu_pass_functional;
/* unshard.c */
tu_pass_run tu_pass_unshard;
/* schedule.c */
tu_pass_run tu_pass_sink, tu_pass_raise, tu_pass_bucket;
/* matmul.c */
tu_pass_run tu_pass_gather_matmul, tu_pass_matmul_scatter;

#endif
