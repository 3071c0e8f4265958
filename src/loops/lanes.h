/* SPDX-License-Identifier: Apache-2.0
 *
 * What the code of loops stands on, besides the primitives of an instruction set and the dialect of expressions: whole
 * registers and parts of them from memory and to it. Its text is a part of the library; see loops/text.c.
 */
#ifndef TU_LOOPS_LANES_H
#define TU_LOOPS_LANES_H

#include "tensor/dialect.h"

#define TU_LOOP_ACCESS(suffix, type, lanes)                                                  \
    TU_LANE vec_##suffix tu_get_##suffix(const type *from, int64_t part) {                   \
        return part == (lanes) ? tu_load_##suffix(from) : tu_load_part_##suffix(from, part); \
    }                                                                                        \
    TU_LANE void tu_put_##suffix(type *to, vec_##suffix x, int64_t part) {                   \
        if (part == (lanes))                                                                 \
            tu_store_##suffix(to, x);                                                        \
        else                                                                                 \
            tu_store_part_##suffix(to, x, part);                                             \
    }                                                                                        \
    /* Past the caches, where the place is aligned: for results that do not fit in them. */  \
    TU_LANE void tu_put_past_##suffix(type *to, vec_##suffix x, int64_t part, int past) {    \
        if (past && part == (lanes))                                                         \
            tu_stream_##suffix(to, x);                                                       \
        else                                                                                 \
            tu_put_##suffix(to, x, part);                                                    \
    }
TU_LOOP_ACCESS(f32, float, TU_LANES_F32)
TU_LOOP_ACCESS(f64, double, TU_LANES_F64)

#endif
