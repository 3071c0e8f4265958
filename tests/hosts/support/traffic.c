/* SPDX-License-Identifier: Apache-2.0
 *
 * What collectives send to other hosts: counted in a job, or by the simulation of bench/scale. Both print the same
 * lines.
 *
 *     traffic real|simulated|timed|predicted|held HOSTS [--round-robin] OPERATION:TYPE:COUNT…
 *     traffic pairs HOSTS WORD:BYTES…     send, put, get or signal from rank 0 to the last rank: what the two send
 *
 * HOSTS is a list like 2,1,2: how many ranks each has. With --round-robin the group has one rank of each host in turn.
 * timed: how long a call takes, in a job. held: what descriptors and memory a rank holds then. predicted: how long the
 * same calls take in the simulation, with LATENCY (us) and RATE (Mbit/s) of the environment.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/work.h>
#include <tutti/world.h>

#include "base/clock.h"
#include "memory/network_inner.h"
#include "simulation.h"

#define MOST_HOSTS 64
#define MOST_RANKS 1024

#define WARM 2
#define TIMES 5
#define LEAD (200 * TU_MILLISECOND) /* for all to know when it begins */

typedef struct setting {
    int each[MOST_HOSTS], hosts, size;
    bool round_robin, timed, held;
} setting;

static int complain(const char *what) {
    fprintf(stderr, "traffic: %s: %s\n", what, tutti_error_message());
    return 1;
}

static void print(int rank, const char *call, const simulation_traffic *sent) {
    printf("rank %d after %s: %llu messages, %llu bytes, %llu times taken, %d connections\n", rank, call,
           (unsigned long long)sent->messages, (unsigned long long)sent->bytes, (unsigned long long)sent->taken,
           sent->connections);
}

/* ---- in a job ---- */

static tutti_status run_with_lists(tutti_group *group, const simulation_call *call, const void *in, void *out) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group), to[MOST_RANKS];
    size_t pairs[MOST_RANKS], own[MOST_RANKS];
    for (int other = 0; other < size; other++) {
        pairs[other] = simulation_share(call, rank, other);
        own[other] = simulation_share(call, other, other);
        to[other] = simulation_target(other, size);
    }
    switch (call->operation) {
    case TU_OPERATION_ALL_GATHER_V:
        return tutti_all_gather_v(group, in, out, own, NULL, call->dtype, NULL);
    case TU_OPERATION_REDUCE_SCATTER_V:
        return tutti_reduce_scatter_v(group, in, out, own, call->dtype, call->reduction, NULL);
    case TU_OPERATION_ALL_TO_ALL_V:
        return tutti_all_to_all_v(group, in, pairs, NULL, out, pairs, NULL, call->dtype, NULL);
    case TU_OPERATION_PERMUTE:
        return tutti_permute(group, in, out, call->count, call->dtype, to, NULL);
    default:
        return TUTTI_ERROR_ARGUMENT;
    }
}

static tutti_status run(tutti_group *group, const simulation_call *call, const void *in, void *out) {
    size_t count = call->count;
    tutti_call options = TUTTI_CALL_INIT;
    options.order = call->any_order ? TUTTI_ORDER_ANY : 0;
    switch (call->operation) {
    case TU_OPERATION_BARRIER:
        return tutti_barrier(group, NULL);
    case TU_OPERATION_ALL_REDUCE:
        return tutti_all_reduce(group, in, out, count, call->dtype, call->reduction, &options);
    case TU_OPERATION_REDUCE:
        return tutti_reduce(group, in, out, count, call->dtype, call->reduction, call->root, &options);
    case TU_OPERATION_REDUCE_SCATTER:
        return tutti_reduce_scatter(group, in, out, count, call->dtype, call->reduction, &options);
    case TU_OPERATION_ALL_GATHER:
        return tutti_all_gather(group, in, out, count, call->dtype, NULL);
    case TU_OPERATION_BROADCAST:
        return tutti_broadcast(group, in, out, count, call->dtype, call->root, NULL);
    case TU_OPERATION_GATHER:
        return tutti_gather(group, in, out, count, call->dtype, call->root, NULL);
    case TU_OPERATION_SCATTER:
        return tutti_scatter(group, in, out, count, call->dtype, call->root, NULL);
    case TU_OPERATION_ALL_TO_ALL:
        return tutti_all_to_all(group, in, out, count, call->dtype, NULL);
    default:
        return run_with_lists(group, call, in, out);
    }
}

