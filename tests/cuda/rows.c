/* SPDX-License-Identifier: Apache-2.0
 *
 * What PyTorch's own tests of symmetric memory prove, on device memory: each test is named after the one there, without
 * its `test_`. Those that need several GPUs, multicast or a compiler are not here. docs/gpu-tests.md lists all of them
 * with the file that holds each; scripts/check-docs keeps that list true.
 */
#include <tutti/connectivity.h>
#include <tutti/named.h>
#include <tutti/pool.h>

#include "graph.h"
#include "kernel/kernel.h"

static tutti_peers *meet(tutti_memory *memory, tutti_group *group) {
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    return peers;
}

static void finish(tutti_group *group, tutti_peers *peers, tutti_memory *memory) {
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL));
}

static void set_words(void *address, uint32_t value, size_t count) {
    CHECK_CUDA(gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)address, value, count, stream));
}

static uint32_t read_word(const void *address) {
    uint32_t value;
    gpu_read(&value, address, sizeof value);
    return value;
}

TEST_GPU(has_multicast_support) {
    CHECK(!tutti_memory_has_multicast_support(world, TUTTI_CPU));
    (void)tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(0)); /* whatever it is, it does not fail */
    CHECK(!tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(99)));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(is_symm_mem_tensor) {
    tutti_memory *memory = gpu_symmetric(world, 4096);
    void *private_memory = gpu_private(4096);
    int on_host;
    CHECK(tutti_memory_find(world, tutti_memory_data(memory)) == memory);
    CHECK(tutti_memory_find(world, (char *)tutti_memory_data(memory) + 4095) == memory);
    CHECK(tutti_memory_find(world, private_memory) == NULL);
    CHECK(tutti_memory_find(world, &on_host) == NULL);
    CHECK_EQ(tutti_memory_device(memory), TUTTI_CUDA_AT(0));
    gpu_private_free(private_memory);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* Nothing has to be enabled: memory meets with every group that there is, and a name that nobody has made finds none.
 */
TEST_GPU(is_symm_mem_enabled_for_group) {
    tutti_group *all = tutti_world_group(world), *made, *found;
    int size = tutti_group_size(all), ranks[64];
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, size, NULL, &made));
    tutti_group_form form = { 0 };
    CHECK_OK(tutti_group_resolve(world, tutti_form_name(&form, tutti_group_name(made)), NULL, &found));
    CHECK(found == made);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, found);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    tutti_group_release(found);
    CHECK(tutti_group_resolve(world, tutti_form_name(&form, "nobody made this"), NULL, &found) != TUTTI_OK);
    CHECK_OK(tutti_barrier(all, NULL));
    tutti_peers_release(peers);
    tutti_group_release(made);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(all, NULL));
}

TEST_GPU(get_backend) {
    const char *name;
    CHECK_OK(tutti_memory_backend(world, TUTTI_CUDA, &name));
    CHECK(strcmp(name, "cuda") == 0);
    CHECK_OK(tutti_memory_backend(world, TUTTI_CUDA_AT(0), &name));
    CHECK(strcmp(name, "cuda") == 0);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(get_signal_pad_size) { /* of the world, and so of every block */
    size_t usual = tutti_memory_signal_pad_bytes(world);
    CHECK(usual > 0);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    CHECK_EQ(tutti_memory_pad_bytes(memory), usual);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(set_signal_pad_size) {
    size_t usual = tutti_memory_signal_pad_bytes(world);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 1 << 20));
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), 1 << 20);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 0));
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), usual);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(set_signal_pad_size_with_allocation) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 1 << 20));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    CHECK_EQ(tutti_peers_pad_bytes(peers), 1 << 20);
    tutti_view pad = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_signal_pad(peers, 0, NULL, 0, 0, 0, &pad));
    CHECK_EQ(tutti_view_bytes(&pad), 1 << 20);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 0));
    finish(group, peers, memory);
}

TEST_GPU(large_alloc) {
    tutti_group *group = tutti_world_group(world);
    size_t bytes = ((size_t)2 << 30) + 4096;
    tutti_memory *memory = gpu_symmetric(world, bytes);
    tutti_peers *peers = meet(memory, group);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size;
    uint32_t *last = (uint32_t *)((char *)tutti_memory_data(memory) + bytes) - 1;
    CHECK_EQ(read_word(last), 0);
    set_words(last, (uint32_t)rank + 5, 1);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_EQ(read_word((char *)tutti_peers_buffer(peers, next) + bytes - 4), (uint32_t)next + 5);
    finish(group, peers, memory);
}

