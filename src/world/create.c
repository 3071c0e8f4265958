/* SPDX-License-Identifier: Apache-2.0
 *
 * How groups come about: always by an agreement. Those who take part compare what they are about to make, and fail
 * alike when they differ or when one of them cannot; whatever a rank needs for the group it has before it agrees. On
 * one host a vote closes the agreement: a rank that dies between its messages leaves nobody with half a group.
 *
 * Who takes part: the whole world (tutti_group_new), the parent (tutti_group_split), or the members alone (local
 * synchronisation).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "job/liveness.h"
#include "world/group.h"
#include "world/registry.h"
#include "world/sha1.h"
#include "world/vote.h"

/* What the ranks compare. */
typedef struct agreement {
    uint8_t digest[20]; /* of everything that must be equal */
    uint8_t exists;     /* this rank has a group of that tag and those ranks already */
    uint8_t member;
    int32_t status; /* not TUTTI_OK: this rank cannot, and `text` says why */
    char text[228]; /* what it is about to make, for the message */
} agreement;

/* "0, 1, 2, …": as much of the list as fits. */
static void list_text(const int *ranks, int count, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < count; i++) {
        if (used + 16 > bytes) {
            snprintf(text + used, bytes - used, ", …");
            return;
        }
        used += (size_t)snprintf(text + used, bytes - used, i > 0 ? ", %d" : "%d", ranks[i]);
    }
}

static void describe(agreement *mine, const char *name, const char *tag, const int *ranks, int count,
                     int64_t timeout_ns) {
    char list[128];
    list_text(ranks, count, list, sizeof list);
    int used = snprintf(mine->text, sizeof mine->text, "group %s of ranks [%s]", name, list);
    if (tag[0] != 0 && used > 0 && (size_t)used < sizeof mine->text)
        snprintf(mine->text + used, sizeof mine->text - (size_t)used, " with tag \"%.48s\"", tag);
    size_t bytes = sizeof(int) * (size_t)count;
    char *all = malloc(bytes + 256);
    if (all == NULL) {
        mine->status = (int32_t)tu_error_memory("an agreement", bytes + 256);
        return;
    }
    memcpy(all, ranks, bytes);
    int more = snprintf(all + bytes, 256, "|%s|%s|%lld", name, tag, (long long)timeout_ns);
    tu_sha1(all, bytes + (size_t)more, mine->digest);
    free(all);
}

static void cannot(agreement *mine, tutti_status status) {
    mine->status = (int32_t)status;
    snprintf(mine->text, sizeof mine->text, "%.*s", (int)sizeof mine->text - 1, tutti_error_message());
}

/* Compares what all sent. *exists: all members have it already. `ranks` are for messages. */
static tutti_status compare(const agreement *all, const int *ranks, int count, int me, bool *exists) {
    for (int i = 0; i < count; i++)
        if (all[i].status != TUTTI_OK) {
            tu_error((tutti_status)all[i].status, "no group was made, because rank %d cannot: %.*s", ranks[i],
                     (int)sizeof all[i].text, all[i].text);
            tu_error_at_fault(i);
            return (tutti_status)all[i].status;
        }
    int with = -1, without = -1;
    for (int i = 0; i < count; i++) {
        if (memcmp(all[i].digest, all[me].digest, sizeof all[i].digest) != 0) {
            tu_error(TUTTI_ERROR_MISMATCH,
                     "the ranks disagree on the group to make: rank %d makes %.*s, rank %d makes %.*s. All must pass "
                     "the same ranks, name, tag and timeout, in the same order of calls",
                     ranks[me], (int)sizeof all[me].text, all[me].text, ranks[i], (int)sizeof all[i].text, all[i].text);
            tu_error_at_fault(i);
            return TUTTI_ERROR_MISMATCH;
        }
        if (all[i].member)
            *(all[i].exists ? &with : &without) = i;
    }
    if (with >= 0 && without >= 0) {
        tu_error(TUTTI_ERROR_MISMATCH,
                 "the ranks disagree: rank %d has %.*s already, rank %d has not; make and destroy "
                 "groups with tags alike on all ranks",
                 ranks[with], (int)sizeof all[with].text, all[with].text, ranks[without]);
        tu_error_at_fault(without);
        return TUTTI_ERROR_MISMATCH;
    }
    *exists = with >= 0;
    return TUTTI_OK;
}

/* ---- arguments ---- */

static int ascending(const void *left, const void *right) {
    int a = *(const int *)left, b = *(const int *)right;
    return (a > b) - (a < b);
}

