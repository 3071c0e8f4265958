/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations on symmetric memory that have names of their own, on tensors: shape rules, starts and gradients of
 * their rows, and the public functions. What they demand of their arguments is checked here, in the words that people
 * know; tutti/named.h does the work. Results are asynchronous as those of all collectives.
 */
#include <tutti/named.h>
#include <tutti/symmetric.h>

#include "functional/operators.h"
#include "functional/registry.h"
#include "functional/rules.h"
#include "functional/symmetric.h"
#include "tensor/stage.h"

/* ---- what they share ---- */

static tutti_status must_be_contiguous(const tu_call *call, const char *what, const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s must be contiguous, and %s is not", what, tu_describe(x));
}

/* A call on nothing needs no memory. */
static tutti_status must_be_symmetric(const tu_call *call, const char *what, const tt_tensor *x, tutti_group *group) {
    tu_symm_place place;
    return x->numel == 0 ? TUTTI_OK : tu_symm_require(call->entry->name, what, x, tutti_group_world(group), &place);
}

/* A reduction of x, which must be contiguous: what every all-reduce here begins with. */
static tutti_status check_input(const tu_call *call, tutti_reduction reduction, const tt_tensor *x) {
    tutti_status status = tu_rule_reduction(call, reduction, x);
    return status == TUTTI_OK ? must_be_contiguous(call, "input", x) : status;
}

/* `out` takes what is like x. */
static tutti_status check_output(const tu_call *call, const tt_tensor *out, const tt_tensor *x) {
    tutti_status status = tu_rule_no_gradient(call);
    if (status == TUTTI_OK)
        status = must_be_contiguous(call, "output", out);
    if (status == TUTTI_OK && (!tu_same_sizes(out, x) || out->dtype != x->dtype))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "input/output size mismatch: x is %s and out is %s",
                             tu_describe(x), tu_describe(out));
    return status;
}

/* In a fake world nothing is sent, and a result that is like the input is a copy of it. */
static bool is_faked(tutti_group *group, tt_tensor *out, const tt_tensor *x) {
    if (!tu_group_is_fake(group))
        return false;
    if (out != x && out->numel > 0)
        tu_copy_tensor(out, x);
    return true;
}

/* ---- all-reduce ---- */

typedef tutti_status reduce_into(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                 tutti_reduction reduction, const tutti_call *call);
typedef tutti_status reduce_in_place(tutti_group *group, void *data, size_t count, tutti_dtype dtype,
                                     tutti_reduction reduction, const tutti_call *call);

