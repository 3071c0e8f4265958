/* SPDX-License-Identifier: Apache-2.0
 *
 * What may come from other hosts as messages: any header, any data, in any order, while this rank posts, sends, writes,
 * asks, has windows open, waits to hear what the others do, and shares a block by key with others that do so too. The
 * network is the real one; a part that only looks at what it is given takes UCX's place.
 * rooms: base kernel store job hosts world memory backend/shm
 *
 * A message is seven bytes, what it says, and its data: bits of the first byte choose a header of raw bytes, and
 * data that can be kept; then kind, sender, step, the high and the low byte of the data's length, and one byte whose
 * low half chooses key and sequence and whose high half chooses offset and total. A first byte from 192 on is something
 * that this rank does.
 */
#include "fuzz.h"
#include "memory/network_inner.h"
#include "world/group.h"

#include <tutti/store.h>

enum {
    RANKS = 4,
    BUFFER = 300,
    RECEIPTS = 8,
    DISPATCHES = 8
};

/* ---- a part that sends to nobody ---- */

static int parcels; /* that are kept */

static const char *part_send(void *state, int peer, const void *header, size_t header_bytes, const void *data,
                             size_t bytes, void *token, bool *finished) {
    unsigned sum = 0;
    (void)state, (void)token;
    FUZZ_CHECK(peer > 0 && peer < RANKS && header_bytes == sizeof(tu_network_header) && header != NULL);
    for (size_t i = 0; i < bytes; i++)
        sum += ((const unsigned char *)data)[i]; /* all of it can be read */
    *finished = true;
    return sum == UINT32_MAX ? "it broke" : NULL;
}

static bool part_progress(void *state) {
    (void)state;
    return false;
}

static void part_give_back(void *state, void *parcel) {
    (void)state;
    parcels--;
    free(parcel);
}

/* ---- and moves bytes of nobody ---- */

#define THEIRS UINT64_C(4096) /* where the block of rank 1 lies there, of SHARED bytes */
#define SHARED 200
#define THEIR_NUMBER 3

static void part_disconnect(void *state, int peer) {
    (void)state;
    FUZZ_CHECK(peer > 0 && peer < RANKS);
}

static bool part_direct(void *state, int peer) {
    (void)state, (void)peer;
    return true;
}

static tutti_status part_share(void *state, void *data, size_t bytes, void **region, void *key, size_t *key_bytes) {
    (void)state, (void)bytes;
    *region = data;
    memset(key, 1, *key_bytes = 8);
    return TUTTI_OK;
}

static void part_let_go(void *state, void *what) {
    (void)state;
    FUZZ_CHECK(what != NULL);
}

static const char *part_take_key(void *state, int peer, const void *key, void **taken) {
    (void)key;
    *taken = state;
    FUZZ_CHECK(peer == 1);
    return NULL;
}

static const char *part_write(void *state, int peer, void *key, uint64_t address, const void *from, size_t bytes,
                              void *token, bool *finished) {
    (void)from, (void)token;
    FUZZ_CHECK(key == state && peer == 1 && address >= THEIRS && bytes <= SHARED && address - THEIRS <= SHARED - bytes);
    *finished = true;
    return NULL;
}

static const char *part_read(void *state, int peer, void *key, uint64_t address, void *to, size_t bytes, void *token,
                             bool *finished) {
    return part_write(state, peer, key, address, to, bytes, token, finished);
}

static const char *part_flush(void *state, int peer, void *token, bool *finished) {
    (void)state, (void)token;
    *finished = true;
    return peer == 1 ? NULL : "it was never written to";
}

static const tu_network_part part = { .size = sizeof part,
                                      .send = part_send,
                                      .progress = part_progress,
                                      .give_back = part_give_back,
                                      .disconnect = part_disconnect,
                                      .direct = part_direct,
                                      .share = part_share,
                                      .unshare = part_let_go,
                                      .take_key = part_take_key,
                                      .drop_key = part_let_go,
                                      .write = part_write,
                                      .read = part_read,
                                      .flush = part_flush };

