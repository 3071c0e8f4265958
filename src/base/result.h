/* SPDX-License-Identifier: Apache-2.0
 *
 * Public structs that are filled for the caller, whose program may be older or newer than the library.
 */
#ifndef TU_BASE_RESULT_H
#define TU_BASE_RESULT_H

#include "base/error.h"

/* Checks that `result` is there and has its size, and copies as much of *full as it has room for. */
TU_SHARED tutti_status tu_result_copy(const char *type, const void *full, size_t full_size, void *result);

#endif
