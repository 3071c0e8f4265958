/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench`: what the buffers hold, and whether the results are right.
 *
 * Every element is a function of rank and index, so that each rank can work out alone what it must have received. A
 * reduction is compared with a serial loop over the ranks in plain C, written from tutti/dtype.h: it shares no code
 * with the library's kernels.
 */
#include <math.h>
#include <string.h>

#include "bench.h"

#define BLOCK 1024

static uint32_t scramble(uint32_t index, uint32_t rank, uint32_t salt) {
    uint32_t x = index * 0x9e3779b1u + rank * 0x85ebca6bu + salt * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    return x * 0x297a2d39u;
}

static tutti_dtype real_view(tutti_dtype dtype, size_t *first, size_t *count) {
    if (dtype != TUTTI_C64 && dtype != TUTTI_C128)
        return dtype;
    *first *= 2;
    *count *= 2;
    return dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
}

static bool is_float(tutti_dtype dtype) {
    return dtype >= TUTTI_F64 && dtype <= TUTTI_F8_E5M2;
}

/* Conversions between checked types of separate buffers: they cannot fail. */
static void convert(const void *from, tutti_dtype from_dtype, void *to, tutti_dtype to_dtype, size_t count) {
    if (tutti_convert(from, from_dtype, to, to_dtype, count) != TUTTI_OK)
        fprintf(stderr, "tutti bench: %s\n", tutti_error_message());
}

/* Elements [first, first + count) of a real type, count at most BLOCK. */
static void fill_block(void *to, size_t first, size_t count, tutti_dtype dtype, int rank, unsigned salt) {
    float reals[BLOCK];
    uint64_t bits[BLOCK];
    if (is_float(dtype)) {
        float *direct = dtype == TUTTI_F32 ? to : reals;
        for (size_t i = 0; i < count; i++)
            direct[i] = (float)(int32_t)scramble((uint32_t)(first + i), (uint32_t)rank, salt) * 0x1p-31f;
        if (dtype != TUTTI_F32)
            convert(reals, TUTTI_F32, to, dtype, count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t low = scramble((uint32_t)(first + i), (uint32_t)rank, salt);
        bits[i] = dtype == TUTTI_BOOL ? low & 1 : (uint64_t)low * 0x9e3779b97f4a7c15u;
    }
    convert(bits, TUTTI_U64, to, dtype, count);
}

static void fill_from(void *to, size_t first, size_t count, tutti_dtype dtype, int rank, unsigned salt) {
    dtype = real_view(dtype, &first, &count);
    size_t size = tutti_dtype_size(dtype);
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t part = count - at < BLOCK ? count - at : BLOCK;
        fill_block((char *)to + at * size, first + at, part, dtype, rank, salt);
    }
}

void bench_fill(void *to, size_t count, tutti_dtype dtype, int rank, unsigned salt) {
    fill_from(to, 0, count, dtype, rank, salt);
}

/* ---- the serial loop ---- */

#define DEFINE_STEP(type)                                                \
    static type step_##type(type a, type b, tutti_reduction reduction) { \
        switch (reduction) {                                             \
        case TUTTI_PRODUCT:                                              \
            return a * b;                                                \
        case TUTTI_MIN:                                                  \
            return b < a || (a == b && signbit(b)) ? b : a;              \
        case TUTTI_MAX:                                                  \
            return b > a || (a == b && signbit(a)) ? b : a;              \
        default:                                                         \
            return a + b;                                                \
        }                                                                \
    }
DEFINE_STEP(float)
DEFINE_STEP(double)

static uint64_t step_integer(uint64_t a, uint64_t b, tutti_reduction reduction, bool is_signed) {
    bool less = is_signed ? (int64_t)a < (int64_t)b : a < b;
    switch (reduction) {
    case TUTTI_PRODUCT:
        return a * b;
    case TUTTI_MIN:
        return less ? a : b;
    case TUTTI_MAX:
        return less ? b : a;
    case TUTTI_BAND:
        return a & b;
    case TUTTI_BOR:
        return a | b;
    case TUTTI_BXOR:
        return a ^ b;
    default:
        return a + b;
    }
}

static tutti_reduction op_of_bool(tutti_reduction reduction) {
    bool all = reduction == TUTTI_PRODUCT || reduction == TUTTI_MIN || reduction == TUTTI_BAND;
    return all ? TUTTI_BAND : reduction == TUTTI_BXOR ? TUTTI_BXOR : TUTTI_BOR;
}

typedef union accumulator {
    float single[BLOCK];
    double wide[BLOCK];
    uint64_t integer[BLOCK];
} accumulator;

/* premul_sum: every rank's factor is a half, which changes no bits but the exponent's. */
static void take_in(accumulator *sum, const void *elements, size_t count, tutti_dtype dtype, tutti_reduction reduction,
                    bool first) {
    accumulator next;
    bool is_signed = dtype >= TUTTI_I8 && dtype <= TUTTI_I64;
    if (dtype == TUTTI_F64) {
        convert(elements, dtype, next.wide, TUTTI_F64, count);
        for (size_t i = 0; i < count; i++) {
            double x = reduction == TUTTI_PREMUL_SUM ? next.wide[i] * 0.5 : next.wide[i];
            sum->wide[i] = first ? x : step_double(sum->wide[i], x, reduction);
        }
    } else if (is_float(dtype)) {
        convert(elements, dtype, next.single, TUTTI_F32, count);
        for (size_t i = 0; i < count; i++) {
            float x = reduction == TUTTI_PREMUL_SUM ? next.single[i] * 0.5f : next.single[i];
            sum->single[i] = first ? x : step_float(sum->single[i], x, reduction);
        }
    } else {
        convert(elements, dtype, next.integer, is_signed ? TUTTI_I64 : TUTTI_U64, count);
        for (size_t i = 0; i < count; i++)
            sum->integer[i] =
                first ? next.integer[i] : step_integer(sum->integer[i], next.integer[i], reduction, is_signed);
    }
}

static void finish(accumulator *sum, void *to, size_t count, tutti_dtype dtype, tutti_reduction reduction, int size) {
    if (is_float(dtype)) {
        tutti_dtype wide = dtype == TUTTI_F64 ? TUTTI_F64 : TUTTI_F32;
        for (size_t i = 0; i < count && reduction == TUTTI_AVG; i++) {
            if (wide == TUTTI_F64)
                sum->wide[i] /= size;
            else
                sum->single[i] /= (float)size;
        }
        convert(sum, wide, to, dtype, count);
        return;
    }
    bool is_signed = dtype >= TUTTI_I8 && dtype <= TUTTI_I64;
    tutti_dtype wide = is_signed ? TUTTI_I64 : TUTTI_U64;
    convert(sum, wide, to, dtype, count);
    if (reduction != TUTTI_AVG)
        return;
    convert(to, dtype, sum, wide, count); /* wrapped to its width */
    for (size_t i = 0; i < count; i++)
        sum->integer[i] = is_signed ? (uint64_t)((int64_t)sum->integer[i] / size) : sum->integer[i] / (uint64_t)size;
    convert(sum, wide, to, dtype, count);
}

static void reduce_block(void *to, size_t first, size_t count, tutti_dtype dtype, tutti_reduction reduction, int size,
                         unsigned salt) {
    accumulator sum;
    uint64_t elements[BLOCK];
    if (dtype == TUTTI_BOOL)
        reduction = op_of_bool(reduction);
    for (int rank = 0; rank < size; rank++) {
        fill_block(elements, first, count, dtype, rank, salt);
        take_in(&sum, elements, count, dtype, reduction, rank == 0);
    }
    finish(&sum, to, count, dtype, reduction, size);
}

/* ---- comparing ---- */

static uint64_t wrong_in_part(const char *found, const bench_source *source, const bench_call *call, unsigned salt) {
    size_t first = (size_t)source->part * call->count, count = call->count;
    tutti_dtype dtype = real_view(call->dtype, &first, &count);
    size_t size = tutti_dtype_size(dtype);
    uint64_t expected[BLOCK], wrong = 0;
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t part = count - at < BLOCK ? count - at : BLOCK;
        if (source->rank < 0)
            reduce_block(expected, first + at, part, dtype, call->reduction, call->size, salt);
        else
            fill_block(expected, first + at, part, dtype, source->rank, salt);
        const char *one = found + at * size, *other = (const char *)expected;
        if (memcmp(one, other, part * size) == 0)
            continue;
        for (size_t i = 0; i < part; i++)
            wrong += memcmp(one + i * size, other + i * size, size) != 0;
    }
    return wrong;
}

uint64_t bench_wrong(const bench_operation *operation, const bench_call *call, unsigned salt) {
    size_t parts = call->count > 0 ? bench_out_elements(operation, call->count, call->size) / call->count : 0;
    size_t bytes = call->count * tutti_dtype_size(call->dtype);
    uint64_t wrong = 0;
    for (size_t part = 0; part < parts; part++) {
        bench_source source;
        if (operation->expect(call->rank, call->size, call->root, (int)part, &source))
            wrong += wrong_in_part((const char *)call->out + part * bytes, &source, call, salt);
    }
    return wrong;
}
