/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types and reductions by name, which go together, and conversion between types.
 */
#include <tutti/dtype.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

#include "base/element.h"
#include "base/error.h"
#include "base/float_control.h"

typedef enum kind {
    KIND_FLOAT,
    KIND_SIGNED,
    KIND_UNSIGNED,
    KIND_BOOL,
    KIND_COMPLEX
} kind;

static const struct {
    const char *name;
    size_t size;
    kind kind;
    const char *aliases;
} dtypes[] = {
#define DTYPE(id, name, bytes, kind, aliases) [TUTTI_##id] = { name, bytes, KIND_##kind, aliases },
#include "base/dtypes.def"
#undef DTYPE
};

enum {
    DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0]
};

#define ON(kind) (1u << (kind))

static const struct {
    const char *name;
    const char *aliases;
    unsigned kinds; /* that it is defined for: the table in the header */
} reductions[] = {
    [TUTTI_SUM - TUTTI_SUM] = { "sum", "add",
                                ON(KIND_FLOAT) | ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) |
                                    ON(KIND_COMPLEX) },
    [TUTTI_AVG -
        TUTTI_SUM] = { "avg", "mean average", ON(KIND_FLOAT) | ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_COMPLEX) },
    [TUTTI_PRODUCT -
        TUTTI_SUM] = { "product", "prod", ON(KIND_FLOAT) | ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) },
    [TUTTI_MIN - TUTTI_SUM] = { "min", "", ON(KIND_FLOAT) | ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) },
    [TUTTI_MAX - TUTTI_SUM] = { "max", "", ON(KIND_FLOAT) | ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) },
    [TUTTI_BAND - TUTTI_SUM] = { "band", "and", ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) },
    [TUTTI_BOR - TUTTI_SUM] = { "bor", "or", ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) },
    [TUTTI_BXOR - TUTTI_SUM] = { "bxor", "xor", ON(KIND_SIGNED) | ON(KIND_UNSIGNED) | ON(KIND_BOOL) },
    [TUTTI_PREMUL_SUM - TUTTI_SUM] = { "premul_sum", "mulsum premulsum", ON(KIND_FLOAT) | ON(KIND_COMPLEX) },
};

enum {
    OP_COUNT = sizeof reductions / sizeof reductions[0]
};

static bool is_dtype(tutti_dtype dtype) {
    return dtype >= TUTTI_F64 && (int)dtype < DTYPE_COUNT;
}

static bool is_reduction(tutti_reduction reduction) {
    return reduction >= TUTTI_SUM && (int)reduction < TUTTI_SUM + OP_COUNT;
}

size_t tutti_dtype_size(tutti_dtype dtype) {
    return is_dtype(dtype) ? dtypes[dtype].size : 0;
}

const char *tutti_dtype_name(tutti_dtype dtype) {
    return is_dtype(dtype) ? dtypes[dtype].name : "?";
}

const char *tutti_reduction_name(tutti_reduction reduction) {
    return is_reduction(reduction) ? reductions[reduction - TUTTI_SUM].name : "?";
}

int tutti_reduction_applies(tutti_reduction reduction, tutti_dtype dtype) {
    return is_reduction(reduction) && is_dtype(dtype) &&
           (reductions[reduction - TUTTI_SUM].kinds & ON(dtypes[dtype].kind)) != 0;
}

/* Whether `name` is one of the words of `list`, case ignored. */
static bool in_list(const char *name, const char *list) {
    size_t length = strlen(name);
    while (*list) {
        size_t word = strcspn(list, " ");
        if (word == length && strncasecmp(list, name, word) == 0)
            return true;
        list += word + (list[word] == ' ');
    }
    return false;
}

