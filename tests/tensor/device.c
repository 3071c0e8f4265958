/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on a device other than the CPU: copies, operators, how they are read, printed, saved and shared, and what
 * goes wrong there; device_memory.c has their memory and streams. With the stand-in for the driver, and with a GPU.
 */
#include "device_alone.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>

#include <tutti/optimizer.h>
#include <tutti/tensors.h>

#include "tensor/on_device.h"

TEST(a_machine_without_the_device_says_what_is_missing) {
    if (getenv("TEST_DEVICE") != NULL || tt_device_available(TUTTI_CUDA))
        SKIP("there is one here");
    tt_options options;
    tt_scope scope = tt_scope_open();
    FAILS(tt_zeros(tt_shape(2), TUTTI_F32, on(&options, TUTTI_CUDA)), TUTTI_ERROR_UNSUPPORTED,
          "there are no tensors on the device cuda: ");
    FAILS(tt_to_device(tt_ones(tt_shape(2), TUTTI_F32, NULL), TUTTI_CUDA_AT(3)), TUTTI_ERROR_UNSUPPORTED, "cuda:3");
    FAILS(tt_stream(TUTTI_CUDA), TUTTI_ERROR_UNSUPPORTED, "cuda");
    CHECK(tt_device_available(TUTTI_CPU) && !tt_device_available(77));
    CHECK_OK(tt_scope_close(&scope));
}

TEST(the_cpu_has_no_streams) {
    FAILS(tt_synchronize(TUTTI_CPU), TUTTI_ERROR_ARGUMENT, "the device cpu has no streams");
    tt_device_memory memory = TT_DEVICE_MEMORY_INIT;
    CHECK(tt_device_memory_get(TUTTI_CPU, &memory) == TUTTI_ERROR_ARGUMENT);
    CHECK(tt_device_memory_limit(TUTTI_META, 5) == TUTTI_ERROR_ARGUMENT);
    CHECK(tt_device_memory_get(TUTTI_CUDA, NULL) == TUTTI_ERROR_ARGUMENT);
}

/* A device that has a kernel of any name: the number in it. */
static tutti_status find_numbered(void *state, int index, const char *name, void **kernel) {
    (void)index;
    ++*(int *)state;
    *kernel = (void *)(uintptr_t)atoi(name + strlen("kernel_"));
    return TUTTI_OK;
}

static tutti_status launch_numbered(void *state, int index, void *stream, void *kernel, unsigned blocks,
                                    unsigned threads, unsigned shared, const void *arguments) {
    (void)state, (void)index, (void)stream, (void)blocks, (void)threads, (void)shared;
    CHECK_EQ((int)(uintptr_t)kernel, *(const int *)arguments);
    return TUTTI_OK;
}

TEST(kernels_are_found_by_their_names_however_many_there_are) {
    const tu_device_tensors table = { .size = sizeof table, .find = find_numbered, .launch = launch_numbered };
    tu_device *device = calloc(1, sizeof *device);
    int asked = 0;
    device->table = &table;
    device->state = &asked;
    for (int round = 0; round < 2; round++)
        for (int i = 1; i <= 2 * TU_DEVICE_NAMES; i++) {
            char name[TU_KERNEL_NAME];
            snprintf(name, sizeof name, "kernel_%d", i);
            CHECK_OK(tu_device_launch_on(device, NULL, name, 1, 32, &i));
        }
    CHECK_EQ(asked, 2 * 2 * TU_DEVICE_NAMES - TU_DEVICE_NAMES / 2); /* the first ones are remembered */
    for (int i = 0; i < TU_DEVICE_NAMES; i++)
        free((char *)(uintptr_t)atomic_load(&device->named[i].name));
    free(device);
}

