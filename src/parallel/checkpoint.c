/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints that all ranks write together: a file per rank, and one that says which of them count. It is written
 * last, all or nothing, so a folder holds the checkpoint before or the new one, whatever happens on the way.
 */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <tutti/io.h>

#include "nn/state.h"
#include "parallel/shard.h"
#include "tensor/create.h"

#define PATH 4096

/* Which files make up a checkpoint. */
typedef struct parts_of_run {
    long long serial; /* of the checkpoint in this folder: its files have names of their own */
    int ranks;
    long long mark; /* drawn for this checkpoint; its parts have it, and those of another have not */
} parts_of_run;

static void part_path(char *path, const char *folder, const parts_of_run *which, int rank) {
    snprintf(path, PATH, "%s/part-%d-of-%d-%lld.safetensors", folder, rank, which->ranks, which->serial);
}

static void index_path(char *path, const char *folder) {
    snprintf(path, PATH, "%s/checkpoint.safetensors", folder);
}

static bool usable(const char *who, const tt_fully_sharded *sharded, const char *folder) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (sharded == NULL || folder == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s is NULL", who, sharded == NULL ? "sharded" : "folder");
    else if (strlen(folder) > PATH - 128)
        tu_fail(TUTTI_ERROR_LIMIT, "%s: the name of the folder has %zu bytes", who, strlen(folder));
    return tu_self()->pending == TUTTI_OK;
}

static tutti_status read_index(const char *who, const char *folder, parts_of_run *which) {
    char path[PATH];
    index_path(path, folder);
    if (access(path, F_OK) != 0)
        return tu_error(TUTTI_ERROR_NOT_FOUND, "%s: \"%s\" holds no checkpoint", who, folder);
    tt_metadata metadata = tt_load_metadata(path);
    const char *serial = tt_metadata_get(metadata, "serial"), *ranks = tt_metadata_get(metadata, "ranks");
    if (tu_self()->pending != TUTTI_OK)
        return tu_self()->pending;
    char *serial_end = NULL, *ranks_end = NULL;
    long count = ranks != NULL ? strtol(ranks, &ranks_end, 10) : 0;
    which->serial = serial != NULL ? strtoll(serial, &serial_end, 10) : -1;
    which->ranks = (int)count;
    const char *mark = tt_metadata_get(metadata, "mark");
    which->mark = mark != NULL ? strtoll(mark, NULL, 10) : 0;
    if (serial == NULL || *serial_end != '\0' || which->serial < 0 || ranks == NULL || *ranks_end != '\0' ||
        count < 1 || count > 1000000)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s: \"%s\" does not say which parts count", who, path);
    return TUTTI_OK;
}

/* ---- saving ---- */

static void write_index(const char *folder, const parts_of_run *which, long long step) {
    char path[PATH], texts[4][32];
    const char *keys[] = { "serial", "ranks", "step", "mark" };
    const char *values[] = { texts[0], texts[1], texts[2], texts[3] };
    snprintf(texts[0], sizeof texts[0], "%lld", which->serial);
    snprintf(texts[1], sizeof texts[1], "%d", which->ranks);
    snprintf(texts[2], sizeof texts[2], "%lld", step);
    snprintf(texts[3], sizeof texts[3], "%lld", which->mark);
    index_path(path, folder);
    tt_save_safetensors_with((tt_tensor_list){ 0, NULL }, NULL, (tt_metadata){ 4, keys, values }, path);
}

/* Takes away the parts of other checkpoints. What cannot be removed only takes room. */
static void remove_others(const char *folder, const parts_of_run *which) {
    DIR *open = opendir(folder);
    for (const struct dirent *entry; open != NULL && (entry = readdir(open)) != NULL;) {
        parts_of_run found;
        int part, end = 0;
        char path[PATH];
        if (sscanf(entry->d_name, "part-%d-of-%d-%lld.safetensors%n", &part, &found.ranks, &found.serial, &end) != 3 ||
            end == 0 || entry->d_name[end] != '\0' || found.serial == which->serial)
            continue;
        part_path(path, folder, &found, part);
        unlink(path);
    }
    if (open != NULL)
        closedir(open);
}

/* Ranks that name other folders, or have other views of one, would leave half a checkpoint. */
static tutti_status check_parts(const char *folder, const parts_of_run *which) {
    for (int rank = 0; rank < which->ranks; rank++) {
        char path[PATH];
        part_path(path, folder, which, rank);
        if (access(path, F_OK) != 0)
            return tu_error(
                TUTTI_ERROR_STATE,
                "fully_sharded_save: the part of rank %d is not in rank 0's folder \"%s\": all ranks must name "
                "the same one",
                rank, folder);
    }
    return TUTTI_OK;
}

