/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA driver as Tutti declares it (src/backend/cuda/driver.h), beside CUDA's own headers where there were some
 * when the tests were built.
 */
#include "../harness.h"
#include "header/compare.h"

TEST(what_tutti_declares_of_the_driver_is_what_cuda_h_declares) {
    const char *difference = NULL;
    int compared = 0;
#ifdef TEST_COMPARES
    compared = cuda_header_compare(&difference);
#endif
    if (compared == 0)
        SKIP("there was no cudaTypedefs.h of CUDA 13, or no C++ compiler, when this was built");
    if (difference != NULL)
        FAIL("%s", difference);
    CHECK(compared > 100);
}
