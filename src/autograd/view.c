/* SPDX-License-Identifier: Apache-2.0
 *
 * Views in the graph: how the gradient of a view reaches its base, and what an in-place change of a view does to the
 * base's history. A view is known by where it lies in memory, so that any chain of view operators, overlapping ones and
 * those that read complex numbers as pairs of reals included, comes down to one step.
 */
#include <string.h>

#include "autograd/node.h"
#include "tensor/operators.h"

/* ---- where a view lies in its base ---- */

/* The piece of memory that holds a base and its view, counted in elements of one dtype. Where one of the two is complex
 * and the other real, both are described as reals, with a last dimension of 2 for the complex one. */
typedef struct tu_span {
    tu_shape base, view;
    int64_t first, count; /* elements from the start of the storage */
} tu_span;

static tutti_dtype real_dtype(tutti_dtype dtype) {
    return dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
}

static void count_reals(tu_shape *shape) {
    shape->dtype = real_dtype(shape->dtype);
    shape->offset *= 2;
    for (int i = 0; i < shape->ndim; i++)
        shape->strides[i] *= 2;
    shape->sizes[shape->ndim] = 2;
    shape->strides[shape->ndim++] = 1;
}

/* One past the last element. */
static int64_t end_of(const tu_shape *shape) {
    int64_t end = shape->offset + 1;
    for (int i = 0; i < shape->ndim; i++) {
        if (shape->sizes[i] == 0)
            return shape->offset;
        end += (shape->sizes[i] - 1) * shape->strides[i];
    }
    return end;
}

/* False, with the pending error set, where the last dimension of 2 does not fit any more. */
static bool span_of(const tu_shape *base, const tu_shape *view, tu_span *span) {
    *span = (tu_span){ .base = *base, .view = *view };
    bool mixed = tu_is_complex(base->dtype) != tu_is_complex(view->dtype);
    tu_shape *complex = tu_is_complex(base->dtype) ? &span->base : &span->view;
    if (mixed && complex->ndim == TT_MAX_DIMS) {
        tu_fail(TUTTI_ERROR_LIMIT, "a view as real numbers of a complex tensor with %d dimensions has no gradient",
                TT_MAX_DIMS);
        return false;
    }
    if (mixed)
        count_reals(complex);
    int64_t base_end = end_of(&span->base), view_end = end_of(&span->view);
    span->first = span->base.offset < span->view.offset ? span->base.offset : span->view.offset;
    span->count = (base_end > view_end ? base_end : view_end) - span->first;
    return true;
}

static tt_tensor *at_place(tt_tensor *flat, const tu_span *span, const tu_shape *place) {
    return tt_as_strided(flat, tt_dims_of(place->ndim, place->sizes), tt_dims_of(place->ndim, place->strides),
                         place->offset - span->first);
}

static tt_tensor *zeros_over(const tu_span *span, tutti_dtype dtype) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = span->base.device;
    return tt_zeros(tt_shape(span->count), dtype, &options);
}

/* `x` as reals where the span counts reals and x is complex. */
static tt_tensor *to_span(tt_tensor *x, const tu_shape *place) {
    return x != NULL && tu_is_complex(x->dtype) && !tu_is_complex(place->dtype) ? tt_view_as_real(tt_contiguous(x)) : x;
}

static tt_tensor *from_span(tt_tensor *x, const tu_shape *original, const tu_shape *place) {
    return tu_is_complex(original->dtype) && !tu_is_complex(place->dtype) ? tt_view_as_complex(x) : x;
}

/* Whether several elements may share one place: sorted by stride, each dimension must step over all smaller ones. */
static bool may_overlap(const tu_shape *shape) {
    int order[TT_MAX_DIMS], count = tu_stride_order(shape->ndim, shape->sizes, shape->strides, order);
    int64_t reach = 0;
    for (int i = 0; i < count; i++) {
        if (shape->strides[order[i]] <= reach)
            return true;
        reach += (shape->sizes[order[i]] - 1) * shape->strides[order[i]];
    }
    return false;
}

/* ---- the gradient of a view ---- */

