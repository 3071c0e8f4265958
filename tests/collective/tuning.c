/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing: the built-in table, tables in files, forced algorithms; and trees on machines that we do not have.
 */
#include <stdlib.h>
#include <tutti/collective.h>
#include <unistd.h>

#include "collective/domain.h"
#include "collective/tuning.h"
#include "values.h"

static tutti_ran ran_of(tutti_group *group) {
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(group, &ran));
    return ran;
}

/* ---- domains ---- */

TEST(ranks_are_grouped_by_cache_when_they_span_several_else_by_node) {
    const tu_locality caches[6] = { { 0, 0 }, { 0, 0 }, { 1, 0 }, { 1, 0 }, { 0, 1 }, { 2, 1 } };
    tu_domains *domains = tu_domains_make(caches, 6);
    CHECK(domains != NULL);
    CHECK_EQ(domains->count, 3);
    const int leaders[6] = { 0, 0, 2, 2, 0, 5 };
    for (int i = 0; i < 6; i++)
        CHECK_EQ(domains->leader[i], leaders[i]);
    tu_domains_free(domains);
    const tu_locality nodes[4] = { { -1, 1 }, { -1, 0 }, { -1, 1 }, { -1, 0 } };
    domains = tu_domains_make(nodes, 4);
    CHECK_EQ(domains->count, 2);
    CHECK_EQ(domains->leader[3], 1);
    tu_domains_free(domains);
    const tu_locality unknown[3] = { { -1, -1 }, { -1, -1 }, { -1, -1 } };
    domains = tu_domains_make(unknown, 3);
    CHECK_EQ(domains->count, 1);
    tu_domains_free(domains);
}

static _Atomic int arrived[32];

static void climb(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    tutti_call call = TUTTI_CALL_INIT;
    call.algorithm = TUTTI_ALGORITHM_TREE;
    for (int round = 1; round <= 60; round++) {
        atomic_store_explicit(&arrived[rank], round, memory_order_relaxed);
        CHECK_OK(tutti_barrier(group, &call));
        for (int other = 0; other < size; other++)
            CHECK(atomic_load_explicit(&arrived[other], memory_order_relaxed) >= round);
        CHECK_OK(tutti_barrier(group, NULL));
    }
    int *values = malloc(200000 * sizeof(int));
    for (int root = 0; root < size; root += 3) {
        size_t count = (size_t[]){ 1, 100, 60000 }[root % 3];
        for (size_t i = 0; i < count; i++)
            values[i] = rank == root ? root * 1000 + (int)i : -1;
        CHECK_OK(tutti_broadcast(group, values, values, count, TUTTI_I32, root, &call));
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(values[i], root * 1000 + (int)i);
    }
    free(values);
    tutti_ran ran = ran_of(group);
    CHECK_EQ(ran.algorithm, TUTTI_ALGORITHM_TREE);
    CHECK(strstr(ran.why, "forced by the call") != NULL);
    CHECK_OK(tutti_barrier(group, NULL)); /* a root that leaves before the others have come would be missed */
}

static void pretend_machine(const char *synthetic) {
    if (!TUTTI_HAVE_HWLOC)
        SKIP("built without hwloc, which makes up machines");
    setenv("HWLOC_SYNTHETIC", synthetic, 1);
}

TEST(trees_work_on_machines_of_several_caches) {
    pretend_machine("numa:2 l3:2 core:2 pu:1"); /* 8 processors, 4 caches */
    test_threads(8, climb, NULL);
    test_threads(7, climb, NULL);
    test_processes(5, climb, NULL);
}

static void choose_tree(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(ran_of(group).algorithm, TUTTI_ALGORITHM_TREE);
}

TEST(many_ranks_on_several_caches_use_a_tree_by_themselves) {
    pretend_machine("l3:4 core:4 pu:1");
    test_threads(16, choose_tree, NULL);
}

TEST(a_tree_on_a_machine_of_one_cache_has_one_leader) {
    setenv("HWLOC_SYNTHETIC", "l3:1 core:4 pu:1", 1);
    test_threads(3, climb, NULL);
    test_processes(2, climb, NULL);
}

/* ---- tables ---- */

static char path[64];

