/* SPDX-License-Identifier: Apache-2.0
 *
 * Checking the arguments of a call.
 */
#ifndef TU_COLLECTIVE_CHECK_H
#define TU_COLLECTIVE_CHECK_H

#include "collective/collective.h"

/* Completes the task (element, detail, factor, forced algorithm) and checks everything that this rank can know. */
tutti_status tu_check_task(tu_task *task, const tutti_call *call);

/* The members must share this host; else an error that names ranks and hosts. */
tutti_status tu_check_local(const tutti_group *group, const tu_task *task, bool device);

/* Whether the arguments of an all-reduce are right and it is one of the usual kind; if so, *element is set. False says
 * nothing: tu_check_task does. */
static inline bool tu_is_plain_all_reduce(const void *in, const void *out, size_t count, tutti_dtype dtype,
                                          tutti_reduction reduction, size_t *element) {
    if (reduction == TUTTI_PREMUL_SUM || count == 0 || count > (SIZE_MAX >> 8) ||
        !tutti_reduction_applies(reduction, dtype))
        return false;
    *element = tutti_dtype_size(dtype);
    const unsigned char *from = in, *to = out;
    size_t bytes = count * *element;
    return from != NULL && to != NULL && (from == to || from >= to + bytes || to >= from + bytes);
}

#endif
