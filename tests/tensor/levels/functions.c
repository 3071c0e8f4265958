/* SPDX-License-Identifier: Apache-2.0 */
#include "functions.h"

#include TU_LEVEL_HEADER
#include "tensor/kernel/elementary.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

#define DEFINE(name, suffix, type, lanes, call)                                        \
    static void name##_##suffix(const type *x, const type *y, type *out, long count) { \
        (void)y;                                                                       \
        for (long i = 0; i < count; i += lanes)                                        \
            tu_store_##suffix(out + i, tu_##name##_##suffix call);                     \
    }
#define ONE(name)                                                \
    DEFINE(name, f32, float, TU_LANES_F32, (tu_load_f32(x + i))) \
    DEFINE(name, f64, double, TU_LANES_F64, (tu_load_f64(x + i)))
#define TWO(name)                                                                    \
    DEFINE(name, f32, float, TU_LANES_F32, (tu_load_f32(x + i), tu_load_f32(y + i))) \
    DEFINE(name, f64, double, TU_LANES_F64, (tu_load_f64(x + i), tu_load_f64(y + i)))
#include "functions.def"

#undef ONE
#undef TWO
#define ONE(name) { #name, name##_f32, name##_f64 },
#define TWO ONE
const test_function PASTE(test_functions_, TU_LEVEL)[] = {
#include "functions.def"
    { 0 }
};
