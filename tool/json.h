/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading JSON: a whole text into a tree.
 */
#ifndef TUTTI_TOOL_JSON_H
#define TUTTI_TOOL_JSON_H

#include <stddef.h>
#include <stdint.h>

typedef enum json_kind {
    JSON_NULL,
    JSON_BOOLEAN,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} json_kind;

typedef struct json {
    json_kind kind;
    int64_t number;     /* of JSON_NUMBER, cut to an integer; 1 or 0 of JSON_BOOLEAN */
    double real;        /* of JSON_NUMBER, with its fraction */
    char *text;         /* of JSON_STRING */
    char *name;         /* in the object that it is a member of */
    struct json *first; /* of JSON_ARRAY and JSON_OBJECT */
    struct json *next;  /* in the same array or object */
} json;

/* The whole file, which the caller frees; NULL with errno. */
char *json_read_file(const char *path, size_t *bytes);

/* NULL when the text is not JSON or there is no memory; `problem` then says what, and where. */
json *json_parse(const char *text, size_t bytes, char *problem, size_t problem_bytes);
void json_free(json *value);

/* Members of an object; what is missing or of another kind is NULL, the given default, "". */
const json *json_member(const json *object, const char *name);
int64_t json_number(const json *object, const char *name, int64_t otherwise);
double json_real(const json *object, const char *name, double otherwise);
const char *json_text(const json *object, const char *name);

#endif