static tutti_status start_into(const tu_call *call, reduce_into *reduce, const tt_tensor *x, tt_tensor *out,
                               tutti_reduction reduction, tutti_group *group) {
    tu_flight_plan plan = { call->entry->name, group, .writes = out, .reads = x, .nothing = x->numel == 0 };
    tutti_status status = must_be_symmetric(call, "input", x, group);
    if (status != TUTTI_OK || is_faked(group, out, x))
        return status;
    status =
        reduce(group, tu_pointer(x), tu_pointer(out), (size_t)x->numel, x->dtype, reduction, tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

static tutti_status start_in_place(const tu_call *call, reduce_in_place *reduce, tt_tensor *x,
                                   tutti_reduction reduction, tutti_group *group) {
    tu_flight_plan plan = { call->entry->name, group, .writes = x, .nothing = x->numel == 0 };
    tutti_status status = must_be_symmetric(call, "input", x, group);
    if (status != TUTTI_OK || tu_group_is_fake(group))
        return status;
    status = reduce(group, tu_pointer(x), (size_t)x->numel, x->dtype, reduction, tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

static tutti_status shape_of_reduced(tu_call *call, tutti_reduction reduction) {
    tutti_status status = check_input(call, reduction, call->inputs[0]);
    return status == TUTTI_OK ? tu_rule_same_shape(call) : status;
}

static tutti_status shape_of_out(tu_call *call, tutti_reduction reduction) {
    tutti_status status = check_input(call, reduction, call->inputs[1]);
    return status == TUTTI_OK ? check_output(call, call->inputs[0], call->inputs[1]) : status;
}

static void gradient_of_reduced(tu_gradient *gradient, tutti_reduction reduction, tutti_group *group) {
    if (tu_rule_has_gradient(gradient, reduction))
        gradient->results[0] = tt_all_reduce(tt_contiguous(gradient->grads[0]), reduction, group);
}

/* The functions of a row that reduces x into a new tensor, into `out`, or where it lies. */
#define NEW_FORM(name, function)                                                                    \
    tutti_status tu_##name##_shape(tu_call *call) {                                                 \
        const tu_##name##_attributes *attributes = call->attributes;                                \
        return shape_of_reduced(call, attributes->reduction);                                       \
    }                                                                                               \
    tutti_status tu_##name##_everywhere(tu_call *call) {                                            \
        const tu_##name##_attributes *attributes = call->attributes;                                \
        return start_into(call, function, call->inputs[0], call->outputs[0], attributes->reduction, \
                          attributes->group);                                                       \
    }                                                                                               \
    void tu_##name##_gradient(tu_gradient *gradient) {                                              \
        const tu_##name##_attributes *attributes = gradient->attributes;                            \
        gradient_of_reduced(gradient, attributes->reduction, attributes->group);                    \
    }
#define OUT_FORM(name, function)                                                                                       \
    tutti_status tu_##name##_shape(tu_call *call) {                                                                    \
        const tu_##name##_attributes *attributes = call->attributes;                                                   \
        return shape_of_out(call, attributes->reduction);                                                              \
    }                                                                                                                  \
    tutti_status tu_##name##_everywhere(tu_call *call) {                                                               \
        const tu_##name##_attributes *attributes = call->attributes;                                                   \
        return start_into(call, function, call->inputs[1], call->inputs[0], attributes->reduction, attributes->group); \
    }
#define IN_PLACE_FORM(name, function)                                                                     \
    tutti_status tu_##name##_shape(tu_call *call) {                                                       \
        const tu_##name##_attributes *attributes = call->attributes;                                      \
        return shape_of_reduced(call, attributes->reduction);                                             \
    }                                                                                                     \
    tutti_status tu_##name##_everywhere(tu_call *call) {                                                  \
        const tu_##name##_attributes *attributes = call->attributes;                                      \
        return start_in_place(call, function, call->inputs[0], attributes->reduction, attributes->group); \
    }

NEW_FORM(one_shot_all_reduce, tutti_one_shot_all_reduce)
OUT_FORM(one_shot_all_reduce_out, tutti_one_shot_all_reduce)
IN_PLACE_FORM(two_shot_all_reduce, tutti_two_shot_all_reduce)
OUT_FORM(two_shot_all_reduce_out, tutti_two_shot_all_reduce_out)
IN_PLACE_FORM(multimem_all_reduce, tutti_multimem_all_reduce)
NEW_FORM(multimem_one_shot_all_reduce, tutti_multimem_one_shot_all_reduce)
OUT_FORM(multimem_one_shot_all_reduce_out, tutti_multimem_one_shot_all_reduce)

/* ---- one-shot with a buffer: x, of any memory, goes through it ---- */

static tutti_status check_buffer(const tu_call *call, const tt_tensor *buffer, const tt_tensor *x,
                                 tutti_reduction reduction) {
    tutti_status status = tu_rule_no_gradient(call);
    if (status == TUTTI_OK)
        status = check_input(call, reduction, x);
    if (status == TUTTI_OK)
        status = must_be_contiguous(call, "the buffer", buffer);
    if (status == TUTTI_OK && buffer->dtype != x->dtype)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the buffer is %s and the local input %s: one dtype is needed",
                             tu_describe(buffer), tu_describe(x));
    if (status == TUTTI_OK && x->numel > buffer->numel)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "the local input is %s; its size must be smaller than symm buffer size, %s, or equal",
                             tu_describe(x), tu_describe(buffer));
    return status;
}

