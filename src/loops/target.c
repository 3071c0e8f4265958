/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of targets.
 */
#include "loops/target.h"

int tu_target_number(tutti_device device) {
    return device == TUTTI_CPU ? TU_TARGET_C : tutti_device_kind(device) == TUTTI_CUDA ? TU_TARGET_CUDA : -1;
}

const tu_target *tu_target_at(int number) {
    static const tu_target *const targets[TU_TARGETS] = {
        [TU_TARGET_C] = &tu_target_c, [TU_TARGET_CUDA] = &tu_target_cuda
    };
    return targets[number];
}
