/* SPDX-License-Identifier: Apache-2.0
 *
 * The handshake's arithmetic; see auth.h for what it promises.
 */
#include "store/auth.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#if TUTTI_HAVE_SODIUM
#include <sodium.h>
#endif

#include "base/error.h"

tutti_status tu_secret_set(tu_secret *secret, const void *data, size_t bytes) {
    secret->bytes = 0;
    if (data == NULL && bytes == 0)
        return TUTTI_OK;
    if (data == NULL || bytes < TU_SECRET_MIN || bytes > TU_SECRET_MAX)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a store's secret has %d to %d bytes, not %zu", TU_SECRET_MIN,
                        TU_SECRET_MAX, data != NULL ? bytes : 0);
    memcpy(secret->data, data, bytes);
    secret->bytes = bytes;
    return TUTTI_OK;
}

void tu_secret_wipe(tu_secret *secret) {
    explicit_bzero(secret, sizeof *secret);
}

tutti_status tu_auth_nonce(uint8_t nonce[TU_AUTH_BYTES]) {
    for (size_t got = 0; got < TU_AUTH_BYTES;) {
        ssize_t bytes = getrandom(nonce + got, TU_AUTH_BYTES - got, 0);
        if (bytes < 0 && errno != EINTR)
            return tu_error_system(errno, "no random bytes for a handshake (getrandom)");
        if (bytes > 0)
            got += (size_t)bytes;
    }
    return TUTTI_OK;
}

#if TUTTI_HAVE_SODIUM

bool tu_auth_available(void) {
    return true;
}

tutti_status tu_auth_proof(const tu_secret *secret, tu_auth_role role, const uint8_t client_nonce[TU_AUTH_BYTES],
                           const uint8_t server_nonce[TU_AUTH_BYTES], uint8_t proof[TU_AUTH_BYTES]) {
    static const char roles[4][24] = { [TU_AUTH_SERVER] = "tutti store 1 server",
                                       [TU_AUTH_CLIENT] = "tutti store 1 client",
                                       [TU_AUTH_HUB] = "tutti agents 1 hub",
                                       [TU_AUTH_AGENT] = "tutti agents 1 agent" };
    crypto_generichash_state state;
    if (sodium_init() < 0 || crypto_generichash_init(&state, secret->data, secret->bytes, TU_AUTH_BYTES) != 0 ||
        crypto_generichash_update(&state, (const uint8_t *)roles[role], sizeof roles[role]) != 0 ||
        crypto_generichash_update(&state, client_nonce, TU_AUTH_BYTES) != 0 ||
        crypto_generichash_update(&state, server_nonce, TU_AUTH_BYTES) != 0 ||
        crypto_generichash_final(&state, proof, TU_AUTH_BYTES) != 0)
        return tu_error(TUTTI_ERROR_SYSTEM, "libsodium could not be used to prove the secret");
    return TUTTI_OK;
}

bool tu_auth_equal(const uint8_t left[TU_AUTH_BYTES], const uint8_t right[TU_AUTH_BYTES]) {
    return sodium_memcmp(left, right, TU_AUTH_BYTES) == 0;
}

#else

bool tu_auth_available(void) {
    return false;
}

tutti_status tu_auth_proof(const tu_secret *secret, tu_auth_role role, const uint8_t client_nonce[TU_AUTH_BYTES],
                           const uint8_t server_nonce[TU_AUTH_BYTES], uint8_t proof[TU_AUTH_BYTES]) {
    (void)secret, (void)role, (void)client_nonce, (void)server_nonce, (void)proof;
    return tu_error(TUTTI_ERROR_UNSUPPORTED, "this build of Tutti has no libsodium, so it cannot prove a secret; "
                                             "use a Unix socket on one host, or build again with libsodium-dev and "
                                             "pkg-config installed");
}

bool tu_auth_equal(const uint8_t left[TU_AUTH_BYTES], const uint8_t right[TU_AUTH_BYTES]) {
    (void)left, (void)right;
    return false;
}

#endif
