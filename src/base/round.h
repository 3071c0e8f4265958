/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes and places rounded up.
 */
#ifndef TU_BASE_ROUND_H
#define TU_BASE_ROUND_H

#include <stddef.h>

/* The smallest multiple of `unit` that is not below `bytes`. */
static inline size_t tu_round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

#endif
