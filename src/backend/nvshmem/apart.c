/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives, messages, rows and tiles in groups with members that NVSHMEM does not map, as those of other hosts.
 *
 * Everything is made of exchanges (params.h): a message from each member to each, in one kernel. A reduction exchanges
 * parts into a stage, adds them up there in rank order by the kernels of the CUDA backend, which gives the bits of the
 * CPU, and exchanges the results. Rows whose splits are data exchange the splits first. Tiles are got by rank and
 * offset, between two exchanges that only meet.
 *
 * What the members need of each other lies in an area of each one's heap, carved when the group is prepared.
 */
#include "apart.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cuda/control.h"

#define STAGE ((uint64_t)2 << 20)
#define CHUNKS ((uint64_t)512 << 10) /* of one box, for all members together */
#define LEAST_CHUNK ((uint64_t)16 << 10)
#define MOST_BLOCKS 64              /* of an exchange: steps that are under way at one time */
#define ONE_STEP (64 << 10)         /* bytes up to which everybody sends everything to everybody */
#define WHOLE_BROADCAST (256 << 10) /* bytes up to which the root does so alone */

/* ---- launching ---- */

/* An exchange as the host describes it: what goes to and comes from each member. */
typedef struct exchange {
    tu_nvshmem_side in, out;
    uint64_t value;
    tu_nvshmem_piece to[TU_CUDA_RANKS], from[TU_CUDA_RANKS];
} exchange;

/* Lists that do not fit the arguments travel on the stream, before the kernel and behind what other streams
 * have of the group, which may still read the last ones. */
static tutti_status send_lists(tu_nvshmem_apart *apart, const tu_device_task *task, const exchange *exchange) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    size_t bytes = (size_t)apart->size * sizeof *exchange->to;
    if (apart->capture != 0)
        return nvshmem->cuda.host->error(TUTTI_ERROR_UNSUPPORTED,
                                         "%s: with more than %d ranks its parts cannot be captured into a graph",
                                         task->name, TU_CUDA_LISTED);
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = driver->cuMemcpyHtoDAsync(apart->lists, exchange->to, bytes, task->stream);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemcpyHtoDAsync(apart->lists + bytes, exchange->from, bytes, task->stream);
    tu_cuda_leave(&nvshmem->cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK
                                  : tu_cuda_error(&nvshmem->cuda, result, "sending the parts of a collective");
}

/* A kernel of this backend; `words` is part of its arguments. `listed`: what it reads from apart->lists; NULL: nothing
 * new. */
static tutti_status launch(tu_nvshmem_apart *apart, const tu_device_task *task, tu_nvshmem_kernel kernel,
                           unsigned blocks, void *args, tu_cuda_group_words *words, const exchange *listed) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    void *parameters[] = { args };
    tu_cuda_order order;
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    apart->used = true;
    status = tu_cuda_order_begin(apart->on, task->stream, apart->capture, task->timeout_ns, task->operation,
                                 task->sequence, &order);
    if (status == TUTTI_OK) {
        *words = order.words;
        status = listed != NULL ? send_lists(apart, task, listed) : TUTTI_OK;
        CUresult result = status != TUTTI_OK ? CUDA_SUCCESS
                                             : nvshmem->cuda.driver.cuLaunchKernel(nvshmem->kernels[kernel], blocks, 1,
                                                                                   1, TU_CUDA_THREADS, 1, 1, 0,
                                                                                   task->stream, parameters, NULL);
        if (result != CUDA_SUCCESS)
            status = tu_cuda_error(&nvshmem->cuda, result, task->name);
        tu_cuda_order_end(&order, status == TUTTI_OK ? blocks : 0);
    }
    tu_cuda_leave(&nvshmem->cuda);
    return status;
}

/* One of the CUDA backend's. */
static tutti_status launch_local(tu_nvshmem_apart *apart, const tu_device_task *task, tu_cuda_kernel kernel,
                                 uint64_t bytes, void *args, tu_cuda_group_words *words) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    uint64_t wanted = (bytes + TU_CUDA_THREADS * 16 - 1) / (TU_CUDA_THREADS * 16);
    unsigned blocks = (unsigned)(wanted < 1 ? 1 : wanted > TU_CUDA_BLOCKS ? TU_CUDA_BLOCKS : wanted);
    tu_cuda_order order;
    tutti_status status = tu_cuda_order_begin(apart->on, task->stream, apart->capture, task->timeout_ns,
                                              task->operation, task->sequence, &order);
    if (status != TUTTI_OK)
        return status;
    *words = order.words;
    status = tu_cuda_launch(&nvshmem->cuda, nvshmem->device, kernel, blocks, TU_CUDA_THREADS, args, task->stream,
                            TU_CUDA_APART);
    tu_cuda_order_end(&order, status == TUTTI_OK ? blocks : 0);
    return status;
}

/* ---- exchanges ---- */

static tu_nvshmem_exchange_args arguments(const tu_nvshmem_apart *apart, const tu_device_task *task) {
    return (tu_nvshmem_exchange_args){ .members = apart->members,
                                       .own = (uint64_t)(uintptr_t)apart->area,
                                       .boxes = apart->collective,
                                       .chunk = apart->chunk,
                                       .timeout_ns = (uint64_t)task->timeout_ns,
                                       .sequence = task->sequence,
                                       .signature = task->signature,
                                       .operation = task->operation,
                                       .rank = apart->rank,
                                       .size = apart->size,
                                       .peer = -1 };
}

