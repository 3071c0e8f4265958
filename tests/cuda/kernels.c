/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of the CUDA backend, run on the CPU: ranks are threads that launch one kernel after the other, each at
 * its own pace. What the kernels do to memory and how they wait for each other is tried here, without a GPU; what the
 * GPU's own memory order adds to that is not.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "../harness.h"
#include "../instructions.h"
#include "backend/cuda/params.h"
#include "backend/nvshmem/params.h"
#include "emulated/emulated.h"
#include "kernel/kernel.h"

#define MOST 9 /* ranks */
#define THREADS 32
#define ROOM 256 /* packets of one source */
#define STAGE ((uint64_t)65536)
#define SHARE ((uint64_t)4096) /* of a message's stage, for one receiver */

#define BLOCK ((uint64_t)65536) /* bytes of a rank's symmetric block, index 1 of the table */

/* What all ranks share: the control blocks, and where their parts lie. */
typedef struct machine {
    int size;
    unsigned char *blocks; /* symmetric */
    unsigned char *control;
    uint64_t stride, inbox, packets, sent, taken, message_stage, stage, scratch, epochs, packet_epochs, counters, table;
    unsigned char *areas; /* of signals */
    uint64_t area_stride;
    uint64_t timeout_ns;
    tu_cuda_words words[MOST];
    tu_cuda_report reports[MOST];
} machine;

static uint64_t place(uint64_t *end, uint64_t bytes) {
    uint64_t begin = (*end + 127) & ~UINT64_C(127);
    *end = begin + bytes;
    return begin;
}

static void machine_begin(machine *machine, int size) {
    uint64_t end = 0, members = (uint64_t)size;
    memset(machine, 0, sizeof *machine);
    machine->size = size;
    machine->timeout_ns = UINT64_C(3600000000000);
    machine->inbox = place(&end, 8 * members * sizeof(tu_cuda_inbox));
    machine->packets = place(&end, 2 * TU_CUDA_PACKET_STEPS * members * ROOM * sizeof(tu_cuda_packet));
    machine->sent = place(&end, TU_CUDA_MESSAGE_BLOCKS * members * sizeof(tu_cuda_message));
    machine->taken = place(&end, TU_CUDA_MESSAGE_BLOCKS * members * sizeof(tu_cuda_message));
    machine->message_stage = place(&end, members * SHARE);
    machine->stage = place(&end, STAGE);
    machine->scratch = place(&end, STAGE);
    machine->epochs = place(&end, TU_CUDA_BLOCKS * sizeof(tu_cuda_epoch));
    machine->packet_epochs = place(&end, TU_CUDA_PACKET_BLOCKS * sizeof(tu_cuda_epoch));
    machine->counters = place(&end, 2 * TU_CUDA_MESSAGE_BLOCKS * members * sizeof(uint32_t));
    machine->table = place(&end, 2 * sizeof(tu_cuda_mapping));
    machine->stride = (end + 4095) & ~UINT64_C(4095);
    machine->control = aligned_alloc(4096, machine->stride * members);
    memset(machine->control, 0, machine->stride * members);
    machine->blocks = aligned_alloc(4096, BLOCK * members);
    for (int rank = 0; rank < size; rank++) {
        tu_cuda_mapping *first =
            (tu_cuda_mapping *)(machine->control + (uint64_t)rank * machine->stride + machine->table);
        *first = (tu_cuda_mapping){ (uint64_t)(uintptr_t)machine->control, machine->stride };
        first[1] = (tu_cuda_mapping){ (uint64_t)(uintptr_t)machine->blocks, BLOCK };
    }
    machine->area_stride = 65536;
    machine->areas = aligned_alloc(4096, machine->area_stride * members);
    memset(machine->areas, 0, machine->area_stride * members);
}

static void machine_end(machine *machine) {
    free(machine->control);
    free(machine->blocks);
    free(machine->areas);
}

