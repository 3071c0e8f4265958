/* SPDX-License-Identifier: Apache-2.0
 *
 * The work registry. A flight is a collective that nobody has waited for yet; it keeps the storages that it writes and
 * reads alive, and each of those knows the flights that concern it. Waiting for a storage takes its flights off all
 * lists, waits for their works in order of starting, and lets the storages go.
 */
#include "functional/flight.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "functional/operators.h"

#define MOST 2 /* storages per plain flight; batches have more */

typedef struct flight {
    tutti_work *work;
    tutti_world *world;
    struct flight *next, *previous; /* of all flights, oldest first */
    bool taken;                     /* somebody waits for it; others wait for `done` */
    size_t count, capacity;
    struct {
        tu_storage *storage;
        bool writes;
    } * at;
} flight;

/* Guards the list, the flags of flights, and `works`, `waiter` and `reader` of storages. Never held while waiting. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static flight *first_flight, *last_flight;

/* What the thread's open batch writes and reads. */
static _Thread_local tutti_batch *batch;
static _Thread_local flight *noted;

/* ---- flights ---- */

static flight *flight_new(void) {
    flight *f = calloc(1, sizeof *f);
    if (f != NULL && (f->at = calloc(MOST, sizeof *f->at)) == NULL) {
        free(f);
        f = NULL;
    }
    if (f == NULL)
        tu_error_memory("a collective in flight", sizeof *f);
    else
        f->capacity = MOST;
    return f;
}

static tutti_status flight_add(flight *f, tu_storage *storage, bool writes) {
    if (storage == NULL)
        return TUTTI_OK;
    if (f->count == f->capacity) {
        void *at = realloc(f->at, 2 * f->capacity * sizeof *f->at);
        if (at == NULL)
            return tu_error_memory("a collective in flight", 2 * f->capacity * sizeof *f->at);
        f->at = at;
        f->capacity *= 2;
    }
    f->at[f->count].storage = tu_storage_hold(storage);
    f->at[f->count++].writes = writes;
    return TUTTI_OK;
}

static void flight_free(flight *f) {
    for (size_t i = 0; i < f->count; i++)
        tu_storage_drop(f->at[i].storage);
    free(f->at);
    free(f);
}

static bool concerns(const flight *f, const tu_storage *storage, bool readers) {
    for (size_t i = 0; i < f->count; i++)
        if (f->at[i].storage == storage && (f->at[i].writes || readers))
            return true;
    return false;
}

/* Under the lock: sets or clears the marks of a storage from the flights there are. */
static void mark(tu_storage *storage);