TEST(tensors_are_made_there_and_read_here) {
    tutti_device device = there();
    tt_options options;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(2, 3), 1.5, TUTTI_F32, on(&options, TUTTI_CUDA));
    CHECK(tt_device_of(x) == device && tt_at(x, tt_shape(1, 2)) == 1.5);
    tt_tensor *counted = tt_arange(0, 6, 1, TUTTI_I32, on(&options, device));
    CHECK(tt_item_int(tt_sum(counted)) == 15);
    float values[6];
    CHECK(tt_read(tt_transpose(tt_view(counted, tt_shape(2, 3)), 0, 1), values, TUTTI_F32, 6));
    CHECK(values[0] == 0 && values[1] == 3 && values[2] == 1 && values[5] == 5);
    double given[] = { 1, 2, 3 };
    tt_tensor *from = tt_from(given, tt_shape(3), TUTTI_F64, on(&options, device));
    CHECK(tt_item(tt_sum(from)) == 6);
    char text[256];
    tt_format(from, text, sizeof text);
    CHECK(strstr(text, "[1, 2, 3]") != NULL || strstr(text, "1.") != NULL);
    CHECK(tt_equal(tt_to_device(from, TUTTI_CPU), tt_from(given, tt_shape(3), TUTTI_F64, NULL)));
    CHECK(tt_to_device(from, device) == from);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(printing_fetches_what_is_shown) {
    tutti_device device = there();
    tt_options options;
    char here[2048], text[2048];
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_to(tt_view(tt_arange(0, 2400, 1, TUTTI_I32, NULL), tt_shape(40, 3, 20)), TUTTI_F32),
              *there = tt_to_device(x, device);
    for (int turned = 0; turned < 2; turned++) {
        tt_format(turned ? tt_transpose(x, 0, 2) : x, here, sizeof here);
        tt_format(turned ? tt_transpose(there, 0, 2) : there, text, sizeof text);
        size_t values = (size_t)(strchr(here, 'f') - here); /* behind them the device is named */
        CHECK(strncmp(text, here, values) == 0 && (strstr(text, "[40, 3, 20]") != NULL) == !turned);
    }
    /* more than any memory has */
    tt_format(tt_expand(tt_full(tt_shape(1), 7, TUTTI_U8, on(&options, device)), tt_shape((int64_t)1 << 40)), text,
              sizeof text);
    CHECK(strncmp(text, "[7, 7, 7, …, 7, 7, 7]  u8 [1099511627776]", 40) == 0);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* Of the stand-in for the driver: a comparison that cannot read its tensors is no "different", but an error. */
TEST(a_comparison_whose_copy_fails_says_so) {
    tutti_device device = there();
    tt_options options;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void (*fail)(int) = (void (*)(int))dlsym(driver, "standin_fail_call");
    int (*left)(void) = (int (*)(void))dlsym(driver, "standin_calls_left");
    if (fail == NULL || left == NULL)
        SKIP("only a stand-in fails when it is told to");
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(2, 3), 1.5, TUTTI_F32, on(&options, device)),
              *turned = tt_transpose(tt_full(tt_shape(3, 2), 1.5, TUTTI_F32, on(&options, device)), 0, 1);
    CHECK(tt_equal(x, turned) && tt_allclose(turned, x, 0, 0));
    int failures = 0;
    for (int nth = 1, delivered = 1; delivered; nth++) {
        fail(nth);
        bool equal = nth % 2 == 0 ? tt_equal(x, turned) : tt_allclose(turned, x, 0, 0);
        delivered = left() == 0;
        fail(0);
        CHECK(equal == (tt_error_pending() == TUTTI_OK));
        CHECK(equal || tutti_error_message()[0] != 0);
        failures += !equal;
        tt_error_clear();
    }
    CHECK(failures > 0);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* Of the stand-in: a process that has not used the device yet, whose nth call of the driver fails. */
static void open_failing(void *driver, int nth) {
    void (*fail)(int) = (void (*)(int))dlsym(driver, "standin_fail_call");
    int (*left)(void) = (int (*)(void))dlsym(driver, "standin_calls_left");
    int (*objects)(void) = (int (*)(void))dlsym(driver, "standin_objects");
    int (*modules)(void) = (int (*)(void))dlsym(driver, "standin_modules");
    tt_options options;
    tt_scope scope = tt_scope_open();
    fail(nth);
    tt_tensor *x = tt_zeros(tt_shape(3), TUTTI_F32, on(&options, TUTTI_CUDA_AT(0)));
    bool delivered = left() == 0;
    fail(0);
    CHECK(x != NULL || delivered);
    if (x == NULL) {
        CHECK(tutti_error_message()[0] != 0);
        tt_error_clear();
    }
    tt_device_memory memory = TT_DEVICE_MEMORY_INIT;
    if (x == NULL && modules() == 0) /* it is not open */
        CHECK_EQ(objects(), 0);
    CHECK_OK(tt_device_memory_get(TUTTI_CUDA_AT(0), &memory));
    int opened = modules();
    x = tt_zeros(tt_shape(3), TUTTI_F32, &options);
    CHECK(x != NULL && tt_item(tt_sum(x)) == 0);
    CHECK_EQ(modules(), opened);
    CHECK_EQ(opened, 13); /* 11 images of operators and two of products that ranks make together */
    CHECK_OK(tt_scope_close(&scope));
    fflush(stdout);
    _exit(delivered ? 0 : 3);
}

TEST(a_device_that_does_not_open_leaves_nothing_behind_and_opens_the_next_time) {
    (void)there();
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (dlsym(driver, "standin_fail_call") == NULL)
        SKIP("only a stand-in fails when it is told to");
    int status = 0, nth = 0;
    while (status == 0) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0)
            open_failing(driver, nth + 1);
        CHECK(waitpid(child, &status, 0) == child);
        nth++;
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
    CHECK(nth > 40);
    test_device_leave();
}

/* Launches on the default stream are runs of a graph whose kernel is set anew each time. */
static void *add_often(void *failed) {
    tt_scope scope = tt_scope_open();
    tt_options options;
    tt_tensor *x = tt_zeros(tt_shape(5), TUTTI_F32, on(&options, test_device())),
              *y = tt_full(tt_shape(5), 1, TUTTI_F32, &options);
    for (int i = 0; i < 300; i++)
        tt_add_(x, i % 3 == 0 ? tt_mul_scalar(y, 2) : y);
    float sums[5];
    bool good = tt_read(x, sums, TUTTI_F32, 5) && sums[0] == 400 && sums[4] == 400;
    *(int *)failed = tt_scope_close(&scope) != TUTTI_OK || !good;
    return NULL;
}

TEST(launches_of_several_threads_and_of_drivers_that_refuse_a_graph_are_made_all_the_same) {
    pthread_t threads[3];
    int failed[4] = { 0 };
    (void)there();
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, add_often, &failed[i]), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void (*fail)(const char *, int) =
        driver == NULL ? NULL : (void (*)(const char *, int))dlsym(driver, "standin_fail");
    if (fail != NULL)
        fail("cuGraphExecKernelNodeSetParams", 7);
    add_often(&failed[3]);
    if (fail != NULL)
        fail("", 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(failed[i], 0);
    test_device_leave();
}