/* A rank's thread, and how many blocks it has launched. */
typedef struct rank {
    machine *machine;
    int rank;
    uint64_t launched;
    uint32_t sequence;
    void (*body)(struct rank *);
    pthread_t thread;
} rank;

static uint64_t own(const rank *rank) {
    return (uint64_t)(uintptr_t)rank->machine->control + (uint64_t)rank->rank * rank->machine->stride;
}

static tu_cuda_group_words words_of(const rank *rank) {
    return (tu_cuda_group_words){ .words = (uint64_t)(uintptr_t)&rank->machine->words[rank->rank],
                                  .report = (uint64_t)(uintptr_t)&rank->machine->reports[rank->rank],
                                  .place = rank->launched + 1 };
}

static tu_cuda_meeting meeting(rank *rank, uint32_t signature) {
    const machine *machine = rank->machine;
    return (tu_cuda_meeting){ .control = (uint64_t)(uintptr_t)machine->control,
                              .stride = machine->stride,
                              .inbox_offset = machine->inbox,
                              .epochs = own(rank) + machine->epochs,
                              .packets = machine->packets,
                              .packet_epochs = own(rank) + machine->packet_epochs,
                              .packet_room = ROOM,
                              .group = words_of(rank),
                              .table = own(rank) + machine->table,
                              .timeout_ns = machine->timeout_ns,
                              .sequence = ++rank->sequence,
                              .signature = signature,
                              .rank = rank->rank,
                              .size = machine->size };
}

static void launch(rank *rank, emulated_kernel kernel, unsigned blocks, unsigned threads, const void *args) {
    emulated_launch(kernel, blocks, threads, args);
    rank->launched += blocks;
    CHECK_EQ(rank->machine->words[rank->rank].ended, rank->launched); /* every block counted its end */
}

static void *begin_rank(void *argument) {
    rank *rank = argument;
    rank->body(rank);
    return NULL;
}

static void on_ranks(int size, void (*body)(rank *)) {
    machine machine;
    rank ranks[MOST];
    machine_begin(&machine, size);
    for (int i = 0; i < size; i++) {
        ranks[i] = (rank){ .machine = &machine, .rank = i, .body = body };
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, begin_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < size; i++)
        CHECK_EQ(pthread_join(ranks[i].thread, NULL), 0);
    machine_end(&machine);
}

/* ---- reductions ---- */

static void fill(void *to, tutti_dtype dtype, size_t count, int rank, int round) {
    uint32_t state = 12345u + (uint32_t)rank * 977u + (uint32_t)round * 131u;
    double *values = malloc((count + 1) * sizeof *values);
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (double)(int32_t)(state >> 8 & 0xffff) / 257.0 - 100;
    }
    CHECK_OK(tutti_convert(values, TUTTI_F64, to, dtype, count));
    free(values);
}

static void expect(const void *got, tutti_dtype dtype, tutti_reduction reduction, size_t count, int size, int round) {
    size_t bytes = count * tutti_dtype_size(dtype);
    void *inputs[MOST], *expected = malloc(bytes + 1);
    for (int r = 0; r < size; r++) {
        inputs[r] = malloc(bytes + 1);
        fill(inputs[r], dtype, count, r, round);
    }
    tu_reduce(expected, (const void *const *)inputs, size, count, dtype, reduction, NULL, 0);
    if (memcmp(got, expected, bytes) != 0)
        FAIL("%d ranks: %s %s of %zu in round %d differs", size, tutti_dtype_name(dtype),
             tutti_reduction_name(reduction), count, round);
    for (int r = 0; r < size; r++)
        free(inputs[r]);
    free(expected);
}

static void by_packets(rank *rank, emulated_kernel kernel, tutti_reduction reduction, const void *in, void *out,
                       uint64_t count, int steps, unsigned blocks) {
    tu_cuda_packet_args args = { .meeting = meeting(rank, (uint32_t)count * 31 + (uint32_t)steps),
                                 .in = (uint64_t)(uintptr_t)in,
                                 .out = (uint64_t)(uintptr_t)out,
                                 .count = count,
                                 .reduction = (int32_t)reduction,
                                 .steps = steps };
    launch(rank, kernel, blocks, THREADS, &args);
}

