/* SPDX-License-Identifier: Apache-2.0
 *
 * Texts of graphs that somebody damaged: each is an error with words, or another graph that is well formed, which every
 * pass leaves well formed and which can be printed, drawn and read back. --rounds N makes it longer.
 */
#include <inttypes.h>

#include <tutti/fused.h>
#include <tutti/tensors.h>

#include "../harness.h"

/* ---- what is damaged ---- */

typedef struct weights {
    tt_tensor *weight, *bias, *whole, *shard;
} weights;

static tutti_group *group;

static int train(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    weights *of = user;
    tt_tensor *h = tt_relu(tt_linear(inputs.at[0], of->weight, of->bias));
    tt_tensor *loss = tt_mean(tt_mul(tt_softmax(h, 1), tt_dropout(h, 0.25)));
    tt_backward(loss, NULL);
    tt_sgd_step(of->weight, tt_grad(of->weight), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1));
    tt_set_grad(of->weight, NULL);
    outputs[0] = tt_detach(loss);
    return 1;
}

static int communicate(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *all = tt_all_gather(x, 0, group);
    outputs[0] = tt_matmul(all, tt_transpose(x, 0, 1));
    outputs[1] = tt_reduce_scatter(tt_matmul(x, tt_transpose(x, 0, 1)), TUTTI_AVG, 0, group);
    outputs[2] = tt_all_reduce(tt_add_scalar(x, 1), TUTTI_SUM, group);
    outputs[3] = tt_all_reduce(tt_neg(x), TUTTI_SUM, group);
    tt_all_reduce_(x, TUTTI_MAX, group);
    tt_tensor_list two = tt_all_reduce_coalesced(tt_tensors(tt_sin(x), tt_cos(x)), TUTTI_SUM, group);
    outputs[4] = tt_add(two.at[0], two.at[1]);
    outputs[5] = tt_all_to_all_single(x, NULL, NULL, group);
    return 6;
}

static int fill_and_free(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    weights *of = user;
    bool recording = tt_grad_mode(false);
    tt_storage_resize(of->whole, 96);
    tt_preserve *kept = tt_preserve_begin(tt_tensors(of->whole));
    tt_copy_(of->whole, tt_all_gather(of->shard, 0, group));
    tt_preserve_end(kept);
    outputs[0] = tt_linear(inputs.at[0], of->whole, NULL);
    tt_storage_resize(of->whole, 0);
    tt_tensor *mask = tt_tril(tt_ones(tt_shape(4, 6), TUTTI_F32, NULL), 0), *part = tt_select(inputs.at[0], 0, 1);
    tt_mul_(inputs.at[0], mask);
    outputs[1] = tt_exp(part);
    tt_grad_mode(recording);
    return 2;
}

/* Views, writes through some of them, copies, and what depends on no input. */
static int write_and_view(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *y = tt_sin(x), *row = tt_select(y, 0, 1), *turned = tt_transpose(y, 0, 1);
    tt_mul_(y, tt_number(3));
    tt_tensor *copy = tt_clone(y), *scale = tt_exp(tt_arange(0, 6, 1, TUTTI_F32, NULL));
    tt_relu_(row);
    tt_add_(copy, scale);
    outputs[0] = tt_add(tt_mul(copy, scale), tt_contiguous(tt_transpose(turned, 0, 1)));
    tt_copy_(x, tt_neg(copy));
    outputs[1] = tt_all_reduce(tt_narrow(copy, 0, 0, 2), TUTTI_SUM, group);
    outputs[2] = tt_sum_dims(turned, tt_shape(0), false);
    outputs[3] = x;
    return 4;
}

static char *text_of(tt_compile_function *function, weights *of) {
    tt_tensor *x = tt_reshape(tt_arange(0, 24, 1, TUTTI_F32, NULL), tt_shape(4, 6));
    tt_graph *graph;
    tt_set_name(x, "x");
    if (!tt_capture(function, of, tt_tensors(x), &graph))
        FAIL("%s", tutti_error_message());
    char *text = tt_graph_text(graph);
    tt_graph_release(&graph);
    return text;
}

/* ---- how ---- */

static uint64_t seed = 88172645463325252u;

