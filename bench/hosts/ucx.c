/* SPDX-License-Identifier: Apache-2.0
 *
 * What UCX itself takes between two hosts, as a contender of measure.py: two ranks, a worker and an endpoint each, the
 * configuration of plug-in tutti-ucx and messages of the same form and length as Tutti's, and nothing else: no checks,
 * deadlines, locks or windows. An all-reduce swaps the inputs and adds up what comes, out of UCX's buffer, as Tutti
 * does.
 *
 *     RANK=0|1 ADDRESS=a.b.c.d PORT=n ucx FOLDER CPUS
 */
#include <ucp/api/ucp.h>

#include "meet.h"

/* As in src/backend/ucx/network.c. */
#define MESSAGE 7
#define PACKED ((size_t)8 << 10)
#define MOST ((size_t)1 << 20)
#define SLOTS 256 /* messages under way, of the longest vector that is measured, and such that came early */

typedef struct header {
    uint64_t sequence, offset;
    char rest[120]; /* a header of Tutti's has 136 bytes */
} header;

/* A message of a call that this rank has not begun. */
typedef struct kept {
    header header;
    void *data, *parcel;
    size_t bytes;
} kept;

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoint;
static uint64_t sequence; /* of the call */
static const char *mine;
static char *result;
static size_t whole, added;
static int under_way;
static kept early[SLOTS];
static int early_count;

static void check(ucs_status_t status, const char *what) {
    if (status == UCS_OK)
        return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, ucs_status_string(status));
    exit(1);
}

static void take(const header *header, const void *data, size_t bytes) {
    add_up(result + header->offset, mine + header->offset, data, bytes, whole);
    added += bytes;
}

static ucs_status_t arrived(void *argument, const void *its_header, size_t header_bytes, void *data, size_t bytes,
                            const ucp_am_recv_param_t *param) {
    (void)argument;
    header header;
    char *payload = data;
    if (header_bytes == 0) {
        its_header = data;
        payload += sizeof header;
        bytes -= sizeof header;
    }
    memcpy(&header, its_header, sizeof header);
    if (header.sequence == sequence) {
        take(&header, payload, bytes);
        return UCS_OK;
    }
    if (early_count == SLOTS) {
        fprintf(stderr, "rank %d: too many messages came early\n", rank);
        exit(1);
    }
    kept *kept = &early[early_count++];
    bool lasts = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;
    kept->header = header;
    kept->bytes = bytes;
    kept->parcel = lasts ? data : NULL;
    kept->data = payload;
    if (!lasts) {
        kept->data = malloc(bytes);
        memcpy(kept->data, payload, bytes);
    }
    return lasts ? UCS_INPROGRESS : UCS_OK;
}

static void sent(void *request, ucs_status_t status, void *argument) {
    (void)argument;
    check(status, "send");
    under_way--;
    ucp_request_free(request);
}

static void send_message(size_t offset, const void *data, size_t bytes, ucp_dt_iov_t *pieces, header *header) {
    *header = (struct header){ .sequence = sequence, .offset = offset };
    ucp_request_param_t parameters = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = sent,
    };
    void *request;
    if (sizeof *header + bytes < PACKED) {
        pieces[0] = (ucp_dt_iov_t){ .buffer = header, .length = sizeof *header };
        pieces[1] = (ucp_dt_iov_t){ .buffer = (void *)(uintptr_t)data, .length = bytes };
        parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        parameters.datatype = UCP_DATATYPE_IOV;
        request = ucp_am_send_nbx(endpoint, MESSAGE, NULL, 0, pieces, bytes > 0 ? 2 : 1, &parameters);
    } else {
        request = ucp_am_send_nbx(endpoint, MESSAGE, header, sizeof *header, data, bytes, &parameters);
    }
    if (UCS_PTR_IS_ERR(request))
        check(UCS_PTR_STATUS(request), "send");
    under_way += UCS_PTR_IS_PTR(request);
}

