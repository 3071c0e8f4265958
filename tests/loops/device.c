/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops that are written in CUDA C, on the device that TEST_DEVICE names: every form of them against calls one by one,
 * the compiler and the cache with what goes wrong there. With the stand-in driver NVRTC is a stand-in too, which builds
 * for the CPU; what is written is then also given to nvcc, where there is one.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>

#include "programs.h"
#include "tensor/process.h"

static bool is_standin(void) {
    return dlsym(RTLD_DEFAULT, "standin_fail") != NULL;
}

/* The stand-in fails in that function of the driver, the nth time from now; 0: never. */
static void fail_in(const char *function, int nth) {
    void (*standin_fail)(const char *, int);
    void *found = dlsym(RTLD_DEFAULT, "standin_fail");
    memcpy(&standin_fail, &found, sizeof found);
    standin_fail(function, nth);
}

static void begin(void) {
    if (!use_device())
        SKIP("TEST_DEVICE names no device");
    (void)dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

/* ---- forms ---- */

typedef struct form {
    const char *name;
    tt_compile_function *function;
    tt_dims shapes[2];
    tutti_dtype dtype;
    int layout; /* 0: dense; 1: turned; 2: begins at an odd place */
} form;

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_mul(tt_relu(tt_sub(tt_tanh(x), inputs.at[1])), tt_sigmoid(x));
    return 1;
}

static int soft_rows(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_add(inputs.at[0], inputs.at[1]);
    tt_tensor *shares = tt_exp(tt_sub(x, tt_amax(x, tt_shape(-1), true)));
    outputs[0] = tt_div(shares, tt_sum_dims(shares, tt_shape(-1), true));
    outputs[1] = tt_mean_dims(tt_square(x), tt_shape(-1), false);
    return 2;
}

static int folds(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_mul(inputs.at[0], inputs.at[1]), *small = tt_add_scalar(tt_mul_scalar(x, 1e-3), 1);
    outputs[0] = tt_sum_dims(x, tt_shape(-1), false);
    outputs[1] = tt_amin(x, tt_shape(-1), true);
    outputs[2] = tt_prod(small, tt_shape(-1), true);
    outputs[3] = tt_mul_scalar(x, 3);
    return 4;
}

static int whole(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_mean(tt_square(tt_sub(inputs.at[0], inputs.at[1])));
    return 1;
}

static int in_place(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_mul_scalar_(inputs.at[0], 0.5);
    tt_add_(inputs.at[0], tt_sigmoid(inputs.at[1]));
    outputs[0] = tt_to(tt_gt(inputs.at[0], tt_number(0)), TUTTI_I32);
    return 1;
}

#define BOTH(...) \
    { tt_shape(__VA_ARGS__), tt_shape(__VA_ARGS__) }

static tt_tensor *made(const form *how, int which) {
    tt_dims shape = how->shapes[which];
    tt_tensor *x = NULL;
    if (how->layout == 2) {
        tt_dims longer = shape;
        longer.at[shape.count - 1]++;
        x = tt_to(tt_randn(longer, TUTTI_F32, NULL), how->dtype);
        return tt_narrow(x, shape.count - 1, 1, shape.at[shape.count - 1]);
    }
    x = tt_to(tt_randn(shape, TUTTI_F32, NULL), how->dtype);
    return how->layout == 1 ? tt_transpose(tt_contiguous(tt_transpose(x, 0, -1)), 0, -1) : x;
}

