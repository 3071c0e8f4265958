/* SPDX-License-Identifier: Apache-2.0
 *
 * Carving blocks out of slabs: first fit, by this rank alone. Ranks that allocate alike get the same offsets, which is
 * good but not needed: offsets travel at the rendezvous.
 */
#include <stdlib.h>
#include <string.h>

#include "inner.h"

tutti_status tu_nvshmem_slab_add(tu_nvshmem *nvshmem, void *base, size_t bytes) {
    const tu_backend_host *host = nvshmem->cuda.host;
    int count = tu_nvshmem_slab_count(nvshmem);
    if (count == TU_NVSHMEM_SLABS)
        return host->error(TUTTI_ERROR_LIMIT,
                           "NVSHMEM's heap has grown %d times, which is all it can: open it with a "
                           "larger TUTTI_NVSHMEM_HEAP",
                           TU_NVSHMEM_SLABS - 1);
    tu_nvshmem_slab *slab = &nvshmem->slabs[count];
    *slab = (tu_nvshmem_slab){ .base = base, .bytes = bytes, .gap_count = 1, .gap_room = 64 };
    slab->gaps = malloc(slab->gap_room * sizeof *slab->gaps);
    if (slab->gaps == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for the tables of NVSHMEM's heap");
    slab->gaps[0] = (tu_nvshmem_gap){ 0, bytes };
    atomic_store_explicit(&nvshmem->slab_count, count + 1, memory_order_release); /* pairs with tu_nvshmem_slab_count */
    return TUTTI_OK;
}

void tu_nvshmem_slabs_free(tu_nvshmem *nvshmem) {
    for (int i = 0; i < tu_nvshmem_slab_count(nvshmem); i++)
        free(nvshmem->slabs[i].gaps);
    atomic_store_explicit(&nvshmem->slab_count, 0, memory_order_release);
}

bool tu_nvshmem_in_heap(const tu_nvshmem *nvshmem, const void *pointer, size_t bytes) {
    for (int i = 0; i < tu_nvshmem_slab_count(nvshmem); i++) {
        uintptr_t begin = (uintptr_t)nvshmem->slabs[i].base, at = (uintptr_t)pointer;
        if (at >= begin && at - begin <= nvshmem->slabs[i].bytes && nvshmem->slabs[i].bytes - (at - begin) >= bytes)
            return true;
    }
    return false;
}

/* There is a gap before and after each block at most: room for all of them is made when a block is, so that giving back
 * cannot fail. */
static bool make_room(tu_nvshmem_slab *slab) {
    if (slab->blocks + 3 < slab->gap_room)
        return true;
    tu_nvshmem_gap *larger = realloc(slab->gaps, 2 * slab->gap_room * sizeof *larger);
    if (larger == NULL)
        return false;
    slab->gaps = larger;
    slab->gap_room *= 2;
    return true;
}

/* Takes [begin, begin + bytes) out of a gap that holds it. */
static void take(tu_nvshmem_slab *slab, size_t index, size_t begin, size_t bytes) {
    tu_nvshmem_gap gap = slab->gaps[index], before = { gap.begin, begin - gap.begin },
                   after = { begin + bytes, gap.begin + gap.bytes - begin - bytes };
    size_t kept = (before.bytes > 0) + (after.bytes > 0);
    memmove(&slab->gaps[index + kept], &slab->gaps[index + 1], (slab->gap_count - index - 1) * sizeof gap);
    slab->gap_count = slab->gap_count - 1 + kept;
    if (before.bytes > 0)
        slab->gaps[index++] = before;
    if (after.bytes > 0)
        slab->gaps[index] = after;
}

/* The total and the largest gap, for the error. */
static tutti_status full(const tu_nvshmem *nvshmem, size_t bytes, const char *what) {
    size_t total = 0, unused = 0, largest = 0;
    for (int i = 0; i < tu_nvshmem_slab_count(nvshmem); i++) {
        const tu_nvshmem_slab *slab = &nvshmem->slabs[i];
        total += slab->bytes;
        for (size_t j = 0; j < slab->gap_count; j++) {
            unused += slab->gaps[j].bytes;
            largest = slab->gaps[j].bytes > largest ? slab->gaps[j].bytes : largest;
        }
    }
    return nvshmem->cuda.host->error(
        TUTTI_ERROR_MEMORY,
        "no room for %s of %zu bytes: NVSHMEM's heap has %zu bytes, %zu of them free, %zu in one piece; open it with a "
        "larger TUTTI_NVSHMEM_HEAP, or call tutti_backend_grow on every rank",
        what, bytes, total, unused, largest);
}

tutti_status tu_nvshmem_carve(tu_nvshmem *nvshmem, size_t bytes, size_t alignment, const char *what, int *slab_index,
                              size_t *offset) {
    for (int i = 0; i < tu_nvshmem_slab_count(nvshmem); i++) {
        tu_nvshmem_slab *slab = &nvshmem->slabs[i];
        for (size_t j = 0; j < slab->gap_count; j++) {
            const tu_nvshmem_gap *gap = &slab->gaps[j];
            uintptr_t address = (uintptr_t)slab->base + gap->begin;
            size_t skipped = (alignment - address % alignment) % alignment;
            if (gap->bytes < skipped || gap->bytes - skipped < bytes)
                continue;
            if (!make_room(slab))
                return nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for the tables of NVSHMEM's heap");
            *slab_index = i;
            *offset = slab->gaps[j].begin + skipped;
            take(slab, j, *offset, bytes);
            slab->blocks++;
            return TUTTI_OK;
        }
    }
    return full(nvshmem, bytes, what);
}

void tu_nvshmem_give_back(tu_nvshmem *nvshmem, int slab_index, size_t offset, size_t bytes) {
    tu_nvshmem_slab *slab = &nvshmem->slabs[slab_index];
    size_t at = 0;
    while (at < slab->gap_count && slab->gaps[at].begin < offset)
        at++;
    memmove(&slab->gaps[at + 1], &slab->gaps[at], (slab->gap_count - at) * sizeof *slab->gaps);
    slab->gaps[at] = (tu_nvshmem_gap){ offset, bytes };
    slab->gap_count++;
    slab->blocks--;
    for (size_t left = at > 0 ? at - 1 : 0; left + 1 < slab->gap_count && left <= at;) { /* joins what is adjacent */
        if (slab->gaps[left].begin + slab->gaps[left].bytes != slab->gaps[left + 1].begin) {
            left++;
            continue;
        }
        slab->gaps[left].bytes += slab->gaps[left + 1].bytes;
        memmove(&slab->gaps[left + 1], &slab->gaps[left + 2], (slab->gap_count - left - 2) * sizeof *slab->gaps);
        slab->gap_count--;
    }
}
