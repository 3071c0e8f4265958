/* SPDX-License-Identifier: Apache-2.0
 *
 * What header.c asks of compare.cpp.
 */
#ifndef TESTS_CUDA_HEADER_COMPARE_H
#define TESTS_CUDA_HEADER_COMPARE_H

#ifdef __cplusplus
extern "C" {
#endif

/* How many declarations were compared; the first that differs, in words, or NULL. 0: CUDA's headers were not there. */
int cuda_header_compare(const char **difference);

#ifdef __cplusplus
}
#endif
#endif