/* ---- a rank ---- */

typedef struct target {
    tutti_store *store;
    tutti_world *world;
    tutti_group *group;
    int ranks[RANKS], job_ranks[RANKS];
    /* Of the world and the group, while tables of so many ranks are in their place. */
    int *group_ranks, *group_job_ranks, *job_rank_of, *node_of;
    tu_network network;
    tu_network_group *side;
    tu_receipt receipts[RECEIPTS];
    tu_dispatch dispatches[DISPATCHES];
    int receipt_count, dispatch_count;
    unsigned char *buffers[RECEIPTS + 2]; /* of the receipts, of the window, of the get */
    tu_network_window window;
    tu_network_fetch get;
    bool asked;
    tu_network_share *share;
    tu_network_inquiry inquiry;
    tu_doing *doings; /* exactly as many as there are others */
} target;

static void told(void *argument, int member, uint32_t what, uint32_t channel, uint32_t value) {
    (void)argument, (void)what, (void)channel, (void)value;
    FUZZ_CHECK(member >= 0 && member < RANKS);
}

static void silent(tutti_log_level level, const char *subsystem, const char *line, void *user) {
    (void)level, (void)subsystem, (void)line, (void)user;
}

/* The keys of the others were never met: one that is taken back before is remembered. */
static void share_block(target *of) {
    tu_network_key key;
    FUZZ_CHECK(tu_network_share_make(of->side, of->buffers[RECEIPTS], SHARED, &key, &of->share) == TUTTI_OK);
    key.address = THEIRS;
    key.number = THEIR_NUMBER;
    tu_network_key_seal(&key);
    FUZZ_CHECK(tu_network_share_meet(of->share, 1, &key) == TUTTI_OK);
}

static void open_target(target *of) {
    *of = (target){ 0 };
    FUZZ_CHECK(tutti_store_open_memory(&of->store) == TUTTI_OK);
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    options.rank_count = 1;
    options.store = of->store;
    options.log_callback = silent;
    FUZZ_CHECK(tutti_world_open(&options, &of->world) == TUTTI_OK);
    of->group = tutti_world_group(of->world);
    of->world->size = RANKS; /* the others are hosts of which only messages come */
    of->network = (tu_network){ .world = of->world, .part = &part, .most = 1 << 16, .door = 77, .bell = -1 };
    of->network.orphans_end = &of->network.orphans;
    of->network.peers = calloc(RANKS, sizeof *of->network.peers);
    pthread_mutex_init(&of->network.lock, NULL);
    of->side = calloc(1, sizeof *of->side);
    FUZZ_CHECK(of->network.peers != NULL && of->side != NULL);
    for (int rank = 0; rank < RANKS; rank++) {
        of->ranks[rank] = rank;
        of->job_ranks[rank] = rank == 0 ? 0 : -1;
        of->network.peers[rank] = (tu_network_peer){ .known = rank > 0, .connected = rank > 0, .door = 1 };
    }
    of->group_ranks = of->group->ranks;
    of->group_job_ranks = of->group->job_ranks;
    of->job_rank_of = of->world->job_rank_of;
    of->node_of = of->world->node_of;
    of->group->ranks = of->world->node_of = of->ranks; /* each on a host of its own */
    of->group->job_ranks = of->world->job_rank_of = of->job_ranks;
    of->group->size = RANKS;
    of->side->network = &of->network;
    of->side->group = of->group;
    of->side->member_of = of->ranks;
    of->side->flows = calloc(RANKS, sizeof *of->side->flows);
    of->side->puts = calloc(RANKS, sizeof *of->side->puts);
    of->side->other = -1;
    FUZZ_CHECK(tu_network_letters_make(of->side) == TUTTI_OK);
    of->network.groups = of->side;
    for (int i = 0; i < RECEIPTS + 2; i++)
        of->buffers[i] = calloc(1, BUFFER);
    of->window = (tu_network_window){
        .number = 3, .data = of->buffers[RECEIPTS], .bytes = 200, .words_offset = 208, .words_bytes = 80, .told = told
    };
    tu_network_window_open(of->side, &of->window);
    of->network.state = of;
    share_block(of);
    of->doings = calloc(RANKS - 1, sizeof *of->doings);
    FUZZ_CHECK(of->doings != NULL);
    of->inquiry = (tu_network_inquiry){ .number = 3, .doings = of->doings, .count = RANKS - 1 };
    of->network.inquiry = &of->inquiry;
    for (int rank = 1; rank < RANKS; rank++) {
        of->doings[rank - 1].rank = rank;
        of->network.peers[rank].question = of->inquiry.number;
    }
    tu_network_enter_saying(of->side, 1, &(tu_network_said){ .signature = 9 });
    tu_network_leave(of->side);
}

