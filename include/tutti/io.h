/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors in files.
 *
 *     tt_save_safetensors(tt_tensors(weight, bias), (const char *[]){ "weight", "bias" }, "model.safetensors");
 *     tt_named_list model = tt_load_safetensors("model.safetensors");
 *     tt_tensor *weight = tt_named(model, "weight");
 *
 * FORMATS
 *
 * .npy is one tensor. Written as version 1.0; versions 1 to 3 are read, either byte order, C or Fortran order.
 *
 * .npz is a zip archive of .npy files, stored and with checksums. An entry that is compressed is an error. Large
 * archives (4 GiB, 65535 entries) get zip's 64-bit fields.
 *
 * safetensors has every dtype but c128. Tensors are placed by element size, so that each is aligned; names keep their
 * order.
 *
 *                    f64 f32 f16 bf16 f8_e4m3 f8_e5m2 i8..i64 u8..u64 bool c64 c128
 *     .npy, .npz      x   x   x    -      -       -       x      x     x    x   x
 *     safetensors     x   x   x    x      x       x       x      x     x    x   -
 *
 * WRITING is all or nothing: the file is written under another name in the same folder, brought to the disk and
 * renamed. A full disk, a signal, an error leave what was there before; only the death of the process can leave the
 * other name (".tutti-…") behind. A link is followed; a file's permissions are kept. Any strides can be saved; what is
 * written is row-major.
 *
 * READING believes nothing: every length is held against the file before memory is taken for it. Damage is
 * TUTTI_ERROR_PROTOCOL, an element type without a dtype TUTTI_ERROR_TYPE, what could be read but is not (compression,
 * more than TT_MAX_DIMS dimensions) TUTTI_ERROR_UNSUPPORTED. Checksums of .npz entries are verified.
 *
 * OWNERSHIP. Tensors, names and metadata that a load returns belong to the innermost scope and go with it.
 */
#ifndef TUTTI_IO_H
#define TUTTI_IO_H

#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes x as NumPy's .npy. bf16 and f8 have no NumPy type and are refused; use safetensors. */
TUTTI_API bool tt_save_npy(tt_tensor *x, const char *path);
/* The tensor of a .npy file. */
TUTTI_API tt_tensor *tt_load_npy(const char *path);

/* Writes a .npz, stored without compression: names[i] is the name of tensor i. */
TUTTI_API bool tt_save_npz(tt_tensor_list tensors, const char *const *names, const char *path);
/* What a .npz file holds; tt_named finds one of them. */
TUTTI_API tt_named_list tt_load_npz(const char *path);

/* Writes a safetensors file: names[i] is the name of tensor i. */
TUTTI_API bool tt_save_safetensors(tt_tensor_list tensors, const char *const *names, const char *path);
/* What a safetensors file holds; tt_named finds one of them. */
TUTTI_API tt_named_list tt_load_safetensors(const char *path);

/* Texts that a safetensors file carries beside its tensors. Keys differ; all is UTF-8. */
typedef struct tt_metadata {
    size_t count;
    const char *const *keys;
    const char *const *values;
} tt_metadata;

/* tt_save_safetensors with metadata. */
TUTTI_API bool tt_save_safetensors_with(tt_tensor_list tensors, const char *const *names, tt_metadata metadata,
                                        const char *path);
/* The metadata alone; a count of 0 for a file without, and with the pending error set. */
TUTTI_API tt_metadata tt_load_metadata(const char *path);
/* The value of a key, or NULL without an error. */
TUTTI_API const char *tt_metadata_get(tt_metadata metadata, const char *key);

#ifdef __cplusplus
}
#endif
#endif
