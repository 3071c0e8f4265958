/* SPDX-License-Identifier: Apache-2.0
 *
 * Between tensors and files: elements in and out, lists that go with the scope, and files that appear whole or not at
 * all.
 */
#include "tensor/file.h"
#include "tensor/on_device.h"
#include "tensor/stage.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tensor/create.h"
#include "tensor/loop.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

#define CHUNK ((size_t)1 << 20)

/* ---- in ---- */

static void swap_bytes(uint8_t *data, uint64_t bytes, size_t width) {
    for (uint64_t at = 0; width > 1 && at < bytes; at += width) {
        for (size_t i = 0; i < width / 2; i++) {
            uint8_t byte = data[at + i];
            data[at + i] = data[at + width - 1 - i];
            data[at + width - 1 - i] = byte;
        }
    }
}

tt_tensor *tu_reader_tensor(const tu_reader *reader, const tu_file_array *array, uint32_t *crc) {
    tt_dims sizes = tt_dims_of(array->ndim, array->sizes), strides = { .count = array->ndim };
    int64_t step = 1;
    for (int i = 0; i < array->ndim && array->bytes > 0; i++) {
        strides.at[i] = step;
        step *= array->sizes[i];
    }
    bool fortran = array->fortran && array->ndim > 1 && array->bytes > 0;
    tt_tensor *x = fortran ? tt_empty_strided(sizes, strides, array->dtype, TU_OF_HOST)
                           : tt_empty(sizes, array->dtype, TU_OF_HOST);
    uint8_t *data = x == NULL || array->bytes == 0 ? NULL : tu_pointer(x);
    for (uint64_t done = 0; data != NULL && done < array->bytes;) {
        size_t now = array->bytes - done < CHUNK ? (size_t)(array->bytes - done) : CHUNK;
        if (tu_pending_take(tu_reader_get(reader, array->offset + done, data + done, now)) != TUTTI_OK)
            return NULL;
        if (crc != NULL)
            *crc = tu_crc32(*crc, data + done, now);
        done += now;
    }
    if (data != NULL && array->swapped)
        swap_bytes(data, array->bytes, tu_dtype_bytes[array->dtype] / (tu_is_complex(array->dtype) ? 2 : 1));
    return x;
}

bool tu_list_room_make(size_t count, size_t text_bytes, tu_list_room *room) {
    char *memory = tu_scope_memory(count * (sizeof(tt_tensor *) + sizeof(char *)) + text_bytes + 1);
    if (memory == NULL)
        return false;
    *room = (tu_list_room){ (void *)memory, (void *)(memory + count * sizeof(tt_tensor *)),
                            memory + count * (sizeof(tt_tensor *) + sizeof(char *)) };
    return true;
}

tt_tensor *tt_named(tt_named_list list, const char *name) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (name == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "named: name is NULL");
        return NULL;
    }
    for (size_t i = 0; i < list.count; i++)
        if (strcmp(list.names[i], name) == 0)
            return list.at[i];
    tu_error(TUTTI_ERROR_NOT_FOUND, "named: there is no tensor %s among %zu", tu_quote(name, strlen(name)).text,
             list.count);
    for (size_t i = 0; i < list.count && i < 16; i++)
        tu_error_append("%s%s", i == 0 ? ": " : ", ", tu_quote(list.names[i], strlen(list.names[i])).text);
    if (list.count > 16)
        tu_error_append(", and more");
    tu_pending_take(TUTTI_ERROR_NOT_FOUND);
    return NULL;
}

/* ---- out ---- */

tutti_status tu_save_check(const char *who, tt_tensor_list tensors, const char *const *names) {
    if (tensors.count > 0 && tensors.at == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the list of tensors is NULL", who);
    if (tensors.count > SIZE_MAX / 64)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %zu tensors are too many", who, tensors.count);
    for (size_t i = 0; i < tensors.count; i++) {
        char what[48] = "x";
        if (names != NULL)
            snprintf(what, sizeof what, "tensors[%zu]", i);
        tutti_status status = tu_tensor_check(who, what, tensors.at[i]);
        if (status == TUTTI_OK && tensors.at[i]->device == TUTTI_META)
            status = tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: %s, %s, has a shape but no data", who, what,
                              tu_describe(tensors.at[i]));
        if (status == TUTTI_OK)
            status = tu_tensor_ready(who, what, tensors.at[i]);
        if (status != TUTTI_OK)
            return status;
        if (names != NULL && (names[i] == NULL || names[i][0] == 0 || !tu_utf8(names[i], strlen(names[i]))))
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: names[%zu] is %s", who, i,
                            names[i] == NULL   ? "NULL"
                            : names[i][0] == 0 ? "empty"
                                               : "not UTF-8");
    }
    return names == NULL ? TUTTI_OK : tu_names_differ(who, tensors.count, names);
}

/* Which file it will be: links are followed, and what may not be written over is an error. */
static tutti_status resolve(const char *who, const char *path, char **target, mode_t *mode) {
    struct stat about;
    if (path == NULL || path[0] == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: path is %s", who, path == NULL ? "NULL" : "empty");
    bool link = lstat(path, &about) == 0 && S_ISLNK(about.st_mode);
    *target = link ? realpath(path, NULL) : strdup(path);
    if (*target == NULL && link && errno != ENOMEM)
        return tu_error_system(errno, "%s: the link \"%s\" leads nowhere", who, path);
    if (*target == NULL)
        return tu_error_memory("a path", strlen(path) + 1);
    *mode = 0;
    if (stat(*target, &about) != 0)
        return TUTTI_OK; /* opening tells what is wrong, if anything is */
    if (!S_ISREG(about.st_mode))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: \"%s\" is %s, not a file", who, path,
                        S_ISDIR(about.st_mode) ? "a folder" : "a device or pipe");
    if (access(*target, W_OK) != 0)
        return tu_error_system(errno, "%s: \"%s\" may not be written", who, path);
    *mode = about.st_mode & 07777;
    return TUTTI_OK;
}

