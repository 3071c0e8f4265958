/* SPDX-License-Identifier: Apache-2.0
 *
 * all_reduce, reduce and reduce_scatter: one kernel per element type, four modes.
 *
 * Every element is reduced once, by one thread, in rank order 0 to n-1 in the accumulator of tutti/dtype.h: the same
 * bits as the CPU's serial loop, in every mode. A thread block reads from its peers only what the thread block of the
 * same number staged there, or what was there before the kernel, so meeting block by block is enough.
 */
#include "device.cuh"

/* Which arithmetic a type's accumulator has. */
template <class Type> struct arithmetic_of { typedef Type type; };
template <> struct arithmetic_of<as_f16> { typedef as_f32 type; };
template <> struct arithmetic_of<as_bf16> { typedef as_f32 type; };
template <> struct arithmetic_of<as_e4m3> { typedef as_f32 type; };
template <> struct arithmetic_of<as_e5m2> { typedef as_f32 type; };

template <class Type, bool has_factor> struct scaler {
    template <class A> static __device__ __forceinline__ A apply(A x, double) {
        return x;
    }
};
template <class Type> struct scaler<Type, true> {
    template <class A> static __device__ __forceinline__ A apply(A x, double factor) {
        return scale(typename arithmetic_of<Type>::type(), x, factor);
    }
};

template <class Type> struct is_float {
    enum {
        value = 0
    };
};
template <> struct is_float<as_f64> {
    enum {
        value = 1
    };
};
template <> struct is_float<as_f32> {
    enum {
        value = 1
    };
};
template <> struct is_float<as_f16> {
    enum {
        value = 1
    };
};
template <> struct is_float<as_bf16> {
    enum {
        value = 1
    };
};
template <> struct is_float<as_e4m3> {
    enum {
        value = 1
    };
};
template <> struct is_float<as_e5m2> {
    enum {
        value = 1
    };
};

struct sources {
    const uint8_t *address[TU_CUDA_RANKS];
    uint8_t *target[TU_CUDA_RANKS];
    double factor[TU_CUDA_RANKS];
};

/* One element, from all sources. */
template <class Type>
static __device__ typename Type::storage reduce_one(const sources &s, int n, int reduction, uint64_t element) {
    typedef typename Type::storage storage;
    typedef typename arithmetic_of<Type>::type arithmetic;
    typename Type::accumulator a = 0;
    for (int r = 0; r < n; r++) {
        typename Type::accumulator x = Type::load(*(const storage *)(s.address[r] + element * sizeof(storage)));
        if (reduction == OP_PREMUL_SUM)
            x = scaler<Type, is_float<Type>::value>::apply(x, s.factor[r]);
        a = r == 0 ? x : combine(arithmetic(), reduction, a, x);
    }
    return Type::store(finish(arithmetic(), reduction, a, n));
}

/* Combines all lanes of a vector; the reduction is looked at once per vector. */
template <class Arithmetic, int lanes, class A>
static __device__ __forceinline__ void combine_lanes(int reduction, A (&a)[lanes], const A (&x)[lanes]) {
    auto with = [&](int constant) {
#pragma unroll
        for (int lane = 0; lane < lanes; lane++)
            a[lane] = combine(Arithmetic(), constant, a[lane], x[lane]);
    };
    switch (reduction) {
    case OP_PRODUCT:
        return with(OP_PRODUCT);
    case OP_MIN:
        return with(OP_MIN);
    case OP_MAX:
        return with(OP_MAX);
    case OP_BAND:
        return with(OP_BAND);
    case OP_BOR:
        return with(OP_BOR);
    case OP_BXOR:
        return with(OP_BXOR);
    default:
        return with(OP_SUM);
    }
}

template <class Type, int lanes>
static __device__ __forceinline__ void unpack(uint4 v, typename Type::accumulator (&x)[lanes]) {
    union {
        uint4 v;
        typename Type::storage e[lanes];
    } in;
    in.v = v;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        x[lane] = Type::load(in.e[lane]);
}

template <class Type, int lanes>
static __device__ __forceinline__ uint4 pack(typename Type::accumulator (&a)[lanes], int reduction, int n) {
    union {
        uint4 v;
        typename Type::storage e[lanes];
    } out;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        out.e[lane] = Type::store(finish(typename arithmetic_of<Type>::type(), reduction, a[lane], n));
    return out.v;
}

/* 16 bytes. N > 0: a sum (or avg) of that many sources, all loads in flight together. N 0: any number, any
 * reduction. */
