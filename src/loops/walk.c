/* SPDX-License-Identifier: Apache-2.0
 *
 * Running a nest: piece after piece, on the threads of the process. Each thread has buffers of its own.
 */
#include <stdlib.h>
#include <string.h>

#include "loops/nest.h"
#include "tensor/convert.h"
#include "tensor/kernel/kernels.h"
#include "tensor/parallel.h"
#include "tensor/process.h"

#define GRAIN 32768 /* elements that are worth another thread */

typedef struct walk {
    const tu_nest *nest;
    char *data[TU_NEST_TENSORS];
    int lanes;
    int64_t pieces_of_rows, pieces_of_columns, pieces;
    char *memory; /* buffers of all lanes, */
    size_t lane_bytes;
    void **slots; /* and where each lane has its slots */
    /* Of a long nest: rows in all, the parts that each is reduced in, and what each reduction gives for each part. */
    int64_t row_count, parts;
    char *partials;
} walk;

/* One piece on one lane. */
typedef struct piece {
    const walk *job;
    char *buffers;
    void **at;
    bool begun; /* what is the same in every piece is there */
    int64_t rows, columns, count;
    int64_t unit; /* of a long nest: the part of a row that it belongs to */
    char *data[TU_NEST_TENSORS];
} piece;

static char *buffer_of(const piece *now, int buffer) {
    return now->buffers + (size_t)buffer * now->job->nest->buffer_bytes;
}

/* ---- reading and writing ---- */

static void repeat(const piece *now, const tu_slot *slot, const void *from) {
    size_t size = tu_dtype_bytes[slot->dtype];
    char *to = buffer_of(now, slot->wide_buffer);
    for (int64_t row = 0; row < now->rows; row++)
        tu_pack(to + (size_t)(row * now->columns) * size, (const char *)from + (size_t)row * size, 0, size,
                now->columns);
}

static void pack(const piece *now, const tu_nest_tensor *tensor, const char *data, char *to) {
    size_t size = tu_dtype_bytes[tensor->value->shape.dtype];
    if (tensor->narrow) {
        tu_pack(to, data, tensor->row, size, now->rows);
        return;
    }
    for (int64_t row = 0; row < now->rows; row++)
        tu_pack(to + (size_t)(row * now->columns) * size, data + row * tensor->row * (int64_t)size, tensor->column,
                size, now->columns);
}

static void unpack(const piece *now, const tu_nest_tensor *tensor, char *data, const char *from) {
    size_t size = tu_dtype_bytes[tensor->value->shape.dtype];
    bool dense = !tensor->narrow && tensor->column == 1 && (now->rows == 1 || tensor->row == now->columns);
    if (dense && ((uintptr_t)data | (uintptr_t)now->count * size) % 16 == 0) {
        tu_stream_copy(data, from, now->count * (int64_t)size);
        return;
    }
    if (tensor->narrow) {
        tu_unpack(data, tensor->row, from, size, now->rows);
        return;
    }
    for (int64_t row = 0; row < now->rows; row++)
        tu_unpack(data + row * tensor->row * (int64_t)size, tensor->column, from + (size_t)(row * now->columns) * size,
                  size, now->columns);
}

/* Before the first piece of a lane: numbers, and where buffers are. */
static void begin_lane(piece *now) {
    const tu_nest *nest = now->job->nest;
    now->rows = nest->piece_rows;
    now->columns = nest->piece_columns;
    for (int i = 0; i < nest->slot_count; i++) {
        const tu_slot *slot = &nest->slots[i];
        now->at[i] = slot->constant ? (void *)slot->number : slot->buffer >= 0 ? buffer_of(now, slot->buffer) : NULL;
        if (slot->constant && slot->wide_buffer >= 0)
            tu_pack(buffer_of(now, slot->wide_buffer), slot->number, 0, tu_dtype_bytes[slot->dtype],
                    now->rows * now->columns);
    }
}

static void fetch(piece *now) {
    const tu_nest *nest = now->job->nest;
    bool whole = now->rows == nest->piece_rows && now->columns == nest->piece_columns;
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        const tu_slot *slot = &nest->slots[tensor->slot];
        if (slot->buffer < 0)
            now->at[tensor->slot] = now->data[i];
        if (tensor->written)
            continue;
        /* Rows of a shorter piece lie at other places of the buffer where they are parts of rows; whole rows do not. */
        bool there = now->begun && slot->last == nest->action_count && tensor->still &&
                     (tensor->column == 0 || (nest->piece_columns == nest->columns && !nest->tiled));
        if (there)
            continue;
        if (slot->buffer >= 0)
            pack(now, tensor, now->data[i], now->at[tensor->slot]);
        if (slot->wide_buffer >= 0)
            repeat(now, slot, now->at[tensor->slot]);
    }
    now->begun = now->begun || whole;
}

