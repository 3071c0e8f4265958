/* SPDX-License-Identifier: Apache-2.0 */
#include "world/registry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "world/group.h"

#define TAG_BYTES 128

/* Groups of one tag, in order of creation. */
typedef struct tag_list {
    struct tag_list *next; /* in its bucket */
    struct tag_entry *first, *last;
    uint64_t hash;
    char tag[TAG_BYTES];
} tag_list;

typedef struct tag_entry {
    struct tag_entry *before, *after;
    tag_list *list;
    tutti_group *group;
} tag_entry;

/* One group's place in everything. */
struct tu_group_links {
    struct tu_group_links *before, *after; /* all groups, in order of creation */
    struct tu_group_links *next;           /* in the bucket of its name */
    tutti_group *group;
    uint64_t name_hash;
    tu_rank_list *ranks;
    tag_entry tags[2]; /* its own tag, and "" where the user gave none */
    int tag_count;
};

/* A power of two of buckets, doubled when there are more entries than buckets; `next` and `hash` are read through the
 * accessors below. */
struct tu_registry {
    uint64_t counter;
    int count;
    struct tu_group_links *first, *last;
    struct tu_group_links **names;
    tag_list **tags;
    tu_rank_list **lists;
    size_t name_buckets, tag_buckets, list_buckets;
    size_t tag_count, list_count;
};

static uint64_t hash_bytes(const void *data, size_t bytes) {
    const unsigned char *from = data;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ from[i]) * UINT64_C(0x100000001b3);
    return hash ^ hash >> 29;
}

static uint64_t hash_text(const char *text) {
    return hash_bytes(text, strlen(text));
}

/* ---- tables: chained, grown by doubling ---- */

#define FIRST_BUCKETS 16

#define GROW(type, table, buckets, hash_of)                                           \
    do {                                                                              \
        type **wider = calloc(2 * (buckets), sizeof *wider);                          \
        if (wider == NULL)                                                            \
            break; /* it only stays slower */                                         \
        for (size_t bucket = 0; bucket < (buckets); bucket++)                         \
            for (type *entry = (table)[bucket], *next; entry != NULL; entry = next) { \
                next = entry->next;                                                   \
                size_t to = entry->hash_of & (2 * (buckets)-1);                       \
                entry->next = wider[to];                                              \
                wider[to] = entry;                                                    \
            }                                                                         \
        free(table);                                                                  \
        (table) = wider;                                                              \
        (buckets) *= 2;                                                               \
    } while (0)

tutti_status tu_registry_create(tu_registry **out) {
    tu_registry *registry = calloc(1, sizeof *registry);
    if (registry == NULL)
        return tu_error_memory("the registry of groups", sizeof *registry);
    registry->name_buckets = registry->tag_buckets = registry->list_buckets = FIRST_BUCKETS;
    registry->names = calloc(FIRST_BUCKETS, sizeof *registry->names);
    registry->tags = calloc(FIRST_BUCKETS, sizeof *registry->tags);
    registry->lists = calloc(FIRST_BUCKETS, sizeof *registry->lists);
    if (registry->names == NULL || registry->tags == NULL || registry->lists == NULL) {
        tu_registry_free(registry);
        return tu_error_memory("the registry of groups", 3 * FIRST_BUCKETS * sizeof(void *));
    }
    *out = registry;
    return TUTTI_OK;
}

void tu_registry_free(tu_registry *registry) {
    if (registry == NULL)
        return;
    for (size_t bucket = 0; bucket < registry->list_buckets && registry->lists != NULL; bucket++)
        for (tu_rank_list *list = registry->lists[bucket], *next; list != NULL; list = next) {
            next = list->next;
            free(list);
        }
    for (size_t bucket = 0; bucket < registry->tag_buckets && registry->tags != NULL; bucket++)
        for (tag_list *list = registry->tags[bucket], *next; list != NULL; list = next) {
            next = list->next;
            free(list);
        }
    free(registry->names);
    free(registry->tags);
    free(registry->lists);
    free(registry);
}