template <class Type, int N>
static __device__ __forceinline__ uint4 reduce_vector(const sources &s, int n, int reduction, uint64_t byte) {
    typedef typename arithmetic_of<Type>::type arithmetic;
    constexpr int lanes = 16 / sizeof(typename Type::storage);
    typename Type::accumulator a[lanes], x[lanes];
    if (N > 0) {
        uint4 in[N > 0 ? N : 1];
#pragma unroll
        for (int r = 0; r < N; r++)
            in[r] = load_vector(s.address[r] + byte);
        unpack<Type>(in[0], a);
#pragma unroll
        for (int r = 1; r < N; r++) {
            unpack<Type>(in[r], x);
#pragma unroll
            for (int lane = 0; lane < lanes; lane++)
                a[lane] = combine(arithmetic(), OP_SUM, a[lane], x[lane]);
        }
        return pack<Type>(a, reduction, n);
    }
    uint4 next = load_vector(s.address[0] + byte);
#pragma unroll 1
    for (int r = 0; r < n; r++) {
        uint4 here = next;
        if (r + 1 < n)
            next = load_vector(s.address[r + 1] + byte); /* one ahead */
        unpack<Type>(here, x);
        if (reduction == OP_PREMUL_SUM)
#pragma unroll
            for (int lane = 0; lane < lanes; lane++)
                x[lane] = scaler<Type, is_float<Type>::value>::apply(x[lane], s.factor[r]);
        if (r > 0) {
            combine_lanes<arithmetic>(reduction, a, x);
            continue;
        }
#pragma unroll
        for (int lane = 0; lane < lanes; lane++)
            a[lane] = x[lane];
    }
    return pack<Type>(a, reduction, n);
}

/* Elements [begin, end) of the sources, to `out` (which points at element `begin`) or, with push, to the same elements
 * of every target. The block's threads stride over it together. */
template <class Type, int N>
static __device__ void reduce_range(const sources &s, int n, int reduction, uint64_t begin, uint64_t end, uint8_t *out,
                                    bool push) {
    typedef typename Type::storage storage;
    uint64_t bits = begin * sizeof(storage);
    if (push)
        for (int r = 0; r < n; r++)
            bits |= (uint64_t)s.target[r];
    else
        bits |= (uint64_t)out;
    for (int r = 0; r < n; r++)
        bits |= (uint64_t)s.address[r];
    uint64_t done = begin;
    if ((bits & 15) == 0) {
        uint64_t first = begin * sizeof(storage), last = first + (end - begin) * sizeof(storage) / 16 * 16;
        constexpr int unroll = N == 2 ? 4 : N == 4 ? 2 : 1;
        uint64_t step = (uint64_t)blockDim.x * 16;
        uint64_t byte = first + threadIdx.x * 16;
        for (; byte + (unroll - 1) * step < last; byte += unroll * step) {
            uint4 result[unroll];
#pragma unroll
            for (int u = 0; u < unroll; u++)
                result[u] = reduce_vector<Type, N>(s, n, reduction, byte + u * step);
#pragma unroll
            for (int u = 0; u < unroll; u++) {
                if (!push) {
                    store_vector(out + (byte + u * step - first), result[u]);
                    continue;
                }
                for (int r = 0; r < n; r++)
                    store_vector(s.target[r] + byte + u * step, result[u]);
            }
        }
        for (; byte < last; byte += step) {
            uint4 result = reduce_vector<Type, N>(s, n, reduction, byte);
            if (!push)
                store_vector(out + (byte - first), result);
            else
                for (int r = 0; r < n; r++)
                    store_vector(s.target[r] + byte, result);
        }
        done = last / sizeof(storage);
    }
    for (uint64_t i = done + threadIdx.x; i < end; i += blockDim.x) {
        storage result = reduce_one<Type>(s, n, reduction, i);
        if (!push)
            *(storage *)(out + (i - begin) * sizeof(storage)) = result;
        else
            for (int r = 0; r < n; r++)
                *(storage *)(s.target[r] + i * sizeof(storage)) = result;
    }
}

/* Elements [first, first + count) of part `part`: all of the input is one part, or one per rank. */
struct range {
    uint64_t first, count;
};
static __device__ __forceinline__ range part_of(const tu_cuda_reduce_args &args, int part, int n, uint64_t grain) {
    if (args.mode == TU_CUDA_ONE_SHOT)
        return { 0, args.count };
    if (args.mode == TU_CUDA_SCATTER) { /* given; the others cut where vectors begin */
        const uint64_t *parts = args.more != 0 ? (const uint64_t *)args.more : args.parts;
        return { parts[part], parts[part + 1] - parts[part] };
    }
    uint64_t first = cut(args.count, part, n, grain);
    return { first, cut(args.count, part + 1, n, grain) - first };
}

