/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulation: ranks as coroutines, messages as events; see simulation.h.
 */
#include "simulation.h"

#include <malloc.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "memory/network_inner.h"
#include "transport.h"

#define STACK ((size_t)32 << 10)                         /* of a rank */
#define FRAGMENT ((size_t)1 << 20)                       /* MOST of backend/ucx/network.c */
#define UCX_HEADER 13                                    /* bytes, besides Tutti's */
#define PACKET_DATA 1448                                 /* of a packet of 1514 bytes, with TCP's time stamps */
#define PACKET_HEADERS 66                                /* Ethernet, IP, TCP */
#define SHARES 3                                         /* sizes that lists have */
#define BUCKETS ((size_t)1 << 20)                        /* of the tables; a power of two */
#define NOWHERE ((void *)(uintptr_t)((uint64_t)1 << 44)) /* data that nobody touches */

/* A message between two ranks, from the first fragment that comes, or the receipt, to the last. */
typedef struct message {
    struct message *next;
    int to, from;
    uint32_t step;
    tu_receipt *receipt; /* NULL: not posted yet */
    size_t kept;         /* bytes that came before it was */
    int kept_count;
} message;

typedef struct parcel {
    struct parcel *next;
    tu_dispatch *dispatch;
} parcel;

/* What one rank sends another. */
typedef struct flow {
    struct flow *next;
    int from, to;
    bool reached;
    uint64_t sent, taken, owed;
    parcel *first, **last; /* whose fragments wait for the window */
} flow;

typedef enum event_kind {
    FRAGMENT_CAME,
    FRAGMENT_LEFT,
    WINDOW_OPENED,
    RANK_GOES_ON
} event_kind;

typedef struct event {
    double time;
    uint64_t number; /* of those at the same time the first goes first */
    event_kind kind;
    int rank, from;
    uint32_t step;
    uint64_t bytes;
    tu_dispatch *dispatch;
} event;

typedef struct place {
    int arrived, count;
    double latest;
    double link_free; /* when the link has sent everything */
    int *waiting;     /* ranks that have come, and wait for the others */
} place;

typedef struct coroutine {
    ucontext_t context;
    simulation *simulation;
    tutti_group *group;
    tu_hosts hosts;
    tu_task task;
    double time;
    bool (*ready)(void *argument); /* of the wait in which it is; NULL: in none */
    void *argument;
    bool over;
    tutti_status status;
    simulation_traffic traffic;
} coroutine;

struct simulation {
    simulation_model model;
    int size, host_count, over;
    coroutine *ranks;
    coroutine *running;
    place *places;
    tu_host *hosts;
    int *members, *lists, *job_ranks;
    size_t *counts;      /* of calls with lists: SHARES of them for all_to_all_v, and one of what each rank has */
    int *to;             /* of permute */
    tu_collective state; /* of all ranks: scratch whose content nobody reads */
    unsigned char *stacks;
    ucontext_t loop;
    message **messages;
    flow **flows;
    event *events; /* a heap */
    size_t event_count, event_room;
    uint64_t event_number;
};

static simulation *current; /* the one that runs: the executor knows of none */

/* ---- events ---- */

static bool before(const event *one, const event *other) {
    return one->time != other->time ? one->time < other->time : one->number < other->number;
}

static void add_event(simulation *this, event made) {
    if (this->event_count == this->event_room) {
        this->event_room = this->event_room * 2 + 1024;
        event *grown = realloc(this->events, this->event_room * sizeof *grown);
        if (grown == NULL) {
            fprintf(stderr, "simulation: no memory for %zu events\n", this->event_room);
            exit(1);
        }
        this->events = grown;
    }
    made.number = this->event_number++;
    size_t at = this->event_count++;
    for (; at > 0 && before(&made, &this->events[(at - 1) / 2]); at = (at - 1) / 2)
        this->events[at] = this->events[(at - 1) / 2];
    this->events[at] = made;
}

static event take_event(simulation *this) {
    event first = this->events[0], last = this->events[--this->event_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < this->event_count; at = child) {
        if (child + 1 < this->event_count && before(&this->events[child + 1], &this->events[child]))
            child++;
        if (!before(&this->events[child], &last))
            break;
        this->events[at] = this->events[child];
    }
    this->events[at] = last;
    return first;
}

/* ---- tables ---- */

