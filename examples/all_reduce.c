/* SPDX-License-Identifier: Apache-2.0
 *
 * The mean of a gradient over all ranks: blocking on ordinary memory, then overlapped with computation, then on
 * symmetric memory, where nothing is copied that need not be.
 *
 *     tutti run -n 4 ./all_reduce          or, without a launcher,          ./all_reduce 4
 */
#include <stdio.h>
#include <stdlib.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#define COUNT 100000

static void fill(float *gradient, int rank) {
    for (int i = 0; i < COUNT; i++)
        gradient[i] = (float)(rank + 1) / (float)(i + 1);
}

/* Plain memory, in place: one call. */
static tutti_status on_any_memory(tutti_group *group, float *gradient) {
    fill(gradient, tutti_group_rank(group));
    return tutti_all_reduce(group, gradient, gradient, COUNT, TUTTI_F32, TUTTI_AVG, NULL);
}

/* With a work the call only starts: the next layer's computation goes on meanwhile. */
static tutti_status while_computing(tutti_group *group, float *gradient, double *computed) {
    fill(gradient, tutti_group_rank(group));
    tutti_work *work;
    tutti_status status = tutti_all_reduce(group, gradient, gradient, COUNT, TUTTI_F32, TUTTI_AVG,
                                           TUTTI_OPTIONS(tutti_call, .work = &work));
    if (status != TUTTI_OK)
        return status;
    *computed = 0;
    for (int i = 1; i < 1000000; i++)
        *computed += 1.0 / i;
    status = tutti_work_wait(work, 0);
    tutti_work_release(work);
    return status;
}

/* Memory that all ranks map: each rank reduces its slice straight from and into the buffers of all. */
static tutti_status on_symmetric_memory(tutti_world *world, tutti_group *group, float *first) {
    tutti_memory *memory;
    tutti_peers *peers = NULL;
    tutti_status status = tutti_memory_alloc(world, COUNT * sizeof(float), NULL, &memory);
    if (status != TUTTI_OK)
        return status;
    status = tutti_memory_rendezvous(memory, group, &peers);
    if (status == TUTTI_OK) {
        float *gradient = tutti_memory_data(memory);
        fill(gradient, tutti_group_rank(group));
        status = tutti_all_reduce(group, gradient, gradient, COUNT, TUTTI_F32, TUTTI_AVG, NULL);
        *first = gradient[0];
        tutti_peers_release(peers);
    }
    tutti_memory_release(memory);
    return status;
}

static tutti_status run(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    float *gradient = malloc(COUNT * sizeof(float)), symmetric = 0;
    double computed = 0;
    if (gradient == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = on_any_memory(group, gradient);
    float plain = gradient[0];
    if (status == TUTTI_OK)
        status = while_computing(group, gradient, &computed);
    if (status == TUTTI_OK)
        status = on_symmetric_memory(world, group, &symmetric);
    tutti_ran ran = TUTTI_RAN_INIT;
    if (status == TUTTI_OK)
        status = tutti_group_ran(group, &ran);
    if (status == TUTTI_OK && tutti_world_rank(world) == 0) {
        printf("the mean of the first element over %d ranks is %g, %g and %g\n", tutti_world_size(world), plain,
               gradient[0], symmetric);
        printf("the last one ran by %s, with %d inputs used where they lie\n", ran.why, ran.direct_inputs);
    }
    free(gradient);
    return status;
}

int main(int argument_count, char **arguments) {
    tutti_status status;
    if (argument_count > 1) {
        status = tutti_spawn(TUTTI_SPAWN_PROCESSES, atoi(arguments[1]), run, NULL);
    } else {
        tutti_world *world;
        status = tutti_world_open(NULL, &world);
        if (status == TUTTI_OK) {
            status = run(world, NULL);
            tutti_status closed = tutti_world_close(world);
            status = status != TUTTI_OK ? status : closed;
        }
    }
    if (status != TUTTI_OK)
        fprintf(stderr, "%s\n", tutti_error_message());
    return status != TUTTI_OK;
}
