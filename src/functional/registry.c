/* SPDX-License-Identifier: Apache-2.0
 *
 * The work registry. A flight is a collective that nobody has waited for yet. It stands in the list of its world, and
 * has a link in the list of each storage that it writes or reads; starting and ending one take the same time however
 * many there are. Whoever waits for a storage finishes its flights in the order in which they were started.
 *
 * Locks: a flight's own is held while it is enlisted, so that nobody finishes it before; under it the world's list and
 * the lists of storages have a lock each, held for a few stores. None is held while a work is waited for.
 */
#include "functional/registry.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "functional/operators.h"
#include "tensor/loop.h"
#include "tensor/on_device.h"
#include "tensor/process.h"
#include "world/attachment.h"

/* How a flight uses a storage; bits, so that a wait can ask for several. */
enum {
    WRITES = 1,
    READS = 2,
    SENDS = 4 /* what tt_wait waits for besides writes */
};

typedef struct flights {
    pthread_mutex_t lock;
    struct flight *first, *last; /* oldest first */
    int count;
    _Atomic int64_t waited_ns; /* by all threads */
} flights;

typedef struct flight_link {
    tu_storage_use in_storage; /* first; in the list of the storage, oldest first */
    tu_storage *storage;       /* held */
    struct flight *flight;
    unsigned use;
    tt_tensor *block, *whole; /* what is still to be moved, from the first to the second; or NULL */
    int dim;
} flight_link;

typedef struct flight {
    atomic_int references; /* the registry's, and one per thread that waits */
    pthread_mutex_t lock;
    pthread_cond_t finished;
    enum {
        FLYING,
        TAKEN, /* a thread waits for the work; others wait for `finished` */
        LANDED
    } state; /* under lock */
    const char *operation;
    tutti_group *group;   /* lent by the work */
    tutti_work *work;     /* on memory of the host, which is waited for; or NULL */
    tutti_work *enqueued; /* on a device: its last one, which streams are ordered after; or NULL */
    const tu_device *device;
    bool noted; /* some of a batch's calls wait for its end */
    tutti_dtype dtype;
    int64_t elements;
    flights *registry;
    struct flight *next, *previous; /* of the registry; under its lock */
    size_t link_count, link_capacity;
    flight_link *links;
    flight_link few[4]; /* enough for all but batches */
} flight;

/* ---- a world's registry ---- */

static void forget_joined(void *registry);

static tutti_status make_registry(void *world, void **state) {
    (void)world;
    flights *registry = malloc(sizeof *registry);
    if (registry == NULL)
        return tu_error_memory("the work registry", sizeof *registry);
    *registry = (flights){ .lock = PTHREAD_MUTEX_INITIALIZER };
    *state = registry;
    return TUTTI_OK;
}

/* With the world's memory: each work is a handle of the world, so that none is left now. */
static void end_registry(void *state) {
    flights *registry = state;
    pthread_mutex_destroy(&registry->lock);
    free(registry);
}

static bool name_unfinished(void *state, char *text, size_t size) {
    enum {
        NAMED = 6
    };
    flights *registry = state;
    size_t used = 0;
    int named = 0;
    text[0] = 0;
    pthread_mutex_lock(&registry->lock);
    for (const flight *one = registry->first; one != NULL && named < NAMED && used < size; one = one->next, named++)
        used += (size_t)snprintf(text + used, size - used, "%s%s of %lld %s in group \"%s\"", named > 0 ? ", " : "",
                                 one->operation, (long long)one->elements, tutti_dtype_name(one->dtype),
                                 tutti_group_name(one->group));
    int count = registry->count;
    if (count > named && used < size)
        used += (size_t)snprintf(text + used, size - used, " and %d more", count - named);
    if (count > 0 && used < size)
        snprintf(text + used, size - used, " (tt_wait or tt_wait_all does)");
    pthread_mutex_unlock(&registry->lock);
    return count > 0;
}

static tutti_status registry_of(tutti_world *world, flights **registry) {
    static const tu_attachment attachment = { make_registry, end_registry, name_unfinished, forget_joined };
    void *state;
    tutti_status status = tu_world_attachment(world, &attachment, &state);
    if (status == TUTTI_OK)
        *registry = state;
    return status;
}

