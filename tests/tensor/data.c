/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens from files, and the line that tells how far it is.
 */
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <tutti/data.h>

#include "../harness.h"

static char path[64];

/* A file whose token i is i, after a header of 3 bytes. */
static void write_tokens(int count) {
    snprintf(path, sizeof path, "/tmp/tutti-tokens-XXXXXX");
    int descriptor = mkstemp(path);
    CHECK(descriptor >= 0);
    CHECK_EQ(write(descriptor, "abc", 3), 3);
    for (int i = 0; i < count; i++)
        CHECK_EQ(write(descriptor, &(uint16_t){ (uint16_t)i }, 2), 2);
    close(descriptor);
}

static tt_tokens *open_rank(int rank, int ranks, uint64_t seed, bool in_order) {
    return tt_tokens_open(path, TUTTI_OPTIONS(tt_tokens_options, .header_bytes = 3, .length = 5, .batch = 2,
                                              .seed = seed, .in_order = in_order, .rank = rank, .rank_count = ranks));
}

/* The first token of each row, after a check of the rest. */
static void firsts(const tt_tokens *tokens, int64_t step, int64_t out[2]) {
    int64_t inputs_read[10], targets_read[10];
    tt_tensor *inputs, *targets;
    tt_scope scope = tt_scope_open();
    CHECK(tt_tokens_batch(tokens, step, &inputs, &targets));
    CHECK(tt_size(inputs, 0) == 2 && tt_size(inputs, 1) == 5 && tt_dtype(inputs) == TUTTI_I64);
    CHECK(tt_read(inputs, inputs_read, TUTTI_I64, 10) && tt_read(targets, targets_read, TUTTI_I64, 10));
    for (int i = 0; i < 10; i++)
        CHECK(inputs_read[i] == inputs_read[i / 5 * 5] + i % 5 && targets_read[i] == inputs_read[i] + 1);
    out[0] = inputs_read[0];
    out[1] = inputs_read[5];
    CHECK_OK(tt_scope_close(&scope));
}

TEST(an_epoch_has_every_row_once_over_all_ranks_and_in_another_order_than_the_next) {
    write_tokens(5 * 60 + 1);
    int different = 0, seen[2][60] = { 0 }, order[2][60], at[2] = { 0, 0 };
    tt_tokens *ranks[3];
    for (int i = 0; i < 3; i++)
        ranks[i] = open_rank(i, 3, 7, false);
    CHECK_EQ(tt_tokens_count(ranks[0]), 301);
    CHECK_EQ(tt_tokens_batches(ranks[0]), 10);
    for (int64_t step = 0; step < 20; step++)
        for (int i = 0; i < 3; i++) {
            int64_t rows[2];
            int epoch = (int)(step / 10);
            firsts(ranks[i], step, rows);
            for (int j = 0; j < 2; j++) {
                CHECK_EQ(rows[j] % 5, 0);
                CHECK_EQ(seen[epoch][rows[j] / 5]++, 0);
                order[epoch][at[epoch]++] = (int)rows[j] / 5;
            }
        }
    CHECK(at[0] == 60 && at[1] == 60);
    for (int i = 0; i < 60; i++)
        different += order[0][i] != order[1][i];
    CHECK(different > 40);
    for (int i = 0; i < 3; i++)
        tt_tokens_close(ranks[i]);
    unlink(path);
}

TEST(the_order_is_a_function_of_the_seed) {
    write_tokens(5 * 40 + 4);
    tt_tokens *one = open_rank(0, 1, 7, false), *same = open_rank(0, 1, 7, false), *other = open_rank(0, 1, 8, false);
    tt_tokens *plain = open_rank(0, 1, 7, true);
    int different = 0;
    for (int64_t step = 0; step < 20; step++) {
        int64_t a[2], b[2], c[2], d[2];
        firsts(one, step, a);
        firsts(same, step, b);
        firsts(other, step, c);
        firsts(plain, step, d);
        CHECK(a[0] == b[0] && a[1] == b[1]);
        CHECK(d[0] == step * 10 && d[1] == step * 10 + 5);
        different += a[0] != c[0];
    }
    CHECK(different > 12);
    tt_tokens_close(one);
    tt_tokens_close(same);
    tt_tokens_close(other);
    tt_tokens_close(plain);
    unlink(path);
}

static void refused(const tt_tokens_options *options, tutti_status status, const char *message) {
    CHECK(tt_tokens_open(path, options) == NULL);
    CHECK_EQ(tt_error_show(), status);
    CHECK_MESSAGE(message);
    tt_error_clear();
}

