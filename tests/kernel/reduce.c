/* SPDX-License-Identifier: Apache-2.0
 *
 * Every set of kernels that this machine can run against a serial loop, bit for bit; NaN as a class.
 *
 * The loop here is written from the definition in tutti/dtype.h and shares no code with the kernels; elements are
 * converted by tutti_convert, which tests/base/dtype.c proves.
 */
#include "kernel/kernel.h"

#include <math.h>

#include "../harness.h"
#include "../instructions.h"
#include "base/float_control.h"

static const char *const sets[] = { "reference", "avx2", "avx512", "neon" };

#define FOR_EACH_SET(name)                                                            \
    for (size_t set_index = 0; set_index < sizeof sets / sizeof sets[0]; set_index++) \
        for (const char *name = test_instructions_named(sets[set_index]) ? sets[set_index] : NULL; name; name = NULL)

static uint64_t random_state = 0x9e3779b97f4a7c15;

static uint64_t random_bits(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * UINT64_C(0x2545f4914f6cdd1d);
}

static size_t random_below(size_t bound) {
    return (size_t)(random_bits() >> 32) % bound;
}

static bool is_float(tutti_dtype dtype) {
    return dtype >= TUTTI_F64 && dtype <= TUTTI_F8_E5M2;
}

static tutti_dtype real_view(tutti_dtype dtype) {
    return dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
}

/* ---- the serial loop ---- */

#define DEFINE_STEP(type)                                                \
    static type step_##type(type a, type b, tutti_reduction reduction) { \
        bool swap;                                                       \
        switch (reduction) {                                             \
        case TUTTI_PRODUCT:                                              \
            return a * b;                                                \
        case TUTTI_MIN:                                                  \
        case TUTTI_MAX:                                                  \
            if (isnan(a) || isnan(b))                                    \
                return NAN;                                              \
            swap = a > b || (a == b && !signbit(a) && signbit(b));       \
            return swap == (reduction == TUTTI_MIN) ? b : a;             \
        default:                                                         \
            return a + b;                                                \
        }                                                                \
    }
DEFINE_STEP(float)
DEFINE_STEP(double)

static void serial_f64(void *to, const void *const *from, int sources, size_t i, tutti_reduction reduction,
                       const double *factors) {
    double sum = 0;
    for (int s = 0; s < sources; s++) {
        double x;
        memcpy(&x, (const char *)from[s] + i * 8, 8);
        if (reduction == TUTTI_PREMUL_SUM)
            x *= factors[s];
        sum = s == 0 ? x : step_double(sum, x, reduction);
    }
    if (reduction == TUTTI_AVG)
        sum /= sources;
    memcpy((char *)to + i * 8, &sum, 8);
}

static void serial_small(void *to, const void *const *from, int sources, size_t i, tutti_dtype dtype,
                         tutti_reduction reduction, const double *factors) {
    size_t size = tutti_dtype_size(dtype);
    float sum = 0;
    for (int s = 0; s < sources; s++) {
        float x;
        CHECK_OK(tutti_convert((const char *)from[s] + i * size, dtype, &x, TUTTI_F32, 1));
        if (reduction == TUTTI_PREMUL_SUM)
            x *= (float)factors[s];
        sum = s == 0 ? x : step_float(sum, x, reduction);
    }
    if (reduction == TUTTI_AVG)
        sum /= (float)sources;
    CHECK_OK(tutti_convert(&sum, TUTTI_F32, (char *)to + i * size, dtype, 1));
}

/* In 128 bits nothing wraps before it is cut to the type's width, which is done after each step. */
static __int128 cut(__int128 value, tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_I8:
        return (int8_t)value;
    case TUTTI_I16:
        return (int16_t)value;
    case TUTTI_I32:
        return (int32_t)value;
    case TUTTI_I64:
        return (int64_t)value;
    case TUTTI_U8:
        return (uint8_t)value;
    case TUTTI_U16:
        return (uint16_t)value;
    case TUTTI_U32:
        return (uint32_t)value;
    default:
        return (uint64_t)value;
    }
}

