/* SPDX-License-Identifier: Apache-2.0
 *
 * Votes of groups whose members are on several hosts: see vote.h for what a vote is.
 *
 * The place of the page is taken by the world's store, which everybody who may go on reaches. Members append their
 * ballots to one value per attempt, and add another when they learn more; whoever finds that all it waits for have come
 * or are gone writes a proposal, and the first is the decision, since the store sets a missing key once
 * (compare_set). So there is one decision, whatever falls apart, and who does not reach the store has none. Usually it
 * is the lowest member that lives who looks at the ballots; the others wait for the decision, and look now and then.
 *
 * Who is gone: ranks of this host by the kernel, others by their launchers; where no launcher tells, one whose
 * connection to some member broke and who does not come. Before a shrink members ask those that they are connected to
 * whether they still hear each other; those that do not cannot stay together: one of them is left out. Those that are
 * left must be at least as many as those of whom nobody knows what they do: another part of the job might else go on as
 * well.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "hosts/news.h"
#include "store/watch.h"
#include "world/group.h"
#include "world/vote_inner.h"

#define CHAIR_SLICE (5 * TU_MILLISECOND)    /* between two looks of the lowest member at the ballots … */
#define OTHERS_SLICE (250 * TU_MILLISECOND) /* … and of the others */
#define KEY_BYTES 64
#define STORE_SHIFT 24 /* a vote's number, from this bit on, says in which of the job's stores it is */
#define OBJECTION 0    /* a kind of ballot: see tu_vote_object */

/* One entry of the value of an attempt; the last of a member counts. Behind it lie two sets of members, a bit each, and
 * the text. */
typedef struct entry {
    uint32_t bytes; /* of all of it */
    int32_t member;
    uint64_t completed, digest;
    uint32_t kind, yes, unsure;
    int32_t status;
    uint32_t text_bytes, reserved;
} entry;

typedef struct decision {
    uint32_t kind, outcome, all;
    int32_t culprit, culprit_status, reserved;
    uint64_t settled;
    char culprit_text[TU_VOTE_TEXT];
    uint64_t members[]; /* a bit each, as in tu_vote */
} decision;

/* A vote that is being held. */
typedef struct holding {
    tutti_group *group;
    tu_vote *vote;
    tutti_store *store; /* a connection of its own */
    uint32_t moves;     /* where that store is: tu_news_store */
    int64_t silence_ns, patience, looked, began;
    size_t words;
    uint64_t *dead;     /* members that are dead or closed their worlds, as this rank knows */
    uint64_t *given_up; /* members that their launchers count as lost; nobody knows what they do */
    uint64_t *broken;   /* members that this rank cannot reach any more */
    uint64_t *said;     /* dead and broken, as this rank's last ballot has them … */
    uint64_t *missing;  /* members that had not come at the last look */
    bool unsure;        /* somebody has not answered yet whether it can be reached */
    bool cast, cast_unsure;
    tu_vote_suspect suspect;
    int elsewhere; /* member that waits in another operation for this rank; -1: none */
} holding;

/* ---- sets of members ---- */

static bool has(const uint64_t *set, int member) {
    return set[member / 64] >> (member % 64) & 1;
}

static void add(uint64_t *set, int member) {
    set[member / 64] |= UINT64_C(1) << (member % 64);
}

static void take_out(uint64_t *set, int member) {
    set[member / 64] &= ~(UINT64_C(1) << (member % 64));
}

/* ---- the store ---- */

static void ballots_key(const holding *this, uint64_t attempt, char key[KEY_BYTES]) {
    snprintf(key, KEY_BYTES, "vote/%016llx/%llu", (unsigned long long)this->group->key, (unsigned long long)attempt);
}

static void decision_key(const holding *this, uint64_t attempt, char key[KEY_BYTES]) {
    snprintf(key, KEY_BYTES, "vote/%016llx/%llu/decision", (unsigned long long)this->group->key,
             (unsigned long long)attempt);
}

static uint32_t store_of_job(const tutti_world *world) {
    char host[128];
    int port;
    return world->news != NULL ? tu_news_store(world->news, host, sizeof host, &port) : 0;
}

