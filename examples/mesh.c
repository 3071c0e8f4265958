/* SPDX-License-Identifier: Apache-2.0
 *
 * A mesh: ranks in rows and columns, each with a group along its row, and neighbours to which it sends the edge of its
 * part of a grid, a column of a row-major matrix, without copying it together first.
 *
 *     tutti run -n 4 ./mesh           or, without a launcher,          ./mesh
 */
#include <stdio.h>
#include <tutti/collective.h>
#include <tutti/mesh.h>
#include <tutti/tutti.h>

enum {
    HEIGHT = 4,
    WIDTH = 6 /* of a rank's part, with one column for what comes from each side */
};

/* This rank's last own column to the right; what comes from the left into the first. Beyond the edge is nobody. */
static tutti_status exchange_columns(const tutti_mesh *mesh, tutti_group *world, float part[HEIGHT][WIDTH]) {
    static const tutti_strided column = { sizeof column, .block = 1, .stride = WIDTH };
    int left, right;
    tutti_status status = tutti_mesh_neighbor(mesh, 1, -1, false, &left);
    if (status == TUTTI_OK)
        status = tutti_mesh_neighbor(mesh, 1, 1, false, &right);
    if (status == TUTTI_OK)
        status = tutti_send_recv(world, &part[0][WIDTH - 2], HEIGHT, right, &part[0][0], HEIGHT, left, TUTTI_F32, 0,
                                 TUTTI_OPTIONS(tutti_call, .strided_in = &column, .strided_out = &column));
    return status;
}

static tutti_status lay_out(tutti_world *world, void *unused) {
    (void)unused;
    static const char *const names[] = { "row", "column" };
    int rank = tutti_world_rank(world), shape[2] = { 0, 0 }, at[2];
    float part[HEIGHT][WIDTH] = { { 0 } };
    tutti_mesh *mesh = NULL;
    tutti_status status = tutti_mesh_shape(tutti_world_size(world), 2, shape); /* as square as it can be */
    if (status == TUTTI_OK)
        status = tutti_mesh_new(world, TUTTI_CPU, shape, 2, TUTTI_OPTIONS(tutti_mesh_options, .names = names), &mesh);
    if (status != TUTTI_OK)
        return status;
    (void)tutti_mesh_coordinate(mesh, at); /* every rank is in this mesh */
    for (int y = 0; y < HEIGHT; y++)
        part[y][WIDTH - 2] = (float)(10 * rank + y);
    status = exchange_columns(mesh, tutti_world_group(world), part);

    tutti_group *row = NULL;
    int sum = 0;
    if (status == TUTTI_OK)
        status = tutti_mesh_group(mesh, 1, &row);
    if (status == TUTTI_OK)
        status = tutti_all_reduce(row, &rank, &sum, 1, TUTTI_I32, TUTTI_SUM, NULL);
    if (status == TUTTI_OK)
        printf("rank %d at (%d, %d) of %d x %d: its row sums up to %d, its left edge is %.0f to %.0f\n", rank, at[0],
               at[1], tutti_mesh_size(mesh, 0), tutti_mesh_size(mesh, 1), sum, part[0][0], part[HEIGHT - 1][0]);
    tutti_group_release(row);
    tutti_mesh_release(mesh);
    return status;
}

int main(void) {
    return tutti_main(4, lay_out, NULL);
}
