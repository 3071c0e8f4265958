/* SPDX-License-Identifier: Apache-2.0
 *
 * Handles of tensors: a dead one is refused, whenever it is used; their memory comes back.
 */
#include <pthread.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

#include "../harness.h"

TEST(a_dead_handle_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(2), TUTTI_F32, NULL);
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    CHECK(tt_numel(x) == 0);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_HANDLE);
    CHECK_MESSAGE("no live tensor");
}

TEST(the_message_about_a_dead_handle_says_what_it_was) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(2, 3), TUTTI_F32, TUTTI_OPTIONS(tt_options, .name = "momentum"));
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    CHECK(tt_add(x, x) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_HANDLE);
    CHECK_MESSAGE("f32 [2, 3]");
    CHECK_MESSAGE("momentum");
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* One use of a dead handle, chosen at random. */
static void use(tt_tensor *dead, uint32_t choice) {
    switch (choice % 8) {
    case 0:
        CHECK_EQ(tt_numel(dead), 0);
        break;
    case 1:
        CHECK(tt_add_scalar(dead, 1) == NULL);
        break;
    case 2:
        CHECK(tt_data(dead) == NULL);
        break;
    case 3:
        CHECK(tt_keep(dead) == NULL);
        break;
    case 4:
        CHECK(tt_mul_scalar_(dead, 2) == NULL);
        break;
    case 5:
        CHECK(tt_view(dead, tt_shape(-1)) == NULL);
        break;
    case 6:
        CHECK(tt_item(dead) != tt_item(dead));
        break;
    default:
        CHECK(!tt_backward(dead, NULL));
        break;
    }
}

TEST(a_million_uses_of_dead_handles_are_all_refused) {
    enum {
        DEAD = 300000,
        EACH = 60,
        USES = 200
    };
    static tt_tensor *dead[DEAD];
    int uses = test_sanitized() ? 20000 : 1000000, wrong = 0;
    uint32_t random = 1, count = 0;
    tt_scope outer = tt_scope_open();
    for (int used = 0; used < uses;) {
        tt_scope scope = tt_scope_open();
        for (int i = 0; i < EACH; i++)
            dead[count++ % DEAD] = tt_full(tt_shape(1 + i % 3), i, TUTTI_F32, NULL);
        CHECK_OK(tt_scope_close(&scope));
        tt_tensor *alive = tt_ones(tt_shape(1), TUTTI_F32, NULL); /* which may not be taken for a dead one */
        for (int i = 0; i < USES; i++, used++) {
            use(dead[next_random(&random) % (count < DEAD ? count : DEAD)], next_random(&random));
            wrong += tt_error_pending() != TUTTI_ERROR_HANDLE;
            tt_error_clear();
        }
        CHECK(tt_item(alive) == 1);
        if (used % 100000 < USES) { /* so that the scope of the living does not grow for ever */
            CHECK_OK(tt_scope_close(&outer));
            outer = tt_scope_open();
        }
    }
    CHECK_EQ(wrong, 0);
    CHECK_OK(tt_scope_close(&outer));
}

/* Resident memory in bytes. */
static double resident(void) {
    long pages = 0, ignored;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &ignored, &pages) == 2);
    fclose(file);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

TEST(handles_that_live_long_keep_little_memory_of_those_that_died) {
    enum {
        ROUNDS = 200,
        EACH = 10000
    };
    tt_tensor *kept[ROUNDS];
    int rounds = test_sanitized() ? 10 : ROUNDS;
    double before = resident();
    for (int round = 0; round < rounds; round++) {
        tt_scope scope = tt_scope_open();
        kept[round] = tt_keep(tt_full(tt_shape(1), round, TUTTI_F32, NULL));
        for (int i = 0; i < EACH; i++)
            tt_alias(kept[round]);
        CHECK_OK(tt_scope_close(&scope));
    }
    if (!test_sanitized()) /* two million dead handles would be 384 MB */
        CHECK(resident() - before < 64e6);
    for (int round = 0; round < rounds; round++) {
        CHECK(tt_item(kept[round]) == round);
        tt_release(kept[round]);
    }
}

typedef struct ender {
    tt_tensor **tensors;
    int count;
} ender;

static void *end_all(void *argument) {
    ender *self = argument;
    for (int i = 0; i < self->count; i++)
        tt_release(self->tensors[i]);
    return NULL;
}

TEST(handles_may_end_in_another_thread_than_theirs) {
    enum {
        COUNT = 30000,
        THREADS = 3
    };
    static tt_tensor *tensors[COUNT];
    int count = test_sanitized() ? 3000 : COUNT, share = count / THREADS;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < count; i++) {
            tt_scope scope = tt_scope_open();
            tensors[i] = tt_keep(tt_full(tt_shape(1), i, TUTTI_F32, NULL));
            CHECK_OK(tt_scope_close(&scope));
        }
        pthread_t threads[THREADS];
        ender enders[THREADS];
        for (int i = 0; i < THREADS; i++) {
            enders[i] = (ender){ tensors + i * share, share };
            CHECK_EQ(pthread_create(&threads[i], NULL, end_all, &enders[i]), 0);
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        for (int i = 0; i < count; i++) {
            CHECK_EQ(tt_numel(tensors[i]), 0);
            CHECK_STATUS(tt_error_pending(), TUTTI_ERROR_HANDLE);
            tt_error_clear();
        }
    }
}

/* With little room for addresses they come again, and never one whose tensor is alive. */
TEST(handles_go_on_when_the_addresses_have_all_been_used) {
    if (test_sanitized())
        SKIP("a sanitizer's shadow memory is beyond any limit of addresses");
    struct rlimit limit = { (rlim_t)2 << 30, (rlim_t)2 << 30 };
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    tt_tensor *alive[64];
    tt_scope outer = tt_scope_open();
    for (int i = 0; i < 64; i++) {
        alive[i] = tt_full(tt_shape(1), i, TUTTI_F32, NULL);
        for (int k = 0; k < 200; k++) {
            tt_scope scope = tt_scope_open();
            for (int j = 0; j < 1000; j++)
                tt_alias(alive[i]);
            CHECK_OK(tt_scope_close(&scope));
        }
    }
    for (int i = 0; i < 64; i++)
        CHECK(tt_item(alive[i]) == i);
    CHECK_OK(tt_scope_close(&outer));
}
