/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything is in nvshmem.h.
 */
#include "nvshmem.h"