TEST(copies_convert_and_broadcast_in_every_direction) {
    tutti_device device = there();
    tt_options options;
    static const tutti_dtype dtypes[] = { TUTTI_F64,     TUTTI_F32, TUTTI_BF16, TUTTI_F16, TUTTI_F8_E4M3,
                                          TUTTI_F8_E5M2, TUTTI_I8,  TUTTI_I64,  TUTTI_U8,  TUTTI_U64,
                                          TUTTI_BOOL,    TUTTI_C64, TUTTI_C128 };
    tt_scope scope = tt_scope_open();
    tt_seed(5, 0);
    tt_tensor *base = tt_mul_scalar(tt_randn(tt_shape(7, 5), TUTTI_F64, NULL), 300);
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        tt_tensor *here = tt_to(base, dtypes[i]), *moved = tt_to_device(here, device);
        for (size_t k = 0; k < sizeof dtypes / sizeof dtypes[0]; k++) {
            tt_tensor *expected = tt_to(here, dtypes[k]), *found = tt_to(moved, dtypes[k]);
            char a[7 * 5 * 16], b[7 * 5 * 16];
            CHECK(tt_read(expected, a, dtypes[k], 35) && tt_read(found, b, dtypes[k], 35));
            if (memcmp(a, b, 35 * tutti_dtype_size(dtypes[k])) != 0)
                FAIL("%s to %s differs there", tutti_dtype_name(dtypes[i]), tutti_dtype_name(dtypes[k]));
        }
    }
    /* Longer than a pack, and off its alignment. */
    tt_tensor *line = tt_to(tt_reshape(tt_randn(tt_shape(1003), TUTTI_F64, NULL), tt_shape(1003)), TUTTI_F32);
    tt_tensor *line_there = tt_to_device(line, device);
    for (int from = 0; from < 3; from++) {
        tt_tensor *part = tt_narrow(line, 0, from, 1000), *part_there = tt_narrow(line_there, 0, from, 1000);
        CHECK(tt_equal(tt_to(part, TUTTI_BF16), tt_to(part_there, TUTTI_BF16)));
        CHECK(tt_equal(tt_to(tt_to(part, TUTTI_F16), TUTTI_F32), tt_to(tt_to(part_there, TUTTI_F16), TUTTI_F32)));
    }
    /* Into strided memory, from a row, and back. */
    tt_tensor *to = tt_transpose(tt_zeros(tt_shape(5, 7), TUTTI_F32, on(&options, device)), 0, 1);
    tt_copy_(to, tt_to_device(tt_to(base, TUTTI_F32), device));
    CHECK(tt_equal(tt_to_device(to, TUTTI_CPU), tt_to(base, TUTTI_F32)));
    tt_tensor *row = tt_to_device(tt_select(base, 0, 2), device);
    tt_copy_(to, row);
    CHECK(tt_equal(tt_to_device(tt_select(to, 0, 6), TUTTI_CPU), tt_to(tt_select(base, 0, 2), TUTTI_F32)));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(long_sums_have_the_bits_of_the_cpu) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    tt_seed(6, 0);
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64, TUTTI_BF16 };
    for (int i = 0; i < 3; i++) {
        tt_tensor *x = tt_randn(tt_shape(200001), dtypes[i], NULL),
                  *y = tt_randn(tt_shape(3, 300, 70), dtypes[i], NULL);
        CHECK(tt_item(tt_sum(x)) == tt_item(tt_sum(tt_to_device(x, device))));
        for (int dim = 0; dim < 3; dim++) {
            CHECK(tt_equal(tt_sum_dims(y, tt_shape(dim), false),
                           tt_sum_dims(tt_to_device(y, device), tt_shape(dim), false)));
            CHECK(tt_equal(tt_amax(y, tt_shape(dim), true), tt_amax(tt_to_device(y, device), tt_shape(dim), true)));
            CHECK(tt_equal(tt_softmax(y, dim), tt_softmax(tt_to_device(y, device), dim)));
        }
        CHECK(tt_equal(tt_mean_dims(y, tt_shape(0, 2), false),
                       tt_mean_dims(tt_to_device(y, device), tt_shape(0, 2), false)));
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(random_numbers_are_those_of_the_cpu) {
    tutti_device device = there();
    tt_options options;
    tt_scope scope = tt_scope_open();
    tt_seed(11, 2);
    tt_tensor *a = tt_randn(tt_shape(33, 5), TUTTI_F32, NULL), *b = tt_rand(tt_shape(1001), TUTTI_BF16, NULL);
    tt_tensor *c = tt_randint(-5, 90, tt_shape(77), TUTTI_I64, NULL), *d = tt_dropout(a, 0.3);
    tt_seed(11, 2);
    CHECK(tt_equal(a, tt_randn(tt_shape(33, 5), TUTTI_F32, on(&options, device))));
    CHECK(tt_equal(b, tt_rand(tt_shape(1001), TUTTI_BF16, on(&options, device))));
    CHECK(tt_equal(c, tt_randint(-5, 90, tt_shape(77), TUTTI_I64, on(&options, device))));
    CHECK(tt_equal(d, tt_dropout(tt_to_device(a, device), 0.3)));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* A small network, trained on both. */
static void train(tutti_device device, double *losses, tt_tensor **weight) {
    tt_options options;
    tt_seed(3, 0);
    tt_tensor *x = tt_to_device(tt_randn(tt_shape(16, 8), TUTTI_F32, NULL), device);
    tt_tensor *targets = tt_to_device(tt_randint(0, 4, tt_shape(16), TUTTI_I64, NULL), device);
    tt_tensor *w = tt_parameter(tt_randn(tt_shape(4, 8), TUTTI_F32, on(&options, device)), true);
    tt_tensor *scale = tt_parameter(tt_ones(tt_shape(8), TUTTI_F32, on(&options, device)), true);
    tt_tensor *m = tt_zeros_like(w), *v = tt_zeros_like(w);
    for (int step = 1; step <= 5; step++) {
        tt_tensor *normed = tt_layer_norm(x, scale, NULL, 1e-5);
        /* a sum of products that no library adds up */
        tt_tensor *logits = tt_sum_dims(tt_mul(tt_unsqueeze(normed, 1), w), tt_shape(2), false);
        tt_tensor *loss = tt_cross_entropy(tt_gelu(logits), targets, -100);
        losses[step - 1] = tt_item(loss);
        tt_backward(loss, NULL);
        CHECK(tt_adamw_step(w, tt_grad(w), m, v, step, NULL) && tt_sgd_step(scale, tt_grad(scale), NULL, NULL));
        tt_set_grad(w, NULL);
        tt_set_grad(scale, NULL);
    }
    *weight = w;
}

TEST(a_training_run_has_the_bits_of_the_cpu) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    double here[5], over[5];
    tt_tensor *a, *b;
    train(TUTTI_CPU, here, &a);
    train(device, over, &b);
    for (int i = 0; i < 5; i++)
        if (here[i] != over[i])
            FAIL("the loss of step %d is %.9g here and %.9g there", i, here[i], over[i]);
    CHECK(here[4] < here[0] && tt_equal(a, b));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

static int no_forward(tt_module *module, tt_tensor_list in, tt_tensor **out) {
    (void)module, (void)in, (void)out;
    return 0;
}

/* Kernels that the stand-in for the driver was given so far; -1: it is the real one, which does not count. */
static int launches(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*count)(void) = driver == NULL ? NULL : (int (*)(void))(uintptr_t)dlsym(driver, "standin_launches");
    return count == NULL ? -1 : count();
}

/* Three parameters after four steps of an optimizer; how often memory was asked for in the last. Each step is one
 * launch. */
static uint64_t optimize(tutti_device device, tutti_dtype dtype, bool adamw, tt_tensor *after[3]) {
    static const tt_module_type type = { sizeof type, "Three", no_forward, NULL };
    static const char *const names[] = { "a", "b", "c" };
    static const int64_t sizes[] = { 1, 333, 1000 };
    tt_module *module = tt_module_new(&type, NULL);
    tt_device_memory before = TT_DEVICE_MEMORY_INIT, behind = TT_DEVICE_MEMORY_INIT;
    tt_seed(8, 0);
    for (int i = 0; i < 3; i++) {
        after[i] =
            tt_parameter(tt_to_device(tt_to(tt_randn(tt_shape(sizes[i]), TUTTI_F32, NULL), dtype), device), true);
        CHECK(tt_module_set_parameter(module, names[i], after[i]));
    }
    tt_optimizer *optimizer =
        adamw ? tt_adamw_optimizer(module, TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.1, .weight_decay = 0.1))
              : tt_sgd_optimizer(module, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1, .momentum = 0.9));
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 3; i++)
            tt_set_grad(after[i], tt_to_device(tt_to(tt_randn(tt_shape(sizes[i]), TUTTI_F32, NULL), dtype), device));
        if (device != TUTTI_CPU)
            CHECK_OK(tt_device_memory_get(device, &before));
        int launched = launches();
        CHECK(tt_optimizer_step(optimizer));
        if (device != TUTTI_CPU && launched >= 0)
            CHECK_EQ(launches() - launched, 1);
        if (device != TUTTI_CPU)
            CHECK_OK(tt_device_memory_get(device, &behind));
    }
    tt_optimizer_release(optimizer);
    tt_module_release(module);
    return behind.allocations - before.allocations;
}

