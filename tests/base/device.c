/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices: every number has one name, and every name leads back to its number.
 */
#include <tutti/device.h>

#include "../harness.h"

TEST(the_numbers_of_devices_stay_as_they_are) {
    CHECK_EQ(TUTTI_CPU, 1);
    CHECK_EQ(TUTTI_META, 2);
    CHECK_EQ(TUTTI_CUDA, 0x100);
    CHECK_EQ(TUTTI_CUDA_AT(0), 0x101);
    CHECK_EQ(TUTTI_CUDA_AT(254), 0x1ff);
}

TEST(a_name_and_its_number_lead_to_each_other) {
    int named = 0;
    for (tutti_device device = -3; device < 0x400; device++) {
        const char *name = tutti_device_name(device);
        tutti_device parsed = -1;
        if (tutti_device_kind(device) == 0 && device != 0) {
            CHECK_TEXT(name, "?");
            CHECK_EQ(tutti_device_index(device), -1);
            continue;
        }
        CHECK_OK(tutti_device_parse(name, &parsed));
        CHECK_EQ(parsed, device);
        if (device != 0)
            CHECK_EQ(tutti_device_at(tutti_device_kind(device), tutti_device_index(device)), device);
        named++;
    }
    CHECK_EQ(named, 1 + 2 + 256);
    CHECK_TEXT(tutti_device_name(TUTTI_CUDA_AT(0)), "cuda:0");
    CHECK_TEXT(tutti_device_name(TUTTI_CUDA_AT(10)), "cuda:10");
    CHECK_TEXT(tutti_device_name(TUTTI_CUDA_AT(99)), "cuda:99");
    CHECK_TEXT(tutti_device_name(TUTTI_CUDA_AT(100)), "cuda:100");
    CHECK_TEXT(tutti_device_name(TUTTI_CUDA_AT(254)), "cuda:254");
    CHECK_TEXT(tutti_device_name(0), "default");
}

TEST(parsing_ignores_case_and_refuses_what_is_no_device) {
    tutti_device device = 4711;
    CHECK_OK(tutti_device_parse("CUDA:7", &device));
    CHECK_EQ(device, TUTTI_CUDA_AT(7));
    const char *const wrong[] = { "",         "?",       "gpu",     "cuda:", "cuda:-1",
                                  "cuda:255", "cuda:01", "cuda: 1", "cpu:0", "cuda:1x" };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_STATUS(tutti_device_parse(wrong[i], &device), TUTTI_ERROR_ARGUMENT);
        CHECK(strstr(tutti_error_message(), "there are cpu, meta, cuda") != NULL);
        CHECK_EQ(device, TUTTI_CUDA_AT(7));
    }
    CHECK_STATUS(tutti_device_parse(NULL, &device), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_device_parse("cpu", NULL), TUTTI_ERROR_ARGUMENT);
}

TEST(a_device_that_does_not_exist_is_0) {
    CHECK_EQ(tutti_device_at(TUTTI_CUDA, -1), TUTTI_CUDA);
    CHECK_EQ(tutti_device_at(TUTTI_CUDA, 255), 0);
    CHECK_EQ(tutti_device_at(TUTTI_CPU, 0), TUTTI_CPU);
    CHECK_EQ(tutti_device_at(TUTTI_CPU, 1), 0);
    CHECK_EQ(tutti_device_at(TUTTI_CUDA_AT(1), 1), 0);
    CHECK_EQ(tutti_device_at(7, 0), 0);
}
