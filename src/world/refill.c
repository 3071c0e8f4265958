/* SPDX-License-Identifier: Apache-2.0
 *
 * Refill: newcomers take the places of dead ranks, and the world is whole again.
 *
 * Those that live vote on who that is, in the page of the world's group, which has ended. The lowest of them, the host,
 * waits in the store for the announcement of a newcomer for each dead rank, and publishes the welcome: who sits where,
 * and what the new group is called. Everybody admits the newcomers (job/join.c); then all ranks, old and new, make the
 * new group as any group is made: an exchange, and a vote in its page. A death anywhere in between fails the call for
 * those that live, and they may call again; a newcomer that fails ends its opening, and the launcher starts another
 * one.
 *
 * Keys in the store, below all prefixes, because a newcomer knows nothing of earlier openings:
 *     tutti/refill/<world>/<rank>                     the newest newcomer's number and seat: those before it are dead
 *     tutti/refill/<world>/<rank>/<number>/welcome    for that newcomer
 *     tutti/refill/<world>/<group key>/<attempt>      the same, for those that live
 *     tutti/refill-over/<rank>                        the launcher's: why nobody will take that place any more
 */
#include "world/refill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "job/liveness.h"
#include "world/group.h"
#include "world/launch.h"
#include "world/registry.h"
#include "world/vote.h"

#define WELCOME_MAGIC UINT64_C(0x454d4f434c455754) /* "TWELCOME" */
#define DIGEST UINT64_C(0x6c6c69666572)            /* tells a refill from a shrink in a vote */
#define PAUSE_FIRST TU_MILLISECOND
#define PAUSE_LONGEST (20 * TU_MILLISECOND)

typedef struct welcome {
    uint64_t magic, group_key, attempt;
    int32_t host, size; /* job ranks */
    uint8_t page[TU_KEY_BYTES];
    tu_seat seats[];
} welcome;

static size_t welcome_bytes(int size) {
    return sizeof(welcome) + (size_t)size * sizeof(tu_seat);
}

/* What a newcomer says in the store. */
typedef struct announcement {
    uint64_t number; /* from 1, of the rank's */
    tu_seat seat;
} announcement;

typedef struct key {
    char text[192];
} key;

static key announcement_key(const tutti_world *world, int rank) {
    key made;
    snprintf(made.text, sizeof made.text, "tutti/refill/%s/%d", world->name, rank);
    return made;
}

static key newcomer_key(const tutti_world *world, int rank, unsigned number) {
    key made;
    snprintf(made.text, sizeof made.text, "tutti/refill/%s/%d/%u/welcome", world->name, rank, number);
    return made;
}

static key welcome_key(const tutti_world *world, uint64_t group_key, uint64_t attempt) {
    key made;
    snprintf(made.text, sizeof made.text, "tutti/refill/%s/%016llx/%llu", world->name, (unsigned long long)group_key,
             (unsigned long long)attempt);
    return made;
}

/* ---- waiting in the store ---- */

/* Whether the key is there, and its value, of `bytes` bytes at least. */
static tutti_status fetch(tutti_store *store, const char *text, size_t least, void **value) {
    bool present = false;
    size_t bytes = 0;
    *value = NULL;
    tutti_status status = tutti_store_check(store, &text, 1, &present);
    if (status != TUTTI_OK || !present)
        return status;
    status = tutti_store_get(store, text, TU_SECOND, value, &bytes);
    if (status == TUTTI_OK && bytes < least) {
        free(*value);
        *value = NULL;
        return tu_error(TUTTI_ERROR_PROTOCOL, "the store holds %zu bytes under %s, where %zu are right", bytes, text,
                        least);
    }
    return status;
}

static int64_t rest(int64_t pause) {
    (void)nanosleep(&(struct timespec){ .tv_nsec = pause }, NULL);
    return pause * 2 < PAUSE_LONGEST ? pause * 2 : PAUSE_LONGEST;
}

/* ---- the new group, the same for all ---- */

static void name_group(const tutti_group *old, uint64_t attempt, char name[64]) {
    snprintf(name, 64, "%.40s:refill:%llu", strncmp(old->name, "0:refill:", 9) == 0 ? "0" : old->name,
             (unsigned long long)attempt);
}

/* All ranks of the world make the group: its page goes round, with everybody's count of groups, so that all number the
 * next ones alike. */
