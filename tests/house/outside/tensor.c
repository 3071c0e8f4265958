/* SPDX-License-Identifier: Apache-2.0
 *
 * libtutti-tensor from outside: the sum of six ones.
 */
#include <stdio.h>

#include <tutti/ops.h>
#include <tutti/tensor.h>

int main(void) {
    tt_scope scope = tt_scope_open();
    double sum = tt_item(tt_sum(tt_ones(tt_shape(2, 3), TUTTI_F32, NULL)));
    if (tt_scope_close(&scope) != TUTTI_OK) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 1;
    }
    printf("sum %g\n", sum);
    return 0;
}
