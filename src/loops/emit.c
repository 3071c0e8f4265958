/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of the text of compiled loops that every target has: functions of operators, and the lines of stages.
 */
#include "loops/emit.h"

#include <inttypes.h>
#include <math.h>

/* ---- types ---- */

const char *tu_emit_suffix(tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? "f64" : dtype == TUTTI_F32 ? "f32" : dtype == TUTTI_U64 ? "u64" : "i64";
}

const char *tu_emit_type(tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? "double" : dtype == TUTTI_F32 ? "float" : dtype == TUTTI_U64 ? "uint64_t" : "int64_t";
}

/* Of a variable: a register of floats, or one integer. */
static const char *variable_type(tutti_dtype dtype) {
    return dtype == TUTTI_F64 ? "vec_f64" : dtype == TUTTI_F32 ? "vec_f32" : tu_emit_type(dtype);
}

bool tu_emit_knows(const tu_nest *nest, const tu_line *line) {
    const tu_operator *entry = line->vertex->entry;
    tutti_dtype compute = nest->slots[line->out].dtype;
    for (int i = 0; i < entry->argument_count; i++)
        if (entry->arguments[i].type != TT_ARGUMENT_TENSOR && entry->arguments[i].type != TT_ARGUMENT_DOUBLE)
            return false;
    return entry->expression != NULL &&
           (compute == TUTTI_F32 || compute == TUTTI_F64 || compute == TUTTI_I64 || compute == TUTTI_U64);
}

/* ---- operators ---- */

/* A comparison of registers is a mask of bits, and one of integers, which are walked one by one, is 0 or 1. */
static void emit_operator(FILE *to, const tu_operator *entry, tutti_dtype compute) {
    const char *type = variable_type(compute), *suffix = tu_emit_suffix(compute);
    fprintf(to, "#undef SELECT\n#define SELECT(condition, left, right) %s\n",
            tu_is_float(compute) ? "TU_SELECT(condition, left, right)" : "((condition) ? (left) : (right))");
    fprintf(to, "#undef SUFFIX\n#define SUFFIX %s\nTU_LANE %s %s_%s(", suffix, type, entry->name, suffix);
    for (int i = 0; i < entry->argument_count; i++)
        fprintf(to, "%sconst %s %s", i == 0 ? "" : ", ", type, entry->arguments[i].name);
    fprintf(to, ") {\n    return %s;\n}\n", entry->expression);
}

static bool is_first(tu_nest *const *nests, int nest, int line) {
    const tu_line *own = &nests[nest]->lines[line];
    for (int i = 0; i <= nest; i++)
        for (int k = 0; k < nests[i]->line_count && (i < nest || k < line); k++) {
            const tu_line *other = &nests[i]->lines[k];
            if (other->kind == TU_LINE_POINTWISE && other->vertex->entry == own->vertex->entry &&
                nests[i]->slots[other->out].dtype == nests[nest]->slots[own->out].dtype)
                return false;
        }
    return true;
}

void tu_emit_operators(FILE *to, tu_nest *const *nests, int nest_count) {
    for (int i = 0; i < nest_count; i++)
        for (int k = 0; k < nests[i]->line_count; k++) {
            const tu_line *line = &nests[i]->lines[k];
            if (line->kind == TU_LINE_POINTWISE && tu_emit_knows(nests[i], line) && is_first(nests, i, k))
                emit_operator(to, line->vertex->entry, nests[i]->slots[line->out].dtype);
        }
}

/* ---- numbers ---- */

static void emit_real(FILE *to, double number, const char *suffix) {
    if (isnan(number))
        fprintf(to, "tu_number_%s(__builtin_nan(\"\"))", suffix);
    else if (isinf(number))
        fprintf(to, "tu_number_%s(%s__builtin_inf())", suffix, number < 0 ? "-" : "");
    else
        fprintf(to, "tu_number_%s(%a)", suffix, number);
}

static void emit_whole(FILE *to, int64_t number, const char *type) {
    if (number == INT64_MIN)
        fprintf(to, "(%s)INT64_MIN", type);
    else
        fprintf(to, "(%s)INT64_C(%" PRId64 ")", type, number);
}

/* What an integer's expression sees of an attribute: see tensor/pointwise_kernels.c. */
static int64_t whole(double number) {
    return number >= 0x1p63 ? INT64_MAX : number < -0x1p63 ? INT64_MIN : number != number ? 0 : (int64_t)number;
}

