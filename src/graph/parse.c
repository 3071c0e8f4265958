/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading the text of a graph back. The text may come from anywhere: whatever it says, the answer is a graph that
 * passes the check, or an error that names the line.
 */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/device.h>
#include <tutti/dtype.h>
#include <tutti/group.h>

#include "graph/graph.h"

#define WORD 160       /* characters of a word, at most */
#define OPERANDS 65536 /* of one vertex */
#define LINE 40        /* characters of "graph_parse: line 17" */

typedef struct reader {
    const char *at;
    int line;
    tutti_status status;
    tt_graph *graph;
    tutti_world *world;
    tt_tensor **fakes; /* by the number of their value: what shapes are checked with */
    int fake_count;
} reader;

static void wrong(reader *from, const char *format, ...) TUTTI_PRINTF(2, 3);
static void wrong(reader *from, const char *format, ...) {
    char text[400];
    if (from->status != TUTTI_OK)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    from->status = tu_error(TUTTI_ERROR_ARGUMENT, "graph_parse: line %d: %s", from->line, text);
}

static const char *name_line(const reader *from, char *who) {
    snprintf(who, LINE, "graph_parse: line %d", from->line);
    return who;
}

static void no_memory(reader *from, size_t bytes) {
    if (from->status == TUTTI_OK)
        from->status = tu_error_memory("a graph", bytes);
}

/* ---- words ---- */

/* Blanks, and comments to the end of their line. */
static void skip(reader *from) {
    for (;; from->at++) {
        if (*from->at == '#')
            while (from->at[1] != 0 && from->at[1] != '\n')
                from->at++;
        else if (*from->at == '\n')
            from->line++;
        else if (*from->at != ' ' && *from->at != '\t' && *from->at != '\r')
            return;
    }
}

static bool accept(reader *from, const char *text) {
    skip(from);
    size_t length = strlen(text);
    if (from->status != TUTTI_OK || strncmp(from->at, text, length) != 0)
        return false;
    from->at += length;
    return true;
}

static void expect(reader *from, const char *text) {
    if (!accept(from, text))
        wrong(from, "'%s' expected at \"%.20s\"", text, from->at);
}

static bool is_of_word(char one) {
    return isalnum((unsigned char)one) || one == '_' || one == '.' || one == ':' || one == '+' || one == '-';
}

/* A name, a number, a dtype, a group's name: what stands up to a blank or a bracket. */
static const char *word(reader *from, char buffer[WORD], bool colons) {
    size_t length = 0;
    skip(from);
    while (is_of_word(from->at[length]) && (colons || from->at[length] != ':') && length < WORD - 1) {
        buffer[length] = from->at[length];
        length++;
    }
    buffer[length] = 0;
    from->at += length;
    if (length == 0)
        wrong(from, "a word expected at \"%.20s\"", from->at);
    return buffer;
}

static bool next_is(reader *from, const char *text) {
    char buffer[WORD];
    reader ahead = *from;
    skip(&ahead);
    return is_of_word(*ahead.at) && strcmp(word(&ahead, buffer, false), text) == 0;
}

static bool take_word(reader *from, const char *text) {
    char buffer[WORD];
    if (from->status != TUTTI_OK || !next_is(from, text))
        return false;
    word(from, buffer, false);
    return true;
}

static int64_t whole(reader *from) {
    char buffer[WORD], *end;
    word(from, buffer, false);
    errno = 0;
    long long value = strtoll(buffer, &end, 10);
    if (from->status == TUTTI_OK && (*end != 0 || errno != 0))
        wrong(from, "\"%s\" is no whole number", buffer);
    return value;
}

