/* SPDX-License-Identifier: Apache-2.0
 *
 * The header of safetensors files: eight bytes of length, then JSON that maps names to dtype, shape and the place of
 * the elements, which follow and must be covered by the tensors exactly. Needs base/ alone.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/file.h"

#define LONGEST_HEADER 100000000u /* the format's own limit */

typedef struct cursor {
    const char *where;
    const char *start, *at, *end;
    char *text; /* where the next string goes; never further than `at` is */
    tu_safe_list *list;
    uint64_t base, room; /* where the elements begin, and how many bytes they have */
} cursor;

static char peek(cursor *json) {
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r'))
        json->at++;
    return json->at < json->end ? *json->at : 0;
}

static bool take(cursor *json, char wanted) {
    if (peek(json) != wanted)
        return false;
    json->at++;
    return true;
}

static tutti_status bad(const cursor *json, const char *wanted) {
    return tu_error(TUTTI_ERROR_PROTOCOL,
                    "%s is damaged or no safetensors file: %s is expected in its header at byte %zu", json->where,
                    wanted, (size_t)(json->at - json->start));
}

/* ---- strings ---- */

static int hex4(cursor *json) {
    int value = 0;
    if (json->end - json->at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        char digit = *json->at++;
        int nibble = digit >= '0' && digit <= '9'   ? digit - '0'
                     : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                     : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                    : -1;
        if (nibble < 0)
            return -1;
        value = value << 4 | nibble;
    }
    return value;
}

/* After a backslash and a u; surrogates come in pairs. */
static bool unescape_unicode(cursor *json) {
    int code = hex4(json);
    if (code >= 0xd800 && code < 0xdc00) {
        if (json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u')
            return false;
        json->at += 2;
        int low = hex4(json);
        if (low < 0xdc00 || low > 0xdfff)
            return false;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code <= 0 || (code >= 0xdc00 && code < 0xe000)) {
        return false;
    }
    if (code < 0x80) {
        *json->text++ = (char)code;
    } else {
        int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        static const int lead[] = { 0, 0xc0, 0xe0, 0xf0 };
        *json->text++ = (char)(lead[more] | code >> (6 * more));
        for (int i = more - 1; i >= 0; i--)
            *json->text++ = (char)(0x80 | (code >> (6 * i) & 0x3f));
    }
    return true;
}

static bool unescape(cursor *json) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end)
        return false;
    char letter = *json->at++;
    if (letter == 'u')
        return unescape_unicode(json);
    const char *which = letter == 0 ? NULL : strchr(from, letter);
    if (which == NULL)
        return false;
    *json->text++ = to[which - from];
    return true;
}

static tutti_status read_string(cursor *json, const char **string) {
    if (!take(json, '"'))
        return bad(json, "a string");
    char *start = json->text;
    while (json->at < json->end && *json->at != '"') {
        unsigned char byte = (unsigned char)*json->at++;
        if (byte < 32 || (byte == '\\' && !unescape(json)))
            return bad(json, "a proper character of a string");
        if (byte != '\\')
            *json->text++ = (char)byte;
    }
    if (!take(json, '"') || !tu_utf8(start, (size_t)(json->text - start)))
        return bad(json, "a string in UTF-8 with an end");
    *json->text++ = 0;
    *string = start;
    return TUTTI_OK;
}

/* ---- values ---- */

static tutti_status read_number(cursor *json, uint64_t *value) {
    char digit = peek(json);
    if (digit < '0' || digit > '9')
        return bad(json, "a number without sign");
    *value = 0;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
        *value = *value * 10 + (uint64_t)(*json->at - '0');
        if (*value > INT64_MAX / 16)
            return bad(json, "a smaller number");
    }
    return TUTTI_OK;
}

/* At most `limit` of them; more are counted, not kept. */
static tutti_status read_numbers(cursor *json, int limit, uint64_t *values, int *count) {
    tutti_status status = TUTTI_OK;
    *count = 0;
    if (!take(json, '['))
        return bad(json, "a list of numbers");
    while (status == TUTTI_OK && !(*count == 0 && take(json, ']'))) {
        uint64_t value = 0;
        status = read_number(json, &value);
        if (status == TUTTI_OK && *count < limit)
            values[*count] = value;
        ++*count;
        if (status == TUTTI_OK && !take(json, ','))
            return take(json, ']') ? TUTTI_OK : bad(json, "a comma or ]");
    }
    return status;
}

