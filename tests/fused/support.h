/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of fused operations share: tensors that differ from rank to rank, and the unfused forms.
 */
#ifndef TESTS_FUSED_SUPPORT_H
#define TESTS_FUSED_SUPPORT_H

#include <math.h>

#include <tutti/fused.h>
#include <tutti/peers.h>
#include <tutti/symmetric.h>

#include "../tensor/support.h"

static inline double hashed(int64_t seed, int64_t element) {
    uint64_t x = (uint64_t)seed * 1000003u + (uint64_t)element * 7919u + 12345u;
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return (double)((x ^ x >> 32) >> 11) * 0x1p-53;
}

static inline tt_tensor *made(tt_dims shape, tutti_dtype dtype, int64_t seed, bool whole) {
    int64_t count = 1;
    for (int i = 0; i < shape.count; i++)
        count *= shape.at[i];
    double *values = malloc((size_t)(count + 1) * sizeof *values);
    CHECK(values != NULL);
    for (int64_t i = 0; i < count; i++)
        values[i] = whole ? floor(hashed(seed, i) * 7) - 3 : hashed(seed, i) * 2 - 1;
    tt_tensor *x = tt_detach(tt_to(tt_from(values, shape, TUTTI_F64, NULL), dtype));
    free(values);
    return x;
}

/* Small whole numbers: every product is exact, in any order. */
static inline tt_tensor *whole(tt_dims shape, tutti_dtype dtype, int64_t seed) {
    return made(shape, dtype, seed, true);
}

static inline tt_tensor *uniform(tt_dims shape, tutti_dtype dtype, int64_t seed) {
    return made(shape, dtype, seed, false);
}

/* x in symmetric memory. */
static inline tt_tensor *symmetric(tutti_world *world, tt_tensor *x) {
    tt_tensor *copy = tt_symm_empty_strided(world, tt_sizes(x), tt_strides(x), tt_dtype(x), NULL);
    return tt_copy_(copy, x);
}

static inline tt_tensor *gathered_product(tt_tensor *shard, tt_tensor *right, int dim, tutti_group *group) {
    return tt_matmul(tt_all_gather(shard, dim, group), right);
}

static inline bool has_strides(tt_tensor *x, tt_dims strides) {
    tt_dims found = tt_strides(x);
    return found.count == strides.count &&
           memcmp(found.at, strides.at, (size_t)strides.count * sizeof strides.at[0]) == 0;
}

static inline bool has_sizes(tt_tensor *x, tt_dims sizes) {
    tt_dims found = tt_sizes(x);
    return found.count == sizes.count && memcmp(found.at, sizes.at, (size_t)sizes.count * sizeof sizes.at[0]) == 0;
}

/* The expression fails on this rank with that status and words. */
#define FAILS(expression, status, words)   \
    do {                                   \
        (void)(expression);                \
        CHECK_EQ(tt_error_show(), status); \
        CHECK_MESSAGE(words);              \
        tt_error_clear();                  \
    } while (0)

#endif
