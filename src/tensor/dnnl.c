/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products by oneDNN: bf16 where the processor has instructions for it (not i8: without VNNI it saturates).
 * Every "cannot" is answered with false, and the caller computes by other means.
 */
#include "tensor/gemm.h"

#if TUTTI_HAVE_DNNL

#include <oneapi/dnnl/dnnl.h>

#include "base/instructions.h"
#include "tensor/kernel/libraries.h"

static bool describe(dnnl_memory_desc_t *to, int64_t rows, int64_t columns, const tu_matrix *x, dnnl_data_type_t type) {
    dnnl_dims_t sizes = { rows, columns }, strides = { x->row, x->column };
    return (x->row == 1 || x->column == 1) &&
           dnnl_memory_desc_init_by_strides(to, 2, sizes, type, strides) == dnnl_success;
}

static dnnl_data_type_t type_of(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F32:
        return dnnl_f32;
    case TUTTI_BF16:
        return dnnl_bf16;
    case TUTTI_F16:
        return dnnl_f16;
    default:
        return dnnl_data_type_undef;
    }
}

/* An engine is cheap to make but not free; a thread that uses tensors keeps its own. */
static dnnl_engine_t engine_of_thread(void) {
    tu_thread *self = tu_self();
    dnnl_engine_t engine = self->engine;
    tu_libraries_limit();
    if (engine == NULL && dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success)
        engine = NULL;
    self->engine = engine;
    return engine;
}

void tu_dnnl_end(tu_thread *self) {
    if (self->engine != NULL)
        (void)dnnl_engine_destroy(self->engine);
    self->engine = NULL;
}

static bool execute(dnnl_engine_t engine, const_dnnl_primitive_desc_t plan, const dnnl_memory_desc_t *descs,
                    void *const *data) {
    static const int names[3] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST };
    dnnl_primitive_t product = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_exec_arg_t arguments[3];
    int made = 0;
    bool done = false;
    if (dnnl_primitive_create(&product, plan) != dnnl_success)
        return false;
    if (dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success)
        goto destroy_product;
    for (; made < 3; made++) {
        arguments[made].arg = names[made];
        if (dnnl_memory_create(&arguments[made].memory, &descs[made], engine, data[made]) != dnnl_success)
            goto destroy_memory;
    }
    done = dnnl_primitive_execute(product, stream, 3, arguments) == dnnl_success &&
           dnnl_stream_wait(stream) == dnnl_success;
destroy_memory:
    while (made > 0)
        dnnl_memory_destroy(arguments[--made].memory);
    dnnl_stream_destroy(stream);
destroy_product:
    dnnl_primitive_destroy(product);
    return done;
}

bool tu_dnnl_gemm(tutti_dtype dtype, tutti_dtype result, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                  tu_matrix right, void *out, int64_t out_stride) {
    dnnl_data_type_t type = type_of(dtype), result_type = type_of(result);
    dnnl_engine_t engine = engine_of_thread();
    dnnl_memory_desc_t descs[3];
    tu_matrix to = { out, out_stride, 1 };
    if (type == dnnl_data_type_undef || engine == NULL || !describe(&descs[0], rows, depth, &left, type) ||
        !describe(&descs[1], depth, columns, &right, type) || !describe(&descs[2], rows, columns, &to, result_type))
        return false;
    dnnl_matmul_desc_t wanted;
    if (dnnl_matmul_desc_init(&wanted, &descs[0], &descs[1], NULL, &descs[2]) != dnnl_success)
        return false;
    dnnl_primitive_desc_t plan;
    if (dnnl_primitive_desc_create(&plan, &wanted, NULL, engine, NULL) != dnnl_success)
        return false;
    void *data[3] = { (void *)left.data, (void *)right.data, out };
    bool done = execute(engine, plan, descs, data);
    dnnl_primitive_desc_destroy(plan);
    return done;
}

/* Its products of bf16 need vectors of 512 bits. */
bool tu_dnnl_takes(tutti_dtype dtype) {
    return dtype == TUTTI_BF16 && tu_instructions_get() == TU_AVX512;
}

#else

bool tu_dnnl_takes(tutti_dtype dtype) {
    (void)dtype;
    return false;
}

bool tu_dnnl_gemm(tutti_dtype dtype, tutti_dtype result, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                  tu_matrix right, void *out, int64_t out_stride) {
    (void)dtype, (void)result, (void)rows, (void)columns, (void)depth, (void)left, (void)right, (void)out,
        (void)out_stride;
    return false;
}

void tu_dnnl_end(tu_thread *self) {
    (void)self;
}

#endif
