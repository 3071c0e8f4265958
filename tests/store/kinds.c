/* SPDX-License-Identifier: Apache-2.0
 *
 * What every kind of store does alike: one suite, run over each kind.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <tutti/store.h>
#include <unistd.h>

#include "../harness.h"

#define MILLISECONDS(n) (INT64_C(1000000) * (n))

/* ---- the kinds ---- */

static tutti_store *open_memory(void) {
    tutti_store *store;
    CHECK_OK(tutti_store_open_memory(&store));
    return store;
}

static tutti_store *open_file(void) {
    tutti_store *store;
    char path[] = "/tmp/tutti-test-store-XXXXXX";
    int descriptor = mkstemp(path);
    CHECK(descriptor >= 0);
    close(descriptor);
    tutti_file_store_options options = TUTTI_FILE_STORE_OPTIONS_INIT;
    options.workers = 1;
    CHECK_OK(tutti_store_open_file(path, &options, &store));
    return store;
}

static tutti_store *open_served(const char *host) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    CHECK_OK(tutti_store_open_tcp(host, 0, &options, &store));
    return store;
}

static tutti_store *open_tcp(void) {
    return open_served("localhost");
}

static tutti_store *open_unix(void) {
    char host[64];
    snprintf(host, sizeof host, "unix:@tutti-test-store-%d", (int)getpid());
    return open_served(host);
}

static tutti_store *open_prefix(tutti_store *base) {
    tutti_store *store;
    CHECK_OK(tutti_store_open_prefix("a/part", base, &store));
    tutti_store_release(base);
    return store;
}

static tutti_store *open_prefix_tcp(void) {
    return open_prefix(open_tcp());
}

static tutti_store *open_prefix_twice(void) {
    return open_prefix(open_prefix(open_memory()));
}

static tutti_store *open_prefix_file(void) {
    return open_prefix(open_file());
}

/* A body gets an open store, and the test closes it. */
#define ONE_KIND(sentence, suffix, opener) \
    TEST(sentence##suffix) {               \
        tutti_store *store = opener();     \
        with_##sentence(store);            \
        tutti_store_release(store);        \
    }
#define EVERY_KIND(sentence)                                        \
    static void with_##sentence(tutti_store *store);                \
    ONE_KIND(sentence, _in_memory, open_memory)                     \
    ONE_KIND(sentence, _in_a_file, open_file)                       \
    ONE_KIND(sentence, _over_tcp, open_tcp)                         \
    ONE_KIND(sentence, _over_a_unix_socket, open_unix)              \
    ONE_KIND(sentence, _under_a_prefix_over_tcp, open_prefix_tcp)   \
    ONE_KIND(sentence, _under_two_prefixes, open_prefix_twice)      \
    ONE_KIND(sentence, _under_a_prefix_in_a_file, open_prefix_file) \
    static void with_##sentence(tutti_store *store)
#define EVERY_KIND_WITH_QUEUES(sentence)                          \
    static void with_##sentence(tutti_store *store);              \
    ONE_KIND(sentence, _in_memory, open_memory)                   \
    ONE_KIND(sentence, _over_tcp, open_tcp)                       \
    ONE_KIND(sentence, _over_a_unix_socket, open_unix)            \
    ONE_KIND(sentence, _under_a_prefix_over_tcp, open_prefix_tcp) \
    static void with_##sentence(tutti_store *store)

static void check_value(tutti_store *store, const char *key, const char *expected) {
    void *value;
    size_t bytes;
    CHECK_OK(tutti_store_get(store, key, 0, &value, &bytes));
    CHECK_TEXT((const char *)value, expected);
    CHECK_EQ(bytes, strlen(expected));
    tutti_free(value);
}

static void set(tutti_store *store, const char *key, const char *value) {
    CHECK_OK(tutti_store_set(store, key, value, strlen(value)));
}

/* ---- values ---- */

