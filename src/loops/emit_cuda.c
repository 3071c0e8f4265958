/* SPDX-License-Identifier: Apache-2.0
 *
 * Nests as CUDA C: a kernel for each, in the words of device.cuh. Sizes and strides are numbers in the text, so that
 * the compiler divides by constants.
 *
 * A nest without reductions is a loop over elements, some neighbours at a time where they lie so. One with reductions
 * has a team of threads for each row, as many as the sums of the operators have lanes, and goes over the row once for
 * each reduction that waits for another, and once more for its results: short rows stay in registers meanwhile. Every
 * element is written by the thread that read it, in the last of these passes. Rows that are too long for a team are cut
 * into the blocks that sums go in anyway; a second kernel folds what these gave.
 */
#include <stdlib.h>
#include <string.h>

#include "loops/emit.h"
#include "loops/text.h"
#include "tensor/kernel/kernels.h"

#define WIDEST 8          /* neighbours at a time */
#define LONG (1 << 22)    /* elements that keep a GPU busy by two packs for each thread */
#define PAST (1 << 23)    /* elements of which little is left in a cache when somebody reads them again */
#define MOST_BLOCKS 65536 /* of threads; what is left they do in turns */
#define KEPT_BYTES 256    /* of a lane's registers, for elements that are read more than once */
#define PART 65536        /* of a single long row: see tensor/reduce.c */

typedef struct writing {
    FILE *to;
    tu_nest *nest;
    const char *name; /* of the kernel */
    int64_t total, row_count;
    bool small;       /* all places fit 31 bits */
    int width, packs; /* neighbours at once, and how often a thread has some */
    int lanes, depth; /* of a team; and its last reduction's level */
    bool keeps;       /* rows stay in registers */
} writing;

/* ---- words ---- */

static const char *type_of(tutti_dtype dtype) {
    static const char *const types[] = {
        [TUTTI_F64] = "double",      [TUTTI_F32] = "float",       [TUTTI_F16] = "uint16_t", [TUTTI_BF16] = "uint16_t",
        [TUTTI_F8_E4M3] = "uint8_t", [TUTTI_F8_E5M2] = "uint8_t", [TUTTI_I8] = "int8_t",    [TUTTI_I16] = "int16_t",
        [TUTTI_I32] = "int32_t",     [TUTTI_I64] = "int64_t",     [TUTTI_U8] = "uint8_t",   [TUTTI_U16] = "uint16_t",
        [TUTTI_U32] = "uint32_t",    [TUTTI_U64] = "uint64_t",    [TUTTI_BOOL] = "uint8_t"
    };
    return types[dtype];
}

static const char *word_of(tutti_dtype dtype) {
    return dtype == TUTTI_BOOL ? "boolean" : tutti_dtype_name(dtype);
}

static const char *fold_word(const tu_line *line) {
    return line->fold == TU_FOLD_SUM       ? "fold_sum"
           : line->fold == TU_FOLD_PRODUCT ? "fold_prod"
           : line->fold == TU_FOLD_MAXIMUM ? "fold_amax"
                                           : "fold_amin";
}

static const tu_slot *out_of(const writing *now, const tu_line *line) {
    return &now->nest->slots[line->out];
}

void tu_emit_cuda_name(char *name, size_t size, int kernel, bool second) {
    snprintf(name, size, second ? "loop_%d_rows" : "loop_%d", kernel);
}

/* ---- what can be written ---- */

bool tu_emit_cuda_knows(const tu_nest *nest) {
    tutti_dtype folds = 0;
    for (int i = 0; i < nest->line_count; i++) {
        const tu_line *line = &nest->lines[i];
        tutti_dtype dtype = nest->slots[line->out].dtype;
        if (line->kind == TU_LINE_POINTWISE && !tu_emit_knows(nest, line))
            return false;
        if (line->kind != TU_LINE_FOLD)
            continue;
        if ((dtype != TUTTI_F32 && dtype != TUTTI_F64) || (folds != 0 && folds != dtype))
            return false; /* their sums have different lanes */
        folds = dtype;
    }
    return !nest->tiled;
}

/* ---- lines ---- */

static void write_operand(const writing *now, int slot) {
    const tu_slot *from = &now->nest->slots[slot];
    uint64_t bits = 0;
    if (!from->constant) {
        fprintf(now->to, "v%d", slot);
        return;
    }
    if (from->dtype == TUTTI_F32 || from->dtype == TUTTI_F64 || from->dtype == TUTTI_I64 || from->dtype == TUTTI_U64) {
        tu_emit_number(now->to, from);
        return;
    }
    memcpy(&bits, from->number, tu_dtype_bytes[from->dtype]);
    fprintf(now->to, "(%s)0x%llx", type_of(from->dtype), (unsigned long long)bits);
}

