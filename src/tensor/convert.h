/* SPDX-License-Identifier: Apache-2.0
 *
 * Moving elements between layouts and types.
 */
#ifndef TU_TENSOR_CONVERT_H
#define TU_TENSOR_CONVERT_H

#include "tensor/tensor.h"

/* `count` elements of `size` bytes, `stride` elements apart, into a dense row; and back. */
void tu_pack(void *to, const void *from, int64_t stride, size_t size, int64_t count);
void tu_unpack(void *to, int64_t stride, const void *from, size_t size, int64_t count);

/* tutti_convert, in vector code between f32 and the 16-bit floats. */
tutti_status tu_convert(const void *from, tutti_dtype from_dtype, void *to, tutti_dtype to_dtype, size_t count);

/* All elements of a tensor that is ready, row-major and converted, into memory of the host. */
tutti_status tu_copy_out(const tt_tensor *x, void *out, tutti_dtype dtype);

/* Types that kernels compute in: f64, f32 (also for 16 and 8 bits), i64 (also for bool), u64, c128. */
tutti_dtype tu_compute_dtype(tutti_dtype dtype);

#endif
