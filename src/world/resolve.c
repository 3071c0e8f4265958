/* SPDX-License-Identifier: Apache-2.0
 *
 * The forms of a group argument: a group, its name, lists of ranks, a mesh. Expanding spells a form out; resolving
 * finds the group.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/mesh.h>

#include "base/error.h"
#include "world/registry.h"

/* ---- forms ---- */

static tutti_group_form *start(tutti_group_form *form, tutti_group_form_kind kind) {
    *form = (tutti_group_form){ .size = sizeof *form, .kind = kind };
    return form;
}

const tutti_group_form *tutti_form_group(tutti_group_form *form, tutti_group *group) {
    start(form, TUTTI_FORM_GROUP)->group = group;
    return form;
}

const tutti_group_form *tutti_form_name(tutti_group_form *form, const char *name) {
    start(form, TUTTI_FORM_NAME)->name = name;
    return form;
}

const tutti_group_form *tutti_form_ranks(tutti_group_form *form, const int *ranks, int count) {
    start(form, TUTTI_FORM_RANKS)->ranks = ranks;
    form->count = count;
    return form;
}

const tutti_group_form *tutti_form_lists(tutti_group_form *form, const int *const *lists, const int *counts,
                                         int count) {
    start(form, TUTTI_FORM_LISTS)->lists = lists;
    form->counts = counts;
    form->count = count;
    return form;
}

const tutti_group_form *tutti_form_mesh(tutti_group_form *form, struct tutti_mesh *mesh) {
    start(form, TUTTI_FORM_MESH)->mesh = mesh;
    return form;
}

const tutti_group_form *tutti_form_mesh_dim(tutti_group_form *form, struct tutti_mesh *mesh, int dim) {
    start(form, TUTTI_FORM_MESH_DIM)->mesh = mesh;
    form->dim = dim;
    return form;
}

static tutti_status check_form(tutti_world *world, const tutti_group_form *form) {
    tutti_status status = tu_world_check(world);
    if (status != TUTTI_OK)
        return status;
    if (form == NULL || form->size < sizeof *form)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the form of the group is NULL or has no size: make it with tutti_form_group and its sisters");
    return TUTTI_OK;
}

static tutti_status check_nested(const tutti_group_form *form) {
    int count = form->count;
    const int *counts = form->counts;
    if (count <= 0 || counts == NULL || form->lists == NULL)
        return tu_error(TUTTI_ERROR_RANGE, "the list of lists of ranks is empty");
    for (int i = 0; i < count; i++)
        if (counts[i] != counts[0] || counts[i] <= 0)
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "group sizes must be identical, but list 0 has %d ranks and list %d has %d", counts[0], i,
                            counts[i]);
    return TUTTI_OK;
}

/* The group of a mesh form, as a reference. */
static tutti_status group_of_mesh(const tutti_group_form *form, tutti_group **group) {
    if (form->mesh == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the mesh is NULL");
    if (form->kind == TUTTI_FORM_MESH && tutti_mesh_dim_count(form->mesh) != 1)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "Only 1D mesh is supported here, and this one has %d dimensions: pass a mesh and a dimension",
                        tutti_mesh_dim_count(form->mesh));
    return tutti_mesh_group(form->mesh, form->dim, group);
}

static tutti_status unknown_kind(const tutti_group_form *form) {
    return tu_error(TUTTI_ERROR_ARGUMENT, "%d is no kind of group argument", (int)form->kind);
}

/* ---- expand ---- */

static tutti_status fill(tutti_group_expansion *out, const char *tag, int rank_count, int group_size) {
    int *ranks = malloc(sizeof(int) * (size_t)(rank_count > 0 ? rank_count : 1));
    if (ranks == NULL)
        return tu_error_memory("a list of ranks", sizeof(int) * (size_t)rank_count);
    snprintf(out->tag, sizeof out->tag, "%s", tag);
    out->ranks = ranks;
    out->rank_count = rank_count;
    out->group_size = group_size;
    return TUTTI_OK;
}

static tutti_status expand_group(tutti_group *group, const char *tag, tutti_group_expansion *out) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the group is %s", group == NULL ? "NULL" : "TUTTI_NON_GROUP_MEMBER");
    tutti_status status = fill(out, tag[0] != 0 ? tag : tutti_group_tag(group), group->size, group->size);
    if (status == TUTTI_OK)
        memcpy(out->ranks, group->ranks, sizeof(int) * (size_t)group->size);
    return status;
}

static tutti_status expand_nested(const tutti_group_form *form, const char *tag, tutti_group_expansion *out) {
    tutti_status status = check_nested(form);
    if (status != TUTTI_OK)
        return status;
    int size = form->counts[0];
    status = fill(out, tag, size * form->count, size);
    for (int i = 0; status == TUTTI_OK && i < form->count; i++)
        memcpy(out->ranks + i * size, form->lists[i], sizeof(int) * (size_t)size);
    return status;
}

