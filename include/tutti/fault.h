/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults on purpose, for tests of your own programs: what happens when a rank dies in its 18th all_reduce?
 *
 *     TUTTI_FAULT="rank=2,op=all_reduce,at=17,do=kill" tutti run -n 4 ./program
 *
 *     rank=R     the world rank that it happens to; left out: every rank
 *     op=NAME    the operation, named as in the API without "tutti_"; left out: any
 *     at=N       which call of that operation by that rank in this world, counted from 0; left out: 0
 *     do=WHAT    kill      SIGKILL to this process
 *                stop      SIGSTOP to this process
 *                exit      the process exits with status 1; exit:S with status S
 *                delay:T   sleeps ("50ms", "2s"), then goes on
 *                skip      the call returns TUTTI_OK without doing anything, or TUTTI_ERROR_FAULT
 *                          where it would have to return an object
 *                fail      the call fails with TUTTI_ERROR_FAULT, as by any failure in the middle of it
 *
 * Several faults are separated by ";". Each happens once. In a world of threads kill, stop and exit take the whole
 * process.
 */
#ifndef TUTTI_FAULT_H
#define TUTTI_FAULT_H

#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Adds faults to this rank's world, besides those of TUTTI_FAULT; calls are counted from here on for them. Not while
 * other threads are in calls on the world. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_fault_inject(tutti_world *world, const char *faults);

#ifdef __cplusplus
}
#endif
#endif
