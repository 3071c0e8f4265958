/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups: ordered subsets of a world's ranks, in which collectives run.
 *
 *     int pair[] = { 0, 1 };
 *     tutti_group *group;
 *     tutti_group_new(world, pair, 2, NULL, &group);          // all ranks of the world call it
 *     if (group != TUTTI_NON_GROUP_MEMBER) …                    // ranks 0 and 1
 *
 * Concurrent calls on one group are safe; their order is the caller's business, and the mismatch check says when it
 * differs between ranks. Rank arguments are ranks of the group unless a name says world_rank.
 *
 * LIFE. A group belongs to its world: it lives, and can be found by name and by tag, until tutti_group_destroy or
 * tutti_world_close. What a function returns through its last pointer is besides that a reference of the caller's,
 * which ends with tutti_group_release; tutti_world_close lists references that are still held.
 *
 * WHAT AN ERROR ENDS. A wrong argument ends nothing. An agreement that fails alike for all ends nothing. An operation
 * of a group that fails by death, mismatch, abort or its deadline ends that group on every rank with the first cause:
 * later calls on it return that cause at once; only queries, abort, shrink and release still work.
 */
#ifndef TUTTI_GROUP_H
#define TUTTI_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a rank gets that is no member of a new group. Queries on it answer -1 or NULL, collectives do nothing but warn,
 * destroying and releasing it do nothing. */
#define TUTTI_NON_GROUP_MEMBER ((tutti_group *)(intptr_t)-100)

/* A rank that does not exist, beyond the edge of a grid: sends to it and receives from it return at once. */
#define TUTTI_NOBODY (-2)

/* ---- asking ---- */

/* This rank in the group. */
TUTTI_API int tutti_group_rank(const tutti_group *group);
/* How many ranks the group has. */
TUTTI_API int tutti_group_size(const tutti_group *group);
/* "0" is the default group. Unique among the living groups of a world; the same on all members. */
TUTTI_API const char *tutti_group_name(const tutti_group *group);
/* For people: "default_pg", "undefined", or what the options said. */
TUTTI_API const char *tutti_group_description(const tutti_group *group);
/* The world it belongs to; lent. */
TUTTI_API tutti_world *tutti_group_world(const tutti_group *group);

/* World ranks in group order, tutti_group_size entries; lent. */
TUTTI_API const int *tutti_group_ranks(const tutti_group *group);

/* From world rank to rank of the group. Not a member, or out of range: TUTTI_ERROR_ARGUMENT. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_rank_of(const tutti_group *group, int world_rank, int *rank);
/* From rank of the group to world rank. Out of range: TUTTI_ERROR_ARGUMENT. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_world_rank(const tutti_group *group, int rank, int *world_rank);

/* The number of the last operation that this rank began; 0: none yet. */
TUTTI_API uint64_t tutti_group_sequence(const tutti_group *group);
/* The number of the last operation that this rank completed; 0: none yet. */
TUTTI_API uint64_t tutti_group_completed(const tutti_group *group);

/* The default deadline of its operations, in nanoseconds. */
TUTTI_API int64_t tutti_group_timeout(const tutti_group *group);
/* Local. 0: the world's again. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_set_timeout(tutti_group *group, int64_t timeout_ns);

/* TUTTI_OK while the group lives, else the cause that ended it. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_check(tutti_group *group);

/* Another reference to the group. */
TUTTI_API tutti_group *tutti_group_keep(tutti_group *group);
/* Ends one reference. NULL is allowed. */
TUTTI_API void tutti_group_release(tutti_group *group);

/* ---- making ---- */

