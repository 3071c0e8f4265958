/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups: the object, its queries, its life. How groups come about is in create.c.
 */
#include "world/group.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "world/registry.h"
#include "world/sha1.h"
#include "world/vote.h"

static bool real(const tutti_group *group) {
    return group != NULL && group != TUTTI_NON_GROUP_MEMBER;
}

/* ---- queries ---- */

int tutti_group_rank(const tutti_group *group) {
    return real(group) ? group->rank : -1;
}

int tutti_group_size(const tutti_group *group) {
    return real(group) ? group->size : -1;
}

const char *tutti_group_name(const tutti_group *group) {
    return real(group) ? group->name : NULL;
}

const char *tutti_group_description(const tutti_group *group) {
    return real(group) ? group->description : NULL;
}

tutti_world *tutti_group_world(const tutti_group *group) {
    return real(group) ? group->world : NULL;
}

const int *tutti_group_ranks(const tutti_group *group) {
    return real(group) ? group->ranks : NULL;
}

const char *tutti_group_tag(const tutti_group *group) {
    if (!real(group))
        return NULL;
    return strncmp(group->tag, "user:", 5) == 0 ? group->tag + 5 : group->tag;
}

uint64_t tutti_group_sequence(const tutti_group *group) {
    return real(group) ? atomic_load_explicit(&group->sequence, memory_order_relaxed) : 0;
}

uint64_t tutti_group_completed(const tutti_group *group) {
    if (!real(group))
        return 0;
    uint64_t completed = atomic_load_explicit(&group->completed, memory_order_relaxed);
    uint64_t in_turn = atomic_load_explicit(&group->completed_in_turn, memory_order_relaxed);
    return completed > in_turn ? completed : in_turn;
}

uint64_t tutti_group_settled(const tutti_group *group) {
    return real(group) ? atomic_load_explicit(&group->settled, memory_order_relaxed) : 0;
}

int64_t tutti_group_timeout(const tutti_group *group) {
    if (!real(group))
        return 0;
    int64_t own = atomic_load_explicit(&group->timeout_ns, memory_order_relaxed);
    return own != 0 ? own : group->world->timeout_ns;
}

static tutti_status need_group(const tutti_group *group, const char *function) {
    if (real(group))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %s", function,
                    group == NULL ? "the group is NULL"
                                  : "this rank is no member of the group (TUTTI_NON_GROUP_MEMBER)");
}

tutti_status tutti_group_set_timeout(tutti_group *group, int64_t timeout_ns) {
    tutti_status status = need_group(group, "tutti_group_set_timeout");
    if (status != TUTTI_OK)
        return status;
    if (timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "timeout_ns is %lld; it must be 0 (the world's) or more",
                        (long long)timeout_ns);
    atomic_store_explicit(&group->timeout_ns, timeout_ns, memory_order_relaxed);
    return TUTTI_OK;
}

tutti_status tutti_group_rank_of(const tutti_group *group, int world_rank, int *rank) {
    tutti_status status = need_group(group, "tutti_group_rank_of");
    if (status != TUTTI_OK)
        return status;
    for (int i = 0; i < group->size; i++)
        if (group->ranks[i] == world_rank) {
            *rank = i;
            return TUTTI_OK;
        }
    return tu_error(TUTTI_ERROR_ARGUMENT, "world rank %d is not part of group %s", world_rank, group->name);
}

tutti_status tutti_group_world_rank(const tutti_group *group, int rank, int *world_rank) {
    tutti_status status = need_group(group, "tutti_group_world_rank");
    if (status != TUTTI_OK)
        return status;
    if (rank < 0 || rank >= group->size)
        return tu_error(TUTTI_ERROR_ARGUMENT, "group rank %d is not part of group %s, which has %d ranks", rank,
                        group->name, group->size);
    *world_rank = group->ranks[rank];
    return TUTTI_OK;
}

/* ---- the object ---- */

uint64_t tu_group_key(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    uint8_t digest[20];
    tu_sha1(text, strlen(text), digest);
    uint64_t key;
    memcpy(&key, digest, sizeof key);
    return key != 0 ? key : 1;
}

