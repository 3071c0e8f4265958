/* SPDX-License-Identifier: Apache-2.0 */
#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/instructions.h"

#define EXIT_SKIP 77

/* ---- the list of tests ---- */

static test_case *tests, **tests_end = &tests;

void test_register(test_case *test) {
    *tests_end = test;
    tests_end = &test->next;
}

/* ---- ending ---- */

_Noreturn void test_failed(const char *file, int line, const char *format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "    %s:%d: %s\n", file, line, text);
    fflush(NULL);
    _exit(1);
}

_Noreturn void test_skip(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "    skipped: %s\n", text);
    fflush(NULL);
    _exit(EXIT_SKIP);
}

bool test_sanitized(void) {
#ifdef TUTTI_SANITIZED
    return true;
#else
    return false;
#endif
}

/* ---- leaks ---- */

int test_count_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL)
        FAIL("cannot read /proc/self/fd: %s", strerror(errno));
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count - 3; /* ".", ".." and the folder itself */
}

int test_count_mappings(void) {
    int count = 0;
    char line[1024];
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL)
        FAIL("cannot read /proc/self/maps: %s", strerror(errno));
    while (fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "/memfd:tutti") != NULL;
    fclose(maps);
    return count;
}

static void list_descriptors(void) {
    char path[64], target[256];
    for (int fd = 3; fd < 1024; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length > 0)
            fprintf(stderr, "      %d -> %.*s\n", fd, (int)length, target);
    }
}

static bool has_children(void) {
    siginfo_t info = { 0 };
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

/* ---- crashes ---- */

/* Prints where it happened, as offsets that `addr2line -e` of the same build reads. The signal comes again when the
 * handler returns, and ends the process as if nobody had looked. */
static void tell_crash(int number, siginfo_t *about, void *context) {
    static const char text[] = "    crashed here:\n";
    void *calls[64];
    (void)context;
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    backtrace_symbols_fd(calls, backtrace(calls, 64), STDERR_FILENO);
    if (about->si_code <= 0) /* somebody sent it */
        raise(number);
}

/* The first call loads what walks the stack, which a handler must not. */
static void prepare_for_crashes(void) {
    void *call;
    backtrace(&call, 1);
}

static void watch_crashes(void) {
    struct sigaction action = { .sa_sigaction = tell_crash, .sa_flags = SA_SIGINFO | SA_RESETHAND | SA_NODEFER };
    if (test_sanitized()) /* it tells more */
        return;
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGFPE, &action, NULL);
}

/* ---- running one test ---- */

static int run_body(const test_case *test) {
    /* So that stray processes of a test end up here and are seen. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    int descriptors = test_count_descriptors();
    test->body();
    int result = 0;
    const char *device = getenv("TEST_DEVICE"); /* a GPU's driver keeps descriptors and threads of its own */
    if ((device == NULL || device[0] == 0) && test_count_descriptors() != descriptors) {
        fprintf(stderr, "    left %d descriptors behind:\n", test_count_descriptors() - descriptors);
        list_descriptors();
        result = 1;
    }
    if (test_count_mappings() != 0) {
        fprintf(stderr, "    left %d mappings of Tutti's memory behind\n", test_count_mappings());
        result = 1;
    }
    if (has_children()) {
        fprintf(stderr, "    left child processes behind\n");
        result = 1;
    }
    return result;
}

static double seconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

#define MOST_PATIENCE 20 /* who waits for a test's ranks does so for a minute at least */

/* How many times longer everything may take, since others want the processors too. */
static double patience(void) {
    double load = 0, processors = (double)sysconf(_SC_NPROCESSORS_ONLN);
    if (getloadavg(&load, 1) != 1 || load < processors)
        return 1;
    return load > MOST_PATIENCE * processors ? MOST_PATIENCE : load / processors;
}

/* How many want a processor now, this one not counted: the most of several looks. */
static int runnable_now(void) {
    int most = 0;
    for (int look = 0; look < 8; look++) {
        int running = 0;
        FILE *file = fopen("/proc/loadavg", "re");
        if (file != NULL && fscanf(file, "%*s %*s %*s %d/", &running) == 1 && running - 1 > most)
            most = running - 1;
        if (file != NULL)
            fclose(file);
        usleep(2000);
    }
    return most;
}

/* Of the test that runs, for all of its processes: 0, nobody has asked yet. */
static _Atomic int64_t *moment;