static size_t bucket_of(uint64_t one, uint64_t other, uint64_t third) {
    uint64_t hash = (one * 0x9e3779b97f4a7c15u ^ other) * 0xc2b2ae3d27d4eb4fu ^ third;
    return (hash ^ hash >> 29) * 0x165667b19e3779f9u >> 20 & (BUCKETS - 1);
}

static void *made(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (memory == NULL) {
        fprintf(stderr, "simulation: no memory\n");
        exit(1);
    }
    return memory;
}

static message **find_message(simulation *this, int to, int from, uint32_t step) {
    message **link = &this->messages[bucket_of((uint64_t)to, (uint64_t)from, step)];
    while (*link != NULL && ((*link)->to != to || (*link)->from != from || (*link)->step != step))
        link = &(*link)->next;
    if (*link == NULL) {
        *link = made(sizeof **link);
        **link = (message){ .to = to, .from = from, .step = step };
    }
    return link;
}

static flow *find_flow(simulation *this, int from, int to) {
    flow **link = &this->flows[bucket_of((uint64_t)from, (uint64_t)to, 1)];
    while (*link != NULL && ((*link)->from != from || (*link)->to != to))
        link = &(*link)->next;
    if (*link == NULL) {
        *link = made(sizeof **link);
        **link = (flow){ .from = from, .to = to };
        (*link)->last = &(*link)->first;
    }
    return *link;
}

static flow *reach(simulation *this, int from, int to) {
    flow *found = find_flow(this, from, to);
    if (!found->reached)
        this->ranks[from].traffic.connections++;
    found->reached = true;
    return found;
}

/* ---- the wire ---- */

static double wire_bytes(size_t bytes) {
    size_t whole = bytes + sizeof(tu_network_header) + UCX_HEADER;
    return (double)(whole + (whole + PACKET_DATA - 1) / PACKET_DATA * PACKET_HEADERS);
}

/* When what a rank sends at `time` has left. */
static double depart(simulation *this, int rank, double time, size_t bytes) {
    place *from = &this->places[this->ranks[rank].hosts.host];
    double takes = wire_bytes(bytes) * this->model.byte;
    if (takes < this->model.gap)
        takes = this->model.gap;
    from->link_free = (from->link_free > time ? from->link_free : time) + takes;
    return from->link_free;
}

/* Sends what the window allows. */
static void push(simulation *this, flow *flow, double time) {
    for (parcel *parcel; (parcel = flow->first) != NULL;) {
        tu_dispatch *dispatch = parcel->dispatch;
        do {
            size_t left = dispatch->bytes - dispatch->at, piece = left < FRAGMENT ? left : FRAGMENT;
            if (flow->sent - flow->taken + piece + TU_NETWORK_COST > TU_NETWORK_WINDOW)
                return;
            double leaves = depart(this, flow->from, time, piece);
            flow->sent += piece + TU_NETWORK_COST;
            dispatch->at += piece;
            dispatch->under_way++;
            this->ranks[flow->from].traffic.messages++;
            this->ranks[flow->from].traffic.bytes += piece;
            add_event(this, (event){ .time = leaves, .kind = FRAGMENT_LEFT, .rank = flow->from, .dispatch = dispatch });
            add_event(this, (event){ .time = leaves + this->model.latency,
                                     .kind = FRAGMENT_CAME,
                                     .rank = flow->to,
                                     .from = flow->from,
                                     .step = dispatch->step,
                                     .bytes = piece });
        } while (dispatch->at < dispatch->bytes);
        flow->first = parcel->next;
        if (flow->first == NULL)
            flow->last = &flow->first;
        free(parcel);
    }
}

static void take(simulation *this, tu_receipt *receipt, int rank, int from, size_t bytes, double time) {
    flow *flow = find_flow(this, from, rank);
    receipt->got += bytes;
    receipt->done = receipt->got == receipt->bytes;
    flow->owed += bytes + TU_NETWORK_COST;
    if (flow->owed < TU_NETWORK_WINDOW / 4)
        return;
    this->ranks[rank].traffic.taken++;
    add_event(this, (event){ .time = depart(this, rank, time, 0) + this->model.latency,
                             .kind = WINDOW_OPENED,
                             .rank = from,
                             .from = rank,
                             .bytes = flow->owed });
    flow->owed = 0;
}

