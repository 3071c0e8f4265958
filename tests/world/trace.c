/* SPDX-License-Identifier: Apache-2.0
 *
 * The flight recorder from within: counters, files on request, files after a failure.
 */
#include <tutti/trace.h>

#include <dirent.h>
#include <stdlib.h>
#include <tutti/collective.h>
#include <unistd.h>

#include "../harness.h"

/* Removes a folder of files and returns how many flight recorders were in it. */
static int count_and_remove(const char *folder) {
    DIR *open_folder = opendir(folder);
    CHECK(open_folder != NULL);
    struct dirent *entry;
    int count = 0;
    while ((entry = readdir(open_folder)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        CHECK(strncmp(entry->d_name, "tutti-", 6) == 0 && strstr(entry->d_name, ".json") != NULL);
        CHECK(unlinkat(dirfd(open_folder), entry->d_name, 0) == 0);
        count++;
    }
    closedir(open_folder);
    CHECK(rmdir(folder) == 0);
    return count;
}

TEST_WORLD(counters_count_calls_bytes_and_failures, 2) {
    tutti_group *group = tutti_world_group(world);
    float values[8] = { 0 };
    for (int i = 0; i < 3; i++)
        CHECK_OK(tutti_all_reduce(group, values, values, 8, TUTTI_F32, TUTTI_SUM, NULL));
    tutti_counters counters = TUTTI_COUNTERS_INIT;
    CHECK_OK(tutti_trace_counters(world, "all_reduce", &counters));
    CHECK_EQ(counters.calls, 3);
    CHECK_EQ(counters.failures, 0);
    CHECK_EQ(counters.bytes, 3 * 8 * 4);
    CHECK(counters.time_ns > 0);
    uint64_t by_algorithm = 0;
    for (int i = 1; i < TUTTI_COUNTER_ALGORITHMS; i++)
        by_algorithm += counters.by_algorithm[i];
    CHECK_EQ(by_algorithm, 3);
    CHECK_OK(tutti_trace_counters(world, "broadcast", &counters));
    CHECK_EQ(counters.calls, 0);
    CHECK_STATUS(tutti_trace_counters(world, "no_such_thing", &counters), TUTTI_ERROR_NOT_FOUND);
    CHECK_STATUS(tutti_trace_counters(world, NULL, &counters), TUTTI_ERROR_NOT_FOUND);
    counters.size = 0;
    CHECK_STATUS(tutti_trace_counters(world, "barrier", &counters), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL)); /* nobody leaves while the other still calls */
}

TEST_WORLD(a_shorter_struct_of_an_older_program_is_not_overrun, 1) {
    struct {
        tutti_counters counters;
        uint64_t guard;
    } both = { TUTTI_COUNTERS_INIT, 77 };
    both.counters.size = offsetof(tutti_counters, bytes);
    both.counters.bytes = 55;
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    CHECK_OK(tutti_trace_counters(world, "barrier", &both.counters));
    CHECK_EQ(both.counters.calls, 1);
    CHECK_EQ(both.counters.bytes, 55);
    CHECK_EQ(both.guard, 77);
}

TEST_WORLD(the_recorder_can_be_had_as_text, 2) {
    int64_t one = 1, sum;
    CHECK_OK(tutti_all_reduce(tutti_world_group(world), &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    char *text;
    CHECK_OK(tutti_trace_text(world, &text));
    CHECK(strstr(text, "\"tutti_flight_recorder\": 1") != NULL);
    CHECK(strstr(text, "\"operation\": \"all_reduce\", \"sequence\": 1") != NULL);
    CHECK(strstr(text, "\"dtype\": \"i64\", \"reduction\": \"sum\"") != NULL);
    CHECK(strstr(text, "\"by_algorithm\"") != NULL);
    CHECK(text[strlen(text) - 2] == '}');
    tutti_free(text);
    CHECK_STATUS(tutti_trace_text(world, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

static void keep_few(tutti_world *world, void *unused) {
    (void)unused;
    for (int i = 0; i < 200; i++)
        CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    char *text;
    int entries = 0;
    CHECK_OK(tutti_trace_text(world, &text));
    for (const char *at = text; (at = strstr(at, "\"sequence\": ")) != NULL; at++)
        entries++;
    CHECK(entries <= 128 && entries >= 127); /* one may be in the making by another thread */
    tutti_free(text);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(the_length_of_the_recorder_can_be_set) {
    setenv("TUTTI_TRACE_ENTRIES", "100", 1); /* rounded up to 128 */
    test_threads(2, keep_few, NULL);
    test_processes(2, keep_few, NULL);
    setenv("TUTTI_TRACE_ENTRIES", "63", 1);
    tutti_world *world;
    CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_TRACE_ENTRIES is 63; it must be from 64 to 1048576");
}

static void write_one(tutti_world *world, void *folder) {
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    CHECK_OK(tutti_trace_write(world, folder));
    CHECK_STATUS(tutti_trace_write(world, "/nonexistent/folder"), TUTTI_ERROR_SYSTEM);
    CHECK_MESSAGE("/nonexistent/folder");
    CHECK_STATUS(tutti_trace_write(world, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(every_rank_writes_its_recorder_on_request) {
    char folder[] = "/tmp/tutti-test-trace-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    test_processes(3, write_one, folder);
    CHECK_EQ(count_and_remove(folder), 3);
}

static void differ(tutti_world *world, void *unused) {
    (void)unused;
    float values[4] = { 0 };
    size_t count = tutti_world_rank(world) == 1 ? 3 : 4;
    CHECK_STATUS(tutti_all_reduce(tutti_world_group(world), values, values, count, TUTTI_F32, TUTTI_SUM, NULL),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("disagree"); /* writing the recorder left the error alone */
}

TEST(a_failed_operation_leaves_the_recorders_where_the_setting_says) {
    char folder[] = "/tmp/tutti-test-trace-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    setenv("TUTTI_TRACE_DIR", folder, 1);
    test_threads(2, differ, NULL);
    CHECK(count_and_remove(folder) >= 1);
}
