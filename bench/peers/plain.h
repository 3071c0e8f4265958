/* SPDX-License-Identifier: Apache-2.0
 *
 * What contenders have in common that know f32 alone, in memory of their own.
 */
#ifndef BENCH_PEERS_PLAIN_H
#define BENCH_PEERS_PLAIN_H

#include "worker.h"

static bool peer_understands(const char *dtype) {
    return strcmp(dtype, "f32") == 0;
}

static size_t peer_element(void) {
    return sizeof(float);
}

static void *peer_buffer(int which, size_t bytes, bool symmetric) {
    static void *buffers[3];
    static size_t sizes[3];
    (void)symmetric;
    if (sizes[which] < bytes) {
        free(buffers[which]);
        if (posix_memalign(&buffers[which], 4096, bytes) != 0) {
            fprintf(stderr, "rank %d: no memory for %zu bytes\n", rank, bytes);
            exit(1);
        }
        memset(buffers[which], 0, bytes);
        sizes[which] = bytes;
    }
    return buffers[which];
}

static void peer_fill(void *to, size_t first, size_t count, int of) {
    for (size_t i = 0; i < count; i++)
        ((float *)to)[i] = value(of, first + i);
}

#endif
