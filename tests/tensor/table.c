/* SPDX-License-Identifier: Apache-2.0
 *
 * One test over the whole operator table: every entry brings a sample call, and this program runs it with inputs of
 * every sort.
 */
#include <math.h>

#include <tutti/autograd.h>

#include <tutti/functional.h>

#include "../harness.h"
#include "device.h"
#include "tensor/operator.h"

#define INPUTS 8

typedef struct maker {
    tu_sampler sampler;
    tutti_dtype dtype;
    tutti_device device;
    bool strided, requires_grad;
    int null_at, free_at; /* this input is NULL, or has freed storage; -1: none */
    int moved_input;      /* this element of this input is moved by `moved_by`; -1: none */
    int64_t moved_element;
    double moved_by;
    int count;
    tt_tensor *made[INPUTS];
} maker;

static double hashed(int input, int64_t element) {
    uint64_t x = (uint64_t)input * 1000003u + (uint64_t)element * 7919u + 12345u;
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return (double)((x ^ x >> 32) >> 11) * 0x1p-53;
}

static double value_of(tu_sample_kind kind, int input, int64_t element, int64_t limit) {
    double u = hashed(input, element);
    switch (kind) {
    case TU_SAMPLE_NORMAL:
        return (u < 0.5 ? -1 : 1) * (0.15 + 1.7 * hashed(input + 50, element)); /* away from 0 */
    case TU_SAMPLE_POSITIVE:
        return 0.5 + 1.5 * u;
    case TU_SAMPLE_INDEX:
        return floor(u * (double)limit);
    default:
        return u < 0.5;
    }
}

static tt_tensor *fill(maker *m, tu_sample_kind kind, tt_dims shape, int64_t limit, int input, tutti_dtype dtype) {
    double values[512];
    int64_t numel = 1;
    for (int i = 0; i < shape.count; i++)
        numel *= shape.at[i];
    CHECK(numel <= 512);
    for (int64_t i = 0; i < numel; i++)
        values[i] =
            value_of(kind, input, i, limit) + (m->moved_input == input && m->moved_element == i ? m->moved_by : 0);
    tt_tensor *dense = tt_to_device(tt_to(tt_from(values, shape, TUTTI_F64, NULL), dtype), m->device);
    if (!m->strided)
        return tt_detach(dense);
    tt_dims strides = tt_strides(dense);
    for (int i = 0; i < strides.count; i++)
        strides.at[i] *= 2;
    if (strides.count >= 2) { /* and the last two dimensions stored the other way round */
        int last = strides.count - 1;
        int64_t rows = shape.at[last - 1] > 0 ? shape.at[last - 1] : 1;
        strides.at[last] = 2 * rows;
        strides.at[last - 1] = 2;
    }
    tt_options options = TT_OPTIONS_INIT;
    options.device = m->device;
    tt_tensor *apart = tt_empty_strided(shape, strides, dtype, &options);
    tt_copy_(apart, dense);
    return apart;
}

static tt_tensor *make(tu_sampler *sampler, tu_sample_kind kind, tt_dims shape, int64_t limit) {
    maker *m = (maker *)sampler;
    int input = m->count++;
    CHECK(input < INPUTS);
    if (input == m->null_at)
        return NULL;
    tutti_dtype dtype = kind == TU_SAMPLE_INDEX ? TUTTI_I64 : kind == TU_SAMPLE_BOOL ? TUTTI_BOOL : m->dtype;
    bool recording = tt_grad_mode(false);
    tt_tensor *x;
    if (m->device == TUTTI_META) {
        tt_options options = TT_OPTIONS_INIT;
        options.device = TUTTI_META;
        x = tt_empty(shape, dtype, &options);
    } else {
        x = fill(m, kind, shape, limit, input, dtype);
    }
    tt_grad_mode(recording);
    if (m->requires_grad && (kind == TU_SAMPLE_NORMAL || kind == TU_SAMPLE_POSITIVE))
        tt_require_grad(x, true);
    if (input == m->free_at)
        tt_storage_resize(x, 0);
    m->made[input] = x;
    return x;
}