static void free_list(tu_network *network, tu_network_kept *kept) {
    for (tu_network_kept *next; kept != NULL; kept = next) {
        next = kept->next;
        tu_network_free_kept(network, kept);
    }
}

static void close_target(target *of) {
    tu_network_abandon(of->side);
    if (of->asked)
        tu_network_forget(of->side, &of->get);
    tu_network_window_close(&of->window);
    tu_network_share_drop(of->share);
    tu_network_revocations_free(&of->network);
    tu_network_letters_free(of->side);
    free_list(&of->network, of->side->kept);
    free_list(&of->network, of->network.orphans);
    FUZZ_CHECK(parcels == 0);
    free(of->side->flows);
    free(of->side->puts);
    free(of->side);
    free(of->doings);
    free(of->network.peers);
    pthread_mutex_destroy(&of->network.lock);
    for (int i = 0; i < RECEIPTS + 2; i++)
        free(of->buffers[i]);
    of->group->ranks = of->group_ranks;
    of->group->job_ranks = of->group_job_ranks;
    of->world->job_rank_of = of->job_rank_of;
    of->world->node_of = of->node_of;
    of->group->size = 1;
    of->world->size = 1;
    FUZZ_CHECK(tutti_world_close(of->world) == TUTTI_OK);
    tutti_store_release(of->store);
}

/* ---- what happens ---- */

static void fill(void *argument, void *to, uint64_t offset, size_t bytes) {
    (void)argument, (void)offset;
    memset(to, 1, bytes);
}

static void move_by_key(target *of, unsigned offset, size_t length) {
    tu_network_transfer transfer;
    uint64_t mark = 0;
    if (offset & 1)
        tu_network_get_by_key(of->share, 1, offset, of->buffers[RECEIPTS + 1], length, &transfer);
    else
        tu_network_put_by_key(of->share, 1, offset, of->buffers[RECEIPTS + 1], length, &transfer);
    FUZZ_CHECK(atomic_load(&transfer.over));
    (void)tu_network_written(of->share, 1, &mark);
}

static void act(target *of, unsigned what, unsigned detail) {
    int member = 1 + (int)(detail % (RANKS - 1));
    size_t bytes, length = detail % BUFFER;
    switch (what % 8) {
    case 0:
        if (of->receipt_count == RECEIPTS)
            return;
        of->receipts[of->receipt_count] = (tu_receipt){
            .member = member, .step = detail >> 6, .to = of->buffers[of->receipt_count], .bytes = length
        };
        tu_network_post(of->side, &of->receipts[of->receipt_count++]);
        return;
    case 1:
        if (of->dispatch_count < DISPATCHES)
            tu_network_send(of->side, &of->dispatches[of->dispatch_count++], member, detail >> 6,
                            of->buffers[RECEIPTS + 1], length);
        return;
    case 2:
        tu_network_enter_saying(of->side, of->side->sequence + 1, &(tu_network_said){ .signature = detail % 2 });
        tu_network_leave(of->side);
        return;
    case 3:
        (void)tu_network_write(of->side, member, "head", 4, fill, NULL, 0, length);
        return;
    case 4:
        if (tu_network_letter(of->side, member, &bytes) != NULL)
            tu_network_letter_taken(of->side, member);
        return;
    case 5:
        (void)tu_network_put(of->side, member, 3, detail, of->buffers[RECEIPTS + 1], length);
        (void)tu_network_fenced(of->side, -1, &(uint64_t){ 0 });
        return;
    case 6:
        if (!of->asked)
            of->asked = tu_network_ask_for(of->side, &of->get, member, 3, detail, of->buffers[RECEIPTS + 1], length);
        return;
    default:
        if (detail & 1)
            move_by_key(of, detail >> 1, length);
        tu_network_poll(of->side);
        return;
    }
}

