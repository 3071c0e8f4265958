/* SPDX-License-Identifier: Apache-2.0
 *
 * The file store: a file that is only ever appended to, shared by all who can open it, in the format of PyTorch's
 * FileStore.
 *
 *     record:    uint32 key length, key, uint32 value length, value     (host byte order; a user's key has "/" in
 * front) deletion:  a record whose key is "-" and the stored key, with an empty value "refcount/" counts open handles,
 * "cleanup/" closed ones: whoever closes the last of the expected ones removes the file
 *
 * flock(2) on the whole file: exclusive to write, shared to read. Each handle keeps what it has read and reads on from
 * there. A writer that was killed half-way leaves the beginning of a record; the next writer cuts it off.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "store/store.h"
#include "store/table.h"

#define LONGEST_PAUSE (10 * TU_MILLISECOND)
#define CLOSE_TIME (10 * TU_SECOND) /* for the lock when a handle is closed */
#define KEY_LIMIT (1u << 20)        /* of a record: more is no record */
#define VALUE_LIMIT (1u << 30)

typedef struct file_store {
    tutti_store store;
    char *path;
    int workers;
    int descriptor;
    pthread_mutex_t lock; /* of this handle; around the file's lock */
    tu_table cache;       /* by stored key */
    off_t read_to;        /* the cache holds the file up to here */
} file_store;

static file_store *as_file(tutti_store *store) {
    return (file_store *)store;
}

/* ---- locks, with a deadline ---- */

static int64_t rest(int64_t pause, int64_t deadline) {
    int64_t left = tu_deadline_left(deadline);
    struct timespec time = { .tv_nsec = pause < left ? pause : left };
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
    return pause * 2 < LONGEST_PAUSE ? pause * 2 : LONGEST_PAUSE;
}

static tutti_status lock_file(file_store *file, int how, int64_t deadline) {
    int64_t pause = TU_MILLISECOND / 50;
    while (flock(file->descriptor, how | LOCK_NB) != 0) {
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            return tu_error_system(errno, "the file store %s cannot be locked (flock)", file->path);
        if (tu_deadline_left(deadline) == 0)
            return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: the file store %s stayed locked by another process",
                            file->path);
        tutti_status status = tu_watch_look();
        if (status != TUTTI_OK)
            return status;
        pause = rest(pause, deadline);
    }
    return TUTTI_OK;
}

/* ---- reading on ---- */

static tutti_status damaged(const file_store *file, off_t offset) {
    return tu_error(TUTTI_ERROR_PROTOCOL,
                    "%s is not a file store, or it is damaged at byte %jd; remove it and start again", file->path,
                    (intmax_t)offset);
}

/* What a record's key may begin with. */
static bool known_key(const uint8_t *key, size_t bytes) {
    return bytes > 0 && (key[0] == '/' || key[0] == '-' || key[0] == 'r' || key[0] == 'c');
}

typedef enum record_state {
    RECORD_WHOLE,
    RECORD_PARTIAL,
    RECORD_BAD
} record_state;

typedef struct record {
    const uint8_t *key, *value;
    uint32_t key_bytes, value_bytes;
    size_t bytes; /* altogether */
} record;

static record_state record_at(const uint8_t *data, size_t bytes, record *record) {
    if (bytes < sizeof(uint32_t))
        return RECORD_PARTIAL;
    memcpy(&record->key_bytes, data, sizeof(uint32_t));
    if (record->key_bytes == 0 || record->key_bytes > KEY_LIMIT)
        return RECORD_BAD;
    record->key = data + sizeof(uint32_t);
    if (bytes > sizeof(uint32_t) && !known_key(record->key, 1))
        return RECORD_BAD;
    size_t value_at = 2 * sizeof(uint32_t) + record->key_bytes;
    if (bytes < value_at)
        return RECORD_PARTIAL;
    memcpy(&record->value_bytes, data + value_at - sizeof(uint32_t), sizeof(uint32_t));
    if (record->value_bytes > VALUE_LIMIT)
        return RECORD_BAD;
    record->value = data + value_at;
    record->bytes = value_at + record->value_bytes;
    return bytes < record->bytes ? RECORD_PARTIAL : RECORD_WHOLE;
}

static bool apply(tu_table *cache, const record *record) {
    if (record->key[0] == '-') {
        tu_entry *gone = tu_table_find(cache, record->key + 1, record->key_bytes - 1);
        if (gone != NULL) {
            tu_entry_unset(cache, gone);
            tu_table_tidy(cache, gone);
        }
        return true;
    }
    tu_entry *entry = tu_table_make(cache, record->key, record->key_bytes);
    if (entry == NULL)
        return false;
    bool set = tu_entry_set(cache, entry, record->value, record->value_bytes);
    tu_table_tidy(cache, entry);
    return set;
}