EVERY_KIND(get_gives_what_set_stored) {
    set(store, "key", "first");
    check_value(store, "key", "first");
    set(store, "key", "second");
    check_value(store, "key", "second");
    set(store, "", "the empty key");
    check_value(store, "", "the empty key");
    set(store, "-key", "minus");
    check_value(store, "-key", "minus");
    check_value(store, "key", "second");
}

EVERY_KIND(values_may_hold_any_bytes_and_none) {
    char bytes[256];
    void *value;
    size_t length;
    for (int i = 0; i < 256; i++)
        bytes[i] = (char)i;
    CHECK_OK(tutti_store_set(store, "all", bytes, sizeof bytes));
    CHECK_OK(tutti_store_set(store, "none", NULL, 0));
    CHECK_OK(tutti_store_get(store, "all", 0, &value, &length));
    CHECK_EQ(length, sizeof bytes);
    CHECK(memcmp(value, bytes, sizeof bytes) == 0);
    tutti_free(value);
    check_value(store, "none", "");
}

EVERY_KIND(a_large_value_comes_back_whole) {
    size_t bytes = (8 << 20) - 1;
    char *large = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        large[i] = (char)(i * 31 + i / 4096);
    void *value;
    size_t length;
    CHECK_OK(tutti_store_set(store, "large", large, bytes));
    CHECK_OK(tutti_store_get(store, "large", 0, &value, &length));
    CHECK_EQ(length, bytes);
    CHECK(memcmp(value, large, bytes) == 0);
    tutti_free(value);
    free(large);
}

EVERY_KIND(add_counts_from_nothing_and_keeps_decimal_text) {
    int64_t sum;
    CHECK_OK(tutti_store_add(store, "key", 1, &sum));
    CHECK_EQ(sum, 1);
    CHECK_OK(tutti_store_add(store, "key", 2, &sum));
    CHECK_OK(tutti_store_add(store, "key", 3, &sum));
    CHECK_EQ(sum, 6);
    check_value(store, "key", "6");
    CHECK_OK(tutti_store_add(store, "key", -10, &sum));
    CHECK_EQ(sum, -4);
    check_value(store, "key", "-4");
    CHECK_OK(tutti_store_set(store, "empty", NULL, 0));
    CHECK_OK(tutti_store_add(store, "empty", 7, &sum));
    CHECK_EQ(sum, 7);
    set(store, "least", "-9223372036854775808");
    CHECK_OK(tutti_store_add(store, "least", 1, &sum));
    CHECK(sum == INT64_MIN + 1);
}

EVERY_KIND(add_to_what_is_no_number_fails_and_the_store_goes_on) {
    int64_t sum = 77;
    const char *no_numbers[] = { "word", "1x", "-", " 1", "9223372036854775808", "1.5" };
    for (size_t i = 0; i < sizeof no_numbers / sizeof *no_numbers; i++) {
        set(store, "key", no_numbers[i]);
        CHECK_STATUS(tutti_store_add(store, "key", 1, &sum), TUTTI_ERROR_STORE);
        CHECK_MESSAGE("not a decimal integer");
        CHECK_EQ(sum, 77);
        check_value(store, "key", no_numbers[i]);
    }
    set(store, "most", "9223372036854775807");
    CHECK_STATUS(tutti_store_add(store, "most", 1, &sum), TUTTI_ERROR_STORE);
    CHECK_OK(tutti_store_add(store, "most", -1, &sum));
}

EVERY_KIND(compare_set_sets_only_what_was_expected) {
    void *value;
    size_t bytes;
    bool present;
    const char *key = "key";
    CHECK_OK(tutti_store_compare_set(store, key, "something", 9, "new", 3, &value, &bytes));
    CHECK_TEXT((char *)value, "something"); /* missing and not expected so: the expectation comes back */
    tutti_free(value);
    CHECK_OK(tutti_store_check(store, &key, 1, &present));
    CHECK(!present);
    CHECK_OK(tutti_store_compare_set(store, key, NULL, 0, "first", 5, &value, &bytes));
    CHECK_TEXT((char *)value, "first");
    CHECK_EQ(bytes, 5);
    tutti_free(value);
    CHECK_OK(tutti_store_compare_set(store, key, "wrong", 5, "second", 6, &value, &bytes));
    CHECK_TEXT((char *)value, "first");
    tutti_free(value);
    CHECK_OK(tutti_store_compare_set(store, key, "first", 5, "second", 6, &value, &bytes));
    CHECK_TEXT((char *)value, "second");
    tutti_free(value);
    check_value(store, key, "second");
}

