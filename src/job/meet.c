/* SPDX-License-Identifier: Apache-2.0
 *
 * Meeting through the store. Each rank publishes one record under "job/<rank>", by compare-and-set, so that of two
 * processes that claim one rank the second learns of the first; then it reads the records of all.
 *
 * Nobody is left waiting. A rank that gives up says why, under "job/failed" and in the place of every record that is
 * still missing: ranks that wait for those records wake up and read the reason, and a rank that comes later finds it in
 * its own place and goes. That also settles who frees the object that thread-ranks share (tu_house): it has one share
 * per rank; a rank whose record is published gives up its own share, and whoever put a failure in a missing rank's
 * place gives up that one's.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "job/inner.h"
#include "store/watch.h"

#define RECORD_MAGIC UINT64_C(0x44524f4345525554) /* "TURECORD" */
#define RECORD_BYTES offsetof(tu_record, text)
#define FIRST_SLICE (20 * TU_MILLISECOND)       /* of the wait for all records; doubled up to the next */
#define READ_SLICE (200 * TU_MILLISECOND)       /* between two looks at the interrupt flag, and at those who came */
#define LEARNED_AT_ONCE 4                       /* ranks that are looked at then */
#define READ_LIMIT (30 * TU_SECOND)             /* for values that are there */
#define TROUBLE_INTERVAL (100 * TU_MILLISECOND) /* between two looks at "job/failed" */
#define LAST_WORDS (5 * TU_SECOND)              /* for telling the store that this rank gives up */
#define KEY_BYTES 24
#define FAILED_KEY "job/failed"

static void record_key(int rank, char key[KEY_BYTES]) {
    snprintf(key, KEY_BYTES, "job/%d", rank);
}

unsigned tu_socket_address(const uint8_t name[TU_NONCE_BYTES], struct sockaddr_un *address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    char *text = address->sun_path + 1; /* a zero first: an abstract name, which no file system sees */
    strcpy(text, "tutti-");
    tu_hex(name, TU_NONCE_BYTES, text + 6);
    return (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + 6 + 2 * TU_NONCE_BYTES);
}

void tu_rank_names(const bool *marked, const int *names, int count, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < count; i++) {
        if (!marked[i])
            continue;
        int last = i;
        while (last + 1 < count && marked[last + 1] && names[last + 1] == names[last] + 1)
            last++;
        if (used + 32 > bytes) {
            snprintf(text + used, bytes - used, ", …");
            return;
        }
        used += (size_t)snprintf(text + used, bytes - used, last > i ? "%s%d-%d" : "%s%d", used > 0 ? ", " : "",
                                 names[i], names[last]);
        i = last;
    }
    if (used == 0)
        snprintf(text, bytes, "none");
}

/* ---- this rank's record ---- */

static bool store_in_memory(tutti_store *store) {
    return strcmp(tutti_store_kind(tutti_store_underlying(store)), "memory") == 0;
}

/* Thread-rank 0 makes the house before it says where it is. */
static tutti_status found_house(tu_opening *opening) {
    int size = opening->options->world_size;
    int *ranks = calloc((size_t)size, sizeof *ranks);
    if (ranks == NULL)
        return tu_error_memory("the ranks of the job", (size_t)size * sizeof *ranks);
    for (int rank = 0; rank < size; rank++)
        ranks[rank] = rank;
    tutti_status status = tu_house_create(size, true, &opening->house);
    if (status == TUTTI_OK) {
        status = tu_house_found(opening->house, opening->options, opening->mine.id, opening->mine.nonce, ranks);
        if (status != TUTTI_OK) {
            tu_house_drop(opening->house, size);
            opening->house = NULL;
        }
    }
    free(ranks);
    opening->mine.house = (uint64_t)(uintptr_t)opening->house;
    return status;
}

void tu_record_self(const tu_job_options *options, tu_record *mine) {
    mine->world_rank = options->world_rank;
    mine->world_size = options->world_size;
    mine->pid = getpid();
    mine->uid = geteuid();
    mine->start_time = tu_process_start_time(mine->pid);
    gethostname(mine->host, sizeof mine->host - 1);
}

