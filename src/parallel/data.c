/* SPDX-License-Identifier: Apache-2.0
 *
 * Data parallel training: hooks behind the accumulation of each parameter's gradient put it into its bucket, and start
 * the reduction of buckets that are full, in order. The idea of buckets that follow the backward is PyTorch's
 * reducer's.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/symmetric.h>

#include "autograd/node.h"
#include "base/result.h"
#include "parallel/parallel.h"
#include "tensor/create.h"

#define LINE 64 /* bytes; parts of a bucket begin at multiples of it */

typedef struct member {
    tt_data_parallel *parallel;
    tt_tensor *parameter; /* held */
    char *name;
    tt_hook *hook;
    int bucket;
    tt_tensor *part;   /* of the bucket; held */
    tt_tensor *before; /* what an unused parameter's part held, while it is reduced; held, or NULL */
    bool ready;        /* this backward has its gradient */
    bool unused;       /* this round has none, as far as is known */
    bool used_anywhere;
} member;

typedef struct bucket {
    tt_tensor *values;  /* held */
    tt_tensor **parts;  /* the members' */
    int64_t elements;   /* with the gaps between parts */
    int count, missing; /* parts, and those whose gradients are still to come */
    tutti_dtype dtype;
    tutti_device device;
} bucket;

struct tt_data_parallel {
    atomic_int references; /* the caller's, and one per compiled function that looked at it */
    tt_module *module;     /* held */
    tutti_group *group;    /* held */
    tt_data_parallel_options options;
    tt_hook *before_forward, *after_forward;
    bool local;        /* gradients are not reduced */
    uint32_t fillings; /* how often buckets were made */
    uint64_t backward; /* that is under way */
    bool running;      /* a backward is under way */
    bool settled;      /* buckets have their last order; of a static graph: who is unused is known */
    int forwards;      /* since the last backward */
    int count, bucket_count;
    int next;     /* bucket to be reduced */
    int arrivals; /* members that are ready */
    int *order;   /* in which they came */
    member *members;
    bucket *buckets;
    tt_data_parallel_counts counts;
};

/* ---- buckets ---- */

static void free_buckets(tt_data_parallel *parallel) {
    for (int i = 0; i < parallel->bucket_count; i++) {
        tu_tensor_drop(parallel->buckets[i].values);
        free(parallel->buckets[i].parts);
    }
    free(parallel->buckets);
    parallel->buckets = NULL;
    parallel->bucket_count = 0;
    for (int i = 0; i < parallel->count; i++) {
        tu_tensor_drop(parallel->members[i].part);
        parallel->members[i].part = NULL;
    }
}

/* The last bucket for this kind of tensor, if there is room in it; else a new one. */
static int bucket_for(tt_data_parallel *parallel, const tt_tensor *x) {
    int64_t bytes = (int64_t)tu_dtype_bytes[x->dtype];
    for (int i = parallel->bucket_count - 1; i >= 0; i--) {
        bucket *one = &parallel->buckets[i];
        if (one->dtype != (tutti_dtype)x->dtype || one->device != (tutti_device)x->device)
            continue;
        int64_t most = i == 0 ? parallel->options.first_bucket_bytes : parallel->options.bucket_bytes;
        if ((one->elements + x->numel) * bytes <= most)
            return i;
        break;
    }
    parallel->buckets[parallel->bucket_count] = (bucket){ .dtype = x->dtype, .device = x->device };
    return parallel->bucket_count++;
}

static tt_tensor *new_values(const tt_data_parallel *parallel, const bucket *one) {
    return tt_symm_empty(tutti_group_world(parallel->group), tt_shape(one->elements), one->dtype,
                         TUTTI_OPTIONS(tt_symm_options, .device = one->device));
}

/* The part of a bucket that is the gradient of x: it lies as x does. */
static tt_tensor *part_of(tt_tensor *values, tt_tensor *x, int64_t offset) {
    return tu_is_dense(x) ? tt_as_strided(values, tt_sizes(x), tt_strides(x), offset)
                          : tt_view(tt_narrow(values, 0, offset, x->numel), tt_sizes(x));
}

