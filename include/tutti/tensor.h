/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors: strided arrays on shared, resizable storage, and the scopes that own them.
 *
 *     tt_scope scope = tt_scope_open();
 *     tt_tensor *x = tt_randn(tt_shape(4, 8), TUTTI_F32, NULL);
 *     tt_tensor *y = tt_relu(tt_matmul(x, tt_transpose(x, 0, 1)));
 *     tt_print(y, stdout);
 *     tutti_status status = tt_scope_close(&scope);           (the first error of them all; x and y are gone)
 *
 * WHO OWNS A TENSOR. Every tensor that a tt_ function returns belongs to the innermost open scope of its thread and
 * goes with it; no release calls in between. tt_keep gives the caller a reference of its own (end it with tt_release);
 * tt_scope_return moves a tensor to the next outer scope. Without an open scope a tt_ call is an error.
 *
 * ERRORS. The first error stays pending in its thread until tt_scope_close returns it or tt_error_clear drops it. While
 * it is pending every tt_ function does nothing and returns NULL (0, false, NaN, a list with a count of 0), so that
 * a whole step needs one check. The first 1024 entries of such a list may be read all the same: they and their names
 * are NULL, so that `tt_chunk(x, 3, 0).at[2]` is like any other result. NULL is therefore free to mean "absent" where a
 * comment says so (no bias, no gradient); everywhere else a NULL tensor is an error that names the operator and the
 * argument.
 *
 * THREADS. A scope belongs to one thread. A tensor may be read by several threads at once; writing is the caller's to
 * order.
 *
 * DEVICES. `cpu` has data; `meta` has shapes only: every operator runs on it, costs nothing and computes nothing.
 */
#ifndef TUTTI_TENSOR_H
#define TUTTI_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <tutti/device.h>
#include <tutti/dtype.h>
#include <tutti/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tt_tensor tt_tensor;

/* ---- shapes and lists, by value ---- */

#define TT_MAX_DIMS 8

/* Sizes, strides, or a list of dimensions. tt_shape(2, 3) makes one, tt_shape() is the shape of a single number.
 * A count below 0 is "no list given" (tt_no_dims). */
typedef struct tt_dims {
    int count;
    int64_t at[TT_MAX_DIMS];
} tt_dims;

/* The same from an array. More than TT_MAX_DIMS entries give a list that every operator refuses. */
TUTTI_API tt_dims tt_dims_of(int count, const int64_t *entries);
/* The list that means "no list given". */
TUTTI_API tt_dims tt_no_dims(void);

/* Several tensors. tt_tensors(a, b) makes one that lives as long as the enclosing block (C) or expression (C++). */
typedef struct tt_tensor_list {
    size_t count;
    tt_tensor *const *at;
} tt_tensor_list;

/* A list of the `count` tensors at `tensors`, which it lends. */
TUTTI_API tt_tensor_list tt_tensors_of(size_t count, tt_tensor *const *tensors);

/* Tensors and their names, side by side: what a file holds, or the parameters of a module. They belong to the scope. */
typedef struct tt_named_list {
    size_t count;
    tt_tensor *const *at;
    const char *const *names;
} tt_named_list;

/* The tensor of that name, or an error that lists the names there are. */
TUTTI_API tt_tensor *tt_named(tt_named_list list, const char *name);

#ifndef __cplusplus
#define tt_shape(...) \
    tt_dims_of((int)(sizeof((int64_t[]){ 0, __VA_ARGS__ }) / sizeof(int64_t)) - 1, (int64_t[]){ 0, __VA_ARGS__ } + 1)
#define tt_tensors(...) \
    tt_tensors_of(sizeof((tt_tensor *[]){ __VA_ARGS__ }) / sizeof(tt_tensor *), (tt_tensor *[]){ __VA_ARGS__ })
#endif

/* ---- scopes and errors ---- */

