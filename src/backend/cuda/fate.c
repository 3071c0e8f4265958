/* SPDX-License-Identifier: Apache-2.0
 *
 * What went wrong in a group on a device, and how both sides hear of it: kernels that find a fault tell the host
 * through pinned memory; the host, when the group ended for another reason, tells the kernels. Sticky: later kernels of
 * the group leave at once.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

static tutti_status make(tu_cuda *cuda, tutti_group *group, int index, tu_cuda_fate **out) {
    tu_cuda_device *device = &cuda->devices[index];
    tu_cuda_fate *fate = calloc(1, sizeof *fate);
    if (fate == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on GPU %d", index);
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        goto free_fate;
    const char *what = "cuMemAlloc";
    CUresult result = cuda->driver.cuMemAlloc(&fate->fault, sizeof(tu_cuda_fault));
    if (result != CUDA_SUCCESS)
        goto leave;
    what = "cuMemHostAlloc";
    result = cuda->driver.cuMemHostAlloc((void **)&fate->host, sizeof *fate->host,
                                         CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (result != CUDA_SUCCESS)
        goto free_fault;
    memset(fate->host, 0, sizeof *fate->host);
    what = "cuMemHostGetDevicePointer";
    result = cuda->driver.cuMemHostGetDevicePointer(&fate->host_address, fate->host, 0);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuMemsetD8Async(fate->fault, 0, sizeof(tu_cuda_fault), device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(device->stream);
    if (result != CUDA_SUCCESS)
        goto free_host;
    tu_cuda_leave(cuda);
    fate->group = group;
    snprintf(fate->name, sizeof fate->name, "%s", cuda->host->group_name(group));
    fate->device = index;
    *out = fate;
    return TUTTI_OK;

free_host:
    cuda->driver.cuMemFreeHost(fate->host);
free_fault:
    cuda->driver.cuMemFree(fate->fault);
leave:
    status = tu_cuda_error(cuda, result, what);
    tu_cuda_leave(cuda);
free_fate:
    free(fate);
    return status;
}

tutti_status tu_cuda_fate_get(tu_cuda *cuda, tutti_group *group, int index, tu_cuda_fate **out) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&cuda->lock);
    tu_cuda_fate *fate = cuda->fates;
    while (fate != NULL &&
           (fate->group != group || fate->device != index || strcmp(fate->name, cuda->host->group_name(group)) != 0))
        fate = fate->next;
    if (fate == NULL) {
        status = make(cuda, group, index, &fate);
        if (status == TUTTI_OK) {
            fate->next = cuda->fates;
            cuda->fates = fate;
        }
    }
    pthread_mutex_unlock(&cuda->lock);
    if (status == TUTTI_OK)
        *out = fate;
    return status;
}

void tu_cuda_fates_free(tu_cuda *cuda) {
    while (cuda->fates != NULL) {
        tu_cuda_fate *fate = cuda->fates;
        cuda->fates = fate->next;
        if (tu_cuda_enter(cuda, &cuda->devices[fate->device]) == TUTTI_OK) {
            cuda->driver.cuMemFree(fate->fault);
            cuda->driver.cuMemFreeHost(fate->host);
            tu_cuda_leave(cuda);
        }
        free(fate);
    }
}

/* Writes the fault as this thread's error. */
static tutti_status report(tu_cuda *cuda, tutti_group *group, const tu_cuda_fault *fault) {
    const char *name = cuda->host->operation_name(fault->operation);
    int rank = cuda->host->group_rank(group);
    tutti_status status;
    switch (fault->code) {
    case TU_CUDA_FAULT_TIMEOUT:
        status = cuda->host->error(TUTTI_ERROR_TIMEOUT,
                                   "%s %llu of group %s on the GPU: rank %d waited for rank %u until the deadline; did "
                                   "that rank make the same "
                                   "call, and do the kernels of all ranks fit the GPU at once?",
                                   name, (unsigned long long)fault->sequence, cuda->host->group_name(group), rank,
                                   fault->peer);
        break;
    case TU_CUDA_FAULT_MISMATCH:
        status = cuda->host->error(
            TUTTI_ERROR_MISMATCH,
            "%s %llu of group %s on the GPU: rank %d and rank %u do not make the same call (signatures %08x and %08x): "
            "operation, count, dtype, reduction, root, splits or algorithm differ",
            name, (unsigned long long)fault->sequence, cuda->host->group_name(group), rank, fault->peer, fault->mine,
            fault->theirs);
        break;
    case TU_CUDA_FAULT_RANGE:
        status = cuda->host->error(
            TUTTI_ERROR_RANGE,
            "%s %llu of group %s on the GPU: the %s splits of rank %d are negative or exceed the buffer", name,
            (unsigned long long)fault->sequence, cuda->host->group_name(group), fault->mine == 0 ? "input" : "output",
            rank);
        break;
    default:
        return cuda->host->group_cause(group);
    }
    cuda->host->error_at_fault((int)fault->peer);
    return status;
}

tutti_status tu_cuda_check(void *state, tutti_group *group) {
    tu_cuda *cuda = state;
    tutti_status status = TUTTI_OK;
    const _Atomic uint64_t *word = cuda->host->group_state(group);
    bool ended = word != NULL && atomic_load_explicit(word, memory_order_acquire) != 0;
    pthread_mutex_lock(&cuda->lock);
    for (tu_cuda_fate *fate = cuda->fates; fate != NULL && status == TUTTI_OK; fate = fate->next) {
        if (fate->group != group || strcmp(fate->name, cuda->host->group_name(group)) != 0)
            continue;
        /* Pairs with store_release32 in raise_fault. */
        if (__atomic_load_n(&fate->host->code, __ATOMIC_ACQUIRE) != 0) {
            status = report(cuda, group, fate->host);
            if (!ended)
                cuda->host->group_end(group);
        } else if (ended && !fate->ended) {
            /* Kernels that wait for a peer that will not come: let them go. */
            static const uint32_t code = TU_CUDA_FAULT_ENDED;
            tu_cuda_device *device = &cuda->devices[fate->device];
            if (tu_cuda_enter(cuda, device) == TUTTI_OK) {
                cuda->driver.cuMemcpyHtoDAsync(fate->fault, &code, sizeof code, device->stream);
                tu_cuda_leave(cuda);
            }
            fate->ended = true;
        }
    }
    pthread_mutex_unlock(&cuda->lock);
    if (status == TUTTI_OK && ended)
        status = cuda->host->group_cause(group);
    return status;
}
