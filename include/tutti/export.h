/* SPDX-License-Identifier: Apache-2.0
 *
 * What marks a function as part of the API, the version of these headers, and the shorthand for options structs.
 *
 * OPTIONS STRUCTS
 *
 * A struct that crosses the API begins with `size_t size`, so that it can grow without breaking programs: fields
 * beyond the caller's size are neither read nor written. Each has a TUTTI_..._INIT for C and C++. In C,
 *
 *     tutti_all_reduce(group, in, out, count, TUTTI_F32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .timeout_ns =
 * 5000000000));
 *
 * makes one on the spot. A NULL pointer means defaults; size 0 is an error. Options and the strings in them are
 * copied or used before the call returns, never kept.
 */
#ifndef TUTTI_EXPORT_H
#define TUTTI_EXPORT_H

#define TUTTI_VERSION_MAJOR 0
#define TUTTI_VERSION_MINOR 1
#define TUTTI_VERSION_PATCH 0
#define TUTTI_VERSION_STRING "0.1.0"

#if defined(__GNUC__)
#define TUTTI_API __attribute__((visibility("default")))
#define TUTTI_CHECKED __attribute__((warn_unused_result))
#define TUTTI_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define TUTTI_API
#define TUTTI_CHECKED
#define TUTTI_PRINTF(text, first)
#endif

/* What a field of an options struct holds where 0, the default, is not meant: none of what is counted; no at all; the
 * number zero. */
#define TUTTI_NONE (-1)
#define TUTTI_ZERO (-0.0)
/* Yes or no where 0 means that the library chooses. */
typedef enum tutti_choice {
    TUTTI_NO = 1,
    TUTTI_YES = 2
} tutti_choice;

#ifndef __cplusplus
#define TUTTI_OPTIONS(type, ...) (&(type){ .size = sizeof(type), __VA_ARGS__ })
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is loaded, "0.1.0" for instance; compare with TUTTI_VERSION_STRING. */
TUTTI_API const char *tutti_version(void);

#ifdef __cplusplus
}
#endif
#endif
