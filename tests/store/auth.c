/* SPDX-License-Identifier: Apache-2.0
 *
 * Who is let in: secrets, proofs, and addresses that strangers can reach.
 */
#include <sys/wait.h>

#include "raw.h"
#include "store/auth.h"
#include "store/wire.h"

static const char secret[] = "a secret of this job, 32 bytes!!";
static const char wrong[] = "a secret of that job, 32 bytes!!";
#define SECRET_BYTES (sizeof secret - 1)

static void need_proofs(void) {
    if (!tu_auth_available())
        SKIP("this build has no libsodium");
}

static tutti_store *open_guarded(const char *host) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    options.secret = secret;
    options.secret_bytes = SECRET_BYTES;
    CHECK_OK(tutti_store_open_tcp(host, 0, &options, &store));
    return store;
}

static tutti_status join(const char *url, const char *with, tutti_store **store) {
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.secret = with;
    options.secret_bytes = with != NULL ? SECRET_BYTES : 0;
    options.timeout_ns = MILLISECONDS(10000);
    return tutti_store_open_url(url, &options, store);
}

static void check_guard(const char *host) {
    tutti_store *server = open_guarded(host), *store, *clone;
    CHECK_OK(join(tutti_store_address(server), secret, &store));
    CHECK_OK(tutti_store_set(store, "k", "v", 1));
    CHECK_OK(tutti_store_clone(store, &clone));
    tutti_store_release(clone);
    tutti_store_release(store);
    CHECK_STATUS(join(tutti_store_address(server), wrong, &store), TUTTI_ERROR_REFUSED);
    CHECK_MESSAGE("secret");
    CHECK_STATUS(join(tutti_store_address(server), NULL, &store), TUTTI_ERROR_REFUSED);
    CHECK_MESSAGE("serves only clients that prove the job's secret");
    tutti_store_release(server);
}

TEST(with_a_secret_only_clients_that_prove_it_are_served) {
    need_proofs();
    check_guard("localhost");
}

TEST(with_a_secret_a_unix_socket_wants_it_too) {
    need_proofs();
    char host[64];
    snprintf(host, sizeof host, "unix:@tutti-test-auth-%d", (int)getpid());
    check_guard(host);
}

TEST(a_server_without_a_secret_cannot_satisfy_a_client_that_wants_one) {
    need_proofs();
    tutti_store *server = open_server("localhost"), *store;
    CHECK_STATUS(join(tutti_store_address(server), secret, &store), TUTTI_ERROR_REFUSED);
    CHECK_MESSAGE("has no secret");
    tutti_store_release(server);
}

/* ---- the handshake by hand ---- */

static int say_hello(int port, uint32_t version, const uint8_t nonce[TU_AUTH_BYTES]) {
    uint8_t hello[9 + TU_AUTH_BYTES] = { TU_COMMAND_HELLO };
    int raw = raw_connect(port);
    memcpy(hello + 1, &(uint32_t){ TU_HELLO_MAGIC }, 4);
    memcpy(hello + 5, &version, 4);
    memcpy(hello + 9, nonce, TU_AUTH_BYTES);
    raw_send(raw, hello, sizeof hello);
    return raw;
}

typedef struct challenge {
    uint32_t magic;
    uint8_t nonce[TU_AUTH_BYTES], proof[TU_AUTH_BYTES];
} challenge;

static void send_proof(int raw, const uint8_t proof[TU_AUTH_BYTES]) {
    uint8_t message[1 + TU_AUTH_BYTES] = { TU_COMMAND_PROOF };
    memcpy(message + 1, proof, TU_AUTH_BYTES);
    raw_send(raw, message, sizeof message);
    raw_send(raw, BYTES(VALIDATE));
}

static void expect_refusal(int raw, const char *fragment) {
    uint32_t magic;
    uint64_t length;
    char words[TU_REFUSAL_LIMIT + 1] = "";
    raw_receive(raw, &magic, sizeof magic);
    CHECK_EQ(magic, TU_REFUSAL_MAGIC);
    raw_receive(raw, &length, sizeof length);
    CHECK(length <= TU_REFUSAL_LIMIT);
    raw_receive(raw, words, length);
    if (strstr(words, fragment) == NULL)
        FAIL("\"%s\" does not contain \"%s\"", words, fragment);
    close(raw);
}

static tu_secret the_secret(void) {
    tu_secret copy;
    CHECK_OK(tu_secret_set(&copy, secret, SECRET_BYTES));
    return copy;
}

TEST(both_sides_prove_the_secret_with_nonces_of_both) {
    need_proofs();
    tutti_store *server = open_guarded("localhost");
    tu_secret key = the_secret();
    uint8_t nonce[TU_AUTH_BYTES] = "mine", proof[TU_AUTH_BYTES];
    challenge challenge;
    int raw = say_hello(tutti_store_port(server), TU_HANDSHAKE_VERSION, nonce);
    raw_receive(raw, &challenge, sizeof challenge);
    CHECK_EQ(challenge.magic, TU_HELLO_MAGIC);
    CHECK_OK(tu_auth_proof(&key, TU_AUTH_SERVER, nonce, challenge.nonce, proof));
    CHECK(tu_auth_equal(proof, challenge.proof));
    CHECK_OK(tu_auth_proof(&key, TU_AUTH_CLIENT, nonce, challenge.nonce, proof));
    send_proof(raw, proof);
    raw_expect_alive(raw);
    close(raw);
    tutti_store_release(server);
}

