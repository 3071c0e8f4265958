/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators. Most of this file and docs/operators.md are made from the same table that runs them.
 *
 * - A name that ends in _ works in place: it writes its first argument, returns it, and bumps its version.
 * - Shapes broadcast from the right; types promote as in NumPy and PyTorch: bool < integers < floats < complex; a 0-dim
 *   tensor and a number (tt_number, double arguments) raise the category but not the width.
 * - Dimensions count from 0; negative ones from the end.
 */
#ifndef TUTTI_OPS_H
#define TUTTI_OPS_H

#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All dimensions, for reductions. */
#define TT_ALL_DIMS tt_no_dims()

/* ---- from the operator table, by scripts/operators: change the rows, not this ---- */

/* ---- arithmetic ---- */
/* a + b. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_add(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_add_(tt_tensor *a, tt_tensor *b); /* in place */
/* a + number; integers stay so where the number is whole. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_add_scalar(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_add_scalar_(tt_tensor *a, double number); /* in place */
/* a + factor * b. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_add_scaled(tt_tensor *a, tt_tensor *b, double factor);
TUTTI_API tt_tensor *tt_add_scaled_(tt_tensor *a, tt_tensor *b, double factor); /* in place */
/* x + factor * a / b. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_addcdiv(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor);
TUTTI_API tt_tensor *tt_addcdiv_(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor); /* in place */
/* x + factor * a * b. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_addcmul(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor);
TUTTI_API tt_tensor *tt_addcmul_(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor); /* in place */
/* a / b; integers give f32. For floats, complex; has a gradient. */
TUTTI_API tt_tensor *tt_div(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_div_(tt_tensor *a, tt_tensor *b); /* in place */
/* a / number; integers give f32. For floats, complex; has a gradient. */
TUTTI_API tt_tensor *tt_div_scalar(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_div_scalar_(tt_tensor *a, double number); /* in place */
/* a + weight * (b - a), which is b for weight 1. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_lerp(tt_tensor *a, tt_tensor *b, double weight);
TUTTI_API tt_tensor *tt_lerp_(tt_tensor *a, tt_tensor *b, double weight); /* in place */
/* the larger of a and b; passes a NaN on; equal ones share the gradient. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_maximum(tt_tensor *a, tt_tensor *b);
/* the smaller of a and b; passes a NaN on; equal ones share the gradient. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_minimum(tt_tensor *a, tt_tensor *b);
/* a * b. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_mul(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_mul_(tt_tensor *a, tt_tensor *b); /* in place */
/* a * number; integers stay so where the number is whole. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_mul_scalar(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_mul_scalar_(tt_tensor *a, double number); /* in place */
/* a to the power b; of integers, negative powers are cut to whole numbers. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_pow(tt_tensor *a, tt_tensor *b);
/* a to the power of a number; integers stay so where it is whole. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_pow_scalar(tt_tensor *a, double exponent);
/* a - b. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_sub(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_sub_(tt_tensor *a, tt_tensor *b); /* in place */

/* ---- functions ---- */
/* the magnitude of x; of complex x a real tensor, rounded by the C library. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_abs(tt_tensor *x);
/* the next integer above. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_ceil(tt_tensor *x);
/* x, raised to low and then lowered to high. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_clamp(tt_tensor *x, double low, double high);
TUTTI_API tt_tensor *tt_clamp_(tt_tensor *x, double low, double high); /* in place */
/* complex conjugate. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_conj(tt_tensor *x);
/* cosine. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_cos(tt_tensor *x);
/* error function. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_erf(tt_tensor *x);
/* e to the power x; of complex x by the C library. For floats, complex; has a gradient. */
TUTTI_API tt_tensor *tt_exp(tt_tensor *x);
TUTTI_API tt_tensor *tt_exp_(tt_tensor *x); /* in place */
/* the next integer below. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_floor(tt_tensor *x);
/* natural logarithm; of complex x by the C library. For floats, complex; has a gradient. */
TUTTI_API tt_tensor *tt_log(tt_tensor *x);
/* -x. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_neg(tt_tensor *x);
TUTTI_API tt_tensor *tt_neg_(tt_tensor *x); /* in place */
/* 1 / x. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_reciprocal(tt_tensor *x);
/* the nearest integer, halves to even. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_round(tt_tensor *x);
/* 1 / square root. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_rsqrt(tt_tensor *x);
/* -1, 0 or 1. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_sign(tt_tensor *x);
/* sine. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_sin(tt_tensor *x);
/* square root; of complex x by the C library. For floats, complex; has a gradient. */
TUTTI_API tt_tensor *tt_sqrt(tt_tensor *x);
TUTTI_API tt_tensor *tt_sqrt_(tt_tensor *x); /* in place */
/* x * x. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_square(tt_tensor *x);
/* hyperbolic tangent. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_tanh(tt_tensor *x);
TUTTI_API tt_tensor *tt_tanh_(tt_tensor *x); /* in place */

/* ---- activations ---- */
/* x * Phi(x), exact. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_gelu(tt_tensor *x);
/* gelu by its tanh form. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_gelu_tanh(tt_tensor *x);
/* x where it is positive, else 0. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_relu(tt_tensor *x);
TUTTI_API tt_tensor *tt_relu_(tt_tensor *x); /* in place */
/* 1 / (1 + exp(-x)). For floats; has a gradient. */
TUTTI_API tt_tensor *tt_sigmoid(tt_tensor *x);
TUTTI_API tt_tensor *tt_sigmoid_(tt_tensor *x); /* in place */
/* x * sigmoid(x). For floats; has a gradient. */
TUTTI_API tt_tensor *tt_silu(tt_tensor *x);

/* ---- comparison ---- */
/* a == b. For numbers, complex. */
TUTTI_API tt_tensor *tt_eq(tt_tensor *a, tt_tensor *b);
/* a >= b. For numbers. */
TUTTI_API tt_tensor *tt_ge(tt_tensor *a, tt_tensor *b);
/* a > b. For numbers. */
TUTTI_API tt_tensor *tt_gt(tt_tensor *a, tt_tensor *b);
/* x is not a number. For numbers. */
TUTTI_API tt_tensor *tt_isnan(tt_tensor *x);
/* a <= b. For numbers. */
TUTTI_API tt_tensor *tt_le(tt_tensor *a, tt_tensor *b);
/* both are not zero. For numbers. */
TUTTI_API tt_tensor *tt_logical_and(tt_tensor *a, tt_tensor *b);
/* x is zero. For numbers. */
TUTTI_API tt_tensor *tt_logical_not(tt_tensor *x);
/* one of them is not zero. For numbers. */
TUTTI_API tt_tensor *tt_logical_or(tt_tensor *a, tt_tensor *b);
/* a < b. For numbers. */
TUTTI_API tt_tensor *tt_lt(tt_tensor *a, tt_tensor *b);
/* value where the mask is set, else x. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_masked_fill(tt_tensor *x, tt_tensor *mask, double value);
/* a != b. For numbers, complex. */
TUTTI_API tt_tensor *tt_ne(tt_tensor *a, tt_tensor *b);
/* a where the condition is not zero, else b. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_where(tt_tensor *condition, tt_tensor *a, tt_tensor *b);

/* ---- reductions ---- */
/* whether none is zero. For any dtype. */
TUTTI_API tt_tensor *tt_all(tt_tensor *x, tt_dims dims, bool keep_dims);
/* the largest; passes a NaN on; equal ones share the gradient. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_amax(tt_tensor *x, tt_dims dims, bool keep_dims);
/* the smallest; passes a NaN on; equal ones share the gradient. For numbers; has a gradient. */
TUTTI_API tt_tensor *tt_amin(tt_tensor *x, tt_dims dims, bool keep_dims);
/* whether one is not zero. For any dtype. */
TUTTI_API tt_tensor *tt_any(tt_tensor *x, tt_dims dims, bool keep_dims);
/* where the largest is, as i64; the first of equal ones. For numbers. */
TUTTI_API tt_tensor *tt_argmax(tt_tensor *x, int dim, bool keep_dims);
/* the average of all elements. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_mean(tt_tensor *x);
/* averages over dims, as sum_dims. For floats, complex; has a gradient. */
TUTTI_API tt_tensor *tt_mean_dims(tt_tensor *x, tt_dims dims, bool keep_dims);
/* square root of the sum of squares. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_norm(tt_tensor *x);
/* products; integers and bool in i64. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_prod(tt_tensor *x, tt_dims dims, bool keep_dims);
/* the sum of all elements. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_sum(tt_tensor *x);
/* sums over dims (none given: all), which stay with size 1 where keep_dims is set; integers and bool in i64. For
 * numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_sum_dims(tt_tensor *x, tt_dims dims, bool keep_dims);
/* sums what broadcasting expanded, down to shape. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_sum_to(tt_tensor *x, tt_dims shape);

/* ---- matrix products ---- */
/* i8 times i8, summed in i32, exactly. For i8. */
TUTTI_API tt_tensor *tt_int_matmul(tt_tensor *a, tt_tensor *b);
/* x weight^T + bias; bias may be NULL; f32 and f64 have the same bits at every level but reference; there, and for
 * complex and bf16, rounds as the BLAS or oneDNN does. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_linear(tt_tensor *x, tt_tensor *weight, tt_tensor *bias);
/* (…, m, k) times (…, k, n); leading dimensions broadcast; one-dimensional arguments are a row and a column; f32 and
 * f64 have the same bits at every level but reference; there, and for complex and bf16, rounds as the BLAS or oneDNN
 * does. For numbers, complex; has a gradient. */
TUTTI_API tt_tensor *tt_matmul(tt_tensor *a, tt_tensor *b);
/* a (m, k) times b (k, n), for narrow types, accumulated in f32. A scale is one f32, or one per row of a (m, 1), or one
 * per column of b (1, n); bias (n) and result_scale (one f32) may be NULL; use_fast_accum lets a GPU sum products of f8
 * with fewer digits than f32 has, which is quicker, and changes nothing elsewhere; the same bits at every level but
 * reference, where it rounds as the BLAS does. For numbers. */
TUTTI_API tt_tensor *tt_scaled_matmul(tt_tensor *a, tt_tensor *b, tt_tensor *scale_a, tt_tensor *scale_b,
                                      tt_tensor *bias, tt_tensor *result_scale, tutti_dtype dtype, bool use_fast_accum);

/* ---- views ---- */
/* x under another handle. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_alias(tt_tensor *x);
/* any sizes and strides over x's storage, from an offset in it. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_as_strided(tt_tensor *x, tt_dims shape, tt_dims strides, int64_t offset);
/* equal parts; the last may be smaller. For any dtype; has a gradient. */
TUTTI_API tt_tensor_list tt_chunk(tt_tensor *x, int64_t parts, int dim);
/* x under another handle, without history; the version is shared. For any dtype. */
TUTTI_API tt_tensor *tt_detach(tt_tensor *x);
/* repeats dimensions of size 1 without copying; -1 keeps a size. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_expand(tt_tensor *x, tt_dims shape);
/* merges dimensions first to last; a view where possible. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_flatten(tt_tensor *x, int first, int last);
/* a part of one dimension. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_narrow(tt_tensor *x, int dim, int64_t start, int64_t length);
/* dimensions in another order. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_permute(tt_tensor *x, tt_dims order);
/* another shape; a view where possible. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_reshape(tt_tensor *x, tt_dims shape);
/* one entry of a dimension, which goes. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_select(tt_tensor *x, int dim, int64_t index);
/* every step-th of start to end, cut to what is there. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_slice(tt_tensor *x, int dim, int64_t start, int64_t end, int64_t step);
/* parts of the given sizes. For any dtype; has a gradient. */
TUTTI_API tt_tensor_list tt_split(tt_tensor *x, size_t part_count, const int64_t *sizes, int dim);
/* drops a dimension of size 1; else x as it is. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_squeeze(tt_tensor *x, int dim);
/* a matrix with rows and columns swapped. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_t(tt_tensor *x);
/* swaps two dimensions. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_transpose(tt_tensor *x, int a, int b);
/* a new dimension of size 1. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_unsqueeze(tt_tensor *x, int dim);
/* another shape, one size of which may be -1; an error where a copy would be needed. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_view(tt_tensor *x, tt_dims shape);
/* a last dimension of 2 as complex numbers. For f32, f64; has a gradient. */
TUTTI_API tt_tensor *tt_view_as_complex(tt_tensor *x);
/* real and imaginary part as a last dimension. For complex; has a gradient. */
TUTTI_API tt_tensor *tt_view_as_real(tt_tensor *x);

/* ---- copies ---- */
/* a copy; strides kept where x is dense. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_clone(tt_tensor *x);
/* a row-major copy, or x itself. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_contiguous(tt_tensor *x);
/* writes from into x; broadcasts and converts. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_copy_(tt_tensor *x, tt_tensor *from);
/* writes one value into x. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_fill_(tt_tensor *x, double value);
/* the same values, laid out so that moving dim to the front is contiguous. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_restride(tt_tensor *x, int dim);
/* x in another dtype; x itself where it has it. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_to(tt_tensor *x, tutti_dtype dtype);
/* x on another device; x itself where it is there. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_to_device(tt_tensor *x, tutti_device device);
/* writes 0 into x. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_zero_(tt_tensor *x);

/* ---- joining and indexing ---- */
/* one behind the other along dim. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_cat(tt_tensor_list tensors, int dim);
/* rows of weight, one per index. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_embedding(tt_tensor *weight, tt_tensor *index);
/* out[i][j] = x[i][index[i][j]] for dim 1, and so on. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_gather_dim(tt_tensor *x, int dim, tt_tensor *index);
/* x, with source's entries added where index says; narrow types are summed wider and rounded once. For any dtype; has a
 * gradient. */
TUTTI_API tt_tensor *tt_index_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source);
/* entries of one dimension by a list of indices. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_index_select(tt_tensor *x, int dim, tt_tensor *index);
/* x, with out[i][index[i][j]] += source[i][j] for dim 1, and so on; narrow types are summed wider. For any dtype; has a
 * gradient. */
TUTTI_API tt_tensor *tt_scatter_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source);
/* side by side along a new dimension. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_stack(tt_tensor_list tensors, int dim);
/* zero above a diagonal. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_tril(tt_tensor *x, int64_t diagonal);
/* zero below a diagonal. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_triu(tt_tensor *x, int64_t diagonal);

/* ---- networks ---- */
/* softmax(scale q k^T) v over (…, s, d); scale 0 means 1 / sqrt(d); causal hides later keys. For floats; has a
 * gradient. */
