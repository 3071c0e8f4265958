/* SPDX-License-Identifier: Apache-2.0
 *
 * The compiled parts of a program's nests.
 */
#ifndef TU_LOOPS_CODE_H
#define TU_LOOPS_CODE_H

#include "loops/nest.h"

#define TU_CODE_FILES 8

typedef struct tu_loop_code {
    int file_count;
    void *handles[TU_CODE_FILES];
} tu_loop_code;

/* Finds the stages of these nests and gives them functions, built or from the cache. Where that cannot be they have
 * none, which is no error: a warning tells the cause, once in a process. The text goes to `copy` too, where that is not
 * NULL. */
tutti_status tu_code_make(tu_loop_code *code, tu_nest *const *nests, int nest_count, FILE *copy);
void tu_code_end(tu_loop_code *code);

#endif
