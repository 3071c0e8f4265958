/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals of the CPU backend, for its table: mailbox.c.
 */
#ifndef TU_BACKEND_SHM_SHM_H
#define TU_BACKEND_SHM_SHM_H

#include "memory/backend.h"

/* To and from members on other hosts. */
tutti_status tu_shm_put_far(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                            const tu_backend_call *call);
tutti_status tu_shm_get_far(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                            const tu_backend_call *call);

size_t tu_shm_area_bytes(int size, int channels);
tutti_status tu_shm_attach(tu_backend_peers *peers);
void tu_shm_detach(tu_backend_peers *peers);
void tu_shm_reset(const tu_backend_peers *peers);
tutti_status tu_shm_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call);
tutti_status tu_shm_wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call);
tutti_status tu_shm_test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived);
tutti_status tu_shm_barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call);
tutti_status tu_shm_set_word(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                             const tu_backend_call *call);
tutti_status tu_shm_wait_word(const tu_backend_peers *peers, size_t offset, bool equal, uint64_t value,
                              const tu_backend_call *call);

#endif
