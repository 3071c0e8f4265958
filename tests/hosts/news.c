/* SPDX-License-Identifier: Apache-2.0
 *
 * The page on which a launcher tells its ranks of ranks on other hosts.
 */
#include "hosts/news.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"

#define KILLED 9          /* a wait status */
#define STATUS_3 (3 << 8) /* another */

static const char *const hosts[] = { "alpha", "beta" };

/* Ranks 0 and 1 on alpha, 2 to 4 on beta; the launcher is alpha's. */
static tu_news *make(int64_t silence_ns, int *descriptor) {
    tu_news *news;
    tu_news_plan plan = { .nodes = 2, .node = 0, .ranks = (int[]){ 2, 3 }, .silence_ns = silence_ns, .hosts = hosts };
    CHECK_OK(tu_news_create(&plan, &news, descriptor));
    return news;
}

/* As a rank finds it: another open file, for reading. */
static int open_again(int descriptor) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    int again = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(again >= 0);
    return again;
}

TEST(a_rank_reads_what_the_launcher_tells) {
    int written, read;
    tu_news *launcher = make(3600 * TU_SECOND, &written), *rank;
    read = open_again(written);
    CHECK_OK(tu_news_open(read, 1, 5, &rank));
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(tu_news_of(rank, i), TU_NEWS_RUNS);
        CHECK_EQ(tu_news_node(rank, i), i >= 2);
    }
    CHECK_EQ(tu_news_departures(rank), 0);
    tu_news_rank_ended(launcher, 2, 4711, KILLED);
    tu_news_rank_ended(launcher, 3, 4712, STATUS_3);
    tu_news_rank_ended(launcher, 3, 9999, 0); /* once told, it stays */
    tu_news_rank_ended(launcher, 1, 4710, 0);
    tu_news_node_lost(launcher, 1, "the connection broke");
    CHECK_EQ(tu_news_departures(rank), 4);
    CHECK_EQ(tu_news_of(rank, 0), TU_NEWS_RUNS);
    CHECK_EQ(tu_news_of(rank, 1), TU_NEWS_ENDED);
    CHECK_EQ(tu_news_of(rank, 2), TU_NEWS_DEAD);
    CHECK_EQ(tu_news_of(rank, 3), TU_NEWS_DEAD);
    CHECK_EQ(tu_news_of(rank, 4), TU_NEWS_LOST);
    char text[256];
    tu_news_text(rank, 2, text, sizeof text);
    CHECK_TEXT(text, "rank 2 on beta (pid 4711) was killed by signal 9 (Killed)");
    tu_news_text(rank, 3, text, sizeof text);
    CHECK_TEXT(text, "rank 3 on beta (pid 4712) exited with status 3");
    tu_news_text(rank, 4, text, sizeof text);
    CHECK_TEXT(text, "rank 4 on beta is lost with its host: the connection broke");
    tu_news_close(rank);
    tu_news_close(launcher);
    close(read);
    close(written);
}

TEST(nobody_but_the_launcher_can_write) {
    int written;
    tu_news *launcher = make(TU_SECOND, &written);
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, written, 0) == MAP_FAILED);
    CHECK(write(written, "x", 1) < 0);
    CHECK(ftruncate(written, 0) != 0);
    tu_news_close(launcher);
    close(written);
}

TEST(a_silent_launcher_means_that_other_hosts_are_lost) {
    int written;
    tu_news *launcher = make(800 * TU_MILLISECOND, &written);
    usleep(1000000);
    CHECK_EQ(tu_news_of(launcher, 2),
             TU_NEWS_RUNS); /* this process may have stood still as long: the first look is not it */
    while (tu_news_of(launcher, 2) == TU_NEWS_RUNS)
        usleep(1000);
    CHECK_EQ(tu_news_of(launcher, 0), TU_NEWS_RUNS); /* of this host: not the launcher's business alone */
    CHECK_EQ(tu_news_of(launcher, 2), TU_NEWS_LOST);
    char text[320];
    tu_news_text(launcher, 2, text, sizeof text);
    CHECK(strstr(text, "the launcher of this host (alpha) has been silent for") != NULL);
    tu_news_close(launcher);
    close(written);
}

TEST(what_is_no_page_of_this_job_is_refused) {
    int written;
    tu_news *launcher = make(TU_SECOND, &written), *rank;
    CHECK_STATUS(tu_news_open(-1, 0, 5, &rank), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_NEWS_FD");
    CHECK_STATUS(tu_news_open(written, 0, 4, &rank), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("another number of ranks");
    CHECK_STATUS(tu_news_open(written, 2, 5, &rank), TUTTI_ERROR_ARGUMENT); /* a rank of the other host */
    CHECK_MESSAGE("table of ranks");
    int other = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(other, 65536) == 0);
    CHECK_STATUS(tu_news_open(other, 0, 5, &rank), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("no sealed page");
    CHECK(fcntl(other, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | 0x10 | F_SEAL_SEAL) == 0);
    CHECK_STATUS(tu_news_open(other, 0, 5, &rank), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("another version");
    tu_news_close(launcher);
    close(other);
    close(written);
}
