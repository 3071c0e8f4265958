/* SPDX-License-Identifier: Apache-2.0
 *
 * The header of .npy files: a magic number, a version, a length, and a Python dictionary with the keys descr,
 * fortran_order and shape. Versions 1, 2 and 3 differ in the width of the length and the encoding of the text. Needs
 * base/ alone.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/file.h"

#define LONGEST_HEADER (1 << 20)

typedef struct cursor {
    const char *where, *at, *end;
} cursor;

static char peek(cursor *text) {
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\t' || *text->at == '\n' || *text->at == '\r'))
        text->at++;
    return text->at < text->end ? *text->at : 0;
}

static bool take(cursor *text, char wanted) {
    if (wanted == 0 || peek(text) != wanted)
        return false;
    text->at++;
    return true;
}

static bool take_word(cursor *text, const char *word) {
    size_t length = strlen(word);
    peek(text);
    if ((size_t)(text->end - text->at) < length || memcmp(text->at, word, length) != 0)
        return false;
    text->at += length;
    return true;
}

static tutti_status bad(const cursor *text, const char *wanted) {
    return tu_error(TUTTI_ERROR_PROTOCOL, "%s has a damaged .npy header: %s is expected at %s", text->where, wanted,
                    tu_quote(text->at, (size_t)(text->end - text->at)).text);
}

/* Without escapes: no key and no type has one. */
static bool take_string(cursor *text, const char **string, size_t *length) {
    char quote = peek(text);
    if (quote != '\'' && quote != '"')
        return false;
    const char *end = memchr(text->at + 1, quote, (size_t)(text->end - text->at - 1));
    if (end == NULL || memchr(text->at + 1, '\\', (size_t)(end - text->at - 1)) != NULL)
        return false;
    *string = text->at + 1;
    *length = (size_t)(end - *string);
    text->at = end + 1;
    return true;
}

static tutti_status read_shape(cursor *text, tu_file_array *array) {
    array->ndim = 0;
    if (!take(text, '('))
        return bad(text, "a shape (…)");
    while (!take(text, ')')) {
        uint64_t size = 0;
        char digit = peek(text);
        if (digit < '0' || digit > '9')
            return bad(text, "a size");
        for (; text->at < text->end && *text->at >= '0' && *text->at <= '9'; text->at++) {
            size = size * 10 + (uint64_t)(*text->at - '0');
            if (size > INT64_MAX / 16)
                return tu_error(TUTTI_ERROR_PROTOCOL, "%s has a damaged .npy header: a size is too large", text->where);
        }
        if (text->at < text->end && *text->at == 'L') /* a long of Python 2 */
            text->at++;
        if (array->ndim == TT_MAX_DIMS)
            return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s has more than %d dimensions", text->where, TT_MAX_DIMS);
        array->sizes[array->ndim++] = (int64_t)size;
        if (!take(text, ',') && peek(text) != ')')
            return bad(text, "a comma or )");
    }
    return TUTTI_OK;
}

static tutti_status read_descr(cursor *text, tu_file_array *array) {
    static const struct {
        char kind[4];
        tutti_dtype dtype;
    } kinds[] = { { "f8", TUTTI_F64 }, { "f4", TUTTI_F32 },  { "f2", TUTTI_F16 }, { "i1", TUTTI_I8 },
                  { "i2", TUTTI_I16 }, { "i4", TUTTI_I32 },  { "i8", TUTTI_I64 }, { "u1", TUTTI_U8 },
                  { "u2", TUTTI_U16 }, { "u4", TUTTI_U32 },  { "u8", TUTTI_U64 }, { "b1", TUTTI_BOOL },
                  { "c8", TUTTI_C64 }, { "c16", TUTTI_C128 } };
    const char *descr;
    size_t length;
    if (peek(text) == '[' || peek(text) == '(')
        return tu_error(TUTTI_ERROR_TYPE, "%s holds records of several fields, which no dtype here is", text->where);
    if (!take_string(text, &descr, &length))
        return bad(text, "an element type");
    bool ordered = length > 0 && strchr("<>=|", descr[0]) != NULL && descr[0] != 0;
    size_t skip = ordered ? 1 : 0;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (length - skip == strlen(kinds[i].kind) && memcmp(descr + skip, kinds[i].kind, length - skip) == 0) {
            array->dtype = kinds[i].dtype;
            array->swapped = descr[0] == '>';
            return TUTTI_OK;
        }
    }
    char kind = length > skip ? descr[skip] : 0;
    return tu_error(TUTTI_ERROR_TYPE, "%s holds elements of type %s, which has no dtype here%s", text->where,
                    tu_quote(descr, length).text,
                    kind == 'O'   ? ": these are pickled Python objects"
                    : kind == 'V' ? ": NumPy has no name for bf16 and f8 and writes raw bytes for them; use safetensors"
                                  : "");
}

