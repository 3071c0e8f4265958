/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of programs, and the search for the smallest one that fails.
 */
#include <cblas.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "../../instructions.h"
#include "tensor/operator.h"

#include "program.h"

static const setting plainly = { .device = TUTTI_CPU, .moved_line = -1 };

static bool because(char *why, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool because(char *why, size_t size, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, size, format, arguments);
    va_end(arguments);
    return true;
}

/* ---- comparing two runs ---- */

static bool same_dims(const tt_dims *left, const tt_dims *right) {
    return left->count == right->count &&
           memcmp(left->at, right->at, (size_t)(left->count < 0 ? 0 : left->count) * sizeof left->at[0]) == 0;
}

/* Strides of dimensions with one element or none say nothing. */
static bool same_strides(const record *left, const record *right) {
    for (int i = 0; i < left->sizes.count; i++)
        if (left->sizes.at[i] == 0)
            return true;
    for (int i = 0; i < left->sizes.count; i++)
        if (left->sizes.at[i] > 1 && left->strides.at[i] != right->strides.at[i])
            return false;
    return true;
}

static bool bits_differ(const report *left, const report *right, bool shapes_only, char *why, size_t size) {
    if (left->count != right->count)
        return because(why, size, "%d records, but %d", left->count, right->count);
    for (int i = 0; i < left->count; i++) {
        const record *a = &left->records[i], *b = &right->records[i];
        if (strcmp(a->name, b->name) != 0 || a->refused != b->refused || a->absent != b->absent)
            return because(why, size, "%s is %s, but %s is %s %s%s", a->name, a->refused ? "refused" : "there", b->name,
                           b->refused ? "refused" : "there", a->message, b->message);
        if (a->refused || a->absent || strcmp(a->name, "log") == 0)
            continue;
        if (a->dtype != b->dtype || !same_dims(&a->sizes, &b->sizes) || !same_strides(a, b))
            return because(why, size, "%s has another dtype, shape or strides", a->name);
        if (a->requires_grad != b->requires_grad || a->leaf != b->leaf || a->version != b->version)
            return because(why, size, "%s has another history", a->name);
        for (int64_t k = 0; !shapes_only && k < a->count; k++)
            if (memcmp(&a->values[k], &b->values[k], sizeof a->values[k]) != 0 &&
                !(isnan(a->values[k]) && isnan(b->values[k])))
                return because(why, size, "%s, element %lld: %.17g, but %.17g", a->name, (long long)k, a->values[k],
                               b->values[k]);
    }
    return false;
}

/* ---- instruction sets and threads ---- */

static bool has_row(const program *what, const char *name) {
    for (int i = 0; i < what->count; i++)
        if (!what->lines[i].gone && strcmp(what->lines[i].row->name, name) == 0)
            return true;
    return false;
}

/* Products of matrices, of which the gradient of attention's gradient is made too, are the BLAS's at the reference. */
static tu_instructions first_level(const program *what) {
    tu_instructions level = TU_REFERENCE;
    if (has_row(what, "matmul") || has_row(what, "linear") || has_row(what, "attention"))
        for (level++; level < TU_INSTRUCTIONS_END && !tu_instructions_present(level);)
            level++;
    return level;
}

bool fails_on_levels(const program *what, void *context, char *why, size_t size) {
    static report reference, other;
    bool failed = false;
    char reason[256];
    (void)context;
    tu_instructions first = first_level(what);
    if (first == TU_INSTRUCTIONS_END)
        return false;
    openblas_set_num_threads(1);
    test_instructions(first);
    if (!program_run(what, &plainly, &reference))
        failed = because(why, size, "something is left over");
    for (tu_instructions level = first; level < TU_INSTRUCTIONS_END && !failed; level++) {
        if (!test_instructions(level))
            continue;
        for (int threads = level == first ? 2 : 1; threads <= 2 && !failed; threads++) {
            openblas_set_num_threads(threads);
            program_run(what, &plainly, &other);
            if (bits_differ(&reference, &other, false, reason, sizeof reason))
                failed = because(why, size, "other bits with %s and %d threads: %s", tu_instructions_name(level),
                                 threads, reason);
            report_free(&other);
        }
    }
    report_free(&reference);
    return failed;
}

/* ---- meta tensors ---- */

