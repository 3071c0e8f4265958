/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows that fit into registers: read once, all of a thread's loads on their way before the first is used. The sums are
 * those of rows.cuh, bit for bit: of 32 lanes, lane l has the elements l, l + 32, l + 64, …, and lanes are added by
 * halves. A thread has WIDTH neighbouring lanes, which it reads at once, so that a row has 32 / WIDTH threads. SLOTS is
 * how many elements a lane has: rows have 32 SLOTS elements.
 *
 * Only a GPU has registers to speak of: the stand-in of the tests runs the kernels of rows.cu instead, whose bits these
 * have.
 */
#ifndef TU_TENSOR_CUDA_HELD_CUH
#define TU_TENSOR_CUDA_HELD_CUH

#include "rows.cuh"

#ifdef __CUDACC__

template <class Lying, int WIDTH, int SLOTS> struct held {
    enum {
        TEAM = 32 / WIDTH, /* threads of a row */
        ROWS = THREADS_OF_ROWS / 32
    };
    struct alignas(sizeof(Lying) * WIDTH) pack {
        Lying at[WIDTH];
    };
    int32_t first; /* of this thread's elements */

    __device__ __forceinline__ held() : first((int32_t)(threadIdx.x % TEAM * WIDTH)) {}
    MEMBER int64_t row() {
        return BLOCK * ROWS + threadIdx.x / TEAM;
    }
    __device__ __forceinline__ void read(const Lying *from, pack *into) const {
        UNROLL
        for (int slot = 0; slot < SLOTS; slot++)
            into[slot] = *(const pack *)(from + first + 32 * slot);
    }
    __device__ __forceinline__ void write(Lying *to, int slot, const pack &x) const {
        *(pack *)(to + first + 32 * slot) = x;
    }
    /* The lanes folded by halves, in the order of team<>::add and largest; the same for all threads of the row. */
    template <class Fold> MEMBER float folded(float *lane, Fold fold) {
        const unsigned all = 0xffffffffu; /* whole warps run: rows that are not there are folded, too, and not stored */
        UNROLL
        for (int half = TEAM / 2; half > 0; half /= 2) {
            UNROLL
            for (int beside = 0; beside < WIDTH; beside++)
                lane[beside] = fold(lane[beside], __shfl_down_sync(all, lane[beside], half, TEAM));
        }
        UNROLL
        for (int half = WIDTH / 2; half > 0; half /= 2) {
            UNROLL
            for (int beside = 0; beside < half; beside++)
                lane[beside] = fold(lane[beside], lane[beside + half]);
        }
        return __shfl_sync(all, lane[0], 0, TEAM);
    }
    MEMBER float added(float *lane) {
        return folded(lane, [](float own, float other) { return own + other; });
    }
    MEMBER float largest(float *lane) {
        return folded(lane, [](float own, float other) { return math<float>::greater(other, own); });
    }
    /* Slot slot of a weight or a bias, which lies as the rows do, or in f32. */
    template <bool WIDE> __device__ __forceinline__ void weights(uint64_t from, int slot, float *into) const {
        struct alignas(4 * WIDTH) floats {
            float at[WIDTH];
        };
        int32_t i = first + 32 * slot;
        if (WIDE) {
            floats found = *(const floats *)((const float *)(uintptr_t)from + i);
            UNROLL
            for (int beside = 0; beside < WIDTH; beside++)
                into[beside] = found.at[beside];
        } else {
            pack found = *(const pack *)((const Lying *)(uintptr_t)from + i);
            UNROLL
            for (int beside = 0; beside < WIDTH; beside++)
                into[beside] = Lying::widen(found.at[beside]);
        }
    }
    static __device__ __forceinline__ void clear(float *lane, float with) {
        UNROLL
        for (int beside = 0; beside < WIDTH; beside++)
            lane[beside] = with;
    }
};

#define HELD_EACH(slot, beside)              \
    UNROLL                                   \
    for (int slot = 0; slot < SLOTS; slot++) \
        UNROLL                               \
    for (int beside = 0; beside < WIDTH; beside++)

