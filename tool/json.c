/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading JSON, by recursive descent. Nesting is limited, so that no file can use up the stack.
 */
#include "json.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 64

typedef struct reader {
    const char *begin, *at, *end;
    const char *problem; /* NULL while all is well */
} reader;

static json *read_value(reader *input, int depth);

static json *fail(reader *input, const char *problem) {
    if (input->problem == NULL)
        input->problem = problem;
    return NULL;
}

static void skip_space(reader *input) {
    while (input->at < input->end &&
           (*input->at == ' ' || *input->at == '\n' || *input->at == '\t' || *input->at == '\r'))
        input->at++;
}

static bool take(reader *input, char wanted) {
    skip_space(input);
    if (input->at >= input->end || *input->at != wanted)
        return false;
    input->at++;
    return true;
}

/* Four hexadecimal digits as UTF-8; the halves of a pair become one "?" each, which is enough for names. */
static char *put_code(reader *input, char *to) {
    unsigned code = 0;
    for (int i = 0; i < 4; i++) {
        if (input->at >= input->end || !isxdigit((unsigned char)*input->at)) {
            fail(input, "four hexadecimal digits expected");
            return to;
        }
        char digit = *input->at++;
        code = code * 16 +
               (unsigned)(isdigit((unsigned char)digit) ? digit - '0' : tolower((unsigned char)digit) - 'a' + 10);
    }
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
        *to++ = (char)(0x80 | (code & 0x3f));
    } else if (code >= 0xd800 && code < 0xe000) {
        *to++ = '?';
    } else {
        *to++ = (char)(0xe0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    }
    return to;
}

/* The text of a string whose opening quote has been taken. What it becomes is never longer than what it was. */
static char *read_text(reader *input) {
    size_t longest = 0;
    while (input->at + longest < input->end && input->at[longest] != '"')
        longest += input->at[longest] == '\\' ? 2 : 1;
    char *text = malloc(longest + 1), *to = text;
    if (text == NULL) {
        fail(input, "out of memory");
        return NULL;
    }
    while (input->problem == NULL && input->at < input->end && *input->at != '"') {
        if (*input->at != '\\') {
            *to++ = *input->at++;
            continue;
        }
        if (++input->at >= input->end)
            break;
        static const char escapes[] = "\"\"\\\\//b\bf\fn\nr\rt\t";
        char kind = *input->at++;
        const char *found = NULL;
        for (const char *pair = escapes; *pair != '\0' && found == NULL; pair += 2)
            found = *pair == kind ? pair : NULL;
        if (found != NULL)
            *to++ = found[1];
        else if (kind == 'u')
            to = put_code(input, to);
        else
            fail(input, "unknown escape in a string");
    }
    *to = '\0';
    if (input->problem == NULL && !take(input, '"'))
        fail(input, "string without an end");
    if (input->problem != NULL) {
        free(text);
        return NULL;
    }
    return text;
}

static json *new_value(reader *input, json_kind kind) {
    json *value = calloc(1, sizeof *value);
    if (value == NULL)
        return fail(input, "out of memory");
    value->kind = kind;
    return value;
}

static json *read_members(reader *input, json_kind kind, char closing, int depth) {
    json *value = new_value(input, kind), **last;
    if (value == NULL || take(input, closing))
        return value;
    last = &value->first;
    do {
        char *name = NULL;
        if (kind == JSON_OBJECT && (!take(input, '"') || (name = read_text(input)) == NULL || !take(input, ':'))) {
            free(name);
            fail(input, "\"name\": expected");
            break;
        }
        *last = read_value(input, depth + 1);
        if (*last == NULL) {
            free(name);
            break;
        }
        (*last)->name = name;
        last = &(*last)->next;
    } while (take(input, ','));
    if (input->problem == NULL && !take(input, closing))
        fail(input, kind == JSON_OBJECT ? ", or } expected" : ", or ] expected");
    if (input->problem == NULL)
        return value;
    json_free(value);
    return NULL;
}