static void by_meeting(rank *rank, const float *in, float *out, uint64_t count, int mode, unsigned blocks) {
    const machine *machine = rank->machine;
    tu_cuda_reduce_args args = { .meeting = meeting(rank, (uint32_t)count * 37 + (uint32_t)mode),
                                 .in = (uint64_t)(uintptr_t)in,
                                 .out = (uint64_t)(uintptr_t)out,
                                 .stage = own(rank) + machine->stage,
                                 .stage_code = TU_CUDA_CODE(0, machine->stage),
                                 .scratch = own(rank) + machine->scratch,
                                 .scratch_code = TU_CUDA_CODE(0, machine->scratch),
                                 .stage_bytes = 16 * (uint64_t)machine->size * 3, /* one round for few, else several */
                                 .count = count,
                                 .reduction = TUTTI_SUM,
                                 .mode = mode };
    launch(rank, EMULATED_REDUCE_F32, blocks, THREADS, &args);
}

/* Operation after operation, of every kind, nobody waiting for anybody between them. */
static void follow_each_other(rank *rank) {
    static const struct {
        emulated_kernel kernel;
        tutti_dtype dtype;
    } types[] = { { EMULATED_PACKETS_F32, TUTTI_F32 },
                  { EMULATED_PACKETS_BF16, TUTTI_BF16 },
                  { EMULATED_PACKETS_I8, TUTTI_I8 },
                  { EMULATED_PACKETS_F64, TUTTI_F64 } };
    static const size_t counts[] = { 1, 7, 64, 129, 200 };
    int size = rank->machine->size;
    unsigned char *memory = aligned_alloc(64, 4096), *out = memory + 2048;
    for (int round = 0; round < 24; round++) {
        tutti_dtype dtype = types[round % 4].dtype;
        size_t count = counts[(round * 3) % 5], element = tutti_dtype_size(dtype);
        unsigned char *in = memory + (round % 3 == 1 ? element : 0); /* sometimes not aligned to 8 bytes */
        bool in_place = round % 5 == 4;
        tutti_reduction reduction = round % 7 == 6 ? TUTTI_AVG : TUTTI_SUM;
        fill(in, dtype, count, rank->rank, round);
        by_packets(rank, types[round % 4].kernel, reduction, in, in_place ? in : out, count, 1 + round / 2 % 2,
                   1 + (unsigned)round % 3);
        expect(in_place ? in : out, dtype, reduction, count, size, round);
        if (round % 4 == 3) { /* one that meets, between them */
            fill(memory, TUTTI_F32, 100, rank->rank, round);
            by_meeting(rank, (float *)(void *)memory, (float *)(void *)out, 100,
                       round % 8 == 3 ? TU_CUDA_ONE_SHOT : TU_CUDA_TWO_SHOT, 2);
            expect(out, TUTTI_F32, TUTTI_SUM, 100, size, round);
        }
    }
    CHECK_EQ(rank->machine->words[rank->rank].fault, 0);
    free(memory);
}

TEST_LIMIT(small_sums_by_packets_have_the_bits_of_the_serial_loop_and_do_not_mix, 600) {
    CHECK(test_instructions_named("reference"));
    on_ranks(2, follow_each_other);
    on_ranks(3, follow_each_other);
    on_ranks(9, follow_each_other); /* more than are polled together */
}

static void disagree(rank *rank) {
    float in[200] = { 0 }, out[200];
    if (rank->rank == 0)
        by_packets(rank, EMULATED_PACKETS_F32, TUTTI_SUM, in, out, 100, 1, 1);
    else
        by_meeting(rank, in, out, 200, TU_CUDA_ONE_SHOT, 1);
    CHECK_EQ(rank->machine->reports[rank->rank].fault.code, TU_CUDA_FAULT_MISMATCH);
}

