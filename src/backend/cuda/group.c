/* SPDX-License-Identifier: Apache-2.0
 *
 * A group on a device: what went wrong there, and how both sides hear of it. Kernels that find a fault tell the host
 * through pinned memory; the host, when the group ended for another reason, tells the kernels. A fault is sticky: no
 * kernel of the group waits any more, and a thread block that left an operation so begins none (tu_cuda_epoch). A
 * signal that ran out of time is no fault: it is told once and ends nothing.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define RETIRE_NS INT64_C(1000000000) /* how long words wait for the last kernels that may look at them */

/* ---- words ---- */

/* A free slot, zeroed; -1: none. The caller holds cuda->lock. */
static int take_slot(tu_cuda_device *device) {
    for (int slot = 0; slot < TU_CUDA_GROUPS; slot++) {
        if (device->words_taken[slot])
            continue;
        device->words_taken[slot] = true;
        memset(&device->reports[slot], 0, sizeof device->reports[slot]);
        return slot;
    }
    return -1;
}

static CUresult clear_words(tu_cuda_group *made) {
    const tu_cuda_driver *driver = &made->cuda->driver;
    CUstream stream = made->device->stream;
    CUresult result = driver->cuMemsetD8Async(made->words, 0, sizeof(tu_cuda_words), stream);
    return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(stream) : result;
}

/* How many thread blocks of eager kernels have ended, by a kernel on the backend's own stream: a copy could stand
 * behind another rank's in the queue of a copy engine. The number grows meanwhile, so that one thread takes it, at
 * once: with all the words, 16 bytes. The context is entered. */
static bool read_ended(tu_cuda *cuda, tu_cuda_device *device, CUdeviceptr words, uint64_t *ended) {
    tu_cuda_copy_args args = { device->answer_here, words, sizeof(tu_cuda_words) };
    pthread_mutex_lock(&device->answer_lock);
    bool good = tu_cuda_launch(cuda, device, TU_CUDA_COPY, 1, 32, &args, device->stream, TU_CUDA_APART) == TUTTI_OK &&
                cuda->driver.cuStreamSynchronize(device->stream) == CUDA_SUCCESS;
    *ended = __atomic_load_n(&device->answer->ended, __ATOMIC_ACQUIRE);
    pthread_mutex_unlock(&device->answer_lock);
    return good;
}

/* Whether every eager kernel of the group has ended, waiting a while for the last. */
static bool is_idle(tu_cuda_group *group) {
    int64_t until = group->cuda->host->now() + RETIRE_NS;
    uint64_t ended = 0, launched = atomic_load_explicit(&group->launched, memory_order_relaxed);
    do {
        if (!read_ended(group->cuda, group->device, group->words, &ended))
            return false;
    } while (ended < launched && group->cuda->host->now() < until);
    return ended >= launched;
}

/* A group on the device with kernels that are not known to have ended: any, or the one of that number. The caller holds
 * cuda->lock. */
static tu_cuda_group *find_unsettled(tu_cuda *cuda, const tu_cuda_device *device, uint64_t number) {
    tu_cuda_group *group = cuda->groups;
    while (group != NULL && (group->device != device || (number != 0 && group->number != number) ||
                             group->settled >= atomic_load_explicit(&group->launched, memory_order_relaxed)))
        group = group->next;
    return group;
}

void tu_cuda_await_kernels(tu_cuda *cuda, tu_cuda_device *device) {
    for (;;) { /* kernels have deadlines of their own */
        uint64_t ended;
        pthread_mutex_lock(&cuda->lock);
        tu_cuda_group *group = find_unsettled(cuda, device, 0);
        CUdeviceptr words = group != NULL ? group->words : 0;
        uint64_t number = group != NULL ? group->number : 0;
        pthread_mutex_unlock(&cuda->lock);
        if (words == 0 || !read_ended(cuda, device, words, &ended))
            return;
        pthread_mutex_lock(&cuda->lock);
        group = find_unsettled(cuda, device, number); /* it may have gone meanwhile, and left its words to another */
        if (group != NULL)
            group->settled = ended;
        pthread_mutex_unlock(&cuda->lock);
        sched_yield();
    }
}

/* ---- life ---- */

