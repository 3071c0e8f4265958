/* SPDX-License-Identifier: Apache-2.0
 *
 * The tcp client: what it sends, how it opens, and what it makes of servers that misbehave.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "raw.h"

/* ---- a server played by the test: gets one connection, expects and sends bytes ---- */

typedef struct play {
    int listening, port;
    const char *expect, *reply; /* after the handshake */
    size_t expect_bytes, reply_bytes;
    bool close_at_once;
    useconds_t late; /* the reply comes so much later */
    pthread_t thread;
} play;

static void *play_server(void *argument) {
    play *play = argument;
    uint32_t pid = (uint32_t)getpid();
    char ping[5] = { 13 };
    memcpy(ping + 1, &pid, 4);
    int raw = accept(play->listening, NULL, NULL);
    CHECK(raw >= 0);
    raw_expect(raw, BYTES(VALIDATE));
    raw_expect(raw, ping, 5);
    raw_send(raw, &pid, 4);
    raw_expect(raw, play->expect, play->expect_bytes);
    usleep(play->late);
    raw_send(raw, play->reply, play->reply_bytes);
    if (!play->close_at_once) { /* until the client has left */
        char rest[256];
        while (recv(raw, rest, sizeof rest, 0) > 0)
            continue;
    }
    close(raw);
    return NULL;
}

static tutti_store *play_start(play *play, const char *expect, size_t expect_bytes, const char *reply,
                               size_t reply_bytes) {
    play->listening = raw_listen(&play->port);
    play->expect = expect;
    play->expect_bytes = expect_bytes;
    play->reply = reply;
    play->reply_bytes = reply_bytes;
    CHECK_EQ(pthread_create(&play->thread, NULL, play_server, play), 0);
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.timeout_ns = MILLISECONDS(60000);
    CHECK_OK(tutti_store_open_tcp("127.0.0.1", play->port, &options, &store));
    return store;
}

static void play_end(play *play, tutti_store *store) {
    tutti_store_release(store);
    pthread_join(play->thread, NULL);
    close(play->listening);
}

#define KEY_K "\x02\0\0\0\0\0\0\0/k"
#define ONE "\x01\0\0\0\0\0\0\0"

TEST(set_is_sent_as_the_protocol_has_it) {
    play play = { 0 };
    tutti_store *store = play_start(&play, BYTES("\x01" KEY_K ONE "v"), BYTES(""));
    CHECK_OK(tutti_store_set(store, "k", "v", 1));
    play_end(&play, store);
}

TEST(add_is_sent_as_the_protocol_has_it) {
    play play = { 0 };
    int64_t sum;
    tutti_store *store =
        play_start(&play, BYTES("\x04\x02\0\0\0\0\0\0\0/c\x05\0\0\0\0\0\0\0"), BYTES("\x07\0\0\0\0\0\0\0"));
    CHECK_OK(tutti_store_add(store, "c", 5, &sum));
    CHECK_EQ(sum, 7);
    play_end(&play, store);
}

