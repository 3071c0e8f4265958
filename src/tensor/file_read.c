/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading files piece by piece, and what the parsers of all formats share. Needs base/ alone.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tensor/file.h"

tutti_status tu_reader_open(const char *who, const char *path, tu_reader *reader) {
    struct stat about;
    if (path == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: path is NULL", who);
    *reader = (tu_reader){ .descriptor = -1 };
    snprintf(reader->where, sizeof reader->where, "%s: \"%.400s\"", who, path);
    /* Not to wait at a pipe that nobody writes; for files it means nothing. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return tu_error_system(errno, "%s cannot be opened", reader->where);
    tutti_status status = TUTTI_OK;
    if (fstat(descriptor, &about) != 0)
        status = tu_error_system(errno, "%s cannot be asked for its size", reader->where);
    else if (!S_ISREG(about.st_mode))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "%s is %s, not a file", reader->where,
                          S_ISDIR(about.st_mode) ? "a folder" : "a device or pipe");
    if (status != TUTTI_OK) {
        close(descriptor);
        return status;
    }
    reader->descriptor = descriptor;
    reader->bytes = (uint64_t)about.st_size;
    return TUTTI_OK;
}

void tu_reader_close(tu_reader *reader) {
    if (reader->descriptor >= 0)
        close(reader->descriptor);
    reader->descriptor = -1;
}

tutti_status tu_reader_get(const tu_reader *reader, uint64_t offset, void *out, size_t bytes) {
    if (offset > reader->bytes || bytes > reader->bytes - offset)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s is cut short: %zu bytes are wanted at %llu, and it has %llu",
                        reader->where, bytes, (unsigned long long)offset, (unsigned long long)reader->bytes);
    for (size_t done = 0; done < bytes;) {
        ssize_t now = pread(reader->descriptor, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (now < 0 && errno == EINTR)
            continue;
        if (now < 0)
            return tu_error_system(errno, "%s cannot be read at %llu", reader->where,
                                   (unsigned long long)(offset + done));
        if (now == 0)
            return tu_error(TUTTI_ERROR_PROTOCOL, "%s became shorter while it was read", reader->where);
        done += (size_t)now;
    }
    return TUTTI_OK;
}

tu_quoted tu_quote(const char *name, size_t length) {
    tu_quoted quoted;
    size_t used = 0, room = sizeof quoted.text - 6;
    quoted.text[used++] = '"';
    for (size_t i = 0; i < length && used < room; i++) {
        unsigned char byte = (unsigned char)name[i];
        quoted.text[used++] = byte < 32 || byte == 127 ? '?' : (char)byte;
    }
    snprintf(quoted.text + used, sizeof quoted.text - used, "%s\"", length >= room ? "..." : "");
    return quoted;
}

/* Shortest forms only, no surrogates, nothing above U+10FFFF. */
bool tu_utf8(const char *text, size_t length) {
    const uint8_t *at = (const uint8_t *)text, *end = at + length;
    while (at < end) {
        uint32_t first = *at++, code;
        int more = first < 0x80 ? 0 : first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
        static const uint32_t least[] = { 0, 0x80, 0x800, 0x10000 };
        if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || end - at < more)
            return false;
        code = more == 0 ? first : first & (0x3fu >> more);
        for (int i = 0; i < more; i++) {
            if ((*at & 0xc0) != 0x80)
                return false;
            code = code << 6 | (*at++ & 0x3f);
        }
        if (code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
            return false;
    }
    return true;
}

tutti_status tu_file_array_size(const char *where, tu_file_array *array, uint64_t limit) {
    uint64_t bytes = tutti_dtype_size(array->dtype);
    bool overflow = false;
    for (int i = 0; i < array->ndim; i++)
        if (array->sizes[i] == 0)
            bytes = 0;
    for (int i = 0; i < array->ndim; i++)
        overflow = __builtin_mul_overflow(bytes, (uint64_t)array->sizes[i], &bytes) || overflow;
    if (overflow || bytes > limit)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s is cut short or damaged: its shape needs %s%llu bytes of elements, and %llu are there",
                        where, overflow ? "more than " : "",
                        overflow ? (unsigned long long)UINT64_MAX : (unsigned long long)bytes,
                        (unsigned long long)limit);
    array->bytes = bytes;
    return TUTTI_OK;
}

static int compare_names(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

tutti_status tu_names_differ(const char *where, size_t count, const char *const *names) {
    if (count < 2)
        return TUTTI_OK;
    const char **sorted = malloc(count * sizeof *sorted);
    if (sorted == NULL)
        return tu_error_memory("a list of names", count * sizeof *sorted);
    memcpy(sorted, names, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_names);
    tutti_status status = TUTTI_OK;
    for (size_t i = 1; i < count && status == TUTTI_OK; i++)
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            status = tu_error(TUTTI_ERROR_EXISTS, "%s: the name %s occurs twice", where,
                              tu_quote(sorted[i], strlen(sorted[i])).text);
    free(sorted);
    return status;
}