/* Values decide what is refused only where they are indices: a program with a refusal is left out. */
bool fails_on_meta(const program *what, void *context, char *why, size_t size) {
    static report real, meta;
    setting on_meta = plainly;
    char reason[256];
    (void)context;
    on_meta.device = TUTTI_META;
    bool failed = !program_run(what, &plainly, &real) && because(why, size, "something is left over");
    for (int i = 0; i < real.count; i++)
        if (real.records[i].refused && strstr(real.records[i].message, "out of range") != NULL) {
            report_free(&real);
            return failed;
        }
    program_run(what, &on_meta, &meta);
    if (!failed && bits_differ(&real, &meta, true, reason, sizeof reason))
        failed = because(why, size, "a meta tensor differs: %s", reason);
    report_free(&real);
    report_free(&meta);
    return failed;
}

/* ---- other devices ---- */

static double tolerance_of(tutti_dtype dtype) {
    switch (dtype) {
    case TUTTI_F64:
    case TUTTI_C128:
        return 1e-9;
    case TUTTI_F32:
    case TUTTI_C64:
        return 2e-4;
    case TUTTI_F16:
        return 1e-1;
    case TUTTI_BF16:
        return 5e-1;
    case TUTTI_F8_E4M3:
    case TUTTI_F8_E5M2:
        return 5e-1;
    default:
        return 0;
    }
}

static bool has_products(const program *what) {
    return has_row(what, "matmul") || has_row(what, "linear") || has_row(what, "attention");
}

/* What the vendor's library, or the C library for complex numbers, may have rounded otherwise. */
static bool numbers_differ(const report *left, const report *right, char *why, size_t size) {
    for (int i = 0; i < left->count; i++) {
        const record *a = &left->records[i], *b = &right->records[i];
        for (int64_t k = 0; !a->refused && !a->absent && k < a->count; k++) {
            double x = a->values[k], y = b->values[k], allowed = 20 * tolerance_of(a->dtype) * (1 + fabs(x));
            if (!(fabs(x - y) <= allowed) && !(isnan(x) && isnan(y)) && !(isinf(x) && x == y))
                return because(why, size, "%s, element %lld: %.17g, but %.17g", a->name, (long long)k, x, y);
        }
    }
    return false;
}

static bool has_complex(const report *found) {
    for (int i = 0; i < found->count; i++)
        if (found->records[i].dtype == TUTTI_C64 || found->records[i].dtype == TUTTI_C128)
            return true;
    return false;
}

static bool has_refusal(const report *found, const char *about) {
    for (int i = 0; i < found->count; i++)
        if (found->records[i].refused && strstr(found->records[i].message, about) != NULL)
            return true;
    return false;
}

/* An index out of range is told by the next wait there. */
bool fails_on_device(const program *what, void *context, char *why, size_t size) {
    static report here, there;
    setting on_device = plainly;
    device_count *counted = context;
    char reason[256];
    on_device.device = counted->device;
    bool failed = !program_run(what, &plainly, &here) && because(why, size, "something is left over");
    if (!failed && !here.ordered && !has_refusal(&here, "out of range")) {
        if (!program_run(what, &on_device, &there))
            failed = because(why, size, "something is left over there");
        bool rounded = has_products(what) || has_complex(&here);
        counted->compared++;
        counted->rounded += rounded;
        if (!failed && (bits_differ(&here, &there, rounded, reason, sizeof reason) ||
                        (rounded && numbers_differ(&here, &there, reason, sizeof reason))))
            failed = because(why, size, "the device differs: %s", reason);
        report_free(&there);
    }
    report_free(&here);
    return failed;
}

/* ---- finite differences ---- */

static const record *record_of(const report *from, const char *what, int line) {
    char name[32];
    if (line >= 0)
        snprintf(name, sizeof name, "%s t%d", what, line);
    else
        snprintf(name, sizeof name, "%s", what);
    for (int i = 0; i < from->count; i++)
        if (strcmp(from->records[i].name, name) == 0)
            return &from->records[i];
    return NULL;
}

static double weighted(const record *x, int salt) {
    double sum = 0;
    for (int64_t i = 0; x != NULL && !x->refused && i < x->count; i++)
        sum += x->values[i] * (0.5 + (double)((i * 7 + salt * 3) % 5) / 8);
    return sum;
}

