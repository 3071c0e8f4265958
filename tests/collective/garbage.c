/* SPDX-License-Identifier: Apache-2.0
 *
 * A peer that writes garbage into shared memory can stop a job. It cannot make another rank read or write outside of
 * its own blocks: every number in a packet is checked.
 */
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/named.h>
#include <tutti/peers.h>
#include <tutti/trace.h>

#include "../harness.h"
#include "collective/collective.h"
#include "collective/packet.h"
#include "job/page.h"
#include "world/world.h"

#define COUNT 5000

/* Where a packet from rank 0 to rank 1 lies. */
static tu_packet *packet_at(tutti_group *group, uint64_t number) {
    tu_channel *channel = (tu_channel *)(void *)((unsigned char *)group->page + sizeof(tu_group_page)) + 1;
    return &channel->packets[(number - 1) % TU_PACKETS];
}

/* The next packet from rank 0 to rank 1, without asking the library. */
static tu_packet *forge(tutti_group *group, uint64_t number, tu_packet_kind kind) {
    tu_packet *packet = packet_at(group, number);
    packet->kind = kind;
    packet->tag = 0;
    packet->dtype = TUTTI_F32;
    packet->message = 1;
    packet->bytes = COUNT * sizeof(float);
    packet->index = 0;
    packet->offset = 0;
    return packet;
}

static void post(tu_packet *packet, uint64_t number) {
    atomic_store_explicit(&packet->number, number, memory_order_release);
}

