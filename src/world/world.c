/* SPDX-License-Identifier: Apache-2.0
 *
 * Worlds: opening, closing, and the handles that keep a closed world's memory.
 */
#include "world/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/instructions.h"
#include "base/pool.h"
#include "job/liveness.h"
#include "store/store.h"
#include "world/event.h"
#include "world/fault.h"
#include "world/group.h"
#include "world/launch.h"
#include "world/list.h"
#include "world/refill.h"
#include "world/registry.h"

/* ---- settings ---- */

/* "TUTTI_A=1,TUTTI_B=2": a comma separates where TUTTI_ follows, so that values may hold commas. */
static tutti_status apply_list(tu_settings *settings, const char *list) {
    char *copy = strdup(list), *item = copy;
    if (copy == NULL)
        return tu_error_memory("settings", strlen(list));
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK && item != NULL && item[0] != 0) {
        char *end = strstr(item, ",TUTTI_");
        if (end != NULL)
            *end = 0;
        char *value = strchr(item, '=');
        int setting = 0;
        if (value != NULL)
            *value++ = 0;
        while (setting < TU_SETTING_COUNT && strcmp(tu_setting_rows[setting].environment, item) != 0)
            setting++;
        if (value == NULL || setting == TU_SETTING_COUNT)
            status = tu_error(TUTTI_ERROR_ARGUMENT,
                              "tutti_world_options.settings: \"%s\" %s; write TUTTI_NAME=value,TUTTI_NAME=value", item,
                              value == NULL ? "has no value" : "is no setting of Tutti");
        else
            status = tu_settings_set(settings, (tu_setting)setting, value);
        item = end != NULL ? end + 1 : NULL;
    }
    free(copy);
    return status;
}

static tutti_status load_settings(tutti_world *world, const tutti_world_options *options) {
    tutti_status status = tu_settings_load(&world->settings);
    if (status != TUTTI_OK)
        return status;
    if (options->settings != NULL)
        status = apply_list(&world->settings, options->settings);
    char text[32];
    if (status == TUTTI_OK && options->timeout_ns < 0)
        status = tu_error(TUTTI_ERROR_ARGUMENT,
                          "tutti_world_options.timeout_ns is %lld; it must be 0 (TUTTI_TIMEOUT) or more",
                          (long long)options->timeout_ns);
    if (status == TUTTI_OK && options->timeout_ns > 0) {
        snprintf(text, sizeof text, "%lldns", (long long)options->timeout_ns);
        status = tu_settings_set(&world->settings, TU_SETTING_TIMEOUT, text);
    }
    if (status == TUTTI_OK && options->threads < TUTTI_NONE)
        status = tu_error(TUTTI_ERROR_ARGUMENT,
                          "tutti_world_options.threads is %d; it must be a number of threads, TUTTI_NONE, or 0 for the "
                          "default",
                          options->threads);
    if (status == TUTTI_OK && options->threads != 0) {
        snprintf(text, sizeof text, "%d", options->threads == TUTTI_NONE ? 0 : options->threads);
        status = tu_settings_set(&world->settings, TU_SETTING_THREADS, text);
    }
    if (status == TUTTI_OK && options->log != NULL)
        status = tu_settings_set(&world->settings, TU_SETTING_LOG, options->log);
    if (status == TUTTI_OK)
        status = tu_instructions_choose(tu_settings_text(&world->settings, TU_SETTING_ISA));
    if (status == TUTTI_OK) {
        world->timeout_ns = tu_settings_number(&world->settings, TU_SETTING_TIMEOUT);
        if (world->timeout_ns <= 0)
            status =
                tu_error(TUTTI_ERROR_ARGUMENT,
                         "TUTTI_TIMEOUT is 0; no call waits for ever and none can wait not at all: give a duration");
    }
    if (status != TUTTI_OK)
        tu_settings_free(&world->settings);
    return status;
}

static void warn_unknown(const char *name, const char *nearest, void *argument) {
    const tutti_world *world = argument;
    TU_LOG(TUTTI_LOG_WARN, world->log, "world", "unknown setting %s in the environment; did you mean %s?", name,
           nearest);
}