TEST(steps_of_an_optimizer_have_the_bits_of_the_cpu_and_narrow_floats_go_together_too) {
    tutti_device device = there();
    static const tutti_dtype dtypes[] = { TUTTI_BF16, TUTTI_F16, TUTTI_F32, TUTTI_F64 };
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < 8; i++) {
        tt_tensor *here[3], *over[3];
        optimize(TUTTI_CPU, dtypes[i / 2], i % 2 == 0, here);
        CHECK_EQ(optimize(device, dtypes[i / 2], i % 2 == 0, over), 1); /* for the list of all three */
        for (int k = 0; k < 3; k++)
            CHECK(tt_equal(here[k], tt_to_device(over[k], TUTTI_CPU)));
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* Their rows lie at distances that are no multiple of 16 bytes: copies that do are multiplied. */
TEST(large_products_of_rows_at_odd_distances_agree_with_those_of_the_cpu) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    tt_seed(5, 0);
    tt_tensor *a = tt_to(tt_randn(tt_shape(513, 515), TUTTI_F32, NULL), TUTTI_BF16),
              *b = tt_to(tt_randn(tt_shape(515, 517), TUTTI_F32, NULL), TUTTI_BF16),
              *c = tt_to(tt_randn(tt_shape(521, 515), TUTTI_F32, NULL), TUTTI_BF16);
    tt_tensor *there_a = tt_to_device(a, device), *there_b = tt_to_device(b, device);
    tt_tensor *wide = tt_to(tt_matmul(tt_to(a, TUTTI_F32), tt_to(b, TUTTI_F32)), TUTTI_BF16);
    CHECK(tt_allclose(wide, tt_to_device(tt_matmul(there_a, there_b), TUTTI_CPU), 1e-2, 0.1));
    wide = tt_to(tt_matmul(tt_to(tt_transpose(tt_narrow(a, 1, 0, 513), 0, 1), TUTTI_F32),
                           tt_to(tt_transpose(tt_narrow(c, 1, 0, 513), 0, 1), TUTTI_F32)),
                 TUTTI_BF16);
    tt_tensor *there_c = tt_transpose(tt_narrow(tt_to_device(c, device), 1, 0, 513), 0, 1);
    CHECK(tt_allclose(wide,
                      tt_to_device(tt_matmul(tt_transpose(tt_narrow(there_a, 1, 0, 513), 0, 1), there_c), TUTTI_CPU),
                      1e-2, 0.1));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(products_agree_with_those_of_the_cpu) {
    tutti_device device = there();
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64, TUTTI_BF16, TUTTI_F16, TUTTI_I32 };
    static const double tolerance[] = { 1e-5, 1e-13, 2e-2, 4e-3, 0 };
    tt_scope scope = tt_scope_open();
    tt_seed(4, 0);
    for (int i = 0; i < 5; i++) {
        tutti_dtype dtype = dtypes[i];
        tt_tensor *a =
            tt_to(tt_mul_scalar(tt_randn(tt_shape(3, 2, 37, 24), TUTTI_F64, NULL), dtype == TUTTI_I32 ? 9 : 1), dtype);
        tt_tensor *b =
            tt_to(tt_mul_scalar(tt_randn(tt_shape(2, 24, 40), TUTTI_F64, NULL), dtype == TUTTI_I32 ? 9 : 1), dtype);
        tt_tensor *c = tt_select(b, 0, 1), *turned = tt_transpose(c, 0, 1), *bias = tt_select(c, 0, 3);
        tt_tensor *there_a = tt_to_device(a, device), *there_b = tt_to_device(b, device),
                  *there_c = tt_select(there_b, 0, 1);
        tt_tensor *there_turned = tt_transpose(there_c, 0, 1), *there_bias = tt_select(there_c, 0, 3);
        CHECK(tt_allclose(tt_matmul(a, b), tt_matmul(there_a, there_b), tolerance[i], tolerance[i]));
        CHECK(tt_allclose(tt_matmul(a, c), tt_matmul(there_a, there_c), tolerance[i], tolerance[i]));
        CHECK(tt_allclose(tt_linear(a, turned, bias), tt_linear(there_a, there_turned, there_bias), tolerance[i],
                          tolerance[i]));
        CHECK(tt_allclose(tt_matmul(tt_select(c, 0, 0), turned), tt_matmul(tt_select(there_c, 0, 0), there_turned),
                          tolerance[i], tolerance[i]));
    }
    tt_tensor *a = tt_randint(-100, 100, tt_shape(33, 20), TUTTI_I8, NULL),
              *b = tt_randint(-100, 100, tt_shape(20, 17), TUTTI_I8, NULL);
    CHECK(tt_equal(tt_int_matmul(a, b), tt_int_matmul(tt_to_device(a, device), tt_to_device(b, device))));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(attention_agrees_with_that_of_the_cpu) {
    tutti_device device = there();
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_F64, TUTTI_BF16 };
    static const double tolerance[] = { 2e-5, 1e-12, 3e-2 };
    tt_scope scope = tt_scope_open();
    tt_seed(8, 0);
    for (int i = 0; i < 6; i++) {
        tt_tensor *made[3], *moved[3];
        for (int k = 0; k < 3; k++) {
            made[k] = tt_randn(tt_shape(2, 3, k == 0 ? 37 : 70, k == 2 ? 24 : 16), dtypes[i / 2], NULL);
            moved[k] = tt_to_device(made[k], device);
            tt_require_grad(made[k], true);
            tt_require_grad(moved[k], true);
        }
        double scale = i % 2 == 0 ? 0 : -0.3, near = tolerance[i / 2];
        tt_tensor *here = tt_attention(made[0], made[1], made[2], i % 2 == 0, scale);
        tt_tensor *over = tt_attention(moved[0], moved[1], moved[2], i % 2 == 0, scale);
        CHECK(tt_allclose(here, over, near, near));
        tt_backward(tt_sum(tt_square(here)), NULL);
        tt_backward(tt_sum(tt_square(over)), NULL);
        for (int k = 0; k < 3; k++)
            CHECK(tt_allclose(tt_grad(made[k]), tt_grad(moved[k]), 4 * near, 4 * near));
    }
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(an_index_out_of_range_is_told_by_the_next_wait) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    int64_t given[] = { 1, 7 };
    tt_tensor *x = tt_to_device(tt_ones(tt_shape(4, 2), TUTTI_F32, NULL), device);
    tt_tensor *index = tt_to_device(tt_from(given, tt_shape(2), TUTTI_I64, NULL), device);
    CHECK(tt_index_select(x, 0, index) != NULL);
    FAILS(tt_synchronize(device), TUTTI_ERROR_RANGE,
          "index_select: index 7 at position 1 is out of range for size 4; found on cuda:0");
    CHECK(tt_synchronize(device)); /* told once; the device goes on */
    CHECK(tt_embedding(x, index) != NULL);
    FAILS(tt_item(tt_sum(x)), TUTTI_ERROR_RANGE, "embedding: index 7");
    tt_tensor *targets = tt_to_device(tt_from((int64_t[]){ 0, 2, 1, 0 }, tt_shape(4), TUTTI_I64, NULL), device);
    CHECK(tt_cross_entropy(x, targets, -100) != NULL);
    FAILS(tt_synchronize(device), TUTTI_ERROR_RANGE, "cross_entropy: index 2 at position 1 is out of range for size 2");
    CHECK(tt_item(tt_sum(x)) == 8);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(devices_do_not_mix_and_what_is_not_there_says_so) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    tt_tensor *here = tt_ones(tt_shape(3), TUTTI_F32, NULL), *x = tt_to_device(here, device);
    FAILS(tt_add(here, x), TUTTI_ERROR_ARGUMENT, "is on the device cpu and b (input 1) on cuda:0");
    FAILS(tt_to_device(here, TUTTI_CUDA_AT(200)), TUTTI_ERROR_UNSUPPORTED, "there is no device cuda:200");
    tt_options options;
    FAILS(tt_to_device(tt_zeros(tt_shape(2), TUTTI_F32, on(&options, TUTTI_META)), device), TUTTI_ERROR_UNSUPPORTED,
          "has a shape but no data");
    CHECK(tt_item(tt_sum(tt_add(x, tt_number(2)))) == 9); /* a number adopts the device */
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* ---- with others ---- */

TEST(pinned_memory_and_dlpack_go_both_ways) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    tt_tensor *pinned = tt_empty_pinned(tt_shape(3, 2), TUTTI_F32);
    CHECK(tt_device_of(pinned) == TUTTI_CPU);
    tt_fill_(pinned, 1);
    tt_tensor *x = tt_to_device(pinned, device);
    tt_dlpack_managed *managed = tt_to_dlpack(x);
    CHECK(managed != NULL && managed->tensor.device_type == TT_DLPACK_CUDA && managed->tensor.device_id == 0);
    CHECK(managed->tensor.data == tt_data(x));
    tt_tensor *shared = tt_from_dlpack(managed);
    CHECK(tt_device_of(shared) == device && tt_data(shared) == tt_data(x));
    tt_mul_(shared, tt_number(3));
    CHECK(tt_item(tt_sum(x)) == 18);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

static struct {
    tt_dlpack_managed *managed; /* who lent it */
    tt_event *used;             /* behind the use of it */
    bool over;                  /* when it came back */
} loan;
static void take_back(tt_dlpack_managed *self) {
    (void)self;
    loan.over = tt_event_done(loan.used);
    loan.managed->deleter(loan.managed);
}

static void check_goes_back(bool captured) {
    tutti_device device = there();
    void *stream = tt_stream_new(device);
    tt_options options;
    tt_scope scope = tt_scope_open(), inner;
    tt_tensor *large = tt_ones(tt_shape(256, 256), TUTTI_F32, on(&options, device)), *x = tt_sum(large);
    loan.managed = tt_to_dlpack(x);
    tt_dlpack_managed lent = *loan.managed;
    lent.deleter = take_back;
    CHECK(tt_synchronize(device) && tt_stream_set(device, stream));
    inner = tt_scope_open();
    tt_tensor *shared = tt_from_dlpack(&lent), *late = tt_sum(tt_matmul(large, large)), *y = tt_add(late, shared);
    tt_scope_return(y);
    loan.used = tt_event_record(device);
    CHECK(captured ? tt_replay_begin(device) : tt_stream_set(device, NULL));
    CHECK_OK(tt_scope_close(&inner));
    CHECK(loan.over);
    if (captured)
        tt_replay_release(tt_replay_end(device));
    CHECK(tt_event_join(loan.used) && tt_item(y) == 256.0 * 256 * 257);
    CHECK(tt_stream_set(device, NULL));
    tt_event_release(loan.used);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(device, stream);
    test_device_leave();
}

TEST(an_import_goes_back_when_the_streams_that_used_it_are_past_it) {
    check_goes_back(false);
}

/* Of a stream that is captured by now, that is where it was before. */
TEST(an_import_goes_back_in_a_capture_when_what_came_before_is_over) {
    check_goes_back(true);
}

TEST(files_take_tensors_from_there) {
    tutti_device device = there();
    char path[] = "/tmp/tutti-device-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_to_device(tt_arange(0, 12, 1, TUTTI_F32, NULL), device);
    tt_tensor *strided = tt_slice(x, 0, 1, 12, 2), *narrow = tt_to(tt_view(x, tt_shape(3, 4)), TUTTI_BF16);
    CHECK(tt_save_npy(strided, path));
    CHECK(tt_equal(tt_load_npy(path), strided));
    static const char *const names[] = { "strided", "turned" };
    for (int form = 0; form < 2; form++) {
        tt_tensor_list saved = tt_tensors(strided, tt_transpose(form == 0 ? tt_to(narrow, TUTTI_F16) : narrow, 0, 1));
        CHECK(form == 0 ? tt_save_npz(saved, names, path) : tt_save_safetensors(saved, names, path));
        tt_named_list found = form == 0 ? tt_load_npz(path) : tt_load_safetensors(path);
        CHECK_EQ(found.count, 2);
        for (size_t i = 0; i < 2; i++) {
            int which = strcmp(found.names[i], names[1]) == 0;
            CHECK_TEXT(found.names[i], names[which]);
            CHECK(tt_device_of(found.at[i]) == TUTTI_CPU && tt_equal(found.at[i], saved.at[which]));
        }
    }
    unlink(path);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(anomaly_mode_names_the_operator_that_made_a_nan_there) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_to_device(tt_full(tt_shape(3), -1, TUTTI_F32, NULL), device);
    tt_anomaly_mode(true);
    FAILS(tt_log(x), TUTTI_ERROR_STATE, "log: it made the first NaN");
    tt_anomaly_mode(false);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* The largest difference of two tensors of one shape, on any devices. */
static double apart(tt_tensor *x, tt_tensor *y) {
    tt_tensor *left = tt_to(tt_to_device(x, TUTTI_CPU), TUTTI_F64),
              *right = tt_to(tt_to_device(y, TUTTI_CPU), TUTTI_F64);
    return tt_item(tt_amax(tt_abs(tt_sub(left, right)), tt_no_dims(), false));
}

/* A leaf of the CPU and its copy there. */
static void pair(tt_tensor *both[2], tt_dims shape, tutti_dtype dtype, tutti_device device) {
    tt_tensor *x = tt_to(tt_randn(shape, TUTTI_F32, NULL), dtype);
    both[0] = tt_require_grad(tt_detach(x), true);
    both[1] = tt_require_grad(tt_detach(tt_to_device(x, device)), true);
}

TEST(linear_attention_and_sums_by_columns_of_several_blocks_agree_with_the_cpu) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16 };
    static const double allowed[] = { 2e-5, 6e-2, 1e-2 };
    tutti_device device = there();
    for (int d = 0; d < 3; d++) {
        tt_scope scope = tt_scope_open();
        tt_seed(7, 0);
        tt_tensor *x[2], *weight[2], *bias[2], *gain[2], *query[2], *key[2], *value[2], *y[2], *z[2];
        pair(x, tt_shape(150, 40), dtypes[d], device);
        pair(weight, tt_shape(8, 40), dtypes[d], device);
        pair(bias, tt_shape(8), dtypes[d], device);
        pair(gain, tt_shape(40), dtypes[d], device);
        pair(query, tt_shape(2, 3, 70, 16), dtypes[d], device);
        pair(key, tt_shape(2, 3, 70, 16), dtypes[d], device);
        pair(value, tt_shape(2, 3, 70, 16), dtypes[d], device);
        for (int i = 0; i < 2; i++) {
            y[i] = tt_linear(tt_layer_norm(x[i], gain[i], NULL, 1e-5), weight[i], bias[i]);
            z[i] = tt_attention(query[i], key[i], value[i], true, 0);
            tt_backward(tt_add(tt_mean(tt_square(y[i])), tt_mean(tt_square(z[i]))), NULL);
        }
        CHECK(apart(y[0], y[1]) <= allowed[d] * 20 && apart(z[0], z[1]) <= allowed[d]);
        tt_tensor **leaves[] = { x, weight, bias, gain, query, key, value };
        for (size_t k = 0; k < sizeof leaves / sizeof leaves[0]; k++)
            CHECK(apart(tt_grad(leaves[k][0]), tt_grad(leaves[k][1])) <= allowed[d]);
        CHECK_OK(tt_scope_close(&scope));
    }
    test_device_leave();
}

