/* SPDX-License-Identifier: Apache-2.0
 *
 * Device meshes: the ranks of a world laid out in several named dimensions, with a group along each.
 *
 *     int shape[] = { 2, 4 };
 *     const char *names[] = { "data", "tensor" };
 *     tutti_mesh *mesh;
 *     tutti_mesh_new(world, TUTTI_CPU, shape, 2, TUTTI_OPTIONS(tutti_mesh_options, .names = names), &mesh);
 *     tutti_mesh_group(mesh, 1, &group);      // the four ranks of this rank's row
 *
 * Making a mesh and flattening one are collective over the world; everything else is local. A rank that is not in the
 * mesh takes part, and has no coordinate. A mesh keeps its groups; it may be used from any thread.
 */
#ifndef TUTTI_MESH_H
#define TUTTI_MESH_H

#include <tutti/device.h>
#include <tutti/group.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TUTTI_MESH_DIMS 8

typedef struct tutti_mesh tutti_mesh;

typedef struct tutti_mesh_options {
    size_t size;
    const char *const *names; /* one per dimension, all different; NULL: none */
    const int *ranks;         /* world ranks in row-major order, all different; NULL: 0, 1, 2, … */
    int rank_count;           /* of `ranks`: the product of the shape */
    int64_t timeout_ns;       /* of its groups */
    bool no_groups;           /* make none: for asking about coordinates only */
} tutti_mesh_options;
#define TUTTI_MESH_OPTIONS_INIT TUTTI_DEFAULTS(tutti_mesh_options)
/* TUTTI_MESH_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_mesh_options_init(tutti_mesh_options *options, size_t size);

/* A shape for `ranks` ranks: the entries of `shape` that are 0 are filled in, the largest as small as it can be, in
 * falling order; those that are not stay. Sizes that do not divide the number of ranks are TUTTI_ERROR_ARGUMENT. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_shape(int ranks, int dim_count, int *shape);

/* `device` is where the ranks compute: TUTTI_CPU (or 0), TUTTI_CUDA; a kind, without a number. A dimension that spans
 * the whole world uses the default group; each other gets one group per choice of the other coordinates, in row-major
 * order, described as "mesh_<name>" or "mesh_dim_<i>".
 */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_new(tutti_world *world, tutti_device device, const int *shape,
                                                    int dim_count, const tutti_mesh_options *options,
                                                    tutti_mesh **mesh);
/* Another reference to the mesh. */
TUTTI_API tutti_mesh *tutti_mesh_keep(tutti_mesh *mesh);
/* Ends one reference. NULL is allowed. */
TUTTI_API void tutti_mesh_release(tutti_mesh *mesh);

/* How many dimensions it has. */
TUTTI_API int tutti_mesh_dim_count(const tutti_mesh *mesh);
/* Ranks along one dimension; -1: of the whole mesh. */
TUTTI_API int tutti_mesh_size(const tutti_mesh *mesh, int dim);
/* The kind of device it was made for; 0 for NULL. */
TUTTI_API tutti_device tutti_mesh_device(const tutti_mesh *mesh);
/* NULL without names. */
TUTTI_API const char *tutti_mesh_dim_name(const tutti_mesh *mesh, int dim);
/* Which dimension has that name: TUTTI_ERROR_NOT_FOUND when none has. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_dim(const tutti_mesh *mesh, const char *name, int *dim);

/* World ranks in row-major order, tutti_mesh_size(mesh, -1) of them; of a slice those that share this rank's other
 * coordinates. */
TUTTI_API void tutti_mesh_ranks(const tutti_mesh *mesh, int *ranks);

/* This rank's index in each dimension; false: it is not in the mesh. */
TUTTI_API bool tutti_mesh_coordinate(const tutti_mesh *mesh, int *coordinate);

/* The world rank that is `distance` steps from this one along `dim`; periodic: the dimension is a ring, else
 * TUTTI_NOBODY lies beyond its edges. A rank that is not in the mesh has no neighbours: TUTTI_ERROR_ARGUMENT. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_neighbor(const tutti_mesh *mesh, int dim, int distance, bool periodic,
                                                         int *world_rank);

/* A reference to this rank's group along `dim`, which ends with tutti_group_release; -1 is allowed where there is only
 * one. TUTTI_NON_GROUP_MEMBER for a rank that is not in the mesh. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_group(const tutti_mesh *mesh, int dim, tutti_group **group);
/* Its rank there; -1 for a rank that is not in the mesh. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_local_rank(const tutti_mesh *mesh, int dim, int *rank);

/* The mesh of some dimensions, named in their original order, with the same groups. All of them: the mesh itself. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_slice(tutti_mesh *mesh, const char *const *names, int count,
                                                      tutti_mesh **slice);

/* All dimensions joined to one, with a group of its own. NULL: the names joined by "_". Remembered under that name: it
 * can be sliced out of the root mesh, and flattening the same dimensions to the same name gives the same mesh. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_mesh_flatten(tutti_mesh *mesh, const char *name, tutti_mesh **flat);

/* Same world, device, ranks, layout and names. */
TUTTI_API bool tutti_mesh_equal(const tutti_mesh *left, const tutti_mesh *right);

#ifdef __cplusplus
}
#endif
#endif
