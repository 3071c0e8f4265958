/* SPDX-License-Identifier: Apache-2.0
 *
 * How the arguments of lines are made: one function per sort of row. Each fills a line whose row is set and returns
 * false where nothing fits. Mostly the arguments are good ones; a few are not, since refusals are compared too.
 */
#ifndef TUTTI_TESTS_RANDOM_MAKE_H
#define TUTTI_TESTS_RANDOM_MAKE_H

#include "program.h"

/* Runs one line of the machine's program. */
void machine_step(machine *on, int index);

#define MAKER(name) bool name(writer *to, line *made)
MAKER(make_nothing);
MAKER(make_any);
MAKER(make_floats);
MAKER(make_complex);
MAKER(make_pairs);
MAKER(make_positive);
MAKER(make_binary);
MAKER(make_into);
MAKER(make_alike);
MAKER(make_power);
MAKER(make_number);
MAKER(make_exponent);
MAKER(make_bounds);
MAKER(make_where);
MAKER(make_masked);
MAKER(make_dim);
MAKER(make_new_dim);
MAKER(make_two_dims);
MAKER(make_narrow);
MAKER(make_select);
MAKER(make_slice);
MAKER(make_permute);
MAKER(make_expand);
MAKER(make_reshape);
MAKER(make_as_strided);
MAKER(make_split);
MAKER(make_chunk);
MAKER(make_to);
MAKER(make_reduce);
MAKER(make_arg);
MAKER(make_sum_to);
MAKER(make_cat);
MAKER(make_stack);
MAKER(make_index_select);
MAKER(make_index_add);
MAKER(make_gather);
MAKER(make_scatter);
MAKER(make_embedding);
MAKER(make_diagonal);
MAKER(make_matmul);
MAKER(make_linear);
MAKER(make_int_matmul);
MAKER(make_norm);
MAKER(make_attention);
MAKER(make_rope);
MAKER(make_cross_entropy);
MAKER(make_history);
MAKER(make_leaf_hook);
MAKER(make_backward);
#undef MAKER

#endif
