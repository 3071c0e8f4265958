/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of tensors in worlds share: a scope around the body, and what is expected of tensors and errors.
 */
#ifndef TESTS_TENSOR_SUPPORT_H
#define TESTS_TENSOR_SUPPORT_H

#include <tutti/autograd.h>
#include <tutti/functional.h>
#include <tutti/ops.h>

#include "../harness.h"

#define BEGIN                                                            \
    tutti_group *group = tutti_world_group(world);                       \
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group); \
    tt_scope scope = tt_scope_open();                                    \
    (void)rank, (void)ranks
/* A rank that is done waits for the others: closing its world while they are in a call would be an error of theirs. */
#define END                               \
    CHECK_OK(tt_scope_close(&scope));     \
    CHECK_EQ(tt_pending_works(world), 0); \
    CHECK_OK(tutti_barrier(group, NULL))

static inline bool all_are(tt_tensor *x, double value) {
    return x != NULL && tt_equal(x, tt_full(tt_sizes(x), value, tt_dtype(x), NULL));
}

static inline tt_tensor *meta_like(tt_dims shape, tutti_dtype dtype) {
    return tt_empty(shape, dtype, TUTTI_OPTIONS(tt_options, .device = TUTTI_META));
}

/* The pending error has this status, and this in its message; it is cleared. */
static inline void expect_error(tutti_status status, const char *fragment) {
    CHECK_EQ(tt_error_show(), status);
    CHECK_MESSAGE(fragment);
    tt_error_clear();
}

#endif