static void write_line(const writing *now, const tu_line *line, const char *indent) {
    const tu_slot *out = out_of(now, line);
    fprintf(now->to, "%s", indent);
    if (line->kind == TU_LINE_POINTWISE) {
        if (!tu_emit_shorter(now->to, now->nest, line))
            tu_emit_line(now->to, now->nest, line);
        return;
    }
    tutti_dtype from = now->nest->slots[line->in[0]].dtype;
    const tu_line *narrowing = tu_emit_narrowing(now->nest, line);
    bool same = from == out->dtype || (narrowing != NULL && tu_emit_is_near(now->nest, narrowing->in[0]));
    fprintf(now->to, "const %s v%d = ", type_of(out->dtype), line->out);
    if (narrowing != NULL && !same) /* one instruction, and nothing to widen */
        fprintf(now->to, "tu_rounded(");
    else if (!same)
        fprintf(now->to, "convert<%s, %s>(", word_of(out->dtype), word_of(from));
    write_operand(now, narrowing != NULL ? narrowing->in[0] : line->in[0]);
    fprintf(now->to, same ? ";" : ");");
    if (out->value != NULL)
        fprintf(now->to, " /* %s */", out->value->name);
    fprintf(now->to, "\n");
}

static void write_comment(const writing *now) {
    const tu_nest *nest = now->nest;
    int slots[TU_NEST_TENSORS], count = 0;
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].written)
            slots[count++] = nest->tensors[i].slot;
    tu_emit_comment(now->to, nest, 0, nest->line_count, slots, count);
}

/* ---- places ---- */

/* Whether elements lie one behind the other in the order in which they are walked. */
static bool is_dense(const tu_nest *nest, const tu_nest_tensor *tensor) {
    int64_t expected = nest->columns;
    if (tensor->column != 1 && nest->columns > 1)
        return false;
    if (nest->rows > 1 && tensor->row != expected)
        return false;
    expected *= nest->rows;
    for (int i = nest->outer_ndim - 1; i >= 0; i--) {
        if (nest->outer_sizes[i] > 1 && tensor->outer[i] != expected)
            return false;
        expected *= nest->outer_sizes[i];
    }
    return true;
}

static bool fits_small(const tu_nest *nest, int64_t total) {
    bool small = total <= INT32_MAX;
    for (int i = 0; i < nest->tensor_count && small; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        int64_t last = (nest->columns - 1) * tensor->column + (nest->rows - 1) * tensor->row;
        for (int k = 0; k < nest->outer_ndim; k++)
            last += (nest->outer_sizes[k] - 1) * tensor->outer[k];
        small = last <= INT32_MAX;
    }
    return small;
}

static const char *index_of(const writing *now) {
    return now->small ? "uint32_t" : "uint64_t";
}

/* The numbers of the dimensions, from `row`, the number of the row among all. */
static void write_numbers(const writing *now, const char *indent) {
    const tu_nest *nest = now->nest;
    if (nest->outer_ndim == 0)
        return;
    fprintf(now->to, "%sconst %s r = row %% %lldu;\n", indent, index_of(now), (long long)nest->rows);
    int64_t below = nest->rows;
    for (int i = nest->outer_ndim - 1; i >= 0; i--) {
        fprintf(now->to, "%sconst %s q%d = row / %lldu", indent, index_of(now), i, (long long)below);
        fprintf(now->to, i > 0 ? " %% %lldu;\n" : ";\n", (long long)nest->outer_sizes[i]);
        below *= nest->outer_sizes[i];
    }
}

static void write_term(FILE *to, bool *any, const char *number, int64_t stride) {
    if (stride == 0)
        return;
    fprintf(to, "%s%s", *any ? " + " : "", number);
    if (stride != 1)
        fprintf(to, " * %lldu", (long long)stride);
    *any = true;
}

/* Where the row begins, by the numbers of its dimensions. */
static void write_row_place(const writing *now, const tu_nest_tensor *tensor) {
    const tu_nest *nest = now->nest;
    bool any = false;
    char name[16];
    for (int i = 0; i < nest->outer_ndim; i++) {
        snprintf(name, sizeof name, "q%d", i);
        write_term(now->to, &any, name, tensor->outer[i]);
    }
    if (nest->rows > 1)
        write_term(now->to, &any, nest->outer_ndim > 0 ? "r" : "row", tensor->row);
    if (!any)
        fprintf(now->to, "0");
}

/* ---- loops over elements ---- */

typedef enum form {
    PACKED, /* neighbours at once */
    SINGLE, /* one element for all of them */
    APART   /* each for itself */
} form;

static form form_of(const writing *now, const tu_nest_tensor *tensor) {
    const tu_nest *nest = now->nest;
    if (tensor->column == 0 && nest->columns > 1)
        return SINGLE;
    bool even = (tensor->column == 1 || nest->columns == 1) && (nest->rows == 1 || tensor->row % now->width == 0);
    for (int i = 0; i < nest->outer_ndim; i++)
        even = even && tensor->outer[i] % now->width == 0;
    return even ? PACKED : APART;
}