static void fill_record(tu_opening *opening) {
    tu_record *mine = &opening->mine;
    mine->magic = RECORD_MAGIC;
    mine->version = TU_PAGE_VERSION;
    mine->bytes = RECORD_BYTES;
    tu_record_self(opening->options, mine);
}

tutti_status tu_meet_prepare(tu_opening *opening) {
    const tu_job_options *options = opening->options;
    tu_record *mine = &opening->mine;
    fill_record(opening);
    opening->largest = options->world_size;
    uint8_t id[(TU_ID_BYTES - 1) / 2];
    tutti_status status = tu_random_bytes(&mine->writer, sizeof mine->writer);
    if (status == TUTTI_OK)
        status = tu_process_place(mine->place);
    if (status == TUTTI_OK)
        status = tu_random_bytes(mine->nonce, sizeof mine->nonce);
    if (status == TUTTI_OK)
        status = tu_random_bytes(id, sizeof id);
    if (status != TUTTI_OK)
        return status;
    tu_hex(id, sizeof id, mine->id);
    if (options->store == NULL)
        return TUTTI_OK;
    opening->threads = store_in_memory(options->store);
    if (!opening->threads)
        return tu_listen(options->world_size, &opening->listener, mine->socket);
    return options->world_rank == 0 ? found_house(opening) : TUTTI_OK;
}

/* ---- reading records ---- */

/* Copies what the store gave into a record; false when it is not one of ours, or of another version. */
static bool read_record(const void *value, size_t bytes, tu_record *record) {
    memset(record, 0, sizeof *record);
    memcpy(record, value, bytes < sizeof *record ? bytes : sizeof *record);
    if (bytes < 16 || record->magic != RECORD_MAGIC || record->version != TU_PAGE_VERSION)
        return false;
    record->place[TU_PLACE_BYTES - 1] = record->host[TU_HOST_BYTES - 1] = record->text[sizeof record->text - 1] = '\0';
    record->id[TU_ID_BYTES - 1] = '\0';
    return bytes >= RECORD_BYTES && record->bytes == bytes;
}

/* The error that a failure record carries. */
static tutti_status told_failure(tu_opening *opening, const tu_record *record) {
    opening->told = true;
    tutti_status status = record->failed > 0 ? (tutti_status)record->failed : TUTTI_ERROR_PROTOCOL;
    tu_error(status, "rank %d (pid %d on %s) gave up opening the world: %s", record->by, record->pid, record->host,
             record->text);
    tu_error_at_fault(record->by);
    return status;
}

static tutti_status publish(tu_opening *opening) {
    tu_record *mine = &opening->mine;
    char key[KEY_BYTES];
    record_key(mine->world_rank, key);
    void *value;
    size_t bytes;
    tutti_status status =
        tutti_store_compare_set(opening->options->store, key, "", 0, mine, mine->bytes, &value, &bytes);
    if (status != TUTTI_OK)
        return status;
    tu_record there;
    bool readable = read_record(value, bytes, &there);
    free(value);
    if (readable && there.writer == mine->writer) {
        opening->published = true;
        return TUTTI_OK;
    }
    if (readable && there.failed != 0)
        return told_failure(opening, &there);
    opening->intruder = true;
    if (!readable)
        tu_error(TUTTI_ERROR_MISMATCH, "rank %d of world \"%s\" is taken by a process of another version of Tutti",
                 mine->world_rank, opening->options->name);
    else
        tu_error(TUTTI_ERROR_MISMATCH,
                 "two processes say that they are rank %d of world \"%s\": pid %d on %s, and this one, pid %d on %s; "
                 "each rank must have its own number",
                 mine->world_rank, opening->options->name, there.pid, there.host, mine->pid, mine->host);
    tu_error_at_fault(mine->world_rank);
    return TUTTI_ERROR_MISMATCH;
}

