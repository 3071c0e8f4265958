/* SPDX-License-Identifier: Apache-2.0
 *
 * Random programs of views, in-place writes, custom functions and hooks, and of every operator of the table. Without
 * more, a few hundred of them are checked with finite differences, on meta tensors, and for the same bits at every
 * instruction set and with several threads. random_torch_peer.py compares them with PyTorch.
 *
 *     test_tensor_random --count 10000               more of them
 *     test_tensor_random --first 20001               others
 *     test_tensor_random --seed 4711                 one of them, printed
 *
 * A program that fails is made as small as possible and printed; its seed makes it again.
 */
#include <signal.h>
#include <unistd.h>

#include "device.h"

#include "random/program.h"

static volatile sig_atomic_t current;

/* Sanitizers call this before they end the process. */
extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void say_which(void) {
    char text[64] = "\nwhile program ";
    size_t used = strlen(text);
    unsigned number = (unsigned)current;
    char digits[16];
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    while (count > 0)
        text[used++] = digits[--count];
    memcpy(text + used, " ran\n", 5);
    if (write(STDERR_FILENO, text, used + 5) < 0)
        return;
}

static void on_crash(int signal_number) {
    say_which();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void tell_crashes(void) {
    if (__sanitizer_set_death_callback != NULL) {
        __sanitizer_set_death_callback(say_which);
        return;
    }
    signal(SIGSEGV, on_crash);
    signal(SIGABRT, on_crash);
    signal(SIGFPE, on_crash);
    signal(SIGBUS, on_crash);
}

static long number_option(const char *name, long otherwise) {
    const char *text = test_option(name);
    return text != NULL ? strtol(text, NULL, 10) : otherwise;
}

static void fail_with(program *what, program_fails *fails, void *context, char *why, size_t size) {
    uint64_t seed = what->seed;
    program_shrink(what, fails, context, why, size);
    fprintf(stderr, "program %llu fails (%s). The smallest part of it that does:\n", (unsigned long long)seed, why);
    program_print(what, stderr);
}

/* Seeds from `first` on, or from --first; every failure is told, up to ten of them. */
static void check_programs(flavour which, long first, long usual, program_fails *fails, void *context) {
    long seed = number_option("seed", -1), count = seed >= 0 ? 1 : number_option("count", usual), failures = 0;
    first = number_option("first", first);
    static program made;
    char why[512];
    tell_crashes();
    for (long i = 0; i < count && failures < number_option("failures", 10); i++) {
        current = (sig_atomic_t)(seed >= 0 ? seed : first + i);
        program_make((uint64_t)current, which, &made);
        if (seed >= 0)
            program_print(&made, stderr);
        if (fails(&made, context, why, sizeof why)) {
            fail_with(&made, fails, context, why, sizeof why);
            failures++;
        }
    }
    if (failures > 0)
        FAIL("%ld of the programs fail; each is made again by --seed", failures);
}

static long some(long count) {
    return test_sanitized() ? count / 5 : count;
}

TEST_LIMIT(random_programs_agree_with_finite_differences, 300) {
    long checked = 0;
    check_programs(SMOOTH, 1, some(800), fails_by_differences, &checked);
    CHECK(checked > 0);
}

TEST_LIMIT(random_programs_give_the_same_bits_at_every_level_and_number_of_threads, 300) {
    check_programs(PEER, 1, some(800), fails_on_levels, NULL);
}

TEST_LIMIT(random_programs_have_the_same_shapes_on_meta_tensors, 300) {
    check_programs(PEER, 1, some(800), fails_on_meta, NULL);
}

TEST_LIMIT(random_programs_give_the_same_bits_on_the_device, 300) {
    device_count counted = { .device = test_device() };
    if (counted.device == TUTTI_CPU)
        SKIP("TEST_DEVICE names none");
    check_programs(PEER, 1, some(2000), fails_on_device, &counted);
    CHECK(3 * (counted.compared - counted.rounded) > counted.compared); /* the others are compared bit by bit */
    test_device_leave();
}

TEST_LIMIT(random_programs_agree_with_pytorch, 1200) {
    const char *pipes = test_option("peer");
    int from, to;
    if (pipes == NULL || sscanf(pipes, "%d,%d", &from, &to) != 2)
        SKIP("random_torch_peer.py runs this");
    peer who = { .to = fdopen(to, "w"), .from = fdopen(from, "r") };
    CHECK(who.to != NULL && who.from != NULL);
    check_programs(PEER, number_option("first", 1), some(300), fails_against_peer, &who);
    fprintf(stderr, "%ld programs compared, %ld lines refused by both, %ld second derivatives\n", who.compared,
            who.refused, who.backwards);
}

/* ---- the generator itself ---- */

/* What has no place in a program: what is not a function of tensors, or takes a group, or draws random numbers of its
 * own, or is written in other rows already. */
static bool left_out(int index, const tt_operator_info *info) {
    static const char *const others[] = { "creation", "random", "matmul_batches", "scaled_matmul" };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (strcmp(info->family, others[i]) == 0 || strcmp(info->name, others[i]) == 0)
            return true;
    for (int i = 0; i < info->argument_count; i++) {
        tt_argument_info argument = TT_ARGUMENT_INFO_INIT;
        CHECK_OK(tt_operator_argument_at(index, i, &argument));
        if (argument.type == TT_ARGUMENT_GROUP)
            return true;
    }
    return info->prototype == NULL || !info->pure;
}

TEST(every_operator_on_tensors_can_stand_in_a_program) {
    for (int i = 0; i < tt_operator_count(); i++) {
        tt_operator_info info = TT_OPERATOR_INFO_INIT;
        CHECK_OK(tt_operator_at(i, &info));
        bool covered = left_out(i, &info);
        for (int k = 0; k < random_row_count && !covered; k++)
            covered = random_rows[k].covers != NULL && strcmp(random_rows[k].covers, info.name) == 0;
        if (!covered)
            FAIL("tests/tensor/random/rows.def has no row for %s", info.name);
    }
}

TEST(a_program_is_the_same_whenever_it_is_made) {
    static program one, other;
    program_make(17, PEER, &one);
    program_make(17, PEER, &other);
    CHECK(memcmp(&one, &other, sizeof one) == 0);
    program_make(18, PEER, &other);
    CHECK(memcmp(&one, &other, sizeof one) != 0);
}

/* Stands for a defect: a tanh of something that was multiplied. */
static bool multiplied_then_tanh(const program *what, void *context, char *why, size_t size) {
    (void)context;
    for (int i = 0; i < what->count; i++) {
        const line *one = &what->lines[i];
        if (one->gone || strcmp(one->row->name, "tanh") != 0)
            continue;
        for (int at = one->tensors[0] / RESULTS;; at = what->lines[at].tensors[0] / RESULTS) {
            if (!what->lines[at].gone && strcmp(what->lines[at].row->name, "mul") == 0)
                return snprintf(why, size, "tanh after mul") > 0;
            if (what->lines[at].gone || what->lines[at].tensor_count == 0 || what->lines[at].tensors[0] < 0)
                break;
        }
    }
    return false;
}

TEST(a_program_that_fails_is_made_as_small_as_possible) {
    static program made;
    char why[64];
    int found = 0;
    for (uint64_t seed = 1; seed < 3000 && found < 5; seed++) {
        program_make(seed, PEER, &made);
        if (!multiplied_then_tanh(&made, NULL, why, sizeof why))
            continue;
        found++;
        program_shrink(&made, multiplied_then_tanh, NULL, why, sizeof why);
        int left = 0;
        for (int i = 0; i < made.count; i++)
            left += !made.lines[i].gone;
        CHECK(left >= 3 && left <= 4); /* one leaf or two, mul, tanh */
    }
    CHECK_EQ(found, 5);
}
