/* SPDX-License-Identifier: Apache-2.0
 *
 * From vertices to the lines of a nest.
 */
#include "loops/nest.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/kernel/kernels.h"
#include "tensor/operators.h"
#include "tensor/pointwise.h"

/* ---- what a vertex is ---- */

bool tu_nest_copies(const tu_vertex *vertex) {
    const tu_operator *entry = vertex->entry;
    return entry == &tu_operator_clone || entry == &tu_operator_contiguous || entry == &tu_operator_to ||
           entry == &tu_operator_restride || (entry == &tu_operator_copy && vertex->in_place);
}

static bool fold_of(const tu_operator *entry, int *fold, bool *mean) {
    const struct {
        const tu_operator *entry;
        int fold;
        bool mean;
    } folds[] = {
        { &tu_operator_sum_dims, TU_FOLD_SUM, false }, { &tu_operator_mean_dims, TU_FOLD_SUM, true },
        { &tu_operator_amax, TU_FOLD_MAXIMUM, false }, { &tu_operator_amin, TU_FOLD_MINIMUM, false },
        { &tu_operator_prod, TU_FOLD_PRODUCT, false },
    };
    for (size_t i = 0; i < sizeof folds / sizeof *folds; i++)
        if (folds[i].entry == entry) {
            *fold = folds[i].fold;
            *mean = folds[i].mean;
            return true;
        }
    return false;
}

bool tu_nest_fold(const tu_vertex *vertex, int *split, int *fold, bool *mean) {
    if (!fold_of(vertex->entry, fold, mean) || vertex->operands[0].value == NULL)
        return false;
    const tu_sum_dims_attributes *attributes = vertex->attributes; /* of every reduction */
    const tu_shape *shape = &vertex->operands[0].value->shape;
    unsigned mask = 0;
    if (!tu_is_float(shape->dtype) || shape->ndim == 0)
        return false;
    for (int i = 0; i < attributes->dims.count; i++)
        mask |= 1u << tu_dim(attributes->dims.at[i], shape->ndim);
    if (attributes->dims.count <= 0)
        mask = (1u << shape->ndim) - 1;
    int from = shape->ndim;
    while (from > 0 && mask & 1u << (from - 1))
        from--;
    *split = from < shape->ndim && mask == ((1u << shape->ndim) - 1) - ((1u << from) - 1) ? from : -1;
    return true;
}

bool tu_nest_is_long(int64_t columns, int64_t total) {
    return columns > TU_NEST_COLUMNS || (total / columns < 8 && total > 65536);
}

bool tu_nest_row_is_even(const tu_shape *shape, int ndim, const int64_t *sizes, int split) {
    int64_t next = 0, next_size = 0;
    bool any = false;
    for (int dim = ndim - 1; dim >= split; dim--) {
        int own = dim - (ndim - shape->ndim);
        if (sizes[dim] == 1)
            continue;
        int64_t stride = own < 0 || shape->sizes[own] == 1 ? 0 : shape->strides[own];
        if (any && stride != next * next_size)
            return false;
        any = true;
        next = stride;
        next_size = sizes[dim];
    }
    return true;
}

/* ---- building ---- */

/* Where the nest has a value now. */
typedef struct binding {
    const tu_value *value;
    int slot;
    int truth;     /* a slot with the same as 0 and 1 of a number's type; -1 */
    bool made;     /* by a line; else read from memory */
    bool in_place; /* read from memory, and changed since */
} binding;

typedef struct builder {
    tu_nest *nest;
    binding *bindings;
    int binding_count, binding_room;
    const int *uses;
    bool impossible;
    tutti_status status;
} builder;

static void *grow(builder *now, void *list, int count, int *room, size_t size) {
    if (count < *room)
        return list;
    int more = *room == 0 ? 16 : *room * 2;
    void *larger = realloc(list, (size_t)more * size);
    if (larger == NULL) {
        now->status = tu_error_memory("a loop", (size_t)more * size);
        return NULL;
    }
    *room = more;
    return larger;
}

