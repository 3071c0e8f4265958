/* SPDX-License-Identifier: Apache-2.0
 *
 * Several streams of one group: signals, barriers and collectives on them come one after the other, as they were
 * called. Tests that PyTorch has, too, have their names (rows.c).
 */
#include <pthread.h>
#include <tutti/trace.h>

#include "graph.h"

typedef struct bench {
    tutti_group *group;
    int rank, size, next, before;
    tutti_memory *memory;
    tutti_peers *peers;
    CUstream first, second;
} bench;

static void begin(bench *bench, tutti_world *world) {
    bench->group = tutti_world_group(world);
    bench->rank = tutti_group_rank(bench->group);
    bench->size = tutti_group_size(bench->group);
    bench->next = (bench->rank + 1) % bench->size;
    bench->before = (bench->rank + bench->size - 1) % bench->size;
    bench->memory = gpu_symmetric(world, 1 << 16);
    CHECK_OK(tutti_memory_rendezvous(bench->memory, bench->group, &bench->peers));
    CHECK_OK(tutti_group_prepare(bench->group, NULL));
    bench->first = stream;
    bench->second = stream_new();
}

static void end(bench *bench) {
    CHECK_CUDA(gpu.cuStreamSynchronize(bench->first));
    CHECK_CUDA(gpu.cuStreamSynchronize(bench->second));
    CHECK_OK(tutti_group_check(bench->group));
    CHECK_OK(tutti_barrier(bench->group, NULL));
    CHECK_CUDA(gpu.cuStreamDestroy(bench->second));
    tutti_peers_release(bench->peers);
    tutti_memory_release(bench->memory);
}

/* Barriers on two streams of one group do not steal each other's words. */
TEST_GPU(stream_serialization_barrier_two_streams) {
    bench bench;
    begin(&bench, world);
    for (int round = 0; round < 10; round++) {
        if (bench.rank == 0)
            gpu_delay(bench.first, 20);
        CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
        CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.second)));
    }
    end(&bench);
}

/* Signals on two streams of one group are ordered. */
TEST_GPU(stream_serialization_put_wait_two_streams) {
    bench bench;
    begin(&bench, world);
    for (int round = 0; round < 10; round++) {
        if (bench.rank == 0)
            gpu_delay(bench.first, 10);
        CHECK_OK(tutti_peers_signal(bench.peers, bench.next, 0, ON(bench.first)));
        CHECK_OK(tutti_peers_wait_signal(bench.peers, bench.before, 0, ON(bench.second)));
        CHECK_OK(tutti_peers_signal(bench.peers, bench.next, 0, ON(bench.second)));
        CHECK_OK(tutti_peers_wait_signal(bench.peers, bench.before, 0, ON(bench.first)));
    }
    end(&bench);
}

/* Only the earlier operation is waited for, not what comes after it on its stream. */
TEST_GPU(stream_serialization_waits_on_pad_kernel_only) {
    bench bench;
    begin(&bench, world);
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
    if (bench.rank == 0) /* alone: host functions of ranks that share a context run one after the other */
        gpu_delay(bench.first, 1500);
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.second)));
    CHECK_CUDA(gpu.cuStreamSynchronize(bench.second));
    if (bench.rank == 0)
        CHECK_EQ(gpu.cuStreamQuery(bench.first), CUDA_ERROR_NOT_READY);
    end(&bench);
}

typedef struct other_thread {
    bench *bench;
    CUcontext context;
} other_thread;

static void *barriers_of_another_thread(void *argument) {
    other_thread *other = argument;
    CHECK_CUDA(gpu.cuCtxSetCurrent(other->context));
    for (int round = 0; round < 20; round++)
        CHECK_OK(tutti_peers_barrier(other->bench->peers, 0, ON(other->bench->second)));
    return NULL;
}

/* Two host threads may use one group, each on its stream. */
TEST_GPU(stream_serialization_concurrent_threads) {
    bench bench;
    begin(&bench, world);
    other_thread other = { .bench = &bench };
    pthread_t thread;
    CHECK_CUDA(gpu.cuCtxGetCurrent(&other.context));
    CHECK_EQ(pthread_create(&thread, NULL, barriers_of_another_thread, &other), 0);
    for (int round = 0; round < 20; round++)
        CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
    CHECK_EQ(pthread_join(thread, NULL), 0);
    end(&bench);
}

