/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions beside calls one by one, and both beside PyTorch's: a chain of pointwise operators on 16 M
 * elements, and the whole training step of a small GPT (forward, backward, clipping, AdamW). Rounds of all sides take
 * turns; figures are medians.
 *
 *     compile [--threads N] [--rounds N] [--python PATH] [--script bench/compile.py] [chain|gpt_step|ddp_step|call]…
 *
 * "in blocks" is what runs where there is no compiler. "first" is the first call, with an empty cache and with what an
 * earlier process left there. `call` is what a call costs besides the work: guards and dispatch. `ddp_step` is the step
 * on two ranks of one thread each; what it takes longer than without reductions is the communication that is exposed.
 *
 * Bounds stand beside the figures: what a copy of the chain's bytes takes, and its arithmetic on elements that stay in
 * the cache; the matrix products of the GPT step alone, with the share of the machine's fma that they use; and its
 * floor: these products, attention, and a copy of as many bytes as everything else has to read and write at least.
 */
#include <tutti/compile.h>
#include <tutti/parallel.h>
#include <tutti/tutti.h>

#include "gpt.h"
#include "peak.h"
#include "peer.h"

/* Seconds; 0 without a peer, or where it cannot. */
static double ask_about(const char *what, const char *name) {
    char line[64];
    snprintf(line, sizeof line, "%s %s", what, name);
    return ask_peer(line);
}

/* ---- the chain ---- */

static tt_tensor *elements;

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *up = tt_add_scalar(tt_mul_scalar(x, 2), 1);
    outputs[0] = tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(up), x)), tt_sigmoid(x)), 0.5);
    return 1;
}

static tt_tensor_list chain_inputs(void) {
    if (elements == NULL)
        elements = tt_keep(tt_randn(tt_shape(16 << 20), TUTTI_F32, NULL));
    return tt_tensors_of(1, &elements);
}

/* ---- the GPT step ---- */

static int gpt_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *loss = tt_cross_entropy(forward(inputs.at[0]), inputs.at[1], -100);
    tt_backward(loss, NULL);
    outputs[0] = tt_detach(loss);
    tt_clip_grad_norm(tt_tensors_of(WEIGHTS, weights), 1, NULL);
    tt_optimizer_step(optimizer);
    tt_optimizer_zero_grad(optimizer);
    return 1;
}

static tt_tensor_list gpt_inputs(void) {
    if (net == NULL)
        make_gpt();
    return tt_tensors_of(2, batch);
}

/* ---- cases ---- */

static const struct {
    const char *name;
    tt_compile_function *function;
    tt_tensor_list (*inputs)(void);
    double moved; /* bytes that are read and written at least; 0: it does not matter */
} cases[] = { { "chain", chain, chain_inputs, 2.0 * (16 << 20) * 4 }, { "gpt_step", gpt_step, gpt_inputs, 0 } };

static double one_call(int which, tt_compiled *compiled) {
    tt_scope scope = tt_scope_open();
    tt_tensor *outputs[TT_GRAPH_OUTPUTS];
    tt_tensor_list inputs = cases[which].inputs();
    double start = now();
    if (compiled != NULL)
        tt_compiled_call(compiled, inputs);
    else
        cases[which].function(inputs, outputs, NULL);
    double taken = now() - start;
    check(tt_scope_close(&scope));
    return taken;
}

static tt_compiled *make(int which, bool in_blocks) {
    tt_compiled *compiled = NULL;
    tt_compile_options options = TT_COMPILE_OPTIONS_INIT;
    options.full = true;
    options.name = cases[which].name;
    if (in_blocks)
        setenv("TUTTI_CC", "/nonexistent", 1);
    if (!tt_compile(cases[which].function, NULL, &options, &compiled))
        check(tt_error_show());
    return compiled;
}