static unsigned blocks_of(const tu_nvshmem_apart *apart) {
    return (unsigned)(apart->size < MOST_BLOCKS ? apart->size : MOST_BLOCKS);
}

/* Whether everything that goes to others lies in the heap as one piece each: then it is put from there. */
static bool lies_in_heap(const tu_nvshmem_apart *apart, const exchange *exchange) {
    bool inside = exchange->in.base != 0 && exchange->in.row == 0;
    for (int i = 0; i < apart->size && inside; i++)
        inside = exchange->to[i].bytes == 0 ||
                 tu_nvshmem_in_heap(apart->nvshmem, (char *)(uintptr_t)exchange->in.base + exchange->to[i].offset,
                                    exchange->to[i].bytes);
    return inside;
}

static tutti_status run_exchange(tu_nvshmem_apart *apart, const tu_device_task *task, const exchange *exchange) {
    tu_nvshmem_exchange_args args = arguments(apart, task);
    bool listed = apart->size > TU_CUDA_LISTED;
    args.in = exchange->in;
    args.out = exchange->out;
    args.value = exchange->value;
    args.pieces = 1;
    /* What arrives may come over what is still to be put, where both are one buffer. */
    args.in_heap = exchange->in.base != exchange->out.base && lies_in_heap(apart, exchange);
    if (listed) {
        args.more = apart->lists;
    } else {
        memcpy(args.list[0], exchange->to, (size_t)apart->size * sizeof *exchange->to);
        memcpy(args.list[1], exchange->from, (size_t)apart->size * sizeof *exchange->from);
    }
    return launch(apart, task, TU_NVSHMEM_EXCHANGE, blocks_of(apart), &args, &args.group, listed ? exchange : NULL);
}

/* All meet. */
static tutti_status run_barrier(tu_nvshmem_apart *apart, const tu_device_task *task) {
    tu_nvshmem_exchange_args args = arguments(apart, task);
    return launch(apart, task, TU_NVSHMEM_EXCHANGE, blocks_of(apart), &args, &args.group, NULL);
}

/* ---- in place ---- */

/* Whether nothing that arrives comes over what is still to go to another member, where both are one buffer. Steps of an
 * exchange are not ordered among each other; within one a chunk is sent before the same one is taken. */
static bool keeps_apart(const tu_nvshmem_apart *apart, const exchange *exchange) {
    uint64_t end = 0;
    bool ascending = true, arrives = false;
    for (int i = 0; i < apart->size; i++) {
        const tu_nvshmem_piece *to = &exchange->to[i], *from = &exchange->from[i];
        if (from->bytes > 0 && (from->bytes != to->bytes || from->offset != to->offset))
            return false;
        arrives = arrives || (from->bytes > 0 && i != apart->rank);
        ascending = ascending && (to->bytes == 0 || to->offset >= end);
        end = to->bytes > 0 ? to->offset + to->bytes : end;
    }
    return ascending || !arrives;
}

static tutti_status copy_bytes(tu_nvshmem_apart *apart, const tu_device_task *task, uint64_t to, uint64_t from,
                               uint64_t bytes) {
    tu_cuda_tiles_args args = { .timeout_ns = (uint64_t)task->timeout_ns, .count = 1 };
    args.tiles[0] = (tu_cuda_tile){ .to = to, .from = from, .rows = 1, .bytes = bytes };
    return launch_local(apart, task, TU_CUDA_TILE_COPIES, bytes, &args, &args.group);
}

/* The input is sent from a copy of it. */
static tutti_status set_aside(tu_nvshmem_apart *apart, const tu_device_task *task, exchange *exchange) {
    uint64_t bytes = 0, aside;
    for (int i = 0; i < apart->size; i++) {
        uint64_t end = exchange->to[i].bytes > 0 ? exchange->to[i].offset + exchange->to[i].bytes : 0;
        bytes = end > bytes ? end : bytes;
    }
    if (bytes == 0)
        return TUTTI_OK;
    tutti_status status = tu_cuda_aside_get(apart->on, bytes, apart->capture, task->name, &aside);
    if (status == TUTTI_OK)
        status = copy_bytes(apart, task, aside, exchange->in.base, bytes);
    exchange->in.base = aside;
    return status;
}

/* ---- moves ---- */

/* Part `part` of `bytes` bytes in `size` parts, each of which begins at a multiple of 16. */
static tu_nvshmem_piece cut(uint64_t bytes, int part, int size) {
    uint64_t units = (bytes + 15) / 16, begin = units * (uint64_t)part / (uint64_t)size * 16,
             end = units * ((uint64_t)part + 1) / (uint64_t)size * 16;
    begin = begin < bytes ? begin : bytes;
    end = end < bytes ? end : bytes;
    return (tu_nvshmem_piece){ begin, end - begin };
}