static void store(const piece *now) {
    const tu_nest *nest = now->job->nest;
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        const tu_slot *slot = &nest->slots[tensor->slot];
        if (tensor->written && slot->buffer >= 0 && !(nest->is_long && tensor->narrow))
            unpack(now, tensor, now->data[i], now->at[tensor->slot]);
    }
}

/* ---- lines ---- */

static const tu_fold_kernels *kernels_of(const tu_nest *nest, const tu_line *line) {
    return &tu_tensor_kernels_get()->folds[tu_float_index(nest->slots[line->out].dtype)][line->fold];
}

static void average(const tu_nest *nest, const tu_line *line, void *sums, int64_t count) {
    double scale = 1 / (double)nest->columns;
    for (int64_t i = 0; line->mean && i < count; i++) {
        if (nest->slots[line->out].dtype == TUTTI_F32)
            ((float *)sums)[i] = (float)((double)((float *)sums)[i] * scale);
        else
            ((double *)sums)[i] *= scale;
    }
}

static char *partial_of(const walk *job, const tu_line *line, int64_t unit) {
    int64_t index = line - job->nest->lines;
    return job->partials + (size_t)(index * job->row_count * job->parts + unit) * sizeof(double);
}

static void fold(const piece *now, const tu_line *line) {
    const tu_nest *nest = now->job->nest;
    size_t size = tu_dtype_bytes[nest->slots[line->out].dtype];
    const tu_fold_kernels *kernels = kernels_of(nest, line);
    char *to = now->at[line->out];
    const char *from = now->at[line->in[0]];
    if (nest->is_long) { /* goes on from the pieces before */
        kernels->row(partial_of(now->job, line, now->unit), from, now->columns);
        return;
    }
    kernels->start(to, now->rows);
    for (int64_t row = 0; row < now->rows; row++)
        kernels->row(to + (size_t)row * size, from + (size_t)(row * now->columns) * size, now->columns);
    average(nest, line, to, now->rows);
}

/* Where a line that runs by a kernel finds an input. */
static const void *input_of(const piece *now, const tu_line *line, int input) {
    const tu_slot *slots = now->job->nest->slots, *slot = &slots[line->in[input]];
    bool spread = slot->constant || (slot->narrow && !slots[line->out].narrow);
    return spread ? buffer_of(now, slot->wide_buffer) : now->at[line->in[input]];
}

static void run_line(const piece *now, const tu_line *line) {
    const tu_nest *nest = now->job->nest;
    const tu_slot *out = &nest->slots[line->out];
    int64_t count = out->narrow ? now->rows : now->count;
    if (line->kind == TU_LINE_FOLD) {
        fold(now, line);
        return;
    }
    const void *in[TU_OPERANDS];
    for (int i = 0; i < line->in_count; i++)
        in[i] = input_of(now, line, i);
    if (line->kind == TU_LINE_POINTWISE) {
        line->kernel(in, now->at[line->out], count, line->vertex->attributes);
        return;
    }
    tutti_dtype from = nest->slots[line->in[0]].dtype;
    if (from == out->dtype)
        memcpy(now->at[line->out], in[0], (size_t)count * tu_dtype_bytes[from]);
    else
        (void)tu_convert(in[0], from, now->at[line->out], out->dtype,
                         (size_t)count); /* between dtypes that there are */
}

static void run_joined(const piece *now, const tu_action *action) {
    const tu_nest *nest = now->job->nest;
    const tu_line *lines = &nest->lines[action->line], *last = &nest->lines[action->end - 1];
    const tu_slot *out = &nest->slots[last->out];
    tu_joined_step steps[TU_NEST_JOINED];
    const void *from = input_of(now, lines, 0);
    for (int i = 0; i < action->end - action->line; i++) {
        int side = i > 0 && lines[i].in_count > 1 && lines[i].in[1] == lines[i - 1].out; /* it takes that once */
        steps[i] = (tu_joined_step){ .number = lines[i].vertex->entry->pointwise,
                                     .side = side,
                                     .other = lines[i].in_count > 1 ? input_of(now, &lines[i], 1 - side) : from,
                                     .attributes = lines[i].vertex->attributes };
    }
    bool past = out->tensor >= 0 && out->buffer < 0 && nest->tensors[out->tensor].streamed;
    tu_tensor_kernels_get()->joined[tu_float_index(out->dtype)](steps, action->end - action->line, from,
                                                                now->at[last->out], now->count, past);
}

