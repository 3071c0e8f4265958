/* SPDX-License-Identifier: Apache-2.0
 *
 * Walks over the backward graph.
 */
#include <stdlib.h>

#include "autograd/node.h"

/* Nodes that are still to be looked at. Each is in `seen`, once. */
typedef struct walk {
    tu_map seen;
    tu_node **nodes;
    size_t count, capacity;
} walk;

static tutti_status push(walk *way, tu_node *node) {
    if (node == NULL || tu_map_get(&way->seen, node) != NULL)
        return TUTTI_OK;
    if (way->count == way->capacity) {
        size_t capacity = way->capacity > 0 ? 2 * way->capacity : 64;
        tu_node **nodes = realloc(way->nodes, capacity * sizeof(tu_node *));
        if (nodes == NULL)
            return tu_error_memory("a walk over the backward graph", capacity * sizeof(tu_node *));
        way->nodes = nodes;
        way->capacity = capacity;
    }
    way->nodes[way->count++] = node;
    return tu_map_set(&way->seen, node, node);
}

static tutti_status begin(walk *way, tt_tensor *output, tu_map *leaves) {
    tu_node *node = NULL;
    if (output == NULL || !tt_requires_grad(output))
        return TUTTI_OK;
    tutti_status status = tu_history_node(output, &node);
    if (status == TUTTI_OK && node == NULL)
        return tu_map_set(leaves, output, output);
    return status == TUTTI_OK ? push(way, node) : status;
}

tutti_status tu_leaves_of(tt_tensor_list outputs, tu_map *leaves) {
    walk way = { .count = 0 };
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < outputs.count && status == TUTTI_OK; i++)
        status = begin(&way, outputs.at[i], leaves);
    while (way.count > 0 && status == TUTTI_OK) {
        const tu_node *node = way.nodes[--way.count];
        status = push(&way, node->inner);
        for (int i = 0; i < node->input_count && status == TUTTI_OK; i++) {
            const tu_edge *edge = &node->next[i];
            status = edge->leaf != NULL ? tu_map_set(leaves, edge->leaf, edge->leaf) : push(&way, edge->node);
        }
    }
    tu_map_free(&way.seen);
    free(way.nodes);
    return status;
}
