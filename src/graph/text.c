/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs as text. parse.c reads what is written here.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/device.h>
#include <tutti/dtype.h>

#include "graph/graph.h"

/* ---- a text in memory ---- */

tutti_status tu_text_begin(tu_text *text) {
    *text = (tu_text){ NULL, NULL, 0 };
    text->to = open_memstream(&text->at, &text->bytes);
    return text->to != NULL ? TUTTI_OK : tu_error_memory("a text", 1);
}

char *tu_text_end(tu_text *text) {
    bool failed = ferror(text->to) != 0;
    failed = fclose(text->to) != 0 || failed;
    if (!failed)
        return text->at;
    free(text->at);
    tu_error_memory("a text", text->bytes);
    return NULL;
}

/* ---- pieces ---- */

static void print_list(FILE *to, int count, const int64_t *at) {
    fputc('[', to);
    for (int i = 0; i < count; i++)
        fprintf(to, "%s%" PRId64, i > 0 ? ", " : "", at[i]);
    fputc(']', to);
}

void tu_shape_print(FILE *to, const tu_shape *shape) {
    fprintf(to, "%s ", tutti_dtype_name(shape->dtype));
    print_list(to, shape->ndim, shape->sizes);
    if (!tu_shape_is_row_major(shape)) {
        fprintf(to, " strides ");
        print_list(to, shape->ndim, shape->strides);
    }
    if (shape->offset != 0)
        fprintf(to, " offset %" PRId64, shape->offset);
    if (shape->device != TUTTI_CPU)
        fprintf(to, " on %s", tutti_device_name(shape->device));
}

/* Real numbers have a point, an exponent or letters, so that they read as what they are. (%.15g of a whole number below
 * 1e15 has none of these.) */
static void print_operand(FILE *to, const tu_operand *operand) {
    if (operand->value != NULL) {
        fputs(operand->value->name, to);
    } else if (operand->number == TUTTI_I64) {
        fprintf(to, "%" PRId64, operand->at.whole);
    } else if (operand->number == TUTTI_F64) {
        tu_number_print(to, operand->at.real);
        if (operand->at.real == rint(operand->at.real) && fabs(operand->at.real) < 1e15)
            fputs(".0", to);
    } else {
        fputs("none", to);
    }
}

static void print_arguments(FILE *to, const tu_vertex *vertex) {
    const tu_operator *entry = vertex->entry;
    int operand = 0;
    for (int i = 0; i < entry->argument_count; i++) {
        const tu_argument *argument = &entry->arguments[i];
        fputs(i > 0 ? ", " : "", to);
        if (argument->type == TT_ARGUMENT_TENSOR) {
            print_operand(to, &vertex->operands[operand++]);
        } else if (argument->type == TT_ARGUMENT_TENSORS) {
            fputc('[', to);
            for (int k = 0; operand < vertex->operand_count; k++) {
                fputs(k > 0 ? ", " : "", to);
                print_operand(to, &vertex->operands[operand++]);
            }
            fputc(']', to);
        } else {
            tu_attribute_print(to, argument, (const char *)vertex->attributes + argument->offset);
        }
    }
}

static void print_value(FILE *to, const tu_value *value) {
    fprintf(to, "%s: ", value->name);
    tu_shape_print(to, &value->shape);
}

void tu_vertex_print_results(FILE *to, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->result_count; i++) {
        fputs(i > 0 ? "; " : "", to);
        print_value(to, vertex->results[i]);
    }
}

void tu_vertex_print_call(FILE *to, const tu_vertex *vertex) {
    fprintf(to, "%s%s(", vertex->entry->name, vertex->in_place ? "_" : "");
    print_arguments(to, vertex);
    fputc(')', to);
}

void tu_vertex_print(FILE *to, const tu_vertex *vertex) {
    tu_vertex_print_results(to, vertex);
    fputs(vertex->result_count > 0 ? " = " : "", to);
    tu_vertex_print_call(to, vertex);
}

/* The first input on the same storage, where that is an earlier one. */
static const tu_value *shares_with(const tt_graph *graph, int input) {
    for (int i = 0; i < input; i++)
        if (graph->inputs[i].value->storage == graph->inputs[input].value->storage)
            return graph->inputs[i].value;
    return NULL;
}

static void print_inputs(FILE *to, const tt_graph *graph) {
    static const char *const kinds[] = { "", " constant", " slot", " gradient", " saved", " tangent" };
    for (int i = 0; i < graph->input_count; i++) {
        const tu_graph_input *input = &graph->inputs[i];
        const tu_value *other = shares_with(graph, i);
        fputs(i > 0 ? ", " : "", to);
        print_value(to, input->value);
        fprintf(to, "%s%s%s", kinds[input->kind], input->value->flags & TU_IS_PARAMETER ? " parameter" : "",
                input->value->flags & TU_REQUIRES_GRAD ? " grad" : "");
        if (other != NULL)
            fprintf(to, " shares %s", other->name);
    }
}

void tu_graph_print(FILE *to, const tt_graph *graph) {
    fputs("graph(", to);
    print_inputs(to, graph);
    fputs("):\n", to);
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        fputs("    ", to);
        tu_vertex_print(to, vertex);
        fputc('\n', to);
    }
    for (int i = 0; i < graph->effect_count; i++)
        fprintf(to, "    # a module's slot is left with %s\n",
                graph->effects[i].value != NULL ? graph->effects[i].value->name : "nothing");
    fputs("    return (", to);
    for (int i = 0; i < graph->output_count; i++) {
        fputs(i > 0 ? ", " : "", to);
        print_operand(to, &graph->outputs[i]);
    }
    fputs(")\n", to);
}

/* ---- the calls ---- */

bool tt_graph_print(const tt_graph *graph, FILE *file) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (graph == NULL || file == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "graph_print: %s is NULL", graph == NULL ? "graph" : "file");
        return false;
    }
    tu_graph_print(file, graph);
    if (ferror(file))
        tu_fail(TUTTI_ERROR_SYSTEM, "graph_print: the file cannot be written");
    return tu_self()->pending == TUTTI_OK;
}

char *tt_graph_text(const tt_graph *graph) {
    tu_text text;
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (graph == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "graph_text: graph is NULL");
        return NULL;
    }
    if (tu_pending_take(tu_text_begin(&text)) != TUTTI_OK)
        return NULL;
    tu_graph_print(text.to, graph);
    char *result = tu_text_end(&text);
    if (result == NULL)
        tu_pending_take(TUTTI_ERROR_MEMORY);
    return result;
}
