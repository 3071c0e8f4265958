/* SPDX-License-Identifier: Apache-2.0
 *
 * NVSHMEM's structs and numbers as Tutti declares them, beside NVSHMEM's own headers where there were some when the
 * tests were built. Editions of a struct grow in what an older one keeps in reserve.
 */
#include "../harness.h"
#include "memory/backend.h"

#include "backend/nvshmem/library.h"

#ifdef TEST_HAS_NVSHMEM_H
#include <assert.h>
#include <limits.h>

#include <device_host/nvshmem_types.h>
#include <device_host_transport/nvshmem_common_transport.h>
#include <device_host_transport/nvshmem_constants.h>

#define SAME(ours, theirs)                                                                             \
    do {                                                                                               \
        if ((long long)(ours) != (long long)(theirs))                                                  \
            FAIL("%s is %lld and %s is %lld", #ours, (long long)(ours), #theirs, (long long)(theirs)); \
    } while (0)
#endif

TEST(what_tutti_declares_of_nvshmem_is_what_its_headers_declare) {
#ifdef TEST_HAS_NVSHMEM_H
    SAME(sizeof(tu_nvshmem_id), sizeof(nvshmemx_uniqueid_v1));
    SAME(offsetof(tu_nvshmem_id, opaque), offsetof(nvshmemx_uniqueid_v1, internal));
    SAME(sizeof(tu_nvshmem_id_args), sizeof(nvshmemx_uniqueid_args_v1));
    SAME(offsetof(tu_nvshmem_id_args, id), offsetof(nvshmemx_uniqueid_args_v1, id));
    SAME(offsetof(tu_nvshmem_id_args, rank), offsetof(nvshmemx_uniqueid_args_v1, myrank));
    SAME(offsetof(tu_nvshmem_id_args, size), offsetof(nvshmemx_uniqueid_args_v1, nranks));
    SAME(sizeof(tu_nvshmem_init), sizeof(nvshmemx_init_attr_v1));
    SAME(offsetof(tu_nvshmem_init, args), offsetof(nvshmemx_init_attr_v1, args));
    SAME(offsetof(tu_nvshmem_init, args.id), offsetof(nvshmemx_init_attr_v1, args.uid_args));
    SAME(offsetof(tu_nvshmem_init, args.reserved),
         offsetof(nvshmemx_init_attr_v1, args) + offsetof(nvshmemx_init_args_v1, content));
    SAME(sizeof(tu_nvshmem_team_config), sizeof(nvshmem_team_config_v2));
    SAME(offsetof(tu_nvshmem_team_config, contexts), offsetof(nvshmem_team_config_v2, num_contexts));
    SAME(offsetof(tu_nvshmem_team_config, id), offsetof(nvshmem_team_config_v2, uniqueid));
    SAME(TU_NVSHMEM_CONFIG_BY_ID, NVSHMEM_TEAM_CONFIG_MASK_UNIQUEID);
    SAME(TU_NVSHMEM_NOT_INITIALISED, NVSHMEM_STATUS_NOT_INITIALIZED);
    SAME(TU_NVSHMEM_BOOTSTRAPPED, NVSHMEM_STATUS_IS_BOOTSTRAPPED);
    SAME(TU_NVSHMEM_INITIALISED, NVSHMEM_STATUS_IS_INITIALIZED);
    SAME(TU_NVSHMEM_LIMITED_SHARING, NVSHMEM_STATUS_LIMITED_MPG);
    SAME(TU_NVSHMEM_FULL_SHARING, NVSHMEM_STATUS_FULL_MPG);
    SAME(9, NVSHMEM_SIGNAL_SET); /* which the stand-in of its device functions has */
#else
    SKIP("there were no headers of NVSHMEM 3.4 or newer, with CUDA's, when this was built");
#endif
}