tutti_status tutti_dtype_parse(const char *name, tutti_dtype *dtype) {
    if (!name || !dtype)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_dtype_parse: %s is NULL", name ? "dtype" : "name");
    for (int i = TUTTI_F64; i < DTYPE_COUNT; i++) {
        if (strcasecmp(name, dtypes[i].name) == 0 || in_list(name, dtypes[i].aliases)) {
            *dtype = (tutti_dtype)i;
            return TUTTI_OK;
        }
    }
    return tu_error(
        TUTTI_ERROR_TYPE,
        "\"%s\" is no element type; understood are f64, f32, f16, bf16, f8_e4m3, f8_e5m2, i8, i16, i32, i64, u8, "
        "u16, u32, u64, bool, c64, c128 and the names that C, nccl-tests and PyTorch give them",
        name);
}

tutti_status tutti_reduction_parse(const char *name, tutti_reduction *reduction) {
    if (!name || !reduction)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_reduction_parse: %s is NULL", name ? "reduction" : "name");
    for (int i = 0; i < OP_COUNT; i++) {
        if (strcasecmp(name, reductions[i].name) == 0 || in_list(name, reductions[i].aliases)) {
            *reduction = (tutti_reduction)(TUTTI_SUM + i);
            return TUTTI_OK;
        }
    }
    return tu_error(
        TUTTI_ERROR_TYPE,
        "\"%s\" is no reduction; understood are sum, avg, product, min, max, band, bor, bxor and premul_sum", name);
}

/* --- conversion ---
 *
 * A block of elements is widened to doubles or to 64-bit integers, which hold every value of the type exactly, and from
 * there stored in the other type, rounding once. */

#define BLOCK 256

typedef union block {
    double real[BLOCK];
    int64_t integer[BLOCK]; /* u64 as its bits */
} block;

#define LOAD(type, field, value)                   \
    for (size_t i = 0; i < count; i++) {           \
        type x;                                    \
        memcpy(&x, from + i * sizeof x, sizeof x); \
        wide->field[i] = value;                    \
    }                                              \
    break

static void load(const char *from, tutti_dtype dtype, block *wide, size_t count) {
    struct {
        float real, imaginary;
    } pair;
    switch (dtype) {
    case TUTTI_F64:
        LOAD(double, real, x);
    case TUTTI_F32:
        LOAD(float, real, (double)x);
    case TUTTI_F16:
        LOAD(uint16_t, real, (double)tu_f16_to_f32(x));
    case TUTTI_BF16:
        LOAD(uint16_t, real, (double)tu_bf16_to_f32(x));
    case TUTTI_F8_E4M3:
        LOAD(uint8_t, real, (double)tu_e4m3_to_f32(x));
    case TUTTI_F8_E5M2:
        LOAD(uint8_t, real, (double)tu_e5m2_to_f32(x));
    case TUTTI_I8:
        LOAD(int8_t, integer, x);
    case TUTTI_I16:
        LOAD(int16_t, integer, x);
    case TUTTI_I32:
        LOAD(int32_t, integer, x);
    case TUTTI_I64:
    case TUTTI_U64:
        LOAD(int64_t, integer, x);
    case TUTTI_U8:
        LOAD(uint8_t, integer, x);
    case TUTTI_U16:
        LOAD(uint16_t, integer, x);
    case TUTTI_U32:
        LOAD(uint32_t, integer, x);
    case TUTTI_BOOL:
        LOAD(uint8_t, integer, x != 0);
    case TUTTI_C64:
        for (size_t i = 0; i < count; i++) {
            memcpy(&pair, from + i * sizeof pair, sizeof pair);
            wide->real[i] = (double)pair.real;
        }
        break;
    case TUTTI_C128:
        for (size_t i = 0; i < count; i++)
            memcpy(&wide->real[i], from + i * 16, 8);
        break;
    }
}

#define STORE(type, value)                       \
    for (size_t i = 0; i < count; i++) {         \
        type x = (type)(value);                  \
        memcpy(to + i * sizeof x, &x, sizeof x); \
    }                                            \
    break