static tutti_status read_records(file_store *file, uint8_t *data, size_t bytes, bool *partial) {
    record record;
    *partial = false;
    for (size_t at = 0; at < bytes; at += record.bytes) {
        switch (record_at(data + at, bytes - at, &record)) {
        case RECORD_PARTIAL:
            *partial = true;
            return TUTTI_OK;
        case RECORD_BAD:
            return damaged(file, file->read_to);
        case RECORD_WHOLE:
            if (!apply(&file->cache, &record))
                return tu_error_memory("a key of the file store", record.bytes);
            file->read_to += (off_t)record.bytes;
        }
    }
    return TUTTI_OK;
}

static tutti_status read_bytes(file_store *file, uint8_t *data, size_t bytes) {
    for (size_t got = 0; got < bytes;) {
        ssize_t part = pread(file->descriptor, data + got, bytes - got, file->read_to + (off_t)got);
        if (part < 0 && errno == EINTR)
            continue;
        if (part < 0)
            return tu_error_system(errno, "the file store %s cannot be read", file->path);
        if (part == 0)
            return tu_error(TUTTI_ERROR_STORE, "the file store %s became shorter while it was read", file->path);
        got += (size_t)part;
    }
    return TUTTI_OK;
}

/* Reads what has come since; the file is locked. With the exclusive lock, a record that breaks off has no writer any
 * more. */
static tutti_status read_on(file_store *file, bool exclusive) {
    struct stat now;
    if (fstat(file->descriptor, &now) != 0)
        return tu_error_system(errno, "the file store %s cannot be examined", file->path);
    if (now.st_size < file->read_to)
        return tu_error(TUTTI_ERROR_STORE, "the file store %s was cut or replaced by somebody", file->path);
    if (now.st_size == file->read_to)
        return TUTTI_OK;
    size_t bytes = (size_t)(now.st_size - file->read_to);
    uint8_t *data = malloc(bytes);
    if (data == NULL)
        return tu_error_memory("new records of the file store", bytes);
    bool partial;
    tutti_status status = read_bytes(file, data, bytes);
    if (status == TUTTI_OK)
        status = read_records(file, data, bytes, &partial);
    free(data);
    if (status == TUTTI_OK && partial && exclusive && ftruncate(file->descriptor, file->read_to) != 0)
        return tu_error_system(errno, "the broken end of the file store %s cannot be cut off", file->path);
    return status;
}

/* ---- a turn: lock, read on, work, unlock ---- */

typedef struct turn {
    file_store *file;
    int64_t deadline;
} turn;

static tutti_status turn_end(turn *turn, tutti_status status) {
    flock(turn->file->descriptor, LOCK_UN);
    pthread_mutex_unlock(&turn->file->lock);
    return status;
}

static tutti_status turn_begin(turn *turn, tutti_store *store, bool exclusive, int64_t timeout_ns) {
    *turn = (struct turn){ as_file(store), tu_deadline(timeout_ns) };
    if (!tu_mutex_lock_until(&turn->file->lock, turn->deadline))
        return tu_error(TUTTI_ERROR_TIMEOUT,
                        "timeout: another thread's call on this handle of the file store took too long; clone "
                        "the store for each thread");
    tutti_status status = lock_file(turn->file, exclusive ? LOCK_EX : LOCK_SH, turn->deadline);
    if (status != TUTTI_OK) {
        pthread_mutex_unlock(&turn->file->lock);
        return status;
    }
    status = read_on(turn->file, exclusive);
    return status == TUTTI_OK ? TUTTI_OK : turn_end(turn, status);
}

static tutti_status write_turn(turn *turn, tutti_store *store) {
    return turn_begin(turn, store, true, tutti_store_timeout(store));
}