typedef struct tt_scope {
    uint64_t id; /* 0: closed, or could not be opened */
} tt_scope;

/* Opens a scope inside this thread's innermost one. */
TUTTI_API tt_scope tt_scope_open(void);

/* Releases what the scope owns, then returns and forgets the pending error. Scopes close in reverse order of opening;
 * closing an outer one closes those inside it. Closing twice is TUTTI_ERROR_SCOPE. */
TUTTI_API TUTTI_CHECKED tutti_status tt_scope_close(tt_scope *scope);

/* The same for a scope inside of a forward, or of any function that others call between their tt_ calls: a pending
 * error stays pending, for the scope outside to return. A scope that is not open is TUTTI_ERROR_SCOPE, pending. */
TUTTI_API void tt_scope_leave(tt_scope *scope);

/* Moves `tensor` from the innermost scope to the next outer one and returns it. */
TUTTI_API tt_tensor *tt_scope_return(tt_tensor *tensor);

/* A reference of the caller's own, beside the scope's. NULL is passed through. */
TUTTI_API tt_tensor *tt_keep(tt_tensor *tensor);
/* Ends a reference that tt_keep gave. NULL is allowed. */
TUTTI_API void tt_release(tt_tensor *tensor);

/* The pending error of this thread, TUTTI_OK for none. tutti_error_message() has its words after tt_scope_close or
 * tt_error_show. */
TUTTI_API tutti_status tt_error_pending(void);
/* Forgets the pending error of this thread. */
TUTTI_API void tt_error_clear(void);
/* Makes the pending error the thread's last error again (tutti_error_message) and leaves it pending. */
TUTTI_API tutti_status tt_error_show(void);
/* For callers' own checks inside an expression: sets a pending error unless there is one. */
TUTTI_API void tt_error_set(tutti_status status, const char *message);
/* The same with a message as printf makes it. */
TUTTI_API void tt_error_format(tutti_status status, const char *format, ...) TUTTI_PRINTF(2, 3);

/* How many of each are alive in this process. */
typedef struct tt_counts {
    size_t size;
    int64_t tensors, storages, scopes, nodes;
} tt_counts;
#define TT_COUNTS_INIT TUTTI_DEFAULTS(tt_counts)
/* TT_COUNTS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_counts_init(tt_counts *counts, size_t size);
/* Writes them to *counts, whose size is set. */
TUTTI_API TUTTI_CHECKED tutti_status tt_count(tt_counts *counts);

/* Gives memory kept for reuse back to the system: this thread's, and large blocks of all that none of them uses. */
TUTTI_API void tt_memory_trim(void);

/* Ends what the library keeps for the whole process: its hold on the threads that compute, the memory that this thread
 * keeps for reuse, and GPUs of which nothing is held any more: no tensor, stream, event, replay or compiled function,
 * and no world in which products were fused there. All of it is made again on need. TUTTI_ERROR_STATE, with their
 * number, where tensors, nodes or scopes are still alive; it ends the rest all the same. */
TUTTI_API TUTTI_CHECKED tutti_status tt_finalize(void);

/* ---- making tensors ---- */

