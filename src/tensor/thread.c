/* SPDX-License-Identifier: Apache-2.0
 *
 * Per-thread state: its life, the pending error, and the count of what is alive.
 */
#include "tensor/thread.h"

#include <pthread.h>
#include <stdlib.h>

_Thread_local tu_thread tu_thread_self __attribute__((tls_model("initial-exec")));

/* The threads that tt_count walks, and what those that have ended left on the books. Under `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tu_thread *threads;
static int64_t gone_tensors, gone_storages, gone_scopes, gone_nodes;
static pthread_key_t exit_key;
static int exit_key_error = -1; /* -1: not yet made */

static int64_t tally(_Atomic int64_t *value) {
    return atomic_load_explicit(value, memory_order_relaxed);
}

static void thread_exit(void *argument) {
    tu_thread *self = argument;
    while (self->scope_count > 0) {
        tt_scope scope = { self->scopes[self->scope_count - 1].id };
        tu_scope_leave(&scope);
    }
    tu_resting_free(self);
    tu_storage_trim(self);
    tu_block_trim(self);
    free(self->scopes);
    free(self->owned);
    free(self->bins);
    pthread_mutex_lock(&lock);
    *self->link = self->next;
    if (self->next != NULL)
        self->next->link = self->link;
    gone_tensors += tally(&self->tensors);
    gone_storages += tally(&self->storages);
    gone_scopes += tally(&self->open_scopes);
    gone_nodes += tally(&self->nodes);
    pthread_mutex_unlock(&lock);
    *self = (tu_thread){ 0 };
}

tutti_status tu_thread_register(void) {
    tu_thread *self = tu_self();
    if (self->registered)
        return TUTTI_OK;
    struct tu_block **bins = calloc(TU_BINS, sizeof *bins);
    tt_tensor **resting = calloc(1, tu_resting_bytes());
    if (bins == NULL || resting == NULL) {
        free(bins);
        free(resting);
        return tu_error_memory("this thread's tensors", tu_resting_bytes());
    }
    pthread_mutex_lock(&lock);
    if (exit_key_error == -1)
        exit_key_error = pthread_key_create(&exit_key, thread_exit);
    int error = exit_key_error;
    if (error == 0)
        error = pthread_setspecific(exit_key, self);
    else
        exit_key_error = -1;
    if (error == 0) {
        self->next = threads;
        self->link = &threads;
        if (threads != NULL)
            threads->link = &self->next;
        threads = self;
        self->bins = bins;
        self->resting = resting;
        self->registered = true;
    }
    pthread_mutex_unlock(&lock);
    if (error != 0) {
        free(bins);
        free(resting);
        return tu_error_system(error, "the tensor library cannot register this thread");
    }
    // cppcheck-suppress memleak // the thread owns its bins
    return TUTTI_OK;
}

tutti_status tt_count(tt_counts *counts) {
    if (counts == NULL || counts->size == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_count: counts is NULL or its size is 0");
    tt_counts full = { .size = counts->size };
    pthread_mutex_lock(&lock);
    full.tensors = gone_tensors;
    full.storages = gone_storages;
    full.scopes = gone_scopes;
    full.nodes = gone_nodes;
    for (tu_thread *thread = threads; thread != NULL; thread = thread->next) {
        full.tensors += tally(&thread->tensors);
        full.storages += tally(&thread->storages);
        full.scopes += tally(&thread->open_scopes);
        full.nodes += tally(&thread->nodes);
    }
    pthread_mutex_unlock(&lock);
    __builtin_memcpy(counts, &full, counts->size < sizeof full ? counts->size : sizeof full);
    return TUTTI_OK;
}

void tt_memory_trim(void) {
    tu_tensor_trim(tu_self());
    tu_storage_trim(tu_self());
    tu_block_trim(tu_self());
}

/* ---- the pending error ---- */

tutti_status tu_pending_take(tutti_status status) {
    tu_thread *self = tu_self();
    if (self->pending == TUTTI_OK && status != TUTTI_OK) {
        self->pending = status;
        tu_error_save(&tu_error_spare_get()->pending);
    }
    return status;
}

tutti_status tu_fail(tutti_status status, const char *format, ...) {
    if (tu_self()->pending != TUTTI_OK)
        return status;
    char text[1536];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return tu_pending_take(tu_error(status, "%s", text));
}

void tt_error_set(tutti_status status, const char *message) {
    if (tu_self()->pending == TUTTI_OK && status != TUTTI_OK)
        tu_pending_take(tutti_error_set(status, message));
}

void tt_error_format(tutti_status status, const char *format, ...) {
    if (tu_self()->pending != TUTTI_OK || status == TUTTI_OK)
        return;
    char text[1536];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    tu_pending_take(tu_error(status, "%s", text));
}

tutti_status tt_error_pending(void) {
    return tu_self()->pending;
}

tutti_status tt_error_show(void) {
    if (tu_self()->pending != TUTTI_OK)
        tu_error_restore(&tu_error_spare_get()->pending);
    return tu_self()->pending;
}

void tt_error_clear(void) {
    tu_self()->pending = TUTTI_OK;
}

void tu_pending_save(tu_pending_copy *copy) {
    copy->status = tu_self()->pending;
    if (copy->status != TUTTI_OK)
        copy->error = tu_error_spare_get()->pending;
    tu_self()->pending = TUTTI_OK;
}

void tu_pending_restore(const tu_pending_copy *copy) {
    if (copy->status == TUTTI_OK)
        return;
    tu_self()->pending = copy->status;
    tu_error_spare_get()->pending = copy->error;
}