EVERY_KIND(append_makes_the_key_and_then_adds_to_its_end) {
    CHECK_OK(tutti_store_append(store, "key", "one ", 4));
    CHECK_OK(tutti_store_append(store, "key", NULL, 0));
    CHECK_OK(tutti_store_append(store, "key", "two", 3));
    check_value(store, "key", "one two");
    CHECK_OK(tutti_store_append(store, "empty", NULL, 0));
    check_value(store, "empty", "");
}

EVERY_KIND(multi_set_and_multi_get_keep_the_order) {
    const char *keys[] = { "a", "b", "c" }, *back[] = { "c", "a", "b", "a" };
    const void *values[] = { "one", "", "three" };
    size_t bytes[] = { 3, 0, 5 }, got_bytes[4];
    void *got[4];
    CHECK_OK(tutti_store_multi_set(store, keys, 3, values, bytes));
    CHECK_OK(tutti_store_multi_get(store, back, 4, 0, got, got_bytes));
    const char *expected[] = { "three", "one", "", "one" };
    for (int i = 0; i < 4; i++) {
        CHECK_TEXT((char *)got[i], expected[i]);
        CHECK_EQ(got_bytes[i], strlen(expected[i]));
        tutti_free(got[i]);
    }
    CHECK_OK(tutti_store_multi_set(store, NULL, 0, NULL, NULL));
    CHECK_OK(tutti_store_multi_get(store, NULL, 0, 0, NULL, NULL));
}

EVERY_KIND(check_wants_every_key) {
    const char *keys[] = { "a", "b" };
    bool present = false;
    CHECK_OK(tutti_store_check(store, keys, 2, &present));
    CHECK(!present);
    set(store, "a", "");
    CHECK_OK(tutti_store_check(store, keys, 2, &present));
    CHECK(!present);
    set(store, "b", "");
    CHECK_OK(tutti_store_check(store, keys, 2, &present));
    CHECK(present);
    CHECK_OK(tutti_store_check(store, NULL, 0, &present));
    CHECK(present);
}

EVERY_KIND(delete_says_whether_the_key_was_there) {
    bool existed = true, present;
    const char *key = "key";
    CHECK_OK(tutti_store_delete(store, key, &existed));
    CHECK(!existed);
    set(store, key, "value");
    CHECK_OK(tutti_store_delete(store, key, &existed));
    CHECK(existed);
    CHECK_OK(tutti_store_check(store, &key, 1, &present));
    CHECK(!present);
    int64_t sum;
    CHECK_OK(tutti_store_add(store, key, 1, &sum));
    CHECK_EQ(sum, 1);
}

EVERY_KIND(keys_are_counted_and_listed) {
    int64_t before, after;
    char **keys;
    size_t count;
    CHECK_OK(tutti_store_num_keys(store, &before));
    CHECK_OK(tutti_store_list_keys(store, &keys, &count));
    CHECK_EQ(count, 0);
    tutti_free(keys);
    char name[16];
    for (int i = 0; i < 200; i++) {
        snprintf(name, sizeof name, "key-%d", i);
        set(store, name, "x");
    }
    CHECK_OK(tutti_store_delete(store, "key-7", NULL));
    CHECK_OK(tutti_store_num_keys(store, &after));
    CHECK_EQ(after - before, 199);
    CHECK_OK(tutti_store_list_keys(store, &keys, &count));
    CHECK_EQ(count, 199);
    bool seen[200] = { false };
    for (size_t i = 0; i < count; i++) {
        int number = -1;
        CHECK(sscanf(keys[i], "key-%d", &number) == 1 && number >= 0 && number < 200 && !seen[number]);
        seen[number] = true;
    }
    CHECK(!seen[7]);
    tutti_free(keys);
}