static tutti_status make_whole(tutti_world *world, const char *name, uint64_t group_key, int64_t deadline,
                               tutti_group **out) {
    size_t size = (size_t)world->size;
    int *ranks = malloc(size * sizeof *ranks);
    uint64_t *counts = calloc(size, sizeof *counts);
    tu_mapping **mappings = calloc(size, sizeof *mappings);
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    tutti_status status = TUTTI_OK;
    if (ranks == NULL || counts == NULL || mappings == NULL)
        status = tu_error_memory("a group", size * sizeof *mappings);
    for (int rank = 0; rank < world->size && status == TUTTI_OK; rank++)
        ranks[rank] = rank;
    tu_group_plan plan = {
        .name = name, .description = "default_pg", .key = group_key, .ranks = ranks, .count = world->size
    };
    if (status == TUTTI_OK)
        status = tu_group_make(world, &plan, &group);
    if (status == TUTTI_OK)
        status = tu_group_page_reserve(group, &piece);
    if (status == TUTTI_OK) {
        char what[96];
        snprintf(what, sizeof what, "making group %s", name);
        tu_meeting meeting = {
            .ranks = ranks, .count = world->size, .me = world->rank, .key = group_key, .purpose = "refill", .what = what
        };
        pthread_mutex_lock(&world->lock);
        uint64_t mine = tu_registry_counter(world->registry);
        pthread_mutex_unlock(&world->lock);
        status = tu_meet(world, &meeting, &mine, sizeof mine, piece, deadline, counts, mappings);
        if (status == TUTTI_OK) {
            tu_group_page_set(group, mappings[0]);
            for (size_t i = 1; i < size; i++)
                if (mappings[i] != NULL)
                    tu_mapping_release(mappings[i]);
            status = tu_group_register(group, NULL);
        }
        bool registered = status == TUTTI_OK;
        status = tu_group_commit(group, group, deadline, what, status);
        if (status != TUTTI_OK && registered)
            tu_group_unmake(group);
    }
    for (size_t i = 0; i < size && status == TUTTI_OK; i++) {
        pthread_mutex_lock(&world->lock);
        tu_registry_count_on(world->registry, counts[i]);
        pthread_mutex_unlock(&world->lock);
    }
    free(ranks);
    free(counts);
    free(mappings);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        return status;
    }
    *out = group;
    return TUTTI_OK;
}

/* Until all newcomers have taken their slots: before that, each of them counts as dead. */
static tutti_status await_arrivals(tutti_world *world, const welcome *table, int64_t deadline) {
    int64_t pause = PAUSE_FIRST;
    for (int rank = 0; rank < world->size;) {
        const tu_seat *seat = &table->seats[rank];
        tu_first_rank process = { seat->pid, seat->start_time };
        if (!seat->fresh || tu_rank_state_of(world->job, rank) == TU_RANK_ALIVE) {
            rank++;
            continue;
        }
        if (!tu_first_rank_runs(&process))
            return tu_error(TUTTI_ERROR_DEAD, "the newcomer at rank %d (pid %d) died before it had joined", rank,
                            seat->pid);
        for (int other = 0; other < world->size; other++)
            if (!table->seats[other].fresh && tu_rank_probe(world->job, other) == TU_RANK_DEAD)
                return tu_death_error(world->job, other, "in tutti_group_refill");
        if (tu_clock_now() >= deadline)
            return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: the newcomer at rank %d (pid %d) did not join in time", rank,
                            seat->pid);
        pause = rest(pause);
    }
    return TUTTI_OK;
}

/* ---- the newcomer ---- */

static tutti_status await_welcome(tutti_world *world, const key *key, int64_t deadline, welcome **found) {
    tutti_store *store = tutti_store_underlying(world->store);
    int64_t pause = PAUSE_FIRST;
    for (;;) {
        void *value;
        tutti_status status = fetch(store, key->text, welcome_bytes(world->size), &value);
        if (status != TUTTI_OK)
            return status;
        if (value != NULL) {
            *found = value;
            if ((*found)->magic == WELCOME_MAGIC && (*found)->size == world->size)
                return TUTTI_OK;
            free(value);
            return tu_error(TUTTI_ERROR_PROTOCOL, "the welcome of rank %d is garbage", world->rank);
        }
        if (atomic_load_explicit(&world->interrupt, memory_order_relaxed) != 0)
            return tu_world_interrupted(world, "the opening of a newcomer");
        if (tu_clock_now() >= deadline)
            return tu_error(TUTTI_ERROR_TIMEOUT,
                            "timeout: rank %d stands ready to take a dead rank's place, but the others did not call "
                            "tutti_group_refill",
                            world->rank);
        pause = rest(pause);
    }
}

