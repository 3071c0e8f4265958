/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types and reductions.
 *
 * THE ARITHMETIC
 *
 * A reduction over ranks adds in rank order, 0 to n-1, and equals a serial loop bit for bit, whatever algorithm ran.
 *
 * - 16-bit and 8-bit floats accumulate in f32 and round once at the end, to nearest even; denormals are kept.
 * - avg divides the sum by n in the accumulator, before rounding. Integer avg truncates toward zero.
 * - Integers wrap. The sum of bools is their "or"; their product is their "and".
 * - min and max pass a NaN on from any rank and order -0 below +0.
 * - A NaN result is a NaN everywhere; its sign and payload are not promised.
 * - Conversions to f8 follow PyTorch 2.13: what is too large for e4m3fn becomes its largest number, 448 with the sign,
 *   and so does infinity, while a NaN stays one; what is too large for e5m2 becomes infinity.
 *
 * Which reductions each type has ("-" is TUTTI_ERROR_TYPE):
 *
 *                  sum  avg  product  min  max  band  bor  bxor  premul_sum
 *     floats        x    x      x      x    x     -    -     -        x
 *     integers      x    x      x      x    x     x    x     x        -
 *     bool          x    -      x      x    x     x    x     x        -
 *     complex       x    x      -      -    -     -    -     -        x      (summed by its real view; a real factor)
 */
#ifndef TUTTI_DTYPE_H
#define TUTTI_DTYPE_H

#include <stddef.h>

#include <tutti/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 0 is no dtype, and no dtype has the value of a reduction: swapped arguments are caught. */
typedef enum tutti_dtype {
    TUTTI_F64 = 1,
    TUTTI_F32 = 2,
    TUTTI_F16 = 3,
    TUTTI_BF16 = 4,
    TUTTI_F8_E4M3 = 5, /* e4m3fn: no infinities, one NaN pattern per sign */
    TUTTI_F8_E5M2 = 6,
    TUTTI_I8 = 7,
    TUTTI_I16 = 8,
    TUTTI_I32 = 9,
    TUTTI_I64 = 10,
    TUTTI_U8 = 11,
    TUTTI_U16 = 12,
    TUTTI_U32 = 13,
    TUTTI_U64 = 14,
    TUTTI_BOOL = 15, /* one byte; zero is false, anything else is read as true, results are 0 or 1 */
    TUTTI_C64 = 16,  /* two f32 */
    TUTTI_C128 = 17  /* two f64 */
} tutti_dtype;

typedef enum tutti_reduction {
    TUTTI_SUM = 65,
    TUTTI_AVG = 66,
    TUTTI_PRODUCT = 67,
    TUTTI_MIN = 68,
    TUTTI_MAX = 69,
    TUTTI_BAND = 70,
    TUTTI_BOR = 71,
    TUTTI_BXOR = 72,
    TUTTI_PREMUL_SUM = 73 /* each rank's input times its own tutti_call.factor, then the sum */
} tutti_reduction;

/* Bytes of one element; 0 for a value that is no dtype. */
TUTTI_API size_t tutti_dtype_size(tutti_dtype dtype);

/* "f32", "bf16", "f8_e4m3", …; "?" for a value that is no dtype. */
TUTTI_API const char *tutti_dtype_name(tutti_dtype dtype);

/* "sum", "avg", …; "?" for a value that is no reduction. */
TUTTI_API const char *tutti_reduction_name(tutti_reduction reduction);

/* From a name, case ignored. Understands Tutti's names, those of nccl-tests and C ("float", "double", "half",
 * "int32", …) and those of PyTorch ("float32", "bfloat16", "float8_e4m3fn", …; "prod" for product). */
TUTTI_API TUTTI_CHECKED tutti_status tutti_dtype_parse(const char *name, tutti_dtype *dtype);
/* From a name, case ignored: Tutti's own, and "prod" for product. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_reduction_parse(const char *name, tutti_reduction *reduction);

/* Whether `reduction` is defined for `dtype` (the table above): 1 or 0. */
TUTTI_API int tutti_reduction_applies(tutti_reduction reduction, tutti_dtype dtype);

/* Converts `count` elements. Real to complex sets the imaginary part to 0; complex to real keeps the real part.
 * Floats to integers truncate toward zero and saturate, NaN gives 0; integers to narrower integers wrap; anything to
 * bool is "not zero". `from` and `to` may be the same address when the element sizes are equal, else must not overlap.
 */
TUTTI_API TUTTI_CHECKED tutti_status tutti_convert(const void *from, tutti_dtype from_dtype, void *to,
                                                   tutti_dtype to_dtype, size_t count);

#ifdef __cplusplus
}
#endif
#endif
