/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of a nest that can be compiled: runs of expressions in one type and of one width. Lines are put in an order
 * that makes these runs long.
 */
#include <stdlib.h>
#include <string.h>

#include "loops/emit.h"
#include "tensor/kernel/kernels.h"
#include "tensor/operators.h"

/* ---- order ---- */

static bool reads(const tu_line *line, int slot) {
    for (int i = 0; i < line->in_count; i++)
        if (line->in[i] == slot)
            return true;
    return false;
}

/* Whether `later` must stay behind `earlier`: it reads its result; or it writes, in place, what that reads. */
static bool depends(const tu_nest *nest, const tu_line *later, const tu_line *earlier) {
    if (reads(later, earlier->out))
        return true;
    int tensor = nest->slots[later->out].tensor;
    if (tensor < 0 || nest->tensors[tensor].fresh)
        return false;
    for (int i = 0; i < nest->tensor_count; i++)
        if (!nest->tensors[i].written && nest->tensors[i].value == nest->tensors[tensor].value &&
            reads(earlier, nest->tensors[i].slot))
            return true;
    return false;
}

static bool is_ready(const tu_nest *nest, const bool *done, int line) {
    for (int i = 0; i < line; i++)
        if (!done[i] && depends(nest, &nest->lines[line], &nest->lines[i]))
            return false;
    return true;
}

/* Whether two lines can stand in one stage. */
static bool alike(const tu_nest *nest, const tu_line *left, const tu_line *right) {
    const tu_slot *one = &nest->slots[left->out], *other = &nest->slots[right->out];
    return left->kind == TU_LINE_POINTWISE && right->kind == TU_LINE_POINTWISE && one->dtype == other->dtype &&
           one->narrow == other->narrow;
}

/* How much a line is wanted next, behind `before` (NULL: nothing): the lower the sooner. */
typedef int wish(const tu_nest *nest, const tu_line *before, const tu_line *line);

/* One like the line before, so that stages are long; then what others may wait for, so that expressions come together.
 */
static int wish_for_stages(const tu_nest *nest, const tu_line *before, const tu_line *line) {
    return before != NULL && alike(nest, before, line) ? 0 : line->kind != TU_LINE_POINTWISE ? 1 : 2;
}

/* What others may wait for, so that as many as can be are joined; then one that goes on with the line before. */
static int wish_for_joined(const tu_nest *nest, const tu_line *before, const tu_line *line) {
    if (!tu_line_can_join(nest, line))
        return 0;
    return before != NULL && tu_line_goes_on(nest, before, line) >= 0 ? 1 : 2;
}

/* Lines in an order that keeps every dependence; of those that are ready the most wanted is next, then the first. */
static tutti_status order_lines(tu_nest *nest, wish *wanted) {
    bool *done = calloc((size_t)nest->line_count, sizeof *done);
    tu_line *lines = calloc((size_t)nest->line_count, sizeof *lines);
    if (done == NULL || lines == NULL) {
        free(done);
        free(lines);
        return tu_error_memory("a loop", (size_t)nest->line_count * sizeof *lines);
    }
    for (int count = 0; count < nest->line_count; count++) {
        int best = -1, of_best = 0;
        for (int i = 0; i < nest->line_count; i++) {
            if (done[i] || !is_ready(nest, done, i))
                continue;
            int own = wanted(nest, count > 0 ? &lines[count - 1] : NULL, &nest->lines[i]);
            if (best < 0 || own < of_best) {
                best = i;
                of_best = own;
            }
        }
        done[best] = true;
        lines[count] = nest->lines[best];
    }
    free(done);
    free(nest->lines);
    nest->lines = lines;
    nest->line_room = nest->line_count;
    return TUTTI_OK;
}

/* ---- joined lines ---- */