int tu_group_known_rank(const tutti_group *group, int member) {
    const tutti_group *whole = group->whole;
    return whole == NULL ? member : tu_rank_index(whole->ranks, whole->size, group->ranks[member]);
}

int tu_rank_index(const int *ranks, int count, int rank) {
    for (int i = 0; i < count; i++)
        if (ranks[i] == rank)
            return i;
    return -1;
}

tutti_status tu_group_make(tutti_world *world, const tu_group_plan *plan, tutti_group **out) {
    tutti_group *group = aligned_alloc(64, (sizeof *group + 63) & ~(size_t)63);
    if (group == NULL)
        return tu_error_memory("a group", sizeof *group);
    memset(group, 0, sizeof *group);
    group->ranks = malloc(2 * sizeof(int) * (size_t)plan->count);
    if (group->ranks == NULL) {
        free(group);
        return tu_error_memory("the ranks of a group", 2 * sizeof(int) * (size_t)plan->count);
    }
    group->world = world;
    atomic_init(&group->references, 1);
    snprintf(group->name, sizeof group->name, "%s", plan->name);
    snprintf(group->description, sizeof group->description, "%s", plan->description);
    group->key = plan->key;
    group->size = plan->count;
    group->rank = -1;
    group->local = true;
    group->job_ranks = group->ranks + plan->count;
    for (int i = 0; i < plan->count; i++) {
        group->ranks[i] = plan->ranks[i];
        group->job_ranks[i] = world->fake ? -1 : world->job_rank_of[plan->ranks[i]];
        group->local = group->local && (world->fake || group->job_ranks[i] >= 0);
        if (plan->ranks[i] == world->rank)
            group->rank = i;
    }
    atomic_init(&group->timeout_ns, plan->timeout_ns);
    tu_attachments_init(&group->attachments, group);
    pthread_mutex_init(&group->exchange_lock, NULL);
    pthread_mutex_init(&group->vote_lock, NULL);
    group->whole = plan->whole;
    tu_world_handle(world, group->whole != NULL ? NULL : "group", 1); /* users count the groups that they know */
    *out = group;
    return TUTTI_OK;
}

tutti_status tu_group_page_reserve(tutti_group *group, const tu_piece **piece) {
    *piece = NULL;
    size_t bytes = sizeof *group->page;
    if (!group->world->fake && group->local)
        bytes += tu_area_bytes(group->size) + tu_votes_bytes(group->size);
    if (group->world->fake || !group->local || group->size == 1) {
        group->page = aligned_alloc(_Alignof(tu_group_page), bytes);
        if (group->page == NULL)
            return tu_error_memory("the page of a group", bytes);
        memset(group->page, 0, bytes);
        return TUTTI_OK;
    }
    if (group->rank != 0)
        return TUTTI_OK;
    tutti_status status =
        tu_piece_alloc(group->world->job, "the page of a group", bytes, _Alignof(tu_group_page), 0, &group->page_piece);
    if (status == TUTTI_OK)
        *piece = &group->page_piece;
    return status;
}

void tu_group_page_set(tutti_group *group, tu_mapping *mapping) {
    group->page_mapping = mapping;
    group->page = mapping->address;
}

