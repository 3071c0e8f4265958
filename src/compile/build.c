/* SPDX-License-Identifier: Apache-2.0
 *
 * From a capture to programs: the split, the passes of one table, the programs. With a folder, every step leaves the
 * graph as it was before and after it.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "compile/compare.h"
#include "compile/entry.h"
#include "graph/passes.h"
#include "tensor/process.h"
#include "world/here.h"

/* Whether a pass stands in the list "dead, bucket=1048576"; *bytes is the limit that it gives there, if any. */
static bool is_listed(const char *list, const char *name, size_t *bytes) {
    for (const char *at = list; at != NULL && *at != 0; at += strspn(at, ", ")) {
        size_t length = strcspn(at, ", "), own = strcspn(at, ",= ");
        if (own == strlen(name) && strncmp(at, name, own) == 0) {
            if (at[own] == '=')
                *bytes = (size_t)strtoull(at + own + 1, NULL, 10);
            return true;
        }
        at += length;
    }
    return false;
}

tutti_status tu_check_passes(const char *field, bool limits, const char *list) {
    char who[64], name[64];
    snprintf(who, sizeof who, "compile: tt_compile_options.%s", field);
    for (const char *at = list; at != NULL && *at != 0; at += strspn(at, ", ")) {
        size_t length = strcspn(at, ", "), bytes;
        const tu_pass *pass;
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        tutti_status status = length > 0 ? tu_pass_find(who, name, &pass, &bytes) : TUTTI_OK;
        if (status == TUTTI_OK && !limits && strchr(name, '=') != NULL)
            status =
                tu_error(TUTTI_ERROR_ARGUMENT, "%s: \"%s\" has a limit, and what is left out needs none", who, name);
        if (status != TUTTI_OK)
            return status;
        at += length;
    }
    return TUTTI_OK;
}

/* ---- files ---- */

/* The folder and those above it. What cannot be made is told where a file cannot be written. */
static void make_folder(const char *folder) {
    char path[PATH_MAX];
    if (folder == NULL || strlen(folder) >= sizeof path)
        return;
    strcpy(path, folder);
    for (char *at = strchr(path + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdir(path, 0777);
        *at = '/';
    }
    mkdir(path, 0777);
}

void tu_recipe_look_around(tu_recipe *how, int *twin) {
    const char *compares = secure_getenv("TUTTI_COMPILE_COMPARE");
    how->compares = compares != NULL && strcmp(compares, "0") != 0 && compares[0] != 0;
    how->folder = secure_getenv("TUTTI_COMPILE_DIR");
    if (how->folder != NULL && how->folder[0] == 0)
        how->folder = NULL;
    make_folder(how->folder);
    how->rank = how->folder != NULL ? tu_rank_here().rank : -1;
    if (*twin == 0 && how->folder != NULL) {
        char name[PATH_MAX];
        snprintf(name, sizeof name, "%s.%d", how->name, how->rank);
        *twin = tu_process_number(name);
    }
    how->twin = *twin;
}

/* "step.0.forward", "step-2.0.forward" of the second function of that name, or, where several ranks write into one
 * folder, "step.rank3.0.forward". */
static void name_files(const tu_recipe *how, const char *direction, char *name, size_t size) {
    char rank[24] = "", twin[24] = "";
    if (how->rank >= 0)
        snprintf(rank, sizeof rank, ".rank%d", how->rank);
    if (how->twin > 1)
        snprintf(twin, sizeof twin, "-%d", how->twin);
    snprintf(name, size, "%s%s%s.%d.%s", how->name, twin, rank, how->number, direction);
}

static void write_graph(const tu_recipe *how, const char *direction, int step, const char *what,
                        const tt_graph *graph) {
    char path[PATH_MAX], name[256];
    if (how->folder == NULL)
        return;
    name_files(how, direction, name, sizeof name);
    snprintf(path, sizeof path, "%s/%s.%02d-%s.graph", how->folder, name, step, what);
    FILE *file = tu_look_open(path);
    if (file == NULL)
        return;
    tu_graph_print(file, graph);
    tu_look_close(file, path);
}

/* ---- one graph ---- */

/* A graph that is interpreted as it was captured needs its waits in their places, and nothing else. */
static bool is_wanted(const tu_pass *pass, const tu_recipe *how, size_t *bytes) {
    *bytes = pass->bytes;
    if (pass->run == tu_pass_sink)
        return true;
    if (how->mode == TT_COMPILE_INTERPRET || is_listed(how->skip, pass->name, bytes))
        return false;
    return is_listed(how->with, pass->name, bytes) || !pass->asked;
}

static tutti_status rewrite(tt_graph *graph, const tu_recipe *how, const char *direction) {
    tutti_status status = TUTTI_OK;
    write_graph(how, direction, 0, "captured", graph);
    for (int i = 0; i < tu_pass_count() && status == TUTTI_OK; i++) {
        size_t bytes;
        if (!is_wanted(&tu_passes[i], how, &bytes))
            continue;
        status = tu_passes[i].run(graph, bytes);
        if (status == TUTTI_OK)
            status = tu_graph_check(tu_passes[i].name, graph);
        if (status == TUTTI_OK)
            write_graph(how, direction, i + 1, tu_passes[i].name, graph);
    }
    return status;
}

/* From the graph as it was captured to one that can run: passes, the program, and where it is wanted what compares it
 * with eager code. */
static tutti_status make_ready(tt_graph *graph, const tu_recipe *how, const char *direction, tu_program **program,
                               tu_comparison **comparison) {
    static const tu_program_mode modes[] = { TU_PROGRAM_FUSED, TU_PROGRAM_SPLIT, TU_PROGRAM_INTERPRET };
    char name[256];
    tt_graph *before = NULL;
    name_files(how, direction, name, sizeof name);
    tu_program_options options = { .mode = modes[how->mode], .strict = how->strict, .name = name };
    options.folder = how->folder;
    options.no_compiler = how->no_compiler;
    tutti_status status = how->compares ? tu_graph_clone(graph, &before) : TUTTI_OK;
    if (status == TUTTI_OK && before != NULL)
        status = tu_pass_sink(before, 0);
    if (status == TUTTI_OK)
        status = rewrite(graph, how, direction);
    if (status == TUTTI_OK)
        status = tu_program_make(graph, &options, program);
    if (status == TUTTI_OK && how->compares)
        status = tu_comparison_make(before, graph, &options, comparison);
    tt_graph_release(&before);
    return status;
}

static tutti_status keep_text(const char **text) {
    if (*text == NULL || (*text = strdup(*text)) != NULL)
        return TUTTI_OK;
    return tu_error_memory("a compiled function", 1);
}

/* A backward may be built later, when the function is gone. */
static tutti_status keep_how(tu_entry *entry, const tu_recipe *how) {
    entry->how = *how;
    entry->how.name = entry->name;
    entry->how.skip = entry->how.with = entry->how.folder = NULL;
    const char *texts[] = { how->skip, how->with, how->folder };
    const char **places[] = { &entry->how.skip, &entry->how.with, &entry->how.folder };
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 3 && status == TUTTI_OK; i++) {
        status = keep_text(&texts[i]);
        *places[i] = texts[i];
    }
    return status;
}