/* A checked copy of the rank list, sorted unless told otherwise; to be freed. */
static tutti_status take_ranks(const tutti_world *world, const int *ranks, int count, bool keep_order, int **out) {
    if (ranks == NULL)
        count = world->size;
    if (count <= 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a group needs at least one rank; %d were given", count);
    if (ranks != NULL && count > world->size)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the group's %d ranks are more than the world's %d", count, world->size);
    int *copy = malloc(2 * sizeof(int) * (size_t)count);
    if (copy == NULL)
        return tu_error_memory("a list of ranks", 2 * sizeof(int) * (size_t)count);
    int *sorted = copy + count;
    for (int i = 0; i < count; i++)
        copy[i] = ranks != NULL ? ranks[i] : i;
    memcpy(sorted, copy, sizeof(int) * (size_t)count);
    qsort(sorted, (size_t)count, sizeof(int), ascending);
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < count && status == TUTTI_OK; i++)
        if (sorted[i] == sorted[i - 1])
            status = tu_error(TUTTI_ERROR_ARGUMENT, "rank %d is twice in the list of ranks", sorted[i]);
    if (status == TUTTI_OK && (sorted[0] < 0 || sorted[count - 1] >= world->size))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "rank %d is not in this world, whose ranks are 0 to %d",
                          sorted[0] < 0 ? sorted[0] : sorted[count - 1], world->size - 1);
    if (status != TUTTI_OK) {
        free(copy);
        return status;
    }
    if (!keep_order)
        memcpy(copy, sorted, sizeof(int) * (size_t)count);
    *out = copy;
    return TUTTI_OK;
}

/* Over the defaults that *options holds. */
static tutti_status take_options(const tutti_group_options *given, tutti_group_options *options) {
    tutti_status status = tu_options_copy("tutti_group_options", given, options, sizeof *options);
    if (status != TUTTI_OK)
        return status;
    if (options->tag == NULL)
        options->tag = "";
    if (options->description == NULL)
        options->description = "undefined";
    if (options->timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "timeout_ns is %lld; it must be 0 (the world's) or more",
                        (long long)options->timeout_ns);
    if (strlen(options->tag) > 80)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a tag has at most 80 characters; this one has %zu",
                        strlen(options->tag));
    if (strncmp(options->tag, "ptd:", 4) == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the tag \"%s\" is reserved: \"ptd:\" marks groups without a tag",
                        options->tag);
    if (options->name != NULL && (options->name[0] == 0 || strlen(options->name) > 63))
        return tu_error(TUTTI_ERROR_ARGUMENT, "a group's name has 1 to 63 characters; \"%s\" has %zu", options->name,
                        strlen(options->name));
    return TUTTI_OK;
}

static int index_of(const int *ranks, int count, int rank) {
    for (int i = 0; i < count; i++)
        if (ranks[i] == rank)
            return i;
    return -1;
}

/* ---- names of groups that only their members make ---- */

/* SHA-1 of "r0_r1_…_C", where C counts the living groups of just these ranks, or the next number whose name is free:
 * members know the same groups of these ranks, whatever else each has done. Under world->lock. */
static tutti_status hashed_name(tutti_world *world, const int *ranks, int count, char name[64], uint64_t *key) {
    tu_rank_list *list = tu_registry_ranks(world->registry, ranks, count);
    char *text = malloc(12 * (size_t)count + 24);
    if (list == NULL || text == NULL) {
        free(text);
        return tu_error_memory("the name of a group", 12 * (size_t)count + 24);
    }
    size_t used = 0;
    for (int i = 0; i < count; i++)
        used += (size_t)sprintf(text + used, "%d_", ranks[i]);
    for (uint64_t number = list->living;; number++) {
        int more = sprintf(text + used, "%llu", (unsigned long long)number);
        tu_sha1_text(text, used + (size_t)more, name);
        if (tu_registry_name(world->registry, name) == NULL)
            break;
    }
    int more = sprintf(text + used, "#%llu", (unsigned long long)list->created++);
    char digest[41];
    tu_sha1_text(text, used + (size_t)more, digest);
    *key = tu_group_key("members %s", digest);
    free(text);
    return TUTTI_OK;
}

/* ---- the steps that all ways share ---- */

/* Everything a member needs before it agrees: the object, memory for its page, a place in the registry's memory. */
static tutti_status prepare(tutti_world *world, const tu_group_plan *plan, tutti_group **group,
                            const tu_piece **piece) {
    tutti_status status = tu_group_make(world, plan, group);
    if (status != TUTTI_OK)
        return status;
    status = tu_group_page_reserve(*group, piece);
    if (status != TUTTI_OK) {
        tutti_group_release(*group);
        *group = NULL;
    }
    return status;
}

static void release_mappings(tu_mapping **mappings, int count) {
    for (int i = 0; i < count; i++)
        if (mappings[i] != NULL)
            tu_mapping_release(mappings[i]);
}

