/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of tensors: what large ones leave serves others of any size, threads share it, it goes back to the system, and
 * a forked child goes on with it.
 */
#include <cblas.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

#define MEGABYTE ((size_t)1 << 20)

static tt_tensor *of_bytes(size_t bytes) {
    return tt_empty(tt_shape((int64_t)bytes), TUTTI_U8, NULL);
}

static bool is_mapped(const void *data) {
    unsigned char resident;
    return mincore((void *)((uintptr_t)data & ~(uintptr_t)4095), 1, &resident) == 0;
}

TEST(a_large_block_is_made_of_what_smaller_ones_left) {
    const void *first = NULL, *between = NULL;
    tt_memory_trim();
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < 8; i++) {
        const void *data = tt_data(of_bytes(3 * MEGABYTE / 2));
        first = i == 0 ? data : first;
        between = i == 3 ? data : between;
    }
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    CHECK(tt_data(of_bytes(12 * MEGABYTE)) == first);
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    tt_tensor *below = of_bytes(9 * MEGABYTE / 2), *above = of_bytes(2 * MEGABYTE);
    CHECK(tt_data(below) == first && tt_data(above) == between);
    CHECK((uintptr_t)tt_data(of_bytes(MEGABYTE + 1)) % 65536 == 0);
    done(&scope);
}

TEST(a_free_run_between_two_blocks_is_found_again) {
    tt_memory_trim();
    tt_scope scope = tt_scope_open();
    tt_tensor *left = of_bytes(2 * MEGABYTE);
    tt_tensor *middle = tt_keep(of_bytes(3 * MEGABYTE)), *right = of_bytes(2 * MEGABYTE);
    const char *was = tt_data(middle);
    CHECK(was == (const char *)tt_data(left) + 2 * MEGABYTE && tt_data(right) == was + 3 * MEGABYTE);
    tt_scope inner = tt_scope_open(); /* the scope's reference is still there */
    tt_storage_resize(middle, 0);
    CHECK(tt_data(of_bytes(4 * MEGABYTE)) != was); /* too long for it */
    CHECK(tt_data(of_bytes(MEGABYTE)) == was);
    CHECK(tt_data(of_bytes(2 * MEGABYTE)) == was + MEGABYTE);
    CHECK_OK(tt_scope_close(&inner));
    tt_release(middle);
    done(&scope);
}

TEST(a_short_block_leaves_the_room_of_a_long_one_whole) {
    tt_memory_trim();
    tt_scope scope = tt_scope_open();
    const void *alone = tt_data(of_bytes(20 * MEGABYTE)); /* in a segment of its own */
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    tt_tensor *brief = of_bytes(3 * MEGABYTE / 4);
    CHECK(tt_data(brief) != alone && tt_data(of_bytes(20 * MEGABYTE)) == alone);
    done(&scope);
}

TEST(what_is_spare_goes_back_to_the_system) {
    tt_scope scope = tt_scope_open();
    tt_tensor *stays = tt_keep(tt_full(tt_shape(3 * (int64_t)MEGABYTE), 7, TUTTI_U8, NULL));
    tt_full(tt_shape(6 * (int64_t)MEGABYTE), 1, TUTTI_U8, NULL);
    const void *alone = tt_data(of_bytes(40 * MEGABYTE)); /* in a segment of its own */
    CHECK_OK(tt_scope_close(&scope));
    CHECK(is_mapped(alone));
    tt_memory_trim();
    CHECK(!is_mapped(alone) && is_mapped(tt_data(stays)));
    scope = tt_scope_open();
    CHECK(all_are(stays, 7));
    CHECK_OK(tt_scope_close(&scope));
    const void *last = tt_data(stays);
    tt_release(stays);
    tt_memory_trim();
    CHECK(!is_mapped(last));
}

/* ---- threads ---- */

enum {
    THREADS = 4,
    PLACES = 6
};
typedef struct exchange {
    pthread_mutex_t lock;
    tt_tensor *at[PLACES]; /* filled with the number of their place */
} exchange;

typedef struct member {
    exchange *all;
    unsigned state;
    int rounds;
    bool right;
} member;

static unsigned draw(member *self) {
    return self->state = self->state * 1664525u + 1013904223u;
}

/* The first, the last, and some bytes between. */
static bool is_filled(tt_tensor *x, int value) {
    const unsigned char *data = tt_data(x);
    int64_t count = tt_numel(x);
    bool right = data != NULL && data[count - 1] == value;
    for (int64_t i = 0; right && i < count; i += 4096)
        right = data[i] == value;
    return right;
}

/* Takes what lies in a place, which another thread may have made, looks at it and lets it go; leaves a new one. */
static void *run_member(void *argument) {
    member *self = argument;
    self->right = true;
    for (int i = 0; i < self->rounds && self->right; i++) {
        int place = (int)(draw(self) >> 16) % PLACES;
        int64_t count = (int64_t)(MEGABYTE + (draw(self) >> 8) % (4 * MEGABYTE));
        tt_scope scope = tt_scope_open();
        tt_tensor *made = tt_keep(tt_full(tt_shape(count), place, TUTTI_U8, NULL));
        pthread_mutex_lock(&self->all->lock);
        tt_tensor *taken = self->all->at[place];
        self->all->at[place] = made;
        pthread_mutex_unlock(&self->all->lock);
        self->right = taken == NULL || is_filled(taken, place);
        tt_release(taken);
        self->right = tt_scope_close(&scope) == TUTTI_OK && self->right;
    }
    return NULL;
}

