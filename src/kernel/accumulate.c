/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions in parts: what was accumulated so far, unrounded, is a source of the next part. Sums of 16-bit and 8-bit
 * floats are then f32, and every other type is its own accumulator, so a part is an ordinary reduction of accumulators;
 * what stands here is the way in and the way out.
 */
#include <stdint.h>
#include <string.h>

#include "base/float16.h"
#include "base/float_control.h"
#include "kernel/kernel.h"

tutti_dtype tu_accumulator(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
    case TUTTI_BF16:
    case TUTTI_F8_E4M3:
    case TUTTI_F8_E5M2:
        return TUTTI_F32;
    default:
        return dtype;
    }
}

tutti_reduction tu_accumulation(tutti_reduction reduction) {
    return reduction == TUTTI_AVG ? TUTTI_SUM : reduction;
}

#define WIDEN(element, load)                             \
    for (size_t i = 0; i < count; i++) {                 \
        element e;                                       \
        memcpy(&e, (const element *)from + i, sizeof e); \
        float x = load(e);                               \
        memcpy((float *)to + i, &x, sizeof x);           \
    }                                                    \
    return

void tu_widen(void *to, const void *from, size_t count, tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F16:
        WIDEN(uint16_t, tu_f16_to_f32);
    case TUTTI_BF16:
        WIDEN(uint16_t, tu_bf16_to_f32);
    case TUTTI_F8_E4M3:
        WIDEN(uint8_t, tu_e4m3_to_f32);
    case TUTTI_F8_E5M2:
        WIDEN(uint8_t, tu_e5m2_to_f32);
    default:
        if (to != from)
            memcpy(to, from, count * tutti_dtype_size(dtype));
    }
}

/* `to` may be `from` where both have one type. */
#define DIVIDE(type, wide)                            \
    for (size_t i = 0; i < count; i++) {              \
        type x;                                       \
        memcpy(&x, (const type *)from + i, sizeof x); \
        x = (type)((wide)x / (wide)ranks);            \
        memcpy((type *)to + i, &x, sizeof x);         \
    }                                                 \
    return

static void divide(void *to, const void *from, size_t count, tutti_dtype dtype, int ranks) {
    switch (dtype) {
    case TUTTI_C128:
        count *= 2; /* fall through */
    case TUTTI_F64:
        DIVIDE(double, double);
    case TUTTI_C64:
        count *= 2; /* fall through */
    case TUTTI_F32:
        DIVIDE(float, float);
    case TUTTI_I8:
        DIVIDE(int8_t, int64_t);
    case TUTTI_I16:
        DIVIDE(int16_t, int64_t);
    case TUTTI_I32:
        DIVIDE(int32_t, int64_t);
    case TUTTI_I64:
        DIVIDE(int64_t, int64_t);
    case TUTTI_U8:
        DIVIDE(uint8_t, uint64_t);
    case TUTTI_U16:
        DIVIDE(uint16_t, uint64_t);
    case TUTTI_U32:
        DIVIDE(uint32_t, uint64_t);
    case TUTTI_U64:
        DIVIDE(uint64_t, uint64_t);
    default:
        return;
    }
}

#define NARROW(element, store)                             \
    for (size_t i = 0; i < count; i++) {                   \
        float x;                                           \
        memcpy(&x, (const float *)from + i, sizeof x);     \
        element e = store(average ? x / (float)ranks : x); \
        memcpy((element *)to + i, &e, sizeof e);           \
    }                                                      \
    break

void tu_conclude(void *to, const void *from, size_t count, tutti_dtype dtype, tutti_reduction reduction, int ranks) {
    bool average = reduction == TUTTI_AVG;
    uint64_t control = tu_float_control_enter();
    switch (dtype) {
    case TUTTI_F16:
        NARROW(uint16_t, tu_f32_to_f16);
    case TUTTI_BF16:
        NARROW(uint16_t, tu_f32_to_bf16);
    case TUTTI_F8_E4M3:
        NARROW(uint8_t, tu_f32_to_e4m3);
    case TUTTI_F8_E5M2:
        NARROW(uint8_t, tu_f32_to_e5m2);
    default:
        if (average)
            divide(to, from, count, dtype, ranks);
        else if (to != from)
            memcpy(to, from, count * tutti_dtype_size(dtype));
    }
    tu_float_control_leave(control);
}
