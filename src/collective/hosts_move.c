/* SPDX-License-Identifier: Apache-2.0
 *
 * Between hosts: barrier, and everything that moves data as it is.
 *
 * A barrier is one of each host, of the hosts' leaders in log2 steps, and of each host again. What goes to everybody
 * (all-gather, broadcast) crosses to a host once, and is handed on there. What has one receiver (gather, scatter,
 * all-to-all, permute) goes from its sender to its receiver; between ranks of one host by an all-to-all of that host.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/hosts.h"

#define BLOCK ((size_t)4 << 20)       /* of a broadcast: crosses, then is handed on */
#define CHAIN_BYTES ((size_t)1 << 20) /* from here on a broadcast goes from host to host in a row */

/* ---- barrier ---- */

static tutti_status leaders_barrier(tu_hosts *hosts, tu_task *task) {
    int count = hosts->host_count;
    tu_round round;
    tutti_status status = tu_round_begin(&round, hosts, task, 32);
    if (status != TUTTI_OK)
        return status;
    uint32_t step = 0;
    for (int distance = 1; distance < count && status == TUTTI_OK; distance *= 2, step++) {
        int to = (hosts->host + distance) % count, from = (hosts->host + count - distance) % count;
        status = tu_round_receive(&round, tu_hosts_leader(hosts, from), step, NULL, 0);
        if (status == TUTTI_OK)
            status = tu_round_send(&round, tu_hosts_leader(hosts, to), step, NULL, 0);
        if (status == TUTTI_OK)
            status = tu_round_wait(&round);
    }
    return tu_round_end(&round, status);
}

tutti_status tu_hosts_barrier(tu_hosts *hosts, tu_task *task) {
    tutti_call call = tu_hosts_call(task);
    tutti_status status = hosts->here != NULL ? tutti_barrier(hosts->here, &call) : TUTTI_OK;
    if (status == TUTTI_OK && hosts->index == 0)
        status = leaders_barrier(hosts, task);
    call = tu_hosts_call(task);
    return status == TUTTI_OK && hosts->here != NULL ? tutti_barrier(hosts->here, &call) : status;
}

/* ---- to everybody ---- */

/* Shares of a host's members that lie side by side: one message. Returns the first member's index behind them. */
static int run_of(const tu_host *host, int first, const tu_shares *shares, size_t *length) {
    int at = first + 1;
    size_t begin = tu_share_offset(shares, host->members[first]);
    *length = tu_share_bytes(shares, host->members[first]);
    while (!shares->apart && at < host->count && tu_share_offset(shares, host->members[at]) == begin + *length)
        *length += tu_share_bytes(shares, host->members[at++]);
    return at;
}

static int count_runs(const tu_host *host, const tu_shares *shares) {
    int count = 0;
    size_t length;
    for (int at = 0; at < host->count; count++)
        at = run_of(host, at, shares, &length);
    return count;
}

/* Messages that a host sends, or receives if that is more. */
static int count_crossing(const tu_hosts *hosts, const tu_shares *shares) {
    int sent = (hosts->host_count - 1) * count_runs(&hosts->hosts[hosts->host], shares), received = 0;
    for (int other = 0; other < hosts->host_count; other++)
        received += other != hosts->host ? count_runs(&hosts->hosts[other], shares) : 0;
    return sent > received ? sent : received;
}

