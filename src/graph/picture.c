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
    const tu_value *input; /* NULL of both: the return */
    const tu_vertex *vertex;
    char *lines[2]; /* what is written in it; of the SVG */
    int row, width, x;
    double pull; /* where its makers are, on average */
} box;

typedef struct drawing {
    box *boxes;
    int count, rows, width;
    int *maker; /* of each value, by its number: its box */
    int *last;  /* of each storage: the box that wrote it last, or -1 */
} drawing;

static void drawing_end(drawing *of) {
    for (int i = 0; of->boxes != NULL && i <= of->count; i++) {
        free(of->boxes[i].lines[0]);
        free(of->boxes[i].lines[1]);
    }
    free(of->boxes);
    free(of->maker);
    free(of->last);
}

static tutti_status drawing_begin(const tt_graph *graph, drawing *of) {
    size_t boxes = (size_t)(graph->input_count + graph->vertex_count) + 1; /* and the return */
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

/* Text in quotes: names have no signs that would need care, but for these. */
static void print_label(FILE *to, const box *one) {
    tu_text text;
    if (one->input != NULL) {
        fprintf(to, "%s\\n", one->input->name);
        tu_shape_print(to, &one->input->shape);
        return;
    }
    if (tu_text_begin(&text) != TUTTI_OK)
        return;
    tu_vertex_print(text.to, one->vertex);
    char *made = tu_text_end(&text);
    for (const char *at = made; at != NULL && *at != 0; at++) {
        if (*at == '"' || *at == '\\')
            fputc('\\', to);
        fputc(*at, to);
    }
    free(made);
}

static const char *colour_of(const box *one) {
    if (one->vertex == NULL)
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
        print_label(file, &of.boxes[i]);
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

#define LETTER 7 /* wide, of the font below */
#define BOX_HEIGHT 40
#define ROW_HEIGHT 76
#define GAP 24
#define MARGIN 20
#define LEGEND 46
#define LINE 64 /* letters of a line, at most; the whole text is shown under the pointer */

static int letters(const char *text) {
    int count = 0;
    for (; text != NULL && *text != 0; text++)
        count += (*text & 0xc0) != 0x80; /* not the further bytes of a letter */
    return count;
}

static void print_xml(FILE *to, const char *text, int most) {
    bool cut = letters(text) > most;
    for (int i = 0; text != NULL && *text != 0 && (!cut || i < most - 1); text++, i++)
        switch (*text) {
        case '<':
            fputs("&lt;", to);
            break;
        case '>':
            fputs("&gt;", to);
            break;
        case '&':
            fputs("&amp;", to);
            break;
        case '"':
            fputs("&quot;", to);
            break;
        default:
            fputc(*text, to);
        }
    fputs(cut ? "\xe2\x80\xa6" : "", to);
}

/* What is made stands in the first line, the call that makes it in the second. */
static tutti_status write_lines(const tt_graph *graph, box *one) {
    tu_text first, second;
    tutti_status status = tu_text_begin(&first);
    if (status != TUTTI_OK)
        return status;
    status = tu_text_begin(&second);
    if (status != TUTTI_OK) {
        free(tu_text_end(&first));
        return status;
    }
    if (one->input != NULL) {
        fprintf(first.to, "%s", one->input->name);
        tu_shape_print(second.to, &one->input->shape);
    } else if (one->vertex != NULL) {
        tu_vertex_print_results(first.to, one->vertex);
        tu_vertex_print_call(second.to, one->vertex);
    } else {
        fputs("return", first.to);
        for (int i = 0; i < graph->output_count; i++)
            fprintf(second.to, "%s%s", i > 0 ? ", " : "",
                    graph->outputs[i].value != NULL ? graph->outputs[i].value->name : "none");
    }
    one->lines[0] = tu_text_end(&first);
    one->lines[1] = tu_text_end(&second);
    if (one->lines[0] == NULL || one->lines[1] == NULL)
        return TUTTI_ERROR_MEMORY;
    int longest = letters(one->lines[0]) > letters(one->lines[1]) ? letters(one->lines[0]) : letters(one->lines[1]);
    one->width = (longest < LINE ? longest : LINE) * LETTER + 16;
    return TUTTI_OK;
}

/* ---- where boxes stand ---- */

static void lower(FILE *to, const drawing *of, int from, int target, bool memory) {
    (void)to, (void)memory;
    if (of->boxes[target].row <= of->boxes[from].row)
        of->boxes[target].row = of->boxes[from].row + 1;
}

/* An input stands right above the first that uses it. */
static void lower_input(FILE *to, const drawing *of, int from, int target, bool memory) {
    (void)to, (void)memory;
    box *one = &of->boxes[from];
    if (one->input != NULL && (one->row < 0 || one->row >= of->boxes[target].row))
        one->row = of->boxes[target].row - 1;
}

/* Adds up where makers are; `width` counts them meanwhile. */
static void pull(FILE *to, const drawing *of, int from, int target, bool memory) {
    (void)to;
    if (memory)
        return;
    of->boxes[target].pull += of->boxes[from].x + of->boxes[from].width / 2.0;
}

static void forget_writes(const tt_graph *graph, drawing *of) {
    for (int i = 0; i < graph->storage_count; i++)
        of->last[i] = -1;
}

static void place_rows(const tt_graph *graph, drawing *of) {
    for (int i = 0; i < of->count; i++)
        arrows_into(NULL, of, i, lower);
    for (int i = 0; i < of->count; i++)
        of->boxes[i].row = of->boxes[i].input != NULL ? -1 : of->boxes[i].row;
    forget_writes(graph, of);
    for (int i = 0; i < of->count; i++)
        arrows_into(NULL, of, i, lower_input);
    for (int i = 0; i < of->count; i++) {
        of->boxes[i].row = of->boxes[i].row < 0 ? 0 : of->boxes[i].row;
        of->rows = of->boxes[i].row >= of->rows ? of->boxes[i].row + 1 : of->rows;
    }
    of->boxes[of->count].row = of->rows++;
}

static int operands_of(const box *one) {
    int count = 0;
    for (int i = 0; one->vertex != NULL && i < one->vertex->operand_count; i++)
        count += one->vertex->operands[i].value != NULL;
    return count;
}

static int compare_pulls(const void *left, const void *right) {
    const box *first = *(box *const *)left, *second = *(box *const *)right;
    return first->pull < second->pull ? -1 : first->pull > second->pull ? 1 : first < second ? -1 : 1;
}

/* Boxes of a row stand side by side, in the order of what they are made of, and the row in the middle. */
static void place_row(drawing *of, box **order, int count) {
    int width = -GAP;
    qsort(order, (size_t)count, sizeof *order, compare_pulls);
    for (int i = 0; i < count; i++)
        width += order[i]->width + GAP;
    int x = MARGIN + (of->width - width) / 2;
    for (int i = 0; i < count; i++) {
        order[i]->x = x;
        x += order[i]->width + GAP;
    }
}

static tutti_status place_boxes(const tt_graph *graph, drawing *of) {
    box **order = malloc(((size_t)of->count + 1) * sizeof(box *));
    int *widths = calloc((size_t)of->rows + 1, sizeof *widths);
    if (order == NULL || widths == NULL) {
        free(order);
        free(widths);
        return tu_error_memory("a picture of a graph", (size_t)of->count * sizeof(box *));
    }
    for (int i = 0; i <= of->count; i++) {
        int *width = &widths[of->boxes[i].row];
        *width += of->boxes[i].width + (*width > 0 ? GAP : 0);
        of->width = *width > of->width ? *width : of->width;
    }
    for (int row = 0; row < of->rows; row++) {
        int count = 0;
        forget_writes(graph, of);
        for (int i = 0; i <= of->count; i++) {
            if (of->boxes[i].row != row)
                continue;
            if (i < of->count)
                arrows_into(NULL, of, i, pull);
            int makers = operands_of(&of->boxes[i]);
            of->boxes[i].pull = makers > 0 ? of->boxes[i].pull / makers : of->width / 2.0;
            order[count++] = &of->boxes[i];
        }
        place_row(of, order, count);
    }
    free(order);
    free(widths);
    return TUTTI_OK;
}

/* ---- drawing ---- */

static int top_of(const box *one) {
    return LEGEND + MARGIN + one->row * ROW_HEIGHT;
}

static void svg_arrow(FILE *to, const drawing *of, int from, int target, bool memory) {
    const box *above = &of->boxes[from], *below = &of->boxes[target];
    int x1 = above->x + above->width / 2, y1 = top_of(above) + BOX_HEIGHT, x2 = below->x + below->width / 2,
        y2 = top_of(below) - 2;
    fprintf(to, "<path d=\"M%d %d C%d %d %d %d %d %d\" class=\"%s\" marker-end=\"url(#head)\"/>\n", x1, y1, x1, y1 + 24,
            x2, y2 - 24, x2, y2, memory ? "order" : "data");
}

static void draw_box(FILE *file, const box *one) {
    int x = one->x, y = top_of(one);
    fputs("<g><title>", file);
    print_xml(file, one->lines[0], INT32_MAX);
    fputs(one->lines[0][0] != 0 ? " = " : "", file);
    print_xml(file, one->lines[1], INT32_MAX);
    fprintf(file,
            "</title><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"4\" fill=\"%s\" "
            "stroke-width=\"%d\"/>",
            x, y, one->width, BOX_HEIGHT, colour_of(one), writes(one) ? 3 : 1);
    bool alone = one->lines[0][0] == 0; /* a call that makes nothing stands in the middle */
    for (int i = alone; i < 2; i++) {
        fprintf(file, "<text x=\"%d\" y=\"%d\"%s>", x + 8, alone ? y + 24 : y + 16 + i * 16,
                i == 0 ? " class=\"made\"" : "");
        print_xml(file, one->lines[i], LINE);
        fputs("</text>", file);
    }
    fputs("</g>\n", file);
}

static void draw_legend(FILE *file) {
    static const struct {
        const char *colour, *words;
        int edge;
    } kinds[] = { { "#e8eef7", "input", 1 }, { "#ffffff", "computes", 1 },
                  { "#f3f3f3", "view", 1 },  { "#ffe0b2", "starts a collective", 1 },
                  { "#fff3c4", "wait", 3 },  { "#ffffff", "writes", 3 } };
    int x = MARGIN;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        fprintf(file,
                "<rect x=\"%d\" y=\"%d\" width=\"18\" height=\"14\" rx=\"3\" fill=\"%s\" stroke-width=\"%d\" "
                "class=\"legend\"/><text x=\"%d\" y=\"%d\">%s</text>\n",
                x, MARGIN, kinds[i].colour, kinds[i].edge, x + 24, MARGIN + 11, kinds[i].words);
        x += 24 + letters(kinds[i].words) * LETTER + GAP;
    }
    fprintf(file, "<path d=\"M%d %d h30\" class=\"order\"/><text x=\"%d\" y=\"%d\">order of writes</text>\n", x,
            MARGIN + 7, x + 36, MARGIN + 11);
}

static void draw(const tt_graph *graph, drawing *of, FILE *file) {
    int width = of->width + 2 * MARGIN, height = LEGEND + 2 * MARGIN + of->rows * ROW_HEIGHT;
    width = width < 860 ? 860 : width; /* the legend's */
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "font-family=\"monospace\" font-size=\"11\">\n"
            "<style>path{fill:none;stroke:#666}path.order{stroke-dasharray:4 3;stroke:#b3541e}"
            "rect{stroke:#444}.made{font-weight:bold}</style>\n"
            "<defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" "
            "markerHeight=\"7\" orient=\"auto\"><polygon points=\"0,0 8,4 0,8\" fill=\"#666\"/></marker></defs>\n"
            "<polygon points=\"0,0 %d,0 %d,%d 0,%d\" fill=\"#fff\"/>\n",
            width, height, width, height, width, width, height, height);
    draw_legend(file);
    forget_writes(graph, of);
    for (int i = 0; i < of->count; i++)
        arrows_into(file, of, i, svg_arrow);
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value != NULL)
            svg_arrow(file, of, of->maker[graph->outputs[i].value->number], of->count, false);
    for (int i = 0; i <= of->count; i++)
        draw_box(file, &of->boxes[i]);
    fputs("</svg>\n", file);
}

bool tt_graph_print_svg(const tt_graph *graph, FILE *file) {
    drawing of;
    if (!begin("graph_print_svg", graph, file, &of))
        return false;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i <= of.count && status == TUTTI_OK; i++)
        status = write_lines(graph, &of.boxes[i]);
    if (status == TUTTI_OK) {
        place_rows(graph, &of);
        status = place_boxes(graph, &of);
    }
    if (tu_pending_take(status) == TUTTI_OK)
        draw(graph, &of, file);
    return end("graph_print_svg", file, &of);
}
