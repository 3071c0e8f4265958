/* SPDX-License-Identifier: Apache-2.0
 *
 * Nests as text.
 */
#include "loops/nest.h"

static void print_slot(FILE *to, const tu_nest *nest, int index) {
    const tu_slot *slot = &nest->slots[index];
    if (!slot->constant) {
        fprintf(to, "s%d", index);
        return;
    }
    double number = 0;
    if (tutti_convert(slot->number, slot->dtype, &number, TUTTI_F64, 1) == TUTTI_OK)
        tu_number_print(to, number);
}

static void print_attributes(FILE *to, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->entry->argument_count; i++) {
        const tu_argument *argument = &vertex->entry->arguments[i];
        if (argument->type == TT_ARGUMENT_TENSOR || argument->type == TT_ARGUMENT_TENSORS)
            continue;
        fprintf(to, ", ");
        tu_attribute_print(to, argument, (const char *)vertex->attributes + argument->offset);
    }
}

static void print_line(FILE *to, const tu_nest *nest, const tu_line *line) {
    const tu_slot *out = &nest->slots[line->out];
    fprintf(to, "    s%d: %s%s = ", line->out, tutti_dtype_name(out->dtype), out->narrow ? " row" : "");
    fprintf(to, "%s(",
            line->kind != TU_LINE_CONVERT                  ? line->vertex->entry->name
            : nest->slots[line->in[0]].dtype == out->dtype ? "copy"
                                                           : "convert");
    for (int i = 0; i < line->in_count; i++) {
        fprintf(to, i == 0 ? "" : ", ");
        print_slot(to, nest, line->in[i]);
    }
    if (line->kind == TU_LINE_POINTWISE)
        print_attributes(to, line->vertex);
    fprintf(to, ")%s%s\n", out->value != NULL ? "    # " : "", out->value != NULL ? out->value->name : "");
}

void tu_nest_print(FILE *to, const tu_nest *nest) {
    fprintf(to, "loop %d: %lld x %lld x %lld in pieces of %lld x %lld, %d buffers of %zu bytes\n", nest->number,
            (long long)nest->outer_count, (long long)nest->rows, (long long)nest->columns, (long long)nest->piece_rows,
            (long long)nest->piece_columns, nest->buffer_count, nest->buffer_bytes);
    for (int i = 0; i < nest->tensor_count; i++) {
        const tu_nest_tensor *tensor = &nest->tensors[i];
        fprintf(to, "    %s s%d %s: ",
                tensor->fresh     ? "makes"
                : tensor->written ? "writes"
                                  : "reads",
                tensor->slot, tensor->value->name);
        tu_shape_print(to, &tensor->value->shape);
        fprintf(to, "\n");
    }
    for (int i = 0; i < nest->action_count; i++) {
        const tu_action *action = &nest->actions[i];
        if (action->stage >= 0)
            fprintf(to, "    compiled:\n");
        else if (action->end > action->line + 1)
            fprintf(to, "    at once:\n");
        for (int line = action->line; line < action->end; line++)
            print_line(to, nest, &nest->lines[line]);
    }
}
