/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a job: meet, connect, share the job segment, start the keeper, and wait until all have done the same. And
 * closing it, which waits for nobody.
 */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "job/inner.h"

#define FORK_PAGE ((size_t)4096)

/* ---- the house ---- */

tutti_status tu_house_create(int size, bool threads, tu_house **made) {
    tu_house *house = calloc(1, sizeof *house);
    if (house == NULL)
        return tu_error_memory("a job", sizeof *house);
    tutti_status status;
    int boxes = threads ? size : 1;
    house->size = size;
    house->threads = threads;
    house->shares = threads ? size : 1;
    house->page_fd = -1;
    house->mailboxes = calloc((size_t)boxes, sizeof *house->mailboxes);
    house->fork_page = mmap(NULL, FORK_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (house->fork_page == MAP_FAILED) {
        house->fork_page = NULL;
        status = tu_map_error(errno, "a job", FORK_PAGE);
        goto drop;
    }
    if (house->mailboxes == NULL) {
        status = tu_error_memory("mailboxes", (size_t)boxes * sizeof *house->mailboxes);
        goto drop;
    }
    if (madvise(house->fork_page, FORK_PAGE, MADV_WIPEONFORK) != 0) {
        status = tu_error_system(errno, "cannot mark a page to be wiped in forked children");
        goto drop;
    }
    house->fork_page[0] = 1;
    for (; house->boxes < boxes; house->boxes++) {
        status = tu_mailbox_init(&house->mailboxes[house->boxes]);
        if (status != TUTTI_OK)
            goto drop;
    }
    *made = house;
    return TUTTI_OK;
drop:
    tu_house_drop(house, house->shares);
    return status;
}

void tu_house_drop(tu_house *house, int shares) {
    /* Release and acquire: whoever drops the last share sees all that the others did. */
    if (house == NULL || atomic_fetch_sub_explicit(&house->shares, shares, memory_order_acq_rel) != shares)
        return;
    for (int i = 0; i < house->boxes; i++)
        tu_mailbox_end(&house->mailboxes[i]);
    if (house->page != NULL)
        munmap(house->page, house->page_bytes);
    if (house->page_fd >= 0)
        close(house->page_fd);
    if (house->fork_page != NULL)
        munmap(house->fork_page, FORK_PAGE);
    free(house->mailboxes);
    free(house);
}

static tutti_status init_robust(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attributes;
    int error = pthread_mutexattr_init(&attributes);
    if (error == 0)
        error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    if (error == 0)
        error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    if (error == 0)
        error = pthread_mutex_init(mutex, &attributes);
    if (error != 0)
        return tu_error_system(error, "cannot make a robust mutex");
    pthread_mutexattr_destroy(&attributes);
    return TUTTI_OK;
}

static tutti_status fill_page(tu_page *page, const tu_job_options *options, const tu_page *layout, const char *id,
                              const uint8_t *nonce, const int *world_ranks) {
    page->version = TU_PAGE_VERSION;
    page->mutex_bytes = sizeof(pthread_mutex_t);
    memcpy(page->nonce, nonce, TU_NONCE_BYTES);
    snprintf(page->id, sizeof page->id, "%s", id);
    snprintf(page->name, sizeof page->name, "%s", options->name);
    page->bytes = layout->bytes;
    page->size = layout->size;
    page->world_size = options->world_size;
    page->uid = geteuid();
    page->threads = layout->threads;
    page->slots_offset = layout->slots_offset;
    page->slot_bytes = layout->slot_bytes;
    page->recorders_offset = layout->recorders_offset;
    page->recorder_bytes = layout->recorder_bytes;
    page->recorder_entries = layout->recorder_entries;
    page->created_ns = tu_clock_now();
    page->created_wall = tu_clock_wall();
    tutti_status status = init_robust(&page->ledger);
    for (int rank = 0; rank < layout->size && status == TUTTI_OK; rank++) {
        tu_page_slot(page, rank)->world_rank = world_ranks[rank];
        status = init_robust(&tu_page_slot(page, rank)->keeper);
    }
    /* Release pairs with tu_page_check. */
    atomic_store_explicit(&page->magic, TU_PAGE_MAGIC, memory_order_release);
    return status;
}

tutti_status tu_house_found(tu_house *house, const tu_job_options *options, const char *id, const uint8_t *nonce,
                            const int *world_ranks) {
    tu_page layout = { .threads = house->threads };
    tu_page_lay_out(&layout, house->size, tu_recorder_round(options->recorder_entries));
    tutti_status fits = tu_file_size_check("the job segment", layout.bytes);
    if (fits != TUTTI_OK)
        return fits;
    char name[sizeof TU_PAGE_NAME + TU_ID_BYTES];
    snprintf(name, sizeof name, TU_PAGE_NAME "%s", id);
    house->page_fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (house->page_fd < 0)
        return tu_error_system(errno, "cannot create the job segment");
    if (ftruncate(house->page_fd, (off_t)layout.bytes) != 0)
        return tu_error_system(errno, "cannot size the job segment to %llu bytes", (unsigned long long)layout.bytes);
    int error;
    do
        error = fallocate(house->page_fd, 0, 0, (off_t)layout.bytes) == 0 ? 0 : errno;
    while (error == EINTR);
    if (error != 0)
        return tu_error_system(error, "cannot reserve %llu bytes for the job segment",
                               (unsigned long long)layout.bytes);
    void *at = mmap(NULL, layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, house->page_fd, 0);
    if (at == MAP_FAILED)
        return tu_map_error(errno, "the job segment", layout.bytes);
    house->page = at;
    house->page_bytes = layout.bytes;
    tutti_status status = fill_page(house->page, options, &layout, id, nonce, world_ranks);
    if (status == TUTTI_OK && fcntl(house->page_fd, F_ADD_SEALS, TU_PAGE_SEALS) != 0)
        status = tu_error_system(errno, "cannot seal the job segment");
    return status;
}

tutti_status tu_house_enter(tu_house *house, int fd, const uint8_t *nonce, const char *whose) {
    house->page_fd = fd; /* from now on the house closes it */
    struct stat status;
    if (fstat(fd, &status) != 0)
        return tu_error_system(errno, "cannot look at %s", whose);
    int seals = fcntl(fd, F_GET_SEALS);
    if (!S_ISREG(status.st_mode) || seals < 0 || (seals & TU_PAGE_SEALS) != TU_PAGE_SEALS)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s is not sealed shared memory", whose);
    if (status.st_size < (off_t)sizeof(tu_page))
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s has only %lld bytes", whose, (long long)status.st_size);
    void *at = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return tu_map_error(errno, "the job segment", (size_t)status.st_size);
    house->page = at;
    house->page_bytes = (size_t)status.st_size;
    tutti_status checked = tu_page_check(house->page, house->page_bytes, whose);
    if (checked != TUTTI_OK)
        return checked;
    if (house->page->size != house->size || memcmp(house->page->nonce, nonce, TU_NONCE_BYTES) != 0)
        return tu_error(TUTTI_ERROR_PROTOCOL, "%s belongs to another job", whose);
    return TUTTI_OK;
}

/* ---- opening ---- */

tutti_status tu_job_make(const tu_job_options *options, tu_job **made) {
    tu_job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return tu_error_memory("a job", sizeof *job);
    job->events = -1;
    job->world_rank = options->world_rank;
    job->world_size = options->world_size;
    job->interrupt = options->interrupt;
    job->log = options->log;
    snprintf(job->name, sizeof job->name, "%s", options->name);
    job->hosts = calloc((size_t)options->world_size, sizeof *job->hosts);
    job->nodes = calloc((size_t)options->world_size, sizeof *job->nodes);
    if (job->hosts == NULL || job->nodes == NULL) {
        free(job->hosts);
        free(job->nodes);
        free(job);
        return tu_error_memory("host names", (size_t)options->world_size * sizeof *job->hosts);
    }
    *made = job;
    return TUTTI_OK;
}

static bool same_node(const tu_record *left, const tu_record *right) {
    return left->uid == right->uid && strcmp(left->place, right->place) == 0;
}

/* Numbers the nodes by their lowest ranks. Ranks of a node mostly follow each other, so the node of the rank before is
 * asked first. */
static tutti_status number_nodes(tu_job *job, const tu_record *records) {
    if (records == NULL) {
        job->node_count = 1;
        return TUTTI_OK;
    }
    int *first = malloc((size_t)job->world_size * sizeof *first); /* node -> its lowest rank */
    if (first == NULL)
        return tu_error_memory("nodes", (size_t)job->world_size * sizeof *first);
    for (int rank = 0; rank < job->world_size; rank++) {
        int node = rank > 0 ? job->nodes[rank - 1] : 0;
        if (rank == 0 || !same_node(&records[rank - 1], &records[rank]))
            for (node = 0; node < job->node_count && !same_node(&records[first[node]], &records[rank]); node++)
                ;
        if (node == job->node_count)
            first[job->node_count++] = rank;
        job->nodes[rank] = node;
    }
    free(first);
    return TUTTI_OK;
}

/* Takes over what the records say. */
tutti_status tu_job_settle(tu_opening *opening) {
    tu_job *job = opening->job;
    size_t size = (size_t)opening->size;
    job->peers = calloc(size, sizeof *job->peers);
    if (job->peers == NULL)
        return tu_error_memory("peers", size * sizeof *job->peers);
    job->recorders = calloc(size, sizeof *job->recorders);
    if (job->recorders == NULL)
        return tu_error_memory("recorders", size * sizeof *job->recorders);
    job->rank = opening->rank;
    job->size = opening->size;
    for (int rank = 0; rank < opening->size; rank++) {
        const tu_record *record = opening->records != NULL ? &opening->records[opening->local[rank]] : &opening->mine;
        tu_peer *peer = &job->peers[rank];
        peer->world_rank = record->world_rank;
        peer->pid = record->pid;
        peer->start_time = record->start_time;
        peer->fd = peer->pidfd = -1;
        pthread_mutex_init(&peer->send_lock, NULL);
        if (!opening->threads && rank != opening->rank)
            /* Not compared with the start time, which takes four system calls: one that connects is the one that
             * published the record. Those that do not are looked at again while they are missing (connect.c). */
            peer->pidfd = tu_pidfd_open(record->pid, 0);
    }
    for (int rank = 0; rank < job->world_size; rank++)
        snprintf(job->hosts[rank], TU_HOST_BYTES, "%s",
                 (opening->records != NULL ? &opening->records[rank] : &opening->mine)->host);
    return number_nodes(job, opening->records);
}

/* Gets a house with the job segment in it. */
static tutti_status move_in(tu_opening *opening) {
    tu_job *job = opening->job;
    if (opening->threads) {
        job->house = (tu_house *)(uintptr_t)opening->records[0].house;
        job->mailbox = &job->house->mailboxes[job->rank];
        return TUTTI_OK;
    }
    tutti_status status = tu_house_create(job->size, false, &job->house);
    if (status != TUTTI_OK)
        return status;
    job->mailbox = &job->house->mailboxes[0];
    if (job->rank == 0) /* under one id on all hosts: that of the world's first rank */
        status = tu_house_found(job->house, opening->options,
                                opening->records != NULL ? opening->records[0].id : opening->mine.id,
                                opening->mine.nonce, opening->local);
    if (status == TUTTI_OK && job->size > 1)
        status = tu_connect(opening);
    if (status == TUTTI_OK && job->size > 1)
        status = tu_wire_listen(job);
    return status;
}

/* Writes this rank's slot and becomes visible in it. */
tutti_status tu_job_take_slot(tu_job *job, uint64_t start_time) {
    job->page = job->house->page;
    for (int rank = 0; rank < job->size; rank++)
        job->recorders[rank] = tu_page_recorder(job->page, job->house->page_bytes, job->size, rank);
    job->slot = tu_page_slot(job->page, job->rank);
    tu_slot *slot = job->slot;
    if (atomic_load_explicit(&slot->state, memory_order_acquire) == TU_RANK_DEAD) {
        /* A newcomer in a dead rank's place. Nobody asks the mutex of a rank that is known to be dead. */
        tutti_status status = init_robust(&slot->keeper);
        if (status != TUTTI_OK)
            return status;
        slot->incarnation++;
        slot->why[0] = 0;
        atomic_store_explicit(&slot->wait_status, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->reserved, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->pending, 0, memory_order_relaxed);
    }
    slot->pid = getpid();
    slot->tid = (int32_t)syscall(SYS_gettid);
    slot->parent = getppid();
    slot->uid = geteuid();
    slot->start_time = start_time;
    slot->opened_ns = tu_clock_now();
    slot->opened_wall = tu_clock_wall();
    tu_cpus_here(&slot->cpus);
    tu_recorder_init(&job->recorders[job->rank]);
    tutti_status status = tu_keeper_start(job);
    if (status != TUTTI_OK)
        return status;
    /* Release pairs with every look at the state: who we are comes first. */
    atomic_store_explicit(&slot->state, TU_RANK_JOINING, memory_order_release);
    return TUTTI_OK;
}

/* ---- the last step: wait until all are here ---- */

static tutti_status check_arrivals(void *argument) {
    tu_opening *opening = argument;
    tu_job *job = opening->job;
    tutti_status status = tu_meet_trouble(opening);
    for (int rank = 0; rank < job->size && status == TUTTI_OK; rank++) {
        if (tu_rank_probe(job, rank) != TU_RANK_DEAD)
            continue;
        opening->next_look = 0;
        status = tu_meet_trouble(opening); /* its own words are better than what we see of it */
        if (status != TUTTI_OK)
            return status;
        status = tu_death_error(job, rank, "while the world was opening");
        tu_error_at_fault(job->peers[rank].world_rank);
    }
    return status;
}

static tutti_status arrive(tu_opening *opening) {
    tu_job *job = opening->job;
    job->wait = (tu_wait){ .bell = &job->slot->bell,
                           .sleepers = &job->page->sleepers,
                           .interrupt = job->interrupt,
                           .departures = &job->page->departures };
    job->wait.yields = 20; /* until it is known how many cores there are */
    atomic_store_explicit(&job->slot->state, TU_RANK_ALIVE, memory_order_release);
    /* Pairs with the acquire of those who wait for it. They wait for the last one: only that one wakes them. */
    if (atomic_fetch_add_explicit(&job->page->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)job->size)
        tu_ring_all(job);
    tu_wait wait = job->wait;
    wait.deadline = opening->options->deadline;
    wait.check = check_arrivals;
    wait.argument = opening;
    tutti_status status = tu_wait_reached(&wait, &job->page->arrived, (uint32_t)job->size);
    if (status == TUTTI_ERROR_INTERRUPTED)
        return tu_error(status, "rank %d was interrupted while opening world \"%s\"", job->world_rank, job->name);
    if (status != TUTTI_ERROR_TIMEOUT)
        return status;
    tu_error(status, "timeout while opening world \"%s\": not all ranks of this host finished joining:", job->name);
    for (int rank = 0; rank < job->size; rank++) {
        uint32_t state = atomic_load_explicit(&tu_page_slot(job->page, rank)->state, memory_order_acquire);
        if (state >= TU_RANK_ALIVE)
            continue;
        tu_error_append(" rank %d (pid %d)", job->peers[rank].world_rank, job->peers[rank].pid);
        tu_error_at_fault(job->peers[rank].world_rank);
    }
    return status;
}

/* CPUs that any rank of this host may use. */
static int count_cores(const tu_job *job) {
    tu_cpus together = { 0 };
    for (int word = 0; word < TU_CPU_WORDS; word++)
        for (int rank = 0; rank < job->size; rank++)
            together.words[word] |= tu_page_slot(job->page, rank)->cpus.words[word];
    int cores = tu_cpus_count(&together);
    return cores > 0 ? cores : 1;
}

/* Among the ranks that may use the same CPUs as this one; where a user has bound them otherwise, that is what counts.
 * Shares that differ by one are only a beginning: with other jobs beside this one, the kernel knows better. */
static void find_home(tu_job *job) {
    const tu_cpus *mine = &job->slot->cpus;
    int place = 0, ranks = 0;
    for (int rank = 0; rank < job->size; rank++) {
        if (memcmp(&tu_page_slot(job->page, rank)->cpus, mine, sizeof *mine) != 0)
            continue;
        place += rank < job->rank;
        ranks++;
    }
    job->home = tu_home_of(mine, place, ranks);
    job->wait.home = job->home >= 0 && ranks % tu_cpus_count(mine) == 0 ? job->home + 1 : 0;
}

void tu_job_ladder(tu_job *job, const tu_job_options *options) {
    job->wait = (tu_wait){ .bell = &job->slot->bell,
                           .sleepers = &job->page->sleepers,
                           .interrupt = job->interrupt,
                           .departures = &job->page->departures };
    job->cores = count_cores(job);
    tu_wait_ladder(&job->wait, job->size, job->cores);
    if (options->spin >= 0)
        job->wait.spins = (uint32_t)options->spin;
    job->home = -1;
    if (options->homes)
        find_home(job);
}

static tutti_status join(tu_opening *opening) {
    tu_job *job = opening->job;
    tutti_status status = tu_job_settle(opening);
    if (status == TUTTI_OK)
        status = move_in(opening);
    if (status == TUTTI_OK)
        status = tu_atlas_create(job->size, &job->atlas);
    if (status == TUTTI_OK)
        status = tu_job_take_slot(job, opening->mine.start_time);
    if (status == TUTTI_OK)
        status = tu_heap_create(job, &job->heap);
    if (status == TUTTI_OK)
        status = arrive(opening);
    return status;
}

/* Tells the others, then undoes what was done. The calling thread's error stays. */
static void give_up(tu_opening *opening) {
    tu_job *job = opening->job;
    tutti_error_copy copy;
    tu_error_save(&copy);
    if (job != NULL && job->slot != NULL) {
        char why[TU_WHY_BYTES + 64]; /* shortened by who keeps it */
        snprintf(why, sizeof why, "failed to open: %.*s", TU_WHY_BYTES, copy.message);
        tu_depart(job, TU_RANK_DEAD, why);
    }
    if (job != NULL && opening->threads)
        job->house = NULL; /* its share is given up with the others */
    tu_meet_give_up(opening);
    if (job != NULL)
        tu_job_end(job);
    tu_error_restore(&copy);
}

tutti_status tu_job_open(const tu_job_options *options, tu_job **opened) {
    if (options->world_size < 1 || options->world_rank < 0 || options->world_rank >= options->world_size)
        return tu_error(TUTTI_ERROR_ARGUMENT, "rank %d is not in [0, %d), the ranks of world \"%s\"",
                        options->world_rank, options->world_size, options->name);
    tu_bell_prepare();
    tu_opening opening = { .options = options, .listener = -1 };
    tutti_status status = tu_meet_prepare(&opening);
    if (status == TUTTI_OK)
        status = tu_job_make(options, &opening.job);
    if (status == TUTTI_OK)
        status = tu_meet_records(&opening);
    if (status == TUTTI_OK)
        status = join(&opening);
    tu_job *job = opening.job;
    if (status == TUTTI_OK) {
        tu_job_ladder(job, options);
        *opened = job;
    } else {
        give_up(&opening);
    }
    if (opening.listener >= 0)
        close(opening.listener);
    free(opening.records);
    free(opening.local);
    return status;
}

/* ---- closing ---- */

static void close_connections(tu_job *job) {
    if (job->events >= 0)
        close(job->events);
    if (job->peers == NULL)
        return;
    for (int rank = 0; rank < job->size; rank++) {
        if (job->peers[rank].fd >= 0)
            close(job->peers[rank].fd);
        if (job->peers[rank].pidfd >= 0)
            close(job->peers[rank].pidfd);
        pthread_mutex_destroy(&job->peers[rank].send_lock);
    }
}

void tu_job_end(tu_job *job) {
    tu_keeper_stop(job);
    close_connections(job);
    tu_heap_free(job->heap);
    if (job->atlas != NULL) {
        tu_atlas_forget(job->atlas);
        tu_atlas_drop(job->atlas);
    }
    tu_house_drop(job->house, 1);
    free(job->recorders);
    free(job->peers);
    free(job->hosts);
    free(job->nodes);
    free(job);
}

void tu_job_goodbye(tu_job *job) {
    if (!tu_job_forked(job))
        tu_depart(job, TU_RANK_CLOSED, NULL);
}

void tu_job_close(tu_job *job) {
    if (job == NULL)
        return;
    if (tu_job_forked(job)) {
        /* The keeper, the slot and the connections' other ends belong to the parent. */
        job->keeper_runs = false;
    } else {
        tu_job_goodbye(job);
        bool any =
            !job->house->threads; /* what peers have sent and nobody has read holds pieces of theirs: let go of them */
        while (any && tu_wire_receive(job, NULL, 0, &any) == TUTTI_OK) {
        }
        tu_mailbox_close(job->mailbox);
    }
    tu_job_end(job);
}

/* ---- getters ---- */

int tu_job_rank(const tu_job *job) {
    return job->rank;
}

int tu_job_size(const tu_job *job) {
    return job->size;
}

int tu_job_world_rank(const tu_job *job, int rank) {
    return job->peers[rank].world_rank;
}

bool tu_job_threads(const tu_job *job) {
    return job->house->threads || job->size == 1;
}

int tu_job_cores(const tu_job *job) {
    return job->cores;
}

void tu_job_go_home(const tu_job *job) {
    tu_home_go(job->home);
}

const char *tu_job_host(const tu_job *job, int world_rank) {
    return job->hosts[world_rank];
}

int tu_job_nodes(const tu_job *job) {
    return job->node_count;
}

int tu_job_node(const tu_job *job, int world_rank) {
    return job->nodes[world_rank];
}

bool tu_job_forked(const tu_job *job) {
    return job->house->fork_page[0] == 0;
}

void tu_job_wait_init(const tu_job *job, int64_t deadline, tu_wait *wait) {
    *wait = job->wait;
    wait->deadline = deadline;
}

void tu_job_wake(tu_job *job) {
    tu_job_ring(job, job->rank);
    tu_mailbox_wake(job->mailbox);
}

const _Atomic uint32_t *tu_job_sleepers(const tu_job *job) {
    return &job->page->sleepers;
}

tu_bell *tu_job_bell(const tu_job *job, int rank) {
    return &tu_page_slot(job->page, rank)->bell;
}

void tu_job_ring(tu_job *job, int rank) {
    tu_bell_ring(&job->page->sleepers, tu_job_bell(job, rank));
}

void tu_job_refuse(tu_job *job, uint64_t key) {
    uint32_t number = atomic_fetch_add_explicit(&job->refusals, 1, memory_order_relaxed);
    /* Release pairs with tu_job_refused. */
    atomic_store_explicit(&job->slot->refused[number % TU_REFUSALS], key, memory_order_release);
    tu_ring_all(job);
}

bool tu_job_refused(const tu_job *job, int rank, uint64_t key) {
    const tu_slot *slot = tu_page_slot(job->page, rank);
    for (int i = 0; i < TU_REFUSALS; i++)
        if (atomic_load_explicit(&slot->refused[i], memory_order_acquire) == key) /* pairs with tu_job_refuse */
            return true;
    return false;
}

const tu_recorder *tu_job_recorder(const tu_job *job, int rank) {
    return &job->recorders[rank];
}

const tu_page *tu_job_page(const tu_job *job) {
    return job->page;
}
