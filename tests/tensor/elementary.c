/* SPDX-License-Identifier: Apache-2.0
 *
 * The elementary functions: errors against the C library in long double over dense sweeps, special values, and the same
 * bits at every instruction set that this machine has.
 */
#include <math.h>

#include "../harness.h"
#include "base/instructions.h"
#include "levels/functions.h"

enum {
    COUNT = 1 << 14,
    ROUNDS = 8
};

static float x32[COUNT], y32[COUNT], out32[COUNT], other32[COUNT];
static double x64[COUNT], y64[COUNT], out64[COUNT], other64[COUNT];

static uint64_t state = 0x9e3779b97f4a7c15;
static uint64_t random_bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * UINT64_C(0x2545f4914f6cdd1d);
}
static double random_unit(void) {
    return (double)(random_bits() >> 11) * 0x1p-53;
}

static const test_function *functions_of(tu_instructions level) {
    switch (level) {
    case TU_REFERENCE:
        return test_functions_reference;
#if defined(__x86_64__)
    case TU_AVX2:
        return test_functions_avx2;
    case TU_AVX512:
        return test_functions_avx512;
#elif defined(__aarch64__)
    case TU_NEON:
        return test_functions_neon;
#endif
    default:
        return NULL;
    }
}

static const test_function *find(const char *name) {
    const test_function *function = test_functions_reference;
    while (strcmp(function->name, name) != 0)
        function++;
    return function;
}

static const double special[] = { 0.0,    -0.0,   INFINITY, -INFINITY, NAN,     1e-45,    -1e-45,
                                  1e-320, 1e-38,  1.0,      -1.0,      2.0,     0.5,      -0.5,
                                  3.0,    -3.0,   2.5,      -2.5,      0.75,    88.7,     -87,
                                  -103.9, 709.7,  -708.3,   -745.1,    65536.0, -65536.,  1e9,
                                  1e22,   3.4e38, 1e38,     0.25,      1e300,   -1.7e308, 1.57079632679489661923 };
enum {
    SPECIALS = sizeof special / sizeof special[0]
};

/* Every kind of number: special ones, random bits, then numbers of usual size. */
static void fill(int round, double low, double high) {
    for (int i = 0; i < COUNT; i++) {
        uint32_t bits = (uint32_t)random_bits(), more = (uint32_t)random_bits();
        uint64_t wide = random_bits(), wider = random_bits();
        memcpy(&x32[i], &bits, sizeof bits);
        memcpy(&y32[i], &more, sizeof more);
        memcpy(&x64[i], &wide, sizeof wide);
        memcpy(&y64[i], &wider, sizeof wider);
        if (round == 0 && i < SPECIALS * SPECIALS) {
            x64[i] = special[i % SPECIALS];
            y64[i] = special[i / SPECIALS];
            x32[i] = (float)x64[i];
            y32[i] = (float)y64[i];
        } else if (round % 2 == 1) {
            x32[i] = (float)(x64[i] = low + (high - low) * random_unit());
            y32[i] = (float)(y64[i] = low + (high - low) * random_unit());
        }
    }
}

TEST(every_instruction_set_gives_the_bits_of_the_reference) {
    for (int round = 0; round < ROUNDS; round++) {
        fill(round, -20, 20);
        for (const test_function *function = test_functions_reference; function->name != NULL; function++) {
            function->f32(x32, y32, out32, COUNT);
            function->f64(x64, y64, out64, COUNT);
            for (tu_instructions level = TU_NEON; level < TU_INSTRUCTIONS_END; level++) {
                if (!tu_instructions_present(level))
                    continue;
                const test_function *same = functions_of(level) + (function - test_functions_reference);
                same->f32(x32, y32, other32, COUNT);
                same->f64(x64, y64, other64, COUNT);
                for (int i = 0; i < COUNT; i++) {
                    if (memcmp(&out32[i], &other32[i], 4) != 0 && !(isnan(out32[i]) && isnan(other32[i])))
                        FAIL("%s_f32(%a, %a) is %a, with %s %a", function->name, (double)x32[i], (double)y32[i],
                             (double)out32[i], tu_instructions_name(level), (double)other32[i]);
                    if (memcmp(&out64[i], &other64[i], 8) != 0 && !(isnan(out64[i]) && isnan(other64[i])))
                        FAIL("%s_f64(%a, %a) is %a, with %s %a", function->name, x64[i], y64[i], out64[i],
                             tu_instructions_name(level), other64[i]);
                }
            }
        }
    }
}

/* ---- accuracy ---- */

typedef long double wide(long double x);

