/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of graphs share: inputs with names, and what a graph says.
 */
#ifndef TESTS_GRAPH_SUPPORT_H
#define TESTS_GRAPH_SUPPORT_H

#include <tutti/tensors.h>

#include "../tensor/support.h"

static inline tt_tensor *named(tt_tensor *x, const char *name) {
    tt_set_name(x, name);
    return x;
}

/* 0.25, 0.5, 0.75 … in that shape. */
static inline tt_tensor *values(const char *name, tt_dims shape) {
    int64_t count = 1;
    for (int i = 0; i < shape.count; i++)
        count *= shape.at[i];
    tt_tensor *flat = tt_mul_scalar(tt_add_scalar(tt_arange(0, count, 1, TUTTI_F32, NULL), 1), 0.25);
    return named(tt_reshape(flat, shape), name);
}

static inline void check_text(const tt_graph *graph, const char *expected) {
    char *text = tt_graph_text(graph);
    CHECK(text != NULL);
    if (strcmp(text, expected) != 0)
        FAIL("the graph is\n%s\nand should be\n%s", text, expected);
    tutti_free(text);
}

/* A run gives what the function gives, and leaves the input as it does. */
static inline void check_run(tt_graph *graph, tt_compile_function *function, void *user, tt_tensor *x) {
    tt_tensor *expected[TT_GRAPH_OUTPUTS], *twin = tt_clone(x);
    int count = function(tt_tensors(twin), expected, user);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
    if (results.count != (size_t)count)
        FAIL("%s", tutti_error_message());
    for (int i = 0; i < count; i++) {
        CHECK(tt_equal(results.at[i], expected[i]));
        CHECK((results.at[i] == x) == (expected[i] == twin));
    }
    CHECK(tt_equal(x, twin));
}

static inline tt_graph_counts counts_of_graph(const tt_graph *graph) {
    tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
    CHECK(tt_graph_count(graph, &counts));
    return counts;
}

/* What the graph says can be read back, and then says the same. */
static inline void check_read_back(const tt_graph *graph, tutti_world *world) {
    char *text = tt_graph_text(graph);
    tt_graph *read = tt_graph_parse(text, world);
    CHECK(read != NULL);
    check_text(read, text);
    tutti_free(text);
    tt_graph_release(&read);
}

#endif