static void forget_moment(void) {
    void *shared = moment;
    if (shared == NULL)
        shared = mmap(NULL, sizeof *moment, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    moment = shared;
    atomic_store(moment, 0);
}

/* By what wants the processors now: the load is an average of a minute, of which a test with many ranks that has just
 * ended is a part. It counts for a quarter, since it also knows who waits for a disk. */
int64_t test_moment(void) {
    int64_t known = atomic_load(moment);
    if (known != 0)
        return known;
    double times = runnable_now() / (double)sysconf(_SC_NPROCESSORS_ONLN);
    times = times < 1 ? 1 : times;
    times = patience() / 4 > times ? patience() / 4 : times;
    times *= test_sanitized() ? 3 : 1;
    int64_t mine = (int64_t)(1e9 * (times < MOST_PATIENCE ? times : MOST_PATIENCE));
    return atomic_compare_exchange_strong(moment, &known, mine) ? mine : known;
}

/* The letter in /proc/PID/stat: R, S, T (stopped), Z (zombie) …; 0 when there is no such process. */
static char state_of(pid_t process) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = 0;
    const char *after = strrchr(text, ')'); /* the name before it may contain anything */
    return after != NULL && after[1] == ' ' ? after[2] : 0;
}

void test_await_stopped(pid_t process) {
    for (char state = state_of(process); state != 'T' && state != 'Z' && state != 0; state = state_of(process))
        usleep(1000);
}

/* Its first thread may be a zombie while another, which holds what others look at, has still to be run to its end: only
 * the descriptor of the process waits for all of them. */
void test_await_end(pid_t process) {
    int descriptor = (int)syscall(SYS_pidfd_open, process, 0);
    if (descriptor >= 0) {
        while (poll(&(struct pollfd){ .fd = descriptor, .events = POLLIN }, 1, -1) < 0 && errno == EINTR)
            ;
        close(descriptor);
    }
    for (char state; (state = state_of(process)) != 0 && state != 'Z' && state != 'X';)
        usleep(1000);
}

/* Waits for the test's process; kills its whole process group at the limit, which is the time on a machine that does
 * nothing else. Returns its exit code, 128 + signal, or -1. */
static int await(pid_t child, double limit) {
    double begin = seconds_now();
    useconds_t pause = 200;
    for (;;) {
        int status;
        pid_t got = waitpid(child, &status, WNOHANG);
        if (got == child) {
            kill(-child, SIGKILL); /* strays */
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        double spent = seconds_now() - begin;
        if (spent > limit && spent > limit * patience()) {
            kill(-child, SIGKILL);
            waitpid(child, &status, 0);
            return -1;
        }
        usleep(pause);
        if (pause < 5000)
            pause *= 2;
    }
}

/* ---- when this process is killed ---- */

/* A process that ends when this one does, by whatever death, and then kills the group of the test that runs. It learns
 * the group through a pipe; a test closes the other end before it begins, so that an end of file is this process's
 * death. */
static int guardian = -1;
static pid_t guardian_pid;

static _Noreturn void guard(int from) {
    pid_t group = 0, next;
    setpgid(0, 0); /* what kills the program's own group leaves this process */
    prctl(PR_SET_NAME, "test-guardian");
    while (read(from, &next, sizeof next) == sizeof next)
        group = next;
    if (group > 0)
        kill(-group, SIGKILL);
    _exit(0);
}

static void start_guardian(void) {
    int pipe[2];
    if (pipe2(pipe, O_CLOEXEC) != 0) {
        perror("pipe2");
        exit(1);
    }
    guardian_pid = fork();
    if (guardian_pid == 0) {
        close(pipe[1]);
        guard(pipe[0]);
    }
    close(pipe[0]);
    guardian = pipe[1];
}

static void end_guardian(void) {
    close(guardian);
    waitpid(guardian_pid, NULL, 0);
}

/* 0: no test runs. */
static void tell_guardian(pid_t group) {
    if (write(guardian, &group, sizeof group) != sizeof group)
        perror("test: the guardian");
}

static int run_test(const test_case *test) {
    double limit = test->limit_seconds > 0 ? test->limit_seconds : 60;
    if (test_sanitized())
        limit *= 3;
    forget_moment();
    fflush(NULL);
    double start = seconds_now();
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 1;
    }
    if (child == 0) {
        setpgid(0, 0);
        tell_guardian(getpid()); /* here, so that there is no moment in which it does not know */
        close(guardian);
        watch_crashes();
        exit(run_body(test)); /* exit, not _exit: LeakSanitizer reports there */
    }
    setpgid(child, child);
    int code = await(child, limit);
    tell_guardian(0);
    const char *word = code == 0 ? "ok" : code == EXIT_SKIP ? "skipped" : "FAILED";
    printf("%-7s %s (%.2f s)", word, test->name, seconds_now() - start);
    if (code < 0)
        printf(": ran past its limit of %.0f s", limit);
    else if (code > 128)
        printf(": ended by signal %d (%s)", code - 128, strsignal(code - 128));
    printf("\n");
    return code;
}

