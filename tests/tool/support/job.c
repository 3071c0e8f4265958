/* SPDX-License-Identifier: Apache-2.0
 *
 * A job that goes wrong on purpose, for the tests of `tutti ps` and `tutti trace`: job SCENARIO.
 *
 *     well       three all-reduces and a barrier
 *     wait       the same, then every rank sleeps with its world open
 *     messages   two messages from each rank to the next, all under way at once; then as wait
 *     compute    rank 1 computes for ever instead of coming to the third all-reduce
 *     skip       rank 1 skips the third all-reduce and sleeps
 *     order      rank 1 calls barrier and all-reduce the other way round
 *     groups     two groups of all ranks; rank 1 uses them the other way round: everybody waits for somebody
 *     stop       rank 1 stops itself before the third all-reduce
 *     tags       every rank sends to the next one and receives from the one before it, rank 1 with another tag
 *     silent     the same, but rank 1 sends nothing, and sleeps
 *     leave      the same, but rank 1 sends nothing, and closes its world
 *     unread     every rank sends a message to the next one, which nobody receives; then as wait
 *     kill       rank 1 kills itself before the third all-reduce
 *     store      rank 1 kills itself while the others wait on the store for what never comes; they say what they heard
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/collective.h>
#include <tutti/store.h>
#include <tutti/world.h>
#include <unistd.h>

static void try(tutti_status status) {
    if (status == TUTTI_OK)
        return;
    fprintf(stderr, "%s\n", tutti_error_message());
    exit(3);
}

static void reduce(tutti_group *group) {
    float values[4] = { 1, 2, 3, 4 };
    try(tutti_all_reduce(group, values, values, 4, TUTTI_F32, TUTTI_SUM, NULL));
}

static void misbehave(const char *scenario, tutti_world *world) {
    static _Atomic long turns;
    tutti_group *group = tutti_world_group(world);
    if (strcmp(scenario, "compute") == 0)
        for (;;)
            turns++;
    if (strcmp(scenario, "skip") == 0)
        for (;;)
            pause();
    if (strcmp(scenario, "stop") == 0)
        raise(SIGSTOP);
    if (strcmp(scenario, "kill") == 0)
        raise(SIGKILL);
    if (strcmp(scenario, "order") == 0) {
        try(tutti_barrier(group, NULL));
        reduce(group);
        exit(0);
    }
}

static void use_two_groups(tutti_world *world, bool swapped) {
    tutti_group *groups[2];
    static const char *const names[2] = { "data", "tensor" };
    for (int i = 0; i < 2; i++) {
        tutti_group_options options = TUTTI_GROUP_OPTIONS_INIT;
        options.name = names[i];
        try(tutti_group_new(world, NULL, 0, &options, &groups[i]));
    }
    try(tutti_barrier(groups[swapped ? 1 : 0], NULL));
    try(tutti_barrier(groups[swapped ? 0 : 1], NULL));
}

static void pass_messages(tutti_world *world) {
    int size = tutti_world_size(world), next = (tutti_world_rank(world) + 1) % size;
    int before = (tutti_world_rank(world) + size - 1) % size, sent[2] = { 1, 2 }, got[2];
    tutti_group *group = tutti_world_group(world);
    tutti_work *works[4];
    for (int i = 0; i < 2; i++) {
        tutti_call receive = TUTTI_CALL_INIT, send = TUTTI_CALL_INIT;
        receive.work = &works[i];
        send.work = &works[2 + i];
        try(tutti_recv(group, &got[i], 1, TUTTI_I32, before, 5, &receive));
        try(tutti_send(group, &sent[i], 1, TUTTI_I32, next, 5, &send));
    }
    for (int i = 0; i < 4; i++) {
        try(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
    }
}

/* Round the ring, with one that does not take part as it should. */
static void pass_round(const char *scenario, tutti_world *world) {
    int size = tutti_world_size(world), rank = tutti_world_rank(world), in[3] = { 1, 2, 3 }, out[5];
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    tutti_group *group = tutti_world_group(world);
    if (strcmp(scenario, "unread") == 0) {
        try(tutti_send(group, in, 1, TUTTI_I32, next, 9, NULL));
        return;
    }
    if (rank == 1 && strcmp(scenario, "leave") == 0) {
        try(tutti_world_close(world));
        exit(0);
    }
    if (rank == 1 && strcmp(scenario, "silent") == 0)
        for (;;)
            pause();
    try(tutti_send_recv(group, in, 3, next, out, 5, before, TUTTI_I32,
                        rank == 1 && strcmp(scenario, "tags") == 0 ? 7777 : 5, NULL));
}

/* Until so many ranks have been counted under a key. */
static void meet(tutti_store *store, const char *key, int amount, int ranks) {
    int64_t sum;
    try(tutti_store_add(store, key, amount, &sum));
    while (sum < ranks) {
        usleep(1000);
        try(tutti_store_add(store, key, 0, &sum));
    }
}

/* Each in another kind of wait, without a deadline. */
static void wait_on_store(tutti_world *world) {
    tutti_store *store = tutti_world_store(world);
    int rank = tutti_world_rank(world), others = tutti_world_size(world) - 1;
    const char *key = "never";
    void *value;
    size_t bytes;
    tutti_status status;
    meet(store, "waiting", rank != 1, rank == 1 ? others : 0);
    if (rank == 1)
        raise(SIGKILL);
    if (rank == 0)
        status = tutti_store_wait(store, &key, 1, TUTTI_UNTIL_EVENT);
    else if (rank == 2)
        status = tutti_store_get(store, key, TUTTI_UNTIL_EVENT, &value, &bytes);
    else
        status = tutti_store_queue_pop(store, key, true, TUTTI_UNTIL_EVENT, &value, &bytes);
    printf("rank %d heard %s: %s\n", rank, tutti_status_name(status), tutti_error_message());
    meet(store, "heard", 1, others); /* so that nobody hears of another's end instead */
    exit(0);
}

int main(int argc, char **argv) {
    const char *scenario = argc > 1 ? argv[1] : "well";
    tutti_world *world;
    try(tutti_world_open(NULL, &world));
    tutti_group *group = tutti_world_group(world);
    reduce(group);
    reduce(group);
    if (strcmp(scenario, "groups") == 0)
        use_two_groups(world, tutti_world_rank(world) == 1);
    if (strcmp(scenario, "messages") == 0)
        pass_messages(world);
    static const char *const rounds[] = { "tags", "silent", "leave", "unread" };
    for (size_t i = 0; i < sizeof rounds / sizeof rounds[0]; i++)
        if (strcmp(scenario, rounds[i]) == 0)
            pass_round(scenario, world);
    if (strcmp(scenario, "store") == 0)
        wait_on_store(world);
    if (tutti_world_rank(world) == 1)
        misbehave(scenario, world);
    reduce(group);
    try(tutti_barrier(group, NULL));
    while (strcmp(scenario, "wait") == 0 || strcmp(scenario, "messages") == 0 || strcmp(scenario, "unread") == 0)
        pause();
    try(tutti_world_close(world));
    return 0;
}
