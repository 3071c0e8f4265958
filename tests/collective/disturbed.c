/* SPDX-License-Identifier: Apache-2.0
 *
 * What may happen in the middle of the express lanes: deaths, after which the group shrinks while messages lie in the
 * lane; signal handlers; garbage in the pages that the members share. Messages of an old group never reach a new one, a
 * handler ends nothing, and whoever writes garbage leads nobody outside of its own blocks.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/store.h>
#include <unistd.h>

#include "../harness.h"
#include "collective/collective.h"
#include "world/world.h"

/* ---- deaths ---- */

typedef struct note {
    uint64_t generation, number;
} note;

/* Everybody sends to the next and takes what comes from the one before, by the lane, until somebody dies. Every third
 * message has another tag and is never received: it is still there when the group ends. */
static tutti_status pass_on(tutti_group *group, uint64_t generation, uint64_t until) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    for (uint64_t number = 0; number < until; number++) {
        note in = { generation, number }, out = { 0, 0 };
        tutti_status status = number % 3 == 0 ? tutti_send(group, &in, sizeof in, TUTTI_U8, next, 9, NULL) : TUTTI_OK;
        if (status == TUTTI_OK)
            status = tutti_send_recv(group, &in, sizeof in, next, &out, sizeof out, before, TUTTI_U8, 1, NULL);
        if (status != TUTTI_OK)
            return status;
        CHECK_EQ(out.generation, generation);
        CHECK_EQ(out.number, number);
    }
    return TUTTI_OK;
}

/* In each generation one rank dies in the middle of its messages. */
static tutti_status outlive(tutti_world *world, void *argument) {
    _Atomic int *content = argument;
    tutti_group *group = tutti_group_keep(tutti_world_group(world));
    for (int generation = 0; tutti_group_size(group) > 2; generation++) {
        int rank = tutti_group_rank(group), size = tutti_group_size(group), victim = (generation + 1) % size;
        if (rank == victim) {
            (void)!pass_on(group, (uint64_t)generation, 20 + 7 * (uint64_t)generation);
            raise(SIGKILL);
        }
        tutti_status status = pass_on(group, (uint64_t)generation, UINT64_MAX);
        if (status != TUTTI_ERROR_DEAD)
            FAIL("a death gave %s: %s", tutti_status_name(status), tutti_error_message());
        tutti_group *rest;
        CHECK_OK(tutti_group_shrink(group, NULL, &rest));
        tutti_group_release(group);
        group = rest;
    }
    CHECK_OK(pass_on(group, 77, 50));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(group);
    atomic_fetch_add(content, 1);
    return TUTTI_OK;
}

TEST(messages_of_a_group_that_shrank_do_not_reach_the_next_one) {
    _Atomic int *content = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(content != MAP_FAILED);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 5, outlive, content), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(content), 2);
    munmap(content, 4096);
}

/* ---- signal handlers ---- */

static _Atomic int handled;
static void handle(int number) {
    (void)number;
    atomic_fetch_add_explicit(&handled, 1, memory_order_relaxed);
}