typedef struct tutti_group_options {
    size_t size;
    const char *name; /* NULL: the world's counter, "1", "2", …; with local_synchronization a SHA-1 of the ranks */
    const char *tag;  /* NULL or "": none. Where a group of that tag and those ranks exists, it is returned. */
    const char *description;
    int64_t timeout_ns;         /* of its operations, and of making it; 0: the world's */
    bool keep_order;            /* group rank i is ranks[i]; else the ranks are sorted first */
    bool local_synchronization; /* only the members call (others may: they return at once) */
} tutti_group_options;
#define TUTTI_GROUP_OPTIONS_INIT TUTTI_DEFAULTS(tutti_group_options)
/* TUTTI_GROUP_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_group_options_init(tutti_group_options *options, size_t size);

/* Collective over the world: every rank calls it with the same arguments, in the same order, members or not, unless
 * local_synchronization is set. ranks NULL: the whole world. Differing arguments are TUTTI_ERROR_MISMATCH on every
 * rank. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_new(tutti_world *world, const int *ranks, int count,
                                                     const tutti_group_options *options, tutti_group **group);

/* Cuts the parent's ranks into consecutive blocks of `block` ranks, each a group. *mine is this rank's; all (may be
 * NULL) receives the parent size / block groups in order, TUTTI_NON_GROUP_MEMBER for the others', lent. Collective over
 * the parent. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_new_subgroups(tutti_group *parent, int block,
                                                               const tutti_group_options *options, tutti_group **all,
                                                               tutti_group **mine);

/* One group per list of world ranks; a rank in no list gets TUTTI_NON_GROUP_MEMBER. Collective over the world. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_new_subgroups_by_enumeration(tutti_world *world,
                                                                              const int *const *lists,
                                                                              const int *counts, int list_count,
                                                                              const tutti_group_options *options,
                                                                              tutti_group **all, tutti_group **mine);

/* The same with lists of the parent's group ranks, and in one agreement. Collective over the parent alone. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_split(tutti_group *parent, const int *const *lists, const int *counts,
                                                       int list_count, const tutti_group_options *options,
                                                       tutti_group **mine);

/* Takes the group out of its world: its name and tag are free again, and further operations on it are errors. Local.
 * The default group cannot be destroyed: it ends with its world. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_destroy(tutti_group *group);

/* Ends every wait in the group on all ranks, now and later, with TUTTI_ERROR_ABORTED, the reason and this rank. Any
 * thread. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_abort(tutti_group *group, const char *reason);

/* ---- going on after a loss ----
 *
 *     while ((status = step(group)) == TUTTI_OK) …
 *     tutti_group *rest;
 *     if (tutti_group_shrink(group, NULL, &rest) == TUTTI_OK)
 *         …                          // the survivors go on after operation tutti_group_settled(rest)
 *
 * Both calls work on groups that have ended, tolerate deaths while they run, of any rank at any moment, and give all
 * ranks the same answer. When they fail they fail alike on all ranks that came, end nothing, and may be called again.
 * Where ranks are on several hosts they agree in the store of the job: a rank that does not reach it gets
 * TUTTI_ERROR_NETWORK, one whose host was given up, or that is left with fewer than those that nobody can account for,
 * TUTTI_ERROR_DEAD, and one that the others had to leave out TUTTI_ERROR_STATE: such a rank ends (docs/hosts.md). */

typedef struct tutti_shrink_options {
    size_t size;
    const int *exclude; /* ranks of the group to leave out besides the dead, the same on all callers; they need not be
                           dead and do not call */
    int exclude_count;
    int64_t timeout_ns; /* of this call; 0: the group's */
} tutti_shrink_options;
#define TUTTI_SHRINK_OPTIONS_INIT TUTTI_DEFAULTS(tutti_shrink_options)
/* TUTTI_SHRINK_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_shrink_options_init(tutti_shrink_options *options, size_t size);

/* A new group of the survivors, in the old order: all members but those that died, closed their worlds or are excluded.
 * A rank that lives and does not come until the deadline fails it with TUTTI_ERROR_TIMEOUT, by name. The old group,
 * other groups and symmetric memory stay as they are: rendezvous the blocks with the new group. Call it when none of
 * this rank's works on the group is unfinished. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_shrink(tutti_group *group, const tutti_shrink_options *options,
                                                        tutti_group **rest);

/* Whole again: newcomers take the places of the dead. Every rank of the world that lives calls it, with the world's
 * group (tutti_world_group), which has ended. `tutti run --refill` starts the program anew for a rank that died; there
 * tutti_world_open waits until the others are here, and returns a world like theirs. *whole is a group of all ranks, in
 * the old order, and tutti_world_group gives it from now on, on old ranks and new. Groups that counted on the dead
 * ranks have ended: make them anew. Symmetric memory stays: rendezvous the blocks with the new group, for which the
 * newcomer allocates its own. timeout_ns 0: the group's; nobody who came to take a rank's place until then is
 * TUTTI_ERROR_TIMEOUT, by name. Where the launcher says that nobody will come, since --refill was not given or is used
 * up, it is TUTTI_ERROR_STATE on every rank, at once. After a failure it may be called again. Ranks must be processes
 * of one host. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_refill(tutti_group *group, int64_t timeout_ns, tutti_group **whole);

/* Of a group that came from tutti_group_shrink: the sequence number of the last operation that every one of its members
 * had completed in the old group. A death may let some ranks finish an operation and fail it for others: a rank whose
 * tutti_group_completed(old) is higher takes the step back, and nobody is one off. 0 for other groups. */
TUTTI_API uint64_t tutti_group_settled(const tutti_group *group);

/* *all: whether `mine` was true on every member that came. Every member that lives calls it; the end of the group does
 * not end it. Deaths do not disturb it: a rank that died before it said anything does not count. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_agree(tutti_group *group, bool mine, bool *all);

/* ---- finding ---- */

