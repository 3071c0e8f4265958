/* SPDX-License-Identifier: Apache-2.0
 *
 * The Tutti contender, and the limits beside it: copying, and handing a cache line over.
 */
#include <stdatomic.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "base/wait.h"
#include "kernel/kernel.h"
#include "worker.h"

static const bool peer_exact = true;

static tutti_world *world;
static tutti_group *group;
static tutti_dtype dtype = TUTTI_F32;
static tutti_peers *output_peers; /* of the symmetric output */

static void must(tutti_status status) {
    if (status == TUTTI_OK)
        return;
    fprintf(stderr, "rank %d: %s\n", rank, tutti_error_message());
    exit(1);
}

static void peer_open(int *argc, char ***argv, int *r, int *s) {
    (void)argc, (void)argv;
    must(tutti_world_open(NULL, &world));
    group = tutti_world_group(world);
    *r = tutti_world_rank(world);
    *s = tutti_world_size(world);
}

static void peer_close(void) {
    must(tutti_barrier(group, NULL));
    (void)!tutti_world_close(world); /* lists the benchmark's blocks, which end with the process */
}

static void peer_barrier(void) {
    must(tutti_barrier(group, NULL));
}

static bool peer_understands(const char *name) {
    return tutti_dtype_parse(name, &dtype) == TUTTI_OK;
}

static size_t peer_element(void) {
    return tutti_dtype_size(dtype);
}

static void *symmetric_buffer(int which, size_t bytes) {
    static tutti_memory *blocks[2];
    static tutti_peers *peers_of[2];
    if (blocks[which] == NULL || tutti_memory_bytes(blocks[which]) < bytes) {
        tutti_peers_release(peers_of[which]);
        tutti_memory_release(blocks[which]);
        must(tutti_memory_alloc(world, bytes > 4096 ? bytes : 4096, NULL, &blocks[which]));
        must(tutti_memory_rendezvous(blocks[which], group, &peers_of[which]));
    }
    output_peers = peers_of[1];
    return tutti_memory_data(blocks[which]);
}

static void *peer_buffer(int which, size_t bytes, bool symmetric) {
    static void *buffers[3];
    static size_t sizes[3];
    if (symmetric)
        return symmetric_buffer(which, bytes);
    if (sizes[which] < bytes) {
        free(buffers[which]);
        if (posix_memalign(&buffers[which], 4096, bytes) != 0) {
            fprintf(stderr, "out of memory for %zu bytes\n", bytes);
            exit(1);
        }
        memset(buffers[which], 0, bytes);
        sizes[which] = bytes;
    }
    return buffers[which];
}

static void peer_fill(void *to, size_t first, size_t count, int of) {
    float block[256];
    for (size_t at = 0; at < count; at += 256) {
        size_t part = count - at < 256 ? count - at : 256;
        for (size_t i = 0; i < part; i++)
            block[i] = value(of, first + at + i);
        must(tutti_convert(block, TUTTI_F32, (char *)to + at * peer_element(), dtype, part));
    }
}

/* Ranks 0 and 1 hand one line to and fro, a thousand times each way. */
static void hand_over(void) {
    enum {
        TRIPS = 1000
    };
    static tutti_memory *block;
    static tutti_peers *peers;
    static uint64_t turns;
    if (block == NULL) {
        must(tutti_memory_alloc(world, 4096, NULL, &block));
        must(tutti_memory_rendezvous(block, group, &peers));
    }
    if (size < 2 || rank > 1)
        return;
    _Atomic uint64_t *word = tutti_peers_buffer(peers, 0);
    for (int i = 0; i < TRIPS; i++) {
        uint64_t awaited = turns + 2 * (uint64_t)i + (uint64_t)rank;
        while (atomic_load_explicit(word, memory_order_acquire) != awaited)
            tu_pause();
        atomic_store_explicit(word, awaited + 1, memory_order_release);
    }
    turns += 2 * TRIPS;
}

static void exchange(const float *in, float *out, size_t half) {
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    tutti_call call = TUTTI_CALL_INIT;
    must(tutti_batch_begin(group, &call.batch));
    must(tutti_send_recv(group, in, half, next, out, half, before, TUTTI_F32, 0, &call));
    must(tutti_send_recv(group, in + half, half, before, out + half, half, next, TUTTI_F32, 1, &call));
    must(tutti_batch_end(call.batch, NULL));
}

/* Rank 0 writes into the last one's block, which says that it has it: with no bytes a signal to and fro. */
static void put(const void *in, size_t bytes) {
    tutti_peers *peers = output_peers;
    int last = size - 1;
    if (rank == 0) {
        if (bytes > 0)
            must(tutti_peers_put(peers, last, 0, in, bytes, NULL));
        must(tutti_peers_signal(peers, last, 0, NULL));
        must(tutti_peers_wait_signal(peers, last, 0, NULL));
    } else if (rank == last) {
        must(tutti_peers_wait_signal(peers, 0, 0, NULL));
        must(tutti_peers_signal(peers, 0, 0, NULL));
    }
}

static void peer_run(peer_operation operation, const void *in, void *out, size_t count) {
    switch (operation) {
    case ALL_REDUCE:
        must(tutti_all_reduce(group, in, out, count, dtype, TUTTI_SUM, NULL));
        break;
    case ALL_GATHER:
        must(tutti_all_gather(group, in, out, count, dtype, NULL));
        break;
    case REDUCE_SCATTER:
        must(tutti_reduce_scatter(group, in, out, count, dtype, TUTTI_SUM, NULL));
        break;
    case BROADCAST:
        must(tutti_broadcast(group, out, out, count, dtype, 0, NULL));
        break;
    case ALL_TO_ALL:
        must(tutti_all_to_all(group, in, out, count, dtype, NULL));
        break;
    case EXCHANGE:
        exchange(in, out, count / 2);
        break;
    case COPY_STREAM:
        tu_copy(out, in, count * peer_element(), TU_KERNEL_STREAM);
        break;
    case HANDOVER:
        hand_over();
        break;
    case PUT:
        put(in, count * peer_element());
        break;
    case SIGNAL:
        put(in, 0);
        break;
    default:
        fprintf(stderr, "Tutti has no %s here\n", operation_names[operation]);
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "started by measure.py: tutti FOLDER CPUS\n");
        return 2;
    }
    peer_open(&argc, &argv, &rank, &size);
    int status = worker_loop(argv[1], argv[2]);
    if (status == 0)
        peer_close();
    return status;
}