TUTTI_API tt_tensor *tt_attention(tt_tensor *q, tt_tensor *k, tt_tensor *v, bool causal, double scale);
/* mean of -log softmax at the targets, those equal to ignore left out; logits (n, classes, ...) or (classes), targets
 * (n, ...) or one: integers. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_cross_entropy(tt_tensor *logits, tt_tensor *targets, int64_t ignore);
/* (x - mean) / deviation over the last dimensions that weight or bias has (else one), times weight, plus bias; both may
 * be NULL, and of f32 where x is narrower. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_layer_norm(tt_tensor *x, tt_tensor *weight, tt_tensor *bias, double epsilon);
/* the logarithm of softmax, without overflow. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_log_softmax(tt_tensor *x, int dim);
/* mean of the squared differences. For any dtype; has a gradient. */
TUTTI_API tt_tensor *tt_mse_loss(tt_tensor *x, tt_tensor *target);
/* x over the root of its mean square, over the last dimensions that weight has (else one), times weight, which may be
 * NULL. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_rms_norm(tt_tensor *x, tt_tensor *weight, double epsilon);
/* turns pairs (i, i + half) of the last dimension by position[s] * base^(-2i/d); x is (…, s, d). For floats; has a
 * gradient. */
TUTTI_API tt_tensor *tt_rope(tt_tensor *x, tt_tensor *position, double base);
/* exp(x) over its sum along dim. For floats; has a gradient. */
TUTTI_API tt_tensor *tt_softmax(tt_tensor *x, int dim);