static void enlist_in_registry(flight *one) {
    flights *registry = one->registry;
    pthread_mutex_lock(&registry->lock);
    one->previous = registry->last;
    *(registry->last != NULL ? &registry->last->next : &registry->first) = one;
    registry->last = one;
    registry->count++;
    pthread_mutex_unlock(&registry->lock);
}

static void leave_registry(flight *one) {
    flights *registry = one->registry;
    pthread_mutex_lock(&registry->lock);
    *(one->previous != NULL ? &one->previous->next : &registry->first) = one->next;
    *(one->next != NULL ? &one->next->previous : &registry->last) = one->previous;
    registry->count--;
    pthread_mutex_unlock(&registry->lock);
}

/* ---- the lists of storages ---- */

static tutti_status wait_written(tu_storage *storage);
static tutti_status wait_used(tu_storage *storage);

/* Under the storage's lock. Release pairs with the acquire of those who find nothing to wait for. */
static void mark(tu_storage *storage) {
    atomic_store_explicit(&storage->waiter, storage->writers > 0 ? wait_written : tu_device_copies_waiter(storage),
                          memory_order_release);
    atomic_store_explicit(&storage->reader, storage->readers > 0 ? wait_used : tu_device_copies_reader(storage),
                          memory_order_release);
}

static void enlist_in_storage(flight_link *one) {
    tu_storage *storage = one->storage;
    pthread_mutex_t *lock = tu_process_storage_lock(storage);
    pthread_mutex_lock(lock);
    tu_storage_use *here = &one->in_storage;
    *here = (tu_storage_use){ .previous = storage->last_use };
    *(storage->last_use != NULL ? &storage->last_use->next : &storage->first_use) = here;
    storage->last_use = here;
    storage->writers += (one->use & WRITES) != 0;
    storage->readers += (one->use & READS) != 0;
    mark(storage);
    pthread_mutex_unlock(lock);
}

static void leave_storage(flight_link *one) {
    tu_storage *storage = one->storage;
    pthread_mutex_t *lock = tu_process_storage_lock(storage);
    pthread_mutex_lock(lock);
    const tu_storage_use *here = &one->in_storage;
    *(here->previous != NULL ? &here->previous->next : &storage->first_use) = here->next;
    *(here->next != NULL ? &here->next->previous : &storage->last_use) = here->previous;
    storage->writers -= (one->use & WRITES) != 0;
    storage->readers -= (one->use & READS) != 0;
    mark(storage);
    pthread_mutex_unlock(lock);
}

/* ---- flights ---- */

static flight *flight_new(const char *operation) {
    flight *one = malloc(sizeof *one);
    if (one == NULL) {
        tu_error_memory("a collective in flight", sizeof *one);
        return NULL;
    }
    *one = (flight){ .lock = PTHREAD_MUTEX_INITIALIZER,
                     .finished = PTHREAD_COND_INITIALIZER,
                     .operation = operation,
                     .link_capacity = sizeof one->few / sizeof one->few[0] };
    one->links = one->few;
    atomic_init(&one->references, 1);
    return one;
}

static tutti_status grow_links(flight *one) {
    size_t larger = 2 * one->link_capacity;
    flight_link *links = malloc(larger * sizeof *links);
    if (links == NULL)
        return tu_error_memory("a collective in flight", larger * sizeof *links);
    memcpy(links, one->links, one->link_count * sizeof *links); /* not enlisted yet: nothing points to them */
    if (one->links != one->few)
        free(one->links);
    one->links = links;
    one->link_capacity = larger;
    return TUTTI_OK;
}

static tutti_status add_link(flight *one, const tt_tensor *tensor, unsigned use) {
    if (tensor == NULL)
        return TUTTI_OK;
    tutti_status status = one->link_count == one->link_capacity ? grow_links(one) : TUTTI_OK;
    if (status != TUTTI_OK)
        return status;
    one->links[one->link_count++] =
        (flight_link){ .storage = tu_storage_hold(tensor->storage), .flight = one, .use = use };
    atomic_fetch_add_explicit(&tensor->storage->flights, 1, memory_order_relaxed);
    one->dtype = tensor->dtype;
    return TUTTI_OK;
}

