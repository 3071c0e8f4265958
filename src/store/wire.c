/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding the end of a command, with the limits, and writing into a buffer.
 */
#include "store/wire.h"

#include <stdlib.h>

#include "store/auth.h"

/* The arguments of each command: u 4 bytes, i 8 bytes, k a key, b a value, K a count and keys, P a count and pairs of
 * key and value, n a nonce or proof. NULL: no such command. */
static const char *arguments_of(uint8_t command) {
    static const char *const arguments[] = {
        [TU_COMMAND_VALIDATE] = "u",   [TU_COMMAND_SET] = "kb",         [TU_COMMAND_COMPARE_SET] = "kbb",
        [TU_COMMAND_GET] = "k",        [TU_COMMAND_ADD] = "ki",         [TU_COMMAND_CHECK] = "K",
        [TU_COMMAND_WAIT] = "K",       [TU_COMMAND_NUM_KEYS] = "",      [TU_COMMAND_DELETE] = "k",
        [TU_COMMAND_APPEND] = "kb",    [TU_COMMAND_MULTI_GET] = "K",    [TU_COMMAND_MULTI_SET] = "P",
        [TU_COMMAND_CANCEL_WAIT] = "", [TU_COMMAND_PING] = "u",         [TU_COMMAND_QUEUE_PUSH] = "kb",
        [TU_COMMAND_QUEUE_POP] = "k",  [TU_COMMAND_QUEUE_LENGTH] = "k", [TU_COMMAND_LIST_KEYS] = "",
        [TU_COMMAND_BARRIER] = "ki",   [TU_COMMAND_HELLO] = "uun",      [TU_COMMAND_PROOF] = "n",
    };
    return command < sizeof arguments / sizeof arguments[0] ? arguments[command] : NULL;
}

static tu_scan_result bad(tu_scan *scan, const char *why, uint64_t number) {
    scan->why = why;
    scan->number = number;
    return TU_SCAN_BAD;
}

static tu_scan_result pass(size_t bytes, tu_scan *scan, size_t length) {
    if (bytes - scan->at < length)
        return TU_SCAN_MORE;
    scan->at += length;
    return TU_SCAN_WHOLE;
}

static tu_scan_result pass_text(const uint8_t *data, size_t bytes, tu_scan *scan, bool is_key) {
    if (bytes - scan->at < sizeof(uint64_t))
        return TU_SCAN_MORE;
    const uint8_t *at = data + scan->at;
    uint64_t length = tu_read_u64(&at);
    if (length > (is_key ? TU_KEY_LIMIT : TU_VALUE_LIMIT))
        return bad(scan, is_key ? "a key is too long" : "a value is too long", length);
    return pass(bytes, scan, sizeof(uint64_t) + (size_t)length);
}

static tu_scan_result pass_list(const uint8_t *data, size_t bytes, tu_scan *scan, bool pairs) {
    if (!scan->counted) {
        if (bytes - scan->at < sizeof(uint64_t))
            return TU_SCAN_MORE;
        const uint8_t *at = data + scan->at;
        uint64_t count = tu_read_u64(&at);
        if (count > TU_KEYS_LIMIT)
            return bad(scan, "there are too many keys in one command", count);
        scan->at += sizeof(uint64_t);
        scan->counted = true;
        scan->left = pairs ? 2 * count : count;
    }
    for (; scan->left > 0; scan->left--) {
        tu_scan_result result = pass_text(data, bytes, scan, !pairs || scan->left % 2 == 0);
        if (result != TU_SCAN_WHOLE)
            return result;
        if (scan->at > TU_FRAME_LIMIT)
            return bad(scan, "a command is too long", scan->at);
    }
    scan->counted = false;
    return TU_SCAN_WHOLE;
}

static tu_scan_result pass_argument(const uint8_t *data, size_t bytes, tu_scan *scan, char argument) {
    switch (argument) {
    case 'u':
        return pass(bytes, scan, sizeof(uint32_t));
    case 'i':
        return pass(bytes, scan, sizeof(uint64_t));
    case 'n':
        return pass(bytes, scan, TU_AUTH_BYTES);
    case 'K':
    case 'P':
        return pass_list(data, bytes, scan, argument == 'P');
    default:
        return pass_text(data, bytes, scan, argument == 'k');
    }
}

tu_scan_result tu_frame_scan(const uint8_t *data, size_t bytes, tu_scan *scan) {
    if (bytes == 0)
        return TU_SCAN_MORE;
    const char *arguments = arguments_of(data[0]);
    if (arguments == NULL)
        return bad(scan, "there is no such command", data[0]);
    if (scan->at == 0)
        scan->at = 1;
    for (; arguments[scan->step] != 0; scan->step++) {
        tu_scan_result result = pass_argument(data, bytes, scan, arguments[scan->step]);
        if (result != TU_SCAN_WHOLE)
            return result;
    }
    return TU_SCAN_WHOLE;
}

/* ---- writing ---- */

enum {
    SMALL_BUFFER = 256,
    KEPT_BUFFER = 64 << 10
};

uint8_t *tu_buffer_room(tu_buffer *buffer, size_t bytes) {
    if (buffer->failed)
        return NULL;
    if (buffer->capacity - buffer->used < bytes) {
        size_t wanted = buffer->capacity > 0 ? buffer->capacity * 2 : SMALL_BUFFER;
        if (wanted - buffer->used < bytes)
            wanted = buffer->used + bytes;
        uint8_t *wider = realloc(buffer->data, wanted);
        if (wider == NULL) {
            buffer->failed = true;
            return NULL;
        }
        buffer->data = wider;
        buffer->capacity = wanted;
    }
    return buffer->data + buffer->used;
}

void tu_put(tu_buffer *buffer, const void *data, size_t bytes) {
    uint8_t *room = bytes > 0 ? tu_buffer_room(buffer, bytes) : NULL;
    if (room == NULL)
        return;
    memcpy(room, data, bytes);
    buffer->used += bytes;
}

void tu_put_u8(tu_buffer *buffer, uint8_t number) {
    tu_put(buffer, &number, sizeof number);
}

void tu_put_u32(tu_buffer *buffer, uint32_t number) {
    tu_put(buffer, &number, sizeof number);
}

void tu_put_u64(tu_buffer *buffer, uint64_t number) {
    tu_put(buffer, &number, sizeof number);
}

void tu_put_text(tu_buffer *buffer, const void *data, size_t bytes) {
    tu_put_u64(buffer, bytes);
    tu_put(buffer, data, bytes);
}

void tu_put_key(tu_buffer *buffer, const char *key) {
    size_t bytes = strlen(key);
    tu_put_u64(buffer, bytes + 1);
    tu_put_u8(buffer, '/');
    tu_put(buffer, key, bytes);
}

void tu_buffer_reset(tu_buffer *buffer) {
    buffer->used = 0;
    buffer->failed = false;
    if (buffer->capacity > KEPT_BUFFER)
        tu_buffer_free(buffer);
}

void tu_buffer_free(tu_buffer *buffer) {
    free(buffer->data);
    *buffer = (tu_buffer){ 0 };
}
