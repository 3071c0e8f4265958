/* SPDX-License-Identifier: Apache-2.0
 *
 * The named operations: checks, rendezvous on first use, then the collective that they are, with its algorithm given.
 * A call of nothing needs no symmetric memory, but meets the others as every collective does: one rank whose count is 0
 * where others have more is a mismatch.
 */
#include <tutti/named.h>

#include <stdint.h>
#include <string.h>

#include "collective/collective.h"
#include "collective/named.h"

tutti_status tu_named_symmetric(tutti_group *group, tu_operation operation, const char *what, const void *pointer,
                                size_t bytes) {
    const char *name = tu_operation_name(operation);
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", name);
    if (group == TUTTI_NON_GROUP_MEMBER || group->world->fake || bytes == 0)
        return TUTTI_OK;
    TU_INSIDE(group->world);
    tutti_status status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    tutti_memory *memory = tutti_memory_find(group->world, pointer);
    const unsigned char *data = memory != NULL ? tutti_memory_data(memory) : NULL;
    if (memory == NULL || (size_t)((const unsigned char *)pointer - data) + bytes > memory->bytes)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "%s: %s must be allocated with empty_strided_p2p(), that is tutti_memory_alloc: %p and the %zu bytes "
            "behind it are no symmetric memory of this world",
            name, what, pointer, bytes);
    if (group->size == 1 && tutti_memory_device(memory) == TUTTI_CPU)
        return TUTTI_OK;
    tutti_peers *peers;
    status = tutti_memory_rendezvous(memory, group, &peers);
    if (status == TUTTI_OK)
        tutti_peers_release(peers); /* the block keeps it */
    return status;
}

/* Bytes of `count` elements; 0 when that cannot be, which the check of the task will say. */
static size_t bytes_of(size_t count, tutti_dtype dtype, size_t times) {
    size_t element = tutti_dtype_size(dtype), bytes;
    if (__builtin_mul_overflow(count, element, &bytes) || __builtin_mul_overflow(bytes, times, &bytes))
        return 0;
    return bytes;
}

static tutti_status run(tutti_group *group, tu_operation operation, const void *in, void *out, size_t count,
                        tutti_dtype dtype, tutti_reduction reduction, int root, const tutti_call *call) {
    tu_task task = { .group = group,
                     .row = &tu_operations[operation],
                     .in = in,
                     .out = out,
                     .info = { .operation = (uint8_t)operation,
                               .count = count,
                               .dtype = tu_code((int)dtype),
                               .reduction = tu_code((int)reduction),
                               .root = root } };
    return tu_submit(&task, call);
}

static int size_of(const tutti_group *group) {
    return group == NULL || group == TUTTI_NON_GROUP_MEMBER ? 1 : group->size;
}

/* ---- all-reduce ---- */

tutti_status tutti_one_shot_all_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                       tutti_reduction reduction, const tutti_call *call) {
    tutti_status status =
        tu_named_symmetric(group, TU_OPERATION_ONE_SHOT_ALL_REDUCE, "input", in, bytes_of(count, dtype, 1));
    if (status != TUTTI_OK)
        return status;
    return run(group, TU_OPERATION_ONE_SHOT_ALL_REDUCE, in, out, count, dtype, reduction, -1, call);
}

tutti_status tutti_one_shot_all_reduce_copy(tutti_group *group, void *buffer, size_t buffer_count, const void *in,
                                            void *out, size_t count, tutti_dtype dtype, tutti_reduction reduction,
                                            const tutti_call *call) {
    if (count > buffer_count)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "one_shot_all_reduce_copy: the local input has %zu elements; its size must be smaller than symm buffer "
            "size, %zu, or equal",
            count, buffer_count);
    tutti_status status = tu_named_symmetric(group, TU_OPERATION_ONE_SHOT_ALL_REDUCE, "the buffer", buffer,
                                             bytes_of(buffer_count, dtype, 1));
    if (status != TUTTI_OK)
        return status;
    size_t bytes = bytes_of(count, dtype, 1);
    if (count != 0 && (in == NULL || bytes == 0))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "one_shot_all_reduce_copy: the local input is NULL, or its dtype is none");
    if (group == TUTTI_NON_GROUP_MEMBER || group->world->fake)
        return TUTTI_OK;
    tu_task task;
    tu_task_begin(&task, group, TU_OPERATION_ONE_SHOT_ALL_REDUCE);
    task.in = buffer;
    task.out = out;
    task.source = count != 0 ? in : NULL;
    task.info.count = count;
    task.info.dtype = tu_code((int)dtype);
    task.info.reduction = tu_code((int)reduction);
    return tu_submit(&task, call);
}

