/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows: softmax and its kin, norms; and on elements: optimizer steps, rotary embedding. Each has the
 * arithmetic of kernel/rows_body.h: sums go over a fixed number of lanes, which are added by halves, so that the bits
 * are those of the CPU.
 */
#include "rows.cuh"

/* The largest of each row into lane and, -infinity replaced, into top. */
template <class Type> HERE void find_top(const tu_launch_rows &args, Type *lane, Type *top) {
    fold_lanes(args, lane, -(Type)INFINITY,
               [&](Type held, int, int64_t row, int64_t i) { return math<Type>::greater(ROW_OF(x)[i], held); });
    team<Type>::largest(lane);
    EACH_THREAD(self) {
        Type held = team<Type>::of_team(lane, self);
        top[self] = held == -(Type)INFINITY ? (Type)0 : held;
    }
    SYNC();
}

/* The sum of exp(x - top), and the terms into out where they are kept. */
template <class Type> HERE void add_exponentials(const tu_launch_rows &args, Type *lane, const Type *top, bool keeps) {
    add_rows(args, lane, [&](Type held, int self, int64_t row, int64_t i) {
        Type power = math<Type>::exp_below(math<Type>::fma(ROW_OF(x)[i], (Type)1, -top[self]));
        if (keeps)
            ROW_OF(out)[i] = power;
        return held + power;
    });
}

/* Rows that fit are read once: the teams keep theirs. */
#define KEPT_BYTES 8192 /* of a row */
template <class Type> HERE void softmax_kept(const tu_launch_rows &args, Type *lane, Type *top, Type *rows) {
    enum {
        MOST = KEPT_BYTES / sizeof(Type)
    };
    fold_lanes(args, lane, -(Type)INFINITY, [&](Type held, int self, int64_t row, int64_t i) {
        Type value = ROW_OF(x)[i];
        rows[self / team<Type>::LANES * MOST + i] = value;
        return math<Type>::greater(value, held);
    });
    team<Type>::largest(lane);
    EACH_THREAD(self) {
        Type held = team<Type>::of_team(lane, self);
        top[self] = held == -(Type)INFINITY ? (Type)0 : held;
    }
    SYNC();
    add_rows(args, lane, [&](Type held, int self, int64_t, int64_t i) {
        Type &place = rows[self / team<Type>::LANES * MOST + i];
        Type power = math<Type>::exp_below(math<Type>::fma(place, (Type)1, -top[self]));
        place = power;
        return held + power;
    });
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type factor = 1 / team<Type>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i) {
                ROW_OF(out)[i] = rows[self / team<Type>::LANES * MOST + i] * factor;
            }
    }
}

template <class Type> HERE void softmax(const tu_launch_rows &args, Type *lane, Type *top) {
    find_top(args, lane, top);
    add_exponentials(args, lane, top, true);
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type factor = 1 / team<Type>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i) {
                ROW_OF(out)[i] = ROW_OF(out)[i] * factor;
            }
    }
}

template <class Type> HERE void log_softmax(const tu_launch_rows &args, Type *lane, Type *top) {
    find_top(args, lane, top);
    add_exponentials(args, lane, top, false);
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type all = math<Type>::log(team<Type>::of_team(lane, self));
        if (row < args.count)
            EACH_OF_ROW(i) {
                ROW_OF(out)[i] = ROW_OF(x)[i] - top[self] - all;
            }
    }
}

/* x is the gradient, other the result y: y (grad - sum(grad y)) */
template <class Type> HERE void softmax_backward(const tu_launch_rows &args, Type *lane, Type *) {
    add_rows(args, lane, [&](Type held, int, int64_t row, int64_t i) {
        return math<Type>::fma(ROW_OF(x)[i], ROW_OF(other)[i], held);
    });
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type dot = team<Type>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i) {
                ROW_OF(out)[i] = ROW_OF(other)[i] * (ROW_OF(x)[i] - dot);
            }
    }
}