static tutti_status cross(tu_hosts *hosts, tu_task *task, unsigned char *out, const tu_shares *shares, uint32_t step) {
    tu_round round;
    tutti_status status = tu_round_begin(&round, hosts, task, count_crossing(hosts, shares));
    if (status != TUTTI_OK)
        return status;
    for (int other = 0; other < hosts->host_count && status == TUTTI_OK; other++) {
        const tu_host *host = &hosts->hosts[other];
        size_t length;
        for (int i = 0, next; i < host->count && other != hosts->host && status == TUTTI_OK; i = next) {
            next = run_of(host, i, shares, &length);
            status = tu_round_receive(&round, host->members[0], step + (uint32_t)i,
                                      out + tu_share_offset(shares, host->members[i]), length);
        }
    }
    const tu_host *mine = &hosts->hosts[hosts->host];
    for (int other = 1; other < hosts->host_count && status == TUTTI_OK; other++) {
        int to = tu_hosts_leader(hosts, (hosts->host + other) % hosts->host_count);
        size_t length;
        for (int i = 0, next; i < mine->count && status == TUTTI_OK; i = next) {
            next = run_of(mine, i, shares, &length);
            status =
                tu_round_send(&round, to, step + (uint32_t)i, out + tu_share_offset(shares, mine->members[i]), length);
        }
    }
    if (status == TUTTI_OK)
        status = tu_round_wait(&round);
    return tu_round_end(&round, status);
}

/* The shares of this host's members to all of them. */
static tutti_status gather_here(tu_hosts *hosts, tu_task *task, const void *own, unsigned char *out,
                                const tu_shares *shares) {
    const tu_host *host = &hosts->hosts[hosts->host];
    int rank = hosts->group->rank;
    if (hosts->here == NULL) {
        if (tu_share_bytes(shares, rank) > 0)
            memmove(out + tu_share_offset(shares, rank), own, tu_share_bytes(shares, rank));
        return TUTTI_OK;
    }
    size_t *counts = malloc(2 * (size_t)host->count * sizeof *counts);
    if (counts == NULL)
        return tu_error_memory("parts of a collective", 2 * (size_t)host->count * sizeof *counts);
    size_t *places = counts + host->count;
    for (int i = 0; i < host->count; i++) {
        counts[i] = tu_share_bytes(shares, host->members[i]);
        places[i] = tu_share_offset(shares, host->members[i]);
    }
    tutti_call call = tu_hosts_call(task);
    tutti_status status = tutti_all_gather_v(hosts->here, own, out, counts, places, TUTTI_U8, &call);
    free(counts);
    return status;
}

/* What came from other hosts, from this host's leader to the others here: in as few pieces as it lies in. */
static tutti_status hand_on(tu_hosts *hosts, tu_task *task, unsigned char *out, const tu_shares *shares) {
    const tu_host *mine = &hosts->hosts[hosts->host];
    tutti_status status = TUTTI_OK;
    size_t begin = 0, length = 0;
    for (int member = 0, own = 0; member <= hosts->group->size && status == TUTTI_OK; member++) {
        bool last = member == hosts->group->size, here = !last && own < mine->count && mine->members[own] == member;
        own += here;
        if (!last && !here && !shares->apart && length > 0 && tu_share_offset(shares, member) == begin + length) {
            length += tu_share_bytes(shares, member);
            continue;
        }
        tutti_call call = tu_hosts_call(task);
        if (length > 0)
            status = tutti_broadcast(hosts->here, out + begin, out + begin, length, TUTTI_U8, 0, &call);
        begin = last || here ? 0 : tu_share_offset(shares, member);
        length = last || here ? 0 : tu_share_bytes(shares, member);
    }
    return status;
}

tutti_status tu_hosts_gather(tu_hosts *hosts, tu_task *task, const void *own, unsigned char *out,
                             const tu_shares *shares, uint32_t step) {
    tutti_status status = gather_here(hosts, task, own, out, shares);
    if (status == TUTTI_OK && hosts->index == 0)
        status = cross(hosts, task, out, shares, step);
    return status == TUTTI_OK && hosts->here != NULL ? hand_on(hosts, task, out, shares) : status;
}