/* The handles are the flight's own: one of the caller's would keep its history alive. */
static tutti_status add_landing(flight *one, const tu_flight_plan *plan) {
    flight_link *link = &one->links[one->link_count - 1];
    tu_shape shape = tu_shape_of(plan->writes);
    if (plan->lands == NULL)
        return TUTTI_OK;
    if ((link->whole = tu_tensor_alias(plan->writes, &shape)) == NULL)
        return TUTTI_ERROR_MEMORY;
    atomic_fetch_add_explicit(&link->storage->flights, 1, memory_order_relaxed); /* the handle holds the storage too */
    link->block = tu_tensor_hold(plan->lands);
    link->dim = plan->dim;
    return TUTTI_OK;
}

static tutti_status add_links(flight *one, const tu_flight_plan *plan) {
    tutti_status status = add_link(one, plan->also_writes, WRITES);
    if (status == TUTTI_OK)
        status = add_link(one, plan->also_reads, READS);
    if (status == TUTTI_OK)
        status = add_link(one, plan->writes, WRITES);
    if (status == TUTTI_OK && plan->writes != NULL)
        status = add_landing(one, plan);
    if (status == TUTTI_OK)
        status = add_link(one, plan->reads, READS);
    if (status == TUTTI_OK)
        status = add_link(one, plan->sends, SENDS);
    one->elements += plan->writes != NULL ? plan->writes->numel : 0;
    if (one->elements == 0 && plan->reads != NULL)
        one->elements = plan->reads->numel;
    return status;
}

