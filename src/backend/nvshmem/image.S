/* SPDX-License-Identifier: Apache-2.0
 * The kernels that use NVSHMEM's device functions, linked with its device library, in read-only memory. */
    .section .rodata
    .globl tu_nvshmem_has_image
    .hidden tu_nvshmem_has_image
    .globl tu_nvshmem_image
    .hidden tu_nvshmem_image
tu_nvshmem_has_image:
    .byte TU_NVSHMEM_HAS_IMAGE
    .balign 64
tu_nvshmem_image:
#if TU_NVSHMEM_HAS_IMAGE
    .incbin TU_NVSHMEM_IMAGE_FILE
#endif
    .byte 0
    .section .note.GNU-stack, "", %progbits
