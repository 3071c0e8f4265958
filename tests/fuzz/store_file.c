/* SPDX-License-Identifier: Apache-2.0
 *
 * What may stand in a store's file.
 * rooms: base store
 */
#include <fcntl.h>
#include <tutti/store.h>
#include <unistd.h>

#include "fuzz.h"

static void fuzz_one(const uint8_t *data, size_t bytes) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/tutti-fuzz-file-%d", (int)getpid());
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    FUZZ_CHECK(descriptor >= 0 && write(descriptor, data, bytes) == (ssize_t)bytes);
    tutti_file_store_options options = TUTTI_FILE_STORE_OPTIONS_INIT;
    tutti_store *store;
    tutti_status status = tutti_store_open_file(path, &options, &store);
    if (status == TUTTI_OK) {
        char **keys;
        size_t count;
        int64_t sum;
        if (tutti_store_list_keys(store, &keys, &count) == TUTTI_OK)
            tutti_free(keys);
        status = tutti_store_add(store, "n", 1, &sum);
        FUZZ_CHECK(status == TUTTI_OK || status == TUTTI_ERROR_STORE);
        tutti_store_release(store);
    } else {
        FUZZ_CHECK(tutti_error_message()[0] != 0);
        FUZZ_CHECK(status != TUTTI_ERROR_PROTOCOL ||
                   lseek(descriptor, 0, SEEK_END) == (off_t)bytes); /* not ours: untouched */
    }
    close(descriptor);
    unlink(path);
}

FUZZ_TARGET(store_file)