/* ---- opening ---- */

/* The object with its settings and its log; no rank yet. */
static tutti_status make_world(const tutti_world_options *options, tutti_world **out) {
    const char *name = options->name != NULL ? options->name : "default";
    if (name[0] == 0 || strlen(name) >= sizeof(*out)->name || strpbrk(name, "/\n") != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a world's name has 1 to %zu characters and no slash; \"%s\" has not",
                        sizeof(*out)->name - 1, name);
    tutti_world *world = calloc(1, sizeof *world);
    if (world == NULL)
        return tu_error_memory("a world", sizeof *world);
    snprintf(world->name, sizeof world->name, "%s", name);
    atomic_init(&world->handles, 1);
    pthread_mutex_init(&world->lock, NULL);
    tu_attachments_init(&world->attachments, world);
    tutti_status status = load_settings(world, options);
    if (status != TUTTI_OK)
        goto destroy_locks;
    status = tu_log_create(tu_settings_text(&world->settings, TU_SETTING_LOG),
                           tu_settings_text(&world->settings, TU_SETTING_LOG_FILE), options->log_callback,
                           options->log_user, &world->log);
    if (status != TUTTI_OK)
        goto free_settings;
    status = tu_registry_create(&world->registry);
    if (status != TUTTI_OK)
        goto free_log;
    *out = world;
    return TUTTI_OK;

free_log:
    tu_log_free(world->log);
free_settings:
    tu_settings_free(&world->settings);
destroy_locks:
    pthread_mutex_destroy(&world->lock);
    tu_attachments_end(&world->attachments);
    free(world);
    return status;
}

/* What is left of a world that has no handles any more. */
static void free_world(tutti_world *world) {
    tu_attachments_end(&world->attachments);
    if (world->job != NULL)
        tu_job_close(world->job);
    if (world->store != NULL)
        tutti_store_release(world->store);
    tu_watch_end(world->watch); /* a clone of the store may live on */
    tu_watch_release(world->watch);
    tu_watch_release(world->calm);
    tu_watch_release(world->asking);
    free(world->mourned);
    tu_news_close(world->news);
    world->news = NULL;
    tu_faults_free(world->faults);
    tu_registry_free(world->registry);
    if (world->job_rank_of != NULL)
        tu_pool_unshare();
    free(world->job_rank_of);
    tu_log_free(world->log);
    tu_settings_free(&world->settings);
    pthread_mutex_destroy(&world->lock);
    world->job = NULL;
    world->store = NULL;
    world->log = NULL;
    world->job_rank_of = world->node_of = NULL;
    if (atomic_load_explicit(&world->closed, memory_order_relaxed) != 0)
        tu_worlds_bury(world);
    else
        tu_world_free_shells(world); /* it never opened: nobody knows of it */
}

/* Whether this process was started to take a dead rank's place. */
static bool is_newcomer(const tutti_world *world, const tu_launch *launch) {
    return launch->size > 1 && tu_settings_text(&world->settings, TU_SETTING_REFILL)[0] != 0 &&
           tu_settings_number(&world->settings, TU_SETTING_REFILL) > 0;
}