static void compare(const form *how, const tu_program_options *options, bool compiled) {
    tt_scope scope = tt_scope_open();
    tt_tensor *inputs[2], *own[2], *expected[4], *results[4];
    tt_graph *graph = NULL;
    tu_program *program = NULL;
    tt_seed(7, 0);
    for (int i = 0; i < 2; i++) {
        inputs[i] = made(how, i);
        own[i] = tt_clone(inputs[i]);
    }
    if (how->layout == 2) { /* the same places */
        tt_seed(7, 0);
        for (int i = 0; i < 2; i++)
            own[i] = made(how, i);
    }
    CHECK(tt_capture(how->function, NULL, tt_tensors_of(2, inputs), &graph));
    CHECK_OK(tu_program_make(graph, options, &program));
    tu_program_counts counts = tu_program_count(program);
    if (compiled ? counts.loops == 0 || counts.compiled != counts.loops : counts.loops != 0)
        FAIL("%s has %d loops, %d of them compiled", how->name, counts.loops, counts.compiled);
    int count = how->function(tt_tensors_of(2, own), expected, NULL);
    run_program(program, graph, tt_tensors_of(2, inputs), results);
    for (int i = 0; i < count; i++)
        if (!same_bits(results[i], expected[i]))
            FAIL("%s: result %d differs", how->name, i);
    for (int i = 0; i < 2; i++)
        if (!same_bits(inputs[i], own[i]))
            FAIL("%s: input %d is left different", how->name, i);
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static const form *forms(int *count) {
    static form all[32];
    const form list[] = {
        { "a chain", chain, BOTH(4099), TUTTI_F32, 0 },
        { "a chain of bf16", chain, BOTH(33, 64), TUTTI_BF16, 0 },
        { "a chain of f16", chain, BOTH(1027), TUTTI_F16, 0 },
        { "a chain at odd places", chain, BOTH(4098), TUTTI_F32, 2 },
        { "a chain of bf16 with gaps", chain, BOTH(9, 65), TUTTI_BF16, 2 },
        { "a chain with a row", chain, { tt_shape(7, 5, 24), tt_shape(24) }, TUTTI_F32, 0 },
        { "a chain with a column", chain, { tt_shape(37, 24), tt_shape(37, 1) }, TUTTI_BF16, 0 },
        { "a turned chain", chain, BOTH(19, 8, 33), TUTTI_F32, 1 },
        { "a chain of f64", chain, BOTH(5, 1001), TUTTI_F64, 0 },
        { "a long chain of bf16", chain, BOTH((1 << 22) + 1027), TUTTI_BF16, 0 },
        { "a long chain with a row", chain, { tt_shape(2049, 2056), tt_shape(2056) }, TUTTI_F32, 0 },
        { "short rows", soft_rows, BOTH(11, 3), TUTTI_F32, 0 },
        { "rows", soft_rows, BOTH(5, 3, 1024), TUTTI_F32, 0 },
        { "rows of bf16", soft_rows, { tt_shape(6, 768), tt_shape(768) }, TUTTI_BF16, 0 },
        { "rows of f64", soft_rows, BOTH(4, 130), TUTTI_F64, 0 },
        { "rows of more than a block", soft_rows, BOTH(3, 1500), TUTTI_F32, 0 },
        { "rows that no register holds", soft_rows, BOTH(9, 8000), TUTTI_F32, 0 },
        { "rows with gaps", soft_rows, BOTH(5, 100), TUTTI_F32, 2 },
        { "folds", folds, BOTH(13, 257), TUTTI_F32, 0 },
        { "folds of long rows", folds, BOTH(3, 40000), TUTTI_F32, 0 },
        { "folds of long rows of f64", folds, BOTH(2, 33001), TUTTI_F64, 0 },
        { "one row", whole, BOTH(100001), TUTTI_F32, 0 },
        { "one row in parts", whole, BOTH(300, 1001), TUTTI_F32, 0 },
        { "one row of bf16 in parts", whole, BOTH(200000), TUTTI_BF16, 0 },
        { "writes in place", in_place, BOTH(21, 40), TUTTI_F32, 0 },
        { "writes in place, turned", in_place, BOTH(21, 40), TUTTI_BF16, 1 },
    };
    memcpy(all, list, sizeof list);
    *count = (int)(sizeof list / sizeof *list);
    return all;
}

TEST_LIMIT(every_form_of_loops_leaves_the_bits_of_calls, 600) {
    begin();
    const char *folder = own_folder();
    int count;
    const form *all = forms(&count);
    for (int i = 0; i < count; i++)
        compare(&all[i], &(tu_program_options){ .mode = TU_PROGRAM_FUSED }, true);
    remove_folder(folder);
}

/* ---- shorter forms of lines ---- */

/* The bytes of a text, and how many of its lines have a word. */
static size_t bytes_of(const char *path, const char *word, int *found) {
    char text[256];
    size_t bytes = 0;
    FILE *from = fopen(path, "r");
    CHECK(from != NULL);
    for (*found = 0; fgets(text, sizeof text, from) != NULL; bytes += strlen(text))
        *found += strstr(text, word) != NULL;
    fclose(from);
    return bytes;
}

/* Functions of numbers of bf16, and one whose result is not rounded; sums behind exact products, rounded in
 * between or not, which may be infinite; and products that are not exact. */
static int shortened(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *y = inputs.at[1], *wide = tt_to(x, TUTTI_F32);
    outputs[0] = tt_tanh(tt_add_scalar(tt_mul_scalar(x, 2), 1));
    outputs[1] = tt_add(tt_sigmoid(x), tt_to(tt_tanh(wide), TUTTI_BF16));
    outputs[2] = tt_add_scalar(tt_mul_scalar(y, 4), -0x1p64);
    outputs[3] = tt_add_scalar(tt_mul_scalar(y, 0.75), -0x1p127);
    outputs[4] = tt_add_scalar(tt_mul_scalar(y, 2), -0x1p127);
    outputs[5] = tt_add(tt_sigmoid(tt_mul_scalar(x, 8)), tt_tanh(tt_mul_scalar(x, 0.5)));
    outputs[6] = tt_tanh(wide);
    return 7;
}

TEST_LIMIT(shorter_forms_of_lines_have_the_bits_of_calls_for_every_number, 600) {
    begin();
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    uint16_t *narrow = calloc(65536, sizeof *narrow);
    float *wide = calloc(65536, sizeof *wide);
    CHECK(narrow != NULL && wide != NULL);
    for (uint32_t i = 0; i < 65536; i++) { /* every bf16, and f32 of every size */
        uint32_t bits = i << 16 | (i * 40503u & 0xffff);
        narrow[i] = (uint16_t)i;
        memcpy(&wide[i], &bits, sizeof bits);
    }
    tt_tensor *inputs[2] = { tt_from(narrow, tt_shape(65536), TUTTI_BF16, NULL),
                             tt_from(wide, tt_shape(65536), TUTTI_F32, NULL) };
    tt_graph *graph = NULL;
    tu_program *program = NULL;
    tt_tensor *expected[7], *results[7];
    CHECK(tt_capture(shortened, NULL, tt_tensors_of(2, inputs), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .folder = folder, .name = "short" }, &program));
    CHECK(tu_program_count(program).compiled > 0);
    char path[PATH_MAX + 16];
    int hyperbolic, logistic, sums;
    snprintf(path, sizeof path, "%s/short.cu", folder);
    CHECK(bytes_of(path, "tu_near_tanh(v", &hyperbolic) > 0 && bytes_of(path, "tu_near_sigmoid(v", &logistic) > 0 &&
          bytes_of(path, "tu_fma_f32(v", &sums) > 0);
    CHECK_EQ(hyperbolic, 3);
    CHECK_EQ(logistic, 2);
    CHECK_EQ(sums, 2);
    int count = shortened(tt_tensors_of(2, inputs), expected, NULL);
    run_program(program, graph, tt_tensors_of(2, inputs), results);
    for (int i = 0; i < count; i++)
        if (!same_bits(results[i], expected[i]))
            FAIL("result %d differs", i);
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    free(narrow);
    free(wide);
    remove_folder(folder);
}

