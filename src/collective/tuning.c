/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing an algorithm: a table in data, a file made by `tutti bench --tune`, a setting, or the call itself.
 */
#include "collective/tuning.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cache.h"
#include "collective/domain.h"

#define INLINE TUTTI_ALGORITHM_INLINE
#define ONE_SHOT TUTTI_ALGORITHM_ONE_SHOT
#define TWO_SHOT TUTTI_ALGORITHM_TWO_SHOT
#define PIPELINED TUTTI_ALGORITHM_PIPELINED
#define TREE TUTTI_ALGORITHM_TREE

/* Measured on a 2-core virtual machine (EPYC, 1 MiB L2 per core) and a 16-core one. An algorithm that cannot serve a
 * call (inline: too long; tree: one domain) gives way to one_shot. */
static const tu_tuning_row built_in_rows[] = {
    { TU_OPERATION_BARRIER, 1, 0, INLINE },
    { TU_OPERATION_BARRIER, 16, 0, TREE },
    { TU_OPERATION_ALL_REDUCE, 1, 0, INLINE },
    { TU_OPERATION_ALL_REDUCE, 1, 49, ONE_SHOT },
    { TU_OPERATION_ALL_REDUCE, 1, 8192, TWO_SHOT },
    { TU_OPERATION_ALL_REDUCE, 4, 0, INLINE },
    { TU_OPERATION_ALL_REDUCE, 4, 49, ONE_SHOT },
    { TU_OPERATION_ALL_REDUCE, 4, 4096, TWO_SHOT },
    { TU_OPERATION_ALL_REDUCE, 8, 0, INLINE },
    { TU_OPERATION_ALL_REDUCE, 8, 49, ONE_SHOT },
    { TU_OPERATION_ALL_REDUCE, 8, 2048, TWO_SHOT },
    { TU_OPERATION_REDUCE, 1, 0, INLINE },
    { TU_OPERATION_REDUCE, 1, 49, ONE_SHOT },
    { TU_OPERATION_REDUCE, 1, 8192, TWO_SHOT },
    { TU_OPERATION_REDUCE_SCATTER, 1, 0, INLINE },
    { TU_OPERATION_REDUCE_SCATTER, 1, 49, ONE_SHOT },
    { TU_OPERATION_REDUCE_SCATTER, 1, 16384, TWO_SHOT },
    { TU_OPERATION_REDUCE_SCATTER_V, 1, 0, ONE_SHOT },
    { TU_OPERATION_REDUCE_SCATTER_V, 1, 16384, TWO_SHOT },
    { TU_OPERATION_ALL_GATHER, 1, 0, INLINE },
    { TU_OPERATION_ALL_GATHER, 1, 49, ONE_SHOT },
    { TU_OPERATION_ALL_GATHER, 1, 16384, PIPELINED },
    { TU_OPERATION_ALL_GATHER_V, 1, 0, ONE_SHOT },
    { TU_OPERATION_ALL_GATHER_V, 1, 16384, PIPELINED },
    { TU_OPERATION_BROADCAST, 1, 0, INLINE },
    { TU_OPERATION_BROADCAST, 1, 49, ONE_SHOT },
    { TU_OPERATION_BROADCAST, 1, 16384, PIPELINED },
    { TU_OPERATION_BROADCAST, 16, 0, INLINE },
    { TU_OPERATION_BROADCAST, 16, 49, TREE },
    { TU_OPERATION_BROADCAST, 16, 16384, PIPELINED },
    { TU_OPERATION_GATHER, 1, 0, INLINE },
    { TU_OPERATION_GATHER, 1, 49, ONE_SHOT },
    { TU_OPERATION_GATHER, 1, 16384, PIPELINED },
    { TU_OPERATION_SCATTER, 1, 0, INLINE },
    { TU_OPERATION_SCATTER, 1, 49, ONE_SHOT },
    { TU_OPERATION_SCATTER, 1, 32768, PIPELINED },
    { TU_OPERATION_ALL_TO_ALL, 1, 0, INLINE },
    { TU_OPERATION_ALL_TO_ALL, 1, 49, ONE_SHOT },
    { TU_OPERATION_ALL_TO_ALL, 1, 32768, PIPELINED },
    { TU_OPERATION_ALL_TO_ALL_V, 1, 0, PIPELINED }, /* its sizes differ between the ranks: they cannot decide */
    { TU_OPERATION_PERMUTE, 1, 0, INLINE },
    { TU_OPERATION_PERMUTE, 1, 49, ONE_SHOT },
    { TU_OPERATION_PERMUTE, 1, 16384, PIPELINED },
};

const tu_tuning tu_tuning_built_in = {
    .from = "built-in table",
    .rows = built_in_rows,
    .count = (int)(sizeof built_in_rows / sizeof built_in_rows[0]),
    .chunk_bytes = (uint64_t)256 << 10,
};