static size_t choose(size_t count) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return count > 0 ? (size_t)(seed >> 11) % count : 0;
}

static const char *const words[] = { "0",           "-1",
                                     "1",           "2",
                                     "99999999999", "9223372036854775807",
                                     "1e308",       "nan",
                                     "-inf",        "none",
                                     "[]",          "[0]",
                                     "[-1, 4]",     "f64",
                                     "bf16",        "bool",
                                     "c64",         "true",
                                     "sum",         "max",
                                     "cuda:1",      "x",
                                     "return",      "graph",
                                     "slot",        "grad",
                                     "shares x",    "strides [1, 4]",
                                     "offset 3",    "premul_sum" };

static bool is_letter(char one) {
    return (one >= 'a' && one <= 'z') || (one >= '0' && one <= '9') || one == '_' || one == '.';
}

/* In the place of the word at `at`: one of the list, or the name of an operator. */
static void replace_word(char *text, size_t room, size_t at) {
    char operator_name[64];
    const char *other = words[choose(sizeof words / sizeof *words)];
    if (choose(3) == 0) {
        tt_operator_info info = TT_OPERATOR_INFO_INIT;
        if (tt_operator_at((int)choose((size_t)tt_operator_count()), &info) == TUTTI_OK) {
            snprintf(operator_name, sizeof operator_name, "%s%s", info.name, choose(4) == 0 ? "_" : "");
            other = operator_name;
        }
    }
    size_t first = at, last = at, length = strlen(text);
    while (first > 0 && is_letter(text[first - 1]))
        first--;
    while (is_letter(text[last]))
        last++;
    if (length - (last - first) + strlen(other) + 1 > room)
        return;
    memmove(text + first + strlen(other), text + last, length - last + 1);
    memcpy(text + first, other, strlen(other));
}

/* One line goes behind another, or stands there twice. */
static void move_line(char *text, size_t room, bool twice) {
    char line[512];
    size_t length = strlen(text), first = choose(length);
    while (first > 0 && text[first - 1] != '\n')
        first--;
    size_t bytes = strcspn(text + first, "\n") + 1;
    if (bytes >= sizeof line || first + bytes > length || length + bytes + 1 > room)
        return;
    memcpy(line, text + first, bytes);
    if (!twice) {
        memmove(text + first, text + first + bytes, length - first - bytes + 1);
        length -= bytes;
    }
    size_t to = choose(length + 1);
    while (to > 0 && text[to - 1] != '\n')
        to--;
    memmove(text + to + bytes, text + to, length - to + 1);
    memcpy(text + to, line, bytes);
}

/* A line more: something is written, waited for or computed once more. */
static void add_line(char *text, size_t room) {
    static const char *const lines[] = { "    relu_(%s)\n",
                                         "    mul_(%s, 2)\n",
                                         "    wait(%s)\n",
                                         "    neg_(%s)\n",
                                         "    add_(%s, x)\n",
                                         "    copy_(%s, x)\n",
                                         "    all_reduce_(%s, reduction=sum, group=0)\n" };
    char name[64] = "", line[160];
    size_t length = strlen(text), at = choose(length);
    while (at > 0 && text[at - 1] != '\n')
        at--;
    if (sscanf(text + at, " %63[a-z0-9_.]:", name) != 1 || at == 0)
        return;
    snprintf(line, sizeof line, lines[choose(sizeof lines / sizeof *lines)], name);
    size_t after = at;
    for (size_t down = 1 + choose(4); down > 0 && strncmp(text + after, "    return", 10) != 0; down--)
        after += strcspn(text + after, "\n") + 1;
    if (length + strlen(line) + 1 > room || after > length)
        return;
    memmove(text + after + strlen(line), text + after, length - after + 1);
    memcpy(text + after, line, strlen(line));
}

/* One operator of one tensor in the place of another. */
static void swap_operator(char *text, size_t room) {
    static const char *const names[] = { "relu(", "sin(", "neg(", "exp(", "clone(", "contiguous(", "cos(" };
    size_t count = sizeof names / sizeof *names, from = choose(count), to = choose(count);
    char *at = strstr(text, names[from]);
    size_t old = strlen(names[from]), new = strlen(names[to]), length = strlen(text);
    if (at == NULL || at[-1] != ' ' || length + new + 1 > room)
        return;
    memmove(at + new, at + old, length - (size_t)(at - text) - old + 1);
    memcpy(at, names[to], new);
}