/* A receipt that has everything is the executor's again. */
static void drop_message(message **link) {
    message *over = *link;
    if (over->receipt == NULL || !over->receipt->done)
        return;
    *link = over->next;
    free(over);
}

/* ---- what the executor calls ---- */

tutti_status simulated_round_begin(tu_round *round, tu_hosts *hosts, tu_task *task, int room) {
    size_t count = room > 0 ? (size_t)room : 1;
    *round = (tu_round){ .hosts = hosts, .task = task, .room = room };
    round->receipts = made(count * sizeof *round->receipts);
    round->dispatches = made(count * sizeof *round->dispatches);
    return TUTTI_OK;
}

tutti_status simulated_round_end(tu_round *round, tutti_status status) {
    free(round->receipts);
    free(round->dispatches);
    return status;
}

tutti_status simulated_round_receive(tu_round *round, int member, uint32_t step, void *to, size_t bytes) {
    simulation *this = current;
    int rank = round->hosts->group->rank;
    tu_receipt *receipt = &round->receipts[round->receipt_count++];
    (void)to;
    *receipt = (tu_receipt){ .member = member, .step = step, .bytes = bytes, .posted = true };
    reach(this, rank, member);
    message **link = find_message(this, rank, member, step);
    (*link)->receipt = receipt;
    for (size_t left = (*link)->kept; (*link)->kept_count > 0; (*link)->kept_count--) {
        size_t piece = left < FRAGMENT ? left : FRAGMENT;
        take(this, receipt, rank, member, piece, this->running->time);
        left -= piece;
    }
    drop_message(link);
    return TUTTI_OK;
}

/* What is done with the bytes as they come takes no time of its own here. */
tutti_status simulated_round_absorb(tu_round *round, int member, uint32_t step, tu_absorb *absorb, void *argument,
                                    size_t bytes) {
    (void)absorb, (void)argument;
    return simulated_round_receive(round, member, step, NULL, bytes);
}

tutti_status simulated_round_send(tu_round *round, int member, uint32_t step, const void *from, size_t bytes) {
    simulation *this = current;
    int rank = round->hosts->group->rank;
    tu_dispatch *dispatch = &round->dispatches[round->dispatch_count++];
    (void)from;
    *dispatch = (tu_dispatch){ .member = member, .step = step, .bytes = bytes };
    flow *flow = reach(this, rank, member);
    parcel *parcel = made(sizeof *parcel);
    parcel->dispatch = dispatch;
    *flow->last = parcel;
    flow->last = &parcel->next;
    this->running->time += this->model.overhead;
    push(this, flow, this->running->time);
    return TUTTI_OK;
}

/* Lets others run until an event makes `ready` true. */
static void rest(coroutine *rank, bool (*ready)(void *argument), void *argument) {
    rank->ready = ready;
    rank->argument = argument;
    swapcontext(&rank->context, &rank->simulation->loop);
    rank->ready = NULL;
}

tutti_status simulated_round_wait_for(tu_round *round, bool (*ready)(void *argument), void *argument) {
    (void)round;
    if (!ready(argument))
        rest(current->running, ready, argument);
    return TUTTI_OK;
}

static bool all_done(void *round) {
    return tu_round_is_done(round);
}

tutti_status simulated_round_wait(tu_round *round) {
    return simulated_round_wait_for(round, all_done, round);
}

tutti_status simulated_hosts_scratch(tu_hosts *hosts, size_t bytes, unsigned char **scratch) {
    (void)hosts, (void)bytes;
    *scratch = NOWHERE;
    return TUTTI_OK;
}

tutti_call simulated_hosts_call(tu_task *task) {
    (void)task;
    return (tutti_call){ .size = sizeof(tutti_call) };
}

void *simulated_touch(void *to, size_t bytes) {
    current->running->time += (double)bytes * current->model.compute;
    return to;
}

size_t simulated_sum(const tutti_group *here, const size_t *counts) {
    size_t sum = 0;
    for (int i = 0; i < ((const place *)(const void *)here)->count; i++)
        sum += counts[i];
    return sum;
}

static bool never(void *argument) {
    (void)argument;
    return false;
}

