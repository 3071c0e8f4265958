/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a module stands in its tree, for messages: 'module "blocks.0.up" (Linear)', and a parameter below it
 * "blocks.0.up.weight". A name that the user gave to a tensor is left alone.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nn/module.h"

#define LONGEST_PATH 256

static const char *name_in_parent(const tt_module *module) {
    for (int i = 0; i < module->parent->child_count; i++)
        if (module->parent->children[i].module == module)
            return module->parent->children[i].name;
    return "";
}

/* "blocks.0.up", or "" for the root. */
static void write_path(const tt_module *module, char *path, size_t size) {
    if (module->parent == NULL) {
        path[0] = 0;
        return;
    }
    write_path(module->parent, path, size);
    size_t used = strlen(path);
    snprintf(path + used, size - used, "%s%s", used > 0 ? "." : "", name_in_parent(module));
}

static tutti_status name_slot(const char *path, const tu_module_slot *slot) {
    tt_tensor *tensor = slot->tensor;
    if (tensor == NULL || (tensor->name != NULL && !(tensor->flags & TU_NAMED_BY_MODULE)))
        return TUTTI_OK;
    char name[2 * LONGEST_PATH];
    snprintf(name, sizeof name, "%s%s%s", path, path[0] != 0 ? "." : "", slot->name);
    if (tensor->name != NULL && strcmp(tensor->name, name) == 0)
        return TUTTI_OK;
    char *copy = strdup(name);
    if (copy == NULL)
        return tu_error_memory("a tensor's name", strlen(name) + 1);
    free(tensor->name);
    tensor->name = copy;
    tensor->flags |= TU_NAMED_BY_MODULE;
    return TUTTI_OK;
}

tutti_status tu_module_name_slot(const tt_module *module, const tu_module_slot *slot) {
    char path[LONGEST_PATH];
    write_path(module, path, sizeof path);
    return name_slot(path, slot);
}

tutti_status tu_module_renew_paths(tt_module *module) {
    char path[LONGEST_PATH], text[2 * LONGEST_PATH];
    write_path(module, path, sizeof path);
    if (path[0] != 0)
        snprintf(text, sizeof text, "module \"%s\" (%s)", path, module->type.name);
    else
        snprintf(text, sizeof text, "module %s", module->type.name);
    tu_place *place = tu_place_new(text);
    if (place == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_place_drop(module->place);
    module->place = place;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < module->slot_count && status == TUTTI_OK; i++)
        status = name_slot(path, &module->slots[i]);
    for (int i = 0; i < module->child_count && status == TUTTI_OK; i++)
        if (module->children[i].module->parent == module)
            status = tu_module_renew_paths(module->children[i].module);
    return status;
}
