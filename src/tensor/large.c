/* SPDX-License-Identifier: Apache-2.0
 *
 * Large blocks. What one operator leaves is seldom of the size that the next one asks for: activations are not as large
 * as the gradients that come when they have gone. So blocks are cut from segments, and neighbours that are free are one
 * free run, whatever they were cut for. A segment is divided into units, and a bit per unit says whether it is taken. A
 * block is the first run that is long enough, in the oldest segment that has one, so that the younger ones stay whole
 * for what is longer.
 *
 * Segments lie in large pages where the system has them. They stay when they are free, up to SPARE_LIMIT bytes, since
 * the next step of a training asks again and fresh pages cost more than the arithmetic on them.
 *
 * All threads share them: a thread may release what another made, and a lock is nothing beside filling half a megabyte.
 */
#include "tensor/large.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tensor/process.h"

#define UNIT ((size_t)1 << 16)
#define SEGMENT ((size_t)16 << 20) /* a longer block gets one of its own length */
#define SHORT ((size_t)1 << 20)    /* a shorter one stays out of such segments: the next long block needs all of it */
#define HUGE_PAGE ((size_t)2 << 20)
#define SPARE_LIMIT ((size_t)1 << 30)

typedef struct tu_segment {
    char *data;
    size_t units, spare_units;
    size_t longest;   /* no free run is longer; all may be shorter */
    uint64_t taken[]; /* one bit per unit */
} tu_segment;

/* ---- bits ---- */

/* The first unit from `at` on that is taken, or that is not; the segment's end where there is none. */
static size_t next_unit(const tu_segment *segment, size_t at, bool taken) {
    while (at < segment->units) {
        uint64_t word = segment->taken[at / 64];
        word = (taken ? word : ~word) >> at % 64;
        if (word != 0) {
            at += (size_t)__builtin_ctzll(word);
            return at < segment->units ? at : segment->units;
        }
        at = (at / 64 + 1) * 64;
    }
    return segment->units;
}

static void mark(tu_segment *segment, size_t first, size_t units, bool taken) {
    for (size_t at = first; at < first + units;) {
        size_t bits = 64 - at % 64 < first + units - at ? 64 - at % 64 : first + units - at;
        uint64_t mask = (bits == 64 ? ~(uint64_t)0 : ((uint64_t)1 << bits) - 1) << at % 64;
        if (taken)
            segment->taken[at / 64] |= mask;
        else
            segment->taken[at / 64] &= ~mask;
        at += bits;
    }
}

/* Where the first free run of so many units begins; the segment's end where there is none. */
static size_t find_run(tu_segment *segment, size_t units) {
    size_t longest = 0;
    if (segment->longest < units)
        return segment->units;
    for (size_t begin = next_unit(segment, 0, false); begin < segment->units;) {
        size_t end = next_unit(segment, begin, true);
        if (end - begin >= units)
            return begin;
        longest = end - begin > longest ? end - begin : longest;
        begin = next_unit(segment, end, false);
    }
    segment->longest = longest;
    return segment->units;
}

/* ---- segments ---- */