static __int128 step_integer(__int128 a, __int128 b, tutti_reduction reduction) {
    switch (reduction) {
    case TUTTI_PRODUCT:
        return (__int128)((unsigned __int128)a * (unsigned __int128)b);
    case TUTTI_MIN:
        return a < b ? a : b;
    case TUTTI_MAX:
        return a > b ? a : b;
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

static void serial_integer(void *to, const void *const *from, int sources, size_t i, tutti_dtype dtype,
                           tutti_reduction reduction) {
    size_t size = tutti_dtype_size(dtype);
    __int128 sum = 0;
    for (int s = 0; s < sources; s++) {
        uint64_t bits = 0;
        memcpy(&bits, (const char *)from[s] + i * size, size);
        __int128 x = cut(bits, dtype);
        sum = s == 0 ? x : cut(step_integer(sum, x, reduction), dtype);
    }
    if (reduction == TUTTI_AVG)
        sum /= sources;
    uint64_t bits = (uint64_t)sum;
    memcpy((char *)to + i * size, &bits, size);
}

static void serial_bool(void *to, const void *const *from, int sources, size_t i, tutti_reduction reduction) {
    int set = 0;
    for (int s = 0; s < sources; s++)
        set += ((const unsigned char *)from[s])[i] != 0;
    bool all = reduction == TUTTI_PRODUCT || reduction == TUTTI_MIN || reduction == TUTTI_BAND;
    ((unsigned char *)to)[i] = reduction == TUTTI_BXOR ? set % 2 : all ? set == sources : set > 0;
}

static void serial(void *to, const void *const *from, int sources, size_t count, tutti_dtype dtype,
                   tutti_reduction reduction, const double *factors) {
    if (real_view(dtype) != dtype)
        count *= 2;
    dtype = real_view(dtype);
    for (size_t i = 0; i < count; i++) {
        if (dtype == TUTTI_F64)
            serial_f64(to, from, sources, i, reduction, factors);
        else if (is_float(dtype))
            serial_small(to, from, sources, i, dtype, reduction, factors);
        else if (dtype == TUTTI_BOOL)
            serial_bool(to, from, sources, i, reduction);
        else
            serial_integer(to, from, sources, i, dtype, reduction);
    }
}

static bool same(const void *a, const void *b, tutti_dtype dtype) {
    if (memcmp(a, b, tutti_dtype_size(dtype)) == 0)
        return true;
    if (!is_float(dtype))
        return false;
    double x, y;
    CHECK_OK(tutti_convert(a, dtype, &x, TUTTI_F64, 1));
    CHECK_OK(tutti_convert(b, dtype, &y, TUTTI_F64, 1));
    return isnan(x) && isnan(y);
}

static void check_same(const char *set, const void *found, const void *expected, size_t count, tutti_dtype dtype,
                       tutti_reduction reduction, int sources) {
    if (real_view(dtype) != dtype)
        count *= 2;
    dtype = real_view(dtype);
    size_t size = tutti_dtype_size(dtype);
    for (size_t i = 0; i < count; i++) {
        const char *a = (const char *)found + i * size, *b = (const char *)expected + i * size;
        if (!same(a, b, dtype)) {
            uint64_t x = 0, y = 0;
            memcpy(&x, a, size);
            memcpy(&y, b, size);
            FAIL("%s: %s of %d %s: element %zu of %zu is %#llx, not %#llx", set, tutti_reduction_name(reduction),
                 sources, tutti_dtype_name(dtype), i, count, (unsigned long long)x, (unsigned long long)y);
        }
    }
}

/* ---- random data, with more zeros, infinities, NaN, denormals and extremes than chance gives ---- */

static void fill(void *to, size_t count, tutti_dtype dtype) {
    static const double edges[] = { 0,       -0.0,     1,     -1,  INFINITY, -INFINITY,      NAN, 1e-40, -1e-40,
                                    0x1p-24, 0x1p-133, 65504, 448, 57344,    0x1.fffffep127, 2.5, -3 };
    size_t size = tutti_dtype_size(real_view(dtype));
    if (real_view(dtype) != dtype)
        count *= 2;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = random_bits();
        if (is_float(real_view(dtype)) && bits % 4 == 0) {
            double edge = edges[random_below(sizeof edges / sizeof edges[0])];
            CHECK_OK(tutti_convert(&edge, TUTTI_F64, (char *)to + i * size, real_view(dtype), 1));
            continue;
        }
        if (is_float(real_view(dtype)) && bits % 4 < 3) { /* sums of the same magnitude, where rounding happens */
            double value = (double)(int64_t)random_bits() * 0x1p-62;
            CHECK_OK(tutti_convert(&value, TUTTI_F64, (char *)to + i * size, real_view(dtype), 1));
            continue;
        }
        bits = random_bits() >> 7;
        if (dtype == TUTTI_BOOL)
            bits %= 3;
        memcpy((char *)to + i * size, &bits, size);
    }
}

enum {
    MOST_SOURCES = 70,
    MOST_COUNT = 700,
    ROOM = MOST_COUNT * 16 + 128
};

typedef struct arena {
    unsigned char source[MOST_SOURCES][ROOM];
    unsigned char destination[3][ROOM];
    unsigned char expected[ROOM];
} arena;

/* One random shape: sources and destinations at odd addresses, some destination perhaps a source. */
static void check_one(arena *memory, tutti_dtype dtype, tutti_reduction reduction, int sources, size_t count) {
    const void *from[MOST_SOURCES];
    void *to[3];
    double factors[MOST_SOURCES];
    size_t bytes = count * tutti_dtype_size(dtype);
    int destinations = 1 + (int)random_below(3);
    bool in_place = random_below(2) == 0;
    unsigned flags = random_below(2) == 0 ? TU_KERNEL_STREAM : 0;
    for (int s = 0; s < sources; s++) {
        unsigned char *at = memory->source[s] + random_below(64);
        fill(at, count, dtype);
        from[s] = at;
        factors[s] = s % 3 == 0 ? 0.5 : (double)(float)((double)random_below(1000) / 300);
    }
    for (int d = 0; d < destinations; d++)
        to[d] = memory->destination[d] + 1 + random_below(64);
    serial(memory->expected, from, sources, count, dtype, reduction, factors);
    unsigned char saved[ROOM];
    int shared = (int)random_below((size_t)sources);
    memcpy(saved, from[shared], bytes);
    if (in_place)
        to[destinations - 1] = (void *)from[shared];
    FOR_EACH_SET(set) {
        if (in_place)
            memcpy(to[destinations - 1], saved, bytes);
        for (int d = 0; d < destinations; d++) {
            if (d < destinations - 1 || !in_place)
                memset(memory->destination[d], 0xa5, ROOM);
        }
        tu_reduce_many(to, destinations, from, sources, count, dtype, reduction, factors, flags);
        for (int d = 0; d < destinations; d++) {
            check_same(set, to[d], memory->expected, count, dtype, reduction, sources);
            if (d < destinations - 1 || !in_place) {
                CHECK_EQ(((unsigned char *)to[d])[-1], 0xa5);
                CHECK_EQ(((unsigned char *)to[d])[bytes], 0xa5);
            }
        }
    }
}

static void check_all_shapes(tutti_dtype dtype, tutti_reduction reduction) {
    static const int source_counts[] = { 1, 2, 3, 8, 17, MOST_SOURCES };
    arena *memory = malloc(sizeof *memory);
    CHECK(memory != NULL);
    for (size_t n = 0; n < sizeof source_counts / sizeof source_counts[0]; n++) {
        for (size_t count = 0; count < 8; count++)
            check_one(memory, dtype, reduction, source_counts[n], count);
        int rounds = source_counts[n] > 8 ? 2 : 6;
        for (int round = 0; round < rounds; round++)
            check_one(memory, dtype, reduction, source_counts[n], random_below(MOST_COUNT));
    }
    free(memory);
}

static void check_dtypes(tutti_dtype first, tutti_dtype last) {
    for (int dtype = first; dtype <= (int)last; dtype++) {
        for (int reduction = TUTTI_SUM; reduction <= TUTTI_PREMUL_SUM; reduction++) {
            if (tutti_reduction_applies((tutti_reduction)reduction, (tutti_dtype)dtype))
                check_all_shapes((tutti_dtype)dtype, (tutti_reduction)reduction);
        }
    }
}

TEST(floats_equal_the_serial_loop_in_every_shape) {
    check_dtypes(TUTTI_F64, TUTTI_F8_E5M2);
}

TEST(integers_equal_the_serial_loop_in_every_shape) {
    check_dtypes(TUTTI_I8, TUTTI_U64);
}

TEST(bool_and_complex_equal_the_serial_loop_in_every_shape) {
    check_dtypes(TUTTI_BOOL, TUTTI_C128);
}

/* ---- every 16-bit pattern with 64 edge values ---- */

enum {
    PATTERNS = 1 << 16,
    EDGES = 64
};

/* Zero, denormals, normals around 1, the largest, infinity, NaN, both signs, and values a few bits apart, so that sums
 * fall between neighbours. */
static void edge_values(tutti_dtype dtype, uint16_t *edges) {
    static const double values[] = { 0,       0x1p-133,   0x1p-130,    0x1.8p-126,   0x1p-24,   0x1p-15,   0x1.ffcp-15,
                                     0x1p-14, 0x1p-11,    0x1.004p-11, 0x1p-9,       0x1p-8,    0x1.02p-8, 0.1,
                                     0.333,   0.5,        1,           1.0009765625, 1.0078125, 1.5,       2,
                                     3,       10,         255,         256,          257,       2048,      4095,
                                     65504,   0x1.fep127, INFINITY,    NAN };
    for (int i = 0; i < EDGES; i++) {
        double value = i % 2 ? -values[i / 2] : values[i / 2];
        CHECK_OK(tutti_convert(&value, TUTTI_F64, &edges[i], dtype, 1));
    }
}

static void check_pairs(tutti_dtype dtype, tutti_reduction reduction) {
    uint16_t edges[EDGES];
    edge_values(dtype, edges);
    uint16_t *pattern = malloc(PATTERNS * sizeof *pattern), *edge = malloc(PATTERNS * sizeof *edge);
    uint16_t *expected = malloc(PATTERNS * sizeof *expected), *found = malloc(PATTERNS * sizeof *found);
    float *wide = malloc(PATTERNS * sizeof *wide), *sum = malloc(PATTERNS * sizeof *sum);
    CHECK(pattern && edge && expected && found && wide && sum);
    for (int i = 0; i < PATTERNS; i++)
        pattern[i] = (uint16_t)i;
    CHECK_OK(tutti_convert(pattern, dtype, wide, TUTTI_F32, PATTERNS));
    for (int e = 0; e < EDGES; e++) {
        float other;
        CHECK_OK(tutti_convert(&edges[e], dtype, &other, TUTTI_F32, 1));
        for (int i = 0; i < PATTERNS; i++) {
            edge[i] = edges[e];
            sum[i] = step_float(wide[i], other, reduction);
        }
        CHECK_OK(tutti_convert(sum, TUTTI_F32, expected, dtype, PATTERNS));
        FOR_EACH_SET(set) {
            tu_reduce(found, (const void *const[]){ pattern, edge }, 2, PATTERNS, dtype, reduction, NULL, 0);
            for (int i = 0; i < PATTERNS; i++) {
                if (found[i] != expected[i] && !same(&found[i], &expected[i], dtype))
                    FAIL("%s: %s %s: %#x and %#x give %#x, not %#x", set, tutti_dtype_name(dtype),
                         tutti_reduction_name(reduction), i, edges[e], found[i], expected[i]);
            }
        }
    }
    free(sum);
    free(wide);
    free(found);
    free(expected);
    free(edge);
    free(pattern);
}

TEST(every_f16_pattern_with_every_edge_value_gives_the_rounded_sum) {
    check_pairs(TUTTI_F16, TUTTI_SUM);
}

TEST(every_bf16_pattern_with_every_edge_value_gives_the_rounded_sum) {
    check_pairs(TUTTI_BF16, TUTTI_SUM);
}

TEST(every_16_bit_pattern_with_every_edge_value_gives_the_larger_and_the_smaller) {
    check_pairs(TUTTI_F16, TUTTI_MAX);
    check_pairs(TUTTI_BF16, TUTTI_MIN);
}

/* One source goes through load, accumulator and store: conversion there and back on every pattern. */
TEST(every_pattern_of_small_floats_passes_unchanged) {
    static const tutti_dtype small[] = { TUTTI_F16, TUTTI_BF16, TUTTI_F8_E4M3, TUTTI_F8_E5M2 };
    uint16_t *wide = malloc(PATTERNS * sizeof *wide), *found = malloc(PATTERNS * sizeof *found);
    uint8_t bytes[256];
    CHECK(wide && found);
    for (int i = 0; i < PATTERNS; i++)
        wide[i] = (uint16_t)i;
    for (int i = 0; i < 256; i++)
        bytes[i] = (uint8_t)i;
    FOR_EACH_SET(set) {
        for (int i = 0; i < 4; i++) {
            bool one_byte = tutti_dtype_size(small[i]) == 1;
            const void *from = one_byte ? (void *)bytes : (void *)wide;
            size_t count = one_byte ? 256 : PATTERNS;
            tu_reduce(found, &from, 1, count, small[i], TUTTI_SUM, NULL, 0);
            check_same(set, found, from, count, small[i], TUTTI_SUM, 1);
        }
    }
    free(found);
    free(wide);
}

/* Every pair of 8-bit patterns, which makes every rounding that their sums can need. */
TEST(every_pair_of_f8_patterns_gives_the_rounded_sum) {
    static const tutti_dtype small[] = { TUTTI_F8_E4M3, TUTTI_F8_E5M2 };
    uint8_t *a = malloc(PATTERNS), *b = malloc(PATTERNS), *found = malloc(PATTERNS), *expected = malloc(PATTERNS);
    CHECK(a && b && found && expected);
    for (int i = 0; i < PATTERNS; i++) {
        a[i] = (uint8_t)i;
        b[i] = (uint8_t)(i >> 8);
    }
    const void *const from[] = { a, b };
    for (int i = 0; i < 2; i++) {
        for (int reduction = TUTTI_SUM; reduction <= TUTTI_PRODUCT; reduction++) {
            serial(expected, from, 2, PATTERNS, small[i], (tutti_reduction)reduction, NULL);
            FOR_EACH_SET(set) {
                tu_reduce(found, from, 2, PATTERNS, small[i], (tutti_reduction)reduction, NULL, 0);
                check_same(set, found, expected, PATTERNS, small[i], (tutti_reduction)reduction, 2);
            }
        }
    }
    free(expected);
    free(found);
    free(b);
    free(a);
}

/* ---- the caller's floating-point control word ---- */

static void set_control(uint64_t control) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)control);
#else
    __asm__ __volatile__("msr fpcr, %0" ::"r"(control));
