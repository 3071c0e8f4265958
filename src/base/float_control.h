/* SPDX-License-Identifier: Apache-2.0
 *
 * The floating-point control word: rounding to nearest, denormals kept, traps masked, whatever the caller has set.
 *
 *     uint64_t control = tu_float_control_enter();
 *     … arithmetic …
 *     tu_float_control_leave(control);
 *
 * Reading it is cheap; it is written only when it differs from the default, which it hardly ever does.
 */
#ifndef TU_BASE_FLOAT_CONTROL_H
#define TU_BASE_FLOAT_CONTROL_H

#include <stdint.h>

#if defined(__x86_64__)

#include <xmmintrin.h>

/* MXCSR: bits 0-5 are the sticky exception flags, which do not change results. */
#define TU_FLOAT_CONTROL_DEFAULT 0x1f80u
#define TU_FLOAT_CONTROL_FLAGS 0x3fu

static inline uint64_t tu_float_control_enter(void) {
    uint64_t control = _mm_getcsr();
    if ((control & ~(uint64_t)TU_FLOAT_CONTROL_FLAGS) != TU_FLOAT_CONTROL_DEFAULT)
        _mm_setcsr(TU_FLOAT_CONTROL_DEFAULT);
    __asm__ __volatile__("" ::: "memory"); /* no load, and so no arithmetic on it, moves above */
    return control;
}

static inline void tu_float_control_leave(uint64_t control) {
    __asm__ __volatile__("" ::: "memory"); /* no store of a result moves below */
    if ((control & ~(uint64_t)TU_FLOAT_CONTROL_FLAGS) != TU_FLOAT_CONTROL_DEFAULT)
        _mm_setcsr((unsigned)control);
}

#elif defined(__aarch64__)

/* FPCR: all zero is round to nearest, denormals kept, no traps, half precision as in IEEE 754. */
static inline uint64_t tu_float_control_enter(void) {
    uint64_t control;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(control)::"memory");
    if (control != 0)
        __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
    return control;
}

static inline void tu_float_control_leave(uint64_t control) {
    if (control != 0)
        __asm__ __volatile__("msr fpcr, %0" ::"r"(control) : "memory");
}

#else
#error "Tutti runs on x86-64 and arm64"
#endif

#endif