static void expect_garbage(tutti_group *group) {
    static _Thread_local float out[COUNT];
    CHECK_STATUS(tutti_recv(group, out, COUNT, TUTTI_F32, 0, 0, NULL), TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("rank 0 published");
}

TEST_WORLD(a_message_that_points_outside_of_its_block_is_refused, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 65536, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    if (tutti_group_rank(group) == 0) {
        tu_packet *packet = forge(group, 1, TU_PACKET_MESSAGE);
        packet->index = peers->index;
        packet->offset = UINT64_C(1) << 40;
        post(packet, 1);
    } else {
        expect_garbage(group);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

static void send_bad_fragment(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    const uint64_t *bad = argument; /* index, offset, bytes */
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0) {
        post(forge(group, 1, TU_PACKET_MESSAGE), 1);
        tu_packet *packet = forge(group, 2, TU_PACKET_FRAGMENT);
        packet->index = (uint32_t)bad[0];
        packet->offset = bad[1];
        packet->bytes = bad[2];
        post(packet, 2);
    } else {
        expect_garbage(group);
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(fragments_that_their_message_does_not_have_are_refused) {
    static const uint64_t bad[][3] = {
        { 77, 0, 4096 }, { 0, UINT64_C(1) << 40, 4096 }, { 0, 0, COUNT * sizeof(float) + 4 }, { 1, 0, UINT64_MAX }
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        test_threads(2, send_bad_fragment, (void *)(uintptr_t)bad[i]);
}

static void send_bad_place(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    const uint64_t *bad = argument; /* fragment, bytes of the message, cell */
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0) {
        tu_packet *packet = forge(group, 1, TU_PACKET_MESSAGE);
        packet->bytes = bad[1];
        packet->fragment = (uint32_t)bad[0];
        packet->cell = (uint32_t)bad[2];
        /* Not before the receive waits: a message that came early is asked for again. */
        CHECK_OK(tutti_barrier(group, NULL));
        post(packet, 1);
    } else {
        tutti_work *work;
        static _Thread_local float out[COUNT];
        CHECK_OK(tutti_recv(group, out, COUNT, TUTTI_F32, 0, 0, TUTTI_OPTIONS(tutti_call, .work = &work)));
        CHECK_OK(tutti_barrier(group, NULL));
        CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_PROTOCOL);
        CHECK_MESSAGE("rank 0 published");
        tutti_work_release(work);
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(messages_in_fragments_that_their_sender_does_not_have_are_refused) {
    static const uint64_t bad[][3] = {
        { 77, 4096, 0 },         { UINT32_MAX, 4096, 0 }, { 0, 1024, 17 },
        { 0, 1024, UINT32_MAX }, { 0, 2052, 1 },          { 1, COUNT * sizeof(float), 0 }
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        test_threads(2, send_bad_place, (void *)(uintptr_t)bad[i]);
}

/* The same where the packet came before its receive, which is kept as unexpected or looked at by the lane. */
static void send_bad_cell(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    const uint64_t *bad = argument; /* bytes, cell, whether another message is awaited first */
    static _Thread_local float out[512];
    int value = 0, rank = tutti_group_rank(group);
    /* A message to itself, so that there is what the lane needs. */
    CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, rank, 0, NULL));
    CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, rank, 0, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 0) {
        tu_packet *packet = forge(group, 1, TU_PACKET_MESSAGE);
        packet->bytes = bad[0];
        packet->cell = (uint32_t)bad[1];
        post(packet, 1);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 1) {
        if (bad[2] != 0)
            CHECK_STATUS(tutti_recv(group, &value, 1, TUTTI_I32, 0, 9,
                                    TUTTI_OPTIONS(tutti_call, .timeout_ns = 20 * 1000 * 1000)),
                         TUTTI_ERROR_TIMEOUT);
        CHECK_STATUS(tutti_recv(group, out, 512, TUTTI_F32, 0, 0, NULL), TUTTI_ERROR_PROTOCOL);
        CHECK_MESSAGE("rank 0 published");
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(messages_in_cells_that_their_sender_does_not_have_are_refused_whenever_they_came) {
    static const uint64_t bad[][3] = {
        { 1024, 17, 0 }, { 1024, 17, 1 }, { 2048, UINT32_MAX, 0 }, { 2048, UINT32_MAX, 1 }
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        test_threads(2, send_bad_cell, (void *)(uintptr_t)bad[i]);
}

/* ---- a length that changes between two looks ---- */

#ifdef __x86_64__
#define TRAP_FLAG 0x100 /* in the flags register: one instruction, then SIGTRAP */
#define PAGE 4096

/* While a trap is set, each instruction that touches the packet's page runs alone, and the packet is longer from the
 * first look at its length on. */
static struct {
    tu_packet *packet;
    uint64_t changed; /* what the length becomes */
    _Atomic int looks;
} trap;
static _Thread_local void *touched;

static void *trapped_page(void) {
    return (void *)((uintptr_t)trap.packet / PAGE * PAGE);
}

static void on_touch(int signal_number, siginfo_t *info, void *context) {
    (void)signal_number;
    if ((uintptr_t)info->si_addr / PAGE != (uintptr_t)trap.packet / PAGE)
        abort();
    touched = info->si_addr;
    mprotect(trapped_page(), PAGE, PROT_READ | PROT_WRITE);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
}

static void on_step(int signal_number, siginfo_t *info, void *context) {
    (void)signal_number, (void)info;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    if (touched == &trap.packet->bytes) {
        atomic_fetch_add(&trap.looks, 1);
        trap.packet->bytes = trap.changed;
    }
    mprotect(trapped_page(), PAGE, PROT_NONE);
}

static void set_trap(tu_packet *packet, uint64_t changed) {
    struct sigaction on_segv = { .sa_sigaction = on_touch, .sa_flags = SA_SIGINFO };
    struct sigaction on_trap = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };
    trap.packet = packet;
    trap.changed = changed;
    CHECK_EQ(sigaction(SIGSEGV, &on_segv, NULL), 0);
    CHECK_EQ(sigaction(SIGTRAP, &on_trap, NULL), 0);
    CHECK_EQ(mprotect(trapped_page(), PAGE, PROT_NONE), 0);
}

static void lift_trap(void) {
    CHECK_EQ(mprotect(trapped_page(), PAGE, PROT_READ | PROT_WRITE), 0);
    signal(SIGSEGV, SIG_DFL);
    signal(SIGTRAP, SIG_DFL);
}

/* A message in its packet, in a fragment, in symmetric memory: the receive asks for what it says at first. */
static void grow(tutti_world *world, void *argument) {
    static const size_t lengths[] = { sizeof(float), 256, 4096 };
    const int *way = argument;
    size_t bytes = lengths[*way];
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 65536, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    if (tutti_group_rank(group) == 0) {
        tu_packet *packet = forge(group, 1, TU_PACKET_MESSAGE);
        packet->bytes = bytes;
        packet->fragment = *way == 1;
        packet->index = *way == 2 ? peers->index : 0;
        post(packet, 1);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1) {
        unsigned char out[8192];
        memset(out, 0x5a, sizeof out);
        tutti_received received = TUTTI_RECEIVED_INIT;
        tu_packet *packet = packet_at(group, 1);
        set_trap(packet, 2 * bytes);
        tutti_status status = tutti_recv(group, out, bytes / sizeof(float), TUTTI_F32, 0, 0,
                                         TUTTI_OPTIONS(tutti_call, .received = &received));
        lift_trap();
        CHECK_OK(status);
        CHECK_EQ(received.count, bytes / sizeof(float));
        CHECK_EQ(trap.looks, 1);
        CHECK_EQ(packet->bytes, 2 * bytes);
        for (size_t i = bytes; i < sizeof out; i++)
            CHECK_EQ(out[i], 0x5a);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(a_message_that_grows_after_it_was_checked_overwrites_nothing) {
    if (test_sanitized())
        test_skip("a sanitizer has its own eyes on memory faults");
    for (int way = 0; way < 3; way++)
        test_processes(2, grow, &way);
}
#endif

/* ---- splits ---- */

/* Rank 1 has checked its splits and waits in the call when rank 0 spoils them. */
static void spoil_splits(tutti_world *world, void *argument) {
    const int64_t *garbage = argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(world, 65536, NULL, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    int64_t *splits = tutti_memory_data(memory), *theirs = tutti_peers_buffer(peers, 1 - rank);
    splits[0] = splits[1] = 2;
    tutti_rows rows = TUTTI_ROWS_INIT;
    rows.in = (char *)splits + 8192;
    rows.out = (char *)splits + 32768;
    rows.in_rows = 4;
    rows.out_rows = 4;
    rows.dtype = TUTTI_F32;
    CHECK_OK(tutti_barrier(group, NULL));
    tu_record_view view;
    while (rank == 0 && !(tu_recorder_current(tu_job_recorder(world->job, 1), 0, &view) &&
                          view.info.operation == TU_OPERATION_ALL_TO_ALL_VDEV))
        usleep(1000);
    if (rank == 0) {
        __atomic_store_n(&theirs[0], garbage[0], __ATOMIC_RELAXED);
        __atomic_store_n(&theirs[1], garbage[1], __ATOMIC_RELAXED);
    }
    tutti_status status = tutti_all_to_all_vdev(group, &rows, splits, splits + 8, NULL);
    CHECK(status == TUTTI_ERROR_PROTOCOL || status == TUTTI_ERROR_MISMATCH);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(splits_that_are_spoilt_while_their_rank_waits_lead_nobody_outside) {
    static const int64_t garbage[][2] = {
        { INT64_MAX, INT64_MAX }, { -5, 2 }, { INT64_C(1) << 40, 1 }, { INT64_MIN, INT64_MIN }
    };
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
        test_threads(2, spoil_splits, (void *)(uintptr_t)garbage[i]);
        test_processes(2, spoil_splits, (void *)(uintptr_t)garbage[i]);
    }
}

/* ---- the job's page ---- */

TEST_WORLD_PROCESSES(a_spoilt_head_of_the_jobs_page_leads_nobody_outside, 2) {
    tutti_group *group = tutti_world_group(world);
    tu_page *page = (tu_page *)(uintptr_t)tu_job_page(world->job);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1) { /* all that never changes, the magic number too */
        memset((void *)page, 0xff, offsetof(tu_page, sleepers));
        memset((void *)tu_job_recorder(world->job, 0)->memory, 0xff, 4096);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    for (int round = 0; round < 200; round++) {
        int32_t value = 1, sum;
        CHECK_OK(tutti_all_reduce(group, &value, &sum, 1, TUTTI_I32, TUTTI_SUM, NULL));
        CHECK_EQ(sum, 2);
    }
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 1 << 20, NULL, &memory));
    tutti_memory_release(memory);
    char *text;
    CHECK_OK(tutti_trace_text(world, &text));
    tutti_free(text);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- batches ---- */

/* All-reduces that run as one: rank 0 has said how many of its inputs are there, and waits, when rank 1 spoils that. */
TEST_WORLD(a_batch_in_which_a_rank_gives_nothing_ends, 2) {
    tutti_group *group = tutti_world_group(world);
    int32_t in[2] = { 1, 2 }, out[2];
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1) {
        const tu_collective *state = tu_collective_find(group);
        uint64_t epoch = state->epoch + 1, nothing = 0;
        tu_line *theirs = &state->members[0]->arrive[epoch & 1];
        while (atomic_load_explicit(&theirs->flag, memory_order_acquire) != epoch)
            usleep(1000);
        memcpy(theirs->payload + offsetof(tu_reference, given), &nothing, sizeof nothing);
    }
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int i = 0; i < 2; i++)
        CHECK_OK(tutti_all_reduce(group, &in[i], &out[i], 1, TUTTI_I32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .batch = batch)));
    CHECK_STATUS(tutti_batch_end(batch, NULL), TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("none of its inputs is there");
}