/* Looks around while the store is waited for, every 20 ms or so: it must answer within the time in which hosts do, and
 * be the one that the job has. Time in which this process stood still does not count. */
static tutti_status look_at_store(void *argument) {
    holding *this = argument;
    const tutti_world *world = this->group->world;
    int64_t now = tu_clock_now(), gap = now - this->looked;
    this->looked = now;
    if (gap > this->silence_ns / 4)
        this->patience += gap;
    if (atomic_load_explicit(&world->interrupt, memory_order_acquire) != 0)
        return TUTTI_ERROR_INTERRUPTED;
    if (store_of_job(world) != this->moves)
        return tu_error(TUTTI_ERROR_NETWORK, "another one has taken its place");
    if (now < this->patience)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_NETWORK, "it has not answered for %s (TUTTI_HOST_TIMEOUT)",
                    tu_duration_of(this->silence_ns).text);
}

/* Before each call of the store; `more` is how long the call itself may wait. */
static void be_patient(holding *this, int64_t more) {
    this->looked = tu_clock_now();
    this->patience = tu_deadline(this->silence_ns + more);
}

static tutti_status interrupted(const holding *this) {
    char what[160];
    snprintf(what, sizeof what, "%s of group %s", tu_operation_name((tu_operation)this->vote->info->operation),
             this->group->name);
    return tu_world_interrupted(this->group->world, what);
}

/* What a failure of the store means for this rank. */
static tutti_status out_of_reach(const holding *this, tutti_status status) {
    if (status == TUTTI_ERROR_INTERRUPTED || status == TUTTI_ERROR_MEMORY)
        return status == TUTTI_ERROR_MEMORY ? status : interrupted(this);
    tutti_error_copy why;
    tu_error_save(&why);
    return tu_error(TUTTI_ERROR_NETWORK,
                    "%s of group %s: rank %d does not reach the store of the job, in which members on several hosts "
                    "agree: %.300s. Those that reach it may go on without this rank, which cannot: end it",
                    tu_operation_name((tu_operation)this->vote->info->operation), this->group->name, this->group->rank,
                    why.message);
}

/* ---- who is gone ---- */

static void look_at_member(holding *this, int member) {
    tutti_group *group = this->group;
    tutti_world *world = group->world;
    int rank = group->ranks[member];
    /* Pairs with the release of whoever opened the network. */
    tu_way (*ask)(tutti_world *, int, int64_t, bool) = atomic_load_explicit(&world->way_to_hosts, memory_order_acquire);
    tu_rank_state state = tu_world_rank_state(world, rank, true);
    bool elsewhere = group->job_ranks[member] < 0;
    if (elsewhere && state == TU_RANK_DEAD && tu_news_of(world->news, rank) == TU_NEWS_LOST)
        add(this->given_up, member);
    else if (state == TU_RANK_DEAD || state == TU_RANK_CLOSED)
        add(this->dead, member);
    else if (elsewhere && ask != NULL) {
        /* Of one that does not come, and that no launcher knows of, a connection tells whether it is there. */
        tu_way way = ask(world, rank, this->began, world->news == NULL && has(this->missing, member));
        if (way == TU_WAY_CLOSED)
            add(this->dead, member);
        else if (way == TU_WAY_BROKEN)
            add(this->broken, member);
        this->unsure = this->unsure || way == TU_WAY_ASKED;
    }
}

/* Whether the others have given this host up: then it has no say. */
static tutti_status cut_off(const holding *this) {
    const tu_news *news = this->group->world->news;
    char why[256];
    if (news == NULL || !tu_news_cut_off(news, why, sizeof why))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_DEAD,
                    "%s of group %s: rank %d cannot go on: %s. The part of the job that is left with its first "
                    "launcher goes on, if it is large enough; this one ends",
                    tu_operation_name((tu_operation)this->vote->info->operation), this->group->name, this->group->rank,
                    why);
}

static tutti_status look_around(holding *this) {
    this->unsure = false;
    for (int member = 0; member < this->group->size; member++)
        if (member != this->group->rank && this->vote->awaited[member])
            look_at_member(this, member);
    return cut_off(this);
}

/* ---- the ballot ---- */

