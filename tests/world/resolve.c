/* SPDX-License-Identifier: Apache-2.0
 *
 * The forms of a group argument, and meshes.
 */
#include <tutti/mesh.h>

#include "../harness.h"
#include "world/world.h"

#define FORM              \
    &(tutti_group_form) { \
        0                 \
    }

static tutti_group *resolved(tutti_world *world, const tutti_group_form *form, const char *tag) {
    tutti_group *group;
    CHECK_OK(tutti_group_resolve(world, form, tag, &group));
    tutti_group_release(group); /* the registry has it */
    return group;
}

static void refused(tutti_world *world, const tutti_group_form *form, tutti_status status, const char *fragment) {
    tutti_group *group;
    CHECK_STATUS(tutti_group_resolve(world, form, "", &group), status);
    CHECK_MESSAGE(fragment);
}

/* Expands, and compares. */
static void expands(tutti_world *world, const tutti_group_form *form, const char *tag, const char *expected_tag,
                    const int *ranks, int count, int size) {
    tutti_group_expansion expansion = TUTTI_GROUP_EXPANSION_INIT;
    CHECK_OK(tutti_group_expand(world, form, tag, &expansion));
    CHECK_TEXT(expansion.tag, expected_tag);
    CHECK_EQ(expansion.rank_count, count);
    CHECK_EQ(expansion.group_size, size);
    for (int i = 0; i < count; i++)
        CHECK_EQ(expansion.ranks[i], ranks[i]);
    tutti_free(expansion.ranks);
}

static void not_expanded(tutti_world *world, const tutti_group_form *form, tutti_status status, const char *fragment) {
    tutti_group_expansion expansion = TUTTI_GROUP_EXPANSION_INIT;
    CHECK_STATUS(tutti_group_expand(world, form, "", &expansion), status);
    CHECK_MESSAGE(fragment);
}

static const int row_0[] = { 0, 1 }, row_1[] = { 2, 3 }, one[] = { 0 }, three[] = { 1, 2, 3 }, all[] = { 0, 1, 2, 3 };
static const int *const rows[] = { row_0, row_1 };
static const int *const uneven[] = { one, three };

TEST_WORLD_THREADS(every_form_expands, 4) {
    tutti_group *world_group = tutti_world_group(world), *tagged;
    expands(world, tutti_form_ranks(FORM, all, 4), "", "", all, 4, 4);
    expands(world, tutti_form_ranks(FORM, row_1, 2), "t", "t", row_1, 2, 2);
    expands(world, tutti_form_lists(FORM, rows, (int[]){ 2, 2 }, 2), "", "", all, 4, 2);
    expands(world, tutti_form_group(FORM, world_group), "", "ptd:0", all, 4, 4);
    expands(world, tutti_form_group(FORM, world_group), "bla", "bla", all, 4, 4);
    CHECK_OK(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .tag = "blu"), &tagged));
    expands(world, tutti_form_group(FORM, tagged), "", "blu", all, 4, 4); /* a tag cannot be erased */
    tutti_group_release(tagged);
    not_expanded(world, tutti_form_lists(FORM, uneven, (int[]){ 1, 3 }, 2), TUTTI_ERROR_ARGUMENT,
                 "group sizes must be identical");
    not_expanded(world, tutti_form_lists(FORM, rows, (int[]){ 2, 2 }, 0), TUTTI_ERROR_RANGE, "empty");
    not_expanded(world, tutti_form_name(FORM, "0"), TUTTI_ERROR_ARGUMENT, "cannot be expanded");
    not_expanded(world, &(tutti_group_form){ .size = sizeof(tutti_group_form), .kind = (tutti_group_form_kind)99 },
                 TUTTI_ERROR_ARGUMENT, "no kind");
    not_expanded(world, tutti_form_group(FORM, NULL), TUTTI_ERROR_ARGUMENT, "NULL");
    not_expanded(world, tutti_form_group(FORM, TUTTI_NON_GROUP_MEMBER), TUTTI_ERROR_ARGUMENT, "TUTTI_NON_GROUP_MEMBER");
}