/* As many as 16 bytes of the narrowest type are; a row has whole packs, or there is one row. */
static int width_of(const tu_nest *nest) {
    size_t least = 16;
    for (int i = 0; i < nest->tensor_count; i++) {
        size_t bytes = tu_dtype_bytes[nest->tensors[i].value->shape.dtype];
        if (nest->tensors[i].column == 1 && bytes < least)
            least = bytes;
    }
    int width = (int)(16 / least);
    width = width > WIDEST ? WIDEST : width;
    while (nest->outer_count * nest->rows > 1 && nest->columns % width != 0)
        width /= 2;
    return width;
}

static void write_place(const writing *now, const tu_nest_tensor *tensor) {
    const tu_nest *nest = now->nest;
    if (is_dense(nest, tensor)) {
        fprintf(now->to, "first");
        return;
    }
    bool any = nest->outer_count * nest->rows > 1;
    if (any)
        write_row_place(now, tensor);
    if (tensor->column != 0)
        write_term(now->to, &any, "column", tensor->column);
    else if (!any)
        fprintf(now->to, "0");
}

/* The places of pack number j of those that begin at `element`. */
static void write_pack_place(const writing *now) {
    const tu_nest *nest = now->nest;
    fprintf(now->to, "        const %s first = (%s)element + j * %d * WIDTH", index_of(now), index_of(now),
            TU_EMIT_THREADS);
    if (nest->outer_count * nest->rows > 1) {
        fprintf(now->to, ", column = first %% %lldu, row = first / %lldu;\n", (long long)nest->columns,
                (long long)nest->columns);
        write_numbers(now, "        ");
    } else {
        fprintf(now->to, ", column = first;\n");
    }
}

/* All that is read, before anything is made of it; and all is made before anything is written: so loads and
 * instructions of all packs go side by side. */
static void write_reads(const writing *now) {
    const tu_nest *nest = now->nest;
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        form own = tensor->written ? PACKED : form_of(now, tensor);
        fprintf(now->to,
                own == PACKED   ? "    pack<%s, WIDTH> p%d[PACKS];\n"
                : own == SINGLE ? "    %s p%d[PACKS];\n"
                                : "    const %s *p%d[PACKS];\n",
                type_of(tensor->value->shape.dtype), i);
    }
    fprintf(now->to, "    UNROLL\n    for (int j = 0; j < PACKS; j++) {\n");
    write_pack_place(now);
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        const char *type = type_of(tensor->value->shape.dtype);
        form own = form_of(now, tensor);
        if (tensor->written)
            continue;
        if (own == PACKED)
            fprintf(now->to, "        p%d[j] = get%s<%s, WIDTH>(args.at[%d], ", i, now->total >= PAST ? "_past" : "",
                    type, i);
        else
            fprintf(now->to, "        p%d[j] = %s((const %s *)args.at[%d] + ", i, own == SINGLE ? "*" : "", type, i);
        write_place(now, tensor);
        fprintf(now->to, "); /* %s */\n", tensor->value->name);
    }
    fprintf(now->to, "    }\n");
}

static void write_lanes(const writing *now) {
    const tu_nest *nest = now->nest;
    fprintf(now->to, "    UNROLL\n    for (int n = 0; n < PACKS * WIDTH; n++) {\n"
                     "        const int j = n / WIDTH, k = n %% WIDTH;\n");
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        form own = form_of(now, tensor);
        if (tensor->written)
            continue;
        fprintf(now->to, "        const %s v%d = p%d[j]", type_of(tensor->value->shape.dtype), tensor->slot, i);
        if (own == APART)
            fprintf(now->to, "[k * %lldll];\n", (long long)tensor->column);
        else
            fprintf(now->to, own == PACKED ? ".at[k];\n" : ";\n");
    }
    for (int i = 0; i < nest->line_count; i++)
        write_line(now, &nest->lines[i], "        ");
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].written) {
            fprintf(now->to, "        p%d[j].at[k] = ", i);
            write_operand(now, nest->tensors[i].slot);
            fprintf(now->to, ";\n");
        }
    fprintf(now->to, "    }\n");
}

static void write_results(const writing *now) {
    const tu_nest *nest = now->nest;
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        const char *type = type_of(tensor->value->shape.dtype);
        if (!tensor->written)
            continue;
        if (form_of(now, tensor) == PACKED) {
            fprintf(now->to, "        put%s<%s, WIDTH>(args.at[%d], ", now->total >= PAST ? "_past" : "", type, i);
            write_place(now, tensor);
            fprintf(now->to, ", p%d[j]);\n", i);
            continue;
        }
        fprintf(now->to, "        UNROLL\n        for (int k = 0; k < WIDTH; k++)\n            ((%s *)args.at[%d])[(",
                type, i);
        write_place(now, tensor);
        fprintf(now->to, ") + k * %lldll] = p%d[j].at[k];\n", (long long)tensor->column, i);
    }
}

