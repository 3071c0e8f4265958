/* SPDX-License-Identifier: Apache-2.0 */
#include "base/clock.h"

#include <stdio.h>
#include <time.h>

#include "base/error.h"

static int64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * TU_SECOND + time.tv_nsec;
}

int64_t tu_clock_now(void) {
    return now(CLOCK_MONOTONIC);
}

int64_t tu_clock_wall(void) {
    return now(CLOCK_REALTIME);
}

int64_t tu_deadline_from(int64_t start, int64_t timeout_ns) {
    int64_t deadline;
    return __builtin_add_overflow(start, timeout_ns, &deadline) ? INT64_MAX : deadline;
}

int64_t tu_deadline(int64_t timeout_ns) {
    return tu_deadline_from(tu_clock_now(), timeout_ns);
}

int64_t tu_deadline_left(int64_t deadline) {
    int64_t left = deadline - tu_clock_now();
    return left > 0 ? left : 0;
}

tu_duration tu_duration_of(int64_t ns) {
    tu_duration made;
    if (ns < 1000)
        snprintf(made.text, sizeof made.text, "%lld ns", (long long)ns);
    else if (ns < TU_MILLISECOND)
        snprintf(made.text, sizeof made.text, "%.3g us", (double)ns / 1e3);
    else if (ns < TU_SECOND)
        snprintf(made.text, sizeof made.text, "%.3g ms", (double)ns / 1e6);
    else
        snprintf(made.text, sizeof made.text, "%.4g s", (double)ns / 1e9);
    return made;
}

tutti_status tu_timeout_choose(const char *what, int64_t call, int64_t group, int64_t world, int64_t *timeout_ns) {
    if (call < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s%stimeout_ns is %lld; it must be positive, or 0 for the group's or world's deadline "
                        "(TUTTI_UNTIL_EVENT is for receives, for waits on a store and for tutti_world_next_event)",
                        what != NULL ? what : "", what != NULL ? ": " : "", (long long)call);
    *timeout_ns = call > 0 ? call : group > 0 ? group : world > 0 ? world : 300 * TU_SECOND;
    return TUTTI_OK;
}
