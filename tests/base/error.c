/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <errno.h>
#include <pthread.h>

#include "../harness.h"

static void *look_from_another_thread(void *argument) {
    snprintf(argument, 64, "seen: '%s'", tutti_error_message());
    return NULL;
}

TEST(a_thread_sees_its_own_error_only) {
    tu_error(TUTTI_ERROR_RANGE, "rank %d must be in [0, %d)", 7, 4);
    CHECK_TEXT(tutti_error_message(), "rank 7 must be in [0, 4)");
    pthread_t other;
    char seen[64] = "";
    CHECK(pthread_create(&other, NULL, look_from_another_thread, seen) == 0);
    pthread_join(other, NULL);
    CHECK_TEXT(seen, "seen: ''");
}

TEST(the_old_message_may_be_an_argument_of_the_new_one) {
    tu_error(TUTTI_ERROR_RANGE, "inner");
    tu_error(TUTTI_ERROR_STATE, "outer: %s", tutti_error_message());
    CHECK_TEXT(tutti_error_message(), "outer: inner");
}

TEST(a_message_that_does_not_fit_ends_after_a_word_and_says_so) {
    char text[24];
    tu_error_shorten(text, sizeof text, "rank 2 died in a barrier"); /* 24 letters, and the zero byte */
    CHECK_TEXT(text, "rank 2 died in a …");
    tu_error_shorten(text, sizeof text, "rank 2 died in barrier"); /* fits */
    CHECK_TEXT(text, "rank 2 died in barrier");
    tu_error_shorten(text, sizeof text, "ääääääääääääääääääääää"); /* no word ends, but letters do */
    CHECK_TEXT(text, "äääääääää …");
    char word[] = "word ", longer[3 * TUTTI_ERROR_MESSAGE] = "";
    for (size_t at = 0; at + sizeof word < sizeof longer; at += sizeof word - 1)
        memcpy(longer + at, word, sizeof word);
    tu_error(TUTTI_ERROR_STATE, "%s", longer);
    size_t length = strlen(tutti_error_message());
    CHECK(length < TUTTI_ERROR_MESSAGE && length > TUTTI_ERROR_MESSAGE - 16);
    CHECK_TEXT(tutti_error_message() + length - strlen("word …"), "word …");
    for (int i = 0; i < 4; i++)
        tu_error_append(" and more");
    length = strlen(tutti_error_message());
    CHECK(length < TUTTI_ERROR_MESSAGE);
    CHECK_TEXT(tutti_error_message() + length - strlen("…"), "…");
}

TEST(a_system_error_keeps_its_number_and_chooses_its_status) {
    CHECK_STATUS(tu_error_system(ENOMEM, "mapping %d bytes", 3), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("mapping 3 bytes: Cannot allocate memory");
    CHECK_STATUS(tu_error_system(EMFILE, "opening"), TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("RLIMIT_NOFILE");
    CHECK_STATUS(tu_error_system(ECONNREFUSED, "connecting"), TUTTI_ERROR_NETWORK);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.system_error, ECONNREFUSED);
    CHECK_EQ(info.status, TUTTI_ERROR_NETWORK);
}

TEST(detail_is_cut_at_the_callers_size) {
    tu_error(TUTTI_ERROR_DEAD, "x");
    tu_error_where("0", "all_reduce", 17, 2);
    tu_error_at_fault(3);
    tu_error_at_fault(3);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    info.size = offsetof(tutti_error_info, sequence);
    info.sequence = 99;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.sequence, 99);
    CHECK_EQ(info.status, TUTTI_ERROR_DEAD);
    info.size = sizeof info;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.sequence, 17);
    CHECK_EQ(info.at_fault_count, 1);
    CHECK_EQ(info.at_fault[0], 3);
    CHECK_TEXT(info.operation, "all_reduce");
}

TEST(every_status_has_a_name_and_a_text) {
    for (int status = 0; status <= TUTTI_ERROR_FAULT; status++) {
        CHECK(tutti_status_name((tutti_status)status) != NULL);
        CHECK(tutti_status_text((tutti_status)status) != NULL);
    }
    CHECK_TEXT(tutti_status_name((tutti_status)999), "TUTTI_ERROR_?");
}

struct options {
    size_t size;
    int first, second;
};

TEST(options_of_size_zero_are_an_error_and_short_ones_keep_defaults) {
    struct options full = { sizeof full, 1, 2 }, given = { 0, 5, 6 };
    CHECK_STATUS(tu_options_copy("options", &given, &full, sizeof full), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("options.size is 0");
    given.size = offsetof(struct options, second);
    CHECK_OK(tu_options_copy("options", &given, &full, sizeof full));
    CHECK_EQ(full.first, 5);
    CHECK_EQ(full.second, 2);
    CHECK_OK(tu_options_copy("options", NULL, &full, sizeof full));
    CHECK_EQ(full.first, 5);
}

TEST(an_error_can_be_carried_to_another_thread) {
    tutti_error_copy copy;
    tu_error(TUTTI_ERROR_TIMEOUT, "late");
    tu_error_save(&copy);
    tutti_error_clear();
    CHECK_TEXT(tutti_error_message(), "");
    CHECK_STATUS(tu_error_restore(&copy), TUTTI_ERROR_TIMEOUT);
    CHECK_TEXT(tutti_error_message(), "late");
}

TEST(a_field_that_only_a_newer_header_has_is_an_error_when_it_is_set) {
    struct {
        struct options known;
        int newer[2];
    } given = { .known = { .size = sizeof given, .first = 5 } };
    struct options full = { sizeof full, 1, 2 };
    CHECK_OK(tu_options_copy("options", &given, &full, sizeof full));
    CHECK_EQ(full.size, sizeof full);
    CHECK_EQ(full.first, 5);
    given.newer[1] = 1;
    CHECK_STATUS(tu_options_copy("options", &given, &full, sizeof full), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("a field at byte");
}

TEST(a_program_sets_its_own_errors_and_puts_them_aside) {
    CHECK_STATUS(tutti_error_set(TUTTI_ERROR_RANGE, "no row 7: 100%"), TUTTI_ERROR_RANGE);
    CHECK_TEXT(tutti_error_message(), "no row 7: 100%");
    tutti_error_copy copy = TUTTI_ERROR_COPY_INIT;
    CHECK_OK(tutti_error_save(&copy));
    CHECK_STATUS(tutti_error_set(TUTTI_ERROR_STATE, NULL), TUTTI_ERROR_STATE);
    CHECK_TEXT(tutti_error_message(), "");
    CHECK_OK(tutti_error_set(TUTTI_OK, "nothing happened"));
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.status, TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_error_restore(&copy), TUTTI_ERROR_RANGE);
    CHECK_TEXT(tutti_error_message(), "no row 7: 100%");
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.status, TUTTI_ERROR_RANGE);
    CHECK_EQ(info.rank, -1);
    copy.size = 0;
    CHECK_STATUS(tutti_error_save(&copy), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_error_restore(NULL), TUTTI_ERROR_ARGUMENT);
}

TEST(zero_of_a_number_is_its_default_and_minus_zero_is_zero) {
    CHECK(tu_option_number(0, 0.9) == 0.9);
    CHECK(tu_option_number(TUTTI_ZERO, 0.9) == 0 && !signbit(tu_option_number(TUTTI_ZERO, 0.9)));
    CHECK(tu_option_number(0.5, 0.9) == 0.5);
}