static tutti_status fill_bucket(tt_data_parallel *parallel, int index, const int *order, const int64_t *offsets) {
    bucket *one = &parallel->buckets[index];
    one->parts = calloc((size_t)one->count, sizeof(tt_tensor *));
    if (one->parts == NULL)
        return tu_error_memory("a bucket of gradients", (size_t)one->count * sizeof(tt_tensor *));
    one->values = tu_tensor_hold(new_values(parallel, one));
    for (int i = 0, at = 0; i < parallel->count && tu_self()->pending == TUTTI_OK; i++) {
        member *each = &parallel->members[order[i]];
        if (each->bucket != index)
            continue;
        each->part = tu_tensor_hold(part_of(one->values, each->parameter, offsets[order[i]]));
        one->parts[at++] = each->part;
    }
    return tu_self()->pending;
}

/* Makes buckets for the parameters in this order. */
static tutti_status make_buckets(tt_data_parallel *parallel, const int *order) {
    int64_t *offsets = tu_scope_memory(((size_t)parallel->count + 1) * sizeof *offsets);
    parallel->fillings++;
    parallel->buckets = calloc((size_t)parallel->count + 1, sizeof *parallel->buckets);
    if (offsets == NULL || parallel->buckets == NULL)
        return tu_error_memory("buckets of gradients", (size_t)parallel->count * sizeof *parallel->buckets);
    for (int i = 0; i < parallel->count; i++) {
        member *each = &parallel->members[order[i]];
        each->bucket = bucket_for(parallel, each->parameter);
        bucket *one = &parallel->buckets[each->bucket];
        int64_t line = LINE / (int64_t)tu_dtype_bytes[one->dtype];
        offsets[order[i]] = one->elements;
        one->elements += (each->parameter->numel + line - 1) / line * line;
        one->count++;
    }
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < parallel->bucket_count && status == TUTTI_OK; i++)
        status = fill_bucket(parallel, i, order, offsets);
    return status;
}

/* ---- one round: from the first gradient of a backward to its end ---- */

static void reset(tt_data_parallel *parallel) {
    for (int i = 0; i < parallel->bucket_count; i++)
        parallel->buckets[i].missing = parallel->buckets[i].count;
    for (int i = 0; i < parallel->count; i++) {
        member *each = &parallel->members[i];
        each->ready = false;
        each->unused = parallel->options.static_graph && each->unused;
        tu_tensor_drop(each->before);
        each->before = NULL;
    }
    parallel->next = parallel->arrivals = parallel->forwards = 0;
    parallel->running = false;
}

void tt_bucket_average(void *user, const tt_bucket *full) {
    (void)user;
    if (full == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "bucket_average: bucket is NULL");
    else
        tt_all_reduce_(full->values, TUTTI_AVG, full->group);
}

static void reduce(tt_data_parallel *parallel, int index) {
    bucket *one = &parallel->buckets[index];
    tt_bucket full = {
        sizeof full,    index, parallel->bucket_count, one->values, tt_tensors_of((size_t)one->count, one->parts),
        parallel->group
    };
    parallel->options.reduce(parallel->options.user, &full);
    parallel->counts.reductions++;
    parallel->counts.early += parallel->arrivals < parallel->count;
    parallel->counts.bytes += one->elements * (int64_t)tu_dtype_bytes[one->dtype];
}

/* The member's part is complete; buckets that are full, up to the first that is not, are reduced. */
static void arrive(tt_data_parallel *parallel, member *one) {
    one->ready = true;
    parallel->order[parallel->arrivals++] = (int)(one - parallel->members);
    parallel->buckets[one->bucket].missing--;
    while (parallel->next < parallel->bucket_count && parallel->buckets[parallel->next].missing == 0 &&
           tu_self()->pending == TUTTI_OK)
        reduce(parallel, parallel->next++);
}

