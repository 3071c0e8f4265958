/* SPDX-License-Identifier: Apache-2.0
 *
 * The file of a file store: its bytes, what happens when they are damaged, and when it is removed.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <tutti/store.h>
#include <unistd.h>

#include "../harness.h"

#define MILLISECONDS(n) (INT64_C(1000000) * (n))
#define BYTES(literal) (literal), sizeof(literal) - 1

static char path[64];

static tutti_store *open_path(int workers) {
    tutti_store *store;
    snprintf(path, sizeof path, "/tmp/tutti-test-file-%d", (int)getpid());
    tutti_file_store_options options = TUTTI_FILE_STORE_OPTIONS_INIT;
    options.workers = workers;
    options.timeout_ns = MILLISECONDS(5000);
    CHECK_OK(tutti_store_open_file(path, &options, &store));
    return store;
}

static size_t read_file(char *data, size_t room) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    ssize_t bytes = read(descriptor, data, room);
    CHECK(bytes >= 0);
    close(descriptor);
    return (size_t)bytes;
}

static void write_file(const char *data, size_t bytes, int flags) {
    snprintf(path, sizeof path, "/tmp/tutti-test-file-%d", (int)getpid());
    int descriptor = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0644);
    CHECK(descriptor >= 0 && write(descriptor, data, bytes) == (ssize_t)bytes);
    close(descriptor);
}

static void check_value(tutti_store *store, const char *key, const char *expected) {
    void *value;
    CHECK_OK(tutti_store_get(store, key, 0, &value, NULL));
    CHECK_TEXT((char *)value, expected);
    tutti_free(value);
}

TEST(records_have_the_bytes_of_the_format) {
    tutti_store *store = open_path(0);
    CHECK_OK(tutti_store_set(store, "k", "v", 1));
    CHECK_OK(tutti_store_delete(store, "k", NULL));
    static const char expected[] = "\x09\0\0\0refcount/\x01\0\0\0"
                                   "1"
                                   "\x02\0\0\0/k\x01\0\0\0v"
                                   "\x03\0\0\0-/k\0\0\0\0";
    char data[256];
    CHECK_EQ(read_file(data, sizeof data), sizeof expected - 1);
    CHECK(memcmp(data, expected, sizeof expected - 1) == 0);
    tutti_store_release(store);
    unlink(path);
}

TEST(records_of_others_are_read) {
    write_file(BYTES("\x09\0\0\0refcount/\x01\0\0\0"
                     "1"
                     "\x02\0\0\0/k\x05\0\0\0other"),
               O_TRUNC);
    tutti_store *store = open_path(0);
    check_value(store, "k", "other");
    int64_t keys;
    CHECK_OK(tutti_store_num_keys(store, &keys));
    CHECK_EQ(keys, 2);
    write_file(BYTES("\x02\0\0\0/k\x03\0\0\0new"), O_APPEND);
    check_value(store, "k", "new");
    tutti_store_release(store);
    unlink(path);
}

TEST(the_last_of_the_expected_handles_removes_the_file) {
    tutti_store *first = open_path(2), *second = open_path(2);
    tutti_store_release(first);
    CHECK_EQ(access(path, F_OK), 0);
    tutti_store_release(second);
    CHECK(access(path, F_OK) != 0);
    first = open_path(0); /* never */
    tutti_store_release(first);
    CHECK_EQ(access(path, F_OK), 0);
    unlink(path);
}

TEST(a_file_that_vanished_is_no_trouble_when_closing) {
    tutti_store *store = open_path(1);
    unlink(path);
    tutti_store_release(store);
    CHECK(access(path, F_OK) != 0);
}

TEST(what_a_killed_writer_left_half_written_is_cut_off) {
    static const char good[] = "\x02\0\0\0/k\x01\0\0\0v", half[] = "\x02\0\0\0/m\x09\0\0\0half";
    for (size_t bytes = 1; bytes < sizeof half - 1; bytes++) {
        write_file(BYTES(good), O_TRUNC);
        tutti_store *reader = open_path(0);
        write_file(half, bytes, O_APPEND);
        check_value(reader, "k", "v"); /* a reader passes it by */
        tutti_store *writer = open_path(0);
        CHECK_OK(tutti_store_set(writer, "n", "after", 5));
        check_value(reader, "n", "after");
        bool present;
        CHECK_OK(tutti_store_check(reader, (const char *[]){ "m" }, 1, &present));
        CHECK(!present);
        tutti_store_release(writer);
        tutti_store_release(reader);
    }
    unlink(path);
}

TEST(a_file_of_something_else_is_an_error_and_stays_as_it_is) {
    static const char *const others[] = { "a letter to my mother, which is dear to me", "\177ELF....", "PK\3\4",
                                          "\x01\0\0\0x\0\0\0\0" };
    char data[256];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t bytes = i == 3 ? 9 : strlen(others[i]);
        write_file(others[i], bytes, O_TRUNC);
        tutti_store *store;
        CHECK_STATUS(tutti_store_open_file(path, NULL, &store), TUTTI_ERROR_PROTOCOL);
        CHECK_MESSAGE(path);
        CHECK_EQ(read_file(data, sizeof data), bytes);
        CHECK(memcmp(data, others[i], bytes) == 0);
    }
    unlink(path);
}

TEST(a_file_that_was_cut_under_a_handle_is_an_error) {
    tutti_store *store = open_path(0);
    CHECK_OK(tutti_store_set(store, "k", "v", 1));
    CHECK_EQ(truncate(path, 3), 0);
    void *value;
    CHECK_STATUS(tutti_store_get(store, "k", MILLISECONDS(100), &value, NULL), TUTTI_ERROR_STORE);
    CHECK_MESSAGE(path);
    tutti_store_release(store);
    unlink(path);
}

TEST(a_path_that_cannot_be_opened_is_an_error_that_names_it) {
    tutti_store *store;
    CHECK_STATUS(tutti_store_open_file("/no/such/folder/store", NULL, &store), TUTTI_ERROR_SYSTEM);
    CHECK_MESSAGE("/no/such/folder/store");
    CHECK_STATUS(tutti_store_open_file("/tmp", NULL, &store), TUTTI_ERROR_SYSTEM);
    CHECK_STATUS(tutti_store_open_file(NULL, NULL, &store), TUTTI_ERROR_ARGUMENT);
}

TEST(processes_count_together_and_a_killed_one_holds_no_lock) {
    enum {
        CHILDREN = 4,
        ROUNDS = 50
    };
    tutti_store *store = open_path(0);
    fflush(NULL);
    for (int i = 0; i < CHILDREN; i++) {
        if (fork() == 0) {
            tutti_store *mine;
            CHECK_OK(tutti_store_open_file(path, NULL, &mine));
            for (int round = 0; round < ROUNDS; round++)
                CHECK_OK(tutti_store_add(mine, "count", 1, NULL));
            CHECK_OK(tutti_store_barrier(mine, "all", CHILDREN, 0));
            if (i == 0)
                raise(SIGKILL);
            tutti_store_release(mine);
            _exit(0);
        }
    }
    int ended = 0;
    for (int i = 0; i < CHILDREN; i++) {
        int status;
        CHECK(wait(&status) > 0);
        ended += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    CHECK_EQ(ended, CHILDREN - 1);
    check_value(store, "count", "200");
    tutti_store_release(store);
    unlink(path);
}
