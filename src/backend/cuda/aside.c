/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives in place that would read what they have overwritten: a copy of the input, or the result until nobody
 * reads the input any more, lies aside. A group keeps the memory for it: each piece is at least twice as long as the
 * one before, which kernels under way and graphs may still use.
 */
#include "cuda.h"

#define LEAST ((uint64_t)2 << 20)

tutti_status tu_cuda_aside_get(tu_cuda_group *on, uint64_t bytes, uint64_t capture, const char *name, uint64_t *at) {
    const tu_backend_host *host = on->cuda->host;
    uint64_t last = on->aside_count > 0 ? on->asides[on->aside_count - 1].bytes : 0;
    if (last < bytes) {
        if (capture != 0)
            return host->error(TUTTI_ERROR_STATE,
                               "%s in place needs memory that group %s does not have yet, while a stream captures: run "
                               "it once before",
                               name, host->group_name(on->group));
        uint64_t wanted = 2 * last < LEAST ? LEAST : 2 * last;
        tu_backend_request request = { .bytes = bytes > wanted ? bytes : wanted,
                                       .alignment = 512,
                                       .device_index = on->device_index,
                                       .what = "a collective in place" };
        if (on->aside_count == TU_CUDA_ASIDES)
            return host->error(TUTTI_ERROR_LIMIT, "%s of %llu bytes in place is too long", name,
                               (unsigned long long)bytes);
        tutti_status status = tu_cuda_allocate(on->cuda, &request, &on->asides[on->aside_count]);
        if (status != TUTTI_OK)
            return status;
        on->aside_count++;
    }
    *at = (uint64_t)(uintptr_t)on->asides[on->aside_count - 1].address;
    return TUTTI_OK;
}

void tu_cuda_asides_free(tu_cuda_group *on) {
    while (on->aside_count > 0)
        tu_cuda_free(on->cuda, &on->asides[--on->aside_count]);
}

bool tu_cuda_overlaps(const void *one, uint64_t one_bytes, const void *other, uint64_t other_bytes) {
    uint64_t first = (uint64_t)(uintptr_t)one, second = (uint64_t)(uintptr_t)other;
    return one_bytes > 0 && other_bytes > 0 && first < second + other_bytes && second < first + one_bytes;
}

/* Whether what arrives from a member lies over a part of the input that begins elsewhere. */
static bool lies_across(const tu_device_task *task, int size, int member) {
    uint64_t begin = task->receive_offset[member], end = begin + task->receive_bytes[member];
    bool across = false;
    for (int i = 0; i < size && !across; i++) {
        uint64_t first = task->send_offset[i], last = first + task->send_bytes[i];
        across = first != begin && first < last && first < end && begin < last;
    }
    return across;
}

/* Whether something of the input may be overwritten before it was staged, where both are one buffer. A thread block
 * stages what it will write over itself if what arrives begins where something begins that goes away. */
static bool overwrites_input(const tu_device_task *task, int size) {
    const uint64_t *to = task->send_offset, *from = task->receive_offset;
    uint64_t end = 0;
    bool ascending = true, across = false;
    for (int i = 0; i < size; i++) {
        ascending = ascending && (task->send_bytes[i] == 0 || to[i] >= end);
        end = task->send_bytes[i] > 0 ? to[i] + task->send_bytes[i] : end;
    }
    for (int i = 0; i < size && !across; i++) {
        bool stays = ascending && from[i] == to[i] && task->receive_bytes[i] == task->send_bytes[i];
        across = task->receive_bytes[i] > 0 && !stays && lies_across(task, size, i);
    }
    return across;
}

/* Multicast forms write to members that have not said that they are through with their input. */
uint64_t tu_cuda_overwritten(const tu_device_task *task, int size) {
    uint64_t bytes = 0;
    if (task->in != task->out || (!task->multicast && !overwrites_input(task, size)))
        return 0;
    for (int i = 0; i < size; i++) {
        uint64_t end = task->send_bytes[i] > 0 ? task->send_offset[i] + task->send_bytes[i] : 0;
        bytes = end > bytes ? end : bytes;
    }
    return bytes;
}
