/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that wait for each other in a circle: everybody sends a long message to its neighbour and nobody receives, or
 * everybody receives first, or two ranks wait for each other's tags. Shared memory shows it, so nobody waits for the
 * deadline.
 *
 * A rank is blocked on another when its only thread waits for a send or receive that only the other can finish. It says
 * so in the channel that comes from the other (`blocked`, a number that grows), and takes that back, under its lock,
 * before it takes any further packet. The edge from i to n is real when i says so, everything that the two sent each
 * other has been taken, and i still says the same afterwards: then nothing is on its way that could free i. A circle of
 * real edges cannot be left by anybody.
 *
 * A process in which another thread could still come with the missing call is never said to be blocked: its circles end
 * with the deadline, as do those in which somebody receives from anybody, and those of groups across hosts.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "collective/request.h"

/* Threads of this process besides those of the library. */
static int count_threads(void) {
    int threads = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL)
        return INT32_MAX;
    for (const struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        char path[300], name[32] = "";
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "re");
        bool known = file != NULL && fgets(name, sizeof name, file) != NULL;
        if (file != NULL)
            fclose(file);
        threads += !known || strncmp(name, "tutti-", 6) != 0;
    }
    closedir(tasks);
    return threads;
}

/* Whether this rank has no other thread that could send or receive: of ranks that are threads each has one, and the one
 * that spawned them waits. */
static bool is_single(const tutti_world *world) {
    return count_threads() <= (tu_world_is_thread(world) ? world->local_size + 1 : 1);
}

void tu_blocked_clear(tu_messages *messages) {
    if (__builtin_expect(messages->blocked_on < 0, 1))
        return;
    tu_channel *channel = tu_channel_of(&messages->channels, messages->blocked_on, messages->state->rank);
    atomic_store_explicit(&channel->blocked, 0, memory_order_release); /* pairs with the loads of edge_is_real */
    messages->blocked_on = -1;
}

/* Whether all that this rank has under way waits for others: nothing of it is still to be posted. */
static bool all_wait(const tu_messages *messages) {
    for (const tu_request *request = messages->first; request != NULL; request = request->next)
        if (request->state != TU_REQUEST_WAITING)
            return false;
    return true;
}

/* Says whom this rank is blocked on. False when it is not, or nobody can know. */
static bool say_blocked(tu_messages *messages, const tu_request *request) {
    tu_collective *state = messages->state;
    bool single = is_single(state->group->world), said = false;
    pthread_mutex_lock(&messages->lock);
    tu_requests_progress(messages);
    if (single && request->listed && request->peer >= 0 && request->peer != state->rank && all_wait(messages)) {
        said = messages->blocked_on == request->peer;
        if (!said) {
            tu_blocked_clear(messages);
            tu_channel *channel = tu_channel_of(&messages->channels, request->peer, state->rank);
            atomic_store_explicit(&channel->blocked, ++messages->blocked, memory_order_release); /* as above */
            messages->blocked_on = request->peer;
            said = true;
        }
    } else {
        tu_blocked_clear(messages);
    }
    pthread_mutex_unlock(&messages->lock);
    return said;
}

static uint64_t blocked_word(const tu_messages *messages, int rank, int on) {
    /* Pairs with the releases above. */
    return atomic_load_explicit(&tu_channel_of(&messages->channels, on, rank)->blocked, memory_order_acquire);
}

/* Whom `rank` says it is blocked on; -1: nobody. */
static int next_of(const tu_messages *messages, int rank) {
    for (int other = 0; other < messages->state->size; other++)
        if (other != rank && blocked_word(messages, rank, other) != 0)
            return other;
    return -1;
}

static bool edge_is_real(const tu_messages *messages, int rank, int on, uint64_t word) {
    return word != 0 && tu_channel_empty(&messages->channels, rank, on) &&
           tu_channel_empty(&messages->channels, on, rank) && blocked_word(messages, rank, on) == word;
}

