/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of fully sharded training train.
 */
#ifndef TESTS_PARALLEL_LAYERS_H
#define TESTS_PARALLEL_LAYERS_H

#include "support.h"

enum {
    LAYERS = 4
};

/* Layers of 10 rows, which 4 ranks cut into 3, 3, 3 and 1; a unit each, and a norm of the root's own. */
typedef struct net {
    tt_module *root, *units[LAYERS];
} net;

static inline net net_of(int seed) {
    net made;
    tt_module *modules[LAYERS + 1];
    tt_seed((uint64_t)seed, 0);
    for (int i = 0; i < LAYERS; i++) {
        tt_module *pair[] = { tt_linear_module(i == 0 ? 5 : 10, 10, true, TUTTI_F32),
                              tt_function_module("relu", tt_relu) };
        made.units[i] = modules[i] = tt_sequential_module(2, pair);
    }
    modules[LAYERS] = tt_layer_norm_module(10, 1e-5, TUTTI_F32);
    made.root = tt_sequential_module(LAYERS + 1, modules);
    return made;
}

/* Two that were compared: one of all ranks, and one that each rank has alone. */
static inline void end_pair(tt_fully_sharded *sharded, tt_optimizer *optimizer, tt_optimizer *reference, net *ours,
                            net *alone) {
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(ours->root);
    tt_module_release(alone->root);
}

static inline tt_fully_sharded *shard(const net *of, tutti_group *group, const tt_fully_sharded_options *options) {
    return tt_fully_shard(of->root, LAYERS, of->units, group, options);
}

/* ---- what happens to units ---- */

typedef struct event_log {
    int count;
    struct {
        tt_shard_event event;
        int unit; /* LAYERS: the root */
    } at[256];
} event_log;

static inline void watch(void *user, tt_shard_event event, const char *unit) {
    event_log *log = user;
    log->at[log->count].event = event;
    log->at[log->count++].unit = unit[0] == '\0' ? LAYERS : unit[0] - '0';
}

static inline void check_events(const event_log *log, const char *expected) {
    char text[1024] = "";
    static const char letters[] = { 0, 'g', 'f', 'r' };
    for (int i = 0; i < log->count; i++) {
        size_t at = strlen(text);
        snprintf(text + at, sizeof text - at, "%c%d ", letters[log->at[i].event], log->at[i].unit);
    }
    CHECK_TEXT(text, expected);
}

#endif
