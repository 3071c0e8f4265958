/* SPDX-License-Identifier: Apache-2.0
 *
 * A job whose ranks are threads of one process: one page, mailboxes in memory, no sockets.
 */
#include "job.h"

static void exchange_numbers(tu_job *job, uint64_t key, uint64_t sequence) {
    int size = tu_job_size(job), all[16], ranks[16];
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    int mine = 100 * (int)sequence + tu_job_rank(job);
    tu_exchange exchange = { .ranks = ranks, .count = size, .me = tu_job_rank(job), .key = key, .sequence = sequence,
                             .purpose = "numbers", .payload = &mine, .bytes = sizeof mine, .deadline = tu_deadline(20 * TU_SECOND) };
    CHECK_OK(tu_job_exchange(job, &exchange, all, NULL));
    for (int i = 0; i < size; i++)
        CHECK_EQ(all[i], 100 * (int)sequence + i);
}

static void numbers(tu_job *job) {
    CHECK(tu_job_threads(job));
    for (uint64_t sequence = 1; sequence <= 50; sequence++)
        exchange_numbers(job, 7, sequence);
}

TEST(thread_ranks_exchange_numbers) {
    job_threads(4, numbers);
}