tutti_status tutti_group_expand(tutti_world *world, const tutti_group_form *form, const char *tag,
                                tutti_group_expansion *out) {
    tutti_status status = check_form(world, form);
    if (status != TUTTI_OK)
        return status;
    if (out == NULL || out->size < sizeof *out)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the expansion is NULL or has no size: set it to TUTTI_GROUP_EXPANSION_INIT");
    if (tag == NULL)
        tag = "";
    switch (form->kind) {
    case TUTTI_FORM_GROUP:
        return expand_group(form->group, tag, out);
    case TUTTI_FORM_NAME:
        return tu_error(TUTTI_ERROR_ARGUMENT, "a name (\"%s\") cannot be expanded: resolve it to its group first",
                        form->name != NULL ? form->name : "NULL");
    case TUTTI_FORM_RANKS:
        if (form->count < 0 || (form->count > 0 && form->ranks == NULL))
            return tu_error(TUTTI_ERROR_ARGUMENT, "the list of %d ranks is NULL", form->count);
        status = fill(out, tag, form->count, form->count);
        if (status == TUTTI_OK && form->count > 0)
            memcpy(out->ranks, form->ranks, sizeof(int) * (size_t)form->count);
        return status;
    case TUTTI_FORM_LISTS:
        return expand_nested(form, tag, out);
    case TUTTI_FORM_MESH:
    case TUTTI_FORM_MESH_DIM: {
        tutti_group *group;
        status = group_of_mesh(form, &group);
        if (status == TUTTI_OK) {
            status = expand_group(group, tag, out);
            tutti_group_release(group);
        }
        return status;
    }
    }
    return unknown_kind(form);
}

/* ---- resolve ---- */

static tutti_status resolve_ranks(tutti_world *world, const int *ranks, int count, const char *tag,
                                  tutti_group **group) {
    if (ranks == NULL || count <= 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the list of ranks is empty");
    pthread_mutex_lock(&world->lock);
    tutti_group *found = tutti_group_keep(tu_registry_find(world->registry, tag, ranks, count));
    pthread_mutex_unlock(&world->lock);
    if (found == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "no group has just these %d ranks (the first is %d)%s%s%s: make it with tutti_group_new first",
                        count, ranks[0], tag != NULL && tag[0] != 0 ? " and tag \"" : "", tag != NULL ? tag : "",
                        tag != NULL && tag[0] != 0 ? "\"" : "");
    *group = found;
    return TUTTI_OK;
}

static tutti_status resolve_nested(tutti_world *world, const tutti_group_form *form, const char *tag,
                                   tutti_group **group) {
    tutti_status status = check_nested(form);
    if (status != TUTTI_OK)
        return status;
    for (int i = 0; i < form->count; i++)
        for (int j = 0; j < form->counts[i]; j++)
            if (form->lists[i][j] == world->rank)
                return resolve_ranks(world, form->lists[i], form->counts[i], tag, group);
    return tu_error(TUTTI_ERROR_ARGUMENT, "this rank, %d, is in none of the lists", world->rank);
}

static tutti_status resolve_name(tutti_world *world, const char *name, tutti_group **group) {
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the name of the group is NULL");
    pthread_mutex_lock(&world->lock);
    tutti_group *found = tutti_group_keep(tu_registry_name(world->registry, name));
    pthread_mutex_unlock(&world->lock);
    if (found == NULL)
        return tu_error(
            TUTTI_ERROR_NOT_FOUND,
            "could not resolve the group name \"%s\": no group of this rank has it, or it is already destroyed", name);
    *group = found;
    return TUTTI_OK;
}

tutti_status tutti_group_resolve(tutti_world *world, const tutti_group_form *form, const char *tag,
                                 tutti_group **group) {
    tutti_status status = check_form(world, form);
    if (status == TUTTI_OK && group == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_resolve: where the group goes is NULL");
    if (status != TUTTI_OK)
        return status;
    switch (form->kind) {
    case TUTTI_FORM_GROUP:
        if (form->group == NULL)
            return tu_error(TUTTI_ERROR_ARGUMENT, "the group is NULL");
        *group = tutti_group_keep(form->group);
        return TUTTI_OK;
    case TUTTI_FORM_NAME:
        return resolve_name(world, form->name, group);
    case TUTTI_FORM_RANKS:
        return resolve_ranks(world, form->ranks, form->count, tag, group);
    case TUTTI_FORM_LISTS:
        return resolve_nested(world, form, tag, group);
    case TUTTI_FORM_MESH:
    case TUTTI_FORM_MESH_DIM:
        return group_of_mesh(form, group);
    }
    return unknown_kind(form);
}
