/* SPDX-License-Identifier: Apache-2.0
 *
 * The operator table and the calls of its rows. An operator is one row of a room's operators.def: name, arguments,
 * shape rule, kernels per device, gradient, expression, purity, and a sample call. Eager execution, meta tensors,
 * autograd, recorders, the reference page, bindings and the table test all read that row and nothing else.
 *
 * To add one: write its row, declare its public function in <tutti/ops.h> (the row defines it), and write what the row
 * names: a shape rule, a kernel, a gradient. tensor/rows.h explains the words of a row.
 */
#ifndef TU_TENSOR_OPERATOR_H
#define TU_TENSOR_OPERATOR_H

#include <stdio.h>

#include <tutti/group.h>
#include <tutti/ops.h>

#include "tensor/tensor.h"
#include "tensor/thread.h"

#define TU_INPUTS 8 /* of operators other than those on lists */
#define TU_OUTPUTS 3

typedef struct tu_operator tu_operator;

/* A list of whole numbers as an attribute. */
typedef struct tu_ints {
    size_t count;
    const int64_t *at;
} tu_ints;

/* One call: an entry, its inputs, its attributes, and what the shape rule says of its results. */
typedef struct tu_call {
    const tu_operator *entry;
    tt_tensor *const *inputs;
    const void *attributes; /* the operator's own struct, tu_<name>_attributes */
    int input_count, output_count;
    tutti_device device;
    bool placed;       /* an input says which device; else the result's does */
    bool in_place;     /* the form that writes inputs[0], or all inputs where there is a result for each */
    bool wants_grad;   /* gradient mode is on and an input requires grad */
    bool computed;     /* set by a recorder that made the results itself: no kernel runs */
    tu_shape *results; /* by the shape rule, which may read inputs' metadata and attributes, and write nothing else */
    tt_tensor **outputs;
    tu_shape few_results[TU_OUTPUTS];
    tt_tensor *few_outputs[TU_OUTPUTS];
} tu_call;

/* What a gradient formula works with. It is written with tt_ functions, so that it can be differentiated again; what
 * they return belongs to a scope around the call. A result left NULL is "no gradient". Results may have any shape that
 * broadcasting made out of the input's: the engine sums them down, and casts them to the input's dtype. */
typedef struct tu_gradient {
    const tu_operator *entry;
    const void *attributes;
    tt_tensor *const *grads; /* of the outputs; NULL where nothing arrived */
    const bool *needs;       /* of the inputs: whether its gradient is wanted */
    int input_count;
    tt_tensor **results; /* of the inputs */
    void *record;        /* of the call, for the historian */
} tu_gradient;

/* A saved input or output, by the row's `saves`. NULL with the pending error set where it was changed or freed
 * since. */
tt_tensor *tu_saved(tu_gradient *gradient, uint32_t which);
/* Shape and dtype of an input, known without saving it. */
const tu_shape *tu_input_shape(const tu_gradient *gradient, int input);
static inline tt_dims tu_input_dims(const tu_gradient *gradient, int input) {
    const tu_shape *shape = tu_input_shape(gradient, input);
    return tt_dims_of(shape->ndim, shape->sizes);
}
/* For an operator whose backward is one kernel, where that backward is recorded itself: a saved input, and the gradient
 * of `output`, which the formula has computed anew from such inputs. Entries of inputs may be NULL. */
static inline bool tu_gradient_is_recorded(void) {
    return !tu_self()->grad_disabled;
}
tt_tensor *tu_gradient_input(tu_gradient *gradient, int input);
/* Zeros of the first input's shape: what the operator did not take from it has no gradient. */
tt_tensor *tu_gradient_zeros(const tu_gradient *gradient);
void tu_gradient_through(tu_gradient *gradient, tt_tensor *output, int count, tt_tensor *const *inputs);
#define TU_INPUT(i) (1u << (i))
#define TU_OUTPUT(i) (1u << (16 + (i)))

/* Makes inputs for an operator's sample call: see tests/tensor/table.c, which makes them contiguous or not, real or
 * meta, in several dtypes. `size` is to be used for one dimension; it is 0 in the round of empty tensors. */