/* grad - exp(y) sum(grad) */
template <class Type> HERE void log_softmax_backward(const tu_launch_rows &args, Type *lane, Type *) {
    add_rows(args, lane, [&](Type held, int, int64_t row, int64_t i) { return held + ROW_OF(x)[i]; });
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type sum = team<Type>::of_team(lane, self);
        if (row < args.count)
            EACH_OF_ROW(i) {
                ROW_OF(out)[i] = math<Type>::fma(math<Type>::exp(ROW_OF(other)[i]), -sum, ROW_OF(x)[i]);
            }
    }
}

/* ---- norms ----
 *
 * Lying is how the rows lie in memory, Type what is computed with: narrow floats are widened as they are read, and
 * rounded once. */

/* Element i of a weight or a bias, which lies as the rows do, or in the type of computing. */
template <class Type, class Lying> HERE Type weight_at(uint64_t weight, int32_t wide, int64_t i) {
    return wide ? ((const Type *)(uintptr_t)weight)[i] : Lying::widen(((const Lying *)(uintptr_t)weight)[i]);
}

/* Element i of a row by its weight and its bias. */
template <class Type, class Lying> HERE Type weighted(const tu_launch_rows &args, Type value, int64_t i) {
    if (args.weight != 0 && args.bias != 0)
        return math<Type>::fma(value, weight_at<Type, Lying>(args.weight, args.wide_weight, i),
                               weight_at<Type, Lying>(args.bias, args.wide_bias, i));
    if (args.weight != 0)
        return value * weight_at<Type, Lying>(args.weight, args.wide_weight, i);
    return args.bias != 0 ? value + weight_at<Type, Lying>(args.bias, args.wide_bias, i) : value;
}

template <class Type, class Lying> HERE void norm(const tu_launch_rows &args, Type *lane, Type *mean) {
    Type *means = (Type *)(uintptr_t)args.mean, *scales = (Type *)(uintptr_t)args.scale;
    if (args.centred)
        add_rows(args, lane,
                 [&](Type held, int, int64_t row, int64_t i) { return held + Lying::widen(LYING_OF(x)[i]); });
    EACH_THREAD(self) {
        mean[self] = args.centred ? team<Type>::of_team(lane, self) / (Type)args.size : 0;
    }
    SYNC();
    add_rows(args, lane, [&](Type held, int self, int64_t row, int64_t i) {
        Type away = Lying::widen(LYING_OF(x)[i]) - mean[self];
        return math<Type>::fma(away, away, held);
    });
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type square = team<Type>::of_team(lane, self) / (Type)args.size,
             scale = 1 / math<Type>::sqrt(square + (Type)args.epsilon);
        if (row < args.count)
            EACH_OF_ROW(i) {
                Type value = (Lying::widen(LYING_OF(x)[i]) - mean[self]) * scale;
                LYING_OF(out)[i] = Lying::narrow(weighted<Type, Lying>(args, value, i));
            }
        if (row < args.count && self % team<Type>::LANES == 0) {
            means[row] = mean[self];
            scales[row] = scale;
        }
    }
}

