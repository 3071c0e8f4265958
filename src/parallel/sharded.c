/* SPDX-License-Identifier: Apache-2.0
 *
 * Fully sharded modules: how they are made, looked at, and given up.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "base/result.h"
#include "parallel/shard.h"

/* ---- what belongs to which unit ---- */

/* A walk over the modules. Members are numbered as they are met. */
typedef struct walk {
    tt_fully_sharded *all;
    tu_map modules; /* that were visited */
    tu_map numbers; /* of members, plus 1, by their tensor */
    tu_shard_member *found;
    int *unit_of;
    size_t count, capacity;
} walk;

static char *joined(const char *prefix, const char *name) {
    size_t bytes = strlen(prefix) + strlen(name) + 2;
    char *text = malloc(bytes);
    if (text != NULL)
        snprintf(text, bytes, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", name);
    else
        tu_error_memory("a name", bytes);
    return text;
}

static tutti_status add_slot(tu_shard_member *member, tt_module *module, const char *name) {
    tu_shard_slot *slots = realloc(member->slots, ((size_t)member->slot_count + 1) * sizeof *slots);
    if (slots == NULL)
        return tu_error_memory("a slot", sizeof *slots);
    member->slots = slots;
    slots[member->slot_count++] = (tu_shard_slot){ module, name };
    return TUTTI_OK;
}

static tutti_status add_member(walk *way, tt_tensor *tensor, char *name, int unit) {
    if (name == NULL)
        return TUTTI_ERROR_MEMORY;
    if (way->count == way->capacity) {
        size_t capacity = way->capacity > 0 ? 2 * way->capacity : 16;
        tu_shard_member *found = realloc(way->found, capacity * sizeof *found);
        way->found = found != NULL ? found : way->found;
        int *unit_of = realloc(way->unit_of, capacity * sizeof *unit_of);
        way->unit_of = unit_of != NULL ? unit_of : way->unit_of;
        if (found == NULL || unit_of == NULL) {
            free(name);
            return tu_error_memory("the parameters of a module", capacity * sizeof *found);
        }
        way->capacity = capacity;
    }
    way->found[way->count] = (tu_shard_member){ .name = name, .original = tu_tensor_hold(tensor) };
    way->found[way->count].trained = tt_requires_grad(tensor);
    way->unit_of[way->count++] = unit;
    return tu_map_set(&way->numbers, tensor, (void *)(uintptr_t)way->count);
}

static tutti_status visit_slot(walk *way, tt_module *module, const tu_module_slot *slot, const char *prefix, int unit) {
    if (slot->tensor->flags & TU_SHARD)
        return tu_error(
            TUTTI_ERROR_STATE,
            "fully_shard: parameter \"%s\" of module \"%s\" is a shard already; list all units in one call, "
            "and put whole parameters back first where another sharding was released",
            slot->name, prefix);
    size_t number = (uintptr_t)tu_map_get(&way->numbers, slot->tensor);
    if (number == 0) {
        tutti_status status = add_member(way, slot->tensor, joined(prefix, slot->name), unit);
        if (status != TUTTI_OK)
            return status;
        number = way->count;
    }
    if (way->unit_of[number - 1] != unit)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "fully_shard: parameter \"%s\" is also in unit \"%s\", under \"%s\"; units cannot share one",
                        way->found[number - 1].name, way->all->units[unit].name, slot->name);
    return add_slot(&way->found[number - 1], module, slot->name);
}

static tutti_status visit(walk *way, tt_module *module, int unit, const char *path) {
    tt_fully_sharded *all = way->all;
    if (tu_map_get(&way->modules, module) != NULL)
        return TUTTI_OK;
    tutti_status status = tu_map_set(&way->modules, module, module);
    for (int i = 0; i < all->unit_count && status == TUTTI_OK; i++)
        if (all->units[i].module == module) {
            unit = i;
            all->units[i].name = strdup(path);
            status = all->units[i].name != NULL ? TUTTI_OK : tu_error_memory("a name", strlen(path) + 1);
        }
    for (int i = 0; i < module->slot_count && status == TUTTI_OK; i++)
        if (!module->slots[i].buffer && module->slots[i].tensor != NULL)
            status = visit_slot(way, module, &module->slots[i], path, unit);
    for (int i = 0; i < module->child_count && status == TUTTI_OK; i++) {
        char *below = joined(path, module->children[i].name);
        status = below != NULL ? visit(way, module->children[i].module, unit, below) : TUTTI_ERROR_MEMORY;
        free(below);
    }
    return status;
}

/* ---- checks ---- */

