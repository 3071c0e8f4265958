/* SPDX-License-Identifier: Apache-2.0
 *
 * Where nests run: one row for each kind of device that loops are written for. Grouping, lines, plans and programs are
 * the same for all; a row writes the code of nests, has it built and loaded, and runs them.
 */
#ifndef TU_LOOPS_TARGET_H
#define TU_LOOPS_TARGET_H

#include "loops/nest.h"

typedef struct tu_target {
    const char *ending; /* of the file that shows the code */
    /* Whether the nest runs without code too, by kernels of the library; else its operators are called one by one. */
    bool runs_without_code;
    /* Code for these nests, all of this target: written, built or found in the cache, and loaded. *code is for `end`.
     * Where it cannot be had nests have none, which is no error: a warning tells the cause, once in a process. The text
     * goes to `copy` too, where that is not NULL. */
    tutti_status (*make)(tu_nest *const *nests, int nest_count, FILE *copy, void **code);
    void (*end)(void *code);
    bool (*has_code)(const tu_nest *nest);
    /* Runs it on these tensors, one for each of the nest's. */
    tutti_status (*run)(const tu_nest *nest, tt_tensor *const *tensors);
} tu_target;

enum {
    TU_TARGET_C,    /* the CPU: target_c.c, walk.c */
    TU_TARGET_CUDA, /* GPUs of NVIDIA: target_cuda.c */
    TU_TARGETS
};
extern const tu_target tu_target_c, tu_target_cuda;

/* That of the device, as its number; -1: loops are not written for it. */
int tu_target_number(tutti_device device);
const tu_target *tu_target_at(int number);
static inline const tu_target *tu_target_of(const tu_nest *nest) {
    return tu_target_at(tu_target_number(nest->device));
}

#endif
