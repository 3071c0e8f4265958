/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes as a file that is open for reading.
 */
#ifndef TUTTI_TESTS_FUZZ_READER_H
#define TUTTI_TESTS_FUZZ_READER_H

#include <sys/mman.h>

/* End it with tu_reader_close. */
static void reader_of(const uint8_t *data, size_t bytes, tu_reader *reader) {
    *reader = (tu_reader){ .descriptor = memfd_create("fuzz", MFD_CLOEXEC), .bytes = bytes, .where = "fuzz" };
    FUZZ_CHECK(reader->descriptor >= 0);
    for (size_t done = 0; done < bytes;) {
        ssize_t now = write(reader->descriptor, data + done, bytes - done);
        FUZZ_CHECK(now > 0);
        done += (size_t)now;
    }
}

#endif
