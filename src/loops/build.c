/* SPDX-License-Identifier: Apache-2.0
 *
 * The system's compiler, bounded in time.
 */
#include "loops/build.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/settings.h"
#include "loops/cache.h"
#include "loops/hash.h"
#include "loops/text.h"

#define WORDS 32
#define LIMIT_SECONDS 60               /* of a build, unless TUTTI_CC_LIMIT says otherwise */
#define CACHE_BYTES ((int64_t)1 << 30) /* of all that is built, unless TUTTI_CC_CACHE says otherwise */
#define GRACE_MS 500                   /* for a compiler that was told to end */
#define MESSAGES 65536                 /* bytes of what it says that are kept; more it cannot write */

struct tu_builder {
    tu_cache cache;
    char command[PATH_MAX]; /* TUTTI_CC, cut into words */
    char *words[WORDS];     /* the command and the flags; the last are those of one call */
    int word_count;
    char include[PATH_MAX + 8];
    char lanes[TU_HASH_TEXT + 16];
    tu_hash key; /* of everything but the text */
    tu_build_limits limits;
};

int64_t tu_build_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void sleep_ms(int milliseconds) {
    poll(NULL, 0, milliseconds);
}

/* ---- the compiler ---- */

/* The file that a word means, by PATH where it has no slash. */
static bool find_program(const char *word, char *path, size_t size, struct stat *about) {
    const char *search = strchr(word, '/') != NULL ? "" : secure_getenv("PATH");
    if (search == NULL)
        search = "/usr/bin:/bin";
    for (;; search++) {
        int length = (int)strcspn(search, ":");
        snprintf(path, size, length > 0 ? "%.*s/%s" : "%.*s%s", length, search, word);
        if (stat(path, about) == 0 && S_ISREG(about->st_mode) && access(path, X_OK) == 0)
            return true;
        search += length;
        if (*search == 0)
            return false;
    }
}

static void add_word(tu_builder *builder, const char *word) {
    if (builder->word_count < WORDS)
        builder->words[builder->word_count++] = (char *)word;
}

static void add_flags(tu_builder *builder, tu_instructions level) {
    static const char *const common[] = { "-std=gnu17",
                                          "-O3",
                                          "-fno-math-errno",
                                          "-ffp-contract=off",
                                          "-fwrapv",
                                          "-fvisibility=hidden",
                                          "-fPIC",
                                          "-shared",
                                          "-w",
                                          "-pipe" };
    static const char *const avx2[] = { "-mavx2", "-mfma", "-mf16c" };
    static const char *const avx512[] = {
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"
    };
    for (size_t i = 0; i < sizeof common / sizeof *common; i++)
        add_word(builder, common[i]);
    for (size_t i = 0; level == TU_AVX2 && i < sizeof avx2 / sizeof *avx2; i++)
        add_word(builder, avx2[i]);
    for (size_t i = 0; level == TU_AVX512 && i < sizeof avx512 / sizeof *avx512; i++)
        add_word(builder, avx512[i]);
}

/* The compiler that is replaced is another one: by its path, size, time and place on the disk. */
static void add_key(tu_builder *builder, const char *path, const struct stat *about) {
    const uint64_t facts[] = { (uint64_t)about->st_size, (uint64_t)about->st_mtim.tv_sec,
                               (uint64_t)about->st_mtim.tv_nsec, (uint64_t)about->st_ino, (uint64_t)about->st_dev };
    builder->key = tu_hash_begin();
    tu_hash_add(&builder->key, path, strlen(path) + 1);
    tu_hash_add(&builder->key, facts, sizeof facts);
    for (int i = 1; i < builder->word_count; i++)
        tu_hash_add(&builder->key, builder->words[i], strlen(builder->words[i]) + 1);
}

tu_build_limits tu_build_limits_get(void) {
    const char *limit = secure_getenv("TUTTI_CC_LIMIT"), *most = secure_getenv("TUTTI_CC_CACHE");
    tu_build_limits limits = { LIMIT_SECONDS * 1000, CACHE_BYTES };
    int64_t given = 0;
    if (most != NULL && most[0] != 0 && tu_parse_bytes(most, &given) == TUTTI_OK && given >= 0)
        limits.cache_bytes = given;
    if (limit != NULL && limit[0] != 0 && tu_parse_duration(limit, &given) == TUTTI_OK && given > 0)
        limits.milliseconds = (given + 999999) / 1000000;
    return limits;
}