static int add_slot(builder *now, tutti_dtype dtype, bool narrow, const tu_value *value) {
    tu_nest *nest = now->nest;
    tu_slot *slots = grow(now, nest->slots, nest->slot_count, &nest->slot_room, sizeof *slots);
    if (slots == NULL)
        return -1;
    nest->slots = slots;
    slots[nest->slot_count] =
        (tu_slot){ .dtype = dtype, .narrow = narrow, .value = value, .tensor = -1, .buffer = -1, .wide_buffer = -1 };
    return nest->slot_count++;
}

static tu_line *add_line(builder *now, tu_line_kind kind, const tu_vertex *vertex) {
    tu_nest *nest = now->nest;
    tu_line *lines = grow(now, nest->lines, nest->line_count, &nest->line_room, sizeof *lines);
    if (lines == NULL)
        return NULL;
    nest->lines = lines;
    lines[nest->line_count] = (tu_line){ .kind = kind, .vertex = vertex, .out = -1 };
    return &lines[nest->line_count++];
}

/* The value's place; a value from outside has one for each width. */
static binding *find(builder *now, const tu_value *value, bool narrow) {
    for (int i = now->binding_count - 1; i >= 0; i--) {
        binding *found = &now->bindings[i];
        if (found->value == value && (found->made || found->in_place || now->nest->slots[found->slot].narrow == narrow))
            return found;
    }
    return NULL;
}

static binding *bind(builder *now, const tu_value *value, int slot, bool made) {
    binding *bindings = grow(now, now->bindings, now->binding_count, &now->binding_room, sizeof *now->bindings);
    if (bindings == NULL || slot < 0)
        return NULL;
    now->bindings = bindings;
    bindings[now->binding_count] = (binding){ .value = value, .slot = slot, .truth = -1, .made = made };
    return &bindings[now->binding_count++];
}

static int add_tensor(builder *now, const tu_value *value, int slot, bool written, bool fresh) {
    tu_nest *nest = now->nest;
    if (nest->tensor_count == TU_NEST_TENSORS) {
        now->impossible = true;
        return -1;
    }
    nest->tensors[nest->tensor_count] = (tu_nest_tensor){
        .value = value, .slot = slot, .written = written, .fresh = fresh, .narrow = nest->slots[slot].narrow
    };
    nest->slots[slot].tensor = nest->tensor_count;
    return nest->tensor_count++;
}

/* A value's slot in its own dtype; a value from outside is read. */
static binding *home(builder *now, const tu_value *value, bool narrow) {
    binding *found = find(now, value, narrow);
    if (found != NULL)
        return found;
    int slot = add_slot(now, value->shape.dtype, narrow, value);
    if (slot < 0 || add_tensor(now, value, slot, false, false) < 0)
        return NULL;
    return bind(now, value, slot, false);
}

static int convert(builder *now, const tu_vertex *vertex, int from, tutti_dtype dtype, bool narrow,
                   const tu_value *value) {
    int slot = add_slot(now, dtype, narrow, value);
    tu_line *line = slot >= 0 ? add_line(now, TU_LINE_CONVERT, vertex) : NULL;
    if (line == NULL)
        return -1;
    line->in[line->in_count++] = from;
    line->out = slot;
    return slot;
}

/* The slot's numbers in the type that a line computes in; what was converted once is used again. */
static int as(builder *now, const tu_vertex *vertex, const binding *from, tutti_dtype dtype) {
    tu_nest *nest = now->nest;
    if (nest->slots[from->slot].dtype == dtype)
        return from->slot;
    if (from->truth >= 0 && nest->slots[from->truth].dtype == dtype)
        return from->truth;
    for (int i = 0; i < nest->line_count; i++) {
        const tu_line *line = &nest->lines[i];
        if (line->kind == TU_LINE_CONVERT && line->in[0] == from->slot && nest->slots[line->out].dtype == dtype)
            return line->out;
    }
    return convert(now, vertex, from->slot, dtype, nest->slots[from->slot].narrow, NULL);
}