/* Queries, keys and values as a layer has them, (batch, rows, heads, depth), the heads brought forward. */
static void heads_of(tt_tensor *both[2], int64_t rows, int64_t depth, tutti_dtype dtype, tutti_device device,
                     tt_tensor *heads[2]) {
    pair(both, tt_shape(2, rows, 2, depth), dtype, device);
    for (int i = 0; i < 2; i++)
        heads[i] = tt_transpose(both[i], 1, 2);
}

TEST(attention_at_every_depth_agrees_with_the_cpu) {
    static const int64_t rows[][2] = { { 70, 133 }, { 133, 70 }, { 64, 64 } };
    static const tutti_dtype dtypes[] = { TUTTI_BF16, TUTTI_F16, TUTTI_F32 };
    static const double allowed[] = { 4e-2, 6e-3, 1e-5 };
    tutti_device device = there();
    for (int i = 0; i < 36; i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *query[2], *key[2], *value[2], *heads[3][2], *z[2];
        int64_t depth = 32 * (1 + i % 4), queries = rows[i / 12][0], keys = rows[i / 12][1];
        tutti_dtype dtype = dtypes[i / 4 % 3];
        bool causal = (i + i / 4) % 2 == 0;
        tt_seed((uint64_t)i, 0);
        heads_of(query, queries, depth, dtype, device, heads[0]);
        heads_of(key, keys, depth, dtype, device, heads[1]);
        heads_of(value, keys, depth, dtype, device, heads[2]);
        for (int k = 0; k < 2; k++) {
            z[k] = tt_attention(heads[0][k], heads[1][k], heads[2][k], causal, i % 3 == 0 ? -0.2 : 0);
            tt_backward(tt_sum(tt_square(z[k])), NULL);
        }
        CHECK(apart(z[0], z[1]) <= allowed[i / 4 % 3]);
        tt_tensor **leaves[] = { query, key, value };
        for (int k = 0; k < 3; k++) {
            double largest = tt_item(tt_amax(tt_abs(tt_to(tt_grad(leaves[k][0]), TUTTI_F64)), tt_no_dims(), false));
            CHECK(apart(tt_grad(leaves[k][0]), tt_grad(leaves[k][1])) <= allowed[i / 4 % 3] * (1 + largest));
        }
        CHECK_OK(tt_scope_close(&scope));
    }
    test_device_leave();
}