/* [1, 2, 3]: memory of the caller's in the end. */
static int64_t *list(reader *from, size_t *count) {
    int64_t *at = NULL;
    *count = 0;
    expect(from, "[");
    while (from->status == TUTTI_OK && !accept(from, "]")) {
        if (*count > 0)
            expect(from, ",");
        if ((*count & (*count - 1)) == 0) { /* room for twice as many */
            int64_t *larger = realloc(at, (*count * 2 + 1) * sizeof *at);
            if (larger == NULL) {
                no_memory(from, *count * sizeof *at);
                break;
            }
            at = larger;
        }
        at[(*count)++] = whole(from);
    }
    return at;
}

static tt_dims dims(reader *from) {
    size_t count;
    int64_t *at = list(from, &count);
    tt_dims made = tt_no_dims();
    if (count > TT_MAX_DIMS)
        wrong(from, "%zu dimensions; at most %d are possible", count, TT_MAX_DIMS);
    else if (from->status == TUTTI_OK)
        made = tt_dims_of((int)count, at);
    free(at);
    return made;
}

/* ---- shapes and values ---- */

static tu_shape shape(reader *from) {
    char buffer[WORD];
    tu_shape made = { .device = TUTTI_CPU };
    if (tutti_dtype_parse(word(from, buffer, false), &made.dtype) != TUTTI_OK)
        wrong(from, "\"%s\" is no dtype", buffer);
    tt_dims sizes = dims(from);
    made.ndim = sizes.count;
    memcpy(made.sizes, sizes.at, sizeof made.sizes);
    for (int i = 0; i < made.ndim; i++)
        if (made.sizes[i] < 0)
            wrong(from, "%" PRId64 " is no size", made.sizes[i]);
    if (from->status == TUTTI_OK) {
        char who[LINE];
        from->status = tu_shape_contiguous(name_line(from, who), &made);
    }
    if (take_word(from, "strides")) {
        tt_dims strides = dims(from);
        if (from->status == TUTTI_OK && strides.count != made.ndim)
            wrong(from, "%d strides for %d sizes", strides.count, made.ndim);
        memcpy(made.strides, strides.at, sizeof made.strides);
    }
    if (take_word(from, "offset"))
        made.offset = whole(from);
    if (take_word(from, "on") && tutti_device_parse(word(from, buffer, true), &made.device) != TUTTI_OK)
        wrong(from, "\"%s\" is no device", buffer);
    return made;
}

static tu_value *find(reader *from, const char *name) {
    for (tu_value *value = from->graph->values; value != NULL; value = value->next)
        if (strcmp(value->name, name) == 0)
            return value;
    wrong(from, "nothing is called %s", name);
    return NULL;
}

static tu_value *new_value(reader *from, const char *name, const tu_shape *of, int storage) {
    tu_value *value = from->status == TUTTI_OK ? tu_graph_value(from->graph, name, of, storage) : NULL;
    if (value == NULL)
        no_memory(from, sizeof *value);
    else if (strcmp(value->name, name) != 0)
        wrong(from, "two values are called %s", name);
    return value;
}

/* ---- the head ---- */

static void input(reader *from) {
    char name[WORD], other[WORD];
    word(from, name, false);
    expect(from, ":");
    tu_shape of = shape(from);
    uint8_t flags = 0;
    int storage = -1;
    while (from->status == TUTTI_OK) {
        if (take_word(from, "parameter"))
            flags |= TU_IS_PARAMETER;
        else if (take_word(from, "grad"))
            flags |= TU_REQUIRES_GRAD;
        else if (take_word(from, "shares")) {
            const tu_value *with = find(from, word(from, other, false));
            storage = with != NULL ? with->storage : -1;
        } else if (!take_word(from, "constant") && !take_word(from, "slot") && !take_word(from, "gradient") &&
                   !take_word(from, "saved") && !take_word(from, "tangent"))
            break;
    }
    tu_value *value = new_value(from, name, &of, storage);
    if (value == NULL || from->status != TUTTI_OK)
        return;
    value->flags = flags;
    if (tu_graph_input_add(from->graph, TU_INPUT_ARGUMENT, value) == NULL)
        from->status = TUTTI_ERROR_MEMORY;
}

