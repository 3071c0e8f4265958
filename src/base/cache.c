/* SPDX-License-Identifier: Apache-2.0
 *
 * sysfs first: on some processors the C library counts the caches of all cores together.
 */
#include "base/cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/settings.h"

/* One file of the n-th cache of the first processor; false when there is none. */
static bool read_word(int index, const char *name, char *text, size_t bytes) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool read = fgets(text, (int)bytes, file) != NULL;
    fclose(file);
    text[read ? strcspn(text, "\n") : 0] = '\0';
    return read;
}

size_t tu_cache_bytes(int level) {
    char text[32];
    int64_t bytes;
    for (int index = 0; index < 16 && read_word(index, "level", text, sizeof text); index++) {
        if (atoi(text) != level || !read_word(index, "type", text, sizeof text) || strcmp(text, "Instruction") == 0)
            continue;
        if (read_word(index, "size", text, sizeof text) && tu_parse_bytes(text, &bytes) == TUTTI_OK && bytes > 0)
            return (size_t)bytes;
    }
    long known = sysconf(level == 1   ? _SC_LEVEL1_DCACHE_SIZE
                         : level == 2 ? _SC_LEVEL2_CACHE_SIZE
                                      : _SC_LEVEL3_CACHE_SIZE);
    return known > 0 ? (size_t)known : 0;
}

size_t tu_cache_last_bytes(void) {
    size_t third = tu_cache_bytes(3), second = tu_cache_bytes(2);
    return third > 0 ? third : second > 0 ? second : (size_t)32 << 20;
}
