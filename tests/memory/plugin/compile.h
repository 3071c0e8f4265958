/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiles a test plug-in (memfd.c, or another file) into a folder of the test's own, which TUTTI_PLUGIN_PATH then
 * names.
 */
#ifndef TUTTI_TESTS_MEMORY_PLUGIN_COMPILE_H
#define TUTTI_TESTS_MEMORY_PLUGIN_COMPILE_H

#include "../../harness.h"

static char plugin_folder[64];

/* libtutti-<name>.so from a file of tests/, with these flags: see the macros at its top. Skips without a compiler. */
static inline void plugin_compile_file(const char *file, const char *name, const char *flags) {
    const char *source = getenv("TEST_SOURCE");
    char command[1024];
    if (source == NULL)
        SKIP("TEST_SOURCE does not name the source folder");
    if (system("command -v cc >/dev/null") != 0)
        SKIP("there is no C compiler");
    if (plugin_folder[0] == 0) {
        strcpy(plugin_folder, "/tmp/tutti-test-XXXXXX");
        CHECK(mkdtemp(plugin_folder) != NULL);
        setenv("TUTTI_PLUGIN_PATH", plugin_folder, 1);
    }
    snprintf(command, sizeof command,
             "cc -std=gnu17 -D_GNU_SOURCE -shared -fPIC -fvisibility=hidden -DPLUGIN_NAME='\"%s\"' %s -I%s/src "
             "-I%s/include %s/tests/%s -o %s/libtutti-%s.so",
             name, flags, source, source, source, file, plugin_folder, name);
    CHECK_EQ(system(command), 0);
}

static inline void plugin_compile(const char *name, const char *flags) {
    plugin_compile_file("memory/plugin/memfd.c", name, flags);
}

static inline void plugin_remove(void) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", plugin_folder);
    CHECK_EQ(system(command), 0);
    plugin_folder[0] = 0;
}

#endif