static tutti_status check_record(tu_opening *opening, int rank, const void *value, size_t bytes) {
    tu_record *record = &opening->records[rank];
    if (!read_record(value, bytes, record)) {
        if (bytes >= 16 && record->magic == RECORD_MAGIC && record->version != TU_PAGE_VERSION)
            tu_error(TUTTI_ERROR_PROTOCOL,
                     "ranks use different versions of Tutti: rank %d has layout version %u, this rank %d has %d", rank,
                     record->version, opening->mine.world_rank, TU_PAGE_VERSION);
        else
            tu_error(TUTTI_ERROR_PROTOCOL,
                     "the store holds %zu bytes for rank %d that are not its record; is the store used by others under "
                     "the same prefix?",
                     bytes, rank);
        tu_error_at_fault(rank);
        return TUTTI_ERROR_PROTOCOL;
    }
    if (record->world_size > opening->largest && record->world_size < (1 << 20))
        opening->largest = record->world_size;
    if (record->failed != 0)
        return told_failure(opening, record);
    if (record->world_size != opening->mine.world_size) {
        tu_error(TUTTI_ERROR_MISMATCH,
                 "world sizes disagree: rank %d (pid %d on %s) was started with %d ranks, rank %d (this one) with %d",
                 rank, record->pid, record->host, record->world_size, opening->mine.world_rank,
                 opening->mine.world_size);
        tu_error_at_fault(rank);
        return TUTTI_ERROR_MISMATCH;
    }
    return TUTTI_OK;
}

/* Whether a rank has published its record; a failure that another rank left in its place does not count. */
static bool has_come(tutti_store *store, int rank) {
    char key[KEY_BYTES];
    record_key(rank, key);
    const char *keys[1] = { key };
    bool present = false;
    void *value;
    size_t bytes;
    if (tutti_store_check(store, keys, 1, &present) != TUTTI_OK || !present)
        return false;
    if (tutti_store_get(store, key, READ_LIMIT, &value, &bytes) != TUTTI_OK)
        return false;
    tu_record record;
    bool readable = read_record(value, bytes, &record);
    free(value);
    return !readable || record.failed == 0 || record.by == rank;
}

/* The deadline has passed: who came, and who did not? */
static tutti_status missing_ranks(tu_opening *opening) {
    const tu_job_options *options = opening->options;
    int size = options->world_size;
    bool *marked = calloc((size_t)size, sizeof *marked);
    int *names = calloc((size_t)size, sizeof *names);
    if (marked == NULL || names == NULL) {
        free(marked);
        free(names);
        return tu_error_memory("a list of ranks", (size_t)size * sizeof *names);
    }
    for (int rank = 0; rank < size; rank++) {
        names[rank] = rank;
        marked[rank] = has_come(options->store, rank);
    }
    char came[256], missing[256];
    tu_rank_names(marked, names, size, came, sizeof came);
    for (int rank = 0; rank < size; rank++)
        marked[rank] = !marked[rank];
    tu_rank_names(marked, names, size, missing, sizeof missing);
    tu_error(TUTTI_ERROR_TIMEOUT,
             "timeout while opening world \"%s\" of %d ranks: rank %s came, rank %s did not; were all ranks started, "
             "with the same store?",
             options->name, size, came, missing);
    for (int rank = 0; rank < size; rank++)
        if (marked[rank])
            tu_error_at_fault(rank);
    free(marked);
    free(names);
    return TUTTI_ERROR_TIMEOUT;
}

/* ---- who came, and died before the others ---- */

void tu_first_rank_note(tu_first_rank *first, int pid) {
    if (pid != 0 && first->pid == 0)
        *first = (tu_first_rank){ pid, tu_process_start_time(pid) };
}

bool tu_first_rank_runs(const tu_first_rank *process) {
    return tu_process_runs(process->pid, process->start_time);
}

tutti_status tu_first_rank_check(const tu_first_rank *first) {
    if (first->pid == 0 || tu_first_rank_runs(first))
        return TUTTI_OK;
    tu_error(TUTTI_ERROR_DEAD, "rank 0 (pid %d) died while the world was opening, and with it the store that it served",
             first->pid);
    tu_error_at_fault(0);
    return TUTTI_ERROR_DEAD;
}