TEST(a_replayed_handshake_is_refused) {
    need_proofs();
    tutti_store *server = open_guarded("localhost");
    tu_secret key = the_secret();
    uint8_t nonce[TU_AUTH_BYTES] = "mine", proof[TU_AUTH_BYTES];
    challenge first, second;
    int raw = say_hello(tutti_store_port(server), TU_HANDSHAKE_VERSION, nonce);
    raw_receive(raw, &first, sizeof first);
    CHECK_OK(tu_auth_proof(&key, TU_AUTH_CLIENT, nonce, first.nonce, proof));
    send_proof(raw, proof);
    raw_expect_alive(raw);
    close(raw);
    raw = say_hello(tutti_store_port(server), TU_HANDSHAKE_VERSION, nonce); /* the same bytes again */
    raw_receive(raw, &second, sizeof second);
    CHECK(memcmp(first.nonce, second.nonce, TU_AUTH_BYTES) != 0);
    send_proof(raw, proof);
    expect_refusal(raw, "proof");
    tutti_store_release(server);
}

TEST(the_servers_own_proof_thrown_back_is_refused) {
    need_proofs();
    tutti_store *server = open_guarded("localhost");
    uint8_t nonce[TU_AUTH_BYTES] = "mine";
    challenge challenge;
    int raw = say_hello(tutti_store_port(server), TU_HANDSHAKE_VERSION, nonce);
    raw_receive(raw, &challenge, sizeof challenge);
    send_proof(raw, challenge.proof);
    expect_refusal(raw, "proof");
    tutti_store_release(server);
}

TEST(another_version_of_the_handshake_is_told_both_versions) {
    need_proofs();
    tutti_store *server = open_guarded("localhost");
    uint8_t nonce[TU_AUTH_BYTES] = "mine";
    expect_refusal(say_hello(tutti_store_port(server), 7, nonce), "version 7");
    tutti_store_release(server);
}

TEST(who_skips_the_proof_is_closed_out) {
    need_proofs();
    tutti_store *server = open_guarded("localhost");
    uint8_t nonce[TU_AUTH_BYTES] = "mine";
    challenge challenge;
    int raw = say_hello(tutti_store_port(server), TU_HANDSHAKE_VERSION, nonce);
    raw_receive(raw, &challenge, sizeof challenge);
    raw_send(raw, BYTES(VALIDATE "\x07"));
    raw_expect_closed(raw);
    raw = raw_connect(tutti_store_port(server)); /* a client that knows no secrets at all */
    raw_send(raw, BYTES(VALIDATE "\x0d\x01\0\0\0\x07"));
    expect_refusal(raw, "secret");
    CHECK_OK(tutti_store_set(server, "k", "", 0));
    tutti_store_release(server);
}

TEST(a_client_refuses_a_server_that_cannot_prove_the_secret) {
    need_proofs();
    int port, listening = raw_listen(&port);
    fflush(NULL);
    tutti_store *store;
    char url[64];
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    pid_t child = fork();
    if (child == 0) { /* answers with a nonce and a proof of its own making */
        challenge challenge = { .magic = TU_HELLO_MAGIC };
        char hello[9 + TU_AUTH_BYTES], more;
        int raw = accept(listening, NULL, NULL);
        raw_receive(raw, hello, sizeof hello);
        raw_send(raw, &challenge, sizeof challenge);
        _exit(recv(raw, &more, 1, 0) == 0 ? 0 : 1); /* and learns nothing */
    }
    CHECK_STATUS(join(url, secret, &store), TUTTI_ERROR_REFUSED);
    CHECK_MESSAGE("does not know this job's secret");
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(listening);
}

/* ---- addresses ---- */

TEST(a_server_that_strangers_can_reach_needs_a_secret_or_trust) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    const char *open_hosts[] = { "", "0.0.0.0", "::", "192.0.2.1" };
    for (size_t i = 0; i < sizeof open_hosts / sizeof *open_hosts; i++) {
        CHECK_STATUS(tutti_store_open_tcp(open_hosts[i], 0, &options, &store), TUTTI_ERROR_REFUSED);
        CHECK_MESSAGE("trust_network");
    }
    options.trust_network = true;
    for (size_t i = 0; i < sizeof open_hosts / sizeof *open_hosts; i++) {
        if (strcmp(open_hosts[i], "::") == 0)
            continue; /* there may be no IPv6 */
        CHECK_OK(tutti_store_open_tcp(open_hosts[i], 0, &options, &store));
        CHECK_OK(tutti_store_set(store, "k", "v", 1));
        int raw = raw_client(tutti_store_port(store)); /* as PyTorch's clients come */
        close(raw);
        tutti_store_release(store);
    }
    const char *closed_hosts[] = { "localhost", "127.0.0.1", "127.0.0.5" };
    options.trust_network = false;
    for (size_t i = 0; i < sizeof closed_hosts / sizeof *closed_hosts; i++) {
        CHECK_OK(tutti_store_open_tcp(closed_hosts[i], 0, &options, &store));
        tutti_store_release(store);
    }
}

TEST(a_secret_opens_an_address_to_other_hosts) {
    need_proofs();
    tutti_store *server = open_guarded(""), *store;
    char url[64];
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", tutti_store_port(server));
    CHECK_OK(join(url, secret, &store));
    tutti_store_release(store);
    tutti_store_release(server);
}

TEST(without_libsodium_a_secret_over_tcp_is_unsupported_and_a_unix_socket_works) {
    if (tu_auth_available())
        SKIP("this build has libsodium");
    tutti_store *store, *client;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    options.secret = secret;
    options.secret_bytes = SECRET_BYTES;
    CHECK_STATUS(tutti_store_open_tcp("localhost", 0, &options, &store), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("libsodium");
    char host[64];
    snprintf(host, sizeof host, "unix:@tutti-test-auth-%d", (int)getpid());
    CHECK_OK(tutti_store_open_tcp(host, 0, &options, &store));
    CHECK_OK(join(host, secret, &client));
    tutti_store_release(client);
    tutti_store_release(store);
}
