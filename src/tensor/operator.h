/* SPDX-License-Identifier: Apache-2.0
 *
 * The operator table. An operator is one entry: name, schema, shape rule, kernel, gradient, purity, and a sample call.
 * Eager execution, meta tensors, autograd, the reference page and the table test all read that entry and nothing else.
 *
 * To add one: define the entry with TU_OPERATOR in its family's file, declare the public function in <tutti/ops.h>, and
 * define it as a call of tu_run. The table test picks the entry up.
 */
#ifndef TU_TENSOR_OPERATOR_H
#define TU_TENSOR_OPERATOR_H

#include <tutti/ops.h>

#include "tensor/tensor.h"
#include "tensor/thread.h"

#define TU_INPUTS 8 /* of operators other than those on lists */
#define TU_OUTPUTS 3

typedef struct tu_operator tu_operator;

/* What an operator is given beside tensors. Kept by autograd's node for the gradient. */
typedef struct tu_params {
    double number[4];
    int64_t integer[4];
    tt_dims dims[2];
    void *group; /* of collectives; lent */
} tu_params;

typedef struct tu_call {
    const tu_operator *operator;
    tt_tensor *const *inputs;
    int input_count, output_count;
    tutti_device device;
    bool in_place;   /* the form that writes inputs[0] */
    bool wants_grad; /* gradient mode is on and an input requires grad */
    tu_params params;
    tu_shape results[TU_OUTPUTS]; /* by the shape rule */
    tt_tensor *outputs[TU_OUTPUTS];
} tu_call;

/* What a gradient formula works with. It is written with tt_ functions, so that it can be differentiated again; what
 * they return belongs to a scope around the call. A result left NULL is "no gradient". Results may have any shape that
 * broadcasting made out of the input's: the engine sums them down, and casts them to the input's dtype. */
typedef struct tu_gradient {
    const tu_operator *operator;
    const tu_params *params;
    tt_tensor *const *grads; /* of the outputs; NULL where nothing arrived */
    const bool *needs;       /* of the inputs: whether its gradient is wanted */
    int input_count;
    tt_tensor **results; /* of the inputs */
    struct tu_node *node;
} tu_gradient;

/* A saved input or output, by the entry's `saves`. NULL with the pending error set where it was changed or freed
 * since. */
tt_tensor *tu_saved(tu_gradient *gradient, uint32_t which);
/* Shape and dtype of an input, known without saving it. */
const tu_shape *tu_input_shape(const tu_gradient *gradient, int input);
static inline tt_dims tu_input_dims(const tu_gradient *gradient, int input) {
    const tu_shape *shape = tu_input_shape(gradient, input);
    return tt_dims_of(shape->ndim, shape->sizes);
}
#define TU_INPUT(i) (1u << (i))
#define TU_OUTPUT(i) (1u << (16 + (i)))

/* Makes inputs for an operator's sample call: see tests/tensor/table.c, which makes them contiguous or not, real or
 * meta, in several dtypes. `n` is the size to use for one dimension; it is 0 in the round of empty tensors. */
typedef struct tu_sampler tu_sampler;
typedef enum tu_sample_kind {
    TU_SAMPLE_NORMAL,   /* floats around 0, away from kinks */
    TU_SAMPLE_POSITIVE, /* floats in [0.5, 2) */
    TU_SAMPLE_INDEX,    /* i64 in [0, limit), no gradient */
    TU_SAMPLE_BOOL
} tu_sample_kind;
struct tu_sampler {
    int64_t n;
    void *group; /* of one rank, for collectives */
    tt_tensor *(*make)(tu_sampler *sampler, tu_sample_kind kind, tt_dims shape, int64_t limit);
};
static inline tt_tensor *tu_normal(tu_sampler *s, tt_dims shape) {
    return s->make(s, TU_SAMPLE_NORMAL, shape, 0);
}
static inline tt_tensor *tu_positive(tu_sampler *s, tt_dims shape) {
    return s->make(s, TU_SAMPLE_POSITIVE, shape, 0);
}
static inline tt_tensor *tu_index(tu_sampler *s, tt_dims shape, int64_t limit) {
    return s->make(s, TU_SAMPLE_INDEX, shape, limit);
}
static inline tt_tensor *tu_mask(tu_sampler *s, tt_dims shape) {
    return s->make(s, TU_SAMPLE_BOOL, shape, 0);
}

