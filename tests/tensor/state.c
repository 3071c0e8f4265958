/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a training run: a run that is killed anywhere and resumed ends with the bits of one that was not.
 */
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tutti/state.h>

#define TEST_ON_DEVICE
#include "device.h"

#define STEPS 6

static char folder[64];

static const char *file(const char *name) {
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void enter_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/tutti-state-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
}

static void leave_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
}

static tt_module *net_of(int64_t width) {
    CHECK(tt_default_device_set(test_device()));
    tt_module *layers[] = { tt_linear_module(4, width, true, TUTTI_F32), tt_dropout_module(0.25),
                            tt_function_module("Tanh", tt_tanh), tt_linear_module(width, 2, true, TUTTI_BF16) };
    tt_module *net = tt_sequential_module(3, layers); /* the bf16 layer is a head beside it */
    tt_scope scope = tt_scope_open();
    tt_module_set_buffer(net, "mean", tt_zeros(tt_shape(1), TUTTI_F64, NULL));
    tt_module_add_child(net, "head", layers[3]);
    CHECK_OK(tt_scope_close(&scope));
    return net;
}

/* Dropout and the inputs draw from the generator, the buffer follows the loss: all of the state matters. */
static void step_once(tt_module *net, tt_optimizer *optimizer) {
    tt_schedule schedule = { sizeof schedule, TT_SCHEDULE_COSINE, .warm_up = 2, .steps = STEPS };
    tt_scope scope = tt_scope_open();
    CHECK(tt_schedule_apply(&schedule, optimizer));
    tt_tensor *x = tt_randn(tt_shape(8, 4), TUTTI_F32, NULL);
    for (int i = 0; i < 3; i++) {
        char name[] = { (char)('0' + i), 0 };
        x = tt_module_call(tt_module_child(net, name), x);
    }
    tt_tensor *loss =
        tt_mean(tt_square(tt_to(tt_module_call(tt_module_child(net, "head"), tt_to(x, TUTTI_BF16)), TUTTI_F32)));
    CHECK(tt_backward(loss, NULL));
    CHECK(tt_optimizer_step(optimizer));
    tt_optimizer_zero_grad(optimizer);
    tt_lerp_(tt_module_buffer(net, "mean"), tt_to(tt_reshape(tt_detach(loss), tt_shape(1)), TUTTI_F64), 0.1);
    CHECK_OK(tt_scope_close(&scope));
}

/* Goes on from `path` where it exists, saves after every step, and is killed after step `last`, or inside its save at
 * byte `inside`. */
static void train(const char *path, int last, long inside) {
    tt_seed(9, 0);
    tt_module *net = net_of(5);
    tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.05));
    tt_scope scope = tt_scope_open();
    if (access(path, F_OK) == 0)
        CHECK(tt_load_state(net, optimizer, path));
    while (tt_item_int(tt_optimizer_steps(optimizer)) < STEPS) {
        step_once(net, optimizer);
        bool now = tt_item_int(tt_optimizer_steps(optimizer)) == last;
        if (now && inside > 0) /* the write that goes beyond so many bytes kills */
            CHECK_EQ(setrlimit(RLIMIT_FSIZE, &(struct rlimit){ (rlim_t)inside, (rlim_t)inside }), 0);
        CHECK(tt_save_state(net, optimizer, path));
        if (now)
            raise(SIGKILL);
    }
    CHECK_OK(tt_scope_close(&scope));
    tt_optimizer_release(optimizer);
    tt_module_release(net);
}

/* In a process of its own; returns whether it was killed. */
static bool train_apart(const char *path, int last, long inside) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        signal(SIGXFSZ, SIG_DFL); /* whoever started the tests may ignore it */
        CHECK_EQ(setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 }), 0);
        train(path, last, inside);
        _exit(0);
    }
    int result;
    CHECK_EQ(waitpid(child, &result, 0), child);
    CHECK(WIFSIGNALED(result) ? WTERMSIG(result) == (inside > 0 ? SIGXFSZ : SIGKILL) : WEXITSTATUS(result) == 0);
    return WIFSIGNALED(result);
}

