/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations that take parts of symmetric matrices where they lie: everybody arrives, each rank takes what it wants
 * from all others, reduced or as it is, and nobody leaves before all have taken. They differ only in which tiles a rank
 * gets, which each computes from arguments that are the same on all.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/named.h>

#include "collective/named.h"
#include "collective/parts.h"

/* ---- on memory of the CPU ---- */

static void take_tile(tu_collective *state, const tu_task *task, const tu_tile *tile, const unsigned char *const *in) {
    int size = task->group->size;
    const void *alone[1], **sources = state != NULL ? state->sources : alone;
    double one = 1, *factors = state != NULL ? state->factors : &one;
    for (size_t row = 0; row < tile->rows; row++) {
        unsigned char *out = tile->out + row * tile->out_pitch;
        size_t offset = tile->in_offset + row * tile->in_pitch;
        if (tile->source >= 0) {
            tu_copy(out, in[tile->source] + offset, tile->columns * task->element, 0);
            continue;
        }
        for (int member = 0; member < size; member++) {
            sources[member] = in[member] + offset;
            factors[member] = 1;
        }
        tu_reduce(out, sources, size, tile->columns, (tutti_dtype)task->info.dtype,
                  (tutti_reduction)task->info.reduction, factors, 0);
    }
}

/* Arrives, and finds everybody's input. */
static tutti_status meet(tu_collective *state, tu_task *task, uint64_t *epoch, const unsigned char **in) {
    tu_reference reference = { .factor = 1 };
    tu_symmetric found;
    tutti_status status = tu_epoch_enter(state, task, epoch);
    if (status != TUTTI_OK)
        return status;
    if (tu_symmetric_find(state->memory, task->in, task->tiles.in_bytes, &found)) {
        reference.in_index = found.index;
        reference.in_offset = found.offset;
    }
    memcpy(state->members[state->rank]->arrive[*epoch & 1].payload, &reference, sizeof reference);
    tu_epoch_arrive(state, task, *epoch);
    status = tu_epoch_await_all(state, task, *epoch);
    if (status == TUTTI_OK)
        tu_read_references(state, *epoch);
    for (int member = 0; status == TUTTI_OK && member < state->size; member++) {
        unsigned char *address;
        status = tu_resolve_in(state, task, member, &address);
        in[member] = address;
    }
    return status;
}

static tutti_status run(tu_collective *state, tu_task *task) {
    int size = task->group->size;
    const unsigned char **in = calloc((size_t)size, sizeof *in);
    uint64_t epoch = 0;
    tutti_status status = TUTTI_OK;
    if (in == NULL)
        return tu_error_memory("the inputs of a collective", (size_t)size * sizeof *in);
    if (state == NULL)
        in[0] = task->in;
    else
        status = meet(state, task, &epoch, in);
    for (size_t i = 0; status == TUTTI_OK && i < task->tiles.count; i++)
        take_tile(state, task, &task->tiles.list[i], in);
    if (status == TUTTI_OK && state != NULL) {
        tu_step_publish(state, epoch);
        status = tu_step_await_all(state, task, epoch);
    }
    free(in);
    return status;
}

/* A call of which nobody gets anything: the ranks only make sure that all say so. */
static tutti_status run_empty(tu_collective *state, tu_task *task) {
    uint64_t epoch;
    tutti_status status = state != NULL ? tu_epoch_come(state, task, &epoch) : TUTTI_OK;
    return status == TUTTI_OK && state != NULL ? tu_epoch_await_all(state, task, epoch) : status;
}

/* ---- what all calls share ---- */

/* A call at work. */
typedef struct request {
    tutti_group *group;
    tu_operation operation;
    const char *name;
    const unsigned char *in; /* the beginning of everything that is read */
    size_t in_bytes;
    size_t element; /* bytes of one */
    int rank, size;
    uint64_t hash;     /* of what must be equal on all ranks */
    uint64_t elements; /* of everything that anybody gets */
    tu_tile *tiles;    /* this rank's */
    size_t count;
    tutti_status status;
} request;