static tutti_status start_copy(const tu_call *call, tt_tensor *buffer, const tt_tensor *x, tt_tensor *out,
                               tutti_reduction reduction, tutti_group *group) {
    tu_flight_plan plan = { call->entry->name,       group, .writes = out, .reads = x, .also_writes = buffer,
                            .nothing = x->numel == 0 };
    tutti_status status = must_be_symmetric(call, "the buffer", buffer, group);
    if (status != TUTTI_OK || is_faked(group, out, x))
        return status;
    status =
        tutti_one_shot_all_reduce_copy(group, tu_pointer(buffer), (size_t)buffer->numel, tu_pointer(x), tu_pointer(out),
                                       (size_t)x->numel, x->dtype, reduction, tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

tutti_status tu_one_shot_all_reduce_copy_shape(tu_call *call) {
    const tu_one_shot_all_reduce_copy_attributes *attributes = call->attributes;
    tutti_status status = check_buffer(call, call->inputs[0], call->inputs[1], attributes->reduction);
    call->results[0] = tu_shape_of(call->inputs[1]);
    call->results[0].offset = 0;
    return status;
}

tutti_status tu_one_shot_all_reduce_copy_everywhere(tu_call *call) {
    const tu_one_shot_all_reduce_copy_attributes *attributes = call->attributes;
    return start_copy(call, call->inputs[0], call->inputs[1], call->outputs[0], attributes->reduction,
                      attributes->group);
}

tutti_status tu_one_shot_all_reduce_copy_out_shape(tu_call *call) {
    const tu_one_shot_all_reduce_copy_out_attributes *attributes = call->attributes;
    tutti_status status = check_buffer(call, call->inputs[1], call->inputs[2], attributes->reduction);
    return status == TUTTI_OK ? check_output(call, call->inputs[0], call->inputs[2]) : status;
}

tutti_status tu_one_shot_all_reduce_copy_out_everywhere(tu_call *call) {
    const tu_one_shot_all_reduce_copy_out_attributes *attributes = call->attributes;
    return start_copy(call, call->inputs[1], call->inputs[2], call->inputs[0], attributes->reduction,
                      attributes->group);
}

/* ---- to one root, by multicast; the others' out is neither needed nor touched ---- */

static bool is_root(tutti_group *group, int root) {
    return group == NULL || tutti_group_rank(group) == root;
}

tutti_status tu_multimem_one_shot_reduce_out_shape(tu_call *call) {
    const tu_multimem_one_shot_reduce_out_attributes *attributes = call->attributes;
    const tt_tensor *out = call->inputs[0], *x = call->inputs[1];
    int ranks = attributes->group != NULL ? tutti_group_size(attributes->group) : 0;
    tutti_status status = check_input(call, attributes->reduction, x);
    if (status == TUTTI_OK)
        status = tu_rule_no_gradient(call);
    if (status != TUTTI_OK)
        return status;
    if (attributes->group != NULL && (attributes->root < 0 || attributes->root >= ranks))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "root must be in [0, %d), and is %d", ranks, attributes->root);
    if (!is_root(attributes->group, attributes->root))
        return TUTTI_OK;
    if (out == NULL)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the root, rank %d, needs an out", attributes->root);
    return check_output(call, out, x);
}

tutti_status tu_multimem_one_shot_reduce_out_everywhere(tu_call *call) {
    const tu_multimem_one_shot_reduce_out_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[1];
    tt_tensor *out = is_root(attributes->group, attributes->root) ? call->inputs[0] : NULL;
    tu_flight_plan plan = { call->entry->name, attributes->group, .writes = out, .reads = x, .nothing = x->numel == 0 };
    tutti_status status = must_be_symmetric(call, "input", x, attributes->group);
    if (status != TUTTI_OK || (tu_group_is_fake(attributes->group) && out == NULL) ||
        (out != NULL && is_faked(attributes->group, out, x)))
        return status;
    status = tutti_multimem_one_shot_reduce_out(attributes->group, tu_pointer(x), out != NULL ? tu_pointer(out) : NULL,
                                                (size_t)x->numel, x->dtype, attributes->reduction, attributes->root,
                                                tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

/* ---- all-gather ---- */

/* out has as many dimensions as x, and size ranks times x's in the first. */
static tutti_status check_gathered(const tu_call *call, const tt_tensor *out, const tt_tensor *x, int ranks) {
    tutti_status status = tu_rule_no_gradient(call);
    if (status == TUTTI_OK)
        status = must_be_contiguous(call, "output", out);
    if (status == TUTTI_OK)
        status = must_be_contiguous(call, "input", x);
    if (status != TUTTI_OK)
        return status;
    if (out->ndim != x->ndim || x->ndim == 0 || out->dtype != x->dtype)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "input and output must have one dtype and as many dimensions, at least one: x is %s and "
                             "out is %s",
                             tu_describe(x), tu_describe(out));
    for (int i = 0; i < x->ndim; i++)
        if (out->sizes[i] != (i == 0 ? x->sizes[0] * ranks : x->sizes[i]))
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                 "dimension %d of out, %s, does not match that of x, %s, from each of %d ranks", i,
                                 tu_describe(out), tu_describe(x), ranks);
    return TUTTI_OK;
}

tutti_status tu_multimem_all_gather_out_shape(tu_call *call) {
    const tu_multimem_all_gather_out_attributes *attributes = call->attributes;
    return check_gathered(call, call->inputs[0], call->inputs[1], tutti_group_size(attributes->group));
}

tutti_status tu_multimem_all_gather_out_everywhere(tu_call *call) {
    const tu_multimem_all_gather_out_attributes *attributes = call->attributes;
    const tt_tensor *out = call->inputs[0], *x = call->inputs[1];
    tu_flight_plan plan = { call->entry->name, attributes->group, .writes = out, .reads = x, .nothing = x->numel == 0 };
    tutti_status status = must_be_symmetric(call, "output", out, attributes->group);
    if (status != TUTTI_OK || tu_fake_gather(attributes->group, out, x))
        return status;
    status = tutti_multimem_all_gather_out(attributes->group, tu_pointer(x), tu_pointer(out), (size_t)x->numel,
                                           x->dtype, tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

tutti_status tu_low_contention_all_gather_shape(tu_call *call) {
    const tu_low_contention_all_gather_attributes *attributes = call->attributes;
    return tu_rule_gathered(call, call->inputs[0], 0, attributes->group, &call->results[0]);
}

tutti_status tu_low_contention_all_gather_everywhere(tu_call *call) {
    const tu_low_contention_all_gather_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_flight_plan plan = { call->entry->name, attributes->group, .writes = out, .reads = from };
    tutti_status status = TUTTI_OK;
    if (!tu_fake_gather(attributes->group, out, from))
        status =
            tu_flight_begin(tutti_low_contention_all_gather(attributes->group, tu_pointer(from), tu_pointer(out),
                                                            (size_t)from->numel, from->dtype, tu_flight_call(&plan)),
                            &plan);
    tu_tensor_drop(from);
    return status;
}

void tu_low_contention_all_gather_gradient(tu_gradient *gradient) {
    const tu_low_contention_all_gather_attributes *attributes = gradient->attributes;
    tt_tensor *part = tt_low_contention_reduce_scatter(tt_contiguous(gradient->grads[0]), TUTTI_SUM, attributes->group);
    gradient->results[0] = tu_input_shape(gradient, 0)->ndim == 0 ? tt_view(part, tt_shape()) : part;
}

/* ---- reduce-scatter ---- */

tutti_status tu_low_contention_reduce_scatter_shape(tu_call *call) {
    const tu_low_contention_reduce_scatter_attributes *attributes = call->attributes;
    return tu_rule_scattered(call, call->inputs[0], attributes->reduction, 0, attributes->group, &call->results[0]);
}

tutti_status tu_low_contention_reduce_scatter_everywhere(tu_call *call) {
    const tu_low_contention_reduce_scatter_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_fake_part(attributes->group, out, from);
    tu_flight_plan plan = { call->entry->name, attributes->group, .writes = out, .reads = from };
    tutti_status status =
        tutti_low_contention_reduce_scatter(attributes->group, tu_pointer(from), tu_pointer(out), (size_t)out->numel,
                                            out->dtype, attributes->reduction, tu_flight_call(&plan));
    status = tu_flight_begin(status, &plan);
    tu_tensor_drop(from);
    return status;
}

/* What a sum or an average was scattered from has the gradients of all parts. */
static tt_tensor *share(const tu_gradient *gradient, tutti_reduction reduction, tutti_group *group) {
    if (!tu_rule_has_gradient(gradient, reduction))
        return NULL;
    tt_tensor *grad = gradient->grads[0];
    return tt_contiguous(reduction == TUTTI_AVG ? tt_div_scalar(grad, tutti_group_size(group)) : grad);
}

void tu_low_contention_reduce_scatter_gradient(tu_gradient *gradient) {
    const tu_low_contention_reduce_scatter_attributes *attributes = gradient->attributes;
    tt_tensor *part = share(gradient, attributes->reduction, attributes->group);
    gradient->results[0] = tt_low_contention_all_gather(part, attributes->group);
}

/* ---- reduce-scatter of the last dimension, from where the inputs lie ---- */

static tutti_status split_shape(const tu_call *call, const tt_tensor *x, tutti_reduction reduction, tutti_group *group,
                                tu_shape *result) {
    tutti_status status = check_input(call, reduction, x);
    int ranks = tutti_group_size(group), last = x->ndim - 1;
    if (status != TUTTI_OK)
        return status;
    if (x->ndim == 0 || x->sizes[last] % ranks != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the last dimension of %s must be divisible by world_size, %d",
                             tu_describe(x), ranks);
    *result = tu_shape_of(x);
    result->sizes[last] /= ranks;
    return tu_shape_contiguous(call->entry->name, result);
}

static tutti_status start_split(const tu_call *call, const tt_tensor *x, tt_tensor *out, tutti_reduction reduction,
                                tutti_group *group) {
    size_t columns = (size_t)x->sizes[x->ndim - 1], rows = columns > 0 ? (size_t)x->numel / columns : 0;
    int ranks = tutti_group_size(group), rank = tutti_group_rank(group);
    tu_flight_plan plan = { call->entry->name, group, .writes = out, .reads = x, .nothing = x->numel == 0 };
    tutti_status status = must_be_symmetric(call, "input", x, group);
    if (status != TUTTI_OK)
        return status;
    if (tu_group_is_fake(group)) { /* this rank's part of what it has itself */
        tu_shape part = tu_shape_of(x);
        part.sizes[x->ndim - 1] /= ranks;
        part.offset += rank * part.sizes[x->ndim - 1];
        tt_tensor own = tu_tensor_look(x, &part);
        if (out->numel > 0)
            tu_copy_tensor(out, &own);
        return TUTTI_OK;
    }
    status = tutti_reduce_scatter_out(group, tu_pointer(x), tu_pointer(out), rows, columns, true, x->dtype, reduction,
                                      tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

tutti_status tu_reduce_scatter_split_shape(tu_call *call) {
    const tu_reduce_scatter_split_attributes *attributes = call->attributes;
    return split_shape(call, call->inputs[0], attributes->reduction, attributes->group, &call->results[0]);
}

tutti_status tu_reduce_scatter_split_everywhere(tu_call *call) {
    const tu_reduce_scatter_split_attributes *attributes = call->attributes;
    return start_split(call, call->inputs[0], call->outputs[0], attributes->reduction, attributes->group);
}

void tu_reduce_scatter_split_gradient(tu_gradient *gradient) {
    const tu_reduce_scatter_split_attributes *attributes = gradient->attributes;
    tt_tensor *part = share(gradient, attributes->reduction, attributes->group);
    gradient->results[0] = tt_all_gather(part, -1, attributes->group);
}

tutti_status tu_reduce_scatter_split_out_shape(tu_call *call) {
    const tu_reduce_scatter_split_out_attributes *attributes = call->attributes;
    const tt_tensor *out = call->inputs[0], *x = call->inputs[1];
    tu_shape wanted;
    tutti_status status = split_shape(call, x, attributes->reduction, attributes->group, &wanted);
    if (status == TUTTI_OK)
        status = tu_rule_no_gradient(call);
    if (status == TUTTI_OK)
        status = must_be_contiguous(call, "output", out);
    if (status != TUTTI_OK)
        return status;
    bool fits = out->ndim == wanted.ndim && out->dtype == x->dtype;
    for (int i = 0; i < wanted.ndim && fits; i++)
        fits = out->sizes[i] == wanted.sizes[i];
    return fits ? TUTTI_OK
                : tu_call_error(call, TUTTI_ERROR_ARGUMENT, "input/output size mismatch: out is %s and must be %s %s",
                                tu_describe(out), tutti_dtype_name(wanted.dtype),
                                tu_dims_text(wanted.ndim, wanted.sizes));
}

tutti_status tu_reduce_scatter_split_out_everywhere(tu_call *call) {
    const tu_reduce_scatter_split_out_attributes *attributes = call->attributes;
    return start_split(call, call->inputs[1], call->inputs[0], attributes->reduction, attributes->group);
}

/* ---- all-to-all whose splits are data ---- */

/* The four tensors of such a call, in the order of its arguments. */
enum {
    OUT,
    OUT_SPLITS_OFFSETS,
    X,
    IN_SPLITS
};
static const char *const vdev_names[] = { "out", "out_splits_offsets", "input", "in_splits" };

static tutti_status check_splits(const tu_call *call, int which, int64_t rows) {
    const tt_tensor *splits = call->inputs[which];
    if (splits->dtype != TUTTI_I64)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "%s must be int64 (i64), and is %s", vdev_names[which],
                             tu_describe(splits));
    bool fits = rows == 1 ? splits->ndim == 1 : splits->ndim == 2 && splits->sizes[0] == rows;
    return fits ? TUTTI_OK
                : tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s must be %s, and is %s", vdev_names[which],
                                rows == 1 ? "one row of splits" : "a row of splits and a row of offsets",
                                tu_describe(splits));
}

static int64_t row_elements(const tt_tensor *x) {
    int64_t elements = 1;
    for (int i = 1; i < x->ndim; i++)
        elements *= x->sizes[i];
    return elements;
}

/* in_rows: 1 for splits, 2 for splits and offsets. `experts` says whether there may be several per rank. */
static tutti_status check_vdev(const tu_call *call, int64_t in_rows, bool experts, tutti_group *group) {
    const tt_tensor *out = call->inputs[OUT], *x = call->inputs[X];
    tutti_status status = tu_rule_no_gradient(call);
    for (int i = OUT; i <= IN_SPLITS && status == TUTTI_OK; i++)
        status = must_be_contiguous(call, vdev_names[i], call->inputs[i]);
    if (status == TUTTI_OK)
        status = check_splits(call, OUT_SPLITS_OFFSETS, 2);
    if (status == TUTTI_OK)
        status = check_splits(call, IN_SPLITS, in_rows);
    if (status != TUTTI_OK)
        return status;
    if (x->ndim == 0 || out->ndim == 0 || x->dtype != out->dtype || row_elements(x) != row_elements(out))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "input and out must have one dtype and rows of one length (the same stride of dimension "
                             "0): input is %s and out is %s",
                             tu_describe(x), tu_describe(out));
    int ranks = tutti_group_size(group);
    int64_t slots = call->inputs[IN_SPLITS]->numel / in_rows, of_out = call->inputs[OUT_SPLITS_OFFSETS]->numel / 2;
    if (slots != of_out || slots == 0 || slots % ranks != 0 || (!experts && slots != ranks))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "in_splits has %lld entries and out_splits_offsets two rows of %lld; both must have %s of "
                             "the %d ranks",
                             (long long)slots, (long long)of_out,
                             experts ? "as many entries for each expert, one for each" : "one entry for each", ranks);
    return TUTTI_OK;
}

typedef enum vdev_form {
    PLAIN,
    BY_EXPERT,       /* to rows by expert and rank */
    BY_EXPERT_OFFSET /* and back */
} vdev_form;

static tutti_status start_vdev(const tu_call *call, vdev_form form, int64_t major_align, tutti_group *group) {
    tutti_status status = TUTTI_OK;
    for (int i = OUT; i <= IN_SPLITS && status == TUTTI_OK; i++)
        status = must_be_symmetric(call, vdev_names[i], call->inputs[i], group);
    const tt_tensor *x = call->inputs[X], *out = call->inputs[OUT], *splits = call->inputs[IN_SPLITS];
    tutti_rows rows = TUTTI_ROWS_INIT;
    rows.in = tu_pointer(x);
    rows.in_rows = (size_t)x->sizes[0];
    rows.out = tu_pointer(out);
    rows.out_rows = (size_t)out->sizes[0];
    rows.row = (size_t)row_elements(x);
    rows.dtype = x->dtype;
    const int64_t *in_splits = tu_pointer(splits);
    int64_t *out_splits_offsets = tu_pointer(call->inputs[OUT_SPLITS_OFFSETS]);
    int experts = (int)(splits->numel / (form == BY_EXPERT_OFFSET ? 2 : 1) / tutti_group_size(group));
    tu_flight_plan plan = {
        call->entry->name,   group, .writes = out, .reads = x, .also_writes = call->inputs[OUT_SPLITS_OFFSETS],
        .also_reads = splits
    };
    const tutti_call *options = tu_flight_call(&plan);
    if (status != TUTTI_OK)
        return status;
    if (form == PLAIN)
        status = tutti_all_to_all_vdev(group, &rows, in_splits, out_splits_offsets, options);
    else if (form == BY_EXPERT)
        status = tutti_all_to_all_vdev_2d(group, &rows, experts, major_align > 0 ? major_align : 1, in_splits,
                                          out_splits_offsets, options);
    else
        status = tutti_all_to_all_vdev_2d_offset(group, &rows, experts, in_splits, out_splits_offsets, options);
    return tu_flight_begin(status, &plan);
}

tutti_status tu_all_to_all_vdev_shape(tu_call *call) {
    const tu_all_to_all_vdev_attributes *attributes = call->attributes;
    return check_vdev(call, 1, false, attributes->group);
}

tutti_status tu_all_to_all_vdev_everywhere(tu_call *call) {
    const tu_all_to_all_vdev_attributes *attributes = call->attributes;
    return start_vdev(call, PLAIN, 0, attributes->group);
}

tutti_status tu_all_to_all_vdev_2d_shape(tu_call *call) {
    const tu_all_to_all_vdev_2d_attributes *attributes = call->attributes;
    if (attributes->major_align < 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "major_align must be greater than 0, or 0 for none, not %lld",
                             (long long)attributes->major_align);
    return check_vdev(call, 1, true, attributes->group);
}

tutti_status tu_all_to_all_vdev_2d_everywhere(tu_call *call) {
    const tu_all_to_all_vdev_2d_attributes *attributes = call->attributes;
    return start_vdev(call, BY_EXPERT, attributes->major_align, attributes->group);
}

tutti_status tu_all_to_all_vdev_2d_offset_shape(tu_call *call) {
    const tu_all_to_all_vdev_2d_offset_attributes *attributes = call->attributes;
    return check_vdev(call, 2, true, attributes->group);
}

tutti_status tu_all_to_all_vdev_2d_offset_everywhere(tu_call *call) {
    const tu_all_to_all_vdev_2d_offset_attributes *attributes = call->attributes;
    return start_vdev(call, BY_EXPERT_OFFSET, 0, attributes->group);
}

/* ---- samples, on symmetric memory ---- */

static tt_tensor *sample(tu_sampler *sampler) {
    return tu_symm_sample(sampler, sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 4), 0));
}

