/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder of the cache and its files.
 */
#include "loops/cache.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "loops/hash.h"

/* ---- the folder ---- */

static bool refuse(char *reason, size_t reason_size, const char *path, const char *what) {
    snprintf(reason, reason_size, "%s %s", path, what);
    return false;
}

/* Whether what the descriptor shows belongs to this user, and nobody else can write it. */
static bool is_ours(int descriptor, mode_t type) {
    struct stat about;
    return fstat(descriptor, &about) == 0 && (about.st_mode & S_IFMT) == type && about.st_uid == geteuid() &&
           (about.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

static bool make_folder(const char *path) {
    return mkdir(path, 0700) == 0 || errno == EEXIST;
}

bool tu_cache_open(tu_cache *cache, char *reason, size_t reason_size) {
    const char *base = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    char parent[PATH_MAX - 16];
    cache->folder = -1;
    int length = base != NULL && base[0] == '/'   ? snprintf(parent, sizeof parent, "%s", base)
                 : home != NULL && home[0] == '/' ? snprintf(parent, sizeof parent, "%s/.cache", home)
                                                  : -1;
    if (length < 0 || (size_t)length >= sizeof parent)
        return refuse(reason, reason_size, "the cache", "has no place: neither XDG_CACHE_HOME nor HOME names a folder");
    snprintf(cache->path, sizeof cache->path, "%s/tutti", parent);
    char why[128];
    if (!make_folder(parent) || !make_folder(cache->path)) {
        snprintf(why, sizeof why, "cannot be made for the cache: %s", strerror(errno));
        return refuse(reason, reason_size, cache->path, why);
    }
    cache->folder = open(cache->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (cache->folder < 0)
        return refuse(reason, reason_size, cache->path,
                      errno == ELOOP || errno == ENOTDIR ? "is not a folder" : "cannot be opened for the cache");
    if (is_ours(cache->folder, S_IFDIR))
        return true;
    tu_cache_close(cache);
    return refuse(reason, reason_size, cache->path,
                  "is not this user's alone: another owns it or can write it (chmod 700, or remove it)");
}

void tu_cache_close(tu_cache *cache) {
    if (cache->folder >= 0)
        close(cache->folder);
    cache->folder = -1;
}

void tu_cache_name(char *name, size_t size, const char *end) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t number = (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)(uintptr_t)&now << 16;
    char random[13];
    for (size_t i = 0; i + 1 < sizeof random; i++, number = number * 6364136223846793005u + 1442695040888963407u)
        random[i] = letters[(number >> 33) % (sizeof letters - 1)];
    random[sizeof random - 1] = 0;
    snprintf(name, size, "making-%ld-%s%s", (long)getpid(), random, end);
}

/* ---- writing ---- */

/* A file that grows beyond its limit is an error of write, and no signal that ends the process. */
static bool write_all(int file, const void *data, size_t bytes) {
    sigset_t large, before;
    sigemptyset(&large);
    sigaddset(&large, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &large, &before);
    const char *at = data;
    ssize_t done = 0;
    while (bytes > 0 && (done = write(file, at, bytes)) != 0) {
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            break;
        at += done;
        bytes -= (size_t)done;
    }
    int cause = errno;
    if (!sigismember(&before, SIGXFSZ)) {
        while (sigtimedwait(&large, NULL, &(struct timespec){ 0, 0 }) == SIGXFSZ)
            continue;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    errno = cause;
    return bytes == 0;
}

static char *read_all(int file, size_t *bytes) {
    struct stat about;
    if (fstat(file, &about) != 0 || about.st_size < 0 || about.st_size > (off_t)1 << 30)
        return NULL;
    *bytes = (size_t)about.st_size;
    char *data = malloc(*bytes + 1);
    size_t done = 0;
    while (data != NULL && done < *bytes) {
        ssize_t more = pread(file, data + done, *bytes - done, (off_t)done);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            break;
        done += (size_t)more;
    }
    if (data == NULL || done < *bytes) {
        free(data);
        return NULL;
    }
    data[done] = 0;
    return data;
}

static bool put_in_place(const tu_cache *cache, int file, const char *made, const char *name) {
    return fsync(file) == 0 && renameat(cache->folder, made, cache->folder, name) == 0 && fsync(cache->folder) == 0;
}

bool tu_cache_write(const tu_cache *cache, const char *name, const char *text, char *reason, size_t reason_size) {
    size_t bytes;
    int file = openat(cache->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file >= 0) {
        char *there = is_ours(file, S_IFREG) ? read_all(file, &bytes) : NULL;
        bool same = there != NULL && strcmp(there, text) == 0;
        free(there);
        close(file);
        if (same)
            return true;
    }
    char made[64];
    tu_cache_name(made, sizeof made, ".txt");
    file = openat(cache->folder, made, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool good = file >= 0 && write_all(file, text, strlen(text)) && put_in_place(cache, file, made, name);
    if (!good) {
        snprintf(reason, reason_size, "%s/%s cannot be written: %s", cache->path, name, strerror(errno));
        unlinkat(cache->folder, made, 0);
    }
    if (file >= 0)
        close(file);
    return good;
}

/* ---- objects ---- */

/* What stands at the end of a file: this word, and the hash of the name and of what comes before. */
typedef struct ending {
    char word[8];
    uint64_t hash[2];
} ending;

static ending ending_of(const char *name, const char *data, size_t bytes) {
    tu_hash hash = tu_hash_begin();
    tu_hash_add(&hash, name, strlen(name));
    tu_hash_add(&hash, data, bytes);
    return (ending){ { 'T', 'u', 't', 't', 'i', 's', 'o', '1' },
                     { (uint64_t)(hash.state >> 64), (uint64_t)hash.state } };
}

bool tu_cache_finish(const tu_cache *cache, const char *made, const char *name, char *reason, size_t reason_size) {
    size_t bytes = 0;
    int file = openat(cache->folder, made, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    char *data = file >= 0 && fchmod(file, 0600) == 0 ? read_all(file, &bytes) : NULL;
    bool good = data != NULL;
    if (good) {
        ending last = ending_of(name, data, bytes);
        good = lseek(file, 0, SEEK_END) >= 0 && write_all(file, &last, sizeof last) &&
               put_in_place(cache, file, made, name);
    }
    if (!good) {
        snprintf(reason, reason_size, "%s/%s cannot be written: %s", cache->path, name, strerror(errno));
        unlinkat(cache->folder, made, 0);
    }
    free(data);
    if (file >= 0)
        close(file);
    return good;
}

/* The contents of a file that is whole, without what stands at its end; NULL where it is not. */
static char *read_whole(int file, const char *name, size_t *bytes) {
    char *data = is_ours(file, S_IFREG) ? read_all(file, bytes) : NULL;
    bool whole = data != NULL && *bytes > sizeof(ending);
    if (whole) {
        *bytes -= sizeof(ending);
        ending last = ending_of(name, data, *bytes);
        whole = memcmp(data + *bytes, &last, sizeof last) == 0;
    }
    if (whole)
        return data;
    free(data);
    return NULL;
}

/* A file's time is that of its last use, to the hour: what is used stays in the cache. */
static void note_use(int file) {
    struct stat about;
    struct timespec now;
    if (fstat(file, &about) == 0 && clock_gettime(CLOCK_REALTIME, &now) == 0 &&
        now.tv_sec - about.st_mtim.tv_sec > 3600)
        (void)!futimens(file, NULL);
}

void *tu_cache_read(const tu_cache *cache, const char *name, size_t *bytes) {
    int file = openat(cache->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0)
        return NULL;
    char *data = read_whole(file, name, bytes);
    if (data != NULL)
        note_use(file);
    close(file);
    return data;
}

void *tu_cache_load(const tu_cache *cache, const char *name) {
    size_t bytes = 0;
    char *data = tu_cache_read(cache, name, &bytes), path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", cache->path, name);
    void *handle = data != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    free(data);
    return handle;
}

bool tu_cache_store(const tu_cache *cache, const char *name, const void *data, size_t bytes, char *reason,
                    size_t reason_size) {
    char made[64];
    tu_cache_name(made, sizeof made, ".bin");
    int file = openat(cache->folder, made, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool good = file >= 0 && write_all(file, data, bytes);
    if (!good) {
        snprintf(reason, reason_size, "%s/%s cannot be written: %s", cache->path, name, strerror(errno));
        unlinkat(cache->folder, made, 0);
    }
    if (file >= 0)
        close(file);
    return good && tu_cache_finish(cache, made, name, reason, reason_size);
}

/* ---- locks ---- */

/* One file has the locks of all names, each a byte of it. */
int tu_cache_lock(const tu_cache *cache, const char *name) {
    tu_hash hash = tu_hash_begin();
    tu_hash_add(&hash, name, strlen(name));
    int file = openat(cache->folder, "locks", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return TU_CACHE_NONE;
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)(hash.state >> 4 & INT64_MAX >> 1), .l_len = 1
    };
    if (fcntl(file, F_OFD_SETLK, &lock) == 0)
        return file;
    bool taken = errno == EAGAIN || errno == EACCES;
    close(file);
    return taken ? TU_CACHE_TAKEN : TU_CACHE_NONE;
}

void tu_cache_unlock(int lock) {
    if (lock >= 0)
        close(lock);
}
