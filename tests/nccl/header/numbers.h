/* SPDX-License-Identifier: Apache-2.0
 *
 * What Tutti has of NCCL's numbers and layouts: header.c has them from our declarations, theirs.c from nccl.h.
 */
#ifndef TESTS_NCCL_HEADER_NUMBERS_H
#define TESTS_NCCL_HEADER_NUMBERS_H

#include <stddef.h>

/* X(expression). The length of ncclConfig_t is not among them: newer ones are longer, which their size tells. */
#define NUMBERS(X)                            \
    X(ncclSuccess)                            \
    X(ncclUnhandledCudaError)                 \
    X(ncclSystemError)                        \
    X(ncclInternalError)                      \
    X(ncclInvalidArgument)                    \
    X(ncclInvalidUsage)                       \
    X(ncclRemoteError)                        \
    X(ncclInProgress)                         \
    X(sizeof(ncclResult_t))                   \
    X(ncclSum)                                \
    X(ncclProd)                               \
    X(ncclMax)                                \
    X(ncclMin)                                \
    X(ncclAvg)                                \
    X(sizeof(ncclRedOp_t))                    \
    X(ncclInt8)                               \
    X(ncclUint8)                              \
    X(ncclInt32)                              \
    X(ncclUint32)                             \
    X(ncclInt64)                              \
    X(ncclUint64)                             \
    X(ncclFloat16)                            \
    X(ncclFloat32)                            \
    X(ncclFloat64)                            \
    X(ncclBfloat16)                           \
    X(ncclFloat8e4m3)                         \
    X(ncclFloat8e5m2)                         \
    X(sizeof(ncclDataType_t))                 \
    X(ncclScalarHostImmediate)                \
    X(sizeof(ncclScalarResidence_t))          \
    X(NCCL_CONFIG_UNDEF_INT)                  \
    X(NCCL_WIN_COLL_SYMMETRIC)                \
    X(NCCL_WIN_REQUIRED_ALIGNMENT)            \
    X(sizeof(ncclUniqueId))                   \
    X(offsetof(ncclConfig_t, size))           \
    X(offsetof(ncclConfig_t, magic))          \
    X(offsetof(ncclConfig_t, version))        \
    X(offsetof(ncclConfig_t, blocking))       \
    X(offsetof(ncclConfig_t, cgaClusterSize)) \
    X(offsetof(ncclConfig_t, minCTAs))        \
    X(offsetof(ncclConfig_t, maxCTAs))        \
    X(offsetof(ncclConfig_t, netName))        \
    X(offsetof(ncclConfig_t, splitShare))     \
    X(offsetof(ncclConfig_t, trafficClass))   \
    X(offsetof(ncclConfig_t, commName))       \
    X(offsetof(ncclConfig_t, collnetEnable))  \
    X(offsetof(ncclConfig_t, CTAPolicy))      \
    X(offsetof(ncclConfig_t, shrinkShare))    \
    X(offsetof(ncclConfig_t, nvlsCTAs))

#define EACH_NUMBER(expression) (long long)(expression),

/* By nccl.h; `version` 0: there was none when this was built. */
extern const struct their_nccl {
    int version;
    long long numbers[64];
} their_nccl;
unsigned their_nccl_magic(void); /* of its initializer of ncclConfig_t */

#endif