static long double sigmoid(long double x) {
    return x >= 0 ? 1 / (1 + expl(-x)) : expl(x) / (1 + expl(x));
}
static long double normal_cdf(long double x) {
    return 0.5L * erfcl(-x * 0.707106781186547524400844362104849039L);
}
static long double gelu(long double x) {
    return x * normal_cdf(x);
}
static long double gelu_slope(long double x) {
    return normal_cdf(x) + x * expl(-x * x / 2) * 0.398942280401432677939946059934381868L;
}
static long double gelu_tanh(long double x) {
    return x * sigmoid(1.59576912160573071175978423973750L * (x + 0.044715L * x * x * x));
}
static long double gelu_tanh_slope(long double x) {
    long double s = sigmoid(1.59576912160573071175978423973750L * (x + 0.044715L * x * x * x));
    return s * (1 + x * 1.59576912160573071175978423973750L * (1 + 0.134145L * x * x) * (1 - s));
}
static long double silu_slope(long double x) {
    long double s = sigmoid(x);
    return s * (1 + x * (1 - s));
}
static long double rsqrt(long double x) {
    return 1 / sqrtl(x);
}

/* `units` is the largest error in units in the last place between low and high; results nearer to 0 than `floor` are
 * measured in units of `floor`, for functions that cross 0. */
static const struct {
    const char *name;
    wide *exact;
    double low, high, wide_low, wide_high, units, floor;
} bounds[] = {
    { "exp", expl, -87, 88.7, -708, 709, 1, 0 },
    { "expm1", expm1l, -100, 88.7, -700, 709, 2, 0 },
    { "log", logl, 0, 1e30, 0, 1e300, 1, 0 },
    { "log1p", log1pl, -1, 1e30, -1, 1e300, 1.5, 0 },
    { "sin", sinl, -1e38, 1e38, -1e300, 1e300, 2, 0 },
    { "cos", cosl, -1e38, 1e38, -1e300, 1e300, 2, 0 },
    { "tanh", tanhl, -30, 30, -50, 50, 2.5, 0 },
    { "sigmoid", sigmoid, -87, 60, -700, 60, 2.5, 0 },
    { "erf", erfl, -6, 6, -7, 7, 1.5, 0 },
    { "normal_cdf", normal_cdf, -12.8, 9, -37, 10, 6, 0 },
    { "gelu", gelu, -1, 9, -37, 10, 7, 0 },
    { "gelu_slope", gelu_slope, -12.5, 9, -37, 10, 8, 0.25 },
    { "gelu_tanh", gelu_tanh, -4, 9, -4, 10, 25, 0 },
    { "gelu_tanh_slope", gelu_tanh_slope, -4, 9, -4, 10, 6, 0.25 },
    { "silu_slope", silu_slope, -80, 60, -700, 60, 6, 0.25 },
    { "rsqrt", rsqrt, 1e-37, 1e38, 1e-300, 1e300, 1.5, 0 },
};

/* |found - exact| in units in the last place of a type with `digits` bits. */
static double error_of(long double exact, long double found, double floor, int digits) {
    int exponent;
    frexpl(fabsl(exact) > floor ? exact : floor, &exponent);
    return (double)(fabsl(found - exact) / ldexpl(1, exponent - digits));
}

TEST(errors_stay_within_the_stated_units_in_the_last_place) {
    for (size_t b = 0; b < sizeof bounds / sizeof bounds[0]; b++) {
        const test_function *function = find(bounds[b].name);
        for (int round = 0; round < ROUNDS; round++) {
            double low = bounds[b].low < -1000 ? -1000 : bounds[b].low,
                   high = bounds[b].high > 1000 ? 1000 : bounds[b].high;
            fill(round, round % 4 == 1 ? -2 : low, round % 4 == 1 ? 2 : high);
            function->f32(x32, y32, out32, COUNT);
            function->f64(x64, y64, out64, COUNT);
            for (int i = 0; i < COUNT; i++) {
                long double exact = bounds[b].exact(x32[i]);
                if (x32[i] >= bounds[b].low && x32[i] <= bounds[b].high && fabsl(exact) > 0x1p-126L &&
                    isfinite(exact) && !(error_of(exact, out32[i], bounds[b].floor, 24) <= bounds[b].units))
                    FAIL("%s_f32(%a) is %a, %.2f units off", function->name, (double)x32[i], (double)out32[i],
                         error_of(exact, out32[i], bounds[b].floor, 24));
                exact = bounds[b].exact(x64[i]);
                if (x64[i] >= bounds[b].wide_low && x64[i] <= bounds[b].wide_high && fabsl(exact) > 0x1p-1022L &&
                    isfinite(exact) && !(error_of(exact, out64[i], bounds[b].floor, 53) <= bounds[b].units))
                    FAIL("%s_f64(%a) is %a, %.2f units off", function->name, x64[i], out64[i],
                         error_of(exact, out64[i], bounds[b].floor, 53));
            }
        }
    }
}