/* The shapes are outputs[0], the view's, and inputs[0], the base's. What several elements of the view share adds up. */
static void view_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tu_span span;
    if (grads[0] == NULL || !span_of(&node->inputs[0], &node->outputs[0], &span))
        return;
    tt_tensor *grad = to_span(grads[0], &span.view);
    if (grad == NULL)
        return;
    tt_tensor *flat = zeros_over(&span, grad->dtype);
    if (may_overlap(&span.view)) {
        tt_options options = TT_OPTIONS_INIT;
        options.device = span.base.device;
        tt_tensor *places = at_place(tt_arange(0, (double)span.count, 1, TUTTI_I64, &options), &span, &span.view);
        flat = tt_index_add(flat, 0, tt_reshape(places, tt_shape(-1)), tt_reshape(grad, tt_shape(-1)));
    } else {
        tt_copy_(at_place(flat, &span, &span.view), grad);
    }
    results[0] = from_span(at_place(flat, &span, &span.base), &node->inputs[0], &span.base);
}

/* How many elements of the base share each place of the span; 1 where there is none. */
static tt_tensor *sharers(const tu_span *span, tutti_dtype dtype) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = span->base.device;
    tt_tensor *places = at_place(tt_arange(0, (double)span->count, 1, TUTTI_I64, &options), span, &span->base);
    places = tt_reshape(places, tt_shape(-1));
    tt_tensor *ones = tt_ones(tu_sizes(places), dtype, &options);
    return tt_maximum(tt_index_add(zeros_over(span, dtype), 0, places, ones), tt_ones(tt_shape(), dtype, &options));
}

/* The same step for the operator, whose input may share places itself: each of those that do gets an equal part. */
void tu_view_gradient(tu_gradient *gradient) {
    tu_node *node = gradient->record;
    tu_span span;
    view_run(node, gradient->grads, gradient->results);
    if (gradient->results[0] == NULL || !span_of(&node->inputs[0], &node->outputs[0], &span) ||
        !may_overlap(&span.base))
        return;
    tutti_dtype real = real_dtype(gradient->results[0]->dtype);
    gradient->results[0] = tt_div(gradient->results[0], at_place(sharers(&span, real), &span, &span.base));
}

/* Makes x the view, where it lies, of what the edge leads to. Takes the edge. */
static tutti_status set_view_of(tt_tensor *x, tu_edge edge, const tu_shape *base) {
    tu_node *node = tu_node_new("view", 1, 1, 0);
    if (node == NULL) {
        tu_edge_drop(&edge);
        return TUTTI_ERROR_MEMORY;
    }
    node->run = view_run;
    node->inputs[0] = *base;
    node->outputs[0] = tu_shape_of(x);
    node->needs[0] = true;
    node->next[0] = edge;
    tutti_status status = tu_history_set(x, node, 0);
    tu_node_drop(node);
    return status;
}

static tutti_status renew_view(tt_tensor *x) {
    tu_shape base = tu_shape_of(tu_history_at(x)->base);
    tu_edge edge;
    tutti_status status = tu_edge_to(tu_history_at(x)->base, &edge);
    return status == TUTTI_OK ? set_view_of(x, edge, &base) : status;
}

tutti_status tu_view_of_outer(tt_tensor *x, tu_node *inner) {
    return set_view_of(x, (tu_edge){ tu_node_hold(inner->outer), NULL, 0 }, &inner->outer->outputs[0]);
}

/* ---- views and their bases ---- */

static uint32_t generation_of(const tt_tensor *base) {
    return base->history != NULL ? tu_history_at(base)->generation : 0;
}

static bool overtaken(const tu_history *history) {
    return history->base != NULL && history->seen != generation_of(history->base);
}

void tu_view_is_current(tt_tensor *view) {
    if (tu_history_at(view)->base != NULL)
        tu_history_at(view)->seen = generation_of(tu_history_at(view)->base);
}

tutti_status tu_view_set_base(tt_tensor *view, tt_tensor *of, uint8_t mark) {
    tu_history *history = tu_history_of(view);
    if (history == NULL)
        return TUTTI_ERROR_MEMORY;
    tt_tensor *base = tu_base_of(of);
    history->base = tu_tensor_hold(base != NULL ? base : of);
    history->mark = base != NULL && tu_history_at(of)->mark != TU_MARK_NORMAL ? tu_history_at(of)->mark : mark;
    tu_view_is_current(view);
    return TUTTI_OK;
}

tutti_status tu_history_note_view(tt_tensor *base, tt_tensor *view) {
    if (!tu_is_float(view->dtype) && !tu_is_complex(view->dtype))
        return TUTTI_OK; /* never differentiable */
    return tu_view_set_base(view, base, tt_grad_enabled() ? TU_MARK_NORMAL : TU_MARK_NO_GRAD);
}

