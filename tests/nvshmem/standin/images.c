/* SPDX-License-Identifier: Apache-2.0
 *
 * In place of the kernels' images: the stand-in of the driver has its own. So the plug-in's host side can be built and
 * tested without nvcc.
 */
extern const unsigned char tu_cuda_image[1], tu_nvshmem_image[1], tu_nvshmem_has_image[1];
__attribute__((visibility("hidden"))) const unsigned char tu_cuda_image[1] = { 0 };
__attribute__((visibility("hidden"))) const unsigned char tu_nvshmem_image[1] = { 0 };
__attribute__((visibility("hidden"))) const unsigned char tu_nvshmem_has_image[1] = { 1 };
