/* SPDX-License-Identifier: Apache-2.0
 *
 * Teams: what NVSHMEM calls a set of processes. The world has one from the start. Any other group gets one at first
 * need by nvshmemx_team_init, to which its members alone come (splitting a team would need all of the parent's),
 * whatever set of ranks it is. A team is kept as long as its group, and there are not many: TUTTI_NVSHMEM_TEAMS.
 *
 * Where several processes share a GPU and MPS does not let them run side by side, every call on a team ends the
 * process: there are none then.
 */
#include <stdlib.h>
#include <string.h>

#include "inner.h"

typedef struct offer {
    uint64_t id;     /* of member 0 */
    int32_t refused; /* a tutti_status: this member has no team to give */
    int32_t pe;
} offer;

typedef struct making {
    tu_nvshmem_team_config config;
    int size, rank;
    int32_t team;
    int result;
} making;

static void init_team(tu_nvshmem *nvshmem, void *argument) {
    making *making = argument;
    making->result = nvshmem->library->nvshmemx_team_init(&making->team, &making->config, TU_NVSHMEM_CONFIG_BY_ID,
                                                          making->size, making->rank);
}

static tutti_status made(const tu_nvshmem *nvshmem, const void *argument) {
    const making *making = argument;
    return making->result == 0 && making->team >= 0
               ? TUTTI_OK
               : nvshmem->cuda.host->error(TUTTI_ERROR_BACKEND,
                                           "NVSHMEM makes no team for member %d of a group (nvshmemx_team_init: %d)",
                                           making->rank, making->result);
}

/* Why this rank cannot have one more; TUTTI_OK: it can. */
static tutti_status refusal(tu_nvshmem *nvshmem) {
    const tu_backend_host *host = nvshmem->cuda.host;
    if (nvshmem->lost)
        return host->error(TUTTI_ERROR_STATE,
                           "an earlier call of NVSHMEM did not come back: the process must end first");
    if (nvshmem->status == TU_NVSHMEM_LIMITED_SHARING)
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "NVSHMEM has no teams where processes share a GPU, unless MPS runs and the "
                           "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of those on one GPU add up to 100 at most");
    pthread_mutex_lock(&nvshmem->heap_lock);
    int count = nvshmem->team_count;
    pthread_mutex_unlock(&nvshmem->heap_lock);
    if (count >= nvshmem->team_limit)
        return host->error(TUTTI_ERROR_LIMIT,
                           "there are %d teams of NVSHMEM already: allow more by TUTTI_NVSHMEM_TEAMS, and by "
                           "NVSHMEM_MAX_TEAMS",
                           count);
    return TUTTI_OK;
}

/* The first member that cannot have one. Where there is a team already, that there cannot be more is no reason. */
static tutti_status compare(const tu_nvshmem *nvshmem, tutti_group *group, const offer *offers, tutti_status own,
                            bool there) {
    const tu_backend_host *host = nvshmem->cuda.host;
    for (int i = 0; i < host->group_size(group); i++) {
        if (offers[i].refused == TUTTI_OK || (there && offers[i].refused == TUTTI_ERROR_LIMIT))
            continue;
        if (own != TUTTI_OK && (!there || own != TUTTI_ERROR_LIMIT))
            return own; /* its message stands */
        tutti_status status =
            host->error((tutti_status)offers[i].refused, "member %d of group %s cannot have one more team of NVSHMEM",
                        i, host->group_name(group));
        host->error_at_fault(i);
        return status;
    }
    return TUTTI_OK;
}

/* Whether the members are all PEs, in their order: then there is a team already. */
static bool is_everybody(const tu_nvshmem *nvshmem, const offer *offers, int count) {
    bool all = count == nvshmem->library->nvshmem_n_pes();
    for (int i = 0; i < count && all; i++)
        all = offers[i].pe == i;
    return all;
}

static tutti_status make(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, const offer *offers,
                         int32_t *team) {
    const tu_backend_host *host = nvshmem->cuda.host;
    making making = {
        .config = { .version = TU_NVSHMEM_VERSION(2, tu_nvshmem_team_config), .contexts = -1, .id = offers[0].id },
        .size = host->group_size(group),
        .rank = host->group_rank(group),
        .team = -1
    };
    tutti_status status =
        tu_nvshmem_enter(nvshmem, group, deadline, "nvshmemx_team_init", init_team, made, &making, sizeof making);
    *team = making.team;
    return status;
}

/* `kept` has room for the members. */
static void keep(tu_nvshmem *nvshmem, const tutti_group *group, tu_nvshmem_team *kept, int32_t team,
                 const offer *offers, bool made) {
    int count = nvshmem->cuda.host->group_size(group);
    *kept = (tu_nvshmem_team){ .group = group, .team = team, .count = count };
    for (int i = 0; i < count; i++)
        kept->pes[i] = offers[i].pe;
    pthread_mutex_lock(&nvshmem->heap_lock);
    kept->next = nvshmem->teams;
    nvshmem->teams = kept;
    nvshmem->team_count += made;
    pthread_mutex_unlock(&nvshmem->heap_lock);
}

