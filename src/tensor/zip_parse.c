/* SPDX-License-Identifier: Apache-2.0
 *
 * The directory of zip archives, as far as .npz needs it: stored entries, with the 64-bit fields of large archives.
 * Needs base/ alone.
 *
 * The directory stands at the end and is what counts; an entry's own header is read only for its length.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/file.h"

#define END_BYTES 22u
#define LOCATOR_BYTES 20u
#define END64_BYTES 56u
#define CENTRAL_BYTES 46u
#define LOCAL_BYTES 30u
#define LONGEST_COMMENT 65535u
#define LARGEST_DIRECTORY (1u << 30)

/* ---- CRC-32, eight bytes at a time ---- */

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void table_fill(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
        table[0][byte] = crc;
    }
    for (int step = 1; step < 8; step++)
        for (int byte = 0; byte < 256; byte++)
            table[step][byte] = table[step - 1][byte] >> 8 ^ table[0][table[step - 1][byte] & 255];
}

uint32_t tu_crc32(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *at = data;
    pthread_once(&table_once, table_fill);
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t eight;
        memcpy(&eight, at, 8);
        eight ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= table[7 - i][eight >> (8 * i) & 255];
    }
    for (; bytes > 0; bytes--)
        crc = crc >> 8 ^ table[0][(crc ^ *at++) & 255];
    return ~crc;
}

/* ---- the directory ---- */

typedef struct directory {
    uint64_t count, offset, bytes;
} directory;

static tutti_status damaged(const tu_reader *reader, const char *what) {
    return tu_error(TUTTI_ERROR_PROTOCOL, "%s is a damaged zip archive: %s", reader->where, what);
}

/* The record at the very end; a comment may follow it. */
static tutti_status find_end(const tu_reader *reader, uint64_t *at, uint8_t end[END_BYTES]) {
    size_t bytes = reader->bytes < END_BYTES + LONGEST_COMMENT ? (size_t)reader->bytes : END_BYTES + LONGEST_COMMENT;
    uint8_t *tail = bytes < END_BYTES ? NULL : malloc(bytes);
    if (tail == NULL && bytes >= END_BYTES)
        return tu_error_memory("the end of a zip archive", bytes);
    tutti_status status = tail == NULL ? TUTTI_OK : tu_reader_get(reader, reader->bytes - bytes, tail, bytes);
    bool found = false;
    for (size_t i = tail == NULL || status != TUTTI_OK ? 0 : bytes - END_BYTES + 1; i > 0 && !found; i--) {
        const uint8_t *candidate = tail + i - 1;
        found = memcmp(candidate, "PK\5\6", 4) == 0 && i - 1 + END_BYTES + tu_load_little(candidate + 20, 2) == bytes;
        if (found) {
            *at = reader->bytes - bytes + i - 1;
            memcpy(end, candidate, END_BYTES);
        }
    }
    free(tail);
    if (status == TUTTI_OK && !found)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s is no zip archive, as a .npz is, or is cut short: it has no directory at its end",
                        reader->where);
    return status;
}

static tutti_status find_directory(const tu_reader *reader, directory *place) {
    uint8_t end[END_BYTES], locator[LOCATOR_BYTES], end64[END64_BYTES];
    uint64_t at = 0;
    tutti_status status = find_end(reader, &at, end);
    if (status != TUTTI_OK)
        return status;
    if (tu_load_little(end + 4, 2) != tu_load_little(end + 6, 2))
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s is one part of a zip archive that was split", reader->where);
    *place = (directory){ tu_load_little(end + 10, 2), tu_load_little(end + 16, 4), tu_load_little(end + 12, 4) };
    if (at >= LOCATOR_BYTES) {
        status = tu_reader_get(reader, at - LOCATOR_BYTES, locator, LOCATOR_BYTES);
        if (status == TUTTI_OK && memcmp(locator, "PK\6\7", 4) == 0) {
            status = tu_reader_get(reader, tu_load_little(locator + 8, 8), end64, END64_BYTES);
            if (status == TUTTI_OK && memcmp(end64, "PK\6\6", 4) != 0)
                status = damaged(reader, "its 64-bit directory is not where it is said to be");
            if (status == TUTTI_OK)
                *place = (directory){ tu_load_little(end64 + 32, 8), tu_load_little(end64 + 48, 8),
                                      tu_load_little(end64 + 40, 8) };
        }
        if (status != TUTTI_OK)
            return status;
    }
    if (place->offset > at || place->bytes > at - place->offset)
        return damaged(reader, "its directory reaches past its end");
    if (place->bytes > LARGEST_DIRECTORY)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s has a directory of %llu bytes, and at most %u are read",
                        reader->where, (unsigned long long)place->bytes, LARGEST_DIRECTORY);
    if (place->count > place->bytes / CENTRAL_BYTES)
        return damaged(reader, "its directory is too short for its entries");
    return TUTTI_OK;
}

