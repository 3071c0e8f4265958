/* SPDX-License-Identifier: Apache-2.0
 *
 * What the stand-in driver writes into a descriptor of a matrix, and its kernels read.
 */
#ifndef TUTTI_TESTS_CUDA_TENSOR_MAP_HPP
#define TUTTI_TESTS_CUDA_TENSOR_MAP_HPP

#include <cstdint>

namespace standin {

struct tensor_map {
    uint8_t *data;
    int64_t columns, rows, step; /* elements, rows, bytes from row to row */
    uint32_t element, box_rows;  /* bytes; rows of a box, each of 128 bytes */
};
static_assert(sizeof(tensor_map) <= 128, "a descriptor has 128 bytes");

static inline const tensor_map &tensor_map_of(const void *map) {
    return *(const tensor_map *)map;
}

} // namespace standin

#endif