/* A number as the operators see it (tt_number), in the type of the line. */
static int constant(builder *now, const tu_operand *operand, tutti_dtype dtype) {
    double value = operand->number == TUTTI_I64 ? (double)operand->at.whole : operand->at.real;
    bool whole =
        value == __builtin_rint(value) && __builtin_fabs(value) < 9e15 && !(value == 0 && __builtin_signbit(value));
    int64_t integer = whole ? (int64_t)value : 0;
    int slot = add_slot(now, dtype, true, NULL);
    if (slot < 0)
        return -1;
    now->nest->slots[slot].constant = true;
    tutti_status status = whole ? tutti_convert(&integer, TUTTI_I64, now->nest->slots[slot].number, dtype, 1)
                                : tutti_convert(&value, TUTTI_F64, now->nest->slots[slot].number, dtype, 1);
    if (status != TUTTI_OK)
        now->status = status;
    return slot;
}

static void bump(builder *now, const tu_value *value) {
    tu_nest *nest = now->nest;
    for (int i = 0; i < nest->bump_count; i++)
        if (nest->bumps[i].value == value) {
            nest->bumps[i].count++;
            return;
        }
    nest->bumps[nest->bump_count++] = (tu_nest_bump){ value, 1 }; /* there is room for one per member */
}

/* What a line computed is the vertex's result, or the new contents of what it writes. */
static void finish(builder *now, const tu_vertex *vertex, int raw, bool narrow) {
    const tu_value *value = vertex->in_place ? vertex->operands[0].value : vertex->results[0];
    tu_nest *nest = now->nest;
    int slot = raw;
    if (nest->slots[raw].dtype != value->shape.dtype) {
        slot = convert(now, vertex, raw, value->shape.dtype, narrow, value);
        if (slot < 0)
            return;
    }
    nest->slots[slot].value = value;
    bool truth = value->shape.dtype == TUTTI_BOOL && vertex->entry->flags & TU_TO_BOOL && slot != raw;
    if (!vertex->in_place) {
        binding *made = bind(now, value, slot, true);
        if (made != NULL && truth)
            made->truth = raw;
        return;
    }
    binding *target = find(now, value, narrow);
    if (target == NULL && (target = bind(now, value, slot, false)) == NULL)
        return;
    target->slot = slot;
    target->truth = truth ? raw : -1;
    target->in_place = !target->made;
    bump(now, value);
}

/* ---- the lines of one vertex ---- */

/* The tensors that the shape rule looks at: metadata alone. */
typedef struct looks {
    tt_tensor at[TU_OPERANDS];
    tt_tensor *list[TU_OPERANDS];
    tu_storage storage;
} looks;

static void look(looks *look, int i, const tu_operand *operand) {
    tt_tensor *x = &look->at[i];
    *x = (tt_tensor){ .magic = TU_MAGIC_ALIVE, .device = TUTTI_CPU, .storage = &look->storage, .numel = 1 };
    look->list[i] = x;
    if (operand->value == NULL) {
        double value = operand->number == TUTTI_I64 ? (double)operand->at.whole : operand->at.real;
        bool whole =
            value == __builtin_rint(value) && __builtin_fabs(value) < 9e15 && !(value == 0 && __builtin_signbit(value));
        x->dtype = (uint8_t)(whole ? TUTTI_I64 : TUTTI_F64);
        x->flags = TU_NUMBER | TU_LITERAL | TU_CONTIGUOUS;
        return;
    }
    const tu_shape *shape = &operand->value->shape;
    x->dtype = (uint8_t)shape->dtype;
    x->ndim = (uint8_t)shape->ndim;
    memcpy(x->sizes, shape->sizes, sizeof x->sizes);
    memcpy(x->strides, shape->strides, sizeof x->strides);
    x->numel = tu_shape_numel(shape);
}

/* Whether a result of these sizes has one element per row; it keeps the reduced dimensions with size 1. */
static bool is_narrow(const tu_nest *nest, const tu_shape *shape) {
    for (int i = nest->split; i >= 0 && i < nest->ndim; i++)
        if (i >= shape->ndim || shape->sizes[i] != nest->sizes[i])
            return true;
    return false;
}

