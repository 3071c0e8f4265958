/* SPDX-License-Identifier: Apache-2.0
 *
 * In place of the kernels' images of the CUDA plug-ins: the stand-in of the driver has its own. So their host sides are
 * built where nvcc is not, and under sanitizers.
 */
#include "tensors.h"

extern const unsigned char tu_cuda_image[64];
__attribute__((visibility("hidden"))) const unsigned char tu_cuda_image[64] = { 0 };

static const unsigned char nothing[64] = { 0 };
__attribute__((visibility("hidden")))
const unsigned char *const tu_gpu_images[TU_TENSOR_IMAGES] = { nothing, nothing, nothing, nothing, nothing, nothing,
                                                               nothing, nothing, nothing, nothing, nothing };
__attribute__((visibility("hidden"))) const unsigned char *const tu_gpu_together_image = nothing;
__attribute__((visibility("hidden"))) const unsigned char *const tu_gpu_together_plain_image = nothing;
