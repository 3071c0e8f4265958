/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints: what the nodes of a region save is not kept but computed again when a backward asks for it.
 *
 * Saved-tensor hooks put an entry in place of each tensor. The first entry that a backward unpacks runs the region once
 * more, from the inputs and the random states that it drew, and the n-th tensor that is saved then fills the n-th
 * entry.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/function.h"
#include "autograd/node.h"
#include "tensor/tape.h"

typedef struct checkpoint checkpoint;

typedef struct entry {
    checkpoint *owner; /* held */
    size_t index;
    tu_shape shape;
    tt_tensor *tensor; /* NULL until it is computed again; held */
    uint32_t version;
} entry;

typedef struct random_state {
    uint64_t seed, counter;
    uint32_t rank;
} random_state;

struct checkpoint {
    atomic_int references; /* one per entry, and one of the forward */
    tt_region *region;
    void *user;
    void (*release)(void *user);
    tu_tape random; /* states that the region drew */
    size_t input_count;
    tt_tensor *inputs[TT_FUNCTION_TENSORS]; /* held */
    uint32_t versions[TT_FUNCTION_TENSORS];
    size_t count, capacity, next; /* `next`: which entry the running recomputation fills */
    entry **entries;              /* NULL where released */
};

static void drop(checkpoint *one) {
    if (atomic_fetch_sub_explicit(&one->references, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < one->input_count; i++)
        tu_tensor_drop(one->inputs[i]);
    if (one->release != NULL)
        one->release(one->user);
    tu_tape_free(&one->random);
    free(one->entries);
    free(one);
}

static random_state random_now(void) {
    const tu_thread *self = tu_self();
    return (random_state){ self->seed, self->counter, self->seed_rank };
}

static void set_random(random_state state) {
    tu_thread *self = tu_self();
    self->seed = state.seed;
    self->counter = state.counter;
    self->seed_rank = state.rank;
}

/* ---- forward: an entry for each tensor ---- */

static void *pack(void *user, tt_tensor *tensor) {
    checkpoint *one = user;
    if (one->count == one->capacity) {
        size_t larger = one->capacity * 2 + 16;
        entry **moved = realloc(one->entries, larger * sizeof(entry *));
        if (moved == NULL) {
            tu_pending_take(tu_error_memory("a checkpoint", larger * sizeof(entry *)));
            return NULL;
        }
        one->entries = moved;
        one->capacity = larger;
    }
    entry *made = calloc(1, sizeof *made);
    if (made == NULL) {
        tu_pending_take(tu_error_memory("a checkpoint", sizeof *made));
        return NULL;
    }
    *made = (entry){ .owner = one, .index = one->count, .shape = tu_shape_of(tensor) };
    atomic_fetch_add_explicit(&one->references, 1, memory_order_relaxed);
    one->entries[one->count++] = made;
    return made;
}

static void release(void *user, void *packed) {
    entry *gone = packed;
    (void)user;
    if (gone == NULL)
        return;
    tu_tensor_drop(gone->tensor);
    gone->owner->entries[gone->index] = NULL;
    drop(gone->owner);
    free(gone);
}

/* ---- backward: once more ---- */

static bool same_shape(const tu_shape *left, const tu_shape *right) {
    return left->dtype == right->dtype && left->ndim == right->ndim &&
           memcmp(left->sizes, right->sizes, (size_t)left->ndim * sizeof left->sizes[0]) == 0;
}

static void *refill(void *user, tt_tensor *tensor) {
    checkpoint *one = user;
    size_t index = one->next++;
    entry *place = index < one->count ? one->entries[index] : NULL;
    if (place == NULL || place->tensor != NULL)
        return NULL;
    tu_shape shape = tu_shape_of(tensor);
    if (!same_shape(&shape, &place->shape)) {
        tu_fail(TUTTI_ERROR_STATE,
                "checkpoint: the region computed something else when it ran again: %s where there was %s before",
                tu_describe(tensor), tu_dims_text(place->shape.ndim, place->shape.sizes));
        return NULL;
    }
    place->tensor = tu_tensor_alias(tensor, &shape);
    if (place->tensor == NULL)
        tu_pending_take(TUTTI_ERROR_MEMORY);
    if (place->tensor != NULL) {
        place->tensor->flags |= tensor->flags & (TU_NUMBER | TU_LITERAL); /* it belongs to any device still */
        place->version = tu_version(place->tensor);
    }
    return NULL;
}

static tt_tensor *refuse_inner(void *user, void *packed) {
    (void)user, (void)packed;
    tu_fail(TUTTI_ERROR_UNSUPPORTED, "checkpoint: the region runs a backward through itself when it is computed again");
    return NULL;
}

/* The inputs without their history, which the graph has already. */
static bool take_inputs(const checkpoint *one, tt_tensor **inputs) {
    for (size_t i = 0; i < one->input_count; i++) {
        tt_tensor *x = one->inputs[i];
        inputs[i] = NULL;
        if (x == NULL)
            continue;
        if (tu_version(x) != one->versions[i]) {
            tu_fail(TUTTI_ERROR_VERSION,
                    "checkpoint: its input %zu, %s, was changed in place since the forward, so the region cannot be "
                    "computed again; clone it before",
                    i, tu_describe(x));
            return false;
        }
        inputs[i] = tt_detach(x);
        if (tt_requires_grad(x))
            tt_require_grad(inputs[i], true);
    }
    return tu_self()->pending == TUTTI_OK;
}

static void run_again(checkpoint *one) {
    tt_saved_hooks hooks = { sizeof hooks, refill, refuse_inner, NULL, one };
    tt_tensor *inputs[TT_FUNCTION_TENSORS], *outputs[TT_FUNCTION_TENSORS];
    if (!take_inputs(one, inputs) || !tt_saved_hooks_push(&hooks))
        return;
    one->next = 0;
    tu_tape_begin(&one->random, true);
    tt_grad_mode(true);
    one->region(one->user, tt_tensors_of(one->input_count, inputs), outputs);
    tt_grad_mode(false);
    tu_tape_end(&one->random);
    tt_saved_hooks_pop();
    if (tu_self()->pending == TUTTI_OK && one->next != one->count)
        tu_fail(TUTTI_ERROR_STATE,
                "checkpoint: the region computed something else when it ran again: %zu tensors are saved, and %zu were",
                one->next, one->count);
}

static tt_tensor *unpack(void *user, void *packed) {
    entry *wanted = packed;
    (void)user;
    if (tt_grad_enabled()) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "checkpoint: a backward with create_graph cannot go through it");
        return NULL;
    }
    if (wanted->tensor == NULL) {
        random_state outside = random_now(); /* a region that seeds leaves no trace */
        tt_scope scope = tt_scope_open();
        run_again(wanted->owner);
        tu_scope_leave(&scope);
        set_random(outside);
    }
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (tu_version(wanted->tensor) != wanted->version) {
        tu_fail(TUTTI_ERROR_VERSION,
                "checkpoint: %s, which a gradient needs, was changed in place after it was saved. Clone it before",
                tu_describe(wanted->tensor));
        return NULL;
    }
    return wanted->tensor;
}