static const line *gradients_of(const program *what) {
    const line *last = &what->lines[what->count - 1];
    return what->count > 0 && !last->gone && strcmp(last->row->name, "gradients") == 0 ? last : NULL;
}

/* The function whose gradient `first` is (order 1), or `second` is (order 2), after moving one element. */
static double function_at(const program *what, int order, int line_index, int64_t element, double by, bool *fine) {
    static report found;
    setting moved = plainly;
    moved.moved_line = line_index;
    moved.moved_element = element;
    moved.moved_by = by;
    moved.values_only = order == 1;
    program_run(what, &moved, &found);
    double sum = 0;
    if (order == 1) {
        const line *last = gradients_of(what);
        for (int i = 0; i < last->tensor_count; i++) {
            char name[32];
            snprintf(name, sizeof name, "value t%d.%d", last->tensors[i] / RESULTS, last->tensors[i] % RESULTS);
            sum += weighted(record_of(&found, name, -1), i);
        }
    } else {
        int salt = 0;
        for (int i = 0; i < what->count; i++)
            if (!what->lines[i].gone && strcmp(what->lines[i].row->name, "leaf") == 0 && what->lines[i].ints[3] != 0) {
                const record *grad = record_of(&found, "first", i);
                sum += grad != NULL && grad->requires_grad ? weighted(grad, salt) : 0;
                salt++;
            }
    }
    for (int i = 0; i < found.count; i++)
        for (int64_t k = 0; k < found.records[i].count; k++)
            *fine = *fine && isfinite(found.records[i].values[k]) && fabs(found.records[i].values[k]) < 1e4 &&
                    found.records[i].dtype != TUTTI_F32; /* which a number makes of integers: too coarse */
    report_free(&found);
    return sum;
}

/* At a kink the two sides differ, and near one the two steps do: there is nothing to compare with. */
static bool slope_at(const program *what, int order, int line_index, int64_t element, double *slope) {
    const double step = order == 1 ? 1e-4 : 2e-5;
    bool fine = true;
    double here = function_at(what, order, line_index, element, 0, &fine);
    double above = function_at(what, order, line_index, element, step, &fine);
    double beneath = function_at(what, order, line_index, element, -step, &fine);
    double above_half = function_at(what, order, line_index, element, step / 2, &fine);
    double beneath_half = function_at(what, order, line_index, element, -step / 2, &fine);
    double wide = (above - beneath) / (2 * step), narrow = (above_half - beneath_half) / step;
    double right = (above_half - here) / (step / 2), left = (here - beneath_half) / (step / 2);
    *slope = (4 * narrow - wide) / 3;
    double scale = 1 + fabs(wide) + fabs(narrow);
    return fine && fabs(wide - narrow) < 1e-4 * scale && fabs(right - left) < 3e-2 * scale;
}

static bool slopes_differ(const program *what, int order, int line_index, const record *grad, char *why, size_t size) {
    int64_t most = order == 1 ? 4 : 2;
    for (int64_t i = 0; i < most && i < grad->count; i++) {
        int64_t element = (i * 5 + line_index) % grad->count;
        double slope;
        if (isnan(grad->values[element]) || !slope_at(what, order, line_index, element, &slope))
            continue;
        if (!(fabs(slope - grad->values[element]) <= 3e-5 * (1 + fabs(slope))))
            return because(why, size, "the %s derivative of t%d, element %lld, is %.9g, but %.9g by differences",
                           order == 1 ? "first" : "second", line_index, (long long)element, grad->values[element],
                           slope);
    }
    return false;
}

/* A function that changes its argument has done so when it is refused. */
static bool refused_too_late(const program *what, const report *found) {
    for (int i = 0; i < what->count; i++) {
        const record *one = record_of(found, "line", i);
        if (one != NULL && one->refused && strncmp(what->lines[i].row->name, "function_dirty", 14) == 0)
            return true;
    }
    return false;
}

bool fails_by_differences(const program *what, void *context, char *why, size_t size) {
    static report found;
    long *checked = context;
    if (gradients_of(what) == NULL)
        return false;
    bool failed = !program_run(what, &plainly, &found) && because(why, size, "something is left over");
    bool second = record_of(&found, "second", -1) != NULL && !record_of(&found, "second", -1)->refused;
    bool comparable = !refused_too_late(what, &found);
    for (int i = 0; i < what->count && !failed && comparable; i++) {
        const record *first = record_of(&found, "first", i), *again = record_of(&found, "second", i);
        if (first == NULL || first->refused || record_of(&found, "first", i)->absent)
            continue;
        if (checked != NULL)
            ++*checked;
        failed = slopes_differ(what, 1, i, first, why, size) ||
                 (second && again != NULL && !again->absent && slopes_differ(what, 2, i, again, why, size));
    }
    report_free(&found);
    return failed;
}

