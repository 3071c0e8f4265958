/* SPDX-License-Identifier: Apache-2.0
 *
 * The loop under every pointwise operator and copy: see loop.h.
 */
#include "tensor/loop.h"

#include <string.h>

#include "tensor/convert.h"
#include "tensor/kernel/kernels.h"
#include "tensor/on_device.h"
#include "tensor/parallel.h"

#define PIECE_BYTES 8192 /* of one operand: with all operands well inside the first-level cache */
#define GRAIN 32768      /* elements that are worth another thread */

tutti_dtype tu_compute_dtype(tutti_dtype dtype) {
    if (tu_is_complex(dtype))
        return TUTTI_C128;
    if (dtype == TUTTI_F64 || dtype == TUTTI_U64)
        return dtype;
    return tu_is_float(dtype) ? TUTTI_F32 : TUTTI_I64;
}

/* ---- packing ---- */

#define PACK(type)                                          \
    for (int64_t i = 0; i < count; i++)                     \
        ((type *)to)[i] = ((const type *)from)[i * stride]; \
    return

typedef struct pair {
    uint64_t low, high;
} pair;

void tu_pack(void *to, const void *from, int64_t stride, size_t size, int64_t count) {
    if (stride == 1) {
        memcpy(to, from, (size_t)count * size);
        return;
    }
    switch (size) {
    case 1:
        PACK(uint8_t);
    case 2:
        PACK(uint16_t);
    case 4:
        PACK(uint32_t);
    case 8:
        PACK(uint64_t);
    default:
        PACK(pair);
    }
}

#define UNPACK(type)                                        \
    for (int64_t i = 0; i < count; i++)                     \
        ((type *)to)[i * stride] = ((const type *)from)[i]; \
    return

void tu_unpack(void *to, int64_t stride, const void *from, size_t size, int64_t count) {
    if (stride == 1) {
        memcpy(to, from, (size_t)count * size);
        return;
    }
    switch (size) {
    case 1:
        UNPACK(uint8_t);
    case 2:
        UNPACK(uint16_t);
    case 4:
        UNPACK(uint32_t);
    case 8:
        UNPACK(uint64_t);
    default:
        UNPACK(pair);
    }
}

tutti_status tu_convert(const void *from, tutti_dtype from_dtype, void *to, tutti_dtype to_dtype, size_t count) {
    const tu_tensor_kernels *kernels = tu_tensor_kernels_get();
    tu_convert_kernel *kernel = NULL;
    if (from_dtype == TUTTI_F32)
        kernel = to_dtype == TUTTI_BF16 ? kernels->narrow_bf16 : to_dtype == TUTTI_F16 ? kernels->narrow_f16 : NULL;
    else if (to_dtype == TUTTI_F32)
        kernel = from_dtype == TUTTI_BF16 ? kernels->widen_bf16 : from_dtype == TUTTI_F16 ? kernels->widen_f16 : NULL;
    if (kernel == NULL)
        return tutti_convert(from, from_dtype, to, to_dtype, count);
    kernel(from, to, (int64_t)count);
    return TUTTI_OK;
}

/* ---- the shape of the loop ---- */

static void swap_dims(tu_loop *loop, int first, int second) {
    int64_t size = loop->sizes[first];
    loop->sizes[first] = loop->sizes[second];
    loop->sizes[second] = size;
    for (int k = 0; k < loop->operands; k++) {
        int64_t stride = loop->at[k].strides[first];
        loop->at[k].strides[first] = loop->at[k].strides[second];
        loop->at[k].strides[second] = stride;
    }
}

/* Outer dimensions first, by the output's strides, so that the innermost one is the densest. */
static void sort_dims(tu_loop *loop) {
    for (int i = 1; i < loop->ndim; i++)
        for (int j = i; j > 0 && loop->at[0].strides[j] > loop->at[0].strides[j - 1] && loop->at[0].strides[j - 1] != 0;
             j--)
            swap_dims(loop, j, j - 1);
}

static bool mergeable(const tu_loop *loop, int outer, int inner) {
    for (int k = 0; k < loop->operands; k++)
        if (loop->at[k].strides[outer] != loop->at[k].strides[inner] * loop->sizes[inner])
            return false;
    return true;
}

/* Merges neighbours that one stride walks through, and drops dimensions of size 1. */
static void merge_dims(tu_loop *loop) {
    int kept = 0;
    for (int i = 0; i < loop->ndim; i++) {
        if (loop->sizes[i] == 1)
            continue;
        if (kept > 0 && mergeable(loop, kept - 1, i)) {
            loop->sizes[kept - 1] *= loop->sizes[i];
            for (int k = 0; k < loop->operands; k++)
                loop->at[k].strides[kept - 1] = loop->at[k].strides[i];
            continue;
        }
        loop->sizes[kept] = loop->sizes[i];
        for (int k = 0; k < loop->operands; k++)
            loop->at[k].strides[kept] = loop->at[k].strides[i];
        kept++;
    }
    if (kept == 0) {
        loop->sizes[0] = 1;
        for (int k = 0; k < loop->operands; k++)
            loop->at[k].strides[0] = 1;
        kept = 1;
    }
    loop->ndim = kept;
}