/* ---- names ---- */

static const char *const algorithm_names[] = { "auto", "inline", "one_shot", "two_shot", "pipelined", "tree" };

const char *tutti_algorithm_name(tutti_algorithm algorithm) {
    size_t count = sizeof algorithm_names / sizeof algorithm_names[0];
    return (size_t)algorithm < count ? algorithm_names[algorithm] : "?";
}

tutti_status tutti_algorithm_parse(const char *name, tutti_algorithm *algorithm) {
    if (name == NULL || algorithm == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_algorithm_parse needs a name and a place for the result");
    for (size_t i = 0; i < sizeof algorithm_names / sizeof algorithm_names[0]; i++) {
        if (strcasecmp(name, algorithm_names[i]) == 0) {
            *algorithm = (tutti_algorithm)i;
            return TUTTI_OK;
        }
    }
    return tu_error(TUTTI_ERROR_NOT_FOUND,
                    "no algorithm is called \"%s\"; there are auto, inline, one_shot, two_shot, pipelined and tree",
                    name);
}

/* Whether an operation has that algorithm at all. */
static bool algorithm_serves(tutti_algorithm algorithm, const tu_operation_row *row) {
    return (row->algorithms >> algorithm & 1) != 0;
}

/* ---- files ---- */

void tu_tuning_free(tu_tuning *tuning) {
    if (tuning == NULL)
        return;
    free((void *)(uintptr_t)tuning->rows);
    free((void *)(uintptr_t)tuning->from);
    free(tuning);
}

/* One line that is neither empty nor a comment. */
static tutti_status read_line(char *line, tu_tuning *tuning, tu_tuning_row *row, bool *is_row) {
    char *save = NULL;
    const char *word[4] = { NULL };
    int words = 0;
    for (char *token = strtok_r(line, " \t\r\n", &save); token != NULL && words < 4;
         token = strtok_r(NULL, " \t\r\n", &save))
        word[words++] = token;
    *is_row = false;
    int64_t number;
    const struct {
        const char *name;
        uint64_t *value;
    } limits[] = { { "stream", &tuning->stream_bytes },
                   { "stage", &tuning->stage_bytes },
                   { "chunk", &tuning->chunk_bytes } };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0] && words == 2; i++) {
        if (strcmp(word[0], limits[i].name) != 0)
            continue;
        tutti_status status = tu_parse_bytes(word[1], &number);
        if (status == TUTTI_OK)
            *limits[i].value = (uint64_t)number;
        return status;
    }
    if (words != 4)
        return tu_error(TUTTI_ERROR_ARGUMENT, "expected: operation ranks bytes algorithm");
    row->operation = tu_operation_find(word[0]);
    if (row->operation == TU_OPERATION_NONE)
        return tu_error(TUTTI_ERROR_NOT_FOUND, "no operation is called \"%s\"", word[0]);
    tutti_status status = tu_parse_integer(word[1], &number);
    if (status == TUTTI_OK && (number < 1 || number > INT32_MAX))
        status = tu_error(TUTTI_ERROR_RANGE, "%s ranks", word[1]);
    row->ranks = (int)number;
    if (status == TUTTI_OK)
        status = tu_parse_bytes(word[2], &number);
    row->bytes = (uint64_t)number;
    if (status == TUTTI_OK)
        status = tutti_algorithm_parse(word[3], &row->algorithm);
    if (status == TUTTI_OK && !algorithm_serves(row->algorithm, &tu_operations[row->operation]))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "%s has no algorithm %s", word[0], word[3]);
    *is_row = true;
    return status;
}

static tutti_status read_rows(FILE *file, const char *path, tu_tuning *tuning) {
    char line[256];
    tu_tuning_row *rows = NULL;
    tutti_status status = TUTTI_OK;
    for (int number = 1; status == TUTTI_OK && fgets(line, sizeof line, file) != NULL; number++) {
        line[strcspn(line, "#")] = 0;
        if (line[strspn(line, " \t\r\n")] == 0)
            continue;
        tu_tuning_row row = { .operation = TU_OPERATION_NONE };
        bool is_row;
        status = read_line(line, tuning, &row, &is_row);
        if (status != TUTTI_OK) {
            status = tu_error(status, "tuning file %s, line %d: %s", path, number, tutti_error_message());
        } else if (is_row) {
            tu_tuning_row *more = realloc(rows, (size_t)(tuning->count + 1) * sizeof *rows);
            if (more == NULL)
                status = tu_error_memory("a tuning table", (size_t)(tuning->count + 1) * sizeof *rows);
            else
                (rows = more)[tuning->count++] = row;
        }
    }
    tuning->rows = rows;
    return status;
}