static void store_real(const block *wide, char *to, tutti_dtype dtype, size_t count) {
    const double *real = wide->real;
    struct {
        float real, imaginary;
    } pair = { 0, 0 };
    switch (dtype) {
    case TUTTI_F64:
        STORE(double, real[i]);
    case TUTTI_F32:
        STORE(float, real[i]);
    case TUTTI_F16:
        STORE(uint16_t, tu_f32_to_f16(tu_f64_to_f32_odd(real[i])));
    case TUTTI_BF16:
        STORE(uint16_t, tu_f32_to_bf16(tu_f64_to_f32_odd(real[i])));
    case TUTTI_F8_E4M3:
        STORE(uint8_t, tu_f32_to_e4m3(tu_f64_to_f32_odd(real[i])));
    case TUTTI_F8_E5M2:
        STORE(uint8_t, tu_f32_to_e5m2(tu_f64_to_f32_odd(real[i])));
    case TUTTI_I8:
        STORE(int8_t, tu_saturate_signed(real[i], 8));
    case TUTTI_I16:
        STORE(int16_t, tu_saturate_signed(real[i], 16));
    case TUTTI_I32:
        STORE(int32_t, tu_saturate_signed(real[i], 32));
    case TUTTI_I64:
        STORE(int64_t, tu_saturate_signed(real[i], 64));
    case TUTTI_U8:
        STORE(uint8_t, tu_saturate_unsigned(real[i], 8));
    case TUTTI_U16:
        STORE(uint16_t, tu_saturate_unsigned(real[i], 16));
    case TUTTI_U32:
        STORE(uint32_t, tu_saturate_unsigned(real[i], 32));
    case TUTTI_U64:
        STORE(uint64_t, tu_saturate_unsigned(real[i], 64));
    case TUTTI_BOOL:
        STORE(uint8_t, real[i] != 0);
    case TUTTI_C64:
        for (size_t i = 0; i < count; i++) {
            pair.real = (float)real[i];
            memcpy(to + i * sizeof pair, &pair, sizeof pair);
        }
        break;
    case TUTTI_C128:
        for (size_t i = 0; i < count; i++) {
            double parts[2] = { real[i], 0 };
            memcpy(to + i * sizeof parts, parts, sizeof parts);
        }
        break;
    }
}

/* Integers to floats go through store_real; to integers they wrap. */
static void store_integer(block *wide, bool is_unsigned, char *to, tutti_dtype dtype, size_t count) {
    const int64_t *integer = wide->integer;
    switch (dtype) {
    case TUTTI_I8:
    case TUTTI_U8:
        STORE(uint8_t, integer[i]);
    case TUTTI_I16:
    case TUTTI_U16:
        STORE(uint16_t, integer[i]);
    case TUTTI_I32:
    case TUTTI_U32:
        STORE(uint32_t, integer[i]);
    case TUTTI_I64:
    case TUTTI_U64:
        STORE(uint64_t, integer[i]);
    case TUTTI_BOOL:
        STORE(uint8_t, integer[i] != 0);
    default: {
        bool exact = dtype == TUTTI_F64 || dtype == TUTTI_C128;
        for (size_t i = 0; i < count; i++) {
            int64_t x = wide->integer[i];
            wide->real[i] = !exact ? tu_sticky(x, is_unsigned) : is_unsigned ? (double)(uint64_t)x : (double)x;
        }
        store_real(wide, to, dtype, count);
    }
    }
}

static void convert(const char *from, tutti_dtype from_dtype, char *to, tutti_dtype to_dtype, size_t count);