void tu_loop_init(tu_loop *loop, const tt_tensor *out, int inputs, tt_tensor *const *in) {
    loop->operands = inputs + 1;
    bool plain = (out->flags & TU_CONTIGUOUS) != 0;
    for (int i = 0; i < inputs; i++)
        plain = plain && in[i]->flags & TU_CONTIGUOUS && in[i]->numel == out->numel;
    loop->ndim = plain ? 1 : out->ndim;
    for (int k = 0; k < loop->operands; k++) {
        const tt_tensor *x = k == 0 ? out : in[k - 1];
        loop->at[k].data = tu_pointer(x);
        loop->at[k].dtype = x->dtype;
        int pad = out->ndim - x->ndim;
        if (plain)
            loop->at[k].strides[0] = 1;
        for (int dim = 0; !plain && dim < out->ndim; dim++)
            loop->at[k].strides[dim] =
                dim < pad || (x->sizes[dim - pad] == 1 && out->sizes[dim] != 1) ? 0 : x->strides[dim - pad];
    }
    if (plain) {
        loop->sizes[0] = out->numel;
        return;
    }
    for (int dim = 0; dim < out->ndim; dim++)
        loop->sizes[dim] = out->sizes[dim];
    sort_dims(loop);
    merge_dims(loop);
}

/* ---- walking it ---- */

typedef struct walk {
    const tu_loop *loop;
    tu_kernel *kernel;
    tutti_dtype compute;
    const void *attributes;
    int64_t piece; /* elements of one buffer */
} walk;

typedef struct buffers {
    _Alignas(64) char at[TU_OPERANDS][PIECE_BYTES];
    _Alignas(64) char raw[PIECE_BYTES];
} buffers;

/* Makes `count` elements of operand k dense and of the compute type; in place where they are. */
static const void *fetch(const walk *job, int k, const char *data, int64_t count, buffers *buffer) {
    tutti_dtype dtype = job->loop->at[k].dtype;
    int64_t stride = job->loop->at[k].strides[job->loop->ndim - 1];
    size_t size = tu_dtype_bytes[dtype];
    if (stride == 0) {
        /* One element repeated. */
        _Alignas(16) char one[16];
        size_t compute_size = tu_dtype_bytes[job->compute];
        if (tutti_convert(data, dtype, one, job->compute, 1) != TUTTI_OK)
            return data;
        tu_pack(buffer->at[k], one, 0, compute_size, count);
        return buffer->at[k];
    }
    const void *dense = data;
    if (stride != 1) {
        void *packed = dtype == job->compute ? buffer->at[k] : buffer->raw;
        tu_pack(packed, data, stride, size, count);
        dense = packed;
    }
    if (dtype == job->compute)
        return dense;
    if (tu_convert(dense, dtype, buffer->at[k], job->compute, (size_t)count) != TUTTI_OK)
        return dense;
    return buffer->at[k];
}

static void store(const walk *job, char *data, const void *result, int64_t count, buffers *buffer) {
    tutti_dtype dtype = job->loop->at[0].dtype;
    int64_t stride = job->loop->at[0].strides[job->loop->ndim - 1];
    const void *converted = result;
    if (dtype != job->compute) {
        void *to = stride == 1 ? (void *)data : buffer->raw;
        if (tu_convert(result, job->compute, to, dtype, (size_t)count) != TUTTI_OK)
            return;
        converted = to;
    }
    if (converted != data)
        tu_unpack(data, stride, converted, tu_dtype_bytes[dtype], count);
}

static bool all_direct(const walk *job) {
    const tu_loop *loop = job->loop;
    for (int k = 0; k < loop->operands; k++)
        if (loop->at[k].strides[loop->ndim - 1] != 1 || loop->at[k].dtype != job->compute)
            return false;
    return true;
}

/* One stretch of the innermost dimension. */
static void run_stretch(const walk *job, char *const *data, int64_t count, bool direct, buffers *buffer) {
    const tu_loop *loop = job->loop;
    const void *in[TU_OPERANDS];
    if (direct) {
        for (int k = 1; k < loop->operands; k++)
            in[k - 1] = data[k];
        job->kernel(in, data[0], count, job->attributes);
        return;
    }
    int last = loop->ndim - 1;
    bool out_direct = loop->at[0].strides[last] == 1 && loop->at[0].dtype == job->compute;
    for (int64_t done = 0; done < count; done += job->piece) {
        int64_t length = count - done < job->piece ? count - done : job->piece;
        for (int k = 1; k < loop->operands; k++) {
            bool repeated = loop->at[k].strides[last] == 0 && done > 0;
            in[k - 1] =
                repeated ? buffer->at[k]
                         : fetch(job, k, data[k] + done * loop->at[k].strides[last] * tu_dtype_bytes[loop->at[k].dtype],
                                 length, buffer);
        }
        char *out = data[0] + done * loop->at[0].strides[last] * tu_dtype_bytes[loop->at[0].dtype];
        job->kernel(in, out_direct ? (void *)out : buffer->at[0], length, job->attributes);
        if (!out_direct)
            store(job, out, buffer->at[0], length, buffer);
    }
}

