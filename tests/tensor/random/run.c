/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs as text and as runs.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/on_device.h"
#include "tensor/operator.h"

#include "make.h"
#include "program.h"

/* ---- text: what random_torch_peer.py reads ---- */

static void print_register(int which, FILE *to) {
    if (which < 0)
        fprintf(to, " none");
    else if (which % RESULTS == 0)
        fprintf(to, " t%d", which / RESULTS);
    else
        fprintf(to, " t%d.%d", which / RESULTS, which % RESULTS);
}

static void print_dims(const tt_dims *dims, FILE *to) {
    fprintf(to, " [");
    for (int i = 0; i < dims->count; i++)
        fprintf(to, "%s%" PRId64, i > 0 ? "," : "", dims->at[i]);
    fprintf(to, "]");
}

void program_print(const program *what, FILE *to) {
    for (int i = 0; i < what->count; i++) {
        const line *one = &what->lines[i];
        int tensors = 0, ints = 0, dims = 0, numbers = 0;
        if (one->gone)
            continue;
        fprintf(to, "t%d = %s", i, one->row->name);
        for (const char *letter = one->row->arguments; *letter != '\0'; letter++) {
            if (*letter == 't' || *letter == 'o')
                print_register(one->tensors[tensors++], to);
            else if (*letter == 'i')
                fprintf(to, " %" PRId64, one->ints[ints++]);
            else if (*letter == 'd')
                print_dims(&one->dims[dims++], to);
            else if (*letter == 'f')
                fprintf(to, " %.17g", one->numbers[numbers++]);
            else if (*letter == 'y')
                fprintf(to, " %s", tutti_dtype_name(one->dtype));
            else
                while (tensors < one->tensor_count)
                    print_register(one->tensors[tensors++], to);
        }
        fprintf(to, "\n");
    }
}

/* ---- records ---- */

void report_free(report *what) {
    for (int i = 0; i < what->count; i++)
        free(what->records[i].values);
    what->count = 0;
    what->ordered = false;
}

static record *record_new(machine *on, const char *name) {
    if (on->report->count == RECORDS) {
        fprintf(stderr, "a program gave more than %d records\n", RECORDS);
        abort();
    }
    record *made = &on->report->records[on->report->count++];
    *made = (record){ .absent = true };
    snprintf(made->name, sizeof made->name, "%s", name);
    return made;
}

/* An error that is pending becomes the record's. */
static bool refusal(record *to) {
    if (tt_error_show() == TUTTI_OK)
        return false;
    to->refused = true;
    to->absent = false;
    snprintf(to->message, sizeof to->message, "%s", tutti_error_message());
    tt_error_clear();
    return true;
}

static void record_shape(record *to, tt_tensor *x) {
    to->absent = false;
    to->dtype = tt_dtype(x);
    to->sizes = tt_sizes(x);
    to->strides = tt_strides(x);
    to->requires_grad = tt_requires_grad(x);
    to->leaf = tt_is_leaf(x);
    to->version = tt_version(x);
}

static void record_values(record *to, tt_tensor *x) {
    if (tt_device_of(x) == TUTTI_META)
        return;
    bool recording = tt_grad_mode(false), complex = tu_is_complex(tt_dtype(x));
    tt_tensor *real = complex ? tt_view_as_real(tt_contiguous(tt_to(x, TUTTI_C128))) : x;
    to->count = tt_numel(real);
    to->values = malloc((size_t)(to->count + 1) * sizeof *to->values);
    if (to->values == NULL)
        abort();
    tt_read(real, to->values, TUTTI_F64, (size_t)to->count);
    refusal(to);
    tt_grad_mode(recording);
}

static void record_tensor(machine *on, const char *name, tt_tensor *x) {
    record *to = record_new(on, name);
    if (refusal(to) || x == NULL)
        return;
    record_shape(to, x);
    record_values(to, x);
}

/* ---- leaves ---- */

