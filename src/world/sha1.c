/* SPDX-License-Identifier: Apache-2.0
 *
 * SHA-1 as FIPS 180-4 describes it.
 */
#include "world/sha1.h"

#include <stdio.h>
#include <string.h>

static uint32_t rotate(uint32_t word, int bits) {
    return word << bits | word >> (32 - bits);
}

static void block(uint32_t state[5], const uint8_t *data) {
    uint32_t schedule[80];
    for (int i = 0; i < 16; i++)
        schedule[i] = (uint32_t)data[4 * i] << 24 | (uint32_t)data[4 * i + 1] << 16 | (uint32_t)data[4 * i + 2] << 8 |
                      data[4 * i + 3];
    for (int i = 16; i < 80; i++)
        schedule[i] = rotate(schedule[i - 3] ^ schedule[i - 8] ^ schedule[i - 14] ^ schedule[i - 16], 1);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    for (int i = 0; i < 80; i++) {
        uint32_t mix, constant;
        if (i < 20) {
            mix = (b & c) | (~b & d);
            constant = 0x5a827999;
        } else if (i < 40) {
            mix = b ^ c ^ d;
            constant = 0x6ed9eba1;
        } else if (i < 60) {
            mix = (b & c) | (b & d) | (c & d);
            constant = 0x8f1bbcdc;
        } else {
            mix = b ^ c ^ d;
            constant = 0xca62c1d6;
        }
        uint32_t next = rotate(a, 5) + mix + e + constant + schedule[i];
        e = d;
        d = c;
        c = rotate(b, 30);
        b = a;
        a = next;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
}

void tu_sha1(const void *data, size_t bytes, uint8_t digest[20]) {
    uint32_t state[5] = { 0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0 };
    const uint8_t *from = data;
    size_t left = bytes;
    for (; left >= 64; left -= 64, from += 64)
        block(state, from);
    uint8_t last[128] = { 0 };
    memcpy(last, from, left);
    last[left] = 0x80;
    size_t end = left < 56 ? 64 : 128;
    uint64_t bits = (uint64_t)bytes * 8;
    for (int i = 0; i < 8; i++)
        last[end - 1 - (size_t)i] = (uint8_t)(bits >> (8 * i));
    for (size_t at = 0; at < end; at += 64)
        block(state, last + at);
    for (int i = 0; i < 20; i++)
        digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

void tu_sha1_text(const void *data, size_t bytes, char text[41]) {
    uint8_t digest[20];
    tu_sha1(data, bytes, digest);
    for (int i = 0; i < 20; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
}
