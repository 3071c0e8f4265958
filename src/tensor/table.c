/* SPDX-License-Identifier: Apache-2.0
 *
 * The operator table. Every room puts pointers to its rows into one section of the library, and the linker joins them.
 */
#include <string.h>

#include "base/result.h"
#include "tensor/operator.h"

extern const tu_operator *const __start_tu_operators[] __attribute__((visibility("hidden")));
extern const tu_operator *const __stop_tu_operators[] __attribute__((visibility("hidden")));

int tu_table_count(void) {
    // cppcheck-suppress comparePointers // two ends of one section, which the linker names
    return (int)(__stop_tu_operators - __start_tu_operators);
}

const tu_operator *tu_table_at(int index) {
    return __start_tu_operators[index];
}

const char *tu_argument_name(const tu_operator *entry, int input) {
    for (int i = 0; i < entry->argument_count; i++) {
        tt_argument_type type = entry->arguments[i].type;
        if (type == TT_ARGUMENT_TENSORS || (type == TT_ARGUMENT_TENSOR && input-- == 0))
            return entry->arguments[i].name;
    }
    return "input";
}

int tt_operator_count(void) {
    return tu_table_count();
}

static tutti_status row_at(const char *who, int index, const tu_operator **entry) {
    if (index < 0 || index >= tu_table_count())
        return tu_error(TUTTI_ERROR_RANGE, "%s: index %d must be in [0, %d)", who, index, tu_table_count());
    *entry = tu_table_at(index);
    return TUTTI_OK;
}

tutti_status tt_operator_at(int index, tt_operator_info *info) {
    const tu_operator *entry = NULL;
    tutti_status status = row_at("operator_at", index, &entry);
    if (status != TUTTI_OK)
        return status;
    tt_operator_info full = {
        .name = entry->name,
        .family = entry->family,
        .summary = entry->summary,
        .prototype = entry->prototype,
        .dtypes = entry->dtypes,
        .expression = entry->expression,
        .argument_count = entry->argument_count,
        .result_count = entry->flags & TU_EACH_INPUT ? TUTTI_NONE : entry->results,
        .saved_count = entry->saved,
        .in_place = (entry->flags & TU_HAS_IN_PLACE) != 0,
        .view = (entry->flags & TU_VIEW) != 0,
        .differentiable = entry->gradient != NULL || (entry->flags & TU_COMPOSITE) != 0,
        .pure = !(entry->flags & TU_IMPURE) && entry->written == 0,
        .composite = (entry->flags & TU_COMPOSITE) != 0,
        .differs = entry->differs,
    };
    return tu_result_copy("tt_operator_info", &full, sizeof full, info);
}

tutti_status tt_operator_argument_at(int index, int argument, tt_argument_info *info) {
    const tu_operator *entry = NULL;
    tutti_status status = row_at("operator_argument_at", index, &entry);
    if (status != TUTTI_OK)
        return status;
    if (argument < 0 || argument >= entry->argument_count)
        return tu_error(TUTTI_ERROR_RANGE, "operator_argument_at: %s has arguments 0 to %d, not %d", entry->name,
                        entry->argument_count - 1, argument);
    const tu_argument *at = &entry->arguments[argument];
    tt_argument_info full = { .name = at->name,
                              .type = at->type,
                              .optional = at->optional,
                              .written = at->written,
                              .declaration = at->declaration };
    return tu_result_copy("tt_argument_info", &full, sizeof full, info);
}
