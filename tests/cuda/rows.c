/* SPDX-License-Identifier: Apache-2.0
 *
 * What PyTorch's own tests of symmetric memory prove, on device memory: each test is named after the one there, without
 * its `test_`. Those that need several GPUs, multicast or a compiler are not here; streams.c, memory.c, collective.c
 * and together.c name those that they hold.
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

TEST_GPU(get_signal_pad_size_and_set_signal_pad_size_with_allocation) {
    tutti_group *group = tutti_world_group(world);
    size_t usual = tutti_memory_signal_pad_bytes(world);
    CHECK(usual > 0);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    CHECK_EQ(tutti_memory_pad_bytes(memory), usual);
    tutti_memory_release(memory);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 1 << 20));
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), 1 << 20);
    memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    CHECK_EQ(tutti_peers_pad_bytes(peers), 1 << 20);
    tutti_view pad = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_peers_get_signal_pad(peers, 0, NULL, 0, 0, 0, &pad));
    CHECK_EQ(tutti_view_bytes(&pad), 1 << 20);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 0));
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), usual);
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

TEST_GPU(channels_and_ranks_out_of_bounds) { /* barrier_, put_wait_signal_channel_ and _rank_out_of_bounds */
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers = meet(memory, group);
    int channels = tutti_peers_channels(peers);
    CHECK_EQ(channels, (int)(tutti_peers_pad_bytes(peers) / (4 * (size_t)size)));
    static const int none[] = { -1, 1 << 30 };
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(tutti_peers_barrier(peers, none[i], ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_STATUS(tutti_peers_signal(peers, 0, none[i], ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_STATUS(tutti_peers_wait_signal(peers, 0, none[i], ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_STATUS(tutti_peers_signal(peers, none[i], 0, ON_STREAM), TUTTI_ERROR_RANGE);
        CHECK_STATUS(tutti_peers_wait_signal(peers, none[i], 0, ON_STREAM), TUTTI_ERROR_RANGE);
    }
    CHECK_STATUS(tutti_peers_barrier(peers, channels, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_OK(tutti_peers_barrier(peers, channels - 1, ON_STREAM)); /* the last one works */
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

TEST_GPU(one_shot_all_reduce) { /* with and without the copy, at offset 0 and 16 */
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    static const size_t sizes[] = { 4, 8192, 8196 };
    tutti_memory *memory = gpu_symmetric(world, 16384);
    tutti_peers *peers = meet(memory, group);
    float *input = gpu_private(16384), *out = gpu_private(16384), host[2050];
    gpu_lockstep(group);
    for (int i = 0; i < 3; i++) {
        for (int offset = 0; offset <= 16; offset += 16) {
            size_t count = sizes[i] / 4;
            float *buffer = (float *)((char *)tutti_memory_data(memory) + offset);
            set_words(input, 0x40000000, count); /* 2 */
            set_words(buffer, 0x3f800000, count);
            set_words(out, 0, count + 1);
            CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
            CHECK_OK(tutti_one_shot_all_reduce(group, buffer, out, count, TUTTI_F32, TUTTI_SUM, ON_STREAM));
            gpu_read(host, out, (count + 1) * 4);
            CHECK(host[0] == (float)size && host[count - 1] == (float)size && host[count] == 0);
            CHECK_OK(tutti_one_shot_all_reduce_copy(group, buffer, count, input, out, count, TUTTI_F32, TUTTI_SUM,
                                                    ON_STREAM));
            gpu_read(host, out, count * 4);
            CHECK(host[0] == 2 * (float)size && host[count - 1] == 2 * (float)size);
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
    gpu_private_free(input);
    gpu_private_free(out);
    finish(group, peers, memory);
}

TEST_GPU(reduce_scatter) { /* and reduce_scatter_corner_cases */
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
    CHECK_OK(tutti_reduce_scatter_out(group, in, out, 0, 0, false, TUTTI_U32, TUTTI_SUM, ON_STREAM));
    CHECK_STATUS(tutti_reduce_scatter_out(group, in, out, 1, (size_t)size + 1, false, TUTTI_U32, TUTTI_SUM, ON_STREAM),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("divisible");
    CHECK_STATUS(tutti_reduce_scatter_out(group, in, out, (size_t)size, 1, true, TUTTI_U32, TUTTI_SUM, ON_STREAM),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("last dimension");
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    gpu_private_free(out);
    finish(group, peers, memory);
}

static void check_low_contention(tutti_world *world, bool symmetric) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t part = 4096;
    tutti_memory *memory = gpu_symmetric(world, part * (size_t)size * 4);
    tutti_peers *peers = meet(memory, group);
    float *in = symmetric ? tutti_memory_data(memory) : gpu_private(part * (size_t)size * 4);
    float *out = gpu_private(part * (size_t)size * 4), *host = malloc(part * (size_t)size * 4);
    for (int r = 0; r < size; r++) /* chunk r is filled with r */
        for (size_t i = 0; i < part; i++)
            host[(size_t)r * part + i] = (float)r;
    gpu_write(in, host, part * (size_t)size * 4);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_low_contention_reduce_scatter(group, in, out, part, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    gpu_read(host, out, part * 4);
    for (size_t i = 0; i < part; i++)
        CHECK(host[i] == (float)(rank * size));
    CHECK_OK(tutti_low_contention_reduce_scatter(group, in, out, part, TUTTI_F32, TUTTI_AVG, ON_STREAM));
    gpu_read(host, out, part * 4);
    CHECK(host[0] == (float)rank && host[part - 1] == (float)rank);
    for (size_t i = 0; i < part; i++)
        host[i] = (float)(rank * 10);
    CHECK_OK(tutti_barrier(group, NULL));
    gpu_write(in, host, part * 4);
    CHECK_OK(tutti_low_contention_all_gather(group, in, out, part, TUTTI_F32, ON_STREAM));
    gpu_read(host, out, part * (size_t)size * 4);
    for (int r = 0; r < size; r++)
        CHECK(host[(size_t)r * part] == (float)(r * 10) && host[(size_t)(r + 1) * part - 1] == (float)(r * 10));
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    gpu_private_free(out);
    if (!symmetric)
        gpu_private_free(in);
    finish(group, peers, memory);
}

TEST_GPU(low_contention_all_gather_and_low_contention_reduce_scatter) {
    check_low_contention(world, true);
    check_low_contention(world, false);
}

TEST_GPU(empty_strided_p2p_persistent_and_symm_mem_empty_storage_reuse) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA_AT(0);
    options.persistent = true;
    options.persistent_id = 42;
    void *address = NULL;
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory, *again;
        CHECK_OK(tutti_memory_alloc(world, 4096, &options, &memory));
        CHECK(address == NULL || address == tutti_memory_data(memory));
        address = tutti_memory_data(memory);
        CHECK_STATUS(tutti_memory_alloc(world, 4096, &options, &again), TUTTI_ERROR_STATE);
        CHECK_MESSAGE("still active");
        tutti_peers *peers = meet(memory, group);
        set_words(address, 0x3f800000, 1024);
        CHECK_OK(tutti_all_reduce(group, address, address, 1024, TUTTI_F32, TUTTI_SUM, ON_STREAM));
        CHECK_EQ(read_word(address), size == 2 ? 0x40000000 : size == 4 ? 0x40800000 : 0x41000000);
        finish(group, peers, memory);
    }
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

TEST_GPU(mempool_tensor_factory_compute_ops_and_storage_reuse) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA_AT(0);
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, &options, &pool));
    void *address = NULL;
    for (int round = 0; round < 3; round++) { /* mempool_recycled_alloc_signal_pad: signals work after recycling */
        tutti_memory *memory;
        CHECK_OK(tutti_pool_alloc(pool, 1 << 20, &memory));
        CHECK(address == NULL || address == tutti_memory_data(memory));
        address = tutti_memory_data(memory);
        CHECK(tutti_memory_find(world, address) == memory);
        tutti_peers *peers = meet(memory, group);
        set_words(address, 1, 1000);
        CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
        CHECK_OK(
            tutti_one_shot_all_reduce(group, address, (char *)address + 4096, 1000, TUTTI_U32, TUTTI_SUM, ON_STREAM));
        CHECK_EQ(read_word((char *)address + 4096), (uint32_t)size);
        finish(group, peers, memory);
    }
    tutti_memory *large; /* mempool_large_alloc_barrier */
    CHECK_OK(tutti_pool_alloc(pool, 16 << 20, &large));
    tutti_peers *peers = meet(large, group);
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    finish(group, peers, large);
    tutti_pool_release(pool);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_GPU(memset32_and_stream_write_value32) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 256);
    tutti_view view = TUTTI_VIEW_INIT;
    int64_t shape[1] = { 64 };
    CHECK_OK(tutti_view_of(tutti_memory_data(memory), TUTTI_U32, shape, 1, &view));
    view.device = TUTTI_CUDA_AT(0);
    CHECK_OK(tutti_view_memset32(world, &view, 0, 5, 64, ON_STREAM));
    CHECK_OK(tutti_view_write_value32(world, &view, 3, 9, ON_STREAM));
    CHECK_EQ(read_word(view.data), 5);
    CHECK_EQ(read_word((uint32_t *)view.data + 3), 9);
    CHECK_STATUS(tutti_view_memset32(world, &view, 60, 5, 5, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, -1, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, 1, 0, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_write_value32(world, &view, 64, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    view.dtype = TUTTI_F32;
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, 1, 1, ON_STREAM), TUTTI_ERROR_ARGUMENT);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_GPU(set_device_is_not_needed_and_no_context_has_to_be_current) { /* empty_strided_p2p [set_device] */
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
