/* SPDX-License-Identifier: Apache-2.0
 *
 * The network part on UCX: one worker per rank, an endpoint per peer that is used, one active message for everything.
 *
 * Messages go eagerly and in one piece, never by UCX's rendezvous: its TCP transport would let a peer write to
 * addresses that it names itself. So every byte that arrives is put in its place by libtutti, which looks at bounds.
 * Endpoints are in error mode PEER, so that a dead process or a broken connection is told. Remote memory access is
 * beside that, in direct.c.
 */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "inner.h"

#define MESSAGE 7              /* the number of the active message */
#define SEGMENT "1152k"        /* of UCX's TCP transport: a message with its header fits */
#define AT_ONCE "2304k"        /* that it takes from a socket at once: two of them */
#define MOST ((size_t)1 << 20) /* data of one message: every one is a system call at both ends */
/* Header and data of up to so many bytes go as one piece that UCX copies together and hands to the kernel by send():
 * that is quicker than a list by sendmsg(). UCX takes lists of its own for everything contiguous, so it is given the
 * two as a list, with this as the length from which on it would not copy that. */
#define PACKED ((size_t)8 << 10)
#define PACKED_TEXT "8k"
#define DISCONNECT_TIME 1000000000 /* nanoseconds, at most, for UCX to end the sends of a connection that is cut */

/* ---- what UCX tells ---- */

/* The header comes apart from the data, or packed before it. */
static ucs_status_t arrived(void *argument, const void *header, size_t header_bytes, void *data, size_t bytes,
                            const ucp_am_recv_param_t *param) {
    network *network = argument;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0)
        return UCS_OK; /* nobody of ours sends so: left where it is */
    const unsigned char *payload = data;
    bool lasting = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0 && bytes > 0;
    if (header_bytes == 0) {
        size_t packed = network->events->header_bytes;
        header = data;
        header_bytes = bytes < packed ? bytes : packed;
        payload += header_bytes;
        bytes -= header_bytes;
    }
    bool kept = network->events->arrived(network->owner, header, header_bytes, payload, bytes, lasting ? data : NULL);
    return kept && lasting ? UCS_INPROGRESS : UCS_OK;
}

static void failed(void *argument, ucp_ep_h handle, ucs_status_t status) {
    endpoint *endpoint = argument;
    (void)handle;
    endpoint->broken = true;
    endpoint->network->any_broken = true;
    endpoint->network->events->lost(endpoint->network->owner, endpoint->peer,
                                    endpoint->network->ucx->ucs_status_string(status));
}

static void spare(sending *sending) {
    sending->next = sending->network->spare;
    sending->network->spare = sending;
}

static void insert(network *network, sending *sending) {
    sending->next = network->under_way;
    sending->link = &network->under_way;
    if (sending->next != NULL)
        sending->next->link = &sending->next;
    network->under_way = sending;
}

static void take_out(sending *sending) {
    *sending->link = sending->next;
    if (sending->next != NULL)
        sending->next->link = sending->link;
}

static void tell_sent(sending *sending, bool good) {
    const tu_network_events *events = sending->network->events;
    void *token = sending->token;
    sending->token = NULL;
    if (token != NULL)
        (sending->direct ? events->moved : events->sent)(sending->network->owner, token, good);
}

void tu_ucx_sent(void *request, ucs_status_t status, void *argument) {
    sending *sending = argument;
    tell_sent(sending, status == UCS_OK);
    take_out(sending);
    spare(sending);
    sending->network->ucx->ucp_request_free(request);
}

const char *tu_ucx_begin(network *network, int peer, void *token, bool direct, sending **begun) {
    const endpoint *endpoint = network->endpoints[peer];
    sending *one = network->spare;
    if (endpoint == NULL || endpoint->handle == NULL)
        return "it was closed after an error";
    if (one != NULL)
        network->spare = one->next;
    else if ((one = malloc(sizeof *one)) == NULL)
        return "there was no memory for a message to it";
    one->network = network;
    one->peer = peer;
    one->token = token;
    one->direct = direct;
    *begun = one;
    return NULL;
}

