/* SPDX-License-Identifier: Apache-2.0
 *
 * What converting one element between types means: how floats become integers, integers floats, and one element of any
 * type another. tutti_convert works in blocks with the same functions; the kernels of tensors on GPUs use them element
 * by element, and so give the same bits.
 */
#ifndef TU_BASE_ELEMENT_H
#define TU_BASE_ELEMENT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <tutti/dtype.h>

#include "base/float16.h"

/* Floats to integers: toward zero, saturating, NaN to 0. The bounds are powers of two and so exact as doubles. */
TU_PORTABLE int64_t tu_saturate_signed(double x, int bits) {
    double bound = (double)(UINT64_C(1) << (bits - 1));
    if (x != x)
        return 0;
    if (x >= bound)
        return (int64_t)((UINT64_C(1) << (bits - 1)) - 1);
    if (x <= -bound)
        return -(int64_t)((UINT64_C(1) << (bits - 1)) - 1) - 1;
    return (int64_t)x;
}

TU_PORTABLE uint64_t tu_saturate_unsigned(double x, int bits) {
    if (!(x > 0))
        return 0;
    if (x >= 2 * (double)(UINT64_C(1) << (bits - 1)))
        return bits == 64 ? UINT64_MAX : (UINT64_C(1) << bits) - 1;
    return (uint64_t)x;
}

/* An integer as a double that rounds to every float of at most 24 bits as the integer itself would: what a double
 * cannot hold becomes one sticky bit. */
TU_PORTABLE double tu_sticky(int64_t value, bool is_unsigned) {
    bool negative = !is_unsigned && value < 0;
    uint64_t magnitude = negative ? 0 - (uint64_t)value : (uint64_t)value;
    if (magnitude >= UINT64_C(1) << 53 && (magnitude & 0x7ff) != 0)
        magnitude = (magnitude & ~UINT64_C(0x7ff)) | 0x800;
    return negative ? -(double)magnitude : (double)magnitude;
}

/* An element, widened without loss: a double, its imaginary part where it has one, or an integer. */
typedef struct tu_element {
    double real, imaginary;
    int64_t integer; /* u64 as its bits */
    bool whole, is_unsigned;
} tu_element;

#define TU_ELEMENT_READ(type)   \
    type x;                     \
    memcpy(&x, from, sizeof x); \
    (void)0
#define TU_ELEMENT_REAL(type, value)    \
    {                                   \
        TU_ELEMENT_READ(type);          \
        element.real = (double)(value); \
        break;                          \
    }
#define TU_ELEMENT_WHOLE(type, value)       \
    {                                       \
        TU_ELEMENT_READ(type);              \
        element.integer = (int64_t)(value); \
        element.whole = true;               \
        break;                              \
    }

TU_PORTABLE tu_element tu_element_load(const void *from, int dtype) {
    tu_element element = { 0, 0, 0, false, dtype == TUTTI_U64 };
    switch (dtype) {
    case TUTTI_F64:
        TU_ELEMENT_REAL(double, x)
    case TUTTI_F32:
        TU_ELEMENT_REAL(float, x)
    case TUTTI_F16:
        TU_ELEMENT_REAL(uint16_t, tu_f16_to_f32(x))
    case TUTTI_BF16:
        TU_ELEMENT_REAL(uint16_t, tu_bf16_to_f32(x))
    case TUTTI_F8_E4M3:
        TU_ELEMENT_REAL(uint8_t, tu_e4m3_to_f32(x))
    case TUTTI_F8_E5M2:
        TU_ELEMENT_REAL(uint8_t, tu_e5m2_to_f32(x))
    case TUTTI_I8:
        TU_ELEMENT_WHOLE(int8_t, x)
    case TUTTI_I16:
        TU_ELEMENT_WHOLE(int16_t, x)
    case TUTTI_I32:
        TU_ELEMENT_WHOLE(int32_t, x)
    case TUTTI_I64:
    case TUTTI_U64:
        TU_ELEMENT_WHOLE(int64_t, x)
    case TUTTI_U8:
        TU_ELEMENT_WHOLE(uint8_t, x)
    case TUTTI_U16:
        TU_ELEMENT_WHOLE(uint16_t, x)
    case TUTTI_U32:
        TU_ELEMENT_WHOLE(uint32_t, x)
    case TUTTI_BOOL:
        TU_ELEMENT_WHOLE(uint8_t, x != 0)
    case TUTTI_C64: {
        float parts[2];
        memcpy(parts, from, sizeof parts);
        element.real = (double)parts[0];
        element.imaginary = (double)parts[1];
        break;
    }
    case TUTTI_C128: {
        double parts[2];
        memcpy(parts, from, sizeof parts);
        element.real = parts[0];
        element.imaginary = parts[1];
        break;
    }
    }
    return element;
}
#undef TU_ELEMENT_READ
#undef TU_ELEMENT_REAL
#undef TU_ELEMENT_WHOLE

