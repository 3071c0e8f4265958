/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program of MPI looks like here: the heat of a plate, its rows shared out among the ranks. In every step each
 * rank exchanges its border rows with its neighbours and replaces each point by the mean of the four around it.
 *
 *     ./jacobi                    four processes
 *     tutti run -n 3 ./jacobi     three
 */
#include <stdio.h>
#include <stdlib.h>

#include <tutti/tutti.h>

#define COLUMNS 64
#define ROWS 60 /* of the whole plate, without its hot upper and cold lower edge */
#define STEPS 200

typedef struct plate {
    int rows;           /* of this rank */
    double *now, *next; /* rows + 2 of COLUMNS: the first and the last are the neighbours' */
    int above, below;   /* ranks next to this one, or TUTTI_NOBODY */
} plate;

static double *row(double *grid, int index) {
    return grid + (size_t)index * COLUMNS;
}

/* Everybody's first row goes up and its last row down; at the edges of the plate there is nobody. */
static tutti_status exchange(tutti_group *group, plate *plate) {
    tutti_status status = tutti_send_recv(group, row(plate->now, 1), COLUMNS, plate->above,
                                          row(plate->now, plate->rows + 1), COLUMNS, plate->below, TUTTI_F64, 0, NULL);
    if (status == TUTTI_OK)
        status = tutti_send_recv(group, row(plate->now, plate->rows), COLUMNS, plate->below, row(plate->now, 0),
                                 COLUMNS, plate->above, TUTTI_F64, 0, NULL);
    return status;
}

/* The largest change of any point. */
static double relax(plate *plate) {
    double change = 0;
    for (int i = 1; i <= plate->rows; i++)
        for (int j = 1; j < COLUMNS - 1; j++) {
            double mean = (row(plate->now, i - 1)[j] + row(plate->now, i + 1)[j] + row(plate->now, i)[j - 1] +
                           row(plate->now, i)[j + 1]) /
                          4;
            double moved = mean - row(plate->now, i)[j];
            moved = moved < 0 ? -moved : moved;
            change = moved > change ? moved : change;
            row(plate->next, i)[j] = mean;
        }
    double *old = plate->now;
    plate->now = plate->next;
    plate->next = old;
    return change;
}

static tutti_status solve(tutti_group *group, plate *plate) {
    double change = 0;
    for (int step = 0; step < STEPS; step++) {
        tutti_status status = exchange(group, plate);
        if (status != TUTTI_OK)
            return status;
        change = relax(plate);
        status = tutti_all_reduce(group, &change, &change, 1, TUTTI_F64, TUTTI_MAX, NULL);
        if (status != TUTTI_OK)
            return status;
    }
    if (tutti_group_rank(group) == 0)
        printf("after %d steps no point changes by more than %.6f\n", STEPS, change);
    return TUTTI_OK;
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    (void)argument;
    plate plate = { .rows = ROWS / size + (rank < ROWS % size),
                    .above = rank > 0 ? rank - 1 : TUTTI_NOBODY,
                    .below = rank < size - 1 ? rank + 1 : TUTTI_NOBODY };
    size_t points = (size_t)(plate.rows + 2) * COLUMNS;
    plate.now = calloc(points, sizeof(double));
    plate.next = calloc(points, sizeof(double));
    tutti_status status = TUTTI_OK;
    if (plate.now == NULL || plate.next == NULL)
        status = tutti_error_set(TUTTI_ERROR_MEMORY, "no memory for the plate");
    for (int j = 0; status == TUTTI_OK && rank == 0 && j < COLUMNS; j++)
        plate.now[j] = plate.next[j] = 100; /* the hot edge */
    if (status == TUTTI_OK)
        status = solve(group, &plate);
    free(plate.now);
    free(plate.next);
    return status;
}

int main(void) {
    return tutti_main(4, rank_main, NULL);
}
