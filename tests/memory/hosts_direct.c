/* SPDX-License-Identifier: Apache-2.0
 *
 * Puts and gets between hosts by remote memory access: keys, bounds, order, what happens to a block that is released,
 * failures. There is no fabric that has it here: TUTTI_RMA=on has UCX emulate it over TCP.
 */
#include <dirent.h>
#include <stdatomic.h>
#include <tutti/collective.h>

#include "blocks_on_hosts.h"
#include "memory/network_inner.h"
#include "memory/tables.h"
#include "world/world.h"

static void with_keys(const int *host_of, int count, rank_body *body) {
    setenv("TUTTI_RMA", "on", 1);
    on_hosts(host_of, count, body);
    unsetenv("TUTTI_RMA");
}

static tu_network *network_of(const block *mine) {
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(mine->group, &side));
    return side->network;
}

/* ---- order ---- */

#define LONG ((size_t)300000)

/* The later of two puts counts, whatever their lengths; and a get sees them. */
static void puts_overlap(tutti_world *world) {
    block mine = meet(world, LONG);
    int next = (mine.rank + 1) % mine.size, before = (mine.rank + mine.size - 1) % mine.size;
    unsigned char *page = malloc(LONG);
    for (int round = 0; round < (test_sanitized() ? 5 : 30); round++) {
        static const size_t lengths[] = { 8, LONG, 5000, 64, LONG / 2, 1 };
        for (int i = 0; i < 6; i++) {
            memset(page, round * 6 + i, LONG);
            CHECK_OK(tutti_peers_put(mine.peers, next, 0, page, lengths[i], NULL));
        }
        unsigned char seen[100];
        CHECK_OK(tutti_peers_get(mine.peers, next, 0, seen, sizeof seen, NULL));
        CHECK_EQ(seen[0], (unsigned char)(round * 6 + 5));
        CHECK_EQ(seen[99], (unsigned char)(round * 6 + 4));
        CHECK_OK(tutti_peers_signal(mine.peers, next, 0, NULL));
        CHECK_OK(tutti_peers_wait_signal(mine.peers, before, 0, NULL));
        CHECK_EQ(mine.data[0], (unsigned char)(round * 6 + 5));
        CHECK_EQ(mine.data[LONG / 2 - 1], (unsigned char)(round * 6 + 4));
        CHECK_EQ(mine.data[LONG - 1], (unsigned char)(round * 6 + 1));
        CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    }
    CHECK(network_of(&mine)->peers[next].written > 0);
    free(page);
    leave(&mine);
}

TEST(of_two_puts_the_later_one_counts_and_a_get_sees_it) {
    with_keys(one_each, 2, puts_overlap);
    with_keys(one_on_three, 3, puts_overlap);
}

/* A fabric that takes its time: what is written to one rank comes late, and no flush is over before. */
#define LATE (20 * TU_MILLISECOND)
typedef struct late {
    struct late *next;
    int64_t due;
    void *key, *token; /* token: of a flush */
    uint64_t writes;   /* before it */
    uint64_t address;
    size_t bytes;
    unsigned char data[];
} late;
static const tu_network_part *real_part;
static tu_network *late_network;
static int late_rank;
static uint64_t late_writes;
static atomic_bool never_quiet; /* no flush is over before something was written after it */
static late *late_first, **late_end = &late_first;

static late *add_late(size_t bytes) {
    late *one = calloc(1, sizeof *one + bytes);
    one->due = tu_deadline(LATE);
    one->bytes = bytes;
    one->writes = late_writes;
    *late_end = one;
    late_end = &one->next;
    return one;
}

static const char *write_late(void *state, int peer, void *key, uint64_t address, const void *from, size_t bytes,
                              void *token, bool *finished) {
    if (peer != late_rank)
        return real_part->write(state, peer, key, address, from, bytes, token, finished);
    late *one = add_late(bytes);
    late_writes++;
    one->key = key;
    one->address = address;
    memcpy(one->data, from, bytes);
    *finished = true;
    return NULL;
}