TEST_GPU(get_signal_pad) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size;
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_signal_pad(peers, rank, NULL, 0, 0, 0, &view));
    CHECK(view.data == tutti_memory_signal_pad(memory) && view.dtype == TUTTI_U32);
    CHECK((char *)view.data >= (char *)tutti_memory_data(memory) + 4096); /* no part of the data */
    int64_t shape[2] = { 8, 16 };
    CHECK_OK(tutti_peers_get_signal_pad(peers, next, shape, 2, TUTTI_I64, 4, &view));
    CHECK_EQ(tutti_view_bytes(&view), 8 * 16 * 8);
    CHECK((char *)view.data == (char *)tutti_peers_signal_pad(peers, next) + 32);
    int64_t far[1] = { (int64_t)tutti_peers_pad_bytes(peers) };
    CHECK_STATUS(tutti_peers_get_signal_pad(peers, next, far, 1, TUTTI_I64, 0, &view), TUTTI_ERROR_RANGE);
    set_words(tutti_peers_signal_pad(peers, next), (uint32_t)rank + 3, 4);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_EQ(read_word(tutti_memory_signal_pad(memory)), (uint32_t)((rank + size - 1) % size) + 3);
    CHECK_EQ(read_word((char *)tutti_memory_data(memory) + 4092), 0);
    finish(group, peers, memory);
}

TEST_GPU(allow_overlapping_devices) { /* all ranks share device 0, and nothing has to be allowed */
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 1024);
    tutti_peers *peers = meet(memory, group);
    CHECK(tutti_peers_rank(peers) == rank && tutti_peers_size(peers) == size && tutti_peers_bytes(peers) == 1024);
    for (int i = 0; i < size; i++) {
        CHECK(tutti_peers_buffer(peers, i) != NULL && tutti_peers_signal_pad(peers, i) != NULL);
        for (int j = 0; j < i; j++)
            CHECK(tutti_peers_buffer(peers, i) != tutti_peers_buffer(peers, j));
    }
    CHECK(tutti_peers_multicast(peers) == NULL);
    finish(group, peers, memory);
}

