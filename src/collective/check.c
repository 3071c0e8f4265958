/* SPDX-License-Identifier: Apache-2.0
 *
 * Arguments: everything that is wrong on this rank alone is said before the others are bothered.
 */
#include "collective/check.h"

#include <string.h>

static const char *name_of(const tu_task *task) {
    return task->row->name;
}

static tutti_status check_type(const tu_task *task) {
    const tu_operation_info *info = &task->info;
    if (task->element == 0)
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no dtype%s", name_of(task), info->dtype,
                        tutti_reduction_name((tutti_reduction)info->dtype)[0] != '?'
                            ? " but a reduction; are dtype and op swapped?"
                            : "");
    if (task->row->kind != TU_KIND_REDUCTION && (task->row->kind != TU_KIND_TILES || info->reduction == 0))
        return TUTTI_OK;
    if (tutti_reduction_name((tutti_reduction)info->reduction)[0] == '?')
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no reduction%s", name_of(task), info->reduction,
                        tutti_dtype_size((tutti_dtype)info->reduction) != 0 ? " but a dtype; are dtype and op swapped?"
                                                                            : "");
    if (!tutti_reduction_applies((tutti_reduction)info->reduction, (tutti_dtype)info->dtype))
        return tu_error(TUTTI_ERROR_TYPE, "%s: reduction %s is not defined for %s; the table is in tutti/dtype.h",
                        name_of(task), tutti_reduction_name((tutti_reduction)info->reduction),
                        tutti_dtype_name((tutti_dtype)info->dtype));
    return TUTTI_OK;
}

/* Adds up what an array of counts asks for; false when it is more than memory can hold. */
static bool add_up(const size_t *counts, const size_t *offsets, int size, size_t element, size_t *total) {
    size_t limit = (SIZE_MAX >> 1) / element, sum = 0;
    for (int i = 0; i < size; i++) {
        if (counts[i] > limit || (offsets != NULL && offsets[i] > limit - counts[i]) || sum > limit - counts[i])
            return false;
        sum += counts[i];
    }
    *total = sum;
    return true;
}