TEST(gelu_of_f32_keeps_its_absolute_error_in_the_tail_and_ends_in_zero) {
    const test_function *function = find("gelu");
    for (int round = 0; round < ROUNDS; round++) {
        fill(round, -20, 0);
        function->f32(x32, y32, out32, COUNT);
        for (int i = 0; i < COUNT; i++)
            if (x32[i] > -20 && x32[i] < 0 && !(fabsl(out32[i] - gelu(x32[i])) <= -x32[i] * 7 * 0x1p-25L + 0x1p-149L))
                FAIL("gelu_f32(%a) is %a", (double)x32[i], (double)out32[i]);
    }
    const float far[] = { -5.5f, -100, -1e30f, 5.5f, 100, 1e30f };
    memcpy(x32, far, sizeof far);
    function->f32(x32, y32, out32, 6);
    for (int i = 0; i < 6; i++)
        CHECK(out32[i] == (far[i] < 0 ? 0 : far[i]));
    function = find("gelu_slope");
    x32[0] = -6, x32[1] = -1e30f, x32[2] = 6, x32[3] = 1e30f;
    function->f32(x32, y32, out32, 4);
    for (int i = 0; i < 4; i++)
        CHECK(out32[i] == (x32[i] < 0 ? 0 : 1));
}

static bool same_value(double a, double b) {
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

TEST(powers_are_within_two_units_and_follow_c_in_special_cases) {
    const test_function *power = find("pow");
    for (int round = 0; round < ROUNDS; round++) {
        fill(round, round % 4 == 1 ? 0 : -30, 30);
        for (int i = 0; round % 4 == 3 && i < COUNT; i++) { /* whole exponents, negative bases */
            y64[i] = rint(y64[i]);
            y32[i] = rintf(y32[i]);
        }
        power->f32(x32, y32, out32, COUNT);
        power->f64(x64, y64, out64, COUNT);
        for (int i = 0; i < COUNT; i++) {
            double exact = pow((double)x32[i], (double)y32[i]);
            float rounded = (float)exact;
            bool fits = isnormal(rounded) && fabs(exact) < 3.4e38 ? error_of((long double)exact, out32[i], 0, 24) <= 1
                        : fabs(exact) > 1e-44 && fabs(exact) < 0x1p-126
                            ? fabsf(out32[i] - rounded) <= 0x1p-149f
                            : same_value(out32[i], rounded) || fabs(exact) >= 3.4e38;
            if (!fits)
                FAIL("pow_f32(%a, %a) is %a, not %a", (double)x32[i], (double)y32[i], (double)out32[i], exact);
            long double wide_exact = powl(x64[i], y64[i]);
            double wide_rounded = (double)wide_exact;
            fits = isnormal(wide_rounded) ? error_of(wide_exact, out64[i], 0, 53) <= 2
                   : wide_rounded != 0 && isfinite(wide_rounded)
                       ? fabs(out64[i] - wide_rounded) <= 0x1p-1073
                       : same_value(out64[i], wide_rounded) || (fabsl(wide_exact) < 0x1p-1074L && wide_exact != 0);
            if (!fits)
                FAIL("pow_f64(%a, %a) is %a, not %a", x64[i], y64[i], out64[i], wide_rounded);
        }
    }
}

TEST(special_values_are_those_of_the_c_library) {
    static const struct {
        const char *name;
        double (*exact)(double);
    } functions[] = { { "exp", exp },   { "expm1", expm1 }, { "log", log },     { "log1p", log1p }, { "sin", sin },
                      { "cos", cos },   { "tanh", tanh },   { "erf", erf },     { "sqrt", sqrt },   { "floor", floor },
                      { "ceil", ceil }, { "round", rint },  { "trunc", trunc }, { "abs", fabs } };
    static const double values[] = { 0.0, -0.0, INFINITY, -INFINITY, NAN };
    for (size_t f = 0; f < sizeof functions / sizeof functions[0]; f++) {
        const test_function *function = find(functions[f].name);
        for (int i = 0; i < 16; i++)
            x32[i] = (float)(x64[i] = values[i % 5]);
        function->f32(x32, y32, out32, 16);
        function->f64(x64, y64, out64, 16);
        for (int i = 0; i < 5; i++) {
            double exact = functions[f].exact(values[i]);
            if (!same_value(out32[i], exact) || !same_value(out64[i], exact))
                FAIL("%s(%g) is %g in f32, %g in f64, not %g", function->name, values[i], (double)out32[i], out64[i],
                     exact);
        }
    }
}

TEST(denormals_are_kept) {
    for (int i = 0; i < 16; i++) {
        x32[i] = -87.4f - (float)i;
        x64[i] = -708.5 - 2 * i;
    }
    find("exp")->f32(x32, y32, out32, 16);
    find("exp")->f64(x64, y64, out64, 16);
    for (int i = 0; i < 16; i++) {
        CHECK(fabsl(out32[i] - expl(x32[i])) <= 0x1p-149L);
        CHECK(fabsl(out64[i] - expl(x64[i])) <= 0x1p-1074L);
    }
    for (int i = 0; i < 16; i++) {
        x32[i] = 1e-45f * (float)(1 << i);
        x64[i] = 5e-324 * (1 << i);
    }
    find("log")->f32(x32, y32, out32, 16);
    find("log")->f64(x64, y64, out64, 16);
    for (int i = 0; i < 16; i++) {
        CHECK(error_of(logl(x32[i]), out32[i], 0, 24) <= 1);
        CHECK(error_of(logl(x64[i]), out64[i], 0, 53) <= 1);
    }
}
