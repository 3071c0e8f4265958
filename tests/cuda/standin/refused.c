/* SPDX-License-Identifier: Apache-2.0
 *
 * What CUDA's runtime has and its stand-in (runtime.cpp) has not: PyTorch is linked to more than it calls here, and
 * each version to something else. The names are all that CUDA's header declares, in a list that CMake writes; the
 * stand-in's own functions take the place of these.
 */
int standin_refused(const char *name);

#define REFUSED(name)                                             \
    __attribute__((weak, visibility("default"))) int name(void) { \
        return standin_refused(#name);                            \
    }
#include "refused.def"
REFUSED(cudaProfilerStart)
REFUSED(cudaProfilerStop)