/* A copy of as many bytes, on as many threads: past the caches, as the library's own copies go. */
static double copy_round(double bytes) {
    tt_scope scope = tt_scope_open();
    static tt_tensor *to, *from;
    if (to == NULL) {
        to = tt_keep(tt_empty(tt_shape((int64_t)(bytes / 8)), TUTTI_F32, NULL));
        from = tt_keep(tt_zeros(tt_shape((int64_t)(bytes / 8)), TUTTI_F32, NULL));
    }
    double start = now();
    tt_copy_(to, from);
    double taken = now() - start;
    check(tt_scope_close(&scope));
    return taken;
}

/* What a copy takes of more bytes than should lie in memory for it. */
static double copy_time(double bytes) {
    double some = 1 << 27;
    return copy_round(some) * bytes / some;
}

/* The chain on as many elements, but always the same few, which stay in the second cache of each core. */
static double arithmetic_round(int threads) {
    static tt_compiled *compiled;
    static tt_tensor *few;
    int64_t count = (int64_t)threads << 16;
    tt_scope scope = tt_scope_open();
    if (compiled == NULL) {
        compiled = make(0, false);
        few = tt_keep(tt_randn(tt_shape(count), TUTTI_F32, NULL));
        tt_compiled_call(compiled, tt_tensors_of(1, &few));
    }
    double start = now();
    for (int64_t i = 0; i < (16 << 20) / count; i++) {
        tt_scope inner = tt_scope_open();
        tt_compiled_call(compiled, tt_tensors_of(1, &few));
        check(tt_scope_close(&inner));
    }
    double taken = now() - start;
    check(tt_scope_close(&scope));
    return taken;
}

/* ---- products of the GPT step ---- */

enum {
    PLACES = BATCH * LENGTH,
    LINEARS = 4 * LAYERS + 1
};

static int64_t linear_size(int index, bool out) {
    static const int64_t sizes[][2] = {
        { WIDTH, 3 * WIDTH }, { WIDTH, WIDTH }, { WIDTH, 4 * WIDTH }, { 4 * WIDTH, WIDTH }
    };
    return index == LINEARS - 1 ? (out ? VOCABULARY : WIDTH) : sizes[index % 4][out];
}

/* Forward, gradient of the input, gradient of the weight: each in the layout that the step has. Those of attention are
 * not among them. */
static double products_round(double *operations) {
    static tt_tensor *x[LINEARS], *weight[LINEARS], *grad[LINEARS];
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < LINEARS && x[i] == NULL; i++) {
        int64_t in = linear_size(i, false), out = linear_size(i, true);
        x[i] = tt_keep(tt_randn(tt_shape(PLACES, in), TUTTI_F32, NULL));
        weight[i] = tt_keep(tt_randn(tt_shape(out, in), TUTTI_F32, NULL));
        grad[i] = tt_keep(tt_randn(tt_shape(PLACES, out), TUTTI_F32, NULL));
    }
    *operations = 0;
    double start = now();
    for (int i = 0; i < LINEARS; i++) {
        tt_scope inner = tt_scope_open();
        tt_linear(x[i], weight[i], NULL);
        tt_matmul(grad[i], weight[i]);
        tt_matmul(tt_transpose(grad[i], 0, 1), x[i]);
        *operations += 6.0 * PLACES * (double)linear_size(i, false) * (double)linear_size(i, true);
        check(tt_scope_close(&inner));
    }
    double taken = now() - start;
    check(tt_scope_close(&scope));
    return taken;
}

/* Attention of all layers, forward and backward, on heads that lie as its kernels like them best. */
static double attention_round(void) {
    static tt_tensor *heads[3], *grad;
    tt_scope scope = tt_scope_open();
    tt_dims shape = tt_shape(BATCH, HEADS, LENGTH, WIDTH / HEADS);
    for (int i = 0; i < 3 && heads[i] == NULL; i++)
        heads[i] = tt_keep(tt_parameter(tt_randn(shape, TUTTI_F32, NULL), true));
    if (grad == NULL)
        grad = tt_keep(tt_randn(shape, TUTTI_F32, NULL));
    double start = now();
    for (int layer = 0; layer < LAYERS; layer++) {
        tt_scope inner = tt_scope_open();
        tt_backward(tt_attention(heads[0], heads[1], heads[2], true, 0), grad);
        for (int i = 0; i < 3; i++)
            tt_set_grad(heads[i], NULL);
        check(tt_scope_close(&inner));
    }
    double taken = now() - start;
    check(tt_scope_close(&scope));
    return taken;
}

