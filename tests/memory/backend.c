/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends: choosing them by name, finding and refusing plug-ins, and a whole life on one that passes descriptors
 * (tests/memory/plugin/memfd.c, compiled here).
 */
#include <dirent.h>
#include <sys/stat.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/pool.h>
#include <unistd.h>

#include "../harness.h"

static char folder[64];

/* Compiles a plug-in into a folder of this test's, which TUTTI_PLUGIN_PATH then names. Skips without a compiler. */
static void compile(const char *name, const char *flags) {
    const char *source = getenv("TEST_SOURCE");
    char command[1024];
    if (source == NULL)
        SKIP("TEST_SOURCE does not name the source folder");
    if (system("command -v cc >/dev/null") != 0)
        SKIP("there is no C compiler");
    if (folder[0] == 0) {
        strcpy(folder, "/tmp/tutti-test-XXXXXX");
        CHECK(mkdtemp(folder) != NULL);
        setenv("TUTTI_PLUGIN_PATH", folder, 1);
    }
    snprintf(command, sizeof command,
             "cc -std=gnu17 -D_GNU_SOURCE -shared -fPIC -fvisibility=hidden %s -I%s/src -I%s/include "
             "%s/tests/memory/plugin/memfd.c -o "
             "%s/libtutti-%s.so",
             flags, source, source, source, folder, name);
    CHECK_EQ(system(command), 0);
}

static void remove_folder(void) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
    folder[0] = 0;
}

static tutti_world *open_alone(void) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    return world;
}

TEST(the_cpu_has_the_backend_shm) { /* spec: test_get_backend */
    tutti_world *world = open_alone();
    const char *name;
    CHECK_OK(tutti_memory_backend(world, TUTTI_CPU, &name));
    CHECK_TEXT(name, "shm");
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CPU, "shm")); /* no change, before and after use */
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 1, NULL, &memory));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CPU, "shm"));
    tutti_memory_release(memory);
    CHECK_STATUS(tutti_memory_backend(world, 9, &name), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("does not support device type");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "shm"), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("does not support device type cuda");
    CHECK_OK(tutti_world_close(world));
}

TEST(an_unknown_backend_is_not_found_and_the_error_says_where_it_looked) {
    setenv("TUTTI_PLUGIN_PATH", "/nowhere:/usr/lib/none", 1);
    tutti_world *world = open_alone();
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "abacus"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("does not find allocation backend");
    CHECK_MESSAGE("/nowhere/libtutti-abacus.so");
    CHECK_MESSAGE("/usr/lib/none/libtutti-abacus.so");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "../evil"), TUTTI_ERROR_NOT_FOUND);
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, ""), TUTTI_ERROR_NOT_FOUND);
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_plug_in_of_another_version_name_or_kind_is_refused) {
    compile("old", "-DPLUGIN_NAME='\"old\"' -DPLUGIN_VERSION=77");
    compile("alias", "-DPLUGIN_NAME='\"other\"'");
    compile("empty", "-Dtutti_backend_v1=something_else");
    char path[96];
    snprintf(path, sizeof path, "%s/libtutti-text.so", folder);
    FILE *text = fopen(path, "w");
    CHECK(text != NULL && fputs("this is no library", text) >= 0 && fclose(text) == 0);
    tutti_world *world = open_alone();
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "old"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("version 77");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "alias"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("is backend other, not alias");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "empty"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("exports no tutti_backend_v1");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "text"), TUTTI_ERROR_NOT_FOUND);
    CHECK_OK(tutti_world_close(world));
    remove_folder();
}

TEST(a_backend_can_not_be_changed_after_use) {
    compile("memfd", "");
    compile("second", "-DPLUGIN_NAME='\"second\"'");
    tutti_world *world = open_alone();
    const char *name;
    tutti_memory *memory;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "second"));
    CHECK_OK(tutti_memory_backend(world, TUTTI_CUDA, &name)); /* asking is no use */
    CHECK_TEXT(name, "second");
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA), &memory));
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "second"), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("can not be changed after use");
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK(tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(1)));
    CHECK(!tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(0)));
    CHECK_EQ(tutti_memory_device(memory), TUTTI_CUDA_AT(0));
    tutti_memory_release(memory);
    CHECK_STATUS(tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(5)), &memory),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(world));
    remove_folder();
}

static void live_on_plugin(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world), size = tutti_world_size(world), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA;
    tutti_memory *memory;
    tutti_peers *peers;
    tutti_pool *pool;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tutti_pool_create(world, &options, &pool));
    for (int round = 0; round < 3; round++) {
        if (round < 2)
            CHECK_OK(tutti_pool_alloc(pool, 10000, &memory));
        else
            CHECK_OK(tutti_memory_alloc(world, 10000, &options, &memory));
        CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
        CHECK_OK(tutti_peers_put(peers, next, 8, &rank, sizeof rank, NULL));
        CHECK_OK(tutti_peers_signal(peers, next, 3, NULL));
        CHECK_OK(tutti_peers_wait_signal(peers, before, 3, NULL));
        CHECK_EQ(((int *)tutti_memory_data(memory))[2], before);
        CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
        tutti_view view = TUTTI_VIEW_INIT;
        CHECK_OK(tutti_peers_get_buffer(peers, rank, (int64_t[]){ 4 }, 1, TUTTI_U32, 0, &view));
        CHECK_EQ(view.device, TUTTI_CUDA_AT(0));
        CHECK_OK(tutti_view_memset32(world, &view, 1, 9, 2, NULL));
        CHECK_EQ(((int *)tutti_memory_data(memory))[2], 9);
        CHECK_STATUS(tutti_peers_wait_signal(peers, before, 3, TUTTI_OPTIONS(tutti_call, .timeout_ns = 1000000)),
                     TUTTI_ERROR_TIMEOUT);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
    tutti_pool_release(pool);
    /* A rank on the CPU and the others on a "GPU" do not meet. */
    CHECK_OK(tutti_memory_alloc(world, 64, rank == 1 ? NULL : &options, &memory));
    tutti_status status = tutti_memory_rendezvous(memory, tutti_world_group(world), &peers);
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("different devices");
    tutti_memory_release(memory);
}

TEST(a_whole_life_on_a_plug_in_that_passes_descriptors) {
    compile("memfd", "");
    test_threads(3, live_on_plugin, NULL);
    test_processes(3, live_on_plugin, NULL);
    remove_folder();
}