/* The numeric tests run once per instruction set; those that the machine lacks are skipped. */
static bool machine_lacks(const char *name) {
    for (tu_instructions level = TU_REFERENCE; name != NULL && level < TU_INSTRUCTIONS_END; level++)
        if (strcmp(name, tu_instructions_name(level)) == 0)
            return !tu_instructions_present(level);
    return false;
}

/* ---- arguments ---- */

static char **option_at; /* main's argv: --name value */
static int option_count;

const char *test_option(const char *name) {
    for (int i = 1; i + 1 < option_count; i++)
        if (strncmp(option_at[i], "--", 2) == 0 && strcmp(option_at[i] + 2, name) == 0)
            return option_at[i + 1];
    return NULL;
}

/* The part of a name, "" for none. */
static const char *read_arguments(int argc, char **argv, bool *list) {
    const char *part = "";
    option_at = argv;
    option_count = argc;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--list") == 0)
            *list = true;
        else if (strncmp(argv[i], "--", 2) == 0)
            i++; /* its value */
        else
            part = argv[i];
    }
    return part;
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, skipped = 0;
    bool list = false;
    const char *part = read_arguments(argc, argv, &list), *without = test_option("without");
    if (!list && machine_lacks(getenv("TUTTI_ISA"))) {
        printf("skipped: this machine has no %s\n", getenv("TUTTI_ISA"));
        return EXIT_SKIP;
    }
    if (!list) {
        prepare_for_crashes();
        start_guardian();
    }
    for (test_case *test = tests; test != NULL; test = test->next) {
        if (list) {
            printf("%s\n", test->name);
            continue;
        }
        if (strstr(test->name, part) == NULL || (without != NULL && strstr(test->name, without) != NULL))
            continue;
#ifdef __SANITIZE_THREAD__
        if (strstr(test->name, "_as_processes") != NULL)
            continue; /* ThreadSanitizer sees nothing across processes; their threaded twin ran */
#endif
        int code = run_test(test);
        passed += code == 0;
        skipped += code == EXIT_SKIP;
        failed += code != 0 && code != EXIT_SKIP;
    }
    if (list)
        return 0;
    end_guardian();
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0 ? 1 : passed == 0 ? EXIT_SKIP : 0;
}

/* ---- an ordinary user ---- */

void test_as_ordinary_user(void (*body)(void)) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (geteuid() == 0 && (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0))
            FAIL("cannot become an ordinary user: %s", strerror(errno));
        prctl(PR_SET_DUMPABLE, 1); /* setuid cleared it; /proc/self would belong to root */
        body();
        exit(0);
    }
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIP)
        _exit(EXIT_SKIP);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("failed as an ordinary user");
}

/* ---- failing on purpose: every wrapped function asks should_fail() first ---- */

static _Atomic long countdown; /* 0: disarmed */
static _Atomic bool delivered;
static _Atomic bool deadly;        /* kill instead of failing */
static _Atomic bool only_here;     /* count the calls of the thread that armed alone */
static _Thread_local bool is_here; /* this thread armed */
static char armed[512];            /* ",malloc,mmap," or "" for all; written while disarmed */

void test_fail_arm(const char *functions, long nth) {
    atomic_store(&countdown, 0);
    armed[0] = '\0';
    if (functions != NULL)
        snprintf(armed, sizeof armed, ",%s,", functions);
    atomic_store(&delivered, false);
    atomic_store(&deadly, false);
    atomic_store(&only_here, false);
    atomic_store(&countdown, nth);
}

void test_fail_arm_here(const char *functions, long nth) {
    test_fail_arm(functions, 0);
    is_here = true;
    atomic_store(&only_here, true);
    atomic_store(&countdown, nth);
}

void test_kill_arm(const char *functions, long nth) {
    test_fail_arm(functions, 0);
    atomic_store(&deadly, true);
    atomic_store(&countdown, nth);
}

bool test_fail_disarm(void) {
    atomic_store(&countdown, 0);
    is_here = false;
    return atomic_load(&delivered);
}

static bool should_fail(const char *function) {
    if (atomic_load_explicit(&countdown, memory_order_relaxed) <= 0)
        return false;
    if (atomic_load(&only_here) && !is_here)
        return false;
    if (armed[0] != 0) {
        char name[64];
        snprintf(name, sizeof name, ",%s,", function);
        if (strstr(armed, name) == NULL)
            return false;
    }
    if (atomic_fetch_sub(&countdown, 1) != 1)
        return false;
    if (atomic_load(&deadly))
        kill(getpid(), SIGKILL);
    atomic_store(&delivered, true);
    return true;
}