/* A parameter that has no part in this backward gives what it has, or zeros. */
static void arrive_unused(tt_data_parallel *parallel, member *one) {
    tt_tensor *grad = tt_grad(one->parameter);
    one->unused = true;
    if (grad == one->part)
        one->before = tu_tensor_hold(tt_clone(grad));
    else if (grad != NULL)
        tt_copy_(one->part, grad);
    else
        tt_zero_(one->part);
    arrive(parallel, one);
}

/* ---- the end of a round ---- */

/* Who has a gradient anywhere: those who have none keep what they had, the others get their part. */
static void tell_unused(tt_data_parallel *parallel) {
    uint8_t *used = tu_scope_memory((size_t)parallel->count + 1);
    for (int i = 0; used != NULL && i < parallel->count; i++)
        used[i] = !parallel->members[i].unused;
    tt_tensor *all =
        tt_all_reduce(tt_from(used, tt_shape(parallel->count), TUTTI_U8, TU_OF_HOST), TUTTI_MAX, parallel->group);
    if (used == NULL || !tt_read(all, used, TUTTI_U8, (size_t)parallel->count))
        return;
    for (int i = 0; i < parallel->count; i++)
        parallel->members[i].used_anywhere = used[i];
}

static void hand_out_unused(tt_data_parallel *parallel) {
    for (int i = 0; i < parallel->count && tu_self()->pending == TUTTI_OK; i++) {
        member *each = &parallel->members[i];
        if (!each->unused)
            continue;
        if (each->used_anywhere)
            tt_set_grad(each->parameter, each->part);
        else if (each->before != NULL)
            tt_copy_(each->part, each->before);
    }
}

/* Rank 0's order of arrival becomes everybody's. */
static void settle_order(tt_data_parallel *parallel) {
    size_t count = (size_t)parallel->count;
    int *order = tu_scope_memory((count + 1) * sizeof *order);
    tt_tensor *told = tt_from(parallel->order, tt_shape(count), TUTTI_I32, TU_OF_HOST);
    tt_broadcast_(told, 0, parallel->group);
    if (order == NULL || !tt_read(told, order, TUTTI_I32, count))
        return;
    for (int i = 0; i < parallel->bucket_count; i++)
        tt_wait(parallel->buckets[i].values);
    free_buckets(parallel);
    tu_pending_take(make_buckets(parallel, order));
}

static tutti_status missing_error(const tt_data_parallel *parallel) {
    const member *first = parallel->members;
    while (first->ready) /* one of them is not */
        first++;
    int others = parallel->count - parallel->arrivals - 1;
    return tu_error(
        TUTTI_ERROR_STATE,
        "data parallel: no gradient reached parameter \"%s\"%s in this backward; where some have no part in "
        "the result, set find_unused, or static_graph where they are the same in every step",
        first->name, others > 0 ? " and others" : "");
}

static void finish(void *user) {
    tt_data_parallel *parallel = user;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    bool learning = parallel->options.static_graph && !parallel->settled;
    for (int i = 0; i < parallel->count && learning && tu_self()->pending == TUTTI_OK; i++)
        if (!parallel->members[i].ready)
            arrive_unused(parallel, &parallel->members[i]);
    if (tu_self()->pending == TUTTI_OK && parallel->arrivals < parallel->count)
        tu_pending_take(missing_error(parallel));
    if (parallel->options.find_unused || learning)
        tell_unused(parallel);
    if (parallel->options.find_unused || parallel->options.static_graph)
        hand_out_unused(parallel);
    if (!parallel->settled && !parallel->options.find_unused && !tu_is_capturing() && tu_self()->pending == TUTTI_OK) {
        settle_order(parallel);
        parallel->settled = true;
    }
    parallel->counts.backwards++;
    reset(parallel);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}

/* ---- what compiled functions depend on ---- */

