/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric memory of groups whose ranks are on several hosts: members on the own host are mapped, the others are
 * reached by put, get, signals, words and barriers; bounds, order and failures.
 */
#include <tutti/collective.h>
#include <tutti/pool.h>

#include "blocks_on_hosts.h"
#include "memory/network_inner.h"
#include "memory/tables.h"
#include "world/world.h"

#define BYTES ((size_t)5 << 18)

static unsigned char byte_of(int rank, size_t index) {
    return (unsigned char)(index * 7 + index / 251 + (size_t)rank * 31);
}

static void check_bytes(const unsigned char *data, int rank, size_t offset, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (data[i] != byte_of(rank, offset + i))
            CHECK_EQ(data[i], byte_of(rank, offset + i));
}

/* ---- copies ---- */

static void put_and_get(tutti_world *world) {
    size_t bytes = test_sanitized() ? BYTES / 8 : BYTES;
    block mine = meet(world, bytes);
    int rank = mine.rank, size = mine.size, next = (rank + 1) % size, before = (rank + size - 1) % size;
    for (int other = 0; other < size; other++) { /* mapped here, or not */
        bool here = mine.group->job_ranks[other] >= 0;
        CHECK_EQ(tutti_peers_buffer(mine.peers, other) != NULL, here);
        CHECK_EQ(tutti_peers_signal_pad(mine.peers, other) != NULL, here);
        CHECK_EQ(tu_network_reaches(mine.peers->backend.share, other), !here && by_key());
        tutti_view view = TUTTI_VIEW_INIT;
        CHECK_STATUS(tutti_peers_get_buffer(mine.peers, other, NULL, 0, TUTTI_U8, 0, &view),
                     here ? TUTTI_OK : TUTTI_ERROR_UNSUPPORTED);
    }
    unsigned char *from = malloc(bytes), *to = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        from[i] = byte_of(rank, i);
    for (size_t i = 0; i < bytes; i += 1000) /* small ones, then the rest at once */
        if (i < 50000)
            CHECK_OK(tutti_peers_put(mine.peers, next, i, from + i, 1000, NULL));
    CHECK_OK(tutti_peers_put(mine.peers, next, 50000, from + 50000, bytes - 50000, NULL));
    CHECK_OK(tutti_peers_signal(mine.peers, next, 0, NULL));
    CHECK_OK(tutti_peers_wait_signal(mine.peers, before, 0, NULL));
    check_bytes(mine.data, before, 0, bytes);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    for (int other = 0; other < size; other++) {
        memset(to, 0, bytes);
        CHECK_OK(tutti_peers_get(mine.peers, other, 5, to, bytes - 5, NULL));
        check_bytes(to, (other + size - 1) % size, 5, bytes - 5);
    }
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    free(from);
    free(to);
    leave(&mine);
}

TEST(put_and_get_reach_members_here_and_on_other_hosts) {
    on_hosts(one_each, 2, put_and_get);
    on_hosts(three_two_one, 6, put_and_get);
    on_hosts(in_turns, 5, put_and_get);
}

/* ---- signals, words, order ---- */

/* Three buffers in turn, as the memory model says: no other synchronisation is needed. */
static void stream_of_messages(tutti_world *world) {
    block mine = meet(world, 3 * 4096);
    int last = mine.size - 1, rounds = test_sanitized() ? 20 : 60;
    unsigned char page[4096];
    for (int round = 0; round < rounds; round++) {
        size_t offset = (size_t)(round % 3) * sizeof page;
        if (mine.rank == 0) {
            memset(page, round & 255, sizeof page);
            CHECK_OK(tutti_peers_put(mine.peers, last, offset, page, sizeof page, NULL));
            CHECK_OK(tutti_peers_signal(mine.peers, last, 0, NULL));
        } else if (mine.rank == last) {
            bool arrived = false;
            while (round % 2 == 0 && !arrived)
                CHECK_OK(tutti_peers_test_signal(mine.peers, 0, 0, &arrived));
            if (!arrived)
                CHECK_OK(tutti_peers_wait_signal(mine.peers, 0, 0, NULL));
            for (size_t i = 0; i < sizeof page; i++)
                CHECK_EQ(mine.data[offset + i], round & 255);
        }
    }
    CHECK_OK(tutti_barrier(mine.group, NULL));
    leave(&mine);
}