static bool find_compiler(tu_builder *builder, tu_instructions level, char *reason, size_t reason_size) {
    const char *given = secure_getenv("TUTTI_CC");
    struct stat about;
    char path[PATH_MAX], *rest = NULL;
    snprintf(builder->command, sizeof builder->command, "%s", given != NULL && given[0] != 0 ? given : "cc");
    for (char *word = strtok_r(builder->command, " ", &rest); word != NULL && builder->word_count < 8;
         word = strtok_r(NULL, " ", &rest))
        add_word(builder, word);
    builder->limits = tu_build_limits_get();
    if (builder->word_count == 0 || !find_program(builder->words[0], path, sizeof path, &about)) {
        snprintf(reason, reason_size, "there is no compiler %s (TUTTI_CC names one)",
                 builder->word_count > 0 ? builder->words[0] : "");
        return false;
    }
    add_flags(builder, level);
    add_key(builder, path, &about);
    return true;
}

/* ---- opening ---- */

/* The headers, under a name that is their hash. */
static bool write_lanes(tu_builder *builder, tu_instructions level, char *reason, size_t reason_size) {
    char *text = NULL, hash_text[TU_HASH_TEXT];
    size_t bytes = 0;
    FILE *to = open_memstream(&text, &bytes);
    if (to == NULL) {
        snprintf(reason, reason_size, "memory has run out");
        return false;
    }
    tu_lanes_write(to, level);
    bool good = fclose(to) == 0 && text != NULL;
    if (good) {
        tu_hash hash = tu_hash_begin();
        tu_hash_add(&hash, text, bytes);
        tu_hash_text(&hash, hash_text);
        snprintf(builder->lanes, sizeof builder->lanes, "lanes-%s.h", hash_text);
        good = tu_cache_write(&builder->cache, builder->lanes, text, reason, reason_size);
    } else {
        snprintf(reason, reason_size, "memory has run out");
    }
    free(text);
    return good;
}

bool tu_builder_open(tu_instructions level, tu_builder **builder, char *reason, size_t reason_size) {
    tu_builder *made = calloc(1, sizeof *made);
    if (made == NULL) {
        snprintf(reason, reason_size, "memory has run out");
        return false;
    }
    made->cache.folder = -1;
    if (!find_compiler(made, level, reason, reason_size) || !tu_cache_open(&made->cache, reason, reason_size) ||
        !write_lanes(made, level, reason, reason_size)) {
        tu_builder_close(made);
        return false;
    }
    snprintf(made->include, sizeof made->include, "-I%s", made->cache.path);
    *builder = made;
    return true;
}

void tu_builder_close(tu_builder *builder) {
    if (builder == NULL)
        return;
    tu_cache_close(&builder->cache);
    free(builder);
}

const char *tu_builder_lanes(const tu_builder *builder) {
    return builder->lanes;
}

/* ---- one build ---- */

typedef struct build {
    const char *text;
    char name[TU_HASH_TEXT + 8]; /* of the finished file */
    char source[64], made[64];   /* in the making */
    int lock, messages;
    bool again;     /* a first attempt failed */
    pid_t compiler; /* 0: none runs */
    void *handle;
} build;

extern char **environ;

/* Starts the compiler in a process group of its own, so that all that it starts can be ended with it. */
static int start_compiler(const tu_builder *builder, build *own) {
    char *words[WORDS + 8], source[PATH_MAX + 64], made[PATH_MAX + 64];
    int count = builder->word_count;
    memcpy(words, builder->words, (size_t)count * sizeof *words);
    snprintf(source, sizeof source, "%s/%s", builder->cache.path, own->source);
    snprintf(made, sizeof made, "%s/%s", builder->cache.path, own->made);
    words[count++] = (char *)builder->include;
    if (own->again)
        words[count++] = (char *)"-D" TU_BUILD_ALL_INTRINSICS;
    words[count++] = (char *)"-o";
    words[count++] = made;
    words[count++] = source;
    words[count] = NULL;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_t actions;
    sigset_t none, usual;
    sigemptyset(&none);
    sigfillset(&usual);
    int status = posix_spawnattr_init(&attributes);
    if (status != 0)
        return status;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &usual);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, own->messages, 1);
    posix_spawn_file_actions_adddup2(&actions, own->messages, 2);
    status = posix_spawnp(&own->compiler, words[0], &actions, &attributes, words, environ);
    if (status != 0)
        own->compiler = 0;
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return status;
}