static void add_pointwise(builder *now, const tu_vertex *vertex) {
    looks inputs = { .storage = { .device = TUTTI_CPU } };
    for (int i = 0; i < vertex->operand_count; i++)
        look(&inputs, i, &vertex->operands[i]);
    tu_call call;
    tu_call_init(&call, vertex->entry, vertex->operand_count, inputs.list, vertex->attributes);
    call.device = TUTTI_CPU;
    now->status = vertex->entry->shape(&call);
    if (now->status != TUTTI_OK)
        return;
    tutti_dtype compute = tu_pointwise_compute(&call);
    bool narrow = is_narrow(now->nest, &call.results[0]);
    int in[TU_OPERANDS];
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_operand *operand = &vertex->operands[i];
        const binding *from = operand->value != NULL ? home(now, operand->value, narrow) : NULL;
        in[i] = operand->value == NULL ? constant(now, operand, compute)
                : from != NULL         ? as(now, vertex, from, compute)
                                       : -1;
        if (in[i] < 0)
            return;
    }
    int raw = add_slot(now, compute, narrow, NULL);
    tu_line *line = raw >= 0 ? add_line(now, TU_LINE_POINTWISE, vertex) : NULL;
    if (line == NULL)
        return;
    line->kernel = tu_pointwise_kernel(vertex->entry, compute);
    line->in_count = vertex->operand_count;
    memcpy(line->in, in, (size_t)line->in_count * sizeof *in);
    line->out = raw;
    now->impossible = now->impossible || line->kernel == NULL || tu_is_complex(compute);
    finish(now, vertex, raw, narrow);
}

static void add_fold(builder *now, const tu_vertex *vertex) {
    const binding *from = home(now, vertex->operands[0].value, false);
    tutti_dtype compute = tu_compute_dtype(vertex->operands[0].value->shape.dtype);
    int wide = from != NULL ? as(now, vertex, from, compute) : -1;
    int raw = wide >= 0 ? add_slot(now, compute, true, NULL) : -1;
    tu_line *line = raw >= 0 ? add_line(now, TU_LINE_FOLD, vertex) : NULL;
    if (line == NULL)
        return;
    fold_of(vertex->entry, &line->fold, &line->mean);
    line->in[line->in_count++] = wide;
    line->out = raw;
    finish(now, vertex, raw, true);
}

static void add_copy(builder *now, const tu_vertex *vertex) {
    const tu_operand *source = &vertex->operands[vertex->entry == &tu_operator_copy ? 1 : 0];
    const tu_value *value = vertex->in_place ? vertex->operands[0].value : vertex->results[0];
    bool narrow = is_narrow(now->nest, &value->shape);
    int slot = -1;
    if (source->value == NULL) {
        int number = constant(now, source, value->shape.dtype);
        slot = number < 0 ? -1 : convert(now, vertex, number, value->shape.dtype, narrow, value);
    } else {
        const binding *from = home(now, source->value, narrow);
        slot = from == NULL ? -1 : convert(now, vertex, from->slot, value->shape.dtype, narrow, value);
    }
    if (slot >= 0)
        finish(now, vertex, slot, narrow);
}

/* ---- what goes out ---- */

static int own_uses(const tu_nest *nest, const tu_value *value) {
    int count = 0;
    for (int i = 0; i < nest->member_count; i++)
        for (int k = 0; k < nest->members[i]->operand_count; k++)
            count += nest->members[i]->operands[k].value == value;
    return count;
}

static void add_outputs(builder *now) {
    tu_nest *nest = now->nest;
    for (int i = 0; i < now->binding_count; i++) {
        const binding *at = &now->bindings[i];
        if (at->in_place)
            add_tensor(now, at->value, at->slot, true, false);
        else if (at->made && now->uses[at->value->number] > own_uses(nest, at->value))
            add_tensor(now, at->value, at->slot, true, true);
        if (now->impossible)
            return;
    }
}

