/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints of sharded training: a run goes on with the same bits, or with another number of ranks, and a folder
 * never holds half of one.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tutti/io.h>
#include <tutti/ops.h>
#include <tutti/parallel.h>
#include <tutti/state.h>

#define TEST_ON_DEVICE
#include "../tensor/device.h"

enum {
    STEPS = 3
};

static char folder[64];

static void own_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/tutti-checkpoint-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
}

static const char *below(const char *name) {
    static _Thread_local char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void remove_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK_EQ(system(command), 0);
}

/* What one rank trains. */
typedef struct run {
    tt_module *root, *units[2];
    tt_fully_sharded *sharded;
    tt_optimizer *optimizer;
} run;

/* Of the second layer, whose 10 columns some numbers of ranks cut into equal parts. */
static int by_columns(void *user, const char *name, const tt_tensor *parameter) {
    const tutti_group *group = user;
    (void)parameter;
    return strcmp(name, "1.weight") == 0 && 10 % tutti_group_size(group) == 0;
}

static run run_of(int seed, tutti_group *group) {
    run made;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.dimension = by_columns;
    options.user = group;
    tt_seed((uint64_t)seed, 0);
    tt_module *modules[] = { tt_linear_module(5, 10, true, TUTTI_F32), tt_linear_module(10, 10, true, TUTTI_F32),
                             tt_dropout_module(0.3), tt_layer_norm_module(10, 1e-5, TUTTI_F32) };
    made.units[0] = modules[0];
    made.units[1] = modules[1];
    made.root = tt_sequential_module(4, modules);
    CHECK(tt_module_set_buffer(made.root, "count", tt_full(tt_shape(2), seed, TUTTI_F32, NULL)));
    made.sharded = tt_fully_shard(made.root, 2, made.units, group, &options);
    made.optimizer = tt_adamw_optimizer(made.root, NULL);
    tt_seed((uint64_t)seed, (uint32_t)tutti_group_rank(group));
    return made;
}

static void end(run *made) {
    tt_fully_sharded_release(made->sharded);
    tt_optimizer_release(made->optimizer);
    tt_module_release(made->root);
}

