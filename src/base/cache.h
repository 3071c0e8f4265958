/* SPDX-License-Identifier: Apache-2.0
 *
 * How large the caches are.
 */
#ifndef TU_BASE_CACHE_H
#define TU_BASE_CACHE_H

#include <stddef.h>

/* Bytes of one cache of level 1 (data), 2 or 3, as the first processor has it; 0: there is none, or the system does not
 * tell. */
size_t tu_cache_bytes(int level);

/* The last one before memory; 32 MiB where the system does not tell. */
size_t tu_cache_last_bytes(void);

#endif