/* What came early is of this call: the other rank is at most one ahead. */
static void take_early(void) {
    for (int i = 0; i < early_count; i++) {
        take(&early[i].header, early[i].data, early[i].bytes);
        if (early[i].parcel != NULL)
            ucp_am_data_release(worker, early[i].parcel);
        else
            free(early[i].data);
    }
    early_count = 0;
}

static void swap(const char *in, char *out, size_t bytes) {
    static header headers[SLOTS];
    static ucp_dt_iov_t pieces[SLOTS][2];
    mine = in;
    result = out;
    whole = bytes;
    added = 0;
    sequence++;
    take_early();
    int number = 0;
    size_t at = 0;
    do {
        size_t length = bytes - at < MOST ? bytes - at : MOST;
        send_message(at, in + at, length, pieces[number], &headers[number]);
        number = (number + 1) % SLOTS;
        at += length;
    } while (at < bytes);
    while (added < bytes || under_way > 0)
        ucp_worker_progress(worker);
}

static void peer_barrier(void) {
    float one = 1, two;
    swap((const char *)&one, (char *)&two, sizeof one);
}

static void exchange(int stream, const void *own, size_t bytes, void *other, size_t room, size_t *other_bytes) {
    uint64_t length = bytes, theirs = 0;
    if (write(stream, &length, sizeof length) != sizeof length || write(stream, own, bytes) != (ssize_t)bytes ||
        recv(stream, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs || theirs > room ||
        recv(stream, other, theirs, MSG_WAITALL) != (ssize_t)theirs)
        fail("addresses");
    *other_bytes = theirs;
}

static void open_worker(void) {
    ucp_config_t *config;
    check(ucp_config_read(NULL, NULL, &config), "configuration");
    const char *settings[][2] = { { "TLS", "tcp" },
                                  { "NET_DEVICES", "eth0" },
                                  { "RNDV_THRESH", "inf" },
                                  { "TX_SEG_SIZE", "1152k" },
                                  { "RX_SEG_SIZE", "2304k" },
                                  { "ZCOPY_THRESH", "8k" },
                                  { "KEEPALIVE_INTERVAL", "2s" },
                                  { "MAX_POLL", "1" } };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        (void)ucp_config_modify(config, settings[i][0], settings[i][1]);
    ucp_params_t parameters = { .field_mask = UCP_PARAM_FIELD_FEATURES,
                                .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP };
    check(ucp_init(&parameters, config, &context), "context");
    ucp_config_release(config);
    ucp_worker_params_t thread = { .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                   .thread_mode = UCS_THREAD_MODE_SERIALIZED };
    check(ucp_worker_create(context, &thread, &worker), "worker");
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id = MESSAGE,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = arrived,
    };
    check(ucp_worker_set_am_recv_handler(worker, &handler), "handler");
}

static void failed(void *argument, ucp_ep_h handle, ucs_status_t status) {
    (void)argument, (void)handle;
    if (status != UCS_ERR_CONNECTION_RESET)
        fprintf(stderr, "rank %d: %s\n", rank, ucs_status_string(status));
    exit(0);
}

static void peer_open(int *argc, char ***argv, int *r, int *s) {
    (void)argc, (void)argv;
    int stream = meet(r, s);
    open_worker();
    ucp_address_t *address;
    size_t bytes, theirs;
    char other[4096];
    check(ucp_worker_get_address(worker, &address, &bytes), "address");
    exchange(stream, address, bytes, other, sizeof other, &theirs);
    ucp_worker_release_address(worker, address);
    ucp_ep_params_t parameters = {
        .field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)other,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = { .cb = failed },
    };
    check(ucp_ep_create(worker, &parameters, &endpoint), "endpoint");
    peer_barrier();
}

static void peer_close(void) {
    peer_barrier();
    _exit(0);
}

static void peer_run(peer_operation operation, const void *in, void *out, size_t count) {
    (void)operation;
    swap(in, out, count * sizeof(float));
}

int main(int argc, char **argv) {
    return run_worker(argc, argv);
}
