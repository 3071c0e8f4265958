/* SPDX-License-Identifier: Apache-2.0
 *
 * The tcp server seen from the wire: the protocol byte by byte, bad input, and many clients.
 */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "raw.h"
#include "store/auth.h"

static void check_serves(tutti_store *store) {
    void *value;
    CHECK_OK(tutti_store_set(store, "still", "serving", 7));
    CHECK_OK(tutti_store_get(store, "still", 0, &value, NULL));
    CHECK_TEXT((char *)value, "serving");
    tutti_free(value);
}

/* ---- the protocol ---- */

#define KEY_K "\x02\0\0\0\0\0\0\0/k"
#define KEY_C "\x02\0\0\0\0\0\0\0/c"
#define KEY_M "\x02\0\0\0\0\0\0\0/m"
#define ONE "\x01\0\0\0\0\0\0\0"
#define TWO "\x02\0\0\0\0\0\0\0"

typedef struct exchange {
    const char *command;
    size_t command_bytes;
    const char *reply;
    size_t reply_bytes;
} exchange;

static const exchange exchanges[] = {
    { BYTES("\x01" KEY_K ONE "v"), BYTES("") },                                /* set k = v */
    { BYTES("\x03" KEY_K), BYTES(ONE "v") },                                   /* get k */
    { BYTES("\x03" KEY_M), BYTES("\0\0\0\0\0\0\0\0") },                        /* get of a missing key: empty */
    { BYTES("\x04" KEY_C "\x05\0\0\0\0\0\0\0"), BYTES("\x05\0\0\0\0\0\0\0") }, /* add c 5 */
    { BYTES("\x04" KEY_C "\xf9\xff\xff\xff\xff\xff\xff\xff"),
      BYTES("\xfe\xff\xff\xff\xff\xff\xff\xff") }, /* add c -7 */
    { BYTES("\x03" KEY_C), BYTES(TWO "-2") },
    { BYTES("\x05" TWO KEY_K KEY_C), BYTES("\0") },          /* check: there */
    { BYTES("\x05" TWO KEY_K KEY_M), BYTES("\x01") },        /* check: not */
    { BYTES("\x06" TWO KEY_K KEY_C), BYTES("\0") },          /* wait: there */
    { BYTES("\x06" ONE KEY_M "\x0c"), BYTES("\x01") },       /* wait, then cancel */
    { BYTES("\x0c"), BYTES("\x01") },                        /* cancel nothing */
    { BYTES("\x07"), BYTES(TWO) },                           /* number of keys */
    { BYTES("\x02" KEY_M ONE "x" ONE "y"), BYTES(ONE "x") }, /* compare_set, missing */
    { BYTES("\x02" KEY_K ONE "v" ONE "w"), BYTES(ONE "w") },
    { BYTES("\x02" KEY_K ONE "v" ONE "z"), BYTES(ONE "w") },
    { BYTES("\x09" KEY_K TWO "ab"), BYTES("") }, /* append */
    { BYTES("\x0a" TWO KEY_C KEY_K), BYTES(TWO "-2"
                                               "\x03\0\0\0\0\0\0\0wab") },   /* multi_get */
    { BYTES("\x0b" TWO KEY_K ONE "1" KEY_M "\0\0\0\0\0\0\0\0"), BYTES("") }, /* multi_set */
    { BYTES("\x03" KEY_K), BYTES(ONE "1") },
    { BYTES("\x08" KEY_M), BYTES(ONE) },                          /* delete: was there */
    { BYTES("\x08" KEY_M), BYTES("\0\0\0\0\0\0\0\0") },           /* delete: was not */
    { BYTES("\x0d\xaa\xbb\xcc\xdd"), BYTES("\xaa\xbb\xcc\xdd") }, /* ping */
    { BYTES("\x0e" KEY_M ONE "q"), BYTES("") },                   /* queue push */
    { BYTES("\x10" KEY_M), BYTES(ONE) },                          /* queue length */
    { BYTES("\x0f" KEY_M), BYTES(ONE ONE "q") },                  /* queue pop */
    { BYTES("\x0f" KEY_M), BYTES("\0\0\0\0\0\0\0\0") },           /* queue pop: empty */
    { BYTES("\x08" KEY_C), BYTES(ONE) },
    { BYTES("\x11"), BYTES(ONE KEY_K) },      /* list keys */
    { BYTES("\x12" KEY_M ONE), BYTES("\0") }, /* barrier of one */
};
enum {
    EXCHANGES = sizeof exchanges / sizeof *exchanges
};