static tutti_status check_units(const tt_fully_sharded *all) {
    for (int i = 0; i < all->unit_count; i++) {
        if (all->units[i].name == NULL)
            return tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: units[%d] (%s) is not below the root, or twice there",
                            i, tt_module_name(all->units[i].module));
        for (int k = 0; k < i; k++)
            if (all->units[k].module == all->units[i].module)
                return tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: units[%d] and units[%d] are one module, \"%s\"", k,
                                i, all->units[i].name);
    }
    return TUTTI_OK;
}

static tutti_status check_member(const tu_shard_unit *unit, const tu_shard_member *member) {
    const tt_tensor *x = member->original, *first = unit->members[0].original;
    const tu_shard_member *any = unit->all->members[0];
    if (x->device == TUTTI_META)
        return tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: parameter \"%s\" is on device meta, and has no values",
                        member->name);
    if (x->device != any->original->device)
        return tu_error(
            TUTTI_ERROR_ARGUMENT, "fully_shard: parameter \"%s\" is on device %s, and \"%s\" on %s; all must be on one",
            member->name, tutti_device_name(x->device), any->name, tutti_device_name(any->original->device));
    if (x->dtype != first->dtype)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "fully_shard: unit \"%s\" has parameters of %s (\"%s\") and %s (\"%s\"); put those of one dtype "
            "into a unit of their own",
            unit->name, tutti_dtype_name(first->dtype), unit->members[0].name, tutti_dtype_name(x->dtype),
            member->name);
    const tu_history *history = x->history;
    if (history != NULL && tu_hook_count(&history->tensor_hooks) + tu_hook_count(&history->accumulate_hooks) > 0)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "fully_shard: parameter \"%s\" has hooks, which its shards would not run; hang them on the "
                        "shards, after the call",
                        member->name);
    return TUTTI_OK;
}

/* Along which dimension a member is cut. */
static tutti_status choose_dimension(tu_shard_member *member) {
    const tt_fully_sharded *all = member->unit->all;
    const tt_tensor *x = member->original;
    int ranks = tutti_group_size(all->group);
    if (all->options.dimension == NULL)
        return TUTTI_OK;
    member->dim = all->options.dimension(all->options.user, member->name, x);
    if (member->dim < 0 || member->dim >= (x->ndim > 0 ? x->ndim : 1))
        return tu_error(TUTTI_ERROR_RANGE, "fully_shard: dimension %d of parameter \"%s\" (%s) does not exist",
                        member->dim, member->name, tu_describe(x));
    if (member->dim > 0 && x->sizes[member->dim] % ranks != 0)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "fully_shard: parameter \"%s\" is %s, and cannot be cut along dimension %d into %d equal parts; "
            "along dimension 0 parts may be unequal",
            member->name, tu_describe(x), member->dim, ranks);
    return TUTTI_OK;
}

/* ---- making ---- */

/* Gives the units their members. */
static tutti_status hand_out(walk *way) {
    tt_fully_sharded *all = way->all;
    all->members = calloc(way->count + 1, sizeof(tu_shard_member *));
    if (all->members == NULL)
        return tu_error_memory("the parameters of a module", way->count * sizeof(tu_shard_member *));
    for (int i = 0; i < all->unit_count; i++) {
        size_t count = 1;
        for (size_t k = 0; k < way->count; k++)
            count += way->unit_of[k] == i;
        all->units[i].members = calloc(count, sizeof *all->units[i].members);
        if (all->units[i].members == NULL)
            return tu_error_memory("the parameters of a unit", count * sizeof *all->units[i].members);
    }
    for (; all->member_count < (int)way->count; all->member_count++) {
        tu_shard_unit *unit = &all->units[way->unit_of[all->member_count]];
        tu_shard_member *member = &unit->members[unit->count++];
        *member = way->found[all->member_count];
        member->unit = unit;
        unit->trained += member->trained;
        unit->dtype = unit->gathered_dtype = unit->members[0].original->dtype;
        if (all->options.param_dtype != 0 && tu_is_float(unit->dtype))
            unit->gathered_dtype = all->options.param_dtype;
        unit->device = member->original->device;
        unit->gathered_device = all->options.device != 0 ? all->options.device : unit->device;
        all->device = unit->device;
        all->members[all->member_count] = member;
        tutti_status status = check_member(unit, member);
        if (status == TUTTI_OK)
            status = choose_dimension(member);
        if (status != TUTTI_OK) {
            all->member_count++;
            return status;
        }
    }
    return TUTTI_OK;
}

