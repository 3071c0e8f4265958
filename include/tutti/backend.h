/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends that all ranks open together: libraries that want every process of a job to come at the same time, such as
 * NVSHMEM and NCCL.
 *
 *     tutti_backend_open(world, "nvshmem", NULL);                      (every rank, once)
 *     tutti_memory_set_backend(world, TUTTI_CUDA, "nvshmem");          (its memory is the memory of GPUs from here on)
 *     tutti_memory_alloc(world, bytes, &options, &memory);             (local, as ever)
 *
 * No other call opens such a backend: an allocation or a collective that would need it fails with TUTTI_ERROR_STATE and
 * names this one. "shm" and "cuda" need no opening; for them it only makes sure that every rank has them. Which backend
 * is good for what is told in docs/gpu.md.
 */
#ifndef TUTTI_BACKEND_H
#define TUTTI_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/group.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Collective over the world, bounded by call->timeout_ns, of which nothing else is read; NULL: the world's. First all
 * ranks tell each other that they are there, which backend they mean, and that they have it; only then is the library
 * entered. Again on an open backend it changes nothing.
 *
 * A rank that does not have the backend, or whose library or device cannot do it, fails all of them with its status and
 * its words; different names are TUTTI_ERROR_MISMATCH on all. Neither ends anything. A death, a deadline or an abort
 * ends the world's group, as in every collective. A library that was entered and does not come back within the deadline
 * is left to itself: the backend then stays closed until the process ends. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_backend_open(tutti_world *world, const char *name, const tutti_call *call);

/* Gives an open backend `bytes` more bytes of memory on every rank, from which later allocations are served: for one
 * whose memory is reserved when it is opened (TUTTI_NVSHMEM_HEAP). Collective and bounded likewise; different sizes are
 * TUTTI_ERROR_MISMATCH on all, and a rank without so much memory fails all. A backend that allocates as it goes is
 * TUTTI_ERROR_UNSUPPORTED. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_backend_grow(tutti_world *world, const char *name, size_t bytes,
                                                        const tutti_call *call);

/* Makes a module of the program's own kernels (a CUmodule) ready for the library's device functions, such as those of
 * nvshmem.h. Local. The backend must be open; one without such functions is TUTTI_ERROR_UNSUPPORTED. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_backend_module(tutti_world *world, const char *name, void *module);

/* The library's own object for a group, for kernels and calls of the program's: a team of NVSHMEM (nvshmem_team_t), in
 * which a member has its rank in the group. Any set of ranks has one. Collective over the group and bounded by
 * call->timeout_ns at the first call for a group; kept until the group is released. It stays Tutti's.
 *
 * TUTTI_ERROR_LIMIT where there are as many as TUTTI_NVSHMEM_TEAMS allows, and TUTTI_ERROR_UNSUPPORTED where the
 * library has none (processes that share a GPU without their share of MPS) or the backend no such thing: on all
 * members, and they end nothing. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_backend_team(tutti_group *group, const char *name, const tutti_call *call,
                                                        int32_t *team);

/* Lends a communicator of the program's own library (an ncclComm_t) to the group's collectives and symmetric memory by
 * that backend, in place of one that Tutti would make. Local; every member gives one before the group's first use of
 * the backend (after it: TUTTI_ERROR_STATE), or none does (else that first use is TUTTI_ERROR_MISMATCH). Its size and
 * rank must be the group's. It must be non-blocking (ncclConfig_t.blocking = 0), so that no call stays inside the
 * library beyond its deadline. It stays the program's: Tutti never frees it, and it must live until the group is
 * released. When the group ends by an error, Tutti revokes it (ncclCommRevoke, NCCL 2.28): nothing runs on it any
 * more, and the program destroys it. A backend without communicators is TUTTI_ERROR_UNSUPPORTED. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_backend_communicator(tutti_group *group, const char *name,
                                                                void *communicator);

#ifdef __cplusplus
}
#endif
#endif