tutti_status tu_group_register(tutti_group *group, const char *tag) {
    tutti_world *world = group->world;
    pthread_mutex_lock(&world->lock);
    tutti_status status = TUTTI_OK;
    if (tu_registry_name(world->registry, group->name) != NULL)
        status = tu_error(TUTTI_ERROR_EXISTS,
                          "the group name \"%s\" is already in use in this world; choose another, or destroy that "
                          "group first",
                          group->name);
    if (status == TUTTI_OK)
        status = tu_registry_prepare(world->registry, group, tag != NULL ? tag : "");
    if (status == TUTTI_OK) {
        tu_registry_add(world->registry, group);
        atomic_fetch_add_explicit(&group->references, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&world->lock);
    if (status == TUTTI_OK && world->job != NULL)
        group->recorder_index = tu_recorder_group(tu_job_recorder(world->job, world->local_rank), group->key,
                                                  group->name, group->ranks, group->size);
    return status;
}

static void free_group(tutti_group *group) {
    tutti_world *world = group->world;
    /* Pairs with the release of whoever opened the network, or ends it. */
    void (*forget)(tutti_group *) = atomic_load_explicit(&world->forget_hosts, memory_order_acquire);
    if (forget != NULL && !group->local)
        forget(group);
    tu_attachments_end(&group->attachments);
    tutti_group_release(group->here);
    atomic_store_explicit(&group->here, NULL, memory_order_relaxed); /* nobody is left who could look */
    if (group->page_mapping != NULL)
        tu_mapping_release(group->page_mapping);
    else
        free(group->page);
    if (group->page_piece.segment != NULL)
        tu_piece_free(world->job, &group->page_piece);
    pthread_mutex_destroy(&group->exchange_lock);
    pthread_mutex_destroy(&group->vote_lock);
    bool part = group->whole != NULL;
    if (atomic_load_explicit(&world->closed, memory_order_acquire) != 0) {
        tu_world_bury(group);
    } else {
        free(group->ranks);
        free(group);
    }
    tu_world_handle(world, part ? NULL : "group", -1);
}

tutti_group *tutti_group_keep(tutti_group *group) {
    if (real(group))
        atomic_fetch_add_explicit(&group->references, 1, memory_order_relaxed);
    return group;
}

void tutti_group_release(tutti_group *group) {
    /* Release pairs with the last one's acquire: everything done with the group is over before it is freed. */
    if (real(group) && !tu_world_forked(group->world) &&
        atomic_fetch_sub_explicit(&group->references, 1, memory_order_acq_rel) == 1)
        free_group(group);
}

tutti_status tutti_group_destroy(tutti_group *group) {
    TU_INSIDE_GROUP(group);
    if (group == TUTTI_NON_GROUP_MEMBER)
        return TUTTI_OK;
    tutti_status status = need_group(group, "tutti_group_destroy");
    if (status == TUTTI_OK)
        status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    tutti_world *world = group->world;
    if (group == world->group)
        return tu_error(TUTTI_ERROR_STATE, "the default group ends with its world: use tutti_world_close");
    pthread_mutex_lock(&world->lock);
    bool known = group->links != NULL;
    if (known) {
        atomic_store_explicit(&group->destroyed, 1, memory_order_relaxed);
        tu_registry_remove(world->registry, group);
    }
    pthread_mutex_unlock(&world->lock);
    if (!known)
        return tu_error(TUTTI_ERROR_ARGUMENT, "group %s is already destroyed", group->name);
    tutti_group_release(group); /* the registry's reference */
    return TUTTI_OK;
}

/* ---- rooms ---- */

/* ---- finding ---- */

tutti_group *tutti_group_by_name(tutti_world *world, const char *name) {
    TU_INSIDE(world);
    if (name == NULL || tu_world_check(world) != TUTTI_OK)
        return NULL;
    pthread_mutex_lock(&world->lock);
    tutti_group *group = tu_registry_name(world->registry, name);
    pthread_mutex_unlock(&world->lock);
    return group;
}

tutti_group *tutti_group_find(tutti_world *world, const char *tag, const int *ranks, int count) {
    TU_INSIDE(world);
    if (tu_world_check(world) != TUTTI_OK || (ranks == NULL && count > 0) || count < 0)
        return NULL;
    pthread_mutex_lock(&world->lock);
    tutti_group *group = tu_registry_find(world->registry, tag, ranks, count);
    pthread_mutex_unlock(&world->lock);
    return group;
}

int tutti_group_enumerate(tutti_world *world, tutti_group **groups, int room) {
    TU_INSIDE(world);
    if (tu_world_check(world) != TUTTI_OK)
        return 0;
    pthread_mutex_lock(&world->lock);
    int count = 0;
    for (tutti_group *group = tu_registry_next(world->registry, NULL); group != NULL;
         group = tu_registry_next(world->registry, group)) {
        if (count < room)
            groups[count] = group;
        count++;
    }
    pthread_mutex_unlock(&world->lock);
    return count;
}