static void mix(request *request, uint64_t value) {
    request->hash = (request->hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    request->hash ^= request->hash >> 29;
}

/* At most `most` tiles will be added. */
static tutti_status begin(request *made, tutti_group *group, tu_operation operation, tutti_dtype dtype, size_t most) {
    *made = (request){ .group = group,
                       .operation = operation,
                       .name = tu_operation_name(operation),
                       .element = tutti_dtype_size(dtype),
                       .size = 1 };
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", made->name);
    if (made->element == 0)
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no dtype", made->name, (int)dtype);
    if (group != TUTTI_NON_GROUP_MEMBER) {
        made->rank = group->rank;
        made->size = group->size;
    }
    made->tiles = calloc(most + 1, sizeof *made->tiles);
    return made->tiles != NULL ? TUTTI_OK : tu_error_memory("tiles", most * sizeof *made->tiles);
}

static tutti_status too_large(const request *request) {
    return tu_error(TUTTI_ERROR_RANGE, "%s: the tiles are more than memory can have", request->name);
}

/* Bytes from the first element of a tile to behind its last one. */
static tutti_status extent(const request *request, size_t rows, size_t columns, size_t stride, size_t *bytes) {
    size_t last;
    *bytes = 0;
    if (rows == 0 || columns == 0)
        return TUTTI_OK;
    if (__builtin_mul_overflow(rows - 1, stride, &last) || __builtin_add_overflow(last, columns, &last) ||
        __builtin_mul_overflow(last, request->element, bytes) || *bytes > SIZE_MAX >> 1)
        return too_large(request);
    return TUTTI_OK;
}

/* A copy of the caller's, whole and checked. */
static tutti_status read_tile(const request *request, const char *what, const tutti_tile *given, tutti_tile *tile,
                              size_t *bytes) {
    *tile = (tutti_tile)TUTTI_TILE_INIT;
    if (given == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %s must not be NULL", request->name, what);
    tutti_status status = tu_options_copy("tutti_tile", given, tile, sizeof *tile);
    if (status != TUTTI_OK)
        return status;
    if (tile->stride == 0)
        tile->stride = tile->columns;
    if (tile->stride < tile->columns && tile->rows > 1)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the rows of %s overlap: %zu columns, and a stride of %zu",
                        request->name, what, tile->columns, tile->stride);
    status = extent(request, tile->rows, tile->columns, tile->stride, bytes);
    if (status == TUTTI_OK && *bytes != 0 && tile->data == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "%s: %s has no data", request->name, what);
    return status;
}

/* A tile for this rank. Empty ones are left out. */
static tutti_status add(request *request, tu_tile tile) {
    size_t pitch = tile.out_pitch / request->element, bytes;
    if (tile.rows == 0 || tile.columns == 0)
        return TUTTI_OK;
    tutti_status status = extent(request, tile.rows, tile.columns, pitch, &bytes);
    if (status != TUTTI_OK)
        return status;
    if (tile.out == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: an output of this rank is NULL", request->name);
    if (tile.out < request->in + request->in_bytes && request->in < tile.out + bytes)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: in and out overlap", request->name);
    request->tiles[request->count++] = tile;
    return TUTTI_OK;
}

static tutti_status check_rank(const request *request, const char *what, int rank) {
    if (rank >= 0 && rank < request->size)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_RANGE, "%s: %s %d must be in [0, %d)", request->name, what, rank, request->size);
}

/* Where the input lies must be the same on all ranks: nobody hands addresses over. */
static tutti_status mix_place(request *request) {
    tu_memory_group *memory;
    tu_symmetric found;
    if (request->size == 1 || request->group->world->fake)
        return TUTTI_OK;
    tutti_status status = tu_memory_group_get(request->group, &memory);
    if (status == TUTTI_OK && tu_symmetric_find(memory, request->in, request->in_bytes, &found)) {
        const tutti_peers *unmapped = found.peers == NULL ? tu_symmetric_unmapped(memory, found.memory) : NULL;
        mix(request, unmapped != NULL ? unmapped->index : found.index);
        mix(request, found.offset);
    }
    return status;
}

static tutti_status submit(request *request, tutti_dtype dtype, int reduction, int root, const tutti_call *call) {
    tutti_status status = TUTTI_OK;
    bool member = request->group != TUTTI_NON_GROUP_MEMBER;
    if (reduction == TUTTI_PREMUL_SUM)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s takes no premul_sum", request->name);
    bool empty = request->elements == 0;
    /* On a device nothing is enqueued for it. */
    if (member && empty && atomic_load_explicit(&request->group->world->devices, memory_order_acquire) != NULL)
        return tu_submit_nothing(request->group, call);
    if (member)
        status = tu_named_symmetric(request->group, request->operation, "the input", request->in, request->in_bytes);
    if (status == TUTTI_OK && member && !empty)
        status = mix_place(request);
    if (status != TUTTI_OK)
        return status;
    tu_task task;
    tu_task_begin(&task, request->group, request->operation);
    task.in = empty ? NULL : request->in;
    task.out = request->count != 0 ? request->tiles[0].out : NULL;
    task.custom = empty ? run_empty : run;
    task.detail = request->hash;
    task.tiles = (tu_tiles){ request->tiles, request->count, request->in_bytes };
    task.factor = 1;
    task.info.count = request->elements;
    task.info.dtype = tu_code((int)dtype);
    task.info.reduction = tu_code(reduction);
    task.info.root = root;
    return tu_submit(&task, call);
}

static tutti_status end(request *request, tutti_status status) {
    free(request->tiles);
    return status;
}

/* ---- tile_reduce ---- */

/* All inputs become one stretch of memory, from the first to the last. */
static tutti_status span(request *request, const tutti_tile *const *in, int count) {
    const unsigned char *last = NULL;
    tutti_status status = TUTTI_OK;
    for (int i = 0; status == TUTTI_OK && i < count; i++) {
        tutti_tile tile;
        size_t bytes;
        status = read_tile(request, "an input", in[i], &tile, &bytes);
        if (status != TUTTI_OK || bytes == 0)
            continue;
        const unsigned char *data = tile.data;
        request->in = request->in == NULL || data < request->in ? data : request->in;
        last = last == NULL || data + bytes > last ? data + bytes : last;
        if (__builtin_add_overflow(request->elements, tile.rows * tile.columns, &request->elements))
            status = too_large(request);
    }
    request->in_bytes = request->in != NULL ? (size_t)(last - request->in) : 0;
    return status;
}

static tutti_status add_reduced(request *request, const tutti_tile *given, const tutti_tile *into, int root) {
    tutti_tile in, out;
    size_t bytes;
    tutti_status status = read_tile(request, "an input", given, &in, &bytes);
    if (status == TUTTI_OK)
        status = check_rank(request, "root", root);
    if (status != TUTTI_OK)
        return status;
    size_t offset = bytes != 0 ? (size_t)((const unsigned char *)in.data - request->in) : 0;
    mix(request, offset);
    mix(request, in.rows);
    mix(request, in.columns);
    mix(request, in.stride);
    mix(request, (uint64_t)root);
    if (root != request->rank || request->group == TUTTI_NON_GROUP_MEMBER)
        return TUTTI_OK;
    status = read_tile(request, "an output of this rank", into, &out, &bytes);
    if (status == TUTTI_OK && (out.rows != in.rows || out.columns != in.columns))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "%s: the output has %zu rows of %zu, and the input %zu of %zu",
                          request->name, out.rows, out.columns, in.rows, in.columns);
    if (status != TUTTI_OK)
        return status;
    return add(request, (tu_tile){ .source = -1,
                                   .in_offset = offset,
                                   .rows = in.rows,
                                   .columns = in.columns,
                                   .in_pitch = in.stride * request->element,
                                   .out_pitch = out.stride * request->element,
                                   .out = out.data });
}