TEST_WORLD_THREADS(every_form_resolves, 4) {
    int rank = tutti_world_rank(world);
    tutti_group *world_group = tutti_world_group(world), *row;
    CHECK(resolved(world, tutti_form_group(FORM, world_group), "") == world_group);
    CHECK(resolved(world, tutti_form_name(FORM, "0"), "") == world_group);
    CHECK(resolved(world, tutti_form_ranks(FORM, all, 4), "") == world_group);
    refused(world, tutti_form_ranks(FORM, rank < 2 ? row_0 : row_1, 2), TUTTI_ERROR_ARGUMENT, "no group");
    refused(world, tutti_form_lists(FORM, rows, (int[]){ 2, 2 }, 2), TUTTI_ERROR_ARGUMENT, "no group");
    CHECK_OK(tutti_group_new_subgroups(world_group, 2, NULL, NULL, &row));
    CHECK(resolved(world, tutti_form_ranks(FORM, rank < 2 ? row_0 : row_1, 2), "") == row);
    CHECK(resolved(world, tutti_form_lists(FORM, rows, (int[]){ 2, 2 }, 2), "") ==
          row); /* the caller's own inner list */
    CHECK(resolved(world, tutti_form_name(FORM, tutti_group_name(row)), "") == row);
    tutti_group_release(row);
    refused(world, tutti_form_name(FORM, "none"), TUTTI_ERROR_NOT_FOUND, "could not resolve");
    refused(world, tutti_form_name(FORM, NULL), TUTTI_ERROR_ARGUMENT, "NULL");
    refused(world, tutti_form_group(FORM, NULL), TUTTI_ERROR_ARGUMENT, "NULL");
    refused(world, tutti_form_lists(FORM, uneven, (int[]){ 1, 3 }, 2), TUTTI_ERROR_ARGUMENT,
            "group sizes must be identical");
    refused(world, tutti_form_ranks(FORM, all, 0), TUTTI_ERROR_ARGUMENT, "empty");
    int other[] = { (rank + 1) % 4 };
    refused(world, tutti_form_lists(FORM, (const int *[]){ other }, (int[]){ 1 }, 1), TUTTI_ERROR_ARGUMENT,
            "none of the lists");
    refused(world, &(tutti_group_form){ .size = sizeof(tutti_group_form), .kind = (tutti_group_form_kind)99 },
            TUTTI_ERROR_ARGUMENT, "no kind");
    tutti_group_form empty = { 0 };
    refused(world, &empty, TUTTI_ERROR_ARGUMENT, "no size");
}

/* ---- meshes ---- */

static const char *const names[] = { "data", "tensor" };
static const int square[] = { 2, 2 };

static tutti_mesh *make_mesh(tutti_world *world, const int *shape, int dims, const tutti_mesh_options *options) {
    tutti_mesh *mesh;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, shape, dims, options, &mesh));
    return mesh;
}

TEST_WORLD(a_mesh_has_a_group_along_each_dimension, 4) {
    int rank = tutti_world_rank(world);
    tutti_mesh *mesh = make_mesh(world, square, 2, TUTTI_OPTIONS(tutti_mesh_options, .names = names));
    CHECK_EQ(tutti_mesh_dim_count(mesh), 2);
    CHECK_EQ(tutti_mesh_size(mesh, -1), 4);
    CHECK_EQ(tutti_mesh_size(mesh, 1), 2);
    CHECK_EQ(tutti_mesh_device(mesh), TUTTI_CPU);
    CHECK_TEXT(tutti_mesh_dim_name(mesh, 1), "tensor");
    int coordinate[2], local;
    CHECK(tutti_mesh_coordinate(mesh, coordinate));
    CHECK(coordinate[0] == rank / 2 && coordinate[1] == rank % 2);
    for (int dim = 0; dim < 2; dim++) {
        tutti_group *group;
        CHECK_OK(tutti_mesh_group(mesh, dim, &group));
        int expected[] = { dim == 0 ? rank % 2 : rank / 2 * 2, dim == 0 ? rank % 2 + 2 : rank / 2 * 2 + 1 };
        CHECK(tutti_group_ranks(group)[0] == expected[0] && tutti_group_ranks(group)[1] == expected[1]);
        CHECK_TEXT(tutti_group_description(group), dim == 0 ? "mesh_data" : "mesh_tensor");
        CHECK_OK(tutti_mesh_local_rank(mesh, dim, &local));
        CHECK_EQ(local, coordinate[dim]);
        /* The same by form: expanded with the tag of that group, resolved to it. */
        expands(world, tutti_form_mesh_dim(FORM, mesh, dim), "", tutti_group_tag(group), expected, 2, 2);
        CHECK(resolved(world, tutti_form_mesh_dim(FORM, mesh, dim), "") == group);
        tutti_group_release(group);
    }
    refused(world, tutti_form_mesh(FORM, mesh), TUTTI_ERROR_ARGUMENT, "Only 1D mesh");
    not_expanded(world, tutti_form_mesh(FORM, mesh), TUTTI_ERROR_ARGUMENT, "Only 1D mesh");
    refused(world, tutti_form_mesh_dim(FORM, mesh, 2), TUTTI_ERROR_RANGE, "dimension 2");
    tutti_group *none;
    CHECK_STATUS(tutti_mesh_group(mesh, -1, &none), TUTTI_ERROR_ARGUMENT);
    int dim;
    CHECK_OK(tutti_mesh_dim(mesh, "tensor", &dim));
    CHECK_EQ(dim, 1);
    CHECK_STATUS(tutti_mesh_dim(mesh, "none", &dim), TUTTI_ERROR_NOT_FOUND);
    tutti_mesh_release(mesh);
}

