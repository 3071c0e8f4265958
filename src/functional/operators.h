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

#define OPERATOR(form, name, family, summary, arguments, properties) TU_ROW_TYPES(form, name, arguments, properties)
#include "functional/operators.def"
#undef OPERATOR

#endif
