/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments and mappings. A segment is a memfd whose pages are all there before anybody touches them, sealed so that no
 * one can take them away again. Its last page is the mark: magic, version, the job's nonce, owner and number, by which
 * a receiver knows that a descriptor is what the message says. Pieces begin at offset 0, so that a large one keeps its
 * alignment.
 *
 * A process-rank that gets a peer's segment maps it once; the atlas lists what is mapped. Thread-ranks use the owner's
 * own mapping: a second one would hide races from ThreadSanitizer.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/round.h"
#include "job/inner.h"

#define PAGE ((size_t)4096)
#define HUGE ((size_t)2 << 20)
#define RESERVE_STEP \
    ((off_t)32 << 20) /* fallocate undoes its work when a signal comes: do it in steps that can be repeated */
#define MARK_MAGIC UINT64_C(0x47455349545455) /* "UTTISEG" */

/* In the last page of every segment. Written by the owner before the segment is sent anywhere, never changed. */
typedef struct segment_mark {
    uint64_t magic;
    uint32_t version;
    int32_t owner; /* job rank */
    uint8_t nonce[TU_NONCE_BYTES];
    uint64_t id;
    uint64_t bytes;
} segment_mark;

static segment_mark *mark_of(const tu_segment *segment) {
    return (segment_mark *)(segment->base + segment->bytes - PAGE);
}

/* ---- mapping ---- */

/* Maps a whole descriptor at an address that is a multiple of `alignment`. */
static tutti_status map_aligned(int fd, const char *what, size_t bytes, size_t alignment, char **base) {
    if (alignment <= PAGE) {
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED)
            return tu_map_error(errno, what, bytes);
        *base = at;
        return TUTTI_OK;
    }
    size_t room = bytes + alignment;
    char *space = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return tu_map_error(errno, what, room);
    char *start = (char *)tu_round_up((size_t)space, alignment);
    if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int error = errno;
        munmap(space, room);
        return tu_map_error(error, what, bytes);
    }
    if (start > space)
        munmap(space, (size_t)(start - space));
    if (space + room > start + bytes)
        munmap(start + bytes, (size_t)(space + room - (start + bytes)));
    *base = start;
    return TUTTI_OK;
}

/* Whether the kernel gives shared memory huge pages when a program asks for them. */
static bool huge_on_request(void) {
    char text[128] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "re");
    if (file == NULL)
        return false;
    if (fgets(text, sizeof text, file) == NULL)
        text[0] = '\0';
    fclose(file);
    return strstr(text, "[advise]") != NULL || strstr(text, "[within_size]") != NULL ||
           strstr(text, "[always]") != NULL;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Takes all pages now. Only a page fault may take huge ones on request, so those are faulted in first; fallocate then
 * takes what is still missing, and is the one whose answer counts. */
static tutti_status take_pages(tu_segment *segment, const char *what) {
    if (segment->huge && madvise(segment->base, segment->bytes, MADV_HUGEPAGE) == 0)
        (void)madvise(segment->base, segment->bytes, MADV_POPULATE_WRITE);
    for (off_t at = 0; at < (off_t)segment->bytes;) {
        off_t step = (off_t)segment->bytes - at < RESERVE_STEP ? (off_t)segment->bytes - at : RESERVE_STEP;
        if (fallocate(segment->fd, 0, at, step) == 0)
            at += step;
        else if (errno == ENOSPC || errno == ENOMEM)
            return tu_error(TUTTI_ERROR_MEMORY,
                            "out of memory: %zu bytes of shared memory for %s could not be reserved", segment->bytes,
                            what);
        else if (errno != EINTR)
            return tu_error_system(errno, "cannot reserve %zu bytes of shared memory for %s", segment->bytes, what);
    }
    return TUTTI_OK;
}

/* ---- making one's own ---- */

