/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of a run.
 */
#include "loops/arena.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

tu_arena *tu_arena_new(size_t bytes) {
    size_t step = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : 64;
    size_t rounded = (bytes + step - 1) / step * step;
    tu_arena *arena = malloc(sizeof *arena);
    char *memory = arena != NULL ? aligned_alloc(step, rounded) : NULL;
    if (memory == NULL) {
        free(arena);
        (void)tu_error_memory("the memory of a program", bytes);
        return NULL;
    }
    if (step == HUGE_PAGE)
        madvise(memory, rounded, MADV_HUGEPAGE); /* a wish; without it the pages are small */
    arena->bytes = rounded;
    arena->memory = memory;
    atomic_init(&arena->references, 1);
    return arena;
}

void tu_arena_drop(tu_arena *arena) {
    if (arena == NULL || atomic_fetch_sub_explicit(&arena->references, 1, memory_order_acq_rel) != 1)
        return;
    free(arena->memory);
    free(arena);
}

bool tu_arena_is_free(const tu_arena *arena) {
    return atomic_load_explicit(&arena->references, memory_order_acquire) == 1;
}

static void release(void *owner) {
    tu_arena_drop(owner);
}

tu_storage *tu_arena_storage(tu_arena *arena, const tu_planned *planned) {
    tu_storage *storage = tu_storage_wrap(arena->memory + planned->at, planned->bytes, release, arena);
    if (storage == NULL)
        return NULL;
    storage->device = TUTTI_CPU;
    atomic_fetch_add_explicit(&arena->references, 1, memory_order_relaxed);
    return storage;
}

/* ---- for calls ---- */

/* Storages are asked for in a fixed order: numbers that the operands have, the results, what the kernel needs for
 * itself. */
static tu_storage *make(tu_source *source, size_t bytes) {
    tu_arena_source *own = (tu_arena_source *)source;
    int result = own->next++;
    if (result >= 0 && result < own->vertex->result_count) {
        const tu_value *value = own->vertex->results[result];
        const tu_planned *planned = &own->plan->storages[value->storage];
        if (planned->here && planned->value == value && planned->bytes == bytes)
            return tu_arena_storage(own->arena, planned);
    }
    tu_self()->source = source->outer;
    tu_storage *storage = tu_storage_new(TUTTI_CPU, bytes);
    tu_self()->source = source;
    return storage;
}

static void end(tu_source *source) {
    (void)source; /* it is on the stack of whoever runs the program */
}

void tu_arena_begin(tu_arena_source *source, tu_arena *arena, const tu_plan *plan, const tu_vertex *vertex) {
    *source = (tu_arena_source){ { make, end, tu_self()->source }, arena, plan, vertex, 0 };
    for (int i = 0; i < vertex->operand_count; i++)
        source->next -= vertex->operands[i].value == NULL && vertex->operands[i].number != 0;
    tu_self()->source = &source->source;
}

void tu_arena_end(tu_arena_source *source) {
    tu_self()->source = source->source.outer;
}
