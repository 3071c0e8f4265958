/* SPDX-License-Identifier: Apache-2.0
 *
 * The compiler and its cache: what is built once is found again, and whatever is wrong with them, a program computes
 * what it should, without them if need be.
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "programs.h"

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *x = inputs.at[0], *up = tt_add_scalar(tt_mul_scalar(x, 2), *(double *)user);
    outputs[0] = tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(up), x)), tt_sigmoid(x)), 0.5);
    return 1;
}

/* Makes the program of a chain with this number in it, runs it, compares, and tells whether it was compiled. */
static bool is_compiled(double number) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_mul_scalar(tt_arange(-500, 500, 1, TUTTI_F32, NULL), 0.01), *expected, *results[1];
    tt_graph *graph;
    tu_program *program;
    CHECK(tt_capture(chain, &number, tt_tensors(x), &graph));
    CHECK_OK(tu_program_make(graph, NULL, &program));
    chain(tt_tensors(x), &expected, &number);
    run_program(program, graph, tt_tensors(x), results);
    CHECK(same_bits(results[0], expected));
    tu_program_counts counts = tu_program_count(program);
    CHECK_EQ(counts.loops, 1);
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    return counts.compiled == 1;
}

static void write_file(const char *path, const char *text, mode_t mode) {
    FILE *to = fopen(path, "w");
    CHECK(to != NULL && fputs(text, to) >= 0 && fclose(to) == 0 && chmod(path, mode) == 0);
}

/* A compiler that notes each of its calls in a file, and then does these lines of shell. */
static const char *note_compiler(const char *folder, const char *lines) {
    static char path[PATH_MAX + 64];
    char text[PATH_MAX + 512];
    snprintf(path, sizeof path, "%s/compiler", folder);
    snprintf(text, sizeof text, "#!/bin/sh\necho called >>'%s/calls'\n%s\n", folder, lines);
    write_file(path, text, 0700);
    setenv("TUTTI_CC", path, 1);
    return path;
}

static int calls(const char *folder) {
    char path[PATH_MAX + 64], line[64];
    int count = 0;
    snprintf(path, sizeof path, "%s/calls", folder);
    FILE *from = fopen(path, "r");
    while (from != NULL && fgets(line, sizeof line, from) != NULL)
        count++;
    if (from != NULL)
        fclose(from);
    return count;
}

/* Does something with each finished file of the cache; returns how many there are. */
static int each_object(const char *folder, void (*what)(const char *path)) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/tutti", folder);
    DIR *from = opendir(path);
    int count = 0;
    for (struct dirent *entry = from != NULL ? readdir(from) : NULL; entry != NULL; entry = readdir(from)) {
        CHECK(strncmp(entry->d_name, "making", 6) != 0); /* nothing half made is left */
        size_t length = strlen(entry->d_name);
        if (length < 3 || strcmp(entry->d_name + length - 3, ".so") != 0)
            continue;
        snprintf(path, sizeof path, "%s/tutti/%s", folder, entry->d_name);
        count++;
        if (what != NULL)
            what(path);
    }
    if (from != NULL)
        closedir(from);
    return count;
}

static bool has_compiler(void) {
    return system("cc --version >/dev/null 2>&1") == 0;
}

/* ---- found again ---- */

TEST(what_was_built_once_is_found_again) {
    const char *folder = own_folder();
    if (!has_compiler())
        SKIP("there is no cc");
    note_compiler(folder, "exec cc \"$@\"");
    CHECK(is_compiled(1) && is_compiled(1));
    CHECK_EQ(calls(folder), 1);
    CHECK(is_compiled(1.5)); /* another text */
    CHECK_EQ(calls(folder), 2);
    CHECK_EQ(each_object(folder, NULL), 2);
    remove_folder(folder);
}

TEST(a_compiler_that_was_replaced_builds_anew) {
    const char *folder = own_folder();
    if (!has_compiler())
        SKIP("there is no cc");
    note_compiler(folder, "exec cc \"$@\"");
    CHECK(is_compiled(1));
    note_compiler(folder, "exec cc \"$@\" # another");
    CHECK(is_compiled(1));
    CHECK_EQ(calls(folder), 2);
    remove_folder(folder);
}

