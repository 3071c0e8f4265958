/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives of device memory.
 */
#include "gpu.h"

static uint32_t word(int from, int to, size_t i, int round) {
    return (uint32_t)from << 28 ^ (uint32_t)to << 24 ^ (uint32_t)round << 20 ^ (uint32_t)i;
}

/* Round a ring: everybody sends to the next, then receives from the one before. */
static void ring(tutti_group *group, size_t count, int rounds) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    uint32_t *in = gpu_private(count * 4), *out = gpu_private(count * 4), *host = malloc(count * 4);
    for (int round = 0; round < rounds; round++) {
        for (size_t i = 0; i < count; i++)
            host[i] = word(rank, next, i, round);
        gpu_write(in, host, count * 4);
        gpu_lockstep(group);
        tutti_received received = TUTTI_RECEIVED_INIT;
        bool first = rank % 2 == 0; /* a long message waits for its receiver */
        for (int step = 0; step < 2; step++) {
            if ((step == 0) == first)
                CHECK_OK(tutti_send(group, in, count, TUTTI_U32, next, 7, ON_STREAM));
            else
                CHECK_OK(tutti_recv(group, out, count, TUTTI_U32, before, 7,
                                    TUTTI_OPTIONS(tutti_call, .stream = stream, .received = &received)));
        }
        CHECK(received.source == before && received.tag == 7 && received.count == count);
        gpu_read(host, out, count * 4);
        CHECK_OK(tutti_group_check(group));
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(host[i], word(before, rank, i, round));
        gpu_lockstep(group);
    }
    free(host);
    gpu_private_free(in);
    gpu_private_free(out);
}

TEST_GPU(messages_of_device_memory_arrive_at_every_size) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 4096); /* so that the world knows of the device */
    CHECK_OK(tutti_group_prepare(group, NULL));
    CHECK(tutti_group_size(group) % 2 == 0); /* a ring of long messages needs that */
    ring(group, 0, 2);
    ring(group, 1, 3);
    ring(group, 1000, 5);
    ring(group, 1 << 18, 3);
    ring(group, (5 << 20) + 3, 2);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* Every second column of a matrix, to every third of another's. */
TEST_GPU(elements_that_lie_apart_are_sent_and_received) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    CHECK_OK(tutti_group_prepare(group, NULL));
    static const tutti_dtype types[] = { TUTTI_U8, TUTTI_U32, TUTTI_I64 };
    for (int type = 0; type < 3; type++) {
        size_t element = tutti_dtype_size(types[type]), count = 90000, block = 3; /* more than one chunk with 8 ranks */
        tutti_strided sent = TUTTI_STRIDED_INIT, taken = TUTTI_STRIDED_INIT;
        sent.block = block;
        sent.stride = 7;
        taken.block = 5;
        taken.stride = 11;
        size_t in_bytes = count / block * 7 * element, out_bytes = count / 5 * 11 * element;
        unsigned char *in = gpu_private(in_bytes), *out = gpu_private(out_bytes), *host = malloc(out_bytes);
        unsigned char *source = malloc(in_bytes);
        for (size_t i = 0; i < in_bytes; i++)
            source[i] = (unsigned char)(i * 31 + (size_t)before * 7);
        unsigned char *mine = malloc(in_bytes);
        for (size_t i = 0; i < in_bytes; i++)
            mine[i] = (unsigned char)(i * 31 + (size_t)rank * 7);
        gpu_write(in, mine, in_bytes);
        memset(host, 0xee, out_bytes);
        gpu_write(out, host, out_bytes);
        gpu_lockstep(group);
        for (int step = 0; step < 2; step++) {
            if ((step == 0) == (rank % 2 == 0))
                CHECK_OK(tutti_send(group, in, count, types[type], next, 9,
                                    TUTTI_OPTIONS(tutti_call, .stream = stream, .strided_in = &sent)));
            else
                CHECK_OK(tutti_recv(group, out, count, types[type], before, 9,
                                    TUTTI_OPTIONS(tutti_call, .stream = stream, .strided_out = &taken)));
        }
        gpu_read(host, out, out_bytes);
        CHECK_OK(tutti_group_check(group));
        for (size_t i = 0; i < count; i++) {
            const unsigned char *from = source + (i / block * 7 + i % block) * element;
            CHECK(memcmp(host + (i / 5 * 11 + i % 5) * element, from, element) == 0);
        }
        for (size_t i = 0; i < count / 5; i++) /* what lies between stays */
            CHECK(host[(i * 11 + 5) * element] == 0xee && host[(i * 11 + 10) * element] == 0xee);
        gpu_lockstep(group);
        free(source);
        free(mine);
        free(host);
        gpu_private_free(in);
        gpu_private_free(out);
    }
}

TEST_GPU(a_short_message_is_on_its_way_before_the_receiver_comes) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    uint32_t *data = tutti_memory_data(memory), value = (uint32_t)rank + 100, got;
    CHECK_OK(tutti_group_prepare(group, NULL));
    gpu_write(data, &value, 4);
    CHECK_OK(tutti_send(group, data, 1, TUTTI_U32, (rank + 1) % size, 1, ON_STREAM)); /* everybody sends first */
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_OK(tutti_recv(group, data + 1, 1, TUTTI_U32, (rank + size - 1) % size, 1, ON_STREAM));
    gpu_read(&got, data + 1, 4);
    CHECK_EQ(got, (uint32_t)((rank + size - 1) % size) + 100);
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
}

TEST_GPU(what_messages_of_device_memory_cannot_do_is_an_error_before_anything_begins) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    void *data = tutti_memory_data(memory);
    CHECK_STATUS(tutti_send(group, data, 1, TUTTI_U32, 0, 1, ON_STREAM), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("tutti_group_prepare");
    CHECK_OK(tutti_group_prepare(group, NULL));
    CHECK_STATUS(tutti_recv(group, data, 1, TUTTI_U32, TUTTI_ANY_SOURCE, 1, ON_STREAM), TUTTI_ERROR_UNSUPPORTED);
    CHECK_STATUS(tutti_recv(group, data, 1, TUTTI_U32, 0, TUTTI_ANY_TAG, ON_STREAM), TUTTI_ERROR_UNSUPPORTED);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
}

TEST_GPU(another_tag_or_length_than_was_sent_is_a_mismatch) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    void *data = tutti_memory_data(memory);
    CHECK_OK(tutti_group_prepare(group, NULL));
    if (rank == 0)
        CHECK_OK(tutti_send(group, data, 8, TUTTI_U32, 1, 1, ON_STREAM));
    if (rank == 1)
        CHECK_OK(tutti_recv(group, data, 8, TUTTI_U32, 0, 2, ON_STREAM));
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 2000 && status == TUTTI_OK; i++) {
        usleep(5000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    tutti_memory_release(memory);
}