tutti_status tu_refill_join(tutti_world *world, const tu_job_options *options, int64_t deadline) {
    unsigned number = (unsigned)tu_settings_number(&world->settings, TU_SETTING_REFILL);
    key mine = announcement_key(world, world->rank), answer = newcomer_key(world, world->rank, number);
    tu_joining *joining;
    announcement announced = { .number = number };
    welcome *found = NULL;
    tutti_status status = tu_job_announce(options, &joining, &announced.seat);
    if (status != TUTTI_OK)
        return status;
    status = tutti_store_set(tutti_store_underlying(world->store), mine.text, &announced, sizeof announced);
    if (status == TUTTI_OK)
        status = await_welcome(world, &answer, deadline, &found);
    if (status == TUTTI_OK)
        status = tu_job_join(joining, found->seats, found->host, found->page, &world->job);
    tu_joining_free(joining);
    if (status == TUTTI_OK)
        status = tu_world_place_ranks(world);
    if (status == TUTTI_OK)
        status = await_arrivals(world, found, deadline);
    tutti_group *group = NULL;
    if (status == TUTTI_OK) {
        char name[64];
        snprintf(name, sizeof name, "0:refill:%llu", (unsigned long long)found->attempt);
        pthread_mutex_lock(&world->lock);
        tu_registry_count_on(world->registry, 1); /* 0 is the default group's */
        pthread_mutex_unlock(&world->lock);
        status = make_whole(world, name, found->group_key, deadline, &group);
    }
    if (status == TUTTI_OK) {
        world->group = group;
        tutti_group_release(group); /* the registry has its own */
    }
    free(found);
    return status;
}

/* ---- those that live ---- */

typedef struct refill {
    tutti_world *world;
    tutti_group *group;
    tu_operation_info info;
    uint64_t ticket;
    int64_t deadline;
    bool *survivors; /* by world rank, which is group and job rank */
    int host;
    uint64_t attempt;
} refill;

/* Who lives; the others must be dead, and not have left. */
static tutti_status agree_on_survivors(refill *this, bool *awaited) {
    tutti_group *group = this->group;
    memset(awaited, true, (size_t)group->size);
    tu_vote vote = { .kind = TU_VOTE_SHRINK,
                     .digest = DIGEST,
                     .awaited = awaited,
                     .members = this->survivors,
                     .info = &this->info,
                     .ticket = this->ticket,
                     .deadline = this->deadline };
    tutti_status status = tu_vote_hold(group, &vote);
    if (status != TUTTI_OK)
        return status;
    this->attempt = vote.attempt;
    if (vote.outcome == TU_VOTE_MISMATCH) {
        tu_error(TUTTI_ERROR_MISMATCH, "the ranks disagree: rank %d does not call tutti_group_refill", vote.culprit);
        tu_error_at_fault(vote.culprit);
        return TUTTI_ERROR_MISMATCH;
    }
    for (int rank = 0; rank < group->size && vote.outcome == TU_VOTE_LATE; rank++)
        if (vote.members[rank]) {
            tu_error(TUTTI_ERROR_TIMEOUT, "timeout: rank %d lives, but does not call tutti_group_refill", rank);
            tu_error_at_fault(rank);
            return TUTTI_ERROR_TIMEOUT;
        }
    int dead = 0;
    this->host = -1;
    for (int rank = 0; rank < group->size; rank++) {
        if (this->survivors[rank] && this->host < 0)
            this->host = rank;
        if (!this->survivors[rank] && tu_rank_state_of(this->world->job, rank) == TU_RANK_CLOSED)
            return tu_error(TUTTI_ERROR_STATE, "rank %d closed its world: only a rank that died can be replaced", rank);
        dead += !this->survivors[rank];
    }
    return dead > 0 ? TUTTI_OK : tu_error(TUTTI_ERROR_STATE, "tutti_group_refill: all %d ranks live", group->size);
}

/* A death among those that live ends the call for all. */
static tutti_status look_at_survivors(const refill *this) {
    for (int rank = 0; rank < this->group->size; rank++) {
        if (!this->survivors[rank] || rank == this->world->rank)
            continue;
        tu_rank_state state = tu_rank_probe(this->world->job, rank);
        if (state == TU_RANK_DEAD || state == TU_RANK_CLOSED) {
            tutti_status status = tu_death_error(this->world->job, rank, "in tutti_group_refill");
            tu_error_at_fault(rank);
            return status;
        }
    }
    if (atomic_load_explicit(&this->world->interrupt, memory_order_relaxed) != 0)
        return tu_world_interrupted(this->world, "tutti_group_refill");
    return TUTTI_OK;
}