static tt_tensor *constant(tu_sampler *sampler) {
    return tt_detach(sample(sampler));
}

#define SAMPLE_NEW(name)                                              \
    tt_tensor *tu_##name##_sample(tu_sampler *sampler) {              \
        return tt_##name(sample(sampler), TUTTI_SUM, sampler->group); \
    }
#define SAMPLE_OUT(name)                                                  \
    tt_tensor *tu_##name##_sample(tu_sampler *sampler) {                  \
        tt_tensor *x = constant(sampler);                                 \
        return tt_##name(tt_zeros_like(x), x, TUTTI_SUM, sampler->group); \
    }
#define SAMPLE_IN_PLACE(name)                                              \
    tt_tensor *tu_##name##_sample(tu_sampler *sampler) {                   \
        return tt_##name##_(constant(sampler), TUTTI_SUM, sampler->group); \
    }
SAMPLE_NEW(one_shot_all_reduce)
SAMPLE_OUT(one_shot_all_reduce_out)
SAMPLE_IN_PLACE(two_shot_all_reduce)
SAMPLE_OUT(two_shot_all_reduce_out)
SAMPLE_IN_PLACE(multimem_all_reduce)
SAMPLE_NEW(multimem_one_shot_all_reduce)
SAMPLE_OUT(multimem_one_shot_all_reduce_out)
SAMPLE_NEW(reduce_scatter_split)
SAMPLE_OUT(reduce_scatter_split_out)