static const char *flush_late(void *state, int peer, void *token, bool *finished) {
    if (peer != late_rank)
        return real_part->flush(state, peer, token, finished);
    add_late(0)->token = token;
    *finished = false;
    return NULL;
}

/* Of one that nobody but this test waits for. */
static void over(tu_network *network, tu_network_motion *motion, bool good) {
    (void)network;
    (void)motion;
    CHECK(good);
}

static bool is_held(const late *one) {
    return one->token != NULL && atomic_load(&never_quiet) && one->writes == late_writes;
}

static bool progress_late(void *state) {
    static tu_network_motion motion = { .over = over };
    bool any = real_part->progress(state), finished;
    while (late_first != NULL && late_first->due <= tu_clock_now() && !is_held(late_first)) {
        late *one = late_first;
        late_first = one->next;
        late_end = late_first != NULL ? late_end : &late_first;
        const char *why = one->token != NULL ? real_part->flush(state, late_rank, one->token, &finished)
                                             : real_part->write(state, late_rank, one->key, one->address, one->data,
                                                                one->bytes, &motion, &finished);
        CHECK(why == NULL);
        if (one->token != NULL && finished)
            tu_network_moved(late_network, one->token, true);
        if (one->token != NULL || finished)
            free(one); /* else it is read until the flush behind it is over: short ones never are */
    }
    return any;
}

static bool arm_late(void *state) {
    return (late_first == NULL || is_held(late_first)) && real_part->arm(state);
}

static void be_late(tu_network *network, int rank) {
    static tu_network_part part;
    pthread_mutex_lock(&network->lock);
    late_rank = rank;
    late_network = network;
    real_part = network->part;
    part = *real_part;
    part.write = write_late;
    part.flush = flush_late;
    part.progress = progress_late;
    part.arm = arm_late;
    network->part = &part;
    pthread_mutex_unlock(&network->lock);
}

/* What tells of a put: of the receiver itself, and of others that ask it then. */
enum {
    TO_ITSELF,
    WORD,
    TO_ANOTHER,
    BARRIER,
    COLLECTIVE,
    OWN_GET,
    RENDEZVOUS,
    WAYS
};

static void tell(const block *mine, int way, uint64_t round) {
    uint64_t seen;
    int teller = mine->rank;
    if (way == TO_ITSELF && teller != 1)
        CHECK_OK(teller == 0 ? tutti_peers_signal(mine->peers, 2, 0, NULL)
                             : tutti_peers_wait_signal(mine->peers, 0, 0, NULL));
    if (way == WORD && teller != 1)
        CHECK_OK(teller == 0 ? tutti_peers_put_with_signal(mine->peers, 2, 0, NULL, 0, 0, round, NULL)
                             : tutti_peers_wait_for_signal(mine->peers, 0, TUTTI_EQUAL, round, NULL));
    if (way == TO_ANOTHER && teller != 2)
        CHECK_OK(teller == 0 ? tutti_peers_signal(mine->peers, 1, 0, NULL)
                             : tutti_peers_wait_signal(mine->peers, 0, 0, NULL));
    if (way == BARRIER)
        CHECK_OK(tutti_peers_barrier(mine->peers, 0, NULL));
    if (way == COLLECTIVE)
        CHECK_OK(tutti_barrier(mine->group, NULL));
    if (way == OWN_GET && teller == 0) {
        CHECK_OK(tutti_peers_get(mine->peers, 2, 64, &seen, sizeof seen, NULL));
        CHECK_EQ(seen, round);
    }
    if (way == RENDEZVOUS) {
        block other = meet(tutti_group_world(mine->group), 4096);
        leave(&other);
    }
}

