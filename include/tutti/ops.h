/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators. docs/operators.md is made from the same table that runs them and says for each: its arguments, the
 * types it takes, whether it has a gradient, and whether its result is a view.
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

/* ---- arithmetic ---- */
TUTTI_API tt_tensor *tt_add(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_sub(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_mul(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_div(tt_tensor *a, tt_tensor *b); /* integers give f32 */
TUTTI_API tt_tensor *tt_maximum(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_minimum(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_pow(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_add_scaled(tt_tensor *a, tt_tensor *b, double factor);            /* a + factor * b */
TUTTI_API tt_tensor *tt_lerp(tt_tensor *a, tt_tensor *b, double weight);                  /* a + weight * (b - a) */
TUTTI_API tt_tensor *tt_addcmul(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor); /* x + factor * a * b */
TUTTI_API tt_tensor *tt_addcdiv(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor); /* x + factor * a / b */
TUTTI_API tt_tensor *tt_add_scalar(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_mul_scalar(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_div_scalar(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_pow_scalar(tt_tensor *a, double exponent);
TUTTI_API tt_tensor *tt_add_(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_sub_(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_mul_(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_div_(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_add_scaled_(tt_tensor *a, tt_tensor *b, double factor);
TUTTI_API tt_tensor *tt_lerp_(tt_tensor *a, tt_tensor *b, double weight);
TUTTI_API tt_tensor *tt_addcmul_(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor);
TUTTI_API tt_tensor *tt_addcdiv_(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor);
TUTTI_API tt_tensor *tt_add_scalar_(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_mul_scalar_(tt_tensor *a, double number);
TUTTI_API tt_tensor *tt_div_scalar_(tt_tensor *a, double number);

/* ---- one argument ---- */
TUTTI_API tt_tensor *tt_neg(tt_tensor *x);
TUTTI_API tt_tensor *tt_abs(tt_tensor *x);
TUTTI_API tt_tensor *tt_sign(tt_tensor *x);
TUTTI_API tt_tensor *tt_square(tt_tensor *x);
TUTTI_API tt_tensor *tt_reciprocal(tt_tensor *x);
TUTTI_API tt_tensor *tt_sqrt(tt_tensor *x);
TUTTI_API tt_tensor *tt_rsqrt(tt_tensor *x);
TUTTI_API tt_tensor *tt_exp(tt_tensor *x);
TUTTI_API tt_tensor *tt_log(tt_tensor *x);
TUTTI_API tt_tensor *tt_sin(tt_tensor *x);
TUTTI_API tt_tensor *tt_cos(tt_tensor *x);
TUTTI_API tt_tensor *tt_tanh(tt_tensor *x);
TUTTI_API tt_tensor *tt_erf(tt_tensor *x);
TUTTI_API tt_tensor *tt_floor(tt_tensor *x);
TUTTI_API tt_tensor *tt_ceil(tt_tensor *x);
TUTTI_API tt_tensor *tt_round(tt_tensor *x); /* halves to even */
TUTTI_API tt_tensor *tt_sigmoid(tt_tensor *x);
TUTTI_API tt_tensor *tt_relu(tt_tensor *x);
TUTTI_API tt_tensor *tt_silu(tt_tensor *x);
TUTTI_API tt_tensor *tt_gelu(tt_tensor *x);      /* exact: x * Phi(x) */
TUTTI_API tt_tensor *tt_gelu_tanh(tt_tensor *x); /* the tanh form */
TUTTI_API tt_tensor *tt_clamp(tt_tensor *x, double low, double high);
TUTTI_API tt_tensor *tt_conj(tt_tensor *x);
TUTTI_API tt_tensor *tt_neg_(tt_tensor *x);
TUTTI_API tt_tensor *tt_sqrt_(tt_tensor *x);
TUTTI_API tt_tensor *tt_exp_(tt_tensor *x);
TUTTI_API tt_tensor *tt_relu_(tt_tensor *x);
TUTTI_API tt_tensor *tt_sigmoid_(tt_tensor *x);
TUTTI_API tt_tensor *tt_tanh_(tt_tensor *x);
TUTTI_API tt_tensor *tt_clamp_(tt_tensor *x, double low, double high);

/* ---- comparison and logic: results are bool ---- */
TUTTI_API tt_tensor *tt_eq(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_ne(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_lt(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_le(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_gt(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_ge(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_logical_and(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_logical_or(tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_logical_not(tt_tensor *x);
TUTTI_API tt_tensor *tt_isnan(tt_tensor *x);
TUTTI_API tt_tensor *tt_where(tt_tensor *condition, tt_tensor *a, tt_tensor *b);
TUTTI_API tt_tensor *tt_masked_fill(tt_tensor *x, tt_tensor *mask, double value);

/* ---- reductions: TT_ALL_DIMS or an empty list means all dimensions ---- */
#define TT_ALL_DIMS tt_no_dims()
TUTTI_API tt_tensor *tt_sum(tt_tensor *x);
TUTTI_API tt_tensor *tt_sum_dims(tt_tensor *x, tt_dims dims, bool keep_dims); /* integers and bool sum in i64 */
TUTTI_API tt_tensor *tt_mean(tt_tensor *x);
TUTTI_API tt_tensor *tt_mean_dims(tt_tensor *x, tt_dims dims, bool keep_dims);
TUTTI_API tt_tensor *tt_amax(tt_tensor *x, tt_dims dims,
                             bool keep_dims); /* the gradient goes to all equal maxima, divided */
TUTTI_API tt_tensor *tt_amin(tt_tensor *x, tt_dims dims, bool keep_dims);
TUTTI_API tt_tensor *tt_prod(tt_tensor *x, tt_dims dims, bool keep_dims);
TUTTI_API tt_tensor *tt_any(tt_tensor *x, tt_dims dims, bool keep_dims);
TUTTI_API tt_tensor *tt_all(tt_tensor *x, tt_dims dims, bool keep_dims);
TUTTI_API tt_tensor *tt_argmax(tt_tensor *x, int dim, bool keep_dims); /* the first of equal ones */
TUTTI_API tt_tensor *tt_norm(tt_tensor *x);                  /* square root of the sum of squares of all elements */
TUTTI_API tt_tensor *tt_sum_to(tt_tensor *x, tt_dims shape); /* undoes broadcasting: sums what was expanded */

/* ---- matrix products ---- */
TUTTI_API tt_tensor *tt_matmul(tt_tensor *a,
                               tt_tensor *b); /* (…, m, k) (…, k, n); 1-dim arguments as rows and columns */
TUTTI_API tt_tensor *tt_linear(tt_tensor *x, tt_tensor *weight,
                               tt_tensor *bias); /* x weight^T + bias; bias may be NULL */
/* a (m, k) times b (k, n), each with scales: one element, per row of a (m, 1), per column of b (1, n). For f8 and i8
 * inputs. bias (n) and result_scale (one element) may be NULL. Accumulates in f32. */
TUTTI_API tt_tensor *tt_scaled_matmul(tt_tensor *a, tt_tensor *b, tt_tensor *scale_a, tt_tensor *scale_b,
                                      tt_tensor *bias, tt_tensor *result_scale, tutti_dtype dtype);
/* i8 times i8 in i32 */
TUTTI_API tt_tensor *tt_int_matmul(tt_tensor *a, tt_tensor *b);

/* ---- views: the result shares the argument's storage ---- */
TUTTI_API tt_tensor *tt_view(tt_tensor *x,
                             tt_dims shape); /* one size may be -1; an error where a copy would be needed */
TUTTI_API tt_tensor *tt_reshape(tt_tensor *x, tt_dims shape); /* a view where possible, else a copy */
TUTTI_API tt_tensor *tt_flatten(tt_tensor *x, int first, int last);
TUTTI_API tt_tensor *tt_permute(tt_tensor *x, tt_dims order);
TUTTI_API tt_tensor *tt_transpose(tt_tensor *x, int a, int b);
TUTTI_API tt_tensor *tt_t(tt_tensor *x);                     /* of a matrix */
TUTTI_API tt_tensor *tt_expand(tt_tensor *x, tt_dims shape); /* -1 keeps a size */
TUTTI_API tt_tensor *tt_squeeze(tt_tensor *x, int dim);
TUTTI_API tt_tensor *tt_unsqueeze(tt_tensor *x, int dim);
TUTTI_API tt_tensor *tt_narrow(tt_tensor *x, int dim, int64_t start, int64_t length);
TUTTI_API tt_tensor *tt_slice(tt_tensor *x, int dim, int64_t start, int64_t end, int64_t step);
TUTTI_API tt_tensor *tt_select(tt_tensor *x, int dim, int64_t index);
TUTTI_API tt_tensor *tt_as_strided(tt_tensor *x, tt_dims shape, tt_dims strides, int64_t offset);
TUTTI_API tt_tensor *tt_view_as_real(tt_tensor *x);    /* complex to real with a last dimension of 2 */
TUTTI_API tt_tensor *tt_view_as_complex(tt_tensor *x); /* and back */
TUTTI_API tt_tensor *tt_detach(tt_tensor *x);          /* no history, shared version */
TUTTI_API tt_tensor *tt_alias(tt_tensor *x);
TUTTI_API tt_tensor_list tt_split(tt_tensor *x, tt_dims sizes, int dim);
TUTTI_API tt_tensor_list tt_chunk(tt_tensor *x, int64_t parts, int dim);

/* ---- copies ---- */
TUTTI_API tt_tensor *tt_clone(tt_tensor *x);                 /* same strides where x is dense, else contiguous */
TUTTI_API tt_tensor *tt_contiguous(tt_tensor *x);            /* x itself where it is contiguous already */
TUTTI_API tt_tensor *tt_to(tt_tensor *x, tutti_dtype dtype); /* x itself where it has that dtype already */
TUTTI_API tt_tensor *tt_copy_(tt_tensor *x, tt_tensor *from);
TUTTI_API tt_tensor *tt_fill_(tt_tensor *x, double value);
TUTTI_API tt_tensor *tt_zero_(tt_tensor *x);
/* The same values and shape, with strides such that moving `dim` to the front is contiguous: for gathers and scatters
 * along dim. */
TUTTI_API tt_tensor *tt_restride(tt_tensor *x, int dim);

/* ---- joining and indexing ---- */
TUTTI_API tt_tensor *tt_cat(tt_tensor_list tensors, int dim);
TUTTI_API tt_tensor *tt_stack(tt_tensor_list tensors, int dim);
TUTTI_API tt_tensor *tt_index_select(tt_tensor *x, int dim, tt_tensor *index);
TUTTI_API tt_tensor *tt_index_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source);
TUTTI_API tt_tensor *tt_gather_dim(tt_tensor *x, int dim, tt_tensor *index);
TUTTI_API tt_tensor *tt_scatter_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source);
TUTTI_API tt_tensor *tt_embedding(tt_tensor *weight, tt_tensor *index);
TUTTI_API tt_tensor *tt_tril(tt_tensor *x, int64_t diagonal);
TUTTI_API tt_tensor *tt_triu(tt_tensor *x, int64_t diagonal);

/* ---- networks ---- */
TUTTI_API tt_tensor *tt_softmax(tt_tensor *x, int dim);
TUTTI_API tt_tensor *tt_log_softmax(tt_tensor *x, int dim);
/* Over the last dimensions that weight has; weight and bias may be NULL (then over the last one). */
TUTTI_API tt_tensor *tt_layer_norm(tt_tensor *x, tt_tensor *weight, tt_tensor *bias, double epsilon);
TUTTI_API tt_tensor *tt_rms_norm(tt_tensor *x, tt_tensor *weight, double epsilon);
/* Turns pairs (i, i + half) of the last dimension by position[s] * base^(-2i/d); x is (…, s, d). */
TUTTI_API tt_tensor *tt_rope(tt_tensor *x, tt_tensor *position, double base);
/* softmax(scale q k^T) v over (…, s, d); scale 0 means 1/sqrt(d); causal hides later keys. */
TUTTI_API tt_tensor *tt_attention(tt_tensor *q, tt_tensor *k, tt_tensor *v, bool causal, double scale);
/* logits (n, classes), targets (n) of an integer type; the mean over targets other than `ignore`. */
TUTTI_API tt_tensor *tt_cross_entropy(tt_tensor *logits, tt_tensor *targets, int64_t ignore);
TUTTI_API tt_tensor *tt_mse_loss(tt_tensor *x, tt_tensor *target);
/* Zeroes a share p of the elements and divides the rest by 1 - p. The generator's state is kept, not the mask. */
TUTTI_API tt_tensor *tt_dropout(tt_tensor *x, double p);

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

/* One parameter. `velocity` is needed with momentum and may be NULL without; m and v start as zeros; step counts
 * from 1. */
TUTTI_API bool tt_sgd_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *velocity, const tt_sgd *options);
TUTTI_API bool tt_adamw_step(tt_tensor *parameter, tt_tensor *gradient, tt_tensor *m, tt_tensor *v, int64_t step,
                             const tt_adamw *options);

/* ---- lists of tensors, element by element ---- */
TUTTI_API bool tt_foreach_copy_(tt_tensor_list to, tt_tensor_list from); /* converts dtypes */
TUTTI_API bool tt_foreach_add_(tt_tensor_list a, tt_tensor_list b, double factor);
TUTTI_API bool tt_foreach_mul_scalar_(tt_tensor_list a, double number);
TUTTI_API tt_tensor_list tt_foreach_norm(tt_tensor_list a);
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
    TT_ARGUMENT_INTS = 8,       /* const int64_t *, as many as another argument says */
    TT_ARGUMENT_DTYPE = 9,      /* tutti_dtype */
    TT_ARGUMENT_DEVICE = 10,    /* tutti_device; the C function takes it in a const tt_options * */
    TT_ARGUMENT_REDUCTION = 11, /* tutti_reduction */
    TT_ARGUMENT_GROUP = 12      /* tutti_group * */
} tt_argument_type;
typedef struct tt_argument_info {
    size_t size;
    const char *name; /* "dim" */
    tt_argument_type type;
    bool optional; /* a tensor that may be NULL */
    bool written;  /* a tensor that is changed, beside that of the in-place form */
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
    bool pure;      /* no effect but its results, which depend on its arguments alone */
    bool composite; /* made of other operators, which run in its place */
} tt_operator_info;
#define TT_OPERATOR_INFO_INIT TUTTI_DEFAULTS(tt_operator_info)
/* TT_OPERATOR_INFO_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_operator_info_init(tt_operator_info *info, size_t size);
TUTTI_API int tt_operator_count(void);
TUTTI_API TUTTI_CHECKED tutti_status tt_operator_at(int index, tt_operator_info *info);
/* Arguments count from 0, in the order of the C function. */
TUTTI_API TUTTI_CHECKED tutti_status tt_operator_argument_at(int index, int argument, tt_argument_info *info);

#ifdef __cplusplus
}
#endif
#endif