/* Elements from one row of a slot to the next. */
static int64_t step_of(const piece *now, const tu_slot *slot) {
    const tu_nest_tensor *tensor = slot->tensor >= 0 ? &now->job->nest->tensors[slot->tensor] : NULL;
    bool apart = now->rows > 1 && tensor != NULL && slot->buffer < 0 && !slot->narrow && !tensor->single;
    return apart ? tensor->row : now->columns;
}

static void run_stage(const piece *now, const tu_stage *stage) {
    void *at[TU_NEST_TENSORS * 2];
    int64_t steps[TU_NEST_TENSORS * 2];
    const tu_slot *slots = now->job->nest->slots;
    bool by_rows = stage->by_rows;
    for (int i = 0; i < stage->slot_count; i++) {
        at[i] = now->at[stage->slots[i]];
        steps[i] = step_of(now, &slots[stage->slots[i]]);
        by_rows = by_rows || steps[i] != now->columns;
    }
    if (slots[stage->slots[stage->input_count]].narrow)
        stage->function(at, steps, 1, now->rows);
    else if (by_rows)
        stage->function(at, steps, now->rows, now->columns);
    else
        stage->function(at, steps, 1, now->count);
}

/* Numbers of rows that kernels need in each column. */
static void spread(const piece *now, int index) {
    const tu_slot *slot = &now->job->nest->slots[index];
    if (slot->wide_buffer >= 0)
        repeat(now, slot, now->at[index]);
}

/* Asks for a share of what the next piece reads, which mostly lies behind what this one does, so that memory is read
 * while kernels compute. Beyond the end of a tensor nothing is there, and asking does no harm. */
static void look_ahead(const piece *now, int share, int shares) {
    const tu_nest *nest = now->job->nest;
    for (int i = 0; i < nest->tensor_count; i++) {
        if (!nest->tensors[i].ahead)
            continue;
        uintptr_t bytes = (uintptr_t)now->count * tu_dtype_bytes[nest->tensors[i].value->shape.dtype];
        uintptr_t next = (uintptr_t)now->data[i] + bytes,
                  end = next + bytes * (uintptr_t)(share + 1) / (uintptr_t)shares;
        for (uintptr_t at = next + bytes * (uintptr_t)share / (uintptr_t)shares; at < end; at += 64)
            __builtin_prefetch((const void *)at, 0, 2);
    }
}

static void run_actions(const piece *now) {
    const tu_nest *nest = now->job->nest;
    for (int i = 0; i < nest->action_count; i++) {
        const tu_action *action = &nest->actions[i];
        look_ahead(now, i, nest->action_count);
        if (action->joined) {
            run_joined(now, action);
        } else if (action->stage < 0) {
            const tu_line *line = &nest->lines[action->line];
            if (nest->is_long && line->kind == TU_LINE_CONVERT && nest->slots[line->out].narrow)
                continue; /* of a result that is not there yet */
            run_line(now, line);
            spread(now, line->out);
        } else {
            const tu_stage *stage = &nest->stages[action->stage];
            run_stage(now, stage);
            for (int k = stage->input_count; k < stage->slot_count; k++)
                spread(now, stage->slots[k]);
        }
    }
}

/* ---- pieces ---- */

/* Where the tensors are for a piece that begins here. */
static void set_data(piece *now, int64_t outer, int64_t row, int64_t column) {
    const tu_nest *nest = now->job->nest;
    int64_t places[TT_MAX_DIMS] = { 0 };
    for (int dim = nest->outer_ndim - 1; dim >= 0; dim--) {
        places[dim] = outer % nest->outer_sizes[dim];
        outer /= nest->outer_sizes[dim];
    }
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        int64_t offset = row * tensor->row + column * tensor->column;
        for (int dim = 0; dim < nest->outer_ndim; dim++)
            offset += places[dim] * tensor->outer[dim];
        now->data[i] = now->job->data[i] + offset * tu_dtype_bytes[tensor->value->shape.dtype];
    }
}

static void find_piece(piece *now, int64_t index) {
    const walk *job = now->job;
    const tu_nest *nest = job->nest;
    int64_t of_columns = index % job->pieces_of_columns, rest = index / job->pieces_of_columns;
    int64_t row = rest % job->pieces_of_rows * nest->piece_rows, column = of_columns * nest->piece_columns;
    now->rows = nest->rows - row < nest->piece_rows ? nest->rows - row : nest->piece_rows;
    now->columns = nest->columns - column < nest->piece_columns ? nest->columns - column : nest->piece_columns;
    now->count = now->rows * now->columns;
    set_data(now, rest / job->pieces_of_rows, row, column);
}

