/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that fuse collectives with matrix products: an all-gather with the products of what it gathers, and a product
 * with the reduce-scatter of it. They look at the graph, which is the same on all ranks, and at whether symmetric
 * memory is on for the group; the fused operator stands where the collective stood, so their order stays.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/symmetric.h>

#include "functional/operators.h"
#include "fused/operators.h"
#include "graph/passes.h"

/* A gather along the columns pays from shards of so many columns on: each is a product of its own. */
#define LAST_COLUMNS 1024

static bool is_product(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_matmul || vertex->entry == &tu_operator_linear ||
           vertex->entry == &tu_operator_scaled_matmul;
}

static bool is_scaled(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_scaled_matmul;
}

static bool is_enabled(tutti_group *group) {
    return group != NULL && tt_symm_enabled(tutti_group_world(group), tutti_group_name(group));
}

/* Whether something behind `from` and before `to` writes the memory. */
static bool is_written_between(const tu_vertex *from, const tu_vertex *to, int storage) {
    for (const tu_vertex *vertex = from->next; vertex != NULL && vertex != to; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL && vertex->operands[i].value->storage == storage &&
                tu_vertex_writes(vertex, i))
                return true;
    return false;
}

/* Whether a value that `user` takes can be there at `place`, before `user`: nothing between writes it, and what makes
 * it can come up. Positions must be current. */
static bool can_rise(const tu_value *value, const tu_vertex *place, const tu_vertex *user) {
    if (value == NULL)
        return true;
    if (is_written_between(place, user, value->storage))
        return false;
    const tu_vertex *maker = value->maker;
    if (maker == NULL || maker->position < place->position)
        return true;
    if (!tu_vertex_is_pure(maker) || tu_vertex_communicates(maker) || maker->entry->flags & TU_IMPURE)
        return false;
    for (int i = 0; i < maker->operand_count; i++)
        if (!can_rise(maker->operands[i].value, place, user))
            return false;
    return true;
}

static void rise(tt_graph *graph, const tu_value *value, tu_vertex *place) {
    tu_vertex *maker = value != NULL ? value->maker : NULL;
    if (maker == NULL || maker->position < place->position)
        return;
    for (int i = 0; i < maker->operand_count; i++)
        rise(graph, maker->operands[i].value, place);
    tu_vertex_move(graph, maker, place);
    maker->position = place->position - 1; /* is above, for whoever asks */
}

/* ---- new vertices ---- */

static tu_value *call_one(tt_graph *graph, const tu_operator *entry, tu_value *x, const void *attributes,
                          tu_vertex *place) {
    tu_operand operand = { .value = x };
    tu_vertex *made = tu_graph_call(graph, entry, 1, &operand, attributes, place);
    return made != NULL ? made->results[0] : NULL;
}

static tu_value *as_view(tt_graph *graph, tu_value *x, int ndim, const int64_t *sizes, tu_vertex *place) {
    tu_view_attributes attributes = { .shape = tt_dims_of(ndim, sizes) };
    return call_one(graph, &tu_operator_view, x, &attributes, place);
}

static tu_value *as_contiguous(tt_graph *graph, tu_value *x, tu_vertex *place) {
    return tu_shape_is_row_major(&x->shape) ? x : call_one(graph, &tu_operator_contiguous, x, NULL, place);
}

/* The right matrix of a product: its second operand, or that turned. */
static tu_value *right_of(tt_graph *graph, const tu_vertex *product, tu_vertex *place) {
    if (product->entry != &tu_operator_linear)
        return product->operands[1].value;
    tu_transpose_attributes attributes = { .a = 0, .b = 1 };
    return call_one(graph, &tu_operator_transpose, product->operands[1].value, &attributes, place);
}

static void erase_waits(tt_graph *graph, int storage) {
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL; vertex = next) {
        next = vertex->next;
        if (tu_vertex_waits_for(vertex, storage))
            tu_vertex_erase(graph, vertex);
    }
}

/* ---- an all-gather and the products of what it gathers ---- */

typedef struct gather {
    tt_graph *graph;
    tu_vertex *start;
    tu_value *whole, *shard;
    int dim;
    bool last;
    int count, scaled;
    tu_vertex *products[TU_FUSED_MOST_BS], *views[TU_FUSED_MOST_BS]; /* a view before the product, or NULL */
    bool *tainted;                                                   /* by storage: depends on what is gathered */
    tu_vertex *fused;                                                /* what took its place, or NULL */
} gather;