/* Follows the words from this rank on. The length of the circle that comes back to it, or 0. */
static int find_circle(const tu_messages *messages, int *circle, uint64_t *words) {
    int size = messages->state->size, own = messages->state->rank, rank = own;
    for (int length = 0; length < size; length++) {
        int on = next_of(messages, rank);
        if (on < 0)
            return 0;
        circle[length] = rank;
        words[length] = blocked_word(messages, rank, on);
        rank = on;
        if (rank != own)
            continue;
        /* All edges at one time: each is looked at twice, the second time after all others were. */
        for (int look = 0; look < 2; look++)
            for (int i = 0; i <= length; i++)
                if (!edge_is_real(messages, circle[i], circle[(i + 1) % (length + 1)], words[i]))
                    return 0;
        return length + 1;
    }
    return 0;
}

#define LOOK_BACK 64 /* entries of a rank's recorder, for what it waits in */
#define TOLD 4       /* ranks of a circle whose calls are told */

/* What `rank` waits in for `on`, as its recorder has it: a receive rather than a send, where it does both. False: it is
 * not among the last entries. */
static bool waits_in(const tutti_group *group, int rank, int on, tu_record_view *found) {
    const tu_recorder *recorder = tu_job_recorder(group->world->job, group->job_ranks[rank]);
    tu_record_view views[LOOK_BACK];
    size_t count = tu_recorder_snapshot(recorder, views, LOOK_BACK);
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        const tu_operation_row *row = tu_operation_row_of(views[i].info.operation);
        bool is_it = views[i].running && views[i].info.group_key == group->key && row->kind == TU_KIND_MESSAGE &&
                     views[i].info.root == on;
        if (!is_it || (any && !tu_receives(row)))
            continue;
        *found = views[i];
        any = true;
    }
    return any;
}

/* Who waits for whom, and in which calls; how many of them are sends and how many receives. */
static void tell_circle(const tutti_group *group, const int *circle, int length, int *sends, int *receives) {
    for (int i = 1; i <= length; i++)
        tu_error_append(" for rank %d%s", circle[i % length], i < length ? ", which waits" : "");
    for (int i = 0; i < length; i++) {
        char doing[160];
        tu_record_view view;
        if (!waits_in(group, circle[i], circle[(i + 1) % length], &view))
            continue;
        bool receive = tu_receives(tu_operation_row_of(view.info.operation));
        *receives += receive;
        *sends += !receive;
        if (i >= TOLD)
            continue;
        tu_operation_info_text(&view.info, group->name, doing, sizeof doing);
        tu_error_append("%s rank %d is in %s", i == 0 ? ":" : ",", circle[i], doing);
    }
    if (length > TOLD)
        tu_error_append(" …");
}

static const char *advice(int sends, int receives) {
    if (receives == 0)
        return "Let one of them receive first, or use tutti_send_recv, a batch or a work";
    if (sends == 0)
        return "All of them receive, and no message that has come is what they wait for: compare the ranks and tags of "
               "sends and receives, or let one of them send first";
    return "A send of more than 80 bytes may wait for a receive of its tag, and no message that has come is what the "
           "receives wait for: compare the ranks and tags of sends and receives, and their order";
}

static tutti_status circle_error(const tu_messages *messages, const tu_request *request, const int *circle,
                                 int length) {
    tutti_group *group = messages->state->group;
    int sends = 0, receives = 0;
    tu_error(TUTTI_ERROR_MISMATCH, "sends and receives wait for each other in a circle: rank %d waits", circle[0]);
    tell_circle(group, circle, length, &sends, &receives);
    tu_error_append(". Nobody can go on. %s", advice(sends, receives));
    for (int i = 0; i < length; i++)
        tu_error_at_fault(circle[i]);
    return tu_error_where(group->name, request->task->row->name, request->task->info.sequence, group->rank);
}

tutti_status tu_cycle_look(tu_messages *messages, const tu_request *request) {
    if (messages->state->size < 2 || messages->network != NULL || !say_blocked(messages, request))
        return TUTTI_OK;
    size_t size = (size_t)messages->state->size;
    int *circle = malloc(size * sizeof *circle);
    uint64_t *words = malloc(size * sizeof *words);
    int length = circle != NULL && words != NULL ? find_circle(messages, circle, words) : 0;
    tutti_status status = length == 0 ? TUTTI_OK : circle_error(messages, request, circle, length);
    free(circle);
    free(words);
    return status;
}