tutti_status simulated_here(tutti_group *here, size_t bytes) {
    simulation *this = current;
    coroutine *rank = this->running;
    place *place = (struct place *)(void *)here;
    rank->time += (double)bytes * this->model.compute;
    place->latest = rank->time > place->latest ? rank->time : place->latest;
    if (place->arrived + 1 < place->count) {
        place->waiting[place->arrived++] = rank->group->rank;
        rest(rank, never, NULL); /* who comes last says when they go on */
        return TUTTI_OK;
    }
    rank->time = place->latest + this->model.meeting;
    for (int i = 0; i < place->arrived; i++)
        add_event(this, (event){ .time = rank->time, .kind = RANK_GOES_ON, .rank = place->waiting[i] });
    place->arrived = 0;
    place->latest = 0;
    return TUTTI_OK;
}

/* ---- running ---- */

static void run_rank(unsigned high, unsigned low) {
    coroutine *rank = (coroutine *)(void *)((uintptr_t)high << 32 | (uintptr_t)low);
    tu_kind kind = rank->task.row->kind;
    rank->status = kind == TU_KIND_BARRIER     ? simulated_hosts_barrier(&rank->hosts, &rank->task)
                   : kind == TU_KIND_REDUCTION ? simulated_hosts_reduce(&rank->hosts, &rank->task)
                                               : simulated_hosts_move(&rank->hosts, &rank->task);
    rank->over = true;
    rank->simulation->over++;
}

static void go_on(simulation *this, coroutine *rank) {
    this->running = rank;
    swapcontext(&this->loop, &rank->context);
    this->running = NULL;
}

/* Something happened that the rank may wait for. */
static void look(simulation *this, coroutine *rank, double time) {
    if (rank->over || rank->ready == NULL || !rank->ready(rank->argument))
        return;
    rank->time = time > rank->time ? time : rank->time;
    go_on(this, rank);
}

static void happen(simulation *this, const event *event) {
    coroutine *rank = &this->ranks[event->rank];
    tu_dispatch *dispatch = event->dispatch;
    message **link;
    flow *flow;
    switch (event->kind) {
    case FRAGMENT_CAME:
        link = find_message(this, event->rank, event->from, event->step);
        if ((*link)->receipt == NULL) {
            (*link)->kept += event->bytes;
            (*link)->kept_count++;
            return;
        }
        take(this, (*link)->receipt, event->rank, event->from, event->bytes, event->time);
        drop_message(link);
        look(this, rank, event->time + this->model.overhead);
        return;
    case FRAGMENT_LEFT:
        if (--dispatch->under_way > 0 || dispatch->at < dispatch->bytes)
            return;
        dispatch->done = true;
        look(this, rank, event->time);
        return;
    case WINDOW_OPENED:
        flow = find_flow(this, event->rank, event->from);
        flow->taken += event->bytes;
        push(this, flow, event->time);
        return;
    default:
        rank->time = event->time;
        go_on(this, rank);
        return;
    }
}

size_t simulation_share(const simulation_call *call, int from, int to) {
    return call->count * (1 + (size_t)(from + to) % SHARES);
}

int simulation_target(int rank, int size) {
    return rank == 0 ? -1 : (rank + size / 2) % size;
}

/* The lists of all ranks: those of ranks whose numbers leave the same rest are the same. */
static void make_lists(simulation *this, const simulation_call *call) {
    this->counts = this->counts != NULL ? this->counts : made((SHARES + 1) * (size_t)this->size * sizeof *this->counts);
    this->to = this->to != NULL ? this->to : made((size_t)this->size * sizeof *this->to);
    for (int rank = 0; rank < this->size; rank++) {
        for (int kind = 0; kind < SHARES; kind++)
            this->counts[kind * this->size + rank] = simulation_share(call, kind, rank);
        this->counts[SHARES * this->size + rank] = simulation_share(call, rank, rank);
        this->to[rank] = simulation_target(rank, this->size);
    }
}

static void give_lists(const simulation *this, tu_task *task, int rank) {
    switch ((tu_operation)task->info.operation) {
    case TU_OPERATION_ALL_TO_ALL_V:
        task->in_counts = task->out_counts = this->counts + rank % SHARES * this->size;
        break;
    case TU_OPERATION_ALL_GATHER_V:
    case TU_OPERATION_REDUCE_SCATTER_V:
        task->in_counts = this->counts + SHARES * this->size;
        task->info.count = 0;
        for (int other = 0; other < this->size; other++) /* as collective/check.c has it */
            task->info.count += task->in_counts[other];
        break;
    case TU_OPERATION_PERMUTE:
        task->to = this->to;
        break;
    default:
        return;
    }
}

