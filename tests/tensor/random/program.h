/* SPDX-License-Identifier: Apache-2.0
 *
 * Random programs of tensors: a program is made from a seed, printed as text, run, checked and made smaller.
 *
 * A program is a list of lines. A line names a row of rows.def and its arguments: results of earlier lines, numbers,
 * lists of sizes. Line 7 puts its results into t7, t7.1, t7.2. A line whose arguments are missing, because their line
 * was refused or taken away, does nothing; so every part of a program is a program, and making one smaller is leaving
 * lines out.
 *
 * What a run gives is a list of records: of every line whether it was refused, then values, versions, what hooks saw,
 * gradients and second derivatives. Two runs are compared record by record: with PyTorch (random_torch_peer.py reads
 * the text), with other instruction sets, with shapes on meta tensors. Finite differences read the gradients.
 */
#ifndef TUTTI_TESTS_RANDOM_PROGRAM_H
#define TUTTI_TESTS_RANDOM_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

enum {
    LINES = 64,    /* of one program, at most */
    RESULTS = 3,   /* of one line */
    ARGUMENTS = 4, /* tensors of one line */
    RECORDS = 640,
    ELEMENTS = 4096 /* of one tensor that is recorded */
};

/* ---- lines ---- */

/* What a program is for. PEER programs hold everything and are compared with PyTorch. SMOOTH ones compute in f64 from
 * numbers without ties, and without hooks and detached values, so that differences tell the gradient. */
typedef enum flavour {
    PEER,
    SMOOTH
} flavour;

typedef struct line line;
typedef struct machine machine;
typedef struct writer writer;

/* A row of rows.def. The letters of `arguments`: t tensor, o tensor or none, l the other tensors, i integer, d sizes,
 * f number, y dtype. */
typedef struct row {
    const char *name, *arguments;
    int weight;         /* how often, beside others */
    bool smooth;        /* may stand in SMOOTH programs */
    const char *covers; /* the operator of the table that it calls; NULL: none */
    bool (*make)(writer *to, line *made);
    void (*run)(machine *on, const line *what, tt_tensor **results);
} row;
extern const row random_rows[];
extern const int random_row_count;

struct line {
    const row *row;
    bool gone; /* left out */
    int tensor_count;
    int tensors[ARGUMENTS]; /* RESULTS * line + result; -1: none */
    int64_t ints[8];
    tt_dims dims[2];
    double numbers[2];
    tutti_dtype dtype;
};

typedef struct program {
    uint64_t seed;
    flavour flavour;
    int count;
    line lines[LINES];
} program;

void program_print(const program *what, FILE *to);

/* ---- runs ---- */

typedef struct record {
    char name[32];
    bool refused, absent;
    char message[160]; /* of a refusal */
    tutti_dtype dtype;
    tt_dims sizes, strides;
    bool requires_grad, leaf;
    int64_t version;
    int64_t count;
    double *values; /* complex ones as pairs; NULL where the device has none */
} record;

typedef struct report {
    int count;
    record records[RECORDS];
    bool ordered; /* results depend on the order in which elements are written */
} report;

void report_free(report *what);

/* How a program is run. */
typedef struct setting {
    tutti_device device;
    int moved_line;        /* this leaf ... */
    int64_t moved_element; /* ... is moved here ... */
    double moved_by;       /* ... by that; 0: none */
    bool values_only;      /* without gradients */
} setting;

struct machine {
    report *report;
    const program *program;
    setting setting;
    tt_tensor *tensors[LINES * RESULTS];
    int current; /* the line that runs */
    bool muted;  /* hooks note nothing */
    int log_count;
    double log[512]; /* pairs: which hook, the sum that it saw */
};

/* Runs it in a scope of its own and appends what came out to an empty report. Returns false where tensors,
 * nodes or scopes are left over. */
bool program_run(const program *what, const setting *how, report *to);

/* Values of leaves: of an element, from the seed of its line. */
double random_value(int64_t seed, int64_t element, int64_t kind, int64_t limit);
enum {
    KIND_LATTICE,  /* multiples of 1/4 from -2 to 2: ties and zeros */
    KIND_REAL,     /* between -1.85 and 1.85, away from 0 */
    KIND_POSITIVE, /* from 0.5 to 2 */
    KIND_INDEX     /* whole numbers below the limit */
};

/* ---- making ---- */

/* Made by running it: the arguments of a line depend on the shapes of what is there. */
void program_make(uint64_t seed, flavour which, program *made);

/* ---- checking ---- */

/* Whether a program fails a check; the reason is written to `why`. */
typedef bool program_fails(const program *what, void *context, char *why, size_t size);

bool fails_by_differences(const program *what, void *context, char *why, size_t size);
bool fails_on_levels(const program *what, void *context, char *why, size_t size);
/* How many programs ran on a device, and of how many the numbers may be rounded otherwise there. */
typedef struct device_count {
    tutti_device device;
    long compared, rounded;
} device_count;
bool fails_on_device(const program *what, void *context, char *why, size_t size); /* context: device_count */
bool fails_on_meta(const program *what, void *context, char *why, size_t size);
/* The context is a peer. */
bool fails_against_peer(const program *what, void *context, char *why, size_t size);

typedef struct peer {
    FILE *to, *from;
    long refused, backwards, compared;
} peer;

/* Leaves lines out as long as it still fails; `why` becomes the reason of what is left. */
void program_shrink(program *what, program_fails *fails, void *context, char *why, size_t size);

#endif