TEST(every_command_gets_the_reply_of_the_protocol) {
    tutti_store *store = open_server("localhost");
    int raw = raw_client(tutti_store_port(store));
    for (size_t i = 0; i < EXCHANGES; i++) {
        raw_send(raw, exchanges[i].command, exchanges[i].command_bytes);
        raw_expect(raw, exchanges[i].reply, exchanges[i].reply_bytes);
    }
    raw_expect_alive(raw);
    close(raw);
    tutti_store_release(store);
}

TEST(commands_may_come_in_any_pieces) {
    tutti_store *store = open_server("localhost");
    int raw = raw_connect(tutti_store_port(store));
    for (size_t i = 0; i < sizeof VALIDATE - 1; i++)
        raw_send(raw, &VALIDATE[i], 1);
    for (size_t i = 0; i < EXCHANGES; i++) {
        for (size_t byte = 0; byte < exchanges[i].command_bytes; byte++) {
            raw_send(raw, exchanges[i].command + byte, 1);
            if (byte % 7 == 0)
                usleep(100);
        }
        raw_expect(raw, exchanges[i].reply, exchanges[i].reply_bytes);
    }
    close(raw);
    tutti_store_release(store);
}

TEST(commands_may_come_all_at_once) {
    tutti_store *store = open_server("localhost");
    int raw = raw_connect(tutti_store_port(store));
    char all[8192] = VALIDATE, replies[8192];
    size_t bytes = sizeof VALIDATE - 1, reply_bytes = 0;
    for (size_t i = 0; i < EXCHANGES; i++) {
        memcpy(all + bytes, exchanges[i].command, exchanges[i].command_bytes);
        bytes += exchanges[i].command_bytes;
        memcpy(replies + reply_bytes, exchanges[i].reply, exchanges[i].reply_bytes);
        reply_bytes += exchanges[i].reply_bytes;
    }
    raw_send(raw, all, bytes);
    raw_expect(raw, replies, reply_bytes);
    close(raw);
    tutti_store_release(store);
}

TEST(a_wait_is_answered_when_its_last_key_comes) {
    tutti_store *store = open_server("localhost");
    int waiting = raw_client(tutti_store_port(store)), setting = raw_client(tutti_store_port(store));
    raw_send(waiting, BYTES("\x06\x03\0\0\0\0\0\0\0" KEY_K KEY_C KEY_K)); /* the same key twice is one arrival */
    raw_send(setting, BYTES("\x01" KEY_K ONE "v"));
    raw_expect_alive(setting);
    raw_expect_alive(waiting); /* other commands go on meanwhile */
    raw_send(setting, BYTES("\x08" KEY_K));
    raw_expect(setting, BYTES(ONE));
    raw_send(setting, BYTES("\x04" KEY_C ONE)); /* the first key is gone again, but it had come */
    raw_expect(setting, BYTES(ONE));
    raw_expect(waiting, BYTES("\0"));
    close(waiting);
    close(setting);
    tutti_store_release(store);
}

TEST(a_wait_that_was_answered_before_its_cancel_gets_both_replies) {
    tutti_store *store = open_server("localhost");
    int raw = raw_client(tutti_store_port(store));
    raw_send(raw, BYTES("\x06" ONE KEY_K));
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    raw_expect(raw, BYTES("\0"));
    raw_send(raw, BYTES("\x0c"));
    raw_expect(raw, BYTES("\x01"));
    close(raw);
    tutti_store_release(store);
}

TEST(one_push_wakes_one_waiter) {
    tutti_store *store = open_server("localhost");
    int first = raw_client(tutti_store_port(store)), second = raw_client(tutti_store_port(store));
    raw_send(first, BYTES("\x06" ONE KEY_K));
    raw_expect_alive(first);
    raw_send(second, BYTES("\x06" ONE KEY_K));
    raw_expect_alive(second);
    CHECK_OK(tutti_store_queue_push(store, "k", "x", 1));
    raw_expect(first, BYTES("\0"));
    raw_expect_alive(second); /* a 0 would have come before the echo */
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    raw_expect(second, BYTES("\0"));
    close(first);
    close(second);
    tutti_store_release(store);
}

