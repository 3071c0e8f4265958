/* SPDX-License-Identifier: Apache-2.0
 *
 * One suite over every backend there is: shm; a plug-in that passes descriptors and maps them; the same without mapping
 * anything, so that everything goes by rank and offset; and, where there is a GPU or its stand-in, cuda, nccl and
 * nvshmem, the latter also with peers that count as not mapped. What a backend promises to the memory layer is what
 * these tests say.
 */
#include <dlfcn.h>
#include <sched.h>
#include <sys/stat.h>
#include <tutti/backend.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/pool.h>
#include <unistd.h>

#include "../harness.h"
#include "memory/backend.h"
#include "plugin/compile.h"

#define RANKS 3

/* One backend under test, on one rank. */
typedef struct bench {
    const char *name;
    tutti_device device;
    tutti_world *world;
    tutti_group *group;
    int rank, size, next, before;
    const tu_backend *backend;
    void *state;
    void *stream; /* a stream of this rank's own; NULL where the backend has none */
    tutti_call call;
} bench;

static void begin(bench *bench, tutti_world *world) {
    bench->world = world;
    bench->group = tutti_world_group(world);
    bench->rank = tutti_world_rank(world);
    bench->size = tutti_world_size(world);
    bench->next = (bench->rank + 1) % bench->size;
    bench->before = (bench->rank + bench->size - 1) % bench->size;
    CHECK_OK(tutti_backend_open(world, bench->name, NULL));
    CHECK_OK(tutti_memory_set_backend(world, bench->device, bench->name));
    CHECK_OK(tu_backend_get(world, bench->device, &bench->backend, &bench->state));
    CHECK_TEXT(bench->backend->name, bench->name);
    bench->call = (tutti_call)TUTTI_CALL_INIT;
    if (bench->backend->streams != NULL) {
        tutti_memory *first; /* opens the device */
        CHECK_OK(tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), &first));
        tutti_memory_release(first);
        CHECK_OK(bench->backend->streams->create(bench->state, 0, &bench->stream));
    }
    bench->call.stream = bench->stream;
}

/* Waits until everything on this rank's stream is over. */
static void settle(const bench *bench) {
    void *event;
    bool over = false;
    if (bench->stream == NULL)
        return;
    CHECK_OK(bench->backend->streams->mark(bench->state, 0, bench->stream, &event));
    while (!over) {
        CHECK_OK(bench->backend->streams->test(bench->state, 0, event, &over));
        sched_yield();
    }
    bench->backend->streams->unmark(bench->state, 0, event);
}

static void end(bench *bench) {
    settle(bench);
    CHECK_OK(tutti_barrier(bench->group, NULL));
    if (bench->stream != NULL)
        bench->backend->streams->destroy(bench->state, 0, bench->stream);
}

static tutti_memory_options options_of(const bench *bench) {
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = bench->device == TUTTI_CPU ? TUTTI_CPU : TUTTI_CUDA_AT(0);
    return options;
}

static tutti_peers *meet(const bench *bench, size_t bytes, tutti_memory **memory) {
    tutti_memory_options options = options_of(bench);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(bench->world, bytes, &options, memory));
    CHECK_OK(tutti_memory_rendezvous(*memory, bench->group, &peers));
    return peers;
}

/* What lies in this rank's own block. */
static void read_own(const bench *bench, tutti_peers *peers, size_t offset, void *to, size_t bytes) {
    CHECK_OK(tutti_peers_get(peers, bench->rank, offset, to, bytes, &bench->call));
    settle(bench);
}