/* Bytes that the step reads and writes besides, if each operator's tensors went through memory once and nothing was
 * computed: AdamW (four read, three written) and the norm of the gradients, the loss and its gradient, norms, gelu,
 * and sums over gradients for biases. */
static double floor_bytes(void) {
    double parameters = 2.0 * VOCABULARY * WIDTH + LENGTH * WIDTH + 12.0 * LAYERS * WIDTH * WIDTH,
           logits = (double)PLACES * VOCABULARY, wide = (double)PLACES * WIDTH;
    double of_layer = 2 * (2 + 3) * wide /* norms */ + (2 + 3) * 4 * wide /* gelu */ + 9 * wide /* biases */;
    return 4 * (8 * parameters + 3 * logits + LAYERS * of_layer);
}

static void print_row(const char *name, const char *what, double seconds, double than, const char *of) {
    printf("%-10s %-28s %10.2f ms", name, what, seconds * 1e3);
    if (than > 0)
        printf("   %.2f of %s", seconds / than, of);
    printf("\n");
    fflush(stdout);
}

enum {
    EAGER,
    COMPILED,
    BLOCKS,
    THEIRS,
    THEIRS_COMPILED,
    COPY,
    BOUND, /* the chain's arithmetic, the step's products */
    FLOOR, /* of the step */
    SIDES
};

static void print_bound(int which, double seconds, double eager, double operations, int threads) {
    const char *name = cases[which].name;
    if (cases[which].moved > 0) {
        print_row(name, "its arithmetic, in the cache", seconds, 0, "");
        return;
    }
    double peak = fma_peak() * threads;
    print_row(name, "its products alone", seconds, eager, "one by one");
    if (peak > 0)
        printf("%-10s %-28s %10.1f GFLOP/s, %.0f %% of %.1f, which the fma of %d core%s do\n", name, "these products",
               operations / seconds * 1e-9, 100 * operations / seconds / peak, peak * 1e-9, threads,
               threads > 1 ? "s" : "");
}

static void measure(int which, int rounds, int threads) {
    const char *name = cases[which].name;
    double figures[SIDES][ROUNDS], peers_first, cold, warm, operations = 0;
    one_call(which, NULL);
    ask_about("setup", name);
    ask_about("eager", name);
    peers_first = ask_about("compiled", name);
    tt_compiled *compiled = make(which, false);
    cold = one_call(which, compiled);
    tt_compiled_release(&compiled);
    compiled = make(which, false);
    warm = one_call(which, compiled);
    tt_compiled *blocks = make(which, true);
    one_call(which, blocks);
    unsetenv("TUTTI_CC");
    for (int i = 0; i < rounds; i++) {
        rest(threads);
        figures[EAGER][i] = one_call(which, NULL);
        figures[COMPILED][i] = one_call(which, compiled);
        figures[BLOCKS][i] = one_call(which, blocks);
        figures[COPY][i] = cases[which].moved > 0 ? copy_round(cases[which].moved) : 0;
        figures[BOUND][i] = cases[which].moved > 0 ? arithmetic_round(threads) : products_round(&operations);
        figures[FLOOR][i] =
            cases[which].moved > 0 ? 0 : figures[BOUND][i] + attention_round() + copy_time(floor_bytes());
        rest(threads);
        figures[THEIRS][i] = ask_about("eager", name);
        figures[THEIRS_COMPILED][i] = ask_about("compiled", name);
    }
    double of[SIDES];
    for (int i = 0; i < SIDES; i++)
        of[i] = median(figures[i], rounds);
    print_row(name, "one by one", of[EAGER], 0, "");
    print_row(name, "compiled", of[COMPILED], of[EAGER], "one by one");
    print_row(name, "in blocks", of[BLOCKS], of[EAGER], "one by one");
    if (of[COPY] > 0)
        print_row(name, "a copy of its bytes", of[COPY], of[COMPILED], "compiled");
    print_bound(which, of[BOUND], of[EAGER], operations, threads);
    if (of[FLOOR] > 0) {
        print_row(name, "its floor", of[FLOOR], of[EAGER], "one by one");
        print_row(name, "compiled, against the floor", of[COMPILED], of[FLOOR], "the floor");
    }
    if (of[THEIRS] > 0)
        print_row(name, "PyTorch eager", of[THEIRS], 0, "");
    if (of[THEIRS_COMPILED] > 0)
        print_row(name, "torch.compile", of[THEIRS_COMPILED], 0, "");
    if (of[THEIRS_COMPILED] > 0)
        print_row(name, "compiled, against torch.compile", of[COMPILED], of[THEIRS_COMPILED], "torch.compile");
    print_row(name, "first call, nothing cached", cold, peers_first, "torch.compile's");
    print_row(name, "first call, cached", warm, 0, "");
    print_row(name, "more than another call", warm - of[COMPILED], 0, "");
    tt_compiled_release(&compiled);
    tt_compiled_release(&blocks);
}