/* Two barriers, on two streams of one capture; the edges of the graph. */
static CUgraph capture_two(bench *bench, tutti_peers *one, tutti_peers *two) {
    graph_begin(bench->first);
    stream_follow(bench->second, bench->first);
    CHECK_OK(tutti_peers_barrier(one, 0, ON(bench->first)));
    CHECK_OK(tutti_peers_barrier(two, 0, ON(bench->second)));
    stream_follow(bench->first, bench->second);
    return graph_end(bench->first);
}

/* In a capture the order is an edge of the graph for one group, and none for two. */
TEST_GPU(stream_serialization_graph_dependency) {
    bench bench;
    begin(&bench, world);
    tutti_memory *another = gpu_symmetric(world, 4096);
    tutti_peers *same_group, *other_group;
    tutti_group *group;
    int *ranks = malloc(sizeof *ranks * (size_t)bench.size);
    for (int i = 0; i < bench.size; i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, bench.size, NULL, &group));
    CHECK_OK(tutti_memory_rendezvous(another, bench.group, &same_group));
    CHECK_OK(tutti_memory_rendezvous(another, group, &other_group));
    CHECK_EQ(graph_edges(capture_two(&bench, bench.peers, same_group)), 1);
    CHECK_EQ(graph_edges(capture_two(&bench, bench.peers, other_group)), 0);
    CHECK_OK(tutti_barrier(bench.group, NULL));
    tutti_peers_release(same_group);
    tutti_peers_release(other_group);
    tutti_memory_release(another);
    tutti_group_release(group);
    free(ranks);
    end(&bench);
}

/* Collectives on two streams of one group see each other's results. */
TEST_GPU(stream_serialization_one_shot_all_reduce) {
    bench bench;
    begin(&bench, world);
    float *data = tutti_memory_data(bench.memory), host[1000], expected = 1;
    for (int i = 0; i < 1000; i++)
        host[i] = 1;
    gpu_write(data, host, sizeof host);
    CHECK_OK(tutti_barrier(bench.group, NULL));
    for (int round = 0; round < 6; round++) {
        if (bench.rank == round % bench.size)
            gpu_delay(bench.first, 15);
        CHECK_OK(tutti_all_reduce(bench.group, data, data, 1000, TUTTI_F32, TUTTI_SUM,
                                  ON(round % 2 == 0 ? bench.first : bench.second)));
        expected *= (float)bench.size;
    }
    CHECK_CUDA(gpu.cuStreamSynchronize(bench.second));
    gpu_read(host, data, sizeof host);
    CHECK(host[0] == expected && host[999] == expected);
    end(&bench);
}

/* A captured barrier replays. */
TEST_GPU(stream_serialization_cuda_graph_capture) {
    bench bench;
    begin(&bench, world);
    graph_begin(bench.first);
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
    CUgraphExec executable = graph_instantiate(graph_end(bench.first));
    for (int round = 0; round < 4; round++) {
        graph_launch(executable, bench.first);
        CHECK_CUDA(gpu.cuStreamSynchronize(bench.first));
        CHECK_OK(tutti_barrier(bench.group, NULL));
    }
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.second)));
    end(&bench);
}

/* A capture that never runs holds nobody up. */
TEST_GPU(stream_serialization_capture_without_replay) {
    bench bench;
    begin(&bench, world);
    graph_begin(bench.first);
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
    (void)graph_end(bench.first);
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.second)));
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
    end(&bench);
}

