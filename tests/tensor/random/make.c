/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs from a seed.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/operator.h"

#include "make.h"

struct writer {
    program *program;
    machine *on;
    uint64_t state;
};

/* ---- chance ---- */

static uint64_t draw(writer *to) {
    uint64_t x = to->state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static int64_t below(writer *to, int64_t limit) {
    return limit <= 0 ? 0 : (int64_t)(draw(to) % (uint64_t)limit);
}

static int64_t between(writer *to, int64_t low, int64_t high) {
    return low + below(to, high - low + 1);
}

static bool chance(writer *to, int percent) {
    return below(to, 100) < percent;
}

/* Multiples of 1/4 in PEER programs, whole ones often; others where ties would be kinks. */
static double some_number(writer *to) {
    if (to->program->flavour == SMOOTH)
        return (double)between(to, -150, 150) / 97 + 0.013;
    return chance(to, 50) ? (double)between(to, -2, 3) : (double)between(to, -8, 8) / 4;
}

/* ---- what is there ---- */

static tt_tensor *at(const writer *to, int which) {
    return to->on->tensors[which];
}

typedef bool quality(const writer *to, tt_tensor *x, const void *context);

/* One of the registers that have the quality, later ones more often; -1: there is none. */
static int find(writer *to, quality *has, const void *context) {
    int found[LINES * RESULTS], count = 0;
    for (int i = 0; i < to->program->count * RESULTS; i++)
        if (at(to, i) != NULL && (has == NULL || has(to, at(to, i), context)))
            found[count++] = i;
    if (count == 0)
        return -1;
    int64_t one = below(to, count), other = below(to, count);
    return found[one > other ? one : other];
}

static bool is_float(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tu_is_float(tt_dtype(x)) || tu_is_complex(tt_dtype(x));
}
static bool is_real_float(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tu_is_float(tt_dtype(x));
}
static bool is_complex(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tu_is_complex(tt_dtype(x));
}
static bool is_pairs(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tt_dtype(x) <= TUTTI_F32 && tt_dim_count(x) > 0 && tt_size(x, -1) == 2;
}
static bool is_matrix(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tu_is_float(tt_dtype(x)) && tt_dim_count(x) >= 2;
}
static bool has_dims(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tt_dim_count(x) > 0;
}
static bool has_float_dims(const writer *to, tt_tensor *x, const void *context) {
    return is_real_float(to, x, context) && tt_dim_count(x) > 0;
}
static bool has_history(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tt_requires_grad(x);
}
static bool is_small(const writer *to, tt_tensor *x, const void *context) {
    (void)to, (void)context;
    return tt_numel(x) <= 64;
}

/* Expands to the sizes of the context. */
static bool expands_to(const writer *to, tt_tensor *x, const void *context) {
    const tt_tensor *other = context;
    (void)to;
    int skip = tt_dim_count(other) - tt_dim_count(x);
    if (skip < 0)
        return false;
    for (int i = 0; i < tt_dim_count(x); i++)
        if (tt_size(x, i) != 1 && tt_size(x, i) != tt_size(other, i + skip))
            return false;
    return true;
}
static bool broadcasts_with(const writer *to, tt_tensor *x, const void *context) {
    const tt_tensor *other = context;
    (void)to;
    int ndim = tt_dim_count(x) < tt_dim_count(other) ? tt_dim_count(x) : tt_dim_count(other);
    for (int i = 1; i <= ndim; i++)
        if (tt_size(x, -i) != tt_size(other, -i) && tt_size(x, -i) != 1 && tt_size(other, -i) != 1)
            return false;
    return true;
}
static bool is_alike(const writer *to, tt_tensor *x, const void *context) {
    return tt_dtype(x) == tt_dtype((const tt_tensor *)context) && expands_to(to, x, context);
}

/* ---- leaves ---- */

static line *append(writer *to, const char *name) {
    if (to->program->count >= LINES - 1)
        return NULL; /* the last one is kept for the gradients */
    line *made = &to->program->lines[to->program->count];
    *made = (line){ 0 };
    for (int i = 0; i < random_row_count && made->row == NULL; i++)
        if (strcmp(random_rows[i].name, name) == 0)
            made->row = &random_rows[i];
    return made;
}

static int finish(writer *to) {
    int index = to->program->count++;
    machine_step(to->on, index);
    return RESULTS * index;
}

/* Row-major, or with gaps, or with the dimensions stored in another order. */
static tt_dims some_strides(writer *to, const tt_dims *sizes) {
    tt_dims strides = *sizes;
    int order[TT_MAX_DIMS];
    for (int i = 0; i < sizes->count; i++)
        order[i] = i;
    if (chance(to, 30))
        for (int i = sizes->count - 1; i > 0; i--) {
            int other = (int)below(to, i + 1), held = order[i];
            order[i] = order[other];
            order[other] = held;
        }
    int64_t step = chance(to, 20) ? 2 : 1;
    for (int i = sizes->count - 1; i >= 0; i--) {
        strides.at[order[i]] = step;
        step *= sizes->at[order[i]] > 0 ? sizes->at[order[i]] : 1;
        step += chance(to, 10) ? 1 : 0;
    }
    return strides;
}

static int make_leaf(writer *to, tutti_dtype dtype, tt_dims sizes, int kind, int64_t limit, bool grad) {
    line *made = append(to, "leaf");
    if (made == NULL)
        return -1;
    made->dtype = dtype;
    made->dims[0] = sizes;
    made->dims[1] = some_strides(to, &sizes);
    made->ints[0] = below(to, 100000);
    made->ints[1] = kind;
    made->ints[2] = limit;
    made->ints[3] = grad && (tu_is_float(dtype) || tu_is_complex(dtype));
    return finish(to);
}

static tt_dims some_sizes(writer *to, int most) {
    tt_dims sizes = { .count = (int)below(to, most + 1) };
    for (int i = 0; i < sizes.count; i++) {
        static const int64_t usual[] = { 1, 2, 2, 2, 3, 3, 4, 0 };
        sizes.at[i] = usual[below(to, chance(to, 4) ? 8 : 7)];
    }
    return sizes;
}

static tutti_dtype some_dtype(writer *to) {
    static const tutti_dtype usual[] = { TUTTI_F64, TUTTI_F64, TUTTI_F32, TUTTI_F32, TUTTI_C128, TUTTI_C64 };
    if (to->program->flavour == SMOOTH)
        return TUTTI_F64;
    if (chance(to, 80))
        return usual[below(to, 6)];
    return (tutti_dtype)between(to, TUTTI_F64, TUTTI_C128);
}

static int some_kind(writer *to) {
    return to->program->flavour == SMOOTH ? KIND_REAL : chance(to, 60) ? KIND_LATTICE : KIND_REAL;
}

/* A float tensor of these sizes and this dtype: one that is there, or a new leaf. */
typedef struct wanted {
    tutti_dtype dtype;
    tt_dims sizes;
} wanted;
static bool is_wanted(const writer *to, tt_tensor *x, const void *context) {
    const wanted *what = context;
    (void)to;
    if (tt_dtype(x) != what->dtype || tt_dim_count(x) != what->sizes.count)
        return false;
    for (int i = 0; i < what->sizes.count; i++)
        if (tt_size(x, i) != what->sizes.at[i])
            return false;
    return true;
}
static int tensor_of(writer *to, tutti_dtype dtype, tt_dims sizes) {
    wanted what = { dtype, sizes };
    int there = chance(to, 50) ? find(to, is_wanted, &what) : -1;
    return there >= 0 ? there : make_leaf(to, dtype, sizes, some_kind(to), 0, chance(to, 70));
}

/* The row of `made` may have moved down: leaves that it needs come first. */
static bool uses(line *made, int count, const int *tensors) {
    made->tensor_count = count;
    for (int i = 0; i < count; i++) {
        made->tensors[i] = tensors[i];
        if (tensors[i] < 0 && made->row->arguments[0] != 'o' && strchr(made->row->arguments, 'o') == NULL)
            return false;
    }
    return count == 0 || tensors[0] >= 0;
}
#define USES(...) uses(made, sizeof((int[]){ __VA_ARGS__ }) / sizeof(int), (int[]){ __VA_ARGS__ })

/* ---- makers ---- */

bool make_nothing(writer *to, line *made) {
    (void)to;
    made->tensor_count = 0;
    return true;
}
bool make_any(writer *to, line *made) {
    return USES(find(to, chance(to, 60) ? is_float : NULL, NULL));
}
bool make_floats(writer *to, line *made) {
    return USES(find(to, chance(to, 97) ? is_float : NULL, NULL));
}
bool make_complex(writer *to, line *made) {
    return USES(find(to, chance(to, 95) ? is_complex : NULL, NULL));
}
bool make_pairs(writer *to, line *made) {
    return USES(find(to, chance(to, 95) ? is_pairs : NULL, NULL));
}
/* For functions of positive numbers: a new leaf of them, or in PEER programs anything. */
bool make_positive(writer *to, line *made) {
    if (to->program->flavour == PEER && chance(to, 30))
        return make_floats(to, made);
    return USES(make_leaf(to, some_dtype(to), some_sizes(to, 3), KIND_POSITIVE, 0, true));
}

bool make_binary(writer *to, line *made) {
    int first = find(to, NULL, NULL);
    if (first < 0)
        return false;
    made->numbers[0] = some_number(to);
    return USES(first, find(to, chance(to, 96) ? broadcasts_with : NULL, at(to, first)));
}
bool make_into(writer *to, line *made) {
    int first = find(to, chance(to, 70) ? is_float : NULL, NULL);
    if (first < 0)
        return false;
    made->numbers[0] = some_number(to);
    return USES(first, find(to, chance(to, 97) ? expands_to : NULL, at(to, first)));
}
bool make_alike(writer *to, line *made) {
    int first = find(to, is_float, NULL);
    if (first < 0)
        return false;
    made->numbers[0] = some_number(to);
    int second = find(to, is_alike, at(to, first)), third = find(to, is_alike, at(to, first));
    return strncmp(made->row->arguments, "ttt", 3) == 0 ? USES(first, second, third) : USES(first, second);
}
bool make_power(writer *to, line *made) {
    tt_dims sizes = some_sizes(to, 2);
    tutti_dtype dtype = chance(to, 90) ? TUTTI_F64 : some_dtype(to);
    if (to->program->flavour == PEER && chance(to, 40))
        return make_binary(to, made);
    int base = make_leaf(to, dtype, sizes, KIND_POSITIVE, 0, true);
    return base >= 0 && USES(base, find(to, broadcasts_with, at(to, base)));
}
bool make_number(writer *to, line *made) {
    made->numbers[0] = some_number(to);
    return make_any(to, made);
}
bool make_exponent(writer *to, line *made) {
    static const double exponents[] = { 2, 3, 1, 0, -1, 0.5, 2.5 };
    made->numbers[0] = exponents[below(to, to->program->flavour == SMOOTH ? 4 : 7)];
    return make_any(to, made);
}
bool make_bounds(writer *to, line *made) {
    made->numbers[0] = some_number(to) - 1;
    made->numbers[1] = chance(to, 90) ? made->numbers[0] + 1.53 : some_number(to);
    return USES(find(to, chance(to, 95) ? is_real_float : NULL, NULL));
}
bool make_where(writer *to, line *made) {
    int first = find(to, is_float, NULL);
    if (first < 0)
        return false;
    int second = find(to, broadcasts_with, at(to, first));
    int mask = make_leaf(to, TUTTI_BOOL, tt_sizes(at(to, first)), KIND_LATTICE, 0, false);
    return USES(mask, first, second);
}
bool make_masked(writer *to, line *made) {
    int first = find(to, is_float, NULL);
    if (first < 0)
        return false;
    made->numbers[0] = some_number(to);
    int mask = make_leaf(to, TUTTI_BOOL, tt_sizes(at(to, first)), KIND_LATTICE, 0, false);
    return USES(first, mask);
}

/* A dimension; once in a while one that is not there. */
static int64_t some_dim(writer *to, tt_tensor *x) {
    int count = tt_dim_count(x) > 0 ? tt_dim_count(x) : 1;
    return chance(to, 2) ? count : between(to, -count, count - 1);
}
static int64_t size_at(tt_tensor *x, int64_t dim) {
    int count = tt_dim_count(x);
    return dim >= -count && dim < count ? tt_size(x, (int)dim) : 1;
}

bool make_dim(writer *to, line *made) {
    bool network = strstr(made->row->name, "softmax") != NULL;
    int x = find(to, network && chance(to, 97) ? is_real_float : NULL, NULL);
    if (x >= 0)
        made->ints[0] = some_dim(to, at(to, x));
    return USES(x);
}
bool make_new_dim(writer *to, line *made) {
    int x = find(to, NULL, NULL);
    if (x >= 0 && tt_dim_count(at(to, x)) > 5)
        return false;
    if (x >= 0)
        made->ints[0] = between(to, -tt_dim_count(at(to, x)) - 1, tt_dim_count(at(to, x)));
    return USES(x);
}
bool make_two_dims(writer *to, line *made) {
    int x = find(to, chance(to, 95) ? has_dims : NULL, NULL);
    if (x < 0)
        return false;
    made->ints[0] = some_dim(to, at(to, x));
    made->ints[1] = some_dim(to, at(to, x));
    if (strcmp(made->row->name, "flatten") == 0 && chance(to, 90)) { /* in order */
        int count = tt_dim_count(at(to, x));
        made->ints[0] = below(to, count);
        made->ints[1] = between(to, made->ints[0], count > 0 ? count - 1 : 0);
    }
    return USES(x);
}
/* A tensor, nearly always one with dimensions, and one of them as the first number; -1: there is none. */
static int find_along(writer *to, line *made) {
    int x = find(to, chance(to, 98) ? has_dims : NULL, NULL);
    if (x >= 0)
        made->ints[0] = some_dim(to, at(to, x));
    return x;
}
bool make_narrow(writer *to, line *made) {
    int x = find_along(to, made);
    if (x < 0)
        return false;
    int64_t size = size_at(at(to, x), made->ints[0]);
    made->ints[1] = below(to, size + 1);
    made->ints[2] = chance(to, 3) ? size + 1 : between(to, made->ints[1] < size ? 1 : 0, size - made->ints[1]);
    if (chance(to, 5))
        made->ints[1] -= size; /* from the end */
    return USES(x);
}
bool make_select(writer *to, line *made) {
    int x = find_along(to, made);
    if (x < 0)
        return false;
    int64_t size = size_at(at(to, x), made->ints[0]);
    made->ints[1] = chance(to, 3) ? size : between(to, -size, size > 0 ? size - 1 : 0);
    return USES(x);
}
bool make_slice(writer *to, line *made) {
    int x = find_along(to, made);
    if (x < 0)
        return false;
    int64_t size = size_at(at(to, x), made->ints[0]);
    made->ints[1] = between(to, chance(to, 20) ? -size - 1 : 0, size);
    made->ints[2] = chance(to, 20) ? between(to, -size, size + 2) : between(to, made->ints[1] > 0 ? 1 : 0, size);
    made->ints[3] = chance(to, 2) ? 0 : between(to, 1, 3);
    return USES(x);
}
bool make_permute(writer *to, line *made) {
    int x = find(to, NULL, NULL);
    if (x < 0)
        return false;
    int count = tt_dim_count(at(to, x));
    made->dims[0].count = count;
    for (int i = 0; i < count; i++)
        made->dims[0].at[i] = i;
    for (int i = count - 1; i > 0; i--) {
        int64_t other = below(to, i + 1), held = made->dims[0].at[i];
        made->dims[0].at[i] = made->dims[0].at[other];
        made->dims[0].at[other] = held;
    }
    if (count > 0 && chance(to, 10))
        made->dims[0].at[below(to, count)] -= chance(to, 80) ? count : 1;
    return USES(x);
}
bool make_expand(writer *to, line *made) {
    int x = find(to, is_small, NULL);
    if (x < 0)
        return false;
    int count = tt_dim_count(at(to, x)), more = count < 4 ? (int)below(to, 2) : 0;
    made->dims[0].count = count + more;
    for (int i = 0; i < more; i++)
        made->dims[0].at[i] = chance(to, 5) ? 0 : between(to, 1, 3);
    for (int i = 0; i < count; i++) {
        int64_t size = tt_size(at(to, x), i);
        made->dims[0].at[more + i] = chance(to, 30) ? -1 : size == 1 && chance(to, 60) ? between(to, 0, 3) : size;
    }
    if (made->dims[0].count > 0 && chance(to, 3))
        made->dims[0].at[0] = 5;
    return USES(x);
}
bool make_reshape(writer *to, line *made) {
    int x = find(to, NULL, NULL);
    if (x < 0)
        return false;
    int64_t left = tt_numel(at(to, x));
    tt_dims *sizes = &made->dims[0];
    sizes->count = 0;
    for (int i = 0; i < 3 && left > 1; i++) {
        static const int64_t factors[] = { 1, 2, 3, 4, 6 };
        int64_t factor = factors[below(to, 5)];
        if (left % factor == 0) {
            sizes->at[sizes->count++] = factor;
            left /= factor;
        }
    }
    if (left != 1 || chance(to, 30))
        sizes->at[sizes->count++] = left;
    if (sizes->count > 0 && chance(to, 20))
        sizes->at[below(to, sizes->count)] = -1;
    if (sizes->count > 0 && chance(to, 3))
        sizes->at[0] = 5;
    return USES(x);
}
/* Differences see also what lies in the storage beside a view, and gradients do not. */
static bool is_whole_float(const writer *to, tt_tensor *x, const void *context) {
    return is_float(to, x, context) && tt_offset(x) == 0 &&
           (size_t)tt_numel(x) * tutti_dtype_size(tt_dtype(x)) == tt_storage_bytes(x);
}
bool make_as_strided(writer *to, line *made) {
    int x = find(to, to->program->flavour == SMOOTH ? is_whole_float : is_float, NULL);
    if (x < 0)
        return false;
    int64_t room = (int64_t)(tt_storage_bytes(at(to, x)) / tutti_dtype_size(tt_dtype(at(to, x)))), reach = 0;
    made->dims[0].count = made->dims[1].count = (int)below(to, 4);
    for (int i = 0; i < made->dims[0].count; i++) {
        int64_t size = between(to, chance(to, 5) ? 0 : 1, 3), stride = between(to, chance(to, 10) ? 0 : 1, 4);
        while (size > 1 && reach + (size - 1) * stride >= room)
            size--;
        made->dims[0].at[i] = size;
        made->dims[1].at[i] = stride;
        reach += (size - 1) * stride;
    }
    made->ints[0] = chance(to, 4) ? room : below(to, room - reach);
    return USES(x);
}
bool make_split(writer *to, line *made) {
    int x = find(to, has_dims, NULL);
    if (x < 0)
        return false;
    made->ints[0] = some_dim(to, at(to, x));
    int64_t left = size_at(at(to, x), made->ints[0]);
    made->dims[0].count = (int)between(to, 1, 3);
    for (int i = 0; i < made->dims[0].count; i++) {
        int64_t part = i == made->dims[0].count - 1 && !chance(to, 3) ? left : below(to, left + 1);
        made->dims[0].at[i] = part;
        left -= part;
    }
    return USES(x);
}
bool make_chunk(writer *to, line *made) {
    int x = find(to, has_dims, NULL);
    if (x < 0)
        return false;
    made->ints[0] = some_dim(to, at(to, x));
    made->ints[1] = chance(to, 2) ? 0 : between(to, 1, 4);
    return USES(x);
}
bool make_to(writer *to, line *made) {
    made->dtype = chance(to, 70) ? (tutti_dtype)between(to, TUTTI_F64, TUTTI_BF16)
                                 : (tutti_dtype)between(to, TUTTI_F64, TUTTI_C128);
    return make_any(to, made);
}
bool make_reduce(writer *to, line *made) {
    int x = find(to, NULL, NULL);
    if (x < 0)
        return false;
    made->dims[0].count = 0;
    for (int i = 0; i < tt_dim_count(at(to, x)); i++)
        if (chance(to, 50))
            made->dims[0].at[made->dims[0].count++] = chance(to, 30) ? i - tt_dim_count(at(to, x)) : i;
    if (made->dims[0].count > 0 && chance(to, 2))
        made->dims[0].at[made->dims[0].count - 1] = made->dims[0].at[0];
    made->ints[0] = chance(to, 50);
    return USES(x);
}
bool make_arg(writer *to, line *made) {
    made->ints[1] = chance(to, 50);
    return make_dim(to, made);
}
bool make_sum_to(writer *to, line *made) {
    int x = find(to, is_float, NULL);
    if (x < 0)
        return false;
    int count = tt_dim_count(at(to, x)), drop = (int)below(to, count + 1);
    made->dims[0].count = count - drop;
    for (int i = drop; i < count; i++)
        made->dims[0].at[i - drop] = chance(to, 50) ? 1 : tt_size(at(to, x), i);
    return USES(x);
}
bool make_cat(writer *to, line *made) {
    int first = find(to, has_dims, NULL);
    if (first < 0)
        return false;
    made->ints[0] = below(to, tt_dim_count(at(to, first)));
    tt_dims sizes = tt_sizes(at(to, first));
    sizes.at[made->ints[0]] = between(to, 0, 3);
    if (chance(to, 3))
        sizes.at[0]++;
    tutti_dtype dtype = chance(to, 90) ? tt_dtype(at(to, first)) : some_dtype(to);
    int second = tensor_of(to, dtype, sizes);
    return chance(to, 30) ? USES(first, second, first) : USES(first, second);
}
bool make_stack(writer *to, line *made) {
    int first = find(to, NULL, NULL);
    if (first < 0)
        return false;
    made->ints[0] = below(to, tt_dim_count(at(to, first)) + 1);
    tt_dims sizes = tt_sizes(at(to, first));
    int second = tensor_of(to, tt_dtype(at(to, first)), sizes);
    return USES(first, second);
}

static int index_of(writer *to, tt_dims sizes, int64_t limit, bool wide) {
    tutti_dtype dtype = wide || chance(to, 70) ? TUTTI_I64 : TUTTI_I32;
    return make_leaf(to, dtype, sizes, KIND_INDEX, chance(to, 2) ? limit + 1 : limit, false);
}
bool make_index_select(writer *to, line *made) {
    int x = find(to, has_dims, NULL);
    if (x < 0)
        return false;
    made->ints[0] = below(to, tt_dim_count(at(to, x)));
    int index = index_of(to, tt_shape(between(to, 0, 4)), size_at(at(to, x), made->ints[0]), false);
    return USES(x, index);
}
bool make_index_add(writer *to, line *made) {
    int x = find(to, has_float_dims, NULL);
    if (x < 0)
        return false;
    made->ints[0] = below(to, tt_dim_count(at(to, x)));
    int64_t count = between(to, 0, 4);
    int index = index_of(to, tt_shape(count), size_at(at(to, x), made->ints[0]), false);
    tt_dims sizes = tt_sizes(at(to, x));
    sizes.at[made->ints[0]] = count;
    return USES(x, index, tensor_of(to, tt_dtype(at(to, x)), sizes));
}
bool make_gather(writer *to, line *made) {
    int x = find(to, has_dims, NULL);
    if (x < 0)
        return false;
    made->ints[0] = below(to, tt_dim_count(at(to, x)));
    tt_dims sizes = tt_sizes(at(to, x));
    int64_t limit = sizes.at[made->ints[0]];
    sizes.at[made->ints[0]] = between(to, 0, 3);
    return USES(x, index_of(to, sizes, limit, true));
}
bool make_scatter(writer *to, line *made) {
    int x = find(to, has_float_dims, NULL);
    if (x < 0)
        return false;
    made->ints[0] = below(to, tt_dim_count(at(to, x)));
    tt_dims sizes = tt_sizes(at(to, x));
    int64_t limit = sizes.at[made->ints[0]];
    sizes.at[made->ints[0]] = between(to, 0, 3);
    int index = index_of(to, sizes, limit, true);
    return USES(x, index, tensor_of(to, tt_dtype(at(to, x)), sizes));
}
bool make_embedding(writer *to, line *made) {
    int64_t rows = between(to, 1, 4);
    int weight = tensor_of(to, some_dtype(to), tt_shape(rows, between(to, 1, 3)));
    return USES(weight, index_of(to, some_sizes(to, 2), rows, false));
}
bool make_diagonal(writer *to, line *made) {
    made->ints[0] = between(to, -2, 2);
    return USES(find(to, chance(to, 97) ? is_matrix : NULL, NULL));
}
bool make_matmul(writer *to, line *made) {
    int first = find(to, has_float_dims, NULL);
    if (first < 0)
        return false;
    tt_dims sizes = chance(to, 30) ? tt_shape(0) : tt_shape(0, between(to, 1, 3));
    if (sizes.count == 2 && tt_dim_count(at(to, first)) > 2 && chance(to, 40))
        sizes = tt_shape(tt_size(at(to, first), -3), 0, sizes.at[1]);
    sizes.at[sizes.count > 1 ? sizes.count - 2 : 0] = chance(to, 3) ? 5 : tt_size(at(to, first), -1);
    return USES(first, tensor_of(to, tt_dtype(at(to, first)), sizes));
}
bool make_linear(writer *to, line *made) {
    int x = find(to, has_float_dims, NULL);
    if (x < 0)
        return false;
    int64_t columns = between(to, 1, 3);
    tutti_dtype dtype = tt_dtype(at(to, x));
    int weight = tensor_of(to, dtype, tt_shape(columns, chance(to, 3) ? 5 : tt_size(at(to, x), -1)));
    int bias = chance(to, 30) ? -1 : tensor_of(to, dtype, tt_shape(columns));
    return weight >= 0 && USES(x, weight, bias);
}
bool make_int_matmul(writer *to, line *made) {
    int64_t inner = between(to, 1, 4);
    int first = tensor_of(to, TUTTI_I8, tt_shape(between(to, 1, 3), inner));
    int second = tensor_of(to, TUTTI_I8, tt_shape(inner, between(to, 1, 3)));
    return USES(first, second);
}
bool make_norm(writer *to, line *made) {
    int x = find(to, has_float_dims, NULL);
    if (x < 0)
        return false;
    made->numbers[0] = 0.125;
    tutti_dtype dtype = tt_dtype(at(to, x));
    tt_dims sizes = tt_shape(tt_size(at(to, x), -1));
    int weight = chance(to, 30) ? -1 : tensor_of(to, dtype, sizes);
    if (strcmp(made->row->name, "rms_norm") == 0)
        return USES(x, weight);
    int bias = chance(to, 30) ? -1 : tensor_of(to, dtype, sizes);
    return USES(x, weight, bias);
}
bool make_attention(writer *to, line *made) {
    int64_t queries = between(to, 1, 3), width = between(to, 1, 3);
    int64_t keys = chance(to, 70) ? queries : between(to, 1, 3);
    tutti_dtype dtype = chance(to, 80) ? TUTTI_F64 : some_dtype(to);
    made->ints[0] = queries == keys && chance(to, 50);
    made->numbers[0] = chance(to, 50) ? 0 : some_number(to);
    tt_dims q = tt_shape(2, queries, width), k = tt_shape(2, keys, width), v = tt_shape(2, keys, between(to, 1, 3));
    int of_q = tensor_of(to, dtype, q), of_k = tensor_of(to, dtype, k), of_v = tensor_of(to, dtype, v);
    return USES(of_q, of_k, of_v);
}
bool make_rope(writer *to, line *made) {
    int64_t steps = between(to, 1, 3);
    made->numbers[0] = 100;
    int x = tensor_of(to, chance(to, 80) ? TUTTI_F64 : some_dtype(to), tt_shape(between(to, 1, 2), steps, 4));
    return USES(x, make_leaf(to, TUTTI_I64, tt_shape(steps), KIND_INDEX, 9, false));
}
bool make_cross_entropy(writer *to, line *made) {
    int64_t rows = between(to, 1, 3), classes = between(to, 1, 4);
    int logits = tensor_of(to, chance(to, 80) ? TUTTI_F64 : some_dtype(to), tt_shape(rows, classes));
    made->ints[0] = chance(to, 80) ? -100 : 0;
    return USES(logits, make_leaf(to, TUTTI_I64, tt_shape(rows), KIND_INDEX, classes, false));
}
bool make_history(writer *to, line *made) {
    made->numbers[0] = some_number(to);
    return USES(find(to, chance(to, 95) ? has_history : NULL, NULL));
}
bool make_leaf_hook(writer *to, line *made) {
    made->numbers[0] = strcmp(made->row->name, "hook_accumulate") == 0 ? 0 : some_number(to);
    int leaves[LINES], count = 0;
    for (int i = 0; i < to->program->count; i++)
        if (at(to, RESULTS * i) != NULL && strcmp(to->program->lines[i].row->name, "leaf") == 0 &&
            tt_requires_grad(at(to, RESULTS * i)))
            leaves[count++] = RESULTS * i;
    if (count == 0 || chance(to, 5))
        return USES(find(to, NULL, NULL));
    return USES(leaves[below(to, count)]);
}
bool make_backward(writer *to, line *made) {
    made->ints[0] = chance(to, 80);
    return USES(find(to, chance(to, 97) ? has_history : is_float, NULL));
}

/* ---- a program ---- */

static const row *some_row(writer *to) {
    int64_t total = 0;
    bool smooth = to->program->flavour == SMOOTH;
    for (int i = 0; i < random_row_count; i++)
        total += !smooth || random_rows[i].smooth ? random_rows[i].weight : 0;
    int64_t left = below(to, total);
    for (int i = 0; i < random_row_count; i++) {
        left -= !smooth || random_rows[i].smooth ? random_rows[i].weight : 0;
        if (left < 0)
            return &random_rows[i];
    }
    return NULL;
}

/* Large tensors end a program's growth: a few expands make them huge. */
static bool too_large(const machine *on, int index) {
    for (int i = 0; i < RESULTS; i++)
        if (on->tensors[RESULTS * index + i] != NULL && tt_numel(on->tensors[RESULTS * index + i]) > 256)
            return true;
    return false;
}

/* Whether several elements share one place, other than by an expanded dimension: a write is refused, but not by
 * PyTorch, where it depends on the order what it leaves there. */
static bool shares_places(tt_tensor *x) {
    int64_t reach = 0;
    bool used[TT_MAX_DIMS] = { false };
    for (int i = 0; i < tt_dim_count(x); i++) {
        int next = -1;
        for (int k = 0; k < tt_dim_count(x); k++)
            if (!used[k] && (next < 0 || tt_stride(x, k) < tt_stride(x, next)))
                next = k;
        used[next] = true;
        if (tt_size(x, next) < 2)
            continue;
        if (tt_stride(x, next) <= reach && tt_stride(x, next) > 0)
            return true;
        reach += (tt_size(x, next) - 1) * tt_stride(x, next);
    }
    return false;
}

static bool writes_shared_places(const writer *to, const line *next) {
    const char *name = next->row->name;
    bool writes = name[strlen(name) - 1] == '_' || strncmp(name, "function_dirty", 14) == 0;
    for (int i = 0; i < next->tensor_count && writes; i++)
        if (next->tensors[i] >= 0 && shares_places(at(to, next->tensors[i])))
            return true;
    return false;
}

/* Mostly refused, or nothing happens: a few are enough. */
static bool is_pointless(writer *to, const line *next) {
    const char *name = next->row->name;
    bool onto_itself = strcmp(name, "copy_") == 0 && next->tensors[0] == next->tensors[1];
    tt_tensor *last = strncmp(name, "function_dirty", 14) == 0 ? at(to, next->tensors[next->tensor_count - 1]) : NULL;
    bool leaf = last != NULL && tt_requires_grad(last) && tt_is_leaf(last);
    return (onto_itself || leaf) && !chance(to, 5);
}

static void add_lines(writer *to, int count) {
    program *made = to->program;
    for (int i = 0; i < count && made->count < LINES - 8; i++) {
        line next = { .row = some_row(to) };
        if (!next.row->make(to, &next) || writes_shared_places(to, &next) || is_pointless(to, &next))
            continue;
        made->lines[made->count] = next;
        int index = made->count;
        finish(to);
        if (too_large(to->on, index)) {
            made->lines[index].gone = true;
            memset(&to->on->tensors[RESULTS * index], 0, RESULTS * sizeof to->on->tensors[0]);
        }
    }
}

static void add_gradients(writer *to) {
    line *made = append(to, "gradients");
    made->ints[0] = chance(to, 75);
    made->tensor_count = 0;
    for (int i = (int)between(to, 1, 3); i > 0; i--) {
        int root = find(to, has_history, NULL);
        if (root >= 0)
            made->tensors[made->tensor_count++] = root;
    }
    if (made->tensor_count > 0)
        to->program->count++;
}

void program_make(uint64_t seed, flavour which, program *made) {
    static report scrap;
    memset(made, 0, sizeof *made);
    made->seed = seed;
    made->flavour = which;
    machine *on = calloc(1, sizeof *on);
    if (on == NULL)
        abort();
    *on = (machine){ .program = made, .setting = { .device = TUTTI_CPU, .moved_line = -1 }, .report = &scrap };
    writer to = { made, on, seed * 2 + (which == SMOOTH) };
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(true);
    int leaves = (int)between(&to, 1, 3);
    for (int i = 0; i < leaves; i++)
        make_leaf(&to, some_dtype(&to), some_sizes(&to, 3), some_kind(&to), 0, i == 0 || chance(&to, 60));
    add_lines(&to, (int)between(&to, 2, 22));
    tt_grad_mode(true);
    if (which == PEER && chance(&to, 90)) {
        line *last = append(&to, "grad_on");
        if (last != NULL)
            finish(&to);
    }
    add_gradients(&to);
    tt_grad_mode(recording);
    tt_error_clear();
    if (tt_scope_close(&scope) != TUTTI_OK)
        abort();
    report_free(&scrap);
    free(on);
}