typedef struct tu_sampler tu_sampler;
typedef enum tu_sample_kind {
    TU_SAMPLE_NORMAL,   /* floats around 0, away from kinks */
    TU_SAMPLE_POSITIVE, /* floats in [0.5, 2) */
    TU_SAMPLE_INDEX,    /* i64 in [0, limit), no gradient */
    TU_SAMPLE_BOOL
} tu_sample_kind;
struct tu_sampler {
    int64_t size;
    tutti_group *group; /* of one rank, for collectives */
    tt_tensor *(*make)(tu_sampler *sampler, tu_sample_kind kind, tt_dims shape, int64_t limit);
};

typedef tutti_status tu_shape_rule(tu_call *call);
typedef tutti_status tu_device_kernel(tu_call *call);
typedef void tu_gradient_formula(tu_gradient *gradient);
typedef tt_tensor *tu_sample_call(tu_sampler *sampler);

enum {
    TU_HAS_IN_PLACE = 1,
    TU_VIEW = 2,         /* the result shares storage with the first input; nothing is computed */
    TU_IMPURE = 4,       /* random, writes an input, communicates, or changes what the library keeps */
    TU_COMPOSITE = 8,    /* made of other operators: no kernel and no gradient of its own */
    TU_PRIVATE = 16,     /* has no public function: what gradients are made of */
    TU_NO_HISTORY = 32,  /* is not recorded by autograd, whatever its inputs */
    TU_NO_KERNEL = 64,   /* its results have no contents yet: there is nothing to compute */
    TU_NO_READ = 128,    /* looks at the metadata of its inputs only: freed storage is no error */
    TU_EACH_INPUT = 256, /* one result per input */
    TU_ANY_DEVICE = 512, /* works on metadata: the kernel of the CPU serves every device, also meta and fakes */
    TU_APART = 1024,     /* its inputs may be on several devices */
    TU_BRINGS = 2048,    /* its results have no memory until the kernel brings a storage: tu_tensor_move */
    /* Of pointwise operators: */
    TU_TO_FLOAT = 1 << 12,  /* integers compute and return f32 */
    TU_TO_BOOL = 1 << 13,   /* the result is bool */
    TU_CONDITION = 1 << 14, /* the first input takes no part in promotion */
    TU_TO_REAL = 1 << 15,   /* complex inputs give the real type */
    /* Of collectives: */
    TU_STARTS = 1 << 16,     /* its results, or what it writes, are there only after a wait */
    TU_GROUP_FREE = 1 << 17, /* its results have the same shapes in every group: on meta tensors it needs none */
    TU_ANYWHERE = 1 << 18    /* its results belong to any device, as numbers do */
};

/* The devices that may have kernels; meta has none, since it computes nothing. */
typedef enum tu_device_kind {
    TU_ON_CPU,
    TU_ON_CUDA,
    TU_DEVICE_KINDS
} tu_device_kind;

typedef struct tu_argument {
    const char *name;
    const char *declaration; /* as the public function has it, "const int64_t *splits" */
    tt_argument_type type;
    bool optional, written; /* of tensors */
    size_t offset;          /* of an attribute in the operator's struct */
} tu_argument;

struct tu_operator {
    const char *name, *family, *summary;
    const char *prototype;  /* of the public function; NULL where there is none */
    const char *differs;    /* what its arguments have to do with the row's, where they are others */
    const char *dtypes;     /* "floats" */
    const char *expression; /* of pointwise operators, in the dialect of tensor/dialect.h */
    unsigned flags;
    int argument_count;
    const tu_argument *arguments; /* in the order of the public function */
    size_t attribute_bytes;       /* of tu_<name>_attributes */
    uint32_t optional, written;   /* inputs that may be NULL, or are written beside the results, as TU_INPUT bits */
    int results, saved;           /* the caller sees the first, the gradient needs the others too */
    tu_shape_rule *shape;
    tu_device_kernel *kernels[TU_DEVICE_KINDS];
    tu_gradient_formula *gradient;
    uint32_t saves[TU_INPUTS]; /* what the gradient of each input needs, as TU_INPUT and TU_OUTPUT bits */
    int pointwise;             /* index of its kernels among the pointwise ones */
    const void *detail;        /* the family's own */
    tu_sample_call *sample;
};

