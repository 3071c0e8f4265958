/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of passes.
 */
#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "graph/passes.h"

/* In the order in which a compiler runs them. */
const tu_pass tu_passes[] = {
    { "dead", "leaves out what nobody uses; collectives and their waits stay", tu_pass_dead, 0, false },
    { "unshard", "uses what was gathered in the place of a parameter that is filled from it and freed again",
      tu_pass_unshard, 0, false },
    { "functional", "makes new values of what is written in place; inputs are written once, at the end",
      tu_pass_functional, 0, true },
    { "decompose", "takes softmax and norms apart, so that loops can take them in; last bits may change",
      tu_pass_decompose, 0, true },
    { "fold", "computes now what depends on no input", tu_pass_fold, 1 << 20, false },
    { "common", "computes once what is computed twice", tu_pass_common, 0, false },
    { "copies", "takes the original in the place of a copy where nobody can tell", tu_pass_copies, 0, false },
    { "parts", "writes parts into one tensor in the place of adding tensors that are 0 elsewhere", tu_pass_parts, 0,
      false },
    { "hide", "finds collectives that products beside them hide, which the next two leave alone", tu_pass_hide, 0,
      true },
    { "gather_matmul", "fuses an all-gather with the matrix products of what it gathers", tu_pass_gather_matmul, 0,
      true },
    { "matmul_scatter", "fuses a matrix product with the reduce-scatter of it", tu_pass_matmul_scatter, 0, true },
    { "one_shot", "lets small all-reduces read all ranks' symmetric buffers, which the graph keeps", tu_pass_one_shot,
      128 << 10, true },
    { "low_contention", "lets large gathers and scatters beside computation touch one peer after the other",
      tu_pass_low_contention, 1 << 20, true },
    { "bucket", "makes one operation of neighbouring collectives of one kind", tu_pass_bucket, 25 << 20, false },
    { "in_place", "lets a collective write its input where nobody looks at that again", tu_pass_in_place, 0, false },
    { "raise", "puts starts of collectives as early as their inputs allow, in their order", tu_pass_raise, 256 << 20,
      false },
    { "sink", "puts waits as late as their results allow", tu_pass_sink, 0, false },
    { "late", "behind the last start, puts what waits behind what does not, in the order of the starts", tu_pass_late,
      0, false },
};

int tu_pass_count(void) {
    return sizeof tu_passes / sizeof *tu_passes;
}

static const tu_pass *find(const char *text, size_t length) {
    for (int i = 0; i < tu_pass_count(); i++)
        if (strncmp(tu_passes[i].name, text, length) == 0 && tu_passes[i].name[length] == 0)
            return &tu_passes[i];
    return NULL;
}

tutti_status tu_pass_find(const char *who, const char *text, const tu_pass **found, size_t *bytes) {
    size_t length = text != NULL ? strcspn(text, "=") : 0;
    const tu_pass *pass = text != NULL ? find(text, length) : NULL;
    if (pass == NULL)
        return tu_error(TUTTI_ERROR_NOT_FOUND, "%s: there is no pass \"%.*s\"; tt_pass_name lists them", who,
                        (int)length, text != NULL ? text : "");
    *found = pass;
    *bytes = pass->bytes;
    if (text[length] == 0)
        return TUTTI_OK;
    if (pass->bytes == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: \"%s\" gives a limit to the pass %s, which has none", who, text,
                        pass->name);
    char *end;
    errno = 0;
    unsigned long long given = strtoull(text + length + 1, &end, 10);
    if (!isdigit((unsigned char)text[length + 1]) || *end != 0 || errno != 0 || given > SIZE_MAX)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: \"%s\" behind the pass %s is no number of bytes", who,
                        text + length + 1, pass->name);
    *bytes = (size_t)given;
    return TUTTI_OK;
}

const char *tt_pass_name(int index) {
    return index >= 0 && index < tu_pass_count() ? tu_passes[index].name : NULL;
}

const char *tt_pass_summary(const char *name) {
    const tu_pass *pass = name != NULL ? find(name, strcspn(name, "=")) : NULL;
    return pass != NULL ? pass->summary : NULL;
}

bool tt_graph_pass(tt_graph *graph, const char *name) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (graph == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "graph_pass: graph is NULL");
        return false;
    }
    const tu_pass *pass = NULL;
    size_t bytes;
    tutti_status status = tu_pass_find("graph_pass", name, &pass, &bytes);
    if (status == TUTTI_OK)
        status = pass->run(graph, bytes);
    if (status == TUTTI_OK)
        status = tu_graph_check(pass->name, graph);
    return tu_pending_take(status) == TUTTI_OK;
}
