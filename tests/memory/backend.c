/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends: choosing them by name, finding and refusing plug-ins (tests/memory/plugin/memfd.c, compiled here). What
 * every backend must do is in every_backend.c.
 */
#include <dirent.h>
#include <sys/stat.h>
#include <tutti/connectivity.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/pool.h>
#include <unistd.h>

#include "../harness.h"
#include "memory/backend.h"
#include "plugin/compile.h"

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
    CHECK_MESSAGE("does not find allocation backend \"abacus\"");
    CHECK_MESSAGE("/nowhere/libtutti-abacus.so");
    CHECK_MESSAGE("/usr/lib/none/libtutti-abacus.so");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "../evil"), TUTTI_ERROR_NOT_FOUND);
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, ""), TUTTI_ERROR_NOT_FOUND);
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_folder_that_is_named_twice_is_looked_at_once) {
    setenv("TUTTI_PLUGIN_PATH", "/nowhere:/nowhere/else:/nowhere", 1);
    tutti_world *world = open_alone();
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "abacus"), TUTTI_ERROR_NOT_FOUND);
    const char *first = strstr(tutti_error_message(), "/nowhere/libtutti-abacus.so");
    CHECK(first != NULL && strstr(first + 1, "/nowhere/libtutti-abacus.so") == NULL);
    CHECK_MESSAGE("/nowhere/else/libtutti-abacus.so");
    CHECK(strstr(tutti_error_message(), "/../") == NULL);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_plug_in_of_another_version_name_or_kind_is_refused) {
    plugin_compile("old", "-DPLUGIN_VERSION=77");
    plugin_compile("alias", "-UPLUGIN_NAME -DPLUGIN_NAME='\"other\"'");
    plugin_compile("empty", "-Dtutti_backend_v2=something_else");
    plugin_compile("half", "-DMEMORY_SIZE='offsetof(tu_backend_memory, unmap)'");
    char path[96];
    snprintf(path, sizeof path, "%s/libtutti-text.so", plugin_folder);
    FILE *text = fopen(path, "w");
    CHECK(text != NULL && fputs("this is no library", text) >= 0 && fclose(text) == 0);
    tutti_world *world = open_alone();
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "old"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("version 77");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "alias"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("is backend other, not alias");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "empty"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("exports no tutti_backend_v2");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "half"), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("lacks memory->unmap");
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "text"), TUTTI_ERROR_NOT_FOUND);
    CHECK_OK(tutti_world_close(world));
    plugin_remove();
}

TEST(a_backend_can_not_be_changed_after_use) {
    plugin_compile("memfd", "");
    plugin_compile("second", "");
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
    plugin_remove();
}

TEST(an_older_and_a_newer_table_are_accepted) {
    plugin_compile("older", "-DMEMORY_SIZE='offsetof(tu_backend_memory, has_multicast)' "
                            "-DTABLE_SIZE='offsetof(tu_backend, executor)'");
    plugin_compile("newer", "-DMEMORY_SIZE='sizeof(tu_backend_memory) + sizeof(void *)' "
                            "-DTABLE_SIZE='sizeof(tu_backend) + sizeof(void *)'");
    static const char *const names[] = { "older", "newer" };
    for (int i = 0; i < 2; i++) {
        tutti_world *world = open_alone();
        const tu_backend *backend;
        tutti_memory *memory;
        CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, names[i]));
        CHECK_OK(tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA), &memory));
        CHECK_EQ(tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(1)), i == 1); /* an old one cannot be asked */
        CHECK_OK(tu_backend_find(world, names[i], &backend));
        CHECK_EQ(backend->size, sizeof *backend);
        CHECK_EQ(backend->memory->size, sizeof *backend->memory);
        CHECK(backend->executor == NULL && backend->streams == NULL);
        tutti_memory_release(memory);
        CHECK_OK(tutti_world_close(world));
    }
    plugin_remove();
}