/* ---- what is written ---- */

static int everything(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *y = inputs.at[1];
    tt_tensor *rows = tt_sub(x, tt_amax(x, tt_shape(-1), true));
    tt_tensor *shares = tt_exp(rows);
    outputs[0] = tt_div(shares, tt_sum_dims(shares, tt_shape(-1), true));
    outputs[1] = tt_to(tt_pow_scalar(tt_sin(tt_add(x, y)), 3), TUTTI_F16);
    outputs[2] = tt_to(tt_gt(x, y), TUTTI_I64);
    outputs[3] = tt_sum(tt_square(tt_to(y, TUTTI_F64)));
    outputs[4] = tt_mul(tt_tanh(x), tt_sigmoid(x));
    return 5;
}

TEST_LIMIT(what_is_written_for_gpus_is_cuda_c, 600) {
    begin();
    const char *folder = own_folder();
    if (system("nvcc --version >/dev/null 2>&1") != 0)
        SKIP("there is no nvcc");
    tt_scope scope = tt_scope_open();
    char command[3 * PATH_MAX];
    tt_graph *graph = NULL;
    tu_program *program = NULL;
    tt_tensor *x = tt_randn(tt_shape(4, 40000), TUTTI_BF16, NULL), *y = tt_randn(tt_shape(4, 40000), TUTTI_F32, NULL);
    CHECK(tt_capture(everything, NULL, tt_tensors(x, y), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .folder = folder, .name = "all" }, &program));
    snprintf(command, sizeof command,
             "nvcc -arch=sm_90 -std=c++17 -fmad=false -w --cubin -include cstdint -include cstring -o %s/all.cubin "
             "%s/all.cu",
             folder, folder);
    CHECK_EQ(system(command), 0);
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder(folder);
}