void test_fail_each(const char *functions, tutti_status (*body)(void *), void *argument) {
    for (long nth = 1; nth < 100000; nth++) {
        int descriptors = test_count_descriptors(), mappings = test_count_mappings();
        tutti_error_clear();
        test_fail_arm(functions, nth);
        tutti_status status = body(argument);
        bool failed = test_fail_disarm();
        if (status != TUTTI_OK && !failed)
            FAIL("failed by itself: %s", tutti_error_message());
        if (status != TUTTI_OK && tutti_error_message()[0] == 0)
            FAIL("failing call number %ld gave %s without a message", nth, tutti_status_name(status));
        if (test_count_descriptors() != descriptors)
            FAIL("failing call number %ld left %d descriptors (%s)", nth, test_count_descriptors() - descriptors,
                 tutti_error_message());
        if (test_count_mappings() != mappings)
            FAIL("failing call number %ld left %d mappings (%s)", nth, test_count_mappings() - mappings,
                 tutti_error_message());
        if (!failed)
            return;
    }
    FAIL("still failing after 100000 rounds");
}

#define WRAP(result, name, parameters, arguments, error, failure) \
    result __real_##name parameters;                              \
    result __wrap_##name parameters;                              \
    result __wrap_##name parameters {                             \
        if (should_fail(#name)) {                                 \
            errno = error;                                        \
            return failure;                                       \
        }                                                         \
        return __real_##name arguments;                           \
    }

WRAP(void *, malloc, (size_t bytes), (bytes), ENOMEM, NULL)
WRAP(void *, calloc, (size_t count, size_t bytes), (count, bytes), ENOMEM, NULL)
WRAP(void *, realloc, (void *old, size_t bytes), (old, bytes), ENOMEM, NULL)
WRAP(void *, aligned_alloc, (size_t alignment, size_t bytes), (alignment, bytes), ENOMEM, NULL)
WRAP(int, posix_memalign, (void **out, size_t alignment, size_t bytes), (out, alignment, bytes), ENOMEM, ENOMEM)
WRAP(char *, strdup, (const char *text), (text), ENOMEM, NULL)
/* An emulator keeps something for every page of a mapping, used or not: there one mapping has a limit. */
static bool too_large(size_t bytes) {
#ifdef TEST_LARGEST_MAPPING
    return bytes > TEST_LARGEST_MAPPING;
#else
    (void)bytes;
    return false;
#endif
}

void *__real_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (too_large(bytes) || should_fail("mmap")) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return __real_mmap(address, bytes, protection, flags, fd, offset);
}
WRAP(int, memfd_create, (const char *name, unsigned flags), (name, flags), EMFILE, -1)
WRAP(int, ftruncate, (int fd, off_t bytes), (fd, bytes), ENOSPC, -1)
WRAP(int, fallocate, (int fd, int mode, off_t offset, off_t bytes), (fd, mode, offset, bytes), ENOSPC, -1)
WRAP(int, socket, (int family, int type, int protocol), (family, type, protocol), EMFILE, -1)
WRAP(int, socketpair, (int family, int type, int protocol, int pair[2]), (family, type, protocol, pair), EMFILE, -1)
WRAP(int, bind, (int fd, const struct sockaddr *address, socklen_t bytes), (fd, address, bytes), EADDRINUSE, -1)
WRAP(int, listen, (int fd, int backlog), (fd, backlog), EADDRINUSE, -1)
WRAP(int, connect, (int fd, const struct sockaddr *address, socklen_t bytes), (fd, address, bytes), ECONNREFUSED, -1)
WRAP(int, accept4, (int fd, struct sockaddr *address, socklen_t *bytes, int flags), (fd, address, bytes, flags), EMFILE,
     -1)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags), ENOBUFS, -1)
WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags), ECONNRESET, -1)
WRAP(int, epoll_create1, (int flags), (flags), EMFILE, -1)
WRAP(int, epoll_ctl, (int epoll, int operation, int fd, struct epoll_event *event), (epoll, operation, fd, event),
     ENOMEM, -1)
WRAP(int, eventfd, (unsigned value, int flags), (value, flags), EMFILE, -1)
WRAP(int, pipe2, (int fds[2], int flags), (fds, flags), EMFILE, -1)
WRAP(int, pthread_create,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument),
     (thread, attributes, start, argument), EAGAIN, EAGAIN)
