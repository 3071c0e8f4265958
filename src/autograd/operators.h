/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rows of this room's operators.def declare.
 */
#ifndef TU_AUTOGRAD_OPERATORS_H
#define TU_AUTOGRAD_OPERATORS_H

#include "tensor/operators.h"

#define OPERATOR(form, name, family, summary, arguments, properties) TU_ROW_TYPES(form, name, arguments, properties)
#include "autograd/operators.def"
#undef OPERATOR

#endif