/* Whether the launcher has said that nobody will come for a rank any more. */
static tutti_status look_at_launcher(const refill *this, int rank) {
    char key[48];
    void *why;
    snprintf(key, sizeof key, TU_REFILL_OVER, rank);
    tutti_status status = fetch(tutti_store_underlying(this->world->store), key, 1, &why);
    if (status != TUTTI_OK || why == NULL)
        return status;
    tu_error(TUTTI_ERROR_STATE, "nobody will take the place of rank %d, which died: %s", rank, (const char *)why);
    tu_error_at_fault(rank);
    free(why);
    return TUTTI_ERROR_STATE;
}

/* The host's: the seat of a newcomer for a dead rank. After one that died meanwhile, announced or not, another one may
 * come. */
static tutti_status find_newcomer(const refill *this, int rank, tu_seat *seat, unsigned *number) {
    tutti_store *store = tutti_store_underlying(this->world->store);
    unsigned before = tu_job_incarnation(this->world->job, rank);
    key key = announcement_key(this->world, rank);
    int64_t pause = PAUSE_FIRST;
    for (;;) {
        void *value;
        announcement found;
        tutti_status status = fetch(store, key.text, sizeof found, &value);
        if (status == TUTTI_OK && value != NULL) {
            memcpy(&found, value, sizeof found);
            free(value);
            tu_first_rank process = { found.seat.pid, found.seat.start_time };
            if (found.number > before && tu_first_rank_runs(&process)) {
                *seat = found.seat;
                *number = (unsigned)found.number;
                return TUTTI_OK;
            }
        }
        if (status == TUTTI_OK)
            status = look_at_launcher(this, rank);
        if (status == TUTTI_OK)
            status = look_at_survivors(this);
        if (status != TUTTI_OK)
            return status;
        if (tu_clock_now() >= this->deadline) {
            tu_error(TUTTI_ERROR_TIMEOUT,
                     "timeout: nobody came within %s to take the place of rank %d, which died; `tutti run --refill N` "
                     "starts newcomers",
                     tu_duration_of(this->info.timeout_ns).text, rank);
            tu_error_at_fault(rank);
            return TUTTI_ERROR_TIMEOUT;
        }
        pause = rest(pause);
    }
}

/* The host's: finds all newcomers, and tells everybody. */
static tutti_status invite(const refill *this, welcome *made) {
    tutti_world *world = this->world;
    tutti_store *store = tutti_store_underlying(world->store);
    unsigned *numbers = calloc((size_t)world->size, sizeof *numbers);
    tutti_status status =
        numbers != NULL ? TUTTI_OK : tu_error_memory("a refill", (size_t)world->size * sizeof *numbers);
    made->magic = WELCOME_MAGIC;
    made->group_key =
        tu_group_key("refill %016llx %llu", (unsigned long long)this->group->key, (unsigned long long)this->attempt);
    made->attempt = this->attempt;
    made->host = world->rank;
    made->size = world->size;
    tu_job_page_nonce(world->job, made->page);
    for (int rank = 0; rank < world->size && status == TUTTI_OK; rank++) {
        if (this->survivors[rank])
            tu_job_seat(world->job, rank, &made->seats[rank]);
        else
            status = find_newcomer(this, rank, &made->seats[rank], &numbers[rank]);
    }
    key key = welcome_key(world, this->group->key, this->attempt);
    if (status == TUTTI_OK)
        status = tutti_store_set(store, key.text, made, welcome_bytes(world->size));
    for (int rank = 0; rank < world->size && status == TUTTI_OK; rank++)
        if (!this->survivors[rank]) {
            key = newcomer_key(world, rank, numbers[rank]);
            status = tutti_store_set(store, key.text, made, welcome_bytes(world->size));
        }
    free(numbers);
    return status;
}

static tutti_status hear_welcome(const refill *this, welcome *made) {
    tutti_world *world = this->world;
    key key = welcome_key(world, this->group->key, this->attempt);
    int64_t pause = PAUSE_FIRST;
    for (;;) {
        void *value;
        tutti_status status = fetch(tutti_store_underlying(world->store), key.text, welcome_bytes(world->size), &value);
        if (status == TUTTI_OK && value != NULL) {
            memcpy(made, value, welcome_bytes(world->size));
            free(value);
            return TUTTI_OK;
        }
        for (int rank = 0; rank < world->size && status == TUTTI_OK; rank++)
            if (!this->survivors[rank])
                status = look_at_launcher(this, rank);
        if (status == TUTTI_OK)
            status = look_at_survivors(this);
        if (status != TUTTI_OK)
            return status;
        if (tu_clock_now() >= this->deadline)
            return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: rank %d found no newcomers for the dead ranks in time",
                            this->host);
        pause = rest(pause);
    }
}