static void write_element(const writing *now) {
    fprintf(now->to, "template <int WIDTH, int PACKS> HERE void %s_at(const tu_places &args, int64_t element) {\n",
            now->name);
    write_reads(now);
    write_lanes(now);
    fprintf(now->to, "    UNROLL\n    for (int j = 0; j < PACKS; j++) {\n");
    write_pack_place(now);
    write_results(now);
    fprintf(now->to, "    }\n}\n");
}

static int64_t blocks_for(int64_t count, int64_t each) {
    int64_t blocks = (count + each - 1) / each;
    return blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS;
}

static void write_elements(writing *now, tu_emitted *emitted) {
    const tu_nest *nest = now->nest;
    now->width = width_of(nest);
    now->packs = now->total >= LONG ? 2 : 1;
    int64_t step = (int64_t)now->width * now->packs, each = now->packs > 1 ? step * TU_EMIT_THREADS : step;
    write_element(now);
    fprintf(now->to, "LOOP(%s) {\n", now->name);
    if (step > 1) {
        fprintf(now->to, "    const uintptr_t places = 0");
        for (int i = 0; i < nest->tensor_count; i++)
            if (form_of(now, &nest->tensors[i]) == PACKED)
                fprintf(now->to, " | (uintptr_t)args.at[%d]", i);
        fprintf(now->to, ";\n    const int64_t whole = places %% 16 == 0 ? %lld : 0;\n",
                (long long)(now->total / each * each));
        if (now->packs > 1)
            fprintf(now->to, "    EACH_PACK(first, whole, %d, %d)\n", now->width, now->packs);
        else
            fprintf(now->to, "    EACH_ELEMENT(first, 0, whole, %d)\n", now->width);
        fprintf(now->to, "        %s_at<%d, %d>(args, first);\n", now->name, now->width, now->packs);
    }
    fprintf(now->to, "    EACH_ELEMENT(first, %s, %lld, 1)\n        %s_at<1, 1>(args, first);\n}\n",
            step > 1 ? "whole" : "0", (long long)now->total, now->name);
    emitted->blocks = blocks_for(now->total / step + now->total % step, TU_EMIT_THREADS);
}

/* ---- rows: what comes when ---- */

/* How many reductions come before what a slot has. */
static void set_levels(writing *now) {
    tu_nest *nest = now->nest;
    for (int i = 0; i < nest->slot_count; i++)
        nest->slots[i].level = 0;
    for (int i = 0; i < nest->line_count; i++) {
        const tu_line *line = &nest->lines[i];
        int level = 0;
        for (int k = 0; k < line->in_count; k++)
            if (nest->slots[line->in[k]].level > level)
                level = nest->slots[line->in[k]].level;
        level += line->kind == TU_LINE_FOLD;
        nest->slots[line->out].level = level;
        now->depth = level > now->depth ? level : now->depth;
    }
}

/* One element for the whole row, read when the row begins. */
static bool is_of_row(const tu_nest_tensor *tensor) {
    return tensor->narrow || tensor->column == 0;
}

static bool is_fold_at(const writing *now, const tu_line *line, int level) {
    return line->kind == TU_LINE_FOLD && (level < 0 || out_of(now, line)->level == level);
}

/* Marks what a pass computes for each element: for the reductions of that level, or for results. */
static void mark(const writing *now, int level, bool results) {
    tu_nest *nest = now->nest;
    for (int i = 0; i < nest->slot_count; i++)
        nest->slots[i].needed = false;
    for (int i = 0; i < nest->tensor_count && results; i++)
        if (nest->tensors[i].written && !nest->tensors[i].narrow)
            nest->slots[nest->tensors[i].slot].needed = true;
    for (int i = 0; i < nest->line_count; i++)
        if (is_fold_at(now, &nest->lines[i], level))
            nest->slots[nest->lines[i].in[0]].needed = true;
    for (int i = nest->line_count - 1; i >= 0; i--) {
        const tu_line *line = &nest->lines[i];
        for (int k = 0; k < line->in_count && out_of(now, line)->needed && !out_of(now, line)->narrow; k++)
            nest->slots[line->in[k]].needed = true;
    }
}

static int64_t steps_of(const writing *now, int64_t columns) {
    return (columns + now->lanes - 1) / now->lanes;
}

/* Whether rows fit registers, and are read more than once. */
static bool can_keep(const writing *now) {
    const tu_nest *nest = now->nest;
    int64_t bytes = 0;
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        size_t size = tu_dtype_bytes[tensor->value->shape.dtype];
        if (!tensor->written && !is_of_row(tensor))
            bytes += steps_of(now, nest->columns) * (int64_t)(size < 4 ? 4 : size);
    }
    bool again = now->depth > 1;
    for (int i = 0; i < nest->tensor_count; i++)
        again = again || (nest->tensors[i].written && !nest->tensors[i].narrow);
    return !nest->is_long && again && bytes <= KEPT_BYTES;
}

/* ---- rows: their passes ---- */

