/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies that turn a matrix: what is dense along one dimension becomes dense along another. Squares of one cache line
 * by as many rows go through a buffer, so that every line of memory is read once and written once, whole, however far
 * the lines lie apart.
 */
#include <string.h>

#include "tensor/kernel/kernels.h"
#include "tensor/kernel/square.h"
#include "tensor/loop.h"
#include "tensor/parallel.h"

#define LINE 64      /* bytes */
#define BAND 32      /* squares side by side in the input, two kilobytes, which are read in one go */
#define STRETCH 1024 /* columns of a band that one thread takes at once */

typedef struct turn {
    const tu_loop *loop;
    int dense_dim;               /* in which the input is dense; the output is in the last one */
    int64_t rows, columns;       /* of the output's matrix: sizes of dense_dim and of the last dimension */
    int64_t to_row, from_column; /* bytes between its rows in the output, and between its columns in the input */
    int64_t bands;               /* of BAND squares in one matrix */
    int64_t stretches;           /* in one band */
    size_t size;                 /* of an element */
    const tu_tensor_kernels *kernels;
    bool stream; /* the output is large and its lines are aligned */
} turn;

/* ---- one square, from lines of the input to lines of the output, both dense in their buffers ---- */

#define SQUARE(type)                                                      \
    for (int i = 0; i < LINE / (int)sizeof(type); i++)                    \
        for (int j = 0; j < LINE / (int)sizeof(type); j++)                \
            ((type *)to)[i * (LINE / (int)sizeof(type)) + j] =            \
                ((const type *)from)[j * (LINE / (int)sizeof(type)) + i]; \
    return

typedef struct sixteen {
    uint64_t low, high;
} sixteen;

/* Lines of the input are `line` numbers apart, those of the output `apart`; four lines are used up before the next, so
 * that lines that fall into one set of the cache do not drive each other out. */
static void square_32(const int32_t *from, int64_t line, int32_t *to, int64_t apart) {
    for (int j = 0; j < 16; j += 4)
        for (int i = 0; i < 16; i += 4)
            tu_turn_square(from + j * line + i, line, to + i * apart + j, apart);
}

static void square(const void *from, void *to, size_t size) {
    switch (size) {
    case 1:
        SQUARE(uint8_t);
    case 2:
        SQUARE(uint16_t);
    case 4:
        square_32(from, 16, to, 16);
        return;
    case 8:
        SQUARE(uint64_t);
    default:
        SQUARE(sixteen);
    }
}

/* ---- a band of squares ---- */

/* `count` bytes; whole lines, which are most, are told apart so that they are moved by registers. */
static inline void move_line(char *to, const char *from, int64_t count) {
    if (count == LINE)
        memcpy(to, from, LINE);
    else
        memcpy(to, from, (size_t)count);
}

/* The square whose corner is at row `first` and column `column` of the output. */
static void turn_square(const turn *job, const char *from, char *to, int64_t first, int64_t column) {
    _Alignas(LINE) char lines[LINE * LINE], turned[LINE * LINE];
    int64_t side = LINE / (int64_t)job->size, size = (int64_t)job->size;
    int64_t rows = job->rows - first < side ? job->rows - first : side;
    int64_t columns = job->columns - column < side ? job->columns - column : side;
    const char *corner = from + first * size + column * job->from_column;
    char *target = to + first * job->to_row + column * size;
    for (int64_t j = 0; j < columns; j++) {
        __builtin_prefetch(corner + (j + side) * job->from_column); /* of the next column of squares */
        move_line(lines + j * LINE, corner + j * job->from_column, rows * size);
    }
    square(lines, turned, job->size);
    for (int64_t i = 0; i < rows; i++) {
        if (job->stream && columns == side)
            tu_stream_copy(target + i * job->to_row, turned + i * LINE, LINE);
        else
            move_line(target + i * job->to_row, turned + i * LINE, columns * size);
    }
}

/* A strip of whole squares of 32-bit numbers, one beside the other in the output, turned in registers. What is read
 * AHEAD lines later is asked for: near the end of the band, rows [begin, end), the first lines of the next strip. */