static tutti_status wait_flights(tutti_world *world, tu_storage *storage, bool readers) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&lock);
    for (;;) {
        flight *f = first_flight;
        while (f != NULL && !(storage != NULL ? concerns(f, storage, readers) : f->world == world))
            f = f->next;
        if (f == NULL)
            break;
        if (f->taken) {
            pthread_cond_wait(&finished, &lock);
            continue;
        }
        f->taken = true;
        pthread_mutex_unlock(&lock);
        tutti_status one = tutti_work_wait(f->work, 0);
        if (status == TUTTI_OK)
            status = one;
        pthread_mutex_lock(&lock);
        *(f->previous != NULL ? &f->previous->next : &first_flight) = f->next;
        *(f->next != NULL ? &f->next->previous : &last_flight) = f->previous;
        for (size_t i = 0; i < f->count; i++)
            mark(f->at[i].storage);
        pthread_cond_broadcast(&finished);
        pthread_mutex_unlock(&lock);
        tutti_work_release(f->work);
        flight_free(f);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static tutti_status wait_written(tu_storage *storage) {
    return wait_flights(NULL, storage, false);
}

static tutti_status wait_read(tu_storage *storage) {
    return wait_flights(NULL, storage, true);
}

static void mark(tu_storage *storage) {
    bool written = false, read = false;
    for (const flight *f = first_flight; f != NULL; f = f->next)
        for (size_t i = 0; i < f->count; i++)
            if (f->at[i].storage == storage)
                *(f->at[i].writes ? &written : &read) = true;
    /* Release: pairs with the acquire of those who find nothing to wait for. */
    atomic_store_explicit(&storage->waiter, written ? wait_written : NULL, memory_order_release);
    atomic_store_explicit(&storage->reader, read ? wait_read : NULL, memory_order_release);
}

static void enlist(flight *f, tutti_group *group, tutti_work *work) {
    f->work = work;
    f->world = tutti_group_world(group);
    pthread_mutex_lock(&lock);
    f->previous = last_flight;
    *(last_flight != NULL ? &last_flight->next : &first_flight) = f;
    last_flight = f;
    for (size_t i = 0; i < f->count; i++)
        mark(f->at[i].storage);
    pthread_mutex_unlock(&lock);
}

/* ---- starting ---- */

bool tu_flight_check(const char *who, tutti_group *group, bool group_optional) {
    if (tu_self()->pending != TUTTI_OK) {
        /* The others wait for this rank, which will not come: tell them why. A group that has ended already is left
         * alone. */
        tu_error_copy before;
        if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
            return false;
        tu_error_save(&before);
        if (tutti_group_check(group) == TUTTI_OK) {
            char reason[512];
            tt_error_show();
            snprintf(reason, sizeof reason, "rank %d reached %s with an error pending: %s", tutti_group_rank(group),
                     who, tutti_error_message());
            tutti_status status = tutti_group_abort(group, reason);
            (void)status; /* it has ended then, by somebody else */
        }
        tu_error_restore(&before);
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

void tu_flight_call(tutti_call *call, tutti_work **work) {
    *call = (tutti_call)TUTTI_CALL_INIT;
    *work = NULL;
    if (batch != NULL)
        call->batch = batch;
    else
        call->work = work;
}

tutti_status tu_flight_begin(tutti_group *group, tutti_work *work, tu_storage *writes, tu_storage *reads) {
    tutti_status status;
    if (batch != NULL) {
        if ((status = flight_add(noted, writes, true)) == TUTTI_OK)
            status = flight_add(noted, reads, false);
        return status;
    }
    flight *f = flight_new();
    status = f == NULL ? TUTTI_ERROR_MEMORY : flight_add(f, writes, true);
    if (status == TUTTI_OK)
        status = flight_add(f, reads, false);
    if (status == TUTTI_OK) {
        enlist(f, group, work);
        return TUTTI_OK;
    }
    /* Without a record the buffers could go while the work uses them: finish it here. */
    tu_error_copy error;
    tu_error_save(&error);
    tutti_status waited = tutti_work_wait(work, 0);
    (void)waited;
    tutti_work_release(work);
    if (f != NULL)
        flight_free(f);
    return tu_error_restore(&error);
}

tutti_status tu_batch_open(tutti_group *group) {
    if (batch != NULL)
        return tu_error(TUTTI_ERROR_STATE, "a batch of collectives is open in this thread already");
    noted = flight_new();
    if (noted == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = tutti_batch_begin(group, &batch);
    if (status != TUTTI_OK) {
        flight_free(noted);
        batch = NULL;
    }
    return status;
}

tutti_status tu_batch_close(tutti_group *group, bool good) {
    tutti_batch *ended = batch;
    flight *f = noted;
    tutti_work *work = NULL;
    tutti_call options = TUTTI_CALL_INIT;
    batch = NULL;
    noted = NULL;
    options.work = &work;
    if (!good) {
        tutti_batch_cancel(ended);
        flight_free(f);
        return TUTTI_OK;
    }
    tutti_status status = tutti_batch_end(ended, &options);
    if (status == TUTTI_OK && work != NULL) {
        enlist(f, group, work);
        return TUTTI_OK;
    }
    flight_free(f);
    return status;
}

/* ---- waiting ---- */

tutti_status tu_wait_cpu(tu_call *call) {
    return tu_storage_wait(call->inputs[0]->storage);
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
    int count = 0;
    pthread_mutex_lock(&lock);
    for (const flight *f = first_flight; f != NULL; f = f->next)
        count += f->world == world;
    pthread_mutex_unlock(&lock);
    return count;
}

bool tt_wait_all(tutti_world *world) {
    return tu_pending_take(wait_flights(world, NULL, false)) == TUTTI_OK && tu_self()->pending == TUTTI_OK;
}

tutti_group *tt_group(tutti_world *world, const tutti_group_form *form) {
    tutti_group *group = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (tu_pending_take(tutti_group_resolve(world, form, NULL, &group)) != TUTTI_OK)
        return NULL;
    tutti_group_release(group); /* lent: its world, or the caller, keeps it */
    return group;
}