uint64_t tu_registry_number(tu_registry *registry) {
    return registry->counter++;
}

uint64_t tu_registry_counter(const tu_registry *registry) {
    return registry->counter;
}

void tu_registry_count_on(tu_registry *registry, uint64_t counter) {
    if (registry->counter < counter)
        registry->counter = counter;
}

tu_rank_list *tu_registry_ranks(tu_registry *registry, const int *ranks, int count) {
    uint64_t hash = hash_bytes(ranks, sizeof(int) * (size_t)count);
    size_t bucket = hash & (registry->list_buckets - 1);
    for (tu_rank_list *list = registry->lists[bucket]; list != NULL; list = list->next)
        if (list->hash == hash && list->count == count && memcmp(list->ranks, ranks, sizeof(int) * (size_t)count) == 0)
            return list;
    tu_rank_list *list = calloc(1, sizeof *list + sizeof(int) * (size_t)count);
    if (list == NULL)
        return NULL;
    list->hash = hash;
    list->count = count;
    memcpy(list->ranks, ranks, sizeof(int) * (size_t)count);
    list->next = registry->lists[bucket];
    registry->lists[bucket] = list;
    if (++registry->list_count > registry->list_buckets)
        GROW(tu_rank_list, registry->lists, registry->list_buckets, hash);
    return list;
}

static tag_list *find_tag(const tu_registry *registry, const char *tag) {
    uint64_t hash = hash_text(tag);
    for (tag_list *list = registry->tags[hash & (registry->tag_buckets - 1)]; list != NULL; list = list->next)
        if (list->hash == hash && strcmp(list->tag, tag) == 0)
            return list;
    return NULL;
}

static tag_list *make_tag(tu_registry *registry, const char *tag) {
    tag_list *list = find_tag(registry, tag);
    if (list != NULL)
        return list;
    list = calloc(1, sizeof *list);
    if (list == NULL)
        return NULL;
    snprintf(list->tag, sizeof list->tag, "%s", tag);
    list->hash = hash_text(tag);
    size_t bucket = list->hash & (registry->tag_buckets - 1);
    list->next = registry->tags[bucket];
    registry->tags[bucket] = list;
    if (++registry->tag_count > registry->tag_buckets)
        GROW(tag_list, registry->tags, registry->tag_buckets, hash);
    return list;
}

/* A tag list that became empty goes, so that a thousand short-lived groups leave nothing. */
static void drop_tag(tu_registry *registry, tag_list *list) {
    tag_list **link = &registry->tags[list->hash & (registry->tag_buckets - 1)];
    while (*link != list)
        link = &(*link)->next;
    *link = list->next;
    registry->tag_count--;
    free(list);
}

/* ---- groups ---- */

/* "" stays, "ptd:…" and "user:…" stay, T becomes "user:T". */
static void normalise_tag(const char *tag, char *normal, size_t bytes) {
    if (tag == NULL || tag[0] == 0)
        snprintf(normal, bytes, "%s", "");
    else if (strncmp(tag, "ptd:", 4) == 0 || strncmp(tag, "user:", 5) == 0)
        snprintf(normal, bytes, "%s", tag);
    else
        snprintf(normal, bytes, "user:%s", tag);
}

