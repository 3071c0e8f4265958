/* SPDX-License-Identifier: Apache-2.0
 *
 * Pictures of graphs: for Graphviz, and as SVG. In the SVG a vertex stands below all that it needs; what writes memory
 * is drawn with a thick edge, collectives and waits in colour, and order that only memory gives as dashed lines.
 */
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"

/* ---- what both draw: boxes by number, inputs first, then vertices ---- */

typedef struct box {
    const tu_value *input;
    const tu_vertex *vertex;
    int row, column;
} box;

typedef struct drawing {
    box *boxes;
    int count, rows, columns;
    int *maker; /* of each value, by its number: its box */
    int *last;  /* of each storage: the box that wrote it last, or -1 */
} drawing;

static void drawing_end(drawing *of) {
    free(of->boxes);
    free(of->maker);
    free(of->last);
}

static tutti_status drawing_begin(const tt_graph *graph, drawing *of) {
    size_t boxes = (size_t)(graph->input_count + graph->vertex_count) + 1;
    *of = (drawing){ .boxes = calloc(boxes, sizeof *of->boxes),
                     .maker = calloc((size_t)graph->value_count + 1, sizeof *of->maker),
                     .last = malloc(((size_t)graph->storage_count + 1) * sizeof *of->last) };
    if (of->boxes == NULL || of->maker == NULL || of->last == NULL) {
        drawing_end(of);
        return tu_error_memory("a picture of a graph", boxes * sizeof *of->boxes);
    }
    for (int i = 0; i < graph->input_count; i++) {
        of->maker[graph->inputs[i].value->number] = of->count;
        of->boxes[of->count++].input = graph->inputs[i].value;
    }
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        for (int i = 0; i < vertex->result_count; i++)
            of->maker[vertex->results[i]->number] = of->count;
        of->boxes[of->count++].vertex = vertex;
    }
    for (int i = 0; i < graph->storage_count; i++)
        of->last[i] = -1;
    return TUTTI_OK;
}

/* An arrow from one box to another; `memory` where only the order of writes asks for it. */
typedef void arrow(FILE *to, const drawing *of, int from, int target, bool memory);

/* Every arrow into a box; writes are remembered on the way, so boxes must be asked in order. */
static void arrows_into(FILE *to, drawing *of, int target, arrow *draw) {
    const tu_vertex *vertex = of->boxes[target].vertex;
    for (int i = 0; vertex != NULL && i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL)
            continue;
        draw(to, of, of->maker[value->number], target, false);
        if (of->last[value->storage] >= 0 && of->last[value->storage] != of->maker[value->number])
            draw(to, of, of->last[value->storage], target, true);
    }
    for (int i = 0; vertex != NULL && i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i))
            of->last[vertex->operands[i].value->storage] = target;
}

/* Text in quotes or in XML: names have no signs that would need care, but for these. */
static void print_label(FILE *to, const box *one, bool xml) {
    tu_text text;
    if (one->input != NULL) {
        fprintf(to, "%s%s", one->input->name, xml ? " " : "\\n");
        tu_shape_print(to, &one->input->shape);
        return;
    }
    if (tu_text_begin(&text) != TUTTI_OK)
        return;
    tu_vertex_print(text.to, one->vertex);
    char *made = tu_text_end(&text);
    for (const char *at = made; at != NULL && *at != 0; at++)
        switch (*at) {
        case '<':
            fputs("&lt;", to);
            break;
        case '&':
            fputs("&amp;", to);
            break;
        case '"':
            fputs(xml ? "&quot;" : "\\\"", to);
            break;
        default:
            fputc(*at, to);
        }
    free(made);
}

static const char *colour_of(const box *one) {
    if (one->input != NULL)
        return "#e8eef7";
    if (one->vertex->entry->flags & TU_STARTS)
        return "#ffe0b2";
    if (strcmp(one->vertex->entry->name, "wait") == 0)
        return "#fff3c4";
    return one->vertex->entry->flags & TU_VIEW ? "#f3f3f3" : "#ffffff";
}

static bool writes(const box *one) {
    return one->vertex != NULL && (one->vertex->in_place || one->vertex->result_count == 0);
}

static bool begin(const char *who, const tt_graph *graph, FILE *file, drawing *of) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (graph == NULL || file == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s is NULL", who, graph == NULL ? "graph" : "file");
        return false;
    }
    return tu_pending_take(drawing_begin(graph, of)) == TUTTI_OK;
}

