/* SPDX-License-Identifier: Apache-2.0
 *
 * The tables of kernels by level, and the same limit for the libraries that choose instructions by themselves.
 */
#include "tensor/kernel/kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/instructions.h"
#include "tensor/kernel/libraries.h"

#if TUTTI_HAVE_DNNL
#include <oneapi/dnnl/dnnl.h>
#endif

extern const tu_tensor_kernels tu_tensor_kernels_reference;
#if defined(__x86_64__)
extern const tu_tensor_kernels tu_tensor_kernels_avx2, tu_tensor_kernels_avx512;
#elif defined(__aarch64__)
extern const tu_tensor_kernels tu_tensor_kernels_neon;
#endif

static const tu_tensor_kernels *const tables[TU_INSTRUCTIONS_END] = {
    [TU_REFERENCE] = &tu_tensor_kernels_reference,
#if defined(__x86_64__)
    [TU_AVX2] = &tu_tensor_kernels_avx2,
    [TU_AVX512] = &tu_tensor_kernels_avx512,
#elif defined(__aarch64__)
    [TU_NEON] = &tu_tensor_kernels_neon,
#endif
};

const tu_tensor_kernels *tu_tensor_kernels_get(void) {
    return tables[tu_instructions_get()];
}

/* ---- libraries ---- */

/* OpenBLAS, built for many processors, reads OPENBLAS_CORETYPE when it is loaded, before any of our code runs. These
 * two functions of it, which its own start and end call, make it read the variable again. They are absent from builds
 * for one processor and from other libraries: those cannot be limited. */
extern void gotoblas_dynamic_init(void) __attribute__((weak));
extern void gotoblas_dynamic_quit(void) __attribute__((weak));

static void limit_blas(const char *core) {
    const char *before = getenv("OPENBLAS_CORETYPE");
    char *kept = before != NULL ? strdup(before) : NULL;
    if (gotoblas_dynamic_init == NULL || gotoblas_dynamic_quit == NULL)
        return;
    setenv("OPENBLAS_CORETYPE", core, 1);
    gotoblas_dynamic_quit();
    gotoblas_dynamic_init();
    if (kept != NULL)
        setenv("OPENBLAS_CORETYPE", kept, 1);
    else
        unsetenv("OPENBLAS_CORETYPE");
    free(kept);
}

#if TUTTI_HAVE_DNNL && defined(__x86_64__)
static void limit_dnnl(bool avx2) {
    /* Refused only after the first product, and this runs before it. */
    (void)dnnl_set_max_cpu_isa(avx2 ? dnnl_cpu_isa_avx2 : dnnl_cpu_isa_sse41);
}
#else
static void limit_dnnl(bool avx2) {
    (void)avx2;
}
#endif

static void limit(void) {
    tu_instructions level = tu_instructions_get();
    if (!tu_instructions_asked() || (level != TU_REFERENCE && level != TU_AVX2))
        return; /* the best level has nothing to limit */
#if defined(__x86_64__)
    limit_blas(level == TU_AVX2 ? "Haswell" : "Prescott");
#else
    limit_blas("ARMV8");
#endif
    limit_dnnl(level == TU_AVX2);
}

void tu_libraries_limit(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, limit);
}