static void write_part(const tt_fully_sharded *sharded, const tt_optimizer *optimizer, const parts_of_run *which,
                       const char *path) {
    char text[32];
    const char *key = "mark", *value = text;
    snprintf(text, sizeof text, "%lld", which->mark);
    tu_state_save(sharded->root, optimizer, (tt_metadata){ 1, &key, &value }, path);
}

/* A number that no other checkpoint has. */
static long long draw_mark(void) {
    long long mark = 0;
    if (getrandom(&mark, sizeof mark, 0) != (ssize_t)sizeof mark)
        mark = time(NULL);
    return (mark & INT64_MAX) | 1;
}

/* The serial number and the mark of the next checkpoint in this folder, which rank 0 finds out. */
static parts_of_run next_parts(const tt_fully_sharded *sharded, const char *folder) {
    parts_of_run last = { 0, 0, 0 };
    tutti_error_copy before;
    tu_error_save(&before);
    if (tutti_group_rank(sharded->group) == 0 && read_index("fully_sharded_save", folder, &last) != TUTTI_OK) {
        last.serial = 0; /* there is none yet, or one that nobody could load */
        tt_error_clear();
        (void)tu_error_restore(&before); /* nothing has failed */
    }
    int64_t told[] = { last.serial + 1, draw_mark() };
    tt_tensor *all = tt_broadcast(tt_from(told, tt_shape(2), TUTTI_I64, TU_OF_HOST), 0, sharded->group);
    if (!tt_read(all, told, TUTTI_I64, 2))
        told[0] = told[1] = 0;
    return (parts_of_run){ told[0], tutti_group_size(sharded->group), told[1] };
}

static void save(tt_fully_sharded *sharded, const tt_optimizer *optimizer, const char *folder) {
    char path[PATH];
    tutti_group *group = sharded->group, *replicas = sharded->options.replicas;
    bool writes = replicas == NULL || tutti_group_rank(replicas) == 0; /* replicas have the same */
    for (int i = 0; i < sharded->unit_count; i++)
        tu_shard_free(&sharded->units[i]); /* slots have shards */
    parts_of_run which = next_parts(sharded, folder);
    if (writes && mkdir(folder, 0777) != 0 && errno != EEXIST)
        tu_fail(TUTTI_ERROR_SYSTEM, "fully_sharded_save: making the folder \"%s\": %s", folder, strerror(errno));
    part_path(path, folder, &which, tutti_group_rank(group));
    if (writes && tu_self()->pending == TUTTI_OK)
        write_part(sharded, optimizer, &which, path);
    tu_pending_take(tu_parallel_all(TUTTI_OK, "fully_sharded_save: another rank could not write its part", group));
    bool first = writes && tutti_group_rank(group) == 0;
    if (first && tu_self()->pending == TUTTI_OK)
        tu_pending_take(check_parts(folder, &which));
    if (first && tu_self()->pending == TUTTI_OK)
        write_index(folder, &which, optimizer != NULL ? tt_item_int(tt_optimizer_steps(optimizer)) : 0);
    tu_pending_take(tu_parallel_all(TUTTI_OK, "fully_sharded_save: rank 0 could not write which parts count", group));
    if (first && tu_self()->pending == TUTTI_OK)
        remove_others(folder, &which);
    if (replicas != NULL)
        tu_pending_take(tu_parallel_all(TUTTI_OK, "fully_sharded_save: another rank could not write", replicas));
}

bool tt_fully_sharded_save(tt_fully_sharded *sharded, const tt_optimizer *optimizer, const char *folder) {
    if (!usable("fully_sharded_save", sharded, folder))
        return false;
    tt_scope scope = tt_scope_open();
    save(sharded, optimizer, folder);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}

/* ---- loading ---- */

/* One part; with the error pending where it belongs to another checkpoint. */
static tt_named_list read_part(const char *path, const parts_of_run *which) {
    tt_named_list none = { 0, NULL, NULL };
    const char *mark = which->mark != 0 ? tt_metadata_get(tt_load_metadata(path), "mark") : NULL;
    if (tu_self()->pending == TUTTI_OK && which->mark != 0 && (mark == NULL || strtoll(mark, NULL, 10) != which->mark))
        tu_fail(TUTTI_ERROR_PROTOCOL, "fully_sharded_load: \"%s\" is a part of another checkpoint", path);
    return tu_self()->pending == TUTTI_OK ? tt_load_safetensors(path) : none;
}

/* The member that a tensor of a part belongs to: "module.<name>", "optimizer.<state>.<name>"; NULL: no member's. */
static const tu_shard_member *member_of(const tt_fully_sharded *sharded, const char *name) {
    const char *rest = strchr(name, '.');
    if (rest != NULL && strncmp(name, "optimizer.", 10) == 0)
        rest = strchr(rest + 1, '.');
    for (int i = 0; rest != NULL && i < sharded->member_count; i++)
        if (strcmp(sharded->members[i]->name, rest + 1) == 0)
            return sharded->members[i];
    return NULL;
}