/* Appends one record and takes it into the cache; the key's parts are joined. */
static tutti_status append_record(turn *turn, const char *before, const char *key, const void *value, size_t bytes) {
    file_store *file = turn->file;
    size_t before_bytes = strlen(before), key_bytes = strlen(key);
    if (bytes > VALUE_LIMIT)
        return tu_error(TUTTI_ERROR_RANGE,
                        "a value of %zu bytes for key %.200s is too long for a file store; at most %u are possible",
                        bytes, key, VALUE_LIMIT);
    uint32_t lengths[2] = { (uint32_t)(before_bytes + key_bytes), (uint32_t)bytes };
    size_t total = sizeof lengths + before_bytes + key_bytes + bytes;
    uint8_t *data = malloc(total);
    if (data == NULL)
        return tu_error_memory("a record of the file store", total);
    uint8_t *at = data;
    memcpy(at, &lengths[0], sizeof lengths[0]);
    memcpy(at += sizeof lengths[0], before, before_bytes);
    memcpy(at += before_bytes, key, key_bytes);
    memcpy(at += key_bytes, &lengths[1], sizeof lengths[1]);
    if (bytes > 0)
        memcpy(at + sizeof lengths[1], value, bytes);

    tutti_status status = TUTTI_OK;
    for (size_t done = 0; done < total && status == TUTTI_OK;) {
        ssize_t part = pwrite(file->descriptor, data + done, total - done, file->read_to + (off_t)done);
        if (part > 0)
            done += (size_t)part;
        else if (part == 0 || errno != EINTR)
            status = tu_error_system(part == 0 ? ENOSPC : errno, "the file store %s cannot be written", file->path);
    }
    bool partial;
    if (status == TUTTI_OK)
        status = read_records(file, data, total, &partial);
    else if (ftruncate(file->descriptor, file->read_to) != 0)
        tu_error_append("; nor can the broken record be cut off");
    free(data);
    return status;
}

static tu_entry *find(file_store *file, const char *key) {
    char stored[1 + TU_STORE_KEY];
    size_t bytes = strlen(key);
    stored[0] = '/';
    memcpy(stored + 1, key, bytes);
    return tu_table_find(&file->cache, stored, bytes + 1);
}

/* ---- the operations ---- */

static tutti_status file_set(tutti_store *store, const char *key, const void *value, size_t bytes) {
    turn turn;
    tutti_status status = write_turn(&turn, store);
    return status == TUTTI_OK ? turn_end(&turn, append_record(&turn, "/", key, value, bytes)) : status;
}

static tutti_status add_locked(turn *turn, const char *before, const char *key, tu_entry *entry, int64_t amount,
                               int64_t *sum) {
    int64_t number = 0;
    char text[TU_STORE_NUMBER];
    if (entry != NULL && (!tu_store_parse(entry->value, entry->bytes, &number)))
        return tu_store_not_a_number(key);
    if (__builtin_add_overflow(number, amount, &number))
        return tu_store_not_a_number(key);
    tutti_status status = append_record(turn, before, key, text, tu_store_print(number, text));
    if (status == TUTTI_OK)
        *sum = number;
    return status;
}

static tutti_status file_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum) {
    turn turn;
    tutti_status status = write_turn(&turn, store);
    if (status != TUTTI_OK)
        return status;
    return turn_end(&turn, add_locked(&turn, "/", key, find(turn.file, key), amount, sum));
}

static tutti_status file_compare_set(tutti_store *store, const char *key, const void *expected, size_t expected_bytes,
                                     const void *desired, size_t desired_bytes, void **value, size_t *bytes) {
    turn turn;
    tutti_status status = write_turn(&turn, store);
    if (status != TUTTI_OK)
        return status;
    tu_entry *entry = find(turn.file, key);
    bool sets = entry != NULL ? tu_entry_equals(entry, expected, expected_bytes) : expected_bytes == 0;
    const void *result = sets ? desired : entry != NULL ? entry->value : expected;
    size_t result_bytes = sets ? desired_bytes : entry != NULL ? entry->bytes : expected_bytes;
    void *copy;
    status = tu_store_copy(result, result_bytes, &copy);
    if (status != TUTTI_OK)
        return turn_end(&turn, status);
    if (sets)
        status = append_record(&turn, "/", key, desired, desired_bytes);
    if (status == TUTTI_OK) {
        *value = copy;
        *bytes = result_bytes;
    } else {
        free(copy);
    }
    return turn_end(&turn, status);
}

/* The record holds the whole new value: made under the lock, so that no two appends meet. */
static tutti_status file_append(tutti_store *store, const char *key, const void *value, size_t bytes) {
    turn turn;
    tutti_status status = write_turn(&turn, store);
    if (status != TUTTI_OK)
        return status;
    const tu_entry *entry = find(turn.file, key);
    size_t old_bytes = entry != NULL ? entry->bytes : 0;
    char *joined = malloc(old_bytes + bytes + 1);
    if (joined == NULL)
        return turn_end(&turn, tu_error_memory("an appended value", old_bytes + bytes));
    if (old_bytes > 0)
        memcpy(joined, entry->value, old_bytes);
    if (bytes > 0)
        memcpy(joined + old_bytes, value, bytes);
    status = append_record(&turn, "/", key, joined, old_bytes + bytes);
    free(joined);
    return turn_end(&turn, status);
}