TEST(what_a_woken_waiter_leaves_in_a_queue_goes_to_the_next) {
    tutti_store *store = open_server("localhost");
    for (int way = 0; way < 3; way++) {
        int first = raw_client(tutti_store_port(store)), second = raw_client(tutti_store_port(store));
        raw_send(first, BYTES("\x06" ONE KEY_M));
        raw_expect_alive(first);
        raw_send(second, BYTES("\x06" ONE KEY_M));
        raw_expect_alive(second);
        CHECK_OK(tutti_store_queue_push(store, "m", "x", 1));
        raw_expect(first, BYTES("\0"));
        if (way == 1)
            raw_send(first, BYTES("\x0c")); /* its time was up at the same moment */
        else if (way == 2)
            raw_send(first, BYTES("\x06" ONE KEY_C)); /* it waits for something else */
        if (way == 0)
            close(first);
        raw_expect(second, BYTES("\0"));
        raw_send(second, BYTES("\x0f" KEY_M));
        raw_expect(second, BYTES(ONE ONE "x"));
        if (way != 0)
            close(first);
        close(second);
    }
    tutti_store_release(store);
}

/* ---- bad input ---- */

typedef struct bad {
    const char *what;
    const char *data;
    size_t bytes;
} bad;

static const bad bad_beginnings[] = {
    { "garbage", BYTES("GET / HTTP/1.1\r\n\r\n") },
    { "another magic", BYTES("\0\x01\x02\x03\x04") },
    { "a command before VALIDATE", BYTES("\x01" KEY_K ONE "v") },
    { "a ping before VALIDATE", BYTES("\x0d\x01\x02\x03\x04") },
    { "a proof without a hello", BYTES("\x81") },
    { "a hello of another family", BYTES("\x80XXXX\x01\0\0\0"
                                         "01234567890123456789012345678901") },
};

static const bad bad_commands[] = {
    { "no such command", BYTES("\x13") },
    { "a command far outside", BYTES("\xff") },
    { "a second VALIDATE", BYTES(VALIDATE) },
    { "a hello too late", BYTES("\x80") },
    { "a key of 8193 bytes", BYTES("\x03\x01\x20\0\0\0\0\0\0") },
    { "a key of 2^64 - 1 bytes", BYTES("\x03\xff\xff\xff\xff\xff\xff\xff\xff") },
    { "a value of 8 MiB and a byte", BYTES("\x01" KEY_K "\x01\0\x80\0\0\0\0\0") },
    { "131073 keys", BYTES("\x06\x01\0\x02\0\0\0\0\0") },
    { "2^63 keys", BYTES("\x0b\0\0\0\0\0\0\0\x80") },
    { "add to no number", BYTES("\x01" KEY_K ONE "v"
                                "\x04" KEY_K ONE) },
    { "a barrier at no number", BYTES("\x01" KEY_K ONE "v"
                                      "\x12" KEY_K ONE) },
    { "two waits at once", BYTES("\x06" ONE KEY_M "\x06" ONE KEY_M) },
};

TEST(a_bad_first_command_is_rejected_and_the_others_are_served) {
    tutti_store *store = open_server("localhost");
    for (size_t i = 0; i < sizeof bad_beginnings / sizeof *bad_beginnings; i++) {
        int raw = raw_connect(tutti_store_port(store));
        raw_send(raw, bad_beginnings[i].data, bad_beginnings[i].bytes);
        raw_expect_closed(raw);
        check_serves(store);
    }
    tutti_store_release(store);
}

TEST(a_bad_command_closes_its_connection_and_no_other) {
    tutti_store *store = open_server("localhost");
    for (size_t i = 0; i < sizeof bad_commands / sizeof *bad_commands; i++) {
        int raw = raw_client(tutti_store_port(store));
        raw_send(raw, bad_commands[i].data, bad_commands[i].bytes);
        raw_expect_closed(raw);
        check_serves(store);
    }
    tutti_store_release(store);
}