TEST(a_wait_that_is_too_long_is_cancelled_and_the_connection_lives) {
    play play = { 0 };
    int64_t keys;
    tutti_store *store = play_start(&play, BYTES("\x06" ONE KEY_K "\x0c"), BYTES("\0\x01\x09\0\0\0\0\0\0\0"));
    /* The 0 came too late, together with the 1 of the cancel. */
    CHECK_STATUS(tutti_store_wait(store, (const char *[]){ "k" }, 1, MILLISECONDS(20)), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("wait timeout after 20ms, keys: /k");
    CHECK_OK(tutti_store_num_keys(store, &keys));
    CHECK_EQ(keys, 9);
    play_end(&play, store);
}

TEST(a_server_that_answers_later_than_a_short_timeout_is_no_lost_server) {
    play play = { .late = 300000 };
    int64_t keys, sum;
    tutti_store *store = play_start(&play, BYTES("\x07"),
                                    BYTES("\x09\0\0\0\0\0\0\0"
                                          "\x05\0\0\0\0\0\0\0"));
    CHECK_OK(tutti_store_set_timeout(store, MILLISECONDS(1)));
    CHECK_OK(tutti_store_num_keys(store, &keys));
    CHECK_EQ(keys, 9);
    CHECK_OK(tutti_store_add(store, "c", 1, &sum));
    CHECK_EQ(sum, 5);
    play_end(&play, store);
}

/* ---- servers that misbehave ---- */

static void expect_broken(tutti_store *store) {
    CHECK_STATUS(tutti_store_set(store, "k", "v", 1), TUTTI_ERROR_NETWORK);
    CHECK_MESSAGE("lost earlier");
}

TEST(a_server_that_closes_in_the_middle_of_a_reply_is_an_error) {
    play play = { .close_at_once = true };
    void *value;
    size_t bytes;
    tutti_store *store = play_start(&play, BYTES("\x06" ONE KEY_K), BYTES("\0\x10\0\0\0\0\0\0\0half"));
    CHECK_STATUS(tutti_store_multi_get(store, (const char *[]){ "k" }, 1, 0, &value, &bytes), TUTTI_ERROR_NETWORK);
    expect_broken(store);
    play_end(&play, store);
}

TEST(a_server_that_never_answers_is_given_up) {
    play play = { 0 };
    int64_t keys;
    tutti_store *store = play_start(&play, BYTES("\x07"), BYTES(""));
    CHECK_OK(tutti_store_set_timeout(store, MILLISECONDS(200)));
    CHECK_STATUS(tutti_store_num_keys(store, &keys), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("timeout");
    expect_broken(store);
    play_end(&play, store);
}

TEST(a_reply_that_means_nothing_is_an_error) {
    play play = { 0 };
    tutti_store *store = play_start(&play, BYTES("\x06" ONE KEY_K), BYTES("\x02"));
    CHECK_STATUS(tutti_store_wait(store, (const char *[]){ "k" }, 1, 0), TUTTI_ERROR_PROTOCOL);
    expect_broken(store);
    play_end(&play, store);
}

TEST(a_reply_of_a_monstrous_length_is_an_error_and_no_allocation) {
    play play = { 0 };
    void *value;
    size_t bytes;
    tutti_store *store = play_start(&play, BYTES("\x06" ONE KEY_K), BYTES("\0\0\0\0\0\0\0\0\x40"));
    CHECK_STATUS(tutti_store_multi_get(store, (const char *[]){ "k" }, 1, 0, &value, &bytes), TUTTI_ERROR_PROTOCOL);
    play_end(&play, store);
}

TEST(a_list_of_keys_of_monstrous_length_is_an_error) {
    play play = { .close_at_once = true };
    char **keys;
    size_t count;
    tutti_store *store = play_start(&play, BYTES("\x11"), BYTES("\xff\xff\xff\xff\xff\xff\xff\x7f\x01\0\0\0\0\0\0\0x"));
    CHECK_STATUS(tutti_store_list_keys(store, &keys, &count), TUTTI_ERROR_NETWORK);
    play_end(&play, store);
}

TEST(a_server_of_another_protocol_is_an_error_in_time) {
    int port, listening = raw_listen(&port);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        for (;;) {
            int raw = accept(listening, NULL, NULL);
            raw_send(raw, BYTES("SSH-2.0-OpenSSH_9.2\r\n"));
            close(raw);
        }
    }
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.timeout_ns = MILLISECONDS(100);
    CHECK_STATUS(tutti_store_open_tcp("127.0.0.1", port, &options, &store), TUTTI_ERROR_NETWORK);
    CHECK_MESSAGE("client socket has timed out after 100ms");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(listening);
}

TEST(a_server_that_dies_is_an_error_for_who_waits) {
    tutti_store *server, *client;
    CHECK_OK(tutti_store_serve("localhost", 0, NULL, &server));
    CHECK_OK(tutti_store_open_url(tutti_store_address(server), NULL, &client));
    tutti_store_release(server);
    void *value;
    CHECK_STATUS(tutti_store_get(client, "k", 0, &value, NULL), TUTTI_ERROR_NETWORK);
    expect_broken(client);
    tutti_store_release(client);
}

/* ---- opening ---- */

TEST(a_client_waits_for_its_server_to_come) {
    tutti_store *store, *server = open_server("localhost");
    int port = tutti_store_port(server);
    tutti_store_release(server);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        usleep(100000);
        tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
        options.server = true;
        options.workers = 2;
        CHECK_OK(tutti_store_open_tcp("localhost", port, &options, &store));
        CHECK_OK(tutti_store_wait(store, (const char *[]){ "done" }, 1, 0));
        tutti_store_release(store);
        _exit(0);
    }
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.workers = 2;
    CHECK_OK(tutti_store_open_tcp("localhost", port, &options, &store));
    int64_t keys;
    CHECK_OK(tutti_store_num_keys(store, &keys));
    CHECK_EQ(keys, 1); /* the one under which the workers are counted */
    char **list;
    size_t count;
    CHECK_OK(tutti_store_list_keys(store, &list, &count));
    CHECK_EQ(count, 0); /* which is no user's */
    tutti_free(list);
    CHECK_OK(tutti_store_set(store, "done", "", 0));
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    tutti_store_release(store);
}