/* The table itself, in no particular order. */
int tu_table_count(void);
const tu_operator *tu_table_at(int index);

/* ---- running ---- */

/* Prepares a call. */
static inline void tu_call_init(tu_call *call, const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                                const void *attributes) {
    call->entry = entry;
    call->inputs = inputs;
    call->attributes = attributes;
    call->input_count = input_count;
    call->output_count = entry->results + entry->saved;
    call->in_place = call->computed = false;
    call->results = call->few_results;
    call->outputs = call->few_outputs;
}

/* Runs a prepared call: checks, shapes, allocates, computes, records. True on success; then call->outputs belong to the
 * scope. */
bool tu_run(tu_call *call);
/* In anomaly mode, after the kernel: an error where what it wrote holds a NaN. */
tutti_status tu_anomaly_check(const tu_call *call);
/* The same from its parts: the first result, or NULL. */
tt_tensor *tu_run_new(const tu_operator *entry, int input_count, tt_tensor *const *inputs, const void *attributes);
tt_tensor *tu_run_in_place(const tu_operator *entry, int input_count, tt_tensor *const *inputs, const void *attributes);
/* With all results, which may be NULL where there are none. */
bool tu_run_many(const tu_operator *entry, int input_count, tt_tensor *const *inputs, const void *attributes,
                 tt_tensor **results);
/* On a list, which is checked. */
tt_tensor *tu_run_list(const tu_operator *entry, tt_tensor_list list, const void *attributes);
/* On a list, for its effect. */
bool tu_run_all(const tu_operator *entry, tt_tensor_list list, const void *attributes);
/* On a list, with one result for each of it, which belong to the scope. */
tt_tensor_list tu_run_each(const tu_operator *entry, tt_tensor_list list, const void *attributes);
/* On a list, all of which is written. */
tt_tensor_list tu_run_each_in_place(const tu_operator *entry, tt_tensor_list list, const void *attributes);

/* A place outside of tensors that holds one, such as a slot of a module: how a capture finds what is there at each run,
 * and how it puts there what the function leaves. */
typedef struct tu_holder {
    void *owner;
    int index;
    tt_tensor *(*get)(void *owner, int index); /* lent; NULL where it is empty */
    tutti_status (*set)(void *owner, int index, tt_tensor *tensor);
    void (*keep)(void *owner);
    void (*release)(void *owner);
} tu_holder;

/* Something outside of tensors that a function depends on, such as the hooks of a module: whenever that changes, it
 * gives another stamp. */
typedef struct tu_witness {
    void *owner;
    uint64_t (*stamp)(void *owner);
    void (*keep)(void *owner);
    void (*release)(void *owner);
} tu_witness;

/* What a function may ask about a tensor that no operator sees. */
typedef enum tu_question {
    TU_ASKED_GRADIENT, /* its gradient, or whether there is one */
    TU_ASKED_BYTES,    /* the size of its storage */
    TU_ASKED_SIZES     /* its sizes or strides */
} tu_question;

/* A recorder is asked about every call of its thread, after the shape rule and before the kernel: the outputs are there
 * and have their metadata, but no contents yet. A status other than OK ends the call with it.
 *
 * One that has `stand_in` captures: operators, and the functions that ask what a tensor is now, work on what it puts in
 * the place of each tensor, and results have fake storages. */