static void keep(void *owner) {
    tt_data_parallel *parallel = owner;
    atomic_fetch_add_explicit(&parallel->references, 1, memory_order_relaxed);
}

static void drop(void *owner) {
    tt_data_parallel *parallel = owner;
    if (atomic_fetch_sub_explicit(&parallel->references, 1, memory_order_acq_rel) == 1)
        free(parallel);
}

static uint64_t stamp_of(void *owner) {
    const tt_data_parallel *parallel = owner;
    return (uint64_t)parallel->fillings << 2 | (uint64_t)parallel->settled << 1 | parallel->local;
}

/* A forward depends on the switch alone. */
static tt_data_parallel *with_switch(void *local) {
    return (tt_data_parallel *)((char *)local - offsetof(tt_data_parallel, local));
}

static void keep_switch(void *local) {
    keep(with_switch(local));
}

static void drop_switch(void *local) {
    drop(with_switch(local));
}

static uint64_t stamp_of_switch(void *local) {
    return *(const bool *)local;
}

/* Who is unused is found out on the host, which a graph would not repeat. */
static bool can_capture(const tt_data_parallel *parallel) {
    bool learning = parallel->options.static_graph && !parallel->settled;
    if (!tu_is_capturing() || (!parallel->options.find_unused && !learning))
        return true;
    tu_fail(TUTTI_ERROR_CAPTURE, learning
                                     ? "data parallel: the first backward with static_graph learns which parameters "
                                       "have no part, and must run as it is"
                                     : "data parallel: find_unused looks at every step on the host; static_graph "
                                       "can be compiled after its first step");
    return false;
}

/* ---- hooks ---- */

static void begin(tt_data_parallel *parallel) {
    parallel->running = true;
    parallel->backward = tu_backward_number();
    if (tu_self()->backward != NULL)
        tt_backward_callback(finish, parallel);
    for (int i = 0; i < parallel->count && tu_self()->pending == TUTTI_OK; i++)
        if (parallel->members[i].unused && (parallel->forwards > 0 || parallel->options.static_graph))
            arrive_unused(parallel, &parallel->members[i]);
}

static void accumulated(const tt_hook_context *context, tt_tensor *parameter) {
    member *one = context->user;
    tt_data_parallel *parallel = one->parallel;
    tu_note_state(&(tu_witness){ parallel, stamp_of, keep, drop });
    if (parallel->local || !can_capture(parallel))
        return;
    if (tt_grad_enabled()) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "data parallel: gradients that are averaged cannot be differentiated; a "
                                         "backward with create_graph needs tt_data_parallel_sync(parallel, false)");
        return;
    }
    if (parallel->running && parallel->backward != tu_backward_number())
        reset(parallel); /* the last backward failed on its way, and its end will not come */
    if (!parallel->running)
        begin(parallel);
    if (tu_self()->pending != TUTTI_OK)
        return;
    if (one->ready) {
        tu_fail(TUTTI_ERROR_STATE,
                one->unused ? "data parallel: parameter \"%s\" got a gradient, though it had no part in %s"
                            : "data parallel: parameter \"%s\" got its gradient twice in one backward%s",
                one->name,
                !one->unused                     ? ""
                : parallel->options.static_graph ? "the first step of a static graph"
                                                 : "the results of the forward");
        return;
    }
    tt_tensor *grad = tt_grad(parameter);
    if (grad != one->part) {
        tt_copy_(one->part, grad);
        tt_set_grad(parameter, one->part);
    }
    arrive(parallel, one);
}

static void before_forward(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **inputs) {
    tt_data_parallel *parallel = context->user;
    (void)count, (void)inputs;
    tu_note_state(&(tu_witness){ &parallel->local, stamp_of_switch, keep_switch, drop_switch });
    if (parallel->local || tu_self()->backward != NULL)
        return;
    if (parallel->running)
        reset(parallel); /* the last backward failed on its way */
    if (parallel->options.own_buffers || !tt_module_training(module))
        return;
    tt_named_list buffers = tt_module_buffers(module);
    tu_parallel_broadcast(tt_tensors_of(buffers.count, buffers.at), 0, parallel->group);
}

