/* SPDX-License-Identifier: Apache-2.0
 *
 * Lines of CUDA C that are shorter than their operators' expressions and give the same bits: functions of numbers of
 * bf16 that are rounded to it at once, and sums behind exact products.
 */
#include <math.h>
#include <string.h>

#include "loops/emit.h"

/* The line that makes what a slot has; NULL where it is read from a tensor. */
static const tu_line *line_of(const tu_nest *nest, int slot) {
    for (int i = 0; i < nest->line_count; i++)
        if (nest->lines[i].out == slot)
            return &nest->lines[i];
    return NULL;
}

static bool is_operator(const tu_line *line, const char *name) {
    return line != NULL && line->kind == TU_LINE_POINTWISE && strcmp(line->vertex->entry->name, name) == 0;
}

/* The number that an operator is given besides its tensors. */
static double number_of(const tu_line *line) {
    const tu_operator *entry = line->vertex->entry;
    for (int i = 0; i < entry->argument_count; i++)
        if (entry->arguments[i].type == TT_ARGUMENT_DOUBLE)
            return *(const double *)((const char *)line->vertex->attributes + entry->arguments[i].offset);
    return 0;
}

/* Whether the line multiplies by a power of two from 1 on: exact, or infinite. */
static bool is_exact_product(const tu_line *line) {
    int exponent;
    return is_operator(line, "mul_scalar") && number_of(line) >= 1 && number_of(line) < 0x1p64 &&
           frexp(number_of(line), &exponent) == 0.5;
}

const tu_line *tu_emit_narrowing(const tu_nest *nest, const tu_line *line) {
    if (line->kind != TU_LINE_CONVERT || nest->slots[line->out].dtype != TUTTI_F32 ||
        nest->slots[line->in[0]].dtype != TUTTI_BF16)
        return NULL;
    const tu_line *found = line_of(nest, line->in[0]);
    return found != NULL && found->kind == TU_LINE_CONVERT && nest->slots[found->in[0]].dtype == TUTTI_F32 ? found
                                                                                                           : NULL;
}

bool tu_emit_is_near(const tu_nest *nest, int slot) {
    const tu_line *line = line_of(nest, slot);
    if (line != NULL && is_exact_product(line))
        line = line_of(nest, line->in[0]);
    return line != NULL && line->kind == TU_LINE_CONVERT && nest->slots[line->in[0]].dtype == TUTTI_BF16;
}

/* Whether all that becomes of a slot is rounded to bf16. */
static bool is_narrowed(const tu_nest *nest, int slot) {
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].written && nest->tensors[i].slot == slot)
            return false;
    for (int i = 0; i < nest->line_count; i++)
        for (int k = 0; k < nest->lines[i].in_count; k++)
            if (nest->lines[i].in[k] == slot &&
                (nest->lines[i].kind != TU_LINE_CONVERT || nest->slots[nest->lines[i].out].dtype != TUTTI_BF16))
                return false;
    return true;
}

/* A function of near.cuh in place of an operator's; false where it has none for the line. */
static bool write_near(FILE *to, const tu_nest *nest, const tu_line *line) {
    if ((!is_operator(line, "tanh") && !is_operator(line, "sigmoid")) || nest->slots[line->out].dtype != TUTTI_F32 ||
        !tu_emit_is_near(nest, line->in[0]) || !is_narrowed(nest, line->out))
        return false;
    fprintf(to, "const float v%d = tu_near_%s(v%d);\n", line->out, line->vertex->entry->name, line->in[0]);
    return true;
}

/* x times a power of two, and a number added, at once: the product is exact, so that both round alike; where it is
 * infinite, the number is too small to bring it back. False where the line is none such. */
static bool write_exact_sum(FILE *to, const tu_nest *nest, const tu_line *line) {
    if (!is_operator(line, "add_scalar") || nest->slots[line->out].dtype != TUTTI_F32 ||
        !(fabs(number_of(line)) <= 0x1p64))
        return false;
    const tu_line *product = line_of(nest, line->in[0]), *narrowing = NULL;
    if (product != NULL && product->kind == TU_LINE_CONVERT) { /* rounded in between, which changes nothing */
        narrowing = tu_emit_narrowing(nest, product);
        product = narrowing != NULL && tu_emit_is_near(nest, narrowing->in[0]) ? line_of(nest, narrowing->in[0]) : NULL;
    }
    if (!is_exact_product(product) || nest->slots[product->in[0]].constant)
        return false;
    fprintf(to, "const float v%d = tu_fma_f32(v%d, %a, %a);\n", line->out, product->in[0], number_of(product),
            (double)(float)number_of(line));
    return true;
}

bool tu_emit_shorter(FILE *to, const tu_nest *nest, const tu_line *line) {
    return write_near(to, nest, line) || write_exact_sum(to, nest, line);
}