static tutti_status open_job(tutti_world *world, const tu_launch *launch, int64_t deadline, tu_first_rank *first) {
    tutti_store *store = NULL;
    int64_t entries = tu_settings_number(&world->settings, TU_SETTING_TRACE_ENTRIES);
    if (entries < TU_RECORDER_LEAST || entries > TU_RECORDER_MOST)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_TRACE_ENTRIES is %lld; it must be from %d to %d",
                        (long long)entries, TU_RECORDER_LEAST, TU_RECORDER_MOST);
    tutti_status status = tu_launch_meet(launch, world, deadline, &world->store);
    if (status == TUTTI_OK && world->store == NULL) /* alone: a job of one has nobody to meet */
        status = tutti_store_open_memory(&store);
    if (status != TUTTI_OK)
        return status;
    if (world->store != NULL && launch->rank_0_hosts && launch->rank != 0)
        tu_first_rank_note(first, tu_store_server(world->store));
    tu_job_options options = {
        .store = world->store != NULL ? world->store : store,
        .name = world->name,
        .world_rank = world->rank,
        .world_size = world->size,
        .deadline = deadline,
        .interrupt = &world->interrupt,
        .log = world->log,
        .spin = tu_settings_text(&world->settings, TU_SETTING_SPIN)[0] != 0
                    ? tu_settings_number(&world->settings, TU_SETTING_SPIN)
                    : -1,
        .homes = tu_settings_number(&world->settings, TU_SETTING_HOMES) != 0,
        .recorder_entries = entries,
        .first = first,
    };
    status =
        is_newcomer(world, launch) ? tu_refill_join(world, &options, deadline) : tu_job_open(&options, &world->job);
    tutti_store_release(store);
    if (status != TUTTI_OK) {
        tutti_store_release(world->store);
        world->store = NULL;
    }
    return status;
}

static tutti_status no_answer(const tutti_world *world) {
    return tu_error(
        TUTTI_ERROR_TIMEOUT,
        "timeout while opening world \"%s\": the store's server does not answer rank %d; is the process that "
        "serves it stopped? They meet at %s",
        world->name, world->rank, world->meeting);
}

/* A server that rank 0 still keeps from an earlier opening ends when rank 0 comes here too; whoever was quicker and met
 * it tries again. */
static tutti_status find_the_others(tutti_world *world, const tu_launch *launch, int64_t deadline,
                                    tu_first_rank *first) {
    for (;;) {
        tutti_status status = open_job(world, launch, deadline, first);
        bool lost = status == TUTTI_ERROR_NETWORK || status == TUTTI_ERROR_STORE;
        if (!lost || !launch->rank_0_hosts || launch->rank == 0)
            return status;
        tutti_status dead = tu_first_rank_check(first);
        if (dead != TUTTI_OK)
            return dead;
        if (tu_clock_now() >= deadline) /* of one that was met before it is known that it is there */
            return first->pid != 0 ? no_answer(world) : status;
        TU_LOG(TUTTI_LOG_INFO, world->log, "world", "the meeting place went away; trying again: %s",
               tutti_error_message());
        nanosleep(&(struct timespec){ .tv_nsec = 20 * TU_MILLISECOND }, NULL);
    }
}

/* ---- who looks around while a store call waits ---- */

static tutti_status look_calmly(void *argument) {
    const tutti_world *world = argument;
    if (atomic_load_explicit(&world->interrupt, memory_order_relaxed) != 0)
        return tu_error(TUTTI_ERROR_INTERRUPTED,
                        "a wait on the store of world \"%s\" was interrupted on rank %d by tutti_world_interrupt",
                        world->name, world->rank);
    if (atomic_load_explicit(&world->closed, memory_order_acquire) != 0)
        return tu_error(TUTTI_ERROR_STATE, "world \"%s\" was closed during a wait on its store", world->name);
    return TUTTI_OK;
}

/* A server that the launchers have lost answers nothing any more, and whoever asks it on the way to something else has
 * to go on. That costs the connection, so nothing less ends a question: a server that is busy is waited for, and the
 * connection to one that is lost is made anew where another takes its place (tu_world_follow). */
static tutti_status look_for_server(void *argument) {
    const tutti_world *world = argument;
    const tu_news *news = world->news;
    char text[256];
    int port;
    if (news == NULL)
        return TUTTI_OK;
    bool moved = tu_news_store(news, text, sizeof text, &port) !=
                 atomic_load_explicit(&world->moves, memory_order_acquire); /* pairs with tu_world_follow */
    if (!moved && !tu_news_electing(news) && !tu_news_cut_off(news, text, sizeof text))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_NETWORK, "the launchers have lost the one that serves the store of world \"%s\"",
                    world->name);
}