tutti_status tu_writer_open(const char *who, const char *path, tu_writer *writer) {
    mode_t mode = 0;
    *writer = (tu_writer){ .who = who, .descriptor = -1 };
    tutti_status status = resolve(who, path, &writer->target, &mode);
    if (status != TUTTI_OK)
        goto free_names;
    const char *slash = strrchr(writer->target, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash - writer->target) + 1, room = folder + 48;
    writer->temporary = malloc(room);
    if (writer->temporary == NULL) {
        status = tu_error_memory("a path", room);
        goto free_names;
    }
    memcpy(writer->temporary, writer->target, folder);
    for (int tries = 0; writer->descriptor < 0 && tries < 1000; tries++) {
        snprintf(writer->temporary + folder, room - folder, ".tutti-%d-%d", (int)gettid(), tries);
        writer->descriptor = open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->descriptor < 0 && errno != EEXIST)
            break;
    }
    if (writer->descriptor < 0) {
        status = tu_error_system(errno, "%s: no file can be made beside \"%s\"", who, path);
        goto free_names;
    }
    if (mode != 0 && fchmod(writer->descriptor, mode) != 0) {
        status = tu_error_system(errno, "%s: the new file cannot be given the permissions of \"%s\"", who, path);
        return tu_writer_close(writer, status);
    }
    return TUTTI_OK;
free_names:
    free(writer->target);
    free(writer->temporary);
    return status;
}

tutti_status tu_writer_put_at(tu_writer *writer, uint64_t offset, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        size_t most = bytes - done < CHUNK << 6 ? bytes - done : CHUNK << 6;
        ssize_t now = pwrite(writer->descriptor, (const char *)data + done, most, (off_t)(offset + done));
        if (now < 0 && errno == EINTR)
            continue;
        if (now <= 0)
            return tu_error_system(now == 0 ? EIO : errno,
                                   "%s: \"%s\" cannot be written after %llu bytes, and is left as it was", writer->who,
                                   writer->target, (unsigned long long)(offset + done));
        done += (size_t)now;
    }
    return TUTTI_OK;
}

tutti_status tu_writer_put(tu_writer *writer, const void *data, size_t bytes) {
    tutti_status status = TUTTI_OK;
    for (size_t done = 0; done < bytes && status == TUTTI_OK;) {
        size_t now = bytes - done < CHUNK ? bytes - done : CHUNK; /* so that the checksum finds them in the cache */
        if (writer->counts_crc)
            writer->crc = tu_crc32(writer->crc, (const char *)data + done, now);
        status = tu_writer_put_at(writer, writer->written, (const char *)data + done, now);
        writer->written += now;
        done += now;
    }
    return status;
}

/* Bools are any byte in memory, and 0 or 1 in a file. */
static tutti_status put_bools(tu_writer *writer, const uint8_t *data, int64_t count) {
    tutti_status status = TUTTI_OK;
    for (int64_t at = 0; at < count && status == TUTTI_OK; at += 4096) {
        uint8_t clean[4096];
        int64_t now = count - at < 4096 ? count - at : 4096;
        for (int64_t i = 0; i < now; i++)
            clean[i] = data[at + i] != 0;
        status = tu_writer_put(writer, clean, (size_t)now);
    }
    return status;
}

tutti_status tu_writer_put_tensor(tu_writer *writer, const tt_tensor *x) {
    if (x->numel == 0)
        return TUTTI_OK;
    tt_tensor *here = tu_on_host(x), *copy = here != NULL ? tu_stage_in(here, here->dtype) : NULL;
    tu_tensor_drop(here);
    if (copy == NULL)
        return TUTTI_ERROR_MEMORY;
    x = copy;
    tutti_status status = x->dtype == TUTTI_BOOL
                              ? put_bools(writer, tu_pointer(x), x->numel)
                              : tu_writer_put(writer, tu_pointer(x), (size_t)x->numel * tu_dtype_bytes[x->dtype]);
    tu_tensor_drop(copy);
    return status;
}

/* Bringing it to the disk before the new name keeps "all or nothing" also when the power goes, and late errors are
 * heard. */
tutti_status tu_writer_close(tu_writer *writer, tutti_status status) {
    if (status == TUTTI_OK && fsync(writer->descriptor) != 0 && errno != EINVAL)
        status = tu_error_system(errno, "%s: \"%s\" cannot be brought to the disk, and is left as it was", writer->who,
                                 writer->target);
    if (close(writer->descriptor) != 0 && status == TUTTI_OK)
        status = tu_error_system(errno, "%s: \"%s\" cannot be brought to the disk, and is left as it was", writer->who,
                                 writer->target);
    if (status == TUTTI_OK && rename(writer->temporary, writer->target) != 0)
        status = tu_error_system(errno, "%s: the new file cannot take the name \"%s\"", writer->who, writer->target);
    if (status != TUTTI_OK)
        unlink(writer->temporary);
    free(writer->temporary);
    free(writer->target);
    return status;
}