static tutti_status all_gather(tu_hosts *hosts, tu_task *task) {
    tu_shares shares = { .each = task->info.count * task->element, .apart = task->out_offsets != NULL };
    if (task->row->out == TU_EXTENT_EACH)
        return tu_hosts_gather(hosts, task, task->in, task->out, &shares, 0);
    int size = hosts->group->size;
    size_t *bytes = malloc(2 * (size_t)size * sizeof *bytes);
    if (bytes == NULL)
        return tu_error_memory("parts of a collective", 2 * (size_t)size * sizeof *bytes);
    size_t *offsets = bytes + size;
    for (int member = 0; member < size; member++) {
        tu_part part = tu_part_of(task, hosts->group->rank, member, hosts->group->rank);
        bytes[member] = part.bytes;
        offsets[member] = part.out_offset;
    }
    shares.bytes = bytes;
    shares.offsets = offsets;
    tutti_status status = tu_hosts_gather(hosts, task, task->in, task->out, &shares, 0);
    free(bytes);
    return status;
}

/* ---- broadcast ---- */

typedef struct path {
    int parent;       /* member; -1: this rank has the data */
    int children[64]; /* members */
    int count;
} path;

/* The hosts in a row, or a binomial tree of them; the root's first. */
static path path_of(const tu_hosts *hosts, int root_host, int root, bool chain) {
    int count = hosts->host_count, place = (hosts->host + count - root_host) % count;
    path path = { .parent = -1 };
#define MEMBER_AT(p) ((p) == 0 ? root : tu_hosts_leader(hosts, (root_host + (p)) % count))
    if (chain) {
        path.parent = place > 0 ? MEMBER_AT(place - 1) : -1;
        if (place + 1 < count)
            path.children[path.count++] = MEMBER_AT(place + 1);
        return path;
    }
    int bit = 1;
    while (bit < count && (place & bit) == 0)
        bit *= 2;
    if (place != 0)
        path.parent = MEMBER_AT(place - bit);
    for (bit /= 2; bit > 0; bit /= 2)
        if (place + bit < count)
            path.children[path.count++] = MEMBER_AT(place + bit);
#undef MEMBER_AT
    return path;
}

static int host_of(const tu_hosts *hosts, int member) {
    for (int host = 0; host < hosts->host_count; host++)
        for (int i = 0; i < hosts->hosts[host].count; i++)
            if (hosts->hosts[host].members[i] == member)
                return host;
    return 0;
}

static tutti_status carry_block(tu_hosts *hosts, tu_task *task, const path *path, const unsigned char *from,
                                unsigned char *to, size_t bytes, uint32_t step) {
    tu_round round;
    tutti_status status = tu_round_begin(&round, hosts, task, 64);
    if (status != TUTTI_OK)
        return status;
    if (path->parent >= 0) {
        status = tu_round_receive(&round, path->parent, step, to, bytes);
        if (status == TUTTI_OK)
            status = tu_round_wait(&round);
    }
    for (int i = 0; i < path->count && status == TUTTI_OK; i++)
        status = tu_round_send(&round, path->children[i], step, path->parent >= 0 ? to : from, bytes);
    if (status == TUTTI_OK)
        status = tu_round_wait(&round);
    return tu_round_end(&round, status);
}

static tutti_status broadcast(tu_hosts *hosts, tu_task *task) {
    size_t bytes = task->info.count * task->element;
    int root = task->info.root, root_host = host_of(hosts, root), rank = hosts->group->rank;
    int speaker = hosts->host == root_host ? root : tu_hosts_leader(hosts, hosts->host);
    path path = path_of(hosts, root_host, root, bytes >= CHAIN_BYTES && hosts->host_count > 2);
    int place = 0;
    while (hosts->hosts[hosts->host].members[place] != speaker)
        place++;
    tutti_status status = TUTTI_OK;
    uint32_t step = 0;
    for (size_t at = 0; at < bytes && status == TUTTI_OK; at += BLOCK, step++) {
        size_t length = bytes - at < BLOCK ? bytes - at : BLOCK;
        const unsigned char *from = rank == root ? (const unsigned char *)task->in + at : NULL;
        unsigned char *to = (unsigned char *)task->out + at;
        if (rank == speaker)
            status = carry_block(hosts, task, &path, from, to, length, step);
        tutti_call call = tu_hosts_call(task);
        if (status == TUTTI_OK && hosts->here != NULL)
            status = tutti_broadcast(hosts->here, rank == root ? from : to, to, length, TUTTI_U8, place, &call);
        else if (status == TUTTI_OK && rank == root && from != to)
            memmove(to, from, length);
    }
    return status;
}