/* Groups that count on a dead rank end before another one sits in its place. */
static void end_old_groups(tutti_world *world) {
    tutti_error_copy before;
    tu_error_save(&before);
    for (tutti_group *group = NULL;;) {
        pthread_mutex_lock(&world->lock);
        tutti_group *next = tutti_group_keep(tu_registry_next(world->registry, group));
        pthread_mutex_unlock(&world->lock);
        tutti_group_release(group);
        group = next;
        if (group == NULL)
            break;
        (void)!tu_group_look(group, NULL);
    }
    (void)tu_error_restore(&before);
}

static tutti_status run(refill *this, bool *awaited, welcome *table, tutti_group **whole) {
    tutti_world *world = this->world;
    tutti_status status = agree_on_survivors(this, awaited);
    if (status != TUTTI_OK)
        return status;
    for (int rank = 0; rank < world->size; rank++)
        if (!this->survivors[rank])
            atomic_store_explicit(&world->mourned[rank], true, memory_order_relaxed);
    end_old_groups(world);
    status = this->host == world->rank ? invite(this, table) : hear_welcome(this, table);
    for (int rank = 0; rank < world->size && status == TUTTI_OK; rank++)
        if (table->seats[rank].fresh)
            status = tu_job_admit(world->job, rank, &table->seats[rank], this->host == world->rank, this->deadline);
    if (status == TUTTI_OK)
        status = await_arrivals(world, table, this->deadline);
    if (status != TUTTI_OK)
        return status;
    char name[64];
    name_group(this->group, this->attempt, name);
    status = make_whole(world, name, table->group_key, this->deadline, whole);
    if (status != TUTTI_OK)
        return status;
    for (int rank = 0; rank < world->size; rank++)
        atomic_store_explicit(&world->mourned[rank], false, memory_order_relaxed);
    world->group = *whole;
    return TUTTI_OK;
}

static tutti_status check(const tutti_group *group, const tutti_group *const *whole) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER || whole == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_group_refill needs the world's group, and a place for the new one");
    tutti_world *world = group->world;
    tutti_status status = tu_world_check(world);
    if (status != TUTTI_OK)
        return status;
    if (group != world->group)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_group_refill: group %s is not the world's (tutti_world_group): newcomers join the world",
                        group->name);
    if (world->fake || world->size == 1 || world->local_size != world->size || tu_job_threads(world->job))
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "tutti_group_refill: only ranks that are processes of one host can be replaced");
    if (strcmp(world->launcher, TU_LAUNCHER_TUTTI) == 0 &&
        tu_settings_text(&world->settings, TU_SETTING_REFILL)[0] == 0)
        return tu_error(TUTTI_ERROR_STATE,
                        "tutti_group_refill: nobody will take the place of a rank that died, since the job was started "
                        "without newcomers; start it with `tutti run --refill N`");
    return TUTTI_OK;
}

tutti_status tutti_group_refill(tutti_group *group, int64_t timeout_ns, tutti_group **whole) {
    TU_INSIDE_GROUP(group);
    tutti_status status = check(group, (const tutti_group *const *)whole);
    if (status != TUTTI_OK)
        return status;
    tutti_world *world = group->world;
    refill this = { .world = world, .group = group };
    this.info = (tu_operation_info){ .operation = TU_OPERATION_REFILL,
                                     .root = -1,
                                     .group_key = group->key,
                                     .group_index = group->recorder_index,
                                     .sequence = group->attempts + 1 };
    status = tu_timeout_choose("tutti_group_refill", timeout_ns, group->timeout_ns, world->timeout_ns,
                               &this.info.timeout_ns);
    if (status != TUTTI_OK)
        return status;
    this.deadline = tu_deadline(this.info.timeout_ns);
    bool survivors[group->size], awaited[group->size]; /* nobody must fail for want of memory before it has voted */
    this.survivors = survivors;
    welcome *table = calloc(1, welcome_bytes(world->size));
    if (table == NULL)
        return tu_error_memory("a refill", welcome_bytes(world->size));
    if (!tu_mutex_lock_until(&group->vote_lock, this.deadline)) {
        free(table);
        return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: tutti_group_refill waited for another thread of this rank");
    }
    this.ticket = tu_group_record(group, &this.info);
    status = run(&this, awaited, table, whole);
    pthread_mutex_unlock(&group->vote_lock);
    free(table);
    if (status != TUTTI_OK)
        (void)tu_error_where(group->name, "refill", this.info.sequence, group->rank);
    return tu_group_leave_agreement(group, this.ticket, status);
}
