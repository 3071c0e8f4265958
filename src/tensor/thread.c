/* SPDX-License-Identifier: Apache-2.0
 *
 * Per-thread state: its life, and the pending error.
 */
#include "tensor/thread.h"

#include <errno.h>
#include <stdlib.h>

#include "base/instructions.h"
#include "tensor/gemm.h"
#include "tensor/handle.h"
#include "tensor/large.h"
#include "tensor/process.h"

_Thread_local tu_thread tu_thread_self __attribute__((tls_model("initial-exec")));

void tu_thread_end(tu_thread *self) {
    while (self->scope_count > 0) {
        tt_scope scope = { self->scopes[self->scope_count - 1].id };
        tu_scope_leave(&scope);
    }
    while (self->source != NULL) {
        tu_source *source = self->source;
        self->source = source->outer;
        source->end(source);
    }
    for (tu_kept *one = self->symmetric_tests, *outer; one != NULL; one = outer) {
        outer = one->outer;
        free(one);
    }
    self->symmetric_tests = NULL;
    tu_dnnl_end(self);
    tu_handle_leave(self);
    tu_storage_trim(self);
    tu_block_trim(self);
    free(self->streams);
    free(self->scopes);
    free(self->owned);
    free(self->bins);
}

tutti_status tu_thread_register(void) {
    tu_thread *self = tu_self();
    if (self->registered)
        return TUTTI_OK;
    tutti_status status = tu_instructions_choose(NULL);
    if (status != TUTTI_OK)
        return status;
    struct tu_block **bins = calloc(TU_BINS, sizeof *bins);
    int error = bins == NULL ? ENOMEM : tu_process_add_thread(self);
    if (error != 0) {
        free(bins);
        return tu_error_system(error, "the tensor library cannot register this thread");
    }
    self->bins = bins;
    self->registered = true;
    // cppcheck-suppress memleak // the thread owns it
    return TUTTI_OK;
}

void tt_memory_trim(void) {
    tu_handle_trim();
    tu_storage_trim(tu_self());
    tu_block_trim(tu_self());
    tu_large_trim();
}

/* ---- the pending error ---- */

tutti_status tu_pending_take(tutti_status status) {
    tu_thread *self = tu_self();
    if (self->pending == TUTTI_OK && status != TUTTI_OK) {
        self->pending = status;
        tu_error_save(&tu_texts()->pending);
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
        tu_error_restore(&tu_texts()->pending);
    return tu_self()->pending;
}

void tt_error_clear(void) {
    tu_self()->pending = TUTTI_OK;
}

void tu_pending_save(tu_pending_copy *copy) {
    copy->status = tu_self()->pending;
    if (copy->status != TUTTI_OK)
        copy->error = tu_texts()->pending;
    tu_self()->pending = TUTTI_OK;
}

void tu_pending_restore(const tu_pending_copy *copy) {
    if (copy->status == TUTTI_OK)
        return;
    tu_self()->pending = copy->status;
    tu_texts()->pending = copy->error;
}

/* ---- places ---- */

tu_place *tu_place_new(const char *text) {
    size_t bytes = strlen(text) + 1;
    tu_place *place = malloc(sizeof *place + bytes);
    if (place == NULL) {
        tu_error_memory("the name of a module", bytes);
        return NULL;
    }
    atomic_init(&place->references, 1);
    memcpy(place->text, text, bytes);
    return place;
}

void tu_place_drop(tu_place *place) {
    if (place != NULL && atomic_fetch_sub_explicit(&place->references, 1, memory_order_acq_rel) == 1)
        free(place);
}