/* other is the gradient of the result, out the gradient of x. */
template <class Type, class Lying> HERE void norm_backward(const tu_launch_rows &args, Type *plain, Type *crossed) {
    const Type *means = (const Type *)(uintptr_t)args.mean, *scales = (const Type *)(uintptr_t)args.scale;
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type of_plain = 0, of_crossed = 0;
        if (row < args.count)
            EACH_OF_ROW(i) {
                Type gw = Lying::widen(LYING_OF(other)[i]) *
                          (args.weight != 0 ? weight_at<Type, Lying>(args.weight, args.wide_weight, i) : (Type)1);
                of_plain += gw;
                of_crossed = math<Type>::fma(gw, Lying::widen(LYING_OF(x)[i]) - means[row], of_crossed);
            }
        plain[self] = of_plain;
        crossed[self] = of_crossed;
    }
    SYNC();
    team<Type>::add(plain);
    team<Type>::add(crossed);
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        if (row < args.count) {
            Type scale = scales[row], of_g = args.centred ? team<Type>::of_team(plain, self) / (Type)args.size : 0;
            Type of_gx = team<Type>::of_team(crossed, self) * scale * scale / (Type)args.size;
            EACH_OF_ROW(i) {
                Type gw = Lying::widen(LYING_OF(other)[i]);
                if (args.weight != 0)
                    gw = gw * weight_at<Type, Lying>(args.weight, args.wide_weight, i);
                LYING_OF(out)
                [i] = Lying::narrow(scale *
                                    math<Type>::fma(Lying::widen(LYING_OF(x)[i]) - means[row], -of_gx, gw - of_g));
            }
        }
    }
}

/* The gradients of weight and bias, in two steps. Rows are added in parts of TU_NORM_PART, each from 0 on: a thread has
 * a part of WIDTH columns. */
template <class Type, class Lying, int WIDTH> HERE void norm_parts_of(const tu_launch_rows &args) {
    enum {
        AHEAD = 8 /* rows that are on their way before the first is needed */
    };
    struct alignas(sizeof(Lying) * WIDTH) pack {
        Lying at[WIDTH];
    };
    const Type *means = (const Type *)(uintptr_t)args.mean, *scales = (const Type *)(uintptr_t)args.scale;
    int64_t parts = (args.count + TU_NORM_PART - 1) / TU_NORM_PART, columns = args.size / WIDTH;
    Type *of_weight = (Type *)(uintptr_t)args.parts, *of_bias = of_weight + parts * args.size;
    EACH_ELEMENT(at, parts * columns) {
        int64_t part = at / columns, i = (at - part * columns) * WIDTH, begin = part * TU_NORM_PART;
        Type weight[WIDTH], bias[WIDTH];
        UNROLL
        for (int k = 0; k < WIDTH; k++)
            weight[k] = bias[k] = 0;
        for (int64_t first = begin; first < begin + TU_NORM_PART && first < args.count; first += AHEAD) {
            pack grad[AHEAD], x[AHEAD];
            Type mean[AHEAD], scale[AHEAD];
            UNROLL
            for (int k = 0; k < AHEAD; k++) {
                int64_t row = first + k;
                if (row < args.count) {
                    grad[k] = *(const pack *)(LYING_OF(other) + i);
                    x[k] = *(const pack *)(LYING_OF(x) + i);
                    mean[k] = means[row];
                    scale[k] = scales[row];
                }
            }
            UNROLL
            for (int k = 0; k < AHEAD; k++) {
                if (first + k < args.count) {
                    UNROLL
                    for (int lane = 0; lane < WIDTH; lane++) {
                        Type given = Lying::widen(grad[k].at[lane]);
                        Type scaled = (Lying::widen(x[k].at[lane]) - mean[k]) * scale[k];
                        weight[lane] = math<Type>::fma(given, scaled, weight[lane]);
                        bias[lane] += given;
                    }
                }
            }
        }
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            of_weight[part * args.size + i + k] = weight[k];
            of_bias[part * args.size + i + k] = bias[k];
        }
    }
}
template <class Type, class Lying> HERE void norm_parts(const tu_launch_rows &args) {
    const int width = 8 / sizeof(Lying);
    if (((args.x | args.other) & 7) == 0 && args.size % width == 0)
        norm_parts_of<Type, Lying, width>(args);
    else
        norm_parts_of<Type, Lying, 1>(args);
}

/* The parts of each column in order, weights first, then biases. A block has 32 columns: all its threads bring parts of
 * them, and one thread for each column adds these. */
