/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops behind products of matrices, part by part: the bits are those of one operator after the other, and what cannot
 * move up to the product stays where it is.
 */
#include <cblas.h>

#include "programs.h"
#include "tensor/gemm.h"

enum {
    TENSORS = 6 /* x, weight, bias, other (of the result's shape), row (one number per column), column (one per row) */
};

/* ---- what follows the product ---- */

static int activation(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    out[0] = tt_gelu(tt_linear(in.at[0], in.at[1], in.at[2]));
    return 1;
}

/* The product itself is needed too, as a backward needs it. */
static int activation_of_what_is_kept(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    out[0] = tt_linear(in.at[0], in.at[1], in.at[2]);
    out[1] = tt_relu(out[0]);
    return 2;
}

static int residual(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    out[0] = tt_add(tt_mul_scalar(tt_linear(in.at[0], in.at[1], NULL), 0.5), in.at[3]);
    return 1;
}

static int numbers_of_rows_and_columns(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *product = tt_matmul(in.at[0], tt_transpose(in.at[1], 0, 1));
    out[0] = tt_tanh(tt_mul(tt_add(product, in.at[4]), in.at[5]));
    return 1;
}

static int mask_and_cast(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *zero = tt_full(tt_shape(1), 0, tt_dtype(in.at[3]), NULL);
    tt_tensor *product = tt_linear(in.at[0], in.at[1], in.at[2]);
    tt_tensor *kept = tt_where(tt_gt(in.at[3], zero), product, in.at[4]);
    out[0] = tt_to(tt_mul_scalar(kept, 1.25), TUTTI_BF16);
    return 1;
}

static int in_place(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *product = tt_matmul(in.at[0], tt_transpose(in.at[1], 0, 1));
    tt_add_(product, in.at[3]);
    out[0] = tt_relu_(product);
    return 1;
}

static const struct {
    const char *name;
    tt_compile_function *function;
} functions[] = { { "activation", activation },       { "activation of what is kept", activation_of_what_is_kept },
                  { "residual", residual },           { "numbers of rows and columns", numbers_of_rows_and_columns },
                  { "mask and cast", mask_and_cast }, { "in place", in_place } };
#define FUNCTIONS (int)(sizeof functions / sizeof *functions)

static tt_tensor *random_of(tt_dims shape, tutti_dtype dtype) {
    return tt_to(tt_randn(shape, TUTTI_F32, NULL), dtype);
}

static void make_inputs(tutti_dtype dtype, int64_t batches, int64_t rows, int64_t columns, int64_t depth,
                        tt_tensor **in) {
    in[0] = random_of(tt_shape(batches, rows, depth), dtype);
    in[1] = random_of(tt_shape(columns, depth), dtype);
    in[2] = random_of(tt_shape(columns), dtype);
    in[3] = random_of(tt_shape(batches, rows, columns), dtype);
    in[4] = random_of(tt_shape(columns), dtype);
    in[5] = random_of(tt_shape(batches, rows, 1), dtype);
}

/* The function by a program beside its calls. Returns how many loops run behind products. */
static int compare(tt_compile_function *function, tt_tensor **in, int count, bool compiled, const char *name) {
    tt_tensor *expected[2], *results[2], *copies[2][TENSORS];
    tt_graph *graph;
    tu_program *program;
    for (int i = 0; i < count; i++) { /* a function may write its inputs */
        copies[0][i] = tt_clone(in[i]);
        copies[1][i] = tt_clone(in[i]);
    }
    CHECK(tt_capture(function, NULL, tt_tensors_of((size_t)count, in), &graph));
    CHECK_OK(tu_program_make(graph, &(tu_program_options){ .no_compiler = !compiled }, &program));
    int epilogues = tu_program_count(program).epilogues;
    int results_count = function(tt_tensors_of((size_t)count, copies[0]), expected, NULL);
    run_program(program, graph, tt_tensors_of((size_t)count, copies[1]), results);
    for (int i = 0; i < results_count; i++)
        if (!same_bits(results[i], expected[i]))
            FAIL("%s", name);
    for (int i = 0; i < count; i++)
        CHECK(same_bits(copies[0][i], copies[1][i]));
    tu_program_release(program);
    tt_graph_release(&graph);
    return epilogues;
}

TEST_LIMIT(a_loop_behind_a_product_gives_the_bits_of_calls_for_every_shape_and_number_of_threads, 600) {
    static const int64_t sizes[][4] = { /* batches, rows, columns, depth */
                                        { 1, 5, 7, 3 },      { 2, 37, 50, 40 },   { 1, 1, 300, 20 },
                                        { 3, 64, 128, 800 }, { 1, 1700, 40, 16 }, { 1, 24, 2000, 390 },
                                        { 2, 500, 333, 390 }
    };
    const char *folder = own_folder();
    int before = openblas_get_num_threads();
    size_t count = test_sanitized() ? 2 : sizeof sizes / sizeof *sizes;
    for (size_t size = 0; size < count; size++)
        for (int which = 0; which < FUNCTIONS; which++) {
            tt_scope scope = tt_scope_open();
            tutti_dtype dtype = (size + (size_t)which) % 3 == 0 ? TUTTI_F64 : TUTTI_F32;
            tt_tensor *in[TENSORS];
            make_inputs(dtype, sizes[size][0], sizes[size][1], sizes[size][2], sizes[size][3], in);
            for (int threads = 1; threads <= 3; threads += 2) {
                openblas_set_num_threads(threads);
                int loops = compare(functions[which].function, in, TENSORS, false, functions[which].name);
                if (loops != (tu_product_is_ours(dtype) ? 1 : 0))
                    FAIL("%s has %d loops behind products", functions[which].name, loops);
                if (threads == 3 && (size == 1 || size == 3 || size == 6)) /* a compiler takes its time */
                    compare(functions[which].function, in, TENSORS, true, functions[which].name);
            }
            CHECK_OK(tt_scope_close(&scope));
        }
    openblas_set_num_threads(before);
    remove_folder(folder);
}