template <int WIDTH, int SLOTS> HERE void softmax_held(const tu_launch_rows &args) {
    typedef held<lying_f32, WIDTH, SLOTS> rows;
    rows own;
    int64_t row = rows::row(), asked = row < args.count ? row : args.count - 1;
    typename rows::pack x[SLOTS];
    float lane[WIDTH];
    own.read((const lying_f32 *)(uintptr_t)args.x + asked * args.size, x);
    rows::clear(lane, -INFINITY);
    HELD_EACH(slot, beside) lane[beside] = math<float>::greater(x[slot].at[beside].bits, lane[beside]);
    float top = rows::largest(lane);
    top = top == -INFINITY ? 0.0f : top;
    rows::clear(lane, 0);
    HELD_EACH(slot, beside) {
        x[slot].at[beside].bits = math<float>::exp_below(math<float>::fma(x[slot].at[beside].bits, 1.0f, -top));
        lane[beside] += x[slot].at[beside].bits;
    }
    float factor = 1 / rows::added(lane);
    if (row >= args.count)
        return;
    HELD_EACH(slot, beside) x[slot].at[beside].bits = x[slot].at[beside].bits * factor;
    UNROLL
    for (int slot = 0; slot < SLOTS; slot++)
        own.write((lying_f32 *)(uintptr_t)args.out + row * args.size, slot, x[slot]);
}

template <class Lying, int WIDTH, int SLOTS, bool WIDE, bool BIAS> HERE void norm_held_by(const tu_launch_rows &args) {
    typedef held<Lying, WIDTH, SLOTS> rows;
    rows own;
    int64_t row = rows::row(), asked = row < args.count ? row : args.count - 1;
    typename rows::pack x[SLOTS], result;
    float lane[WIDTH], mean = 0;
    own.read((const Lying *)(uintptr_t)args.x + asked * args.size, x);
    if (args.centred) {
        rows::clear(lane, 0);
        HELD_EACH(slot, beside) lane[beside] = lane[beside] + Lying::widen(x[slot].at[beside]);
        mean = rows::added(lane) / (float)args.size;
    }
    rows::clear(lane, 0);
    HELD_EACH(slot, beside) {
        float away = Lying::widen(x[slot].at[beside]) - mean;
        lane[beside] = math<float>::fma(away, away, lane[beside]);
    }
    float square = rows::added(lane) / (float)args.size, scale = 1 / math<float>::sqrt(square + (float)args.epsilon);
    if (row >= args.count)
        return;
    UNROLL
    for (int slot = 0; slot < SLOTS; slot++) {
        float weight[WIDTH], bias[WIDTH];
        own.template weights<WIDE>(args.weight, slot, weight);
        if (BIAS)
            own.template weights<WIDE>(args.bias, slot, bias);
        UNROLL
        for (int beside = 0; beside < WIDTH; beside++) { /* as weighted() of rows.cu */
            float value = (Lying::widen(x[slot].at[beside]) - mean) * scale;
            value = BIAS ? math<float>::fma(value, weight[beside], bias[beside]) : value * weight[beside];
            result.at[beside] = Lying::narrow(value);
        }
        own.write((Lying *)(uintptr_t)args.out + row * args.size, slot, result);
    }
    if (own.first == 0) {
        ((float *)(uintptr_t)args.mean)[row] = mean;
        ((float *)(uintptr_t)args.scale)[row] = scale;
    }
}

template <class Lying, int WIDTH, int SLOTS> HERE void norm_held(const tu_launch_rows &args) {
    if (args.wide_weight)
        args.bias != 0 ? norm_held_by<Lying, WIDTH, SLOTS, true, true>(args)
                       : norm_held_by<Lying, WIDTH, SLOTS, true, false>(args);
    else
        args.bias != 0 ? norm_held_by<Lying, WIDTH, SLOTS, false, true>(args)
                       : norm_held_by<Lying, WIDTH, SLOTS, false, false>(args);
}