#define COLUMNS 32
#define COLUMN_PARTS 128
template <class Type, class Lying>
HERE void norm_columns(const tu_launch_rows &args, Type (*brought)[COLUMNS], Type *sums) {
    int64_t parts = (args.count + TU_NORM_PART - 1) / TU_NORM_PART, all = parts * args.size;
    const Type *from = (const Type *)(uintptr_t)args.parts;
    EACH_THREAD(self) {
        if (self < COLUMNS)
            sums[self] = 0;
    }
    for (int64_t begin = 0; begin < parts; begin += COLUMN_PARTS) {
        int count = (int)(parts - begin < COLUMN_PARTS ? parts - begin : COLUMN_PARTS);
        EACH_THREAD(self) {
            enum {
                STEP = TU_NORM_THREADS / COLUMNS,
                EACH = COLUMN_PARTS / STEP
            };
            int64_t at = BLOCK * COLUMNS + self % COLUMNS;
            int64_t first = (at < args.size ? at : all + at - args.size) + begin * args.size;
            Type next[EACH];
            UNROLL
            for (int k = 0; k < EACH; k++) {
                int part = self / COLUMNS + k * STEP;
                next[k] = at < 2 * args.size && part < count ? from[first + part * args.size] : (Type)0;
            }
            UNROLL
            for (int k = 0; k < EACH; k++)
                brought[self / COLUMNS + k * STEP][self % COLUMNS] = next[k];
        }
        SYNC();
        EACH_THREAD(self) {
            if (self < COLUMNS) {
                Type sum = sums[self];
                UNROLL_BY_4
                for (int k = 0; k < count; k++)
                    sum += brought[k][self];
                sums[self] = sum;
            }
        }
        SYNC();
    }
    EACH_THREAD(self) {
        int64_t at = BLOCK * COLUMNS + self;
        if (self < COLUMNS && at < 2 * args.size) {
            bool bias = at >= args.size;
            uint64_t to = bias ? args.of_bias : args.of_weight;
            int64_t i = bias ? at - args.size : at;
            if (args.wide_weight)
                ((Type *)(uintptr_t)to)[i] = sums[self];
            else
                ((Lying *)(uintptr_t)to)[i] = Lying::narrow(sums[self]);
        }
    }
}

#include "held.cuh"
#define ROW_KERNEL(name, suffix, type)                            \
    KERNEL(name##_##suffix, tu_launch_rows) {                     \
        SHARED type lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS]; \
        name<type>(args, lane, kept);                             \
    }
#define ROW_KERNELS(name)        \
    ROW_KERNEL(name, f32, float) \
    ROW_KERNEL(name, f64, double)
ROW_KERNELS(softmax)
#define KEPT_KERNEL(suffix, type)                                       \
    KERNEL(softmax_kept_##suffix, tu_launch_rows) {                     \
        SHARED type lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS];       \
        SHARED type rows[team<type>::ROWS * KEPT_BYTES / sizeof(type)]; \
        softmax_kept<type>(args, lane, kept, rows);                     \
    }
KEPT_KERNEL(f32, float)
ROW_KERNELS(log_softmax)
ROW_KERNELS(softmax_backward)
ROW_KERNELS(log_softmax_backward)
LYING_KERNELS(norm)
LYING_KERNELS(norm_backward)
HELD_KERNELS(softmax, f32, TU_HELD_WIDTH(4))
HELD_KERNELS(norm, f32, TU_HELD_WIDTH(4), lying_f32, )
HELD_KERNELS(norm, bf16, TU_HELD_WIDTH(2), lying_bf16, )
HELD_KERNELS(norm, f16, TU_HELD_WIDTH(2), lying_f16, )
HELD_KERNELS(norm_backward, f32, TU_HELD_WIDTH(4), lying_f32, )
HELD_KERNELS(norm_backward, bf16, TU_HELD_WIDTH(2), lying_bf16, )
HELD_KERNELS(norm_backward, f16, TU_HELD_WIDTH(2), lying_f16, )
#define PLAIN_KERNEL(name, suffix, type)      \
    KERNEL(name##_##suffix, tu_launch_rows) { \
        name<type, lying_##suffix>(args);     \
    }