static void disagree_in_packets(rank *rank) {
    float in[200] = { 0 }, out[200];
    by_packets(rank, EMULATED_PACKETS_F32, TUTTI_SUM, in, out, rank->rank == 1 ? 100 : 200, 1, 1);
    CHECK_EQ(rank->machine->reports[rank->rank].fault.code, TU_CUDA_FAULT_MISMATCH);
}

TEST_LIMIT(ranks_that_do_not_make_the_same_call_all_find_a_mismatch, 600) {
    on_ranks(2, disagree);
    on_ranks(4, disagree);
    on_ranks(3, disagree_in_packets);
}

static void sum_what_lies_here(rank *rank) {
    float *memory = aligned_alloc(64, 4 * 1024), out[203];
    tu_cuda_reduce_args args = { .meeting = meeting(rank, 1),
                                 .out = (uint64_t)(uintptr_t)out,
                                 .source_base = (uint64_t)(uintptr_t)memory,
                                 .source_stride = 1024,
                                 .count = 203,
                                 .reduction = TUTTI_SUM,
                                 .mode = TU_CUDA_LOCAL };
    for (int r = 0; r < 3; r++)
        fill(memory + r * 256, TUTTI_F32, 203, r, 5);
    launch(rank, EMULATED_REDUCE_F32, 3, THREADS, &args);
    expect(out, TUTTI_F32, TUTTI_SUM, 203, 3, 5);
    free(memory);
}

TEST_LIMIT(what_copy_engines_brought_is_added_up_without_the_others, 600) {
    CHECK(test_instructions_named("reference"));
    on_ranks(3, sum_what_lies_here);
}

/* ---- where the data lies ---- */

static unsigned char *block_of(const rank *rank) {
    return rank->machine->blocks + (uint64_t)rank->rank * BLOCK;
}

/* From and to symmetric blocks, at the same offsets on all ranks or, with `moved`, at another one of rank 1. */
static void in_blocks(rank *rank, emulated_kernel kernel, size_t count, int mode, bool moved, int round) {
    uint64_t offset = moved && rank->rank == 1 ? 64 : 0,
             out_offset = mode == TU_CUDA_TWO_SHOT ? offset : offset + 32768;
    unsigned char *in = block_of(rank) + offset, *out = block_of(rank) + out_offset;
    tu_cuda_reduce_args args = { .meeting = meeting(rank, (uint32_t)count * 41 + (uint32_t)mode),
                                 .in = (uint64_t)(uintptr_t)in,
                                 .out = (uint64_t)(uintptr_t)out,
                                 .source = TU_CUDA_CODE(1, offset),
                                 .target = TU_CUDA_CODE(1, out_offset),
                                 .source_base = (uint64_t)(uintptr_t)rank->machine->blocks + offset,
                                 .source_stride = BLOCK,
                                 .target_base = (uint64_t)(uintptr_t)rank->machine->blocks + out_offset,
                                 .target_stride = BLOCK,
                                 .count = count,
                                 .reduction = TUTTI_SUM,
                                 .mode = mode };
    args.meeting.plan = 1000 + offset; /* equal where all can compute each other's addresses */
    fill(in, TUTTI_F32, count, rank->rank, round);
    launch(rank, kernel, 2, THREADS, &args);
    expect(out, TUTTI_F32, TUTTI_SUM, count, rank->machine->size, round);
    by_packets(rank, EMULATED_PACKETS_F32, TUTTI_SUM, in, in, 1, 1,
               1); /* nobody fills its block before all have looked */
}

static void reduce_in_blocks(rank *rank) {
    static const size_t counts[] = { 5, 256, 1003 };
    for (int round = 0; round < 12; round++) {
        int mode = round % 2 == 0 ? TU_CUDA_ONE_SHOT : TU_CUDA_TWO_SHOT;
        in_blocks(rank, rank->machine->size == 4 ? EMULATED_REDUCE_F32_4 : EMULATED_REDUCE_F32, counts[round % 3], mode,
                  round >= 6, round);
        in_blocks(rank, EMULATED_MULTIMEM_F32, counts[round % 3], mode, round >= 6, round + 100);
    }
    CHECK_EQ(rank->machine->words[rank->rank].fault, 0);
}