tutti_status tu_meet_died(tu_opening *opening, const tu_record *record, int pidfd) {
    opening->next_look = 0; /* it may have left word before it went */
    tutti_status status = tu_meet_trouble(opening);
    if (status != TUTTI_OK)
        return status;
    tu_fate fate;
    tu_process_fate(record->pid, record->start_time, pidfd, &fate);
    tu_error(TUTTI_ERROR_DEAD, "rank %d (pid %d) died while the world was opening", record->world_rank, record->pid);
    if (fate.known && fate.signal != 0)
        tu_error_append(": killed by signal %d", fate.signal);
    else if (fate.known)
        tu_error_append(": exited with status %d", fate.exit_code);
    tu_error_at_fault(record->world_rank);
    return TUTTI_ERROR_DEAD;
}

/* Reads one record if it is there; does not wait. */
static tutti_status learn(tu_opening *opening, int rank) {
    const tu_job_options *options = opening->options;
    tu_record *record = &opening->records[rank];
    char key[KEY_BYTES];
    record_key(rank, key);
    const char *keys[1] = { key };
    bool present = record->pid != 0;
    tutti_status status = present ? TUTTI_OK : tutti_store_check(options->store, keys, 1, &present);
    if (status != TUTTI_OK || !present || record->pid != 0)
        return status;
    void *value;
    size_t bytes;
    status = tutti_store_get(options->store, key, READ_LIMIT, &value, &bytes);
    if (status != TUTTI_OK)
        return status;
    status = check_record(opening, rank, value, bytes);
    free(value);
    bool local = status == TUTTI_OK && strcmp(record->place, opening->mine.place) == 0;
    if (local && rank == 0 && options->first != NULL)
        *options->first = (tu_first_rank){ record->pid, record->start_time };
    return status;
}

/* While others are missing: looks at rank 0 and at a few others in turn; those that came to this host must still live.
 * A few, so that many ranks that open slowly do not slow each other down. */
static tutti_status look_at_known(tu_opening *opening) {
    int size = opening->options->world_size;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < LEARNED_AT_ONCE && status == TUTTI_OK; i++) {
        int rank = i == 0 ? 0 : opening->known;
        if (i > 0)
            opening->known = (opening->known + 1) % size;
        status = learn(opening, rank);
        const tu_record *record = &opening->records[rank];
        if (status == TUTTI_OK && record->pid != 0 && rank != opening->mine.world_rank &&
            strcmp(record->place, opening->mine.place) == 0 && !tu_process_runs(record->pid, record->start_time))
            status = tu_meet_died(opening, record, -1);
    }
    return status;
}

/* Waits for all keys, in slices, so that an interrupt is seen; then reads. A wait may run out of time without harm, a
 * read may not: cut off in the middle of an answer, a connection is of no more use. */
static tutti_status read_values(tu_opening *opening, const char *const *keys, void **values, size_t *sizes) {
    const tu_job_options *options = opening->options;
    size_t count = (size_t)options->world_size;
    tutti_status status = opening->threads ? TUTTI_OK : learn(opening, 0);
    if (status != TUTTI_OK)
        return status;
    for (int64_t longest = FIRST_SLICE;; longest = longest * 2 < READ_SLICE ? longest * 2 : READ_SLICE) {
        int64_t left = tu_deadline_left(options->deadline);
        int64_t slice = left > longest ? longest : left > 0 ? left : 1;
        status = tutti_store_wait(options->store, keys, count, slice);
        if (status == TUTTI_OK)
            return tutti_store_multi_get(options->store, keys, count, READ_LIMIT, values, sizes);
        if (status != TUTTI_ERROR_TIMEOUT)
            return status;
        if (options->interrupt != NULL && atomic_load_explicit(options->interrupt, memory_order_relaxed) != 0)
            return tu_error(TUTTI_ERROR_INTERRUPTED, "rank %d was interrupted while opening world \"%s\"",
                            options->world_rank, options->name);
        status = tu_watch_look(); /* a server that does not answer at all is told as that */
        if (status == TUTTI_OK && !opening->threads)
            status = look_at_known(opening);
        if (status != TUTTI_OK)
            return status;
        if (left <= slice)
            return missing_ranks(opening);
    }
}