/* ---- memory ---- */

static double peak_of(int which, bool compiled) {
    int ends[2];
    double megabytes = 0;
    if (pipe(ends) != 0)
        return 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        tt_compiled *own = compiled ? make(which, false) : NULL;
        for (int i = 0; i < 3; i++)
            one_call(which, own);
        char line[256];
        FILE *status = fopen("/proc/self/status", "r");
        while (status != NULL && fgets(line, sizeof line, status) != NULL)
            if (strncmp(line, "VmHWM:", 6) == 0)
                megabytes = atof(line + 6) / 1024;
        if (write(ends[1], &megabytes, sizeof megabytes) < 0)
            _exit(1);
        _exit(0);
    }
    close(ends[1]);
    if (read(ends[0], &megabytes, sizeof megabytes) != sizeof megabytes)
        megabytes = 0;
    close(ends[0]);
    waitpid(child, NULL, 0);
    return megabytes;
}

/* ---- two ranks ---- */

static int gpt_forward(tt_module *module, tt_tensor_list in, tt_tensor **out) {
    (void)module;
    out[0] = forward(in.at[0]);
    return 1;
}

static int ddp_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *loss = tt_cross_entropy(tt_module_call(user, inputs.at[0]), inputs.at[1], -100);
    tt_backward(loss, NULL);
    outputs[0] = tt_detach(loss);
    tt_optimizer_step(optimizer);
    tt_optimizer_zero_grad(optimizer);
    return 1;
}

/* Seconds of a step on the slower rank. */
static double ddp_round(tutti_group *group, tt_module *gpt, tt_compiled *compiled) {
    tt_scope scope = tt_scope_open();
    tt_tensor *outputs[TT_GRAPH_OUTPUTS];
    check(tutti_barrier(group, NULL));
    double start = now();
    if (compiled != NULL)
        tt_compiled_call(compiled, tt_tensors_of(2, batch));
    else
        ddp_step(tt_tensors_of(2, batch), outputs, gpt);
    double taken = now() - start;
    taken = tt_item(tt_all_reduce(tt_full(tt_shape(), taken, TUTTI_F64, NULL), TUTTI_MAX, group));
    check(tt_scope_close(&scope));
    return taken;
}

