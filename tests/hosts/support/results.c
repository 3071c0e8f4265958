/* SPDX-License-Identifier: Apache-2.0
 *
 * A program whose every result is checked, for jobs over links that are slow, lose or reorder: collectives short and
 * long, messages, and symmetric memory. Numbers are small integers, so that every sum is exact.
 *
 *     results [ROUNDS]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#define LONGEST 60000 /* elements: two fragments and more */

static int rank, size, round_number;
static double *in, *out;

static double value(int of, size_t index) {
    return (double)((index * 31 + (size_t)of * 7 + (size_t)round_number * 3) % 1000);
}

static double sum(size_t index) {
    double total = 0;
    for (int of = 0; of < size; of++)
        total += value(of, index);
    return total;
}

static void must(tutti_status status, const char *what) {
    if (status == TUTTI_OK)
        return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, tutti_error_message());
    exit(1);
}

static void expect(const char *what, size_t index, double found, double wanted) {
    if (found == wanted)
        return;
    fprintf(stderr, "rank %d: %s: element %zu is %g, not %g\n", rank, what, index, found, wanted);
    exit(3);
}

static void fill(size_t count) {
    for (size_t i = 0; i < count; i++)
        in[i] = value(rank, i);
    memset(out, 0xa5, count * sizeof *out);
}

static void reduce(tutti_group *group, size_t count) {
    fill(count);
    must(tutti_all_reduce(group, in, out, count, TUTTI_F64, TUTTI_SUM, NULL), "all_reduce");
    for (size_t i = 0; i < count; i++)
        expect("all_reduce", i, out[i], sum(i));
}

static void move(tutti_group *group, size_t count) {
    size_t all = count * (size_t)size;
    fill(all);
    must(tutti_all_gather(group, in, out, count, TUTTI_F64, NULL), "all_gather");
    for (size_t i = 0; i < all; i++)
        expect("all_gather", i, out[i], value((int)(i / count), i % count));
    must(tutti_all_to_all(group, in, out, count, TUTTI_F64, NULL), "all_to_all");
    for (size_t i = 0; i < all; i++)
        expect("all_to_all", i, out[i], value((int)(i / count), (size_t)rank * count + i % count));
    must(tutti_reduce_scatter(group, in, out, count, TUTTI_F64, TUTTI_SUM, NULL), "reduce_scatter");
    for (size_t i = 0; i < count; i++)
        expect("reduce_scatter", i, out[i], sum((size_t)rank * count + i));
    must(tutti_broadcast(group, in, out, all, TUTTI_F64, size - 1, NULL), "broadcast");
    for (size_t i = 0; i < all; i++)
        expect("broadcast", i, out[i], value(size - 1, i));
}

/* To the rank half way round, which is on another host. */
static void send(tutti_group *group, size_t count) {
    int to = (rank + size / 2) % size, from = (rank + size - size / 2) % size;
    fill(count);
    must(tutti_send_recv(group, in, count, to, out, count, from, TUTTI_F64, 5, NULL), "send_recv");
    for (size_t i = 0; i < count; i++)
        expect("send_recv", i, out[i], value(from, i));
}

static void put(tutti_peers *peers, const double *block, size_t count) {
    int to = (rank + size / 2) % size, from = (rank + size - size / 2) % size;
    fill(count);
    must(tutti_peers_put(peers, to, 0, in, count * sizeof *in, NULL), "put");
    must(tutti_peers_signal(peers, to, 0, NULL), "signal");
    must(tutti_peers_wait_signal(peers, from, 0, NULL), "wait_signal");
    for (size_t i = 0; i < count; i++)
        expect("put", i, block[i], value(from, i));
    must(tutti_peers_barrier(peers, 0, NULL), "peers_barrier");
    must(tutti_peers_get(peers, to, 0, out, count * sizeof *out, NULL), "get");
    for (size_t i = 0; i < count; i++) /* what this rank itself has put there */
        expect("get", i, out[i], in[i]);
    must(tutti_peers_barrier(peers, 0, NULL), "peers_barrier");
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 2;
    tutti_world *world;
    tutti_memory *memory;
    tutti_peers *peers;
    must(tutti_world_open(NULL, &world), "world");
    tutti_group *group = tutti_world_group(world);
    rank = tutti_world_rank(world);
    size = tutti_world_size(world);
    in = calloc(2 * LONGEST, sizeof *in);
    out = in + LONGEST;
    must(in != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY, "memory");
    must(tutti_memory_alloc(world, LONGEST * sizeof *in, NULL, &memory), "alloc");
    must(tutti_memory_rendezvous(memory, group, &peers), "rendezvous");
    for (round_number = 0; round_number < rounds; round_number++) {
        size_t few = 1 + (size_t)round_number;
        must(tutti_barrier(group, NULL), "barrier");
        reduce(group, few);
        reduce(group, LONGEST);
        move(group, few);
        move(group, LONGEST / 8 / (size_t)size);
        send(group, few);
        send(group, LONGEST / 2);
        put(peers, tutti_memory_data(memory), few);
        put(peers, tutti_memory_data(memory), LONGEST / 2);
    }
    printf("all results are right\n");
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    must(tutti_barrier(group, NULL), "barrier");
    must(tutti_world_close(world), "close");
    free(in);
    return 0;
}
