/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a store by the text that TUTTI_STORE holds.
 */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/settings.h"
#include "store/store.h"

/* "host:port" or "[host]:port" behind "tcp://". */
static tutti_status open_tcp(const char *url, const tutti_tcp_store_options *options, tutti_store **store) {
    char host[256];
    int64_t port;
    const char *begin = url + strlen("tcp://"), *colon = strrchr(begin, ':');
    if (colon == NULL || colon[1] == 0 || (begin[0] == '[' && (colon == begin || colon[-1] != ']')))
        return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\": port number missing; write tcp://host:port", url);
    bool brackets = begin[0] == '[';
    size_t length = (size_t)(colon - begin) - (brackets ? 2 : 0);
    if (length >= sizeof host)
        return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\": the host is longer than %zu bytes", url, sizeof host - 1);
    memcpy(host, begin + brackets, length);
    host[length] = 0;
    if (tu_parse_integer(colon + 1, &port) != TUTTI_OK || port < 0 || port > 65535)
        return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\": the port is not a number in 0..65535", url);
    return tutti_store_open_tcp(host, (int)port, options, store);
}

static tutti_status open_file(const char *url, const tutti_tcp_store_options *options, tutti_store **store) {
    tutti_tcp_store_options full = TUTTI_TCP_STORE_OPTIONS_INIT;
    tutti_status status = tu_options_copy("tutti_tcp_store_options", options, &full, sizeof full);
    if (status != TUTTI_OK)
        return status;
    const char *path = url + strlen("file://");
    if (strchr(path, '?') != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "\"%s\": a store takes no query; rank and world_size belong into tutti_world_options", url);
    if (path[0] != '/')
        return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\": path missing; write file:///path", url);
    tutti_file_store_options file = TUTTI_FILE_STORE_OPTIONS_INIT;
    file.timeout_ns = full.timeout_ns;
    file.workers = full.workers;
    return tutti_store_open_file(path, &file, store);
}

tutti_status tutti_store_open_url(const char *url, const tutti_tcp_store_options *options, tutti_store **store) {
    if (url == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store open_url: the URL is NULL");
    if (strncmp(url, "unix:", 5) == 0)
        return tutti_store_open_tcp(url, 0, options, store);
    if (strncmp(url, "tcp://", 6) == 0)
        return open_tcp(url, options, store);
    if (strncmp(url, "file://", 7) == 0)
        return open_file(url, options, store);
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "No rendezvous handler for \"%s\": a store is unix:@name, tcp://host:port or file:///path", url);
}