/* Steps one by one and compiled, each with reductions and without: what is between is exposed. */
static tutti_status ddp_rank(tutti_world *world, void *argument) {
    static const tt_module_type type = { sizeof type, "Gpt", gpt_forward, NULL };
    tutti_group *group = tutti_world_group(world);
    int rounds = *(const int *)argument;
    double figures[4][ROUNDS];
    openblas_set_num_threads(1);
    tt_scope scope = tt_scope_open();
    make_gpt();
    tt_module *gpt = tt_module_new(&type, NULL);
    tt_module_add_child(gpt, "net", net);
    tt_data_parallel *parallel = tt_data_parallel_new(gpt, group, NULL);
    tt_compiled *compiled = NULL;
    tt_compile_options options = { .size = sizeof options, .full = true, .name = "ddp_step" };
    if (parallel == NULL || !tt_compile(ddp_step, gpt, &options, &compiled))
        check(tt_error_show());
    for (int i = -1; i < rounds; i++)
        for (int side = 0; side < 4; side++) {
            tt_data_parallel_sync(parallel, side < 2);
            double taken = ddp_round(group, gpt, side % 2 == 1 ? compiled : NULL);
            if (i >= 0)
                figures[side][i] = taken;
        }
    for (int side = 0; side < 2 && tutti_world_rank(world) == 0; side++) {
        double step = median(figures[side], rounds), local = median(figures[side + 2], rounds);
        print_row("ddp_step", side == 0 ? "one by one" : "compiled", step, side == 0 ? 0 : median(figures[0], rounds),
                  "one by one");
        print_row("ddp_step", "  of which exposed", step - local, step, "it");
    }
    tt_compiled_release(&compiled);
    tt_data_parallel_release(parallel);
    return tt_scope_close(&scope);
}

/* ---- calls ---- */

static int first_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = inputs.at[0];
    return 1;
}

static double seconds_of_call(int inputs) {
    enum {
        CALLS = 20000
    };
    tt_tensor *list[64];
    tt_compiled *compiled = NULL;
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < inputs; i++)
        list[i] = tt_zeros(tt_shape(1), TUTTI_F32, NULL);
    if (!tt_compile(first_of, NULL, NULL, &compiled))
        check(tt_error_show());
    tt_compiled_call(compiled, tt_tensors_of((size_t)inputs, list));
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        tt_scope inner = tt_scope_open();
        tt_compiled_call(compiled, tt_tensors_of((size_t)inputs, list));
        check(tt_scope_close(&inner));
    }
    double taken = (now() - start) / CALLS;
    tt_compiled_release(&compiled);
    check(tt_scope_close(&scope));
    return taken;
}

static void measure_calls(void) {
    double one = seconds_of_call(1), many = seconds_of_call(33);
    printf("%-10s %-28s %10.0f ns, and %.0f ns for each input more\n", "call", "guards and dispatch", one * 1e9,
           (many - one) / 32 * 1e9);
}

/* ---- all ---- */

int main(int count, char **arguments) {
    sides of = sides_of(count, arguments, TUTTI_SOURCE "/bench/compile.py");
    char folder[] = "/tmp/tutti-bench-XXXXXX", command[64];
    if (mkdtemp(folder) == NULL)
        return 1;
    setenv("XDG_CACHE_HOME", folder, 1); /* nothing is there */
    printf("%d threads, %d rounds\n", of.threads, of.rounds);
    for (int i = 0; i < 2; i++) /* before there are other threads */
        if (is_wanted(&of, cases[i].name)) {
            double eager = peak_of(i, false), compiled = peak_of(i, true);
            printf("%-10s %-28s %10.0f MiB, one by one %.0f\n", cases[i].name, "peak memory, compiled", compiled,
                   eager);
        }
    if (is_wanted(&of, "ddp_step"))
        check(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, ddp_rank, &of.rounds));
    snprintf(command, sizeof command, "rm -rf %s/tutti", folder);
    if (system(command) != 0)
        return 1;
    start_peer(&of);
    for (int i = 0; i < 2; i++)
        if (is_wanted(&of, cases[i].name))
            measure(i, of.rounds, of.threads);
    if (is_wanted(&of, "call"))
        measure_calls();
    end_peer();
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) == 0 ? 0 : 1;
}