/* Draws from the generator of the rank, whose state is part of a checkpoint. */
static void train(run *made) {
    for (int step = 0; step < STEPS; step++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = tt_randn(tt_shape(4, 5), TUTTI_F32, NULL);
        CHECK(tt_backward(tt_mean(tt_square(tt_add_scalar(tt_module_call(made->root, x), 1))), NULL));
        CHECK(tt_optimizer_step(made->optimizer));
        tt_optimizer_zero_grad(made->optimizer);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* Everything whole: parameters, then both states of the optimizer, in one row. */
static tt_tensor *everything(const run *made, tutti_group *group) {
    tt_tensor *all[64];
    size_t count = 0;
    tt_named_list whole = tt_fully_sharded_parameters(made->sharded), states = tt_optimizer_state(made->optimizer);
    for (size_t i = 0; i < whole.count; i++)
        all[count++] = tt_flatten(whole.at[i], 0, -1);
    for (size_t i = 0; i < states.count; i++)
        if (tt_dim_count(states.at[i]) == 2 && tt_size(states.at[i], 0) == 10) { /* by columns */
            all[count++] = tt_flatten(tt_all_gather(states.at[i], 1, group), 0, -1);
        } else if (tt_dim_count(states.at[i]) > 0) {
            int64_t rows[8], own = tt_size(states.at[i], 0);
            tt_tensor *told = tt_all_gather(tt_from(&own, tt_shape(1), TUTTI_I64, NULL), 0, group);
            CHECK(tt_read(told, rows, TUTTI_I64, (size_t)tutti_group_size(group)));
            tt_tensor_list parts = tt_all_gather_list(states.at[i], rows, group);
            all[count++] = tt_flatten(tt_cat(parts, 0), 0, -1);
        }
    return tt_cat(tt_tensors_of(count, all), 0);
}

/* ---- going on ---- */

static void save_and_go_on(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    (void)argument;
    tt_scope scope = tt_scope_open();
    run first = run_of(1, group);
    train(&first);
    CHECK(tt_fully_sharded_save(first.sharded, first.optimizer, folder));
    train(&first);
    run second = run_of(2, group);
    CHECK(tt_fully_sharded_load(second.sharded, second.optimizer, folder));
    CHECK_EQ(tt_item_int(tt_optimizer_steps(second.optimizer)), STEPS);
    CHECK_EQ((int)tt_at(tt_module_buffer(second.root, "count"), tt_shape(0)), 1);
    train(&second);
    CHECK(tt_equal(everything(&first, group), everything(&second, group)));
    end(&first);
    end(&second);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(a_run_goes_on_with_the_same_bits) {
    own_folder();
    test_threads(1, save_and_go_on, NULL);
    test_threads(3, save_and_go_on, NULL);
    remove_folder();
}

TEST(a_run_of_processes_goes_on_with_the_same_bits) {
    own_folder();
    test_processes(4, save_and_go_on, NULL);
    remove_folder();
}

static void save_state_of(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    (void)argument;
    tt_scope scope = tt_scope_open();
    run made = run_of(1, group);
    train(&made);
    CHECK(tt_fully_sharded_save(made.sharded, made.optimizer, folder));
    tt_tensor *all = everything(&made, group);
    if (tutti_group_rank(group) == 0)
        CHECK(tt_save_npy(all, below("all.npy")));
    end(&made);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static void load_state_of(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    (void)argument;
    tt_scope scope = tt_scope_open();
    run made = run_of(2, group);
    CHECK(tt_fully_sharded_load(made.sharded, made.optimizer, folder));
    CHECK(tt_equal(everything(&made, group), tt_to_device(tt_load_npy(below("all.npy")), test_device())));
    train(&made);
    end(&made);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(a_checkpoint_is_loaded_with_another_number_of_ranks) {
    static const int pairs[][2] = { { 4, 2 }, { 1, 3 }, { 3, 4 }, { 2, 1 } };
    own_folder();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        test_threads(pairs[i][0], save_state_of, NULL);
        test_threads(pairs[i][1], load_state_of, NULL);
    }
    remove_folder();
}

/* ---- folders ---- */

static int count_parts(void) {
    int count = 0;
    char command[128];
    snprintf(command, sizeof command, "ls '%s' | grep -c '^part-'", folder);
    FILE *list = popen(command, "r");
    CHECK(list != NULL && fscanf(list, "%d", &count) == 1);
    pclose(list);
    return count;
}

TEST_WORLD_THREADS(the_last_checkpoint_is_the_one_that_counts, 2) {
    tutti_group *group = tutti_world_group(world);
    if (tutti_group_rank(group) == 0)
        own_folder();
    CHECK_OK(tutti_barrier(group, NULL));
    tt_scope scope = tt_scope_open();
    run made = run_of(1, group);
    for (int i = 0; i < 3; i++) {
        train(&made);
        CHECK(tt_fully_sharded_save(made.sharded, made.optimizer, folder));
        CHECK(tutti_error_message()[0] == 0); /* that there was none before is no failure */
    }
    tt_tensor *all = everything(&made, group);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(count_parts(), 2);
    /* One that cannot be written leaves it alone, and is told on all ranks. */
    train(&made);
    char name[64];
    snprintf(name, sizeof name, "part-1-of-2-4.safetensors");
    if (tutti_group_rank(group) == 1)
        CHECK_EQ(mkdir(below(name), 0700), 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(!tt_fully_sharded_save(made.sharded, made.optimizer, folder));
    tt_error_show();
    if (tutti_group_rank(group) == 0)
        CHECK_MESSAGE("another rank could not write its part");
    tt_error_clear();
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1)
        CHECK_EQ(rmdir(below(name)), 0);
    /* Nor does one whose ranks name different folders. */
    CHECK(!tt_fully_sharded_save(made.sharded, made.optimizer,
                                 tutti_group_rank(group) == 1 ? below("elsewhere") : folder));
    tt_error_show();
    CHECK_MESSAGE(tutti_group_rank(group) == 0 ? "the part of rank 1 is not in rank 0's folder" : "rank 0 could not");
    tt_error_clear();
    CHECK(tt_fully_sharded_load(made.sharded, made.optimizer, folder));
    CHECK(tt_equal(all, everything(&made, group)));
    end(&made);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0)
        remove_folder();
}

TEST_WORLD_THREADS(a_part_of_another_checkpoint_is_told, 2) {
    tutti_group *group = tutti_world_group(world);
    char other[256], part[256];
    if (tutti_group_rank(group) == 0)
        own_folder();
    CHECK_OK(tutti_barrier(group, NULL));
    tt_scope scope = tt_scope_open();
    run made = run_of(1, group);
    snprintf(other, sizeof other, "%s", below("other"));
    snprintf(part, sizeof part, "%s", below("part-1-of-2-1.safetensors"));
    CHECK(tt_fully_sharded_save(made.sharded, made.optimizer, folder));
    train(&made);
    CHECK(tt_fully_sharded_save(made.sharded, made.optimizer, other));
    if (tutti_group_rank(group) == 0)
        CHECK_EQ(rename(below("other/part-1-of-2-1.safetensors"), part), 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(!tt_fully_sharded_load(made.sharded, made.optimizer, folder));
    CHECK_EQ(tt_error_show(), tutti_group_rank(group) == 1 ? TUTTI_ERROR_PROTOCOL : TUTTI_ERROR_STATE);
    CHECK_MESSAGE(tutti_group_rank(group) == 1 ? "is a part of another checkpoint" : "another rank could not read");
    tt_error_clear();
    end(&made);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0)
        remove_folder();
}

TEST_WORLD_THREADS(what_cannot_be_loaded_is_told, 2) {
    tutti_group *group = tutti_world_group(world);
    if (tutti_group_rank(group) == 0)
        own_folder();
    CHECK_OK(tutti_barrier(group, NULL));
    tt_scope scope = tt_scope_open();
    run made = run_of(1, group);
    CHECK(!tt_fully_sharded_load(made.sharded, made.optimizer, folder));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("holds no checkpoint");
    tt_error_clear();
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0)
        CHECK(tt_save_safetensors((tt_tensor_list){ 0, NULL }, NULL, below("checkpoint.safetensors")));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(!tt_fully_sharded_load(made.sharded, made.optimizer, folder));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_PROTOCOL);
    tt_error_clear();
    CHECK(!tt_fully_sharded_load(made.sharded, made.optimizer, NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    /* A part that is missing is told on every rank, and nothing has changed. */
    train(&made);
    CHECK(tt_fully_sharded_save(made.sharded, made.optimizer, folder));
    train(&made);
    tt_tensor *all = everything(&made, group);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 1)
        CHECK_EQ(unlink(below("part-1-of-2-1.safetensors")), 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(!tt_fully_sharded_load(made.sharded, made.optimizer, folder));
    tt_error_clear();
    CHECK(tt_equal(all, everything(&made, group)));
    end(&made);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == 0)
        remove_folder();
}