/* Along which dimension those who wrote have cut: the one in which a part is smaller than the whole. */
static int dimension_of_cut(const tu_shard_member *member, tt_tensor *const *pieces, int ranks) {
    for (int i = 0; i < ranks; i++)
        for (int dim = 0; dim < member->shape.ndim && dim < pieces[i]->ndim; dim++)
            if (pieces[i]->sizes[dim] < member->shape.sizes[dim])
                return dim;
    return member->dim;
}

/* This rank's rows of one tensor, which `ranks` parts hold together. */
static tt_tensor *rows_of(const tu_shard_member *member, const char *name, const tt_named_list *parts, int ranks) {
    tt_tensor **pieces = tu_scope_memory((size_t)ranks * sizeof *pieces);
    for (int i = 0; pieces != NULL && i < ranks; i++)
        pieces[i] = tt_named(parts[i], name);
    if (pieces == NULL || tu_self()->pending != TUTTI_OK)
        return NULL;
    int dim = dimension_of_cut(member, pieces, ranks);
    tt_tensor *whole = tt_cat(tt_tensors_of((size_t)ranks, pieces), dim);
    int64_t rows = member->shape.ndim > 0 ? member->shape.sizes[dim] : 1;
    if (whole != NULL && tt_size(whole, dim) != rows) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "fully_sharded_load: \"%s\" has %lld rows in the checkpoint, and %lld here", name,
                (long long)tt_size(whole, dim), (long long)rows);
        return NULL;
    }
    int64_t first = member->own > 0 ? tutti_group_rank(member->unit->all->group) * member->part : 0;
    return tt_narrow(whole, member->dim, first, member->own);
}

/* What a file of this rank would hold, put together from those of all ranks that wrote. */
static tt_named_list cut_anew(tt_fully_sharded *sharded, const char *folder, const parts_of_run *which) {
    tt_named_list none = { 0, NULL, NULL }, *parts = tu_scope_memory((size_t)which->ranks * sizeof *parts);
    int rank = tutti_group_rank(sharded->group);
    for (int i = 0; parts != NULL && i < which->ranks; i++) {
        char path[PATH];
        part_path(path, folder, which, i);
        parts[i] = read_part(path, which);
    }
    tt_tensor **tensors =
        tu_self()->pending == TUTTI_OK ? tu_scope_memory((parts[0].count + 1) * sizeof *tensors) : NULL;
    for (size_t i = 0; tensors != NULL && i < parts[0].count && tu_self()->pending == TUTTI_OK; i++) {
        const char *name = parts[0].names[i];
        const tu_shard_member *member = member_of(sharded, name);
        bool own = strcmp(name, "random") == 0 && rank < which->ranks;
        tensors[i] = member != NULL ? rows_of(member, name, parts, which->ranks)
                     : own          ? tt_named(parts[rank], name)
                                    : parts[0].at[i];
    }
    return tu_self()->pending == TUTTI_OK ? (tt_named_list){ parts[0].count, tensors, parts[0].names } : none;
}

static void load(tt_fully_sharded *sharded, tt_optimizer *optimizer, const char *folder) {
    char path[PATH];
    parts_of_run which = { 0, 1, 0 };
    static const char others[] = "fully_sharded_load: another rank could not read the checkpoint";
    for (int i = 0; i < sharded->unit_count; i++)
        tu_shard_free(&sharded->units[i]);
    tt_named_list file = { 0, NULL, NULL };
    if (tu_pending_take(read_index("fully_sharded_load", folder, &which)) == TUTTI_OK) {
        part_path(path, folder, &which, tutti_group_rank(sharded->group));
        file = which.ranks == tutti_group_size(sharded->group) ? read_part(path, &which)
                                                               : cut_anew(sharded, folder, &which);
    }
    if (tu_pending_take(tu_parallel_all(TUTTI_OK, others, sharded->group)) == TUTTI_OK)
        tu_state_set(sharded->root, optimizer, file, folder);
    if (tu_self()->pending == TUTTI_OK && optimizer != NULL && optimizer == sharded->optimizer)
        tt_fill_(sharded->marks, tt_item(tt_optimizer_steps(optimizer)));
    tu_pending_take(tu_parallel_all(TUTTI_OK, others, sharded->group));
}

bool tt_fully_sharded_load(tt_fully_sharded *sharded, tt_optimizer *optimizer, const char *folder) {
    if (!usable("fully_sharded_load", sharded, folder))
        return false;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    load(sharded, optimizer, folder);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}
