/* SPDX-License-Identifier: Apache-2.0
 *
 * What a nest does in each piece, and the buffers that it needs for that: where slots live that are in no tensor.
 */
#include <stdlib.h>
#include <string.h>

#include "loops/nest.h"
#include "tensor/kernel/kernels.h"

/* A piece and all that it works on stay in the first-level cache. */
#define CACHE_BYTES ((size_t)32 << 10)
#define PIECE 2048 /* elements, at most; */
#define LEAST 256  /* and at least, however many buffers there are */
#define UNBUFFERED 32768
#define TILE_ROWS 8 /* of a piece behind a product, at least */

/* ---- actions ---- */

static bool has_code(const tu_nest *nest) {
    for (int i = 0; i < nest->stage_count; i++)
        if (nest->stages[i].function != NULL)
            return true;
    return nest->loop != NULL;
}

/* Where the lines that are joined with this one end. */
static int end_of_joined(const tu_nest *nest, int line) {
    int end = line + 1;
    while (end < nest->line_count && end - line < TU_NEST_JOINED &&
           tu_line_goes_on(nest, &nest->lines[end - 1], &nest->lines[end]) >= 0)
        end++;
    return end;
}

static tutti_status set_actions(tu_nest *nest) {
    free(nest->actions);
    nest->action_count = 0;
    nest->actions = calloc((size_t)nest->line_count, sizeof *nest->actions);
    if (nest->actions == NULL)
        return tu_error_memory("a loop", (size_t)nest->line_count * sizeof *nest->actions);
    if (!has_code(nest)) {
        tutti_status status = tu_nest_order_joined(nest);
        if (status != TUTTI_OK)
            return status;
        nest->stage_count = 0; /* their lines stand elsewhere now */
    }
    for (int line = 0; line < nest->line_count;) {
        int stage = 0;
        tu_action *action = &nest->actions[nest->action_count++];
        *action = (tu_action){ .line = line, .end = line + 1, .stage = -1 };
        while (stage < nest->stage_count && nest->stages[stage].first != line)
            stage++;
        if (stage < nest->stage_count && nest->stages[stage].function != NULL) {
            action->stage = stage;
            action->end = nest->stages[stage].end;
        } else if (tu_line_can_join(nest, &nest->lines[line])) {
            action->joined = true;
            action->end = end_of_joined(nest, line);
        }
        line = action->end;
    }
    return TUTTI_OK;
}

/* ---- lives ---- */

/* A line that runs by its kernel needs wide slots where it is wide itself. */
static void use_in_line(tu_nest *nest, const tu_line *line, int action, bool *repeated) {
    for (int i = 0; i < line->in_count; i++) {
        tu_slot *slot = &nest->slots[line->in[i]];
        slot->last = action;
        bool spread = slot->constant || (slot->narrow && !nest->slots[line->out].narrow);
        repeated[line->in[i]] = repeated[line->in[i]] || (spread && line->kind != TU_LINE_FOLD);
    }
    nest->slots[line->out].first = nest->slots[line->out].last = action;
}

static void set_lives(tu_nest *nest, bool *repeated, bool *dense) {
    for (int i = 0; i < nest->slot_count; i++)
        nest->slots[i].first = nest->slots[i].last = -1;
    for (int i = 0; i < nest->action_count; i++) {
        const tu_action *action = &nest->actions[i];
        for (int number = action->line; number < action->end && action->stage < 0; number++) {
            const tu_line *line = &nest->lines[number];
            use_in_line(nest, line, i, repeated);
            for (int k = 0; k < line->in_count; k++)
                dense[line->in[k]] = true;
            dense[line->out] = true;
        }
        if (action->stage < 0)
            continue;
        const tu_stage *stage = &nest->stages[action->stage];
        for (int k = 0; k < stage->slot_count; k++) {
            tu_slot *slot = &nest->slots[stage->slots[k]];
            slot->last = i;
            if (k >= stage->input_count)
                slot->first = i;
        }
    }
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].written)
            nest->slots[nest->tensors[i].slot].last = nest->action_count;
}

/* ---- buffers ---- */

/* Whether its elements are the same ones in every piece. */
static bool is_still(const tu_nest *nest, const tu_nest_tensor *tensor) {
    return tensor->still && !tensor->written &&
           (tensor->column == 0 || (nest->piece_columns == nest->columns && !nest->tiled));
}

