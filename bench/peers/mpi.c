/* SPDX-License-Identifier: Apache-2.0
 *
 * The MPI contender, compiled by measure.py with the mpicc of each MPI.
 */
#define _GNU_SOURCE
#include <mpi.h>

#include "plain.h"

static const bool peer_exact = false; /* MPI leaves the order of additions open */

static void peer_open(int *argc, char ***argv, int *r, int *s) {
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, r);
    MPI_Comm_size(MPI_COMM_WORLD, s);
}

static void peer_close(void) {
    MPI_Finalize();
}

static void peer_barrier(void) {
    MPI_Barrier(MPI_COMM_WORLD);
}

static void exchange(const float *in, float *out, int half) {
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    MPI_Request requests[4];
    MPI_Irecv(out, half, MPI_FLOAT, before, 0, MPI_COMM_WORLD, &requests[0]);
    MPI_Irecv(out + half, half, MPI_FLOAT, next, 1, MPI_COMM_WORLD, &requests[1]);
    MPI_Isend(in, half, MPI_FLOAT, next, 0, MPI_COMM_WORLD, &requests[2]);
    MPI_Isend(in + half, half, MPI_FLOAT, before, 1, MPI_COMM_WORLD, &requests[3]);
    MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
}

static void peer_run(peer_operation operation, const void *in, void *out, size_t count) {
    int n = (int)count;
    switch (operation) {
    case ALL_REDUCE:
        MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(in, n, MPI_FLOAT, out, n, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter_block(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case BROADCAST:
        MPI_Bcast(out, n, MPI_FLOAT, 0, MPI_COMM_WORLD);
        break;
    case ALL_TO_ALL:
        MPI_Alltoall(in, n, MPI_FLOAT, out, n, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case EXCHANGE:
        exchange(in, out, n / 2);
        break;
    default:
        fprintf(stderr, "MPI has no %s here\n", operation_names[operation]);
        exit(1);
    }
}

int main(int argc, char **argv) {
    peer_open(&argc, &argv, &rank, &size);
    int status = argc == 3 ? worker_loop(argv[1], argv[2]) : 2;
    peer_close();
    return status;
}
