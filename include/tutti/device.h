/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices: where memory lies and where operators run. One number for both libraries, for meshes and for options.
 *
 *     tutti_device device;
 *     tutti_device_parse("cuda:1", &device);           // TUTTI_CUDA_AT(1)
 *     puts(tutti_device_name(device));                 // cuda:1
 *
 * 0 stands for the default wherever a device may be left open: the CPU.
 */
#ifndef TUTTI_DEVICE_H
#define TUTTI_DEVICE_H

#include <tutti/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A kind of device, and with it, from TUTTI_CUDA on, which one of them. */
typedef int tutti_device;

/* Values are written out and never reused. */
enum {
    TUTTI_CPU = 1,
    TUTTI_META = 2,    /* has shapes and no data: tensors on it cost nothing and compute nothing */
    TUTTI_CUDA = 0x100 /* the calling thread's current GPU; TUTTI_CUDA_AT names one */
};

/* The GPU of that number, from 0 to 254; tutti_device_at is the same as a function. */
#define TUTTI_CUDA_AT(index) (TUTTI_CUDA + 1 + (index))

/* The device of that number among those of a kind; a number below 0 stands for the current one. 0, which is no device,
 * for a kind or a number that does not exist. */
TUTTI_API tutti_device tutti_device_at(tutti_device kind, int index);

/* TUTTI_CPU, TUTTI_META or TUTTI_CUDA, whichever of the kind it is; 0 for a value that is no device. */
TUTTI_API tutti_device tutti_device_kind(tutti_device device);

/* Its number among those of its kind; -1 for the current one, for kinds of which there is only one, and for a value
 * that is no device. */
TUTTI_API int tutti_device_index(tutti_device device);

/* "cpu", "meta", "cuda", "cuda:1"; "default" for 0; "?" for a value that is no device. Never freed. */
TUTTI_API const char *tutti_device_name(tutti_device device);

/* From such a name, case ignored; "?" is none. TUTTI_ERROR_ARGUMENT lists what there is. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_device_parse(const char *name, tutti_device *device);

#ifdef __cplusplus
}
#endif
#endif
