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
/* A return that takes this long waited for somebody who computes there. Then the home is left to that one for a while,
 * so that returns take a thousandth of the time at most. */
#define LONG_RETURN (1 * TU_MILLISECOND)
#define LONGEST_INTERVAL (10 * TU_SECOND)

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

/* Gives the thread, which is bound to its home, `allowed` back. One that might use every CPU of its cpuset gets all
 * there are: of a thread that asked for certain CPUs the kernel remembers them, and keeps it there when the cpuset
 * grows. */
static void restore(const cpu_set_t *allowed) {
    static _Thread_local cpu_set_t limited; /* CPUs that are known to be fewer than those of the cpuset */
    cpu_set_t every, now;
    memset(&every, 0xff, sizeof every);
    if (!CPU_EQUAL(allowed, &limited) && sched_setaffinity(0, sizeof every, &every) == 0) {
        if (sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, allowed))
            return;
        limited = *allowed;
    }
    if (sched_setaffinity(0, sizeof *allowed, allowed) != 0) /* somebody took all of them from the process meanwhile */
        (void)sched_setaffinity(0, sizeof every, &every);
}

void tu_home_go(int cpu) {
    cpu_set_t allowed, home, now;
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
        !CPU_ISSET(cpu, &allowed))
        return;
    CPU_ZERO(&home);
    CPU_SET(cpu, &home);
    if (sched_setaffinity(0, sizeof home, &home) != 0)
        return;
    /* Whatever somebody else has bound it to meanwhile, which may have taken long, counts. */
    if (sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &home))
        restore(&allowed);
}

void tu_home_return(int cpu) {
    static _Thread_local int64_t last, interval;
    if (sched_getcpu() == cpu)
        return;
    int64_t now = tu_clock_now();
    if (now - last < interval)
        return;
    interval = now - last > FORGOTTEN ? LEAST_INTERVAL : interval < MOST_INTERVAL ? 2 * interval : MOST_INTERVAL;
    tu_home_go(cpu);
    last = tu_clock_now();
    int64_t took = last - now;
    if (took >= LONG_RETURN)
        interval = took < LONGEST_INTERVAL / 1000 ? 1000 * took : LONGEST_INTERVAL;
}