#define PLAIN_KERNELS(name)         \
    PLAIN_KERNEL(name, f32, float)  \
    PLAIN_KERNEL(name, f64, double) \
    PLAIN_KERNEL(name, bf16, float) \
    PLAIN_KERNEL(name, f16, float)
PLAIN_KERNELS(norm_parts)
#define COLUMN_KERNEL(suffix, type)                              \
    KERNEL(norm_columns_##suffix, tu_launch_rows) {              \
        SHARED type brought[COLUMN_PARTS][COLUMNS];              \
        SHARED type sums[COLUMNS];                               \
        norm_columns<type, lying_##suffix>(args, brought, sums); \
    }
COLUMN_KERNEL(f32, float)
COLUMN_KERNEL(f64, double)
COLUMN_KERNEL(bf16, float)
COLUMN_KERNEL(f16, float)
/* ---- attention ---- */

/* Keys up to which the shares of a row are multiplied: those of its block of rows. */
HERE int64_t multiplied_keys(const tu_launch_scores &args, int64_t row) {
    int64_t end = (row % args.queries / args.block + 1) * args.block;
    return args.causal && end < args.size ? end : args.size;
}

HERE int64_t visible_keys(const tu_launch_scores &args, int64_t row) {
    int64_t seen = row % args.queries + 1;
    return args.causal && seen < args.size ? seen : args.size;
}

#define EACH_KEY(i, end) for (int64_t i = self % team<Type>::LANES; i < (end); i += team<Type>::LANES)