static tutti_status file_delete(tutti_store *store, const char *key, bool *existed) {
    turn turn;
    tutti_status status = write_turn(&turn, store);
    if (status != TUTTI_OK)
        return status;
    bool there = find(turn.file, key) != NULL;
    if (there)
        status = append_record(&turn, "-/", key, NULL, 0);
    if (status == TUTTI_OK)
        *existed = there;
    return turn_end(&turn, status);
}

/* How many of the keys, from the first on, are there. */
static size_t count_present(file_store *file, const char *const *keys, size_t count) {
    size_t present = 0;
    while (present < count && find(file, keys[present]) != NULL)
        present++;
    return present;
}

/* Looks again and again, with pauses that grow to 10 ms. Ends with the turn begun when all are there. */
static tutti_status wait_turn(turn *turn, tutti_store *store, const char *const *keys, size_t count,
                              int64_t timeout_ns) {
    int64_t deadline = tu_deadline(timeout_ns), pause = TU_MILLISECOND / 20;
    for (size_t seen = 0;;) {
        int64_t left = tu_deadline_left(deadline);
        tutti_status status = turn_begin(turn, store, false, left > 0 ? left : TU_MILLISECOND);
        if (status != TUTTI_OK)
            return status;
        seen += count_present(turn->file, keys + seen, count - seen);
        if (seen == count)
            return TUTTI_OK;
        turn_end(turn, TUTTI_OK);
        if (left == 0)
            return tu_store_wait_timeout(keys, count, timeout_ns);
        status = tu_watch_look();
        if (status != TUTTI_OK)
            return status;
        pause = rest(pause, deadline);
    }
}

static tutti_status file_wait(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns) {
    turn turn;
    tutti_status status = wait_turn(&turn, store, keys, count, timeout_ns);
    return status == TUTTI_OK ? turn_end(&turn, TUTTI_OK) : status;
}

static tutti_status file_get(tutti_store *store, const char *key, int64_t timeout_ns, void **value, size_t *bytes) {
    turn turn;
    tutti_status status = wait_turn(&turn, store, &key, 1, timeout_ns);
    if (status != TUTTI_OK)
        return status;
    const tu_entry *entry = find(turn.file, key); /* seen in this turn */
    status = tu_store_copy(entry->value, entry->bytes, value);
    if (status == TUTTI_OK)
        *bytes = entry->bytes;
    return turn_end(&turn, status);
}

static tutti_status file_check(tutti_store *store, const char *const *keys, size_t count, bool *present) {
    turn turn;
    tutti_status status = turn_begin(&turn, store, false, tutti_store_timeout(store));
    if (status != TUTTI_OK)
        return status;
    *present = count_present(turn.file, keys, count) == count;
    return turn_end(&turn, TUTTI_OK);
}

static tutti_status file_num_keys(tutti_store *store, int64_t *count) {
    turn turn;
    tutti_status status = turn_begin(&turn, store, false, tutti_store_timeout(store));
    if (status != TUTTI_OK)
        return status;
    *count = turn.file->cache.present;
    return turn_end(&turn, TUTTI_OK);
}

static tutti_status list_locked(file_store *file, char ***keys, size_t *count) {
    size_t present = (size_t)file->cache.present, bucket = 0, found = 0;
    const char **texts = malloc((present + 1) * sizeof *texts);
    size_t *lengths = malloc((present + 1) * sizeof *lengths);
    tutti_status status;
    if (texts == NULL || lengths == NULL) {
        status = tu_error_memory("a list of keys", present * sizeof *texts);
        goto free_lists;
    }
    for (tu_entry *entry = NULL; (entry = tu_table_next(&file->cache, &bucket, entry)) != NULL;) {
        if (entry->key[0] != '/')
            continue;
        texts[found] = (const char *)entry->key + 1;
        lengths[found++] = entry->key_bytes - 1;
    }
    status = tu_store_key_block(texts, lengths, found, keys);
    if (status == TUTTI_OK)
        *count = found;
free_lists:
    free(lengths);
    free(texts);
    return status;
}

static tutti_status file_list_keys(tutti_store *store, char ***keys, size_t *count) {
    turn turn;
    tutti_status status = turn_begin(&turn, store, false, tutti_store_timeout(store));
    return status == TUTTI_OK ? turn_end(&turn, list_locked(turn.file, keys, count)) : status;
}

/* ---- opening and closing ---- */

