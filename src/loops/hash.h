/* SPDX-License-Identifier: Apache-2.0
 *
 * Names for contents: FNV-1a of 128 bits. It tells texts apart; it does not keep out those who mean harm, who have no
 * way into the folder.
 */
#ifndef TU_LOOPS_HASH_H
#define TU_LOOPS_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct tu_hash {
    unsigned __int128 state;
} tu_hash;

#define TU_HASH_TEXT 33

static inline tu_hash tu_hash_begin(void) {
    return (tu_hash){ (unsigned __int128)0x6c62272e07bb0142u << 64 | 0x62b821756295c58du };
}

static inline void tu_hash_add(tu_hash *hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    const unsigned __int128 prime = (unsigned __int128)1 << 88 | 0x13b;
    for (size_t i = 0; i < bytes; i++)
        hash->state = (hash->state ^ at[i]) * prime;
}

static inline void tu_hash_text(const tu_hash *hash, char *text) {
    snprintf(text, TU_HASH_TEXT, "%016llx%016llx", (unsigned long long)(hash->state >> 64),
             (unsigned long long)hash->state);
}

#endif