/* The scores of a row become shares. */
template <class Type> HERE void attention(const tu_launch_scores &args, Type *lane, Type *top) {
    Type sign = args.scale < 0 ? -1 : 1, scale = (Type)args.scale * sign;
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type held = -(Type)INFINITY;
        if (row < args.count) {
            const Type *x = (const Type *)(uintptr_t)args.scores + row * args.size;
            EACH_KEY(i, visible_keys(args, row)) {
                held = math<Type>::greater(x[i] * sign, held);
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<Type>::largest(lane);
    EACH_THREAD(self) {
        top[self] = team<Type>::of_team(lane, self) * scale;
    }
    SYNC();
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type held = 0;
        if (row < args.count) {
            Type *x = (Type *)(uintptr_t)args.scores + row * args.size;
            EACH_KEY(i, visible_keys(args, row)) {
                x[i] = math<Type>::exp(math<Type>::fma(x[i] * sign, scale, -top[self]));
                held += x[i];
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<Type>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        if (row < args.count) {
            Type *x = (Type *)(uintptr_t)args.scores + row * args.size, sum = team<Type>::of_team(lane, self),
                 share = 1 / sum;
            int64_t seen = visible_keys(args, row);
            EACH_KEY(i, multiplied_keys(args, row)) {
                x[i] = i < seen ? x[i] * share : (Type)0;
            }
            if (self % team<Type>::LANES == 0)
                ((Type *)(uintptr_t)args.sums)[row] = (Type)((double)top[self] + (double)math<Type>::log(sum));
        }
    }
}

/* Shares again from scores, and the gradients of the shares become those of the scores. */
template <class Type> HERE void attention_backward(const tu_launch_scores &args, Type *lane, Type *) {
    Type scale = (Type)args.scale;
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        Type held = 0;
        if (row < args.count) {
            const Type *grad = (const Type *)(uintptr_t)args.grad + row * args.width;
            const Type *out = (const Type *)(uintptr_t)args.out + row * args.width;
            EACH_KEY(i, args.width) {
                held = math<Type>::fma(grad[i], out[i], held);
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<Type>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<Type>::row(self);
        if (row < args.count) {
            Type *x = (Type *)(uintptr_t)args.scores + row * args.size,
                 *slopes = (Type *)(uintptr_t)args.slopes + row * args.size;
            Type dot = team<Type>::of_team(lane, self), sum = ((const Type *)(uintptr_t)args.sums)[row];
            int64_t seen = visible_keys(args, row);
            EACH_KEY(i, multiplied_keys(args, row)) {
                Type share = i < seen ? math<Type>::exp(math<Type>::fma(x[i], scale, -sum)) : (Type)0;
                x[i] = share;
                slopes[i] = i < seen ? share * (slopes[i] - dot) * scale : (Type)0;
            }
        }
    }
}

/* The same between products of narrow floats: scores and their gradients come as f32, and what is multiplied next goes
 * out rounded. Rows that fit are read once. */
template <class Lying> HERE void attention_narrow(const tu_launch_scores &args, float *lane, float *top, float *rows) {
    typedef float Type;
    enum {
        MOST = KEPT_BYTES / sizeof(float),
        LANES = team<float>::LANES
    };
    float sign = args.scale < 0 ? -1 : 1, scale = (float)args.scale * sign;
    bool keeps = args.size <= MOST;
    EACH_THREAD(self) {
        int64_t row = team<float>::row(self);
        float held = -INFINITY, *kept = rows + self / LANES * MOST;
        if (row < args.count) {
            const float *x = (const float *)(uintptr_t)args.scores + row * args.size;
            EACH_KEY(i, visible_keys(args, row)) {
                float value = x[i];
                if (keeps)
                    kept[i] = value;
                held = math<float>::greater(value * sign, held);
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<float>::largest(lane);
    EACH_THREAD(self) {
        top[self] = team<float>::of_team(lane, self) * scale;
    }
    SYNC();
    EACH_THREAD(self) {
        int64_t row = team<float>::row(self);
        float held = 0;
        if (row < args.count) {
            float *x = keeps ? rows + self / LANES * MOST : (float *)(uintptr_t)args.scores + row * args.size;
            EACH_KEY(i, visible_keys(args, row)) {
                float power = math<float>::exp(math<float>::fma(x[i] * sign, scale, -top[self]));
                x[i] = power;
                held += power;
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<float>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<float>::row(self);
        if (row < args.count) {
            const float *x = keeps ? rows + self / LANES * MOST : (float *)(uintptr_t)args.scores + row * args.size;
            float sum = team<float>::of_team(lane, self), share = 1 / sum;
            Lying *shares = (Lying *)(uintptr_t)args.narrow_shares + row * args.size;
            int64_t seen = visible_keys(args, row);
            EACH_KEY(i, multiplied_keys(args, row)) {
                shares[i] = Lying::narrow(i < seen ? x[i] * share : 0.0f);
            }
            if (self % LANES == 0)
                ((float *)(uintptr_t)args.sums)[row] = (float)((double)top[self] + (double)math<float>::log(sum));
        }
    }
}

template <class Lying> HERE void attention_narrow_backward(const tu_launch_scores &args, float *lane) {
    typedef float Type;
    float scale = (float)args.scale;
    EACH_THREAD(self) {
        int64_t row = team<float>::row(self);
        float held = 0;
        if (row < args.count) {
            const Lying *grad = (const Lying *)(uintptr_t)args.grad + row * args.width;
            const Lying *out = (const Lying *)(uintptr_t)args.out + row * args.width;
            EACH_KEY(i, args.width) {
                held = math<float>::fma(Lying::widen(grad[i]), Lying::widen(out[i]), held);
            }
        }
        lane[self] = held;
    }
    SYNC();
    team<float>::add(lane);
    EACH_THREAD(self) {
        int64_t row = team<float>::row(self);
        if (row < args.count) {
            const float *x = (const float *)(uintptr_t)args.scores + row * args.size;
            const float *slopes = (const float *)(uintptr_t)args.slopes + row * args.size;
            Lying *narrow_shares = (Lying *)(uintptr_t)args.narrow_shares + row * args.size;
            Lying *narrow_slopes = (Lying *)(uintptr_t)args.narrow_slopes + row * args.size;
            float dot = team<float>::of_team(lane, self), sum = ((const float *)(uintptr_t)args.sums)[row];
            int64_t seen = visible_keys(args, row);
            EACH_KEY(i, multiplied_keys(args, row)) {
                float share = i < seen ? math<float>::exp(math<float>::fma(x[i], scale, -sum)) : 0.0f;
                narrow_shares[i] = Lying::narrow(share);
                narrow_slopes[i] = Lying::narrow(i < seen ? share * (slopes[i] - dot) * scale : 0.0f);
            }
        }
    }
}

#define NARROW_SCORE_KERNELS(suffix, lying)                                \
    KERNEL(attention_narrow_##suffix, tu_launch_scores) {                  \
        SHARED float lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS];         \
        SHARED float rows[team<float>::ROWS * KEPT_BYTES / sizeof(float)]; \
        attention_narrow<lying>(args, lane, kept, rows);                   \
    }                                                                      \
    KERNEL(attention_narrow_backward_##suffix, tu_launch_scores) {         \
        SHARED float lane[THREADS_OF_ROWS];                                \
        attention_narrow_backward<lying>(args, lane);                      \
    }
NARROW_SCORE_KERNELS(bf16, lying_bf16)
NARROW_SCORE_KERNELS(f16, lying_f16)

#define SCORE_KERNEL(name, suffix, type)                          \
    KERNEL(name##_##suffix, tu_launch_scores) {                   \
        SHARED type lane[THREADS_OF_ROWS], kept[THREADS_OF_ROWS]; \
        name<type>(args, lane, kept);                             \
    }
SCORE_KERNEL(attention, f32, float)
SCORE_KERNEL(attention, f64, double)
SCORE_KERNEL(attention_backward, f32, float)
SCORE_KERNEL(attention_backward, f64, double)

/* ---- products with a bias ---- */

template <class Lying> HERE void add_bias(const tu_launch_bias &args) {
    struct alignas(16) wide {
        float at[4];
    };
    struct alignas(4 * sizeof(Lying)) pack {
        Lying at[4];
    };
    int64_t packs = args.columns / 4, total = args.rows * packs;
    EACH_ELEMENT(i, total) {
        int64_t column = total <= UINT32_MAX ? (int64_t)((uint32_t)i % (uint32_t)packs) : i % packs;
        wide read = ((const wide *)(uintptr_t)args.from)[i];
        pack bias = ((const pack *)(uintptr_t)args.bias)[column], written;
        UNROLL
        for (int k = 0; k < 4; k++)
            written.at[k] = Lying::narrow(read.at[k] + Lying::widen(bias.at[k]));
        ((pack *)(uintptr_t)args.to)[i] = written;
    }
}
KERNEL(bias_f32, tu_launch_bias) {
    add_bias<lying_f32>(args);
}
KERNEL(bias_bf16, tu_launch_bias) {
    add_bias<lying_bf16>(args);
}
KERNEL(bias_f16, tu_launch_bias) {
    add_bias<lying_f16>(args);
}

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

/* An element of a parameter, of its gradient and of what is remembered of it, in the type that is computed with. */
template <class Type> HERE void sgd(const tu_launch_step &step, Type &parameter, Type grad, Type &velocity) {
    Type change = math<Type>::fma((Type)step.decay, parameter, grad);
    if (step.first != 0)
        velocity = change = math<Type>::fma((Type)step.momentum, velocity, change);
    parameter = math<Type>::fma(-(Type)step.rate, change, parameter);
}

template <class Type>
HERE void adamw(const tu_launch_step &step, Type &parameter, Type grad, Type &first, Type &second) {
    first = math<Type>::fma(grad - first, (Type)(1 - step.beta1), first);
    second = math<Type>::fma((Type)step.beta2, second, (Type)(1 - step.beta2) * grad * grad);
    Type root = math<Type>::fma(math<Type>::sqrt(second), (Type)step.correct, (Type)step.epsilon);
    Type change = -(Type)step.rate * (first / root);
    parameter = math<Type>::fma((Type)step.decay, parameter, change);
}

/* WIDTH elements at a time, aligned where that is more than one. Lying is how they lie: narrow ones are widened, and
 * rounded once. */
template <class Type, class Lying, int WIDTH> HERE void step_at(const tu_launch_step &step, int64_t i) {
    struct alignas(WIDTH * sizeof(Lying)) pack {
        Lying at[WIDTH];
    };
    pack *parameters = (pack *)((Lying *)(uintptr_t)step.parameter + i);
    pack *firsts = (pack *)((Lying *)(uintptr_t)step.first + i),
         *seconds = (pack *)((Lying *)(uintptr_t)step.second + i);
    pack parameter = *parameters, grad = *(const pack *)((const Lying *)(uintptr_t)step.gradient + i), first, second;
    if (step.first != 0)
        first = *firsts;
    if (step.adamw)
        second = *seconds;
    UNROLL
    for (int k = 0; k < WIDTH; k++) {
        Type own = Lying::widen(parameter.at[k]), by = Lying::widen(grad.at[k]);
        Type mean = step.first != 0 ? Lying::widen(first.at[k]) : (Type)0;
        if (step.adamw) {
            Type square = Lying::widen(second.at[k]);
            adamw<Type>(step, own, by, mean, square);
            second.at[k] = Lying::narrow(square);
        } else {
            sgd<Type>(step, own, by, mean);
        }
        first.at[k] = Lying::narrow(mean);
        parameter.at[k] = Lying::narrow(own);
    }
    *parameters = parameter;
    if (step.first != 0)
        *firsts = first;
    if (step.adamw)
        *seconds = second;
}

template <class Type, class Lying> HERE void step_chunk(const tu_launch_step &step, int64_t begin) {
    enum {
        WIDTH = 16 / sizeof(Lying)
    };
    int64_t end = begin + TU_STEP_CHUNK < step.elements ? begin + TU_STEP_CHUNK : step.elements;
    bool aligned = ((step.parameter | step.gradient | step.first | step.second) & 15) == 0;
    int64_t wide = aligned ? begin + (end - begin) / WIDTH * WIDTH : begin;
    EACH_THREAD(self) {
        for (int64_t i = begin + self * WIDTH; i < wide; i += (int64_t)THREADS * WIDTH)
            step_at<Type, Lying, WIDTH>(step, i);
        for (int64_t i = wide + self; i < end; i += THREADS)
            step_at<Type, Lying, 1>(step, i);
    }
}

/* The chunks of all parameters in a row; a block finds the one that its chunk belongs to. */
KERNEL(steps, tu_launch_steps) {
    const tu_launch_step *steps = (const tu_launch_step *)(uintptr_t)args.steps;
    for (int64_t chunk = BLOCK; chunk < args.chunks; chunk += BLOCKS) {
        int64_t low = 0, high = args.count;
        while (high - low > 1) {
            int64_t middle = low + (high - low) / 2;
            if (steps[middle].begin <= chunk)
                low = middle;
            else
                high = middle;
        }
        const tu_launch_step step = steps[low];
        int64_t begin = (chunk - step.begin) * TU_STEP_CHUNK;
        if (step.dtype == TUTTI_F32)
            step_chunk<float, lying_f32>(step, begin);
        else if (step.dtype == TUTTI_BF16)
            step_chunk<float, lying_bf16>(step, begin);
        else if (step.dtype == TUTTI_F16)
            step_chunk<float, lying_f16>(step, begin);
        else
            step_chunk<double, lying_f64>(step, begin);
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
