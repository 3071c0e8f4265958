/* SPDX-License-Identifier: Apache-2.0
 *
 * All kernels in one module, so that one image holds them.
 */
#include "message.cu"
#include "move.cu"
#include "reduce.cu"
/* after what they reduce with */
#include "multimem.cu"
#include "packets.cu"
#include "signal.cu"
#include "vdev.cu"
