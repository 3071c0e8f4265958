/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of 16 by 16 by 16 elements by a warp, of matrices in shared memory, as PTX has them from compute capability
 * 8.0 on. Which lane has which element is the instructions' own business. The words of CUDA C for the same (mma.h) do
 * not see that bf16 lies in shared memory, and read it by many small loads.
 */
#ifndef TU_TENSOR_CUDA_TOGETHER_WMMA_CUH
#define TU_TENSOR_CUDA_TOGETHER_WMMA_CUH

#include "together_words.cuh"

/* What a lane has of sixteen rows of the left matrix or sixteen columns of the right one, and of their products. */
template <int Kind> struct sixteen { uint32_t of[Kind == BF16 ? 4 : 8]; };
struct sums {
    float of[8];
};

/* clang-format off */
#define FOUR(access, x) access(x[0]), access(x[1]), access(x[2]), access(x[3])
#define EIGHT(access, x) FOUR(access, x), access(x[4]), access(x[5]), access(x[6]), access(x[7])
#define LOAD_BF16(matrix, order)                                                                               \
    asm volatile("wmma.load." matrix ".sync.aligned." order ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;" \
                 : FOUR("=r", to.of) : "r"(address), "r"(distance) : "memory")
#define LOAD_F16(matrix, order)                                                                              \
    asm volatile("wmma.load." matrix ".sync.aligned." order ".m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, " \
                 "%6, %7}, [%8], %9;"                                                                        \
                 : EIGHT("=r", to.of) : "r"(address), "r"(distance) : "memory")
#define SUMS "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define MULTIPLY_BF16(order)                                                                             \
    asm("wmma.mma.sync.aligned.row." order ".m16n16k16.f32.bf16.bf16.f32 " SUMS ", {%8, %9, %10, %11}, " \
        "{%12, %13, %14, %15}, " SUMS ";"                                                                \
        : EIGHT("+f", to.of) : FOUR("r", left.of), FOUR("r", right.of))
#define MULTIPLY_F16(order)                                                                             \
    asm("wmma.mma.sync.aligned.row." order ".m16n16k16.f32.f32 " SUMS ", {%8, %9, %10, %11, %12, %13, " \
        "%14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, " SUMS ";"                                \
        : EIGHT("+f", to.of) : EIGHT("r", left.of), EIGHT("r", right.of))
/* clang-format on */

/* From an address that is a multiple of 32 bytes; rows are `distance` elements apart, a multiple of 8. */
template <int Kind> HERE void load_left(sixteen<Kind> &to, const uint16_t *from, int distance) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(from);
    if constexpr (Kind == BF16)
        LOAD_BF16("a", "row");
    else
        LOAD_F16("a", "row");
}

/* The same of a right matrix, whose rows or columns are so far apart. */
template <int Kind, int ByRows> HERE void load_right(sixteen<Kind> &to, const uint16_t *from, int distance) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(from);
    if constexpr (Kind == BF16 && ByRows)
        LOAD_BF16("b", "row");
    else if constexpr (Kind == BF16)
        LOAD_BF16("b", "col");
    else if constexpr (ByRows)
        LOAD_F16("b", "row");
    else
        LOAD_F16("b", "col");
}

/* to += left right. */
template <int Kind, int ByRows>
HERE void multiply_sixteen(sums &to, const sixteen<Kind> &left, const sixteen<Kind> &right) {
    if constexpr (Kind == BF16 && ByRows)
        MULTIPLY_BF16("row");
    else if constexpr (Kind == BF16)
        MULTIPLY_BF16("col");
    else if constexpr (ByRows)
        MULTIPLY_F16("row");
    else
        MULTIPLY_F16("col");
}

/* To an address that is a multiple of 32 bytes, in rows that are `distance` elements apart, a multiple of 4. */
HERE void store_sums(float *to, const sums &from, int distance) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%2, %3, %4, %5, %6, %7, %8, %9}, %1;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "r"(distance), EIGHT("f", from.of)
                 : "memory");
}

#endif
