/* SPDX-License-Identifier: Apache-2.0
 *
 * all_reduce, reduce and reduce_scatter: one kernel per element type, four modes.
 *
 * Every element is reduced once, by one thread, in rank order 0 to n-1 in the accumulator of tutti/dtype.h: the same
 * bits as the CPU's serial loop, in every mode. A thread block reads from its peers only what the thread block of the
 * same number staged there, or what was there before the kernel, so meeting block by block is enough: a kernel ends
 * when all its blocks have met, and then all blocks of all ranks are through.
 */
#include "device.cuh"

/* Which arithmetic a type's accumulator has. */
template <class Type> struct arithmetic_of { typedef Type type; };
template <> struct arithmetic_of<as_f16> { typedef as_f32 type; };
template <> struct arithmetic_of<as_bf16> { typedef as_f32 type; };
template <> struct arithmetic_of<as_e4m3> { typedef as_f32 type; };
template <> struct arithmetic_of<as_e5m2> { typedef as_f32 type; };

template <class Type, bool has_factor> struct scaler {
    template <class Accumulator> static __device__ __forceinline__ Accumulator apply(Accumulator x, double) {
        return x;
    }
};
template <class Type> struct scaler<Type, true> {
    template <class Accumulator> static __device__ __forceinline__ Accumulator apply(Accumulator x, double factor) {
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
static __device__ typename Type::storage reduce_one(const sources &from, int ranks, int reduction, uint64_t element) {
    typedef typename Type::storage storage;
    typedef typename arithmetic_of<Type>::type arithmetic;
    typename Type::accumulator sum = 0;
    for (int rank = 0; rank < ranks; rank++) {
        typename Type::accumulator x = Type::load(*(const storage *)(from.address[rank] + element * sizeof(storage)));
        if (reduction == OP_PREMUL_SUM)
            x = scaler<Type, is_float<Type>::value>::apply(x, from.factor[rank]);
        sum = rank == 0 ? x : combine(arithmetic(), reduction, sum, x);
    }
    return Type::store(finish(arithmetic(), reduction, sum, ranks));
}

/* Combines all lanes of a vector; the reduction is looked at once per vector. */
template <class Arithmetic, int lanes, class Accumulator>
static __device__ __forceinline__ void combine_lanes(int reduction, Accumulator (&sum)[lanes],
                                                     const Accumulator (&x)[lanes]) {
    auto with = [&](int constant) {
#pragma unroll
        for (int lane = 0; lane < lanes; lane++)
            sum[lane] = combine(Arithmetic(), constant, sum[lane], x[lane]);
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
static __device__ __forceinline__ void unpack(uint4 vector, typename Type::accumulator (&x)[lanes]) {
    union {
        uint4 vector;
        typename Type::storage elements[lanes];
    } in;
    in.vector = vector;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        x[lane] = Type::load(in.elements[lane]);
}

template <class Type, int lanes>
static __device__ __forceinline__ uint4 pack(typename Type::accumulator (&sum)[lanes], int reduction, int ranks) {
    union {
        uint4 vector;
        typename Type::storage elements[lanes];
    } out;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        out.elements[lane] = Type::store(finish(typename arithmetic_of<Type>::type(), reduction, sum[lane], ranks));
    return out.vector;
}

/* 16 bytes. With `fixed` > 0: a sum (or avg) of that many sources, all loads in flight together. With 0: any number,
 * any reduction. */
template <class Type, int fixed>
static __device__ __forceinline__ uint4 reduce_vector(const sources &from, int ranks, int reduction, uint64_t byte) {
    typedef typename arithmetic_of<Type>::type arithmetic;
    constexpr int lanes = 16 / sizeof(typename Type::storage);
    typename Type::accumulator sum[lanes], x[lanes];
    if (fixed > 0) {
        uint4 in[fixed > 0 ? fixed : 1];
#pragma unroll
        for (int rank = 0; rank < fixed; rank++)
            in[rank] = load_vector(from.address[rank] + byte);
        unpack<Type>(in[0], sum);
#pragma unroll
        for (int rank = 1; rank < fixed; rank++) {
            unpack<Type>(in[rank], x);
#pragma unroll
            for (int lane = 0; lane < lanes; lane++)
                sum[lane] = combine(arithmetic(), OP_SUM, sum[lane], x[lane]);
        }
        return pack<Type>(sum, reduction, ranks);
    }
    uint4 next = load_vector(from.address[0] + byte);
#pragma unroll 1
    for (int rank = 0; rank < ranks; rank++) {
        uint4 here = next;
        if (rank + 1 < ranks)
            next = load_vector(from.address[rank + 1] + byte); /* one ahead */
        unpack<Type>(here, x);
        if (reduction == OP_PREMUL_SUM)
#pragma unroll
            for (int lane = 0; lane < lanes; lane++)
                x[lane] = scaler<Type, is_float<Type>::value>::apply(x[lane], from.factor[rank]);
        if (rank > 0) {
            combine_lanes<arithmetic>(reduction, sum, x);
            continue;
        }
#pragma unroll
        for (int lane = 0; lane < lanes; lane++)
            sum[lane] = x[lane];
    }
    return pack<Type>(sum, reduction, ranks);
}

/* Who strides over a range together: the threads of a block, or of all blocks. */
struct team {
    uint64_t lane, lanes;
};
static __device__ __forceinline__ team block_team(void) {
    return { threadIdx.x, blockDim.x };
}
static __device__ __forceinline__ team grid_team(void) {
    return { (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, (uint64_t)gridDim.x * blockDim.x };
}

/* Elements [begin, end) of the sources, to `out` (which points at element `begin`) or, with push, to the same elements
 * of every target. */
template <class Type, int fixed>
static __device__ void reduce_range(const sources &given, int ranks, int reduction, uint64_t begin, uint64_t end,
                                    uint8_t *out, bool push, team team) {
    typedef typename Type::storage storage;
    uint64_t bits = begin * sizeof(storage);
    if (push)
        for (int rank = 0; rank < ranks; rank++)
            bits |= (uint64_t)given.target[rank];
    else
        bits |= (uint64_t)out;
    for (int rank = 0; rank < ranks; rank++)
        bits |= (uint64_t)given.address[rank];
    uint64_t done = begin;
    if ((bits & 15) == 0) {
        uint64_t first = begin * sizeof(storage), last = first + (end - begin) * sizeof(storage) / 16 * 16;
        constexpr int unroll = fixed == 2 ? 4 : fixed == 4 ? 2 : 1;
        uint64_t step = team.lanes * 16;
        uint64_t byte = first + team.lane * 16;
        for (; byte + (unroll - 1) * step < last; byte += unroll * step) {
            uint4 result[unroll];
#pragma unroll
            for (int part = 0; part < unroll; part++)
                result[part] = reduce_vector<Type, fixed>(given, ranks, reduction, byte + part * step);
#pragma unroll
            for (int part = 0; part < unroll; part++) {
                if (!push) {
                    store_vector(out + (byte + part * step - first), result[part]);
                    continue;
                }
                for (int rank = 0; rank < ranks; rank++)
                    store_vector(given.target[rank] + byte + part * step, result[part]);
            }
        }
        for (; byte < last; byte += step) {
            uint4 result = reduce_vector<Type, fixed>(given, ranks, reduction, byte);
            if (!push)
                store_vector(out + (byte - first), result);
            else
                for (int rank = 0; rank < ranks; rank++)
                    store_vector(given.target[rank] + byte, result);
        }
        done = last / sizeof(storage);
    }
    for (uint64_t i = done + team.lane; i < end; i += team.lanes) {
        storage result = reduce_one<Type>(given, ranks, reduction, i);
        if (!push)
            *(storage *)(out + (i - begin) * sizeof(storage)) = result;
        else
            for (int rank = 0; rank < ranks; rank++)
                *(storage *)(given.target[rank] + i * sizeof(storage)) = result;
    }
}

struct range {
    uint64_t first, count;
};

/* The same where nothing is pushed and every thread has one vector at most: the others hear that everything was read
 * before the results are stored, and wait for no store. False: it is more, or not made of vectors; nothing was done. */
template <class Type, int fixed>
static __device__ bool reduce_few(const tu_cuda_reduce_args &args, const sources &given, meeting_epoch &epoch,
                                  range part) {
    const tu_cuda_meeting &meeting = args.meeting;
    const team team = grid_team();
    uint64_t first = part.first * sizeof(typename Type::storage), bytes = part.count * sizeof(typename Type::storage);
    uint64_t byte = team.lane * 16, bits = first | bytes | args.out;
    for (int rank = 0; rank < meeting.size; rank++)
        bits |= (uint64_t)given.address[rank];
    if (fixed == 0 || (bits & 15) != 0 || bytes > team.lanes * 16)
        return false;
    uint4 result = { 0, 0, 0, 0 };
    if (byte < bytes)
        result = reduce_vector<Type, fixed>(given, meeting.size, args.reduction, first + byte);
    /* The barrier looks at what was loaded: no load is on its way any more. */
    (void)__syncthreads_or((result.x ^ result.y ^ result.z ^ result.w) == 1);
    arrive(meeting, epoch, [](tu_cuda_inbox *, int) {});
    if (byte < bytes)
        store_vector((uint8_t *)args.out + byte, result);
    await_all(meeting, epoch);
    return true;
}

/* Elements [first, first + count) of part `part`: all of the input is one part, or one per rank. */
static __device__ __forceinline__ range part_of(const tu_cuda_reduce_args &args, int part, int ranks, uint64_t grain) {
    if (args.mode == TU_CUDA_ONE_SHOT)
        return { 0, args.count };
    if (args.mode == TU_CUDA_SCATTER) { /* given; the others cut where vectors begin */
        const uint64_t *parts = args.more != 0 ? (const uint64_t *)args.more : args.parts;
        return { parts[part], parts[part + 1] - parts[part] };
    }
    uint64_t first = cut(args.count, part, ranks, grain);
    return { first, cut(args.count, part + 1, ranks, grain) - first };
}

/* The whole operation where the data lies: every input is symmetric and, for a push, every output. */
template <class Type, int fixed>
static __device__ void reduce_direct(const tu_cuda_reduce_args &args, sources &given, meeting_epoch &epoch) {
    typedef typename Type::storage storage;
    const tu_cuda_meeting &meeting = args.meeting;
    const uint64_t grain = 16 / sizeof(storage);
    const team team = grid_team(); /* neighbours in memory at one time: the device's rows and pages stay open */
    if (args.row != 0) {
        /* Output element i lies at column rank * columns + i % columns of input row i / columns. */
        uint64_t columns = args.row / meeting.size, total = args.count / meeting.size;
        for (uint64_t i = team.lane; i < total; i += team.lanes)
            ((storage *)args.out)[i] = reduce_one<Type>(given, meeting.size, args.reduction,
                                                        i / columns * args.row + meeting.rank * columns + i % columns);
    } else if (args.mode == TU_CUDA_TWO_SHOT || args.out != 0) {
        range part = part_of(args, meeting.rank, meeting.size, grain);
        if (args.mode != TU_CUDA_TWO_SHOT && reduce_few<Type, fixed>(args, given, epoch, part))
            return;
        reduce_range<Type, fixed>(given, meeting.size, args.reduction, part.first, part.first + part.count,
                                  (uint8_t *)args.out, args.mode == TU_CUDA_TWO_SHOT, team);
    }
    meet(meeting, epoch); /* nobody reads my buffers, or still owes me a slice, after this */
}

/* How the rounds through staging are cut: round k takes elements [k * share, (k + 1) * share) of every part. */
struct rounds {
    int parts;
    uint64_t grain, longest, share;
};
template <class Type> static __device__ rounds rounds_of(const tu_cuda_reduce_args &args) {
    rounds cut = { args.mode == TU_CUDA_ONE_SHOT ? 1 : args.meeting.size, 16 / sizeof(typename Type::storage), 0, 0 };
    for (int part = 0; part < cut.parts; part++)
        cut.longest = max(cut.longest, part_of(args, part, args.meeting.size, cut.grain).count);
    cut.share = share_of(cut.longest, args.stage_bytes / 16 / cut.parts * cut.grain, cut.grain);
    return cut;
}

/* Each block stages exactly what the same block of its peers will read. */
template <class Type>
static __device__ __noinline__ void stage_round(const tu_cuda_reduce_args &args, const rounds &cut, uint64_t round) {
    typedef typename Type::storage storage;
    for (int part = 0; part < cut.parts; part++) {
        range whole = part_of(args, part, args.meeting.size, cut.grain);
        uint64_t skip = min(round * cut.share, whole.count), count = min(cut.share, whole.count - skip);
        piece mine = piece_of(cut.share, count, cut.grain);
        copy_bytes((uint8_t *)args.stage + (part * cut.share + mine.from) * sizeof(storage),
                   (const uint8_t *)args.in + (whole.first + skip + mine.from) * sizeof(storage),
                   (mine.to - mine.from) * sizeof(storage));
    }
}

/* In rounds through staging: some input is private, or some output is and slices have to be gathered. The first round
 * was staged before the meeting that told so. */
template <class Type, int fixed>
static __device__ __noinline__ void reduce_staged(const tu_cuda_reduce_args &args, sources &given,
                                                  meeting_epoch &epoch) {
    typedef typename Type::storage storage;
    const tu_cuda_meeting &meeting = args.meeting;
    const rounds cut = rounds_of<Type>(args);
    const int ranks = meeting.size;
    const uint64_t grain = cut.grain, share = cut.share;
    __shared__ const uint8_t *direct[TU_CUDA_RANKS];
    if ((int)threadIdx.x < ranks)
        direct[threadIdx.x] = given.address[threadIdx.x];
    for (uint64_t round = 0; round * share < cut.longest; round++) {
        if (round > 0) {
            if (args.source == 0)
                stage_round<Type>(args, cut, round);
            if (!meet(meeting, epoch))
                return;
        }
        range mine = part_of(args, args.mode == TU_CUDA_ONE_SHOT ? 0 : meeting.rank, ranks, grain);
        uint64_t skip = min(round * share, mine.count), count = min(share, mine.count - skip);
        piece here = piece_of(share, count, grain);
        if ((int)threadIdx.x < ranks) { /* so that element 0 is the first of this rank's part of this round */
            int part = cut.parts == 1 ? 0 : meeting.rank;
            given.address[threadIdx.x] =
                direct[threadIdx.x] != nullptr
                    ? direct[threadIdx.x] + (mine.first + skip) * sizeof(storage)
                    : resolve(meeting, threadIdx.x, args.stage_code) + part * share * sizeof(storage);
        }
        __syncthreads();
        uint8_t *out =
            (uint8_t *)args.out + (args.mode == TU_CUDA_SCATTER ? skip : mine.first + skip) * sizeof(storage);
        if (args.mode == TU_CUDA_TWO_SHOT)
            out = (uint8_t *)args.scratch;
        if (args.mode == TU_CUDA_TWO_SHOT || args.out != 0)
            reduce_range<Type, fixed>(given, ranks, args.reduction, here.from, here.to,
                                      out + here.from * sizeof(storage), false, block_team());
        if (!meet(meeting, epoch))
            return;
        for (int rank = 0; args.mode == TU_CUDA_TWO_SHOT && args.out != 0 && rank < ranks; rank++) {
            range whole = part_of(args, rank, ranks, grain);
            uint64_t skipped = min(round * share, whole.count), length = min(share, whole.count - skipped);
            piece theirs = piece_of(share, length, grain);
            copy_bytes((uint8_t *)args.out + (whole.first + skipped + theirs.from) * sizeof(storage),
                       resolve(meeting, rank, args.scratch_code) + theirs.from * sizeof(storage),
                       (theirs.to - theirs.from) * sizeof(storage));
        }
    }
    if (args.mode == TU_CUDA_TWO_SHOT || cut.longest == 0)
        meet(meeting, epoch); /* the slices in my scratch have been gathered; of nothing: my inbox has been read */
}

template <class Type, int fixed> struct plain_direct {
    static __device__ __forceinline__ void run(const tu_cuda_reduce_args &args, sources &from, meeting_epoch &epoch) {
        reduce_direct<Type, fixed>(args, from, epoch);
    }
};

/* Elements [begin, end) of the sources to `out`, by the members' own addresses. */
template <class Type> struct plain_local {
    static __device__ __forceinline__ void run(const tu_cuda_reduce_args &args, const sources &given, uint64_t begin,
                                               uint64_t end, uint8_t *out, team team) {
        reduce_range<Type, 0>(given, args.meeting.size, args.reduction, begin, end, out, false, team);
    }
};

/* What copy engines have brought into this rank's own memory; or a tile of symmetric matrices, between two meetings.
 * Rows that one block can do are dealt out to blocks, longer ones are done by all. */
template <class Type, class Local = plain_local<Type>>
static __device__ void reduce_local(const tu_cuda_reduce_args &args, sources &given) {
    typedef typename Type::storage storage;
    await_order(args.meeting.group, args.meeting.timeout_ns);
    if ((int)threadIdx.x < args.meeting.size) {
        given.address[threadIdx.x] = (const uint8_t *)(args.source_base + threadIdx.x * args.source_stride);
        given.factor[threadIdx.x] = args.more != 0 ? ((const double *)args.more)[threadIdx.x] : 1;
    }
    __syncthreads();
    const uint64_t columns = args.row != 0 ? args.row : args.count, whole = args.row != 0 ? args.count / args.row : 1;
    const uint64_t rows = has_fault(args.meeting.group) ? 0 : whole; /* the meeting before may have failed */
    const bool shared = rows < gridDim.x;
    const team team = shared ? grid_team() : block_team();
    for (uint64_t row = shared ? 0 : blockIdx.x; row < rows; row += shared ? 1 : gridDim.x)
        Local::run(args, given, row * args.in_pitch, row * args.in_pitch + columns,
                   (uint8_t *)args.out + row * args.out_pitch * sizeof(storage), team);
    __syncthreads();
    if (threadIdx.x == 0)
        count_end(args.meeting.group);
}

/* Direct: what runs where the data lies. Elsewhere: the same for members whose buffers lie at different places. */
template <class Type, int fixed, class Direct = plain_direct<Type, fixed>, class Elsewhere = Direct>
static __device__ void reduce_body(const tu_cuda_reduce_args &args, sources &given) {
    const tu_cuda_meeting &meeting = args.meeting;
    const bool push = args.mode == TU_CUDA_TWO_SHOT;
    meeting_epoch epoch(meeting);
    if ((int)threadIdx.x < meeting.size) { /* where all have the same plan; known to the block when it has met */
        given.address[threadIdx.x] = (const uint8_t *)(args.source_base + threadIdx.x * args.source_stride);
        given.target[threadIdx.x] = (uint8_t *)(args.target_base + threadIdx.x * args.target_stride);
    }
    int met = meet_first(meeting, epoch);
    if (met == 2 && args.reduction != OP_PREMUL_SUM) { /* whose factors have to be handed over */
        Direct::run(args, given, epoch);
        epoch.keep(meeting);
        return;
    }
    if (met != 0 && args.source == 0) /* then nobody reads where the data lies */
        stage_round<Type>(args, rounds_of<Type>(args), 0);
    if (met != 0 && meet(meeting, epoch, [&](tu_cuda_inbox *inbox, int) {
            inbox->source = args.source;
            inbox->target = args.target;
            inbox->factor = args.factor;
        })) {
        int direct = 1;
        if ((int)threadIdx.x < meeting.size) {
            const tu_cuda_inbox *inbox = inbox_of(meeting, meeting.rank, threadIdx.x);
            given.address[threadIdx.x] = inbox->source != 0 ? resolve(meeting, threadIdx.x, inbox->source) : nullptr;
            given.target[threadIdx.x] = inbox->target != 0 ? resolve(meeting, threadIdx.x, inbox->target) : nullptr;
            given.factor[threadIdx.x] = inbox->factor;
            direct = inbox->source != 0 && (!push || inbox->target != 0);
        }
        /* Everybody was told the same, so all decide alike. */
        if (__syncthreads_and(direct))
            Elsewhere::run(args, given, epoch);
        else
            reduce_staged<Type, fixed>(args, given, epoch);
    }
    epoch.keep(meeting);
}

#define REDUCE(name, type)                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                    \
        tutti_reduce_##name(const __grid_constant__ tu_cuda_reduce_args args) { \
        __shared__ sources given;                                               \
        if (args.mode == TU_CUDA_LOCAL)                                         \
            reduce_local<type>(args, given);                                    \
        else                                                                    \
            reduce_body<type, 0>(args, given);                                  \
    }
#define REDUCE_FOR(name, type, ranks)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                              \
        tutti_reduce_##name##_##ranks(const __grid_constant__ tu_cuda_reduce_args args) { \
        __shared__ sources given;                                                         \
        reduce_body<type, ranks>(args, given);                                            \
    }

TU_CUDA_EACH_TYPE(REDUCE)
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
