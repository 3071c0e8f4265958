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
#include "tensor/operator.h"

#define EDGE 3    /* shown at each end of a long dimension */
#define LONG 1000 /* elements from which the middle is left out */

typedef struct text {
    char *at;
    size_t size, length;
} text;

static void add(text *t, const char *format, ...) TUTTI_PRINTF(2, 3);
static void add(text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = t->length < t->size ? t->size - t->length : 0;
    int length = vsnprintf(room > 0 ? t->at + t->length : NULL, room, format, arguments);
    va_end(arguments);
    t->length += length > 0 ? (size_t)length : 0;
}

typedef struct picture {
    const tt_tensor *x;
    bool shortened;
    int width, decimals;
    bool scientific;
} picture;

/* One element as text; returns its length. */
static int element(const picture *p, int64_t offset, char *out, size_t size) {
    const char *data = (const char *)tu_pointer(p->x) + offset * tu_dtype_bytes[p->x->dtype];
    tutti_dtype dtype = p->x->dtype;
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
    const char *format = p->scientific ? "%.*e" : "%.*f";
    char real[40], imaginary[40];
    snprintf(real, sizeof real, format, p->decimals, value[0]);
    if (!tu_is_complex(dtype))
        return snprintf(out, size, "%s", real);
    snprintf(imaginary, sizeof imaginary, format, p->decimals, fabs(value[1]));
    return snprintf(out, size, "%s%c%si", real, signbit(value[1]) ? '-' : '+', imaginary);
}

/* Calls visit for every element that is shown. */
static void visit(picture *p, int dim, int64_t offset, void (*each)(picture *p, int64_t offset)) {
    const tt_tensor *x = p->x;
    if (dim == x->ndim) {
        each(p, offset);
        return;
    }
    for (int64_t i = 0; i < x->sizes[dim]; i++) {
        if (p->shortened && x->sizes[dim] > 2 * EDGE && i == EDGE)
            i = x->sizes[dim] - EDGE;
        visit(p, dim + 1, offset + i * x->strides[dim], each);
    }
}

static void judge(picture *p, int64_t offset) {
    double value = 0;
    tutti_dtype dtype = p->x->dtype;
    const char *data = (const char *)tu_pointer(p->x) + offset * tu_dtype_bytes[dtype];
    if (!tu_is_float(dtype) || tutti_convert(data, dtype, &value, TUTTI_F64, 1) != TUTTI_OK || !isfinite(value))
        return;
    if (value != rint(value))
        p->decimals = 4;
    if (fabs(value) >= 1e6 || (value != 0 && fabs(value) < 1e-3))
        p->scientific = true;
}

static void measure(picture *p, int64_t offset) {
    char one[96];
    int width = element(p, offset, one, sizeof one);
    p->width = width > p->width ? width : p->width;
}

static void show(text *t, const picture *p, int dim, int64_t offset, int indent) {
    const tt_tensor *x = p->x;
    if (dim == x->ndim) {
        char one[96];
        element(p, offset, one, sizeof one);
        add(t, "%*s", p->width, one);
        return;
    }
    add(t, "[");
    bool inner = dim == x->ndim - 1;
    for (int64_t i = 0; i < x->sizes[dim]; i++) {
        if (i > 0 && inner)
            add(t, ", ");
        else if (i > 0)
            add(t, ",\n%*s", indent + 1, "");
        if (p->shortened && x->sizes[dim] > 2 * EDGE && i == EDGE) {
            i = x->sizes[dim] - EDGE;
            add(t, "%s", inner ? "…, " : "…");
            if (!inner)
                add(t, ",\n%*s", indent + 1, "");
        }
        show(t, p, dim + 1, offset + i * x->strides[dim], indent + 1);
    }
    add(t, "]");
}

static void show_values(text *t, const tt_tensor *x) {
    picture p = { .x = x, .shortened = x->numel > LONG, .decimals = tu_is_complex(x->dtype) ? 4 : 1 };
    visit(&p, 0, 0, judge);
    if (p.scientific)
        p.decimals = 4;
    visit(&p, 0, 0, measure);
    show(t, &p, 0, 0, 0);
}

static void describe(text *t, const tt_tensor *x) {
    if (x == NULL) {
        add(t, "NULL");
        return;
    }
    if (x->magic != TU_MAGIC_ALIVE) {
        add(t, "(no live tensor)");
        return;
    }
    tu_error_copy before; /* printing helps with errors and must not disturb one */
    tu_error_save(&before);
    if (x->device == TUTTI_META)
        add(t, "…");
    else if (tu_tensor_ready("print", "x", x) != TUTTI_OK)
        add(t, "(%s)", tutti_error_message());
    else if (x->numel == 0)
        add(t, "[]");
    else
        show_values(t, x);
    tu_error_restore(&before);
    add(t, "  %s%s", tu_describe(x), x->flags & TU_PARAMETER ? ", parameter" : "");
    if (x->flags & TU_REQUIRES_GRAD)
        add(t, ", requires grad");
}

size_t tt_format(const tt_tensor *x, char *buffer, size_t size) {
    text t = { buffer, size, 0 };
    if (size > 0)
        buffer[0] = 0;
    describe(&t, x);
    return t.length;
}

void tt_print(const tt_tensor *x, FILE *file) {
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
