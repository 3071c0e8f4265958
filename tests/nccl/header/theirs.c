/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL by its own header. That the functions are as Tutti declares them is found out by the compiler.
 */
#ifdef TEST_HAS_NCCL_H
#include <nccl.h>

#include "backend/nccl/library.h"
#endif
#include "nccl/header/numbers.h"

#if defined TEST_HAS_NCCL_H && NCCL_VERSION_CODE >= 22700
#define CHECK_TYPE(name)                                                                                       \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&(name)), __typeof__((tu_nccl_library){ 0 }.name)), \
                   #name " is declared otherwise in nccl.h");
#define CHECK_0(name) CHECK_TYPE(name)
#if NCCL_VERSION_CODE >= 22800
#define CHECK_22800(name) CHECK_IF_DECLARED_##name
#define CHECK_IF_DECLARED_ncclCommRevoke CHECK_TYPE(ncclCommRevoke)
#define CHECK_IF_DECLARED_ncclTeamLsa /* is in nccl_device.h, which is C++ */
#else
#define CHECK_22800(name)
#endif
#define CHECK_22900(name)
#define X(since, name, result, parameters) CHECK_##since(name)
TU_NCCL_FUNCTIONS(X)
#undef X

static const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;

unsigned their_nccl_magic(void) {
    return initial.magic;
}

const struct their_nccl their_nccl = { .version = NCCL_VERSION_CODE, .numbers = { NUMBERS(EACH_NUMBER) } };
#else
unsigned their_nccl_magic(void) {
    return 0;
}

const struct their_nccl their_nccl = { .version = 0 };
#endif
