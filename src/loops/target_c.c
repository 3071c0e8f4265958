/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU, by C: texts, several files of them for several processors, and the functions in what was built.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "loops/build.h"
#include "loops/emit.h"
#include "loops/target.h"
#include "tensor/process.h"

#define FILES 8
#define LINES_OF_FILE 32 /* fewer are not worth another compiler */

/* What is loaded, as dlopen's handles. */
typedef struct loaded {
    int file_count;
    void *handles[FILES];
} loaded;

/* Which nests are in which file: those with most lines first, each to the file that has least. */
typedef struct files {
    int count;
    int of[FILES], lines[FILES];
    tu_nest **nests[FILES];
    char *texts[FILES];
} files;

static int lines_of(const tu_nest *nest) {
    int lines = 0;
    for (int i = 0; i < nest->stage_count; i++)
        lines += nest->stages[i].end - nest->stages[i].first;
    return lines;
}

static tutti_status share_out(files *all, tu_nest *const *nests, int nest_count) {
    int lines = 0, threads = tu_process_compute_threads();
    for (int i = 0; i < nest_count; i++)
        lines += lines_of(nests[i]);
    all->count = 1 + lines / LINES_OF_FILE;
    if (all->count > threads)
        all->count = threads;
    if (all->count > FILES)
        all->count = FILES;
    for (int i = 0; i < all->count; i++)
        if ((all->nests[i] = calloc((size_t)nest_count, sizeof(tu_nest *))) == NULL)
            return tu_error_memory("the code of loops", (size_t)nest_count * sizeof(tu_nest *));
    for (int i = 0; i < nest_count; i++) {
        int least = 0;
        for (int k = 1; k < all->count; k++)
            least = all->lines[k] < all->lines[least] ? k : least;
        all->lines[least] += lines_of(nests[i]);
        if (nests[i]->stage_count > 0)
            all->nests[least][all->of[least]++] = nests[i];
    }
    while (all->count > 0 && all->of[all->count - 1] == 0)
        all->count--;
    return TUTTI_OK;
}

static tutti_status write_texts(files *all, const char *lanes, FILE *copy) {
    for (int i = 0; i < all->count; i++) {
        size_t bytes = 0;
        FILE *to = open_memstream(&all->texts[i], &bytes);
        if (to == NULL)
            return tu_error_memory("the text of loops", 1);
        tu_emit_c(to, all->nests[i], all->of[i], lanes);
        if (fclose(to) != 0 || all->texts[i] == NULL)
            return tu_error_memory("the text of loops", bytes);
        if (copy != NULL)
            fputs(all->texts[i], copy);
    }
    return TUTTI_OK;
}

static bool find_functions(const files *all, const loaded *code, char *reason, size_t reason_size) {
    char name[64];
    for (int i = 0; i < all->count; i++) {
        const char *format = dlsym(code->handles[i], TU_EMIT_MARK);
        bool good = format != NULL && strcmp(format, TU_EMIT_FORMAT) == 0;
        for (int k = 0; good && k < all->of[i]; k++)
            for (int stage = 0; good && stage < all->nests[i][k]->stage_count; stage++) {
                tu_emit_name(name, sizeof name, all->nests[i][k], stage);
                void *function = dlsym(code->handles[i], name);
                memcpy(&all->nests[i][k]->stages[stage].function, &function, sizeof function);
                good = function != NULL;
            }
        if (good)
            continue;
        snprintf(reason, reason_size, "what was built does not have the loops");
        return false;
    }
    return true;
}

static void warn(const char *reason) {
    if (tu_process_tell_once(TU_WARN_NO_COMPILER))
        TU_LOG(TUTTI_LOG_WARN, NULL, "loops",
               "loops are not compiled, but run in blocks by the library's kernels, which is slower: %s", reason);
}

static void forget_functions(tu_nest *const *nests, int nest_count) {
    for (int i = 0; i < nest_count; i++)
        for (int k = 0; k < nests[i]->stage_count; k++)
            nests[i]->stages[k].function = NULL;
}

/* Built and loaded, or from the cache; else a warning says why not. */
static void load(const files *all, tu_builder *builder, tu_nest *const *nests, int nest_count, loaded *code,
                 char *reason, size_t reason_size) {
    if (builder != NULL &&
        tu_builder_build(builder, (const char *const *)all->texts, all->count, code->handles, reason, reason_size))
        code->file_count = all->count;
    if (code->file_count == 0 || !find_functions(all, code, reason, reason_size)) {
        forget_functions(nests, nest_count);
        warn(reason);
    }
}

static tutti_status make(tu_nest *const *nests, int nest_count, FILE *copy, void **made) {
    files all = { .count = 0 };
    char reason[600] = "";
    tu_builder *builder = NULL;
    tutti_status status = TUTTI_OK;
    loaded *code = *made = calloc(1, sizeof *code);
    if (code == NULL)
        return tu_error_memory("the code of loops", sizeof *code);
    for (int i = 0; i < nest_count && status == TUTTI_OK; i++)
        status = tu_nest_find_stages(nests[i]);
    if (status == TUTTI_OK)
        status = share_out(&all, nests, nest_count);
    if (status == TUTTI_OK && all.count > 0) {
        bool open = tu_builder_open(tu_instructions_get(), &builder, reason, sizeof reason);
        status = write_texts(&all, open ? tu_builder_lanes(builder) : "lanes.h", copy);
        if (status == TUTTI_OK)
            load(&all, open ? builder : NULL, nests, nest_count, code, reason, sizeof reason);
    }
    tu_builder_close(builder);
    for (int i = 0; i < FILES; i++) {
        free(all.nests[i]);
        free(all.texts[i]);
    }
    return status;
}

static void end(void *made) {
    loaded *code = made;
    for (int i = 0; code != NULL && i < code->file_count; i++)
        dlclose(code->handles[i]);
    free(code);
}

static bool has_code(const tu_nest *nest) {
    for (int i = 0; i < nest->stage_count; i++)
        if (nest->stages[i].function != NULL)
            return true;
    return false;
}

const tu_target tu_target_c = {
    .ending = "c", .runs_without_code = true, .make = make, .end = end, .has_code = has_code, .run = tu_nest_run
};
