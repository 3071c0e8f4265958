/* SPDX-License-Identifier: Apache-2.0
 *
 * The wire format of tcp stores: PyTorch's TCPStore protocol, and one handshake of our own in front of it. Numbers are
 * in host byte order. A command is one byte and its arguments; a text is a uint64 length and its bytes; every key of a
 * user has a "/" in front.
 *
 * Everything that comes from outside passes tu_frame_scan first: only a command that is complete and within the limits
 * is looked at further.
 */
#ifndef TU_STORE_WIRE_H
#define TU_STORE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum tu_command {
    TU_COMMAND_VALIDATE = 0,
    TU_COMMAND_SET = 1,
    TU_COMMAND_COMPARE_SET = 2,
    TU_COMMAND_GET = 3,
    TU_COMMAND_ADD = 4,
    TU_COMMAND_CHECK = 5,
    TU_COMMAND_WAIT = 6,
    TU_COMMAND_NUM_KEYS = 7,
    TU_COMMAND_DELETE = 8,
    TU_COMMAND_APPEND = 9,
    TU_COMMAND_MULTI_GET = 10,
    TU_COMMAND_MULTI_SET = 11,
    TU_COMMAND_CANCEL_WAIT = 12,
    TU_COMMAND_PING = 13,
    TU_COMMAND_QUEUE_PUSH = 14,
    TU_COMMAND_QUEUE_POP = 15,
    TU_COMMAND_QUEUE_LENGTH = 16,
    TU_COMMAND_LIST_KEYS = 17,
    TU_COMMAND_BARRIER = 18,
    TU_COMMAND_HELLO = 128, /* ours: magic, version, nonce */
    TU_COMMAND_PROOF = 129  /* ours: what proves the secret */
} tu_command;

#define TU_VALIDATE_MAGIC UINT32_C(0x3C85F7CE)
#define TU_HELLO_MAGIC UINT32_C(0x49545554)   /* "TUTI": begins a hello and the server's answer to it */
#define TU_REFUSAL_MAGIC UINT32_C(0x4f4e5554) /* "TUNO": begins a refusal: then a text */
#define TU_HANDSHAKE_VERSION UINT32_C(1)

#define TU_KEY_LIMIT 8192
#define TU_VALUE_LIMIT (8u << 20)
#define TU_KEYS_LIMIT 131072
#define TU_FRAME_LIMIT (UINT64_C(2) << 30)     /* a command with all its keys and values, and a reply */
#define TU_REPEATED_LIMIT (UINT64_C(16) << 20) /* a reply that holds one value more than once */
#define TU_REFUSAL_LIMIT 1024                  /* the words of a refusal */

/* ---- finding the end of a command ---- */

typedef enum tu_scan_result {
    TU_SCAN_MORE,
    TU_SCAN_WHOLE,
    TU_SCAN_BAD
} tu_scan_result;

/* All zero at the start of a command; goes on where it stopped when more bytes have come. */
typedef struct tu_scan {
    size_t at;       /* bytes that are known to be good; the length when WHOLE */
    unsigned step;   /* arguments passed */
    bool counted;    /* the count of a list has been read … */
    uint64_t left;   /* … and so many of its texts are still to come */
    const char *why; /* when BAD */
    uint64_t number; /* the number that is too large, or the command that is unknown */
} tu_scan;

tu_scan_result tu_frame_scan(const uint8_t *data, size_t bytes, tu_scan *scan);

/* ---- reading a whole command: no checks, the scan has made them ---- */

typedef struct tu_text {
    const uint8_t *data;
    size_t bytes;
} tu_text;

static inline uint32_t tu_read_u32(const uint8_t **at) {
    uint32_t number;
    memcpy(&number, *at, sizeof number);
    *at += sizeof number;
    return number;
}

static inline uint64_t tu_read_u64(const uint8_t **at) {
    uint64_t number;
    memcpy(&number, *at, sizeof number);
    *at += sizeof number;
    return number;
}

static inline tu_text tu_read_text(const uint8_t **at) {
    tu_text text;
    text.bytes = (size_t)tu_read_u64(at);
    text.data = *at;
    *at += text.bytes;
    return text;
}

/* ---- writing ---- */

/* Bytes to send. Running out of memory sets `failed` and drops what follows: one look at the end is enough. */
typedef struct tu_buffer {
    uint8_t *data;
    size_t used, capacity;
    bool failed;
} tu_buffer;

/* Room for `bytes` more; NULL sets `failed`. The caller adds to `used` itself. */
uint8_t *tu_buffer_room(tu_buffer *buffer, size_t bytes);
void tu_put(tu_buffer *buffer, const void *data, size_t bytes);
void tu_put_u8(tu_buffer *buffer, uint8_t number);
void tu_put_u32(tu_buffer *buffer, uint32_t number);
void tu_put_u64(tu_buffer *buffer, uint64_t number);
void tu_put_text(tu_buffer *buffer, const void *data, size_t bytes);
/* A user's key: with the slash. */
void tu_put_key(tu_buffer *buffer, const char *key);
/* Empties it, and gives memory back when it was a lot. */
void tu_buffer_reset(tu_buffer *buffer);
void tu_buffer_free(tu_buffer *buffer);

#endif
