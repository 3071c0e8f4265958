/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a training run, saved and loaded.
 */
#include "nn/state.h"

#include <stdio.h>
#include <string.h>

#include <tutti/io.h>

#include "tensor/operators.h"

/* ---- the generator ---- */

tt_tensor *tt_random_state(void) {
    return tu_random_state(0, 1);
}

bool tt_set_random_state(tt_tensor *state) {
    tu_thread *self = tu_self();
    if (self->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("set_random_state", "state", state)) != TUTTI_OK)
        return false;
    int64_t words[3];
    if (state->dtype != TUTTI_I64 || state->ndim != 1 || state->numel != 3) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "set_random_state: state is %s and must be what tt_random_state gives",
                tu_describe(state));
        return false;
    }
    if (!tt_read(state, words, TUTTI_I64, 3))
        return false;
    self->seed = (uint64_t)words[0];
    self->counter = (uint64_t)words[1];
    self->seed_rank = (uint32_t)words[2];
    return true;
}

/* ---- what belongs to the state ---- */

typedef struct state {
    size_t count;
    tt_tensor **tensors;
    const char **names;
} state;

static void add(state *list, const char *prefix, tt_named_list more) {
    for (size_t i = 0; i < more.count && tu_self()->pending == TUTTI_OK; i++) {
        size_t bytes = strlen(prefix) + strlen(more.names[i]) + 1;
        char *name = tu_scope_memory(bytes);
        if (name == NULL)
            return;
        snprintf(name, bytes, "%s%s", prefix, more.names[i]);
        list->names[list->count] = name;
        list->tensors[list->count++] = more.at[i];
    }
}

/* Everything but the generator, with room for it. */
static bool gather(const tt_module *module, const tt_optimizer *optimizer, state *list) {
    tt_named_list parameters = tt_module_parameters(module), buffers = tt_module_buffers(module);
    tt_named_list remembered = { 0, NULL, NULL };
    if (optimizer != NULL)
        remembered = tt_optimizer_state(optimizer);
    size_t most = parameters.count + buffers.count + remembered.count + 1;
    list->count = 0;
    list->tensors = tu_scope_memory(most * sizeof *list->tensors);
    list->names = tu_scope_memory(most * sizeof *list->names);
    if (tu_self()->pending != TUTTI_OK || list->tensors == NULL || list->names == NULL)
        return false;
    add(list, "module.", parameters);
    add(list, "module.", buffers);
    add(list, "optimizer.", remembered);
    return tu_self()->pending == TUTTI_OK;
}

void tu_state_save(const tt_module *module, const tt_optimizer *optimizer, tt_metadata metadata, const char *path) {
    state list;
    tt_scope scope = tt_scope_open();
    if (gather(module, optimizer, &list)) {
        list.names[list.count] = "random";
        list.tensors[list.count++] = tt_random_state();
        tt_save_safetensors_with(tt_tensors_of(list.count, list.tensors), list.names, metadata, path);
    }
    tu_scope_leave(&scope);
}

bool tt_save_state(const tt_module *module, const tt_optimizer *optimizer, const char *path) {
    tu_state_save(module, optimizer, (tt_metadata){ 0, NULL, NULL }, path);
    return tu_self()->pending == TUTTI_OK;
}

/* ---- loading ---- */

/* The place of a name in the file; files are in the order of the list, so it is mostly the one after the last. */
static size_t find(tt_named_list file, const char *name, size_t likely) {
    if (likely < file.count && strcmp(file.names[likely], name) == 0)
        return likely;
    for (size_t i = 0; i < file.count; i++)
        if (strcmp(file.names[i], name) == 0)
            return i;
    return file.count;
}

static tutti_status check_one(const char *path, const char *name, const tt_tensor *has, const tt_tensor *from) {
    if (tu_same_sizes(has, from) && has->dtype == from->dtype && has->device != TUTTI_META)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT, "load_state: %s: \"%s\" is %s in the file, and %s here", path, name,
                    tu_describe(from), tu_describe(has));
}

/* A name in the file that nobody has here. The optimizer's are left alone where only the module is read. */
static tutti_status check_unexpected(const char *path, const state *list, tt_named_list file, bool whole) {
    for (size_t i = 0; i < file.count; i++) {
        tt_named_list ours = { list->count, list->tensors, list->names };
        bool others = strcmp(file.names[i], "random") == 0 || (!whole && strncmp(file.names[i], "optimizer.", 10) == 0);
        if (!others && find(ours, file.names[i], i) == list->count)
            return tu_error(TUTTI_ERROR_ARGUMENT, "load_state: %s has \"%s\", which %s does not have", path,
                            file.names[i], file.names[i][0] == 'o' ? "the optimizer" : "the module");
    }
    return TUTTI_OK;
}

/* Fills in `from`, for each of the list what the file has. */
static tutti_status match(const char *path, const state *list, tt_named_list file, bool whole, tt_tensor **from) {
    size_t at = 0;
    for (size_t i = 0; i < list->count; i++, at++) {
        at = find(file, list->names[i], at);
        if (at == file.count)
            return tu_error(TUTTI_ERROR_NOT_FOUND, "load_state: %s has no \"%s\"", path, list->names[i]);
        from[i] = file.at[at];
        tutti_status status = check_one(path, list->names[i], list->tensors[i], from[i]);
        if (status != TUTTI_OK)
            return status;
    }
    return check_unexpected(path, list, file, whole);
}

void tu_state_set(tt_module *module, tt_optimizer *optimizer, tt_named_list file, const char *path) {
    state list;
    if (!gather(module, optimizer, &list))
        return;
    tt_tensor **from = tu_scope_memory((list.count + 1) * sizeof *from);
    if (from == NULL || tu_pending_take(match(path, &list, file, optimizer != NULL, from)) != TUTTI_OK)
        return;
    if (optimizer != NULL)
        tt_set_random_state(tt_named(file, "random"));
    for (size_t i = 0; i < list.count && tu_self()->pending == TUTTI_OK; i++)
        tt_copy_(list.tensors[i], tt_to_device(from[i], list.tensors[i]->device));
}

bool tt_load_state(tt_module *module, tt_optimizer *optimizer, const char *path) {
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tu_state_set(module, optimizer, tt_load_safetensors(path), path);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}