enum {
    TU_HAS_IN_PLACE = 1,
    TU_VIEW = 2,      /* the result shares storage with the first input */
    TU_IMPURE = 4,    /* random, writes an input, or communicates */
    TU_COMPOSITE = 8, /* made of other operators: no kernel and no gradient of its own */
    TU_WRITES = 16    /* has no result: writes inputs named in `written` */
};

struct tu_operator {
    const char *name, *schema, *summary, *family;
    unsigned flags;
    uint32_t optional; /* inputs that may be NULL, as TU_INPUT bits */
    uint32_t written;  /* inputs that are written (TU_WRITES) */
    int outputs;       /* 0 means 1 */
    int visible;       /* how many of the outputs the caller sees; the rest is saved for the gradient. 0: all */
    tutti_status (*shape)(tu_call *call);
    tutti_status (*cpu)(tu_call *call);
    void (*gradient)(tu_gradient *gradient);
    uint32_t saves[TU_INPUTS]; /* what the gradient of each input needs, as TU_INPUT and TU_OUTPUT bits */
    const void *detail;        /* the family's own */
    tt_tensor *(*sample)(tu_sampler *sampler);
};

/* Defines an entry and puts a pointer to it where tt_operator_at finds it. */
#define TU_OPERATOR(identifier)                                                                            \
    extern const tu_operator tu_operator_##identifier;                                                     \
    static const tu_operator *const tu_entry_##identifier __attribute__((used, section("tu_operators"))) = \
        &tu_operator_##identifier;                                                                         \
    const tu_operator tu_operator_##identifier

/* The table itself, in no particular order: for the test and the reference page. */
int tu_table_count(void);
const tu_operator *tu_table_at(int index);

/* Prepares a call. Parameters are zero; set what the operator takes, then run. */
static inline void tu_call_init(tu_call *call, const tu_operator *operator, int input_count, tt_tensor *const *inputs) {
    call->operator= operator;
    call->inputs = inputs;
    call->input_count = input_count;
    call->output_count = operator->outputs == 0 ? 1 : operator->outputs;
    call->in_place = false;
    call->params = (tu_params){ .dims = { { .count = -1 }, { .count = -1 } } };
}

/* Runs a prepared call: checks, shapes, allocates, computes, records. True on success; then call->outputs belong to the
 * scope. */
bool tu_run_call(tu_call *call);
static inline tt_tensor *tu_run(tu_call *call) {
    return tu_run_call(call) ? call->outputs[0] : NULL;
}
tt_tensor *tu_run1(const tu_operator *operator, tt_tensor * a);
tt_tensor *tu_run2(const tu_operator *operator, tt_tensor * a, tt_tensor *b);
tt_tensor *tu_run1_(const tu_operator *operator, tt_tensor * a);
tt_tensor *tu_run2_(const tu_operator *operator, tt_tensor * a, tt_tensor *b);

/* Writes an error that begins with the operator's name. */
tutti_status tu_call_error(const tu_call *call, tutti_status status, const char *format, ...) TUTTI_PRINTF(3, 4);
/* The name of the i-th tensor argument, from the schema. */
const char *tu_argument_name(const tu_operator *operator, int input, char *buffer, size_t size);

/* ---- rules that many operators share ---- */

/* Broadcasting of sizes; writes call->results[0].sizes and ndim. */
tutti_status tu_broadcast(const tu_call *call, int first, tu_shape *result);
/* The dtype that inputs first.. promote to. */
tutti_dtype tu_promote(const tu_call *call, int first);
tutti_dtype tu_promote_pair(tutti_dtype a, tutti_dtype b);
/* The result is like input 0, contiguous. */
tutti_status tu_shape_like_first(tu_call *call);

#endif
