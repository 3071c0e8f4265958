/* SPDX-License-Identifier: Apache-2.0
 *
 * Printing tensors for people:
 *
 *     [[ 1.0000, -2.5000],
 *      [ 0.0000, 10.0000]]  f32 [2, 2], requires grad
 */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/on_device.h"
#include "tensor/operator.h"

#define EDGE 3    /* shown at each end of a long dimension */
#define LONG 1000 /* elements from which the middle is left out */

typedef struct text {
    char *at;
    size_t size, length;
} text;

static void add(text *out, const char *format, ...) TUTTI_PRINTF(2, 3);
static void add(text *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = out->length < out->size ? out->size - out->length : 0;
    int length = vsnprintf(room > 0 ? out->at + out->length : NULL, room, format, arguments);
    va_end(arguments);
    out->length += length > 0 ? (size_t)length : 0;
}

typedef struct picture {
    const tt_tensor *x;    /* its sizes */
    const tt_tensor *held; /* its elements: all of them, or those that are shown alone */
    bool shortened;
    int width, decimals;
    bool scientific;
} picture;

/* Whether the middle of that dimension is left out. */
static bool is_cut(const picture *shown, int dim) {
    return shown->shortened && shown->x->sizes[dim] > 2 * EDGE;
}

/* How far the i-th entry of a dimension is from the first. */
static int64_t step_to(const picture *shown, int dim, int64_t i) {
    bool behind = is_cut(shown, dim) && i >= EDGE; /* the middle, which may not be held */
    return (behind ? i - shown->x->sizes[dim] + shown->held->sizes[dim] : i) * shown->held->strides[dim];
}

/* One element as text; returns its length. */
static int element(const picture *shown, int64_t offset, char *out, size_t size) {
    const char *data = (const char *)tu_pointer(shown->held) + offset * tu_dtype_bytes[shown->x->dtype];
    tutti_dtype dtype = shown->x->dtype;
    double value[2] = { 0 };
    uint64_t whole = 0;
    if (dtype == TUTTI_BOOL)
        return snprintf(out, size, "%s", *data ? "true" : "false");
    if (tu_is_integer(dtype)) {
        tutti_dtype wide = dtype == TUTTI_U64 ? TUTTI_U64 : TUTTI_I64;
        if (tutti_convert(data, dtype, &whole, wide, 1) != TUTTI_OK)
            return snprintf(out, size, "?");
        return wide == TUTTI_U64 ? snprintf(out, size, "%llu", (unsigned long long)whole)
                                 : snprintf(out, size, "%lld", (long long)whole);
    }
    if (tutti_convert(data, dtype, value, tu_is_complex(dtype) ? TUTTI_C128 : TUTTI_F64, 1) != TUTTI_OK)
        return snprintf(out, size, "?");
    const char *format = shown->scientific ? "%.*e" : "%.*f";
    char real[40], imaginary[40];
    snprintf(real, sizeof real, format, shown->decimals, value[0]);
    if (!tu_is_complex(dtype))
        return snprintf(out, size, "%s", real);
    snprintf(imaginary, sizeof imaginary, format, shown->decimals, fabs(value[1]));
    return snprintf(out, size, "%s%c%si", real, signbit(value[1]) ? '-' : '+', imaginary);
}

/* Calls visit for every element that is shown. */
static void visit(picture *shown, int dim, int64_t offset, void (*each)(picture *shown, int64_t offset)) {
    const tt_tensor *x = shown->x;
    if (dim == x->ndim) {
        each(shown, offset);
        return;
    }
    for (int64_t i = 0; i < x->sizes[dim]; i++) {
        if (is_cut(shown, dim) && i == EDGE)
            i = x->sizes[dim] - EDGE;
        visit(shown, dim + 1, offset + step_to(shown, dim, i), each);
    }
}

static void judge(picture *shown, int64_t offset) {
    double value = 0;
    tutti_dtype dtype = shown->x->dtype;
    const char *data = (const char *)tu_pointer(shown->held) + offset * tu_dtype_bytes[dtype];
    if (!tu_is_float(dtype) || tutti_convert(data, dtype, &value, TUTTI_F64, 1) != TUTTI_OK || !isfinite(value))
        return;
    if (value != rint(value))
        shown->decimals = 4;
    if (fabs(value) >= 1e6 || (value != 0 && fabs(value) < 1e-3))
        shown->scientific = true;
}

static void measure(picture *shown, int64_t offset) {
    char one[96];
    int width = element(shown, offset, one, sizeof one);
    shown->width = width > shown->width ? width : shown->width;
}

static void show(text *out, const picture *shown, int dim, int64_t offset, int indent) {
    const tt_tensor *x = shown->x;
    if (dim == x->ndim) {
        char one[96];
        element(shown, offset, one, sizeof one);
        add(out, "%*s", shown->width, one);
        return;
    }
    add(out, "[");
    bool inner = dim == x->ndim - 1;
    for (int64_t i = 0; i < x->sizes[dim]; i++) {
        if (i > 0 && inner)
            add(out, ", ");
        else if (i > 0)
            add(out, ",\n%*s", indent + 1, "");
        if (is_cut(shown, dim) && i == EDGE) {
            i = x->sizes[dim] - EDGE;
            add(out, "%s", inner ? "…, " : "…");
            if (!inner)
                add(out, ",\n%*s", indent + 1, "");
        }
        show(out, shown, dim + 1, offset + step_to(shown, dim, i), indent + 1);
    }
    add(out, "]");
}