TEST(a_server_that_misses_workers_says_how_many_joined) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    options.workers = 3;
    options.timeout_ns = test_moment();
    CHECK_STATUS(tutti_store_open_tcp("localhost", 0, &options, &store), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("Timed out after");
    CHECK_MESSAGE("waiting for clients");
    CHECK_MESSAGE("1/3 clients joined");
    options.no_wait = true;
    CHECK_OK(tutti_store_open_tcp("localhost", 0, &options, &store));
    tutti_store_release(store);
}

TEST(a_taken_port_is_named) {
    tutti_store *first = open_server("localhost"), *second;
    char port[16];
    snprintf(port, sizeof port, "port %d", tutti_store_port(first));
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    CHECK_STATUS(tutti_store_open_tcp("localhost", tutti_store_port(first), &options, &second), TUTTI_ERROR_NETWORK);
    CHECK_MESSAGE("The server socket has failed to listen on any local");
    CHECK_MESSAGE(port);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.system_error, EADDRINUSE);
    tutti_store_release(first);
}

TEST(a_host_that_cannot_be_reached_or_resolved_is_an_error_in_time) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.timeout_ns = MILLISECONDS(150);
    CHECK_STATUS(tutti_store_open_tcp("no-such-host.invalid", 29500, &options, &store), TUTTI_ERROR_NETWORK);
    CHECK_MESSAGE("client socket has timed out after 150ms");
    CHECK_MESSAGE("no-such-host.invalid");
    int port;
    close(raw_listen(&port));
    CHECK_STATUS(tutti_store_open_tcp("127.0.0.1", port, &options, &store), TUTTI_ERROR_NETWORK);
    CHECK_MESSAGE("client socket has timed out after 150ms");
    CHECK_STATUS(tutti_store_open_tcp("unix:@tutti-nobody-here", 0, &options, &store), TUTTI_ERROR_NETWORK);
    usleep(20000); /* the look-up's thread may still be on its way out */
}