TEST(files_and_options_that_cannot_be_are_refused) {
    write_tokens(100);
    refused(NULL, TUTTI_ERROR_ARGUMENT, "no whole number of tokens");
    refused(TUTTI_OPTIONS(tt_tokens_options, .header_bytes = 3), TUTTI_ERROR_ARGUMENT, "100 tokens, too few");
    refused(TUTTI_OPTIONS(tt_tokens_options, .header_bytes = 300), TUTTI_ERROR_ARGUMENT, "no whole number");
    refused(TUTTI_OPTIONS(tt_tokens_options, .dtype = TUTTI_F32), TUTTI_ERROR_TYPE, "integer type");
    refused(TUTTI_OPTIONS(tt_tokens_options, .rank = 1), TUTTI_ERROR_ARGUMENT, "no rank 1 of 1");
    refused(TUTTI_OPTIONS(tt_tokens_options, .length = -1), TUTTI_ERROR_ARGUMENT, "must not be negative");
    unlink(path);
    refused(NULL, TUTTI_ERROR_NOT_FOUND, path);
    snprintf(path, sizeof path, "/");
    CHECK(tt_tokens_open(path, NULL) == NULL);
    tt_error_clear();
    tt_tensor *inputs, *targets;
    CHECK(!tt_tokens_batch(NULL, 0, &inputs, &targets));
    CHECK(inputs == NULL && targets == NULL);
    tt_error_clear();
    tt_tokens_close(NULL);
}

static tutti_status open_and_read(__attribute__((unused)) void *argument) {
    tt_scope scope = tt_scope_open();
    tt_tensor *inputs, *targets;
    tt_tokens *tokens = open_rank(0, 1, 0, false);
    tt_tokens_batch(tokens, 0, &inputs, &targets);
    tt_tokens_close(tokens);
    return tt_scope_close(&scope);
}

TEST(a_file_that_cannot_be_mapped_leaves_nothing_behind) {
    write_tokens(100);
    test_fail_each("calloc,mmap", open_and_read, NULL);
    unlink(path);
}

/* ---- progress ---- */

static void make_steps(FILE *file) {
    tt_progress *progress = tt_progress_new(TUTTI_OPTIONS(tt_progress_options, .steps = 10, .done = 4, .file = file));
    CHECK(progress != NULL);
    for (int i = 0; i < 6; i++)
        tt_progress_step(progress, 2.5 - 0.25 * i, 1000);
    tt_progress_end(progress);
}

TEST(progress_is_one_line_where_there_is_no_terminal) {
    char text[512] = "";
    FILE *file = tmpfile();
    CHECK(file != NULL);
    make_steps(file);
    rewind(file);
    size_t length = fread(text, 1, sizeof text - 1, file);
    text[length] = 0;
    CHECK(strncmp(text, "step 10/10  loss 1.2500  ", 25) == 0);
    CHECK(strstr(text, " tokens/s  in 0:0") != NULL);
    CHECK(strchr(text, '\n') == text + length - 1 && strchr(text, '\r') == NULL);
    fclose(file);
    CHECK(tt_progress_new(TUTTI_OPTIONS(tt_progress_options, .steps = -1)) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_progress_step(NULL, 0, 0);
    tt_progress_end(NULL);
}

TEST(progress_writes_over_its_line_on_a_terminal) {
    char text[4096] = "";
    int keyboard = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (keyboard < 0 || grantpt(keyboard) != 0 || unlockpt(keyboard) != 0)
        SKIP("there are no pseudo terminals here");
    int screen = open(ptsname(keyboard), O_RDWR | O_NOCTTY | O_CLOEXEC);
    CHECK(screen >= 0);
    FILE *file = fdopen(screen, "w");
    CHECK(file != NULL);
    make_steps(file);
    /* the kernel hands a terminal's output over piece by piece, in its own time */
    for (size_t length = 0; strstr(text, "step 10/10  loss 1.2500  ") == NULL;) {
        struct pollfd ready = { .fd = keyboard, .events = POLLIN };
        CHECK(poll(&ready, 1, 10000) == 1);
        ssize_t more = read(keyboard, text + length, sizeof text - 1 - length);
        CHECK(more > 0);
        length += (size_t)more;
    }
    CHECK(strstr(text, "\r\033[Kstep 5/10  loss 2.5000  ") == text); /* the first step is always shown */
    CHECK(strstr(text, " left\r\033[K") != NULL);
    fclose(file);
    close(keyboard);
}