static void whatever_tells_of_it(tutti_world *world) {
    block mine = meet(world, 4096);
    if (mine.rank == 0)
        be_late(network_of(&mine), 2);
    for (uint64_t round = 1; round <= 2 * WAYS; round++) {
        int way = (int)(round % WAYS), looks = way == TO_ANOTHER ? 1 : 2;
        uint64_t seen = 0;
        if (mine.rank == 0)
            CHECK_OK(tutti_peers_put(mine.peers, 2, 64, &round, sizeof round, NULL));
        tell(&mine, way, round);
        if (mine.rank == looks && way != OWN_GET) {
            if (looks == 2)
                memcpy(&seen, mine.data + 64, sizeof seen);
            else
                CHECK_OK(tutti_peers_get(mine.peers, 2, 64, &seen, sizeof seen, NULL));
            if (seen != round)
                printf("    by way %d\n", way);
            CHECK_EQ(seen, round);
        }
        CHECK_OK(tutti_peers_barrier(mine.peers, 1, NULL));
    }
    leave(&mine);
}

TEST(whatever_tells_of_a_write_comes_after_it_however_late_that_is) {
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    with_keys(one_on_three, 3, whatever_tells_of_it);
}

/* A thread of rank 0 puts all the time, so that there is always something that has not arrived. Whoever waits for what
 * was put before is done all the same: a get, a signal, a collective, and the end of a block on either side. */
static _Atomic uint64_t puts_so_far;

static void *put_on(void *argument) {
    const block *busy = argument;
    for (uint64_t count = 1; atomic_load(&never_quiet); atomic_store(&puts_so_far, count++)) {
        CHECK_OK(tutti_peers_put(busy->peers, 1, 0, &count, sizeof count, NULL));
        usleep(20);
    }
    return NULL;
}

