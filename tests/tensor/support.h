/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of tensors share: a scope around the body, and what is expected of tensors and errors.
 */
#ifndef TESTS_TENSOR_SUPPORT_H
#define TESTS_TENSOR_SUPPORT_H

#include <tutti/autograd.h>
#include <tutti/functional.h>
#include <tutti/ops.h>

#define TEST_ON_DEVICE
#include "device.h"

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

/* Whether the pending error has this status, and this in its message; it is cleared. */
static inline bool fails(tutti_status status, const char *part) {
    bool right = tt_error_show() == status && strstr(tutti_error_message(), part) != NULL;
    if (!right)
        fprintf(stderr, "the error is %s: %s\n", tutti_status_name(tt_error_show()), tutti_error_message());
    tt_error_clear();
    return right;
}

static inline void expect_error(tutti_status status, const char *part) {
    CHECK(fails(status, part));
}

/* Other threads of the process have tensors too: what is alive is not this thread's alone. */
static _Thread_local bool has_company;

/* Closes the scope; nothing is alive after that. */
static inline void done(tt_scope *scope) {
    CHECK_OK(tt_scope_close(scope));
    if (has_company)
        return;
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK(counts.tensors == 0 && counts.storages == 0 && counts.nodes == 0 && counts.scopes == 0);
}

#endif