tutti_status tu_registry_prepare(tu_registry *registry, tutti_group *group, const char *tag) {
    struct tu_group_links *links = calloc(1, sizeof *links);
    if (links == NULL)
        return tu_error_memory("a group's place in the registry", sizeof *links);
    links->group = group;
    links->name_hash = hash_text(group->name);
    links->ranks = tu_registry_ranks(registry, group->ranks, group->size);
    if (links->ranks == NULL) {
        free(links);
        return tu_error_memory("a list of ranks", sizeof(int) * (size_t)group->size);
    }
    if (tag[0] == 0)
        snprintf(group->tag, sizeof group->tag, "ptd:%s", group->name);
    else
        normalise_tag(tag, group->tag, sizeof group->tag);
    links->tag_count = tag[0] == 0 ? 2 : 1;
    const char *names[2] = { group->tag, "" };
    for (int i = 0; i < links->tag_count; i++) {
        links->tags[i].group = group;
        links->tags[i].list = make_tag(registry, names[i]);
        if (links->tags[i].list == NULL) {
            if (i > 0 && links->tags[0].list->first == NULL)
                drop_tag(registry, links->tags[0].list);
            free(links);
            return tu_error_memory("a tag", sizeof(tag_list));
        }
    }
    group->links = links;
    return TUTTI_OK;
}

void tu_registry_add(tu_registry *registry, tutti_group *group) {
    struct tu_group_links *links = group->links;
    links->before = registry->last;
    *(registry->last != NULL ? &registry->last->after : &registry->first) = links;
    registry->last = links;
    size_t bucket = links->name_hash & (registry->name_buckets - 1);
    links->next = registry->names[bucket];
    registry->names[bucket] = links;
    for (int i = 0; i < links->tag_count; i++) {
        tag_entry *entry = &links->tags[i];
        tag_list *list = entry->list;
        entry->before = list->last;
        *(list->last != NULL ? &list->last->after : &list->first) = entry;
        list->last = entry;
    }
    links->ranks->living++;
    if ((size_t)++registry->count > registry->name_buckets)
        GROW(struct tu_group_links, registry->names, registry->name_buckets, name_hash);
}

void tu_registry_remove(tu_registry *registry, tutti_group *group) {
    struct tu_group_links *links = group->links;
    if (links == NULL)
        return;
    *(links->before != NULL ? &links->before->after : &registry->first) = links->after;
    *(links->after != NULL ? &links->after->before : &registry->last) = links->before;
    struct tu_group_links **link = &registry->names[links->name_hash & (registry->name_buckets - 1)];
    while (*link != links)
        link = &(*link)->next;
    *link = links->next;
    for (int i = 0; i < links->tag_count; i++) {
        tag_entry *entry = &links->tags[i];
        tag_list *list = entry->list;
        *(entry->before != NULL ? &entry->before->after : &list->first) = entry->after;
        *(entry->after != NULL ? &entry->after->before : &list->last) = entry->before;
        if (list->first == NULL)
            drop_tag(registry, list);
    }
    links->ranks->living--;
    registry->count--;
    group->links = NULL;
    free(links);
}

tutti_group *tu_registry_name(const tu_registry *registry, const char *name) {
    uint64_t hash = hash_text(name);
    for (struct tu_group_links *links = registry->names[hash & (registry->name_buckets - 1)]; links != NULL;
         links = links->next)
        if (links->name_hash == hash && strcmp(links->group->name, name) == 0)
            return links->group;
    return NULL;
}

tutti_group *tu_registry_find(const tu_registry *registry, const char *tag, const int *ranks, int count) {
    char normal[TAG_BYTES];
    normalise_tag(tag, normal, sizeof normal);
    const tag_list *list = find_tag(registry, normal);
    for (tag_entry *entry = list != NULL ? list->first : NULL; entry != NULL; entry = entry->after) {
        if (entry->group->size != count)
            continue;
        int found = 0;
        while (found < count && tu_rank_index(entry->group->ranks, count, ranks[found]) >= 0)
            found++;
        if (found == count)
            return entry->group;
    }
    return NULL;
}

tutti_group *tu_registry_next(const tu_registry *registry, const tutti_group *group) {
    struct tu_group_links *links = group == NULL ? registry->first : group->links != NULL ? group->links->after : NULL;
    return links != NULL ? links->group : NULL;
}

int tu_registry_count(const tu_registry *registry) {
    return registry->count;
}