static void puts_go_on(tutti_world *world) {
    block busy = meet(world, 4096), mine = meet(world, 4096);
    pthread_t thread;
    tu_network *network = network_of(&mine);
    uint64_t sent = 77, seen = 0;
    const tutti_call *bounded = TUTTI_OPTIONS(tutti_call, .timeout_ns = 60 * TU_SECOND); /* so that it fails at all */
    if (mine.rank == 0) {
        be_late(network, 1);
        atomic_store(&never_quiet, true);
        CHECK(pthread_create(&thread, NULL, put_on, &busy) == 0);
        while (atomic_load(&puts_so_far) < 10)
            usleep(1000);
        CHECK_OK(tutti_peers_put(mine.peers, 1, 0, &sent, sizeof sent, NULL));
        CHECK_OK(tutti_peers_get(mine.peers, 1, 0, &seen, sizeof seen, bounded));
        CHECK_EQ(seen, sent);
        CHECK_OK(tutti_peers_signal(mine.peers, 1, 0, bounded));
    } else {
        CHECK_OK(tutti_peers_wait_signal(mine.peers, 0, 0, NULL));
        memcpy(&seen, mine.data, sizeof seen);
        CHECK_EQ(seen, sent);
    }
    CHECK_OK(tutti_barrier(mine.group, NULL));
    leave(&mine);
    CHECK_OK(tutti_barrier(mine.group, NULL)); /* nobody was cut off */
    pthread_mutex_lock(&network->lock);
    CHECK(!network->peers[1 - mine.rank].lost);
    pthread_mutex_unlock(&network->lock);
    if (mine.rank == 0) {
        atomic_store(&never_quiet, false);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    CHECK_OK(tutti_barrier(mine.group, NULL));
    leave(&busy);
}

TEST(who_waits_for_what_was_put_does_not_wait_for_what_is_put_meanwhile) {
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    with_keys(one_each, 2, puts_go_on);
}

/* ---- keys and bounds ---- */

static void outside_of_the_block(tutti_world *world) {
    block mine = meet(world, 4096);
    unsigned char page[64];
    unsigned char *pad = tutti_peers_signal_pad(mine.peers, mine.rank);
    memset(page, 0xee, sizeof page);
    CHECK_STATUS(tutti_peers_put(mine.peers, 1 - mine.rank, 4090, page, sizeof page, NULL), TUTTI_ERROR_RANGE);
    static const uint64_t offsets[] = { 4090, 4096, 1 << 20, UINT64_MAX - 8, UINT64_MAX };
    tu_network_share *share = mine.peers->backend.share;
    for (int i = 0; i < 5; i++) {
        tu_network_transfer transfer;
        tu_network_put_by_key(share, 1 - mine.rank, offsets[i], page, sizeof page, &transfer);
        CHECK(transfer.over && transfer.refused);
        tu_network_get_by_key(share, 1 - mine.rank, offsets[i], page, sizeof page, &transfer);
        CHECK(transfer.over && transfer.refused && page[0] == 0xee);
    }
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    for (size_t i = 0; i < 4096; i++)
        CHECK_EQ(mine.data[i], 0);
    for (size_t i = 0; i < 64; i++)
        CHECK_EQ(pad[i], 0);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    leave(&mine);
}

TEST(bytes_outside_of_a_block_are_refused_before_they_are_sent) {
    with_keys(one_each, 2, outside_of_the_block);
}

#define ODDITIES 7
static void make_odd(tu_network_key *key, int odd) {
    key->magic ^= odd == 0 ? 1 : 0;
    key->version += odd == 1 ? 1 : 0;
    key->key_bytes = odd == 2 ? TU_NETWORK_KEY_BYTES + 1 : key->key_bytes;
    key->number = odd == 3 ? 0 : key->number;
    key->bytes += odd == 4 ? 4096 : 0;
    key->bytes -= odd == 5 ? 8 : 0;
    key->address = odd == 6 ? UINT64_MAX - 4000 : key->address; /* its end would be before its beginning */
}

static void odd_keys(tutti_world *world) {
    block mine = meet(world, 4096);
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(mine.group, &side));
    tu_network_key good, key;
    tu_network_share *share;
    CHECK_OK(tu_network_share_make(side, mine.data, 4096, &good, &share));
    int other = 1 - mine.rank;
    for (size_t at = 0; at < offsetof(tu_network_key, key) + good.key_bytes; at++) {
        if (at >= offsetof(tu_network_key, reserved) && at < offsetof(tu_network_key, checksum))
            continue;
        key = good;
        ((unsigned char *)&key)[at] ^= 0x11; /* any byte of it: at the latest the checksum tells */
        CHECK_STATUS(tu_network_share_meet(share, other, &key), TUTTI_ERROR_PROTOCOL);
        CHECK(!tu_network_reaches(share, other));
    }
    for (int odd = 0; odd < ODDITIES; odd++) { /* with a checksum that is right */
        key = good;
        make_odd(&key, odd);
        tu_network_key_seal(&key);
        if (tu_network_share_meet(share, other, &key) != TUTTI_ERROR_PROTOCOL)
            printf("    oddity %d\n", odd);
        CHECK_STATUS(tu_network_share_meet(share, other, &key), TUTTI_ERROR_PROTOCOL);
        CHECK(!tu_network_reaches(share, other));
    }
    memset(&key, 0, sizeof key);
    CHECK_STATUS(tu_network_share_meet(share, other, &key), TUTTI_ERROR_PROTOCOL);
    CHECK(strstr(tutti_error_message(), "no key") != NULL);
    key = good;
    key.version++;
    CHECK_STATUS(tu_network_share_meet(share, other, &key), TUTTI_ERROR_PROTOCOL);
    CHECK(strstr(tutti_error_message(), "version") != NULL);
    tu_network_key_none(&key); /* one that has none is reached by messages */
    CHECK_OK(tu_network_share_meet(share, other, &key));
    CHECK(!tu_network_reaches(share, other));
    tu_network_share_end(share);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    leave(&mine);
}

TEST(a_key_that_is_not_whole_is_refused) {
    with_keys(one_each, 2, odd_keys);
}