/* Pairs of reals as complex numbers; the functions are the C library's on the CPU. */
static tt_tensor *of_complex(tt_tensor *x, tt_tensor *y, tt_tensor *index, int which) {
    tt_tensor *z = tt_view_as_complex(x), *w = tt_view_as_complex(y);
    switch (which) {
    case 0:
        return tt_mul(tt_add(z, w), tt_sub(z, tt_conj(w)));
    case 1:
        return tt_div(z, w);
    case 2:
        return tt_abs(tt_mul_scalar(tt_add_scalar(z, 2), 3));
    case 3:
        return tt_sqrt(z);
    case 4:
        return tt_exp(z);
    case 5:
        return tt_log(tt_neg(z));
    case 6:
        return tt_matmul(z, tt_transpose(w, 0, 1));
    case 7:
        return tt_sum(z);
    case 8:
        return tt_mean_dims(tt_square(z), tt_shape(1), false);
    case 9:
        return tt_prod(z, tt_shape(0), false);
    case 10:
        return tt_index_add(z, 0, index, tt_index_select(w, 0, index));
    case 11:
        return tt_where(tt_eq(z, w), z, tt_div_scalar(w, 3));
    default:
        return tt_scatter_add(z, 0, tt_expand(tt_reshape(index, tt_shape(4, 1)), tt_shape(4, 5)),
                              tt_narrow(w, 0, 0, 4));
    }
}

