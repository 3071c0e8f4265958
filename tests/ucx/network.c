/* SPDX-License-Identifier: Apache-2.0
 *
 * What the plug-in asks UCX for: a context that was asked for remote memory access takes what any peer writes, over TCP
 * too, so only one that has a fabric is. UCX is the real one; what it says of itself is replaced where there should be
 * a fabric.
 */
#include <stdlib.h>
#include <string.h>

#include "../harness.h"
#include "base/clock.h"
#include "inner.h"

extern const tu_backend tutti_backend_v2;
extern const tu_backend_host tu_backend_host_table;

static tu_ucx_library real;
static const char *setting;
static uint64_t asked[4]; /* features of each context */
static int made, ended;

static ucs_status_t note_features(unsigned major, unsigned minor, const ucp_params_t *parameters,
                                  const ucp_config_t *config, ucp_context_h *context) {
    CHECK(made < 4);
    asked[made++] = parameters->features;
    return real.ucp_init_version(major, minor, parameters, config, context);
}

static void note_end(ucp_context_h context) {
    ended++;
    real.ucp_cleanup(context);
}

static void describe_fabric(const ucp_context_h context, FILE *stream) {
    (void)context;
    fputs("#      resource 0  :  md 0  dev 0  flags -- rc_mlx5/mlx5_0:1\n", stream);
}

static const char *say_setting(tutti_world *world, const char *name) {
    (void)world;
    return strcmp(name, "TUTTI_RMA") == 0 ? setting : "";
}

static void say_nothing(tutti_world *world, tutti_log_level level, const char *backend, const char *format, ...) {
    (void)world, (void)level, (void)backend, (void)format;
}

/* Opens a network and closes it: what memory access was asked for in the end, and whether it is offered. */
static bool open_with(const char *rma, const char *transports, bool fabric, bool *offers) {
    static tu_backend_host host;
    const tu_ucx_library *library;
    const tu_network_part *part = tutti_backend_v2.network;
    host = tu_backend_host_table;
    host.setting = say_setting;
    host.log = say_nothing;
    if (tu_ucx_load(&host, &library) != TUTTI_OK)
        SKIP("libucp cannot be loaded");
    if (real.ucp_init_version == NULL)
        real = *library;
    tu_ucx_library *noted = (tu_ucx_library *)(uintptr_t)library;
    noted->ucp_init_version = note_features;
    noted->ucp_cleanup = note_end;
    noted->ucp_context_print_info = fabric ? describe_fabric : real.ucp_context_print_info;
    setting = rma;
    made = ended = 0;
    if (transports != NULL)
        setenv("UCX_TLS", transports, 1);
    else
        unsetenv("UCX_TLS");
    static const tu_network_events events = { .header_bytes = 8 };
    void *network;
    CHECK_OK(part->open(&host, NULL, "", 2, &events, NULL, &network));
    *offers = part->direct(network, -1);
    part->close(network, tu_deadline(TU_SECOND));
    unsetenv("UCX_TLS");
    CHECK_EQ(made, ended);
    return (asked[made - 1] & UCP_FEATURE_RMA) != 0;
}

TEST(a_context_without_a_fabric_is_not_asked_for_remote_memory_access) {
    bool offers;
    CHECK(!open_with("auto", "tcp", false, &offers) && !offers);
    CHECK_EQ(made, 1);
    CHECK(!open_with("auto", NULL, false, &offers) && !offers);
    CHECK(!open_with("", "tcp,self", false, &offers) && !offers);
    CHECK(!open_with("off", "tcp", true, &offers) && !offers);
    CHECK(!open_with("auto", NULL, true, &offers) && !offers); /* nobody has named it, so it is not used */
    CHECK_EQ(made, 1);
}

TEST(a_context_with_one_is_made_anew_with_it) {
    bool offers;
    CHECK(open_with("auto", "tcp", true, &offers) && offers);
    CHECK_EQ(made, 2);
    CHECK((asked[0] & UCP_FEATURE_RMA) == 0);
    CHECK_EQ(asked[0] | UCP_FEATURE_RMA, asked[1]);
}

TEST(who_insists_has_it_emulated) {
    bool offers;
    CHECK(open_with("on", "tcp", false, &offers) && offers);
    CHECK(open_with("on", NULL, false, &offers) && offers);
    CHECK_EQ(made, 1);
}