/* Some members are on other hosts, or took part in the agreement there: the page goes round among the members. */
static tutti_status share_page(tutti_group *group, const tu_piece *piece, int64_t deadline) {
    tu_mapping **mappings = calloc((size_t)group->size, sizeof *mappings);
    if (mappings == NULL)
        return tu_error_memory("an exchange", (size_t)group->size * sizeof *mappings);
    char what[96];
    snprintf(what, sizeof what, "making group %s", group->name);
    tu_meeting meeting = { .ranks = group->ranks,
                           .count = group->size,
                           .me = group->rank,
                           .key = group->key,
                           .purpose = "group_page",
                           .what = what };
    uint8_t nothing = 0;
    uint8_t *nothings = malloc((size_t)group->size);
    tutti_status status = nothings != NULL ? TUTTI_OK : tu_error_memory("an exchange", (size_t)group->size);
    if (status == TUTTI_OK)
        status = tu_meet(group->world, &meeting, &nothing, 1, piece, deadline, nothings, mappings);
    if (status == TUTTI_OK) {
        tu_group_page_set(group, mappings[0]);
        mappings[0] = NULL;
        release_mappings(mappings, group->size);
    }
    free(nothings);
    free(mappings);
    return status;
}

/* ---- the default group ---- */

tutti_status tu_group_make_default(tutti_world *world, int64_t deadline) {
    int *ranks = malloc(sizeof(int) * (size_t)world->size);
    if (ranks == NULL)
        return tu_error_memory("the ranks of the world", sizeof(int) * (size_t)world->size);
    for (int i = 0; i < world->size; i++)
        ranks[i] = i;
    char name[24];
    snprintf(name, sizeof name, "%llu", (unsigned long long)tu_registry_number(world->registry));
    tu_group_plan plan = {
        .name = name, .description = "default_pg", .key = tu_group_key("default"), .ranks = ranks, .count = world->size
    };
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    tutti_status status = prepare(world, &plan, &group, &piece);
    free(ranks);
    if (status != TUTTI_OK)
        return status;
    if (group->page == NULL || world->local_size == world->size)
        status = world->size > 1 && !world->fake ? share_page(group, piece, deadline) : TUTTI_OK;
    else if (world->size > 1 && !world->fake) /* nobody leaves the store before all have found each other */
        status = tutti_store_barrier(world->store, "opened", world->size,
                                     tu_deadline_left(deadline) > 0 ? tu_deadline_left(deadline) : 1);
    if (status == TUTTI_OK)
        status = tu_group_register(group, NULL);
    if (status == TUTTI_OK)
        world->group = group;
    tutti_group_release(group); /* the registry has its own */
    return status;
}

/* ---- the last word: all have it, or nobody ---- */

/* The rank in `group` of a world rank that is in it. */
static int rank_in(const tutti_group *group, int world_rank) {
    return index_of(group->ranks, group->size, world_rank);
}

/* A member that died or closed; -1 where all live. */
static int find_dead(const tutti_group *group) {
    for (int member = 0; member < group->size; member++) {
        tu_rank_state state = tu_rank_probe(group->world->job, group->job_ranks[member]);
        if (state == TU_RANK_DEAD || state == TU_RANK_CLOSED)
            return member;
    }
    return -1;
}

/* Some member died, or gave up because another member of the parent did, and so nobody gets the group. Tells who died,
 * in words of this rank or of `vote->culprit`. */
static tutti_status died_meanwhile(tutti_group *group, const tutti_group *parent, const tu_vote *vote,
                                   const char *what) {
    tu_job *job = group->world->job;
    const tutti_group *of = find_dead(group) >= 0 ? group : parent;
    int dead = find_dead(of);
    if (dead >= 0) {
        char doing[160];
        snprintf(doing, sizeof doing, "in %s", what);
        tutti_status status = tu_death_error(job, of->job_ranks[dead], doing);
        tu_error_at_fault(rank_in(parent, of->ranks[dead]));
        return status;
    }
    if (vote->culprit < 0)
        return tu_error(TUTTI_ERROR_STATE, "%s: a member gave up, and so no group was made", what);
    tu_error(vote->culprit_status, "no group was made, because rank %d says: %s", group->ranks[vote->culprit],
             vote->culprit_text);
    tu_error_at_fault(rank_in(parent, group->ranks[vote->culprit]));
    return vote->culprit_status;
}

static tutti_status judge(tutti_group *group, const tutti_group *parent, const tu_vote *vote, const char *what) {
    switch (vote->outcome) {
    case TU_VOTE_DONE:
        return TUTTI_OK;
    case TU_VOTE_FAILED:
        tu_error(vote->culprit_status, "no group was made, because rank %d cannot: %s", group->ranks[vote->culprit],
                 vote->culprit_text);
        tu_error_at_fault(rank_in(parent, group->ranks[vote->culprit]));
        return vote->culprit_status;
    case TU_VOTE_LATE:
        return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s: not all ranks said in time that they have it", what);
    case TU_VOTE_MISMATCH:
        return tu_error(TUTTI_ERROR_MISMATCH, "the ranks disagree in %s: rank %d votes on something else", what,
                        vote->culprit);
    default:
        return died_meanwhile(group, parent, vote, what);
    }
}

