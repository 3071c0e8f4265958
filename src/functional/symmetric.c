/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on the symmetric memory of peers, and the test mode of operations on symmetric memory. This rank's own are
 * made in tensor/symmetric.c.
 */
#include "functional/symmetric.h"

#include <stdlib.h>
#include <string.h>

#include <tutti/symmetric.h>

#include "functional/operators.h"
#include "functional/registry.h"
#include "tensor/on_device.h"

/* ---- where ranks meet ---- */

tutti_status tu_symm_meet(const char *who, const char *what, const tt_tensor *x, tutti_group *group,
                          tu_symm_place *place, tutti_peers **peers) {
    tutti_status status = tu_symm_require(who, what, x, tutti_group_world(group), place);
    return status == TUTTI_OK ? tutti_memory_rendezvous(place->memory, group, peers) : status;
}

/* ---- a peer's ---- */

static void release_peers(void *owner) {
    tutti_peers_release(owner);
}

tutti_status tu_peer_tensor_shape(tu_call *call) {
    const tu_peer_tensor_attributes *attributes = call->attributes;
    int ranks = attributes->group != NULL ? tutti_group_size(attributes->group) : 0;
    if (attributes->group != NULL && (attributes->rank < 0 || attributes->rank >= ranks))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "rank must be in [0, %d), and is %d", ranks, attributes->rank);
    return tu_shape_of_first(call);
}

/* This rank's own: its storage itself, and its version. */
static void move_to_own(tt_tensor *output, const tt_tensor *x) {
    tu_tensor_move(output, tu_storage_hold(x->storage));
    if (x->version_home != x->storage)
        output->version_home = tu_storage_hold(x->version_home);
}

/* Another rank's: its storage lies in that rank's block where x's lies in this rank's, and holds the handle. */
static tutti_status move_to_peer(tt_tensor *output, const tt_tensor *x, const tu_symm_place *place, tutti_peers *peers,
                                 int rank) {
    char *buffer = tutti_peers_buffer(peers, rank);
    if (buffer == NULL) {
        tutti_peers_release(peers);
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "peer_tensor: Cannot get buffer across nodes: rank %d is not mapped",
                        rank);
    }
    size_t before = place->offset - (size_t)x->offset * tu_dtype_bytes[x->dtype];
    tu_storage *storage = tu_storage_wrap(buffer + before, x->storage->bytes, release_peers, peers);
    if (storage == NULL) {
        tutti_peers_release(peers);
        return TUTTI_ERROR_MEMORY;
    }
    storage->device = x->device;
    tutti_status status = tu_on_device(x) ? tu_device_note_uses(storage) : TUTTI_OK;
    if (status == TUTTI_OK)
        tu_tensor_move(output, storage);
    else
        tu_storage_drop(storage);
    return status;
}

/* Every rank takes part in the rendezvous, also one that asks for its own. Of a fake world's other ranks there is no
 * memory, and this rank's stands for it. */
tutti_status tu_peer_tensor_everywhere(tu_call *call) {
    const tu_peer_tensor_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tutti_group *group = attributes->group;
    tu_symm_place place;
    tutti_peers *peers;
    bool fake = tu_group_is_fake(group);
    tutti_status status = fake ? tu_symm_require("peer_tensor", "x", x, tutti_group_world(group), &place)
                               : tu_symm_meet("peer_tensor", "x", x, group, &place, &peers);
    if (status != TUTTI_OK)
        return status;
    if (!fake && attributes->rank != tutti_group_rank(group))
        return move_to_peer(call->outputs[0], x, &place, peers, attributes->rank);
    if (!fake)
        tutti_peers_release(peers);
    move_to_own(call->outputs[0], x);
    return TUTTI_OK;
}

tt_tensor *tu_peer_tensor_sample(tu_sampler *sampler) {
    return tt_peer_tensor(
        tu_symm_sample(sampler, sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0)), 0,
        sampler->group);
}

/* A sample on symmetric memory; on meta there is none. */
tt_tensor *tu_symm_sample(tu_sampler *sampler, tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("symm_sample", "x", x)) != TUTTI_OK)
        return NULL;
    if (x->device == TUTTI_META)
        return x;
    tt_symm_options options = TT_SYMM_OPTIONS_INIT;
    options.device = x->device;
    return tt_copy_(tt_symm_empty(tutti_group_world(sampler->group), tt_sizes(x), tt_dtype(x), &options), x);
}

/* ---- whether it is on ---- */

typedef struct test_mode {
    tu_kept kept; /* first: a stack of the thread */
    size_t count; /* of names; 0: every group */
    char *names;  /* one after the other, each with its end */
} test_mode;

static test_mode *tests(void) {
    return (test_mode *)tu_self()->symmetric_tests;
}

bool tu_symm_test_mode(void) {
    return tests() != NULL;
}

static bool names_group(const test_mode *test, const char *group) {
    const char *name = test->names;
    for (size_t i = 0; i < test->count; i++, name += strlen(name) + 1)
        if (strcmp(name, group) == 0)
            return true;
    return test->count == 0;
}

bool tt_symm_enabled(tutti_world *world, const char *group) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (world == NULL || group == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_enabled: argument %s is NULL", world == NULL ? "world" : "group");
        return false;
    }
    return tests() != NULL ? names_group(tests(), group) : tutti_group_by_name(world, group) != NULL;
}

bool tt_symm_test_begin(size_t count, const char *const *groups) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        if (groups == NULL || groups[i] == NULL) {
            tu_fail(TUTTI_ERROR_ARGUMENT, "symm_test_begin: name %zu of %zu is NULL", i, count);
            return false;
        }
        bytes += strlen(groups[i]) + 1;
    }
    test_mode *test = malloc(sizeof *test + bytes);
    if (test == NULL) {
        tu_pending_take(tu_error_memory("a test mode", sizeof *test + bytes));
        return false;
    }
    *test = (test_mode){ { tu_self()->symmetric_tests }, count, (char *)(test + 1) };
    char *to = test->names;
    for (size_t i = 0; i < count; i++)
        to = stpcpy(to, groups[i]) + 1;
    tu_self()->symmetric_tests = &test->kept;
    return true;
}

void tt_symm_test_end(void) {
    test_mode *test = tests();
    if (test == NULL) {
        tu_fail(TUTTI_ERROR_STATE, "symm_test_end: no test mode is on in this thread");
        return;
    }
    tu_self()->symmetric_tests = test->kept.outer;
    free(test);
}
