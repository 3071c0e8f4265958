/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops in blocks, without a compiler: operators that take what the one before gives run at once, and leave the bits of
 * calls one by one.
 */
#include "programs.h"

typedef tt_tensor *operation(tt_tensor *x, tt_tensor *y);

#define UNARY(name, ...)                                      \
    static tt_tensor *of_##name(tt_tensor *x, tt_tensor *y) { \
        (void)y;                                              \
        return tt_##name(x, ##__VA_ARGS__);                   \
    }
#define BINARY(name, ...)                                     \
    static tt_tensor *of_##name(tt_tensor *x, tt_tensor *y) { \
        return tt_##name(x, y, ##__VA_ARGS__);                \
    }
UNARY(add_scalar, 0.7)
UNARY(mul_scalar, -1.3)
UNARY(div_scalar, 0.3)
UNARY(neg)
UNARY(abs)
UNARY(square)
UNARY(clamp, -0.5, 0.8)
UNARY(relu)
UNARY(reciprocal)
UNARY(sqrt)
UNARY(rsqrt)
UNARY(exp)
UNARY(tanh)
UNARY(sigmoid)
UNARY(gelu) /* which is not joined: it stands between others that are */
BINARY(add)
BINARY(sub)
BINARY(mul)
BINARY(div)
BINARY(maximum)
BINARY(minimum)
BINARY(add_scaled, 0.6)

static operation *const operations[] = { of_add_scalar, of_mul_scalar, of_div_scalar, of_neg,       of_abs,   of_square,
                                         of_clamp,      of_relu,       of_reciprocal, of_sqrt,      of_rsqrt, of_exp,
                                         of_tanh,       of_sigmoid,    of_gelu,       of_add,       of_sub,   of_mul,
                                         of_div,        of_maximum,    of_minimum,    of_add_scaled };
#define OPERATIONS (sizeof operations / sizeof operations[0])

/* Each operator behind another and before a third, from the left and from the right; then all of them in a row. */
static int everything(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    size_t first = *(const size_t *)user;
    tt_tensor *x = inputs.at[0], *y = inputs.at[1];
    outputs[0] = tt_sub(operations[first](tt_mul(x, y), y), x);
    outputs[1] = tt_add_scalar(operations[first](x, tt_sub(y, x)), 0.25);
    outputs[2] = x;
    for (size_t i = 0; i < OPERATIONS; i++)
        outputs[2] = operations[(first + i) % OPERATIONS](outputs[2], y);
    return 3;
}

static void compare(tt_compile_function *function, void *user, tt_tensor_list inputs) {
    tt_tensor *expected[TT_GRAPH_OUTPUTS], *outputs[TT_GRAPH_OUTPUTS];
    tu_program_options options = { .no_compiler = true };
    tt_graph *graph;
    tu_program *program;
    CHECK(tt_capture(function, user, inputs, &graph));
    CHECK_OK(tu_program_make(graph, &options, &program));
    int count = function(inputs, expected, user);
    run_program(program, graph, inputs, outputs);
    for (int i = 0; i < count; i++)
        CHECK(same_bits(outputs[i], expected[i]));
    tu_program_release(program);
    tt_graph_release(&graph);
}

TEST(operators_at_once_leave_the_bits_of_calls) {
    for (size_t first = 0; first < OPERATIONS; first++)
        for (int dtype = 0; dtype < 2; dtype++) {
            tt_scope scope = tt_scope_open();
            tt_tensor *x = tt_randn(tt_shape(5, 131), dtype == 0 ? TUTTI_F32 : TUTTI_F64, NULL);
            tt_tensor *y = tt_randn(tt_shape(5, 131), tt_dtype(x), NULL);
            compare(everything, &first, tt_tensors(x, y));
            CHECK_OK(tt_scope_close(&scope));
        }
}

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *up = tt_add_scalar(tt_mul_scalar(x, 2), 1);
    outputs[0] = tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(up), x)), tt_sigmoid(x)), 0.5);
    return 1;
}

/* More than is kept in caches, with a last piece and a last register that are not full, and once where no result is
 * aligned for stores past the caches: a result of rows that are no multiple of a register. */