static void head(reader *from) {
    expect(from, "graph");
    expect(from, "(");
    for (int i = 0; from->status == TUTTI_OK && !accept(from, ")"); i++) {
        if (i > 0)
            expect(from, ",");
        input(from);
    }
    expect(from, ":");
}

/* ---- arguments ---- */

typedef struct operands {
    tu_operand *at;
    int count, capacity;
} operands;

static void operand(reader *from, operands *to) {
    char buffer[WORD], *end;
    tu_operand made = { .value = NULL };
    word(from, buffer, false);
    if (from->status != TUTTI_OK)
        return;
    errno = 0;
    long long integer = strtoll(buffer, &end, 10);
    if (*end == 0 && errno == 0) {
        made.number = TUTTI_I64;
        made.at.whole = integer;
    } else if (strcmp(buffer, "none") != 0) {
        double real = strtod(buffer, &end);
        if (*end == 0 && (!isalpha((unsigned char)buffer[0]) || !isfinite(real))) { /* no value is called inf or nan */
            made.number = TUTTI_F64;
            made.at.real = real;
        } else {
            made.value = find(from, buffer);
        }
    }
    if (to->count == to->capacity) {
        int capacity = to->capacity == 0 ? 8 : to->capacity * 2;
        tu_operand *larger = to->count < OPERANDS ? realloc(to->at, (size_t)capacity * sizeof *larger) : NULL;
        if (larger == NULL) {
            no_memory(from, sizeof *larger);
            return;
        }
        to->at = larger;
        to->capacity = capacity;
    }
    to->at[to->count++] = made;
}

static void group(reader *from, void *at) {
    char buffer[WORD];
    word(from, buffer, true);
    if (from->status != TUTTI_OK)
        return;
    tutti_group *found = from->world != NULL ? tutti_group_by_name(from->world, buffer) : NULL;
    if (found == NULL)
        wrong(from, "there is no group \"%s\"%s", buffer, from->world == NULL ? ", since no world is given" : "");
    *(tutti_group **)at = found;
}

static void attribute(reader *from, const tu_argument *argument, void *at) {
    char buffer[WORD], *end;
    expect(from, argument->name);
    expect(from, "=");
    if (from->status != TUTTI_OK)
        return;
    switch (argument->type) {
    case TT_ARGUMENT_INT:
        *(int *)at = (int)whole(from);
        break;
    case TT_ARGUMENT_INT64:
        *(int64_t *)at = whole(from);
        break;
    case TT_ARGUMENT_DOUBLE:
        *(double *)at = strtod(word(from, buffer, false), &end);
        if (*end != 0)
            wrong(from, "\"%s\" is no number", buffer);
        break;
    case TT_ARGUMENT_BOOL:
        *(bool *)at = strcmp(word(from, buffer, false), "true") == 0;
        if (!*(bool *)at && strcmp(buffer, "false") != 0)
            wrong(from, "\"%s\" is neither true nor false", buffer);
        break;
    case TT_ARGUMENT_DIMS:
        *(tt_dims *)at = take_word(from, "none") ? tt_no_dims() : dims(from);
        break;
    case TT_ARGUMENT_INTS:
        ((tu_ints *)at)->at = list(from, &((tu_ints *)at)->count);
        break;
    case TT_ARGUMENT_DTYPE:
        if (tutti_dtype_parse(word(from, buffer, false), at) != TUTTI_OK)
            wrong(from, "\"%s\" is no dtype", buffer);
        break;
    case TT_ARGUMENT_DEVICE:
        if (tutti_device_parse(word(from, buffer, true), at) != TUTTI_OK)
            wrong(from, "\"%s\" is no device", buffer);
        break;
    case TT_ARGUMENT_REDUCTION:
        if (tutti_reduction_parse(word(from, buffer, false), at) != TUTTI_OK)
            wrong(from, "\"%s\" is no reduction", buffer);
        break;
    case TT_ARGUMENT_GROUP:
        group(from, at);
        break;
    case TT_ARGUMENT_TENSOR:
    case TT_ARGUMENT_TENSORS:
        break;
    }
}