static tutti_status find_dtype(const cursor *json, const char *tensor, const char *name, tutti_dtype *dtype) {
    static const struct {
        char name[8];
        tutti_dtype dtype;
    } dtypes[] = { { "F64", TUTTI_F64 },   { "F32", TUTTI_F32 },         { "F16", TUTTI_F16 },
                   { "BF16", TUTTI_BF16 }, { "F8_E4M3", TUTTI_F8_E4M3 }, { "F8_E5M2", TUTTI_F8_E5M2 },
                   { "I8", TUTTI_I8 },     { "I16", TUTTI_I16 },         { "I32", TUTTI_I32 },
                   { "I64", TUTTI_I64 },   { "U8", TUTTI_U8 },           { "U16", TUTTI_U16 },
                   { "U32", TUTTI_U32 },   { "U64", TUTTI_U64 },         { "BOOL", TUTTI_BOOL },
                   { "C64", TUTTI_C64 } };
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strncmp(name, dtypes[i].name, sizeof dtypes[i].name) == 0) {
            *dtype = dtypes[i].dtype;
            return TUTTI_OK;
        }
    }
    return tu_error(TUTTI_ERROR_TYPE, "%s: tensor %s is of type %s, which has no dtype here", json->where,
                    tu_quote(tensor, strlen(tensor)).text, tu_quote(name, strlen(name)).text);
}

static tutti_status read_tensor(cursor *json, const char *name, tu_file_array *array) {
    uint64_t sizes[TT_MAX_DIMS] = { 0 }, places[2] = { 0 };
    int count = 0;
    unsigned seen = 0;
    if (!take(json, '{'))
        return bad(json, "the description of a tensor");
    do {
        const char *key, *dtype;
        tutti_status status = read_string(json, &key);
        if (status != TUTTI_OK)
            return status;
        unsigned bit = strcmp(key, "dtype") == 0          ? 1
                       : strcmp(key, "shape") == 0        ? 2
                       : strcmp(key, "data_offsets") == 0 ? 4
                                                          : 0;
        if (bit == 0 || seen & bit || !take(json, ':'))
            return bad(json, "dtype, shape or data_offsets, each once,");
        seen |= bit;
        if (bit == 1) {
            status = read_string(json, &dtype);
            if (status == TUTTI_OK)
                status = find_dtype(json, name, dtype, &array->dtype);
        } else if (bit == 2) {
            status = read_numbers(json, TT_MAX_DIMS, sizes, &array->ndim);
            if (status == TUTTI_OK && array->ndim > TT_MAX_DIMS)
                status = tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: tensor %s has %d dimensions, more than %d", json->where,
                                  tu_quote(name, strlen(name)).text, array->ndim, TT_MAX_DIMS);
        } else {
            status = read_numbers(json, 2, places, &count);
            if (status == TUTTI_OK && count != 2)
                status = bad(json, "two data_offsets");
        }
        if (status != TUTTI_OK)
            return status;
    } while (take(json, ','));
    if (!take(json, '}') || seen != 7)
        return bad(json, "dtype, shape and data_offsets");
    for (int i = 0; i < array->ndim; i++)
        array->sizes[i] = (int64_t)sizes[i];
    if (places[0] > places[1] || places[1] > json->room)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s is cut short or damaged: tensor %s is said to lie at [%llu, %llu) of %llu bytes",
                        json->where, tu_quote(name, strlen(name)).text, (unsigned long long)places[0],
                        (unsigned long long)places[1], (unsigned long long)json->room);
    array->offset = json->base + places[0];
    tutti_status status = tu_file_array_size(json->where, array, places[1] - places[0]);
    if (status == TUTTI_OK && array->bytes != places[1] - places[0])
        status = tu_error(TUTTI_ERROR_PROTOCOL, "%s is damaged: tensor %s has %llu bytes for a shape that needs %llu",
                          json->where, tu_quote(name, strlen(name)).text, (unsigned long long)(places[1] - places[0]),
                          (unsigned long long)array->bytes);
    return status;
}

/* `array` with room for one more; NULL without memory, and then it is as it was. */
static void *grow(void *array, size_t entry, size_t count, size_t *capacity) {
    if (count < *capacity)
        return array;
    size_t larger = *capacity == 0 ? 16 : *capacity * 2;
    void *moved = realloc(array, larger * entry);
    if (moved != NULL)
        *capacity = larger;
    return moved;
}

static tutti_status read_metadata(cursor *json) {
    tu_safe_list *list = json->list;
    if (!take(json, '{'))
        return bad(json, "metadata as {\"key\": \"value\", …}");
    if (take(json, '}'))
        return TUTTI_OK;
    do {
        const char *key, *value;
        tutti_status status = read_string(json, &key);
        if (status == TUTTI_OK && !take(json, ':'))
            status = bad(json, "a colon");
        if (status == TUTTI_OK)
            status = read_string(json, &value);
        if (status != TUTTI_OK)
            return status;
        const char **pairs = grow(list->pairs, 2 * sizeof *pairs, list->pair_count, &list->pair_capacity);
        if (pairs == NULL)
            return tu_error_memory("the metadata of a file", 2 * sizeof *pairs * list->pair_count);
        list->pairs = pairs;
        list->pairs[2 * list->pair_count] = key;
        list->pairs[2 * list->pair_count++ + 1] = value;
    } while (take(json, ','));
    return take(json, '}') ? TUTTI_OK : bad(json, "a comma or }");
}