#endif
}

#if defined(__x86_64__)
enum {
    HOSTILE = 0x1f80 | 0x8040 | 0x6000
}; /* flush to zero, denormals are zero, toward zero */
enum {
    ORDINARY = 0x1f80
};
#else
enum {
    HOSTILE = 3 << 22 | 1 << 24
};
enum {
    ORDINARY = 0
};
#endif

TEST(flush_to_zero_and_rounding_set_by_the_caller_change_nothing) {
    enum {
        COUNT = 67
    };
    float a[COUNT], b[COUNT], found[COUNT], expected[COUNT];
    for (int i = 0; i < COUNT; i++) {
        a[i] = i % 2 ? ldexpf((float)i, -149) : 1.0f / (float)(i + 3);
        b[i] = i % 2 ? ldexpf(1, -148) : 1.0f / (float)(i + 7);
    }
    const void *const from[] = { a, b };
    serial(expected, from, 2, COUNT, TUTTI_F32, TUTTI_SUM, NULL);
    FOR_EACH_SET(set) {
        set_control(HOSTILE);
        tu_reduce(found, from, 2, COUNT, TUTTI_F32, TUTTI_SUM, NULL, 0);
        uint64_t kept = tu_float_control_enter();
        set_control(ORDINARY);
        check_same(set, found, expected, COUNT, TUTTI_F32, TUTTI_SUM, 2);
#if defined(__x86_64__)
        kept &= ~UINT64_C(0x3f); /* sticky flags */
#endif
        CHECK_EQ(kept, HOSTILE);
    }
}