const char *tu_ucx_begun(sending *one, void *request, bool *finished) {
    network *network = one->network;
    *finished = !UCS_PTR_IS_PTR(request);
    if (*finished)
        spare(one);
    else
        insert(network, one);
    return UCS_PTR_IS_ERR(request) ? network->ucx->ucs_status_string(UCS_PTR_STATUS(request)) : NULL;
}

/* ---- opening ---- */

/* The interface that has the address; false: none has. */
static bool interface_of(const char *address, char name[64]) {
    struct ifaddrs *all;
    bool found = false;
    if (address[0] == 0 || getifaddrs(&all) != 0)
        return false;
    for (struct ifaddrs *at = all; at != NULL && !found; at = at->ifa_next) {
        char text[INET6_ADDRSTRLEN] = "";
        if (at->ifa_addr != NULL && at->ifa_addr->sa_family == AF_INET)
            inet_ntop(AF_INET, &((struct sockaddr_in *)(void *)at->ifa_addr)->sin_addr, text, sizeof text);
        else if (at->ifa_addr != NULL && at->ifa_addr->sa_family == AF_INET6)
            inet_ntop(AF_INET6, &((struct sockaddr_in6 *)(void *)at->ifa_addr)->sin6_addr, text, sizeof text);
        found = strcmp(text, address) == 0;
        if (found)
            snprintf(name, 64, "%s", at->ifa_name);
    }
    freeifaddrs(all);
    return found;
}

static void modify(network *network, ucp_config_t *config, const char *name, const char *value) {
    ucs_status_t status = network->ucx->ucp_config_modify(config, name, value);
    if (status != UCS_OK)
        network->host->log(network->world, TUTTI_LOG_INFO, "ucx", "this UCX does not take %s=%s: %s", name, value,
                           network->ucx->ucs_status_string(status));
}

/* By the configuration of this context alone: the environment is the user's, and UCX_ variables of his that are not
 * named here still count. */
static tutti_status configure(network *network, const char *address, ucp_config_t **config) {
    ucs_status_t status = network->ucx->ucp_config_read(NULL, NULL, config);
    if (status != UCS_OK)
        return network->host->error(TUTTI_ERROR_BACKEND,
                                    "UCX cannot read its configuration: %s; look at UCX_ variables",
                                    network->ucx->ucs_status_string(status));
    char interface[64];
    if (getenv("UCX_TLS") == NULL)
        modify(network, *config, "TLS", "tcp"); /* inside a host there is shared memory */
    if (getenv("UCX_NET_DEVICES") == NULL && interface_of(address, interface))
        modify(network, *config, "NET_DEVICES", interface);
    modify(network, *config, "RNDV_THRESH", "inf");
    modify(network, *config, "TX_SEG_SIZE", SEGMENT);
    modify(network, *config, "RX_SEG_SIZE", AT_ONCE);
    modify(network, *config, "ZCOPY_THRESH", PACKED_TEXT);
    modify(network, *config, "KEEPALIVE_INTERVAL", "2s");
    /* One event of the sockets at a time. Of several at once, the first may close the connection of the second, and UCX
     * 1.13 ends the process by an assertion when it comes to that. */
    if (getenv("UCX_TCP_MAX_POLL") == NULL)
        modify(network, *config, "MAX_POLL", "1");
    return TUTTI_OK;
}

static ucs_status_t make_context(network *network, const ucp_config_t *config) {
    ucp_params_t parameters = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP | tu_ucx_direct_features(network),
        .estimated_num_eps = (size_t)network->peer_count,
    };
    return network->ucx->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &parameters, config, &network->context);
}

static tutti_status open_context(network *network, const char *address) {
    ucp_config_t *config;
    tutti_status failure = configure(network, address, &config);
    if (failure != TUTTI_OK)
        return failure;
    ucs_status_t status = make_context(network, config);
    if (status == UCS_OK && tu_ucx_direct_look(network)) {
        network->ucx->ucp_cleanup(network->context);
        network->context = NULL;
        status = make_context(network, config);
    }
    network->ucx->ucp_config_release(config);
    if (status == UCS_OK)
        return TUTTI_OK;
    char interface[64];
    bool chosen = getenv("UCX_NET_DEVICES") == NULL && interface_of(address, interface);
    return network->host->error(TUTTI_ERROR_BACKEND,
                                "UCX finds no way to other hosts%s%s%s: %s; TUTTI_INTERFACE names a network "
                                "interface, `ucx_info -d` lists what there is",
                                chosen ? " by the interface " : "", chosen ? interface : "",
                                chosen ? " (does `ip link` say that it is up?)" : "",
                                network->ucx->ucs_status_string(status));
}