static bool same_files(const char *left, const char *right) {
    char command[320];
    snprintf(command, sizeof command, "cmp %s %s", left, right);
    return system(command) == 0;
}

TEST(a_run_that_is_killed_goes_on_with_the_same_bits) {
    enter_folder();
    CHECK(!train_apart(file("whole"), 0, 0));
    for (int last = 1; last < STEPS; last += 2) {
        CHECK(train_apart(file("cut"), last, 0));
        CHECK(!train_apart(file("cut"), 0, 0));
        CHECK(same_files(file("whole"), file("cut")));
        CHECK_EQ(unlink(file("cut")), 0);
    }
    leave_folder();
}

TEST(a_run_that_is_killed_inside_a_save_goes_on_from_the_file_before) {
    enter_folder();
    CHECK(!train_apart(file("whole"), 0, 0));
    for (long inside = 16; inside < 1200; inside *= 8) {
        CHECK(train_apart(file("cut"), 3, inside));
        CHECK(!train_apart(file("cut"), 0, 0));
        CHECK(same_files(file("whole"), file("cut")));
        CHECK_EQ(unlink(file("cut")), 0);
    }
    leave_folder();
}

TEST(a_file_of_another_model_changes_nothing) {
    enter_folder();
    tt_module *net = net_of(5), *other = net_of(6), *more = net_of(5);
    tt_scope scope = tt_scope_open();
    tt_module_set_buffer(more, "extra", tt_ones(tt_shape(2), TUTTI_F32, NULL));
    tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL), *plain = tt_sgd_optimizer(net, NULL);
    CHECK(tt_save_state(net, optimizer, file("net")));
    CHECK(tt_save_state(more, NULL, file("more")));
    tt_tensor *before = tt_clone(tt_detach(tt_module_parameters(other).at[0]));
    CHECK(!tt_load_state(other, NULL, file("net")));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("\"module.0.weight\"");
    CHECK_MESSAGE("[5, 4]");
    CHECK_MESSAGE("[6, 4]");
    tt_error_clear();
    CHECK(tt_equal(tt_detach(tt_module_parameters(other).at[0]), before));
    CHECK(!tt_load_state(more, NULL, file("net")));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("no \"module.extra\"");
    tt_error_clear();
    CHECK(!tt_load_state(net, NULL, file("more")));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("\"module.extra\", which the module does not have");
    tt_error_clear();
    CHECK(!tt_load_state(net, plain, file("net"))); /* AdamW's averages */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("which the optimizer does not have");
    tt_error_clear();
    CHECK(!tt_load_state(net, optimizer, file("absent")));
    CHECK(tt_error_pending() != TUTTI_OK);
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
    tt_optimizer_release(optimizer);
    tt_optimizer_release(plain);
    tt_module_release(net);
    tt_module_release(other);
    tt_module_release(more);
    leave_folder();
}

TEST(a_trained_module_is_read_without_its_optimizer) {
    enter_folder();
    tt_module *net = net_of(5), *used = net_of(5);
    tt_scope scope = tt_scope_open();
    tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);
    CHECK(tt_save_state(net, optimizer, file("net")));
    tt_seed(4, 0);
    tt_tensor *state = tt_random_state();
    CHECK(tt_load_state(used, NULL, file("net")));
    CHECK(tt_equal(tt_random_state(), state)); /* left alone */
    CHECK(tt_equal(tt_detach(tt_module_parameters(used).at[0]), tt_detach(tt_module_parameters(net).at[0])));
    CHECK_OK(tt_scope_close(&scope));
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    tt_module_release(used);
    leave_folder();
}

TEST(the_random_generator_goes_on_from_a_state) {
    tt_scope scope = tt_scope_open();
    tt_seed(11, 3);
    tt_randn(tt_shape(7), TUTTI_F32, NULL);
    tt_tensor *state = tt_random_state(), *drawn = tt_randn(tt_shape(5), TUTTI_F32, NULL);
    tt_seed(1, 0);
    CHECK(tt_set_random_state(state));
    CHECK(tt_equal(tt_randn(tt_shape(5), TUTTI_F32, NULL), drawn));
    CHECK(!tt_set_random_state(drawn));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}
