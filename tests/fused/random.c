/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused forms beside the unfused pairs on many shapes that nobody would choose: sizes of 0 and 1, several dimensions,
 * every dtype, tensors that are transposed, cut out, repeated, restrided, symmetric on all ranks or on some. Numbers
 * are small and whole, so that results are exact in any order.
 *
 *     FUSED_RANDOM=1000 test_fused_random        (so many calls from a seed of their own, instead of a few)
 */
#include <unistd.h>

#include "../collective/values.h"
#include "support.h"

static const tutti_dtype dtypes[] = { TUTTI_F32,  TUTTI_F64, TUTTI_BF16, TUTTI_F16, TUTTI_C64,
                                      TUTTI_C128, TUTTI_I32, TUTTI_I64,  TUTTI_I8 };
#define DTYPES (sizeof dtypes / sizeof dtypes[0])

typedef struct draw {
    tutti_world *world;
    tutti_group *group;
    int rank, ranks;
    uint64_t state;     /* the same on all ranks */
    int64_t seed, call; /* of the values of one tensor */
} draw;

static int64_t below(draw *from, int64_t end) {
    return (int64_t)(values_random(&from->state) >> 8) % end;
}

static int64_t any_size(draw *from) {
    static const int64_t sizes[] = { 0, 1, 2, 3, 5, 8, 17, 40 };
    return sizes[below(from, below(from, 4) == 0 ? 8 : 7)];
}

/* Of that shape, and laid out in one of several ways, the same on all ranks. */
static tt_tensor *any_tensor(draw *from, tt_dims shape, tutti_dtype dtype) {
    int last = shape.count - 1;
    tt_dims other = shape;
    int64_t seed = from->seed++ * 8 + from->rank;
    switch (below(from, 7)) {
    case 0: /* the first and last dimension are exchanged in memory */
        other.at[0] = shape.at[last];
        other.at[last] = shape.at[0];
        return tt_transpose(whole(other, dtype, seed), 0, last);
    case 1: /* cut out of a larger one */
        other.at[last] += 3;
        return tt_narrow(whole(other, dtype, seed), last, 1, shape.at[last]);
    case 2: /* one row, repeated */
        other.at[0] = 1;
        return tt_expand(whole(other, dtype, seed), shape);
    case 3:
        return symmetric(from->world, whole(shape, dtype, seed));
    case 4: /* on one rank only */
        return from->rank == 0 ? symmetric(from->world, whole(shape, dtype, seed)) : whole(shape, dtype, seed);
    case 5:
        return tt_restride(whole(shape, dtype, seed), (int)below(from, shape.count));
    default:
        return whole(shape, dtype, seed);
    }
}

/* Leading sizes of two to four dimensions; the last is the inner one. */
static tt_dims any_shape(draw *from) {
    tt_dims shape = { .count = 2 + (int)below(from, 3) };
    for (int i = 0; i < shape.count; i++)
        shape.at[i] = any_size(from);
    shape.at[shape.count - 1] = shape.at[shape.count - 1] % 9;
    return shape;
}

static void check_equal(const draw *from, tt_tensor *found, tt_tensor *expected) {
    if (tt_error_show() != TUTTI_OK || !tt_equal(found, expected))
        fprintf(stderr, "call %lld: %s\n", (long long)from->call, tutti_error_message());
    CHECK_OK(tt_error_show());
    CHECK(tt_equal(found, expected));
}

static void gather_once(draw *from) {
    tutti_dtype dtype = dtypes[below(from, DTYPES)];
    tt_dims shape = any_shape(from);
    int dim = (int)below(from, shape.count);
    bool last = dim == shape.count - 1;
    int64_t depth = shape.at[shape.count - 1] * (last ? from->ranks : 1), count = 1 + below(from, 3);
    tt_tensor *shard = any_tensor(from, shape, dtype), *rights[3], *all = NULL;
    for (int i = 0; i < count; i++)
        rights[i] = any_tensor(from, tt_shape(depth, any_size(from)), dtype);
    bool wants_all = below(from, 2) == 0;
    tt_tensor_list found = tt_fused_all_gather_matmul(shard, tt_tensors_of((size_t)count, rights), dim, from->group,
                                                      wants_all ? &all : NULL);
    tt_tensor *expected = tt_all_gather(tt_contiguous(shard), dim, from->group);
    for (int i = 0; i < count; i++)
        check_equal(from, found.count > 0 ? found.at[i] : NULL, tt_matmul(expected, rights[i]));
    if (wants_all)
        check_equal(from, all, expected);
}

static void scatter_once(draw *from) {
    tutti_dtype dtype = dtypes[below(from, DTYPES)];
    tt_dims shape = any_shape(from);
    int dim = (int)below(from, shape.count);
    int64_t columns = any_size(from);
    if (dim < shape.count - 1)
        shape.at[dim] *= from->ranks;
    else
        columns *= from->ranks;
    tt_tensor *left = any_tensor(from, shape, dtype),
              *right = any_tensor(from, tt_shape(shape.at[shape.count - 1], columns), dtype);
    check_equal(from, tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, dim, from->group),
                tt_reduce_scatter(tt_contiguous(tt_matmul(left, right)), TUTTI_SUM, dim, from->group));
}

static tt_tensor *any_scale(draw *from, tt_dims shape) {
    return tt_add_scalar(tt_abs(any_tensor(from, shape, TUTTI_F32)), 1);
}

