/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a training run inside.
 */
#ifndef TU_NN_STATE_H
#define TU_NN_STATE_H

#include <tutti/io.h>
#include <tutti/state.h>

/* tt_save_state with metadata in the file. */
void tu_state_save(const tt_module *module, const tt_optimizer *optimizer, tt_metadata metadata, const char *path);
/* tt_load_state from what a file holds; `path` is for messages. Failed with the error pending. */
void tu_state_set(tt_module *module, tt_optimizer *optimizer, tt_named_list file, const char *path);

#endif