/* Rank 0 puts into rank 2 and signals 1, which signals 2: what 0 put is there, whichever way is quicker. */
static void order_is_cumulative(tutti_world *world) {
    block mine = meet(world, 1 << 20);
    int rounds = test_sanitized() ? 4 : 12;
    unsigned char *page = malloc(1 << 20);
    for (int round = 1; round <= rounds; round++) {
        if (mine.rank == 0) {
            memset(page, round, 1 << 20);
            CHECK_OK(tutti_peers_put(mine.peers, 2, 0, page, 1 << 20, NULL));
            CHECK_OK(tutti_peers_signal(mine.peers, 1, 0, NULL));
        } else if (mine.rank == 1) {
            CHECK_OK(tutti_peers_wait_signal(mine.peers, 0, 0, NULL));
            CHECK_OK(tutti_peers_signal(mine.peers, 2, 0, NULL));
        } else {
            CHECK_OK(tutti_peers_wait_signal(mine.peers, 1, 0, NULL));
            CHECK(mine.data[0] == round && mine.data[(1 << 20) - 1] == round);
        }
        CHECK_OK(tutti_peers_barrier(mine.peers, 1, NULL));
        if (mine.rank == 1) { /* and what it put before a barrier is seen by those who get it */
            unsigned char seen[2];
            CHECK_OK(tutti_peers_get(mine.peers, 2, (1 << 20) - 2, seen, 2, NULL));
            CHECK_EQ(seen[1], round);
        }
        CHECK_OK(tutti_peers_barrier(mine.peers, 1, NULL));
    }
    free(page);
    leave(&mine);
}

static void words(tutti_world *world) {
    block mine = meet(world, 4096);
    int next = (mine.rank + 1) % mine.size, before = (mine.rank + mine.size - 1) % mine.size;
    for (uint64_t value = 1; value <= 20; value++) {
        uint64_t sent = value * 1000 + (uint64_t)mine.rank;
        CHECK_OK(tutti_peers_put_with_signal(mine.peers, next, 8 * value, &sent, sizeof sent, 3, value, NULL));
        CHECK_OK(tutti_peers_wait_for_signal(mine.peers, 3, TUTTI_AT_LEAST, value, NULL));
        uint64_t got;
        memcpy(&got, mine.data + 8 * value, sizeof got);
        CHECK_EQ(got, value * 1000 + (uint64_t)before);
    }
    CHECK_STATUS(tutti_peers_wait_for_signal(mine.peers, 4, TUTTI_EQUAL, 1,
                                             TUTTI_OPTIONS(tutti_call, .timeout_ns = 50 * TU_MILLISECOND)),
                 TUTTI_ERROR_TIMEOUT);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    leave(&mine);
}

TEST(signals_words_and_barriers_keep_their_order_between_hosts) {
    static const int three[] = { 0, 1, 2 };
    on_hosts(one_each, 2, stream_of_messages);
    on_hosts(two_and_two, 4, stream_of_messages);
    on_hosts(three, 3, order_is_cumulative);
    on_hosts(two_and_two, 4, words);
}

/* A way that takes its time: what this rank sends to one other is late, in its order. */
#define LATE (30 * TU_MILLISECOND)

typedef struct late {
    struct late *next;
    int64_t due;
    size_t header_bytes, bytes;
    unsigned char header[TU_NETWORK_HEADER_BYTES];
    unsigned char data[];
} late;
static const tu_network_part *real_part;
static int late_peer;
static late *late_first, **late_end = &late_first;

static const char *send_late(void *network, int peer, const void *header, size_t header_bytes, const void *data,
                             size_t bytes, void *token, bool *finished) {
    if (peer != late_peer)
        return real_part->send(network, peer, header, header_bytes, data, bytes, token, finished);
    late *one = malloc(sizeof *one + bytes);
    *one = (late){ .due = tu_deadline(LATE), .header_bytes = header_bytes, .bytes = bytes };
    memcpy(one->header, header, header_bytes);
    if (bytes > 0)
        memcpy(one->data, data, bytes);
    *late_end = one;
    late_end = &one->next;
    *finished = true;
    return NULL;
}

static bool progress_late(void *network) {
    bool any = real_part->progress(network), finished = true;
    while (late_first != NULL && late_first->due <= tu_clock_now()) {
        late *one = late_first;
        late_first = one->next;
        late_end = late_first != NULL ? late_end : &late_first;
        tu_dispatch *dispatch = malloc(sizeof *dispatch + one->bytes); /* the network frees it when it has left */
        *dispatch = (tu_dispatch){ .peer = late_peer, .bytes = one->bytes };
        memcpy(dispatch + 1, one->data, one->bytes);
        const char *why = real_part->send(network, late_peer, one->header, one->header_bytes, dispatch + 1, one->bytes,
                                          dispatch, &finished);
        if (finished || why != NULL)
            free(dispatch);
        free(one);
    }
    return any;
}

static bool arm_late(void *network) {
    return late_first == NULL && real_part->arm(network);
}

static void be_late(tutti_group *group, int peer) {
    static tu_network_part part;
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(group, &side));
    pthread_mutex_lock(&side->network->lock);
    late_peer = peer;
    real_part = side->network->part;
    part = *real_part;
    part.send = send_late;
    part.progress = progress_late;
    part.arm = arm_late;
    side->network->part = &part;
    pthread_mutex_unlock(&side->network->lock);
}

