/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients of gradients for operators whose backward is one kernel: where the backward is itself recorded, the forward
 * is written once more with operators that can be differentiated any number of times, and the gradient is taken through
 * those.
 */
#include "autograd/node.h"

tt_tensor *tu_node_input(tu_gradient *gradient, int input) {
    tt_tensor *saved = tu_saved(gradient, TU_INPUT(input));
    return saved != NULL ? tt_alias(saved) : NULL;
}

void tu_node_through(tu_gradient *gradient, tt_tensor *output, int count, tt_tensor *const *inputs) {
    tt_tensor *wanted[TU_INPUTS];
    int places[TU_INPUTS], wanted_count = 0;
    for (int i = 0; i < count; i++)
        if (inputs[i] != NULL && gradient->needs[i]) {
            wanted[wanted_count] = inputs[i];
            places[wanted_count++] = i;
        }
    if (tu_self()->pending != TUTTI_OK || wanted_count == 0)
        return;
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    options.create_graph = true;
    tt_tensor_list found = tt_gradients(tt_tensors_of(1, &output), tt_tensors_of((size_t)wanted_count, wanted),
                                        tt_tensors_of(1, gradient->grads), &options);
    for (size_t i = 0; i < found.count; i++)
        gradient->results[places[i]] = found.at[i];
}