/* Writes this member's ballot, again when it knows more. */
static tutti_status cast(holding *this) {
    tutti_group *group = this->group;
    const tu_vote *vote = this->vote;
    size_t set = this->words * sizeof(uint64_t);
    if (this->cast && this->cast_unsure == this->unsure && memcmp(this->said, this->dead, set) == 0 &&
        memcmp(this->said + this->words, this->broken, set) == 0)
        return TUTTI_OK;
    size_t text_bytes = strlen(vote->text);
    entry mine = { .bytes = (uint32_t)(sizeof mine + 2 * set + text_bytes),
                   .member = group->rank,
                   .completed = tutti_group_completed(group),
                   .digest = vote->digest,
                   .kind = vote->kind,
                   .yes = vote->yes,
                   .unsure = this->unsure,
                   .status = (int32_t)vote->status,
                   .text_bytes = (uint32_t)text_bytes };
    unsigned char bytes[sizeof mine + 2 * set + TU_VOTE_TEXT];
    memcpy(this->said, this->dead, set);
    memcpy(this->said + this->words, this->broken, set);
    memcpy(bytes, &mine, sizeof mine);
    memcpy(bytes + sizeof mine, this->said, 2 * set);
    memcpy(bytes + sizeof mine + 2 * set, vote->text, text_bytes);
    char key[KEY_BYTES];
    ballots_key(this, vote->attempt, key);
    be_patient(this, 0);
    tutti_status status = tutti_store_append(this->store, key, bytes, mine.bytes);
    this->cast = this->cast || status == TUTTI_OK;
    this->cast_unsure = this->unsure;
    return status == TUTTI_OK ? TUTTI_OK : out_of_reach(this, status);
}

/* ---- the ballots of all ---- */

typedef struct count {
    const unsigned char **of; /* by member: its entry; NULL: it has not come */
    void *value;
    uint64_t *dead, *lost; /* together: gone for certain; gone, and nobody knows what they do */
} count;

static entry head_of(const unsigned char *bytes) {
    entry head;
    memcpy(&head, bytes, sizeof head);
    return head;
}

/* Whether one member says in its ballot that another is dead (0) or out of its reach (1). */
static bool says(const holding *this, const unsigned char *bytes, int which, int member) {
    uint64_t word;
    memcpy(&word, bytes + sizeof(entry) + ((size_t)which * this->words + (size_t)member / 64) * sizeof word,
           sizeof word);
    return word >> (member % 64) & 1;
}

/* The last entry of every member; what makes no sense ends the list. */
static void sort_entries(const holding *this, const unsigned char *value, size_t bytes, const unsigned char **of) {
    size_t set = 2 * this->words * sizeof(uint64_t);
    for (size_t at = 0; bytes - at >= sizeof(entry);) {
        entry head = head_of(value + at);
        if (head.bytes > bytes - at || head.text_bytes >= TU_VOTE_TEXT || head.member < 0 ||
            head.member >= this->group->size || head.bytes != sizeof head + set + head.text_bytes)
            return;
        of[head.member] = value + at;
        at += head.bytes;
    }
}

/* Members that are gone, as anybody knows. */
static void find_gone(const holding *this, count *all) {
    for (int member = 0; member < this->group->size; member++) {
        bool dead = has(this->dead, member), broken = has(this->broken, member);
        for (int other = 0; other < this->group->size; other++) {
            dead = dead || (all->of[other] != NULL && other != member && says(this, all->of[other], 0, member));
            broken = broken || (all->of[other] != NULL && other != member && says(this, all->of[other], 1, member));
        }
        if (dead)
            add(all->dead, member);
        else if (has(this->given_up, member) || (broken && all->of[member] == NULL && this->group->world->news == NULL))
            add(all->lost, member);
    }
}

static bool is_gone(const count *all, int member) {
    return has(all->dead, member) || has(all->lost, member);
}

static bool is_missing(const holding *this, const count *all, int member) {
    return this->vote->awaited[member] && all->of[member] == NULL && !is_gone(all, member);
}

/* The first that neither came nor is gone; -1: all have. */
static int first_missing(const holding *this, const count *all) {
    for (int member = 0; member < this->group->size; member++)
        if (is_missing(this, all, member))
            return member;
    return -1;
}