static json *read_number(reader *input) {
    char digits[64];
    size_t length = 0;
    while (input->at < input->end && length < sizeof digits - 1 && strchr("+-.0123456789eE", *input->at) != NULL)
        digits[length++] = *input->at++;
    digits[length] = '\0';
    char *rest;
    json *value = new_value(input, JSON_NUMBER);
    if (value == NULL)
        return NULL;
    value->number = strtoll(digits, &rest, 10);
    value->real = (double)value->number;
    if (*rest != '\0') {
        value->real = strtod(digits, &rest);
        value->number = (int64_t)value->real;
    }
    if (length > 0 && *rest == '\0')
        return value;
    free(value);
    return fail(input, "a value expected");
}

static bool take_word(reader *input, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(input->end - input->at) < length || memcmp(input->at, word, length) != 0)
        return false;
    input->at += length;
    return true;
}

static json *read_value(reader *input, int depth) {
    if (depth > DEPTH)
        return fail(input, "nested too deeply");
    json *value = NULL;
    if (take(input, '{'))
        return read_members(input, JSON_OBJECT, '}', depth);
    if (take(input, '['))
        return read_members(input, JSON_ARRAY, ']', depth);
    if (take(input, '"')) {
        char *text = read_text(input);
        value = text != NULL ? new_value(input, JSON_STRING) : NULL;
        if (value != NULL)
            value->text = text;
        else
            free(text);
        return value;
    }
    if (take_word(input, "null"))
        return new_value(input, JSON_NULL);
    bool yes = take_word(input, "true");
    if (!yes && !take_word(input, "false"))
        return read_number(input);
    value = new_value(input, JSON_BOOLEAN);
    if (value != NULL)
        value->number = yes;
    return value;
}

json *json_parse(const char *text, size_t bytes, char *problem, size_t problem_bytes) {
    reader input = { text, text, text + bytes, NULL };
    json *value = read_value(&input, 0);
    skip_space(&input);
    if (value != NULL && input.at < input.end) {
        fail(&input, "something after the end");
        json_free(value);
        value = NULL;
    }
    if (value == NULL) {
        int line = 1;
        for (const char *at = text; at < input.at; at++)
            line += *at == '\n';
        snprintf(problem, problem_bytes, "line %d: %s", line,
                 input.problem != NULL ? input.problem : "a value expected");
    }
    return value;
}

void json_free(json *value) {
    while (value != NULL) {
        json *next = value->next;
        json_free(value->first);
        free(value->text);
        free(value->name);
        free(value);
        value = next;
    }
}

const json *json_member(const json *object, const char *name) {
    if (object == NULL || object->kind != JSON_OBJECT)
        return NULL;
    for (const json *member = object->first; member != NULL; member = member->next)
        if (strcmp(member->name, name) == 0)
            return member;
    return NULL;
}

int64_t json_number(const json *object, const char *name, int64_t otherwise) {
    const json *member = json_member(object, name);
    return member != NULL && (member->kind == JSON_NUMBER || member->kind == JSON_BOOLEAN) ? member->number : otherwise;
}

double json_real(const json *object, const char *name, double otherwise) {
    const json *member = json_member(object, name);
    return member != NULL && member->kind == JSON_NUMBER ? member->real : otherwise;
}

const char *json_text(const json *object, const char *name) {
    const json *member = json_member(object, name);
    return member != NULL && member->kind == JSON_STRING ? member->text : "";
}

char *json_read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NULL;
    char *text = NULL;
    size_t used = 0, room = 0;
    do {
        if (used + 65536 > room) {
            room = 2 * room + 65536;
            char *larger = realloc(text, room);
            if (larger == NULL)
                break;
            text = larger;
        }
        used += fread(text + used, 1, room - used, file);
    } while (!feof(file) && !ferror(file));
    bool complete = feof(file) != 0;
    fclose(file);
    if (!complete) {
        free(text);
        return NULL;
    }
    *bytes = used;
    return text;
}