/* Waits on the world's store end with a death that nobody was told of yet, an abort, an interrupt or the close. */
static tutti_status look_at_world(void *argument) {
    tutti_world *world = argument;
    tutti_status calm = look_calmly(world);
    if (calm != TUTTI_OK)
        return calm;
    int dead = tu_world_first_dead(world, NULL, world->size, world->mourned, true);
    if (dead >= 0) {
        tutti_status status = tu_world_departed_error(world, dead, "in a wait on the world's store");
        tu_error_at_fault(dead);
        return status;
    }
    uint64_t state = atomic_load_explicit(&world->group->page->state, memory_order_acquire);
    const tu_cause *cause = &world->group->page->cause;
    bool aborted =
        (state & TU_GROUP_TOLD) != 0 && cause->status == TUTTI_ERROR_ABORTED && tu_watch_concerns(cause->time);
    return aborted ? tu_group_cause(world->group) : TUTTI_OK;
}

static tutti_status watch_store(tutti_world *world) {
    world->mourned = calloc((size_t)world->size, sizeof *world->mourned);
    if (world->mourned == NULL)
        return tu_error_memory("the ranks of the world", (size_t)world->size);
    if (world->store == NULL)
        return TUTTI_OK;
    tutti_status status = tu_watch_new(look_calmly, world, false, &world->calm);
    if (status == TUTTI_OK)
        status = tu_watch_new(look_for_server, world, true, &world->asking);
    if (status == TUTTI_OK)
        status = tu_watch_new(look_at_world, world, false, &world->watch);
    if (status == TUTTI_OK)
        tu_store_set_watch(world->store, world->watch);
    return status;
}

/* While a world opens: its deadline holds for whatever the store's server owes, and an interrupt is heard. */
typedef struct opening {
    const tutti_world *world;
    int64_t deadline;
    bool hosted; /* rank 0 serves the store: nobody meets there any more when it is dead */
    tu_first_rank first;
} opening;
#define OPENING_GRACE (300 * TU_MILLISECOND) /* for telling why */

/* The rank that will not come any more, as far as the launcher knows: of several the first, since others end for that.
 */
static tutti_status look_for_dead(const tutti_world *world) {
    int first = -1;
    for (int rank = 0; tu_news_departures(world->news) > 0 && rank < world->size; rank++) {
        tu_news_state state = tu_news_of(world->news, rank);
        if ((state == TU_NEWS_DEAD || state == TU_NEWS_LOST) &&
            (first < 0 || tu_news_when(world->news, rank) < tu_news_when(world->news, first)))
            first = rank;
    }
    if (first < 0)
        return TUTTI_OK;
    char text[384];
    tu_news_text(world->news, first, text, sizeof text);
    tu_error(TUTTI_ERROR_DEAD, "%s, seen by rank %d while opening world \"%s\"", text, world->rank, world->name);
    tu_error_at_fault(first);
    return TUTTI_ERROR_DEAD;
}

static tutti_status look_at_opening(void *argument) {
    const opening *opening = argument;
    const tutti_world *world = opening->world;
    if (atomic_load_explicit(&world->interrupt, memory_order_relaxed) != 0)
        return tu_error(TUTTI_ERROR_INTERRUPTED, "rank %d was interrupted while opening world \"%s\"", world->rank,
                        world->name);
    tutti_status status = opening->hosted ? tu_first_rank_check(&opening->first) : TUTTI_OK;
    if (status == TUTTI_OK && world->news != NULL)
        status = look_for_dead(world);
    if (status != TUTTI_OK || tu_clock_now() < opening->deadline + OPENING_GRACE)
        return status;
    return no_answer(world);
}

tutti_status tu_world_place_ranks(tutti_world *world) {
    world->local_rank = tu_job_rank(world->job);
    world->local_size = tu_job_size(world->job);
    world->job_rank_of = malloc(2 * sizeof(int) * (size_t)world->size);
    if (world->job_rank_of == NULL)
        return tu_error_memory("the ranks of the world", 2 * sizeof(int) * (size_t)world->size);
    world->node_of = world->job_rank_of + world->size;
    tu_pool_share(tu_job_cores(world->job) / world->local_size); /* until job_rank_of goes */
    for (int rank = 0; rank < world->size; rank++) {
        world->job_rank_of[rank] = -1;
        world->node_of[rank] = tu_job_node(world->job, rank);
    }
    world->node = world->node_of[world->rank];
    world->nodes = tu_job_nodes(world->job);
    for (int rank = 0; rank < world->local_size; rank++)
        world->job_rank_of[tu_job_world_rank(world->job, rank)] = rank;
    return TUTTI_OK;
}

