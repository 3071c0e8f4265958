/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers for programs on grids: a shape for a number of ranks, and who is next to whom.
 */
#include <stdlib.h>
#include <tutti/mesh.h>

#include "base/error.h"

/* Writes `count` factors of `ranks`, none above `limit`, the largest first and as small as it can be. */
static bool factor(int ranks, int count, int limit, int *factors) {
    if (count == 1) {
        factors[0] = ranks;
        return ranks <= limit;
    }
    for (int first = 1; first <= ranks && first <= limit; first++)
        if (ranks % first == 0 && factor(ranks / first, count - 1, first, factors + 1)) {
            factors[0] = first;
            return true;
        }
    return false;
}

tutti_status tutti_mesh_shape(int ranks, int dim_count, int *shape) {
    if (shape == NULL || dim_count < 1 || dim_count > TUTTI_MESH_DIMS || ranks < 1)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_mesh_shape: %d ranks in %d dimensions; it takes at least 1 rank, 1 to %d dimensions and "
                        "a place for their sizes",
                        ranks, dim_count, TUTTI_MESH_DIMS);
    int rest = ranks, open = 0, factors[TUTTI_MESH_DIMS];
    for (int i = 0; i < dim_count; i++) {
        if (shape[i] < 0 || (shape[i] > 0 && rest % shape[i] != 0))
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "tutti_mesh_shape: %d ranks cannot be divided by the size of dimension %d, %d, and those "
                            "before it",
                            ranks, i, shape[i]);
        if (shape[i] > 0)
            rest /= shape[i];
        else
            open++;
    }
    if (open == 0)
        return rest == 1 ? TUTTI_OK
                         : tu_error(TUTTI_ERROR_ARGUMENT, "tutti_mesh_shape: the sizes given hold %d of %d ranks",
                                    ranks / rest, ranks);
    (void)factor(rest, open, rest, factors); /* 1 and the rest always do */
    for (int i = 0, next = 0; i < dim_count; i++)
        if (shape[i] == 0)
            shape[i] = factors[next++];
    return TUTTI_OK;
}

/* Where a coordinate comes to lie in a dimension of `size`; -1: beyond its edge. */
static int64_t shifted(int64_t coordinate, int64_t size, bool periodic) {
    if (periodic)
        return (coordinate % size + size) % size;
    return coordinate >= 0 && coordinate < size ? coordinate : -1;
}

tutti_status tutti_mesh_neighbor(const tutti_mesh *mesh, int dim, int distance, bool periodic, int *world_rank) {
    int coordinate[TUTTI_MESH_DIMS], dim_count = mesh != NULL ? tutti_mesh_dim_count(mesh) : 0;
    if (mesh == NULL || world_rank == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_mesh_neighbor needs a mesh and a place for its result");
    if (dim < 0 || dim >= dim_count)
        return tu_error(TUTTI_ERROR_RANGE, "tutti_mesh_neighbor: dimension %d of a mesh that has %d", dim, dim_count);
    if (!tutti_mesh_coordinate(mesh, coordinate))
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_mesh_neighbor: this rank is not in the mesh");
    int64_t index = 0;
    for (int i = 0; i < dim_count; i++) {
        int size = tutti_mesh_size(mesh, i);
        int64_t at = shifted((int64_t)coordinate[i] + (i == dim ? distance : 0), size, periodic);
        if (at < 0) {
            *world_rank = TUTTI_NOBODY;
            return TUTTI_OK;
        }
        index = index * size + at;
    }
    size_t bytes = sizeof(int) * (size_t)tutti_mesh_size(mesh, -1);
    int *ranks = malloc(bytes);
    if (ranks == NULL)
        return tu_error_memory("the ranks of a mesh", bytes);
    tutti_mesh_ranks(mesh, ranks);
    *world_rank = ranks[index];
    free(ranks);
    return TUTTI_OK;
}
