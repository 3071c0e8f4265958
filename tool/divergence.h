/* SPDX-License-Identifier: Apache-2.0
 *
 * What is found where ranks went apart: in the operations that all members of a group call alike (divergence.c), and in
 * its messages (messages.c).
 */
#ifndef TUTTI_TOOL_DIVERGENCE_H
#define TUTTI_TOOL_DIVERGENCE_H

#include "flight.h"

typedef struct finding {
    int64_t at_ns; /* when the first rank called it */
    char text[1600];
} finding;

void finding_append(finding *found, const char *format, ...) TUTTI_PRINTF(2, 3);

/* Whether the rank has been held up in an operation, or was until it gave up. */
bool finding_held_up(const flight *by, const tu_record_view *entry);

/* The first send or receive of the group that found no counterpart, and in which a rank waits or waited until it
 * failed; false: there is none. In messages.c. */
bool finding_of_messages(const flight_job *job, uint64_t key, finding *found);

/* Messages of the group that were sent and not received when the recorders were copied; returns how many. */
int finding_of_unreceived(const flight_job *job, uint64_t key, finding *found);

/* Calls `each` once for every group of the job; its key stands in no recorder before. */
void finding_each_group(const flight_job *job,
                        void (*each)(const flight_job *job, const flight *by, uint64_t key, void *argument),
                        void *argument);

#endif