/* ---- what has to stay ---- */

/* The sum reads what only the second product makes; behind that one it can run. */
static int two_products(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *first = tt_matmul(in.at[0], in.at[1]), *second = tt_matmul(in.at[0], in.at[2]);
    out[0] = tt_add(first, second);
    return 1;
}

/* The loop writes what the product reads, and nobody may see the new elements before it has ended. */
static int factor_is_written(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    out[0] = tt_add_(in.at[0], tt_matmul(in.at[0], in.at[1]));
    return 1;
}

/* x dies here, and is as large as the result; but the product reads it to its end. */
static int factor_dies(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *x = tt_exp(in.at[0]);
    out[0] = tt_exp(tt_add(x, tt_matmul(x, in.at[1])));
    return 1;
}

/* Another vertex reads x before the loop changes it. */
static int written_after_a_read(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *product = tt_matmul(in.at[1], in.at[2]);
    out[0] = tt_sum_dims(in.at[0], tt_shape(0), false);
    tt_add_(in.at[0], product);
    return 1;
}

/* What the loop reads is there all the time, but the view of it is not. */
static int view_made_in_between(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *product = tt_matmul(in.at[0], in.at[1]), *turned = tt_transpose(in.at[2], 0, 1);
    out[0] = tt_add(product, turned);
    return 1;
}

/* Turned around, the elements behind the product are not yet those of the part. */
static int other_places(tt_tensor_list in, tt_tensor **out, void *user) {
    (void)user;
    tt_tensor *product = tt_matmul(in.at[0], in.at[1]);
    out[0] = tt_add(product, tt_transpose(product, 0, 1));
    return 1;
}

TEST(a_loop_moves_up_to_a_product_only_where_nothing_between_minds) {
    static const struct {
        tt_compile_function *function;
        const char *name;
        int epilogues;
    } cases[] = { { two_products, "two products", 1 },
                  { factor_is_written, "a factor is written", 0 },
                  { factor_dies, "a factor dies", 1 },
                  { written_after_a_read, "written after a read", 0 },
                  { view_made_in_between, "a view made in between", 0 },
                  { other_places, "other places", 0 } };
    const char *folder = own_folder();
    tt_scope scope = tt_scope_open();
    tt_tensor *in[3];
    for (int i = 0; i < 3; i++)
        in[i] = tt_mul_scalar(tt_randn(tt_shape(96, 96), TUTTI_F32, NULL), 0.1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int compiled = 0; compiled < 2; compiled++) {
            int epilogues = compare(cases[i].function, in, 3, compiled == 1, cases[i].name);
            CHECK_EQ(epilogues, tu_product_is_ours(TUTTI_F32) ? cases[i].epilogues : 0);
        }
    CHECK_OK(tt_scope_close(&scope));
    remove_folder(folder);
}

/* ---- memory ---- */

typedef struct job {
    tt_graph *graph;
    tt_tensor *in[TENSORS];
} job;

static tutti_status make_and_run(void *argument) {
    job *own = argument;
    tu_program *program = NULL;
    tt_scope scope = tt_scope_open();
    tt_tensor *inputs[TENSORS + 8] = { NULL }, *outputs[2] = { NULL };
    tutti_status status = tu_program_make(own->graph, &(tu_program_options){ .no_compiler = true }, &program);
    if (status == TUTTI_OK)
        status = tu_graph_gather("run", own->graph, tt_tensors_of(TENSORS, own->in), inputs);
    if (status == TUTTI_OK)
        status = tu_program_run(program, inputs, outputs);
    for (int i = 0; i < own->graph->input_count; i++)
        tu_tensor_drop(inputs[i]);
    for (int i = 0; i < 2; i++)
        tu_tensor_drop(outputs[i]);
    tu_program_release(program);
    tutti_status closed = tt_scope_close(&scope);
    return status != TUTTI_OK ? status : closed;
}

TEST_LIMIT(any_allocation_behind_a_product_may_fail, 300) {
    tt_scope scope = tt_scope_open();
    job own;
    int before = openblas_get_num_threads();
    openblas_set_num_threads(1);
    make_inputs(TUTTI_F32, 1, 40, 70, 30, own.in);
    CHECK(tt_capture(numbers_of_rows_and_columns, NULL, tt_tensors_of(TENSORS, own.in), &own.graph));
    CHECK_OK(make_and_run(&own));
    test_fail_each("malloc,calloc,realloc,aligned_alloc", make_and_run, &own);
    tt_graph_release(&own.graph);
    openblas_set_num_threads(before);
    CHECK_OK(tt_scope_close(&scope));
}
