/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens from a mapped file. A row is a window of the file; which window stands at which place of an epoch is a
 * permutation that is computed, not stored: a Feistel network over the next power of four, walked until it falls into
 * the range.
 */
#include <tutti/data.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tensor/create.h"
#include "tensor/operators.h"

struct tt_tokens {
    tt_tokens_options options;
    const char *data; /* the mapping */
    size_t bytes;
    int64_t count, window_count, batch_count;
};

/* ---- the order ---- */

/* The finalizer of splitmix64: every bit of the result depends on every bit of x. */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t scramble(uint64_t key, int half_bits, uint64_t x) {
    uint64_t mask = (UINT64_C(1) << half_bits) - 1, left = x >> half_bits, right = x & mask;
    for (uint64_t i = 0; i < 6; i++) {
        uint64_t next = left ^ (mix(key + (i + 1) * UINT64_C(0x9e3779b97f4a7c15) + right) & mask);
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

static int64_t window_at(const tt_tokens *tokens, int64_t epoch, int64_t place) {
    if (tokens->options.in_order)
        return place;
    uint64_t count = (uint64_t)tokens->window_count, at = (uint64_t)place;
    uint64_t key = mix(mix(tokens->options.seed + UINT64_C(0x9e3779b97f4a7c15)) + (uint64_t)epoch);
    int half_bits = 1;
    while (half_bits < 31 && UINT64_C(1) << 2 * half_bits < count)
        half_bits++;
    do
        at = scramble(key, half_bits, at);
    while (at >= count);
    return (int64_t)at;
}

/* ---- opening ---- */

static tutti_status take_options(const tt_tokens_options *options, tt_tokens_options *full) {
    *full = (tt_tokens_options)TT_TOKENS_OPTIONS_INIT;
    tutti_status status = tu_options_copy("tt_tokens_options", options, full, sizeof *full);
    if (status != TUTTI_OK)
        return status;
    full->dtype = full->dtype != 0 ? full->dtype : TUTTI_U16;
    full->length = full->length != 0 ? full->length : 1024;
    full->batch = full->batch != 0 ? full->batch : 1;
    full->rank_count = full->rank_count != 0 ? full->rank_count : 1;
    if (!tu_is_integer(full->dtype))
        return tu_error(TUTTI_ERROR_TYPE, "tt_tokens_options.dtype is %s and must be an integer type",
                        tutti_dtype_name(full->dtype));
    const int64_t most = INT64_C(1) << 31;
    if (full->length < 1 || full->length > most || full->batch < 1 || full->batch > most || full->header_bytes < 0)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "tt_tokens_options: length %lld, batch %lld and header_bytes %lld must not be negative, nor the "
            "first two above 2^31",
            (long long)full->length, (long long)full->batch, (long long)full->header_bytes);
    if (full->rank_count < 1 || full->rank < 0 || full->rank >= full->rank_count)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_tokens_options: there is no rank %d of %d", full->rank,
                        full->rank_count);
    return TUTTI_OK;
}

static tutti_status map_file(const char *path, tt_tokens *tokens) {
    struct stat about;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 && errno == ENOENT)
        return tu_error(TUTTI_ERROR_NOT_FOUND, "tokens_open: there is no file %s", path);
    if (descriptor < 0)
        return tu_error_system(errno, "tokens_open: %s", path);
    tutti_status status = TUTTI_OK;
    void *data = MAP_FAILED;
    if (fstat(descriptor, &about) != 0)
        status = tu_error_system(errno, "tokens_open: %s: fstat", path);
    else if (!S_ISREG(about.st_mode) || about.st_size == 0)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tokens_open: %s is %s", path,
                          S_ISREG(about.st_mode) ? "empty" : "no regular file");
    else if ((data = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, descriptor, 0)) == MAP_FAILED)
        status = tu_error_system(errno, "tokens_open: %s: mmap of %lld bytes", path, (long long)about.st_size);
    close(descriptor);
    if (status == TUTTI_OK) {
        tokens->data = data;
        tokens->bytes = (size_t)about.st_size;
    }
    return status;
}

