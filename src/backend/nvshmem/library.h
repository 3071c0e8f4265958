/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of NVSHMEM's host library that Tutti uses: its functions by name, and the few structs that they take, as the
 * headers of NVSHMEM 3.4 lay them out. Declared here, so that nothing of NVSHMEM is needed to build this side.
 */
#ifndef TU_NVSHMEM_LIBRARY_H
#define TU_NVSHMEM_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#include "backend/cuda/driver.h"

#define TU_NVSHMEM_LIBRARY "libnvshmem_host.so.3"
#define TU_NVSHMEM_OLDEST 30400 /* major * 10000 + minor * 100 + patch */

/* The first word of each struct: edition << 16 | bytes. */
#define TU_NVSHMEM_VERSION(edition, type) ((edition) << 16 | (int)sizeof(type))

typedef struct tu_nvshmem_id {
    int version;
    char opaque[124];
} tu_nvshmem_id;

typedef struct tu_nvshmem_id_args {
    int version;
    tu_nvshmem_id *id;
    int rank, size;
} tu_nvshmem_id_args;

typedef struct tu_nvshmem_init {
    int version;
    void *communicator; /* of MPI: not used */
    struct {
        int version;
        tu_nvshmem_id_args id;
        char reserved[96];
    } args;
} tu_nvshmem_init;

typedef struct tu_nvshmem_team_config {
    int version;
    int contexts;
    uint64_t id;
    char reserved[48];
} tu_nvshmem_team_config;

_Static_assert(sizeof(tu_nvshmem_id) == 128 && sizeof(tu_nvshmem_id_args) == 24 && sizeof(tu_nvshmem_init) == 144 &&
                   sizeof(tu_nvshmem_team_config) == 64,
               "the structs of NVSHMEM 3.4");

enum {
    TU_NVSHMEM_BY_UNIQUE_ID = 1 << 3, /* flag of the initialisation */
    TU_NVSHMEM_CONFIG_BY_ID = 2,      /* of a team: its members are known by an id */
    TU_NVSHMEM_TEAM_WORLD = 0
};

/* What nvshmemx_init_status says. */
enum {
    TU_NVSHMEM_NOT_INITIALISED = 0,
    TU_NVSHMEM_BOOTSTRAPPED = 1,
    TU_NVSHMEM_INITIALISED = 2,
    TU_NVSHMEM_LIMITED_SHARING = 3, /* several processes on one GPU: calls on teams would end the process */
    TU_NVSHMEM_FULL_SHARING = 4
};

#define TU_NVSHMEM_FUNCTIONS(X)                                                                                   \
    X(void, nvshmemx_vendor_get_version_info, (int *major, int *minor, int *patch))                               \
    X(int, nvshmemx_init_status, (void))                                                                          \
    X(int, nvshmemx_get_uniqueid, (tu_nvshmem_id * id))                                                           \
    X(int, nvshmemx_set_attr_uniqueid_args, (int rank, int size, const tu_nvshmem_id *id, tu_nvshmem_init *init)) \
    X(int, nvshmemx_hostlib_init_attr, (unsigned flags, tu_nvshmem_init *init))                                   \
    X(int, nvshmem_my_pe, (void))                                                                                 \
    X(int, nvshmem_n_pes, (void))                                                                                 \
    X(void *, nvshmem_malloc, (size_t bytes))                                                                     \
    X(void *, nvshmem_ptr, (const void *address, int pe))                                                         \
    X(void *, nvshmemx_mc_ptr, (int32_t team, const void *address))                                               \
    X(int, nvshmemx_team_get_uniqueid, (uint64_t * id))                                                           \
    X(int, nvshmemx_team_init, (int32_t * team, tu_nvshmem_team_config * config, long mask, int size, int rank))  \
    X(void, nvshmem_team_destroy, (int32_t team))                                                                 \
    X(void, nvshmemx_putmem_on_stream, (void *to, const void *from, size_t bytes, int pe, CUstream stream))       \
    X(void, nvshmemx_getmem_on_stream, (void *to, const void *from, size_t bytes, int pe, CUstream stream))       \
    X(void, nvshmemx_quiet_on_stream, (CUstream stream))                                                          \
    X(int, nvshmemx_cumodule_init, (CUmodule module))

typedef struct tu_nvshmem_library {
    int version; /* as TU_NVSHMEM_OLDEST */
#define X(result, name, parameters) result(*name) parameters;
    TU_NVSHMEM_FUNCTIONS(X)
#undef X
} tu_nvshmem_library;

/* The process's, loaded at the first call; lent. NOT_FOUND: there is none; BACKEND: it is too old or broken; says which
 * and what to install. */
tutti_status tu_nvshmem_library_get(const tu_backend_host *host, const tu_nvshmem_library **library);

#endif
