/* SPDX-License-Identifier: Apache-2.0 */
#include "base/home.h"

#include <sched.h>
#include <string.h>

#include "base/clock.h"

/* Being moved takes some 10 us. Who is woken up elsewhere is often moved a few times until the others have come too;
 * whom the kernel moves again and again, it has its reasons for. So the first returns may follow each other soon. */
#define LEAST_INTERVAL (1 * TU_MILLISECOND)
#define MOST_INTERVAL (16 * TU_MILLISECOND)
#define FORGOTTEN (100 * TU_MILLISECOND)

void tu_cpus_here(tu_cpus *cpus) {
    cpu_set_t set;
    memset(cpus, 0, sizeof *cpus);
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return;
    for (int cpu = 0; cpu < TU_CPU_WORDS * 64 && cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set))
            cpus->words[cpu / 64] |= UINT64_C(1) << (cpu % 64);
}

int tu_cpus_count(const tu_cpus *cpus) {
    int count = 0;
    for (int word = 0; word < TU_CPU_WORDS; word++)
        count += __builtin_popcountll(cpus->words[word]);
    return count;
}

int tu_home_of(const tu_cpus *cpus, int place, int ranks) {
    int count = tu_cpus_count(cpus);
    if (count < 2 || ranks <= count)
        return -1;
    int64_t wanted = (int64_t)place * count / ranks;
    for (int cpu = 0; cpu < TU_CPU_WORDS * 64; cpu++)
        if ((cpus->words[cpu / 64] >> (cpu % 64) & 1) != 0 && wanted-- == 0)
            return cpu;
    return -1;
}

void tu_home_go(int cpu) {
    cpu_set_t allowed, home;
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
        !CPU_ISSET(cpu, &allowed))
        return;
    CPU_ZERO(&home);
    CPU_SET(cpu, &home);
    if (sched_setaffinity(0, sizeof home, &home) != 0)
        return;
    if (sched_setaffinity(0, sizeof allowed, &allowed) == 0)
        return;
    /* Somebody took all of them from the process meanwhile: of all CPUs the kernel takes those that it may use now. */
    memset(&allowed, 0xff, sizeof allowed);
    (void)sched_setaffinity(0, sizeof allowed, &allowed);
}

void tu_home_return(int cpu) {
    static _Thread_local int64_t last, interval;
    if (sched_getcpu() == cpu)
        return;
    int64_t now = tu_clock_now();
    if (now - last < interval)
        return;
    interval = now - last > FORGOTTEN ? LEAST_INTERVAL : interval < MOST_INTERVAL ? 2 * interval : MOST_INTERVAL;
    last = now;
    tu_home_go(cpu);
}