static tutti_status open_worker(network *network) {
    ucp_worker_params_t parameters = { .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                       .thread_mode = UCS_THREAD_MODE_SERIALIZED };
    ucs_status_t status = network->ucx->ucp_worker_create(network->context, &parameters, &network->worker);
    if (status == UCS_OK) {
        ucp_worker_attr_t attributes = { .field_mask = UCP_WORKER_ATTR_FIELD_THREAD_MODE };
        status = network->ucx->ucp_worker_query(network->worker, &attributes);
        if (status == UCS_OK && attributes.thread_mode < UCS_THREAD_MODE_SERIALIZED)
            return network->host->error(
                TUTTI_ERROR_BACKEND, "this UCX lets one thread alone use a worker; it must be built with --enable-mt");
    }
    if (status == UCS_OK)
        status = network->ucx->ucp_worker_get_efd(network->worker, &network->descriptor);
    if (status == UCS_OK)
        status = network->ucx->ucp_worker_get_address(network->worker, &network->address, &network->address_bytes);
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                      UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id = MESSAGE,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = arrived,
        .arg = network,
    };
    if (status == UCS_OK)
        status = network->ucx->ucp_worker_set_am_recv_handler(network->worker, &handler);
    if (status != UCS_OK)
        return network->host->error(TUTTI_ERROR_BACKEND, "UCX cannot make a worker: %s",
                                    network->ucx->ucs_status_string(status));
    if (network->address_bytes > TU_NETWORK_ADDRESS_BYTES)
        return network->host->error(
            TUTTI_ERROR_LIMIT,
            "the UCX address of this rank has %zu bytes, more than %d: choose fewer interfaces by "
            "TUTTI_INTERFACE or UCX_NET_DEVICES",
            network->address_bytes, TU_NETWORK_ADDRESS_BYTES);
    return TUTTI_OK;
}

static void end(network *network) {
    for (int peer = 0; peer < network->peer_count && network->endpoints != NULL; peer++)
        free(network->endpoints[peer]);
    if (network->address != NULL)
        network->ucx->ucp_worker_release_address(network->worker, network->address);
    if (network->worker != NULL)
        network->ucx->ucp_worker_destroy(network->worker);
    for (sending *next; network->under_way != NULL; network->under_way = next) { /* that UCX has not told by now */
        next = network->under_way->next;
        tell_sent(network->under_way, false);
        free(network->under_way);
    }
    for (sending *next; network->spare != NULL; network->spare = next) {
        next = network->spare->next;
        free(network->spare);
    }
    if (network->context != NULL)
        network->ucx->ucp_cleanup(network->context);
    free(network->endpoints);
    free(network);
}

static tutti_status network_open(const tu_backend_host *host, tutti_world *world, const char *address, int peer_count,
                                 const tu_network_events *events, void *owner, void **out) {
    const tu_ucx_library *ucx;
    tutti_status status = tu_ucx_load(host, &ucx);
    if (status != TUTTI_OK)
        return status;
    network *made = calloc(1, sizeof *made);
    if (made != NULL)
        *made = (network){ .host = host,
                           .ucx = ucx,
                           .world = world,
                           .events = events,
                           .owner = owner,
                           .most = MOST,
                           .peer_count = peer_count,
                           .endpoints = calloc((size_t)peer_count, sizeof *made->endpoints) };
    if (made == NULL || made->endpoints == NULL) {
        free(made);
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for the connections to %d ranks", peer_count);
    }
    status = tu_ucx_direct_choose(made);
    if (status == TUTTI_OK)
        status = open_context(made, address);
    if (status == TUTTI_OK)
        status = open_worker(made);
    if (status != TUTTI_OK) {
        end(made);
        return status;
    }
    *out = made;
    return TUTTI_OK;
}