/* The root hands a part of it to each, and these hand their parts to each other: nobody sends more than it is long. */
static tutti_status run_long_broadcast(tu_nvshmem_apart *apart, const tu_device_task *task, exchange *exchange,
                                       int root, uint64_t bytes) {
    bool is_root = root == apart->rank;
    uint64_t from = is_root ? task->send_offset[apart->rank] : 0, to = task->receive_offset[root];
    exchange->in = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->in + from };
    exchange->out = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->out + to };
    for (int i = 0; i < apart->size; i++) {
        exchange->to[i] = is_root ? cut(bytes, i, apart->size) : (tu_nvshmem_piece){ 0, 0 };
        exchange->from[i] = i == root ? cut(bytes, apart->rank, apart->size) : (tu_nvshmem_piece){ 0, 0 };
    }
    if (is_root) /* it has all of it */
        exchange->to[root] = exchange->from[root] = (tu_nvshmem_piece){ 0, bytes };
    tutti_status status = run_exchange(apart, task, exchange);
    exchange->in = exchange->out;
    for (int i = 0; i < apart->size; i++) {
        bool gets = i != root && i != apart->rank, gives = !is_root && i != apart->rank;
        exchange->to[i] = gets ? cut(bytes, apart->rank, apart->size) : (tu_nvshmem_piece){ 0, 0 };
        exchange->from[i] = gives ? cut(bytes, i, apart->size) : (tu_nvshmem_piece){ 0, 0 };
    }
    return status == TUTTI_OK ? run_exchange(apart, task, exchange) : status;
}

static tutti_status run_move(tu_nvshmem_apart *apart, tu_device_task *task, exchange *exchange) {
    const tu_backend_host *host = apart->nvshmem->cuda.host;
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    if (task->operation == host->operation_find("broadcast")) {
        int root = 0;
        while (root + 1 < apart->size && task->receive_bytes[root] == 0)
            root++;
        if (task->receive_bytes[root] > WHOLE_BROADCAST && apart->size > 2)
            return run_long_broadcast(apart, task, exchange, root, task->receive_bytes[root]);
    }
    exchange->in = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->in };
    exchange->out = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->out };
    for (int i = 0; i < apart->size; i++) {
        exchange->to[i] = (tu_nvshmem_piece){ task->send_offset[i], task->send_bytes[i] };
        exchange->from[i] = (tu_nvshmem_piece){ task->receive_offset[i], task->receive_bytes[i] };
    }
    tutti_status status = TUTTI_OK;
    if (task->in == task->out && !keeps_apart(apart, exchange))
        status = set_aside(apart, task, exchange);
    return status == TUTTI_OK ? run_exchange(apart, task, exchange) : status;
}

/* ---- reductions ---- */

/* Complex numbers are reduced by their real view. */
static tutti_dtype real_type(const tu_device_task *task) {
    return task->dtype == TUTTI_C64 ? TUTTI_F32 : task->dtype == TUTTI_C128 ? TUTTI_F64 : task->dtype;
}

/* Bytes of an element as the caller counts them, and of a real one. */
static uint64_t unit_of(const tu_device_task *task) {
    static const uint64_t sizes[] = { 0, 8, 4, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16 };
    return sizes[task->dtype];
}
static uint64_t real_unit_of(const tu_device_task *task) {
    return unit_of(task) / (task->dtype == TUTTI_C64 || task->dtype == TUTTI_C128 ? 2 : 1);
}

/* What lies in the stage, a share of each member, is added up in rank order: `bytes` of each; or rows of `row` bytes,
 * which go to rows `pitch` bytes apart. */
static tutti_status fold(tu_nvshmem_apart *apart, const tu_device_task *task, uint64_t out, uint64_t bytes,
                         uint64_t row, uint64_t pitch) {
    uint64_t unit = real_unit_of(task);
    tu_cuda_reduce_args args = { .meeting = { .timeout_ns = (uint64_t)task->timeout_ns,
                                              .sequence = task->sequence,
                                              .operation = task->operation,
                                              .rank = apart->rank,
                                              .size = apart->size },
                                 .out = out,
                                 .source_base = (uint64_t)(uintptr_t)apart->area + apart->stage,
                                 .source_stride = apart->share,
                                 .count = bytes / unit,
                                 .row = row / unit,
                                 .in_pitch = row / unit,
                                 .out_pitch = pitch / unit,
                                 .reduction = task->reduction,
                                 .mode = TU_CUDA_LOCAL,
                                 .more = task->reduction == TUTTI_PREMUL_SUM ? apart->factors : 0 };
    if (bytes == 0)
        return TUTTI_OK;
    return launch_local(apart, task, (tu_cuda_kernel)(TU_CUDA_REDUCE_F64 + (int)real_type(task) - (int)TUTTI_F64),
                        bytes, &args, &args.meeting.group);
}

/* Everybody's factor to everybody. */
static tutti_status exchange_factors(tu_nvshmem_apart *apart, const tu_device_task *task, exchange *exchange) {
    *exchange = (struct exchange){ .out = { .base = apart->factors } };
    memcpy(&exchange->value, &task->factor, sizeof task->factor);
    for (int i = 0; i < apart->size; i++) {
        exchange->to[i] = (tu_nvshmem_piece){ 0, sizeof task->factor };
        exchange->from[i] = (tu_nvshmem_piece){ (uint64_t)i * sizeof task->factor, sizeof task->factor };
    }
    return run_exchange(apart, task, exchange);
}

/* The stage gets bytes [skip, skip + bytes) of what each member has for this rank. */
static void to_stage(const tu_nvshmem_apart *apart, exchange *exchange, uint64_t bytes) {
    exchange->out = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)apart->area + apart->stage };
    for (int i = 0; i < apart->size; i++)
        exchange->from[i] = (tu_nvshmem_piece){ (uint64_t)i * apart->share, bytes };
}

