/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointers by pointers: what walks remember of tensors, storages, nodes and values.
 */
#ifndef TU_TENSOR_MAP_H
#define TU_TENSOR_MAP_H

#include <stddef.h>

#include "base/error.h"

typedef struct tu_map_entry {
    const void *key;
    void *value;
} tu_map_entry;

typedef struct tu_map {
    tu_map_entry *entries;
    size_t count, capacity; /* a power of two, or 0 */
} tu_map;

/* NULL where there is nothing. */
void *tu_map_get(const tu_map *map, const void *key);
/* Puts a value that is not NULL there, in the place of the one before. */
tutti_status tu_map_set(tu_map *map, const void *key, void *value);
void tu_map_free(tu_map *map);

#endif