TEST(several_backends_serve_one_device_and_each_is_opened_by_its_name) {
    plugin_compile("memfd", "");
    plugin_compile("bare", "-DWITHOUT_MEMORY");
    tutti_world *world = open_alone();
    const tu_backend *memory, *bare, *again;
    void *memory_state, *bare_state, *again_state;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tu_backend_get(world, TUTTI_CUDA, &memory, &memory_state));
    CHECK_TEXT(memory->name, "memfd");
    CHECK_OK(tu_backend_open(world, "bare", &bare, &bare_state));
    CHECK(bare->memory == NULL && bare->device == TUTTI_CUDA && bare_state != memory_state);
    CHECK_OK(tu_backend_open(world, "memfd", &again, &again_state));
    CHECK(again == memory && again_state == memory_state);
    CHECK_STATUS(tutti_memory_set_backend(world, TUTTI_CUDA, "bare"), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("has no memory");
    CHECK_STATUS(tu_backend_open(world, "abacus", &again, &again_state), TUTTI_ERROR_NOT_FOUND);
    CHECK_OK(tutti_world_close(world));
    plugin_remove();
}

static void meet_elsewhere(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tutti_memory_alloc(world, 64, tutti_world_rank(world) == 1 ? NULL : &options, &memory));
    CHECK_EQ(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("different devices");
    tutti_memory_release(memory);
}

TEST(a_rank_on_the_cpu_and_others_on_a_device_do_not_meet) {
    plugin_compile("memfd", "");
    test_threads(3, meet_elsewhere, NULL);
    test_processes(3, meet_elsewhere, NULL);
    plugin_remove();
}

TEST(a_backend_tells_how_its_devices_are_connected) {
    plugin_compile("memfd", "");
    plugin_compile("older", "-DMEMORY_SIZE='offsetof(tu_backend_memory, links)'");
    tutti_world *world = open_alone();
    tutti_connectivity *connectivity;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "older"));
    CHECK_STATUS(tutti_connectivity_devices(world, TUTTI_CUDA, &connectivity), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("does not tell");
    CHECK_STATUS(tutti_connectivity_devices(world, TUTTI_CPU, &connectivity), TUTTI_ERROR_UNSUPPORTED);
    CHECK_STATUS(tutti_connectivity_devices(world, TUTTI_CUDA, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_close(world));
    world = open_alone();
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tutti_connectivity_devices(world, TUTTI_CUDA, &connectivity));
    CHECK_EQ(tutti_connectivity_size(connectivity), 2);
    CHECK_EQ(tutti_connectivity_link(connectivity, 0, 0), TUTTI_LINK_SELF);
    CHECK_EQ(tutti_connectivity_link(connectivity, 0, 1), TUTTI_LINK_DIRECT);
    CHECK_EQ(tutti_connectivity_direct(connectivity, 1, 0), 3);
    CHECK_EQ(tutti_connectivity_direct(connectivity, 2, 0), 0);
    CHECK_TEXT(tutti_connectivity_place(connectivity, 1), "cuda:1");
    CHECK_TEXT(tutti_link_name(TUTTI_LINK_DIRECT), "direct");
    tutti_connectivity_release(connectivity);
    CHECK_OK(tutti_world_close(world));
    plugin_remove();
}

TEST(the_open_backends_of_a_device_are_listed_with_the_one_that_has_its_memory_first) {
    plugin_compile("memfd", "");
    plugin_compile("bare", "-DWITHOUT_MEMORY");
    tutti_world *world = open_alone();
    tu_backend_opened list[4];
    const tu_backend *backend;
    void *state;
    CHECK_EQ(tu_backends_of(world, TUTTI_CUDA, list, 4), 0); /* none is open */
    CHECK_OK(tu_backend_open(world, "bare", &backend, &state));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "memfd"));
    CHECK_OK(tu_backend_get(world, TUTTI_CUDA, &backend, &state));
    CHECK_EQ(tu_backends_of(world, TUTTI_CUDA, list, 4), 2);
    CHECK(list[0].table == backend && list[0].state == state);
    CHECK_TEXT(list[1].table->name, "bare");
    CHECK_EQ(tu_backends_of(world, TUTTI_CUDA, list, 1), 1);
    CHECK_OK(tutti_world_close(world));
    plugin_remove();
}