static void damage(char *text, size_t room) {
    static const char signs[] = "()[],:;=0123456789abcdefx_.#\n -";
    size_t length = strlen(text), at = choose(length);
    switch (length > 0 ? choose(12) : 11) {
    case 0:
        text[at] = signs[choose(sizeof signs - 1)];
        break;
    case 1:
        memmove(text + at, text + at + 1, length - at);
        break;
    case 2:
        move_line(text, room, choose(2) == 0);
        break;
    case 3:
    case 4:
    case 5:
    case 6:
        add_line(text, room);
        break;
    case 7:
    case 8:
        swap_operator(text, room);
        break;
    default:
        replace_word(text, room, at);
    }
}

/* ---- what must hold ---- */

static void use(tt_graph *graph, tutti_world *world) {
    static const char *const asked[] = { "one_shot", "low_contention=1" };
    FILE *nowhere = fopen("/dev/null", "we");
    CHECK(nowhere != NULL && tt_graph_check(graph));
    bool whole = true;
    for (int i = 0; i < 4 && whole; i++) {
        size_t count = 0;
        while (tt_pass_name((int)count) != NULL)
            count++;
        size_t which = choose(count + 2);
        whole = tt_graph_pass(graph, which < count ? tt_pass_name((int)which) : asked[which - count]);
        if (whole && !tt_graph_check(graph))
            FAIL("after %s: %s", which < count ? tt_pass_name((int)which) : asked[which - count],
                 tutti_error_message());
    }
    if (!whole) /* without memory, or for an operator that cannot be asked: with words */
        CHECK(tt_error_show() != TUTTI_OK && tutti_error_message()[0] != 0);
    if (whole) {
        CHECK(tt_graph_print_svg(graph, nowhere) && tt_graph_print_dot(graph, nowhere));
        char *text = tt_graph_text(graph);
        CHECK(text != NULL);
        tt_graph *again = tt_graph_parse(text, world);
        if (again == NULL)
            FAIL("%s\n%s", tutti_error_message(), text);
        tt_graph_release(&again);
        tutti_free(text);
    }
    fclose(nowhere);
    tt_error_clear();
}

/* ---- the same numbers ---- */

/* Runs the graph on a fresh input; the results, and what became of the input, behind them. False where it cannot run.
 */
static bool run(tt_graph *graph, tt_tensor **results, size_t *count) {
    tt_tensor *x = tt_reshape(tt_arange(-5, 19, 1, TUTTI_F32, NULL), tt_shape(4, 6));
    tt_tensor_list list = tt_graph_run(graph, tt_tensors(x));
    if (tt_error_show() != TUTTI_OK)
        return false;
    *count = list.count;
    for (size_t i = 0; i < list.count; i++)
        results[i] = list.at[i];
    results[(*count)++] = x;
    return true;
}

static bool is_same(tt_tensor *left, tt_tensor *right) {
    if (left == NULL || right == NULL)
        return left == right;
    if (tt_dtype(left) != tt_dtype(right) || (tt_dtype(left) != TUTTI_F32 && tt_dtype(left) != TUTTI_F64))
        return tt_equal(left, right);
    tt_tensor *nan = tt_isnan(left), *zero = tt_number(0);
    return tt_equal(nan, tt_isnan(right)) &&
           tt_allclose(tt_where(nan, zero, left), tt_where(nan, zero, right), 1e-5, 1e-5);
}

