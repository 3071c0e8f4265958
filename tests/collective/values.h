/* SPDX-License-Identifier: Apache-2.0
 *
 * Values for tests of collectives: every rank can compute every rank's input, and the serial loop over them.
 */
#ifndef TUTTI_TESTS_COLLECTIVE_VALUES_H
#define TUTTI_TESTS_COLLECTIVE_VALUES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/collective.h>

#include "../harness.h"

#define GUARD 64 /* bytes before and after a buffer that nobody may touch */

typedef struct values_element {
    unsigned char bytes[16];
} values_element;

static inline unsigned char *values_room(size_t bytes, size_t shift) {
    unsigned char *room = malloc(bytes + shift + 2 * GUARD);
    CHECK(room != NULL);
    memset(room, 0xa5, bytes + shift + 2 * GUARD);
    return room + GUARD + shift;
}

static inline void values_free(unsigned char *values, size_t shift) {
    for (size_t i = 1; i <= GUARD; i++)
        CHECK(values[-(ptrdiff_t)i] == 0xa5);
    free(values - GUARD - shift);
}

static inline uint64_t values_random(uint64_t *state) {
    uint64_t value = *state += UINT64_C(0x9e3779b97f4a7c15);
    value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
    return value ^ value >> 31;
}

/* Numbers of both signs and several magnitudes, now and then an infinity, a zero or a denormal. */
static inline double values_number(uint64_t random) {
    switch (random & 63) {
    case 0:
        return INFINITY;
    case 1:
        return -0.0;
    case 2:
        return 1e-40;
    default:
        return ((double)(int32_t)(random >> 32)) / (double)(1u << (16 + (random >> 6 & 15)));
    }
}

static inline void values_fill(void *to, size_t count, tutti_dtype dtype, uint64_t seed, int rank) {
    uint64_t state = seed * 1000003 + (uint64_t)rank * 7919;
    size_t element = tutti_dtype_size(dtype);
    bool complex = dtype == TUTTI_C64 || dtype == TUTTI_C128;
    bool floats = dtype <= TUTTI_F8_E5M2 || complex;
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    size_t parts = complex ? 2 * count : count, part = complex ? element / 2 : element;
    for (size_t i = 0; i < parts; i++) {
        uint64_t random = values_random(&state);
        double number = values_number(random);
        if (dtype == TUTTI_F8_E4M3 || dtype == TUTTI_F8_E5M2)
            number = fabs(number) > 100 ? 3.0 : number;
        if (floats)
            CHECK_OK(tutti_convert(&number, TUTTI_F64, (unsigned char *)to + i * part, real, 1));
        else
            memcpy((unsigned char *)to + i * part, &random, part);
    }
}

static inline values_element values_factor(tutti_dtype dtype, double value) {
    values_element element = { { 0 } };
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    CHECK_OK(tutti_convert(&value, TUTTI_F64, &element, real, 1));
    return element;
}

/* ---- the serial loop ---- */

static inline double values_order(double left, double right, bool maximum) {
    if (isnan(left) || isnan(right))
        return NAN;
    if (left == right)
        return (signbit(left) != 0) == maximum ? right : left;
    return (left < right) == maximum ? right : left;
}

/* One element in f64 (floats of 64 bits) or f32 (all others). */
static inline double values_step64(double total, double value, tutti_reduction reduction) {
    switch (reduction) {
    case TUTTI_PRODUCT:
        return total * value;
    case TUTTI_MIN:
        return values_order(total, value, false);
    case TUTTI_MAX:
        return values_order(total, value, true);
    default:
        return total + value;
    }
}

static inline float values_step32(float total, float value, tutti_reduction reduction) {
    switch (reduction) {
    case TUTTI_PRODUCT:
        return total * value;
    case TUTTI_MIN:
        return (float)values_order(total, value, false);
    case TUTTI_MAX:
        return (float)values_order(total, value, true);
    default:
        return total + value;
    }
}

static inline void values_reduce_float(void *to, void **in, size_t i, tutti_dtype dtype, tutti_reduction reduction,
                                       int size) {
    size_t element = tutti_dtype_size(dtype);
    if (dtype == TUTTI_F64) {
        double total = 0;
        for (int r = 0; r < size; r++) {
            double value;
            memcpy(&value, (unsigned char *)in[r] + i * 8, 8);
            if (reduction == TUTTI_PREMUL_SUM)
                value = (0.5 + r) * value;
            total = r == 0 ? value : values_step64(total, value, reduction);
        }
        if (reduction == TUTTI_AVG)
            total /= size;
        memcpy((unsigned char *)to + i * 8, &total, 8);
        return;
    }
    float total = 0;
    for (int r = 0; r < size; r++) {
        float value;
        CHECK_OK(tutti_convert((unsigned char *)in[r] + i * element, dtype, &value, TUTTI_F32, 1));
        if (reduction == TUTTI_PREMUL_SUM) {
            float factor;
            values_element encoded = values_factor(dtype, 0.5 + r);
            CHECK_OK(tutti_convert(&encoded, dtype, &factor, TUTTI_F32, 1));
            value = factor * value;
        }
        total = r == 0 ? value : values_step32(total, value, reduction);
    }
    if (reduction == TUTTI_AVG)
        total /= (float)size;
    CHECK_OK(tutti_convert(&total, TUTTI_F32, (unsigned char *)to + i * element, dtype, 1));
}

