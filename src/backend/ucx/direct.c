/* SPDX-License-Identifier: Apache-2.0
 *
 * Remote memory access on UCX: memory that is shared by a key, and puts, gets and flushes of an endpoint.
 *
 * A fabric's hardware looks at key and bounds itself. UCX's emulation over TCP looks at neither, so it is used only
 * where TUTTI_RMA=on asks for it; and what libtutti asks for, it has checked. A context that was asked for the feature
 * has the emulation's receiver in it, whoever uses it: so a context is asked for it when it is known to have hardware.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inner.h"
#include "transports.h"

tutti_status tu_ucx_direct_choose(network *network) {
    const char *setting = network->host->setting(network->world, "TUTTI_RMA");
    if (setting == NULL || setting[0] == 0 || strcmp(setting, "auto") == 0)
        network->mode = TU_UCX_AUTO;
    else if (strcmp(setting, "on") == 0)
        network->mode = TU_UCX_ON;
    else if (strcmp(setting, "off") == 0)
        network->mode = TU_UCX_OFF;
    else
        return network->host->error(TUTTI_ERROR_ARGUMENT, "TUTTI_RMA is %s: it may be auto, on or off", setting);
    network->offers = network->mode == TU_UCX_ON;
    return TUTTI_OK;
}

uint64_t tu_ucx_direct_features(const network *network) {
    return network->offers ? UCP_FEATURE_RMA : 0;
}

/* What UCX says of a context or an endpoint. */
static bool describes_hardware(const network *network, ucp_ep_h endpoint) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (stream == NULL)
        return false;
    if (endpoint != NULL)
        network->ucx->ucp_ep_print_info(endpoint, stream);
    else
        network->ucx->ucp_context_print_info(network->context, stream);
    bool found = fclose(stream) == 0 && text != NULL && tu_ucx_names_hardware(text, endpoint != NULL);
    free(text);
    return found;
}

/* Where nobody has said otherwise the transport is TCP, and there is nothing to look for. */
bool tu_ucx_direct_look(network *network) {
    bool looks = network->mode == TU_UCX_AUTO && getenv("UCX_TLS") != NULL;
    network->offers = network->offers || (looks && describes_hardware(network, NULL));
    if (!looks && network->mode != TU_UCX_ON)
        return false;
    network->host->log(network->world, TUTTI_LOG_INFO, "ucx", "puts and gets between hosts %s",
                       network->mode == TU_UCX_ON ? "go by remote memory access, emulated or not (TUTTI_RMA=on)"
                       : network->offers          ? "go by remote memory access where a connection has it"
                                                  : "go by messages: no transport has remote memory access");
    return looks && network->offers;
}

void tu_ucx_direct_connected(endpoint *endpoint) {
    const network *network = endpoint->network;
    endpoint->direct = network->offers && (network->mode == TU_UCX_ON || describes_hardware(network, endpoint->handle));
}

bool tu_ucx_direct(void *argument, int peer) {
    const network *network = argument;
    if (peer < 0)
        return network->offers;
    return network->endpoints[peer] != NULL && network->endpoints[peer]->direct;
}

/* ---- keys ---- */

static tutti_status pack(network *network, ucp_mem_h region, void *key, size_t *key_bytes) {
    void *packed;
    ucs_status_t status = network->ucx->ucp_rkey_pack(network->context, region, &packed, key_bytes);
    if (status != UCS_OK)
        return network->host->error(TUTTI_ERROR_BACKEND, "UCX makes no key to a block: %s",
                                    network->ucx->ucs_status_string(status));
    bool fits = *key_bytes <= TU_NETWORK_KEY_BYTES;
    if (fits)
        memcpy(key, packed, *key_bytes);
    network->ucx->ucp_rkey_buffer_release(packed);
    return fits ? TUTTI_OK
                : network->host->error(TUTTI_ERROR_LIMIT,
                                       "UCX's key to a block has %zu bytes, more than %d: choose fewer devices by "
                                       "UCX_NET_DEVICES",
                                       *key_bytes, TU_NETWORK_KEY_BYTES);
}

