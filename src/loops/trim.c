/* SPDX-License-Identifier: Apache-2.0
 *
 * The bound of the cache. Who has built something looks how much there is; where that is too much, files go whose last
 * use is longest ago. A file that a process has loaded stays mapped there, and one that goes between a look and its use
 * is built anew, so nobody has to be asked. What was used a moment ago stays in any case: several ranks may be about to
 * load it.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "loops/cache.h"

#define MOMENT 60       /* seconds */
#define HALF_MADE 86400 /* seconds after which nobody goes on with a file in the making */

typedef struct kept {
    char name[64];
    int64_t bytes, used; /* seconds since 1970 */
} kept;

typedef struct listing {
    kept *at;
    size_t count, capacity;
    int64_t bytes;
} listing;

static void add(listing *all, const char *name, const struct stat *about) {
    if (all->count == all->capacity) {
        size_t more = all->capacity > 0 ? 2 * all->capacity : 64;
        kept *grown = realloc(all->at, more * sizeof *grown);
        if (grown == NULL) /* those that are known will do */
            return;
        all->at = grown;
        all->capacity = more;
    }
    kept *one = &all->at[all->count++];
    *one = (kept){ .bytes = (int64_t)about->st_size, .used = (int64_t)about->st_mtim.tv_sec };
    memcpy(one->name, name, strlen(name) + 1);
    all->bytes += one->bytes;
}

/* Lists what is built, and removes what processes that were killed have left half made. */
static void list(const tu_cache *cache, DIR *folder, int64_t now, listing *all) {
    for (const struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        struct stat about;
        size_t length = strlen(entry->d_name);
        if (length >= sizeof all->at->name || fstatat(cache->folder, entry->d_name, &about, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(about.st_mode))
            continue;
        if (strncmp(entry->d_name, "making-", 7) == 0) {
            if (now - (int64_t)about.st_mtim.tv_sec > HALF_MADE)
                unlinkat(cache->folder, entry->d_name, 0);
        } else if ((length > 3 && strcmp(entry->d_name + length - 3, ".so") == 0) ||
                   (length > 6 && strcmp(entry->d_name + length - 6, ".cubin") == 0)) {
            add(all, entry->d_name, &about);
        }
    }
}

static int compare_uses(const void *left, const void *right) {
    const kept *first = left, *second = right;
    return first->used != second->used ? (first->used > second->used) - (first->used < second->used)
                                       : strcmp(first->name, second->name);
}

void tu_cache_trim(const tu_cache *cache, int64_t most) {
    int lock = tu_cache_lock(cache, "trim");
    if (lock == TU_CACHE_TAKEN) /* somebody does it */
        return;
    listing all = { .at = NULL };
    int64_t now = (int64_t)time(NULL);
    int again = openat(cache->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = again >= 0 ? fdopendir(again) : NULL;
    if (folder != NULL) {
        list(cache, folder, now, &all);
        closedir(folder);
    } else if (again >= 0) {
        close(again);
    }
    if (all.count > 0)
        qsort(all.at, all.count, sizeof *all.at, compare_uses);
    for (size_t i = 0; i < all.count && all.bytes > most && now - all.at[i].used > MOMENT; i++)
        if (unlinkat(cache->folder, all.at[i].name, 0) == 0)
            all.bytes -= all.at[i].bytes;
    free(all.at);
    tu_cache_unlock(lock);
}