/* ---- PyTorch ---- */

static void read_dims(char *text, tt_dims *dims) {
    dims->count = 0;
    for (char *rest = text, *one; (one = strsep(&rest, ",")) != NULL && *one != '\0' && dims->count < TT_MAX_DIMS;)
        dims->at[dims->count++] = strtoll(one, NULL, 10);
}

/* name, status, dtype, sizes, strides, requires grad, leaf, version, values: between tabs */
static bool read_record(char *text, record *to) {
    char *rest = text, *field[9];
    text[strcspn(text, "\n")] = '\0';
    for (int i = 0; i < 9; i++)
        if ((field[i] = strsep(&rest, "\t")) == NULL)
            return false;
    *to = (record){ .refused = strcmp(field[1], "refused") == 0, .absent = strcmp(field[1], "absent") == 0 };
    snprintf(to->name, sizeof to->name, "%s", field[0]);
    if (to->refused)
        snprintf(to->message, sizeof to->message, "%s", field[8]);
    if (to->refused || to->absent)
        return true;
    if (*field[2] != '\0' && tutti_dtype_parse(field[2], &to->dtype) != TUTTI_OK)
        return false;
    read_dims(field[3], &to->sizes);
    read_dims(field[4], &to->strides);
    to->requires_grad = *field[5] == '1';
    to->leaf = *field[6] == '1';
    to->version = strtoll(field[7], NULL, 10);
    for (const char *at = field[8]; *at != '\0'; at++)
        to->count += *at == ' ';
    to->values = malloc((size_t)(to->count + 1) * sizeof *to->values);
    if (to->values == NULL)
        abort();
    char *at = field[8];
    for (int64_t i = 0; i < to->count; i++)
        to->values[i] = strtod(at, &at);
    return true;
}

/* What PyTorch makes of it. False where it has no such arithmetic, for f8 or wide unsigned integers. */
static bool ask(peer *who, const program *what, report *to) {
    char *text = NULL;
    size_t room = 0;
    bool known = true;
    program_print(what, who->to);
    fprintf(who->to, "end\n");
    fflush(who->to);
    for (;;) {
        if (getline(&text, &room, who->from) < 0) {
            fprintf(stderr, "PyTorch's end closed the pipe\n");
            exit(1);
        }
        if (strcmp(text, "end\n") == 0)
            break;
        if (strcmp(text, "unknown\n") == 0)
            known = false;
        else if (to->count == RECORDS || !read_record(text, &to->records[to->count++])) {
            fprintf(stderr, "cannot read what PyTorch's end wrote: %s\n", text);
            exit(1);
        }
    }
    free(text);
    return known;
}

/* The coarsest float that a program holds: what comes out is as rough as that. */
static double tolerance_of_program(const report *found) {
    double tolerance = 1e-9;
    for (int i = 0; i < found->count; i++)
        if (!found->records[i].absent && !found->records[i].refused && found->records[i].dtype != 0)
            tolerance = fmax(tolerance, tolerance_of(found->records[i].dtype));
    return tolerance;
}

static const record *argument_of(const report *from, const line *what, int which) {
    char name[32];
    snprintf(name, sizeof name, "value t%d.%d", what->tensors[which] / RESULTS, what->tensors[which] % RESULTS);
    return record_of(from, name, -1);
}

/* Whether the arguments of a line may have other bits in PyTorch. Those that were written over since cannot be looked
 * at any more. */
static bool arguments_differ(const program *what, int index, const report *ours, const report *theirs) {
    const line *one = &what->lines[index];
    for (int k = index + 1; k < what->count; k++)
        if (!what->lines[k].gone && what->lines[k].row->name[strlen(what->lines[k].row->name) - 1] == '_')
            return true;
    for (int k = 0; k < one->tensor_count; k++) {
        const record *a = argument_of(ours, one, k), *b = argument_of(theirs, one, k);
        if (a != NULL && b != NULL && a->count == b->count && a->values != NULL && b->values != NULL &&
            memcmp(a->values, b->values, (size_t)a->count * sizeof a->values[0]) != 0)
            return true;
    }
    return false;
}

