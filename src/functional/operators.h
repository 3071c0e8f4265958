/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rows of this room's operators.def declare.
 */
#ifndef TU_FUNCTIONAL_OPERATORS_H
#define TU_FUNCTIONAL_OPERATORS_H

#include "tensor/operators.h"

/* What the gradients of all_gather_list and reduce_scatter_rows are. */
tt_tensor *tu_scatter_rows_back(tt_tensor *grad, tu_ints rows, tutti_group *group);
tt_tensor *tu_gather_rows_back(tt_tensor *grad, tu_ints rows, tutti_group *group);

/* Forms of this room's rows. The row defines the public function, which asks whether a collective may start here
 * before it runs: COLLECTIVE tt_name, COLLECTIVE_IN_PLACE tt_name_, COLLECTIVE_BOTH the two; COLLECTIVE_OUT tt_name,
 * which writes its first tensor and returns it; COLLECTIVE_EACH and COLLECTIVE_EACH_BOTH the same on lists. */
tt_tensor *tu_collective_new(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                             const void *attributes);
tt_tensor *tu_collective_in_place(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                                  const void *attributes);
tt_tensor *tu_collective_out(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                             const void *attributes);
tt_tensor_list tu_collective_each(const tu_operator *entry, tt_tensor_list list, const void *attributes);
tt_tensor_list tu_collective_each_in_place(const tu_operator *entry, tt_tensor_list list, const void *attributes);

#define TU_PRIVATE_COLLECTIVE(name, arguments)
#define TU_PRIVATE_COLLECTIVE_IN_PLACE(name, arguments)
#define TU_PRIVATE_COLLECTIVE_BOTH(name, arguments)
#define TU_PRIVATE_COLLECTIVE_OUT(name, arguments)
#define TU_PRIVATE_COLLECTIVE_EACH(name, arguments)
#define TU_PRIVATE_COLLECTIVE_EACH_BOTH(name, arguments)
#define TU_FLAGS_COLLECTIVE 0
#define TU_FLAGS_COLLECTIVE_IN_PLACE TU_HAS_IN_PLACE
#define TU_FLAGS_COLLECTIVE_BOTH TU_HAS_IN_PLACE
#define TU_FLAGS_COLLECTIVE_OUT TU_IMPURE
#define TU_FLAGS_COLLECTIVE_EACH TU_EACH_INPUT
#define TU_FLAGS_COLLECTIVE_EACH_BOTH (TU_EACH_INPUT | TU_HAS_IN_PLACE)
#define TU_PROTOTYPE_COLLECTIVE(name, arguments) TU_PROTOTYPE_PLAIN(name, arguments)
#define TU_PROTOTYPE_COLLECTIVE_IN_PLACE(name, arguments) TU_PROTOTYPE_IN_PLACE(name, arguments)
#define TU_PROTOTYPE_COLLECTIVE_BOTH(name, arguments) TU_PROTOTYPE_PLAIN(name, arguments)
#define TU_PROTOTYPE_COLLECTIVE_OUT(name, arguments) TU_PROTOTYPE_PLAIN(name, arguments)
#define TU_PROTOTYPE_COLLECTIVE_EACH(name, arguments) TU_PROTOTYPE_EACH(name, arguments)
#define TU_PROTOTYPE_COLLECTIVE_EACH_BOTH(name, arguments) TU_PROTOTYPE_EACH(name, arguments)
#define TU_FUNCTIONS_COLLECTIVE(name, arguments) TU_FUNCTION(tt_##name, tu_collective_new, name, arguments)
#define TU_FUNCTIONS_COLLECTIVE_IN_PLACE(name, arguments) \
    TU_FUNCTION(tt_##name##_, tu_collective_in_place, name, arguments)
#define TU_FUNCTIONS_COLLECTIVE_BOTH(name, arguments) \
    TU_FUNCTIONS_COLLECTIVE(name, arguments)          \
    TU_FUNCTIONS_COLLECTIVE_IN_PLACE(name, arguments)
#define TU_FUNCTIONS_COLLECTIVE_OUT(name, arguments) TU_FUNCTION(tt_##name, tu_collective_out, name, arguments)
#define TU_FUNCTIONS_COLLECTIVE_EACH(name, arguments) TU_FUNCTION_EACH(tt_##name, tu_collective_each, name, arguments)
#define TU_FUNCTIONS_COLLECTIVE_EACH_BOTH(name, arguments) \
    TU_FUNCTIONS_COLLECTIVE_EACH(name, arguments)          \
    TU_FUNCTION_EACH(tt_##name##_, tu_collective_each_in_place, name, arguments)

#define OPERATOR(form, name, family, summary, arguments, properties) TU_ROW_TYPES(form, name, arguments, properties)
#include "functional/operators.def"
#undef OPERATOR

#endif
