/* SPDX-License-Identifier: Apache-2.0
 *
 * libucp, loaded at run time: nothing of Tutti needs it until a group spans hosts.
 */
#ifndef TU_BACKEND_UCX_UCX_H
#define TU_BACKEND_UCX_UCX_H

#include <ucp/api/ucp.h>

#include "memory/network_part.h"

#define TU_UCX_FUNCTIONS(X)           \
    X(ucp_get_version)                \
    X(ucp_config_read)                \
    X(ucp_config_modify)              \
    X(ucp_config_release)             \
    X(ucp_init_version)               \
    X(ucp_cleanup)                    \
    X(ucp_worker_create)              \
    X(ucp_worker_destroy)             \
    X(ucp_worker_query)               \
    X(ucp_worker_get_address)         \
    X(ucp_worker_release_address)     \
    X(ucp_worker_get_efd)             \
    X(ucp_worker_arm)                 \
    X(ucp_worker_progress)            \
    X(ucp_worker_set_am_recv_handler) \
    X(ucp_worker_flush_nbx)           \
    X(ucp_worker_fence)               \
    X(ucp_context_print_info)         \
    X(ucp_ep_create)                  \
    X(ucp_ep_close_nbx)               \
    X(ucp_ep_flush_nbx)               \
    X(ucp_ep_print_info)              \
    X(ucp_ep_rkey_unpack)             \
    X(ucp_rkey_destroy)               \
    X(ucp_rkey_pack)                  \
    X(ucp_rkey_buffer_release)        \
    X(ucp_mem_map)                    \
    X(ucp_mem_unmap)                  \
    X(ucp_put_nbx)                    \
    X(ucp_get_nbx)                    \
    X(ucp_am_send_nbx)                \
    X(ucp_am_data_release)            \
    X(ucp_request_check_status)       \
    X(ucp_request_free)               \
    X(ucs_status_string)

typedef struct tu_ucx_library {
#define TU_UCX_POINTER(name) __typeof__(name) *name;
    TU_UCX_FUNCTIONS(TU_UCX_POINTER)
#undef TU_UCX_POINTER
} tu_ucx_library;

/* Loads it once per process, without its signal handlers and memory hooks. */
tutti_status tu_ucx_load(const tu_backend_host *host, const tu_ucx_library **library);

#endif