static bool has_members(const tu_nvshmem_team *kept, const offer *offers, int count) {
    bool same = kept->count == count;
    for (int i = 0; i < count && same; i++)
        same = kept->pes[i] == offers[i].pe;
    return same;
}

/* The team of another group of the same members, which may have gone: all members have it, since all of them made it.
 */
static bool find_same(tu_nvshmem *nvshmem, const offer *offers, int count, int32_t *team) {
    pthread_mutex_lock(&nvshmem->heap_lock);
    const tu_nvshmem_team *kept = nvshmem->teams;
    while (kept != NULL && !has_members(kept, offers, count))
        kept = kept->next;
    if (kept != NULL)
        *team = kept->team;
    pthread_mutex_unlock(&nvshmem->heap_lock);
    return kept != NULL;
}

static bool find(tu_nvshmem *nvshmem, const tutti_group *group, int32_t *team) {
    pthread_mutex_lock(&nvshmem->heap_lock);
    const tu_nvshmem_team *kept = nvshmem->teams;
    while (kept != NULL && kept->group != group)
        kept = kept->next;
    if (kept != NULL)
        *team = kept->team;
    pthread_mutex_unlock(&nvshmem->heap_lock);
    return kept != NULL;
}

/* Collective: what this rank offers, and what all do. *own is why it has nothing to offer. */
static tutti_status meet(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, tutti_status *own, offer *offers) {
    const tu_backend_host *host = nvshmem->cuda.host;
    offer mine = { .pe = nvshmem->pes[nvshmem->rank] };
    if (*own == TUTTI_OK)
        *own = refusal(nvshmem);
    if (*own == TUTTI_OK && host->group_rank(group) == 0 && nvshmem->library->nvshmemx_team_get_uniqueid(&mine.id) != 0)
        *own = host->error(TUTTI_ERROR_BACKEND, "NVSHMEM gives no unique id for a team (nvshmemx_team_get_uniqueid)");
    mine.refused = (int32_t)*own;
    tutti_status status = host->exchange(group, "a team of NVSHMEM", &mine, sizeof mine, -1, deadline, offers, NULL);
    return status == TUTTI_OK && offers == NULL ? *own : status;
}

/* What is needed is made before, so that nothing can fail here alone once the others have the team. */
static tutti_status find_or_make(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, tutti_status own,
                                 offer *offers, tu_nvshmem_team **kept, int32_t *team) {
    int size = nvshmem->cuda.host->group_size(group);
    tutti_status status = meet(nvshmem, group, deadline, &own, offers);
    if (status != TUTTI_OK)
        return status;
    bool everybody = is_everybody(nvshmem, offers, size);
    bool there = everybody || find_same(nvshmem, offers, size, team);
    if (everybody)
        *team = TU_NVSHMEM_TEAM_WORLD;
    status = compare(nvshmem, group, offers, own, there);
    if (status == TUTTI_OK && !there)
        status = make(nvshmem, group, deadline, offers, team); /* on all members, or on none */
    if (status == TUTTI_OK) {
        keep(nvshmem, group, *kept, *team, offers, !there);
        *kept = NULL;
    }
    return status;
}

tutti_status tu_nvshmem_team_get(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, bool broken,
                                 int32_t *team) {
    const tu_backend_host *host = nvshmem->cuda.host;
    if (find(nvshmem, group, team))
        return TUTTI_OK;
    size_t size = (size_t)host->group_size(group);
    offer *offers = calloc(size, sizeof *offers);
    tu_nvshmem_team *kept = malloc(sizeof *kept + size * sizeof *kept->pes);
    tutti_status own = broken ? TUTTI_ERROR_BACKEND : TUTTI_OK;
    if (offers == NULL || kept == NULL)
        own = host->error(TUTTI_ERROR_MEMORY, "out of memory for a team of %zu ranks", size);
    tutti_status status = find_or_make(nvshmem, group, deadline, own, offers, &kept, team);
    free(kept);
    free(offers);
    return status;
}

void tu_nvshmem_forget(void *state, tutti_group *group) {
    tu_nvshmem *nvshmem = state;
    pthread_mutex_lock(&nvshmem->heap_lock);
    for (tu_nvshmem_team *kept = nvshmem->teams; kept != NULL; kept = kept->next) {
        if (kept->group == group)
            kept->group = NULL;
    }
    pthread_mutex_unlock(&nvshmem->heap_lock);
    tu_nvshmem_alias_drop(nvshmem, group);
    tu_cuda_forget(&nvshmem->cuda, group);
}

void tu_nvshmem_teams_free(tu_nvshmem *nvshmem) {
    while (nvshmem->teams != NULL) {
        tu_nvshmem_team *next = nvshmem->teams->next;
        free(nvshmem->teams);
        nvshmem->teams = next;
    }
}