/* Leaves out lines that nothing needs, such as the rounding of a result that only the next line reads. */
static void drop_idle_lines(tu_nest *nest) {
    for (int i = nest->line_count - 1; i >= 0; i--) {
        const tu_slot *out = &nest->slots[nest->lines[i].out];
        bool needed = out->tensor >= 0 && nest->tensors[out->tensor].written;
        for (int k = i + 1; k < nest->line_count && !needed; k++)
            for (int j = 0; j < nest->lines[k].in_count && !needed; j++)
                needed = nest->lines[k].in[j] == nest->lines[i].out;
        if (needed)
            continue;
        memmove(&nest->lines[i], &nest->lines[i + 1], (size_t)(nest->line_count - i - 1) * sizeof *nest->lines);
        nest->line_count--;
    }
}

/* And tensors that no line reads any more. */
static void drop_idle_tensors(tu_nest *nest) {
    int kept = 0;
    for (int i = 0; i < nest->tensor_count; i++) {
        tu_nest_tensor tensor = nest->tensors[i];
        bool needed = tensor.written;
        for (int k = 0; k < nest->line_count && !needed; k++)
            for (int j = 0; j < nest->lines[k].in_count && !needed; j++)
                needed = nest->lines[k].in[j] == tensor.slot;
        nest->slots[tensor.slot].tensor = needed ? kept : -1;
        if (needed)
            nest->tensors[kept++] = tensor;
    }
    nest->tensor_count = kept;
}

/* ---- the walk ---- */

/* Strides of a tensor over the space; what is broadcast repeats. */
static void set_strides(const tu_nest *nest, tu_nest_tensor *tensor) {
    const tu_shape *shape = &tensor->value->shape;
    bool dropped =
        tensor->narrow && tensor->written && shape->ndim < nest->ndim; /* a reduction without its dimensions */
    int pad = dropped ? 0 : nest->ndim - shape->ndim;
    for (int dim = 0; dim < nest->ndim; dim++) {
        bool there = dim >= pad && dim - pad < shape->ndim;
        tensor->strides[dim] = !there || shape->sizes[dim - pad] == 1 ? 0 : shape->strides[dim - pad];
        if (tensor->narrow && dim >= nest->split)
            tensor->strides[dim] = 0;
    }
}

static bool mergeable(const tu_nest *nest, int outer, int inner, int64_t inner_size) {
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].strides[outer] != nest->tensors[i].strides[inner] * inner_size)
            return false;
    return true;
}

/* The order in which dimensions are walked: as they are where rows are reduced, else by the strides of the first tensor
 * that is written, largest first. */
static void order_dims(const tu_nest *nest, int *order) {
    const tu_nest_tensor *guide = NULL;
    for (int i = 0; i < nest->tensor_count && guide == NULL; i++)
        guide = nest->tensors[i].written ? &nest->tensors[i] : NULL;
    for (int i = 0; i < nest->ndim; i++)
        order[i] = i;
    for (int i = 1; nest->split < 0 && guide != NULL && i < nest->ndim; i++)
        for (int j = i;
             j > 0 && guide->strides[order[j]] > guide->strides[order[j - 1]] && guide->strides[order[j - 1]] != 0;
             j--) {
            int other = order[j];
            order[j] = order[j - 1];
            order[j - 1] = other;
        }
}

static int64_t numel_of(const tu_nest *nest) {
    int64_t count = 1;
    for (int i = 0; i < nest->ndim; i++)
        count *= nest->sizes[i];
    return count;
}