static tutti_status make(tu_cuda *cuda, tutti_group *group, int index, tu_cuda_group **result) {
    tu_cuda_device *device = &cuda->devices[index];
    tu_cuda_group *made = calloc(1, sizeof *made);
    if (made == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on GPU %d", index);
    pthread_mutex_lock(&cuda->lock);
    made->slot = take_slot(device);
    pthread_mutex_unlock(&cuda->lock);
    tutti_status status = TUTTI_OK;
    if (made->slot < 0) {
        status = cuda->host->error(TUTTI_ERROR_LIMIT, "GPU %d: a rank uses at most %d groups on it at one time", index,
                                   TU_CUDA_GROUPS);
        goto free_made;
    }
    made->cuda = cuda;
    made->group = group;
    made->device_index = index;
    made->device = device;
    const char *setting = cuda->host->setting(cuda->world, "TUTTI_MULTICAST");
    made->software = setting != NULL && strcmp(setting, "software") == 0;
    made->words = device->words + (CUdeviceptr)made->slot * sizeof(tu_cuda_words);
    made->told = &device->reports[made->slot];
    made->report = device->reports_here + (CUdeviceptr)made->slot * sizeof(tu_cuda_report);
    status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        goto give_slot_back;
    CUresult outcome = clear_words(made);
    if (outcome == CUDA_SUCCESS)
        outcome = cuda->driver.cuEventCreate(&made->captured, CU_EVENT_DISABLE_TIMING);
    tu_cuda_leave(cuda);
    if (outcome != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, outcome, "preparing a group on the device");
        goto give_slot_back;
    }
    *result = made;
    return TUTTI_OK;

give_slot_back:
    pthread_mutex_lock(&cuda->lock);
    device->words_taken[made->slot] = false;
    pthread_mutex_unlock(&cuda->lock);
free_made:
    free(made);
    return status;
}

static void free_group(tu_cuda_group *group) {
    tu_cuda *cuda = group->cuda;
    bool idle = false;
    if (tu_cuda_enter(cuda, group->device) == TUTTI_OK) {
        idle = is_idle(group);
        cuda->driver.cuEventDestroy(group->captured);
        tu_cuda_leave(cuda);
    }
    if (idle) {
        tu_cuda_asides_free(group);
        pthread_mutex_lock(&cuda->lock);
        group->device->words_taken[group->slot] = false;
        pthread_mutex_unlock(&cuda->lock);
    } /* else some kernel may still look: these words, and what lies aside, are not given out again */
    free(group);
}

static tu_cuda_group *find(tu_cuda *cuda, const tutti_group *group, int index) {
    pthread_mutex_lock(&cuda->lock);
    tu_cuda_group *found = cuda->groups;
    while (found != NULL && (found->group != group || found->device_index != index))
        found = found->next;
    pthread_mutex_unlock(&cuda->lock);
    return found;
}

tutti_status tu_cuda_group_get(tu_cuda *cuda, tutti_group *group, int index, tu_cuda_group **result) {
    tu_cuda_group *made = NULL;
    *result = find(cuda, group, index);
    if (*result != NULL)
        return TUTTI_OK;
    tutti_status status = make(cuda, group, index, &made);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&cuda->lock);
    tu_cuda_group *other = cuda->groups; /* another thread may have been quicker */
    while (other != NULL && (other->group != group || other->device_index != index))
        other = other->next;
    if (other == NULL) {
        made->number = ++cuda->groups_made;
        made->next = cuda->groups;
        cuda->groups = made;
    }
    pthread_mutex_unlock(&cuda->lock);
    if (other != NULL)
        free_group(made);
    *result = other != NULL ? other : made;
    return TUTTI_OK;
}

/* Takes the groups on all devices that stand for `group` out of the list; for NULL, all. */
static tu_cuda_group *unlink(tu_cuda *cuda, const tutti_group *group) {
    tu_cuda_group *taken = NULL;
    pthread_mutex_lock(&cuda->lock);
    for (tu_cuda_group **link = &cuda->groups; *link != NULL;) {
        tu_cuda_group *here = *link;
        if (group != NULL && here->group != group) {
            link = &here->next;
            continue;
        }
        *link = here->next;
        here->next = taken;
        taken = here;
    }
    pthread_mutex_unlock(&cuda->lock);
    return taken;
}

static void free_groups(tu_cuda_group *groups) {
    while (groups != NULL) {
        tu_cuda_group *next = groups->next;
        free_group(groups);
        groups = next;
    }
}

/* The watcher looks at groups while it holds watch_lock: after this it looks at this one no more. */
void tu_cuda_forget(void *state, tutti_group *group) {
    tu_cuda *cuda = state;
    pthread_mutex_lock(&cuda->watch_lock);
    tu_cuda_group *taken = unlink(cuda, group);
    pthread_mutex_unlock(&cuda->watch_lock);
    free_groups(taken);
}

void tu_cuda_groups_free(tu_cuda *cuda) {
    free_groups(unlink(cuda, NULL));
}

/* ---- what went wrong ---- */