/* Who survives is known when everybody knows whom it reaches. */
static bool anybody_unsure(const holding *this, const count *all) {
    for (int member = 0; member < this->group->size && this->vote->kind == TU_VOTE_SHRINK; member++)
        if (all->of[member] != NULL && !is_gone(all, member) && head_of(all->of[member]).unsure != 0)
            return true;
    return false;
}

/* Whether a member has said that it is in no vote at all: see tu_vote_object. */
static bool anybody_objects(const holding *this, const count *all) {
    for (int member = 0; member < this->group->size; member++)
        if (all->of[member] != NULL && head_of(all->of[member]).kind == OBJECTION)
            return true;
    return false;
}

/* Whether a member that has not come waits for this rank in another operation. While somebody is gone nobody is
 * blamed: those that wait for it find that out themselves. */
static bool anybody_elsewhere(holding *this, const count *all) {
    tutti_group *group = this->group;
    bool found = false, lost = false;
    for (int member = 0; member < group->size; member++)
        lost = lost || is_gone(all, member) || has(this->broken, member);
    for (int member = 0; member < group->size && !lost && !found && this->elsewhere < 0; member++)
        if (has(this->missing, member) && tu_vote_elsewhere(group, this->vote, member, &this->suspect, &found))
            this->elsewhere = member;
    if (!found)
        this->suspect.member = -1;
    return this->elsewhere >= 0;
}

static void end_count(count *all) {
    free(all->value);
    free(all->of);
}

/* Reads the ballots: this member's at least is there. */
static tutti_status take_count(holding *this, count *all) {
    size_t size = (size_t)this->group->size, bytes;
    *all = (count){ .of = calloc(1, size * sizeof *all->of + 2 * this->words * sizeof(uint64_t)) };
    if (all->of == NULL)
        return tu_error_memory("a vote", size * sizeof *all->of);
    all->dead = (uint64_t *)(void *)(all->of + size);
    all->lost = all->dead + this->words;
    char key[KEY_BYTES];
    ballots_key(this, this->vote->attempt, key);
    be_patient(this, TU_SECOND);
    tutti_status status = tutti_store_get(this->store, key, TU_SECOND, &all->value, &bytes);
    if (status != TUTTI_OK) {
        free(all->of);
        return out_of_reach(this, status);
    }
    sort_entries(this, all->value, bytes, all->of);
    find_gone(this, all);
    return TUTTI_OK;
}

/* ---- proposals ---- */

static bool apart(const holding *this, const count *all, int one, int other) {
    return says(this, all->of[one], 1, other) || says(this, all->of[other], 1, one);
}

/* Of members that cannot reach each other, all but one side are left out: whoever has lost most others goes first, and
 * of equals the last. */
static void leave_out_separated(const holding *this, const count *all, uint64_t *members) {
    for (;;) {
        int worst = -1, most = 0;
        for (int member = 0; member < this->group->size; member++) {
            int others = 0;
            for (int other = 0; has(members, member) && other < this->group->size; other++)
                others += other != member && has(members, other) && apart(this, all, member, other);
            if (others > 0 && others >= most) {
                most = others;
                worst = member;
            }
        }
        if (worst < 0)
            return;
        take_out(members, worst);
    }
}

/* Members that came and stay. */
static void find_survivors(const holding *this, const count *all, uint64_t *members) {
    for (int member = 0; member < this->group->size; member++)
        if (this->vote->awaited[member] && all->of[member] != NULL && !is_gone(all, member))
            add(members, member);
    if (this->vote->kind == TU_VOTE_SHRINK)
        leave_out_separated(this, all, members);
}

/* Whether those of whom nobody knows what they do are more than those that are left. */
static bool too_few(const holding *this, const count *all, const uint64_t *members) {
    int left = 0, unknown = 0;
    for (int member = 0; member < this->group->size; member++)
        if (this->vote->awaited[member]) {
            left += has(members, member);
            unknown += !has(members, member) && !has(all->dead, member);
        }
    return left < unknown;
}

