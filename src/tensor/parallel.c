/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops of operators on the process's pool of threads.
 */
#include "tensor/parallel.h"

#include "base/pool.h"
#include "tensor/process.h"

void tu_parallel(int64_t count, int64_t grain, tu_parallel_body *body, void *context) {
    int threads = count > grain ? tu_process_compute_threads() : 1;
    if (threads > 1)
        tu_pool_run(&(tu_pool_loop){ body, context, count, grain, threads });
    else if (count > 0)
        body(context, 0, count);
}
