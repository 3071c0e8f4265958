/* SPDX-License-Identifier: Apache-2.0
 *
 * Nodes of the backward graph, and the tensors they save.
 */
#include "autograd/node.h"

#include <stdlib.h>
#include <string.h>

#include <tutti/group.h>

/* One block: the node, then its arrays, those of pointers first. */
tu_node *tu_node_new_with(const char *name, int inputs, int outputs, int saved, size_t attribute_bytes) {
    size_t edges = (size_t)inputs * sizeof(tu_edge), shapes = (size_t)(inputs + outputs) * sizeof(tu_shape);
    size_t kept = (size_t)saved * sizeof(tu_saved_tensor), flags = (size_t)inputs * sizeof(bool);
    size_t before = (sizeof(tu_node) + edges + shapes + kept + 15) / 16 * 16;
    tu_node *node = malloc(before + attribute_bytes + flags);
    if (node == NULL) {
        tu_error_memory("a node of the backward graph", sizeof *node);
        return NULL;
    }
    tu_thread *self = tu_self();
    *node = (tu_node){ .name = name,
                       .sequence = self->node_sequence++,
                       .input_count = inputs,
                       .output_count = outputs,
                       .saved_count = saved,
                       .place = tu_place_hold(self->place) };
    atomic_init(&node->references, 1);
    char *at = (char *)(node + 1);
    node->next = (tu_edge *)at;
    node->inputs = (tu_shape *)(at + edges);
    node->outputs = node->inputs + inputs;
    node->saved = (tu_saved_tensor *)(at + edges + shapes);
    node->attributes = (char *)node + before;
    node->needs = (bool *)((char *)node + before + attribute_bytes);
    memset(node->next, 0, edges);
    memset(node->saved, 0, kept);
    memset(node->needs, 0, flags);
    tu_tally(self, &self->nodes, 1);
    return node;
}

void tu_edge_drop(tu_edge *edge) {
    tu_node *node = edge->node;
    tt_tensor *leaf = edge->leaf;
    *edge = (tu_edge){ NULL, NULL, 0 };
    tu_tensor_drop(leaf);
    tu_node_drop(node);
}

static void free_hooks(tu_node *node) {
    tu_node_hooks *hooks = node->hooks;
    if (hooks == NULL)
        return;
    tu_hook_list_free(&hooks->pre);
    tu_hook_list_free(&hooks->post);
    for (int i = 0; i < node->output_count; i++)
        tu_hook_list_free(&hooks->tensor[i]);
    free(hooks);
}

static void destroy(tu_node *node) {
    free_hooks(node);
    tu_node_release_saved(node);
    if (node->release != NULL)
        node->release(node);
    tu_node_drop(node->inner);
    if (node->entry != NULL)
        tu_attributes_end(node->entry, node->attributes);
    tu_place_drop(node->place);
    for (int i = 0; i < node->input_count; i++)
        tu_edge_drop(&node->next[i]);
    free(node);
    tu_tally(tu_self(), &tu_self()->nodes, -1);
}

/* A graph may be a chain of a million nodes: those that die while one is being destroyed wait in a list instead of on
 * the stack. */
void tu_node_drop(tu_node *node) {
    if (node == NULL || atomic_fetch_sub_explicit(&node->references, 1, memory_order_acq_rel) != 1)
        return;
    tu_thread *self = tu_self();
    node->dead_next = self->dead_nodes;
    self->dead_nodes = node;
    if (self->freeing_nodes)
        return;
    self->freeing_nodes = true;
    for (tu_node *next; (next = self->dead_nodes) != NULL;) {
        self->dead_nodes = next->dead_next;
        destroy(next);
    }
    self->freeing_nodes = false;
}

/* ---- saved tensors ---- */

typedef struct saved_hooks_frame {
    tt_saved_hooks hooks;
    atomic_int references; /* the stack's, and one per packed tensor */
    struct saved_hooks_frame *outer;
} saved_hooks_frame;

static void frame_drop(saved_hooks_frame *frame) {
    if (atomic_fetch_sub_explicit(&frame->references, 1, memory_order_acq_rel) == 1)
        free(frame);
}