/* ---- here ends what the table says ---- */

/* Zeroes a share of the elements and divides the rest by 1 - share. The generator's state is kept, not the mask. */
TUTTI_API tt_tensor *tt_dropout(tt_tensor *x, double share);

/* ---- optimizer steps, in place, outside the graph ---- */
/* In both 0 is the default, and TUTTI_ZERO the number zero; a value that is negative or no number is an error. */
typedef struct tt_sgd {
    size_t size;
    double learning_rate; /* 0: 0.01 */
    double momentum;      /* below 1; 0: none */
    double weight_decay;  /* 0: none */
} tt_sgd;
#define TT_SGD_INIT TUTTI_DEFAULTS(tt_sgd)
/* TT_SGD_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_sgd_init(tt_sgd *sgd, size_t size);
typedef struct tt_adamw {
    size_t size;
    double learning_rate; /* 0: 0.001 */
    double beta1;         /* below 1; 0: 0.9 */
    double beta2;         /* below 1; 0: 0.999 */
    double epsilon;       /* 0: 1e-8 */
    double weight_decay;  /* 0: 0.01 */
} tt_adamw;
#define TT_ADAMW_INIT TUTTI_DEFAULTS(tt_adamw)
/* TT_ADAMW_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_adamw_init(tt_adamw *adamw, size_t size);

/* One step of gradient descent for one parameter. `velocity` is needed with momentum and may be NULL without. */
TUTTI_API bool tt_sgd_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *velocity, const tt_sgd *options);
/* One step of AdamW for one parameter; m and v start as zeros; step counts from 1. */
TUTTI_API bool tt_adamw_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *m, tt_tensor *v, int64_t step,
                             const tt_adamw *options);

