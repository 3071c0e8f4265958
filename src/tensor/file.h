/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors in files: .npy, .npz and safetensors.
 *
 * The *_parse.c and file_read.c know nothing of tensors: they turn bytes into checked descriptions, need base/ alone,
 * and are what the fuzz targets feed. Sizes in a file are held against the file's length before anything is allocated
 * for them.
 */
#ifndef TU_TENSOR_FILE_H
#define TU_TENSOR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/tensor.h>

#include "base/error.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "these formats are written as they lie in memory, little end first");

/* ---- reading ---- */

/* A file that is open. */
typedef struct tu_reader {
    int descriptor;
    uint64_t bytes;
    char where[512]; /* begins every message: `load_npy: "x.npy"` */
} tu_reader;

tutti_status tu_reader_open(const char *who, const char *path, tu_reader *reader);
void tu_reader_close(tu_reader *reader);
/* All of it; fewer bytes there is an error. */
tutti_status tu_reader_get(const tu_reader *reader, uint64_t offset, void *out, size_t bytes);
/* "name" for a message: control bytes replaced, the end of a long one left out. */
typedef struct tu_quoted {
    char text[96];
} tu_quoted;
tu_quoted tu_quote(const char *name, size_t length);
bool tu_utf8(const char *text, size_t length);

/* An array inside a file. */
typedef struct tu_file_array {
    tutti_dtype dtype;
    int ndim;
    int64_t sizes[TT_MAX_DIMS];
    bool swapped;           /* the big end first */
    bool fortran;           /* the first dimension runs fastest */
    uint64_t offset, bytes; /* of the elements, in the file */
} tu_file_array;
/* Bytes of such an array; an error where they do not fit in `limit`. */
tutti_status tu_file_array_size(const char *where, tu_file_array *array, uint64_t limit);

/* The .npy that lies at [offset, offset + bytes) of the file. `where` begins its messages. */
tutti_status tu_npy_parse(const tu_reader *reader, const char *where, uint64_t offset, uint64_t bytes,
                          tu_file_array *array);

typedef struct tu_zip_entry {
    char *name; /* as it stands there, ended with 0 */
    uint32_t crc;
    uint64_t offset, bytes; /* of the stored bytes, in the file */
} tu_zip_entry;
typedef struct tu_zip_list {
    size_t count;
    tu_zip_entry *entries;
    char *text;
} tu_zip_list;
/* Entries that are compressed, encrypted or of one name are errors. End it with tu_zip_free; on failure there is
 * nothing to end. */
tutti_status tu_zip_parse(const tu_reader *reader, tu_zip_list *list);
void tu_zip_free(tu_zip_list *list);
uint32_t tu_crc32(uint32_t crc, const void *data, size_t bytes); /* begins with 0 */

typedef struct tu_safe_entry {
    const char *name;
    tu_file_array array;
} tu_safe_entry;
typedef struct tu_safe_list {
    size_t count, capacity;
    tu_safe_entry *entries;
    size_t pair_count, pair_capacity;
    const char **pairs; /* key, value, key, value, … of the metadata */
    char *text;
} tu_safe_list;
/* End it with tu_safe_free; on failure there is nothing to end. */
tutti_status tu_safe_parse(const tu_reader *reader, tu_safe_list *list);
void tu_safe_free(tu_safe_list *list);

/* Whether no two of these names are equal; else writes the error. */
tutti_status tu_names_differ(const char *where, size_t count, const char *const *names);

/* ---- tensors from and to files (file.c) ---- */

/* A tensor with the array's elements, owned by the scope; NULL with the pending error set. `crc` (may be NULL) goes on
 * over its bytes. */
tt_tensor *tu_reader_tensor(const tu_reader *reader, const tu_file_array *array, uint32_t *crc);
tt_tensor *tu_npy_tensor(const tu_reader *reader, const char *where, uint64_t offset, uint64_t bytes, uint32_t *crc);

/* A list of `count` that goes with the scope. `text_bytes` are for the names, to be filled in by the caller. */
typedef struct tu_list_room {
    tt_tensor **tensors;
    char **names;
    char *text;
} tu_list_room;
bool tu_list_room_make(size_t count, size_t text_bytes, tu_list_room *room);

/* A file that is being written under another name, in the same folder. */
typedef struct tu_writer {
    const char *who;
    int descriptor;
    char *target, *temporary;
    uint64_t written;
    uint32_t crc; /* of everything since it was set to 0 */
    bool counts_crc;
} tu_writer;

tutti_status tu_writer_open(const char *who, const char *path, tu_writer *writer);
tutti_status tu_writer_put(tu_writer *writer, const void *data, size_t bytes);
tutti_status tu_writer_put_at(tu_writer *writer, uint64_t offset, const void *data,
                              size_t bytes);                              /* over what is written */
tutti_status tu_writer_put_tensor(tu_writer *writer, const tt_tensor *x); /* row-major */
/* Gives the file its name if `status` is TUTTI_OK, else removes it; returns the first error. */
tutti_status tu_writer_close(tu_writer *writer, tutti_status status);

/* Whether these can be saved: live cpu tensors with all their bytes, names there, UTF-8, different. `names` NULL: a
 * single tensor. */
tutti_status tu_save_check(const char *who, tt_tensor_list tensors, const char *const *names);

#define TU_NPY_HEADER 256
/* The .npy header of x; its length is a multiple of 64. */
tutti_status tu_npy_header(const char *who, const tt_tensor *x, char header[TU_NPY_HEADER], size_t *bytes);

static inline uint64_t tu_load_little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}
static inline uint8_t *tu_store_little(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> (8 * i));
    return at + bytes;
}

#endif