static tutti_status divide(const char *path, tt_tokens *tokens) {
    const tt_tokens_options *options = &tokens->options;
    int64_t bytes = (int64_t)tokens->bytes - options->header_bytes, width = tu_dtype_bytes[options->dtype];
    if (bytes < 0 || bytes % width != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tokens_open: %s has %zu bytes: without a header of %lld that is no whole number of tokens of "
                        "type %s. Is dtype or header_bytes another?",
                        path, tokens->bytes, (long long)options->header_bytes, tutti_dtype_name(options->dtype));
    tokens->count = bytes / width;
    tokens->window_count = tokens->count > 0 ? (tokens->count - 1) / options->length : 0;
    tokens->batch_count = tokens->window_count / options->batch / options->rank_count;
    if (tokens->batch_count == 0)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "tokens_open: %s has %lld tokens, too few for one batch: %d ranks times %lld rows of %lld tokens, "
            "and one",
            path, (long long)tokens->count, options->rank_count, (long long)options->batch, (long long)options->length);
    return TUTTI_OK;
}

tt_tokens *tt_tokens_open(const char *path, const tt_tokens_options *options) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (path == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "tokens_open: path is NULL");
        return NULL;
    }
    tt_tokens *tokens = calloc(1, sizeof *tokens);
    if (tokens == NULL) {
        tu_pending_take(tu_error_memory("tokens", sizeof *tokens));
        return NULL;
    }
    tutti_status status = take_options(options, &tokens->options);
    if (status == TUTTI_OK)
        status = map_file(path, tokens);
    if (status == TUTTI_OK)
        status = divide(path, tokens);
    if (tu_pending_take(status) == TUTTI_OK)
        return tokens;
    tt_tokens_close(tokens);
    return NULL;
}

void tt_tokens_close(tt_tokens *tokens) {
    if (tokens == NULL)
        return;
    if (tokens->data != NULL)
        munmap((void *)tokens->data, tokens->bytes);
    free(tokens);
}

int64_t tt_tokens_count(const tt_tokens *tokens) {
    return tokens != NULL ? tokens->count : 0;
}

int64_t tt_tokens_batches(const tt_tokens *tokens) {
    return tokens != NULL ? tokens->batch_count : 0;
}

/* ---- batches ---- */

/* `length` tokens from `first` on, of every row. */
static tutti_status fill(const tt_tokens *tokens, int64_t step, int64_t first, int64_t *out) {
    const tt_tokens_options *options = &tokens->options;
    size_t width = tu_dtype_bytes[options->dtype];
    int64_t epoch = step / tokens->batch_count, batch = step % tokens->batch_count;
    int64_t place = (batch * options->rank_count + options->rank) * options->batch;
    tutti_status status = TUTTI_OK;
    for (int64_t i = 0; i < options->batch && status == TUTTI_OK; i++) {
        int64_t begin = window_at(tokens, epoch, place + i) * options->length + first;
        const char *from = tokens->data + options->header_bytes + (size_t)begin * width;
        status = tutti_convert(from, options->dtype, out + i * options->length, TUTTI_I64, (size_t)options->length);
    }
    return status;
}

bool tt_tokens_batch(const tt_tokens *tokens, int64_t step, tt_tensor **inputs, tt_tensor **targets) {
    if (inputs == NULL || targets == NULL) {
        tt_error_set(TUTTI_ERROR_ARGUMENT, "tokens_batch: inputs or targets is NULL");
        return false;
    }
    *inputs = *targets = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (tokens == NULL || step < 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                tokens == NULL ? "tokens_batch: tokens is NULL" : "tokens_batch: step is negative");
        return false;
    }
    tt_dims shape = tt_shape(tokens->options.batch, tokens->options.length);
    tt_tensor *x = tt_empty(shape, TUTTI_I64, TU_OF_HOST), *y = tt_empty(shape, TUTTI_I64, TU_OF_HOST);
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(fill(tokens, step, 0, tu_pointer(x))) != TUTTI_OK ||
        tu_pending_take(fill(tokens, step, 1, tu_pointer(y))) != TUTTI_OK)
        return false;
    *inputs = x;
    *targets = y;
    return true;
}
