/* SPDX-License-Identifier: Apache-2.0
 *
 * What programs share that are about a device other than the CPU from their first test to their last.
 */
#ifndef TUTTI_TESTS_TENSOR_DEVICE_ALONE_H
#define TUTTI_TESTS_TENSOR_DEVICE_ALONE_H

#include "device.h"

/* The device, or a skip. */
static inline tutti_device there(void) {
    tutti_device device = test_device();
    if (device == TUTTI_CPU)
        SKIP("TEST_DEVICE names no other device");
    return device;
}

static inline tt_options *on(tt_options *options, tutti_device device) {
    *options = (tt_options)TT_OPTIONS_INIT;
    options->device = device;
    return options;
}

#define FAILS(call, status, text)                                                                              \
    do {                                                                                                       \
        (void)(call);                                                                                          \
        CHECK(tt_error_show() == (status));                                                                    \
        if (strstr(tutti_error_message(), text) == NULL)                                                       \
            FAIL("the message is \"%s\" and should have \"%s\"", tutti_error_message(), (const char *)(text)); \
        tt_error_clear();                                                                                      \
    } while (0)

#endif