static uint64_t hash_bytes(const void *bytes, size_t count) {
    const unsigned char *byte = bytes;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static tutti_status check_counts(tu_task *task, int size) {
    size_t total = 0;
    bool sane = true;
    if (task->row->in == TU_EXTENT_SPLITS) {
        if (task->in_counts == NULL || task->out_counts == NULL)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: in_counts and out_counts must not be NULL", name_of(task));
        sane = add_up(task->out_counts, task->out_offsets, size, task->element, &total) &&
               add_up(task->in_counts, task->in_offsets, size, task->element, &total);
    } else if (tu_has_counts(task->row)) {
        if (task->in_counts == NULL)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: counts must not be NULL", name_of(task));
        sane = add_up(task->in_counts, task->out_offsets, size, task->element, &total);
        task->info.count = total;
        task->detail = hash_bytes(task->in_counts, (size_t)size * sizeof(size_t));
    } else if (task->info.count > (SIZE_MAX >> 1) / task->element / (size_t)size) {
        sane = false;
    }
    if (!sane)
        return tu_error(TUTTI_ERROR_RANGE, "%s: the counts ask for more bytes than memory can have", name_of(task));
    return TUTTI_OK;
}

static tutti_status check_permutation(tu_task *task, int size) {
    if (task->to == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: `to` must not be NULL", name_of(task));
    for (int rank = 0; rank < size; rank++)
        if (task->to[rank] < -1 || task->to[rank] >= size)
            return tu_error(TUTTI_ERROR_RANGE, "%s: to[%d] is %d; it must be in [0, %d), or -1 for nobody",
                            name_of(task), rank, task->to[rank], size);
    task->detail = hash_bytes(task->to, (size_t)size * sizeof(int));
    return TUTTI_OK;
}

/* Where a rank's own part lies in the buffer that has parts of all. */
static size_t own_place(const tu_task *task, int rank, int size) {
    if (tu_scatters(task->row))
        return tu_slice_of(task, size, rank).first * task->element;
    tu_part part = tu_part_of(task, rank, rank, rank);
    return tu_deals(task->row) ? part.in_offset : part.out_offset;
}

static tutti_status check_buffers(const tu_task *task, int rank, int size) {
    size_t in_bytes = tu_in_bytes(task, rank, size), out_bytes = tu_out_bytes(task, rank, size);
    if (in_bytes != 0 && task->in == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: `in` must not be NULL", name_of(task));
    if (out_bytes != 0 && task->out == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: `out` must not be NULL", name_of(task));
    const unsigned char *in = task->in, *out = task->out;
    if (in_bytes == 0 || out_bytes == 0 || in == out || in + in_bytes <= out || out + out_bytes <= in)
        return TUTTI_OK;
    bool scatters = tu_scatters(task->row) || tu_deals(task->row);
    if ((tu_gathers(task->row) && in == out + own_place(task, rank, size)) ||
        (scatters && out == in + own_place(task, rank, size)))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "%s: in and out overlap (in %p, %zu bytes; out %p, %zu bytes); they must be apart, the same, or "
                    "this rank's part at its own place",
                    name_of(task), task->in, in_bytes, task->out, out_bytes);
}

static tutti_status check_factor(tu_task *task, const void *factor) {
    if (task->info.reduction != TUTTI_PREMUL_SUM) {
        task->factor = 1;
        return TUTTI_OK;
    }
    if (factor == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: premul_sum needs tutti_call.factor, one element of %s",
                        name_of(task), tutti_dtype_name((tutti_dtype)task->info.dtype));
    task->factor = tu_factor(factor, (tutti_dtype)task->info.dtype);
    return TUTTI_OK;
}

/* The usual call in a few nanoseconds; whatever it does not accept goes the long way, which says what is wrong. */
static bool is_plain_call(tu_task *task, const tutti_call *call) {
    if (task->row != &tu_operations[TU_OPERATION_ALL_REDUCE] || call->algorithm != TUTTI_ALGORITHM_AUTO ||
        call->timeout_ns < 0 || call->strided_in != NULL || call->strided_out != NULL ||
        call->order != TUTTI_ORDER_RANK)
        return false;
    task->timeout_ns = call->timeout_ns;
    task->factor = 1;
    return tu_is_plain_all_reduce(task->in, task->out, task->info.count, (tutti_dtype)task->info.dtype,
                                  (tutti_reduction)task->info.reduction, &task->element);
}

tutti_status tu_check_task(tu_task *task, const tutti_call *call) {
    if (__builtin_expect(is_plain_call(task, call), 1))
        return TUTTI_OK;
    int rank = task->group->rank, size = task->group->size;
    task->forced = task->row->fixed != TUTTI_ALGORITHM_AUTO ? task->row->fixed : call->algorithm;
    if (call->algorithm != TUTTI_ALGORITHM_AUTO && call->algorithm != task->forced)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s has no algorithm %s", name_of(task),
                        tutti_algorithm_name(call->algorithm));
    if (call->order != TUTTI_ORDER_RANK && call->order != TUTTI_ORDER_ANY)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %d is no order; it is TUTTI_ORDER_RANK or TUTTI_ORDER_ANY",
                        name_of(task), (int)call->order);
    task->any_order = call->order == TUTTI_ORDER_ANY;
    task->timeout_ns = call->timeout_ns;
    if (call->timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: timeout_ns is %lld; it must be positive, or 0 for the group's",
                        name_of(task), (long long)call->timeout_ns);
    if (call->strided_in != NULL || call->strided_out != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: tutti_call.strided_in and strided_out belong to sends and receives",
                        name_of(task));
    if (task->forced != TUTTI_ALGORITHM_AUTO && tutti_algorithm_name(task->forced)[0] == '?')
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %d is no algorithm", name_of(task), (int)task->forced);
    if (task->row->kind == TU_KIND_BARRIER) {
        task->element = 1;
        return TUTTI_OK;
    }
    task->element = tutti_dtype_size((tutti_dtype)task->info.dtype);
    tutti_status status = check_type(task);
    if (task->row->kind == TU_KIND_ROWS || task->row->kind == TU_KIND_TILES)
        return status; /* vdev.c and tiles.c have checked the rest */
    if (task->columns != 0)
        task->detail = task->columns;
    if (status == TUTTI_OK && tu_has_root(task->row) && (task->info.root < 0 || task->info.root >= size))
        status = tu_error(TUTTI_ERROR_RANGE, "%s: root %d must be in [0, %d)", name_of(task), task->info.root, size);
    if (status == TUTTI_OK && task->row->flow == TU_FLOW_PERMUTED)
        status = check_permutation(task, size);
    if (status == TUTTI_OK)
        status = check_counts(task, size);
    if (status == TUTTI_OK)
        status = check_factor(task, call->factor);
    if (status == TUTTI_OK)
        status = check_buffers(task, rank, size);
    return status;
}

/* What does between hosts what this call does on one. */
static const char *instead_of(const tu_task *task, bool device) {
    if (device)
        return "Memory of a GPU goes from host to host by the plug-ins tutti-nccl and tutti-nvshmem: open one of them "
               "(tutti_backend_open) before the group is first used, or copy to memory of the CPU";
    if (task->row->kind == TU_KIND_ROWS)
        return "tutti_all_to_all of the counts and then tutti_all_to_all_v do the same there";
    if (task->row->kind == TU_KIND_TILES)
        return "tutti_peers_put and tutti_peers_get move parts of a block there";
    if (task->custom != NULL)
        return "Let each rank bring its part together first and call tutti_reduce_scatter";
    return "Collectives without a forced algorithm do";
}

tutti_status tu_check_local(const tutti_group *group, const tu_task *task, bool device) {
    if (group->local || group->world->fake)
        return TUTTI_OK;
    for (int member = 0; member < group->size; member++) {
        if (group->job_ranks[member] >= 0)
            continue;
        tu_job *job = group->world->job;
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s on group %s, as it was called, runs within one host, and the group spans several: rank %d "
                        "is on %s, rank %d on %s. %s; or split the group by host (tutti_group_split)",
                        name_of(task), group->name, group->rank, tu_job_host(job, group->world->rank), member,
                        tu_job_host(job, group->ranks[member]), instead_of(task, device));
    }
    return TUTTI_OK;
}