static tutti_status reduce_tiles(tutti_group *group, tu_operation operation, const tutti_tile *const *in,
                                 const tutti_tile *const *out, const int *roots, int count, tutti_dtype dtype,
                                 tutti_reduction reduction, int root, const tutti_call *call) {
    request request;
    if (count < 0 || (count > 0 && (in == NULL || out == NULL || roots == NULL)))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %d tiles; in, out and roots must not be NULL",
                        tu_operation_name(operation), count);
    tutti_status status = begin(&request, group, operation, dtype, (size_t)count);
    if (status == TUTTI_OK)
        status = span(&request, in, count);
    for (int i = 0; status == TUTTI_OK && i < count; i++)
        status = add_reduced(&request, in[i], out[i], roots[i]);
    return end(&request, status == TUTTI_OK ? submit(&request, dtype, (int)reduction, root, call) : status);
}

tutti_status tutti_tile_reduce(tutti_group *group, const tutti_tile *in, const tutti_tile *out, tutti_dtype dtype,
                               tutti_reduction reduction, int root, const tutti_call *call) {
    return reduce_tiles(group, TU_OPERATION_TILE_REDUCE, &in, &out, &root, 1, dtype, reduction, root, call);
}

tutti_status tutti_multi_root_tile_reduce(tutti_group *group, const tutti_tile *const *in, const tutti_tile *const *out,
                                          const int *roots, int count, tutti_dtype dtype, tutti_reduction reduction,
                                          const tutti_call *call) {
    return reduce_tiles(group, TU_OPERATION_MULTI_ROOT_TILE_REDUCE, in, out, roots, count, dtype, reduction, -1, call);
}