double random_value(int64_t seed, int64_t element, int64_t kind, int64_t limit) {
    uint64_t x = (uint64_t)seed * 1000003u + (uint64_t)element * 7919u + 12345u;
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
    double share = (double)(x >> 11) * 0x1p-53;
    switch (kind) {
    case KIND_LATTICE:
        return ((double)(x >> 40 & 15) - 8) / 4;
    case KIND_REAL:
        return (x & 1 ? -1 : 1) * (0.15 + 1.7 * share);
    case KIND_POSITIVE:
        return 0.5 + 1.5 * share;
    default:
        return floor(share * (double)limit);
    }
}

/* Real values of the leaf, complex ones as pairs; whole numbers for integers. */
static tt_tensor *leaf_values(const machine *on, const line *what) {
    tutti_dtype dtype = what->dtype;
    tt_dims sizes = what->dims[0];
    int64_t count = tu_is_complex(dtype) ? 2 : 1;
    for (int i = 0; i < sizes.count; i++)
        count *= sizes.at[i];
    double *values = malloc((size_t)(count + 1) * sizeof *values);
    if (values == NULL)
        abort();
    for (int64_t i = 0; i < count; i++) {
        double value = random_value(what->ints[0], i, what->ints[1], what->ints[2]);
        if (what->ints[1] != KIND_INDEX && !tu_is_float(dtype) && !tu_is_complex(dtype))
            value = dtype == TUTTI_BOOL ? value > 0 : dtype >= TUTTI_U8 ? floor(fabs(value) * 2) : floor(value * 2);
        values[i] =
            value +
            (on->setting.moved_line == on->current && on->setting.moved_element == i ? on->setting.moved_by : 0);
    }
    if (tu_is_complex(dtype))
        sizes.at[sizes.count++] = 2;
    tt_tensor *dense = tt_from(values, sizes, TUTTI_F64, NULL);
    free(values);
    return tu_is_complex(dtype) ? tt_view_as_complex(dense) : dense;
}

/* The gaps too, and with no change that would be counted. */
static void clear_storage(const tt_tensor *x) {
    size_t bytes = tt_storage_bytes(x);
    if (bytes == 0)
        return;
    if (!tu_on_device(x)) {
        memset(x->storage->data, 0, bytes);
        return;
    }
    const tu_device *device = tu_device_of(x);
    if (device->table->clear(device->state, device->index, tu_device_stream(device), x->storage->data, bytes) !=
        TUTTI_OK)
        abort();
}

static void run_leaf(machine *on, const line *what, tt_tensor **results) {
    bool recording = tt_grad_mode(false);
    tt_options options = TT_OPTIONS_INIT;
    options.device = on->setting.device;
    tt_tensor *x = tt_empty_strided(what->dims[0], what->dims[1], what->dtype, &options);
    if (on->setting.device == TUTTI_META)
        tt_zero_(x);
    else if (x != NULL) {
        clear_storage(x);
        tt_copy_(x, tt_to_device(leaf_values(on, what), on->setting.device));
    }
    if (what->ints[3])
        tt_require_grad(x, true);
    tt_grad_mode(recording);
    results[0] = x;
}

static void run_list(tt_tensor_list list, tt_tensor **results) {
    for (size_t i = 0; i < list.count && i < RESULTS; i++)
        results[i] = list.at[i];
}

/* ---- functions with a gradient of their own ---- */

#define FORWARD(name) \
    static int name##_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs)
#define BACKWARD(name) \
    static int name##_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results)

FORWARD(function_mul) {
    tt_save_for_backward(context, inputs);
    outputs[0] = tt_mul(inputs.at[0], inputs.at[1]);
    return 1;
}
BACKWARD(function_mul) {
    tt_tensor_list saved = tt_saved_tensors(context);
    if (saved.count != 2)
        return 2;
    results[0] = tt_needs_input_grad(context, 0) ? tt_mul(grads.at[0], tt_conj(saved.at[1])) : NULL;
    results[1] = tt_needs_input_grad(context, 1) ? tt_mul(grads.at[0], tt_conj(saved.at[0])) : NULL;
    return 2;
}