#define STRIP 4 /* squares */
#define AHEAD 4 /* lines */
static void turn_strip_32(const turn *job, const char *from, char *to, int64_t first, int64_t column, int64_t begin,
                          int64_t end) {
    enum {
        SIDE = LINE / 4
    };
    const char *corner = from + first * 4 + column * job->from_column, *soon = corner + AHEAD * LINE;
    if (first + AHEAD * SIDE >= end)
        soon = from + (begin + first + AHEAD * SIDE - end) * 4 + (column + STRIP * SIDE) * job->from_column;
    job->kernels->turn(corner, job->from_column / 4, soon, to + first * job->to_row + column * 4, job->to_row / 4,
                       STRIP, job->stream);
}

/* A stretch of a band: squares that are neighbours in the input first, so that its memory is read in one go, and then
 * the next columns. */
static void turn_stretch(const turn *job, const char *from, char *to, int64_t first, int64_t column) {
    int64_t side = LINE / (int64_t)job->size, end = first + BAND * side < job->rows ? first + BAND * side : job->rows;
    int64_t last = column + STRETCH < job->columns ? column + STRETCH : job->columns;
    for (; job->size == 4 && column + STRIP * side <= last; column += STRIP * side) {
        int64_t row = first;
        for (; row + side <= end; row += side)
            turn_strip_32(job, from, to, row, column, first, end);
        for (int64_t square = 0; row < end && square < STRIP; square++)
            turn_square(job, from, to, row, column + square * side);
    }
    for (; column < last; column += side)
        for (int64_t row = first; row < end; row += side)
            turn_square(job, from, to, row, column);
}

/* Stretches [begin, end) of all bands of all matrices in a row. */
static void turn_stretches(void *context, int64_t begin, int64_t end) {
    const turn *job = context;
    const tu_loop *loop = job->loop;
    for (int64_t each = begin; each < end; each++) {
        int64_t band = each / job->stretches, rest = band / job->bands, of_to = 0, of_from = 0;
        for (int dim = loop->ndim - 2; dim >= 0; dim--) {
            if (dim == job->dense_dim)
                continue;
            of_to += rest % loop->sizes[dim] * loop->at[0].strides[dim];
            of_from += rest % loop->sizes[dim] * loop->at[1].strides[dim];
            rest /= loop->sizes[dim];
        }
        turn_stretch(job, loop->at[1].data + of_from * (int64_t)job->size,
                     loop->at[0].data + of_to * (int64_t)job->size,
                     band % job->bands * (BAND * LINE / (int64_t)job->size), each % job->stretches * STRETCH);
    }
    if (job->stream)
        tu_stream_end();
}

/* The dimension in which the input is dense while the output is dense in the last one; -1 where it is not so. */
static int turned_dim(const tu_loop *loop) {
    int last = loop->ndim - 1;
    if (loop->at[0].dtype != loop->at[1].dtype || loop->at[0].strides[last] != 1 || loop->at[1].strides[last] <= 1 ||
        loop->sizes[last] < 4)
        return -1;
    for (int dim = 0; dim < last; dim++)
        if (loop->at[1].strides[dim] == 1 && loop->sizes[dim] >= 4)
            return dim;
    return -1;
}

bool tu_copy_turned(const tu_loop *loop) {
    int dim = turned_dim(loop), last = loop->ndim - 1;
    if (dim < 0)
        return false;
    size_t size = tu_dtype_bytes[loop->at[0].dtype];
    int64_t side = LINE / (int64_t)size;
    turn job = { loop,
                 dim,
                 loop->sizes[dim],
                 loop->sizes[last],
                 loop->at[0].strides[dim] * (int64_t)size,
                 loop->at[1].strides[last] * (int64_t)size,
                 (loop->sizes[dim] + BAND * side - 1) / (BAND * side),
                 (loop->sizes[last] + STRETCH - 1) / STRETCH,
                 size,
                 tu_tensor_kernels_get() };
    int64_t matrices = 1;
    for (int i = 0; i < last; i++)
        matrices *= i == dim ? 1 : loop->sizes[i];
    bool aligned = ((uintptr_t)loop->at[0].data | (uintptr_t)job.to_row) % LINE == 0;
    for (int i = 0; i < last; i++)
        aligned = aligned && loop->at[0].strides[i] * (int64_t)size % LINE == 0;
    job.stream = aligned && (size_t)(matrices * job.rows * job.columns) * size >= TU_STREAM_BYTES;
    int64_t each = BAND * side * (job.columns < STRETCH ? job.columns : STRETCH); /* elements of a stretch, at most */
    tu_parallel(matrices * job.bands * job.stretches, 1 + 32768 / each, turn_stretches, &job);
    return true;
}
