/* SPDX-License-Identifier: Apache-2.0
 *
 * Our declarations of the driver, in a namespace of their own, and CUDA's, in one file. Functions are compared by what
 * each argument takes, since an enumeration of CUDA's is an int of ours; and with the declaration of the version that
 * is asked of cuGetProcAddress.
 */
#include "compare.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>

namespace {
struct shape {
    int count;
    char arguments[16][8];
};
template <typename Result, typename... Arguments> shape shape_of(Result (*)(Arguments...)) {
    shape made = { (int)sizeof...(Arguments), {} };
    const int bytes[] = { 0, (int)sizeof(Arguments)... };
    const bool addresses[] = { false, std::is_pointer<Arguments>::value... };
    for (int i = 0; i < made.count; i++)
        snprintf(made.arguments[i], sizeof made.arguments[i], "%d%s", bytes[i + 1], addresses[i + 1] ? "*" : "");
    return made;
}
struct function {
    const char *name;
    int version;
    shape takes;
};
struct number {
    const char *text;
    long long value;
};
} // namespace

/* X(what it is of ours, what it is of theirs) */
#define EQUAL(X, expression) X(expression, expression)
#define NUMBERS(X)                                                                                               \
    EQUAL(X, CUDA_SUCCESS)                                                                                       \
    EQUAL(X, CUDA_ERROR_OUT_OF_MEMORY)                                                                           \
    EQUAL(X, CUDA_ERROR_INVALID_CONTEXT)                                                                         \
    EQUAL(X, CUDA_ERROR_INVALID_HANDLE)                                                                          \
    EQUAL(X, CUDA_ERROR_NOT_READY)                                                                               \
    EQUAL(X, CUDA_ERROR_NOT_PERMITTED)                                                                           \
    EQUAL(X, CUDA_ERROR_NOT_SUPPORTED)                                                                           \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)                                                           \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)                                                       \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)                                                       \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)                                            \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)                                    \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)                                        \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)                                                   \
    EQUAL(X, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)                                                            \
    EQUAL(X, CU_MEM_ALLOCATION_TYPE_PINNED)                                                                      \
    EQUAL(X, CU_MEM_LOCATION_TYPE_DEVICE)                                                                        \
    EQUAL(X, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)                                                           \
    EQUAL(X, CU_MEM_HANDLE_TYPE_FABRIC)                                                                          \
    EQUAL(X, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)                                                                 \
    EQUAL(X, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)                                                               \
    EQUAL(X, CU_MULTICAST_GRANULARITY_MINIMUM)                                                                   \
    EQUAL(X, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)                                                                   \
    EQUAL(X, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)                                                                \
    EQUAL(X, CU_MEMORYTYPE_DEVICE)                                                                               \
    EQUAL(X, CU_STREAM_NON_BLOCKING)                                                                             \
    EQUAL(X, CU_STREAM_CAPTURE_STATUS_NONE)                                                                      \
    EQUAL(X, CU_EVENT_DISABLE_TIMING)                                                                            \
    X(CU_MEMHOSTALLOC_PORTABLE, THEIR_MEMHOSTALLOC_PORTABLE)                                                     \
    X(CU_MEMHOSTALLOC_DEVICEMAP, THEIR_MEMHOSTALLOC_DEVICEMAP)                                                   \
    X(CU_MEMHOSTREGISTER_PORTABLE, THEIR_MEMHOSTREGISTER_PORTABLE)                                               \
    EQUAL(X, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)                                                    \
    EQUAL(X, CU_TENSOR_MAP_DATA_TYPE_UINT8)                                                                      \
    EQUAL(X, CU_TENSOR_MAP_DATA_TYPE_FLOAT16)                                                                    \
    EQUAL(X, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)                                                                   \
    EQUAL(X, CU_TENSOR_MAP_SWIZZLE_128B)                                                                         \
    EQUAL(X, CU_TENSOR_MAP_L2_PROMOTION_L2_256B)                                                                 \
    EQUAL(X, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)                                                              \
    EQUAL(X, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)                                              \
    EQUAL(X, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP)                                                            \
    EQUAL(X, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN)                                                                \
    EQUAL(X, CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT)                                                                  \
    EQUAL(X, sizeof(CUresult))                                                                                   \
    EQUAL(X, sizeof(CUdevice))                                                                                   \
    EQUAL(X, sizeof(CUdeviceptr))                                                                                \
    EQUAL(X, sizeof(CUmemGenericAllocationHandle))                                                               \
    EQUAL(X, sizeof(CUuuid))                                                                                     \
    EQUAL(X, sizeof(CUmemLocation))                                                                              \
    EQUAL(X, offsetof(CUmemLocation, id))                                                                        \
    EQUAL(X, sizeof(CUmemAllocationProp))                                                                        \
    EQUAL(X, offsetof(CUmemAllocationProp, requestedHandleTypes))                                                \
    EQUAL(X, offsetof(CUmemAllocationProp, location))                                                            \
    EQUAL(X, offsetof(CUmemAllocationProp, win32HandleMetaData))                                                 \
    EQUAL(X, offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable))                                     \
    EQUAL(X, offsetof(CUmemAllocationProp, allocFlags.usage))                                                    \
    EQUAL(X, sizeof(CUmemAccessDesc))                                                                            \
    EQUAL(X, offsetof(CUmemAccessDesc, flags))                                                                   \
    EQUAL(X, sizeof(CUmulticastObjectProp))                                                                      \
    EQUAL(X, offsetof(CUmulticastObjectProp, size))                                                              \
    EQUAL(X, offsetof(CUmulticastObjectProp, handleTypes))                                                       \
    EQUAL(X, offsetof(CUmulticastObjectProp, flags))                                                             \
    EQUAL(X, sizeof(CUlaunchAttribute))                                                                          \
    EQUAL(X, offsetof(CUlaunchAttribute, value))                                                                 \
    X(offsetof(CUlaunchAttribute, value.cluster[2]), offsetof(CUlaunchAttribute, value.clusterDim.z))            \
    X(offsetof(CUlaunchAttribute, value.domains[1]), offsetof(CUlaunchAttribute, value.memSyncDomainMap.remote)) \
    EQUAL(X, sizeof(CUlaunchConfig))                                                                             \
    X(offsetof(CUlaunchConfig, block_x), offsetof(CUlaunchConfig, blockDimX))                                    \
    X(offsetof(CUlaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes))                          \
    X(offsetof(CUlaunchConfig, stream), offsetof(CUlaunchConfig, hStream))                                       \
    X(offsetof(CUlaunchConfig, attributes), offsetof(CUlaunchConfig, attrs))                                     \
    X(offsetof(CUlaunchConfig, attribute_count), offsetof(CUlaunchConfig, numAttrs))                             \
    X(sizeof(CUDA_KERNEL_NODE_PARAMS), sizeof(CUDA_KERNEL_NODE_PARAMS_v2))                                       \
    X(offsetof(CUDA_KERNEL_NODE_PARAMS, threads), offsetof(CUDA_KERNEL_NODE_PARAMS_v2, blockDimX))               \
    X(offsetof(CUDA_KERNEL_NODE_PARAMS, shared), offsetof(CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes))           \
    X(offsetof(CUDA_KERNEL_NODE_PARAMS, parameters), offsetof(CUDA_KERNEL_NODE_PARAMS_v2, kernelParams))         \
    X(offsetof(CUDA_KERNEL_NODE_PARAMS, extra), offsetof(CUDA_KERNEL_NODE_PARAMS_v2, extra))                     \
    X(offsetof(CUDA_KERNEL_NODE_PARAMS, kernel), offsetof(CUDA_KERNEL_NODE_PARAMS_v2, kern))                     \
    X(offsetof(CUDA_KERNEL_NODE_PARAMS, context), offsetof(CUDA_KERNEL_NODE_PARAMS_v2, ctx))