/* The gathered value itself, or a matrix of its rows that only this product takes. */
static bool takes_whole(const gather *of, const tu_vertex *vertex, tu_vertex **view) {
    const tu_value *left = vertex->operands[0].value;
    *view = NULL;
    if (left == of->whole)
        return true;
    if (left == NULL || left->maker == NULL || left->maker->entry != &tu_operator_view || left->mark != 1 ||
        left->maker->operands[0].value != of->whole || left->shape.ndim != 2)
        return false;
    *view = left->maker;
    return left->shape.sizes[1] == of->whole->shape.sizes[of->whole->shape.ndim - 1];
}

/* The start of another gather that brings the scales of the shards' rows as this one brings the rows: the fused
 * operator gathers them with the shard. NULL where the scales come from elsewhere. */
static tu_vertex *gather_of_scales(const gather *of, const tu_vertex *product) {
    const tu_value *scale = is_scaled(product) ? product->operands[2].value : NULL;
    tu_vertex *maker = scale != NULL ? scale->maker : NULL;
    if (maker == NULL || maker->entry != &tu_operator_all_gather || maker->operands[0].value == NULL ||
        tu_vertex_group(maker) != tu_vertex_group(of->start) || tu_vertex_dim(maker) != of->dim)
        return NULL;
    const tu_shape *shard = &maker->operands[0].value->shape;
    bool by_rows = shard->ndim == 2 && shard->sizes[0] == of->shard->shape.sizes[0] && shard->sizes[1] == 1;
    return by_rows && can_rise(maker->operands[0].value, of->start, maker) ? maker : NULL;
}

static bool is_candidate(const gather *of, const tu_vertex *vertex, tu_vertex **view) {
    if (!is_product(vertex) || !takes_whole(of, vertex, view))
        return false;
    const tu_value *right = vertex->operands[1].value;
    if (right == NULL || right->shape.ndim != 2 || (is_scaled(vertex) && of->whole->shape.ndim != 2))
        return false;
    for (int i = 1; i < vertex->operand_count; i++) {
        const tu_operand *operand = &vertex->operands[i];
        /* A bias of linear is added where the product stood. */
        bool later = i == 2 && (vertex->entry == &tu_operator_linear || gather_of_scales(of, vertex) != NULL);
        if (operand->value == NULL
                ? operand->number != 0
                : of->tainted[operand->value->storage] || (!later && !can_rise(operand->value, of->start, vertex)))
            return false;
    }
    return true;
}

static void taint(const gather *of, const tu_vertex *vertex) {
    bool touched = false;
    for (int i = 0; i < vertex->operand_count; i++)
        touched = touched || (vertex->operands[i].value != NULL && of->tainted[vertex->operands[i].value->storage]);
    for (int i = 0; touched && i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i))
            of->tainted[vertex->operands[i].value->storage] = true;
    for (int i = 0; touched && i < vertex->result_count; i++)
        of->tainted[vertex->results[i]->storage] = true;
}

/* Finds the products; false where the gathered memory is written to. */
static bool find_products(gather *of) {
    of->tainted[of->whole->storage] = true;
    for (tu_vertex *vertex = of->start->next; vertex != NULL; vertex = vertex->next) {
        tu_vertex *view;
        if (tu_vertex_waits_for(vertex, of->whole->storage))
            continue;
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL && vertex->operands[i].value->storage == of->whole->storage &&
                tu_vertex_writes(vertex, i))
                return false;
        bool same_scale = of->count == 0 || !is_scaled(vertex) || !of->scaled ||
                          vertex->operands[2].value == of->products[0]->operands[2].value;
        if (of->count < TU_FUSED_MOST_BS && same_scale && is_candidate(of, vertex, &view)) {
            of->views[of->count] = view;
            of->products[of->count++] = vertex;
            of->scaled += is_scaled(vertex);
        }
        taint(of, vertex);
    }
    return true;
}