static tutti_status fill_segment(tu_job *job, tu_segment *segment, const char *what, size_t alignment) {
    tutti_status status = tu_file_size_check(what, segment->bytes);
    if (status != TUTTI_OK)
        return status;
    char name[64];
    char id[TU_ID_BYTES];
    tu_page_id(job->page, id);
    snprintf(name, sizeof name, "tutti-%s-%s-%d", segment->heap ? "heap" : "piece", id, job->world_rank);
    segment->fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (segment->fd < 0)
        return tu_error_system(errno, "cannot create shared memory for %s", what);
    if (ftruncate(segment->fd, (off_t)segment->bytes) != 0) {
        status = tu_error_system(errno, "cannot size shared memory for %s to %zu bytes", what, segment->bytes);
        goto close_descriptor;
    }
    status = map_aligned(segment->fd, what, segment->bytes, alignment, &segment->base);
    if (status != TUTTI_OK)
        goto close_descriptor;
    status = take_pages(segment, what);
    if (status != TUTTI_OK)
        goto unmap;
    *mark_of(segment) = (segment_mark){ .magic = MARK_MAGIC,
                                        .version = TU_PAGE_VERSION,
                                        .owner = segment->owner,
                                        .id = segment->id,
                                        .bytes = segment->bytes };
    memcpy(mark_of(segment)->nonce, job->page->nonce, TU_NONCE_BYTES);
    if (fcntl(segment->fd, F_ADD_SEALS, TU_PAGE_SEALS) != 0) {
        status = tu_error_system(errno, "cannot seal shared memory for %s", what);
        goto unmap;
    }
    return TUTTI_OK;

unmap:
    munmap(segment->base, segment->bytes);
close_descriptor:
    close(segment->fd);
    return status;
}

tutti_status tu_segment_make(tu_job *job, const char *what, size_t bytes, size_t alignment, int huge, bool heap,
                             tu_segment **made) {
    size_t room = sizeof(tu_segment) + (heap ? (size_t)job->size * sizeof(_Atomic bool) : 0);
    tu_segment *segment = calloc(1, room);
    if (segment == NULL)
        return tu_error_memory("a segment", room);
    if (bytes > SIZE_MAX / 4) {
        free(segment);
        return tu_error(TUTTI_ERROR_MEMORY, "%zu bytes of shared memory for %s are more than any machine has", bytes,
                        what);
    }
    segment->bytes = tu_round_up(bytes > 0 ? bytes : 1, PAGE) + PAGE;
    segment->huge = huge != 0 && segment->bytes >= HUGE && huge_on_request();
    if (huge == 1 && !segment->huge)
        TU_LOG(TUTTI_LOG_INFO, job->log, "job", "no huge pages for %s: %s", what,
               segment->bytes < HUGE
                   ? "it is too small"
                   : "the kernel gives shared memory none (/sys/kernel/mm/transparent_hugepage/shmem_enabled)");
    if (segment->huge && alignment < HUGE)
        alignment = HUGE;
    segment->references = 1;
    segment->heap = heap;
    segment->owner = job->rank;
    segment->id = atomic_fetch_add_explicit(&job->segments, 1, memory_order_relaxed) + 1;
    segment->sent = heap ? (_Atomic bool *)(segment + 1) : NULL;
    tutti_status status = tu_ledger_begin(job, what, segment->bytes);
    if (status == TUTTI_OK) {
        status = fill_segment(job, segment, what, alignment);
        tu_ledger_end(job, segment->bytes, status == TUTTI_OK);
    }
    if (status != TUTTI_OK) {
        free(segment);
        return status;
    }
    *made = segment;
    return TUTTI_OK;
}

static void segment_keep(tu_segment *segment) {
    atomic_fetch_add_explicit(&segment->references, 1, memory_order_relaxed);
}

static void end_segment(tu_segment *segment) {
    munmap(segment->base, segment->bytes);
    if (segment->fd >= 0)
        close(segment->fd);
    free(segment);
}

/* ---- the atlas ---- */

struct tu_atlas {
    pthread_mutex_t lock;
    _Atomic uint32_t references; /* the job's, and one per import */
    int owners;
    tu_segment *first[]; /* by owner: imports with references, or kept */
};

tutti_status tu_atlas_create(int owners, tu_atlas **made) {
    size_t bytes = sizeof(tu_atlas) + (size_t)owners * sizeof(tu_segment *);
    tu_atlas *atlas = calloc(1, bytes);
    if (atlas == NULL)
        return tu_error_memory("the list of mapped segments", bytes);
    pthread_mutex_init(&atlas->lock, NULL);
    atlas->references = 1;
    atlas->owners = owners;
    *made = atlas;
    return TUTTI_OK;
}