/* Rank 0 lets rank 1 know, in one of many ways, that it has put something into rank 2's block. */
enum {
    SIGNAL,
    TAKEN_SIGNAL,
    WORD,
    BARRIER,
    COLLECTIVE,
    PAIR,
    MESSAGE,
    RENDEZVOUS,
    WAYS
};

static void let_know(const block *mine, tutti_group *pair, int way, uint64_t round) {
    bool tells = mine->rank == 0;
    unsigned char byte = 0;
    if (way == BARRIER)
        CHECK_OK(tutti_peers_barrier(mine->peers, 0, NULL));
    if (way == COLLECTIVE)
        CHECK_OK(tutti_barrier(mine->group, NULL));
    if (way == RENDEZVOUS) {
        block other = meet(tutti_group_world(mine->group), 4096);
        leave(&other);
    }
    if (mine->rank == 2)
        return;
    if (way == SIGNAL)
        CHECK_OK(tells ? tutti_peers_signal(mine->peers, 1, 0, NULL)
                       : tutti_peers_wait_signal(mine->peers, 0, 0, NULL));
    for (int i = 0; i < 2 && way == TAKEN_SIGNAL; i++) /* the second is there when the first was taken */
        CHECK_OK(tells ? tutti_peers_wait_signal(mine->peers, 1, 1, NULL)
                       : tutti_peers_signal(mine->peers, 0, 1, NULL));
    if (way == WORD)
        CHECK_OK(tells ? tutti_peers_put_with_signal(mine->peers, 1, 0, NULL, 0, 0, round, NULL)
                       : tutti_peers_wait_for_signal(mine->peers, 0, TUTTI_EQUAL, round, NULL));
    if (way == PAIR)
        CHECK_OK(tutti_barrier(pair, NULL));
    if (way == MESSAGE)
        CHECK_OK(tells ? tutti_send(pair, &byte, 1, TUTTI_U8, 1, 0, NULL)
                       : tutti_recv(pair, &byte, 1, TUTTI_U8, 0, 0, NULL));
}

static void whatever_tells_of_it(tutti_world *world) {
    block mine = meet(world, 4096);
    tutti_group *pair;
    CHECK_OK(tutti_group_new(world, (int[]){ 0, 1 }, 2, NULL, &pair));
    for (int i = 0; i < 2 && mine.rank < 2; i++)
        CHECK_OK(tutti_barrier(pair, NULL)); /* so that the next ones go the short way */
    if (mine.rank == 0)
        be_late(mine.group, 2);
    for (uint64_t round = 1; round <= 2 * WAYS; round++) {
        uint64_t seen = 0;
        if (mine.rank == 0)
            CHECK_OK(tutti_peers_put(mine.peers, 2, 64, &round, sizeof round, NULL));
        let_know(&mine, pair, (int)(round % WAYS), round);
        if (mine.rank == 1) {
            CHECK_OK(tutti_peers_get(mine.peers, 2, 64, &seen, sizeof seen, NULL));
            if (seen != round)
                printf("    by way %d\n", (int)(round % WAYS));
            CHECK_EQ(seen, round);
        }
        CHECK_OK(tutti_peers_barrier(mine.peers, 1, NULL));
    }
    tutti_group_release(pair);
    leave(&mine);
}

TEST(whatever_tells_of_a_put_comes_after_it_however_late_that_is) {
    static const int three[] = { 0, 1, 2 }, two_and_one[] = { 0, 0, 1 };
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    on_hosts(three, 3, whatever_tells_of_it);
    on_hosts(two_and_one, 3, whatever_tells_of_it);
}

/* Rank 3 has closed its world, which is nothing to those that do not wait for it. */
static void one_has_closed(tutti_world *world) {
    block mine = meet(world, 4096);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    for (int round = 0; round < 3 && mine.rank == 0; round++) {
        if (round == 0) {
            tu_network_group *side;
            be_late(mine.group, 2);
            CHECK_OK(tu_network_group_get(mine.group, &side));
            for (bool gone = false; !gone;) {
                tu_network_poll(side);
                pthread_mutex_lock(&side->network->lock);
                gone = side->network->peers[3].gone;
                pthread_mutex_unlock(&side->network->lock);
            }
        }
        CHECK_OK(tutti_peers_put(mine.peers, 2, 0, &round, sizeof round, NULL));
        CHECK_OK(tutti_peers_signal(mine.peers, 1, 0, NULL));
    }
    for (int round = 0; round < 3 && mine.rank == 1; round++)
        CHECK_OK(tutti_peers_wait_signal(mine.peers, 0, 0, NULL));
    if (mine.rank == 1)
        CHECK_OK(tutti_peers_signal(mine.peers, 2, 0, NULL));
    if (mine.rank == 2)
        CHECK_OK(tutti_peers_wait_signal(mine.peers, 1, 0, NULL));
    leave(&mine);
}

