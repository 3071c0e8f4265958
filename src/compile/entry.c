/* SPDX-License-Identifier: Apache-2.0
 *
 * Entries: counted, since nodes and calls under way outlive the function's list.
 */
#include "compile/entry.h"

#include <stdlib.h>

#include "compile/compare.h"

tu_entry *tu_entry_hold(tu_entry *entry) {
    atomic_fetch_add_explicit(&entry->references, 1, memory_order_relaxed);
    return entry;
}

void tu_entry_drop(tu_entry *entry) {
    if (entry == NULL || atomic_fetch_sub_explicit(&entry->references, 1, memory_order_acq_rel) != 1)
        return;
    tu_replay_end(entry->replay);
    tu_program_release(entry->run_forward);
    tu_program_release(entry->run_backward);
    tu_comparison_end(entry->compare_forward);
    tu_comparison_end(entry->compare_backward);
    tt_graph_release(&entry->forward);
    tt_graph_release(&entry->backward);
    tt_graph_release(&entry->whole_backward);
    for (tu_partial *partial = entry->partials, *next; partial != NULL; partial = next) {
        next = partial->next;
        tu_program_release(partial->program);
        tt_graph_release(&partial->graph);
        free(partial);
    }
    free((char *)entry->how.skip);
    free((char *)entry->how.with);
    free((char *)entry->how.folder);
    pthread_mutex_destroy(&entry->lock);
    tu_pattern_end(entry->pattern);
    tu_guards_end(&entry->guards);
    tu_captured_end(&entry->captured);
    free(entry->sources);
    free(entry->why_eager);
    free(entry);
}
