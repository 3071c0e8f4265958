/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows: softmax and its kin, norms, cross entropy; and on elements: optimizer steps, rotary embedding. Each
 * has the arithmetic of kernel/rows_body.h: sums go over a fixed number of lanes, which are added by halves, so that
 * the bits are those of the CPU. A team of as many threads as there are lanes has a row.
 */
#include "kernel.cuh"

#include "tensor/device.h"
#include "tensor/kernel/elementary.h"

#define THREADS_OF_ROWS 128

template <class T> struct math;
#define MATH(suffix, type)                                  \
    template <> struct math<type> {                         \
        MEMBER type exp(type x) {                           \
            return tu_exp_##suffix(x);                      \
        }                                                   \
        MEMBER type log(type x) {                           \
            return tu_log_##suffix(x);                      \
        }                                                   \
        MEMBER type sqrt(type x) {                          \
            return tu_sqrt_##suffix(x);                     \
        }                                                   \
        MEMBER type fma(type left, type right, type more) { \
            return tu_fma_##suffix(left, right, more);      \
        }                                                   \
        MEMBER type greater(type left, type right) {        \
            return tu_greater_##suffix(left, right);        \
        }                                                   \
    };
MATH(f32, float)
MATH(f64, double)

/* The teams of a block: which row a thread has, and its lane. `lane` is shared by all of them. */
template <class T> struct team {
    enum {
        LANES = 128 / sizeof(T),
        ROWS = THREADS_OF_ROWS / LANES
    };
    MEMBER int64_t row(int self) {
        return BLOCK * ROWS + self / LANES;
    }
    /* What the first lane of the thread's team has. */
    MEMBER T of_team(const T *lane, int self) {
        return lane[self / LANES * LANES];
    }
    MEMBER void add(T *lane) {
        for (int half = LANES / 2; half > 0; half /= 2) {
            EACH_THREAD(self) {
                if (self % LANES < half)
                    lane[self] += lane[self + half];
            }
            SYNC();
        }
    }
    MEMBER void largest(T *lane) {
        for (int half = LANES / 2; half > 0; half /= 2) {
            EACH_THREAD(self) {
                if (self % LANES < half)
                    lane[self] = math<T>::greater(lane[self + half], lane[self]);
            }
            SYNC();
        }
    }
};

#define EACH_OF_ROW(i) for (int64_t i = self % team<T>::LANES; i < args.size; i += team<T>::LANES)
#define ROW_OF(pointer) ((T *)(uintptr_t)(args.pointer) + row * args.size)

/* The largest of each row into lane and, -infinity replaced, into top. */
template <class T> HERE void find_top(const tu_launch_rows &args, T *lane, T *top) {
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = -(T)INFINITY;
        if (row < args.count)
            EACH_OF_ROW(i)
        held = math<T>::greater(ROW_OF(x)[i], held);
        lane[self] = held;
    }
    SYNC();
    team<T>::largest(lane);
    EACH_THREAD(self) {
        T held = team<T>::of_team(lane, self);
        top[self] = held == -(T)INFINITY ? (T)0 : held;
    }
    SYNC();
}

/* The sum of exp(x - top), and the terms into out where they are kept. */
template <class T> HERE void add_exponentials(const tu_launch_rows &args, T *lane, const T *top, bool keeps) {
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count)
            EACH_OF_ROW(i) {
                T power = math<T>::exp(math<T>::fma(ROW_OF(x)[i], (T)1, -top[self]));
                if (keeps)
                    ROW_OF(out)[i] = power;
                held += power;
            }
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
}

template <class T> HERE void softmax(const tu_launch_rows &args, T *lane, T *top) {
    find_top(args, lane, top);
    add_exponentials(args, lane, top, true);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T factor = 1 / team<T>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i)
        ROW_OF(out)[i] = ROW_OF(out)[i] * factor;
    }
}

template <class T> HERE void log_softmax(const tu_launch_rows &args, T *lane, T *top) {
    find_top(args, lane, top);
    add_exponentials(args, lane, top, false);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T all = math<T>::log(team<T>::of_team(lane, self));
        if (row < args.count)
            EACH_OF_ROW(i)
        ROW_OF(out)[i] = ROW_OF(x)[i] - top[self] - all;
    }
}