tt_tensor *tu_history_own(tt_tensor *view) {
    tu_history *history = view != NULL ? view->history : NULL;
    if (history != NULL) {
        tu_tensor_drop(history->base);
        history->base = NULL;
        history->mark = TU_MARK_NORMAL;
    }
    return view;
}

bool tu_history_guards(const tt_tensor *x) {
    return tu_base_of(x) != NULL && tu_base_of(x)->flags & TU_REQUIRES_GRAD;
}

void tu_history_refresh(tt_tensor *x) {
    const tu_history *history = x->history;
    if (history != NULL && overtaken(history) && history->mark == TU_MARK_NORMAL &&
        tu_history_at(history->base)->node != NULL)
        x->flags |= TU_REQUIRES_GRAD;
}

/* Whether the node of a view is to be made anew, from its base. One that was made without gradients stays without. */
static bool wants_renewal(const tu_history *history) {
    return overtaken(history) && history->mark != TU_MARK_NO_GRAD && history->base->flags & TU_REQUIRES_GRAD &&
           tu_history_at(history->base)->node != NULL;
}

bool tu_history_has_node(const tt_tensor *x) {
    return x->history != NULL && (tu_history_at(x)->node != NULL || wants_renewal(x->history));
}

tutti_status tu_history_node(tt_tensor *x, tu_node **node) {
    tu_history *history = x->history;
    *node = NULL;
    if (history == NULL)
        return TUTTI_OK;
    if (wants_renewal(history)) {
        if (history->mark == TU_MARK_CUSTOM)
            return tu_error(TUTTI_ERROR_STATE,
                            "%s was made inside a custom function, or returned by it as it came, and what it is a view "
                            "of was changed in place since: its gradient would leave the function out. Clone the "
                            "function's result",
                            tu_describe(x));
        tutti_status status = renew_view(x);
        if (status != TUTTI_OK)
            return status;
    }
    *node = history->node;
    return TUTTI_OK;
}

/* ---- an in-place change of a view ---- */

/* Seen from the base: the gradient of the part goes through the operator's own node, `inner`, and the rest passes. */
static void slice_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tu_node *inner = node->inner;
    const tu_shape *base = &node->inputs[node->changed], *view = &inner->outputs[0];
    tu_span span;
    if (grads[0] == NULL || !span_of(base, view, &span))
        return;
    tt_tensor *grad = to_span(grads[0], &span.base);
    if (grad == NULL)
        return;
    tt_tensor *flat = zeros_over(&span, grad->dtype);
    tt_copy_(at_place(flat, &span, &span.base), grad);
    tt_tensor *part = from_span(at_place(flat, &span, &span.view), view, &span.view);
    tt_tensor *of_part = tt_clone(part);
    inner->run(inner, &of_part, results);
    if (tu_self()->pending != TUTTI_OK)
        return;
    if (results[node->changed] != NULL)
        tt_copy_(part, tt_sum_to(results[node->changed], tt_dims_of(view->ndim, view->sizes)));
    else
        tt_zero_(part);
    results[node->changed] = from_span(at_place(flat, &span, &span.base), base, &span.base);
}

tutti_status tu_view_rebase(tt_tensor *x, tu_node *inner, int changed) {
    tt_tensor *base = tu_history_at(x)->base;
    tu_node *node = tu_node_new(inner->name, inner->input_count, 1, 0);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    node->run = slice_run;
    node->inner = tu_node_hold(inner);
    inner->outer = node;
    node->changed = changed;
    node->sees_nothing = inner->sees_nothing;
    node->outputs[0] = tu_shape_of(base);
    for (int i = 0; i < inner->input_count; i++) {
        node->needs[i] = inner->needs[i];
        node->inputs[i] = inner->inputs[i];
        node->next[i] = inner->next[i]; /* moved */
        inner->next[i] = (tu_edge){ NULL, NULL, 0 };
    }
    tu_edge_drop(&node->next[changed]);
    node->inputs[changed] = tu_shape_of(base);
    node->needs[changed] = (base->flags & TU_REQUIRES_GRAD) != 0;
    tutti_status status = tu_edge_to(base, &node->next[changed]);
    if (status == TUTTI_OK)
        status = tu_history_set(base, node, 0);
    if (status == TUTTI_OK)
        x->flags |= TU_REQUIRES_GRAD; /* its own node is made anew, from the base, when it is asked for */
    tu_node_drop(node);
    if (status == TUTTI_OK && tu_history_at(x)->retains_grad) /* what it keeps is the gradient of its new value */
        status = tu_history_node(x, &node);
    return status;
}
