/* SPDX-License-Identifier: Apache-2.0
 *
 * The BLAS and oneDNN under the limit of TUTTI_ISA.
 */
#ifndef TU_TENSOR_KERNEL_LIBRARIES_H
#define TU_TENSOR_KERNEL_LIBRARIES_H

/* Called before each use of one of them; does its work once. OpenBLAS with DYNAMIC_ARCH and oneDNN are limited to the
 * process's level where somebody asked for one; a BLAS built for one processor cannot be. */
void tu_libraries_limit(void);

#endif
