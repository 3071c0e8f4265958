/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a training run in a file: parameters and buffers, what the optimizer remembers, the random generator. A
 * run that is killed and goes on from its last file computes the same bits as one that was never interrupted.
 *
 *     tt_load_state(net, optimizer, "run.safetensors");              (if there is one)
 *     int64_t done = tt_item_int(tt_optimizer_steps(optimizer));
 *     …
 *     tt_save_state(net, optimizer, "run.safetensors");
 *
 * The file is a safetensors file, written all or nothing (tutti/io.h): "module.<name>" for parameters and buffers,
 * "optimizer.<name>" for what tt_optimizer_state lists, "random" for the calling thread's generator. With several ranks
 * each has a file of its own.
 */
#ifndef TUTTI_STATE_H
#define TUTTI_STATE_H

#include <tutti/module.h>
#include <tutti/optimizer.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the state. optimizer may be NULL: then only the module and the generator are written. */
TUTTI_API bool tt_save_state(const tt_module *module, const tt_optimizer *optimizer, const char *path);
/* Reads it into the tensors that module and optimizer have, which are made as they were for the saved run. Every name,
 * shape and dtype is compared before anything is changed: one that is missing is TUTTI_ERROR_NOT_FOUND, one that is not
 * expected or different is TUTTI_ERROR_ARGUMENT. Without an optimizer (NULL) the module alone is read, and the random
 * generator is left as it is. */
TUTTI_API bool tt_load_state(tt_module *module, tt_optimizer *optimizer, const char *path);

/* The state of the calling thread's random generator, three i64 whose meaning is the library's own. */
TUTTI_API tt_tensor *tt_random_state(void);
/* Makes the generator go on from a state that tt_random_state gave. */
TUTTI_API bool tt_set_random_state(tt_tensor *state);

#ifdef __cplusplus
}
#endif
#endif