/* Asks it to end, so that it removes what it made, and makes it where it does not. */
static void end_compiler(build *own) {
    if (own->compiler == 0)
        return;
    kill(-own->compiler, SIGTERM);
    for (int64_t until = tu_build_clock() + GRACE_MS; tu_build_clock() < until; sleep_ms(2))
        if (waitpid(own->compiler, NULL, WNOHANG) != 0) {
            kill(-own->compiler, SIGKILL); /* what it started and left */
            own->compiler = 0;
            return;
        }
    kill(-own->compiler, SIGKILL);
    while (waitpid(own->compiler, NULL, 0) < 0 && errno == EINTR)
        continue;
    own->compiler = 0;
}

/* The first line of what the compiler said, without its end. */
static void first_message(const build *own, char *line, size_t size) {
    ssize_t bytes = pread(own->messages, line, size - 1, 0);
    line[bytes > 0 ? bytes : 0] = 0;
    char *error = strstr(line, "error");
    while (error != NULL && error > line && error[-1] != '\n')
        error--;
    if (error != NULL)
        memmove(line, error, strlen(error) + 1);
    line[strcspn(line, "\n")] = 0;
}

static bool tell_failure(const tu_builder *builder, const build *own, int status, char *reason, size_t reason_size) {
    char line[400];
    first_message(own, line, sizeof line);
    if (WIFSIGNALED(status))
        snprintf(reason, reason_size, "the compiler %s (TUTTI_CC names another) was ended by signal %d%s%s",
                 builder->words[0], WTERMSIG(status), line[0] != 0 ? ": " : "", line);
    else
        snprintf(reason, reason_size, "the compiler %s (TUTTI_CC names another) failed with status %d%s%s",
                 builder->words[0], WEXITSTATUS(status), line[0] != 0 ? ": " : "", line);
    return false;
}