tutti_status tu_group_commit(tutti_group *group, const tutti_group *parent, int64_t deadline, const char *what,
                             tutti_status mine) {
    tutti_world *world = group->world;
    if (world->fake || !group->local || group->size == 1)
        return mine;
    bool *flags = group->page_mapping != NULL ? malloc(2 * (size_t)group->size) : NULL;
    if (flags == NULL) {
        tu_job_refuse(world->job, group->key);
        return mine != TUTTI_OK ? mine : tu_error_memory("an agreement", 2 * (size_t)group->size);
    }
    tu_operation_info info = { .operation = TU_OPERATION_GROUP_NEW, .root = -1, .group_key = group->key };
    tu_vote vote = { .kind = TU_VOTE_COMMIT,
                     .status = mine,
                     .text = mine != TUTTI_OK ? tutti_error_message() : NULL,
                     .awaited = flags,
                     .members = flags + group->size,
                     .refusal = group->key,
                     .info = &info,
                     .deadline = deadline };
    memset(flags, true, (size_t)group->size);
    pthread_mutex_lock(&group->vote_lock);
    if (mine != TUTTI_OK)
        tu_vote_cast(group, &vote);
    else
        mine = tu_vote_hold(group, &vote);
    pthread_mutex_unlock(&group->vote_lock);
    if (vote.status == TUTTI_OK && mine == TUTTI_OK)
        mine = judge(group, parent, &vote, what);
    free(flags);
    return mine;
}

void tu_group_unmake(tutti_group *group) {
    tutti_error_copy error;
    tu_error_save(&error);
    if (tutti_group_destroy(group) != TUTTI_OK &&
        atomic_load_explicit(&group->world->closed, memory_order_relaxed) == 0)
        TU_LOG(TUTTI_LOG_WARN, group->world->log, "world", "%s", tutti_error_message());
    (void)tu_error_restore(&error);
}

/* ---- by agreement of the members alone ---- */

static tutti_status new_local(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                              tutti_group **out) {
    char name[64];
    uint64_t key;
    pthread_mutex_lock(&world->lock);
    tutti_group *existing = options->tag[0] != 0 ? tu_registry_find(world->registry, options->tag, ranks, count) : NULL;
    tutti_group_keep(existing);
    tutti_status status = hashed_name(world, ranks, count, name, &key);
    pthread_mutex_unlock(&world->lock);
    if (status != TUTTI_OK) {
        tutti_group_release(existing);
        return status;
    }
    if (existing != NULL) {
        *out = existing;
        return TUTTI_OK;
    }
    if (options->name != NULL)
        snprintf(name, sizeof name, "%s", options->name);
    tu_group_plan plan = { .name = name,
                           .description = options->description,
                           .key = key,
                           .ranks = ranks,
                           .count = count,
                           .timeout_ns = options->timeout_ns };
    agreement mine = { .member = 1 };
    describe(&mine, name, options->tag, ranks, count, options->timeout_ns);
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    status = prepare(world, &plan, &group, &piece);
    if (status != TUTTI_OK)
        cannot(&mine, status);
    agreement *all = calloc((size_t)count, sizeof *all + sizeof(tu_mapping *));
    if (all == NULL) {
        tutti_group_release(group);
        return tu_error_memory("an agreement", (size_t)count * (sizeof *all + sizeof(tu_mapping *)));
    }
    tu_mapping **mappings = (tu_mapping **)(void *)(all + count);
    char what[96];
    snprintf(what, sizeof what, "making group %s", name);
    tu_meeting meeting = { .ranks = ranks,
                           .count = count,
                           .me = index_of(ranks, count, world->rank),
                           .key = key,
                           .purpose = "group_new",
                           .what = what };
    bool shared = !world->fake && count > 1;
    for (int i = 0; i < count && shared; i++)
        shared = world->job_rank_of[ranks[i]] >= 0;
    int64_t deadline = tu_deadline(options->timeout_ns != 0 ? options->timeout_ns : world->timeout_ns);
    status = tu_meet(world, &meeting, &mine, sizeof mine, piece, deadline, all, shared ? mappings : NULL);
    bool differ = false;
    if (status == TUTTI_OK) {
        bool exists;
        status = compare(all, ranks, count, meeting.me, &exists);
        differ = status != TUTTI_OK;
        if (status == TUTTI_OK && shared) {
            tu_group_page_set(group, mappings[0]);
            mappings[0] = NULL;
        }
        release_mappings(mappings, count);
    }
    if (status == TUTTI_OK)
        status = tu_group_register(group, options->tag);
    free(all);
    bool registered = status == TUTTI_OK;
    if (group != NULL && !differ)
        status = tu_group_commit(group, group, deadline, what, status);
    if (status != TUTTI_OK && registered)
        tu_group_unmake(group);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        return status;
    }
    *out = group;
    return TUTTI_OK;
}

