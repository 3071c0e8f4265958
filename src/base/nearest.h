/* SPDX-License-Identifier: Apache-2.0
 *
 * How far apart two names are, for messages that suggest what somebody meant to type.
 */
#ifndef TU_BASE_NEAREST_H
#define TU_BASE_NEAREST_H

/* How many letters must be added, left out, changed or swapped with their neighbour to make one name of the other.
 * Names of more than 63 letters are far apart from all others (1000). */
int tu_letters_apart(const char *one, const char *other);

/* More letters than this are no typing mistake. */
#define TU_TYPING_MISTAKE 2

#endif