/* Rank 0 takes its key back before rank 1 has met it: it is not taken then, and what came before it is. */
static void taken_back_before(tutti_world *world) {
    block mine = meet(world, 4096);
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(mine.group, &side));
    tutti_store *store = tutti_world_store(world);
    for (int round = 0; round < 3; round++) {
        char told[32], over[32];
        snprintf(told, sizeof told, "key %d", round);
        snprintf(over, sizeof over, "taken back %d", round);
        tu_network_key key;
        tu_network_share *share;
        CHECK_OK(tu_network_share_make(side, mine.data, 4096, &key, &share));
        CHECK_OK(tutti_barrier(mine.group, NULL)); /* both have one that waits to be met */
        if (mine.rank == 0) {
            CHECK_OK(tutti_store_set(store, told, &key, sizeof key));
            tu_network_share_end(share);
            CHECK_OK(tutti_store_set(store, over, "", 0));
        } else {
            void *value;
            size_t bytes;
            CHECK_OK(tutti_store_wait(store, (const char *const[]){ over }, 1, 0));
            CHECK_OK(tutti_store_get(store, told, 0, &value, &bytes));
            CHECK_EQ(bytes, sizeof key);
            memcpy(&key, value, sizeof key);
            tutti_free(value);
            CHECK_OK(tu_network_share_meet(share, 0, &key));
            CHECK(!tu_network_reaches(share, 0));
            tu_network_share_end(share);
            pthread_mutex_lock(&side->network->lock);
            tu_network_drive(side->network);
            CHECK(side->network->revocations == NULL && side->network->peers[0].revocations == 0);
            pthread_mutex_unlock(&side->network->lock);
        }
        CHECK_OK(tutti_barrier(mine.group, NULL));
    }
    leave(&mine);
}

TEST(a_key_that_was_taken_back_before_it_was_met_is_not_taken) {
    with_keys(one_each, 2, taken_back_before);
}

static tutti_status connect_nowhere(void *state, int peer, const void *address, size_t bytes) {
    (void)state, (void)address, (void)bytes;
    return tu_error(TUTTI_ERROR_NETWORK, "rank %d cannot be reached today", peer);
}

/* Rank 1 cannot connect to rank 0, which has made a key by then: all fail alike, and go on. */
static void cannot_connect(tutti_world *world) {
    static tu_network_part part;
    block mine = { .group = tutti_world_group(world), .rank = tutti_group_rank(tutti_world_group(world)) };
    tu_network *network = network_of(&mine);
    const tu_network_part *whole = network->part;
    part = *whole;
    part.connect = mine.rank == 1 ? connect_nowhere : whole->connect;
    pthread_mutex_lock(&network->lock);
    network->part = &part;
    pthread_mutex_unlock(&network->lock);
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &mine.memory));
    CHECK_STATUS(tutti_memory_rendezvous(mine.memory, mine.group, &mine.peers), TUTTI_ERROR_NETWORK);
    CHECK(strstr(tutti_error_message(), "today") != NULL);
    if (mine.rank == 0) /* it asks nobody for its key: who could not answer */
        CHECK_OK(tutti_store_set(tutti_world_store(world), "failed", "", 0));
    else
        CHECK_OK(tutti_store_wait(tutti_world_store(world), (const char *const[]){ "failed" }, 1, 0));
    pthread_mutex_lock(&network->lock);
    network->part = whole;
    CHECK(network->shares == NULL);
    CHECK(!network->peers[1 - mine.rank].lost);
    pthread_mutex_unlock(&network->lock);
    CHECK_OK(tutti_barrier(mine.group, NULL)); /* nobody was cut off */
    tutti_memory_release(mine.memory);
    mine = meet(world, 4096);
    CHECK(tu_network_reaches(mine.peers->backend.share, 1 - mine.rank));
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    leave(&mine);
}

TEST(a_rendezvous_that_fails_since_somebody_cannot_connect_cuts_nobody_off) {
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    with_keys(one_each, 2, cannot_connect);
}

static tutti_status share_nothing(void *state, void *data, size_t bytes, void **region, void *key, size_t *key_bytes) {
    (void)state, (void)data, (void)region, (void)key, (void)key_bytes;
    return tu_error(TUTTI_ERROR_MEMORY, "the block of %zu bytes cannot be registered", bytes);
}

