/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives of many hosts without the hosts: the executor's own code (src/collective/hosts_move.c, hosts_reduce.c)
 * runs for every rank, as a coroutine, on a virtual clock. What it sends is counted and timed, and no byte is moved, so
 * that a hundred thousand ranks fit into one process.
 *
 * Time follows LogGP: a message costs `overhead` at each end; a host's link sends one after the other, for `byte`
 * seconds per byte of its packets and `gap` at least; it arrives `latency` after its last byte has left. Fragments,
 * windows and the messages that open them are those of the network (memory/network_inner.h).
 */
#ifndef BENCH_SCALE_SIMULATION_H
#define BENCH_SCALE_SIMULATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/dtype.h>

#include "base/operation.h"

typedef struct simulation_model {
    double latency, overhead, gap, byte; /* in seconds */
    double compute;                      /* per byte that a rank copies or reduces */
    double meeting;                      /* of a hand-over among the ranks of a host */
} simulation_model;

typedef struct simulation_call {
    tu_operation operation;
    size_t count; /* as the call names it */
    tutti_dtype dtype;
    tutti_reduction reduction;
    int root;
    bool any_order; /* TUTTI_ORDER_ANY */
} simulation_call;

/* "all_reduce:f32:1000"; "all_reduce+any:f32:1000" for any order. False: it is no such call. */
bool simulation_parse(const char *text, simulation_call *call);

/* Of calls with lists: elements that go from one rank to another (all_to_all_v), that are a rank's (of itself to
 * itself), and the rank that permute sends a rank's to, -1: nobody. */
size_t simulation_share(const simulation_call *call, int from, int to);
int simulation_target(int rank, int size);

/* What a rank has sent to other hosts. */
typedef struct simulation_traffic {
    uint64_t messages, bytes; /* fragments of messages, and their data */
    uint64_t taken;           /* messages that open windows */
    int connections;          /* peers that it has used */
} simulation_traffic;

typedef struct simulation simulation;

/* each[host]: how many ranks it has; numbered host by host, or, round_robin, one of each host in turn. NULL: no memory.
 */
simulation *simulation_open(const int *each, int hosts, bool round_robin, const simulation_model *model);
void simulation_close(simulation *simulation);

/* All ranks begin at once. Seconds until the last one is done; -1 after printing why not. */
double simulation_run(simulation *simulation, const simulation_call *call);

int simulation_size(const simulation *simulation);
simulation_traffic simulation_sent(const simulation *simulation, int rank);

#endif