static void begin(simulation *this, coroutine *rank, const simulation_call *call, double time) {
    int number = rank->group->rank;
    rank->time = time;
    rank->over = false;
    rank->task = (tu_task){ .group = rank->group,
                            .state = &this->state,
                            .row = tu_operation_row_of((uint8_t)call->operation),
                            .in = NOWHERE,
                            .out = (unsigned char *)NOWHERE + ((uint64_t)1 << 40),
                            .element = tutti_dtype_size(call->dtype),
                            .factor = 1 };
    rank->task.info = (tu_operation_info){ .operation = (uint8_t)call->operation,
                                           .dtype = (uint8_t)call->dtype,
                                           .reduction = (uint8_t)call->reduction,
                                           .count = call->count,
                                           .root = call->root };
    rank->task.any_order = call->any_order;
    give_lists(this, &rank->task, number);
    if (call->any_order)
        rank->task.info.algorithm = (uint8_t)simulated_hosts_choose(&rank->hosts, &rank->task);
    getcontext(&rank->context);
    rank->context.uc_stack.ss_sp = this->stacks + (size_t)number * STACK;
    rank->context.uc_stack.ss_size = STACK;
    rank->context.uc_link = &this->loop;
    makecontext(&rank->context, (void (*)(void))(void *)run_rank, 2, (unsigned)((uintptr_t)rank >> 32),
                (unsigned)(uintptr_t)rank);
}

/* Which members are on the host of each: asked by what goes from every rank to every rank alone. */
static bool place_job_ranks(simulation *this) {
    if (this->job_ranks != NULL)
        return true;
    size_t size = (size_t)this->size;
    this->job_ranks = malloc((size_t)this->host_count * size * sizeof *this->job_ranks);
    if (this->job_ranks == NULL)
        return false;
    for (int host = 0; host < this->host_count; host++) {
        int *row = this->job_ranks + (size_t)host * size;
        memset(row, -1, size * sizeof *row);
        for (int i = 0; i < this->hosts[host].count; i++) {
            row[this->hosts[host].members[i]] = i;
            this->ranks[this->hosts[host].members[i]].group->job_ranks = row;
        }
    }
    return true;
}

double simulation_run(simulation *this, const simulation_call *call) {
    double start = 0, end = 0;
    if (tu_operation_row_of((uint8_t)call->operation)->kind == TU_KIND_MOVE && !place_job_ranks(this)) {
        fprintf(stderr, "simulation: no memory for a call from every rank to every rank\n");
        return -1;
    }
    current = this;
    make_lists(this, call);
    this->over = 0;
    for (int rank = 0; rank < this->size; rank++)
        start = this->ranks[rank].time > start ? this->ranks[rank].time : start;
    for (int host = 0; host < this->host_count; host++)
        start = this->places[host].link_free > start ? this->places[host].link_free : start;
    for (int rank = 0; rank < this->size; rank++) {
        begin(this, &this->ranks[rank], call, start);
        add_event(this, (event){ .time = start, .kind = RANK_GOES_ON, .rank = rank });
    }
    while (this->event_count > 0) {
        event next = take_event(this);
        happen(this, &next);
    }
    for (int rank = 0; rank < this->size; rank++) {
        end = this->ranks[rank].time > end ? this->ranks[rank].time : end;
        if (this->ranks[rank].over && this->ranks[rank].status != TUTTI_OK)
            fprintf(stderr, "simulation: rank %d: %s\n", rank, tutti_error_message());
    }
    if (this->over < this->size) {
        fprintf(stderr, "simulation: %d ranks wait for something that does not come\n", this->size - this->over);
        return -1;
    }
    return end - start;
}

/* ---- making ---- */

static void place_rank(simulation *this, int rank, int host, int index) {
    coroutine *made_rank = &this->ranks[rank];
    made_rank->simulation = this;
    made_rank->group = made(sizeof *made_rank->group);
    made_rank->group->rank = rank;
    made_rank->group->size = this->size;
    made_rank->hosts.group = made_rank->group;
    made_rank->hosts.host = host;
    made_rank->hosts.index = index;
    this->hosts[host].count++;
    this->lists[this->members[host] + index] = rank;
}