typedef struct tt_options {
    size_t size;
    tutti_device device; /* 0: TUTTI_CPU */
    bool requires_grad;  /* floating-point and complex only */
    const char *name;    /* shown in error messages and when printed; copied */
} tt_options;
#define TT_OPTIONS_INIT TUTTI_DEFAULTS(tt_options)
/* TT_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_options_init(tt_options *options, size_t size);

/* Contents undefined. */
TUTTI_API tt_tensor *tt_empty(tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Contents undefined, with these strides in elements; none may be negative. */
TUTTI_API tt_tensor *tt_empty_strided(tt_dims shape, tt_dims strides, tutti_dtype dtype, const tt_options *options);
/* Filled with zeros. */
TUTTI_API tt_tensor *tt_zeros(tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Filled with ones. */
TUTTI_API tt_tensor *tt_ones(tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Filled with `value`, converted to `dtype`. */
TUTTI_API tt_tensor *tt_full(tt_dims shape, double value, tutti_dtype dtype, const tt_options *options);
/* start, start + step, … as far as `end`, which is left out. */
TUTTI_API tt_tensor *tt_arange(double start, double end, double step, tutti_dtype dtype, const tt_options *options);
/* The matrix of rows by rows with ones on its diagonal. */
TUTTI_API tt_tensor *tt_eye(int64_t rows, tutti_dtype dtype, const tt_options *options);
/* Of the shape, dtype and device of x; contents undefined. */
TUTTI_API tt_tensor *tt_empty_like(tt_tensor *x);
/* Of the shape, dtype and device of x, filled with zeros. */
TUTTI_API tt_tensor *tt_zeros_like(tt_tensor *x);
/* Of the shape, dtype and device of x, filled with ones. */
TUTTI_API tt_tensor *tt_ones_like(tt_tensor *x);

/* A copy of row-major `data`. */
TUTTI_API tt_tensor *tt_from(const void *data, tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* The caller's memory itself, not resizable. `release` (may be NULL) is called with `owner` when the last tensor on it
 * goes. */
TUTTI_API tt_tensor *tt_wrap(void *data, tt_dims shape, tutti_dtype dtype, void (*release)(void *owner), void *owner);
/* A 0-dim f64 number that adopts the type of what it meets: tt_add(x, tt_number(2)) keeps x's dtype if x is floating
 * point. */
TUTTI_API tt_tensor *tt_number(double value);

/* ---- random numbers: the same for the same seed, rank and order of calls, on every machine ---- */

/* Restarts the thread's generator. Ranks given different numbers draw different streams from one seed. */
TUTTI_API void tt_seed(uint64_t seed, int rank);
/* Uniform in [0, 1). */
TUTTI_API tt_tensor *tt_rand(tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Normal, mean 0, variance 1. */
TUTTI_API tt_tensor *tt_randn(tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Whole numbers, uniform in [low, high). */
TUTTI_API tt_tensor *tt_randint(int64_t low, int64_t high, tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Fills x, uniform in [low, high). */
TUTTI_API tt_tensor *tt_uniform_(tt_tensor *x, double low, double high);
/* Fills x, normal with this mean and standard deviation. */
TUTTI_API tt_tensor *tt_normal_(tt_tensor *x, double mean, double deviation);

/* ---- asking a tensor ---- */

/* The type of its elements. */
TUTTI_API tutti_dtype tt_dtype(const tt_tensor *x);
/* Where it lies. */
TUTTI_API tutti_device tt_device_of(const tt_tensor *x);
/* How many dimensions it has; 0 for a single number. */
TUTTI_API int tt_dim_count(const tt_tensor *x);
TUTTI_API int64_t tt_size(const tt_tensor *x, int dim);   /* negative dims count from the end, here and everywhere */
TUTTI_API int64_t tt_stride(const tt_tensor *x, int dim); /* in elements */
TUTTI_API int64_t tt_offset(const tt_tensor *x);          /* in elements, from the start of the storage */
/* How many elements it has. */
TUTTI_API int64_t tt_numel(const tt_tensor *x);
/* The sizes of all dimensions. */
TUTTI_API tt_dims tt_sizes(const tt_tensor *x);
/* The strides of all dimensions, in elements. */
TUTTI_API tt_dims tt_strides(const tt_tensor *x);
/* Whether its elements lie in row-major order without gaps. */
TUTTI_API bool tt_is_contiguous(const tt_tensor *x);
TUTTI_API const char *tt_name(const tt_tensor *x); /* "" for none */
/* Gives x a name for messages and prints; copied. NULL and "" take it away. */
TUTTI_API void tt_set_name(tt_tensor *x, const char *name);

/* The first element. Waits for pending collectives; NULL with an error for freed storage and for meta; NULL without one
 * for a tensor of no elements. */
TUTTI_API const void *tt_data(const tt_tensor *x);
/* The same for writing: it counts as a write and bumps the version. */
TUTTI_API void *tt_data_mut(tt_tensor *x);

/* The value of a tensor of one element; NaN where an error is pending. */
TUTTI_API double tt_item(const tt_tensor *x);
/* The same as an integer, exact for every i64. */
TUTTI_API int64_t tt_item_int(const tt_tensor *x);
/* Element by its indices. */
TUTTI_API double tt_at(const tt_tensor *x, tt_dims index);
/* Copies all elements, row-major, converted to `dtype`; `count` must be tt_numel(x). */
TUTTI_API bool tt_read(const tt_tensor *x, void *out, tutti_dtype dtype, size_t count);

/* The same shape and equal elements (a NaN equals nothing). */
TUTTI_API bool tt_equal(tt_tensor *a, tt_tensor *b);
/* The same shape, and |a - b| <= absolute + relative * |b| for every element. */
TUTTI_API bool tt_allclose(tt_tensor *a, tt_tensor *b, double relative, double absolute);

/* A picture of the tensor: values in rows, aligned, the middle of long rows left out; then dtype, shape and what is
 * special. In a function that is captured it is TUTTI_ERROR_CAPTURE, as other reads of elements are. */
TUTTI_API void tt_print(const tt_tensor *x, FILE *file);
/* The same into `buffer`, always ended with a zero byte; returns the length of the whole text. */
TUTTI_API size_t tt_format(const tt_tensor *x, char *buffer, size_t size);

/* ---- storage and versions ---- */

/* Bytes of the storage under x, which all its views and detached aliases share. Always legal, also when freed. */
TUTTI_API size_t tt_storage_bytes(const tt_tensor *x);
/* Grows or shrinks that storage for all of them, keeping the first min(old, new) bytes. 0 frees it: reading is an error
 * until it has grown back. Changes no shape and no version. On failure nothing has changed. */
TUTTI_API bool tt_storage_resize(tt_tensor *x, size_t bytes);
/* Whether the two share a storage. */
TUTTI_API bool tt_same_storage(const tt_tensor *a, const tt_tensor *b);

/* How often x or an alias of it was written in place. Starts at 0; every in-place operation adds exactly 1, also
 * without gradients. */
TUTTI_API uint32_t tt_version(const tt_tensor *x);
/* Sets the versions of several tensors (and of all their aliases). Lists of different lengths and negative versions are
 * errors. */
TUTTI_API bool tt_set_version(tt_tensor_list tensors, size_t version_count, const int64_t *versions);

/* What lies between begin and end leaves the versions of these tensors as they were: to refill a tensor that autograd
 * has saved. The end restores also when an error is pending. */
typedef struct tt_preserve tt_preserve;
/* Notes the versions of these tensors. NULL with the error pending. */
TUTTI_API tt_preserve *tt_preserve_begin(tt_tensor_list tensors);
/* Restores them and ends `preserve`. NULL is allowed. */
TUTTI_API void tt_preserve_end(tt_preserve *preserve);

#ifdef __cplusplus
}

/* The C++ forms of tt_shape and tt_tensors. */
template <typename... Entries> inline tt_dims tt_shape(Entries... entries) {
    const int64_t list[] = { 0, static_cast<int64_t>(entries)... };
    return tt_dims_of(static_cast<int>(sizeof...(entries)), list + 1);
}
template <size_t count> struct tt_tensors_holder {
    tt_tensor *tensors[count];
    operator tt_tensor_list() const {
        return tt_tensors_of(count, tensors);
    }
};
template <typename... Tensors> inline tt_tensors_holder<sizeof...(Tensors)> tt_tensors(Tensors... tensors) {
    return tt_tensors_holder<sizeof...(Tensors)>{ { tensors... } };
}
#endif
#endif
