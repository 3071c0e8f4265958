/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend that has nothing but an executor, for memory of the CPU: barriers and small all-reduces of f32 by the
 * exchange of small records that libtutti lends to backends. It is compiled and loaded by the tests, and stands beside
 * shm in a group.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/device.h"

#ifndef PLUGIN_NAME
#define PLUGIN_NAME "exchange"
#endif
#ifndef PLUGIN_DEVICE
#define PLUGIN_DEVICE TUTTI_CPU
#endif

#define MOST 1000 /* elements of an all-reduce: a record has at most 4096 bytes */

static const tu_backend_host *host;

static tutti_status probe(const tu_backend_host *given, int *device_count) {
    host = given;
    *device_count = 1;
    return TUTTI_OK;
}

static tutti_status open_world(const tu_backend_host *given, tutti_world *world, void **state) {
    (void)given;
    *state = world;
    return TUTTI_OK;
}

static void close_world(void *state) {
    (void)state;
}

static bool can(void *state, tu_ability ability) {
    (void)state;
    (void)ability;
    return false;
}

/* ---- the executor ---- */

typedef struct prepared {
    tutti_group *group;
    float *all; /* room for the inputs of all ranks */
} prepared;

static tutti_status prepare(void *state, tutti_group *group, int *device_index, int64_t deadline, void **made) {
    (void)state;
    (void)deadline;
    prepared *ours = calloc(1, sizeof *ours);
    if (ours == NULL || (ours->all = malloc((size_t)host->group_size(group) * MOST * sizeof(float))) == NULL) {
        free(ours);
        return host->error(TUTTI_ERROR_MEMORY, "no memory");
    }
    ours->group = group;
    *device_index = -1;
    *made = ours;
    return TUTTI_OK;
}

static void end(void *opaque) {
    prepared *ours = opaque;
    free(ours->all);
    free(ours);
}

static bool serves(void *state, const tutti_group *group, const tu_device_task *task) {
    (void)state;
    (void)group;
    if (task->in != NULL || task->out != NULL || task->stream != NULL)
        abort(); /* they are this rank's own */
    if (task->shape == TU_DEVICE_BARRIER)
        return true;
    return task->shape == TU_DEVICE_REDUCE && task->root < 0 && task->dtype == TUTTI_F32 &&
           task->reduction == TUTTI_SUM && task->count <= MOST;
}

static tutti_status run(void *opaque, tu_device_task *task) {
    prepared *ours = opaque;
    int64_t deadline = host->now() + task->timeout_ns;
    size_t count = task->shape == TU_DEVICE_BARRIER ? 1 : (size_t)task->count;
    float nothing = 0;
    const void *in = task->shape == TU_DEVICE_BARRIER || count == 0 ? &nothing : task->in;
    tutti_status status = host->exchange(ours->group, task->name, in, (count == 0 ? 1 : count) * sizeof(float), -1,
                                         deadline, ours->all, NULL);
    task->ran = TUTTI_ALGORITHM_ONE_SHOT;
    if (status != TUTTI_OK || task->shape == TU_DEVICE_BARRIER)
        return status;
    for (size_t i = 0; i < count; i++) {
        float sum = ours->all[i];
        for (int member = 1; member < host->group_size(ours->group); member++)
            sum += ours->all[(size_t)member * count + i];
        ((float *)task->out)[i] = sum;
    }
    return TUTTI_OK;
}

static tutti_status add_block(void *opaque, const tu_device_place *place) {
    (void)opaque;
    (void)place;
    return TUTTI_OK;
}

static const tu_device_executor executor = {
    .size = sizeof executor, .prepare = prepare, .end = end, .run = run, .add_block = add_block, .serves = serves
};

extern const tu_backend tutti_backend_v2;
__attribute__((visibility("default"))) const tu_backend tutti_backend_v2 = { .size = sizeof tutti_backend_v2,
                                                                             .version = TU_BACKEND_VERSION,
                                                                             .name = PLUGIN_NAME,
                                                                             .device = PLUGIN_DEVICE,
                                                                             .probe = probe,
                                                                             .open = open_world,
                                                                             .close = close_world,
                                                                             .can = can,
                                                                             .executor = &executor };