bool tt_saved_hooks_push(const tt_saved_hooks *hooks) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    tt_saved_hooks full = { .size = sizeof full };
    if (tu_pending_take(tu_options_copy("tt_saved_hooks", hooks, &full, sizeof full)) != TUTTI_OK)
        return false;
    if (full.pack == NULL || full.unpack == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "saved_hooks_push: pack and unpack are both required");
        return false;
    }
    saved_hooks_frame *frame = malloc(sizeof *frame);
    if (frame == NULL) {
        tu_pending_take(tu_error_memory("saved-tensor hooks", sizeof *frame));
        return false;
    }
    frame->hooks = full;
    atomic_init(&frame->references, 1);
    frame->outer = tu_self()->saved_hooks;
    tu_self()->saved_hooks = frame;
    return true;
}

void tt_saved_hooks_pop(void) {
    saved_hooks_frame *frame = tu_self()->saved_hooks;
    if (frame == NULL) {
        tu_fail(TUTTI_ERROR_STATE, "saved_hooks_pop: nothing was pushed in this thread");
        return;
    }
    tu_self()->saved_hooks = frame->outer;
    frame_drop(frame);
}

static tutti_status pack(tu_saved_tensor *saved, tt_tensor *tensor, saved_hooks_frame *frame) {
    uint32_t before = tu_version(tensor);
    tu_self()->saved_hooks = NULL; /* what pack computes is not packed itself */
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    void *packed = frame->hooks.pack(frame->hooks.user, tensor);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    tu_self()->saved_hooks = frame;
    tutti_status status = tu_self()->pending;
    if (status == TUTTI_OK && tu_version(tensor) != before)
        status = tu_error(TUTTI_ERROR_STATE, "a saved-tensor pack hook changed its argument %s in place",
                          tu_describe(tensor));
    if (status != TUTTI_OK) {
        if (frame->hooks.release != NULL)
            frame->hooks.release(frame->hooks.user, packed);
        return status;
    }
    atomic_fetch_add_explicit(&frame->references, 1, memory_order_relaxed);
    saved->hooks = &frame->hooks;
    saved->packed = packed;
    return TUTTI_OK;
}

/* An alias without history, which messages and gradients can take for the tensor. */
static tt_tensor *alias_to_save(const tt_tensor *tensor) {
    tu_shape shape = tu_shape_of(tensor);
    tt_tensor *alias = tu_tensor_alias(tensor, &shape);
    if (alias == NULL)
        return NULL;
    alias->flags |= tensor->flags & (TU_NUMBER | TU_LITERAL);
    if (tensor->name != NULL)
        alias->name = strdup(tensor->name); /* without it a message says less */
    return alias;
}

/* What may come to lead back to the node that saves is not held itself: an output does at once, and an input does when
 * something that was computed from it is written into it later. An alias of the value and, for an input, the node that
 * computed it as it is now, break the circle. A leaf that requires grad is never written into with a history. */
tutti_status tu_save(tu_saved_tensor *saved, tt_tensor *tensor, int output, uint32_t which) {
    *saved = (tu_saved_tensor){ .which = which, .output = output };
    if (tensor == NULL)
        return TUTTI_OK;
    saved->version = tu_version(tensor);
    tu_edge edge = { NULL, NULL, 0 };
    if (output == TU_NO_OUTPUT) {
        tutti_status status = tu_edge_to(tensor, &edge);
        if (status != TUTTI_OK)
            return status;
    }
    tt_tensor *kept = edge.leaf != NULL ? tu_tensor_hold(tensor) : alias_to_save(tensor);
    if (edge.node != NULL) {
        saved->source = tu_node_hold(edge.node);
        saved->output = edge.slot;
    }
    tu_edge_drop(&edge);
    if (kept == NULL)
        return TUTTI_ERROR_MEMORY;
    if (tu_self()->saved_hooks == NULL) {
        saved->tensor = kept;
        return TUTTI_OK;
    }
    tutti_status status = pack(saved, kept, tu_self()->saved_hooks);
    tu_tensor_drop(kept);
    return status;
}

static void saved_drop(tu_saved_tensor *saved) {
    tt_tensor *tensor = saved->tensor;
    tt_saved_hooks *hooks = saved->hooks;
    tu_node *source = saved->source;
    saved->tensor = NULL;
    saved->source = NULL;
    saved->hooks = NULL;
    saved->released = true;
    tu_tensor_drop(tensor);
    tu_node_drop(source);
    if (hooks != NULL) {
        if (hooks->release != NULL)
            hooks->release(hooks->user, saved->packed);
        frame_drop((saved_hooks_frame *)(void *)hooks);
    }
}

