/* SPDX-License-Identifier: Apache-2.0
 *
 * What the backward pass of fused products consists of, counted as its operators run.
 */
#ifndef TESTS_FUSED_COUNTED_H
#define TESTS_FUSED_COUNTED_H

#include <string.h>

#include "support.h"
#include "tensor/operator.h"

typedef struct counts {
    tu_call_recorder recorder;
    int gathers, scatters, plain; /* fused ones of both kinds; collectives and gathers that are not fused */
} counts;

static inline tutti_status count_call(tu_call_recorder *recorder, tu_call *call) {
    counts *of = (counts *)recorder;
    const char *name = call->entry->name;
    of->gathers += strncmp(name, "fused_all_gather", 16) == 0;
    of->scatters += strncmp(name, "fused_matmul_reduce_scatter", 27) == 0;
    of->plain += strncmp(name, "all_gather", 10) == 0 || strncmp(name, "reduce_scatter", 14) == 0 ||
                 strncmp(name, "all_reduce", 10) == 0;
    return TUTTI_OK;
}

static inline void counted_backward(counts *found, tt_tensor *loss) {
    *found = (counts){ .recorder = { .record = count_call } };
    tu_call_recorder_set(&found->recorder);
    tt_backward(loss, NULL);
    tu_call_recorder_set(NULL);
}

#endif
