/* SPDX-License-Identifier: Apache-2.0
 *
 * The harness itself: what it promises about programs that are killed, and about crashes.
 */
#include "../harness.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define HANGS "TEST_HANGS" /* descriptor to which the hanging test writes who it is */

/* Runs only when the test below starts this program again: two processes that wait for ever. */
TEST_LIMIT(a_test_that_hangs_with_its_child, 600) {
    const char *descriptor = getenv(HANGS);
    if (descriptor == NULL)
        SKIP("a part of the next test");
    pid_t pids[2] = { getpid(), fork() };
    if (pids[1] != 0)
        CHECK(write(atoi(descriptor), pids, sizeof pids) == sizeof pids);
    for (;;)
        pause();
}

TEST(a_killed_program_takes_its_test_and_the_tests_children_along) {
    int told[2];
    CHECK_EQ(pipe(told), 0); /* without close-on-exec: handed to the program */
    fflush(NULL);
    pid_t program = fork();
    if (program == 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", told[1]);
        setenv(HANGS, number, 1);
        close(told[0]);
        execl("/proc/self/exe", "test", "a_test_that_hangs", NULL);
        _exit(127);
    }
    close(told[1]);
    pid_t pids[2];
    CHECK(read(told[0], pids, sizeof pids) == sizeof pids);
    kill(program, SIGKILL);
    /* All of them held the pipe's other end: the end of file is the last one's death. */
    char byte;
    CHECK_EQ(read(told[0], &byte, 1), 0);
    close(told[0]);
    /* This process is the subreaper: orphans become its children. */
    int ended = 0;
    for (pid_t got; (got = waitpid(-1, NULL, 0)) > 0 || errno == EINTR;)
        ended += got == program || got == pids[0] || got == pids[1];
    CHECK_EQ(ended, 3);
}

#define CRASHES "TEST_CRASHES" /* set for the crashing test */

/* Runs only when the test below starts this program again. */
TEST(a_test_that_crashes) {
    if (getenv(CRASHES) == NULL)
        SKIP("a part of the next test");
    char *page = mmap(NULL, 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    *(volatile char *)page = 1;
}

TEST(a_crash_says_where_it_happened_and_still_ends_the_test_by_its_signal) {
    if (test_sanitized())
        SKIP("the sanitizer tells of crashes in its own words");
    int told[2];
    CHECK_EQ(pipe(told), 0);
    fflush(NULL);
    pid_t program = fork();
    if (program == 0) {
        setenv(CRASHES, "1", 1);
        dup2(told[1], STDOUT_FILENO);
        dup2(told[1], STDERR_FILENO);
        close(told[0]);
        close(told[1]);
        execl("/proc/self/exe", "test", "a_test_that_crashes", NULL);
        _exit(127);
    }
    close(told[1]);
    char text[8192];
    size_t length = 0;
    for (ssize_t got; (got = read(told[0], text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)got;
    text[length] = '\0';
    close(told[0]);
    int status;
    CHECK(waitpid(program, &status, 0) == program && WIFEXITED(status) && WEXITSTATUS(status) == 1);
    CHECK(strstr(text, "crashed here:\n") != NULL && strstr(text, "test(+0x") != NULL);
    CHECK(strstr(text, "ended by signal 11") != NULL);
}