tt_tensor *tu_one_shot_all_reduce_copy_sample(tu_sampler *sampler) {
    tt_tensor *buffer = constant(sampler);
    return tt_one_shot_all_reduce_copy(buffer, tt_clone(constant(sampler)), TUTTI_SUM, sampler->group);
}

tt_tensor *tu_one_shot_all_reduce_copy_out_sample(tu_sampler *sampler) {
    tt_tensor *x = constant(sampler);
    return tt_one_shot_all_reduce_copy_out(tt_zeros_like(x), constant(sampler), x, TUTTI_SUM, sampler->group);
}

tt_tensor *tu_multimem_one_shot_reduce_out_sample(tu_sampler *sampler) {
    tt_tensor *x = constant(sampler);
    return tt_multimem_one_shot_reduce_out(tt_zeros_like(x), x, TUTTI_SUM, 0, sampler->group);
}

tt_tensor *tu_multimem_all_gather_out_sample(tu_sampler *sampler) {
    tt_tensor *x = constant(sampler);
    return tt_multimem_all_gather_out(constant(sampler), x, sampler->group);
}

/* One rank, which sends all its rows to itself, as one expert. */
static tt_tensor *splits_of(tu_sampler *sampler, int64_t rows, tutti_device device) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = device;
    tt_tensor *one = tt_full(tt_shape(1), (double)sampler->size, TUTTI_I64, &options);
    if (rows == 2)
        one = tt_stack(tt_tensors(one, tt_zeros_like(one)), 0);
    return tu_symm_sample(sampler, one);
}