TEST(threads_share_large_blocks_and_none_lie_over_each_other) {
    exchange all = { PTHREAD_MUTEX_INITIALIZER, { NULL } };
    member members[THREADS];
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        members[i] = (member){ &all, (unsigned)i + 1, test_sanitized() ? 20 : 100, false };
        CHECK_EQ(pthread_create(&threads[i], NULL, run_member, &members[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(members[i].right);
    }
    for (int i = 0; i < PLACES; i++)
        tt_release(all.at[i]);
}

static void *make_a_small_one(void *made) {
    tt_scope scope = tt_scope_open();
    *(bool *)made = tt_ones(tt_shape(5), TUTTI_F32, NULL) != NULL;
    *(bool *)made = tt_scope_close(&scope) == TUTTI_OK && *(bool *)made;
    return NULL;
}

TEST(a_thread_that_ends_leaves_the_others_what_is_spare) {
    pthread_t thread;
    bool made = false;
    tt_scope scope = tt_scope_open();
    const void *alone = tt_data(of_bytes(40 * MEGABYTE));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(pthread_create(&thread, NULL, make_a_small_one, &made), 0);
    pthread_join(thread, NULL);
    CHECK(made && is_mapped(alone));
    tt_memory_trim();
    CHECK(!is_mapped(alone));
}

static void *release_it(void *tensor) {
    tt_release(tensor);
    return NULL;
}

TEST(what_a_thread_without_a_scope_releases_is_counted) {
    pthread_t thread;
    tt_counts before = TT_COUNTS_INIT, after = TT_COUNTS_INIT;
    CHECK_OK(tt_count(&before));
    tt_scope scope = tt_scope_open();
    tt_tensor *kept = tt_keep(tt_ones(tt_shape(5), TUTTI_F32, NULL));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(pthread_create(&thread, NULL, release_it, kept), 0);
    pthread_join(thread, NULL);
    CHECK_OK(tt_count(&after));
    CHECK_EQ(after.tensors, before.tensors);
    CHECK_EQ(after.storages, before.storages);
}

/* ---- forks ---- */

typedef struct pair {
    tt_tensor *small, *large;
} pair;

static pair make_pair(int value) {
    return (pair){ tt_keep(tt_full(tt_shape(5), value, TUTTI_F32, NULL)),
                   tt_keep(tt_full(tt_shape((int64_t)MEGABYTE), value, TUTTI_U8, NULL)) };
}

static void release_pair(pair of) {
    tt_release(of.small);
    tt_release(of.large);
}

static atomic_bool over;

/* Hooks, handles, small and large blocks, and the list of threads: every lock of the library. */
static void *make_and_release(void *right) {
    while (!atomic_load(&over) && *(bool *)right) {
        tt_counts counts = { .size = sizeof counts };
        tt_scope scope = tt_scope_open();
        pair made = make_pair(7);
        *(bool *)right = tt_count(&counts) == TUTTI_OK && is_filled(made.large, 7);
        release_pair(made);
        *(bool *)right = tt_scope_close(&scope) == TUTTI_OK && *(bool *)right;
    }
    return NULL;
}

/* In a child: what the parent made can be read and released, and tensors go on. */
static bool use_in_child(pair made) {
    tt_scope scope = tt_scope_open();
    bool right = is_filled(made.large, 3) && tt_item(tt_sum(made.small)) == 15;
    release_pair(made);
    pair more = make_pair(4);
    right = right && is_filled(more.large, 4);
    release_pair(more);
    tt_memory_trim();
    return tt_scope_close(&scope) == TUTTI_OK && right;
}

TEST(a_child_forked_while_threads_allocate_goes_on_with_tensors) {
    enum {
        BUSY = 2
    };
    bool right[BUSY] = { true, true };
    pthread_t busy[BUSY];
    openblas_set_num_threads(1); /* loops too: ThreadSanitizer lets no child start threads */
    tt_scope scope = tt_scope_open();
    pair made = make_pair(3);
    CHECK_OK(tt_scope_close(&scope));
    atomic_store(&over, false);
    for (int i = 0; i < BUSY; i++)
        CHECK_EQ(pthread_create(&busy[i], NULL, make_and_release, &right[i]), 0);
    fflush(NULL);
    for (int i = 0; i < (test_sanitized() ? 10 : 60); i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(60); /* a child that hangs is killed, and found below */
            _exit(use_in_child(made) ? 0 : 1);
        }
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
    }
    atomic_store(&over, true);
    for (int i = 0; i < BUSY; i++) {
        pthread_join(busy[i], NULL);
        CHECK(right[i]);
    }
    release_pair(made);
}

/* ---- failures ---- */

static tutti_status make_three(void *unused) {
    (void)unused;
    tt_memory_trim();
    tt_scope scope = tt_scope_open();
    of_bytes(2 * MEGABYTE);
    of_bytes(20 * MEGABYTE);
    of_bytes(15 * MEGABYTE);
    return tt_scope_close(&scope);
}

TEST(no_memory_for_a_large_tensor_is_an_error) {
    tt_scope scope = tt_scope_open();
    CHECK(of_bytes((size_t)1 << 50) == NULL);
    expect_error(TUTTI_ERROR_MEMORY, "a tensor");
    done(&scope);
    test_fail_each("malloc,calloc,realloc,aligned_alloc,mmap", make_three, NULL);
}

TEST(what_large_tensors_left_goes_back_before_a_small_one_fails) {
    tt_memory_trim();
    tt_scope scope = tt_scope_open();
    const void *alone = tt_data(of_bytes(40 * MEGABYTE));
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    test_fail_arm_here("aligned_alloc", 1);
    tt_tensor *small = tt_full(tt_shape(5), 3, TUTTI_F32, NULL);
    CHECK(test_fail_disarm());
    CHECK(all_are(small, 3) && !is_mapped(alone));
    done(&scope);
}
