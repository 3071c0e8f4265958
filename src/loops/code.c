/* SPDX-License-Identifier: Apache-2.0
 *
 * From nests to functions: texts, several files of them for several processors, and the functions in what was built.
 */
#include "loops/code.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "loops/build.h"
#include "loops/emit.h"
#include "tensor/process.h"

#define LINES_OF_FILE 32 /* fewer are not worth another compiler */

/* Which nests are in which file: those with most lines first, each to the file that has least. */
typedef struct files {
    int count;
    int of[TU_CODE_FILES], lines[TU_CODE_FILES];
    tu_nest **nests[TU_CODE_FILES];
    char *texts[TU_CODE_FILES];
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
    if (all->count > TU_CODE_FILES)
        all->count = TU_CODE_FILES;
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

static bool find_functions(const files *all, const tu_loop_code *code, char *reason, size_t reason_size) {
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

tutti_status tu_code_make(tu_loop_code *code, tu_nest *const *nests, int nest_count, FILE *copy) {
    files all = { .count = 0 };
    char reason[600] = "";
    tu_builder *builder = NULL;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < nest_count && status == TUTTI_OK; i++)
        status = tu_nest_find_stages(nests[i]);
    if (status == TUTTI_OK)
        status = share_out(&all, nests, nest_count);
    bool good = status == TUTTI_OK && all.count > 0;
    if (good) {
        bool open = tu_builder_open(tu_instructions_get(), &builder, reason, sizeof reason);
        status = write_texts(&all, open ? tu_builder_lanes(builder) : "lanes.h", copy);
        good = open && status == TUTTI_OK;
        if (good &&
            tu_builder_build(builder, (const char *const *)all.texts, all.count, code->handles, reason, sizeof reason))
            code->file_count = all.count;
        if (status == TUTTI_OK && (code->file_count == 0 || !find_functions(&all, code, reason, sizeof reason))) {
            forget_functions(nests, nest_count);
            warn(reason);
        }
    }
    tu_builder_close(builder);
    for (int i = 0; i < TU_CODE_FILES; i++) {
        free(all.nests[i]);
        free(all.texts[i]);
    }
    return status;
}

void tu_code_end(tu_loop_code *code) {
    for (int i = 0; i < code->file_count; i++)
        dlclose(code->handles[i]);
    code->file_count = 0;
}