simulation *simulation_open(const int *each, int hosts, bool round_robin, const simulation_model *model) {
    simulation *this = made(sizeof *this);
    this->model = *model;
    this->host_count = hosts;
    int most = 0, columns = each[0];
    this->members = made((size_t)hosts * sizeof *this->members); /* where each host's list begins */
    for (int host = 0; host < hosts; host++) {
        this->members[host] = this->size;
        this->size += each[host];
        most = each[host] > most ? each[host] : most;
        columns = each[host] < columns ? each[host] : columns;
    }
    mallopt(M_MMAP_MAX, 0); /* there may be more ranks than mappings */
    this->ranks = made((size_t)this->size * sizeof *this->ranks);
    this->places = made((size_t)hosts * sizeof *this->places);
    this->hosts = made((size_t)hosts * sizeof *this->hosts);
    this->lists = made((size_t)this->size * sizeof *this->lists);
    this->state.sources = made((size_t)this->size * sizeof *this->state.sources);
    this->state.factors = made((size_t)this->size * sizeof *this->state.factors);
    this->messages = made(BUCKETS * sizeof(message *));
    this->flows = made(BUCKETS * sizeof(flow *));
    this->stacks = mmap(NULL, (size_t)this->size * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (this->stacks == MAP_FAILED) {
        fprintf(stderr, "simulation: no memory for the stacks of %d ranks\n", this->size);
        exit(1);
    }
    bool contiguous = true;
    int rank = 0;
    for (int turn = 0; turn < most; turn++)
        for (int host = 0; host < hosts && round_robin; host++)
            if (turn < each[host]) {
                place_rank(this, rank, host, turn);
                contiguous = contiguous && this->members[host] + turn == rank;
                rank++;
            }
    for (int host = 0; host < hosts && !round_robin; host++)
        for (int index = 0; index < each[host]; index++)
            place_rank(this, rank++, host, index);
    for (int host = 0; host < hosts; host++) {
        this->hosts[host].members = this->lists + this->members[host];
        this->places[host].count = each[host];
        this->places[host].waiting = made((size_t)each[host] * sizeof(int));
    }
    for (rank = 0; rank < this->size; rank++) {
        tu_hosts *of = &this->ranks[rank].hosts;
        of->host_count = hosts;
        of->columns = columns;
        of->contiguous = contiguous;
        of->hosts = this->hosts;
        of->here = each[of->host] > 1 ? (tutti_group *)(void *)&this->places[of->host] : NULL;
    }
    return this;
}

void simulation_close(simulation *this) {
    if (this == NULL)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        for (flow *flow = this->flows[i], *next; flow != NULL; flow = next) {
            next = flow->next;
            free(flow);
        }
    for (int rank = 0; rank < this->size; rank++)
        free(this->ranks[rank].group);
    for (int host = 0; host < this->host_count; host++)
        free(this->places[host].waiting);
    munmap(this->stacks, (size_t)this->size * STACK);
    free(this->state.sources);
    free(this->state.factors);
    free(this->messages);
    free(this->flows);
    free(this->events);
    free(this->job_ranks);
    free(this->counts);
    free(this->to);
    free(this->members);
    free(this->lists);
    free(this->hosts);
    free(this->places);
    free(this->ranks);
    free(this);
}

int simulation_size(const simulation *this) {
    return this->size;
}

simulation_traffic simulation_sent(const simulation *this, int rank) {
    return this->ranks[rank].traffic;
}

bool simulation_parse(const char *text, simulation_call *call) {
    char name[64], dtype[16];
    *call = (simulation_call){ .reduction = TUTTI_SUM };
    if (sscanf(text, "%63[^:]:%15[^:]:%zu", name, dtype, &call->count) != 3 ||
        tutti_dtype_parse(dtype, &call->dtype) != TUTTI_OK)
        return false;
    char *any = strstr(name, "+any");
    call->any_order = any != NULL;
    if (any != NULL)
        *any = '\0';
    call->operation = tu_operation_find(name);
    tu_kind kind = tu_operation_row_of((unsigned)call->operation)->kind;
    return kind == TU_KIND_BARRIER || kind == TU_KIND_REDUCTION || kind == TU_KIND_MOVE;
}
