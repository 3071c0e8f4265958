/* SPDX-License-Identifier: Apache-2.0 */
#include "base/settings.h"

#include "../harness.h"

TEST(durations_are_understood_with_and_without_suffix) {
    static const struct {
        const char *text;
        int64_t nanoseconds;
    } cases[] = { { "300", 300000000000 },  { "300s", 300000000000 }, { "20ms", 20000000 },
                  { "0.5", 500000000 },     { "50us", 50000 },        { "7ns", 7 },
                  { "5min", 300000000000 }, { "1h", 3600000000000 } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t value = -1;
        CHECK_OK(tu_parse_duration(cases[i].text, &value));
        CHECK_EQ(value, cases[i].nanoseconds);
    }
    static const char *const bad[] = { "", "x", "-1", "3 s", "3fortnights", "1e400", "nan", "inf" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int64_t value = -1;
        CHECK_STATUS(tu_parse_duration(bad[i], &value), TUTTI_ERROR_ARGUMENT);
        CHECK_EQ(value, -1);
    }
}

TEST(sizes_are_understood_with_and_without_suffix) {
    static const struct {
        const char *text;
        int64_t bytes;
    } cases[] = { { "0", 0 },       { "64K", 65536 }, { "2M", 2097152 }, { "1G", 1073741824 },
                  { "1.5k", 1536 }, { "4KiB", 4096 }, { "8B", 8 } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t value = -1;
        CHECK_OK(tu_parse_bytes(cases[i].text, &value));
        CHECK_EQ(value, cases[i].bytes);
    }
    int64_t value;
    CHECK_STATUS(tu_parse_bytes("12X", &value), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tu_parse_bytes("K", &value), TUTTI_ERROR_ARGUMENT);
}

TEST(the_environment_wins_over_the_default_and_options_over_both) {
    tu_settings settings;
    setenv("TUTTI_TIMEOUT", "7s", 1);
    CHECK_OK(tu_settings_load(&settings));
    CHECK_EQ(tu_settings_number(&settings, TU_SETTING_TIMEOUT), 7000000000);
    CHECK_EQ(settings.value[TU_SETTING_TIMEOUT].origin, TU_FROM_ENVIRONMENT);
    CHECK_EQ(settings.value[TU_SETTING_LOG].origin, TU_FROM_DEFAULT);
    CHECK_OK(tu_settings_set(&settings, TU_SETTING_TIMEOUT, "9"));
    CHECK_EQ(tu_settings_number(&settings, TU_SETTING_TIMEOUT), 9000000000);
    CHECK_EQ(settings.value[TU_SETTING_TIMEOUT].origin, TU_FROM_OPTIONS);
    tu_settings_free(&settings);
}

TEST(a_value_that_does_not_parse_names_its_variable) {
    tu_settings settings;
    setenv("TUTTI_RANK", "two", 1);
    CHECK_STATUS(tu_settings_load(&settings), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_RANK");
    CHECK_MESSAGE("two");
}

static void remember(const char *name, const char *nearest, void *argument) {
    char *text = argument;
    snprintf(text, 128, "%s~%s", name, nearest);
}

TEST(an_unknown_variable_is_found_with_the_nearest_name) {
    char text[128] = "";
    setenv("TUTTI_TIMEOT", "1", 1);
    tu_settings_unknown(remember, text);
    CHECK_TEXT(text, "TUTTI_TIMEOT~TUTTI_TIMEOUT");
}

static tutti_status load_and_free(void *argument) {
    tu_settings settings;
    (void)argument;
    tutti_status status = tu_settings_load(&settings);
    if (status == TUTTI_OK)
        tu_settings_free(&settings);
    return status;
}

TEST(loading_survives_every_failed_allocation) {
    test_fail_each(NULL, load_and_free, NULL);
}

TEST(a_setting_that_takes_a_few_words_takes_no_other) {
    tu_settings settings;
    CHECK_OK(tu_settings_load(&settings));
    CHECK_STATUS(tu_settings_set(&settings, TU_SETTING_MULTICAST, "x"), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("auto, software, off");
    CHECK_OK(tu_settings_set(&settings, TU_SETTING_MULTICAST, "software"));
    tu_settings_free(&settings);
}