tutti_status tutti_two_shot_all_reduce(tutti_group *group, void *data, size_t count, tutti_dtype dtype,
                                       tutti_reduction reduction, const tutti_call *call) {
    return tutti_two_shot_all_reduce_out(group, data, data, count, dtype, reduction, call);
}

tutti_status tutti_two_shot_all_reduce_out(tutti_group *group, const void *in, void *out, size_t count,
                                           tutti_dtype dtype, tutti_reduction reduction, const tutti_call *call) {
    tutti_status status =
        tu_named_symmetric(group, TU_OPERATION_TWO_SHOT_ALL_REDUCE, "input", in, bytes_of(count, dtype, 1));
    if (status != TUTTI_OK)
        return status;
    return run(group, TU_OPERATION_TWO_SHOT_ALL_REDUCE, in, out, count, dtype, reduction, -1, call);
}

/* ---- reduce-scatter and all-gather ---- */

tutti_status tutti_reduce_scatter_out(tutti_group *group, const void *in, void *out, size_t rows, size_t columns,
                                      bool split_last_dim, tutti_dtype dtype, tutti_reduction reduction,
                                      const tutti_call *call) {
    size_t size = (size_t)size_of(group), total;
    if (__builtin_mul_overflow(rows, columns, &total))
        return tu_error(TUTTI_ERROR_RANGE, "reduce_scatter_out: %zu rows of %zu columns are more than memory can have",
                        rows, columns);
    if (total % size != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "reduce_scatter_out: the number of elements, %zu, must be divisible by world_size, %zu", total,
                        size);
    if (split_last_dim && columns % size != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "reduce_scatter_out: the last dimension, %zu, must be divisible by world_size, %zu", columns,
                        size);
    tutti_status status =
        tu_named_symmetric(group, TU_OPERATION_REDUCE_SCATTER_OUT, "input", in, bytes_of(total, dtype, 1));
    if (status != TUTTI_OK)
        return status;
    tu_task task = { .group = group,
                     .row = &tu_operations[TU_OPERATION_REDUCE_SCATTER_OUT],
                     .in = in,
                     .out = out,
                     .columns = split_last_dim ? columns : 0,
                     .info = { .operation = TU_OPERATION_REDUCE_SCATTER_OUT,
                               .count = total / size,
                               .dtype = tu_code((int)dtype),
                               .reduction = tu_code((int)reduction),
                               .root = -1 } };
    if (split_last_dim && rows > 1 && total != 0)
        task.custom = tu_split_last_dim;
    return tu_submit(&task, call);
}

tutti_status tutti_low_contention_all_gather(tutti_group *group, const void *in, void *out, size_t count,
                                             tutti_dtype dtype, const tutti_call *call) {
    return run(group, TU_OPERATION_LOW_CONTENTION_ALL_GATHER, in, out, count, dtype, (tutti_reduction)0, -1, call);
}

tutti_status tutti_low_contention_reduce_scatter(tutti_group *group, const void *in, void *out, size_t count,
                                                 tutti_dtype dtype, tutti_reduction reduction, const tutti_call *call) {
    return run(group, TU_OPERATION_LOW_CONTENTION_REDUCE_SCATTER, in, out, count, dtype, reduction, -1, call);
}

/* ---- multicast ---- */

/* Whether the block of the pointer has a multicast address with this group: it has met, and all members' devices can.
 */
static bool has_multicast(tutti_group *group, const void *pointer) {
    tu_memory_group *memory;
    tu_symmetric found;
    return tu_memory_group_get(group, &memory) == TUTTI_OK && tu_symmetric_find(memory, pointer, 1, &found) &&
           found.peers != NULL && tutti_peers_multicast(found.peers) != NULL;
}