/* ---- the rest of the interface ---- */

TEST(copies_reach_every_destination_and_nothing_else) {
    enum {
        SIZE = 5000
    };
    unsigned char from[SIZE], first[SIZE + 130], second[SIZE + 130];
    for (int i = 0; i < SIZE; i++)
        from[i] = (unsigned char)random_bits();
    FOR_EACH_SET(set) {
        for (int round = 0; round < 200; round++) {
            size_t bytes = round < 70 ? (size_t)round : random_below(SIZE), at = 1 + random_below(64);
            unsigned flags = round % 2 ? TU_KERNEL_STREAM : 0;
            memset(first, 0xa5, sizeof first);
            memset(second, 0xa5, sizeof second);
            if (round % 3 == 0)
                tu_copy(first + at, from, bytes, flags);
            else
                tu_copy_many((void *const[]){ first + at, second + 64, from }, 3, from, bytes, flags);
            CHECK(memcmp(first + at, from, bytes) == 0);
            CHECK(first[at - 1] == 0xa5 && first[at + bytes] == 0xa5);
            if (round % 3 != 0)
                CHECK(memcmp(second + 64, from, bytes) == 0 && second[63] == 0xa5 && second[64 + bytes] == 0xa5);
        }
    }
}

/* Two sums, and beside them a copy of something else, or of the sums themselves. */
TEST(a_copy_beside_a_reduction_is_complete_and_leaves_it_alone) {
    enum {
        SIZE = 20000
    };
    static float first[SIZE], second[SIZE], sums[SIZE + 32], copied[SIZE + 64], other[SIZE];
    for (int i = 0; i < SIZE; i++) {
        first[i] = (float)(random_bits() % 1000);
        second[i] = (float)(random_bits() % 1000);
        other[i] = (float)(random_bits() % 1000);
    }
    FOR_EACH_SET(set) {
        for (int round = 0; round < 200; round++) {
            size_t count = round < 40 ? (size_t)round * 16 : random_below(SIZE), shift = random_below(16);
            bool same = round % 2 == 0;
            size_t copies = same ? count : random_below(SIZE);
            void *to = sums + shift;
            memset(sums, 0xa5, sizeof sums);
            memset(copied, 0xa5, sizeof copied);
            tu_aside aside = { copied + 16, same ? to : other, copies * sizeof(float) };
            tu_reduce_beside(&to, 1, (const void *const[]){ first, second }, 2, count, TUTTI_F32, TUTTI_SUM, NULL,
                             random_below(2) == 0 ? TU_KERNEL_STREAM : 0, &aside);
            for (size_t i = 0; i < count; i++)
                if (sums[shift + i] != first[i] + second[i])
                    FAIL("%s: element %zu of %zu beside %zu", set, i, count, copies);
            CHECK(memcmp(copied + 16, same ? to : other, copies * sizeof(float)) == 0);
            CHECK(((unsigned char *)(copied + 16))[-1] == 0xa5 && ((unsigned char *)(copied + 16 + copies))[0] == 0xa5);
            CHECK(((unsigned char *)(sums + shift + count))[0] == 0xa5);
        }
    }
}