static void show_values(text *out, const tt_tensor *x, const tt_tensor *held, bool shortened) {
    picture shown = { .x = x, .held = held, .shortened = shortened, .decimals = tu_is_complex(x->dtype) ? 4 : 1 };
    visit(&shown, 0, 0, judge);
    if (shown.scientific)
        shown.decimals = 4;
    visit(&shown, 0, 0, measure);
    show(out, &shown, 0, 0, 0);
}

/* Copies the ends of the dimensions from `dim` on; `from` and `to` are this corner of both tensors so far. */
static tutti_status copy_ends(const tt_tensor *x, const tt_tensor *ends, int dim, tu_shape from, tu_shape to) {
    if (dim == x->ndim) {
        tt_tensor *source = tu_tensor_alias(x, &from), *target = tu_tensor_alias(ends, &to);
        tutti_status status =
            source == NULL || target == NULL ? TUTTI_ERROR_MEMORY : tu_device_copy_tensor(target, source);
        tu_tensor_drop(source);
        tu_tensor_drop(target);
        return status;
    }
    if (x->sizes[dim] <= 2 * EDGE)
        return copy_ends(x, ends, dim + 1, from, to);
    from.sizes[dim] = to.sizes[dim] = EDGE;
    tutti_status status = copy_ends(x, ends, dim + 1, from, to);
    from.offset += (x->sizes[dim] - EDGE) * from.strides[dim];
    to.offset += EDGE * to.strides[dim];
    return status == TUTTI_OK ? copy_ends(x, ends, dim + 1, from, to) : status;
}

/* Both ends of every long dimension, in a tensor of their own: what is not shown stays on its device. NULL, with the
 * error written, where that fails. */
static tt_tensor *ends_of(const tt_tensor *x) {
    tu_shape shape = tu_shape_of(x);
    shape.offset = 0;
    for (int dim = 0; dim < x->ndim; dim++)
        shape.sizes[dim] = x->sizes[dim] > 2 * EDGE ? 2 * EDGE : x->sizes[dim];
    tt_tensor *ends = tu_shape_contiguous("print", &shape) == TUTTI_OK ? tu_tensor_new(&shape) : NULL;
    if (ends != NULL && copy_ends(x, ends, 0, tu_shape_of(x), shape) != TUTTI_OK) {
        tu_tensor_drop(ends);
        ends = NULL;
    }
    return ends;
}

/* What lies on a device is copied to the host first, as far as it is shown. */
static void show_from_anywhere(text *out, const tt_tensor *x) {
    bool shortened = x->numel > LONG;
    tt_tensor *some = shortened && tu_on_device(x) ? ends_of(x) : tu_tensor_hold((tt_tensor *)x),
              *here = some != NULL ? tu_on_host(some) : NULL;
    if (here == NULL)
        add(out, "(%s)", tutti_error_message());
    else
        show_values(out, x, here, shortened);
    tu_tensor_drop(here);
    tu_tensor_drop(some);
}

static void describe(text *out, const tt_tensor *x) {
    if (x == NULL) {
        add(out, "NULL");
        return;
    }
    if (x->magic != TU_MAGIC_ALIVE) {
        add(out, "(no live tensor)");
        return;
    }
    tutti_error_copy before; /* printing helps with errors and must not disturb one */
    tu_error_save(&before);
    if (x->device == TUTTI_META)
        add(out, "…");
    else if (tu_tensor_ready("print", "x", x) != TUTTI_OK)
        add(out, "(%s)", tutti_error_message());
    else if (x->numel == 0)
        add(out, "[]");
    else
        show_from_anywhere(out, x);
    tu_error_restore(&before);
    add(out, "  %s%s", tu_describe(x), x->flags & TU_IS_PARAMETER ? ", parameter" : "");
    if (x->flags & TU_REQUIRES_GRAD)
        add(out, ", requires grad");
}

/* While a function is captured printing is a read as any other: a graph could not repeat it, and it would vanish from
 * the calls that follow without a word. */
static bool is_refused(const char *who, const tt_tensor *x) {
    if (x == NULL || x->magic != TU_MAGIC_ALIVE || !x->storage->fake || tu_self()->recorder == NULL)
        return false;
    tu_pending_take(tu_tensor_ready(who, "x", x));
    return true;
}

size_t tt_format(const tt_tensor *x, char *buffer, size_t size) {
    text out = { buffer, size, 0 };
    if (size > 0)
        buffer[0] = 0;
    if (is_refused("format", x))
        return 0;
    describe(&out, x);
    return out.length;
}

void tt_print(const tt_tensor *x, FILE *file) {
    if (is_refused("print", x))
        return;
    size_t length = tt_format(x, NULL, 0);
    char *buffer = malloc(length + 1);
    if (buffer == NULL) {
        fprintf(file, "%s\n", tu_describe(x));
        return;
    }
    tt_format(x, buffer, length + 1);
    fprintf(file, "%s\n", buffer);
    free(buffer);
}
