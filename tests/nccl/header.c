/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL as Tutti declares it, beside NCCL's own header where there was one when the tests were built.
 */
#include "../harness.h"
#include "header/numbers.h"
#include "library.h"

TEST(what_tutti_declares_of_nccl_is_what_nccl_h_declares) {
#define EACH_TEXT(expression) #expression,
    static const char *const texts[] = { NUMBERS(EACH_TEXT) };
    static const long long ours[] = { NUMBERS(EACH_NUMBER) };
    if (their_nccl.version == 0)
        SKIP("there was no nccl.h of 2.27 or newer, with CUDA's headers, when this was built");
    CHECK_EQ(their_nccl_magic(), TU_NCCL_CONFIG_MAGIC);
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        if (ours[i] != their_nccl.numbers[i])
            FAIL("%s is %lld in Tutti and %lld in nccl.h (%d)", texts[i], ours[i], their_nccl.numbers[i],
                 their_nccl.version);
}