static void emit_attribute(FILE *to, double number, tutti_dtype compute) {
    if (tu_is_float(compute))
        emit_real(to, number, tu_emit_suffix(compute));
    else
        emit_whole(to, whole(number), tu_emit_type(compute));
}

void tu_emit_number(FILE *to, const tu_slot *slot) {
    if (slot->dtype == TUTTI_F32)
        emit_real(to, (double)*(const float *)(const void *)slot->number, "f32");
    else if (slot->dtype == TUTTI_F64)
        emit_real(to, *(const double *)(const void *)slot->number, "f64");
    else
        emit_whole(to, *(const int64_t *)(const void *)slot->number, tu_emit_type(slot->dtype));
}

/* ---- lines ---- */

void tu_emit_line(FILE *to, const tu_nest *nest, const tu_line *line) {
    const tu_operator *entry = line->vertex->entry;
    tutti_dtype compute = nest->slots[line->out].dtype;
    fprintf(to, "const %s v%d = %s_%s(", variable_type(compute), line->out, entry->name, tu_emit_suffix(compute));
    for (int i = 0, input = 0; i < entry->argument_count; i++) {
        const tu_argument *argument = &entry->arguments[i];
        fprintf(to, i == 0 ? "" : ", ");
        if (argument->type == TT_ARGUMENT_DOUBLE) {
            emit_attribute(to, *(const double *)((const char *)line->vertex->attributes + argument->offset), compute);
            continue;
        }
        int slot = line->in[input++];
        if (nest->slots[slot].constant)
            tu_emit_number(to, &nest->slots[slot]);
        else
            fprintf(to, "v%d", slot);
    }
    fprintf(to, ");");
    const tu_value *value = nest->slots[line->out].value;
    if (value != NULL)
        fprintf(to, " /* %s */", value->name);
    fprintf(to, "\n");
}

void tu_emit_lines(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *indent) {
    for (int i = stage->first; i < stage->end; i++) {
        fprintf(to, "%s", indent);
        tu_emit_line(to, nest, &nest->lines[i]);
    }
}

/* ---- comments ---- */

static void emit_reference(FILE *to, const tu_nest *nest, int slot) {
    if (nest->slots[slot].value != NULL)
        fprintf(to, "%s", nest->slots[slot].value->name);
    else
        fprintf(to, "v%d", slot);
}

typedef struct range {
    const tu_nest *nest;
    int first, end; /* lines */
} range;

/* A value's expression over what the lines read, "relu((tanh(x) - x))". */
static void emit_expression(FILE *to, range of, int slot, int depth) {
    const tu_nest *nest = of.nest;
    const tu_line *line = NULL;
    for (int i = of.first; i < of.end && line == NULL; i++)
        line = nest->lines[i].out == slot ? &nest->lines[i] : NULL;
    if (nest->slots[slot].constant) {
        double number = 0;
        if (tutti_convert(nest->slots[slot].number, nest->slots[slot].dtype, &number, TUTTI_F64, 1) == TUTTI_OK)
            tu_number_print(to, number);
        return;
    }
    if (line == NULL || depth == 0) {
        emit_reference(to, nest, slot);
        return;
    }
    if (line->kind == TU_LINE_CONVERT) {
        emit_expression(to, of, line->in[0], depth);
        return;
    }
    const tu_operator *entry = line->vertex->entry;
    int count = line->kind == TU_LINE_FOLD ? 1 : entry->argument_count;
    fprintf(to, "%s(", entry->name);
    for (int i = 0, input = 0; i < count; i++) {
        fprintf(to, i == 0 ? "" : ", ");
        if (entry->arguments[i].type == TT_ARGUMENT_DOUBLE)
            tu_number_print(to, *(const double *)((const char *)line->vertex->attributes + entry->arguments[i].offset));
        else
            emit_expression(to, of, line->in[input++], depth - 1);
    }
    fprintf(to, ")");
}

void tu_emit_comment(FILE *to, const tu_nest *nest, int first, int end, const int *slots, int slot_count) {
    fprintf(to, "\n/* Loop %d over [", nest->number);
    for (int i = 0; i < nest->ndim; i++)
        fprintf(to, i == 0 ? "%lld" : ", %lld", (long long)nest->sizes[i]);
    fprintf(to, "]:\n");
    for (int i = 0; i < slot_count; i++) {
        fprintf(to, " *   ");
        emit_reference(to, nest, slots[i]);
        fprintf(to, " = ");
        emit_expression(to, (range){ nest, first, end }, slots[i], 12);
        fprintf(to, "\n");
    }
    fprintf(to, " */\n");
}
