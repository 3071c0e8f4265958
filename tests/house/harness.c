/* SPDX-License-Identifier: Apache-2.0
 *
 * The harness itself: what it promises about programs that are killed.
 */
#include "../harness.h"

#include <errno.h>
#include <signal.h>
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
