/* SPDX-License-Identifier: Apache-2.0
 *
 * Schedules of the learning rate: pure functions of the number of steps.
 */
#include <math.h>

#include "nn/optimizer.h"

static const double pi = 3.14159265358979323846;

static tutti_status check(const tt_schedule *schedule) {
    bool falls = schedule->kind == TT_SCHEDULE_LINEAR || schedule->kind == TT_SCHEDULE_COSINE;
    if ((int)schedule->kind < TT_SCHEDULE_CONSTANT || (int)schedule->kind > TT_SCHEDULE_COSINE)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_schedule.kind is %d, which is none of the kinds",
                        (int)schedule->kind);
    if (schedule->warm_up < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_schedule.warm_up is %lld and must not be negative",
                        (long long)schedule->warm_up);
    if (falls && schedule->steps <= schedule->warm_up)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tt_schedule.steps is %lld, and this kind needs more than the %lld steps of the warm-up",
                        (long long)schedule->steps, (long long)schedule->warm_up);
    if (schedule->kind == TT_SCHEDULE_STEP && schedule->every <= 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_schedule.every is %lld, and this kind needs a number above 0",
                        (long long)schedule->every);
    if (!(schedule->last >= 0) || !(schedule->factor >= 0) || isinf(schedule->last) || isinf(schedule->factor))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tt_schedule.factor is %g and .last is %g: both must be finite and not negative",
                        schedule->factor, schedule->last);
    return TUTTI_OK;
}

static double factor_after(const tt_schedule *schedule, int64_t done) {
    if (done < schedule->warm_up)
        return (double)(done + 1) / (double)schedule->warm_up;
    int64_t since = done - schedule->warm_up;
    if (schedule->kind == TT_SCHEDULE_CONSTANT)
        return 1;
    if (schedule->kind == TT_SCHEDULE_STEP)
        return pow(tu_option_number(schedule->factor, 0.1), (double)(since / schedule->every));
    double part = fmin(1, (double)since / (double)(schedule->steps - schedule->warm_up));
    double left = schedule->kind == TT_SCHEDULE_LINEAR ? 1 - part : (1 + cos(pi * part)) / 2;
    return schedule->last + (1 - schedule->last) * left;
}

static bool take(const tt_schedule *schedule, tt_schedule *full) {
    *full = (tt_schedule)TT_SCHEDULE_INIT;
    return tu_self()->pending == TUTTI_OK &&
           tu_pending_take(tu_options_copy("tt_schedule", schedule, full, sizeof *full)) == TUTTI_OK &&
           tu_pending_take(check(full)) == TUTTI_OK;
}

double tt_schedule_factor(const tt_schedule *schedule, int64_t done) {
    tt_schedule full;
    if (!take(schedule, &full))
        return NAN;
    if (done < 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "schedule_factor: %lld steps cannot have been made", (long long)done);
        return NAN;
    }
    return factor_after(&full, done);
}

bool tt_schedule_apply(const tt_schedule *schedule, tt_optimizer *optimizer) {
    tt_schedule full;
    if (!tu_optimizer_usable("schedule_apply", optimizer) || !take(schedule, &full))
        return false;
    double factor = factor_after(&full, (int64_t)tt_item(optimizer->steps));
    for (int i = 0; i < optimizer->group_count; i++)
        tt_fill_(optimizer->groups[i].rate, optimizer->groups[i].base_rate * factor);
    return tu_self()->pending == TUTTI_OK;
}