TEST(large_results_are_stored_past_the_caches_with_the_same_bits) {
    int64_t rows[] = { 1, 1021 };
    for (int i = 0; i < 2; i++) {
        tt_scope scope = tt_scope_open();
        int64_t columns = ((8 << 20) / 4 + 4099) / rows[i];
        tt_tensor *x = tt_randn(tt_shape(rows[i], columns), TUTTI_F32, NULL);
        compare(chain, NULL, tt_tensors(x));
        compare(chain, NULL, tt_tensors(tt_narrow(x, 1, 1, columns - 1)));
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* The text of the loops of a program without a compiler; ends with free. */
static char *text_of(tt_compile_function *function, tt_tensor *x) {
    tu_program_options options = { .no_compiler = true };
    tt_graph *graph;
    tu_program *program;
    char *text = NULL;
    size_t bytes = 0;
    CHECK(tt_capture(function, NULL, tt_tensors(x), &graph));
    CHECK_OK(tu_program_make(graph, &options, &program));
    FILE *to = open_memstream(&text, &bytes);
    tu_program_print(to, program);
    CHECK_EQ(fclose(to), 0);
    tu_program_release(program);
    tt_graph_release(&graph);
    return text;
}

TEST(a_chain_of_eight_operators_is_two_walks_over_a_piece) {
    tt_scope scope = tt_scope_open();
    char *text = text_of(chain, tt_randn(tt_shape(4096), TUTTI_F32, NULL));
    int walks = 0;
    for (const char *at = text; (at = strstr(at, "at once:")) != NULL; at++)
        walks++;
    if (walks != 2 || strstr(text, " 1 buffers") == NULL)
        FAIL("it has %d: %s", walks, text);
    free(text);
    CHECK_OK(tt_scope_close(&scope));
}

static int shared(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = tt_mul_scalar(inputs.at[0], 3);
    outputs[0] = tt_mul(tt_add_scalar(x, 1), tt_neg(x)); /* x is taken twice: it is there for both */
    return 1;
}

TEST(what_is_taken_twice_is_kept) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_randn(tt_shape(777), TUTTI_F32, NULL);
    char *text = text_of(shared, x);
    CHECK(strstr(text, "at once:") != NULL);
    compare(shared, NULL, tt_tensors(x));
    free(text);
    CHECK_OK(tt_scope_close(&scope));
}

/* The first input, whose rows lie apart, is written and not read. */
static int into_rows_apart(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_copy_(tt_narrow(inputs.at[0], 1, 8, tt_size(inputs.at[1], 1)), inputs.at[1]);
    outputs[0] = tt_relu(inputs.at[1]);
    return 1;
}

/* Nothing goes by a buffer where a piece is a row or a part of one: pieces may be longer then, as long as they do not
 * have several rows of which those of the result lie apart. */
TEST(rows_of_a_result_that_lie_apart_are_written_one_by_one) {
    tu_program_options options = { .no_compiler = true };
    for (int64_t columns = 2047; columns < 6000; columns += 1000) {
        tt_scope scope = tt_scope_open();
        tt_tensor *wide = tt_randn(tt_shape(20, columns + 50), TUTTI_F32, NULL), *results[2];
        tt_tensor_list inputs = tt_tensors(wide, tt_randn(tt_shape(20, columns), TUTTI_F32, NULL)),
                       own = tt_tensors(tt_clone(wide), inputs.at[1]);
        tt_graph *graph;
        tu_program *program;
        CHECK(tt_capture(into_rows_apart, NULL, inputs, &graph));
        CHECK_OK(tu_program_make(graph, &options, &program));
        CHECK_EQ(tu_program_count(program).fused, 2);
        into_rows_apart(inputs, &results[0], NULL);
        run_program(program, graph, own, &results[1]);
        CHECK(same_bits(results[1], results[0]));
        CHECK(same_bits(own.at[0], wide));
        tu_program_release(program);
        tt_graph_release(&graph);
        CHECK_OK(tt_scope_close(&scope));
    }
}