static void weigh_all(const holding *this, const count *all, const uint64_t *members, decision *mine) {
    tu_vote_outcome outcome = TU_VOTE_DONE;
    int culprit = -1;
    for (int member = 0; member < this->group->size; member++) {
        if (!this->vote->awaited[member])
            continue;
        if (all->of[member] == NULL) {
            if (this->vote->kind == TU_VOTE_COMMIT && outcome == TU_VOTE_DONE)
                outcome = TU_VOTE_RETRY; /* it is gone */
            continue;
        }
        entry head = head_of(all->of[member]);
        tu_vote_weigh(this->vote, head.kind, head.digest, (tutti_status)head.status, member, &outcome, &culprit);
        mine->all = mine->all && head.yes != 0;
        if (has(members, member) && head.completed < mine->settled)
            mine->settled = head.completed;
    }
    if (outcome == TU_VOTE_DONE && this->vote->kind == TU_VOTE_SHRINK && too_few(this, all, members))
        outcome = TU_VOTE_FEW;
    mine->outcome = outcome;
    mine->culprit = culprit;
    if (culprit >= 0) {
        entry head = head_of(all->of[culprit]);
        mine->culprit_status = head.status;
        memcpy(mine->culprit_text, all->of[culprit] + head.bytes - head.text_bytes, head.text_bytes);
    }
}

/* Makes this member's proposal the decision, unless there is one; gives the decision. */
static tutti_status propose(holding *this, const count *all, void **value, size_t *bytes) {
    size_t room = sizeof(decision) + this->words * sizeof(uint64_t);
    decision *mine = calloc(1, room);
    if (mine == NULL)
        return tu_error_memory("a vote", room);
    mine->kind = this->vote->kind;
    mine->all = 1;
    mine->settled = UINT64_MAX;
    mine->culprit = -1;
    if (this->elsewhere >= 0) {
        mine->outcome = TU_VOTE_MISMATCH;
        mine->culprit = this->elsewhere;
    } else if (first_missing(this, all) >= 0 && !anybody_objects(this, all)) {
        mine->outcome = TU_VOTE_LATE;
        for (int member = 0; member < this->group->size; member++)
            if (is_missing(this, all, member))
                add(mine->members, member);
    } else {
        find_survivors(this, all, mine->members);
        weigh_all(this, all, mine->members, mine);
    }
    char key[KEY_BYTES];
    decision_key(this, this->vote->attempt, key);
    be_patient(this, 0);
    tutti_status status = tutti_store_compare_set(this->store, key, "", 0, mine, room, value, bytes);
    free(mine);
    if (status != TUTTI_OK)
        return out_of_reach(this, status);
    if (this->vote->attempt > 2) { /* everybody has left the one before the last */
        ballots_key(this, this->vote->attempt - 2, key);
        be_patient(this, 0);
        (void)!tutti_store_delete(this->store, key, NULL);
    }
    return TUTTI_OK;
}

/* ---- the decision ---- */

static tutti_status take_decision(const holding *this, const void *value, size_t bytes) {
    tu_vote *vote = this->vote;
    const decision *made = value;
    if (bytes != sizeof *made + this->words * sizeof(uint64_t) || made->outcome < TU_VOTE_DONE ||
        made->outcome > TU_VOTE_FEW || made->culprit < -1 || made->culprit >= this->group->size)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s of group %s: what the store holds is no decision of its members; is the store used by "
                        "others under the same prefix?",
                        tu_operation_name((tu_operation)vote->info->operation), this->group->name);
    vote->outcome = (tu_vote_outcome)made->outcome;
    vote->all = made->all != 0;
    vote->settled = made->settled;
    vote->culprit = made->culprit;
    vote->culprit_status = (tutti_status)made->culprit_status;
    memcpy(vote->culprit_text, made->culprit_text, sizeof vote->culprit_text);
    vote->culprit_text[sizeof vote->culprit_text - 1] = 0;
    for (int member = 0; member < this->group->size; member++)
        vote->members[member] = has(made->members, member);
    return TUTTI_OK;
}

/* Numbers of votes in the store that the job has now are greater. */
static uint64_t first_number(const tutti_world *world) {
    return (uint64_t)atomic_load_explicit(&world->moves, memory_order_acquire) << STORE_SHIFT;
}

/* The number of the next vote: the first after this rank's last that is not decided. One in which the others went on
 * without this rank is told instead: *told. */