/* Merges neighbours that one stride walks through; the last dimension, or the reduced ones, are the columns. */
static bool set_walk(tu_nest *nest) {
    int order[TT_MAX_DIMS], kept[TT_MAX_DIMS + 1], count = 0, column_dims = 0;
    int64_t sizes[TT_MAX_DIMS + 1];
    order_dims(nest, order);
    for (int i = 0; i < nest->ndim; i++) {
        int dim = order[i];
        bool column = nest->split >= 0 && dim >= nest->split;
        if (nest->sizes[dim] == 1)
            continue;
        bool apart = nest->tiled && dim == nest->ndim - 1;
        if (count > 0 && !apart && (!column || column_dims > 0) &&
            mergeable(nest, kept[count - 1], dim, nest->sizes[dim])) {
            sizes[count - 1] *= nest->sizes[dim];
            kept[count - 1] = dim;
            continue;
        }
        column_dims += column;
        kept[count] = dim;
        sizes[count++] = nest->sizes[dim];
    }
    if (column_dims > 1 || (nest->split >= 0 && column_dims == 0))
        return false;
    if (nest->tiled && (count == 0 || count > 2 || kept[count - 1] != nest->ndim - 1))
        return false;
    bool has_columns = count > 0, has_rows = count > 1;
    nest->columns = has_columns ? sizes[count - 1] : 1;
    nest->rows = has_rows ? sizes[count - 2] : 1;
    nest->is_long = nest->split >= 0 && tu_nest_is_long(nest->columns, numel_of(nest));
    nest->outer_ndim = count > 2 ? count - 2 : 0;
    nest->outer_count = 1;
    for (int i = 0; i < nest->outer_ndim; i++)
        nest->outer_count *= nest->outer_sizes[i] = sizes[i];
    for (int k = 0; k < nest->tensor_count; k++) {
        tu_nest_tensor *tensor = &nest->tensors[k];
        tensor->column = has_columns ? tensor->strides[kept[count - 1]] : 0;
        tensor->row = has_rows ? tensor->strides[kept[count - 2]] : 0;
        tensor->still = tensor->row == 0;
        for (int i = 0; i < nest->outer_ndim; i++) {
            tensor->outer[i] = tensor->strides[kept[i]];
            tensor->still = tensor->still && tensor->outer[i] == 0;
        }
        tensor->single = tensor->still && tensor->column == 0;
    }
    return true;
}

/* ---- all of it ---- */

tutti_status tu_nest_make(const tu_vertex *const *members, int member_count, int ndim, const int64_t *sizes, int split,
                          bool tiled, const int *uses, tu_nest **made) {
    *made = NULL;
    tu_nest *nest = calloc(1, sizeof *nest);
    if (nest == NULL)
        return tu_error_memory("a loop", sizeof *nest);
    const tu_vertex *first = members[0];
    nest->device = (first->in_place ? first->operands[0].value : first->results[0])->shape.device;
    nest->ndim = ndim;
    nest->split = split;
    nest->tiled = tiled;
    memcpy(nest->sizes, sizes, (size_t)ndim * sizeof *sizes);
    nest->members = calloc((size_t)member_count, sizeof *nest->members);
    nest->bumps = calloc((size_t)member_count, sizeof *nest->bumps);
    builder now = { .nest = nest, .uses = uses };
    if (nest->members == NULL || nest->bumps == NULL)
        now.status = tu_error_memory("a loop", (size_t)member_count * sizeof *nest->members);
    for (int i = 0; i < member_count && now.status == TUTTI_OK && !now.impossible; i++) {
        nest->members[nest->member_count++] = members[i];
        if (tu_nest_copies(members[i]))
            add_copy(&now, members[i]);
        else if (members[i]->entry->kernels[TU_ON_CPU] == tu_pointwise_cpu)
            add_pointwise(&now, members[i]);
        else
            add_fold(&now, members[i]);
    }
    if (now.status == TUTTI_OK && !now.impossible)
        add_outputs(&now);
    if (now.status == TUTTI_OK && !now.impossible) {
        drop_idle_lines(nest);
        drop_idle_tensors(nest);
        for (int i = 0; i < nest->tensor_count; i++)
            set_strides(nest, &nest->tensors[i]);
        now.impossible = nest->line_count == 0 || !set_walk(nest);
    }
    free(now.bindings);
    if (now.status == TUTTI_OK && !now.impossible)
        *made = nest;
    else
        tu_nest_free(nest);
    return now.status;
}

void tu_nest_free(tu_nest *nest) {
    if (nest == NULL)
        return;
    free(nest->members);
    free(nest->bumps);
    free(nest->lines);
    free(nest->slots);
    free(nest->stages);
    free(nest->actions);
    free(nest);
}
