/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparing each run of an entry with eager code.
 */
#ifndef TU_COMPILE_COMPARE_H
#define TU_COMPILE_COMPARE_H

#include "compile/entry.h"

/* What an entry needs to compare one of its graphs. */
typedef struct tu_comparison {
    tt_graph *eager;   /* as it was captured, with every value as an output, and no effects */
    tt_graph *exposed; /* as it is run, with every value as one more output */
    tu_program *program;
    int known; /* outputs of the graph itself */
    bool strict;
} tu_comparison;

/* From the graph before its passes, and after them; options are those of its program. */
tutti_status tu_comparison_make(const tt_graph *before, const tt_graph *after, const tu_program_options *options,
                                tu_comparison **made);
void tu_comparison_end(tu_comparison *comparison);

/* Runs the program, and the captured graph on copies of the inputs. An error that names the first vertex whose result
 * differs: in a bit when it is strict, else by more than rounding. */
tutti_status tu_comparison_run(const char *name, tu_comparison *comparison, tt_tensor *const *inputs,
                               tt_tensor **outputs);

#endif
