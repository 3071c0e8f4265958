/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of passes.
 */
#include <string.h>

#include "graph/passes.h"

const tu_pass tu_passes[] = {
    { "dead", "leaves out what nobody uses; collectives and their waits stay", tu_pass_dead },
    { "common", "computes once what is computed twice", tu_pass_common },
    { "copies", "takes the original in the place of a copy where nobody can tell", tu_pass_copies },
    { "functional", "makes new values of what is written in place; inputs are written once, at the end",
      tu_pass_functional },
    { "unshard", "uses what was gathered in the place of a parameter that is filled from it and freed again",
      tu_pass_unshard },
    { "in_place", "lets a collective write its input where nobody looks at that again", tu_pass_in_place },
    { "sink", "puts waits as late as their results allow", tu_pass_sink },
    { "raise", "puts starts of collectives as early as their inputs allow, in their order", tu_pass_raise },
    { "gather_matmul", "fuses an all-gather with the matrix products of what it gathers", tu_pass_gather_matmul },
    { "matmul_scatter", "fuses a matrix product with the reduce-scatter of it", tu_pass_matmul_scatter },
    { "bucket", "makes one operation of neighbouring collectives of one kind", tu_pass_bucket },
};

int tu_pass_count(void) {
    return sizeof tu_passes / sizeof *tu_passes;
}

static const tu_pass *find(const char *name) {
    for (int i = 0; name != NULL && i < tu_pass_count(); i++)
        if (strcmp(tu_passes[i].name, name) == 0)
            return &tu_passes[i];
    return NULL;
}

const char *tt_pass_name(int index) {
    return index >= 0 && index < tu_pass_count() ? tu_passes[index].name : NULL;
}

const char *tt_pass_summary(const char *name) {
    const tu_pass *pass = find(name);
    return pass != NULL ? pass->summary : NULL;
}

bool tt_graph_pass(tt_graph *graph, const char *name) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    const tu_pass *pass = find(name);
    if (graph == NULL || pass == NULL) {
        if (graph == NULL)
            tu_fail(TUTTI_ERROR_ARGUMENT, "graph_pass: graph is NULL");
        else
            tu_fail(TUTTI_ERROR_NOT_FOUND, "graph_pass: there is no pass \"%s\"; tt_pass_name lists them",
                    name != NULL ? name : "(NULL)");
        return false;
    }
    tutti_status status = pass->run(graph);
    if (status == TUTTI_OK)
        status = tu_graph_check(pass->name, graph);
    return tu_pending_take(status) == TUTTI_OK;
}