static tutti_status find_the_others_in_time(tutti_world *world, const tu_launch *launch, int64_t deadline) {
    opening opening = { .world = world, .deadline = deadline, .hosted = launch->rank_0_hosts && launch->rank != 0 };
    tu_watch *watch;
    tutti_status status = tu_watch_new(look_at_opening, &opening, true, &watch);
    if (status != TUTTI_OK)
        return status;
    tu_watch *before = tu_watch_thread(watch, false);
    bool newcomer = is_newcomer(world, launch);
    status = find_the_others(world, launch, deadline, &opening.first);
    if (status == TUTTI_OK && !newcomer)
        status = tu_world_place_ranks(world);
    if (status == TUTTI_OK)
        status = tu_faults_add(&world->faults, tu_settings_text(&world->settings, TU_SETTING_FAULT), world);
    if (status == TUTTI_OK && !newcomer)
        status = tu_group_make_default(world, deadline);
    tu_watch_thread_back(before);
    tu_watch_release(watch);
    return status;
}

static void drop_groups(tutti_world *world);

/* What the launcher tells. On one host that is deaths before the world is open, no more: a program between the launcher
 * and this one that closes descriptors which it does not know costs that alone. */
static tutti_status open_news(tutti_world *world, int descriptor) {
    tutti_error_copy before;
    tu_error_save(&before);
    tutti_status status = tu_news_open(descriptor, world->rank, world->size, &world->news);
    if (status == TUTTI_OK || tu_settings_text(&world->settings, TU_SETTING_NODES)[0] != 0)
        return status;
    TU_LOG(TUTTI_LOG_WARN, world->log, "world",
           "%s. A rank that dies before it has opened its world will be missed at the deadline", tutti_error_message());
    (void)tu_error_restore(&before);
    world->news = NULL;
    return TUTTI_OK;
}

tutti_status tutti_world_open(const tutti_world_options *given, tutti_world **out) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    tutti_status status = tu_options_copy("tutti_world_options", given, &options, sizeof options);
    if (status == TUTTI_OK && out == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_open: where the world goes is NULL");
    tutti_world *world = NULL;
    if (status == TUTTI_OK)
        status = make_world(&options, &world);
    if (status != TUTTI_OK)
        return status;
    tu_settings_unknown(warn_unknown, world);
    int64_t deadline = tu_deadline(world->timeout_ns);
    tu_launch launch;
    status = tu_launch_find(&options, &world->settings, world->log, &launch);
    if (status != TUTTI_OK)
        goto free_world;
    world->rank = launch.rank;
    world->size = launch.size;
    world->launcher = launch.launcher;
    world->spawn = tu_spawn_current();
    tu_launch_place(&launch, world->meeting, sizeof world->meeting);
    tu_log_set_rank(world->log, world->rank);
    status = tu_worlds_claim(world);
    if (status != TUTTI_OK)
        goto free_world;
    TU_LOG(TUTTI_LOG_INFO, world->log, "world", "rank %d of %d; started by: %s", world->rank, world->size,
           world->launcher);
    if (launch.news >= 0)
        status = open_news(world, launch.news);
    if (status == TUTTI_OK)
        status = find_the_others_in_time(world, &launch, deadline);
    if (status == TUTTI_OK && world->news != NULL && tu_news_node(world->news, world->size - 1) == 0) {
        tu_news_close(world->news); /* of one launcher: from now on the job's memory tells as much, and sooner */
        world->news = NULL;
    }
    if (status == TUTTI_OK)
        status = watch_store(world);
    if (status != TUTTI_OK)
        goto unclaim_world;
    TU_LOG(TUTTI_LOG_INFO, world->log, "world", "world \"%s\" is open: rank %d of %d, %d of them on this host",
           world->name, world->rank, world->size, world->local_size);
    tu_job_go_home(world->job); /* last: whoever sleeps is woken up wherever a CPU is idle */
    *out = world;
    return TUTTI_OK;

unclaim_world:
    if (world->job != NULL) { /* the others have met this rank: it did not close, it failed */
        char why[256];        /* shortened by who keeps it */
        snprintf(why, sizeof why, "failed to open its world: %.220s", tutti_error_message());
        tu_job_mark_dead(world->job, why);
    }
    drop_groups(world);
    (void)tu_worlds_unclaim(world);
free_world:
    free_world(world);
    return status;
}