/* ---- the call ---- */

static checkpoint *make(tt_region *region, void *user, void (*end)(void *user), tt_tensor_list inputs) {
    checkpoint *one = calloc(1, sizeof *one);
    if (one == NULL) {
        tu_pending_take(tu_error_memory("a checkpoint", sizeof *one));
        return NULL;
    }
    *one = (checkpoint){ .region = region, .user = user, .input_count = inputs.count };
    one->release = end;
    atomic_init(&one->references, 1);
    for (size_t i = 0; i < inputs.count; i++) {
        if (inputs.at[i] == NULL)
            continue;
        one->inputs[i] = tu_tensor_hold(inputs.at[i]);
        one->versions[i] = tu_version(inputs.at[i]);
    }
    return one;
}

static bool check(tt_region *region, tt_tensor_list inputs) {
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check())
        return false;
    if (region == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "checkpoint: region is NULL");
    else if (inputs.count > TT_FUNCTION_TENSORS)
        tu_fail(TUTTI_ERROR_LIMIT, "checkpoint: %zu inputs; at most %d are possible", inputs.count,
                TT_FUNCTION_TENSORS);
    if (tu_self()->pending == TUTTI_OK)
        tu_pending_take(tu_tensors_check("checkpoint", "inputs", inputs.at, inputs.count));
    return tu_self()->pending == TUTTI_OK;
}

/* Runs the region in a scope of its own, so that what it computes on the way goes; its results come out. */
static int run_region(tt_region *region, void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_scope scope = tt_scope_open();
    int count = region(user, inputs, outputs);
    if (tu_self()->pending == TUTTI_OK && (count < 0 || count > TT_FUNCTION_TENSORS))
        tu_fail(TUTTI_ERROR_ARGUMENT, "checkpoint: the region returned %d results; 0 to %d are possible", count,
                TT_FUNCTION_TENSORS);
    for (int i = 0; i < count && tu_self()->pending == TUTTI_OK; i++)
        tt_scope_return(outputs[i]);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK ? count : -1;
}

tt_tensor_list tt_checkpoint(tt_region *region, void *user, void (*end)(void *user), tt_tensor_list inputs) {
    tt_tensor_list none = { 0, tu_nothing };
    tt_tensor *few[TT_FUNCTION_TENSORS];
    tt_tensor **outputs = check(region, inputs) && tu_stand_in_all(&inputs, few)
                              ? tu_scope_memory(TT_FUNCTION_TENSORS * sizeof *outputs)
                              : NULL;
    checkpoint *one = outputs != NULL ? make(region, user, end, inputs) : NULL;
    if (one == NULL) {
        if (end != NULL)
            end(user);
        return none;
    }
    tt_saved_hooks hooks = { sizeof hooks, pack, unpack, release, one };
    bool packs = tt_grad_enabled() && tt_saved_hooks_push(&hooks);
    if (packs)
        tu_tape_begin(&one->random, false);
    int count = run_region(region, user, inputs, outputs);
    if (packs) {
        tu_tape_end(&one->random);
        tt_saved_hooks_pop();
    }
    drop(one);
    return count >= 0 ? tt_tensors_of((size_t)count, outputs) : none;
}
