/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes: small functions that rewrite a graph, each a row of one table in passes.c.
 */
#ifndef TU_GRAPH_PASSES_H
#define TU_GRAPH_PASSES_H

#include "graph/graph.h"

/* `bytes` is the limit that the pass keeps, where it has one. */
typedef tutti_status tu_pass_run(tt_graph *graph, size_t bytes);
typedef struct tu_pass {
    const char *name, *summary;
    tu_pass_run *run;
    size_t bytes; /* its limit where the caller gives none; 0: it has none */
    bool asked;   /* runs only where somebody asks for it by name */
} tu_pass;
extern const tu_pass tu_passes[];
int tu_pass_count(void);
/* "bucket", or "bucket=1048576": the pass, and the limit to run it with. An error says what is wrong with the text. */
tutti_status tu_pass_find(const char *who, const char *text, const tu_pass **found, size_t *bytes);

/* simple.c */
tu_pass_run tu_pass_dead, tu_pass_common, tu_pass_copies, tu_pass_in_place;
/* functional.c */
tu_pass_run tu_pass_functional;
/* unshard.c */
tu_pass_run tu_pass_unshard;
/* decompose.c */
tu_pass_run tu_pass_decompose;
/* fold.c */
tu_pass_run tu_pass_fold;
/* one_shot.c */
tu_pass_run tu_pass_one_shot, tu_pass_low_contention;
/* schedule.c */
tu_pass_run tu_pass_sink, tu_pass_late, tu_pass_raise, tu_pass_bucket;
/* parts.c */
tu_pass_run tu_pass_parts;
/* hide.c */
tu_pass_run tu_pass_hide;
/* matmul.c */
tu_pass_run tu_pass_gather_matmul, tu_pass_matmul_scatter;

#endif