template <class Lying, int WIDTH, int SLOTS, bool WIDE> HERE void norm_backward_held_by(const tu_launch_rows &args) {
    typedef held<Lying, WIDTH, SLOTS> rows;
    rows own;
    int64_t row = rows::row(), asked = row < args.count ? row : args.count - 1;
    typename rows::pack x[SLOTS], grad[SLOTS], result;
    float plain[WIDTH], crossed[WIDTH];
    own.read((const Lying *)(uintptr_t)args.other + asked * args.size, grad);
    own.read((const Lying *)(uintptr_t)args.x + asked * args.size, x);
    float mean = ((const float *)(uintptr_t)args.mean)[asked], scale = ((const float *)(uintptr_t)args.scale)[asked];
    rows::clear(plain, 0);
    rows::clear(crossed, 0);
    UNROLL
    for (int slot = 0; slot < SLOTS; slot++) {
        float weight[WIDTH];
        own.template weights<WIDE>(args.weight, slot, weight);
        UNROLL
        for (int beside = 0; beside < WIDTH; beside++) {
            float gw = Lying::widen(grad[slot].at[beside]) * weight[beside];
            plain[beside] += gw;
            crossed[beside] = math<float>::fma(gw, Lying::widen(x[slot].at[beside]) - mean, crossed[beside]);
        }
    }
    float of_plain = rows::added(plain), of_crossed = rows::added(crossed);
    float of_g = args.centred ? of_plain / (float)args.size : 0;
    float of_gx = of_crossed * scale * scale / (float)args.size;
    if (row >= args.count)
        return;
    UNROLL
    for (int slot = 0; slot < SLOTS; slot++) {
        float weight[WIDTH];
        own.template weights<WIDE>(args.weight, slot, weight);
        UNROLL
        for (int beside = 0; beside < WIDTH; beside++) {
            float gw = Lying::widen(grad[slot].at[beside]) * weight[beside];
            result.at[beside] =
                Lying::narrow(scale * math<float>::fma(Lying::widen(x[slot].at[beside]) - mean, -of_gx, gw - of_g));
        }
        own.write((Lying *)(uintptr_t)args.out + row * args.size, slot, result);
    }
}

template <class Lying, int WIDTH, int SLOTS> HERE void norm_backward_held(const tu_launch_rows &args) {
    if (args.wide_weight)
        norm_backward_held_by<Lying, WIDTH, SLOTS, true>(args);
    else
        norm_backward_held_by<Lying, WIDTH, SLOTS, false>(args);
}

#endif

/* A kernel for four rows of 32 slots elements, with weights; a bias, where there is one, lies as those do. */
#ifdef __CUDACC__
#define HELD_KERNEL(name, suffix, width, slots, ...)                                          \
    extern "C" __global__ void __launch_bounds__(THREADS_OF_ROWS / width)                     \
        kernel_##name##_held##slots##_##suffix(const __grid_constant__ tu_launch_rows args) { \
        name##_held<__VA_ARGS__ width, slots>(args);                                          \
    }
#else
#define HELD_KERNEL(name, suffix, width, slots, ...)               \
    KERNEL(name##_held##slots##_##suffix, tu_launch_rows) {        \
        emulated::here.threads = THREADS_OF_ROWS;                  \
        SHARED float lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS]; \
        name<float HELD_LYING(__VA_ARGS__)>(args, lane, kept);     \
    }
#define HELD_LYING(...) __VA_OPT__(HELD_LYING_FIRST(__VA_ARGS__))
#define HELD_LYING_FIRST(lying, ...) , lying
#endif
#define HELD_KERNELS(name, suffix, width, ...)        \
    HELD_KERNEL(name, suffix, width, 8, __VA_ARGS__)  \
    HELD_KERNEL(name, suffix, width, 16, __VA_ARGS__) \
    HELD_KERNEL(name, suffix, width, 24, __VA_ARGS__) \
    HELD_KERNEL(name, suffix, width, 32, __VA_ARGS__)

#endif