/* Everything goes to everybody who wants the result, or to the root. */
static tutti_status reduce_whole(tu_nvshmem_apart *apart, const tu_device_task *task, exchange *exchange,
                                 uint64_t bytes) {
    bool wanted = task->root < 0 || task->root == apart->rank;
    tutti_status status = TUTTI_OK;
    exchange->in = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->in };
    for (uint64_t skip = 0; status == TUTTI_OK && skip < bytes; skip += apart->share) {
        uint64_t left = bytes - skip, now = left < apart->share ? left : apart->share;
        to_stage(apart, exchange, wanted ? now : 0);
        for (int i = 0; i < apart->size; i++)
            exchange->to[i] = (tu_nvshmem_piece){ skip, task->root < 0 || task->root == i ? now : 0 };
        status = run_exchange(apart, task, exchange);
        if (status == TUTTI_OK && wanted)
            status = fold(apart, task, (uint64_t)(uintptr_t)task->out + skip, now, 0, 0);
    }
    return status;
}

/* Rank r gets part r from everybody, and hands the result to everybody. */
static tutti_status reduce_parts(tu_nvshmem_apart *apart, const tu_device_task *task, exchange *exchange,
                                 uint64_t bytes) {
    uint64_t in = (uint64_t)(uintptr_t)task->in, out = (uint64_t)(uintptr_t)task->out;
    uint64_t round = apart->share * (uint64_t)apart->size;
    tutti_status status = TUTTI_OK;
    for (uint64_t skip = 0; status == TUTTI_OK && skip < bytes; skip += round) {
        uint64_t now = bytes - skip < round ? bytes - skip : round;
        tu_nvshmem_piece mine = cut(now, apart->rank, apart->size);
        exchange->in = (tu_nvshmem_side){ .base = in + skip };
        to_stage(apart, exchange, mine.bytes);
        for (int i = 0; i < apart->size; i++)
            exchange->to[i] = cut(now, i, apart->size);
        status = run_exchange(apart, task, exchange);
        if (status == TUTTI_OK)
            status = fold(apart, task, out + skip + mine.offset, mine.bytes, 0, 0);
        exchange->in = exchange->out = (tu_nvshmem_side){ .base = out + skip };
        for (int i = 0; i < apart->size; i++) {
            exchange->to[i] = i == apart->rank ? (tu_nvshmem_piece){ 0, 0 } : mine;
            exchange->from[i] = i == apart->rank ? (tu_nvshmem_piece){ 0, 0 } : cut(now, i, apart->size);
        }
        if (status == TUTTI_OK)
            status = run_exchange(apart, task, exchange);
    }
    return status;
}

static tutti_status run_reduce(tu_nvshmem_apart *apart, tu_device_task *task, exchange *exchange) {
    uint64_t bytes = task->count * unit_of(task);
    bool whole = task->root >= 0 || task->algorithm == TUTTI_ALGORITHM_ONE_SHOT ||
                 task->algorithm == TUTTI_ALGORITHM_INLINE ||
                 (task->algorithm == TUTTI_ALGORITHM_AUTO && bytes <= ONE_STEP);
    task->ran = whole ? TUTTI_ALGORITHM_ONE_SHOT : TUTTI_ALGORITHM_TWO_SHOT;
    return whole ? reduce_whole(apart, task, exchange, bytes) : reduce_parts(apart, task, exchange, bytes);
}

/* Bytes that rank r's part of a reduce_scatter has, and where it begins. */
static tu_nvshmem_piece part_of(const tu_nvshmem_apart *apart, const tu_device_task *task, int member) {
    uint64_t unit = unit_of(task), size = (uint64_t)apart->size;
    if (task->row != 0) /* columns of a matrix */
        return (tu_nvshmem_piece){ task->row / size * unit * (uint64_t)member, task->count / size * unit };
    return (tu_nvshmem_piece){ task->parts[member] * unit, (task->parts[member + 1] - task->parts[member]) * unit };
}

static tutti_status run_scatter(tu_nvshmem_apart *apart, tu_device_task *task, exchange *exchange) {
    uint64_t longest = 0, unit = unit_of(task), mine = part_of(apart, task, apart->rank).bytes;
    uint64_t out = (uint64_t)(uintptr_t)task->out;
    /* Of whole parts a round writes over what it, or one before it, has sent; of columns it does not. */
    bool waits = task->row != 0 && tu_cuda_overlaps(task->in, task->count * unit, task->out, mine);
    tutti_status status = waits ? tu_cuda_aside_get(apart->on, mine, apart->capture, task->name, &out) : TUTTI_OK;
    task->ran = TUTTI_ALGORITHM_TWO_SHOT;
    for (int i = 0; i < apart->size; i++) {
        uint64_t bytes = part_of(apart, task, i).bytes;
        longest = bytes > longest ? bytes : longest;
    }
    for (uint64_t skip = 0; status == TUTTI_OK && skip < longest; skip += apart->share) {
        uint64_t left = mine > skip ? mine - skip : 0, now = left < apart->share ? left : apart->share;
        exchange->in = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->in };
        if (task->row != 0)
            exchange->in = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->in,
                                              .row = task->row / (uint64_t)apart->size * unit,
                                              .pitch = task->row * unit,
                                              .skip = skip };
        to_stage(apart, exchange, now);
        for (int i = 0; i < apart->size; i++) {
            tu_nvshmem_piece part = part_of(apart, task, i);
            uint64_t rest = part.bytes > skip ? part.bytes - skip : 0;
            exchange->to[i] = (tu_nvshmem_piece){ part.offset + (task->row != 0 ? 0 : skip),
                                                  rest < apart->share ? rest : apart->share };
        }
        status = run_exchange(apart, task, exchange);
        if (status == TUTTI_OK)
            status = fold(apart, task, out + skip, now, 0, 0);
    }
    return waits && status == TUTTI_OK ? copy_bytes(apart, task, (uint64_t)(uintptr_t)task->out, out, mine) : status;
}