static tutti_status number(holding *this, bool *told) {
    tu_vote *vote = this->vote;
    tutti_status status = TUTTI_OK;
    bool present = vote->attempt == 0;
    /* Every store begins anew, whatever each of the members had of the last. */
    uint64_t first = first_number(this->group->world);
    if (this->group->attempts < first)
        this->group->attempts = first;
    if (present)
        vote->attempt = this->group->attempts;
    while (present && !*told && status == TUTTI_OK) {
        char key[KEY_BYTES];
        decision_key(this, ++vote->attempt, key);
        be_patient(this, 0);
        status = tutti_store_check(this->store, (const char *const[]){ key }, 1, &present);
        if (status != TUTTI_OK || !present)
            break;
        void *value;
        size_t bytes;
        be_patient(this, TU_SECOND);
        status = tutti_store_get(this->store, key, TU_SECOND, &value, &bytes);
        if (status != TUTTI_OK)
            break;
        status = take_decision(this, value, bytes);
        *told = status == TUTTI_OK && ((const decision *)value)->kind != TU_VOTE_COMMIT &&
                vote->outcome == TU_VOTE_DONE && !vote->members[this->group->rank];
        free(value);
    }
    this->group->attempts = vote->attempt;
    return status == TUTTI_OK || status == TUTTI_ERROR_PROTOCOL ? status : out_of_reach(this, status);
}

/* ---- waiting ---- */

static bool in_the_chair(const holding *this) {
    for (int member = 0; member < this->group->rank; member++)
        if (this->vote->awaited[member] && !has(this->dead, member) && !has(this->given_up, member) &&
            !has(this->broken, member))
            return false;
    return true;
}

/* Waits for the decision that somebody else makes; *value NULL: there is none yet. */
static tutti_status await(holding *this, int64_t slice, void **value, size_t *bytes) {
    char key[KEY_BYTES];
    decision_key(this, this->vote->attempt, key);
    int64_t left = tu_deadline_left(this->vote->deadline);
    slice = left < slice ? left : slice;
    be_patient(this, slice);
    tutti_status status = tutti_store_get(this->store, key, slice > 0 ? slice : 1, value, bytes);
    if (status == TUTTI_OK)
        return TUTTI_OK;
    *value = NULL;
    return status == TUTTI_ERROR_TIMEOUT ? TUTTI_OK : out_of_reach(this, status);
}

/* Looks at the ballots; decides when all have come, or when time is over. */
static tutti_status look_at_ballots(holding *this, void **value, size_t *bytes) {
    tutti_group *group = this->group;
    count all;
    bool late = tu_clock_now() >= this->vote->deadline;
    tutti_status status = take_count(this, &all);
    if (status != TUTTI_OK)
        return status;
    int missing = first_missing(this, &all);
    memset(this->missing, 0, this->words * sizeof *this->missing);
    for (int member = 0; member < group->size; member++)
        if (is_missing(this, &all, member))
            add(this->missing, member);
    bool elsewhere = missing >= 0 && anybody_elsewhere(this, &all);
    if (elsewhere)
        tu_group_end(group, this->vote->info); /* with the error that says so */
    if ((missing < 0 && !anybody_unsure(this, &all)) || elsewhere || anybody_objects(this, &all) || late)
        status = propose(this, &all, value, bytes);
    tu_record_waiting(tu_job_recorder(group->world->job, group->world->local_rank), this->vote->ticket,
                      missing < 0 ? -1 : group->ranks[missing]);
    end_count(&all);
    return status;
}

static tutti_status hold(holding *this) {
    void *value = NULL;
    size_t bytes = 0;
    bool told = false;
    tutti_status status = number(this, &told);
    for (int64_t slice = 0; status == TUTTI_OK && !told && value == NULL;) {
        status = look_around(this);
        if (status == TUTTI_OK)
            status = cast(this);
        bool chair = in_the_chair(this), late = tu_clock_now() >= this->vote->deadline;
        if (status == TUTTI_OK && (chair || late || slice >= OTHERS_SLICE))
            status = look_at_ballots(this, &value, &bytes);
        slice = !chair ? OTHERS_SLICE : slice < 8 * CHAIR_SLICE ? slice + CHAIR_SLICE : slice;
        if (status == TUTTI_OK && value == NULL)
            status = await(this, slice, &value, &bytes);
        if (status == TUTTI_OK && atomic_load_explicit(&this->group->world->interrupt, memory_order_acquire) != 0)
            status = interrupted(this);
    }
    if (status == TUTTI_OK && !told)
        status = take_decision(this, value, bytes);
    if (status == TUTTI_OK && this->vote->outcome == TU_VOTE_MISMATCH)
        (void)tu_group_ask_store(this->group); /* whoever found it may have ended the group, and has said why */
    free(value);
    return status;
}