#define TU_ELEMENT_STORE(type, value) \
    {                                 \
        type x = (type)(value);       \
        memcpy(to, &x, sizeof x);     \
        break;                        \
    }

/* The double that stands for the element in a float of that type. */
TU_PORTABLE double tu_element_real(const tu_element *element, int dtype) {
    if (!element->whole)
        return element->real;
    if (dtype != TUTTI_F64 && dtype != TUTTI_C128)
        return tu_sticky(element->integer, element->is_unsigned);
    return element->is_unsigned ? (double)(uint64_t)element->integer : (double)element->integer;
}

TU_PORTABLE void tu_element_store(tu_element element, void *to, int dtype) {
    double real = tu_element_real(&element, dtype);
    bool whole = element.whole;
    int64_t integer = element.integer;
    switch (dtype) {
    case TUTTI_F64:
        TU_ELEMENT_STORE(double, real)
    case TUTTI_F32:
        TU_ELEMENT_STORE(float, real)
    case TUTTI_F16:
        TU_ELEMENT_STORE(uint16_t, tu_f32_to_f16(tu_f64_to_f32_odd(real)))
    case TUTTI_BF16:
        TU_ELEMENT_STORE(uint16_t, tu_f32_to_bf16(tu_f64_to_f32_odd(real)))
    case TUTTI_F8_E4M3:
        TU_ELEMENT_STORE(uint8_t, tu_f32_to_e4m3(tu_f64_to_f32_odd(real)))
    case TUTTI_F8_E5M2:
        TU_ELEMENT_STORE(uint8_t, tu_f32_to_e5m2(tu_f64_to_f32_odd(real)))
    case TUTTI_I8:
        TU_ELEMENT_STORE(int8_t, whole ? integer : tu_saturate_signed(real, 8))
    case TUTTI_I16:
        TU_ELEMENT_STORE(int16_t, whole ? integer : tu_saturate_signed(real, 16))
    case TUTTI_I32:
        TU_ELEMENT_STORE(int32_t, whole ? integer : tu_saturate_signed(real, 32))
    case TUTTI_I64:
        TU_ELEMENT_STORE(int64_t, whole ? integer : tu_saturate_signed(real, 64))
    case TUTTI_U8:
        TU_ELEMENT_STORE(uint8_t, whole ? (uint64_t)integer : tu_saturate_unsigned(real, 8))
    case TUTTI_U16:
        TU_ELEMENT_STORE(uint16_t, whole ? (uint64_t)integer : tu_saturate_unsigned(real, 16))
    case TUTTI_U32:
        TU_ELEMENT_STORE(uint32_t, whole ? (uint64_t)integer : tu_saturate_unsigned(real, 32))
    case TUTTI_U64:
        TU_ELEMENT_STORE(uint64_t, whole ? (uint64_t)integer : tu_saturate_unsigned(real, 64))
    case TUTTI_BOOL:
        TU_ELEMENT_STORE(uint8_t, whole ? integer != 0 : real != 0 || element.imaginary != 0)
    case TUTTI_C64: {
        float parts[2] = { (float)real, (float)element.imaginary };
        memcpy(to, parts, sizeof parts);
        break;
    }
    case TUTTI_C128: {
        double parts[2] = { real, element.imaginary };
        memcpy(to, parts, sizeof parts);
        break;
    }
    }
}
#undef TU_ELEMENT_STORE

#endif