/* ---- by agreement of a parent ---- */

/* What is agreed on, and what comes of it. */
typedef struct undertaking {
    tu_operation operation;
    const char *purpose;
    agreement mine;
    int64_t timeout_ns;
    tutti_group *group;    /* prepared; NULL where this rank is no member */
    const tu_piece *piece; /* with its page */
    const char *tag;
    bool exists; /* the members have it already */
} undertaking;

/* How far an undertaking came on this rank. */
typedef struct stage {
    bool complete; /* all records went their ways: whatever fails from here on, the others do not wait for this rank */
    bool differ;   /* the records disagree, or one cannot: all know, and nobody votes */
    bool registered;
} stage;

/* The exchange over the parent; gives the new group its page, and enters it into the registry. */
static tutti_status exchange_agreements(tutti_group *parent, const tu_operation_info *info, int64_t deadline,
                                        undertaking *task, stage *stage) {
    agreement *all = calloc((size_t)parent->size, sizeof *all + sizeof(tu_mapping *));
    if (all == NULL)
        return tu_error_memory("an agreement", (size_t)parent->size * sizeof *all);
    tu_mapping **mappings = (tu_mapping **)(void *)(all + parent->size);
    bool one_host = parent->local && !parent->world->fake;
    tu_group_cargo cargo = { .piece = one_host ? task->piece : NULL,
                             .mappings = one_host ? mappings : NULL,
                             .descriptor = -1,
                             .complete = &stage->complete };
    tutti_status status =
        tu_group_exchange_with(parent, info, task->purpose, &task->mine, sizeof task->mine, &cargo, deadline, all);
    if (status != TUTTI_OK) {
        free(all);
        return status;
    }
    status = compare(all, parent->ranks, parent->size, parent->rank, &task->exists);
    stage->complete = true;
    stage->differ = status != TUTTI_OK;
    tutti_group *group = task->exists ? NULL : task->group;
    if (status == TUTTI_OK && group != NULL && group->page == NULL) {
        if (one_host) {
            int first = index_of(parent->ranks, parent->size, group->ranks[0]);
            tu_group_page_set(group, mappings[first]);
            mappings[first] = NULL;
        } else {
            status = share_page(group, task->piece, deadline);
        }
    }
    release_mappings(mappings, parent->size);
    free(all);
    if (status == TUTTI_OK && group != NULL) {
        status = tu_group_register(group, task->tag);
        stage->registered = status == TUTTI_OK;
    }
    return status;
}

/* Failures of which all know alike, and which leave nobody waiting, end nothing. */
static bool ends_nothing(const stage *stage, tutti_status status) {
    return stage->differ || (stage->complete && (status == TUTTI_ERROR_MEMORY || status == TUTTI_ERROR_LIMIT ||
                                                 status == TUTTI_ERROR_EXISTS || status == TUTTI_ERROR_SYSTEM));
}

/* All of it: a member that gets TUTTI_OK knows that every member does. */
static tutti_status undertake(tutti_group *parent, undertaking *task) {
    tu_operation_info info = { .operation = (uint8_t)task->operation, .root = -1 };
    int64_t deadline;
    uint64_t ticket;
    tutti_status status = tu_group_enter(parent, task->timeout_ns, &info, &deadline, &ticket);
    if (status != TUTTI_OK)
        return status;
    char what[160];
    tu_operation_text(parent, &info, what, sizeof what);
    stage stage = { .complete = false };
    status = exchange_agreements(parent, &info, deadline, task, &stage);
    if (task->group != NULL && !task->exists && !stage.differ)
        status = tu_group_commit(task->group, parent, deadline, what, status);
    if (status != TUTTI_OK && stage.registered)
        tu_group_unmake(task->group);
    return status != TUTTI_OK && ends_nothing(&stage, status) ? tu_group_leave_agreement(parent, ticket, status)
                                                              : tu_group_leave(parent, &info, ticket, status);
}

/* ---- by agreement of the world ---- */