/* ---- rows whose splits are data ---- */

/* What everybody has for everybody, expert by expert. */
static tutti_status exchange_splits(tu_nvshmem_apart *apart, const tu_device_task *task, exchange *exchange) {
    uint64_t experts = (uint64_t)task->experts, size = (uint64_t)apart->size, bytes = experts * sizeof(int64_t);
    bool by_expert = task->form == 2; /* those of one member lie apart */
    exchange->in = (tu_nvshmem_side){ .base = (uint64_t)(uintptr_t)task->in_splits,
                                      .row = by_expert ? sizeof(int64_t) : 0,
                                      .pitch = size * sizeof(int64_t) };
    exchange->out = (tu_nvshmem_side){ .base = apart->told };
    for (int i = 0; i < apart->size; i++) {
        exchange->to[i] = (tu_nvshmem_piece){ (uint64_t)i * (by_expert ? sizeof(int64_t) : bytes), bytes };
        exchange->from[i] = (tu_nvshmem_piece){ (uint64_t)i * bytes, bytes };
    }
    return run_exchange(apart, task, exchange);
}

static tutti_status plan_rows(tu_nvshmem_apart *apart, const tu_device_task *task) {
    tu_nvshmem_plan_args args = { .timeout_ns = (uint64_t)task->timeout_ns,
                                  .sequence = task->sequence,
                                  .in_splits = (uint64_t)(uintptr_t)task->in_splits,
                                  .out_splits = (uint64_t)(uintptr_t)task->out_splits,
                                  .told = apart->told,
                                  .scratch = apart->scratch,
                                  .list = apart->lists,
                                  .row_bytes = task->row_bytes,
                                  .in_rows = task->in_rows,
                                  .out_rows = task->out_rows,
                                  .major_align = task->major_align,
                                  .operation = task->operation,
                                  .experts = task->experts,
                                  .form = task->form,
                                  .rank = apart->rank,
                                  .size = apart->size };
    return launch(apart, task, TU_NVSHMEM_PLAN, 1, &args, &args.group, NULL);
}

static tutti_status run_rows(tu_nvshmem_apart *apart, tu_device_task *task, exchange *exchange) {
    if ((int64_t)apart->size * task->experts > TU_CUDA_SLOTS)
        return apart->nvshmem->cuda.host->error(TUTTI_ERROR_LIMIT,
                                                "%s: %d ranks with %d experts each are more than %d parts", task->name,
                                                apart->size, task->experts, TU_CUDA_SLOTS);
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    tutti_status status = exchange_splits(apart, task, exchange);
    if (status == TUTTI_OK)
        status = plan_rows(apart, task);
    tu_nvshmem_exchange_args args = arguments(apart, task);
    args.in.base = (uint64_t)(uintptr_t)task->in;
    args.out.base = (uint64_t)(uintptr_t)task->out;
    args.pieces = task->experts;
    args.more = apart->lists;
    return status == TUTTI_OK ? launch(apart, task, TU_NVSHMEM_EXCHANGE, blocks_of(apart), &args, &args.group, NULL)
                              : status;
}

/* ---- tiles ---- */

/* Gets rows of `bytes` bytes from one member, or from all (-1), into the stage: a share of each. */
static tutti_status take(tu_nvshmem_apart *apart, const tu_device_task *task, int source, uint64_t offset,
                         uint64_t rows, uint64_t bytes, uint64_t pitch) {
    const tu_nvshmem_map *map = task->in_place.map->handle;
    int first = source < 0 ? 0 : source, end = source < 0 ? apart->size : source + 1;
    tutti_status status = TUTTI_OK;
    for (int begin = first; status == TUTTI_OK && begin < end; begin += TU_CUDA_LISTED) {
        tu_nvshmem_take_args args = { .timeout_ns = (uint64_t)task->timeout_ns,
                                      .to = (uint64_t)(uintptr_t)apart->area + apart->stage +
                                            (uint64_t)(begin - first) * apart->share,
                                      .stride = apart->share,
                                      .rows = rows,
                                      .bytes = bytes,
                                      .pitch = pitch };
        for (; args.count < TU_CUDA_LISTED && begin + (int)args.count < end; args.count++) {
            int member = begin + (int)args.count;
            args.from[args.count] =
                (tu_nvshmem_member){ .place = (uint64_t)(uintptr_t)map->places[member] + task->in_place.offset + offset,
                                     .pe = map->pes[member] };
        }
        uint64_t wanted = rows * args.count;
        status = launch(apart, task, TU_NVSHMEM_TAKE, (unsigned)(wanted < MOST_BLOCKS ? wanted : MOST_BLOCKS), &args,
                        &args.group, NULL);
    }
    return status;
}

