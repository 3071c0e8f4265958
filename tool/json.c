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

static json *read_value(reader *r, int depth);

static json *fail(reader *r, const char *problem) {
    if (r->problem == NULL)
        r->problem = problem;
    return NULL;
}

static void skip_space(reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\t' || *r->at == '\r'))
        r->at++;
}

static bool take(reader *r, char wanted) {
    skip_space(r);
    if (r->at >= r->end || *r->at != wanted)
        return false;
    r->at++;
    return true;
}

/* Four hexadecimal digits as UTF-8; the halves of a pair become one "?" each, which is enough for names. */
static char *put_code(reader *r, char *to) {
    unsigned code = 0;
    for (int i = 0; i < 4; i++) {
        if (r->at >= r->end || !isxdigit((unsigned char)*r->at)) {
            fail(r, "four hexadecimal digits expected");
            return to;
        }
        char digit = *r->at++;
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
static char *read_text(reader *r) {
    size_t longest = 0;
    while (r->at + longest < r->end && r->at[longest] != '"')
        longest += r->at[longest] == '\\' ? 2 : 1;
    char *text = malloc(longest + 1), *to = text;
    if (text == NULL) {
        fail(r, "out of memory");
        return NULL;
    }
    while (r->problem == NULL && r->at < r->end && *r->at != '"') {
        if (*r->at != '\\') {
            *to++ = *r->at++;
            continue;
        }
        if (++r->at >= r->end)
            break;
        static const char escapes[] = "\"\"\\\\//b\bf\fn\nr\rt\t";
        char kind = *r->at++;
        const char *found = NULL;
        for (const char *pair = escapes; *pair != '\0' && found == NULL; pair += 2)
            found = *pair == kind ? pair : NULL;
        if (found != NULL)
            *to++ = found[1];
        else if (kind == 'u')
            to = put_code(r, to);
        else
            fail(r, "unknown escape in a string");
    }
    *to = '\0';
    if (r->problem == NULL && !take(r, '"'))
        fail(r, "string without an end");
    if (r->problem != NULL) {
        free(text);
        return NULL;
    }
    return text;
}

static json *new_value(reader *r, json_kind kind) {
    json *value = calloc(1, sizeof *value);
    if (value == NULL)
        return fail(r, "out of memory");
    value->kind = kind;
    return value;
}

static json *read_members(reader *r, json_kind kind, char closing, int depth) {
    json *value = new_value(r, kind), **last;
    if (value == NULL || take(r, closing))
        return value;
    last = &value->first;
    do {
        char *name = NULL;
        if (kind == JSON_OBJECT && (!take(r, '"') || (name = read_text(r)) == NULL || !take(r, ':'))) {
            free(name);
            fail(r, "\"name\": expected");
            break;
        }
        *last = read_value(r, depth + 1);
        if (*last == NULL) {
            free(name);
            break;
        }
        (*last)->name = name;
        last = &(*last)->next;
    } while (take(r, ','));
    if (r->problem == NULL && !take(r, closing))
        fail(r, kind == JSON_OBJECT ? ", or } expected" : ", or ] expected");
    if (r->problem == NULL)
        return value;
    json_free(value);
    return NULL;
}

static json *read_number(reader *r) {
    char digits[64];
    size_t length = 0;
    while (r->at < r->end && length < sizeof digits - 1 && strchr("+-.0123456789eE", *r->at) != NULL)
        digits[length++] = *r->at++;
    digits[length] = '\0';
    char *rest;
    json *value = new_value(r, JSON_NUMBER);
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
    return fail(r, "a value expected");
}

static bool take_word(reader *r, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length) != 0)
        return false;
    r->at += length;
    return true;
}

static json *read_value(reader *r, int depth) {
    if (depth > DEPTH)
        return fail(r, "nested too deeply");
    json *value = NULL;
    if (take(r, '{'))
        return read_members(r, JSON_OBJECT, '}', depth);
    if (take(r, '['))
        return read_members(r, JSON_ARRAY, ']', depth);
    if (take(r, '"')) {
        char *text = read_text(r);
        value = text != NULL ? new_value(r, JSON_STRING) : NULL;
        if (value != NULL)
            value->text = text;
        else
            free(text);
        return value;
    }
    if (take_word(r, "null"))
        return new_value(r, JSON_NULL);
    bool yes = take_word(r, "true");
    if (!yes && !take_word(r, "false"))
        return read_number(r);
    value = new_value(r, JSON_BOOLEAN);
    if (value != NULL)
        value->number = yes;
    return value;
}

json *json_parse(const char *text, size_t bytes, char *problem, size_t problem_bytes) {
    reader r = { text, text, text + bytes, NULL };
    json *value = read_value(&r, 0);
    skip_space(&r);
    if (value != NULL && r.at < r.end) {
        fail(&r, "something after the end");
        json_free(value);
        value = NULL;
    }
    if (value == NULL) {
        int line = 1;
        for (const char *at = text; at < r.at; at++)
            line += *at == '\n';
        snprintf(problem, problem_bytes, "line %d: %s", line, r.problem != NULL ? r.problem : "a value expected");
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