static void part(const bench *bench, tutti_peers *peers, tutti_memory *memory) {
    settle(bench);
    CHECK_OK(tutti_barrier(bench->group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* ---- the sentences ---- */

static void a_block_starts_zeroed_and_has_an_address_where_peers_are_mapped(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 100000, &memory);
    unsigned char *bytes = malloc(100000);
    read_own(bench, peers, 0, bytes, 100000);
    for (int i = 0; i < 100000; i++)
        CHECK_EQ(bytes[i], 0);
    bool maps = bench->backend->can(bench->state, TU_ABILITY_MAPS_PEERS);
    for (int rank = 0; rank < bench->size; rank++)
        CHECK_EQ(tutti_peers_buffer(peers, rank) != NULL, maps || rank == bench->rank);
    CHECK(tutti_peers_buffer(peers, bench->rank) == tutti_memory_data(memory));
    tutti_view view = TUTTI_VIEW_INIT;
    tutti_status status = tutti_peers_get_buffer(peers, bench->next, (int64_t[]){ 4 }, 1, TUTTI_U32, 0, &view);
    CHECK_EQ(status, maps ? TUTTI_OK : TUTTI_ERROR_UNSUPPORTED);
    free(bytes);
    part(bench, peers, memory);
}

static void bytes_go_to_a_rank_and_an_offset_and_come_back(bench *bench) {
    static const size_t sizes[] = { 1, 3, 16, 4095, 65536, 3000000 };
    tutti_memory *memory;
    size_t room = 3000000 + 4099;
    tutti_peers *peers = meet(bench, room, &memory);
    unsigned char *mine = malloc(room), *got = malloc(room);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = sizes[i], offset = i * 7;
        for (size_t j = 0; j < bytes; j++)
            mine[j] = (unsigned char)(j * 13 + (size_t)bench->rank * 31 + i);
        CHECK_OK(tutti_peers_put(peers, bench->next, offset, mine, bytes, &bench->call));
        CHECK_OK(tutti_peers_barrier(peers, 0, &bench->call));
        read_own(bench, peers, offset, got, bytes);
        for (size_t j = 0; j < bytes; j++)
            CHECK_EQ(got[j], (unsigned char)(j * 13 + (size_t)bench->before * 31 + i));
        CHECK_OK(tutti_peers_get(peers, bench->next, offset, got, bytes, &bench->call));
        settle(bench);
        CHECK(memcmp(got, mine, bytes) == 0);
        CHECK_OK(tutti_peers_barrier(peers, 0, &bench->call));
        settle(bench);
    }
    CHECK_STATUS(tutti_peers_put(peers, bench->next, room, mine, 1, &bench->call), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_peers_get(peers, bench->size, 0, got, 1, &bench->call), TUTTI_ERROR_RANGE);
    free(mine);
    free(got);
    part(bench, peers, memory);
}

static void a_signal_comes_after_the_put_before_it(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 4096, &memory);
    for (uint32_t round = 1; round <= 40; round++) {
        uint32_t value = (uint32_t)bench->rank * 1000 + round, got = 0;
        CHECK_OK(tutti_peers_put(peers, bench->next, 8, &value, sizeof value, &bench->call));
        CHECK_OK(tutti_peers_signal(peers, bench->next, 3, &bench->call));
        CHECK_OK(tutti_peers_wait_signal(peers, bench->before, 3, &bench->call));
        read_own(bench, peers, 8, &got, sizeof got);
        CHECK_EQ(got, (uint32_t)bench->before * 1000 + round);
        CHECK_OK(tutti_peers_signal(peers, bench->before, 4, &bench->call)); /* taken: it may be overwritten */
        CHECK_OK(tutti_peers_wait_signal(peers, bench->next, 4, &bench->call));
        settle(bench);
    }
    part(bench, peers, memory);
}

static void a_mailbox_holds_one_signal_per_sender_and_channel(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 64, &memory);
    bool arrived = true;
    CHECK_OK(tutti_peers_test_signal(peers, bench->before, 1, &arrived));
    CHECK(!arrived);
    CHECK_OK(tutti_peers_barrier(peers, 0, &bench->call));
    CHECK_OK(tutti_peers_signal(peers, bench->next, 1, &bench->call));
    CHECK_OK(tutti_peers_signal(peers, bench->next, 2, &bench->call)); /* another channel is another mailbox */
    CHECK_OK(tutti_peers_barrier(peers, 0, &bench->call));
    settle(bench);
    for (int channel = 1; channel <= 2; channel++) {
        CHECK_OK(tutti_peers_wait_signal(peers, bench->before, channel, &bench->call));
        settle(bench);
        CHECK_OK(tutti_peers_test_signal(peers, bench->before, channel, &arrived));
        CHECK(!arrived);
    }
    part(bench, peers, memory);
}

