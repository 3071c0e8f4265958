/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of attention have in common: where heads lie, and, for the stand-in of the driver, the same results
 * by their definition, one row of a block after the other.
 */
#ifndef TU_TENSOR_CUDA_ATTENTION_CUH
#define TU_TENSOR_CUDA_ATTENTION_CUH

#include "kernel.cuh"

#define ROWS TU_HEAD_ROWS
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

template <class Element>
HERE const Element *head_of(const tu_launch_tiles &args, const tu_launch_heads &of, int64_t head) {
    return (const Element *)(uintptr_t)of.data + head / args.inner * of.outer_step + head % args.inner * of.inner_step;
}

#ifdef __CUDACC__
HERE uint32_t place_in_shared(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}
HERE float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
/* Sixteen bytes on their way to shared memory; zeros where `there` is false. */
HERE void send(void *to, const void *from, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place_in_shared(to)), "l"(from), "r"(bytes)
                 : "memory");
}
HERE void end_of_batch() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> HERE void wait_for_batches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
/* Over the four threads of a row. */
HERE float add_four(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

HERE float largest_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
#else
template <class Lying> struct by_definition { typedef Lying lying; };
template <class Type>
HERE float at(const tu_launch_tiles &args, const tu_launch_heads &of, int64_t head, int64_t row, int column) {
    return Type::lying::widen(head_of<typename Type::lying>(args, of, head)[row * of.row + column]);
}
template <class Type>
HERE void put(const tu_launch_tiles &args, const tu_launch_heads &of, int64_t head, int64_t row, int column, float x) {
    typedef typename Type::lying lying;
    ((lying *)(uintptr_t)head_of<lying>(args, of, head))[row * of.row + column] = lying::narrow(x);
}
template <class Type, int DEPTH>
HERE float dot_of(const tu_launch_tiles &args, const tu_launch_heads &left, int64_t row, const tu_launch_heads &right,
                  int64_t column, int64_t head) {
    typedef typename Type::lying lying;
    const lying *x = head_of<lying>(args, left, head) + row * left.row;
    const lying *y = head_of<lying>(args, right, head) + column * right.row;
    float sum = 0;
    for (int k = 0; k < DEPTH; k++)
        sum += lying::widen(x[k]) * lying::widen(y[k]);
    return sum;
}
HERE int64_t seen_by(const tu_launch_tiles &args, int64_t row) {
    return args.causal && row + 1 < args.keys ? row + 1 : args.keys;
}

template <class Type, int DEPTH, int> HERE void forward(const tu_launch_tiles &args) {
    int64_t head = BLOCK % args.heads, begin = BLOCK / args.heads * ROWS;
    for (int64_t row = begin; row < begin + ROWS && row < args.queries; row++) {
        float top = -INFINITY, all = 0, sums[DEPTH] = { 0 };
        for (int64_t key = 0; key < seen_by(args, row); key++)
            top = fmaxf(top, args.scale * dot_of<Type, DEPTH>(args, args.query, row, args.key, key, head));
        for (int64_t key = 0; key < seen_by(args, row); key++) {
            float share = expf(args.scale * dot_of<Type, DEPTH>(args, args.query, row, args.key, key, head) - top);
            all += share;
            for (int k = 0; k < DEPTH; k++)
                sums[k] += share * at<Type>(args, args.value, head, key, k);
        }
        for (int k = 0; k < DEPTH; k++)
            put<Type>(args, args.out, head, row, k, sums[k] / all);
        ((float *)(uintptr_t)args.sums)[head * args.queries + row] = top + logf(all);
    }
}

/* The share of a key in a row, and the gradient of its score. */
template <class Type, int DEPTH>
HERE float slope_of(const tu_launch_tiles &args, int64_t row, int64_t key, int64_t head, float *share) {
    *share = expf(args.scale * dot_of<Type, DEPTH>(args, args.query, row, args.key, key, head) -
                  ((const float *)(uintptr_t)args.sums)[head * args.queries + row]);
    return *share * (dot_of<Type, DEPTH>(args, args.grad, row, args.value, key, head) -
                     ((const float *)(uintptr_t)args.dots)[head * args.queries + row]);
}

template <class Type, int DEPTH, int> HERE void backward_queries(const tu_launch_tiles &args) {
    int64_t head = BLOCK % args.heads, begin = BLOCK / args.heads * ROWS;
    for (int64_t row = begin; row < begin + ROWS && row < args.queries; row++) {
        float sums[DEPTH] = { 0 }, share;
        ((float *)(uintptr_t)args.dots)[head * args.queries + row] =
            dot_of<Type, DEPTH>(args, args.grad, row, args.out, row, head);
        for (int64_t key = 0; key < seen_by(args, row); key++) {
            float slope = slope_of<Type, DEPTH>(args, row, key, head, &share);
            for (int k = 0; k < DEPTH; k++)
                sums[k] += slope * at<Type>(args, args.key, head, key, k);
        }
        for (int k = 0; k < DEPTH; k++)
            put<Type>(args, args.of_query, head, row, k, sums[k] * args.scale);
    }
}

template <class Type, int DEPTH, int> HERE void backward_keys(const tu_launch_tiles &args) {
    int64_t head = BLOCK % args.heads, begin = BLOCK / args.heads * ROWS;
    for (int64_t key = begin; key < begin + ROWS && key < args.keys; key++) {
        float of_key[DEPTH] = { 0 }, of_value[DEPTH] = { 0 }, share;
        for (int64_t row = args.causal ? key : 0; row < args.queries; row++) {
            float slope = slope_of<Type, DEPTH>(args, row, key, head, &share);
            for (int k = 0; k < DEPTH; k++) {
                of_key[k] += slope * at<Type>(args, args.query, head, row, k);
                of_value[k] += share * at<Type>(args, args.grad, head, row, k);
            }
        }
        for (int k = 0; k < DEPTH; k++) {
            put<Type>(args, args.of_key, head, key, k, of_key[k] * args.scale);
            put<Type>(args, args.of_value, head, key, k, of_value[k]);
        }
    }
}
#endif

#endif
