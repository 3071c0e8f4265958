/* SPDX-License-Identifier: Apache-2.0
 *
 * What UCX says about its transports.
 */
#ifndef TU_BACKEND_UCX_TRANSPORTS_H
#define TU_BACKEND_UCX_TRANSPORTS_H

#include <stdbool.h>

/* Whether UCX's description of a context or of an endpoint names a transport whose hardware moves bytes to and from
 * another host's memory by itself; `lanes`: such that it uses for that. */
bool tu_ucx_names_hardware(const char *description, bool lanes);

#endif
