/* SPDX-License-Identifier: Apache-2.0
 *
 * libtutti-tensor from outside, valid as C and as C++11: the sum of six ones, and its gradient.
 */
#include <stdio.h>

#include <tutti/tensors.h>

int main(void) {
    tt_scope scope = tt_scope_open();
    tt_options options = TT_OPTIONS_INIT;
    options.requires_grad = true;
    tt_tensor *ones = tt_ones(tt_shape(2, 3), TUTTI_F32, &options), *total = tt_sum(ones);
    tt_tensor_list gradients = tt_gradients(tt_tensors(total), tt_tensors(ones), tt_tensors_of(0, NULL), NULL);
    double sum = tt_item(total);
    if (gradients.count == 1 && tt_item(tt_sum(gradients.at[0])) != sum)
        return 1;
    if (tt_scope_close(&scope) != TUTTI_OK) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 1;
    }
    printf("sum %g\n", sum);
    return 0;
}