TEST(wrong_options_are_named) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    char long_host[400];
    memset(long_host, 'h', sizeof long_host - 1);
    long_host[sizeof long_host - 1] = 0;
    CHECK_STATUS(tutti_store_open_tcp(NULL, 1, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_tcp("localhost", 1, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_tcp(long_host, 1, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_tcp("localhost", 65536, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("65536");
    CHECK_STATUS(tutti_store_open_tcp("localhost", -1, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_tcp("localhost", 0, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("port number missing");
    CHECK_STATUS(tutti_store_open_tcp("unix:name", 0, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_tcp("unix:@", 0, NULL, &store), TUTTI_ERROR_ARGUMENT);
    options.timeout_ns = -1;
    CHECK_STATUS(tutti_store_open_tcp("localhost", 1, &options, &store), TUTTI_ERROR_ARGUMENT);
    options = (tutti_tcp_store_options)TUTTI_TCP_STORE_OPTIONS_INIT;
    options.workers = -2;
    CHECK_STATUS(tutti_store_open_tcp("localhost", 1, &options, &store), TUTTI_ERROR_ARGUMENT);
    options = (tutti_tcp_store_options)TUTTI_TCP_STORE_OPTIONS_INIT;
    options.secret = "short";
    options.secret_bytes = 5;
    CHECK_STATUS(tutti_store_open_tcp("localhost", 1, &options, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("16 to 64");
    options.size = 0;
    CHECK_STATUS(tutti_store_open_tcp("localhost", 1, &options, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("size");
}

TEST(urls_open_what_they_say) {
    tutti_store *server = open_server("127.0.0.1"), *store;
    char url[128];
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", tutti_store_port(server));
    CHECK_TEXT(tutti_store_address(server), url);
    CHECK_OK(tutti_store_open_url(url, NULL, &store));
    CHECK_EQ(tutti_store_port(store), tutti_store_port(server));
    tutti_store_release(store);
    tutti_store_release(server);
    snprintf(url, sizeof url, "file:///tmp/tutti-test-url-%d", (int)getpid());
    CHECK_OK(tutti_store_open_url(url, NULL, &store));
    CHECK_TEXT(tutti_store_kind(store), "file");
    tutti_store_release(store);
    CHECK_EQ(unlink(url + 7), 0);
    CHECK_STATUS(tutti_store_open_url("tcp://host", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("port number missing");
    CHECK_STATUS(tutti_store_open_url("tcp://[::1]", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("port number missing");
    CHECK_STATUS(tutti_store_open_url("tcp://host:70000", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_url("tcp://host:1x", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_store_open_url("file://relative", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("path missing");
    CHECK_STATUS(tutti_store_open_url("http://host:1", NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("No rendezvous handler");
    CHECK_STATUS(tutti_store_open_url(NULL, NULL, &store), TUTTI_ERROR_ARGUMENT);
}

TEST(ipv6_works_where_there_is_ipv6) {
    int probe = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    bool there = probe >= 0 && bind(probe, (struct sockaddr *)&address, sizeof address) == 0;
    close(probe);
    if (!there)
        SKIP("no IPv6 on this host");
    tutti_store *server = open_server("::1"), *store;
    CHECK(strncmp(tutti_store_address(server), "tcp://[::1]:", 12) == 0);
    CHECK_OK(tutti_store_open_url(tutti_store_address(server), NULL, &store));
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    tutti_store_release(store);
    tutti_store_release(server);
    server = open_server("localhost"); /* both families */
    CHECK_OK(tutti_store_open_tcp("::1", tutti_store_port(server), NULL, &store));
    tutti_store_release(store);
    CHECK_OK(tutti_store_open_tcp("127.0.0.1", tutti_store_port(server), NULL, &store));
    tutti_store_release(store);
    tutti_store_release(server);
}

TEST(a_listening_socket_can_be_handed_over) {
    int port, listening = raw_listen(&port);
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    options.listen_fd = listening;
    CHECK_STATUS(tutti_store_open_tcp("localhost", port == 1 ? 2 : 1, &options, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("not on the port asked for");
    CHECK_OK(tutti_store_open_tcp("localhost", port, &options, &store)); /* the failure left the socket ours */
    CHECK_EQ(tutti_store_port(store), port);
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    tutti_store_release(store);
    int not_listening = socket(AF_INET, SOCK_STREAM, 0);
    options.listen_fd = not_listening;
    CHECK_STATUS(tutti_store_open_tcp("localhost", 0, &options, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("not a listening socket");
    close(not_listening);
}

TEST(a_server_alone_has_no_operations_but_clones_into_a_client) {
    tutti_store *server, *client;
    void *value;
    CHECK_OK(tutti_store_serve("localhost", 0, NULL, &server));
    CHECK_STATUS(tutti_store_get(server, "k", 0, &value, NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_OK(tutti_store_clone(server, &client));
    tutti_store_release(server); /* the clone keeps it alive */
    CHECK_OK(tutti_store_set(client, "k", "v", 1));
    CHECK_OK(tutti_store_get(client, "k", 0, &value, NULL));
    tutti_free(value);
    tutti_store_release(client);
}

static void *wait_for_k(void *store) {
    CHECK_OK(tutti_store_wait(store, (const char *[]){ "k" }, 1, 0));
    return NULL;
}

TEST(two_threads_on_one_handle_take_turns_and_keep_their_deadlines) {
    tutti_store *store = open_server("localhost"), *other;
    pthread_t thread;
    CHECK_OK(tutti_store_clone(store, &other));
    CHECK_EQ(pthread_create(&thread, NULL, wait_for_k, store), 0);
    do /* until it waits, and holds the handle */
        CHECK_STATUS(tutti_store_wait(store, (const char *[]){ "m" }, 1, MILLISECONDS(20)), TUTTI_ERROR_TIMEOUT);
    while (strstr(tutti_error_message(), "another thread") == NULL);
    CHECK_OK(tutti_store_set(other, "k", "", 0));
    CHECK_OK(tutti_store_set(store, "m", "", 0)); /* after the other's turn */
    pthread_join(thread, NULL);
    CHECK_OK(tutti_store_wait(store, (const char *[]){ "k", "m" }, 2, 0));
    tutti_store_release(other);
    tutti_store_release(store);
}

TEST(a_value_beyond_the_limit_is_refused_before_it_is_sent) {
    tutti_store *store = open_server("localhost");
    char *large = malloc((8 << 20) + 1);
    memset(large, 'x', (8 << 20) + 1);
    CHECK_STATUS(tutti_store_set(store, "k", large, (8 << 20) + 1), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("8388608");
    CHECK_STATUS(tutti_store_append(store, "k", large, (8 << 20) + 1), TUTTI_ERROR_RANGE);
    CHECK_OK(tutti_store_set(store, "k", large, 8 << 20));
    CHECK_OK(tutti_store_append(store, "k", large, 8 << 20)); /* a value may grow beyond it */
    void *value;
    size_t bytes;
    CHECK_OK(tutti_store_get(store, "k", 0, &value, &bytes));
    CHECK_EQ(bytes, 16 << 20);
    tutti_free(value);
    free(large);
    tutti_store_release(store);
}

/* ---- Unix sockets ---- */

TEST(a_socket_file_is_private_and_goes_with_its_server) {
    char host[128];
    const char *path = host + 5;
    struct stat info;
    snprintf(host, sizeof host, "unix:/tmp/tutti-test-socket-%d", (int)getpid());
    tutti_store *store = open_server(host), *other;
    CHECK_TEXT(tutti_store_address(store), host);
    CHECK_EQ(tutti_store_port(store), -1);
    CHECK_EQ(stat(path, &info), 0);
    CHECK_EQ(info.st_mode & 0777, 0600);
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    CHECK_STATUS(tutti_store_open_tcp(host, 0, &options, &other), TUTTI_ERROR_NETWORK); /* taken */
    tutti_store_release(store);
    CHECK(stat(path, &info) != 0);
    /* One that a killed server left is replaced. */
    int stale = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strcpy(address.sun_path, path);
    CHECK_EQ(bind(stale, (struct sockaddr *)&address, sizeof address), 0);
    close(stale);
    store = open_server(host);
    tutti_store_release(store);
}

static char others_socket[64];

static void connect_as_other(void) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.timeout_ns = MILLISECONDS(60000);
    CHECK_STATUS(tutti_store_open_tcp(others_socket, 0, &options, &store), TUTTI_ERROR_REFUSED);
    CHECK_MESSAGE("belongs to user 0, and this is user 65534");
    /* And who ignores whose it is gets no service. */
    int raw = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    memcpy(address.sun_path + 1, others_socket + 6, strlen(others_socket + 6));
    CHECK_EQ(
        connect(raw, (struct sockaddr *)&address, (socklen_t)(sizeof(sa_family_t) + 1 + strlen(others_socket + 6))), 0);
    raw_expect_closed(raw);
}

TEST(a_unix_socket_serves_only_its_own_user) {
    if (geteuid() != 0)
        SKIP("only root can become somebody else");
    snprintf(others_socket, sizeof others_socket, "unix:@tutti-test-others-%d", (int)getpid());
    tutti_store *store = open_server(others_socket);
    test_as_ordinary_user(connect_as_other);
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    tutti_store_release(store);
}

/* ---- signals ---- */

static void nothing(int signal) {
    (void)signal;
}

/* A hundred signals a second interrupt every system call; the deadline holds all the same. The limit of the test is
 * what an endless wait would run into. */
TEST_LIMIT(signals_do_not_put_off_a_deadline, 40) {
    tutti_store *server = open_server("127.0.0.1"), *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    CHECK_OK(tutti_store_open_tcp("127.0.0.1", tutti_store_port(server), &options, &store));
    struct sigaction action = { .sa_handler = nothing };
    struct itimerval often = { { 0, 10000 }, { 0, 10000 } }, never = { { 0, 0 }, { 0, 0 } };
    CHECK_EQ(sigaction(SIGALRM, &action, NULL), 0);
    CHECK_EQ(setitimer(ITIMER_REAL, &often, NULL), 0);
    void *value;
    size_t bytes;
    CHECK_STATUS(tutti_store_get(store, "never", MILLISECONDS(3000), &value, &bytes), TUTTI_ERROR_TIMEOUT);
    CHECK_EQ(setitimer(ITIMER_REAL, &never, NULL), 0);
    CHECK_OK(tutti_store_set(store, "k", "", 0));
    tutti_store_release(store);
    tutti_store_release(server);
}

TEST(a_wait_until_an_event_is_for_the_store_of_a_world) {
    tutti_store *store;
    void *value;
    size_t bytes;
    CHECK_OK(tutti_store_open_memory(&store));
    CHECK_STATUS(tutti_store_get(store, "never", TUTTI_UNTIL_EVENT, &value, &bytes), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("tutti_world_store");
    tutti_store_release(store);
}

/* ---- what lies where a socket should ---- */

TEST(serving_on_a_path_removes_a_stale_socket_and_nothing_else) {
    char folder[] = "/tmp/tutti-test-XXXXXX", path[64], url[80];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/precious", folder);
    snprintf(url, sizeof url, "unix:%s", path);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs("data", file) >= 0 && fclose(file) == 0);
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    CHECK(tutti_store_serve(url, 0, &options, &store) != TUTTI_OK);
    CHECK_MESSAGE("is no socket");
    struct stat status;
    CHECK_EQ(stat(path, &status), 0);
    CHECK(S_ISREG(status.st_mode));
    CHECK_EQ(status.st_size, 4);
    CHECK_EQ(unlink(path), 0);
    /* A socket that a killed server left. */
    int stale = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    CHECK_EQ(bind(stale, (struct sockaddr *)&address, sizeof address), 0);
    close(stale);
    CHECK_OK(tutti_store_serve(url, 0, &options, &store));
    tutti_store_release(store);
    CHECK_EQ(rmdir(folder), 0);
}