static simulation_traffic count_sent(tutti_world *world) {
    simulation_traffic sent = { 0 };
    tu_network *network;
    if (tu_network_get(world, &network) != TUTTI_OK)
        return sent;
    sent.connections = tu_network_connections(network);
    pthread_mutex_lock(&network->lock);
    sent.messages = network->sent[TU_NETWORK_DATA].messages;
    sent.bytes = network->sent[TU_NETWORK_DATA].bytes;
    sent.taken = network->sent[TU_NETWORK_TAKEN].messages;
    pthread_mutex_unlock(&network->lock);
    return sent;
}

/* One rank of each host in turn. */
static tutti_status make_group(tutti_world *world, const setting *of, tutti_group **group) {
    int ranks[MOST_RANKS], count = 0, first[MOST_HOSTS] = { 0 };
    for (int host = 1; host < of->hosts; host++)
        first[host] = first[host - 1] + of->each[host - 1];
    for (int turn = 0; count < of->size; turn++)
        for (int host = 0; host < of->hosts; host++)
            if (turn < of->each[host])
                ranks[count++] = first[host] + turn;
    return tutti_group_new(world, ranks, of->size, TUTTI_OPTIONS(tutti_group_options, .keep_order = true), group);
}

/* All begin at one moment, on the clock that these hosts share; how long after it each is done, once for every time. */
static tutti_status time_call(tutti_group *group, const simulation_call *call, const char *name, const void *in,
                              void *out) {
    tutti_status status = TUTTI_OK;
    printf("rank %d after %s:", tutti_group_rank(group), name);
    for (int i = -WARM; i < TIMES && status == TUTTI_OK; i++) {
        int64_t begin = tu_clock_now() + LEAD;
        status = tutti_broadcast(group, &begin, &begin, 1, TUTTI_I64, 0, NULL);
        struct timespec until = { .tv_sec = begin / TU_SECOND, .tv_nsec = begin % TU_SECOND };
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        if (status == TUTTI_OK)
            status = run(group, call, in, out);
        if (i >= 0)
            printf(" %.1f", (double)(tu_clock_now() - begin) / 1e3);
    }
    printf(" us\n");
    return status;
}

static long line_of(const char *name) {
    char line[128];
    long value = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, name, strlen(name)) == 0)
            value = atol(line + strlen(name));
    if (file != NULL)
        fclose(file);
    return value;
}

static void print_held(int rank, const char *call, int connections) {
    int descriptors = 0;
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
        descriptors += entry->d_name[0] != '.';
    if (folder != NULL)
        closedir(folder);
    printf("rank %d after %s: %d connections, %d descriptors, %ld KiB of its own, %ld KiB shared\n", rank, call,
           connections, descriptors - 1, line_of("RssAnon:"), line_of("RssShmem:"));
}

static tutti_status do_call(const setting *of, tutti_group *group, const simulation_call *call, const char *name,
                            const void *in, void *out) {
    tutti_status status = of->timed ? time_call(group, call, name, in, out) : run(group, call, in, out);
    simulation_traffic sent = count_sent(group->world);
    if (of->held)
        print_held(tutti_group_rank(group), name, sent.connections);
    else if (!of->timed)
        print(tutti_group_rank(group), name, &sent);
    return status;
}

/* ---- from one rank to another ---- */

typedef struct pair {
    tutti_group *group;
    tutti_peers *peers;
    unsigned char *data;
    int rank, last;
} pair;

