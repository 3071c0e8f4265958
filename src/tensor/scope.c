/* SPDX-License-Identifier: Apache-2.0
 *
 * Scopes. What all open scopes of a thread own stands in one array, in order; a scope is the index where its part
 * begins. Opening, owning and closing therefore cost a few stores.
 */
#include <stdlib.h>

#include "tensor/tensor.h"
#include "tensor/thread.h"

typedef struct memory_block {
    struct memory_block *next;
    _Alignas(16) char bytes[];
} memory_block;

static bool grow(void **array, size_t entry, size_t wanted, size_t *capacity) {
    size_t larger = *capacity == 0 ? 64 : *capacity * 2;
    while (larger < wanted)
        larger *= 2;
    void *moved = realloc(*array, larger * entry);
    if (moved == NULL)
        return false;
    *array = moved;
    *capacity = larger;
    return true;
}

tt_scope tt_scope_open(void) {
    tu_thread *self = tu_self();
    tutti_status status = tu_thread_register();
    if (status != TUTTI_OK) {
        tu_pending_take(status);
        return (tt_scope){ 0 };
    }
    if (self->scope_count == self->scope_capacity) {
        size_t capacity = (size_t)self->scope_capacity;
        if (!grow((void **)&self->scopes, sizeof *self->scopes, capacity + 1, &capacity)) {
            tu_pending_take(tu_error_memory("a scope", sizeof *self->scopes));
            return (tt_scope){ 0 };
        }
        self->scope_capacity = (int)capacity;
    }
    self->scopes[self->scope_count++] = (tu_scope_mark){ .id = ++self->last_scope, .first = self->owned_count };
    tu_tally(self, &self->open_scopes, 1);
    return (tt_scope){ self->last_scope };
}

static void close_innermost(tu_thread *self) {
    /* Releasing a tensor may run a release callback, which may open scopes of its own: pop entry by entry. */
    tu_scope_mark *mark = &self->scopes[self->scope_count - 1];
    while (self->owned_count > mark->first) {
        tu_tensor_drop(self->owned[--self->owned_count]);
        mark = &self->scopes[self->scope_count - 1];
    }
    for (memory_block *block = mark->memory, *next; block != NULL; block = next) {
        next = block->next;
        free(block);
    }
    self->scope_count--;
    tu_tally(self, &self->open_scopes, -1);
}

static int find(const tu_thread *self, const tt_scope *scope) {
    for (int i = self->scope_count - 1; scope->id != 0 && i >= 0; i--)
        if (self->scopes[i].id == scope->id)
            return i;
    return -1;
}

void tu_scope_leave(tt_scope *scope) {
    tu_thread *self = tu_self();
    int index = find(self, scope);
    while (index >= 0 && self->scope_count > index)
        close_innermost(self);
    scope->id = 0;
}

/* With an error pending a scope may be one that could not be opened. */
static tutti_status check_open(const char *who, const tt_scope *scope) {
    const tu_thread *self = tu_self();
    if (scope == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: scope is NULL", who);
    if (find(self, scope) < 0 && self->pending == TUTTI_OK)
        return tu_error(TUTTI_ERROR_SCOPE,
                        "%s: this scope is not open in this thread: it was closed before, by itself or with an outer "
                        "scope, or opened by another thread",
                        who);
    return TUTTI_OK;
}

void tt_scope_leave(tt_scope *scope) {
    tutti_status open = check_open("tt_scope_leave", scope);
    if (open == TUTTI_OK)
        tu_scope_leave(scope);
    else
        tu_pending_take(open);
}

tutti_status tt_scope_close(tt_scope *scope) {
    tutti_status open = check_open("tt_scope_close", scope);
    if (open != TUTTI_OK)
        return open;
    tu_scope_leave(scope);
    tutti_status status = tt_error_show();
    tt_error_clear();
    return status;
}

bool tu_scope_check(void) {
    tu_thread *self = tu_self();
    if (self->scope_count > 0)
        return true;
    tu_fail(TUTTI_ERROR_SCOPE,
            "no scope is open in this thread, so nobody would own the result: call tt_scope_open first");
    return false;
}

tt_tensor *tu_scope_own(tt_tensor *tensor) {
    tu_thread *self = tu_self();
    if (tensor == NULL)
        return NULL;
    if (self->owned_count == self->owned_capacity &&
        !grow((void **)&self->owned, sizeof *self->owned, self->owned_count + 1, &self->owned_capacity)) {
        tu_tensor_drop(tensor);
        tu_pending_take(tu_error_memory("the tensors of a scope", (self->owned_count + 1) * sizeof *self->owned));
        return NULL;
    }
    if (self->scope_count == 0) {
        tu_tensor_drop(tensor);
        tu_scope_check();
        return NULL;
    }
    self->owned[self->owned_count++] = tensor;
    return tensor;
}

tt_tensor *tt_scope_return(tt_tensor *tensor) {
    tu_thread *self = tu_self();
    if (self->pending != TUTTI_OK || tensor == NULL)
        return NULL;
    if (self->scope_count < 2) {
        tu_fail(TUTTI_ERROR_SCOPE, "tt_scope_return: no outer scope is open in this thread to take the tensor");
        return NULL;
    }
    tu_scope_mark *mark = &self->scopes[self->scope_count - 1];
    for (size_t i = self->owned_count; i > mark->first; i--) {
        if (self->owned[i - 1] != tensor)
            continue;
        /* The first entry of this scope becomes the last of the outer one. */
        self->owned[i - 1] = self->owned[mark->first];
        self->owned[mark->first++] = tensor;
        return tensor;
    }
    return tensor; /* an outer scope owns it already, or only tt_keep holds it: it outlives this scope anyway */
}

void *tu_scope_memory(size_t bytes) {
    tu_thread *self = tu_self();
    if (!tu_scope_check())
        return NULL;
    memory_block *block = malloc(sizeof *block + bytes);
    if (block == NULL) {
        tu_pending_take(tu_error_memory("a list of tensors", bytes));
        return NULL;
    }
    tu_scope_mark *mark = &self->scopes[self->scope_count - 1];
    block->next = mark->memory;
    mark->memory = block;
    return block->bytes;
}