tutti_status tutti_world_open_fake(int rank, int rank_count, const tutti_fake_options *given, tutti_world **out) {
    tutti_fake_options options = TUTTI_FAKE_OPTIONS_INIT;
    tutti_status status = tu_options_copy("tutti_fake_options", given, &options, sizeof options);
    if (status != TUTTI_OK)
        return status;
    if (out == NULL || rank_count <= 0 || rank < 0 || rank >= rank_count)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "tutti_world_open_fake: rank %d of %d; the size must be positive, the rank 0 to size - 1, and the "
            "place for the world not NULL",
            rank, rank_count);
    tutti_world *world = NULL;
    status = make_world(TUTTI_OPTIONS(tutti_world_options, .name = "fake"), &world);
    if (status != TUTTI_OK)
        return status;
    world->fake = true;
    world->fake_error = options.error_on_collective;
    world->rank = world->local_rank = rank;
    world->size = world->local_size = rank_count;
    world->nodes = 1;
    world->launcher = "fake";
    snprintf(world->meeting, sizeof world->meeting, "none");
    tu_log_set_rank(world->log, rank);
    status = tu_group_make_default(world, tu_deadline(world->timeout_ns));
    if (status == TUTTI_OK)
        status = tu_worlds_claim(world);
    if (status != TUTTI_OK) {
        free_world(world);
        return status;
    }
    *out = world;
    return TUTTI_OK;
}

/* ---- closing ---- */

static int by_name_descending(const void *left, const void *right) {
    return strcmp((*(tutti_group *const *)right)->name, (*(tutti_group *const *)left)->name);
}

/* Drops the registry's references, in descending order of names. */
static void drop_groups(tutti_world *world) {
    pthread_mutex_lock(&world->lock);
    int count = tu_registry_count(world->registry), taken = 0;
    tutti_group **groups = malloc(sizeof *groups * (size_t)(count > 0 ? count : 1));
    for (tutti_group *group; groups != NULL && (group = tu_registry_next(world->registry, NULL)) != NULL;) {
        tu_registry_remove(world->registry, group);
        groups[taken++] = group;
    }
    pthread_mutex_unlock(&world->lock);
    if (groups == NULL) { /* out of memory: in any order */
        for (tutti_group *group; (group = tu_registry_next(world->registry, NULL)) != NULL;) {
            tu_registry_remove(world->registry, group);
            tutti_group_release(group);
        }
        return;
    }
    qsort(groups, (size_t)taken, sizeof *groups, by_name_descending);
    for (int i = 0; i < taken; i++)
        tutti_group_release(groups[i]);
    free(groups);
}

/* "group", "groups", "memories"; "peers" is both */
typedef struct counted {
    char text[64];
} counted;
static counted plural(const char *what, int count) {
    counted made;
    size_t length = strlen(what);
    char last = count > 1 && length > 1 ? what[length - 1] : 's';
    snprintf(made.text, sizeof made.text, "%.*s%s", (int)(length - (last == 'y')), what,
             last == 'y'   ? "ies"
             : last != 's' ? "s"
                           : "");
    return made;
}