/* A new file for what the compiler says. */
static bool open_messages(build *own, char *reason, size_t reason_size) {
    if (own->messages >= 0)
        close(own->messages);
    own->messages = memfd_create("tutti-messages", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (own->messages >= 0 && ftruncate(own->messages, MESSAGES) == 0 &&
        fcntl(own->messages, F_ADD_SEALS, F_SEAL_GROW) == 0)
        return true;
    snprintf(reason, reason_size, "no file for the compiler's messages: %s", strerror(errno));
    return false;
}

/* *failed tells a compiler that ended by itself, with an error, from one that was ended. */
static bool wait_for_compiler(build *own, int64_t deadline, const tu_builder *builder, bool *failed, char *reason,
                              size_t reason_size) {
    int status = 0;
    for (int pause = 1;; pause = pause < 10 ? pause + 1 : 10) {
        pid_t ended = waitpid(own->compiler, &status, WNOHANG);
        if (ended == own->compiler)
            break;
        if (ended < 0 && errno == ECHILD) {
            own->compiler = 0;
            snprintf(reason, reason_size,
                     "the program takes the exit status of every child, so that the compiler's is "
                     "not known (SIGCHLD is ignored, or somebody waits for all)");
            return false;
        }
        if (tu_build_clock() >= deadline) {
            end_compiler(own);
            snprintf(reason, reason_size, "the compiler %s did not end within %.1f s (TUTTI_CC_LIMIT)",
                     builder->words[0], (double)builder->limits.milliseconds / 1000);
            return false;
        }
        sleep_ms(pause);
    }
    own->compiler = 0;
    *failed = WIFEXITED(status) && WEXITSTATUS(status) != 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? true
                                                         : tell_failure(builder, own, status, reason, reason_size);
}

static bool start(const tu_builder *builder, build *own, char *reason, size_t reason_size) {
    tu_cache_name(own->source, sizeof own->source, ".c");
    tu_cache_name(own->made, sizeof own->made, ".so");
    if (!open_messages(own, reason, reason_size) ||
        !tu_cache_write(&builder->cache, own->source, own->text, reason, reason_size))
        return false;
    int status = start_compiler(builder, own);
    if (status == 0)
        return true;
    snprintf(reason, reason_size, "%s cannot be started: %s", builder->words[0], strerror(status));
    return false;
}

static void end(const tu_builder *builder, build *own) {
    end_compiler(own);
    if (own->source[0] != 0)
        unlinkat(builder->cache.folder, own->source, 0);
    if (own->made[0] != 0)
        unlinkat(builder->cache.folder, own->made, 0);
    if (own->messages >= 0)
        close(own->messages);
    tu_cache_unlock(own->lock);
    own->lock = TU_CACHE_NONE;
    own->messages = -1;
}

/* Somebody else builds it: waits for the file, or for the right to build it. */
static void wait_for_others(const tu_builder *builder, build *own, int64_t deadline) {
    while (own->handle == NULL && own->lock == TU_CACHE_TAKEN && tu_build_clock() < deadline) {
        sleep_ms(5);
        own->handle = tu_cache_load(&builder->cache, own->name);
        if (own->handle == NULL)
            own->lock = tu_cache_lock(&builder->cache, own->name);
    }
    if (own->handle == NULL && own->lock != TU_CACHE_TAKEN)
        own->handle = tu_cache_load(&builder->cache, own->name); /* finished between the two looks */
}

/* A compiler that fails is asked once more, with all intrinsics: see loops/emit_c.c. What it says the second time is
 * what is told. */
static bool wait_for_result(const tu_builder *builder, build *own, int64_t deadline, char *reason, size_t reason_size) {
    bool failed = false;
    if (wait_for_compiler(own, deadline, builder, &failed, reason, reason_size))
        return true;
    if (!failed || own->again)
        return false;
    own->again = true;
    if (!open_messages(own, reason, reason_size))
        return false;
    int status = start_compiler(builder, own);
    if (status == 0)
        return wait_for_compiler(own, deadline, builder, &failed, reason, reason_size);
    snprintf(reason, reason_size, "%s cannot be started: %s", builder->words[0], strerror(status));
    return false;
}

static bool finish(const tu_builder *builder, build *own, int64_t deadline, char *reason, size_t reason_size) {
    if (!wait_for_result(builder, own, deadline, reason, reason_size) ||
        !tu_cache_finish(&builder->cache, own->made, own->name, reason, reason_size))
        return false;
    own->handle = tu_cache_load(&builder->cache, own->name);
    if (own->handle == NULL) {
        const char *cause = dlerror();
        snprintf(reason, reason_size, "what the compiler made cannot be loaded: %s", cause != NULL ? cause : "");
    }
    return own->handle != NULL;
}

/* ---- all of them ---- */

static bool build_all(const tu_builder *builder, build *builds, int count, char *reason, size_t reason_size) {
    int64_t deadline = tu_build_clock() + builder->limits.milliseconds;
    bool good = true;
    for (int i = 0; i < count; i++) {
        builds[i].handle = tu_cache_load(&builder->cache, builds[i].name);
        if (builds[i].handle == NULL)
            builds[i].lock = tu_cache_lock(&builder->cache, builds[i].name);
    }
    for (int i = 0; i < count && good; i++) /* those that are this one's to build run at once */
        if (builds[i].handle == NULL && builds[i].lock != TU_CACHE_TAKEN)
            good = start(builder, &builds[i], reason, reason_size);
    for (int i = 0; i < count && good; i++)
        if (builds[i].compiler != 0)
            good = finish(builder, &builds[i], deadline, reason, reason_size);
    for (int i = 0; i < count && good; i++) {
        if (builds[i].handle != NULL)
            continue;
        wait_for_others(builder, &builds[i], deadline);
        if (builds[i].handle == NULL)
            good = start(builder, &builds[i], reason, reason_size) &&
                   finish(builder, &builds[i], tu_build_clock() + builder->limits.milliseconds, reason, reason_size);
    }
    return good;
}

bool tu_builder_build(tu_builder *builder, const char *const *texts, int text_count, void **handles, char *reason,
                      size_t reason_size) {
    build *builds = calloc((size_t)text_count, sizeof *builds);
    if (builds == NULL) {
        snprintf(reason, reason_size, "memory has run out");
        return false;
    }
    for (int i = 0; i < text_count; i++) {
        tu_hash key = builder->key;
        char hash_text[TU_HASH_TEXT];
        tu_hash_add(&key, texts[i], strlen(texts[i]));
        tu_hash_text(&key, hash_text);
        builds[i] = (build){ .text = texts[i], .lock = TU_CACHE_NONE, .messages = -1 };
        snprintf(builds[i].name, sizeof builds[i].name, "%s.so", hash_text);
    }
    bool good = build_all(builder, builds, text_count, reason, reason_size), built = false;
    for (int i = 0; i < text_count; i++)
        built = built || builds[i].source[0] != 0;
    for (int i = 0; i < text_count; i++) {
        end(builder, &builds[i]);
        handles[i] = builds[i].handle;
        if (!good && handles[i] != NULL)
            dlclose(handles[i]);
    }
    free(builds);
    if (built)
        tu_cache_trim(&builder->cache, builder->limits.cache_bytes);
    return good;
}
