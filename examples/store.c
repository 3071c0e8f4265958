/* SPDX-License-Identifier: Apache-2.0
 *
 * A store: processes that know nothing but an address find each other, count, wait and hand out work.
 *
 * The parent serves on a Unix socket, which only this user can open. Its children take numbers from a counter, meet at
 * a barrier, and share out a queue. With "tcp://host:port" instead of "unix:@name" the same works between hosts, and
 * with programs of PyTorch.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <tutti/store.h>
#include <unistd.h>

enum {
    WORKERS = 4,
    PIECES = 10
};

static void must(tutti_status status) {
    if (status != TUTTI_OK) {
        fprintf(stderr, "%s: %s\n", tutti_status_name(status), tutti_error_message());
        exit(1);
    }
}

static int worker(const char *address) {
    tutti_store *store;
    int64_t number, done = 0;
    must(tutti_store_open_url(address, NULL, &store));
    must(tutti_store_add(store, "workers", 1, &number)); /* 1, 2, 3, …: each gets its own */
    must(tutti_store_barrier(store, "all here", WORKERS, 0));

    void *name;
    must(tutti_store_get(store, "job", 0, &name, NULL)); /* waits until somebody has set it */
    for (;; done++) {
        void *piece;
        tutti_status status = tutti_store_queue_pop(store, "pieces", false, 0, &piece, NULL);
        if (status == TUTTI_ERROR_EMPTY)
            break;
        must(status);
        tutti_free(piece);
    }
    printf("worker %d of \"%s\" did %d pieces\n", (int)number, (char *)name, (int)done);
    tutti_free(name);
    must(tutti_store_add(store, "done", done, NULL));
    must(tutti_store_barrier(store, "all done", WORKERS + 1, 0));
    tutti_store_release(store);
    return 0;
}

int main(void) {
    char host[64], address[64];
    tutti_store *server, *store;
    snprintf(host, sizeof host, "unix:@tutti-example-%d", (int)getpid());
    must(tutti_store_serve(host, 0, NULL, &server));
    snprintf(address, sizeof address, "%s", tutti_store_address(server));
    for (int i = 0; i < WORKERS; i++) {
        fflush(stdout);
        if (fork() == 0)
            exit(worker(address));
    }

    must(tutti_store_clone(server, &store));
    for (int i = 0; i < PIECES; i++)
        must(tutti_store_queue_push(store, "pieces", "stone", 5));
    must(tutti_store_set(store, "job", "a wall", 6));
    must(tutti_store_barrier(store, "all done", WORKERS + 1, 0));
    int64_t done;
    must(tutti_store_add(store, "done", 0, &done));
    printf("%d of %d pieces are done\n", (int)done, PIECES);

    int failed = done != PIECES, status;
    while (wait(&status) > 0)
        failed |= status != 0;
    tutti_store_release(store);
    tutti_store_release(server);
    return failed;
}
