/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program may change about units while it trains: when they are freed and gathered, and which of them ahead.
 */
#include <stdlib.h>

#include "parallel/shard.h"

tu_shard_unit *tu_shard_unit_of(const char *who, const tt_fully_sharded *sharded, const tt_module *module) {
    for (int i = 0; i < sharded->unit_count; i++)
        if (sharded->units[i].module == module)
            return &sharded->units[i];
    tu_fail(TUTTI_ERROR_NOT_FOUND, "%s: module %s is no unit", who, tt_module_name(module));
    return NULL;
}

static void set_switch(tu_shard_unit *unit, tt_shard_switch which, bool on) {
    switch (which) {
    case TT_SWITCH_FREE_FORWARD:
        unit->keep_forward = !on;
        break;
    case TT_SWITCH_FREE_BACKWARD:
        unit->keep_backward = !on;
        break;
    case TT_SWITCH_GATHER_BACKWARD:
        unit->not_back = !on;
        break;
    case TT_SWITCH_REPLICAS:
        unit->no_replicas = !on;
        break;
    }
}

bool tt_fully_sharded_switch(tt_fully_sharded *sharded, const tt_module *unit, tt_shard_switch which, bool on) {
    static const char who[] = "fully_sharded_switch";
    if (!tu_shard_usable(who, sharded))
        return false;
    if (which < TT_SWITCH_FREE_FORWARD || which > TT_SWITCH_REPLICAS)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %d is no tt_shard_switch", who, (int)which);
    else if (which == TT_SWITCH_REPLICAS && sharded->options.replicas == NULL)
        tu_fail(TUTTI_ERROR_STATE, "%s: there are no replicas to average with (tt_fully_sharded_options.replicas)",
                who);
    tu_shard_unit *one = unit != NULL && tu_self()->pending == TUTTI_OK ? tu_shard_unit_of(who, sharded, unit) : NULL;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    for (int i = 0; i < sharded->unit_count; i++)
        if (one == NULL || one == &sharded->units[i])
            set_switch(&sharded->units[i], which, on);
    sharded->changes++; /* compiled functions look again */
    return true;
}

bool tt_fully_sharded_prefetch(tt_fully_sharded *sharded, tt_shard_pass pass, const tt_module *unit, size_t count,
                               tt_module *const *ahead) {
    static const char who[] = "fully_sharded_prefetch";
    if (!tu_shard_usable(who, sharded))
        return false;
    if (pass != TT_PASS_FORWARD && pass != TT_PASS_BACKWARD)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %d is no tt_shard_pass", who, (int)pass);
    else if (unit == NULL || (count > 0 && ahead == NULL))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s is NULL", who, unit == NULL ? "unit" : "ahead");
    tu_shard_unit *one = tu_self()->pending == TUTTI_OK ? tu_shard_unit_of(who, sharded, unit) : NULL;
    tu_shard_unit **units = one != NULL ? calloc(count + 1, sizeof(tu_shard_unit *)) : NULL;
    if (one != NULL && units == NULL)
        tu_pending_take(tu_error_memory("a list of units", (count + 1) * sizeof(tu_shard_unit *)));
    for (size_t i = 0; units != NULL && i < count && tu_self()->pending == TUTTI_OK; i++) {
        if (ahead[i] == NULL)
            tu_fail(TUTTI_ERROR_ARGUMENT, "%s: ahead[%zu] is NULL", who, i);
        else
            units[i] = tu_shard_unit_of(who, sharded, ahead[i]);
    }
    if (one == NULL || tu_self()->pending != TUTTI_OK) {
        free(units);
        return false;
    }
    tu_shard_ahead *list = &one->ahead[pass - TT_PASS_FORWARD];
    free(list->units);
    *list = (tu_shard_ahead){ true, count, units };
    sharded->changes++;
    return true;
}
