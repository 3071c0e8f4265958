/* SPDX-License-Identifier: Apache-2.0
 *
 * Stages as C: a function for each, which walks rows and columns by registers.
 */
#include "loops/build.h"
#include "loops/emit.h"

void tu_emit_name(char *name, size_t size, const tu_nest *nest, int stage) {
    snprintf(name, size, "loop_%d_%d", nest->number, stage);
}

/* An operand has an element per place, or one for the row. */
static bool is_single(const tu_nest *nest, int slot) {
    const tu_slot *at = &nest->slots[slot];
    return at->tensor >= 0 && !nest->tensors[at->tensor].written && nest->tensors[at->tensor].single && !at->narrow;
}

/* Results that are too large for the caches, and that nobody reads before they are all there. */
static bool goes_past(const tu_nest *nest, const tu_stage *stage, int slot) {
    const tu_slot *at = &nest->slots[slot];
    if (at->tensor < 0 || !nest->tensors[at->tensor].fresh || at->narrow || !tu_is_float(at->dtype) ||
        nest->tensors[at->tensor].column != 1)
        return false;
    for (int line = stage->end; line < nest->line_count; line++)
        for (int i = 0; i < nest->lines[line].in_count; i++)
            if (nest->lines[line].in[i] == slot)
                return false;
    return (size_t)(nest->outer_count * nest->rows * nest->columns) * tu_dtype_bytes[at->dtype] >= TU_STREAM_BYTES;
}

typedef struct operand {
    int slot;
    bool one; /* for the whole row */
    bool past;
} operand;

static operand operand_of(const tu_nest *nest, const tu_stage *stage, int index) {
    int slot = stage->slots[index];
    bool input = index < stage->input_count, narrow_stage = nest->slots[nest->lines[stage->first].out].narrow;
    return (operand){ .slot = slot,
                      .one = input && (is_single(nest, slot) || (nest->slots[slot].narrow && !narrow_stage)),
                      .past = !input && goes_past(nest, stage, slot) };
}

/* The function of one register, or of the part of one that is left. */
static void emit_lanes(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *name, const char *type,
                       const char *suffix, bool past) {
    fprintf(to, "TU_LANE void %s_lanes(void *const *at, const int64_t *steps, int64_t row, int64_t i, int64_t part",
            name);
    for (int k = 0; k < stage->slot_count; k++) {
        operand own = operand_of(nest, stage, k);
        if (own.one)
            fprintf(to, ", vec_%s v%d", suffix, own.slot);
    }
    fprintf(to, past ? ", int past) {\n" : ") {\n");
    for (int k = 0; k < stage->input_count; k++) {
        operand own = operand_of(nest, stage, k);
        if (!own.one)
            fprintf(to, "    const vec_%s v%d = tu_get_%s((const %s *)at[%d] + row * steps[%d] + i, part);\n", suffix,
                    own.slot, suffix, type, k, k);
    }
    tu_emit_lines(to, nest, stage, "    ");
    for (int k = stage->input_count; k < stage->slot_count; k++) {
        operand own = operand_of(nest, stage, k);
        fprintf(to,
                own.past ? "    tu_put_past_%s((%s *)at[%d] + row * steps[%d] + i, v%d, part, past);\n"
                         : "    tu_put_%s((%s *)at[%d] + row * steps[%d] + i, v%d, part);\n",
                suffix, type, k, k, own.slot);
    }
    fprintf(to, "}\n");
}

static void emit_call(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *name, const char *part,
                      const char *past) {
    fprintf(to, "%s_lanes(at, steps, row, i, %s", name, part);
    for (int k = 0; k < stage->slot_count; k++) {
        operand own = operand_of(nest, stage, k);
        if (own.one)
            fprintf(to, ", v%d", own.slot);
    }
    fprintf(to, "%s);\n", past);
}

/* Numbers that hold for a row. */
static void emit_ones(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *type, const char *suffix) {
    for (int k = 0; k < stage->input_count; k++) {
        operand own = operand_of(nest, stage, k);
        if (own.one)
            fprintf(to, "        const vec_%s v%d = tu_splat_%s(((const %s *)at[%d])[%s]);\n", suffix, own.slot, suffix,
                    type, k, nest->slots[own.slot].narrow ? "row" : "0");
    }
}