/* By the switch where the memory has a multicast address, by the processors where that was asked for. */
static tutti_status require_multicast(tutti_group *group, tu_operation operation, const void *pointer) {
    const char *name = tu_operation_name(operation);
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", name);
    if (group == TUTTI_NON_GROUP_MEMBER || group->world->fake)
        return TUTTI_OK;
    const char *setting = tu_settings_text(&group->world->settings, TU_SETTING_MULTICAST);
    if (strcmp(setting, "software") == 0 || has_multicast(group, pointer))
        return TUTTI_OK;
    tutti_memory *memory = tutti_memory_find(group->world, pointer);
    bool device = memory != NULL && memory->device != TUTTI_CPU;
    return tu_error(TUTTI_ERROR_UNSUPPORTED,
                    "%s: multicast support is required, and memory of the %s has none here (TUTTI_MULTICAST=%s). "
                    "TUTTI_MULTICAST=software uses a form in which the processors write every copy",
                    name, device ? "device" : "CPU", setting);
}

/* The buffer of a multicast operation meets on first use; then it is known whether it has a multicast address. */
static tutti_status prepare_multicast(tutti_group *group, tu_operation operation, const char *what, const void *pointer,
                                      size_t bytes) {
    tutti_memory *memory = group == NULL || group == TUTTI_NON_GROUP_MEMBER || group->world->fake
                               ? NULL
                               : tutti_memory_find(group->world, pointer);
    tutti_status status = TUTTI_OK;
    if (memory != NULL && memory->device != TUTTI_CPU)
        status = tu_named_symmetric(group, operation, what, pointer, bytes);
    if (status == TUTTI_OK)
        status = require_multicast(group, operation, pointer);
    return status == TUTTI_OK ? tu_named_symmetric(group, operation, what, pointer, bytes) : status;
}

/* The forms that reduce: the multicast buffer is their input. */
static tutti_status reduce_multicast(tutti_group *group, tu_operation operation, const void *in, void *out,
                                     size_t count, tutti_dtype dtype, tutti_reduction reduction, int root,
                                     const tutti_call *call) {
    tutti_status status = prepare_multicast(group, operation, "input", in, bytes_of(count, dtype, 1));
    if (status != TUTTI_OK)
        return status;
    return run(group, operation, in, out, count, dtype, reduction, root, call);
}

tutti_status tutti_multimem_all_reduce(tutti_group *group, void *data, size_t count, tutti_dtype dtype,
                                       tutti_reduction reduction, const tutti_call *call) {
    return reduce_multicast(group, TU_OPERATION_MULTIMEM_ALL_REDUCE, data, data, count, dtype, reduction, -1, call);
}

tutti_status tutti_multimem_one_shot_all_reduce(tutti_group *group, const void *in, void *out, size_t count,
                                                tutti_dtype dtype, tutti_reduction reduction, const tutti_call *call) {
    return reduce_multicast(group, TU_OPERATION_MULTIMEM_ONE_SHOT_ALL_REDUCE, in, out, count, dtype, reduction, -1,
                            call);
}

tutti_status tutti_multimem_one_shot_reduce_out(tutti_group *group, const void *in, void *out, size_t count,
                                                tutti_dtype dtype, tutti_reduction reduction, int root,
                                                const tutti_call *call) {
    return reduce_multicast(group, TU_OPERATION_MULTIMEM_ONE_SHOT_REDUCE, in, out, count, dtype, reduction, root, call);
}

tutti_status tutti_multimem_all_gather_out(tutti_group *group, const void *in, void *out, size_t count,
                                           tutti_dtype dtype, const tutti_call *call) {
    tutti_status status = prepare_multicast(group, TU_OPERATION_MULTIMEM_ALL_GATHER, "output", out,
                                            bytes_of(count, dtype, (size_t)size_of(group)));
    if (status != TUTTI_OK)
        return status;
    return run(group, TU_OPERATION_MULTIMEM_ALL_GATHER, in, out, count, dtype, (tutti_reduction)0, -1, call);
}

tutti_status tutti_low_contention_all_gather_multicast(tutti_group *group, const void *in, void *out, size_t count,
                                                       tutti_dtype dtype, const tutti_call *call) {
    const tu_operation operation = TU_OPERATION_LOW_CONTENTION_ALL_GATHER_MULTICAST;
    tutti_status status =
        prepare_multicast(group, operation, "output", out, bytes_of(count, dtype, (size_t)size_of(group)));
    if (status != TUTTI_OK)
        return status;
    return run(group, operation, in, out, count, dtype, (tutti_reduction)0, -1, call);
}