static tutti_status read_dictionary(cursor *text, tu_file_array *array) {
    static const char *const keys[] = { "descr", "fortran_order", "shape" };
    unsigned seen = 0;
    if (!take(text, '{'))
        return bad(text, "a dictionary {…}");
    while (!take(text, '}')) {
        const char *key;
        size_t length;
        unsigned which = 0;
        if (!take_string(text, &key, &length))
            return bad(text, "a key");
        while (which < 3 && (strlen(keys[which]) != length || memcmp(keys[which], key, length) != 0))
            which++;
        if (which == 3 || seen & 1u << which)
            return tu_error(TUTTI_ERROR_PROTOCOL, "%s has a damaged .npy header: the key %s is %s", text->where,
                            tu_quote(key, length).text, which == 3 ? "unknown" : "there twice");
        seen |= 1u << which;
        if (!take(text, ':'))
            return bad(text, "a colon");
        tutti_status status = TUTTI_OK;
        if (which == 0)
            status = read_descr(text, array);
        else if (which == 2)
            status = read_shape(text, array);
        else if ((array->fortran = take_word(text, "True")) == false && !take_word(text, "False"))
            status = bad(text, "True or False");
        if (status != TUTTI_OK)
            return status;
        if (!take(text, ',') && peek(text) != '}')
            return bad(text, "a comma or }");
    }
    if (seen != 7)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s has a damaged .npy header: the key \"%s\" is missing", text->where,
                        keys[!(seen & 1)   ? 0
                             : !(seen & 2) ? 1
                                           : 2]);
    return peek(text) == 0 && text->at == text->end ? TUTTI_OK : bad(text, "nothing more");
}

tutti_status tu_npy_parse(const tu_reader *reader, const char *where, uint64_t offset, uint64_t bytes,
                          tu_file_array *array) {
    uint8_t start[12];
    size_t lead = bytes < sizeof start ? (size_t)bytes : sizeof start;
    tutti_status status = tu_reader_get(reader, offset, start, lead);
    if (status != TUTTI_OK)
        return status;
    if (lead < 10 || memcmp(start, "\x93NUMPY", 6) != 0)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s is no .npy file: it does not begin with NumPy's signature", where);
    int version = start[6], prefix = version == 1 ? 10 : 12;
    if (version < 1 || version > 3 || lead < (size_t)prefix)
        return tu_error(version < 1 || version > 3 ? TUTTI_ERROR_UNSUPPORTED : TUTTI_ERROR_PROTOCOL,
                        "%s %s: it is of version %d.%d", where,
                        version < 1 || version > 3 ? "is no .npy of version 1, 2 or 3" : "is cut short", version,
                        start[7]);
    uint64_t length = tu_load_little(start + 8, prefix - 8);
    if (length > LONGEST_HEADER || length > bytes - (uint64_t)prefix)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s is cut short or damaged: its header is said to be %llu bytes long, and %llu are there",
                        where, (unsigned long long)length, (unsigned long long)(bytes - (uint64_t)prefix));
    char *header = malloc(length + 1);
    if (header == NULL)
        return tu_error_memory("the header of a .npy file", length + 1);
    *array = (tu_file_array){ .offset = offset + (uint64_t)prefix + length };
    status = tu_reader_get(reader, offset + (uint64_t)prefix, header, length);
    if (status == TUTTI_OK) {
        cursor text = { where, header, header + length };
        status = read_dictionary(&text, array);
    }
    free(header);
    return status == TUTTI_OK ? tu_file_array_size(where, array, bytes - (uint64_t)prefix - length) : status;
}