TEST_LIMIT(sums_where_the_data_lies_have_the_bits_of_the_serial_loop, 600) {
    CHECK(test_instructions_named("reference"));
    on_ranks(2, reduce_in_blocks);
    on_ranks(4, reduce_in_blocks);
}

static void gather_into_all(rank *rank) {
    int size = rank->machine->size;
    for (uint64_t bytes = 1; bytes <= 1000; bytes = bytes * 10 + 6) {
        unsigned char mine[2048];
        memset(mine, 10 + rank->rank, bytes);
        tu_cuda_gather_args args = { .meeting = meeting(rank, (uint32_t)bytes),
                                     .in = (uint64_t)(uintptr_t)mine,
                                     .bytes = bytes,
                                     .target = TU_CUDA_CODE(1, 128),
                                     .target_base = (uint64_t)(uintptr_t)rank->machine->blocks + 128,
                                     .target_stride = BLOCK };
        args.meeting.plan = 77;
        launch(rank, EMULATED_MULTIMEM_GATHER, 2, THREADS, &args);
        for (uint64_t i = 0; i < bytes * (uint64_t)size; i++)
            CHECK_EQ(block_of(rank)[128 + i], 10 + i / bytes);
    }
}

/* all_to_all by pulling, from private memory and, at every second call, from symmetric memory of some ranks. */
static void pull_from_all(rank *rank) {
    int size = rank->machine->size;
    for (int round = 0; round < 6; round++) {
        uint64_t part = round % 3 == 0 ? 5 : round % 3 == 1 ? 300 : 9000, total = part * (uint64_t)size;
        bool symmetric = round % 2 == 1 && rank->rank != 1 && total <= BLOCK;
        unsigned char *in = symmetric ? block_of(rank) : malloc(total), *out = malloc(total);
        tu_cuda_move_args args = { .meeting = meeting(rank, (uint32_t)part),
                                   .in = (uint64_t)(uintptr_t)in,
                                   .out = (uint64_t)(uintptr_t)out,
                                   .source = symmetric ? TU_CUDA_CODE(1, 0) : 0,
                                   .stage = own(rank) + rank->machine->stage,
                                   .stage_code = TU_CUDA_CODE(0, rank->machine->stage),
                                   .stage_bytes = 16 * (uint64_t)size * 64, /* several rounds */
                                   .longest = part };
        for (int i = 0; i < size; i++) {
            memset(in + (uint64_t)i * part, rank->rank * 16 + i, part);
            args.parts[i] = (tu_cuda_move_part){ (uint64_t)i * part, part, (uint64_t)i * part, part };
        }
        launch(rank, EMULATED_MOVE, 3, THREADS, &args);
        for (uint64_t i = 0; i < total; i++)
            CHECK_EQ(out[i], i / part * 16 + (uint64_t)rank->rank);
        if (!symmetric)
            free(in);
        free(out);
    }
    CHECK_EQ(rank->machine->words[rank->rank].fault, 0);
}

TEST_LIMIT(moves_bring_every_byte_to_its_place, 600) {
    on_ranks(3, gather_into_all);
    on_ranks(4, pull_from_all);
}

/* ---- messages ---- */

static void message(rank *rank, void *buffer, uint64_t bytes, int peer, bool is_send, uint64_t block, uint64_t stride) {
    const machine *machine = rank->machine;
    tu_cuda_message_args args = { .meeting = meeting(rank, 0),
                                  .buffer = (uint64_t)(uintptr_t)buffer,
                                  .bytes = bytes,
                                  .sent_offset = machine->sent,
                                  .taken_offset = machine->taken,
                                  .counters = own(rank) + machine->counters,
                                  .stage_offset = machine->message_stage,
                                  .share = SHARE,
                                  .block_bytes = block,
                                  .stride_bytes = stride,
                                  .peer = peer,
                                  .tag = 4,
                                  .is_send = is_send };
    launch(rank, EMULATED_MESSAGE, 2, THREADS, &args);
}

