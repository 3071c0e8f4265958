/* SPDX-License-Identifier: Apache-2.0
 *
 * What marks a function as part of the API, the version of these headers, and the shorthand for options structs.
 *
 * STRUCTS
 *
 * A struct that crosses the API, with options or with results, begins with `size_t size`, so that it can grow without
 * breaking programs: fields beyond the caller's size are neither read nor written. There are three ways to make one,
 * and they agree, because 0 is the default of every field:
 *
 *     TUTTI_OPTIONS(tutti_call, .timeout_ns = 5000000000)    in C and C++20, on the spot, as a pointer
 *     tutti_call call = TUTTI_CALL_INIT;                     in C and C++
 *     tutti_call_init(&call, sizeof call);                   in any language
 *
 * A NULL pointer means defaults. Size 0 is an error, and so are values that cannot work: the message names the field.
 * So is a field that a newer header has and this library does not know, when it is set. Options and the strings in
 * them are copied or used before the call returns, never kept.
 */
#ifndef TUTTI_EXPORT_H
#define TUTTI_EXPORT_H

#include <stddef.h>

#define TUTTI_VERSION_MAJOR 0
#define TUTTI_VERSION_MINOR 2
#define TUTTI_VERSION_PATCH 0
#define TUTTI_VERSION_STRING "0.2.0"

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

/* A timeout_ns for those who wait for work: the wait has no deadline of its own, and ends with a death, an abort, an
 * interrupt or a close. For tutti_world_next_event, tutti_recv and waits on a world's store alone. */
#define TUTTI_UNTIL_EVENT (-1)

#ifdef __cplusplus
template <typename type> inline type tutti_defaults() {
    type made = type();
    made.size = sizeof made;
    return made;
}
#define TUTTI_DEFAULTS(type) (tutti_defaults<type>())
/* Lives until the end of the whole expression that it stands in. Fields come in the order of the struct; compilers that
 * warn of missing ones want -Wno-missing-field-initializers. */
template <typename type> inline const type *tutti_on_the_spot(const type &made) {
    return &made;
}
#define TUTTI_OPTIONS(type, ...) (tutti_on_the_spot(type{ .size = sizeof(type), __VA_ARGS__ }))
#else
#define TUTTI_DEFAULTS(type) \
    { .size = sizeof(type) }
#define TUTTI_OPTIONS(type, ...) (&(type){ .size = sizeof(type), __VA_ARGS__ })
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is loaded, "0.2.0" for instance; compare with TUTTI_VERSION_STRING. */
TUTTI_API const char *tutti_version(void);

/* Frees memory that a Tutti function handed over to the caller, where a comment says so. NULL is allowed. */
TUTTI_API void tutti_free(void *memory);

#ifdef __cplusplus
}
#endif
#endif
