/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products that the vendor's library has not: of f64, of integers and complex numbers, of narrow floats in odd
 * layouts, or where the library is missing. Each element is one chain of fma along the depth, as in
 * kernel/product_body.h.
 */
#include "complex.cuh"

#define TILE 16

HERE float chain(float left, float right, float held) {
    return fmaf(left, right, held);
}
HERE double chain(double left, double right, double held) {
    return fma(left, right, held);
}
HERE int64_t chain(int64_t left, int64_t right, int64_t held) {
    return (int64_t)((uint64_t)held + (uint64_t)left * (uint64_t)right);
}

HERE tu_c128 chain(tu_c128 left, tu_c128 right, tu_c128 held) {
    return held + left * right;
}

/* A block has a tile of 16 by 16 elements of one product, and goes along the depth in tiles of the inputs. */
template <class Type> HERE void multiply(const tu_launch_product &args, Type *left, Type *right, Type *sums) {
    int64_t across = (args.columns + TILE - 1) / TILE, down = (args.rows + TILE - 1) / TILE;
    int64_t batch = BLOCK / (across * down), tile = BLOCK % (across * down);
    int64_t first_row = tile / across * TILE, first_column = tile % across * TILE;
    int bytes = bytes_of(args.dtype), out_bytes = bytes_of(args.result);
    const char *of_left = (const char *)(uintptr_t)args.left + batch * args.left_step * bytes;
    const char *of_right = (const char *)(uintptr_t)args.right + batch * args.right_step * bytes;
    char *out = (char *)(uintptr_t)args.out + batch * args.out_step * out_bytes;
    EACH_THREAD(self) {
        sums[self] = 0;
    }
    for (int64_t begin = 0; begin < args.depth; begin += TILE) {
        EACH_THREAD(self) {
            int64_t row = first_row + self / TILE, column = first_column + self % TILE;
            int64_t across_depth = begin + self % TILE, down_depth = begin + self / TILE;
            left[self] = row < args.rows && across_depth < args.depth
                             ? load_as<Type>(of_left + (row * args.left_row + across_depth * args.left_column) * bytes,
                                             args.dtype)
                             : (Type)0;
            right[self] =
                column < args.columns && down_depth < args.depth
                    ? load_as<Type>(of_right + (down_depth * args.right_row + column * args.right_column) * bytes,
                                    args.dtype)
                    : (Type)0;
        }
        SYNC();
        EACH_THREAD(self) {
            int64_t left_depth = args.depth - begin < TILE ? args.depth - begin : TILE;
            Type held = sums[self];
            for (int k = 0; k < left_depth; k++)
                held = chain(left[self / TILE * TILE + k], right[k * TILE + self % TILE], held);
            sums[self] = held;
        }
        SYNC();
    }
    EACH_THREAD(self) {
        int64_t row = first_row + self / TILE, column = first_column + self % TILE;
        if (row < args.rows && column < args.columns)
            store_as<Type>(sums[self], out + (row * args.out_row + column) * out_bytes, args.result);
    }
}

/* A block has a row at a time, whose elements it writes eight at once: those before the first place of 16 bytes, and
 * behind the last, stand alone. */
KERNEL(pitch, tu_launch_pitch) {
    for (int64_t row = BLOCK; row < args.to_rows; row += BLOCKS) {
        int64_t width = row < args.rows ? args.width : 0;
        const uint16_t *__restrict__ from = (const uint16_t *)(uintptr_t)args.from + row * args.from_row;
        uint16_t *__restrict__ to = (uint16_t *)(uintptr_t)args.to + row * args.to_row;
        int64_t uneven = (int64_t)((16 - ((uintptr_t)to & 15)) & 15) / 2, first = uneven < width ? uneven : width;
        int64_t packs = (width - first) / 8, last = first + 8 * packs;
        EACH_THREAD(self) {
            if (self < first)
                to[self] = from[self];
            UNROLL_BY_4
            for (int64_t i = self; i < packs; i += THREADS)
                *(eight_halves *)(to + first + 8 * i) = read_eight(from + first + 8 * i);
            if (self < width - last)
                to[last + self] = from[last + self];
            for (int64_t i = width + self; i < args.to_width; i += THREADS)
                to[i] = 0;
        }
    }
}

#define PRODUCT(suffix, type)                                                 \
    KERNEL(product_##suffix, tu_launch_product) {                             \
        SHARED type left[TILE * TILE], right[TILE * TILE], sums[TILE * TILE]; \
        multiply<type>(args, left, right, sums);                              \
    }
PRODUCT(f32, float)
PRODUCT(f64, double)
PRODUCT(i64, int64_t)
PRODUCT(c128, tu_c128)
