/* SPDX-License-Identifier: Apache-2.0
 *
 * Proving the job's secret without showing it.
 *
 *     client                                          server
 *     HELLO: magic, version, client nonce      --->
 *                                              <---   magic, server nonce, proof("server", both nonces)
 *     checks it; PROOF: proof("client", both)  --->
 *     VALIDATE, PING …                                checks it; answers, or refuses in words
 *
 * A proof is a keyed BLAKE2b (libsodium) of the role and both nonces under the secret. Each side gives a fresh nonce,
 * so a recorded handshake is worth nothing; the role is part of what is hashed, so a proof cannot be thrown back at its
 * maker. What follows the handshake is neither encrypted nor signed: it keeps strangers out, it does not hide.
 *
 * Without libsodium there is no proof over TCP; a Unix socket asks the kernel who is at the other end instead.
 */
#ifndef TU_STORE_AUTH_H
#define TU_STORE_AUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>

#define TU_AUTH_BYTES 32
#define TU_SECRET_MIN 16
#define TU_SECRET_MAX 64

typedef struct tu_secret {
    size_t bytes; /* 0: none */
    uint8_t data[TU_SECRET_MAX];
} tu_secret;

typedef enum tu_auth_role {
    TU_AUTH_SERVER, /* of a store */
    TU_AUTH_CLIENT,
    TU_AUTH_HUB, /* of launchers (hosts/link.h) */
    TU_AUTH_AGENT
} tu_auth_role;

/* Copies the secret; its length must fit. `data` NULL: none. */
tutti_status tu_secret_set(tu_secret *secret, const void *data, size_t bytes);
void tu_secret_wipe(tu_secret *secret);

/* Whether this build can prove anything. */
bool tu_auth_available(void);
tutti_status tu_auth_nonce(uint8_t nonce[TU_AUTH_BYTES]);
tutti_status tu_auth_proof(const tu_secret *secret, tu_auth_role role, const uint8_t client_nonce[TU_AUTH_BYTES],
                           const uint8_t server_nonce[TU_AUTH_BYTES], uint8_t proof[TU_AUTH_BYTES]);
/* In the same time wherever they differ. */
bool tu_auth_equal(const uint8_t left[TU_AUTH_BYTES], const uint8_t right[TU_AUTH_BYTES]);

#endif
