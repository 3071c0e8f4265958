/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing who runs a task.
 */
#include "collective/executor.h"

#include <stdio.h>
#include <string.h>

#include "collective/check.h"
#include "collective/collective.h"
#include "collective/device.h"

tu_executors tu_executors_cpu(const tutti_group *group) {
    if (group->world->fake)
        return (tu_executors){ TUTTI_CPU, 1, { &tu_executor_fake } };
    if (group->size == 1) /* its messages to itself are real ones */
        return (tu_executors){ TUTTI_CPU, 2, { &tu_executor_alone, &tu_executor_shm } };
    return (tu_executors){ TUTTI_CPU, 1, { group->local ? &tu_executor_shm : &tu_executor_hosts } };
}

static void list_names(const tu_executors *executors, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < executors->count; i++) {
        int wrote = snprintf(text + used, bytes - used, "%s%s", i > 0 ? ", " : "", executors->list[i]->name);
        used += wrote > 0 && (size_t)wrote < bytes - used ? (size_t)wrote : 0;
    }
}

/* One of the list, or of a backend that brings one of that name for this memory. NULL: there is none. */
static tutti_status find_by_name(tu_task *task, const tu_executors *executors, const char *name) {
    task->executor = NULL;
    for (int i = 0; i < executors->count; i++) {
        if (strcmp(executors->list[i]->name, name) == 0) {
            task->executor = executors->list[i];
            return TUTTI_OK;
        }
    }
    return task->group->world->fake ? TUTTI_OK
                                    : tu_device_executor_named(task->group, executors->kind, name, &task->executor);
}

static tutti_status choose_by_name(tu_task *task, const tu_executors *executors, const char *name) {
    char names[128];
    tutti_status status = find_by_name(task, executors, name);
    if (status != TUTTI_OK)
        return status;
    list_names(executors, names, sizeof names);
    if (task->executor == NULL)
        return tu_error(TUTTI_ERROR_NOT_FOUND,
                        "%s on group %s: no executor is called \"%s\" here; for this memory there are: %s",
                        task->row->name, task->group->name, name, names);
    if (task->executor->serves(task->group, task))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_UNSUPPORTED,
                    "%s on group %s: executor %s does not serve this call; for this memory there are: %s",
                    task->row->name, task->group->name, name, names);
}

static tutti_status nobody_serves(const tu_task *task, const tu_executors *executors) {
    tutti_status status = tu_check_local(task->group, task, executors->kind >= TUTTI_CUDA); /* the usual reason */
    if (status != TUTTI_OK)
        return status;
    char names[128];
    list_names(executors, names, sizeof names);
    status =
        tu_error(TUTTI_ERROR_UNSUPPORTED, "%s on group %s: no executor serves this call; for this memory there are: %s",
                 task->row->name, task->group->name, names);
    return status;
}

tutti_status tu_executor_choose(tu_task *task, const tutti_call *call) {
    const tu_executors *executors = &task->state->executors;
    if (tu_device_possible(task->group->world, call)) {
        const tu_executors *of_device = NULL;
        tutti_status status = tu_device_executors(task, call, &of_device);
        if (status != TUTTI_OK)
            return status;
        if (of_device != NULL)
            executors = of_device;
    }
    if (__builtin_expect(call->executor != NULL, 0))
        return choose_by_name(task, executors, call->executor);
    for (int i = 0; i < executors->count; i++) {
        task->executor = executors->list[i];
        if (__builtin_expect(task->executor->serves(task->group, task), 1))
            return TUTTI_OK;
    }
    return nobody_serves(task, executors);
}