static void arguments(reader *from, const tu_operator *entry, void *attributes, operands *to) {
    expect(from, "(");
    for (int i = 0; i < entry->argument_count && from->status == TUTTI_OK; i++) {
        const tu_argument *argument = &entry->arguments[i];
        if (i > 0)
            expect(from, ",");
        if (argument->type == TT_ARGUMENT_TENSOR) {
            operand(from, to);
        } else if (argument->type == TT_ARGUMENT_TENSORS) {
            expect(from, "[");
            for (int k = 0; from->status == TUTTI_OK && !accept(from, "]"); k++) {
                if (k > 0)
                    expect(from, ",");
                operand(from, to);
            }
        } else {
            attribute(from, argument, (char *)attributes + argument->offset);
        }
    }
    expect(from, ")");
}

/* ---- vertices ---- */

static const tu_operator *operator_of(reader *from, const char *name, bool *in_place) {
    size_t length = strlen(name);
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < tu_table_count(); i++) {
            const tu_operator *entry = tu_table_at(i);
            *in_place = pass == 1;
            if (strlen(entry->name) == length - (size_t)pass &&
                strncmp(entry->name, name, length - (size_t)pass) == 0 &&
                (pass == 0 || (name[length - 1] == '_' && entry->flags & TU_HAS_IN_PLACE)) &&
                !(entry->flags & TU_COMPOSITE))
                return entry;
        }
    wrong(from, "there is no operator %s", name);
    return NULL;
}

/* The results stand before the operator: their names and shapes are kept until it is known. */
typedef struct result {
    char name[WORD];
    tu_shape shape;
} result;

static int results(reader *from, result **to) {
    int count = 0;
    *to = NULL;
    do {
        result *larger = count < OPERANDS ? realloc(*to, ((size_t)count + 1) * sizeof *larger) : NULL;
        if (larger == NULL) {
            no_memory(from, sizeof *larger);
            break;
        }
        *to = larger;
        word(from, larger[count].name, false);
        expect(from, ":");
        larger[count++].shape = shape(from);
    } while (from->status == TUTTI_OK && accept(from, ";"));
    expect(from, "=");
    return count;
}

/* Asks the operator whether its results are what the text says. */
static void check_read(reader *from, const tu_vertex *vertex) {
    int count = from->graph->value_count;
    if (count > from->fake_count) {
        int room = count * 2;
        tt_tensor **larger = realloc(from->fakes, (size_t)room * sizeof(tt_tensor *));
        if (larger == NULL) {
            no_memory(from, (size_t)room * sizeof(tt_tensor *));
            return;
        }
        memset(larger + from->fake_count, 0, (size_t)(room - from->fake_count) * sizeof(tt_tensor *));
        from->fakes = larger;
        from->fake_count = room;
    }
    char who[LINE];
    from->status = tu_vertex_check_shapes(name_line(from, who), vertex, from->fakes);
    if (from->status == TUTTI_OK || from->status == TUTTI_ERROR_MEMORY)
        return;
    if (strncmp(tutti_error_message(), who, strlen(who)) != 0) /* in the words of the operator */
        tu_error(from->status, "%s: %s", who, tutti_error_message());
}