/* A world of this rank alone: its collectives are real, and change nothing. Each test runs in a process of its own. */
static tutti_world *world;
static tutti_group *alone(void) {
    if (world != NULL && tutti_group_check(tutti_world_group(world)) != TUTTI_OK) { /* ended by a sample that failed */
        tt_wait_all(world);
        tt_error_clear();
        CHECK_OK(tutti_world_close(world));
        world = NULL;
    }
    setenv("TUTTI_MULTICAST", "software", 1); /* for operators that need multicast */
    if (world == NULL)
        CHECK_OK(tutti_world_open(NULL, &world));
    return tutti_world_group(world);
}

static void leave(void) {
    alone();
    CHECK(tt_wait_all(world));
    CHECK_OK(tutti_world_close(world));
    test_device_leave();
}

static maker plain(int64_t n) {
    return (maker){ .sampler = { n, alone(), make },
                    .dtype = TUTTI_F64,
                    .device = test_device(),
                    .null_at = -1,
                    .free_at = -1,
                    .moved_input = -1 };
}

/* Elements as doubles, complex ones as pairs. */
static int64_t read_all(tt_tensor *x, double *out) {
    if (x != NULL && tu_is_complex(tt_dtype(x)))
        x = tt_view_as_real(tt_contiguous(tt_to(x, TUTTI_C128)));
    int64_t count = tt_numel(x);
    CHECK(count <= 2048);
    tt_read(x, out, TUTTI_F64, (size_t)count);
    return count;
}

static double loss_of(const double *values, int64_t count) {
    double loss = 0;
    for (int64_t i = 0; i < count; i++)
        loss += values[i] * (0.3 + hashed(99, i));
    return loss;
}

#define EACH_OPERATOR(entry)                            \
    for (int each = 0; each < tu_table_count(); each++) \
        for (const tu_operator *entry = tu_table_at(each); entry != NULL; entry = NULL)
#define NO_ERROR(entry, what)                                             \
    do {                                                                  \
        if (tt_error_show() != TUTTI_OK)                                  \
            FAIL("%s, %s: %s", entry->name, what, tutti_error_message()); \
    } while (0)

/* The entry's sample; NULL where this device has no kernel for it, which is an error that names both. */
static tt_tensor *sample_of(const tu_operator *entry, maker *m) {
    tt_tensor *x = entry->sample(&m->sampler);
    if (x != NULL || m->device == TUTTI_CPU || m->device == TUTTI_META || tt_error_pending() != TUTTI_ERROR_UNSUPPORTED)
        return x;
    (void)tt_error_show(); /* makes the message the thread's */
    if (strstr(tutti_error_message(), "there is no kernel") != NULL && strstr(tutti_error_message(), "cuda:0") != NULL)
        tt_error_clear();
    return NULL;
}

/* Goes on with the next operator where this one has no kernel on the device. */
#define NEEDS_KERNEL(x, scope)                           \
    if ((x) == NULL && tt_error_pending() == TUTTI_OK) { \
        CHECK_OK(tt_scope_close(&scope));                \
        continue;                                        \
    }

TEST(the_table_is_not_empty_and_every_entry_is_complete) {
    CHECK(tu_table_count() > 80);
    EACH_OPERATOR(entry) {
        if (entry->name == NULL || entry->summary == NULL || entry->family == NULL || entry->sample == NULL)
            FAIL("operator %s lacks a summary, a family or a sample", entry->name);
        if ((entry->prototype == NULL) != ((entry->flags & TU_PRIVATE) != 0))
            FAIL("operator %s must have a prototype, or be private", entry->name);
        if (!(entry->flags & TU_COMPOSITE) && entry->shape == NULL)
            FAIL("operator %s lacks a shape rule", entry->name);
    }
    test_device_leave();
}

