/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions beside calls one by one, and both beside PyTorch's: a chain of pointwise operators on 16 M
 * elements, and the whole training step of a small GPT (forward, backward, clipping, AdamW). Rounds of all sides take
 * turns; figures are medians.
 *
 *     compile [--threads N] [--rounds N] [--python PATH] [--script bench/compile.py] [chain|gpt_step|call]…
 *
 * "in blocks" is what runs where there is no compiler. "first" is the first call, with an empty cache and with what an
 * earlier process left there. `call` is what a call costs besides the work: guards and dispatch.
 */
#include <tutti/compile.h>

#include "gpt.h"
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
    SIDES
};

static void measure(int which, int rounds, int threads) {
    const char *name = cases[which].name;
    double figures[SIDES][ROUNDS], peers_first, cold, warm;
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
    if (of[THEIRS] > 0)
        print_row(name, "PyTorch eager", of[THEIRS], 0, "");
    if (of[THEIRS_COMPILED] > 0)
        print_row(name, "torch.compile", of[THEIRS_COMPILED], 0, "");
    if (of[THEIRS_COMPILED] > 0)
        print_row(name, "compiled, against torch.compile", of[COMPILED], of[THEIRS_COMPILED], "torch.compile");
    print_row(name, "first call, nothing cached", cold, peers_first, "torch.compile's");
    print_row(name, "first call, cached", warm, 0, "");
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
