/* SPDX-License-Identifier: Apache-2.0
 *
 * All or none: a rank that cannot go on tells the others why, who would wait for it until their deadline else.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"

typedef struct outcome {
    int32_t status;
    char words[252];
} outcome;

tutti_status tu_cuda_agree(const tu_backend_host *host, tutti_group *group, const char *purpose, int64_t deadline,
                           tutti_status own) {
    int size = host->group_size(group);
    outcome mine, *all = calloc((size_t)size, sizeof *all);
    if (all == NULL && own == TUTTI_OK)
        own = host->error(TUTTI_ERROR_MEMORY, "out of memory for a group of %d ranks", size);
    mine = (outcome){ .status = (int32_t)own };
    if (own != TUTTI_OK)
        snprintf(mine.words, sizeof mine.words, "%s", host->error_message());
    tutti_status met = host->exchange(group, purpose, &mine, sizeof mine, -1, deadline, all, NULL);
    if (met != TUTTI_OK)
        host->group_end(group); /* who comes out of it alone is out of step with the others, who must hear of it */
    for (int i = 0; met == TUTTI_OK && all != NULL && i < size; i++) {
        if (all[i].status == TUTTI_OK)
            continue;
        met = host->error((tutti_status)all[i].status, "member %d: %.251s", i, all[i].words);
        host->error_at_fault(i);
    }
    free(all);
    return own != TUTTI_OK ? host->error(own, "%.251s", mine.words) : met;
}
