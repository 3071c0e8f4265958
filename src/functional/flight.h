/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives in flight: works, and the storages that they write and read.
 */
#ifndef TU_FUNCTIONAL_FLIGHT_H
#define TU_FUNCTIONAL_FLIGHT_H

#include <tutti/functional.h>

#include "tensor/operator.h"

/* Before a collective starts: whether it may. With an error pending, ends the group with its message and returns false.
 * `who` is for messages. A group is required unless group_optional says that nothing is sent. */
bool tu_flight_check(const char *who, tutti_group *group, bool group_optional);

/* The call for one collective: asynchronous, or part of the thread's batch. Follow with tu_flight_begin once it was
 * made. */
void tu_flight_call(tutti_call *call, tutti_work **work);
/* Registers a started work under the storages that it writes and reads (either may be NULL). In a batch the storages
 * are noted, and registered with the batch's work. Takes the work over. */
tutti_status tu_flight_begin(tutti_group *group, tutti_work *work, tu_storage *writes, tu_storage *reads);

/* From begin to end the calls of this thread on the group are noted, and run as one work. */
tutti_status tu_batch_open(tutti_group *group);
tutti_status tu_batch_close(tutti_group *group, bool good);

#endif