bool tu_line_can_join(const tu_nest *nest, const tu_line *line) {
    const tu_slot *out = &nest->slots[line->out];
    if (line->kind != TU_LINE_POINTWISE || out->narrow || (out->dtype != TUTTI_F32 && out->dtype != TUTTI_F64))
        return false;
    for (int i = 0; i < line->in_count; i++)
        if (nest->slots[line->in[i]].dtype != out->dtype)
            return false;
#define JOINED(name) case TU_POINTWISE_##name:
    switch (line->vertex->entry->pointwise) {
        TU_JOINED_OPERATORS(JOINED, JOINED)
        return true;
    default:
        return false;
    }
#undef JOINED
}

int tu_line_goes_on(const tu_nest *nest, const tu_line *before, const tu_line *line) {
    const tu_slot *between = &nest->slots[before->out];
    int uses = 0, side = -1;
    if (!tu_line_can_join(nest, before) || !tu_line_can_join(nest, line) || between->tensor >= 0 ||
        between->dtype != nest->slots[line->out].dtype)
        return -1;
    for (int i = 0; i < nest->line_count; i++)
        for (int k = 0; k < nest->lines[i].in_count; k++)
            uses += nest->lines[i].in[k] == before->out;
    for (int k = 0; k < line->in_count; k++)
        side = line->in[k] == before->out ? k : side;
    return uses == 1 ? side : -1;
}

tutti_status tu_nest_order_joined(tu_nest *nest) {
    return order_lines(nest, wish_for_joined);
}

/* ---- stages ---- */

static bool add_operand(tu_stage *stage, int slot) {
    for (int i = 0; i < stage->slot_count; i++)
        if (stage->slots[i] == slot)
            return true;
    if (stage->slot_count == TU_NEST_TENSORS * 2)
        return false;
    stage->slots[stage->slot_count++] = slot;
    return true;
}

/* What it reads from outside, and what others or memory need of what it computes. Numbers are in the code. */
static bool set_operands(const tu_nest *nest, tu_stage *stage) {
    bool fits = true;
    for (int line = stage->first; line < stage->end; line++)
        for (int i = 0; i < nest->lines[line].in_count; i++) {
            int slot = nest->lines[line].in[i];
            bool own = nest->slots[slot].constant;
            for (int before = stage->first; before < line && !own; before++)
                own = nest->lines[before].out == slot;
            fits = fits && (own || add_operand(stage, slot));
        }
    stage->input_count = stage->slot_count;
    for (int line = stage->first; line < stage->end; line++) {
        int slot = nest->lines[line].out;
        bool needed = nest->slots[slot].tensor >= 0;
        for (int after = stage->end; after < nest->line_count && !needed; after++)
            needed = reads(&nest->lines[after], slot);
        fits = fits && (!needed || add_operand(stage, slot));
    }
    for (int i = 0; i < stage->input_count; i++)
        stage->by_rows = stage->by_rows ||
                         (nest->slots[stage->slots[i]].narrow && !nest->slots[nest->lines[stage->first].out].narrow);
    return fits && stage->slot_count > stage->input_count;
}

tutti_status tu_nest_find_stages(tu_nest *nest) {
    tutti_status status = order_lines(nest, wish_for_stages);
    if (status != TUTTI_OK)
        return status;
    nest->stages = calloc((size_t)nest->line_count, sizeof *nest->stages);
    if (nest->stages == NULL)
        return tu_error_memory("a loop", (size_t)nest->line_count * sizeof *nest->stages);
    for (int first = 0, end; first < nest->line_count; first = end) {
        end = first + 1;
        if (nest->lines[first].kind != TU_LINE_POINTWISE || !tu_emit_knows(nest, &nest->lines[first]))
            continue;
        while (end < nest->line_count && alike(nest, &nest->lines[first], &nest->lines[end]) &&
               tu_emit_knows(nest, &nest->lines[end]))
            end++;
        tu_stage *stage = &nest->stages[nest->stage_count];
        *stage = (tu_stage){ .first = first, .end = end };
        if (set_operands(nest, stage))
            nest->stage_count++;
    }
    return TUTTI_OK;
}