/* ---- endpoints ---- */

static tutti_status network_connect(void *argument, int peer, const void *address, size_t bytes) {
    network *network = argument;
    if (network->endpoints[peer] != NULL)
        return TUTTI_OK;
    endpoint *made = calloc(1, sizeof *made);
    if (made == NULL)
        return network->host->error(TUTTI_ERROR_MEMORY, "out of memory for the connection to rank %d", peer);
    *made = (endpoint){ .network = network, .peer = peer };
    (void)bytes;
    ucp_ep_params_t parameters = {
        .field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = { .cb = failed, .arg = made },
    };
    ucs_status_t status = network->ucx->ucp_ep_create(network->worker, &parameters, &made->handle);
    if (status != UCS_OK) {
        free(made);
        return network->host->error(TUTTI_ERROR_NETWORK, "UCX finds no way to world rank %d: %s", peer,
                                    network->ucx->ucs_status_string(status));
    }
    network->endpoints[peer] = made;
    tu_ucx_direct_connected(made);
    return TUTTI_OK;
}

/* Starts the close; nobody waits for it but the end of the network. */
static void close_endpoint(endpoint *endpoint, bool force, void **request) {
    network *network = endpoint->network;
    ucp_request_param_t parameters = { .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0 };
    ucp_ep_h handle = endpoint->handle;
    endpoint->handle = NULL;
    if (handle == NULL)
        return;
    void *made = network->ucx->ucp_ep_close_nbx(handle, &parameters);
    if (UCS_PTR_IS_PTR(made) && request != NULL)
        *request = made;
    else if (UCS_PTR_IS_PTR(made))
        network->ucx->ucp_request_free(made);
}

static bool sends_to(const network *network, int peer) {
    for (const sending *sending = network->under_way; sending != NULL; sending = sending->next)
        if (sending->peer == peer && sending->token != NULL)
            return true;
    return false;
}

static bool network_progress(void *argument);

/* UCX ends the sends of an endpoint that is closed by force within a moment. One that it should forget is told all the
 * same, so that nobody waits for it. */
static void network_disconnect(void *argument, int peer) {
    network *network = argument;
    int64_t deadline = network->host->now() + DISCONNECT_TIME;
    if (network->endpoints[peer] != NULL)
        close_endpoint(network->endpoints[peer], true, NULL);
    while (sends_to(network, peer) && network->host->now() < deadline)
        if (!network_progress(network))
            nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL);
    for (sending *sending = network->under_way; sending != NULL; sending = sending->next)
        if (sending->peer == peer)
            tell_sent(sending, false);
}

static void close_broken(network *network) {
    network->any_broken = false;
    for (int peer = 0; peer < network->peer_count; peer++)
        if (network->endpoints[peer] != NULL && network->endpoints[peer]->broken)
            close_endpoint(network->endpoints[peer], true, NULL);
}

/* ---- messages ---- */

static const char *network_send(void *argument, int peer, const void *header, size_t header_bytes, const void *data,
                                size_t bytes, void *token, bool *finished) {
    network *network = argument;
    sending *one;
    *finished = true;
    const char *why = tu_ucx_begin(network, peer, token, false, &one);
    if (why != NULL)
        return why;
    ucp_ep_h handle = network->endpoints[peer]->handle;
    memcpy(one->header, header, header_bytes);
    ucp_request_param_t parameters = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = tu_ucx_sent,
        .user_data = one,
    };
    void *request;
    if (header_bytes + bytes < PACKED) {
        one->pieces[0] = (ucp_dt_iov_t){ .buffer = one->header, .length = header_bytes };
        one->pieces[1] = (ucp_dt_iov_t){ .buffer = (void *)(uintptr_t)data, .length = bytes };
        parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        parameters.datatype = UCP_DATATYPE_IOV;
        request = network->ucx->ucp_am_send_nbx(handle, MESSAGE, NULL, 0, one->pieces, bytes > 0 ? 2 : 1, &parameters);
    } else {
        request = network->ucx->ucp_am_send_nbx(handle, MESSAGE, one->header, header_bytes, data, bytes, &parameters);
    }
    return tu_ucx_begun(one, request, finished);
}