static tutti_status find_members(tt_fully_sharded *all) {
    walk way = { .all = all };
    tutti_status status = visit(&way, all->root, all->unit_count - 1, "");
    if (status == TUTTI_OK)
        status = check_units(all);
    if (status == TUTTI_OK)
        status = hand_out(&way);
    for (size_t i = (size_t)all->member_count; i < way.count; i++) { /* those that no unit has taken over */
        tu_tensor_drop(way.found[i].original);
        free(way.found[i].slots);
        free(way.found[i].name);
    }
    tu_map_free(&way.modules);
    tu_map_free(&way.numbers);
    free(way.found);
    free(way.unit_of);
    return status;
}

/* Unit by unit, as ranks cut them: so one that lists its units in another order is told. */
static tt_named_list originals(const tt_fully_sharded *all, int **cuts) {
    size_t count = (size_t)all->member_count, at = 0;
    tt_tensor **tensors = tu_scope_memory((count + 1) * sizeof *tensors);
    const char **names = tu_scope_memory((count + 1) * sizeof *names);
    *cuts = tu_scope_memory((count + 1) * sizeof **cuts);
    if (tensors == NULL || names == NULL || *cuts == NULL)
        return (tt_named_list){ 0, NULL, NULL };
    for (int i = 0; i < all->unit_count; i++)
        for (int k = 0; k < all->units[i].count; k++, at++) {
            tensors[at] = all->units[i].members[k].original;
            names[at] = all->units[i].members[k].name;
            (*cuts)[at] = all->units[i].members[k].dim;
        }
    return (tt_named_list){ count, tensors, names };
}

/* From here on slots have shards, and nobody needs the originals. */
static void swap_in(tt_fully_sharded *all) {
    for (int i = 0; i < all->member_count; i++) {
        tu_shard_member *member = all->members[i];
        for (int k = 0; k < member->slot_count; k++)
            tt_module_set_parameter(member->slots[k].module, member->slots[k].name, member->shard);
        tu_tensor_drop(member->original);
        member->original = NULL;
    }
}

/* A tensor there has the device's own number, where the current one was asked for. */
static void find_device(tutti_device *device) {
    if (*device == 0)
        return;
    *device = tt_device_of(tt_empty(tt_shape(0), TUTTI_F32, TUTTI_OPTIONS(tt_options, .device = *device)));
    if (tu_self()->pending == TUTTI_OK && *device == TUTTI_META)
        tu_fail(TUTTI_ERROR_ARGUMENT, "fully_shard: nothing can be computed on device meta");
}

static void set_up(tt_fully_sharded *all) {
    int *cuts;
    find_device(&all->options.device);
    if (tu_self()->pending == TUTTI_OK)
        tu_pending_take(find_members(all));
    tt_named_list named = originals(all, &cuts);
    /* Also with an error pending, which the others must hear of. */
    tu_parallel_agree("fully_shard", named, cuts, all->group);
    if (tu_self()->pending == TUTTI_OK && all->options.replicas != NULL)
        tu_parallel_agree("fully_shard", named, cuts, all->options.replicas);
    if (tu_self()->pending == TUTTI_OK && all->options.near_ranks != 0)
        tu_pending_take(tutti_group_new_subgroups(all->group, all->options.near_ranks, NULL, NULL, &all->near));
    if (tu_self()->pending == TUTTI_OK && !all->options.own_values) {
        tu_parallel_broadcast(tt_tensors_of(named.count, named.at), 0, all->group);
        if (all->options.replicas != NULL)
            tu_parallel_broadcast(tt_tensors_of(named.count, named.at), 0, all->options.replicas);
    }
    for (int i = 0; i < all->unit_count && tu_self()->pending == TUTTI_OK; i++)
        tu_pending_take(tu_shard_cut(&all->units[i]));
    if (tu_self()->pending == TUTTI_OK)
        tu_shard_hang(all);
    if (tu_self()->pending == TUTTI_OK)
        swap_in(all);
}

static tutti_status take_options(const tt_fully_sharded_options *options, tt_fully_sharded_options *full) {
    *full = (tt_fully_sharded_options){ .size = sizeof *full };
    tutti_status status =
        options != NULL ? tu_options_copy("tt_fully_sharded_options", options, full, sizeof *full) : TUTTI_OK;
    const struct {
        const char *name;
        tutti_dtype dtype;
    } dtypes[] = { { "param_dtype", full->param_dtype },
                   { "reduce_dtype", full->reduce_dtype },
                   { "output_dtype", full->output_dtype } };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes && status == TUTTI_OK; i++)
        if (dtypes[i].dtype != 0 && !tu_is_float(dtypes[i].dtype))
            status = tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: %s is %d, and no float type", dtypes[i].name,
                              (int)dtypes[i].dtype);
    if (status == TUTTI_OK && (full->reshard < TT_RESHARD_UNITS || full->reshard > TT_RESHARD_NEVER))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: reshard is %d, and no tt_reshard", (int)full->reshard);
    if (status == TUTTI_OK && !(full->divisor >= 0))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: divisor is %g, and must not be below 0", full->divisor);
    return status;
}