/* Whether a piece of the tensor lies as a slot needs it. Stages take rows that lie apart, kernels do not; a row that is
 * the same in every piece is better repeated once than read row by row. */
static bool is_direct(const tu_nest *nest, const tu_nest_tensor *tensor, bool dense) {
    if (tensor->narrow)
        return nest->piece_rows == 1 || tensor->row == 1;
    if (nest->piece_rows == 1)
        return tensor->column == 1 || nest->piece_columns == 1;
    if (tensor->column == 1 && !dense && !is_still(nest, tensor))
        return true;
    return (tensor->column == 1 || nest->piece_columns == 1) && tensor->row == nest->columns && !nest->tiled;
}

typedef struct pool {
    bool taken[512];
    int count;
    bool full;
} pool;

static int take(pool *from) {
    for (int i = 0; i < 512; i++)
        if (!from->taken[i]) {
            from->taken[i] = true;
            if (i >= from->count)
                from->count = i + 1;
            return i;
        }
    from->full = true;
    return 0;
}

static void give(pool *to, int buffer) {
    if (buffer >= 0)
        to->taken[buffer] = false;
}

/* Slots that are there before the first action: what is read, and numbers. Those that are the same in every piece keep
 * their buffers. */
static void place_inputs(tu_nest *nest, pool *buffers, const bool *repeated, const bool *dense) {
    for (int i = 0; i < nest->slot_count; i++) {
        tu_slot *slot = &nest->slots[i];
        const tu_nest_tensor *tensor = slot->tensor >= 0 ? &nest->tensors[slot->tensor] : NULL;
        if (slot->constant && repeated[i])
            slot->wide_buffer = take(buffers);
        if (tensor == NULL || tensor->written || slot->last < 0)
            continue;
        if (!is_direct(nest, tensor, dense[i]) && !(tensor->single && !tensor->narrow && !dense[i]))
            slot->buffer = take(buffers);
        if (repeated[i])
            slot->wide_buffer = take(buffers);
        if (is_still(nest, tensor) || tensor->single)
            slot->last = nest->action_count; /* kept from piece to piece */
    }
}

static void release(tu_nest *nest, pool *buffers, int action, const tu_slot *like) {
    for (int i = 0; i < nest->slot_count; i++) {
        tu_slot *slot = &nest->slots[i];
        if (slot->constant || slot->last != action || slot->first == action)
            continue;
        if (like != NULL && (slot->narrow || like->narrow || slot->dtype != like->dtype || slot->wide_buffer >= 0))
            continue;
        give(buffers, slot->buffer);
        if (like == NULL)
            give(buffers, slot->wide_buffer);
        slot->last = like != NULL ? -2 : slot->last; /* given back already */
    }
}

static void place_result(tu_nest *nest, pool *buffers, int index, bool by_kernel, bool joined, const bool *repeated,
                         const bool *dense) {
    tu_slot *slot = &nest->slots[index];
    const tu_nest_tensor *tensor = slot->tensor >= 0 ? &nest->tensors[slot->tensor] : NULL;
    if (tensor == NULL || !is_direct(nest, tensor, dense[index]) || (by_kernel && !joined && tensor->streamed))
        slot->buffer = take(buffers);
    if (repeated[index])
        slot->wide_buffer = take(buffers);
}

/* Results too large for the caches go there by a buffer, so that they can be stored past them: a kernel's own stores
 * would first read what they overwrite. Stages and joined lines do without. What is read of such a size comes from
 * memory. */
static void set_large(tu_nest *nest) {
    int64_t count = nest->outer_count * nest->rows * nest->columns;
    for (int i = 0; i < nest->tensor_count; i++) {
        tu_nest_tensor *tensor = &nest->tensors[i];
        bool large = !tensor->narrow && (size_t)count * tu_dtype_bytes[tensor->value->shape.dtype] >= TU_STREAM_BYTES;
        tensor->streamed = large && tensor->fresh;
        tensor->ahead = large && !tensor->written && tensor->column == 1 && !tensor->still && !has_code(nest);
    }
}