static uint64_t sent_between(tutti_world *world) {
    tu_network *network;
    uint64_t sent = 0;
    if (tu_network_get(world, &network) != TUTTI_OK)
        return 0;
    pthread_mutex_lock(&network->lock);
    for (int kind = TU_NETWORK_LETTER; kind < TU_NETWORK_KINDS; kind++)
        sent += network->sent[kind].messages;
    pthread_mutex_unlock(&network->lock);
    return sent;
}

/* The receive waits before the message comes. */
static tutti_status send_once(const pair *this, size_t bytes) {
    tutti_work *work = NULL;
    tutti_status status = TUTTI_OK;
    if (this->rank == this->last)
        status = tutti_recv(this->group, this->data, bytes, TUTTI_U8, 0, 0, TUTTI_OPTIONS(tutti_call, .work = &work));
    if (status == TUTTI_OK)
        status = tutti_barrier(this->group, NULL);
    if (status == TUTTI_OK && this->rank == 0)
        status = tutti_send(this->group, this->data, bytes, TUTTI_U8, this->last, 0, NULL);
    if (status == TUTTI_OK && work != NULL)
        status = tutti_work_wait(work, 0);
    tutti_work_release(work);
    return status;
}

static tutti_status do_between(const pair *this, const char *word, size_t bytes) {
    if (strcmp(word, "send") == 0)
        return send_once(this, bytes);
    if (strcmp(word, "put") == 0 && this->rank == 0)
        return tutti_peers_put(this->peers, this->last, 0, this->data, bytes, NULL);
    if (strcmp(word, "get") == 0 && this->rank == 0)
        return tutti_peers_get(this->peers, this->last, 0, this->data, bytes, NULL);
    if (strcmp(word, "signal") == 0 && this->rank == 0)
        return tutti_peers_signal(this->peers, this->last, 0, NULL);
    if (strcmp(word, "signal") == 0 && this->rank == this->last)
        return tutti_peers_wait_signal(this->peers, 0, 0, NULL);
    return TUTTI_OK;
}

/* Between barriers: what was put, what is told of it and what asks for it has left before they end. */
static int count_between(char **words, int count) {
    enum {
        ROOM = 4 << 20
    };
    tutti_world *world;
    tutti_memory *memory;
    pair this = { .data = calloc(1, ROOM) };
    if (this.data == NULL || tutti_world_open(NULL, &world) != TUTTI_OK)
        return complain("world");
    this.group = tutti_world_group(world);
    this.rank = tutti_group_rank(this.group);
    this.last = tutti_group_size(this.group) - 1;
    if (tutti_memory_alloc(world, ROOM, NULL, &memory) != TUTTI_OK ||
        tutti_memory_rendezvous(memory, this.group, &this.peers) != TUTTI_OK)
        return complain("memory");
    for (int i = 0; i < count; i++) {
        char word[16];
        size_t bytes;
        if (sscanf(words[i], "%15[^:]:%zu", word, &bytes) != 2 || bytes > ROOM)
            return complain(words[i]);
        uint64_t before = sent_between(world);
        if (tutti_barrier(this.group, NULL) != TUTTI_OK || do_between(&this, word, bytes) != TUTTI_OK ||
            tutti_barrier(this.group, NULL) != TUTTI_OK)
            return complain(words[i]);
        printf("rank %d after %s: %llu sent\n", this.rank, words[i],
               (unsigned long long)(sent_between(world) - before));
    }
    tutti_peers_release(this.peers);
    tutti_memory_release(memory);
    free(this.data);
    return tutti_world_close(world) == TUTTI_OK ? 0 : complain("close");
}