static void write_row_begin(const writing *now) {
    const tu_nest *nest = now->nest;
    fprintf(now->to, "        const %s row = (%s)number;\n", index_of(now), index_of(now));
    write_numbers(now, "        ");
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        const char *type = type_of(tensor->value->shape.dtype);
        fprintf(now->to,
                tensor->written ? "        %s *const p%d = (%s *)args.at[%d] + ("
                                : "        const %s *const p%d = (const %s *)args.at[%d] + (",
                type, i, type, i);
        write_row_place(now, tensor);
        fprintf(now->to, "); /* %s */\n", tensor->value->name);
    }
    for (int i = 0; i < nest->tensor_count; i++)
        if (!nest->tensors[i].written && is_of_row(&nest->tensors[i]))
            fprintf(now->to, "        const %s v%d = *p%d;\n", type_of(nest->tensors[i].value->shape.dtype),
                    nest->tensors[i].slot, i);
}

/* Lines with one number for the row, of that level, behind its reductions. */
static void write_row_lines(const writing *now, int level) {
    const tu_nest *nest = now->nest;
    for (int i = 0; i < nest->line_count; i++)
        if (nest->lines[i].kind != TU_LINE_FOLD && out_of(now, &nest->lines[i])->narrow &&
            out_of(now, &nest->lines[i])->level == level)
            write_line(now, &nest->lines[i], "        ");
}

/* The columns of a lane between `begin`, a text, and `columns` behind it; elements that are not there are passed. */
static void write_columns_begin(const writing *now, const char *begin, int64_t columns, bool has_rest) {
    fprintf(now->to, "%s                for (int k = 0; k < %lld; k++) {\n",
            steps_of(now, columns) <= 64 ? "                UNROLL\n" : "", (long long)steps_of(now, columns));
    fprintf(now->to, "                    const int column = %s + k * %d + lane;\n", begin, now->lanes);
    if (has_rest)
        fprintf(now->to, "                    if (column >= %lld)\n                        break;\n",
                (long long)now->nest->columns);
}

/* The element of a row's column. */
static void write_at(const writing *now, int tensor, const char *behind) {
    int64_t stride = now->nest->tensors[tensor].column;
    if (stride == 1)
        fprintf(now->to, "p%d[column]%s", tensor, behind);
    else
        fprintf(now->to, "p%d[column * %lldll]%s", tensor, (long long)stride, behind);
}

static void write_element_reads(const writing *now, const char *begin) {
    const tu_nest *nest = now->nest;
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        if (tensor->written || is_of_row(tensor) || !nest->slots[tensor->slot].needed)
            continue;
        fprintf(now->to, "                    const %s v%d = ", type_of(tensor->value->shape.dtype), tensor->slot);
        if (now->keeps)
            fprintf(now->to, "HAD(kept%d)[%s / %d + k];\n", i, begin, now->lanes);
        else
            write_at(now, i, ";\n");
    }
}

static void write_element_lines(const writing *now) {
    const tu_nest *nest = now->nest;
    for (int i = 0; i < nest->line_count; i++)
        if (nest->lines[i].kind != TU_LINE_FOLD && out_of(now, &nest->lines[i])->needed &&
            !out_of(now, &nest->lines[i])->narrow)
            write_line(now, &nest->lines[i], "                    ");
}

static void write_element_results(const writing *now) {
    const tu_nest *nest = now->nest;
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].written && !nest->tensors[i].narrow) {
            fprintf(now->to, "                    ");
            write_at(now, i, " = ");
            write_operand(now, nest->tensors[i].slot);
            fprintf(now->to, ";\n");
        }
}

static void write_kept(const writing *now) {
    const tu_nest *nest = now->nest;
    int64_t steps = steps_of(now, nest->columns);
    for (int i = 0; i < nest->tensor_count; i++)
        if (!nest->tensors[i].written && !is_of_row(&nest->tensors[i]))
            fprintf(now->to, "        HELD(%s, kept%d, %lld);\n", type_of(nest->tensors[i].value->shape.dtype), i,
                    (long long)steps);
    fprintf(now->to, "        EACH_LANE(lane, %d) {\n", now->lanes);
    write_columns_begin(now, "0", nest->columns, nest->columns % now->lanes != 0);
    for (int i = 0; i < nest->tensor_count; i++)
        if (!nest->tensors[i].written && !is_of_row(&nest->tensors[i])) {
            fprintf(now->to, "                    HAD(kept%d)[k] = ", i);
            write_at(now, i, ";\n");
        }
    fprintf(now->to, "                }\n        }\n");
}

