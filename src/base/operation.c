/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of operations, and looking things up in it.
 */
#include "base/operation.h"

#include <string.h>

/* Named forms repeat the shape of what they are a form of. */
#define FORM_OF_ALL_REDUCE                                                                                     \
    .kind = TU_KIND_REDUCTION, .form = TU_OPERATION_ALL_REDUCE, .in = TU_EXTENT_WHOLE, .out = TU_EXTENT_WHOLE, \
    .placed = true
#define FORM_OF_REDUCE                                                                                      \
    .kind = TU_KIND_REDUCTION, .form = TU_OPERATION_REDUCE, .flow = TU_FLOW_TO_ROOT, .in = TU_EXTENT_WHOLE, \
    .out = TU_EXTENT_WHOLE, .placed = true
#define FORM_OF_REDUCE_SCATTER                                                                                    \
    .kind = TU_KIND_REDUCTION, .form = TU_OPERATION_REDUCE_SCATTER, .in = TU_EXTENT_EACH, .out = TU_EXTENT_WHOLE, \
    .in_place = TU_IN_PLACE_FIRST
#define FORM_OF_ALL_GATHER \
    .kind = TU_KIND_MOVE, .form = TU_OPERATION_ALL_GATHER, .in = TU_EXTENT_WHOLE, .out = TU_EXTENT_EACH, .placed = true

/* All fused operations begin with the same all-gather of records, which say what is called. */
#define FUSED                                                                              \
    FORM_OF_ALL_GATHER, .meets = TU_OPERATION_FUSED_ALL_GATHER_MATMUL, .of_records = true, \
                        .algorithms = TU_BY_FLAT | TU_BY_PIPELINED

/* Taken where it lies, by whoever gets it. */
#define TILES .kind = TU_KIND_TILES, .in = TU_EXTENT_TILES, .out = TU_EXTENT_TILES, .fixed = TUTTI_ALGORITHM_ONE_SHOT

/* A row that says nothing about it is a form of itself, meets itself, and its root field is a root; the row may say
 * otherwise, and the later initializer wins. */
#pragma GCC diagnostic ignored "-Woverride-init"
#ifdef __clang__
#pragma GCC diagnostic ignored "-Winitializer-overrides"
#endif
const tu_operation_row tu_operations[TU_OPERATION_COUNT] = {
    [TU_OPERATION_NONE] = { .name = "none", .partner = "root" },
#define OPERATION(id, text, ...) \
    [TU_OPERATION_##             \
        id] = { .name = text, .form = TU_OPERATION_##id, .meets = TU_OPERATION_##id, .partner = "root", __VA_ARGS__ },
#include "base/operations.def"
#undef OPERATION
};

const tu_operation_row *tu_operation_row_of(unsigned operation) {
    static const tu_operation_row unknown = { .name = "?", .partner = "root" };
    return operation < TU_OPERATION_COUNT ? &tu_operations[operation] : &unknown;
}

tu_operation tu_operation_find(const char *name) {
    for (int i = TU_OPERATION_COUNT - 1; i > 0; i--) /* the last ones are asked for by name in every call */
        if (strcmp(tu_operations[i].name, name) == 0)
            return (tu_operation)i;
    return TU_OPERATION_NONE;
}