/* Passes that were asked for by name and found nothing are told of, once. */
static void warn_of_fusions(const tu_entry *entry, const tu_recipe *how) {
    size_t bytes;
    bool asked = is_listed(how->with, "gather_matmul", &bytes) || is_listed(how->with, "matmul_scatter", &bytes);
    const tt_graph *graphs[] = { entry->forward, entry->backward };
    if (!asked || how->number > 1 || how->mode == TT_COMPILE_INTERPRET)
        return;
    for (size_t i = 0; i < 2; i++)
        for (const tu_vertex *vertex = graphs[i] != NULL ? graphs[i]->first : NULL; vertex != NULL;
             vertex = vertex->next)
            if (strncmp(vertex->entry->name, "fused_", 6) == 0)
                return;
    TU_LOG(TUTTI_LOG_WARN, NULL, "compile",
           "compiled %s: gather_matmul and matmul_scatter found no collective to fuse with a product", how->name);
}

tutti_status tu_build_entry(tu_entry *entry, const tu_recipe *how) {
    tutti_status status = keep_how(entry, how);
    if (status == TUTTI_OK)
        status = tu_partition(entry, how->mode == TT_COMPILE_FUSED);
    if (status == TUTTI_OK)
        status = make_ready(entry->forward, how, "forward", &entry->run_forward, &entry->compare_forward);
    if (status == TUTTI_OK && entry->captured.tangent_count > 1)
        status = tu_graph_clone(entry->backward, &entry->whole_backward);
    if (status == TUTTI_OK && entry->backward != NULL)
        status = make_ready(entry->backward, how, "backward", &entry->run_backward, &entry->compare_backward);
    if (status == TUTTI_OK)
        warn_of_fusions(entry, how);
    return status;
}

tutti_status tu_build_graph(tt_graph *graph, const tu_recipe *how, const char *direction, tu_program **program) {
    tu_comparison *none = NULL;
    tu_recipe alone = *how;
    alone.compares = false;
    return make_ready(graph, &alone, direction, program, &none);
}

tutti_status tu_build_partial(tu_entry *entry, const bool *arrived, tu_partial **made) {
    size_t tangents = (size_t)entry->captured.tangent_count;
    tu_partial *partial = calloc(1, sizeof *partial + tangents * sizeof *arrived);
    if (partial == NULL)
        return tu_error_memory("a backward", sizeof *partial);
    memcpy(partial->arrived, arrived, tangents * sizeof *arrived);
    int number = 1;
    for (const tu_partial *other = entry->partials; other != NULL; other = other->next)
        number++;
    char direction[32];
    snprintf(direction, sizeof direction, "backward-partial%d", number);
    tutti_status status = tu_prune(entry, arrived, &partial->graph);
    if (status == TUTTI_OK)
        status = tu_build_graph(partial->graph, &entry->how, direction, &partial->program);
    if (status != TUTTI_OK) {
        tt_graph_release(&partial->graph);
        free(partial);
        return status;
    }
    *made = partial;
    return TUTTI_OK;
}