/* "h7 = fold_sum_f32::step(h7, v6);" for each reduction of the level, or their beginning. */
static void write_folds(const writing *now, int level, const char *indent, const char *how) {
    for (int i = 0; i < now->nest->line_count; i++) {
        const tu_line *line = &now->nest->lines[i];
        if (!is_fold_at(now, line, level) || (strcmp(how, "mean") == 0 && !line->mean))
            continue;
        const char *word = fold_word(line), *suffix = tu_emit_suffix(out_of(now, line)->dtype);
        const char *type = type_of(out_of(now, line)->dtype);
        int out = line->out;
        fprintf(now->to, "%s", indent);
        if (strcmp(how, "value") == 0)
            fprintf(now->to, "%s v%d = %s_%s::first();", type, out, word, suffix);
        else if (strcmp(how, "held") == 0)
            fprintf(now->to, "HELD(%s, h%d, 1);", type, out);
        else if (strcmp(how, "begin") == 0)
            fprintf(now->to, "HAD(h%d)[0] = %s_%s::first();", out, word, suffix);
        else if (strcmp(how, "step") == 0)
            fprintf(now->to, "HAD(h%d)[0] = %s_%s::step(HAD(h%d)[0], v%d);", out, word, suffix, out, line->in[0]);
        else if (strcmp(how, "end") == 0)
            fprintf(now->to, "v%d = %s_%s::step(v%d, FOLDED(%s_%s, %d, h%d));", out, word, suffix, out, word, suffix,
                    now->lanes, out);
        else
            fprintf(now->to, "v%d = (%s)((double)v%d * %a);", out, type, out, 1 / (double)now->nest->columns);
        fprintf(now->to, "\n");
    }
}

/* One block of a row, from the text `begin` on, into the lanes' h. */
static void write_block(const writing *now, const char *begin, int64_t columns, bool has_rest, int level, bool stores) {
    write_folds(now, level, "            ", "held");
    fprintf(now->to, "            EACH_LANE(lane, %d) {\n", now->lanes);
    write_folds(now, level, "                ", "begin");
    write_columns_begin(now, begin, columns, has_rest);
    write_element_reads(now, begin);
    write_element_lines(now);
    write_folds(now, level, "                    ", "step");
    if (stores)
        write_element_results(now);
    fprintf(now->to, "                }\n            }\n");
}

static void write_fold_pass(const writing *now, int level) {
    int64_t columns = now->nest->columns, block = columns < TU_FOLD_BLOCK ? columns : TU_FOLD_BLOCK;
    mark(now, level, false);
    write_folds(now, level, "        ", "value");
    fprintf(now->to, "%s        for (int block = 0; block < %lld; block += %d) {\n",
            now->keeps ? "        UNROLL\n" : "", (long long)columns, TU_FOLD_BLOCK);
    write_block(now, "block", block,
                columns % TU_FOLD_BLOCK % now->lanes != 0 || (columns > block && columns % block != 0), level, false);
    write_folds(now, level, "            ", "end");
    fprintf(now->to, "        }\n");
    write_folds(now, level, "        ", "mean");
}

static void write_last_pass(const writing *now) {
    const tu_nest *nest = now->nest;
    bool any = false;
    for (int i = 0; i < nest->tensor_count; i++)
        any = any || (nest->tensors[i].written && !nest->tensors[i].narrow);
    if (!any)
        return;
    mark(now, 0, true); /* no reduction has level 0 */
    fprintf(now->to, "        EACH_LANE(lane, %d) {\n", now->lanes);
    write_columns_begin(now, "0", nest->columns, nest->columns % now->lanes != 0);
    write_element_reads(now, "0");
    write_element_lines(now);
    write_element_results(now);
    fprintf(now->to, "                }\n        }\n");
}

static void write_row_results(const writing *now) {
    const tu_nest *nest = now->nest;
    bool any = false;
    for (int i = 0; i < nest->tensor_count; i++)
        any = any || (nest->tensors[i].written && nest->tensors[i].narrow);
    if (!any)
        return;
    fprintf(now->to, "        EACH_LANE(lane, %d) {\n            if (lane == 0) {\n", now->lanes);
    for (int i = 0; i < nest->tensor_count; i++)
        if (nest->tensors[i].written && nest->tensors[i].narrow) {
            fprintf(now->to, "                *p%d = ", i);
            write_operand(now, nest->tensors[i].slot);
            fprintf(now->to, ";\n");
        }
    fprintf(now->to, "            }\n        }\n");
}

static void write_rows(writing *now, tu_emitted *emitted) {
    now->keeps = can_keep(now);
    fprintf(now->to, "LOOP(%s) {\n    EACH_ROW(number, %lld, %d) {\n", now->name, (long long)now->row_count,
            now->lanes);
    write_row_begin(now);
    write_row_lines(now, 0);
    if (now->keeps)
        write_kept(now);
    for (int level = 1; level <= now->depth; level++) {
        write_fold_pass(now, level);
        write_row_lines(now, level);
    }
    write_last_pass(now);
    write_row_results(now);
    fprintf(now->to, "    }\n}\n");
    emitted->blocks = blocks_for(now->row_count, TU_EMIT_THREADS / now->lanes);
}

/* ---- long rows ---- */

