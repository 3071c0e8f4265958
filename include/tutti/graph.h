/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs: a function of tensors, captured as the list of operators that it calls; to look at, to rewrite, to run.
 *
 *     static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
 *         outputs[0] = tt_relu(tt_add_scalar(tt_mul_scalar(inputs.at[0], 2), 1));
 *         return 1;
 *     }
 *
 *     tt_graph *graph;
 *     tt_capture(chain, NULL, tt_tensors(x), &graph);
 *     tt_graph_print(graph, stdout);
 *     tt_tensor_list results = tt_graph_run(graph, tt_tensors(y));
 *     tt_graph_release(&graph);
 *
 * prints
 *
 *     graph(input: f32 [4]):
 *         mul_scalar: f32 [4] = mul_scalar(input, number=2)
 *         add_scalar: f32 [4] = add_scalar(mul_scalar, number=1)
 *         relu: f32 [4] = relu(add_scalar)
 *         return (relu)
 *
 * A capture runs the function once, on tensors that have shapes and no data. What changes from run to run is a tensor:
 * an input, or what a module's slot holds. Every other number and tensor that the function meets is frozen; such
 * tensors are listed as constants when the graph is printed, and the graph keeps them alive. What would need data on
 * the host (tt_item, tt_data, tt_equal …) is an error of status TUTTI_ERROR_CAPTURE that names the function.
 *
 * In the graph are: operators in place and not, views, storage sizes, versions, gradients (a backward inside the
 * function is part of it, and its hooks with it), what random generators give, and collectives, each as two vertices,
 * its start and a wait.
 */
#ifndef TUTTI_GRAPH_H
#define TUTTI_GRAPH_H

#include <stdio.h>

#include <tutti/tensor.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A function that can be captured: ordinary tt_ code. Puts its results, of which entries may be NULL, in `outputs`
 * (room for TT_GRAPH_OUTPUTS) and returns how many there are. */
typedef int tt_compile_function(tt_tensor_list inputs, tt_tensor **outputs, void *user);
#define TT_GRAPH_OUTPUTS 256

typedef struct tt_graph tt_graph;

/* Captures what the function does with inputs like these; none of them is read or changed. The graph is the caller's,
 * and ends with tt_graph_release. */
TUTTI_API bool tt_capture(tt_compile_function *function, void *user, tt_tensor_list inputs, tt_graph **graph);
/* Ends the caller's reference, and sets *graph to NULL. */
TUTTI_API void tt_graph_release(tt_graph **graph);

/* Runs the graph, one operator after the other. Inputs must have the dtype, device, sizes and strides of those that it
 * was captured with. No history is recorded: results do not require grad. */
TUTTI_API tt_tensor_list tt_graph_run(tt_graph *graph, tt_tensor_list inputs);

/* ---- looking ---- */

/* One line per vertex: its results with dtype and sizes (strides where they are not row-major), the operator, what it
 * is given. The text is stable, and tt_graph_parse reads it. */
TUTTI_API bool tt_graph_print(const tt_graph *graph, FILE *file);
/* The same as a string, which ends with tutti_free. */
TUTTI_API char *tt_graph_text(const tt_graph *graph);
/* A picture in the language of Graphviz. */
TUTTI_API bool tt_graph_print_dot(const tt_graph *graph, FILE *file);
/* A picture for a browser. */
TUTTI_API bool tt_graph_print_svg(const tt_graph *graph, FILE *file);

typedef struct tt_graph_counts {
    size_t size;
    int vertices, inputs, constants, outputs;
    int collectives; /* starts of them */
} tt_graph_counts;
#define TT_GRAPH_COUNTS_INIT TUTTI_DEFAULTS(tt_graph_counts)
/* TT_GRAPH_COUNTS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_graph_counts_init(tt_graph_counts *counts, size_t size);
/* How much there is of what. */
TUTTI_API bool tt_graph_count(const tt_graph *graph, tt_graph_counts *counts);
/* How many vertices call the operator of that name, as it stands in the text: "add" or "add_". */
TUTTI_API int tt_graph_count_of(const tt_graph *graph, const char *name);

/* ---- text, read back ---- */

/* The graph that a text tells. Constants become inputs, after the others; groups are looked up by name in `world`,
 * which may be NULL where there are none. NULL with an error that names the line. */
TUTTI_API tt_graph *tt_graph_parse(const char *text, tutti_world *world);

/* ---- rewriting ---- */

/* The passes there are, by name; NULL behind the last. */
TUTTI_API const char *tt_pass_name(int index);
/* What a pass does, in a line; NULL for a name that is none. */
TUTTI_API const char *tt_pass_summary(const char *name);
/* Runs a pass, and checks the graph after it. A pass that keeps a limit in bytes takes another one behind its name:
 * "bucket=1048576". After a failure the graph can only be released. */
TUTTI_API bool tt_graph_pass(tt_graph *graph, const char *name);
/* Whether the graph is well formed: operands made before they are used, names unique, sizes as operators say. */
TUTTI_API bool tt_graph_check(const tt_graph *graph);

#ifdef __cplusplus
}
#endif

#endif