/* Whether the store that is out of reach may have a successor, for which it is worth to wait. */
static bool may_move(const holding *this, uint32_t moves, int64_t give_up) {
    const tutti_world *world = this->group->world;
    char why[128];
    int64_t now = tu_clock_now();
    return world->news != NULL && now < this->vote->deadline && !tu_news_cut_off(world->news, why, sizeof why) &&
           (tu_news_electing(world->news) || store_of_job(world) != moves || now < give_up);
}

/* Whether this is the second of two votes, and the first was held in a store that is no more: others may have come no
 * further, so both are held anew. */
static bool begun_elsewhere(const tutti_world *world, uint64_t attempt) {
    return attempt != 0 && attempt < first_number(world);
}

/* Holds it in the store that there is; where that vanishes, in the one that takes its place. */
static tutti_status hold_somewhere(holding *this) {
    tutti_world *world = this->group->world;
    uint64_t attempt = this->vote->attempt;
    int64_t give_up = 0;
    for (;;) {
        uint32_t moves = atomic_load_explicit(&world->moves, memory_order_acquire);
        this->moves = store_of_job(world);
        be_patient(this, 0);
        tutti_status status = tu_world_follow(world);
        if (status == TUTTI_OK) /* whoever has a decision of an older store may wait for this rank, which has none */
            tu_shrink_abandon(this->group, first_number(world));
        if (status == TUTTI_OK && begun_elsewhere(world, attempt)) {
            this->vote->outcome = TU_VOTE_RETRY;
            this->vote->culprit = -1;
            return TUTTI_OK;
        }
        /* Another thread may wait in the world's own handle, and its connection may be an old one that broke. */
        if (status == TUTTI_OK)
            status = tutti_store_clone(world->store, &this->store);
        status = status == TUTTI_OK ? hold(this) : out_of_reach(this, status);
        tutti_store_release(this->store);
        this->store = NULL;
        give_up = give_up == 0 ? tu_deadline(this->silence_ns + 2 * TU_SECOND) : give_up;
        if (status != TUTTI_ERROR_NETWORK || !may_move(this, moves, give_up))
            return status;
        this->cast = false;
        this->elsewhere = -1;
        this->vote->attempt = attempt;
        nanosleep(&(struct timespec){ .tv_nsec = 20 * TU_MILLISECOND }, NULL);
    }
}

tutti_status tu_vote_hold_hosts(tutti_group *group, tu_vote *vote) {
    tutti_world *world = group->world;
    size_t words = ((size_t)group->size + 63) / 64;
    uint64_t sets[6 * words];
    memset(sets, 0, sizeof sets);
    holding this = { .group = group,
                     .vote = vote,
                     .silence_ns = tu_settings_number(&world->settings, TU_SETTING_HOST_TIMEOUT),
                     .began = tu_clock_now(),
                     .words = words,
                     .dead = sets,
                     .given_up = sets + words,
                     .broken = sets + 2 * words,
                     .said = sets + 3 * words,
                     .missing = sets + 5 * words,
                     .suspect.member = -1,
                     .elsewhere = -1 };
    tu_watch *watch;
    tutti_error_copy before_it;
    tu_error_save(&before_it); /* what was in the way is of no interest once there is a decision */
    char text[TU_VOTE_TEXT];   /* what the store says meanwhile takes the place of the thread's message */
    tu_error_shorten(text, sizeof text, vote->text != NULL ? vote->text : "");
    vote->text = text;
    tutti_status status = cut_off(&this);
    if (status == TUTTI_OK)
        status = tu_watch_new(look_at_store, &this, true, &watch);
    if (status != TUTTI_OK)
        return status;
    tu_watch *before = tu_watch_thread(watch, false);
    status = hold_somewhere(&this);
    tu_watch_thread_back(before);
    tu_watch_release(watch);
    vote->text = NULL;
    return status == TUTTI_OK ? (tu_error_restore(&before_it), TUTTI_OK) : status;
}

