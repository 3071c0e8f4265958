/* SPDX-License-Identifier: Apache-2.0
 *
 * TUTTI_BARE=1 leaves out of the quick path what a user never wants to be without: deadlines, the check for mismatched
 * calls, the look at the others' life, and the flight recorder. It exists for one bench, which shows what they cost
 * (bench/peers, target tutti_bare); no library is made of it.
 */
#ifndef TU_BASE_BARE_H
#define TU_BASE_BARE_H

#ifndef TUTTI_BARE
#define TUTTI_BARE 0
#endif

#endif
