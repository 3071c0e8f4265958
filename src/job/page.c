/* SPDX-License-Identifier: Apache-2.0
 *
 * The job segment's layout: where its parts lie, and the check of a page that comes from somebody else.
 */
#include "job/page.h"

#include <ctype.h>
#include <string.h>

#include "base/error.h"
#include "base/round.h"

#define PART ((size_t)4096) /* slots and recorders begin on pages of their own */

static size_t recorders_offset(int size) {
    return tu_round_up(TU_PAGE_SLOTS + (size_t)size * sizeof(tu_slot), PART);
}

tu_recorder tu_page_recorder(const tu_page *page, size_t bytes, int size, int rank) {
    size_t each = (bytes - recorders_offset(size)) / (size_t)size;
    return tu_recorder_at((char *)page + recorders_offset(size) + (size_t)rank * each, each);
}

void tu_page_id(const tu_page *page, char id[TU_ID_BYTES]) {
    size_t length = 0;
    memset(id, 0, TU_ID_BYTES);
    for (; length < TU_ID_BYTES - 1 && isxdigit((unsigned char)page->id[length]); length++)
        id[length] = page->id[length];
}

size_t tu_page_bytes_least(int size) {
    return size < 1 ? SIZE_MAX : recorders_offset(size) + (size_t)size * tu_recorder_bytes(TU_RECORDER_LEAST);
}

void tu_page_lay_out(tu_page *page, int size, uint32_t recorder_entries) {
    page->size = size;
    page->slots_offset = TU_PAGE_SLOTS;
    page->slot_bytes = sizeof(tu_slot);
    page->recorders_offset = recorders_offset(size);
    page->recorder_bytes = tu_round_up(tu_recorder_bytes(recorder_entries), PART);
    page->recorder_entries = recorder_entries;
    page->bytes = page->recorders_offset + (size_t)size * page->recorder_bytes;
}

tutti_status tu_page_check(const tu_page *page, size_t bytes, const char *whose) {
    /* Acquire pairs with the founder's release: the header below it is complete. */
    if (bytes < sizeof(tu_page) || atomic_load_explicit(&page->magic, memory_order_acquire) != TU_PAGE_MAGIC)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s is not a job segment of Tutti (no magic number)", whose);
    if (page->version != TU_PAGE_VERSION)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s has layout version %u, this program has %d: all ranks and tools must use the same Tutti",
                        whose, page->version, TU_PAGE_VERSION);
    if (page->mutex_bytes != sizeof(pthread_mutex_t))
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s was made with another C library (its mutexes have %u bytes, ours %zu)", whose,
                        page->mutex_bytes, sizeof(pthread_mutex_t));
    tu_page expected;
    if (page->size < 1 || (size_t)page->size > bytes / sizeof(tu_slot))
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s claims %d ranks in %zu bytes", whose, page->size, bytes);
    if (tu_recorder_round(page->recorder_entries) != page->recorder_entries)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s claims flight recorders of %u entries", whose,
                        page->recorder_entries);
    tu_page_lay_out(&expected, page->size, page->recorder_entries);
    if (page->bytes != bytes || expected.bytes != bytes || page->slots_offset != expected.slots_offset ||
        page->slot_bytes != expected.slot_bytes || page->recorders_offset != expected.recorders_offset ||
        page->recorder_bytes != expected.recorder_bytes)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s has %zu bytes for %d ranks where %llu are right", whose, bytes,
                        page->size, (unsigned long long)expected.bytes);
    if (page->id[TU_ID_BYTES - 1] != '\0' || page->name[TU_NAME_BYTES - 1] != '\0')
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s has texts without an end", whose);
    return TUTTI_OK;
}