/* ---- those that wait in something else ---- */

/* The vote of the group that nobody has decided yet, if others have cast ballots in it and this rank has not: its
 * number and the first of them; else 0. */
static uint64_t vote_of_others(holding *this, int *other) {
    bool present = true;
    uint64_t attempt = this->group->attempts, first = first_number(this->group->world);
    char key[KEY_BYTES];
    for (attempt = attempt < first ? first : attempt; present;) {
        decision_key(this, ++attempt, key);
        if (tutti_store_check(this->store, (const char *const[]){ key }, 1, &present) != TUTTI_OK)
            return 0;
    }
    void *value = NULL;
    size_t bytes;
    ballots_key(this, attempt, key);
    if (tutti_store_check(this->store, (const char *const[]){ key }, 1, &present) != TUTTI_OK || !present ||
        tutti_store_get(this->store, key, TU_SECOND, &value, &bytes) != TUTTI_OK)
        return 0;
    const unsigned char *of[this->group->size];
    memset(of, 0, sizeof of);
    sort_entries(this, value, bytes, of);
    *other = 0;
    while (*other < this->group->size && of[*other] == NULL)
        ++*other;
    bool theirs = *other < this->group->size && of[this->group->rank] == NULL;
    free(value);
    return theirs ? attempt : 0;
}

/* A ballot that makes the vote a mismatch for all. */
static void cast_objection(const holding *this, uint64_t attempt, const char *text) {
    size_t set = 2 * this->words * sizeof(uint64_t), length = strlen(text);
    entry mine = { .bytes = (uint32_t)(sizeof mine + set + length),
                   .member = this->group->rank,
                   .kind = OBJECTION,
                   .status = TUTTI_ERROR_MISMATCH,
                   .text_bytes = (uint32_t)length };
    unsigned char bytes[sizeof mine + set + TU_VOTE_TEXT];
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, &mine, sizeof mine);
    memcpy(bytes + sizeof mine + set, text, length);
    char key[KEY_BYTES];
    ballots_key(this, attempt, key);
    (void)!tutti_store_append(this->store, key, bytes, mine.bytes); /* else they wait until their deadline */
}

static bool anybody_gone(const tutti_group *group) {
    for (int member = 0; member < group->size; member++) {
        tu_rank_state state = tu_world_rank_state(group->world, group->ranks[member], true);
        if (state == TU_RANK_DEAD || state == TU_RANK_CLOSED)
            return true;
    }
    return false;
}

bool tu_vote_object(tutti_group *group, const tu_operation_info *info, uint64_t *seen) {
    int other = -1;
    if (group->local || group->world->store == NULL || tu_group_ended(group) || anybody_gone(group) ||
        pthread_mutex_trylock(&group->vote_lock) != 0) /* a thread of this rank is in the vote itself */
        return false;
    holding this = { .group = group, .store = group->world->store, .words = ((size_t)group->size + 63) / 64 };
    tutti_error_copy before_it;
    tu_error_save(&before_it);
    tu_watch *before = tu_watch_thread(group->world->asking, false);
    uint64_t attempt = vote_of_others(&this, &other);
    bool again = attempt != 0 && attempt == *seen;
    *seen = attempt;
    tu_error_restore(&before_it);
    if (again) {
        char mine[160];
        tu_operation_text(group, info, mine, sizeof mine);
        tu_error(TUTTI_ERROR_MISMATCH,
                 "the ranks disagree: rank %d called %s, rank %d agrees or shrinks. All ranks of a group must call the "
                 "same operations in the same order",
                 group->rank, mine, other);
        tu_error_at_fault(group->rank);
        (void)tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence,
                             group->rank);
        tu_group_end(group, info); /* before they decide: then they ask why */
        cast_objection(&this, attempt, mine);
    }
    tu_watch_thread_back(before);
    pthread_mutex_unlock(&group->vote_lock);
    return again;
}