/* Whether anything but the products looks at what is gathered. */
static bool has_other_users(const gather *of) {
    int uses = 0;
    for (tu_vertex *vertex = of->graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count && !tu_vertex_waits_for(vertex, of->whole->storage); i++)
            uses += vertex->operands[i].value != NULL && vertex->operands[i].value->storage == of->whole->storage;
    for (int i = 0; i < of->count; i++)
        uses -= of->views[i] != NULL ? 2 : 1;
    for (int i = 0; i < of->graph->output_count; i++)
        uses += of->graph->outputs[i].value != NULL && of->graph->outputs[i].value->storage == of->whole->storage;
    for (int i = 0; i < of->graph->effect_count; i++)
        uses += of->graph->effects[i].value != NULL && of->graph->effects[i].value->storage == of->whole->storage;
    return uses > 0;
}

/* Plain rows behind leading sizes of 1 are a gather along dimension 0 under another shape; it is left as it is. */
static bool is_plain_gather(const gather *of) {
    int64_t leading = 1;
    for (int i = 0; i < of->dim; i++)
        leading *= of->shard->shape.sizes[i];
    return of->dim > 0 && leading == 1;
}

static bool is_worth_it(gather *of, bool *others) {
    if (of->shard == NULL || of->shard->shape.ndim < 2 || !is_enabled(tu_vertex_group(of->start)) ||
        is_plain_gather(of))
        return false;
    if (of->last && of->shard->shape.sizes[of->dim] < LAST_COLUMNS)
        return false;
    if (!find_products(of) || of->count == 0 || (of->scaled != 0 && of->scaled != of->count))
        return false;
    *others = has_other_users(of);
    return !of->last || (!*others && of->scaled == 0);
}

/* The operands of the fused operator: the shard, then the matrices; with scales, what belongs to each. */
static tu_vertex *call_fused(gather *of, bool return_a) {
    tu_operand operands[2 + 4 * TU_FUSED_MOST_BS] = { { .value = of->shard } };
    int64_t present[TU_FUSED_MOST_BS], dtypes[TU_FUSED_MOST_BS], fast[TU_FUSED_MOST_BS];
    int count = 1;
    if (of->scaled) {
        const tu_vertex *scales = gather_of_scales(of, of->products[0]);
        operands[count++] = scales != NULL ? scales->operands[0] : of->products[0]->operands[2];
        rise(of->graph, operands[1].value, of->start);
    }
    for (int i = 0; i < of->count; i++) {
        const tu_vertex *product = of->products[i];
        for (int k = 1; k < product->operand_count; k++)
            if (k != 2)
                rise(of->graph, product->operands[k].value, of->start);
        operands[count] = (tu_operand){ .value = right_of(of->graph, product, of->start) };
        if (operands[count++].value == NULL)
            return NULL;
        if (!of->scaled)
            continue;
        operands[count++] = product->operands[3];
        present[i] = 0;
        for (int k = 4; k < 6; k++)
            if (product->operands[k].value != NULL) {
                present[i] |= 1 << (k - 4);
                operands[count++] = product->operands[k];
            }
        const tu_scaled_matmul_attributes *attributes = product->attributes;
        dtypes[i] = attributes->dtype;
        fast[i] = attributes->use_fast_accum;
    }
    tutti_group *group = tu_vertex_group(of->start);
    tu_fused_all_gather_matmul_attributes plain = { .gather_dim = of->dim, .return_a = return_a, .group = group };
    tu_fused_all_gather_scaled_matmul_attributes scaled = { .present = { (size_t)of->count, present },
                                                            .out_dtypes = { (size_t)of->count, dtypes },
                                                            .use_fast_accum = { (size_t)of->count, fast },
                                                            .gather_dim = of->dim,
                                                            .return_a = return_a,
                                                            .group = group };
    return of->scaled
               ? tu_graph_call(of->graph, &tu_operator_fused_all_gather_scaled_matmul, count, operands, &scaled,
                               of->start)
               : tu_graph_call(of->graph, &tu_operator_fused_all_gather_matmul, count, operands, &plain, of->start);
}

