/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on a GPU against the same ones on the CPU: for tests of executors, after cuda/gpu.h.
 */
#ifndef TUTTI_TESTS_AGAINST_CPU_H
#define TUTTI_TESTS_AGAINST_CPU_H

#include "cuda/gpu.h"

/* Waits for the stream, bounded: what hangs fails here. */
static inline void gpu_settle(void) {
    CUresult result = CUDA_ERROR_NOT_READY;
    for (int i = 0; i < 30000 && result == CUDA_ERROR_NOT_READY; i++) {
        result = gpu.cuStreamQuery(stream);
        usleep(1000);
    }
    CHECK_EQ(result, CUDA_SUCCESS);
}

/* Small whole numbers, which every type adds and multiplies exactly in any order; or, with `broken`, such that the
 * order of a sum shows. */
static inline void fill(void *to, tutti_dtype dtype, size_t count, int rank, bool broken) {
    bool complex = dtype == TUTTI_C64 || dtype == TUTTI_C128;
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    size_t numbers = complex ? 2 * count : count;
    double *values = malloc((numbers + 1) * sizeof *values);
    for (size_t i = 0; i < numbers; i++) {
        values[i] = dtype == TUTTI_BOOL ? (double)((i + (size_t)rank) % 2) : (double)((i * 7 + (size_t)rank) % 3);
        if (broken && dtype <= TUTTI_F8_E5M2)
            values[i] = ((double)((i * 7919 + (size_t)rank * 104729) % 1009) - 500.0) / 3.0;
        else if (broken && complex)
            values[i] = ((double)((i * 7919 + (size_t)rank * 104729) % 1009) - 500.0) / 7.0;
    }
    CHECK_OK(tutti_convert(values, TUTTI_F64, to, real, numbers));
    free(values);
}

typedef tutti_status operation(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                               tutti_reduction reduction, const tutti_call *call);

/* One operation on the CPU and, by that executor (NULL: whichever has the memory), on the GPU; whether both give the
 * same. */
typedef struct comparison {
    operation *run;
    size_t in_count, out_count, count;
    tutti_dtype dtype;
    tutti_reduction reduction;
    bool in_place;
    const char *executor;
    bool broken;    /* numbers that show the order of a sum */
    char *in, *out; /* where it shall be done on the GPU; NULL: in memory of its own */
} comparison;

static inline tutti_status compare(tutti_group *group, const comparison *given) {
    size_t element = tutti_dtype_size(given->dtype), in_bytes = given->in_count * element,
           out_bytes = given->out_count * element;
    size_t room = in_bytes > out_bytes ? in_bytes : out_bytes;
    char *in = calloc(1, room + 1), *expected = calloc(1, room + 1), *result = calloc(1, room + 1);
    char factor[16];
    double half = given->broken ? 0.3 : 0.5;
    CHECK_OK(tutti_convert(&half, TUTTI_F64, factor,
                           given->dtype == TUTTI_C64    ? TUTTI_F32
                           : given->dtype == TUTTI_C128 ? TUTTI_F64
                                                        : given->dtype,
                           1));
    fill(in, given->dtype, given->in_count, tutti_group_rank(group), given->broken);
    char *own_in = given->in == NULL ? gpu_private(room + 1) : NULL,
         *own_out = given->out == NULL && !given->in_place ? gpu_private(room + 1) : NULL;
    char *device_in = given->in != NULL ? given->in : own_in;
    char *device_out = given->in_place ? device_in : given->out != NULL ? given->out : own_out;
    gpu_write(device_out, expected, room);
    gpu_write(device_in, in, in_bytes);
    tutti_status status =
        given->run(group, device_in, device_out, given->count, given->dtype, given->reduction,
                   TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = given->executor, .factor = factor));
    if (status == TUTTI_OK) {
        CHECK_OK(given->run(group, in, expected, given->count, given->dtype, given->reduction,
                            TUTTI_OPTIONS(tutti_call, .factor = factor)));
        gpu_settle();
        gpu_read(result, device_out, out_bytes);
        CHECK_OK(tutti_group_check(group));
        if (memcmp(result, expected, out_bytes) != 0)
            FAIL("%s %s of %zu differs from the CPU's on rank %d", tutti_dtype_name(given->dtype),
                 tutti_reduction_name(given->reduction), given->count, tutti_group_rank(group));
    }
    if (own_in != NULL)
        gpu_private_free(own_in);
    if (own_out != NULL)
        gpu_private_free(own_out);
    free(in);
    free(expected);
    free(result);
    return status;
}

/* ---- the operations ---- */

static inline tutti_status all_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                      tutti_reduction reduction, const tutti_call *call) {
    return tutti_all_reduce(group, in, out, count, dtype, reduction, call);
}

static inline tutti_status all_gather(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                      tutti_reduction reduction, const tutti_call *call) {
    (void)reduction;
    return tutti_all_gather(group, in, out, count, dtype, call);
}

static inline tutti_status all_to_all(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                      tutti_reduction reduction, const tutti_call *call) {
    (void)reduction;
    return tutti_all_to_all(group, in, out, count, dtype, call);
}

static inline tutti_status reduce_scatter(tutti_group *group, const void *in, void *out, size_t count,
                                          tutti_dtype dtype, tutti_reduction reduction, const tutti_call *call) {
    return tutti_reduce_scatter(group, in, out, count, dtype, reduction, call);
}

static inline int last(tutti_group *group) {
    return tutti_group_size(group) - 1;
}

static inline tutti_status broadcast(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                     tutti_reduction reduction, const tutti_call *call) {
    (void)reduction;
    return tutti_broadcast(group, in, out, count, dtype, last(group), call);
}

static inline tutti_status reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                  tutti_reduction reduction, const tutti_call *call) {
    return tutti_reduce(group, in, out, count, dtype, reduction, last(group), call);
}

static inline tutti_status gather(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                  tutti_reduction reduction, const tutti_call *call) {
    (void)reduction;
    return tutti_gather(group, in, out, count, dtype, last(group), call);
}

static inline tutti_status scatter(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                                   tutti_reduction reduction, const tutti_call *call) {
    (void)reduction;
    return tutti_scatter(group, in, out, count, dtype, last(group), call);
}

#endif
