/* SPDX-License-Identifier: Apache-2.0
 *
 * libtutti-tensor beside PyTorch's CPU eager mode, taking turns in one run: operators, an optimizer's step, a training
 * step of an MLP and of a small GPT, the overhead of a tiny call, and the peak memory of the GPT step. Copies stand
 * beside memcpy too.
 *
 *     tensor [--threads N] [--rounds N] [--python PATH] [--script bench/tensor.py] [case…]
 *
 * The peer is a Python process that runs a turn of a case when it is told to. Without PyTorch only Tutti is measured.
 * A round is a turn of each side. The ratio is Tutti's median over PyTorch's: below 1 is faster. TUTTI_ISA=avx2 limits
 * both sides.
 */
#include <math.h>
#include <sys/mman.h>

#include "gpt.h"
#include "peer.h"
#include "tensor/loop.h"
#include "tensor/parallel.h"

/* ---- cases ---- */

static tt_tensor *inputs[4];

static void forget(void) {
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    optimizer = NULL;
    net = NULL;
    for (int i = 0; i < weight_count; i++)
        tt_release(weights[i]);
    for (int i = 0; i < 4; i++) {
        tt_release(inputs[i]);
        inputs[i] = NULL;
    }
    weight_count = 0;
    tt_memory_trim();
}

static void train(tt_tensor *loss) {
    tt_backward(loss, NULL);
    tt_optimizer_step(optimizer);
    tt_optimizer_zero_grad(optimizer);
}

/* Many parameters of a transformer's sizes, 4.7 million numbers, all with gradients. */
static void adamw_setup(void) {
    for (int i = 0; i < 8; i++) {
        parameter(tt_shape(256), 1, 0);
        parameter(tt_shape(256, 256), 0.02, 0);
        parameter(tt_shape(1024, 256), 0.02, 0);
        parameter(tt_shape(1024), 1, 0);
        parameter(tt_shape(256, 1024), 0.02, 0);
    }
    for (int i = 0; i < weight_count; i++)
        tt_set_grad(weights[i], tt_randn(tt_sizes(weights[i]), TUTTI_F32, NULL));
    optimizer = tt_adamw_optimizer(net, NULL);
}
static void adamw_run(void) {
    tt_optimizer_step(optimizer);
}