static tutti_status new_in_world(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                                 tutti_group **out) {
    bool member = index_of(ranks, count, world->rank) >= 0;
    pthread_mutex_lock(&world->lock);
    uint64_t number = tu_registry_number(world->registry);
    tutti_group *existing =
        member && options->tag[0] != 0 ? tu_registry_find(world->registry, options->tag, ranks, count) : NULL;
    tutti_group_keep(existing);
    char name[64];
    if (options->name != NULL)
        snprintf(name, sizeof name, "%s", options->name);
    else
        snprintf(name, sizeof name, "%llu", (unsigned long long)number);
    bool taken = member && existing == NULL && tu_registry_name(world->registry, name) != NULL;
    pthread_mutex_unlock(&world->lock);

    agreement mine = { .member = member, .exists = existing != NULL };
    describe(&mine, name, options->tag, ranks, count, options->timeout_ns);
    tu_group_plan plan = { .name = name,
                           .description = options->description,
                           .key = tu_group_key("number %llu", (unsigned long long)number),
                           .ranks = ranks,
                           .count = count,
                           .timeout_ns = options->timeout_ns };
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    if (taken)
        cannot(&mine, tu_error(TUTTI_ERROR_EXISTS, "the group name \"%s\" is already in use in this world", name));
    if (member && existing == NULL && mine.status == TUTTI_OK) {
        tutti_status status = prepare(world, &plan, &group, &piece);
        if (status != TUTTI_OK)
            cannot(&mine, status);
    }
    undertaking task = { .operation = TU_OPERATION_GROUP_NEW,
                         .purpose = "group_new",
                         .mine = mine,
                         .timeout_ns = options->timeout_ns,
                         .group = group,
                         .piece = piece,
                         .tag = options->tag };
    tutti_status status = undertake(world->group, &task);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        tutti_group_release(existing);
        return status;
    }
    *out = existing != NULL ? existing : group != NULL ? group : TUTTI_NON_GROUP_MEMBER;
    return TUTTI_OK;
}

static tutti_status new_group(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                              tutti_group **group) {
    if (ranks == NULL)
        count = world->size;
    int *list;
    tutti_status status = take_ranks(world, ranks, count, options->keep_order, &list);
    if (status != TUTTI_OK)
        return status;
    if (!options->local_synchronization)
        status = new_in_world(world, list, count, options, group);
    else if (index_of(list, count, world->rank) >= 0)
        status = new_local(world, list, count, options, group);
    else
        *group = TUTTI_NON_GROUP_MEMBER;
    free(list);
    return status;
}