tutti_status tu_tuning_read(const char *path, tu_tuning **tuning) {
    /* Without waiting: opening a FIFO would last until somebody writes to it. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return tu_error_system(errno, "cannot open the tuning file %s (TUTTI_TUNING)", path);
    struct stat found;
    if (fstat(descriptor, &found) != 0 || !S_ISREG(found.st_mode)) {
        close(descriptor);
        return tu_error(TUTTI_ERROR_ARGUMENT, "the tuning file %s (TUTTI_TUNING) is no file", path);
    }
    FILE *file = fdopen(descriptor, "r");
    if (file == NULL) {
        close(descriptor);
        return tu_error_system(errno, "cannot read the tuning file %s (TUTTI_TUNING)", path);
    }
    tu_tuning *made = calloc(1, sizeof *made);
    if (made == NULL) {
        fclose(file);
        return tu_error_memory("a tuning table", sizeof *made);
    }
    made->from = strdup(path);
    tutti_status status =
        made->from == NULL ? tu_error_memory("a file name", strlen(path)) : read_rows(file, path, made);
    fclose(file);
    if (status != TUTTI_OK) {
        tu_tuning_free(made);
        return status;
    }
    *tuning = made;
    return TUTTI_OK;
}

/* ---- rules of a group ---- */

/* Takes the rows of one operation that count for this many ranks, ascending in bytes. False when there are none. */
static bool take_rules(const tu_tuning *tuning, tu_operation operation, int ranks, tu_rule rules[TU_RULES]) {
    int best = 0, count = 0;
    for (int i = 0; i < tuning->count; i++)
        if (tuning->rows[i].operation == operation && tuning->rows[i].ranks <= ranks && tuning->rows[i].ranks > best)
            best = tuning->rows[i].ranks;
    if (best == 0)
        return false;
    memset(rules, 0, TU_RULES * sizeof *rules);
    for (int i = 0; i < tuning->count && count < TU_RULES; i++) {
        if (tuning->rows[i].operation != operation || tuning->rows[i].ranks != best)
            continue;
        int at = count++;
        for (; at > 0 && rules[at - 1].bytes > tuning->rows[i].bytes; at--)
            rules[at] = rules[at - 1];
        rules[at] = (tu_rule){ tuning->rows[i].bytes, tuning->rows[i].algorithm };
    }
    rules[0].bytes = 0;
    return true;
}

/* "all_reduce=two_shot,broadcast=tree" */
static tutti_status parse_forced(const char *text, tutti_algorithm forced[TU_OPERATION_COUNT]) {
    while (*text != 0) {
        char name[64], algorithm[32];
        int used = 0;
        tutti_algorithm parsed;
        if (sscanf(text, "%63[a-z_]=%31[a-z_]%n", name, algorithm, &used) != 2 ||
            (text[used] != 0 && text[used] != ','))
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "TUTTI_ALGORITHM is not understood at \"%s\"; write all_reduce=two_shot,barrier=tree",
                            text);
        tu_operation operation = tu_operation_find(name);
        if (operation == TU_OPERATION_NONE)
            return tu_error(TUTTI_ERROR_NOT_FOUND, "TUTTI_ALGORITHM: no operation is called \"%s\"", name);
        tutti_status status = tutti_algorithm_parse(algorithm, &parsed);
        if (status != TUTTI_OK)
            return status;
        if (parsed != TUTTI_ALGORITHM_AUTO && !algorithm_serves(parsed, &tu_operations[operation]))
            return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_ALGORITHM: %s has no algorithm %s", name, algorithm);
        forced[operation] = parsed;
        text += used + (text[used] == ',');
    }
    return TUTTI_OK;
}

/* When the inputs and outputs of all ranks no longer fit into the last cache together, writing past it saves a read;
 * before, it costs one. */
static uint64_t cache_share(const tutti_world *world) {
    return (uint64_t)tu_cache_last_bytes() / (uint64_t)(world->local_size > 0 ? world->local_size : 1) / 2 + 1;
}

/* Twice the cache of a core, so that what is staged has left it when its place is used again; but no more than its
 * share of the last cache, where it stays, and two chunks at least. */
static size_t ring_bytes(const tutti_world *world, size_t chunk) {
    size_t ring = 2 * tu_cache_bytes(2), most = (size_t)cache_share(world) / 4096 * 4096;
    ring = ring < most ? ring : most;
    return ring < 2 * chunk ? 2 * chunk : ring / 8192 * 8192;
}

