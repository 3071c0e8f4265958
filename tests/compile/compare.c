/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparing what is compiled with eager code: a difference is found, and told by the vertex in which it begins; on the
 * device that TEST_DEVICE names, where it names one.
 */
#include <tutti/tensors.h>

#include "../harness.h"
#include "../loops/programs.h"
#include "compile/compare.h"
#include "quick.h"
#include "tensor/operators.h"

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_mul_scalar(inputs.at[0], 2);
    outputs[0] = tt_sum(tt_relu(tt_add_scalar(x, 1)));
    tt_mul_(inputs.at[1], tt_number(3));
    return 1;
}

/* The second graph adds another number than the first. */
static void compare(double difference, bool strict, tutti_status expected, const char *words) {
    (void)use_device();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_arange(0, 6, 1, TUTTI_F32, NULL), *y = tt_arange(0, 6, 1, TUTTI_F32, NULL);
    tt_graph *before, *after;
    tu_comparison *comparison = NULL;
    CHECK(tt_capture(chain, NULL, tt_tensors(x, y), &before));
    CHECK_OK(tu_graph_clone(before, &after));
    for (tu_vertex *vertex = after->first; vertex != NULL; vertex = vertex->next)
        if (vertex->entry == &tu_operator_add_scalar)
            ((tu_add_scalar_attributes *)vertex->attributes)->number += difference;
    CHECK_OK(tu_comparison_make(before, after, &(tu_program_options){ .strict = strict }, &comparison));
    tt_tensor *outputs[1] = { NULL };
    tutti_status status = tu_comparison_run("chain", comparison, tt_tensors(x, y).at, outputs);
    CHECK_EQ(status, expected);
    if (status == TUTTI_OK) {
        CHECK(tt_item(outputs[0]) != 0 && tt_at(y, tt_shape(2)) == 6);
        tu_tensor_drop(outputs[0]);
    } else {
        CHECK_MESSAGE(words);
    }
    tu_comparison_end(comparison);
    tt_graph_release(&after);
    tt_graph_release(&before);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(graphs_that_compute_the_same_pass) {
    compare(0, true, TUTTI_OK, "");
    compare(0, false, TUTTI_OK, "");
}

TEST(the_first_vertex_that_differs_is_named) {
    compare(0.5, true, TUTTI_ERROR_STATE, "first in add_scalar: f32 [6]");
    compare(0.5, true, TUTTI_ERROR_STATE, " = add_scalar(mul_scalar, number=1.5): element 0");
    compare(0.5, false, TUTTI_ERROR_STATE, "is 1.5, and eager code has 1");
}

TEST(a_difference_of_rounding_is_one_where_bits_count) {
    compare(1.0 / (1 << 20), false, TUTTI_OK, "");
    compare(1.0 / (1 << 20), true, TUTTI_ERROR_STATE, "first in add_scalar");
}