FORWARD(function_exp) {
    outputs[0] = tt_exp(inputs.at[0]);
    tt_save_for_backward(context, tt_tensors(outputs[0]));
    return 1;
}
BACKWARD(function_exp) {
    tt_tensor_list saved = tt_saved_tensors(context);
    results[0] = saved.count == 1 ? tt_mul(grads.at[0], tt_conj(saved.at[0])) : NULL;
    return 1;
}

/* a + b, and a * b with the second result saved beside a and b */
FORWARD(function_two) {
    outputs[0] = tt_add(inputs.at[0], inputs.at[1]);
    outputs[1] = tt_mul(inputs.at[0], inputs.at[1]);
    tt_save_for_backward(context, tt_tensors(inputs.at[0], inputs.at[1], outputs[1]));
    return 2;
}
BACKWARD(function_two) {
    tt_tensor_list saved = tt_saved_tensors(context);
    if (saved.count != 3)
        return 2;
    tt_tensor *a = tt_conj(saved.at[0]), *b = tt_conj(saved.at[1]);
    results[0] = tt_add(grads.at[0], tt_mul(grads.at[1], b));
    results[1] = tt_add(grads.at[0], tt_mul(grads.at[1], a));
    return 2;
}

/* 2 a, and a mask that has no gradient */
FORWARD(function_sign) {
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    outputs[1] = tt_abs(inputs.at[0]);
    tt_mark_non_differentiable(context, outputs[1]);
    return 2;
}
BACKWARD(function_sign) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 2);
    return 1;
}

FORWARD(function_dirty) {
    tt_mul_scalar_(inputs.at[0], 3);
    tt_mark_dirty(context, inputs.at[0]);
    outputs[0] = inputs.at[0];
    return 1;
}
BACKWARD(function_dirty) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 3);
    return 1;
}

FORWARD(function_dirty_second) {
    outputs[0] = tt_mul_scalar(inputs.at[0], 10);
    tt_mul_scalar_(inputs.at[1], 2);
    tt_mark_dirty(context, inputs.at[1]);
    outputs[1] = inputs.at[1];
    return 2;
}
BACKWARD(function_dirty_second) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 10);
    results[1] = tt_mul_scalar(grads.at[1], 2);
    return 2;
}

FORWARD(function_same) {
    (void)context;
    outputs[0] = inputs.at[0];
    return 1;
}
BACKWARD(function_same) {
    (void)context;
    results[0] = tt_mul_scalar(grads.at[0], 2); /* on purpose another gradient than an alias has */
    return 1;
}

FORWARD(function_view) {
    (void)context;
    outputs[0] = tt_unsqueeze(inputs.at[0], 0);
    return 1;
}
BACKWARD(function_view) {
    (void)context;
    results[0] = tt_squeeze(grads.at[0], 0);
    return 1;
}

/* Two results whose absent gradients stay absent. */
FORWARD(function_absent) {
    tt_materialize_grads(context, false);
    outputs[0] = tt_mul_scalar(inputs.at[0], 4);
    outputs[1] = tt_mul_scalar(inputs.at[1], 5);
    return 2;
}
BACKWARD(function_absent) {
    (void)context;
    results[0] = grads.at[0] != NULL ? tt_mul_scalar(grads.at[0], 4) : NULL;
    results[1] = grads.at[1] != NULL ? tt_mul_scalar(grads.at[1], 5) : NULL;
    return 2;
}

/* ---- hooks ---- */

typedef struct hook_user {
    machine *on;
    int line;
    double factor;
} hook_user;

static double sum_of(tt_tensor *x) {
    bool recording = tt_grad_mode(false);
    tt_tensor *real = tu_is_complex(tt_dtype(x)) ? tt_view_as_real(tt_contiguous(x)) : x;
    double sum = tt_device_of(x) == TUTTI_META ? 0 : tt_item(tt_sum(tt_to(real, TUTTI_F64)));
    tt_grad_mode(recording);
    return sum;
}

