/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators: each row's expression of operators.def, for any layout and type, and for dense floats.
 *
 *     kernel_add_f32           any types and strides, computed in f32; f64, i64 and u64 likewise
 *     kernel_add_dense_bf16    all operands dense and of that type, or one element for all
 */
#ifndef TU_TENSOR_CUDA_POINTWISE_CUH
#define TU_TENSOR_CUDA_POINTWISE_CUH

#include "kernel.cuh"

#include "tensor/dialect.h"
#include "tensor/words.h"

HERE int64_t whole_number(double number) {
    return number >= 0x1p63 ? INT64_MAX : number < -0x1p63 ? INT64_MIN : number != number ? 0 : (int64_t)number;
}

template <class F, class T> HERE void pointwise(const tu_launch_loop &args) {
    EACH_ELEMENT(i, args.total) {
        places at = places_of(args, i);
        T in[TU_LAUNCH_OPERANDS - 1];
        UNROLL
        for (int k = 1; k < TU_LAUNCH_OPERANDS; k++) {
            if (k >= F::OPERANDS)
                continue;
            in[k - 1] = args.at[k].literal ? computed<T>::of_bits(args.at[k].data)
                                           : load_as<T>(place_of(args, k, at), args.at[k].dtype);
        }
        store_as<T>(F::apply(in, args.numbers), place_of(args, 0, at), args.at[0].dtype);
    }
}

/* Sixteen bytes at a time; the last ones singly. Some operands are one element for all. */
template <class F, class S, class T> HERE void pointwise_dense(const tu_launch_dense &args) {
    enum {
        WIDTH = 16 / sizeof(S)
    };
    struct alignas(16) pack {
        S at[WIDTH];
    };
    T repeated[TU_LAUNCH_OPERANDS - 1];
    bool repeats[TU_LAUNCH_OPERANDS - 1];
    UNROLL
    for (int k = 1; k < TU_LAUNCH_OPERANDS; k++) {
        if (k >= F::OPERANDS)
            continue;
        bool literal = args.literals >> k & 1;
        repeats[k - 1] = literal || args.repeated >> k & 1;
        if (repeats[k - 1])
            repeated[k - 1] =
                literal ? computed<T>::of_bits(args.data[k]) : S::widen(*(const S *)(uintptr_t)args.data[k]);
    }
    int64_t packs = args.total / WIDTH, rest = args.total - packs * WIDTH;
    EACH_ELEMENT(i, packs + rest) {
        bool full = i < packs;
        int64_t first = full ? i * WIDTH : packs * WIDTH + (i - packs);
        pack read[TU_LAUNCH_OPERANDS - 1], result;
        UNROLL
        for (int k = 1; k < TU_LAUNCH_OPERANDS; k++) {
            if (k >= F::OPERANDS || repeats[k - 1])
                continue;
            const S *from = (const S *)(uintptr_t)args.data[k] + first;
            if (full)
                read[k - 1] = *(const pack *)from;
            else
                read[k - 1].at[0] = *from;
        }
        UNROLL
        for (int lane = 0; lane < WIDTH; lane++) {
            T in[TU_LAUNCH_OPERANDS - 1];
            UNROLL
            for (int k = 1; k < TU_LAUNCH_OPERANDS; k++)
                if (k < F::OPERANDS)
                    in[k - 1] = repeats[k - 1] ? repeated[k - 1] : S::widen(read[k - 1].at[lane]);
            if (lane == 0 || full)
                result.at[lane] = S::narrow(F::apply(in, args.numbers));
        }
        S *to = (S *)(uintptr_t)args.data[0] + first;
        if (full)
            *(pack *)to = result;
        else
            *to = result.at[0];
    }
}

/* An expression as a type with one function. */
#define TU_VARIABLE(name) const TYPE name = *in++;
#define TU_CONSTANT(name) const TYPE name = ATTRIBUTE(*numbers++);
#define TU_OPERAND(context, word) TU_OPERAND_OF word
#define TU_OPERAND_OF(parameter, member, place, input, ...) TU_OPERAND_COUNT(input)
#define TU_OPERAND_COUNT(...) __VA_OPT__(+1)
#define EXPRESSION(name, suffix, arguments, expression)               \
    struct name##_##suffix {                                          \
        enum {                                                        \
            OPERANDS = 1 TU_EACH(TU_OPERAND, , TU_NOTHING, arguments) \
        };                                                            \
        MEMBER TYPE apply(const TYPE *in, const double *numbers) {    \
            TU_EACH(TU_LOAD, , TU_NOTHING, arguments)                 \
            (void)in;                                                 \
            (void)numbers;                                            \
            return expression;                                        \
        }                                                             \
    };
#define EXPRESSION_WITH(...) EXPRESSION(__VA_ARGS__)
#define ANY_KERNEL(name, suffix)                \
    KERNEL(name##_##suffix, tu_launch_loop) {   \
        pointwise<name##_##suffix, TYPE>(args); \
    }
#define ANY_KERNEL_WITH(...) ANY_KERNEL(__VA_ARGS__)
#define DENSE_KERNEL(name, suffix, lying)                            \
    KERNEL(name##_dense_##lying, tu_launch_dense) {                  \
        pointwise_dense<name##_##suffix, lying_##lying, TYPE>(args); \
    }

#endif
