/* SPDX-License-Identifier: Apache-2.0
 *
 * The public calls tutti_send and tutti_recv. How they run: short.c, message.c.
 */
#include "collective/batch.h"
#include "collective/short.h"
#include "world/group.h"

/* Elements that lie apart: whole blocks, which do not run into each other, in memory that can be. */
static tutti_status check_strided(tu_task *task, const tutti_strided *given) {
    const char *name = task->row->name;
    tutti_strided strided = TUTTI_STRIDED_INIT;
    tutti_status status = tu_options_copy("tutti_strided", given, &strided, sizeof strided);
    if (status != TUTTI_OK)
        return status;
    size_t count = task->info.count, bytes;
    if (strided.block == 0 || strided.stride < strided.block || count % strided.block != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s: %zu elements in blocks of %zu, each %zu after the last: blocks must have an element at "
                        "least, not overlap, and be whole",
                        name, count, strided.block, strided.stride);
    if (__builtin_mul_overflow(count / strided.block, strided.stride, &bytes) ||
        __builtin_mul_overflow(bytes, task->element, &bytes) || bytes > SIZE_MAX >> 1)
        return tu_error(TUTTI_ERROR_RANGE, "%s: the blocks reach further than memory can", name);
    task->strided = strided;
    return TUTTI_OK;
}

static tutti_status check(tu_task *task, const tutti_call *call, int peer, int tag) {
    const char *name = task->row->name;
    bool receives = task->row->out != TU_EXTENT_NONE;
    int size = task->group->size;
    task->element = tutti_dtype_size((tutti_dtype)task->info.dtype);
    task->timeout_ns = call->timeout_ns;
    task->received = receives ? call->received : NULL;
    if (task->element == 0)
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no dtype", name, task->info.dtype);
    if ((peer < 0 || peer >= size) && peer != TUTTI_NOBODY && !(receives && peer == TUTTI_ANY_SOURCE))
        return tu_error(TUTTI_ERROR_RANGE, "%s: rank %d must be in [0, %d)%s, or TUTTI_NOBODY", name, peer, size,
                        receives ? ", or TUTTI_ANY_SOURCE" : "");
    if (tag < 0 && !(receives && tag == TUTTI_ANY_TAG))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: tag %d must not be negative%s", name, tag,
                        receives ? ", but for TUTTI_ANY_TAG" : "");
    if (task->info.count > (SIZE_MAX >> 1) / task->element)
        return tu_error(TUTTI_ERROR_RANGE, "%s: the count asks for more bytes than memory can have", name);
    if (task->info.count != 0 && (receives ? task->out == NULL : task->in == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the buffer must not be NULL", name);
    if (call->timeout_ns < 0 && !(receives && call->timeout_ns == TUTTI_UNTIL_EVENT))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: timeout_ns is %lld; it must be positive, %s0 for the group's%s",
                        name, (long long)call->timeout_ns, receives ? "" : "or ",
                        receives ? ", or TUTTI_UNTIL_EVENT" : "");
    if (call->algorithm != TUTTI_ALGORITHM_AUTO)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s has no algorithm %s", name, tutti_algorithm_name(call->algorithm));
    if (call->received != NULL && (!receives || call->received->size == 0))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: tutti_call.received belongs to a receive, and its size must be set",
                        name);
    const tutti_strided *strided = receives ? call->strided_out : call->strided_in;
    if ((receives ? call->strided_in : call->strided_out) != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s has no %s: tutti_call.%s must be NULL", name,
                        receives ? "input" : "output", receives ? "strided_in" : "strided_out");
    return strided != NULL ? check_strided(task, strided) : TUTTI_OK;
}

tutti_status tu_message_submit(const tu_message *message, const tutti_call *call) {
    tu_task own, *task = &own;
    if (call->batch != NULL && (task = tu_batch_place(call->batch)) == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_task_begin(task, message->group, message->operation);
    task->info.count = message->count;
    task->info.dtype = tu_code((int)message->dtype);
    task->info.root = message->peer;
    task->info.tag = message->tag;
    task->in = message->in;
    task->out = message->out;
    tutti_status status = check(task, call, message->peer, message->tag);
    if (status == TUTTI_OK && message->peer == TUTTI_NOBODY)
        return tu_message_nobody(task, call);
    return status == TUTTI_OK ? tu_not_entered(tu_submit_checked(task, call)) : status;
}

static tutti_status submit(const tu_message *message, const tutti_call *given) {
    tutti_group *group = message->group;
    tutti_status done;
    if (tu_short_submit(message, 1, given, &done))
        return done;
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", tu_operation_name(message->operation));
    if (tu_group_absent(group, tu_operation_name(message->operation)))
        return TUTTI_OK;
    TU_INSIDE(group->world);
    tutti_call call = TUTTI_CALL_INIT;
    tutti_status status = tu_world_check(group->world);
    if (status == TUTTI_OK && given != NULL)
        status = tu_options_copy("tutti_call", given, &call, sizeof call);
    return status == TUTTI_OK ? tu_message_submit(message, &call) : status;
}

tutti_status tutti_send(tutti_group *group, const void *in, size_t count, tutti_dtype dtype, int to, int tag,
                        const tutti_call *call) {
    tu_message message = { group, TU_OPERATION_SEND, in, NULL, count, dtype, to, tag };
    return submit(&message, call);
}

tutti_status tutti_recv(tutti_group *group, void *out, size_t count, tutti_dtype dtype, int from, int tag,
                        const tutti_call *call) {
    tu_message message = { group, TU_OPERATION_RECV, NULL, out, count, dtype, from, tag };
    return submit(&message, call);
}