TEST(meta_tensors_get_the_shapes_and_strides_of_real_ones) {
    for (int64_t n = 0; n <= 3; n += 3) {
        EACH_OPERATOR(entry) {
            tt_scope scope = tt_scope_open();
            maker real = plain(n), meta = plain(n);
            meta.device = TUTTI_META;
            tt_tensor *a = sample_of(entry, &real);
            NEEDS_KERNEL(a, scope)
            NO_ERROR(entry, "real");
            tt_tensor *b = entry->sample(&meta.sampler);
            NO_ERROR(entry, "meta");
            CHECK(tt_device_of(b) == TUTTI_META && tt_device_of(a) == test_device());
            bool same = tt_dtype(a) == tt_dtype(b) && tt_dim_count(a) == tt_dim_count(b);
            for (int i = 0; same && i < tt_dim_count(a); i++)
                same = tt_size(a, i) == tt_size(b, i) && tt_stride(a, i) == tt_stride(b, i);
            if (!same)
                FAIL("%s: %s differs from %s", entry->name, tu_describe(b), tu_describe(a));
            CHECK_OK(tt_scope_close(&scope));
        }
    }
    leave();
}

TEST(inputs_that_are_not_contiguous_give_the_same_values) {
    EACH_OPERATOR(entry) {
        tt_scope scope = tt_scope_open();
        maker dense = plain(3), strided = plain(3);
        strided.strided = true;
        double a[2048], b[2048];
        tt_tensor *x = sample_of(entry, &dense);
        NEEDS_KERNEL(x, scope)
        int64_t count = read_all(x, a);
        NO_ERROR(entry, "contiguous");
        int64_t other = read_all(entry->sample(&strided.sampler), b);
        NO_ERROR(entry, "not contiguous");
        CHECK_EQ(count, other);
        for (int64_t i = 0; i < count; i++)
            if (!(fabs(a[i] - b[i]) <= 1e-12 * (1 + fabs(a[i]))))
                FAIL("%s: element %lld is %g, but %g from strided inputs", entry->name, (long long)i, a[i], b[i]);
        CHECK_OK(tt_scope_close(&scope));
    }
    leave();
}

TEST(narrower_floats_give_nearly_the_same_values) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16 };
    static const double tolerance[] = { 2e-5, 8e-2, 2e-2 };
    for (int d = 0; d < 3; d++) {
        EACH_OPERATOR(entry) {
            tt_scope scope = tt_scope_open();
            maker wide = plain(3), narrow = plain(3);
            narrow.dtype = dtypes[d];
            double a[2048], b[2048];
            tt_tensor *reference = sample_of(entry, &wide);
            NEEDS_KERNEL(reference, scope)
            int64_t count = read_all(reference, a);
            NO_ERROR(entry, "f64");
            bool floats = tu_is_float(tt_dtype(reference)) || tu_is_complex(tt_dtype(reference));
            tt_tensor *x = entry->sample(&narrow.sampler);
            NO_ERROR(entry, tutti_dtype_name(dtypes[d]));
            read_all(x, b);
            for (int64_t i = 0; floats && i < count; i++)
                if (!(fabs(a[i] - b[i]) <= tolerance[d] * (1 + fabs(a[i]))))
                    FAIL("%s: element %lld is %g in f64, but %g in %s", entry->name, (long long)i, a[i], b[i],
                         tutti_dtype_name(dtypes[d]));
            CHECK_OK(tt_scope_close(&scope));
        }
    }
    leave();
}

static double moved_loss(const tu_operator *entry, int input, int64_t element, double by) {
    maker m = plain(2);
    double values[2048];
    m.moved_input = input;
    m.moved_element = element;
    m.moved_by = by;
    tt_scope scope = tt_scope_open();
    double loss = loss_of(values, read_all(entry->sample(&m.sampler), values));
    CHECK_OK(tt_scope_close(&scope));
    return loss;
}

