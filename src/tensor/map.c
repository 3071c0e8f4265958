/* SPDX-License-Identifier: Apache-2.0
 *
 * Open addressing; nothing is ever taken out.
 */
#include "tensor/map.h"

#include <stdint.h>
#include <stdlib.h>

static tu_map_entry *place_of(const tu_map *map, const void *key) {
    size_t at = (size_t)(((uintptr_t)key >> 4) * 0x9E3779B97F4A7C15u >> 20) & (map->capacity - 1);
    while (map->entries[at].key != NULL && map->entries[at].key != key)
        at = (at + 1) & (map->capacity - 1);
    return &map->entries[at];
}

void *tu_map_get(const tu_map *map, const void *key) {
    return map->capacity == 0 ? NULL : place_of(map, key)->value;
}

static tutti_status grow(tu_map *map) {
    tu_map larger = { .count = map->count, .capacity = map->capacity == 0 ? 64 : map->capacity * 2 };
    larger.entries = calloc(larger.capacity, sizeof *larger.entries);
    if (larger.entries == NULL)
        return tu_error_memory("what a capture remembers", larger.capacity * sizeof *larger.entries);
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].key != NULL)
            *place_of(&larger, map->entries[i].key) = map->entries[i];
    free(map->entries);
    *map = larger;
    return TUTTI_OK;
}

tutti_status tu_map_set(tu_map *map, const void *key, void *value) {
    if (map->count * 2 >= map->capacity) {
        tutti_status status = grow(map);
        if (status != TUTTI_OK)
            return status;
    }
    tu_map_entry *entry = place_of(map, key);
    map->count += entry->key == NULL;
    *entry = (tu_map_entry){ key, value };
    return TUTTI_OK;
}

void tu_map_free(tu_map *map) {
    free(map->entries);
    *map = (tu_map){ NULL, 0, 0 };
}
