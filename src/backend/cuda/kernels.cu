/* SPDX-License-Identifier: Apache-2.0
 *
 * All kernels in one module, so that one image holds them.
 */
#include "message.cu"
#include "move.cu"
#include "reduce.cu"
/* after what it reduces with */
#include "multimem.cu"
#include "signal.cu"
#include "vdev.cu"