/* The whole operation where the data lies: every input is symmetric and, for a push, every output. */
template <class Type, int N>
static __device__ void reduce_direct(const tu_cuda_reduce_args &args, sources &s, meeting_epoch &epoch) {
    typedef typename Type::storage storage;
    const tu_cuda_meeting &m = args.meeting;
    const uint64_t grain = 16 / sizeof(storage), blocks = gridDim.x, block = blockIdx.x;
    if (args.row != 0) {
        /* Output element i lies at column rank * columns + i % columns of input row i / columns. */
        uint64_t columns = args.row / m.size, total = args.count / m.size;
        for (uint64_t i = cut(total, block, blocks, grain) + threadIdx.x; i < cut(total, block + 1, blocks, grain);
             i += blockDim.x)
            ((storage *)args.out)[i] =
                reduce_one<Type>(s, m.size, args.reduction, i / columns * args.row + m.rank * columns + i % columns);
    } else if (args.mode == TU_CUDA_TWO_SHOT || args.out != 0) {
        range part = part_of(args, m.rank, m.size, grain);
        uint64_t from = cut(part.count, block, blocks, grain), to = cut(part.count, block + 1, blocks, grain);
        uint64_t base = args.mode == TU_CUDA_ONE_SHOT ? 0 : part.first;
        reduce_range<Type, N>(s, m.size, args.reduction, part.first + from, part.first + to,
                              (uint8_t *)args.out + (part.first + from - base) * sizeof(storage),
                              args.mode == TU_CUDA_TWO_SHOT);
    }
    meet(m, epoch); /* nobody reads my buffers, or still owes me a slice, after this */
}

/* In rounds through staging: some input is private, or some output is and slices have to be gathered. Round k takes
 * elements [k * share, (k + 1) * share) of every part. Each block stages exactly what the same block of its peers will
 * read. */
template <class Type, int N>
static __device__ void reduce_staged(const tu_cuda_reduce_args &args, sources &s, meeting_epoch &epoch) {
    typedef typename Type::storage storage;
    const tu_cuda_meeting &m = args.meeting;
    const int n = m.size, parts = args.mode == TU_CUDA_ONE_SHOT ? 1 : n;
    const uint64_t grain = 16 / sizeof(storage);
    const uint64_t share = args.stage_bytes / 16 / parts * grain; /* elements of one part in one round */
    uint64_t longest = 0;
    for (int part = 0; part < parts; part++)
        longest = max(longest, part_of(args, part, n, grain).count);
    __shared__ const uint8_t *direct[TU_CUDA_RANKS];
    if ((int)threadIdx.x < n)
        direct[threadIdx.x] = s.address[threadIdx.x];
    for (uint64_t round = 0; round * share < longest; round++) {
        if (args.source == 0)
            for (int part = 0; part < parts; part++) {
                range whole = part_of(args, part, n, grain);
                uint64_t skip = min(round * share, whole.count), count = min(share, whole.count - skip);
                piece mine = piece_of(share, count, grain);
                copy_bytes((uint8_t *)args.stage + (part * share + mine.from) * sizeof(storage),
                           (const uint8_t *)args.in + (whole.first + skip + mine.from) * sizeof(storage),
                           (mine.to - mine.from) * sizeof(storage));
            }
        if (!meet(m, epoch))
            return;
        range mine = part_of(args, args.mode == TU_CUDA_ONE_SHOT ? 0 : m.rank, n, grain);
        uint64_t skip = min(round * share, mine.count), count = min(share, mine.count - skip);
        piece here = piece_of(share, count, grain);
        if ((int)threadIdx.x < n) { /* so that element 0 is the first of this rank's part of this round */
            int part = parts == 1 ? 0 : m.rank;
            s.address[threadIdx.x] = direct[threadIdx.x] != nullptr
                                         ? direct[threadIdx.x] + (mine.first + skip) * sizeof(storage)
                                         : resolve(m, threadIdx.x, args.stage_code) + part * share * sizeof(storage);
        }
        __syncthreads();
        uint8_t *out =
            (uint8_t *)args.out + (args.mode == TU_CUDA_SCATTER ? skip : mine.first + skip) * sizeof(storage);
        if (args.mode == TU_CUDA_TWO_SHOT)
            out = (uint8_t *)args.scratch;
        if (args.mode == TU_CUDA_TWO_SHOT || args.out != 0)
            reduce_range<Type, N>(s, n, args.reduction, here.from, here.to, out + here.from * sizeof(storage), false);
        if (!meet(m, epoch))
            return;
        for (int r = 0; args.mode == TU_CUDA_TWO_SHOT && args.out != 0 && r < n; r++) {
            range whole = part_of(args, r, n, grain);
            uint64_t skipped = min(round * share, whole.count), length = min(share, whole.count - skipped);
            piece theirs = piece_of(share, length, grain);
            copy_bytes((uint8_t *)args.out + (whole.first + skipped + theirs.from) * sizeof(storage),
                       resolve(m, r, args.scratch_code) + theirs.from * sizeof(storage),
                       (theirs.to - theirs.from) * sizeof(storage));
        }
    }
    meet(m, epoch); /* the slices in my scratch have been gathered */
}