/* Whether an argument lies below 0, or is -0, in one of the two alone. */
static bool sides_differ(const line *what, const report *ours, const report *theirs) {
    for (int k = 0; k < what->tensor_count; k++) {
        const record *a = argument_of(ours, what, k), *b = argument_of(theirs, what, k);
        bool both = a != NULL && b != NULL && a->count == b->count && a->values != NULL && b->values != NULL;
        for (int64_t i = 0; both && i < a->count; i++)
            if (!signbit(a->values[i]) != !signbit(b->values[i]))
                return true;
    }
    return false;
}

/* Near a pole a last bit decides between a huge number, an infinity and NaN; where last bits differ, between 0 / 0
 * and 1; and where the two lie on its two sides, nothing that comes after it can be compared. */
typedef enum pole {
    NO_POLE,
    POLE,
    POLE_OF_OTHER_BITS,
    POLE_BETWEEN
} pole;

static pole poles_of(const program *what, const report *ours, const report *theirs) {
    static const char *const names[] = { "div",        "div_",       "div_scalar", "div_scalar_", "pow",
                                         "pow_scalar", "reciprocal", "log",        "rsqrt",       "sqrt",
                                         "sqrt_",      "addcdiv",    "addcdiv_" };
    pole found = NO_POLE;
    for (int i = 0; i < what->count; i++)
        for (size_t k = 0; k < sizeof names / sizeof names[0] && !what->lines[i].gone; k++) {
            if (strcmp(what->lines[i].row->name, names[k]) != 0)
                continue;
            pole one = sides_differ(&what->lines[i], ours, theirs) ? POLE_BETWEEN
                       : arguments_differ(what, i, ours, theirs)   ? POLE_OF_OTHER_BITS
                                                                   : POLE;
            found = one > found ? one : found;
        }
    return found;
}

static double largest(const record *of) {
    double found = 0;
    for (int64_t i = 0; of->values != NULL && i < of->count; i++)
        found = isfinite(of->values[i]) ? fmax(found, fabs(of->values[i])) : found;
    return found;
}

/* How far the two may lie apart in this program. */
typedef struct leeway {
    double tolerance;
    pole poles;
    double slopes;     /* beyond a pole: the largest derivative. Terms as large as that may cancel in the others */
    bool complex_ends; /* a complex number became infinite or NaN: which parts of it depends on the order of products */
} leeway;

static leeway leeway_of(const program *what, const report *ours, const report *theirs) {
    leeway found = { fmax(tolerance_of_program(ours), tolerance_of_program(theirs)), poles_of(what, ours, theirs), 0,
                     false };
    for (int side = 0; side < 2; side++) {
        const report *one = side == 0 ? ours : theirs;
        for (int i = 0; i < one->count; i++) {
            const record *each = &one->records[i];
            if (found.poles != NO_POLE && strncmp(each->name, "first", 5) == 0)
                found.slopes = fmax(found.slopes, largest(each));
            for (int64_t k = 0; tu_is_complex(each->dtype) && each->values != NULL && k < each->count; k++)
                found.complex_ends = found.complex_ends || !isfinite(each->values[k]);
        }
    }
    return found;
}

static bool values_differ(const record *a, const record *b, const leeway *of, char *why, size_t size) {
    double tolerance = of->tolerance, huge = tolerance > 1e-6 ? 1e4 : 1e8; /* f32 has fewer digits to lose */
    double scale = fmax(1, largest(a));
    pole poles = of->poles;
    if (strncmp(a->name, "first", 5) == 0)
        scale = fmax(scale, of->slopes);
    for (int64_t i = 0; i < a->count; i++) {
        double x = a->values[i], y = b->values[i];
        bool same = x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= tolerance * scale;
        if (!same && isnan(y) && strncmp(a->name, "second", 6) == 0)
            same = true; /* at a point that has none */
        if (!same && poles != NO_POLE && (!isfinite(x) || fabs(x) > huge) && (!isfinite(y) || fabs(y) > huge))
            same = true;
        if (!same && poles == POLE_OF_OTHER_BITS && isfinite(x) != isfinite(y))
            same = true;
        if (!same && poles == POLE_OF_OTHER_BITS && fabs(x - y) <= 0.05 * tolerance * x * x)
            same = true; /* an error of 1 / x is one of x, times its own square */
        if (!same && of->complex_ends && (!isfinite(x) || !isfinite(y)))
            same = true;
        if (!same && tolerance > 1e-3 && (!isfinite(x) || !isfinite(y) || fabs(x) > 1e3))
            same = true; /* near the ends of a narrow type */
        if (!same)
            return because(why, size, "%s, element %lld, is %.17g, but %.17g in PyTorch", a->name, (long long)i, x, y);
    }
    return false;
}