/* Rank 1 cannot register its memory: where the user insists that is an error of all, else it is reached by messages,
 * and reaches the other by key. */
static void cannot_register(tutti_world *world) {
    static tu_network_part part;
    block first = meet(world, 4096);
    tu_network *network = network_of(&first);
    const tu_network_part *whole = network->part;
    char *insists = world->settings.value[TU_SETTING_RMA].text;
    part = *whole;
    part.share = share_nothing;
    for (int life = 0; life < 2; life++) {
        pthread_mutex_lock(&network->lock);
        network->part = first.rank == 1 ? &part : whole;
        world->settings.value[TU_SETTING_RMA].text = life == 1 ? (char[]){ "auto" } : insists;
        pthread_mutex_unlock(&network->lock);
        tutti_memory *memory;
        tutti_peers *peers;
        CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
        CHECK_STATUS(tutti_memory_rendezvous(memory, first.group, &peers), life == 0 ? TUTTI_ERROR_MEMORY : TUTTI_OK);
        CHECK(life == 1 || strstr(tutti_error_message(), "registered") != NULL);
        if (life == 1) {
            int other = 1 - first.rank, sent = 7 + first.rank, got;
            CHECK_EQ(tu_network_reaches(peers->backend.share, other), first.rank == 1);
            CHECK_OK(tutti_peers_put(peers, other, 0, &sent, sizeof sent, NULL));
            CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
            CHECK_OK(tutti_peers_get(peers, other, 0, &got, sizeof got, NULL));
            CHECK_EQ(got, 7 + first.rank);
            CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
            tutti_peers_release(peers);
        }
        tutti_memory_release(memory);
        world->settings.value[TU_SETTING_RMA].text = insists;
    }
    pthread_mutex_lock(&network->lock);
    network->part = whole;
    pthread_mutex_unlock(&network->lock);
    leave(&first);
}

TEST(memory_that_cannot_be_registered_is_reached_by_messages_unless_the_user_insists) {
    if (test_sanitized())
        SKIP("the network's thread looks at what this test replaces");
    setenv("TUTTI_LOG_FILE", "/dev/null", 1); /* it is told */
    with_keys(one_each, 2, cannot_register);
    unsetenv("TUTTI_LOG_FILE");
}

static void no_keys(tutti_world *world) {
    block mine = meet(world, 4096);
    CHECK(mine.peers->backend.share == NULL);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    leave(&mine);
}

static void wrong_setting(tutti_world *world) {
    CHECK_STATUS(tutti_barrier(tutti_world_group(world), NULL), TUTTI_ERROR_ARGUMENT);
    CHECK(strstr(tutti_error_message(), "TUTTI_RMA") != NULL);
}

TEST(without_such_a_fabric_nothing_goes_by_key_unless_it_is_asked_for) {
    on_hosts(one_each, 2, no_keys);
    setenv("TUTTI_RMA", "off", 1);
    on_hosts(one_each, 2, no_keys);
    setenv("TUTTI_RMA", "perhaps", 1);
    on_hosts(one_each, 2, wrong_setting);
    unsetenv("TUTTI_RMA");
    setenv("UCX_TLS", "tcp", 1); /* of the user's choice: and still none that has it */
    on_hosts(one_each, 2, no_keys);
    unsetenv("UCX_TLS");
}

/* ---- the end of a block ---- */

