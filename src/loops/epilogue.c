/* SPDX-License-Identifier: Apache-2.0
 *
 * Products and what is computed from their results element by element: the two become one step, in which the loop runs
 * on parts of the product that are final, while they are in the cache (tensor/gemm.h). It sees the very elements that
 * the product stores, rounded as they are, so that the bits are those of one operator after the other.
 *
 * The loop moves up to the product. So it may read nothing that a step between them makes or writes, and write nothing
 * that one of these, or the product itself, reads.
 */
#include <string.h>

#include "loops/group.h"
#include "tensor/operators.h"

/* ---- products ---- */

/* Whether all rows, batch after batch, are one tall matrix. */
static bool is_tall(const tu_shape *shape) {
    if (shape->ndim < 2 || shape->strides[shape->ndim - 1] != 1)
        return false;
    int64_t expected = shape->strides[shape->ndim - 2] * shape->sizes[shape->ndim - 2];
    for (int i = shape->ndim - 3; i >= 0; i--) {
        if (shape->sizes[i] != 1 && shape->strides[i] != expected)
            return false;
        expected *= shape->sizes[i];
    }
    return true;
}

/* Whether the vertex is one product by our own kernels, which can have an epilogue. */
static bool is_product(const tu_vertex *vertex) {
    bool linear = vertex->entry == &tu_operator_linear;
    if ((!linear && vertex->entry != &tu_operator_matmul) || vertex->in_place || vertex->result_count != 1 ||
        vertex->operand_count < 2 || vertex->operands[0].value == NULL || vertex->operands[1].value == NULL)
        return false;
    const tu_shape *result = &vertex->results[0]->shape, *right = &vertex->operands[1].value->shape;
    if (result->device != TUTTI_CPU || !tu_product_is_ours(result->dtype) || tu_shape_numel(result) == 0 ||
        result->ndim < 1 || result->sizes[result->ndim - 1] < 2 || right->ndim != 2)
        return false;
    return linear ? right->sizes[1] > 0 : right->sizes[0] > 0 && is_tall(&vertex->operands[0].value->shape);
}

/* ---- who reads and writes what ---- */

/* What a step does with a storage. */
enum {
    READS = 1,
    WRITES = 2, /* makes it, or changes it */
    HOLDS = 4   /* has it in an act that is more than computing: it may start, end or wait for something */
};

static int uses_of_vertex(const tu_vertex *vertex, int storage) {
    int uses = 0;
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && vertex->operands[i].value->storage == storage)
            uses |= tu_vertex_writes(vertex, i) ? READS | WRITES : READS;
    for (int i = 0; i < vertex->result_count; i++)
        if (vertex->results[i]->storage == storage)
            uses |= vertex->entry->flags & TU_VIEW ? READS : WRITES;
    bool plain = !(vertex->entry->flags & (TU_IMPURE | TU_STARTS | TU_BRINGS | TU_APART));
    return uses != 0 && !plain ? uses | HOLDS : uses;
}

static int uses_of_step(const tu_step_of_program *step, int storage) {
    int uses = step->vertex != NULL ? uses_of_vertex(step->vertex, storage) : 0;
    for (int i = 0; step->nest != NULL && i < step->nest->member_count; i++)
        uses |= uses_of_vertex(step->nest->members[i], storage);
    return uses;
}

/* Whether the value is the step's result: a view is one too, though nothing is written for it. */
static bool makes(const tu_step_of_program *step, const tu_value *value) {
    for (int i = 0; step->vertex != NULL && i < step->vertex->result_count; i++)
        if (step->vertex->results[i] == value)
            return true;
    for (int i = 0; step->nest != NULL && i < step->nest->member_count; i++)
        for (int k = 0; k < step->nest->members[i]->result_count; k++)
            if (step->nest->members[i]->results[k] == value)
                return true;
    return false;
}

/* ---- joining ---- */

/* Whether the vertex can run where the product does, before the steps in between. */
static bool can_move(const tu_vertex *vertex, const tu_step_of_program *product, const tu_step_of_program *end) {
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        bool writes = value != NULL && tu_vertex_writes(vertex, i);
        if (writes && uses_of_vertex(product->vertex, value->storage) & READS)
            return false;
        for (const tu_step_of_program *step = product + 1; value != NULL && step < end; step++)
            if (makes(step, value) ||
                uses_of_step(step, value->storage) & (writes ? READS | WRITES | HOLDS : WRITES | HOLDS))
                return false;
    }
    return true;
}

/* The members of the step that may follow the product, all of its result's shape; 0 where it may not. */
static int members_of(const tu_step_of_program *step, const tu_vertex *const **members) {
    const tu_nest *nest = step->nest;
    if (nest == NULL) {
        *members = &step->vertex;
        return tu_is_pointwise_step(step->vertex) ? 1 : 0;
    }
    *members = nest->members;
    return step->vertex == NULL && nest->split < 0 ? nest->member_count : 0;
}

/* Whether the members walk the elements of the value, and one of them reads it as it is. */
static bool walks(const tu_vertex *const *members, int count, const tu_value *value) {
    bool read = false;
    for (int i = 0; i < count; i++) {
        const tu_vertex *vertex = members[i];
        const tu_shape *shape = vertex->in_place ? &vertex->operands[0].value->shape : &vertex->results[0]->shape;
        if (shape->ndim != value->shape.ndim ||
            memcmp(shape->sizes, value->shape.sizes, (size_t)shape->ndim * sizeof *shape->sizes) != 0)
            return false;
        for (int k = 0; k < vertex->operand_count; k++) {
            const tu_value *operand = vertex->operands[k].value;
            if (operand != NULL && operand->storage == value->storage && operand != value)
                return false; /* elements of another place, which may not be there yet */
            read = read || operand == value;
        }
    }
    return read;
}

static tutti_status join(const int *uses, tu_step_of_program *product, tu_step_of_program *step) {
    const tu_value *value = product->vertex->results[0];
    const tu_vertex *const *members;
    tu_nest *nest = NULL;
    int count = members_of(step, &members);
    bool fits = count > 0 && walks(members, count, value);
    for (int i = 0; i < count && fits; i++)
        fits = can_move(members[i], product, step);
    if (!fits)
        return TUTTI_OK;
    tutti_status status = tu_nest_make(members, count, value->shape.ndim, value->shape.sizes, -1, true, uses, &nest);
    if (nest == NULL)
        return status;
    tu_nest_free(step->nest);
    *step = (tu_step_of_program){ .nest = NULL };
    product->nest = nest;
    return TUTTI_OK;
}

tutti_status tu_steps_join_products(const int *uses, tu_step_of_program *steps, int *step_count) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < *step_count && status == TUTTI_OK; i++) {
        if (steps[i].vertex == NULL || !is_product(steps[i].vertex))
            continue;
        int next = i + 1, storage = steps[i].vertex->results[0]->storage;
        while (next < *step_count && uses_of_step(&steps[next], storage) == 0)
            next++;
        if (next < *step_count)
            status = join(uses, &steps[i], &steps[next]);
    }
    int kept = 0;
    for (int i = 0; i < *step_count; i++)
        if (steps[i].vertex != NULL || steps[i].nest != NULL)
            steps[kept++] = steps[i];
    for (int i = 0; i < kept; i++)
        if (steps[i].nest != NULL)
            steps[i].nest->number = i;
    *step_count = kept;
    return status;
}