TEST(what_is_at_the_limit_is_served) {
    tutti_store *store = open_server("localhost");
    int raw = raw_client(tutti_store_port(store));
    char *frame = calloc(1, 1 + 8 + 8192 + 8 + (8 << 20));
    uint64_t key = 8192, value = 8 << 20;
    frame[0] = 1;
    memcpy(frame + 1, &key, 8);
    memset(frame + 9, '/', 8192);
    memcpy(frame + 9 + 8192, &value, 8);
    raw_send(raw, frame, 1 + 8 + 8192 + 8 + (8 << 20));
    raw_expect_alive(raw);
    /* And 131072 keys, of no bytes each, which were all set. */
    raw_send(raw, BYTES("\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"));
    uint64_t keys = 131072;
    frame[0] = 5;
    memcpy(frame + 1, &keys, 8);
    memset(frame + 9, 0, 131072 * 8);
    raw_send(raw, frame, 9 + 131072 * 8);
    raw_expect(raw, BYTES("\0"));
    free(frame);
    close(raw);
    tutti_store_release(store);
}

TEST(a_truncated_command_is_forgotten_with_its_client) {
    tutti_store *store = open_server("localhost");
    for (size_t i = 0; i < EXCHANGES; i++) {
        for (size_t bytes = 1; bytes < exchanges[i].command_bytes; bytes++) {
            int raw = raw_connect(tutti_store_port(store));
            raw_send(raw, BYTES(VALIDATE));
            raw_send(raw, exchanges[i].command, bytes);
            close(raw);
        }
    }
    check_serves(store);
    tutti_store_release(store);
}

TEST(a_client_that_vanishes_takes_its_waits_along) {
    tutti_store *store = open_server("localhost");
    for (int i = 0; i < 50; i++) {
        int raw = raw_client(tutti_store_port(store));
        raw_send(raw, BYTES("\x06\x03\0\0\0\0\0\0\0" KEY_K KEY_C KEY_M));
        if (i % 2 == 0)
            raw_expect_alive(raw);
        close(raw);
    }
    int64_t keys;
    CHECK_OK(tutti_store_num_keys(store, &keys));
    CHECK_EQ(keys, 0);
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    CHECK_OK(tutti_store_set(store, "c", "", 0));
    CHECK_OK(tutti_store_set(store, "m", "", 0));
    check_serves(store);
    tutti_store_release(store);
}

TEST(a_client_that_does_not_read_is_not_listened_to_and_holds_nobody_up) {
    tutti_store *store = open_server("localhost");
    char *large = calloc(1, 4 << 20);
    CHECK_OK(tutti_store_set(store, "k", large, 4 << 20));
    check_serves(store); /* so that the set, which has no reply, is done */
    int raw = raw_client(tutti_store_port(store));
    enum {
        ASKED = 64
    };
    for (int i = 0; i < ASKED; i++)
        raw_send(raw, BYTES("\x03" KEY_K));
    for (int i = 0; i < 20; i++)
        check_serves(store);
    for (int i = 0; i < ASKED; i++) { /* and when it reads at last, it gets all */
        uint64_t length;
        raw_receive(raw, &length, sizeof length);
        CHECK_EQ(length, 4 << 20);
        raw_receive(raw, large, 4 << 20);
    }
    free(large);
    close(raw);
    tutti_store_release(store);
}

TEST(silent_connections_are_capped_and_make_room_for_those_that_speak) {
    tutti_store *store = open_server("localhost");
    enum {
        SILENT = 600,
        CAP = 256
    };
    int silent[SILENT];
    for (int i = 0; i < SILENT; i++)
        silent[i] = raw_connect(tutti_store_port(store));
    int raw = raw_client(tutti_store_port(store));
    int closed = 0;
    for (int i = 0; i < SILENT; i++) {
        char byte;
        if (recv(silent[i], &byte, 1, MSG_DONTWAIT) == 0)
            closed++;
        close(silent[i]);
    }
    CHECK(closed >= SILENT - CAP);
    raw_expect_alive(raw);
    close(raw);
    tutti_store_release(store);
}

TEST(a_connection_that_stays_silent_is_closed_in_time) {
    tutti_store *store = open_server("localhost");
    int silent = raw_connect(tutti_store_port(store)), half = raw_connect(tutti_store_port(store));
    int raw = raw_client(tutti_store_port(store));
    raw_send(half, VALIDATE, 3);
    raw_expect_closed(silent); /* within the 20 s that the read may take */
    raw_expect_closed(half);
    raw_expect_alive(raw);
    close(raw);
    tutti_store_release(store);
}

/* ---- many clients, few descriptors ---- */