/* Round a ring: `count` elements that lie 3 of 7 at the sender, 5 of 11 at the receiver, or one after the other. */
static void send_round(rank *rank, size_t element, size_t count, bool apart) {
    int size = rank->machine->size, next = (rank->rank + 1) % size, before = (rank->rank + size - 1) % size;
    size_t in_step = apart ? 7 : 3, out_step = apart ? 11 : 5, in_bytes = count / 3 * in_step * element,
           out_bytes = count / 5 * out_step * element;
    unsigned char *in = malloc(in_bytes), *out = malloc(out_bytes);
    for (size_t i = 0; i < in_bytes; i++)
        in[i] = (unsigned char)(i * 31 + (size_t)rank->rank * 7);
    memset(out, 0xee, out_bytes);
    for (int step = 0; step < 2; step++) { /* long ones wait for their receivers */
        if ((step == 0) == (rank->rank % 2 == 0))
            message(rank, in, count * element, next, true, apart ? 3 * element : 0, apart ? in_step * element : 0);
        else
            message(rank, out, count * element, before, false, apart ? 5 * element : 0, apart ? out_step * element : 0);
    }
    CHECK_EQ(rank->machine->words[rank->rank].fault, 0);
    for (size_t i = 0; i < count * element; i++) {
        size_t from = i / (3 * element) * in_step * element + i % (3 * element),
               to = i / (5 * element) * out_step * element + i % (5 * element);
        CHECK_EQ(out[to], (unsigned char)(from * 31 + (size_t)before * 7));
    }
    for (size_t i = 0; apart && i < count / 5; i++)
        CHECK(out[(i * 11 + 5) * element] == 0xee && out[(i * 11 + 11) * element - 1] == 0xee);
    free(in);
    free(out);
}

static void send_rounds(rank *rank) {
    for (int apart = 0; apart < 2; apart++) {
        send_round(rank, 1, 15, apart);
        send_round(rank, 1, 12000, apart); /* several chunks */
        send_round(rank, 4, 3000, apart);
        send_round(rank, 8, 1500, apart);
    }
}

TEST_LIMIT(messages_arrive_also_where_their_elements_lie_apart, 600) {
    on_ranks(2, send_rounds);
    on_ranks(4, send_rounds);
}

/* ---- barriers of a block ---- */

#define CHANNELS 4
static _Atomic int there[CHANNELS];

static tu_cuda_signal_args barrier_args(const rank *rank, int channel) {
    const machine *machine = rank->machine;
    uint64_t members = (uint64_t)machine->size, shared = CHANNELS * members * 12 + CHANNELS * 4;
    tu_cuda_signal_args args = { .areas = (uint64_t)(uintptr_t)machine->areas,
                                 .stride = machine->area_stride,
                                 .group = words_of(rank),
                                 .timeout_ns = UINT64_C(3600000000000),
                                 .rank = rank->rank,
                                 .size = machine->size,
                                 .channel = channel,
                                 .channels = CHANNELS,
                                 .peer = -1,
                                 .kind = TU_CUDA_SIGNAL_BARRIER };
    args.local = args.areas + (uint64_t)rank->rank * args.stride + ((shared + 127) & ~UINT64_C(127));
    return args;
}

static void barrier(rank *rank, emulated_kernel kernel, int channel) {
    tu_cuda_signal_args args = barrier_args(rank, channel);
    launch(rank, kernel, 1, kernel == EMULATED_SIGNAL ? THREADS : 1, &args);
}