/* ---- waiting ---- */

EVERY_KIND(a_wait_that_is_too_long_names_the_keys_and_the_store_goes_on) {
    const char *keys[] = { "the_key", "another" };
    void *value = &value;
    size_t bytes = 99;
    set(store, "another", "x");
    CHECK_STATUS(tutti_store_wait(store, keys, 1, MILLISECONDS(100)), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("wait timeout after 100ms, keys: /");
    CHECK_MESSAGE("the_key");
    CHECK_STATUS(tutti_store_wait(store, keys, 2, MILLISECONDS(10)), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("another");
    CHECK_STATUS(tutti_store_get(store, "the_key", MILLISECONDS(10), &value, &bytes), TUTTI_ERROR_TIMEOUT);
    CHECK(value == &value && bytes == 99); /* written only on success */
    void *values[2];
    size_t lengths[2];
    CHECK_STATUS(
        tutti_store_multi_get(store, (const char *[]){ "another", "the_key" }, 2, MILLISECONDS(10), values, lengths),
        TUTTI_ERROR_TIMEOUT);
    set(store, "the_key", "now");
    check_value(store, "the_key", "now");
    CHECK_OK(tutti_store_wait(store, keys, 2, MILLISECONDS(60000)));
}

EVERY_KIND(a_negative_timeout_is_an_error_and_zero_inherits_the_stores) {
    const char *key = "missing";
    void *value;
    CHECK_STATUS(tutti_store_wait(store, &key, 1, -1), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_get(store, key, -1, &value, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_barrier(store, key, 2, -1), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_set_timeout(store, -1), TUTTI_ERROR_ARGUMENT);
    CHECK_EQ(tutti_store_timeout(store), MILLISECONDS(300000));
    CHECK_OK(tutti_store_set_timeout(store, MILLISECONDS(20)));
    CHECK_EQ(tutti_store_timeout(store), MILLISECONDS(20));
    CHECK_EQ(tutti_store_timeout(tutti_store_underlying(store)), MILLISECONDS(20));
    CHECK_STATUS(tutti_store_get(store, key, 0, &value, NULL), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("after 20ms");
}

/* A second thread with a handle of its own does something a moment later. */
typedef struct helper {
    tutti_store *store;
    void (*body)(tutti_store *store);
    pthread_t thread;
} helper;

static void *help(void *argument) {
    helper *helper = argument;
    usleep(30000);
    helper->body(helper->store);
    return NULL;
}

static void start(helper *helper, tutti_store *store, void (*body)(tutti_store *)) {
    CHECK_OK(tutti_store_clone(store, &helper->store));
    helper->body = body;
    CHECK_EQ(pthread_create(&helper->thread, NULL, help, helper), 0);
}

static void finish(helper *helper) {
    pthread_join(helper->thread, NULL);
    tutti_store_release(helper->store);
}

static void set_later(tutti_store *store) {
    set(store, "later", "came");
}

static void add_later(tutti_store *store) {
    CHECK_OK(tutti_store_add(store, "later", 5, NULL));
}

static void compare_set_later(tutti_store *store) {
    void *value;
    CHECK_OK(tutti_store_compare_set(store, "later", NULL, 0, "came", 4, &value, NULL));
    tutti_free(value);
}

static void append_later(tutti_store *store) {
    CHECK_OK(tutti_store_append(store, "later", "came", 4));
}

static void multi_set_later(tutti_store *store) {
    CHECK_OK(tutti_store_multi_set(store, (const char *[]){ "x", "later" }, 2, (const void *[]){ "", "came" },
                                   (size_t[]){ 0, 4 }));
}

EVERY_KIND(whatever_makes_a_key_ends_the_wait_for_it) {
    void (*bodies[])(tutti_store *) = { set_later, add_later, compare_set_later, append_later, multi_set_later };
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        helper helper;
        start(&helper, store, bodies[i]);
        check_value(store, "later", bodies[i] == add_later ? "5" : "came");
        finish(&helper);
        CHECK_OK(tutti_store_delete(store, "later", NULL));
    }
}

static _Atomic bool counted;

/* The two are never there together. Stays for longer than any pause between two looks; once more when the one who looks
 * got no processor meanwhile. */
static void come_and_go(tutti_store *store) {
    for (;;) {
        set(store, "first", "");
        usleep(60000);
        CHECK_OK(tutti_store_delete(store, "first", NULL));
        set(store, "second", "");
        usleep(60000);
        if (atomic_load(&counted))
            return;
        CHECK_OK(tutti_store_delete(store, "second", NULL));
    }
}

EVERY_KIND(a_wait_counts_a_key_that_came_and_went) {
    helper helper;
    atomic_store(&counted, false);
    start(&helper, store, come_and_go);
    CHECK_OK(tutti_store_wait(store, (const char *[]){ "first", "second" }, 2, 0));
    atomic_store(&counted, true);
    finish(&helper);
}

static void on_alarm(int signal) {
    (void)signal;
}

EVERY_KIND(a_signal_does_not_end_a_wait) {
    struct sigaction action = { .sa_handler = on_alarm };
    struct itimerval often = { { 0, 2000 }, { 0, 2000 } }, never = { { 0, 0 }, { 0, 0 } };
    helper helper;
    sigaction(SIGALRM, &action, NULL);
    start(&helper, store, set_later);
    setitimer(ITIMER_REAL, &often, NULL);
    check_value(store, "later", "came");
    CHECK_STATUS(tutti_store_wait(store, (const char *[]){ "never" }, 1, MILLISECONDS(50)), TUTTI_ERROR_TIMEOUT);
    setitimer(ITIMER_REAL, &never, NULL);
    finish(&helper);
}

/* ---- many at once ---- */

enum {
    THREADS = 6,
    ROUNDS = 40
};

typedef struct member {
    tutti_store *store;
    int number;
    pthread_t thread;
} member;

static void *add_and_meet(void *argument) {
    member *member = argument;
    char key[32];
    for (int i = 0; i < ROUNDS; i++)
        CHECK_OK(tutti_store_add(member->store, "count", 1, NULL));
    CHECK_OK(tutti_store_append(member->store, "text", "x", 1));
    CHECK_OK(tutti_store_barrier(member->store, "meet", THREADS, 0));
    check_value(member->store, "count", "240");
    snprintf(key, sizeof key, "member-%d", member->number);
    set(member->store, key, "here");
    for (int i = 0; i < THREADS; i++) {
        snprintf(key, sizeof key, "member-%d", i);
        check_value(member->store, key, "here");
    }
    return NULL;
}

EVERY_KIND(clones_in_many_threads_count_and_meet) {
    member members[THREADS];
    for (int i = 0; i < THREADS; i++) {
        members[i].number = i;
        CHECK_OK(tutti_store_clone(store, &members[i].store));
        CHECK_EQ(pthread_create(&members[i].thread, NULL, add_and_meet, &members[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(members[i].thread, NULL);
        tutti_store_release(members[i].store);
    }
    check_value(store, "text", "xxxxxx");
}

EVERY_KIND(a_barrier_passes_once_for_its_count_and_at_once_ever_after) {
    CHECK_OK(tutti_store_barrier(store, "alone", 1, MILLISECONDS(60000)));
    CHECK_STATUS(tutti_store_barrier(store, "two", 2, MILLISECONDS(20)), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("barrier timeout after 20ms");
    CHECK_OK(tutti_store_barrier(store, "two", 2, MILLISECONDS(60000))); /* the first caller still counts */
    CHECK_OK(tutti_store_barrier(store, "two", 2, MILLISECONDS(60000)));
    CHECK_STATUS(tutti_store_barrier(store, "none", 0, 0), TUTTI_ERROR_ARGUMENT);
}

EVERY_KIND(a_clone_outlives_the_store_it_came_from) {
    tutti_store *clone;
    set(store, "key", "value");
    CHECK_OK(tutti_store_clone(store, &clone));
    tutti_store *last;
    CHECK_OK(tutti_store_clone(clone, &last));
    tutti_store_release(clone);
    check_value(last, "key", "value");
    set(last, "key", "changed");
    tutti_store_release(last);
    check_value(store, "key", "changed");
}

/* ---- queues ---- */

EVERY_KIND_WITH_QUEUES(a_queue_gives_first_what_came_first) {
    void *value;
    size_t bytes;
    int64_t length;
    bool present;
    const char *key = "queue";
    CHECK_OK(tutti_store_queue_length(store, key, &length));
    CHECK_EQ(length, 0);
    CHECK_STATUS(tutti_store_queue_pop(store, key, false, 0, &value, &bytes), TUTTI_ERROR_EMPTY);
    CHECK_MESSAGE("empty");
    CHECK_OK(tutti_store_queue_push(store, key, "one", 3));
    CHECK_OK(tutti_store_queue_push(store, key, "", 0));
    CHECK_OK(tutti_store_queue_push(store, key, "three", 5));
    CHECK_OK(tutti_store_queue_length(store, key, &length));
    CHECK_EQ(length, 3);
    CHECK_OK(tutti_store_check(store, &key, 1, &present));
    CHECK(present);
    CHECK_OK(tutti_store_wait(store, &key, 1, MILLISECONDS(60000)));
    const char *expected[] = { "one", "", "three" };
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tutti_store_queue_pop(store, key, i % 2 == 0, 0, &value, &bytes));
        CHECK_TEXT((char *)value, expected[i]);
        CHECK_EQ(bytes, strlen(expected[i]));
        tutti_free(value);
    }
    CHECK_OK(tutti_store_check(store, &key, 1, &present));
    CHECK(!present);
}

EVERY_KIND_WITH_QUEUES(queues_and_values_of_one_name_are_apart) {
    void *value;
    int64_t length, keys;
    set(store, "name", "value");
    CHECK_OK(tutti_store_queue_push(store, "name", "queued", 6));
    check_value(store, "name", "value");
    CHECK_OK(tutti_store_num_keys(store, &keys));
    CHECK_EQ(keys, 1);
    CHECK_OK(tutti_store_delete(store, "name", NULL));
    CHECK_OK(tutti_store_queue_length(store, "name", &length));
    CHECK_EQ(length, 1);
    CHECK_OK(tutti_store_queue_pop(store, "name", false, 0, &value, NULL));
    tutti_free(value);
    set(store, "name", "value"); /* a value does not satisfy a pop, however long it waits */
    CHECK_STATUS(tutti_store_queue_pop(store, "name", true, MILLISECONDS(30), &value, NULL), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("timeout");
}

static void *pop_some(void *argument) {
    member *member = argument;
    long sum = 0;
    for (int i = 0; i < ROUNDS; i++) {
        void *value;
        CHECK_OK(tutti_store_queue_pop(member->store, "work", true, 0, &value, NULL));
        sum += atol(value);
        tutti_free(value);
    }
    return (void *)sum;
}

EVERY_KIND_WITH_QUEUES(each_queued_value_goes_to_exactly_one_of_many_that_wait) {
    member members[THREADS];
    char text[16];
    long expected = 0, sum = 0;
    for (int i = 0; i < THREADS; i++) {
        CHECK_OK(tutti_store_clone(store, &members[i].store));
        CHECK_EQ(pthread_create(&members[i].thread, NULL, pop_some, &members[i]), 0);
    }
    for (int i = 1; i <= THREADS * ROUNDS; i++) {
        CHECK_OK(tutti_store_queue_push(store, "work", text, (size_t)snprintf(text, sizeof text, "%d", i)));
        expected += i;
    }
    for (int i = 0; i < THREADS; i++) {
        void *part;
        pthread_join(members[i].thread, &part);
        sum += (long)part;
        tutti_store_release(members[i].store);
    }
    CHECK_EQ(sum, expected);
}

/* ---- wrong arguments ---- */

EVERY_KIND(wrong_arguments_are_named) {
    void *value;
    size_t count;
    char long_key[9000];
    memset(long_key, 'k', sizeof long_key - 1);
    long_key[sizeof long_key - 1] = 0;
    CHECK_STATUS(tutti_store_set(NULL, "k", "", 0), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_set(store, NULL, "", 0), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("key is NULL");
    CHECK_STATUS(tutti_store_set(store, "k", NULL, 1), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_set(store, long_key, "", 0), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("8191");
    CHECK_STATUS(tutti_store_get(store, "k", 0, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_wait(store, NULL, 2, 0), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_wait(store, (const char *[]){ "a", NULL }, 2, 0), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("key 1 of 2");
    CHECK_STATUS(tutti_store_check(store, (const char *[]){ long_key }, 1, &(bool){ false }), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_store_multi_set(store, (const char *[]){ "a" }, 1, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_list_keys(store, NULL, &count), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_num_keys(store, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_clone(store, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_compare_set(store, "k", NULL, 0, "", 0, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_queue_pop(store, "k", true, -5, &value, NULL), TUTTI_ERROR_ARGUMENT);
    tutti_store_release(NULL);
}

EVERY_KIND(a_forked_child_is_told_to_open_its_own) {
    set(store, "key", "value");
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        void *value;
        CHECK_STATUS(tutti_store_get(store, "key", 0, &value, NULL), TUTTI_ERROR_FORKED);
        CHECK_STATUS(tutti_store_set(store, "key", "other", 5), TUTTI_ERROR_FORKED);
        tutti_store_release(store); /* takes nothing away from the parent */
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_value(store, "key", "value");
}

/* ---- what differs ---- */

TEST(the_kinds_say_what_they_are) {
    struct {
        tutti_store *(*open)(void);
        const char *kind, *below;
        bool extended;
    } kinds[] = { { open_memory, "memory", "memory", true },
                  { open_file, "file", "file", false },
                  { open_tcp, "tcp", "tcp", true },
                  { open_prefix_tcp, "prefix", "tcp", true },
                  { open_prefix_twice, "prefix", "memory", true } };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tutti_store *store = kinds[i].open();
        CHECK_TEXT(tutti_store_kind(store), kinds[i].kind);
        CHECK_TEXT(tutti_store_kind(tutti_store_underlying(store)), kinds[i].below);
        CHECK(tutti_store_has_extended_api(store) == kinds[i].extended);
        CHECK((tutti_store_port(store) > 0) == (strcmp(kinds[i].below, "tcp") == 0));
        CHECK((tutti_store_address(store)[0] != 0) == (strcmp(kinds[i].below, "tcp") == 0));
        tutti_store_release(store);
    }
}

TEST(a_file_store_has_no_queues_and_says_so) {
    tutti_store *store = open_file();
    CHECK_STATUS(tutti_store_queue_push(store, "q", "x", 1), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("file");
    tutti_store_release(store);
}

TEST(a_prefix_is_seen_below_as_part_of_the_key) {
    tutti_store *base = open_memory(), *store;
    CHECK_OK(tutti_store_open_prefix("job", base, &store));
    set(store, "key", "value");
    set(base, "jobless", "x");
    check_value(base, "job/key", "value");
    char **keys;
    size_t count;
    CHECK_OK(tutti_store_list_keys(store, &keys, &count));
    CHECK_EQ(count, 1);
    CHECK_TEXT(keys[0], "key");
    tutti_free(keys);
    int64_t all;
    CHECK_OK(tutti_store_num_keys(store, &all)); /* of the whole store */
    CHECK_EQ(all, 2);
    CHECK_OK(tutti_store_barrier(store, "meet", 1, 0));
    check_value(base, "job/meet/last_member", "1");
    check_value(base, "job/meet/num_members", "1");
    CHECK(tutti_store_underlying(store) == base);
    CHECK_STATUS(tutti_store_open_prefix("job", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_prefix(NULL, base, &store), TUTTI_ERROR_ARGUMENT);
    tutti_store_release(base); /* the prefix keeps it */
    check_value(store, "key", "value");
    tutti_store_release(store);
}

/* ---- the n-th failure ---- */

static tutti_status try_everything(tutti_store *store) {
    void *value;
    size_t bytes, count;
    char **keys;
    int64_t number;
    tutti_status status = tutti_store_set(store, "key", "value", 5);
    if (status == TUTTI_OK && (status = tutti_store_get(store, "key", MILLISECONDS(60000), &value, &bytes)) == TUTTI_OK)
        tutti_free(value);
    if (status == TUTTI_OK)
        status = tutti_store_add(store, "count", 1, &number);
    if (status == TUTTI_OK)
        status = tutti_store_append(store, "key", "more", 4);
    if (status == TUTTI_OK &&
        (status = tutti_store_compare_set(store, "new", NULL, 0, "x", 1, &value, &bytes)) == TUTTI_OK)
        tutti_free(value);
    if (status == TUTTI_OK && (status = tutti_store_list_keys(store, &keys, &count)) == TUTTI_OK)
        tutti_free(keys);
    void *values[2];
    size_t lengths[2];
    if (status == TUTTI_OK && (status = tutti_store_multi_get(store, (const char *[]){ "key", "count" }, 2,
                                                              MILLISECONDS(60000), values, lengths)) == TUTTI_OK) {
        tutti_free(values[0]);
        tutti_free(values[1]);
    }
    if (status == TUTTI_OK)
        status = tutti_store_barrier(store, "meet", 1, MILLISECONDS(60000));
    if (status == TUTTI_OK)
        status = tutti_store_delete(store, "key", NULL);
    return status;
}

static tutti_status open_and_try(void *argument) {
    const char *url = argument;
    tutti_store *base = NULL, *prefix = NULL, *clone = NULL;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    options.timeout_ns = MILLISECONDS(60000);
    options.workers = 1;
    if (strncmp(url, "file://", 7) == 0)
        unlink(url + 7); /* a round that failed may have left it: every round starts alike */
    tutti_status status = url[0] == 0 ? tutti_store_open_memory(&base) : tutti_store_open_url(url, &options, &base);
    if (status != TUTTI_OK)
        return status;
    status = tutti_store_open_prefix("a", base, &prefix);
    if (status == TUTTI_OK)
        status = tutti_store_clone(prefix, &clone);
    if (status == TUTTI_OK)
        status = try_everything(clone);
    if (status == TUTTI_OK && strncmp(url, "file", 4) != 0) {
        void *value;
        status = tutti_store_queue_push(clone, "q", "x", 1);
        if (status == TUTTI_OK &&
            (status = tutti_store_queue_pop(clone, "q", true, MILLISECONDS(60000), &value, NULL)) == TUTTI_OK)
            tutti_free(value);
    }
    tutti_store_release(clone);
    tutti_store_release(prefix);
    tutti_store_release(base);
    return status;
}

TEST(every_failing_call_in_a_memory_store_is_an_error_and_leaks_nothing) {
    test_fail_each(NULL, open_and_try, "");
}

TEST(every_failing_call_in_a_file_store_is_an_error_and_leaks_nothing) {
    char url[64];
    snprintf(url, sizeof url, "file:///tmp/tutti-test-fail-%d", (int)getpid());
    test_fail_each(NULL, open_and_try, url);
    unlink(url + 7);
}

TEST(every_failing_call_in_a_tcp_store_is_an_error_and_leaks_nothing) {
    test_fail_each(NULL, open_and_try, "tcp://localhost:0");
}

TEST(every_failing_call_over_a_unix_socket_is_an_error_and_leaks_nothing) {
    char url[64];
    snprintf(url, sizeof url, "unix:@tutti-test-fail-%d", (int)getpid());
    test_fail_each(NULL, open_and_try, url);
}