static void a_wait_for_no_signal_runs_out_of_time_and_ends_nothing_else(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 64, &memory);
    tutti_call soon = bench->call;
    soon.timeout_ns = 20000000;
    tutti_status status = tutti_peers_wait_signal(peers, bench->before, 0, &soon);
    if (bench->stream != NULL) { /* on a stream the error comes later, to whoever asks */
        CHECK_OK(status);
        settle(bench);
        status = tutti_group_check(bench->group);
    }
    CHECK_EQ(status, TUTTI_ERROR_TIMEOUT);
    CHECK_OK(tutti_barrier(bench->group, NULL));
    CHECK_OK(tutti_peers_signal(peers, bench->next, 0, &bench->call));
    CHECK_OK(tutti_peers_wait_signal(peers, bench->before, 0, &bench->call));
    settle(bench);
    CHECK_OK(tutti_group_check(bench->group));
    part(bench, peers, memory);
}

static void nobody_leaves_a_barrier_before_all_came(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 4096, &memory);
    uint32_t *seen = malloc(sizeof *seen * (size_t)bench->size);
    for (uint32_t round = 1; round <= 30; round++) {
        for (int rank = 0; rank < bench->size; rank++)
            CHECK_OK(tutti_peers_put(peers, rank, 4 * (size_t)bench->rank, &round, sizeof round, &bench->call));
        CHECK_OK(tutti_peers_barrier(peers, (int)(round % 4), &bench->call));
        read_own(bench, peers, 0, seen, 4 * (size_t)bench->size);
        for (int rank = 0; rank < bench->size; rank++)
            CHECK_EQ(seen[rank], round);
        CHECK_OK(tutti_peers_barrier(peers, 5, &bench->call));
        settle(bench);
    }
    free(seen);
    part(bench, peers, memory);
}

static void a_block_of_a_pool_is_met_again_with_a_clean_pad_and_no_signals(bench *bench) {
    tutti_memory_options options = options_of(bench);
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(bench->world, &options, &pool));
    for (int round = 0; round < 3; round++) {
        tutti_memory *memory;
        tutti_peers *peers;
        CHECK_OK(tutti_pool_alloc(pool, 10000, &memory));
        CHECK_OK(tutti_memory_rendezvous(memory, bench->group, &peers));
        bool arrived = true;
        CHECK_OK(tutti_peers_test_signal(peers, bench->before, 3, &arrived));
        CHECK(!arrived);
        CHECK_OK(tutti_peers_barrier(peers, 0, &bench->call));
        CHECK_OK(tutti_peers_signal(peers, bench->next, 3, &bench->call)); /* nobody takes it */
        settle(bench);
        CHECK_OK(tutti_barrier(bench->group, NULL));
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    tutti_pool_release(pool);
}

static void words_are_set_and_written(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 64, &memory);
    tutti_view view = TUTTI_VIEW_INIT;
    uint32_t words[16];
    CHECK_OK(tutti_peers_get_buffer(peers, bench->rank, (int64_t[]){ 16 }, 1, TUTTI_U32, 0, &view));
    CHECK_OK(tutti_view_memset32(bench->world, &view, 1, 9, 2, &bench->call));
    CHECK_OK(tutti_view_write_value32(bench->world, &view, 15, 7, &bench->call));
    read_own(bench, peers, 0, words, sizeof words);
    for (int i = 0; i < 16; i++)
        CHECK_EQ(words[i], i == 15 ? 7u : i == 1 || i == 2 ? 9u : 0u);
    part(bench, peers, memory);
}