TEST(a_rank_that_closed_its_world_is_not_asked_for_what_others_were_put) {
    static const int four[] = { 0, 1, 2, 3 };
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    on_hosts(four, 4, one_has_closed);
}

/* Of two threads in a barrier each, the later one's word may leave first. */
static void words_out_of_turn(tutti_world *world) {
    block mine = meet(world, 4096);
    if (mine.rank == 0) {
        tu_network_group *side;
        CHECK_OK(tu_network_group_get(mine.group, &side));
        for (uint32_t barriers = 2; barriers > 0; barriers--)
            tu_network_tell(side, 1, 1, 3 /* its barriers */, 0, barriers);
        CHECK_OK(tutti_peers_signal(mine.peers, 1, 1, NULL));
    } else {
        CHECK_OK(tutti_peers_wait_signal(mine.peers, 0, 1, NULL));
        for (int i = 0; i < 2; i++)
            CHECK_OK(tutti_peers_barrier(mine.peers, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = test_moment())));
    }
    CHECK_OK(tutti_barrier(mine.group, NULL));
    leave(&mine);
}

TEST(barriers_of_several_threads_are_counted_in_whatever_order_they_are_told) {
    on_hosts(one_each, 2, words_out_of_turn);
}

static void many_barriers(tutti_world *world) {
    block mine = meet(world, 4096);
    int rounds = test_sanitized() ? 6 : 20;
    for (int round = 1; round <= rounds; round++) {
        for (int other = 0; other < mine.size; other++)
            CHECK_OK(tutti_peers_put(mine.peers, other, (size_t)mine.rank, &(unsigned char){ (unsigned char)round }, 1,
                                     NULL));
        CHECK_OK(tutti_peers_barrier(mine.peers, round % 2, NULL));
        for (int other = 0; other < mine.size; other++)
            CHECK_EQ(mine.data[other], (unsigned char)round);
        CHECK_OK(tutti_peers_barrier(mine.peers, 2, NULL));
    }
    leave(&mine);
}

TEST(what_was_put_before_a_barrier_is_there_after_it_on_every_host) {
    on_hosts(two_and_two, 4, many_barriers);
    on_hosts(in_turns, 5, many_barriers);
}

/* A pool gives the same block out again: signals of its former life do not reach the new one. */
static void pool_again(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, NULL, &pool));
    for (int life = 0; life < 4; life++) {
        tutti_memory *memory;
        tutti_peers *peers;
        CHECK_OK(tutti_pool_alloc(pool, 4096, &memory));
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        int rank = tutti_group_rank(group), other = 1 - rank;
        bool arrived = true;
        CHECK_OK(tutti_peers_test_signal(peers, other, 0, &arrived));
        CHECK(!arrived);
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        if (rank == 0) /* nobody takes it */
            CHECK_OK(tutti_peers_signal(peers, other, 0, NULL));
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_pool_release(pool);
}

TEST(a_block_of_a_pool_is_as_new_when_it_meets_again) {
    on_hosts(one_each, 2, pool_again);
}

/* ---- bounds ---- */

/* What a program could not ask for, because the call refuses it, is refused by the owner too. */
static void outside_of_the_block(tutti_world *world) {
    block mine = meet(world, 4096);
    unsigned char canary[64], page[64];
    unsigned char *pad = tutti_peers_signal_pad(mine.peers, mine.rank);
    memset(page, 0xee, sizeof page);
    memcpy(canary, pad, sizeof canary);
    if (mine.rank == 0) {
        tu_network_group *side;
        CHECK_OK(tu_network_group_get(mine.group, &side));
        CHECK_STATUS(tutti_peers_put(mine.peers, 1, 4090, page, sizeof page, NULL), TUTTI_ERROR_RANGE);
        uint64_t number = 1; /* of the first rendezvous */
        CHECK(tu_network_put(side, 1, number, 4090, page, sizeof page));
        CHECK(tu_network_put(side, 1, number, UINT64_MAX - 8, page, sizeof page));
        CHECK(tu_network_put(side, 1, number + 7, 0, page, sizeof page)); /* no such block */
        CHECK(tu_network_set(side, 1, number, 8, 0xeeee));                /* data, not the pad */
        CHECK(tu_network_set(side, 1, number, UINT64_MAX - 7, 0xeeee));
        tu_network_tell(side, 1, number, 1, 1u << 30, 1); /* no such channel */
        tu_network_tell(side, 1, number, 99, 0, 1);
        tu_network_fetch fetch;
        CHECK(tu_network_ask_for(side, &fetch, 1, number, 4090, page, sizeof page));
        while (!atomic_load(&fetch.over))
            tu_network_poll(side);
        CHECK(atomic_load(&fetch.refused) && page[0] == 0xee);
        CHECK(tu_network_put(side, 1, number, 0, page, 8)); /* and this one comes after all of them */
    }
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    if (mine.rank == 1) {
        for (size_t i = 0; i < 4096; i++)
            CHECK_EQ(mine.data[i], i < 8 ? 0xee : 0);
        CHECK(memcmp(canary, pad, sizeof canary) == 0);
    }
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    leave(&mine);
}

