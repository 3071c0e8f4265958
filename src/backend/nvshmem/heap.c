/* SPDX-License-Identifier: Apache-2.0
 *
 * Carving blocks out of slabs: first fit, by this rank alone; or last fit, of what the ranks need at different times.
 * Ranks that allocate alike get the same offsets, which is good but not needed: offsets travel at the rendezvous.
 */
#include <stdlib.h>
#include <string.h>

#include "inner.h"

#define FIRST_GAPS 64 /* for which there is room */

tutti_status tu_nvshmem_slab_begin(tu_nvshmem *nvshmem) {
    const tu_backend_host *host = nvshmem->cuda.host;
    int count = tu_nvshmem_slab_count(nvshmem);
    if (count == TU_NVSHMEM_SLABS)
        return host->error(TUTTI_ERROR_LIMIT,
                           "NVSHMEM's heap has grown %d times, which is all it can: open it with a "
                           "larger TUTTI_NVSHMEM_HEAP",
                           TU_NVSHMEM_SLABS - 1);
    tu_nvshmem_slab *slab = &nvshmem->slabs[count];
    if (slab->gaps == NULL) /* else it is there from an attempt that failed */
        slab->gaps = malloc(FIRST_GAPS * sizeof *slab->gaps);
    return slab->gaps != NULL ? TUTTI_OK
                              : host->error(TUTTI_ERROR_MEMORY, "out of memory for the tables of NVSHMEM's heap");
}

void tu_nvshmem_slab_add(tu_nvshmem *nvshmem, void *base, size_t bytes) {
    int count = tu_nvshmem_slab_count(nvshmem);
    tu_nvshmem_slab *slab = &nvshmem->slabs[count];
    *slab =
        (tu_nvshmem_slab){ .base = base, .bytes = bytes, .gaps = slab->gaps, .gap_count = 1, .gap_room = FIRST_GAPS };
    slab->gaps[0] = (tu_nvshmem_gap){ 0, bytes };
    atomic_store_explicit(&nvshmem->slab_count, count + 1, memory_order_release); /* pairs with tu_nvshmem_slab_count */
}

void tu_nvshmem_slabs_free(tu_nvshmem *nvshmem) {
    for (int i = 0; i < TU_NVSHMEM_SLABS; i++) { /* also one that was only begun */
        free(nvshmem->slabs[i].gaps);
        nvshmem->slabs[i].gaps = NULL;
    }
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

/* Where bytes fit into a gap; false: nowhere. */
static bool fits(const tu_nvshmem_slab *slab, const tu_nvshmem_gap *gap, size_t bytes, size_t alignment,
                 tu_nvshmem_fit fit, size_t *offset) {
    uintptr_t address = (uintptr_t)slab->base + gap->begin;
    size_t skipped = (alignment - address % alignment) % alignment;
    if (gap->bytes < skipped || gap->bytes - skipped < bytes)
        return false;
    *offset = gap->begin + skipped;
    if (fit == TU_NVSHMEM_LAST)
        *offset += (gap->bytes - skipped - bytes) / alignment * alignment;
    return true;
}

static tutti_status carve_from(tu_nvshmem *nvshmem, tu_nvshmem_slab *slab, size_t gap, size_t bytes, size_t offset) {
    if (!make_room(slab))
        return nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for the tables of NVSHMEM's heap");
    take(slab, gap, offset, bytes);
    slab->blocks++;
    return TUTTI_OK;
}

tutti_status tu_nvshmem_carve(tu_nvshmem *nvshmem, size_t bytes, size_t alignment, tu_nvshmem_fit fit, const char *what,
                              int *slab_index, size_t *offset) {
    int slab_count = tu_nvshmem_slab_count(nvshmem);
    for (int i = 0; i < slab_count; i++) {
        *slab_index = fit == TU_NVSHMEM_LAST ? slab_count - 1 - i : i;
        tu_nvshmem_slab *slab = &nvshmem->slabs[*slab_index];
        for (size_t j = 0; j < slab->gap_count; j++) {
            size_t gap = fit == TU_NVSHMEM_LAST ? slab->gap_count - 1 - j : j;
            if (fits(slab, &slab->gaps[gap], bytes, alignment, fit, offset))
                return carve_from(nvshmem, slab, gap, bytes, *offset);
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
