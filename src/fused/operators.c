/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of this room's operators.def, as entries of the table.
 */
#include "fused/operators.h"

#include <tutti/fused.h>

#define OPERATOR(form, name, family, summary, arguments, properties) \
    TU_ROW(form, name, family, summary, arguments, properties)
#include "fused/operators.def"