/* Of a second derivative that PyTorch has NaN says no more than 0: it is 0 times a value that is not a number, where
 * Tutti knows that there is no slope (that of relu is constant) and makes no graph of it. */
static bool all_zero(const record *what, bool of_peer, double tolerance) {
    bool second = strncmp(what->name, "second", 6) == 0, gradient = second || strncmp(what->name, "first", 5) == 0;
    for (int64_t i = 0; i < what->count; i++)
        if (!(fabs(what->values[i]) <= tolerance) && !(second && of_peer && isnan(what->values[i])))
            return false;
    return gradient;
}

static bool records_differ(const record *a, const record *b, const leeway *of, char *why, size_t size) {
    if (a->refused || b->refused) {
        if (a->refused && b->refused)
            return false;
        return because(why, size, "%s is refused by %s: %s", a->name, a->refused ? "Tutti" : "PyTorch",
                       a->refused ? a->message : b->message);
    }
    if (a->absent || b->absent) { /* an absent gradient is zero */
        const record *there = a->absent ? b : a;
        return a->absent != b->absent && !all_zero(there, there == b, of->tolerance) &&
               because(why, size, "%s is there only in %s", a->name, a->absent ? "PyTorch" : "Tutti");
    }
    if (a->dtype != b->dtype || !same_dims(&a->sizes, &b->sizes))
        return because(why, size, "%s is %s of %d dimensions, but %s of %d dimensions, or sizes differ", a->name,
                       tutti_dtype_name(a->dtype), a->sizes.count, tutti_dtype_name(b->dtype), b->sizes.count);
    bool state = strncmp(a->name, "line", 4) == 0 || strncmp(a->name, "value", 5) == 0;
    if (state && (a->requires_grad != b->requires_grad || a->leaf != b->leaf))
        return because(why, size, "%s: requires grad %d, leaf %d; in PyTorch %d, %d", a->name, a->requires_grad,
                       a->leaf, b->requires_grad, b->leaf);
    if (state && a->version != b->version)
        return because(why, size, "%s has version %lld; in PyTorch %lld", a->name, (long long)a->version,
                       (long long)b->version);
    if (a->count != b->count)
        return because(why, size, "%s has %lld values; in PyTorch %lld", a->name, (long long)a->count,
                       (long long)b->count);
    return values_differ(a, b, of, why, size);
}

/* What an operator saves is its own affair: of these PyTorch keeps other tensors than Tutti, so that a write into one
 * of them is refused by one of the two alone. */
static bool saves_otherwise(const program *what) {
    static const char *const names[] = { "norm",        "rms_norm",   "layer_norm", "prod",          "attention",
                                         "mse_loss",    "gather_dim", "pow",        "rope",          "index_add",
                                         "scatter_add", "linear",     "matmul",     "cross_entropy", "function_absent",
                                         "addcdiv",     "addcdiv_" };
    for (int i = 0; i < what->count; i++)
        for (size_t k = 0; k < sizeof names / sizeof names[0] && !what->lines[i].gone; k++)
            if (strcmp(what->lines[i].row->name, names[k]) == 0)
                return true;
    return false;
}

static bool strides_differ(const record *a, const record *b) {
    return strncmp(a->name, "line", 4) == 0 && !a->refused && !b->refused && !a->absent && !b->absent &&
           same_dims(&a->sizes, &b->sizes) && !same_strides(a, b);
}

/* Where a hook changes gradients, second derivatives depend on how the first were computed, and what a tensor kept of
 * its gradients has a part of both. Those of narrow types are mostly noise, and so are those of f32 near a pole, where
 * large terms cancel: f64 shows whether the formula is right. */