/* ---- to one receiver ---- */

/* Between ranks of this host. */
static tutti_status move_here(tu_hosts *hosts, tu_task *task, const unsigned char *in) {
    const tu_host *host = &hosts->hosts[hosts->host];
    int rank = hosts->group->rank, count = host->count;
    unsigned char *out = task->out;
    if (hosts->here == NULL) {
        tu_part part = tu_part_of(task, rank, rank, rank);
        if (part.bytes > 0 && out + part.out_offset != in + part.in_offset)
            memmove(out + part.out_offset, in + part.in_offset, part.bytes);
        return TUTTI_OK;
    }
    size_t *counts = calloc(4 * (size_t)count, sizeof *counts);
    if (counts == NULL)
        return tu_error_memory("parts of a collective", 4 * (size_t)count * sizeof *counts);
    size_t *in_offsets = counts + count, *out_counts = in_offsets + count, *out_offsets = out_counts + count;
    for (int i = 0; i < count; i++) {
        tu_part away = tu_part_of(task, rank, rank, host->members[i]);
        tu_part home = tu_part_of(task, rank, host->members[i], rank);
        counts[i] = away.bytes;
        in_offsets[i] = away.in_offset;
        out_counts[i] = home.bytes;
        out_offsets[i] = home.out_offset;
    }
    tutti_call call = tu_hosts_call(task);
    tutti_status status =
        tutti_all_to_all_v(hosts->here, in, counts, in_offsets, out, out_counts, out_offsets, TUTTI_U8, &call);
    free(counts);
    return status;
}

static tutti_status move_across(tu_hosts *hosts, tu_task *task, const unsigned char *in, tu_round *round) {
    int rank = hosts->group->rank, size = hosts->group->size;
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < size && status == TUTTI_OK; i++) {
        int from = (rank + size - i) % size;
        tu_part part = tu_part_of(task, rank, from, rank);
        if (hosts->group->job_ranks[from] < 0 && tu_listens(task, rank, from))
            status = tu_round_receive(round, from, 0, (unsigned char *)task->out + part.out_offset, part.bytes);
    }
    for (int i = 1; i < size && status == TUTTI_OK; i++) {
        int to = (rank + i) % size;
        tu_part part = tu_part_of(task, rank, rank, to);
        if (hosts->group->job_ranks[to] < 0 && tu_listens(task, to, rank))
            status = tu_round_send(round, to, 0, in + part.in_offset, part.bytes);
    }
    return status;
}

static tutti_status move_parts(tu_hosts *hosts, tu_task *task) {
    size_t bytes = tu_in_bytes(task, hosts->group->rank, hosts->group->size);
    void *copy = NULL;
    const unsigned char *in = task->in;
    if (task->in == task->out && bytes > 0) { /* what comes would overwrite what is still to go */
        copy = malloc(bytes);
        if (copy == NULL)
            return tu_error_memory("a collective in place", bytes);
        in = memcpy(copy, task->in, bytes);
    }
    tu_round round;
    tutti_status status = tu_round_begin(&round, hosts, task, hosts->group->size);
    if (status == TUTTI_OK) {
        status = move_across(hosts, task, in, &round);
        if (status == TUTTI_OK)
            status = move_here(hosts, task, in);
        if (status == TUTTI_OK)
            status = tu_round_wait(&round);
        status = tu_round_end(&round, status);
    }
    free(copy);
    return status;
}

tutti_status tu_hosts_move(tu_hosts *hosts, tu_task *task) {
    if (tu_gathers(task->row) && task->row->flow == TU_FLOW_ALL)
        return all_gather(hosts, task);
    return task->row->flow == TU_FLOW_FROM_ROOT && task->row->in == TU_EXTENT_WHOLE ? broadcast(hosts, task)
                                                                                    : move_parts(hosts, task);
}