static bool allow_descriptors(rlim_t count) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < count)
        limit.rlim_cur = count;
    if (limit.rlim_max < count)
        limit.rlim_max = count; /* root may */
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

TEST(one_server_serves_2000_connected_clients) {
    enum {
        CLIENTS = 2000
    };
    static int raw[CLIENTS];
    if (!allow_descriptors(2 * CLIENTS + 100))
        SKIP("this user may not have %d open files", 2 * CLIENTS + 100);
    tutti_store *store = open_server("localhost");
    for (int i = 0; i < CLIENTS; i++)
        raw[i] = raw_client(tutti_store_port(store));
    for (int i = 0; i < CLIENTS; i++)
        raw_send(raw[i], BYTES("\x04" KEY_C ONE "\x06" ONE KEY_K)); /* each adds one, then waits for the same key */
    for (int i = 0; i < CLIENTS; i++) {
        int64_t sum;
        raw_receive(raw[i], &sum, sizeof sum);
        CHECK(sum >= 1 && sum <= CLIENTS);
    }
    int64_t sum;
    CHECK_OK(tutti_store_add(store, "c", 0, &sum));
    CHECK_EQ(sum, CLIENTS);
    CHECK_OK(tutti_store_set(store, "k", "go", 2));
    for (int i = 0; i < CLIENTS; i++) {
        raw_expect(raw[i], BYTES("\0"));
        close(raw[i]);
    }
    tutti_store_release(store);
}