void tu_atlas_drop(tu_atlas *atlas) {
    if (atlas == NULL || atomic_fetch_sub_explicit(&atlas->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_destroy(&atlas->lock);
    free(atlas);
}

/* An import's last reference is given up under the lock, so that a finder never meets a segment that is about to go. */
static void drop_import(tu_segment *segment) {
    tu_atlas *atlas = segment->atlas;
    pthread_mutex_lock(&atlas->lock);
    bool last = atomic_fetch_sub_explicit(&segment->references, 1, memory_order_acq_rel) == 1;
    if (last) {
        tu_segment **at = &atlas->first[segment->owner];
        while (*at != segment)
            at = &(*at)->next;
        *at = segment->next;
    }
    pthread_mutex_unlock(&atlas->lock);
    if (last) {
        end_segment(segment);
        tu_atlas_drop(atlas);
    }
}

void tu_segment_drop(tu_segment *segment) {
    if (segment->atlas != NULL)
        drop_import(segment);
    else if (atomic_fetch_sub_explicit(&segment->references, 1, memory_order_acq_rel) == 1)
        end_segment(segment);
}

void tu_atlas_forget_owner(tu_atlas *atlas, int rank) {
    for (;;) {
        pthread_mutex_lock(&atlas->lock);
        tu_segment *kept = atlas->first[rank];
        while (kept != NULL && !kept->heap)
            kept = kept->next;
        if (kept != NULL)
            kept->heap = false; /* the job's reference is taken from it below, once */
        pthread_mutex_unlock(&atlas->lock);
        if (kept == NULL)
            return;
        drop_import(kept);
    }
}

void tu_atlas_forget(tu_atlas *atlas) {
    for (int rank = 0; rank < atlas->owners; rank++)
        tu_atlas_forget_owner(atlas, rank);
}

/* ---- importing ---- */

static tutti_status check_descriptor(int fd, uint64_t bytes, const char *whose) {
    struct stat status;
    if (fstat(fd, &status) != 0)
        return tu_error_system(errno, "cannot look at the descriptor that came from %s", whose);
    if (!S_ISREG(status.st_mode))
        return tu_error(TUTTI_ERROR_PROTOCOL, "the descriptor that came from %s is not shared memory", whose);
    if ((uint64_t)status.st_size != bytes || bytes < 2 * PAGE || bytes % PAGE != 0)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "the shared memory that came from %s has %lld bytes, not the %llu it was announced with", whose,
                        (long long)status.st_size, (unsigned long long)bytes);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "the shared memory that came from %s is not sealed against shrinking and growing", whose);
    return TUTTI_OK;
}

static tutti_status check_mark(const tu_job *job, const tu_segment *segment, const char *whose) {
    const segment_mark *mark = mark_of(segment);
    if (mark->magic != MARK_MAGIC || memcmp(mark->nonce, job->page->nonce, TU_NONCE_BYTES) != 0 ||
        mark->owner != segment->owner || mark->id != segment->id || mark->bytes != segment->bytes)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "the shared memory that came from %s is not marked as a segment of this job", whose);
    if (mark->version != TU_PAGE_VERSION)
        return tu_error(TUTTI_ERROR_PROTOCOL, "the shared memory that came from %s has layout version %u, this rank %d",
                        whose, mark->version, TU_PAGE_VERSION);
    return TUTTI_OK;
}

/* Maps a descriptor that is not known yet and lists it. The atlas is locked. */
static tutti_status import_new(tu_job *job, int owner, const tu_piece_wire *wire, int fd, tu_segment **made) {
    char whose[48];
    snprintf(whose, sizeof whose, "rank %d (pid %d)", job->peers[owner].world_rank, job->peers[owner].pid);
    tutti_status status = check_descriptor(fd, wire->segment_bytes, whose);
    if (status != TUTTI_OK)
        return status;
    tu_segment *segment = calloc(1, sizeof *segment);
    if (segment == NULL)
        return tu_error_memory("a segment", sizeof *segment);
    segment->fd = -1;
    segment->owner = owner;
    segment->id = wire->id;
    segment->bytes = wire->segment_bytes;
    segment->heap = wire->heap != 0;
    segment->huge = wire->huge != 0;
    segment->atlas = job->atlas;
    /* Only what may have huge pages needs their alignment, which costs two system calls more. */
    bool large = segment->huge || (segment->heap && segment->bytes >= HUGE);
    status = map_aligned(fd, whose, segment->bytes, large ? HUGE : PAGE, &segment->base);
    if (status != TUTTI_OK) {
        free(segment);
        return status;
    }
    if (segment->huge)
        (void)madvise(segment->base, segment->bytes, MADV_HUGEPAGE);
    status = check_mark(job, segment, whose);
    if (status != TUTTI_OK) {
        end_segment(segment);
        return status;
    }
    segment->references = segment->heap ? 2 : 1; /* a heap segment's second one is the job's: it stays mapped */
    atomic_fetch_add_explicit(&job->atlas->references, 1, memory_order_relaxed);
    segment->next = job->atlas->first[owner];
    job->atlas->first[owner] = segment;
    *made = segment;
    return TUTTI_OK;
}