/* Before CUDA's headers, whose macros give some of these names another meaning. */
namespace ours {
#include "backend/cuda/driver.h"

#define X(of_ours, of_theirs) { #of_ours, (long long)(of_ours) },
const number numbers[] = { NUMBERS(X) };
#undef X
#define X(required, name, since, parameters) { #name, since, shape_of((CUresult(*) parameters) nullptr) },
const function functions[] = { TU_CUDA_FUNCTIONS(X) };
#undef X
} // namespace ours

#ifdef TEST_HAS_CUDA_H
#include <cudaTypedefs.h>
#endif

#if defined TEST_HAS_CUDA_H && CUDA_VERSION >= 13000

namespace theirs {
enum {
    THEIR_MEMHOSTALLOC_PORTABLE = CU_MEMHOSTALLOC_PORTABLE,
    THEIR_MEMHOSTALLOC_DEVICEMAP = CU_MEMHOSTALLOC_DEVICEMAP,
    THEIR_MEMHOSTREGISTER_PORTABLE = CU_MEMHOSTREGISTER_PORTABLE
};
#define X(of_ours, of_theirs) (long long)(of_theirs),
const long long numbers[] = { NUMBERS(X) };
#undef X
#define X(required, name, since, parameters) shape_of((PFN_##name##_v##since) nullptr),
const shape functions[] = { TU_CUDA_FUNCTIONS(X) };
#undef X
} // namespace theirs

int cuda_header_compare(const char **difference) {
    static char text[256];
    const int numbers = sizeof theirs::numbers / sizeof theirs::numbers[0],
              functions = sizeof theirs::functions / sizeof theirs::functions[0];
    *difference = nullptr;
    for (int i = 0; i < numbers; i++)
        if (ours::numbers[i].value != theirs::numbers[i]) {
            snprintf(text, sizeof text, "%s is %lld in Tutti and %lld in cuda.h", ours::numbers[i].text,
                     ours::numbers[i].value, theirs::numbers[i]);
            *difference = text;
        }
    for (int i = 0; i < functions; i++) {
        const function &our = ours::functions[i];
        const shape &their = theirs::functions[i];
        if (our.takes.count != their.count)
            snprintf(text, sizeof text, "%s of version %d takes %d arguments in Tutti and %d in cuda.h", our.name,
                     our.version, our.takes.count, their.count);
        for (int k = 0; k < their.count && our.takes.count == their.count; k++)
            if (strcmp(our.takes.arguments[k], their.arguments[k]) != 0)
                snprintf(text, sizeof text, "argument %d of %s of version %d has %s bytes in Tutti and %s in cuda.h", k,
                         our.name, our.version, our.takes.arguments[k], their.arguments[k]);
        if (text[0] != 0)
            *difference = text;
    }
    return numbers + functions;
}
#else
int cuda_header_compare(const char **difference) {
    (void)ours::numbers, (void)ours::functions;
    *difference = nullptr;
    return 0;
}
#endif
