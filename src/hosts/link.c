/* SPDX-License-Identifier: Apache-2.0
 *
 * Links between launchers; see link.h.
 */
#include "hosts/link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

static const uint8_t greeting[8] = "TUTTIAG1";
static const uint8_t mark[4] = "TAF1";

/* ---- frames ---- */

static void put_32(uint8_t *at, uint32_t value) {
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t get_32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

size_t tu_frame_write(const tu_frame *frame, uint8_t data[TU_FRAME_MOST]) {
    size_t text = strnlen(frame->text, TU_FRAME_TEXT - 1);
    const int32_t numbers[] = { frame->node, frame->rank, frame->pid, frame->status, frame->count };
    memcpy(data, mark, sizeof mark);
    put_32(data + 4, (uint32_t)frame->kind | (uint32_t)text << 16);
    for (int i = 0; i < 5; i++)
        put_32(data + 8 + 4 * i, (uint32_t)numbers[i]);
    put_32(data + 28, frame->flags);
    memcpy(data + TU_FRAME_HEAD, frame->text, text);
    return TU_FRAME_HEAD + text;
}

int tu_frame_read(const uint8_t *data, size_t bytes, tu_frame *frame) {
    if (memcmp(data, mark, bytes < sizeof mark ? bytes : sizeof mark) != 0)
        return -1;
    if (bytes < TU_FRAME_HEAD)
        return 0;
    uint32_t kind = get_32(data + 4) & 0xffff, text = get_32(data + 4) >> 16;
    if (kind == 0 || kind >= TU_FRAME_KINDS || text >= TU_FRAME_TEXT)
        return -1;
    if (bytes < TU_FRAME_HEAD + text)
        return 0;
    if (memchr(data + TU_FRAME_HEAD, 0, text) != NULL)
        return -1;
    int32_t numbers[5];
    for (int i = 0; i < 5; i++)
        numbers[i] = (int32_t)get_32(data + 8 + 4 * i);
    *frame = (tu_frame){ .kind = (tu_frame_kind)kind,
                         .node = numbers[0],
                         .rank = numbers[1],
                         .pid = numbers[2],
                         .status = numbers[3],
                         .count = numbers[4],
                         .flags = get_32(data + 28) };
    memcpy(frame->text, data + TU_FRAME_HEAD, text);
    return (int)(TU_FRAME_HEAD + text);
}

/* ---- links ---- */

static void broken(tu_link *link, const char *why) {
    if (link->state == TU_LINK_BROKEN)
        return;
    link->state = TU_LINK_BROKEN;
    snprintf(link->why, sizeof link->why, "%s", why);
}

static void append(tu_link *link, const uint8_t *data, size_t bytes) {
    if (link->state == TU_LINK_BROKEN)
        return;
    if (link->out_used + bytes > link->out_room) {
        size_t room = 2 * (link->out_used + bytes) + TU_FRAME_MOST;
        uint8_t *larger = room <= TU_LINK_OUT ? realloc(link->out, room) : NULL;
        if (larger == NULL) {
            broken(link, room <= TU_LINK_OUT ? "there is no memory for what it is to be told"
                                             : "it takes nothing of what it is told");
            return;
        }
        link->out = larger;
        link->out_room = room;
    }
    memcpy(link->out + link->out_used, data, bytes);
    link->out_used += bytes;
}

static uint8_t mode_of(const tu_link *link) {
    return link->secret->bytes > 0;
}

static void put_greeting(tu_link *link) {
    uint8_t mode = mode_of(link);
    append(link, greeting, sizeof greeting);
    append(link, &mode, 1);
    append(link, link->nonce, sizeof link->nonce);
}

/* This side's proof when `own`, else what the other's must be; zeros without a secret. */
static bool prove(tu_link *link, bool own, uint8_t proof[TU_AUTH_BYTES]) {
    memset(proof, 0, TU_AUTH_BYTES);
    if (link->secret->bytes == 0)
        return true;
    bool of_hub = link->hub == own;
    const uint8_t *agent = link->hub ? link->other : link->nonce, *hub = link->hub ? link->nonce : link->other;
    if (tu_auth_proof(link->secret, of_hub ? TU_AUTH_HUB : TU_AUTH_AGENT, agent, hub, proof) == TUTTI_OK)
        return true;
    broken(link, tutti_error_message());
    return false;
}

tutti_status tu_link_init(tu_link *link, bool hub, const tu_secret *secret) {
    *link = (tu_link){ .hub = hub, .secret = secret };
    tutti_status status = tu_auth_nonce(link->nonce);
    if (status == TUTTI_OK && !hub)
        put_greeting(link);
    return status;
}

void tu_link_end(tu_link *link) {
    free(link->out);
    link->out = NULL;
    link->out_used = link->out_room = 0;
}

/* Takes bytes from the beginning of what came. */
static void consume(tu_link *link, size_t bytes) {
    link->in_used -= bytes;
    memmove(link->in, link->in + bytes, link->in_used);
}

/* The other's nonce, and from the hub its proof. */
static bool take_greeting(tu_link *link) {
    size_t begin = link->in_used < sizeof greeting ? link->in_used : sizeof greeting;
    if (memcmp(link->in, greeting, begin) != 0) {
        broken(link, "who is there speaks another language: no launcher of Tutti, or one of another version");
        return false;
    }
    bool differs = link->in_used > sizeof greeting && link->in[sizeof greeting] != mode_of(link);
    if (link->in_used < TU_LINK_GREETING_BYTES + (link->hub || differs ? 0 : TU_AUTH_BYTES))
        return false;
    memcpy(link->other, link->in + sizeof greeting + 1, TU_AUTH_BYTES);
    if (link->hub) /* so that an agent with another mode can say why it is not served */
        put_greeting(link);
    if (differs) {
        broken(link, mode_of(link) ? "it has no secret, and this launcher has one (--secret-file)"
                                   : "it has a secret (--secret-file), and this launcher has none");
        return false;
    }
    uint8_t proof[TU_AUTH_BYTES];
    if (!link->hub) {
        if (!prove(link, false, proof))
            return false;
        if (!tu_auth_equal(proof, link->in + TU_LINK_GREETING_BYTES) && mode_of(link)) {
            broken(link, "it cannot prove the job's secret: the secrets differ, or it belongs to another job");
            return false;
        }
    }
    consume(link, TU_LINK_GREETING_BYTES + (link->hub ? 0 : TU_AUTH_BYTES));
    if (!prove(link, true, proof))
        return false;
    append(link, proof, sizeof proof);
    if (link->state == TU_LINK_GREETING)
        link->state = link->hub ? TU_LINK_PROVING : TU_LINK_OPEN;
    return true;
}

static bool take_proof(tu_link *link) {
    uint8_t proof[TU_AUTH_BYTES];
    if (link->in_used < TU_AUTH_BYTES || !prove(link, false, proof))
        return false;
    if (mode_of(link) && !tu_auth_equal(proof, link->in)) {
        broken(link, "it cannot prove the job's secret");
        return false;
    }
    consume(link, TU_AUTH_BYTES);
    link->state = TU_LINK_OPEN;
    return true;
}

void tu_link_came(tu_link *link, size_t bytes) {
    link->in_used += bytes;
    if (link->state == TU_LINK_GREETING && !take_greeting(link))
        return;
    if (link->state == TU_LINK_PROVING)
        (void)take_proof(link);
}

bool tu_link_take(tu_link *link, tu_frame *frame) {
    if (link->state != TU_LINK_OPEN || link->in_used == 0)
        return false;
    int length = tu_frame_read(link->in, link->in_used, frame);
    if (length < 0)
        broken(link, "what it sends makes no sense");
    if (length <= 0)
        return false;
    consume(link, (size_t)length);
    return true;
}

void tu_link_put(tu_link *link, const tu_frame *frame) {
    uint8_t data[TU_FRAME_MOST];
    append(link, data, tu_frame_write(frame, data));
}

void tu_link_sent(tu_link *link, size_t bytes) {
    link->out_used -= bytes;
    memmove(link->out, link->out + bytes, link->out_used);
}