/* Adds to one of the file's own counters. */
static tutti_status count(turn *turn, const char *counter, int64_t amount, int64_t *sum) {
    return add_locked(turn, "", counter, tu_table_find(&turn->file->cache, counter, strlen(counter)), amount, sum);
}

static void free_file(file_store *file) {
    if (file->descriptor >= 0)
        close(file->descriptor);
    tu_table_clear(&file->cache);
    pthread_mutex_destroy(&file->lock);
    free(file->path);
    free(file);
}

static bool was_removed(const file_store *file) {
    struct stat now;
    return fstat(file->descriptor, &now) == 0 && now.st_nlink == 0;
}

static void file_destroy(tutti_store *store) {
    file_store *file = as_file(store);
    turn turn;
    tutti_error_copy before; /* closing has no status: whatever fails here leaves the caller's last error alone */
    tu_error_save(&before);
    if (!tu_store_forked(store) && !was_removed(file) && turn_begin(&turn, store, true, CLOSE_TIME) == TUTTI_OK) {
        int64_t open_handles, closed_handles;
        if (count(&turn, "refcount/", -1, &open_handles) == TUTTI_OK &&
            count(&turn, "cleanup/", 1, &closed_handles) == TUTTI_OK && file->workers > 0 && open_handles == 0 &&
            closed_handles >= file->workers)
            unlink(file->path);
        turn_end(&turn, TUTTI_OK);
    }
    (void)tu_error_restore(&before);
    free_file(file);
}

static tutti_status open_handle(const char *path, int workers, int64_t timeout_ns, tutti_store **store);

static tutti_status file_clone(tutti_store *store, tutti_store **clone) {
    return open_handle(as_file(store)->path, as_file(store)->workers, tutti_store_timeout(store), clone);
}

static const tu_store_kind file_kind = {
    .name = "file",
    .set = file_set,
    .get = file_get,
    .add = file_add,
    .append = file_append,
    .compare_set = file_compare_set,
    .wait = file_wait,
    .check = file_check,
    .remove = file_delete,
    .num_keys = file_num_keys,
    .list_keys = file_list_keys,
    .clone = file_clone,
    .destroy = file_destroy,
};

/* Opens the file and counts this handle. *again: the file was removed at this moment by the last of its former
 * users. */
static tutti_status join(file_store *file, bool *again) {
    *again = false;
    file->descriptor = open(file->path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file->descriptor < 0)
        return tu_error_system(errno, "the file store %s cannot be opened", file->path);
    turn turn;
    int64_t handles;
    tutti_status status = turn_begin(&turn, &file->store, true, tutti_store_timeout(&file->store));
    if (status != TUTTI_OK)
        return status;
    *again = was_removed(file);
    return turn_end(&turn, *again ? TUTTI_OK : count(&turn, "refcount/", 1, &handles));
}

static tutti_status open_handle(const char *path, int workers, int64_t timeout_ns, tutti_store **store) {
    file_store *file = calloc(1, sizeof *file);
    if (file == NULL)
        return tu_error_memory("a file store", sizeof *file);
    tu_store_init(&file->store, &file_kind, timeout_ns);
    pthread_mutex_init(&file->lock, NULL);
    file->descriptor = -1;
    file->workers = workers;
    file->path = strdup(path);
    tutti_status status = file->path != NULL ? TUTTI_OK : tu_error_memory("a path", strlen(path));
    int64_t deadline = tu_deadline(tutti_store_timeout(&file->store));
    for (bool again = true; again && status == TUTTI_OK;) {
        status = join(file, &again);
        if (status == TUTTI_OK && again) {
            close(file->descriptor);
            file->descriptor = -1;
            tu_table_clear(&file->cache);
            file->read_to = 0;
            if (tu_deadline_left(deadline) == 0)
                status = tu_error(TUTTI_ERROR_TIMEOUT, "timeout: the file store %s is removed again and again", path);
        }
    }
    if (status != TUTTI_OK) {
        free_file(file);
        return status;
    }
    *store = &file->store;
    return TUTTI_OK;
}

tutti_status tutti_store_open_file(const char *path, const tutti_file_store_options *options, tutti_store **store) {
    tutti_file_store_options full = TUTTI_FILE_STORE_OPTIONS_INIT;
    tutti_status status = tu_options_copy("tutti_file_store_options", options, &full, sizeof full);
    if (status != TUTTI_OK)
        return status;
    if (path == NULL || store == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store open_file: the %s is NULL",
                        path == NULL ? "path" : "place for the result");
    if (full.timeout_ns < 0 || full.workers < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store open_file: timeout_ns and workers must not be negative");
    return open_handle(path, full.workers, full.timeout_ns, store);
}
