/* SPDX-License-Identifier: Apache-2.0
 *
 * f32 to and from the 16-bit floats, with the rounding of base/float16.h, which also does what is left at the end.
 */
#if TU_LANES_F32 > 1
typedef uint16_t tu_halves_u16 __attribute__((vector_size(VECTOR / 2)));

/* To nearest even; a NaN stays one. */
TU_LANE void narrow_bf16_lanes(const float *from, uint16_t *to) {
    vec_u32 bits = (vec_u32)tu_load_f32(from), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vec_u32 of_nan = (bits >> 16) | 0x40;
    vec_i32 is_nan = (vec_i32)(bits & 0x7fffffff) > 0x7f800000;
    vec_u32 result = (vec_u32)is_nan & of_nan, other = ~(vec_u32)is_nan & rounded;
    tu_halves_u16 narrow = __builtin_convertvector(result | other, tu_halves_u16);
    memcpy(to, &narrow, sizeof narrow);
}
TU_LANE void widen_bf16_lanes(const uint16_t *from, float *to) {
    tu_halves_u16 narrow;
    memcpy(&narrow, from, sizeof narrow);
    tu_store_f32(to, (vec_f32)(__builtin_convertvector(narrow, vec_u32) << 16));
}
#define EACH_REGISTER(call)                              \
    for (; i + TU_LANES_F32 <= count; i += TU_LANES_F32) \
    call
#else
#define EACH_REGISTER(call)
#endif

static void narrow_bf16(const void *in, void *out, int64_t count) {
    const float *from = in;
    uint16_t *to = out;
    int64_t i = 0;
    EACH_REGISTER(narrow_bf16_lanes(from + i, to + i);)
    for (; i < count; i++)
        to[i] = tu_f32_to_bf16(from[i]);
}
static void widen_bf16(const void *in, void *out, int64_t count) {
    const uint16_t *from = in;
    float *to = out;
    int64_t i = 0;
    EACH_REGISTER(widen_bf16_lanes(from + i, to + i);)
    for (; i < count; i++)
        to[i] = tu_bf16_to_f32(from[i]);
}
static void narrow_f16(const void *in, void *out, int64_t count) {
    const float *from = in;
    uint16_t *to = out;
    int64_t i = 0;
    EACH_REGISTER(tu_narrow_f16(from + i, to + i);)
    for (; i < count; i++)
        to[i] = tu_f32_to_f16(from[i]);
}
static void widen_f16(const void *in, void *out, int64_t count) {
    const uint16_t *from = in;
    float *to = out;
    int64_t i = 0;
    EACH_REGISTER(tu_widen_f16(from + i, to + i);)
    for (; i < count; i++)
        to[i] = tu_f16_to_f32(from[i]);
}
#undef EACH_REGISTER
