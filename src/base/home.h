/* SPDX-License-Identifier: Apache-2.0
 *
 * The home of a rank: the CPU on which it begins where ranks outnumber the CPUs that they may use.
 *
 * The kernel places processes by their load, of which it knows nothing when they begin, and nothing of who talks to
 * whom: of four ranks on two CPUs three may lie on one, and neighbours apart, for as long as a short job lives. So
 * ranks that may use the same CPUs are dealt out over them in stretches of neighbouring ranks, as equal as can be.
 *
 * Nobody is bound: a rank is sent to its home, may use all its CPUs again at once, and the kernel moves it where it
 * likes. Where the stretches are equal, a rank that was moved goes back when it waits: after 1 ms at the soonest, then
 * 2, 4 … 16, and from 1 again once it has stayed for 100. A return that took long found somebody else who computes
 * there, and is the last for a while. TUTTI_HOMES=0 leaves everything to the kernel.
 */
#ifndef TU_BASE_HOME_H
#define TU_BASE_HOME_H

#include <stdint.h>

#define TU_CPU_WORDS 16 /* 1024 CPUs */

/* A set of CPUs, one bit each. */
typedef struct tu_cpus {
    uint64_t words[TU_CPU_WORDS];
} tu_cpus;

/* The CPUs that the calling thread may use; none when the kernel does not say. */
void tu_cpus_here(tu_cpus *cpus);
int tu_cpus_count(const tu_cpus *cpus);

/* The home of the `place`-th of `ranks` ranks (from 0) that may use `cpus`; -1 when each can have a CPU of its own, or
 * there is but one. */
int tu_home_of(const tu_cpus *cpus, int place, int ranks);

/* Sends the calling thread to that CPU if it may use it; -1: nowhere. What it may use is afterwards what it was before.
 * Where the kernel forbids it, the thread stays where it is. What somebody else binds the thread to while it is on its
 * way counts, but for the instants between two system calls: the kernel has no way to move a thread other than to bind
 * it. */
void tu_home_go(int cpu);

/* For a thread that waits: sends it there when it is elsewhere, and was not sent just before. */
void tu_home_return(int cpu);

#endif