static void write_file(const char *text) {
    snprintf(path, sizeof path, "/tmp/tutti-tuning-%d", (int)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
    setenv("TUTTI_TUNING", path, 1);
}

static void by_file(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    float in[100] = { 0 }, out[300];
    CHECK_OK(tutti_all_reduce(group, in, out, 100, TUTTI_F32, TUTTI_SUM, NULL));
    tutti_ran ran = ran_of(group);
    CHECK_EQ(ran.algorithm, TUTTI_ALGORITHM_TWO_SHOT);
    CHECK(strstr(ran.why, "/tmp/tutti-tuning-") != NULL);
    CHECK_OK(tutti_all_reduce(group, in, out, 2, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK_EQ(ran_of(group).algorithm, TUTTI_ALGORITHM_ONE_SHOT);
    CHECK_OK(tutti_all_gather(group, in, out, 2, TUTTI_F32, NULL)); /* not in the file: as built in */
    CHECK_EQ(ran_of(group).algorithm, TUTTI_ALGORITHM_INLINE);
}

TEST(a_tuning_file_decides_from_which_size_an_algorithm_runs) {
    write_file("# made by hand\nall_reduce 1 0 one_shot\nall_reduce 1 64 two_shot # and more\n\nall_reduce 100 0 "
               "inline\nstream 4M\nstage 1K\nchunk 128K\n");
    test_threads(3, by_file, NULL);
    unlink(path);
}

static void broken_file(tutti_world *world, void *argument) {
    CHECK_STATUS(tutti_barrier(tutti_world_group(world), NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE((const char *)argument);
    CHECK_MESSAGE("line 2");
}

TEST(a_tuning_file_that_is_not_understood_is_named_with_its_line) {
    write_file("# one\nall_reduce 1 0 pipelined\n");
    test_threads(2, broken_file, "all_reduce has no algorithm pipelined");
    write_file("# one\nall_reduce one 0 one_shot\n");
    test_threads(2, broken_file, path);
    write_file("# one\nall_reduce 1\n");
    test_threads(2, broken_file, "operation ranks bytes algorithm");
    unlink(path);
}

static void write_table(FILE *file, const tu_tuning *tuning) {
    fprintf(file, "# operation, from this many ranks, from this many bytes, algorithm\n");
    for (int i = 0; i < tuning->count; i++)
        fprintf(file, "%s %d %llu %s\n", tu_operation_name(tuning->rows[i].operation), tuning->rows[i].ranks,
                (unsigned long long)tuning->rows[i].bytes, tutti_algorithm_name(tuning->rows[i].algorithm));
    if (tuning->stream_bytes != 0)
        fprintf(file, "stream %llu\n", (unsigned long long)tuning->stream_bytes);
    if (tuning->stage_bytes != 0)
        fprintf(file, "stage %llu\n", (unsigned long long)tuning->stage_bytes);
    if (tuning->chunk_bytes != 0)
        fprintf(file, "chunk %llu\n", (unsigned long long)tuning->chunk_bytes);
}

TEST(what_is_written_as_a_table_is_read_as_that_table) {
    snprintf(path, sizeof path, "/tmp/tutti-tuning-%d", (int)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    write_table(file, &tu_tuning_built_in);
    fclose(file);
    tu_tuning *read;
    CHECK_OK(tu_tuning_read(path, &read));
    CHECK_EQ(read->count, tu_tuning_built_in.count);
    for (int i = 0; i < read->count; i++) {
        CHECK_EQ(read->rows[i].operation, tu_tuning_built_in.rows[i].operation);
        CHECK_EQ(read->rows[i].ranks, tu_tuning_built_in.rows[i].ranks);
        CHECK_EQ(read->rows[i].bytes, tu_tuning_built_in.rows[i].bytes);
        CHECK_EQ(read->rows[i].algorithm, tu_tuning_built_in.rows[i].algorithm);
    }
    CHECK_EQ(read->stage_bytes, tu_tuning_built_in.stage_bytes);
    tu_tuning_free(read);
    unlink(path);
}

static void by_setting(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    float in[10] = { 0 }, out[10];
    CHECK_OK(tutti_all_reduce(group, in, out, 1, TUTTI_F32, TUTTI_SUM, NULL));
    tutti_ran ran = ran_of(group);
    CHECK_EQ(ran.algorithm, TUTTI_ALGORITHM_TWO_SHOT);
    CHECK(strstr(ran.why, "TUTTI_ALGORITHM") != NULL);
    /* A call's own choice wins. */
    CHECK_OK(tutti_all_reduce(group, in, out, 1, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .algorithm = TUTTI_ALGORITHM_INLINE)));
    CHECK_EQ(ran_of(group).algorithm, TUTTI_ALGORITHM_INLINE);
}

TEST(a_setting_forces_an_algorithm_where_the_call_leaves_it_open) {
    setenv("TUTTI_ALGORITHM", "all_reduce=two_shot,barrier=inline", 1);
    test_threads(2, by_setting, NULL);
}

TEST(algorithms_have_names) {
    tutti_algorithm algorithm;
    for (int i = TUTTI_ALGORITHM_AUTO; i <= TUTTI_ALGORITHM_TREE; i++) {
        CHECK_OK(tutti_algorithm_parse(tutti_algorithm_name((tutti_algorithm)i), &algorithm));
        CHECK_EQ(algorithm, i);
    }
    CHECK_TEXT(tutti_algorithm_name((tutti_algorithm)77), "?");
    CHECK_STATUS(tutti_algorithm_parse("ring", &algorithm), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("two_shot");
}
