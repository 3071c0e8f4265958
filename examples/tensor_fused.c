/* SPDX-License-Identifier: Apache-2.0
 *
 * A block of a transformer's MLP, cut over the ranks, with the sequence cut too: each rank has some rows of x, gathers
 * all of them for its columns of the first matrix, and scatters the sum of what its rows of the second one give. Once
 * plain, with two collectives and two products; once fused, where a rank computes while the others' rows are read and
 * its own results are on their way. Then the time line of both, from the flight recorder.
 *
 *     $ tensor_fused            (two ranks as threads)
 *     $ tutti run -n 2 ./tensor_fused
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/autograd.h>
#include <tutti/fused.h>
#include <tutti/ops.h>
#include <tutti/symmetric.h>
#include <tutti/trace.h>
#include <tutti/world.h>

enum {
    TOKENS = 256,
    WIDTH = 128,
    HIDDEN = 512
};

typedef struct block {
    tutti_group *group;
    tt_tensor *up, *down; /* this rank's columns of one matrix and rows of the other */
} block;

static tt_tensor *plain(const block *mlp, tt_tensor *x) {
    tt_tensor *hidden = tt_gelu(tt_matmul(tt_all_gather(x, 0, mlp->group), mlp->up));
    return tt_reduce_scatter(tt_matmul(hidden, mlp->down), TUTTI_SUM, 0, mlp->group);
}

static tt_tensor *fused(const block *mlp, tt_tensor *x) {
    tt_tensor_list products = tt_fused_all_gather_matmul(x, tt_tensors(mlp->up), 0, mlp->group, NULL);
    tt_tensor *hidden = products.count == 1 ? tt_gelu(products.at[0]) : NULL;
    return tt_fused_matmul_reduce_scatter(hidden, mlp->down, TUTTI_SUM, 0, mlp->group);
}

typedef tt_tensor *form(const block *mlp, tt_tensor *x);

/* Forward and backward; returns the gradient of x, which collectives may still write. */
static tt_tensor *step(form *of, const block *mlp, tt_tensor *x, tt_tensor **y) {
    tt_tensor *leaf = tt_require_grad(tt_detach(x), true);
    *y = of(mlp, leaf);
    tt_backward(tt_mean(tt_square(*y)), NULL);
    return tt_wait(tt_grad(leaf));
}

/* The number behind "name": in a line of the recorder. */
static double number(const char *line, const char *name) {
    const char *at = strstr(line, name);
    return at != NULL ? strtod(at + strlen(name), NULL) : 0;
}

/* Prints this rank's operations from the first_entry-th on. The entry of a fused operation is the agreement that begins
 * it; what follows are its products and exchanges, which overlap where different threads do them. */
static tutti_status print_time_line(tutti_world *world, const char *title, uint64_t first_entry) {
    char *text;
    tutti_status status = tutti_trace_text(world, &text);
    if (status != TUTTI_OK)
        return status;
    double start = 0;
    printf("%s\n", title);
    for (char *line = text, *next; line != NULL; line = next) {
        if ((next = strchr(line, '\n')) != NULL)
            *next++ = 0;
        if (strstr(line, "\"operation\": \"") == NULL || strstr(line, "\"created_ns\": ") == NULL ||
            number(line, "\"id\": ") <= (double)first_entry)
            continue;
        char operation[40] = "";
        sscanf(strstr(line, "\"operation\": \"") + strlen("\"operation\": \""), "%39[^\"]", operation);
        double created = number(line, "\"created_ns\": "), ended = number(line, "\"ended_ns\": ");
        start = start == 0 ? created : start;
        printf("    %8.1f us  %-28s %8.1f us  thread %.0f\n", (created - start) / 1e3, operation,
               (ended - created) / 1e3, number(line, "\"thread\": "));
    }
    tutti_free(text);
    return TUTTI_OK;
}

/* How many operations the recorder has by now. */
static uint64_t entries(tutti_world *world) {
    char *text;
    if (tutti_trace_text(world, &text) != TUTTI_OK)
        return 0;
    uint64_t last = 0;
    for (const char *at = strstr(text, "{\"id\": "); at != NULL; at = strstr(at + 1, "{\"id\": "))
        last = strtoull(at + strlen("{\"id\": "), NULL, 10);
    tutti_free(text);
    return last;
}

static tutti_status rank_main(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_scope scope = tt_scope_open();
    tt_seed(1, (uint32_t)rank);
    block mlp = { group, tt_mul_scalar(tt_randn(tt_shape(WIDTH, HIDDEN / ranks), TUTTI_F32, NULL), 0.1),
                  tt_mul_scalar(tt_randn(tt_shape(HIDDEN / ranks, WIDTH), TUTTI_F32, NULL), 0.1) };
    /* In symmetric memory the others read it where it lies. */
    tt_tensor *x = tt_symm_empty(world, tt_shape(TOKENS / ranks, WIDTH), TUTTI_F32, NULL), *outputs[2];
    tt_copy_(x, tt_randn(tt_shape(TOKENS / ranks, WIDTH), TUTTI_F32, NULL));
    tt_tensor *gradients[2];
    uint64_t begin[3];
    for (int round = 0; round < 2; round++) { /* the first one makes workspaces and meets */
        begin[0] = entries(world);
        gradients[0] = step(plain, &mlp, x, &outputs[0]);
        begin[1] = entries(world);
        gradients[1] = step(fused, &mlp, x, &outputs[1]);
        begin[2] = entries(world);
    }
    bool equal = tt_allclose(outputs[0], outputs[1], 1e-4, 1e-5) && tt_allclose(gradients[0], gradients[1], 1e-4, 1e-5);
    tutti_status status = tt_scope_close(&scope);
    if (status == TUTTI_OK)
        printf("rank %d: output and gradient of the fused block %s the plain one's\n", rank,
               equal ? "equal" : "DIFFER from");
    if (status == TUTTI_OK && rank == 0) {
        status = print_time_line(world, "operations of rank 0, plain and then fused, forward and backward:", begin[0]);
        printf("%d of them plain, %d fused\n", (int)(begin[1] - begin[0]), (int)(begin[2] - begin[1]));
    }
    if (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    return status == TUTTI_OK && !equal ? TUTTI_ERROR_STATE : status;
}

int main(void) {
    setenv("TUTTI_THREADS", "2", 0); /* of each rank: one communicates while the other multiplies */
    return tutti_main(2, rank_main, NULL);
}