tutti_status tu_ucx_share(void *argument, void *data, size_t bytes, void **region, void *key, size_t *key_bytes) {
    network *network = argument;
    ucp_mem_map_params_t parameters = { .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                        .address = data,
                                        .length = bytes };
    ucp_mem_h made;
    ucs_status_t status = network->ucx->ucp_mem_map(network->context, &parameters, &made);
    if (status != UCS_OK)
        return network->host->error(TUTTI_ERROR_MEMORY,
                                    "UCX cannot register a block of %zu bytes for remote memory access: %s; look at "
                                    "`ulimit -l`, or set TUTTI_RMA=off",
                                    bytes, network->ucx->ucs_status_string(status));
    tutti_status failure = pack(network, made, key, key_bytes);
    if (failure != TUTTI_OK)
        (void)network->ucx->ucp_mem_unmap(network->context, made);
    else
        *region = made;
    return failure;
}

void tu_ucx_unshare(void *argument, void *region) {
    network *network = argument;
    ucs_status_t status = network->ucx->ucp_mem_unmap(network->context, region);
    if (status != UCS_OK)
        network->host->log(network->world, TUTTI_LOG_WARN, "ucx", "UCX keeps a block registered: %s",
                           network->ucx->ucs_status_string(status));
}

const char *tu_ucx_take_key(void *argument, int peer, const void *key, void **taken) {
    network *network = argument;
    ucp_rkey_h made;
    if (network->endpoints[peer] == NULL || network->endpoints[peer]->handle == NULL)
        return "there is no connection to it";
    ucs_status_t status = network->ucx->ucp_ep_rkey_unpack(network->endpoints[peer]->handle, key, &made);
    if (status == UCS_OK)
        *taken = made;
    return status == UCS_OK ? NULL : network->ucx->ucs_status_string(status);
}

void tu_ucx_drop_key(void *argument, void *taken) {
    network *network = argument;
    network->ucx->ucp_rkey_destroy(taken);
}

/* ---- bytes ---- */

static const ucp_request_param_t told = { .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                          .cb.send = tu_ucx_sent };

const char *tu_ucx_write(void *argument, int peer, void *key, uint64_t address, const void *from, size_t bytes,
                         void *token, bool *finished) {
    network *network = argument;
    sending *one;
    *finished = true;
    const char *why = tu_ucx_begin(network, peer, token, true, &one);
    if (why != NULL)
        return why;
    (void)network->ucx->ucp_worker_fence(network->worker); /* after the writes before it */
    ucp_request_param_t parameters = told;
    parameters.user_data = one;
    return tu_ucx_begun(
        one, network->ucx->ucp_put_nbx(network->endpoints[peer]->handle, from, bytes, address, key, &parameters),
        finished);
}

const char *tu_ucx_read(void *argument, int peer, void *key, uint64_t address, void *to, size_t bytes, void *token,
                        bool *finished) {
    network *network = argument;
    sending *one;
    *finished = true;
    const char *why = tu_ucx_begin(network, peer, token, true, &one);
    if (why != NULL)
        return why;
    ucp_request_param_t parameters = told;
    parameters.user_data = one;
    return tu_ucx_begun(
        one, network->ucx->ucp_get_nbx(network->endpoints[peer]->handle, to, bytes, address, key, &parameters),
        finished);
}

const char *tu_ucx_flush(void *argument, int peer, void *token, bool *finished) {
    network *network = argument;
    sending *one;
    *finished = true;
    const char *why = tu_ucx_begin(network, peer, token, true, &one);
    if (why != NULL)
        return why;
    ucp_request_param_t parameters = told;
    parameters.user_data = one;
    return tu_ucx_begun(one, network->ucx->ucp_ep_flush_nbx(network->endpoints[peer]->handle, &parameters), finished);
}
