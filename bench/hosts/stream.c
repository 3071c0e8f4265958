/* SPDX-License-Identifier: Apache-2.0
 *
 * What one TCP stream between two hosts permits, as a contender of measure.py: two ranks, one socket, nothing else. An
 * all-reduce swaps the inputs and adds up what comes while it comes; a put is one write of all bytes and a byte that
 * comes back; a signal is a byte to and fro. Who waits looks again and again, as MPI and Tutti do while a call is under
 * way.
 *
 *     RANK=0|1 ADDRESS=a.b.c.d PORT=n stream FOLDER CPUS
 */
#include "meet.h"

#define AT_ONCE ((size_t)1 << 20) /* for send and receive: with less, system calls count */

static int stream;

static void peer_open(int *argc, char ***argv, int *r, int *s) {
    (void)argc, (void)argv;
    stream = meet(r, s);
}

static void peer_close(void) {
    close(stream);
}

static size_t send_some(const void *from, size_t bytes) {
    ssize_t moved = send(stream, from, bytes < AT_ONCE ? bytes : AT_ONCE, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved < 0 && errno != EAGAIN)
        fail("send");
    return moved > 0 ? (size_t)moved : 0;
}

static size_t receive_some(void *to, size_t bytes) {
    ssize_t moved = recv(stream, to, bytes, MSG_DONTWAIT);
    if (moved == 0 || (moved < 0 && errno != EAGAIN))
        fail("receive");
    return moved > 0 ? (size_t)moved : 0;
}

/* As much of both as there is to send and to receive, until all of it is. */
static void move(const char *out, size_t out_bytes, char *in, size_t in_bytes) {
    size_t gone = 0, come = 0;
    while (gone < out_bytes || come < in_bytes) {
        gone += gone < out_bytes ? send_some(out + gone, out_bytes - gone) : 0;
        come += come < in_bytes ? receive_some(in + come, in_bytes - come) : 0;
    }
}

static void peer_barrier(void) {
    char byte = 0;
    move(&byte, 1, &byte, 1);
}

/* Both send what they have; what comes is added up while it comes. */
static void swap(const char *in, char *out, size_t bytes) {
    static char buffer[AT_ONCE];
    size_t gone = 0, added = 0, held = 0;
    while (gone < bytes || added < bytes) {
        if (gone < bytes)
            gone += send_some(in + gone, bytes - gone);
        size_t left = bytes - added - held, room = AT_ONCE - held < left ? AT_ONCE - held : left;
        held += room > 0 ? receive_some(buffer + held, room) : 0;
        size_t whole = held / sizeof(float) * sizeof(float);
        if (whole == 0)
            continue;
        add_up(out + added, in + added, buffer, whole, bytes);
        memmove(buffer, buffer + whole, held - whole);
        added += whole;
        held -= whole;
    }
}

static void peer_run(peer_operation operation, const void *in, void *out, size_t count) {
    size_t bytes = operation == SIGNAL ? 1 : count * sizeof(float);
    char byte = 0;
    if (operation == ALL_REDUCE) {
        swap(in, out, bytes);
    } else if (rank == 0) {
        move(operation == SIGNAL ? &byte : in, bytes, NULL, 0);
        move(NULL, 0, &byte, 1);
    } else {
        move(NULL, 0, operation == SIGNAL ? &byte : out, bytes);
        move(&byte, 1, NULL, 0);
    }
}

int main(int argc, char **argv) {
    return run_worker(argc, argv);
}