TEST_WORLD_THREADS(a_dimension_that_spans_the_world_uses_the_default_group, 3) {
    tutti_mesh *mesh = make_mesh(world, (int[]){ 3 }, 1, NULL);
    CHECK(resolved(world, tutti_form_mesh(FORM, mesh), "") == tutti_world_group(world));
    CHECK(tutti_mesh_dim_name(mesh, 0) == NULL);
    tutti_mesh *slice;
    CHECK_STATUS(tutti_mesh_slice(mesh, names, 1, &slice), TUTTI_ERROR_STATE); /* it has no names */
    tutti_mesh_release(mesh);
}

TEST_WORLD_THREADS(a_rank_may_be_absent_from_a_mesh, 4) {
    int ranks[] = { 3, 1 };
    tutti_mesh *mesh =
        make_mesh(world, (int[]){ 1, 2 }, 2, TUTTI_OPTIONS(tutti_mesh_options, .ranks = ranks, .rank_count = 2));
    int rank = tutti_world_rank(world), coordinate[2], local;
    CHECK_EQ(tutti_mesh_coordinate(mesh, coordinate), rank % 2 == 1);
    tutti_group *group;
    CHECK_OK(tutti_mesh_group(mesh, 1, &group));
    CHECK_OK(tutti_mesh_local_rank(mesh, 1, &local));
    if (rank % 2 == 1) {
        CHECK_EQ(coordinate[1], rank == 3 ? 0 : 1);
        CHECK_EQ(tutti_group_size(group), 2);
        CHECK_EQ(local, rank == 3 ? 1 : 0); /* a group sorts its ranks */
        CHECK_TEXT(tutti_group_description(group), "mesh_dim_1");
    } else {
        CHECK(group == TUTTI_NON_GROUP_MEMBER);
        CHECK_EQ(local, -1);
    }
    tutti_group_release(group);
    tutti_mesh_release(mesh);
}

TEST_WORLD_THREADS(wrong_meshes_are_refused, 4) {
    tutti_mesh *mesh;
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CUDA_AT(0), square, 2, NULL, &mesh), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("without an index, not for cuda:0");
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 3 }, 2, NULL, &mesh), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("more ranks than the world");
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 0 }, 2, NULL, &mesh), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, square, 0, NULL, &mesh), TUTTI_ERROR_ARGUMENT);
    const char *const twins[] = { "a", "a" };
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, square, 2, TUTTI_OPTIONS(tutti_mesh_options, .names = twins), &mesh),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("unique");
    const char *const half[] = { "a", NULL };
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, square, 2, TUTTI_OPTIONS(tutti_mesh_options, .names = half), &mesh),
                 TUTTI_ERROR_ARGUMENT);
    int twice[] = { 0, 1, 2, 2 }, few[] = { 0, 1, 2 };
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, square, 2,
                                TUTTI_OPTIONS(tutti_mesh_options, .ranks = twice, .rank_count = 4), &mesh),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("twice");
    CHECK_STATUS(tutti_mesh_new(world, TUTTI_CPU, square, 2,
                                TUTTI_OPTIONS(tutti_mesh_options, .ranks = few, .rank_count = 3), &mesh),
                 TUTTI_ERROR_ARGUMENT);
    tutti_mesh *bare = make_mesh(world, square, 2, TUTTI_OPTIONS(tutti_mesh_options, .no_groups = true));
    tutti_group *group;
    CHECK_STATUS(tutti_mesh_group(bare, 0, &group), TUTTI_ERROR_STATE);
    tutti_mesh_release(bare);
}