/* Aligned to large pages: what is mapped beyond that goes back. */
static char *map_pages(size_t bytes) {
    char *mapped = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return NULL;
    size_t before = (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE;
    if (before > 0)
        munmap(mapped, before);
    munmap(mapped + before + bytes, HUGE_PAGE - before);
    madvise(mapped + before, bytes, MADV_HUGEPAGE); /* a wish; without it the pages are small */
    return mapped + before;
}

static bool has_room(tu_large *large) {
    if (large->count < large->capacity)
        return true;
    size_t capacity = large->capacity == 0 ? 64 : large->capacity * 2;
    tu_segment **moved = realloc(large->at, capacity * sizeof *moved);
    if (moved == NULL)
        return false;
    large->at = moved;
    large->capacity = capacity;
    return true;
}

static tu_segment *add_segment(tu_large *large, size_t bytes) {
    size_t units = bytes / UNIT;
    if (!has_room(large))
        return NULL;
    tu_segment *segment = calloc(1, sizeof *segment + (units + 63) / 64 * sizeof segment->taken[0]);
    char *data = segment != NULL ? map_pages(bytes) : NULL;
    if (data == NULL) {
        free(segment);
        return NULL;
    }
    segment->data = data;
    segment->units = segment->spare_units = segment->longest = units;
    large->at[large->count++] = segment;
    large->spare_units += units;
    return segment;
}

static void remove_segment(tu_large *large, size_t place) {
    tu_segment *segment = large->at[place];
    large->spare_units -= segment->units;
    munmap(segment->data, segment->units * UNIT);
    free(segment);
    large->count--;
    memmove(large->at + place, large->at + place + 1, (large->count - place) * sizeof(tu_segment *));
    if (large->count == 0) {
        free(large->at);
        large->at = NULL;
        large->capacity = 0;
    }
}

/* Pages of a segment that is in use: of each free run those that are whole. */
static void give_runs_back(const tu_segment *segment) {
    for (size_t begin = next_unit(segment, 0, false); begin < segment->units;) {
        size_t end = next_unit(segment, begin, true);
        size_t first = (begin * UNIT + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE,
               last = end * UNIT / HUGE_PAGE * HUGE_PAGE;
        if (first < last)
            madvise(segment->data + first, last - first, MADV_DONTNEED);
        begin = next_unit(segment, end, false);
    }
}

static void trim(tu_large *large) {
    for (size_t i = large->count; i-- > 0;) {
        if (large->at[i]->spare_units == large->at[i]->units)
            remove_segment(large, i);
        else
            give_runs_back(large->at[i]);
    }
}

/* ---- blocks ---- */

static void *take(tu_large *large, tu_segment *segment, size_t first, size_t units) {
    mark(segment, first, units, true);
    segment->spare_units -= units;
    large->spare_units -= units;
    return segment->data + first * UNIT;
}

/* A new segment; where there is no room for a common one, just as long as it must be, with what is spare given back. */
static void *take_fresh(tu_large *large, size_t units) {
    size_t exact = (units * UNIT + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    tu_segment *segment = add_segment(large, exact < SEGMENT ? SEGMENT : exact);
    if (segment == NULL) {
        trim(large);
        segment = add_segment(large, exact);
    }
    return segment != NULL ? take(large, segment, 0, units) : NULL;
}

void *tu_large_alloc(size_t bytes) {
    tu_large *large = tu_process_large();
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t units = (bytes + UNIT - 1) / UNIT;
    void *data = NULL;
    pthread_mutex_lock(&large->lock);
    for (size_t i = 0; i < large->count && data == NULL; i++) {
        if (bytes < SHORT && large->at[i]->units * UNIT > SEGMENT)
            continue;
        size_t first = find_run(large->at[i], units);
        if (first < large->at[i]->units)
            data = take(large, large->at[i], first, units);
    }
    if (data == NULL)
        data = take_fresh(large, units);
    pthread_mutex_unlock(&large->lock);
    return data;
}

/* The place of the segment that the block lies in. */
static size_t place_of(const tu_large *large, const char *data) {
    size_t place = 0;
    while ((uintptr_t)data - (uintptr_t)large->at[place]->data >= large->at[place]->units * UNIT)
        place++;
    return place;
}

void tu_large_free(void *data, size_t bytes) {
    tu_large *large = tu_process_large();
    size_t units = (bytes + UNIT - 1) / UNIT;
    pthread_mutex_lock(&large->lock);
    size_t place = place_of(large, data);
    tu_segment *segment = large->at[place];
    mark(segment, (size_t)((char *)data - segment->data) / UNIT, units, false);
    segment->spare_units += units;
    segment->longest = segment->units; /* until somebody looks */
    large->spare_units += units;
    if (segment->spare_units == segment->units && large->spare_units * UNIT > SPARE_LIMIT)
        remove_segment(large, place);
    pthread_mutex_unlock(&large->lock);
}

void tu_large_trim(void) {
    tu_large *large = tu_process_large();
    pthread_mutex_lock(&large->lock);
    trim(large);
    pthread_mutex_unlock(&large->lock);
}