static void meet_often(rank *rank, emulated_kernel kernel) {
    for (int round = 1; round <= 20; round++) {
        int channel = round % 2 * 3;
        if (rank->rank == round % rank->machine->size)
            usleep(500);
        atomic_fetch_add(&there[channel], 1);
        barrier(rank, kernel, channel);
        CHECK(atomic_load(&there[channel]) >= (round + round % 2) / 2 * rank->machine->size);
    }
    CHECK_EQ(rank->machine->words[rank->rank].fault, 0);
}

static void meet_by_additions(rank *rank) {
    meet_often(rank, EMULATED_MULTIMEM_BARRIER);
}

static void meet_by_words(rank *rank) {
    meet_often(rank, EMULATED_SIGNAL);
}

TEST_LIMIT(nobody_leaves_a_barrier_of_a_block_before_all_have_come, 600) {
    memset(there, 0, sizeof there);
    on_ranks(4, meet_by_additions);
    memset(there, 0, sizeof there);
    on_ranks(4, meet_by_words);
}

/* ---- the end of a group while a block looks for it ---- */

#define WAITS_NS 1000000 /* threads look when they have waited for so long, all at about the same time */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

typedef struct ending {
    rank *rank;
    uint64_t at;
} ending;

static void *end_group(void *argument) {
    const ending *ending = argument;
    while (now_ns() < ending->at)
        ;
    __atomic_store_n(&ending->rank->machine->words[0].fault, TU_CUDA_FAULT_ENDED, __ATOMIC_RELEASE);
    return NULL;
}

/* The host says it a little later each time, and so once when some threads have looked and others have not. The block
 * stands behind a kernel that never ends. */
static void end_while_it_looks(rank *rank, emulated_kernel kernel, const void *args) {
    tu_cuda_words *words = &rank->machine->words[0];
    for (uint64_t i = 0; i < 300; i++) {
        pthread_t host;
        *words = (tu_cuda_words){ .fault = 0 };
        ending ending = { rank, now_ns() + WAITS_NS + i * 1500 };
        CHECK_EQ(pthread_create(&host, NULL, end_group, &ending), 0);
        emulated_launch(kernel, 1, 512, args); /* so many take a while to look */
        CHECK_EQ(pthread_join(host, NULL), 0);
        CHECK_EQ(words->ended, 1);
    }
}

static void look_at_different_moments(rank *rank) {
    if (rank->rank != 0) /* it does not come */
        return;
    tu_cuda_signal_args args = barrier_args(rank, 0);
    args.timeout_ns = WAITS_NS;
    args.group.place = 2;
    end_while_it_looks(rank, EMULATED_SIGNAL, &args);
}

TEST_LIMIT(threads_of_a_barrier_go_one_way_when_the_group_ends_while_they_look, 60) {
    on_ranks(2, look_at_different_moments);
}

/* Of NVSHMEM, which the kernels find by name. */
__attribute__((visibility("default"))) void standin_quiet(void);
void standin_quiet(void) {}

/* Where nobody is told, and nobody is waited for. */
static void look_with_nvshmem(rank *rank) {
    uint64_t counter = 0;
    tu_nvshmem_signal_args args = { .own = (uint64_t)(uintptr_t)&counter,
                                    .group = barrier_args(rank, 0).group,
                                    .timeout_ns = WAITS_NS,
                                    .channels = 1,
                                    .peer = -1,
                                    .kind = TU_CUDA_SIGNAL_BARRIER };
    args.group.place = 2;
    end_while_it_looks(rank, EMULATED_NVSHMEM_SIGNAL, &args);
}

TEST_LIMIT(so_do_those_of_a_barrier_of_nvshmem, 60) {
    on_ranks(1, look_with_nvshmem);
}

/* ---- behind a fault ---- */

/* The last rank waits in vain in one operation, by packets or by meeting, until its time is over. Its next kernels are
 * in its stream already: whatever they are, nobody else's memory, nor what others read of its own, is another behind
 * them.
 */