typedef tt_tensor *exchange(tt_tensor *out, tt_tensor *out_splits, tt_tensor *x, tt_tensor *in_splits,
                            tutti_group *group);
static tt_tensor *sample_exchange(tu_sampler *sampler, exchange *function, int64_t in_rows) {
    tt_tensor *x = constant(sampler), *out = constant(sampler);
    tutti_device device = x != NULL ? x->device : TUTTI_CPU;
    return function(out, splits_of(sampler, 2, device), x, splits_of(sampler, in_rows, device), sampler->group);
}

static tt_tensor *exchange_experts(tt_tensor *out, tt_tensor *out_splits, tt_tensor *x, tt_tensor *in_splits,
                                   tutti_group *group) {
    return tt_all_to_all_vdev_2d(out, out_splits, x, in_splits, 1, group);
}

tt_tensor *tu_all_to_all_vdev_sample(tu_sampler *sampler) {
    return sample_exchange(sampler, tt_all_to_all_vdev, 1);
}

tt_tensor *tu_all_to_all_vdev_2d_sample(tu_sampler *sampler) {
    return sample_exchange(sampler, exchange_experts, 1);
}

tt_tensor *tu_all_to_all_vdev_2d_offset_sample(tu_sampler *sampler) {
    return sample_exchange(sampler, tt_all_to_all_vdev_2d_offset, 2);
}