/* ---- reduce_scatter_offset ---- */

/* Part [begin, end) of the matrix for `target`; `out` is used where that is this rank. */
static tutti_status add_part(request *request, const tutti_tile *in, int dim, size_t begins, size_t ends, int target,
                             void *const *out, size_t *mine) {
    size_t rows = dim == 0 ? ends - begins : in->rows, columns = dim == 0 ? in->columns : ends - begins;
    tutti_status status = check_rank(request, "target", target);
    if (status != TUTTI_OK)
        return status;
    mix(request, ends);
    mix(request, (uint64_t)target);
    request->elements += rows * columns;
    if (target != request->rank || request->group == TUTTI_NON_GROUP_MEMBER)
        return TUTTI_OK;
    if (out == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: out must not be NULL: this rank gets a part", request->name);
    return add(request, (tu_tile){ .source = -1,
                                   .in_offset = begins * (dim == 0 ? in->stride : 1) * request->element,
                                   .rows = rows,
                                   .columns = columns,
                                   .in_pitch = in->stride * request->element,
                                   .out_pitch = columns * request->element,
                                   .out = out[(*mine)++] });
}

tutti_status tutti_reduce_scatter_offset(tutti_group *group, const tutti_tile *in, int dim, const size_t *ends,
                                         const int *targets, int count, void *const *out, tutti_dtype dtype,
                                         tutti_reduction reduction, const tutti_call *call) {
    const tu_operation operation = TU_OPERATION_REDUCE_SCATTER_OFFSET;
    const char *name = tu_operation_name(operation);
    request request;
    tutti_tile tile;
    size_t begins = 0, mine = 0;
    if ((dim != 0 && dim != 1) || count < 0 || (count > 0 && ends == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: dim is %d, 0 or 1; %d parts, whose ends must not be NULL", name, dim,
                        count);
    tutti_status status = begin(&request, group, operation, dtype, (size_t)count);
    if (status == TUTTI_OK)
        status = read_tile(&request, "the input", in, &tile, &request.in_bytes);
    if (status == TUTTI_OK) {
        request.in = tile.data;
        mix(&request, (uint64_t)dim);
        mix(&request, tile.rows);
        mix(&request, tile.columns);
        mix(&request, tile.stride);
    }
    for (int i = 0; status == TUTTI_OK && i < count; i++) {
        if (ends[i] < begins || ends[i] > (dim == 0 ? tile.rows : tile.columns))
            status = tu_error(TUTTI_ERROR_RANGE, "%s: part %d is [%zu, %zu) of %zu %s", name, i, begins, ends[i],
                              dim == 0 ? tile.rows : tile.columns, dim == 0 ? "rows" : "columns");
        else
            status = add_part(&request, &tile, dim, begins, ends[i], targets != NULL ? targets[i] : i % request.size,
                              out, &mine);
        begins = ends[i];
    }
    return end(&request, status == TUTTI_OK ? submit(&request, dtype, (int)reduction, -1, call) : status);
}

/* ---- all_gather_offset ---- */

tutti_status tutti_all_gather_offset(tutti_group *group, const void *in, const size_t *counts, int count,
                                     void *const *out, tutti_dtype dtype, const tutti_call *call) {
    const tu_operation operation = TU_OPERATION_ALL_GATHER_OFFSET;
    const char *name = tu_operation_name(operation);
    request request;
    size_t offset = 0, total = 0;
    if (count < 0 || (count > 0 && (counts == NULL || out == NULL || in == NULL)))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %d parts; in, counts and out must not be NULL", name, count);
    size_t size = group == NULL || group == TUTTI_NON_GROUP_MEMBER ? 1 : (size_t)group->size;
    tutti_status status = begin(&request, group, operation, dtype, (size_t)count * size);
    for (int i = 0; status == TUTTI_OK && i < count; i++) {
        size_t bytes;
        if (__builtin_add_overflow(total, counts[i], &total) || total > (SIZE_MAX >> 1) / request.element / size ||
            __builtin_mul_overflow(total, request.element, &bytes))
            status = too_large(&request);
        mix(&request, counts[i]);
    }
    request.in = in;
    request.in_bytes = total * request.element;
    request.elements = total;
    for (int i = 0; status == TUTTI_OK && i < count && group != TUTTI_NON_GROUP_MEMBER; i++) {
        size_t bytes = counts[i] * request.element;
        for (int step = 0; status == TUTTI_OK && step < request.size; step++) {
            int source = (request.rank + step) % request.size; /* not all from the same at the same time */
            status = add(&request,
                         (tu_tile){ .source = source,
                                    .in_offset = offset,
                                    .rows = 1,
                                    .columns = counts[i],
                                    .in_pitch = bytes,
                                    .out_pitch = bytes,
                                    .out = out[i] == NULL ? NULL : (unsigned char *)out[i] + (size_t)source * bytes });
        }
        offset += bytes;
    }
    return end(&request, status == TUTTI_OK ? submit(&request, dtype, 0, -1, call) : status);
}

/* ---- all_to_all_nd ---- */

tutti_status tutti_all_to_all_nd(tutti_group *group, const void *in, void *out, size_t rows, size_t columns,
                                 size_t item, int scatter_dim, tutti_dtype dtype, const tutti_call *call) {
    const tu_operation operation = TU_OPERATION_ALL_TO_ALL_ND;
    const char *name = tu_operation_name(operation);
    request request;
    size_t size = group == NULL || group == TUTTI_NON_GROUP_MEMBER ? 1 : (size_t)group->size, width = 0, total = 0;
    if (scatter_dim != 0 && scatter_dim != 1)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: scatter_dim is %d; it must be 0 or 1", name, scatter_dim);
    if ((scatter_dim == 0 ? rows : columns) % size != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %zu %s cannot be dealt out to %zu ranks alike", name,
                        scatter_dim == 0 ? rows : columns, scatter_dim == 0 ? "rows" : "columns", size);
    tutti_status status = begin(&request, group, operation, dtype, size);
    if (status == TUTTI_OK &&
        (__builtin_mul_overflow(columns, item, &width) || __builtin_mul_overflow(width, rows, &total) ||
         total > (SIZE_MAX >> 1) / request.element))
        status = too_large(&request);
    if (status != TUTTI_OK)
        return end(&request, status);
    request.in = in;
    request.in_bytes = total * request.element;
    request.elements = total;
    mix(&request, rows);
    mix(&request, columns);
    mix(&request, (uint64_t)scatter_dim);
    size_t pitch = width * request.element, share = pitch / size; /* bytes of a row, and of a rank's part of it */
    for (size_t step = 0; status == TUTTI_OK && total != 0 && step < size && group != TUTTI_NON_GROUP_MEMBER; step++) {
        size_t source = ((size_t)request.rank + step) % size;
        tu_tile tile = { .source = (int)source, .in_pitch = pitch, .out = out };
        if (scatter_dim == 1) {
            tile.in_offset = (size_t)request.rank * share;
            tile.rows = rows;
            tile.columns = width / size;
            tile.out_pitch = share;
            tile.out += out == NULL ? 0 : source * rows * share;
        } else {
            tile.rows = rows / size;
            tile.in_offset = (size_t)request.rank * tile.rows * pitch;
            tile.columns = width;
            tile.out_pitch = pitch * size;
            tile.out += out == NULL ? 0 : source * pitch;
        }
        status = add(&request, tile);
    }
    return end(&request, status == TUTTI_OK ? submit(&request, dtype, 0, -1, call) : status);
}
