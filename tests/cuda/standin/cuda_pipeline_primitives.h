/* SPDX-License-Identifier: Apache-2.0
 *
 * In place of CUDA's: what kernels use of it is in together_plain.cpp.
 */