/* Types of equal meaning or a plain pair: without the detour. True when it was one. */
static bool convert_directly(const char *from, tutti_dtype from_dtype, char *to, tutti_dtype to_dtype, size_t count) {
    if (from_dtype == to_dtype && to_dtype != TUTTI_BOOL) {
        memmove(to, from, count * dtypes[to_dtype].size);
        return true;
    }
    if (from_dtype == TUTTI_C64 && to_dtype == TUTTI_C128)
        return convert_directly(from, TUTTI_F32, to, TUTTI_F64, 2 * count);
    if (from_dtype == TUTTI_C128 && to_dtype == TUTTI_C64)
        return convert_directly(from, TUTTI_F64, to, TUTTI_F32, 2 * count);

    if (dtypes[from_dtype].kind == KIND_COMPLEX && to_dtype == TUTTI_BOOL) { /* not zero in one of its parts */
        char parts[2 * BLOCK];
        for (size_t at = 0; at < count; at += BLOCK) {
            size_t part = count - at < BLOCK ? count - at : BLOCK;
            convert(from + at * dtypes[from_dtype].size, from_dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64, parts,
                    TUTTI_BOOL, 2 * part);
            for (size_t i = 0; i < part; i++)
                to[at + i] = parts[2 * i] || parts[2 * i + 1];
        }
        return true;
    }

#define DIRECT(from_name, from_type, to_name, to_type, convert) \
    if (from_dtype == from_name && to_dtype == to_name) {       \
        for (size_t i = 0; i < count; i++) {                    \
            from_type x;                                        \
            memcpy(&x, from + i * sizeof x, sizeof x);          \
            to_type y = convert(x);                             \
            memcpy(to + i * sizeof y, &y, sizeof y);            \
        }                                                       \
        return true;                                            \
    }
    DIRECT(TUTTI_F32, float, TUTTI_F64, double, (double))
    DIRECT(TUTTI_F64, double, TUTTI_F32, float, (float))
    DIRECT(TUTTI_F32, float, TUTTI_BF16, uint16_t, tu_f32_to_bf16)
    DIRECT(TUTTI_BF16, uint16_t, TUTTI_F32, float, tu_bf16_to_f32)
    DIRECT(TUTTI_F32, float, TUTTI_F16, uint16_t, tu_f32_to_f16)
    DIRECT(TUTTI_F16, uint16_t, TUTTI_F32, float, tu_f16_to_f32)
    return false;
}

static void convert(const char *from, tutti_dtype from_dtype, char *to, tutti_dtype to_dtype, size_t count) {
    if (convert_directly(from, from_dtype, to, to_dtype, count))
        return;
    block wide;
    kind from_kind = dtypes[from_dtype].kind;
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t part = count - at < BLOCK ? count - at : BLOCK;
        char *block_to = to + at * dtypes[to_dtype].size;
        load(from + at * dtypes[from_dtype].size, from_dtype, &wide, part);
        if (from_kind == KIND_FLOAT || from_kind == KIND_COMPLEX)
            store_real(&wide, block_to, to_dtype, part);
        else
            store_integer(&wide, from_dtype == TUTTI_U64, block_to, to_dtype, part);
    }
}

tutti_status tutti_convert(const void *from, tutti_dtype from_dtype, void *to, tutti_dtype to_dtype, size_t count) {
    if (!is_dtype(from_dtype) || !is_dtype(to_dtype))
        return tu_error(TUTTI_ERROR_TYPE, "tutti_convert: %s %d is no element type",
                        is_dtype(from_dtype) ? "to_dtype" : "from_dtype",
                        (int)(is_dtype(from_dtype) ? to_dtype : from_dtype));
    if (count == 0)
        return TUTTI_OK;
    if (!from || !to)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_convert: %s is NULL", from ? "to" : "from");
    uintptr_t from_begin = (uintptr_t)from, to_begin = (uintptr_t)to;
    size_t from_size = dtypes[from_dtype].size, to_size = dtypes[to_dtype].size;
    bool in_place = from_begin == to_begin && from_size == to_size;
    if (!in_place && from_begin < to_begin + count * to_size && to_begin < from_begin + count * from_size)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "tutti_convert: from and to overlap; only the same address with elements of one size may (%s has %zu "
            "bytes, %s %zu)",
            dtypes[from_dtype].name, from_size, dtypes[to_dtype].name, to_size);
    uint64_t control = tu_float_control_enter();
    convert(from, from_dtype, to, to_dtype, count);
    tu_float_control_leave(control);
    return TUTTI_OK;
}
