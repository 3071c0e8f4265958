/* SPDX-License-Identifier: Apache-2.0
 * The kernels' image, as built by nvcc, in read-only memory. */
    .section .rodata
    .balign 64
    .globl tu_cuda_image
    .hidden tu_cuda_image
tu_cuda_image:
    .incbin TU_CUDA_IMAGE_FILE
    .byte 0
    .section .note.GNU-stack, "", %progbits
