/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of this room's operators.def, as entries of the table.
 */
#include "functional/operators.h"

#include <tutti/functional.h>
#include <tutti/symmetric.h>

#define OPERATOR(form, name, family, summary, arguments, properties) \
    TU_ROW(form, name, family, summary, arguments, properties)
#include "functional/operators.def"