/* Where a second kernel finds what unit number `unit` gave: in order, or, where one thread folds a part, the first
 * units of all parts, then the second ones: threads that are neighbours read neighbours. */
static void write_partial_place(FILE *to, const char *unit, int64_t parts) {
    if (parts == 1)
        fprintf(to, "%s", unit);
    else
        fprintf(to, "(%s) %% %d * %lldll + (%s) / %d", unit, PART / TU_FOLD_BLOCK, (long long)parts, unit,
                PART / TU_FOLD_BLOCK);
}

static void write_partials(const writing *now, bool stores, int64_t units, int64_t parts) {
    int place = 0;
    for (int i = 0; i < now->nest->line_count; i++) {
        const tu_line *line = &now->nest->lines[i];
        if (line->kind != TU_LINE_FOLD)
            continue;
        const char *type = type_of(out_of(now, line)->dtype);
        if (stores) {
            fprintf(now->to, "                ((%s *)(args.at[%d] + %lldll))[", type, now->nest->tensor_count,
                    (long long)(place * units * (int64_t)sizeof(double)));
            write_partial_place(now->to, "unit", parts);
            fprintf(now->to, "] = f%d;\n", line->out);
        } else {
            fprintf(now->to, "        const %s *const s%d = (const %s *)(args.at[%d] + %lldll);\n", type, line->out,
                    type, now->nest->tensor_count, (long long)(place * units * (int64_t)sizeof(double)));
        }
        place++;
    }
}

/* What the blocks of a row gave, one after the other; a single row has parts of blocks, which are a row again. */
static void write_joined(const writing *now, int64_t blocks, int64_t parts) {
    int64_t of_part = PART / TU_FOLD_BLOCK;
    write_folds(now, -1, "        ", "value");
    if (parts == 1) {
        fprintf(now->to, "        for (int64_t i = number * %lldll; i < (number + 1) * %lldll; i++) {\n",
                (long long)blocks, (long long)blocks);
        for (int i = 0; i < now->nest->line_count; i++)
            if (now->nest->lines[i].kind == TU_LINE_FOLD)
                fprintf(now->to, "            v%d = %s_%s::step(v%d, s%d[i]);\n", now->nest->lines[i].out,
                        fold_word(&now->nest->lines[i]), tu_emit_suffix(out_of(now, &now->nest->lines[i])->dtype),
                        now->nest->lines[i].out, now->nest->lines[i].out);
        fprintf(now->to, "        }\n");
        return;
    }
    fprintf(now->to, "        for (int64_t begin = 0; begin < %lldll; begin += %d) {\n", (long long)parts,
            TU_FOLD_BLOCK);
    write_folds(now, -1, "            ", "held");
    fprintf(now->to, "            EACH_LANE(lane, %d) {\n", now->lanes);
    write_folds(now, -1, "                ", "begin");
    fprintf(now->to,
            "                for (int64_t part = begin + lane; part < begin + %d && part < %lldll; part += %d) {\n",
            TU_FOLD_BLOCK, (long long)parts, now->lanes);
    for (int i = 0; i < now->nest->line_count; i++) {
        const tu_line *line = &now->nest->lines[i];
        if (line->kind != TU_LINE_FOLD)
            continue;
        const char *word = fold_word(line), *suffix = tu_emit_suffix(out_of(now, line)->dtype);
        fprintf(now->to, "                    %s f%d = %s_%s::first();\n", type_of(out_of(now, line)->dtype), line->out,
                word, suffix);
        fprintf(now->to, "                    UNROLL\n                    for (int k = 0; k < %lld; k++)\n",
                (long long)of_part);
        fprintf(now->to, "                        if (part * %lldll + k < %lldll)\n", (long long)of_part,
                (long long)blocks);
        fprintf(now->to, "                            f%d = %s_%s::step(f%d, s%d[k * %lldll + part]);\n", line->out,
                word, suffix, line->out, line->out, (long long)parts);
        fprintf(now->to, "                    HAD(h%d)[0] = %s_%s::step(HAD(h%d)[0], f%d);\n", line->out, word, suffix,
                line->out, line->out);
    }
    fprintf(now->to, "                }\n            }\n");
    write_folds(now, -1, "            ", "end");
    fprintf(now->to, "        }\n");
}