static tutti_status copy_tile(tu_nvshmem_apart *apart, const tu_device_task *task, uint64_t out, uint64_t rows,
                              uint64_t bytes, uint64_t pitch) {
    tu_cuda_tiles_args args = { .timeout_ns = (uint64_t)task->timeout_ns, .count = 1 };
    args.tiles[0] = (tu_cuda_tile){ .to = out,
                                    .from = (uint64_t)(uintptr_t)apart->area + apart->stage,
                                    .rows = rows,
                                    .bytes = bytes,
                                    .to_pitch = pitch,
                                    .from_pitch = bytes };
    return launch_local(apart, task, TU_CUDA_TILE_COPIES, rows * bytes, &args, &args.group);
}

/* As many whole rows at a time as a share holds, or as much of one. */
static tutti_status run_tile(tu_nvshmem_apart *apart, const tu_device_task *task, const tu_device_tile *tile) {
    uint64_t width = tile->columns * task->element_bytes;
    uint64_t bytes = width < apart->share ? width : apart->share / task->element_bytes * task->element_bytes;
    uint64_t rows = bytes > 0 ? apart->share / bytes : 0;
    tutti_status status = TUTTI_OK;
    for (uint64_t row = 0; status == TUTTI_OK && width > 0 && row < tile->rows; row += rows)
        for (uint64_t at = 0; status == TUTTI_OK && at < width; at += bytes) {
            uint64_t now = width - at < bytes ? width - at : bytes;
            uint64_t count = tile->rows - row < rows ? tile->rows - row : rows;
            uint64_t out = (uint64_t)(uintptr_t)tile->out + row * tile->out_pitch + at;
            count = bytes < width ? 1 : count;
            status = take(apart, task, tile->source, tile->in_offset + row * tile->in_pitch + at, count, now,
                          tile->in_pitch);
            if (status == TUTTI_OK && tile->source >= 0)
                status = copy_tile(apart, task, out, count, now, tile->out_pitch);
            else if (status == TUTTI_OK)
                status = fold(apart, task, out, count * now, now, tile->out_pitch);
        }
    return status;
}

static tutti_status run_tiles(tu_nvshmem_apart *apart, tu_device_task *task) {
    const tu_backend_host *host = apart->nvshmem->cuda.host;
    if (task->in_place.map == NULL || !tu_nvshmem_in_heap(apart->nvshmem, task->in, 1))
        return host->error(TUTTI_ERROR_ARGUMENT,
                           "%s: the input must be symmetric memory of the backend nvshmem, which other ranks get it "
                           "from",
                           task->name);
    task->ran = TUTTI_ALGORITHM_ONE_SHOT;
    tutti_status status = run_barrier(apart, task);
    for (size_t i = 0; status == TUTTI_OK && i < task->tile_count; i++) {
        tu_device_tile tile;
        task->tile(task, i, &tile);
        status = run_tile(apart, task, &tile);
    }
    return status == TUTTI_OK ? run_barrier(apart, task) : status;
}

/* ---- messages ---- */

static tutti_status run_message(tu_nvshmem_apart *apart, const tu_device_task *task) {
    tu_nvshmem_exchange_args args = arguments(apart, task);
    bool is_send = task->shape == TU_DEVICE_SEND;
    args.boxes = apart->message;
    args.signature = (uint32_t)task->tag * UINT32_C(0x9e3779b9) + 1; /* both sides have the same, unlike the task's */
    args.peer = task->root;
    args.is_send = is_send;
    args.pieces = 1;
    tu_nvshmem_side *bytes = is_send ? &args.in : &args.out;
    bytes->base = (uint64_t)(uintptr_t)(is_send ? task->in : task->out);
    bytes->row = task->block_bytes;
    bytes->pitch = task->stride_bytes;
    args.list[is_send ? 0 : 1][0] = (tu_nvshmem_piece){ 0, task->count };
    return launch(apart, task, TU_NVSHMEM_EXCHANGE, 1, &args, &args.group, NULL);
}

/* ---- running ---- */

static tutti_status run_shape(tu_nvshmem_apart *apart, tu_device_task *task, exchange *exchange) {
    if (task->reduction == TUTTI_PREMUL_SUM &&
        (task->shape == TU_DEVICE_REDUCE || task->shape == TU_DEVICE_REDUCE_SCATTER)) {
        tutti_status status = exchange_factors(apart, task, exchange);
        if (status != TUTTI_OK)
            return status;
    }
    switch (task->shape) {
    case TU_DEVICE_BARRIER:
        return run_barrier(apart, task);
    case TU_DEVICE_REDUCE:
        return run_reduce(apart, task, exchange);
    case TU_DEVICE_REDUCE_SCATTER:
        return run_scatter(apart, task, exchange);
    case TU_DEVICE_MOVE:
        return run_move(apart, task, exchange);
    case TU_DEVICE_VDEV:
        return run_rows(apart, task, exchange);
    case TU_DEVICE_TILES:
        return run_tiles(apart, task);
    case TU_DEVICE_SEND:
    case TU_DEVICE_RECEIVE:
        return run_message(apart, task);
    }
    return apart->nvshmem->cuda.host->error(TUTTI_ERROR_UNSUPPORTED, "%s does not run between hosts", task->name);
}