static void after_forward(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                          tt_tensor **outputs) {
    tt_data_parallel *parallel = context->user;
    tu_map leaves = { .count = 0 };
    bool any = false;
    (void)module, (void)inputs;
    if (parallel->local || !parallel->options.find_unused || tu_self()->backward != NULL || !tt_grad_enabled() ||
        !can_capture(parallel))
        return;
    tutti_status status = tu_leaves_of(tt_tensors_of(count, outputs), &leaves);
    for (int i = 0; i < parallel->count && status == TUTTI_OK; i++) {
        member *each = &parallel->members[i];
        each->unused = tu_map_get(&leaves, each->parameter) == NULL && (parallel->forwards == 0 || each->unused);
        any = any || !each->unused;
    }
    tu_map_free(&leaves);
    if (tu_pending_take(status) != TUTTI_OK)
        return;
    parallel->forwards++;
    if (!any && parallel->count > 0) { /* no backward of this rank will come by */
        begin(parallel);
        finish(parallel);
    }
}

/* ---- life ---- */

static tutti_status add_members(tt_data_parallel *parallel, tt_named_list parameters) {
    parallel->members = calloc(parameters.count + 1, sizeof *parallel->members);
    parallel->order = calloc(parameters.count + 1, sizeof *parallel->order);
    if (parallel->members == NULL || parallel->order == NULL)
        return tu_error_memory("data parallel", parameters.count * sizeof *parallel->members);
    for (size_t i = 0; i < parameters.count; i++) {
        if (parameters.at[i]->flags & TU_SHARD)
            return tu_error(TUTTI_ERROR_STATE,
                            "data_parallel_new: parameter \"%s\" is a shard, and other ranks have other parts of it; "
                            "replicas of shards are an option of tt_fully_shard",
                            parameters.names[i]);
        if (!tt_requires_grad(parameters.at[i]))
            continue;
        tu_history *history = tu_history_at(parameters.at[i]);
        if (history != NULL && tu_hook_list_has(&history->accumulate_hooks, (void (*)(void))accumulated))
            return tu_error(TUTTI_ERROR_STATE, "data_parallel_new: parameter \"%s\" is data parallel already",
                            parameters.names[i]);
        member *one = &parallel->members[parallel->count];
        one->parallel = parallel;
        one->name = strdup(parameters.names[i]);
        if (one->name == NULL)
            return tu_error_memory("data parallel", strlen(parameters.names[i]));
        one->parameter = tu_tensor_hold(parameters.at[i]);
        parallel->count++;
    }
    return TUTTI_OK;
}

static void hang_hooks(tt_data_parallel *parallel) {
    for (int i = 0; i < parallel->count; i++)
        tt_hook_accumulate(parallel->members[i].parameter, accumulated, &parallel->members[i], NULL,
                           &parallel->members[i].hook);
    tt_hook_forward_pre(parallel->module, before_forward, parallel, NULL, &parallel->before_forward);
    tt_hook_forward(parallel->module, after_forward, parallel, NULL, &parallel->after_forward);
}

static tutti_status take_options(const tt_data_parallel_options *options, tt_data_parallel_options *full) {
    *full = (tt_data_parallel_options){ .size = sizeof *full };
    tutti_status status =
        options != NULL ? tu_options_copy("tt_data_parallel_options", options, full, sizeof *full) : TUTTI_OK;
    if (status == TUTTI_OK && (full->bucket_bytes < 0 || full->first_bucket_bytes < 0))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "data_parallel_new: %s is %lld, and must not be below 0",
                          full->bucket_bytes < 0 ? "bucket_bytes" : "first_bucket_bytes",
                          (long long)(full->bucket_bytes < 0 ? full->bucket_bytes : full->first_bucket_bytes));
    if (status == TUTTI_OK && full->find_unused && full->static_graph)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "data_parallel_new: find_unused and static_graph exclude each other");
    full->bucket_bytes = full->bucket_bytes > 0 ? full->bucket_bytes : (int64_t)25 << 20;
    full->first_bucket_bytes = full->first_bucket_bytes > 0 ? full->first_bucket_bytes : (int64_t)1 << 20;
    full->reduce = full->reduce != NULL ? full->reduce : tt_bucket_average;
    return status;
}