TEST(a_member_cannot_reach_beyond_the_block_that_was_rendezvoused_with_it) {
    on_hosts(one_each, 2, outside_of_the_block);
}

static uint64_t drawn(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* A number of the kind that is mistaken for a good one: small, huge, or just beyond. */
static uint64_t odd_number(uint64_t *state) {
    static const uint64_t odd[] = { 0, 1, 2, 8, 4088, 4096, 4097, UINT32_MAX, UINT64_MAX - 7, UINT64_MAX };
    uint64_t which = drawn(state) % 16;
    return which < 10 ? odd[which] : drawn(state) % 5000;
}

/* A header of the job, with anything in it, and any bytes behind it. */
static void send_garbage(tu_network_group *side, uint64_t *state) {
    tu_network *network = side->network;
    size_t bytes = drawn(state) % 8 == 0 ? 0 : drawn(state) % 700;
    uint32_t kind = (uint32_t)(drawn(state) % (TU_NETWORK_KINDS + 1));
    if (kind == TU_NETWORK_GOODBYE || kind == TU_NETWORK_ENDED) /* these two a member may say */
        kind = TU_NETWORK_MEMORY;
    pthread_mutex_lock(&network->lock);
    tu_dispatch *dispatch = tu_network_own_begin(network, 1, bytes);
    CHECK(dispatch != NULL);
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)(dispatch + 1))[i] = (unsigned char)drawn(state);
    tu_network_header header = { .magic = TU_NETWORK_MAGIC,
                                 .version = TU_NETWORK_VERSION,
                                 .door = network->peers[1].door,
                                 .key = drawn(state) % 8 == 0 ? odd_number(state) : side->group->key,
                                 .sequence = odd_number(state),
                                 .offset = odd_number(state),
                                 .total = drawn(state) % 2 == 0 ? bytes : odd_number(state),
                                 .kind = kind,
                                 .step = (uint32_t)(drawn(state) % 10),
                                 .from = drawn(state) % 8 == 0 ? (int32_t)odd_number(state) : 0,
                                 .said = { .signature = odd_number(state) } };
    tu_network_own_send(network, dispatch, &header);
    pthread_mutex_unlock(&network->lock);
}

static void anything_comes(tutti_world *world) {
    block mine = meet(world, 4096);
    tutti_group *quiet;
    tutti_memory *other;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &quiet));
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &other)); /* rendezvoused with nobody */
    CHECK_OK(tutti_barrier(quiet, NULL));
    if (mine.rank == 0) {
        tu_network_group *side;
        CHECK_OK(tu_network_group_get(mine.group, &side));
        for (uint64_t state = 7, i = 0; i < (test_sanitized() ? 1000 : 4000); i++)
            send_garbage(side, &state);
    }
    CHECK_OK(tutti_barrier(quiet, NULL)); /* all of it has come */
    for (size_t i = 0; i < 4096; i++)
        CHECK_EQ(((unsigned char *)tutti_memory_data(other))[i], 0);
    tutti_memory_release(other);
    tutti_group_release(quiet);
    leave(&mine);
}

TEST(whatever_a_member_sends_reaches_nothing_but_its_blocks) {
    setenv("TUTTI_LOG_FILE", "/dev/null", 1); /* what is dropped is told */
    on_hosts(one_each, 2, anything_comes);
    unsetenv("TUTTI_LOG_FILE");
}

static void blocks_differ(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, tutti_group_rank(group) == 1 ? 8192 : 4096, NULL, &memory));
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_MISMATCH);
    CHECK(strstr(tutti_error_message(), "byte size") != NULL);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL)); /* it ended nothing */
}

TEST(blocks_that_differ_between_hosts_are_told_and_end_nothing) {
    on_hosts(two_and_two, 4, blocks_differ);
}

/* ---- failures ---- */

static void nobody_signals(tutti_world *world) {
    block mine = meet(world, 4096);
    if (mine.rank == 0) {
        CHECK_STATUS(
            tutti_peers_wait_signal(mine.peers, 1, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = 100 * TU_MILLISECOND)),
            TUTTI_ERROR_TIMEOUT);
        CHECK(strstr(tutti_error_message(), "peers_wait_signal") != NULL);
        CHECK_OK(tutti_peers_signal(mine.peers, 1, 0, NULL));
        CHECK_STATUS(tutti_peers_signal(mine.peers, 1, 0, /* the first was not taken */
                                        TUTTI_OPTIONS(tutti_call, .timeout_ns = 100 * TU_MILLISECOND)),
                     TUTTI_ERROR_TIMEOUT);
    }
    CHECK_OK(tutti_barrier(mine.group, NULL)); /* only those calls ended */
    leave(&mine);
}