/* A tag as a lookup takes it: "" finds groups that were made without one; "T" and "user:T" find those made with tag T;
 * "ptd:NAME" finds the untagged group of that name. */

/* The tag with which tutti_group_find finds exactly this group again: T, or "ptd:NAME" where it was made without
 * one. */
TUTTI_API const char *tutti_group_tag(const tutti_group *group);

/* The oldest group of that tag with exactly these world ranks, in any order; lent; NULL when there is none. */
TUTTI_API tutti_group *tutti_group_find(tutti_world *world, const char *tag, const int *ranks, int count);

/* The group of that name; lent; NULL when there is none. */
TUTTI_API tutti_group *tutti_group_by_name(tutti_world *world, const char *name);

/* Cuts `ranks` into blocks of `stride`, and finds, or makes with this tag, the group of the block that holds this rank.
 * Members of a block call it alike; a group without tag is never made. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_find_or_new(tutti_world *world, const char *tag, const int *ranks,
                                                             int count, int stride, tutti_group **group);

/* Every living group of this rank in the order of creation: up to `room` are written to `groups` (lent); returns how
 * many there are. */
TUTTI_API int tutti_group_enumerate(tutti_world *world, tutti_group **groups, int room);

/* ---- the ways to name a group in one argument ---- */

struct tutti_mesh;

typedef enum tutti_group_form_kind {
    TUTTI_FORM_GROUP = 1,
    TUTTI_FORM_NAME = 2,
    TUTTI_FORM_RANKS = 3,   /* one list of world ranks */
    TUTTI_FORM_LISTS = 4,   /* several lists of equal length; the caller's own counts */
    TUTTI_FORM_MESH = 5,    /* of one dimension */
    TUTTI_FORM_MESH_DIM = 6 /* a mesh and one of its dimensions */
} tutti_group_form_kind;

/* Made by one of the functions below, which write all of it: a form does not grow. */
typedef struct tutti_group_form {
    size_t size;
    tutti_group_form_kind kind;
    int count; /* of `ranks`, or of `lists` */
    int dim;   /* of `mesh` */
    tutti_group *group;
    const char *name;
    const int *ranks;
    const int *const *lists;
    const int *counts; /* of the ranks in each of `lists` */
    struct tutti_mesh *mesh;
} tutti_group_form;

/* They fill *form in and return it, so that one can be made where it is used:
 *
 *     tutti_group_resolve(world, tutti_form_name(&(tutti_group_form){ 0 }, "1"), NULL, &group);
 *
 * A form lends what it is made of. Whether that makes sense is checked where the form is used. */

/* The group itself. */
TUTTI_API const tutti_group_form *tutti_form_group(tutti_group_form *form, tutti_group *group);
/* The group of that name. */
TUTTI_API const tutti_group_form *tutti_form_name(tutti_group_form *form, const char *name);
/* The group of these world ranks. */
TUTTI_API const tutti_group_form *tutti_form_ranks(tutti_group_form *form, const int *ranks, int count);
/* Of several lists of world ranks, counts[i] in list i, the one that holds the caller. */
TUTTI_API const tutti_group_form *tutti_form_lists(tutti_group_form *form, const int *const *lists, const int *counts,
                                                   int count);
/* The group of a mesh of one dimension. */
TUTTI_API const tutti_group_form *tutti_form_mesh(tutti_group_form *form, struct tutti_mesh *mesh);
/* The caller's group along one dimension of a mesh. */
TUTTI_API const tutti_group_form *tutti_form_mesh_dim(tutti_group_form *form, struct tutti_mesh *mesh, int dim);

/* What a form stands for, spelled out. */
typedef struct tutti_group_expansion {
    size_t size;
    char tag[128];
    int *ranks; /* of all lists, in order; freed with tutti_free */
    int rank_count;
    int group_size; /* length of one list */
} tutti_group_expansion;
#define TUTTI_GROUP_EXPANSION_INIT TUTTI_DEFAULTS(tutti_group_expansion)
/* TUTTI_GROUP_EXPANSION_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_group_expansion_init(tutti_group_expansion *group_expansion, size_t size);

/* Local. `tag` (NULL or "": none) is used for lists, and for groups wins over their own. A name cannot be expanded. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_expand(tutti_world *world, const tutti_group_form *form,
                                                        const char *tag, tutti_group_expansion *expansion);

/* Local: finds the group that the form means for this rank, and never makes one. `tag` matters for lists only. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_resolve(tutti_world *world, const tutti_group_form *form,
                                                         const char *tag, tutti_group **group);

#ifdef __cplusplus
}
#endif
#endif