TEST_GPU(get) { /* one-sided, with offsets and its errors */
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size;
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    uint32_t *mine = gpu_private(4096);
    set_words(tutti_memory_data(memory), (uint32_t)rank + 1, 512);
    set_words((uint32_t *)tutti_memory_data(memory) + 512, (uint32_t)rank + 101, 512);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_OK(tutti_peers_get(peers, next, 2044, mine, 8, ON_STREAM));
    CHECK_EQ(read_word(mine), (uint32_t)next + 1);
    CHECK_EQ(read_word(mine + 1), (uint32_t)next + 101);
    CHECK_STATUS(tutti_peers_get(peers, size, 0, mine, 4, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get(peers, -1, 0, mine, 4, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get(peers, next, 4093, mine, 4, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get(peers, next, 4097, mine, 0, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_OK(tutti_barrier(group, NULL));
    gpu_private_free(mine);
    finish(group, peers, memory);
}

static const int out_of_bounds[] = { -1, 1 << 30 };

TEST_GPU(barrier_channel_out_of_bounds) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    int channels = tutti_peers_channels(peers);
    CHECK_EQ(channels, (int)(tutti_peers_pad_bytes(peers) / (4 * (size_t)tutti_group_size(group))));
    CHECK_STATUS(tutti_peers_barrier(peers, channels, ON_STREAM), TUTTI_ERROR_RANGE);
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(tutti_peers_barrier(peers, out_of_bounds[i], ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_OK(tutti_peers_barrier(peers, channels - 1, ON_STREAM)); /* the last one works */
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    finish(group, peers, memory);
}

TEST_GPU(put_wait_signal_channel_out_of_bounds) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    int last = tutti_peers_channels(peers) - 1, channels[] = { last + 1, -1, 1 << 30 };
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(tutti_peers_signal(peers, 0, channels[i], ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_STATUS(tutti_peers_wait_signal(peers, 0, channels[i], ON_STREAM), TUTTI_ERROR_RANGE);
    }
    CHECK_OK(tutti_peers_signal(peers, (rank + 1) % size, last, ON_STREAM)); /* round the ring by the last one */
    CHECK_OK(tutti_peers_wait_signal(peers, (rank + size - 1) % size, last, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    finish(group, peers, memory);
}

TEST_GPU(put_wait_signal_rank_out_of_bounds) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    int ranks[] = { tutti_group_size(group), -1, 1 << 30 };
    tutti_view view = TUTTI_VIEW_INIT;
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(tutti_peers_signal(peers, ranks[i], 0, ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("must be in [0");
        CHECK_STATUS(tutti_peers_wait_signal(peers, ranks[i], 0, ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("must be in [0");
        CHECK_STATUS(tutti_peers_get_signal_pad(peers, ranks[i], NULL, 0, 0, 0, &view), TUTTI_ERROR_RANGE);
        CHECK_MESSAGE("must be in [0");
    }
    finish(group, peers, memory);
}

TEST_GPU(put_signal_timeout) { /* the second signal finds the first not taken, and ends alone */
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    if (rank == 0) {
        CHECK_OK(tutti_peers_signal(peers, 1, 0, ON_STREAM));
        CHECK_OK(tutti_peers_signal(peers, 1, 0, TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 100000000)));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_TIMEOUT);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 1) {
        CHECK_OK(tutti_peers_wait_signal(peers, 0, 0, ON_STREAM)); /* the first one is there */
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    }
    finish(group, peers, memory);
}

/* The elements before and behind a view must stay as they are. */
static void check_two_shot(tutti_world *world, tutti_dtype dtype, size_t bytes, size_t shift, bool in_place) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    size_t element = tutti_dtype_size(dtype), count = bytes / element;
    tutti_memory *memory = gpu_symmetric(world, 2 * 16384);
    tutti_peers *peers = meet(memory, group);
    char *in = (char *)tutti_memory_data(memory) + shift, *out = in_place ? in : in + 16384;
    uint32_t one = dtype == TUTTI_F32 ? 0x3f800000 : 0x3f803f80;
    unsigned char *host = malloc(2 * 16384);
    set_words(tutti_memory_data(memory), one, 2 * 16384 / 4);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_OK(tutti_two_shot_all_reduce_out(group, in, out, count, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(host, tutti_memory_data(memory), 2 * 16384);
    for (size_t i = 0; i < 2 * 16384; i += element) {
        size_t at = (size_t)(out - (char *)tutti_memory_data(memory));
        float value = dtype == TUTTI_F32 ? *(float *)(host + i) : 0;
        if (dtype == TUTTI_BF16)
            CHECK_OK(tutti_convert(host + i, TUTTI_BF16, &value, TUTTI_F32, 1));
        float expected = i >= at && i < at + bytes ? (float)size : 1;
        if (value != expected)
            FAIL("%s, %zu bytes, shift %zu: byte %zu is %g, not %g", tutti_dtype_name(dtype), bytes, shift, i, value,
                 expected);
    }
    free(host);
    finish(group, peers, memory);
}

TEST_GPU(two_shot_all_reduce) {
    static const size_t sizes[] = { 4, 8192, 8196 };
    for (int i = 0; i < 3; i++)
        for (int kind = 0; kind < 4; kind++)
            check_two_shot(world, kind % 2 ? TUTTI_BF16 : TUTTI_F32, sizes[i], kind < 2 ? 0 : 8, kind % 3 == 0);
}

/* One f32 or two bf16 of that value, a small whole number. */
static uint32_t word_of(tutti_dtype dtype, int value) {
    float number = (float)value;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return dtype == TUTTI_F32 ? bits : bits | bits >> 16;
}

static void check_one_shot(tutti_world *world, tutti_dtype dtype, size_t bytes, size_t offset) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    size_t count = bytes / tutti_dtype_size(dtype), words = bytes / 4;
    tutti_memory *memory = gpu_symmetric(world, 16384);
    tutti_peers *peers = meet(memory, group);
    uint32_t *input = gpu_private(16384), *out = gpu_private(16384), host[2050],
             *buffer = (uint32_t *)((char *)tutti_memory_data(memory) + offset);
    gpu_lockstep(group);
    for (int copies = 0; copies < 2; copies++) { /* of what lies there, and of what is brought there first */
        set_words(input, word_of(dtype, 2), words);
        set_words(buffer, word_of(dtype, 1), words);
        set_words(out, 0, words + 1);
        CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
        if (copies == 0)
            CHECK_OK(tutti_one_shot_all_reduce(group, buffer, out, count, dtype, TUTTI_SUM, ON_STREAM));
        else
            CHECK_OK(
                tutti_one_shot_all_reduce_copy(group, buffer, count, input, out, count, dtype, TUTTI_SUM, ON_STREAM));
        gpu_read(host, out, (words + 1) * 4);
        for (size_t i = 0; i < words; i++)
            CHECK_EQ(host[i], word_of(dtype, (copies + 1) * size));
        CHECK_EQ(host[words], 0);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    gpu_private_free(input);
    gpu_private_free(out);
    finish(group, peers, memory);
}

TEST_GPU(one_shot_all_reduce) { /* with and without the copy, at offset 0 and 16 */
    static const size_t sizes[] = { 4, 8192, 8196 };
    for (int i = 0; i < 3; i++)
        for (int kind = 0; kind < 4; kind++)
            check_one_shot(world, kind % 2 ? TUTTI_BF16 : TUTTI_F32, sizes[i], kind < 2 ? 0 : 16);
}

TEST_GPU(reduce_scatter) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    static const size_t sizes[] = { 128, 8192, 589824 };
    tutti_memory *memory = gpu_symmetric(world, 589824);
    tutti_peers *peers = meet(memory, group);
    uint32_t *in = tutti_memory_data(memory), *out = gpu_private(589824), *host = malloc(589824);
    for (int i = 0; i < 3; i++) {
        for (int split = 0; split < 2; split++) {
            size_t total = sizes[i] / 4, columns = 8 * (size_t)size, rows = total / columns,
                   part = columns / (size_t)size;
            if (rows == 0)
                continue;
            for (size_t k = 0; k < rows * columns; k++)
                host[k] = (uint32_t)(k + (size_t)rank);
            CHECK_OK(tutti_barrier(group, NULL));
            gpu_write(in, host, rows * columns * 4);
            CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
            CHECK_OK(
                tutti_reduce_scatter_out(group, in, out, rows, columns, split == 1, TUTTI_U32, TUTTI_SUM, ON_STREAM));
            gpu_read(host, out, rows * part * 4);
            uint32_t ranks = (uint32_t)(size * (size - 1) / 2);
            for (size_t k = 0; k < rows * part; k++) {
                size_t at =
                    split ? k / part * columns + (size_t)rank * part + k % part : (size_t)rank * rows * part + k;
                CHECK_EQ(host[k], (uint32_t)at * (uint32_t)size + ranks);
            }
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    gpu_private_free(out);
    finish(group, peers, memory);
}

TEST_GPU(reduce_scatter_corner_cases) { /* nothing at all, and what cannot be divided */
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    uint32_t *in = tutti_memory_data(memory), *out = gpu_private(4096);
    CHECK_OK(tutti_reduce_scatter_out(group, in, out, 0, 0, false, TUTTI_U32, TUTTI_SUM, ON_STREAM));
    CHECK_STATUS(tutti_reduce_scatter_out(group, in, out, 1, (size_t)size + 1, false, TUTTI_U32, TUTTI_SUM, ON_STREAM),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("divisible");
    CHECK_STATUS(tutti_reduce_scatter_out(group, in, out, (size_t)size, 1, true, TUTTI_U32, TUTTI_SUM, ON_STREAM),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("last dimension");
    CHECK_OK(tutti_barrier(group, NULL));
    gpu_private_free(out);
    finish(group, peers, memory);
}

/* Chunk r of every rank's input is filled with r. */
static void check_low_contention_reduce_scatter(tutti_world *world, bool symmetric) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t part = 4096, bytes = part * (size_t)size * 4;
    tutti_memory *memory = gpu_symmetric(world, bytes);
    tutti_peers *peers = meet(memory, group);
    float *in = symmetric ? tutti_memory_data(memory) : gpu_private(bytes), *out = gpu_private(part * 4),
          *host = malloc(bytes);
    for (size_t i = 0; i < part * (size_t)size; i++)
        host[i] = (float)(i / part);
    gpu_write(in, host, bytes);
    CHECK_OK(tutti_barrier(group, NULL));
    for (int average = 0; average < 2; average++) {
        CHECK_OK(tutti_low_contention_reduce_scatter(group, in, out, part, TUTTI_F32, average ? TUTTI_AVG : TUTTI_SUM,
                                                     ON_STREAM));
        gpu_read(host, out, part * 4);
        for (size_t i = 0; i < part; i++)
            CHECK(host[i] == (float)(average ? rank : rank * size));
    }
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    gpu_private_free(out);
    if (!symmetric)
        gpu_private_free(in);
    finish(group, peers, memory);
}

TEST_GPU(low_contention_reduce_scatter) {
    check_low_contention_reduce_scatter(world, true);
    check_low_contention_reduce_scatter(world, false);
}

static void check_low_contention_all_gather(tutti_world *world, bool symmetric) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t part = 4096, bytes = part * (size_t)size * 4;
    tutti_memory *memory = gpu_symmetric(world, part * 4);
    tutti_peers *peers = meet(memory, group);
    float *in = symmetric ? tutti_memory_data(memory) : gpu_private(part * 4), *out = gpu_private(bytes),
          *host = malloc(bytes);
    for (size_t i = 0; i < part; i++)
        host[i] = (float)(rank * 10000) + (float)i;
    gpu_write(in, host, part * 4);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_low_contention_all_gather(group, in, out, part, TUTTI_F32, ON_STREAM));
    gpu_read(host, out, bytes);
    for (size_t i = 0; i < part * (size_t)size; i++)
        CHECK(host[i] == (float)(i / part * 10000 + i % part));
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    gpu_private_free(out);
    if (!symmetric)
        gpu_private_free(in);
    finish(group, peers, memory);
}

TEST_GPU(low_contention_all_gather) {
    check_low_contention_all_gather(world, true);
    check_low_contention_all_gather(world, false);
}

/* The others fill rank 0's buffer, which hears of it by their signals; then again, and hears of it by a barrier. */
static void verify(tutti_group *group, tutti_memory *memory, tutti_peers *peers, size_t bytes) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    int64_t shape[1] = { (int64_t)(bytes / 4) };
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK(tutti_peers_size(peers) == size && tutti_peers_rank(peers) == rank && tutti_peers_bytes(peers) == bytes);
    CHECK_OK(tutti_peers_get_buffer(peers, 0, shape, 1, TUTTI_F32, 0, &view));
    CHECK(view.data == tutti_peers_buffer(peers, 0) && tutti_view_bytes(&view) == bytes);
    CHECK(rank != 0 || view.data == tutti_memory_data(memory));
    for (int peer = 1; rank == 0 && peer < size; peer++)
        CHECK_OK(tutti_peers_wait_signal(peers, peer, 0, ON_STREAM));
    if (rank == 0) {
        CHECK_EQ(read_word(view.data), 42);
        CHECK_EQ(read_word((char *)view.data + bytes - 4), 42);
    } else {
        set_words(view.data, 42, bytes / 4);
        CHECK_OK(tutti_peers_signal(peers, 0, 0, ON_STREAM));
    }
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    if (rank != 0)
        set_words(view.data, 43, bytes / 4);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    if (rank == 0)
        CHECK_EQ(read_word((char *)view.data + bytes - 4), 43);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
}

TEST_GPU(empty_strided_p2p) { /* with the device's context current, and without any */
    tutti_group *group = tutti_world_group(world);
    void *ordinary = gpu_private(16384);
    CHECK(tutti_memory_find(world, ordinary) == NULL); /* which nobody can meet with */
    gpu_private_free(ordinary);
    CUcontext mine, none;
    CHECK_CUDA(gpu.cuCtxGetCurrent(&mine));
    for (int current = 0; current < 2; current++) {
        CHECK_CUDA(gpu.cuCtxSetCurrent(current ? mine : NULL));
        tutti_memory *memory = gpu_symmetric(world, 64 * 64 * 4);
        tutti_peers *peers = meet(memory, group);
        CHECK_CUDA(gpu.cuCtxGetCurrent(&none));
        CHECK(none == (current ? mine : NULL));
        CHECK_CUDA(gpu.cuCtxSetCurrent(mine));
        verify(group, memory, peers, 64 * 64 * 4);
        finish(group, peers, memory);
    }
}

static tutti_memory *persistent(tutti_world *world, size_t bytes, tutti_status expected) {
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    tutti_memory *memory = NULL;
    options.device = TUTTI_CUDA_AT(0);
    options.persistent = true;
    options.persistent_id = 42;
    CHECK_STATUS(tutti_memory_alloc(world, bytes, &options, &memory), expected);
    return memory;
}

TEST_GPU(empty_strided_p2p_persistent) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = persistent(world, 64 * 64 * 4, TUTTI_OK);
    void *address = tutti_memory_data(memory);
    (void)persistent(world, 64 * 64 * 4, TUTTI_ERROR_STATE);
    CHECK_MESSAGE("still active");
    tutti_memory_release(memory);
    memory = persistent(world, 64 * 64 * 4, TUTTI_OK);
    CHECK(tutti_memory_data(memory) == address);
    tutti_peers *peers = meet(memory, group);
    verify(group, memory, peers, 64 * 64 * 4);
    finish(group, peers, memory);
}

TEST_GPU(symm_mem_empty_storage_reuse) { /* the same address each time, and every rendezvous of it works */
    tutti_group *group = tutti_world_group(world);
    void *address = NULL;
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory = persistent(world, 4096, TUTTI_OK);
        CHECK(address == NULL || address == tutti_memory_data(memory));
        address = tutti_memory_data(memory);
        tutti_peers *peers = meet(memory, group);
        set_words(address, 1, 1024);
        CHECK_OK(tutti_all_reduce(group, address, address, 1024, TUTTI_U32, TUTTI_SUM, ON_STREAM));
        CHECK_EQ(read_word((char *)address + 4092), (uint32_t)tutti_group_size(group));
        finish(group, peers, memory);
    }
}

/* What ranks tell each other at a rendezvous goes through the group, and leaves nothing in the world's store. */
TEST_GPU(rendezvous_via_pg_allgather) {
    tutti_group *all = tutti_world_group(world), *group;
    tutti_store *store = tutti_world_store(world);
    int rank = tutti_group_rank(all), size = tutti_group_size(all), ranks[64];
    int64_t before, after;
    for (int i = 0; i < size; i++)
        ranks[i] = size - 1 - i; /* numbered the other way */
    CHECK_OK(tutti_group_new(world, ranks, size, TUTTI_OPTIONS(tutti_group_options, .keep_order = true), &group));
    CHECK_EQ(tutti_group_rank(group), size - 1 - rank);
    CHECK_OK(tutti_barrier(all, NULL));
    CHECK_OK(tutti_store_num_keys(store, &before));
    CHECK_OK(tutti_barrier(all, NULL));
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory = gpu_symmetric(world, 4096);
        tutti_peers *peers = meet(memory, group);
        set_words(tutti_memory_data(memory), (uint32_t)(100 * round + rank), 1024);
        CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
        for (int peer = 0; peer < size; peer++)
            CHECK_EQ(read_word(tutti_peers_buffer(peers, peer)), (uint32_t)(100 * round + size - 1 - peer));
        finish(group, peers, memory);
    }
    CHECK_OK(tutti_store_num_keys(store, &after));
    CHECK_EQ(after, before);
    CHECK_OK(tutti_barrier(all, NULL));
    tutti_group_release(group);
    CHECK_OK(tutti_barrier(all, NULL));
}

/* One block meets with the world and with half of it; each numbers its members by itself. */
TEST_GPU_OF(4, subgroup) {
    tutti_group *all = tutti_world_group(world), *half;
    int rank = tutti_group_rank(all), size = tutti_group_size(all), each = size / 2;
    CHECK_OK(tutti_group_new_subgroups(all, each, NULL, NULL, &half));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *of_all = meet(memory, all), *of_half = meet(memory, half);
    CHECK(tutti_peers_rank(of_all) == rank && tutti_peers_size(of_all) == size);
    CHECK(tutti_peers_rank(of_half) == rank % each && tutti_peers_size(of_half) == each);
    set_words(tutti_memory_data(memory), (uint32_t)rank + 1, 1024);
    CHECK_OK(tutti_peers_barrier(of_all, 0, ON_STREAM));
    for (int peer = 0; peer < size; peer++)
        CHECK_EQ(read_word(tutti_peers_buffer(of_all, peer)), (uint32_t)peer + 1);
    for (int peer = 0; peer < each; peer++)
        CHECK_EQ(read_word(tutti_peers_buffer(of_half, peer)), (uint32_t)(rank / each * each + peer) + 1);
    CHECK_OK(tutti_peers_barrier(of_half, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_OK(tutti_barrier(all, NULL));
    tutti_peers_release(of_half);
    tutti_group_release(half);
    finish(all, of_all, memory);
}

/* A meeting of members ranks[0..count): all of them sum over the group; others do nothing. */
static void sum_among(tutti_world *world, const int *ranks, int count) {
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, ranks, count, NULL, &group));
    if (group == TUTTI_NON_GROUP_MEMBER)
        return;
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    set_words(tutti_memory_data(memory), 1, 1024);
    CHECK_OK(tutti_all_reduce(group, tutti_memory_data(memory), tutti_memory_data(memory), 1024, TUTTI_U32, TUTTI_SUM,
                              ON_STREAM));
    CHECK_EQ(read_word(tutti_memory_data(memory)), (uint32_t)count);
    finish(group, peers, memory);
    tutti_group_release(group);
}

static void first_ranks(tutti_world *world, int *ranks) {
    for (int i = 0; i < tutti_group_size(tutti_world_group(world)); i++)
        ranks[i] = i;
}

/* A rank that sat out while the others met is in step with them afterwards. */
TEST_GPU_OF(3, rendezvous_after_strict_subgroup) {
    int size = tutti_group_size(tutti_world_group(world)), ranks[64];
    first_ranks(world, ranks);
    for (int round = 0; round < 2; round++) {
        sum_among(world, ranks, size - 1);
        sum_among(world, ranks, size);
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* Two groups that share a member meet independently of each other. */
TEST_GPU_OF(3, rendezvous_on_overlapping_subgroups) {
    int size = tutti_group_size(tutti_world_group(world)), ranks[64];
    first_ranks(world, ranks);
    for (int round = 0; round < 2; round++) {
        sum_among(world, ranks, size / 2 + 1);
        sum_among(world, ranks + size / 2, size - size / 2);
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(rendezvous_after_group_name_recycled) {
    tutti_group *all = tutti_world_group(world);
    int size = tutti_group_size(all), ranks[64];
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    for (int round = 0; round < 4; round++) { /* groups come and go; what they were called is used again */
        tutti_group *group;
        CHECK_OK(tutti_group_new(world, ranks, size, NULL, &group));
        tutti_memory *memory = gpu_symmetric(world, 4096);
        tutti_peers *peers = meet(memory, group);
        set_words(tutti_memory_data(memory), 3, 64);
        CHECK_OK(tutti_all_reduce(group, tutti_memory_data(memory), tutti_memory_data(memory), 64, TUTTI_U32, TUTTI_SUM,
                                  ON_STREAM));
        CHECK_EQ(read_word(tutti_memory_data(memory)), 3u * (uint32_t)size);
        finish(group, peers, memory);
        tutti_group_release(group);
        CHECK_OK(tutti_barrier(all, NULL));
    }
}

TEST_GPU(pg_rendezvous_abort_after) { /* a block is its owner's, whatever became of a group that it met with */
    tutti_group *all = tutti_world_group(world), *group;
    int size = tutti_group_size(all), ranks[64];
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, size, NULL, &group));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    if (tutti_group_rank(all) == 0)
        CHECK_OK(tutti_group_abort(group, "for the test"));
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 3000 && status == TUTTI_OK; i++) {
        usleep(5000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_ABORTED);
    set_words(tutti_memory_data(memory), 7, 64);
    CHECK_EQ(read_word(tutti_memory_data(memory)), 7);
    tutti_peers *again = meet(memory, all); /* and can meet with another */
    CHECK_OK(tutti_peers_barrier(again, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_OK(tutti_barrier(all, NULL));
    tutti_peers_release(peers);
    tutti_group_release(group);
    finish(all, again, memory);
}

static tutti_pool *pool_on_gpu(tutti_world *world) {
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), &pool));
    return pool;
}

static tutti_memory *from_pool(tutti_pool *pool, size_t bytes) {
    tutti_memory *memory;
    CHECK_OK(tutti_pool_alloc(pool, bytes, &memory));
    return memory;
}

TEST_GPU(mempool_tensor_factory) { /* what comes from a pool is symmetric: tests/tensor has the compute ops */
    tutti_group *group = tutti_world_group(world);
    tutti_pool *pool = pool_on_gpu(world);
    tutti_memory *memory = from_pool(pool, 1 << 20);
    char *data = tutti_memory_data(memory);
    CHECK(tutti_memory_find(world, data) == memory);
    tutti_peers *peers = meet(memory, group);
    set_words(data, 1, 1000);
    CHECK_OK(tutti_one_shot_all_reduce(group, data, data + 4096, 1000, TUTTI_U32, TUTTI_SUM, ON_STREAM));
    CHECK_EQ(read_word(data + 4096), (uint32_t)tutti_group_size(group));
    finish(group, peers, memory);
    tutti_pool_release(pool);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_GPU(mempool_storage_reuse) {
    tutti_pool *pool = pool_on_gpu(world);
    void *address = NULL;
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory = from_pool(pool, 1 << 20);
        CHECK(address == NULL || address == tutti_memory_data(memory));
        address = tutti_memory_data(memory);
        tutti_memory_release(memory);
    }
    tutti_pool_release(pool);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(mempool_recycled_alloc_signal_pad) { /* signals and barriers work on what was used before */
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_pool *pool = pool_on_gpu(world);
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory = from_pool(pool, 1 << 20);
        tutti_peers *peers = meet(memory, group);
        CHECK_EQ(read_word(tutti_memory_signal_pad(memory)), 0);
        CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
        CHECK_OK(tutti_peers_signal(peers, (rank + 1) % size, 0, ON_STREAM));
        CHECK_OK(tutti_peers_wait_signal(peers, (rank + size - 1) % size, 0, ON_STREAM));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        finish(group, peers, memory);
    }
    tutti_pool_release(pool);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_GPU(mempool_large_alloc_barrier) {
    tutti_group *group = tutti_world_group(world);
    tutti_pool *pool = pool_on_gpu(world);
    tutti_memory *memory = from_pool(pool, 16 << 20);
    tutti_peers *peers = meet(memory, group);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    finish(group, peers, memory);
    tutti_pool_release(pool);
    CHECK_OK(tutti_barrier(group, NULL));
}

static tutti_view words_of(tutti_memory *memory, int64_t count) {
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_view_of(tutti_memory_data(memory), TUTTI_U32, &count, 1, &view));
    view.device = TUTTI_CUDA_AT(0);
    return view;
}

TEST_GPU(memset32) {
    tutti_memory *memory = gpu_symmetric(world, 256);
    tutti_view view = words_of(memory, 64);
    uint32_t host[64];
    CHECK_OK(tutti_view_memset32(world, &view, 32, 1, 16, ON_STREAM));
    gpu_read(host, view.data, sizeof host);
    for (int i = 0; i < 64; i++)
        CHECK_EQ(host[i], (uint32_t)(i >= 32 && i < 48));
    CHECK_OK(tutti_view_memset32(world, &view, 0, 5, 64, ON_STREAM));
    CHECK_OK(tutti_view_memset32(world, &view, 63, 6, 1, ON_STREAM));
    CHECK_EQ(read_word(view.data), 5);
    CHECK_EQ(read_word((uint32_t *)view.data + 63), 6);
    CHECK_STATUS(tutti_view_memset32(world, &view, -1, 1, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_memset32(world, &view, 60, 5, 5, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, -1, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, 1, 0, ON_STREAM), TUTTI_ERROR_RANGE);
    view.dtype = TUTTI_F32;
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, 1, 1, ON_STREAM), TUTTI_ERROR_ARGUMENT);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(stream_write_value32) { /* word by word: a triangle of ones */
    tutti_memory *memory = gpu_symmetric(world, 16);
    tutti_view view = words_of(memory, 4);
    uint32_t host[4];
    for (int64_t row = 0; row < 4; row++) {
        CHECK_OK(tutti_view_write_value32(world, &view, row, 1, ON_STREAM));
        gpu_read(host, view.data, sizeof host);
        for (int i = 0; i < 4; i++)
            CHECK_EQ(host[i], (uint32_t)(i <= row));
    }
    CHECK_STATUS(tutti_view_write_value32(world, &view, -1, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_write_value32(world, &view, 4, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_write_value32(world, &view, 0, INT64_C(1) << 32, ON_STREAM), TUTTI_ERROR_RANGE);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(set_device_is_not_needed_and_no_context_has_to_be_current) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    CUcontext mine, none, other = NULL;
    CUresult (*create)(CUcontext *, unsigned, CUdevice) =
        (CUresult(*)(CUcontext *, unsigned, CUdevice))driver_symbol("cuCtxCreate_v2");
    CUresult (*destroy)(CUcontext) = (CUresult(*)(CUcontext))driver_symbol("cuCtxDestroy_v2");
    CHECK_CUDA(gpu.cuCtxGetCurrent(&mine));
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    uint32_t *data = tutti_memory_data(memory);
    set_words(data, 1, 64);
    CHECK_CUDA(create(&other, 0, 0));       /* another one of the same device … */
    CHECK_CUDA(gpu.cuCtxPopCurrent(&none)); /* … which was pushed: with this and NULL none is left */
    CUcontext contexts[3] = { NULL, other, mine };
    uint32_t expected = 1;
    for (int i = 0; i < 3; i++) {
        CHECK_CUDA(gpu.cuCtxSetCurrent(contexts[i]));
        CHECK_OK(tutti_all_reduce(group, data, data, 64, TUTTI_U32, TUTTI_SUM, ON_STREAM));
        CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
        CHECK_CUDA(gpu.cuCtxGetCurrent(&none));
        CHECK(none == contexts[i]); /* left as it was */
        expected *= (uint32_t)size;
    }
    CHECK_EQ(read_word(data), expected);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_CUDA(destroy(other));
    finish(group, peers, memory);
}
