/* SPDX-License-Identifier: Apache-2.0
 *
 * Which connections of UCX have remote memory access in hardware, by what UCX says of them.
 */
#include "transports.h"
#include "../harness.h"

#define CONTEXT(transport)                                      \
    "#\n# UCP context\n#\n"                                     \
    "#     component 0  :  self\n#     component 4  :  ib\n#\n" \
    "#            md 0  :  component 1  tcp \n#\n"              \
    "#      resource 0  :  md 0  dev 0  flags -- tcp/eth0\n"    \
    "#      resource 1  :  md 1  dev 1  flags -- " transport "\n#\n"
#define ENDPOINT(first, second)                                                  \
    "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n"             \
    "#                 lane[0]:  " first "\n#                 lane[1]:  " second \
    "\n#\n#                am_send: 0..<egr/short>..8185..<rndv>..(inf)\n#\n"    \
    "#                  rma_bw: mds [1] rndv_rkey_size 19\n#\n"
#define TCP "0:tcp/eth0.0 md[0]                -> md[0]/tcp/sysdev[255] am am_bw#0 keepalive wireup"

TEST(a_context_with_such_a_transport_is_known) {
    CHECK(tu_ucx_names_hardware(CONTEXT("rc_mlx5/mlx5_0:1"), false));
    CHECK(tu_ucx_names_hardware(CONTEXT("rc_verbs/rxe0:1"), false));
    CHECK(tu_ucx_names_hardware(CONTEXT("dc_mlx5/mlx5_1:1"), false));
    CHECK(!tu_ucx_names_hardware(CONTEXT("tcp/ib0"), false));          /* IP over a fabric is TCP */
    CHECK(!tu_ucx_names_hardware(CONTEXT("ud_mlx5/mlx5_0:1"), false)); /* messages */
    CHECK(!tu_ucx_names_hardware(CONTEXT("sysv/memory"), false));
    CHECK(!tu_ucx_names_hardware(CONTEXT("src_mlx5/mlx5_0:1"), false)); /* another name that ends alike */
    CHECK(!tu_ucx_names_hardware(CONTEXT("rc_mlx5"), false));
    CHECK(!tu_ucx_names_hardware("", false));
}

TEST(a_connection_counts_where_puts_and_gets_go_by_such_a_transport) {
    CHECK(tu_ucx_names_hardware(
        ENDPOINT("1:rc_mlx5/mlx5_0:1.0 md[1]         -> md[1]/ib/sysdev[0] rma#0 rma_bw#0 am am_bw#0 wireup", TCP),
        true));
    CHECK(tu_ucx_names_hardware(ENDPOINT(TCP, "1:rc_verbs/siw0:1.0 md[1] -> md[1]/ib/sysdev[0] rma#0"), true));
    CHECK(!tu_ucx_names_hardware(ENDPOINT(TCP, TCP), true));
    CHECK(!tu_ucx_names_hardware(
        ENDPOINT("1:rc_mlx5/mlx5_0:1.0 md[1]         -> md[1]/ib/sysdev[0] rma_bw#0 am am_bw#0", TCP " rma#0"), true));
    CHECK(!tu_ucx_names_hardware(ENDPOINT("0:tcp/rc_verbs.0 md[0] -> md[0]/tcp/sysdev[255] rma#0 am", TCP), true));
    CHECK(!tu_ucx_names_hardware("# UCP endpoint, in words that nobody knows\nrma#", true));
}
