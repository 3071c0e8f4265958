/* SPDX-License-Identifier: Apache-2.0
 *
 * What one TCP stream between two hosts permits, as a contender of measure.py: two ranks, one socket, nothing else. An
 * all-reduce sends and receives the vector and adds it up; a put is one write of all bytes and a byte that comes back;
 * a signal is a byte to and fro. Who waits looks again and again, as MPI and Tutti do while a call is under way.
 *
 *     RANK=0|1 ADDRESS=a.b.c.d PORT=n stream FOLDER CPUS
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../peers/worker.h"

static const bool peer_exact = false; /* the own part is added to the other's */

static int stream;

static void fail(const char *what) {
    fprintf(stderr, "stream, rank %d: %s: %s\n", rank, what, strerror(errno));
    exit(1);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    if (value == NULL) {
        fprintf(stderr, "stream: %s is not set\n", name);
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

static void peer_open(int *argc, char ***argv, int *r, int *s) {
    (void)argc, (void)argv;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(variable("PORT"))) };
    int on = 1;
    *r = atoi(variable("RANK"));
    *s = 2;
    if (inet_pton(AF_INET, variable("ADDRESS"), &address.sin_addr) != 1)
        fail("ADDRESS");
    stream = *r == 0 ? wait_for_other(&address) : go_to_other(&address);
    setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void peer_close(void) {
    close(stream);
}

/* As much of both as there is to send and to receive, until all of it is. */
static void move(const void *out, size_t out_bytes, void *in, size_t in_bytes) {
    size_t gone = 0, come = 0;
    while (gone < out_bytes || come < in_bytes) {
        ssize_t moved = gone < out_bytes
                            ? send(stream, (const char *)out + gone, out_bytes - gone, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : 0;
        if (moved < 0 && errno != EAGAIN)
            fail("send");
        gone += moved > 0 ? (size_t)moved : 0;
        moved = come < in_bytes ? recv(stream, (char *)in + come, in_bytes - come, MSG_DONTWAIT) : 1;
        if (moved == 0 || (moved < 0 && errno != EAGAIN))
            fail("receive");
        come += moved > 0 && come < in_bytes ? (size_t)moved : 0;
    }
}

static void peer_barrier(void) {
    char byte = 0;
    move(&byte, 1, &byte, 1);
}

static bool peer_understands(const char *dtype) {
    return strcmp(dtype, "f32") == 0;
}

static size_t peer_element(void) {
    return sizeof(float);
}

static void *peer_buffer(int which, size_t bytes, bool symmetric) {
    static void *buffers[3];
    static size_t sizes[3];
    (void)symmetric;
    if (sizes[which] < bytes) {
        free(buffers[which]);
        buffers[which] = calloc(1, bytes);
        sizes[which] = bytes;
    }
    if (buffers[which] == NULL && bytes > 0)
        fail("memory");
    return buffers[which];
}

static void peer_fill(void *to, size_t first, size_t count, int of) {
    for (size_t i = 0; i < count; i++)
        ((float *)to)[i] = value(of, first + i);
}

static void peer_run(peer_operation operation, const void *in, void *out, size_t count) {
    size_t bytes = operation == SIGNAL ? 1 : count * sizeof(float);
    char byte = 0;
    if (operation == ALL_REDUCE) {
        move(in, bytes, out, bytes);
        for (size_t i = 0; i < count; i++)
            ((float *)out)[i] += ((const float *)in)[i];
    } else if (rank == 0) {
        move(operation == SIGNAL ? &byte : in, bytes, NULL, 0);
        move(NULL, 0, &byte, 1);
    } else {
        move(NULL, 0, operation == SIGNAL ? &byte : out, bytes);
        move(&byte, 1, NULL, 0);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "started by measure.py: stream FOLDER CPUS\n");
        return 2;
    }
    peer_open(&argc, &argv, &rank, &size);
    int status = worker_loop(argv[1], argv[2]);
    peer_close();
    return status;
}