static void a_word_of_the_pad_is_set_behind_the_bytes_before_it(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 64, &memory);
    if (bench->backend->remote->set_word == NULL) {
        CHECK_STATUS(tutti_peers_put_with_signal(peers, bench->next, 0, NULL, 0, 2, 1, &bench->call),
                     TUTTI_ERROR_UNSUPPORTED);
        CHECK_STATUS(tutti_peers_wait_for_signal(peers, 2, TUTTI_EQUAL, 1, &bench->call), TUTTI_ERROR_UNSUPPORTED);
        part(bench, peers, memory);
        return;
    }
    for (uint64_t round = 1; round <= 4; round++) {
        uint64_t bytes = (uint64_t)bench->rank * 100 + round, got = 0;
        tutti_comparison comparison = round % 2 == 0 ? TUTTI_EQUAL : TUTTI_AT_LEAST;
        CHECK_OK(tutti_peers_put_with_signal(peers, bench->next, 8, &bytes, sizeof bytes, 2, round, &bench->call));
        CHECK_OK(tutti_peers_wait_for_signal(peers, 2, comparison, round, &bench->call));
        read_own(bench, peers, 8, &got, sizeof got);
        CHECK_EQ(got, (uint64_t)bench->before * 100 + round);
        CHECK_OK(tutti_peers_barrier(peers, 1, &bench->call));
    }
    tutti_call soon = bench->call;
    soon.timeout_ns = 20000000;
    tutti_status status = tutti_peers_wait_for_signal(peers, 2, TUTTI_EQUAL, 99, &soon);
    settle(bench);
    if (status == TUTTI_OK) /* a stream is told later, once */
        status = tutti_group_check(bench->group);
    CHECK_EQ(status, TUTTI_ERROR_TIMEOUT);
    CHECK_OK(tutti_group_check(bench->group));
    part(bench, peers, memory);
}

static void unequal_blocks_fail_alike_and_end_nothing(bench *bench) {
    tutti_memory_options options = options_of(bench);
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_alloc(bench->world, bench->rank == 1 ? 8u << 20 : 4u << 20, &options, &memory));
    CHECK_STATUS(tutti_memory_rendezvous(memory, bench->group, &peers), TUTTI_ERROR_MISMATCH);
    tutti_memory_release(memory);
    peers = meet(bench, 64, &memory);
    part(bench, peers, memory);
}

static void a_collective_on_a_block_gives_the_sum_wherever_the_block_lies(bench *bench) {
    tutti_memory *memory;
    tutti_peers *peers = meet(bench, 40000, &memory);
    float *values = malloc(40000);
    for (int i = 0; i < 10000; i++)
        values[i] = (float)(bench->rank + i);
    CHECK_OK(tutti_peers_put(peers, bench->rank, 0, values, 40000, &bench->call));
    CHECK_OK(tutti_all_reduce(bench->group, tutti_memory_data(memory), tutti_memory_data(memory), 10000, TUTTI_F32,
                              TUTTI_SUM, &bench->call));
    read_own(bench, peers, 0, values, 40000);
    for (int i = 0; i < 10000; i++)
        CHECK(values[i] == (float)(bench->size * i + bench->size * (bench->size - 1) / 2));
    free(values);
    part(bench, peers, memory);
}

/* ---- the backends ---- */

static const struct {
    const char *name, *flags; /* flags NULL: not compiled here */
    tutti_device device;
} backends[] = {
    { "shm", NULL, TUTTI_CPU },           { "memfd", "-DMAPS=1", TUTTI_CUDA },
    { "remote", "-DMAPS=0", TUTTI_CUDA }, { "remotecpu", "-DMAPS=0 -DPLUGIN_DEVICE=TUTTI_CPU", TUTTI_CPU },
    { "cuda", NULL, TUTTI_CUDA },         { "nvshmem", NULL, TUTTI_CUDA },
    { "nvshmem", NULL, TUTTI_CUDA },      { "nccl", NULL, TUTTI_CUDA },
};
#define APART 6 /* nvshmem whose peers count as not mapped */

static bool is_gpu(int backend) {
    return backends[backend].device == TUTTI_CUDA && backends[backend].flags == NULL;
}