static void set_up(tt_data_parallel *parallel) {
    tt_named_list parameters = tt_module_parameters(parallel->module), buffers = tt_module_buffers(parallel->module);
    int *order = tu_scope_memory((parameters.count + 1) * sizeof *order);
    if (tu_self()->pending == TUTTI_OK)
        tu_pending_take(add_members(parallel, parameters));
    tu_parallel_agree("data_parallel_new", parameters, NULL, parallel->group); /* also with an error pending */
    if (tu_self()->pending != TUTTI_OK)
        return;
    tu_parallel_broadcast(tt_tensors_of(parameters.count, parameters.at), 0, parallel->group);
    tu_parallel_broadcast(tt_tensors_of(buffers.count, buffers.at), 0, parallel->group);
    for (int i = 0; i < parallel->count; i++)
        order[i] = parallel->count - 1 - i;
    if (tu_self()->pending == TUTTI_OK)
        tu_pending_take(make_buckets(parallel, order));
    hang_hooks(parallel);
    reset(parallel);
}

tt_data_parallel *tt_data_parallel_new(tt_module *module, tutti_group *group, const tt_data_parallel_options *options) {
    tt_data_parallel_options full;
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (module == NULL || group == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "data_parallel_new: %s is NULL", module == NULL ? "module" : "group");
        return NULL;
    }
    if (tu_pending_take(take_options(options, &full)) != TUTTI_OK)
        return NULL;
    tt_data_parallel *parallel = calloc(1, sizeof *parallel);
    if (parallel == NULL) {
        tu_pending_take(tu_error_memory("data parallel", sizeof *parallel));
        return NULL;
    }
    atomic_init(&parallel->references, 1);
    parallel->options = full;
    parallel->module = tt_module_keep(module);
    parallel->group = tutti_group_keep(group);
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    set_up(parallel);
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
    if (tu_self()->pending == TUTTI_OK)
        return parallel;
    tt_data_parallel_release(parallel);
    return NULL;
}

void tt_data_parallel_release(tt_data_parallel *parallel) {
    if (parallel == NULL)
        return;
    tt_hook_remove(&parallel->before_forward);
    tt_hook_remove(&parallel->after_forward);
    for (int i = 0; i < parallel->bucket_count; i++)
        if (parallel->buckets[i].values != NULL)
            tt_wait(parallel->buckets[i].values);
    free_buckets(parallel);
    for (int i = 0; i < parallel->count; i++) {
        member *each = &parallel->members[i];
        tt_hook_remove(&each->hook);
        tu_tensor_drop(each->parameter);
        tu_tensor_drop(each->before);
        free(each->name);
    }
    free(parallel->members);
    free(parallel->order);
    tt_module_release(parallel->module);
    tutti_group_release(parallel->group);
    parallel->count = parallel->bucket_count = 0;
    drop(parallel);
}

bool tt_data_parallel_sync(tt_data_parallel *parallel, bool on) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (parallel == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "data_parallel_sync: parallel is NULL");
        return false;
    }
    bool was = !parallel->local;
    parallel->local = !on;
    return was;
}

bool tt_data_parallel_count(const tt_data_parallel *parallel, tt_data_parallel_counts *counts) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (parallel == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "data_parallel_count: parallel is NULL");
        return false;
    }
    tt_data_parallel_counts own = parallel->counts;
    own.buckets = parallel->bucket_count;
    return tu_pending_take(tu_result_copy("tt_data_parallel_counts", &own, sizeof own, counts)) == TUTTI_OK;
}