/* Writes the fault as this thread's error. */
static tutti_status report(tu_cuda_group *on, const tu_cuda_fault *fault) {
    const tu_backend_host *host = on->cuda->host;
    const char *name = host->operation_name(fault->operation), *group = host->group_name(on->group);
    unsigned long long sequence = fault->sequence;
    int rank = host->group_rank(on->group);
    tutti_status status;
    switch (fault->code) {
    case TU_CUDA_FAULT_TIMEOUT:
        if (fault->peer == TU_CUDA_NOBODY) /* the switch only counts */
            return host->error(TUTTI_ERROR_TIMEOUT,
                               "%s %llu of group %s on the GPU: rank %d waited for the others until the deadline; did "
                               "all ranks make the same call?",
                               name, sequence, group, rank);
        status = host->error(TUTTI_ERROR_TIMEOUT,
                             "%s %llu of group %s on the GPU: rank %d waited for rank %u until the deadline; did that "
                             "rank make the same call, and do the kernels of all ranks fit the GPU at once?",
                             name, sequence, group, rank, fault->peer);
        break;
    case TU_CUDA_FAULT_MISMATCH:
        status =
            host->error(TUTTI_ERROR_MISMATCH,
                        "%s %llu of group %s on the GPU: rank %d and rank %u do not make the same call (signatures "
                        "%08x and %08x): operation, count, dtype, reduction, root, splits, tag or algorithm differ",
                        name, sequence, group, rank, fault->peer, fault->mine, fault->theirs);
        break;
    case TU_CUDA_FAULT_RANGE:
        status = host->error(TUTTI_ERROR_RANGE,
                             "%s %llu of group %s on the GPU: the %s splits of rank %d are negative or exceed the "
                             "buffer",
                             name, sequence, group, fault->mine == 0 ? "input" : "output", rank);
        break;
    case TU_CUDA_FAULT_ORDER:
        return host->error(TUTTI_ERROR_TIMEOUT,
                           "%s %llu of group %s on the GPU: rank %d waited until the deadline for its own earlier "
                           "operation of this group, which is on another stream: is that stream stuck?",
                           name, sequence, group, rank);
    default:
        return host->group_cause(on->group);
    }
    host->error_at_fault((int)fault->peer);
    return status;
}

/* Kernels that wait for a peer that will not come: let them go. */
static void pass_end_on(tu_cuda_group *on) {
    static const uint32_t code = TU_CUDA_FAULT_ENDED;
    if (atomic_exchange_explicit(&on->end_passed_on, true, memory_order_relaxed) ||
        tu_cuda_enter(on->cuda, on->device) != TUTTI_OK)
        return;
    on->cuda->driver.cuMemcpyHtoDAsync(on->words + offsetof(tu_cuda_words, fault), &code, sizeof code,
                                       on->device->stream);
    tu_cuda_leave(on->cuda);
}

tutti_status tu_cuda_group_check(tu_cuda_group *on) {
    const tu_backend_host *host = on->cuda->host;
    const _Atomic uint64_t *state = host->group_state(on->group);
    bool ended = state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0;
    if (__atomic_load_n(&on->told->fault.code, __ATOMIC_ACQUIRE) != 0) { /* pairs with store_release32 in tell_host */
        tutti_status status = report(on, &on->told->fault);
        if (!ended)
            host->group_end(on->group);
        return status;
    }
    if (!ended)
        return TUTTI_OK;
    pass_end_on(on);
    return host->group_cause(on->group);
}

/* A signal that ran out of time since the last look. */
static tutti_status check_expired(tu_cuda_group *on) {
    uint32_t count = __atomic_load_n(&on->told->expired.code, __ATOMIC_ACQUIRE); /* pairs with tell_host */
    if (atomic_exchange_explicit(&on->expired_told, count, memory_order_relaxed) == count)
        return TUTTI_OK;
    const tu_backend_host *host = on->cuda->host;
    const tu_cuda_fault *late = &on->told->expired;
    if (late->peer == TU_CUDA_NOBODY)
        return host->error(TUTTI_ERROR_TIMEOUT,
                           "%s of group %s on the GPU: rank %d waited until the deadline for a word of its signal pad "
                           "to be %u; it was %u (the low 32 bits of both)",
                           host->operation_name(late->operation), host->group_name(on->group),
                           host->group_rank(on->group), late->mine, late->theirs);
    tutti_status status = host->error(
        TUTTI_ERROR_TIMEOUT, "%s of group %s on the GPU: rank %d waited for rank %u on channel %u until the deadline",
        host->operation_name(late->operation), host->group_name(on->group), host->group_rank(on->group), late->peer,
        late->channel);
    host->error_at_fault((int)late->peer);
    return status;
}

tutti_status tu_cuda_check(void *state, tutti_group *group) {
    tu_cuda *cuda = state;
    tutti_status status = TUTTI_OK;
    for (int index = 0; status == TUTTI_OK && index < cuda->device_count; index++) {
        tu_cuda_group *on = find(cuda, group, index);
        if (on != NULL)
            status = tu_cuda_group_check(on);
        if (on != NULL && status == TUTTI_OK)
            status = check_expired(on);
    }
    return status;
}