/* ---- lists of tensors, element by element ---- */
TUTTI_API bool tt_foreach_copy_(tt_tensor_list to, tt_tensor_list from); /* converts dtypes */
/* a + factor * b, into a */
TUTTI_API bool tt_foreach_add_(tt_tensor_list a, tt_tensor_list b, double factor);
/* a * number, into a */
TUTTI_API bool tt_foreach_mul_scalar_(tt_tensor_list a, double number);
/* tt_norm of each */
TUTTI_API tt_tensor_list tt_foreach_norm(tt_tensor_list a);
/* x + factor * a / b, into x */
TUTTI_API bool tt_foreach_addcdiv_(tt_tensor_list x, tt_tensor_list a, tt_tensor_list b, double factor);

/* ---- data movement of sharded training ---- */
/* Copies each flattened input into rank's slice of `out` (ranks * total elements, total = sum of sizes); returns the
 * slice. */
TUTTI_API tt_tensor *tt_all_gather_copy_in(tt_tensor_list inputs, tt_tensor *out, int rank, int ranks);
/* Copies column blocks of `from` (rows, total) into each of `outs`, viewed as (rows, its size). */
TUTTI_API bool tt_split_copy(tt_tensor *from, tt_tensor_list outs);
/* Pads dim 0 of each tensor to a multiple of `parts`, cuts it in `parts` pieces and puts piece r of all side by side in
 * row r of `out` (parts, total). Widening conversions only. */
