/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients in a page: fits a line to points by gradient descent, with a hook that watches the gradient on its way.
 *
 *     $ tensor_autograd
 *     step   0: loss 19.0000, slope 1.00, offset -0.40
 *     …
 *     step 200: loss 0.0000, slope 3.00, offset -2.00
 */
#include <stdio.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

static tt_tensor *watch(const tt_hook_context *context, tt_tensor *gradient) {
    double *largest = context->user, norm = tt_item(tt_norm(gradient));
    if (norm > *largest)
        *largest = norm;
    return NULL; /* unchanged */
}

static void step(tt_tensor *x, tt_tensor *y, tt_tensor *slope, tt_tensor *offset, int number) {
    tt_tensor *loss = tt_mse_loss(tt_add(tt_mul(x, slope), offset), y);
    tt_backward(loss, NULL);
    tt_sgd_step(slope, tt_grad(slope), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1));
    tt_sgd_step(offset, tt_grad(offset), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1));
    tt_set_grad(slope, NULL);
    tt_set_grad(offset, NULL);
    if (number % 50 == 0)
        printf("step %3d: loss %.4f, slope %.2f, offset %.2f\n", number, tt_item(loss), tt_item(slope),
               tt_item(offset));
}

int main(void) {
    double largest = 0;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_arange(-2, 2.5, 0.5, TUTTI_F32, NULL);
    tt_tensor *y = tt_add_scalar(tt_mul_scalar(x, 3), -2);
    tt_tensor *slope =
        tt_zeros(tt_shape(), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true, .name = "slope"));
    tt_tensor *offset =
        tt_zeros(tt_shape(), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true, .name = "offset"));
    tt_hook_tensor(slope, watch, &largest, NULL, NULL);
    for (int i = 0; i <= 200 && tt_error_pending() == TUTTI_OK; i++) {
        tt_scope inner = tt_scope_open(); /* what a step makes goes with it */
        step(x, y, slope, offset, i);
        if (tt_scope_close(&inner) != TUTTI_OK) {
            fprintf(stderr, "%s\n", tutti_error_message());
            break;
        }
    }
    printf("the largest gradient of the slope was %.2f\n", largest);
    bool learned = tt_item(slope) > 2.99 && tt_item(slope) < 3.01;
    if (tt_scope_close(&scope) != TUTTI_OK) {
        fprintf(stderr, "%s\n", tutti_error_message());
        return 1;
    }
    return learned ? 0 : 1;
}