/* Passes change no result, whatever the graph: one that runs is run again after some of them. */
static void compare(const char *text, tutti_world *world) {
    tt_graph *plain = tt_graph_parse(text, world), *rewritten = plain != NULL ? tt_graph_parse(text, world) : NULL;
    tt_tensor *expected[TT_GRAPH_OUTPUTS + 1], *results[TT_GRAPH_OUTPUTS + 1];
    size_t expected_count, count, passes = 0;
    char done[512] = "";
    bool runs = rewritten != NULL && run(plain, expected, &expected_count);
    while (tt_pass_name((int)passes) != NULL)
        passes++;
    for (int i = 0; i < 4 && runs; i++) {
        const char *pass = tt_pass_name((int)choose(passes));
        snprintf(done + strlen(done), sizeof done - strlen(done), " %s", pass);
        if (!tt_graph_pass(rewritten, pass))
            FAIL("%s: %s\n%s", done, tutti_error_message(), text);
    }
    if (runs) {
        if (!run(rewritten, results, &count))
            FAIL("after%s: %s\n%s", done, tutti_error_message(), text);
        CHECK_EQ(count, expected_count);
        for (size_t i = 0; i < count; i++)
            if (!is_same(expected[i], results[i]))
                FAIL("after%s result %zu of\n%s\nis another; the graph is\n%s", done, i, text,
                     tt_graph_text(rewritten));
    }
    tt_graph_release(&plain);
    tt_graph_release(&rewritten);
    tt_error_clear();
    (void)tt_wait_all(world); /* a graph may start what it does not wait for */
    tt_error_clear();
}

static void compare_many(tt_compile_function *function, tutti_world *world, int rounds) {
    tt_scope scope = tt_scope_open();
    char *text = text_of(function, NULL);
    size_t room = strlen(text) * 2 + 64;
    char *damaged = malloc(room);
    for (int i = 0; i < rounds; i++) {
        tt_scope inner = tt_scope_open();
        strcpy(damaged, text);
        for (size_t many = choose(4); many > 0; many--)
            damage(damaged, room);
        compare(damaged, world);
        CHECK_OK(tt_scope_close(&inner));
    }
    free(damaged);
    tutti_free(text);
    CHECK_OK(tt_scope_close(&scope));
}

static int rounds_of(int usual) {
    if (test_option("seed") != NULL)
        seed += strtoull(test_option("seed"), NULL, 10) * 0x9E3779B97F4A7C15u;
    return test_option("rounds") != NULL ? atoi(test_option("rounds")) : test_sanitized() ? usual / 10 : usual;
}

TEST_LIMIT(passes_change_no_result_of_whatever_graph, 600) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 2, NULL, &world));
    group = tutti_world_group(world);
    int rounds = rounds_of(1000);
    compare_many(write_and_view, world, rounds);
    compare_many(communicate, world, rounds);
    CHECK_OK(tutti_world_close(world));
}

TEST_LIMIT(damaged_texts_are_errors_or_graphs_that_passes_leave_well_formed, 600) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 2, NULL, &world));
    group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    weights of = { tt_parameter(tt_ones(tt_shape(4, 6), TUTTI_F32, NULL), true),
                   tt_parameter(tt_ones(tt_shape(4), TUTTI_F32, NULL), true),
                   tt_parameter(tt_ones(tt_shape(4, 6), TUTTI_F32, NULL), true),
                   tt_ones(tt_shape(2, 6), TUTTI_F32, NULL) };
    tt_set_name(of.whole, "whole");
    tt_storage_resize(of.whole, 0);
    tt_compile_function *functions[] = { train, communicate, fill_and_free, write_and_view };
    int rounds = rounds_of(1500), read = 0;
    for (int k = 0; k < 4; k++) {
        char *text = text_of(functions[k], &of);
        size_t room = strlen(text) * 2 + 64;
        char *damaged = malloc(room);
        for (int i = 0; i < rounds; i++) {
            tt_scope inner = tt_scope_open();
            strcpy(damaged, text);
            for (size_t many = 1 + choose(3); many > 0; many--)
                damage(damaged, room);
            tt_graph *graph = tt_graph_parse(damaged, world);
            if (graph == NULL)
                CHECK(tt_error_show() != TUTTI_OK && tutti_error_message()[0] != 0);
            tt_error_clear();
            if (graph != NULL)
                use(graph, world);
            read += graph != NULL;
            tt_graph_release(&graph);
            CHECK_OK(tt_scope_close(&inner));
        }
        free(damaged);
        tutti_free(text);
    }
    CHECK(read > 0 && read < 4 * rounds);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}