static tutti_status read_header(cursor *json) {
    tu_safe_list *list = json->list;
    bool metadata = false;
    if (json->at == json->end || *json->at != '{')
        return bad(json, "{");
    json->at++;
    bool more = peek(json) != '}';
    while (more) {
        const char *name;
        tutti_status status = read_string(json, &name);
        if (status == TUTTI_OK && !take(json, ':'))
            status = bad(json, "a colon");
        if (status == TUTTI_OK && strcmp(name, "__metadata__") == 0) {
            status = metadata ? bad(json, "metadata once") : read_metadata(json);
            metadata = true;
        } else if (status == TUTTI_OK) {
            tu_safe_entry *entries = grow(list->entries, sizeof *entries, list->count, &list->capacity);
            if (entries == NULL)
                return tu_error_memory("the list of a file's tensors", sizeof *entries * list->count);
            list->entries = entries;
            tu_safe_entry *entry = &entries[list->count++];
            *entry = (tu_safe_entry){ .name = name };
            status = read_tensor(json, name, &entry->array);
        }
        if (status != TUTTI_OK)
            return status;
        more = take(json, ',');
    }
    if (!take(json, '}'))
        return bad(json, "a comma or }");
    peek(json);
    return json->at == json->end ? TUTTI_OK : bad(json, "nothing more");
}

/* ---- the whole ---- */

static int compare_places(const void *left, const void *right) {
    const tu_file_array *first = left, *second = right;
    if (first->offset != second->offset)
        return first->offset < second->offset ? -1 : 1;
    return first->bytes < second->bytes ? -1 : first->bytes > second->bytes;
}

/* No byte of the elements belongs to two tensors or to none: the format promises it, and a file that breaks it hides
 * something. */
static tutti_status check_cover(const cursor *json) {
    const tu_safe_list *list = json->list;
    tu_file_array *sorted = malloc((list->count + 1) * sizeof *sorted);
    const char **names = malloc((list->count + list->pair_count + 1) * sizeof *names);
    uint64_t next = json->base;
    tutti_status status = TUTTI_OK;
    if (sorted == NULL || names == NULL) {
        status = tu_error_memory("the list of a file's tensors", (list->count + 1) * sizeof *sorted);
        goto free_lists;
    }
    for (size_t i = 0; i < list->count; i++) {
        sorted[i] = list->entries[i].array;
        names[i] = list->entries[i].name;
    }
    qsort(sorted, list->count, sizeof *sorted, compare_places);
    size_t joined = 0;
    for (; joined < list->count && sorted[joined].offset == next; joined++)
        next += sorted[joined].bytes;
    if (joined < list->count || next != json->base + json->room)
        status = tu_error(TUTTI_ERROR_PROTOCOL, "%s is damaged: its tensors overlap or leave bytes out at byte %llu",
                          json->where, (unsigned long long)next);
    if (status == TUTTI_OK)
        status = tu_names_differ(json->where, list->count, names);
    for (size_t i = 0; i < list->pair_count; i++)
        names[i] = list->pairs[2 * i];
    if (status == TUTTI_OK)
        status = tu_names_differ(json->where, list->pair_count, names);
free_lists:
    free(sorted);
    free(names);
    return status;
}

void tu_safe_free(tu_safe_list *list) {
    free(list->entries);
    free(list->pairs);
    free(list->text);
    *list = (tu_safe_list){ 0 };
}

tutti_status tu_safe_parse(const tu_reader *reader, tu_safe_list *list) {
    uint8_t start[8];
    *list = (tu_safe_list){ 0 };
    if (reader->bytes < sizeof start)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s is no safetensors file: it has %llu bytes", reader->where,
                        (unsigned long long)reader->bytes);
    tutti_status status = tu_reader_get(reader, 0, start, sizeof start);
    if (status != TUTTI_OK)
        return status;
    uint64_t length = tu_load_little(start, 8), room = reader->bytes - sizeof start;
    if (length > room || length > LONGEST_HEADER)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s is cut short or no safetensors file: its header is said to be %llu bytes long, %s",
                        reader->where, (unsigned long long)length,
                        length > room ? "more than follow" : "more than the format allows");
    char *header = malloc(length + 1);
    list->text = malloc(length + 1); /* a string takes less than in the header, where it has quotes */
    if (header == NULL || list->text == NULL)
        status = tu_error_memory("the header of a safetensors file", length + 1);
    else
        status = tu_reader_get(reader, sizeof start, header, length);
    if (status == TUTTI_OK) {
        cursor json = { .where = reader->where,
                        .start = header,
                        .at = header,
                        .end = header + length,
                        .text = list->text,
                        .list = list,
                        .base = sizeof start + length,
                        .room = room - length };
        status = read_header(&json);
        if (status == TUTTI_OK)
            status = check_cover(&json);
    }
    free(header);
    if (status != TUTTI_OK)
        tu_safe_free(list);
    return status;
}