/* What a product was, made of the fused operator's result. */
static tutti_status take_product(gather *of, int i, tu_value *made) {
    tu_vertex *product = of->products[i];
    tu_value *old = product->results[0], *now = as_contiguous(of->graph, made, of->start);
    if (now != NULL && now->shape.ndim != old->shape.ndim)
        now = as_view(of->graph, now, old->shape.ndim, old->shape.sizes, of->start);
    if (now != NULL && product->entry == &tu_operator_linear && product->operands[2].value != NULL) {
        tu_operand operands[2] = { { .value = now }, product->operands[2] };
        tu_vertex *sum = tu_graph_call(of->graph, &tu_operator_add, 2, operands, NULL, product);
        now = sum != NULL ? sum->results[0] : NULL;
    }
    if (now == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_value_become(of->graph, old, now);
    tu_vertex_erase(of->graph, product);
    if (of->views[i] != NULL)
        tu_vertex_erase(of->graph, of->views[i]);
    return TUTTI_OK;
}

/* A gather that only waits look at. */
static void erase_if_unused(tt_graph *graph, tu_vertex *start) {
    tu_value *value = start->results[0];
    int waits = 0;
    tu_graph_count_uses(graph);
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        waits += vertex->entry == &tu_operator_wait && vertex->operands[0].value == value;
    if (value->mark != waits)
        return;
    erase_waits(graph, value->storage);
    tu_vertex_erase(graph, start);
}

static tutti_status fuse_gather(gather *of) {
    bool others;
    if (!is_worth_it(of, &others))
        return TUTTI_OK;
    tu_vertex *scales = gather_of_scales(of, of->products[0]), *fused = call_fused(of, others);
    of->fused = fused;
    tutti_status status = fused != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    for (int i = 0; i < of->count && status == TUTTI_OK; i++)
        status = take_product(of, i, fused->results[i + 1]);
    if (status != TUTTI_OK)
        return status;
    erase_waits(of->graph, of->whole->storage);
    if (others) {
        tu_value *whole = as_contiguous(of->graph, fused->results[0], of->start);
        if (whole == NULL)
            return TUTTI_ERROR_MEMORY;
        tu_value_become(of->graph, of->whole, whole);
    }
    tu_vertex_erase(of->graph, of->start);
    if (scales != NULL)
        erase_if_unused(of->graph, scales);
    return TUTTI_OK;
}

tutti_status tu_pass_gather_matmul(tt_graph *graph, size_t bytes) {
    (void)bytes;
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        if (vertex->entry != &tu_operator_all_gather || vertex->hidden)
            continue;
        gather of = { .graph = graph, .start = vertex, .whole = vertex->results[0] };
        of.shard = vertex->operands[0].value;
        of.dim = tu_vertex_dim(vertex);
        of.last = of.shard != NULL && of.dim == of.shard->shape.ndim - 1;
        of.tainted = calloc((size_t)graph->storage_count + 1, sizeof *of.tainted);
        if (of.tainted == NULL)
            return tu_error_memory("a pass", (size_t)graph->storage_count);
        tu_graph_number(graph);
        tu_graph_count_uses(graph);
        status = fuse_gather(&of);
        free(of.tainted);
        if (of.fused != NULL) /* what stood behind may be gone */
            next = of.fused->next;
    }
    return status;
}

/* ---- a product and the reduce-scatter of it ---- */

typedef struct scatter {
    tt_graph *graph;
    tu_vertex *start, *view, *product; /* a view of the product before it is scattered, or NULL */
} scatter;

static bool is_scatter_of_product(scatter *of) {
    tutti_reduction reduction = tu_vertex_reduction(of->start);
    tu_value *in = of->start->operands[0].value;
    if ((reduction != TUTTI_SUM && reduction != TUTTI_AVG) || !is_enabled(tu_vertex_group(of->start)) || in == NULL ||
        in->mark != 1 || in->maker == NULL)
        return false;
    if (in->maker->entry == &tu_operator_view) {
        of->view = in->maker;
        in = of->view->operands[0].value;
        if (in->mark != 1 || in->maker == NULL)
            return false;
    }
    of->product = in->maker;
    if (!is_product(of->product))
        return false;
    const tu_value *left = of->product->operands[0].value, *right = of->product->operands[1].value;
    bool biased = of->product->entry == &tu_operator_linear && of->product->operands[2].value != NULL;
    if (left == NULL || right == NULL || left->shape.ndim < 2 || right->shape.ndim != 2 || biased)
        return false;
    for (int i = 0; i < of->product->operand_count; i++)
        if (of->product->operands[i].value != NULL &&
            is_written_between(of->product, of->start, of->product->operands[i].value->storage))
            return false;
    return true;
}