void tu_node_release_saved(tu_node *node) {
    for (int i = 0; i < node->saved_count; i++)
        saved_drop(&node->saved[i]);
    node->released = node->saved_count > 0;
    if (node->inner != NULL) {
        tu_node_release_saved(node->inner);
        node->released = node->inner->released;
    }
}

tu_node_label tu_node_label_of(const tu_node *node) {
    tu_node_label label;
    snprintf(label.text, sizeof label.text, "%s (node %llu)%s%s", node->name, (unsigned long long)node->sequence,
             node->place != NULL ? " of " : "", node->place != NULL ? node->place->text : "");
    return label;
}

tutti_status tu_node_freed_error(const tu_node *node) {
    return tu_error(TUTTI_ERROR_GRAPH,
                    "Trying to backward through the graph a second time: what %s saved has already been freed. Ask the "
                    "first backward to retain_graph",
                    tu_node_label_of(node).text);
}

static tutti_status version_error(const tu_node *node, const tu_saved_tensor *saved) {
    const tt_tensor *x = saved->tensor;
    const tu_node *producer = saved->source != NULL ? saved->source : saved->output != TU_NO_OUTPUT ? node : NULL;
    char from[400] = "a leaf";
    if (producer != NULL)
        snprintf(from, sizeof from, "output %d of %s", saved->output, tu_node_label_of(producer).text);
    return tu_error(
        TUTTI_ERROR_VERSION,
        "one of the variables needed for gradient computation has been modified by an inplace operation: %s, which is "
        "%s and was saved by %s, is at version %u; expected version %u instead. Look for in-place operations on it or "
        "on its views after the forward, clone it before, or refill it between tt_preserve_begin and tt_preserve_end",
        tu_describe(x), from, tu_node_label_of(node).text, tu_version(x), saved->version);
}

/* In a differentiable backward what was computed has its history again. */
static tt_tensor *as_output(tu_node *node, int output, const tt_tensor *saved) {
    tt_tensor *alias = alias_to_save(saved);
    tutti_status status = alias == NULL         ? TUTTI_ERROR_MEMORY
                          : node->outer != NULL ? tu_view_of_outer(alias, node)
                                                : tu_history_set(alias, node, output);
    if (status != TUTTI_OK) {
        tu_tensor_drop(alias);
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    return tu_scope_own(alias);
}

tt_tensor *tu_saved_get(tu_node *node, tu_saved_tensor *saved) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (node->released || saved->released) {
        tu_pending_take(tu_node_freed_error(node));
        return NULL;
    }
    tt_tensor *tensor = saved->tensor;
    if (saved->lifted != NULL) {
        tensor = saved->lifted;
    } else if (saved->hooks !=
               NULL) { /* what unpack returns may be anything of the right shape; no version is checked */
        tensor = saved->hooks->unpack(saved->hooks->user, saved->packed);
        if (tensor != NULL && tu_pending_take(tu_tensor_check(node->name, "unpacked", tensor)) != TUTTI_OK)
            return NULL;
    } else if (tensor != NULL && tu_version(tensor) != saved->version) {
        tu_pending_take(version_error(node, saved));
        return NULL;
    }
    if (tensor == NULL)
        return NULL;
    return saved->output == TU_NO_OUTPUT || !tt_grad_enabled()
               ? tu_scope_own(tu_tensor_hold(tensor))
               : as_output(saved->source != NULL ? saved->source : node, saved->output, tensor);
}

tt_tensor *tu_node_saved(tu_gradient *gradient, uint32_t which) {
    tu_node *node = gradient->record;
    for (int i = 0; i < node->saved_count; i++)
        if (node->saved[i].which == which)
            return tu_saved_get(node, &node->saved[i]);
    tu_fail(TUTTI_ERROR_STATE, "%s: its gradient asks for a tensor that its entry does not save", node->name);
    return NULL;
}

const tu_shape *tu_node_input_shape(const tu_gradient *gradient, int input) {
    return &((tu_node *)gradient->record)->inputs[input];
}

const char *tt_node_name(const tt_node *node) {
    return node != NULL ? ((const tu_node *)(const void *)node)->name : "";
}

uint64_t tt_node_sequence(const tt_node *node) {
    return node != NULL ? ((const tu_node *)(const void *)node)->sequence : 0;
}
