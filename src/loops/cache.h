/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder of the cache and its files: see build.h.
 */
#ifndef TU_LOOPS_CACHE_H
#define TU_LOOPS_CACHE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tu_cache {
    int folder; /* a descriptor */
    char path[PATH_MAX];
} tu_cache;

/* Opens the folder, and makes it where there is none. False with the cause: it is not the user's alone, or cannot be
 * made. */
bool tu_cache_open(tu_cache *cache, char *reason, size_t reason_size);
void tu_cache_close(tu_cache *cache);

/* A file whose contents are whole, as dlopen's handle; NULL where there is none, or what is there is not. */
void *tu_cache_load(const tu_cache *cache, const char *name);
/* The same as bytes, to be freed. */
void *tu_cache_read(const tu_cache *cache, const char *name, size_t *bytes);
/* Puts these bytes under their name, whole. False with the cause. */
bool tu_cache_store(const tu_cache *cache, const char *name, const void *data, size_t bytes, char *reason,
                    size_t reason_size);
/* Puts the file `made` under its name, with the hash of its contents at the end. False with the cause; `made` is gone
 * in any case. */
bool tu_cache_finish(const tu_cache *cache, const char *made, const char *name, char *reason, size_t reason_size);
/* A text under its name, where it is not there already. */
bool tu_cache_write(const tu_cache *cache, const char *name, const char *text, char *reason, size_t reason_size);
/* A name that nobody else has, for something in the making. */
void tu_cache_name(char *name, size_t size, const char *end);

/* The right to build a file: a lock that ends with the process. TU_CACHE_TAKEN: somebody has it; TU_CACHE_NONE: there
 * are no locks here, and everybody may. */
#define TU_CACHE_TAKEN (-1)
#define TU_CACHE_NONE (-2)
int tu_cache_lock(const tu_cache *cache, const char *name);
void tu_cache_unlock(int lock);

/* Removes what was not used for longest, until there are no more bytes than that (trim.c). */
void tu_cache_trim(const tu_cache *cache, int64_t most);

#endif
