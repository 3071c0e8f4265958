/* SPDX-License-Identifier: Apache-2.0
 *
 * The flight recorder from within: written on request and when an operation fails, and its counters.
 */
#include <tutti/trace.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/result.h"
#include "job/dump.h"
#include "job/liveness.h"
#include "world/world.h"

_Static_assert(TUTTI_COUNTER_ALGORITHMS == TU_COUNTER_ALGORITHMS, "the API shows all that the recorder counts");

static tutti_status check(const tutti_world *world) {
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK && world->job == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "a fake world records nothing");
    return status;
}

static const tu_recorder *own_recorder(const tutti_world *world) {
    return tu_job_recorder(world->job, tu_job_rank(world->job));
}

/* What the launchers know of this host's clock; NULL: nothing. */
static const tu_dump_clock *clock_of(const tutti_world *world, tu_dump_clock *clock) {
    return world->news != NULL && tu_news_clock(world->news, &clock->ahead_ns, &clock->error_ns) ? clock : NULL;
}

tutti_status tutti_trace_write(tutti_world *world, const char *folder) {
    tu_dump_clock clock;
    tutti_status status = check(world);
    if (status != TUTTI_OK)
        return status;
    if (folder == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "folder must not be NULL");
    return tu_dump_file(tu_job_page(world->job), tu_job_rank(world->job), own_recorder(world), clock_of(world, &clock),
                        folder);
}

tutti_status tutti_trace_text(tutti_world *world, char **text) {
    tutti_status status = check(world);
    if (status != TUTTI_OK)
        return status;
    if (text == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_trace_text: where the text goes is NULL");
    char *made = NULL;
    size_t bytes;
    tu_dump_clock clock;
    FILE *file = open_memstream(&made, &bytes);
    if (file == NULL)
        return tu_error_memory("a copy of a flight recorder", 0);
    status = tu_dump_write(tu_job_page(world->job), tu_job_rank(world->job), own_recorder(world),
                           clock_of(world, &clock), file);
    if (fclose(file) != 0 && status == TUTTI_OK)
        status = tu_error_memory("a copy of a flight recorder", bytes);
    if (status == TUTTI_OK)
        *text = made;
    else
        free(made);
    return status;
}

tutti_status tutti_trace_counters(tutti_world *world, const char *operation, tutti_counters *counters) {
    tutti_status status = check(world);
    if (status != TUTTI_OK)
        return status;
    tu_operation wanted = operation == NULL ? TU_OPERATION_NONE : tu_operation_find(operation);
    if (wanted == TU_OPERATION_NONE)
        return tu_error(TUTTI_ERROR_NOT_FOUND,
                        "there is no operation \"%s\": use a name of the API without \"tutti_\", like all_reduce",
                        operation == NULL ? "(NULL)" : operation);
    tu_counters counted;
    tu_recorder_counters(own_recorder(world), wanted, &counted);
    tutti_counters full = {
        .calls = counted.calls, .failures = counted.failures, .bytes = counted.bytes, .time_ns = counted.time_ns
    };
    memcpy(full.by_algorithm, counted.by_algorithm, sizeof full.by_algorithm);
    return tu_result_copy("tutti_counters", &full, sizeof full, counters);
}

void tu_trace_failure(tutti_world *world) {
    const char *folder = tu_settings_text(&world->settings, TU_SETTING_TRACE_DIR);
    if (folder[0] == '\0' || world->job == NULL)
        return;
    tutti_error_copy error;
    tu_dump_clock clock;
    tu_error_save(&error);
    /* One's own, and those of ranks that cannot write theirs any more. */
    for (int rank = 0; rank < tu_job_size(world->job); rank++) {
        if (rank != tu_job_rank(world->job) && tu_rank_state_of(world->job, rank) != TU_RANK_DEAD)
            continue;
        if (tu_dump_file(tu_job_page(world->job), rank, tu_job_recorder(world->job, rank), clock_of(world, &clock),
                         folder) != TUTTI_OK)
            TU_LOG(TUTTI_LOG_WARN, world->log, "world", "%s (TUTTI_TRACE_DIR)", tutti_error_message());
    }
    (void)tu_error_restore(&error);
}