static void drop_flight(flight *one) {
    if (atomic_fetch_sub_explicit(&one->references, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < one->link_count; i++) {
        atomic_fetch_sub_explicit(&one->links[i].storage->flights, one->links[i].whole != NULL ? 2 : 1,
                                  memory_order_relaxed);
        tu_storage_drop(one->links[i].storage);
        tu_tensor_drop(one->links[i].block);
        tu_tensor_drop(one->links[i].whole);
    }
    if (one->links != one->few)
        free(one->links);
    pthread_mutex_destroy(&one->lock);
    pthread_cond_destroy(&one->finished);
    free(one);
}

static void enlist(flight *one) {
    pthread_mutex_lock(&one->lock);
    enlist_in_registry(one);
    for (size_t i = 0; i < one->link_count; i++)
        enlist_in_storage(&one->links[i]);
    pthread_mutex_unlock(&one->lock);
}

void tu_move_parts(const tt_tensor *block, const tt_tensor *x, int dim, int ranks, tu_parts_direction direction) {
    tu_shape part = tu_shape_of(x), piece = part;
    part.sizes[dim] /= ranks;
    piece.sizes[dim] /= ranks;
    tutti_status status = tu_shape_contiguous("parts", &piece); /* smaller than x: it fits */
    (void)status;
    int64_t numel = tu_shape_numel(&piece);
    for (int i = 0; i < ranks; i++) {
        part.offset = x->offset + i * part.sizes[dim] * x->strides[dim];
        piece.offset = block->offset + i * numel;
        tt_tensor beside = tu_tensor_look(x, &part), behind = tu_tensor_look(block, &piece);
        if (direction == TU_PARTS_TO_BLOCK)
            tu_copy_tensor(&behind, &beside);
        else
            tu_copy_tensor(&beside, &behind);
    }
}

/* What the work left in blocks goes where it belongs. */
static void land(const flight *one) {
    for (size_t i = 0; i < one->link_count; i++)
        if (one->links[i].block != NULL)
            tu_move_parts(one->links[i].block, one->links[i].whole, one->links[i].dim, tutti_group_size(one->group),
                          TU_PARTS_FROM_BLOCK);
}

/* ---- on a device ----
 *
 * Nobody waits for a work there on the host: the current stream of whoever needs the result is ordered after it. What
 * its kernels find wrong later (a deadline, a mismatch, a death) stays with the group; so the last work of each group
 * is kept until the host waits for the device, and asked then.
 */

/* The last work of a group that this thread has joined and not asked yet. */
typedef struct joined {
    tu_device_watch watch; /* first */
    tutti_work *work;
} joined;

static tutti_status ask_joined(tu_device_watch *watch) {
    joined *one = (joined *)watch;
    tutti_status status = tutti_work_wait(one->work, 0); /* its stream is past it */
    tutti_work_release(one->work);
    free(one);
    return status;
}

/* Takes over the reference. Without memory the group still has the error, and tells it at its next call. */
static void watch_work(const flight *one, tutti_work *work) {
    joined *made = (joined *)tu_device_watch_take(tu_self(), one->registry, one->group);
    if (made != NULL) /* the later work of a group tells of the earlier ones too */
        tutti_work_release(made->work);
    else
        made = malloc(sizeof *made);
    if (made == NULL) {
        tutti_work_release(work);
        return;
    }
    *made = (joined){ { .thread = tu_self(), .owner = one->registry, .about = one->group, .ask = ask_joined }, work };
    tu_device_watch_add(&made->watch);
}

/* The world closes, and nobody is left who could be told: streams are ordered after the works all the same. */
static void forget_joined(void *registry) {
    for (tu_device_watch *one; (one = tu_device_watch_take(NULL, registry, NULL)) != NULL; free(one))
        tutti_work_release(((joined *)one)->work);
}

/* Orders the thread's current stream after the work; memory that both use is not given out before the stream is there.
 */
static tutti_status join_enqueued(flight *one) {
    void *stream = tu_device_stream(one->device);
    tutti_status status = tutti_work_join(one->enqueued, stream);
    for (size_t i = 0; i < one->link_count; i++)
        tu_device_note_use(one->device, one->links[i].storage, stream);
    if (status != TUTTI_OK || tu_device_capturing(one->device)) /* an event of a graph cannot be asked */
        tutti_work_release(one->enqueued);
    else
        watch_work(one, one->enqueued);
    return status;
}

/* Waits for the work, and counts for how long. */
static tutti_status wait_counted(flight *one) {
    bool finished;
    if (tutti_work_test(one->work, &finished) == TUTTI_OK && finished)
        return tutti_work_wait(one->work, 0);
    int64_t begin = tutti_clock();
    tutti_status status = tutti_work_wait(one->work, 0);
    atomic_fetch_add_explicit(&one->registry->waited_ns, tutti_clock() - begin, memory_order_relaxed);
    return status;
}

/* Waits for the work and takes the flight off all lists. One thread does; others that want the same wait for it, no
 * longer than the work's own deadline. */
static tutti_status finish(flight *one) {
    pthread_mutex_lock(&one->lock);
    while (one->state == TAKEN)
        pthread_cond_wait(&one->finished, &one->lock);
    bool mine = one->state == FLYING;
    if (mine)
        one->state = TAKEN;
    pthread_mutex_unlock(&one->lock);
    if (!mine)
        return TUTTI_OK;
    tutti_status status = one->work != NULL ? wait_counted(one) : TUTTI_OK;
    if (one->enqueued != NULL)
        status = status == TUTTI_OK ? join_enqueued(one) : (tutti_work_release(one->enqueued), status);
    if (status == TUTTI_OK)
        land(one);
    leave_registry(one);
    for (size_t i = 0; i < one->link_count; i++)
        leave_storage(&one->links[i]);
    tutti_work_release(one->work);
    pthread_mutex_lock(&one->lock);
    one->state = LANDED;
    pthread_cond_broadcast(&one->finished);
    pthread_mutex_unlock(&one->lock);
    drop_flight(one); /* the registry's reference */
    return status;
}

/* Finishes a flight that the caller holds. The first error of several is the one that counts. */
static tutti_status finish_next(flight *one, tutti_status before) {
    tutti_error_copy error;
    if (before != TUTTI_OK)
        tu_error_save(&error);
    tutti_status status = finish(one);
    drop_flight(one);
    return before != TUTTI_OK ? tu_error_restore(&error) : status;
}

/* ---- waiting ---- */

static flight *oldest_of_storage(tu_storage *storage, unsigned uses) {
    pthread_mutex_t *lock = tu_process_storage_lock(storage);
    pthread_mutex_lock(lock);
    const tu_storage_use *one = storage->first_use;
    while (one != NULL && !(((const flight_link *)one)->use & uses))
        one = one->next;
    flight *found = one != NULL ? ((const flight_link *)one)->flight : NULL;
    if (found != NULL)
        atomic_fetch_add_explicit(&found->references, 1, memory_order_relaxed);
    pthread_mutex_unlock(lock);
    return found;
}

static tutti_status wait_storage(tu_storage *storage, unsigned uses) {
    tutti_status status = TUTTI_OK;
    for (flight *one; (one = oldest_of_storage(storage, uses)) != NULL;)
        status = finish_next(one, status);
    return status;
}

static tutti_status wait_written(tu_storage *storage) {
    tutti_status status = wait_storage(storage, WRITES);
    return status == TUTTI_OK ? tu_device_copies_wait(storage, false) : status;
}

static tutti_status wait_used(tu_storage *storage) {
    tutti_status status = wait_storage(storage, WRITES | READS);
    return status == TUTTI_OK ? tu_device_copies_wait(storage, true) : status;
}

static flight *oldest_of_registry(flights *registry) {
    pthread_mutex_lock(&registry->lock);
    flight *found = registry->first;
    if (found != NULL)
        atomic_fetch_add_explicit(&found->references, 1, memory_order_relaxed);
    pthread_mutex_unlock(&registry->lock);
    return found;
}

/* ---- starting ---- */

/* The others wait for this rank, which will not come: tells them why. A group that has ended already is left alone. */
static void end_group(const char *who, tutti_group *group) {
    tutti_error_copy before;
    tu_error_save(&before);
    if (tutti_group_check(group) == TUTTI_OK) {
        char reason[TUTTI_ERROR_MESSAGE + 128];
        tt_error_show();
        snprintf(reason, sizeof reason, "it reached %s with an error pending: %s", who, tutti_error_message());
        tutti_status status = tutti_group_abort(group, reason);
        (void)status; /* it has ended then, by somebody else */
    }
    tu_error_restore(&before);
}

bool tu_flight_check(const char *who, tutti_group *group, bool group_optional) {
    if (tu_self()->pending != TUTTI_OK) {
        if (group != NULL && group != TUTTI_NON_GROUP_MEMBER && !tu_is_capturing()) /* a capture reaches nobody */
            end_group(who, group);
        return false;
    }
    if (!tu_scope_check())
        return false;
    if (group == NULL && !group_optional) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: argument group is NULL", who);
        return false;
    }
    if (group == TUTTI_NON_GROUP_MEMBER) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: this rank is no member of the group", who);
        return false;
    }
    return true;
}