/* Values of all ones stand in the 64-bit extra field instead, in this order. */
static tutti_status widen(const tu_reader *reader, const uint8_t *extra, size_t bytes, uint64_t *values[3]) {
    bool missing = false;
    for (int i = 0; i < 3; i++)
        missing = missing || *values[i] == UINT32_MAX;
    for (size_t at = 0; missing && bytes - at >= 4;) {
        size_t length = (size_t)tu_load_little(extra + at + 2, 2);
        if (length > bytes - at - 4)
            break;
        if (tu_load_little(extra + at, 2) == 1) {
            size_t used = 0;
            for (int i = 0; i < 3; i++) {
                if (*values[i] != UINT32_MAX)
                    continue;
                if (length - used < 8)
                    return damaged(reader, "an entry's 64-bit sizes are incomplete");
                *values[i] = tu_load_little(extra + at + 4 + used, 8);
                used += 8;
            }
            return TUTTI_OK;
        }
        at += 4 + length;
    }
    return TUTTI_OK;
}

/* Where the bytes of an entry begin, by its own header. */
static tutti_status locate(const tu_reader *reader, uint64_t header, tu_zip_entry *entry) {
    uint8_t local[LOCAL_BYTES];
    tutti_status status = tu_reader_get(reader, header, local, LOCAL_BYTES);
    if (status != TUTTI_OK)
        return status;
    if (memcmp(local, "PK\3\4", 4) != 0)
        return damaged(reader, "an entry is not where the directory says");
    entry->offset = header + LOCAL_BYTES + tu_load_little(local + 26, 2) + tu_load_little(local + 28, 2);
    if (entry->offset > reader->bytes || entry->bytes > reader->bytes - entry->offset)
        return damaged(reader, "an entry reaches past its end");
    return TUTTI_OK;
}

static tutti_status read_entry(const tu_reader *reader, const uint8_t *at, size_t bytes, char *name,
                               tu_zip_entry *entry, size_t *used) {
    if (bytes < CENTRAL_BYTES || memcmp(at, "PK\1\2", 4) != 0)
        return damaged(reader, "its directory ends too early");
    size_t name_bytes = (size_t)tu_load_little(at + 28, 2), extra_bytes = (size_t)tu_load_little(at + 30, 2);
    size_t whole = CENTRAL_BYTES + name_bytes + extra_bytes + (size_t)tu_load_little(at + 32, 2);
    if (whole > bytes)
        return damaged(reader, "its directory ends too early");
    memcpy(name, at + CENTRAL_BYTES, name_bytes);
    name[name_bytes] = 0;
    tu_quoted quoted = tu_quote(name, name_bytes);
    if (strlen(name) != name_bytes || !tu_utf8(name, name_bytes))
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: the name of entry %s is not UTF-8 without zero bytes",
                        reader->where, quoted.text);
    uint64_t packed = tu_load_little(at + 20, 4), size = tu_load_little(at + 24, 4),
             header = tu_load_little(at + 42, 4);
    tutti_status status =
        widen(reader, at + CENTRAL_BYTES + name_bytes, extra_bytes, (uint64_t *[]){ &size, &packed, &header });
    if (status != TUTTI_OK)
        return status;
    unsigned flags = (unsigned)tu_load_little(at + 8, 2), method = (unsigned)tu_load_little(at + 10, 2);
    if (flags & 1)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: entry %s is encrypted", reader->where, quoted.text);
    if (method != 0)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s: entry %s is compressed (%s, method %u), and only stored entries are read: write it with "
                        "numpy.savez, not savez_compressed",
                        reader->where, quoted.text, method == 8 ? "deflate" : "not deflate", method);
    if (packed != size)
        return damaged(reader, "a stored entry has two lengths");
    *entry = (tu_zip_entry){ .name = name, .crc = (uint32_t)tu_load_little(at + 16, 4), .bytes = size };
    *used = whole;
    return locate(reader, header, entry);
}

static tutti_status unique(const tu_reader *reader, const tu_zip_list *list) {
    const char **names = malloc((list->count + 1) * sizeof *names);
    if (names == NULL)
        return tu_error_memory("a list of names", (list->count + 1) * sizeof *names);
    for (size_t i = 0; i < list->count; i++)
        names[i] = list->entries[i].name;
    tutti_status status = tu_names_differ(reader->where, list->count, names);
    free(names);
    return status;
}

void tu_zip_free(tu_zip_list *list) {
    free(list->entries);
    free(list->text);
    *list = (tu_zip_list){ 0 };
}

tutti_status tu_zip_parse(const tu_reader *reader, tu_zip_list *list) {
    directory place = { 0 };
    *list = (tu_zip_list){ 0 };
    tutti_status status = find_directory(reader, &place);
    if (status != TUTTI_OK)
        return status;
    uint8_t *bytes = malloc(place.bytes + 1);
    list->entries = calloc(place.count + 1, sizeof *list->entries);
    list->text = malloc(place.bytes + 1); /* a name is shorter than its entry */
    if (bytes == NULL || list->entries == NULL || list->text == NULL)
        status = tu_error_memory("the directory of a zip archive", place.bytes);
    else
        status = tu_reader_get(reader, place.offset, bytes, place.bytes);
    size_t at = 0, text = 0;
    for (; status == TUTTI_OK && list->count < place.count; list->count++) {
        size_t used = 0;
        status =
            read_entry(reader, bytes + at, place.bytes - at, list->text + text, &list->entries[list->count], &used);
        at += used;
        if (status == TUTTI_OK)
            text += strlen(list->text + text) + 1;
    }
    free(bytes);
    if (status == TUTTI_OK)
        status = unique(reader, list);
    if (status != TUTTI_OK)
        tu_zip_free(list);
    return status;
}