/* x is the gradient, other the result y: y (grad - sum(grad y)) */
template <class T> HERE void softmax_backward(const tu_launch_rows &args, T *lane, T *) {
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count)
            EACH_OF_ROW(i)
        held = math<T>::fma(ROW_OF(x)[i], ROW_OF(other)[i], held);
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T dot = team<T>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i)
        ROW_OF(out)[i] = ROW_OF(other)[i] * (ROW_OF(x)[i] - dot);
    }
}

/* grad - exp(y) sum(grad) */
template <class T> HERE void log_softmax_backward(const tu_launch_rows &args, T *lane, T *) {
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count)
            EACH_OF_ROW(i)
        held += ROW_OF(x)[i];
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T sum = team<T>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i)
        ROW_OF(out)[i] = math<T>::fma(math<T>::exp(ROW_OF(other)[i]), -sum, ROW_OF(x)[i]);
    }
}

/* ---- norms ---- */

template <class T> HERE void norm(const tu_launch_rows &args, T *lane, T *mean) {
    T *means = (T *)(uintptr_t)args.mean, *scales = (T *)(uintptr_t)args.scale;
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count && args.centred)
            EACH_OF_ROW(i)
        held += ROW_OF(x)[i];
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
    EACH_THREAD(self) {
        mean[self] = args.centred ? team<T>::of_team(lane, self) / (T)args.size : 0;
    }
    SYNC();
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count)
            EACH_OF_ROW(i) {
                T away = ROW_OF(x)[i] - mean[self];
                held = math<T>::fma(away, away, held);
            }
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T square = team<T>::of_team(lane, self) / (T)args.size, scale = 1 / math<T>::sqrt(square + (T)args.epsilon);
        const T *weight = (const T *)(uintptr_t)args.weight, *bias = (const T *)(uintptr_t)args.bias;
        if (row < args.count)
            EACH_OF_ROW(i) {
                T value = (ROW_OF(x)[i] - mean[self]) * scale;
                if (weight != NULL && bias != NULL)
                    value = math<T>::fma(value, weight[i], bias[i]);
                else if (weight != NULL)
                    value = value * weight[i];
                else if (bias != NULL)
                    value = value + bias[i];
                ROW_OF(out)[i] = value;
            }
        if (row < args.count && self % team<T>::LANES == 0) {
            means[row] = mean[self];
            scales[row] = scale;
        }
    }
}

/* other is the gradient of the result, out the gradient of x. */
template <class T> HERE void norm_backward(const tu_launch_rows &args, T *plain, T *crossed) {
    const T *means = (const T *)(uintptr_t)args.mean, *scales = (const T *)(uintptr_t)args.scale;
    const T *weight = (const T *)(uintptr_t)args.weight;
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T of_plain = 0, of_crossed = 0;
        if (row < args.count)
            EACH_OF_ROW(i) {
                T gw = ROW_OF(other)[i] * (weight != NULL ? weight[i] : (T)1);
                of_plain += gw;
                of_crossed = math<T>::fma(gw, ROW_OF(x)[i] - means[row], of_crossed);
            }
        plain[self] = of_plain;
        crossed[self] = of_crossed;
    }
    SYNC();
    team<T>::add(plain);
    team<T>::add(crossed);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        if (row < args.count) {
            T scale = scales[row], of_g = args.centred ? team<T>::of_team(plain, self) / (T)args.size : 0;
            T of_gx = team<T>::of_team(crossed, self) * scale * scale / (T)args.size;
            EACH_OF_ROW(i) {
                T gw = ROW_OF(other)[i];
                if (weight != NULL)
                    gw = gw * weight[i];
                ROW_OF(out)[i] = scale * math<T>::fma(ROW_OF(x)[i] - means[row], -of_gx, gw - of_g);
            }
        }
    }
}