static void matmul_setup(void) {
    inputs[0] = tt_keep(tt_randn(tt_shape(1024, 1024), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_randn(tt_shape(1024, 1024), TUTTI_F32, NULL));
}
static void matmul_run(void) {
    tt_matmul(inputs[0], inputs[1]);
}

static void wide_setup(void) {
    inputs[0] = tt_keep(tt_randn(tt_shape(4096, 1024), TUTTI_F32, NULL));
}
static void softmax_run(void) {
    tt_softmax(inputs[0], -1);
}

static void dropout_run(void) {
    tt_dropout(inputs[0], 0.1);
}

/* Copies, which cannot be quicker than memory is: 4096 rows of 1024. */
static void clone_run(void) {
    tt_clone(inputs[0]);
}
static void transpose_run(void) {
    tt_contiguous(tt_transpose(inputs[0], 0, 1));
}
static void cat_setup(void) {
    for (int i = 0; i < 2; i++)
        inputs[i] = tt_keep(tt_randn(tt_shape(4096, 512), TUTTI_F32, NULL));
}
static void cat_run(void) {
    tt_cat(tt_tensors(inputs[0], inputs[1]), 1);
}
static void cast_run(void) {
    tt_to(inputs[0], TUTTI_BF16);
}

static void norm_setup(void) {
    inputs[0] = tt_keep(tt_randn(tt_shape(4096, 768), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_ones(tt_shape(768), TUTTI_F32, NULL));
    inputs[2] = tt_keep(tt_zeros(tt_shape(768), TUTTI_F32, NULL));
}
static void norm_run(void) {
    tt_layer_norm(inputs[0], inputs[1], inputs[2], 1e-5);
}

static void chain_run(void) {
    tt_tensor *x = inputs[0];
    tt_add(tt_mul(tt_gelu(tt_add_scalar(tt_mul_scalar(x, 0.5), 1)), x), tt_tanh(x));
}

static void gelu_setup(void) {
    inputs[0] = tt_keep(tt_randn(tt_shape(1024, 1536), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_ones(tt_shape(1024, 1536), TUTTI_F32, NULL));
    inputs[2] = tt_keep(tt_require_grad(tt_detach(inputs[0]), true));
}
static void gelu_run(void) {
    tt_backward(tt_gelu(inputs[2]), inputs[1]);
    tt_set_grad(inputs[2], NULL);
}

static void attention_setup(void) {
    for (int i = 0; i < 3; i++)
        inputs[i] = tt_keep(tt_require_grad(tt_randn(tt_shape(4, 6, 512, 64), TUTTI_F32, NULL), true));
    inputs[3] = tt_keep(tt_ones(tt_shape(4, 6, 512, 64), TUTTI_F32, NULL));
}
static void attention_run(void) {
    tt_backward(tt_attention(inputs[0], inputs[1], inputs[2], true, 0), inputs[3]);
    for (int i = 0; i < 3; i++)
        tt_set_grad(inputs[i], NULL);
}

static void odd_setup(void) {
    inputs[0] = tt_keep(tt_randn(tt_shape(64, 37, 65), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_randn(tt_shape(64, 65, 43), TUTTI_F32, NULL));
}
static void odd_run(void) {
    for (int i = 0; i < 10; i++)
        tt_matmul(inputs[0], inputs[1]);
}

static void entropy_setup(void) {
    inputs[0] = tt_keep(tt_randn(tt_shape(1024, 8192), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_randint(0, 8192, tt_shape(1024), TUTTI_I64, NULL));
    inputs[2] = tt_keep(tt_require_grad(tt_detach(inputs[0]), true));
}
static void entropy_run(void) {
    tt_backward(tt_cross_entropy(inputs[2], inputs[1], -100), NULL);
    tt_set_grad(inputs[2], NULL);
}

static void tiny_setup(void) {
    inputs[0] = tt_keep(tt_ones(tt_shape(8), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_ones(tt_shape(8), TUTTI_F32, NULL));
}
static void tiny_run(void) {
    for (int i = 0; i < 10000; i++) {
        tt_scope scope = tt_scope_open();
        tt_add(inputs[0], inputs[1]);
        check(tt_scope_close(&scope));
    }
}
static void tiny_grad_setup(void) {
    tiny_setup();
    tt_require_grad(inputs[0], true);
}

#define MLP_BATCH 256
static void mlp_setup(void) {
    static const int sizes[] = { 784, 1024, 1024, 10 };
    for (int i = 0; i < 3; i++) {
        parameter(tt_shape(sizes[i + 1], sizes[i]), 0.03, 0);
        parameter(tt_shape(sizes[i + 1]), 0, 0);
    }
    inputs[0] = tt_keep(tt_randn(tt_shape(MLP_BATCH, 784), TUTTI_F32, NULL));
    inputs[1] = tt_keep(tt_randint(0, 10, tt_shape(MLP_BATCH), TUTTI_I64, NULL));
    optimizer = tt_adamw_optimizer(net, NULL);
}
static void mlp_run(void) {
    tt_tensor *h = inputs[0];
    for (int i = 0; i < 3; i++) {
        h = tt_linear(h, weights[2 * i], weights[2 * i + 1]);
        if (i < 2)
            h = tt_relu(h);
    }
    train(tt_cross_entropy(h, inputs[1], -100));
}

static void gpt_setup(void) {
    make_gpt();
    inputs[0] = batch[0];
    inputs[1] = batch[1];
    inputs[2] = positions;
}
static void gpt_run(void) {
    train(gpt_loss(inputs[0], inputs[1]));
}

static const struct {
    const char *name, *unit;
    double scale; /* from seconds to the unit */
    void (*setup)(void), (*run)(void);
    size_t copied; /* bytes that are read and written: the time is also shown as a multiple of that of memcpy */
} cases[] = {
    { "matmul", "ms", 1e3, matmul_setup, matmul_run },
    { "odd_matmul", "ms", 1e3, odd_setup, odd_run },
    { "softmax", "ms", 1e3, wide_setup, softmax_run },
    { "layer_norm", "ms", 1e3, norm_setup, norm_run },
    { "pointwise_chain", "ms", 1e3, wide_setup, chain_run },
    { "gelu", "ms", 1e3, gelu_setup, gelu_run },
    { "attention", "ms", 1e3, attention_setup, attention_run },
    { "cross_entropy", "ms", 1e3, entropy_setup, entropy_run },
    { "tiny_add", "ns", 1e9 / 10000, tiny_setup, tiny_run },
    { "tiny_add_grad", "ns", 1e9 / 10000, tiny_grad_setup, tiny_run },
    { "dropout", "ms", 1e3, wide_setup, dropout_run },
    { "clone", "ms", 1e3, wide_setup, clone_run, 32 << 20 },
    { "transpose_copy", "ms", 1e3, wide_setup, transpose_run, 32 << 20 },
    { "cat", "ms", 1e3, cat_setup, cat_run, 32 << 20 },
    { "cast_to_bf16", "ms", 1e3, wide_setup, cast_run, 24 << 20 },
    { "adamw", "ms", 1e3, adamw_setup, adamw_run },
    { "mlp_step", "ms", 1e3, mlp_setup, mlp_run },
    { "gpt_step", "ms", 1e3, gpt_setup, gpt_run },
};

/* ---- measuring ---- */

static double one_round(void (*run)(void)) {
    double start = now();
    tt_scope scope = tt_scope_open();
    run();
    check(tt_scope_close(&scope));
    return now() - start;
}

/* Seconds that memcpy takes to read and write so many bytes, on as many threads as the library has, between blocks in
 * large pages, as tensors are. */
typedef struct copying {
    char *to;
    const char *from;
} copying;
static void copy_part(void *context, int64_t begin, int64_t end) {
    const copying *each = context;
    memcpy(each->to + begin, each->from + begin, (size_t)(end - begin));
}
/* The same bytes as lines of 64 that go where those of a transposed copy go, and are not turned: what its places in
 * memory cost. A strip is 64 of 4096 rows of 1024. */
static void move_strips(void *context, int64_t begin, int64_t end) {
    enum {
        LINE = 64,
        SIDE = 16,
        FROM_ROW = 4096,
        TO_ROW = 16384
    };
    const copying *each = context;
    for (int64_t strip = begin; strip < end; strip++)
        for (int64_t line = 0; line < FROM_ROW / LINE; line++)
            for (int64_t row = 0; row < SIDE * 4; row++) {
                const char *from = each->from + (strip * SIDE * 4 + row % 4 * SIDE + row / 4) * FROM_ROW + line * LINE;
                char *to = each->to + (line * SIDE + row / 4) * TO_ROW + strip * LINE * 4 + row % 4 * LINE;
                tu_stream_copy(to, from, LINE);
            }
    tu_stream_end();
}
static copying copied_blocks; /* only while a row is measured that needs them: the others' memory is counted */
static void make_blocks(size_t bytes) {
    char *to = aligned_alloc(1 << 21, 32 << 20), *from = aligned_alloc(1 << 21, 32 << 20);
    if (to == NULL || from == NULL || bytes / 2 > 32 << 20)
        exit(1);
    madvise(to, 32 << 20, MADV_HUGEPAGE);
    madvise(from, 32 << 20, MADV_HUGEPAGE);
    memset(to, 1, 32 << 20);
    memset(from, 1, 32 << 20);
    copied_blocks = (copying){ to, from };
}
static void free_blocks(void) {
    free(copied_blocks.to);
    free((char *)copied_blocks.from);
    copied_blocks = (copying){ NULL, NULL };
}
static double lines_round(size_t bytes) {
    double start = now();
    tu_parallel((int64_t)bytes / 2 / (64 * 4096), 1, move_strips, &copied_blocks);
    return now() - start;
}
static double copy_round(size_t bytes) {
    double start = now();
    tu_parallel((int64_t)(bytes / 2), 1 << 18, copy_part, &copied_blocks);
    return now() - start;
}

static double peak_memory(bool reset) {
    char line[256];
    double kilobytes = 0;
    FILE *file = fopen(reset ? "/proc/self/clear_refs" : "/proc/self/status", reset ? "w" : "r");
    if (file == NULL)
        return 0;
    if (reset)
        fputs("5", file);
    else
        while (fgets(line, sizeof line, file) != NULL)
            if (strncmp(line, "VmHWM:", 6) == 0)
                kilobytes = atof(line + 6);
    fclose(file);
    return kilobytes / 1024;
}

/* A turn is what a program does that computes without a pause: the other side's threads sleep (those that look for more
 * work for some time after theirs would take part of a CPU from it), its own are awake (a turn begins with
 * a run that does not count, unless one is so long that waking threads up is nothing to it), and it lasts for some
 * milliseconds. A figure is the time of one run in it. */
#define TURN 0.01 /* seconds */
#define LONG 0.1  /* likewise */
#define MOST_RUNS 32
static int runs_of(double seconds) {
    double runs = TURN / (seconds > 0 ? seconds : TURN);
    return runs < 2 ? 1 : runs > MOST_RUNS ? MOST_RUNS : (int)runs;
}

static double turn(void (*run)(void), int runs, bool wake) {
    double sum = 0;
    if (wake)
        one_round(run);
    for (int i = 0; i < runs; i++)
        sum += one_round(run);
    return sum / runs;
}

/* A case that copies, by turns with another copy of as many bytes: neither finds its data in a cache, and what disturbs
 * one disturbs the other. How many times as long it takes. */
static double beside(void (*run)(void), double (*copy)(size_t), size_t bytes, int runs) {
    double ours = 0, copies = 0;
    if (bytes == 0)
        return 0;
    for (int i = 0; i <= runs; i++) {
        double mine = one_round(run), copied = copy(bytes);
        ours += i == 0 ? 0 : mine;
        copies += i == 0 ? 0 : copied;
    }
    return ours / copies;
}

static void measure(int which, int rounds, int threads) {
    double ours[ROUNDS], theirs[ROUNDS], copies[ROUNDS], lines[ROUNDS];
    bool turned = strcmp(cases[which].name, "transpose_copy") == 0;
    char command[64];
    if (cases[which].copied > 0)
        make_blocks(cases[which].copied);
    tt_scope scope = tt_scope_open();
    cases[which].setup();
    check(tt_scope_close(&scope));
    tt_memory_trim(); /* what only the setting up needed is no part of a peak */
    snprintf(command, sizeof command, "setup %s", cases[which].name);
    ask_peer(command);
    peak_memory(true);
    one_round(cases[which].run);
    double seconds = one_round(cases[which].run);
    int runs = runs_of(seconds);
    bool wake = seconds < LONG;
    snprintf(command, sizeof command, "run %s %d %d", cases[which].name, runs, wake);
    ask_peer(command);
    for (int i = 0; i < rounds; i++) {
        rest(threads);
        ours[i] = turn(cases[which].run, runs, wake) * cases[which].scale;
        copies[i] = beside(cases[which].run, copy_round, cases[which].copied, runs);
        lines[i] = beside(cases[which].run, lines_round, turned ? cases[which].copied : 0, runs);
        rest(threads);
        theirs[i] = ask_peer(command) * cases[which].scale;
    }
    qsort(copies, (size_t)rounds, sizeof copies[0], by_size);
    qsort(lines, (size_t)rounds, sizeof lines[0], by_size);
    qsort(ours, (size_t)rounds, sizeof ours[0], by_size);
    qsort(theirs, (size_t)rounds, sizeof theirs[0], by_size);
    double a = ours[rounds / 2], b = theirs[rounds / 2];
    printf("%-16s %10.3f %10.3f-%-10.3f %10.3f %10.3f-%-10.3f %s  ratio %.2f", cases[which].name, a, ours[0],
           ours[rounds - 1], b, theirs[0], theirs[rounds - 1], cases[which].unit, b > 0 ? a / b : 0);
    if (cases[which].copied > 0)
        printf(", of memcpy %.2f", copies[rounds / 2]);
    if (turned)
        printf(", of its lines %.2f", lines[rounds / 2]);
    printf("\n");
    if (strcmp(cases[which].name, "gpt_step") == 0) {
        double mine = peak_memory(false), peers = ask_peer("peak");
        printf("%-16s %10.0f %21s %10.0f %21s MiB  ratio %.2f\n", "gpt_peak_memory", mine, "", peers, "",
               peers > 0 ? mine / peers : 0);
    }
    fflush(stdout);
    forget();
    free_blocks();
}

int main(int count, char **arguments) {
    sides of = sides_of(count, arguments, TUTTI_SOURCE "/bench/tensor.py");
    printf("%d threads, %d rounds\n", of.threads, of.rounds);
    start_peer(&of);
    printf("%-16s %10s %21s %10s %21s\n", "", "Tutti", "min-max", "PyTorch", "min-max");
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++)
        if (is_wanted(&of, cases[i].name))
            measure(i, of.rounds, of.threads);
    end_peer();
    return 0;
}
