/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of parallel training share: batches, and what one rank alone would compute.
 */
#ifndef TESTS_PARALLEL_SUPPORT_H
#define TESTS_PARALLEL_SUPPORT_H

#include <tutti/optimizer.h>
#include <tutti/parallel.h>

#include "../tensor/support.h"

/* A batch of its own for every rank and step. */
static inline tt_tensor *batch_of(int rank, int step) {
    tt_seed((uint64_t)(1000 + step), (uint32_t)rank);
    return tt_randn(tt_shape(4, 5), TUTTI_F32, NULL);
}

/* Of modules that make ten numbers of such a batch. */
static inline tt_tensor *weighted_loss(tt_module *root, int rank, int step) {
    tt_tensor *weights = tt_arange(0, 10, 1, TUTTI_F32, NULL);
    return tt_mean(tt_mul(tt_square(tt_module_call(root, batch_of(rank, step))), weights));
}

/* What one rank would compute that adds the gradients of all, in order, and divides. */
typedef tt_tensor *loss_function(tt_module *root, int rank, int step);
static inline void average_alone(tt_module *root, loss_function *loss_of, int ranks, int step) {
    tt_named_list parameters = tt_module_parameters(root);
    tt_tensor *sums[32] = { NULL };
    for (int rank = 0; rank < ranks; rank++) {
        tt_module_zero_grad(root);
        CHECK(tt_backward(loss_of(root, rank, step), NULL));
        for (size_t i = 0; i < parameters.count; i++) {
            tt_tensor *grad = tt_clone(tt_grad(parameters.at[i]));
            sums[i] = rank == 0 ? grad : tt_add(sums[i], grad);
        }
    }
    for (size_t i = 0; i < parameters.count; i++)
        tt_set_grad(parameters.at[i], tt_div_scalar(sums[i], ranks));
}

/* What is put together of all ranks' shards is what one rank has; with a tolerance of 0, bit for bit. */
static inline void check_whole(tt_fully_sharded *sharded, tt_module *alone, double tolerance) {
    tt_named_list whole = tt_fully_sharded_parameters(sharded), expected = tt_module_parameters(alone);
    CHECK_EQ(whole.count, expected.count);
    for (size_t i = 0; i < whole.count; i++) {
        CHECK_TEXT(whole.names[i], expected.names[i]);
        CHECK(tolerance == 0 ? tt_equal(whole.at[i], expected.at[i])
                             : tt_allclose(whole.at[i], expected.at[i], tolerance, tolerance));
    }
}

#endif
