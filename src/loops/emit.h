/* SPDX-License-Identifier: Apache-2.0
 *
 * The text of compiled loops: the expressions are the operators' own, from their rows, so that what is compiled and
 * what is called compute the same.
 */
#ifndef TU_LOOPS_EMIT_H
#define TU_LOOPS_EMIT_H

#include "loops/nest.h"

/* Whether the line's operator can be written as code. */
bool tu_emit_knows(const tu_nest *nest, const tu_line *line);

/* Puts a nest's lines in a good order and finds its stages; they have no functions yet. */
tutti_status tu_nest_find_stages(tu_nest *nest);

/* ---- C (emit_c.c) ---- */

/* Every file has this word, by which a loaded one is known, and this form of functions. */
#define TU_EMIT_MARK "tutti_loops"
#define TU_EMIT_FORMAT "2"
/* All stages of these nests as C, for the level whose headers are in the file `lanes`. Functions are named by
 * tu_emit_name. */
void tu_emit_c(FILE *to, tu_nest *const *nests, int nest_count, const char *lanes);
void tu_emit_name(char *name, size_t size, const tu_nest *nest, int stage);

/* ---- CUDA C (emit_cuda.c) ---- */

/* How one nest is launched: a kernel of its name, for long rows a second one. */
typedef struct tu_emitted {
    int kernel;                  /* number of the first nest whose kernel is the same */
    int64_t blocks, more_blocks; /* of TU_EMIT_THREADS threads; more_blocks: of the second kernel, 0: there is none */
    size_t scratch;              /* bytes of device memory, given behind the tensors */
} tu_emitted;
#define TU_EMIT_THREADS 256
/* Whether the nest can be written so. */
bool tu_emit_cuda_knows(const tu_nest *nest);
/* A kernel for each nest, named by tu_emit_cuda_name, in a text that includes nothing. `emitted` has one for each. */
void tu_emit_cuda(FILE *to, tu_nest *const *nests, int nest_count, tu_emitted *emitted);
void tu_emit_cuda_name(char *name, size_t size, int kernel, bool second);

/* ---- shorter lines of CUDA C (emit_shorter.c) ---- */

/* Of a line that widens what an earlier one narrowed from f32 to bf16: that line; else NULL. */
const tu_line *tu_emit_narrowing(const tu_nest *nest, const tu_line *line);
/* Whether a slot of f32 has numbers of bf16: what was widened from it, and that times a power of two. */
bool tu_emit_is_near(const tu_nest *nest, int slot);
/* Writes a line in a shorter form; false where there is none. */
bool tu_emit_shorter(FILE *to, const tu_nest *nest, const tu_line *line);

/* ---- shared by targets (emit.c) ---- */

/* "f32", "i64"; and the type of one element in C. */
const char *tu_emit_suffix(tutti_dtype dtype);
const char *tu_emit_type(tutti_dtype dtype);
/* The definitions of all operators in these nests. */
void tu_emit_operators(FILE *to, tu_nest *const *nests, int nest_count);
/* A number that a slot of a compute type is everywhere. */
void tu_emit_number(FILE *to, const tu_slot *slot);
/* What these slots are, as expressions over what the lines read. */
void tu_emit_comment(FILE *to, const tu_nest *nest, int first, int end, const int *slots, int slot_count);
/* "const vec_f32 v3 = tanh_f32(v2);", one operator's. */
void tu_emit_line(FILE *to, const tu_nest *nest, const tu_line *line);
/* "const vec_f32 v3 = tanh_f32(v2);" for each line of a stage; operands are v<slot>. */
void tu_emit_lines(FILE *to, const tu_nest *nest, const tu_stage *stage, const char *indent);

#endif