tutti_status tutti_group_new(tutti_world *world, const int *ranks, int count, const tutti_group_options *given,
                             tutti_group **group) {
    TU_INSIDE(world);
    tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = take_options(given, &options);
    if (status == TUTTI_OK && group == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_new: where the group goes is NULL");
    return status == TUTTI_OK ? new_group(world, ranks, count, &options, group) : status;
}

/* ---- families ---- */

/* Makes groups of several lists in order. `all` is lent: only *mine is a reference of the caller's. */
static tutti_status new_family(tutti_world *world, const int *const *lists, const int *counts, int list_count,
                               const tutti_group_options *options, tutti_group **all, tutti_group **mine) {
    tutti_group *own = TUTTI_NON_GROUP_MEMBER;
    for (int i = 0; i < list_count; i++) {
        tutti_group *group;
        tutti_status status = new_group(world, lists[i], counts[i], options, &group);
        if (status != TUTTI_OK) {
            tutti_group_release(own);
            return status;
        }
        if (all != NULL)
            all[i] = group;
        if (group != TUTTI_NON_GROUP_MEMBER)
            own = group;
    }
    *mine = own;
    return TUTTI_OK;
}

/* What calls on a parent group begin with. */
static tutti_status check_parent(const char *who, const tutti_group *parent, const void *out,
                                 const tutti_group_options *given, tutti_group_options *options) {
    if (parent == NULL || parent == TUTTI_NON_GROUP_MEMBER || out == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s needs a parent group of which this rank is a member, and a place for the result", who);
    *options = (tutti_group_options)TUTTI_GROUP_OPTIONS_INIT;
    tutti_status status = tu_world_check(parent->world);
    return status == TUTTI_OK ? take_options(given, options) : status;
}

tutti_status tutti_group_new_subgroups(tutti_group *parent, int block, const tutti_group_options *given,
                                       tutti_group **all, tutti_group **mine) {
    tutti_group_options options;
    tutti_status status = check_parent("tutti_group_new_subgroups", parent, mine, given, &options);
    if (status != TUTTI_OK)
        return status;
    TU_INSIDE(parent->world);
    if (block <= 0 || block > parent->size || parent->size % block != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "blocks of %d ranks do not divide the parent's %d ranks", block,
                        parent->size);
    if (options.name != NULL && parent->size > block)
        return tu_error(TUTTI_ERROR_ARGUMENT, "several groups cannot share the name \"%s\"", options.name);
    /* Ranks outside of the parent do not call, so its blocks can meet only among themselves. */
    options.local_synchronization = options.local_synchronization || parent != parent->world->group;
    int count = parent->size / block;
    const int **lists = malloc((size_t)count * (sizeof *lists + sizeof(int)));
    if (lists == NULL)
        return tu_error_memory("sub-groups", (size_t)count * (sizeof *lists + sizeof(int)));
    int *counts = (int *)(void *)(lists + count);
    for (int i = 0; i < count; i++) {
        lists[i] = parent->ranks + i * block;
        counts[i] = block;
    }
    status = new_family(parent->world, lists, counts, count, &options, all, mine);
    free(lists);
    return status;
}

/* No rank in two lists, none outside of [0, size); `what` names the ranks in messages. */
static tutti_status check_lists(const int *const *lists, const int *counts, int list_count, int size,
                                const char *what) {
    if (lists == NULL || counts == NULL || list_count <= 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the list of lists of %ss is empty", what);
    bool *seen = calloc((size_t)size, sizeof *seen);
    if (seen == NULL)
        return tu_error_memory("lists of ranks", (size_t)size);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < list_count && status == TUTTI_OK; i++) {
        if (lists[i] == NULL || counts[i] <= 0)
            status = tu_error(TUTTI_ERROR_ARGUMENT, "list %d of %ss is empty", i, what);
        for (int j = 0; status == TUTTI_OK && j < counts[i]; j++) {
            int rank = lists[i][j];
            if (rank < 0 || rank >= size)
                status = tu_error(TUTTI_ERROR_ARGUMENT, "%s %d in list %d is not in [0, %d)", what, rank, i, size);
            else if (seen[rank])
                status =
                    tu_error(TUTTI_ERROR_ARGUMENT, "%s %d appears twice; a rank can be in one list only", what, rank);
            else
                seen[rank] = true;
        }
    }
    free(seen);
    return status;
}

tutti_status tutti_group_new_subgroups_by_enumeration(tutti_world *world, const int *const *lists, const int *counts,
                                                      int list_count, const tutti_group_options *given,
                                                      tutti_group **all, tutti_group **mine) {
    TU_INSIDE(world);
    tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = take_options(given, &options);
    if (status == TUTTI_OK && mine == NULL)
        status =
            tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_new_subgroups_by_enumeration: where the group goes is NULL");
    if (status == TUTTI_OK)
        status = check_lists(lists, counts, list_count, world->size, "world rank");
    if (status == TUTTI_OK && options.name != NULL && list_count > 1)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "several groups cannot share the name \"%s\"", options.name);
    return status == TUTTI_OK ? new_family(world, lists, counts, list_count, &options, all, mine) : status;
}

/* ---- split: all lists in one agreement of the parent ---- */

/* The caller's own list as world ranks, sorted by parent rank; *count 0 when it is in none. */
static tutti_status own_list(const tutti_group *parent, const int *const *lists, const int *counts, int list_count,
                             bool keep_order, int **ranks, int *count) {
    *count = 0;
    *ranks = NULL;
    for (int i = 0; i < list_count; i++) {
        if (index_of(lists[i], counts[i], parent->rank) < 0)
            continue;
        *ranks = malloc(sizeof(int) * (size_t)counts[i]);
        if (*ranks == NULL)
            return tu_error_memory("a list of ranks", sizeof(int) * (size_t)counts[i]);
        *count = counts[i];
        memcpy(*ranks, lists[i], sizeof(int) * (size_t)counts[i]);
        if (!keep_order)
            qsort(*ranks, (size_t)counts[i], sizeof(int), ascending);
        for (int j = 0; j < counts[i]; j++)
            (*ranks)[j] = parent->ranks[(*ranks)[j]];
        return TUTTI_OK;
    }
    return TUTTI_OK;
}

static void describe_lists(agreement *mine, const int *const *lists, const int *counts, int list_count,
                           const tutti_group_options *options) {
    size_t total = 0;
    for (int i = 0; i < list_count; i++)
        total += (size_t)counts[i] + 1;
    char text[sizeof mine->text] = "lists ";
    int *all = malloc(total * sizeof(int) + 256);
    if (all == NULL) {
        cannot(mine, tu_error_memory("an agreement", total * sizeof(int)));
        return;
    }
    size_t at = 0;
    for (int i = 0; i < list_count; i++) {
        char list[96];
        list_text(lists[i], counts[i], list, sizeof list);
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "[%s]", list);
        memcpy(all + at, lists[i], sizeof(int) * (size_t)counts[i]);
        at += (size_t)counts[i];
        all[at++] = -1;
    }
    int more = snprintf((char *)(all + at), 256, "|%s|%s|%lld|%d", options->name != NULL ? options->name : "",
                        options->tag, (long long)options->timeout_ns, options->keep_order);
    tu_sha1(all, at * sizeof(int) + (size_t)more, mine->digest);
    memcpy(mine->text, text, sizeof text);
    free(all);
}

