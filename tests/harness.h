/* SPDX-License-Identifier: Apache-2.0
 *
 * The test harness: no dependencies, so that the same tests run on a bare machine.
 *
 *     TEST(a_sentence_that_it_proves) { CHECK(1 + 1 == 2); }
 *     TEST_WORLD(every_rank_knows_the_size, 4) { CHECK(tutti_world_size(world) == 4); }
 *
 * The body of the second runs on every rank, first as threads, then as processes.
 *
 * Each test runs in a process of its own with a time limit; afterwards the harness checks that it left no descriptors,
 * no mappings of Tutti's memory and no processes behind; when the program itself is killed, the test that runs is
 * killed with all it started. A failed CHECK prints where and ends that process; a crash prints the calls that led to
 * it. The program prints one line per test and closes with "N passed, N failed, N skipped"; it exits 0, 1 or 77
 * (nothing but skips).
 *
 * Arguments: a part of a name runs only the tests that contain it; --list lists them; --name value is for the tests
 * themselves, which ask test_option.
 */
#ifndef TUTTI_TESTS_HARNESS_H
#define TUTTI_TESTS_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <tutti/status.h>
#include <tutti/world.h>

/* ---- tests ---- */

typedef struct test_case {
    const char *name;
    void (*body)(void);
    int limit_seconds; /* 0: 60; of a machine that does nothing else: a busy one gets more */
    struct test_case *next;
} test_case;

void test_register(test_case *test);

#define TEST_LIMIT(sentence, seconds)                                    \
    static void sentence(void);                                          \
    __attribute__((constructor)) static void register_##sentence(void) { \
        static test_case test = { #sentence, sentence, seconds, NULL };  \
        test_register(&test);                                            \
    }                                                                    \
    static void sentence(void)
#define TEST(sentence) TEST_LIMIT(sentence, 0)

/* The value that followed --name on the command line; NULL: it was not given. */
const char *test_option(const char *name);

/* ---- worlds: the body runs once per rank; see tests/harness_world.c ---- */

typedef void test_rank(tutti_world *world, void *argument);
void test_threads(int ranks, test_rank *body, void *argument);
void test_processes(int ranks, test_rank *body, void *argument);

#define TEST_WORLD(sentence, ranks)                                  \
    static void rank_##sentence(tutti_world *world, void *argument); \
    TEST(sentence##_as_threads) {                                    \
        test_threads(ranks, rank_##sentence, NULL);                  \
    }                                                                \
    TEST(sentence##_as_processes) {                                  \
        test_processes(ranks, rank_##sentence, NULL);                \
    }                                                                \
    static void rank_##sentence(__attribute__((unused)) tutti_world *world, __attribute__((unused)) void *argument)
#define TEST_WORLD_THREADS(sentence, ranks)                          \
    static void rank_##sentence(tutti_world *world, void *argument); \
    TEST(sentence##_as_threads) {                                    \
        test_threads(ranks, rank_##sentence, NULL);                  \
    }                                                                \
    static void rank_##sentence(__attribute__((unused)) tutti_world *world, __attribute__((unused)) void *argument)
#define TEST_WORLD_PROCESSES(sentence, ranks)                        \
    static void rank_##sentence(tutti_world *world, void *argument); \
    TEST(sentence##_as_processes) {                                  \
        test_processes(ranks, rank_##sentence, NULL);                \
    }                                                                \
    static void rank_##sentence(__attribute__((unused)) tutti_world *world, __attribute__((unused)) void *argument)

/* ---- checks ---- */

_Noreturn void test_failed(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void test_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define SKIP(...) test_skip(__VA_ARGS__)
#define FAIL(...) test_failed(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition))                                                \
            test_failed(__FILE__, __LINE__, "not true: %s", #condition); \
    } while (0)
#define CHECK_EQ(left, right)                                                                                     \
    do {                                                                                                          \
        long long check_left = (long long)(left), check_right = (long long)(right);                               \
        if (check_left != check_right)                                                                            \
            test_failed(__FILE__, __LINE__, "%s is %lld, not %lld (%s)", #left, check_left, check_right, #right); \
    } while (0)
#define CHECK_TEXT(left, right)                                                                          \
    do {                                                                                                 \
        const char *check_left = (left), *check_right = (right);                                         \
        if (strcmp(check_left, check_right) != 0)                                                        \
            test_failed(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #left, check_left, check_right); \
    } while (0)
#define CHECK_OK(call)                                                                            \
    do {                                                                                          \
        tutti_status check_status = (call);                                                       \
        if (check_status != TUTTI_OK)                                                             \
            test_failed(__FILE__, __LINE__, "%s: %s: %s", #call, tutti_status_name(check_status), \
                        tutti_error_message());                                                   \
    } while (0)
#define CHECK_STATUS(call, expected)                                                                           \
    do {                                                                                                       \
        tutti_status check_status = (call);                                                                    \
        if (check_status != (expected))                                                                        \
            test_failed(__FILE__, __LINE__, "%s gave %s (%s), not %s", #call, tutti_status_name(check_status), \
                        check_status == TUTTI_OK ? "" : tutti_error_message(), #expected);                     \
    } while (0)
/* The calling thread's error message contains `fragment`. */
#define CHECK_MESSAGE(fragment)                                                                                  \
    do {                                                                                                         \
        if (strstr(tutti_error_message(), (fragment)) == NULL)                                                   \
            test_failed(__FILE__, __LINE__, "the message \"%s\" does not contain \"%s\"", tutti_error_message(), \
                        (fragment));                                                                             \
    } while (0)

/* ---- making the n-th call fail ---- */

/* From now on the n-th call (counted from 1, in this process) of one of `functions` ("malloc,mmap", NULL: all that are
 * wrapped, see tests/wrapped.txt) from Tutti's code fails as it would in life; only that one. */
void test_fail_arm(const char *functions, long nth);
/* The same for the calls of the calling thread alone: other ranks that are threads, and the library's own, go on. */
void test_fail_arm_here(const char *functions, long nth);
/* Disarms; returns whether the failure was delivered. */
bool test_fail_disarm(void);

/* The same, but there the process is killed (SIGKILL) instead: a death between any two steps of an operation. */
void test_kill_arm(const char *functions, long nth);

/* Runs body(argument) with the 1st, 2nd, 3rd … call failing, until it passes without a failure delivered. When one was
 * delivered, body must return TUTTI_OK (it coped) or a failure with a message; each round must leave no descriptors and
 * no mappings behind. */
void test_fail_each(const char *functions, tutti_status (*body)(void *argument), void *argument);

/* ---- time, on machines that are busy ---- */

/* A deadline, in nanoseconds, that shall pass because somebody is missing, and not before those who come have come: a
 * second, and more on a busy machine. The same for all ranks of a test. */
int64_t test_moment(void);
/* Waits until a process is stopped by a signal; until it has ended (a zombie, or gone). */
void test_await_stopped(pid_t process);
void test_await_end(pid_t process);

/* ---- leaks, and being somebody else ---- */

int test_count_descriptors(void); /* open in this process */
int test_count_mappings(void);    /* of Tutti's memory in this process */
/* Runs body in a child process as an ordinary user (uid 65534) when the suite runs as root, else as it is; fails the
 * test when the child fails. Root hides limits. */
void test_as_ordinary_user(void (*body)(void));
/* Whether this is a sanitizer build, where limits are wider and huge sizes are left out. */
bool test_sanitized(void);

#endif
