/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL, loaded at run time. Only what this backend uses is declared, in our own words, so that it builds where NCCL is
 * not installed. Numbers, layouts and functions are those of NCCL's ABI from 2.27 on; tests/nccl/header.c compares them
 * with nccl.h where there is one, and for that its own declarations count where it was included before.
 */
#ifndef TU_NCCL_LIBRARY_H
#define TU_NCCL_LIBRARY_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>

struct CUstream_st;

#ifndef NCCL_H_
typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

typedef enum ncclRedOp_t {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclMaxRedOp = 0x7fffffff /* the type is as wide as an int */
} ncclRedOp_t;

typedef enum ncclDataType_t {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11
} ncclDataType_t;

typedef enum ncclScalarResidence_t {
    ncclScalarHostImmediate = 1
} ncclScalarResidence_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

/* As 2.27 has it. Newer ones take it with its size and version, and fill in the rest. */
typedef struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;
#endif

#define TU_NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#define TU_NCCL_OLDEST TU_NCCL_VERSION(2, 27, 0)
#define TU_NCCL_CONFIG_MAGIC 0xcafebeefu

/* A set of ranks of a communicator, by arithmetic: rank, rank + stride, … */
typedef struct tu_nccl_team {
    int size, rank, stride;
} tu_nccl_team;

/* The beginning of what a window is in device memory, in 2.28: LSA rank r has it at base + r * stride4G * 4 GiB. */
typedef struct tu_nccl_window {
    void *host;
    char *base;
    int lsa_rank, world_rank;
    uint32_t stride4G, multicast_offset4K;
} tu_nccl_window;

/* X(since, name, result, parameters): what has `since` 0 must be there. */
#define TU_NCCL_FUNCTIONS(X)                                                                                         \
    X(0, ncclGetVersion, ncclResult_t, (int *version))                                                               \
    X(0, ncclGetUniqueId, ncclResult_t, (ncclUniqueId * id))                                                         \
    X(0, ncclGetErrorString, const char *, (ncclResult_t result))                                                    \
    X(0, ncclGetLastError, const char *, (ncclComm_t comm))                                                          \
    X(0, ncclCommInitRankConfig, ncclResult_t,                                                                       \
      (ncclComm_t * comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config))                                \
    X(0, ncclCommSplit, ncclResult_t, (ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config)) \
    X(0, ncclCommGetAsyncError, ncclResult_t, (ncclComm_t comm, ncclResult_t * error))                               \
    X(0, ncclCommFinalize, ncclResult_t, (ncclComm_t comm))                                                          \
    X(0, ncclCommDestroy, ncclResult_t, (ncclComm_t comm))                                                           \
    X(0, ncclCommAbort, ncclResult_t, (ncclComm_t comm))                                                             \
    X(0, ncclCommCount, ncclResult_t, (const ncclComm_t comm, int *count))                                           \
    X(0, ncclCommUserRank, ncclResult_t, (const ncclComm_t comm, int *rank))                                         \
    X(0, ncclCommCuDevice, ncclResult_t, (const ncclComm_t comm, int *device))                                       \
    X(0, ncclGroupStart, ncclResult_t, (void))                                                                       \
    X(0, ncclGroupEnd, ncclResult_t, (void))                                                                         \
    X(0, ncclAllReduce, ncclResult_t,                                                                                \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,                \
       struct CUstream_st *stream))                                                                                  \
    X(0, ncclReduce, ncclResult_t,                                                                                   \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,      \
       struct CUstream_st *stream))                                                                                  \
    X(0, ncclReduceScatter, ncclResult_t,                                                                            \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,                \
       struct CUstream_st *stream))                                                                                  \
    X(0, ncclAllGather, ncclResult_t,                                                                                \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm, struct CUstream_st *stream))   \
    X(0, ncclBroadcast, ncclResult_t,                                                                                \
      (const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,                      \
       struct CUstream_st *stream))                                                                                  \
    X(0, ncclSend, ncclResult_t,                                                                                     \
      (const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, struct CUstream_st *stream))  \
    X(0, ncclRecv, ncclResult_t,                                                                                     \
      (void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, struct CUstream_st *stream))          \
    X(0, ncclRedOpCreatePreMulSum, ncclResult_t,                                                                     \
      (ncclRedOp_t * op, void *scalar, ncclDataType_t type, ncclScalarResidence_t where, ncclComm_t comm))           \
    X(0, ncclRedOpDestroy, ncclResult_t, (ncclRedOp_t op, ncclComm_t comm))                                          \
    X(0, ncclMemAlloc, ncclResult_t, (void **address, size_t bytes))                                                 \
    X(0, ncclMemFree, ncclResult_t, (void *address))                                                                 \
    X(0, ncclCommWindowRegister, ncclResult_t,                                                                       \
      (ncclComm_t comm, void *address, size_t bytes, ncclWindow_t *window, int flags))                               \
    X(0, ncclCommWindowDeregister, ncclResult_t, (ncclComm_t comm, ncclWindow_t window))                             \
    X(22800, ncclCommRevoke, ncclResult_t, (ncclComm_t comm, int flags))                                             \
    X(22800, ncclTeamLsa, tu_nccl_team, (ncclComm_t comm))                                                           \
    X(22900, ncclGetPeerDevicePointer, ncclResult_t, (ncclWindow_t window, size_t offset, int peer, void **pointer)) \
    X(22900, ncclGetLsaMultimemDevicePointer, ncclResult_t, (ncclWindow_t window, size_t offset, void **pointer))

typedef struct tu_nccl_library {
    void *handle;
    int version;
    char path[512]; /* of the file that was found; "" when unknown */
#define X(since, name, result, parameters) result(*name) parameters;
    TU_NCCL_FUNCTIONS(X)
#undef X
} tu_nccl_library;

struct tu_backend_host;
/* Finds libnccl.so.2 and its functions. NOT_FOUND: there is none; BACKEND: it is too old or broken; says which and what
 * to install. */
tutti_status tu_nccl_library_load(const struct tu_backend_host *host, tu_nccl_library *library);
/* One line: which version, where, and what it can. */
void tu_nccl_library_describe(const tu_nccl_library *library, char *text, size_t bytes);

#endif
