/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on symmetric memory: this rank's own, and those of its peers.
 */
#include "functional/symmetric.h"

#include <stdlib.h>
#include <string.h>

#include <tutti/autograd.h>
#include <tutti/symmetric.h>

#include "functional/operators.h"
#include "functional/registry.h"

/* ---- this rank's own ---- */

static void release_block(void *owner) {
    tutti_memory_release(owner);
}

tu_storage *tu_symm_storage(tutti_memory *memory, size_t bytes) {
    tu_storage *storage = tu_storage_wrap(tutti_memory_data(memory), bytes, release_block, memory);
    if (storage == NULL)
        tutti_memory_release(memory);
    return storage;
}

static tt_tensor *on_block(tutti_world *world, const tu_shape *shape, size_t bytes, const tt_symm_options *options) {
    tutti_memory_options wanted = TUTTI_MEMORY_OPTIONS_INIT;
    tutti_memory *memory;
    wanted.group = options->group;
    wanted.persistent = options->persistent;
    wanted.persistent_id = options->persistent_id;
    if (tu_pending_take(tutti_memory_alloc(world, bytes, &wanted, &memory)) != TUTTI_OK)
        return NULL;
    tt_tensor *x = tu_tensor_on(tu_symm_storage(memory, bytes), shape);
    if (x == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    x = tu_scope_own(x);
    return x != NULL && options->requires_grad ? tt_require_grad(x, true) : x;
}

tt_tensor *tt_symm_empty_strided(tutti_world *world, tt_dims shape, tt_dims strides, tutti_dtype dtype,
                                 const tt_symm_options *options) {
    tt_symm_options full = TT_SYMM_OPTIONS_INIT;
    tu_shape described;
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_options_copy("tt_symm_options", options, &full, sizeof full)) != TUTTI_OK ||
        tu_pending_take(tu_shape_from("symm_empty", shape, dtype, TUTTI_CPU, &described)) != TUTTI_OK)
        return NULL;
    if (world == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: world is NULL");
        return NULL;
    }
    if (full.persistent_id != 0 && !full.persistent) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "symm_empty: persistent_id is %llu, and persistent is not set: set both, or neither",
                (unsigned long long)full.persistent_id);
        return NULL;
    }
    if (full.requires_grad && !tu_is_float(dtype) && !tu_is_complex(dtype)) {
        tu_fail(TUTTI_ERROR_TYPE,
                "symm_empty: requires_grad is set, and only floats and complex numbers have gradients, "
                "not %s",
                tutti_dtype_name(dtype));
        return NULL;
    }
    if (strides.count >= 0 && strides.count != shape.count) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: %d strides given for %d dimensions", strides.count, shape.count);
        return NULL;
    }
    int64_t last = 0;
    for (int i = 0; i < described.ndim; i++) {
        int64_t stride = strides.count >= 0 ? strides.at[i] : described.strides[i], extent;
        if (stride < 0 || __builtin_mul_overflow(stride, described.sizes[i], &extent) || extent > PTRDIFF_MAX / 256) {
            tu_fail(TUTTI_ERROR_ARGUMENT, "symm_empty: stride %lld of dimension %d cannot be used", (long long)stride,
                    i);
            return NULL;
        }
        described.strides[i] = stride;
        last += described.sizes[i] > 0 ? (described.sizes[i] - 1) * stride : 0;
    }
    size_t bytes = tu_shape_numel(&described) == 0 ? 0 : (size_t)(last + 1) * tu_dtype_bytes[dtype];
    return on_block(world, &described, bytes, &full);
}

tt_tensor *tt_symm_empty(tutti_world *world, tt_dims shape, tutti_dtype dtype, const tt_symm_options *options) {
    return tt_symm_empty_strided(world, shape, tt_no_dims(), dtype, options);
}

tutti_memory *tt_symm_memory(const tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("symm_memory", "x", x)) != TUTTI_OK)
        return NULL;
    return x->storage->release == release_block ? x->storage->owner : NULL;
}

/* ---- for operations on symmetric memory ---- */

/* A storage that was made here knows its block; any other one is looked up by its address. */
bool tu_symm_find(const tt_tensor *x, tutti_world *world, tu_symm_place *place) {
    const char *pointer = tu_pointer(x);
    if (x->device == TUTTI_META || pointer == NULL)
        return false;
    bool known = x->storage->release == release_block;
    tutti_memory *memory = known ? x->storage->owner : world != NULL ? tutti_memory_find(world, pointer) : NULL;
    if (memory == NULL)
        return false;
    size_t offset = (size_t)(pointer - (const char *)tutti_memory_data(memory));
    size_t need = tu_tensor_need(x) - (size_t)x->offset * tu_dtype_bytes[x->dtype];
    if (x->numel > 0 && offset + need > tutti_memory_bytes(memory))
        return false;
    *place = (tu_symm_place){ memory, offset };
    return true;
}

tutti_status tu_symm_require(const char *who, const char *what, const tt_tensor *x, tutti_world *world,
                             tu_symm_place *place) {
    if (tu_symm_find(x, world, place))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "%s: %s must be allocated with empty_strided_p2p(), that is tt_symm_empty, tt_symm_empty_strided "
                    "or inside tt_symm_pool_begin: %s lies in ordinary memory",
                    who, what, tu_describe(x));
}

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
    tu_tensor_move(output, storage);
    return TUTTI_OK;
}

/* Every rank takes part in the rendezvous, also one that asks for its own. Of a fake world's other ranks there is no
 * memory, and this rank's stands for it. */
tutti_status tu_peer_tensor_cpu(tu_call *call) {
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
    return tt_copy_(tt_symm_empty(tutti_group_world(sampler->group), tt_sizes(x), tt_dtype(x), NULL), x);
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