static tutti_status check_near(const tt_fully_sharded_options *full, tutti_group *group) {
    int ranks = tutti_group_size(group), near = full->near_ranks;
    if (near != 0 && (near <= 1 || near >= ranks || ranks % near != 0))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "fully_shard: near_ranks is %d; it must divide the %d ranks of the group, and be neither 1 nor "
                        "all of them",
                        near, ranks);
    if (near != 0 && full->reshard == TT_RESHARD_NEVER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "fully_shard: near_ranks is %d, and reshard says that units stay whole",
                        near);
    return TUTTI_OK;
}

static tt_fully_sharded *allocate(tt_module *root, size_t count, tt_module *const *units, tt_reshard reshard) {
    tt_fully_sharded *all = calloc(1, sizeof *all);
    tu_shard_unit *array = calloc(count + 1, sizeof *array);
    if (all == NULL || array == NULL) {
        free(all);
        free(array);
        tu_pending_take(tu_error_memory("a sharded module", (count + 1) * sizeof *array));
        return NULL;
    }
    atomic_init(&all->references, 1);
    all->units = array;
    all->unit_count = (int)count + 1;
    all->root = tt_module_keep(root);
    for (size_t i = 0; i <= count; i++) {
        array[i].all = all;
        array[i].module = i < count ? units[i] : root;
        array[i].keep_forward = reshard == TT_RESHARD_NEVER || (reshard == TT_RESHARD_UNITS && i == count);
    }
    return all;
}

tt_fully_sharded *tt_fully_shard(tt_module *root, size_t count, tt_module *const *units, tutti_group *group,
                                 const tt_fully_sharded_options *options) {
    tt_fully_sharded_options full;
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(take_options(options, &full)) != TUTTI_OK)
        return NULL;
    const char *absent = root == NULL ? "root" : group == NULL ? "group" : count > 0 && units == NULL ? "units" : NULL;
    for (size_t i = 0; absent == NULL && i < count; i++)
        absent = units[i] == NULL ? "an entry of units" : NULL;
    if (absent != NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "fully_shard: %s is NULL", absent);
        return NULL;
    }
    if (tu_pending_take(check_near(&full, group)) != TUTTI_OK)
        return NULL;
    tt_fully_sharded *all = allocate(root, count, units, full.reshard);
    if (all == NULL)
        return NULL;
    all->group = tutti_group_keep(group);
    all->options = full;
    all->options.replicas = full.replicas != NULL ? tutti_group_keep(full.replicas) : NULL;
    all->counts.units = all->unit_count;
    tt_scope scope = tt_scope_open();
    set_up(all);
    tu_scope_leave(&scope);
    if (tu_self()->pending == TUTTI_OK) {
        tt_memory_trim(); /* whole parameters are gone, unless somebody else has them */
        return all;
    }
    tt_fully_sharded_release(all);
    return NULL;
}

void tt_fully_sharded_release(tt_fully_sharded *sharded) {
    if (sharded == NULL)
        return;
    sharded->released = true;
    for (int i = 0; i < sharded->unit_count; i++) {
        tu_shard_unit *unit = &sharded->units[i];
        tu_shard_free(unit);
        tt_hook_remove(&unit->before);
        tt_hook_remove(&unit->after);
        for (int k = 0; k < unit->count; k++) {
            tu_shard_member *member = &unit->members[k];
            tt_hook_remove(&member->hook);
            if (member->shard != NULL && tt_grad(member->shard) != NULL)
                tt_wait(tt_grad(member->shard)); /* nobody else may ever read it */
        }
    }
    tu_shard_drop(&sharded->units[0]);
}

/* ---- by hand ---- */