static bool network_progress(void *argument) {
    network *network = argument;
    bool any = network->ucx->ucp_worker_progress(network->worker) != 0;
    if (network->any_broken)
        close_broken(network);
    return any;
}

static bool network_arm(void *argument) {
    network *network = argument;
    return network->ucx->ucp_worker_arm(network->worker) == UCS_OK;
}

static void network_give_back(void *argument, void *parcel) {
    network *network = argument;
    network->ucx->ucp_am_data_release(network->worker, parcel);
}

static const void *network_address(void *argument, size_t *bytes) {
    network *network = argument;
    *bytes = network->address_bytes;
    return network->address;
}

static size_t network_most(void *argument) {
    network *network = argument;
    return network->most;
}

static int network_descriptor(void *argument) {
    network *network = argument;
    return network->descriptor;
}

/* ---- closing ---- */

/* Progresses until the request is over or the time is. */
static void finish(network *network, void *request, int64_t deadline) {
    while (UCS_PTR_IS_PTR(request) && network->ucx->ucp_request_check_status(request) == UCS_INPROGRESS &&
           network->host->now() < deadline)
        if (!network_progress(network))
            nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL);
    if (UCS_PTR_IS_PTR(request))
        network->ucx->ucp_request_free(request);
}

static void network_close(void *argument, int64_t deadline) {
    network *network = argument;
    ucp_request_param_t nothing = { 0 };
    finish(network, network->ucx->ucp_worker_flush_nbx(network->worker, &nothing), deadline);
    for (int peer = 0; peer < network->peer_count; peer++) {
        void *request = NULL;
        if (network->endpoints[peer] == NULL)
            continue;
        close_endpoint(network->endpoints[peer], true, &request);
        finish(network, request, deadline);
    }
    end(network);
}

static const tu_network_part network_part = {
    .size = sizeof network_part,
    .open = network_open,
    .close = network_close,
    .address = network_address,
    .most = network_most,
    .descriptor = network_descriptor,
    .connect = network_connect,
    .disconnect = network_disconnect,
    .send = network_send,
    .progress = network_progress,
    .arm = network_arm,
    .give_back = network_give_back,
    .direct = tu_ucx_direct,
    .share = tu_ucx_share,
    .unshare = tu_ucx_unshare,
    .take_key = tu_ucx_take_key,
    .drop_key = tu_ucx_drop_key,
    .write = tu_ucx_write,
    .read = tu_ucx_read,
    .flush = tu_ucx_flush,
};

/* ---- the table ---- */

static tutti_status probe(const tu_backend_host *host, int *device_count) {
    const tu_ucx_library *ucx;
    *device_count = 1; /* the network */
    return tu_ucx_load(host, &ucx);
}

static void describe(const tu_backend_host *host, char *text, size_t bytes) {
    const tu_ucx_library *ucx;
    unsigned major = 0, minor = 0, release = 0;
    text[0] = 0;
    if (tu_ucx_load(host, &ucx) == TUTTI_OK)
        ucx->ucp_get_version(&major, &minor, &release);
    if (major > 0)
        snprintf(text, bytes, "UCX %u.%u.%u", major, minor, release);
}

static tutti_status open_backend(const tu_backend_host *host, tutti_world *world, void **state) {
    (void)world;
    const tu_ucx_library *ucx;
    tutti_status status = tu_ucx_load(host, &ucx);
    *state = (void *)(uintptr_t)host; /* nothing of its own: a world's network is opened by itself */
    return status;
}

static void close_backend(void *state) {
    (void)state;
}

static bool can(void *state, tu_ability ability) {
    (void)state;
    return ability == TU_ABILITY_SPANS_HOSTS;
}

__attribute__((visibility("default"))) const tu_backend tutti_backend_v2 = {
    .size = sizeof(tu_backend),
    .version = TU_BACKEND_VERSION,
    .name = "ucx",
    .device = TUTTI_CPU,
    .probe = probe,
    .open = open_backend,
    .close = close_backend,
    .can = can,
    .network = &network_part,
    .describe = describe,
};
