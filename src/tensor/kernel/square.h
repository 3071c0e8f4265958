/* SPDX-License-Identifier: Apache-2.0
 *
 * Squares of numbers of 32 bits, turned: four by four, by two rounds of shuffles.
 */
#ifndef TU_TENSOR_KERNEL_SQUARE_H
#define TU_TENSOR_KERNEL_SQUARE_H

#include <stdint.h>
#include <string.h>

typedef int32_t tu_four __attribute__((vector_size(16)));

__attribute__((always_inline)) static inline void tu_turn_four(const void *from, int64_t line, tu_four *row) {
    tu_four half[4];
    for (int i = 0; i < 4; i++)
        memcpy(&row[i], (const int32_t *)from + i * line, sizeof row[i]);
    half[0] = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
    half[1] = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
    half[2] = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
    half[3] = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
    row[0] = __builtin_shufflevector(half[0], half[1], 0, 1, 4, 5);
    row[1] = __builtin_shufflevector(half[0], half[1], 2, 3, 6, 7);
    row[2] = __builtin_shufflevector(half[2], half[3], 0, 1, 4, 5);
    row[3] = __builtin_shufflevector(half[2], half[3], 2, 3, 6, 7);
}

/* Four numbers of each of four lines, `line` apart, become lines that are `apart`. */
__attribute__((always_inline)) static inline void tu_turn_square(const void *from, int64_t line, void *to,
                                                                 int64_t apart) {
    tu_four row[4];
    tu_turn_four(from, line, row);
    for (int i = 0; i < 4; i++)
        memcpy((int32_t *)to + i * apart, &row[i], sizeof row[i]);
}

#endif
