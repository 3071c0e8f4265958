/* SPDX-License-Identifier: Apache-2.0
 * The kernels' images, as built by nvcc, in read-only memory, and a table of where they are. */
    .section .rodata
#define IMAGE(number, file) \
    .balign 64; \
image_##number: \
    .incbin file; \
    .byte 0
    IMAGE(0, TU_IMAGE_0)
    IMAGE(1, TU_IMAGE_1)
    IMAGE(2, TU_IMAGE_2)
    IMAGE(3, TU_IMAGE_3)
    IMAGE(4, TU_IMAGE_4)
    IMAGE(5, TU_IMAGE_5)
    IMAGE(6, TU_IMAGE_6)
    IMAGE(7, TU_IMAGE_7)
    IMAGE(8, TU_IMAGE_8)
    IMAGE(9, TU_IMAGE_9)
    IMAGE(10, TU_IMAGE_10)
    IMAGE(together, TU_IMAGE_TOGETHER)
    IMAGE(together_plain, TU_IMAGE_TOGETHER_PLAIN)
    .section .data.rel.ro, "aw"
    .balign 8
    .globl tu_gpu_images
    .hidden tu_gpu_images
tu_gpu_images:
    .quad image_0, image_1, image_2, image_3, image_4, image_5, image_6, image_7, image_8, image_9, image_10
    .globl tu_gpu_together_image
    .hidden tu_gpu_together_image
tu_gpu_together_image:
    .quad image_together
    .globl tu_gpu_together_plain_image
    .hidden tu_gpu_together_plain_image
tu_gpu_together_plain_image:
    .quad image_together_plain
    .section .note.GNU-stack, "", %progbits