/* Prepares this rank's part of a split; what cannot be done goes into the agreement. */
static void prepare_split(tutti_group *parent, const int *ranks, int count, const tutti_group_options *options,
                          agreement *mine, tutti_group **group, const tu_piece **piece) {
    tutti_world *world = parent->world;
    char name[64], description[64];
    uint64_t key;
    pthread_mutex_lock(&world->lock);
    tutti_status status = hashed_name(world, ranks, count, name, &key);
    if (status == TUTTI_OK && options->name != NULL) {
        snprintf(name, sizeof name, "%s", options->name);
        if (tu_registry_name(world->registry, name) != NULL)
            status = tu_error(TUTTI_ERROR_EXISTS, "the group name \"%s\" is already in use in this world", name);
    }
    pthread_mutex_unlock(&world->lock);
    if (strcmp(options->description, "undefined") == 0)
        snprintf(description, sizeof description, "%.44s:split:%u", parent->description,
                 atomic_load_explicit(&parent->splits, memory_order_relaxed));
    else
        snprintf(description, sizeof description, "%s", options->description);
    tu_group_plan plan = { .name = name,
                           .description = description,
                           .key = key,
                           .ranks = ranks,
                           .count = count,
                           .timeout_ns = options->timeout_ns };
    if (status == TUTTI_OK)
        status = prepare(world, &plan, group, piece);
    if (status != TUTTI_OK)
        cannot(mine, status);
}

tutti_status tutti_group_split(tutti_group *parent, const int *const *lists, const int *counts, int list_count,
                               const tutti_group_options *given, tutti_group **out) {
    tutti_group_options options;
    tutti_status status = check_parent("tutti_group_split", parent, out, given, &options);
    if (status != TUTTI_OK)
        return status;
    TU_INSIDE(parent->world);
    status = check_lists(lists, counts, list_count, parent->size, "group rank");
    int *ranks;
    int count;
    if (status == TUTTI_OK)
        status = own_list(parent, lists, counts, list_count, options.keep_order, &ranks, &count);
    if (status != TUTTI_OK)
        return status;
    agreement mine = { .member = 0 };
    describe_lists(&mine, lists, counts, list_count, &options);
    tutti_group *group = NULL;
    const tu_piece *piece = NULL;
    if (count > 0 && mine.status == TUTTI_OK)
        prepare_split(parent, ranks, count, &options, &mine, &group, &piece);
    free(ranks);
    undertaking task = { .operation = TU_OPERATION_GROUP_SPLIT,
                         .purpose = "group_split",
                         .mine = mine,
                         .timeout_ns = options.timeout_ns,
                         .group = group,
                         .piece = piece,
                         .tag = options.tag };
    status = undertake(parent, &task);
    if (status == TUTTI_OK)
        atomic_fetch_add_explicit(&parent->splits, 1, memory_order_relaxed);
    if (status != TUTTI_OK) {
        tutti_group_release(group);
        return status;
    }
    *out = group != NULL ? group : TUTTI_NON_GROUP_MEMBER;
    return TUTTI_OK;
}

/* ---- find or create ---- */

tutti_status tutti_group_find_or_new(tutti_world *world, const char *tag, const int *ranks, int count, int stride,
                                     tutti_group **group) {
    tutti_status status = tu_world_check(world);
    if (status != TUTTI_OK)
        return status;
    if (ranks == NULL || count <= 0 || group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_group_find_or_new needs a list of ranks, and a place for the result");
    if (stride <= 0 || count % stride != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%d ranks cannot be cut into blocks of %d", count, stride);
    const int *block = NULL;
    for (int at = 0; at < count; at += stride)
        if (index_of(ranks + at, stride, world->rank) >= 0)
            block = ranks + at;
    if (block == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "this rank, %d, is in none of the blocks of the list", world->rank);
    int *sorted;
    status = take_ranks(world, block, stride, false, &sorted);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&world->lock);
    tutti_group *found = tutti_group_keep(tu_registry_find(world->registry, tag, sorted, stride));
    pthread_mutex_unlock(&world->lock);
    if (found != NULL) {
        *group = found;
    } else if (tag == NULL || tag[0] == 0) {
        char list[128];
        list_text(sorted, stride, list, sizeof list);
        status =
            tu_error(TUTTI_ERROR_ARGUMENT,
                     "there is no group without a tag of the ranks [%s], and one is never made without a tag: make "
                     "it with tutti_group_new first, or give a tag",
                     list);
    } else {
        tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
        status = take_options(TUTTI_OPTIONS(tutti_group_options, .tag = tag, .local_synchronization = true), &options);
        if (status == TUTTI_OK)
            status = new_group(world, sorted, stride, &options, group);
    }
    free(sorted);
    return status;
}