/* The gradients of weight and bias: each thread a column, rows in order. */
template <class T> HERE void norm_columns(const tu_launch_rows &args) {
    const T *means = (const T *)(uintptr_t)args.mean, *scales = (const T *)(uintptr_t)args.scale;
    EACH_ELEMENT(i, args.size) {
        T weight = 0, bias = 0;
        for (int64_t row = 0; row < args.count; row++) {
            T grad = ROW_OF(other)[i], away = ROW_OF(x)[i] - means[row];
            weight = math<T>::fma(grad, away * scales[row], weight);
            bias += grad;
        }
        ((T *)(uintptr_t)args.of_weight)[i] = weight;
        ((T *)(uintptr_t)args.of_bias)[i] = bias;
    }
}

/* ---- cross entropy ---- */

/* The class of a row's target; -1 where it does not count, or is none, which is a fault. */
HERE int64_t target_of(const tu_launch_rows &args, int64_t row) {
    int64_t target = ((const int64_t *)(uintptr_t)args.targets)[row];
    if (target == args.ignore)
        return -1;
    if (target >= 0 && target < args.size)
        return target;
    tu_device_fault *fault = (tu_device_fault *)(uintptr_t)args.fault;
    if (FIRST_TO_SET(&fault->operation, -1)) {
        fault->position = row;
        fault->index = target;
        fault->limit = args.size;
        FENCE();
        fault->operation = TU_INDEX_TARGET;
    }
    return -1;
}

/* The logarithm of each row's sum of exponentials, as its largest element and what is to be added, and its loss, which
 * is 0 where it does not count. */
template <class T> HERE void entropy(const tu_launch_rows &args, T *lane, T *top) {
    find_top(args, lane, top);
    add_exponentials(args, lane, top, false);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        if (row < args.count && self % team<T>::LANES == 0) {
            T more = math<T>::log(lane[self]), *sums = (T *)(uintptr_t)args.sums + 2 * row;
            int64_t target = target_of(args, row);
            sums[0] = top[self];
            sums[1] = more;
            ((double *)(uintptr_t)args.losses)[row] =
                target >= 0 ? (double)top[self] - (double)ROW_OF(x)[target] + (double)more : 0;
        }
    }
}

/* The mean of the losses, in order, into out; one thread. */
KERNEL(entropy_mean, tu_launch_rows) {
    EACH_ELEMENT(only, 1) {
        const double *losses = (const double *)(uintptr_t)args.losses;
        const int64_t *targets = (const int64_t *)(uintptr_t)args.targets;
        double sum = 0;
        int64_t counted = 0;
        for (int64_t row = 0; row < args.count; row++) {
            if (targets[row] == args.ignore)
                continue;
            sum += losses[row];
            counted++;
        }
        store_as<double>(sum / (double)counted, (void *)(uintptr_t)args.out, args.dtype);
    }
}

/* other is the gradient, one number; what each row's part is multiplied with goes to `counted`, as f64. */
KERNEL(entropy_share, tu_launch_rows) {
    EACH_ELEMENT(only, 1) {
        const int64_t *targets = (const int64_t *)(uintptr_t)args.targets;
        int64_t counted = 0;
        for (int64_t row = 0; row < args.count; row++)
            counted += targets[row] != args.ignore;
        double grad = load_as<double>((const void *)(uintptr_t)args.other, args.dtype);
        *(double *)(uintptr_t)args.counted = grad / (double)counted;
    }
}

template <class T> HERE void entropy_backward(const tu_launch_rows &args) {
    T share = (T) * (const double *)(uintptr_t)args.counted;
    EACH_ELEMENT(at, args.count * args.size) {
        int64_t row = at / args.size, i = at % args.size;
        int64_t target = target_of(args, row);
        T value = 0;
        if (target >= 0) {
            const T *sums = (const T *)(uintptr_t)args.sums + 2 * row;
            value = math<T>::exp(ROW_OF(x)[i] - sums[0] - sums[1]) * share;
            if (i == target)
                value -= share;
        }
        ROW_OF(out)[i] = value;
    }
}

#define ROW_KERNEL(name, suffix, type)                            \
    KERNEL(name##_##suffix, tu_launch_rows) {                     \
        SHARED type lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS]; \
        name<type>(args, lane, kept);                             \
    }