static tutti_status read_all(tu_opening *opening) {
    size_t size = (size_t)opening->options->world_size;
    opening->records = calloc(size, sizeof *opening->records);
    char(*texts)[KEY_BYTES] = calloc(size, sizeof *texts);
    const char **keys = calloc(size, sizeof *keys);
    void **values = calloc(size, sizeof *values);
    size_t *sizes = calloc(size, sizeof *sizes);
    tutti_status status = TUTTI_OK;
    if (opening->records == NULL || texts == NULL || keys == NULL || values == NULL || sizes == NULL) {
        status = tu_error_memory("the records of all ranks", size * sizeof *opening->records);
        goto free_all;
    }
    for (size_t rank = 0; rank < size; rank++) {
        record_key((int)rank, texts[rank]);
        keys[rank] = texts[rank];
    }
    status = read_values(opening, keys, values, sizes);
    if (status != TUTTI_OK)
        goto free_all;
    for (size_t rank = 0; rank < size; rank++) {
        if (status == TUTTI_OK)
            status = check_record(opening, (int)rank, values[rank], sizes[rank]);
        free(values[rank]);
    }
free_all:
    free(texts);
    free(keys);
    free(values);
    free(sizes);
    return status;
}

/* Which ranks make the job: those at the same place, of the same user. */
static tutti_status find_local(tu_opening *opening) {
    int size = opening->options->world_size;
    opening->local = calloc((size_t)size, sizeof *opening->local);
    if (opening->local == NULL)
        return tu_error_memory("the ranks of the job", (size_t)size * sizeof *opening->local);
    for (int rank = 0; rank < size; rank++) {
        const tu_record *record = opening->records != NULL ? &opening->records[rank] : &opening->mine;
        if (strcmp(record->place, opening->mine.place) != 0)
            continue;
        if (record->uid != opening->mine.uid) {
            TU_LOG(TUTTI_LOG_WARN, opening->options->log, "job",
                   "rank %d runs on this host as another user (uid %u, this rank %u): no memory can be "
                   "shared with it",
                   rank, record->uid, opening->mine.uid);
            continue;
        }
        if (rank == opening->mine.world_rank)
            opening->rank = opening->size;
        opening->local[opening->size++] = rank;
    }
    return TUTTI_OK;
}

tutti_status tu_meet_records(tu_opening *opening) {
    if (opening->options->store == NULL) {
        if (opening->options->world_size != 1)
            return tu_error(TUTTI_ERROR_ARGUMENT, "world \"%s\" has %d ranks and no store to meet in",
                            opening->options->name, opening->options->world_size);
        return find_local(opening);
    }
    tutti_status status = publish(opening);
    if (status == TUTTI_OK)
        status = read_all(opening);
    if (status == TUTTI_OK)
        status = find_local(opening);
    return status;
}

/* ---- trouble ---- */

tutti_status tu_meet_trouble(tu_opening *opening) {
    int64_t now = tu_clock_now();
    if (opening->options->store == NULL || now < opening->next_look)
        return TUTTI_OK;
    opening->next_look = now + TROUBLE_INTERVAL;
    const char *keys[1] = { FAILED_KEY };
    bool present = false;
    if (tutti_store_check(opening->options->store, keys, 1, &present) != TUTTI_OK || !present)
        return TUTTI_OK;
    void *value;
    size_t bytes;
    if (tutti_store_get(opening->options->store, FAILED_KEY, TU_SECOND, &value, &bytes) != TUTTI_OK)
        return TUTTI_OK;
    tu_record record;
    bool readable = read_record(value, bytes, &record);
    free(value);
    return readable && record.failed != 0 && record.writer != opening->mine.writer ? told_failure(opening, &record)
                                                                                   : TUTTI_OK;
}

