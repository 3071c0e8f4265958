/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallelism: a hidden layer cut in two. Each rank has half of its rows and columns, and the two together
 * compute what one alone would, forward and backward.
 *
 *     $ tensor_parallel            (two ranks as threads)
 *     $ tutti run -n 2 ./tensor_parallel
 */
#include <stdio.h>

#include <tutti/autograd.h>
#include <tutti/functional.h>
#include <tutti/ops.h>
#include <tutti/world.h>

enum {
    TOKENS = 5,
    WIDTH = 8,
    HIDDEN = 32
};

static bool equals_the_whole(tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    int64_t share = HIDDEN / ranks;
    tt_seed(1, 0); /* the same numbers on every rank */
    tt_tensor *x = tt_require_grad(tt_randn(tt_shape(TOKENS, WIDTH), TUTTI_F32, NULL), true);
    tt_tensor *up = tt_randn(tt_shape(HIDDEN, WIDTH), TUTTI_F32, NULL),
              *down = tt_randn(tt_shape(WIDTH, HIDDEN), TUTTI_F32, NULL);

    /* This rank's rows of one matrix and columns of the other. */
    tt_tensor *rows = tt_parameter(tt_contiguous(tt_narrow(up, 0, rank * share, share)), true);
    tt_tensor *columns = tt_parameter(tt_contiguous(tt_narrow(down, 1, rank * share, share)), true);
    tt_tensor *hidden = tt_gelu(tt_linear(tt_copy_to_group(x, group), rows, NULL)); /* backward: all-reduce */
    tt_tensor *y = tt_reduce_from_group(tt_linear(hidden, columns, NULL), group);   /* forward: all-reduce */
    tt_backward(tt_mean(tt_square(y)), NULL);

    tt_tensor *alone = tt_require_grad(tt_detach(x), true);
    tt_tensor *whole = tt_linear(tt_gelu(tt_linear(alone, up, NULL)), down, NULL);
    tt_backward(tt_mean(tt_square(whole)), NULL);
    return tt_allclose(y, whole, 1e-5, 1e-5) && tt_allclose(tt_grad(x), tt_grad(alone), 1e-4, 1e-5);
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    (void)argument;
    tt_scope scope = tt_scope_open();
    bool equal = equals_the_whole(tutti_world_group(world));
    tutti_status status = tt_scope_close(&scope);
    if (status == TUTTI_OK)
        printf("rank %d: result and gradient %s\n", tutti_world_rank(world),
               equal ? "equal the whole layer's" : "DIFFER");
    if (status == TUTTI_OK)
        status = tutti_barrier(tutti_world_group(world), NULL);
    return status == TUTTI_OK && !equal ? TUTTI_ERROR_STATE : status;
}

int main(void) {
    return tutti_main(2, rank_main, NULL);
}