TEST(a_signal_that_runs_out_of_time_ends_only_that_call) {
    on_hosts(one_each, 2, nobody_signals);
}

/* Rank 1 dies while the others wait in a signal, a barrier, a get and a put, on its host and on others. */
static void one_dies(tutti_world *world) {
    block mine = meet(world, 8 << 20);
    unsigned char *page = calloc(1, 8 << 20);
    tutti_status status = tutti_peers_barrier(mine.peers, 0, NULL); /* it may die before all are out of it */
    if (mine.rank == 1) {
        CHECK_OK(tutti_peers_wait_signal(mine.peers, 0, 0, NULL));
        kill(getpid(), SIGKILL);
    }
    if (mine.rank == 0)
        CHECK_OK(tutti_peers_signal(mine.peers, 1, 0, NULL));
    while (status == TUTTI_OK) {
        if (mine.rank == 0)
            status = tutti_peers_wait_signal(mine.peers, 1, 1, NULL);
        else if (mine.rank == 2)
            status = tutti_peers_barrier(mine.peers, 1, NULL);
        else if (mine.rank == 3)
            status = tutti_peers_get(mine.peers, 1, 0, page, 8 << 20, NULL);
        else
            status = tutti_peers_put(mine.peers, 1, 0, page, 8 << 20, NULL);
    }
    CHECK_STATUS(status, TUTTI_ERROR_DEAD);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 1);
    free(page);
    leave(&mine);
}

TEST(a_dead_rank_ends_puts_gets_signals_and_barriers_on_every_host) {
    static const int apart[] = { 0, 1, 0, 2, 2 };
    on_hosts(apart, 5, one_dies);
}

/* ---- the end of a group ---- */

static tu_network *network_here;
static int given_back, without_lock;

static void give_back_and_look(void *state, void *parcel) {
    (void)state;
    CHECK(parcel == &given_back);
    given_back++;
    if (pthread_mutex_trylock(&network_here->lock) == 0) { /* nobody has it */
        without_lock++;
        pthread_mutex_unlock(&network_here->lock);
    }
}

/* A fabric may hand out messages in memory of the backend's. That is given back with the lock held: the network's
 * thread may be in there. */
static void end_with_a_letter(tutti_world *world) {
    static tu_network_part looking;
    static const unsigned char message[64] = { 1 };
    tu_network_group *side;
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
    CHECK_OK(tu_network_group_get(group, &side));
    network_here = side->network;
    pthread_mutex_lock(&network_here->lock);
    const tu_network_part *part = network_here->part;
    looking = *part;
    looking.give_back = give_back_and_look;
    network_here->part = &looking;
    tu_network_header header = { .key = group->key, .kind = TU_NETWORK_LETTER };
    tu_network_letter_keep(side, 0, tu_network_keep(&header, message, sizeof message, &given_back));
    pthread_mutex_unlock(&network_here->lock);
    CHECK_OK(tutti_group_destroy(group));
    tutti_group_release(group);
    CHECK_EQ(given_back, 1);
    CHECK_EQ(without_lock, 0);
    pthread_mutex_lock(&network_here->lock);
    network_here->part = part;
    pthread_mutex_unlock(&network_here->lock);
}

TEST(a_message_that_nobody_received_goes_with_its_group) {
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    on_hosts(one_each, 2, end_with_a_letter);
}

/* ---- messages for groups that this rank does not know ---- */

static void send_letter(tu_network *network, uint64_t key, size_t bytes) {
    static unsigned char data[TU_LETTER_BYTES];
    pthread_mutex_lock(&network->lock);
    tu_network_own(network, 1, TU_NETWORK_LETTER, key, 0, 0, NULL, data, bytes);
    tu_network_drive(network);
    pthread_mutex_unlock(&network->lock);
}

static void letters_for_a_closed_group(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *other;
    tu_network_group *side;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &other));
    CHECK_OK(tutti_barrier(other, NULL));
    CHECK_OK(tu_network_group_get(group, &side));
    uint64_t key = other->key;
    CHECK_OK(tutti_group_destroy(other));
    tutti_group_release(other);
    CHECK_OK(tutti_barrier(group, NULL));
    for (int i = 0; i < 10 && tutti_group_rank(group) == 0; i++)
        send_letter(side->network, key, 1000);
    CHECK_OK(tutti_barrier(group, NULL)); /* they have come */
    pthread_mutex_lock(&side->network->lock);
    CHECK(side->network->orphans == NULL);
    pthread_mutex_unlock(&side->network->lock);
}