static void flip(const char *path) {
    int file = open(path, O_RDWR | O_CLOEXEC);
    char byte;
    CHECK(file >= 0 && pread(file, &byte, 1, 5000) == 1);
    byte ^= 0x10;
    CHECK(pwrite(file, &byte, 1, 5000) == 1 && close(file) == 0);
}

static void cut(const char *path) {
    CHECK_EQ(truncate(path, 4000), 0);
}

static void empty(const char *path) {
    CHECK_EQ(truncate(path, 0), 0);
}

static void open_to_others(const char *path) {
    CHECK_EQ(chmod(path, 0666), 0);
}

TEST(files_that_are_not_whole_or_not_ours_are_built_anew) {
    void (*const damages[])(const char *) = { flip, cut, empty, open_to_others };
    const char *folder = own_folder();
    if (!has_compiler())
        SKIP("there is no cc");
    note_compiler(folder, "exec cc \"$@\"");
    CHECK(is_compiled(1));
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(each_object(folder, damages[i]), 1);
        CHECK(is_compiled(1));
        CHECK_EQ(calls(folder), 2 + i);
    }
    remove_folder(folder);
}

/* ---- without a compiler ---- */

TEST(without_a_compiler_loops_run_in_blocks_and_one_warning_says_so) {
    const char *folder = own_folder();
    char path[PATH_MAX + 64], text[4096] = "";
    snprintf(path, sizeof path, "%s/log", folder);
    int before = dup(2), to = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(before >= 0 && to >= 0 && dup2(to, 2) == 2);
    setenv("TUTTI_CC", "/nonexistent/cc", 1);
    bool first = is_compiled(1), second = is_compiled(2);
    CHECK(dup2(before, 2) == 2);
    CHECK(!first && !second);
    CHECK(pread(to, text, sizeof text - 1, 0) > 0);
    const char *found = strstr(text, "there is no compiler /nonexistent/cc (TUTTI_CC names one)");
    if (found == NULL || strstr(found + 1, "there is no compiler") != NULL)
        FAIL("the log is: %s", text);
    close(to);
    close(before);
    remove_folder(folder);
}

TEST(a_compiler_that_fails_or_makes_nonsense_is_done_without) {
    const char *folder = own_folder();
    setenv("TUTTI_CC", "/bin/false", 1);
    CHECK(!is_compiled(1));
    note_compiler(folder, "echo 'loop.c:1: error: no' >&2; exit 1");
    CHECK(!is_compiled(1));
    note_compiler(folder, "while [ \"$1\" != -o ]; do shift; done; echo nonsense >\"$2\"");
    CHECK(!is_compiled(1));
    note_compiler(folder, "exit 0 # and makes nothing");
    CHECK(!is_compiled(1));
    note_compiler(folder, "kill -9 $$");
    CHECK(!is_compiled(1));
    remove_folder(folder);
}

/* Some only say that they are GCC, and lack the parts of its headers that loops read. */
TEST(a_compiler_that_fails_is_asked_once_more_with_all_intrinsics) {
    const char *folder = own_folder();
    note_compiler(folder, "case \"$*\" in *-DTU_ALL_INTRINSICS*) exec cc \"$@\";; esac\nexit 1");
    CHECK(is_compiled(1));
    CHECK_EQ(calls(folder), 2);
    CHECK(is_compiled(1)); /* and what it made is kept */
    CHECK_EQ(calls(folder), 2);
    remove_folder(folder);
}

TEST(a_compiler_that_fails_is_named_with_its_variable) {
    const char *folder = own_folder();
    char path[PATH_MAX + 64], text[4096] = "";
    snprintf(path, sizeof path, "%s/log", folder);
    int before = dup(2), to = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(before >= 0 && to >= 0 && dup2(to, 2) == 2);
    setenv("TUTTI_CC", "/bin/false", 1);
    bool compiled = is_compiled(1);
    CHECK(dup2(before, 2) == 2 && !compiled);
    CHECK(pread(to, text, sizeof text - 1, 0) > 0);
    if (strstr(text, "the compiler /bin/false (TUTTI_CC names another) failed with status 1") == NULL)
        FAIL("the log is: %s", text);
    close(to);
    close(before);
    remove_folder(folder);
}

