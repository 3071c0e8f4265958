/* SPDX-License-Identifier: Apache-2.0
 *
 * A fuzz target is one file here with a function fuzz_one. scripts/fuzz builds it with clang's libFuzzer and lets it
 * run; as an ordinary test it digests its corpus, tests/fuzz/corpus/<target>, and every beginning of every file there.
 *
 * A line "rooms: …" in the file's first comment names the folders of src/ that it needs.
 */
#ifndef TUTTI_TESTS_FUZZ_H
#define TUTTI_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fuzz_one(const uint8_t *data, size_t bytes);

#ifdef TUTTI_FUZZ

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    fuzz_one(data, bytes);
    return 0;
}

#define FUZZ_CHECK(condition)                                                         \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                  \
        }                                                                             \
    } while (0)
#define FUZZ_TARGET(name)

#else

#include <dirent.h>

#include "../harness.h"

#define FUZZ_CHECK(condition) CHECK(condition)

static inline void fuzz_file(const char *path) {
    static uint8_t data[64 << 10];
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    size_t bytes = fread(data, 1, sizeof data, file);
    fclose(file);
    for (size_t part = 0; part < bytes; part += 1 + bytes / 16) {
        uint8_t *beginning = malloc(part + 1); /* exactly as long, so that a sanitizer sees a byte too far */
        memcpy(beginning, data, part);
        fuzz_one(beginning, part);
        free(beginning);
    }
    fuzz_one(data, bytes);
}

static inline void fuzz_corpus(const char *target) {
    char folder[1024], path[2048];
    const char *source = getenv("TEST_SOURCE");
    snprintf(folder, sizeof folder, "%s/tests/fuzz/corpus/%s", source != NULL ? source : ".", target);
    DIR *list = opendir(folder);
    if (list == NULL)
        FAIL("there is no corpus %s; start from the source folder or set TEST_SOURCE", folder);
    int files = 0;
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        fuzz_file(path);
        files++;
    }
    closedir(list);
    CHECK(files > 0);
}

#define FUZZ_TARGET(name)                      \
    TEST(the_corpus_of_##name##_is_digested) { \
        fuzz_corpus(#name);                    \
    }

#endif
#endif