static void write_long_rows(writing *now, tu_emitted *emitted) {
    const tu_nest *nest = now->nest;
    int64_t blocks = (nest->columns + TU_FOLD_BLOCK - 1) / TU_FOLD_BLOCK, units = now->row_count * blocks;
    int64_t parts = now->row_count == 1 && nest->columns > 2 * PART ? (nest->columns + PART - 1) / PART : 1;
    int64_t room = parts > 1 ? parts * (PART / TU_FOLD_BLOCK) : units; /* for what the units give */
    int folds = 0;
    fprintf(now->to, "LOOP(%s) {\n    EACH_ROW(unit, %lld, %d) {\n", now->name, (long long)units, now->lanes);
    fprintf(now->to,
            "        const int64_t number = unit / %lldll;\n        const int block = (int)(unit %% %lldll) * %d;\n",
            (long long)blocks, (long long)blocks, TU_FOLD_BLOCK);
    write_row_begin(now);
    write_row_lines(now, 0);
    mark(now, -1, true);
    fprintf(now->to, "        {\n");
    write_block(now, "block", TU_FOLD_BLOCK, nest->columns % TU_FOLD_BLOCK != 0, -1, true);
    for (int i = 0; i < nest->line_count; i++) {
        const tu_line *line = &nest->lines[i];
        if (line->kind != TU_LINE_FOLD)
            continue;
        fprintf(now->to, "            const %s f%d = FOLDED(%s_%s, %d, h%d);\n", type_of(out_of(now, line)->dtype),
                line->out, fold_word(line), tu_emit_suffix(out_of(now, line)->dtype), now->lanes, line->out);
        folds++;
    }
    fprintf(now->to, "            EACH_LANE(lane, %d) {\n                if (lane == 0) {\n", now->lanes);
    write_partials(now, true, room, parts);
    fprintf(now->to, "                }\n            }\n        }\n    }\n}\n");
    fprintf(now->to, "LOOP(%s_rows) {\n    EACH_ROW(number, %lld, %d) {\n", now->name, (long long)now->row_count,
            now->lanes);
    write_row_begin(now);
    write_row_lines(now, 0);
    write_partials(now, false, room, parts);
    write_joined(now, blocks, parts);
    write_folds(now, -1, "        ", "mean");
    write_row_lines(now, 1);
    write_row_results(now);
    fprintf(now->to, "    }\n}\n");
    emitted->blocks = blocks_for(units, TU_EMIT_THREADS / now->lanes);
    emitted->more_blocks = blocks_for(now->row_count, TU_EMIT_THREADS / now->lanes);
    emitted->scratch = (size_t)(folds * room) * sizeof(double);
}

/* ---- all of it ---- */

static void write_nest(FILE *to, tu_nest *nest, const char *name, tu_emitted *emitted) {
    writing now = { .to = to, .nest = nest, .name = name, .lanes = 32 };
    now.row_count = nest->outer_count * nest->rows;
    now.total = now.row_count * nest->columns;
    now.small = fits_small(nest, now.total);
    *emitted = (tu_emitted){ .kernel = nest->number };
    write_comment(&now);
    set_levels(&now);
    for (int i = 0; i < nest->line_count; i++)
        if (nest->lines[i].kind == TU_LINE_FOLD && nest->slots[nest->lines[i].out].dtype == TUTTI_F64)
            now.lanes = 16;
    if (nest->split < 0)
        write_elements(&now, emitted);
    else if (nest->is_long)
        write_long_rows(&now, emitted);
    else
        write_rows(&now, emitted);
}

/* The kernel under a name that all share and without its comments: what makes it different from others. NULL: there is
 * no memory, and it is taken for one of its own. */
static char *essence_of(tu_nest *nest) {
    char *text = NULL;
    size_t bytes = 0;
    tu_emitted ignored;
    FILE *to = open_memstream(&text, &bytes);
    if (to == NULL)
        return NULL;
    write_nest(to, nest, "loop", &ignored);
    if (fclose(to) != 0 || text == NULL) {
        free(text);
        return NULL;
    }
    char *kept = text;
    for (const char *at = text; *at != 0;) {
        const char *end = at[0] == '/' && at[1] == '*' ? strstr(at, "*/") : NULL;
        if (end != NULL)
            at = end + 2;
        else
            *kept++ = *at++;
    }
    *kept = 0;
    return text;
}

/* Layers of a model are alike: what is written once serves all of them. */
void tu_emit_cuda(FILE *to, tu_nest *const *nests, int nest_count, tu_emitted *emitted) {
    char name[64];
    char **essences = calloc((size_t)nest_count + 1, sizeof *essences);
    fprintf(to, "/* Loops of a graph, written by Tutti. */\n#define TU_LOOP_PLACES %d\n", TU_NEST_TENSORS + 1);
    tu_device_text_write(to);
    tu_emit_operators(to, nests, nest_count);
    for (int i = 0; i < nest_count; i++) {
        int same = 0;
        if (essences != NULL)
            essences[i] = essence_of(nests[i]);
        while (same < i && (essences == NULL || essences[i] == NULL || essences[same] == NULL ||
                            strcmp(essences[i], essences[same]) != 0))
            same++;
        if (same < i) {
            emitted[i] = emitted[same];
            fprintf(to, "\n/* Loop %d is as loop %d. */\n", nests[i]->number, emitted[same].kernel);
            continue;
        }
        tu_emit_cuda_name(name, sizeof name, nests[i]->number, false);
        write_nest(to, nests[i], name, &emitted[i]);
    }
    for (int i = 0; essences != NULL && i < nest_count; i++)
        free(essences[i]);
    free(essences);
}