TEST(a_compiler_that_hangs_is_ended_with_all_that_it_started) {
    const char *folder = own_folder();
    note_compiler(folder, "trap '' TERM\nsleep 1000 &\nwhile :; do sleep 1000; done");
    setenv("TUTTI_CC_LIMIT", "200ms", 1);
    CHECK(!is_compiled(1));
    CHECK_EQ(calls(folder), 1);
    while (waitpid(-1, NULL, 0) > 0) /* its children come to this process, and have ended */
        continue;
    remove_folder(folder);
}

TEST(a_compiler_that_never_stops_talking_cannot_fill_memory) {
    const char *folder = own_folder();
    note_compiler(folder, "yes 'error: and so on' >&2"); /* ends where nothing more is taken */
    setenv("TUTTI_CC_LIMIT", "600s", 1);                 /* far beyond the test's own limit */
    CHECK(!is_compiled(1));
    remove_folder(folder);
}

TEST(where_nobody_learns_how_children_end_the_compiler_is_done_without) {
    const char *folder = own_folder();
    signal(SIGCHLD, SIG_IGN);
    CHECK(!is_compiled(1));
    signal(SIGCHLD, SIG_DFL);
    remove_folder(folder);
}

/* ---- a folder that cannot be used ---- */

TEST(a_folder_that_others_can_write_is_not_used) {
    const char *folder = own_folder();
    char path[PATH_MAX + 64], other[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/tutti", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    CHECK(mkdir(path, 0700) == 0 && chmod(path, 0777) == 0);
    CHECK(!is_compiled(1));
    CHECK_EQ(rmdir(path), 0);
    CHECK(mkdir(other, 0700) == 0 && symlink(other, path) == 0);
    CHECK(!is_compiled(1));
    CHECK_EQ(unlink(path), 0);
    write_file(path, "no folder", 0600);
    CHECK(!is_compiled(1));
    CHECK_EQ(unlink(path), 0);
    if (geteuid() == 0) {
        CHECK(mkdir(path, 0700) == 0 && chown(path, 65534, 65534) == 0);
        CHECK(!is_compiled(1));
    }
    remove_folder(folder);
}

TEST(where_there_is_no_place_for_the_cache_loops_run_in_blocks) {
    const char *folder = own_folder();
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    CHECK(!is_compiled(1));
    setenv("HOME", "/proc/nonexistent", 1);
    CHECK(!is_compiled(1));
    remove_folder(folder);
}

/* Whether it is compiled where files may have so many bytes. What is logged goes nowhere: the log may be a file too,
 * which is larger already. */
static bool is_compiled_within(rlim_t bytes) {
    struct rlimit limit;
    int log = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    CHECK(log >= 0 && nowhere >= 0 && getrlimit(RLIMIT_FSIZE, &limit) == 0);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = bytes;
    CHECK_EQ(dup2(nowhere, STDERR_FILENO), STDERR_FILENO);
    bool limited = setrlimit(RLIMIT_FSIZE, &limit) == 0, compiled = is_compiled(1);
    limit.rlim_cur = before;
    bool unlimited = setrlimit(RLIMIT_FSIZE, &limit) == 0;
    CHECK_EQ(dup2(log, STDERR_FILENO), STDERR_FILENO);
    close(log);
    close(nowhere);
    CHECK(limited && unlimited);
    return compiled;
}

TEST(a_disk_that_is_full_is_no_end_of_the_process) {
    const char *folder = own_folder();
    CHECK(!is_compiled_within(2000)); /* not even the headers fit */
    note_compiler(folder, "while [ \"$1\" != -o ]; do shift; done; dd if=/dev/zero of=\"$2\" bs=1000 count=1000");
    CHECK(!is_compiled_within(100000)); /* the headers do, and what is compiled does not */
    CHECK_EQ(each_object(folder, NULL), 0);
    remove_folder(folder);
}

/* ---- several at once ---- */

static void *make_one(void *argument) {
    (void)argument;
    return is_compiled(1) ? (void *)1 : NULL;
}

TEST_LIMIT(of_several_threads_one_builds_and_the_others_wait, 300) {
    const char *folder = own_folder();
    if (!has_compiler())
        SKIP("there is no cc");
    note_compiler(folder, "exec cc \"$@\"");
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, make_one, NULL), 0);
    for (int i = 0; i < 4; i++) {
        void *compiled;
        CHECK_EQ(pthread_join(threads[i], &compiled), 0);
        CHECK(compiled != NULL);
    }
    CHECK_EQ(calls(folder), 1);
    remove_folder(folder);
}