static int two_alike(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    for (int i = 0; i < 2; i++) /* a product between keeps them apart */
        x = tt_matmul(tt_relu(tt_add_scalar(x, 1)), inputs.at[1]);
    outputs[0] = x;
    return 1;
}

TEST_LIMIT(loops_that_are_alike_are_written_once, 600) {
    begin();
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    char path[PATH_MAX + 16];
    int kernels, shared;
    tt_graph *graph = NULL;
    tu_program *program = NULL;
    tt_tensor *x = tt_randn(tt_shape(16, 16), TUTTI_F32, NULL), *y = tt_clone(x), *results[2];
    CHECK(tt_capture(two_alike, NULL, tt_tensors(x, y), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .folder = folder, .name = "twice" }, &program));
    CHECK_EQ(tu_program_count(program).loops, 2);
    CHECK_EQ(tu_program_count(program).compiled, 2);
    snprintf(path, sizeof path, "%s/twice.cu", folder);
    CHECK(bytes_of(path, "LOOP(loop_", &kernels) > 0 && bytes_of(path, "/* Loop 2 is as loop 0", &shared) > 0);
    CHECK_EQ(kernels, 1);
    CHECK_EQ(shared, 1);
    run_program(program, graph, tt_tensors(x, y), results);
    two_alike(tt_tensors(x, y), results + 1, NULL);
    CHECK(same_bits(results[0], results[1]));
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder(folder);
}

/* ---- the compiler ---- */

static void compare_plain(bool compiled) {
    const form plain = { "a chain", chain, BOTH(1000), TUTTI_F32, 0 };
    compare(&plain, NULL, compiled);
}

TEST(without_nvrtc_operators_are_called_and_a_warning_says_so_once) {
    setenv("TUTTI_NVRTC", "/no/compiler", 1);
    begin();
    const char *folder = own_folder();
    compare_plain(false);
    CHECK(!tu_process_tell_once(TU_WARN_NO_KERNELS)); /* it was told */
    compare_plain(false);
    remove_folder(folder);
}

TEST(a_compiler_that_fails_is_no_reason_to_fail) {
    setenv("TEST_NVRTC_FAILS", "1", 1);
    begin();
    if (!is_standin())
        SKIP("NVRTC cannot be made to fail");
    const char *folder = own_folder();
    compare_plain(false);
    CHECK(!tu_process_tell_once(TU_WARN_NO_KERNELS));
    remove_folder(folder);
}

TEST(what_the_driver_refuses_is_no_reason_to_fail) {
    begin();
    if (!is_standin())
        SKIP("the driver cannot be made to fail");
    const char *folder = own_folder();
    fail_in("cuModuleLoadData", 1);
    compare_plain(false);
    fail_in("cuModuleGetFunction", 1);
    compare_plain(false);
    fail_in("", 0);
    compare_plain(true);
    remove_folder(folder);
}