static void hook_note(const hook_user *user, tt_tensor *grad) {
    machine *on = user->on;
    if (grad == NULL || tt_numel(grad) == 0 || on->muted ||
        on->log_count + 2 > (int)(sizeof on->log / sizeof on->log[0]))
        return;
    on->log[on->log_count++] = user->line;
    on->log[on->log_count++] = sum_of(grad);
}

static tt_tensor *hook_scale(const tt_hook_context *context, tt_tensor *grad) {
    const hook_user *user = context->user;
    return tt_mul_scalar(grad, user->factor);
}
static tt_tensor *hook_watch(const tt_hook_context *context, tt_tensor *grad) {
    hook_note(context->user, grad);
    return NULL;
}
static void hook_accumulate(const tt_hook_context *context, tt_tensor *leaf) {
    const hook_user *user = context->user;
    tt_tensor *grad = tt_grad(leaf);
    hook_note(user, grad);
    if (user->factor != 0 && grad != NULL) {
        bool recording = tt_grad_mode(false);
        tt_mul_scalar_(grad, user->factor);
        tt_grad_mode(recording);
    }
}
static void hook_pre(const tt_hook_context *context, size_t count, tt_tensor **grads) {
    const hook_user *user = context->user;
    for (size_t i = 0; i < count; i++)
        if (grads[i] != NULL)
            grads[i] = tt_mul_scalar(grads[i], user->factor);
}
static void hook_post(const tt_hook_context *context, size_t result_count, tt_tensor **results, size_t grad_count,
                      tt_tensor *const *grads) {
    const hook_user *user = context->user;
    (void)grad_count, (void)grads;
    for (size_t i = 0; i < result_count; i++)
        if (results[i] != NULL)
            results[i] = tt_mul_scalar(results[i], user->factor);
}

#define T(i) (what->tensors[i] < 0 ? NULL : on->tensors[what->tensors[i]])
#define I(i) what->ints[i]
#define D(i) what->dims[i]
#define F(i) what->numbers[i]

/* Users of hooks live as long as the run. */
static hook_user *user_of(machine *on, const line *what) {
    static hook_user users[LINES];
    users[on->current] = (hook_user){ on, on->current, what->numbers[0] };
    return &users[on->current];
}

static void run_hook_scale(machine *on, const line *what) {
    tt_hook_tensor(T(0), hook_scale, user_of(on, what), NULL, NULL);
}
static void run_hook_watch(machine *on, const line *what) {
    tt_hook_tensor(T(0), hook_watch, user_of(on, what), NULL, NULL);
}
static void run_hook_accumulate(machine *on, const line *what) {
    tt_hook_accumulate(T(0), hook_accumulate, user_of(on, what), NULL, NULL);
}
static void run_hook_pre(machine *on, const line *what) {
    tt_hook_node_pre(tt_grad_fn(T(0)), hook_pre, user_of(on, what), NULL, NULL);
}
static void run_hook_post(machine *on, const line *what) {
    tt_hook_node_post(tt_grad_fn(T(0)), hook_post, user_of(on, what), NULL, NULL);
}

/* ---- backwards ---- */

/* Small exact numbers, so that no two elements count the same. */
static tt_tensor *weights_like(tt_tensor *x, int salt) {
    bool recording = tt_grad_mode(false), complex = tu_is_complex(tt_dtype(x));
    tt_dims sizes = tt_sizes(x);
    if (complex)
        sizes.at[sizes.count++] = 2;
    int64_t count = tt_numel(x) * (complex ? 2 : 1);
    double *values = malloc((size_t)(count + 1) * sizeof *values);
    if (values == NULL)
        abort();
    for (int64_t i = 0; i < count; i++)
        values[i] = 0.5 + (double)((i * 7 + salt * 3) % 5) / 8;
    tt_tensor *dense = tt_from(values, sizes, TUTTI_F64, NULL);
    free(values);
    if (tt_device_of(x) == TUTTI_META) {
        dense = tt_ones_like(tt_detach(x));
        complex = false;
    }
    tt_tensor *weights = tt_to(complex ? tt_view_as_complex(dense) : dense, tt_dtype(x));
    if (tu_on_device(x))
        weights = tt_to_device(weights, tt_device_of(x));
    tt_grad_mode(recording);
    return weights;
}