tutti_status tu_tuning_apply(tu_collective *state) {
    tutti_world *world = state->group->world;
    const char *path = tu_settings_text(&world->settings, TU_SETTING_TUNING);
    const tu_tuning *built_in = &tu_tuning_built_in;
    tu_tuning *file = NULL;
    tutti_status status = path[0] != 0 ? tu_tuning_read(path, &file) : TUTTI_OK;
    if (status == TUTTI_OK)
        status = parse_forced(tu_settings_text(&world->settings, TU_SETTING_ALGORITHM), state->forced);
    if (status != TUTTI_OK) {
        tu_tuning_free(file);
        return status;
    }
    for (int operation = 1; operation < TU_OPERATION_COUNT; operation++) {
        if (file != NULL && take_rules(file, (tu_operation)operation, state->size, state->rules[operation]))
            continue;
        (void)take_rules(built_in, (tu_operation)operation, state->size, state->rules[operation]);
    }
    state->rules_from = file != NULL ? path : built_in->from;
    state->large = file != NULL && file->stream_bytes != 0 ? file->stream_bytes : cache_share(world);
    state->stage_stream = file != NULL ? file->stage_bytes : 0;
    uint64_t chunk = file != NULL && file->chunk_bytes != 0 ? file->chunk_bytes : built_in->chunk_bytes;
    uint64_t least = (uint64_t)state->size * 4096; /* so that a part is a page at least */
    state->chunk_bytes = (chunk < least ? least : chunk) / 4096 * 4096;
    state->ring_bytes = ring_bytes(world, state->chunk_bytes);
    state->crowded_chunk_bytes = file != NULL && file->chunk_bytes != 0 ? state->chunk_bytes : state->ring_bytes / 2;
    tu_tuning_free(file);
    return TUTTI_OK;
}

/* ---- choosing ---- */

/* The bytes of a call that decide: of one rank's input, or for operations that send a part to each rank of all
 * parts. */
static uint64_t task_bytes(const tu_task *task, int size) {
    if (task->row->in == TU_EXTENT_SPLITS)
        return 0;
    uint64_t bytes = task->info.count * task->element;
    return task->row->in == TU_EXTENT_EACH ? bytes * (uint64_t)size : bytes;
}

/* Whether this call's bytes fit into the line of a flag. */
static bool fits_into_line(const tu_collective *state, const tu_task *task, uint64_t bytes) {
    size_t capacity = tu_line_room(task);
    if (task->row->in == TU_EXTENT_EACH) /* parts are cut to whole elements */
        return task->info.count * task->element <= capacity / (size_t)state->size / task->element * task->element;
    return bytes <= capacity;
}

tutti_algorithm tu_forced_algorithm(const tu_task *task) {
    return task->forced != TUTTI_ALGORITHM_AUTO ? task->forced : task->state->forced[task->row->form];
}

tutti_status tu_choose_check(const tu_collective *state, const tu_task *task) {
    tutti_algorithm forced = tu_forced_algorithm(task);
    if (__builtin_expect(forced == TUTTI_ALGORITHM_AUTO, 1) || forced == task->row->fixed)
        return TUTTI_OK;
    const char *operation = task->row->name;
    if (!algorithm_serves(forced, task->row))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s has no algorithm %s", operation, tutti_algorithm_name(forced));
    uint64_t bytes = task_bytes(task, state->size);
    if (forced == TUTTI_ALGORITHM_INLINE && !fits_into_line(state, task, bytes))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s of %llu bytes does not fit into a cache line: algorithm inline carries at most %d bytes",
                        operation, (unsigned long long)bytes, TU_INLINE_BYTES);
    return TUTTI_OK;
}

/* Whether the rule of the table serves this call: its bytes fit into the line, or its ranks span several domains. */
static bool rule_serves(const tu_collective *state, const tu_task *task, tutti_algorithm algorithm, uint64_t bytes) {
    if (algorithm == TUTTI_ALGORITHM_TREE)
        return state->domains->count > 1;
    return algorithm != TUTTI_ALGORITHM_INLINE || fits_into_line(state, task, bytes);
}

void tu_choose(const tu_collective *state, const tu_task *task, tu_choice *choice) {
    uint64_t bytes = task_bytes(task, state->size);
    tutti_algorithm forced = tu_forced_algorithm(task);
    *choice = (tu_choice){ .bytes = bytes, .algorithm = forced };
    if (__builtin_expect(forced != TUTTI_ALGORITHM_AUTO, 0)) {
        choice->from = forced == task->row->fixed             ? "its name"
                       : task->forced != TUTTI_ALGORITHM_AUTO ? "the call"
                                                              : "TUTTI_ALGORITHM";
        return;
    }
    const tu_rule *rules = state->rules[task->row->form], *rule = rules;
    for (int i = 1; i < TU_RULES && rules[i].algorithm != TUTTI_ALGORITHM_AUTO && rules[i].bytes <= bytes; i++)
        rule = &rules[i];
    choice->from = state->rules_from;
    choice->limit = rule->bytes;
    choice->algorithm = rule->algorithm;
    if (!rule_serves(state, task, rule->algorithm, bytes)) {
        choice->algorithm = ONE_SHOT;
        choice->replaced = true;
    }
}