TUTTI_API tt_tensor *tt_chunk_cat(tt_tensor_list tensors, int parts, tt_tensor *out);

/* ---- the table itself ----
 * What every operator is, for bindings and tools. docs/operators.md is made from it. */
typedef enum tt_argument_type {
    TT_ARGUMENT_TENSOR = 1,     /* tt_tensor * */
    TT_ARGUMENT_TENSORS = 2,    /* tt_tensor_list */
    TT_ARGUMENT_INT = 3,        /* int */
    TT_ARGUMENT_INT64 = 4,      /* int64_t */
    TT_ARGUMENT_DOUBLE = 5,     /* double */
    TT_ARGUMENT_BOOL = 6,       /* bool */
    TT_ARGUMENT_DIMS = 7,       /* tt_dims */
    TT_ARGUMENT_INTS = 8,       /* const int64_t * or const int *; another argument says how many */
    TT_ARGUMENT_DTYPE = 9,      /* tutti_dtype */
    TT_ARGUMENT_DEVICE = 10,    /* tutti_device; in most C functions a member of const tt_options * */
    TT_ARGUMENT_REDUCTION = 11, /* tutti_reduction */
    TT_ARGUMENT_GROUP = 12      /* tutti_group * */
} tt_argument_type;
typedef struct tt_argument_info {
    size_t size;
    const char *name; /* "dim" */
    tt_argument_type type;
    bool optional;           /* a tensor that may be NULL */
    bool written;            /* a tensor that is changed, beside that of the in-place form */
    const char *declaration; /* as the C function has it, "int dim"; "size_t dim_count, const int *dims" */
} tt_argument_info;
#define TT_ARGUMENT_INFO_INIT TUTTI_DEFAULTS(tt_argument_info)
/* TT_ARGUMENT_INFO_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_argument_info_init(tt_argument_info *info, size_t size);
typedef struct tt_operator_info {
    size_t size;
    const char *name;       /* "add" */
    const char *family;     /* "arithmetic" */
    const char *summary;    /* one line */
    const char *prototype;  /* "tt_tensor *tt_add(tt_tensor *a, tt_tensor *b)"; NULL: no public function */
    const char *dtypes;     /* "numbers, complex"; NULL: any */
    const char *expression; /* of operators that work element by element: "a + b"; else NULL */
    int argument_count;     /* see tt_operator_argument_at */
    int result_count;       /* tensors that the caller gets; TUTTI_NONE: one for each of a list */
    int saved_count;        /* further results, kept for the gradient */
    bool in_place;          /* has a form with a trailing underscore */
    bool view;              /* the result shares the first argument's storage */
    bool differentiable;
    bool pure;           /* no effect but its results, which depend on its arguments alone */
    bool composite;      /* made of other operators, which run in its place */
    const char *differs; /* how the arguments follow from the function's, where they are others; else NULL */
} tt_operator_info;
#define TT_OPERATOR_INFO_INIT TUTTI_DEFAULTS(tt_operator_info)
/* TT_OPERATOR_INFO_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_operator_info_init(tt_operator_info *info, size_t size);
/* How many operators there are. */
TUTTI_API int tt_operator_count(void);
/* What one of them is; index from 0. The texts live as long as the library. */
TUTTI_API TUTTI_CHECKED tutti_status tt_operator_at(int index, tt_operator_info *info);
/* Arguments count from 0, in the order of the C function. */
TUTTI_API TUTTI_CHECKED tutti_status tt_operator_argument_at(int index, int argument, tt_argument_info *info);

#ifdef __cplusplus
}
#endif
#endif