TEST(complex_numbers_are_those_of_the_cpu) {
    tutti_device device = there();
    for (int i = 0; i < 26; i++) {
        tt_scope scope = tt_scope_open();
        tutti_dtype dtype = i % 2 == 0 ? TUTTI_F64 : TUTTI_F32;
        tt_tensor *x[2], *y[2], *z[2];
        tt_seed((uint64_t)i, 0);
        pair(x, tt_shape(6, 5, 2), dtype, device);
        pair(y, tt_shape(6, 5, 2), dtype, device);
        tt_tensor *index = tt_from((int64_t[]){ 3, 0, 3, 5 }, tt_shape(4), TUTTI_I64, NULL);
        for (int k = 0; k < 2; k++) {
            tt_tensor *made = of_complex(x[k], y[k], k == 0 ? index : tt_to_device(index, device), i / 2);
            z[k] = i / 2 == 2 ? made : tt_view_as_real(made);
            tt_backward(tt_sum(tt_square(z[k])), NULL);
        }
        double largest = tt_item(tt_amax(tt_abs(tt_to(tt_grad(x[0]), TUTTI_F64)), tt_no_dims(), false));
        double allowed = (dtype == TUTTI_F64 ? 1e-13 : 1e-5) * (1 + largest);
        CHECK(apart(z[0], z[1]) <= allowed);
        CHECK(apart(tt_grad(x[0]), tt_grad(x[1])) <= allowed);
        if (i / 2 == 0 || i / 2 == 7 || i / 2 == 10)
            CHECK(tt_equal(z[0], tt_to_device(z[1], TUTTI_CPU))); /* the same bits */
        CHECK_OK(tt_scope_close(&scope));
    }
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from((double[]){ 1, 2, INFINITY, NAN, -0.0, 3 }, tt_shape(3, 2), TUTTI_F64, NULL);
    tt_tensor *here = tt_view_as_complex(x), *over = tt_view_as_complex(tt_to_device(x, device));
    CHECK(apart(tt_view_as_real(tt_narrow(tt_div(here, tt_number(0.5)), 0, 0, 1)),
                tt_view_as_real(tt_narrow(tt_div(over, tt_number(0.5)), 0, 0, 1))) == 0); /* a number of the host */
    tt_tensor *infinite = tt_to_device(tt_abs(tt_mul(over, over)), TUTTI_CPU);
    CHECK(((const double *)tt_data(infinite))[1] == INFINITY); /* as in C, whatever the other part is */
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(entries_that_meet_in_one_place_are_added_in_their_order) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    int64_t at[3000];
    for (int i = 0; i < 3000; i++)
        at[i] = i % 7 == 0 ? -1 : (i * 37) % 50;
    tt_tensor *index = tt_from(at, tt_shape(3000), TUTTI_I64, NULL),
              *source = tt_randn(tt_shape(3000, 5), TUTTI_F32, NULL);
    tt_tensor *sum = tt_randn(tt_shape(50, 5), TUTTI_F32, NULL);
    tt_tensor *here = tt_index_add(sum, 0, index, source);
    tt_tensor *other =
        tt_index_add(tt_to_device(sum, device), 0, tt_to_device(index, device), tt_to_device(source, device));
    CHECK(tt_equal(tt_to_device(other, TUTTI_CPU), here)); /* the same bits */
    at[2999] = 50;
    tt_tensor *wrong = tt_to_device(tt_from(at, tt_shape(3000), TUTTI_I64, NULL), device);
    tt_index_add(tt_to_device(sum, device), 0, wrong, tt_to_device(source, device));
    FAILS(tt_synchronize(device), TUTTI_ERROR_RANGE, "index_add: index 50 at position 2999");
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}
