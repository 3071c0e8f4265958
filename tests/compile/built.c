/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions whose loops are built by the system's compiler: the same bits, forward and backward, from several
 * ranks at once, and from the cache.
 */
#include <ftw.h>
#include <stdlib.h>
#include <unistd.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "../harness.h"

static char folder[128];

static void own_cache(void) {
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.80s/tutti-built-XXXXXX", base != NULL && base[0] == '/' ? base : "/tmp");
    CHECK(mkdtemp(folder) != NULL);
    setenv("XDG_CACHE_HOME", folder, 1);
    setenv("TUTTI_CC_LIMIT", "600", 1);
}

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *at) {
    (void)about, (void)type, (void)at;
    return remove(path);
}

static int block(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    tt_tensor *y = tt_add_scalar(tt_mul(tt_relu(tt_sub(tt_tanh(tt_mul_scalar(x, 2)), x)), tt_sigmoid(x)), 0.5);
    outputs[0] = tt_sum(tt_mul(tt_softmax(y, 1), x));
    return 1;
}

static void check_block(tt_compiled *fast, double shift) {
    tt_tensor *x = tt_add_scalar(tt_mul_scalar(tt_arange(0, 3 * 130, 1, TUTTI_F32, NULL), 0.01), shift);
    x = tt_require_grad(tt_detach(tt_reshape(x, tt_shape(3, 130))), true);
    tt_tensor *twin = tt_require_grad(tt_clone(tt_detach(x)), true), *expected;
    tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
    block(tt_tensors(twin), &expected, NULL);
    CHECK(results.count == 1 && tt_equal(tt_detach(results.at[0]), tt_detach(expected)));
    CHECK(tt_backward(results.at[0], NULL) && tt_backward(expected, NULL));
    CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
}

static void check_all(void) {
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(block, NULL, TUTTI_OPTIONS(tt_compile_options, .full = true, .strict = true), &fast));
    for (int i = 0; i < 3; i++)
        check_block(fast, i - 2.0);
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
    CHECK(tt_compiled_count(fast, &counts) && counts.captures == 1 && counts.hits == 2 && counts.eager == 0);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static void check_rank(tutti_world *world, void *argument) {
    (void)argument;
    check_all();
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_LIMIT(what_is_built_computes_the_bits_of_eager_code_on_ranks_that_build_at_once, 300) {
    own_cache();
    test_processes(2, check_rank, NULL);
    test_threads(2, check_rank, NULL);
    check_all(); /* from the cache */
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static int choices(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_where(tt_gt(x, tt_number(1)), x, tt_neg(x));
    return 1;
}

TEST_LIMIT(integers_are_chosen_whole, 300) {
    static const tutti_dtype dtypes[] = { TUTTI_I64, TUTTI_U64, TUTTI_I32, TUTTI_U8 };
    own_cache();
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        tt_compiled *fast;
        tt_tensor *x = tt_to(tt_mul_scalar(tt_arange(-40, 60, 1, TUTTI_I64, NULL), 0x123456789), dtypes[i]), *expected;
        CHECK(tt_compile(choices, NULL, TUTTI_OPTIONS(tt_compile_options, .full = true), &fast));
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
        choices(tt_tensors(x), &expected, NULL);
        CHECK(results.count == 1 && tt_equal(results.at[0], expected));
        tt_compiled_release(&fast);
    }
    CHECK_OK(tt_scope_close(&scope));
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
