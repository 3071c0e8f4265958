/* SPDX-License-Identifier: Apache-2.0
 *
 * Which transports of UCX move bytes to and from another host's memory in hardware. UCX 1.13 tells the transports of an
 * endpoint in words alone (ucp_ep_print_info), so that is what is read; words that are not understood mean none, and
 * everything goes by messages.
 *
 *     #      resource 0  :  md 0  dev 0  flags -- rc_mlx5/mlx5_0:1
 *     #                 lane[0]:  0:rc_mlx5/mlx5_0:1.0 md[0]   -> md[0]/ib/sysdev[0] rma#0 rma_bw#0 am am_bw#0 wireup
 *
 * Not among them are tcp and ud: UCX emulates remote memory access there, by messages whose receiver checks neither key
 * nor bounds.
 */
#include <ctype.h>
#include <string.h>

#include "transports.h"

static const char *const hardware[] = { "rc_verbs", "rc_mlx5", "dc_mlx5", "gga_mlx5", "ugni_rdma", "srd" };

/* Whether the line, which ends at `end`, has " NAME/" or ":NAME/" in it. */
static bool names(const char *line, const char *end, const char *name) {
    size_t length = strlen(name);
    for (const char *at = line + 1; at + length < end; at++)
        if ((at[-1] == ' ' || at[-1] == ':') && strncmp(at, name, length) == 0 && at[length] == '/')
            return true;
    return false;
}

/* Whether the line says " rma#0" or the like: a lane for puts and gets. */
static bool is_for_rma(const char *line, const char *end) {
    for (const char *at = line; at + 6 <= end; at++)
        if (strncmp(at, " rma#", 5) == 0 && isdigit((unsigned char)at[5]))
            return true;
    return false;
}

bool tu_ucx_names_hardware(const char *description, bool lanes) {
    for (const char *line = description, *end; *line != 0; line = *end != 0 ? end + 1 : end) {
        end = strchr(line, '\n');
        end = end != NULL ? end : line + strlen(line);
        for (size_t i = 0; i < sizeof hardware / sizeof *hardware; i++)
            if (names(line, end, hardware[i]) && (!lanes || is_for_rma(line, end)))
                return true;
    }
    return false;
}