static void run_piece(piece *now) {
    fetch(now);
    run_actions(now);
    store(now);
}

static piece begin_on(const walk *job, int64_t lane) {
    piece now = { .job = job,
                  .buffers = job->memory + (size_t)lane * job->lane_bytes,
                  .at = job->slots + lane * job->nest->slot_count };
    begin_lane(&now);
    return now;
}

static void run_lanes(void *context, int64_t begin, int64_t end) {
    const walk *job = context;
    for (int64_t lane = begin; lane < end; lane++) {
        piece now = begin_on(job, lane);
        int64_t last = job->pieces * (lane + 1) / job->lanes;
        for (int64_t i = job->pieces * lane / job->lanes; i < last; i++) {
            find_piece(&now, i);
            run_piece(&now);
        }
        tu_stream_end();
    }
}

/* ---- behind a product ---- */

static void begin_epilogue(tu_epilogue *own, void *out) {
    tu_nest_epilogue *epilogue = (tu_nest_epilogue *)own;
    const tu_nest *nest = epilogue->nest;
    for (int i = 0; i < nest->tensor_count; i++)
        epilogue->data[i] = nest->tensors[i].value == epilogue->product ? out : tu_pointer(epilogue->tensors[i]);
    epilogue->begun = true;
}

/* Of a part with shorter rows than a piece has, more of them are a piece. */
static void run_part(piece *now, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const tu_nest *nest = now->job->nest;
    int64_t wide = columns < nest->piece_columns ? columns : nest->piece_columns,
            high = nest->piece_rows * nest->piece_columns / wide;
    for (int64_t i = 0; i < rows; i += high)
        for (int64_t j = 0; j < columns; j += wide) {
            now->rows = rows - i < high ? rows - i : high;
            now->columns = columns - j < wide ? columns - j : wide;
            now->count = now->rows * now->columns;
            set_data(now, 0, row + i, column + j);
            run_piece(now);
        }
}

static void run_epilogue(tu_epilogue *own, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    tu_nest_epilogue *epilogue = (tu_nest_epilogue *)own;
    const tu_nest *nest = epilogue->nest;
    size_t of_buffers = (size_t)nest->buffer_count * nest->buffer_bytes;
    size_t bytes = of_buffers + (size_t)nest->slot_count * sizeof(void *);
    walk job = { .nest = nest, .lanes = 1, .lane_bytes = of_buffers };
    job.memory = tu_block_alloc(tu_self(), bytes);
    if (job.memory == NULL) {
        atomic_store_explicit(&epilogue->out_of_memory, true, memory_order_relaxed);
        return;
    }
    memcpy(job.data, epilogue->data, sizeof job.data);
    job.slots = (void **)(void *)(job.memory + of_buffers);
    piece now = begin_on(&job, 0);
    run_part(&now, row, rows, column, columns);
    tu_stream_end();
    tu_block_free(tu_self(), job.memory, bytes);
}

void tu_nest_epilogue_init(tu_nest_epilogue *epilogue, const tu_nest *nest, tt_tensor *const *tensors,
                           const tu_value *product) {
    *epilogue = (tu_nest_epilogue){
        .own = { begin_epilogue, run_epilogue }, .nest = nest, .tensors = tensors, .product = product
    };
}

/* ---- long rows ---- */

/* A single long row is reduced in parts of a fixed size, which are then reduced: see tensor/reduce.c. */
#define PART 65536

static void run_unit(piece *now, int64_t unit) {
    const walk *job = now->job;
    const tu_nest *nest = job->nest;
    int64_t row = unit / job->parts, begin = unit % job->parts * PART;
    int64_t end = job->parts == 1 || begin + PART > nest->columns ? nest->columns : begin + PART;
    now->unit = unit;
    for (int i = 0; i < nest->line_count; i++)
        if (nest->lines[i].kind == TU_LINE_FOLD)
            kernels_of(nest, &nest->lines[i])->start(partial_of(job, &nest->lines[i], unit), 1);
    for (int64_t column = begin; column < end; column += nest->piece_columns) {
        now->rows = 1;
        now->columns = now->count = end - column < nest->piece_columns ? end - column : nest->piece_columns;
        set_data(now, row / nest->rows, row % nest->rows, column);
        run_piece(now);
    }
}