static tu_kernel move_past;

static void walk_range(void *context, int64_t begin, int64_t end) {
    const walk *job = context;
    const tu_loop *loop = job->loop;
    int last = loop->ndim - 1;
    int64_t index[TT_MAX_DIMS];
    int64_t rest = begin;
    char *data[TU_OPERANDS];
    for (int dim = last; dim >= 0; dim--) {
        index[dim] = rest % loop->sizes[dim];
        rest /= loop->sizes[dim];
    }
    for (int k = 0; k < loop->operands; k++) {
        int64_t offset = 0;
        for (int dim = 0; dim <= last; dim++)
            // cppcheck-suppress uninitvar // the loop above filled all of them
            offset += index[dim] * loop->at[k].strides[dim];
        data[k] = loop->at[k].data + offset * tu_dtype_bytes[loop->at[k].dtype];
    }
    bool direct = all_direct(job);
    buffers buffer;
    while (begin < end) {
        int64_t count = loop->sizes[last] - index[last] < end - begin ? loop->sizes[last] - index[last] : end - begin;
        run_stretch(job, data, count, direct, &buffer);
        begin += count;
        index[last] += count;
        /* Carry to the outer dimensions. */
        int64_t moved = count;
        for (int dim = last;; dim--) {
            for (int k = 0; k < loop->operands; k++)
                data[k] += moved * loop->at[k].strides[dim] * tu_dtype_bytes[loop->at[k].dtype];
            if (index[dim] < loop->sizes[dim] || dim == 0)
                break;
            for (int k = 0; k < loop->operands; k++)
                data[k] -= index[dim] * loop->at[k].strides[dim] * tu_dtype_bytes[loop->at[k].dtype];
            index[dim] = 0;
            index[dim - 1]++;
            moved = 1;
        }
    }
    if (job->kernel == move_past)
        tu_stream_end();
}

void tu_loop_run(tu_loop *loop, tu_kernel *kernel, tutti_dtype compute, const void *attributes) {
    int64_t total = 1;
    for (int dim = 0; dim < loop->ndim; dim++)
        total *= loop->sizes[dim];
    if (total == 0)
        return;
    size_t widest = tu_dtype_bytes[compute];
    for (int k = 0; k < loop->operands; k++)
        if (tu_dtype_bytes[loop->at[k].dtype] > widest)
            widest = tu_dtype_bytes[loop->at[k].dtype];
    walk job = { loop, kernel, compute, attributes, (int64_t)(PIECE_BYTES / widest) };
    tu_parallel(total, GRAIN, walk_range, &job);
}

/* ---- copies ---- */

static void move(const void *const *in, void *out, int64_t count, const void *attributes) {
    /* The element size travels as the attribute; a dense input of the output's type may lie in the output itself. */
    if (in[0] != out)
        memcpy(out, in[0], (size_t)count * *(const size_t *)attributes);
}

/* The same for what was converted in a buffer and is too large for the caches. */
static void move_past(const void *const *in, void *out, int64_t count, const void *attributes) {
    int64_t bytes = count * (int64_t) * (const size_t *)attributes;
    if ((uintptr_t)out % 16 == 0 && bytes % 16 == 0)
        tu_stream_copy(out, in[0], bytes);
    else
        memcpy(out, in[0], (size_t)bytes);
}

static bool goes_past_caches(const tu_loop *loop) {
    return loop->ndim == 1 && loop->at[0].strides[0] == 1 && loop->at[0].dtype != loop->at[1].dtype &&
           (size_t)loop->sizes[0] * tu_dtype_bytes[loop->at[0].dtype] >= TU_STREAM_BYTES;
}

static void copy_loop(tu_loop *loop) {
    /* To a type of its own: the output's, so that each element is converted once. */
    tutti_dtype compute = loop->at[0].dtype;
    size_t element = tu_dtype_bytes[compute];
    if (!tu_copy_turned(loop))
        tu_loop_run(loop, goes_past_caches(loop) ? move_past : move, compute, &element);
}

tutti_status tu_copy_tensor(const tt_tensor *to, const tt_tensor *x) {
    if (tu_on_device(to) || tu_on_device(x))
        return tu_device_copy_tensor(to, x);
    tu_loop loop;
    tt_tensor *in[] = { (tt_tensor *)x };
    tu_loop_init(&loop, to, 1, in);
    copy_loop(&loop);
    return TUTTI_OK;
}

tutti_status tu_copy_out(const tt_tensor *x, void *out, tutti_dtype dtype) {
    tu_shape shape = tu_shape_of(x);
    shape.dtype = dtype;
    tutti_status status = tu_shape_contiguous("copy", &shape);
    if (status != TUTTI_OK)
        return status;
    tt_tensor other = { .dtype = (uint8_t)dtype, .ndim = x->ndim, .flags = TU_CONTIGUOUS, .numel = x->numel };
    tu_storage storage = { .data = out };
    other.storage = &storage;
    memcpy(other.sizes, shape.sizes, sizeof other.sizes);
    memcpy(other.strides, shape.strides, sizeof other.strides);
    return tu_copy_tensor(&other, x);
}