static void run_backward(machine *on, const line *what) {
    tt_tensor *root = T(0);
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    options.retain_graph = I(0) != 0;
    tt_backward_from(tt_tensors(root), tt_tensors(weights_like(root, 0)), &options);
}

static bool is_input(const machine *on, int which) {
    const line *what = &on->program->lines[which / RESULTS];
    return which % RESULTS == 0 && !what->gone && on->tensors[which] != NULL && strcmp(what->row->name, "leaf") == 0 &&
           what->ints[3] != 0;
}

/* The gradients of the roots by all leaves, then the gradients of those. */
static void run_gradients(machine *on, const line *what) {
    tt_tensor *inputs[LINES], *roots[LINES], *weights[LINES];
    int lines[LINES], count = 0, root_count = 0;
    char name[32];
    for (int i = 0; i < on->current * RESULTS; i++)
        if (is_input(on, i)) {
            lines[count] = i / RESULTS;
            inputs[count++] = on->tensors[i];
        }
    for (int i = 0; i < what->tensor_count; i++)
        if (T(i) != NULL) {
            weights[root_count] = weights_like(T(i), i);
            roots[root_count++] = T(i);
        }
    tt_tensor_list leaves = tt_tensors_of((size_t)count, inputs);
    if (count == 0 || root_count == 0 || on->setting.values_only)
        return;
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    options.create_graph = I(0) != 0;
    tt_tensor_list first = tt_gradients(tt_tensors_of((size_t)root_count, roots), leaves,
                                        tt_tensors_of((size_t)root_count, weights), &options);
    for (int i = 0; i < count && tt_error_pending() == TUTTI_OK; i++) {
        snprintf(name, sizeof name, "first t%d", lines[i]);
        record_tensor(on, name, first.at[i]);
    }
    if (!options.create_graph || tt_error_pending() != TUTTI_OK)
        return;
    root_count = 0;
    for (int i = 0; i < count; i++)
        if (first.at[i] != NULL && tt_requires_grad(first.at[i])) {
            weights[root_count] = weights_like(first.at[i], i);
            roots[root_count++] = first.at[i];
        }
    tt_tensor_list second = { 0, NULL };
    on->muted = true; /* which gradients of zero there are is each library's affair */
    if (root_count > 0)
        second = tt_gradients(tt_tensors_of((size_t)root_count, roots), leaves,
                              tt_tensors_of((size_t)root_count, weights), NULL);
    on->muted = false;
    record *whole = record_new(on, "second");
    if (refusal(whole))
        return;
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "second t%d", lines[i]);
        record_tensor(on, name, second.count > 0 ? second.at[i] : NULL);
    }
}

/* ---- rows ---- */

#define OUT(call) results[0] = call
#define LIST tt_tensors_of((size_t)what->tensor_count, (tt_tensor *[]){ T(0), T(1), T(2), T(3) })
#define APPLY(function, count)                                                                                         \
    run_list(tt_apply(&(tt_function){ sizeof(tt_function), #function, function##_forward, function##_backward, NULL }, \
                      tt_tensors_of(count, (tt_tensor *[]){ T(0), T(1) }), NULL),                                      \
             results)
#define ROW(name, arguments, weight, smooth, covers, make, call)                       \
    static void run_##name##_row(machine *on, const line *what, tt_tensor **results) { \
        (void)on, (void)what, (void)results;                                           \
        call;                                                                          \
    }