TEST(two_copies_beside_each_other_are_complete) {
    enum {
        SIZE = 30000
    };
    static unsigned char from[2][SIZE], to[2][SIZE + 130];
    for (int i = 0; i < SIZE; i++) {
        from[0][i] = (unsigned char)random_bits();
        from[1][i] = (unsigned char)random_bits();
    }
    FOR_EACH_SET(set) {
        for (int round = 0; round < 200; round++) {
            size_t bytes[2] = { random_below(SIZE), random_below(SIZE) },
                   at[2] = { 1 + random_below(64), 1 + random_below(64) };
            memset(to, 0xa5, sizeof to);
            tu_aside aside = { to[1] + at[1], from[1], bytes[1] };
            tu_copy_beside(to[0] + at[0], from[0], bytes[0], round % 3 == 0 ? TU_KERNEL_STREAM : 0, &aside);
            for (int i = 0; i < 2; i++) {
                if (memcmp(to[i] + at[i], from[i], bytes[i]) != 0)
                    FAIL("%s: copy %d of %zu bytes beside %zu", set, i, bytes[i], bytes[1 - i]);
                CHECK(to[i][at[i] - 1] == 0xa5 && to[i][at[i] + bytes[i]] == 0xa5);
            }
        }
    }
}

TEST(a_factor_is_the_element_it_was) {
    CHECK(tu_factor(&(double){ 0.1 }, TUTTI_F64) == 0.1);
    CHECK(tu_factor(&(float){ 0.1f }, TUTTI_C64) == (double)0.1f);
    CHECK(tu_factor(&(uint16_t){ 0x3c00 }, TUTTI_F16) == 1);
    CHECK(tu_factor(&(uint16_t){ 1 }, TUTTI_BF16) == 0x1p-133);
    CHECK(tu_factor(&(uint8_t){ 0x38 }, TUTTI_F8_E4M3) == 1);
    CHECK(tu_factor(&(uint8_t){ 0x3c }, TUTTI_F8_E5M2) == 1);
}

TEST(a_factor_that_is_nan_makes_everything_nan) {
    uint16_t ones[100], found[100];
    for (int i = 0; i < 100; i++)
        ones[i] = 0x3f80;
    const uint32_t payloads[] = { 0x7fffffff, 0xffffffff, 0x7fc00001, 0x7fc0ffff };
    FOR_EACH_SET(set) {
        for (int i = 0; i < 4; i++) {
            float nan;
            memcpy(&nan, &payloads[i], sizeof nan);
            double factors[] = { (double)nan, 1 };
            tu_reduce(found, (const void *const[]){ ones, ones }, 2, 100, TUTTI_BF16, TUTTI_PREMUL_SUM, factors, 0);
            for (int k = 0; k < 100; k++) {
                if ((found[k] & 0x7fff) <= 0x7f80)
                    FAIL("%s: NaN became %#x", set, found[k]);
            }
        }
    }
}

TEST(kernels_are_chosen_and_can_be_named) {
    const char *chosen = tu_kernels_name();
    CHECK(!test_instructions_named("abacus"));
    CHECK_TEXT(tu_kernels_name(), chosen);
    CHECK(test_instructions_named("reference"));
    CHECK_TEXT(tu_kernels_name(), "reference");
}