static void scaled_once(draw *from) {
    tt_dims shape = any_shape(from), rows = shape, all = shape;
    int dim = (int)below(from, shape.count - 1), mode = (int)below(from, 3);
    int64_t depth = shape.at[shape.count - 1], columns = any_size(from);
    tutti_dtype dtype = below(from, 2) == 0 ? TUTTI_F8_E4M3 : TUTTI_F8_E5M2, out = below(from, 2) == 0 ? TUTTI_F32 : 0;
    rows.at[rows.count - 1] = all.at[all.count - 1] = 1;
    all.at[dim] *= from->ranks;
    tt_tensor *shard = any_tensor(from, shape, dtype), *right = any_tensor(from, tt_shape(depth, columns), dtype),
              *of_a, *of_b = any_scale(from, below(from, 2) == 0 ? tt_shape(1) : tt_shape(1, columns));
    if (mode == 0) {
        of_a = any_scale(from, rows);
    } else { /* the same on all ranks */
        int rank = from->rank;
        from->rank = 0;
        of_a = tt_contiguous(any_scale(from, mode == 1 ? tt_shape(1) : all));
        from->rank = rank;
    }
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &out;
    options.out_dtype_count = 1;
    tt_tensor_list found = tt_fused_all_gather_scaled_matmul(shard, tt_tensors(right), of_a, tt_tensors(of_b), dim,
                                                             from->group, &options, NULL);
    tt_tensor *gathered = tt_all_gather(tt_contiguous(shard), dim, from->group),
              *scales = mode == 0 ? tt_all_gather(tt_contiguous(of_a), dim, from->group) : of_a;
    int64_t count = 1;
    for (int i = 0; i < all.count - 1; i++)
        count *= all.at[i];
    all.at[all.count - 1] = columns;
    scales = tt_reshape(scales, mode == 1 ? tt_shape(1) : tt_shape(count, 1));
    tt_tensor *product = tt_scaled_matmul(tt_reshape(gathered, tt_shape(count, depth)), right, scales, of_b, NULL, NULL,
                                          out != 0 ? out : dtype, false);
    check_equal(from, found.count > 0 ? found.at[0] : NULL, tt_reshape(product, all));
}

/* As it is, or with its rows put together first, as a compiler sees it. */
static void scaled_scatter_once(draw *from) {
    tt_dims shape = any_shape(from), rows = shape, product = shape;
    int dim = (int)below(from, shape.count - 1);
    int64_t depth = shape.at[shape.count - 1], columns = any_size(from), count = 1;
    tutti_dtype dtype = below(from, 2) == 0 ? TUTTI_F8_E4M3 : TUTTI_F8_E5M2;
    shape.at[dim] *= from->ranks;
    rows.at[dim] = product.at[dim] = shape.at[dim];
    rows.at[rows.count - 1] = 1;
    product.at[product.count - 1] = columns;
    for (int i = 0; i < shape.count - 1; i++)
        count *= shape.at[i];
    tt_tensor *left = any_tensor(from, shape, dtype), *right = any_tensor(from, tt_shape(depth, columns), dtype);
    bool whole_scale = below(from, 2) == 0, flat = below(from, 2) == 0;
    tt_tensor *of_a = any_scale(from, whole_scale ? tt_shape(1) : rows), *of_b = any_scale(from, tt_shape(1, columns)),
              *flat_left = tt_reshape(left, tt_shape(count, depth)),
              *flat_scale = tt_reshape(of_a, whole_scale ? tt_shape(1) : tt_shape(count, 1));
    tt_tensor *expected = tt_scaled_matmul(flat_left, right, flat_scale, of_b, NULL, NULL, TUTTI_F32, false);
    check_equal(from,
                tt_fused_scaled_matmul_reduce_scatter(flat ? flat_left : left, right, flat ? flat_scale : of_a, of_b,
                                                      TUTTI_SUM, dim, flat ? 0 : dim, product, NULL, NULL, TUTTI_F32,
                                                      false, from->group),
                tt_reduce_scatter(tt_reshape(expected, product), TUTTI_SUM, dim, from->group));
}

static void many_calls(tutti_world *world, void *argument) {
    static void (*const calls[])(draw *) = { gather_once,  scatter_once, gather_once,
                                             scatter_once, scaled_once,  scaled_scatter_once };
    const int64_t *settings = argument;
    draw from = { .world = world, .group = tutti_world_group(world), .state = (uint64_t)settings[1] };
    from.rank = tutti_group_rank(from.group);
    from.ranks = tutti_group_size(from.group);
    for (from.call = 0; from.call < settings[0]; from.call++) {
        tt_scope scope = tt_scope_open();
        calls[below(&from, 6)](&from);
        CHECK_OK(tt_scope_close(&scope));
    }
}

static void run_many(int ranks, int64_t seed) {
    const char *asked = getenv("FUSED_RANDOM");
    int64_t settings[2] = { test_sanitized() ? 30 : 100, seed };
    if (asked != NULL) {
        settings[0] = atoll(asked);
        settings[1] = seed + 10 * (int64_t)getpid();
        fprintf(stderr, "seed %lld\n", (long long)settings[1]);
    }
    test_threads(ranks, many_calls, settings);
}

TEST_LIMIT(random_calls_of_one_rank_give_what_the_unfused_pairs_give, 600) {
    run_many(1, 1);
}

TEST_LIMIT(random_calls_of_two_ranks_give_what_the_unfused_pairs_give, 600) {
    run_many(2, 2);
}

TEST_LIMIT(random_calls_of_three_ranks_with_two_threads_each_give_what_the_unfused_pairs_give, 600) {
    CHECK_EQ(setenv("TUTTI_THREADS", "2", 1), 0);
    run_many(3, 3);
}

TEST_LIMIT(random_calls_of_five_ranks_give_what_the_unfused_pairs_give, 600) {
    run_many(5, 5);
}
