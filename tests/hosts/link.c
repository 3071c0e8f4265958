/* SPDX-License-Identifier: Apache-2.0
 *
 * Links between launchers: the handshake and the frames, in pieces of any size.
 */
#include "hosts/link.h"

#include "../harness.h"

static tu_secret secret_of(const char *text) {
    tu_secret secret = { 0 };
    if (text != NULL)
        CHECK_OK(tu_secret_set(&secret, text, strlen(text)));
    return secret;
}

/* Moves at most `most` bytes. */
static bool carry(tu_link *from, tu_link *to, size_t most) {
    size_t room;
    uint8_t *at = tu_link_room(to, &room);
    size_t bytes = from->out_used < most ? from->out_used : most;
    bytes = bytes < room ? bytes : room;
    if (bytes == 0)
        return false;
    memcpy(at, from->out, bytes);
    tu_link_sent(from, bytes);
    tu_link_came(to, bytes);
    return true;
}

static void meet(tu_link *agent, tu_link *hub, size_t most) {
    for (bool moved = true; moved && agent->state != TU_LINK_BROKEN && hub->state != TU_LINK_BROKEN;) {
        moved = carry(agent, hub, most);
        moved = carry(hub, agent, most) || moved;
    }
}

typedef struct pair {
    tu_secret agent_secret, hub_secret;
    tu_link agent, hub;
} pair;

static void begin(pair *pair, const char *agent, const char *hub) {
    pair->agent_secret = secret_of(agent);
    pair->hub_secret = secret_of(hub);
    CHECK_OK(tu_link_init(&pair->agent, false, &pair->agent_secret));
    CHECK_OK(tu_link_init(&pair->hub, true, &pair->hub_secret));
}

static void end(pair *pair) {
    tu_link_end(&pair->agent);
    tu_link_end(&pair->hub);
}

TEST(launchers_with_one_secret_meet) {
    if (!tu_auth_available())
        SKIP("this build proves no secrets (libsodium)");
    for (size_t piece = 1; piece < 200; piece += 33) {
        pair pair;
        begin(&pair, "a secret of the job", "a secret of the job");
        meet(&pair.agent, &pair.hub, piece);
        CHECK_EQ(pair.agent.state, TU_LINK_OPEN);
        CHECK_EQ(pair.hub.state, TU_LINK_OPEN);
        end(&pair);
    }
}

TEST(launchers_without_a_secret_meet) {
    pair pair;
    begin(&pair, NULL, NULL);
    meet(&pair.agent, &pair.hub, 7);
    CHECK_EQ(pair.agent.state, TU_LINK_OPEN);
    CHECK_EQ(pair.hub.state, TU_LINK_OPEN);
    end(&pair);
}

TEST(another_secret_is_refused_and_told) {
    if (!tu_auth_available())
        SKIP("this build proves no secrets (libsodium)");
    pair pair;
    begin(&pair, "a secret of the job", "another secret, longer");
    meet(&pair.agent, &pair.hub, 1000);
    CHECK_EQ(pair.agent.state, TU_LINK_BROKEN);
    CHECK(strstr(pair.agent.why, "cannot prove the job's secret") != NULL);
    CHECK(pair.hub.state != TU_LINK_OPEN);
    end(&pair);
}

/* An agent that does not check the hub, and answers with anything. */
TEST(an_agent_that_cannot_prove_the_secret_is_refused) {
    if (!tu_auth_available())
        SKIP("this build proves no secrets (libsodium)");
    tu_secret secret = secret_of("a secret of the job");
    tu_link hub;
    CHECK_OK(tu_link_init(&hub, true, &secret));
    uint8_t bytes[TU_LINK_GREETING_BYTES + TU_AUTH_BYTES] = "TUTTIAG1\1";
    size_t room;
    memcpy(tu_link_room(&hub, &room), bytes, sizeof bytes);
    tu_link_came(&hub, sizeof bytes);
    CHECK_EQ(hub.state, TU_LINK_BROKEN);
    tu_link_end(&hub);
}

TEST(with_and_without_a_secret_do_not_meet) {
    pair pair;
    begin(&pair, "a secret of the job", NULL);
    meet(&pair.agent, &pair.hub, 1000);
    CHECK_EQ(pair.hub.state, TU_LINK_BROKEN);
    CHECK(strstr(pair.hub.why, "it has a secret (--secret-file), and this launcher has none") != NULL);
    carry(&pair.hub, &pair.agent, 1000); /* it was told before */
    CHECK_EQ(pair.agent.state, TU_LINK_BROKEN);
    CHECK(strstr(pair.agent.why, "it has no secret") != NULL);
    end(&pair);
    begin(&pair, NULL, "a secret of the job");
    meet(&pair.agent, &pair.hub, 1000);
    CHECK_EQ(pair.hub.state, TU_LINK_BROKEN);
    carry(&pair.hub, &pair.agent, 1000);
    CHECK(strstr(pair.agent.why, "it has a secret") != NULL);
    end(&pair);
}

TEST(another_protocol_is_told_from_its_first_bytes) {
    pair pair;
    size_t room;
    begin(&pair, NULL, NULL);
    memcpy(tu_link_room(&pair.hub, &room), "GET", 3);
    tu_link_came(&pair.hub, 3);
    CHECK_EQ(pair.hub.state, TU_LINK_BROKEN);
    CHECK(strstr(pair.hub.why, "another language") != NULL);
    end(&pair);
}

TEST(frames_arrive_as_they_were_sent_in_pieces_of_any_size) {
    for (size_t piece = 1; piece < 600; piece += 67) {
        pair pair;
        begin(&pair, NULL, NULL);
        meet(&pair.agent, &pair.hub, 100);
        for (int i = 1; i < TU_FRAME_KINDS; i++) {
            tu_frame frame = { .kind = (tu_frame_kind)i,
                               .node = i,
                               .rank = -i,
                               .pid = 1 << 30,
                               .status = -5,
                               .count = 7,
                               .flags = UINT32_MAX };
            memset(frame.text, 'x', (size_t)i * 29);
            tu_link_put(&pair.agent, &frame);
        }
        int next = 1;
        while (carry(&pair.agent, &pair.hub, piece)) {
            for (tu_frame frame; tu_link_take(&pair.hub, &frame); next++) {
                CHECK_EQ((int)frame.kind, next);
                CHECK_EQ(frame.node, next);
                CHECK_EQ(frame.rank, -next);
                CHECK_EQ(frame.status, -5);
                CHECK_EQ(strlen(frame.text), (size_t)next * 29);
            }
        }
        CHECK_EQ(next, (int)TU_FRAME_KINDS);
        end(&pair);
    }
}

TEST(a_link_that_nobody_reads_breaks_before_it_fills_the_memory) {
    pair pair;
    begin(&pair, NULL, NULL);
    meet(&pair.agent, &pair.hub, 100);
    tu_frame frame = { .kind = TU_FRAME_BEAT };
    for (int i = 0; i < 100000 && pair.agent.state == TU_LINK_OPEN; i++)
        tu_link_put(&pair.agent, &frame);
    CHECK_EQ(pair.agent.state, TU_LINK_BROKEN);
    CHECK(strstr(pair.agent.why, "takes nothing") != NULL);
    end(&pair);
}