static void need_gpu(const char *name) {
    const char *folder = getenv("TUTTI_PLUGIN_PATH");
    char path[4096];
    snprintf(path, sizeof path, "%s/libtutti-%s.so", folder != NULL ? folder : ".", name);
    if (getenv("TEST_STANDIN") == NULL && access("/dev/nvidiactl", F_OK) != 0) /* libcuda.so.1 may be a stand-in */
        SKIP("no GPU on this machine");
    if (access(path, F_OK) != 0)
        SKIP("the backend %s was not built", name);
    if (strcmp(name, "nvshmem") == 0 && dlopen("libnvshmem_host.so.3", RTLD_LAZY) == NULL)
        SKIP("NVSHMEM is not installed");
    void *library = strcmp(name, "nccl") == 0 ? dlopen("libnccl.so.2", RTLD_LAZY) : NULL;
    if (strcmp(name, "nccl") == 0 && (library == NULL || dlsym(library, "standin_nccl_set") == NULL))
        SKIP("without the stand-in of NCCL, peers have windows in common where each has a GPU of its own");
}

typedef struct subject {
    int backend;
    void (*sentence)(bench *);
} subject;

static void on_rank(tutti_world *world, void *argument) {
    const subject *subject = argument;
    bench bench = { .name = backends[subject->backend].name, .device = backends[subject->backend].device };
    begin(&bench, world);
    subject->sentence(&bench);
    end(&bench);
}

static void on_backend(int backend, void (*sentence)(bench *), bool processes) {
    subject subject = { backend, sentence };
    bool gpu = is_gpu(backend);
    if (gpu)
        need_gpu(backends[backend].name);
    if (backend == APART)
        setenv("TUTTI_NVSHMEM_MAP", "0", 1);
    if (backends[backend].flags != NULL)
        plugin_compile(backends[backend].name, backends[backend].flags);
    if (processes)
        test_processes(RANKS, on_rank, &subject);
    else
        test_threads(RANKS, on_rank, &subject);
    if (backends[backend].flags != NULL)
        plugin_remove();
    if (gpu)
        _exit(0); /* the driver keeps descriptors and threads of its own */
}

#define ON(number, name, sentence)           \
    TEST(sentence##_##name##_as_threads) {   \
        on_backend(number, sentence, false); \
    }                                        \
    TEST(sentence##_##name##_as_processes) { \
        on_backend(number, sentence, true);  \
    }
/* NVSHMEM takes a process for each rank. */
#define AS_PROCESSES(sentence)                       \
    TEST(sentence##_on_nvshmem_as_processes) {       \
        on_backend(5, sentence, true);               \
    }                                                \
    TEST(sentence##_on_nvshmem_apart_as_processes) { \
        on_backend(APART, sentence, true);           \
    }
/* Its stand-in takes threads. */
#define AS_THREADS(sentence)              \
    TEST(sentence##_on_nccl_as_threads) { \
        on_backend(7, sentence, false);   \
    }
#define EVERYWHERE(sentence)       \
    ON(0, on_shm, sentence)        \
    ON(1, on_memfd, sentence)      \
    ON(2, on_remote, sentence)     \
    ON(3, on_remote_cpu, sentence) \
    ON(4, on_cuda, sentence)       \
    AS_PROCESSES(sentence)         \
    AS_THREADS(sentence)

EVERYWHERE(a_block_starts_zeroed_and_has_an_address_where_peers_are_mapped)
EVERYWHERE(bytes_go_to_a_rank_and_an_offset_and_come_back)
EVERYWHERE(a_signal_comes_after_the_put_before_it)
EVERYWHERE(a_mailbox_holds_one_signal_per_sender_and_channel)
EVERYWHERE(a_wait_for_no_signal_runs_out_of_time_and_ends_nothing_else)
EVERYWHERE(nobody_leaves_a_barrier_before_all_came)
EVERYWHERE(a_block_of_a_pool_is_met_again_with_a_clean_pad_and_no_signals)
EVERYWHERE(words_are_set_and_written)
EVERYWHERE(a_word_of_the_pad_is_set_behind_the_bytes_before_it)
EVERYWHERE(unequal_blocks_fail_alike_and_end_nothing)
/* The plug-in runs no collectives on the device it plays. */
ON(0, on_shm, a_collective_on_a_block_gives_the_sum_wherever_the_block_lies)
ON(3, on_remote_cpu, a_collective_on_a_block_gives_the_sum_wherever_the_block_lies)
ON(4, on_cuda, a_collective_on_a_block_gives_the_sum_wherever_the_block_lies)
AS_PROCESSES(a_collective_on_a_block_gives_the_sum_wherever_the_block_lies)