tutti_status tu_segment_import(tu_job *job, int owner, const tu_piece_wire *wire, int fd, tu_segment **segment) {
    tu_atlas *atlas = job->atlas;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&atlas->lock);
    tu_segment *known = atlas->first[owner];
    while (known != NULL && known->id != wire->id)
        known = known->next;
    if (known != NULL) {
        atomic_fetch_add_explicit(&known->references, 1, memory_order_relaxed);
        *segment = known;
    } else if (fd < 0) {
        status = tu_error(TUTTI_ERROR_NOT_FOUND, "segment %llu of rank %d is not mapped here",
                          (unsigned long long)wire->id, job->peers[owner].world_rank);
    } else {
        status = import_new(job, owner, wire, fd, segment);
    }
    pthread_mutex_unlock(&atlas->lock);
    if (fd >= 0)
        close(fd);
    return status;
}

/* ---- pieces ---- */

#define LARGEST_HEAP_ALIGNMENT ((size_t)64 << 10)

tutti_status tu_piece_alloc(tu_job *job, const char *what, size_t bytes, size_t alignment, int huge, tu_piece *piece) {
    if (alignment < 64)
        alignment = 64;
    if ((alignment & (alignment - 1)) != 0 || alignment > HUGE)
        return tu_error(TUTTI_ERROR_ARGUMENT, "alignment %zu for %s must be a power of two up to %zu", alignment, what,
                        HUGE);
    if (bytes < TU_PIECE_OWN_SEGMENT && alignment <= LARGEST_HEAP_ALIGNMENT)
        return tu_heap_alloc(job->heap, what, bytes, alignment, piece);
    tu_segment *segment;
    tutti_status status = tu_segment_make(job, what, bytes, alignment, huge, false, &segment);
    if (status != TUTTI_OK)
        return status;
    *piece = (tu_piece){ .address = segment->base, .bytes = bytes, .segment = segment, .offset = 0 };
    return TUTTI_OK;
}

void tu_piece_free(tu_job *job, tu_piece *piece) {
    if (piece->segment == NULL)
        return;
    if (piece->segment->heap) {
        tu_heap_give_back(job->heap, piece);
    } else {
        tu_ledger_return(job, piece->segment->bytes);
        tu_segment_drop(piece->segment);
    }
    *piece = (tu_piece){ 0 };
}

void tu_piece_describe(const tu_piece *piece, tu_piece_wire *wire) {
    *wire = (tu_piece_wire){ .id = piece->segment->id,
                             .segment_bytes = piece->segment->bytes,
                             .offset = piece->offset,
                             .bytes = piece->bytes,
                             .heap = piece->segment->heap,
                             .huge = piece->segment->huge };
}

size_t tu_holds_bytes(const tu_job *job) {
    return tu_round_up((size_t)job->size * sizeof(uint32_t), 64);
}

_Atomic uint32_t *tu_piece_holds(const tu_job *job, const tu_segment *segment, uint64_t offset, int holder) {
    return (_Atomic uint32_t *)(segment->base + offset - tu_holds_bytes(job)) + holder;
}

/* ---- mappings ---- */

typedef struct mapping {
    tu_mapping open; /* first: what others see */
    tu_segment *segment;
    _Atomic uint32_t *holds; /* this rank's count in a heap piece; NULL in a segment of its own */
} mapping;

tutti_status tu_mapping_make(tu_job *job, tu_segment *segment, const tu_piece_wire *wire, int holder, bool counted,
                             tu_mapping **made) {
    size_t last = segment->bytes - PAGE;
    bool heap = wire->heap != 0;
    if (wire->offset > last || wire->bytes > last - wire->offset || (heap && wire->offset < tu_holds_bytes(job)) ||
        wire->offset % 64 != 0)
        return tu_error(TUTTI_ERROR_PROTOCOL, "a piece of %llu bytes at %llu lies outside its segment of %zu bytes",
                        (unsigned long long)wire->bytes, (unsigned long long)wire->offset, segment->bytes);
    mapping *inner = calloc(1, sizeof *inner);
    if (inner == NULL)
        return tu_error_memory("a mapping", sizeof *inner);
    inner->open.address = segment->base + wire->offset;
    inner->open.bytes = wire->bytes;
    inner->segment = segment;
    inner->holds = heap ? tu_piece_holds(job, segment, wire->offset, holder) : NULL;
    if (inner->holds != NULL && !counted)
        atomic_fetch_add_explicit(inner->holds, 1, memory_order_relaxed);
    segment_keep(segment);
    *made = &inner->open;
    return TUTTI_OK;
}

void tu_mapping_release(tu_mapping *open) {
    mapping *inner = (mapping *)open;
    if (open == NULL)
        return;
    if (inner->holds != NULL) /* release: our last accesses come before the owner's reuse, which acquires */
        atomic_fetch_sub_explicit(inner->holds, 1, memory_order_release);
    tu_segment_drop(inner->segment);
    free(inner);
}
