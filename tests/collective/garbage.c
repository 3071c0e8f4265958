/* SPDX-License-Identifier: Apache-2.0
 *
 * A peer that writes garbage into shared memory can stop a job. It cannot make another rank read or write outside of
 * its own blocks: every number in a packet is checked.
 */
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/named.h>
#include <tutti/peers.h>
#include <tutti/trace.h>

#include "../harness.h"
#include "collective/packet.h"
#include "job/page.h"
#include "world/world.h"

#define COUNT 5000

/* The next packet from rank 0 to rank 1, without asking the library. */
static tu_packet *forge(tutti_group *group, uint64_t number, tu_packet_kind kind) {
    tu_channel *channel = (tu_channel *)(void *)((unsigned char *)group->page + sizeof(tu_group_page)) + 1;
    tu_packet *packet = &channel->packets[(number - 1) % TU_PACKETS];
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
    const uint64_t *bad = argument; /* fragment, bytes of the message */
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0) {
        tu_packet *packet = forge(group, 1, TU_PACKET_MESSAGE);
        packet->bytes = bad[1];
        packet->fragment = (uint32_t)bad[0];
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
    static const uint64_t bad[][2] = { { 77, 4096 }, { UINT32_MAX, 4096 }, { 1, COUNT * sizeof(float) } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        test_threads(2, send_bad_place, (void *)(uintptr_t)bad[i]);
}

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
