/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens from a file, for training, and a line that tells how far it is.
 *
 *     tt_tokens *tokens = tt_tokens_open("text.bin", TUTTI_OPTIONS(tt_tokens_options, .length = 256, .batch = 8,
 *                                                                  .rank = rank, .rank_count = ranks));
 *     tt_progress *progress = tt_progress_new(TUTTI_OPTIONS(tt_progress_options, .steps = 1000));
 *     for (int64_t step = 0; step < 1000; step++) {
 *         tt_tokens_batch(tokens, step, &inputs, &targets);
 *         …
 *         tt_progress_step(progress, tt_item(loss), 8 * 256);
 *     }
 *     tt_progress_end(progress);
 *     tt_tokens_close(tokens);
 */
#ifndef TUTTI_DATA_H
#define TUTTI_DATA_H

#include <stdio.h>

#include <tutti/tensor.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- tokens ---- */

/* A file of tokens, one behind the other in the byte order of the machine, mapped into memory: opening it reads
 * nothing, and what is not used takes no memory. It must not become shorter while it is open. */
typedef struct tt_tokens tt_tokens;

typedef struct tt_tokens_options {
    size_t size;
    tutti_dtype dtype;    /* of a token in the file, an integer type; 0: TUTTI_U16 */
    int64_t header_bytes; /* at the start of the file, which are left out */
    int64_t length;       /* tokens in a row; 0: 1024 */
    int64_t batch;        /* rows of one rank in a batch; 0: 1 */
    uint64_t seed;        /* of the order */
    bool in_order;        /* rows follow each other as in the file, in every epoch */
    int rank;             /* this rank, of rank_count */
    int rank_count;       /* 0: 1 */
} tt_tokens_options;
#define TT_TOKENS_OPTIONS_INIT TUTTI_DEFAULTS(tt_tokens_options)
/* TT_TOKENS_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_tokens_options_init(tt_tokens_options *options, size_t size);

/* Opens a file of tokens. NULL with the error pending; too few tokens for one batch of all ranks are an error. */
TUTTI_API tt_tokens *tt_tokens_open(const char *path, const tt_tokens_options *options);
/* Closes it. NULL is allowed. */
TUTTI_API void tt_tokens_close(tt_tokens *tokens);
/* How many tokens the file holds; 0 for NULL. */
TUTTI_API int64_t tt_tokens_count(const tt_tokens *tokens);
/* How many batches make an epoch, in which no row comes twice, on no rank; what is left over is left out. 0 for NULL.
 */
TUTTI_API int64_t tt_tokens_batches(const tt_tokens *tokens);
/* The batch of a step, counted from 0 over all epochs: inputs and targets (batch, length) of i64, the targets one token
 * further on. The order is a function of seed, epoch, and place, the same on every machine, and other in each epoch; so
 * a run that is resumed needs no state of the data but its number of steps. */
TUTTI_API bool tt_tokens_batch(const tt_tokens *tokens, int64_t step, tt_tensor **inputs, tt_tensor **targets);

/* ---- progress ---- */

/* On a terminal one line that is written over: step, loss, tokens per second, which share of the time was spent waiting
 * for other ranks, time left. Elsewhere one line at the end. */
typedef struct tt_progress tt_progress;

typedef struct tt_progress_options {
    size_t size;
    int64_t steps;      /* of the whole run; 0: not known, and no time left is told */
    int64_t done;       /* steps that an earlier part of the run has made */
    FILE *file;         /* NULL: stderr */
    tutti_world *world; /* whose collectives are waited for (tt_waited_ns); NULL: no share is told */
} tt_progress_options;
#define TT_PROGRESS_OPTIONS_INIT TUTTI_DEFAULTS(tt_progress_options)
/* TT_PROGRESS_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_progress_options_init(tt_progress_options *options, size_t size);

/* Begins; time counts from here. NULL with the error pending. */
TUTTI_API tt_progress *tt_progress_new(const tt_progress_options *options);
/* After a step: its loss, and how many tokens it has seen, on all ranks if that is to be told. The line is written ten
 * times a second at most. Works also with an error pending; NULL is allowed. */
TUTTI_API void tt_progress_step(tt_progress *progress, double loss, int64_t tokens);
/* Writes the last line and ends it. Works also with an error pending; NULL is allowed. */
TUTTI_API void tt_progress_end(tt_progress *progress);

#ifdef __cplusplus
}
#endif
#endif