/* On a device the calls of a batch are enqueued one by one, in their order. A fake group moves nothing anywhere. */
tutti_call *tu_flight_call(tu_flight_plan *plan) {
    const tt_tensor *x = plan->writes != NULL ? plan->writes : plan->reads;
    plan->call = (tutti_call)TUTTI_CALL_INIT;
    if (x != NULL && tu_on_device(x) && !tu_group_is_fake(plan->group)) {
        plan->device = tu_device_of(x);
        tu_device_meet(tu_device_of(x));
        plan->call.device = plan->device->number;
        plan->call.stream = tu_device_stream(plan->device);
    } else {
        plan->call.batch = tu_self()->batch;
    }
    if (plan->call.batch == NULL && !plan->nothing)
        plan->call.work = &plan->work;
    return &plan->call;
}

/* Without a record the buffers could go while the work uses them: it is finished here. */
static tutti_status finish_unrecorded(tutti_work *work) {
    tutti_error_copy error;
    tu_error_save(&error);
    tutti_status waited = tutti_work_wait(work, 0);
    (void)waited; /* the reason why there is no record counts */
    tutti_work_release(work);
    return tu_error_restore(&error);
}

/* The same of all works of a flight, which ends. */
static tutti_status finish_works(flight *one) {
    tutti_status status = TUTTI_OK;
    if (one->work != NULL)
        status = finish_unrecorded(one->work);
    if (one->enqueued != NULL)
        status = finish_unrecorded(one->enqueued);
    drop_flight(one);
    return status;
}

static tutti_status record(flight *one, tutti_group *group) {
    one->group = group;
    tutti_status status = registry_of(tutti_group_world(group), &one->registry);
    if (status != TUTTI_OK)
        return finish_works(one);
    enlist(one);
    return TUTTI_OK;
}

/* Works of a group on a device come one after the other: the last one tells of all. */
static void take_work(flight *one, const tu_flight_plan *plan) {
    if (plan->device == NULL) {
        one->work = plan->work;
        return;
    }
    tutti_work_release(one->enqueued);
    one->enqueued = plan->work;
    one->device = plan->device;
}