TEST(a_launch_or_an_allocation_that_fails_is_an_error_and_the_next_run_is_good) {
    begin();
    if (!is_standin())
        SKIP("the driver cannot be made to fail");
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    tt_graph *graph = NULL;
    tu_program *program = NULL;
    tt_tensor *x = tt_randn(tt_shape(3, 40000), TUTTI_F32, NULL), *y = tt_clone(x);
    tt_tensor *inputs[2] = { NULL }, *results[4] = { NULL }, *expected[4];
    CHECK(tt_capture(folds, NULL, tt_tensors(x, y), &graph));
    CHECK_OK(tu_program_make(graph, NULL, &program));
    folds(tt_tensors(x, y), expected, NULL);
    CHECK_OK(tu_graph_gather("run", graph, tt_tensors(x, y), inputs));
    for (int nth = 1; nth <= 2; nth++) { /* long rows have two kernels */
        fail_in("cuLaunchKernel", nth);
        CHECK(tu_program_run(program, inputs, results) != TUTTI_OK);
    }
    fail_in("", 0);
    for (int i = 0; i < graph->input_count; i++)
        tu_tensor_drop(inputs[i]);
    run_program(program, graph, tt_tensors(x, y), results);
    for (int i = 0; i < 4; i++)
        CHECK(same_bits(results[i], expected[i]));
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder(folder);
}

/* ---- the cache ---- */

static int count_images(const char *folder, char *last, size_t size) {
    char path[PATH_MAX + 16];
    int count = 0;
    snprintf(path, sizeof path, "%s/tutti", folder);
    DIR *all = opendir(path);
    for (const struct dirent *entry; all != NULL && (entry = readdir(all)) != NULL;)
        if (strstr(entry->d_name, ".cubin") != NULL) {
            snprintf(last, size, "%s/%s", path, entry->d_name);
            count++;
        }
    if (all != NULL)
        closedir(all);
    return count;
}

/* In a process of its own, which has loaded nothing yet. */
static void run_apart(bool compiler) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (!compiler)
            setenv("TEST_NVRTC_FAILS", "1", 1);
        begin();
        compare_plain(true);
        _exit(0);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

TEST(what_was_built_serves_other_processes_and_a_damaged_file_is_built_anew) {
    if (getenv("TEST_DEVICE") == NULL)
        SKIP("TEST_DEVICE names no device");
    if (strstr(getenv("LD_LIBRARY_PATH") != NULL ? getenv("LD_LIBRARY_PATH") : "", "standin") == NULL)
        SKIP("the compiler cannot be made to fail");
    const char *folder = own_folder();
    char path[2 * PATH_MAX];
    run_apart(true);
    CHECK_EQ(count_images(folder, path, sizeof path), 1);
    run_apart(false); /* the compiler would fail */
    for (int way = 0; way < 3; way++) {
        struct stat about;
        CHECK_EQ(stat(path, &about), 0);
        int file = open(path, O_RDWR);
        CHECK(file >= 0);
        if (way == 0)
            CHECK_EQ(ftruncate(file, about.st_size / 2), 0);
        else if (way == 1)
            CHECK_EQ(pwrite(file, "x", 1, about.st_size / 2), 1);
        else
            CHECK_EQ(ftruncate(file, 0), 0);
        close(file);
        run_apart(true);
        run_apart(false);
        CHECK_EQ(count_images(folder, path, sizeof path), 1);
    }
    remove_folder(folder);
}

TEST(processes_that_need_the_same_image_at_once_all_get_it) {
    if (getenv("TEST_DEVICE") == NULL)
        SKIP("TEST_DEVICE names no device");
    const char *folder = own_folder();
    char path[2 * PATH_MAX];
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            begin();
            compare_plain(true);
            _exit(0);
        }
    }
    for (int i = 0; i < 4; i++) {
        int status = -1;
        CHECK_EQ(waitpid(children[i], &status, 0), children[i]);
        CHECK_EQ(status, 0);
    }
    CHECK_EQ(count_images(folder, path, sizeof path), 1);
    remove_folder(folder);
}

TEST(without_a_folder_for_the_cache_loops_are_built_all_the_same) {
    begin();
    setenv("XDG_CACHE_HOME", "/dev/null", 1);
    compare_plain(true);
    CHECK(!tu_process_tell_once(TU_WARN_NO_CACHE));
}