static void too_many_letters(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    tu_network_group *side;
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tu_network_group_get(group, &side));
    for (size_t i = 0; i < TU_NETWORK_ORPHANS_MOST / TU_LETTER_BYTES + 2 && tutti_group_rank(group) == 0; i++)
        send_letter(side->network, i, TU_LETTER_BYTES);
    int value, other = 1 - tutti_group_rank(group);
    CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, other, 0, NULL), TUTTI_ERROR_DEAD);
    /* Whichever of them saw it first tells both. */
    CHECK(other == 1 || strstr(side->network->peers[0].why, "groups that this rank has not used") != NULL);
}

/* A group that one member releases before it has used it. */
static void letters_for_an_unused_group(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *other;
    tu_network_group *side;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &other));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tu_network_group_get(group, &side));
    for (int i = 0; i < 10 && tutti_group_rank(group) == 0; i++)
        send_letter(side->network, other->key, 1000);
    CHECK_OK(tutti_barrier(group, NULL)); /* they have come */
    pthread_mutex_lock(&side->network->lock);
    CHECK_EQ(side->network->orphans != NULL, tutti_group_rank(group) == 1);
    pthread_mutex_unlock(&side->network->lock);
    CHECK_OK(tutti_group_destroy(other));
    tutti_group_release(other);
    pthread_mutex_lock(&side->network->lock);
    CHECK(side->network->orphans == NULL);
    CHECK_EQ(side->network->peers[1 - tutti_group_rank(group)].orphaned, 0);
    pthread_mutex_unlock(&side->network->lock);
}

TEST(messages_for_unknown_groups_are_kept_up_to_a_limit_and_for_closed_ones_not) {
    on_hosts(one_each, 2, letters_for_a_closed_group);
    on_hosts(one_each, 2, letters_for_an_unused_group);
    on_hosts(one_each, 2, too_many_letters);
}

/* ---- a member that asks and reads nothing ---- */

static void too_many_gets(tutti_world *world) {
    block mine = meet(world, 4096);
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(mine.group, &side));
    CHECK_OK(tutti_barrier(mine.group, NULL));
    if (mine.rank == 0) { /* as if so much were on its way to rank 1 */
        pthread_mutex_lock(&side->network->lock);
        side->network->peers[1].answering += (uint64_t)129 << 20;
        pthread_mutex_unlock(&side->network->lock);
        CHECK_OK(tutti_store_set(tutti_world_store(world), "full", "", 0));
        int value;
        CHECK_STATUS(tutti_recv(mine.group, &value, 1, TUTTI_I32, 1, 0, NULL), TUTTI_ERROR_DEAD);
        CHECK(strstr(side->network->peers[1].why, "read nothing") != NULL);
    } else {
        CHECK_OK(tutti_store_wait(tutti_world_store(world), (const char *const[]){ "full" }, 1, 0));
        unsigned char bytes[64];
        CHECK_STATUS(tutti_peers_get(mine.peers, 0, 0, bytes, sizeof bytes, NULL), TUTTI_ERROR_DEAD);
    }
    leave(&mine);
}

TEST(a_member_that_asks_for_more_than_it_reads_is_cut_off) {
    if (by_key())
        SKIP("nobody is asked where the fabric reads");
    on_hosts(one_each, 2, too_many_gets);
}

/* ---- tests for signals while something is not known to have arrived ---- */

/* Rank 2 stands still, and so does not say that a put has arrived; rank 1 dies. */
static void test_while_unanswered(tutti_world *world) {
    char path[128];
    snprintf(path, sizeof path, "%s.go", url + 7);
    block mine = meet(world, 4096);
    int value = 7;
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    if (mine.rank == 2) {
        pid_t parent = getpid();
        if (fork() == 0) {
            while (access(path, F_OK) != 0 && getppid() == parent)
                usleep(5000);
            while (access(path, F_OK) == 0 && getppid() == parent) { /* again: the first may come before it stands */
                kill(parent, SIGCONT);
                usleep(5000);
            }
            _exit(0);
        }
        raise(SIGSTOP);
        unlink(path);
    } else if (mine.rank == 1) {
        CHECK_OK(tutti_store_wait(tutti_world_store(world), (const char *const[]){ "put" }, 1, 0));
        kill(getpid(), SIGKILL);
    } else {
        CHECK_OK(tutti_peers_put(mine.peers, 2, 0, &value, sizeof value, NULL));
        CHECK_OK(tutti_store_set(tutti_world_store(world), "put", "", 0));
        bool arrived = false;
        tutti_status status = TUTTI_OK;
        while (status == TUTTI_OK && !arrived)
            status = tutti_peers_test_signal(mine.peers, 1, 0, &arrived);
        CHECK_STATUS(status, TUTTI_ERROR_DEAD);
        fclose(fopen(path, "w"));
    }
    leave(&mine);
}

