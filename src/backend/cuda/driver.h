/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA driver, loaded at run time. Only the types and functions that this backend uses are declared, in our own
 * words, so that its host side builds where no CUDA is installed. Numbers and layouts are those of the driver's ABI
 * (CUDA 12.3 to 13).
 */
#ifndef TU_CUDA_DRIVER_H
#define TU_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgraphNode_st *CUgraphNode;
typedef unsigned long long CUmemGenericAllocationHandle;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132,

    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_FABRIC = 8,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
    CU_MULTICAST_GRANULARITY_MINIMUM = 0,

    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_MEMORYTYPE_DEVICE = 2,

    CU_STREAM_NON_BLOCKING = 1,
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_PORTABLE = 1,

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
};

typedef struct CUmemLocation {
    int type, id;
} CUmemLocation;

typedef struct CUmemAllocationProp {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct CUDA_KERNEL_NODE_PARAMS { /* of version 12: a launch as a node of a graph */
    CUfunction function;
    unsigned blocks[3], threads[3], shared;
    void **parameters, **extra;
    void *kernel;
    CUcontext context;
} CUDA_KERNEL_NODE_PARAMS;
typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct CUmulticastObjectProp {
    unsigned int numDevices;
    size_t size;
    unsigned long long handleTypes, flags;
} CUmulticastObjectProp;

typedef struct CUuuid {
    unsigned char bytes[16];
} CUuuid;

typedef struct CUlaunchAttribute {
    int id;
    union {
        uint64_t room[8];
        int number;
        unsigned cluster[3];
        unsigned char domains[2];
    } value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned attribute_count;
} CUlaunchConfig;

enum {
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP = 9,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN = 10,
    CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT = 0
};

/* X(required, name, version asked of cuGetProcAddress, parameters) */
#define TU_CUDA_FUNCTIONS(X)                                                                                        \
    X(1, cuInit, 2000, (unsigned flags))                                                                            \
    X(1, cuDriverGetVersion, 2020, (int *version))                                                                  \
    X(1, cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                                       \
    X(1, cuDeviceGetCount, 2000, (int *count))                                                                      \
    X(1, cuDeviceGetUuid, 11040, (CUuuid * uuid, CUdevice device))                                                  \
    X(1, cuDeviceGetPCIBusId, 4010, (char *id, int bytes, CUdevice device))                                         \
    X(1, cuDeviceGetAttribute, 2000, (int *value, int attribute, CUdevice device))                                  \
    X(1, cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                                    \
    X(1, cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                                       \
    X(1, cuCtxGetCurrent, 4000, (CUcontext * context))                                                              \
    X(1, cuCtxSetCurrent, 4000, (CUcontext context))                                                                \
    X(1, cuCtxGetDevice, 2000, (CUdevice * device))                                                                 \
    X(1, cuCtxSynchronize, 2000, (void))                                                                            \
    X(1, cuCtxPushCurrent, 4000, (CUcontext context))                                                               \
    X(1, cuCtxPopCurrent, 4000, (CUcontext * context))                                                              \
    X(1, cuGetErrorName, 6000, (CUresult result, const char **name))                                                \
    X(1, cuGetErrorString, 6000, (CUresult result, const char **text))                                              \
    X(1, cuMemGetAllocationGranularity, 10020, (size_t * granularity, const CUmemAllocationProp *prop, int option)) \
    X(1, cuMemCreate, 10020,                                                                                        \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,                        \
       unsigned long long flags))                                                                                   \
    X(1, cuMemRelease, 10020, (CUmemGenericAllocationHandle handle))                                                \
    X(1, cuMemAddressReserve, 10020,                                                                                \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))          \
    X(1, cuMemAddressFree, 10020, (CUdeviceptr address, size_t bytes))                                              \
    X(1, cuMemMap, 10020,                                                                                           \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,                       \
       unsigned long long flags))                                                                                   \
    X(1, cuMemUnmap, 10020, (CUdeviceptr address, size_t bytes))                                                    \
    X(1, cuMemSetAccess, 10020, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *desc, size_t count))     \
    X(1, cuMemExportToShareableHandle, 10020,                                                                       \
      (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))                   \
    X(1, cuMemImportFromShareableHandle, 10020, (CUmemGenericAllocationHandle * handle, void *shareable, int type)) \
    X(1, cuMemRetainAllocationHandle, 11000, (CUmemGenericAllocationHandle * handle, void *address))                \
    X(0, cuMulticastCreate, 12010, (CUmemGenericAllocationHandle * handle, const CUmulticastObjectProp *prop))      \
    X(0, cuMulticastAddDevice, 12010, (CUmemGenericAllocationHandle handle, CUdevice device))                       \
    X(0, cuMulticastBindMem, 12010,                                                                                 \
      (CUmemGenericAllocationHandle multicast, size_t multicast_offset, CUmemGenericAllocationHandle memory,        \
       size_t memory_offset, size_t bytes, unsigned long long flags))                                               \
    X(0, cuMulticastUnbind, 12010,                                                                                  \
      (CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset, size_t bytes))                       \
    X(0, cuMulticastGetGranularity, 12010, (size_t * granularity, const CUmulticastObjectProp *prop, int option))   \
    X(1, cuMemsetD8Async, 3020, (CUdeviceptr address, unsigned char value, size_t count, CUstream stream))          \
    X(1, cuMemsetD32Async, 3020, (CUdeviceptr address, unsigned value, size_t count, CUstream stream))              \
    X(1, cuMemcpyAsync, 4000, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                    \
    X(1, cuMemcpyHtoDAsync, 3020, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))                \
    X(1, cuMemcpyDtoHAsync, 3020, (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                      \
    X(1, cuMemGetAddressRange, 3020, (CUdeviceptr * base, size_t * bytes, CUdeviceptr address))                     \
    X(1, cuMemAlloc, 3020, (CUdeviceptr * address, size_t bytes))                                                   \
    X(1, cuMemFree, 3020, (CUdeviceptr address))                                                                    \
    X(1, cuMemHostAlloc, 2020, (void **address, size_t bytes, unsigned flags))                                      \
    X(1, cuMemFreeHost, 2000, (void *address))                                                                      \
    X(1, cuMemHostRegister, 6050, (void *address, size_t bytes, unsigned flags))                                    \
    X(1, cuMemHostUnregister, 4000, (void *address))                                                                \
    X(1, cuMemHostGetDevicePointer, 3020, (CUdeviceptr * device, void *host, unsigned flags))                       \
    X(1, cuPointerGetAttributes, 7000, (unsigned count, int *attributes, void **values, CUdeviceptr address))       \
    X(1, cuStreamCreate, 2000, (CUstream * stream, unsigned flags))                                                 \
    X(1, cuStreamCreateWithPriority, 5050, (CUstream * stream, unsigned flags, int priority))                       \
    X(0, cuStreamGetId, 12000, (CUstream stream, unsigned long long *id))                                           \
    X(1, cuStreamGetCaptureInfo, 11030,                                                                             \
      (CUstream stream, int *status, unsigned long long *id, void **graph, const void **dependencies,               \
       size_t *dependency_count))                                                                                   \
    X(0, cuStreamBeginCapture, 10010, (CUstream stream, int mode))                                                  \
    X(0, cuStreamEndCapture, 10000, (CUstream stream, CUgraph * graph))                                             \
    X(0, cuThreadExchangeStreamCaptureMode, 10010, (int *mode))                                                     \
    X(0, cuGraphInstantiateWithFlags, 11040, (CUgraphExec * runnable, CUgraph graph, unsigned long long flags))     \
    X(0, cuGraphCreate, 10000, (CUgraph * graph, unsigned flags))                                                   \
    X(0, cuGraphAddKernelNode, 12000,                                                                               \
      (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t before_count,                           \
       const CUDA_KERNEL_NODE_PARAMS *kernel))                                                                      \
    X(0, cuGraphExecKernelNodeSetParams, 12000,                                                                     \
      (CUgraphExec runnable, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel))                              \
    X(0, cuGraphLaunch, 10000, (CUgraphExec runnable, CUstream stream))                                             \
    X(0, cuGraphExecDestroy, 10000, (CUgraphExec runnable))                                                         \
    X(0, cuGraphDestroy, 10000, (CUgraph graph))                                                                    \
    X(1, cuStreamDestroy, 4000, (CUstream stream))                                                                  \
    X(1, cuStreamSynchronize, 2000, (CUstream stream))                                                              \
    X(1, cuStreamQuery, 2000, (CUstream stream))                                                                    \
    X(1, cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned flags))                                 \
    X(1, cuStreamWriteValue32, 11070, (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags))       \
    X(1, cuEventCreate, 2000, (CUevent * event, unsigned flags))                                                    \
    X(1, cuEventRecord, 2000, (CUevent event, CUstream stream))                                                     \
    X(1, cuEventQuery, 2000, (CUevent event))                                                                       \
    X(1, cuEventSynchronize, 2000, (CUevent event))                                                                 \
    X(1, cuEventDestroy, 4000, (CUevent event))                                                                     \
    X(1, cuModuleLoadData, 2000, (CUmodule * module, const void *image))                                            \
    X(1, cuModuleUnload, 2000, (CUmodule module))                                                                   \
    X(1, cuModuleGetFunction, 2000, (CUfunction * function, CUmodule module, const char *name))                     \
    X(0, cuFuncSetAttribute, 9000, (CUfunction function, int attribute, int value))                                 \
    X(0, cuTensorMapEncodeTiled, 12000,                                                                             \
      (void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,           \
       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill))           \
    X(0, cuFuncLoad, 12040, (CUfunction function))                                                                  \
    X(0, cuModuleGetFunctionCount, 12040, (unsigned *count, CUmodule module))                                       \
    X(0, cuModuleEnumerateFunctions, 12040, (CUfunction * functions, unsigned count, CUmodule module))              \
    X(1, cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050,                                                         \
      (int *blocks, CUfunction function, int threads, size_t shared_bytes))                                         \
    X(0, cuOccupancyMaxActiveClusters, 11070, (int *clusters, CUfunction function, const CUlaunchConfig *config))   \
    X(0, cuLaunchKernelEx, 11060,                                                                                   \
      (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra))                         \
    X(1, cuLaunchKernel, 4000,                                                                                      \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,  \
       unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters, void **extra))

typedef struct tu_cuda_driver {
    void *library;
    int version;
#define X(required, name, since, parameters) CUresult(*name) parameters;
    TU_CUDA_FUNCTIONS(X)
#undef X
} tu_cuda_driver;

#endif