static void place(tu_nest *nest, pool *buffers, const bool *repeated, const bool *dense) {
    for (int i = 0; i < nest->slot_count; i++)
        nest->slots[i].buffer = nest->slots[i].wide_buffer = -1;
    place_inputs(nest, buffers, repeated, dense);
    for (int i = 0; i < nest->action_count; i++) {
        const tu_action *action = &nest->actions[i];
        const tu_stage *stage = action->stage >= 0 ? &nest->stages[action->stage] : NULL;
        const tu_line *line = stage == NULL ? &nest->lines[action->end - 1] : NULL;
        /* An element is read before its place is written, so that a result may take the buffer of what it is made
         * from. */
        if (stage != NULL || line->kind == TU_LINE_POINTWISE)
            release(nest, buffers, i, &nest->slots[stage != NULL ? stage->slots[stage->input_count] : line->out]);
        if (line != NULL)
            place_result(nest, buffers, line->out, true, action->joined, repeated, dense);
        for (int k = stage != NULL ? stage->input_count : 0; stage != NULL && k < stage->slot_count; k++)
            place_result(nest, buffers, stage->slots[k], false, false, repeated, dense);
        release(nest, buffers, i, NULL);
        for (int k = 0; k < nest->slot_count; k++) { /* results that nobody reads */
            const tu_slot *slot = &nest->slots[k];
            if (slot->first == i && slot->last == i && slot->tensor < 0) {
                give(buffers, slot->buffer);
                give(buffers, slot->wide_buffer);
            }
        }
    }
}

/* ---- pieces ---- */

static void set_piece(tu_nest *nest, int64_t elements) {
    if (nest->tiled) {
        int64_t most = elements / TILE_ROWS;
        nest->piece_columns = nest->columns < most ? nest->columns : most;
        nest->piece_rows = elements / nest->piece_columns;
        return;
    }
    if ((nest->split < 0 || nest->is_long) && nest->columns > elements) {
        nest->piece_rows = 1;
        nest->piece_columns = elements;
        return;
    }
    nest->piece_columns = nest->columns;
    nest->piece_rows = elements / nest->columns;
    if (nest->piece_rows > nest->rows)
        nest->piece_rows = nest->rows;
    if (nest->piece_rows < 1)
        nest->piece_rows = 1;
}

static size_t widest(const tu_nest *nest) {
    size_t bytes = 1;
    for (int i = 0; i < nest->slot_count; i++)
        if (tu_dtype_bytes[nest->slots[i].dtype] > bytes)
            bytes = tu_dtype_bytes[nest->slots[i].dtype];
    return bytes;
}

/* Where nothing is copied pieces may be longer, as long as nothing has to be. */
static void lengthen(tu_nest *nest, int64_t elements, const bool *dense) {
    set_piece(nest, UNBUFFERED);
    for (int i = 0; i < nest->tensor_count; i++)
        if (!nest->tensors[i].single && !is_direct(nest, &nest->tensors[i], dense[nest->tensors[i].slot])) {
            set_piece(nest, elements);
            return;
        }
}

tutti_status tu_nest_schedule(tu_nest *nest) {
    tutti_status status = set_actions(nest);
    set_large(nest);
    bool *repeated = calloc((size_t)nest->slot_count * 2, sizeof *repeated);
    if (status == TUTTI_OK && repeated == NULL)
        status = tu_error_memory("a loop", (size_t)nest->slot_count * 2);
    for (int64_t elements = PIECE; status == TUTTI_OK; elements /= 2) {
        pool buffers = { .count = 0 };
        memset(repeated, 0, (size_t)nest->slot_count * 2 * sizeof *repeated);
        bool *dense = repeated + nest->slot_count;
        set_lives(nest, repeated, dense);
        set_piece(nest, elements);
        place(nest, &buffers, repeated, dense);
        size_t held = (size_t)(nest->piece_rows * nest->piece_columns) * widest(nest);
        nest->buffer_count = buffers.count;
        nest->buffer_bytes = (held + 63) / 64 * 64;
        if (buffers.full)
            status = tu_error(TUTTI_ERROR_UNSUPPORTED, "a loop needs more than 512 buffers");
        if (buffers.count == 0) {
            lengthen(nest, elements, dense);
            break;
        }
        if (elements <= (nest->is_long ? TU_FOLD_BLOCK : LEAST) ||
            ((size_t)buffers.count + (size_t)nest->tensor_count) * held <= CACHE_BYTES)
            break;
    }
    free(repeated);
    return status;
}