#define ROW_KERNELS(name)        \
    ROW_KERNEL(name, f32, float) \
    ROW_KERNEL(name, f64, double)
ROW_KERNELS(softmax)
ROW_KERNELS(log_softmax)
ROW_KERNELS(softmax_backward)
ROW_KERNELS(log_softmax_backward)
ROW_KERNELS(norm)
ROW_KERNELS(norm_backward)
ROW_KERNELS(entropy)
#define PLAIN_KERNELS(name)              \
    KERNEL(name##_f32, tu_launch_rows) { \
        name<float>(args);               \
    }                                    \
    KERNEL(name##_f64, tu_launch_rows) { \
        name<double>(args);              \
    }
PLAIN_KERNELS(norm_columns)
PLAIN_KERNELS(entropy_backward)

/* ---- attention ---- */

HERE int64_t visible_keys(const tu_launch_scores &args, int64_t row) {
    int64_t seen = row % args.queries + 1;
    return args.causal && seen < args.size ? seen : args.size;
}

#define EACH_KEY(i, end) for (int64_t i = self % team<T>::LANES; i < (end); i += team<T>::LANES)

/* The scores of a row become shares. */
template <class T> HERE void attention(const tu_launch_scores &args, T *lane, T *top) {
    T sign = args.scale < 0 ? -1 : 1, scale = (T)args.scale * sign;
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = -(T)INFINITY;
        if (row < args.count) {
            const T *x = (const T *)(uintptr_t)args.scores + row * args.size;
            EACH_KEY(i, visible_keys(args, row)) {
                held = math<T>::greater(x[i] * sign, held);
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<T>::largest(lane);
    EACH_THREAD(self) {
        top[self] = team<T>::of_team(lane, self) * scale;
    }
    SYNC();
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count) {
            T *x = (T *)(uintptr_t)args.scores + row * args.size;
            EACH_KEY(i, visible_keys(args, row)) {
                x[i] = math<T>::exp(math<T>::fma(x[i] * sign, scale, -top[self]));
                held += x[i];
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        if (row < args.count) {
            T *x = (T *)(uintptr_t)args.scores + row * args.size, sum = team<T>::of_team(lane, self), share = 1 / sum;
            int64_t seen = visible_keys(args, row);
            EACH_KEY(i, args.size) {
                x[i] = i < seen ? x[i] * share : (T)0;
            }
            if (self % team<T>::LANES == 0)
                ((T *)(uintptr_t)args.sums)[row] = (T)((double)top[self] + (double)math<T>::log(sum));
        }
    }
}

/* Shares again from scores, and the gradients of the shares become those of the scores. */
template <class T> HERE void attention_backward(const tu_launch_scores &args, T *lane, T *) {
    T scale = (T)args.scale;
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        T held = 0;
        if (row < args.count) {
            const T *grad = (const T *)(uintptr_t)args.grad + row * args.width;
            const T *out = (const T *)(uintptr_t)args.out + row * args.width;
            EACH_KEY(i, args.width) {
                held = math<T>::fma(grad[i], out[i], held);
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<T>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<T>::row(self);
        if (row < args.count) {
            T *x = (T *)(uintptr_t)args.scores + row * args.size,
              *slopes = (T *)(uintptr_t)args.slopes + row * args.size;
            T dot = team<T>::of_team(lane, self), sum = ((const T *)(uintptr_t)args.sums)[row];
            int64_t seen = visible_keys(args, row);
            EACH_KEY(i, args.size) {
                T share = i < seen ? math<T>::exp(math<T>::fma(x[i], scale, -sum)) : (T)0;
                x[i] = share;
                slopes[i] = i < seen ? share * (slopes[i] - dot) * scale : (T)0;
            }
        }
    }
}

#define SCORE_KERNEL(name, suffix, type)                          \
    KERNEL(name##_##suffix, tu_launch_scores) {                   \
        SHARED type lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS]; \
        name<type>(args, lane, kept);                             \
    }
SCORE_KERNEL(attention, f32, float)
SCORE_KERNEL(attention, f64, double)
SCORE_KERNEL(attention_backward, f32, float)
SCORE_KERNEL(attention_backward, f64, double)

/* ---- scaled products ---- */

KERNEL(scaled, tu_launch_scaled) {
    const float *product = (const float *)(uintptr_t)args.product, *bias = (const float *)(uintptr_t)args.bias;
    const float *of_rows = (const float *)(uintptr_t)args.row_scales;
    const float *of_columns = (const float *)(uintptr_t)args.column_scales;
    float whole = args.whole != 0 ? *(const float *)(uintptr_t)args.whole : 1;
    EACH_ELEMENT(i, args.rows * args.columns) {
        int64_t row = i / args.columns, column = i % args.columns;
        float value = product[i] * of_rows[row * args.row_step] * of_columns[column * args.column_step];
        value = (value + (bias != NULL ? bias[column] : 0)) * whole;
        store_as<float>(value, (char *)(uintptr_t)args.out + i * bytes_of(args.dtype), args.dtype);
    }
}

/* ---- optimizer steps ---- */

template <class T> HERE void sgd(const tu_launch_step &step, int64_t i) {
    T *parameter = (T *)(uintptr_t)step.parameter + i, *velocity = (T *)(uintptr_t)step.first;
    T old = *parameter, change = math<T>::fma((T)step.decay, old, ((const T *)(uintptr_t)step.gradient)[i]);
    if (velocity != NULL) {
        change = math<T>::fma((T)step.momentum, velocity[i], change);
        velocity[i] = change;
    }
    *parameter = math<T>::fma(-(T)step.rate, change, old);
}

template <class T> HERE void adamw(const tu_launch_step &step, int64_t i) {
    T *parameter = (T *)(uintptr_t)step.parameter + i, *first = (T *)(uintptr_t)step.first + i,
      *second = (T *)(uintptr_t)step.second + i, grad = ((const T *)(uintptr_t)step.gradient)[i];
    T mean = math<T>::fma(grad - *first, (T)(1 - step.beta1), *first);
    T square = math<T>::fma((T)step.beta2, *second, (T)(1 - step.beta2) * grad * grad);
    T root = math<T>::fma(math<T>::sqrt(square), (T)step.correct, (T)step.epsilon);
    T change = -(T)step.rate * (mean / root);
    *first = mean;
    *second = square;
    *parameter = math<T>::fma((T)step.decay, *parameter, change);
}

/* All parameters in a row; a thread finds the one that its element belongs to. */
KERNEL(steps, tu_launch_steps) {
    const tu_launch_step *steps = (const tu_launch_step *)(uintptr_t)args.steps;
    EACH_ELEMENT(i, args.elements) {
        int64_t low = 0, high = args.count;
        while (high - low > 1) {
            int64_t middle = low + (high - low) / 2;
            if (steps[middle].begin <= i)
                low = middle;
            else
                high = middle;
        }
        const tu_launch_step &step = steps[low];
        int64_t at = i - step.begin;
        if (step.adamw && step.wide)
            adamw<double>(step, at);
        else if (step.adamw)
            adamw<float>(step, at);
        else if (step.wide)
            sgd<double>(step, at);
        else
            sgd<float>(step, at);
    }
}

/* ---- rotary embedding ---- */

KERNEL(turn, tu_launch_turn) {
    int64_t half = args.depth / 2;
    EACH_ELEMENT(at, args.rows * half) {
        int64_t row = at / half, i = at % half;
        const double *in = (const double *)(uintptr_t)args.from + row * args.depth;
        double *turned = (double *)(uintptr_t)args.to + row * args.depth;
        double position = (double)((const int64_t *)(uintptr_t)args.position)[row % args.length];
        double wave = tu_pow_f64(args.base, -2.0 * (double)i / (double)args.depth), angle = args.sign * position * wave;
        double cosine = tu_cos_f64(angle), sine = tu_sin_f64(angle);
        turned[i] = in[i] * cosine - in[i + half] * sine;
        turned[i + half] = in[i] * sine + in[i + half] * cosine;
    }
}