tutti_status tu_nvshmem_apart_run(tu_nvshmem_apart *apart, tu_device_task *task) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    tutti_status status = tu_cuda_group_check(apart->on);
    if (status != TUTTI_OK)
        return status;
    exchange *exchange = calloc(1, sizeof *exchange);
    if (exchange == NULL)
        return nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for %s", task->name);
    tu_cuda_watch(&nvshmem->cuda); /* before anything waits */
    status = tu_cuda_turn_take(&nvshmem->cuda, &apart->turn, task->timeout_ns);
    if (status == TUTTI_OK) {
        apart->capture = tu_cuda_capture(&nvshmem->cuda, task->stream);
        status = run_shape(apart, task, exchange);
        tu_cuda_turn_give(&apart->turn);
    }
    free(exchange);
    return status;
}

tutti_status tu_nvshmem_apart_check(tu_nvshmem_apart *apart) {
    return tu_cuda_group_check(apart->on);
}

/* ---- life ---- */

static uint64_t place(uint64_t *end, uint64_t bytes) {
    uint64_t begin = (*end + 127) & ~UINT64_C(127);
    *end = begin + bytes;
    return begin;
}

static tu_nvshmem_boxes lay_out_boxes(uint64_t size, uint64_t chunk, uint64_t *end) {
    return (tu_nvshmem_boxes){ .arrived = place(end, size * 2 * sizeof(uint64_t)),
                               .taken = place(end, size * 2 * sizeof(uint64_t)),
                               .inbox = place(end, size * 2 * chunk),
                               .outbox = place(end, size * 2 * chunk) };
}

/* The same on all members. */
static void lay_out(tu_nvshmem_apart *apart) {
    uint64_t size = (uint64_t)apart->size, end = 0;
    apart->chunk = CHUNKS / size / 4096 * 4096;
    if (apart->chunk < LEAST_CHUNK)
        apart->chunk = LEAST_CHUNK;
    apart->share = STAGE / size / 4096 * 4096;
    apart->collective = lay_out_boxes(size, apart->chunk, &end);
    apart->message = lay_out_boxes(size, apart->chunk, &end);
    apart->stage = place(&end, size * apart->share);
    apart->bytes = (end + 511) / 512 * 512;
}

/* What this rank alone uses, on the device. */
static CUresult make_own(tu_nvshmem_apart *apart) {
    const tu_cuda_driver *driver = &apart->nvshmem->cuda.driver;
    uint64_t size = (uint64_t)apart->size, end = 0;
    uint64_t members = place(&end, size * sizeof(tu_nvshmem_member)), counters = place(&end, size * 2 * 4),
             message_counters = place(&end, size * 2 * 4), factors = place(&end, size * sizeof(double)),
             told = place(&end, TU_CUDA_SLOTS * sizeof(int64_t)),
             scratch = place(&end, TU_CUDA_SLOTS * 2 * sizeof(int64_t)),
             lists = place(&end, (uint64_t)TU_CUDA_SLOTS * 2 * sizeof(tu_nvshmem_piece));
    CUresult result = driver->cuMemAlloc(&apart->own, end);
    if (result != CUDA_SUCCESS)
        return result;
    apart->members = apart->own + members;
    apart->collective.counters = apart->own + counters;
    apart->message.counters = apart->own + message_counters;
    apart->factors = apart->own + factors;
    apart->told = apart->own + told;
    apart->scratch = apart->own + scratch;
    apart->lists = apart->own + lists;
    result = driver->cuMemsetD8Async(apart->own, 0, end, apart->nvshmem->device->stream);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)apart->area, 0, apart->bytes,
                                         apart->nvshmem->device->stream);
    return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(apart->nvshmem->device->stream) : result;
}

/* What this rank can do before it hears of the others. */
static tutti_status begin(tu_nvshmem_apart *apart) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    tutti_status status = tu_cuda_group_get(&nvshmem->cuda, apart->group, nvshmem->device_index, &apart->on);
    if (status != TUTTI_OK)
        return status;
    status = tu_nvshmem_obtain(nvshmem, apart->bytes, 512, TU_NVSHMEM_LAST, "collectives of a group", &apart->slab,
                               &apart->offset);
    if (status != TUTTI_OK)
        return status;
    apart->area = nvshmem->slabs[apart->slab].base + apart->offset;
    status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = make_own(apart);
    tu_cuda_leave(&nvshmem->cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(&nvshmem->cuda, result, "preparing a group's exchanges");
}

/* Where a member's area lies. */
typedef struct place_of_area {
    int32_t pe;
    int32_t slab;
    uint64_t offset;
} place_of_area;

static tutti_status tell_members(tu_nvshmem_apart *apart, const place_of_area *all) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    size_t bytes = (size_t)apart->size * sizeof(tu_nvshmem_member);
    tu_nvshmem_member *members = calloc((size_t)apart->size, sizeof *members);
    if (members == NULL)
        return nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for a group of %d ranks", apart->size);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < apart->size && status == TUTTI_OK; i++) {
        int known = tu_nvshmem_slab_count(nvshmem);
        if (all[i].slab < 0 || all[i].slab >= known || all[i].offset > nvshmem->slabs[all[i].slab].bytes) {
            status = nvshmem->cuda.host->error(TUTTI_ERROR_PROTOCOL,
                                               "member %d says that its area lies in slab %d: this rank has %d", i,
                                               all[i].slab, known);
            nvshmem->cuda.host->error_at_fault(i);
        } else {
            char *at = nvshmem->slabs[all[i].slab].base + all[i].offset;
            members[i] = (tu_nvshmem_member){ .place = (uint64_t)(uintptr_t)at, .pe = all[i].pe };
        }
    }
    if (status == TUTTI_OK)
        status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status == TUTTI_OK) {
        CUresult result =
            nvshmem->cuda.driver.cuMemcpyHtoDAsync(apart->members, members, bytes, nvshmem->device->stream);
        if (result == CUDA_SUCCESS)
            result = nvshmem->cuda.driver.cuStreamSynchronize(nvshmem->device->stream);
        tu_cuda_leave(&nvshmem->cuda);
        if (result != CUDA_SUCCESS)
            status = tu_cuda_error(&nvshmem->cuda, result, "a table of members");
    }
    free(members);
    return status;
}