#define VALUES_INTEGER(type, unsigned_type)                                                     \
    do {                                                                                        \
        type total = 0;                                                                         \
        for (int r = 0; r < size; r++) {                                                        \
            type value;                                                                         \
            memcpy(&value, (unsigned char *)in[r] + i * sizeof value, sizeof value);            \
            if (dtype == TUTTI_BOOL)                                                            \
                value = value != 0;                                                             \
            if (r == 0)                                                                         \
                total = value;                                                                  \
            else if (reduction == TUTTI_PRODUCT)                                                \
                total = (type)((uint64_t)total * (uint64_t)value);                              \
            else if (reduction == TUTTI_MIN)                                                    \
                total = value < total ? value : total;                                          \
            else if (reduction == TUTTI_MAX)                                                    \
                total = value > total ? value : total;                                          \
            else if (reduction == TUTTI_BAND)                                                   \
                total = (type)(total & value);                                                  \
            else if (reduction == TUTTI_BOR || (reduction == TUTTI_SUM && dtype == TUTTI_BOOL)) \
                total = (type)(total | value);                                                  \
            else if (reduction == TUTTI_BXOR)                                                   \
                total = (type)(total ^ value);                                                  \
            else                                                                                \
                total = (type)((unsigned_type)total + (unsigned_type)value);                    \
        }                                                                                       \
        if (reduction == TUTTI_AVG)                                                             \
            total = (type)(total / (type)size);                                                 \
        memcpy((unsigned char *)to + i * sizeof total, &total, sizeof total);                   \
    } while (0)

static inline void values_reduce_integer(void *to, void **in, size_t i, tutti_dtype dtype, tutti_reduction reduction,
                                         int size) {
    switch (dtype) {
    case TUTTI_I8:
        VALUES_INTEGER(int8_t, uint8_t);
        break;
    case TUTTI_I16:
        VALUES_INTEGER(int16_t, uint16_t);
        break;
    case TUTTI_I32:
        VALUES_INTEGER(int32_t, uint32_t);
        break;
    case TUTTI_I64:
        VALUES_INTEGER(int64_t, uint64_t);
        break;
    case TUTTI_U16:
        VALUES_INTEGER(uint16_t, uint16_t);
        break;
    case TUTTI_U32:
        VALUES_INTEGER(uint32_t, uint32_t);
        break;
    case TUTTI_U64:
        VALUES_INTEGER(uint64_t, uint64_t);
        break;
    default:
        VALUES_INTEGER(uint8_t, uint8_t);
        break;
    }
}

/* What `size` ranks that called values_fill with this seed get; rank r's factor is 0.5 + r. */
static inline void values_reduce(void *to, size_t count, tutti_dtype dtype, tutti_reduction reduction, uint64_t seed,
                                 int size) {
    size_t bytes = count * tutti_dtype_size(dtype);
    void **in = calloc((size_t)size, sizeof *in);
    for (int r = 0; r < size; r++) {
        in[r] = malloc(bytes == 0 ? 1 : bytes);
        values_fill(in[r], count, dtype, seed, r);
    }
    bool complex = dtype == TUTTI_C64 || dtype == TUTTI_C128;
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    for (size_t i = 0; i < (complex ? 2 * count : count); i++) {
        if (dtype <= TUTTI_F8_E5M2 || complex)
            values_reduce_float(to, in, i, real, reduction, size);
        else
            values_reduce_integer(to, in, i, dtype, reduction, size);
    }
    for (int r = 0; r < size; r++)
        free(in[r]);
    free(in);
}

static inline bool values_are_nan(const unsigned char *value, tutti_dtype real) {
    double number;
    CHECK_OK(tutti_convert(value, real, &number, TUTTI_F64, 1));
    return isnan(number);
}

/* Bit for bit; a NaN is a NaN. */
static inline void values_compare(const unsigned char *got, const unsigned char *expected, size_t count,
                                  tutti_dtype dtype, const char *what, int reduction, int algorithm) {
    size_t element = tutti_dtype_size(dtype);
    if (count == 0 || memcmp(got, expected, count * element) == 0)
        return;
    bool complex = dtype == TUTTI_C64 || dtype == TUTTI_C128;
    bool floats = dtype <= TUTTI_F8_E5M2 || complex;
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    size_t part = complex ? element / 2 : element;
    for (size_t i = 0; i < count * element / part; i++) {
        const unsigned char *left = got + i * part, *right = expected + i * part;
        if (memcmp(left, right, part) == 0 || (floats && values_are_nan(left, real) && values_are_nan(right, real)))
            continue;
        uint64_t a = 0, b = 0;
        memcpy(&a, left, part);
        memcpy(&b, right, part);
        FAIL("%s of %zu %s (reduction %d, algorithm %d): element %zu is %llx, not %llx", what, count,
             tutti_dtype_name(dtype), reduction, algorithm, i, (unsigned long long)a, (unsigned long long)b);
    }
}

static inline void values_flush_to_zero(bool on) {
#if defined(__x86_64__)
    unsigned word = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? word | 0x8040 : word & ~0x8040u);
#elif defined(__aarch64__)
    uint64_t word;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(word));
    word = on ? word | UINT64_C(1) << 24 : word & ~(UINT64_C(1) << 24);
    __asm__ __volatile__("msr fpcr, %0" ::"r"(word));
#endif
}

#endif
