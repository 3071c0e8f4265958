/* SPDX-License-Identifier: Apache-2.0
 *
 * Two ranks on two hosts and one socket between them, for the contenders of measure.py that use nothing else; and what
 * they share besides. The environment says where: RANK=0|1 ADDRESS=a.b.c.d PORT=n.
 */
#ifndef BENCH_HOSTS_MEET_H
#define BENCH_HOSTS_MEET_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../peers/plain.h"
#include "kernel/kernel.h"

static const bool peer_exact = true;

static void fail(const char *what) {
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, strerror(errno));
    exit(1);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    if (value == NULL) {
        fprintf(stderr, "%s is not set\n", name);
        exit(2);
    }
    return value;
}

static int wait_for_other(const struct sockaddr_in *address) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (const struct sockaddr *)address, sizeof *address) != 0 || listen(listener, 1) != 0)
        fail("listen");
    int accepted = accept(listener, NULL, NULL);
    if (accepted < 0)
        fail("accept");
    close(listener);
    return accepted;
}

static int go_to_other(const struct sockaddr_in *address) {
    for (int attempt = 0; attempt < 2000; attempt++) {
        int descriptor = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(descriptor, (const struct sockaddr *)address, sizeof *address) == 0)
            return descriptor;
        close(descriptor);
        usleep(10000);
    }
    fail("connect");
    return -1;
}

/* The socket to the other rank. */
static int meet(int *r, int *s) {
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(variable("PORT"))) };
    int on = 1;
    *r = rank = atoi(variable("RANK"));
    *s = 2;
    if (inet_pton(AF_INET, variable("ADDRESS"), &address.sin_addr) != 1)
        fail("ADDRESS");
    int stream = *r == 0 ? wait_for_other(&address) : go_to_other(&address);
    setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return stream;
}

/* By the kernel that Tutti uses, with results past the caches where it does that. */
#define PAST_CACHES ((size_t)4 << 20)
static void add_up(void *to, const void *mine, const void *theirs, size_t bytes, size_t whole) {
    const void *sources[2] = { rank == 0 ? mine : theirs, rank == 0 ? theirs : mine };
    tu_reduce(to, sources, 2, bytes / sizeof(float), TUTTI_F32, TUTTI_SUM, NULL,
              whole >= PAST_CACHES ? TU_KERNEL_STREAM : 0);
}

static int run_worker(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "started by measure.py: %s FOLDER CPUS\n", argv[0]);
        return 2;
    }
    peer_open(&argc, &argv, &rank, &size);
    int status = worker_loop(argv[1], argv[2]);
    peer_close();
    return status;
}

#endif