TEST(gradients_agree_with_finite_differences) {
    const double step = 1e-6;
    int checked = 0;
    EACH_OPERATOR(entry) {
        tt_scope scope = tt_scope_open();
        maker m = plain(2);
        m.requires_grad = true;
        tt_tensor *result = sample_of(entry, &m);
        NEEDS_KERNEL(result, scope)
        NO_ERROR(entry, "forward");
        if (!tt_requires_grad(result) || (entry->gradient == NULL && !(entry->flags & TU_COMPOSITE))) {
            CHECK_OK(tt_scope_close(&scope));
            continue;
        }
        checked++;
        tt_tensor *real = tu_is_complex(tt_dtype(result)) ? tt_view_as_real(tt_contiguous(result)) : result;
        double weights[2048];
        for (int64_t i = 0; i < tt_numel(real); i++)
            weights[i] = 0.3 + hashed(99, i);
        tt_backward(real,
                    tt_to_device(tt_to(tt_from(weights, tt_sizes(real), TUTTI_F64, NULL), tt_dtype(real)), m.device));
        NO_ERROR(entry, "backward");
        for (int k = 0; k < m.count; k++) {
            if (m.made[k] == NULL || !tt_requires_grad(m.made[k]))
                continue;
            double grads[2048] = { 0 };
            tt_tensor *grad = tt_grad(m.made[k]);
            if (grad != NULL)
                read_all(grad, grads);
            for (int64_t i = 0; i < tt_numel(m.made[k]); i++) {
                double expected = (moved_loss(entry, k, i, step) - moved_loss(entry, k, i, -step)) / (2 * step);
                double allowed = 1e-6 * (1 + fabs(expected)) + (tt_dtype(real) == TUTTI_F64 ? 0 : 1e-3);
                if (!(fabs(expected - grads[i]) <= allowed))
                    FAIL("%s: the gradient of input %d, element %lld, is %.9g, but %.9g by differences", entry->name, k,
                         (long long)i, grads[i], expected);
            }
        }
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK(checked > (test_device() == TUTTI_CPU ? 60 : 50));
    leave();
}

TEST(gradients_of_strided_inputs_are_the_same) {
    EACH_OPERATOR(entry) {
        tt_scope scope = tt_scope_open();
        maker dense = plain(2), strided = plain(2);
        dense.requires_grad = strided.requires_grad = strided.strided = true;
        tt_tensor *a = sample_of(entry, &dense), *b = sample_of(entry, &strided);
        NEEDS_KERNEL(a, scope)
        if (tt_requires_grad(a) && (entry->gradient != NULL || entry->flags & TU_COMPOSITE)) {
            tt_backward(a, tt_ones_like(a));
            tt_backward(b, tt_ones_like(b));
            NO_ERROR(entry, "backward");
            for (int k = 0; k < dense.count; k++) {
                tt_tensor *of_a = tt_grad(dense.made[k]), *of_b = tt_grad(strided.made[k]);
                CHECK((of_a == NULL) == (of_b == NULL));
                if (of_a != NULL && !tt_allclose(of_a, of_b, 1e-12, 1e-12))
                    FAIL("%s: the gradient of input %d depends on its strides", entry->name, k);
            }
        }
        NO_ERROR(entry, "strided gradients");
        CHECK_OK(tt_scope_close(&scope));
    }
    leave();
}

TEST(a_missing_tensor_is_an_error_that_names_it) {
    EACH_OPERATOR(entry) {
        for (int k = 0; k < INPUTS; k++) {
            tt_scope scope = tt_scope_open();
            maker m = plain(2);
            m.null_at = k;
            tt_tensor *x = sample_of(entry, &m);
            NEEDS_KERNEL(x, scope)
            bool reached = m.count > k;
            tutti_status status = tt_scope_close(&scope);
            if (!reached)
                break;
            if (x == NULL && (status != TUTTI_ERROR_ARGUMENT || strstr(tutti_error_message(), "is NULL") == NULL))
                FAIL("%s without input %d: %s", entry->name, k, tutti_error_message());
            if (x != NULL && entry->optional == 0)
                FAIL("%s ran without input %d", entry->name, k);
        }
    }
    leave();
}

TEST(freed_storage_is_an_error_and_never_a_crash) {
    EACH_OPERATOR(entry) {
        for (int k = 0; k < INPUTS; k++) {
            tt_scope scope = tt_scope_open();
            maker m = plain(2);
            m.free_at = k;
            double values[2048];
            tt_tensor *x = sample_of(entry, &m);
            NEEDS_KERNEL(x, scope)
            bool reached = m.count > k, reads = strcmp(entry->family, "creation") != 0 &&
                                                strcmp(entry->family, "random") != 0 && !(entry->flags & TU_IMPURE);
            if (x != NULL)
                read_all(x, values);
            tutti_status status = tt_scope_close(&scope);
            if (!reached)
                break;
            if (status != TUTTI_OK && strstr(tutti_error_message(), "freed") == NULL)
                FAIL("%s with input %d freed: %s", entry->name, k, tutti_error_message());
            if (reads && status == TUTTI_OK)
                FAIL("%s read input %d, which is freed", entry->name, k);
        }
    }
    leave();
}

TEST(nothing_is_left_after_all_of_it) {
    EACH_OPERATOR(entry) {
        tt_scope scope = tt_scope_open();
        maker m = plain(2);
        m.requires_grad = true;
        tt_tensor *x = sample_of(entry, &m);
        NEEDS_KERNEL(x, scope)
        if (x != NULL && tt_requires_grad(x) && (entry->gradient != NULL || entry->flags & TU_COMPOSITE))
            tt_backward(x, tt_ones_like(x));
        CHECK_OK(tt_scope_close(&scope));
        CHECK(tt_wait_all(world));
        tt_counts counts = { .size = sizeof counts };
        CHECK_OK(tt_count(&counts));
        if (counts.tensors != 0 || counts.storages != 0 || counts.scopes != 0 || counts.nodes != 0)
            FAIL("%s leaves %lld tensors, %lld storages, %lld scopes, %lld nodes", entry->name,
                 (long long)counts.tensors, (long long)counts.storages, (long long)counts.scopes,
                 (long long)counts.nodes);
    }
    leave();
}

/* ---- on another device than the CPU ---- */

/* Those whose products a library adds up, in an order of its own. */
static bool rounds_by_library(const tu_operator *entry) {
    return strcmp(entry->family, "matrix products") == 0 || strcmp(entry->family, "fused") == 0 ||
           strncmp(entry->name, "attention", 9) == 0;
}

static void compare_bits(const tu_operator *entry, tutti_dtype dtype, tt_tensor *here, tt_tensor *there) {
    CHECK(tt_dtype(here) == tt_dtype(there) && tt_numel(here) == tt_numel(there));
    size_t count = (size_t)tt_numel(here), size = tutti_dtype_size(tt_dtype(here));
    static char expected[65536], found[65536];
    CHECK(count * size <= sizeof expected);
    CHECK(tt_read(here, expected, tt_dtype(here), count) && tt_read(there, found, tt_dtype(there), count));
    for (size_t i = 0; i < count; i++) {
        double a = 0, b = 0;
        CHECK_OK(tutti_convert(expected + i * size, tt_dtype(here), &a, TUTTI_F64, 1));
        CHECK_OK(tutti_convert(found + i * size, tt_dtype(there), &b, TUTTI_F64, 1));
        if (a != a && b != b)
            continue; /* NaN is NaN */
        if (memcmp(expected + i * size, found + i * size, size) != 0)
            FAIL("%s in %s: element %zu is %.17g, but %.17g on %s", entry->name, tutti_dtype_name(dtype), i, a, b,
                 tutti_device_name(tt_device_of(there)));
    }
}

TEST(results_have_the_bits_of_the_cpu) {
    static const tutti_dtype dtypes[] = { TUTTI_F64, TUTTI_F32, TUTTI_BF16, TUTTI_F16 };
    if (test_device() == TUTTI_CPU)
        SKIP("this is the cpu");
    int compared = 0;
    for (int d = 0; d < 4; d++) {
        for (int strided = 0; strided < 2; strided++) {
            EACH_OPERATOR(entry) {
                tt_scope scope = tt_scope_open();
                maker of_device = plain(3), of_cpu = plain(3);
                of_cpu.device = TUTTI_CPU;
                of_device.dtype = of_cpu.dtype = dtypes[d];
                of_device.strided = of_cpu.strided = strided;
                tt_tensor *there = rounds_by_library(entry) ? NULL : sample_of(entry, &of_device);
                if (there != NULL) {
                    tt_tensor *here = entry->sample(&of_cpu.sampler);
                    NO_ERROR(entry, "on the cpu");
                    compare_bits(entry, dtypes[d], here, there);
                    compared++;
                }
                NO_ERROR(entry, "on the device");
                CHECK_OK(tt_scope_close(&scope));
            }
        }
    }
    CHECK(compared > 700);
    leave();
}

TEST(every_operator_runs_there) {
    if (test_device() == TUTTI_CPU)
        SKIP("this is the cpu");
    int kernels = 0, compositions = 0;
    EACH_OPERATOR(entry) {
        tt_scope scope = tt_scope_open();
        maker m = plain(2);
        tt_tensor *x = sample_of(entry, &m);
        NO_ERROR(entry, "on the device");
        if (x == NULL)
            FAIL("%s, of the %s, has no kernel on %s", entry->name, entry->family, tutti_device_name(test_device()));
        compositions += (entry->flags & TU_COMPOSITE) != 0;
        kernels += (entry->flags & TU_COMPOSITE) == 0;
        CHECK_OK(tt_scope_close(&scope));
    }
    printf("    %d with kernels or views, %d composed\n", kernels, compositions);
    leave();
}

/* Of another dtype: the CPU's result or its refusal. Quotients and functions of complex numbers are the C library's
 * there. */
static bool compare_other(const tu_operator *entry, tutti_dtype dtype, bool strided) {
    maker of_device = plain(3), of_cpu = plain(3);
    of_cpu.device = TUTTI_CPU;
    of_device.dtype = of_cpu.dtype = dtype;
    of_device.strided = of_cpu.strided = strided;
    tt_tensor *here = entry->sample(&of_cpu.sampler);
    tutti_status expected = tt_error_pending();
    tt_error_clear();
    of_device.sampler.group = of_cpu.sampler.group = alone(); /* a refusal may have ended the one before */
    tt_tensor *there = entry->sample(&of_device.sampler);
    tutti_status found = tt_error_show();
    if (found != expected)
        FAIL("%s in %s: %s on the cpu, but on the device %s: %s", entry->name, tutti_dtype_name(dtype),
             tutti_status_name(expected), tutti_status_name(found), tutti_error_message());
    tt_error_clear();
    if (expected != TUTTI_OK)
        return false;
    bool complex = tu_is_complex(dtype) || tu_is_complex(tt_dtype(here));
    if (!complex && !(rounds_by_library(entry) && tu_is_float(tt_dtype(here)))) {
        compare_bits(entry, dtype, here, there);
    } else {
        double tolerance = dtype == TUTTI_C128 ? 1e-12 : complex ? 1e-5 : 0.3; /* a step of f8 */
        if (tt_dtype(here) != tt_dtype(there) ||
            !tt_allclose(here, tt_to_device(there, TUTTI_CPU), tolerance, complex ? 1e-6 : 0x1p-8))
            FAIL("%s in %s differs there", entry->name, tutti_dtype_name(dtype));
    }
    return true;
}

TEST_LIMIT(every_other_dtype_is_taken_or_refused_as_by_the_cpu, 120) {
    static const tutti_dtype dtypes[] = { TUTTI_F8_E4M3, TUTTI_F8_E5M2, TUTTI_I8,  TUTTI_I16, TUTTI_I32,
                                          TUTTI_I64,     TUTTI_U8,      TUTTI_U16, TUTTI_U32, TUTTI_U64,
                                          TUTTI_BOOL,    TUTTI_C64,     TUTTI_C128 };
    if (test_device() == TUTTI_CPU)
        SKIP("this is the cpu");
    int taken = 0, refused = 0;
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
        for (int strided = 0; strided < 2; strided++) {
            EACH_OPERATOR(entry) {
                tt_scope scope = tt_scope_open();
                if (compare_other(entry, dtypes[d], strided != 0))
                    taken++;
                else
                    refused++;
                NO_ERROR(entry, tutti_dtype_name(dtypes[d]));
                CHECK_OK(tt_scope_close(&scope));
            }
        }
    printf("    %d calls with the results of the cpu, %d refused as there\n", taken, refused);
    CHECK(taken > refused);
    leave();
}