static void add_vertex(reader *from, const tu_operator *entry, bool in_place, const void *attributes,
                       const operands *given, int result_count, const result *made) {
    int expected = tu_result_count(entry, in_place, given->count, attributes);
    if (result_count != expected)
        wrong(from, "%s has another number of results than %d", entry->name, result_count);
    if (from->status == TUTTI_OK && given->count > TU_INPUTS && entry->arguments[0].type != TT_ARGUMENT_TENSORS)
        wrong(from, "%s has too many operands", entry->name);
    if (from->status != TUTTI_OK)
        return;
    tu_vertex *vertex = tu_graph_vertex(from->graph, entry, given->count, 0, attributes, NULL);
    tu_value **values = calloc((size_t)result_count + 1, sizeof(tu_value *));
    if (vertex == NULL || values == NULL) {
        free(values);
        no_memory(from, sizeof *vertex);
        return;
    }
    free(vertex->results);
    vertex->results = values;
    vertex->in_place = in_place;
    if (given->count > 0)
        memcpy(vertex->operands, given->at, (size_t)given->count * sizeof *given->at);
    const tu_value *first = given->count > 0 ? given->at[0].value : NULL;
    for (int i = 0; i < result_count && from->status == TUTTI_OK; i++) {
        tu_value *value = new_value(from, made[i].name, &made[i].shape,
                                    entry->flags & TU_VIEW && first != NULL ? first->storage : -1);
        if (value == NULL || from->status != TUTTI_OK)
            return;
        value->maker = vertex;
        value->place = i;
        vertex->results[vertex->result_count++] = value;
    }
    if (from->status == TUTTI_OK)
        check_read(from, vertex);
}

static void free_lists(const tu_operator *entry, char *attributes) {
    for (int i = 0; entry != NULL && i < entry->argument_count; i++)
        if (entry->arguments[i].type == TT_ARGUMENT_INTS)
            free((int64_t *)((tu_ints *)(attributes + entry->arguments[i].offset))->at);
}

static void vertex(reader *from) {
    char name[WORD];
    result *made = NULL;
    int result_count = 0;
    bool in_place = false;
    reader ahead = *from;
    word(&ahead, name, false);
    skip(&ahead);
    if (*ahead.at == ':')
        result_count = results(from, &made);
    word(from, name, false);
    const tu_operator *entry = from->status == TUTTI_OK ? operator_of(from, name, &in_place) : NULL;
    char *attributes = entry != NULL ? calloc(1, entry->attribute_bytes + 1) : NULL;
    operands given = { NULL, 0, 0 };
    if (entry != NULL && attributes == NULL)
        no_memory(from, entry->attribute_bytes);
    if (from->status == TUTTI_OK)
        arguments(from, entry, attributes, &given);
    if (from->status == TUTTI_OK)
        add_vertex(from, entry, in_place, attributes, &given, result_count, made);
    if (attributes != NULL)
        free_lists(entry, attributes);
    free(attributes);
    free(given.at);
    free(made);
}

static void outputs(reader *from) {
    operands given = { NULL, 0, 0 };
    expect(from, "(");
    for (int i = 0; from->status == TUTTI_OK && !accept(from, ")"); i++) {
        if (i > 0)
            expect(from, ",");
        operand(from, &given);
    }
    skip(from);
    if (from->status == TUTTI_OK && *from->at != 0)
        wrong(from, "nothing may follow the return, and there is \"%.20s\"", from->at);
    if (from->graph == NULL) {
        free(given.at);
        return;
    }
    from->graph->outputs = given.at;
    from->graph->output_count = given.count;
}

tt_graph *tt_graph_parse(const char *text, tutti_world *world) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (text == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "graph_parse: text is NULL");
        return NULL;
    }
    reader from = { .at = text, .line = 1, .graph = tu_graph_new(), .world = world };
    if (from.graph == NULL)
        from.status = TUTTI_ERROR_MEMORY;
    head(&from);
    while (from.status == TUTTI_OK && !take_word(&from, "return"))
        vertex(&from);
    outputs(&from);
    if (from.status == TUTTI_OK)
        from.status = tu_graph_check("graph_parse", from.graph);
    for (int i = 0; i < from.fake_count; i++)
        tu_tensor_drop(from.fakes[i]);
    free(from.fakes);
    if (tu_pending_take(from.status) != TUTTI_OK)
        tt_graph_release(&from.graph);
    return from.graph;
}