static tutti_status live_handles_error(tutti_world *world, const tutti_error_copy *earlier) {
    char list[512] = "";
    pthread_mutex_lock(&world->lock);
    for (int i = 0; i < TU_HANDLE_KINDS && world->kinds[i].what != NULL; i++) {
        size_t used = strlen(list);
        if (world->kinds[i].count > 0)
            snprintf(list + used, sizeof list - used, "%s%d %s", used > 0 ? ", " : "", world->kinds[i].count,
                     plural(world->kinds[i].what, world->kinds[i].count).text);
    }
    pthread_mutex_unlock(&world->lock);
    int batches = atomic_load_explicit(&world->batches, memory_order_relaxed);
    if (batches > 0)
        snprintf(list + strlen(list), sizeof list - strlen(list), " (%d %s neither ended nor cancelled)", batches,
                 batches == 1 ? "batch that was" : "batches that were");
    char unfinished[1024] = "";
    bool some = tu_attachments_unfinished(&world->attachments, unfinished, sizeof unfinished);
    tu_error(
        TUTTI_ERROR_STATE,
        "world \"%s\" was closed on rank %d while handles are alive: %s%s%s; release %s before closing (their memory "
        "goes with their last release)",
        world->name, world->rank, list, some ? ". Nobody has waited for: " : "", unfinished,
        some ? "what else there is" : "them");
    /* A program that returns early after a failure has handles alive: its user must see that failure too. */
    if (earlier->message[0] != 0)
        tu_error_append(". What failed before, and may be why: %s", earlier->message);
    return TUTTI_ERROR_STATE;
}

/* The error to keep: this thread's last one, else what ended a group of this world. Leaves the thread's as it is. */
static void recall_failure(tutti_world *world, tutti_error_copy *failure) {
    tu_error_save(failure);
    if (failure->message[0] != 0)
        return;
    pthread_mutex_lock(&world->lock);
    tutti_group *ended = tu_registry_next(world->registry, NULL);
    while (ended != NULL && !tu_group_ended(ended))
        ended = tu_registry_next(world->registry, ended);
    tutti_group_keep(ended);
    pthread_mutex_unlock(&world->lock);
    if (ended == NULL)
        return;
    tutti_error_copy none = *failure;
    (void)tu_group_cause(ended);
    tu_error_save(failure);
    (void)tu_error_restore(&none);
    tutti_group_release(ended);
}