bool tu_shard_usable(const char *who, const tt_fully_sharded *sharded) {
    if (tu_self()->pending == TUTTI_OK && sharded == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: sharded is NULL", who);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_fully_sharded_sync(tt_fully_sharded *sharded, bool on) {
    if (!tu_shard_usable("fully_sharded_sync", sharded))
        return false;
    bool was = !sharded->local;
    sharded->local = !on;
    return was;
}

/* Does it to the unit of that module, or to all. */
static bool each(const char *who, tt_fully_sharded *sharded, const tt_module *module, void (*act)(tu_shard_unit *)) {
    if (!tu_shard_usable(who, sharded))
        return false;
    tu_shard_unit *one = module != NULL ? tu_shard_unit_of(who, sharded, module) : NULL;
    if (one != NULL)
        act(one);
    for (int i = 0; module == NULL && i < sharded->unit_count; i++)
        act(&sharded->units[i]);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_fully_sharded_gather(tt_fully_sharded *sharded, const tt_module *unit) {
    return each("fully_sharded_gather", sharded, unit, tu_shard_gather);
}

bool tt_fully_sharded_free(tt_fully_sharded *sharded, const tt_module *unit) {
    return each("fully_sharded_free", sharded, unit, tu_shard_free);
}

/* ---- whole parameters ---- */

tt_named_list tt_fully_sharded_parameters(tt_fully_sharded *sharded) {
    tt_named_list none = { 0, tu_nothing, tu_no_names };
    if (!tu_shard_usable("fully_sharded_parameters", sharded))
        return none;
    size_t count = (size_t)sharded->member_count;
    tt_tensor **tensors = tu_scope_memory((count + 1) * sizeof *tensors);
    char **names = tu_scope_memory((count + 1) * sizeof *names);
    for (size_t i = 0; names != NULL && i < count; i++) {
        size_t bytes = strlen(sharded->members[i]->name) + 1;
        if ((names[i] = tu_scope_memory(bytes)) != NULL)
            memcpy(names[i], sharded->members[i]->name, bytes);
    }
    for (int i = 0; tensors != NULL && i < sharded->unit_count; i++) {
        tu_shard_unit *unit = &sharded->units[i];
        bool was = tu_shard_is_gathered(unit) && !unit->hidden;
        tu_shard_free(unit); /* it may be older than the shards */
        tu_shard_gather(unit);
        for (size_t k = 0; k < count && tu_self()->pending == TUTTI_OK; k++)
            if (sharded->members[k]->unit == unit)
                tensors[k] = tt_clone(tt_detach(sharded->members[k]->whole));
        if (!was)
            tu_shard_free(unit);
    }
    return tu_self()->pending == TUTTI_OK ? (tt_named_list){ count, tensors, (const char *const *)names } : none;
}

/* The whole parameter for a member, or NULL with the error pending. */
static tt_tensor *fitting(const tu_shard_member *member, tt_named_list given) {
    for (size_t i = 0; i < given.count; i++) {
        if (strcmp(given.names[i], member->name) != 0)
            continue;
        tt_dims sizes = tt_sizes(given.at[i]);
        if (sizes.count == member->shape.ndim &&
            memcmp(sizes.at, member->shape.sizes, (size_t)sizes.count * sizeof *sizes.at) == 0)
            return given.at[i];
        tu_fail(TUTTI_ERROR_ARGUMENT, "fully_sharded_set_parameters: \"%s\" is %s and must be %s", member->name,
                tu_describe(given.at[i]), tu_dims_text(member->shape.ndim, member->shape.sizes));
        return NULL;
    }
    tu_fail(TUTTI_ERROR_NOT_FOUND, "fully_sharded_set_parameters: parameter \"%s\" is missing", member->name);
    return NULL;
}

bool tt_fully_sharded_set_parameters(tt_fully_sharded *sharded, tt_named_list parameters) {
    if (!tu_shard_usable("fully_sharded_set_parameters", sharded))
        return false;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tt_tensor **found = tu_scope_memory(((size_t)sharded->member_count + 1) * sizeof *found);
    for (int i = 0; found != NULL && i < sharded->member_count && tu_self()->pending == TUTTI_OK; i++)
        found[i] = fitting(sharded->members[i], parameters);
    for (int i = 0; i < sharded->unit_count && tu_self()->pending == TUTTI_OK; i++)
        tu_shard_free(&sharded->units[i]); /* what was gathered is out of date */
    for (int i = 0; i < sharded->member_count && tu_self()->pending == TUTTI_OK; i++)
        tt_copy_(sharded->members[i]->shard,
                 tt_to_device(tu_shard_own(found[i], sharded->members[i]), sharded->device));
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_fully_sharded_count(const tt_fully_sharded *sharded, tt_fully_sharded_counts *counts) {
    if (!tu_shard_usable("fully_sharded_count", sharded))
        return false;
    tt_fully_sharded_counts own;
    tu_shard_count(sharded, &own);
    return tu_pending_take(tu_result_copy("tt_fully_sharded_counts", &own, sizeof own, counts)) == TUTTI_OK;
}