static tu_network_header header_of(const target *of, const uint8_t *what) {
    static const uint64_t numbers[] = { 0, 1, 3, 100, 200, 208, BUFFER, UINT64_MAX - 8 };
    return (tu_network_header){ .magic = TU_NETWORK_MAGIC,
                                .version = TU_NETWORK_VERSION,
                                .door = of->network.door,
                                .key = what[6] & 8 ? of->group->key + 1 : of->group->key,
                                .sequence = what[6] & 4 ? 3 : of->side->sequence + (what[6] & 3) - 1,
                                .offset = numbers[what[6] >> 4 & 7],
                                .total = what[6] & 128 ? (uint64_t)what[4] << 8 | what[5] : numbers[what[6] >> 4 & 7],
                                .kind = what[1],
                                .step = what[3],
                                .from = (int32_t)what[2] - 2,
                                .said = { .signature = what[3] & 64 ? of->get.token : of->side->said.signature } };
}

/* Returns how many bytes of the input it took. */
static size_t deliver(target *of, const uint8_t *what, size_t left) {
    tu_network_header header = header_of(of, what);
    size_t taken = 7, header_bytes = sizeof header, bytes = (size_t)(what[4] << 8 | what[5]) % 2048;
    unsigned char raw[TU_NETWORK_HEADER_BYTES];
    memcpy(raw, &header, sizeof header);
    if (what[0] & 1) { /* any bytes, any length */
        header_bytes = what[6] < left - taken ? what[6] : left - taken;
        memcpy(raw, what + taken, header_bytes < sizeof raw ? header_bytes : sizeof raw);
        header_bytes = header_bytes < sizeof raw ? header_bytes : sizeof raw;
        taken += header_bytes;
    }
    bytes = bytes < left - taken ? bytes : left - taken;
    unsigned char *exact = malloc(header_bytes + 1), *data = malloc(bytes + 1); /* a sanitizer sees a byte too far */
    memcpy(exact, raw, header_bytes);
    memcpy(data, what + taken, bytes);
    bool lasting = (what[0] & 2) != 0;
    parcels += lasting;
    pthread_mutex_lock(&of->network.lock);
    bool kept = tu_network_arrived(&of->network, exact, header_bytes, data, bytes, lasting ? data : NULL);
    pthread_mutex_unlock(&of->network.lock);
    if (!kept || !lasting)
        free(data);
    parcels -= lasting && !kept;
    free(exact);
    return taken + bytes;
}

static void fuzz_one(const uint8_t *data, size_t bytes) {
    target of;
    open_target(&of);
    for (size_t at = 0; at + 7 <= bytes;) {
        if (data[at] >= 192) {
            act(&of, data[at], (unsigned)(data[at + 1] << 8 | data[at + 2]));
            at += 3;
        } else {
            at += deliver(&of, data + at, bytes - at);
        }
    }
    for (int i = 200; i < 208; i++)
        FUZZ_CHECK(of.buffers[RECEIPTS][i] == 0); /* between what may be put and the words */
    for (int i = 0; i < RANKS - 1; i++) {
        size_t length = strnlen(of.doings[i].text, TU_DOING_BYTES);
        FUZZ_CHECK(length < TU_DOING_BYTES);
        for (size_t at = 0; at < length; at++)
            FUZZ_CHECK(of.doings[i].text[at] >= ' ' && of.doings[i].text[at] <= '~');
    }
    close_target(&of);
}

FUZZ_TARGET(wire)
