/* SPDX-License-Identifier: Apache-2.0
 *
 * Puts the simulation in the place of what the executor `hosts` stands on: its rounds of messages, the collectives of
 * the members on one host, and whatever touches data. Included before the executor's files, after all that they
 * include.
 */
#ifndef BENCH_SCALE_TRANSPORT_H
#define BENCH_SCALE_TRANSPORT_H

#include <stdlib.h>
#include <string.h>

#include "collective/hosts.h"

tutti_status simulated_round_begin(tu_round *round, tu_hosts *hosts, tu_task *task, int room);
tutti_status simulated_round_end(tu_round *round, tutti_status status);
tutti_status simulated_round_receive(tu_round *round, int member, uint32_t step, void *to, size_t bytes);
tutti_status simulated_round_absorb(tu_round *round, int member, uint32_t step, tu_absorb *absorb, void *argument,
                                    size_t bytes);
tutti_status simulated_round_send(tu_round *round, int member, uint32_t step, const void *from, size_t bytes);
tutti_status simulated_round_wait_for(tu_round *round, bool (*ready)(void *argument), void *argument);
tutti_status simulated_round_wait(tu_round *round);
tutti_status simulated_hosts_scratch(tu_hosts *hosts, size_t bytes, unsigned char **scratch);
tutti_call simulated_hosts_call(tu_task *task);
tutti_status simulated_hosts_gather(tu_hosts *hosts, tu_task *task, const void *own, unsigned char *out,
                                    const tu_shares *shares, uint32_t step);
tutti_status simulated_hosts_barrier(tu_hosts *hosts, tu_task *task);
tutti_status simulated_hosts_move(tu_hosts *hosts, tu_task *task);
tutti_status simulated_hosts_reduce(tu_hosts *hosts, tu_task *task);
bool simulated_hosts_direct(const tu_hosts *hosts);
tutti_status simulated_hosts_reduce_direct(tu_hosts *hosts, tu_task *task);
tutti_algorithm simulated_hosts_choose(const tu_hosts *hosts, const tu_task *task);

/* A collective of the members on one host: they meet, and each copies so many bytes. */
tutti_status simulated_here(tutti_group *here, size_t bytes);
size_t simulated_sum(const tutti_group *here, const size_t *counts);
/* Bytes that the running rank reads or writes. */
void *simulated_touch(void *to, size_t bytes);

#define tu_round_begin simulated_round_begin
#define tu_round_end simulated_round_end
#define tu_round_receive simulated_round_receive
#define tu_round_absorb simulated_round_absorb
#define tu_round_send simulated_round_send
#define tu_round_wait_for simulated_round_wait_for
#define tu_round_wait simulated_round_wait
#define tu_hosts_scratch simulated_hosts_scratch
#define tu_hosts_call simulated_hosts_call
#define tu_hosts_gather simulated_hosts_gather
#define tu_hosts_barrier simulated_hosts_barrier
#define tu_hosts_move simulated_hosts_move
#define tu_hosts_reduce simulated_hosts_reduce
#define tu_hosts_direct simulated_hosts_direct
#define tu_hosts_reduce_direct simulated_hosts_reduce_direct
#define tu_hosts_choose simulated_hosts_choose
#define tutti_barrier(here, call) ((void)(call), simulated_here(here, 0))
#define tutti_broadcast(here, in, out, count, dtype, root, call) \
    ((void)(call), (void)(in), (void)(out), (void)(root), simulated_here(here, (count)*tutti_dtype_size(dtype)))
#define tutti_all_gather(here, in, out, count, dtype, call) \
    ((void)(call), (void)(in), (void)(out), simulated_here(here, (count)*tutti_dtype_size(dtype)))
#define tutti_all_gather_v(here, in, out, counts, offsets, dtype, call) \
    ((void)(call), (void)(in), (void)(out), (void)(offsets), simulated_here(here, simulated_sum(here, counts)))
#define tutti_all_to_all_v(here, in, counts, in_offsets, out, out_counts, out_offsets, dtype, call)      \
    ((void)(call), (void)(in), (void)(out), (void)(in_offsets), (void)(out_counts), (void)(out_offsets), \
     simulated_here(here, simulated_sum(here, counts)))
#define tu_reduce(to, from, from_count, count, dtype, reduction, factors, flags) \
    ((void)(from), (void)(factors), (void)simulated_touch(to, (size_t)(from_count) * (count)*tutti_dtype_size(dtype)))
#define tu_widen(to, from, count, dtype) ((void)(from), (void)simulated_touch(to, (count)*tutti_dtype_size(dtype)))
#define tu_conclude(to, from, count, dtype, reduction, ranks) \
    ((void)(from), (void)simulated_touch(to, (count)*tutti_dtype_size(dtype)))
#undef memmove
#undef memcpy
#define memmove(to, from, bytes) ((void)(from), simulated_touch(to, bytes))
#define memcpy(to, from, bytes) ((void)(from), simulated_touch(to, bytes))

#endif