/* Puts the failure where a record is missing. True when it was this call that did. there: what is in that place now. */
static bool fill_place(tutti_store *store, const char *key, const tu_record *failure, tu_record *there) {
    void *value;
    size_t bytes;
    memset(there, 0, sizeof *there);
    if (tutti_store_compare_set(store, key, "", 0, failure, failure->bytes, &value, &bytes) != TUTTI_OK)
        return false;
    bool readable = read_record(value, bytes, there);
    free(value);
    return readable && there->failed != 0 && there->writer == failure->writer;
}

/* Gives up the shares of the house that are this rank's to give up. filled: places of ranks below `size` of the house
 * that now cannot come. */
static void drop_shares(tu_opening *opening, tu_house *house, const bool *filled) {
    if (house == NULL)
        return;
    int shares = 0;
    bool own = opening->published;
    for (int rank = 0; rank < opening->largest; rank++)
        shares += filled[rank] || (own && rank == opening->mine.world_rank) ? 1 : 0;
    if (shares == 0)
        return;                                                   /* then it is not ours to look at */
    for (int rank = house->size; rank < opening->largest; rank++) /* ranks that this house was not made for */
        shares -= filled[rank] || (own && rank == opening->mine.world_rank) ? 1 : 0;
    if (shares > 0)
        tu_house_drop(house, shares);
}

void tu_job_cannot_open(const tu_job_options *options, int pid) {
    tu_opening opening = { .options = options, .listener = -1, .largest = options->world_size };
    tutti_error_copy copy;
    tu_error_save(&copy);
    fill_record(&opening);
    opening.mine.pid = pid;
    bool told = tu_random_bytes(&opening.mine.writer, sizeof opening.mine.writer) == TUTTI_OK;
    opening.threads = store_in_memory(options->store);
    tu_error_restore(&copy);
    if (told)
        tu_meet_give_up(&opening);
}

void tu_meet_give_up(tu_opening *opening) {
    tutti_store *store = opening->options->store;
    if (store == NULL)
        return;
    tutti_error_copy copy;
    tu_error_save(&copy);
    tu_record failure = opening->mine;
    failure.failed = (int32_t)copy.info.status;
    failure.by = opening->mine.world_rank;
    failure.house = 0;
    tu_error_shorten(failure.text, sizeof failure.text, copy.message);
    failure.bytes = (uint32_t)(RECORD_BYTES + strlen(failure.text) + 1);
    int64_t before = tutti_store_timeout(store);
    bool hurried = tutti_store_set_timeout(store, LAST_WORDS) == TUTTI_OK;
    tu_record there;
    tu_house *house = NULL;
    bool *filled = calloc((size_t)opening->largest, sizeof *filled);
    if (!opening->intruder) /* the world it intruded on may be complete, and then shall not suffer */
        (void)fill_place(store, FAILED_KEY, &failure, &there);
    /* Who told us has filled the other places; place 0 tells where the house is. */
    for (int rank = opening->told ? 0 : opening->largest - 1; rank >= 0 && filled != NULL; rank--) {
        char key[KEY_BYTES];
        record_key(rank, key);
        filled[rank] = fill_place(store, key, &failure, &there);
        if (there.writer == failure.writer && there.failed == 0)
            opening->published = true; /* publishing had failed only after the store had it */
        if (rank == 0 && opening->threads && there.failed == 0 && there.house != 0)
            house = (tu_house *)(uintptr_t)there.house;
    }
    if (opening->house != NULL && !opening->published && filled != NULL)
        tu_house_drop(opening->house, opening->house->size); /* nobody else knows of it */
    if (opening->threads && filled != NULL)
        drop_shares(opening, house, filled);
    opening->house = NULL;
    free(filled);
    if (hurried && tutti_store_set_timeout(store, before) != TUTTI_OK)
        TU_LOG(TUTTI_LOG_DEBUG, opening->options->log, "job", "the store keeps a timeout of %d s",
               (int)(LAST_WORDS / TU_SECOND));
    tu_error_restore(&copy);
}