#define LAST_WORDS INT64_C(2000000000) /* ns that the others get to tell that they have taken the last chunks */

/* Whether the members have taken all that this rank sent by these boxes; `words` has room for four of each. */
static bool were_taken(const tu_nvshmem_apart *apart, const tu_nvshmem_boxes *boxes, uint64_t *words) {
    const tu_cuda_driver *driver = &apart->nvshmem->cuda.driver;
    CUstream stream = apart->nvshmem->device->stream;
    size_t size = (size_t)apart->size;
    uint32_t *counters = (uint32_t *)(words + 2 * size);
    CUdeviceptr taken = (CUdeviceptr)(uintptr_t)apart->area + boxes->taken;
    if (driver->cuMemcpyDtoHAsync(counters, boxes->counters, size * 2 * sizeof *counters, stream) != CUDA_SUCCESS ||
        driver->cuMemcpyDtoHAsync(words, taken, size * 2 * sizeof *words, stream) != CUDA_SUCCESS ||
        driver->cuStreamSynchronize(stream) != CUDA_SUCCESS)
        return false;
    bool all = true;
    for (size_t i = 0; i < size && all; i++)
        all = (uint32_t)words[2 * i + (counters[2 * i] & 1)] == counters[2 * i];
    return all;
}

/* Whether nobody reads or writes this rank's area any more: what it sent has been taken from there, and the others have
 * told so. After a failure nobody knows. Nothing of this rank's runs any more, and the context is entered. */
static bool is_over(const tu_nvshmem_apart *apart) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    const tu_backend_host *host = nvshmem->cuda.host;
    const _Atomic uint64_t *state = host->group_state(apart->group);
    uint64_t *words = calloc((size_t)apart->size, 4 * sizeof *words);
    int64_t until = host->now() + LAST_WORDS;
    bool over = false, failed = nvshmem->lost || words == NULL ||
                                __atomic_load_n(&apart->on->told->fault.code, __ATOMIC_ACQUIRE) != 0;
    if (!failed)
        nvshmem->library->nvshmemx_quiet_on_stream(
            nvshmem->device->stream); /* this rank's own words are on their way */
    while (!failed && !over && host->now() < until) {
        over = were_taken(apart, &apart->collective, words) && were_taken(apart, &apart->message, words);
        failed = state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0;
    }
    free(words);
    return over;
}

void tu_nvshmem_apart_end(tu_nvshmem_apart *apart) {
    tu_nvshmem *nvshmem = apart->nvshmem;
    bool over = false;
    if (apart->area != NULL && tu_cuda_enter(&nvshmem->cuda, nvshmem->device) == TUTTI_OK) {
        bool idle = nvshmem->cuda.driver.cuCtxSynchronize() == CUDA_SUCCESS; /* nothing here uses it any more */
        over = idle && (!apart->used || is_over(apart));
        if (idle && apart->own != 0)
            nvshmem->cuda.driver.cuMemFree(apart->own);
        tu_cuda_leave(&nvshmem->cuda);
    }
    if (over) { /* else somebody may still write to it: it is not given out again in this world */
        pthread_mutex_lock(&nvshmem->heap_lock);
        tu_nvshmem_give_back(nvshmem, apart->slab, apart->offset, apart->bytes);
        pthread_mutex_unlock(&nvshmem->heap_lock);
    }
    free(apart);
}

tutti_status tu_nvshmem_apart_make(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, tu_nvshmem_apart **made) {
    const tu_backend_host *host = nvshmem->cuda.host;
    tu_nvshmem_apart *apart = calloc(1, sizeof *apart);
    size_t size = (size_t)host->group_size(group);
    place_of_area mine = { .pe = nvshmem->pes[nvshmem->rank] }, *all = calloc(size, sizeof *all);
    tutti_status status = TUTTI_OK;
    if (apart == NULL || all == NULL) {
        status = host->error(TUTTI_ERROR_MEMORY, "out of memory for a group of %zu ranks", size);
    } else {
        *apart = (tu_nvshmem_apart){
            .nvshmem = nvshmem, .group = group, .rank = host->group_rank(group), .size = (int)size
        };
        lay_out(apart);
        status = begin(apart);
        mine.slab = apart->slab;
        mine.offset = apart->offset;
    }
    status = tu_cuda_agree(host, group, "areas of NVSHMEM's heap", deadline, status);
    if (status == TUTTI_OK)
        status = host->exchange(group, "areas of NVSHMEM's heap", &mine, sizeof mine, -1, deadline, all, NULL);
    if (status == TUTTI_OK)
        status = tu_cuda_agree(host, group, "areas of NVSHMEM's heap", deadline, tell_members(apart, all));
    free(all);
    if (status == TUTTI_OK)
        *made = apart;
    else if (apart != NULL)
        tu_nvshmem_apart_end(apart);
    return status;
}