template <class Type, int N> struct plain_direct {
    static __device__ __forceinline__ void run(const tu_cuda_reduce_args &args, sources &s, meeting_epoch &epoch) {
        reduce_direct<Type, N>(args, s, epoch);
    }
};

/* Direct: what runs where the data lies. Elsewhere: the same for members whose buffers lie at different places. */
template <class Type, int N, class Direct = plain_direct<Type, N>, class Elsewhere = Direct>
static __device__ void reduce_body(const tu_cuda_reduce_args &args) {
    __shared__ sources s;
    const tu_cuda_meeting &m = args.meeting;
    const bool push = args.mode == TU_CUDA_TWO_SHOT;
    meeting_epoch epoch(m);
    int met = meet_first(m, epoch);
    if (met == 2) {
        if ((int)threadIdx.x < m.size) {
            s.address[threadIdx.x] = (const uint8_t *)(args.source_base + threadIdx.x * args.source_stride);
            s.target[threadIdx.x] = (uint8_t *)(args.target_base + threadIdx.x * args.target_stride);
            s.factor[threadIdx.x] = args.factor;
        }
        __syncthreads();
        if (args.reduction != OP_PREMUL_SUM) { /* whose factors have to be handed over */
            Direct::run(args, s, epoch);
            epoch.keep(m);
            return;
        }
    }
    if (met != 0 && meet(m, epoch, [&](tu_cuda_inbox *inbox, int) {
            inbox->source = args.source;
            inbox->target = args.target;
            inbox->factor = args.factor;
        })) {
        int direct = 1;
        if ((int)threadIdx.x < m.size) {
            const tu_cuda_inbox *inbox = inbox_of(m, m.rank, threadIdx.x);
            s.address[threadIdx.x] = inbox->source != 0 ? resolve(m, threadIdx.x, inbox->source) : nullptr;
            s.target[threadIdx.x] = inbox->target != 0 ? resolve(m, threadIdx.x, inbox->target) : nullptr;
            s.factor[threadIdx.x] = inbox->factor;
            direct = inbox->source != 0 && (!push || inbox->target != 0);
        }
        /* Everybody was told the same, so all decide alike. */
        if (__syncthreads_and(direct))
            Elsewhere::run(args, s, epoch);
        else
            reduce_staged<Type, N>(args, s, epoch);
    }
    epoch.keep(m);
}

#define REDUCE(name, type)                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                    \
        tutti_reduce_##name(const __grid_constant__ tu_cuda_reduce_args args) { \
        reduce_body<type, 0>(args);                                             \
    }
#define REDUCE_FOR(name, type, n)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                          \
        tutti_reduce_##name##_##n(const __grid_constant__ tu_cuda_reduce_args args) { \
        reduce_body<type, n>(args);                                                   \
    }

REDUCE(f64, as_f64)
REDUCE(f32, as_f32)
REDUCE(f16, as_f16)
REDUCE(bf16, as_bf16)
REDUCE(e4m3, as_e4m3)
REDUCE(e5m2, as_e5m2)
REDUCE(i8, plain<int8_t>)
REDUCE(i16, plain<int16_t>)
REDUCE(i32, plain<int32_t>)
REDUCE(i64, plain<int64_t>)
REDUCE(u8, plain<uint8_t>)
REDUCE(u16, plain<uint16_t>)
REDUCE(u32, plain<uint32_t>)
REDUCE(u64, plain<uint64_t>)
REDUCE(boolean, as_bool)
/* What training and inference sum, for the usual numbers of ranks: all loads in flight at once. */
REDUCE_FOR(f32, as_f32, 2)
REDUCE_FOR(f32, as_f32, 4)
REDUCE_FOR(f32, as_f32, 8)
REDUCE_FOR(bf16, as_bf16, 2)
REDUCE_FOR(bf16, as_bf16, 4)
REDUCE_FOR(bf16, as_bf16, 8)
REDUCE_FOR(f16, as_f16, 2)
REDUCE_FOR(f16, as_f16, 4)
REDUCE_FOR(f16, as_f16, 8)