static int count_in_job(const setting *of, char **calls, int call_count) {
    tutti_world *world;
    tutti_group *group = NULL;
    if (tutti_world_open(NULL, &world) != TUTTI_OK)
        return complain("world");
    if (of->round_robin && make_group(world, of, &group) != TUTTI_OK)
        return complain("group");
    tutti_group *used = group != NULL ? group : tutti_world_group(world);
    int result = 0;
    for (int i = 0; i < call_count && result == 0; i++) {
        simulation_call call;
        if (!simulation_parse(calls[i], &call))
            return complain(calls[i]);
        size_t room =
            (3 * call.count * tutti_dtype_size(call.dtype) * (size_t)of->size / 64 + 1) * 64; /* of lists too */
        unsigned char *memory = calloc(2, room);
        if (memory == NULL || do_call(of, used, &call, calls[i], memory, memory + room) != TUTTI_OK)
            result = complain(calls[i]);
        free(memory);
    }
    tutti_group_release(group);
    return tutti_world_close(world) == TUTTI_OK ? result : complain("close");
}

/* ---- simulated ---- */

static int count_simulated(const setting *of, char **calls, int call_count) {
    simulation_model model = { .latency = 1e-5, .overhead = 1e-6, .gap = 1e-6, .byte = 1e-9, .compute = 1e-10 };
    simulation *made = simulation_open(of->each, of->hosts, of->round_robin, &model);
    int result = 0;
    for (int i = 0; i < call_count && result == 0; i++) {
        simulation_call call;
        if (!simulation_parse(calls[i], &call) || simulation_run(made, &call) < 0)
            result = complain(calls[i]);
        for (int rank = 0; rank < of->size && result == 0; rank++) {
            simulation_traffic sent = simulation_sent(made, rank);
            print(rank, calls[i], &sent);
        }
    }
    simulation_close(made);
    return result;
}

/* What time_call does, simulated. */
static int predict(const setting *of, char **calls, int call_count) {
    const char *latency = getenv("LATENCY"), *rate = getenv("RATE");
    simulation_model model = { .latency = latency != NULL ? atof(latency) * 1e-6 : 1e-5,
                               .overhead = 1e-6,
                               .byte = 8e-6 / (rate != NULL ? atof(rate) : 1e4),
                               .compute = 1e-10 };
    simulation *made = simulation_open(of->each, of->hosts, of->round_robin, &model);
    simulation_call begin = { .operation = TU_OPERATION_BROADCAST, .count = 1, .dtype = TUTTI_I64 };
    int result = 0;
    for (int i = 0; i < call_count && result == 0; i++) {
        simulation_call call;
        result = simulation_parse(calls[i], &call) ? 0 : complain(calls[i]);
        printf("rank 0 after %s:", calls[i]);
        for (int turn = -WARM; turn < TIMES && result == 0; turn++) {
            double seconds = simulation_run(made, &begin) < 0 ? -1 : simulation_run(made, &call);
            result = seconds < 0;
            if (turn >= 0)
                printf(" %.1f", seconds * 1e6);
        }
        printf(" us\n");
    }
    simulation_close(made);
    return result;
}

int main(int count, char **arguments) {
    setting of = { 0 };
    int next = 3;
    char *list = count > 2 ? arguments[2] : NULL;
    for (char *item; list != NULL && (item = strsep(&list, ",")) != NULL && of.hosts < MOST_HOSTS; of.hosts++)
        of.size += of.each[of.hosts] = atoi(item);
    if (count < 4 || of.size < 1 || of.size > MOST_RANKS) {
        fprintf(stderr,
                "usage: traffic real|simulated|timed|predicted|held HOSTS [--round-robin] OPERATION:TYPE:COUNT…\n");
        return 2;
    }
    if (strcmp(arguments[next], "--round-robin") == 0) {
        of.round_robin = true;
        next++;
    }
    if (strcmp(arguments[1], "pairs") == 0)
        return count_between(arguments + next, count - next);
    of.timed = strcmp(arguments[1], "timed") == 0;
    of.held = strcmp(arguments[1], "held") == 0;
    if (strcmp(arguments[1], "predicted") == 0)
        return predict(&of, arguments + next, count - next);
    return strcmp(arguments[1], "simulated") == 0 ? count_simulated(&of, arguments + next, count - next)
                                                  : count_in_job(&of, arguments + next, count - next);
}
