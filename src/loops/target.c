/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of targets.
 */
#include "loops/target.h"

int tu_target_number(tutti_device device) {
    return device == TUTTI_CPU ? TU_TARGET_C : -1;
}

const tu_target *tu_target_at(int number) {
    static const tu_target *const targets[TU_TARGETS] = { [TU_TARGET_C] = &tu_target_c };
    return targets[number];
}