tutti_status tutti_world_close(tutti_world *world) {
    if (world == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_close: the world is NULL");
    if (!tu_worlds_unclaim(world))
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_close: this is no open world; was it closed already?");
    if (tu_world_forked(world))
        return tu_error(TUTTI_ERROR_FORKED,
                        "tutti_world_close was called in a forked child of the process that opened world \"%s\"",
                        world->name);
    TU_LOG(TUTTI_LOG_INFO, world->log, "world", "world \"%s\" closes", world->name);
    tutti_error_copy earlier;
    recall_failure(world, &earlier);
    tu_attachments_let_go(&world->attachments);
    atomic_store_explicit(&world->closed, 1, memory_order_seq_cst); /* pairs with the load in tu_world_check */
    bool empty = tu_world_empty(world);
    if (!empty) { /* what it uses stays */
        if (world->job != NULL)
            tu_job_goodbye(world->job);
        return tu_error(
            TUTTI_ERROR_STATE,
            "world \"%s\" was closed on rank %d while another thread was in one of its calls, and that call "
            "has not returned for %s: its memory stays",
            world->name, world->rank, tu_duration_of(world->timeout_ns).text);
    }
    world->group = NULL;
    tu_events_free(world->events);
    world->events = NULL;
    drop_groups(world);
    if (world->job != NULL)
        tu_job_goodbye(world->job);
    tutti_status status = TUTTI_OK;
    if (atomic_load_explicit(&world->handles, memory_order_acquire) > 1)
        status = live_handles_error(world, &earlier);
    tu_world_handle(world, NULL, -1);
    return status;
}

tutti_status tutti_world_finish(tutti_world *world, int64_t timeout_ns) {
    tutti_status status = tu_world_check(world);
    if (status != TUTTI_OK)
        return status;
    int64_t timeout = 0;
    status = tu_timeout_choose("tutti_world_finish", timeout_ns, 0, world->timeout_ns, &timeout);
    if (status != TUTTI_OK)
        return status;
    bool all;
    if (world->size > 1 && !world->fake)
        status = world->group->local ? tu_group_agree(world->group, true, timeout, &all)
                                     : tutti_store_barrier(world->store, "finish", world->size, timeout);
    tutti_error_copy error;
    tu_error_save(&error);
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? tu_error_restore(&error) : closed;
}

tutti_status tu_world_check(const tutti_world *world) {
    if (__builtin_expect(world == NULL, 0))
        return tu_error(TUTTI_ERROR_ARGUMENT, "the world is NULL");
    if (__builtin_expect(atomic_load_explicit(&world->closed, memory_order_acquire) != 0, 0))
        return tu_error(TUTTI_ERROR_STATE, "world \"%s\" is closed", world->name);
    if (__builtin_expect(tu_world_forked(world), 0))
        return tu_error(
            TUTTI_ERROR_FORKED,
            "called in a forked child of the process that opened world \"%s\" (rank %d); only that process may "
            "use it. Fork before opening, or exec after forking",
            world->name, world->rank);
    return TUTTI_OK;
}

tutti_status tu_world_interrupted(const tutti_world *world, const char *what) {
    if (atomic_load_explicit(&world->closed, memory_order_acquire) != 0)
        return tu_error(TUTTI_ERROR_STATE, "%s: another thread closed world \"%s\" meanwhile", what, world->name);
    return tu_error(TUTTI_ERROR_INTERRUPTED, "%s was interrupted on rank %d by tutti_world_interrupt", what,
                    world->rank);
}

/* ---- handles and rooms ---- */

void tu_world_handle(tutti_world *world, const char *what, int change) {
    if (what != NULL) {
        pthread_mutex_lock(&world->lock);
        int i = 0;
        while (i < TU_HANDLE_KINDS - 1 && world->kinds[i].what != NULL && strcmp(world->kinds[i].what, what) != 0)
            i++;
        if (world->kinds[i].what == NULL)
            world->kinds[i].what = what;
        world->kinds[i].count += change;
        pthread_mutex_unlock(&world->lock);
    }
    /* Release pairs with the last one's acquire. */
    if (atomic_fetch_add_explicit(&world->handles, change, memory_order_acq_rel) + change == 0)
        free_world(world);
}

/* ---- interrupt ---- */

void tutti_world_interrupt(tutti_world *world) {
    if (world == NULL)
        return;
    atomic_fetch_or_explicit(&world->interrupt, TU_INTERRUPT_USER, memory_order_release); /* pairs with waits */
    if (world->job != NULL)
        tu_job_ring(world->job, world->local_rank);
}

void tutti_world_resume(tutti_world *world) {
    if (world != NULL)
        atomic_fetch_and_explicit(&world->interrupt, ~TU_INTERRUPT_USER, memory_order_release);
}

/* ---- queries ---- */

int tutti_world_rank(const tutti_world *world) {
    return world != NULL ? world->rank : -1;
}

int tutti_world_size(const tutti_world *world) {
    return world != NULL ? world->size : -1;
}

int tutti_world_local_rank(const tutti_world *world) {
    return world != NULL ? world->local_rank : -1;
}

int tutti_world_local_size(const tutti_world *world) {
    return world != NULL ? world->local_size : -1;
}

const char *tutti_world_name(const tutti_world *world) {
    return world != NULL ? world->name : NULL;
}

const char *tutti_world_launcher(const tutti_world *world) {
    return world != NULL ? world->launcher : NULL;
}

const char *tutti_world_address(const tutti_world *world) {
    return world != NULL ? world->address : NULL;
}

tutti_group *tutti_world_group(const tutti_world *world) {
    return world != NULL ? world->group : NULL;
}

tutti_store *tutti_world_store(const tutti_world *world) {
    return world != NULL ? world->store : NULL;
}

bool tu_world_is_thread(const tutti_world *world) {
    return world->spawn != NULL && world->spawn->store != NULL;
}
