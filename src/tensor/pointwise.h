/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators: their shape rule and kernel driver, shared by all families. An operator brings kernels for the
 * compute types it is defined on.
 */
#ifndef TU_TENSOR_POINTWISE_H
#define TU_TENSOR_POINTWISE_H

#include <complex.h>
#include <math.h>

#include "tensor/loop.h"
#include "tensor/operator.h"
#include "tensor/vector_math.h"

typedef struct tu_pointwise {
    tu_kernel *f32, *f64, *i64, *u64, *c128; /* u64 NULL: i64's, where wrapping makes them equal. NULL: not defined */
    bool to_float;                           /* integers compute and return f32 */
    bool to_bool;                            /* the result is bool */
    bool condition;                          /* the first input takes no part in promotion */
    bool to_real;                            /* complex inputs give the real type */
} tu_pointwise;

tutti_status tu_pointwise_shape(tu_call *call);
tutti_status tu_pointwise_cpu(tu_call *call);

#define TU_POINTWISE .shape = tu_pointwise_shape, .cpu = tu_pointwise_cpu

/* Kernels of one expression in x (and y, z), with p for the parameters. */
#define TU_KERNEL1(name, type, ...)                                                                   \
    TU_CLONES static void name(const void *const *in, void *out, int64_t count, const tu_params *p) { \
        const type *a = in[0];                                                                        \
        type *o = out;                                                                                \
        (void)p;                                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                         \
            type x = a[i];                                                                            \
            o[i] = __VA_ARGS__;                                                                       \
        }                                                                                             \
    }
#define TU_KERNEL2(name, type, ...)                                                                   \
    TU_CLONES static void name(const void *const *in, void *out, int64_t count, const tu_params *p) { \
        const type *a = in[0], *b = in[1];                                                            \
        type *o = out;                                                                                \
        (void)p;                                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                         \
            type x = a[i], y = b[i];                                                                  \
            o[i] = __VA_ARGS__;                                                                       \
        }                                                                                             \
    }
#define TU_KERNEL3(name, type, ...)                                                                   \
    TU_CLONES static void name(const void *const *in, void *out, int64_t count, const tu_params *p) { \
        const type *a = in[0], *b = in[1], *c = in[2];                                                \
        type *o = out;                                                                                \
        (void)p;                                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                         \
            type x = a[i], y = b[i], z = c[i];                                                        \
            o[i] = __VA_ARGS__;                                                                       \
        }                                                                                             \
    }

typedef double _Complex tu_c128;

#endif