TEST_WORLD_PROCESSES(signal_handlers_end_no_message_and_no_barrier, 3) {
    tutti_group *group = tutti_world_group(world);
    struct sigaction action = { .sa_handler = handle }; /* without SA_RESTART: every system call may be interrupted */
    struct itimerval often = { { 0, 300 }, { 0, 300 } }, never = { { 0, 0 }, { 0, 0 } };
    CHECK_EQ(sigaction(SIGALRM, &action, NULL), 0);
    CHECK_EQ(setitimer(ITIMER_REAL, &often, NULL), 0);
    int rounds = test_sanitized() ? 30 : 300;
    for (int round = 0; round < rounds; round++) {
        if (round % 16 == tutti_group_rank(group))
            usleep(2000); /* the others go to sleep in the lane's ordinary way */
        CHECK_OK(pass_on(group, (uint64_t)round, 2));
        int64_t one = 1, sum;
        CHECK_OK(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
        CHECK_EQ(sum, 3);
        CHECK_OK(tutti_barrier(group, NULL));
    }
    while (atomic_load(&handled) == 0)
        usleep(1000);
    CHECK_EQ(setitimer(ITIMER_REAL, &never, NULL), 0);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- garbage ---- */

#define MOST_ELEMENTS 60000

/* Memory between two pages that nobody may touch. */
static unsigned char *guarded(size_t bytes, void **whole, size_t *length) {
    size_t pages = (bytes + 4095) / 4096;
    *length = (pages + 2) * 4096;
    *whole = mmap(NULL, *length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(*whole != MAP_FAILED);
    unsigned char *first = (unsigned char *)*whole + 4096;
    CHECK_EQ(mprotect(first, pages * 4096, PROT_READ | PROT_WRITE), 0);
    return first + pages * 4096 - bytes; /* ends where the second one begins */
}

typedef struct spoiler {
    unsigned char *page; /* this rank's, which the others read */
    bool flags;          /* spoil the flags as well */
    uint64_t seed;
    _Atomic bool ending;
} spoiler;

/* Writes words of garbage into all of what this rank tells the others; against all rules, so no sanitizer looks. */
__attribute__((no_sanitize("thread"))) static void *spoil(void *argument) {
    spoiler *this = argument;
    uint64_t state = this->seed;
    while (!atomic_load(&this->ending)) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        size_t word = (state >> 33) % (sizeof(tu_member) / 8);
        bool flag = word * 8 % TU_LINE == 0 && word * 8 < offsetof(tu_member, said);
        static const uint64_t values[] = { 0, 1, UINT64_MAX, UINT64_C(1) << 40, 8, INT64_MAX };
        uint64_t value = (state >> 20) % 2 == 0 ? state : values[(state >> 40) % 6];
        if (!flag || this->flags)
            __atomic_store_n((uint64_t *)(void *)(this->page + word * 8), value, __ATOMIC_RELAXED);
        if (state % 64 == 0)
            usleep(50);
    }
    return NULL;
}

/* Rank 1 calls what rank 0 calls while another thread of it spoils its page. Whatever comes of it, it ends, and what
 * lies around rank 0's buffers is untouched: else the pages around them end the test. */
static void meet_garbage(tutti_world *world, void *argument) {
    static const size_t counts[] = { 1, 6, 100, 3000, MOST_ELEMENTS };
    const int *trial = argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, MOST_ELEMENTS * 8, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_barrier(group, NULL)); /* the pages are there, */
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "nobody is in a call", 2, INT64_C(60000000000)));
    spoiler spoiler = { .page = (unsigned char *)tu_collective_find(group)->members[1],
                        .flags = *trial % 2 == 1,
                        .seed = (uint64_t)*trial * 977 + 5 };
    pthread_t thread;
    if (rank == 1)
        CHECK_EQ(pthread_create(&thread, NULL, spoil, &spoiler), 0);
    tutti_status status = TUTTI_OK;
    const tutti_call *soon = TUTTI_OPTIONS(tutti_call, .timeout_ns = 500000000);
    for (int round = 0; round < 40 && status == TUTTI_OK; round++) {
        size_t count = counts[(size_t)round % 5], length;
        void *whole[2];
        unsigned char *in = guarded(count * 8, &whole[0], &length), *out = guarded(count * 8, &whole[1], &length);
        bool symmetric = round / 5 % 2 == 1;
        if (symmetric)
            in = tutti_memory_data(memory);
        status = tutti_all_reduce(group, in, out, count, TUTTI_F64, TUTTI_SUM, round % 3 == 0 ? NULL : soon);
        if (status == TUTTI_OK)
            status = tutti_barrier(group, round % 2 == 0 ? NULL : soon);
        munmap(whole[0], length);
        munmap(whole[1], length);
    }
    if (rank == 1) {
        atomic_store(&spoiler.ending, true);
        pthread_join(thread, NULL);
    }
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(garbage_in_the_page_of_a_member_leads_nobody_outside) {
    setenv("TUTTI_TIMEOUT", "2", 1);           /* calls without a deadline of their own */
    const char *given = test_option("trials"); /* more of them, by hand */
    int trials = given != NULL ? atoi(given) : test_sanitized() ? 4 : 10;
    for (int trial = 0; trial < trials; trial++)
        test_processes(2, meet_garbage, &trial);
}