/* Rank 0 puts and gets all the time, while rank 1 releases its block: what comes later moves nothing. */
static void released_meanwhile(tutti_world *world) {
    block mine = meet(world, 1 << 20);
    tutti_group *last;
    unsigned char *page = calloc(1, 1 << 20);
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &last));
    CHECK_OK(tutti_barrier(last, NULL));
    if (mine.rank == 1) {
        CHECK_OK(tutti_store_wait(tutti_world_store(world), (const char *const[]){ "begun" }, 1, 0));
        leave(&mine);
        CHECK(network_of(&(block){ .group = last })->shares == NULL);
    } else {
        tutti_status status = TUTTI_OK;
        memset(page, 1, 1 << 20);
        for (bool begun = false; status == TUTTI_OK; begun = true) {
            CHECK_OK(tutti_peers_put(mine.peers, 1, 0, page, 1 << 20, NULL));
            if (!begun)
                CHECK_OK(tutti_store_set(tutti_world_store(world), "begun", "", 0));
            status = tutti_peers_get(mine.peers, 1, 0, page, 4096, NULL);
        }
        CHECK_STATUS(status, TUTTI_ERROR_STATE);
        CHECK(strstr(tutti_error_message(), "released the block") != NULL);
        CHECK_OK(tutti_peers_put(mine.peers, 1, 0, page, 1 << 20, NULL)); /* as a message that finds nobody */
        leave(&mine);
    }
    CHECK_OK(tutti_barrier(last, NULL)); /* the connection stands */
    tutti_group_release(last);
    free(page);
}

TEST(a_block_that_is_released_while_others_put_into_it_is_written_no_more) {
    for (int i = 0; i < (test_sanitized() ? 2 : 5); i++)
        with_keys(one_each, 2, released_meanwhile);
}

/* Rank 1 has closed its world: puts and gets say so, as by messages, and not that it released a block. */
static void closed_before(tutti_world *world) {
    block mine = meet(world, 4096);
    unsigned char page[64] = { 0 };
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    if (mine.rank == 0) {
        tu_network *network = network_of(&mine);
        tu_network_group *side;
        CHECK_OK(tu_network_group_get(mine.group, &side));
        for (bool gone = false; !gone;) {
            tu_network_poll(side);
            pthread_mutex_lock(&network->lock);
            gone = network->peers[1].gone;
            pthread_mutex_unlock(&network->lock);
        }
        CHECK_STATUS(tutti_peers_get(mine.peers, 1, 0, page, sizeof page, NULL), TUTTI_ERROR_GONE);
        CHECK(strstr(tutti_error_message(), "rank 1 of group 0 on ") != NULL);
        CHECK_STATUS(tutti_peers_put(mine.peers, 1, 0, page, sizeof page, NULL), TUTTI_ERROR_GONE);
    }
    leave(&mine);
}

TEST(puts_and_gets_of_a_rank_that_closed_its_world_say_so) {
    with_keys(one_each, 2, closed_before);
}

