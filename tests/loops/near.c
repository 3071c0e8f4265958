/* SPDX-License-Identifier: Apache-2.0
 *
 * The short functions of bf16 numbers that compiled loops have on a GPU: for every number, and for every error that the
 * processor's approximations may have, they round to what the functions of f32 round to.
 */
#include <math.h>

#include "../harness.h"
#include "base/float16.h"
#include "tensor/kernel/elementary.h"

/* By so many units in the last place approximations are off; that is more than any processor's are. */
enum {
    UNITS = 3
};
static int inverse_off, power_off;

static float off_by(double exact, int units) {
    float x = (float)exact;
    uint32_t bits = tu_f32_bits(x);
    return isfinite(x) && x != 0 ? tu_f32_from_bits(bits + (uint32_t)units) : x;
}

#define TU_NEAR_TRIED 1
#define HERE static inline
HERE float tu_near_inverse(float x) {
    return off_by(1.0 / (double)x, inverse_off);
}
HERE float tu_near_power(float x) {
    double power = exp2((double)x);
    return power < 0x1p-126 ? 0 : off_by(power, power_off);
}
#include "loops/near.cuh"

typedef float function(float x);
static float whole_tanh(float x) {
    return tu_tanh_f32(x);
}
static float whole_sigmoid(float x) {
    return tu_sigmoid_f32(x);
}

static void compare(const char *name, function *near, function *whole) {
    for (inverse_off = -UNITS; inverse_off <= UNITS; inverse_off++)
        for (power_off = -UNITS; power_off <= UNITS; power_off++)
            for (uint32_t bits = 0; bits < 65536; bits++) {
                float x = tu_bf16_to_f32((uint16_t)bits), found = tu_bf16_to_f32(tu_f32_to_bf16(near(x))),
                      wanted = tu_bf16_to_f32(tu_f32_to_bf16(whole(x)));
                if (isnan(x) ? !isnan(found) : tu_f32_bits(found) != tu_f32_bits(wanted))
                    FAIL("%s(%a) is %a instead of %a, with an inverse %d and a power %d units off", name, (double)x,
                         (double)found, (double)wanted, inverse_off, power_off);
            }
}

TEST(tanh_of_every_number_rounds_to_the_same) {
    compare("tanh", tu_near_tanh, whole_tanh);
}

TEST(sigmoid_of_every_number_rounds_to_the_same) {
    compare("sigmoid", tu_near_sigmoid, whole_sigmoid);
}