static void begin_behind_a_fault(rank *rank, bool packets) {
    machine *machine = rank->machine;
    uint64_t bytes = machine->stride * (uint64_t)machine->size, areas = machine->area_stride * (uint64_t)machine->size;
    uint64_t shared = machine->epochs; /* what comes behind it in a control block is its owner's alone */
    float in[300], out[300];
    if (rank->rank != machine->size - 1)
        return;
    unsigned char *before = malloc(bytes), *areas_before = malloc(areas), *blocks_before = malloc(BLOCK * 3);
    fill(in, TUTTI_F32, 300, 1, 1);
    memset(out, 0, sizeof out);
    memset(machine->blocks, 7, BLOCK * (uint64_t)machine->size);
    machine->timeout_ns = 1000000;
    if (packets)
        by_packets(rank, EMULATED_PACKETS_F32, TUTTI_SUM, in, out, 200, 1, 2);
    else
        by_meeting(rank, in, out, 200, TU_CUDA_ONE_SHOT, 2);
    CHECK_EQ(machine->reports[rank->rank].fault.code, TU_CUDA_FAULT_TIMEOUT);
    uint64_t sequence = machine->reports[rank->rank].fault.sequence;
    memcpy(before, machine->control, bytes);
    memcpy(areas_before, machine->areas, areas);
    memcpy(blocks_before, machine->blocks, BLOCK * 3);
    for (int steps = 1; steps <= 2; steps++)
        by_packets(rank, EMULATED_PACKETS_F32, TUTTI_SUM, in, out, 200, steps, 2);
    by_meeting(rank, in, out, 200, TU_CUDA_ONE_SHOT, 2);
    by_meeting(rank, in, out, 300, TU_CUDA_TWO_SHOT, 2);
    tu_cuda_move_args move = { .meeting = meeting(rank, 1),
                               .in = (uint64_t)(uintptr_t)in,
                               .out = (uint64_t)(uintptr_t)out,
                               .stage = own(rank) + machine->stage,
                               .stage_code = TU_CUDA_CODE(0, machine->stage),
                               .stage_bytes = 16 * (uint64_t)machine->size * 64,
                               .longest = 64 };
    for (int i = 0; i < machine->size; i++)
        move.parts[i] = (tu_cuda_move_part){ 0, 64, (uint64_t)i * 64, 64 };
    launch(rank, EMULATED_MOVE, 2, THREADS, &move);
    tu_cuda_gather_args gather = { .meeting = meeting(rank, 2),
                                   .in = (uint64_t)(uintptr_t)in,
                                   .bytes = 256,
                                   .target = TU_CUDA_CODE(1, 128),
                                   .target_base = (uint64_t)(uintptr_t)machine->blocks + 128,
                                   .target_stride = BLOCK };
    launch(rank, EMULATED_MULTIMEM_GATHER, 2, THREADS, &gather);
    message(rank, in, 100, 0, true, 0, 0);
    message(rank, out, 100, 0, false, 0, 0);
    barrier(rank, EMULATED_SIGNAL, 1);
    barrier(rank, EMULATED_MULTIMEM_BARRIER, 1);
    for (int i = 0; i < machine->size; i++)
        CHECK(memcmp(machine->control + machine->stride * (uint64_t)i, before + machine->stride * (uint64_t)i,
                     shared) == 0);
    CHECK(memcmp(machine->areas, areas_before, areas) == 0);
    CHECK(memcmp(machine->blocks, blocks_before, BLOCK * 3) == 0);
    for (int i = 0; i < 300; i++)
        CHECK(out[i] == 0);
    CHECK_EQ(machine->reports[rank->rank].fault.sequence, sequence); /* the first fault is the one that is told */
    free(before);
    free(areas_before);
    free(blocks_before);
}

static void begin_behind_packets(rank *rank) {
    begin_behind_a_fault(rank, true);
}

static void begin_behind_a_meeting(rank *rank) {
    begin_behind_a_fault(rank, false);
}

TEST_LIMIT(kernels_behind_a_fault_tell_nobody_anything, 600) {
    on_ranks(3, begin_behind_packets);
    on_ranks(3, begin_behind_a_meeting);
}
