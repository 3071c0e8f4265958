/* SPDX-License-Identifier: Apache-2.0
 *
 * From C text to functions: by the system's compiler, through a cache.
 *
 * The cache is a folder that only the user can write, $XDG_CACHE_HOME/tutti or ~/.cache/tutti. A file in it is named by
 * the hash of everything that shapes it: the text, the compiler (its path, size and time), the flags, and with them the
 * instruction set. It ends with a hash of its own contents, which is checked before it is loaded, and it appears whole:
 * written under another name, brought to the disk, renamed. Of several processes and threads that need one file, one
 * builds it and the others wait, as long as a build may take, and then build it themselves.
 */
#ifndef TU_LOOPS_BUILD_H
#define TU_LOOPS_BUILD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/instructions.h"

/* Defined for texts in a second attempt, behind one that failed: they read all of <immintrin.h>. */
#define TU_BUILD_ALL_INTRINSICS "TU_ALL_INTRINSICS"

/* What TUTTI_CC_LIMIT and TUTTI_CC_CACHE say. */
typedef struct tu_build_limits {
    int64_t milliseconds; /* of a build */
    int64_t cache_bytes;
} tu_build_limits;
tu_build_limits tu_build_limits_get(void);
int64_t tu_build_clock(void); /* milliseconds, for deadlines */

/* Where files are, and by what they are made. Close it. */
typedef struct tu_builder tu_builder;

/* False with the cause in `reason`: there is no compiler, or no folder that is the user's alone. */
bool tu_builder_open(tu_instructions level, tu_builder **builder, char *reason, size_t reason_size);
void tu_builder_close(tu_builder *builder);
/* The name under which texts include the headers of the level. */
const char *tu_builder_lanes(const tu_builder *builder);

/* Loads what these texts compile to, from the cache or built now, all at once; `handles` are for dlsym and dlclose.
 * False with the cause; then there are none. */
bool tu_builder_build(tu_builder *builder, const char *const *texts, int text_count, void **handles, char *reason,
                      size_t reason_size);

#endif
