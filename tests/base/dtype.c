/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions are compared with the definition of each format: a pattern's value by ldexp, and rounding by the
 * boundaries between neighbours, each approached from both sides.
 */
#include <tutti/dtype.h>

#include <math.h>

#include "../harness.h"
#include "base/float16.h"
#include "base/float_control.h"

typedef struct format {
    tutti_dtype dtype;
    int exponent_bits, mantissa_bits;
    bool infinities; /* else the all-ones pattern alone is NaN */
} format;

static const format formats[] = {
    { TUTTI_F16, 5, 10, true },
    { TUTTI_BF16, 8, 7, true },
    { TUTTI_F8_E4M3, 4, 3, false },
    { TUTTI_F8_E5M2, 5, 2, true },
};

enum {
    FORMATS = sizeof formats / sizeof formats[0]
};

static unsigned sign_bit(const format *f) {
    return 1u << (f->exponent_bits + f->mantissa_bits);
}

/* The first magnitude that is not finite. */
static unsigned first_special(const format *f) {
    return f->infinities ? ((1u << f->exponent_bits) - 1) << f->mantissa_bits : sign_bit(f) - 1;
}

static double value_of(const format *f, unsigned pattern) {
    int bias = (1 << (f->exponent_bits - 1)) - 1;
    unsigned magnitude = pattern & (sign_bit(f) - 1);
    unsigned exponent = magnitude >> f->mantissa_bits, mantissa = magnitude & ((1u << f->mantissa_bits) - 1);
    double value = exponent == 0 ? ldexp(mantissa, 1 - bias - f->mantissa_bits)
                                 : ldexp(mantissa + (1 << f->mantissa_bits), (int)exponent - bias - f->mantissa_bits);
    if (magnitude >= first_special(f))
        value = f->infinities && mantissa == 0 ? INFINITY : NAN;
    return pattern & sign_bit(f) ? -value : value;
}

static unsigned narrow(tutti_dtype to, tutti_dtype from, const void *value) {
    uint16_t bits16 = 0xffff;
    uint8_t bits8 = 0xff;
    bool small = tutti_dtype_size(to) == 1;
    CHECK_OK(tutti_convert(value, from, small ? (void *)&bits8 : (void *)&bits16, to, 1));
    return small ? bits8 : bits16;
}

static unsigned narrow_f32(const format *f, float value) {
    return narrow(f->dtype, TUTTI_F32, &value);
}

static unsigned narrow_f64(const format *f, double value) {
    return narrow(f->dtype, TUTTI_F64, &value);
}

static double widen(const format *f, unsigned pattern) {
    uint16_t bits16 = (uint16_t)pattern;
    uint8_t bits8 = (uint8_t)pattern;
    const void *from = tutti_dtype_size(f->dtype) == 1 ? (void *)&bits8 : (void *)&bits16;
    float single = 0;
    double wide = 0;
    CHECK_OK(tutti_convert(from, f->dtype, &single, TUTTI_F32, 1));
    CHECK_OK(tutti_convert(from, f->dtype, &wide, TUTTI_F64, 1));
    CHECK(isnan(wide) ? isnan(single) : wide == (double)single && !signbit(wide) == !signbit(single));
    return wide;
}

TEST(every_pattern_widens_to_its_value) {
    for (int i = 0; i < FORMATS; i++) {
        for (unsigned pattern = 0; pattern < 2 * sign_bit(&formats[i]); pattern++) {
            double expected = value_of(&formats[i], pattern), found = widen(&formats[i], pattern);
            if (isnan(expected) ? !isnan(found) : found != expected || !signbit(found) != !signbit(expected))
                FAIL("%s %#x is %a, not %a", tutti_dtype_name(formats[i].dtype), pattern, found, expected);
        }
    }
}

TEST(every_pattern_survives_the_way_through_f32_and_f64) {
    for (int i = 0; i < FORMATS; i++) {
        const format *f = &formats[i];
        for (unsigned pattern = 0; pattern < 2 * sign_bit(f); pattern++) {
            double value = value_of(f, pattern);
            unsigned by_f32 = narrow_f32(f, (float)value), by_f64 = narrow_f64(f, value);
            if (isnan(value))
                CHECK(isnan(value_of(f, by_f32)) && isnan(value_of(f, by_f64)));
            else if (by_f32 != pattern || by_f64 != pattern)
                FAIL("%s %#x came back as %#x, %#x", tutti_dtype_name(f->dtype), pattern, by_f32, by_f64);
        }
    }
}

