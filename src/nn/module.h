/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules inside.
 */
#ifndef TU_NN_MODULE_H
#define TU_NN_MODULE_H

#include <stdatomic.h>

#include <tutti/module.h>

#include "autograd/node.h"

typedef struct tu_module_slot {
    char *name;
    tt_tensor *tensor; /* NULL: empty */
    bool buffer;       /* else a parameter */
} tu_module_slot;

typedef struct tu_child {
    char *name;
    tt_module *module;
} tu_child;

struct tt_module {
    atomic_int references;
    tt_module *parent;      /* that added it last, or NULL; not held, and cleared when the parent goes */
    struct tu_place *place; /* its path, for messages */
    tt_module_type type;
    void *user;
    bool resting; /* not being trained */
    int slot_count, child_count;
    tu_module_slot *slots;
    tu_child *children;
    tu_hook_list forward_pre, forward, forward_always, backward_pre, backward;
};

/* Renews the path of a module and of all below it, and the names of their parameters: path.c. */
tutti_status tu_module_renew_paths(tt_module *module);
/* Names the tensor in a slot after its path. */
tutti_status tu_module_name_slot(const tt_module *module, const tu_module_slot *slot);

/* Attention from parts of its own: attention.c. `qkv` gives queries, keys and values side by side, of options->heads
 * heads, which `out` mixes. Takes the references over, also on failure. */
tt_module *tu_attention_of(const tt_attention_options *options, tt_module *qkv, tt_module *out);
/* Puts defaults where options are 0, and refuses what cannot work. */
bool tu_attention_options(int64_t width, const tt_attention_options *options, tt_attention_options *full);

/* Calls with its backward hooks around: module_backward.c. */
typedef struct tu_backward_hooks tu_backward_hooks;
tt_tensor_list tu_wrap_inputs(tt_module *module, tt_tensor_list inputs, tu_backward_hooks **hooks);
tt_tensor_list tu_wrap_outputs(tt_tensor_list outputs, tu_backward_hooks *hooks);

#endif