static const char *const cube_names[] = { "pipe", "data", "tensor" };

/* World 8 as 2 x 2 x 2 in a fake world, whose ranks are one process: rank 5 is (1, 0, 1). */
TEST(slicing_and_flattening_of_a_cube) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(5, 8, NULL, &world));
    tutti_mesh *cube = make_mesh(world, (int[]){ 2, 2, 2 }, 3, TUTTI_OPTIONS(tutti_mesh_options, .names = cube_names));
    tutti_mesh *slice, *again, *flat, *same;
    int groups = tutti_group_enumerate(world, NULL, 0), ranks[8], coordinate[3];

    const char *const outer[] = { "pipe", "tensor" };
    CHECK_OK(tutti_mesh_slice(cube, outer, 2, &slice));
    CHECK_EQ(tutti_group_enumerate(world, NULL, 0), groups); /* a slice makes none */
    CHECK_EQ(tutti_mesh_size(slice, -1), 4);
    tutti_mesh_ranks(slice, ranks);
    CHECK(ranks[0] == 0 && ranks[1] == 1 && ranks[2] == 4 && ranks[3] == 5); /* data is 0 for rank 5 */
    CHECK(tutti_mesh_coordinate(slice, coordinate));
    CHECK(coordinate[0] == 1 && coordinate[1] == 1);
    tutti_group *from_slice, *from_cube;
    CHECK_OK(tutti_mesh_group(slice, 1, &from_slice));
    CHECK_OK(tutti_mesh_group(cube, 2, &from_cube));
    CHECK(from_slice == from_cube);
    tutti_group_release(from_slice);
    tutti_group_release(from_cube);

    CHECK_OK(tutti_mesh_slice(cube, cube_names, 3, &again));
    CHECK(again == cube); /* all of them: the mesh itself */
    tutti_mesh_release(again);
    CHECK_OK(tutti_mesh_slice(cube, outer, 2, &again));
    CHECK(again != slice && tutti_mesh_equal(again, slice) && !tutti_mesh_equal(slice, cube));
    tutti_mesh_release(again);

    const char *const backwards[] = { "tensor", "pipe" }, *const unknown[] = { "expert" },
                      *const double_[] = { "pipe", "pipe" };
    CHECK_STATUS(tutti_mesh_slice(cube, backwards, 2, &again), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("order");
    CHECK_STATUS(tutti_mesh_slice(cube, unknown, 1, &again), TUTTI_ERROR_NOT_FOUND);
    CHECK_STATUS(tutti_mesh_slice(cube, double_, 2, &again), TUTTI_ERROR_STATE);

    CHECK_OK(tutti_mesh_flatten(slice, NULL, &flat));
    CHECK_TEXT(tutti_mesh_dim_name(flat, 0), "pipe_tensor");
    CHECK_EQ(tutti_mesh_size(flat, 0), 4);
    CHECK(tutti_mesh_coordinate(flat, coordinate) && coordinate[0] == 3);
    tutti_group *group;
    CHECK_OK(tutti_mesh_group(flat, -1, &group));
    CHECK_EQ(tutti_group_size(group), 4);
    CHECK_EQ(tutti_group_ranks(group)[2], 4);
    tutti_group_release(group);
    groups = tutti_group_enumerate(world, NULL, 0);
    CHECK_OK(tutti_mesh_flatten(slice, "pipe_tensor", &same));
    CHECK(tutti_mesh_equal(same, flat));
    CHECK_EQ(tutti_group_enumerate(world, NULL, 0), groups); /* remembered, not made again */
    tutti_mesh_release(same);
    const char *const flat_name[] = { "pipe_tensor" }, *const overlap[] = { "pipe_tensor", "tensor" };
    CHECK_OK(tutti_mesh_slice(cube, flat_name, 1, &same)); /* the root knows it */
    CHECK(tutti_mesh_equal(same, flat));
    tutti_mesh_release(same);
    CHECK_STATUS(tutti_mesh_slice(cube, overlap, 2, &same), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("overlap");
    CHECK_STATUS(tutti_mesh_flatten(cube, "pipe_tensor", &same), TUTTI_ERROR_ARGUMENT); /* another layout */
    CHECK_STATUS(tutti_mesh_flatten(cube, "data", &same), TUTTI_ERROR_ARGUMENT);        /* a dimension's name */

    tutti_mesh *other = make_mesh(world, (int[]){ 2, 2, 2 }, 3, TUTTI_OPTIONS(tutti_mesh_options, .names = cube_names));
    CHECK(tutti_mesh_equal(cube, other));
    tutti_mesh_release(other);
    tutti_mesh_release(flat);
    tutti_mesh_release(slice);
    tutti_mesh_release(cube);
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(flattening_makes_a_real_group, 4) {
    tutti_mesh *mesh = make_mesh(world, (int[]){ 2, 1, 2 }, 3, TUTTI_OPTIONS(tutti_mesh_options, .names = cube_names));
    tutti_mesh *slice, *flat;
    CHECK_OK(tutti_mesh_slice(mesh, cube_names, 2, &slice));
    CHECK_OK(tutti_mesh_flatten(slice, NULL, &flat));
    tutti_group *group;
    CHECK_OK(tutti_mesh_group(flat, 0, &group));
    CHECK_EQ(tutti_group_size(group), 2);
    CHECK_EQ(tutti_group_ranks(group)[0], tutti_world_rank(world) % 2);
    CHECK_TEXT(tutti_group_description(group), "mesh_pipe_data");
    tutti_group_release(group);
    tutti_mesh_release(flat);
    tutti_mesh_release(slice);
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("1 mesh");
    tutti_mesh_release(mesh);
}

static void shaped(int ranks, int count, const int *given, const int *expected) {
    int shape[TUTTI_MESH_DIMS];
    memcpy(shape, given, sizeof *given * (size_t)count);
    CHECK_OK(tutti_mesh_shape(ranks, count, shape));
    for (int i = 0; i < count; i++)
        CHECK_EQ(shape[i], expected[i]);
}
#define LIST(...) ((const int[]){ __VA_ARGS__ })

TEST(a_shape_is_as_near_to_a_cube_as_the_ranks_allow) {
    shaped(12, 2, LIST(0, 0), LIST(4, 3));
    shaped(16, 2, LIST(0, 0), LIST(4, 4));
    shaped(36, 3, LIST(0, 0, 0), LIST(4, 3, 3));
    shaped(7, 3, LIST(0, 0, 0), LIST(7, 1, 1));
    shaped(1, 2, LIST(0, 0), LIST(1, 1));
    shaped(12, 3, LIST(0, 3, 0), LIST(2, 3, 2));
    shaped(6, 2, LIST(2, 3), LIST(2, 3));
    shaped(1024, 8, LIST(0, 0, 0, 0, 0, 0, 0, 0), LIST(4, 4, 2, 2, 2, 2, 2, 2));
    int shape[] = { 0, 5 };
    CHECK_STATUS(tutti_mesh_shape(12, 2, shape), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("cannot be divided");
    CHECK_EQ(shape[0], 0);
    int few[] = { 2, 2 };
    CHECK_STATUS(tutti_mesh_shape(12, 2, few), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("hold 4 of 12");
    CHECK_STATUS(tutti_mesh_shape(0, 2, shape), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_mesh_shape(4, 9, shape), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_mesh_shape(4, 1, NULL), TUTTI_ERROR_ARGUMENT);
}

TEST_WORLD_THREADS(neighbours_are_found_along_a_dimension_and_nobody_beyond_its_edge, 6) {
    tutti_mesh *mesh;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, LIST(2, 3), 2, NULL, &mesh));
    int rank = tutti_world_rank(world), row = rank / 3, column = rank % 3, found;
    for (int distance = -4; distance <= 4; distance++) {
        int at = column + distance;
        CHECK_OK(tutti_mesh_neighbor(mesh, 1, distance, false, &found));
        CHECK_EQ(found, at < 0 || at > 2 ? TUTTI_NOBODY : row * 3 + at);
        CHECK_OK(tutti_mesh_neighbor(mesh, 1, distance, true, &found));
        CHECK_EQ(found, row * 3 + (at + 6) % 3);
    }
    CHECK_OK(tutti_mesh_neighbor(mesh, 0, 1, true, &found));
    CHECK_EQ(found, (1 - row) * 3 + column);
    CHECK_STATUS(tutti_mesh_neighbor(mesh, 2, 1, true, &found), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_mesh_neighbor(NULL, 0, 1, true, &found), TUTTI_ERROR_ARGUMENT);
    tutti_mesh_release(mesh);
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, LIST(2), 1, NULL, &mesh));
    if (rank >= 2) {
        CHECK_STATUS(tutti_mesh_neighbor(mesh, 0, 1, true, &found), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("not in the mesh");
    }
    tutti_mesh_release(mesh);
}