#include "rows.def"
#undef ROW
const row random_rows[] = {
#define ROW(name, arguments, weight, smooth, covers, make, call) \
    { #name, arguments, weight, smooth, covers, make, run_##name##_row },
#include "rows.def"
#undef ROW
};
const int random_row_count = sizeof random_rows / sizeof random_rows[0];

/* ---- runs ---- */

static bool arguments_present(const machine *on, const line *what) {
    for (int i = 0; i < what->tensor_count; i++)
        if (what->tensors[i] >= 0 && on->tensors[what->tensors[i]] == NULL)
            return false;
    return true;
}

/* Whether the line writes to memory that it also reads, otherwise than element by element: what comes out depends on
 * the order of elements, as far as nobody refuses it. */
static bool depends_on_order(const machine *on, const line *what) {
    size_t length = strlen(what->row->name);
    const tt_tensor *to = what->tensor_count > 0 ? T(0) : NULL;
    if (to == NULL || what->row->name[length - 1] != '_')
        return false;
    for (int i = 1; i < what->tensor_count; i++) {
        const tt_tensor *from = T(i);
        if (from != NULL && from->storage == to->storage &&
            (from->offset != to->offset || !tu_same_sizes(from, to) ||
             memcmp(from->strides, to->strides, (size_t)to->ndim * sizeof to->strides[0]) != 0))
            return true;
    }
    return false;
}

void machine_step(machine *on, int index) {
    const line *what = &on->program->lines[index];
    char name[48];
    on->current = index;
    if (what->gone || !arguments_present(on, what))
        return;
    tt_tensor *results[RESULTS] = { NULL };
    on->report->ordered = on->report->ordered || depends_on_order(on, what);
    what->row->run(on, what, results);
    snprintf(name, sizeof name, "line t%d", index);
    record *to = record_new(on, name);
    if (refusal(to))
        return;
    for (int i = 0; i < RESULTS; i++)
        on->tensors[RESULTS * index + i] = results[i];
    if (results[0] != NULL)
        record_shape(to, results[0]);
}

/* What is left at the end: all values, what hooks saw, what leaves collected. */
static void record_state(machine *on) {
    char name[32];
    for (int i = 0; i < on->program->count * RESULTS; i++) {
        if (on->tensors[i] == NULL)
            continue;
        snprintf(name, sizeof name, "value t%d.%d", i / RESULTS, i % RESULTS);
        record_tensor(on, name, on->tensors[i]);
        snprintf(name, sizeof name, "grad t%d.%d", i / RESULTS, i % RESULTS);
        if (!on->setting.values_only && (is_input(on, i) || tt_grad(on->tensors[i]) != NULL))
            record_tensor(on, name, tt_grad(on->tensors[i]));
    }
    record *log = record_new(on, "log");
    log->absent = false;
    log->count = on->log_count;
    log->values = malloc((size_t)(log->count + 1) * sizeof *log->values);
    if (log->values == NULL)
        abort();
    memcpy(log->values, on->log, (size_t)log->count * sizeof *log->values);
}

static tt_counts counts_now(void) {
    tt_counts counts = TT_COUNTS_INIT;
    if (tt_count(&counts) != TUTTI_OK)
        abort();
    return counts;
}

bool program_run(const program *what, const setting *how, report *to) {
    machine *on = calloc(1, sizeof *on);
    if (on == NULL)
        abort();
    on->program = what;
    on->setting = *how;
    on->report = to;
    tt_counts before = counts_now();
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(true);
    for (int i = 0; i < what->count; i++)
        machine_step(on, i);
    tt_grad_mode(true);
    record_state(on);
    tt_grad_mode(recording);
    bool closed = tt_scope_close(&scope) == TUTTI_OK;
    free(on);
    tt_counts after = counts_now();
    return closed && after.tensors == before.tensors && after.nodes == before.nodes &&
           after.storages == before.storages && after.scopes == before.scopes;
}