static bool second_depends(const program *what, const record *of, const leeway *by) {
    bool hooks = false;
    int index = 0;
    if (sscanf(of->name, "grad t%d", &index) == 1 && strcmp(what->lines[index].row->name, "leaf") != 0)
        return true;
    if (strncmp(of->name, "second t", 8) == 0 &&
        (by->tolerance > 1e-2 || (by->tolerance > 1e-6 && by->poles != NO_POLE)))
        return true;
    for (int i = 0; i < what->count; i++) {
        const char *name = what->lines[i].row->name;
        hooks = hooks || (!what->lines[i].gone && (strcmp(name, "hook_scale") == 0 || strcmp(name, "hook_pre") == 0 ||
                                                   strcmp(name, "hook_post") == 0));
    }
    return hooks && strncmp(of->name, "second", 6) == 0;
}

/* Sines of large numbers, of which the last bits are a good part of a turn. */
static bool turns(const line *what, const report *ours) {
    const char *name = what->row->name;
    const record *x = strcmp(name, "sin") == 0 || strcmp(name, "cos") == 0 ? argument_of(ours, what, 0) : NULL;
    for (int64_t i = 0; x != NULL && x->values != NULL && i < x->count; i++)
        if (fabs(x->values[i]) > 100)
            return true;
    return false;
}

static bool jumps(const line *what, const report *ours, int index) {
    static const char *const names[] = { "floor",       "ceil",        "round",      "sign",  "eq",  "ne",
                                         "lt",          "le",          "gt",         "ge",    "any", "all",
                                         "logical_not", "logical_and", "logical_or", "argmax" };
    const record *result = record_of(ours, "line", index);
    bool of_complex = result != NULL && tu_is_complex(result->dtype),
         whole = result != NULL && !tu_is_float(result->dtype) && !of_complex;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(what->row->name, names[i]) == 0)
            return true;
    const char *name = what->row->name;
    bool cut = strcmp(name, "sqrt") == 0 || strcmp(name, "sqrt_") == 0 || strcmp(name, "log") == 0;
    bool converts = strcmp(name, "to") == 0 || strcmp(name, "copy_") == 0;
    return (of_complex && cut) || (whole && converts) || turns(what, ours);
}

/* Where a function jumps, arguments that differ in their last bits may lie on both sides. */
static bool jumped(const program *what, const report *ours, const report *theirs) {
    for (int i = 0; i < what->count; i++)
        if (!what->lines[i].gone && jumps(&what->lines[i], ours, i) && arguments_differ(what, i, ours, theirs))
            return true;
    return false;
}

/* x / x has no slope: what each side has for it is the rounding of two terms that cancel, however large they are. */
static bool divides_by_itself(const program *what) {
    for (int i = 0; i < what->count; i++) {
        const line *one = &what->lines[i];
        if (!one->gone && strncmp(one->row->name, "div", 3) == 0 && one->tensor_count == 2 &&
            one->tensors[0] == one->tensors[1])
            return true;
    }
    return false;
}

/* PyTorch has another message where what was saved is a view that a custom function returned. */
static bool is_version_error(const record *what) {
    return what->refused && (strstr(what->message, "modified by an inplace operation") != NULL ||
                             strstr(what->message, "another view of its base has been modified inplace") != NULL);
}

static bool backward_refused(const program *what, const report *found) {
    for (int i = 0; i < what->count; i++) {
        const record *one = record_of(found, "line", i);
        if (one != NULL && one->refused && strstr("backward gradients", what->lines[i].row->name) != NULL)
            return true;
    }
    return false;
}

/* How far a backward came before it was refused decides which gradients there are. */
static void forget_gradients(report *found) {
    int kept = 0;
    for (int i = 0; i < found->count; i++) {
        if (strncmp(found->records[i].name, "grad ", 5) == 0)
            free(found->records[i].values);
        else
            found->records[kept++] = found->records[i];
    }
    found->count = kept;
}

/* A second backward through nodes that saved nothing needs nothing: which do is each library's affair. */
static bool is_freed(const record *what) {
    return what->refused && strstr(what->message, "backward through the graph a second time") != NULL;
}