typedef struct tu_call_recorder {
    tutti_status (*record)(struct tu_call_recorder *recorder, tu_call *call);
    /* NULL with the thread's error written where memory has run out. */
    tt_tensor *(*stand_in)(struct tu_call_recorder *recorder, tt_tensor *x);
    /* What a holder has was read, or will be changed. */
    tutti_status (*note_read)(struct tu_call_recorder *recorder, const tu_holder *holder, tt_tensor *x);
    tutti_status (*note_write)(struct tu_call_recorder *recorder, const tu_holder *holder);
    /* A stand-in was asked, or something outside of tensors was looked at. */
    tutti_status (*note_asked)(struct tu_call_recorder *recorder, tt_tensor *x, tu_question question);
    tutti_status (*note_state)(struct tu_call_recorder *recorder, const tu_witness *witness);
} tu_call_recorder;
/* Installs a recorder for the calling thread (NULL: none) and returns the one before. */
tu_call_recorder *tu_call_recorder_set(tu_call_recorder *recorder);
/* What stands for x, which is alive, while this thread captures; x itself else. */
static inline tt_tensor *tu_stand_in(const tt_tensor *x) {
    tu_call_recorder *recorder = tu_self()->recorder;
    tt_tensor *own = (tt_tensor *)x; /* the caller's constness is about what it does itself */
    return recorder == NULL || recorder->stand_in == NULL ? own : recorder->stand_in(recorder, own);
}
static inline bool tu_is_capturing(void) {
    return tu_self()->recorder != NULL && tu_self()->recorder->stand_in != NULL;
}
/* Tells a capture what was asked of x, which stands for a tensor. False with the pending error set. */
static inline bool tu_note_asked(tt_tensor *x, tu_question question) {
    return !tu_is_capturing() ||
           tu_pending_take(tu_self()->recorder->note_asked(tu_self()->recorder, x, question)) == TUTTI_OK;
}
/* A capture learns that the function depends on this. */
static inline bool tu_note_state(const tu_witness *witness) {
    return !tu_is_capturing() ||
           tu_pending_take(tu_self()->recorder->note_state(tu_self()->recorder, witness)) == TUTTI_OK;
}

/* ---- calls as data (call.c) ---- */

/* A copy of a call's attributes in memory of attribute_bytes, which holds groups and lists; and its end. */
tutti_status tu_attributes_copy(const tu_operator *entry, const void *attributes, void *copy);
void tu_attributes_end(const tu_operator *entry, void *copy);
/* The shortest text that reads back as the same number. */
void tu_number_print(FILE *to, double number);
/* "dim=1" */
void tu_attribute_print(FILE *to, const tu_argument *argument, const void *at);
/* "narrow(x f32 [2, 3], dim=1, start=0, length=2)"; cut where it does not fit. Returns buffer. */
const char *tu_call_text(const tu_call *call, char *buffer, size_t size);
/* Equal for calls of one operator with equal attributes, in every rank and every run. */
uint64_t tu_attributes_hash(const tu_operator *entry, const void *attributes);
/* The name of the i-th tensor argument. */
const char *tu_argument_name(const tu_operator *entry, int input);

/* Writes an error that begins with the operator's name. */
tutti_status tu_call_error(const tu_call *call, tutti_status status, const char *format, ...) TUTTI_PRINTF(3, 4);

/* ---- rules that many operators share (rules.c) ---- */

/* Broadcasting of sizes; writes result's sizes, ndim and device. */
tutti_status tu_broadcast_sizes(const tu_call *call, int first, tu_shape *result);
/* The dtype that inputs first.. promote to. */
tutti_dtype tu_promote(const tu_call *call, int first);
tutti_dtype tu_promote_pair(tutti_dtype left, tutti_dtype right);
/* The result is like input 0: contiguous, or with its very strides. */
tu_shape_rule tu_shape_like_first, tu_shape_of_first;
/* There are none. */
tu_shape_rule tu_no_results;
/* Whether several elements of x share one memory location: an expanded tensor, or strides that meet. */
bool tu_overlaps_itself(const tt_tensor *x);
/* Whether left and right share memory otherwise than element by element. Sure of an overlap where it says so; layouts
 * that are neither dense nor alike count as apart. */
bool tu_partly_overlaps(const tt_tensor *left, const tt_tensor *right);
/* A dimension that the shape rule has checked, counted from 0. */
static inline int tu_dim(int64_t dim, int ndim) {
    return (int)(dim < 0 ? dim + ndim : dim);
}

#endif