TEST(a_test_for_a_signal_sees_deaths_while_a_put_is_not_known_to_have_arrived) {
    on_hosts((const int[]){ 0, 1, 2 }, 3, test_while_unanswered);
}

/* ---- the end of a world ---- */

#define ANSWERS 48

/* Holds up whatever comes to this rank, again and again: a rank that has little of its processor. */
static void *hold_up(void *argument) {
    tu_network *network = ((tu_network_group *)argument)->network;
    for (int i = 0; i < 20; i++) {
        pthread_mutex_lock(&network->lock);
        usleep(10000);
        pthread_mutex_unlock(&network->lock);
        usleep(100);
    }
    return NULL;
}

/* Rank 0 leaves at once after the barrier, while answers to it are still on their way: they find nobody, and what it
 * sent before, the barrier last, must arrive all the same. */
static void leave_at_once(tutti_world *world) {
    block mine = meet(world, 1 << 20);
    tutti_group *last;
    tu_network_group *side;
    pthread_t thread;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &last));
    CHECK_OK(tutti_barrier(last, NULL));
    CHECK_OK(tu_network_group_get(mine.group, &side));
    if (mine.rank == 1)
        CHECK_EQ(pthread_create(&thread, NULL, hold_up, side), 0);
    static unsigned char page[ANSWERS][1 << 12];
    static tu_network_fetch fetches[ANSWERS];
    for (int i = 0; i < ANSWERS && mine.rank == 0; i++) {
        CHECK(tu_network_ask_for(side, &fetches[i], 1, 1, 0, page[i], sizeof page[i]));
        pthread_mutex_lock(&side->network->lock); /* something long that nobody wants: it only takes its time */
        tu_network_own(side->network, 1, TU_NETWORK_HELLO, 0, 0, 0, NULL, mine.data, 1 << 16);
        pthread_mutex_unlock(&side->network->lock);
    }
    CHECK_OK(tutti_barrier(last, NULL));
    for (int i = 0; i < ANSWERS && mine.rank == 0; i++)
        tu_network_forget(side, &fetches[i]);
    if (mine.rank == 1)
        pthread_join(thread, NULL);
    tutti_group_release(last);
    leave(&mine);
}

TEST(what_a_rank_sent_before_it_closed_its_world_arrives) {
    for (int i = 0; i < (test_sanitized() ? 1 : 4); i++)
        on_hosts(one_each, 2, leave_at_once);
}

/* Rank 1 gets a message before it has looked for a way back, and closes its world: it is gone, not dead. */
static void only_receives(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), value = 5, got;
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(group, &side));
    tu_network *network = side->network;
    if (rank == 1) {
        pthread_mutex_lock(&network->looking);
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 0, 0, NULL));
        pthread_mutex_unlock(&network->looking);
        return;
    }
    if (rank == 0) {
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 1, 0, NULL));
        for (bool over = false; !over;) {
            tu_network_poll(side);
            pthread_mutex_lock(&network->lock);
            over = network->peers[1].gone || network->peers[1].lost;
            pthread_mutex_unlock(&network->lock);
        }
        CHECK_STATUS(
            tutti_recv(group, &got, 1, TUTTI_I32, 2, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = 100 * TU_MILLISECOND)),
            TUTTI_ERROR_TIMEOUT);
    }
    CHECK_OK(tutti_send_recv(group, &value, 1, 2 - rank, &got, 1, 2 - rank, TUTTI_I32, 1, NULL));
}

TEST(a_rank_that_only_received_says_goodbye_too) {
    static const int three[] = { 0, 1, 2 };
    on_hosts(three, 3, only_receives);
}

/* One comes late: the other has its own error to tell, and waits in between. */
static void no_plugin(tutti_world *world) {
    tutti_memory *memory;
    tutti_peers *peers;
    if (tutti_world_rank(world) == 1)
        usleep(200000);
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    CHECK_STATUS(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers), TUTTI_ERROR_UNSUPPORTED);
    CHECK(strstr(tutti_error_message(), "tutti-ucx") != NULL);
    tutti_memory_release(memory);
}

TEST(without_the_plugin_a_rendezvous_across_hosts_names_it) {
    char kept[512];
    snprintf(kept, sizeof kept, "%s", getenv("TUTTI_PLUGIN_PATH") != NULL ? getenv("TUTTI_PLUGIN_PATH") : "");
    plugin_needed = false;
    setenv("TUTTI_PLUGIN_PATH", "/nonexistent", 1);
    on_hosts(one_each, 2, no_plugin);
    setenv("TUTTI_PLUGIN_PATH", kept, 1);
    plugin_needed = true;
}