/* The last size of what is scattered must be the product's own, and the left matrix must take the other sizes. */
static bool has_fitting_view(const scatter *of, const tu_value *in) {
    const tu_value *product = of->product->results[0], *left = of->product->operands[0].value;
    if (of->view == NULL)
        return true;
    return in->shape.ndim >= 2 &&
           in->shape.sizes[in->shape.ndim - 1] == product->shape.sizes[product->shape.ndim - 1] &&
           (is_scaled(of->product) || tu_shape_is_row_major(&left->shape));
}

static tu_vertex *call_scaled_scatter(const scatter *of, const tu_value *in, int dim) {
    const tu_vertex *product = of->product;
    tu_operand operands[6];
    memcpy(operands, product->operands, sizeof operands);
    tu_fused_scaled_matmul_reduce_scatter_attributes attributes = {
        .reduction = tu_vertex_reduction(of->start),
        .orig_scatter_dim = dim,
        .scatter_dim = in->shape.ndim == product->operands[0].value->shape.ndim ? dim : 0,
        .output_shape = tt_dims_of(in->shape.ndim, in->shape.sizes),
        .dtype = ((const tu_scaled_matmul_attributes *)product->attributes)->dtype,
        .use_fast_accum = ((const tu_scaled_matmul_attributes *)product->attributes)->use_fast_accum,
        .group = tu_vertex_group(of->start)
    };
    return tu_graph_call(of->graph, &tu_operator_fused_scaled_matmul_reduce_scatter, 6, operands, &attributes,
                         of->start);
}

static tu_vertex *call_plain_scatter(const scatter *of, const tu_value *in, int dim) {
    tu_value *left = of->product->operands[0].value, *right = right_of(of->graph, of->product, of->start);
    if (of->view != NULL) { /* the rows of the left matrix, in the sizes that are scattered */
        int64_t sizes[TT_MAX_DIMS];
        memcpy(sizes, in->shape.sizes, sizeof sizes);
        sizes[in->shape.ndim - 1] = left->shape.sizes[left->shape.ndim - 1];
        left = as_view(of->graph, left, in->shape.ndim, sizes, of->start);
    }
    if (left == NULL || right == NULL)
        return NULL;
    tu_operand operands[2] = { { .value = left }, { .value = right } };
    tu_fused_matmul_reduce_scatter_attributes attributes = { .reduction = tu_vertex_reduction(of->start),
                                                             .scatter_dim = dim,
                                                             .group = tu_vertex_group(of->start) };
    return tu_graph_call(of->graph, &tu_operator_fused_matmul_reduce_scatter, 2, operands, &attributes, of->start);
}

static tutti_status fuse_scatter(scatter *of) {
    if (!is_scatter_of_product(of))
        return TUTTI_OK;
    const tu_value *in = of->start->operands[0].value;
    int dim = tu_vertex_dim(of->start);
    if (!has_fitting_view(of, in) || (is_scaled(of->product) && dim == in->shape.ndim - 1))
        return TUTTI_OK;
    tu_vertex *fused = is_scaled(of->product) ? call_scaled_scatter(of, in, dim) : call_plain_scatter(of, in, dim);
    tu_value *now = fused != NULL ? as_contiguous(of->graph, fused->results[0], of->start) : NULL;
    if (now == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_value *old = of->start->results[0];
    erase_waits(of->graph, old->storage);
    tu_value_become(of->graph, old, now);
    tu_vertex_erase(of->graph, of->start);
    if (of->view != NULL)
        tu_vertex_erase(of->graph, of->view);
    tu_vertex_erase(of->graph, of->product);
    return TUTTI_OK;
}

tutti_status tu_pass_matmul_scatter(tt_graph *graph, size_t bytes) {
    (void)bytes;
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        if (vertex->entry != &tu_operator_reduce_scatter || vertex->hidden)
            continue;
        scatter of = { .graph = graph, .start = vertex };
        while (next != NULL && next->entry != &tu_operator_reduce_scatter) /* what stands between may go */
            next = next->next;
        tu_graph_count_uses(graph);
        status = fuse_scatter(&of);
    }
    return status;
}