static void emit_floats(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *name, tutti_dtype dtype) {
    const char *type = tu_emit_type(dtype), *suffix = tu_emit_suffix(dtype);
    const char *lanes = dtype == TUTTI_F64 ? "TU_LANES_F64" : "TU_LANES_F32";
    bool past = false;
    for (int k = stage->input_count; k < stage->slot_count; k++)
        past = past || operand_of(nest, stage, k).past;
    emit_lanes(to, nest, stage, name, type, suffix, past);
    fprintf(to, "TU_LOOP void %s(void *const *at, const int64_t *steps, int64_t rows, int64_t columns) {\n", name);
    fprintf(to, "    for (int64_t row = 0; row < rows; row++) {\n        int64_t i = 0;\n");
    emit_ones(to, nest, stage, type, suffix);
    if (past) {
        fprintf(to, "        const uintptr_t places = 0");
        for (int k = stage->input_count; k < stage->slot_count; k++)
            if (operand_of(nest, stage, k).past)
                fprintf(to, " | (uintptr_t)((const %s *)at[%d] + row * steps[%d])", type, k, k);
        fprintf(to, ";\n        if (places %% sizeof(vec_%s) == 0)\n", suffix);
        fprintf(to, "            for (; i + %s <= columns; i += %s)\n                ", lanes, lanes);
        emit_call(to, nest, stage, name, lanes, ", 1");
    }
    fprintf(to, "        for (; i + %s <= columns; i += %s)\n            ", lanes, lanes);
    emit_call(to, nest, stage, name, lanes, past ? ", 0" : "");
    fprintf(to, "        if (i < columns)\n            ");
    emit_call(to, nest, stage, name, "columns - i", past ? ", 0" : "");
    fprintf(to, "    }\n%s}\n", past ? "    TU_STREAM_END();\n" : "");
}

static void emit_integers(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *name, tutti_dtype dtype) {
    const char *type = tu_emit_type(dtype);
    fprintf(to, "TU_LOOP void %s(void *const *at, const int64_t *steps, int64_t rows, int64_t columns) {\n", name);
    fprintf(to, "    for (int64_t row = 0; row < rows; row++)\n");
    fprintf(to, "        for (int64_t i = 0; i < columns; i++) {\n");
    for (int k = 0; k < stage->input_count; k++) {
        operand own = operand_of(nest, stage, k);
        fprintf(to, "            const %s v%d = ((const %s *)at[%d])[", type, own.slot, type, k);
        if (own.one)
            fprintf(to, nest->slots[own.slot].narrow ? "row];\n" : "0];\n");
        else
            fprintf(to, "row * steps[%d] + i];\n", k);
    }
    tu_emit_lines(to, nest, stage, "            ");
    for (int k = stage->input_count; k < stage->slot_count; k++)
        fprintf(to, "            ((%s *)at[%d])[row * steps[%d] + i] = v%d;\n", type, k, k, stage->slots[k]);
    fprintf(to, "        }\n}\n");
}

/* To read all of <immintrin.h> takes GCC longer than to compile the loops. The few of its parts that lanes need are
 * read in its place, as it reads them itself; with compilers that are not known for it, all of it is, and so it is in a
 * second attempt, behind one that failed: some compilers only say that they are GCC. */
static const char few_intrinsics[] = "#if defined __AVX2__ && defined __GNUC__ && __GNUC__ >= 9 && __GNUC__ <= 13 && "
                                     "!defined __clang__ && !defined __INTEL_COMPILER && "
                                     "!defined " TU_BUILD_ALL_INTRINSICS "\n"
                                     "#include <smmintrin.h>\n"
                                     "#define _IMMINTRIN_H_INCLUDED\n"
                                     "#include <avxintrin.h>\n"
                                     "#include <avx2intrin.h>\n"
                                     "#ifdef __AVX512F__\n"
                                     "#include <avx512fintrin.h>\n"
                                     "#include <avx512vlintrin.h>\n"
                                     "#include <avx512bwintrin.h>\n"
                                     "#include <avx512dqintrin.h>\n"
                                     "#endif\n"
                                     "#include <fmaintrin.h>\n"
                                     "#include <f16cintrin.h>\n"
                                     "#endif\n";

void tu_emit_c(FILE *to, tu_nest *const *nests, int nest_count, const char *lanes) {
    char name[64];
    fprintf(to, "/* Loops of a graph, written by Tutti. */\n%s#include \"%s\"\n\n", few_intrinsics, lanes);
    fprintf(to, "#define TU_LOOP __attribute__((visibility(\"default\")))\n");
    fprintf(to, "TU_LOOP extern const char " TU_EMIT_MARK "[];\nconst char " TU_EMIT_MARK "[] = \"%s\";\n\n",
            TU_EMIT_FORMAT);
    tu_emit_operators(to, nests, nest_count);
    for (int i = 0; i < nest_count; i++)
        for (int k = 0; k < nests[i]->stage_count; k++) {
            const tu_stage *stage = &nests[i]->stages[k];
            tutti_dtype dtype = nests[i]->slots[nests[i]->lines[stage->first].out].dtype;
            tu_emit_name(name, sizeof name, nests[i], k);
            tu_emit_comment(to, nests[i], stage->first, stage->end, stage->slots + stage->input_count,
                            stage->slot_count - stage->input_count);
            if (tu_is_float(dtype))
                emit_floats(to, nests[i], stage, name, dtype);
            else
                emit_integers(to, nests[i], stage, name, dtype);
        }
}