static bool end(const char *who, FILE *file, drawing *of) {
    drawing_end(of);
    if (ferror(file))
        tu_fail(TUTTI_ERROR_SYSTEM, "%s: the file cannot be written", who);
    return tu_self()->pending == TUTTI_OK;
}

/* ---- Graphviz ---- */

static void dot_arrow(FILE *to, const drawing *of, int from, int target, bool memory) {
    (void)of;
    fprintf(to, "    b%d -> b%d%s;\n", from, target, memory ? " [style=dashed]" : "");
}

bool tt_graph_print_dot(const tt_graph *graph, FILE *file) {
    drawing of;
    if (!begin("graph_print_dot", graph, file, &of))
        return false;
    fputs("digraph graph_of_tutti {\n    node [shape=box, style=filled, fontname=monospace];\n", file);
    for (int i = 0; i < of.count; i++) {
        fprintf(file, "    b%d [fillcolor=\"%s\"%s, label=\"", i, colour_of(&of.boxes[i]),
                writes(&of.boxes[i]) ? ", penwidth=2" : "");
        print_label(file, &of.boxes[i], false);
        fputs("\"];\n", file);
        arrows_into(file, &of, i, dot_arrow);
    }
    fputs("    out [shape=ellipse, label=\"return\"];\n", file);
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value != NULL)
            fprintf(file, "    b%d -> out;\n", of.maker[graph->outputs[i].value->number]);
    fputs("}\n", file);
    return end("graph_print_dot", file, &of);
}

/* ---- SVG ---- */

#define BOX_WIDTH 420
#define BOX_HEIGHT 26
#define ROW_HEIGHT 54
#define COLUMN_WIDTH 440

static void lower(FILE *to, const drawing *of, int from, int target, bool memory) {
    (void)to, (void)memory;
    if (of->boxes[target].row <= of->boxes[from].row)
        of->boxes[target].row = of->boxes[from].row + 1;
}

static void svg_arrow(FILE *to, const drawing *of, int from, int target, bool memory) {
    const box *above = &of->boxes[from], *below = &of->boxes[target];
    int x1 = above->column * COLUMN_WIDTH + BOX_WIDTH / 2 + 10, y1 = above->row * ROW_HEIGHT + BOX_HEIGHT + 10;
    int x2 = below->column * COLUMN_WIDTH + BOX_WIDTH / 2 + 10, y2 = below->row * ROW_HEIGHT + 10;
    fprintf(to, "<path d=\"M%d %d C%d %d %d %d %d %d\" class=\"%s\"/>\n", x1, y1, x1, y1 + 20, x2, y2 - 20, x2, y2,
            memory ? "m" : "d");
}

static void place_boxes(drawing *of) {
    int *used = calloc((size_t)of->count + 1, sizeof *used);
    for (int i = 0; i < of->count; i++) {
        box *one = &of->boxes[i];
        one->column = used != NULL ? used[one->row]++ : 0;
        of->rows = one->row >= of->rows ? one->row + 1 : of->rows;
        of->columns = one->column >= of->columns ? one->column + 1 : of->columns;
    }
    free(used);
}

bool tt_graph_print_svg(const tt_graph *graph, FILE *file) {
    drawing of;
    if (!begin("graph_print_svg", graph, file, &of))
        return false;
    for (int i = 0; i < of.count; i++)
        arrows_into(NULL, &of, i, lower);
    place_boxes(&of);
    for (int i = 0; i < graph->storage_count; i++)
        of.last[i] = -1;
    fprintf(
        file,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"monospace\" "
        "font-size=\"11\">\n<style>path{fill:none;stroke:#888}path.m{stroke-dasharray:4 3}rect{stroke:#444}</style>\n",
        of.columns * COLUMN_WIDTH + 20, of.rows * ROW_HEIGHT + 20);
    for (int i = 0; i < of.count; i++)
        arrows_into(file, &of, i, svg_arrow);
    for (int i = 0; i < of.count; i++) {
        const box *one = &of.boxes[i];
        int x = one->column * COLUMN_WIDTH + 10, y = one->row * ROW_HEIGHT + 10;
        fprintf(file,
                "<svg x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"><rect width=\"100%%\" height=\"100%%\" "
                "fill=\"%s\" stroke-width=\"%d\"/><text x=\"6\" y=\"17\">",
                x, y, BOX_WIDTH, BOX_HEIGHT, colour_of(one), writes(one) ? 3 : 1);
        print_label(file, one, true);
        fputs("</text></svg>\n", file);
    }
    fputs("</svg>\n", file);
    return end("graph_print_svg", file, &of);
}