static void check_boundary(const format *f, unsigned below, double middle) {
    unsigned even = below & 1 ? below + 1 : below, sign = sign_bit(f);
    float single = (float)middle; /* exact: f32 has more bits than the middle of two neighbours needs */
    CHECK((double)single == middle);
    const struct {
        unsigned found, expected;
    } cases[] = {
        { narrow_f32(f, single), even },
        { narrow_f32(f, -single), even | sign },
        { narrow_f32(f, nextafterf(single, 0)), below },
        { narrow_f32(f, nextafterf(single, INFINITY)), below + 1 },
        { narrow_f64(f, middle), even },
        { narrow_f64(f, nextafter(middle, 0)), below },
        { narrow_f64(f, nextafter(middle, INFINITY)), below + 1 },
        { narrow_f64(f, -nextafter(middle, INFINITY)), (below + 1) | sign },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].found != cases[i].expected)
            FAIL("%s: case %zu above %#x gave %#x, not %#x", tutti_dtype_name(f->dtype), i, below, cases[i].found,
                 cases[i].expected);
    }
}

/* Between two neighbours the middle goes to the even one, and a step to either side goes to the nearer. Beyond the
 * largest the neighbour is where the next value would be, infinity; e4m3fn has none and stays there. */
TEST(every_boundary_rounds_to_nearest_and_ties_to_even) {
    for (int i = 0; i < FORMATS; i++) {
        const format *f = &formats[i];
        for (unsigned below = 0; below + 1 < first_special(f); below++)
            check_boundary(f, below, (value_of(f, below) + value_of(f, below + 1)) / 2);
        unsigned largest = first_special(f) - 1;
        double step = value_of(f, largest) - value_of(f, largest - 1);
        if (f->dtype != TUTTI_BF16 &&
            f->dtype != TUTTI_F8_E4M3) /* in bf16 the middle lies beyond what steps in f32 can reach */
            check_boundary(f, largest, value_of(f, largest) + step / 2);
    }
}

TEST(too_large_becomes_infinity_and_in_e4m3_the_largest_number) {
    for (int i = 0; i < FORMATS; i++) {
        const format *f = &formats[i];
        unsigned expected = f->dtype == TUTTI_F8_E4M3 ? first_special(f) - 1 : first_special(f);
        CHECK_EQ(narrow_f32(f, INFINITY), expected);
        CHECK_EQ(narrow_f32(f, -INFINITY), expected | sign_bit(f));
        CHECK_EQ(narrow_f32(f, 0x1.fffffep127f), expected);
        CHECK_EQ(narrow_f64(f, 1e300), expected);
        CHECK_EQ(narrow_f64(f, -1e300), expected | sign_bit(f));
        CHECK(isnan(value_of(f, narrow_f32(f, NAN))));
        CHECK(isnan(value_of(f, narrow_f64(f, -NAN))));
        CHECK(isnan(value_of(f, narrow_f32(f, tu_f32_from_bits(0x7f800001)))));
    }
    const format *e4m3 = &formats[0];
    while (e4m3->dtype != TUTTI_F8_E4M3)
        e4m3++;
    static const float around[] = { 448, 449, 456, 463.9f, 464, 465, 480, 1e6f };
    for (size_t i = 0; i < sizeof around / sizeof around[0]; i++) {
        CHECK(value_of(e4m3, narrow_f32(e4m3, around[i])) == 448);
        CHECK_EQ(narrow_f32(e4m3, -around[i]), 0xfe);
        CHECK_EQ(narrow_f64(e4m3, (double)around[i]), 0x7e);
    }
    CHECK(value_of(e4m3, narrow_f32(e4m3, 431.9f)) == 416);
}

TEST(flush_to_zero_set_by_the_caller_changes_nothing) {
    uint64_t control = tu_float_control_enter();
    float denormal = 0x1p-140f, found;
    double wide;
#if defined(__x86_64__)
    _mm_setcsr(0x1f80 | 0x8040 | 0x6000); /* flush to zero, denormals are zero, round toward zero */
#else
    __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)3 << 22 | (uint64_t)1 << 24));