bool fails_against_peer(const program *what, void *context, char *why, size_t size) {
    static report ours, theirs;
    peer *who = context;
    bool failed = !program_run(what, &plainly, &ours) && because(why, size, "something is left over");
    bool known = ask(who, what, &theirs);
    if (backward_refused(what, &ours) && saves_otherwise(what)) {
        forget_gradients(&ours);
        forget_gradients(&theirs);
    }
    int count = ours.count < theirs.count ? ours.count : theirs.count;
    leeway of = leeway_of(what, &ours, &theirs);
    for (int i = 0; i < count && !failed && known; i++) {
        const record *a = &ours.records[i], *b = &theirs.records[i];
        if ((is_version_error(a) != is_version_error(b) && saves_otherwise(what)) || is_freed(a) != is_freed(b))
            known = false;
        else if (strcmp(a->name, "log") == 0 && (backward_refused(what, &ours) || saves_otherwise(what)))
            continue; /* how far a backward came before it was refused; which gradients are absent, which zero */
        else if (strides_differ(a, b))
            known = false; /* what is a view, and what of it, would differ from here on */
        else if (strcmp(a->name, b->name) != 0)
            failed = because(why, size, "%s follows, but %s in PyTorch", a->name, b->name);
        else
            failed = !second_depends(what, a, &of) && records_differ(a, b, &of, why, size);
        if (failed && !a->refused && !b->refused && (of.poles == POLE_BETWEEN || jumped(what, &ours, &theirs)))
            failed = known = false;
        if (failed && strncmp(a->name, "first", 5) == 0 && divides_by_itself(what))
            failed = known = false;
        who->refused += a->refused;
        who->backwards += strncmp(a->name, "second t", 8) == 0 && !a->absent;
    }
    if (!failed && known && ours.count != theirs.count)
        failed = because(why, size, "%d records; in PyTorch %d", ours.count, theirs.count);
    who->compared += known;
    report_free(&ours);
    report_free(&theirs);
    return failed;
}

/* ---- the smallest program that fails ---- */

static bool used_later(const program *what, int index) {
    for (int i = index + 1; i < what->count; i++)
        for (int k = 0; k < what->lines[i].tensor_count && !what->lines[i].gone; k++)
            if (what->lines[i].tensors[k] / RESULTS == index && what->lines[i].tensors[k] >= 0)
                return true;
    return false;
}

/* Lines whose arguments went do nothing: they go too. Of roots of gradients only the missing ones go. */
static void drop_orphans(program *what) {
    for (int i = 0; i < what->count; i++) {
        line *one = &what->lines[i];
        bool list = strcmp(one->row->name, "gradients") == 0;
        for (int k = 0; k < one->tensor_count && !one->gone; k++) {
            if (one->tensors[k] < 0 || !what->lines[one->tensors[k] / RESULTS].gone)
                continue;
            if (list && one->tensor_count > 1) {
                memmove(&one->tensors[k], &one->tensors[k + 1],
                        (size_t)(one->tensor_count - k - 1) * sizeof one->tensors[0]);
                one->tensor_count--;
                k--;
            } else {
                one->gone = true;
            }
        }
    }
}

/* In-place lines pass their first argument on: a line that goes is replaced by it. */
static void replace_by_argument(program *what, int index) {
    line *gone = &what->lines[index];
    gone->gone = true;
    if (gone->tensor_count == 0 || gone->tensors[0] < 0)
        return;
    for (int i = index + 1; i < what->count; i++)
        for (int k = 0; k < what->lines[i].tensor_count; k++)
            if (what->lines[i].tensors[k] == RESULTS * index)
                what->lines[i].tensors[k] = gone->tensors[0];
}

static bool try_smaller(program *what, const program *smaller, program_fails *fails, void *context, char *why,
                        size_t size) {
    char reason[512];
    if (!fails(smaller, context, reason, sizeof reason))
        return false;
    *what = *smaller;
    snprintf(why, size, "%s", reason);
    return true;
}

void program_shrink(program *what, program_fails *fails, void *context, char *why, size_t size) {
    for (bool changed = true; changed;) {
        changed = false;
        for (int i = what->count - 1; i >= 0; i--) {
            if (what->lines[i].gone)
                continue;
            program smaller = *what;
            smaller.lines[i].gone = true;
            drop_orphans(&smaller);
            if (try_smaller(what, &smaller, fails, context, why, size)) {
                changed = true;
                continue;
            }
            if (!used_later(what, i))
                continue;
            smaller = *what;
            replace_by_argument(&smaller, i);
            drop_orphans(&smaller);
            changed = try_smaller(what, &smaller, fails, context, why, size) || changed;
        }
    }
}