/* Whether all threads of a process are stopped. The number is that of the namespace whose /proc this is. */
static bool is_stopped(const char *process) {
    char path[400], text[512], *state;
    snprintf(path, sizeof path, "/proc/%s/task", process);
    DIR *threads = opendir(path);
    bool all = threads != NULL;
    for (struct dirent *entry; all && (entry = readdir(threads)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/%s/task/%s/stat", process, entry->d_name);
        FILE *stat = fopen(path, "r");
        size_t bytes = stat != NULL ? fread(text, 1, sizeof text - 1, stat) : 0;
        text[bytes] = 0;
        state = strrchr(text, ')'); /* behind the name */
        all = state != NULL && strncmp(state, ") T", 3) == 0;
        if (stat != NULL)
            fclose(stat);
    }
    if (threads != NULL)
        closedir(threads);
    return all;
}

/* Rank 0 is stopped, with the key of rank 1, which releases its block: the key cannot be had back, so the connection
 * ends. */
static void stopped_with_a_key(tutti_world *world) {
    block mine = meet(world, 4096);
    char path[128], stopped[128], self[32] = "";
    snprintf(path, sizeof path, "%s.released", url + 7);
    snprintf(stopped, sizeof stopped, "%s.stopped", url + 7);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    if (mine.rank == 0) {
        CHECK(readlink("/proc/self", self, sizeof self - 1) > 0);
        if (fork() == 0) {
            while (!is_stopped(self))
                usleep(1000);
            CHECK(fclose(fopen(stopped, "w")) == 0);
            while (unlink(path) != 0)
                usleep(5000);
            kill(getppid(), SIGCONT);
            _exit(0);
        }
        raise(SIGSTOP);
        tutti_status status = tutti_barrier(mine.group, NULL);
        CHECK(status == TUTTI_ERROR_DEAD || status == TUTTI_ERROR_GONE);
        leave(&mine);
    } else {
        tu_network *network = network_of(&mine);
        while (unlink(stopped) != 0)
            usleep(1000);
        leave(&mine);
        pthread_mutex_lock(&network->lock);
        CHECK(network->peers[0].lost && strstr(network->peers[0].why, "the key") != NULL);
        pthread_mutex_unlock(&network->lock);
        CHECK(fclose(fopen(path, "w")) == 0);
    }
}

TEST(who_does_not_give_a_key_back_is_cut_off) {
    setenv("TUTTI_LOG_FILE", "/dev/null", 1); /* it is told */
    with_keys(one_each, 2, stopped_with_a_key);
    unsetenv("TUTTI_LOG_FILE");
}

/* ---- deaths ---- */

/* Rank 2 dies while rank 0 puts into its block, and rank 1 gets from it. That those two should die, while rank 2 looks
 * on, is left out: UCX's emulation, which answers them in rank 2, ends that process then. */
static void dies_amid_puts(tutti_world *world) {
    block mine = meet(world, 8 << 20);
    unsigned char *page = calloc(1, 8 << 20);
    tutti_status status = tutti_peers_barrier(mine.peers, 0, NULL);
    if (mine.rank == 2 && fork() == 0) {
        usleep(2000 + (unsigned)(tu_clock_now() / 1000 % 20000));
        kill(getppid(), SIGKILL);
        _exit(0);
    }
    while (status == TUTTI_OK) {
        if (mine.rank == 0)
            status = tutti_peers_put(mine.peers, 2, 0, page, 8 << 20, NULL);
        else if (mine.rank == 1)
            status = tutti_peers_get(mine.peers, 2, 0, page, 8 << 20, NULL);
        else
            status = tutti_peers_wait_signal(mine.peers, 0, 1, NULL);
    }
    CHECK_STATUS(status, TUTTI_ERROR_DEAD);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 2);
    free(page);
    leave(&mine);
}

TEST(a_death_amid_puts_and_gets_by_key_is_named_on_every_host) {
    for (int i = 0; i < (test_sanitized() ? 2 : 6); i++)
        with_keys(one_on_three, 3, dies_amid_puts);
}

/* A put that nobody takes runs out of time; its bytes are the caller's again. */
static void nobody_takes(tutti_world *world) {
    block mine = meet(world, 32 << 20);
    tutti_store *store = tutti_world_store(world);
    unsigned char *page = calloc(1, 32 << 20);
    CHECK_OK(tutti_peers_barrier(mine.peers, 0, NULL));
    if (mine.rank == 1) {
        pthread_mutex_lock(&network_of(&mine)->lock); /* so that it does nothing */
        CHECK_OK(tutti_store_set(store, "held", "", 0));
        CHECK_OK(tutti_store_wait(store, (const char *const[]){ "over" }, 1, 0));
        kill(getpid(), SIGKILL);
    }
    CHECK_OK(tutti_store_wait(store, (const char *const[]){ "held" }, 1, 0));
    CHECK_STATUS(tutti_peers_put(mine.peers, 1, 0, page, 32 << 20,
                                 TUTTI_OPTIONS(tutti_call, .timeout_ns = 100 * TU_MILLISECOND)),
                 TUTTI_ERROR_TIMEOUT);
    free(page);
    CHECK_OK(tutti_store_set(store, "over", "", 0));
    leave(&mine);
}

TEST(a_put_that_runs_out_of_time_leaves_nothing_that_is_still_read) {
    with_keys(one_each, 2, nobody_takes);
}