#endif
    tutti_status there = tutti_convert(&denormal, TUTTI_F32, &wide, TUTTI_F64, 1);
    tutti_status back = tutti_convert(&wide, TUTTI_F64, &found, TUTTI_F32, 1);
    double third = 1.0 / 3;
    float rounded;
    tutti_status down = tutti_convert(&third, TUTTI_F64, &rounded, TUTTI_F32, 1);
    uint64_t kept = tu_float_control_enter();
    tu_float_control_leave(control);
    CHECK(there == TUTTI_OK && back == TUTTI_OK && down == TUTTI_OK);
    CHECK_EQ(tu_f32_bits(found), tu_f32_bits(0x1p-140f));
    CHECK(rounded == 0x1.555556p-2f);
#if defined(__x86_64__)
    CHECK_EQ(kept & ~UINT64_C(0x3f), 0x1f80 | 0x8040 | 0x6000);
    _mm_setcsr(0x1f80);
#else
    CHECK_EQ(kept, (uint64_t)3 << 22 | (uint64_t)1 << 24);
    __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)0));
#endif
}

#define CHECK_CONVERT(from_dtype, from_type, value, to_dtype, to_type, expected)                            \
    do {                                                                                                    \
        from_type from = value;                                                                             \
        to_type to, wanted = expected;                                                                      \
        memset(&to, 0x5a, sizeof to);                                                                       \
        CHECK_OK(tutti_convert(&from, from_dtype, &to, to_dtype, 1));                                       \
        if (memcmp(&to, &wanted, sizeof to) != 0)                                                           \
            FAIL("%s %s to %s is not %s", tutti_dtype_name(from_dtype), #value, tutti_dtype_name(to_dtype), \
                 #expected);                                                                                \
    } while (0)

TEST(floats_to_integers_truncate_and_saturate) {
    CHECK_CONVERT(TUTTI_F32, float, -1.9f, TUTTI_I8, int8_t, -1);
    CHECK_CONVERT(TUTTI_F32, float, 127.9f, TUTTI_I8, int8_t, 127);
    CHECK_CONVERT(TUTTI_F32, float, 128, TUTTI_I8, int8_t, 127);
    CHECK_CONVERT(TUTTI_F32, float, -129, TUTTI_I8, int8_t, -128);
    CHECK_CONVERT(TUTTI_F64, double, 1e30, TUTTI_I64, int64_t, INT64_MAX);
    CHECK_CONVERT(TUTTI_F64, double, -1e30, TUTTI_I64, int64_t, INT64_MIN);
    CHECK_CONVERT(TUTTI_F64, double, -1e30, TUTTI_U64, uint64_t, 0);
    CHECK_CONVERT(TUTTI_F64, double, 1e30, TUTTI_U64, uint64_t, UINT64_MAX);
    CHECK_CONVERT(TUTTI_F64, double, 0x1p63, TUTTI_U64, uint64_t, UINT64_C(1) << 63);
    CHECK_CONVERT(TUTTI_F64, double, INFINITY, TUTTI_U16, uint16_t, UINT16_MAX);
    CHECK_CONVERT(TUTTI_F64, double, NAN, TUTTI_I32, int32_t, 0);
    CHECK_CONVERT(TUTTI_F64, double, NAN, TUTTI_U32, uint32_t, 0);
    CHECK_CONVERT(TUTTI_F64, double, -2147483648.5, TUTTI_I32, int32_t, INT32_MIN);
}

TEST(integers_wrap_into_narrower_ones_and_round_once_into_floats) {
    CHECK_CONVERT(TUTTI_I32, int32_t, 257, TUTTI_U8, uint8_t, 1);
    CHECK_CONVERT(TUTTI_I32, int32_t, -1, TUTTI_U64, uint64_t, UINT64_MAX);
    CHECK_CONVERT(TUTTI_U8, uint8_t, 200, TUTTI_I8, int8_t, -56);
    CHECK_CONVERT(TUTTI_U64, uint64_t, UINT64_MAX, TUTTI_F64, double, 0x1p64);
    CHECK_CONVERT(TUTTI_I64, int64_t, INT64_MIN, TUTTI_F32, float, -0x1p63f);
    /* Just above the middle of two f32: rounding to f64 first would make it the middle. */
    CHECK_CONVERT(TUTTI_I64, int64_t, (INT64_C(1) << 62) + (INT64_C(1) << 38) + 1, TUTTI_F32, float, 0x1.000002p62f);
    CHECK_CONVERT(TUTTI_I64, int64_t, (INT64_C(1) << 62) + (INT64_C(1) << 54) + 1, TUTTI_BF16, uint16_t, 0x5e81);
    CHECK_CONVERT(TUTTI_U64, uint64_t, (UINT64_C(1) << 63) + (UINT64_C(1) << 55), TUTTI_BF16, uint16_t, 0x5f00);
    CHECK_CONVERT(TUTTI_I32, int32_t, 70000, TUTTI_F16, uint16_t, 0x7c00);
}

TEST(bool_is_not_zero_and_complex_has_a_real_part) {
    typedef struct pair {
        float real, imaginary;
    } pair;
    typedef struct wide_pair {
        double real, imaginary;
    } wide_pair;
    CHECK_CONVERT(TUTTI_F32, float, 0.25f, TUTTI_BOOL, uint8_t, 1);
    CHECK_CONVERT(TUTTI_F32, float, -0.0f, TUTTI_BOOL, uint8_t, 0);
    CHECK_CONVERT(TUTTI_F64, double, NAN, TUTTI_BOOL, uint8_t, 1);
    CHECK_CONVERT(TUTTI_BOOL, uint8_t, 7, TUTTI_BOOL, uint8_t, 1);
    CHECK_CONVERT(TUTTI_BOOL, uint8_t, 7, TUTTI_F32, float, 1);
    CHECK_CONVERT(TUTTI_I64, int64_t, INT64_C(1) << 40, TUTTI_BOOL, uint8_t, 1);
    pair real = { 1.5f, 0 };
    wide_pair both = { 1.5, -2.5 };
    CHECK_CONVERT(TUTTI_F16, uint16_t, 0x3e00, TUTTI_C64, pair, real);
    CHECK_CONVERT(TUTTI_C128, wide_pair, both, TUTTI_F32, float, 1.5f);
    CHECK_CONVERT(TUTTI_C128, wide_pair, both, TUTTI_I8, int8_t, 1);
    pair narrow_both = { 1.5f, -2.5f };
    CHECK_CONVERT(TUTTI_C128, wide_pair, both, TUTTI_C64, pair, narrow_both);
    CHECK_CONVERT(TUTTI_C64, pair, narrow_both, TUTTI_C128, wide_pair, both);
}

TEST(a_complex_number_is_true_where_one_of_its_parts_is_not_zero) {
    float pairs[2 * 1000];
    double wide[6] = { 0, 0, 0, -1, 2, 0 };
    uint8_t truth[1000];
    for (int i = 0; i < 1000; i++) { /* more than one block of conversion */
        pairs[2 * i] = i % 4 == 1 ? 3 : 0;
        pairs[2 * i + 1] = i % 4 == 2 ? -3 : 0;
    }
    CHECK_OK(tutti_convert(pairs, TUTTI_C64, truth, TUTTI_BOOL, 1000));
    for (int i = 0; i < 1000; i++)
        CHECK_EQ(truth[i], i % 4 == 1 || i % 4 == 2);
    CHECK_OK(tutti_convert(wide, TUTTI_C128, truth, TUTTI_BOOL, 3));
    CHECK(!truth[0] && truth[1] && truth[2]);
}

TEST(long_arrays_convert_in_place_and_unaligned) {
    enum {
        COUNT = 1000
    };
    unsigned char bytes[COUNT * 4 + 1], wide[COUNT * 8 + 3];
    for (int i = 0; i < COUNT; i++) {
        int32_t value = i * 7 - 3000;
        memcpy(bytes + 1 + i * 4, &value, 4);
    }
    CHECK_OK(tutti_convert(bytes + 1, TUTTI_I32, bytes + 1, TUTTI_F32, COUNT));
    CHECK_OK(tutti_convert(bytes + 1, TUTTI_F32, wide + 3, TUTTI_I64, COUNT));
    for (int i = 0; i < COUNT; i++) {
        int64_t value;
        memcpy(&value, wide + 3 + i * 8, 8);
        CHECK_EQ(value, i * 7 - 3000);
    }
}

TEST(a_wrong_argument_of_convert_is_named) {
    uint64_t values[4] = { 0 };
    CHECK_STATUS(tutti_convert(values, (tutti_dtype)TUTTI_SUM, values, TUTTI_F32, 1), TUTTI_ERROR_TYPE);
    CHECK_MESSAGE("from_dtype 65");
    CHECK_STATUS(tutti_convert(values, TUTTI_F32, NULL, TUTTI_F32, 1), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("to is NULL");
    CHECK_STATUS(tutti_convert(values, TUTTI_F32, values, TUTTI_F64, 2), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlap");
    CHECK_OK(tutti_convert(NULL, TUTTI_F32, NULL, TUTTI_F64, 0));
}

TEST(names_go_there_and_back) {
    for (int i = TUTTI_F64; i <= TUTTI_C128; i++) {
        tutti_dtype dtype = 0;
        CHECK_OK(tutti_dtype_parse(tutti_dtype_name((tutti_dtype)i), &dtype));
        CHECK_EQ(dtype, i);
        CHECK(tutti_dtype_size(dtype) > 0);
    }
    for (int i = TUTTI_SUM; i <= TUTTI_PREMUL_SUM; i++) {
        tutti_reduction reduction = 0;
        CHECK_OK(tutti_reduction_parse(tutti_reduction_name((tutti_reduction)i), &reduction));
        CHECK_EQ(reduction, i);
    }
    CHECK_TEXT(tutti_dtype_name(0), "?");
    CHECK_TEXT(tutti_reduction_name((tutti_reduction)TUTTI_F32), "?");
    CHECK_EQ(tutti_dtype_size((tutti_dtype)18), 0);
}

TEST(names_of_c_nccl_tests_and_pytorch_are_understood) {
    static const struct {
        const char *name;
        tutti_dtype dtype;
    } names[] = { { "float", TUTTI_F32 },
                  { "Double", TUTTI_F64 },
                  { "half", TUTTI_F16 },
                  { "bfloat16", TUTTI_BF16 },
                  { "float8_e4m3fn", TUTTI_F8_E4M3 },
                  { "fp8_e5m2", TUTTI_F8_E5M2 },
                  { "INT32", TUTTI_I32 },
                  { "uint8", TUTTI_U8 },
                  { "complex64", TUTTI_C64 },
                  { "int64_t", TUTTI_I64 } };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        tutti_dtype dtype = 0;
        CHECK_OK(tutti_dtype_parse(names[i].name, &dtype));
        CHECK_EQ(dtype, names[i].dtype);
    }
    tutti_dtype dtype = TUTTI_I8;
    tutti_reduction reduction = TUTTI_MAX;
    CHECK_OK(tutti_reduction_parse("prod", &reduction));
    CHECK_EQ(reduction, TUTTI_PRODUCT);
    CHECK_STATUS(tutti_dtype_parse("floa", &dtype), TUTTI_ERROR_TYPE);
    CHECK_MESSAGE("\"floa\"");
    CHECK_STATUS(tutti_dtype_parse("", &dtype), TUTTI_ERROR_TYPE);
    CHECK_STATUS(tutti_reduction_parse("float32 ", &reduction), TUTTI_ERROR_TYPE);
    CHECK_EQ(dtype, TUTTI_I8);
    CHECK_EQ(reduction, TUTTI_PRODUCT);
}

TEST(reductions_apply_as_the_table_in_the_header_says) {
    static const struct {
        tutti_dtype dtype;
        const char *applies; /* sum avg product min max band bor bxor premul_sum */
    } rows[] = {
        { TUTTI_F64, "xxxxx---x" },  { TUTTI_F8_E5M2, "xxxxx---x" },  { TUTTI_I8, "xxxxxxxx-" },
        { TUTTI_U64, "xxxxxxxx-" },  { TUTTI_BOOL, "x-xxxxxx-" },     { TUTTI_C64, "xx------x" },
        { TUTTI_C128, "xx------x" }, { (tutti_dtype)0, "---------" }, { (tutti_dtype)TUTTI_SUM, "---------" }
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (int reduction = 0; reduction < 9; reduction++)
            CHECK_EQ(tutti_reduction_applies((tutti_reduction)(TUTTI_SUM + reduction), rows[i].dtype),
                     rows[i].applies[reduction] == 'x');
    }
    CHECK_EQ(tutti_reduction_applies((tutti_reduction)0, TUTTI_F32), 0);
}