/* A graph of forked streams replays, and leaves the user's pad alone. */
TEST_GPU(stream_serialization_cuda_graph_forked_streams) {
    bench bench;
    begin(&bench, world);
    graph_begin(bench.first);
    stream_follow(bench.second, bench.first);
    CHECK_OK(tutti_peers_barrier(bench.peers, 0, ON(bench.first)));
    CHECK_OK(tutti_peers_signal(bench.peers, bench.next, 1, ON(bench.second)));
    CHECK_OK(tutti_peers_wait_signal(bench.peers, bench.before, 1, ON(bench.first)));
    stream_follow(bench.first, bench.second);
    CUgraphExec executable = graph_instantiate(graph_end(bench.first));
    for (int round = 0; round < 4; round++) {
        graph_launch(executable, bench.first);
        CHECK_CUDA(gpu.cuStreamSynchronize(bench.first));
        CHECK_OK(tutti_barrier(bench.group, NULL));
    }
    size_t bytes = tutti_memory_pad_bytes(bench.memory);
    unsigned char *pad = malloc(bytes);
    gpu_read(pad, tutti_memory_signal_pad(bench.memory), bytes);
    for (size_t i = 0; i < bytes; i++)
        CHECK_EQ(pad[i], 0);
    free(pad);
    end(&bench);
}

TEST_GPU(a_work_is_joined_to_a_stream_without_the_host_waiting) {
    bench bench;
    begin(&bench, world);
    float *data = tutti_memory_data(bench.memory), host[1000];
    for (int i = 0; i < 1000; i++)
        host[i] = (float)(bench.rank + 1);
    gpu_write(data, host, sizeof host);
    CHECK_OK(tutti_barrier(bench.group, NULL));
    tutti_work *work;
    if (bench.rank == 0)
        gpu_delay(bench.first, 100);
    CHECK_OK(tutti_all_reduce(bench.group, data, data, 1000, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = bench.first, .work = &work)));
    CHECK_OK(tutti_work_join(work, bench.second));
    CHECK_CUDA(gpu.cuMemcpyDtoHAsync(host, (CUdeviceptr)(uintptr_t)data, sizeof host, bench.second));
    CHECK_CUDA(gpu.cuStreamSynchronize(bench.second));
    CHECK(host[0] == (float)(bench.size * (bench.size + 1) / 2) && host[999] == host[0]);
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    end(&bench);
}

static void *test_until_over(void *work) {
    for (bool over = false; !over;)
        CHECK_OK(tutti_work_test(work, &over));
    return NULL;
}

TEST_GPU(threads_that_test_one_work_at_once_finish_it_once) {
    bench bench;
    begin(&bench, world);
    float *data = tutti_memory_data(bench.memory);
    tutti_counters before = TUTTI_COUNTERS_INIT, after = TUTTI_COUNTERS_INIT;
    CHECK_OK(tutti_barrier(bench.group, NULL));
    CHECK_OK(tutti_trace_counters(world, "all_reduce", &before));
    for (int round = 0; round < 100; round++) {
        tutti_work *work;
        pthread_t threads[3];
        CHECK_OK(tutti_all_reduce(bench.group, data, data, 1000, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .stream = bench.first, .work = &work)));
        for (int i = 0; i < 3; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, test_until_over, work), 0);
        for (int i = 0; i < 3; i++)
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
        tutti_work_release(work);
    }
    CHECK_OK(tutti_trace_counters(world, "all_reduce", &after));
    CHECK_EQ(after.calls - before.calls, 100);
    end(&bench);
}

/* A block is cleared on the caller's stream, and its rendezvous waits for that. */
TEST_GPU(alloc_rendezvous_on_current_stream) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    uint32_t *host = malloc(1 << 20);
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA_AT(0);
    memory = gpu_symmetric(world, 64); /* the first one opens the device, which takes a while */
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL));
    options.stream = stream;
    gpu_delay(stream, 1000);
    CHECK_OK(tutti_memory_alloc(world, 1 << 20, &options, &memory));
    CHECK_EQ(gpu.cuStreamQuery(stream), CUDA_ERROR_NOT_READY); /* the host did not wait */
    gpu_read(host, tutti_memory_data(memory), 1 << 20);
    for (int i = 0; i < 1 << 18; i++)
        CHECK_EQ(host[i], 0);
    tutti_memory_release(memory);
    gpu_delay(stream, 100);
    CHECK_OK(tutti_memory_alloc(world, 4096, &options, &memory));
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers)); /* waits until it is clear: peers may write at once */
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    graph_begin(stream);
    tutti_memory *none;
    CHECK_STATUS(tutti_memory_alloc(world, 64, &options, &none), TUTTI_ERROR_STATE);
    (void)graph_end(stream);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    free(host);
}