tutti_status tu_flight_begin(tutti_status status, const tu_flight_plan *plan) {
    if (status != TUTTI_OK)
        return status;
    if (tu_self()->batch != NULL) {
        flight *one = tu_self()->batch_flight;
        if (plan->work != NULL)
            take_work(one, plan);
        else
            one->noted = true;
        return add_links(one, plan);
    }
    if (plan->work == NULL)
        return TUTTI_OK;
    flight *one = flight_new(plan->operation);
    if (one == NULL)
        return finish_unrecorded(plan->work);
    take_work(one, plan);
    status = add_links(one, plan);
    return status == TUTTI_OK ? record(one, plan->group) : finish_works(one);
}

tutti_status tu_batch_open(const char *operation, tutti_group *group) {
    tu_thread *self = tu_self();
    if (self->batch != NULL)
        return tu_error(TUTTI_ERROR_STATE, "a batch of collectives is open in this thread already");
    flight *one = flight_new(operation);
    if (one == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = tutti_batch_begin(group, &self->batch);
    if (status == TUTTI_OK) {
        self->batch_flight = one;
        return TUTTI_OK;
    }
    self->batch = NULL;
    drop_flight(one);
    return status;
}

tutti_status tu_batch_close(tutti_group *group, bool good) {
    tu_thread *self = tu_self();
    tutti_batch *ended = self->batch;
    flight *one = self->batch_flight;
    tutti_work *work = NULL;
    tutti_call call = TUTTI_CALL_INIT;
    self->batch = NULL;
    self->batch_flight = NULL;
    call.work = &work;
    if (!good) {
        tutti_batch_cancel(ended);
        tutti_status status = finish_works(one);
        (void)status; /* what made the batch bad is told */
        return TUTTI_OK;
    }
    if (one->enqueued != NULL && !one->noted) {
        tutti_batch_cancel(ended);
        return record(one, group);
    }
    tutti_status status = tutti_batch_end(ended, &call);
    one->work = work;
    if (status == TUTTI_OK && work != NULL)
        return record(one, group);
    tutti_status waited = finish_works(one);
    (void)waited; /* the batch's own error counts */
    return status;
}

/* ---- the calls ---- */

tutti_status tu_wait_everywhere(tu_call *call) {
    tu_storage *storage = call->inputs[0]->storage;
    if (atomic_load_explicit(&storage->flights, memory_order_relaxed) == 0)
        return tu_storage_wait(storage);
    return wait_storage(storage, WRITES | SENDS);
}

tt_tensor *tt_wait(tt_tensor *x) {
    return tu_wait(x, NULL) ? x : NULL;
}

bool tt_is_async(const tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("is_async", "x", x)) != TUTTI_OK)
        return false;
    return atomic_load_explicit(&x->storage->waiter, memory_order_acquire) != NULL;
}

int tt_pending_works(tutti_world *world) {
    flights *registry;
    if (world == NULL || registry_of(world, &registry) != TUTTI_OK)
        return 0;
    pthread_mutex_lock(&registry->lock);
    int count = registry->count;
    pthread_mutex_unlock(&registry->lock);
    return count;
}

int64_t tt_waited_ns(tutti_world *world) {
    flights *registry;
    if (world == NULL || registry_of(world, &registry) != TUTTI_OK)
        return 0;
    return atomic_load_explicit(&registry->waited_ns, memory_order_relaxed);
}

bool tt_wait_all(tutti_world *world) {
    flights *registry = NULL;
    tutti_status status = world == NULL ? tu_error(TUTTI_ERROR_ARGUMENT, "wait_all: argument world is NULL")
                                        : registry_of(world, &registry);
    if (status == TUTTI_OK)
        for (flight *one; (one = oldest_of_registry(registry)) != NULL;)
            status = finish_next(one, status);
    return tu_pending_take(status) == TUTTI_OK && tu_self()->pending == TUTTI_OK;
}

tutti_group *tt_group(tutti_world *world, const tutti_group_form *form, const char *tag) {
    tutti_group *group = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (tu_pending_take(tutti_group_resolve(world, form, tag, &group)) != TUTTI_OK)
        return NULL;
    tutti_group_release(group); /* lent: its world, or the caller, keeps it */
    return group;
}
