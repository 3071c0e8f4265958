/* SPDX-License-Identifier: Apache-2.0
 *
 * A server on a pool of workers that outlives them: each request is answered whatever dies, and the pool is whole again
 * afterwards.
 *
 *     tutti run -n 4 --refill 10 ./server <<< 3
 *
 * A line of standard input is a request, a number; the answer is the sum of the outputs of a linear layer for it. The
 * layer's weights are split over the ranks; each adds up its share, and an all-reduce in symmetric memory adds the
 * shares. Rank 0 waits for lines and for events; the others wait for rank 0, without a deadline. Kill a worker (its pid
 * is shown) at any time.
 *
 * After a death the survivors shrink the group, split the weights anew and answer the request; then tutti_group_refill
 * takes the newcomer in, and the block is rendezvoused with the group that is whole.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/tutti.h>
#include <unistd.h>

#define OUTPUTS 64
#define INPUTS 256
#define MINUTE INT64_C(60000000000)

typedef struct request {
    double x;
    int number; /* -1: the end */
} request;

typedef struct server {
    tutti_world *world;
    tutti_group *group; /* that answers now */
    tutti_memory *block;
    tutti_peers *peers;
    bool stays; /* nobody will come any more: those that are left go on */
} server;

static void give_up(const char *what) {
    fprintf(stderr, "%s: %s\n", what, tutti_error_message());
    exit(1);
}

/* Stands for weights that are loaded from a file: any rank can have any part of them. */
static double weight(int output, int input) {
    return (double)((output * 7 + input * 3) % 11) / 16;
}

/* The block is mapped by the members of the group that is to use it. */
static void use_group(server *server, tutti_group *group) {
    tutti_peers_release(server->peers);
    tutti_group_release(server->group);
    server->group = group;
    server->peers = NULL;
    if (tutti_memory_rendezvous(server->block, group, &server->peers))
        server->peers = NULL; /* somebody died: the next operation tells */
}

/* Everybody computes its share of the layer; the shares are added where they lie. */
static tutti_status answer(server *server, const request *request, double *sum) {
    int rank = tutti_group_rank(server->group), size = tutti_group_size(server->group);
    double *outputs = tutti_memory_data(server->block);
    memset(outputs, 0, OUTPUTS * sizeof *outputs);
    for (int output = 0; output < OUTPUTS; output++)
        for (int input = rank; input < INPUTS; input += size)
            outputs[output] += weight(output, input) * request->x;
    tutti_status status = tutti_all_reduce(server->group, outputs, outputs, OUTPUTS, TUTTI_F64, TUTTI_SUM, NULL);
    *sum = 0;
    for (int output = 0; output < OUTPUTS; output++)
        *sum += outputs[output];
    return status;
}

/* Rank 0: the next line, or a death, which shows in the next operation. */
static void next_request(server *server, request *request) {
    int events;
    char line[128];
    if (tutti_world_event_fd(server->world, &events))
        give_up("events");
    struct pollfd polled[] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .fd = events, .events = POLLIN } };
    for (;;) {
        poll(polled, 2, -1);
        tutti_event event = TUTTI_EVENT_INIT;
        while (tutti_world_next_event(server->world, 1, &event) == TUTTI_OK)
            fprintf(stderr, "rank 0 hears: %s\n", event.text);
        if (tutti_group_check(server->group) != TUTTI_OK) {
            request->number = 0; /* nothing to answer: only to be whole again */
            return;
        }
        if (polled[0].revents == 0)
            continue;
        static int number;
        bool more = fgets(line, sizeof line, stdin) != NULL;
        request->number = more ? ++number : -1;
        request->x = more ? atof(line) : 0;
        return;
    }
}

/* From rank 0 of the group to the others, who wait for it without a deadline. */
static tutti_status share_request(server *server, request *request) {
    int size = tutti_group_size(server->group);
    if (tutti_group_rank(server->group) != 0)
        return tutti_recv(server->group, request, sizeof *request, TUTTI_U8, 0, 0,
                          TUTTI_OPTIONS(tutti_call, .timeout_ns = TUTTI_UNTIL_EVENT));
    tutti_status status = tutti_group_check(server->group);
    for (int rank = 1; rank < size && status == TUTTI_OK; rank++)
        status = tutti_send(server->group, request, sizeof *request, TUTTI_U8, rank, 0, NULL);
    return status;
}

/* Until all that are left have answered alike: a death may let some finish what it fails for others. */
static void serve(server *server, request *request, double *sum) {
    for (bool all = false; !all;) {
        tutti_status status = share_request(server, request);
        if (status == TUTTI_OK && request->number > 0)
            status = answer(server, request, sum);
        if (tutti_group_agree(server->group, status == TUTTI_OK, &all))
            give_up("agree");
        if (all)
            return;
        tutti_group *rest;
        if (tutti_group_shrink(server->group, NULL, &rest))
            give_up("shrink");
        use_group(server, rest);
    }
}

static void become_whole(server *server) {
    tutti_group *whole;
    tutti_status status = tutti_group_refill(tutti_world_group(server->world), MINUTE, &whole);
    server->stays = status == TUTTI_ERROR_STATE; /* on all ranks alike: --refill is used up */
    if (server->stays)
        fprintf(stderr, "refill: %s\n", tutti_error_message());
    else if (status)
        give_up("refill");
    else
        use_group(server, whole);
}

int main(void) {
    server server = { NULL, NULL, NULL, NULL, false };
    request request = { 0, 0 };
    double sum = 0;
    if (tutti_world_open(NULL, &server.world))
        give_up("open");
    int rank = tutti_world_rank(server.world), size = tutti_world_size(server.world);
    fprintf(stderr, "rank %d is pid %d\n", rank, (int)getpid());
    if (tutti_memory_alloc(server.world, OUTPUTS * sizeof(double), NULL, &server.block))
        give_up("memory");
    use_group(&server, tutti_group_keep(tutti_world_group(server.world)));
    while (request.number >= 0) {
        if (rank == 0)
            next_request(&server, &request);
        serve(&server, &request, &sum);
        if (rank == 0 && request.number > 0)
            printf("request %d: %g, answered by %d of %d ranks\n", request.number, sum, tutti_group_size(server.group),
                   size);
        fflush(stdout);
        if (tutti_group_size(server.group) < size && request.number >= 0 && !server.stays)
            become_whole(&server);
    }
    tutti_peers_release(server.peers);
    tutti_memory_release(server.block);
    tutti_group_release(server.group);
    if (tutti_world_close(server.world))
        give_up("close");
    return 0;
}