TEST_LIMIT(of_several_processes_one_builds_and_the_others_wait, 300) {
    const char *folder = own_folder();
    if (!has_compiler())
        SKIP("there is no cc");
    note_compiler(folder, "exec cc \"$@\"");
    pid_t children[3];
    for (int i = 0; i < 3; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0)
            _exit(is_compiled(1) ? 0 : 1);
    }
    for (int i = 0; i < 3; i++) {
        int status = 0;
        CHECK(waitpid(children[i], &status, 0) == children[i] && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK_EQ(calls(folder), 1);
    remove_folder(folder);
}

/* ---- not too much ---- */

static int64_t bytes_of_one;

static void make_old(const char *path) {
    struct stat about;
    CHECK(stat(path, &about) == 0);
    bytes_of_one = (int64_t)about.st_size;
    struct timespec times[2] = { about.st_mtim, about.st_mtim };
    times[0].tv_sec = times[1].tv_sec -= 2 * 86400;
    CHECK_EQ(utimensat(AT_FDCWD, path, times, 0), 0);
}

TEST(what_was_not_used_for_longest_goes_when_there_is_too_much) {
    const char *folder = own_folder();
    char half_made[PATH_MAX + 64], limit[32];
    if (!has_compiler())
        SKIP("there is no cc");
    note_compiler(folder, "exec cc \"$@\"");
    CHECK(is_compiled(1) && is_compiled(2));
    CHECK_EQ(each_object(folder, make_old), 2);
    int64_t object_bytes = bytes_of_one;
    CHECK(is_compiled(1)); /* a use */
    snprintf(half_made, sizeof half_made, "%s/tutti/making-1-of-somebody-who-was-killed.so", folder);
    write_file(half_made, "half", 0600);
    make_old(half_made);
    snprintf(limit, sizeof limit, "%lld", (long long)(2 * object_bytes + object_bytes / 2));
    setenv("TUTTI_CC_CACHE", limit, 1);
    CHECK(is_compiled(3));
    CHECK_EQ(each_object(folder, NULL), 2); /* without the second, and nothing half made */
    CHECK_EQ(calls(folder), 3);
    CHECK(is_compiled(1) && is_compiled(3));
    CHECK_EQ(calls(folder), 3);
    setenv("TUTTI_CC_CACHE", "nonsense", 1); /* as if it were not set */
    CHECK(is_compiled(2));
    CHECK_EQ(calls(folder), 4);
    CHECK_EQ(each_object(folder, NULL), 3);
    unsetenv("TUTTI_CC_CACHE");
    remove_folder(folder);
}

/* ---- what is shown ---- */

static char *read_file(const char *folder, const char *name) {
    static char text[1 << 16];
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *from = fopen(path, "r");
    CHECK(from != NULL);
    size_t bytes = fread(text, 1, sizeof text - 1, from);
    fclose(from);
    text[bytes] = 0;
    return text;
}

TEST(loops_and_code_can_be_read_in_a_folder) {
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    double number = 1;
    tt_tensor *x = tt_arange(0, 1000, 1, TUTTI_F32, NULL);
    tt_graph *graph;
    tu_program *program;
    CHECK(tt_capture(chain, &number, tt_tensors(x), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .folder = folder, .name = "chain" }, &program));
    CHECK(strstr(read_file(folder, "chain.loops"), "= tanh(") != NULL);
    const char *code = read_file(folder, "chain.c");
    CHECK(strstr(code, "add_scalar_1 = add_scalar(mul(relu(sub(tanh(add_scalar(mul_scalar(") != NULL);
    CHECK(strstr(code, "return TANH(x);") != NULL);
    tu_program_release(program);
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .folder = "/proc/nonexistent" }, &program)); /* a warning */
    tu_program_release(program);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder(folder);
}
