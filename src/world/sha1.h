/* SPDX-License-Identifier: Apache-2.0
 *
 * SHA-1, for names and keys of groups. It protects nothing: nobody's trust hangs on it.
 */
#ifndef TU_WORLD_SHA1_H
#define TU_WORLD_SHA1_H

#include <stddef.h>
#include <stdint.h>

void tu_sha1(const void *data, size_t bytes, uint8_t digest[20]);
void tu_sha1_text(const void *data, size_t bytes, char text[41]); /* in hexadecimal */

#endif