TEST(clients_of_many_processes_may_all_come_at_once) {
    tutti_store *store = open_server("localhost");
    enum {
        CHILDREN = 40
    };
    for (int i = 0; i < CHILDREN; i++) {
        fflush(NULL);
        if (fork() == 0) {
            tutti_store *mine;
            CHECK_OK(tutti_store_open_url(tutti_store_address(store), NULL, &mine));
            CHECK_OK(tutti_store_barrier(mine, "all", CHILDREN, 0));
            tutti_store_release(mine);
            _exit(0);
        }
    }
    for (int i = 0; i < CHILDREN; i++) {
        int status;
        CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    tutti_store_release(store);
}

/* In a child process: a server that has few descriptors left. */
static void serve_with_few_descriptors(int port_pipe, int stop_pipe) {
    tutti_store *store = open_server("localhost");
    struct rlimit limit = { .rlim_cur = (rlim_t)test_count_descriptors() + 3, .rlim_max = 1024 };
    setrlimit(RLIMIT_NOFILE, &limit);
    int port = tutti_store_port(store);
    CHECK(write(port_pipe, &port, sizeof port) == sizeof port);
    char byte;
    CHECK(read(stop_pipe, &byte, 1) == 0);
    check_serves(store);
    tutti_store_release(store);
    _exit(0);
}

TEST(a_full_table_of_descriptors_turns_new_clients_away_and_serves_the_old) {
    int ports[2], stop[2];
    CHECK_EQ(pipe2(ports, O_CLOEXEC), 0);
    CHECK_EQ(pipe2(stop, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        close(stop[1]);
        close(ports[0]);
        serve_with_few_descriptors(ports[1], stop[0]);
    }
    int port = 0;
    CHECK(read(ports[0], &port, sizeof port) == sizeof port);
    tutti_store *clients[8] = { NULL };
    int served = 0;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.timeout_ns = 2 * test_moment();
    while (served < 8 && tutti_store_open_tcp("localhost", port, &options, &clients[served]) == TUTTI_OK)
        served++;
    CHECK(served >= 1 && served < 8);
    CHECK_MESSAGE("client socket has timed out after");
    for (int i = 0; i < served; i++)
        check_serves(clients[i]);
    tutti_store_release(clients[--served]);
    CHECK_OK(
        tutti_store_open_tcp("localhost", port, &options, &clients[served])); /* one has left: there is room again */
    served++;
    for (int i = 0; i < served; i++)
        tutti_store_release(clients[i]);
    close(stop[0]);
    close(stop[1]);
    close(ports[0]);
    close(ports[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- a good guest in the process ---- */

/* Those that were open before belong to whoever started the test. */
TEST(every_descriptor_is_closed_on_exec) {
    bool others[1024];
    for (int descriptor = 0; descriptor < 1024; descriptor++)
        others[descriptor] = fcntl(descriptor, F_GETFD) >= 0;
    tutti_store *tcp = open_server("localhost"), *local, *file;
    char path[64], host[64];
    snprintf(host, sizeof host, "unix:@tutti-test-exec-%d", (int)getpid());
    local = open_server(host);
    snprintf(path, sizeof path, "/tmp/tutti-test-exec-%d", (int)getpid());
    CHECK_OK(tutti_store_open_file(path, NULL, &file));
    unlink(path);
    int opened = 0;
    for (int descriptor = 0; descriptor < 1024; descriptor++) {
        int flags = others[descriptor] ? -1 : fcntl(descriptor, F_GETFD);
        char target[128] = "";
        if (flags < 0)
            continue;
        opened++;
        snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
        if ((flags & FD_CLOEXEC) == 0 && readlink(path, target, sizeof target - 1) > 0)
            FAIL("%s is not closed on exec", target);
    }
    CHECK(opened >= 3);
    tutti_store_release(file);
    tutti_store_release(local);
    tutti_store_release(tcp);
}

TEST(the_servers_thread_has_a_name_and_takes_no_signals) {
    tutti_store *store = open_server("localhost");
    DIR *folder = opendir("/proc/self/task");
    bool found = false;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char path[300], line[256], name[32] = "";
        uint64_t blocked = 0;
        snprintf(path, sizeof path, "/proc/self/task/%.20s/status", entry->d_name);
        FILE *status = fopen(path, "re");
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            sscanf(line, "Name: %31s", name);
            sscanf(line, "SigBlk: %" SCNx64, &blocked);
        }
        if (status != NULL)
            fclose(status);
        if (strcmp(name, "tutti-store") == 0) {
            found = true;
            CHECK_EQ(blocked & 0x7fffffff & ~((UINT64_C(1) << 8) | (UINT64_C(1) << 18)),
                     0x7ffbfeff); /* all but KILL and STOP */
        }
    }
    closedir(folder);
    CHECK(found);
    tutti_store_release(store);
}

/* A short command that names one large value many times must not cost the server any amount of memory. */
TEST(a_value_asked_for_many_times_in_one_command_is_refused) {
    tutti_store *store = NULL;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    CHECK_OK(tutti_store_open_tcp("127.0.0.1", 0, &options, &store));
    size_t bytes = (size_t)1 << 20;
    char *value = calloc(1, bytes);
    CHECK_OK(tutti_store_set(store, "large", value, bytes));
    const char *keys[64];
    void *values[64];
    size_t sizes[64];
    for (int i = 0; i < 64; i++)
        keys[i] = "large";
    tutti_store *greedy;
    CHECK_OK(tutti_store_clone(store, &greedy));
    CHECK_STATUS(tutti_store_multi_get(greedy, keys, 64, 0, values, sizes), TUTTI_ERROR_NETWORK);
    tutti_store_release(greedy);
    CHECK_OK(tutti_store_multi_get(store, keys, 2, 0, values, sizes)); /* a few are nobody's harm */
    tutti_free(values[0]);
    tutti_free(values[1]);
    tutti_store_release(store);
    free(value);
}

static int lines_of(const char *path, const char *word) {
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    char line[1024];
    int count = 0;
    while (fgets(line, sizeof line, file) != NULL)
        count += strstr(line, word) != NULL;
    fclose(file);
    return count;
}

TEST(strangers_by_the_hundred_cost_a_few_lines_of_log) {
    if (!tu_auth_available())
        SKIP("this build has no libsodium, so no store has a secret");
    char path[] = "/tmp/tutti-test-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0 && dup2(file, STDERR_FILENO) >= 0);
    tutti_store *store = NULL;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    char secret[32] = "a secret of thirty-two bytes....";
    options.server = true;
    options.secret = secret;
    options.secret_bytes = sizeof secret;
    CHECK_OK(tutti_store_open_tcp("127.0.0.1", 0, &options, &store));
    for (int i = 0; i < 300; i++) {
        int raw = raw_connect(tutti_store_port(store));
        raw_send(raw, BYTES(VALIDATE));
        close(raw);
    }
    CHECK_OK(tutti_store_set(store, "k", "", 0)); /* still there */
    void *value;
    CHECK_OK(tutti_store_get(store, "k", 0, &value, NULL));
    tutti_free(value);
    tutti_store_release(store);
    CHECK(lines_of(path, "refused") < 20);
    close(file);
    CHECK_EQ(unlink(path), 0);
}
