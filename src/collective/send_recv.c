/* SPDX-License-Identifier: Apache-2.0
 *
 * A send and a receive at once, and the rank that is nobody: what programs on grids do at every step, and at their
 * edges.
 */
#include <string.h>

#include "collective/batch.h"
#include "collective/packet.h"
#include "collective/short.h"

tutti_status tu_message_nobody(const tu_task *task, const tutti_call *call) {
    if (task->received != NULL) {
        tutti_received nothing = { .size = task->received->size, .source = TUTTI_NOBODY, .tag = TUTTI_ANY_TAG };
        memcpy(task->received, &nothing, nothing.size < sizeof nothing ? nothing.size : sizeof nothing);
    }
    return tu_submit_nothing(task->group, call);
}

typedef struct exchange {
    tutti_group *group;
    const void *in;
    size_t in_count;
    int to;
    void *out;
    size_t out_count;
    int from;
    tutti_dtype dtype;
    int tag;
    const tutti_call *call;
} exchange;

static tutti_status note(const exchange *this, tutti_batch *batch) {
    const tutti_call *call = this->call;
    tutti_call sending = { .size = sizeof sending,
                           .timeout_ns = call->timeout_ns,
                           .algorithm = call->algorithm,
                           .batch = batch,
                           .executor = call->executor,
                           .device = call->device,
                           .strided_in = call->strided_in };
    tutti_call receiving = { .size = sizeof receiving,
                             .timeout_ns = call->timeout_ns,
                             .batch = batch,
                             .executor = call->executor,
                             .device = call->device,
                             .received = call->received,
                             .strided_out = call->strided_out };
    tu_message send = {
        this->group, TU_OPERATION_SEND, this->in, NULL, this->in_count, this->dtype, this->to, this->tag
    };
    tu_message receive = { this->group,     TU_OPERATION_RECV, NULL,       this->out,
                           this->out_count, this->dtype,       this->from, this->tag };
    tutti_status status = tu_message_submit(&send, &sending);
    return status == TUTTI_OK ? tu_message_submit(&receive, &receiving) : status;
}

/* Bytes from the first element of a buffer to the end of the last block; those that cannot be are refused later. */
static size_t reach(size_t count, size_t element, const tutti_strided *strided) {
    size_t elements = strided == NULL || strided->block == 0 ? count : count / strided->block * strided->stride, bytes;
    return __builtin_mul_overflow(elements, element, &bytes) ? SIZE_MAX >> 1 : bytes;
}

static tutti_status check_overlap(const exchange *this) {
    size_t element = tutti_dtype_size(this->dtype); /* 0 for no dtype, which the send refuses */
    const char *in = this->in, *out = this->out;
    if (this->to != TUTTI_NOBODY && this->from != TUTTI_NOBODY &&
        in < out + reach(this->out_count, element, this->call->strided_out) &&
        out < in + reach(this->in_count, element, this->call->strided_in))
        return tu_error(TUTTI_ERROR_ARGUMENT, "send_recv: in and out overlap; receive into another buffer");
    return TUTTI_OK;
}

static __attribute__((noinline)) tutti_status exchange_any(tutti_group *group, const void *in, size_t in_count, int to,
                                                           void *out, size_t out_count, int from, tutti_dtype dtype,
                                                           int tag, const tutti_call *call) {
    tutti_call full = TUTTI_CALL_INIT;
    exchange this = { group, in, in_count, to, out, out_count, from, dtype, tag, &full };
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "send_recv: the group is NULL");
    if (tu_group_absent(group, "send_recv"))
        return TUTTI_OK;
    TU_INSIDE(group->world);
    tutti_status status = tu_world_check(group->world);
    if (status == TUTTI_OK)
        status = tu_options_copy("tutti_call", call, &full, sizeof full);
    if (status == TUTTI_OK && full.timeout_ns < 0)
        status =
            tu_error(TUTTI_ERROR_ARGUMENT, "send_recv: timeout_ns is %lld; it must be positive, or 0 for the group's",
                     (long long)full.timeout_ns);
    if (status == TUTTI_OK)
        status = check_overlap(&this);
    if (status == TUTTI_OK)
        status = tu_batch_check("send_recv", &full);
    if (status != TUTTI_OK)
        return status;
    if (full.batch != NULL)
        return note(&this, full.batch);
    tutti_batch *batch;
    status = tutti_batch_begin(group, &batch);
    if (status != TUTTI_OK)
        return status;
    status = note(&this, batch);
    if (status != TUTTI_OK) {
        tutti_batch_cancel(batch);
        return status;
    }
    return tutti_batch_end(batch, TUTTI_OPTIONS(tutti_call, .timeout_ns = full.timeout_ns, .work = full.work));
}

/* Whether one buffer ends before the other begins, of what the express lane may take: at most a cell each. */
static inline bool are_apart(const char *in, size_t in_count, const char *out, size_t out_count, size_t element) {
    return in_count <= TU_CELL_BYTES && out_count <= TU_CELL_BYTES &&
           (in + in_count * element <= out || out + out_count * element <= in);
}

tutti_status tutti_send_recv(tutti_group *group, const void *in, size_t in_count, int to, void *out, size_t out_count,
                             int from, tutti_dtype dtype, int tag, const tutti_call *call) {
    tutti_status status;
    tu_message both[2] = { { group, TU_OPERATION_SEND, in, NULL, in_count, dtype, to, tag },
                           { group, TU_OPERATION_RECV, NULL, out, out_count, dtype, from, tag } };
    if (are_apart(in, in_count, out, out_count, tutti_dtype_size(dtype)) && tu_short_submit(both, 2, call, &status))
        return status;
    return exchange_any(group, in, in_count, to, out, out_count, from, dtype, tag, call);
}