static void run_long_lanes(void *context, int64_t begin, int64_t end) {
    const walk *job = context;
    int64_t units = job->row_count * job->parts;
    for (int64_t lane = begin; lane < end; lane++) {
        piece now = begin_on(job, lane);
        for (int64_t i = units * lane / job->lanes; i < units * (lane + 1) / job->lanes; i++)
            run_unit(&now, i);
        tu_stream_end();
    }
}

/* The line whose result a slot has, in the type that it was computed in or converted. */
static const tu_line *fold_of(const tu_nest *nest, int slot) {
    for (int i = 0; i < nest->line_count; i++)
        if (nest->lines[i].out == slot)
            return nest->lines[i].kind == TU_LINE_FOLD ? &nest->lines[i] : fold_of(nest, nest->lines[i].in[0]);
    return NULL;
}

/* What the parts of a row gave becomes its result, in the type that it was computed in. */
static void finish_row(const walk *job, const tu_line *line, int64_t row, void *result) {
    size_t size = tu_dtype_bytes[job->nest->slots[line->out].dtype];
    char *partials = partial_of(job, line, row * job->parts);
    if (job->parts == 1) {
        memcpy(result, partials, size);
    } else {
        for (int64_t part = 1; part < job->parts; part++) /* side by side, as a row */
            memmove(partials + (size_t)part * size, partials + (size_t)part * sizeof(double), size);
        kernels_of(job->nest, line)->start(result, 1);
        kernels_of(job->nest, line)->row(result, partials, job->parts);
    }
    average(job->nest, line, result, 1);
}

static void finish_long(const walk *job) {
    const tu_nest *nest = job->nest;
    piece now = { .job = job };
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        const tu_line *line = tensor->written && tensor->narrow ? fold_of(nest, tensor->slot) : NULL;
        for (int64_t row = 0; line != NULL && row < job->row_count; row++) {
            double result;
            finish_row(job, line, row, &result);
            set_data(&now, row / nest->rows, row % nest->rows, 0);
            (void)tu_convert(&result, nest->slots[line->out].dtype, now.data[i], tensor->value->shape.dtype, 1);
        }
    }
}

static int64_t pieces(int64_t count, int64_t piece) {
    return (count + piece - 1) / piece;
}

/* Memory of the walk: buffers and slots of the lanes, and the partial results. */
static tutti_status run_in_memory(walk *job, tu_parallel_body *body) {
    const tu_nest *nest = job->nest;
    size_t of_slots = ((size_t)job->lanes * (size_t)nest->slot_count * sizeof(void *) + 63) / 64 * 64;
    size_t of_partials = (size_t)(job->row_count * job->parts * nest->line_count) * sizeof(double);
    job->lane_bytes = (size_t)nest->buffer_count * nest->buffer_bytes;
    size_t bytes = (size_t)job->lanes * job->lane_bytes + of_slots + of_partials;
    job->memory = tu_block_alloc(tu_self(), bytes);
    if (job->memory == NULL)
        return tu_error_memory("the buffers of a loop", bytes);
    char *behind = job->memory + (size_t)job->lanes * job->lane_bytes;
    job->slots = (void **)(void *)behind;
    job->partials = behind + of_slots;
    tu_parallel(job->lanes, 1, body, job);
    if (nest->is_long)
        finish_long(job);
    tu_block_free(tu_self(), job->memory, bytes);
    return TUTTI_OK;
}

tutti_status tu_nest_run(const tu_nest *nest, tt_tensor *const *tensors) {
    walk job = { .nest = nest };
    for (int i = 0; i < nest->tensor_count; i++)
        job.data[i] = tu_pointer(tensors[i]);
    job.pieces_of_rows = pieces(nest->rows, nest->piece_rows);
    job.pieces_of_columns = pieces(nest->columns, nest->piece_columns);
    job.pieces = nest->outer_count * job.pieces_of_rows * job.pieces_of_columns;
    if (nest->is_long) {
        job.row_count = nest->outer_count * nest->rows;
        job.parts = job.row_count == 1 && nest->columns > 2 * PART ? pieces(nest->columns, PART) : 1;
    }
    int64_t total = nest->outer_count * nest->rows * nest->columns;
    int64_t units = nest->is_long ? job.row_count * job.parts : job.pieces;
    int64_t lanes = total / GRAIN < units ? total / GRAIN : units;
    int threads = lanes > 1 ? tu_process_compute_threads() : 1;
    job.lanes = lanes < 1 ? 1 : lanes < threads ? (int)lanes : threads;
    return run_in_memory(&job, nest->is_long ? run_long_lanes : run_lanes);
}
