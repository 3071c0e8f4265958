/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that trains over hosts and goes on after losses, for tests: every step adds up numbers, puts one into the
 * next rank's memory and meets. When a step fails the rank says why, and shrinks its group; when that fails it says so
 * and ends with status 6. It ends well once STEPS steps were made in a group of fewer ranks.
 *
 *     train [STEPS [SECONDS]]     SECONDS: that a step may take
 *
 * TRAIN_ELEMENTS=N adds up so many numbers in a step.
 * TRAIN_STRIKE=RANK:FILE has that rank kill the process whose number is in the file, if there is one, when it is about
 * to say in the second vote of a shrink whether it has the new group: all others may have said so by then.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/store.h>
#include <unistd.h>

static int elements = 40000; /* of a sum: several fragments between hosts */

typedef struct state {
    tutti_world *world;
    tutti_group *group;
    tutti_memory *memory;
    tutti_peers *peers;
    double *values;
} state;

static int strike_by = -1; /* rank */
static const char *strike_file;

static void read_strike(void) {
    const char *text = getenv("TRAIN_STRIKE"), *colon = text != NULL ? strchr(text, ':') : NULL;
    if (colon != NULL) {
        strike_by = atoi(text);
        strike_file = colon + 1;
    }
}

/* Whether a process has ended, also one that nobody has waited for yet. */
static bool has_ended(int pid) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return true;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
        state = 'Z';
    fclose(file);
    return state == 'Z' || state == 'X';
}

static void strike(void) {
    FILE *file = fopen(strike_file, "r");
    int pid = 0;
    if (file == NULL)
        return;
    bool known =
        fscanf(file, "%d", &pid) == 1 && unlink(strike_file) == 0; /* once: the number may be another's later */
    if (known && pid > 0 && !has_ended(pid) && kill(pid, SIGKILL) == 0) {
        printf("rank %d kills the launcher before its ballot\n", strike_by);
        while (!has_ended(pid))
            usleep(1000);
    }
    fclose(file);
}

/* Ballots: src/world/vote_hosts.c. */
#define BALLOT_KIND 24 /* where its kind lies */
#define COMMIT 3
tutti_status __real_tutti_store_append(tutti_store *store, const char *key, const void *value, size_t bytes);
tutti_status __wrap_tutti_store_append(tutti_store *store, const char *key, const void *value, size_t bytes);
tutti_status __wrap_tutti_store_append(tutti_store *store, const char *key, const void *value, size_t bytes) {
    int32_t member;
    uint32_t kind;
    if (strike_by >= 0 && strncmp(key, "vote/", 5) == 0 && bytes >= BALLOT_KIND + sizeof kind) {
        memcpy(&member, (const char *)value + 4, sizeof member);
        memcpy(&kind, (const char *)value + BALLOT_KIND, sizeof kind);
        if (kind == COMMIT && member == strike_by)
            strike();
    }
    return __real_tutti_store_append(store, key, value, bytes);
}

static tutti_status meet(state *this) {
    tutti_peers_release(this->peers);
    this->peers = NULL;
    return tutti_memory_rendezvous(this->memory, this->group, &this->peers);
}

static tutti_status step(state *this, int number) {
    int rank = tutti_group_rank(this->group), size = tutti_group_size(this->group), next = (rank + 1) % size;
    for (int i = 0; i < elements; i++)
        this->values[i] = rank + number;
    tutti_status status =
        tutti_all_reduce(this->group, this->values, this->values, (size_t)elements, TUTTI_F64, TUTTI_SUM, NULL);
    if (status == TUTTI_OK && this->values[elements - 1] != size * number + size * (size - 1) / 2) {
        printf("rank %d: wrong sum\n", tutti_world_rank(this->world));
        exit(3);
    }
    if (status == TUTTI_OK)
        status = tutti_peers_put(this->peers, next, 0, &number, sizeof number, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_barrier(this->peers, 0, NULL);
    if (status == TUTTI_OK && *(int *)tutti_memory_data(this->memory) != number) {
        printf("rank %d: wrong memory\n", tutti_world_rank(this->world));
        exit(3);
    }
    return status;
}

static tutti_status shrink(state *this) {
    tutti_group *rest;
    int64_t patience = 10 * tutti_group_timeout(this->group); /* for whoever has to find out first that a step failed */
    tutti_status status =
        tutti_group_shrink(this->group, TUTTI_OPTIONS(tutti_shrink_options, .timeout_ns = patience), &rest);
    if (status != TUTTI_OK)
        return status;
    tutti_group_release(this->group);
    this->group = rest;
    return meet(this);
}

int main(int count, char **arguments) {
    int steps = count > 1 ? atoi(arguments[1]) : 20, after = 0;
    if (getenv("TRAIN_ELEMENTS") != NULL)
        elements = atoi(getenv("TRAIN_ELEMENTS"));
    state this = { .values = calloc((size_t)elements, sizeof *this.values) };
    setvbuf(stdout, NULL, _IOLBF, 0);
    read_strike();
    tutti_status status = tutti_world_open(NULL, &this.world);
    int rank = tutti_world_rank(this.world), size = tutti_world_size(this.world);
    if (status == TUTTI_OK)
        this.group = tutti_group_keep(tutti_world_group(this.world));
    if (status == TUTTI_OK && count > 2)
        status = tutti_group_set_timeout(this.group, strtoll(arguments[2], NULL, 10) * 1000000000);
    if (status == TUTTI_OK)
        status = tutti_memory_alloc(this.world, 4096, NULL, &this.memory);
    if (status == TUTTI_OK)
        status = meet(&this);
    for (int number = 0; status == TUTTI_OK && after < steps; number++) {
        status = step(&this, number);
        if (number == 2)
            printf("rank %d of %d, pid %d, runs\n", rank, size, (int)getpid());
        if (status == TUTTI_OK) {
            after += tutti_group_size(this.group) < size;
            continue;
        }
        printf("rank %d failed: %s\n", rank, tutti_error_message());
        after = 0;
        number = -1;
        while ((status = shrink(&this)) == TUTTI_ERROR_DEAD && tutti_group_size(this.group) < size)
            printf("rank %d shrinks again: %s\n", rank, tutti_error_message());
    }
    if (status != TUTTI_OK) {
        printf("rank %d ends: %s\n", rank, tutti_error_message());
        return 6;
    }
    printf("rank %d went on with %d ranks\n", rank, tutti_group_size(this.group));
    bool all;
    if (tutti_group_agree(this.group, true, &all) != TUTTI_OK) /* nobody leaves before all are done */
        printf("rank %d: %s\n", rank, tutti_error_message());
    tutti_peers_release(this.peers);
    tutti_memory_release(this.memory);
    tutti_group_release(this.group);
    return tutti_world_close(this.world) == TUTTI_OK ? 0 : 4;
}
